"""The reasons for which a step, or a piece of one, runs without a CUDA graph, and their counters.

The rule: each fallback has a :class:`Reason`. ``SplitGraph.text()`` prints those of pieces,
``CompiledGraph.counters`` counts those of steps.
"""

import enum
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from cgcompile.errors import DOCUMENTATION

log = logging.getLogger(__name__)


class Reason(enum.Enum):
    """Why something runs without a graph. The value is the stable name, for logs and JSON.

    Attributes:
        when: what the cause is.
        remedy: what to change so that a graph serves it; "nothing" where that is right as it is.

    Example:
        >>> reason = cgcompile.Reason("gradients")
        >>> print(reason.remedy)
        call the model in `torch.inference_mode()` or `torch.no_grad()`
    """

    _value_: str
    when: str
    remedy: str

    def __new__(cls, value: str, when: str, remedy: str) -> "Reason":
        member = object.__new__(cls)
        member._value_, member.when, member.remedy = value, when, remedy
        return member

    def __repr__(self) -> str:
        return f"Reason.{self.name}"

    __hash__ = object.__hash__  # the hash of an enumeration is a Python call

    # Of a piece: decided when the graph is split. Of a whole step where all its pieces are eager.
    SPLITTING_OP = (
        "splitting_op",
        "the op is registered as a boundary, or tagged `cudagraph_unsafe`",
        "nothing; if the op can be captured, declare its `support`, so that FULL graphs hold it",
    )
    EAGER_REGION = (
        "eager_region",
        "the code is in `cgcompile.eager_region()`",
        "nothing; make the region smaller if it holds more than it must",
    )
    HOST_SYNC = (
        "host_sync",
        "the host has to read a value that the device computes: `.item()`, `nonzero`",
        "keep the value on the device: `torch.where`, `masked_fill` with a number, a fixed number "
        "of rows",
    )
    CPU_TENSOR = (
        "cpu_tensor",
        "an op computes on the CPU, or reads CPU memory on the device",
        "create the tensor with `device=x.device`, or once as a buffer of the module",
    )
    DEVICE_COPY = (
        "device_copy",
        "an op copies between host and device through pageable memory",
        "copy before the step, into a tensor that is made once",
    )
    OTHER_DEVICE = (
        "other_device",
        "an op runs on another device than the graph",
        "keep a model on one device, or compile the part of each device",
    )
    COLLECTIVE = (
        "collective",
        "a collective whose process group cannot be captured",
        "use a process group of NCCL that is initialised before the capture",
    )
    UNBACKED_SIZE = (
        "unbacked_size",
        "a size is only known once data was read",
        "give tensors a fixed size, and mask the rows that do not count",
    )
    STATE_REGION = (
        "state_region",
        "the op shares a vmap, grad or inference-mode region with one that cannot be captured",
        "move the other op out of the region",
    )
    NO_KERNEL = (
        "no_kernel",
        "the piece launches nothing, so there is nothing to capture",
        "nothing",
    )

    # Of a whole step: decided at each call.
    GRADIENTS = (
        "gradients",
        "an input requires grad in grad mode, or has a forward gradient",
        "call the model in `torch.inference_mode()` or `torch.no_grad()`",
    )
    WARMING = (
        "warming",
        "the first calls of a shape run without a graph, so that no kernel compiles later",
        "nothing; if it never ends, pad to a few sizes and write buffers in place",
    )
    NO_CONTEXT = (
        "no_forward_context",
        "a wrapper was called without a forward context",
        "call it in `cgcompile.set_forward_context(...)`; each thread needs its own",
    )
    MODE_NONE = (
        "mode_none",
        "the forward context, or the settings, request no graph",
        "pass `cudagraph_runtime_mode=`, or set `cudagraph_mode`",
    )
    OTHER_MODE = (
        "other_mode",
        "the context requests a mode that this wrapper or graph lacks",
        "nothing where modes alternate; otherwise request the mode of the wrapper",
    )
    INSIDE_CAPTURE = (
        "inside_capture",
        "the call is part of another capture",
        "nothing",
    )
    CAPTURE_BUSY = (
        "capture_busy",
        "another thread is capturing",
        "capture all sizes before serving, in one thread",
    )
    OTHER_THREAD = (
        "other_thread",
        "a replay would overwrite results of another thread, which called under forward contexts",
        "call without a forward context in all threads, or lock steps and the reading of their "
        "results, and declare it: `handle.allow_threads()`",
    )
    CAPTURE_FORBIDDEN = (
        "capture_forbidden",
        "an unknown shape arrives while no capture is allowed",
        "capture the shape before `close_capture()` or `allow_capture(False)`",
    )
    CAPTURE_FAILED = (
        "capture_failed",
        "the device refused to capture an op of this shape",
        "replace the op that the detail names, or register it as a splitting op; in an encoder, "
        "whose graphs are not split, compute it in `tables` or `offsets`",
    )
    NO_DEVICE = (
        "no_capture_device",
        "the tensors are on a device without graphs",
        "move the model to a GPU; for tests on a CPU set `capture_device='host'`",
    )
    ATTENTION_SUPPORT = (
        "attention_support",
        "FULL was requested; an op does not support it",
        "declare the `support` of the op, or request PIECEWISE",
    )
    UNSUPPORTED_INPUT = (
        "unsupported_input",
        "an input is a tensor subclass, a sparse tensor, or a number that no tensor holds",
        "pass plain dense tensors, and numbers in the range of int64 and of the dtype",
    )
    UNLISTED_SIZE = (
        "unlisted_size",
        "the size is not one of `cudagraph_capture_sizes`",
        "pad to a listed size, or list this one",
    )
    TOO_MANY_SHAPES = (
        "too_many_shapes",
        "`max_captured_shapes` are captured already",
        "pad to a few sizes, or raise `max_captured_shapes`",
    )
    TOO_MANY_WEIGHT_SETS = (
        "too_many_weight_sets",
        "there are more than `max_weight_sets` weight sets, or none lasts",
        "write weights and caches in place, or raise `max_weight_sets`",
    )
    INPUT_CHANGED = (
        "input_changed",
        "a guard refused a replay, and `on_input_change` is `eager`",
        "write into the same tensors at each step; `copy` does that for inputs of compiled models",
    )
    RECOMPILE_LIMIT = (
        "recompile_limit",
        "Dynamo stopped compiling a function, whose calls bypass the backend",
        "find what recompiles with `TORCH_LOGS=recompiles`",
    )
    NOT_COMPILED = (
        "not_compiled",
        "Dynamo failed to compile a function, whose calls bypass the backend",
        "change the line that the detail names; `explain` shows it before a call, and "
        "`TORCH_LOGS=graph_breaks` all such lines",
    )
    VARYING_NUMBER = (
        "varying_number",
        "a number that is baked into graphs differs at each call",
        "pass the number as a tensor",
    )
    GROWING_STATE = (
        "growing_state",
        "a result comes back as an input, larger: a new shape at each step",
        "use a cache of fixed size that is written in place",
    )

    PADDING_REFUSED = (
        "padding_refused",
        "`pad_lengths` is set, and the step cannot be padded: it has no mask, or reads padding",
        "pass a mask `[rows, length]` by its name, such as `attention_mask=`, and let the model "
        "exclude what it masks, in pooling too; or leave `pad_lengths` out",
    )

    PADDING_ROWS = (
        "padding_rows",
        "`num_unpadded_tokens` is less than the rows of the batch, and which dimension of the "
        "results of eager pieces has rows is not known: they are not zeroed",
        "make the rows a dynamic dimension (`mark_dynamic`, `dynamic_dims`), name it with "
        "`capture_dim`, or let the op zero the rows that it skips",
    )

    # Of a batch: decided by the dispatcher, before the step runs.
    EMPTY_BATCH = (
        "empty_batch",
        "the batch has no tokens",
        "nothing",
    )
    OVERSIZE = (
        "oversize",
        "the batch has more tokens or requests than any graph of its kind, or is longer than the "
        "last of `pad_lengths`",
        "add a larger size, of an encoder a larger token budget, or split the batch",
    )
    MIXED_BATCH = (
        "mixed_batch",
        "only uniform decode has graphs, and this batch is another",
        "use `FULL_AND_PIECEWISE`",
    )
    QUERY_LENGTH = (
        "query_length",
        "uniform decode of a length that has no graphs",
        "list the length among the query lengths of the dispatcher",
    )
    UNLISTED_VARIANT = (
        "unlisted_variant",
        "a LoRA count or a value of an axis has no graphs",
        "list the value in `LoraCases` or `Axis`",
    )
    MODE_EXCLUDED = (
        "mode_excluded",
        "the caller forbids the mode for this batch",
        "nothing",
    )
    NOT_CAPTURED = (
        "not_captured",
        "a planned graph was not captured yet, or was refused",
        "call `capture()` before serving, and read its report",
    )
    OTHER_RANK = (
        "other_rank",
        "ranks agree on one mode, and another rank has a lesser one",
        "read the reason that the other rank counts",
    )
    TOO_MANY_FRAMES = (
        "too_many_frames",
        "there are more sequences of attention than a graph has room for",
        "raise the limit of frames",
    )
    CHEAPER_EAGER = (
        "cheaper_eager",
        "a graph would be padded so far that it is slower",
        "nothing; a budget between two others makes it a replay",
    )
    NOT_PIECEWISE = (
        "not_piecewise",
        "the model has no pieces: it is neither compiled nor breakable",
        "compile it, or wrap it in `BreakableCUDAGraphWrapper`",
    )

    # Of a call of ``generate`` of transformers.
    OWN_LOOP = (
        "own_loop",
        "`generate` needs something that no graph holds: beams, a processor that is not known, a "
        "cache of the caller",
        "leave out what the detail names, or `custom_generate`",
    )

    @property
    def page(self) -> str:
        """Where the documentation explains this reason."""
        return f"{DOCUMENTATION}/reference/reasons#reason-{self.value}"


class Fallback(NamedTuple):
    """A fallback: a reason, and a detail that a user can act on."""

    reason: Reason
    detail: str

    def __str__(self) -> str:
        return f"{self.reason.value}: {self.detail}"


class RunPlain(Exception):
    """A call has to run without a graph.

    Attributes:
        why: the reason, which is counted.
        ran: the result, of a step that ran while it was captured; else empty.
    """

    def __init__(self, why: Fallback, *ran: Any) -> None:
        self.why, self.ran = why, ran


LAST_CALL = "; last call: "
"""Between a detail of :class:`Counters` and the call that it is of."""

VARYING = 8  # calls with a new number each, before calls with new numbers are a fallback


def refuse_varying(name: str, values: Sequence[Any], needs: str, advice: str = "") -> NoReturn:
    """Raise RunPlain for a number that differs at each call; each value ``needs`` its own."""
    last = ", ".join(map(str, values[-3:]))
    detail = (
        f"the number {name!r} differs at each call (now {last}), and each value would need "
        f"{needs} of its own. Pass it as a tensor{advice}"
    )
    raise RunPlain(Fallback(Reason.VARYING_NUMBER, detail))


# Reasons of calls that prepare graphs: warm-ups, and calls that another capture holds.
_PREPARING = frozenset({Reason.WARMING, Reason.INSIDE_CAPTURE})

# Reasons without an avoidable loss of speed: requested, temporary, or without a gain.
EXPECTED = frozenset(
    {
        Reason.WARMING,
        Reason.NO_CONTEXT,
        Reason.MODE_NONE,
        Reason.OTHER_MODE,
        Reason.INSIDE_CAPTURE,
        Reason.NO_KERNEL,
        Reason.EMPTY_BATCH,
        Reason.MODE_EXCLUDED,
        Reason.SPLITTING_OP,
        Reason.EAGER_REGION,
        Reason.CHEAPER_EAGER,
    }
)


def warn_of(what: str, why: Fallback, how: str = "without a CUDA graph", remedy: str = "") -> None:
    """Log a warning of something that runs without a graph, or in a lesser mode."""
    name = why.reason.value
    log.warning(
        "%s runs %s: %s. Remedy: %s. (Logged once for a reason; "
        "on_fallback='count' turns it off; `python -m cgcompile reasons %s` explains it.)",
        what,
        how,
        str(why).removesuffix("."),
        remedy or why.reason.remedy,
        name,
    )


@dataclass
class Counters:
    """What the calls of one compiled graph, or of one wrapper, did.

    ``calls == captures + replays + failures + plain.total()``, always.

    Attributes:
        calls: how often it was called.
        captures: calls that recorded graphs, each of them one execution as well.
        replays: calls that replayed graphs.
        failures: calls that raised.
        plain: calls that ran without graphs, by the reason they had. As text those that prepare
            graphs, ``warming`` and ``inside_capture``, are counted apart.
        degraded: how often a lesser mode was taken than requested: at each call of a batch that
            a FULL graph may not serve, and once where the capture of a FULL graph was refused; and
            how often padding rows were not zeroed (``padding_rows``).
        details: the last detail of each reason, and the call that it is of: its batch descriptor,
            or the shapes of its inputs without a forward context.

    Example:
        >>> model = cgcompile.compile(nn.Linear(8, 8))
        >>> with torch.inference_mode():
        ...     for _ in range(4):
        ...         y = model(torch.randn(4, 8))
        >>> counters = model.backend.counters
        >>> counters.calls, counters.captures, counters.replays, counters.plain.total()
        (4, 1, 2, 1)
    """

    calls: int = 0
    captures: int = 0
    replays: int = 0
    failures: int = 0
    plain: Counter[Reason] = field(default_factory=Counter)
    degraded: Counter[Reason] = field(default_factory=Counter)
    details: dict[Reason, str] = field(default_factory=dict)

    def __add__(self, other: "Counters") -> "Counters":
        return Counters(
            calls=self.calls + other.calls,
            captures=self.captures + other.captures,
            replays=self.replays + other.replays,
            failures=self.failures + other.failures,
            # Copies, as another thread may add a reason while the sum iterates.
            plain=self.plain.copy() + other.plain.copy(),
            degraded=self.degraded.copy() + other.degraded.copy(),
            details={**self.details, **other.details},
        )

    def why_plain(self, before: "Counters") -> list[str]:
        """Return each reason, with its detail, of calls without graphs since ``before``."""
        return self._texts(self.plain.copy() - before.plain)

    def why_degraded(self, before: "Counters") -> list[str]:
        """Return each reason, with its detail, of a lesser mode since ``before``."""
        return self._texts(self.degraded.copy() - before.degraded)

    def _texts(self, reasons: Iterable[Reason]) -> list[str]:
        return [f"{reason.value}: {self.details.get(reason, '-')}" for reason in reasons]

    def __str__(self) -> str:
        # Plain calls that prepare graphs are no loss, and are shown apart.
        plain = self.plain.copy()
        preparing = Counter({reason: plain.pop(reason) for reason in _PREPARING & plain.keys()})
        apart = f"preparing {preparing.total()}, " if preparing else ""
        rows = [
            f"calls {self.calls}: captures {self.captures}, replays {self.replays}, {apart}"
            f"plain {plain.total()}, failures {self.failures}"
        ]
        listed = ("preparing", preparing), ("plain", plain), ("degraded", self.degraded)
        for title, counts in listed:
            for reason, number in sorted(counts.items(), key=lambda item: item[0].value):
                rows.append(f"  {title} {number} {reason.value}: {self.details.get(reason, '-')}")
        return "\n".join(rows)
