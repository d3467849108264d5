"""The documents' examples run unchanged, and the list of models is that of the last sweep."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers

from kvtide.plugin.sglang.settings import COLOCATED

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
MODELS = ROOT / "docs" / "models.md"


def example(path: Path) -> str:
    """Returns the Python code in a document, one part after another."""
    return "".join(re.findall(r"```python\n(.*?)```", path.read_text("utf-8"), re.DOTALL))


def test_example_runs_and_moves_the_bytes() -> None:
    """Afterwards the other slots hold the first slots' bytes, and the arena is empty.

    The example of docs/library.md continues this example.
    """
    names: dict[str, Any] = {}
    exec(compile(example(README), str(README), "exec"), names)
    for layers in names["planes"].values():
        for tensor in layers:
            expected = tensor[100:400].view(torch.uint8)
            assert torch.equal(expected, tensor[723:1023].view(torch.uint8))
    assert names["arena"].used_bytes == 0
    library = ROOT / "docs" / "library.md"
    exec(compile(example(library), str(library), "exec"), names)
    assert names["snapshot"].token_count == 300
    assert names["namespace"].key_of("a request") == names["key"]
    names["tide"].discard(names["snapshot"])
    names["cpu"].close()


def test_the_engines_example_answers() -> None:
    """The example of docs/engine.md ends with an answer, and its self-check found row counts."""
    names: dict[str, Any] = {}
    exec(compile(example(ROOT / "docs" / "engine.md"), "docs/engine.md", "exec"), names)
    (request,) = names["requests"]
    assert request.finish_reason in ("length", "stop")
    assert names["engine"].exact_check.exact_rows


def test_readme_names_the_setting_for_ordinary_servers() -> None:
    """Each paragraph or row that names such servers says it, and not behind a link."""
    text = README.read_text("utf-8")
    parts = [part for part in re.split(r"\n\n|\n(?=\|)", text) if "ordinary server" in part]
    assert 2 == len(parts)
    assert all(f"`{COLOCATED}=1`" in part for part in parts)


def test_example_is_short() -> None:
    """It has ten lines without the imports."""
    lines = [line for line in example(README).splitlines() if line and "import" not in line]
    assert len(lines) <= 10


def newest_sweep() -> dict[str, Any]:
    """Reads the last committed result of benchmarks/models."""
    path = max((ROOT / "benchmarks" / "models" / "results").glob("*.json"))
    report: dict[str, Any] = json.loads(path.read_bytes())
    return report


def test_models_are_those_of_the_last_sweep() -> None:
    """The lists (unchanged, without windows, as decoders) equal the result's, in its order."""
    text = MODELS.read_text("utf-8")
    lists = re.findall(r":\s+([a-z0-9_\-]+(?:,\s+[a-z0-9_\-]+)*)\.\n", text)
    expected = [
        [
            name
            for name, row in newest_sweep()["models"].items()
            if (row["verdict"], row["why"]) == ("served", way)
        ]
        for way in ("", "without windows", "as a decoder")
    ]
    assert expected == [names.replace("\n", " ").split(", ") for names in lists]
    assert f"[{sum(map(len, expected))} architectures]" in README.read_text("utf-8")


def test_the_last_sweep_is_of_the_transformers_that_is_pinned() -> None:
    """Another release may have other models, or run them otherwise."""
    report = newest_sweep()
    assert transformers.__version__ == report["transformers"]
    assert f"transformers {report['transformers']}." in MODELS.read_text("utf-8")
    (bounds,) = re.findall(
        r'"transformers>=([\d.]+),<', (ROOT / "pyproject.toml").read_text("utf-8")
    )
    assert report["transformers"].startswith(f"{bounds}.")


def test_the_last_sweep_found_no_model_that_answers_otherwise() -> None:
    """The sweep covers every type; a type that wasn't tried has a reason."""
    report = newest_sweep()
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    assert sorted(names) == sorted(report["models"])
    assert 0 == report["counts"]["other answers"]
    assert all(row["why"] for row in report["models"].values() if row["verdict"] != "served")
