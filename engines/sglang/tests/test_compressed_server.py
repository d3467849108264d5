"""An ordinary server whose attention reads compressed keys, under memory pressure."""

from __future__ import annotations

from typing import Any

import pytest
from ordinary_case import Served, make_model, requests, run_ordinary

ASKED = requests(6, 40)
SERVERS: dict[str, tuple[dict[str, Any], str]] = {
    "llama": ({"disable_overlap_schedule": True}, "MHATokenToKVPool (k, v, k.k1, k.k2)"),
    "states": ({}, "HybridLinearKVPool (full.k, full.v, conv0, full.k.k1, full.k.k2)"),
}
"""Servers by their models, and the parts that kvtide covers. The model that has such keys has
states, too; SGLang shares no prefixes then."""


@pytest.fixture(scope="module", params=SERVERS)
def name(request: pytest.FixtureRequest) -> str:
    """Runs the tests with each server."""
    return str(request.param)


@pytest.fixture(scope="module")
def served(name: str, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """The server's answers, to one request after the other and to all at once."""
    folder = tmp_path_factory.mktemp("served")
    make_model(folder / "model", name)
    server = {**SERVERS[name][0], "disable_radix_cache": True, "max_total_tokens": 280}
    steps = {"alone": ("alone", ASKED), "together": ("generate", ASKED), "rest": ("rest", 0.5)}
    memory = {"KVTIDE_HOST_MEMORY": "64MiB"}
    return run_ordinary(folder / "model", folder, steps, server, ["sparse"], **memory)


def test_answers_equal_those_without_retraction(served: Served) -> None:
    """Each token's attention depends on all earlier compressed keys of both kinds."""
    retractions = [answer["meta_info"]["num_retractions"] for answer in served.answers["together"]]
    assert sum(retractions) >= 5
    alone, together = (
        [answer["output_ids"] for answer in served.answers[step]] for step in ("alone", "together")
    )
    assert alone == together


def test_the_log_says_that_these_keys_are_covered(name: str, served: Served) -> None:
    """The status line names them."""
    assert f"covers {SERVERS[name][1]}" in served.run.log


def test_requests_come_back_with_compressed_keys(served: Served) -> None:
    """No request was computed again for lack of something."""
    assert len(served.run.events_of("restore")) >= 5
    assert "will be computed again" not in served.run.log
