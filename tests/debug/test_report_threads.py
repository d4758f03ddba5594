"""A page may be asked for in one thread while another one serves and captures."""

import sys
from types import FrameType
from typing import Any

import pytest
from lib.entry import HOOKED, Hooked, batch, compiled_model, marked

import cgcompile
from cgcompile.runtime.recording import Recording

pytestmark = pytest.mark.usefixtures("without_gradients")


def test_captures_while_recorded_steps_are_listed() -> None:
    _, compiled, backend = compiled_model(Hooked, "cpu", **HOOKED)
    for size in (6, 7):
        for _ in range(2):
            compiled(marked(batch("cpu", size)))
    assert backend.counters.captures == 2
    met: list[Recording] = []

    def captures_more(frame: FrameType, event: str, what: Any) -> Any:
        """As another thread could, between two of the recorded steps."""
        if event == "return" and isinstance(what, Recording) and not met:
            met.append(what)
            for _ in range(2):
                compiled(marked(batch("cpu", 8)))
        return captures_more

    before = sys.gettrace()
    sys.settrace(captures_more)
    try:
        found = cgcompile.coverage(backend)
    finally:
        sys.settrace(before)
    assert met
    assert backend.counters.captures == 3
    assert {"6 tokens", "7 tokens"} <= {row.batches for row in found.rows}
