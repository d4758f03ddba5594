"""One set of captures: graphs of one mode, for one kind of batch, the largest first."""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import groupby

import torch
from tqdm import tqdm

from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.descriptors import BatchDescriptor
from cgcompile.errors import ManagerError
from cgcompile.graphs.bulk import BulkCapture, HasCounters, capture_all
from cgcompile.graphs.capture import capture_postponed

log = logging.getLogger(__name__)

Planned = tuple[CUDAGraphMode, BatchDescriptor]


def sets_of(plan: Iterable[Planned]) -> Iterator[tuple[str, CUDAGraphMode, list[BatchDescriptor]]]:
    """(title, mode, descriptors) of what is captured together, in the order of the plan."""
    for (mode, kind), group in groupby(plan, _kind):
        title = f"Capturing CUDA graphs ({kind}, {mode.name})"
        yield title, mode, [descriptor for _, descriptor in group]


def largest(plan: Iterable[Planned], mode: CUDAGraphMode) -> tuple[int, int]:
    """(tokens, requests) of the largest graph of a mode; zeros if there is none."""
    found = [descriptor for planned, descriptor in plan if planned is mode]
    tokens = max((each.num_tokens for each in found), default=0)
    return tokens, max((each.num_reqs or 1 for each in found), default=0)


def _kind(planned: Planned) -> tuple[CUDAGraphMode, str]:
    mode, descriptor = planned
    decode = descriptor.uniform or descriptor.max_query_len is not None
    return mode, "decode" if decode and mode is CUDAGraphMode.FULL else "mixed"


def capture_set(
    title: str,
    descriptors: list[BatchDescriptor],
    step: Callable[[BatchDescriptor, str], None],
    target: HasCounters,
    settled: Callable[[], int],
    config: CompilationConfig,
) -> BulkCapture:
    """Warm up and capture; a progress bar shows how far, on the first rank alone.

    Args:
        title: of the bar.
        descriptors: what to capture.
        step: ``step(descriptor, phase)`` runs a batch afresh; ``"warmup"`` or ``"capture"``.
        target: what counts captures.
        settled: equal numbers once nothing compiles any more.
        config: ``num_warmups`` and ``strict``.

    Returns:
        How it went. A step that ran plain and raises in the capture is missing, with what it said;
        the others go on.

    Raises:
        DispatchError: ``strict``, and a batch has no graph.
        BaseException: what a step raised in a warm-up, or, ``strict``, in the capture.
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
        bar.update()

    with bar:
        found = capture_all(
            run,
            descriptors,
            target,
            settled=settled,
            warmups=config.num_warmups,
            strict=config.strict,
        )
    missing = tuple((each, refused.get(each, why)) for each, why in found.missing)
    for descriptor, why in missing:
        log.warning("%s: not captured: %s: %s", title, descriptor, why)
    return replace(found, missing=missing)
