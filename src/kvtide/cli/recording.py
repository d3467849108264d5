"""`kvtide run --html`: records what the engine does, and writes it as a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvtide.cli.files import write_text
from kvtide.cli.outcome import Outcome
from kvtide.sizes import counted

if TYPE_CHECKING:
    from kvtide.serve.engine import Engine
    from kvtide.server.events import Event


class Recording:
    """The events of an engine from now on, in bounded memory: those of a long run are coarser."""

    def __init__(self, engine: Engine) -> None:
        from kvtide.server.events import History, Recorder

        self._recorder = Recorder(engine)
        self._history = History()
        self._note(at_once=True)

    def note(self) -> None:
        """Notes a step of the engine."""
        self._note(at_once=False)

    def end(self) -> list[Event]:
        """All that happened. To be called before the engine is closed."""
        self._note(at_once=True)
        return self._history.events

    def _note(self, *, at_once: bool) -> None:
        event = self._recorder.note(at_once=at_once)
        if event is not None:
            self._history.add(event)


def write_page(path: Path, model: str, outcome: Outcome) -> None:
    """Writes the page of a run. Raises KvtideError if it can't be written.

    Of the model's name it has the last part, which says nothing of where its folder is.
    """
    from kvtide.server.webpage import recorded_page

    title = f"{Path(model).name}, {counted(len(outcome.requests), 'request')}"
    write_text(path, recorded_page(title, outcome.events))
