"""Delta debugging: :func:`minimal`, the smallest part of a set that still makes something fail."""

from collections.abc import Callable, Sequence
from typing import TypeVar

T_ = TypeVar("T_")


def minimal(items: Sequence[T_], fails: Callable[[Sequence[T_]], bool]) -> list[T_]:
    """Some of the items that fail together and of which none can be left out.

    Args:
        items: that fail together.
        fails: whether some of them, in order, do; asked about log(n) times for one culprit.
    """
    found, parts = list(items), 2
    while len(found) > 1:
        size = -(-len(found) // parts)
        chunks = [found[at : at + size] for at in range(0, len(found), size)]
        smaller = next((chunk for chunk in chunks if fails(chunk)), None)
        if smaller is not None:
            found, parts = smaller, 2
            continue
        rests = [[each for each in found if each not in chunk] for chunk in chunks]
        rest = next((rest for rest in rests if len(chunks) > 2 and fails(rest)), None)
        if rest is not None:
            found, parts = rest, max(parts - 1, 2)
            continue
        if len(chunks) == len(found):
            break
        parts = min(2 * parts, len(found))
    return found
