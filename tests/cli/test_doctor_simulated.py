"""`kvtide doctor` on the simulated accelerator, which shows work that nobody waited for."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from kvtide.cli.main import main
from kvtide.conformance import SAMPLES
from kvtide.device import Step
from support.simulated import SCHEDULES, simulated

TRIP_COUNT = len(SAMPLES)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_simulated_device_is_ok_by_every_schedule(
    schedule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every check waits for its work: a check that didn't would see the bytes from before it."""
    with simulated(schedule):
        code = main(["doctor", "--simulate", "--schedule", schedule, "--size", "1MiB", "--json"])
        found = json.loads(capsys.readouterr().out)
    assert [] == [need for need in found["needs"] if not need["ok"]]
    assert [] == [trip for trip in found["round_trips"] if not trip["exact"]]
    assert [] == found["speed"]["errors"]
    assert (0, 0, "npu", schedule) == (
        code, found["failed"], found["device"], found["schedule"]
    )  # fmt: skip
    assert {"pinned": True, "reason": None} == found["host_memory"]
    assert found["free_bytes"] <= found["total_bytes"]
    ways = ["pinned_to_host", "pinned_to_device", "pageable_to_host", "pageable_to_device"]
    assert ways == list(found["speed"]["gb_s"])


def test_device_that_does_not_wait_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The device doesn't wait for a copy, so no round trip is exact."""

    def issue(copy_stream: Any, step: Step[Any]) -> torch.Event:
        with copy_stream.stream:
            event: torch.Event = copy_stream.stream.record_event()
            if step.issue is not None:
                step.issue(copy_stream._staging)
        return event

    monkeypatch.setattr("kvtide.device.accelerator.CopyStream.issue", issue)
    with simulated("lazy"):
        code = main(["doctor", "--simulate", "--size", "1MiB"])
        lines = capsys.readouterr().out.splitlines()
    trips = [line for line in lines if ", pages of " in line]
    assert 1 == code
    assert TRIP_COUNT == len(trips)
    assert all(": FAILED: created pool, contiguous slots: " in line for line in trips)
    assert "events: ok" in lines


def test_simulation_begins_in_a_fresh_process() -> None:
    """The command registers the simulated device itself, and says that its speed means nothing."""
    program = "from kvtide.cli import start; raise SystemExit(start())"
    command = ["doctor", "--device", "npu:1", "--simulate", "--schedule", "random:3"]
    done = subprocess.run(
        [sys.executable, "-c", program, *command],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (0, "") == (done.returncode, done.stderr)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("device: npu:1: ")
    assert lines[0].endswith("simulated, schedule random:3")
    assert "host memory: pinned" in lines
    for need in ("a separate stream", "events", "asynchronous copy to the host"):
        assert f"{need}: ok" in lines
    assert TRIP_COUNT == sum(line.endswith(": exact") for line in lines)
    assert any("(of a simulated device: these figures mean nothing)" in line for line in lines)
    assert "device npu:1: ok" == lines[-1]
