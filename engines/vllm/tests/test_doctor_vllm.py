"""`kvtide doctor --vllm` with the real vLLM, and with one fault at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtide.cli.main import main
from kvtide.errors import LayoutError
from kvtide.plugin.engine_reads import EngineReads
from kvtide.plugin.vllm import spec
from kvtide.plugin.vllm.cases import CASES
from kvtide.plugin.vllm.groups import BlockGroup
from kvtide.plugin.vllm.settings import transfer_config


def report(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and the JSON that the doctor prints."""
    code = main(["doctor", "--vllm", "--json", *options])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, found


def failed(found: dict[str, Any]) -> dict[str, str]:
    """The reasons of the checks that failed, by name."""
    return {check["name"]: check["reason"] for check in found["checks"] if not check["ok"]}


class TestDoctor:
    def test_of_this_vllm_finds_nothing_and_says_how_much_fits(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        texts = {"host_memory": "45MiB", "disk_dir": str(tmp_path), "disk_memory": "1GiB"}
        given = json.dumps(transfer_config(texts))
        options = ["doctor", "--vllm", "--model", "smollm2", "--kv-transfer-config", given]
        assert 0 == main(options)
        lines = capsys.readouterr().out.splitlines()

        assert "host_memory: 45.0 MiB, about 2,048 tokens, for all ranks on this host" in lines
        assert lines[-1].endswith(f": ok, {len(CASES)} of {len(CASES)} round trips exact")

    def test_names_what_is_gone_and_a_plugin_that_is_left_out(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        moved = {**spec.READS, "OffloadingWorker": ("wait", "yawn")}
        monkeypatch.setattr(EngineReads, "tables", lambda _: [moved])
        monkeypatch.setenv("VLLM_PLUGINS", "another")
        given = json.dumps(transfer_config({"mooncake": "127.0.0.1:1"}))
        code, found = report(capsys, "--kv-transfer-config", given)

        assert 1 == code
        assert "127.0.0.1:1" == found["settings"]["mooncake"]
        reasons = failed(found)
        assert "mooncake tier: " in reasons.pop("the Mooncake store below host memory")
        assert {
            "names that kvtide reads of vLLM": "gone: OffloadingWorker.yawn",
            "vLLM loads kvtide's plugin": (
                "VLLM_PLUGINS=another leaves it out; add kvtide, or unset it"
            ),
        } == reasons

    def test_makes_a_finding_of_whatever_a_check_raises(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def unreadable(_: EngineReads) -> list[str]:
            raise SyntaxError("no Python")

        def adopt(*given: object) -> None:
            raise LayoutError("a form that isn't known")

        monkeypatch.setattr(EngineReads, "what_is_gone", unreadable)
        monkeypatch.setattr(BlockGroup, "adopt", adopt)
        code, found = report(capsys)

        assert 1 == code
        assert {
            "names that kvtide reads of vLLM": "can't be looked up: SyntaxError: no Python",
            "round trips": "this vLLM lacks what the cases are made of: "
            "LayoutError: a form that isn't known",
        } == failed(found)

    def test_finds_a_layer_that_is_forgotten(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        adopt = BlockGroup.adopt
        monkeypatch.setattr(
            BlockGroup, "adopt", lambda number, layers, device: adopt(number, layers[:1], device)
        )
        code, found = report(capsys)

        assert 1 == code
        assert "wrong bytes" in failed(found)["latent attention"]
