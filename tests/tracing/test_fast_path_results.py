"""What a call returns by its fast path: containers, arguments, buffers, constants, as in eager."""

from typing import Any

import pytest
import torch
from lib.entry import assert_same, operators
from lib.fast_paths import FULL, PIECEWISE, Linear, compiled, context

import cgcompile
from cgcompile.errors import AddressChangedError, HostValueChangedError
from cgcompile.runtime.fast_path import NOT_SERVED

pytestmark = pytest.mark.usefixtures("without_gradients")


class Empty(Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x), (), [()]


class Twice(Linear):
    def forward(self, x: torch.Tensor) -> Any:
        result = [self.inner(x)]
        return result, result


class Attends(Linear):
    def forward(self, x: torch.Tensor, a: Any = None, b: Any = None) -> Any:
        result = self.inner(x)
        out = torch.empty_like(result)
        torch.ops.cgentry.attend(result, a, b, out)
        return self.inner(out), a


class NoInputs(Linear):
    def forward(self, factor: int) -> torch.Tensor:
        out = torch.empty_like(self.kept)
        torch.ops.cgentry.attend(self.kept, self.kept, self.kept, out)
        return self.inner(out) * factor


class Several(Linear):
    """Returns containers, an argument, and what no graph computes."""

    def forward(self, x: torch.Tensor, scale: int, y: torch.Tensor | None = None) -> Any:
        result = self.inner(x) * scale
        return {"result": result, "more": (result + 1, [x, None]), "y": y}


def test_empty_and_shared_containers() -> None:
    x = torch.randn(3, 4)
    for model in (Empty(), Twice()):  # of one list twice, the fast path of the graph alone
        runs = compiled(model)
        for _ in range(5):
            x.copy_(torch.randn(3, 4))
            with context():
                result = runs(x)
            assert_same(result, model(x))
            assert (result[0] is result[1]) == isinstance(model, Twice)
        (graph,) = runs.backend.graphs
        assert graph.fast_paths.replays == 2
        assert (graph.fast_paths.call is None) == isinstance(model, Twice)


def test_keywords_in_another_order() -> None:
    operators()
    model = Attends()
    runs = compiled(model, splitting_ops=["cgentry::attend"])
    x, a, b = (torch.randn(3, 4) for _ in range(3))
    for step in range(6):
        with context(PIECEWISE):
            result, same = runs(x, b=b, a=a) if step else runs(x, a=a, b=b)
        assert torch.allclose(result, model(x, a, b)[0])
        assert same is a
    assert runs.backend.graphs[0].fast_paths.call is not None


def test_a_graph_without_inputs() -> None:
    operators()
    model = NoInputs()
    runs = compiled(model, splitting_ops=["cgentry::attend"], dynamic_dims=None)
    for _ in range(5):
        with context(PIECEWISE):
            assert torch.allclose(runs(2), model(2))
    assert runs.backend.graphs[0].fast_paths.replays == 2


@pytest.mark.parametrize("names", [(), ("y",)])
def test_containers_arguments_and_constants(names: tuple[str, ...]) -> None:
    model = Several()
    runs, x = compiled(model), torch.randn(3, 4)
    more = {name: torch.randn(2) for name in names}
    for _ in range(5):
        x.copy_(torch.randn(3, 4))
        with context():
            result = runs(x, scale=2, **more)
        expected = model(x, scale=2, **more)
        assert list(result) == list(expected)
        assert_same(
            [result["result"], result["more"][0]], [expected["result"], expected["more"][0]]
        )
        assert result["more"][1][0] is x
        assert result["more"][1][1] is None
        assert result["y"] is expected["y"]
    (graph,) = runs.backend.graphs
    assert graph.fast_paths.replays >= 2
    with context():
        assert graph.fast_paths.call((x,), {"scale": 3, **more}) is NOT_SERVED


class Writes(Linear):
    """The Python around its graph writes an attribute."""

    last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.inner(x)
        return self.last + 1


def test_python_with_effects_has_no_fast_path() -> None:
    model = Writes()
    runs, x = compiled(model), torch.randn(3, 4)
    for _ in range(4):
        x.copy_(torch.randn(3, 4))
        model.last = None
        with context():
            result = runs(x)
        assert torch.equal(result, model.inner(x) + 1)
        assert torch.equal(model.last, model.inner(x))
    (graph,) = runs.backend.graphs
    assert graph.counters.replays == 2
    assert graph.fast_paths.call is None


def test_quantized_and_nested_results_from_outside() -> None:
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    config = cgcompile.CompilationConfig(capture_device="host")
    wrapper = cgcompile.CUDAGraphWrapper(lambda x: (x * 2, quantized, nested), config, FULL)
    x = torch.randn(3, 4)
    for _ in range(3):
        with context():
            result = wrapper(x)
        assert result[1].q_scale() == pytest.approx(0.1)
        assert result[2] is nested
    assert wrapper.counters.replays == 2


class SameArguments(Linear):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result = torch.cat([self.inner(x), y])
        return result * 2 if x is y else result


@pytest.mark.parametrize("apart", [True, False])
def test_no_check_of_what_follows_from_addresses_and_sizes(apart: bool) -> None:
    model = SameArguments()
    dims = {"x": {0: "n"}, "y": {0: "n"}}
    runs, x = compiled(model, dynamic_dims=dims), torch.randn(3, 4)
    y = torch.randn(3, 4) if apart else x[:]
    for _ in range(5):
        with context():
            runs(x, y)
    paths = runs.backend.graphs[0].fast_paths
    names = paths.call.__code__.co_names
    assert "shape" not in names
    assert ("id" in names) != apart
    assert paths.replays == 2
    for other in [x, y, x, y, y]:
        x.copy_(torch.randn(3, 4))
        with context():
            assert_same([runs(x, other)], [model(x, other)])
    assert paths.replays > 2, "the fast path is still there"
    with context(), pytest.raises(HostValueChangedError, match=r"y.size\(\)\[0\]' is 2, was 3"):
        runs(x, y[:2])
    if apart:
        with context(), pytest.raises(AddressChangedError):
            runs(y, x)


class ComparesOwn(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = torch.cat([self.inner(x), self.kept])
        return result * 2 if x is self.kept else result


@pytest.mark.parametrize("apart", [True, False])
def test_a_frozen_tensor_at_the_address_of_an_argument(apart: bool) -> None:
    model = ComparesOwn()
    runs, x = compiled(model), torch.randn(3, 4) if apart else model.kept[:]
    for _ in range(5):
        with context():
            runs(x)
    names = runs.backend.graphs[0].fast_paths.call.__code__.co_names
    assert ("id" in names) != apart
    for other in [x, model.kept, x, x, model.kept]:
        other.copy_(torch.randn(3, 4))
        with context():
            assert_same([runs(other)], [model(other)])


class ReturnsInputs(Linear):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        kept = self.kept.add_(1)
        return self.inner(x) + kept, y.add_(x), kept, y.view(-1)


class ReturnsBuffer(Linear):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.inner(x) + self.kept, y, self.kept.mul_(2), y.view(-1)


@pytest.mark.parametrize("mode", [FULL, PIECEWISE], ids=str)
@pytest.mark.parametrize("kind", [ReturnsInputs, ReturnsBuffer])
def test_inputs_and_buffers_in_the_result(kind: Any, mode: Any) -> None:
    model, eager = kind(), kind()
    eager.load_state_dict(model.state_dict())
    runs, x, y = compiled(model, dynamic_dims=None), torch.empty(3, 4), torch.zeros(3, 4)
    kept = model.kept
    for _ in range(6):
        x.copy_(torch.randn(3, 4))
        other, same = y.clone(), y[:]  # another object at the same address
        with context(mode):
            result = runs(x, same)
        assert_same(result, eager(x, other))
        assert result[1] is same
        assert result[2] is kept is model.kept
        assert result[3] is not same
    (graph,) = runs.backend.graphs
    assert graph.fast_paths.call is not None
    assert graph.fast_paths.replays == 3
