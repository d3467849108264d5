from __future__ import annotations

import numpy as np
import pytest
import torch
from sglang.srt.hardware_backend.npu.memory_pool_npu import _mla_fia_nz_scatter_indices
from sglang.srt.layers.dcp.layout import localize_dcp_indices, maybe_dcp_kernel_indices

from kvtide.conformance.tensors import randomise, same_bytes
from kvtide.errors import SlotError
from kvtide.layout import Rows, Striped, apply_rules
from kvtide.plugin.refusals import Refused
from kvtide.plugin.sglang.cases import ascend, deepseek_v4, latent
from kvtide.plugin.sglang.cases.round_trips import Refusal
from kvtide.plugin.sglang.pools.describe import describe
from kvtide.plugin.sglang.pools.subject import Subject

REFUSED = [*latent.REFUSED, *ascend.REFUSED, *deepseek_v4.REFUSED]


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda refusal: refusal.name)
def test_pools_that_cannot_be_moved_are_refused_with_the_reason(refusal: Refusal) -> None:
    """The refusal comes at the start, and names the class."""
    built = refusal.build()
    name = type(built.pool).__name__
    try:
        with pytest.raises(Refused, match=f"^{name}: .*{refusal.reason}"):
            describe(Subject(built.pool, built.allocator))
    finally:
        built.undo()


def striped(rule: Striped, slots: list[int]) -> Rows:
    """Applies a rank's rule to a request's slots."""
    return apply_rules([rule], np.array(slots, np.int64), {}, 1000)


def test_a_rank_has_its_turns_of_a_request() -> None:
    """In runs of 2, slots 24 to 29 belong to ranks 0, 1 and 2; rank 1 has kept 4 runs before."""
    rows = striped(Striped(1, 3, run=2), [24, 25, 26, 27, 28, 29])
    assert ([8, 9], [2, 3]) == (rows.ids.tolist(), rows.tokens.tolist())


@pytest.mark.parametrize("run", [1, 4])
def test_each_slot_has_one_row_of_one_rank(run: int) -> None:
    """The rows of a rank are as many as fit, without a gap."""
    slots = list(range(3 * run * 5))
    found = [striped(Striped(rank, 3, run), slots) for rank in range(3)]
    assert [list(range(run * 5))] * 3 == [rows.ids.tolist() for rows in found]
    assert slots == sorted(token for rows in found for token in rows.tokens.tolist())


def test_a_slot_of_another_rank_than_its_tokens_is_refused() -> None:
    """A restore there would leave out rows that this rank saved, or wait for rows that it lacks."""
    with pytest.raises(SlotError, match="token 0 has slot 65"):
        striped(Striped(0, 2), [65, 66])


def test_a_rank_has_the_rows_of_sglang() -> None:
    """SGLang's own arithmetic divides slot by slot on GPUs, and page by page on NPUs."""
    slots = [*range(192, 256), *range(64, 101)]
    ids = torch.tensor(slots)
    by_slot = maybe_dcp_kernel_indices(ids, 4, 2)
    assert by_slot.tolist() == striped(Striped(2, 4), slots).ids.tolist()
    by_page = localize_dcp_indices(ids, 4, 2, 16)
    assert by_page[by_page >= 0].tolist() == striped(Striped(2, 4, run=16), slots).ids.tolist()


def test_index_keys_are_read_in_sglangs_order() -> None:
    """SGLang moves keys and scales to other slots, and the probe reads them there."""
    pool = latent.dsa()
    (probe, *_) = latent.index_probes(pool)
    torch.manual_seed(1)
    randomise(probe.buffers[0])
    source, target = torch.arange(64, 101), torch.arange(300, 337)
    expected = probe.read(source, {})
    pool.index_key_cache.move(target, source)
    assert same_bytes(expected, probe.read(target, {}))


def test_tiles_are_read_in_sglangs_order() -> None:
    """A token's tiles of 16 are in Ascend's NZ order."""
    cache, slots = torch.randn(1, 4, 16, 1, 64), torch.tensor([17, 3, 40])
    (probe,) = ascend.plane("latent", cache, tiled=True)
    rows = _mla_fia_nz_scatter_indices(slots, 64, 16)
    expected = cache.view(-1, 16)[rows.view(-1)].view(3, 4, 16)
    assert same_bytes(expected, probe.read(slots, {}))
