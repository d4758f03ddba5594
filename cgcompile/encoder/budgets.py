"""Token budgets of encoder graphs, and how many items and frames a replay holds: pure functions.

A graph of an encoder is captured for a *budget*, a number of output tokens. The rule for callers:
``max_items`` is at most the smallest budget, because buffers of a budget are divided among the
items, and each needs at least one token.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cgcompile.encoder.errors import EncoderError
from cgcompile.encoder.packing import Costs
from cgcompile.ladders import checked_histogram, fit_sizes, require_limit, round_sizes
from cgcompile.settings import checked_last, require, require_arguments, whole

TokenBudgets = Sequence[int] | Mapping[str, Sequence[int]]
"""Budgets of all paths, or by path."""


class Budgets(NamedTuple):
    """What is captured.

    Attributes:
        budgets: output tokens of each graph, ascending, without duplicates.
        max_items: items in one replay; at most the smallest budget.

    Example:
        >>> cgcompile.encoder.resolve_budgets([64, 16], 4, budget_range=(16, 64))
        Budgets(budgets=(16, 64), max_items=4)
    """

    budgets: tuple[int, ...]
    max_items: int


@checked_last
def generated_budgets(least: int, most: int, ratio: float = 2.0) -> tuple[int, ...]:
    """Return ``least``, each time multiplied by ``ratio``, up to ``most``, which is included.

    With ratio 2 a group is padded by up to half of its budget; with 1.5 by up to a third, for 1.7
    times as many graphs.

    Args:
        least: output tokens of the smallest budget.
        most: output tokens of the largest one.
        ratio: fractions are rounded down, but each budget is larger than the one before.

    Raises:
        EncoderError: the range is not positive and in order, or ``ratio`` is not above 1.

    Example:
        >>> cgcompile.encoder.generated_budgets(16, 100)
        (16, 32, 64, 100)
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
    """Return the smallest budget that holds ``tokens``; None above the largest.

    Args:
        budgets: ascending.
        tokens: output tokens, 0 or more; 0 takes the smallest.

    Example:
        >>> cgcompile.encoder.smallest_budget([16, 64], 20)
        64
    """
    try:
        index = bisect_left(budgets, tokens)
    except (LookupError, RuntimeError, TypeError):
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
    """Return the budgets and the number of items, from the user's values and the model's range.

    ============ ============= ====================================== ============================
    ``budgets``  ``max_items`` the budgets                            the items
    ============ ============= ====================================== ============================
    given        given         as given                               as given
    None         given         generated, from at least ``max_items`` as given
    given        None          as given                               the smaller of most // least
                                                                      and the smallest budget
    None         None          generated                              most // least, at most the
                                                                      smallest budget
    ============ ============= ====================================== ============================

    Args:
        budgets: output tokens, in any order; may be outside of the range.
        max_items: items in one replay.
        budget_range: the least and the most output tokens of a generated budget, by the model.

    Raises:
        EncoderError: a number is out of range, there are no budgets, or the smallest of them
            has less than one token for each item.

    Example:
        >>> cgcompile.encoder.resolve_budgets(budget_range=(16, 64))
        Budgets(budgets=(16, 32, 64), max_items=4)
    """
    return _resolved(budgets, max_items, budget_range, "max_items")


def _resolved(
    budgets: Iterable[int] | None, max_items: int | None, budget_range: tuple[int, int], name: str
) -> Budgets:
    """Return the budgets and items; errors call the limit of items ``name``."""
    least, most = _checked_range(budget_range)
    ladder = None if budgets is None else _checked_budgets(budgets)
    if max_items is None:
        ladder = ladder or generated_budgets(least, most)
        return Budgets(ladder, min(most // least, ladder[0]))
    items = checked_number(name, max_items, 1)
    if ladder is None:
        if items > most:
            raise EncoderError.items_above_range(name=name, max_items=items, most=most)
        ladder = generated_budgets(max(least, items), most)
    elif items > ladder[0]:
        raise EncoderError.items_above_budget(name=name, max_items=items, budget=ladder[0])
    return Budgets(ladder, items)


@checked_last
def resolve_frames(max_items: int, max_frames_per_video: int, limit: int | None = None) -> int:
    """Return how many frames one replay holds, of all its items; 0 if graphs are not for videos.

    Args:
        max_items: items in one replay.
        max_frames_per_video: of one video; 0 if the model takes none, then the result is 0.
        limit: the user's limit; None for room for ``max_items`` videos of the greatest length, 0
            for one frame per item, as for images alone.

    Raises:
        EncoderError: a number is out of range.

    Example:
        >>> cgcompile.encoder.resolve_frames(4, max_frames_per_video=8)
        32
    """
    items = checked_number("max_items", max_items, 1)
    frames = checked_number("max_frames_per_video", max_frames_per_video, 0)
    most = items * frames if limit is None else checked_number("max_frames", limit, 0)
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
    """Fit budgets of little cost to observed groups; see ``serving.fit_sizes``.

    Args:
        observed: output tokens of groups, the items of one replay, such as all of a call: each of
            them, or tokens -> number of groups. Groups of 0 tokens are left out.
        count: how many budgets at most.
        nbytes: bytes of all graphs at most.
        bytes_of: budget -> bytes of its graph.
        max_items: no budget is smaller, so that each item has a token.
        multiple_of: divides every budget: the tokens of an image, where all have the same. With
            ``nbytes`` and hundreds of different sizes, coarse budgets keep the search short.
        costs: if given, large groups run eager where that costs less, and the result may be empty.
            If None, padding is minimal, and every observed group has a graph.
        path: the path of ``costs``.

    Raises:
        EncoderError: nothing was observed, or a number is out of range.
        SizesError: neither ``count`` nor ``nbytes`` is given, nothing fits in ``nbytes``, or an
            entry of ``observed`` is not valid.

    Example:
        >>> cgcompile.encoder.fitted_budgets([10, 12, 60, 64], count=2)
        (12, 64)
    """
    items = checked_number("max_items", max_items, 1)
    step = checked_number("multiple_of", multiple_of, 1)
    pairs = observed if isinstance(observed, Mapping) else Counter(observed)
    seen = {n: pairs[n] for n in pairs if n != 0}
    groups: Mapping[int, int] = checked_histogram(seen, "observed", "tokens", "groups")
    if not groups:
        raise EncoderError.nothing_observed()
    require_limit("fitted_budgets", count, nbytes, bytes_of)
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


_ITEMS = "max_batch_size"  # name of the managers' argument


class Limits(NamedTuple):
    """The limits of all graphs of a manager."""

    budgets: Mapping[str, tuple[int, ...]]  # path -> budgets, ascending
    max_items: int  # items of one replay, at most the smallest budget
    max_frames: int  # frames of one replay; 0 for images, with one frame per item


def resolve_limits(
    paths: Mapping[str, int | None],
    max_frames_per_video: int,
    token_budgets: TokenBudgets | None,
    max_items: int | None,
    max_frames: int | None,
    budget_range: tuple[int, int] | None,
) -> Limits:
    """Resolve budgets per path, the most items and the most frames."""
    if token_budgets is None:
        assert budget_range is not None
        budgets, items = _generated(paths, max_items, budget_range)
    else:
        budgets, items = _given(list(paths), token_budgets, max_items, budget_range)
    return Limits(budgets, items, resolve_frames(items, max_frames_per_video, max_frames))


def _given(
    paths: list[str],
    token_budgets: TokenBudgets,
    max_items: int | None,
    budget_range: tuple[int, int] | None,
) -> tuple[dict[str, tuple[int, ...]], int]:
    if not isinstance(token_budgets, Mapping):
        token_budgets = dict.fromkeys(paths, tuple(token_budgets))
    expected = f"budgets for each of {', '.join(paths)}"
    same = set(token_budgets) == set(paths)
    require(same, "token_budgets", "encoder graphs", dict(token_budgets), expected)
    ladders = {path: _checked_budgets(token_budgets[path]) for path in paths}
    items = min(
        _resolved(ladder, max_items, budget_range or (ladder[0], ladder[-1]), _ITEMS).max_items
        for ladder in ladders.values()
    )
    return ladders, items


def _generated(
    paths: Mapping[str, int | None], max_items: int | None, budget_range: tuple[int, int]
) -> tuple[dict[str, tuple[int, ...]], int]:
    ladder, items = _resolved(None, max_items, budget_range, _ITEMS)
    most = ladder[-1]
    starts = {path: least or ladder[0] for path, least in paths.items()}
    for path, least in starts.items():
        if least > most:  # no budget in the range holds an item of this path
            raise EncoderError.path_above_range(path=path, least=least, most=most)
    if max_items is None:
        items = min(items, *starts.values())
    return {
        path: generated_budgets(max(start, items), most) for path, start in starts.items()
    }, items


def checked_number(name: str, value: Any, least: int) -> int:
    """Return a whole number of at least ``least``; raise EncoderError for anything else."""
    number = whole(value)
    if number is None or number < least:
        expected = f"a whole number of at least {least}"
        raise EncoderError.bad_value(where="", name=name, value=value, expected=expected)
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
