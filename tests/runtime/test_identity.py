"""What a step returns of its inputs is the very object, call after call; a view is another one."""

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lib.entry import Hook, Hooked, operators
from torch import nn

import cgcompile
from cgcompile import Backend, BatchDescriptor, CUDAGraphMode
from cgcompile.errors import DispatchError
from cgcompile.reasons import Reason

pytestmark = pytest.mark.usefixtures("without_gradients")

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
ENTRY_POINTS = ("torch", "keep", "shape", "none")
N = 4


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()


def built(model: nn.Module, entry_point: str, **settings: Any) -> tuple[Any, Backend]:
    options = {"compiler": "eager", "capture_device": "host", "cache_dir": "off", **settings}
    backend = Backend(**options)
    if entry_point == "torch":
        return torch.compile(model, backend=backend), backend
    return cgcompile.compile(model, backend, guards=entry_point), backend


def recorder(device: str) -> str:
    return "host" if device == "cpu" else "auto"


def context(mode: CUDAGraphMode | None) -> Any:
    if mode is None:
        return contextlib.nullcontext()
    return cgcompile.set_forward_context(
        cudagraph_runtime_mode=mode, batch_descriptor=BatchDescriptor(N)
    )


class Count(nn.Module):
    """Counts its calls in a buffer, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(N, N)
        self.register_buffer("count", torch.zeros(()))
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.inner(x) * self.count


class Replaced(Count):
    """Counts its calls in another buffer each time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return self.inner(x) * self.count


class Returns(Count):
    """Returns inputs and buffers as they are, and views of them, around an attention."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        self.count += 1
        first = y.mul_(1.5)
        F.scaled_dot_product_attention(x[None], x[None], x[None])
        attended = F.scaled_dot_product_attention(x[None], y[None], x[None])[0]
        results = {"made": self.inner(attended) * self.count, "first": first, "y": y}
        results |= {"again": y.add_(self.inner(attended)), "count": self.count, "x": x}
        results |= {"weight": self.inner.weight, "contiguous": x.contiguous(), "to": x.to(x.dtype)}
        results |= {"view": y.view(N, N), "slice": y[:], "detached": y.detach()}
        return results | {"x view": x.view(N, N), "x slice": x[:], "held": self.count.detach()}


def objects(model: Count, x: torch.Tensor, y: torch.Tensor, result: Any) -> dict[str, str]:
    """Which of what the step was given each item of its result is."""
    known = {"x": x, "y": y, "count": model.count, "weight": model.inner.weight}
    return {
        key: next((name for name, each in known.items() if each is value), "another object")
        for key, value in result.items()
    }


@pytest.mark.parametrize("mode", [None, FULL, PIECEWISE], ids=str)
@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_a_buffer_that_is_changed_in_place_stays(
    entry_point: str, mode: CUDAGraphMode | None, device: str
) -> None:
    model, eager = Count().to(device), Count().to(device)
    eager.load_state_dict(model.state_dict())
    compiled, backend = built(
        model, entry_point, on_fallback="raise", capture_device=recorder(device)
    )
    count, x = model.count, torch.empty(4, N, device=device)
    for calls in range(1, 31):
        x.copy_(torch.randn(4, N))
        with context(mode):
            result = compiled(x)
        assert torch.allclose(result, eager(x), atol=1e-5)
        assert model.count is count
        assert model.count.item() == calls
    counters = backend.counters
    assert (counters.captures, counters.replays) == (1, 28), counters


@pytest.mark.slow
@pytest.mark.parametrize("mode", [None, FULL, PIECEWISE], ids=str)
@pytest.mark.parametrize(
    ("compiler", "entry_point"),
    [
        *(("eager", entry_point) for entry_point in ENTRY_POINTS),
        ("aot", "torch"),
        ("aot", "none"),
        pytest.param("inductor", "none", marks=pytest.mark.slow),
    ],
)
def test_the_same_items_are_inputs_as_in_eager(
    compiler: str, entry_point: str, mode: CUDAGraphMode | None, device: str
) -> None:
    model, eager = Returns().to(device), Returns().to(device)
    eager.load_state_dict(model.state_dict())
    compiled, backend = built(
        model, entry_point, compiler=compiler, capture_device=recorder(device)
    )
    x, y = torch.empty(N, N, device=device), torch.randn(N, N, device=device)
    for calls in range(1, 6):
        x.copy_(torch.randn(N, N))
        other = x.clone(), y.clone()
        with context(mode):
            result = compiled(x, y)
        expected = eager(*other)
        assert objects(model, x, y, result) == objects(eager, *other, expected), calls
        assert list(objects(model, x, y, result).values()).count("another object") == 7
        for name, value in result.items():
            assert torch.allclose(value, expected[name], atol=1e-5), (calls, name)
        for name in ("view", "slice", "detached", "x view", "x slice"):
            result[name].unsqueeze_(0)  # not of what the caller gave, nor of a later result
    counters = backend.counters
    assert (counters.captures, counters.replays) == (1, 3), counters


@pytest.mark.parametrize("mode", [None, FULL], ids=str)
def test_each_call_gets_its_own_argument(mode: CUDAGraphMode | None, device: str) -> None:
    """The graphs read one buffer, or one place, whichever tensor a call passes."""
    model, settings = Returns().to(device), {"capture_device": recorder(device)}
    compiled, backend = built(model, "none", on_input_change="copy", **settings)
    y, seen = torch.zeros(N, N, device=device), []
    for _ in range(6):
        x, alike = torch.randn(N, N, device=device), y[:]
        with context(mode):
            result = compiled(x, alike)
        assert result["contiguous"] is result["to"] is x
        assert result["first"] is result["again"] is alike
        assert result["x view"] is not x
        assert torch.equal(result["x view"], x)
        seen.append(x)
    assert len(set(map(id, seen))) == 6
    assert backend.counters.replays == 4, backend.counters


class OneBreak(Hooked):
    """A buffer that is written before an op that cannot be captured, or that refuses to be."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(x) * self.count


@pytest.mark.parametrize("entry_point", ["torch", "none"])
def test_a_step_whose_capture_fails(entry_point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operators()
    model, eager = OneBreak(), OneBreak()
    eager.load_state_dict(model.state_dict())
    compiled, backend = built(model, entry_point)
    count, x = model.count, torch.randn(3, model.before.in_features)
    assert torch.allclose(compiled(x), eager(x), atol=1e-5)
    monkeypatch.setattr(Hook, "function", staticmethod(lambda x: x * x.sum().item()))
    for calls in range(2, 6):
        assert torch.allclose(compiled(x), eager(x), atol=1e-5)
        assert model.count is count
        assert count.item() == calls
    assert backend.counters.captures == 0
    assert backend.counters.plain[Reason.CAPTURE_FAILED] > 0, backend.counters


@pytest.mark.slow
@pytest.mark.parametrize("entry_point", ["torch", "none"])
def test_steps_in_other_modes_of_autograd(entry_point: str) -> None:
    model = Count()
    compiled, backend = built(model, entry_point)
    count, calls = model.count, 0
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        for _ in range(4):
            x = torch.randn(2, N, requires_grad=mode is torch.enable_grad)
            with mode():
                result = compiled(x)
            calls += 1
            assert model.count is count
            assert count.item() == calls
            assert torch.allclose(result, model.inner(x) * calls, atol=1e-5)
    assert backend.counters.plain[Reason.GRADIENTS] == 4
    assert backend.counters.replays > 0


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"compiler": "eager"}, {"mode": "STOCK_TORCH_COMPILE"}])
def test_without_graphs(settings: dict[str, Any]) -> None:
    model, backend = Count(), Backend(cudagraph_mode="NONE", cache_dir="off", **settings)
    compiled = cgcompile.compile(model, backend, guards="none")
    count, x = model.count, torch.randn(2, N)
    for calls in range(1, 4):
        assert torch.allclose(compiled(x), model.inner(x) * calls, atol=1e-5)
        assert model.count is count
        assert count.item() == calls


@pytest.mark.slow
@pytest.mark.parametrize("look", ["verify", "doctor", "explain"])
@pytest.mark.parametrize("entry_point", ["torch", "none"])
def test_looking_leaves_the_buffer_where_it_was(entry_point: str, look: str) -> None:
    model = Count()
    compiled, backend = built(model, entry_point)
    count, x = model.count, torch.randn(2, N)
    for _ in range(3):
        compiled(x)
    result = getattr(cgcompile.debug, look)(compiled, x)
    assert getattr(result, "ok", True)
    assert model.count is count
    assert count.item() == 3
    replays = backend.counters.replays
    assert torch.allclose(compiled(x), model.inner(x) * 4, atol=1e-5)
    assert model.count is count
    assert backend.counters.replays == replays + 1


# ---------------------------------------------------------------- what cannot stay


@pytest.mark.slow
@pytest.mark.parametrize("mode", [None, FULL], ids=str)
@pytest.mark.parametrize("entry_point", ["torch", "none"])
def test_a_buffer_that_is_replaced_is_said(entry_point: str, mode: CUDAGraphMode | None) -> None:
    model, eager = Replaced(), Replaced()
    eager.load_state_dict(model.state_dict())
    compiled, backend = built(model, entry_point, max_weight_sets=8)
    x = torch.randn(2, N)
    for _ in range(80):
        with context(mode):
            result = compiled(x)
        assert torch.allclose(result, eager(x), atol=1e-5)
    counters = backend.counters
    assert counters.captures == counters.replays == 0
    assert counters.plain[Reason.TOO_MANY_WEIGHT_SETS] >= 80 - 66, counters
    said = counters.details[Reason.TOO_MANY_WEIGHT_SETS]
    assert "'count' is a new tensor at every call" in said
    assert "copy_" in said
    assert "argument" in said


@pytest.mark.slow
@pytest.mark.parametrize("mode", [None, FULL], ids=str)
def test_strict_does_not_run_it_for_ever(mode: CUDAGraphMode | None) -> None:
    model = Replaced()
    compiled, backend = built(model, "torch", on_fallback="raise", max_weight_sets=8)
    x = torch.randn(2, N)
    for _ in range(64):
        with context(mode):
            compiled(x)
    said = r"count.* is a new tensor at every call.*copy_"
    with context(mode), pytest.raises(DispatchError, match=said):
        compiled(x)
    assert model.count.item() == 64  # the refused step has not run
    assert backend.counters.failures == 1


@pytest.mark.slow
def test_many_layers_that_share_a_graph_are_not_taken_for_it() -> None:
    """Each has weights of its own, which stay: they warm up and get graphs."""
    layers = [nn.Linear(N, N).requires_grad_(False) for _ in range(66)]
    settings = {"compiler": "eager", "capture_device": "host", "cache_dir": "off"}
    backend = Backend(**settings, on_fallback="raise", max_weight_sets=66)
    compiled = [torch.compile(each, backend=backend) for each in layers]
    x = torch.randn(4, N)
    for _ in range(3):
        for one, layer in zip(compiled, layers, strict=True):
            with context(FULL):
                assert torch.allclose(one(x), layer(x), atol=1e-5)
    assert (backend.counters.captures, backend.counters.replays) == (66, 66)
