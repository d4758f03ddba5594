"""Ladders: their sizes, rounding that loses no batch, and the maps made from them."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgcompile.errors import SizesError
from cgcompile.ladders import checked_sizes, padded_size, padding_share, padding_table, round_sizes
from cgcompile.modes import CUDAGraphMode
from cgcompile.serving.sizes import capture_sizes, decode_sizes, get_cudagraph_sizes

FULL, DECODE_ONLY = CUDAGraphMode.FULL, CUDAGraphMode.FULL_DECODE_ONLY
BY_8 = (1, 2, 4, *range(8, 256, 8))

MULTIPLE = st.integers(1, 24)
LADDER = st.sets(st.integers(1, 300), min_size=1, max_size=12).map(lambda s: tuple(sorted(s)))
HISTOGRAM = st.dictionaries(st.integers(1, 300), st.integers(0, 9), max_size=12)


def smallest(ladder: Any, rows: int) -> int | None:
    return min((size for size in ladder if size >= rows), default=None)


def is_ladder(sizes: Any) -> bool:
    return isinstance(sizes, tuple) and list(sizes) == sorted(set(sizes)) and sizes[0] > 0


# ---------------------------------------------------------------- examples


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        # the usual ladder, with the exact maximum
        *((capture_sizes(n), tuple(range(1, n + 1))) for n in (1, 2, 3)),
        (capture_sizes(8), (1, 2, 4, 8)),
        (capture_sizes(42), (1, 2, 4, 8, 16, 24, 32, 40, 42)),
        (capture_sizes(256), (*BY_8, 256)),
        (capture_sizes(257), (*BY_8, 256, 257)),
        (capture_sizes(512), (*BY_8, *range(256, 513, 16))),
        (capture_sizes(40, dense=12), (*range(1, 13), 16, 24, 32, 40)),
        (capture_sizes(5, dense=10**12), (1, 2, 3, 4, 5)),
        # lists are sorted, without doubles
        (checked_sizes([8, 1, 4, 8]), (1, 4, 8)),
        (checked_sizes(range(3, 0, -1), maximum=3), (1, 2, 3)),
        (checked_sizes(size for size in (2, 1)), (1, 2)),
        # multiples
        (round_sizes([1, 2, 4, 8, 16], 3, 16), (3, 6, 9, 15)),  # 16 goes down: 18 is above
        (round_sizes([1, 2, 4, 8, 16], 3, 18), (3, 6, 9, 18)),
        (round_sizes([1, 2, 4, 15], 2, 16), (2, 4, 16)),
        (round_sizes([1, 2, 4, 15], 2, 15), (2, 4, 14)),
        (round_sizes([1, 2, 4, 8], (3, 2), 8), (6,)),  # jointly 6, though 3 is no multiple of 2
        (round_sizes([1, 2, 4, 8], (2, 4), 8), (4, 8)),
        (round_sizes([1, 2, 4, 8], (), 8), (1, 2, 4, 8)),
        (round_sizes([1, 40], 4, 12), (4, 12)),
        (round_sizes([1, 2], 4, 4096), (4,)),  # the maximum is not added
        # uniform decode: 5 requests of 3 tokens fit 16 tokens, and are the widest batch
        (decode_sizes([1, 2, 4, 8], 3, 8, 16), (3, 6, 12, 15)),
        (decode_sizes(capture_sizes(8), 3, 8, 4096), (3, 6, 12, 24)),
        (decode_sizes(capture_sizes(101), 1, 101, 4096)[-1], 101),
        (decode_sizes(capture_sizes(512), 17, 512, 512)[-1], 510),
        (len(decode_sizes(capture_sizes(512), 17, 512, 10**6)), len(capture_sizes(512))),
        (decode_sizes([1, 2, 4, 8], 3, 8, 24, multiple_of=2), (6, 12, 24)),
        (decode_sizes([1, 2, 4, 8], 3, 8, 24, multiple_of=(2, 4)), (12, 24)),
        # padding
        (padding_table(()), {}),
        (padded_size((), 1), None),
        (padding_share((), {3: 5}), 0),
        (padding_share((4, 8), {3: 2, 8: 1}), 2 / 16),
        (padding_share((4,), {3: 2, 100: 3}), 2 / 308),  # 100 runs without a graph
        (padding_share((4,), {3: 0}), 0),
        # the two maps
        (get_cudagraph_sizes(np.array([2]), 1, 2, FULL), ({1: 2, 2: 2}, {})),
        (get_cudagraph_sizes([1, 2, 4, 8], 3, 64, FULL, 3, True)[1], {3: 4, 4: 4, **dict.fromkeys(range(5, 9), 8)}),
        (max(get_cudagraph_sizes([1, 2, 4, 8], 7, 64, FULL, 1, True)[1]), 4),
    ],
)  # fmt: skip
def test_examples(result: Any, expected: Any) -> None:
    assert result == expected


def test_numbers_of_numpy_become_int() -> None:
    ladder = checked_sizes(np.array([4, 2]), np.int64(4))
    assert ladder == (2, 4)
    assert {type(size) for size in ladder} == {int}


@pytest.mark.parametrize("bad", [0, -1, True, 2.0, "8", None])
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (capture_sizes, r"maximum = .*; expected a whole number of at least 1\."),
        (lambda bad: capture_sizes(8, multiple_of=bad), "multiple = "),
        (lambda bad: decode_sizes([1], bad, 8, 8), "query_len = "),
        (lambda bad: decode_sizes([1], 1, bad, 8), "max_num_reqs = "),
        (lambda bad: decode_sizes([1], 1, 8, bad), "max_num_tokens = "),
        (lambda bad: get_cudagraph_sizes([1], 8, 8, FULL, bad), "uniform_decode_query_len = "),
        (lambda bad: checked_sizes([4, bad]), "capture sizes: .* is none"),
    ],
)
def test_numbers_out_of_range(call: Any, message: str, bad: Any) -> None:
    with pytest.raises(SizesError, match=message):
        call(bad)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: capture_sizes(8, dense=-1), "dense = -1; expected a whole number of at least 0"),
        (lambda: checked_sizes([]), "no capture sizes were given"),
        (lambda: round_sizes([], 2, 8), "no capture sizes were given"),
        (lambda: checked_sizes([1, 16, 8], maximum=4), "sizes 8, 16: above the maximum of 4"),
        (
            lambda: decode_sizes(capture_sizes(512), 17, 512, 16),
            "the maximum is 16, and sizes must be multiples of 17",
        ),
        (lambda: get_cudagraph_sizes([0], 8, 64, FULL), "0 is none"),
        (lambda: get_cudagraph_sizes([1], -1, 8, FULL), "at least 0"),
        (lambda: get_cudagraph_sizes([1], 8, -1, FULL), "at least 0"),
        *(
            (lambda bad=bad: padding_share((4,), bad), "histogram: ")
            for bad in ({0: 1}, {-1: 1}, {1: -1}, {1.5: 1}, {1: 0.5}, {True: 1}, {1: "2"})
        ),
    ],
)
def test_what_is_refused(call: Any, message: str) -> None:
    with pytest.raises(SizesError, match=message):
        call()


# ---------------------------------------------------------------- properties


@settings(deadline=None)
@given(st.integers(1, 700), st.integers(0, 40), MULTIPLE)
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
    assert checked_sizes(reversed(ladder), ladder[-1]) == ladder
    for rows in range(1, ladder[-1] + 1):
        size = padded_size(ladder, rows)
        assert size == smallest(ladder, rows)
        # padded by no more than the step of the ladder and one multiple
        assert size is not None
        assert size - rows < (8 if rows <= 248 else 16) + multiple


@pytest.mark.slow
@settings(deadline=None)
@given(LADDER, st.lists(MULTIPLE, min_size=1, max_size=2), st.integers(1, 400))
def test_rounding_never_loses_a_batch(ladder: Any, multiples: list[int], maximum: int) -> None:
    joint = next(n for n in range(1, 577) if all(n % factor == 0 for factor in multiples))
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
        size, before = smallest(rounded, rows), smallest(ladder, rows)
        assert size is not None
        assert before is not None
        assert size < before + joint
    if ladder[-1] >= maximum:
        assert rounded[-1] == last
    assert round_sizes(rounded, multiples, maximum) == rounded
    assert round_sizes(ladder, joint, maximum) == rounded


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 20), st.integers(1, 400), st.integers(0, 8))
def test_every_decode_batch_that_fits_is_covered(
    max_num_reqs: int, query_len: int, max_num_tokens: int, dense: int
) -> None:
    most = min(max_num_reqs, max_num_tokens // query_len)
    requests = capture_sizes(max_num_reqs, dense=dense)
    if not most:
        with pytest.raises(SizesError):
            decode_sizes(requests, query_len, max_num_reqs, max_num_tokens)
        return
    ladder = decode_sizes(requests, query_len, max_num_reqs, max_num_tokens)
    assert is_ladder(ladder)
    assert ladder[-1] == most * query_len
    assert all(size % query_len == 0 for size in ladder)
    for count in range(1, most + 1):
        before = smallest(requests, count)
        assert before is not None
        assert padded_size(ladder, count * query_len) == min(before, most) * query_len


@pytest.mark.slow
@settings(deadline=None)
@given(LADDER, HISTOGRAM)
def test_padding(ladder: tuple[int, ...], histogram: dict[int, int]) -> None:
    table = padding_table(ladder)
    assert table == {rows: smallest(ladder, rows) for rows in range(1, ladder[-1] + 1)}
    assert all(padded_size(ladder, rows) == size for rows, size in table.items())
    assert padded_size(ladder, ladder[-1] + 1) is None
    run = sum(table.get(rows, rows) * times for rows, times in histogram.items())
    real = sum(rows * times for rows, times in histogram.items())
    assert padding_share(ladder, histogram) == pytest.approx(1 - real / run if run else 0)


@settings(deadline=None)
@given(LADDER, st.integers(0, 64), st.integers(1, 8), st.sampled_from(CUDAGraphMode), st.booleans())
def test_the_two_maps(
    ladder: Any, max_num_reqs: int, query_len: int, mode: CUDAGraphMode, uniform: bool
) -> None:
    assert get_cudagraph_sizes((), max_num_reqs, 9, mode, query_len, uniform) == ({}, {})
    assert get_cudagraph_sizes(None, max_num_reqs, 9, mode, query_len, uniform) == ({}, {})
    result = get_cudagraph_sizes(
        reversed(ladder),
        max_num_reqs,
        999,
        cudagraph_mode=mode.name,
        uniform_decode_query_len=query_len,
        uniform_decode_cudagraph=uniform,
    )
    if mode is CUDAGraphMode.NONE:
        assert result == ({}, {})
        return
    table = padding_table(ladder)
    served = range(query_len, max_num_reqs * query_len + 1) if uniform else ()
    assert result == (table, {rows: size for rows, size in table.items() if size in served})
