"""A number that differs at each call, and that ops only compute with, is an input of the graphs."""

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lib.front_ends import COMPILED, ROWS, WIDTH, compiled, context, settings
from torch import nn
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

import cgcompile
from cgcompile import CUDAGraphMode
from cgcompile.adapters.adapter import innermost
from cgcompile.errors import DispatchError
from cgcompile.passes.split import SplitGraph
from cgcompile.reasons import Reason
from cgcompile.torch_compat import torch_ops

KINDS = [int, float]


def numbers(kind: type, count: int) -> list[Any]:
    """Return numbers in no order, no two of them equal, and some of them negative."""
    if kind is int:
        return random.sample(range(-40, -1), count // 2) + random.sample(range(2, 40), count // 2)
    return [random.uniform(-3, 3) for _ in range(count)]


class Attends(nn.Module):
    """Computes with a number before and after an eager piece."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, number: Any) -> torch.Tensor:
        # Not to be above 1: a softmax of scores in the thousands shows the rounding of any kernel.
        y = (self.linear(x) * number + number / 3).sin()[None]
        y = F.scaled_dot_product_attention(y, y, y)[0]
        y = y + (number * 2 + 1)
        return y.sin() - number


class Bodies:
    """Functions of a tensor and a number, by what they show."""

    @staticmethod
    def arithmetic(x: torch.Tensor, number: Any) -> Any:
        return x + number, number - x, x * (number + 1), x / (number * 2 + 0.5), -number + x

    @staticmethod
    def half(x: torch.Tensor, number: Any) -> Any:
        y = x.to(torch.bfloat16)
        return y + number, y * number, y / number, number - y, y.clone().mul_(number), y > number

    @staticmethod
    def whole(x: torch.Tensor, number: Any) -> Any:
        y = (x * 9).to(torch.int32)
        z = y.abs().to(torch.uint8)
        return y + number, y * number, y < number, y == number, y / number, z / number, number / z

    @staticmethod
    def on_the_left(x: torch.Tensor, number: Any) -> Any:
        y, total = x.to(torch.bfloat16), number
        total += x.sum()
        return total + x, x * number, number - y, number / x, number / y, (number * number) ** x

    @staticmethod
    def no_dimension(x: torch.Tensor, number: Any) -> Any:
        y = x.sum()
        return y * number, y.to(torch.bfloat16) - number, y + x

    @staticmethod
    def written(x: torch.Tensor, number: Any) -> Any:
        y = x.clone()
        y *= number
        y.sub_(number)
        z = torch.full((3,), number, device=x.device) + torch.full_like(x, number).sum()
        return y, z, x.masked_fill(x > 0, number), torch.where(x > 0, x, number)

    @staticmethod
    def branch(x: torch.Tensor, number: Any) -> Any:
        return x * number if number > 0 else x - number

    @staticmethod
    def positions(x: torch.Tensor, number: Any) -> Any:
        offset = max(number - 3, 0) - min(7, number)
        mask = torch.arange(WIDTH, device=x.device) + offset
        return mask + number * 3, x.masked_fill(mask % 3 == 0, 0.5), (mask >= number).all()


BODIES = [name for name in vars(Bodies) if not name.startswith("_")]


def check(step: Callable[..., Any], eager: Callable[..., Any], kind: type, device: str) -> None:
    """Compare 16 calls of random inputs and numbers with eager; no result is that of another."""
    results = []
    for number in numbers(kind, 16):
        x = torch.randn(ROWS, WIDTH, device=device)
        result = step(x, number)
        torch.testing.assert_close(result, eager(x, number))
        results.append(next(iter(result)).clone())
    assert not any(one.equal(other) for one, other in pairwise(results))


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_each_value_is_replayed(
    name: str, kind: type, mode: str, dynamic: bool | None, device: str
) -> None:
    model = Attends().to(device).requires_grad_(False)
    config = settings(device, on_fallback="raise", cudagraph_mode=mode)
    served = compiled(name, model, config, dynamic)
    with torch.inference_mode():
        check(served.step, model, kind, device)
    counters = served.counters()
    assert counters.captures == 1
    assert counters.replays >= 12
    assert counters.plain.keys() == {Reason.WARMING}


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("body", BODIES)
def test_results_are_those_of_eager(name: str, kind: type, body: str, device: str) -> None:
    function = getattr(Bodies, body)
    served = compiled(name, function, settings(device, on_fallback="raise"))
    with torch.inference_mode():
        check(served.step, function, kind, device)
    assert served.counters().replays >= 8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "body", ["arithmetic", "half", "whole", "on_the_left", "no_dimension", "written"]
)
def test_results_have_all_bits_of_eager(kind: type, body: str) -> None:
    """On the CPU; kernels of a GPU divide by the reciprocal of a number, and by a tensor."""
    function = getattr(Bodies, body)
    served = compiled("cgcompile.compile", function, settings("cpu", on_fallback="raise"))
    with torch.inference_mode():
        for number in numbers(kind, 12):
            x = torch.randn(64, WIDTH)
            result, expected = served.step(x, number), function(x, number)
            torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert served.counters().replays >= 8


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL])
def test_under_a_forward_context(name: str, kind: type, mode: CUDAGraphMode, device: str) -> None:
    model = Attends().to(device).requires_grad_(False)
    served = compiled(name, model, settings(device, on_fallback="raise"))
    static = torch.empty(ROWS, WIDTH, device=device)

    def step(x: torch.Tensor, number: Any) -> torch.Tensor:
        with context(mode=mode):
            return served.step(static.copy_(x), number)

    with torch.inference_mode():
        check(step, model, kind, device)
    assert served.counters().replays >= 12


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_pieces(kind: type, device: str) -> None:
    model = Attends().to(device).requires_grad_(False)
    served = compiled(
        "torch.compile", model, settings(device, compiler="inductor", on_fallback="raise")
    )
    with torch.inference_mode():
        check(served.step, model, kind, device)
    assert served.counters().replays >= 12
    assert served.target.num_compilations == 2


@pytest.mark.parametrize("guards", ["keep", "shape", "none"])
def test_a_branch_is_compared_whatever_the_guards(guards: str, device: str) -> None:
    def function(x: torch.Tensor, number: Any) -> torch.Tensor:
        return x * number if number > 4 else x - number

    served = cgcompile.compile(function, settings(device, on_fallback="raise"), guards=guards)
    with torch.inference_mode():
        for number in (9, 8, 7, 3, 2, 11, 0, 1, -6, 5, 4, 12, 7.5, 3.5, 4.5, 4.0, 0.5, 8.25):
            x = torch.randn(ROWS, WIDTH, device=device)
            torch.testing.assert_close(served(x, number), function(x, number))
    assert len(served.traces) <= 8


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_exponents(name: str, device: str) -> None:
    """The kernel that eager runs depends on their value, and so do results at zero and infinity."""

    def function(x: torch.Tensor, number: float) -> Any:
        return x**number, (-2.0) ** x.round(), x * number

    served = compiled(name, function, settings(device))
    with torch.inference_mode():
        for number in (3.5, 1.5, 0.5, 2.0, -0.5, 0.5):
            x = torch.randn(ROWS, WIDTH, device=device)
            x[0, :4] = torch.tensor([-0.0, 0.0, -float("inf"), float("inf")])
            for one, two in zip(served.step(x, number), function(x, number), strict=True):
                torch.testing.assert_close(one, two, equal_nan=True)


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float16])
def test_a_number_that_overflows_is_refused_as_in_eager(
    name: str, dtype: torch.dtype, device: str
) -> None:
    functions: list[Callable[..., Any]] = [
        lambda x, number: x.masked_fill(x > 5, number),
        lambda x, number: torch.full((WIDTH,), number, dtype=dtype, device=device) + x,
    ]
    for function in functions:
        served = compiled(name, function, settings(device))
        x = torch.randint(0, 10, (ROWS, WIDTH), device=device).to(dtype)
        with torch.inference_mode():
            for number in (3, 4, 5):
                torch.testing.assert_close(served.step(x, number), function(x, number))
            for step in (served.step, function):
                with pytest.raises(RuntimeError, match="overflow"):
                    step(x, 1 << 40)


def outcome(function: Callable[..., Any], *args: Any) -> Any:
    """Return the bits of a result, or the class of the error."""
    try:
        result = function(*args)
    except Exception as error:
        return type(error)
    return [repr(item.tolist()) for item in torch_ops.tree_leaves(result)]


EDGES: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "a product of ints": (
        lambda x, n: (x * (n * 3), x + (n + n), x * -n),
        [2**62, 2**61, -(2**62)],
    ),
    "an int": (lambda x, n: (x * n, x + n // 3), [2**63 - 1, 2**63, 2**64, -(2**63), -(2**63) - 1]),
    "an int as float": (lambda x, n: (x * (n / 3), x - n % 7), [2**53 + 1, 2**62 + 1, 2**64]),
    "a quotient of ints": (lambda x, n: x + 7 / n, [0, 2**62]),
    "a floor of ints": (lambda x, n: x + 7 // n, [0, -3]),
    "a quotient of floats": (lambda x, n: (x + 0.1 / n, x * (n % 0.3)), [0.0, 1e-300, 1e308]),
    "a product of floats": (lambda x, n: x * (n * n), [1e200, 1e-200]),
    "a large float": (lambda x, n: torch.where(x > n, x, n), [1e308, -1e308, 3.4e38]),
    "a large float that is written": (lambda x, n: x.masked_fill(x > 0, n), [1e39, 1e38]),
    "a large bfloat16": (lambda x, n: x.bfloat16().masked_fill(x > 0, n), [3.4e38, 3e38]),
}


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("case", EDGES)
def test_a_number_at_the_edge_gives_the_result_or_the_error_of_eager(
    name: str, case: str, device: str
) -> None:
    function, edges = EDGES[case]
    kind = type(edges[0])
    served = compiled(name, function, settings(device))
    with torch.inference_mode():
        for number in (2, 5, 3, -4, *edges, 7, 9, *edges, 11, 4):
            x = torch.randn(ROWS, WIDTH, device=device)
            assert outcome(served.step, x, kind(number)) == outcome(function, x, kind(number))
    assert served.counters().replays >= 5


@pytest.mark.parametrize("name", COMPILED)
def test_a_number_that_no_tensor_holds_is_named(name: str, device: str) -> None:
    served = compiled(name, lambda x, n: x * n, settings(device, on_fallback="raise"))
    x = torch.randn(ROWS, WIDTH, device=device)
    with torch.inference_mode():
        for number in (2, 3, 4, 5):
            served.step(x, number)
        with pytest.raises(DispatchError, match=r"L\['n'\] is 9223372036854775808, beyond int64"):
            served.step(x, 2**63)
        torch.testing.assert_close(served.step(x, 6), x * 6)


def test_what_eager_does_before_an_error_is_done(device: str) -> None:
    def function(x: torch.Tensor, n: float) -> torch.Tensor:
        x.add_(1)
        return x * (1 / n)

    served = compiled("torch.compile", function, settings(device))
    x, other = torch.zeros(2, ROWS, device=device).unbind()
    with torch.inference_mode():
        for number in (2.0, 3.0, 4.0, 0.0, 5.0, 0.0, 6.0):
            assert outcome(served.step, x, number) == outcome(function, other, number)
            assert x.equal(other)


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("first", [0.5, 0.0, -0.0])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: (x.new_full((2,), n).reciprocal(), (x + 1j) * n),
        lambda x, n: (torch.copysign(x, n), x * int(n), (x + 1j) * n),  # needs another trace
    ],
)
def test_a_constant_zero_is_guarded_with_its_sign(
    name: str, first: float, function: Callable[..., Any], device: str
) -> None:
    served = compiled(name, function, settings(device))
    with torch.inference_mode():
        for number in (first, 1.5, 0.0, -0.0, 0.0, 0.0, 2.5, -0.0, -0.0):
            x = torch.randn(ROWS, WIDTH, device=device)
            assert outcome(served.step, x, number) == outcome(function, x, number)
    assert served.counters().replays >= 1


@pytest.mark.parametrize("name", COMPILED)
def test_a_zero_of_a_model_is_guarded_with_its_sign(name: str, device: str) -> None:
    class Signs(nn.Module):
        sign = 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.copysign(x, self.sign)

    model = Signs()
    served = compiled(name, model, settings(device))
    with torch.inference_mode():
        for sign in (0.0, 0.0, 0.0, -0.0, -0.0, -0.0, 0.0, -0.0):
            model.sign = sign
            x = torch.randn(ROWS, WIDTH, device=device)
            assert served.step(x).equal(model(x))
    assert (served.counters().captures, served.counters().replays) == (2, 4)


def copy_sign(x: torch.Tensor, number: float) -> torch.Tensor:
    return torch.copysign(x, number)


def test_a_zero_keeps_its_sign(device: str) -> None:
    """No op takes the number as a tensor; guards of torch do not tell the two apart."""
    served = compiled("cgcompile.compile", copy_sign, settings(device))
    with torch.inference_mode():
        for number in (1.0, 2.0, -0.0, 0.0, -0.0, -0.0, 0.0, 0.0):
            x = torch.rand(ROWS, WIDTH, device=device) + 1
            assert served.step(x, number).equal(copy_sign(x, number))
    assert served.counters().captures == 2


def added(x: torch.Tensor, number: float) -> Any:
    scale = number
    number += x.sum()
    return F.elu(x, scale), x + number


CONSTANT: list[Callable[..., Any]] = [
    added,
    lambda x, number: (x * round(number), x * int(number), x + number),
    lambda x, number: ((x + 1j) * number, x * number**2),
]


@pytest.mark.parametrize("function", CONSTANT)
def test_a_trace_that_restarts_with_a_constant(function: Callable[..., Any], device: str) -> None:
    served = compiled("cgcompile.compile", function, settings(device))
    with torch.inference_mode():
        for number in (0.5, 3.25, -2.5, 3.25, 3.25, 3.25):
            x = torch.randn(ROWS, WIDTH, device=device)
            torch.testing.assert_close(served.step(x, number), function(x, number))
    assert served.counters().replays == 2
    assert len(served.step.traces) == 3


def test_one_of_two_numbers_is_an_input(device: str) -> None:
    """A number that must be a constant leaves the other one an input."""

    def function(x: torch.Tensor, alpha: float, number: float) -> torch.Tensor:
        return F.elu(x, alpha) * number

    served = compiled("cgcompile.compile", function, settings(device, on_fallback="raise"))
    with torch.inference_mode():
        for number in numbers(float, 12):
            alpha = 1.0 if served.counters().captures < 1 else 2.0
            x = torch.randn(ROWS, WIDTH, device=device)
            torch.testing.assert_close(served.step(x, alpha, number), function(x, alpha, number))
    assert len(served.step.traces) <= 4
    assert served.counters().replays >= 6


class Scales(nn.Module):
    """Scales an attribute for one call, as adapters of diffusers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scales = {"one": 1.0, "kept": 0.0}

    def forward(self, x: torch.Tensor, number: float) -> Any:
        self.scales["one"] *= number
        y = self.linear(x) * self.scales["one"]
        self.scales["one"] /= number
        self.scales["kept"] = number - 1
        return y


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("entry", COMPILED)
def test_a_float_that_is_a_result(entry: str, dynamic: bool | None, device: str) -> None:
    """Dynamo returns the attributes as 0-dim tensors on the CPU."""
    model, other = Scales().to(device), Scales().to(device)
    other.load_state_dict(model.state_dict())
    more = {"dynamic": dynamic} if entry == "torch.compile" else {}
    served = compiled(entry, model, settings(device), **more)
    with torch.inference_mode():
        for call, number in enumerate(numbers(float, 16)):
            if call == 10:
                model.scales["one"] = other.scales["one"] = 0.5
            x = torch.randn(ROWS, WIDTH, device=device)
            torch.testing.assert_close(served.step(x, number), other(x, number))
            assert model.scales == other.scales
            assert {type(scale) for scale in model.scales.values()} == {float}
    assert served.counters().replays >= 10


def test_a_result_of_a_float_and_of_a_size(device: str) -> None:
    """The graph keeps the input that has the size of its tensors."""

    def function(x: torch.Tensor, number: float) -> tuple[torch.Tensor, float]:
        return x * number, x.shape[0] * number

    served = compiled("torch.compile", function, settings(device), dynamic=True)
    with torch.inference_mode():
        for number in numbers(float, 8):
            x = torch.randn(ROWS, WIDTH, device=device)
            torch.testing.assert_close(served.step(x, number), function(x, number))
    assert served.counters().replays >= 4


@pytest.mark.parametrize("guards", ["none", "shape", "keep"])
def test_weights_that_move_beside_a_float_that_is_a_result(guards: str, device: str) -> None:
    model, other = Scales().to(device), Scales().to(device)
    other.load_state_dict(model.state_dict())
    backend = cgcompile.Backend(settings(device))
    served = cgcompile.compile(model, backend, guards=guards)
    with torch.inference_mode():
        for call, number in enumerate(numbers(float, 18)):
            if call == 8:
                model.linear.weight.data = torch.randn(WIDTH, WIDTH, device=device)
                other.linear.weight.data = model.linear.weight.data.clone()
                if guards == "none":
                    served.invalidate("a weight was replaced")
            x = torch.randn(ROWS, WIDTH, device=device)
            torch.testing.assert_close(served(x, number), other(x, number))
            assert model.scales == other.scales
    assert backend.counters.replays >= 8


@pytest.mark.slow
def test_values_that_no_trace_serves(device: str) -> None:
    """Dynamo makes them constants."""
    served = compiled("cgcompile.compile", Bodies.written, settings(device))
    with torch.inference_mode():
        for number in (0.5, 0.75, float("inf"), 0.25, float("nan"), -0.0, 0.0, 3, 7, 8):
            x = torch.randn(ROWS, WIDTH, device=device)
            result, expected = served.step(x, number), Bodies.written(x, number)
            torch.testing.assert_close(result, expected, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind: type, device: str) -> None:
    model = Attends().to(device)
    served = compiled("torch.compile", model, settings(device))
    for number in numbers(kind, 4):
        x = torch.randn(ROWS, WIDTH, device=device, requires_grad=True)
        (gradient,) = torch.autograd.grad(served.step(x, number).sum(), x)
        (expected,) = torch.autograd.grad(model(x, number).sum(), x)
        torch.testing.assert_close(gradient, expected)
    assert served.counters().plain == {Reason.GRADIENTS: 4}


def test_gradients_of_a_checkpoint_that_adds_to_its_number(device: str) -> None:
    def body(x: torch.Tensor, number: int) -> torch.Tensor:
        scale = number
        number += x.sum()
        return (x * scale + number) * scale

    def function(x: torch.Tensor, number: int) -> Any:
        return checkpoint(body, x, number, use_reentrant=False)

    served = compiled("torch.compile", function, settings(device), dynamic=True)
    for number in numbers(int, 4):
        x = torch.randn(ROWS, WIDTH, device=device, requires_grad=True)
        result, expected = served.step(x, number), function(x, number)
        torch.testing.assert_close(result, expected)
        (result,) = torch.autograd.grad(result.sum(), x)
        (expected,) = torch.autograd.grad(expected.sum(), x)
        torch.testing.assert_close(result, expected)


def test_an_int_that_an_eager_piece_reads_as_well(device: str) -> None:
    def function(x: torch.Tensor, number: int) -> torch.Tensor:
        y = x * number
        with cgcompile.eager_region():
            y = F.elu(y, number)
        return y.sin() + number

    served = compiled(
        "torch.compile", function, settings(device, on_fallback="raise"), dynamic=True
    )
    with torch.inference_mode():
        check(served.step, function, int, device)
    assert served.counters().captures == 1


def test_a_number_that_also_decides_a_size_is_a_varying_number(device: str) -> None:
    def function(x: torch.Tensor, number: int) -> torch.Tensor:
        return (x * number)[:, :number]

    served = compiled(
        "torch.compile", function, settings(device, on_fallback="raise"), dynamic=True
    )
    x = torch.randn(ROWS, 4 * WIDTH, device=device)
    with torch.inference_mode():
        for number in range(2, 10):
            torch.testing.assert_close(served.step(x, number), function(x, number))
        with pytest.raises(DispatchError, match=r"varying_number.*'number'"):
            served.step(x, 10)


def test_one_number_is_a_constant_and_an_operand_beside_a_tensor(device: str) -> None:
    def function(x: torch.Tensor, one: float, number: int) -> torch.Tensor:
        return x.new_full((WIDTH,), 2.5 * one) - (-one * x.shape[0]) * x + number * 3

    served = compiled("torch.compile", function, settings(device))
    with torch.inference_mode():
        for step in range(9):
            x = torch.randn(ROWS, WIDTH, device=device)
            args = x, 0.5 + step // 3, step
            torch.testing.assert_close(served.step(*args), function(*args))
    assert served.counters().replays >= 1


def test_a_float_that_is_returned_is_a_constant(device: str) -> None:
    def function(x: torch.Tensor, one: float, other: float) -> Any:
        return x * one, x * other, other * 3

    served = compiled("torch.compile", function, settings(device))
    with torch.inference_mode():
        for step in range(6):
            x = torch.randn(ROWS, WIDTH, device=device)
            args = x, step + 0.5, 1.5 + step // 3
            result, expected = served.step(*args), function(*args)
            torch.testing.assert_close(result, expected)
            assert type(result[2]) is float
    assert served.counters().replays >= 1


class Window:
    """A cache of the last steps: it counts them in Python, as the caches of transformers do."""

    def __init__(self, device: str) -> None:
        self.seen, self.keys = 0, torch.zeros(WIDTH, WIDTH, device=device)

    def update(self, key: torch.Tensor) -> torch.Tensor:
        if self.seen >= WIDTH:
            self.keys.copy_(torch.cat([self.keys[1:], key]))
        else:
            self.keys[self.seen : self.seen + 1] = key
        self.seen += 1
        return self.keys


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_a_cache_that_counts_past_its_window(name: str, device: str) -> None:
    if name == "cgcompile.compile" and TorchVersion(torch.__version__) < "2.12":
        pytest.skip("torch 2.11 does not trace slices by a number with dynamic_shapes oblivious")
    linear = nn.Linear(WIDTH, WIDTH).to(device).requires_grad_(False)

    def function(x: torch.Tensor, position: torch.Tensor, cache: Window) -> torch.Tensor:
        first = max(cache.seen - WIDTH + 1, 0)
        mask = torch.arange(WIDTH, device=x.device)[None] + first <= position
        key = linear(x)
        keys = cache.update(key)[None]
        return F.scaled_dot_product_attention(key[None], keys, keys, attn_mask=mask)[0]

    served = compiled(name, function, settings(device))
    cache, expected = Window(device), Window(device)
    with torch.inference_mode():
        for step in range(WIDTH + 12):
            x = torch.randn(1, WIDTH, device=device)
            position = torch.tensor([[step]], device=device)
            result = served.step(x, position, cache)
            torch.testing.assert_close(result, function(x, position, expected))
            assert cache.seen == expected.seen
    assert served.counters().replays >= 8


@pytest.mark.parametrize("kind", KINDS)
def test_tools_run_the_pieces(kind: type, device: str) -> None:
    model = cgcompile.compile(Attends().to(device).requires_grad_(False), settings(device))
    x = torch.randn(ROWS, WIDTH, device=device)
    with torch.inference_mode():
        for number in numbers(kind, 6):
            model(x, number)
        assert cgcompile.verify(model, x, number).ok


# ---------------------------------------------------------------- the split on another device


def split_of(function: Any, kind: type) -> SplitGraph:
    """Return the split of a function of ``meta`` tensors, which is traced and never run."""
    backend = cgcompile.Backend(compiler="eager")
    splits = []

    def stop(gm: Any, example_inputs: Any) -> Any:
        splits.append(innermost(backend(gm, example_inputs)).split)
        return gm.forward

    step = torch.compile(function, backend=stop, fullgraph=True)
    with torch.no_grad():
        for number in (2, 3):
            step(torch.randn(ROWS, WIDTH, device="meta"), kind(number))
    return splits[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_piece_takes_a_number_as_a_tensor_of_its_device(kind: type) -> None:
    torch._dynamo.reset()
    split = split_of(lambda x, n: (x * (n + 1) - n).to(torch.bfloat16) * n, kind)
    (piece,) = split.pieces
    assert piece.capture
    assert len(split.cpu_scalars) == 2  # the number, and the sum that the host computes
    fakes = [node.meta.get("example_value") for node in piece.module.graph.nodes]
    assert {fake.device.type for fake in fakes if isinstance(fake, torch.Tensor)} == {"meta"}
