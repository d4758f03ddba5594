"""Layers of one class share a compiled graph: each is right, and replays, in a chain of them."""

import gc
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from lib.front_ends import WIDTH, settings
from torch import nn

import cgcompile
from cgcompile import BatchDescriptor, CUDAGraphMode, set_forward_context
from cgcompile import torch_compat as compat

ROWS = 4


class Layer(nn.Module):
    """Attention in the middle, and captured work on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k = self.linear(x)[None, None]
        return torch.relu(F.scaled_dot_product_attention(k, k, k)[0, 0] + x)


class EndsEager(Layer):
    """What the boundary makes is the result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k = self.linear(x.view(-1, WIDTH))[None, None]
        return F.scaled_dot_product_attention(k, k, k)


class Chain:
    """Equal layers, compiled one by one with one backend; every result is compared at the end."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        device: str,
        mode: CUDAGraphMode | None,
        dynamic: bool | None = False,
        **more: object,
    ) -> None:
        self.device, self.mode = device, mode
        self.layers = [layer.to(device).requires_grad_(False) for layer in layers]
        self.backend = cgcompile.Backend(settings(device, **more))
        self.compiled = [
            torch.compile(layer, backend=self.backend, dynamic=dynamic) for layer in layers
        ]
        self.inputs: dict[int, torch.Tensor] = {}

    def step(self, rows: int = ROWS) -> None:
        """Run all layers, and compare all of their results after the last one has run."""
        x = self.inputs.setdefault(rows, torch.zeros(rows, WIDTH, device=self.device))
        x.copy_(torch.randn_like(x))
        results, expected = [x], [x.clone()]
        for compiled, layer in zip(self.compiled, self.layers, strict=True):
            expected.append(layer(expected[-1]))
            if self.mode is None:
                results.append(compiled(results[-1]))
                continue
            with set_forward_context(
                cudagraph_runtime_mode=self.mode, batch_descriptor=BatchDescriptor(rows)
            ):
                results.append(compiled(results[-1]))
        for number, (result, want) in enumerate(zip(results, expected, strict=True)):
            text = f"layer {number}: "
            torch.testing.assert_close(result, want, msg=lambda more, text=text: text + more)
        self.results = results

    def replays(self, rows: int = ROWS) -> int:
        """How many layers of one more step are replayed."""
        before = self.backend.counters.replays
        self.step(rows)
        return self.backend.counters.replays - before


MODES = [CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL, None]


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("mode", MODES, ids=["PIECEWISE", "FULL", "no_context"])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_chain_of_equal_layers_replays(
    count: int, mode: CUDAGraphMode | None, dynamic: bool, grad: type, device: str
) -> None:
    torch.manual_seed(0)
    with grad():
        chain = Chain([Layer() for _ in range(count)], device, mode, dynamic)
        for rows in (6, ROWS) if dynamic else (ROWS,):
            for _ in range(count + 3):  # in inference mode each capture lets the next layer warm up
                chain.step(rows)
            assert chain.replays(rows) == count
        for rows in (ROWS, 6, ROWS) if dynamic else (ROWS, ROWS):
            assert chain.replays(rows) == count
    assert chain.backend.counters.failures == 0


@pytest.mark.parametrize("count", [2, 3])
def test_results_of_eager_pieces_stay_until_the_next_call_of_their_layer(
    count: int, device: str
) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        chain = Chain([EndsEager() for _ in range(count)], device, CUDAGraphMode.PIECEWISE)
        for _ in range(4):
            chain.step()
        assert chain.replays() == count


@pytest.mark.parametrize("mode", [CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL])
@pytest.mark.parametrize("layer", [Layer, EndsEager])
def test_layers_that_come_after_the_first_was_captured_leave_its_results_alone(
    layer: type[nn.Module], mode: CUDAGraphMode, device: str
) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        chain = Chain([layer() for _ in range(4)], device, mode)
        all_layers, all_compiled = chain.layers, chain.compiled
        for count in (1, 2, 4):
            chain.layers, chain.compiled = all_layers[:count], all_compiled[:count]
            for rows in (6, ROWS):
                for _ in range(4):
                    chain.step(rows)
            assert chain.replays(6) == count
            assert chain.replays(ROWS) == count


@pytest.mark.parametrize("mode", [CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL])
def test_layers_that_are_warm_before_the_first_wait_for_it(
    mode: CUDAGraphMode, device: str
) -> None:
    """What the first returns while it warms up lies elsewhere at every step."""
    torch.manual_seed(0)
    with torch.no_grad():
        chain = Chain([Layer() for _ in range(3)], device, mode)
        layers, compiled_layers = chain.layers, chain.compiled
        chain.layers, chain.compiled = layers[1:], compiled_layers[1:]
        chain.step()
        chain.layers, chain.compiled = layers, compiled_layers
        chain.inputs.clear()
        for _ in range(4):
            chain.step()
        assert chain.replays() == 3
    assert chain.backend.counters.failures == 0


@pytest.mark.parametrize("setting", ["poison", "debug"])
@pytest.mark.parametrize("layer", [Layer, EndsEager])
@pytest.mark.parametrize("mode", [CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL])
def test_the_last_result_outlives_the_calls_of_other_layers(
    mode: CUDAGraphMode, layer: type[nn.Module], setting: str, device: str
) -> None:
    """It is valid until the next call of its own layer; what poison fills and debug expires too."""
    if setting == "debug" and not compat.can_expire_storages():
        pytest.skip("this build of torch cannot make a storage raise")
    torch.manual_seed(0)
    with torch.no_grad():
        chain = Chain([layer() for _ in range(3)], device, mode, **{setting: True})
        for _ in range(4):
            chain.step()
        assert chain.replays() == 3
        last, want = chain.results[-1], chain.results[-1].clone()
        chain.compiled = chain.compiled[:2]
        chain.layers = chain.layers[:2]
        assert chain.replays() == 2
        torch.testing.assert_close(last, want)
        first = chain.results[1]
        assert chain.replays() == 2
        if setting == "debug":
            with pytest.raises(RuntimeError, match="is stale"):
                first.clone()


@pytest.mark.parametrize("mode", [CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL])
def test_replaced_weights_of_one_layer_do_not_stop_the_layers_after_it(
    mode: CUDAGraphMode, device: str
) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        chain = Chain([Layer() for _ in range(3)], device, mode)
        for _ in range(4):
            chain.step()
        for _ in range(3):
            new = nn.Linear(WIDTH, WIDTH).to(device).requires_grad_(False)
            chain.layers[0].linear.weight, chain.layers[0].linear.bias = new.weight, new.bias
            for _ in range(4):
                chain.step()
            assert chain.replays() == 3
    assert chain.backend.counters.failures == 0


def test_the_only_weight_set_shares_the_memory_of_its_results(device: str) -> None:
    """Results of all sizes lie in the memory of the largest, as long as one layer is compiled."""
    with torch.no_grad():
        chain = Chain([Layer()], device, CUDAGraphMode.FULL, dynamic=True)
        for rows in (64, 32, 16):
            for _ in range(3):
                chain.step(rows)
        (graph,) = {id(g): g for g in chain.backend.graphs}.values()
        owners = [recording.owner for recording in graph.recordings]
    assert owners == [None, None, None]
    assert graph.pool.arena.nbytes == 0  # results are not copied


def test_memory_of_earlier_weight_sets_is_given_back(device: str) -> None:
    """Layers come and go, at times with others and at times alone: what graphs hold stays."""
    held = []
    with torch.no_grad():
        chain = Chain([Layer()], device, CUDAGraphMode.PIECEWISE, dynamic=True)
        for _ in range(8):
            for rows in (16, 32):  # with the layer before, and then alone
                for _ in range(3):
                    chain.step(rows)
                chain.layers, chain.compiled = chain.layers[-1:], chain.compiled[-1:]
                chain.results = []
                gc.collect()
            assert chain.replays(32) == 1
            pool = chain.backend.graphs[0].pool
            assert pool is not None
            held.append(pool.nbytes)
            chain.layers.append(Layer().to(device).requires_grad_(False))
            chain.compiled.append(
                torch.compile(chain.layers[-1], backend=chain.backend, dynamic=True)
            )
    assert chain.backend.counters.failures == 0
    assert max(held[4:]) <= max(held[:4])
