"""What is refused at the start, and whether the installed vLLM has what kvtide reads and calls."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_models import RECURRENT, folder_of
from vllm_engine import opened_with_kvtide

from kvtide.errors import UsageError
from kvtide.plugin.engine_reads import EngineReads
from kvtide.plugin.refusals import Refused
from kvtide.plugin.vllm.package import VLLM
from kvtide.plugin.vllm.reads import VLLM_READS


class TestReads:
    def test_all_that_is_read_is_there(self) -> None:
        assert [] == VLLM_READS.what_is_gone()

    def test_what_is_missing_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        wanted = {"OffloadingWorker": ("wait", "yawn"), "NoClass": ("x",)}
        monkeypatch.setattr(EngineReads, "tables", lambda _: [wanted])

        assert ["class NoClass", "OffloadingWorker.yawn"] == VLLM_READS.what_is_gone()

    def test_this_version_is_tested(self) -> None:
        assert VLLM.version in VLLM.tested


class TestRefusals:
    def test_of_host_memory_without_room_for_a_block_names_the_setting(self) -> None:
        with (
            pytest.raises(UsageError, match=r"host_memory: 1\.0 MiB for 1 ranks is no room"),
            opened_with_kvtide(settings={"host_memory": "1MiB"}),
        ):
            pass

    def test_of_recurrent_state_without_prefix_caching_comes_before_vllm_stumbles(
        self, tmp_path: Path
    ) -> None:
        folder = folder_of(RECURRENT, tmp_path)
        with (
            pytest.raises(Refused, match="--enable-prefix-caching"),
            opened_with_kvtide(
                folder,
                settings={"host_memory": "64MiB"},
                load_format="dummy",
                skip_tokenizer_init=True,
                num_gpu_blocks_override=20,
                enable_prefix_caching=False,
            ),
        ):
            pass

    @pytest.mark.parametrize(
        ("changed", "said"),
        [
            ({"lora_config": object()}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
            (
                {"speculative_config": SimpleNamespace(method="eagle", model="a/draft")},
                r"draft \(eagle a/draft\)",
            ),
            ({"kv_transfer_config": SimpleNamespace(kv_role="kv_producer")}, "kv_both"),
            (
                {"cache_config": SimpleNamespace(enable_prefix_caching=False)},
                "recurrent state.*--enable-prefix-caching",
            ),
        ],
    )
    @pytest.mark.parametrize("is_hybrid", [True, False])
    def test_of_what_is_inexact_name_it(
        self, changed: dict[str, Any], said: str, is_hybrid: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from kvtide.plugin.vllm.connector import refuse_what_is_inexact

        usual = {
            "lora_config": None,
            "speculative_config": None,
            "kv_transfer_config": SimpleNamespace(kv_role="kv_both"),
            "model_config": SimpleNamespace(is_hybrid=is_hybrid, is_attention_free=not is_hybrid),
            "cache_config": SimpleNamespace(enable_prefix_caching=True),
        }
        monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        refuse_what_is_inexact(SimpleNamespace(**usual))
        with pytest.raises(Refused, match=said):
            refuse_what_is_inexact(SimpleNamespace(**{**usual, **changed}))
