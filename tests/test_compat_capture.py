"""Tensors over memory of others, and what making them costs the device: nothing."""

import functools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cgcompile.torch_compat import raw_memory, torch_ops


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [raw_memory.weak_tensor, raw_memory.alias])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_equal_layout_and_no_kernel(make: Any, mode: Any, device: str) -> None:
    base = torch.randn(4, 6, dtype=torch.complex64, device=device)
    with mode():
        views = (base, base.T, base[1:, ::2], base.conj(), base.conj().imag, base[0, 0], base[:0])
        for tensor in views:
            with Ops() as ops:
                alias = make(tensor)
            copies = {"clone", "copy_", "_conj_physical", "neg", "fill_", "zero_"}
            assert copies.isdisjoint(ops.names), ops.names
            assert (alias.data_ptr(), alias.stride()) == (tensor.data_ptr(), tensor.stride())
            assert (alias.is_conj(), alias.is_neg()) == (tensor.is_conj(), tensor.is_neg())
            assert torch.equal(alias, tensor)
            assert not alias.is_inference()
            assert not alias.requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_bits_are_cleared_and_set(mode: Any, device: str) -> None:
    base = torch.randn(4, 6, dtype=torch.complex64, device=device)
    pairs = torch.randn(3, 2, dtype=torch.complex64, device=device).conj().imag
    negative = torch.view_as_complex(pairs.as_strided((3, 2), (2, 1), 0))
    assert negative.is_neg()
    for tensor in (base.conj(), base.conj().imag[1:, ::2], negative, negative.conj()[1:]):
        with mode():
            memory = raw_memory.physical(tensor)
            again = raw_memory.with_bits(memory, tensor.is_conj(), tensor.is_neg())
        assert (memory.is_conj(), memory.is_neg()) == (False, False)
        assert (again.is_conj(), again.is_neg()) == (tensor.is_conj(), tensor.is_neg())
        assert again.dtype is memory.dtype is tensor.dtype
        assert again.data_ptr() == memory.data_ptr() == tensor.data_ptr()
        assert torch.equal(again, tensor)


def test_the_function_behind_compiled_ones() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    compiled = torch.compile(function, backend="eager")

    @functools.wraps(compiled)
    def decorated(x: torch.Tensor) -> torch.Tensor:
        return compiled(x)

    assert torch_ops.compiled_from(compiled) is torch_ops.compiled_from(decorated) is function
    for other in (function, functools.wraps(function)(lambda x: x), torch.compile(torch.nn.ReLU())):
        assert torch_ops.compiled_from(other) is None


class Calls(torch.nn.Module):
    def __init__(self, function: Any = None) -> None:
        super().__init__()
        self.inner, self.function = torch.nn.ReLU(), function


def test_modules_with_compiled_code() -> None:
    model = Calls()
    compiled = torch.compile(model, backend="eager")
    assert torch_ops.original_of(compiled) is model
    assert torch_ops.original_of(model) is torch_ops.original_of(torch.relu) is None
    assert not torch_ops.holds_compiled_code(model)
    assert torch_ops.holds_compiled_code(torch.nn.Sequential(compiled))
    assert torch_ops.holds_compiled_code(Calls(torch.compile(torch.relu, backend="eager")))
    model.inner.compile(backend="eager")
    assert torch_ops.holds_compiled_code(model)
