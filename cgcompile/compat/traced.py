"""The Python that Dynamo puts around a graph. See ``cgcompile/compat/__init__.py``.

Tried on torch 2.11, 2.13 and 2.15.
"""

import builtins
import dis
import importlib
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_INSTALLED = re.compile(r"__builtins__$|__(compiled_fn|import|builtins_dict)_|___|\w*_\d+_c\d+$")
_OF_ONE_TRACE = re.compile(r"__\w+_\d+$|__compiled_fn_|\w*_\d+_c\d+$")

# Instructions that change nothing but local variables and what has just been made, by name; those
# that name something; and what plain code names. Python 3.11 to 3.13.
_NAMED = frozenset(("LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD"))
_STEPS = (
    "RESUME NOP PRECALL CALL PUSH_NULL COPY SWAP POP_TOP LOAD_CONST LOAD_FAST LOAD_FAST_CHECK "
    "LOAD_FAST_LOAD_FAST STORE_FAST STORE_FAST_LOAD_FAST STORE_FAST_STORE_FAST DELETE_FAST "
    "BINARY_SUBSCR BUILD_LIST BUILD_TUPLE BUILD_MAP BUILD_CONST_KEY_MAP LIST_EXTEND LIST_APPEND "
    "IS_OP LIST_TO_TUPLE CALL_INTRINSIC_1 JUMP_FORWARD POP_JUMP_FORWARD_IF_FALSE TO_BOOL "
    "POP_JUMP_FORWARD_IF_TRUE POP_JUMP_IF_FALSE POP_JUMP_IF_TRUE RETURN_VALUE RETURN_CONST"
)
_PLAIN_STEPS = _NAMED.union(_STEPS.split(" "))
_PLAIN_MODULES = ("torch._dynamo.utils", "torch.autograd.profiler")
_PLAIN_NAMES = frozenset(
    (
        "call_size",
        "call_stride",
        "_is_profiler_enabled",
        "record_pregraph_bytecode_enter",
        "record_pregraph_bytecode_exit",
    )
)


def is_of_one_trace(name: str) -> bool:
    """Whether Dynamo has made up the name of a global for one trace alone."""
    return bool(_OF_ONE_TRACE.match(name)) and not name.startswith("__import_")


class _Globals(dict[str, Any]):
    """The globals of a function as they are at each look, beside names of our own."""

    def __init__(self, live: Mapping[str, Any]) -> None:
        super().__init__()
        self._live = live

    def __missing__(self, name: str) -> Any:
        if name.startswith("__builtins_dict__"):  # Dynamo's name for it
            return builtins.__dict__
        return self._live[name]


def _helpers(name: str) -> types.ModuleType:
    """What Dynamo's code calls of ``torch._dynamo.utils``, in a module of its own.

    There most of them turn Dynamo off around themselves, which costs more than all else in a call.
    The tensors are plain ones: a subclass has its own trace and no such helpers of its own.
    """
    found = types.ModuleType(name)  # no subclass: Python finds what is in a plain one at once
    own = {
        "call_size": torch.Tensor.size,
        "call_stride": torch.Tensor.stride,
        "call_storage_offset": torch.Tensor.storage_offset,
        # A range of the profiler around a few instructions is left out: ``bool`` takes what these
        # take, does nothing, and costs half of a function that does nothing.
        "record_pregraph_bytecode_enter": bool,
        "record_pregraph_bytecode_exit": bool,
        "__getattr__": lambda other: getattr(importlib.import_module(name), other),
    }
    vars(found).update(own)
    return found


def _module(name: str) -> types.ModuleType:
    return _helpers(name) if name == "torch._dynamo.utils" else importlib.import_module(name)


@dataclass(frozen=True)
class TracedPython:
    """What Dynamo made of the Python around a graph.

    Attributes:
        code: it has the arguments of the function, and calls the graph by a global name.
        modules: the names of modules, by the global names that stand for them.
        graph: the global name that the code calls; None if there is no graph.
    """

    code: types.CodeType
    modules: Mapping[str, str]
    graph: str | None

    def function(
        self, original: types.FunctionType, compiled: Callable[..., Any] | None
    ) -> Callable[..., Any]:
        """The traced call as a function of the same signature, without any guard.

        Args:
            original: the function that was traced: its globals, closure and defaults are used.
            compiled: takes the inputs of the graph that are not frozen; returns its outputs.
        """
        names = self.names(original)
        if self.graph is not None:
            names[self.graph] = compiled
        if _globals_read(self.code) <= names.keys():
            names = dict(names)  # nothing of the user's: Python remembers where it found a name
        closure = original.__closure__ if self.code.co_freevars else None
        made = types.FunctionType(
            self.code, names, original.__name__, original.__defaults__, closure
        )
        made.__kwdefaults__ = original.__kwdefaults__
        return made

    @property
    def is_plain(self) -> bool:
        """Whether it reads sizes of its arguments, calls the graph, and does nothing else.

        It changes nothing then, and takes nothing from anywhere but its arguments and the graph.
        """
        known = {name for name, module in self.modules.items() if module in _PLAIN_MODULES}
        for each in dis.get_instructions(self.code):
            name = each.argval if each.opname in _NAMED else None
            plain = name in known or name in _PLAIN_NAMES or name in (None, self.graph)
            if each.opname not in _PLAIN_STEPS or not plain:
                return False
        return self.graph is not None

    def names(self, original: types.FunctionType) -> dict[str, Any]:
        """The globals of the code, but for the graph: the user's as they are at each look."""
        found = _Globals(original.__globals__)
        found.update((n, v) for n, v in original.__globals__.items() if _INSTALLED.match(n))
        found.update((alias, _module(n)) for alias, n in self.modules.items())
        return found


def _globals_read(code: types.CodeType) -> set[str]:
    loads = ("LOAD_GLOBAL", "LOAD_NAME")
    found = {each.argval for each in dis.get_instructions(code) if each.opname in loads}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _globals_read(constant)
    return found


def alike(
    tensors: Sequence[torch.Tensor], layouts: Sequence[tuple[list[int | None], list[int]]]
) -> Callable[..., bool]:
    """What tells whether other tensors are like these, in one call: 0.15 us for two of them.

    Yes means: equal in type, dtype, device, whether they require grad, rank, strides, and in sizes.
    No may also mean another dispatch key, as of a tensor that was made in inference mode.

    Args:
        tensors: what is compared with; not kept.
        layouts: (sizes, strides) of each; None for a size that may be any.
    """
    sizes: list[Any] = [sizes for sizes, _ in layouts]
    strides: list[Any] = [strides for _, strides in layouts]
    guards = torch._C._dynamo.guards.TensorGuards(
        *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
    )
    found: Callable[..., bool] = guards.check
    return found


@contextmanager
def compiling(fake_mode: Any, contexts: Any) -> Iterator[None]:
    """The context in which a backend compiles a graph whose values belong to ``fake_mode``."""
    from torch._guards import TracingContext, tracing

    context = TracingContext(fake_mode)
    context.tensor_to_context = contexts
    with measured(), tracing(context):
        yield


@contextmanager
def measured() -> Iterator[None]:
    """torch counts its own seconds, and insists on an outermost span."""
    from torch._dynamo.utils import dynamo_timed, get_metrics_context

    with get_metrics_context(), dynamo_timed("cgcompile"):
        yield


@contextmanager
def patched(config: Any, changes: Mapping[str, Any]) -> Iterator[None]:
    """Change settings of torch and put them back.

    ``config.patch`` makes a context variable at each call, which the context of the thread keeps.
    """
    before = {name: getattr(config, name) for name in changes}
    try:
        for name, value in changes.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)
