"""MooncakeSettings: how to join a Mooncake store, as an operator writes it.

    10.0.0.1:50051        the master, over TCP
    mooncake.json         a file of Mooncake's own form, which SGLang and vLLM read, too:

    {"master_server_address": "10.0.0.1:50051", "protocol": "rdma", "device_name": "mlx5_0",
     "local_hostname": "10.0.0.7", "metadata_server": "P2PHANDSHAKE"}

Such a file may have other names: they say what a program lends the store, and kvtide lends nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from kvtide.errors import UsageError, shortened

_LARGEST_BYTES = 1 << 16
_FIELDS = {
    "master_server_address": "master",
    "local_hostname": "host",
    "protocol": "protocol",
    "device_name": "devices",
    "metadata_server": "metadata",
}
_ACCEPTED = (
    "accepted: the master as HOST:PORT, such as 127.0.0.1:50051, or a file of Mooncake's "
    "settings whose name ends with .json"
)


@final
@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """How to join a store.

    `master` is `host:port`, or the address of a service that knows the master. `host` is this
    machine's address for the nodes; by default the one towards the master. The other fields are
    mooncake's.
    """

    master: str
    host: str = ""
    protocol: str = "tcp"
    devices: str = ""
    metadata: str = "P2PHANDSHAKE"

    @classmethod
    def parse(cls, text: str, *, name: str) -> MooncakeSettings:
        """Reads `text`, the value of `name` (such as `--mooncake`): a master, or a file's path.

        Raises UsageError, which names the value and the accepted forms.
        """
        text = text.strip()
        if text.endswith(".json"):
            return cls(**_read(Path(text), name))
        return cls(_checked_master(text, name))


def _read(path: Path, name: str) -> dict[str, str]:
    """The fields that a file sets. Raises UsageError."""
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_BYTES + 1)
        if len(content) > _LARGEST_BYTES:
            raise UsageError(f"{name}: {path} has more than {_LARGEST_BYTES} bytes")
        parsed: Any = json.loads(content)
    except OSError as error:
        raise UsageError(f"{name}: {path} can't be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, an impossible path
        raise UsageError(f"{name}: {path} isn't a JSON file: {error}") from error
    found = parsed if isinstance(parsed, dict) else {}
    if "master_server_address" not in found:
        raise UsageError(f"{name}: {path} has no 'master_server_address'; write HOST:PORT there")
    values: dict[str, str] = {}
    for theirs, ours in _FIELDS.items():
        value = found.get(theirs, "")
        if not isinstance(value, str):
            raise UsageError(f"{name}: {path}: {theirs!r} is a {type(value).__name__}, not a text")
        if value:
            values[ours] = value
    _checked_master(values.get("master", ""), f"{name}: {path}")
    return values


def _checked_master(text: str, name: str) -> str:
    """A master's address, or that of a service that knows it (`etcd://…`). Raises UsageError."""
    host, _, port = text.rpartition(":")
    is_address = bool(host) and port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16
    if not text.isprintable() or " " in text or not (is_address or "://" in text):
        raise UsageError(f"{name}: {shortened(text)!r} isn't a master's address; {_ACCEPTED}")
    return text
