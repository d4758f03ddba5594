"""Every way in which a step, or a part of one, may run without a CUDA graph, as named values.

Without this file a fallback is silent. The rule: code that leaves a graph says why with a
:class:`Reason`; nothing runs eager "just because". ``SplitGraph.text()`` prints the reasons of the
pieces, ``CompiledGraph.counters`` counts those of whole steps.
"""

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple


class Reason(enum.Enum):
    """Why something runs without a graph. The value is the stable name, for logs and JSON."""

    # Of a piece: decided when the graph is split.
    SPLITTING_OP = "splitting_op"  # registered as a boundary, or tagged cudagraph_unsafe
    EAGER_REGION = "eager_region"  # inside ``with cgcompile.eager_region():``
    HOST_SYNC = "host_sync"  # the host has to read a value that the device computes
    CPU_TENSOR = "cpu_tensor"  # computes on the CPU, or reads CPU memory on the device
    DEVICE_COPY = "device_copy"  # copies between host and device through pageable memory
    OTHER_DEVICE = "other_device"  # runs on another device than the graph
    COLLECTIVE = "collective"  # a collective whose process group cannot be captured
    UNBACKED_SIZE = "unbacked_size"  # a size that is only known once data was read
    STATE_REGION = "state_region"  # in one vmap, grad or inference-mode region with one of these
    NO_KERNEL = "no_kernel"  # launches nothing: there is nothing to capture

    # Of a whole step: decided at each call.
    GRADIENTS = "gradients"  # grad mode is on and an input requires grad


class Why(NamedTuple):
    """A reason and what it was about, in words that a user can act on."""

    reason: Reason
    detail: str

    def __str__(self) -> str:
        return f"{self.reason.value}: {self.detail}"


@dataclass
class Counters:
    """What the calls of one compiled graph did. ``plain`` counts steps by the reason they had."""

    calls: int = 0
    plain: Counter[Reason] = field(default_factory=Counter)
