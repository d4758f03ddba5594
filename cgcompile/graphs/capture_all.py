"""Capture many batches at once: :func:`capture_all`, and :func:`capture_set` for engines.

Each batch runs plain first, so that nothing compiles inside of a capture; then all are captured,
the largest first, so that the smaller ones fit into its memory; garbage is collected once.
"""

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.descriptor import BatchDescriptor
from cgcompile.errors import DispatchError, ManagerError
from cgcompile.graphs.capture import bulk_capture, capture_postponed, postponed_capture
from cgcompile.reasons import EXPECTED, Counters
from cgcompile.settings import checked_but, is_finite, require, require_callable

log = logging.getLogger(__name__)

B_ = TypeVar("B_")

_MAX_PASSES = 8  # plain; a model that still compiles then is taken to do so at every step


@dataclass(frozen=True)
class BulkCapture:
    """How a bulk capture went.

    Attributes:
        captured: the batches all of whose steps have graphs now, in the order of capture.
        missing: the others, with the reason as text.
        passes: how often all batches ran plain before.
        warm_seconds: host time of that, and of collecting garbage once.
        capture_seconds: host time of the captures, each of which is one execution as well.
    """

    captured: tuple[Any, ...]
    missing: tuple[tuple[Any, str], ...]
    passes: int
    warm_seconds: float
    capture_seconds: float

    def __str__(self) -> str:
        count, seconds = len(self.captured), self.capture_seconds
        rows = [f"{count} batches captured in {seconds:.2f} s, after {self.warm_seconds:.2f} s"]
        return "\n".join(rows + [f"  {batch}: {reason}" for batch, reason in self.missing])


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
) -> BulkCapture:
    """Warm and capture all batches.

    Args:
        step: runs one step of a batch, on inputs prepared afresh, and calls the model once. It is
            called for each batch several times.
        batches: numbers of tokens, batch descriptors, or whatever ``step`` takes.
        target: a backend, compiled model or wrapper, which counts the captures.
        size: returns the size of a batch; left out: the number itself, or its ``num_tokens``.
        settled: returns a value that stays equal once nothing compiles any more.
        warmups: how often each batch runs plain at least.
        strict: raise where a batch has no graph in the end.

    Raises:
        ConfigError: an argument is of another kind than above; nothing ran.
        DispatchError: ``strict``, and a batch has no graph.
        BaseException: what ``step`` raised.
    """
    start = time.perf_counter()
    _check(step, batches, target, size)
    ordered = sorted(batches, key=lambda batch: _size_of(batch, size), reverse=True)
    passes = warm_all(step, ordered, settled, warmups)
    captured: list[Any] = []
    missing: list[tuple[Any, str]] = []
    with bulk_capture():
        warm = time.perf_counter()
        for batch in ordered:
            before = target.counters + Counters()  # a wrapper goes on counting in its own
            step(batch)
            after = target.counters
            reasons = after.plain - before.plain
            done = after.captures + after.replays > before.captures + before.replays
            if done and EXPECTED.issuperset(reasons):
                captured.append(batch)
                continue
            reason = "; ".join(after.why_plain(before)) or "the model was not called"
            if strict:
                raise DispatchError.strict(
                    what=f"batch {batch}", reason="bulk capture", detail=reason
                )
            missing.append((batch, reason))
    end = time.perf_counter()
    capture = BulkCapture(tuple(captured), tuple(missing), passes, warm - start, end - warm)
    log.info("%s", capture)
    return capture


def warm_all(
    step: Callable[[B_], Any], batches: list[B_], settled: Callable[[], Any], warmups: int
) -> int:
    """Run all batches plain until a whole pass compiles nothing; return the number of passes."""
    with postponed_capture():
        for done in range(1, _MAX_PASSES + 1):
            before = settled()
            for batch in batches:
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
    return number


def capture_set(
    title: str,
    mode: CUDAGraphMode,
    descriptors: list[BatchDescriptor],
    step: Callable[[BatchDescriptor, str], None],
    target: Any,
    settled: Callable[[], int],
    config: CompilationConfig,
    agreement: Any | None = None,
) -> BulkCapture:
    """Warm up and capture, with a progress bar ``title`` on the first rank alone.

    ``step(descriptor, phase)`` runs a batch afresh; ``"warmup"`` or ``"capture"``. One that ran
    plain and raises in the capture is missing, with the error as its reason; the others are still
    captured, unless ``strict``. ``agreement`` is of ranks that capture the same set at the same
    time; a graph that one rank lacks, all lack. It raises :class:`AgreementError`.
    """
    quiet = torch.distributed.is_initialized() and torch.distributed.get_rank() != 0
    bar = tqdm(total=len(descriptors), desc=title, disable=quiet or None, leave=False)
    refused: dict[BatchDescriptor, str] = {}

    def run(descriptor: BatchDescriptor) -> None:
        if capture_postponed():
            step(descriptor, "warmup")
            return
        try:
            step(descriptor, "capture")
        except ManagerError:
            raise
        except Exception as error:
            if config.strict:
                raise
            refused[descriptor] = f"{type(error).__name__}: {error}".splitlines()[0]
        if descriptor in refused and agreement is not None and mode is CUDAGraphMode.FULL:
            # Nothing of the step has run, and other ranks wait in its collectives.
            with postponed_capture():
                step(descriptor, "warmup")
        bar.update()

    with nullcontext() if agreement is None else agreement.together(), bar:
        capture = capture_all(
            run,
            descriptors,
            target,
            settled=settled,
            warmups=config.num_warmups,
            strict=config.strict,
        )
    missing = tuple((batch, refused.get(batch, reason)) for batch, reason in capture.missing)
    capture = replace(capture, missing=missing)
    if agreement is not None:
        capture = _of_all_ranks(capture, agreement, descriptors)
    for descriptor, reason in capture.missing:
        log.warning("%s: not captured: %s: %s", title, descriptor, reason)
    return capture


def _of_all_ranks(
    capture: BulkCapture, agreement: Any, descriptors: list[BatchDescriptor]
) -> BulkCapture:
    """Leave out what another rank could not capture."""
    lacking = agreement.without(descriptors, capture.captured)
    missing = tuple(
        (batch, f"rank {rank} has not captured it")
        for batch, rank in lacking.items()
        if batch in capture.captured
    )
    captured = tuple(batch for batch in capture.captured if batch not in lacking)
    return replace(capture, captured=captured, missing=capture.missing + missing)
