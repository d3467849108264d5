from __future__ import annotations

from math import exp
from typing import Any

import pytest

from kvtide.cli.progress import Progress, TokenRate, format_seconds
from kvtide.serve.request import Request, SamplingParams
from support.fake_serving import make_request, make_stats


def test_rate_covers_the_last_five_seconds() -> None:
    """A slow start doesn't lower the rate for the rest of the run."""
    rate = TokenRate()
    assert rate.per_second == 0.0
    for now, tokens in ((0.0, 0), (10.0, 10), (12.0, 50), (14.0, 90)):
        rate.add(now, tokens)
    assert 20.0 == rate.per_second


def _progress(count: int) -> Progress:
    """A phase of requests of at most 10 tokens each, which begins at second 100."""
    params = SamplingParams(max_new_tokens=10)
    return Progress("answering", [make_request(params=params) for _ in range(count)], 100.0)


def _ended(token_count: int, **values: Any) -> Request:
    params = SamplingParams(max_new_tokens=10)
    return make_request(params=params, output_ids=[0] * token_count, **values)


def test_time_left_is_unknown_while_the_first_prompts_are_read() -> None:
    """No answer has ended and no minute has passed: a guess would be wrong by far."""
    progress = _progress(4)
    progress.add(159.0, make_stats(new_tokens=8), [])
    assert (59.0, None) == (progress.elapsed_s, progress.left_s)
    assert "0:59 so far" == progress.times


def test_time_left_is_unknown_before_the_first_token() -> None:
    """Before the first token nothing is known from which the time could be computed."""
    progress = _progress(4)
    progress.add(500.0, make_stats(), [])
    assert progress.left_s is None


def test_answers_are_expected_to_reach_their_limits_until_one_ends() -> None:
    """40 tokens at most, 8 of them in 64 seconds: 32 are left."""
    progress = _progress(4)
    progress.add(164.0, make_stats(new_tokens=8), [])
    assert 256.0 == progress.left_s
    assert "1:04 so far, about 4:16 left" == progress.times


def test_answers_that_stopped_say_how_long_the_others_are() -> None:
    """One stop in 9 tokens: the mean is 9, and 3 answers have 26 tokens at most together."""
    progress = _progress(4)
    progress.add(103.0, make_stats(new_tokens=9), [_ended(5, finish_reason="stop")])
    assert (1, 4) == (progress.done, progress.total)
    assert pytest.approx(3 * 9 * (1 - exp(-26 / 3 / 9)) * 3 / 9) == progress.left_s


def test_one_short_answer_does_not_make_the_others_short() -> None:
    """Short answers end first; 299 others have gone on for as long."""
    params = SamplingParams(max_new_tokens=1000)
    progress = Progress("answering", [make_request(params=params) for _ in range(300)], 0.0)
    short = make_request(params=params, output_ids=[0, 0], finish_reason="stop")
    progress.add(1.0, make_stats(new_tokens=600), [short])
    assert progress.left_s is not None
    assert progress.left_s > 200


def test_failed_requests_say_nothing_of_the_others_length() -> None:
    """Tokens of failed requests don't count any more either."""
    progress = _progress(4)
    progress.add(101.0, make_stats(), [_ended(0, error="too long")])
    progress.add(200.0, make_stats(new_tokens=10), [])
    assert 200.0 == progress.left_s


def test_an_unfinished_request_takes_one_more_token_at_least() -> None:
    """This holds even if the request has more tokens than it may have."""
    progress = _progress(2)
    progress.add(110.0, make_stats(new_tokens=20), [_ended(5)])
    assert 0.5 == progress.left_s


def test_time_left_is_zero_at_the_end() -> None:
    """All requests are done."""
    progress = _progress(2)
    progress.add(110.0, make_stats(new_tokens=10), [_ended(5), _ended(5)])
    assert 0.0 == progress.left_s


def test_seconds_are_shown_as_a_clock_shows_them() -> None:
    """Hours are shown only if there are some."""
    assert ["0:00", "0:05", "1:00", "12:30", "1:02:03", "27:46:40"] == [
        format_seconds(seconds) for seconds in (0.4, 5, 59.6, 750, 3723, 100_000)
    ]
