"""`kvtide run` with the real engine and the small random model; nothing is faked."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from kvtide.cli.main import main
from kvtide.cli.serving import LibraryServing
from kvtide.serve.adapter_files import save
from kvtide.serve.fetch import Progress
from kvtide.serve.find import FoundModel
from kvtide.serve.models import OpenModel, open_model
from kvtide.snapshot import Snapshot
from kvtide.tide import Tide
from support.results import read_part, read_report, read_rows

IDS = [f"request-{number}" for number in range(6)]
MODEL = ["--model", "tiny-random", "--max-new-tokens", "16"]
# A page of 16 tokens takes 8 KiB; each request needs about 4 of these 8, all of them about 20.
SMALL = [*MODEL, "--kv-memory", "64KiB"]


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    """Six prompts of 10 to 35 bytes. Each byte is a token; the chat template adds more."""
    return _write(tmp_path, [{"id": name, "prompt": "ab" * (5 + i)} for i, name in enumerate(IDS)])


def _write(folder: Path, lines: Sequence[dict[str, Any]]) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def test_small_pool_gives_the_answers_of_a_large_pool(
    prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """KV moves to host memory and back, and the logits of every step stay the same to the bit."""
    out, report = tmp_path / "out.jsonl", tmp_path / "report.json"
    files = ["--out", str(out), "--report", str(report)]
    assert main(["run", prompts, *SMALL, "--verify", *files]) == 0
    assert "verified: true (6 requests: " in capsys.readouterr().err
    found = read_report(report)
    assert found["retractions"] > 0
    assert found["resumes"] > 0
    assert found["offloaded_bytes"] >= found["restored_bytes"] > 0
    assert 0 == found["recomputed_tokens"]
    assert (True, True, 0) == (found["exact"], found["verified"], found["failed"])
    rows = read_rows(out)
    assert IDS == [row["id"] for row in rows]
    assert {"length", "stop"} >= {row["finish_reason"] for row in rows}


def test_samples_and_their_logprobs_are_those_of_a_large_pool(tmp_path: Path) -> None:
    """Retractions change no draw and no log-probability; each sample has draws of its own."""
    lines = [{"id": name, "prompt": "ab" * (5 + i)} for i, name in enumerate(IDS[:3])]
    options = [*MODEL, "--n", "2", "--temperature", "1", "--logprobs", "3"]
    found = []
    for number, memory in enumerate(([], ["--kv-memory", "64KiB"])):
        out, report = tmp_path / f"out{number}.jsonl", tmp_path / f"report{number}.json"
        files = ["--out", str(out), "--report", str(report)]
        assert main(["run", _write(tmp_path, lines), *options, *memory, *files]) == 0
        found.append(read_rows(out))
    assert read_report(report)["retractions"] > 0
    for row in [row for rows in found for row in rows]:
        first, second = row["samples"]
        assert first["token_ids"] != second["token_ids"]
        for sample in row["samples"]:
            del sample["retractions"], sample["cached_tokens"]
            assert sample["token_ids"] == [step["token_id"] for step in sample["logprobs"]]
            assert {3} == {len(step["likeliest"]) for step in sample["logprobs"]}
    assert found[0] == found[1]


def test_a_batch_of_openai_s_is_answered_in_its_form(tmp_path: Path) -> None:
    """A stop string of a line ends its answer; a completion isn't put into the chat template."""
    chat = {"model": "m", "messages": [{"role": "user", "content": "ab"}], "logprobs": True}
    text = {"model": "m", "prompt": "ab", "max_tokens": 3}
    urls = {"c": "/v1/chat/completions", "t": "/v1/completions"}

    def run(**bodies: object) -> dict[str, Any]:
        lines = [{"custom_id": n, "url": urls[n[0]], "body": body} for n, body in bodies.items()]
        out = tmp_path / "out.jsonl"
        out.unlink(missing_ok=True)
        prompts = _write(tmp_path, lines)
        assert main(["run", prompts, *MODEL, "--out", str(out)]) == 0
        return {row["custom_id"]: row["response"]["body"] for row in read_rows(out)}

    bodies = run(chat=chat, text=text)
    chosen, whole = bodies["chat"]["choices"][0], bodies["text"]
    answer = chosen["message"]["content"]
    assert ("length", 16) == (chosen["finish_reason"], len(chosen["logprobs"]["content"]))
    assert (2, 3) == (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"])
    assert "tiny-random" == whole["model"]
    word = answer[4]
    (stopped,) = run(chat={**chat, "stop": ["nowhere", word]})["chat"]["choices"]
    assert (answer[: answer.index(word)], "stop") == (
        stopped["message"]["content"],
        stopped["finish_reason"],
    )


def test_a_prompt_can_not_end_its_own_turn(tmp_path: Path) -> None:
    """The text of a special token is text, unless asked otherwise."""
    lines = [{"id": "a", "prompt": "x<|im_end|>", "max_new_tokens": 1}]
    counts: list[int] = []
    for options in ([], ["--special-tokens"]):
        out = tmp_path / f"out{len(counts)}.jsonl"
        assert main(["run", _write(tmp_path, lines), *MODEL, *options, "--out", str(out)]) == 0
        counts += [row["prompt_tokens"] for row in read_rows(out)]
    assert len("<|im_end|>") - 1 == counts[0] - counts[1]


@pytest.mark.parametrize("kind", ["gemma4_text", "gemma4_unified_text", "gpt_neo"])
def test_a_model_that_is_not_served_is_one_line(
    kind: str, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the model before any answer, though the configurations are hard to read."""
    tokenizer = open_model("tiny-random").tokenizer
    sizes: dict[str, Any] = {"vocab_size": len(tokenizer), "hidden_size": 32, "pad_token_id": 0}
    if kind == "gpt_neo":
        sizes |= {"attention_types": [[["global"], 2]], "num_layers": 2, "num_heads": 2}
    else:
        sizes |= {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}
    if kind == "gemma4_text":
        sizes["vocab_size_per_layer_input"] = 8
    save(AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)), tokenizer, tmp_path)
    assert main(["run", prompts, "--model", str(tmp_path), "--max-new-tokens", "2"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("kvtide: ")
    assert "isn't served" in line


def _retract_and_spoil(
    tide: Tide, pages: Sequence[int], token_count: int, *, key: str = ""
) -> Snapshot:
    """Retracts a request, then overwrites its pages, in case it comes back into the same pages."""
    snapshot = _RETRACT(tide, pages, token_count, key=key)
    slots = tide.pool.slots_of(pages)
    for name in ("k", "v"):
        for layer in range(4):
            tide.pool.plane(name, layer)[slots] = 1.0
    return snapshot


_RETRACT = Tide.retract


def test_spoiled_pages_alone_change_nothing(prompts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot has all the KV, so the old content of the pages doesn't matter."""
    monkeypatch.setattr(Tide, "retract", _retract_and_spoil)
    assert main(["run", prompts, *SMALL, "--verify"]) == 0


def test_restore_that_does_nothing_is_noticed(
    prompts: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`--verify` can fail: if nothing is restored, it names a request and a step, and exits 3."""
    report = tmp_path / "report.json"
    monkeypatch.setattr(Tide, "retract", _retract_and_spoil)
    monkeypatch.setattr(Tide, "restore", lambda *args, **options: None)
    assert main(["run", prompts, *SMALL, "--verify", "--report", str(report)]) == 3
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("verified: false (request 'request-")
    assert ", step " in last
    assert read_report(report)["verified"] is False


def test_pool_of_less_than_a_page_is_bad_input(
    prompts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line says how many bytes a page takes."""
    assert main(["run", prompts, *MODEL, "--kv-memory", "1"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("kvtide: KV memory (--kv-memory) of 1 bytes holds no page")
    assert "8192 bytes" in last


def test_request_that_never_fits_fails_alone(tmp_path: Path) -> None:
    """The error says what the request needs and what the pool holds; the exit code is 0."""
    lines = [{"id": "large", "prompt": "ab" * 500}, {"id": "small", "prompt": "ab"}]
    prompts, out = _write(tmp_path, lines), tmp_path / "out.jsonl"
    assert main(["run", prompts, *SMALL, "--verify", "--out", str(out)]) == 0
    large, small = read_rows(out)
    assert ("error", []) == (large["finish_reason"], large["token_ids"])
    assert "the pool holds 128" in large["error"]
    assert ("length", None) == (small["finish_reason"], small["error"])


def test_one_line_decides_nothing_for_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Far too many new tokens are cut, which is said once; a prompt past the context fails alone.

    The memory that is free would hold neither all requests at once nor a million new tokens.
    """
    monkeypatch.setattr("kvtide.serve.sizing.free_memory_bytes", lambda: 1 << 20)
    monkeypatch.setattr(OpenModel, "context_limit", 512)
    huge = "x" * 1_000_000
    lines: list[dict[str, Any]] = [{"id": str(i), "prompt": "ab"} for i in range(70)]
    lines += [{"id": "endless", "prompt": "x" * 470, "max_new_tokens": 1_000_000}]
    lines += [{"id": "long", "prompt": "x" * 600}, {"id": "endless prompt", "prompt": huge}]
    prompts, out = _write(tmp_path, lines), tmp_path / "out.jsonl"
    few = ["--model", "tiny-random", "--max-new-tokens", "2", "--out", str(out)]
    assert main(["run", prompts, *few]) == 0
    *others, endless, long, unread = read_rows(out)
    assert {None} == {row["error"] for row in [*others, endless]}
    assert endless["prompt_tokens"] + endless["new_tokens"] <= 512 + 1
    assert "tokens, the model has 512 positions; shorten the prompt" in long["error"]
    assert "characters, which are at least 76927 tokens" in unread["error"]
    said = capsys.readouterr().err
    assert 1 == said.count("1 request may have fewer new tokens than max_new_tokens says")


def test_what_can_be_answered_can_be_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory that is free is never enough for all requests at once."""
    monkeypatch.setattr("kvtide.serve.sizing.free_memory_bytes", lambda: 64 << 10)
    lines = [{"id": str(i), "prompt": "ab" * i} for i in range(1, 5)]
    options = ["--model", "tiny-random", "--kv-memory", "32KiB", "--host-memory", "16KiB"]
    few = ["--max-new-tokens", "8", "--verify"]
    assert main(["run", _write(tmp_path, lines), *options, *few]) == 0
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("verified: true (4 requests: all tokens")
    assert "a run in which nothing was retracted" in last


def test_fast_run_does_not_claim_to_be_exact(prompts: str, tmp_path: Path) -> None:
    """All requests are answered, and the report says that the run isn't exact."""
    report = tmp_path / "report.json"
    assert main(["run", prompts, *SMALL, "--fast", "--report", str(report)]) == 0
    found = read_report(report)
    assert (False, 6, 0) == (found["exact"], found["requests"], found["failed"])


class _AnyTokenEnds(LibraryServing):
    def open_model(self, found: FoundModel, *, dtype: str, progress: Progress) -> OpenModel:
        model = super().open_model(found, dtype=dtype, progress=progress)
        return replace(model, eos_ids=frozenset(range(260)))


def test_answer_ends_with_the_model_s_own_end(prompts: str, tmp_path: Path) -> None:
    """Each answer ends at the model's end token, long before the limit."""
    out = tmp_path / "out.jsonl"
    assert main(["run", prompts, *SMALL, "--out", str(out)], serving=_AnyTokenEnds()) == 0
    assert [("stop", 1)] * 6 == [(r["finish_reason"], r["new_tokens"]) for r in read_rows(out)]


def test_ctrl_c_ends_the_process_and_keeps_what_is_done(tmp_path: Path) -> None:
    """SIGINT arrives from outside when one request is answered and many aren't."""
    lines = [{"id": "done", "prompt": "x", "max_new_tokens": 1}]
    lines += [{"id": str(i), "prompt": "x" * i, "max_new_tokens": 8000} for i in range(1, 30)]
    prompts, out = _write(tmp_path, lines), tmp_path / "out.jsonl"
    code = "import sys; from kvtide.cli import start; sys.exit(start())"
    command = [sys.executable, "-c", code, "run", prompts, "--model", "tiny-random"]
    with subprocess.Popen(
        [*command, "--out", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        seen = ""
        while "done: 1 token" not in seen and (line := process.stderr.readline()):
            seen += line
        process.send_signal(signal.SIGINT)
        output, rest = process.communicate(timeout=120)
    assert process.returncode == 130, seen + rest
    ids = read_part(out)  # more than one where the random model came to an end by itself
    assert "done" == ids[0]
    assert f"answered: {len(ids)} of 30 prompts, kept in {out}.part; " in seen + rest
    assert output == ""
    assert rest.endswith("kvtide: interrupted\n")


def test_another_process_finds_what_the_prompts_begin_with(tmp_path: Path) -> None:
    """A system prompt is computed by the first run, and read from the disk by the next.

    The answers are those of a run without a disk.
    """
    system = {"role": "system", "content": "be kind " * 40}
    lines = [{"id": name, "messages": [system, {"role": "user", "content": name}]} for name in IDS]
    prompts, found, reports = _write(tmp_path, lines), [], []
    disk = ["--disk-dir", str(tmp_path / "kv")]
    for number, options in enumerate((disk, disk, [])):
        out, report = tmp_path / f"{number}.jsonl", tmp_path / f"{number}.json"
        command = ["run", prompts, *MODEL, *options, "--out", str(out), "--report", str(report)]
        if number:
            assert main(command) == 0
        else:
            subprocess.run([sys.executable, "-m", "kvtide", *command], check=True)
        found.append([row["token_ids"] for row in read_rows(out)])
        reports.append(read_report(report))
    assert [found[2]] * 2 == found[:2]
    first, second, alone = (report["cached_tokens"] for report in reports)
    assert first == alone
    assert second["disk"] >= 256
    assert sum(second.values()) == reports[1]["prompt_tokens"] - len(IDS)  # all but the last tokens
