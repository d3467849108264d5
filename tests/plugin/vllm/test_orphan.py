"""An engine ends with the process that started it, however that process ends."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from multiprocessing.connection import Connection

import pytest

from kvtide.plugin.vllm.orphan import end_with_parent

SPAWN = multiprocessing.get_context("spawn")


def be_an_engine(told: Connection) -> None:
    """Says whether its parent is watched, and goes on for ever."""
    end_with_parent()
    told.send("kvtide-parent" in {thread.name for thread in threading.enumerate()})
    signal.pause()


def be_a_server(told: Connection, name: str) -> None:
    """Starts an engine under that name, and waits for it."""
    engine = SPAWN.Process(target=be_an_engine, args=(told,), name=name)
    engine.start()
    told.close()
    engine.join()


class TestEngineProcess:
    def test_ends_when_its_server_is_killed(self) -> None:
        heard, told = SPAWN.Pipe(duplex=False)
        server = SPAWN.Process(target=be_a_server, args=(told, "EngineCore_DP0"))
        server.start()
        told.close()
        assert heard.recv()

        server.kill()
        server.join()
        assert heard.poll(60)
        with pytest.raises(EOFError):
            heard.recv()

    def test_is_what_vllm_started_and_no_other_process(self) -> None:
        heard, told = SPAWN.Pipe(duplex=False)
        process = SPAWN.Process(target=be_an_engine, args=(told,), name="a user's own")
        process.start()
        try:
            assert not heard.recv()
        finally:
            process.kill()
            process.join()
