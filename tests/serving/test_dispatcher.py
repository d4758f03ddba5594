"""The dispatcher: what is planned, which graph each batch takes, what is refused.

Tables of every mode and kind of batch are in ``tests/data/dispatch``.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lib.asserts import watched
from lib.oracles import ALWAYS, EVERY_MODE, Batch, Mode, decode, dispatcher, short
from lib.snapshots import assert_snapshot

from cgcompile import AttentionCGSupport, BatchDescriptor
from cgcompile.errors import BatchError, ConfigError
from cgcompile.reasons import Reason
from cgcompile.serving import (
    Axis,
    CudagraphDispatcher,
    LoraCases,
    decode_sizes,
    get_cudagraph_sizes,
    is_uniform_decode,
)
from cgcompile.serving.statistics import text_table

FULL, PIECEWISE, DECODE_ONLY = Mode.FULL, Mode.PIECEWISE, Mode.FULL_DECODE_ONLY

# ---------------------------------------------------------------- tables

BATCHES = {
    "decode 1": decode(1),
    "decode 5": decode(5),
    "decode 8": decode(8),
    "decode 9, too many": decode(9),
    "mixed 3 req 7 tok": Batch(7, 3, 4),
    "prefill 1 req 7 tok": Batch(7, 1, 7),
    "prefill 2 req 3 + 3": Batch(6, 2, 3),
    "tokens alone": Batch(7),
    "mixed 9 req 11 tok": Batch(11, 9, 3),
    "oversize": Batch(40, 3, 30),
    "with LoRA": decode(5, has_lora=True, num_active_loras=1),
    "no tokens": Batch(0),
    "no requests": Batch(0, 0),
}
SPECULATIVE = {
    "decode 1 x 1": decode(1),
    "decode 3 x 1": decode(3),
    "decode 1 x 3": decode(1, 3),
    "decode 5 x 3": decode(5, 3),
    "decode 6 x 3, too many": decode(6, 3),
    "decode 2 x 2, unlisted": decode(2, 2),
    "mixed 3 req 11 tok": Batch(11, 3, 5),
    "uneven 3 req 7 tok": Batch(7, 3, 3),
}
VARLEN = {
    "3 tok, longest 2": Batch(3, 2, 2),
    "3 tok, longest 3": Batch(3, 1, 3),
    "3 tok, longest unknown": Batch(3, 2),
    "9 tok, longest 2": Batch(9, 8, 2),
    "9 tok, longest 4": Batch(9, 4, 4),
    "9 tok, longest 5": Batch(9, 4, 5),
    "9 tok, 9 requests": Batch(9, 9, 1),
    "decode 3 x 1": decode(3),
    "decode 5 x 1": decode(5),
    "decode 5 x 2": decode(5, 2),
    "decode 9 x 2": decode(9, 2),
    "decode 2 x 5": decode(2, 5),
}


def by_mode(batches: dict[str, Batch], restrictions: Any = None, **settings: Any) -> dict:
    columns = {mode.name: dispatcher(mode, **settings) for mode in EVERY_MODE}
    return {
        name: {
            column: short(batch.through(dispatch, **(restrictions or {})))
            for column, dispatch in columns.items()
        }
        for name, batch in batches.items()
    }


def by_support() -> dict:
    rows = {}
    for mode in (PIECEWISE, FULL, DECODE_ONLY, Mode.FULL_AND_PIECEWISE):
        for support in AttentionCGSupport:
            dispatch = dispatcher(mode, query_lens=(1, 3), support=support)
            rows[f"{mode.name}, {support.name}"] = {
                "mode": dispatch.mode.name,
                "decode 5 x 1": short(decode(5).through(dispatch)),
                "decode 5 x 3": short(decode(5, 3).through(dispatch)),
                "mixed 7": short(Batch(7).through(dispatch)),
                "lost": "; ".join(why.detail for why in dispatch.degraded),
            }
    return rows


def by_lora() -> dict:
    """One graph for all numbers of adapters serves a batch without LoRA too."""
    cases = {
        "none": LoraCases(),
        "1, 2, 4, 5": LoraCases((1, 2, 4, 5)),
        "5 alone": LoraCases((5,), False),
        "5": LoraCases((5,)),
    }
    rows = {}
    for active in (None, 0, 1, 3, 4, 5, 6):
        batch = decode(5, has_lora=active is not None, num_active_loras=active or 0)
        row = {name: short(batch.through(dispatcher(axes=[lora]))) for name, lora in cases.items()}
        rows["no LoRA" if active is None else f"{active or 'uncounted'} active"] = row
    return rows


def by_axes() -> dict:
    axes = [Axis("kernel", ["a", "b"]), Axis("max_seqlen", [512, 4096], "pad_up")]
    dispatch = dispatcher(sizes=[8], axes=[*axes, Axis("step", rule="ignored")])
    extras = [("a", 1, 7), ("a", 512, 7), ("b", 513, 8), ("b", 4097, 8), ("c", 1, 8)]
    return {str(extra): {"graph": short(dispatch.dispatch(5, extra=extra))} for extra in extras}


def by_axes_of_full_graphs() -> dict:
    """PIECEWISE graphs are not multiplied by an axis outside of pieces, and serve all values."""
    axes = [Axis("kernel", ["a", "b"], full_only=True), Axis("embeds", [False, True])]
    dispatch = dispatcher(sizes=[8], axes=axes)
    assert [(mode.name, key.extra) for mode, key in dispatch.plan()] == [
        ("PIECEWISE", (None, True)),
        ("PIECEWISE", (None, False)),
        *(("FULL", (kernel, embeds)) for kernel in "ba" for embeds in (True, False)),
    ]
    rows = {}
    for extra in [("a", True), ("b", False), ("c", True), ("a", None), ("c", None)]:
        rows[str(extra)] = {
            "decode": short(dispatch.dispatch(5, 5, uniform_decode=True, extra=extra)),
            "mixed": short(dispatch.dispatch(5, 2, extra=extra)),
            "oversize": short(dispatch.dispatch(9, extra=extra)),
            "no PIECEWISE": short(dispatch.dispatch(5, extra=extra, invalid_modes=[PIECEWISE])),
            "mode FULL": short(dispatcher(FULL, [8], axes=axes).dispatch(5, extra=extra)),
        }
    return rows


def by_length() -> dict:
    dispatch = dispatcher(DECODE_ONLY, varlen_decode_sizes={4: [4, 16], 2: [4]})
    return {name: {"graph": short(batch.through(dispatch))} for name, batch in VARLEN.items()}


TABLES: dict[str, Callable[[], dict]] = {
    "one_token_a_request": lambda: by_mode(BATCHES),
    "speculative": lambda: by_mode(SPECULATIVE, query_lens=(1, 3)),
    "full_excluded": lambda: by_mode(BATCHES, {"invalid_modes": {FULL}}),  # cascade attention
    "attention_support": by_support,
    "lora": by_lora,
    "axes": by_axes,
    "axes_of_full_graphs": by_axes_of_full_graphs,
    "several_lengths": by_length,
}


@pytest.mark.parametrize("name", TABLES)
def test_every_kind_of_batch(name: str) -> None:
    rows = TABLES[name]()
    head = next(iter(rows.values()))
    lines = [("batch", *head), *((batch, *cells.values()) for batch, cells in rows.items())]
    assert_snapshot(f"dispatch/{name}", "\n".join(text_table(lines)))


# ---------------------------------------------------------------- what is planned


def test_number_of_graphs_per_mode() -> None:
    def planned(mode: Mode, **more: Any) -> Counter[str]:
        return Counter(found.name for found, _ in dispatcher(mode, [1, 8], **more).plan())

    assert planned(Mode.NONE) == {}
    assert planned(FULL) == planned(DECODE_ONLY) == {"FULL": 2}
    assert planned(PIECEWISE) == {"PIECEWISE": 2}
    assert planned(Mode.FULL_AND_PIECEWISE) == {"FULL": 2, "PIECEWISE": 2}
    assert planned(FULL, axes=[LoraCases((1, 2, 4, 5))]) == {"FULL": 10}


@pytest.mark.parametrize(
    ("cases", "listed"),
    [
        (LoraCases(), (0,)),
        (LoraCases((2, 1)), (0, 1, 2)),
        (LoraCases((5,), False), (5,)),
        (LoraCases((5,)), (0, 5)),
    ],
)
def test_lora_cases(cases: LoraCases, listed: tuple[int, ...]) -> None:
    assert cases.listed() == listed


def test_largest_first_and_of_one_size_the_most_demanding_first() -> None:
    lora = LoraCases((2,))
    plan = dispatcher(sizes=[4], max_num_reqs=4, query_lens=(1, 2), axes=lora).plan()
    assert [(mode.name, key.num_reqs, key.num_active_loras) for mode, key in plan] == [
        ("PIECEWISE", None, 2),
        ("PIECEWISE", None, 0),
        ("FULL", 4, 2),
        ("FULL", 4, 0),
        ("FULL", 2, 2),
        ("FULL", 2, 0),
    ]


@pytest.mark.parametrize(
    ("settings", "expected"),  # (tokens, requests, query length or bound) of the FULL graphs
    [
        ({"mode": FULL, "sizes": [4, 16], "max_num_reqs": 6}, [(16, 6, None), (4, 4, None)]),
        ({"query_lens": {3: [3, 18]}, "max_num_reqs": 6}, [(18, 6, 3), (3, 1, 3)]),
        # sizes of decode come from requests, and contain the most that fits
        (
            {"query_lens": {q: decode_sizes([2, 99], q, 8, 99) for q in (1, 3)}},
            [(24, 8, 3), (8, 8, 1), (6, 2, 3), (2, 2, 1)],
        ),
        ({"query_lens": (3,), "max_num_tokens": 16}, [(15, 5, 3)]),
        # sizes in tokens are rounded down to whole requests
        ({"sizes": [3, 6, 9], "query_lens": (3,), "max_num_reqs": 3}, [(9, 3, 3), (6, 2, 3), (3, 1, 3)]),
        ({"sizes": [4, 8], "query_lens": (3,), "max_num_reqs": 2}, [(6, 2, 3), (3, 1, 3)]),
        # no query is longer than its graph
        ({"varlen_decode_sizes": {4: [2, 8], 2: [2]}, "query_lens": ()}, [(8, 8, 4), (2, 2, 2)]),
    ],
)  # fmt: skip
def test_shapes_of_full_graphs(settings: dict[str, Any], expected: Any) -> None:
    plan = dispatcher(**{"mode": DECODE_ONLY, "sizes": [], **settings}).plan()
    shapes = [(d.num_tokens, d.num_reqs, d.query_len or d.max_query_len) for _, d in plan]
    assert shapes == expected


LADDER = st.lists(st.integers(1, 40), min_size=1, max_size=6, unique=True).map(sorted)


@settings(deadline=None)
@given(LADDER, st.integers(1, 5), st.integers(1, 8))
def test_decode_is_padded_no_further_than_by_sizes_in_tokens(
    sizes: list[int], query_len: int, max_num_reqs: int
) -> None:
    limits = {"max_num_reqs": max_num_reqs, "max_num_tokens": 64}
    dispatch = dispatcher(DECODE_ONLY, sizes, query_lens=(query_len,), **limits)
    _, plain = get_cudagraph_sizes(sizes, max_num_reqs, 64, Mode.FULL, query_len, True)
    for reqs in range(1, max_num_reqs + 1):
        mode, key, _ = dispatch.dispatch(reqs * query_len, reqs, query_len, True)
        assert mode is FULL  # the most requests always have a graph
        assert key.num_tokens >= reqs * query_len
        assert key.num_tokens <= plain.get(reqs * query_len, max_num_reqs * query_len)
    assert len(dispatch.plan()) <= len(set(plain.values())) + 1


# ---------------------------------------------------------------- single batches

DRAFTS = {"query_lens": {1: [2, 4, 6, 8], 2: [2, 4, 6, 8], 3: [3, 6], 4: [4, 8]}}
BESIDE = {"sizes": [1, 2, 4, 8, 16, 24], "query_lens": {3: [3, 6, 9, 18, 24]}}
BOUND = {"sizes": [16], "varlen_decode_sizes": {3: [8]}}


@pytest.mark.parametrize(
    ("settings", "batch", "expected"),
    [
        # several graphs have 4 tokens: a search that stops at the first of them misses one
        (DRAFTS, decode(3), "FULL(4t,4r,u1)"),
        (DRAFTS, decode(2, 2), "FULL(4t,2r,u2)"),
        (DRAFTS, decode(1, 4), "FULL(4t,1r,u4)"),
        (BESIDE, decode(4, 3), "FULL(18t,6r,u3)"),
        (BESIDE, decode(3, 3), "FULL(9t,3r,u3)"),
        (BESIDE, Batch(12, 4, 5), "PW(16t)"),
        (BESIDE, Batch(3, 2, 2), "PW(4t)"),  # 3 tokens: a size of decode alone
        (BOUND, Batch(6, 3, 3), "FULL(8t,8r,<=3)"),
        (BOUND, Batch(6, 3, None), "PW(16t)"),
        (BOUND, Batch(6, 3, 4), "PW(16t)"),
        ({"mode": FULL}, Batch(2, 3), "FULL(4t,4r)"),  # a request without tokens needs a row
        # numbers that may be left out where they are implied
        ({"query_lens": (3,)}, Batch(6, uniform_decode=True), "FULL(6t,2r,u3)"),
        ({"query_lens": (1, 3)}, Batch(6, None, 3, True), "FULL(6t,2r,u3)"),
        ({"query_lens": (1, 3)}, Batch(6, 2, None, True), "FULL(6t,2r,u3)"),
        ({}, Batch(np.int64(5), np.int64(5), np.int32(1), np.bool_(True)), "FULL(8t,8r,u1)"),
        ({}, Batch(np.int64(40)), "NONE(40t) oversize"),
        ({"piecewise": False}, Batch(7), "NONE(7t) not_piecewise"),
    ],
)
def test_the_graph_of_a_batch(settings: Any, batch: Batch, expected: str) -> None:
    dispatched = batch.through(dispatcher(**settings))
    assert short(dispatched) == expected
    assert type(dispatched.descriptor.num_tokens) is int


@pytest.mark.parametrize(
    ("query_lens", "prefilling", "expected"),
    [
        ([1, 1, 1], [False] * 3, True),
        ([3, 3], [False] * 2, True),
        ([3, 3], [True] * 2, False),
        ([1, 1], [False, True], False),
        ([1, 2], [False] * 2, False),
        ([], [], False),
    ],
)
def test_prefills_of_one_length_are_no_decode(query_lens, prefilling, expected: bool) -> None:
    assert is_uniform_decode(query_lens, prefilling) is expected


@pytest.mark.parametrize(
    ("batch", "restrictions", "expected"),
    [
        (decode(5), {"valid_modes": {Mode.NONE}}, "NONE(5t) mode_excluded"),
        (decode(5), {"valid_modes": set()}, "NONE(5t) mode_excluded"),
        (decode(5), {"valid_modes": [PIECEWISE]}, "PW(8t) mode_excluded"),
        (decode(5), {"valid_modes": {FULL}}, "FULL(8t,8r,u1)"),
        (Batch(5), {"valid_modes": {FULL}}, "NONE(5t) mode_excluded"),
        (decode(5), {"invalid_modes": frozenset({PIECEWISE})}, "FULL(8t,8r,u1)"),
        (decode(5), {"valid_modes": {FULL, PIECEWISE}, "invalid_modes": {FULL}}, "PW(8t) mode_excluded"),
    ],
)  # fmt: skip
def test_modes_of_one_step(batch: Batch, restrictions: Any, expected: str) -> None:
    assert short(batch.through(dispatcher(), **restrictions)) == expected


# ---------------------------------------------------------------- what is captured


def test_captured_graphs() -> None:
    dispatch = dispatcher(sizes=[8])
    key = BatchDescriptor(8, 8, True)
    assert short(decode(5).through(dispatch)) == "FULL(8t,8r,u1)"  # lazily: the step captures it
    dispatch.only_captured = True
    assert short(decode(5).through(dispatch)) == "NONE(5t) not_captured"
    dispatch.captured(PIECEWISE, BatchDescriptor(8))
    assert short(decode(5).through(dispatch)) == "PW(8t) not_captured"
    dispatch.captured(FULL, key)
    assert short(decode(5).through(dispatch)) == "FULL(8t,8r,u1)"
    assert dispatch.is_captured(FULL, key)
    dispatch.forget()
    assert not dispatch.is_captured(FULL, key)
    assert short(decode(5).through(dispatch)) == "NONE(5t) not_captured"


@pytest.mark.parametrize("lazily", [False, True])
def test_batches_skip_a_missing_graph_for_the_next_larger_one(lazily: bool) -> None:
    dispatch = dispatcher(sizes=[2, 4, 8])
    dispatch.only_captured = not lazily
    for mode, key in dispatch.plan():
        dispatch.captured(mode, key)
    dispatch.refused(FULL, BatchDescriptor(4, 4, True), "no room")
    dispatch.refused(PIECEWISE, BatchDescriptor(4), "no room")
    assert short(decode(3).through(dispatch)) == "FULL(8t,8r,u1)"
    assert decode(3).through(dispatch).why is None
    assert short(Batch(3, 2).through(dispatch)).startswith("PW(8t)")
    dispatch.refused(FULL, BatchDescriptor(8, 8, True), "no room either")
    result = decode(3).through(dispatch)
    assert short(result) == "PW(8t) not_captured"
    assert result.why.detail.endswith("was refused: no room")  # of the size that fits best
    dispatch.captured(FULL, BatchDescriptor(4, 4, True))
    assert short(decode(3).through(dispatch)) == "FULL(4t,4r,u1)"


def test_a_missing_bounded_graph_leaves_one_of_a_wider_bound() -> None:
    dispatch = dispatcher(DECODE_ONLY, [8], varlen_decode_sizes={2: [8], 4: [8]})
    batch = Batch(8, 4, 2, False)
    assert batch.through(dispatch).descriptor.max_query_len == 2
    dispatch.refused(FULL, BatchDescriptor(8, 8, max_query_len=2), "no room")
    assert batch.through(dispatch).descriptor.max_query_len == 4


def test_planned_sizes() -> None:
    dispatch = dispatcher(FULL, [4, 8])
    assert [dispatch.planned_size(n) for n in (0, np.int64(3), 8, 9)] == [None, 4, 8, None]
    for bad in (-1, "3", 3.5, None, True):
        for method in (dispatch.planned_size, dispatch.dispatch):
            with pytest.raises(BatchError, match="num_tokens"):
                method(bad)


# ---------------------------------------------------------------- lesser modes, bad values


def test_lesser_modes_have_reasons(caplog) -> None:
    dispatch = dispatcher(piecewise=False)
    assert (dispatch.mode, dispatch.asked) == (DECODE_ONLY, Mode.FULL_AND_PIECEWISE)
    assert [why.reason for why in dispatch.degraded] == [Reason.NOT_PIECEWISE]
    uniform = dispatcher(FULL, piecewise=False, support=AttentionCGSupport.UNIFORM_BATCH)
    assert uniform.mode is DECODE_ONLY
    assert short(Batch(7).through(uniform)) == "NONE(7t) attention_support"
    assert dispatcher(support=AttentionCGSupport.NEVER).mode is PIECEWISE
    assert "attention support is NEVER" in caplog.text


@pytest.mark.parametrize("mode", [FULL, PIECEWISE, DECODE_ONLY, Mode.FULL_AND_PIECEWISE])
def test_a_mode_without_any_graph_is_refused(mode) -> None:
    with pytest.raises(ConfigError, match=f"mode {mode.name} is impossible"):
        dispatcher(mode, support=AttentionCGSupport.NEVER, piecewise=False)


def raises(call: Callable[[], Any], error: type[Exception], message: str) -> Any:
    return pytest.param(call, error, message, id=message)


with_axis = partial(dispatcher, axes=[Axis("kernel", [1, 2])])
AXIS = "one hashable value per axis"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        *(
            raises(partial(dispatcher, **settings), ConfigError, message)
            for settings, message in [
                ({"sizes": [0]}, r"sizes = \(0,\)"),
                ({"sizes": [True]}, r"sizes = \(True,\)"),
                ({"sizes": []}, "at least one size for mode FULL_AND_PIECEWISE"),
                ({"max_num_tokens": 8}, "sizes = 16; expected at most max_num_tokens = 8"),
                ({"max_num_reqs": 0}, "max_num_reqs"),
                ({"query_lens": {3: [8]}}, r"query_lens\[3\] = 8; expected multiples of 3, at"),
                ({"query_lens": {3: [27]}}, r"at most 3 x max_num_reqs = 24"),
                ({"query_lens": {3: []}}, "at least one size"),
                ({"query_lens": {}}, "at least one length of decode"),
                ({"axes": [LoraCases((1,)), LoraCases((2,))]}, "at most one LoraCases"),
                ({"query_lens": (17,)}, "query_lens = 17; expected at most max_num_tokens = 16"),
                ({"varlen_decode_sizes": {2: [17]}}, "at most 2 x max_num_reqs = 16"),
                ({"varlen_decode_sizes": {0: [1]}}, "varlen_decode_sizes"),
            ]
        ),
        raises(lambda: LoraCases((), False), ConfigError, "no batch that has a graph"),
        raises(lambda: Axis("a", [1], "nearest"), ConfigError, "rule = 'nearest'"),
        raises(lambda: Axis("a", []), ConfigError, r"values = \(\)"),
        raises(lambda: Axis("a", [1], "ignored"), ConfigError, r"values = \(1,\)"),
        raises(lambda: Axis("a", [1, "b"], "pad_up"), ConfigError, "which have an order"),
        *(
            raises(partial(batch.through, dispatcher()), BatchError, message)
            for batch, message in [
                (Batch(-1), "num_tokens = -1"),
                (Batch(4, 0), "num_reqs = 0"),
                (Batch(0, -1), "num_reqs = -1"),
                (Batch(7, 3, None, True), "num_tokens=7, num_reqs=3"),
                (Batch(6, 3, 3, True), "max_query_len=3"),
                (Batch(3, 5, None, True), "num_reqs=5"),
                (Batch(6, None, 0, True), "max_query_len=0"),
                (Batch(5, 5, num_active_loras=2), "num_active_loras = 2"),
                (Batch(5, 5, has_lora=True, num_active_loras=-2), "num_active_loras = -2"),
            ]
        ),
        *(
            raises(partial(with_axis().dispatch, 4, extra=extra), BatchError, AXIS)
            for extra in [(), (1, 2), [1], ([],)]
        ),
        raises(lambda: dispatcher().dispatch(4, extra=(1,)), BatchError, AXIS),
        raises(
            lambda: dispatcher(query_lens=(1, 3)).dispatch(6, uniform_decode=True),
            BatchError,
            "does not state its own",
        ),
        *(
            raises(
                partial(decode(5).through, dispatcher(), **{name: {Mode.FULL_AND_PIECEWISE}}),
                BatchError,
                name,
            )
            for name in ("valid_modes", "invalid_modes")
        ),
        raises(
            lambda: dispatcher(sizes=[8]).captured(FULL, BatchDescriptor(7)),
            BatchError,
            "no graph is planned for mode FULL",
        ),
        raises(
            lambda: is_uniform_decode([1, 1], [False]), BatchError, "2 query lengths and 1 flags"
        ),
    ],
)
def test_what_is_refused(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


# ---------------------------------------------------------------- cost


def calls_of(function, *args) -> int:
    """The number of functions, in Python and in C, that one call enters."""
    count = 0

    def seen(frame, event, arg) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    watched(partial(function, *args), seen)
    return count


def test_a_step_costs_the_same_on_any_ladder() -> None:
    def costs(ladder) -> list[int]:
        dispatch = dispatcher(sizes=ladder, max_num_reqs=4000)
        batches = [(5, 5, 1, True), (7, 3, 4), (9000, 3, 4)]
        return [calls_of(dispatch.dispatch, *batch) for batch in batches]

    few, many = costs([8, 4000]), costs(range(1, 4001))
    assert few == many
    assert max(few) < 15
    assert max(few[:2]) < 8


def test_a_hit_makes_no_object() -> None:
    dispatch = dispatcher()
    assert decode(5).through(dispatch) is decode(7).through(dispatch)


@pytest.mark.parametrize(
    ("earlier", "now", "advice"),
    [
        ({"decode_sizes": {3: [3, 9]}}, {"query_lens": {3: [3, 9]}}, "give them as query_lens"),
        (
            {"query_lens": (1, 3), "decode_num_reqs": [2, 99]},
            {"query_lens": {1: [2, 8], 3: [6, 24]}},
            "use query_lens={length: decode_sizes",
        ),
        ({"decode_num_reqs": [2]}, {"query_lens": {1: [2, 8]}}, "use query_lens="),
        (
            {"lora": LoraCases((2,)), "axes": Axis("a", [1])},
            {"axes": [Axis("a", [1]), LoraCases((2,))]},
            "give the LoraCases among axes",
        ),
        ({"support_why": "ns::attend"}, {}, "leave it out"),
    ],
)
def test_earlier_arguments_work_with_a_warning(earlier, now, advice) -> None:
    with pytest.warns(FutureWarning, match=advice) as warned:
        former = CudagraphDispatcher(
            DECODE_ONLY, [4, 16], max_num_reqs=8, support=ALWAYS, **earlier
        )
    assert warned[0].filename == __file__
    present = CudagraphDispatcher(DECODE_ONLY, [4, 16], max_num_reqs=8, support=ALWAYS, **now)
    assert former.plan() == present.plan()
    assert (former.limits, former.axes) == (present.limits, present.axes)


def test_earlier_arguments_that_contradict_each_other_are_refused() -> None:
    for more in ({"query_lens": (3,)}, {"decode_num_reqs": [1]}):
        with (
            pytest.warns(FutureWarning),
            pytest.raises(ConfigError, match="sizes of uniform decode"),
        ):
            dispatcher(decode_sizes={1: [1]}, **more)
    with pytest.warns(FutureWarning), pytest.raises(ConfigError, match="axes = 3"):
        dispatcher(lora=LoraCases((2,)), axes=3)
    with pytest.warns(FutureWarning, match="only_captured is deprecated: set that attribute"):
        assert dispatcher(only_captured=True).only_captured
    with pytest.raises(ConfigError, match="only_captured = 'x'; expected bool"):
        dispatcher().only_captured = "x"
