"""Which batch sizes are captured, and what a batch is padded to: pure functions.

A *ladder* is a tuple of sizes, in order, each once. A batch of n rows runs at the smallest size
that is at least n; above the largest size it runs without a graph. Without this file an engine
captures by hand, and loses graphs where it rounds: the batches between the largest size and the
maximum are then slow for ever, and nothing says so.

Sizes are rows of the padded batch, in tokens; only ``decode_sizes`` speaks of requests too. The one
rule a caller keeps: decode batches and mixed batches have ladders of their own, because what is
rounded to the query length for the first covers less of the second.

Ladders fitted to what an engine really ran are in ``fit.py``.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cgcompile.errors import SizesError
from cgcompile.modes import CUDAGraphMode
from cgcompile.settings import (
    LARGEST_TABLE,
    checked_last,
    enum_parser,
    parsed,
    require,
    require_whole,
    whole,
)

# Small batches are the frequent ones, and there a row more is a large share of the step.
_FIRST = (1, 2, 4)
_BY_8 = range(8, 256, 8)
_COARSE_FROM, _COARSE_STEP = 256, 16


def mode_named(mode: CUDAGraphMode | str, where: str) -> CUDAGraphMode:
    """A mode by its name, as the configuration takes it.

    Raises:
        ConfigError: there is no such mode.
    """
    found: CUDAGraphMode = parsed("mode", where, mode, enum_parser(CUDAGraphMode))
    return found


def checked_number(name: str, value: Any, least: int = 1) -> int:
    """The whole number ``value``.

    Raises:
        SizesError: it is none, or less than ``least``; the message calls it ``name``.
    """
    number = whole(value)
    if number is None or number < least:
        raise SizesError.number(name=name, found=value, least=least)
    return number


@checked_last
def checked_sizes(sizes: Iterable[int], maximum: int | None = None) -> tuple[int, ...]:
    """A ladder from a list of the user's: sorted, each size once.

    Nothing is dropped in silence, since a graph that is missing shows only as a slow step.

    Args:
        sizes: rows, at most 2**20; in any order.
        maximum: rows of the largest batch; None if there is no limit.

    Raises:
        SizesError: there are none; one is no whole number of at least 1; or above the maximum.
    """
    found = set()
    if not isinstance(sizes, Iterable):
        raise SizesError.not_a_size(found=sizes)
    for size in sizes:
        number = whole(size)
        if number is None or number < 1:
            raise SizesError.not_a_size(found=size)
        require_whole("sizes", "checked_sizes", number, 1, LARGEST_TABLE)
        found.add(number)
    if not found:
        raise SizesError.empty()
    ladder = tuple(sorted(found))
    if maximum is not None:
        limit = checked_number("maximum", maximum)
        if ladder[-1] > limit:
            raise SizesError.above(sizes=[size for size in ladder if size > limit], maximum=limit)
    return ladder


@checked_last
def capture_sizes(
    maximum: int, *, dense: int = 0, multiple_of: int | Iterable[int] = 1
) -> tuple[int, ...]:
    """The usual ladder: 1, 2, 4, from 8 in steps of 8, from 256 in steps of 16, and the maximum.

    The maximum is in it wherever it lies, because a scheduler under load runs at its limit.

    Args:
        maximum: rows of the largest batch, at most 2**20.
        dense: every size up to this one as well, for engines in which small batches matter most.
        multiple_of: as in :func:`round_sizes`. The last size is then the largest multiple within
            the maximum, and a batch between the two has no graph: no size could serve it. Take a
            maximum that is a multiple.

    Raises:
        SizesError: a number is out of range, or no multiple is within the maximum.
    """
    maximum = checked_number("maximum", maximum)
    require_whole("maximum", "capture_sizes", maximum, 1, LARGEST_TABLE)
    dense = checked_number("dense", dense, least=0)
    small = range(1, min(dense, maximum) + 1)
    steps = (*_FIRST, *_BY_8, *range(_COARSE_FROM, maximum, _COARSE_STEP), *small)
    return round_sizes((*(size for size in steps if size < maximum), maximum), multiple_of, maximum)


@checked_last
def round_sizes(
    sizes: Iterable[int], multiple: int | Iterable[int], maximum: int
) -> tuple[int, ...]:
    """The ladder in multiples, for query lengths or for rows that are spread over ranks.

    Each size becomes the next multiple; where that is above the maximum, the largest multiple
    within it. So there are never more sizes than before, and every batch that had a graph keeps
    one, up to that largest multiple, which is in the ladder if the maximum was. It is not added to
    a ladder that ends earlier: a huge last graph would take every batch above the one before it.

    Args:
        sizes: rows; above the maximum they count as the maximum.
        multiple: what divides every size; several hold jointly, by their least common multiple.
        maximum: rows of the largest batch.

    Raises:
        SizesError: a number is out of range, or no multiple is within the maximum.
    """
    several = multiple if isinstance(multiple, Iterable) else (multiple,)
    step = math.lcm(*(checked_number("multiple", each) for each in several))
    maximum = checked_number("maximum", maximum)
    last = maximum - maximum % step
    if not last:
        raise SizesError.no_multiple(multiple=step, maximum=maximum)
    return tuple(sorted({min(size + -size % step, last) for size in checked_sizes(sizes)}))


@checked_last
def decode_sizes(
    requests: Iterable[int],
    query_len: int,
    max_num_reqs: int,
    max_num_tokens: int,
    *,
    multiple_of: int | Iterable[int] = 1,
) -> tuple[int, ...]:
    """The ladder of uniform decode: numbers of requests times their query length.

    A ladder over tokens would need every multiple up to the widest decode; one over requests has
    as many sizes as without speculation. Several query lengths have a ladder each.

    Args:
        requests: numbers of requests, such as ``capture_sizes(max_num_reqs)``; larger ones count
            as the most requests that fit.
        query_len: tokens of each request: 1, and the draft tokens.
        max_num_reqs: requests in the largest batch.
        max_num_tokens: tokens in the largest batch; it is not raised for long queries.
        multiple_of: what divides every size beside the query length; see :func:`round_sizes`.

    Returns:
        Sizes in tokens, multiples of ``query_len``.

    Raises:
        SizesError: a number is out of range, or not one request fits.
    """
    query_len = checked_number("query_len", query_len)
    most = checked_number("max_num_reqs", max_num_reqs) * query_len
    limit = min(most, checked_number("max_num_tokens", max_num_tokens))
    others = multiple_of if isinstance(multiple_of, Iterable) else (multiple_of,)
    return round_sizes(
        (count * query_len for count in checked_sizes(requests)), (query_len, *others), limit
    )


def padded_size(ladder: Sequence[int], rows: int) -> int | None:
    """The smallest size of at least ``rows`` (1 or more); None above the largest. O(log sizes)."""
    place = bisect_left(ladder, rows)
    return ladder[place] if place < len(ladder) else None


def padding_table(ladder: Sequence[int]) -> dict[int, int]:
    """Rows -> :func:`padded_size`, for every number of rows from 1 to the largest size."""
    table: dict[int, int] = {}
    for size in ladder:
        table.update(dict.fromkeys(range(len(table) + 1, size + 1), size))
    return table


def checked_histogram(histogram: Mapping[int, int]) -> dict[int, int]:
    """Batch size -> number of steps, in order; sizes without a step are left out.

    Raises:
        ConfigError: it is no mapping.
        SizesError: a batch size is no whole number of at least 1, or a number of steps none of at
            least 0.
    """
    expected = "a mapping from batch sizes to numbers of steps"
    require(isinstance(histogram, Mapping), "histogram", "sizes", histogram, expected)
    steps: dict[int, int] = {}
    for batch, times in histogram.items():
        rows, number = whole(batch), whole(times)
        if rows is None or rows < 1 or number is None or number < 0:
            raise SizesError.bad_entry(batch=batch, steps=times)
        if number:
            steps[rows] = number
    return dict(sorted(steps.items()))


@checked_last
def padding_share(ladder: Sequence[int], histogram: Mapping[int, int]) -> float:
    """How much of what runs is padding: padded rows by all rows, from 0 to 1.

    Batches above the largest size run without a graph, and without padding.

    Args:
        ladder: sizes in order; may be empty.
        histogram: batch size -> number of steps.

    Raises:
        SizesError: the histogram is none.
    """
    real = run = 0
    for rows, times in checked_histogram(histogram).items():
        real += rows * times
        run += (padded_size(ladder, rows) or rows) * times
    return (run - real) / run if run else 0.0


@checked_last
def get_cudagraph_sizes(
    capture_sizes: Iterable[int] | None,
    max_num_reqs: int,
    max_num_tokens: int,
    cudagraph_mode: CUDAGraphMode | str,
    uniform_decode_query_len: int = 1,
    uniform_decode_cudagraph: bool = False,
) -> tuple[dict[int, int], dict[int, int]]:
    """Number of tokens -> captured size, for all batches and for uniform decode batches.

    Both maps come from the one list ``capture_sizes``, whose sizes need not be multiples of the
    query length: the last request of a padded decode batch may be short. Ladders of their own
    (:func:`decode_sizes`) serve decode better; this is the plain form that engines know.

    Args:
        capture_sizes: tokens; in any order.
        max_num_reqs: requests in the largest batch.
        max_num_tokens: tokens in the largest batch. No size is dropped for it: keep sizes within
            it by :func:`checked_sizes`.
        cudagraph_mode: which graphs serve a step, or its name; looked at for NONE alone.
        uniform_decode_query_len: tokens of each request of a uniform decode batch.
        uniform_decode_cudagraph: whether uniform decode batches have graphs of their own, whatever
            the mode: pass ``mode.decode_mode() is FULL and mode.separate_routine()``.

    Returns:
        Two maps. The first has every number from 1 to the largest size. The second has of those
        the ones with a size of at least one request and at most ``max_num_reqs`` requests, if
        ``uniform_decode_cudagraph``; else it is empty. Both are empty for mode NONE, and without
        sizes.

    Raises:
        SizesError: a number is out of range, or a size is none.
        ConfigError: there is no such mode.
    """
    mode = mode_named(cudagraph_mode, "get_cudagraph_sizes")
    most = checked_number("max_num_reqs", max_num_reqs, least=0)
    checked_number("max_num_tokens", max_num_tokens, least=0)
    query_len = checked_number("uniform_decode_query_len", uniform_decode_query_len)
    if mode is CUDAGraphMode.NONE or capture_sizes is None:
        return {}, {}
    given = tuple(capture_sizes) if isinstance(capture_sizes, Iterable) else capture_sizes
    if given == ():
        return {}, {}
    table = padding_table(checked_sizes(given))
    if not uniform_decode_cudagraph:
        return table, {}
    limit = most * query_len
    return table, {rows: size for rows, size in table.items() if query_len <= size <= limit}
