"""Run a step and leave nothing behind: :func:`restored_after`.

Restored are the bytes of the named tensors, the random generators, and, with a :class:`State`, the
attributes, containers, closures and tensor objects that are reachable from a model and its
arguments (``graphs/fields.py`` opens them), and the bytes that ops of this thread write. Not
restored: globals, and memory that a replay or a kernel writes without an op, unless its tensors
are named.
"""

import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch

from cgcompile.graphs.arena import address
from cgcompile.graphs.contract import named_arguments
from cgcompile.graphs.fields import Fields, Item
from cgcompile.graphs.host_rules import write_targets
from cgcompile.graphs.reads import Transparent
from cgcompile.torch_compat import raw_memory, torch_ops


class State:
    """A snapshot of all objects reachable from a model and its arguments, not of tensor bytes."""

    def __init__(self, model: Any, *calls: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        function = getattr(model, "__func__", model)
        roots = {function.__name__: function} if isinstance(function, FunctionType) else {}
        roots["self"] = getattr(model, "__self__", model)
        for number, call in enumerate(calls):
            roots |= {"second " * number + name: value for name, value in named_arguments(*call)}
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # (tensor, its alias)
        with raw_memory.outside_inference_mode(), torch.no_grad():
            self._fields = Fields(roots, longest=sys.maxsize)
            self.values = {item.path: item for item in self._fields.items()}
            leaves = [item.value for item in self.values.values()]
            for part in dense_parts(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)):
                self._tensors.setdefault(id(part), (part, part.detach()))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor that is reachable."""
        return [tensor for tensor, _ in self._tensors.values()]

    def written(self, snapshot: "Snapshot") -> dict[str, torch.Tensor]:
        """Return the tensors whose storage was written since the snapshot, by path."""
        tensors = {p: h.value for p, h in self.values.items() if isinstance(h.value, torch.Tensor)}
        return {path: tensor for path, tensor in tensors.items() if snapshot.was_written(tensor)}

    def changes(self, after: "State") -> Iterator[tuple[Any, Item]]:
        """Yield (value before, what is held after) of tensors and plain values that changed.

        The value before is None at a new path. Of a tensor object that moved
        (``weight.data = ...``) both values are aliases of its memory.
        """
        for path, held in after.values.items():
            before = self.values[path].value if path in self.values else None
            value = held.value
            if isinstance(value, torch.Tensor):
                if value is not before:
                    yield before, held
                elif id(value) in self._tensors and id(value) in after._tensors:
                    old, new = self._tensors[id(value)][1], after._tensors[id(value)][1]
                    if old.data_ptr() != new.data_ptr():
                        yield old, held._replace(value=new)
            elif value is before or not isinstance(value, (bool, int, float, str)):
                continue
            elif type(value) is not type(before) or value != before:
                yield before, held

    def uncompile(self) -> None:
        """Replace compiled and wrapped attributes of modules by their originals until restored."""
        owners = {id(item.owner): item.owner for item in self.values.values()}
        for module in [owner for owner in owners.values() if isinstance(owner, torch.nn.Module)]:
            for name, part in list(module.__dict__.items()):
                wrapped = isinstance(part, Transparent)
                original = part.unwrap() if wrapped else torch_ops.compiled_from(part)
                if original is not None:
                    module.__dict__[name] = original

    def restore(self) -> None:
        """Restore every container, attribute and tensor object; not the bytes of tensors."""
        self._fields.restore()
        for tensor, alias in self._tensors.values():
            if _geometry(tensor.detach()) != _geometry(alias):
                tensor.data = alias


class Snapshot:
    """The random state, and the bytes of storages as they were before they were written.

    ``known`` are the tensors that exist before the run; memory that the run allocates is not
    copied. With ``alone`` no other memory is copied: the tensors of a forward context may be most
    of a GPU.
    """

    def __init__(
        self,
        known: Iterable[torch.Tensor],
        *,
        alone: bool = False,
        generators: Iterable[torch.Generator] = (),
    ) -> None:
        tensors = list(dense_parts(known))
        self._alone = alone
        self._known = {address(tensor) for tensor in tensors}
        self._allocated: set[int] = set()  # no memory from before can begin where the run allocates
        self._copied: dict[int, int] = {}  # by address: how many bytes from there on
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._generators = {id(known): (known, known.get_state()) for known in generators}
        self._python, self._cpu = random.getstate(), torch.get_rng_state()
        devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
        self._cuda = {device: torch.cuda.get_rng_state(device) for device in devices}

    def before_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copy the bytes that an op will write, and the state of the generator it draws from."""
        generator = kwargs.get("generator")
        if isinstance(generator, torch.Generator):
            self._generators.setdefault(id(generator), (generator, generator.get_state()))
        opaque = torch_ops.compiled_region(func, args) is not None  # its writes are not declared
        inputs = torch_ops.tree_tensors((args, kwargs))
        self.before_write(inputs if opaque else write_targets(func, args, kwargs))

    def after_call(self, results: Any, arguments: Any) -> set[int]:
        """Note the memory that an op allocated for its results, and return its addresses."""
        old = {
            address(tensor) for tensor in dense_parts(torch_ops.tree_tensors(arguments))
        } | self._known
        new = {address(tensor) for tensor in dense_parts(torch_ops.tree_tensors(results))}
        self._allocated |= new - old
        return new - old

    def before_write(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy the bytes of tensors, unless the run has allocated them itself."""
        for tensor in dense_parts(tensors):
            start = address(tensor)
            if not start or start in self._allocated:
                continue
            if self._alone and start not in self._known:
                continue
            storage = tensor.untyped_storage()
            if storage.nbytes() <= self._copied.get(start, 0):
                continue
            self._copied[start] = storage.nbytes()
            with torch.inference_mode(False), torch.no_grad():
                memory = raw_memory.storage_bytes(storage)
                self._before.append((memory, memory.clone()))

    def was_written(self, tensor: torch.Tensor) -> bool:
        """Return whether the storage of a tensor was written."""
        return any(address(part) in self._copied for part in dense_parts([tensor]))

    def restore(self) -> None:
        """Restore all copied bytes, and the state of all generators."""
        with torch.inference_mode(False), torch.no_grad():
            for memory, before in reversed(self._before):  # one may overlap an earlier one
                memory.copy_(before)
        for generator, state in self._generators.values():
            generator.set_state(state)
        random.setstate(self._python)
        torch.set_rng_state(self._cpu)
        for device, cuda_state in self._cuda.items():
            torch.cuda.set_rng_state(cuda_state, device)
        self._before.clear()
        self._copied.clear()
        self._generators.clear()


def dense_parts(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield dense tensors, and those inside tensor subclasses; others have no single storage."""
    for tensor in tensors:
        if raw_memory.is_plain_tensor(tensor):
            yield tensor
        elif hasattr(tensor, "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            inner = [getattr(tensor, name) for name in names]
            yield from dense_parts(torch_ops.tree_tensors(inner))  # a DTensor wraps a mesh as well


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.data_ptr()


class WriteObserver(torch_ops.DispatchMode):
    """Fill a snapshot before each op of this thread that writes."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self._snapshot = snapshot

    def on_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._snapshot.before_call(func, args, kwargs)
        result = func(*args, **kwargs)
        self._snapshot.after_call(result, (args, kwargs))
        return result


@contextmanager
def restored_after(
    tensors: Sequence[torch.Tensor] = (),
    *,
    state: State | None = None,
    generators: Sequence[torch.Generator] = (),
) -> Iterator[Snapshot]:
    """Restore tensors, random generators and a state after the block.

    ``tensors`` are copied on entry, for writes that no op shows, as of a replay. Of a state, the
    tensors that ops of this thread write are restored too.
    """
    known = [*tensors, *(() if state is None else state.tensors)]
    snapshot = Snapshot(known, alone=True, generators=generators)
    snapshot.before_write(tensors)
    try:
        with nullcontext() if state is None else WriteObserver(snapshot):
            yield snapshot
    finally:
        try:
            if state is not None:
                state.restore()
        finally:
            snapshot.restore()


def copies(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with tensors copied."""
    with torch.no_grad():
        return {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }
