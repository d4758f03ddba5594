"""Random ladders and batches: the tables give what a search through all planned graphs gives."""

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from lib.oracles import ALWAYS, Batch, Mode, dispatcher, reference

from cgcompile import AttentionCGSupport, BatchDescriptor
from cgcompile.errors import ConfigError
from cgcompile.serving.dispatcher import CudagraphDispatcher
from cgcompile.serving.plan import LoraCases

NUMBERS = st.integers(1, 24)
LORA = (LoraCases(), LoraCases((1, 2, 3, 4)), LoraCases((3,), False), LoraCases((2, 5), False))
GRAPHS = (Mode.FULL, Mode.FULL_DECODE_ONLY, Mode.FULL_AND_PIECEWISE, Mode.PIECEWISE)


@st.composite
def dispatchers(draw) -> tuple[CudagraphDispatcher, LoraCases]:
    most = draw(st.integers(1, 9))
    lora = draw(st.sampled_from(LORA))
    decode, varlen = {}, {}
    for query_len in draw(st.sets(st.integers(1, 4), min_size=1)):
        counts = draw(st.sets(st.integers(1, most), min_size=1))
        decode[query_len] = [count * query_len for count in counts]
    for bound in draw(st.sets(st.integers(1, 4), max_size=2)):
        varlen[bound] = draw(st.sets(st.integers(1, bound * most), min_size=1))
    dispatch = dispatcher(
        draw(st.sampled_from(GRAPHS)),
        draw(st.sets(NUMBERS, min_size=1)),
        max_num_reqs=most,
        query_lens=decode,
        varlen_decode_sizes=varlen,
        axes=[lora],
        support=draw(st.sampled_from(AttentionCGSupport)),
    )
    return dispatch, lora


@st.composite
def batches(draw) -> Batch:
    loras = draw(st.sampled_from([None, 0, 1, 2, 4, 7]))
    more = {"has_lora": loras is not None, "num_active_loras": loras or 0}
    reqs = draw(st.integers(1, 11))
    if draw(st.booleans()):
        query_len = draw(st.integers(1, 5))
        longest = draw(st.sampled_from([None, query_len]))
        return Batch(reqs * query_len, reqs, longest, True, **more)
    longest = draw(st.integers(1, 6))
    tokens = draw(st.integers(longest + reqs - 1, longest * reqs))
    with_reqs, with_longest = draw(st.booleans()), draw(st.booleans())
    return Batch(tokens, reqs if with_reqs else None, longest if with_longest else None, **more)


@pytest.mark.slow
@given(dispatchers(), batches(), st.data())
def test_the_graph_that_a_search_finds(pair, batch, data) -> None:
    dispatch, lora = pair
    every = list(dispatch.plan())
    chosen = st.sets(st.sampled_from(every))
    captured, refused = data.draw(chosen), data.draw(chosen)
    dispatch.only_captured = data.draw(st.booleans())
    for mode, key in refused:
        dispatch.refused(mode, key, "no")
    for mode, key in captured:
        dispatch.captured(mode, key)
    valid = data.draw(st.sampled_from([None, set(), {Mode.PIECEWISE}, {Mode.FULL, Mode.NONE}]))
    invalid = data.draw(st.sampled_from([None, set(), {Mode.FULL}, {Mode.PIECEWISE}]))
    before = [None if modes is None else set(modes) for modes in (valid, invalid)]

    dispatched = batch.through(dispatch, valid_modes=valid, invalid_modes=invalid)

    def ready(mode: Mode, key: BatchDescriptor) -> bool:
        if dispatch.only_captured:
            return (mode, key) in captured
        return (mode, key) in captured or (mode, key) not in refused

    allowed = set(Mode if valid is None else valid) - (invalid or set())
    assert dispatched[:2] == reference(dispatch, lora, batch, ready, allowed)
    assert [valid, invalid] == before  # the caller's own sets
    event(f"{dispatched.mode.name}, why {dispatched.why and dispatched.why.reason.value}")
    key = dispatched.descriptor
    if dispatched.mode is Mode.NONE:
        assert key == BatchDescriptor(batch.num_tokens)
        assert dispatched.why is not None
        return
    assert (dispatched.mode, key) in every
    assert key.num_tokens >= batch.num_tokens
    if dispatched.mode is Mode.PIECEWISE:
        assert (key.num_reqs, key.uniform, key.max_query_len) == (None, False, None)
    elif batch.num_reqs is not None:
        assert key.num_reqs >= batch.num_reqs
    if key.uniform:
        assert batch.uniform_decode
        assert key.num_reqs * (batch.num_tokens // batch.num_reqs) == key.num_tokens


@pytest.mark.slow
@given(dispatchers())
def test_every_planned_graph_is_reached_by_its_own_shape(pair) -> None:
    """Also where graphs of several kinds have one number of tokens."""
    dispatch, _ = pair
    assert dispatch.plan()
    for mode, key in dispatch.plan():
        lora = {"has_lora": key.has_lora, "num_active_loras": key.num_active_loras}
        batch = Batch(key.num_tokens, key.num_reqs, key.max_query_len, key.uniform, **lora)
        dispatched = batch.through(dispatch)
        assert dispatched[:2] == (mode, key)
        assert dispatched.why is None or mode is Mode.PIECEWISE  # there attention may be the reason


@pytest.mark.slow
@given(dispatchers())
def test_plan_is_in_the_order_of_capture(pair) -> None:
    dispatch, _ = pair
    modes = [mode is Mode.FULL for mode, _ in dispatch.plan()]
    assert modes == sorted(modes)
    assert len(set(dispatch.plan())) == len(dispatch.plan())
    for wanted in (Mode.FULL, Mode.PIECEWISE):
        sizes = [key.num_tokens for mode, key in dispatch.plan() if mode is wanted]
        assert sizes == sorted(sizes, reverse=True)


@given(st.sampled_from(Mode), st.sampled_from(AttentionCGSupport), st.booleans())
def test_a_mode_never_becomes_more_than_attention_allows(mode, support, piecewise) -> None:
    try:
        dispatch = dispatcher(mode, query_lens=(1, 3), support=support, piecewise=piecewise)
    except ConfigError:
        nothing = mode is Mode.PIECEWISE or support is AttentionCGSupport.NEVER
        assert nothing
        assert not piecewise
        return
    assert (dispatch.mode is Mode.NONE) is (mode is Mode.NONE)
    assert dispatch.degraded or dispatch.mode is mode
    for wanted, key in dispatch.plan():
        if wanted is Mode.PIECEWISE:
            assert piecewise
        elif key.uniform:
            assert support >= (1 if key.query_len == 1 else 2)
        else:
            assert support is ALWAYS
