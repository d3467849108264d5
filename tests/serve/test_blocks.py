"""What stands under a block's name in a tier comes from a file: it is checked, not believed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.serve.request import PrefixBlock
from serve.prefix_bench import Bench, close_benches, make, numbers

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
