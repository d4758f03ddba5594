"""One set of captures: graphs of one mode, the largest first, for one process or for many ranks."""

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Protocol

import torch
from tqdm import tqdm

from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.descriptors import BatchDescriptor
from cgcompile.errors import ManagerError
from cgcompile.graphs.bulk import BulkCapture, HasCounters, capture_all
from cgcompile.graphs.capture import capture_postponed, postponed_capture

log = logging.getLogger(__name__)


class Ranks(Protocol):
    """Processes that capture the same set at the same time."""

    def together(self) -> AbstractContextManager[None]:
        """Around what all do: one that raises tells the others that it goes no further."""

    def without(
        self, planned: list[BatchDescriptor], done: tuple[BatchDescriptor, ...]
    ) -> Mapping[BatchDescriptor, int]:
        """What some rank has no graph of, and which rank."""


def capture_set(
    title: str,
    mode: CUDAGraphMode,
    descriptors: list[BatchDescriptor],
    step: Callable[[BatchDescriptor, str], None],
    target: HasCounters,
    settled: Callable[[], int],
    config: CompilationConfig,
    agreement: Ranks | None = None,
) -> BulkCapture:
    """Warm up and capture; a progress bar shows how far, on the first rank alone.

    Args:
        title: of the bar.
        mode: of the graphs.
        descriptors: what to capture.
        step: ``step(descriptor, phase)`` runs a batch afresh; ``"warmup"`` or ``"capture"``.
        target: what counts captures.
        settled: equal numbers once nothing compiles any more, on any rank.
        config: ``num_warmups`` and ``strict``.
        agreement: ranks that capture the same set at the same time.

    Returns:
        How it went. A step that ran plain and raises in the capture is missing, with what it said;
        the others go on. What one rank is without, all are.

    Raises:
        AgreementError: another rank stays away, gave up, or captures another set.
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
        if descriptor in refused and agreement is not None and mode is CUDAGraphMode.FULL:
            # Nothing of the step has run, and other ranks wait in its collectives.
            with postponed_capture():
                step(descriptor, "warmup")
        bar.update()

    with nullcontext() if agreement is None else agreement.together(), bar:
        found = capture_all(
            run,
            descriptors,
            target,
            settled=settled,
            warmups=config.num_warmups,
            strict=config.strict,
        )
    missing = tuple((each, refused.get(each, why)) for each, why in found.missing)
    found = replace(found, missing=missing)
    if agreement is not None:
        found = _of_all_ranks(found, agreement, descriptors)
    for descriptor, why in found.missing:
        log.warning("%s: not captured: %s: %s", title, descriptor, why)
    return found


def _of_all_ranks(
    found: BulkCapture, agreement: Ranks, descriptors: list[BatchDescriptor]
) -> BulkCapture:
    """Without what another rank could not capture."""
    lacking = agreement.without(descriptors, found.captured)
    captured = tuple(each for each in found.captured if each not in lacking)
    others = [(each, f"rank {rank} has not captured it") for each, rank in lacking.items()]
    new = tuple(pair for pair in others if pair[0] in found.captured)
    return replace(found, captured=captured, missing=found.missing + new)
