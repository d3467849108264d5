"""Streams, events, and torch's two modules of a device."""

from __future__ import annotations

import pytest
import simnpu
import torch

from conftest import NPU, Plan


def test_the_device_is_torch_s_accelerator() -> None:
    """Code that uses only torch.accelerator finds the device."""
    assert torch.device("npu") == torch.accelerator.current_accelerator()
    assert torch.accelerator.is_available()
    assert 2 == torch.accelerator.device_count()
    assert 0 == torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(1)
    assert torch.device("npu", 1) == torch.zeros(1, device="npu").device
    with torch.accelerator.device_index(0):
        assert torch.device("npu", 0) == torch.zeros(1, device="npu").device
    assert 1 == NPU.current_device()
    NPU.synchronize(0)
    NPU.synchronize(1)


def test_a_device_that_does_not_exist_is_refused() -> None:
    """The message says how many devices exist."""
    with pytest.raises(RuntimeError, match="device 5 isn't there: there are 2"):
        torch.zeros(1, device="npu:5")


def test_the_device_supports_every_dtype() -> None:
    """The device's capability lists every dtype."""
    capability = torch.accelerator.get_device_capability()
    assert {torch.bfloat16, torch.float8_e4m3fn} <= set(capability["supported_dtypes"])


def test_the_device_s_module_has_what_device_code_calls() -> None:
    """The functions have the names that torch.cuda and torch_npu use."""
    assert (True, True, True) == (NPU.is_available(), NPU.is_initialized(), NPU.is_bf16_supported())
    assert [torch.float16, torch.bfloat16] == NPU.get_amp_supported_dtype()
    assert "simnpu npu:1" == NPU.get_device_name(1)
    NPU.init()
    with NPU.device(1):
        assert 1 == NPU.current_device()
        assert NPU.current_stream().device_index == 1
    assert (0, 2) == (NPU.current_device(), NPU.device_count())
    assert NPU.memory_stats("npu:0") == dict(torch.accelerator.memory_stats(0))
    assert NPU.max_memory_reserved() == NPU.memory_reserved() >= NPU.memory_allocated()
    NPU.reset_peak_memory_stats()
    NPU.empty_cache()
    with pytest.raises(RuntimeError, match="can't be shared between processes"):
        NPU.Event(interprocess=True)


def test_the_device_draws_from_the_cpu_s_generator() -> None:
    """Seeds and states are the CPU's."""
    NPU.manual_seed_all(7)
    assert 7 == NPU.initial_seed() == torch.initial_seed()
    state = NPU.get_rng_state()
    first = torch.rand(4, device="npu")
    NPU.set_rng_state(state)
    assert torch.equal(torch.rand(4, device="npu"), first)
    generator = torch.Generator(device="npu").manual_seed(7)
    again = torch.Generator(device="npu").manual_seed(7)
    drawn = torch.rand(4, generator=generator, device="npu")
    assert torch.equal(torch.rand(4, generator=again, device="npu"), drawn)
    NPU.synchronize()


def test_streams_are_distinct_and_current_within_their_block() -> None:
    """A torch.Stream is a context manager."""
    first, second = torch.Stream(device="npu"), NPU.Stream()
    assert first.stream_id != second.stream_id
    default = torch.accelerator.current_stream()
    with first:
        assert first == torch.accelerator.current_stream() == NPU.current_stream()
        with NPU.stream(second):
            assert second == NPU.current_stream()
        with NPU.stream(None):
            assert first == NPU.current_stream()
    assert default == NPU.current_stream() == NPU.default_stream()
    NPU.set_stream(second)
    assert second == torch.accelerator.current_stream()


def test_an_event_is_done_when_the_work_before_it_is(schedule: Plan) -> None:
    """The result of the earlier work is complete then."""
    result = (torch.ones(4, device="npu") * 3).to("cpu", non_blocking=True)
    event = NPU.Event()
    event.record()
    event.synchronize()
    assert event.query()
    assert [3.0] * 4 == result.tolist()


def test_events_keep_time(schedule: Plan) -> None:
    """A later event has a later time."""
    first, last = NPU.Event(enable_timing=True), NPU.Event(enable_timing=True)
    first.record()
    torch.ones(1000, device="npu").sum()
    last.record()
    last.synchronize()
    assert first.elapsed_time(last) > 0


def test_time_between_events_that_are_not_done_is_refused() -> None:
    """A real device refuses this, too."""
    first, last = (torch.Event("npu", enable_timing=True) for _ in range(2))
    first.record()
    last.record()
    with pytest.raises(RuntimeError, match="must be completed before calculating elapsed time"):
        first.elapsed_time(last)
    NPU.synchronize()


def test_recording_an_event_again_does_not_change_earlier_waits() -> None:
    """A wait is for the recording that was the latest when it was called."""
    slow, other = torch.Stream(device="npu"), torch.Stream(device="npu")
    event = torch.Event("npu")
    event.record()
    other.wait_event(event)
    with other:
        result = torch.ones(2, device="npu").to("cpu", non_blocking=True)
    with slow:
        unrelated = torch.ones(2, device="npu").to("cpu", non_blocking=True)
    event.record(slow)
    other.synchronize()
    assert [1.0, 1.0] == result.tolist()
    assert bool(unrelated.isnan().all())
    NPU.synchronize()


def test_a_loop_that_polls_ends(schedule: Plan) -> None:
    """Each query runs one operation; the first answer about pending work is no."""
    result = (torch.ones(8, device="npu") + 1).to("cpu", non_blocking=True)
    event = NPU.Event()
    event.record()
    if schedule.schedule == "lazy":
        assert not event.query()
        assert bool(result.isnan().all())
    while not event.query():
        pass
    assert [2.0] * 8 == result.tolist()
    while not NPU.current_stream().query():
        pass
    NPU.synchronize()


def test_nothing_runs_before_somebody_waits() -> None:
    """In the schedule lazy only step() and waits run operations."""
    torch.ones(4, device="npu").add_(1)
    before = simnpu.pending()
    assert before >= 2
    simnpu.step()
    assert before - 1 == simnpu.pending()
    NPU.synchronize()
    assert 0 == simnpu.pending()


def test_waiting_for_one_stream_leaves_the_others() -> None:
    """Only the operations that the stream depends on run."""
    stream = torch.Stream(device="npu")
    waited, left = torch.zeros(1, device="npu"), torch.zeros(1, device="npu")
    NPU.synchronize()
    left.add_(1)
    with stream:
        waited.add_(1)
    stream.synchronize()
    assert 1 == simnpu.pending()
    NPU.synchronize()


def test_devices_are_waited_for_separately() -> None:
    """synchronize(d) runs only the streams of d."""
    first, second = torch.zeros(1, device="npu:0"), torch.zeros(1, device="npu:1")
    NPU.synchronize(0)
    NPU.synchronize(1)
    first.add_(1)
    second.add_(1)
    NPU.synchronize(1)
    assert 1 == simnpu.pending()
    NPU.synchronize("npu:0")


def test_a_copy_between_devices_is_ordered_with_both(schedule: Plan) -> None:
    """The copy runs after earlier work of both streams and before their later work."""
    for _ in range(5):
        source = torch.arange(64.0, device="npu:0") * 2
        target = torch.zeros(64, device="npu:1") - 1
        target.copy_(source, non_blocking=True)
        source.zero_()
        back = (target + 1).to("npu:0")
        assert torch.equal(back.cpu(), torch.arange(64.0) * 2 + 1)
    NPU.synchronize(1)


def test_tensors_of_two_devices_do_not_mix() -> None:
    """Host tensors don't mix either, except for numbers and the indices of a gather."""
    here, there = torch.ones(2, device="npu:0"), torch.ones(2, device="npu:1")
    with pytest.raises(RuntimeError, match=r"same device.* npu:0 and npu:1"):
        here + there
    with pytest.raises(RuntimeError, match=r"same device.* npu:0 and cpu"):
        here + torch.ones(2)
    assert [3.0, 3.0] == (here + torch.tensor(2.0)).tolist()
    assert [1.0] == here[torch.tensor([1])].tolist()
    NPU.synchronize(1)


def test_the_schedule_must_be_known() -> None:
    """The message lists the known schedules."""
    with pytest.raises(ValueError, match="known are lazy, eager, random, thread"):
        simnpu.set_schedule("quick")  # type: ignore[arg-type]


def test_a_seed_makes_random_repeatable() -> None:
    """With equal seeds the same operations are pending after the same calls."""

    def run(seed: int) -> list[int]:
        simnpu.set_schedule("random", seed=seed)
        counts = []
        for _ in range(30):
            torch.ones(2, device="npu").add_(1)
            counts.append(simnpu.pending())
        NPU.synchronize()
        return counts

    assert run(3) == run(3)
    assert run(3) != run(4)


def test_random_numbers_do_not_depend_on_the_schedule(schedule: Plan) -> None:
    """Random numbers follow the order of the calls, not the order in which operations run."""

    def draw() -> torch.Tensor:
        torch.manual_seed(5)
        first = torch.rand(4, device="npu")
        dropped = torch.nn.functional.dropout(torch.ones(16, device="npu"))
        torch.rand(3)
        return torch.cat([torch.randn(4, device="npu"), first, dropped]).cpu()

    here = draw()
    simnpu.set_schedule("eager")
    assert torch.equal(draw(), here)


def test_statistics_count() -> None:
    """The counters show queued operations, and those that had to wait for data."""
    before = simnpu.stats()
    mask = torch.ones(4, device="npu") > 0
    torch.nonzero(mask)
    after = simnpu.stats()
    assert before.queued_kernels < after.queued_kernels
    assert 1 == after.blocking_kernels - before.blocking_kernels
    assert "aten::nonzero" in after.blocking_names
    NPU.synchronize()
