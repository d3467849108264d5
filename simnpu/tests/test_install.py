"""Installing the device, and building the package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import simnpu

from conftest import NPU

ROOT = Path(__file__).parent.parent


def run(script: str) -> str:
    """Runs a script in a new process, and returns what it prints."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (0, "") == (done.returncode, done.stderr)
    return done.stdout


def test_a_second_install_with_the_same_arguments_changes_nothing() -> None:
    """The call returns the same module."""
    assert NPU is simnpu.install("npu", devices=2)


def test_a_second_install_with_other_arguments_is_refused() -> None:
    """torch has room for only one such device in a process."""
    with pytest.raises(RuntimeError, match=r"devices=2.*is installed already, so .*devices=3"):
        simnpu.install("npu", devices=3)


@pytest.mark.parametrize("devices", [0, 17])
def test_the_number_of_devices_is_checked(devices: int) -> None:
    """The number is checked before anything is registered."""
    with pytest.raises(ValueError, match=f"simnpu: devices is {devices}, not 1 to 16"):
        simnpu.install("npu", devices=devices)


def test_another_backend_is_left_alone() -> None:
    """torch has one place for backends of this kind, and importing simnpu doesn't take it."""
    script = (
        "import torch, simnpu; torch.utils.rename_privateuse1_backend('other')\n"
        "try: simnpu.install()\nexcept RuntimeError as e: print(e)"
    )
    assert run(script).startswith("simnpu: this process has a device of its own (other)")


def test_the_device_may_have_any_name() -> None:
    """`torch.<name>` and the tensors' methods have the name, too."""
    script = (
        "import torch, simnpu; m = simnpu.install('sim', memory_bytes=1 << 20, schedule='eager')\n"
        "x = torch.ones(2).sim(); print(x.device, x.is_sim, m is torch.sim, m.mem_get_info()[1])"
    )
    assert "sim:0 True True 1048576\n" == run(script)


def test_pinning_can_be_limited_from_the_start() -> None:
    """The limit is like a machine's limit on locked memory."""
    script = (
        "import torch, simnpu; simnpu.install(pinned_limit_bytes=64)\n"
        "try: torch.zeros(64).pin_memory()\nexcept RuntimeError as e: print(e)"
    )
    assert run(script).startswith("simnpu: can't pin 256 bytes of host memory: 0 of 64 are pinned")


def test_every_source_is_compiled() -> None:
    """all.cpp includes every other source; the compiler gets only that file."""
    folder = ROOT / "csrc"
    included = re.findall(
        r'^#include "(\w+\.cpp)"$', (folder / "all.cpp").read_text(), re.MULTILINE
    )
    assert sorted(path.name for path in folder.glob("*.cpp")) == sorted(["all.cpp", *included])


@pytest.mark.parametrize(
    "environment", [{"CXX": "/nowhere/c++"}, {"PATH": "/nowhere"}], ids=["CXX", "PATH"]
)
def test_a_build_without_a_compiler_says_what_is_missing(environment: dict[str, str]) -> None:
    """The build ends with one line that has the remedy."""
    without = {key: value for key, value in os.environ.items() if key != "CXX"} | environment
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext"],
        cwd=ROOT,
        env=without,
        capture_output=True,
        text=True,
    )
    name = environment.get("CXX", "c++")
    assert 1 == done.returncode
    assert f"simnpu: no C++17 compiler: {name!r} isn't there; install one" in done.stderr
    assert "apt-get install g++" in done.stderr
