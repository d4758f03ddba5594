"""What is set around a trace, and put back after it. See ``cgcompile/compat/__init__.py``.

Tried on torch 2.11, 2.13 and 2.15.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from cgcompile.compat.traced import patched
from cgcompile.compat.tracing import traced_function


def size_oblivious(on: bool) -> Any:
    """A context in which sizes 0 and 1 of dynamic dimensions are not told from others."""
    from torch.fx.experimental import _config

    return patched(_config, {"backed_size_oblivious": on})


_MARKS = ("_dynamo_", "_has_dynamo", "_specialize_on")


@contextmanager
def marked(dims: list[tuple[torch.Tensor, int, str | None]], unbacked: bool) -> Iterator[None]:
    """Mark dimensions of tensors as dynamic for a trace; the tensors are as before after it.

    Args:
        dims: (tensor, dimension, name); equal names are equal sizes.
        unbacked: nothing may be assumed of a size.
    """
    from torch._dynamo.decorators import mark_dynamic, mark_unbacked

    tensors = {id(tensor): tensor for tensor, _, _ in dims}
    before = {key: dict(tensor.__dict__) for key, tensor in tensors.items()}
    try:
        for tensor in tensors.values():
            for mark in [mark for mark in tensor.__dict__ if mark.startswith(_MARKS)]:
                del tensor.__dict__[mark]
        for tensor, dim, name in dims:
            if unbacked:
                mark_unbacked(tensor, dim, shape_id=name)
            else:
                mark_dynamic(tensor, dim)
        yield
    finally:
        for key, tensor in tensors.items():
            tensor.__dict__.clear()
            tensor.__dict__.update(before[key])


@contextmanager
def without_traces_left(called: Any, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """A context in which calls are traced for a look: what Dynamo has changed is put back.

    Dynamo puts names into the globals of the function, marks tensors that it finds in modules, and
    counts what it does.

    Args:
        called: module, bound method or function.
        tensors: those that it may mark.
    """
    from torch._dynamo import convert_frame
    from torch._dynamo.utils import counters

    names = traced_function(called)[0].__globals__
    with convert_frame.compile_lock:  # so that new names and counts are those of this thread
        before = set(names)
        marks = [(tensor, dict(tensor.__dict__)) for tensor in tensors]
        counted = {kind: dict(counts) for kind, counts in counters.items()}
        try:
            yield
        finally:
            for name in [name for name in names if name not in before]:
                if name.startswith("__"):
                    del names[name]
            for tensor, attributes in marks:
                if tensor.__dict__ != attributes:
                    tensor.__dict__.clear()
                    tensor.__dict__.update(attributes)
            for kind in [*counters]:
                counters[kind].clear()  # whoever holds it, holds this one
                counters[kind].update(counted.get(kind, {}))
                if kind not in counted:
                    del counters[kind]


def without_memory(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the same sizes, strides, type and marks on a device, with no memory behind it."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with nullcontext() if device.type == "meta" else FakeTensorMode():
        made = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
        ).requires_grad_(tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    return made
