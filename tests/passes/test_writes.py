"""Which arguments a node writes, and which nodes only make a view."""

import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import fx
from torch.nn import functional as F

import cgcompile
from cgcompile.boundaries import Boundaries
from cgcompile.passes.nodes import is_known_view, is_view, written
from cgcompile.torch_compat import inductor

EMPTY = fx.GraphModule(torch.nn.Module(), fx.Graph())


def call(target: Any, *args: Any, result: Any = None, **kwargs: Any) -> fx.Node:
    """A node that calls a function, or the method of a name; ``result`` None runs it."""
    graph = fx.Graph()

    def node_of(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder(f"a{len(graph.nodes)}")
        node.meta["example_value"] = value
        return node

    op = "call_method" if isinstance(target, str) else "call_function"
    nodes = fx.node.map_aggregate(args, node_of), fx.node.map_aggregate(kwargs, node_of)
    node = graph.create_node(op, target, *nodes)  # type: ignore[arg-type]
    run = getattr(torch.Tensor, target) if isinstance(target, str) else target
    node.meta["example_value"] = run(*args, **kwargs) if result is None else result
    return node


def written_values(node: fx.Node) -> list[int]:
    """The storages that a node writes, as positions among its inputs."""
    return sorted(node.all_input_nodes.index(target) for target in written(EMPTY, node))


X, STATISTICS = torch.randn(2, 3), (torch.zeros(3), torch.ones(3))
OBSERVED = (X, torch.ones(1), torch.ones(1), *map(torch.ones, (1, 1, 1, 1)))


@pytest.mark.parametrize(
    ("function", "args", "positions"),
    [
        (F.instance_norm, (torch.randn(2, 3, 4), *STATISTICS), [1, 2]),  # by default
        (F.instance_norm, (torch.randn(2, 3, 4), *STATISTICS, None, None, False), []),
        (F.batch_norm, (X, *STATISTICS), []),
        (F.batch_norm, (X, *STATISTICS, None, None, True), [1, 2]),
        (torch.native_batch_norm, (X, None, None, *STATISTICS, True, 0.1, 1e-5), [1, 2]),
        (torch.native_batch_norm, (X, None, None, *STATISTICS, False, 0.1, 1e-5), []),
        (torch.relu, (X,), []),
        (torch.relu_, (X,), [0]),
        (F.relu, (X, True), [0]),
        (torch.nn.init.normal, (X,), [0]),  # type: ignore[attr-defined]
        (torch.nn.init.normal_, (X,), [0]),
        (torch.broadcast_tensors, (X, torch.ones(3)), []),
        (torch.sort, (X, 0), []),
    ],
)
def test_writes_of_functions(function: Any, args: tuple[Any, ...], positions: list[int]) -> None:
    args = tuple(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args)
    before = [arg.clone() for arg in args if isinstance(arg, torch.Tensor)]
    node = call(function, *args)
    assert written_values(node) == positions
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    changed = [k for k, pair in enumerate(zip(tensors, before, strict=True)) if not same(*pair)]
    assert set(changed) <= set(positions)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.equal(one, other))


def test_the_observer_of_a_fake_quantization_writes_what_it_observes() -> None:
    function = torch.fused_moving_avg_obs_fake_quant
    assert written_values(call(function, *OBSERVED, 0.1, 0, 255, 0, result=X)) == [3, 4, 5, 6]


@pytest.mark.parametrize("name", ["view_as", "expand_as", "reshape_as", "type_as"])
def test_views_of_methods(name: str) -> None:
    assert is_view(EMPTY, call(name, X, X))


@pytest.mark.parametrize(
    "function",
    [
        torch.nn.init.uniform,  # type: ignore[attr-defined]
        torch._C._functorch._add_batch_dim,
    ],
)
def test_functions_that_only_have_the_name_of_an_op(function: Callable[..., Any]) -> None:
    node = call(function, X, result=X)
    assert not is_known_view(node)
    assert written(EMPTY, node) == node.all_input_nodes


@pytest.mark.slow
def test_a_dual_tensor_is_not_its_argument() -> None:
    def slope(x: torch.Tensor, tangent: torch.Tensor) -> Any:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, tangent)
            return forward_ad.unpack_dual(dual.sin() * dual).tangent

    backend = cgcompile.Backend(compiler="eager", capture_device="host")
    compiled = torch.compile(slope, backend=backend)
    for _ in range(3):
        x, tangent = torch.randn(4), torch.randn(4)
        torch.testing.assert_close(compiled(x, tangent), (x.cos() * x + x.sin()) * tangent)


@dataclasses.dataclass(frozen=True)
class Unhashable:
    sizes: list[int]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_no_boundary_is_an_unhashable_callable() -> None:
    assert Boundaries().match_call(Unhashable([1])) is None


def test_a_users_function_is_not_kept() -> None:
    weight = torch.ones(3)
    alive = weakref.ref(weight)

    def scale(x: torch.Tensor, weight: torch.Tensor = weight) -> torch.Tensor:
        return x * weight

    node = call(scale, X)
    assert Boundaries().match(node) is None
    assert written(EMPTY, node)
    del node, scale, weight
    gc.collect()
    assert alive() is None


def test_names_of_functions_are_of_one_function() -> None:
    assert inductor.qualified_name(torch.relu) not in (
        None,
        inductor.qualified_name(torch.relu_),
    )
    assert inductor.qualified_name(torch.Tensor.relu) is not None
    of_pybind11 = torch._C._functorch._add_batch_dim  # bound to no module
    assert inductor.qualified_name(of_pybind11) == "torch._C._functorch._add_batch_dim"
    for target in (torch.Tensor.mT.__get__, torch.Generator().seed, torch.nn.ReLU().forward):
        assert inductor.qualified_name(target) is None
    refs = torch._refs
    assert inductor.qualified_name(refs.abs_) != inductor.qualified_name(refs.abs)
