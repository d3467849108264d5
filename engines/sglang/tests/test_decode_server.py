"""A real decode server that retracts requests; SGLang finds kvtide as an installed plugin.

The engines start slowly, so each runs through many scenarios. meddler/ decides what happens to
which request, and watcher/ compares bytes independently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
from engine_case import DECODE_SERVER, EngineRun, run_engine
from ordinary_case import make_model

THREE = ("plain", "skip", "damage", "full", "abort")
NEW_TOKENS = 24


def ask(rid: str, new_tokens: int = NEW_TOKENS) -> dict[str, Any]:
    """Makes a request of five tokens for `new_tokens` more."""
    return {
        "rid": rid,
        "input_ids": [5, 6, 7, 8, 9],
        "bootstrap_host": "2.2.2.2",
        "bootstrap_room": sum(rid.encode()),
        "sampling_params": {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True},
    }


def three(prefix: str) -> list[dict[str, Any]]:
    """Makes three requests, which run together."""
    return [ask(f"{prefix}-{number}") for number in range(3)]


@pytest.fixture(scope="module")
def forced(tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    """A run in which SGLang retracts a request in each step that has more than one."""
    steps: list[tuple[str, Any]] = [("ask", three(prefix)) for prefix in THREE]
    steps += [("ask", [ask("lone")]), ("rest", 1.5), ("metrics", None), ("leave", three("stay"))]
    server = {**DECODE_SERVER, "enable_metrics": True, "log_level": "debug"}
    folder = tmp_path_factory.mktemp("forced")
    # The processes of this engine are started anew, as a server's are.
    return run_engine(folder, server, steps, is_spawned=True, KVTIDE_HOST_MEMORY="16MiB")


def answers(run: EngineRun, prefix: str) -> list[Mapping[str, Any]]:
    """Returns how the three requests ended."""
    found: Mapping[str, Mapping[str, Any]] = run.results[THREE.index(prefix)]
    return list(found.values())


def finished(run: EngineRun, prefix: str) -> int:
    """Returns how many of the three got all their tokens."""
    return sum(len(answer.get("output_ids", ())) == NEW_TOKENS for answer in answers(run, prefix))


def test_every_restore_is_exact(forced: EngineRun) -> None:
    """Both plugins compare the bytes; the slots are others, and the old ones were overwritten."""
    resumed, restored = forced.events_of("resume", "plain"), forced.events_of("restore", "plain")
    assert len(resumed) == len(restored) >= 5
    assert [] == [event for event in [*resumed, *restored] if not event["exact"]]
    assert any(event["moved"] for event in resumed)
    assert 3 == finished(forced, "plain")


def test_without_the_restore_the_bytes_differ(forced: EngineRun) -> None:
    """A control: the compared bytes aren't equal by chance."""
    resumed = forced.events_of("resume", "skip")
    assert len(resumed) >= 5
    assert [] == [event for event in resumed if event["exact"]]


def test_damaged_kv_is_never_used(forced: EngineRun) -> None:
    """The request ends with an error that says so; the others go on."""
    lost = [answer["error"] for answer in answers(forced, "damage") if "error" in answer]
    assert 2 == len(lost)
    for error in lost:
        assert re.search("500: Retracted under memory pressure, .* couldn't be restored", error)
    assert 1 == finished(forced, "damage")
    retracted = [event["rid"] for event in forced.events_of("retract", "damage")]
    assert sorted(set(retracted)) == sorted(retracted), "whoever was lost never ran again"


def test_a_full_arena_ends_only_the_request_that_finds_it_full(forced: EngineRun) -> None:
    """Its client gets an error; the last of the three can't be retracted, and finishes."""
    saved = [event["saved"] for event in forced.events_of("retract", "full")]
    assert [False, False] == saved
    errors = [answer["error"] for answer in answers(forced, "full") if "error" in answer]
    assert 2 == len(errors)
    assert all("503: Retracted under decode memory pressure" in error for error in errors)
    assert 1 == finished(forced, "full")


def test_an_abort_of_a_retracted_request_frees_its_backup(forced: EngineRun) -> None:
    """It ends as aborted, and is never resumed."""
    assert 2 == len(forced.events_of("abort"))
    assert [] == forced.events_of("resume", "abort")
    assert 1 == finished(forced, "abort")


def test_a_lone_request_without_room_is_aborted(forced: EngineRun) -> None:
    """No other request has memory to give, and kvtide isn't asked."""
    assert forced.events_of("taken")
    (answer,) = forced.results[len(THREE)].values()
    assert "Out of memory even after retracting all other requests" in answer["error"]
    assert [] == forced.events_of("save", "lone")


def test_nothing_is_leaked(forced: EngineRun) -> None:
    """Whenever the server is idle, slots, rows and the arena are as in the beginning."""
    first, *later = forced.events_of("idle")
    assert first["slots_free"] == first["slots"]
    assert 0 == first["arena_bytes"]
    assert [] == [answer for answer in later if answer != first]


def test_the_metrics_count_saves_and_restores(forced: EngineRun) -> None:
    """They are in SGLang's own endpoint, with its labels."""
    lines: list[str] = forced.results[len(THREE) + 2].splitlines()

    def value(name: str, *labels: str) -> float:
        (line,) = [
            line
            for line in lines
            if line.startswith(f"kvtide:{name}{{") and all(label in line for label in labels)
        ]
        assert 'engine_type="decode"' in line
        return float(line.rsplit(" ", 1)[1])

    restored = [event for event in forced.events_of("restore") if event["exact"]]
    assert len(restored) == value("restored_requests_total")
    assert len(forced.events_of("save")) - len(forced.events_of("save", "stay")) == value(
        "saved_requests_total"
    )
    tokens = sum(
        event["tokens"] for event in forced.events_of("save") if "stay" not in event["rid"]
    )
    assert 512 * tokens == value("saved_bytes_total")
    assert value("save_seconds_total") > 0
    assert 2 + value("saved_requests_total") == value("retracted_requests_total")
    assert 2 == value("refusals_total", 'way="save"', 'reason="arena_full"')
    assert 2 == value("refusals_total", 'way="restore"', 'reason="damaged"')
    assert 0 == value("arena_used_bytes")
    assert 1 << 24 == value("arena_limit_bytes")


def test_one_line_of_the_log_says_what_is_covered(forced: EngineRun) -> None:
    """It has versions, pool, cost and limit; kvtide chose the backend without a host pool."""
    (line,) = forced.log_lines("kvtide 0.1.0 with SGLang 0.5.23")
    for said in (
        "covers MHATokenToKVPool (k, v)",
        "512 bytes a token",
        "up to 16.0 MiB",
        "backend cpu_tensor",
    ):
        assert said in line


def test_one_line_of_the_log_names_unknown_variables(forced: EngineRun) -> None:
    """There is one line although every process of the server reads the settings."""
    (line,) = forced.log_lines("kvtide knows no variable")
    assert line.endswith("kvtide knows no variable KVTIDE_WATCH")


def test_each_move_is_a_line_at_debug_level(forced: EngineRun) -> None:
    """The line has sizes and times, but nothing of prompts and answers."""
    lines = forced.log_lines("kvtide saved request 'plain-")
    assert len(forced.events_of("save", "plain")) == len(lines)
    assert re.search(r"plain-\d': \d+ tokens, \d+ bytes, [\d.]+ ms; arena \d+ of", lines[0])


def test_a_server_shuts_down_with_requests_retracted(forced: EngineRun) -> None:
    """It ends at once and without an error."""
    assert forced.events_of("retract", "stay")
    assert [] == forced.events_of("resume", "stay")
    assert 0 == forced.exit_code
    assert [] == forced.log_lines("hit an exception")


def test_under_real_pressure_requests_come_back(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The pool has room for half of the tokens: no request loses any. Pages have 16 tokens."""
    server = {
        **DECODE_SERVER,
        "max_total_tokens": 160,
        "page_size": 16,
        "num_reserved_decode_tokens": 16,
    }
    requests = [ask(f"crowd-{number}", 80) for number in range(4)]
    run = run_engine(
        tmp_path_factory.mktemp("pressure"), server, [("ask", requests), ("rest", 1.0)]
    )
    assert [] == run.log_lines("Testing retraction")
    assert run.log_lines("KV cache pool is full. Retract requests")
    resumed = run.events_of("resume")
    assert resumed
    assert [] == [event for event in resumed if not event["exact"]]
    assert [80] * 4 == [len(answer.get("output_ids", ())) for answer in run.results[0].values()]
    first, *later = run.events_of("idle")
    assert [] == [answer for answer in later if answer != first]


RECURRENT = {
    "plain": three("plain"),
    "ahead": three("ahead"),
    "skip": three("skip"),
    "crowd": [ask(f"crowd-{number}", 80) for number in range(3)],
}
"""Requests to a server with recurrent state, by what the meddler does to them."""


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    """First each request is asked alone, and isn't retracted; then all of a kind at once.

    Steps overlap, and the pool has room for about two thirds of the crowd's answers.
    """
    folder = tmp_path_factory.mktemp("recurrent")
    make_model(folder / "states", "states")
    server = {
        **DECODE_SERVER,
        "load_format": "auto",
        "max_total_tokens": 160,
        "num_reserved_decode_tokens": 16,
    }
    alone = [("ask", [request]) for requests in RECURRENT.values() for request in requests]
    together = [("ask", requests) for requests in RECURRENT.values()]
    return run_engine(
        folder,
        server,
        [*alone, *together, ("rest", 1.0)],
        model=folder / "states",
        plugins=["watcher", "meddler", "on_cpu"],
        KVTIDE_SGLANG="strict",
        KVTIDE_HOST_MEMORY="16MiB",
        # For a state: otherwise SGLang's is bfloat16, and on_cpu convolves in float32.
        SGLANG_MAMBA_CONV_DTYPE="float32",
    )


def alone_and_together(run: EngineRun, prefix: str) -> list[tuple[Any, Any]]:
    """Returns a kind's answers alone and together, in pairs."""
    whole = [answer for result in run.results[:-1] for answer in result.items()]
    half = len(whole) // 2
    pairs = zip(whole[:half], whole[half:], strict=True)
    return [(alone, other) for (rid, alone), (_, other) in pairs if rid.startswith(prefix)]


def retractions(answer: Mapping[str, Any]) -> int:
    """Returns how often SGLang retracted the request."""
    assert "error" not in answer, answer["error"]
    return int(answer["meta_info"]["num_retractions"])


@pytest.mark.parametrize(("prefix", "least"), [("plain", 5), ("crowd", 1)])
def test_recurrent_answers_equal_those_without_retraction(
    recurrent: EngineRun, prefix: str, least: int
) -> None:
    """Every token is equal, whether retraction is forced or comes from real pressure.

    SGLang retracts while a result is pending, so that a state is a step ahead: see the control.
    """
    pairs = alone_and_together(recurrent, prefix)
    assert [len(RECURRENT[prefix]), 0] == [
        len(pairs),
        sum(retractions(answer) for answer, _ in pairs),
    ]
    retracted = sum(retractions(answer) for _, answer in pairs)
    assert retracted >= least
    assert retracted == len(recurrent.events_of("restore", prefix))
    assert [answer["output_ids"] for answer, _ in pairs] == [
        answer["output_ids"] for _, answer in pairs
    ]
    assert recurrent.log_lines("KV cache pool is full. Retract requests")


@pytest.mark.parametrize(("prefix", "is_exact"), [("ahead", True), ("skip", False)])
def test_recurrent_answers_differ_in_the_controls(
    recurrent: EngineRun, prefix: str, is_exact: bool
) -> None:
    """In one control the state is saved before a pending result, and gives another answer."""
    resumed = recurrent.events_of("resume", prefix)
    assert {is_exact} == {event["exact"] for event in resumed}
    for alone, together in alone_and_together(recurrent, prefix):
        is_retracted = retractions(together) > 0
        assert is_retracted == (alone["output_ids"] != together["output_ids"])
    assert len(resumed) >= 5


def test_recurrent_state_comes_back_exactly(recurrent: EngineRun) -> None:
    """It comes back with its KV and into other slots, and nothing of it is kept in the end."""
    for prefix in ("plain", "crowd"):
        restored, resumed = (recurrent.events_of(kind, prefix) for kind in ("restore", "resume"))
        assert 0 < len(restored) == len(resumed)
        assert [] == [
            event for event in [*restored, *resumed] if not event["exact"] or event.get("empty")
        ]
    assert any(event["moved"] for event in recurrent.events_of("restore"))
    assert 0 == recurrent.exit_code
    assert [] == recurrent.log_lines("hit an exception")
    first, *later = recurrent.events_of("idle")
    assert first["states"] == first["states_free"]
    assert [] == [answer for answer in later if answer != first]


def test_ranks_save_and_restore_together_or_not_at_all(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A failure on one of two ranks ends the request on both; a rank alone would wait forever."""
    prefixes = ("plain", "full1", "damage1", "plain2")
    run = run_engine(
        tmp_path_factory.mktemp("ranks"),
        {**DECODE_SERVER, "tp_size": 2},
        [*(("ask", three(prefix)) for prefix in prefixes), ("rest", 1.0)],
        SGLANG_CPU_OMP_THREADS_BIND="0|1",
        KVTIDE_HOST_MEMORY="16MiB",
    )
    (line,) = run.log_lines("kvtide 0.1.0 with SGLang")
    assert "256 bytes a token, arena up to 8.0 MiB on this rank" in line
    tokens = [
        [len(answer.get("output_ids", ())) for answer in result.values()]
        for result in run.results[:4]
    ]
    whole, one_left = [NEW_TOKENS] * 3, [0, 0, NEW_TOKENS]
    assert [whole, one_left, one_left, whole] == [sorted(counts) for counts in tokens]
    assert [] == [event for event in run.events_of("resume", "plain") if not event["exact"]]
    assert run.log_lines("request full1-", "another rank couldn't save its share")
    assert run.log_lines("request damage1-", "another rank couldn't restore its share")
    first, *later = run.events_of("idle")
    assert [] == [answer for answer in later if answer != first]


def test_strict_keeps_a_server_from_starting(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The error has the pool and the reason; SGLang's plugins have no other way to stop it."""
    folder = tmp_path_factory.mktemp("strict")
    run = run_engine(
        folder,
        {**DECODE_SERVER, "disaggregation_decode_retraction_backup": "cpu_tensor"},
        [("ask", three("plain"))],
        KVTIDE_MEDDLE="refuse",
        KVTIDE_SGLANG="strict",
    )
    assert 0 != run.exit_code
    assert () == tuple(run.results)
    assert run.log_lines("KVTIDE_SGLANG=strict: ", "MHATokenToKVPool isn't known to kvtide")
