"""Layers of one class share a compiled graph: each is right, and replays, in a chain of them."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lib.front_ends import ROWS, WIDTH, context, settings
from torch import nn

import cgcompile
from cgcompile import CUDAGraphMode
from cgcompile.torch_compat import raw_memory


class Layer(nn.Module):
    """Attention in the middle, and captured work on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k = self.linear(x)[None, None]
        return torch.relu(F.scaled_dot_product_attention(k, k, k)[0, 0] + x)


class EndsEager(Layer):
    """Return what the boundary computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k = self.linear(x.view(-1, WIDTH))[None, None]
        return F.scaled_dot_product_attention(k, k, k)


class Halves(nn.Module):
    """Return a result and a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x)
        return y, y[:, 2:4]


class Chain:
    """Equal layers, compiled one by one with one backend; every result is compared at the end."""

    def __init__(
        self,
        kind: Callable[[], nn.Module],
        count: int,
        device: str,
        mode: CUDAGraphMode | None,
        dynamic: bool | None = False,
        **more: object,
    ) -> None:
        torch.manual_seed(0)
        self.kind, self.device, self.mode, self.dynamic = kind, device, mode, dynamic
        self.backend = cgcompile.Backend(settings(device, **more))
        self.layers: list[nn.Module] = []
        self.compiled: list[Any] = []
        self.add(count)
        self.inputs: dict[int, torch.Tensor] = {}
        self.results: list[torch.Tensor] = []

    def add(self, count: int = 1) -> None:
        for _ in range(count):
            layer = self.kind().to(self.device).requires_grad_(False)
            self.layers.append(layer)
            self.compiled.append(torch.compile(layer, backend=self.backend, dynamic=self.dynamic))

    def step(self, rows: int = ROWS, chosen: slice = slice(None), times: int = 1) -> None:
        """Run the chosen layers, and compare all of their results after the last one has run."""
        for _ in range(times):
            x = self.inputs.setdefault(rows, torch.zeros(rows, WIDTH, device=self.device))
            x.normal_()
            results, expected = [x], [x.clone()]
            for compiled, layer in zip(self.compiled[chosen], self.layers[chosen], strict=True):
                expected.append(layer(expected[-1]))
                with nullcontext() if self.mode is None else context(rows, self.mode):
                    results.append(compiled(results[-1]))
            for number, (result, want) in enumerate(zip(results, expected, strict=True)):
                text = f"layer {number}: "
                torch.testing.assert_close(result, want, msg=lambda more, text=text: text + more)
            self.results = results

    def replays(self, rows: int = ROWS, chosen: slice = slice(None)) -> int:
        """How many layers of one more step are replayed."""
        before = self.backend.counters.replays
        self.step(rows, chosen)
        return self.backend.counters.replays - before


GRAPHS = [CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL]
pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("mode", [*GRAPHS, None], ids=["PIECEWISE", "FULL", "no_context"])
@pytest.mark.parametrize("count", [2, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_a_chain_of_equal_layers_replays(
    count: int, mode: CUDAGraphMode | None, dynamic: bool, grad: type, device: str
) -> None:
    with grad():
        chain = Chain(Layer, count, device, mode, dynamic)
        for rows in (6, ROWS) if dynamic else (ROWS,):
            # in inference mode each capture lets the next layer warm up
            chain.step(rows, times=count + 3)
            assert chain.replays(rows) == count
        for rows in (ROWS, 6, ROWS) if dynamic else (ROWS, ROWS):
            assert chain.replays(rows) == count
    assert chain.backend.counters.failures == 0


@pytest.mark.parametrize("count", [2, 3])
def test_results_of_eager_pieces_stay_until_the_next_call_of_their_layer(
    count: int, device: str
) -> None:
    chain = Chain(EndsEager, count, device, CUDAGraphMode.PIECEWISE)
    chain.step(times=4)
    assert chain.replays() == count


@pytest.mark.slow
@pytest.mark.parametrize("mode", GRAPHS)
@pytest.mark.parametrize("kind", [Layer, EndsEager])
def test_layers_that_come_after_the_first_was_captured_leave_its_results_alone(
    kind: type[nn.Module], mode: CUDAGraphMode, device: str
) -> None:
    chain = Chain(kind, 4, device, mode)
    for count in (1, 2, 4):
        chosen = slice(count)
        for rows in (6, ROWS):
            chain.step(rows, chosen, times=4)
        assert chain.replays(6, chosen) == count
        assert chain.replays(ROWS, chosen) == count


@pytest.mark.parametrize("mode", GRAPHS)
def test_layers_that_are_warm_before_the_first_wait_for_it(
    mode: CUDAGraphMode, device: str
) -> None:
    """What the first returns while it warms up has another address at every step."""
    chain = Chain(Layer, 3, device, mode)
    chain.step(chosen=slice(1, 3))
    chain.inputs.clear()
    chain.step(times=4)
    assert chain.replays() == 3
    assert chain.backend.counters.failures == 0


@pytest.mark.parametrize("setting", ["poison", "stale"])
@pytest.mark.parametrize("kind", [Layer, EndsEager])
@pytest.mark.parametrize("mode", GRAPHS)
def test_the_last_result_outlives_the_calls_of_other_layers(
    mode: CUDAGraphMode, kind: type[nn.Module], setting: str, device: str
) -> None:
    """It is valid until the next call of its own layer; with both settings of debug."""
    if setting == "stale" and not raw_memory.can_expire_storages():
        pytest.skip("this build of torch cannot make a storage raise")
    chain = Chain(kind, 3, device, mode, debug=setting)
    chain.step(times=4)
    assert chain.replays() == 3
    last, want = chain.results[-1], chain.results[-1].clone()
    assert chain.replays(chosen=slice(2)) == 2
    torch.testing.assert_close(last, want)
    first = chain.results[1]
    assert chain.replays(chosen=slice(2)) == 2
    if setting == "stale":
        with pytest.raises(RuntimeError, match="is stale"):
            first.clone()


@pytest.mark.parametrize("mode", GRAPHS)
def test_replaced_weights_of_one_layer_do_not_stop_the_layers_after_it(
    mode: CUDAGraphMode, device: str
) -> None:
    chain = Chain(Layer, 3, device, mode)
    chain.step(times=4)
    for _ in range(3):
        new = nn.Linear(WIDTH, WIDTH).to(device).requires_grad_(False)
        chain.layers[0].linear.weight, chain.layers[0].linear.bias = new.weight, new.bias
        chain.step(times=4)
        assert chain.replays() == 3
    assert chain.backend.counters.failures == 0


def test_results_of_several_weight_sets_share_memory(device: str) -> None:
    chain = Chain(Halves, 2, device, CUDAGraphMode.FULL)
    x = torch.zeros(ROWS, WIDTH, device=device)
    for _ in range(5):
        x.normal_()
        for step, model in zip(chain.compiled, chain.layers, strict=True):
            with context():
                y, part = step(x)
            expected, view = model(x)
            part.zero_()
            view.zero_()
            torch.testing.assert_close(y, expected)
    assert chain.backend.counters.replays >= 4


def test_the_only_weight_set_shares_the_memory_of_its_results(device: str) -> None:
    """Results of all sizes use the memory of the largest, as long as one layer is compiled."""
    chain = Chain(Layer, 1, device, CUDAGraphMode.FULL, dynamic=True)
    for rows in (64, 32, 16):
        chain.step(rows, times=3)
    (graph,) = {id(graph): graph for graph in chain.backend.graphs}.values()
    assert [recording.owner for recording in graph.recordings] == [None, None, None]
    assert graph.pool.arena.nbytes == 0  # results are not copied


@pytest.mark.slow
def test_memory_of_earlier_weight_sets_is_given_back(device: str) -> None:
    """Layers come and go, at times with others and at times alone: what graphs hold stays."""
    held = []
    chain = Chain(Layer, 1, device, CUDAGraphMode.PIECEWISE, dynamic=True)
    for _ in range(8):
        for rows in (16, 32):  # with the layer before, and then alone
            chain.step(rows, times=3)
            del chain.layers[:-1], chain.compiled[:-1]
            chain.results = []
            gc.collect()
        assert chain.replays(32) == 1
        pool = chain.backend.graphs[0].pool
        assert pool is not None
        held.append(pool.nbytes)
        chain.add()
    assert chain.backend.counters.failures == 0
    assert max(held[4:]) <= max(held[:4])
