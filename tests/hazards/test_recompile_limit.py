"""A function that Dynamo stops compiling is a warning and a count, and an error under strict."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from lib.front_ends import ROWS, WIDTH, check, compiled, settings

import cgcompile
from cgcompile.errors import DispatchError
from cgcompile.reasons import Reason

LIMITS = ["recompile_limit", "accumulated_recompile_limit"]


def new_step() -> Callable[..., Any]:
    """A function whose code Dynamo has not seen; its number is a constant of each trace."""
    scope: dict[str, Any] = {"elu": torch.nn.functional.elu}
    exec(compile("def step(x, scale):\n    return elu(x, scale) + 1\n", __file__, "exec"), scope)
    return scope["step"]


def calls(
    step: Any,
    backend: Any,
    numbers: Iterable[int],
    device: str,
    limit: str = "recompile_limit",
    **more: Any,
) -> None:
    """Compare calls with eager, at most three compilations allowed."""
    compiled = torch.compile(step, backend=backend, **more)
    with torch._dynamo.config.patch({limit: 3}), torch.inference_mode():
        for number in numbers:
            x = torch.randn(ROWS, WIDTH, device=device)
            torch.testing.assert_close(compiled(x, number + 0.5), step(x, number + 0.5))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [r for r in caplog.records if r.name.startswith("cgcompile")]
    return [r.getMessage() for r in records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("limit", LIMITS)
def test_the_call_that_runs_eager_is_a_warning_and_counted(
    limit: str, caplog: pytest.LogCaptureFixture, device: str
) -> None:
    step = new_step()
    backend = cgcompile.Backend(settings(device))
    calls(step, backend, [0, 1, 2] * 4, device, limit)
    assert Reason.RECOMPILE_LIMIT not in backend.counters.degraded
    before = backend.counters
    assert (before.captures, before.replays) == (3, 6)
    calls(step, backend, range(7), device, limit)
    assert backend.counters.degraded == {Reason.RECOMPILE_LIMIT: 1}
    (text,) = [text for text in warnings_of(caplog) if f"config.{limit} is 3" in text]
    assert text.startswith("step (test_recompile_limit.py:")
    assert "scale" in text
    assert "recompile_limit" in str(cgcompile.coverage(backend))


@pytest.mark.parametrize("limit", LIMITS)
def test_strict_refuses_the_call_that_would_run_eager(limit: str, device: str) -> None:
    step = new_step()
    backend = cgcompile.Backend(settings(device, on_fallback="raise"))
    calls(step, backend, [0, 1, 2] * 4, device, limit)  # as many as are allowed
    for _ in range(2):
        with pytest.raises(DispatchError, match=rf"step \(test_recompile_limit.*{limit} is 3"):
            calls(step, backend, [3], device, limit)
    before = backend.counters
    assert (before.captures, before.replays) == (3, 6)
    calls(step, backend, [0, 1, 2], device, limit)  # these are served as before
    assert backend.counters.replays == 9


def test_strict_by_the_name_of_the_backend(device: str) -> None:
    step, options = new_step(), {"on_fallback": "raise", "compiler": "eager"}
    options |= {"capture_device": "host"} if device == "cpu" else {}
    calls(step, "cgcompile", [0, 1, 2], device, options=options)
    with pytest.raises(DispatchError, match=r"recompile_limit.*step \(test_recompile_limit"):
        calls(step, "cgcompile", [3], device, options=options)


def test_torch_raises_with_fullgraph(device: str) -> None:
    step = new_step()
    backend = cgcompile.Backend(settings(device, on_fallback="raise"))
    calls(step, backend, range(3), device, fullgraph=True)
    with pytest.raises(Exception, match="fullgraph=True"):
        calls(step, backend, range(7), device, fullgraph=True)


def test_a_compilation_inside_of_a_compilation(device: str) -> None:
    """A piece compiler may run what another ``torch.compile`` made."""
    inner = torch.compile(lambda x: x.sin(), backend="eager")

    def compiler(gm: Any, inputs: Any) -> Any:
        inner(torch.ones(len(used) + 2))
        used.append(gm)
        return gm

    used: list[Any] = []
    backend = cgcompile.Backend(settings(device, compiler=compiler))
    calls(new_step(), backend, range(3), device)
    assert used


def test_functions_of_other_backends_are_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    backend = cgcompile.Backend(settings("cpu", on_fallback="raise"))
    calls(new_step(), backend, range(2), "cpu")
    calls(new_step(), "eager", range(7), "cpu", dynamic=False)
    assert not backend.counters.degraded
    assert warnings_of(caplog) == []


def test_equal_modules_are_no_recompilations(caplog: pytest.LogCaptureFixture, device: str) -> None:
    backend = cgcompile.Backend(settings(device, on_fallback="raise"))
    with torch._dynamo.config.patch(recompile_limit=3):
        for _ in range(6):
            layer = torch.nn.Linear(WIDTH, WIDTH).to(device)
            check(compiled("torch.compile", layer, backend).step, layer, device)
    assert Reason.RECOMPILE_LIMIT not in backend.counters.degraded
    assert not [text for text in warnings_of(caplog) if "limit" in text]
