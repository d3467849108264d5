"""DeviceTests: what a device must pass (kvtide.device.base.Device is the contract)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from kvtide.conformance import checks, refusals
from kvtide.conformance.pool_under_test import KINDS
from kvtide.conformance.samples import sample
from kvtide.device import Device, Step

_SIZE = 4096
# Together these pools have rows of tokens, of pages and of requests, and several dtypes. Their
# kinds are the ones that differ most for a device.
_POOLS = (
    ("gqa", "created"),
    ("gqa-dtypes-of-their-own", "gaps between rows"),
    ("mla_nz", "one tensor a layer"),
    ("window_and_full", "one tensor for all layers"),
    ("dsa-tails", "created"),
)


class DeviceTests(ABC):
    """Inherit this as `class TestMyDevice(DeviceTests)` and give it three methods.

    A device is made for each test and closed after it.
    """

    @abstractmethod
    def make_device(self) -> Device:
        """An open device."""

    @abstractmethod
    def read_raw(self, tensor: torch.Tensor) -> bytes:
        """The bytes of a uint8 tensor on your device, after all earlier work has ended."""

    @abstractmethod
    def write_raw(self, tensor: torch.Tensor, data: bytes) -> None:
        """Sets the bytes of a tensor on your device. They are set when this returns."""

    @pytest.fixture
    def device(self) -> Iterator[Device]:
        """A device from `make_device`, closed after the test."""
        device = self.make_device()
        yield device
        device.close()

    # ---- memory ------------------------------------------------------------------------

    def test_device_memory_is_zeroed_bytes(self, device: Device) -> None:
        """`allocate` gives a zeroed tensor of any length on the device."""
        for size in (0, 1, _SIZE + 1):
            memory = device.allocate(size)
            assert (torch.uint8, (size,)) == (memory.dtype, tuple(memory.shape))
            assert device.torch_device.type == memory.device.type
            assert bytes(size) == self.read_raw(memory)

    def test_host_memory_is_the_hosts(self, device: Device) -> None:
        """The host reads and writes the tensor of `allocate_host` directly."""
        memory = device.allocate_host(_SIZE)
        assert (torch.uint8, (_SIZE,), "cpu") == (
            memory.dtype, tuple(memory.shape), memory.device.type
        )  # fmt: skip
        view = memory.numpy()
        view[:] = 7
        assert _SIZE * 7 == int(memory.to(torch.int64).sum())

    def test_elements_go_down_to_a_byte(self, device: Device) -> None:
        """The widest dtype comes first. The last one has 1 byte, so one fits any alignment."""
        sizes = [dtype.itemsize for dtype in device.elements]
        assert sorted(sizes, reverse=True) == sizes
        assert 1 == sizes[-1]
        assert device.chunk_bytes > 0
        assert device.move_bytes > 0

    def test_every_element_is_gathered_and_scattered(self, device: Device) -> None:
        """A mover issues just these two operations, with an index that it uploaded."""
        for dtype in device.elements:
            data = bytes(range(12 * dtype.itemsize))
            memory, other = device.allocate(len(data)), device.allocate(len(data))
            self.write_raw(memory, data)
            rows, target = (x.view(dtype).view(12, 1) for x in (memory, other))

            def issue(
                _: torch.Tensor | None, rows: torch.Tensor = rows, target: torch.Tensor = target
            ) -> None:
                index = device.upload(torch.tensor([3, 11, 0]))
                target.index_copy_(0, index, rows.index_select(0, index))

            device.submit(lambda: [[Step(_nothing, issue)]]).wait()  # waited for
            size, expected = dtype.itemsize, bytearray(len(data))
            for row in (3, 11, 0):
                expected[row * size : (row + 1) * size] = data[row * size : (row + 1) * size]
            assert bytes(expected) == self.read_raw(other)

    # ---- jobs --------------------------------------------------------------------------

    def test_jobs_end_in_the_order_submitted(self, device: Device) -> None:
        """When the last job has ended, all have ended."""
        order: list[int] = []
        jobs = [device.submit(lambda n=n: [[Step(_noting(order, n))]]) for n in range(4)]  # type: ignore[misc]
        assert [None] == jobs[-1].wait()
        assert [0, 1, 2, 3] == order
        assert all(job.done() for job in jobs)

    def test_job_at_once_begins_after_those_before_it(self, device: Device) -> None:
        """It has a result or an error, like any other job."""
        order: list[int] = []
        for number in range(3):
            device.submit(lambda n=number: [[Step(_noting(order, n))]])  # type: ignore[misc]
        job = device.submit(lambda: [[Step(_noting(order, 3))]], at_once=True)
        assert [None] == job.wait()
        assert [0, 1, 2, 3] == order
        bad = device.submit(lambda: [[Step(_raising)]], at_once=True)
        with pytest.raises(OSError, match="of the step"):
            bad.wait()

    def test_results_are_those_of_all_phases(self, device: Device) -> None:
        """Each `wait` gives them, in the order of the phases and of their steps."""
        phases: list[list[Step[int]]] = [
            [Step(lambda n=n: n) for n in numbers]  # type: ignore[misc]
            for numbers in ((9,), (), (0, 1, 2, 3, 4), (7, 8))
        ]
        job = device.submit(lambda: phases)
        assert [9, 0, 1, 2, 3, 4, 7, 8] == job.wait()
        assert [9, 0, 1, 2, 3, 4, 7, 8] == job.wait()

    def test_job_may_have_nothing_to_do(self, device: Device) -> None:
        """A job may have no phases, or a phase without steps: zero tokens are a valid request."""
        none: list[list[Step[int]]] = []
        assert [] == device.submit(lambda: none).wait()
        assert [] == device.submit(lambda: [[]]).wait()

    def test_phase_begins_when_the_one_before_has_ended(self, device: Device) -> None:
        """A restore checks everything before it writes anything."""
        order: list[int] = []

        def phases() -> Iterator[Sequence[Step[None]]]:
            yield [Step(_noting(order, 0)) for _ in range(5)]
            order.append(1)
            yield [Step(_noting(order, 2)) for _ in range(5)]

        device.submit(phases).wait()
        assert [0] * 5 + [1] + [2] * 5 == order

    def test_error_ends_its_job_and_no_other(self, device: Device) -> None:
        """Each `wait` raises it. No later phase of the job begins. The next job runs."""
        order: list[int] = []

        def phases() -> Iterator[Sequence[Step[None]]]:
            yield [Step(_noting(order, 0)), Step(_raising)]
            order.append(1)
            yield [Step(_noting(order, 2))]

        job = device.submit(phases)
        for _ in range(2):
            with pytest.raises(OSError, match="of the step"):
                job.wait()
        assert job.done()
        assert 1 not in order
        assert [5] == device.submit(lambda: [[Step(lambda: 5)]]).wait()

    def test_closing_waits_and_may_be_repeated(self) -> None:
        """The device has done its jobs when `close` returns."""
        device, order = self.make_device(), list[int]()
        device.submit(lambda: [[Step(_noting(order, 1))]])
        device.close()
        device.close()
        assert [1] == order

    # ---- copies ------------------------------------------------------------------------

    def test_bytes_have_arrived_when_the_host_is_called(self, device: Device) -> None:
        """`finish` hashes a chunk, so the copy must have ended when `finish` is called."""
        memory, host = device.allocate(_SIZE), device.allocate_host(_SIZE)
        self.write_raw(memory, b"\x5a" * _SIZE)
        host.zero_()

        def issue(_: torch.Tensor | None) -> None:
            host.copy_(memory, non_blocking=True)

        step = Step(lambda: host.numpy().tobytes(), issue)
        assert [b"\x5a" * _SIZE] == device.submit(lambda: [[step]]).wait()

    def test_bytes_have_arrived_when_a_job_has_ended(self, device: Device) -> None:
        """The host may then overwrite the memory from which the job copied."""
        memory, host = device.allocate(_SIZE), device.allocate_host(_SIZE)
        host.fill_(0x3C)

        def issue(_: torch.Tensor | None) -> None:
            memory.copy_(host, non_blocking=True)

        device.submit(lambda: [[Step(_nothing, issue)]]).wait()
        host.zero_()
        assert b"\x3c" * _SIZE == self.read_raw(memory)

    def test_job_waits_for_earlier_work_of_the_caller(self, device: Device) -> None:
        """An offload may begin while a kernel still writes the slots."""
        memory, host = device.allocate(_SIZE), device.allocate_host(_SIZE)
        for value in (3, 4):
            memory.fill_(value)

            def issue(_: torch.Tensor | None) -> None:
                host.copy_(memory, non_blocking=True)

            step = Step(lambda: host.numpy().tobytes(), issue)
            job = device.submit(lambda: [[step]])  # noqa: B023 # waited for
            assert [bytes([value]) * _SIZE] == job.wait()

    def test_each_step_has_staging_for_itself(self, device: Device) -> None:
        """Many steps write different bytes, and each finds its bytes when it copies them."""
        hosts = [device.allocate_host(_SIZE) for _ in range(9)]

        def step(number: int) -> Step[bytes]:
            def issue(staging: torch.Tensor | None) -> None:
                memory = device.allocate(_SIZE) if staging is None else staging[:_SIZE]
                memory.fill_(number)
                hosts[number].copy_(memory, non_blocking=True)

            return Step(lambda: hosts[number].numpy().tobytes(), issue)

        steps = [step(number) for number in range(9)]
        found = device.submit(lambda: [steps], staging_bytes=_SIZE).wait()
        assert [bytes([number]) * _SIZE for number in range(9)] == found

    @pytest.mark.parametrize(("name", "kind"), _POOLS)
    def test_pools_on_it_pass(self, device: Device, name: str, kind: str) -> None:
        """Pools of several layouts pass checks of round trips, refusals and fences."""
        subject = KINDS[kind](sample(name), device)
        checks.check_boundaries(subject)
        checks.check_indices(subject)
        refusals.check_failed_restores(subject)
        checks.check_fences(subject)


def _nothing() -> None:
    return


def _noting(order: list[int], number: int) -> Callable[[], None]:
    return lambda: order.append(number)


def _raising() -> None:
    raise OSError("of the step")
