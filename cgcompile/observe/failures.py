"""After the fact: what made a capture fail, from the error or from the counters of a handle."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from cgcompile.backend import Backend
from cgcompile.errors import (
    AddressChangedError,
    CaptureError,
    CGCompileError,
    GradientError,
    HostValueChangedError,
)
from cgcompile.graphs.cuda import is_unjoined
from cgcompile.observe.advice import KINDS, Way, finding
from cgcompile.observe.findings import Finding
from cgcompile.passes.lines import Line, came_by_us, raised_at
from cgcompile.reasons import EXPECTED, Counters, Reason

# What CUDA and torch say where a captured stream would have to be waited for.
_REFUSALS = ("stream is capturing", "streamcapture", "capturing stream")
# What torch says where one is written, or kept for gradients, in another mode; reading is fine.
_INFERENCE = "inference tensor"
_LINE = re.compile(
    r"\((?P<file>[^()\s]+\.py):(?P<line>\d+) in (?P<function>\w+|<\w+>)(?:: (?P<code>.*))?\)"
)
_NAMED_OP = re.compile(r"(?P<op>[\w:.]+(?: with [\w ]+?)?): operation not permitted")

_UNRELATED = (
    "No graph has to do with it: it was raised elsewhere. Mend what it names; it comes without "
    "cgcompile as well."
)
_FIXES = {
    Reason.TOO_MANY_SHAPES: "Pad batches to fewer sizes, or raise max_captured_shapes.",
    Reason.VARYING_NUMBER: "Pass it as a tensor, or let splitting ops alone read it.",
    Reason.TOO_MANY_BINDINGS: "Keep weights and written inputs where they are: pass the same "
    "buffers at each call; or raise max_bindings.",
    Reason.NO_DEVICE: "Put the model on a GPU; for a study on the CPU: capture_device='host'.",
    Reason.CAPTURE_FORBIDDEN: "Capture this shape before capture is closed.",
    Reason.CAPTURE_BUSY: "Capture in one thread at a time.",
    Reason.ATTENTION_SUPPORT: "Say how far the op can go: SplittingOp(..., "
    "support=AttentionCGSupport....); or take cudagraph_mode='PIECEWISE'.",
    Reason.UNLISTED_SIZE: "Pad the batch to one of cudagraph_capture_sizes, or add the size.",
    Reason.INPUT_CHANGED: "Write into the same buffers at each step, or choose "
    "on_input_change='copy' or 'recapture'.",
}


def of_error(error: BaseException) -> Finding:
    """What made an error, the deepest of its causes.

    Args:
        error: with its traceback.
    """
    chain = list(_causes(error))
    deepest = chain[-1]
    found = (raised_at(each) or _named_line(str(each)) for each in reversed(chain))
    line = next((each for each in found if each is not None), None)
    message, _, rest = str(deepest).strip().partition("\n")
    op = getattr(deepest, "op", "") or "-"
    kind = _kind(deepest, op)
    if kind == "capture_failed" and not any(_is_of_graphs(each) for each in chain):
        text = f"{type(deepest).__name__}: {message}" if message else type(deepest).__name__
        return Finding("forward_raised", "error", text, _UNRELATED, op, line)
    made = finding(kind, Way.UNTRACED, op, message or type(deepest).__name__, line)
    ours = isinstance(deepest, CGCompileError) and rest.strip()
    return replace(made, severity="error", fix=" ".join(rest.split()) if ours else made.fix)


def of_handle(handle: Any) -> list[Finding]:
    """What the calls of a handle or of a wrapper could not do, from its counters.

    Args:
        handle: a :class:`cgcompile.Backend` or a :class:`cgcompile.CUDAGraphWrapper`.
    """
    counters: Counters = handle.counters
    rows = counters.plain + counters.degraded
    found = [
        _of_reason(reason, counters.details.get(reason, ""), count)
        for reason, count in rows.items()
        if reason not in EXPECTED
    ]
    return sorted(found, key=lambda each: (-each.count, each.kind))


def is_of_inference_tensors(error: BaseException) -> bool:
    """Whether a tensor made in inference mode was written, or needed for gradients, outside of it.

    Args:
        error: what the model raised.
    """
    return isinstance(error, RuntimeError) and _INFERENCE in str(error).lower()


def name_of(handle: Any) -> str:
    """What a handle or a wrapper is called in a report."""
    return "Backend" if isinstance(handle, Backend) else str(handle.name)


def _causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def _is_of_graphs(error: BaseException) -> bool:
    return isinstance(error, CGCompileError) or came_by_us(error)


def _kind(error: BaseException, op: str) -> str:
    if isinstance(error, GradientError):
        return "gradients"
    if isinstance(error, AddressChangedError):
        return "replaced_attribute" if ": weight '" in str(error) else "moving_input"
    if isinstance(error, HostValueChangedError):
        return "changing_argument"
    if isinstance(error, CaptureError) and op != "-" and "not permitted" in str(error):
        return _kind_of_op(op)
    if isinstance(error, CaptureError) and "inside of torch.func" in str(error):
        return "functorch"
    if is_unjoined(error):
        return "side_stream"
    if is_of_inference_tensors(error):
        return "inference_tensor"
    if any(text in str(error).lower() for text in _REFUSALS):
        return "host_sync"
    return "capture_failed"


def _kind_of_op(op: str) -> str:
    if "generator" in op:
        return "generator"
    found: Any = torch.ops
    for part in op.partition(" ")[0].split("."):
        found = getattr(found, part, None)
    shape = torch.Tag.dynamic_output_shape in getattr(found, "tags", ())
    return "data_dependent_shape" if shape or op.endswith("with a mask") else "host_sync"


def _of_reason(reason: Reason, detail: str, count: int) -> Finding:
    named = _NAMED_OP.search(detail)
    op = named["op"] if named else "-"
    failed = reason is Reason.CAPTURE_FAILED
    kind = _kind_of_op(op) if failed and named else reason.value
    line = _named_line(detail)
    if kind in KINDS:
        made = finding(kind, Way.SPLIT, op, detail, line, severity="break")
        return replace(made, count=count)
    fix = _FIXES.get(reason, "See cgcompile.Reason for what it means.")
    return Finding(kind, "break", detail, fix, op, line, count)


def _named_line(text: str) -> Line | None:
    """The last line of code that a message names, such as ``(model.py:41 in forward)``."""
    found = list(_LINE.finditer(text))
    if not found:
        return None
    last = found[-1]
    return Line(last["file"], int(last["line"]), last["function"], last["code"] or "")
