"""SmolLM2 with too few blocks on the device: preempted requests come back from host memory."""

from __future__ import annotations

from random import Random
from typing import Any

from vllm_engine import BLOCK_TOKENS, Engine, opened, opened_with_kvtide
from watched_moves import WatchedMoves

TIGHT: dict[str, Any] = {"num_gpu_blocks_override": 9, "max_num_seqs": 4, "max_model_len": 512}
TOKENS = 30
"""So many tokens an answer that each request needs a third block, which not all of them get."""
PROMPTS = [Random(seed).choices(range(1000, 40_000), k=BLOCK_TOKENS + 120) for seed in range(4)]


def recomputed_by_resumes(engine: Engine) -> list[int]:
    """A list that grows with each request that goes on: how many tokens it computes again."""
    schedule, found = engine.core.scheduler.schedule, list[int]()

    def noted(*args: Any) -> Any:
        scheduled = schedule(*args)
        going_on = scheduled.scheduled_cached_reqs
        for name, computed in zip(going_on.req_ids, going_on.num_computed_tokens, strict=True):
            if name in going_on.resumed_req_ids:
                found.append(len(going_on.all_token_ids[name]) - computed)
        return scheduled

    engine.core.scheduler.schedule = noted
    return found


class TestPreemption:
    def test_loads_what_was_saved_and_changes_no_answer(self) -> None:
        with opened(**TIGHT) as engine:
            expected = [answer.tokens for answer in engine.answers(PROMPTS, TOKENS)]

        with opened_with_kvtide(
            settings={"host_memory": "512MiB"}, disable_log_stats=False, **TIGHT
        ) as engine:
            del engine.manager.get_stats  # the counts are vLLM's to take
            moves = WatchedMoves(engine.store)
            recomputed = recomputed_by_resumes(engine)
            found = [answer.tokens for answer in engine.answers(PROMPTS, TOKENS)]
            counts = {
                metric.name.removeprefix("vllm:kvtide_"): metric.value
                for metric in engine.llm.get_metrics()
                if metric.name.startswith("vllm:kvtide_")
            }

            # No two prompts begin alike, so only a request that was preempted has blocks to load.
            assert moves.compared > 0
            # All comes back but the last block, which isn't full.
            assert recomputed
            assert max(recomputed) <= BLOCK_TOKENS
            assert expected == found
            assert counts["loaded_blocks"] == moves.compared
            assert counts["restored_tokens"] == moves.compared * BLOCK_TOKENS
            # Each was preempted at the end of a block, so nothing is computed again.
            assert counts.keys().isdisjoint({"failed_loads", "recomputed_tokens"})
