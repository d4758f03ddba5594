"""What graphs cannot hold, by kind: how severe it is, and what to do about it."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from cgcompile.debug.output import Result
from cgcompile.errors import (
    AddressChangedError,
    CaptureError,
    GradientError,
    HostValueChangedError,
)
from cgcompile.graphs.device import is_unjoined
from cgcompile.source_lines import Line

SEVERITIES = ("error", "break", "note")

# What to do about each kind of finding.
_FIXES = {
    "host_sync": "Keep the value on the device (torch.where in place of a branch, masked_fill), "
    "compute it before the step, do not print; or run the part eager: cgcompile.eager_region() "
    "where the model is traced, cgcompile.eager_break_during_capture where it is not.",
    "synchronize": "Leave it out of forward: work of one stream is in order anyway. For timing, "
    "synchronise around the call of the model.",
    "data_dependent_shape": "Keep the shape fixed: torch.where or masked_fill for a mask as an "
    "index, nonzero_static(size=...), repeat_interleave(output_size=...), index_select. Or run it "
    "eager: cgcompile.eager_region(), or cgcompile.eager_break_during_capture.",
    "cpu_tensor": "Make it on the device of the model: device=x.device, register_buffer and "
    "model.to(...), or copy it into a buffer on the device before the step.",
    "device_copy": "Copy before the step, into a buffer that stays (cgcompile.serving.HostStaging "
    "does it from pinned memory); make constants in __init__ and register_buffer them.",
    "other_device": "Put the model on one device, or compile the part of each device alone.",
    "collective": "Use NCCL for tensors on a GPU: others run between pieces.",
    "unregistered_attention": "Register it: cgcompile.Backend(splitting_ops=({op},)), or "
    "options={'splitting_ops': {op}}. SplittingOp(..., support=AttentionCGSupport....) sets how "
    "far it can go into FULL graphs; undeclared is NEVER.",
    "opaque_call": "Let an op of torch.library call it and register that op (splitting_ops=...), "
    "or put the function that calls it under cgcompile.eager_break_during_capture.",
    "cache_write": "Nothing, if slots come in a tensor at a fixed address. If it reads the forward "
    "context or numbers of the host, add {op} to splitting_ops.",
    "context_read": "Read the forward context inside of a splitting op, or of a function under "
    "cgcompile.eager_break_during_capture, which run at every step; or pass it as an argument.",
    "generator": "Draw from the default generator, which graphs register, or draw before the step "
    "and pass the numbers in. Seed (torch.manual_seed) before the step.",
    "random": "Nothing: each replay draws anew from the default generator. For inference, "
    "model.eval() turns dropout off.",
    "gradients": "Call the model under torch.inference_mode() or torch.no_grad().",
    "inference_tensor": "Call the model under torch.inference_mode() as well, or make what it "
    "writes, and weights of a model that needs gradients, outside of it.",
    "unsupported_input": "Pass dense tensors: to_dense(), or the parts of the subclass.",
    "functorch": "Nothing, where the model is traced and the whole region can be captured; a "
    "boundary inside makes one eager piece of it. Without a trace: write the batch dimension out.",
    "side_stream": "Fork from and join the current stream within forward (wait_stream both ways), "
    "before each break too, with splitting='breakable'; or leave streams to the caller.",
    "stale_scalar": "A graph repeats the number that it saw. Put it into "
    "BatchDescriptor(extra=...), or keep it in a tensor on the device.",
    "host_argument": "Nothing, if it is the same at each call. Else pass a tensor, or put it into "
    "the batch descriptor: BatchDescriptor(num_tokens, extra=(...,)).",
    "changing_argument": "Pass a tensor, or put a bucket of it into the batch descriptor: "
    "BatchDescriptor(num_tokens, extra=(...,)).",
    "changing_attribute": "Make it a tensor in a buffer and write it in place "
    "(self.step.add_(1)), or pass it as an argument.",
    "replaced_attribute": "Write in place into a buffer that stays: self.register_buffer(...) "
    "once, then .copy_().",
    "growing_state": "Take a cache of fixed size, written in place (index_copy_ at a position in "
    "a tensor); in transformers: StaticCache, or cache_implementation='static'.",
    "lazy_attribute": "Nothing: call the model once before it is captured, as warm-ups do.",
    "moving_input": "Nothing without a forward context: it is copied. With one, write into the "
    "same buffer at each step, or choose on_input_change='copy'.",
    "rebound_input": "Pass the same buffer at each call and write new data into it.",
    "capture_failed": "Let that op run outside of graphs: add it to splitting_ops, or put its "
    "caller under cgcompile.eager_region() or cgcompile.eager_break_during_capture.",
    "call_failed": "Do what the message advises. Of an error that you catch, "
    "cgcompile.debug.Diagnosis.of_error(error) gives the op and the line.",
    "forward_raised": "Let the model run eagerly first; a forward context goes around doctor().",
}
_ERROR, _NOTE = ("error", "error", "error"), ("note", "note", "note")
# Split, whole, untraced: see Way. Other kinds: break, break, error.
_SEVERITY = {
    **dict.fromkeys(("unregistered_attention", "opaque_call", "context_read"), _ERROR),
    **dict.fromkeys(("inference_tensor", "changing_attribute", "capture_failed"), _ERROR),
    **dict.fromkeys(("call_failed", "forward_raised"), _ERROR),
    **dict.fromkeys(("cache_write", "random", "host_argument"), _NOTE),
    **dict.fromkeys(("lazy_attribute", "moving_input"), _NOTE),
    **dict.fromkeys(("synchronize", "generator"), ("break", "error", "error")),
    **dict.fromkeys(("gradients", "unsupported_input"), ("break", "break", "break")),
    "functorch": ("note", "note", "error"),
}
KINDS = tuple(_FIXES)


class Way(IntEnum):
    """How a model is captured; it decides how severe a finding is."""

    SPLIT = 0  # torch.compile: Dynamo breaks the graph at what it cannot trace
    WHOLE = 1  # cgcompile.compile: one trace of the whole model, or none
    UNTRACED = 2  # a wrapper: plain Python runs once, while it is captured


@dataclass(frozen=True)
class Finding(Result):
    """One thing that graphs cannot hold, or hold only at a cost.

    Attributes:
        kind: a stable name, such as ``host_sync``; a :class:`~cgcompile.Reason` has the same one.
        severity: ``error``: it will raise, or give wrong results. ``break``: that part, or the
            step, runs without a graph, or is captured several times. ``note``: informational.
        message: what was found.
        fix: what to do.
        op: the op, function, argument or attribute that it is about.
        source: the user's line; None where it concerns no code of the user.
        count: how often one call of the model does it.

    Example:
        >>> with torch.no_grad():
        ...     found = cgcompile.debug.doctor(lambda x: x * x.max().item(), torch.randn(4))
        >>> finding = found.findings[0]
        >>> finding.kind
        'host_sync'
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


def finding(
    way: Way, kind: str, op: str, message: str, line: Line | None, severity: str | None = None
) -> Finding:
    """Return a finding with the fix and, unless it is given, the severity of its kind."""
    severity = severity or _SEVERITY.get(kind, ("break", "break", "error"))[way]
    return Finding(kind, severity, message, _FIXES[kind].replace("{op}", repr(op)), op, line)


# ---------------------------------------------------------------- the kind of an error

# Messages of CUDA and torch about a stream that must be joined.
_REFUSALS = ("stream is capturing", "streamcapture", "capturing stream")
# Refused where the shape of the result depends on data, and not tagged by torch.
_COUNTING = ("aten.where.", "aten.repeat_interleave.", "aten.nonzero_numpy.")


def kind_of(error: BaseException) -> str:
    """Return the kind of the finding that explains an error of a capture or a replay."""
    text, op = str(error), getattr(error, "op", "")
    if isinstance(error, GradientError):
        return "gradients"
    if isinstance(error, AddressChangedError):
        of_model = ": weight '" in text or ": the tensor self" in text
        return "replaced_attribute" if of_model else "moving_input"
    if isinstance(error, HostValueChangedError):
        return "changing_attribute" if "checks='-state'" in text else "changing_argument"
    if isinstance(error, CaptureError) and "pageable host memory" in text:
        return "device_copy"
    if isinstance(error, CaptureError) and op and "not permitted" in text:
        return kind_of_op(op)
    if isinstance(error, CaptureError) and "inside of torch.func" in text:
        return "functorch"
    if is_unjoined(error):
        return "side_stream"
    if is_of_inference_tensors(error):
        return "inference_tensor"
    refused = any(refusal in text.lower() for refusal in _REFUSALS)
    return "host_sync" if refused else "capture_failed"


def kind_of_op(op: str) -> str:
    """Return the kind of the finding about an op that a capture refuses."""
    if "generator" in op or op == "torch.manual_seed":
        return "generator"
    overload: Any = torch.ops
    for part in op.partition(" ")[0].split("."):
        overload = getattr(overload, part, None)
    shape = torch.Tag.dynamic_output_shape in getattr(overload, "tags", ())
    shape |= op.startswith(_COUNTING) or op.endswith("with a mask")
    return "data_dependent_shape" if shape else "host_sync"


def is_of_inference_tensors(error: BaseException) -> bool:
    """Return whether a tensor of inference mode was written, or kept for gradients, outside."""
    return isinstance(error, RuntimeError) and "inference tensor" in str(error).lower()
