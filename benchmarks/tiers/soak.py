"""Random steps over tiers that fail, many more than a test takes; the seed of a failure is printed.

    python benchmarks/tiers/soak.py [--steps 10000000] [--minutes 12] [--kind disk] [--seed 7]

With --seed it takes the steps of that seed alone, as many as --steps says. Otherwise seed follows
seed, in as many processes as there are processors, for at most --minutes. The exit code is 1
where a step was wrong, and where the time was too short for all steps.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from kvtide.device import CPUDevice

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from tier.simulation import KINDS, walk

_STEPS_A_SEED = 10_000
# Files take longer than memory.
_SHARES = {"memory": 0.94, "disk": 0.02, "mooncake": 0.02, "disk over mooncake": 0.02}


def take(step_count: int, job: tuple[str, int]) -> tuple[str, dict[str, int], str]:
    """Takes the steps of a seed; gives the outcomes, and what was wrong."""
    logging.disable(logging.WARNING)  # they are many
    kind, seed = job
    with (
        closing(CPUDevice(lanes=1)) as device,
        tempfile.TemporaryDirectory(prefix="kvtide-soak-") as folder,
    ):
        try:
            return kind, walk(kind, seed, step_count, device, Path(folder) / "tier"), ""
        except AssertionError:
            return kind, {}, traceback.format_exc()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000_000)
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    if options.seed is not None:
        kind, outcomes, wrong = take(options.steps, (options.kind or "memory", options.seed))
        print(wrong or f"{kind}, seed {options.seed}: {outcomes}")
        return 1 if wrong else 0
    shares = {options.kind: 1.0} if options.kind else _SHARES
    first = random.SystemRandom().randrange(1 << 30)
    jobs = [
        (kind, first + number)
        for kind, share in shares.items()
        for number in range(round(share * options.steps / _STEPS_A_SEED))
    ]
    random.Random(first).shuffle(jobs)
    started, found, failures, done = time.monotonic(), Counter[str](), 0, 0
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as workers:
        for kind, outcomes, wrong in workers.map(partial(take, _STEPS_A_SEED), jobs, chunksize=2):
            failures, done = failures + bool(wrong), done + 1
            print(wrong, end="", flush=True)
            found.update({f"{kind}: {name}": count for name, count in outcomes.items()})
            if time.monotonic() - started > 60 * options.minutes:
                workers.shutdown(cancel_futures=True)
                break
    seconds = time.monotonic() - started
    print(f"{done * _STEPS_A_SEED:,} steps in {seconds:.0f} s: {dict(found)}")
    print(f"seeds from {first} on; with {failures} of them something was wrong")
    if done < len(jobs):
        print(f"{done} of {len(jobs)} seeds; give it more than --minutes {options.minutes}")
    return 1 if failures or done < len(jobs) else 0


if __name__ == "__main__":
    sys.exit(main())
