"""What stands under a block's name in a tier comes from a file: it is checked, not believed."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtide.serve.request import PrefixBlock
from kvtide.tier import DiskTier
from kvtide.tier.file_form import ALIGNMENT
from serve.prefix_bench import Bench, close_benches, make, numbers, wander

BLOCK_TOKENS = 16
PROMPT = numbers(BLOCK_TOKENS + 1)


@pytest.fixture(autouse=True)
def _nothing_is_held_at_the_end() -> Iterator[None]:
    yield
    close_benches()


def open_bench(folder: Path, host_blocks: int = 8) -> Bench:
    """A bench whose blocks go to a disk. In the arena a block takes two of its blocks."""
    return Bench(
        16,
        disk_dir=folder,
        leaves_blocks=True,
        block_tokens=BLOCK_TOKENS,
        host_blocks=host_blocks,
    )


def plant(folder: Path, token_count: int, key: str | None = None) -> None:
    """Puts the KV of so many tokens under the name of the prompt's first block.

    The `key` in the seal is the block's by default.
    """
    bench = open_bench(folder)
    request = make("writer", PROMPT)
    rows, name = bench.rows_of(request), bench.prefixes._chain.key(request, 0)
    for plane in ("k", "v"):
        bench.plane(plane)[: len(rows)] = rows
    snapshot = bench.tide.offload(range(token_count), key=key or name)
    assert bench.disk is not None
    bench.disk.save(name, snapshot)
    bench.tide.discard(snapshot)
    bench.close()


def found(bench: Bench) -> list[PrefixBlock]:
    """The blocks that a tier is found to have of the prompt, which is answered after that."""
    request, finder = make("reader", PROMPT), bench.prefixes._finder
    assert finder._seeker is not None
    bench.prefixes.read_ahead(request)
    while finder._seeker.is_seeking(request):
        finder.pause()
    bench.prefixes.read_ahead(request)
    blocks = [*bench.prefixes.blocks.known.values()]
    bench.answer(request)
    return blocks


def test_a_block_under_its_name_is_taken(tmp_path: Path) -> None:
    """It has the bytes of the prompt, so its last token alone is computed."""
    plant(tmp_path, BLOCK_TOKENS)
    bench = open_bench(tmp_path)
    assert [tuple(PROMPT[:-1])] == [block.tokens for block in found(bench)]
    assert [BLOCK_TOKENS] == bench.computed["reader"]


@pytest.mark.parametrize(
    ("token_count", "key"),
    [(BLOCK_TOKENS, "shared/another"), (BLOCK_TOKENS + 4, None), (BLOCK_TOKENS - 4, None)],
    ids=["another's", "longer", "shorter"],
)
def test_what_is_not_the_block_is_not_taken(
    tmp_path: Path, token_count: int, key: str | None
) -> None:
    """A file with another key or length in its seal: its block is computed."""
    plant(tmp_path, token_count, key)
    bench = open_bench(tmp_path)
    assert [] == found(bench)
    assert PROMPT == bench.computed["reader"]


def test_what_the_arena_can_never_hold_is_not_taken(tmp_path: Path) -> None:
    """An engine with more host memory left it; here another block would leave for it in vain."""
    plant(tmp_path, BLOCK_TOKENS)
    bench = open_bench(tmp_path, host_blocks=1)
    bench.answer(make("other", numbers(BLOCK_TOKENS // 2, 100)))
    bench.prefixes.blocks.leave()
    assert [tuple(numbers(BLOCK_TOKENS // 2, 100))] == [block.tokens for block in found(bench)]
    assert PROMPT == bench.computed["reader"]


@pytest.mark.parametrize("exact", [True, False])
def test_hundreds_of_steps_over_a_slow_disk_read_nothing_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    """Engines come and go, and leave blocks in a disk that is slow at random, and damaged.

    The first engines wait for it as long as it takes, the others hardly at all.
    """
    dice, cached_tokens, failed_count = random.Random(1), Counter[str](), 0
    monkeypatch.setattr("kvtide.serve.seeker._REST_S", 0.0)
    for name in ("contains", "put", "get"):
        monkeypatch.setattr(DiskTier, name, slow(getattr(DiskTier, name), random.Random(2)))
    for patience_s in (1e9, 1e9, 0.0005, 0.0005):
        monkeypatch.setattr("kvtide.serve.seeker._PATIENCE_S", patience_s)
        bench = Bench(
            24, exact=exact, host_blocks=10, block_tokens=8, disk_dir=tmp_path, leaves_blocks=True
        )
        wander(bench, dice, steps=100)
        cached_tokens += bench.prefixes.stats.cached_tokens
        bench.leave()
        failed_count += bench.prefixes.stats.failed
        for file in sorted(tmp_path.glob("*/*.safetensors"))[::3]:
            harm(file)
    assert {"device", "disk"} <= set(cached_tokens)
    assert failed_count > 0


def slow(call: Callable[..., object], dice: random.Random) -> Callable[..., object]:
    """Makes a call of a tier that takes a while now and then."""

    def slow_call(*arguments: object) -> object:
        if dice.random() < 0.1:
            time.sleep(dice.random() * 0.005)
        return call(*arguments)

    return slow_call


def harm(file: Path) -> None:
    """Flips a bit of the first byte of the KV in a file."""
    content = bytearray(file.read_bytes())
    content[ALIGNMENT] ^= 1
    file.write_bytes(content)
