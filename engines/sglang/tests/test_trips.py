from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvtide.device import open_device
from kvtide.errors import LayoutError
from kvtide.plugin.description import Description, Part
from kvtide.plugin.sglang.cases import recurrent_state
from kvtide.plugin.sglang.cases.round_trips import Built, KvtideWay, TripResult, round_trip

BESIDE_STATE = next(case for case in recurrent_state.CASES if case.name == "MHA beside state")
QSA = next(case for case in recurrent_state.CASES if case.name.startswith("QSA: "))
RING = next(case for case in recurrent_state.CASES if "of the request's" in case.name)


class Careless(KvtideWay):
    """Loads correctly, but zeroes a row of another request."""

    def __init__(self, field: str, kind: str, row: int) -> None:
        self.field, self.kind, self.row = field, kind, row

    def load(self, built: Built, copy: Any, slots: torch.Tensor, rows: Mapping[str, int]) -> None:
        """See Way."""
        super().load(built, copy, slots, rows)
        assert self.row not in (built.sources[self.kind], rows[self.kind])
        held = getattr(built.pool.mamba_pool.mamba_cache, self.field)
        buffer = held[0] if isinstance(held, list) else held
        buffer[:, self.row].zero_()


@pytest.mark.parametrize(("field", "name"), [("conv", "conv0"), ("temporal", "temporal")])
@pytest.mark.parametrize("row", [2, 6])
def test_damage_to_the_state_of_another_request_is_found(field: str, name: str, row: int) -> None:
    """The row is neither the source's nor the target's."""
    outcome = round_trip(BESIDE_STATE, Careless(field, "mamba", row))
    assert TripResult("wrong", f"{name} of others") == outcome


def test_damage_to_the_ring_of_another_request_is_found() -> None:
    """The ring has a row for each row in req_to_token."""
    outcome = round_trip(RING, Careless("replayssm_k", "request", 2))
    assert TripResult("wrong", "ring_k of others") == outcome


@pytest.mark.parametrize("descends", [(True, False), (False, True)])
def test_shared_keys_are_compared_in_the_order_of_their_tokens(descends: tuple[bool, bool]) -> None:
    """The source's pages may be in another order than the target's."""

    def build() -> Built:
        built, order = QSA.build(), [*descends]

        def allocate(count: int) -> torch.Tensor:
            pages = built.allocator.alloc(count).view(-1, QSA.page_size)
            slots: torch.Tensor = pages.sort(0, descending=order.pop(0)).values.flatten()
            return slots

        built.allocate = allocate
        return built

    assert TripResult("exact") == round_trip(replace(QSA, build=build), KvtideWay())


def description(*tensors: torch.Tensor) -> Description:
    """Makes keys in two layers of 32 slots, and a part `idx` of the tensors."""
    keys = [torch.zeros(32, 4) for _ in range(2)]
    return Description("Pool", (Part("k", keys), Part("idx", tensors)), 16, 32)


@pytest.mark.parametrize("empty", [0, 1])
def test_a_part_with_some_empty_tensors_is_an_error(empty: int) -> None:
    """If such a part were left out, the bytes in its other tensors would be lost."""
    tensors = [torch.zeros(32, 4), torch.zeros(32, 4)]
    tensors[empty] = torch.zeros(0, 4)
    with (
        closing(open_device("cpu")) as device,
        pytest.raises(LayoutError, match=rf"^idx: .*\[{empty}\]"),
    ):
        description(*tensors).adopt(device)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_part_without_any_bytes_is_left_out(count: int) -> None:
    """Some pools have empty buffers for planes that their model lacks."""
    with closing(open_device("cpu")) as device:
        geometry = description(*[torch.zeros(0, 4)] * count).adopt(device).geometry
    assert ["k"] == [plane.name for plane in geometry.planes]
