"""What can be said of a call before it runs: its arguments, its weights, and the mode it is in."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from cgcompile import compat
from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.errors import with_article
from cgcompile.forward_context import callers_context
from cgcompile.graphs.guards import is_plain_value, layout_text, same_value
from cgcompile.observe.notes import Notes
from cgcompile.observe.restore import Memory
from cgcompile.passes.lines import Line, is_users_file, line_at
from cgcompile.tracing.dims import bind_arguments

_CPU = torch.device("cpu")


class Call(NamedTuple):
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def prepared(cls, prepare: Callable[[], Any]) -> "Call":
        """What a function that makes inputs gives: a tuple, a dict, both, or one argument."""
        made = prepare()
        if isinstance(made, dict):
            return cls((), made)
        if not isinstance(made, tuple):
            return cls((made,), {})
        both = len(made) == 2 and isinstance(made[0], tuple) and isinstance(made[1], dict)
        return cls(*made) if both else cls(made, {})

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """(path such as ``input 0['mask']``, leaf) of each argument, containers opened."""
        tops: list[tuple[str, Any]] = [(f"input {i}", each) for i, each in enumerate(self.args)]
        tops += [(f"input {name!r}", each) for name, each in self.kwargs.items()]
        for top, tree in tops:
            for path, leaf in compat.tree_paths(tree):
                yield top + path, leaf


def check_arguments(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of a model by name.

    Args:
        model: a module, a method or a function.
        args: of the call.
        kwargs: of the call.

    Raises:
        ArgumentsError: it does not take these.
    """
    called = model.forward if isinstance(model, torch.nn.Module) else model
    name = getattr(model, "__qualname__", None) or type(model).__name__
    try:
        signature = inspect.signature(called)
    except ValueError:  # of something that is not written in Python: nobody says
        return dict(kwargs)
    return dict(bind_arguments(name, signature, args, kwargs).arguments)


def forward_line(model: Any) -> Line | None:
    """The line in which the function that a call of a model runs begins, if it is the user's."""
    function = model.forward if isinstance(model, torch.nn.Module) else model
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or not is_users_file(code.co_filename):
        return None
    return line_at(code, code.co_firstlineno)


def look_at_call(notes: Notes, model: Any, call: Call, device: torch.device, varies: bool) -> None:
    """Findings about arguments and weights.

    Args:
        notes: where they go.
        model: a module or a function.
        call: its arguments.
        device: of the graph.
        varies: a second call will show which numbers change, so that nothing is said of them here.
    """
    source = forward_line(model)
    weights = list(named_weights(model))
    for path, leaf in call.leaves():
        if isinstance(leaf, torch.Tensor):
            _look_at_input(notes, path, leaf, device, source)
        elif isinstance(leaf, (int, float)) and not isinstance(leaf, bool) and not varies:
            text = f"it is {leaf!r}: a graph, and a trace, holds the number that it saw"
            notes.add("host_argument", path, text, source)
    away = [(path, each) for path, each in weights if each.device != device]
    if away:
        path, first = away[0]
        kind = "cpu_tensor" if first.device == _CPU else "other_device"
        text = f"{_counted(away)} on {first.device}; a graph of this model is on {device}"
        notes.add(kind, path, text, source)
    _look_at_gradients(notes, [*call.leaves(), *weights], source)


def _look_at_input(
    notes: Notes, path: str, leaf: torch.Tensor, device: torch.device, source: Line | None
) -> None:
    if leaf.layout is not torch.strided or not compat.is_plain_tensor(leaf):
        kind = with_article(type(leaf).__name__)
        text = f"it is {kind} of layout {leaf.layout}, which no graph takes"
        notes.add("unsupported_input", path, text, source)
    elif leaf.device != device and (leaf.dim() or leaf.device != _CPU):
        kind = "cpu_tensor" if leaf.device == _CPU else "other_device"
        text = f"it is on {leaf.device}; a graph of this model is on {device}"
        notes.add(kind, path, text, source)


def _look_at_gradients(notes: Notes, named: Sequence[tuple[str, Any]], source: Line | None) -> None:
    tensors = [(path, leaf) for path, leaf in named if isinstance(leaf, torch.Tensor)]
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        due = [(path, each) for path, each in tensors if each.requires_grad]
        if due:
            text = f"grad mode is on, and {_counted(due)} requiring grad: steps run without graphs"
            notes.add("gradients", due[0][0], text, source)


def _counted(named: Sequence[tuple[str, Any]]) -> str:
    """``input 0 is`` or ``self.weight and 3 more are``."""
    more = len(named) - 1
    return f"{named[0][0]} and {more} more are" if more else f"{named[0][0]} is"


def named_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers of a module, or of the module of a bound method."""
    module = getattr(model, "__self__", model)
    if isinstance(module, torch.nn.Module):
        yield from module.named_parameters("self")
        yield from module.named_buffers("self")


def compare_calls(
    notes: Notes, model: Any, first: Call, second: Call, memory: Memory, config: CompilationConfig
) -> None:
    """Findings about what differs between two prepared calls.

    Args:
        notes: where they go.
        model: a module or a function.
        first: the call that was run.
        second: made while the first one's inputs still live.
        memory: knows what the first call has written.
        config: says what becomes of inputs that moved.
    """
    source = forward_line(model)
    now = dict(second.leaves())
    if set(now) != set(dict(first.leaves())):
        text = "two calls have arguments of another number, name or nesting"
        notes.add("changing_argument", "the arguments", text, source)
        return
    for path, before in first.leaves():
        after = now[path]
        if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
            _compare_tensors(notes, path, before, after, memory, config, source)
        elif is_plain_value(before) and not same_value(after, before):
            text = f"it is {layout_text(before)} in one call and {layout_text(after)} in the next"
            notes.add("changing_argument", path, text, source)


def _compare_tensors(
    notes: Notes,
    path: str,
    before: torch.Tensor,
    after: torch.Tensor,
    memory: Memory,
    config: CompilationConfig,
    source: Line | None,
) -> None:
    if before.shape != after.shape or before.data_ptr() == after.data_ptr():
        return
    where = f"it is at {before.data_ptr():#x} in one call and at {after.data_ptr():#x} in the next"
    if memory.was_written(before):
        text = f"{where}, and forward writes it: each address has graphs of its own"
        notes.add("rebound_input", path, text, source)
        return
    context = callers_context()
    fixed = context is not None and context.cudagraph_runtime_mode is not CUDAGraphMode.NONE
    strict = fixed and config.on_input_change == "raise"
    notes.add("moving_input", path, where, source, severity="error" if strict else None)
