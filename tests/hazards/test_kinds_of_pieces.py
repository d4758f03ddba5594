"""A piece may have no outputs, no inputs, only views or only numbers: each is captured and replayed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lib.front_ends import WIDTH, compiled, settings

from cgcompile import AttentionCGSupport, SplittingOp


@torch.library.custom_op("kinds::attend", mutates_args=("out",))
def attend(q: torch.Tensor, out: torch.Tensor) -> None:
    """A boundary that writes a tensor, as attention does."""
    out.copy_(q * 3)


attend.register_fake(lambda q, out: None)


def attended(q: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(q)
    attend(q, out)
    return out


def only_writes(x, cache):
    q = x * 2
    cache.copy_(attended(q))
    return q


def only_writes_what_it_reads(x, cache):
    q = x * 2
    attend(q, cache)
    cache.add_(1)
    return q


def writes_a_view(x, cache):
    q = x * 2
    out = attended(q)
    cache[:1].copy_(out[:1])
    cache[1:].mul_(0.5)
    return q


def only_writes_between_boundaries(x, cache):
    q = x * 2
    out = attended(q)
    cache.copy_(out)
    return attended(q) + cache


def no_inputs(x, cache):
    y = attended(x * 2)
    cache.copy_(y)
    attend(cache, y)
    return torch.ones(3, device=x.device) * 2, y  # alone behind the last boundary


def only_views(x, cache):
    q = x * 2
    out = attended(q)
    cache.copy_(out)
    attend(q, cache)
    return out.view(-1, 2), q[1:]


def only_numbers(x, cache):
    q = x * 2
    out = attended(q)
    cache.copy_(out)
    attend(q, cache)
    return out, x.shape[0] * 2 + 1


def views_of_that_many_rows(x, cache):
    q = x * 2
    out = attended(q)
    attend(q, cache)
    return out.view(x.shape[0] * 2, -1), cache + 0


KINDS = [
    only_writes,
    only_writes_what_it_reads,
    writes_a_view,
    only_writes_between_boundaries,
    no_inputs,
    only_views,
    only_numbers,
    views_of_that_many_rows,
]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
@pytest.mark.parametrize(
    "compiler", ["eager", "aot", pytest.param("inductor", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("step", KINDS)
def test_a_piece_of_any_kind_is_right_over_changing_inputs(
    step: Callable[..., Any], compiler: str, mode: str, dynamic: bool, device: str
) -> None:
    torch.manual_seed(3)
    boundary = SplittingOp("kinds::attend", support=AttentionCGSupport.ALWAYS)
    config = settings(device, compiler=compiler, cudagraph_mode=mode, splitting_ops=(boundary,))
    served = compiled("torch.compile", step, config, dynamic=dynamic)
    with torch.inference_mode():
        for rows in (4, 6) if dynamic else (4,):
            cache = torch.zeros(rows, WIDTH, device=device)
            expected_cache = cache.clone()
            for _ in range(5):
                x = torch.randn(rows, WIDTH, device=device)
                torch.testing.assert_close(served.step(x, cache), step(x, expected_cache))
                torch.testing.assert_close(cache, expected_cache)
                assert cache.abs().sum() > 0
    counters = served.counters()
    assert counters.captures == (2 if dynamic else 1)
    assert counters.replays >= (6 if dynamic else 3)
