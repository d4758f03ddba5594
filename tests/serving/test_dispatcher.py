"""The dispatcher: what is planned, what is refused, and the cases that other systems miss."""

from collections import Counter
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lib.asserts import watched
from lib.oracles import Batch, Mode, decode, dispatcher, short

from cgcompile import AttentionCGSupport, BatchDescriptor, CUDAGraphMode
from cgcompile.errors import BatchError, ConfigError
from cgcompile.reasons import Reason
from cgcompile.serving.dispatcher import is_uniform_decode
from cgcompile.serving.plan import Axis, LoraCases
from cgcompile.serving.sizes import get_cudagraph_sizes

FULL, PIECEWISE = Mode.FULL, Mode.PIECEWISE


def planned(*args, **settings) -> Counter[str]:
    return Counter(mode.name for mode, _ in dispatcher(*args, **settings).plan())


# What is planned


def test_number_of_graphs_per_mode() -> None:
    two = [1, 8]
    assert planned(Mode.NONE, two) == {}
    assert planned(FULL, two) == {"FULL": 2}
    assert planned(PIECEWISE, two) == {"PIECEWISE": 2}
    assert planned(Mode.FULL_DECODE_ONLY, two) == {"FULL": 2}
    assert planned(Mode.FULL_AND_PIECEWISE, two) == {"FULL": 2, "PIECEWISE": 2}
    assert planned(FULL, two, lora=LoraCases.specialised(4)) == {"FULL": 10}


def test_lora_cases() -> None:
    assert LoraCases().listed() == (0,)
    assert LoraCases.specialised(1).listed() == (0, 1, 2)
    assert LoraCases.specialised(4).listed() == (0, 1, 2, 4, 5)
    assert LoraCases.specialised(6).listed() == (0, 1, 2, 4, 6, 7)
    assert LoraCases.shared(4).listed() == (5,)
    assert LoraCases.shared(4, without=True).listed() == (0, 5)


def test_largest_first_and_of_one_size_the_most_demanding_first() -> None:
    settings = {"query_lens": (1, 2), "lora": LoraCases.shared(1, without=True)}
    found = dispatcher(sizes=[4], max_num_reqs=4, **settings)
    assert [(mode.name, key.num_tokens, key.num_reqs, key.num_active_loras) for mode, key in found.plan()] == [
        ("PIECEWISE", 4, None, 2),
        ("PIECEWISE", 4, None, 0),
        ("FULL", 4, 4, 2),
        ("FULL", 4, 4, 0),
        ("FULL", 4, 2, 2),
        ("FULL", 4, 2, 0),
    ]  # fmt: skip


def test_numbers_of_requests_are_exact() -> None:
    mixed = dispatcher(FULL, [4, 16], max_num_reqs=6)
    assert [key.num_reqs for _, key in mixed.plan()] == [6, 4]
    uniform = dispatcher(Mode.FULL_DECODE_ONLY, [], decode_sizes={3: [3, 18]}, max_num_reqs=6)
    assert [(key.num_reqs, key.query_len) for _, key in uniform.plan()] == [(6, 3), (1, 3)]


def test_sizes_of_decode_come_from_requests_and_contain_the_most_that_fits() -> None:
    found = dispatcher(Mode.FULL_DECODE_ONLY, [16], query_lens=(1, 3), decode_num_reqs=[2, 99])
    sizes = {q: [k.num_tokens for _, k in found.plan() if k.query_len == q] for q in (1, 3)}
    assert sizes == {1: [8, 2], 3: [24, 6]}
    limited = dispatcher(Mode.FULL_DECODE_ONLY, [16], query_lens=(3,), max_num_tokens=16)
    assert [key.num_tokens for _, key in limited.plan()] == [15]


def test_sizes_in_tokens_are_sizes_of_decode() -> None:
    every = dispatcher(Mode.FULL_DECODE_ONLY, [3, 6, 9, 12], query_lens=(3,), max_num_reqs=4)
    assert [key.num_tokens for _, key in every.plan()] == [12, 9, 6, 3]
    assert short(every.dispatch(9, 3, 3, True)) == "FULL(9t,3r,u3)"
    between = dispatcher(Mode.FULL_DECODE_ONLY, [4, 8], query_lens=(3,), max_num_reqs=2)
    assert [key.num_tokens for _, key in between.plan()] == [6, 3]


LADDER = st.lists(st.integers(1, 40), min_size=1, max_size=6, unique=True).map(sorted)


@settings(deadline=None)
@given(LADDER, st.integers(1, 5), st.integers(1, 8))
def test_decode_is_padded_no_further_than_by_sizes_in_tokens(
    sizes: list[int], query_len: int, max_num_reqs: int
) -> None:
    limits = {"max_num_reqs": max_num_reqs, "max_num_tokens": 64}
    found = dispatcher(Mode.FULL_DECODE_ONLY, sizes, query_lens=(query_len,), **limits)
    _, plain = get_cudagraph_sizes(sizes, max_num_reqs, 64, Mode.FULL, query_len, True)
    for reqs in range(1, max_num_reqs + 1):
        mode, key, _ = found.dispatch(reqs * query_len, reqs, query_len, True)
        assert mode is FULL  # the most requests always have a graph
        assert key.num_tokens >= reqs * query_len
        assert key.num_tokens <= plain.get(reqs * query_len, max_num_reqs * query_len)
    assert len(found.plan()) <= len(set(plain.values())) + 1


# What other systems miss


def test_every_length_of_dynamic_drafts_finds_its_graph() -> None:
    """Several graphs have 4 tokens; a search that stops at the first of them misses one."""
    sizes = [2, 4, 6, 8]
    ladders = {q: [n for n in range(q, 9) if n % q == 0] for q in (1, 2, 3, 4)}
    ladders[1] = sizes
    found = dispatcher(sizes=sizes, decode_sizes=ladders)
    assert short(decode(3).through(found)) == "FULL(4t,4r,u1)"
    assert short(decode(2, 2).through(found)) == "FULL(4t,2r,u2)"
    assert short(decode(1, 4).through(found)) == "FULL(4t,1r,u4)"


def test_decode_sizes_beside_the_sizes_of_other_batches() -> None:
    found = dispatcher(
        sizes=[1, 2, 4, 8, 16, 24], decode_sizes={3: [3, 6, 9, 18, 24]}, max_num_reqs=8
    )
    assert short(decode(4, 3).through(found)) == "FULL(18t,6r,u3)"
    assert short(decode(3, 3).through(found)) == "FULL(9t,3r,u3)"
    assert short(Batch(12, 4, 5).through(found)) == "PW(16t)"
    assert short(Batch(3, 2, 2).through(found)) == "PW(4t)"  # 3 tokens: a size of decode alone


def test_a_bound_takes_shorter_queries_and_not_unknown_ones() -> None:
    found = dispatcher(sizes=[16], varlen_decode_sizes={3: [8]})
    assert short(Batch(6, 3, 3).through(found)) == "FULL(8t,8r,<=3)"
    assert short(Batch(6, 3, None).through(found)) == "PW(16t)"
    assert short(Batch(6, 3, 4).through(found)) == "PW(16t)"


def test_no_query_is_longer_than_its_graph() -> None:
    found = dispatcher(
        Mode.FULL_DECODE_ONLY, [], varlen_decode_sizes={4: [2, 8], 2: [2]}, query_lens=()
    )
    assert [(k.num_tokens, k.max_query_len) for _, k in found.plan()] == [(8, 4), (2, 2)]


def test_requests_without_tokens_find_their_place() -> None:
    assert short(Batch(2, 3).through(dispatcher(FULL))) == "FULL(4t,4r)"


def test_prefills_of_one_length_are_no_decode() -> None:
    assert is_uniform_decode([1, 1, 1], [False] * 3)
    assert is_uniform_decode([3, 3], [False] * 2)
    assert not is_uniform_decode([3, 3], [True] * 2)
    assert not is_uniform_decode([1, 1], [False, True])
    assert not is_uniform_decode([1, 2], [False] * 2)
    assert not is_uniform_decode([], [])
    with pytest.raises(BatchError, match="2 query lengths and 1 flags"):
        is_uniform_decode([1, 1], [False])


def test_uniform_numbers_may_be_left_out_where_they_are_known() -> None:
    one = dispatcher(query_lens=(3,))
    assert short(one.dispatch(6, uniform_decode=True)) == "FULL(6t,2r,u3)"
    two = dispatcher(query_lens=(1, 3))
    assert short(two.dispatch(6, max_query_len=3, uniform_decode=True)) == "FULL(6t,2r,u3)"
    assert short(two.dispatch(6, num_reqs=2, uniform_decode=True)) == "FULL(6t,2r,u3)"
    with pytest.raises(BatchError, match="nothing says which"):
        two.dispatch(6, uniform_decode=True)


# What is captured


def test_only_captured_graphs_are_dispatched_if_told_so() -> None:
    found = dispatcher(sizes=[8])
    assert short(decode(5).through(found)) == "FULL(8t,8r,u1)"  # lazily: the step captures it
    found.only_captured = True
    assert short(decode(5).through(found)) == "NONE(5t) not_captured"
    found.captured(PIECEWISE, BatchDescriptor(8))
    assert short(decode(5).through(found)) == "PW(8t) not_captured"
    found.captured(FULL, BatchDescriptor(8, 8, True))
    assert short(decode(5).through(found)) == "FULL(8t,8r,u1)"
    assert found.is_captured(FULL, BatchDescriptor(8, 8, True))
    found.forget()
    assert not found.is_captured(FULL, BatchDescriptor(8, 8, True))
    assert short(decode(5).through(found)) == "NONE(5t) not_captured"


def test_a_refused_graph_is_not_dispatched_even_lazily() -> None:
    found = dispatcher(sizes=[8])
    key = BatchDescriptor(8, 8, True)
    found.refused(FULL, key, "aten::item reads a tensor")
    answer = decode(5).through(found)
    assert short(answer) == "PW(8t) not_captured"
    assert answer.why.detail.endswith("was refused: aten::item reads a tensor")
    found.captured(FULL, key)
    assert short(decode(5).through(found)) == "FULL(8t,8r,u1)"
    with pytest.raises(BatchError, match="no graph is planned for mode FULL"):
        found.captured(FULL, BatchDescriptor(7))


@pytest.mark.parametrize("lazily", [False, True])
def test_batches_go_past_a_missing_graph_to_the_next_larger_one(lazily: bool) -> None:
    found = dispatcher(sizes=[2, 4, 8])
    found.only_captured = not lazily
    for mode, key in found.plan():
        found.captured(mode, key)
    found.refused(FULL, BatchDescriptor(4, 4, True), "no room")
    found.refused(PIECEWISE, BatchDescriptor(4), "no room")
    assert short(decode(3).through(found)) == "FULL(8t,8r,u1)"
    assert decode(3).through(found).why is None
    assert short(Batch(3, 2).through(found)).startswith("PW(8t)")
    found.refused(FULL, BatchDescriptor(8, 8, True), "no room either")
    answer = decode(3).through(found)
    assert short(answer) == "PW(8t) not_captured"
    assert answer.why.detail.endswith("was refused: no room")  # of the size that fits best
    found.captured(FULL, BatchDescriptor(4, 4, True))
    assert short(decode(3).through(found)) == "FULL(4t,4r,u1)"


def test_a_missing_bounded_graph_leaves_one_of_a_wider_bound() -> None:
    found = dispatcher(Mode.FULL_DECODE_ONLY, [8], varlen_decode_sizes={2: [8], 4: [8]})
    batch = Batch(8, 4, 2, False)
    assert batch.through(found).descriptor.max_query_len == 2
    found.refused(FULL, BatchDescriptor(8, 8, max_query_len=2), "no room")
    assert batch.through(found).descriptor.max_query_len == 4


# Modes of one step


def test_modes_of_one_step() -> None:
    found = dispatcher()
    batch = decode(5)
    assert short(batch.through(found, valid_modes={Mode.NONE})) == "NONE(5t) mode_excluded"
    assert short(batch.through(found, valid_modes=set())) == "NONE(5t) mode_excluded"
    assert short(batch.through(found, valid_modes=[PIECEWISE])) == "PW(8t) mode_excluded"
    assert short(batch.through(found, valid_modes={FULL})) == "FULL(8t,8r,u1)"
    assert short(Batch(5).through(found, valid_modes={FULL})) == "NONE(5t) mode_excluded"
    assert short(batch.through(found, invalid_modes=frozenset({PIECEWISE}))) == "FULL(8t,8r,u1)"
    both = {"valid_modes": {FULL, PIECEWISE}, "invalid_modes": {FULL}}
    assert short(batch.through(found, **both)) == "PW(8t) mode_excluded"
    for name in ("valid_modes", "invalid_modes"):
        with pytest.raises(BatchError, match=name):
            batch.through(found, **{name: {Mode.FULL_AND_PIECEWISE}})


def test_without_pieces() -> None:
    found = dispatcher(piecewise=False)
    assert found.mode is Mode.FULL_DECODE_ONLY
    assert found.asked is Mode.FULL_AND_PIECEWISE
    assert [why.reason for why in found.degraded] == [Reason.NOT_PIECEWISE]
    assert short(Batch(7).through(found)) == "NONE(7t) not_piecewise"
    uniform = dispatcher(FULL, piecewise=False, support=AttentionCGSupport.UNIFORM_BATCH)
    assert uniform.mode is Mode.FULL_DECODE_ONLY
    assert short(Batch(7).through(uniform)) == "NONE(7t) attention_support"


def test_degrading_is_logged_and_names_the_attention(caplog) -> None:
    made = {"support": AttentionCGSupport.NEVER, "support_why": "ns::attend"}
    assert dispatcher(**made).mode is PIECEWISE
    assert "attention support is NEVER (ns::attend)" in caplog.text


@pytest.mark.parametrize("mode", [FULL, PIECEWISE, Mode.FULL_DECODE_ONLY, Mode.FULL_AND_PIECEWISE])
def test_a_mode_without_any_graph_is_refused(mode) -> None:
    with pytest.raises(ConfigError, match=f"mode {mode.name} is impossible"):
        dispatcher(mode, support=AttentionCGSupport.NEVER, piecewise=False)


# Bad numbers


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sizes": [0]}, r"sizes = \(0,\)"),
        ({"sizes": [True]}, r"sizes = \(True,\)"),
        ({"sizes": []}, "at least one size for mode FULL_AND_PIECEWISE"),
        ({"max_num_tokens": 8}, "sizes = 16; expected at most max_num_tokens = 8"),
        ({"max_num_reqs": 0}, "max_num_reqs"),
        ({"decode_sizes": {3: [8]}}, r"decode_sizes\[3\] = 8; expected multiples of 3, at most"),
        ({"decode_sizes": {3: [27]}}, r"at most 3 x max_num_reqs = 24"),
        ({"decode_sizes": {3: []}}, "at least one size"),
        ({"decode_sizes": {}}, "at least one length of decode"),
        ({"decode_sizes": {1: [1]}, "query_lens": (3,)}, "beside decode_num_reqs or other"),
        ({"decode_sizes": {1: [1]}, "decode_num_reqs": [1]}, "beside decode_num_reqs or other"),
        ({"query_lens": (17,)}, "query_lens = 17; expected at most max_num_tokens = 16"),
        ({"varlen_decode_sizes": {2: [17]}}, "at most 2 x max_num_reqs = 16"),
        ({"varlen_decode_sizes": {0: [1]}}, "varlen_decode_sizes"),
    ],
)
def test_impossible_ladders_are_refused(settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        dispatcher(**settings)


def test_impossible_cases_and_axes_are_refused() -> None:
    with pytest.raises(ConfigError, match="no batch that has a graph"):
        LoraCases((), False)
    with pytest.raises(ConfigError, match="max_loras = 0"):
        LoraCases.specialised(0)
    with pytest.raises(ConfigError, match="rule = 'nearest'"):
        Axis("a", [1], "nearest")
    with pytest.raises(ConfigError, match="values = "):
        Axis("a", [])
    with pytest.raises(ConfigError, match="values = "):
        Axis("a", [1], "ignored")
    with pytest.raises(ConfigError, match="which have an order"):
        Axis("a", [1, "b"], "pad_up")


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (Batch(-1), "num_tokens = -1"),
        (Batch(4, 0), "num_reqs = 0"),
        (Batch(0, -1), "num_reqs = -1"),
        (Batch(7, 3, None, True), "num_tokens=7, num_reqs=3"),
        (Batch(6, 3, 3, True), "max_query_len=3"),
        (Batch(3, 5, None, True), "num_reqs=5"),
        (Batch(6, None, 0, True), "max_query_len=0"),
        (Batch(5, 5, num_active_loras=2), "num_active_loras = 2"),
        (Batch(5, 5, has_lora=True, num_active_loras=-2), "num_active_loras = -2"),
    ],
)
def test_contradictions_are_refused(batch, message) -> None:
    found = dispatcher()
    with pytest.raises(BatchError, match=message):
        batch.through(found)
    assert short(decode(5).through(found)) == "FULL(8t,8r,u1)"


@pytest.mark.parametrize("extra", [(), (1, 2), [1], ([],)])
def test_extra_must_fit_the_axes(extra) -> None:
    found = dispatcher(axes=[Axis("kernel", [1, 2])])
    with pytest.raises(BatchError, match="one hashable value per axis"):
        found.dispatch(4, extra=extra)
    with pytest.raises(BatchError, match="one hashable value per axis"):
        dispatcher().dispatch(4, extra=(1,))
    assert short(found.dispatch(4, extra=(2,))) == "PW(4t,(2,))"


# Cost


def test_numbers_of_numpy_are_taken() -> None:
    found = dispatcher()
    five, forty = np.int64(5), np.int64(40)
    assert short(found.dispatch(five, five, np.int32(1), np.bool_(True))) == "FULL(8t,8r,u1)"
    assert short(found.dispatch(forty)) == "NONE(40t) oversize"
    assert type(found.dispatch(forty).descriptor.num_tokens) is int


def calls_of(function, *args) -> int:
    """How many functions, in Python and in C, one call enters."""
    count = 0

    def seen(frame, event, arg) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    watched(partial(function, *args), seen)
    return count


def test_a_step_costs_the_same_on_any_ladder() -> None:
    def costs(ladder) -> list[int]:
        found = dispatcher(sizes=ladder, max_num_reqs=4000)
        batches = [(5, 5, 1, True), (7, 3, 4), (9000, 3, 4)]
        return [calls_of(found.dispatch, *batch) for batch in batches]

    few, many = costs([8, 4000]), costs(range(1, 4001))
    assert few == many
    assert max(few) < 15
    assert max(few[:2]) < 8


def test_a_hit_makes_no_object() -> None:
    found = dispatcher()
    first, again = decode(5).through(found), decode(7).through(found)
    assert first is again
    assert isinstance(first.mode, CUDAGraphMode)


@pytest.mark.parametrize("bad", [-1, "3", 3.5, None, True])
def test_planned_size_refuses_what_dispatch_refuses(bad: object) -> None:
    found = dispatcher(FULL, [4, 8])
    for ask in (found.planned_size, found.dispatch):
        with pytest.raises(BatchError, match="num_tokens"):
            ask(bad)
    assert found.planned_size(np.int64(3)) == 4
    assert found.planned_size(0) is None
