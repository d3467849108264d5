"""Does `kvtide run` come to the same answers if it is ended again and again?

Prompts of all kinds are answered once undisturbed. Then they are answered by processes that are
ended at random moments: by TERM, HUP, INT, KILL and a full disk. After each end the same command
goes on with `--resume`. No answer may be lost on the way, and in the end the file must have the
answers of the undisturbed run, each once.

    python benchmarks/run/soak.py [--prompts 5000] [--ends 24] [--by KILL] [--long] [--seed 1]
                                  [--fork] [--json]

The exit code is 1 where something was lost or differs. The full disk is a small tmpfs where this
process may mount one, otherwise a limit on the size of files. With --fork each process is a
copy of this one, which has loaded and checked the model: that saves ten seconds for each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import kvtide.cli.main
from kvtide.cli.serving import LibraryServing
from kvtide.machine import machine_facts
from kvtide.serve.engine import Engine, EngineOptions
from kvtide.serve.fetch import Progress
from kvtide.serve.models import OpenModel
from kvtide.serve.request import Request
from kvtide.serve.selfcheck import RowCheck

FULL = "full disk"
ENDS = {
    "TERM": 128 + signal.SIGTERM,
    "HUP": 128 + signal.SIGHUP,
    "INT": 128 + signal.SIGINT,
    "KILL": -signal.SIGKILL,
    FULL: 1,
}
"""The ways to end a run, and their exit codes."""
# 512 tokens: requests are retracted, and prompts of more tokens than that fail.
OPTIONS = ["--model=tiny-random", "--kv-memory=256KiB", "--max-running=8", "--max-new-tokens=12"]
# Room for two requests, so that what is retracted goes to the disk.
BELOW = ["--host-memory=128KiB", "--disk-memory=64MiB"]
# Many are retracted at any moment, and go to the disk at once.
LONG = ["--max-new-tokens=80", "--max-running=16", "--host-memory=64KiB"]
COMMAND = [sys.executable, "-c", "from kvtide.cli import start; raise SystemExit(start())"]
_START_S, _END_S = 120, 300
_BLOCK_BYTES = 4096
_WORDS = ("tide", "sand", "goes out", "comes in", "over", "stones", "shells", "and", "old ropes")


# ---- prompts of all kinds -------------------------------------------------------------------


def make_files(count: int, chance: random.Random) -> dict[str, str]:
    """Files by their names: three fifths kvtide's own lines, a fifth OpenAI's, a fifth text."""
    fifth = count // 5
    makers: dict[str, tuple[Callable[[int, random.Random], str], int]] = {
        "lines.jsonl": (own_line, count - 2 * fifth),
        "batch.jsonl": (batch_line, fifth),
        "plain.txt": (lambda _, chance: words(chance), fifth),
    }
    return {
        name: "".join(f"{make(number, chance)}\n" for number in range(lines))
        for name, (make, lines) in makers.items()
        if lines
    }


def words(chance: random.Random) -> str:
    """A prompt, one in forty longer than the pool."""
    count = 900 if chance.random() < 1 / 40 else chance.randint(1, 8)
    return " ".join(chance.choice(_WORDS) for _ in range(count))


def settings(chance: random.Random) -> dict[str, Any]:
    """Settings of a line, each of which about one line in three has."""
    possible = {
        "max_tokens": chance.randint(1, 16),
        "temperature": chance.choice([0.0, 0.5, 1.3]),
        "seed": chance.randint(0, 5),
        "n": chance.choice([1, 1, 1, 2]),
        "stop": chance.choice(["a", "e", "\n"]),
    }
    return {name: value for name, value in possible.items() if chance.random() < 0.3}


def messages(chance: random.Random) -> list[dict[str, str]]:
    """A conversation."""
    turns = [{"role": "user", "content": words(chance)}]
    if chance.random() < 0.3:
        turns.insert(0, {"role": "system", "content": "Be brief."})
    if chance.random() < 0.3:
        turns += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}]
    return turns


def own_line(number: int, chance: random.Random) -> str:
    """A line of kvtide's, with a plain prompt or a conversation."""
    asked: dict[str, Any] = {"prompt": words(chance)}
    if chance.random() < 0.5:
        asked = {"messages": messages(chance)}
    return json.dumps({"id": f"prompt-{number}", **asked, **settings(chance)})


def batch_line(number: int, chance: random.Random) -> str:
    """A line of OpenAI's batch format."""
    url, asked = "/v1/chat/completions", {"messages": messages(chance)}
    if chance.random() < 0.3:
        url, asked = "/v1/completions", {"prompt": words(chance)}  # type: ignore[dict-item]
    body = {"model": "any", **asked, **settings(chance)}
    return json.dumps({"custom_id": f"batch-{number}", "method": "POST", "url": url, "body": body})


# ---- processes ------------------------------------------------------------------------------


class LoadedServing(LibraryServing):
    """The library with the model loaded and checked, for the processes that are forked from here.

    It computes with one thread: others wouldn't be there after the fork.
    """

    def __init__(self) -> None:
        self.check_device("cpu")
        self._model = super().open_model("tiny-random", dtype="bfloat16", progress=lambda *_: None)
        engine = super().build_engine(self._model, EngineOptions(1 << 18, threads=1), [])
        self._check = engine.exact_check
        engine.close()

    def open_model(self, name: str, *, dtype: str, progress: Progress) -> OpenModel:  # noqa: ARG002
        """See Serving."""
        return self._model

    def build_engine(
        self,
        model: OpenModel,
        options: EngineOptions,
        requests: Sequence[Request],
        check: RowCheck | None = None,
    ) -> Engine:
        """See Serving."""
        return super().build_engine(model, options, requests, check or self._check)


class Process:
    """A `kvtide run` in a process of its own; what it says is in `said`."""

    def __init__(
        self, arguments: list[str], loaded: LoadedServing | None, most_bytes: int | None
    ) -> None:
        reader, writer = os.pipe()
        self.said = b""
        if loaded is not None:
            self.pid = self._fork(arguments, loaded, writer, most_bytes)
        else:
            limit = None if most_bytes is None else (lambda: limit_files(most_bytes))
            process = subprocess.Popen(
                [*COMMAND, *arguments], stdout=subprocess.DEVNULL, stderr=writer, preexec_fn=limit
            )
            self.pid, process.returncode = process.pid, 0  # `wait` is done here
        os.close(writer)
        self._code: int | None = None
        self._listener = threading.Thread(target=self._listen, args=(reader,))
        self._listener.start()

    def poll(self) -> int | None:
        """The exit code, or minus the signal; None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, until: Callable[[], bool], limit_s: float) -> None:
        """Waits for something or for the process's end; after the limit kills it and raises."""
        give_up = time.monotonic() + limit_s
        while self.poll() is None and not until():
            if time.monotonic() > give_up:
                os.kill(self.pid, signal.SIGKILL)
                raise TimeoutError(f"no end after {limit_s} s: {self.said[-2000:]!r}")
            time.sleep(0.002)

    def end(self) -> int:
        """Waits for the end; the exit code."""
        self.wait(lambda: False, _END_S)
        self._listener.join()
        code = self.poll()
        assert code is not None
        return code

    def _fork(
        self, arguments: list[str], loaded: LoadedServing, writer: int, most_bytes: int | None
    ) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 70
        try:
            os.dup2(writer, 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            if most_bytes is not None:
                limit_files(most_bytes)
            code = kvtide.cli.main.main(arguments, serving=loaded)
        finally:
            os._exit(code)

    def _listen(self, reader: int) -> None:
        with os.fdopen(reader, "rb", buffering=0) as file:
            while data := file.read(65536):
                self.said += data


def limit_files(most_bytes: int) -> None:
    """From here on no file of this process grows larger."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))


class Disk:
    """A folder whose disk can be made full."""

    def __init__(self, folder: Path, *, is_mounted: bool) -> None:
        self.folder = folder
        self.is_mounted = is_mounted

    def leave(self, free_bytes: int) -> int | None:
        """Leaves only so much room; what is returned is the limit for files of the process."""
        if not self.is_mounted:
            largest = max((path.stat().st_size for path in self.folder.iterdir()), default=0)
            return largest + free_bytes
        state = os.statvfs(self.folder)
        used = (state.f_blocks - state.f_bfree) * state.f_frsize
        blocks = -(-(used + free_bytes) // _BLOCK_BYTES)
        self._remount(f"size={blocks * _BLOCK_BYTES}")
        return None

    def clear(self) -> None:
        """Makes room again."""
        if self.is_mounted:
            self._remount("size=1g")

    def _remount(self, size: str) -> None:
        subprocess.run(
            ["mount", "-o", f"remount,{size}", str(self.folder)], check=True, capture_output=True
        )


@contextlib.contextmanager
def open_disk(folder: Path, *, may_mount: bool) -> Iterator[Disk]:
    """A disk of its own for the folder, where this process may mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", str(folder)]
    is_mounted = False
    if may_mount and os.geteuid() == 0:
        is_mounted = subprocess.run(command, check=False, capture_output=True).returncode == 0
    try:
        yield Disk(folder, is_mounted=is_mounted)
    finally:
        if is_mounted:
            subprocess.run(["umount", str(folder)], check=True)


# ---- one file of prompts --------------------------------------------------------------------


@dataclass
class Soak:
    """The run of one file of prompts that is ended again and again."""

    prompts: Path
    disk: Disk
    reference: Path
    loaded: LoadedServing | None
    chance: random.Random
    is_long: bool = False
    problems: list[str] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)
    suspended: int = 0
    """How many requests left their KV on the disk."""
    kept: dict[str, bytes] = field(default_factory=dict)
    """The lines that must not be lost any more."""

    @property
    def out(self) -> Path:
        """The answers' file."""
        return self.disk.folder / f"{self.prompts.name}.answers"

    @property
    def report(self) -> Path:
        """The report's file, which is on another disk."""
        return self.reference.with_suffix(".report")

    @property
    def below(self) -> Path:
        """The folder of KV below host memory."""
        return self.reference.with_suffix(".kv")

    def start(self, out: Path, *options: str, most_bytes: int | None = None) -> Process:
        """Starts the command; it's always the same for one `out`."""
        files = ["--out", str(out), "--report", str(self.report)]
        below = [*BELOW, f"--disk-dir={self.below}"] if self.has_disk(out) else []
        more = LONG if self.is_long else []
        arguments = ["run", str(self.prompts), *OPTIONS, *below, *more, *files, *options]
        return Process(arguments, self.loaded, most_bytes)

    def has_disk(self, out: Path) -> bool:
        """Whether KV goes to a disk, from which a later run takes it over."""
        return out == self.out and self.prompts.suffix == ".jsonl"

    def run(self, ends: list[str]) -> None:
        """An undisturbed run, then the disturbed ones, and the comparison."""
        whole = self.start(self.reference)
        self.check(whole.end() == 0, f"the undisturbed run failed: {whole.said[-2000:]!r}")
        for place, end in enumerate(ends):
            if self.out.exists():
                break
            left = self.reference.stat().st_size - sum(map(len, self.kept.values()))
            share = 2 * left / (len(ends) - place + 1)
            self.disturb(end, int(self.chance.random() * min(share, 0.9 * left)))
        last = self.start(self.out, "--resume")
        self.check(last.end() == 0, f"the last run failed: {last.said[-2000:]!r}")
        self.check_kept("the last run")
        self.compare()

    def disturb(self, end: str, progress_bytes: int) -> None:
        """Starts a run and ends it when it has written so much."""
        size = size_of(self.part)
        self.report.unlink(missing_ok=True)
        limit = self.disk.leave(max(progress_bytes, _BLOCK_BYTES)) if end == FULL else None
        process = self.start(self.out, "--resume", most_bytes=limit)
        if end != FULL:
            process.wait(lambda: bool(process.said), _START_S)
            if self.chance.random() < 0.2:  # while it loads, or soon after
                until = time.monotonic() + self.chance.random() * 3
                process.wait(lambda: time.monotonic() > until, _END_S)
            else:
                process.wait(lambda: size_of(self.part) > size + progress_bytes, _END_S)
            if process.poll() is None:
                os.kill(process.pid, getattr(signal, f"SIG{end}"))
        code = process.end()
        self.disk.clear()
        if code == 0:
            return  # complete before its end came
        self.ended[end] += 1
        self.check(code == ENDS[end], f"{end}: exit code {code}: {process.said[-2000:]!r}")
        self.check(b"Traceback" not in process.said, f"{end}: {process.said[-4000:]!r}")
        self.check_kept(end)
        if end == "KILL":
            self.suspended += len(list(self.below.glob("??/*.safetensors")))
        self.check_counts(end, process.said)

    @property
    def part(self) -> Path:
        """Where answers are while the run isn't complete."""
        return self.out.with_name(f"{self.out.name}.part")

    def check_kept(self, end: str) -> None:
        """Whatever was on the disk is still there, byte for byte."""
        found = answers_of(self.part) | answers_of(self.out)
        lost = [name for name, line in self.kept.items() if found.get(name) != line]
        self.check(not lost, f"{end}: {len(lost)} answers are lost, such as {lost[:3]}")
        self.kept = found

    def check_counts(self, end: str, said: bytes) -> None:
        """What it said and reported is what is on the disk."""
        suspended = re.search(rb"the KV of ([\d,]+) request", said)
        self.suspended += int(suspended[1]) if suspended else 0
        match = re.search(rb"answered: ([\d,]+) of ", said)
        if match is None:
            return  # it hadn't begun to answer, or was killed
        count = int(match[1].replace(b",", b""))
        self.check(count == len(self.kept), f"{end}: said {count}, kept {len(self.kept)}")
        if end == FULL:
            self.check(b"--resume" in said, f"{end}: doesn't say how to go on: {said[-999:]!r}")
        elif self.report.exists():
            report = json.loads(self.report.read_bytes())
            found = (report["answered"], report["ended_by"])
            self.check(found == (count, f"SIG{end}"), f"{end}: the report says {found}")
        else:
            self.problems.append(f"{end}: there is no report")

    def compare(self) -> None:
        """The answers are those of the undisturbed run, in order, each once."""
        found, expected = rows_of(self.out), rows_of(self.reference)
        self.check(len(found) == len(expected), f"{len(found)} lines, not {len(expected)}")
        for row, other in zip(found, expected, strict=False):
            self.check(row == other, f"{row} is not {other}")
        self.check(not self.part.exists(), f"{self.part} is left")

    def check(self, holds: bool, problem: str) -> None:
        """Notes the problem if the check doesn't hold."""
        if not holds:
            self.problems.append(f"{self.prompts.name}: {problem}")


def size_of(path: Path) -> int:
    """The size in bytes; 0 if there is no such file."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def answers_of(path: Path) -> dict[str, bytes]:
    """The whole lines of answers by their ids; failed prompts have none."""
    if not path.exists():
        return {}
    lines = [line for line in path.read_bytes().splitlines(keepends=True) if line[-1:] == b"\n"]
    rows = [(json.loads(line), line) for line in lines]
    return {row.get("custom_id", row.get("id")): line for row, line in rows if row.get("key")}


def rows_of(path: Path) -> list[Any]:
    """The answers, without what depends on the requests beside them: retractions and hits."""
    rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    for row in rows:
        for sample in [row, *row.get("samples", [])]:
            sample.pop("retractions", None)
            sample.pop("cached_tokens", None)
    return rows


# ---- all of it ------------------------------------------------------------------------------


def soak(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs it all in a folder, and returns what came of it."""
    chance = random.Random(options.seed)
    files = make_files(options.prompts, chance)
    if options.only:
        files = {name: text for name, text in files.items() if name in options.only}
    loaded = LoadedServing() if options.fork else None
    started, problems, ended = time.monotonic(), [], Counter[str]()
    failed = suspended = 0
    with open_disk(folder / "disk", may_mount=not options.no_mount) as disk:
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
            ways = options.by or [*ENDS]
            ends = [*ways] * (-(-options.ends // (len(ways) * len(files))))
            chance.shuffle(ends)
            run = Soak(folder / name, disk, folder / f"{name}.whole", loaded, chance, options.long)
            run.run(ends)
            problems += run.problems
            ended += run.ended
            suspended += run.suspended
            failed += sum(row["key"] is None for row in rows_of(run.reference))
            print(f"{name}: {dict(run.ended)}, {len(run.problems)} problems", file=sys.stderr)
    return {
        "prompts": sum(text.count("\n") for text in files.values()),
        "failed": failed,
        "ended_by": dict(ended),
        "suspended": suspended,
        "disk": "tmpfs" if disk.is_mounted else "limit on files",
        "processes": "forked" if options.fork else "commands",
        "problems": problems,
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=5000)
    parser.add_argument("--ends", type=int, default=24, help="how often the runs are ended, about")
    parser.add_argument("--by", nargs="*", choices=ENDS, help="only in these ways")
    parser.add_argument("--long", action="store_true", help="longer answers in less memory")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", help="of these files of prompts alone")
    parser.add_argument("--fork", action="store_true", help="copies of this process, which is fast")
    parser.add_argument("--no-mount", action="store_true", help="a limit in place of a full disk")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # A shell starts what runs in the background with Ctrl-C ignored, and so would the runs be.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="kvtide-soak-") as folder:
        found = soak(options, Path(folder))
    if options.json:
        today = datetime.now(timezone.utc).date().isoformat()
        print(json.dumps({"date": today, "machine": machine_facts(), **found}, indent=2))
    else:
        print(*found["problems"], f"{found['ended_by']}, {found['suspended']} left KV", sep="\n")
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
