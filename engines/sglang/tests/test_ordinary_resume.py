"""The batch of a request that comes back to an ordinary server, by SGLang's own ScheduleBatch."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.managers.schedule_batch import MultimodalInputs, Req
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.sampling.sampling_params import SamplingParams

from kvtide.plugin.sglang.ordinary.resume import batch_of


class Unset:
    """A setting that nobody made; it and all its attributes are false."""

    def __getattr__(self, name: str) -> Unset:
        return self

    def __bool__(self) -> bool:
        return False


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of a server without arguments."""
    exactness = SimpleNamespace(rl_on_policy_target=None, enable_deterministic_inference=False)
    bags = {
        "spec": SimpleNamespace(speculative_algorithm=None),
        "exec": SimpleNamespace(deterministic=exactness, features=Unset()),
    }
    context = type(runtime_context._CONTEXT)
    monkeypatch.setattr(context, "config_bag", lambda _, name: bags.get(name, Unset()))


def scheduler() -> Any:
    """Makes a scheduler without a prefix cache."""
    rows = ReqToTokenPool(size=4, max_context_len=64, device="cpu", enable_memory_saver=False)
    return SimpleNamespace(
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=SimpleNamespace(device="cpu"),
        tree_cache=None,
        model_config=SimpleNamespace(vocab_size=32, is_encoder_decoder=False),
        enable_overlap=False,
        spec_algorithm=SimpleNamespace(is_none=lambda: True),
        future_map=SimpleNamespace(stash=lambda indices, payload: None),
        is_hybrid_swa=True,
        is_hybrid_ssm=False,
    )


def request(on: Any, prompt: int, answer: int, delta: int | None = None) -> Req:
    """Makes a request with tokens and slots; an image may move its positions by `delta`."""
    req = Req(f"{prompt}", "", array("q", range(prompt)), SamplingParams(), vocab_size=32)
    req.output_ids = array("q", range(answer))
    if delta is not None:
        req.multimodal_inputs = MultimodalInputs(
            mm_items=[],
            mrope_positions=torch.zeros(3, prompt, dtype=torch.int64),
            mrope_position_delta=torch.tensor([[delta]]),
        )
    on.req_to_token_pool.alloc([req])
    req.refresh_fill_ids()
    req.prefix_len, req.extend_end = 0, prompt + answer - 1
    return req


def next_positions(batch: Any) -> list[list[int]]:
    """Returns the next step's positions in time, height and width, by SGLang's rule."""
    lengths = batch.seq_lens + 1
    step = SimpleNamespace(seq_lens=lengths, seq_lens_cpu=lengths)
    step._expand_mrope_from_input = lambda *given: ForwardBatch._expand_mrope_from_input(
        step, *given
    )
    ForwardBatch._compute_mrope_positions_decode(step, SimpleNamespace(device="cpu"), batch)
    return step.mrope_positions.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_request_with_an_image_keeps_its_positions(is_first: bool) -> None:
    """Images take fewer positions than tokens, in this request and in no other of its batch."""
    on = scheduler()
    reqs = [request(on, 9, 4, delta=-6), request(on, 5, 3)]
    reqs = reqs if is_first else reqs[::-1]
    running = batch_of(on, reqs[0])
    running.merge_batch(batch_of(on, reqs[1]))
    expected = {"9": 9 + 4 - 1 - 6, "5": 5 + 3 - 1}
    assert [[expected[req.rid] for req in reqs]] * 3 == next_positions(running)
    assert [req.multimodal_inputs for req in reqs] == running.multimodal_inputs
