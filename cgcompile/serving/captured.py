"""What a manager has captured: the FULL graph of each size, what is warm, which weights it read."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

from cgcompile.descriptors import BatchDescriptor
from cgcompile.errors import ManagerError
from cgcompile.graphs.bulk import BulkCapture
from cgcompile.graphs.guards import WeightsGuard
from cgcompile.modes import CUDAGraphMode
from cgcompile.serving.capturing import Planned
from cgcompile.serving.dispatcher import CudagraphDispatcher

FULL = CUDAGraphMode.FULL


class CapturedGraphs:
    """The bookkeeping of one manager. The dispatcher stays the judge of what may run.

    Args:
        dispatcher: told of each capture.
        model: whose weights FULL graphs read; None: not looked at.

    Attributes:
        bulk: how each set of captures went, by its title.
        warmed: what has run plain once, and is captured the next time.
    """

    def __init__(self, dispatcher: CudagraphDispatcher, model: Callable[..., Any] | None) -> None:
        self._dispatcher = dispatcher
        self._model = model
        self._weights: WeightsGuard | None = None
        self._full: dict[int, list[BatchDescriptor]] = {}
        self.bulk: dict[str, BulkCapture] = {}
        self.warmed: set[Planned] = set()

    def add(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> None:
        """A planned graph exists now."""
        self._dispatcher.captured(mode, descriptor)
        self.warmed.discard((mode, descriptor))
        if mode is not FULL:
            return
        same_size = self._full.setdefault(descriptor.num_tokens, [])
        if descriptor not in same_size:
            same_size.append(descriptor)
            same_size.sort(key=lambda each: not each.uniform)
        if self._weights is None:
            model = self._model
            self._weights = WeightsGuard(getattr(model, "unwrap", lambda: model)())

    def due(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> str:
        """``"warmup"`` or ``"capture"``: what a step of this graph would be; "" for neither."""
        if mode is CUDAGraphMode.NONE or self._dispatcher.is_captured(mode, descriptor):
            return ""
        return "capture" if (mode, descriptor) in self.warmed else "warmup"

    def leave_out(self, chosen: Collection[Planned], why: str) -> None:
        """Planned graphs that were not chosen will not exist."""
        for mode, descriptor in self._dispatcher.plan():
            if (mode, descriptor) not in chosen:
                self._dispatcher.refused(mode, descriptor, why)

    def refuse_twice(self, planned: Iterable[Planned]) -> None:
        """Raise if any of these exists already.

        Raises:
            ManagerError: it does.
        """
        for mode, descriptor in planned:
            if self._dispatcher.is_captured(mode, descriptor):
                raise ManagerError.twice(mode.name, str(descriptor))

    def check_weights(self, descriptor: BatchDescriptor) -> None:
        """Raise if a weight moved since the first FULL capture.

        Raises:
            AddressChangedError: one did.
        """
        if self._weights is not None:  # pieces look at their own
            self._weights.check("the captured step", descriptor)

    def full(self, num_tokens: int, uniform: bool | None) -> BatchDescriptor:
        """The FULL graph of a padded size; of several the one for uniform decode.

        Raises:
            ManagerError: there is none.
        """
        for each in self._full.get(num_tokens, ()):
            if uniform in (None, each.uniform) and self._dispatcher.is_captured(FULL, each):
                return each
        usable = [
            size
            for size, same_size in self._full.items()
            if any(self._dispatcher.is_captured(FULL, each) for each in same_size)
        ]
        raise ManagerError.no_graph(num_tokens, sorted(usable))

    def forget(self) -> None:
        """No graph exists any more."""
        self._weights = None
        self._full.clear()
        self.warmed.clear()
        self.bulk.clear()
        self._dispatcher.forget()
