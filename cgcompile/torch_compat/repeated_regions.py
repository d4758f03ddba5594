"""Guards of the calls of a region that Dynamo traced once: :func:`guard_repeated_regions`.

A region is a function marked by ``torch.compiler.nested_compile_region``; each call of it is one
node of the graph. torch 2.13 and later copy the trace of its first call to each later call for
which the guards of the first hold, and keep no guards of the later ones: without those added here a
change of a later layer would be overlooked.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from cgcompile.torch_compat.torch_ops import is_named


class CannotRepeat(Exception):
    """The trace of a region is wrong for one of its later calls; the text is the reason."""


def is_region(node: fx.Node) -> bool:
    """Return whether a node calls a function that the user marked as a region."""
    return is_named(node.target, "invoke_subgraph")


def guard_repeated_regions(gm: fx.GraphModule, output_graph: Any = None) -> None:
    """Add the guards on what the first call of a region read, for what its later calls read.

    ``output_graph``: of Dynamo; left out: of the trace whose graph a backend compiles now.

    Raises:
        CannotRepeat: torch copied the trace of another call, and it does not apply.
    """
    pairs = list(_repeated_inputs(gm))
    if not pairs:
        return
    if output_graph is None:
        from torch._dynamo.symbolic_convert import tls

        output_graph = tls.current_tx.output
    scope = {"L": output_graph.local_scope, "G": output_graph.global_scope}
    moves: dict[Any, dict[Any, _Moved]] = {}  # by the source in the first call, and in the later
    for sources in pairs:
        one, other = _innermost_difference(*sources)
        moves.setdefault(one, {}).setdefault(other, _Moved(one, other))
    guards: Any = output_graph.guards
    known = {_key(guard) for guard in guards}
    tensors = {key[0] for key in known if key[1] in ("TENSOR_MATCH", "DUPLICATE_INPUT")}
    for guard in list(guards):
        if "type(" in guard.name:  # a guard on a class: it holds for later calls too
            continue
        for source in [source for source in _chain(guard.originating_source) if source in moves]:
            for added in [moved.guard(guard) for moved in moves[source].values()]:
                if _key(added) not in known and _is_missing(guard, added, tensors, scope):
                    known.add(_key(added))
                    guards.add(added)


def _repeated_inputs(gm: fx.GraphModule) -> Iterator[tuple[Any, Any]]:
    """Yield (source, source) of the inputs of a first and of a later call that correspond."""
    first_calls: dict[Any, fx.Node] = {}
    for call in filter(is_region, gm.graph.nodes):
        first = first_calls.setdefault(call.args[0].target, call)
        for pair in zip(first.args[2:], call.args[2:], strict=True):
            sources = [getattr(node, "_dynamo_source", None) for node in pair]
            if None not in sources and sources[0] != sources[1]:
                yield sources[0], sources[1]


def _is_missing(guard: Any, added: Any, tensors: set[str], scope: dict[str, Any]) -> bool:
    """Return whether a guard of a later call is to be added to those of the trace."""
    kind = added.create_fn_name()
    try:
        first, later = (eval(name, dict(scope)) for name in (guard.name, added.name))
    except (AttributeError, LookupError, TypeError):
        return False  # a later call that was traced on its own, with an equal result
    if isinstance(first, torch.nn.Module) and _code(first) != _code(later):
        raise CannotRepeat(f"{added.name} has another class, forward or hook than {guard.name}")
    if kind == "TENSOR_MATCH" and added.name not in tensors:
        raise CannotRepeat(f"{added.name} is no input of the graph")
    if kind == "DUPLICATE_INPUT":
        return later is eval(added.create_fn.keywords["source_b"].name, dict(scope))
    return kind != "TENSOR_MATCH"


def _code(module: Any) -> tuple[Any, ...]:
    """Return the code that a call of a module runs, which torch does not compare."""
    hooks = [*module._forward_pre_hooks.values()], [*module._forward_hooks.values()]
    return type(module), vars(module).get("forward"), *hooks


def _innermost_difference(one: Any, other: Any) -> tuple[Any, Any]:
    """Return the innermost parts in which two sources differ, such as two layers of a list."""
    while (
        type(one) is type(other)
        and getattr(one, "base", None) not in (None, getattr(other, "base", None))
        and dataclasses.replace(one, base=other.base) == other
    ):
        one, other = one.base, other.base
    return one, other


def _chain(source: Any) -> Iterator[Any]:
    while source is not None:
        yield source
        source = getattr(source, "base", None)


def _key(guard: Any) -> tuple[str, str, str]:
    function = guard.create_fn
    extra = {**getattr(function, "keywords", {})}
    extra.pop("value", None)  # the tensor itself
    return str(guard.name), guard.create_fn_name(), repr(sorted(extra.items(), key=str))


def _is_source(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and hasattr(value, "guard_source")


class _Moved:
    """Sources below one source, as they are below another."""

    def __init__(self, one: Any, other: Any) -> None:
        self._known: dict[Any, Any] = {one: other}

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
