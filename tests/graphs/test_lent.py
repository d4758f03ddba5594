"""What callers do to results in place is never seen by a later step, whoever returns them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import cgcompile
from cgcompile import BatchDescriptor, CUDAGraphMode, CUDAGraphOptions
from cgcompile.errors import AddressChangedError
from cgcompile.graphs.outputs import ReusedResult, ReusedTensors

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
N, D = 6, 4


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
        made = self.inner(x)
        scores = torch.nn.functional.scaled_dot_product_attention(made, made, made)
        out = torch.relu(scores + made)
        return {"out": out, "more": [out.t(), x[1:]], "count": 3}


@dataclasses.dataclass
class Found:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]


def compiled(model: nn.Module, mode: CUDAGraphMode) -> Any:
    return cgcompile.compile(
        model, compiler="eager", capture_device="host", guards="none", dynamic_dims={"x": 0}
    )


def wrapped(model: nn.Module, mode: CUDAGraphMode) -> Any:
    return cgcompile.CUDAGraphWrapper(model, runtime_mode=mode)


def strongly_wrapped(model: nn.Module, mode: CUDAGraphMode) -> Any:
    options = CUDAGraphOptions(weak_ref_output=False)
    return cgcompile.CUDAGraphWrapper(model, runtime_mode=mode, cudagraph_options=options)


def breakable(model: nn.Module, mode: CUDAGraphMode) -> Any:
    return cgcompile.BreakableCUDAGraphWrapper(model, runtime_mode=mode)


def replayed(found: Any) -> int:
    return int((found.backend if hasattr(found, "backend") else found).counters.replays)


def tensors(result: Any) -> list[torch.Tensor]:
    return [result["out"], *result["more"]]


def same(result: Any, expected: Any) -> bool:
    """Of equal structure, numbers and layouts."""
    if list(result) != list(expected) or result["count"] != 3 or len(result["more"]) != 2:
        return False
    pairs = list(zip(tensors(result), tensors(expected), strict=True))
    alike = all(one.stride() == other.stride() and not one.requires_grad for one, other in pairs)
    kinds = {type(one) for one, _ in pairs}
    return alike and kinds == {torch.Tensor} and all(torch.equal(*pair) for pair in pairs)


@pytest.fixture(autouse=True)
def host_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGCOMPILE_CAPTURE_DEVICE", "host")


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("mode", [FULL, PIECEWISE])
@pytest.mark.parametrize("make", [compiled, wrapped, strongly_wrapped, breakable])
def test_nothing_that_a_caller_changes_is_seen_later(
    make: Any, mode: CUDAGraphMode, inference: bool
) -> None:
    torch.manual_seed(0)
    model = Model().eval().requires_grad_(False)
    runs, x = make(model, mode), torch.randn(N, D)
    context = cgcompile.set_forward_context(
        cudagraph_runtime_mode=mode, batch_descriptor=BatchDescriptor(N)
    )
    with torch.inference_mode() if inference else torch.no_grad():
        for _ in range(3):
            with context:
                runs(x)
        for place in range(3):
            for name, change in CHANGES.items():
                before = replayed(runs)
                x.copy_(torch.randn_like(x))
                with context:
                    result = runs(x)
                assert same(result, model(x)), name
                assert replayed(runs) == before + 1
                kept = tensors(result)[place]
                change(kept)
                changed = kept.shape, kept.requires_grad
                result["out"] = None
                result["more"].clear()
                with context:
                    again = runs(x)
                assert same(again, model(x)), name
                assert (kept.shape, kept.requires_grad) == changed, "it stays as the caller has it"


def test_what_nobody_changed_is_the_same_object() -> None:
    lent = ReusedTensors([torch.randn(3, 2), torch.randn(2)])
    first = lent.get()
    assert lent.get() is first
    with torch.inference_mode():
        assert lent.get() is first
    first[0].t_()
    second = lent.get()
    assert second[1] is first[1]
    assert second[0].shape == (3, 2)
    assert second[0].data_ptr() == first[0].data_ptr()
    assert first[0].shape == (2, 3)
    assert ReusedTensors([]).get() == ()


def test_an_empty_and_a_conjugate_one() -> None:
    conjugate = torch.randn(3, dtype=torch.complex64).conj()
    lent = ReusedTensors([torch.empty(0, 3), conjugate])
    empty, bits = lent.get()
    assert bits.is_conj()
    empty.t_()
    bits.unsqueeze_(0)
    empty, bits = lent.get()
    assert empty.shape == (0, 3)
    assert torch.equal(bits, conjugate)


def test_memory_that_a_caller_let_grow() -> None:
    lent = ReusedTensors([torch.randn(3, 2)])
    lent.get()[0].resize_(4000, 2)
    with pytest.raises(AddressChangedError, match=r"resize_\(\)"):
        lent.get()


def test_dataclasses_and_objects() -> None:
    marker = object()
    made = Found(torch.randn(2, 2), (torch.randn(3),)), marker, None
    lent = ReusedResult(made)
    first = lent.get()
    assert first[1] is marker
    first[0].logits.t_()
    first[0].hidden = ()
    found, _, nothing = lent.get()
    assert nothing is None
    assert torch.equal(found.logits, made[0].logits)
    assert torch.equal(found.hidden[0], made[0].hidden[0])
    assert found is not made[0]


def test_a_result_of_the_capturing_call_is_the_callers() -> None:
    """Memory from outside of the pool too, and a dataclass."""

    def model(x: torch.Tensor) -> Found:
        x.add_(1)
        return Found(x * 2, (x.view(-1),))

    runs = wrapped(model, FULL)  # type: ignore[arg-type]
    context = cgcompile.set_forward_context(
        cudagraph_runtime_mode=FULL, batch_descriptor=BatchDescriptor(N)
    )
    x = torch.zeros(N, D)
    with torch.no_grad(), context:
        first = runs(x)
        first.logits.t_()
        first.hidden[0].unsqueeze_(0)
        first.logits = None
        second = runs(x)
    assert torch.equal(second.logits, torch.full((N, D), 4.0))
    assert torch.equal(second.hidden[0], torch.full((N * D,), 2.0))
