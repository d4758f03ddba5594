"""Tensor subclasses that wrap plain tensors: take them apart, build them, trace calls on them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx


class CannotUnwrap(Exception):
    """A tensor subclass, or a call on one, has no equivalent on plain tensors; with the reason."""


@dataclass(frozen=True, eq=False)
class Held:
    """An object that a subclass wraps beside tensors, such as a device mesh."""

    value: Any


@dataclass(frozen=True, eq=False)
class Wrapper:
    """How a traceable wrapper subclass is built from the plain tensors inside of it."""

    kind: Any  # the subclass
    names: tuple[str, ...]  # attribute names of the inner tensors
    inner: tuple["Wrapper | Held | None", ...]  # one per name; None: a plain tensor
    context: Any
    size: Any
    stride: Any

    @classmethod
    def of(cls, tensor: Any) -> "Wrapper":
        """Return how a (fake) tensor is built."""
        if tensor.layout is not torch.strided:
            raise CannotUnwrap(f"a {type(tensor).__name__} has the layout {tensor.layout}")
        names, context = tensor.__tensor_flatten__()
        if not all(name.isidentifier() for name in names):
            raise CannotUnwrap(f"a {type(tensor).__name__} has inner tensors without names")
        inner = tuple(_kind_of(getattr(tensor, name)) for name in names)
        size, stride = tensor.size(), tensor.stride()
        return cls(type(tensor), tuple(names), inner, context, size, stride)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the plain tensors, such as ``qdata`` or ``packed.scale``."""
        paths: list[str] = []
        for name, kind in zip(self.names, self.inner, strict=True):
            if isinstance(kind, Wrapper):
                paths += [f"{name}.{path}" for path in kind.paths]
            elif kind is None:
                paths.append(name)
        return tuple(paths)

    @property
    def fixed(self) -> list[Any]:
        """Parts that must equal the trace: contexts, and sizes of inner subclasses."""
        inner = [kind for kind in self.inner if isinstance(kind, Wrapper)]
        fixed = [self.context, *((kind.size, kind.stride) for kind in inner)]
        return fixed + [each for kind in inner for each in kind.fixed]

    def parts(self, tensor: Any) -> list[Any]:
        """Return the plain tensors inside of a tensor that is built alike."""
        parts: list[Any] = []
        for name, kind in zip(self.names, self.inner, strict=True):
            value = getattr(tensor, name)
            if isinstance(kind, Wrapper):
                parts += kind.parts(value)
            elif kind is None:
                parts.append(value)
        return parts

    def build(self, parts: Iterator[Any], size: Any = None, stride: Any = None) -> Any:
        """Return a tensor of these parts; inner subclasses have the sizes of the trace."""
        inner: dict[str, Any] = {}
        for name, kind in zip(self.names, self.inner, strict=True):
            if isinstance(kind, Wrapper):
                inner[name] = kind.build(parts)
            else:
                inner[name] = next(parts) if kind is None else kind.value
        size = self.size if size is None else size
        stride = self.stride if stride is None else stride
        return self.kind.__tensor_unflatten__(inner, self.context, size, stride)

    def fits(self, tensor: Any) -> bool:
        """Return whether a tensor is built in the same way; the plain tensors may differ."""
        if type(tensor) is not self.kind:
            return False
        names, context = tensor.__tensor_flatten__()
        if tuple(names) != self.names or not _equal(context, self.context):
            return False
        for name, kind in zip(names, self.inner, strict=True):
            value = getattr(tensor, name)
            if isinstance(kind, Wrapper):
                if not kind.fits(value):
                    return False
            elif isinstance(kind, Held):
                if value is not kind.value and not _equal(value, kind.value):
                    return False
            elif is_wrapper(value) or not isinstance(value, torch.Tensor):
                return False
        return True


def _kind_of(value: Any) -> Wrapper | Held | None:
    if not isinstance(value, torch.Tensor):
        return Held(real_object(value))
    if is_wrapper(value):
        return Wrapper.of(value)
    if value.layout is not torch.strided:
        raise CannotUnwrap(f"an inner tensor has the layout {value.layout}")
    return None


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (RuntimeError, TypeError, ValueError):  # e.g. the truth of a tensor of several elements
        return False


def is_wrapper(value: Any) -> bool:
    """Return whether a value is a tensor subclass that torch can take apart."""
    protocol = ("__tensor_flatten__", "__tensor_unflatten__")
    return isinstance(value, torch.Tensor) and all(hasattr(type(value), name) for name in protocol)


def real_object(value: Any) -> Any:
    """Return the object behind a stand-in of Dynamo's graph; other values unchanged."""
    return getattr(value, "real_obj", value)


def is_stand_in(value: Any) -> bool:
    """Return whether a value in a graph of Dynamo stands for an object that is no tensor."""
    return hasattr(value, "real_obj")


def traced_on_parts(
    function: Callable[..., Any], fakes: Sequence[Any], mode: AbstractContextManager[Any]
) -> fx.GraphModule:
    """Trace a function of fake tensors and sizes to a graph of ATen ops."""
    with torch.no_grad(), mode:
        return make_fx(function)(*fakes)
