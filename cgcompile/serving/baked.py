"""What a FULL graph has read of a step's metadata: :class:`MetadataGuard`.

Attention inside of a graph goes on reading the tensors of the capture, whatever later steps build.
An engine that makes a new tensor for each step would get the results of old ones, without a word.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import MemberDescriptorType
from typing import Any

import torch

from cgcompile.descriptors import BatchDescriptor
from cgcompile.errors import AddressChangedError
from cgcompile.serving.steps import Metadata

_DEPTH = 3  # of objects in objects: deeper ones are not looked into
# Modules: their weights are compared elsewhere, and are many.
_NOT_LOOKED_INTO = (int, float, str, bytes, type, torch.nn.Module)


class MetadataGuard:
    """The addresses of the device's tensors in the metadata of one capture.

    Found in tuples, lists, mappings and objects with attributes, in slots too, three deep, at each
    step anew; that synchronises nothing. Tensors of the host are not looked at, where the device is
    another: a graph cannot read them.

    Args:
        metadata: of the capture.
        device: of the graph.
    """

    def __init__(self, metadata: Metadata, device: torch.device) -> None:
        self._type = device.type
        self._addresses = self._now(metadata)

    def _now(self, metadata: Metadata) -> dict[str, int]:
        found: dict[str, int] = {}
        for name in ("attn_metadata", "slot_mapping", "additional"):
            value = getattr(metadata, name)
            if value is not None:
                found.update(_addresses(value, name, self._type, _DEPTH))
        return found

    def check(self, metadata: Metadata, descriptor: BatchDescriptor) -> None:
        """Compare with the metadata of a step that is about to be replayed.

        Raises:
            AddressChangedError: a tensor lies elsewhere, or is gone.
        """
        now = self._now(metadata)
        if now == self._addresses:
            return
        for path, before in self._addresses.items():
            if now.get(path) != before:
                found = now.get(path)
                raise AddressChangedError.metadata(
                    batch=str(descriptor), path=path, now=found, before=before
                )


def _addresses(value: Any, path: str, kind: str, depth: int) -> Iterator[tuple[str, int]]:
    if isinstance(value, torch.Tensor):
        if value.device.type == kind:
            yield path, value.data_ptr()
        return
    if not depth or value is None or isinstance(value, _NOT_LOOKED_INTO):
        return
    for name, part in _parts(value):
        yield from _addresses(part, f"{path}{name}", kind, depth - 1)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (tuple, list)):
        yield from ((f"[{place}]", part) for place, part in enumerate(value))
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    else:
        attributes = getattr(value, "__dict__", {})
        kind: Any = type(value)  # which mypy takes for unhashable
        yield from ((f".{name}", part) for name, part in attributes.items())
        for name in _declared(kind):
            if name not in attributes and hasattr(value, name):
                yield f".{name}", getattr(value, name)


@lru_cache(maxsize=256)
def _declared(kind: Any) -> tuple[str, ...]:
    """Attributes that may be in no ``__dict__``: those in slots, and fields with a default."""
    slots = (
        name
        for each in kind.__mro__
        if "__slots__" in vars(each)
        for name, member in vars(each).items()
        if isinstance(member, MemberDescriptorType)
    )
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return tuple(dict.fromkeys([*(each.name for each in fields), *slots]))
