"""The kernel ``small_batch`` on CUDA: replayed steps of few rows run the kernel, and equal eager."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.patience import PATIENCE
from lib.quantized import quantize
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

import cgcompile
from cgcompile import kernels
from cgcompile.kernels import small_linear

pytestmark = pytest.mark.gpu

D = 128


@pytest.fixture
def launched(monkeypatch) -> list[int]:
    """The rows of each launch of the kernel."""
    if kernels.why_unsupported(torch.device("cuda", 0)) is not None:
        pytest.skip("needs compute capability 9.0")
    rows: list[int] = []
    launch, by_torch = small_linear.launch, small_linear.by_torch

    def counted(x, *rest, **named):
        rows.append(x.numel() // x.shape[-1])
        return launch(x, *rest, **named)

    def refused(x, *rest):
        rows.append(1000)  # the op stands where it should not
        return by_torch(x, *rest)

    monkeypatch.setattr(small_linear, "launch", counted)
    monkeypatch.setattr(small_linear, "by_torch", refused)
    return rows


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.RMSNorm(D), nn.RMSNorm(D)
        self.q, self.k, self.v = nn.Linear(D, D), nn.Linear(D, D // 2), nn.Linear(D, D // 2)
        self.out, self.down = nn.Linear(D, D, bias=False), nn.Linear(256, D, bias=False)
        self.gate, self.up = nn.Linear(D, 256, bias=False), nn.Linear(D, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x)
        pairs = ((self.q(y), 4), (self.k(y), 2), (self.v(y), 2))
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(0, 1)[None] for t, heads in pairs)
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0].transpose(0, 1)
        x = x + self.out(out.flatten(1))
        y = self.two(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def model_of() -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = nn.Sequential(Layer(), Layer(), Layer()).to(torch.bfloat16).eval()
    return model.requires_grad_(False)


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    most = float(expected.float().abs().max())
    torch.testing.assert_close(result.float(), expected.float(), rtol=0, atol=0.03 * most)


@pytest.mark.parametrize("entry_point", ["named", "typed"])
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_sizes_up_to_16_run_the_kernel_and_larger_ones_do_not(launched, entry_point, mode) -> None:
    model = model_of()
    backend = cgcompile.Backend(kernels="auto,small_batch", cudagraph_mode=mode)
    if entry_point == "typed":
        call = cgcompile.compile(model, backend, dynamic_dims={"input": {0: "n"}})
    else:
        call = torch.compile(model, backend=backend, dynamic=True)
    with torch.inference_mode():
        for size in (5, 2, 16, 17, 40, 5):
            for _ in range(3):
                x = torch.randn(size, D, device="cuda", dtype=torch.bfloat16)
                close(call(x), model(x))
    assert backend.counters.replays >= 6
    assert {5, 2, 16} <= set(launched) <= set(range(1, 17))


def test_no_call_waits_for_the_compilation_of_a_kernel(launched, monkeypatch, tmp_path) -> None:
    import triton

    threads: list[str] = []

    def listener(*, src, cache_hit, **_) -> None:
        if src.name == "project" and not cache_hit:
            threads.append(threading.current_thread().name)

    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with torch.device("cuda"):  # sizes of its own: what other tests compiled is in memory
        linear = nn.Sequential(nn.Linear(208, 416, bias=False), nn.Linear(416, 208, bias=False))
    model = linear.bfloat16().requires_grad_(False)
    call = torch.compile(model, backend=cgcompile.Backend(cache_dir="off"), dynamic=False)
    with torch.inference_mode():
        for _ in range(4):
            x = torch.randn(4, 208, device="cuda", dtype=torch.bfloat16)
            close(call(x), model(x))
    assert launched
    assert len(threads) == 2
    assert all(name.startswith("cgcompile kernels") for name in threads)


def test_a_backend_loads_triton_before_it_is_called(monkeypatch) -> None:
    loaded = []
    torch.zeros(1, device="cuda")
    monkeypatch.setattr(kernels, "_load_triton", loaded.append)
    cgcompile.Backend(kernels=False)
    assert loaded == []
    cgcompile.Backend()
    assert loaded == [torch.device("cuda", torch.cuda.current_device())]
    monkeypatch.undo()
    kernels.load_triton()  # the thread itself
    threads = [t for t in threading.enumerate() if t.name == "cgcompile kernels"]
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


@pytest.mark.parametrize("rows", [1, 4])
def test_replays_read_weights_that_were_changed_in_place(launched, rows) -> None:
    model = model_of()
    call = torch.compile(
        model, backend=cgcompile.Backend(kernels="auto,small_batch"), dynamic=False
    )
    with torch.inference_mode():
        for step in range(6):
            x = torch.randn(rows, D, device="cuda", dtype=torch.bfloat16)
            close(call(x), model(x))
            for parameter in model.parameters():
                parameter.mul_(1.01 if step % 2 else 0.98)
    assert launched


@pytest.mark.parametrize("data", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantized_weights_are_read_as_they_are(launched, data) -> None:
    model = model_of()
    quantize(model, data)
    call = torch.compile(
        model, backend=cgcompile.Backend(kernels="auto,small_batch"), dynamic=False
    )
    with torch.inference_mode():
        for step in range(6):
            x = torch.randn(4, D, device="cuda", dtype=torch.bfloat16)
            close(call(x), model(x))
            for layer in model.modules():
                if isinstance(layer, nn.Linear):
                    layer.weight.scale.mul_(1.01 if step % 2 else 0.98)
    assert launched
    assert set(launched) == {4}


@pytest.mark.parametrize("rows", [1, 8])
def test_a_chain_of_replays_is_the_same_each_time(launched, rows) -> None:
    """Kernels that start early wait for the results of those before them."""
    model = model_of()
    backend = cgcompile.Backend(kernels="auto,small_batch", cudagraph_mode="FULL")
    call = torch.compile(model, backend=backend, dynamic=False)
    # What a kernel that did not wait would read is the value of the step before: another one.
    inputs = [torch.randn(rows, D, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    with torch.inference_mode():
        first = [[call(x).clone() for x in inputs] for _ in range(4)][-1]
        for result, x in zip(first, inputs, strict=True):
            close(result, model(x))
        for _ in range(50):
            for result, x in zip(first, inputs, strict=True):
                assert torch.equal(call(x), result)
    assert launched


@pytest.fixture
def early(monkeypatch) -> list[bool]:
    """Whether each launch of the kernel of one row may read weights early."""
    launches: list[bool] = []
    start = small_linear.start

    def noted(kernel, grid, *arguments, **named):
        if kernel.fn.__name__ == "project_row" and not isinstance(arguments[0], FakeTensor):
            launches.append(bool(arguments[kernel.arg_names.index("early")]))
        start(kernel, grid, *arguments, **named)

    monkeypatch.setattr(small_linear, "start", noted)
    return launches


def test_weights_are_read_early_in_graphs_alone(launched, early) -> None:
    """Also a capture of the user begins with kernels that may write them."""
    model = model_of()
    weights = [parameter.clone() for parameter in model.parameters()]
    backend = cgcompile.Backend(kernels="auto,small_batch", cudagraph_mode="FULL")
    call = torch.compile(model, backend=backend, dynamic=False)
    x = torch.randn(1, D, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        for _ in range(4):
            close(call(x), model(x))
        assert early[-12:] == [True] * 12  # of a capture; plain calls come first
        assert not any(early[:-12])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch._foreach_copy_(list(model.parameters()), weights)
            result = call(x)
        assert early[-12:] == [False] * 12
        for _ in range(20):
            torch._foreach_mul_(weights, 1.01)
            graph.replay()
            close(result, model(x))


class Written(nn.Module):
    """A weight that the kernel in front writes, and one that a step never writes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.one.weight.mul_(-1)
        return self.two(self.one(x))


def test_a_weight_that_a_step_writes_is_not_read_early(launched, early) -> None:
    with torch.device("cuda"):
        model = Written().bfloat16().requires_grad_(False)
    backend = cgcompile.Backend(kernels="auto,small_batch", cudagraph_mode="FULL")
    call = torch.compile(model, backend=backend, dynamic=False)
    with torch.inference_mode():
        for _ in range(6):
            x = torch.randn(1, D, device="cuda", dtype=torch.bfloat16)
            close(call(x), model.two(model.one(x)))
    assert early[-2:] == [False, True]


class Cached(nn.Module):
    """One layer that writes to a cache, with one row for each row of the input."""

    cache: torch.Tensor

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.norm, self.k = nn.RMSNorm(D), nn.Linear(D, D, bias=False)
        self.register_buffer("cache", torch.zeros(rows, 4, D))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(x.shape[0], device=x.device)
        self.cache[rows, positions] = self.k(self.norm(x))
        return x + self.cache[rows].sum(1)


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("sizes", [(5, 8, 5, 3), (1, 1)])
def test_no_kernel_runs_with_sizes_that_the_model_does_not_have(small, sizes) -> None:
    """Neither while the sizes from 17 on are compiled, nor for a trace of one row."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Cached(max(sizes)).to(torch.bfloat16).eval().requires_grad_(False)
    backend = cgcompile.Backend(
        kernels="auto,small_batch" if small else "-small_batch", cudagraph_mode="FULL"
    )
    dims = {"x": {0: "n"}, "positions": {0: "n"}}
    call = cgcompile.compile(model, backend, dynamic_dims=dims)
    with torch.inference_mode():
        for size in sizes:
            for _ in range(3):
                x = torch.randn(size, D, device="cuda", dtype=torch.bfloat16)
                positions = torch.randint(4, (size,), device="cuda")
                before = model.cache.clone()
                result = call(x, positions).clone()
                model.cache.copy_(before)
                close(result, model(x, positions))
    assert backend.counters.replays >= len(sizes)


STARTS = """
import torch
import cgcompile
from gpu.test_small_batch import D, close, model_of

model, backend = model_of(), cgcompile.Backend()
call = torch.compile(model, backend=backend, dynamic=False)
with torch.inference_mode():
    for _ in range(4):
        x = torch.randn(4, D, device="cuda", dtype=torch.bfloat16)
        close(call(x), model(x))
print(backend.counters.captures, backend.counters.replays)
"""


@pytest.mark.slow
def test_processes_that_start_at_once_share_empty_caches(launched, tmp_path) -> None:
    """As the ranks of a node do at their first start."""
    root = Path(__file__).parents[2]
    (tmp_path / "pieces").mkdir(mode=0o700)
    environment = {
        **os.environ,
        "CGCOMPILE_CACHE_DIR": str(tmp_path / "pieces"),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}",
    }
    command = [sys.executable, "-c", STARTS]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen(command, env=environment, **pipes) for _ in range(4)]
    outputs = [rank.communicate(timeout=PATIENCE) for rank in ranks]
    assert [out for out, _ in outputs] == ["1 2\n"] * 4, outputs
    kernels = {path.name for path in (tmp_path / "triton").rglob("project.cubin")}
    assert kernels
