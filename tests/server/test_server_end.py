"""What becomes of requests when a signal ends a real server, and when the next one starts."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import openai
import pytest

from support.serving import ServerProcess, server_process

LONG: dict[str, Any] = {
    "model": "tiny-random",
    "prompt": "Once upon a time",
    "max_tokens": 240,
    "temperature": 0.8,
    "seed": 5,
}


def _client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none needed", max_retries=0)


@pytest.mark.parametrize("mode", ["--exact", "--fast"])
def test_the_next_server_goes_on_with_what_was_running(tmp_path: Path, mode: str) -> None:
    """With a disk SIGTERM leaves the KV there, and the same request goes on from it.

    The second server ends by answering what it has begun: a process of its own would take long.
    """
    disk = ("--disk-dir", str(tmp_path / "kv"), mode)
    with server_process(tmp_path, *disk) as server:
        client = _client(server)
        expected = client.completions.create(**LONG)
        stream = client.completions.create(**LONG, stream=True)
        begun = [next(stream).choices[0].text for _ in range(20)]
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError) as caught:
            begun += [chunk.choices[0].text for chunk in stream]
        assert "request_ended" == caught.value.code
        assert 0 == server.process.wait(60)
        log = server.log.read_text()
        assert "POST /v1/completions 200" in log
        assert not any(secret in log for secret in (str(LONG["prompt"]), str(tmp_path)))
    with server_process(tmp_path, *disk, "--drain-seconds", "60") as server:
        answer = _client(server).completions.create(**LONG)
        assert expected.choices[0].text == answer.choices[0].text
        assert answer.choices[0].text.startswith("".join(begun))
        assert answer.usage is not None
        assert answer.usage.to_dict()["kvtide"]["resumed_tokens"] >= 20
        _end_while_it_answers(server)


def _end_while_it_answers(server: ServerProcess) -> None:
    """Checks that a server with time to drain answers what it has begun, and ends then."""
    stream = _client(server).completions.create(**LONG, stream=True)
    chunks = [next(stream)]
    server.process.send_signal(signal.SIGTERM)
    chunks += stream
    assert chunks[-1].choices[0].finish_reason is not None
    assert 0 == server.process.wait(60)
