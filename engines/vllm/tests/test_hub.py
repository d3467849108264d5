"""A model that is named as on the hub: its weights are known by the files in the hub's cache."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from small_models import PLAIN

from kvtide.plugin.vllm.identity import namespace_of
from kvtide.plugin.vllm.settings import OffloadSettings

REVISIONS = ("a" * 40, "b" * 40)
NAME = "org/name"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache as the hub's client fills it: two revisions, the second of which is `main`."""
    model = tmp_path / "models--org--name"
    for folder in ("blobs", "refs"):
        (model / folder).mkdir(parents=True)
    (model / "refs" / "main").write_text(REVISIONS[1])
    config = json.dumps(PLAIN).encode()
    git_name = hashlib.sha1(b"blob %d\0" % len(config) + config).hexdigest()
    for revision in REVISIONS:
        snapshot = model / "snapshots" / revision
        snapshot.mkdir(parents=True)
        weights = revision.encode()
        for name, hub_name, contents in (
            ("config.json", git_name, config),
            ("model.safetensors", hashlib.sha256(weights).hexdigest(), weights),
        ):
            (model / "blobs" / hub_name).write_bytes(contents)
            (snapshot / name).symlink_to(model / "blobs" / hub_name)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return model


def weights_of(model: str, **options: Any) -> str:
    """The weights in the identity of an engine of vLLM's that serves the model."""
    from vllm.config import ModelConfig, VllmConfig
    from vllm.platforms import current_platform

    config = VllmConfig(model_config=ModelConfig(model, skip_tokenizer_init=True, **options))
    settings, now = OffloadSettings(), time.time()
    return namespace_of(
        config, settings, [], current_platform, is_durable=True, started_s=now
    ).weights


class TestModelOfTheHub:
    def test_is_known_by_its_files_whether_it_is_named_or_its_folder(self, cache: Path) -> None:
        folders = [str(cache / "snapshots" / revision) for revision in REVISIONS]
        named = weights_of(NAME)

        assert named == weights_of(folders[1])
        assert named != weights_of(folders[0]) == weights_of(NAME, revision=REVISIONS[0])
