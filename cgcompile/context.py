"""The forward context: the metadata of one step, set from outside of the model.

Opaque ops, graph wrappers and eager segments read the context of the current step here; traced code
must not, because its value would be baked into the graph. Without it every attention op would need
the metadata as arguments. The rule: set the context around the call of the model, in the same
thread and asyncio task.

Dynamo's own flag shows whether code is traced: ``torch.compiler.is_compiling()`` is true in all
threads while one compiles. The context variable below and the permission to capture are the only
ambient state of cgcompile.
"""

import difflib
import enum
from asyncio import Task, _get_running_loop, current_task
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from copy import copy
from functools import lru_cache
from threading import get_ident
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from cgcompile.config import CUDAGraphMode
from cgcompile.descriptor import BatchDescriptor
from cgcompile.errors import ForwardContextError
from cgcompile.reasons import Fallback
from cgcompile.settings import whole
from cgcompile.torch_compat.torch_ops import raised_while_tracing


@raised_while_tracing
def _refuse_traced(what: str) -> ForwardContextError:
    """Raise for a call in code that torch.compile traces."""
    return ForwardContextError.traced(what=what)


_RUNTIME_MODES = (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)


class _LeftOut(enum.Enum):  # Dynamo has no other objects as defaults
    """The default of ``cudagraph_runtime_mode``: NONE, of which a step with a descriptor warns."""

    MODE = 0

    def __repr__(self) -> str:
        return str(CUDAGraphMode.NONE)


_LEFT_OUT: Any = _LeftOut.MODE


class ForwardContext:
    """The metadata of the current step, for opaque ops, wrappers and eager segments.

    Attributes are those of :class:`set_forward_context`; ``additional`` holds its extra keywords,
    and ``ran_plain`` is the last fallback of a call in it.

    Example:
        >>> with cgcompile.set_forward_context(attn_metadata=[3, 5], layer=2):
        ...     context = cgcompile.get_forward_context()
        >>> context.attn_metadata, context.additional
        ([3, 5], {'layer': 2})
    """

    __slots__ = (
        "additional",
        "attn_metadata",
        "batch_descriptor",
        "captured_piece",
        "cudagraph_runtime_mode",
        "inputs_ready",
        "is_synthetic",
        "lacks_mode",
        "num_tokens",
        "num_tokens_across_dp",
        "num_unpadded_tokens",
        "origin",
        "ran_plain",
        "slot_mapping",
        "was_read",
    )

    def __init__(
        self,
        attn_metadata: Any = None,
        *,
        cudagraph_runtime_mode: CUDAGraphMode = _LEFT_OUT,
        batch_descriptor: BatchDescriptor | None = None,
        num_tokens: int | None = None,
        num_unpadded_tokens: int | None = None,
        num_tokens_across_dp: torch.Tensor | None = None,
        slot_mapping: Any = None,
        inputs_ready: Any = None,
        **additional: Any,
    ) -> None:
        left_out = cudagraph_runtime_mode is _LEFT_OUT
        if left_out:
            cudagraph_runtime_mode = CUDAGraphMode.NONE
        elif cudagraph_runtime_mode not in _RUNTIME_MODES:
            cudagraph_runtime_mode = _runtime_mode(cudagraph_runtime_mode)
        if batch_descriptor is not None and not isinstance(batch_descriptor, BatchDescriptor):
            raise ForwardContextError.batch_descriptor(found=batch_descriptor)
        if num_unpadded_tokens is not None:
            num_unpadded_tokens = _real_rows(num_unpadded_tokens, batch_descriptor, num_tokens)
        if additional:
            _refuse_near_misses(*additional)
        self.attn_metadata = attn_metadata
        self.cudagraph_runtime_mode = cudagraph_runtime_mode
        self.batch_descriptor = batch_descriptor
        self.num_tokens = num_tokens
        self.num_unpadded_tokens = num_unpadded_tokens
        self.num_tokens_across_dp = num_tokens_across_dp
        self.slot_mapping = slot_mapping
        self.inputs_ready = inputs_ready
        self.additional = additional
        self.is_synthetic = False
        self.lacks_mode = left_out and batch_descriptor is not None  # by a slip
        self.captured_piece = ""  # that is being captured; its ops may not read the context
        self.ran_plain: Fallback | None = None
        self.origin: ForwardContext | None = None  # the caller's, of which this one is a copy
        self.was_read = False  # by a captured op, in a copy made for the capture

    @classmethod
    def synthetic(cls, mode: CUDAGraphMode, descriptor: BatchDescriptor | None) -> "ForwardContext":
        """Return the context of a step without one of the caller's; user code never gets it."""
        context = cls(cudagraph_runtime_mode=mode, batch_descriptor=descriptor)
        context.is_synthetic = True
        return context


def _runtime_mode(name: Any) -> CUDAGraphMode:
    """Return a runtime mode by its name, as in settings."""
    mode = CUDAGraphMode.__members__.get(name.upper()) if isinstance(name, str) else None
    if mode is None or mode not in _RUNTIME_MODES:
        raise ForwardContextError.runtime_mode(found=name)
    return mode


# Attributes that are no parameters.
_STATE = (
    "additional",
    "captured_piece",
    "is_synthetic",
    "lacks_mode",
    "origin",
    "ran_plain",
    "was_read",
)
_PARAMETERS = tuple(name for name in ForwardContext.__slots__ if name not in _STATE)
# Keywords of other engines and of our settings, with the parameter that they stand for.
_MEANT = {
    "cudagraph_mode": "cudagraph_runtime_mode",
    "runtime_mode": "cudagraph_runtime_mode",
    "mode": "cudagraph_runtime_mode",
    "batch_descriptor": "batch_descriptor=cgcompile.BatchDescriptor(num_tokens)",
    "descriptor": "batch_descriptor=cgcompile.BatchDescriptor(num_tokens)",
    "batch_size": "batch_descriptor=cgcompile.BatchDescriptor(num_tokens)",
    "num_actual_tokens": "num_unpadded_tokens",
    "num_input_tokens": "num_tokens",
    "metadata": "attn_metadata",
    "attention_metadata": "attn_metadata",
    "vllm_config": "",
}
_SHORTEST = 8  # characters of a name of that table that others may be similar to


@lru_cache(maxsize=256)
def _refuse_near_misses(*names: str) -> None:
    """Raise for additional keywords that stand for a parameter: they would be ignored."""
    known = (*_PARAMETERS, *(name for name in _MEANT if len(name) >= _SHORTEST))
    for name in names:
        # A name of more words, such as cross_attention_metadata, means something else.
        similar = [other for other in known if name.count("_") <= other.count("_")]
        near = difflib.get_close_matches(name, similar, n=1, cutoff=0.85)
        near += [parameter for parameter in known if _abbreviates(name, parameter)]
        meant = _MEANT.get(name, _MEANT.get(near[0], near[0]) if near else None)
        if meant is not None:
            raise ForwardContextError.near_miss(name=name, meant=meant)


def _abbreviates(name: str, parameter: str) -> bool:
    """Return whether each word of a name begins the word of a parameter: ``attn_meta``."""
    words, whole_words = name.split("_"), parameter.split("_")
    pairs = zip(words, whole_words, strict=False)
    return len(words) == len(whole_words) > 1 and all(
        len(word) > 2 and whole_word.startswith(word) for word, whole_word in pairs
    )


def _real_rows(value: Any, descriptor: BatchDescriptor | None, padded: int | None) -> int:
    """Return the number of real rows of a batch as an int."""
    if descriptor is not None:
        limit: int | None = descriptor.num_tokens
    else:
        limit = None if padded is None else whole(padded)
    rows = whole(value)
    if rows is not None and rows >= 0 and (limit is None or rows <= limit):
        return rows
    raise ForwardContextError.unpadded(found=value, most=limit)


# (context, the same if a caller has set it, the thread and the task that set it, whether it was set
# in an eager region). Thread and task matter: a task or thread that copied this variable when
# it was created would otherwise read the step of its parent, after the end of that step. In an
# eager region there is no caller's context, so that no fast path replays a step.
_Entry = tuple[ForwardContext | None, ForwardContext | None, int, "Task[Any] | None", bool]
_current: ContextVar[_Entry | None] = ContextVar("cgcompile_forward_context", default=None)

# Of a context that was entered: (the last, those before). A list costs two more calls at each step.
_Tokens = tuple[Token[Any], Any] | None


def entered() -> _Entry | None:
    """Return the entry of the innermost context of this thread or task; None without one."""
    entry = _current.get()
    if entry is None or entry[2] != get_ident():
        return None
    loop = _get_running_loop()  # read first: current_task() raises in a plain thread
    return entry if entry[3] is (None if loop is None else current_task(loop)) else None


# :func:`entered` as lines of a generated function, without a call: they set ``context``, that of
# the caller, and ``thread``; or return ``not_served``.
ENTERED = """\
entry = last_entered()
if entry is None:
    return not_served
_, context, thread, task, _ = entry
if context is None or thread != get_ident():
    return not_served
loop = running_loop()
if task is not (None if loop is None else current_task(loop)):
    return not_served
"""
ENTERED_NAMES: dict[str, Any] = {
    "last_entered": _current.get,
    "get_ident": get_ident,
    "running_loop": _get_running_loop,
    "current_task": current_task,
}


def current_forward_context() -> ForwardContext | None:
    """Return the forward context of this thread or task, or None; not for traced code."""
    entry = entered()
    return None if entry is None else entry[0]


def in_full_mode() -> bool:
    """Return whether the forward context is in mode FULL: one graph without breaks."""
    context = current_forward_context()
    return context is not None and context.cudagraph_runtime_mode is CUDAGraphMode.FULL


def callers_context() -> ForwardContext | None:
    """Return the forward context that a caller has set, or None."""
    entry = entered()
    return None if entry is None else entry[1]


def eager_region_is_open() -> bool:
    """Return whether this thread or task is inside of ``cgcompile.eager_region()``."""
    entry = entered()
    return entry is not None and entry[4]


class override_forward_context:
    """Context manager: make ``context`` (or None) current in this thread or task; re-entrant."""

    __slots__ = ("_callers", "_context", "_tokens")
    _tokens: _Tokens

    def __init__(self, context: ForwardContext | None) -> None:
        if is_dynamo_compiling():
            _refuse_traced(type(self).__name__ + "()")
        if context is not None and not isinstance(context, ForwardContext):
            raise ForwardContextError.no_context(found=context)
        self._context = context
        self._callers = None if context is None or context.is_synthetic else context
        self._tokens = None

    def __enter__(self) -> ForwardContext | None:
        context, loop = self._context, _get_running_loop()
        task = None if loop is None else current_task(loop)
        thread = get_ident()
        token = _current.set((context, self._callers, thread, task, False))
        outer = token.old_value
        if outer.__class__ is tuple and outer[4] and outer[2] == thread and outer[3] is task:
            _current.reset(token)
            token = _current.set((context, None, thread, task, True))
        self._tokens = token, self._tokens
        return context

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._tokens is None:
            raise ForwardContextError.not_entered()
        token, self._tokens = self._tokens
        _current.reset(token)


@contextmanager
def context_of_capture() -> Iterator[ForwardContext | None]:
    """Enter a copy of the caller's context; ``was_read`` is set by reads in this block alone."""
    # Another thread may have entered the same object.
    context = callers_context()
    if context is None:
        yield None
        return
    own = copy(context)
    own.origin, own.was_read = context, False
    with override_forward_context(own):
        yield own
    context.ran_plain = own.ran_plain or context.ran_plain


def unreadable_context(piece: str) -> override_forward_context | None:
    """Return what is entered around the capture of a piece: its ops cannot read the context."""
    context = callers_context()
    if context is None:
        return None
    hidden = copy(context)
    hidden.captured_piece = piece
    return override_forward_context(hidden)


REGION_MARK = {"cgcompile": "eager"}


class EagerRegion(override_forward_context):
    """Context manager: run compiled graphs, wrappers and managers eager inside.

    Opaque ops read the same :func:`current_forward_context` inside.
    """

    __slots__ = ()

    def __init__(self) -> None:
        self._tokens = None

    def __enter__(self) -> None:
        entry, loop = entered(), _get_running_loop()
        task = None if loop is None else current_task(loop)
        context = None if entry is None else entry[0]
        self._tokens = _current.set((context, None, get_ident(), task, True)), self._tokens


class set_forward_context(override_forward_context):
    """Context manager: the context of one step, set around the call of the model; re-entrant.

    Nothing is copied and nothing synchronises; the context holds references until it is left.

    Args:
        attn_metadata: metadata for the attention ops of the engine; opaque to cgcompile.
        cudagraph_runtime_mode: NONE, PIECEWISE or FULL; or its name. Left out: NONE, which is
            logged once where there is a descriptor.
        batch_descriptor: the key of the graphs to capture or replay.
        num_tokens: rows of the batch after padding.
        num_unpadded_tokens: rows that are real; not more than the descriptor has. Replays of a
            compiled model zero the rows behind them after each eager piece; in breakable capture
            an eager break does that itself, where captured code after it mixes rows.
        num_tokens_across_dp: int32 tensor [R] on the CPU, the tokens of each of R ranks.
        slot_mapping: where new keys and values go; opaque to cgcompile.
        inputs_ready: a ``torch.cuda.Stream`` or ``torch.cuda.Event`` that the step waits for, on
            the device, before it reads its inputs; needed where another stream writes them.
        **additional: anything else, for ``ForwardContext.additional``. A name that is similar to
            one of the above, or that another engine uses for it, is an error.

    Raises:
        ForwardContextError: a keyword is a near miss, the mode is not a runtime mode, the
            descriptor is not a BatchDescriptor, the number of real rows is out of range, or the
            caller is being traced.

    Example:
        >>> batch = cgcompile.BatchDescriptor(num_tokens=8)
        >>> mode = cgcompile.CUDAGraphMode.PIECEWISE
        >>> with cgcompile.set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=batch):
        ...     print(cgcompile.get_forward_context().batch_descriptor.num_tokens)
        8
    """

    __slots__ = ()

    def __init__(
        self,
        attn_metadata: Any = None,
        *,
        cudagraph_runtime_mode: CUDAGraphMode = _LEFT_OUT,
        batch_descriptor: BatchDescriptor | None = None,
        num_tokens: int | None = None,
        num_unpadded_tokens: int | None = None,
        num_tokens_across_dp: torch.Tensor | None = None,
        slot_mapping: Any = None,
        inputs_ready: Any = None,
        **additional: Any,
    ) -> None:
        if is_dynamo_compiling():
            _refuse_traced(type(self).__name__ + "()")
        self._context = self._callers = ForwardContext(
            attn_metadata,
            cudagraph_runtime_mode=cudagraph_runtime_mode,
            batch_descriptor=batch_descriptor,
            num_tokens=num_tokens,
            num_unpadded_tokens=num_unpadded_tokens,
            num_tokens_across_dp=num_tokens_across_dp,
            slot_mapping=slot_mapping,
            inputs_ready=inputs_ready,
            **additional,
        )
        self._tokens = None


def is_forward_context_available() -> bool:
    """Return whether a caller has set a forward context in this thread or task.

    Raises:
        ForwardContextError: called in code that torch.compile traces.

    Example:
        >>> with cgcompile.set_forward_context({"lengths": [1, 2]}):
        ...     cgcompile.is_forward_context_available()
        True
    """
    if is_dynamo_compiling():
        _refuse_traced("is_forward_context_available()")
    context = current_forward_context()
    return context is not None and not context.is_synthetic


def get_forward_context() -> ForwardContext:
    """Return the forward context of this thread or task.

    Raises:
        ForwardContextError: none is set, or the caller is being traced by torch.compile.

    Example:
        >>> with cgcompile.set_forward_context(attn_metadata="lengths"):
        ...     cgcompile.get_forward_context().attn_metadata
        'lengths'
    """
    if is_dynamo_compiling():
        _refuse_traced("get_forward_context()")
    context = current_forward_context()
    if context is None or context.is_synthetic:
        raise ForwardContextError.missing()
    if context.captured_piece:
        raise ForwardContextError.captured(piece=context.captured_piece)
    context.was_read = True
    return context
