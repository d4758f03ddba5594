"""Capture many batches at once: :func:`capture_all`, and :func:`capture_set` for engines.

Each batch runs plain first, so that nothing compiles inside of a capture; then all are captured,
the largest first, so that the smaller ones fit into its memory; garbage is collected once.
"""

import logging
import re
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.context import callers_context
from cgcompile.descriptor import BatchDescriptor
from cgcompile.errors import AddressChangedError, DispatchError, ManagerError
from cgcompile.graphs.capture import (
    bulk_capture,
    bulk_descriptors,
    capture_postponed,
    postponed_capture,
)
from cgcompile.graphs.sequence import GraphSequence, observing
from cgcompile.progress import progress
from cgcompile.reasons import EXPECTED, LAST_CALL, Counters, Reason
from cgcompile.settings import checked_but, is_finite, is_whole, require, require_callable

log = logging.getLogger(__name__)

B_ = TypeVar("B_")

_LAST_CALL = re.compile(f"{LAST_CALL}[^;]*")

_MAX_PASSES = 8  # plain; a model that still compiles then is taken to do so at every step


@dataclass(frozen=True)
class BulkCapture:
    """How a bulk capture went.

    Attributes:
        captured: the batches all of whose steps have graphs now, in the order of capture.
        missing: the others, with the reason as text. A batch whose step captures or replays the
            graph of another batch is one of them.
        passes: how often all batches ran plain before.
        warm_seconds: host time of that, and of collecting garbage once.
        capture_seconds: host time of the captures, each of which is one execution as well.
        degraded: those of ``captured`` that have graphs of a lesser mode than requested, such as
            PIECEWISE for FULL, with the reason as text.

    Example:
        >>> model = cgcompile.compile(nn.Linear(8, 8), dynamic_dims={"input": 0})
        >>> x = torch.randn(8, 8)
        >>> with torch.inference_mode():
        ...     report = model.backend.capture(lambda size: model(x[:size]), [2, 4, 8])
        >>> report.captured, report.missing
        ((8, 4, 2), ())
    """

    captured: tuple[Any, ...]
    missing: tuple[tuple[Any, str], ...]
    passes: int
    warm_seconds: float
    capture_seconds: float
    degraded: tuple[tuple[Any, str], ...] = ()

    def __str__(self) -> str:
        count, seconds = len(self.captured), self.capture_seconds
        batches = "batch" if count == 1 else "batches"
        warm = f"after a warm-up of {self.warm_seconds:.2f} s"
        rows = [f"{count} {batches} captured in {seconds:.2f} s, {warm}"]
        if not (self.captured or self.missing):
            rows = ["0 batches to capture: all have graphs"]
        rows += [f"  {batch}: {reason}" for batch, reason in self.missing]
        rows += [f"  {batch}: captured in a lesser mode: {why}" for batch, why in self.degraded]
        return "\n".join(rows)

    def __repr__(self) -> str:
        captured, missing = len(self.captured), len(self.missing)
        degraded = f", {len(self.degraded)} degraded" if self.degraded else ""
        return f"<BulkCapture: {captured} captured, {missing} missing{degraded}>"


@checked_but("batches")
def capture_all(
    step: Callable[[B_], Any],
    batches: Iterable[B_],
    target: Any,
    *,
    size: Callable[[B_], int] | None = None,
    settled: Callable[[], Any] = tuple,
    warmups: int = 1,
    strict: bool = False,
    title: str = "CUDA graphs",
) -> BulkCapture:
    """Warm and capture all batches.

    Args:
        step: runs one step of a batch, on inputs prepared afresh, and calls the model once. It is
            called for each batch several times.
        batches: numbers of tokens, batch descriptors, or whatever ``step`` takes.
        target: a backend, compiled model or wrapper, which counts the captures.
        size: returns the size of a batch; left out: the number itself, or its ``num_tokens``, which
            must be in the descriptor of the forward context that ``step`` sets, if it sets one.
        settled: returns a value that stays equal once nothing compiles any more.
        warmups: how often each batch runs without a graph at least.
        strict: raise where a batch has no graph in the end.
        title: of the progress bar.

    Raises:
        ConfigError: an argument is of another kind, or a batch has no tokens; nothing ran.
        DispatchError: ``strict``, and a batch has no graph.
        BaseException: what ``step`` raised.

    >>> model = cgcompile.compile(lambda x: x * 2, dynamic_dims={"x": 0})
    >>> x = torch.ones(8)
    >>> with torch.inference_mode():
    ...     found = cgcompile.capture_all(lambda n: model(x[:n]), [2, 4], model.backend)
    >>> found.captured
    (4, 2)
    """
    start = time.perf_counter()
    _check(step, batches, target, size)
    ordered = sorted(batches, key=lambda batch: _size_of(batch, size), reverse=True)
    graphs = _Graphs(step, compares=size is None)
    passes = warm_all(graphs.warm, ordered, settled, warmups, title)
    captured, missing, degraded = list[Any](), list[tuple[Any, str]](), list[tuple[Any, str]]()
    with bulk_capture():
        warm = time.perf_counter()
        for batch in progress(ordered, f"{title}: capture"):
            before = target.counters
            graphs.run(batch)
            after = target.counters
            reason = graphs.why_missing(batch, before, after)
            if not reason:
                captured.append(batch)
                degraded += [(batch, why) for why in after.why_degraded(before)]
                continue
            if strict:
                raise DispatchError.strict(what=f"batch {batch}", why=f"bulk capture: {reason}")
            missing.append((batch, reason))
    seconds = warm - start, time.perf_counter() - warm
    capture = BulkCapture(tuple(captured), tuple(missing), passes, *seconds, tuple(degraded))
    log.info("%s", capture)
    return capture


class _Graphs:
    """Which graphs the steps of batches replay and capture."""

    def __init__(self, step: Callable[[Any], Any], compares: bool) -> None:
        self._step, self._compares = step, compares  # batches with descriptors
        self._known: dict[int, set[GraphSequence]] = {}  # replayed by the warm-up, by id of a batch
        self._owners: dict[frozenset[GraphSequence], Any] = {}  # the batch that replays these alone
        self._captured: set[str] = set()  # the texts of batches that captured their own
        self._replayed: set[GraphSequence] = set()  # by the last step
        self._descriptors: list[BatchDescriptor] = []  # of its graphs, where it set a context

    def run(self, batch: Any) -> None:
        """Run the step of a batch, which may capture."""
        captured = bulk_descriptors()
        captured.clear()
        self._replayed.clear()
        replayed: list[BatchDescriptor] = []

        def observer(sequence: GraphSequence, index: int | None) -> AbstractContextManager[Any]:
            self._replayed.add(sequence)
            context = callers_context()
            if context is not None and context.batch_descriptor is not None:
                replayed.append(context.batch_descriptor)
            return nullcontext()

        with observing(observer, captures=False):
            self._step(batch)
        self._descriptors = captured + replayed

    def warm(self, batch: Any) -> None:
        """Run the step of a batch before anything is captured."""
        self.run(batch)
        self._known[id(batch)] = set(self._replayed)

    def why_missing(self, batch: Any, before: Counters, after: Counters) -> str:
        """Return why a batch has no graph after the last step, or ""."""
        captured, replayed = after.captures > before.captures, after.replays > before.replays
        if not (captured or replayed) or not EXPECTED.issuperset(after.plain - before.plain):
            uncalled = after.details.get(Reason.NOT_COMPILED, "the model was not called")
            return "; ".join(after.why_plain(before)) or uncalled
        return self._other(batch, captured)

    def _other(self, batch: Any, captured: bool) -> str:
        """Return which graph of another batch the last step has captured or replayed, or ""."""
        done = "captured" if captured else "replayed"
        compared = self._compares and self._descriptors
        if compared and not any(_is_of(batch, each) for each in self._descriptors):
            return f"{done} the graph of {self._descriptors[0]}"
        if captured:
            self._captured.add(str(batch))
        if not self._replayed or str(batch) in self._captured:  # of the same batch, listed twice
            return ""
        new = self._replayed - self._known[id(batch)]  # of a batch that was captured before it
        owner = self._owners.setdefault(frozenset(self._replayed), batch)
        if owner is not batch and str(owner) != str(batch):
            new = self._replayed
        return f"replayed the graph of {' and '.join(sorted({x.batch for x in new}))}" * bool(new)


def _is_of(batch: Any, descriptor: BatchDescriptor) -> bool:
    """Return whether a descriptor belongs to a batch; True for a batch of another type."""
    if isinstance(batch, BatchDescriptor):
        return batch == descriptor
    return not is_whole(batch) or batch in (*descriptor, *descriptor.extra)


def warm_all(
    step: Callable[[B_], Any],
    batches: list[B_],
    settled: Callable[[], Any],
    warmups: int,
    title: str = "",
) -> int:
    """Run all batches plain until a pass compiles nothing; return the number of passes.

    With a ``title`` under a progress bar.
    """
    with postponed_capture():
        for done in range(1, _MAX_PASSES + 1):
            before = settled()
            for batch in progress(batches, title and f"{title}: warm-up"):
                step(batch)
            if done >= warmups and settled() == before:
                return done
    log.warning("after %d passes something still compiles", _MAX_PASSES)
    return _MAX_PASSES


def _check(step: Any, batches: Any, target: Any, size: Any) -> None:
    where = "capture_all"
    require_callable("step", where, step)
    several = isinstance(batches, Iterable) and not hasattr(batches, "data_ptr")
    require(several, "batches", where, batches, "an iterable of batches")
    counts = isinstance(getattr(target, "counters", None), Counters)
    expected = "a Backend, a compiled model or a wrapper, which counts what it captures"
    require(counts, "target", where, target, expected)
    if size is not None:
        require_callable("size", where, size)


def _size_of(batch: Any, size: Callable[[Any], int] | None) -> Any:
    number = getattr(batch, "num_tokens", batch) if size is None else size(batch)
    expected = "a number for each batch; give size= for batches that are none"
    require(is_finite(number), "size", "capture_all", number, expected)
    expected = "batches of one token or more; give size= where they are not numbers of tokens"
    require(size is not None or number > 0, "batches", "capture_all", batch, expected)
    return number


def capture_set(
    title: str,
    mode: CUDAGraphMode,
    descriptors: list[BatchDescriptor],
    step: Callable[[BatchDescriptor, str], None],  # on a batch; for a "warmup" or a "capture"
    target: Any,
    settled: Callable[[], int],
    config: CompilationConfig,
    agreement: Any | None = None,  # of ranks that capture the same; what one lacks, all lack
) -> BulkCapture:
    """Warm up and capture for an engine: :func:`capture_all` with a title, on all ranks."""
    refused: dict[BatchDescriptor, str] = {}

    def run(descriptor: BatchDescriptor) -> None:
        if capture_postponed():
            step(descriptor, "warmup")
            return
        try:
            step(descriptor, "capture")
        except (ManagerError, AddressChangedError):
            raise
        except Exception as error:
            if config.strict:
                raise
            refused[descriptor] = f"{type(error).__name__}: {error}".splitlines()[0]
        if descriptor in refused and agreement is not None and mode is CUDAGraphMode.FULL:
            # Nothing of the step has run, and other ranks wait in its collectives.
            with postponed_capture():
                step(descriptor, "warmup")

    with nullcontext() if agreement is None else agreement.together():
        capture = capture_all(
            run,
            descriptors,
            target,
            settled=settled,
            warmups=config.num_warmups,
            strict=config.strict,
            title=title,
        )
    missing = tuple(
        (batch, refused.get(batch) or _LAST_CALL.sub("", reason))  # which the batch itself names
        for batch, reason in capture.missing
    )
    capture = replace(capture, missing=missing)
    if agreement is not None:
        capture = _of_all_ranks(capture, agreement, descriptors)
    for reason, batches in by_reason(capture.missing).items():
        log.warning("%s: not captured: %s: %s", title, "; ".join(map(str, batches)), reason)
    return capture


def by_reason(missing: Iterable[tuple[B_, str]]) -> dict[str, list[B_]]:
    """Return the batches of each reason, in the order of their first batch."""
    batches: dict[str, list[B_]] = {}
    for batch, reason in missing:
        batches.setdefault(reason, []).append(batch)
    return batches


def _of_all_ranks(
    capture: BulkCapture, agreement: Any, descriptors: list[BatchDescriptor]
) -> BulkCapture:
    """Leave out the graphs that another rank could not capture."""
    lacking = agreement.without(descriptors, capture.captured)
    missing = tuple(
        (batch, f"rank {rank} has not captured it")
        for batch, rank in lacking.items()
        if batch in capture.captured
    )
    captured = tuple(batch for batch in capture.captured if batch not in lacking)
    degraded = tuple(each for each in capture.degraded if each[0] in captured)
    return replace(capture, captured=captured, missing=capture.missing + missing, degraded=degraded)
