"""Fuzzer: requests that are nearly right, by a seed: other fields, other JSON, other HTTP."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/", "/metrics")
_ODD_PATHS = (
    *("//", "/v1/../etc/passwd", "/%00", "/v1/models/%2e%2e", "*", "/\u00e9", "/" + "a" * 9000),
)
_METHODS = ("POST", "GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "BREW", "post")
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**63, -(2**63), 10**400, 0.5, -0.0, 1e308, "", "a", "\ud800"),
    *([], {}, [[]], [None], {"a": {}}, "a" * 5000, [1] * 2000, float("nan"), float("inf"), "\x00"),
)
_FIELDS = (
    *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p"),
    *("n", "seed", "stop", "stream", "stream_options", "logprobs", "top_logprobs", "tools", "echo"),
    *("tool_choice", "response_format", "user", "suffix", "best_of", "logit_bias", "metadata", "x"),
)
_TOKENS = (b"{", b"}", b"[", b"]", b'"', b":", b",", b"\\u", b"1e", b"-", b"\xff", b"\x00", b"nul")


class Fuzzer:
    """Makes one request after another; the same seed makes the same ones."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)

    def request(self) -> bytes:
        """The bytes of the next request."""
        dice = self._dice
        kind = dice.random()
        if kind < 0.5:
            return self._head(self._encoded(self._fields()))
        if kind < 0.75:
            return self._head(self._broken(self._encoded(self._fields())))
        return self._broken_head(self._head(b"{}"))

    def _fields(self) -> dict[str, Any]:
        dice = self._dice
        fields: dict[str, Any] = {"max_tokens": 1}
        if dice.random() < 0.5:
            fields["prompt"] = "a"
        else:
            fields["messages"] = [{"role": "user", "content": "a"}]
        for _ in range(dice.randint(1, 3)):
            fields[dice.choice(_FIELDS)] = dice.choice(_VALUES)
        if dice.random() < 0.2:
            role = dice.choice(["user", "assistant", "system", "tool", 7])
            fields["messages"] = [{"role": role, "content": dice.choice(_VALUES)}]
        return fields

    def _encoded(self, fields: dict[str, Any]) -> bytes:
        if self._dice.random() < 0.02:
            return b"[" * 50_000
        return json.dumps(fields).encode("utf-8", "surrogatepass")

    def _broken(self, body: bytes) -> bytes:
        dice, content = self._dice, bytearray(body)
        for _ in range(dice.randint(1, 4)):
            place = dice.randrange(len(content) + 1)
            content[place : place + dice.randint(0, 8)] = dice.choice(_TOKENS)
        return bytes(content)

    def _head(self, body: bytes) -> bytes:
        path = self._usually(_PATHS[:2], 0.9, _PATHS + _ODD_PATHS)
        method = self._usually(("POST",), 0.9, _METHODS)
        kind = self._usually(("application/json",), 0.95, ("text/plain", "", "a/b;"))
        head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: {kind}\r\n"
        return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body

    def _usually(self, usual: Sequence[str], share: float, rare: Sequence[str]) -> str:
        return self._dice.choice(usual if self._dice.random() < share else rare)

    def _broken_head(self, request: bytes) -> bytes:
        dice = self._dice
        odd = (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
            b"GET / HTTP/9.9\r\n\r\n",
            b"\r\n" * 50,
            b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
            b"POST / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
            b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 5000 + b"\r\n",
            b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",
            b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            bytes(dice.randrange(256) for _ in range(dice.randint(1, 400))) + b"\r\n\r\n",
        )
        return dice.choice(odd) if dice.random() < 0.5 else self._broken(request) + b"\r\n\r\n"
