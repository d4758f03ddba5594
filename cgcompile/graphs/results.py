"""What a call of a captured step returns: :class:`Results`.

A graph writes its results to the same addresses at each replay. How each leaf of a result reaches
the caller is decided once, at the capture:

* *reuse* (under a forward context, and of wrappers): a tensor over the memory of the graph, the
  same object at each step, which saves microseconds (:class:`ReusedTensors`). A caller may change
  such an object in place: ``logits.t_()``, ``resize_()``, ``set_()``, ``logits.data = ...``,
  ``requires_grad_()``. The rule: no later step shows that. The caller keeps the changed object, and
  the next step returns another one over the same memory.
* *copy* (without a forward context): a tensor of the caller's own (:class:`FreshCopies`), whichever
  piece made the value: an eager piece may return a view of memory of graphs.
* *slice* (of managers): views of the real rows of a padded result (:class:`Slices`).

A value that is memory of an input is that of *this* call's input: the very object, where the step
returned an input, and otherwise a view of it, another one each time, because the caller may change
it. What an eager piece allocated is the caller's already.

With ``debug`` results raise where they are read after a later step has overwritten their memory
(:class:`StaleResults`).
"""

import copy
import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch

from cgcompile.errors import (
    AddressChangedError,
    CaptureError,
    ConfigError,
    stale_result,
    with_article,
)
from cgcompile.graphs.arena import OwnedCopy, address, bits_of, span
from cgcompile.graphs.contract import Change, is_plain_value, same_layout
from cgcompile.graphs.reads import field_names, is_record
from cgcompile.torch_compat import raw_memory, torch_ops

_NOTHING: Mapping[Any, Any] = MappingProxyType({})
_ONLY = operator.itemgetter(0)

Track = Callable[[Sequence[Any]], list[Any]]
"""Returns the leaves of a result, those in memory of graphs as tensors that raise once stale."""

# ---------------------------------------------------------------- containers


def flatten(value: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a value, and its structure, equal for values that are built alike."""
    leaves: list[Any] = []
    structure: list[Any] = [torch_ops.tree_spec(value)]
    for leaf in torch_ops.tree_leaves(value):
        if not is_record(leaf):
            leaves.append(leaf)
            structure.append(None)
            continue
        fields = [flatten(getattr(leaf, name)) for name in field_names(leaf)]
        leaves += [inner for inside, _ in fields for inner in inside]
        structure.append((type(leaf), *(inside for _, inside in fields)))
    return leaves, structure


def rebuilt(value: Any, leaves: Sequence[Any]) -> Any:
    """Return a value with the structure of another one and other leaves."""
    return _rebuilt(value, iter(leaves))


def _rebuilt(value: Any, leaves: Iterator[Any]) -> Any:
    tops = []
    for leaf in torch_ops.tree_leaves(value):
        if not is_record(leaf):
            tops.append(next(leaves))
            continue
        record = copy.copy(leaf)
        for name in field_names(leaf):
            inner = _rebuilt(getattr(leaf, name), leaves)
            object.__setattr__(record, name, inner)  # a frozen one too: it is a copy
        tops.append(record)
    return torch_ops.tree_unflatten(tops, torch_ops.tree_spec(value))


def check_leaves(leaves: Sequence[Any], name: str) -> None:
    """Raise CaptureError for a result that is neither a dense tensor nor a plain value."""
    for leaf in leaves:
        kind = with_article(type(leaf).__name__)
        if not isinstance(leaf, torch.Tensor):
            if not is_plain_value(leaf):
                raise CaptureError.opaque_result(name=name, found=f"{kind} object")
        elif torch_ops.is_wrapped(leaf):
            transform = torch_ops.functorch_transform() or "vmap"
            raise CaptureError.under_transform(name=name, transform=transform)
        elif not raw_memory.is_plain_tensor(leaf):
            raise CaptureError.opaque_result(name=name, found=f"{kind} of no dense memory")


def opener(name: str, batch: str, captured: Any, structure: Any) -> Callable[[Any], list[Any]]:
    """Return a function that flattens later results of a break; another structure is an error."""

    def opened(result: Any) -> list[Any]:
        leaves, now = flatten(result)
        if now != structure:
            raise Change("the result", "not", "built in another way").error(name, batch)
        return leaves

    if isinstance(captured, torch.Tensor):
        return lambda result: [result]
    if captured is None:  # ops that write into their arguments return None: a shorter path
        return lambda result: [None] if result is None else opened(result)
    return opened


# ---------------------------------------------------------------- policies


class ReusedTensors:
    """Tensors over fixed memory, which each step returns; 0.2 us to see that none was changed."""

    def __init__(self, kept: Sequence[torch.Tensor]) -> None:
        self._kept = tuple(kept)  # no caller gets these
        self.starts = tuple([tensor.data_ptr() for tensor in kept])
        self.tensors = tuple(map(raw_memory.alias, kept))  # tensors that the last step returned
        self._alike = self._comparison()

    def get(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors; replace those that a caller has changed."""
        tensors = self.tensors
        if not self._alike(*tensors):
            return self._renewed()
        for tensor, start in zip(tensors, self.starts, strict=True):
            if tensor.data_ptr() != start:
                return self._renewed()
        return tensors

    def _renewed(self) -> tuple[torch.Tensor, ...]:
        """Replace the tensors that were changed: perhaps none, but inference mode was."""
        for kept, start in zip(self._kept, self.starts, strict=True):
            if kept.data_ptr() != start:
                raise AddressChangedError.grown(now=kept.data_ptr(), before=start)
        renewed = [
            tensor if _is_unchanged(tensor, kept) else raw_memory.alias(kept)
            for tensor, kept in zip(self.tensors, self._kept, strict=True)
        ]
        if any(map(operator.is_not, renewed, self.tensors)):
            self.tensors = tuple(renewed)
        self._alike = self._comparison()
        return self.tensors

    def _comparison(self) -> Callable[..., bool]:
        """Return a function that compares all properties but addresses, in one call."""
        return raw_memory.alike(
            self.tensors, [(list(t.shape), list(t.stride())) for t in self._kept]
        )


def _is_unchanged(tensor: torch.Tensor, kept: torch.Tensor) -> bool:
    if type(tensor) is not torch.Tensor or tensor.requires_grad or not same_layout(tensor, kept):
        return False
    return tensor.data_ptr() == kept.data_ptr()


def is_reusable(leaf: Any) -> bool:
    """Return whether another tensor over the same memory can stand for a leaf of a result."""
    if type(leaf) is not torch.Tensor or leaf.requires_grad:
        return False
    if leaf.is_quantized or leaf.is_nested:  # more than a layout over memory
        return False
    return raw_memory.is_plain_tensor(leaf)


class FreshCopies:
    """Copies of tensors at fixed addresses, new at every call; shared memory stays shared."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        shared: dict[tuple[int, torch.dtype], list[int]] = {}
        for position, tensor in enumerate(tensors):
            memory = address(tensor) or -1 - position  # empty memory is not shared
            shared.setdefault((memory, tensor.dtype), []).append(position)
        self._count = len(tensors)
        self._single: list[tuple[int, torch.Tensor]] = []
        # Storages that several tensors share; the position, layout and bits of each tensor.
        self._shared: list[tuple[torch.Tensor, list[tuple[int, Any, tuple[bool, bool]]]]] = []
        for positions in shared.values():
            group = [tensors[position] for position in positions]
            if len(group) == 1 and group[0].is_contiguous() and not any(bits_of(group[0])):
                self._single.append((positions[0], group[0]))
                continue
            first = min(tensor.storage_offset() for tensor in group)
            last = max(tensor.storage_offset() + span(tensor) for tensor in group)
            base = raw_memory.physical(group[0]).as_strided((last - first,), (1,), first)
            layouts = [(t.size(), t.stride(), t.storage_offset() - first) for t in group]
            self._shared.append(
                (base, [*zip(positions, layouts, map(bits_of, group), strict=True)])
            )

    def make(self) -> list[torch.Tensor]:
        """Return the copies, on the current stream; the caller owns them."""
        copies: list[torch.Tensor] = [None] * self._count  # type: ignore[list-item]
        for position, tensor in self._single:
            copies[position] = tensor.clone()
        for base, members in self._shared:
            copy = base.clone()
            for position, layout, bits in members:
                copies[position] = raw_memory.with_bits(copy.as_strided(*layout), *bits)
        return copies


def view_of(source: torch.Tensor, view: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that makes the same view of another input."""
    size, stride, dtype = view.size(), view.stride(), view.dtype
    conjugate, negative = view.is_conj(), view.is_neg()
    own = int(source.storage_offset()) * source.element_size()
    # The offset counts from that of the input, in elements of the view.
    offset = (int(view.storage_offset()) * view.element_size() - own) // view.element_size()

    def make(source: torch.Tensor) -> torch.Tensor:
        source = raw_memory.physical(source.detach() if source.requires_grad else source)
        if dtype is source.dtype:
            result = source.as_strided(size, stride, source.storage_offset() + offset)
        else:
            result = torch.empty(0, dtype=dtype, device=source.device)
            start = source.storage_offset() * source.element_size() // result.element_size()
            result.set_(source.untyped_storage(), start + offset, size, stride)
        return raw_memory.with_bits(result, conjugate, negative)

    return make


def kept_output(result: Any, pool: Any, weakly: bool) -> tuple[Any, list[int]]:
    """Return what an entry keeps of a result, and where the memory of each leaf begins, or 0.

    ``weakly``: later captures into the pool may use the memory of the result, which keeps the pool.
    """
    starts: list[int] = []
    keep = partial(_kept_leaf, pool.holds, pool.holder if weakly else None, {}, starts)
    with raw_memory.outside_inference_mode(), torch_ops.below_autograd():  # once for all
        return torch_ops.tree_map(keep, result), starts


def _kept_leaf(
    holds: Callable[[int], bool],
    holder: Any,
    known: dict[tuple[int, int], torch.UntypedStorage | None],  # by address and bytes
    starts: list[int],
    leaf: Any,
) -> Any:
    # Aliases: the caller may change the tensors themselves.
    if not isinstance(leaf, torch.Tensor):
        if is_record(leaf):
            keep = partial(_kept_leaf, holds, holder, known, starts)
            return rebuilt(leaf, [*map(keep, flatten(leaf)[0])])
        starts.append(0)
        return leaf
    storage = leaf.untyped_storage()
    nbytes = storage.nbytes()
    start = storage.data_ptr() if nbytes else 0
    starts.append(start)
    key = (start, nbytes)
    if key not in known:  # results that share memory go on sharing it
        known[key] = None
        if holds(start):
            known[key] = storage
            if holder is not None:
                known[key] = raw_memory.weak_storage(start, nbytes, leaf.device, holder)
    memory = known[key]
    if memory is not None:
        return raw_memory.laid_over(memory, leaf)
    return raw_memory.alias(leaf) if is_reusable(leaf) else leaf


class Slices:
    """The real rows of a padded result: ``kinds`` are which count of rows each leaf has."""

    def __init__(self, result: Any, leaves: Sequence[Any], kinds: Sequence[int]) -> None:
        self.result, self._leaves, self._kinds = result, leaves, kinds
        self._rebuild = builder(result, leaves)

    def cut(self, real: Sequence[int]) -> Any:
        """Return views of the real rows; ``real`` are the counts of rows."""
        if self._rebuild is _ONLY:
            return self.result[: real[self._kinds[0]]]
        pairs = zip(self._leaves, self._kinds, strict=True)
        return self._rebuild([leaf[: real[kind]] for leaf, kind in pairs])


# ---------------------------------------------------------------- all leaves


class Results:
    """Make the result of each replay of a captured step.

    Args:
        rebuild: builds a result of its leaves; see :func:`builder`.
        constants: the leaves that are the same objects at each replay; None for the others.
        inputs: leaf -> position of the input of the call that it is.
        views: leaf -> position of an input, and what makes a view of it.
        slots: leaf -> slot of the step that holds it after a replay.
        filled: leaf -> buffer, and what fills it: a tensor, or a slot.
        copied: leaf -> memory of graphs, copied for the caller.
        reused: leaf -> memory of graphs, returned as it is; buffers of ``filled`` among them.
        track: with ``debug``.
        keywords: the names of keyword arguments, where inputs are the leaves of arguments.

    Attributes:
        positions: of inputs that are returned, themselves or as a view.
        used_slots: slots that are read after a replay.
        is_steady: whether the result is one tensor, or a tuple of constants and reused tensors.
    """

    def __init__(
        self,
        rebuild: Callable[[list[Any]], Any],
        constants: Sequence[Any],
        *,
        inputs: Mapping[int, int] = _NOTHING,
        views: Mapping[int, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = _NOTHING,
        slots: Mapping[int, int] = _NOTHING,
        filled: Mapping[int, tuple[OwnedCopy, torch.Tensor | int]] = _NOTHING,
        copied: Mapping[int, torch.Tensor] = _NOTHING,
        reused: Mapping[int, torch.Tensor] = _NOTHING,
        track: Track | None = None,
        keywords: Iterable[str] = (),
    ) -> None:
        self._rebuild, self.constants, self._track = rebuild, [*constants], track
        self._inputs, self._slots = [*inputs.items()], [*slots.items()]
        self._views = [(item, *view) for item, view in views.items()]
        self._filled, self._keywords = [*filled.values()], tuple(keywords)
        self.used_slots = [*slots.values()]
        self.used_slots += [source for _, source in self._filled if isinstance(source, int)]
        self.positions = {*inputs.values(), *(position for position, _ in views.values())}
        self._copied = [*copied]
        self._copies = FreshCopies([*copied.values()]) if copied else None
        self.reused_items = [*reused]  # the leaves that are tensors of ``reused``
        self.reused = ReusedTensors([*reused.values()])
        self.is_flat = rebuild is tuple
        varies = bool(views or inputs or slots or filled or copied or track)
        self.is_steady = (self.is_flat or rebuild is _ONLY) and not varies
        self._last: tuple[Any, Any] = (None, None)  # of a steady result: (tensors, the result)

    @property
    def count(self) -> int:
        """How many leaves the result has."""
        return len(self.constants)

    def inputs_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """Return the inputs of :meth:`make` for a call of a callable: leaves of its arguments."""
        return argument_leaves(args, kwargs, self._keywords)

    def make(self, slots: Sequence[Any], inputs: Sequence[Any]) -> Any:
        """Return the result of a replay, from the slots after it and the inputs of the call.

        Raises:
            AddressChangedError: a caller let the memory of an earlier result grow.
        """
        tensors = self.reused.get()
        if tensors is self._last[0]:
            return self._last[1]
        for buffer, source in self._filled:
            buffer.fill(slots[source] if isinstance(source, int) else source)
        leaves = list(self.constants)
        for item, tensor in zip(self.reused_items, tensors, strict=True):
            leaves[item] = tensor
        if self._copies is not None:
            for item, copied in zip(self._copied, self._copies.make(), strict=True):
                leaves[item] = copied
        for item, slot in self._slots:
            leaves[item] = slots[slot]
        if self._track is not None:
            leaves = self._track(leaves)
        for item, position in self._inputs:
            leaves[item] = inputs[position]
        for item, position, view in self._views:
            leaves[item] = view(inputs[position])
        result = self._rebuild(leaves)
        if self.is_steady:
            self._last = (tensors, result)
        return result


def builder(tree: Any, leaves: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """Return a function that builds a value like ``tree``; dataclasses are leaves."""
    if len(leaves) == 1 and leaves[0] is tree:
        return _ONLY
    if type(tree) is tuple and len(leaves) == len(tree) and all(map(operator.is_, tree, leaves)):
        return tuple
    spec = torch_ops.tree_spec(tree)
    return lambda leaves: torch_ops.tree_unflatten(leaves, spec)


def argument_leaves(
    args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]
) -> list[Any]:
    """Return the leaves of arguments, of keyword arguments in the order of ``names``."""
    return flatten([list(args), [kwargs[name] for name in names]])[0]


def results_of_call(
    output: Any,  # what is kept of the result of the capture
    result: Any = (),
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] = _NOTHING,
    weights: Sequence[Any] = (),
    track: Track | None = None,
) -> Results:
    """Return what makes the results of a callable: reused tensors, arguments and weights."""
    arguments = argument_leaves(args, kwargs, tuple(kwargs))
    positions = {id(leaf): position for position, leaf in enumerate(arguments)}
    own = {id(weight) for weight in weights}
    constants, _ = flatten(output)
    opened = any(map(is_record, torch_ops.tree_leaves(output)))
    rebuild = partial(rebuilt, output) if opened else builder(output, constants)
    inputs: dict[int, int] = {}
    for item, leaf in enumerate(flatten(result)[0]):
        if not isinstance(leaf, torch.Tensor):
            continue
        if id(leaf) in own:
            constants[item] = leaf
        elif id(leaf) in positions:
            inputs[item], constants[item] = positions[id(leaf)], None
    reused = {
        item: leaf
        for item, leaf in enumerate(constants)
        if id(leaf) not in own and is_reusable(leaf)
    }
    return Results(rebuild, constants, inputs=inputs, reused=reused, track=track, keywords=kwargs)


# ---------------------------------------------------------------- stale results


def check_debug(debug: bool) -> None:
    """Refuse ``debug`` where this build of torch cannot make a storage raise."""
    if debug and not raw_memory.can_expire_storages():
        raise ConfigError.impossible(
            what="debug = 'stale'",
            because="this torch was built without the function that makes a result raise",
            instead="Use a build of torch with CUDA, or debug='poison'.",
        )


_Tracked = tuple[torch.UntypedStorage, torch.UntypedStorage, Callable[..., str]]


class StaleResults:
    """The results that callers may hold, by the owner of their memory."""

    def __init__(self) -> None:
        # By owner: the storage of a result, which does not keep the memory; that of the step's
        # result, which keeps it after a capture; what makes the text of the error of a touch.
        self._results: dict[Hashable, list[_Tracked]] = {}
        self._steps = 0

    def track(
        self, leaves: Sequence[Any], owns: Callable[[int], bool], owner: Hashable, what: str
    ) -> list[Any]:
        """Return the leaves of a result, those that ``owns`` accepts with own storages."""
        self._steps += 1
        known: dict[int, torch.UntypedStorage] = {}  # results that share memory share a storage
        results = self._results.setdefault(owner, [])

        def own(item: int, leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not owns(address(leaf)):
                return leaf
            start, nbytes = address(leaf), leaf.untyped_storage().nbytes()
            if start not in known:
                origin = leaf.untyped_storage()
                known[start] = raw_memory.weak_storage(start, nbytes, leaf.device, origin)
                text = partial(stale_result, item, what, self._steps)
                results.append((known[start], leaf.untyped_storage(), text))
            return raw_memory.laid_over(known[start], leaf)

        return [own(item, leaf) for item, leaf in enumerate(leaves)]

    def expire(self, owner: Hashable, inputs: Iterable[Any] = (), released: bool = False) -> None:
        """Make the results of an owner raise, except ``inputs`` of its step that runs next."""
        tensors = [tensor for tensor in inputs if isinstance(tensor, torch.Tensor)]
        read = {raw_memory.storage_identity(tensor.untyped_storage()) for tensor in tensors}
        results, self._results[owner] = self._results.get(owner, []), []
        for result in results:
            storage, _, text = result
            if raw_memory.storage_identity(storage) in read:
                self._results[owner].append(result)
            else:
                raw_memory.expire_storage(storage, text(released=released))

    def release(self) -> None:
        """Make all results raise: their memory is released."""
        for owner in [*self._results]:
            self.expire(owner, released=True)
        self._results.clear()

    def origin(self, identity: int) -> int:
        """Return the identity of the storage behind a result; ``identity`` if it is no result."""
        for storage, origin, _ in chain.from_iterable(self._results.values()):
            if raw_memory.storage_identity(storage) == identity:
                return raw_memory.storage_identity(origin)
        return identity


def track_result(result: Any, track: Track, arguments: Collection[Any] = ()) -> Any:
    """Return a result that raises once it is stale; arguments in it stay as they are."""
    leaves, _ = flatten(result)
    passed = set(map(id, arguments))
    tracked = track([None if id(leaf) in passed else leaf for leaf in leaves])
    pairs = zip(leaves, tracked, strict=True)
    return rebuilt(result, [leaf if new is None else new for leaf, new in pairs])
