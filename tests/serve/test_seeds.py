"""Seeds of requests: different for each place and sample, and the same in each run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtide.serve.seeds import derived_seed, sample_seed

LARGEST = 2**63 - 1
NUMBERS = st.integers(0, LARGEST)


def test_every_place_and_sample_has_its_seed() -> None:
    """Equal prompts at different places get different random numbers."""
    seeds = {
        derived_seed(run, place, sample)
        for run in range(3)
        for place in range(100)
        for sample in range(5)
    }

    assert len(seeds) == 3 * 100 * 5


def test_the_same_numbers_give_the_same_seed_in_every_process() -> None:
    """Kept answers rely on it: a run that is continued later derives the same seeds."""
    assert derived_seed(0, 0) == derived_seed(0, 0, 0) == 487215885463656033
    assert derived_seed(1, 2, 3) == 2846305433144105540
    assert sample_seed(7, 1) == 7659411222854245358


@given(NUMBERS, NUMBERS, NUMBERS)
def test_each_seed_is_valid_for_sampling(seed: int, place: int, sample: int) -> None:
    """The seed is valid for numbers of any size."""
    assert 0 <= derived_seed(seed, place, sample) <= LARGEST
    assert 0 <= sample_seed(seed, sample) <= LARGEST


@given(NUMBERS)
def test_the_first_sample_has_the_seed_of_its_prompt(seed: int) -> None:
    """Two lines with the same seed are answered alike."""
    assert sample_seed(seed, 0) == seed


def test_further_samples_of_a_given_seed_differ() -> None:
    """Otherwise n samples would be one answer n times."""
    seeds = [sample_seed(seed, sample) for seed in (0, 1, 7) for sample in range(50)]

    assert len(set(seeds)) == len(seeds)


def test_given_and_derived_seeds_do_not_collide() -> None:
    """The two ways to derive a seed share nothing."""
    samples = {sample_seed(0, sample) for sample in range(100)}

    assert samples.isdisjoint(derived_seed(0, place) for place in range(100))
    assert samples.isdisjoint(derived_seed(0, 0, sample) for sample in range(100))
