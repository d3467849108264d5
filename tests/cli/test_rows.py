from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvtide.cli.rows import answer_row
from kvtide.prompts import Prompt
from kvtide.serve.request import SamplingParams, StepLogprobs, TokenLogprob
from support.fake_serving import make_request

ANSWERED: dict[str, Any] = {"output_ids": [5, 6], "text": "hé", "finish_reason": "stop"}
PLAIN = {
    "text": "hé",
    "token_ids": [5, 6],
    "prompt_tokens": 3,
    "cached_tokens": 0,
    "new_tokens": 2,
    "finish_reason": "stop",
    "retractions": 0,
    "error": None,
}
FAILED: dict[str, Any] = {"finish_reason": "error", "error": "too large"}
BATCH = Prompt("f, line 1", "a", ({"role": "user", "content": "x"},), True, is_openai=True)
PROMPT = Prompt("f, line 1", "a", ({"role": "user", "content": "x"},), is_chat=False)
LIKELIEST = (TokenLogprob(5, "h", -0.5), TokenLogprob(7, "j", -1.5))


def test_a_single_answer_is_the_whole_line() -> None:
    """Programs that read a line for each answer needn't change."""
    assert {"id": "a", **PLAIN} == answer_row(PROMPT, [make_request("a", **ANSWERED)], model="m")


def test_several_answers_are_a_list_of_samples() -> None:
    """Samples keep their order; each has what a line of one answer has, but for the id."""
    second = make_request("a#1", **(ANSWERED | {"text": "ha"}))
    row = answer_row(PROMPT, [make_request("a", **ANSWERED), second], model="m")
    assert {"id": "a", "samples": [PLAIN, PLAIN | {"text": "ha"}]} == row


def test_logprobs_come_where_they_were_asked_for() -> None:
    """Each step has those of the chosen token and of the likeliest tokens."""
    steps = [StepLogprobs(LIKELIEST[0], LIKELIEST)]
    request = make_request("a", params=SamplingParams(logprobs=2), logprobs=steps)
    likeliest = [
        {"token_id": 5, "text": "h", "logprob": -0.5},
        {"token_id": 7, "text": "j", "logprob": -1.5},
    ]
    expected = [{**likeliest[0], "likeliest": likeliest}]
    assert expected == answer_row(PROMPT, [request], model="m")["logprobs"]


def test_a_chat_completion_of_a_batch_is_answered_as_openai_does() -> None:
    """Keys and their values are those of the batch output object; nothing depends on the time."""
    second = make_request("a#1", **(ANSWERED | {"text": "ha", "finish_reason": "length"}))
    row = answer_row(BATCH, [make_request("a", **ANSWERED), second], model="m")
    choice = {"index": 0, "logprobs": None, "finish_reason": "stop"}
    message = {"role": "assistant", "content": "hé", "refusal": None}
    expected = {
        "id": "kvtide-a",
        "created": 0,
        "model": "m",
        "object": "chat.completion",
        "choices": [
            {**choice, "message": message},
            {**choice, "index": 1, "message": message | {"content": "ha"}}
            | {"finish_reason": "length"},
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
    }
    response = {"status_code": 200, "request_id": "kvtide-a", "body": expected}
    assert {"id": "kvtide-a", "custom_id": "a", "response": response, "error": None} == row


def test_logprobs_of_a_chat_completion_have_openai_s_form() -> None:
    """Tokens have their bytes too, but for a token that is a part of a character."""
    half = TokenLogprob(9, "\N{REPLACEMENT CHARACTER}", -2.0)
    steps = [StepLogprobs(TokenLogprob(8, "é", -0.5), (half,))]
    request = make_request("a", params=SamplingParams(logprobs=1), logprobs=steps)
    row = answer_row(BATCH, [request], model="m")
    assert {
        "content": [
            {
                "token": "é",
                "logprob": -0.5,
                "bytes": [0xC3, 0xA9],
                "top_logprobs": [{"token": half.text, "logprob": -2.0, "bytes": None}],
            }
        ],
        "refusal": None,
    } == row["response"]["body"]["choices"][0]["logprobs"]


def test_a_completion_of_a_batch_is_answered_as_openai_does() -> None:
    """The logprobs of a completion have another form than those of a chat."""
    steps = [
        StepLogprobs(LIKELIEST[0], LIKELIEST),
        StepLogprobs(LIKELIEST[1], (LIKELIEST[0], TokenLogprob(3, "h", -9.0))),
    ]
    values = {**ANSWERED, "text": "hj", "logprobs": steps, "params": SamplingParams(logprobs=2)}
    prompt = replace(BATCH, is_chat=False)
    body = answer_row(prompt, [make_request("a", **values)], model="m")["response"]["body"]
    assert "text_completion" == body["object"]
    logprobs = {
        "tokens": ["h", "j"],
        "token_logprobs": [-0.5, -1.5],
        "top_logprobs": [{"h": -0.5, "j": -1.5}, {"h": -0.5}],
        "text_offset": [0, 1],
    }
    choice = {"index": 0, "text": "hj", "logprobs": logprobs, "finish_reason": "stop"}
    assert [choice] == body["choices"]


def test_a_failed_line_of_a_batch_says_so_in_both_places() -> None:
    """Programs look at the status, or at the error."""
    good, bad = make_request("a", **ANSWERED), make_request("a#1", **FAILED)
    row = answer_row(BATCH, [good, bad], model="m")
    assert {"code": "request_failed", "message": "too large"} == row["error"]
    assert 400 == row["response"]["status_code"]
    assert "too large" == row["response"]["body"]["error"]["message"]
