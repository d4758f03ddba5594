"""Run a step and leave nothing behind: :func:`restored_after`.

Restored are the bytes of named tensors, the random generators, and, of a :class:`State`,
attributes, containers, tensor objects and the bytes that ops of this thread write. A state follows
modules, lists, dicts, sets and plain objects (``__slots__`` too) from the model, from the closure
of a function and from the arguments, at most :data:`_DEEPEST` deep. Not restored: globals, what
other libraries keep elsewhere, and what replays and kernels write without an op, unless its tensors
are named.
"""

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

from cgcompile import torch_compat as compat
from cgcompile.graphs.guards import Slots, Transparent, cells_of, is_librarys, plainly, restore
from cgcompile.graphs.host import write_targets

_DEEPEST = 8
_MOST = 100_000  # holders; a model of thousands of modules has fewer
_LONG = 10_000  # items of one container: a vocabulary, which holds no state
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device)
_OPAQUE = (FunctionType, MethodType, BuiltinFunctionType, ModuleType, torch.Size, torch.layout)
_TABLES = ("_parameters", "_buffers", "_modules")


class Held(NamedTuple):
    """A value, and where a model or an argument holds it.

    Attributes:
        path: from the model or an argument, such as ``self.layers.0.cache``.
        owner: the object whose attribute holds it; None of an argument.
        attribute: that attribute; empty if there is none.
        value: what is held there.
    """

    path: str
    owner: Any
    attribute: str
    value: Any

    @property
    def key(self) -> tuple[int, str]:
        """Owner and attribute, to be compared; an owner may be equal to others, or unhashable."""
        return id(self.owner), self.attribute

    def item(self, key: object, value: Any) -> "Held":
        """Return an item of the container that is held here."""
        return Held(f"{self.path}[{key!r}]", self.owner, self.attribute, value)

    def member(self, attribute: str, value: Any) -> "Held":
        """Return an attribute of the object that is held here."""
        return Held(f"{self.path}.{attribute}", self.value, attribute, value)


@dataclass
class TensorMemory:
    """A tensor object, and an alias that keeps its memory and geometry."""

    tensor: torch.Tensor
    alias: torch.Tensor

    def restore(self) -> None:
        """Give the tensor object the memory that it had."""
        now, before = self.tensor.detach(), self.alias
        if (now.shape, now.stride(), now.data_ptr()) != (
            before.shape,
            before.stride(),
            before.data_ptr(),
        ):
            self.tensor.data = before


class State:
    """A snapshot of all objects reachable from ``roots``, by path; not of the bytes of tensors.

    Attributes:
        values: what is held at each path: tensors, plain values, or the objects that hold more.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self.values: dict[str, Held] = {}
        self._holders: dict[int, tuple[Any, Any]] = {}  # by identity: (holder, shallow copy)
        self._tensors: dict[int, TensorMemory] = {}
        for name, root in roots.items():
            self._follow(Held(name, None, "", root), 0)

    @classmethod
    def of(cls, model: Any, *calls: tuple[tuple[Any, ...], dict[str, Any]]) -> "State":
        """Return the state of a module, function or method and of the arguments of its calls."""
        roots: dict[str, Any] = {"self": getattr(model, "__self__", model)}
        cells = cells_of(model)
        for name, cell in cells.items():  # of which one may be called "self", as in a decorator
            roots[name if name not in roots else f"outer {name}"] = cell.cell_contents
        for number, (args, kwargs) in enumerate(calls):
            prefix = "second " * number
            roots |= {f"{prefix}input {i}": arg for i, arg in enumerate(args)}
            roots |= {f"{prefix}input {name!r}": arg for name, arg in kwargs.items()}
        with compat.outside_inference_mode(), torch.no_grad():
            state = cls(roots)
        state._holders |= {id(cell): (cell, cell.cell_contents) for cell in cells.values()}
        return state

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor that is reachable."""
        return [memory.tensor for memory in self._tensors.values()]

    def written(self, snapshot: "Snapshot") -> dict[str, torch.Tensor]:
        """Return the tensors whose storage was written while the snapshot was taken, by path."""
        held = ((path, held.value) for path, held in self.values.items())
        tensors = ((path, value) for path, value in held if isinstance(value, torch.Tensor))
        return {path: tensor for path, tensor in tensors if snapshot.was_written(tensor)}

    def changes(self, after: "State") -> Iterator[tuple[Any, Held]]:
        """Yield (value before, what is held after) of tensors and plain values that changed.

        The value before is None at a new path. Of a tensor object that moved
        (``weight.data = ...``) both values are aliases of its memory then.
        """
        for path, held in after.values.items():
            before = self.values[path].value if path in self.values else None
            now = held.value
            if now is before and isinstance(now, torch.Tensor):
                old, new = self._tensors.get(id(now)), after._tensors.get(id(now))
                if old and new and old.alias.data_ptr() != new.alias.data_ptr():
                    yield old.alias, held._replace(value=new.alias)
            if now is before or not isinstance(now, (torch.Tensor, bool, int, float, str)):
                continue
            if isinstance(now, torch.Tensor) or type(now) is not type(before) or now != before:
                yield before, held

    def uncompile(self) -> None:
        """Replace compiled and wrapped parts by their originals, until the state is restored.

        A part is what an attribute of a module holds; a function that is compiled where it is
        defined is none.
        """
        reached = {id(held.value): held.value for held in self.values.values()}
        modules = [value for value in reached.values() if isinstance(value, torch.nn.Module)]
        for module in modules:
            for name, part in list(module.__dict__.items()):
                original = compat.compiled_from(part)
                if isinstance(part, Transparent):
                    original = part.unwrap()
                if original is not None:
                    module.__dict__[name] = original

    def restore(self) -> None:
        """Restore every container, attribute and tensor object; not the bytes of tensors."""
        for holder, before in self._holders.values():
            restore(holder, before)
        for memory in self._tensors.values():
            memory.restore()

    def _follow(self, held: Held, depth: int) -> None:
        self.values[held.path] = held
        value = held.value
        if isinstance(value, torch.Tensor):
            for part in _dense([value]):
                if id(part) not in self._tensors:
                    self._tensors[id(part)] = TensorMemory(part, part.detach())
        elif isinstance(value, (_PLAIN, _OPAQUE)) or id(value) in self._holders:
            return
        elif depth < _DEEPEST and len(self._holders) < _MOST:
            for inner in self._items(held):
                deeper = depth if isinstance(inner.value, torch.nn.Module) else depth + 1
                self._follow(inner, deeper)

    def _items(self, held: Held) -> Iterator[Held]:
        value = held.value
        if isinstance(value, dict):
            items = list(plainly(value).items(value))
            self._holders[id(value)] = (value, dict(items))
            for key, item in items if len(items) < _LONG else ():
                yield held.item(key, item)
        elif isinstance(value, (list, deque, set, tuple, frozenset)):
            kept = list(plainly(value).__iter__(value))
            if not isinstance(value, (tuple, frozenset)):
                self._holders[id(value)] = (value, kept)
            for index, item in enumerate(kept if len(kept) < _LONG else ()):
                yield held.item(index, item)
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

    Args:
        known: tensors that exist before the run; memory that the run allocates is not copied.
        alone: copy nothing but these: what a forward context leads to may be most of a GPU.
    """

    def __init__(self, known: Iterable[torch.Tensor], *, alone: bool = False) -> None:
        tensors = list(_dense(known))
        self._alone = alone
        self._known = {_address(tensor) for tensor in tensors}
        self._allocated: set[int] = set()  # no memory from before can begin where the run allocates
        self._kept: dict[int, int] = {}  # by address: how many bytes from there on
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        self._python, self._cpu = random.getstate(), torch.get_rng_state()
        devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
        self._cuda = {device: torch.cuda.get_rng_state(device) for device in devices}

    def about_to_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copy the bytes that an op will write, and the state of the generator it draws from."""
        generator = kwargs.get("generator")
        if isinstance(generator, torch.Generator):
            self._generators.setdefault(id(generator), (generator, generator.get_state()))
        opaque = compat.compiled_region(func, args) is not None  # its writes are not declared
        inputs = compat.tree_tensors((args, kwargs))
        self.about_to_write(inputs if opaque else write_targets(func, args, kwargs))

    def called(self, results: Any, arguments: Any) -> None:
        """Note what an op returned: memory that it allocated, or that of its arguments."""
        old = {_address(tensor) for tensor in _dense(compat.tree_tensors(arguments))} | self._known
        new = {_address(tensor) for tensor in _dense(compat.tree_tensors(results))}
        self._allocated |= new - old

    def about_to_write(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy the bytes of tensors, unless the run has allocated them itself."""
        for tensor in _dense(tensors):
            address = _address(tensor)
            if not address or address in self._allocated:
                continue
            if self._alone and address not in self._known:
                continue
            storage = tensor.untyped_storage()
            if storage.nbytes() <= self._kept.get(address, 0):
                continue
            self._kept[address] = storage.nbytes()
            with torch.inference_mode(False), torch.no_grad():
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                whole.set_(storage, 0, (storage.nbytes(),), (1,))
                self._before.append((whole, whole.clone()))

    def was_written(self, tensor: torch.Tensor) -> bool:
        """Return whether the storage of a tensor was written."""
        return any(_address(part) in self._kept for part in _dense([tensor]))

    def restore(self) -> None:
        """Restore all copied bytes, and the state of all generators."""
        with torch.inference_mode(False), torch.no_grad():
            for whole, before in reversed(self._before):  # one may overlap an earlier one
                whole.copy_(before)
        for generator, state in self._generators.values():
            generator.set_state(state)
        random.setstate(self._python)
        torch.set_rng_state(self._cpu)
        for device, cuda_state in self._cuda.items():
            torch.cuda.set_rng_state(cuda_state, device)
        self._before.clear()
        self._kept.clear()
        self._generators.clear()


def _dense(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield dense tensors, and those inside of tensor subclasses; others have no one storage."""
    for tensor in tensors:
        if compat.is_plain_tensor(tensor):
            yield tensor
        elif hasattr(tensor, "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            yield from _dense(getattr(tensor, name) for name in names)


def _address(tensor: torch.Tensor) -> int:
    """Return where the storage of a dense tensor begins; 0 for one without bytes."""
    if tensor.device.type == "meta" or not tensor.untyped_storage().nbytes():
        return 0
    return tensor.untyped_storage().data_ptr()


class WriteObserver(compat.DispatchMode):
    """Fills a snapshot before each op of this thread that writes."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self._snapshot = snapshot

    def on_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._snapshot.about_to_call(func, args, kwargs)
        result = func(*args, **kwargs)
        self._snapshot.called(result, (args, kwargs))
        return result


@contextmanager
def restored_after(
    tensors: Sequence[torch.Tensor] = (), *, state: State | None = None
) -> Iterator[Snapshot]:
    """Restore tensors, random generators and a state after what runs inside.

    Args:
        tensors: copied when the context is entered: for writes that no op shows, as of a replay.
        state: restored too, with the bytes of its tensors that ops of this thread write.
    """
    snapshot = Snapshot([*tensors, *(() if state is None else state.tensors)], alone=True)
    snapshot.about_to_write(tensors)
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


def buffers_of(model: Any) -> list[torch.Tensor]:
    """Return the buffers of a module, or of the module of a bound method; else none."""
    module = getattr(model, "__self__", model)
    return list(module.buffers()) if isinstance(module, torch.nn.Module) else []
