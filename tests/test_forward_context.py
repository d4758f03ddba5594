"""The batch descriptor and the forward context: validation, nesting, threads, tasks, tracing."""

import asyncio
import contextvars
import copy
import inspect
import pickle
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lib.asserts import compiling_elsewhere

import cgcompile
from cgcompile import (
    Backend,
    BatchDescriptor,
    CUDAGraphMode,
    ForwardContext,
    get_forward_context,
    set_forward_context,
)
from cgcompile.context import is_forward_context_available, override_forward_context
from cgcompile.errors import BatchError, ForwardContextError, TraceError


@given(st.integers(1, 64), st.integers(1, 16))
def test_uniform_query_length(num_reqs: int, query_len: int) -> None:
    descriptor = BatchDescriptor(num_reqs * query_len, num_reqs, uniform=True)
    assert descriptor.query_len == query_len
    assert BatchDescriptor(num_reqs * query_len, num_reqs).query_len is None
    if num_reqs > 1:
        with pytest.raises(BatchError, match="must be a multiple"):
            BatchDescriptor(num_reqs * query_len + 1, num_reqs, uniform=True)


def test_uniform_needs_num_reqs() -> None:
    with pytest.raises(BatchError, match="needs num_reqs"):
        BatchDescriptor(8, uniform=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_tokens", -1),
        ("num_tokens", None),
        ("num_tokens", 1.0),
        ("num_tokens", True),
        ("num_reqs", 0),
        ("num_active_loras", -1),
        ("num_active_loras", None),
        ("max_query_len", 0),
        ("extra", [1]),
        ("extra", ([1],)),
    ],
)
def test_bad_fields_are_named(name: str, value: object) -> None:
    with pytest.raises(BatchError, match=f"{name} = .*expected"):
        BatchDescriptor(**{"num_tokens": 1, name: value})


def test_descriptor_is_an_immutable_key() -> None:
    one = BatchDescriptor(8, 4, uniform=True, extra=("kernel", 3))
    other = BatchDescriptor(8, 4, uniform=True, extra=("kernel", 3))
    assert one == other
    assert hash(one) == hash(other)
    assert {one: "graph"}[other] == "graph"
    assert one != BatchDescriptor(8, 4)
    with pytest.raises(AttributeError):
        one.num_tokens = 9
    with pytest.raises(AttributeError):
        one.anything = 9


def test_descriptor_survives_copy_and_pickle_and_replace_validates() -> None:
    one = BatchDescriptor(8, 4, uniform=True)
    for same in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert same == one
        assert type(same) is BatchDescriptor
    assert one._replace(num_tokens=12).query_len == 3
    with pytest.raises(BatchError):
        one._replace(num_tokens=9)


def test_context_carries_what_it_was_given() -> None:
    descriptor = BatchDescriptor(8)
    tokens = torch.tensor([8, 4])
    with set_forward_context(
        {"layer": 1},
        cudagraph_runtime_mode=CUDAGraphMode.FULL,
        batch_descriptor=descriptor,
        num_tokens=8,
        num_unpadded_tokens=7,
        num_tokens_across_dp=tokens,
        slot_mapping="slots",
        mine=3,
    ) as context:
        assert get_forward_context() is context
        assert context.attn_metadata == {"layer": 1}
        assert context.cudagraph_runtime_mode is CUDAGraphMode.FULL
        assert context.batch_descriptor is descriptor
        assert (context.num_tokens, context.num_unpadded_tokens) == (8, 7)
        assert context.num_tokens_across_dp is tokens
        assert context.slot_mapping == "slots"
        assert context.additional == {"mine": 3}


def test_missing_context() -> None:
    assert not is_forward_context_available()
    with pytest.raises(ForwardContextError, match="no forward context"):
        get_forward_context()


@pytest.mark.parametrize("real", [-1, 9, 2.5, True, "5", torch.tensor(3)])
def test_real_rows_that_cannot_be(real: object) -> None:
    with pytest.raises(ForwardContextError, match="from 0 to 8, the rows"):
        set_forward_context(batch_descriptor=BatchDescriptor(8), num_unpadded_tokens=real)


class Five:
    def __index__(self) -> int:
        return 5

    __int__ = __index__


def test_real_rows() -> None:
    for real in (0, 5, 8, Five()):
        with set_forward_context(batch_descriptor=BatchDescriptor(8), num_unpadded_tokens=real):
            rows = get_forward_context().num_unpadded_tokens
        assert (rows, type(rows)) == (int(real), int)
    with set_forward_context(num_unpadded_tokens=9):
        assert get_forward_context().num_unpadded_tokens == 9
    with pytest.raises(ForwardContextError, match="from 0 or more"):
        set_forward_context(num_unpadded_tokens=-1)
    with pytest.raises(ForwardContextError, match="from 0 to 8"):
        set_forward_context(num_tokens=8, num_unpadded_tokens=9)


@pytest.mark.parametrize("descriptor", [8, (8,), "8"])
def test_a_descriptor_of_another_type(descriptor: object) -> None:
    with pytest.raises(ForwardContextError, match=r"expected a cgcompile\.BatchDescriptor"):
        set_forward_context(batch_descriptor=descriptor)


def test_leaving_once_too_often() -> None:
    context = set_forward_context("mine")
    with context:
        pass
    with pytest.raises(ForwardContextError, match="more often than it was entered"):
        context.__exit__(None, None, None)
    with context:
        assert get_forward_context().attn_metadata == "mine"
    assert not is_forward_context_available()


def test_nesting_and_reentry() -> None:
    outer, inner = set_forward_context("outer"), set_forward_context("inner")
    with outer:
        with inner, outer:
            assert get_forward_context().attn_metadata == "outer"
        assert get_forward_context().attn_metadata == "outer"
        with override_forward_context(None):
            assert not is_forward_context_available()
        with override_forward_context(ForwardContext("other")):
            assert get_forward_context().attn_metadata == "other"
        assert get_forward_context().attn_metadata == "outer"
    assert not is_forward_context_available()


def test_left_after_an_exception() -> None:
    with pytest.raises(KeyError), set_forward_context():
        raise KeyError
    assert not is_forward_context_available()


@pytest.mark.parametrize(
    "mode", [CUDAGraphMode.FULL_AND_PIECEWISE, "half", "FULL_AND_PIECEWISE", 2, None]
)
def test_runtime_mode_must_be_one_a_step_can_run_in(mode: object) -> None:
    with pytest.raises(ForwardContextError, match="a step runs in one mode"):
        set_forward_context(cudagraph_runtime_mode=mode)


def test_a_new_thread_starts_with_none() -> None:
    seen = []
    with set_forward_context("here"):
        carried = contextvars.copy_context()
        for target in (
            is_forward_context_available,
            lambda: carried.run(is_forward_context_available),
        ):
            thread = threading.Thread(target=lambda t=target: seen.append(t()))
            thread.start()
            thread.join()
        assert is_forward_context_available()
    assert seen == [False, False]


def test_a_new_task_starts_with_none() -> None:
    async def child() -> tuple[bool, bool]:
        before = is_forward_context_available()
        with set_forward_context("child"):
            await asyncio.sleep(0)
            return before, get_forward_context().attn_metadata == "child"

    async def main() -> None:
        with set_forward_context("parent"):
            tasks = [asyncio.create_task(child()) for _ in range(2)]
            assert await asyncio.gather(*tasks) == [(False, True)] * 2
            assert get_forward_context().attn_metadata == "parent"
            assert not await asyncio.to_thread(is_forward_context_available)

    asyncio.run(main())


@pytest.mark.parametrize(
    "function", [get_forward_context, is_forward_context_available, set_forward_context]
)
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("caught", [False, True])
def test_traced_code_is_told_what_to_do(function, fullgraph: bool, caught: bool) -> None:
    """Dynamo would skip a function that raises, and all its calls would bypass the backend."""

    def step(x):
        try:
            function()
        except RuntimeError:
            if not caught:
                raise
        return x + 1

    backend = Backend(compiler="eager", capture_device="host")
    compiled = torch.compile(step, backend=backend, fullgraph=fullgraph)
    line = step.__code__.co_firstlineno + 2
    text = rf"^{function.__name__}\(\) was called in code that torch.compile traces"
    with set_forward_context("mine"):
        for _ in range(2):
            with pytest.raises(ForwardContextError, match=text) as error:
                compiled(torch.ones(2))
    assert "opaque custom op (torch.library)" in str(error.value)
    assert f'test_forward_context.py", line {line}, in step' in str(error.value)
    assert error.value.__notes__ == [
        "See docs/reference/errors#cgcompile.errors.ForwardContextError"
    ]
    with pytest.raises(
        TraceError, match=text.replace("^", "^.*step does not become one graph: ")
    ) as error:
        cgcompile.compile(step, backend)(torch.ones(2))
    assert f'test_forward_context.py", line {line}' in str(error.value)
    assert "opaque custom op (torch.library)" in str(error.value)
    assert "torch.compile(model" not in str(error.value)  # which raises the same


def test_traced_code_after_a_graph_break() -> None:
    def step(x):
        y = x + 1
        torch._dynamo.graph_break()
        return y * get_forward_context().attn_metadata

    compiled = torch.compile(step, backend=Backend(compiler="eager"))
    with pytest.raises(ForwardContextError, match=r"torch\.compile traces"):
        compiled(torch.ones(2))


def test_a_compilation_in_another_thread_is_none_of_ours() -> None:
    with compiling_elsewhere(), set_forward_context("mine"):
        assert is_forward_context_available()
        assert get_forward_context().attn_metadata == "mine"


def test_a_compiled_model_serves_while_another_thread_compiles() -> None:
    compiled = torch.compile(torch.nn.Linear(4, 4), backend=Backend(compiler="eager"))
    with torch.no_grad():
        expected = compiled(torch.ones(3, 4))
        with compiling_elsewhere():
            torch.testing.assert_close(compiled(torch.ones(3, 4)), expected)


def test_opaque_op_reads_the_context_of_each_step() -> None:
    lib = torch.library.Library("cgcontext", "FRAGMENT")
    lib.define("scale(Tensor x) -> Tensor")
    lib.impl("scale", lambda x: x * get_forward_context().additional["factor"], "CPU")
    torch.library.register_fake("cgcontext::scale", torch.empty_like, lib=lib)
    compiled = torch.compile(
        lambda x: torch.ops.cgcontext.scale(x.sin()),
        backend="cgcompile",
        options={"splitting_ops": "cgcontext::scale", "compiler": "eager"},
        fullgraph=True,
    )
    x = torch.randn(3)
    for factor in (2.0, 5.0):
        with set_forward_context(factor=factor), torch.no_grad():
            torch.testing.assert_close(compiled(x), x.sin() * factor)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("cudagraph_mode", "use cudagraph_runtime_mode\\."),
        ("runtime_mode", "use cudagraph_runtime_mode\\."),
        ("mode", "use cudagraph_runtime_mode\\."),
        ("cudagraph_runtime_mod", "use cudagraph_runtime_mode\\."),
        ("batch_size", "use batch_descriptor=cgcompile.BatchDescriptor"),
        ("batch_descriptr", "use batch_descriptor="),
        ("num_token", "use num_tokens\\."),
        ("slot_mappings", "use slot_mapping\\."),
        ("num_actual_tokens", "use num_unpadded_tokens\\."),
        ("vllm_config", "leave it out"),
        ("metadata", "use attn_metadata\\."),
        ("attention_metadata", "use attn_metadata\\."),
        ("attention_metdata", "use attn_metadata\\."),
        ("attn_meta", "use attn_metadata\\."),
        ("attn_metdata", "use attn_metadata\\."),
        ("batch_desc", "use batch_descriptor=cgcompile.BatchDescriptor"),
        ("slot_map", "use slot_mapping\\."),
    ],
)
def test_a_near_miss_of_a_parameter_is_refused(name: str, meant: str) -> None:
    for _ in range(2):
        with pytest.raises(ForwardContextError, match=meant) as error:
            set_forward_context(**{"mine": 1, name: 2})
        first, _ = str(error.value).splitlines()
        assert first.startswith(f"set_forward_context({name}=...): there is no such parameter; ")
    with pytest.raises(ForwardContextError, match=meant):
        ForwardContext(**{name: 2})


@pytest.mark.parametrize(
    "name", ["cross_attention_metadata", "local_attention_metadata", "num_tokens_per_expert"]
)
def test_a_name_of_more_words_is_no_near_miss(name: str) -> None:
    with set_forward_context(**{name: 2}):
        assert get_forward_context().additional == {name: 2}


def test_data_of_the_user_is_kept() -> None:
    names = (
        "factor",
        "model",
        "tokens",
        "metadata_of_layers",
        "attention",
        "max_query_len",
        "forward_batch",
        "attention_layers",
        "ubatch_slices",
    )
    with set_forward_context(**dict.fromkeys(names, 1)) as context:
        assert context.additional == dict.fromkeys(names, 1)


@pytest.mark.parametrize("name", ["NONE", "PIECEWISE", "FULL", "piecewise"])
def test_a_runtime_mode_may_be_text(name: str) -> None:
    with set_forward_context(cudagraph_runtime_mode=name) as context:
        assert context.cudagraph_runtime_mode is CUDAGraphMode[name.upper()]


def _messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "mode_none" in text]


@pytest.mark.parametrize("kind", ["torch.compile", "wrapper"])
def test_a_descriptor_without_a_mode_is_one_warning(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"compiler": "eager", "capture_device": "host"}
    model = torch.nn.Linear(4, 4)
    called = (
        torch.compile(model, backend=Backend(**settings))
        if kind == "torch.compile"
        else cgcompile.CUDAGraphWrapper(model, cgcompile.CompilationConfig(**settings))
    )
    batch = BatchDescriptor(8)
    with torch.inference_mode():
        for arguments in ({}, {"batch_descriptor": batch, "cudagraph_runtime_mode": "NONE"}):
            with set_forward_context(**arguments):
                called(torch.randn(8, 4))
        assert not _messages(caplog)  # no graph was requested
        for _ in range(3):
            x = torch.randn(8, 4)
            with set_forward_context(batch_descriptor=batch) as context:
                torch.testing.assert_close(called(x), model(x))
            assert context.ran_plain.reason is cgcompile.Reason.MODE_NONE
    (text,) = _messages(caplog)
    assert "the forward context has a batch_descriptor, and no cudagraph_runtime_mode" in text
    assert "pass `cudagraph_runtime_mode=`" in text


def test_the_mode_that_is_left_out_is_none() -> None:
    with set_forward_context() as context:
        assert context.cudagraph_runtime_mode is CUDAGraphMode.NONE
    assert ".CUDAGraphMode = CUDAGraphMode.NONE," in str(inspect.signature(set_forward_context))


def test_what_engines_ask_of_a_mode() -> None:
    full, both = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE
    assert [mode.has_full_cudagraphs() for mode in CUDAGraphMode] == [
        False,
        False,
        True,
        True,
        True,
    ]
    assert [mode.has_piecewise_cudagraphs() for mode in (full, both)] == [False, True]
    assert cgcompile.is_forward_context_available is is_forward_context_available
