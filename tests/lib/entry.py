"""Operators that tests steer, small models and exact counts, for both entry points."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import cgcompile
from cgcompile import AttentionCGSupport, SplittingOp
from cgcompile.context import current_forward_context
from cgcompile.reasons import Reason
from lib.asserts import build
from lib.cases import CASES, Attention, D, library

WARMING = Reason.WARMING


class Hook:
    """What ``cgentry::hooked`` does; a test may replace it."""

    function: Callable[[torch.Tensor], torch.Tensor] = staticmethod(lambda x: torch.softmax(x, -1))


@cache
def operators() -> torch.library.Library:
    """Operators that read what a test says, the forward context, or a number."""
    lib = torch.library.Library("cgentry", "FRAGMENT")
    lib.define("hooked(Tensor x) -> Tensor")
    lib.define("times(Tensor x, SymInt n) -> Tensor")
    lib.define("attend(Tensor q, Tensor k, Tensor v, Tensor(a!) out) -> ()")

    def attend(q, k, v, out):
        context = current_forward_context()
        scale = 1.0 if context is None else context.attn_metadata or 1.0
        out.copy_(torch.softmax(scale * q @ k.transpose(-1, -2), -1) @ v)

    for key in ("CPU", "CUDA"):
        lib.impl("hooked", lambda x: Hook.function(x), key)
        lib.impl("times", lambda x, n: x * n, key)
        lib.impl("attend", attend, key)
    torch.library.register_fake("cgentry::hooked", torch.empty_like, lib=lib)
    torch.library.register_fake("cgentry::times", lambda x, n: torch.empty_like(x), lib=lib)
    torch.library.register_fake("cgentry::attend", lambda q, k, v, out: None, lib=lib)
    return lib


class ByContext(Attention):
    """An attention that is scaled by the metadata of the forward context."""

    def attend(self, q, k, v):
        out = torch.empty_like(q)
        torch.ops.cgentry.attend(q, k, v, out)
        return out


class Hooked(nn.Module):
    """Projections around a functional operator that a test steers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        return x + self.after(torch.ops.cgentry.hooked(self.before(x).sin()))


class Times(nn.Module):
    """An operator with a number between projections."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x, n):
        return self.after(torch.ops.cgentry.times(self.before(x), n))


class WithCache(nn.Module):
    """Writes an argument, once a step."""

    def forward(self, x, cache):
        cache.mul_(0.5).add_(x.mean())
        return F.scaled_dot_product_attention(x, x, x) + cache


HOOKED = {"splitting_ops": ("cgentry::hooked",)}
EAGER_ATTEND = {"splitting_ops": ("cgtest::attend",)}


def by_context(support: AttentionCGSupport = AttentionCGSupport.NEVER) -> dict[str, Any]:
    return {"splitting_ops": (SplittingOp("cgentry::attend", support=support),)}


def made(kind: Callable[[], nn.Module], device: str) -> nn.Module:
    operators(), library()
    torch.manual_seed(0)
    return kind().eval().to(device)


def backend_for(**settings: Any) -> cgcompile.Backend:
    return cgcompile.Backend(**{"capture_device": "host", "compiler": "eager", **settings})


def compiled_case(name: str, device: str, **settings: Any) -> tuple[Any, Any, cgcompile.Backend]:
    """(model, compiled, backend) of one of the common cases."""
    model = build(CASES[name], device)
    backend = backend_for(**{**CASES[name].settings, **settings})
    return model, torch.compile(model, backend=backend), backend


def compiled_model(
    kind: Callable[[], nn.Module], device: str, dynamic: bool | None = None, **settings: Any
) -> tuple[Any, Any, cgcompile.Backend]:
    """(model, compiled, backend) of a model of this file or of a test."""
    model, backend = made(kind, device), backend_for(**settings)
    return model, torch.compile(model, backend=backend, dynamic=dynamic), backend


def batch(device: str, size: int = 6) -> torch.Tensor:
    return torch.randn(size, 4, D, device=device)


def marked(tensor: torch.Tensor) -> torch.Tensor:
    torch._dynamo.mark_dynamic(tensor, 0)
    return tensor


def assert_same(result: Any, expected: Any) -> None:
    """Bitwise on the CPU, where pieces run the kernels of eager."""
    first = next(leaf for leaf in torch.utils._pytree.tree_leaves(result) if torch.is_tensor(leaf))
    tolerance = (0.0, 0.0) if first.device.type == "cpu" else (2e-4, 2e-5)
    torch.testing.assert_close(result, expected, rtol=tolerance[0], atol=tolerance[1])


def assert_counts(
    counted: Any,
    captures: int,
    replays: int,
    plain: Mapping[Reason, int],
    failures: int = 0,
    degraded: Mapping[Reason, int] | None = None,
) -> None:
    """Exactly these, of a backend or of a graph; and every call is counted once."""
    counters = counted.counters
    assert (counters.captures, counters.replays) == (captures, replays), counters
    assert counters.plain == Counter(plain), counters
    assert counters.failures == failures, counters
    assert counters.degraded == Counter(degraded or {}), counters
    done = counters.captures + counters.replays + counters.failures + counters.plain.total()
    assert counters.calls == done, counters


def assert_steps(compiled: Any, model: Any, device: str, size: int = 6, steps: int = 3) -> None:
    """Steps of one size without a forward context, each on random data somewhere else."""
    for _ in range(steps):
        x = batch(device, size)
        assert_same(compiled(x), model(x))


GUARDS = ("keep", "shape", "none")
SHAPES = ("backed", "backed_size_oblivious", "unbacked")


def compiled(function: Any, **settings: Any) -> Any:
    """With uncompiled pieces, so that results are those of eager bit by bit."""
    return cgcompile.compile(function, **{"compiler": "eager", **settings})


def rows(size: int, *others: int) -> torch.Tensor:
    return torch.randn(size, *(others or (4,)))


def check(one: Callable[..., Any], eager: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """One call of each."""
    assert_same(one(*args, **kwargs), eager(*args, **kwargs))


def stale(one: Callable[..., Any], eager: Callable[..., Any], *args: Any) -> bool:
    """Whether a call gives another result than eager."""
    return not torch.equal(one(*args), eager(*args))
