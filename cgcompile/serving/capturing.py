"""What is captured together: graphs of one mode, for one kind of batch.

How it is captured is in ``graphs/sets.py``.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby

from cgcompile.config import CUDAGraphMode
from cgcompile.descriptors import BatchDescriptor

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
