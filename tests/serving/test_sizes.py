"""Ladders: what is in them, that rounding loses no batch, and the maps made from them."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgcompile.errors import SizesError
from cgcompile.modes import CUDAGraphMode
from cgcompile.serving.sizes import (
    capture_sizes,
    checked_sizes,
    decode_sizes,
    get_cudagraph_sizes,
    padded_size,
    padding_share,
    padding_table,
    round_sizes,
)

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
DECODE_ONLY, BOTH = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE

MAXIMUM = st.integers(1, 700)
MULTIPLE = st.integers(1, 24)
LADDER = st.sets(st.integers(1, 300), min_size=1, max_size=12).map(lambda s: tuple(sorted(s)))
HISTOGRAM = st.dictionaries(st.integers(1, 300), st.integers(0, 9), max_size=12)


def brute(ladder: Any, rows: int) -> int | None:
    return min((size for size in ladder if size >= rows), default=None)


def is_ladder(sizes: Any) -> bool:
    return isinstance(sizes, tuple) and list(sizes) == sorted(set(sizes)) and sizes[0] > 0


# The usual ladder


@pytest.mark.parametrize(
    ("maximum", "expected"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (42, (1, 2, 4, 8, 16, 24, 32, 40, 42)),
        (256, (1, 2, 4, *range(8, 257, 8))),
        (257, (1, 2, 4, *range(8, 257, 8), 257)),
        (512, (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))),
    ],
)
def test_the_usual_ladder(maximum: int, expected: tuple[int, ...]) -> None:
    assert capture_sizes(maximum) == expected


@pytest.mark.parametrize("maximum", [12, 42, 100, 101, 257, 300])
def test_a_maximum_off_the_grid_is_captured(maximum: int) -> None:
    assert capture_sizes(maximum)[-1] == maximum


def test_dense_sizes() -> None:
    assert capture_sizes(40, dense=12) == (*range(1, 13), 16, 24, 32, 40)
    assert capture_sizes(5, dense=32) == (1, 2, 3, 4, 5)
    assert capture_sizes(5, dense=10**12) == (1, 2, 3, 4, 5)


@settings(deadline=None)
@given(MAXIMUM, st.integers(0, 40), MULTIPLE)
def test_every_batch_is_covered(maximum: int, dense: int, multiple: int) -> None:
    if multiple > maximum:
        with pytest.raises(SizesError, match=f"the maximum is {maximum}, .* of {multiple}\\."):
            capture_sizes(maximum, dense=dense, multiple_of=multiple)
        return
    ladder = capture_sizes(maximum, dense=dense, multiple_of=multiple)
    assert is_ladder(ladder)
    assert ladder[-1] == maximum - maximum % multiple
    assert all(size % multiple == 0 for size in ladder)
    assert set(range(multiple, min(dense, maximum) + 1, multiple)) <= set(ladder)
    assert len(ladder) <= len(capture_sizes(maximum, dense=dense))
    for rows in range(1, ladder[-1] + 1):
        size = padded_size(ladder, rows)
        assert size == brute(ladder, rows)
        # nothing is padded by more than the step of the ladder and one multiple
        step = 8 if rows <= 248 else 16
        assert size is not None
        assert size - rows < step + multiple


@pytest.mark.parametrize("bad", [0, -1, True, 2.0, "8", None])
def test_numbers_out_of_range(bad: Any) -> None:
    with pytest.raises(SizesError, match=r"maximum = .*; expected a whole number of at least 1\."):
        capture_sizes(bad)
    with pytest.raises(SizesError, match="multiple = "):
        capture_sizes(8, multiple_of=bad)
    with pytest.raises(SizesError, match="query_len = "):
        decode_sizes([1], bad, 8, 8)
    with pytest.raises(SizesError, match="max_num_reqs = "):
        decode_sizes([1], 1, bad, 8)
    with pytest.raises(SizesError, match="max_num_tokens = "):
        decode_sizes([1], 1, 8, bad)
    with pytest.raises(SizesError, match="uniform_decode_query_len = "):
        get_cudagraph_sizes([1], 8, 8, FULL, bad)


def test_dense_out_of_range() -> None:
    with pytest.raises(SizesError, match="dense = -1; expected a whole number of at least 0"):
        capture_sizes(8, dense=-1)


# Lists of the user's


def test_lists_are_sorted_and_without_doubles() -> None:
    assert checked_sizes([8, 1, 4, 8]) == (1, 4, 8)
    assert checked_sizes(range(3, 0, -1), maximum=3) == (1, 2, 3)
    assert checked_sizes(each for each in (2, 1)) == (1, 2)


def test_numbers_of_numpy_become_int() -> None:
    numpy = pytest.importorskip("numpy")
    ladder = checked_sizes(numpy.array([4, 2]), numpy.int64(4))
    assert ladder == (2, 4)
    assert {type(size) for size in ladder} == {int}
    table, _ = get_cudagraph_sizes(numpy.array([2]), 1, 2, FULL)
    assert table == {1: 2, 2: 2}


@pytest.mark.parametrize("bad", [0, -4, True, False, 2.0, "8", None])
def test_what_is_no_size_is_an_error(bad: Any) -> None:
    with pytest.raises(SizesError, match=r"capture sizes: .* is none"):
        checked_sizes([4, bad])


def test_no_sizes_are_an_error() -> None:
    with pytest.raises(SizesError, match="no capture sizes were given"):
        checked_sizes([])
    with pytest.raises(SizesError, match="no capture sizes were given"):
        round_sizes([], 2, 8)


def test_sizes_above_the_maximum_are_an_error() -> None:
    with pytest.raises(SizesError, match="capture sizes 8, 16: above the maximum of 4"):
        checked_sizes([1, 16, 2, 8, 4], maximum=4)


@settings(deadline=None)
@given(LADDER)
def test_checking_twice_changes_nothing(ladder: tuple[int, ...]) -> None:
    assert checked_sizes(reversed(ladder), ladder[-1]) == ladder


# Multiples


@pytest.mark.parametrize(
    ("sizes", "multiple", "maximum", "expected"),
    [
        ([1, 2, 4, 8, 16], 3, 16, (3, 6, 9, 15)),  # 16 goes down, since 18 is above the maximum
        ([1, 2, 4, 8, 16], 3, 18, (3, 6, 9, 18)),
        ([1, 2, 4, 15], 2, 16, (2, 4, 16)),
        ([1, 2, 4, 15], 2, 15, (2, 4, 14)),
        ([1, 2, 4, 8], (3, 2), 8, (6,)),  # jointly 6, though 3 is no multiple of 2
        ([1, 2, 4, 8], (2, 4), 8, (4, 8)),
        ([1, 2, 4, 8], (), 8, (1, 2, 4, 8)),
        ([1, 40], 4, 12, (4, 12)),
        ([1, 2], 4, 4096, (4,)),  # the maximum is not added
        ([1], 1, 1, (1,)),
    ],
)
def test_multiples(sizes: Any, multiple: Any, maximum: int, expected: tuple[int, ...]) -> None:
    assert round_sizes(sizes, multiple, maximum) == expected


@settings(deadline=None)
@given(LADDER, st.lists(MULTIPLE, min_size=1, max_size=2), st.integers(1, 400))
def test_rounding_never_loses_a_batch(ladder: Any, multiples: list[int], maximum: int) -> None:
    joint = next(n for n in range(1, 577) if all(n % each == 0 for each in multiples))
    if joint > maximum:
        with pytest.raises(SizesError):
            round_sizes(ladder, multiples, maximum)
        return
    rounded = round_sizes(ladder, multiples, maximum)
    last = maximum - maximum % joint
    assert is_ladder(rounded)
    assert len(rounded) <= len(ladder)
    assert all(size % joint == 0 and size <= maximum for size in rounded)
    for rows in range(1, min(ladder[-1], last) + 1):
        size, before = brute(rounded, rows), brute(ladder, rows)
        assert size is not None
        assert before is not None
        assert size < before + joint  # and by less than one multiple is it padded more
    if ladder[-1] >= maximum:
        assert rounded[-1] == last
    assert round_sizes(rounded, multiples, maximum) == rounded
    assert round_sizes(ladder, joint, maximum) == rounded


# Uniform decode


def test_the_widest_decode_is_captured() -> None:
    # 5 requests of 3 tokens fit 16 tokens: a ladder that only rounds up has no graph for them
    assert decode_sizes([1, 2, 4, 8], 3, 8, 16) == (3, 6, 12, 15)
    assert decode_sizes(capture_sizes(8), 3, 8, 4096) == (3, 6, 12, 24)
    assert decode_sizes(capture_sizes(101), 1, 101, 4096)[-1] == 101


def test_long_queries_do_not_raise_the_maximum() -> None:
    assert decode_sizes(capture_sizes(512), 17, 512, 512)[-1] == 510
    with pytest.raises(SizesError, match="the maximum is 16, and sizes must be multiples of 17"):
        decode_sizes(capture_sizes(512), 17, 512, 16)


def test_decode_needs_as_many_sizes_as_there_are_requests() -> None:
    requests = capture_sizes(512)
    assert len(decode_sizes(requests, 17, 512, 10**6)) == len(requests) == 51
    assert len(capture_sizes(512 * 17)) > 500


def test_decode_over_ranks() -> None:
    assert decode_sizes([1, 2, 4, 8], 3, 8, 24, multiple_of=2) == (6, 12, 24)
    assert decode_sizes([1, 2, 4, 8], 3, 8, 24, multiple_of=(2, 4)) == (12, 24)


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 20), st.integers(1, 400), st.data())
def test_every_decode_batch_that_fits_is_covered(
    max_num_reqs: int, query_len: int, max_num_tokens: int, data: st.DataObject
) -> None:
    most = min(max_num_reqs, max_num_tokens // query_len)
    requests = capture_sizes(max_num_reqs, dense=data.draw(st.integers(0, 8)))
    if not most:
        with pytest.raises(SizesError):
            decode_sizes(requests, query_len, max_num_reqs, max_num_tokens)
        return
    ladder = decode_sizes(requests, query_len, max_num_reqs, max_num_tokens)
    assert is_ladder(ladder)
    assert ladder[-1] == most * query_len
    assert all(size % query_len == 0 for size in ladder)
    for count in range(1, most + 1):
        before = brute(requests, count)
        assert before is not None
        assert padded_size(ladder, count * query_len) == min(before, most) * query_len


# Padding


@settings(deadline=None)
@given(LADDER)
def test_the_table_is_the_smallest_size(ladder: tuple[int, ...]) -> None:
    table = padding_table(ladder)
    assert list(table) == list(range(1, ladder[-1] + 1))
    for rows in range(1, ladder[-1] + 1):
        assert table[rows] == padded_size(ladder, rows) == brute(ladder, rows)
    assert padded_size(ladder, ladder[-1] + 1) is None
    assert all(table[size] == size for size in ladder)


def test_without_sizes_nothing_is_padded() -> None:
    assert padding_table(()) == {}
    assert padded_size((), 1) is None
    assert padding_share((), {3: 5}) == 0


def test_share_of_padding() -> None:
    assert padding_share((4, 8), {3: 2, 8: 1}) == 2 / 16
    assert padding_share((4,), {3: 2, 100: 3}) == 2 / 308  # 100 runs without a graph
    assert padding_share((4,), {}) == padding_share((4,), {3: 0}) == 0


@settings(deadline=None)
@given(LADDER, HISTOGRAM)
def test_share_of_padding_is_a_share(ladder: Any, histogram: dict[int, int]) -> None:
    run = sum((brute(ladder, n) or n) * times for n, times in histogram.items())
    real = sum(n * times for n, times in histogram.items())
    assert padding_share(ladder, histogram) == pytest.approx(1 - real / run if run else 0)


@pytest.mark.parametrize("bad", [{0: 1}, {-1: 1}, {1: -1}, {1.5: 1}, {1: 0.5}, {True: 1}, {1: "2"}])
def test_what_is_no_histogram_is_an_error(bad: Any) -> None:
    with pytest.raises(SizesError, match="histogram: "):
        padding_share((4,), bad)


# The two maps that engines know

FOUR = {1: 1, 2: 2, 3: 4, 4: 4}


@pytest.mark.parametrize("sizes", [None, [], ()])
@pytest.mark.parametrize("mode", CUDAGraphMode)
def test_without_sizes_there_are_no_maps(mode: CUDAGraphMode, sizes: Any) -> None:
    assert get_cudagraph_sizes(sizes, 8, 64, mode, 1, True) == ({}, {})


def test_mode_none_has_no_maps() -> None:
    assert get_cudagraph_sizes([1, 2, 4], 8, 64, NONE, 1, True) == ({}, {})


@pytest.mark.parametrize("mode", [PIECEWISE, FULL, DECODE_ONLY, BOTH])
def test_the_two_maps(mode: CUDAGraphMode) -> None:
    assert get_cudagraph_sizes([4, 1, 2], 8, 64, mode) == (FOUR, {})
    by_name = {"cudagraph_mode": mode, "uniform_decode_cudagraph": True}
    assert get_cudagraph_sizes([4, 1, 2], 8, 64, **by_name) == (FOUR, FOUR)


def test_limits_of_nothing() -> None:
    assert get_cudagraph_sizes([4, 1, 2], 0, 0, FULL) == (FOUR, {})
    assert get_cudagraph_sizes([4, 1, 2], 0, 0, FULL, 1, True) == (FOUR, {})
    for limits in ((-1, 8), (8, -1)):
        with pytest.raises(SizesError, match="at least 0"):
            get_cudagraph_sizes([1], *limits, FULL)


def test_decode_map_ends_at_the_requests() -> None:
    table, decode = get_cudagraph_sizes([1, 2, 4, 8, 16], 8, 64, BOTH, 1, True)
    assert table[16] == table[9] == 16
    assert decode == {rows: size for rows, size in table.items() if rows <= 8}
    # one request below: the batches that would pad to 8 have none
    assert max(get_cudagraph_sizes([1, 2, 4, 8, 16], 7, 64, BOTH, 1, True)[1]) == 4


def test_decode_map_begins_at_one_request() -> None:
    _, decode = get_cudagraph_sizes([1, 2, 4, 8, 16], 3, 64, BOTH, 3, True)
    assert decode == {3: 4, 4: 4, 5: 8, 6: 8, 7: 8, 8: 8}


@settings(deadline=None)
@given(LADDER, st.integers(1, 64), st.integers(1, 8))
def test_the_maps_by_their_definition(ladder: Any, max_num_reqs: int, query_len: int) -> None:
    table, decode = get_cudagraph_sizes(ladder, max_num_reqs, 999, DECODE_ONLY, query_len, True)
    assert table == {rows: brute(ladder, rows) for rows in range(1, ladder[-1] + 1)}
    served = range(query_len, max_num_reqs * query_len + 1)
    assert decode == {rows: size for rows, size in table.items() if size in served}


def test_bad_sizes_in_the_maps() -> None:
    with pytest.raises(SizesError, match="0 is none"):
        get_cudagraph_sizes([0], 8, 64, FULL)
