"""Calls of Python that no mode of torch sees: :class:`PythonCalls`, a profile function."""

import operator
import sys
from contextlib import AbstractContextManager
from types import CodeType, FrameType
from typing import Any

import torch

from cgcompile import compat
from cgcompile.forward_context import EagerRegion, get_forward_context, is_forward_context_available
from cgcompile.graphs.breakable import eager_break_during_capture
from cgcompile.graphs.regions import eager_region
from cgcompile.observe.advice import Way
from cgcompile.observe.attention import is_attention_name
from cgcompile.observe.notes import Notes
from cgcompile.observe.streams import Streams
from cgcompile.passes.lines import is_users_file

_UNSEEN = (torch.Event, torch.Stream)  # written in C, so that arguments do not show


class PythonCalls:
    """Context manager: sees calls that reach no mode of torch, by a profile function.

    Functions that ``torch.compile`` made run uncompiled; while they run, those of other threads as
    well. Where another profiler is active it sees nothing.

    Args:
        notes: where findings go.
        streams: is told how streams wait for one another; None where there are none: then those
            that are entered are findings.

    Attributes:
        ran: the code that ran.
        sees: whether it sees anything.
    """

    def __init__(self, notes: Notes, streams: Streams | None = None) -> None:
        self.notes = notes
        self._streams = streams
        self._enters_stream = _code(torch.cuda.StreamContext.__enter__)
        self._orders = (_code(torch.cuda.Event.record), _code(torch.cuda.Event.wait))
        self.ran: set[CodeType] = set()
        self.sees = False
        self._regions: list[Any] = []
        self._waits = {
            _code(torch.cuda.synchronize): "torch.cuda.synchronize",
            _code(torch.cuda.Stream.synchronize): "torch.cuda.Stream.synchronize",
            _code(torch.cuda.Event.synchronize): "torch.cuda.Event.synchronize",
            _code(torch.accelerator.synchronize): "torch.accelerator.synchronize",
        }
        self._asks = {
            _code(torch.compiler.is_compiling),
            _code(torch.compiler.is_dynamo_compiling),
            _code(torch.cuda.is_current_stream_capturing),
        }
        self._reads = {_code(get_forward_context), _code(is_forward_context_available)}
        self._break = _code(eager_break_during_capture(operator.neg))
        self._region = _code(eager_region)
        self._leave = _code(EagerRegion.__exit__)
        self._compiled = compat.code_of_compiled_functions()
        self._uncompiled: list[AbstractContextManager[Any]] = []  # around each that runs

    def __enter__(self) -> "PythonCalls":
        self.sees = sys.getprofile() is None
        if self.sees:
            sys.setprofile(self.see)
        return self

    def __exit__(self, *error: Any) -> None:
        if self.sees:
            sys.setprofile(None)
        while self._uncompiled:  # another profiler took over while one ran, so its end was not seen
            self._uncompiled.pop().__exit__(None, None, None)

    def see(self, frame: FrameType, event: str, what: Any) -> None:
        """One event of the profile function."""
        if event == "call":
            self._called(frame)
        elif event == "return":
            self._returned(frame, what)
        elif event == "c_call" and type(getattr(what, "__self__", None)) in _UNSEEN:
            self._missed()
        elif event == "c_call" and is_attention_name(getattr(what, "__name__", "")):
            top = str(getattr(what, "__module__", None) or "torch").partition(".")[0]
            if top not in ("torch", "builtins"):
                text = "neither torch nor a trace sees what it does: a graph repeats this step's"
                self.notes.here("opaque_call", f"{top}.{what.__name__}", text)

    def _called(self, frame: FrameType) -> None:
        code, notes = frame.f_code, self.notes
        self.ran.add(code)
        if code in self._waits:
            name = self._waits[code]
            notes.here("synchronize", name, f"{name}() makes the host wait for the device")
        elif code in self._orders:
            self._ordered(code, frame)
        elif code is self._enters_stream and self._streams is None:
            text = "what is inside would run on another stream of a GPU"
            notes.here("side_stream", "torch.cuda.stream", text, severity="note")
        elif code in self._asks:
            self._guard(frame.f_back)
        elif code in self._reads:
            text = f"{code.co_name}() outside of a splitting op: a graph keeps this step's context"
            notes.here("context_read", code.co_name, text)
        elif code is self._break and notes.way is Way.UNTRACED:
            notes.hush(1)
        elif code is self._compiled:
            self._uncompiled.append(compat.uncompiled())
            self._uncompiled[-1].__enter__()
        elif code is self._leave and any(frame.f_locals["self"] is r for r in self._regions):
            self._regions = [r for r in self._regions if r is not frame.f_locals["self"]]
            notes.hush(-1)

    def _ordered(self, code: CodeType, frame: FrameType) -> None:
        """An event is recorded or waited for: all waits of streams go through these."""
        if self._streams is not None:
            told = (self._streams.records, self._streams.waits)[self._orders.index(code)]
            told(frame.f_locals["self"], frame.f_locals["stream"])

    def _missed(self) -> None:
        if self._streams is not None:
            self._streams.blind = True

    def _guard(self, asker: FrameType | None) -> None:
        """A frame has got an answer to whether it is traced or captured."""
        if asker is not None and is_users_file(asker.f_code.co_filename):
            self.notes.guarded.add((asker.f_code.co_filename, asker.f_code.co_name))

    def _returned(self, frame: FrameType, what: Any) -> None:
        code = frame.f_code
        if isinstance(what, bool) and (code.co_filename, code.co_name) in self.notes.guarded:
            self._guard(frame.f_back)  # a predicate that passes the answer on
        if code is self._compiled and self._uncompiled:
            self._uncompiled.pop().__exit__(None, None, None)
        elif code is self._break and self.notes.way is Way.UNTRACED:
            self.notes.hush(-1)
        elif code is self._region and self.notes.way is not Way.UNTRACED:
            self._regions.append(what)
            self.notes.hush(1)


def _code(function: Any) -> CodeType:
    found = getattr(function, "__code__", None)
    return found if isinstance(found, CodeType) else (lambda: None).__code__
