"""Dynamo gives a function up after some compilations; a warning, a count and ``strict`` tell it."""

import logging
from typing import Any

import pytest
import torch
from hazard_support import ROWS, WIDTH, settings

import cgcompile
from cgcompile.reasons import Reason


def step(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x * scale + 1


def calls(backend: Any, count: int, device: str, **more: Any) -> None:
    compiled = torch.compile(step, backend=backend, **more)
    with torch._dynamo.config.patch(recompile_limit=3), torch.inference_mode():
        for number in range(count):
            x = torch.randn(ROWS, WIDTH, device=device)
            torch.testing.assert_close(compiled(x, number + 0.5), step(x, number + 0.5))


def test_the_last_compilation_is_counted_and_told(caplog: Any, device: str) -> None:
    backend = cgcompile.Backend(settings(device))
    calls(backend, 2, device)
    assert Reason.RECOMPILE_LIMIT not in backend.counters.degraded
    calls(backend, 7, device)
    assert backend.counters.degraded == {Reason.RECOMPILE_LIMIT: 1}
    told = [r.getMessage() for r in caplog.records if r.name.startswith("cgcompile")]
    (text,) = [text for text in told if "recompile_limit is 3" in text]
    assert text.startswith("step (test_recompile_limit.py:")


def test_strict_refuses_the_last_compilation(device: str) -> None:
    backend = cgcompile.Backend(settings(device, strict=True))
    calls(backend, 2, device)
    with pytest.raises(Exception, match=r"recompile_limit.*step \(test_recompile_limit"):
        calls(backend, 7, device)


def test_torch_raises_with_fullgraph(device: str) -> None:
    backend = cgcompile.Backend(settings(device, strict=True))
    calls(backend, 3, device, fullgraph=True)
    with pytest.raises(Exception, match="fullgraph=True"):
        calls(backend, 7, device, fullgraph=True)


def test_equal_modules_are_no_recompilations(caplog: Any, device: str) -> None:
    backend = cgcompile.Backend(settings(device, strict=True))
    with torch._dynamo.config.patch(recompile_limit=3), torch.inference_mode():
        for _ in range(6):
            layer = torch.nn.Linear(WIDTH, WIDTH).to(device)
            compiled = torch.compile(layer, backend=backend)
            x = torch.randn(ROWS, WIDTH, device=device)
            torch.testing.assert_close(compiled(x), layer(x))
    assert Reason.RECOMPILE_LIMIT not in backend.counters.degraded
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING and "limit" in r.msg]
