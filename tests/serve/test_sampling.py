"""The next token is the likeliest, or drawn with the request's own random numbers."""

from __future__ import annotations

import torch

from kvtide.serve.request import SamplingParams
from kvtide.serve.sampling import Sampler

LOGITS = torch.tensor([0.0, 3.0, 2.0, 1.0, -4.0])


def draw(params: SamplingParams, count: int) -> list[int]:
    """Draws `count` tokens from the same logits."""
    sampler = Sampler(params)
    return [sampler.choose(LOGITS) for _ in range(count)]


def test_zero_temperature_takes_the_largest() -> None:
    """Greedy sampling draws no random number."""
    assert [1] * 5 == draw(SamplingParams(temperature=0), 5)


def test_seed_decides_the_draws() -> None:
    """Equal seeds give equal tokens, and other seeds give others."""
    first, same, other = (draw(SamplingParams(temperature=2, seed=s), 40) for s in (3, 3, 4))
    assert first == same
    assert first != other


def test_generators_are_not_shared() -> None:
    """A draw of one request doesn't change the numbers of another."""
    alone = draw(SamplingParams(temperature=2, seed=3), 20)
    first, second = (Sampler(SamplingParams(temperature=2, seed=3)) for _ in range(2))
    mixed = []
    for _ in range(20):
        mixed.append(first.choose(LOGITS))
        second.choose(LOGITS)
        second.choose(LOGITS)
    assert alone == mixed


def test_frequencies_follow_the_softmax() -> None:
    """At a fixed seed, frequencies are within five standard deviations."""
    tokens = torch.tensor(draw(SamplingParams(temperature=2, seed=0), 2000))
    expected = torch.softmax(LOGITS / 2, -1)
    found = torch.bincount(tokens, minlength=5) / 2000
    assert bool(((found - expected).abs() < 5 * (expected * (1 - expected) / 2000).sqrt()).all())


def test_top_k_and_top_p_leave_out_the_unlikely() -> None:
    """The temperature is so high that all five tokens appear without a limit."""
    hot = SamplingParams(temperature=50)
    assert {0, 1, 2, 3, 4} == set(draw(hot, 200))
    assert {1, 2} == set(draw(SamplingParams(temperature=50, top_k=2), 200))
    assert {1} == set(draw(SamplingParams(temperature=1, top_p=0.5), 200))


def test_bfloat16_logits_are_taken_as_they_are() -> None:
    """The logits are widened and not rounded again."""
    greedy = Sampler(SamplingParams())
    assert greedy.choose(LOGITS.bfloat16()) == 1
