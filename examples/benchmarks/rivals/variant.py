"""A way to run a decode step, as the bench sees it: :class:`Variant`.

``torchs.py`` has those of torch and of Meta's package, ``ours.py`` those of cgcompile. A variant
that cannot run here raises when it is prepared; the bench reports that and goes on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rivals.decoder import Decoder, Dims, Steps, make_decoder, own_copy
from rivals.timing import Call


class LeftOut(Exception):
    """A variant cannot run on this machine, or with these settings; the message has the reason."""


@dataclass
class Setup:
    """What all variants of a process share.

    Attributes:
        dims: of the decoder.
        device: ``cuda`` or ``cpu``.
        dtype: of weights.
        compiler: of pieces; ``eager`` also takes Inductor's place in ``torch.compile``.
        sizes: the batches that are captured, ascending.
        batches: those of them that are measured; compiled for the first.
    """

    dims: Dims
    device: str
    dtype: torch.dtype
    compiler: str
    sizes: tuple[int, ...]
    batches: tuple[int, ...]
    model: Decoder = field(init=False)
    steps: Steps = field(init=False)

    def __post_init__(self) -> None:
        rows = max(self.sizes)
        self.model = make_decoder(self.dims, rows, self.device, self.dtype)
        self.steps = Steps(self.dims, rows, self.device)

    def copy_of_model(self, name: str) -> Decoder:
        return own_copy(self.model, "".join(each if each.isalnum() else "_" for each in name))

    def need_cuda(self, what: str) -> None:
        if self.device != "cuda":
            raise LeftOut(f"{what} needs a CUDA device")


@dataclass(frozen=True)
class Captured:
    """What :meth:`Variant.capture` did.

    Attributes:
        sizes: how many batches have graphs.
        seconds: that the captures took, the plain passes before not counted.
        graphs: how many graphs there are for each batch.
        missing: batches without graphs, and why.
    """

    sizes: int
    seconds: float
    graphs: int
    missing: tuple[str, ...] = ()


class Variant:
    """One way to run a step.

    Attributes:
        name: in tables.
        floor_name: what its floor is: a replay, or a bare loop with which kind of call.
        attention_calls: how often a step calls the op through the dispatcher; 0 where it is in a
            graph or is called directly. What is really called is compared with this.
        batches: the batches it runs; None for all.
        can_wait: whether it is compiled last, and left out where little time is left.
    """

    floor_name = ""
    attention_calls = 0
    batches: Sequence[int] | None = None
    is_eager = False  # what others are compared with
    takes_no_op = True  # whether attention can be switched off
    can_wait = False

    def __init__(self, setup: Setup, name: str) -> None:
        self.setup = setup
        self.name = name

    def prepare(self) -> None:
        """Compile: run the batches plain, those first that are measured.

        Raises:
            LeftOut: it cannot run here.
        """

    def capture(self, limit: float) -> Captured | None:
        """Capture all batches, in at most about ``limit`` seconds; None: nothing to capture."""
        return None

    def step(self, batch: int) -> Call:
        """A function that runs one step of this batch and returns its logits."""
        raise NotImplementedError

    def floor(self, batch: int) -> Call | None:
        """The bare loop over the same graphs and op; None where there is none."""
        return None

    def replays(self) -> int | None:
        """How many steps were replays so far; None if they are not counted."""
        return None

    def why_not_replayed(self) -> str | None:
        """What speaks against replays, beside counters."""
        return None

    def runs(self, batch: int) -> bool:
        return self.batches is None or batch in self.batches

    def plain_passes(self, call: Callable[[int], Any], sizes: Sequence[int]) -> None:
        """Run sizes plain, the first measured one first: it decides what is compiled."""
        first = self.setup.batches[0]
        for size in (first, *[each for each in sizes if each != first]):
            call(size)
