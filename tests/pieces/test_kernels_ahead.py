"""Kernels of ops of cgcompile are compiled while pieces are, from layouts of their tensors."""

import contextlib
import importlib
import threading
import types

import pytest
import torch
from torch import nn

import cgcompile
from cgcompile import kernels
from cgcompile.kernels import small_linear
from cgcompile.pieces import compilers
from cgcompile.torch_compat import expressions

D = 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(D)
        self.one, self.two = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.bfloat16().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.two(self.one(self.norm(x)))


@pytest.fixture
def compiled(monkeypatch) -> list[tuple[str, list[tuple[int, ...]], str]]:
    """Op, sizes of its first tensor and residual, and thread, of all that is compiled ahead."""
    calls = []

    def noted(name, device, arguments):
        def on_cuda(*tensors):
            assert all(isinstance(tensor, torch.Tensor) for tensor in (tensors[0], *tensors[1]))
            sizes = [tuple(t.shape) for t in tensors if isinstance(t, torch.Tensor)]
            calls.append((name, sizes, threading.current_thread().name))

        expressions.call_with_fakes(on_cuda, arguments)

    monkeypatch.setattr(compilers, "why_unsupported", lambda device: None)
    monkeypatch.setattr(compilers, "compile_kernels", noted)
    monkeypatch.setattr(compilers, "_runs_kernels", lambda tensor: True)
    return calls


@pytest.mark.slow
def test_each_kernel_is_compiled_once_for_the_sizes_that_are_captured(compiled) -> None:
    model = nn.Sequential(Layer(), Layer())
    backend = cgcompile.Backend(
        capture_device="host", cudagraph_capture_sizes=(2, 16, 32), cache_dir="off"
    )
    call = cgcompile.compile(model, backend, dynamic_dims={"input": {0: "n"}})
    x = torch.randn(5, D).bfloat16()
    with torch.inference_mode():
        torch.testing.assert_close(call(x), model(x), rtol=0.02, atol=0.02)
    assert {name for name, _, _ in compiled} == {"small_linear"}
    assert {name.split("_")[0] for _, _, name in compiled} == {"cgcompile kernels"}
    rows = sorted(sizes[0] for _, sizes, _ in compiled)
    # Both layers have the same two kernels, for sizes 2, 5 as traced, and 16.
    assert rows == sorted((n, size) for n in (2, 5, 16) for size in (D, 2 * D))
    with_residual = [sizes for _, sizes, _ in compiled if sizes[0][1] == 2 * D]
    assert all(sizes == [(n, 2 * D), (n, D)] for sizes in with_residual for n in [sizes[0][0]])


@pytest.mark.slow
def test_a_kernel_that_does_not_compile_ahead_is_no_error(compiled, monkeypatch) -> None:
    def fails(*_):
        compiled.append(())
        raise RuntimeError("no compiler")

    monkeypatch.setattr(compilers, "compile_kernels", fails)
    model, x = Layer(), torch.randn(4, D).bfloat16()
    call = torch.compile(model, backend=cgcompile.Backend(capture_device="host", cache_dir="off"))
    with torch.inference_mode():
        torch.testing.assert_close(call(x), model(x), rtol=0.02, atol=0.02)
    assert len(compiled) == 2


class Kernel:
    """Stands for a kernel of Triton."""

    def __init__(self) -> None:
        self.calls = []

    def __getitem__(self, grid):
        return lambda *arguments, **named: self.calls.append(("launch", grid, arguments, named))

    def warmup(self, *arguments, grid, **named):
        self.calls.append(("compile", grid, arguments, named))


def test_start_launches_but_only_compiles_ahead(monkeypatch) -> None:
    kernel, device = Kernel(), torch.device("cpu")
    x = torch.randn(2, D)

    def on_cuda(x, factor):
        kernels.start(kernel, (3,), x, factor, num_warps=4)

    monkeypatch.setattr(small_linear, "on_cuda", on_cuda)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.device("meta"))
    kernels.compile_kernels("small_linear", device, expressions.with_numbers((x, 2.0), None))
    on_cuda(x, 2.0)
    (kind, *compiling), (other, *launching) = kernel.calls
    assert (kind, *compiling) == ("compile", (3,), (torch.float32, 2.0), {"num_warps": 4})
    assert (other, launching[0], launching[1][0] is x) == ("launch", (3,), True)


def half(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes).bfloat16()


QUERY, KEY, CACHE, TABLE = (
    half(2, 4, 1, 64),
    half(2, 2, 1, 64),
    half(2, 2, 256, 64),
    half(2, 1, 64),
)
KEPT, POSITIONS = torch.ones(2, 1, 1, 256).bool(), torch.zeros(1, dtype=torch.int64)
LINEAR = (half(4, 64), [half(128, 64)], [None], half(64), 1e-6, 0.0, None, "")
ATTENTION = (QUERY, CACHE, CACHE, KEPT, None, 0.125, 0.0)
ROTARY = (QUERY, KEY, KEY, TABLE, TABLE, None, None, 0.0, 0.0, POSITIONS, CACHE, CACHE)
CALLS = {
    "small_linear": (LINEAR, ["project"]),
    "decode_attention": (ATTENTION, ["attend_keys", "attend_sums"]),
    "rotate_and_cache": (ROTARY, ["rotate_and_cache"]),
}


@pytest.mark.parametrize("name", CALLS)
def test_launching_code_reads_no_memory(name: str, monkeypatch) -> None:
    """Kernels are compiled from tensors that have none."""
    pytest.importorskip("triton")
    module, started = importlib.import_module(f"cgcompile.kernels.{name}"), []

    def start(kernel, grid, *arguments, **named):
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        assert tensors
        assert all(type(tensor).__name__ == "FakeTensor" for tensor in tensors)
        started.append(kernel.fn.__name__)

    monkeypatch.setattr(module, "start", start)
    monkeypatch.setattr(module, "why_unsupported", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    properties = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    arguments, kernel_names = CALLS[name]
    layouts = expressions.with_numbers(arguments, None)
    kernels.compile_kernels(name, torch.device("cpu"), layouts)
    assert started == kernel_names
