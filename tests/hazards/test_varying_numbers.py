"""A number that differs at each call is counted by name, and refused by strict."""

from typing import Any

import pytest
import torch
from lib.front_ends import COMPILED, ROWS, WIDTH, check, compiled, layers, settings
from torch import nn

import cgcompile
from cgcompile.errors import DispatchError
from cgcompile.reasons import Reason


class Bends(nn.Linear):
    """Calls an op that takes a number, and no tensor in its place."""

    def forward(self, x: torch.Tensor, step: float) -> torch.Tensor:
        return nn.functional.elu(super().forward(x), step)


def model(device: str) -> nn.Module:
    return Bends(WIDTH, WIDTH).to(device).requires_grad_(False)


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("warmups", [1, 2])
def test_the_number_is_named(name: str, warmups: int, device: str) -> None:
    module = model(device)
    served = compiled(name, module, settings(device, num_warmups=warmups), dynamic=True)
    with torch.inference_mode():
        for step in range(2, 22):
            x = torch.randn(ROWS, WIDTH, device=device)
            torch.testing.assert_close(served.step(x, step), module(x, step))
        counters = served.counters()
        one_value = 0 if name == "torch.compile" else 1  # traced once, with a constant
        warming, varying = 8 + one_value, 12 - one_value
        assert counters.plain == {Reason.WARMING: warming, Reason.VARYING_NUMBER: varying}
        detail = counters.details[Reason.VARYING_NUMBER]
        last = "8, 9, 10" if name == "torch.compile" else "9, 10, 11"
        assert f"'step' differs at each call (now {last})" in detail
        for _ in range(warmups + 3):  # one that repeats is captured
            for step in (30, 31):
                x = torch.randn(ROWS, WIDTH, device=device)
                torch.testing.assert_close(served.step(x, step), module(x, step))
    counters = served.counters()
    assert (counters.captures, counters.replays) == (2, 4)


@pytest.mark.parametrize("name", COMPILED)
def test_strict_refuses_it(name: str, device: str) -> None:
    served = compiled(name, model(device), settings(device, on_fallback="raise"), dynamic=True)
    x = torch.randn(ROWS, WIDTH, device=device)
    with torch.inference_mode():
        last = 10 if name == "torch.compile" else 11  # whose first value is a trace of its own
        for step in range(2, last):
            served.step(x, step)
        for step in (last, last + 1):
            with pytest.raises(DispatchError, match=r"varying_number.*'step'"):
                served.step(x, step)


@pytest.mark.slow
@pytest.mark.parametrize("guards", ["keep", "shape", "none"])
@pytest.mark.parametrize("strict", [False, True])
def test_a_float_has_few_traces(guards: str, strict: bool, device: str) -> None:
    """Without a bound each temperature would be a trace, and compiled."""
    module = model(device)
    served = cgcompile.compile(
        module, settings(device, on_fallback="raise" if strict else "warn"), guards=guards
    )
    x = torch.randn(ROWS, WIDTH, device=device)
    with torch.inference_mode():
        for step in range(8):
            torch.testing.assert_close(served(x, step=step / 4), module(x, step / 4))
        for step in range(8, 30):
            if strict:
                with pytest.raises(DispatchError, match=r"varying_number.*'step'"):
                    served(x, step=step / 4)
            else:
                torch.testing.assert_close(served(x, step=step / 4), module(x, step / 4))
        assert len(served.traces) == 8
        for _ in range(3):  # what was traced is captured, and is no new number any more
            torch.testing.assert_close(served(x, step=0.25), module(x, 0.25))
        torch.testing.assert_close(served(x, step=9.0), module(x, 9.0))
    counters = served.backend.counters
    assert (counters.captures, counters.replays) == (1, 2)
    assert counters.failures == (22 if strict else 0)
    assert counters.calls == counters.captures + counters.replays + counters.failures + sum(
        counters.plain.values()
    )
    assert len(served.traces) == 9


class Counts(nn.Linear):
    """Counts its calls in a number that is baked into a trace."""

    calls: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


@pytest.mark.slow
def test_a_number_of_the_model_has_few_traces(device: str) -> None:
    module = Counts(WIDTH, WIDTH).to(device).requires_grad_(False)
    module.calls = 0
    served = cgcompile.compile(module, settings(device))
    x = torch.randn(ROWS, WIDTH, device=device)
    for calls in range(1, 21):
        torch.testing.assert_close(served(x), nn.functional.linear(x, *module.parameters()) * calls)
        assert module.calls == calls
    assert len(served.traces) == 8
    counters = served.backend.counters
    assert counters.plain == {Reason.WARMING: 8, Reason.VARYING_NUMBER: 12}
    assert "the number 'calls' differs" in counters.details[Reason.VARYING_NUMBER]
    for _ in range(8 + 3):  # one that repeats is traced
        module.calls = 30
        torch.testing.assert_close(served(x), nn.functional.linear(x, *module.parameters()) * 31)
    assert served.backend.counters.replays == 1


@pytest.mark.slow
def test_strict_refuses_a_number_of_the_model(device: str) -> None:
    module = Counts(WIDTH, WIDTH).to(device).requires_grad_(False)
    module.calls = 0
    served = cgcompile.compile(module, settings(device, on_fallback="raise"))
    x = torch.randn(ROWS, WIDTH, device=device)
    for _ in range(8):
        served(x)
    for _ in range(2):
        with pytest.raises(DispatchError, match=r"varying_number.*'calls'"):
            served(x)
    assert module.calls == 8, "nothing has run"
    module.calls = 2
    torch.testing.assert_close(served(x), nn.functional.linear(x, *module.parameters()) * 3)


class Options(nn.Module):
    def forward(self, x: torch.Tensor, *sizes: int, options: dict[str, Any]) -> torch.Tensor:
        return nn.functional.elu(x, options["scale"]) + nn.functional.elu(x, sizes[0] * sizes[1])


def test_numbers_inside_of_arguments_are_named(device: str) -> None:
    module = Options()
    served = cgcompile.compile(module, settings(device))
    x = torch.randn(ROWS, WIDTH, device=device)
    with torch.inference_mode():
        for step in range(28):
            more = {"options": {"flag": True, "scale": 0.5 * (step // 14), "name": "a"}}
            torch.testing.assert_close(served(x, 2, step, **more), module(x, 2, step, **more))
    assert served.backend.counters.plain[Reason.VARYING_NUMBER] == 11
    assert "the number 'sizes.1' differs" in served.backend.counters.details[Reason.VARYING_NUMBER]


@pytest.mark.slow
def test_two_numbers_that_vary_in_turn(device: str) -> None:
    module = Options()
    served = cgcompile.compile(module, settings(device))
    x = torch.randn(ROWS, WIDTH, device=device)
    with torch.inference_mode():
        for step in range(40):
            options = {"scale": float(step // 2)}
            sizes = (2, step % 2)
            result, expected = (m(x, *sizes, options=options) for m in (served, module))
            torch.testing.assert_close(result, expected)
    assert len(served.traces) == 8
    assert "options['scale']" in served.backend.counters.details[Reason.VARYING_NUMBER]


@pytest.mark.slow
def test_numbers_of_a_bulk_capture_and_new_shapes_are_no_reason(device: str) -> None:
    module = model(device)
    served = cgcompile.compile(module, settings(device, on_fallback="raise"))
    inputs = {rows: torch.randn(rows, WIDTH, device=device) for rows in range(2, 16)}
    x = torch.randn(ROWS, WIDTH, device=device)
    with torch.inference_mode():
        for rows, more in inputs.items():  # a number for each shape
            torch.testing.assert_close(served(more, rows), module(more, rows))
        bulk = served.backend.capture(lambda batch: served(x, batch), [*range(20, 40)])
        assert len(bulk.captured) == 20
        for step in range(20, 40):
            torch.testing.assert_close(served(x, step), module(x, step))
    assert served.backend.counters.replays == 20


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_new_sizes_are_no_varying_number(name: str, device: str) -> None:
    module = layers(device)
    served = compiled(name, module, settings(device, on_fallback="raise"), dynamic=True)
    for rows in (*range(2, 16), *range(2, 16)):
        check(served.step, module, device, rows=rows)
    assert served.counters().captures == 14


@pytest.mark.parametrize("name", COMPILED)
def test_numbers_that_repeat_now_and_then(name: str, device: str) -> None:
    module = model(device)
    strict = name == "torch.compile"  # else each of the others would be a trace
    served = compiled(
        name, module, settings(device, on_fallback="raise" if strict else "warn"), dynamic=True
    )
    with torch.inference_mode():
        for step in range(2, 60):  # every fourth call is a replay of the same number
            x = torch.randn(ROWS, WIDTH, device=device)
            number = 100 if step % 4 == 0 else step
            torch.testing.assert_close(served.step(x, number), module(x, number))
    assert served.counters().replays >= 10
    assert served.target.num_compilations <= 9
