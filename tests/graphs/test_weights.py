"""New weights for a captured model: written in place, seen by the next replay, or refused whole."""

from typing import Any

import pytest
import torch
from lib.cases import D
from lib.entry import assert_counts, assert_same, assert_steps, batch, compiled_model, marked
from torch import nn

from cgcompile import CGCompileError, update_weights
from cgcompile.errors import WeightsError
from cgcompile.reasons import Reason

pytestmark = pytest.mark.usefixtures("without_gradients")


class Model(nn.Module):
    """Parameters, buffers of several dtypes, and one parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.tensor(1.5))
        self.register_buffer("order", torch.arange(D))
        self.register_buffer("scratch", torch.ones(D), persistent=False)

    def forward(self, x):
        y = self.first(x)[..., self.order]
        y = nn.functional.scaled_dot_product_attention(y, y, y)
        return self.second(y) * self.scale + self.scratch


def new_state(device: str, **changes: Any) -> dict[str, Any]:
    """Values for all that the model has."""
    state = {name: torch.randn(D, D) for name in ("first.weight", "second.weight")}
    state["second.weight"] = state["first.weight"]
    state |= {name: torch.randn(D) for name in ("first.bias", "second.bias", "scratch")}
    state |= {"scale": torch.tensor(-0.5), "order": torch.randperm(D)}
    return {name: value.to(device) for name, value in state.items()} | changes


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def addresses(model: nn.Module) -> dict[str, int]:
    return {name: each.data_ptr() for name, each in weights(model).items()}


def captured_model(device: str, grad: bool = False) -> tuple[Any, Any, Any]:
    """(model, compiled, backend), warmed and captured."""
    model, compiled, backend = compiled_model(lambda: Model().requires_grad_(grad), device)
    x = marked(batch(device))
    assert_same(compiled(x), model(x))
    assert_steps(compiled, model, device)
    assert_counts(backend, 1, 2, {Reason.WARMING: 1})
    return model, compiled, backend


@pytest.mark.parametrize("through", ["module", "compiled"])
def test_the_next_replay_of_a_compiled_model_sees_them(device: str, through: str) -> None:
    model, compiled, backend = captured_model(device)
    before, objects = addresses(model), list(weights(model).values())
    for _ in range(3):
        x = batch(device)
        last = compiled(x)
        update_weights(compiled if through == "compiled" else model, new_state(device))
        result = compiled(x)
        assert_same(result, model(x))
        assert not torch.allclose(result, last)
    assert addresses(model) == before
    assert all(a is b for a, b in zip(weights(model).values(), objects, strict=True))
    assert_counts(backend, 1, 8, {Reason.WARMING: 1})


def test_names_that_are_not_given_keep_their_values(device: str) -> None:
    model, compiled, backend = captured_model(device)
    before = {name: each.clone() for name, each in weights(model).items()}
    update_weights(model, {"first.bias": torch.ones(D, device=device)})
    update_weights(model, {})
    for name, weight in weights(model).items():
        assert torch.equal(
            weight, torch.ones_like(weight) if name == "first.bias" else before[name]
        )
    assert_steps(compiled, model, device)
    assert_counts(backend, 1, 5, {Reason.WARMING: 1})


def of_dtype(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    state = {name: value.to(dtype) for name, value in new_state("cpu").items() if "b" in name}
    return state | {"order": torch.randperm(D).to(torch.int32)}


OTHER_STATES = {
    "float64": lambda: of_dtype(torch.float64),
    "float16": lambda: of_dtype(torch.float16),
    "bfloat16": lambda: of_dtype(torch.bfloat16),
    "layouts": lambda: {
        "first.weight": torch.randn(D, D).t(),
        "first.bias": torch.ones(()).expand(D),
    },
}


@pytest.mark.parametrize("build", OTHER_STATES.values(), ids=OTHER_STATES)
def test_other_dtypes_layouts_and_devices_are_converted(device: str, build: Any) -> None:
    model, compiled, backend = captured_model(device)
    state = build()  # of the CPU, whatever the model is on
    update_weights(compiled, state)
    for name, value in state.items():
        own = weights(model)[name]
        assert own.dtype is (torch.int64 if name == "order" else torch.float32)
        assert torch.equal(own, value.to(own))
    assert_steps(compiled, model, device)
    assert_counts(backend, 1, 5, {Reason.WARMING: 1})


@pytest.mark.parametrize("name", ["first.weight", "second.weight"])
def test_a_tied_parameter_is_known_by_both_names(device: str, name: str) -> None:
    model, compiled, backend = captured_model(device)
    new = torch.randn(D, D, device=device)
    update_weights(compiled, {name: new})
    assert model.first.weight is model.second.weight
    assert torch.equal(model.first.weight, new)
    assert_steps(compiled, model, device)
    assert_counts(backend, 1, 5, {Reason.WARMING: 1})


def test_the_state_of_a_module_or_of_a_compiled_one(device: str) -> None:
    _model, compiled, backend = captured_model(device)
    torch.manual_seed(1)
    other = Model().eval().to(device)
    update_weights(compiled, other.state_dict())
    x = batch(device)
    assert_same(compiled(x), other(x))
    torch.manual_seed(2)
    third = torch.compile(Model().eval().to(device), backend="eager")
    update_weights(compiled, third.state_dict())
    assert_same(compiled(x), third._orig_mod(x))
    assert_counts(backend, 1, 4, {Reason.WARMING: 1})


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_parameters_that_require_grad(device: str, mode: Any) -> None:
    model, compiled, backend = captured_model(device, grad=True)
    state = new_state(device)
    with mode():
        update_weights(model, state)
    weight = model.first.weight
    assert (weight.requires_grad, weight.is_leaf, weight.grad_fn) == (True, True, None)
    assert all(torch.equal(each, state[name]) for name, each in weights(model).items())
    assert_steps(compiled, model, device)
    assert_counts(backend, 1, 5, {Reason.WARMING: 1})


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parameters_that_are_inference_tensors(device: str, mode: Any) -> None:
    with torch.inference_mode():
        model = Model().to(device)
    state = new_state(device)
    with mode():
        update_weights(model, state)
    assert all(torch.equal(each, state[name]) for name, each in weights(model).items())


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("first.weigth", torch.ones(D, D), ("'first.weigth'", "Did you mean 'first.weight'")),
        ("nothing", torch.ones(D, D), ("'nothing'", "Nothing was written")),
        ("first.bias", torch.ones(D + 1), ("'first.bias' is (17,); expected a tensor (16,)",)),
        ("first.bias", torch.ones(1), ("'first.bias' is (1,)",)),
        ("scale", torch.ones(1), ("'scale' is (1,); expected a tensor ()",)),
        ("scale", 2.0, ("'scale' is float",)),
        ("first.weight", None, ("'first.weight' is NoneType",)),
    ],
)
@pytest.mark.parametrize("last", [True, False])
def test_a_refused_call_changes_nothing(device, name, value, words, last) -> None:
    model = Model().to(device)
    before = {name: each.clone() for name, each in weights(model).items()}
    good = {key: each for key, each in new_state(device).items() if key != name}
    state = {**good, name: value} if last else {name: value, **good}
    with pytest.raises(WeightsError) as caught:
        update_weights(model, state)
    assert isinstance(caught.value, CGCompileError)
    assert isinstance(caught.value, ValueError)
    assert all(each in str(caught.value) for each in words)
    assert all(torch.equal(each, before[name]) for name, each in weights(model).items())


def test_replays_after_a_refused_call_are_as_before(device: str) -> None:
    model, compiled, backend = captured_model(device)
    x = batch(device)
    before = compiled(x)
    with pytest.raises(WeightsError):
        update_weights(compiled, new_state(device, missing=torch.ones(1)))
    assert_same(compiled(x), before)
    assert_steps(compiled, model, device)
    assert_counts(backend, 1, 7, {Reason.WARMING: 1})
