from __future__ import annotations

import errno
import json
import logging
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers as tf
from rich.console import Console

from kvtide.cli.main import main
from kvtide.cli.plan import read_config
from kvtide.errors import UsageError
from kvtide.models.cache import ModelCache, cache_of
from kvtide.models.sizes import DEFAULT_SIZES
from kvtide.serve.models import open_model
from kvtide.serve.supported import geometry_of
from serve.gguf_files import write_gguf

CONFIGS = Path(__file__).parent.parent / "models" / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))


def config_of(name: str) -> str:
    """The path of a published configuration."""
    return str(CONFIGS / f"{name}.json")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """Returns the lines that `kvtide plan` prints of good input."""
    assert 0 == main(["plan", *arguments])
    captured = capsys.readouterr()
    assert "" == captured.err
    return captured.out.splitlines()


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Returns the one line that `kvtide plan` prints of bad input."""
    assert 2 == main(["plan", *arguments])
    captured = capsys.readouterr()
    assert "" == captured.out
    (line,) = captured.err.splitlines()
    assert line.startswith("kvtide: ")
    return line


def test_lines_are_plain_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal, a model with sliding windows is described by one fact a line."""
    assert [
        f"model: {config_of('gemma-3-27b')} (gemma3_text)",
        "layout: window_and_full",
        "plane full.k: page token head=16 head_dim=128, bfloat16, 10 layers, rows of 4,096 bytes",
        "plane full.v: page token head=16 v_head_dim=128, bfloat16, 10 layers, rows of 4,096 bytes",
        "plane window.k: page token head=16 head_dim=128, bfloat16, 52 layers, rows of 4,096 bytes",
        "plane window.v: page token head=16 v_head_dim=128, bfloat16, 52 layers, rows of 4,096 "
        "bytes",
        "a token: 507,904 bytes (496.0 KiB)",
        "a token past 1,024: 81,920 bytes (80.0 KiB), as one leaves the window",
        "a page of 16 tokens: 8,126,464 bytes (7.8 MiB)",
        "a request: nothing beside its tokens",
        "tokens per GiB: 2,114",
        "per GiB past 1,024: 13,107",
    ] == printed(capsys, config_of("gemma-3-27b"))


def test_options_change_what_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """The options set a rank's heads, a stage's layers, the cache's dtype, the page, the tokens."""
    options = ["--tp=4", "--pp=5", "--dtype=float8_e4m3fn", "--page-size=64", "--tokens=1000"]
    assert [
        f"model: {config_of('qwen3-next-80b-a3b')} (qwen3_next)",
        "layout: recurrent_and_full",
        "rank: one of 4 that share the heads",
        "stage: one of 5: layers 18 to 27 of 48, the fullest as SGLang divides them",
        "plane full.k: page token head=1 head_dim=256, float8_e4m3fn, 3 layers, rows of 256 bytes",
        "plane full.v: page token head=1 v_head_dim=256, float8_e4m3fn, 3 layers, rows of 256 "
        "bytes",
        "plane state.conv: request channel=2048 width=3, bfloat16, 7 layers, rows of 12,288 bytes",
        "plane state.ssm: request head=8 head_dim=128 state=128, float32, 7 layers, rows of "
        "524,288 bytes",
        "a token: 1,536 bytes (1.5 KiB)",
        "a page of 64 tokens: 98,304 bytes (96.0 KiB)",
        "a request: 3,756,032 bytes (3.6 MiB) of state beside its tokens",
        "tokens per GiB: 699,050",
        "1,000 tokens: 5,328,896 bytes (5.1 MiB), whole pages and state",
    ] == printed(capsys, config_of("qwen3-next-80b-a3b"), *options)


def test_heads_of_padding_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """3 ranks can't share 8 heads evenly: the line names the engine that pads them."""
    lines = printed(capsys, config_of("llama-3.1-8b"), "--tp", "3")
    rank = "rank: one of 3 that share the heads, some of them padding, as SGLang does it on a CPU"
    assert rank in lines
    (line,) = printed(capsys, config_of("llama-3.1-8b"), "--tp", "3", "--json")
    assert json.loads(line)["has_padding"] is True


def test_json_has_the_same_as_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """The output is one object with all sizes, and each plane's axes as its layout has them."""
    (line,) = printed(capsys, config_of("gpt-oss-20b"), "--json", "--tokens", "200", "--pp", "12")
    found = json.loads(line)
    planes, sizes = found.pop("planes"), found.pop("sizes")
    assert ["full.k", "full.v", "window.k", "window.v"] == [plane["name"] for plane in planes]
    assert {
        "name": "window.k",
        "axes": "window_layer page token window_head window_head_dim",
        "row_shape": [8, 64],
        "dtype": "bfloat16",
        "layers": 1,
        "row_bytes": 1024,
        "tokens_per_row": 1,
    } == planes[2]
    assert ([1], 8) == (sizes["full_layer"], sizes["window_head"])
    assert {
        "model": config_of("gpt-oss-20b"),
        "model_type": "gpt_oss",
        "layout": "window_and_full",
        "page_size": 16,
        "tp": 1,
        "has_padding": False,
        "pp": 12,
        "layers": [0, 2],
        "layer_count": 24,
        "token_bytes": 4096,
        "window_tokens": 128,
        "token_bytes_beyond_window": 2048,
        "page_bytes": 65_536,
        "request_bytes": 0,
        "tokens_per_gib": 262_144,
        "tokens_per_gib_beyond_window": 524_288,
        "tokens": 200,
        "bytes_of_tokens": (13 + 9) * 16 * 2048,
    } == found


def test_json_has_null_for_absent_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A model without a window has no size for it; a size of 0 bytes sets no limit on tokens."""
    (line,) = printed(capsys, config_of("llama-3.1-8b"), "--json")
    found = json.loads(line)
    assert [None] * 5 == [
        found[key]
        for key in ("window_tokens", "token_bytes_beyond_window", "tokens_per_gib_beyond_window",
                    "tokens", "bytes_of_tokens")
    ]  # fmt: skip
    (line,) = printed(capsys, config_of("mistral-7b-v0.1"), "--json")
    found = json.loads(line)
    assert (0, None) == (found["token_bytes_beyond_window"], found["tokens_per_gib_beyond_window"])
    assert "per GiB past 4,096: any number" in printed(capsys, config_of("mistral-7b-v0.1"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_table_fits_a_terminal_of_80_columns(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No model's table has a longer line, and no number is cut or broken."""

    def terminal() -> Console:
        return Console(file=sys.stdout, width=80, force_terminal=True, color_system=None,
                       _environ={"TERM": "xterm"})  # fmt: skip

    monkeypatch.setattr("kvtide.cli.plan.Console", terminal)
    monkeypatch.chdir(CONFIGS)
    lines = printed(capsys, f"{name}.json", "--dtype", dtype, "--tokens", "100000")
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    cache = cache_of(read_config(f"{name}.json"), dtype=dtype)
    for plane in cache.geometry.planes:
        (line,) = [line for line in lines if line.startswith(f"{plane.name} ")]
        assert line.split()[-3:] == [plane.dtype, str(plane.layer_count), f"{plane.row_bytes:,}"]
    for size_bytes in (cache.geometry.token_bytes, cache.bytes_of(100_000)):
        assert f" {size_bytes:,} bytes" in text


def test_model_is_a_folder_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model may be a folder with a config.json, any file, or a path that begins with `~`."""
    folder = tmp_path / "some" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "one"}', encoding="utf-8")
    (tmp_path / "other.json").write_text('{"model_type": "two"}', encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    names = [str(folder), "some/model", "~/some/model", "some/model/config.json", "other.json"]
    assert ["one", "one", "one", "one", "two"] == [read_config(n)["model_type"] for n in names]


def test_gguf_file_is_planned_from_its_own_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A GGUF file of the tiny model gives the same plan as the tiny model."""
    path = write_gguf(open_model("tiny-random"), tmp_path / "tiny.gguf")
    assert printed(capsys, "tiny-random")[1:] == printed(capsys, str(path))[1:]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.05])
def test_gguf_file_that_is_cut_off_is_one_line(
    share: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is empty or ends within its header."""
    path = write_gguf(open_model("tiny-random"), tmp_path / "tiny.gguf")
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    assert str(path) in complaint(capsys, str(path))


def test_gguf_file_that_is_not_served_is_not_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file with an unknown key gets the same error as from `kvtide run`."""
    path = tmp_path / "tiny.gguf"
    key = "llama.attention.some_new_thing"
    write_gguf(open_model("tiny-random"), path, lambda writer: writer.add_uint32(key, 7))
    assert key in complaint(capsys, str(path))


def test_hub_id_fetches_the_configuration_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only config.json is fetched; the hub's log level is as before afterwards."""
    asked: list[tuple[str, str]] = []

    def fetch(name: str, file: str) -> str:
        asked.append((name, file))
        assert not logging.getLogger("huggingface_hub").isEnabledFor(logging.WARNING)
        return config_of("llama-3.1-8b")

    level = logging.getLogger("huggingface_hub").level
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    assert 0 == main(["plan", "org/name"])
    captured = capsys.readouterr()
    assert [("org/name", "config.json")] == asked
    assert "fetching the configuration of org/name from the hub\n" == captured.err
    assert "a token: 131,072 bytes (128.0 KiB)\n" in captured.out
    assert level == logging.getLogger("huggingface_hub").level


def test_hub_that_gives_nothing_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line has the first line of the hub's error, and says what else a model may be."""

    def fail(name: str, file: str) -> str:
        raise OSError("no route\nto any host")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    assert 2 == main(["plan", "org/name"])
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("kvtide: the configuration of org/name can't be fetched: ")
    assert "the hub fails: no route; name a folder" in line


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "is not JSON: "),
        (b"\xff\xfe\x00", "is not JSON: "),
        (b"[" * 200_000, "is not JSON: "),
        (b"[1]", "it holds no JSON object"),
        (b"{}", "none of model_type, text_config, language_config, llm_config names"),
        (b'{"model_type": "t5", "d_kv": 64}', "model type 't5': it is unknown"),
        (
            b'{"text_config": {"model_type": "llama4_text"}}',
            "'llama4_text': it is unknown",
        ),
    ],
)
def test_bad_configuration_is_one_line(
    content: bytes, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file isn't JSON, isn't a model's configuration, or is of an unknown model."""
    path = tmp_path / "config.json"
    path.write_bytes(content)
    assert reason in complaint(capsys, str(path))


def test_file_too_large_to_be_a_configuration_is_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """This happens when someone names the file of the weights."""
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.truncate((16 << 20) + 1)
    assert "is not a config.json: it is larger than 16 MiB" in complaint(capsys, str(path))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "there is no model ''"),
        ("nothing", "there is no model 'nothing'"),
        ("a/b/c", "there is no model 'a/b/c'"),
        ("missing/config.json", "there is no model 'missing/config.json'"),
        ("~nobody-of-that-name/model", "can't be read"),
        ("null\0", "there is no model"),
        ("x" * 5000, "can't be read"),
        (".", "is not a model's folder: it has no config.json"),
    ],
)
def test_unknown_name_is_one_line(
    name: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The name is neither an existing path nor an id of the hub."""
    monkeypatch.chdir(tmp_path)
    line = complaint(capsys, name)
    assert reason in line
    assert len(line) < 400


def test_file_that_may_not_be_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line has the system's reason."""

    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    path = tmp_path / "config.json"
    path.write_text("{}", encoding="utf-8")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert "can't be read (Permission denied): name a folder" in complaint(capsys, str(path))


def test_invalid_options_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Caches don't have this dtype, and a model can't have more stages than layers."""
    llama = config_of("llama-3.1-8b")
    assert "int4" in complaint(capsys, llama, "--dtype", "int4")
    assert "over 33 pipeline stages" in complaint(capsys, llama, "--pp", "33")
    assert "--tokens" in complaint(capsys, llama, "--tokens", "0")


def test_tiny_random_is_planned_as_it_is_served() -> None:
    """The plan has the same geometry and fingerprint, and doesn't need the model."""
    served = geometry_of(open_model("tiny-random").model.config, "bfloat16", 16)
    assert served.fingerprint == cache_of(read_config("tiny-random")).geometry.fingerprint


@pytest.mark.smollm2
def test_smollm2_is_planned_as_it_is_served() -> None:
    """The plan has the same geometry and fingerprint, and doesn't need the weights."""
    served = geometry_of(open_model("smollm2").model.config, "bfloat16", 16)
    assert served.fingerprint == cache_of(read_config("smollm2")).geometry.fingerprint


@pytest.mark.parametrize("name", sorted(DEFAULT_SIZES.keys() - {"kimi_k2"}))
def test_plan_and_run_know_the_same_of_a_configuration(name: str) -> None:
    """`plan` fills in what a file leaves out as `run` does, and refuses what `run` refuses."""
    config = tf.AutoConfig.for_model(name)
    planned = cache_or_none(json.loads(config.to_json_string(use_diff=True)))
    filled = cache_or_none(json.loads(config.to_json_string(use_diff=False)))
    assert planned == filled
    try:
        served = geometry_of(config, "bfloat16", 16)
    except UsageError:
        return
    assert planned is not None
    assert served == planned.geometry


def cache_or_none(config: dict[str, Any]) -> ModelCache | None:
    """Returns the cache that `kvtide plan` describes, or None where it refuses."""
    try:
        return cache_of(config)
    except UsageError:
        return None


DENSE: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"first_k_dense_replace": 12},
    "qwen3_next": {"mlp_only_layers": [*range(12)]},
}
FAMILIES = [
    *("llama", "gpt2", "mistral", "qwen2", "qwen3", "phi3", "glm4", "gemma", "gemma2"),
    *("gemma3_text", "cohere2", "olmo3", *DENSE),
    *("gptj", "opt", "gpt_bigcode", "falcon", "gpt_neox", "stablelm", "exaone"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_plan_agrees_with_what_transformers_caches(family: str) -> None:
    """The test runs a model without weights and measures its cache: widths, windows, states.

    transformers keeps one input more of each convolution than engines do: that isn't compared.
    """
    settings: dict[str, Any] = {"num_hidden_layers": 12, "max_position_embeddings": 8192}
    config = tf.AutoConfig.for_model(family, **settings, **DENSE.get(family, {}))
    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        layers = model(torch.zeros(1, 5, dtype=torch.long), use_cache=True).past_key_values.layers
    attending = [layer for layer in layers if hasattr(layer, "keys")]
    windowed = [layer for layer in attending if "Sliding" in type(layer).__name__]
    states = [layer for layer in layers if layer not in attending]

    def token_bytes(chosen: list[Any]) -> int:
        return sum(
            2 * t.shape[1] * t.shape[3] for layer in chosen for t in (layer.keys, layer.values)
        )

    fields = json.loads(config.to_json_string(use_diff=False))
    fields.pop("layer_types", None)  # then the model type's rule decides, and is compared
    cache = cache_of(fields)
    assert token_bytes(attending) == cache.geometry.token_bytes
    assert token_bytes(attending) - token_bytes(windowed) == cache.lasting.token_bytes
    found = {plane.name: (plane.layer_count, plane.row_shape) for plane in cache.geometry.planes}
    for layer in states:
        assert (len(states), layer.recurrent_states[0].shape[1:]) == found["state.ssm"]
        assert layer.conv_states[0].shape[1] == found["state.conv"][1][0]
    assert bool(states) == bool(cache.geometry.request_bytes)
