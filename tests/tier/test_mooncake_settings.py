"""What an operator writes about a Mooncake store: a master, or Mooncake's own file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtide.errors import UsageError
from kvtide.tier import MooncakeSettings


def parse(text: str) -> MooncakeSettings:
    """Parses as `kvtide run` does."""
    return MooncakeSettings.parse(text, name="--mooncake")


@pytest.mark.parametrize(
    "text", ["127.0.0.1:50051", "store.example:1", "[::1]:65535", "etcd://10.0.0.1:2379"]
)
def test_a_master_is_enough(text: str) -> None:
    """All else has mooncake's usual values: TCP, and no service for metadata."""
    assert MooncakeSettings(text, "", "tcp", "", "P2PHANDSHAKE") == parse(f" {text}\n")


@pytest.mark.parametrize(
    "text",
    ["", "10.0.0.1", "10.0.0.1:", ":50051", "a:0", "a:65536", "a:٣", "a:-1", "a b:1", "a\nb:1"],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    """The error names the value and what is accepted."""
    with pytest.raises(UsageError, match=r"^--mooncake: .*isn't a master's address.*HOST:PORT"):
        parse(text)


def test_mooncakes_own_file_is_read(tmp_path: Path) -> None:
    """Operators have this file for SGLang and vLLM; what it says of lent memory isn't kvtide's."""
    path = tmp_path / "mooncake.json"
    content = {
        "master_server_address": "10.0.0.1:50051",
        "local_hostname": "10.0.0.7",
        "protocol": "rdma",
        "device_name": "mlx5_0,mlx5_1",
        "metadata_server": "http://10.0.0.1:8080/metadata",
        "global_segment_size": "4gb",
        "local_buffer_size": 1 << 30,
    }
    path.write_text(json.dumps(content))
    expected = MooncakeSettings(
        "10.0.0.1:50051",
        "10.0.0.7",
        "rdma",
        "mlx5_0,mlx5_1",
        "http://10.0.0.1:8080/metadata",
    )
    assert expected == parse(str(path))


def test_what_a_file_leaves_out_or_empty_has_the_usual_value(tmp_path: Path) -> None:
    """Mooncake's examples have empty texts for what isn't needed."""
    path = tmp_path / "mooncake.json"
    path.write_text('{"master_server_address": "a:1", "device_name": "", "protocol": ""}')
    assert MooncakeSettings("a:1") == parse(str(path))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "can't be read: No such file or directory"),
        (b"{", "isn't a JSON file"),
        (b"\xff", "isn't a JSON file"),
        (b"[" * 100_000, "isn't a JSON file|has more than"),
        (b"[" * 60_000, "isn't a JSON file"),
        (b" " * 65_537, "has more than 65536 bytes"),
        (b"[]", "has no 'master_server_address'"),
        (b"{}", "has no 'master_server_address'"),
        (b'{"master_server_address": 3}', "'master_server_address' is a int, not a text"),
        (b'{"master_server_address": ""}', "isn't a master's address"),
        (b'{"master_server_address": "a:1", "protocol": ["tcp"]}', "'protocol' is a list"),
    ],
)
def test_a_file_that_says_something_else_is_refused(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    """The error names the option and the file."""
    path = tmp_path / "mooncake.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=rf"^--mooncake: .*mooncake\.json.*({said})"):
        parse(str(path))
