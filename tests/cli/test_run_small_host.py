"""`kvtide run` with a tenth of the host memory that it needs, and a disk below it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtide.cli.main import main
from kvtide.cli.serving import LibraryServing
from kvtide.serve.fetch import Progress
from kvtide.serve.find import FoundModel
from kvtide.serve.models import OpenModel
from kvtide.snapshot import Snapshot
from kvtide.tide import Tide
from kvtide.tier.inspection import inspect_folder
from kvtide.tier.namespace import is_shared
from support.results import read_report

HOST_BYTES = 128 << 10
DISK_BYTES = 4 << 20
REQUESTS = 80


class HeldBytes:
    """The KV of all requests that were retracted and haven't come back, wherever it is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._held: dict[int, int] = {}
        self.peak_bytes = 0
        retract, discard = Tide.retract, Tide.discard

        def retracting(tide: Tide, *args: Any, **options: Any) -> Snapshot:
            snapshot = retract(tide, *args, **options)
            self._held[id(snapshot)] = sum(snapshot.seal.used_bytes)
            self.peak_bytes = max(self.peak_bytes, sum(self._held.values()))
            return snapshot

        def discarding(tide: Tide, snapshot: Snapshot) -> None:
            self._held.pop(id(snapshot), None)
            discard(tide, snapshot)

        monkeypatch.setattr(Tide, "retract", retracting)
        monkeypatch.setattr(Tide, "discard", discarding)


class _NoTokenEnds(LibraryServing):
    def open_model(self, found: FoundModel, *, dtype: str, progress: Progress) -> OpenModel:
        return replace(
            super().open_model(found, dtype=dtype, progress=progress), eos_ids=frozenset()
        )


def test_tenth_of_the_host_memory_and_a_disk_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every answer is verified, nothing is computed again, and every limit is kept."""
    lines = [
        {"id": f"request-{number}", "prompt": "a" * (1 + number % 3)} for number in range(REQUESTS)
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    held = HeldBytes(monkeypatch)
    options = {
        "--model": "tiny-random",
        "--max-new-tokens": "100",
        "--kv-memory": "1.25MiB",
        "--max-running": str(REQUESTS),
        "--host-memory": "128KiB",
        "--disk-dir": str(tmp_path / "kv"),
        "--disk-memory": "4MiB",
        "--out": str(tmp_path / "answers.jsonl"),
        "--report": str(tmp_path / "report.json"),
    }
    words = [word for option in options.items() for word in option]
    assert 0 == main(["run", str(prompts), "--verify", *words], serving=_NoTokenEnds())
    report = read_report(tmp_path / "report.json")
    assert held.peak_bytes >= 10 * HOST_BYTES
    assert (True, True, REQUESTS, 0) == tuple(
        report[name] for name in ("verified", "exact", "answered", "recomputed_tokens")
    )
    assert report["retractions"] == report["resumes"] > 40
    assert report["offloaded_bytes"] >= report["restored_bytes"]
    assert 0 < report["peak_host_bytes"] <= HOST_BYTES
    assert HOST_BYTES < report["peak_disk_bytes"] <= DISK_BYTES
    # What prompts begin with stays for others.
    keys = [file.key for file in inspect_folder(tmp_path / "kv") if file.key is not None]
    assert all(map(is_shared, keys))
