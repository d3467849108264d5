"""The README's example is run as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

README = Path(__file__).parent.parent / "README.md"


def examples() -> list[str]:
    """The README's Python, block by block."""
    return re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)


def test_example_runs_and_moves_the_bytes() -> None:
    """After it the other slots hold what the first ones held, and the arena is empty."""
    code, ticket_code = examples()
    names: dict[str, Any] = {}
    exec(compile(code, str(README), "exec"), names)
    for layers in names["planes"].values():
        for tensor in layers:
            expected = tensor[100:400].view(torch.uint8)
            assert torch.equal(expected, tensor[723:1023].view(torch.uint8))
    assert names["arena"].used_bytes == 0
    exec(compile(ticket_code, str(README), "exec"), names)
    assert names["snapshot"].token_count == 300
    names["tide"].discard(names["snapshot"])
    names["cpu"].close()


def test_example_is_short() -> None:
    """Ten lines, give or take the imports."""
    code, _ = examples()
    lines = [line for line in code.splitlines() if line.strip() and "import" not in line]
    assert len(lines) <= 10
