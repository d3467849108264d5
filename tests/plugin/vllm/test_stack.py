"""Several tiers as one: written to all, read from the first that has a block whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import xxhash

from kvtide.errors import SnapshotDamaged, SnapshotMiss, TierFull, TierRetry
from kvtide.plugin.vllm.chunks import layout_of
from kvtide.plugin.vllm.stack import TierStack
from kvtide.seal import Seal, Span
from kvtide.tier import DiskTier, Tier

CONTENT = bytes(range(200))


def seal_of(key: str) -> Seal:
    """The seal of the content under that key."""
    span = Span(0, 0, len(CONTENT), xxhash.xxh3_64_intdigest(CONTENT))
    size = len(CONTENT)
    return Seal(layout_of(size), key, 1, ((range(1),),), ((),), size, (span,))


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[list[DiskTier]]:
    """Two disks."""
    with ExitStack() as opened:
        yield [
            opened.enter_context(closing(DiskTier(tmp_path / name, limit_bytes=1 << 20)))
            for name in ("near", "far")
        ]


def got(tier: Tier, key: str) -> bytes:
    """What the tier has under a key."""
    memory = bytearray(len(CONTENT))
    tier.get(key, lambda seal: [memoryview(memory)])
    return bytes(memory)


def flip_a_bit(folder: Path) -> None:
    """Damages the only file of a disk."""
    (path,) = folder.rglob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-4096] ^= 1
    path.write_bytes(content)


class SickTier(Tier):
    """A tier that never answers."""

    def contains(self, key: str) -> bool:
        """See Tier."""
        raise TierRetry("sick")

    def put(self, key: str, seal: Seal, chunks: Sequence[memoryview]) -> None:
        """See Tier."""
        raise TierFull("sick")

    def get(self, key: str, make_room: object) -> Seal:
        """See Tier."""
        raise TierFull("sick")

    def remove(self, key: str) -> None:
        """See Tier."""
        raise TierRetry("sick")


class TestTierStack:
    def test_writes_to_all_tiers_and_removes_from_all(self, tiers: list[DiskTier]) -> None:
        stack = TierStack(tiers)
        stack.put("a", seal_of("a"), [memoryview(CONTENT)])
        assert [True, True] == [tier.contains("a") for tier in tiers]
        assert CONTENT == got(stack, "a")
        stack.remove("a")
        assert [False, False] == [tier.contains("a") for tier in tiers]
        with pytest.raises(SnapshotMiss):
            got(stack, "a")

    def test_reads_a_block_that_is_damaged_in_the_first_from_the_next(
        self, tiers: list[DiskTier], tmp_path: Path
    ) -> None:
        stack = TierStack(tiers)
        stack.put("a", seal_of("a"), [memoryview(CONTENT)])
        flip_a_bit(tmp_path / "near")
        assert CONTENT == got(stack, "a")
        flip_a_bit(tmp_path / "far")
        with pytest.raises(SnapshotDamaged):
            got(stack, "a")

    def test_finds_what_a_single_tier_has(self, tiers: list[DiskTier]) -> None:
        """Another tier that hasn't it, nearer or further, changes nothing."""
        for tier, key in zip(tiers, "ab", strict=True):
            tier.put(key, seal_of(key), [memoryview(CONTENT)])
        assert [True, True, False] == TierStack(tiers).contains_each(["a", "b", "c"])

    def test_goes_on_without_a_tier_that_fails(self, tiers: list[DiskTier]) -> None:
        stack = TierStack([SickTier(), tiers[1]])
        stack.put("a", seal_of("a"), [memoryview(CONTENT)])
        assert [True, False] == stack.contains_each(["a", "b"])
        assert stack.contains("a")
        assert not TierStack([SickTier()]).contains("a")
        with pytest.raises(TierFull):
            TierStack([SickTier()]).put("a", seal_of("a"), [memoryview(CONTENT)])
