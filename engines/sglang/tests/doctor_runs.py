"""Runs `kvtide doctor --sglang` unchanged, and with faults. Run this as a script.

It prints one line of JSON: for each run, by name, the exit code, standard output and standard
error. It is its own process, since SGLang's plugins stay loaded.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from kvtide.cli.main import main
from kvtide.doctor import sglang_checks
from kvtide.plugin import package
from kvtide.plugin.description import Description
from kvtide.plugin.sglang.package import SGLANG
from kvtide.plugin.sglang.pools import describe, keys_values
from kvtide.plugin.sglang.pools.subject import Subject
from kvtide.plugin.source import Source

# All runs share what was read, since reading takes two seconds.
SOURCE = SGLANG.source()
DESCRIBERS: dict[str, Any] = describe.DESCRIBERS  # type: ignore[assignment]


def run(*arguments: str) -> tuple[int, str, str]:
    """Returns the doctor's exit code, standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["doctor", "--sglang", *arguments])
    return code, out.getvalue(), err.getvalue()


@contextmanager
def few_cases(names: Sequence[str] = ("MHA, page 1", "keys alone")) -> Iterator[None]:
    """Limits the doctor to these cases, since all of them take long."""
    cases = [case for case in sglang_checks.all_cases() if case.name in names]
    with patch.object(sglang_checks, "all_cases", lambda: cases):
        yield


def without_values(subject: Subject) -> Description:
    """Describes keys and values, but forgets the values."""
    whole: Description = attention_describer(subject)
    return replace(whole, parts=whole.parts[:1])


MOVED = {"ModelRunner": ("token_to_kv_pool", "renamed?"), "OncePool": ("k_buffer",)}
attention_describer = DESCRIBERS["MHATokenToKVPool"]


def broken_build() -> Any:
    """Fails to build a pool for lack of a kernel, and prints a line before it."""
    sys.stdout.write("what a person would be shown in the middle of the JSON\n")
    raise RuntimeError("no kernel for this machine\nand so on")


def runs() -> Iterator[tuple[str, tuple[int, str, str]]]:
    """Yields each run by its name."""
    yield "whole", run("--json")
    with few_cases():
        yield "few", run()
        with patch.dict(DESCRIBERS, {"MHATokenToKVPool": without_values}):
            yield "wrong describer", run("--json")
            yield "wrong describer, in words", run()
        with patch.dict(DESCRIBERS):
            del DESCRIBERS["MHATokenToKOnlyPool"]
            yield "unknown class", run("--json")
        with patch.object(keys_values, "READS", {**keys_values.READS, **MOVED}):
            yield "moved reads", run("--json")
            with patch.object(package, "installed_version", lambda name: "0.6.0"):
                yield "moved reads of another version", run("--json")
                yield "moved reads of another version, in words", run()
        # The plugin was loaded without these hooks, so they are missing now.
        with patch.dict(os.environ, {"KVTIDE_SGLANG_COLOCATED": "1"}):
            yield "hooks missing", run("--json")
            with patch.dict(os.environ, {"KVTIDE_SGLANG": "0"}):
                yield "off", run("--json")
                yield "off, in words", run()
            # As if it had been loaded with them.
            with patch("kvtide.plugin.sglang.hooks.hooks_not_in_place", lambda settings: []):
                yield "colocated", run()
        with patch.object(sglang_checks, "entry_points", lambda group: ()):
            yield "not registered", run()
        with patch.dict(os.environ, {"KVTIDE_HOST_MEMROY": "24GiB"}):
            yield "a misspelt variable", run("--json")
            yield "a misspelt variable, in words", run()
        with patch.dict(os.environ, {"KVTIDE_DISK_DIR": "/tmp/kv", "KVTIDE_DISK_MEMORY": "3MiB"}):
            yield "a disk", run("--json")
            yield "a disk, in words", run()
        nowhere = {"KVTIDE_DISK_DIR": "/dev/null/kv", "KVTIDE_MOONCAKE": "127.0.0.1:1"}
        with patch.dict(os.environ, nowhere):
            yield "nothing that can be used", run("--json")
        with patch.dict(os.environ, {"KVTIDE_HOST_MEMORY": "24"}):
            yield "no unit", run("--json")
        with patch.dict(os.environ, {"SGLANG_PLUGINS": "this, that"}):
            yield "left out", run("--json")
        with patch.dict(os.environ, {"KVTIDE_SGLANG": "yes"}):
            yield "an invalid setting", run("--json")
    unbuilt = [replace(sglang_checks.all_cases()[0], build=broken_build)]
    with patch.object(sglang_checks, "all_cases", lambda: unbuilt):
        yield "unbuilt", run("--json")
    with patch.object(
        sglang_checks, "all_cases", side_effect=ImportError("no module of that name")
    ):
        yield "moved", run("--json")
    yield "modules", (0, json.dumps([name for name in sys.modules if "kvtide.serve" in name]), "")


if __name__ == "__main__":
    with patch.object(Source, "of_installed", lambda *_: SOURCE):
        sys.stdout.write(json.dumps(dict(runs())) + "\n")
