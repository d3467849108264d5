"""The settings of vLLM's connector: an unknown name is an error, and so is a wrong type."""

from __future__ import annotations

from typing import Any

import pytest

from kvtide.errors import UsageError
from kvtide.plugin.vllm.settings import OffloadSettings, read_settings, read_tier_settings


def test_without_any_setting_a_share_of_the_memory_is_used() -> None:
    """Names of vLLM's own have no effect here."""
    given = {"spec_name": "KvtideSpec", "offload_prompt_only": True}
    assert OffloadSettings() == read_settings(given)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"host_memroy": "8GiB"}, "'host_memroy' isn't known"),
        ({"blocks_per_chunk": 4}, "'blocks_per_chunk' isn't known"),
        ({"host_memory": 8}, "host_memory: 8 isn't a text"),
        ({"disk_dir": None}, "disk_dir: None isn't a text"),
        ({"disk_dir": "kv", "disk_memory": "none"}, "disk_memory"),
        ({"offload_prompt_only": "false"}, "offload_prompt_only: 'false' isn't true or false"),
        ({"self_describing_kv_events": 0}, "self_describing_kv_events: 0 isn't true or false"),
        ({"spec_name": "CPUOffloadingSpec"}, "spec_name: 'CPUOffloadingSpec' isn't 'KvtideSpec'"),
    ],
)
def test_a_setting_without_effect_is_an_error(extra: dict[str, Any], said: str) -> None:
    """It names the setting."""
    with pytest.raises(UsageError, match=said):
        read_settings(extra)


def test_a_secondary_tier_needs_a_place() -> None:
    """A folder, a store, or both; host memory is vLLM's own there."""
    settings = read_tier_settings({"mooncake": "127.0.0.1:50051", "weights": "r1"})
    assert settings.mooncake is not None
    assert ("127.0.0.1:50051", "r1") == (settings.mooncake.master, settings.weights)
    with pytest.raises(UsageError, match="needs disk_dir or mooncake"):
        read_tier_settings({"weights": "r1"})
    with pytest.raises(UsageError, match="'host_memory' isn't known"):
        read_tier_settings({"host_memory": "1GiB", "disk_dir": "kv"})
