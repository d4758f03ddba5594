"""Results of steps: reused tensors, which callers may change, and arguments and weights among them."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lib.breakable import FULL, PIECEWISE, step
from torch import nn

import cgcompile
from cgcompile import (
    BreakableCUDAGraphWrapper,
    CompilationConfig,
    CUDAGraphMode,
    CUDAGraphOptions,
    CUDAGraphWrapper,
)
from cgcompile.errors import AddressChangedError
from cgcompile.graphs.results import ReusedTensors, results_of_call

pytestmark = pytest.mark.usefixtures("without_gradients")

N, D = 6, 4


def config(device: str, **more: Any) -> CompilationConfig:
    return CompilationConfig(capture_device="host" if device == "cpu" else "auto", **more)


# ---------------------------------------------------------------- what callers change


def data(tensor: torch.Tensor, other: torch.Tensor) -> None:
    tensor.data = other


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "t_": lambda r: r.t_(),
    "unsqueeze_": lambda r: r.unsqueeze_(0),
    "resize_": lambda r: r.resize_(2, 2),
    "as_strided_": lambda r: r.as_strided_((2, D), (D, 1), D),
    "set_": lambda r: r.set_(torch.zeros(N, D, device=r.device)),
    "data": lambda r: data(r, torch.zeros(N, D, device=r.device)),
    "data, another view": lambda r: data(r, r.data.view(torch.int32)),
    "requires_grad_": lambda r: r.requires_grad_(),
    "class": lambda r: setattr(r, "__class__", nn.Parameter),
}


class Model(nn.Module):
    """Returns a tensor, a view of it, a view of its input, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.inner(x)
        scores = torch.nn.functional.scaled_dot_product_attention(hidden, hidden, hidden)
        out = torch.relu(scores + hidden)
        return {"out": out, "more": [out.t(), x[1:]], "count": 3}


def compiled(model: nn.Module, config: CompilationConfig, mode: CUDAGraphMode) -> Any:
    return cgcompile.compile(
        model,
        compiler="eager",
        capture_device=config.capture_device,
        guards="none",
        dynamic_dims={"x": 0},
    )


STRONG = CUDAGraphOptions(weak_ref_output=False)
FRONT_ENDS: dict[str, Callable[..., Any]] = {
    "compiled": compiled,
    "wrapped": CUDAGraphWrapper,
    "strongly wrapped": partial(CUDAGraphWrapper, cudagraph_options=STRONG),
    "breakable": BreakableCUDAGraphWrapper,
}


def replays(runs: Any) -> int:
    return int((runs.backend if hasattr(runs, "backend") else runs).counters.replays)


def tensors(result: Any) -> list[torch.Tensor]:
    return [result["out"], *result["more"]]


def assert_same(result: Any, expected: Any) -> None:
    """Of equal structure, numbers and layouts."""
    assert list(result) == list(expected)
    assert (result["count"], len(result["more"])) == (3, 2)
    for one, other in zip(tensors(result), tensors(expected), strict=True):
        assert type(one) is torch.Tensor
        assert one.stride() == other.stride()
        assert not one.requires_grad
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("mode", [FULL, PIECEWISE])
@pytest.mark.parametrize("name", FRONT_ENDS)
def test_no_later_step_shows_what_a_caller_changes(
    name: str, mode: CUDAGraphMode, inference: bool, device: str
) -> None:
    torch.manual_seed(0)
    model = Model().eval().requires_grad_(False).to(device)
    runs, x = FRONT_ENDS[name](model, config(device), mode), torch.empty(N, D, device=device)

    def check() -> Any:
        with step(N, mode):
            result = runs(x.normal_())
        assert_same(result, model(x))
        return result

    with torch.inference_mode(inference):
        for _ in range(3):
            check()
        for item in range(3):
            for change in CHANGES.values():
                before = replays(runs)
                result = check()
                assert replays(runs) == before + 1
                kept = tensors(result)[item]
                change(kept)
                changed = kept.shape, kept.requires_grad
                result["out"] = None
                result["more"].clear()
                check()
                assert (kept.shape, kept.requires_grad) == changed, "the caller keeps it"


def test_unchanged_tensors_are_the_same_objects() -> None:
    conjugate = torch.randn(3, dtype=torch.complex64).conj()
    reused = ReusedTensors([torch.randn(3, 2), torch.empty(0, 3), conjugate])
    first = reused.get()
    assert reused.get() is first
    with torch.inference_mode():
        assert reused.get() is first
    first[0].t_()
    first[1].t_()
    second = reused.get()
    assert second[2] is first[2]
    assert second[2].is_conj()
    assert torch.equal(second[2], conjugate)
    assert [tensor.shape for tensor in second[:2]] == [(3, 2), (0, 3)]
    assert second[0].data_ptr() == first[0].data_ptr()
    assert first[0].shape == (2, 3)
    second[2].unsqueeze_(0)
    assert torch.equal(reused.get()[2], conjugate)
    assert ReusedTensors([]).get() == ()


def test_memory_that_a_caller_let_grow() -> None:
    reused = ReusedTensors([torch.randn(3, 2)])
    reused.get()[0].resize_(4000, 2)
    with pytest.raises(AddressChangedError, match=r"resize_\(\)"):
        reused.get()


@dataclasses.dataclass
class Record:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]


def test_dataclasses_and_objects() -> None:
    marker = object()
    captured = Record(torch.randn(2, 2), (torch.randn(3),)), marker, None
    output = results_of_call(captured)
    first = output.make((), ())
    assert first[1] is marker
    first[0].logits.t_()
    first[0].hidden = ()
    record, _, nothing = output.make((), ())
    assert nothing is None
    assert torch.equal(record.logits, captured[0].logits)
    assert torch.equal(record.hidden[0], captured[0].hidden[0])
    assert record is not captured[0]


def test_a_result_of_the_capturing_call_is_the_callers(device: str) -> None:
    """Memory from outside of the pool too, and a dataclass."""

    def model(x: torch.Tensor) -> Record:
        x.add_(1)
        return Record(x * 2, (x.view(-1),))

    runs, x = CUDAGraphWrapper(model, config(device)), torch.zeros(N, D, device=device)
    with step(N, FULL):
        first = runs(x)
        first.logits.t_()
        first.hidden[0].unsqueeze_(0)
        first.logits = None
        second = runs(x)
    assert second.logits.tolist() == [[4.0] * D] * N
    assert second.hidden[0].tolist() == [2.0] * (N * D)


# ---------------------------------------------------------------- arguments and weights


class Passing(nn.Module):
    """Returns arguments and weights as they are, and views of them, around an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)
        self.register_buffer("count", torch.zeros(()))
        self.scale = torch.ones(D)  # no buffer
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor, pair: Any, *, mask: torch.Tensor) -> dict[str, Any]:
        self.count += 1
        self.scale.mul_(0.5)
        hidden = torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])[0]
        pair[1].add_(self.inner(hidden))
        results = {"made": hidden * self.count * self.scale, "x": x, "pair": pair[1], "mask": mask}
        results |= {"count": self.count, "scale": self.scale, "weight": self.inner.weight}
        results |= {"x view": x.view(D, D), "slice": pair[1][:], "held": self.count.detach()}
        return results


def alone(x: torch.Tensor) -> torch.Tensor:
    """One tensor, which is its argument."""
    return x.mul_(2)


def objects(model: Passing, call: tuple[Any, ...], result: dict[str, Any]) -> dict[str, str]:
    x, pair, mask = call
    known = {"x": x, "pair": pair[1], "mask": mask, "count": model.count, "scale": model.scale}
    known["weight"] = model.inner.weight
    return {
        key: next((name for name, each in known.items() if each is value), "another object")
        for key, value in result.items()
    }


@pytest.mark.parametrize("mode", [FULL, PIECEWISE], ids=str)
@pytest.mark.parametrize("kind", [CUDAGraphWrapper, BreakableCUDAGraphWrapper])
def test_the_same_items_are_arguments_or_weights_as_in_eager(
    kind: Callable[..., Any], mode: CUDAGraphMode, device: str
) -> None:
    with torch.device(device):
        model, eager = Passing(), Passing()
        x, mask, pair = torch.empty(D, D), torch.ones(2), (torch.zeros(1), torch.randn(D, D))
    eager.load_state_dict(model.state_dict())
    runs = kind(model, config(device, on_fallback="raise"), mode)
    count, scale = model.count, model.scale
    for calls in range(5):
        x.normal_()
        # Other objects at the same addresses serve as well.
        call = (x[:], (pair[0], pair[1][:]), mask[:])
        other = (x.clone(), (pair[0], pair[1].clone()), mask)
        with step(D, mode):
            result = runs(*call[:2], mask=call[2])
        expected = eager(*other[:2], mask=other[2])
        assert objects(model, call, result) == objects(eager, other, expected), calls
        assert [*objects(model, call, result).values()].count("another object") == 4
        for name, value in result.items():
            torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=1e-5)
        for name in ("x view", "slice", "held"):
            result[name].unsqueeze_(0)  # the caller's own: nothing else has changed
    assert (runs.counters.captures, runs.counters.replays) == (1, 4), runs.counters
    assert model.count is count
    assert model.scale is scale


@pytest.mark.parametrize("kind", [CUDAGraphWrapper, BreakableCUDAGraphWrapper])
def test_a_result_that_is_one_argument(kind: Callable[..., Any], device: str) -> None:
    runs = kind(alone, config(device, on_fallback="raise"), FULL)
    x = torch.ones(N, device=device)
    for calls in range(1, 5):
        same = x[:]
        with step(N, FULL):
            assert runs(same) is same
        assert x.tolist() == [2.0**calls] * N
    assert runs.counters.replays == 3
