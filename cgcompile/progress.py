"""A progress bar for long work: on a terminal and in a notebook, nothing elsewhere."""

import sys
from collections.abc import Generator, Iterable
from typing import TypeVar

import torch

T_ = TypeVar("T_")


def progress(items: Iterable[T_], title: str, unit: str = "it") -> Generator[T_, None, None]:
    """Iterate over ``items`` with a bar, which disappears at the end; only rank 0 has one.

    Without a bar if ``title`` is empty. Closing the iterator removes the bar as well.
    """
    if not title:
        yield from items
        return
    from tqdm.auto import tqdm  # late: it looks for widgets of a notebook

    dist = torch.distributed
    quiet = dist.is_available() and dist.is_initialized() and dist.get_rank() != 0
    # None: where the output is a terminal. The output of a notebook is none.
    disable = True if quiet else False if "ipykernel" in sys.modules else None
    yield from tqdm(items, desc=title, unit=unit, disable=disable, leave=False)
