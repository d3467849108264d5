"""Round trips of the NPU's pools on a simulated NPU. Run this as a script.

`python simulated_npu.py SCHEDULE ...`, such as `lazy` or `random:1`, prints a line of JSON for each
schedule and case: the schedule, the case's name, the result of SGLang alone, the result of kvtide,
and what is wrong with it.
"""

from __future__ import annotations

import json
import multiprocessing
import sys

# SGLang is imported first: with an NPU in torch it would look for an NPU's kernels.
from kvtide.cli.simulated import simulate
from kvtide.plugin.sglang.cases import ascend
from kvtide.plugin.sglang.cases.round_trips import KvtideWay, Way, round_trip


def run(schedule: str) -> None:
    """Runs all cases in a schedule, named as for `kvtide --schedule`; the NPU stays installed."""
    simulate("npu", schedule)
    for case in ascend.cases("npu"):
        alone, through = round_trip(case, Way()), round_trip(case, KvtideWay())
        line = json.dumps([schedule, case.name, alone.verdict, through.verdict, through.detail])
        sys.stdout.write(line + "\n")


def run_each(schedules: list[str]) -> int:
    """Runs each schedule in its own process, and returns how many of them failed."""
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=run, args=(schedule,)) for schedule in schedules]
    for process in processes:
        process.start()
        process.join()
    return sum(process.exitcode != 0 for process in processes)


if __name__ == "__main__":
    sys.exit(run_each(sys.argv[1:]))
