"""What the tests of breakable capture share: operators, models with a cut, exact comparisons."""

import functools
import threading
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from cgcompile import BatchDescriptor, CUDAGraphMode, set_forward_context
from cgcompile.context import current_forward_context, get_forward_context
from cgcompile.graphs.breakable import eager_break_during_capture
from cgcompile.graphs.sequence import EagerSegment, GraphSegment

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
TIMEOUT = 60
SIZE = (4, 8)


class Asked(Exception):
    """An error type that only these tests know."""


class Hook:
    """What ``cgbreak::hooked`` does; a test may replace it."""

    function: Callable[[torch.Tensor], torch.Tensor] = staticmethod(torch.sin)


@cache
def operators() -> torch.library.Library:
    """Operators with kernels in Python: what a test says, one that reads the context, callers."""
    lib = torch.library.Library("cgbreak", "FRAGMENT")
    for name in ("soft", "hooked", "by_context", "outer"):
        lib.define(f"{name}(Tensor x) -> Tensor")

    def by_context(x):
        return x * get_forward_context().attn_metadata

    def outer(x):
        return torch.ops.cgbreak.soft(x * 2) + 1

    for key in ("CPU", "CUDA"):
        lib.impl("soft", lambda x: torch.softmax(x, -1), key)
        lib.impl("hooked", lambda x: Hook.function(x), key)
        lib.impl("by_context", by_context, key)
        lib.impl("outer", outer, key)
    return lib


@torch.library.custom_op("cgbreak::outer_custom", mutates_args=())
def outer_custom(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.cgbreak.soft(x * 2) + 1


def step(tokens: int, mode: CUDAGraphMode = PIECEWISE, metadata: Any = None) -> set_forward_context:
    return set_forward_context(
        metadata, cudagraph_runtime_mode=mode, batch_descriptor=BatchDescriptor(tokens)
    )


def rand(*size: int, device: str) -> torch.Tensor:
    return torch.rand(size or SIZE, device=device)


def counted(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[Any]]:
    """``function`` as a break, and the forward context of each of its calls."""
    calls: list[Any] = []

    @eager_break_during_capture
    @functools.wraps(function)
    def break_here(*args: Any, **kwargs: Any) -> Any:
        calls.append(current_forward_context())
        return function(*args, **kwargs)

    return break_here, calls


def soft(x: torch.Tensor) -> torch.Tensor:
    """What most tests run as a break."""
    return torch.softmax(x, -1)


def layers(count: int, x: torch.Tensor, cut: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A chain in which each result of a cut is read by one layer alone."""
    for k in range(count):
        y = x.sin() + k
        x = cut(y) * 2 - x
    return x


def same(result: Any, expected: Any) -> bool:
    """Bitwise on the CPU; a library of kernels may choose another one inside of a capture."""
    left, right = tree_leaves(result), tree_leaves(expected)
    if len(left) != len(right):
        return False
    return all(_same(a, b) for a, b in zip(left, right, strict=True))


def _same(result: Any, expected: Any) -> bool:
    if not isinstance(result, torch.Tensor):
        return result == expected
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return False
    if result.device.type == "cpu" or not result.is_floating_point():
        return torch.equal(result, expected)
    return torch.allclose(result, expected, rtol=1e-3, atol=1e-3)


def assert_alternates(recorded: Any, breaks: int) -> None:
    """A graph, then an eager segment and a graph for each break; and something was recorded."""
    kinds = [type(each) for each in recorded.segments]
    assert kinds == [GraphSegment, *[EagerSegment, GraphSegment] * breaks], [
        segment.name for segment in recorded.segments
    ]
    assert (recorded.num_graphs, recorded.num_eager_breaks) == (breaks + 1, breaks)
    graphs = [each.graph for each in recorded.segments if isinstance(each, GraphSegment)]
    recordings = [graph.ops for graph in graphs if hasattr(graph, "ops")]
    assert not recordings or any(recordings), "the graphs are empty"


def eager_segments(recorded: Any) -> list[EagerSegment]:
    return [each for each in recorded.segments if isinstance(each, EagerSegment)]


def copies(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, tree)


def churn(device: str) -> None:
    """Allocate, fill and free memory that a reader of freed tensors would meet."""
    for _ in range(2):
        sizes = torch.randint(1, 200, (24,)).tolist()
        _ = [torch.full((n, 4), float("nan"), device=device) for n in sizes]


def assert_replays(
    recorded: Any,
    result: Any,
    inputs: Iterable[torch.Tensor],
    plain: Callable[..., Any],
    times: int = 3,
    between: Callable[[], None] = lambda: None,
) -> None:
    """Compare what replays leave in ``result`` with eager on new numbers, and with the one before."""
    previous = None
    for _ in range(times):
        for tensor in inputs:
            tensor.copy_(torch.rand_like(tensor))
        expected = plain(*[each.clone() for each in inputs])
        between()
        assert recorded.replay() is None
        assert same(result, expected)
        assert previous is None or not same(result, previous)
        previous = copies(result)


def assert_calls(
    wrapper: Any,
    plain: Callable[[torch.Tensor], Any],
    buffer: torch.Tensor,
    mode: CUDAGraphMode = PIECEWISE,
    tokens: int = 4,
    times: int = 3,
) -> None:
    """Compare calls with eager on new numbers in the same buffer, and each with the one before."""
    previous = None
    for _ in range(times):
        buffer.copy_(torch.rand_like(buffer))
        expected = plain(buffer.clone())
        with step(tokens, mode):
            result = wrapper(buffer)
        assert same(result, expected)
        assert previous is None or not same(result, previous)
        previous = copies(result)


def assert_counters(wrapper: Any, **expected: Any) -> None:
    """The numbers that are named, zero for those that are not, and their sum."""
    counters = wrapper.counters
    names = ("captures", "replays", "failures")
    counts = {name: getattr(counters, name) for name in names}
    assert counts == {name: expected.get(name, 0) for name in names}, counters
    assert counters.plain == expected.get("plain", {}), counters
    assert counters.calls == sum(counts.values()) + counters.plain.total(), counters


def in_thread(target: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """What a function returned, and what it raised, in another thread."""
    outcome: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((target(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(TIMEOUT)
    assert not thread.is_alive()
    return outcome[0]


class Layer(nn.Module):
    """Projections, an attention that writes its result in place, a gate."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(size), nn.Linear(size, 3 * size)
        self.out = nn.Linear(size, size)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        attended = torch.empty_like(q)
        torch.ops.cgtest.attend(q, k, v, attended)
        return x + self.out(attended).relu()


class Stack(nn.Module):
    """Plain layers, one after the other."""

    def __init__(self, depth: int = 8, size: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(size) for _ in range(depth))
        self.requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
