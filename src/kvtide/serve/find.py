"""Finds a model by its name, and fetches it if it isn't here. Imports no torch.

torch and transformers take seconds to import, so a model that doesn't exist is told before them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvtide.errors import UsageError, shortened
from kvtide.models.names import HUB_ID, TINY_RANDOM
from kvtide.serve.fetch import SMOLLM2, Progress, kept_model
from kvtide.serve.folder import check_magic, read_folder
from kvtide.serve.hub import silent_hub
from kvtide.serve.reasons import one_line, short_reason

_ACCEPTED = (
    f"{SMOLLM2.name}, {TINY_RANDOM}, a Hugging Face folder, a .gguf file, "
    "or a hub id such as org/name"
)
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


@dataclass(frozen=True)
class FoundModel:
    """The folder or the GGUF file of a model; None for the model that is built in memory."""

    name: str
    path: Path | None


def find_model(name: str, *, progress: Progress) -> FoundModel:
    """Finds a model.

    `name` is `smollm2` (the first call fetches and converts it, which takes a minute),
    `tiny-random`, a Hugging Face folder, a `.gguf` file, or a hub id. `progress` is called during
    long work. Raises UsageError, in one line, if there is no such model, and for files in which
    something is plainly missing.
    """
    if name == TINY_RANDOM:
        return FoundModel(name, None)
    if name == SMOLLM2.name:
        return FoundModel(name, kept_model(SMOLLM2, _convert, progress))
    path = _find_named(name, progress)
    if path.is_dir():
        with one_line(f"the model in {path}"):
            read_folder(path)
    else:
        with one_line(f"the GGUF file {path}"):
            check_magic(path)
    return FoundModel(name, path)


def _find_named(name: str, progress: Progress) -> Path:
    try:
        path = Path(name).expanduser()
        is_there = bool(name) and (path.is_dir() or path.is_file())
    # RuntimeError: `~user` names an unknown user.
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or short_reason(error)
        raise UsageError(
            f"there is no model {shortened(name, 80)!r} ({reason}): name {_ACCEPTED}"
        ) from error
    if is_there:
        return path
    # A name with two slashes, or one that ends in .gguf, is the path of a missing file.
    if HUB_ID.fullmatch(name) and not name.endswith(".gguf"):
        return _fetch_from_hub(name, progress)
    raise UsageError(f"there is no model {name!r}: name {_ACCEPTED}")


def _convert(path: Path, folder: Path) -> None:
    from kvtide.serve.convert import convert_gguf

    convert_gguf(path, folder)


def _fetch_from_hub(name: str, progress: Progress) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    progress(f"fetching {name} from the hub", 0, None)
    # The import sets how much the hub prints, so it comes before `silent_hub`.
    fetch = huggingface_hub.snapshot_download
    try:
        with silent_hub():
            # Only files at the top: folders hold the same weights in other formats.
            folder = fetch(name, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"])
    except HFValidationError as error:  # a name that no model of the hub can have
        raise UsageError(f"there is no model {shortened(name, 80)!r}: name {_ACCEPTED}") from error
    # The hub raises its HTTP client's errors, and changes the client between releases.
    except Exception as error:
        raise UsageError(
            f"the model {name} can't be fetched: there is no such folder here, and the hub "
            f"fails: {short_reason(error)}; name {_ACCEPTED}"
        ) from error
    return Path(folder)
