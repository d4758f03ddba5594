"""Without a forward context results belong to the caller: no later call changes one."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lib.front_ends import COMPILED, ROWS, WIDTH, compiled, settings
from torch import nn

import cgcompile

Step = Callable[[torch.Tensor, torch.Tensor], Any]  # (x, weight), both f32[rows, WIDTH]


@cache
def library() -> torch.library.Library:
    """Boundaries: one that returns a view, one that returns a new tensor."""
    lib = torch.library.Library("kept", "FRAGMENT")
    lib.define("front(Tensor(a) x, int n) -> Tensor(a)")
    lib.impl("front", lambda x, n: x[:, :n], "CompositeExplicitAutograd")
    torch.library.register_fake("kept::front", lambda x, n: x[:, :n], lib=lib)
    lib.define("fresh(Tensor x) -> Tensor")
    lib.impl("fresh", lambda x: x.sin() * 2, "CompositeExplicitAutograd")
    torch.library.register_fake("kept::fresh", torch.empty_like, lib=lib)
    return lib


def attention(k: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(k[None, None], k[None, None], k[None, None])


def keys_in_another_layout(x, w):
    k = x @ w.T
    return attention(k), k.view(-1, 2, WIDTH // 2).transpose(0, 1)


def last_row(x, w):
    k = x @ w.T
    return attention(k), k[-1]


def view_beside_its_base(x, w):
    k = x @ w.T
    return k, attention(k), k[1:]


def view_of_an_input(x, w):
    return attention(x @ w.T), x[1:]


def view_of_a_weight(x, w):
    return attention(x @ w.T), w[1:]


def boundary_that_returns_a_view(x, w):
    return torch.ops.kept.front(x @ w.T, 2)


def view_of_a_view(x, w):
    return torch.ops.kept.front(torch.ops.kept.front(x @ w.T, 4), 2) * 1, (x * w).sum()


def view_of_what_a_boundary_made(x, w):
    y = torch.ops.kept.fresh(x @ w.T)
    z = y * 2  # y crosses to a graph
    return torch.ops.kept.front(y, 3), z


def view_of_a_bridge_behind_other_boundaries(x, w):
    y = torch.ops.kept.fresh(x @ w.T)
    z = y + 1
    view = torch.ops.kept.front(y, 3)
    for _ in range(3):  # each crosses in a bridge of the size of the first
        z = torch.ops.kept.fresh(z) + 1
    return view, z


def in_a_region(change: Callable[[torch.Tensor], Any]) -> Step:
    def step(x, w):
        t = x @ w.T
        with cgcompile.eager_region():
            y = change(t)
        return y

    return step


def region_with_fresh_and_view(x, w):
    t = x @ w.T
    with cgcompile.eager_region():
        a, b = t * 3, t[1:]
    return a, b, a + 1


STEPS: dict[str, Step] = {
    f.__name__: f
    for f in (
        keys_in_another_layout,
        last_row,
        view_beside_its_base,
        view_of_an_input,
        view_of_a_weight,
        boundary_that_returns_a_view,
        view_of_a_view,
        view_of_what_a_boundary_made,
        view_of_a_bridge_behind_other_boundaries,
        region_with_fresh_and_view,
    )
}
STEPS |= {
    f"region_{name}": in_a_region(change)
    for name, change in {
        "slice": lambda t: t[:, :4],
        "contiguous": lambda t: t.contiguous(),
        "to": lambda t: t.to(torch.float32),
        "detach": lambda t: t.detach(),
        "chunk": lambda t: t.chunk(2, dim=1),
        "expand": lambda t: t[None].expand(2, -1, -1),
        "reshape": lambda t: {"y": t.reshape(-1)},
    }.items()
}


class Model(nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.step(x, self.weight[: len(x)] if self.step is view_of_a_view else self.weight)


def kept_results(
    name: str, step: Step, device: str, mode: str, dynamic: bool | None = None
) -> tuple[list[Any], list[Any], Any]:
    """(results, what eager returned for them, counters) of eight calls on random inputs."""
    library()
    torch.manual_seed(1)
    model = Model(step).to(device)
    ops = ("kept::front", "kept::fresh")
    served = compiled(
        name, model, settings(device, cudagraph_mode=mode, splitting_ops=ops), dynamic=dynamic
    )
    results, expected = [], []
    with torch.inference_mode():
        for _ in range(8):
            x = torch.randn(ROWS, WIDTH, device=device)
            results.append(served.step(x))
            expected.append(torch.utils._pytree.tree_map(torch.clone, model(x)))
    return results, expected, served.counters()


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("name", COMPILED)
def test_no_later_call_changes_a_result(name: str, step: Step, mode: str, device: str) -> None:
    results, expected, counters = kept_results(name, step, device, mode)
    for call, (result, want) in enumerate(zip(results, expected, strict=True)):
        torch.testing.assert_close(result, want, msg=lambda text, n=call: f"call {n}: {text}")
    assert counters.captures == 1
    assert counters.replays == 6


@pytest.mark.parametrize("name", COMPILED)
def test_results_that_share_memory_share_it_after_the_copy(name: str, device: str) -> None:
    results, _, counters = kept_results(name, view_beside_its_base, device, "PIECEWISE")
    assert counters.replays == 6
    starts = {k.untyped_storage().data_ptr() for k, _, _ in results}
    assert len(starts) == len(results)
    with torch.inference_mode():
        for k, _, view in results:
            view.fill_(7.0)
            assert bool((k[1:] == 7.0).all())


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("step", [view_of_an_input, view_of_a_weight])
def test_a_view_of_what_the_caller_owns_stays_one(name: str, step: Step, device: str) -> None:
    torch.manual_seed(2)
    model = Model(step).to(device)
    served = compiled(name, model, settings(device, cudagraph_mode="PIECEWISE"))
    with torch.inference_mode():
        for _ in range(5):
            x = torch.randn(ROWS, WIDTH, device=device)
            _, view = served.step(x)
            owner = x if step is view_of_an_input else model.weight
            assert view.data_ptr() == owner[1:].data_ptr()
    assert served.counters().replays == 3


@pytest.mark.parametrize("name", COMPILED)
def test_a_capture_that_fails_on_the_way_hands_out_no_graph_memory(name: str, device: str) -> None:
    """Earlier pieces have been captured when a later one fails; the step runs on without them."""

    def step(x, w):
        t = x @ w.T
        front = torch.ops.kept.front(t, 2)
        torch.ops.kept.no_capture(t)
        return front, t[1:], t + 1

    lib = library()
    if not hasattr(torch.ops.kept, "no_capture"):
        lib.define("no_capture(Tensor(a!) x) -> ()")

        def no_capture(x: torch.Tensor) -> None:
            x.add_(x.sum().item() * 0)  # a synchronisation inside of a capture

        lib.impl("no_capture", no_capture, "CompositeExplicitAutograd")
        torch.library.register_fake("kept::no_capture", lambda x: None, lib=lib)
    results, expected, counters = kept_results(name, step, device, "PIECEWISE")
    for result, want in zip(results, expected, strict=True):
        torch.testing.assert_close(result, want)
    assert counters.plain[cgcompile.Reason.CAPTURE_FAILED] >= 1
