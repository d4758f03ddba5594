"""What to do about each kind of finding, and how bad it is: :func:`finding`."""

from enum import Enum

from cgcompile.observe.findings import Finding
from cgcompile.passes.lines import Line


class Way(Enum):
    """How a model is captured; it decides how bad a finding is."""

    SPLIT = "torch.compile"  # Dynamo cuts at what it cannot trace, and goes on
    WHOLE = "cgcompile.compile"  # one trace of the whole model, or none
    UNTRACED = "wrapper"  # plain Python runs once, while it is captured


_REGISTER = (
    "SplittingOp(..., support=AttentionCGSupport....) says how far it can go into FULL graphs"
)

# kind -> (severity in the ways SPLIT, WHOLE, UNTRACED, fix)
_ADVICE: dict[str, tuple[str, str, str, str]] = {
    "host_sync": (
        "break",
        "break",
        "error",
        "Keep the value on the device (torch.where in place of a branch, masked_fill), compute it "
        "before the step, do not print; or run the part eager: cgcompile.eager_region() where the "
        "model is traced, cgcompile.eager_break_during_capture where it is not.",
    ),
    "synchronize": (
        "break",
        "error",
        "error",
        "Leave it out of forward: work of one stream is in order anyway. For timing, synchronise "
        "around the call of the model.",
    ),
    "data_dependent_shape": (
        "break",
        "break",
        "error",
        "Keep the shape fixed: torch.where or masked_fill in place of a mask as an index, "
        "nonzero_static(size=...), repeat_interleave(output_size=...), index_select with padded "
        "indices. Or run it eager: cgcompile.eager_region(), or "
        "cgcompile.eager_break_during_capture.",
    ),
    "cpu_tensor": (
        "break",
        "break",
        "error",
        "Make it on the device of the model: device=x.device, register_buffer and model.to(...), "
        "or copy it into a buffer on the device before the step.",
    ),
    "device_copy": (
        "break",
        "break",
        "error",
        "Copy before the step, into a buffer that stays (cgcompile.HostStaging does it from pinned "
        "memory); make constants in __init__ and register_buffer them.",
    ),
    "other_device": (
        "break",
        "break",
        "error",
        "Put all of the model on one device, or compile the part of each device on its own.",
    ),
    "collective": (
        "break",
        "break",
        "error",
        "Use NCCL for tensors on a GPU: its collectives can be captured. Others run between "
        "pieces.",
    ),
    "unregistered_attention": (
        "error",
        "error",
        "error",
        "Register it: cgcompile.Backend(splitting_ops=({op},)), or options={'splitting_ops': "
        "{op}}. " + _REGISTER + "; undeclared is NEVER.",
    ),
    "opaque_call": (
        "error",
        "error",
        "error",
        "Let an op of torch.library call it and register that op (splitting_ops=...), or put the "
        "function that calls it under cgcompile.eager_break_during_capture.",
    ),
    "cache_write": (
        "note",
        "note",
        "note",
        "Nothing, if slots come in a tensor that stays where it is: it is captured with its piece. "
        "If it reads the forward context or numbers of the host, add {op} to splitting_ops.",
    ),
    "context_read": (
        "error",
        "error",
        "error",
        "Read the forward context inside of a splitting op, or of a function under "
        "cgcompile.eager_break_during_capture, which run at every step; or pass it as an argument.",
    ),
    "generator": (
        "break",
        "error",
        "error",
        "Draw from the default generator (torch.manual_seed), which graphs know, or draw before "
        "the step and pass the numbers in.",
    ),
    "random": (
        "note",
        "note",
        "note",
        "Nothing: each replay draws anew from the default generator. For inference, model.eval() "
        "turns dropout off.",
    ),
    "gradients": (
        "break",
        "break",
        "break",
        "Call the model under torch.inference_mode() or torch.no_grad().",
    ),
    "inference_tensor": (
        "error",
        "error",
        "error",
        "Call the model under torch.inference_mode() as well, or make what it writes, and weights "
        "of a model that needs gradients, outside of it.",
    ),
    "unsupported_input": (
        "break",
        "break",
        "break",
        "Pass dense tensors: to_dense(), or the parts of the subclass.",
    ),
    "functorch": (
        "note",
        "note",
        "error",
        "Nothing, where the model is traced and the whole region can be captured; a boundary "
        "inside makes one eager piece of it. Without a trace: write the batch dimension out.",
    ),
    "side_stream": (
        "break",
        "break",
        "error",
        "Fork from and join the current stream within forward (wait_stream both ways), before each "
        "break too, and let the model be untraced: splitting='breakable'; or leave streams to the "
        "caller.",
    ),
    "stale_scalar": (
        "break",
        "break",
        "error",
        "A graph repeats the number that it saw. Put it into BatchDescriptor(extra=...), or keep "
        "it in a tensor on the device.",
    ),
    "host_argument": (
        "note",
        "note",
        "note",
        "Nothing, if it is the same at each call. Else pass a tensor, or put it into the batch "
        "descriptor: BatchDescriptor(num_tokens, extra=(...,)).",
    ),
    "changing_argument": (
        "break",
        "break",
        "error",
        "Pass a tensor, or put a bucket of it into the batch descriptor: "
        "BatchDescriptor(num_tokens, extra=(...,)).",
    ),
    "changing_attribute": (
        "error",
        "error",
        "error",
        "Make it a tensor in a buffer and write it in place (self.step.add_(1)), or pass it as an "
        "argument.",
    ),
    "replaced_attribute": (
        "break",
        "break",
        "error",
        "Write in place into a buffer that stays: self.register_buffer(...) once, then .copy_().",
    ),
    "growing_state": (
        "break",
        "break",
        "error",
        "Take a cache of fixed size, written in place (index_copy_ at a position in a tensor); in "
        "transformers: StaticCache, or cache_implementation='static'.",
    ),
    "lazy_attribute": (
        "note",
        "note",
        "note",
        "Nothing: call the model once before it is captured, as warm-ups do.",
    ),
    "moving_input": (
        "note",
        "note",
        "note",
        "Nothing without a forward context: it is copied. With one, write into the same buffer at "
        "each step, or choose on_input_change='copy'.",
    ),
    "rebound_input": (
        "break",
        "break",
        "error",
        "Pass the same buffer at each call and write new data into it.",
    ),
    "capture_failed": (
        "error",
        "error",
        "error",
        "Let that op run outside of graphs: add it to splitting_ops, or put its caller under "
        "cgcompile.eager_region() or cgcompile.eager_break_during_capture.",
    ),
    "forward_raised": (
        "error",
        "error",
        "error",
        "Let the model run plain first; what it needs (a forward context, say) goes around "
        "doctor().",
    ),
}

KINDS = tuple(_ADVICE)

_WAYS = tuple(Way)


def finding(
    kind: str,
    way: Way,
    op: str,
    message: str,
    source: Line | None = None,
    *,
    severity: str | None = None,
) -> Finding:
    """A finding with the severity and the fix of its kind.

    Args:
        kind: one of :data:`KINDS`.
        way: how the model is captured.
        op: what it is about.
        message: what was found.
        source: where.
        severity: another one than that of the kind.
    """
    *severities, fix = _ADVICE[kind]
    chosen = severity or severities[_WAYS.index(way)]
    return Finding(kind, chosen, message, fix.replace("{op}", repr(op)), op, source)
