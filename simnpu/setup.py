"""Builds simnpu's extension against the torch that is installed here."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from setuptools import setup

BUILDS = {"build", "build_ext", "bdist_wheel", "develop", "editable_wheel", "install"}


def check_compiler() -> None:
    """Ends the build with one line if there is no compiler."""
    name = os.environ.get("CXX", "c++")
    if shutil.which(name.split()[0] if name else "c++") is None:
        sys.exit(
            f"simnpu: no C++17 compiler: {name!r} isn't there; install one (Debian and Ubuntu: "
            "apt-get install g++; Fedora: dnf install gcc-c++; conda: conda install gxx) "
            "or name yours in the environment variable CXX"
        )


def build() -> None:
    """Builds the package, which requires the torch of this build, since its ABI changes."""
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    extension = CppExtension(
        "simnpu._C",
        ["csrc/all.cpp"],
        depends=sorted(str(path) for path in Path("csrc").iterdir()),
        # The C++ standard is torch's choice: C++17 for 2.9, C++20 for 2.13.
        extra_compile_args=["-O1", "-g0", "-fvisibility=hidden"],
        extra_link_args=["-s"],
    )
    setup(
        install_requires=[
            f"torch=={torch.__version__.split('+')[0]}",
            "numpy",  # without it torch warns at the first copy
            "tomli>=2; python_version < '3.11'",
        ],
        ext_modules=[extension],
        cmdclass={"build_ext": BuildExtension},
    )


if BUILDS & set(sys.argv):
    check_compiler()  # before torch is looked for, which takes seconds
build()
