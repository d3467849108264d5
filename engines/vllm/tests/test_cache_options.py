"""Each option of vLLM's caches: it makes another namespace, or somebody decided that it needn't."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_models import RECURRENT, folder_of
from vllm.config import CacheConfig, ModelConfig, VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import MambaSpec
from vllm_engine import opened_with_kvtide

from kvtide.plugin.vllm.identity import namespace_of
from kvtide.plugin.vllm.options import CACHE_WITHOUT_EFFECT
from kvtide.plugin.vllm.secondary import namespace_of_chunks
from kvtide.plugin.vllm.settings import OffloadSettings
from kvtide.tier import Namespace

DECIDING = {
    *("block_size", "prefix_match_unit", "prefix_caching_hash_algo", "kv_cache_layout"),
    *("cache_dtype", "kv_cache_dtype_skip_layers", "sliding_window", "kv_sharing_fast_prefill"),
    *("mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_block_size", "mamba_cache_mode"),
    *("mamba_page_size_padded", "skip_page_size_padded", "enable_mamba_shared_prefix_checkpoint"),
    *("use_replayssm", "replayssm_buffer_len", "use_kda_recoverssm", "swa_bounded_replay"),
}
OPTIONS = {field.name for field in fields(CacheConfig) if not field.name.startswith("_")}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    """vLLM's configuration for a small model."""
    model = folder_of(RECURRENT, tmp_path_factory.mktemp("models"))
    return VllmConfig(model_config=ModelConfig(model, skip_tokenizer_init=True))


def named(config: VllmConfig) -> Namespace:
    """The namespace of blocks that outlive the process."""
    settings = OffloadSettings(weights="r1")
    return namespace_of(config, settings, [], current_platform, is_durable=True)


class TestOptionsOfCaches:
    def test_are_all_decided_about(self) -> None:
        assert OPTIONS == DECIDING | CACHE_WITHOUT_EFFECT

    @pytest.mark.parametrize("name", sorted(OPTIONS))
    def test_make_another_namespace_unless_they_decide_no_byte(
        self, name: str, config: VllmConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = named(config)
        assert before == named(config)
        monkeypatch.setitem(vars(config.cache_config), name, "another value")

        assert (name in DECIDING) == (before != named(config))


class TestTensorsOfLayers:
    def test_count_by_their_dtypes(self, tmp_path: Path) -> None:
        with opened_with_kvtide(
            folder_of(RECURRENT, tmp_path),
            settings={"host_memory": "64MiB"},
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
        ) as engine:
            config = engine.core.vllm_config
            groups = get_kv_transfer_group().connector_worker.spec.config.groups
            opened = engine_of(config, groups)
            assert opened == engine.store._namespace.engine
            layers = config.compilation_config.static_forward_context.values()
            layer = next(layer for layer in layers if isinstance(_caches_of(layer), tuple))
            first, *rest = layer.kv_cache
            layer.kv_cache = (first.view(torch.float16), *rest)

            assert opened != engine_of(config, groups)

    def test_count_by_what_vllm_says_of_them_where_layers_are_in_other_processes(
        self, config: VllmConfig
    ) -> None:
        def below(spec: object) -> Namespace:
            caches = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
            cache = SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1)
            offloading = SimpleNamespace(groups=[], cache=cache, kv_cache_layout="")
            return namespace_of_chunks(
                config, caches, offloading, OffloadSettings(weights="r1"), 64
            )

        specs = [
            MambaSpec(block_size=16, shapes=((4,),), dtypes=(dtype,))
            for dtype in (torch.float16, torch.float16, torch.bfloat16)
        ]
        first, same, other = map(below, specs)
        assert first == same != other


def _caches_of(layer: Any) -> Any:
    return getattr(layer, "kv_cache", None)


def engine_of(config: Any, groups: Any) -> str:
    """What vLLM and its layers decide in the namespace of a rank."""
    beside = [str(group.layer_names) for group in groups]
    settings = OffloadSettings()
    return namespace_of(
        config, settings, [], current_platform, is_durable=False, beside=beside
    ).engine
