"""Inductor's function called alone: only where torch's wrappers do nothing, and with equal results.

The pieces here are matrix products, which need no C++ compiler.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from support import calls_of
from torch.profiler import profile

from cgcompile import compat
from cgcompile.compat import Direct

Function = Callable[..., Any]


def direct(
    function: Function, *inputs: Any, dynamic: bool | None = False, returned: int | None = None
) -> Direct:
    """What Inductor makes of the graph of a function; with ``returned``, that input is a result."""
    found: list[Direct] = []

    def backend(gm: torch.fx.GraphModule, given: Any) -> Function:
        inputs = gm.graph.find_nodes(op="placeholder")
        fakes = [node.meta["example_value"] for node in inputs]
        if returned is not None:  # Dynamo would return it itself
            (results,) = gm.graph.output_node().args
            gm.graph.output_node().args = ((*results, inputs[returned]),)
            gm.recompile()
        with torch.no_grad():
            found.append(compat.compile_direct(gm, fakes, {}))
        return gm.forward

    torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)(*inputs)
    (made,) = found
    return made


def product(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor]:
    return (a @ b,)


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 4), torch.randn(4, 4)


# ---------------------------------------------------------------- which pieces


class Piece(NamedTuple):
    function: Function
    alone: bool


def three_views(a: torch.Tensor, b: torch.Tensor) -> Any:
    return (a @ b).chunk(2, -1)


def nested(a: torch.Tensor, b: torch.Tensor) -> Any:
    with torch.no_grad():
        c = a @ b
    return c @ b, a @ c


def writes(a: torch.Tensor, b: torch.Tensor) -> Any:
    a.copy_(b)
    return (a @ b,)


def writes_by_an_op(a: torch.Tensor, b: torch.Tensor) -> Any:
    torch.ops.cgdirect.fill(a)
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
    "two views of one buffer": Piece(three_views, True),
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
    own = torch.library.Library("cgdirect", "FRAGMENT")
    own.define("fill(Tensor(a!) a) -> ()")
    own.impl("fill", fill, "CPU")
    torch.library.register_fake("cgdirect::fill", lambda a: None, lib=own)
    yield
    own._destroy()


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("name", PIECES)
def test_a_piece_returns_and_writes_what_its_artifact_does(name: str, inference: bool) -> None:
    piece, given = PIECES[name], pair()
    with torch.no_grad():
        made = direct(piece.function, *pair())
    for _ in range(3):
        with torch.inference_mode() if inference else torch.no_grad():
            seen, wanted, eager = ([each.clone() for each in given] for _ in range(3))
            results = made(*seen)
            left_on = torch.is_grad_enabled()
            torch.set_grad_enabled(False)
            expected, also = made.artifact(*wanted), piece.function(*eager)
            assert left_on == torch.is_grad_enabled()
        for result, one, other in zip(results, expected, also, strict=False):
            assert torch.equal(result, one)
            torch.testing.assert_close(result, other)
        assert all(map(torch.equal, seen, wanted))
        assert all(map(torch.equal, seen, eager))
        aliased = [any(result is each for each in seen) for result in results]
        assert aliased == [any(one is each for each in wanted) for one in expected]
    assert (made.alone is not None) == piece.alone


def test_an_input_that_is_a_result_keeps_the_wrappers() -> None:
    with torch.no_grad():
        made = direct(product, *pair(), returned=1)
        for _ in range(2):
            a, b = pair()
            result, same = made(a, b)
            assert same is b
            assert torch.equal(result, a @ b)
    assert made.alone is None


def test_sizes_are_inputs_and_may_change() -> None:
    rows = torch.randn(6, 4)
    torch._dynamo.mark_dynamic(rows, 0)
    with torch.no_grad():
        made = direct(product, rows, torch.randn(4, 4), dynamic=None)
        for size in (6, 3, 6, 9):
            a, b = torch.randn(size, 4), torch.randn(4, 4)
            (result,) = made(size, a, b)
            assert torch.equal(result, a @ b)
    assert made.alone is not None


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


def counting_writes(graph: Function, a: Any, b: Any) -> Any:
    torch.autograd.graph.increment_version([a])
    return graph([a, b])


WRAPPERS: dict[str, Function] = {
    "copies an argument": lambda graph, a, b: graph([a.clone(), b]),
    "exchanges arguments": lambda graph, a, b: graph([b, a]),
    "views a result": lambda graph, a, b: [each.view_as(each) for each in graph([a, b])],
    "drops a result": lambda graph, a, b: graph([a, b])[:0],
    "returns one tensor": lambda graph, a, b: graph([a, b])[0],
    "never calls it": lambda graph, a, b: [a @ b] if graph else [],
    "calls it twice": doubled,
    "switches grad mode": with_gradients,
    "switches autocast": with_autocast,
    "counts a write": counting_writes,
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_that_does_something_stays(name: str) -> None:
    with torch.no_grad():
        inductors = direct(product, *pair())
        graph = compat.inductor_graph(inductors.artifact)
        wrap, given = WRAPPERS[name], pair()
        made = Direct(lambda *inputs: wrap(graph, *inputs))
        for _ in range(3):
            expected = wrap(graph, *given)
            results = made(*given)
            assert len(results) == len(expected)
            assert all(map(torch.equal, results, expected))
    assert made.alone is None


def test_a_wrapper_that_does_nothing_goes() -> None:
    with torch.no_grad():
        graph = compat.inductor_graph(direct(product, *pair()).artifact)
        made, function = Direct(lambda *inputs: graph(list(inputs))), graph.current_callable
        given = pair()
        assert torch.equal(made(*given)[0], given[0] @ given[1])
    assert made.alone is graph.current_callable is function


def test_what_holds_no_graph_runs_as_it_is() -> None:
    made = Direct(lambda a, b: [a @ b])
    with torch.no_grad():
        for _ in range(2):
            given = pair()
            assert torch.equal(made(*given)[0], given[0] @ given[1])
    assert made.alone is None


def test_an_error_of_the_first_call_leaves_all_as_it_was() -> None:
    with torch.no_grad():
        made = direct(product, *pair())
        graph = compat.inductor_graph(made.artifact)
        function, given = graph.current_callable, pair()
        with pytest.raises((AssertionError, RuntimeError)):
            made(torch.randn(3, 3), given[1])
        assert made.alone is None
        assert graph.current_callable is function
        for _ in range(2):
            assert torch.equal(made(*given)[0], given[0] @ given[1])
    assert made.alone is function


def test_threads_may_make_the_first_call_together() -> None:
    with torch.no_grad():
        made = direct(product, *pair())
    function = compat.inductor_graph(made.artifact).current_callable
    together, wrong = threading.Barrier(4), []

    def run() -> None:
        with torch.no_grad():
            together.wait()
            for _ in range(50):
                a, b = pair()
                if not torch.equal(made(a, b)[0], a @ b):
                    wrong.append(a)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong
    assert made.alone is function
    assert compat.inductor_graph(made.artifact).current_callable is function


# ---------------------------------------------------------------- modes of the thread


def test_the_wrappers_switch_grad_mode_off_where_it_is_on() -> None:
    a, b = pair()
    a.requires_grad_()
    made = direct(product, a, b)
    known = []
    for grad in (True, False, True, False):
        with torch.set_grad_enabled(grad):
            (result,) = made(a, b)
        assert torch.equal(result, a @ b)
        assert not result.requires_grad
        known.append(made.alone is not None)
    assert known == [False, True, True, True]
    with torch.no_grad():
        assert len(calls_of(lambda: made(a, b))) <= 7
    assert len(calls_of(lambda: made(a, b))) > 12


def test_the_wrappers_switch_autocast_off_where_it_is_on() -> None:
    given = pair()
    with torch.no_grad(), torch.autocast("cpu"):
        made = direct(product, *given)
        for _ in range(2):
            (result,) = made(*given)
            assert result.dtype == torch.bfloat16
            assert made.alone is None
            assert torch.equal(result, made.artifact(*given)[0])
            torch.testing.assert_close(result, given[0] @ given[1])
        with torch.autocast("cpu", enabled=False):  # compiled under it all the same
            (found,) = made(*given)
            assert torch.equal(found, result)
        assert torch.equal(made(*given)[0], result)


def test_profilers_see_the_name_of_the_call() -> None:
    given = pair()
    with torch.no_grad():
        made = direct(product, *given)
        made(*given)
        assert made.alone is not None
        with profile() as seen:
            made(*given)
    assert any("Call CompiledFxGraph" in event.name for event in seen.events())
