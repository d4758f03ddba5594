"""Which sizes an engine captures: the usual ladders, and the maps of engines to them.

The rule: decode batches and mixed batches have separate ladders, because a ladder that is rounded
to the query length covers less of mixed batches. ``cgcompile.ladders`` rounds and fits a ladder.
"""

from collections.abc import Iterable

from cgcompile.ladders import checked_number, checked_sizes, padding_table, round_sizes
from cgcompile.modes import CUDAGraphMode
from cgcompile.settings import LARGEST_TABLE, checked_last, enum_parser, parsed, require_whole

# Small batches are frequent, and one more row is a large share of their step.
_SMALL = (1, 2, 4, *range(8, 256, 8))
_COARSE_FROM, _COARSE_STEP = 256, 16


def mode_named(mode: CUDAGraphMode | str, where: str) -> CUDAGraphMode:
    """Return a mode by its name, as the configuration takes it."""
    member: CUDAGraphMode = parsed("mode", where, mode, enum_parser(CUDAGraphMode))
    return member


@checked_last
def capture_sizes(
    maximum: int, *, dense: int = 0, multiple_of: int | Iterable[int] = 1
) -> tuple[int, ...]:
    """Return the usual ladder: 1, 2, 4, by 8 from 8, by 16 from 256, and the maximum.

    The maximum is always included, because a scheduler under load runs at its limit.

    Args:
        maximum: rows of the largest batch, at most 2**20.
        dense: include every size up to this one, for engines in which small batches matter most.
        multiple_of: as in :func:`round_sizes`. The last size is then the largest multiple within
            the maximum, and a batch between the two has no graph: choose a maximum that is a
            multiple.

    Raises:
        SizesError: a number is out of range, or no multiple is within the maximum.

    Example:
        >>> cgcompile.serving.capture_sizes(40)
        (1, 2, 4, 8, 16, 24, 32, 40)
    """
    maximum = checked_number("maximum", maximum)
    require_whole("maximum", "capture_sizes", maximum, 1, LARGEST_TABLE)
    dense = checked_number("dense", dense, least=0)
    every = range(1, min(dense, maximum) + 1)
    sizes = (*_SMALL, *range(_COARSE_FROM, maximum, _COARSE_STEP), *every)
    return round_sizes((*(size for size in sizes if size < maximum), maximum), multiple_of, maximum)


@checked_last
def decode_sizes(
    requests: Iterable[int],
    query_len: int,
    max_num_reqs: int,
    max_num_tokens: int,
    *,
    multiple_of: int | Iterable[int] = 1,
) -> tuple[int, ...]:
    """Return the ladder of uniform decode: numbers of requests times their query length.

    A ladder over tokens would need every multiple up to the widest decode; a ladder over requests
    has as many sizes as without speculation. Each query length has its own ladder.

    Args:
        requests: numbers of requests, such as ``capture_sizes(max_num_reqs)``; larger ones count
            as the most requests that fit.
        query_len: tokens of each request: 1 plus the draft tokens.
        max_num_reqs: requests in the largest batch.
        max_num_tokens: tokens in the largest batch; it is not raised for long queries.
        multiple_of: what divides every size beside the query length; see :func:`round_sizes`.

    Returns:
        Sizes in tokens, multiples of ``query_len``.

    Raises:
        SizesError: a number is out of range, or not even one request fits.

    Example:
        >>> cgcompile.serving.decode_sizes([1, 2], query_len=3, max_num_reqs=4, max_num_tokens=64)
        (3, 6)
    """
    query_len = checked_number("query_len", query_len)
    most = checked_number("max_num_reqs", max_num_reqs) * query_len
    limit = min(most, checked_number("max_num_tokens", max_num_tokens))
    others = multiple_of if isinstance(multiple_of, Iterable) else (multiple_of,)
    sizes = (count * query_len for count in checked_sizes(requests))
    return round_sizes(sizes, (query_len, *others), limit)


@checked_last
def get_cudagraph_sizes(
    capture_sizes: Iterable[int] | None,
    max_num_reqs: int,
    max_num_tokens: int,
    cudagraph_mode: CUDAGraphMode | str,
    uniform_decode_query_len: int = 1,
    uniform_decode_cudagraph: bool = False,
) -> tuple[dict[int, int], dict[int, int]]:
    """Map numbers of tokens to captured sizes, for all batches and for uniform decode batches.

    Both maps come from the one list ``capture_sizes``, whose sizes need not be multiples of the
    query length: the last request of a padded decode batch may be short. Separate ladders
    (:func:`decode_sizes`) serve decode better; this is the form that engines know.

    Args:
        capture_sizes: tokens; in any order.
        max_num_reqs: requests in the largest batch.
        max_num_tokens: tokens in the largest batch. No size is dropped for it: keep sizes within
            it by :func:`checked_sizes`.
        cudagraph_mode: which graphs serve a step, or its name; only NONE matters here.
        uniform_decode_query_len: tokens of each request of a uniform decode batch.
        uniform_decode_cudagraph: uniform decode batches have separate graphs, whatever the mode:
            pass ``mode.decode_mode() is FULL and mode.separate_routine()``.

    Returns:
        Two maps. The first has every number from 1 to the largest size. With
        ``uniform_decode_cudagraph`` the second has those of its entries whose size holds at least
        one request and at most ``max_num_reqs``; else it is empty. Both are empty for mode NONE,
        and without sizes.

    Raises:
        SizesError: a number or size is out of range.
        ConfigError: there is no such mode.

    Example:
        >>> sizes, decode = cgcompile.serving.get_cudagraph_sizes([2, 4], 4, 4, "PIECEWISE")
        >>> sizes
        {1: 2, 2: 2, 3: 4, 4: 4}
    """
    mode = mode_named(cudagraph_mode, "get_cudagraph_sizes")
    most = checked_number("max_num_reqs", max_num_reqs, least=0)
    checked_number("max_num_tokens", max_num_tokens, least=0)
    query_len = checked_number("uniform_decode_query_len", uniform_decode_query_len)
    if mode is CUDAGraphMode.NONE or capture_sizes is None:
        return {}, {}
    sizes = tuple(capture_sizes) if isinstance(capture_sizes, Iterable) else capture_sizes
    if sizes == ():
        return {}, {}
    table = padding_table(checked_sizes(sizes))
    if not uniform_decode_cudagraph:
        return table, {}
    limit = most * query_len
    return table, {rows: size for rows, size in table.items() if query_len <= size <= limit}
