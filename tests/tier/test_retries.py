from __future__ import annotations

import errno
import random
from collections.abc import Callable

import pytest

from kvtide.errors import KvtideError, SnapshotMiss, TierFull, TierRetry
from kvtide.seal import Seal, Span
from kvtide.tier import retries
from kvtide.tier.retries import REST_S, SLOW_S, WAITS_S, RetriedTier
from tier.faulty_tiers import Clock, FaultyTier, SimulatedJob

SEAL = Seal('{"groups":[]}', "", 1, (), (), 8, (Span(0, 0, 8, 0),))
CHUNKS = [memoryview(bytes(8))]


class Rig:
    """A tier with retries over one that fails when the test says so, and what it warned of."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.below = FaultyTier(random.Random(0), 1 << 20)
        self.tier = RetriedTier(self.below, clock=self.clock, sleep=self.clock.sleep)
        self.warnings: list[str] = []

    def put(self, key: str) -> None:
        self.tier.put(key, SEAL, CHUNKS)

    def seal(self, key: str) -> None:
        self.tier.seal_of(key)

    def has(self, key: str) -> None:
        self.tier.contains(key)

    def fails(self, call: Callable[[str], None], *keys: str) -> float:
        """How long calls for these keys take, each of which ends with TierRetry."""
        began = self.clock.now
        for key in keys:
            with pytest.raises(TierRetry):
                call(key)
        return self.clock.now - began


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    """A tier that works."""
    rig = Rig()
    monkeypatch.setattr(
        retries.logger, "warning", lambda text, *values: rig.warnings.append(text % values)
    )
    return rig


def test_call_is_tried_again_until_it_works(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that answers at the third try costs two waits, and no warning."""
    rig.below.is_away = True
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        rig.below.is_away = len(pauses) < 2

    monkeypatch.setattr(rig.tier, "_sleep", sleep)
    rig.put("a")
    assert (list(WAITS_S[:2]), []) == (pauses, rig.warnings)


def test_slow_failure_is_not_tried_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two keys, which is what it takes to let a tier rest, cost the tier's own two waits."""
    calls: list[str] = []

    def seal_of(key: str) -> Seal:
        calls.append(key)
        rig.clock.sleep(2 * SLOW_S)
        raise TierRetry("no master is there")

    monkeypatch.setattr(rig.below, "seal_of", seal_of)
    assert 4 * SLOW_S == rig.fails(rig.seal, "a", "b")
    assert (["a", "b"], 1) == (calls, len(rig.warnings))
    assert 0 == rig.fails(rig.seal, "c")


def test_bad_place_on_a_disk_costs_one_snapshot(rig: Rig) -> None:
    """While one key fails again and again, others are read: the tier doesn't rest."""
    for key in "abc":
        rig.put(key)
    rig.below.bad_keys = {"a"}
    for _ in range(3):
        assert sum(WAITS_S) == rig.fails(rig.seal, "a")
        rig.seal("b")
        rig.seal("c")
    assert [] == rig.warnings


def test_broken_tier_rests_after_two_keys(rig: Rig) -> None:
    """Then a call costs no time until the rest is over, and a single try after that."""
    rig.below.is_away = True
    assert 2 * sum(WAITS_S) == pytest.approx(rig.fails(rig.put, "a", "b"))
    assert 0 == rig.fails(rig.put, "c", "d", "e")
    rig.clock.now += REST_S
    assert 0 == rig.fails(rig.put, "f")
    assert ["simulated: away"] == [text[-15:] for text in rig.warnings]
    rig.below.is_away = False
    with pytest.raises(TierRetry, match="isn't asked for a while"):
        rig.put("g")
    rig.clock.now += REST_S
    rig.put("h")
    assert ["kvtide uses the tier 'FaultyTier' again, which had errors"] == rig.warnings[1:]


def test_tier_that_cannot_say_what_it_has_rests(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that looks for a thousand requests in a store without a master takes no hour."""

    def fail(key: str) -> bool:
        raise TierRetry("simulated: no answer")

    monkeypatch.setattr(rig.below, "contains", fail)
    assert 2 * sum(WAITS_S) == pytest.approx(rig.fails(rig.has, "a", "b"))
    assert not any(rig.tier.contains(str(number)) for number in range(1000))
    assert 1 == len(rig.warnings)


def test_tier_that_can_only_be_read_is_read(rig: Rig) -> None:
    """While writes rest, reads don't, and the other way round."""
    for key in "ab":
        rig.put(key)
    rig.below.refuses_writes = True
    rig.fails(rig.put, "c", "d", "e")
    assert [False, True] == [rig.tier.takes, rig.tier.contains("b")]
    rig.seal("a")
    rig.below.refuses_writes, rig.below.bad_keys = False, {"a", "b"}
    rig.clock.now += REST_S
    rig.fails(rig.seal, "a", "b")
    assert [True, False] == [rig.tier.takes, rig.tier.contains("a")]
    rig.put("f")
    assert 1 == len(rig.warnings)


def test_tier_that_hangs_is_not_asked_until_it_has_answered(rig: Rig) -> None:
    """Nobody else waits for it."""
    rig.put("a")
    hung = SimulatedJob(lambda: None)
    rig.tier.note_late(hung)
    assert [True, False, False] == [rig.tier.is_hung, rig.tier.takes, rig.tier.contains("a")]
    assert 0 == rig.fails(rig.put, "b") + rig.fails(rig.seal, "a")
    hung.run()
    assert [False, True, True] == [rig.tier.is_hung, rig.tier.takes, rig.tier.contains("a")]
    rig.put("b")


def test_other_errors_come_through_at_once(rig: Rig) -> None:
    """A miss or a full tier is an answer: it isn't asked again, and doesn't rest."""
    rig.below.limit_bytes = 4
    for _ in range(3):
        with pytest.raises(TierFull):
            rig.put("a")
        with pytest.raises(SnapshotMiss):
            rig.seal("a")
    assert (0.0, True) == (rig.clock.now, rig.tier.takes)


def test_error_that_is_not_kvtides_is_the_tiers(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier of others that raises what it shouldn't is away, and says why, but not where."""

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error", "/a/path")

    monkeypatch.setattr(rig.below, "put", fail)
    said = "the tier 'FaultyTier' failed: OSError: [Errno 5] Input/output error"
    for key in ("a", "b"):
        with pytest.raises(TierRetry) as caught:
            rig.put(key)
        assert said == str(caught.value)
    assert [True] == [text.endswith(said) for text in rig.warnings]


def test_what_could_not_be_removed_is_removed_later(rig: Rig) -> None:
    """Each call that goes well takes one such key along; a key that was put again stays."""
    for key in "abcd":
        rig.put(key)
    rig.below.is_away = True
    rig.fails(rig.tier.remove, *"abc")
    rig.below.is_away = False
    rig.clock.now += REST_S
    rig.put("a")
    assert {"a", "c", "d"} == set(rig.below.kept)
    rig.tier.remove("d")
    assert {"a"} == set(rig.below.kept)
    rig.put("e")
    assert {"a", "e"} == set(rig.below.kept)


def test_what_a_failed_write_left_is_removed(rig: Rig) -> None:
    """A write without an answer may have written: `tidy` removes what is left, if it may ask."""
    rig.below.is_silent = True
    rig.fails(rig.put, "a", "b")
    assert {"a", "b"} == set(rig.below.kept)
    rig.below.is_silent = False
    with pytest.raises(TierRetry):
        rig.tier.tidy()
    rig.clock.now += REST_S
    rig.tier.tidy()
    assert {} == rig.below.kept


def test_full_tier_has_nothing_to_remove(rig: Rig) -> None:
    """A tier that refuses at once keeps nothing, by its contract."""
    rig.below.limit_bytes = 4
    with pytest.raises(TierFull):
        rig.put("a")
    assert {} == rig.tier._leftovers


def test_removal_that_comes_late_spares_what_was_put_meanwhile(rig: Rig) -> None:
    """A request that is saved again has the same key: the earlier removal must not hit it."""
    rig.put("a")
    rig.tier.forget("a")
    rig.put("a")
    rig.tier.tidy("a")
    assert {"a"} == set(rig.below.kept)
    rig.tier.remove("a")
    assert {} == rig.below.kept


@pytest.mark.parametrize("why", ["resting", "full"])
def test_put_that_fails_leaves_what_is_to_be_removed(rig: Rig, why: str) -> None:
    """The older bytes under the key are still unwanted: the new ones are in another tier."""
    for key in "abc":
        rig.put(key)
    rig.tier.forget("a")
    if why == "resting":
        rig.below.is_away = True
        rig.fails(rig.tier.remove, "b", "c")
        rig.fails(rig.put, "a")
        rig.below.is_away = False
        rig.clock.now += REST_S
    else:
        limit_bytes, rig.below.limit_bytes = rig.below.limit_bytes, 0
        with pytest.raises(TierFull):
            rig.put("a")
        rig.below.limit_bytes = limit_bytes
    rig.tier.tidy()
    assert "a" not in rig.below.kept


def test_what_is_to_be_removed_is_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that is away for long doesn't let the list of such keys grow."""
    monkeypatch.setattr(retries, "_MOST_LEFTOVERS", 2)
    for key in "abc":
        rig.put(key)
    rig.below.is_away = True
    for key in "abc":
        with pytest.raises(KvtideError):
            rig.tier.remove(key)
    rig.below.is_away = False
    rig.clock.now += REST_S
    for key in "def":
        rig.put(key)
    assert {"c", "d", "e", "f"} == set(rig.below.kept)
