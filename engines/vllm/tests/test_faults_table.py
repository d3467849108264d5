"""docs/vllm.md's table of faults: engines do what its rows say, on both sides."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults_table import (
    BEGIN,
    BLOCK_TOKENS,
    BLOCKS,
    DOCS,
    END,
    FAULTS,
    KVTIDE,
    VLLM,
    answer_of,
    columns_in,
    engine_of,
    flip_in_host_memory,
    note_keys,
    prompts,
    rows_of,
)
from vllm_engine import SMOLLM2


@pytest.mark.parametrize("name", [VLLM, KVTIDE])
def test_rows_of_host_memory_say_what_engines_do(name: str, tmp_path: Path) -> None:
    """The rest of the rows needs many starts: `make soak` makes all of them."""
    prompt = prompts(SMOLLM2)[-1]
    found = {}
    with engine_of(name, SMOLLM2, tmp_path) as engine:
        keys = note_keys(engine)
        answers = [answer_of(engine, prompt) for _ in range(2)]
        right = {answer["cached"] // BLOCK_TOKENS: answer["tokens"] for answer in answers}
        engine.end_all()
        for step in ("host", "flipped last"):
            engine.forget_local()
            if step != "host":
                flip_in_host_memory(name, engine, keys)
            found[step] = [answer_of(engine, prompt)]

    assert {0, BLOCKS} == {*right}
    rows = list(rows_of(found, [right] * len(FAULTS), [right] * len(FAULTS)))[:2]
    documented = columns_in(DOCS.read_text("utf-8"))[name]
    assert rows == [(fault, documented[fault]) for fault, _ in rows]


def test_columns_are_read_as_they_are_written() -> None:
    """Both sides have the same rows."""
    rows = "| what | x | y |\n|---|---|---|\n| f | 1 | **2** |"
    text = f"a\n{BEGIN}\nb\n\n{rows}\n{END}\n| g | 3 | 4 |"
    assert {"x": {"f": "1"}, "y": {"f": "**2**"}} == columns_in(text)
