"""A trace on disk: :func:`saved` makes bytes of it, :func:`loaded` a trace again.

A trace of the same call needs no Dynamo in the next process. It serves where everything that it
has looked at is as it was: the facts are in the file and are looked at once, when it is loaded.
Only traces without guards are kept; those with guards need Dynamo's own objects at every call.

The bytes hold Python code of the same interpreter, and the expressions by which Dynamo names what
it has looked at. Both run in this process, so they are taken from a trusted store alone: see Note
[Trust in a folder] in ``piecewise/store.py``.
"""

import importlib
import json
import logging
import marshal
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cgcompile import compat
from cgcompile.errors import UnsavableGraphError
from cgcompile.passes.nodes import value
from cgcompile.passes.saved import dump_graph, load_graph
from cgcompile.piecewise.store import Store, key_of
from cgcompile.tracing.dims import Found
from cgcompile.tracing.facts import (
    Unsayable,
    described,
    file_hash,
    files_of,
    first_difference,
    text_of,
)
from cgcompile.version import __version__

log = logging.getLogger(__name__)

KIND = "trace"
_VARIANTS = 64  # traces of one call that depend on different things, such as layers of a model


class CannotSave(Exception):
    """Why a trace is not kept; never seen by a caller of cgcompile."""


class CannotUse(Exception):
    """Why a trace that was kept does not serve; never seen by a caller of cgcompile."""


@dataclass(frozen=True)
class SavedTrace:
    """A trace from disk; see :class:`cgcompile.compat.Trace`."""

    original: types.FunctionType
    python: compat.TracedPython
    graph: fx.GraphModule | None
    inputs: list[Any]
    frozen: tuple[compat.FrozenTensor, ...]
    aliases: list[tuple[str, str]]
    global_tensors: list[torch.Tensor]
    known: Mapping[str, Mapping[str, list[int | str]]]  # sizes and strides when it was traced
    conditions: list[tuple[str, tuple[str, ...]]]

    @property
    def sizes(self) -> dict[str, tuple[int | str, ...]]:
        return self._now("sizes", lambda tensor: tensor.shape)

    @property
    def strides(self) -> dict[str, tuple[int | str, ...]]:
        return self._now("strides", lambda tensor: tensor.stride())

    def _now(self, kind: str, of: Callable[[Any], Any]) -> dict[str, tuple[int | str, ...]]:
        """What is known of the arguments; of the graph's inputs, with what a compiler has fixed."""
        found = {path: tuple(numbers) for path, numbers in self.known[kind].items()}
        for node in self.graph.graph.find_nodes(op="placeholder") if self.graph else ():
            meta, path = value(node), compat.source_name(node) or ""
            if isinstance(meta, torch.Tensor) and path in found:
                found[path] = tuple(map(compat.known_size, of(meta)))
        return found

    def size_conditions(self) -> list[tuple[str, tuple[str, ...]]]:
        env = compat.shape_env_of(self.inputs)
        sizes = {size for shape in self.sizes.values() for size in shape}
        now = [] if env is None else compat.size_conditions(env, sizes)
        return [*self.conditions, *(each for each in now if each not in self.conditions)]

    @contextmanager
    def compiling(self) -> Iterator[None]:
        assert self.graph is not None
        values = [value(node) for node in self.graph.graph.find_nodes(op="placeholder")]
        with compat.compiling(compat.fake_mode_of(values)):
            yield

    def function(self, compiled: Callable[..., Any] | None) -> Callable[..., Any]:
        return self.python.function(self.original, compiled)


def saved(trace: compat.Trace, names: Mapping[str, Any], dims: list[Found]) -> bytes:
    """The bytes of a trace, before anybody has changed its graph.

    Args:
        trace: what Dynamo found.
        names: the locals of the call.
        dims: its dynamic dimensions.

    Raises:
        CannotSave: another process could not use it; says why.
    """
    python, original = trace.python, trace.original
    scope = compat.source_scope(names, python.names(original))
    files = files_of(trace.code)
    if isinstance(files, str):
        raise CannotSave(files)
    conditions = trace.size_conditions()
    readable = {size for sizes in trace.sizes.values() for size in sizes}
    for text, symbols in conditions:
        if not readable.issuperset(symbols):
            raise CannotSave(f"it depends on {text}, which no argument tells")
    try:
        facts = described(trace.sources, scope, _varies(dims), trace.compared)
    except Unsayable as error:
        raise CannotSave(str(error)) from None
    try:
        graph = b"" if trace.graph is None else dump_graph(trace.graph)
    except UnsavableGraphError as error:
        raise CannotSave(str(error).splitlines()[0]) from error
    put = python.installed(original, trace.sources)
    installed = {name: _recipe(name, found) for name, found in put.items()}
    head = {
        "modules": dict(python.modules),
        "graph": python.graph,
        "installed": installed,
        "frozen": [each.where for each in trace.frozen],
        "aliases": trace.aliases,
        "known": {"sizes": trace.sizes, "strides": trace.strides},
        "facts": facts,
        "conditions": conditions,
        "files": files,
    }
    return _joined(json.dumps(head).encode(), marshal.dumps(python.code), graph)


def loaded(
    data: bytes, original: types.FunctionType, names: Mapping[str, Any], dims: list[Found]
) -> SavedTrace:
    """A trace of another process.

    Args:
        data: what :func:`saved` made.
        original: the function that was traced.
        names: the locals of a call like the one that was traced.
        dims: its dynamic dimensions.

    Raises:
        CannotUse: something that the trace depends on is not as it was; says what.
    """
    try:
        head_bytes, code, graph_bytes = _parted(data)
        head = json.loads(head_bytes)
        for name, before in head["files"].items():
            if file_hash(name) != before:
                raise CannotUse(f"{name} has changed")
        python = compat.TracedPython(marshal.loads(code), head["modules"], head["graph"])
        for name, recipe in head["installed"].items():
            python.extra[name] = _made(recipe)
        scope = compat.source_scope(names, python.names(original))
        difference = first_difference(head["facts"], described(head["facts"], scope, _varies(dims)))
        if difference is not None:
            raise CannotUse(difference)
        graph = load_graph(graph_bytes) if graph_bytes else None
        inputs = [] if graph is None else graph.graph.find_nodes(op="placeholder")
        first = len(inputs) - len(head["frozen"])
        frozen = tuple(
            compat.FrozenTensor(first + number, where, eval(where, dict(scope)))
            for number, where in enumerate(head["frozen"])
        )
        found = [eval(each, dict(scope)) for each in head["facts"] if each.startswith("G[")]
        return SavedTrace(
            original,
            python,
            graph,
            [value(node) for node in inputs],
            frozen,
            [(one, other) for one, other in head["aliases"]],
            [each for each in found if isinstance(each, torch.Tensor)],
            {kind: dict(head["known"][kind]) for kind in ("sizes", "strides")},
            [(text, tuple(symbols)) for text, symbols in head["conditions"]],
        )
    except CannotUse:
        raise
    except Exception as error:  # whatever is wrong with a file, there is Dynamo
        raise CannotUse(str(error).splitlines()[0] if str(error) else repr(error)) from error


class KeptTraces:
    """The traces in a folder.

    Args:
        store: the folder.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def find(
        self,
        facts: Mapping[str, str],
        original: types.FunctionType,
        names: Mapping[str, Any],
        dims: list[Found],
    ) -> SavedTrace | None:
        """The trace of a call, if all that it depends on is as it was.

        Args:
            facts: of the call, see :func:`facts_of_call`.
            original: the function that is called.
            names: the locals of the call.
            dims: its dynamic dimensions.
        """
        for variant in range(_VARIANTS):
            data = self._store.get(KIND, key_of(_every(facts, variant)))
            if data is None:
                break
            try:
                return loaded(data, original, names, dims)
            except CannotUse as error:
                where = facts["function"]
                log.info("a trace of %s on disk does not serve: %s", where, error)
        return None

    def keep(self, facts: Mapping[str, str], data: bytes) -> None:
        """Keep what :func:`saved` made, beside what is there for such a call."""
        taken = [variant for variant in range(_VARIANTS) if self._is_taken(facts, variant)]
        every = _every(facts, (taken[-1] + 1) % _VARIANTS if taken else 0)
        self._store.put(KIND, key_of(every), data, every, {"line": facts["function"]})

    def _is_taken(self, facts: Mapping[str, str], variant: int) -> bool:
        return self._store.get(KIND, key_of(_every(facts, variant))) is not None


def _every(facts: Mapping[str, str], variant: int) -> dict[str, str]:
    """All facts of one entry. Instances of a class share a function, and may differ otherwise."""
    own = {"cgcompile": __version__, "variant": str(variant)}
    return {**facts, **own, **compat.versions()}


def facts_of_call(
    original: types.FunctionType,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dims: list[Found],
    shapes: str,
) -> dict[str, str]:
    """What a trace is found by: the function, the arguments, and the state of torch."""
    varies = _varies(dims)
    arguments = [*args, *(kwargs[name] for name in sorted(kwargs))]
    return {
        "function": f"{original.__module__}.{original.__qualname__}",
        "keywords": ", ".join(sorted(kwargs)),
        "arguments": "\n".join(text_of(each, varies) for each in arguments),
        "dynamic shapes": shapes,
        "state": _state(),
    }


def _varies(dims: list[Found]) -> dict[tuple[int, int], str]:
    return {(id(each.tensor), each.dim): each.name or "*" for each in dims}


def _state() -> str:
    return ", ".join(f"{name} {found}" for name, found in compat.ambient_state().items())


def _recipe(name: str, found: Any) -> list[str]:
    """How another process gets a global that Dynamo has put there."""
    if isinstance(found, types.ModuleType):
        return ["module", found.__name__]
    if name.startswith("__builtins_dict__"):
        return ["builtins"]
    module, qualified = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
    if isinstance(module, str) and isinstance(qualified, str):
        recipe = ["object", module, qualified]
        try:
            if _made(recipe) is found:
                return recipe
        except (ImportError, AttributeError):
            pass
    raise CannotSave(f"the code around the graph needs {name}, a {type(found).__name__}")


def _made(recipe: list[str]) -> Any:
    if recipe[0] == "builtins":
        return vars(importlib.import_module("builtins"))
    found = importlib.import_module(recipe[1])
    for part in recipe[2].split(".") if recipe[0] == "object" else ():
        found = getattr(found, part)
    return found


def _joined(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def _parted(data: bytes) -> list[bytes]:
    parts = []
    while data:
        length = int.from_bytes(data[:8], "little")
        parts.append(data[8 : 8 + length])
        data = data[8 + length :]
    return parts
