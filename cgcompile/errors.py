"""The root of all errors, those of the core, and the templates of their messages.

Errors of ``serving``, ``encoder`` and the command line are in ``errors.py`` of their folders; their
names here import them when they are read.

A message contains what was expected, what was found (argument path, node and user source line where
there is one) and what to do next. It is a :class:`Template`, called with its fields by name:
``raise CaptureError.refused(op="aten.item")``. Fields are plain values: this file needs nothing
else of cgcompile, and nothing of torch. ``tests/data/errors.txt`` has an example of each message.
"""

import difflib
import functools
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from cgcompile.lazy import export_lazily

if TYPE_CHECKING:
    from cgcompile.debug.errors import CommandError as CommandError
    from cgcompile.encoder.errors import EncoderError as EncoderError
    from cgcompile.encoder.errors import EncoderShardError as EncoderShardError
    from cgcompile.serving.errors import AgreementError as AgreementError
    from cgcompile.serving.errors import InputBufferError as InputBufferError

E = TypeVar("E", bound=Exception)

# The folder of the pages that errors and reasons name: ``docs/reference/errors`` in a clone.
DOCUMENTATION = "docs"

# Arguments of ``cgcompile.compile()`` that are no settings.
OF_COMPILE = ("dynamic_dims", "guards", "check_guards", "dynamic_shapes", "trace_layers_once")

# Commands of every installation that list what errors of a class are about.
_COMMANDS = {"ConfigError": "settings", "DispatchError": "reasons"}

_LONGEST = 400


def shown(value: object) -> str:
    """Return the text of a value in a message, of bounded length.

    A tensor is described, not printed: printing runs ops, which a capture would record or refuse.
    """
    if hasattr(value, "data_ptr") and hasattr(value, "shape"):
        kind = str(getattr(value, "dtype", "")).removeprefix("torch.")
        return f"a {type(value).__name__} {list(value.shape)} of {kind}"
    try:
        text = repr(value)
    except Exception:  # of a number with too many digits, or the code of a user
        return with_article(type(value).__name__)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def with_article(name: str) -> str:
    """Return the name of a type after its article: ``a Linear``, ``an Attention``."""
    return f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"


def listed(values: Iterable[object], empty: str = "") -> str:
    return ", ".join(map(str, values)) or empty or "(none)"


def _first(values: Sequence[object], count: str) -> str:
    rest = len(values) - int(count)
    return listed(values[: int(count)]) + (f" and {rest} more" if rest > 0 else "")


def _close(
    known: Iterable[object], name: str, earlier: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return the names near to another one; of an earlier name the present one, with it."""
    names = [*map(str, known), *earlier]
    texts: dict[str, str] = {}
    for near in difflib.get_close_matches(name, names, n=3, cutoff=0.6):
        text = f"{earlier[near]!r} (earlier {near!r})" if near in earlier else repr(near)
        texts.setdefault(earlier.get(near, near), text)
    return f" Did you mean {' or '.join(texts.values())}?" if texts else ""


def _if(value: object, texts: str) -> str:
    absent = value is None or value is False or (hasattr(value, "__len__") and not len(value))
    first, _, other = texts.rpartition("|")
    return other if absent else first


# What may follow the colon of a field: a word, and the argument of that word.
_SPECS: dict[str, Callable[[Any, str], str]] = {
    "shown": lambda value, _: shown(value),
    "type": lambda value, _: type(value).__name__,
    "kind": lambda value, _: with_article(type(value).__name__),
    "remedy": lambda why, _: getattr(getattr(why, "reason", None), "remedy", "remove the cause"),
    "a": lambda name, _: "None" if name == "NoneType" else with_article(name),
    "error": lambda error, _: f"{type(error).__name__}: {error}",
    "address": lambda value, _: "missing" if value is None else f"at {value:#x}",
    "count": lambda values, _: str(len(values)),
    "list": listed,  # {names:list nothing}: with the text of an empty one
    "first": _first,  # {sizes:first 8}: the first 8, and the number of the rest
    "plural": lambda values, noun: f"{noun}{'s' * (len(values) > 1)} {listed(values)}",
    "close": _close,  # {known:close {name}}: a question for each known name near to this one
    "if": _if,  # {value:if text|other}: the other text for None, False and what is empty
}


class _Formatter(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        word, _, argument = format_spec.partition(" ")
        return _SPECS[word](value, argument) if word in _SPECS else format(value, format_spec)


class Template:
    """The message of an error, as a constructor of the error class that has it as an attribute.

    Args:
        text: what is wrong and what was found; on further lines, what to do. Fields are as in
            :meth:`str.format`, with the specs of this file. Those that the error class lists in
            ``attributes`` become attributes of the error as well.
    """

    def __init__(self, text: str) -> None:
        lines = (" ".join(line.split()) for line in text.strip().splitlines())
        self._text = "\n  ".join(lines)
        self.fields = frozenset(re.findall(r"\{(\w+)", self._text.replace("{{", "")))

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"{owner.__name__}.{name}"

    def __get__(self, instance: object, owner: type[E]) -> Callable[..., E]:
        return functools.partial(self._error, owner)

    def _error(self, kind: type[E], /, **values: object) -> E:
        if values.keys() != self.fields:
            expected = ", ".join(sorted(self.fields)) or "no fields"
            names = ", ".join(sorted(values)) or "no fields"
            raise TypeError(f"{self._name}() takes {expected}; it was given {names}")
        error = kind(_Formatter().vformat(self._text, (), values))
        for name in self.fields & set(getattr(kind, "attributes", ())):
            setattr(error, name, values[name])
        vars(error)["__notes__"] = [
            f"See {_page(kind)}"
        ]  # a traceback ends with it; str() does not
        return error


def _page(kind: type[Exception]) -> str:
    """Where the documentation explains an error, and which command does."""
    command = _COMMANDS.get(kind.__name__)
    shown_by = f"`python -m cgcompile {command}`, " if command else ""
    return f"{shown_by}{DOCUMENTATION}/reference/errors#cgcompile.errors.{kind.__name__}"


class CGCompileError(Exception):
    """The root: ``except CGCompileError`` catches all errors that cgcompile raises itself.

    Example:
        >>> try:
        ...     cgcompile.Backend(compiler="gcc")
        ... except cgcompile.CGCompileError as error:
        ...     print(type(error).__name__)
        ConfigError
    """

    # Rows of one form, for the classes below as well: ``raise BatchError.bad_value(...)``.
    bad_value = Template("{where:if {where}: |}{name} = {value:shown}; expected {expected}.")
    returned = Template("{call} returned {found}; expected {expected}.")
    no_process_group = Template("""
        {where}: torch.distributed has no process group, so there are no ranks.
        Call torch.distributed.init_process_group() first, or leave {name}= out.""")


class ConfigError(CGCompileError, ValueError):
    """A setting that does not exist, has a bad value, or contradicts another one."""

    @classmethod
    def unknown_setting(
        cls, *, name: str, where: str, known: Sequence[str], earlier: Mapping[str, str]
    ) -> "ConfigError":
        hint = _close(known, name, earlier)
        if name == "level":  # vLLM's name of old
            hint = " vLLM's level is 'mode' here: level=3 is mode='PIECEWISE'."
        if name in OF_COMPILE:
            hint = f" It is an argument: cgcompile.compile(model, {name}=...)."
        text = f"{where}: there is no setting {name!r}.{hint}"
        return cls(f"{text}\n  Settings: {listed(known)}.")

    backend_class = Template("""
        backend=cgcompile.Backend is a class; expected one of its objects.
        Use backend=cgcompile.Backend() or backend='cgcompile'.""")
    no_mapping = Template("""
        {name} is {value:kind}; expected a mapping.
        {is_config:if For a CompilationConfig: backend=cgcompile.Backend(config).|Give settings by \
        name: options={{'on_fallback': 'raise'}}.}""")
    impossible = Template("""
        {what} is impossible: {because}.
        {instead}""")
    unknown_torch_mode = Template("""
        torch.compile(mode={mode!r}): this mode is not known.{known:close {mode}}
        Modes: {known:list}. cgcompile's own settings go into options={{...}}.""")
    settings_are_fixed = Template("""
        settings beside a cgcompile.Backend object: the settings of the object are fixed.
        Give them to cgcompile.Backend(...), or use backend='cgcompile' with options.""")
    not_compiled_here = Template("""
        cgcompile.runtime(): found {found:a}; expected a module that this backend compiled.
        {has_handle:if The handle of this one is model.backend.|For a function, keep \
        the object of backend=cgcompile.Backend(...).}""")
    captures_nothing = Template("""
        cgcompile.{function}(): found {found:a}, which captures nothing; expected a compiled \
        model, its handle (a Backend), a wrapper or a manager.
        Compile the model first: cgcompile.compile(model), or torch.compile(model, \
        backend='cgcompile'); of a function that torch.compile returned give the Backend object.""")
    unknown_inductor_option = Template("""
        inductor_options: this torch has no Inductor setting {name!r}.{known:close {name}}
        The names are those of torch._inductor.config.""")
    trace_once_needs_guards_dropped = Template("""
        mode DYNAMO_TRACE_ONCE drops Dynamo's guards, but torch.compile lets no backend drop guards.
        Use cgcompile.compile(model, mode='DYNAMO_TRACE_ONCE'), or drop them by options={{'mode': \
        'STOCK_TORCH_COMPILE', 'guard_filter_fn': torch.compiler.skip_all_guards_unsafe}}.""")
    breakable_needs_no_trace = Template("""
        splitting='breakable' in torch.compile(): it traces nothing, and torch.compile has traced.
        Use cgcompile.compile(model, splitting='breakable').""")
    unknown_parameter = Template("""
        dynamic_dims: the function has no parameter {name!r}.{known:close {name}}
        Parameters: {known:list}.""")
    not_compilable = Template("""
        cgcompile.{function}(): found {found}; expected a module, a bound method of one, or a \
        function.
        Of a class, compile its instances, or decorate its forward.""")
    padded_away = Template("""
        compile_sizes: no step ever has size {size}: it is padded to {padded}, the next of \
        cudagraph_capture_sizes.
        List {padded} instead, or add {size} to cudagraph_capture_sizes.""")
    unknown_pass = Template("""
        passes: no pass {name!r} runs here.{known:close {name}}
        What can be left out, as '-name': {known:list}.""")
    needed_pass = Template("""
        passes: pass {name!r} cannot be left out: without it a graph cannot be split.
        What can be left out, as '-name': {known:list}.""")
    which_dimension = Template("""
        cudagraph_capture_sizes and compile_sizes are sizes of one \
        dynamic dimension of the inputs, but the graph has {dims:count} of them.
        Set capture_dim to one of: {dims:list}.""")
    sizes_of_which = Template("""
        sizes: they are sizes of one dynamic dimension of the inputs, and the graph has \
        {dims:count} of them.
        Say which, beside sizes: capture_dim={dims[0]!r}. There are: {dims:list}.""")


class BoundaryError(CGCompileError, ValueError):
    """A splitting op that does not exist, or is declared twice with different meanings."""

    unknown = Template("""
        splitting op {name!r}: no operator, higher-order op or function has this name.{known:close \
        {name}}
        Import its library. Forms: 'ns::op', 'ns.op', 'ns::op.overload', 'ns::*', 'a.function'.""")
    not_an_op = Template("""
        splitting op: found {found:shown}; expected a name, an op of torch.ops, a function, or a \
        cgcompile.SplittingOp (with predicate=... for a test on fx.Node).""")
    target_or_predicate = Template("""
        SplittingOp: give either target= or predicate=, not both and not none.""")
    bad_support = Template("""
        splitting op {name!r}: support = {found:shown}; expected an AttentionCGSupport.""")
    bad_impl = Template("""
        splitting op {name!r}: impl = {found:shown}; expected a function that takes the op's \
        arguments, or a mapping from device types ('cuda') to such functions.""")
    predicate_raised = Template("""
        splitting op {name!r}: its predicate raised {error:error}
        The node was {node!r}; a predicate must return True or False for every node.""")
    declared_twice = Template("""
        splitting op {name!r} is declared twice with different settings. Declare it once.""")


class ForwardContextError(CGCompileError, RuntimeError):
    """The forward context is missing, or was used where it cannot work."""

    missing = Template("""
        get_forward_context(): no forward context is set in this thread or task.
        Wrap the call (or cgcompile.verify): with cgcompile.set_forward_context(...): model(...). \
        A new thread or task has none.""")

    captured = Template("""
        get_forward_context() was called by an op in {piece}, a captured piece: each replay would \
        repeat what the op reads now.
        Declare the op as a splitting op (mode PIECEWISE, splitting_ops=...), with the support \
        that it has in FULL graphs; or pass what it reads as an argument.""")

    traced = Template("""
        {what} was called in code that torch.compile traces: its value would be frozen into the \
        graph or recompile it.
        Read the context inside an opaque custom op (torch.library), and set it around the call \
        of the compiled model.""")
    runtime_mode = Template("""
        set_forward_context(cudagraph_runtime_mode={found:shown}): a step runs in one mode; \
        expected CUDAGraphMode.NONE, PIECEWISE or FULL.
        Of a combined mode take decode_mode() or mixed_mode().""")
    near_miss = Template("""
        set_forward_context({name}=...): there is no such parameter; {meant:if use {meant}|leave \
        it out}.
        It would only be in ForwardContext.additional. Give your own data another name.""")
    batch_descriptor = Template("""
        set_forward_context(batch_descriptor={found:shown}): expected a \
        cgcompile.BatchDescriptor, or None.
        For a batch of n tokens: batch_descriptor=cgcompile.BatchDescriptor(n).""")
    no_context = Template("""
        override_forward_context({found:shown}): expected a cgcompile.ForwardContext, or None.
        set_forward_context(...) makes one from its arguments.""")
    unpadded = Template("""
        set_forward_context(num_unpadded_tokens={found:shown}): expected a whole number from 0 \
        {most:if to {most}, the rows of the padded batch|or more}.
        It is the number of real rows of the batch; the others are padding.""")
    not_entered = Template("""
        set_forward_context: the context is left more often than it was entered.
        Use it in a with statement; a context belongs to one thread or task at a time.""")


class PassError(CGCompileError, RuntimeError):
    """A pass failed, or left a graph that is not valid."""

    invalid = Template("""
        pass {name!r} left an invalid graph: {problem}.
        A pass may assume a valid graph and must leave one; see cgcompile.passes.base.""")
    changed_output = Template("""
        pass {name!r} changed output {place} of {graph}: it is {found}; expected {expected}.
        Its users were traced with it. Convert it back in the pass, or change the model.""")
    raised = Template("""
        pass {name!r} raised {error:error}
        Mend the pass, or leave it out; dump_passes writes the graph that it was given.""")
    not_a_pass = Template("""
        a pass must have a name, uuid() and __call__(gm) -> gm; found {found:shown}.
        Wrap a plain function: cgcompile.passes.FunctionPass(name, function).""")


class SymbolError(CGCompileError, RuntimeError):
    """A size that the compiled graph does not allow."""

    free = Template("""
        {where}: the size of {value!r} depends on {symbols:list}, which is no input of the graph.
        Such a value cannot cross into a captured piece; please report this graph.""")
    specialised = Template("""
        {where}: your compiler fixed the dynamic dimension {dim} to {size}.
        Look for a comparison of a size with a constant, or for int() of a size, or compile this \
        model without dynamic sizes (dynamic=False).""")
    size_refused = Template("""
        {setting}: size {size} of {dim} is refused by the model's own guard {guard}{where}.
        Leave it out, or round it to a size that the guard allows.""")


class PieceCompileError(CGCompileError, RuntimeError):
    """A piece cannot be compiled, or does not return what was traced."""

    raised = Template("""
        {piece}: compiler {compiler!r} raised {error:error}
        The piece is from {where}. options={{'compiler': 'eager'}} runs it uncompiled; a splitting \
        op or cgcompile.eager_region() takes the op out of the piece.""")
    not_traced = Template("""
        {piece}: running it on fake values of this size raised {error:error}
        The piece is from {where}. Leave the size, or the ranges, out of compile_sizes, \
        or take the op out of the piece with a splitting op.""")
    bad_outputs = Template("""
        {piece}: what compiler {compiler!r} made must return a tuple or list of {expected} \
        outputs; found {found}.
        Return all outputs of the graph, in order.""")
    unlike_traced = Template("""
        {piece} ({where}): {op} returned {found}; traced was {traced}.
        Let the function under register_fake return the shapes and dtypes that the op returns.""")
    not_callable = Template("""
        {piece}: compiler {compiler!r} returned {found:shown}; expected a callable that takes the \
        inputs of the piece and returns the list of its outputs.""")


class TraceError(CGCompileError, RuntimeError):
    """A call that cannot become one graph."""

    refused = Template("""
        {name} does not become one graph: {why}
        Change that line, put it into an op of your own, or take {several:if \
        torch.compile(model, backend='cgcompile') (several graphs) or |}splitting='breakable' (no \
        trace).""")
    sizes_differ = Template("""
        dynamic_dims: both are called {name!r}, but {one} and {other}.
        Dimensions of one name have one size; give them two names, or none.""")
    no_such_dimension = Template("""
        dynamic_dims: {path} has no dimension {dim}; its shape is {shape}.
        Name a dimension that it has in every call.""")
    fixed = Template("""
        {name}: {dim}, and the model fixes it to that, though it was to vary (dynamic_dims).
        If another argument has this size too, list it in dynamic_dims as well. Else look for a \
        comparison with a constant, or int() of the size; or leave the dimension out.""")
    writes_globals = Template("""
        {name} assigns to global names: {names}; a compiled call would not.
        Keep that state in an object, or take torch.compile(model, backend='cgcompile').""")
    region = Template("""
        torch repeats the trace of a region for a call that it does not fit: {problem}.
        Leave out torch.compiler.nested_compile_region for it.""")


class SavedModelError(CGCompileError, RuntimeError):
    """A model that cannot be saved, or a saved model that cannot be loaded."""

    unsaved = Template("""
        the compiled model cannot be saved: {what}: {because}
        Nothing was written. Compile it in each process; cache_dir keeps what compilers made.""")
    setting = Template("""
        the compiled model cannot be saved: the setting {name} cannot be pickled ({error:error})
        Nothing was written. Functions and passes are found by their names at a load: define them \
        in a module, not as lambdas or inside of functions.""")
    changed = Template("""
        the saved model does not fit: {what} is {found}; it was {before} when it was saved.
        Save it again, or restore what has changed.""")
    edited = Template("""
        the saved model does not fit: {what} has changed since it was saved.
        Save it again, or restore what has changed.""")
    other_call = Template("""
        the saved model has no trace for this call: {why}.
        Nothing is traced again. Call it as when it was saved, in the same grad mode, or save it \
        for such calls; torch._dynamo.mark_dynamic lets a size vary.""")
    untrusted = Template("""
        {path} is not read: {reason}
        Loading a saved model runs code. The file and its folder must belong to you or to root, \
        and be writable by their owner alone.""")
    no_file = Template("""
        the saved model {path!r} cannot be {done} ({reason}).
        Give the path of a file in a folder that exists.""")
    damaged = Template("""
        {path} is no saved model that can be loaded ({reason}).
        Save the model again.""")


class ArgumentsError(CGCompileError, TypeError):
    """Arguments that a model does not take."""

    refused = Template("""
        {name} takes {signature}, and cannot be called with these inputs: {why}.
        {settings:if Settings go into config=, such as config={{{settings}: ...}}.|Give the inputs \
        of one call of the model, as it takes them.}""")
    no_end = Template("""
        a container among the inputs or results holds itself, or too many others in each other.
        Pass lists, tuples and dicts of tensors that do not hold each other.""")


class RecompileError(CGCompileError, RuntimeError):
    """A call that no trace serves, after tracing was closed or where guards were dropped."""

    closed = Template("""
        {name} is frozen, and this call would be traced again: {why}.
        Make such a call before freeze(), or mark what varies with dynamic_dims.""")
    dropped_guard = Template("""
        {name}: a guard that was dropped does not hold, so the result would be wrong: {guard}
        Keep guards (guards='keep'), or do not change this between calls.""")


class CaptureError(CGCompileError, RuntimeError):
    """A capture that cannot begin, or that failed.

    Attributes:
        op: the op that a capture cannot hold; empty where it is not about one.
        field: the field that captured code rebinds, such as ``self.buf``; empty where it
            is not about one.
    """

    attributes: tuple[str, ...] = ("op", "field")
    op: str = ""
    field: str = ""
    refused = Template("""
        {op}: operation not permitted when stream is capturing. The host would read what the \
        device has not computed.
        Keep the value on the device, or run the op outside of the graph: a splitting op or \
        cgcompile.eager_region().""")
    pageable = Template("""
        {op} copies a tensor {shape} of Python data from pageable host memory: operation not \
        permitted when stream is capturing.
        Create it once, outside of the step (register_buffer), or on the device (torch.full, \
        torch.arange); or take the op out of the graph: a splitting op or \
        cgcompile.eager_region().""")
    replaces_memory = Template("""
        capture of {what}: the step replaces the memory or layout of {name}, which exists before \
        the step, as .data = or set_() do. Replays would not: they read the first memory.
        Write in place (copy_, mul_). The tensor has the memory that it had before the capture.""")
    replaces_argument = Template("""
        {op} replaces the memory of its argument {shape}: operation not permitted when stream is \
        capturing. Replays would not: they read the memory of the first step.
        Write in place (copy_, mul_), or run the op outside of the graph: a splitting op or \
        cgcompile.eager_region().""")
    seeded = Template("""
        {op}({after}): operation not permitted when stream is capturing; the seed was {before}.
        A replay sets no seed. Seed before the step.""")
    ended_recording = Template("""
        {op} ran in a segment that has ended: autograd restored the state of before an eager break.
        Move the break out of the backward pass.""")
    break_in_backward = Template("""
        eager break {name!r} ran in autograd's backward pass, in whose threads no segment can end.
        Call the break before or after backward(), or capture inference alone.""")
    nested = Template("""
        {what}: a capture runs in this thread already, and captures do not nest.
        Inside a capture call the plain function: its work becomes part of that graph.""")
    region_inside = Template("""
        cgcompile.eager_region() inside of a capture: what runs in it would become part of the \
        graph. It takes code out of graphs where a model is traced.
        Use @cgcompile.eager_break_during_capture and a breakable wrapper, or compile the model.""")
    no_segment = Template("""
        {what}: no graph segment is being captured here.
        Call it inside of the with block of the capture, and not inside of a break.""")
    no_device = Template("""
        capture: device {found!r} has no graphs here.
        Expected a CUDA device, or 'cpu' for the host recorder.""")
    no_ranges = Template("""
        tracing_ranges(): this torch has no NVTX ({found}).
        Expected a build with CUDA. torch.profiler shows the ranges without this context; for \
        another profiler give its own push= and pop=.""")
    twice = Template("""
        {what}: this graph holds a recording already.
        {advice}""")
    empty = Template("""
        replay() of a graph that holds no recording.
        Capture first.""")
    freed_input = Template("""
        replay: {what} reads an input {shape} that was freed after the capture.
        A graph reads the memory it saw: keep captured buffers, and write new data into them.""")
    opaque_result = Template("""
        eager break {name!r} returned {found}: no graph could read it at the next replay.
        Return dense tensors and plain values, in lists, tuples, dicts or dataclasses, or write \
        into a tensor that was passed in.""")
    under_transform = Template("""
        eager break {name!r} ran inside of torch.func ({transform}), whose tensors exist only \
        there: no replay could give it any, or take any from it.
        Put the transform into the break, or write the batch dimension out.""")
    rebinds = Template("""
        capture of {what}: the step rebinds {field} (before: {before}; after: {after}).
        A replay would not. Write tensors in place (copy_, mul_, ...), count in a tensor, or \
        rebind the field outside of the step or in a function under eager_break_during_capture.
        A number that no step reads may be kept in an object that is no module.""")
    too_many_fields = Template("""
        an argument has too many fields to compare before each replay.
        Pass the tensors that the step reads, or keep such an object in the model.""")
    scripted = Template("""
        {field} is a {found}: the fields of a module of TorchScript cannot be compared.
        Use the module from which it was scripted or traced.""")
    math_attention = Template("""
        scaled_dot_product_attention takes its math kernel: under no_grad many ops, so no break.
        Call the model under torch.inference_mode(), where it arrives as one op; or put its caller \
        under cgcompile.eager_break_during_capture.""")
    no_breaks = Template("""
        capture of {what}: splitting ops were declared ({names}), and no such op ran. Attention \
        that the graph holds would repeat this step's metadata for ever.
        Check the names against the ops that really run, or declare none.""")
    inside_full = Template("""
        splitting op {op!r} (support {support}) ran inside of a FULL graph for {batch}.
        Capture this batch in mode PIECEWISE, or declare SplittingOp(..., support=...).""")
    unjoined_stream = Template("""
        the capture ended with unjoined work: a stream that forked from the capturing one is not \
        joined, so that a replay would not wait for it.
        Join it within forward, and before each break: \
        torch.cuda.current_stream().wait_stream(side). cgcompile.debug.doctor names the line.""")
    swallowed = Template("""
        capture of {what}: {name} raised {error:type}, and the program went on, unrecorded.
        Let the exception pass through the capture, or handle it inside of the break.""")
    open_break = Template("""
        capture of {what}: a function under no_graph raised, and the program went on, unrecorded.
        Let the exception pass through the capture, or handle it inside of the function.""")
    other_thread = Template("""
        {name}: called with memory of the capture of {what}, from another thread than the one that \
        captures. Nothing would record it.
        Call it in the thread that captures.""")
    escaped = Template("""
        {op} is captured and reads a tensor that the eager break {name!r} made and did not return: \
        the next replay makes it anew, somewhere else.
        Return the tensor from the break, or write into one that was passed in.""")
    writes_a_copy = Template("""
        {op} is captured and writes a tensor that the eager break {name!r} returned and that the \
        program keeps: the graph would write a copy of it.
        Pass the tensor in from outside of the break, or write it inside of the break.""")
    mode_in_between = Template("""
        eager break: {found}, a dispatch mode of the program, was entered inside of the capture.
        A break cannot leave it: enter it around the capture, or leave it before the break.""")
    release_inside = Template("""
        graphs were to be released inside of {what}, which uses their memory.
        Release them after it.""")
    mutates_arguments = Template("""
        eager break {name!r} changed a list or dict that is its argument at every replay.
        Return what it makes, or keep state in an object of its own.""")
    stale_copy = Template("""
        eager break {name!r} returned a tensor that the program keeps, and it, or the copy of it \
        that graphs read, was written later in the step: one of the two is stale.
        Pass the tensor in from outside of the break, or write it before it is returned.""")
    reentered = Template("""
        a compiled graph was called from inside one of its own steps: its buffers hold that step.
        Call another compiled model there, or the plain one.""")


class CaptureBusyError(CaptureError):
    """A second capture, while one runs in this process.

    Attributes:
        same_thread: whether the capture that runs is one of this thread.
    """

    attributes = ("same_thread",)
    same_thread = False
    busy = Template("""
        capture of {what}: the capture of {running} runs in {same_thread:if this|another} thread.
        A process captures one at a time; inside a capture call the plain function.""")


class GradientError(CGCompileError, RuntimeError):
    """Gradients were required where they would be wrong."""

    of_a_capture = Template("""
        {what}: a result of the captured step requires grad, and graphs have no gradients.
        The step ran; nothing is kept. Call it under torch.no_grad() or torch.inference_mode().""")


class DispatchError(CGCompileError, RuntimeError):
    """A step could not run as the forward context or ``on_fallback`` demands."""

    no_descriptor = Template("""
        {what}: the forward context has mode {mode} and no batch descriptor, which selects the \
        graph.
        set_forward_context(..., batch_descriptor=BatchDescriptor(num_tokens=...)).""")
    bad_mode = Template("""
        {where}(runtime_mode={mode}): a wrapper serves a runtime mode that has graphs.
        Take CUDAGraphMode.PIECEWISE or CUDAGraphMode.FULL.""")
    other_thread = Template("""
        {what}: a step under a forward context in thread {here!r}, after steps in thread \
        {before!r}{ended:if , which has ended|}. Results are views of memory that each step \
        overwrites.
        Call a compiled model or a wrapper without a forward context: its results are the caller's \
        then. Or lock the step and the reading of its results, and declare that once: \
        allow_threads() of the Backend, wrapper or manager.""")
    of_a_loop = Template("""
        {what}: a round in thread {here!r}, after rounds in thread {before!r}{ended:if , which has \
        ended|}. Rounds read and write the tensors of their state, and those of two threads would \
        race.
        Make a loop for each thread. Or lock each round, and declare that once: \
        wrapper.allow_threads() of the loop.""")
    no_such_rows = Template("""
        the compiled step, {batch}: no input has {rows} rows; shapes of the inputs: {shapes:list}.
        num_tokens is the number of rows that the model gets, padding included.""")
    cannot_copy = Template("""
        {what}: on_input_change='copy', but a wrapper cannot tell which inputs are written.
        Write into the same buffers, take 'raise', 'recapture' or 'eager', or compile the model.""")
    other_breaks = Template("""
        {what}: the plain step breaks at {now:list nothing}; recorded were {before:list none}.
        Its Python branches unlike at capture: add the cause to BatchDescriptor(extra=...).""")
    nothing_verified = Template("""
        {function}: this call replays no graph, so there is nothing to compare: {why}.
        Call the model until its step is captured, and call {function} then.""")
    strict = Template("""
        {what} would run without a graph: {why}.
        on_fallback='raise' forbids that. Remedy: {why:remedy}; or count it with \
        on_fallback='warn'.""")


class WeightsError(CGCompileError, ValueError):
    """New weights that do not fit the module."""

    unknown = Template("""
        update_weights(): the module has no parameter or buffer {name!r}.{known:close {name}}
        Nothing was written.""")
    shape = Template("""
        update_weights(): {name!r} is {found}; expected a tensor {expected}.
        Nothing was written. Graphs keep the shapes of weights: others need another model.""")


class GuardError(CGCompileError, RuntimeError):
    """A value that a graph has recorded differs from that of this call."""

    shared_counter = Template("""
        the compiled step: {path} and {other} share memory, and did not when traced. The step \
        increments the first at its end, after it has read the second.
        Pass tensors that do not overlap, or set kernels='-decode_attention'.""")


class AddressChangedError(GuardError):
    """A tensor that a graph reads or writes has moved since the capture."""

    moved = Template("""
        {what}, {batch}: {path} is at {now:#x}, was at {before:#x} when captured.
        A CUDA graph reads the address it saw at capture. Write into the same buffer each step, or \
        call without a forward context, where inputs are copied.""")
    moved_in_wrapper = Template("""
        {what}, {batch}: {path} is at {now:#x}, was at {before:#x} when captured.
        A CUDA graph reads the address it saw at capture, and a wrapper copies no inputs. Write \
        into the same buffer each step, or set on_input_change to 'recapture' or 'eager'.""")
    moved_in_loop = Template("""
        {what}, {batch}: {path} is {now:address}, was at {before:#x} when captured.
        A loop replays steps at the addresses of their state. Write new values into the same \
        tensors (copy_, zero_), and reset a cache in place of making another one; or set \
        on_input_change to 'recapture' or 'eager'.""")
    grown = Template("""
        a result is at {now:#x}, was at {before:#x} when captured.
        A CUDA graph writes where it did at capture, and resize_() moved that memory. Clone a \
        result before it grows; drop the graphs and capture again: release(), or of a wrapper \
        clear_graphs().""")
    metadata = Template("""
        {what}, {batch}: metadata {path} is {now:address}, was at {before:#x} when captured.
        A graph that reads the forward context reads its tensors where they were at capture. \
        Write new values into the same tensors (metadata() of a manager: return views of its \
        buffers), or, if the graph does not read this one, set checks='-metadata'.""")
    dropped = Template("""
        {what}, {batch}: {layout}, which captured ops read or write, and which is no argument, was \
        replaced, resized or dropped after the capture.
        A CUDA graph uses the memory of its capture, which it keeps. Write new values into the \
        same tensor, pass it as an argument, or drop the graphs and capture again: release(), or \
        of a wrapper clear_graphs().""")
    weight = Template("""
        {what}, {batch}: weight {path!r} was replaced or moved after it was captured.
        A CUDA graph reads the weights where they were. Write new values in place \
        (cgcompile.update_weights), or drop the graphs and capture again: {remedy}.""")
    state = Template("""
        {what}, {batch}: the tensor {path} is {now:address}, was at {before:#x} when captured.
        A CUDA graph reads it where it was. Write new values into the same tensor, pass it as an \
        argument, or drop the graphs and capture again: {remedy}.""")


class HostValueChangedError(GuardError):
    """A number, flag, layout or structure differs from the one that a graph has recorded."""

    changed = Template("""
        {what}, {batch}: {path} is {now}, was {before} when captured.
        A CUDA graph repeats the host values it saw at capture. A number of rows must be \
        num_tokens of the batch descriptor; put other values that vary into the descriptor \
        (extra=...), into a tensor, or into the forward context.""")
    changed_in_loop = Template("""
        {what}, {batch}: {path} is {now}, was {before} when captured.
        A loop repeats the host values of its capture. Keep what varies in a tensor of the state, \
        and reset an object of the state in place of making another one; or set on_input_change \
        to 'recapture' or 'eager'.""")
    cpu_scalar = Template("""
        {what}, {batch}: the 0-dim CPU tensor {path!r} is {now}, was {before} when captured.
        A CUDA graph repeats the value that its kernels were launched with. Move the tensor to the \
        device of the model; a graph reads it there at each replay.""")
    weight = Template("""
        {what}, {batch}: weight {path!r} is {now}, was {before} when captured.
        A CUDA graph repeats the shapes, strides and dtypes of its capture. Restore the layout, or \
        drop the graphs and capture again: {remedy}.""")
    metadata = Template("""
        {what}, {batch}: metadata {path} is {now}, was {before} when captured.
        A graph that reads the forward context repeats layouts and numbers in it. Pass the whole \
        buffer at each step (a block table with all columns), and sizes in use in a tensor; or, if \
        the graph does not depend on the layout, set checks='-metadata'.""")
    state = Template("""
        {what}, {batch}: {path} is {now}, was {before} when captured.
        A CUDA graph repeats what Python read at capture. Put what varies into a tensor or the \
        descriptor (extra=...), or drop the graphs and capture again: {remedy}. If the step does \
        not read it, set checks='-state'.""")
    setting = Template("""
        {what}, {batch}: {name} is {now}, was {before} when captured.
        A CUDA graph repeats the kernels and the host values of its capture. Replay it under the \
        same setting; or use a batch descriptor for each (extra=...), or \
        on_input_change="recapture".""")
    other_arguments = Template("""
        {what}, {batch}: called with {now}; it was {before} when captured.
        Pass arguments as at capture, by position or name, in containers of equal structure.""")


class LoopStateError(CGCompileError, RuntimeError):
    """A step of a loop changes something else than tensors of its state.

    Attributes:
        path: what it changes, such as ``state['cache'].length``; empty where it is not about one.
    """

    attributes: tuple[str, ...] = ("path",)
    path: str = ""
    changes = Template("""
        {what}: a step changes {path}: {before} -> {after}. A replay would not.
        Keep what a step changes in tensors of the state, and write them in place (add_, copy_).""")
    rebinds = Template("""
        {what}: a step binds {path} to another object. A replay would not.
        Write the tensors of the state in place (copy_, mul_), or rebind it between rounds.""")
    writes = Template("""
        {what}: a step writes {path}, a tensor that is {where}.
        Pass it as a part of the state, on the device of the model.""")
    returns = Template("""
        step {step} of a round returned tensors {now}; the steps before {before}.
        What the steps of a round return is stacked: return tensors of one shape and dtype, in one \
        structure.""")


class LoopRoomError(CGCompileError, RuntimeError):
    """A round of a loop has more steps than there is room for."""

    full = Template("""
        {what}: a round of {steps} steps, and room for {room}.
        Run shorter rounds, stop at the limit, or allocate a larger cache.""")


class SizesError(CGCompileError, ValueError):
    """Batch sizes to capture that are impossible, or that cannot be chosen."""

    not_a_size = Template("""
        capture sizes: {found:shown} is none; expected whole numbers of at least 1.
        A step without rows needs no graph.""")
    empty = Template("""
        no capture sizes were given; expected at least one.
        For steps without graphs take CUDAGraphMode.NONE.""")
    above = Template("""
        capture sizes {sizes:first 8}: above the maximum of {maximum}; no batch needs them.
        Leave them out, or raise the maximum.""")
    no_multiple = Template("""
        no capture size is possible: the maximum is {maximum}, and sizes must be multiples of \
        {multiple}.
        Raise the maximum, or take a smaller query length or parallel size.""")
    bad_entry = Template("""
        {name}: {{{batch!r}: {steps!r}}}; expected {{{unit}: {times}}}, whole numbers of at \
        least 1 and 0.
        Leave idle steps out: they run nothing.""")
    no_steps = Template("""
        fit_sizes(): the histogram holds no steps, so there is nothing to fit.
        Count the batch sizes of real steps, or take capture_sizes().""")
    no_budget = Template("""
        {where}(): no budget was given; without one every observed size would get a graph.
        Give count=, or nbytes= and bytes_of=, or all three.""")
    bytes_unknown = Template("""
        {where}(nbytes={nbytes}): the bytes of a graph are unknown.
        Give bytes_of=, a function from a size to the bytes of its graph.""")
    too_few_bytes = Template("""
        nbytes={nbytes}: the graph of size {size}, which alone would cover all that was observed, \
        takes {needed} bytes.
        Raise nbytes, or let large sizes run without a graph: maximum= or cost_without_graph= of \
        fit_sizes(), costs= of fitted_budgets().""")
    not_covered = Template("""
        fit_sizes(): the largest candidate is {largest}, and batches of {batch} were observed.
        Add a candidate, or give maximum={largest}: larger batches then run without a graph.""")


class BatchError(CGCompileError, ValueError):
    """A batch or a descriptor that contradicts itself, or that no planned graph serves."""

    not_uniform = Template("""
        dispatch(num_tokens={num_tokens}, num_reqs={num_reqs}, max_query_len={max_query_len}, \
        uniform_decode=True): requests of one length need num_tokens == num_reqs * max_query_len.
        Give the numbers before padding, or uniform_decode=False.""")
    not_uniform_starts = Template("""
        a batch with uniform_decode=True: by {name!r} its queries have {queries:first 8} tokens; \
        uniform decode has the same number in each.
        Give uniform_decode=False.""")
    which_query_len = Template("""
        dispatch(num_tokens={num_tokens}, uniform_decode=True): there are graphs for several query \
        lengths ({known:list}), and the batch does not state its own.
        Give num_reqs or max_query_len.""")
    axes = Template("""
        dispatch: extra = {extra!r}; expected a tuple with one hashable value per axis, each \
        comparable with the listed ones: {names:list}.""")
    not_planned = Template("""
        no graph is planned for mode {mode} and {descriptor}.
        Take modes and descriptors from plan().""")
    lengths_differ = Template("""
        is_uniform_decode: {lengths} query lengths and {flags} flags of prefill; expected one of \
        each per request.""")
    descriptor_not_uniform = Template("""
        BatchDescriptor(num_tokens={num_tokens}, num_reqs={num_reqs}, uniform=True): a uniform \
        batch needs num_reqs, and num_tokens must be a multiple of it.
        The query length of each request is num_tokens // num_reqs, exactly.""")


class ManagerError(CGCompileError, RuntimeError):
    """A request that the manager cannot serve, or an argument that does not fit."""

    no_graph = Template("""
        No cudagraph for {num_tokens} tokens; captured FULL: {captured:list none}.
        Take a size from get_cudagraph_size(), and call capture() before.""")
    no_replay = Template("""
        run_fullgraph: FULL, {batch} cannot be replayed here: {why}
        Call it under no_grad() or inference_mode(), outside of captures and of eager_region(); \
        after another change of the model, call release() and capture().""")
    capture_mode = Template("""
        cannot capture in mode {mode}; expected PIECEWISE or FULL.
        NONE has no graphs; pairs such as FULL_AND_PIECEWISE are captured one by one.""")
    twice = Template("""
        {mode}, {batch}: captured already.
        release() drops all graphs, so that they can be captured again.""")
    not_metadata = Template("""
        metadata() returned {found:kind}; expected cgcompile.serving.Metadata(...).
        Of a value for attention ops: return Metadata(value).""")
    no_metadata = Template("""
        FULL, {batch}: no attention metadata to capture with.
        A FULL graph records what attention reads: let metadata() return it for every FULL \
        descriptor.""")
    too_few_bytes = Template("""
        max_graph_bytes={budget}: the largest graph of each kind may take {needed} bytes.
        Give as much, or lower the largest sizes; print(manager.plan()) shows what takes it.""")
    no_axis = Template("""
        input {name!r} is optional, and the dispatcher has no axis of that name, exact and of all \
        graphs.
        Graphs with and without it differ: axes=[Axis({name!r}, (False, True))].""")
    presence = Template("""
        input {name!r}: extra of the batch has {found!r}; expected whether the input is given.
        Pass True with a tensor, False with None.""")
    rows = Template("""
        outputs={found:shown}; expected 'tokens' or 'reqs', or one of them for each output.
        Say what the first dimension of what the model returns counts.""")
    count = Template("""
        the model returned {found} tensors; outputs= names {declared}.
        Name one for each tensor of the flattened result, or one for all.""")
    output = Template("""
        the model returned {found}; expected a tensor with {size} rows (padded {rows}).
        Say with outputs= what the rows of results count: 'tokens' or 'reqs'.""")
    other_outputs = Template("""
        the outputs differ from the first batch's in number, nesting, dtype or trailing sizes.
        All sizes share one set of output buffers: return equal kinds of tensors at each step.""")


def stale_result(item: int, what: str, step: int, released: bool) -> str:
    """Return the text of a ``RuntimeError`` of torch: a result is touched and no longer valid."""
    cause = "a later step has overwritten its memory"
    if released:
        cause = "the graphs whose memory it is were released"
    return (
        f"result {item} of {what} (step {step} with graphs) is stale: {cause}.\n  Under a forward "
        "context results are views of graph memory, valid until the next step or the release of "
        "the graphs. Clone what must live longer: result.clone()."
    )


def missing_attribute(wrapper: str, wrapped: str, name: str) -> str:
    """The text of an ``AttributeError``, which is Python's own and no error of this tree."""
    return f"neither {wrapper} nor the {wrapped} that it wraps has an attribute {name!r}"


if not TYPE_CHECKING:
    __getattr__, __dir__ = export_lazily(
        __name__,
        {
            "debug.errors": "CommandError",
            "encoder.errors": "EncoderError EncoderShardError",
            "serving.errors": "AgreementError InputBufferError",
        },
    )
