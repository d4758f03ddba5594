"""State of a model put back after a run: :class:`Undone`, :func:`put_back`, :class:`State`.

Modules, lists, dicts, sets and plain objects, their ``__slots__`` too, are followed from the model,
from what a function has around it and from the arguments, as deep as :data:`_DEEPEST`. Globals, and
what other libraries keep elsewhere, are not: any code may use those meanwhile. Replays write memory
without an op, so around them tensors are named: :func:`put_back`.
"""

import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

from cgcompile import torch_compat as compat
from cgcompile.graphs.arena import flat
from cgcompile.graphs.guards import Slots, Transparent, cells_of, is_librarys, plainly, restore
from cgcompile.graphs.host import write_targets

_DEEPEST = 8
_MOST = 100_000  # holders; a model of thousands of modules has fewer
_LONG = 10_000  # items of one container: a vocabulary, which holds no state
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device)
_OPAQUE = (FunctionType, MethodType, BuiltinFunctionType, ModuleType, torch.Size, torch.layout)
_TABLES = ("_parameters", "_buffers", "_modules")


class Place(NamedTuple):
    """Where something is kept.

    Attributes:
        path: from the model or an argument, such as ``self.layers.0.cache``.
        owner: the object whose attribute it is, or is inside of.
        attribute: that attribute; empty if there is none.
    """

    path: str
    owner: Any
    attribute: str

    @property
    def key(self) -> tuple[int, str]:
        """Owner and attribute, to be compared; an owner may be equal to others, or unhashable."""
        return id(self.owner), self.attribute

    def item(self, key: object) -> "Place":
        """An item of the container that is here."""
        return Place(f"{self.path}[{key!r}]", self.owner, self.attribute)

    def of(self, owner: Any, attribute: str) -> "Place":
        """An attribute of the object that is here."""
        return Place(f"{self.path}.{attribute}", owner, attribute)


@dataclass
class Moved:
    """A tensor object and its memory and geometry, to be put back."""

    tensor: torch.Tensor
    alias: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Moved":
        """Remember where a tensor is."""
        return cls(tensor, tensor.detach())

    def put_back(self) -> None:
        """Let the tensor object have the memory again that it had."""
        now, was = self.tensor.detach(), self.alias
        if (now.shape, now.stride(), now.data_ptr()) != (was.shape, was.stride(), was.data_ptr()):
            self.tensor.data = was


class State:
    """A picture of all that is reachable, by place.

    Args:
        roots: what is followed, by the name that paths begin with.

    Attributes:
        values: what each place holds: tensors, plain values, or the objects that hold more.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self.values: dict[str, tuple[Place, Any]] = {}
        self._holders: dict[int, tuple[Any, Any]] = {}  # by identity: (holder, shallow copy)
        self._tensors: dict[int, Moved] = {}
        for name, root in roots.items():
            self._follow(root, Place(name, None, ""), 0)

    @classmethod
    def of(cls, model: Any, *calls: tuple[tuple[Any, ...], dict[str, Any]]) -> "State":
        """What a model and the arguments of its calls lead to.

        Args:
            model: a module, a function or a method.
            *calls: positional and keyword arguments of each.
        """
        roots: dict[str, Any] = {"self": getattr(model, "__self__", model)}
        cells = cells_of(model)
        for name, cell in cells.items():  # of which one may be called "self", as in a decorator
            roots[name if name not in roots else f"outer {name}"] = cell.cell_contents
        for number, (args, kwargs) in enumerate(calls):
            prefix = "second " * number
            roots |= {f"{prefix}input {i}": each for i, each in enumerate(args)}
            roots |= {f"{prefix}input {name!r}": each for name, each in kwargs.items()}
        with compat.outside_inference_mode(), torch.no_grad():
            state = cls(roots)
        state._holders |= {id(cell): (cell, cell.cell_contents) for cell in cells.values()}
        return state

    @property
    def modules(self) -> list[torch.nn.Module]:
        """Every module that is reachable."""
        found = {id(each): each for _, each in self.values.values()}
        return [each for each in found.values() if isinstance(each, torch.nn.Module)]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor that is reachable."""
        return [each.tensor for each in self._tensors.values()]

    def moved(self, after: "State", tensor: torch.Tensor) -> tuple[Any, Any] | None:
        """What a tensor object was here and is after, if its memory is elsewhere now."""
        pair = [each._tensors.get(id(tensor)) for each in (self, after)]
        was, now = (each.alias if each is not None else None for each in pair)
        if was is None or now is None or was.data_ptr() == now.data_ptr():
            return None
        return was, now

    def put_back(self) -> None:
        """Every container, attribute and tensor object is as it was; not the bytes of tensors."""
        for holder, before in self._holders.values():
            restore(holder, before)
        for tensor in self._tensors.values():
            tensor.put_back()

    def _follow(self, found: Any, place: Place, depth: int) -> None:
        self.values[place.path] = (place, found)
        if isinstance(found, torch.Tensor):
            if id(found) not in self._tensors and compat.is_plain_tensor(found):
                self._tensors[id(found)] = Moved.of(found)
        elif isinstance(found, (_PLAIN, _OPAQUE)) or id(found) in self._holders:
            return
        elif depth < _DEEPEST and len(self._holders) < _MOST:
            for inner, at in self._items(found, place):
                deeper = depth if isinstance(inner, torch.nn.Module) else depth + 1
                self._follow(inner, at, deeper)

    def _items(self, found: Any, place: Place) -> Iterator[tuple[Any, Place]]:
        if isinstance(found, dict):
            items = list(plainly(found).items(found))
            self._holders[id(found)] = (found, dict(items))
            for key, each in items if len(items) < _LONG else ():
                yield each, place.item(key)
        elif isinstance(found, (list, deque, set, tuple, frozenset)):
            kept = list(plainly(found).__iter__(found))
            if not isinstance(found, (tuple, frozenset)):
                self._holders[id(found)] = (found, kept)
            for number, each in enumerate(kept if len(kept) < _LONG else ()):
                yield each, place.item(number)
        if isinstance(found, tuple):
            return
        if is_librarys(found):
            return
        attributes = getattr(found, "__dict__", None)
        if isinstance(attributes, dict):
            yield from self._attributes(found, attributes, place)
        slots = Slots(found)
        if slots.members:
            self._holders.setdefault(id(found), (found, None))
            self._holders[id(slots)] = (slots, slots.read())
            for member, value in slots.read().items():
                yield value, place.of(found, member.__name__)

    def _attributes(
        self, found: Any, attributes: dict[str, Any], place: Place
    ) -> Iterator[tuple[Any, Place]]:
        self._holders.setdefault(id(found), (found, None))
        self._holders[id(attributes)] = (attributes, dict(attributes))
        module = isinstance(found, torch.nn.Module)
        for name, value in list(attributes.items()):
            if module and name in _TABLES:
                self._holders[id(value)] = (value, dict(value))
                for key, each in list(value.items()):
                    yield each, place.of(found, key)
            elif not (module and name.startswith("_") and name.endswith(("hooks", "kwargs"))):
                yield value, place.of(found, name)


class Change(NamedTuple):
    """What a call left other than it was.

    Attributes:
        place: where.
        before: what it held; None if the place is new.
        after: what it holds.
    """

    place: Place
    before: Any
    after: Any


def changes(before: State, after: State) -> list[Change]:
    """The places that hold another tensor object or memory, another plain value, or that are new.

    Of a tensor object that was moved (``weight.data = ...``) both are given as they were.
    """
    found = []
    for path, (place, now) in after.values.items():
        was = before.values[path][1] if path in before.values else None
        if now is was and isinstance(now, torch.Tensor):
            moved = before.moved(after, now)
            found += [Change(place, *moved)] if moved is not None else []
        if now is was or not isinstance(now, (torch.Tensor, bool, int, float, str)):
            continue
        if isinstance(now, torch.Tensor) or type(now) is not type(was) or now != was:
            found.append(Change(place, was, now))
    return found


class RandomState:
    """The random numbers of Python and torch, to draw them again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._python = random.getstate()
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def put_back(self) -> None:
        """The next numbers are those that would have come."""
        random.setstate(self._python)
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


# ---------------------------------------------------------------- bytes of tensors


class Memory:
    """Keeps the bytes of storages before they are written. Copies what is written, nothing else.

    Args:
        known: tensors that are there before the call; what a call makes itself is not kept.
        alone: keep nothing but these: what a forward context leads to may be most of a GPU.
    """

    def __init__(self, known: list[torch.Tensor], *, alone: bool = False) -> None:
        self._alone = alone
        self._known = {_address(tensor) for tensor in known}
        self._made: set[int] = set()  # no memory from before can begin where this call allocates
        self._kept: dict[int, int] = {}  # by address: how many bytes from there on
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}

    def made(self, results: list[torch.Tensor], given: list[torch.Tensor]) -> None:
        """Note that an op returned these tensors, over memory of its own or of its arguments."""
        theirs = {_address(tensor) for tensor in given} | self._known
        self._made |= {_address(tensor) for tensor in results} - theirs

    def about_to_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the bytes of what an op will write, and the state of the generator it draws from."""
        if isinstance(kwargs.get("generator"), torch.Generator):
            self.about_to_draw(kwargs["generator"])
        opaque = compat.compiled_region(func, args) is not None  # does not say what it writes
        given = compat.tree_tensors((args, kwargs))
        self.about_to_write(given if opaque else write_targets(func, args, kwargs))

    def about_to_write(self, tensors: list[torch.Tensor]) -> None:
        """Keep the bytes of tensors, unless the call has made them itself."""
        for tensor in tensors:
            address = _address(tensor)
            if not address or address in self._made:
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

    def about_to_draw(self, generator: torch.Generator) -> None:
        """Keep the state of a random generator."""
        self._generators.setdefault(id(generator), (generator, generator.get_state()))

    def was_written(self, tensor: torch.Tensor) -> bool:
        """Whether the call has written the storage of a tensor."""
        return _address(tensor) in self._kept

    def put_back(self) -> None:
        """All kept bytes are again where they were, and generators draw again what they drew."""
        with torch.inference_mode(False), torch.no_grad():
            for whole, before in reversed(self._before):  # one may lie over an earlier one
                whole.copy_(before)
        for generator, state in self._generators.values():
            generator.set_state(state)
        self._before.clear()
        self._kept.clear()
        self._generators.clear()


def _address(tensor: torch.Tensor) -> int:
    """Where its storage begins; 0 for one without bytes."""
    if tensor.layout is not torch.strided or not compat.is_plain_tensor(tensor):
        return 0
    if tensor.device.type == "meta" or not tensor.untyped_storage().nbytes():
        return 0
    return tensor.untyped_storage().data_ptr()


class Keeping(compat.DispatchMode):
    """Inside, a memory is told of each op of this thread.

    Args:
        memory: what is told.
    """

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory

    def on_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._memory.about_to_call(func, args, kwargs)
        made = func(*args, **kwargs)
        self._memory.made(compat.tree_tensors(made), compat.tree_tensors((args, kwargs)))
        return made


def copies(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as they are now: tensors are copied."""
    with torch.no_grad():
        return {
            name: each.detach().clone() if isinstance(each, torch.Tensor) else each
            for name, each in values.items()
        }


def buffers_of(model: Any) -> list[torch.Tensor]:
    """The buffers of a module, or of the module of a bound method; of anything else none."""
    module = getattr(model, "__self__", model)
    return list(module.buffers()) if isinstance(module, torch.nn.Module) else []


@contextmanager
def put_back(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """What happens inside leaves these tensors, and the random generators, as they were."""
    devices = {each.device.index for each in tensors if each.device.type == "cuda"}
    with torch.random.fork_rng(sorted(index for index in devices if index is not None)):
        before = [(each, flat(each.detach()).clone()) for each in tensors if each.numel()]
        try:
            yield
        finally:
            for each, was in before:
                with torch.inference_mode(each.is_inference()), torch.no_grad():
                    flat(each.detach()).copy_(was)


# ---------------------------------------------------------------- both


class Undone:
    """Context manager: what runs inside leaves a model and its arguments as they were.

    Put back are the attributes, containers and tensors that both lead to (see
    :class:`State`), and of tensors the bytes that ops of this thread have
    written. Copied is what is written, nothing else. Not seen is what compiled code and kernels
    write that torch does not know.

    Args:
        model: a module, a function or a method.
        args: of the call.
        kwargs: of the call.
        uncompiled: let the compiled parts of the model run uncompiled, so that their ops are seen.

    Attributes:
        written: tensors that were written, by path; known at the end.
    """

    def __init__(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, uncompiled: bool = False
    ) -> None:
        self._state = State.of(model, (args, kwargs))
        self._memory = Memory(self._state.tensors, alone=True)
        self._keeping = Keeping(self._memory)
        self._uncompiled = uncompiled
        self.written: dict[str, torch.Tensor] = {}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that the model and its arguments lead to."""
        return self._state.tensors

    def __enter__(self) -> "Undone":
        if self._uncompiled:
            uncompile_parts(self._state)
        self._keeping.switch_on()
        return self

    def __exit__(self, *error: object) -> None:
        self._keeping.switch_off()
        self.written = {
            path: each
            for path, (_, each) in self._state.values.items()
            if isinstance(each, torch.Tensor) and self._memory.was_written(each)
        }
        try:
            self._state.put_back()
        finally:
            self._memory.put_back()


def uncompile_parts(state: State) -> None:
    """Put originals in the place of compiled and wrapped parts, until the state is put back.

    A part is what an attribute of a module holds; a function that is compiled where it is defined
    is none.
    """
    for module in state.modules:
        for name, part in list(module.__dict__.items()):
            original = compat.compiled_from(part)
            if isinstance(part, Transparent):
                original = part.unwrap()
            if original is not None:
                module.__dict__[name] = original
