"""Each option of a model and of its images: it makes another namespace, or decides no byte."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from small_models import PLAIN, folder_of
from vllm.config import ModelConfig, VllmConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.platforms import current_platform

from kvtide.plugin.vllm.identity import namespace_of
from kvtide.plugin.vllm.options import MODEL_WITHOUT_EFFECT, MULTIMODAL_WITHOUT_EFFECT
from kvtide.plugin.vllm.settings import OffloadSettings

DECIDING = {
    # what the model computes with
    *("dtype", "quantization", "quantization_config", "allow_deprecated_quantization"),
    *("max_model_len", "original_max_model_len", "model_weights", "model_impl"),
    *("model_class_overrides", "trust_remote_code", "word_embeddings_untied_by_checkpoint"),
    *("disable_sliding_window", "disable_cascade_attn", "attention_chunk_size", "enforce_eager"),
    # as what it is used
    *("runner", "runner_type", "convert", "convert_type", "pooler_config", "encoder_config"),
    *("is_encoder_decoder", "is_diffusion", "hf_image_processor_config"),
}
OF_IMAGES = {
    *("language_model_only", "media_io_kwargs", "mm_processor_kwargs", "mm_device_do_normalize"),
    *("mm_hasher_algorithm", "mm_encoder_only", "mm_encoder_tp_mode", "mm_encoder_attn_backend"),
    *("mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path", "interleave_mm_strings"),
    *("video_pruning_rate", "video_pruning_method"),
}
READ_ELSEWHERE = {"hf_config", "multimodal_config"}
"""What is in these counts by itself."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    """vLLM's configuration for a small model, as if it took images."""
    model = folder_of(PLAIN, tmp_path_factory.mktemp("models"))
    found = VllmConfig(model_config=ModelConfig(model, skip_tokenizer_init=True))
    found.model_config.multimodal_config = MultiModalConfig()
    return found


def engine_of(config: VllmConfig) -> str:
    """What all options decide of the namespace of blocks that outlive the process."""
    settings = OffloadSettings(weights="r1")
    return namespace_of(config, settings, [], current_platform, is_durable=True).engine


class TestOptionsOfAModel:
    def test_are_all_decided_about(self, config: VllmConfig) -> None:
        options = {name for name in vars(config.model_config) if not name.startswith("_")}
        assert options == DECIDING | MODEL_WITHOUT_EFFECT

    @pytest.mark.parametrize("name", sorted((DECIDING | MODEL_WITHOUT_EFFECT) - READ_ELSEWHERE))
    def test_make_another_namespace_unless_they_decide_no_byte(
        self, name: str, config: VllmConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        check(name, name in DECIDING, config.model_config, config, monkeypatch)


class TestOptionsOfImages:
    def test_are_all_decided_about(self) -> None:
        options = {field.name for field in fields(MultiModalConfig)}
        assert options == OF_IMAGES | MULTIMODAL_WITHOUT_EFFECT

    @pytest.mark.parametrize("name", sorted(OF_IMAGES | MULTIMODAL_WITHOUT_EFFECT))
    def test_make_another_namespace_unless_they_decide_no_byte(
        self, name: str, config: VllmConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        images = config.model_config.multimodal_config
        check(name, name in OF_IMAGES, images, config, monkeypatch)


def check(
    name: str, decides: bool, part: Any, config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes an option, and looks whether that makes another namespace."""
    before = engine_of(config)
    assert before == engine_of(config)
    monkeypatch.setitem(vars(part), name, "another value")

    assert decides == (before != engine_of(config))
