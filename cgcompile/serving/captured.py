"""What a manager has captured: the FULL graph of each size, what is warm, which weights it read."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

from cgcompile.descriptors import BatchDescriptor
from cgcompile.errors import CaptureError, ManagerError
from cgcompile.graphs.bulk import BulkCapture
from cgcompile.graphs.capture import postponed_capture
from cgcompile.graphs.guards import WeightsGuard
from cgcompile.modes import CUDAGraphMode
from cgcompile.reasons import Counters, Reason, Why
from cgcompile.serving.batches import check_numbers
from cgcompile.serving.capturing import Planned
from cgcompile.serving.dispatcher import CudagraphDispatcher
from cgcompile.serving.stepping import StepRunner
from cgcompile.serving.steps import Batch

FULL = CUDAGraphMode.FULL
_FLAGS = (bool, type(None))
_WARMING = Why(Reason.WARMING, "the first step of a graph; the next one captures it")


class CapturedGraphs:
    """The bookkeeping of one manager. The dispatcher stays the judge of what may run.

    Args:
        dispatcher: told of each capture.
        model: whose weights FULL graphs read; None: not looked at.
        tensor_type: the device type of its tensors.

    Attributes:
        bulk: how each set of captures went, by its title.
        warmed: what has run plain once, and is captured the next time.
    """

    def __init__(
        self,
        dispatcher: CudagraphDispatcher,
        model: Callable[..., Any] | None,
        tensor_type: str,
    ) -> None:
        self._dispatcher = dispatcher
        self._model = model
        self._tensor_type = tensor_type
        self._weights: WeightsGuard | None = None
        self._full: dict[int, list[BatchDescriptor]] = {}
        self.bulk: dict[str, BulkCapture] = {}
        self.warmed: set[Planned] = set()

    def add(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> None:
        """A planned graph exists now.

        Raises:
            GuardError: a FULL graph, and a weight is not as it was at the first one.
        """
        if mode is FULL:
            self.check_weights(descriptor)
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
            unwrapped = getattr(model, "unwrap", lambda: model)()
            self._weights = WeightsGuard(unwrapped, self._tensor_type)

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
                raise ManagerError.twice(mode=mode.name, batch=str(descriptor))

    def check_weights(self, descriptor: BatchDescriptor) -> None:
        """Raise if a weight is not as it was at the first FULL capture.

        Raises:
            AddressChangedError: one was replaced or moved.
            HostValueChangedError: a 0-dim CPU tensor has another value.
        """
        if self._weights is not None:  # pieces look at their own
            self._weights.check("the captured step", descriptor)

    def step(
        self,
        steps: StepRunner,
        batch: Batch,
        mode: CUDAGraphMode,
        descriptor: BatchDescriptor,
        *,
        agreed: bool,
        strict: bool,
    ) -> tuple[Any, Why | None]:
        """Run a step on its graph; or capture that, after one warming step.

        Args:
            steps: runs it.
            batch: real rows.
            mode: PIECEWISE or FULL.
            descriptor: of the graph.
            agreed: ranks have agreed on it.
            strict: raise what a capture raises. Else what cannot be captured as a whole runs plain
                from now on; ranks that have to agree cannot do so one by one.

        Returns:
            (what the step returned, why it ran without a graph or None).
        """
        if self._dispatcher.is_captured(mode, descriptor):
            if mode is FULL and not agreed:  # else they were, before ranks agreed
                self.check_weights(descriptor)
            return steps.step(batch, mode, descriptor), steps.ran_plain
        if (mode, descriptor) not in self.warmed:
            self.warmed.add((mode, descriptor))
            with postponed_capture():
                return steps.step(batch, mode, descriptor), _WARMING
        before = steps.counters + Counters()  # a wrapper goes on counting in its own
        try:
            result = steps.step(batch, mode, descriptor)
        except CaptureError as error:
            if mode is not FULL or strict or agreed:
                raise
            # Of a whole step nothing has run yet.
            self._dispatcher.refused(mode, descriptor, str(error).splitlines()[0])
            why = Why(Reason.CAPTURE_FAILED, str(error).splitlines()[0])
            plain = BatchDescriptor(batch.num_tokens)
            return steps.step(batch, CUDAGraphMode.NONE, plain), why
        after = steps.counters
        if after.captures > before.captures:
            self.add(mode, descriptor)
        reasons = after.plain - before.plain
        return result, next((Why(each, after.details[each]) for each in reasons), None)

    def full(
        self, num_tokens: int, uniform: bool | None, loras: int, extra: tuple[Any, ...]
    ) -> BatchDescriptor:
        """The FULL graph of a padded size and variant; of several the one for uniform decode.

        Raises:
            ManagerError: there is none.
        """
        if not (type(num_tokens) is type(loras) is int and type(uniform) in _FLAGS):
            check_numbers(num_tokens, None, None, loras, uniform is not None and uniform)
        for each in self._full.get(num_tokens, ()):
            same = (each.num_active_loras, each.extra) == (loras, extra)
            same &= uniform in (None, each.uniform)
            if same and self._dispatcher.is_captured(FULL, each):
                return each
        usable = [
            size
            for size, same_size in self._full.items()
            if any(self._dispatcher.is_captured(FULL, each) for each in same_size)
        ]
        raise ManagerError.no_graph(num_tokens=num_tokens, captured=sorted(usable))

    def forget(self) -> None:
        """No graph exists any more."""
        self._weights = None
        self._full.clear()
        self.warmed.clear()
        self.bulk.clear()
        self._dispatcher.forget()
