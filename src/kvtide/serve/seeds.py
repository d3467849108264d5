"""Derives the seed of each request, so that equal prompts get different random numbers.

A seed depends only on the numbers that it is derived from, so the same run gives the same answers
again. BLAKE2b mixes them: neighbouring places get seeds that have nothing in common. Pure.
"""

from __future__ import annotations

from hashlib import blake2b

_SEED_BITS = 63  # a seed is also a signed number of 64 bits in other libraries


def derived_seed(seed: int, place: int, sample: int = 0) -> int:
    """The seed for sample `sample` of the prompt that is number `place` in its file, from 0.

    `seed` is the run's. All three are from 0 to 2**63 - 1, and so is the result.
    """
    return _mixed(b"kvtide seed", seed, place, sample)


def sample_seed(seed: int, sample: int) -> int:
    """The seed for sample `sample` of a prompt that has a seed of its own.

    The first sample (0) takes that seed as it is. Where the prompt stands in its file has no
    influence, so equal seeds stay equal. The numbers have the ranges of `derived_seed`.
    """
    return seed if sample == 0 else _mixed(b"kvtide sample", seed, sample)


def _mixed(purpose: bytes, *numbers: int) -> int:
    # Each number takes eight bytes, so no two lists of numbers give the same bytes.
    data = b"".join(number.to_bytes(8, "big") for number in numbers)
    digest = blake2b(data, digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "big") >> (64 - _SEED_BITS)
