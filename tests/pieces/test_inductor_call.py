"""Inductor's function is called without wrappers only where these do nothing, with equal results.

The pieces here are matrix products, which need no C++ compiler.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.profiler import profile

from cgcompile.torch_compat import inductor
from cgcompile.torch_compat.inductor import InductorCall

Function = Callable[..., Any]


def call_of(
    function: Function, *inputs: Any, dynamic: bool | None = False, returned: int | None = None
) -> InductorCall:
    """Compile the graph of a function with Inductor; with ``returned``, that input is a result."""
    calls: list[InductorCall] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Function:
        placeholders = gm.graph.find_nodes(op="placeholder")
        fakes = [node.meta["example_value"] for node in placeholders]
        if returned is not None:  # Dynamo would return it itself
            (results,) = gm.graph.output_node().args
            gm.graph.output_node().args = ((*results, placeholders[returned]),)
            gm.recompile()
        with torch.no_grad():
            calls.append(inductor.compile_inductor(gm, fakes, {}))
        return gm.forward

    torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)(*inputs)
    (call,) = calls
    return call


def product(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor]:
    return (a @ b,)


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 4), torch.randn(4, 4)


# ---------------------------------------------------------------- which pieces


class Piece(NamedTuple):
    function: Function
    alone: bool


def two_views(a: torch.Tensor, b: torch.Tensor) -> Any:
    return (a @ b).chunk(2, -1)


def nested(a: torch.Tensor, b: torch.Tensor) -> Any:
    with torch.no_grad():
        c = a @ b
    return c @ b, a @ c


def writes(a: torch.Tensor, b: torch.Tensor) -> Any:
    a.copy_(b)
    return (a @ b,)


def writes_by_an_op(a: torch.Tensor, b: torch.Tensor) -> Any:
    torch.ops.cginductor.fill(a)
    return (a @ b,)


def writes_only(a: torch.Tensor, b: torch.Tensor) -> Any:
    a.copy_(b)
    return ()


def view_of_an_input(a: torch.Tensor, b: torch.Tensor) -> Any:
    return a @ b, a.t()


def leaves_grad_mode_on(a: torch.Tensor, b: torch.Tensor) -> Any:
    c = a @ b
    torch.set_grad_enabled(True)
    return (c @ b,)


PIECES = {
    "a product": Piece(product, True),
    "two views of one buffer": Piece(two_views, True),
    "a region without gradients": Piece(nested, True),
    "a written input": Piece(writes, False),
    "an input that an op writes": Piece(writes_by_an_op, False),
    "no result": Piece(writes_only, False),
    "a view of an input": Piece(view_of_an_input, False),
    "grad mode left on": Piece(leaves_grad_mode_on, False),
}


def fill(a: torch.Tensor) -> None:
    a.fill_(2.0)


@pytest.fixture(autouse=True, scope="module")
def op() -> Any:
    own = torch.library.Library("cginductor", "FRAGMENT")
    own.define("fill(Tensor(a!) a) -> ()")
    own.impl("fill", fill, "CPU")
    torch.library.register_fake("cginductor::fill", lambda a: None, lib=own)
    yield
    own._destroy()


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("name", PIECES)
def test_a_piece_returns_and_writes_what_its_artifact_does(name: str, inference: bool) -> None:
    piece, inputs = PIECES[name], pair()
    with torch.no_grad():
        call = call_of(piece.function, *pair())
    for _ in range(3):
        with torch.inference_mode() if inference else torch.no_grad():
            seen, wanted, eager = ([value.clone() for value in inputs] for _ in range(3))
            results = call(*seen)
            left_on = torch.is_grad_enabled()
            torch.set_grad_enabled(False)
            expected, also = call.artifact(*wanted), piece.function(*eager)
            assert left_on == torch.is_grad_enabled()
        for result, one, other in zip(results, expected, also, strict=False):
            assert torch.equal(result, one)
            torch.testing.assert_close(result, other)
        assert all(map(torch.equal, seen, wanted))
        assert all(map(torch.equal, seen, eager))
        aliased = [any(result is value for value in seen) for result in results]
        assert aliased == [any(one is value for value in wanted) for one in expected]
    assert (call.function is not None) == piece.alone


def test_an_input_that_is_a_result_keeps_the_wrappers() -> None:
    with torch.no_grad():
        call = call_of(product, *pair(), returned=1)
        for _ in range(2):
            a, b = pair()
            result, same = call(a, b)
            assert same is b
            assert torch.equal(result, a @ b)
    assert call.function is None


def test_sizes_are_inputs_and_may_change() -> None:
    rows = torch.randn(6, 4)
    torch._dynamo.mark_dynamic(rows, 0)
    with torch.no_grad():
        call = call_of(product, rows, torch.randn(4, 4), dynamic=None)
        for size in (6, 3, 6, 9):
            a, b = torch.randn(size, 4), torch.randn(4, 4)
            (result,) = call(size, a, b)
            assert torch.equal(result, a @ b)
    assert call.function is not None


# ---------------------------------------------------------------- wrappers that do something


def doubled(graph: Function, a: Any, b: Any) -> Any:
    graph([a, b])
    return graph([a, b])


def with_gradients(graph: Function, a: Any, b: Any) -> Any:
    with torch.enable_grad():
        return graph([a, b])


def with_autocast(graph: Function, a: Any, b: Any) -> Any:
    with torch.autocast("cpu"):
        return graph([a, b])


WRAPPERS: dict[str, Function] = {
    "copies an argument": lambda graph, a, b: graph([a.clone(), b]),
    "exchanges arguments": lambda graph, a, b: graph([b, a]),
    "views a result": lambda graph, a, b: [value.view_as(value) for value in graph([a, b])],
    "drops a result": lambda graph, a, b: graph([a, b])[:0],
    "returns one tensor": lambda graph, a, b: graph([a, b])[0],
    "never calls it": lambda graph, a, b: [a @ b] if graph else [],
    "calls it twice": doubled,
    "switches grad mode": with_gradients,
    "switches autocast": with_autocast,
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_that_does_something_stays(name: str) -> None:
    with torch.no_grad():
        call = call_of(product, *pair())
        graph = inductor.compiled_graph(call.artifact)
        wrap, inputs = WRAPPERS[name], pair()
        call = InductorCall(lambda *inputs: wrap(graph, *inputs))
        for _ in range(3):
            expected = wrap(graph, *inputs)
            results = call(*inputs)
            assert len(results) == len(expected)
            assert all(map(torch.equal, results, expected))
    assert call.function is None


def test_a_wrapper_that_does_nothing_goes() -> None:
    with torch.no_grad():
        graph = inductor.compiled_graph(call_of(product, *pair()).artifact)
        call, function = InductorCall(lambda *inputs: graph(list(inputs))), graph.current_callable
        inputs = pair()
        assert torch.equal(call(*inputs)[0], inputs[0] @ inputs[1])
    assert call.function is graph.current_callable is function


def test_what_holds_no_graph_runs_as_it_is() -> None:
    call = InductorCall(lambda a, b: [a @ b])
    with torch.no_grad():
        for _ in range(2):
            inputs = pair()
            assert torch.equal(call(*inputs)[0], inputs[0] @ inputs[1])
    assert call.function is None


def test_an_error_of_the_first_call_leaves_all_as_it_was() -> None:
    with torch.no_grad():
        call = call_of(product, *pair())
        graph = inductor.compiled_graph(call.artifact)
        function, inputs = graph.current_callable, pair()
        with pytest.raises((AssertionError, RuntimeError)):
            call(torch.randn(3, 3), inputs[1])
        assert call.function is None
        assert graph.current_callable is function
        for _ in range(2):
            assert torch.equal(call(*inputs)[0], inputs[0] @ inputs[1])
    assert call.function is function


def test_threads_may_make_the_first_call_together() -> None:
    with torch.no_grad():
        call = call_of(product, *pair())
    function = inductor.compiled_graph(call.artifact).current_callable
    together, wrong = threading.Barrier(4), []

    def run() -> None:
        with torch.no_grad():
            together.wait()
            for _ in range(50):
                a, b = pair()
                if not torch.equal(call(a, b)[0], a @ b):
                    wrong.append(a)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert call.function is function
    assert inductor.compiled_graph(call.artifact).current_callable is function


# ---------------------------------------------------------------- modes of the thread


def test_the_wrappers_switch_grad_mode_off_where_it_is_on() -> None:
    a, b = pair()
    a.requires_grad_()
    call = call_of(product, a, b)
    known = []
    for grad in (True, False, True, False):
        with torch.set_grad_enabled(grad):
            (result,) = call(a, b)
        assert torch.equal(result, a @ b)
        assert not result.requires_grad
        known.append(call.function is not None)
    assert known == [False, True, True, True]


@pytest.mark.slow
def test_the_wrappers_switch_autocast_off_where_it_is_on() -> None:
    inputs = pair()
    with torch.no_grad(), torch.autocast("cpu"):
        call = call_of(product, *inputs)
        for _ in range(2):
            (result,) = call(*inputs)
            assert result.dtype == torch.bfloat16
            assert call.function is None
            assert torch.equal(result, call.artifact(*inputs)[0])
            torch.testing.assert_close(result, inputs[0] @ inputs[1])
        with torch.autocast("cpu", enabled=False):  # compiled under it all the same
            (calls,) = call(*inputs)
            assert torch.equal(calls, result)
        assert torch.equal(call(*inputs)[0], result)


def test_profilers_see_the_name_of_the_call() -> None:
    inputs = pair()
    with torch.no_grad():
        call = call_of(product, *inputs)
        call(*inputs)
        assert call.function is not None
        with profile() as seen:
            call(*inputs)
    assert any("Call CompiledFxGraph" in event.name for event in seen.events())
