"""Saved models: a compiled graph as bytes, and :func:`load`, which compares what it depends on.

``torch.compile(model, fullgraph=True, backend="cgcompile").forward.aot_compile(...)`` returns a
function that torch saves: guards, the Python around the graph, and the bytes of a
:class:`SavedGraph`. These have the format of an entry of ``pieces/cache.py``. The header has the
*facts*: what the graph depends on, as text by name. A load computes them again, before it unpickles
the payload, and an error names the first that differs. The payload has the graph as Dynamo made it,
the settings, and the artifacts of pieces. A load splits the graph again; it compiles only pieces
without an artifact.

The rule: torch compares its version, the GPU and its guards (types, sizes, grad mode, weights as
inputs). A fact is stored and compared here: what torch's loader drops or does not compare.
"""

import functools
import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from itertools import zip_longest
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import fx

from cgcompile.adapters.adapter import innermost
from cgcompile.config import CompilationMode, CUDAGraphMode
from cgcompile.errors import SavedModelError
from cgcompile.graphs.capture import without_garbage_collection
from cgcompile.graphs.reads import Transparent
from cgcompile.passes.nodes import changes_layout, dotted_source, dtype_text, tensors, value
from cgcompile.passes.split import split_data
from cgcompile.pieces.cache import MAGIC, Entry, packed, parsed, trusted_bytes
from cgcompile.torch_compat import aot, dynamo, inductor, torch_settings
from cgcompile.version import __version__

# How the names of facts begin; the rest of a name is where the fact is read.
_SOURCE, _METHOD = "the source of ", "the method "
_HARDWARE, _WEIGHT, _CLOSURE = "the hardware of ", "the weight ", "the variable of its closure "
_VALUE, _SETTINGS, _RANK = "the value ", "the settings of torch", "the rank"
_OF_THE_CALLED = (_WEIGHT, _CLOSURE)  # compared later: torch passes no model to its loader
_MISSING = "missing"


class SavedGraph:
    """A compiled graph that ``aot_compile`` of torch saves and loads.

    Attributes:
        backend: the handle over the graph: counters, capture, release.
    """

    def __init__(self, run: Callable[..., Any], backend: Any, data: bytes) -> None:
        self._run, self.backend, self._data = run, backend, data
        aot.register(SavedGraph)

    def __call__(self, *inputs: Any) -> Any:
        """Run one step; see :class:`~cgcompile.runtime.compiled_graph.CompiledGraph`."""
        return self._run(*inputs)

    @classmethod
    def compile(
        cls, backend: Any, gm: fx.GraphModule, inputs: Any, trace: dynamo.Traced
    ) -> "SavedGraph":
        """Compile the graph of a trace so that it can be saved.

        Raises:
            SavedModelError: a part of it cannot be saved.
        """
        settings = _settings_bytes(backend)
        if torch_settings.function_mode_stack() or torch_settings.has_traced_function_modes():
            raise SavedModelError.unsaved(what="the trace", because="it has torch function modes.")
        with _unsaved("the code that was traced"):
            facts = _facts(gm, trace)
            facts |= {_VALUE + where: text for where, text in aot.values_of_self(trace).items()}
        with _unsaved("the graph"):
            graph = aot.graph_bytes(gm)  # as it is now: compiling changes it
        entries: dict[str, Entry] = {}
        with without_garbage_collection(), backend.pieces.saving(entries), _restarting_nothing():
            run = backend.compile_graph(gm, inputs)
        notes = _notes(run, dynamo.current_shape_env())
        payload = pickle.dumps((settings, graph, entries))
        return cls(run, backend, packed("graph", "0", payload, facts, notes))

    @classmethod
    def serialize_compile_artifacts(cls, graph: "SavedGraph") -> bytes:
        """Return the bytes of a graph; torch calls this."""
        return graph._data

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> "SavedGraph":
        """Compile the graph of these bytes, with the artifacts among them; torch calls this.

        Raises:
            SavedModelError: the bytes are damaged, or something has changed since they were made.
        """
        entry = _entry(data, "the saved model")
        _compare_facts(entry.facts)
        settings, graph, entries = pickle.loads(entry.payload)
        backend = pickle.loads(settings)
        with _grad_mode(entry.notes):
            run, _ = _compiled(backend, graph, entries, entry.notes)
        return cls(run, backend, data)

    def check_called(self, function: Any, owner: Any) -> None:
        """Raise SavedModelError if a value of it, or a closure, is unlike that of the trace."""
        closure = aot.closure(function)
        for name, before in parsed(self._data).facts.items():
            expression = name.removeprefix(_VALUE)
            if name.startswith(_CLOSURE):
                _compare(name, before, closure.get(name.removeprefix(_CLOSURE), _MISSING))
            elif name.startswith(_VALUE) and "L[" in expression:
                now = aot.value_at(expression, {"self": owner})
                _compare(_VALUE + aot.readable(expression), before, now)
            elif name.startswith(_WEIGHT) and owner is not None:
                _compare(name, before, _weight_text(owner, name.removeprefix(_WEIGHT)))


def _compiled(
    backend: Any, graph: bytes, entries: dict[str, Entry], notes: Mapping[str, str], frozen: int = 0
) -> tuple[Callable[..., Any], bool]:
    """Return a graph that was loaded, compiled, and whether it changes layouts of tensors.

    Raises:
        SavedModelError: it has become another one.
    """
    gm, fake_mode = aot.graph_of(graph)
    changes_layouts = any(map(changes_layout, gm.graph.nodes))
    # Loading tensors adds guards on sizes, which are not those of a compiler.
    known = {*notes["sizes"].splitlines(), *aot.size_guards(fake_mode.shape_env)}
    inputs = [value(node) for node in gm.graph.find_nodes(op="placeholder")]
    with aot.compiling(fake_mode), backend.pieces.saving(entries):
        run: Callable[..., Any] = backend.compile_graph(gm, inputs, frozen=frozen)
    new = sorted({*aot.size_guards(fake_mode.shape_env)} - known)
    _compare("what compilers assume of sizes besides", "nothing", ", ".join(new) or "nothing")
    rows = zip_longest(notes["split"].splitlines(), _split_rows(run), fillvalue=_MISSING)
    for before, now in rows:
        _compare("a piece of the split", before, now)
    return run, changes_layouts


def _notes(run: Any, shape_env: Any) -> dict[str, str]:
    """Return what the graph of a load is compared with, and the grad mode to compile it in."""
    return {
        "grad": f"{torch.is_grad_enabled():d} {torch.is_inference_mode_enabled():d}",
        "sizes": "\n".join(aot.size_guards(shape_env)),
        "split": "\n".join(_split_rows(run)),
    }


@contextmanager
def _grad_mode(notes: Mapping[str, str]) -> Iterator[None]:
    """Enter the grad mode in which a graph was compiled."""
    grad, inference = map(int, notes["grad"].split())
    with torch.inference_mode(bool(inference)), torch.set_grad_enabled(bool(grad)):
        yield


def _entry(data: bytes, path: str) -> Entry:
    try:
        return parsed(data)
    except ValueError as error:
        raise SavedModelError.damaged(path=path, reason=str(error)) from None


def _compare_facts(facts: Mapping[str, str]) -> None:
    """Raise SavedModelError for the first changed fact, except those read from ``L[...]``."""
    now = _present_facts(facts)
    for name, before in facts.items():
        if name.startswith(_VALUE):
            expression = name.removeprefix(_VALUE)
            if "L[" not in expression:
                _compare(_VALUE + aot.readable(expression), before, aot.value_at(expression))
        elif not name.startswith(_OF_THE_CALLED):
            _compare(name, before, now.get(name, _MISSING))


def _split_rows(run: Any) -> list[str]:
    """Return the pieces of a compiled graph as text: what a graph loses as bytes shows in it."""
    graph = innermost(run)
    return [] if graph is None else [json.dumps(row) for row in split_data(graph.split)["pieces"]]


# ---------------------------------------------------------------- what cannot be saved


@contextmanager
def _unsaved(what: str) -> Iterator[None]:
    """Raise what a part of a model raises while it is saved as SavedModelError."""
    try:
        yield
    except Exception as error:  # any error of pickle
        because = f"{type(error).__name__}: {error}"
        raise SavedModelError.unsaved(what=what, because=because) from error


@contextmanager
def _restarting_nothing() -> Iterator[None]:
    """Refuse a graph for which the trace would have to be restarted: it has ended."""
    try:
        yield
    except dynamo.restarts() as error:
        because = f"Dynamo would have to restart it ({type(error).__name__}); a number that varies "
        because += "(dynamic=True) may have to be a constant."
        raise SavedModelError.unsaved(what="the trace", because=because) from error


def _settings_bytes(backend: Any) -> bytes:
    """Return the settings as bytes, which make a backend; raise SavedModelError."""
    config = backend.config
    if config.mode is not CompilationMode.PIECEWISE and config.cudagraph_mode is CUDAGraphMode.NONE:
        raise SavedModelError.unsaved(
            what=f"mode {config.mode.name}", because="without CUDA graphs it is torch's own."
        )
    for setting in fields(config):
        try:
            pickle.dumps(getattr(config, setting.name))
        except Exception as error:  # of a method of the user, too
            raise SavedModelError.setting(name=setting.name, error=error) from error
    return pickle.dumps(backend)


# ---------------------------------------------------------------- facts


def _facts(gm: fx.GraphModule, trace: dynamo.Traced) -> dict[str, str]:
    """Return what a traced graph depends on; raise ValueError if a part has no lasting text."""
    values = [value(node) for node in gm.graph.nodes]
    devices = " ".join(sorted({str(tensor.device) for tensor in tensors(values)}))
    facts = {"cgcompile": __version__, **inductor.versions(), _RANK: _rank()}
    facts[_HARDWARE + devices] = _hardware(devices)
    facts |= {_SOURCE + where: digest for where, digest in aot.sources(trace).items()}
    facts |= {_METHOD + where: digest for where, digest in aot.live_code(trace).items()}
    facts |= {_VALUE + where: text for where, text in aot.values_read(trace).items()}
    facts |= {_CLOSURE + name: text for name, text in aot.closure(trace.function).items()}
    for node in gm.graph.find_nodes(op="placeholder"):
        name = dotted_source(node)
        if dynamo.is_static_input(node) and name is not None:
            facts[_WEIGHT + name] = _tensor_text(value(node))
    return facts


def _present_facts(facts: Mapping[str, str]) -> dict[str, str]:
    """Return the present text of facts, without those of what is called; _MISSING is left out."""
    present = {"cgcompile": __version__, **inductor.versions()}
    present[_SETTINGS] = str(torch_settings.trace_settings())
    present[_RANK] = _rank()
    texts = {_METHOD: aot.live_digest, _HARDWARE: _hardware}
    for kind, text_of in texts.items():
        for name in [name for name in facts if name.startswith(kind)]:
            text = text_of(name.removeprefix(kind))
            if text is not None:
                present[name] = text
    sources = {n.removeprefix(_SOURCE): d for n, d in facts.items() if n.startswith(_SOURCE)}
    return present | {_SOURCE + where: text for where, text in aot.sources_now(sources).items()}


def _hardware(devices: str) -> str:
    try:
        return inductor.machine([torch.device(device) for device in devices.split()])
    except (AssertionError, RuntimeError) as error:  # no such device
        return str(error)


def _rank() -> str:
    """Return the rank of this process: ranks of a parallel model save and load one file each."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return "that of a single process"
    return f"{torch.distributed.get_rank()} of {torch.distributed.get_world_size()}"


def _weight_text(model: Any, name: str) -> str:
    try:
        return _tensor_text(attrgetter(name)(model))
    except AttributeError:
        return _MISSING


def _tensor_text(tensor: Any) -> str:
    sizes = ", ".join(map(str, tensor.shape))
    return f"{dtype_text(tensor.dtype)}[{sizes}] on {tensor.device}"


def _compare(what: str, before: str, now: str) -> None:
    if now != before and now != _MISSING and what.startswith((_SOURCE, _METHOD)):
        raise SavedModelError.edited(what=what)
    if now != before:
        raise SavedModelError.changed(what=what, found=now, before=before)


# ---------------------------------------------------------------- traces of cgcompile.compile


class TraceSaver:
    """Collects what a trace of :func:`cgcompile.compile` is made of, while it is made."""

    def __init__(self, backend: Any, call: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        self._backend = backend
        self._settings = _settings_bytes(backend)
        with _unsaved("the call"):
            self._call = aot.call_bytes(*call)
        self.entries: dict[str, Entry] = {}

    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call as a load makes it."""
        return aot.call_of(self._call)

    def begin(self, trace: dynamo.Trace, names: dict[str, Any], arguments: list[str]) -> None:
        """Take the graph as it was traced, with its locals, and the paths of the arguments."""
        if trace.graph is None or trace.function_modes:
            because = "it has torch function modes." if trace.graph else "it has no tensor ops."
            raise SavedModelError.unsaved(what="the trace", because=because)
        with _unsaved("the graph"):
            self._graph = aot.graph_bytes(trace.graph)  # as it is now: compiling changes it
        with _unsaved("the code that was traced"):
            self._facts = _facts(trace.graph, trace.ahead)
        self._facts[_SETTINGS] = str(torch_settings.trace_settings())
        values = aot.values_read(trace.ahead, names, arguments)
        values |= {path: aot.value_at(path, names) for path, _ in trace.frozen if "L[" in path}
        self._facts |= {_VALUE + path: text for path, text in values.items()}

    def end(self, trace: dynamo.Trace, compiled: Any, sizes: Any) -> None:
        """Take what is known after the graph was compiled."""
        self._notes = _notes(compiled, trace.shape_env)
        with _unsaved("the Python around the graph"):
            self._trace = aot.SavedTrace.of(trace, sizes)

    def data(self, arguments: Any) -> bytes:
        """Return the bytes of the trace; ``arguments`` are those of :func:`cgcompile.compile`."""
        with _unsaved("the arguments of cgcompile.compile()"):
            pickle.dumps(arguments)
        pieces = [f"{key} {entry.size} bytes" for key, entry in self.entries.items()]
        notes = {**self._notes, "artifacts": "\n".join(pieces)}
        parts = (self._settings, arguments, self._graph, self.entries, self._trace, self._call)
        return packed("trace", "0", pickle.dumps(parts), self._facts, notes)


class LoadedTrace:
    """A trace in bytes of :class:`TraceSaver`, of which all facts but those of the model hold.

    Attributes:
        backend: the handle, with the settings of the model that was saved.
        arguments: those of :func:`cgcompile.compile`.
        call: the arguments of the traced call; tensors have any numbers.
    """

    def __init__(self, data: bytes, path: str) -> None:
        self._entry = _entry(data, path)
        _compare_facts(self._entry.facts)
        settings, self.arguments, self._graph, self._entries, self._trace, call = pickle.loads(
            self._entry.payload
        )
        self.backend = pickle.loads(settings)
        self.call = aot.call_of(call)

    def add_to(self, traces: Any) -> None:
        """Compile the trace, and add it to those of a model; raise SavedModelError."""
        names = traces.locals_of(self.call)
        for name, before in self._entry.facts.items():
            expression = name.removeprefix(_VALUE)
            if name.startswith(_VALUE) and "L[" in expression:
                now = aot.value_at(expression, names)
                _compare(_VALUE + aot.readable(expression), before, now)
        with _grad_mode(self._entry.notes):
            traces.load(self._trace, self.call, self._compile)

    def _compile(self) -> tuple[Callable[..., Any], bool]:
        frozen = len(self._trace.frozen)
        return _compiled(self.backend, self._graph, self._entries, self._entry.notes, frozen)


def is_trace(data: bytes) -> bool:
    """Return whether bytes are those of a :class:`TraceSaver`, not of torch."""
    return data.startswith(MAGIC)


def read(path: Path) -> bytes:
    """Return the bytes of a file; raise SavedModelError if another user could have written it."""
    try:
        return trusted_bytes(path)
    except PermissionError as error:
        raise SavedModelError.untrusted(path=str(path), reason=str(error)) from None
    except (OSError, ValueError) as error:  # ValueError: a null byte
        reason = getattr(error, "strerror", None) or str(error)
        raise SavedModelError.no_file(path=str(path), done="read", reason=reason) from None


def contents(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return what a saved trace depends on, and notes on it; runs no code from the file."""
    data = read(path)
    if not is_trace(data):
        reason = "cgcompile has not written it; of a file of aot_compile nothing can be listed"
        raise SavedModelError.damaged(path=str(path), reason=reason)
    entry = _entry(data, str(path))
    facts = {aot.readable(name): text for name, text in entry.facts.items()}
    return facts, dict(entry.notes)


# ---------------------------------------------------------------- functions of aot_compile


class LoadedModel(Transparent):
    """A saved model in this process: it is called like the model.

    Attributes:
        runnable: the model, whose weights are used.
        backend: the handle over the compiled graph: counters, capture, release.
    """

    def __init__(self, runnable: Any, function: Callable[..., Any], backend: Any) -> None:
        self.runnable, self.backend, self._function = runnable, backend, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model.

        Raises:
            SavedModelError: the call is unlike that of the trace.
            cgcompile.errors.CGCompileError: what replaying raises.
        """
        try:
            return self._function(*args, **kwargs)
        except RuntimeError as error:
            why = aot.failed_guard(error)
            if why is None:
                raise
            raise SavedModelError.other_call(why=why) from None


def load_function(data: bytes, path: Path, model: Any) -> LoadedModel:
    """Return the function of ``aot_compile`` in these bytes, with its module bound."""
    called = model.__call__ if isinstance(model, torch.nn.Module) else model
    function, owner = dynamo.traced_function(called)
    try:
        run, graph = aot.load_function(data, function.__globals__)
    except SavedModelError:
        raise
    except Exception as error:  # the content of a file can raise anything
        reason = f"{type(error).__name__}: {error}"
        raise SavedModelError.damaged(path=str(path), reason=reason) from error
    if not isinstance(graph, SavedGraph):
        raise SavedModelError.damaged(path=str(path), reason="another backend compiled it")
    graph.check_called(function, owner)
    if owner is not None:
        run = functools.partial(run, owner)
    return LoadedModel(model, run, graph.backend)
