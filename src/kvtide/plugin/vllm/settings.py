"""What an operator sets: the JSON of `--kv-transfer-config`, which `kvtide vllm` prints.

host_memory   the host memory of all ranks of an engine together, such as 24GiB
disk_dir      a folder for blocks that have no room there; each rank has a folder in it
disk_memory   the disk space of all ranks together, such as 200GiB
weights       the name of the model's revision; by default a hash of the model's files
mooncake      a Mooncake store that other machines share: HOST:PORT of its master, or its .json file

KVTIDE_SALT in the environment is a tenant's secret: who doesn't have it can't find the tenant's KV.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from kvtide.errors import UsageError, shortened
from kvtide.sizes import parse_memory
from kvtide.tier.mooncake_settings import MooncakeSettings

CONNECTOR = "KvtideConnector"
SPEC = "KvtideSpec"
TIER_CONNECTOR = "KvtideTierConnector"
TIER = "kvtide"
"""How vLLM names kvtide's connector and its spec; the connector and the secondary tier for those
who keep vLLM's own primary tier."""
_TIER_TEXTS = ("disk_dir", "disk_memory", "mooncake", "weights")
_TEXTS = ("host_memory", "disk_dir", "disk_memory", "mooncake", "weights")
_FLAGS_OF_VLLM = ("offload_prompt_only", "self_describing_kv_events")
OF_VLLM = ("spec_name", *_FLAGS_OF_VLLM)
"""Settings of vLLM's own connector that have their meaning here, too."""


@final
@dataclass(frozen=True, slots=True)
class OffloadSettings:
    """The settings, checked."""

    host_memory_bytes: int | None = None
    """The limit of all arenas of the engine together; None means a share of the free memory."""
    disk_dir: Path | None = None
    """The folder for blocks that have no room in host memory; None means no disk."""
    disk_memory_bytes: int | None = None
    """The limit of all ranks' files together; None means a quarter of what is free, or ours."""
    mooncake: MooncakeSettings | None = None
    """The Mooncake store for the same blocks; None means no store."""
    weights: str = ""
    """The name of the model's revision; empty means that the model's files are hashed."""


def read_settings(extra: Mapping[str, Any]) -> OffloadSettings:
    """The settings in a `kv_connector_extra_config`. Raises UsageError, which names what is wrong.

    A name that isn't known is an error: otherwise an operator would notice only under load that a
    setting has no effect.
    """
    settings = _read(extra, "kv_connector_extra_config", _TEXTS, OF_VLLM)
    spec = extra.get("spec_name", SPEC)
    if spec != SPEC:
        raise UsageError(f"spec_name: {spec!r} isn't {SPEC!r}, which {CONNECTOR} needs")
    for name in _FLAGS_OF_VLLM:
        # vLLM takes any text for true, "false" too.
        if name in extra and not isinstance(extra[name], bool):
            raise UsageError(f"{name}: {extra[name]!r} isn't true or false")
    return settings


def read_tier_settings(entry: Mapping[str, Any]) -> OffloadSettings:
    """The settings in an entry of `secondary_tiers`, without vLLM's own. Raises UsageError."""
    settings = _read(entry, f"the secondary tier {TIER!r}", _TIER_TEXTS, ())
    if settings.disk_dir is None and settings.mooncake is None:
        raise UsageError(f"the secondary tier {TIER!r} needs disk_dir or mooncake: where KV goes")
    return settings


def _read(
    given: Mapping[str, Any], where: str, names: Sequence[str], of_vllm: Sequence[str]
) -> OffloadSettings:
    unknown = sorted(set(given) - {*names, *of_vllm})
    if unknown:
        known = ", ".join((*names, *of_vllm))
        raise UsageError(f"{where}: {shortened(unknown[0])!r} isn't known; accepted: {known}")
    texts = {name: given[name] for name in names if name in given}
    for name, text in texts.items():
        if not isinstance(text, str) or not text:
            raise UsageError(f"{name}: {text!r} isn't a text")
    if "disk_memory" in texts and "disk_dir" not in texts:
        raise UsageError("disk_memory is the limit of a folder; name it with disk_dir")
    sizes = {name: _size(name, texts) for name in ("host_memory", "disk_memory")}
    store = texts.get("mooncake")
    return OffloadSettings(
        sizes["host_memory"],
        Path(texts["disk_dir"]) if "disk_dir" in texts else None,
        sizes["disk_memory"],
        None if store is None else MooncakeSettings.parse(store, name="mooncake"),
        texts.get("weights", ""),
    )


def transfer_config(texts: Mapping[str, str]) -> dict[str, Any]:
    """What `--kv-transfer-config` takes, for settings by name. Raises UsageError as above."""
    extra = {"spec_name": SPEC, **texts}
    read_settings(extra)
    return {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        # Damaged KV is computed again; vLLM's default would end the request with an error.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def _size(name: str, texts: Mapping[str, str]) -> int | None:
    if name not in texts:
        return None
    size_bytes = parse_memory(texts[name], name=name)
    if not size_bytes:
        raise UsageError(f"{name}: {shortened(texts[name])!r} is no room for any block")
    return size_bytes
