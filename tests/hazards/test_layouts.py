"""What eager pieces return in another layout than traced reaches compiled pieces as they expect."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import cgcompile
from cgcompile.graphs.arena import dense_order

WIDTH = 16
CALLS = 8


class Layout:
    """Where the rows of ``cglayout::moved`` are in memory; a test sets it."""

    now = "traced"


def in_layout(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Return an uninitialized tensor of the shape of ``x`` [n, h, d] in a layout."""
    n, h, d = x.shape
    if kind == "permuted":
        return x.new_empty(h, n, d).transpose(0, 1)
    if kind == "gapped":
        return x.new_empty(n, h, d + 3)[..., :d]
    return x.new_empty(n, h, d)


@torch.library.custom_op("cglayout::moved", mutates_args=())
def moved(x: torch.Tensor, traced: str) -> torch.Tensor:
    kind = traced if Layout.now == "traced" else Layout.now
    return in_layout(x, kind).copy_(x.sin())


@moved.register_fake
def _(x: torch.Tensor, traced: str) -> torch.Tensor:
    return in_layout(x, traced)


class Moved(nn.Module):
    """Captured pieces around a boundary whose result has any layout."""

    def __init__(self, traced: str, writes: bool) -> None:
        super().__init__()
        self.layer, self.traced, self.writes = nn.Linear(WIDTH, WIDTH), traced, writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.ops.cglayout.moved(self.layer(x).view(-1, 2, WIDTH // 2), self.traced)
        if self.writes:
            y.mul_(2)
        # A copy or a view: which one it is was decided when the graph was captured.
        return self.layer(y.transpose(0, 1).reshape(-1, WIDTH)) + y.flatten()[: x.numel()].view_as(
            x
        )


def asserting(gm: torch.fx.GraphModule, fakes: list) -> object:
    """Compile a piece like Inductor, which asserts the strides of its inputs."""
    expected = {i: x.stride() for i, x in enumerate(fakes) if isinstance(x, torch.Tensor)}

    def run(*inputs):
        for index, strides in expected.items():
            dims = zip(inputs[index].shape, inputs[index].stride(), strides, strict=True)
            for size, stride, traced in dims:
                assert not isinstance(traced, int) or size == 1 or stride == traced
        return gm.forward(*inputs)

    return run


@pytest.mark.parametrize("mode", ["PIECEWISE", "NONE"])
@pytest.mark.parametrize("writes", [False, True], ids=["reads", "writes"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("traced", ["contiguous", "permuted", "gapped"])
def test_a_result_reaches_pieces_in_the_layout_that_was_traced(
    device, traced, dynamic, writes, mode, monkeypatch
) -> None:
    torch.manual_seed(0)
    model = Moved(traced, writes).to(device).eval()
    backend = cgcompile.Backend(
        compiler=asserting,
        capture_device="host" if device == "cpu" else "auto",
        splitting_ops="cglayout::moved",
        cudagraph_mode=mode,
    )
    step = torch.compile(model, backend=backend, dynamic=dynamic)
    others = [kind for kind in ("contiguous", "permuted", "gapped") if kind != traced]
    with torch.inference_mode():
        for kind in ["traced", others[0], "traced", *others, "traced", *others]:
            x = torch.randn(6, WIDTH, device=device)
            monkeypatch.setattr(Layout, "now", "traced")
            expected = model(x)
            monkeypatch.setattr(Layout, "now", kind)
            torch.testing.assert_close(step(x), expected)
    assert backend.counters.replays >= (4 if mode == "PIECEWISE" else 0)
    assert len(backend.graphs) == 1


class Attention(nn.Module):
    """Attention whose result is [rows, heads, n, d] in the layout of the kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, 4, 16).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(torch.relu(y.transpose(1, 2).reshape(b, n, d)))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL", "NONE"])
def test_attention_kernels_take_turns(device, mode, compiler, dynamic) -> None:
    torch.manual_seed(0)
    model = Attention().to(device).eval()
    backend = cgcompile.Backend(
        compiler=compiler, capture_device="host" if device == "cpu" else "auto", cudagraph_mode=mode
    )
    step = torch.compile(model, backend=backend, dynamic=dynamic)
    with torch.inference_mode():
        for call in range(CALLS):
            x = torch.randn(2, 8, 64, device=device)
            with sdpa_kernel(SDPBackend.MATH) if call % 2 else nullcontext():
                torch.testing.assert_close(step(x), model(x), rtol=1e-3, atol=1e-3)
    assert backend.counters.replays >= (0 if mode == "NONE" else CALLS - 4)


def test_the_order_of_dimensions_in_memory() -> None:
    x = torch.empty(2, 3, 1, 4)
    assert dense_order(x.shape, x.stride()) == (0, 1, 2, 3)
    for order in [(0, 3, 1, 2), (3, 2, 1, 0), (1, 0, 2, 3)]:
        y = torch.empty_permuted(x.shape, order)
        dims = dense_order(y.shape, y.stride())
        assert y.permute(dims).is_contiguous()
    gapped, repeated = torch.empty(2, 5)[:, :4], torch.empty(2, 1).expand(2, 4)
    assert dense_order(gapped.shape, gapped.stride()) is None
    assert dense_order(repeated.shape, repeated.stride()) is None


class WithAnEmptyPart(nn.Module):
    """A value of a captured piece that Inductor returns in another layout than eager's ``cat``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.layer(x).view(-1, 3, 2, WIDTH // 2).transpose(1, 2)
        whole = torch.cat([heads * 2, heads[..., WIDTH:]], -1)
        y = F.scaled_dot_product_attention(heads, heads, heads)
        return whole.sum(-2) + (whole + y).sum(-2)


@pytest.mark.slow
def test_layouts_of_a_compiled_piece_are_those_of_the_trace(device: str) -> None:
    model = WithAnEmptyPart().to(device).eval()
    backend = cgcompile.Backend(
        capture_device="host" if device == "cpu" else "auto", kernels="-decode_attention"
    )
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.inference_mode():
        for _ in range(CALLS):
            x = torch.randn(6, WIDTH, device=device)
            torch.testing.assert_close(compiled(x), model(x))
    assert backend.counters.captures == 1
    assert backend.counters.replays > 3
