"""The README's example is run as it stands, and its list of models is that of a run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


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


def test_the_engines_example_answers() -> None:
    """In docs/engine.md: it ends with an answer, and a check that found rows."""
    text = (ROOT / "docs" / "engine.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "docs/engine.md", "exec"), names)
    (request,) = names["requests"]
    assert request.finish_reason in ("length", "stop")
    assert names["engine"].exact_check.exact_rows


def test_example_is_short() -> None:
    """Ten lines, give or take the imports."""
    code, _ = examples()
    lines = [line for line in code.splitlines() if line.strip() and "import" not in line]
    assert len(lines) <= 10


def newest_sweep() -> dict[str, Any]:
    """The last committed result of benchmarks/models."""
    path = max((ROOT / "benchmarks" / "models" / "results").glob("*.json"))
    report: dict[str, Any] = json.loads(path.read_bytes())
    return report


def test_models_are_those_of_the_last_sweep() -> None:
    """As they are, without windows, as decoders: each list is the result's, in its order."""
    _, _, text = README.read_text("utf-8").partition("\n## Models\n")
    text = text.partition("\n## ")[0]
    lists = re.findall(r":\s+([a-z0-9_\-]+(?:,\s+[a-z0-9_\-]+)*)[;.]\n", text)
    expected = [
        [
            name
            for name, row in newest_sweep()["models"].items()
            if (row["verdict"], row["why"]) == ("served", way)
        ]
        for way in ("", "without windows", "as a decoder")
    ]
    assert expected == [names.replace("\n", " ").split(", ") for names in lists]


def test_the_last_sweep_is_of_the_transformers_that_is_pinned() -> None:
    """Another release may have other models, and may run them otherwise."""
    report = newest_sweep()
    assert transformers.__version__ == report["transformers"]
    assert f"transformers {report['transformers']}," in README.read_text("utf-8")
    (bounds,) = re.findall(
        r'"transformers>=([\d.]+),<', (ROOT / "pyproject.toml").read_text("utf-8")
    )
    assert report["transformers"].startswith(f"{bounds}.")


def test_the_last_sweep_found_no_model_that_answers_otherwise() -> None:
    """Nor left a type out: those not tried are named with the reason."""
    report = newest_sweep()
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    assert sorted(names) == sorted(report["models"])
    assert 0 == report["counts"]["other answers"]
    assert all(row["why"] for row in report["models"].values() if row["verdict"] != "served")
