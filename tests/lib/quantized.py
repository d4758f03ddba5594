"""Weights of int8 and float8 with a scale for each row."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree


def quantized(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return data and float32 scales of the rows of a weight."""
    scale = weight.float().abs().amax(1) / (448 if dtype.is_floating_point else 127)
    data = weight.float() / scale[:, None]
    return (data if dtype.is_floating_point else data.round()).to(dtype), scale


class Quantized(torch.Tensor):
    """A weight of int8 or float8, that computes layers as torchao does."""

    @staticmethod
    def __new__(cls, data, scale):
        sizes = {"dtype": torch.bfloat16, "device": data.device}
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, **sizes)

    def __init__(self, data, scale) -> None:
        self.data8, self.scale = data, scale

    def __tensor_flatten__(self):
        return ["data8", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["data8"], inner["scale"])

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is not F.linear:
            return super().__torch_function__(func, types, args, kwargs or {})
        x, weight, bias = (*args, None)[:3]
        rows, data = x.reshape(-1, x.shape[-1]), weight.data8
        if data.dtype is torch.int8:
            y = torch.mm(rows, data.t().to(x.dtype)) * weight.scale.to(x.dtype).flatten()
        else:
            y = torch.mm(rows, (data.t().float() * weight.scale.t()).to(x.dtype))
        y = y.reshape(*x.shape[:-1], data.shape[0])
        if bias is not None:
            y += bias
        return y

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data8.detach(), args[0].scale.detach())
        args, kwargs = pytree.tree_map_only(cls, cls.plain, (args, kwargs or {}))
        return func(*args, **kwargs)

    def plain(self) -> torch.Tensor:
        return (self.data8.float() * self.scale).to(self.dtype)


def quantize(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace the weights of all linear layers."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            data, scale = quantized(layer.weight, dtype)
            weight: Any = Quantized(data, scale[:, None])
            layer.weight = nn.Parameter(weight, requires_grad=False)
