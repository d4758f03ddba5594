"""The reasons for which a step, or a piece of one, runs without a CUDA graph, and their counters.

The rule: each fallback has a :class:`Reason`. ``SplitGraph.text()`` prints those of pieces,
``CompiledGraph.counters`` counts those of steps.
"""

import enum
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cgcompile.locks import new_lock

log = logging.getLogger(__name__)


class Reason(enum.Enum):
    """Why something runs without a graph. The value is the stable name, for logs and JSON."""

    # Of a piece: decided when the graph is split. Of a whole step where all its pieces are eager.
    SPLITTING_OP = "splitting_op"  # registered as a boundary, or tagged cudagraph_unsafe
    EAGER_REGION = "eager_region"  # in cgcompile.eager_region(); of a whole step as well
    HOST_SYNC = "host_sync"  # the host has to read a value that the device computes
    CPU_TENSOR = "cpu_tensor"  # computes on the CPU, or reads CPU memory on the device
    DEVICE_COPY = "device_copy"  # copies between host and device through pageable memory
    OTHER_DEVICE = "other_device"  # runs on another device than the graph
    COLLECTIVE = "collective"  # a collective whose process group cannot be captured
    UNBACKED_SIZE = "unbacked_size"  # a size that is only known once data was read
    STATE_REGION = "state_region"  # in one vmap, grad or inference-mode region with one of these
    NO_KERNEL = "no_kernel"  # launches nothing: there is nothing to capture

    # Of a whole step: decided at each call.
    GRADIENTS = "gradients"  # an input requires grad in grad mode, or has a forward gradient
    WARMING = "warming"  # the first calls of a shape run plain, so that no kernel compiles later
    NO_CONTEXT = "no_forward_context"  # a wrapper was called without a forward context
    MODE_NONE = "mode_none"  # the forward context, or the settings, request no graph
    OTHER_MODE = "other_mode"  # the context requests a mode that this wrapper or graph lacks
    INSIDE_CAPTURE = "inside_capture"  # the call is part of another capture
    CAPTURE_BUSY = "capture_busy"  # another thread is capturing
    CAPTURE_FORBIDDEN = "capture_forbidden"  # an unknown shape while no capture is allowed
    CAPTURE_FAILED = "capture_failed"  # the device refused to capture an op of this shape
    NO_DEVICE = "no_capture_device"  # tensors on a device without graphs
    ATTENTION_SUPPORT = "attention_support"  # FULL was requested; an op does not support it
    UNSUPPORTED_INPUT = "unsupported_input"  # a tensor subclass or a sparse tensor
    UNLISTED_SIZE = "unlisted_size"  # not one of cudagraph_capture_sizes
    TOO_MANY_SHAPES = "too_many_shapes"  # max_captured_shapes are captured already
    TOO_MANY_BINDINGS = "too_many_bindings"  # more than max_bindings weight sets, or none lasts
    INPUT_CHANGED = "input_changed"  # a guard refused a replay, and on_input_change is "eager"
    RECOMPILE_LIMIT = "recompile_limit"  # Dynamo stopped compiling a function; its calls bypass us
    VARYING_NUMBER = "varying_number"  # a number that is baked into graphs differs at each call
    GROWING_STATE = "growing_state"  # a result comes back as an input, larger: a new shape a step

    # Of a batch: decided by the dispatcher, before the step runs.
    EMPTY_BATCH = "empty_batch"  # no tokens: there is nothing to run
    OVERSIZE = "oversize"  # more tokens or requests than any graph of the kind takes
    MIXED_BATCH = "mixed_batch"  # only uniform decode has graphs; this batch is another
    QUERY_LENGTH = "query_length"  # uniform decode of a length that has no graphs
    UNLISTED_VARIANT = "unlisted_variant"  # a LoRA count or a value of an axis without graphs
    MODE_EXCLUDED = "mode_excluded"  # the caller forbids the mode for this batch
    NOT_CAPTURED = "not_captured"  # a planned graph that was not captured yet, or was refused
    OTHER_RANK = "other_rank"  # ranks agree on one mode, and another rank has a lesser one
    TOO_MANY_FRAMES = "too_many_frames"  # more sequences of attention than a graph has room for
    CHEAPER_EAGER = "cheaper_eager"  # a graph serves it, padded so far that it is the slower way
    NOT_PIECEWISE = "not_piecewise"  # the model has no pieces: neither compiled nor breakable


class Fallback(NamedTuple):
    """A fallback: a reason, and a detail that a user can act on."""

    reason: Reason
    detail: str

    def __str__(self) -> str:
        return f"{self.reason.value}: {self.detail}"


VARYING = 8  # calls with a new number each, before calls with new numbers are a fallback


def varying_number(name: str, values: Sequence[Any], needs: str, advice: str = "") -> Fallback:
    """Return the fallback of a number that differs at each call; each value ``needs`` its own."""
    last = ", ".join(map(str, values[-3:]))
    detail = (
        f"the number {name!r} differs at each call (now {last}), and each value would need "
        f"{needs} of its own. Pass it as a tensor{advice}"
    )
    return Fallback(Reason.VARYING_NUMBER, detail)


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


@dataclass
class Counters:
    """What the calls of one compiled graph, or of one wrapper, did.

    ``calls == captures + replays + failures + plain.total()``, always.

    Attributes:
        calls: how often it was called.
        captures: calls that recorded graphs, each of them one execution as well.
        replays: calls that replayed graphs.
        failures: calls that raised.
        plain: calls that ran without graphs, by the reason they had.
        degraded: how often a lesser mode was taken than requested: at each call of a batch that
            a FULL graph may not serve, and once where the capture of a FULL graph was refused.
        details: the last detail of each reason.
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
            plain=self.plain + other.plain,
            degraded=self.degraded + other.degraded,
            details={**self.details, **other.details},
        )

    def why_plain(self, before: "Counters") -> list[str]:
        """Return each reason, with its detail, of calls without graphs since ``before``."""
        return [f"{r.value}: {self.details.get(r, '-')}" for r in self.plain - before.plain]

    def __str__(self) -> str:
        rows = [
            f"calls {self.calls}: captures {self.captures}, replays {self.replays}, "
            f"plain {sum(self.plain.values())}, failures {self.failures}"
        ]
        for title, counts in (("plain", self.plain), ("degraded", self.degraded)):
            for reason, number in sorted(counts.items(), key=lambda item: item[0].value):
                rows.append(f"  {title} {number} {reason.value}: {self.details.get(reason, '-')}")
        return "\n".join(rows)


class Ledger:
    """Counters that several threads write; callbacks run without its lock."""

    def __init__(
        self, on_plain: Callable[[Fallback], None], on_degraded: Callable[[Fallback], None]
    ) -> None:
        self._on_plain, self._on_degraded = on_plain, on_degraded
        self._lock = new_lock()
        self._counters = Counters()

    @property
    def counters(self) -> Counters:
        """A copy of the counters."""
        with self._lock:
            return self._counters + Counters()

    def captured(self) -> None:
        """Count a call that captured."""
        with self._lock:
            self._counters.calls += 1
            self._counters.captures += 1

    def replayed(self) -> None:
        """Count a call that replayed."""
        with self._lock:
            self._counters.calls += 1
            self._counters.replays += 1

    def failed(self) -> None:
        """Count a call that raised."""
        with self._lock:
            self._counters.calls += 1
            self._counters.failures += 1

    def plain(self, fallback: Fallback) -> None:
        """Count a call that ran without graphs, and log it if the detail is new."""
        with self._lock:
            self._counters.calls += 1
            self._counters.plain[fallback.reason] += 1
            new = self._counters.details.get(fallback.reason) != fallback.detail
            self._counters.details[fallback.reason] = fallback.detail
        if new:
            log.info("a step runs without graphs: %s", fallback)
        self._on_plain(fallback)

    def degraded(self, fallback: Fallback) -> None:
        """Count a call that takes a lesser mode than was requested."""
        with self._lock:
            self._counters.degraded[fallback.reason] += 1
            self._counters.details[fallback.reason] = fallback.detail
        self._on_degraded(fallback)
