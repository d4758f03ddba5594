"""One thing that :func:`cgcompile.debug.doctor` found, as a value: :class:`Finding`.

What to do about each kind of finding, and how bad it is: :func:`finding`.

The findings of one run, as they come in: :class:`Notes`.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from types import CodeType
from typing import NamedTuple

from cgcompile.debug.output import Result
from cgcompile.passes.nodes import Line, running_line

SEVERITIES = ("error", "break", "note")


@dataclass(frozen=True)
class Finding(Result):
    """One thing that graphs cannot hold, or hold only at a cost.

    Attributes:
        kind: a stable name, such as ``host_sync``; a :class:`~cgcompile.Reason` has the same one.
        severity: ``error``: it will raise, or give wrong results. ``break``: that part, or the
            step, runs without a graph, or is captured again and again. ``note``: worth to know.
        message: what was found.
        fix: what to do.
        op: the op, function, argument or attribute that it is about.
        source: the user's line; None where no code of the user's is concerned.
        count: how often one call of the model does it.
    """

    kind: str
    severity: str
    message: str
    fix: str
    op: str
    source: Line | None = None
    count: int = 1

    def __str__(self) -> str:
        times = f", {self.count} times" if self.count > 1 else ""
        rows = [f"{self.severity:6} {self.kind}: {self.op}{times}"]
        rows += [f"  at   {self.source}"] if self.source is not None else []
        return "\n".join([*rows, f"  why  {self.message}", f"  fix  {self.fix}"])


class Way(Enum):
    """How a model is captured; it decides how bad a finding is."""

    SPLIT = "torch.compile"  # Dynamo cuts at what it cannot trace, and goes on
    WHOLE = "cgcompile.compile"  # one trace of the whole model, or none
    UNTRACED = "wrapper"  # plain Python runs once, while it is captured


class Advice(NamedTuple):
    """What to do about a kind of finding, and its severity by the way a model is captured."""

    fix: str
    split: str = "break"
    whole: str = "break"
    untraced: str = "error"


_ERROR = ("error", "error", "error")
_BREAK = ("break", "break", "break")
_NOTE = ("note", "note", "note")
_ADVICE: dict[str, Advice] = {
    "host_sync": Advice(
        "Keep the value on the device (torch.where in place of a branch, masked_fill), "
        "compute it before the step, do not print; or run the part eager: "
        "cgcompile.eager_region() where the model is traced, "
        "cgcompile.eager_break_during_capture where it is not."
    ),
    "synchronize": Advice(
        "Leave it out of forward: work of one stream is in order anyway. For timing, "
        "synchronise around the call of the model.",
        whole="error",
    ),
    "data_dependent_shape": Advice(
        "Keep the shape fixed: torch.where or masked_fill in place of a mask as an index, "
        "nonzero_static(size=...), repeat_interleave(output_size=...), index_select with "
        "padded indices. Or run it eager: cgcompile.eager_region(), or "
        "cgcompile.eager_break_during_capture."
    ),
    "cpu_tensor": Advice(
        "Make it on the device of the model: device=x.device, register_buffer and "
        "model.to(...), or copy it into a buffer on the device before the step."
    ),
    "device_copy": Advice(
        "Copy before the step, into a buffer that stays (cgcompile.serving.HostStaging does it "
        "from pinned memory); make constants in __init__ and register_buffer them."
    ),
    "other_device": Advice(
        "Put all of the model on one device, or compile the part of each device on its own."
    ),
    "collective": Advice(
        "Use NCCL for tensors on a GPU: its collectives can be captured. Others run between pieces."
    ),
    "unregistered_attention": Advice(
        "Register it: cgcompile.Backend(splitting_ops=({op},)), or options={'splitting_ops': "
        "{op}}. SplittingOp(..., support=AttentionCGSupport....) says how far it can go into "
        "FULL graphs; undeclared is NEVER.",
        *_ERROR,
    ),
    "opaque_call": Advice(
        "Let an op of torch.library call it and register that op (splitting_ops=...), or put "
        "the function that calls it under cgcompile.eager_break_during_capture.",
        *_ERROR,
    ),
    "cache_write": Advice(
        "Nothing, if slots come in a tensor that stays where it is: it is captured with its "
        "piece. If it reads the forward context or numbers of the host, add {op} to "
        "splitting_ops.",
        *_NOTE,
    ),
    "context_read": Advice(
        "Read the forward context inside of a splitting op, or of a function under "
        "cgcompile.eager_break_during_capture, which run at every step; or pass it as an "
        "argument.",
        *_ERROR,
    ),
    "generator": Advice(
        "Draw from the default generator (torch.manual_seed), which graphs know, or draw "
        "before the step and pass the numbers in.",
        whole="error",
    ),
    "random": Advice(
        "Nothing: each replay draws anew from the default generator. For inference, "
        "model.eval() turns dropout off.",
        *_NOTE,
    ),
    "gradients": Advice("Call the model under torch.inference_mode() or torch.no_grad().", *_BREAK),
    "inference_tensor": Advice(
        "Call the model under torch.inference_mode() as well, or make what it writes, and "
        "weights of a model that needs gradients, outside of it.",
        *_ERROR,
    ),
    "unsupported_input": Advice(
        "Pass dense tensors: to_dense(), or the parts of the subclass.", *_BREAK
    ),
    "functorch": Advice(
        "Nothing, where the model is traced and the whole region can be captured; a boundary "
        "inside makes one eager piece of it. Without a trace: write the batch dimension out.",
        split="note",
        whole="note",
    ),
    "side_stream": Advice(
        "Fork from and join the current stream within forward (wait_stream both ways), before"
        " each break too, and let the model be untraced: splitting='breakable'; or leave "
        "streams to the caller."
    ),
    "stale_scalar": Advice(
        "A graph repeats the number that it saw. Put it into BatchDescriptor(extra=...), or "
        "keep it in a tensor on the device."
    ),
    "host_argument": Advice(
        "Nothing, if it is the same at each call. Else pass a tensor, or put it into the "
        "batch descriptor: BatchDescriptor(num_tokens, extra=(...,)).",
        *_NOTE,
    ),
    "changing_argument": Advice(
        "Pass a tensor, or put a bucket of it into the batch descriptor: "
        "BatchDescriptor(num_tokens, extra=(...,))."
    ),
    "changing_attribute": Advice(
        "Make it a tensor in a buffer and write it in place (self.step.add_(1)), or pass it "
        "as an argument.",
        *_ERROR,
    ),
    "replaced_attribute": Advice(
        "Write in place into a buffer that stays: self.register_buffer(...) once, then .copy_()."
    ),
    "growing_state": Advice(
        "Take a cache of fixed size, written in place (index_copy_ at a position in a "
        "tensor); in transformers: StaticCache, or cache_implementation='static'."
    ),
    "lazy_attribute": Advice(
        "Nothing: call the model once before it is captured, as warm-ups do.", *_NOTE
    ),
    "moving_input": Advice(
        "Nothing without a forward context: it is copied. With one, write into the same "
        "buffer at each step, or choose on_input_change='copy'.",
        *_NOTE,
    ),
    "rebound_input": Advice("Pass the same buffer at each call and write new data into it."),
    "capture_failed": Advice(
        "Let that op run outside of graphs: add it to splitting_ops, or put its caller under "
        "cgcompile.eager_region() or cgcompile.eager_break_during_capture.",
        *_ERROR,
    ),
    "forward_raised": Advice(
        "Let the model run plain first; what it needs (a forward context, say) goes around "
        "doctor().",
        *_ERROR,
    ),
}

KINDS = tuple(_ADVICE)


def finding(
    kind: str,
    way: Way,
    op: str,
    message: str,
    source: Line | None = None,
    *,
    severity: str | None = None,
) -> Finding:
    """Return a finding with the severity and the fix of its kind."""
    advice = _ADVICE[kind]
    by_way = {Way.SPLIT: advice.split, Way.WHOLE: advice.whole, Way.UNTRACED: advice.untraced}
    fix = advice.fix.replace("{op}", repr(op))
    return Finding(kind, severity or by_way[way], message, fix, op, source)


_GUARDED = "the function asks whether it is traced or captured, and may leave it out then"


class Notes:
    """Collects findings; the same one from the same line is counted, not repeated."""

    def __init__(self, way: Way, until: CodeType) -> None:
        self.way = way
        self.closed = False
        self.guarded: set[tuple[str, str]] = set()
        self._until = until
        self._quiet = 0
        self._found: dict[tuple[object, ...], Finding] = {}

    def __iter__(self) -> Iterator[Finding]:
        yield from self._found.values()

    @property
    def listens(self) -> bool:
        """Whether what runs now would be captured, and findings are collected."""
        return not self._quiet and not self.closed

    def hush(self, by: int) -> None:
        """Enter (1) or leave (-1) something that runs eager, or that is reported already."""
        self._quiet += by

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Collect nothing inside: it runs eager, or is reported already."""
        self.hush(1)
        try:
            yield
        finally:
            self.hush(-1)

    def line(self) -> Line | None:
        """Return the user's line that runs now."""
        return running_line(sys._getframe(1), self._until)

    def here(self, kind: str, op: str, message: str, *, severity: str | None = None) -> None:
        """Add a finding about what runs now."""
        if self.listens:
            self.about(self.line(), kind, op, message, severity=severity)

    def about(
        self, line: Line | None, kind: str, op: str, message: str, *, severity: str | None = None
    ) -> None:
        """Add a finding about what has run in a line.

        Only a note, where the code asks whether it is traced or captured: it may not do so then.
        """
        if line is not None and (line.file, line.function) in self.guarded:
            message, severity = f"{message}; {_GUARDED}", "note"
        self.add(kind, op, message, line, severity=severity)

    def add(
        self,
        kind: str,
        op: str,
        message: str,
        source: Line | None = None,
        *,
        severity: str | None = None,
    ) -> None:
        """Add a finding about a line, or about no line."""
        key = (kind, source[:2] if source is not None else op)
        if key in self._found:
            self._found[key] = replace(self._found[key], count=self._found[key].count + 1)
        else:
            self._found[key] = finding(kind, self.way, op, message, source, severity=severity)
