"""Operators give the CPU's results, or are refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import simnpu
import torch

from conftest import NPU, Plan

SWEEP = Path(__file__).with_name("sweep_operators.py")

STRIDED_ONLY = "gives or takes a sparse tensor, and the device has strided tensors only"
HOST_INDICES = "torch wants its indices on the host, here as on CUDA"
NVIDIA_ONLY = "compiles a kernel for CUDA or ROCm"
UNINITIALISED = "gives memory that nobody wrote"
RANDOM = "draws random numbers, and each call on the device takes one seed from the CPU's generator"

# Operators that the device refuses, with the reason.
REFUSED = {
    "to_sparse": STRIDED_ONLY,
    "sparse.sampled_addmm": STRIDED_ONLY,
    "sparse.mm.reduce": STRIDED_ONLY,
    "tensor_split": HOST_INDICES,
}

# Operators that work, but whose results can't be compared with the CPU's, with the reason.
NOT_COMPARED = {
    **dict.fromkeys(
        (
            "jiterator_unary",
            "jiterator_binary",
            "jiterator_4inputs_with_extra_args",
            "jiterator_binary_return_by_ref",
            "jiterator_2inputs_2outputs",
        ),
        NVIDIA_ONLY,
    ),
    **dict.fromkeys(
        (
            "empty",
            "empty_like",
            "empty_permuted",
            "empty_strided",
            "new_empty",
            "new_empty_strided",
        ),
        UNINITIALISED,
    ),
    **dict.fromkeys(
        (
            "bernoulli",
            "cauchy",
            "exponential",
            "geometric",
            "log_normal",
            "multinomial",
            "nn.functional.alpha_dropout",
            "nn.functional.dropout",
            "nn.functional.dropout2d",
            "nn.functional.dropout3d",
            "nn.functional.feature_alpha_dropout.with_train",
            "nn.functional.fractional_max_pool2d",
            "nn.functional.fractional_max_pool3d",
            "nn.functional.multi_head_attention_forward",
            "nn.functional.rrelu",
            "nn.functional.scaled_dot_product_attention",
            "normal",
            "normal.in_place",
            "normal.number_mean",
            "rand_like",
            "randint",
            "randint_like",
            "randn",
            "randn_like",
            "uniform",
            "pca_lowrank",
            "svd_lowrank",
        ),
        RANDOM,
    ),
}


def test_operators_agree_with_the_cpu() -> None:
    """A random schedule runs all of torch's own samples, except for the listed operators."""
    left_out = json.dumps([*REFUSED, *NOT_COMPARED])
    done = subprocess.run([sys.executable, SWEEP, left_out], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1:]
    assert (0, last) == (done.returncode, last), f"crashed: {done.stderr[-2000:]}"
    *different, total = map(json.loads, done.stdout.splitlines())
    assert [] == different
    assert total["compared"] > 600


def on_device(*shape: int) -> torch.Tensor:
    """Makes ones on the device."""
    return torch.ones(*shape, device="npu")


def test_sparse_tensors_are_refused_by_name() -> None:
    """Conversions to a sparse tensor and operators on sparse tensors are refused."""
    with pytest.raises(RuntimeError, match="simnpu: aten::_to_sparse gives a tensor of layout"):
        on_device(2, 2).to_sparse()
    rows = torch.zeros(1, 1, dtype=torch.int64, device="npu")
    with pytest.raises(RuntimeError, match=r"simnpu: .* strided"):
        torch.sparse_coo_tensor(rows, on_device(1), (3,), check_invariants=False)
    NPU.synchronize()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_quantized_and_nested_tensors_are_refused_by_name() -> None:
    """The call is refused with simnpu's message, not with torch's list of all its backends."""
    with pytest.raises(RuntimeError, match=r"simnpu: aten::quantize_per_tensor .* quantized"):
        torch.ops.aten.quantize_per_tensor(on_device(2), 0.1, 0, torch.qint8)
    nested = torch.nested.as_nested_tensor([on_device(2)])
    with pytest.raises(RuntimeError, match=r"simnpu: .*nested tensors of this device"):
        nested.unbind()
    NPU.synchronize()


def test_an_operator_without_a_cpu_kernel_is_refused_by_name() -> None:
    """torch has the fused cells of LSTM and GRU only for accelerators."""
    cell = torch.nn.LSTM(3, 4).to("npu")
    with pytest.raises(RuntimeError, match="simnpu: aten::_thnn_fused_lstm_cell isn't supported"):
        cell(on_device(2, 1, 3))
    NPU.synchronize()


def test_autocast_is_refused_by_name() -> None:
    """The call is refused with simnpu's message, not with torch's list of all its backends."""
    left = on_device(2, 2)
    with (
        torch.autocast("npu", dtype=torch.bfloat16),
        pytest.raises(RuntimeError, match="simnpu: aten::matmul under autocast isn't supported"),
    ):
        left @ left
    NPU.synchronize()


def test_tensor_split_needs_its_indices_on_the_host() -> None:
    """torch itself refuses indices on the device; indices on the host work."""
    with pytest.raises(RuntimeError, match="tensor_indices_or_sections to be on cpu"):
        on_device(4).tensor_split(torch.tensor([1], device="npu"))
    assert [1, 3] == [part.numel() for part in on_device(4).tensor_split(torch.tensor([1]))]
    NPU.synchronize()


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (torch.nn.Conv1d(4, 6, 3, stride=2, padding=1), (2, 4, 9)),
        (torch.nn.Conv2d(4, 6, (3, 2), dilation=2, groups=2, bias=False), (2, 4, 9, 7)),
        (torch.nn.Conv3d(2, 3, 2), (1, 2, 4, 5, 6)),
        (torch.nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1), (2, 4, 5)),
        (torch.nn.ConvTranspose2d(4, 6, 3, groups=2, padding=1), (2, 4, 5, 6)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, torch.nn.Module) else "",
)
def test_convolutions_and_their_gradients_agree(
    schedule: Plan, module: torch.nn.Module, shape: tuple[int, ...]
) -> None:
    """Forward and backward passes give the CPU's numbers and don't wait."""
    torch.manual_seed(0)
    module = module.cpu()
    host = torch.randn(shape, requires_grad=True)
    expected = torch.autograd.grad(module(host).pow(2).sum(), [host, *module.parameters()])
    device = host.detach().to("npu").requires_grad_()
    module = module.to("npu")
    before = simnpu.stats().blocking_kernels
    got = torch.autograd.grad(module(device).pow(2).sum(), [device, *module.parameters()])
    assert before == simnpu.stats().blocking_kernels
    NPU.synchronize()
    for left, right in zip(expected, got, strict=True):
        torch.testing.assert_close(right.cpu(), left, rtol=1e-4, atol=1e-4)


def test_inverse_transforms_agree(schedule: Plan) -> None:
    """Hermitian transforms go through conjugate views."""
    host = torch.randn(4, 5, dtype=torch.complex64)
    device = host.to("npu")
    for name in ("ifft", "hfft", "ihfft", "irfft", "irfftn", "hfft2", "ihfft2"):
        transform = getattr(torch.fft, name)
        real = name.startswith("ih")
        expected = transform(host.real.contiguous() if real else host)
        got = transform(device.real.contiguous() if real else device)
        torch.testing.assert_close(got.cpu(), expected)


def test_layer_norm_has_the_bits_of_the_cpu() -> None:
    """It doesn't wait, since the device runs it as one kernel; torch would split it."""
    host = torch.randn(3, 1)
    weight = torch.randn(1)
    before = simnpu.stats().blocking_kernels
    got = torch.nn.functional.layer_norm(host.to("npu"), (1,), weight.to("npu"))
    assert before == simnpu.stats().blocking_kernels
    assert torch.equal(torch.nn.functional.layer_norm(host, (1,), weight), got.cpu())


def test_training_agrees(schedule: Plan) -> None:
    """A few steps of an optimiser give the CPU's weights."""

    def train(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        model, data = model.to(device), torch.randn(16, 4).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            (model(data) - data.sum(1, keepdim=True)).pow(2).mean().backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()

    torch.testing.assert_close(train("npu"), train("cpu"), rtol=1e-4, atol=1e-4)


def test_refusals_can_be_set() -> None:
    """A refusal may name an operator or one overload, and a dtype or every dtype."""
    tensor = on_device(2)
    simnpu._C.set_refusals([("aten::mul", "float64", "it has no such unit")])
    expected = "simnpu: aten::mul.out refuses float64 as it has no such unit; install(refuse=None)"
    with pytest.raises(RuntimeError, match=re.escape(expected)):
        tensor.double() * 2
    assert [2.0, 2.0] == (tensor * 2).tolist()
    simnpu._C.set_refusals([("aten::mul.Scalar", "*", "why not")])
    assert [2.0, 2.0] == (tensor * 2).tolist()
    simnpu._C.set_refusals([("aten::mul.out", "*", "why not")])
    with pytest.raises(RuntimeError, match="refuses every dtype as why not"):
        tensor * 2


def test_a_refusal_of_an_unknown_dtype_is_an_error() -> None:
    """Such a refusal would never apply."""
    with pytest.raises(ValueError, match="names the dtype 'float12', which isn't known"):
        simnpu._C.set_refusals([("aten::mul", "float12", "it is odd")])
