"""Run a step and leave nothing behind: :func:`restored_after`.

Restored are the bytes of the named tensors, the random generators, and, with a :class:`State`, the
attributes, containers and tensor objects that are reachable from a model and its arguments (at most
:data:`_DEEPEST` objects deep, ``__slots__`` included), and the bytes that ops of this thread write.
Not restored: globals, and memory that a replay or a kernel writes without an op, unless its tensors
are named.
"""

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

from cgcompile import torch_compat as compat
from cgcompile.graphs.arena import address, storage_bytes
from cgcompile.graphs.guards import (
    Slots,
    Transparent,
    cells_of,
    is_librarys,
    named_arguments,
    plainly,
    restore,
)
from cgcompile.graphs.host import write_targets

_DEEPEST = 8
_MOST = 100_000  # holders; a model of thousands of modules has fewer
_LONG = 10_000  # items of one container: a vocabulary, which holds no state
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device)
_OPAQUE = (FunctionType, MethodType, BuiltinFunctionType, ModuleType, torch.Size, torch.layout)
_TABLES = ("_parameters", "_buffers", "_modules")


class Held(NamedTuple):
    """A value, and where a model or an argument holds it."""

    path: str  # such as ``self.layers.0.cache``
    owner: Any  # the object whose attribute holds it; None of an argument
    attribute: str  # of the owner
    value: Any

    @property
    def key(self) -> tuple[int, str]:
        """The identity of the owner (which may have no hash) and the attribute."""
        return id(self.owner), self.attribute

    def item(self, key: object, value: Any) -> "Held":
        """Return an item of the container that is held here."""
        return Held(f"{self.path}[{key!r}]", self.owner, self.attribute, value)

    def member(self, attribute: str, value: Any) -> "Held":
        """Return an attribute of the object that is held here."""
        return Held(f"{self.path}.{attribute}", self.value, attribute, value)


class State:
    """A snapshot of all objects reachable from a model and its arguments, not of tensor bytes."""

    def __init__(self, model: Any, *calls: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        self.values: dict[str, Held] = {}  # by path
        self._holders: dict[int, tuple[Any, Any]] = {}  # by identity: (holder, shallow copy)
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # (tensor, its alias)
        roots: dict[str, Any] = {"self": getattr(model, "__self__", model)}
        for name, cell in cells_of(model).items():  # one may be called "self", as in a decorator
            roots[name if name not in roots else f"outer {name}"] = cell.cell_contents
            self._holders[id(cell)] = (cell, cell.cell_contents)
        for number, call in enumerate(calls):
            roots |= {"second " * number + name: value for name, value in named_arguments(*call)}
        with compat.outside_inference_mode(), torch.no_grad():
            for name, root in roots.items():
                self._follow(Held(name, None, "", root), 0)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor that is reachable."""
        return [tensor for tensor, _ in self._tensors.values()]

    def written(self, snapshot: "Snapshot") -> dict[str, torch.Tensor]:
        """Return the tensors whose storage was written since the snapshot, by path."""
        tensors = {p: h.value for p, h in self.values.items() if isinstance(h.value, torch.Tensor)}
        return {path: tensor for path, tensor in tensors.items() if snapshot.was_written(tensor)}

    def changes(self, after: "State") -> Iterator[tuple[Any, Held]]:
        """Yield (value before, what is held after) of tensors and plain values that changed.

        The value before is None at a new path. Of a tensor object that moved
        (``weight.data = ...``) both values are aliases of its memory.
        """
        for path, held in after.values.items():
            before = self.values[path].value if path in self.values else None
            now = held.value
            if isinstance(now, torch.Tensor):
                if now is not before:
                    yield before, held
                elif id(now) in self._tensors and id(now) in after._tensors:
                    old, new = self._tensors[id(now)][1], after._tensors[id(now)][1]
                    if old.data_ptr() != new.data_ptr():
                        yield old, held._replace(value=new)
            elif now is before or not isinstance(now, (bool, int, float, str)):
                continue
            elif type(now) is not type(before) or now != before:
                yield before, held

    def uncompile(self) -> None:
        """Replace compiled and wrapped attributes of modules by their originals until restored."""
        held = {id(held.value): held.value for held in self.values.values()}
        for module in [value for value in held.values() if isinstance(value, torch.nn.Module)]:
            for name, part in list(module.__dict__.items()):
                wrapped = isinstance(part, Transparent)
                original = part.unwrap() if wrapped else compat.compiled_from(part)
                if original is not None:
                    module.__dict__[name] = original

    def restore(self) -> None:
        """Restore every container, attribute and tensor object; not the bytes of tensors."""
        for holder, before in self._holders.values():
            restore(holder, before)
        for tensor, alias in self._tensors.values():
            if _geometry(tensor.detach()) != _geometry(alias):
                tensor.data = alias

    def _follow(self, held: Held, depth: int) -> None:
        self.values[held.path] = held
        value = held.value
        if isinstance(value, torch.Tensor):
            for part in _dense([value]):
                self._tensors.setdefault(id(part), (part, part.detach()))
        elif isinstance(value, (_PLAIN, _OPAQUE)) or id(value) in self._holders:
            return
        elif depth < _DEEPEST and len(self._holders) < _MOST:
            for inner in self._items(held):
                is_module = isinstance(inner.value, torch.nn.Module)
                self._follow(inner, depth if is_module else depth + 1)

    def _items(self, held: Held) -> Iterator[Held]:
        value = held.value
        pairs: list[tuple[Any, Any]] = []
        if isinstance(value, dict):
            pairs = list(plainly(value).items(value))
            self._holders[id(value)] = (value, dict(pairs))
        elif isinstance(value, (list, deque, set, tuple, frozenset)):
            pairs = list(enumerate(plainly(value).__iter__(value)))
            if not isinstance(value, (tuple, frozenset)):
                self._holders[id(value)] = (value, [item for _, item in pairs])
        for key, item in pairs if len(pairs) < _LONG else ():
            yield held.item(key, item)
        if isinstance(value, tuple) or is_librarys(value):
            return
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            yield from self._attributes(held, attributes)
        slots = Slots(value)
        if slots.members:
            self._holders.setdefault(id(value), (value, None))
            self._holders[id(slots)] = (slots, slots.read())
            for member, content in slots.read().items():
                yield held.member(member.__name__, content)

    def _attributes(self, held: Held, attributes: dict[str, Any]) -> Iterator[Held]:
        self._holders.setdefault(id(held.value), (held.value, None))
        self._holders[id(attributes)] = (attributes, dict(attributes))
        module = isinstance(held.value, torch.nn.Module)
        for name, value in list(attributes.items()):
            if module and name in _TABLES:
                self._holders[id(value)] = (value, dict(value))
                for key, item in list(value.items()):
                    yield held.member(key, item)
            elif not (module and name.startswith("_") and name.endswith(("hooks", "kwargs"))):
                yield held.member(name, value)


class Snapshot:
    """The random state, and the bytes of storages as they were before they were written.

    ``known`` are the tensors that exist before the run; memory that the run allocates is not
    copied. With ``alone`` no other memory is copied: the tensors of a forward context may be most
    of a GPU.
    """

    def __init__(self, known: Iterable[torch.Tensor], *, alone: bool = False) -> None:
        tensors = list(_dense(known))
        self._alone = alone
        self._known = {address(tensor) for tensor in tensors}
        self._allocated: set[int] = set()  # no memory from before can begin where the run allocates
        self._copied: dict[int, int] = {}  # by address: how many bytes from there on
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        self._python, self._cpu = random.getstate(), torch.get_rng_state()
        devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
        self._cuda = {device: torch.cuda.get_rng_state(device) for device in devices}

    def before_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copy the bytes that an op will write, and the state of the generator it draws from."""
        generator = kwargs.get("generator")
        if isinstance(generator, torch.Generator):
            self._generators.setdefault(id(generator), (generator, generator.get_state()))
        opaque = compat.compiled_region(func, args) is not None  # its writes are not declared
        inputs = compat.tree_tensors((args, kwargs))
        self.before_write(inputs if opaque else write_targets(func, args, kwargs))

    def after_call(self, results: Any, arguments: Any) -> None:
        """Note the memory that an op allocated for its results."""
        old = {address(tensor) for tensor in _dense(compat.tree_tensors(arguments))} | self._known
        new = {address(tensor) for tensor in _dense(compat.tree_tensors(results))}
        self._allocated |= new - old

    def before_write(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy the bytes of tensors, unless the run has allocated them itself."""
        for tensor in _dense(tensors):
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
                memory = storage_bytes(storage)
                self._before.append((memory, memory.clone()))

    def was_written(self, tensor: torch.Tensor) -> bool:
        """Return whether the storage of a tensor was written."""
        return any(address(part) in self._copied for part in _dense([tensor]))

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


def _dense(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield dense tensors, and those inside tensor subclasses; others have no single storage."""
    for tensor in tensors:
        if compat.is_plain_tensor(tensor):
            yield tensor
        elif hasattr(tensor, "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            inner = [getattr(tensor, name) for name in names]
            yield from _dense(compat.tree_tensors(inner))  # a DTensor wraps a mesh as well


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.data_ptr()


class WriteObserver(compat.DispatchMode):
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
    tensors: Sequence[torch.Tensor] = (), *, state: State | None = None
) -> Iterator[Snapshot]:
    """Restore tensors, random generators and a state after the block.

    ``tensors`` are copied on entry, for writes that no op shows, as of a replay. Of a state, the
    tensors that ops of this thread write are restored too.
    """
    snapshot = Snapshot([*tensors, *(() if state is None else state.tensors)], alone=True)
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
