"""Token budgets of encoder graphs, and how many items and frames fit: pure functions.

A graph of an encoder is captured for a *budget*, a number of output tokens. The items of a call
run at the smallest budget that holds them. Without the checks here, a ladder that cannot be
captured is found by a shape error deep inside of a model.

The one rule a caller keeps: ``max_items`` is at most the smallest budget. Buffers of a budget are
divided among the items, and each needs at least one token.

How items are put together is in ``packing.py``.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cgcompile.encoder.packing import Costs
from cgcompile.errors import EncoderError
from cgcompile.serving.sizes import checked_histogram, fit_sizes, round_sizes
from cgcompile.settings import checked_last, require_arguments, whole


class Budgets(NamedTuple):
    """What is captured.

    Attributes:
        budgets: output tokens of each graph, ascending, each once.
        max_items: items in one replay; at most the smallest budget.
    """

    budgets: tuple[int, ...]
    max_items: int


@checked_last
def generated_budgets(least: int, most: int, ratio: float = 2.0) -> tuple[int, ...]:
    """``least``, and each time ``ratio`` times as much, up to ``most``, which is always in it.

    With ratio 2 a group is padded by up to a half of its budget; 1.5 makes it a third, for 1.7
    times as many graphs.

    Args:
        least: output tokens of the smallest budget.
        most: output tokens of the largest one.
        ratio: fractions are rounded down, but each budget is larger than the one before.

    Raises:
        EncoderError: the range is not positive and in order, or ``ratio`` not above 1.
    """
    least, most = _checked_range((least, most))
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 1 < ratio < math.inf:
        raise EncoderError.ratio(found=ratio)
    ladder, budget = [], least
    while budget < most:
        ladder.append(budget)
        budget = max(budget + 1, math.floor(budget * ratio))
    return (*ladder, most)


def smallest_budget(budgets: Sequence[int], tokens: int) -> int | None:
    """The smallest budget that holds ``tokens``; None above the largest.

    Args:
        budgets: ascending.
        tokens: output tokens, 0 or more; 0 takes the smallest.
    """
    try:
        index = bisect_left(budgets, tokens)
    except (RuntimeError, TypeError):
        values, hints = {"budgets": budgets, "tokens": tokens}, {"budgets": Sequence[int]}
        require_arguments("smallest_budget", values, {**hints, "tokens": int})
        raise
    return budgets[index] if index < len(budgets) else None


@checked_last
def resolve_budgets(
    budgets: Iterable[int] | None = None,
    max_items: int | None = None,
    *,
    budget_range: tuple[int, int],
) -> Budgets:
    """The budgets and the number of items, from what a user gave and what a model can do.

    ============ ============ ======================================= ============================
    ``budgets``  ``max_items`` the budgets                            the items
    ============ ============ ======================================= ============================
    given        given        as given                                as given
    None         given        generated, from at least ``max_items``  as given
    given        None         as given                                the smaller of most // least
                                                                      and the smallest budget
    None         None         generated                               likewise
    ============ ============ ======================================= ============================

    Args:
        budgets: output tokens, in any order; may lie outside of the range.
        max_items: items in one replay.
        budget_range: the least and the most output tokens of a generated budget, by the model.

    Raises:
        EncoderError: a number is out of range, there are no budgets, or the smallest of them
            has less than one token for each item.
    """
    least, most = _checked_range(budget_range)
    ascending = None if budgets is None else _checked_budgets(budgets)
    if max_items is None:
        ladder = generated_budgets(least, most) if ascending is None else ascending
        return Budgets(ladder, min(most // least, ladder[0]))
    items = checked_number("max_items", max_items, 1)
    if ascending is None:
        if items > most:
            raise EncoderError.items_above_range(max_items=items, most=most)
        return Budgets(generated_budgets(max(least, items), most), items)
    if items > ascending[0]:
        raise EncoderError.items_above_budget(max_items=items, budget=ascending[0])
    return Budgets(ascending, items)


@checked_last
def resolve_frames(max_items: int, max_frames_per_video: int, given: int | None = None) -> int:
    """How many frames one replay holds, all its items together; 0 if graphs are not for videos.

    Args:
        max_items: items in one replay.
        max_frames_per_video: of one video; 0 if the model takes none, and the result is 0 then.
        given: by the user; None for room for ``max_items`` videos of the greatest length, 0 for
            none: graphs have one frame for each item then, as those of images alone.

    Raises:
        EncoderError: a number is out of range.
    """
    items = checked_number("max_items", max_items, 1)
    frames = checked_number("max_frames_per_video", max_frames_per_video, 0)
    most = items * frames if given is None else checked_number("max_frames", given, 0)
    return most if frames else 0


@checked_last
def fitted_budgets(
    observed: Mapping[int, int] | Iterable[int],
    count: int | None = None,
    nbytes: int | None = None,
    bytes_of: Callable[[int], int] | None = None,
    *,
    max_items: int = 1,
    multiple_of: int = 1,
    costs: Costs | None = None,
    path: int = 0,
) -> tuple[int, ...]:
    """Fit budgets of little cost to what was observed; see ``serving.fit_sizes``.

    Args:
        observed: output tokens of groups that ran: each of them, or tokens -> number of groups.
            Groups of 0 tokens are left out.
        count: how many budgets at most.
        nbytes: bytes of all graphs at most.
        bytes_of: budget -> bytes of its graph.
        max_items: no budget is smaller, so that each item has a token.
        multiple_of: what divides every budget. With ``nbytes`` and hundreds of different sizes,
            coarse budgets keep the search short.
        costs: if given, large groups run eager where that costs less, and there may be no budget
            at all. If None, padding is least, and every group that was observed has a graph.
        path: the path of ``costs``.

    Raises:
        EncoderError: nothing was observed, or a number is out of range.
        SizesError: neither ``count`` nor ``nbytes`` is given, nothing fits in ``nbytes``, or an
            entry of ``observed`` is none.
    """
    items = checked_number("max_items", max_items, 1)
    step = checked_number("multiple_of", multiple_of, 1)
    pairs = observed if isinstance(observed, Mapping) else Counter(observed)
    groups: Mapping[int, int] = checked_histogram({n: pairs[n] for n in pairs if n != 0})
    if not groups:
        raise EncoderError.nothing_observed()
    top = max(*groups, items)
    candidates = round_sizes((max(n, items) for n in groups), step, top + -top % step)
    return fit_sizes(
        groups,
        count,
        nbytes,
        bytes_of,
        None if costs is None else lambda budget: costs.replay(path, budget),
        candidates=candidates,
        cost_without_graph=None if costs is None else lambda tokens: costs.eager(path, tokens),
    ).sizes


def checked_number(name: str, value: Any, least: int) -> int:
    """A whole number of at least ``least``."""
    number = whole(value)
    if number is None or number < least:
        raise EncoderError.budget_number(name=name, found=value, least=least)
    return number


def _checked_range(span: Any) -> tuple[int, int]:
    try:
        least, most = map(whole, span)
    except (TypeError, ValueError):
        raise EncoderError.budget_range(found=span) from None
    if least is None or most is None or least < 1 or most < 1:
        raise EncoderError.budget_range(found=span)
    if least > most:
        raise EncoderError.range_order(least=least, most=most)
    return least, most


def _checked_budgets(budgets: Iterable[int]) -> tuple[int, ...]:
    numbers = set()
    for budget in budgets:
        number = whole(budget)
        if number is None or number < 1:
            raise EncoderError.not_a_budget(found=budget)
        numbers.add(number)
    if not numbers:
        raise EncoderError.no_budgets()
    return tuple(sorted(numbers))
