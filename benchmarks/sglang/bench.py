"""How fast does a request leave SGLang's pools and come back: by SGLang's own methods, by kvtide?

Both take turns within each round, on the same pool, slots and tokens. Each turn lasts 30 ms, and
its last move is measured. The output has medians over the rounds, wall time and CPU time, of saving
and of loading. kvtide seals what it saves and checks it before it writes; SGLang does neither.
SGLang's environment runs this script (`make test-sglang` makes it):

  cd engines/sglang && SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=stand_ins \\
    ../../.venv-sglang/bin/python ../../benchmarks/sglang/bench.py [--json]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.runtime_context import get_parallel

from kvtide.arena import HostArena
from kvtide.device import open_device
from kvtide.machine import machine_facts
from kvtide.measure.timing import Timing, median_of, timed
from kvtide.plugin.sglang.pools.describe import describe
from kvtide.plugin.sglang.pools.subject import Subject
from kvtide.tide import Tide
from kvtide.transfer import chunk_bytes_for

ON_CPU: Mapping[str, Any] = {"device": "cpu", "enable_memory_saver": False}
SLOTS = 8192
LIMIT_BYTES = 1 << 30
WARM_UP_S = 0.03


Times = dict[str, list[Timing]]
"""The timings of each move, by its name."""


@dataclass
class Subjects:
    """A pool with a request's rows in it."""

    pool: Any
    page_size: int
    rows: Mapping[str, int] = field(default_factory=dict)


def mha() -> Subjects:
    """Makes 16 layers of 8 heads of 128 in bfloat16: 64 KiB a token."""
    pool = memory_pool.MHATokenToKVPool(
        size=SLOTS, page_size=16, dtype=torch.bfloat16, head_num=8, head_dim=128, layer_num=16,
        **ON_CPU,
    )  # fmt: skip
    return Subjects(pool, 16)


def mha_of_slots() -> Subjects:
    """Makes the same pool in pages of one slot, which are handed out in random order."""
    pool = memory_pool.MHATokenToKVPool(
        size=SLOTS, page_size=1, dtype=torch.bfloat16, head_num=8, head_dim=128, layer_num=16,
        **ON_CPU,
    )  # fmt: skip
    return Subjects(pool, 1)


def mla() -> Subjects:
    """Makes 27 layers of 512 + 64 in bfloat16, like DeepSeek-V2-Lite: 30 KiB a token."""
    pool = memory_pool.MLATokenToKVPool(
        size=SLOTS, page_size=64, dtype=torch.bfloat16, kv_lora_rank=512, qk_rope_head_dim=64,
        layer_num=27, **ON_CPU,
    )  # fmt: skip
    return Subjects(pool, 64)


def hybrid() -> Subjects:
    """Makes 4 layers of attention and 12 of recurrent state: 16 KiB a token, 13 MiB a request."""
    layers = list(range(12))
    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=2048, n_groups=1, num_heads=32, head_dim=64,
        state_size=128, conv_kernel=4,
    )  # fmt: skip
    dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    mamba = memory_pool.MambaPool(
        size=4, spec_state_size=4, mamba_layer_ids=layers, device="cpu",
        cache_params=Mamba2CacheParams(shape=shape, layers=layers, dtype=dtype),
    )  # fmt: skip
    pool = memory_pool.HybridLinearKVPool(
        size=SLOTS, dtype=torch.bfloat16, page_size=16, head_num=8, head_dim=128,
        full_attention_layer_ids=[12, 13, 14, 15], device="cpu", mamba_pool=mamba,
    )  # fmt: skip
    return Subjects(pool, 16, {"mamba": 1})


SUBJECTS: Mapping[str, Callable[[], Subjects]] = {
    "mha": mha,
    "mha, scattered slots": mha_of_slots,
    "mla": mla,
    "hybrid": hybrid,
}


def main() -> None:
    """Reads the options, measures, and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 1024, 4000])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    get_parallel().override_permanently(attn_dcp_size=1, attn_dcp_rank=0)
    cases = [
        measure(name, tokens, options.rounds) for name in SUBJECTS for tokens in options.tokens
    ]
    if options.json:
        machine = {
            **machine_facts(),
            "threads": options.threads,
            "torch": torch.__version__,
            "rounds": options.rounds,
        }
        print(json.dumps({"machine": machine, "cases": cases}, indent=2))
        return
    print(f"{'pool':22} {'tokens':>6} {'MiB':>6}   save ms sglang/kvtide   load ms sglang/kvtide")
    for case in cases:
        theirs, ours = case["sglang"], case["kvtide"]
        print(
            f"{case['pool']:22} {case['tokens']:6} {case['mib']:6.1f}"
            f"   {theirs['save_ms']:8.2f} {ours['save_ms']:8.2f} {case['save_ratio']:5.2f}"
            f"   {theirs['load_ms']:8.2f} {ours['load_ms']:8.2f} {case['load_ratio']:5.2f}"
        )


def measure(name: str, tokens: int, rounds: int) -> dict[str, Any]:
    """Returns medians for a pool and a length; ratios above 1 say that kvtide is faster."""
    subject = SUBJECTS[name]()
    pool, page = subject.pool, subject.page_size
    allocator = PagedTokenToKVPoolAllocator(SLOTS, page, torch.bfloat16, "cpu", pool, False)
    pages = torch.randperm(SLOTS // page)[: 2 * -(-tokens // page)] + 1
    slots = (pages[:, None] * page + torch.arange(page)).reshape(2, -1)[:, :tokens]
    device = open_device("cpu")
    adopted = describe(Subject(pool, allocator)).adopt(device)
    blocks = chunk_bytes_for(adopted, LIMIT_BYTES)
    tide = Tide(adopted, HostArena(device, limit_bytes=LIMIT_BYTES, block_bytes=blocks))
    mamba = torch.tensor([subject.rows["mamba"]]) if subject.rows else None
    request = subject.rows or None

    def by_sglang(times: Times) -> None:
        copy = note(
            times, "sglang save", lambda: allocator.get_cpu_copy(slots[0], mamba_indices=mamba)
        )
        note(
            times,
            "sglang load",
            lambda: allocator.load_cpu_copy(copy, slots[1], mamba_indices=mamba),
        )

    def by_kvtide(times: Times) -> None:
        kept = note(times, "kvtide save", lambda: tide.offload(slots[0], request=request))
        note(times, "kvtide load", lambda: tide.restore(kept, slots[1], request=request))
        tide.discard(kept)

    times = in_turns((by_sglang, by_kvtide), rounds)
    size = tide.stats.offloaded_bytes / tide.stats.offloads
    tide.close()
    device.close()
    medians = {name: median_of(timings) for name, timings in times.items()}
    case: dict[str, Any] = {"pool": name, "tokens": tokens, "mib": round(size / 2**20, 2)}
    for mover in ("sglang", "kvtide"):
        case[mover] = {
            f"{move}_{kind}": round(seconds * 1e3, 3)
            for move in ("save", "load")
            for kind, seconds in (
                ("ms", medians[f"{mover} {move}"].seconds),
                ("cpu_ms", medians[f"{mover} {move}"].cpu_seconds),
            )
        }
    for move in ("save", "load"):
        theirs, ours = medians[f"sglang {move}"].seconds, medians[f"kvtide {move}"].seconds
        case[f"{move}_ratio"] = round(theirs / ours, 2)
    return case


def in_turns(movers: Sequence[Callable[[Times], None]], rounds: int) -> Times:
    """Runs each mover again and again in its turn; the last run of a turn is measured.

    By then the other mover's OpenMP threads sleep: they spin for milliseconds on a core that this
    mover needs. And the code of both movers is in the processor's caches.
    """
    times: Times = {}
    for _ in range(rounds):
        for mover in movers:
            until = time.perf_counter() + WARM_UP_S
            while time.perf_counter() < until:
                mover({})
            mover(times)
    return times


def note(times: Times, name: str, call: Callable[[], Any]) -> Any:
    """Calls, adds the time to `times`, and returns the call's result."""
    result, timing = timed(call)
    times.setdefault(name, []).append(timing)
    return result


if __name__ == "__main__":
    main()
