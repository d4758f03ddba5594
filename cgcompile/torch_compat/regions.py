"""Functions that Dynamo traces once and repeats, by ``torch.compiler.nested_compile_region``.

torch 2.13 and later copy the trace of a marked function to each later call for which the guards of
the first hold. Two things are missing there. These guards are not kept for the later calls:
:class:`RegionGuards` adds them. And the copy does not see hooks, classes of inner modules and
``forward`` of instances: callers mark layers of equal structure only, see
``tracing/repeated_layers.py``.
"""

import dataclasses
import functools
import itertools
import re
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx


def repeats_regions() -> bool:
    """Return whether this torch copies the trace of a region in a form that was tried: 2.15."""
    # 2.11 traces each call; 2.13 puts more Python around the graph, which no fast path serves.
    return torch.torch_version.TorchVersion(torch.__version__) >= "2.15"


@contextmanager
def regions_marked(classes: Mapping[type[torch.nn.Module], int]) -> Iterator[None]:
    """Mark the ``forward`` of classes as regions, each with this many traces at most."""
    # The caller holds the lock of Dynamo. A thread that runs a layer meanwhile calls it as before.
    own = {cls: vars(cls).get("forward") for cls in classes}
    plain: dict[Any, dict[str, Any]] = {cls.forward: dict(vars(cls.forward)) for cls in classes}
    try:
        for cls, most in classes.items():
            cls.forward = _region(cls.forward, most)
        yield
    finally:
        for cls, forward in own.items():
            if forward is None:
                del cls.forward
            else:
                cls.forward = forward
        for function, attributes in plain.items():
            vars(function).clear()
            vars(function).update(attributes)


def _region(forward: Any, most: int) -> Any:
    from torch._dynamo.comptime import comptime

    region = torch.compiler.nested_compile_region(forward, max_reuse_entries=most)
    seen: list[Any] = []

    def check(context: Any) -> None:
        _check_call(context, seen)

    def marked(*args: Any, **kwargs: Any) -> Any:
        comptime(check)  # while Dynamo traces; else nothing
        return region(*args, **kwargs)

    return marked


def _check_call(context: Any, seen: list[Any]) -> None:
    """Raise where torch copies the trace of another call, but compares too little for that."""
    # ``seen`` has the state at the first call of the trace.
    from torch._dynamo.variables.invoke_subgraph import build_input_fingerprint

    tx = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    changes = _changes(tx.output.side_effects)
    if not seen or seen[0] is not tx.output:  # torch may start a trace again
        seen[:] = [tx.output, changes]
    if [*map(id, changes)] != [*map(id, seen[1])]:
        raise CannotRepeat("an object of the user is changed between two layers")
    args, kwargs = tx.symbolic_locals["args"], tx.symbolic_locals["kwargs"]
    variables = build_input_fingerprint(tx, args.items, kwargs.keys_as_python_constant()).flat_vts
    nodes = [each.as_proxy().node for tag, each in variables if tag.value in ("tensor", "symnode")]
    if len(set(nodes)) < len(nodes):  # the copy has one input for both
        raise CannotRepeat("two arguments of a layer are the same tensor or size")


def _changes(effects: Any) -> list[Any]:
    """Return what the trace has changed so far, if that is only attributes of global objects."""
    changes: list[Any] = []
    for variable in effects.id_to_variable.values():
        kind = variable.mutation_type
        existing = type(kind).__name__ in ("AttributeMutationExisting", "ValueMutationExisting")
        if existing and effects.is_modified(variable):
            name = str(getattr(variable.source, "name", ""))
            values = effects.store_attr_mutations.get(variable)
            # Guards compare an object as it was before the trace.
            if _GLOBAL.fullmatch(name) is None or not values or getattr(kind, "is_modified", False):
                raise CannotRepeat(f"{name or variable} is changed before a layer")
            changes += [variable, *values.values()]
    return changes


_GLOBAL = re.compile(r"G\['\w+'\][.\w]*")


def path_of_input(node: fx.Node) -> str:
    """Return the path of an input of a graph, a Python expression over ``L`` and ``G``."""
    return str(node._dynamo_source.name)


def another_fake(value: Any) -> Any:
    """Return a fake tensor like this one in memory of its own; None if that takes running an op."""
    if not isinstance(value, torch.Tensor) or not hasattr(value, "fake_mode"):
        return None
    if (
        value.layout is not torch.strided
        or value.requires_grad
        or value.is_conj()
        or value.is_neg()
    ):
        return None
    if not isinstance(value.storage_offset(), int) or value.storage_offset():
        return None
    with torch.inference_mode(value.is_inference()):
        meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        another = type(value)(value.fake_mode, meta, value.device)
    one, other = another.untyped_storage().nbytes(), value.untyped_storage().nbytes()
    return another if _expression(one) == _expression(other) else None


def _expression(size: int | torch.SymInt) -> Any:
    return size if isinstance(size, int) else size.node.expr


class CannotRepeat(Exception):
    """A guard of a region has no form for its later calls; the text is the reason."""


class RegionGuards:
    """The guards of a trace with regions; ``classes`` are those that were marked for it."""

    def __init__(self, output_graph: Any, classes: Collection[type[torch.nn.Module]]) -> None:
        self._guards: Any = output_graph.guards
        self._scope = {"L": output_graph.local_scope, "G": output_graph.global_scope}
        self._classes = tuple(classes)

    def drop_marks(self, code: types.CodeType) -> None:
        """Let guards on the ``forward`` of a class read it as it is without its mark."""
        # Code around the graph that reads the closure of a mark names the attribute that is marked.
        if "__closure__" in code.co_names and "forward" in code.co_names + code.co_consts:
            raise CannotRepeat("a value is read from the closure of a function")
        marks = {}
        for guard in self._guards:
            for source in _chain(guard.originating_source):
                match = _MARK.fullmatch(str(source.name))
                if match is not None and eval(match[1], dict(self._scope)) in self._classes:
                    region = source.base.base.base  # cell, closure, function
                    marks[source] = region.base.base
        for mark, closure in marks.items():
            moved = _Moved(mark, closure.base)
            below = [g for g in self._guards if closure in _chain(g.originating_source)]
            self._guards.remove_guards_with_source(closure)
            for guard in below:
                if mark in [*_chain(guard.originating_source)][1:]:
                    self._guards.add(moved.guard(guard))
        for guard in [guard for guard in self._guards if _THIS in str(guard.name)]:
            self._guards.remove_guards_with_source(guard.originating_source)

    def repeat(self, repeated: Iterable[Iterable[tuple[fx.Node, fx.Node]]]) -> None:
        """Add the guards on what the first call of a region read, for what later calls read.

        ``repeated`` has, for each later call, the inputs of the graph that stand for those of the
        first. Raises CannotRepeat.
        """
        bases: dict[Any, dict[Any, _Moved]] = {}
        for pair in itertools.chain.from_iterable(repeated):
            sources = [getattr(node, "_dynamo_source", None) for node in pair]
            if None not in sources and sources[0] != sources[1]:
                one, other = self._bases(*sources)
                bases.setdefault(one, {}).setdefault(other, _Moved(one, other))
        known = {_key(guard) for guard in self._guards}
        tensors = {key[0] for key in known if key[1] in ("TENSOR_MATCH", "DUPLICATE_INPUT")}
        for guard in list(self._guards):
            if "type(" in guard.name:  # of a class: later calls have the same
                continue
            for base in [base for base in _chain(guard.originating_source) if base in bases]:
                for added in (moved.guard(guard) for moved in bases[base].values()):
                    key = _key(added)
                    if key not in known and self._is_missing(added, tensors):
                        known.add(key)
                        self._guards.add(added)

    def _is_missing(self, guard: Any, tensors: set[str]) -> bool:
        kind = guard.create_fn_name()
        try:
            eval(guard.name, dict(self._scope))
        except (AttributeError, LookupError, TypeError):
            return False  # a later call that was traced on its own, with an equal result
        if kind == "TENSOR_MATCH" and guard.name not in tensors:
            raise CannotRepeat(f"{guard.name} is no input of the graph")
        if kind == "DUPLICATE_INPUT":
            other = guard.create_fn.keywords["source_b"].name
            return eval(guard.name, dict(self._scope)) is eval(other, dict(self._scope))
        return kind != "TENSOR_MATCH"

    def _bases(self, one: Any, other: Any) -> tuple[Any, Any]:
        """Return the layers that two sources are of; else the innermost parts that differ."""
        while True:
            if isinstance(eval(one.name, dict(self._scope)), self._classes):
                return one, other
            same_step = (
                type(one) is type(other)
                and getattr(one, "base", None) not in (None, getattr(other, "base", None))
                and dataclasses.replace(one, base=other.base) == other
            )
            if not same_step:
                return one, other
            one, other = one.base, other.base


_MARK = re.compile(
    r"dict\((type\(.*\))(?:\.__mro__\[\d+\])?\.__dict__\)\['forward'\]"
    r"\.__closure__\[2\]\.cell_contents\.__closure__\[0\]\.cell_contents"  # ``_region``, torch
)
_THIS = __name__.replace(".", "_dot_")  # in the paths of what ``_region`` reads


def _chain(source: Any) -> Iterator[Any]:
    while source is not None:
        yield source
        source = getattr(source, "base", None)


def _key(guard: Any) -> tuple[str, str, str]:
    function = guard.create_fn
    extra = {**getattr(function, "keywords", {})}
    extra.pop("value", None)  # the tensor itself
    return str(guard.name), guard.create_fn_name(), repr(sorted(extra.items(), key=str))


def repeat_guards_of_current_trace(repeated: Iterable[Iterable[tuple[fx.Node, fx.Node]]]) -> None:
    """Add the guards on later calls of regions, in a backend that Dynamo calls."""
    from torch._dynamo.symbolic_convert import tls

    RegionGuards(tls.current_tx.output, ()).repeat(repeated)


def _is_source(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and hasattr(value, "guard_source")


class _Moved:
    """Sources below one base, as they are below another."""

    def __init__(self, base: Any, other: Any) -> None:
        self._known: dict[Any, Any] = {base: other}

    def guard(self, guard: Any) -> Any:
        function = guard.create_fn
        if isinstance(function, functools.partial):
            moved = {
                name: self.source(value) if _is_source(value) else value
                for name, value in function.keywords.items()
            }
            function = functools.partial(function.func, *function.args, **moved)
        return type(guard)(self.source(guard.originating_source), function)

    def source(self, source: Any) -> Any:
        if source not in self._known:
            changes = {
                field.name: self.source(value)
                for field in dataclasses.fields(source)
                if _is_source(value := getattr(source, field.name))
            }
            moved = dataclasses.replace(source, **changes) if changes else source
            self._known[source] = moved
        return self._known[source]
