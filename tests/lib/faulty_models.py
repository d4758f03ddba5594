"""Models with one fault each, on the line that ends in ``# FAULT: <name>``."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import cgcompile
from cgcompile.graphs.device import any_capture
from cgcompile.torch_compat import inductor
from lib.cases import D
from lib.entry import operators

LAYOUT = (4, D)  # of a row of a batch


def config(**settings: Any) -> cgcompile.CompilationConfig:
    return cgcompile.CompilationConfig(
        **{"capture_device": "host", "compiler": "eager", "cudagraph_mode": "PIECEWISE", **settings}
    )


def built(kind: Any, device: str) -> nn.Module:
    operators()
    torch.manual_seed(0)
    return kind().eval().to(device)


def rows(device: str, count: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, *LAYOUT, generator=generator).to(device)


def attention(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x, x)


class Good(nn.Module):
    """Five pieces; writes an argument's twin, a buffer, and draws no random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count.add_(1)
        x = attention(self.first(x)).sin()
        return attention(self.second(x)) + self.count


class Mixes(nn.Module):
    """Takes the mean over the batch: padding reaches every row."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(D, D)

    def forward(self, x):
        x = attention(self.first(x).sin())
        centre = x.mean(0, keepdim=True)  # FAULT: mixes rows
        return (x - centre).cos()


class Stale(nn.Module):
    """The kernel of a captured op reads a number, or a table, of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        x = attention(self.first(x))
        y = self.second(x).sin()
        z = torch.ops.cgentry.hooked(y)  # FAULT: stale
        return attention(z.cos() + x) + 1  # FAULT: stale shows


class Shares(nn.Module):
    """Two pieces of equal structure, whose op may return one workspace."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        kept = torch.ops.cgentry.hooked(self.first(x))
        y = attention(x)
        other = torch.ops.cgentry.hooked(self.second(y))  # FAULT: overwrites
        return attention(other) + kept


class SharesInOtherPieces(Shares):
    def forward(self, x):
        kept = torch.ops.cgentry.hooked(self.first(x))
        y = attention(x)
        other = torch.ops.cgentry.hooked(self.second(y).relu())  # FAULT: overwrites
        return attention(other) + kept


class Workspace:
    """``2 x`` in a buffer of its own where a capture runs, else in new memory."""

    def __init__(self, like: torch.Tensor) -> None:
        self.memory = torch.zeros_like(like)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self.memory if any_capture() else torch.empty_like(x)
        return torch.mul(x, 2, out=out)


class Calculates(nn.Module):
    """What compilers and passes get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        x = attention(self.first(x).cos())
        y = self.second(x) * 2
        z = torch.sin(y)  # FAULT: miscompiled
        z = torch.exp(-z * z)  # FAULT: shows
        return attention(z) + z.tanh()


def _swapped(gm: torch.fx.GraphModule, old: Any, new: Any) -> torch.fx.GraphModule:
    for node in gm.graph.find_nodes(op="call_function", target=old):
        node.target = new
    gm.recompile()
    return gm


def aten_miscompiler(gm: torch.fx.GraphModule, fake_inputs: Any) -> Any:
    """Takes sines for cosines in the ATen graph, long after the trace."""

    def swap(aten: torch.fx.GraphModule, inputs: Any) -> Any:
        return _swapped(aten, torch.ops.aten.sin.default, torch.ops.aten.cos.default).forward

    return inductor.compile_aten(gm, fake_inputs, swap)


def one_buffer(gm: torch.fx.GraphModule, fake_inputs: Any) -> Any:
    """Returns the first result of each call in one buffer, as graphs with static outputs do."""
    buffer: list[torch.Tensor] = []

    def run(*inputs: Any) -> Any:
        first, *others = gm.forward(*inputs)
        buffer[:] = buffer or [torch.empty_like(first)]
        return [buffer[0].copy_(first), *others]

    return run


def miscompiler(gm: torch.fx.GraphModule, fake_inputs: Any) -> Any:
    """Takes sines for cosines."""
    copy = torch.fx.GraphModule(gm, torch.fx.Graph())
    copy.graph.output(copy.graph.graph_copy(gm.graph, {}))
    return _swapped(copy, torch.sin, torch.cos).forward


class WrongPass:
    """Takes sines for cosines."""

    name = "fold_sines"

    def uuid(self) -> str:
        return "1"

    def __call__(self, gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
        return _swapped(gm, torch.sin, torch.cos)


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)
