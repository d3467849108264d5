"""Makes the requests that answer a prompt: one for each sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvtide.errors import UsageError
from kvtide.prompts import FieldError, Prompt

if TYPE_CHECKING:
    from kvtide.serve.models import OpenModel
    from kvtide.serve.request import Request, SamplingParams


def make_requests(
    model: OpenModel,
    prompt: Prompt,
    params: SamplingParams,
    *,
    sample_count: int = 1,
    special_tokens: bool = False,
) -> list[Request]:
    """The requests for the answers to a prompt, in the order of the answers.

    `params` and `sample_count` hold where the prompt says nothing else. With `special_tokens` the
    text of a special token in a prompt is that token. Requests for a prompt whose length alone
    shows that it can't fit have an `error` and no tokens. Raises UsageError if the model can't take
    the prompt.
    """
    from kvtide.serve.lengths import reason_too_long

    is_raw = prompt.is_raw or model.tokenizer.chat_template is None
    error = reason_too_long(model, prompt.messages, prompt.tools, is_raw=is_raw)
    count, limit = len(prompt.token_ids), model.context_limit
    if limit is not None and count > limit:  # before each sample has a copy of them
        error = (
            f"its prompt has {count} tokens, the model has {limit} positions; shorten the prompt"
        )
    prompt_ids = [] if error else encode_prompt(model, prompt, special_tokens=special_tokens)
    requests = requests_of(prompt, prompt_ids, params, sample_count)
    for request in requests:
        request.error = error
    return requests


def encode_prompt(model: OpenModel, prompt: Prompt, *, special_tokens: bool = False) -> list[int]:
    """The prompt's token ids, in the model's chat template if it has one.

    With `special_tokens` the text of a special token in a prompt is that token. Raises FieldError
    if the model can't take the prompt.
    """
    from kvtide.serve.chat import ToolsError, encode_chat, encode_text

    if prompt.token_ids:
        return _known_tokens(model, prompt)
    has_template = model.tokenizer.chat_template is not None
    try:
        if prompt.is_chat and not has_template:
            raise UsageError(
                f"the model {model.name} has no chat template, so it can't take 'messages'; "
                "write a 'prompt'"
            )
        if prompt.is_raw or not has_template:
            text = prompt.messages[0]["content"]
            ids = encode_text(model, text, special_tokens=special_tokens)
        else:
            ids = encode_chat(model, prompt.messages, prompt.tools, special_tokens=special_tokens)
        if not ids:
            raise UsageError(f"the prompt has no tokens for the model {model.name}")
    except UsageError as error:
        field = "tools" if isinstance(error, ToolsError) else prompt.field
        raise FieldError(prompt.where, str(error), field) from error
    return ids


def _known_tokens(model: OpenModel, prompt: Prompt) -> list[int]:
    """The prompt's tokens, which must be in the model's vocabulary."""
    count = model.model.config.get_text_config(decoder=True).vocab_size
    ids = list(prompt.token_ids)
    if max(ids) >= count:
        place = next(n for n, token in enumerate(ids) if token >= count)
        name = f"{prompt.field}[{place}]"
        said = f"'{name}' is {ids[place]}; the tokens of {model.name} are 0 to {count - 1}"
        raise FieldError(prompt.where, said, name)
    return ids


def requests_of(
    prompt: Prompt, prompt_ids: Sequence[int], params: SamplingParams, sample_count: int
) -> list[Request]:
    """The requests for a prompt of the tokens `prompt_ids`.

    `params` and `sample_count` are the run's; what the prompt's line says wins. Each request gets
    a seed of its own.
    """
    from kvtide.serve.request import Request
    from kvtide.serve.seeds import derived_seed, sample_seed

    said = replace(params, **prompt.settings)
    requests = []
    for sample, request_id in enumerate(prompt.sample_ids(sample_count)):
        if "seed" in prompt.settings:
            seed = sample_seed(said.seed, sample)
        else:
            seed = derived_seed(said.seed, prompt.place, sample)
        requests.append(Request(request_id, list(prompt_ids), replace(said, seed=seed)))
    return requests
