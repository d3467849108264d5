"""Intake: makes the engine's requests of the body of a client's call."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain, count
from typing import Any, final

from kvtide.errors import UsageError, shortened
from kvtide.layout.canonical import canonical_json, fingerprint_of
from kvtide.prompts import FieldError, Prompt, parse_object, read_body
from kvtide.prompts.fields import check_bool, check_object, check_text, refuse, refuse_unknown_keys
from kvtide.prompts.requests import make_requests
from kvtide.serve.chat import encode_begun
from kvtide.serve.models import OpenModel
from kvtide.serve.request import Request, SamplingParams
from kvtide.server import tools
from kvtide.server.errors import ApiError
from kvtide.server.tenants import Tenant

WHERE = "the request"
COMPLETION_TOKENS = 16
"""How long a completion may be if it doesn't say: as in OpenAI's API."""
_OF_CHANCE = ("seed", "top_k", "top_p")
_OWN_KEYS = ("model", "stream", "stream_options")
_CHAT_KEYS, _TEXT_KEYS = ("tool_choice", "parallel_tool_calls"), ("echo",)


@final
@dataclass(frozen=True)
class Asked:
    """What a call asks for."""

    tenant: Tenant
    is_chat: bool
    requests: Sequence[Request]
    """The requests for the first prompt, then those for the next, and so on."""
    sample_count: int
    """How many requests each prompt has."""
    fields: Sequence[str]
    """The field of the body that each request's prompt is in."""
    begins: Sequence[str]
    """The text that a client is told before what each request gives."""
    is_stream: bool
    wants_usage: bool
    """Whether a stream ends with the usage."""
    reads_calls: bool
    """Whether calls of tools are read from the text of the answer."""
    rules: tools.CallRules
    """What holds for these calls."""


@final
class Intake:
    """Reads bodies, and turns their prompts into tokens in a thread of its own.

    One thread, since a tokenizer isn't made for several; so a long prompt keeps others waiting, but
    not the answers that are under way.
    """

    def __init__(
        self, source: OpenModel, name: str, pool_tokens: int, *, special_tokens: bool = False
    ) -> None:
        """`source` is a model that is served as `name`, over a pool of `pool_tokens`.

        With `special_tokens` the text of a special token in a prompt is that token.
        """
        self.name = name
        self._source = replace(source, name=name)  # errors name the model, and go to clients
        self._pool_tokens = pool_tokens
        self._special_tokens = special_tokens
        self._live_ids: set[str] = set()
        self._thread = ThreadPoolExecutor(1, "kvtide intake")

    def check_name(self, name: str) -> None:
        """Raises ApiError unless `name` is the model's."""
        if name != self.name:
            raise ApiError(
                404,
                f"there is no model {shortened(name, 60)!r} here; this server has {self.name!r}",
                code="model_not_found",
                param="model",
            )

    async def read(self, raw: bytes, *, is_chat: bool, tenant: Tenant, most: int) -> Asked:
        """What a call of a tenant's with the body `raw` asks for.

        Raises ApiError for an invalid body, a prompt that can't be answered, and for more than
        `most` answers.
        """
        running = asyncio.get_running_loop()
        return await running.run_in_executor(self._thread, self._read, raw, is_chat, tenant, most)

    @contextmanager
    def identified(self, requests: Sequence[Request]) -> Iterator[None]:
        """Gives requests their ids, each of which is in use within this context alone.

        Of requests with equal keys the first has 0, the next 1, and so on, so that they find what
        an earlier server left of them.
        """
        taken: list[str] = []
        try:
            for request in requests:
                names = (f"{request.key[:16]}-{number}" for number in count())
                request.id = next(name for name in names if name not in self._live_ids)
                taken.append(request.id)
                self._live_ids.add(request.id)
            yield
        finally:
            self._live_ids.difference_update(taken)

    def close(self) -> None:
        """Ends the thread, after what it does now."""
        self._thread.shutdown(cancel_futures=True)

    def _read(self, raw: bytes, is_chat: bool, tenant: Tenant, most: int) -> Asked:
        try:
            body = parse_object(raw, WHERE)
            if body.get("model") is not None:
                self.check_name(check_text(body["model"], "model", WHERE))
            obeyed = (*_OWN_KEYS, *(_CHAT_KEYS if is_chat else _TEXT_KEYS))
            prompts = read_body(body, "", WHERE, is_chat=is_chat, obeyed=obeyed)
            if is_chat and body.get("tool_choice") == "none":
                prompts = tuple(replace(prompt, tools=()) for prompt in prompts)
            _check_count(prompts, most)
            is_stream, wants_usage = _read_stream(body)
            is_echo = _read_echo(body, prompts[0])
            rules = self._rules(body, prompts[0])
            requests = [self._requests(prompt, tenant.salt, rules) for prompt in prompts]
        except FieldError as error:
            goes_on = error.what.startswith(("has ", "is ", "lacks "))
            message = f"{WHERE} {error.what}" if goes_on else error.what
            raise ApiError(400, message, param=error.field) from error
        except UsageError as error:
            message = str(error).removeprefix(f"{WHERE}: ")
            raise ApiError(400, message, param="messages" if is_chat else "prompt") from error
        texts = [self._text_of(prompt) if is_echo else rules.begin for prompt in prompts]
        return Asked(
            tenant=tenant,
            is_chat=is_chat,
            requests=list(chain.from_iterable(requests)),
            sample_count=len(requests[0]),
            fields=[prompt.field for prompt in prompts for _ in requests[0]],
            begins=[text for text in texts for _ in requests[0]],
            is_stream=is_stream,
            wants_usage=wants_usage,
            reads_calls=bool(prompts[0].tools) and self._knows_calls,
            rules=rules,
        )

    @property
    def _knows_calls(self) -> bool:
        """Whether calls of tools in an answer can be read."""
        return tools.are_known(str(self._source.tokenizer.chat_template))

    def _rules(self, body: Mapping[str, Any], prompt: Prompt) -> tools.CallRules:
        if not prompt.is_chat:
            return tools.CallRules()
        names = [tool["function"]["name"] for tool in prompt.tools]
        return tools.read_rules(body, names, WHERE, are_read=self._knows_calls)

    def _text_of(self, prompt: Prompt) -> str:
        """What a completion's prompt says."""
        if not prompt.token_ids:
            return str(prompt.messages[0]["content"])
        text = self._source.tokenizer.decode(list(prompt.token_ids), skip_special_tokens=True)
        return str(text)

    def _requests(self, prompt: Prompt, salt: bytes, rules: tools.CallRules) -> list[Request]:
        params = SamplingParams(max_new_tokens=COMPLETION_TOKENS, temperature=1.0)
        if "seed" not in prompt.settings:
            params = replace(params, seed=secrets.randbits(63))
        requests = make_requests(
            self._source, prompt, params, sample_count=1, special_tokens=self._special_tokens
        )
        begun = encode_begun(self._source, tools.BEGIN, rules.head) if rules.begin else []
        for request in requests:
            if rules.is_single:
                stop = (*request.params.stop, tools.END)
                request.params = replace(request.params, stop=stop)
            if request.error is None:
                request.prompt_ids += begun
            if prompt.is_chat and "max_new_tokens" not in prompt.settings:
                room = self._pool_tokens - len(request.prompt_ids) + 1
                request.params = replace(request.params, max_new_tokens=max(1, room))
            request.salt = salt
            request.key = _key_of(request, prompt)
        return requests


def _check_count(prompts: Sequence[Prompt], most: int) -> None:
    """Raises FieldError if these prompts want more answers than `most`, whenever they come."""
    each = prompts[0].sample_count or 1
    count = len(prompts) * each
    if count > most:
        said = "" if len(prompts) == 1 else f"{len(prompts)} prompts with "
        refuse(
            WHERE,
            f"{said}n {each}: these are {count} answers, and a client can have {most} at once; "
            "ask for fewer",
            "n" if len(prompts) == 1 else "prompt",
        )


def _read_echo(body: Mapping[str, Any], prompt: Prompt) -> bool:
    """Whether a completion's text begins with its prompt."""
    is_echo = body.get("echo") is not None and check_bool(body["echo"], "echo", WHERE)
    if is_echo and prompt.settings.get("logprobs") is not None:
        refuse(
            WHERE,
            "has 'echo' with 'logprobs', and kvtide has no log-probabilities of prompts; "
            "leave one out",
            "echo",
        )
    return is_echo


def _read_stream(body: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether the answer is a stream, and whether that ends with the usage."""
    is_stream = body.get("stream") is not None and check_bool(body["stream"], "stream", WHERE)
    if body.get("stream_options") is None:
        return is_stream, False
    if not is_stream:
        refuse(WHERE, "has 'stream_options', which need 'stream' to be true", "stream_options")
    options = check_object(body["stream_options"], "stream_options", WHERE)
    known = ("include_usage", "include_obfuscation")
    refuse_unknown_keys(options, known, WHERE, name="stream_options")
    wants_usage, is_padded = (
        options.get(key) is not None and check_bool(options[key], f"stream_options.{key}", WHERE)
        for key in known
    )
    if is_padded:
        name = f"stream_options.{known[1]}"
        refuse(WHERE, f"'{name}' is true, and kvtide pads no events; leave it out", name)
    return True, wants_usage


def _key_of(request: Request, prompt: Prompt) -> str:
    """A hash of all that decides an answer, beside the model and the engine.

    A seed that the client didn't choose decides nothing: any random answer is right, so a later
    request may go on with this one. Nor does the room that the pool leaves for a chat without a
    limit: the next server's may differ. The tenant's salt is a part of it: nobody else finds it.
    """
    params = asdict(request.params)
    for name in _OF_CHANCE if request.params.temperature == 0 else ():
        del params[name]
    if "seed" not in prompt.settings:
        params.pop("seed", None)
    if prompt.is_chat and "max_new_tokens" not in prompt.settings:
        del params["max_new_tokens"]
    decisive = {"salt": request.salt.hex(), "prompt": request.prompt_ids, "params": params}
    return fingerprint_of(canonical_json(decisive)).hex()
