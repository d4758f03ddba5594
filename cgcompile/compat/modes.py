"""Dispatch modes, and what they ask of the ops they see. See ``cgcompile/compat/__init__.py``."""

import operator
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from cgcompile.compat.trees import tree_tensors
from cgcompile.locks import new_lock

# Whether some thread is inside of ``torch.autograd.forward_ad.dual_level()``, for generated code:
# the expression, and the module that it names. Reading it costs 0.04 us.
FORWARD_GRADIENTS = ("forward_ad._current_level >= 0", forward_ad)


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of functorch's wrappers, which live inside ``vmap`` and ``grad``."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def has_tangent(values: Any) -> bool:
    """Whether a tensor in a nest of containers carries a forward gradient, in whatever mode."""
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(each).tangent is not None for each in tree_tensors(values))


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that sees every call below autograd in this thread, between two switches."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else Dynamo skips every compiled frame under this mode

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self.on_call(func, args, kwargs or {})

    def on_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call does; the mode is off inside."""
        raise NotImplementedError

    def switch_on(self) -> None:
        self.__enter__()

    def switch_off(self) -> None:
        self.__exit__(None, None, None)


def top_mode() -> Any:
    """The dispatch mode that sees the next call, or None."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    return _get_current_dispatch_mode()


def without_modes() -> AbstractContextManager[Any]:
    """A context in which no dispatch mode sees the calls."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def compiled_region(
    op: Any, args: tuple[Any, ...]
) -> tuple[Callable[[list[Any]], Any], Any] | None:
    """(callable, its inputs) if ``op`` is the call of an Inductor-compiled region; else None.

    Pieces are compiled with ``wrap_inductor_compiled_regions``: a dispatch mode sees their call as
    one higher-order op.
    """
    if not is_named(op, "inductor_compiled_code"):
        return None
    return (lambda inputs: op(args[0], inputs)), args[1]


def is_named(op: Any, name: str) -> bool:
    """Whether ``op`` is the higher-order op of this name."""
    return isinstance(op, torch._ops.HigherOrderOperator) and op.name() == name


def python_kernel(op: Any, device_type: str = "cpu") -> Callable[..., Any] | None:
    """What runs on a device for an op whose kernel there is written in Python, else None.

    Calling it does not go through the dispatcher for ``op`` itself; the ops in its body do.
    """
    if isinstance(op, torch._ops.OpOverload):
        return _library_kernel(op, device_type.upper())
    if not isinstance(op, torch._ops.HigherOrderOperator):
        return None
    key = torch._C.DispatchKey
    own = getattr(key, device_type.upper())
    found = op.py_kernels.get(key.CompositeExplicitAutograd) or op.py_kernels.get(own)
    return found


def _library_kernel(op: torch._ops.OpOverload, own: str) -> Callable[..., Any] | None:
    """Of an op that ``torch.library`` knows. Asked at every op, so without a look at the keys."""
    start = f"{op.namespace}/{op.name().rpartition('::')[2]}/"
    for backend in (own, _EXPLICIT):
        if start + backend in torch.library._impls:
            key = getattr(torch._C.DispatchKey, backend)
            return lambda *args, **kwargs: op._op_dk(key, *args, **kwargs)
    return None


_EXPLICIT = "CompositeExplicitAutograd"


def functionalized_op(op: Any, args: tuple[Any, ...]) -> Any:
    """The op that a call of ``auto_functionalized`` is made for; None for any other call."""
    if isinstance(op, torch._ops.OpOverload):
        return None
    if is_named(op, "auto_functionalized") or is_named(op, "auto_functionalized_v2"):
        return args[0]
    return None


def below_autograd() -> AbstractContextManager[Any]:
    """A context in which ops skip autograd, as in inference mode.

    A dispatch mode then sees composite ops whole. Code that Dynamo compiled outside of it compiles
    again inside.
    """
    return torch._C._AutoDispatchBelowAutograd()


def uncompiled() -> AbstractContextManager[Any]:
    """A context in which what ``torch.compile`` made runs uncompiled; none where that is running.

    Setting it there is an error of Dynamo's.
    """
    return _UNCOMPILED


class _Uncompiled:
    """torch's switch is one for all threads: the first to enter sets it, the last puts it back.

    Each for itself, two that overlap would leave the process uncompiled for good.
    """

    def __init__(self) -> None:
        self._lock = new_lock(watch=False)
        self._inside = 0
        self._stance: AbstractContextManager[Any] = nullcontext()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                try:
                    self._stance = torch.compiler.set_stance("force_eager")
                except RuntimeError:
                    self._stance = nullcontext()
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._stance.__exit__(None, None, None)


_UNCOMPILED = _Uncompiled()


def compiled_from(function: Any) -> Any:
    """What ``torch.compile`` made a function of; None of anything else, modules included."""
    if not isinstance(function, FunctionType):
        return None
    return getattr(function, "_torchdynamo_orig_callable", None)


def code_of_compiled_functions() -> CodeType:
    """The code of whatever ``torch.compile`` makes of functions: it is one, for all of them."""
    made: Any = torch.compile(operator.neg, backend="eager")
    found: CodeType = made.__code__
    return found


def holds_compiled_code(function: Any) -> bool:
    """Whether ``torch.compile`` made a function, or a module or one of the modules in it."""
    owner = getattr(function, "__self__", function)
    if compiled_from(function) is not None:
        return True
    if not isinstance(owner, torch.nn.Module):
        return False
    return any(
        isinstance(each, torch._dynamo.OptimizedModule)
        or getattr(each, "_compiled_call_impl", None) is not None
        or compiled_from(each.__dict__.get("forward")) is not None
        for each in owner.modules()
    )


def functorch_transform() -> str | None:
    """The innermost transform of ``torch.func`` that runs here, such as ``Vmap``; None if none."""
    found = torch._C._functorch.peek_interpreter_stack()
    return None if found is None else str(found.key()).rpartition(".")[2]


def draws_random(op: Any) -> bool:
    """Whether torch says of an op that it draws from a random generator."""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


def reads_on_host(op: Any) -> bool:
    """Whether torch says of an op that its result, or the size of it, depends on data."""
    tags = getattr(op, "tags", ())
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


def inside_backward() -> bool:
    """Whether this thread runs a backward pass of autograd now."""
    return torch._C._current_graph_task_id() != -1


# Whether autocast is on for any device; 0.05 us.
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled


def autocast_state() -> dict[str, torch.dtype]:
    """The type that autocast computes in, by the kind of device that it is on for.

    Kinds of devices that torch does not know by these names are not told apart.
    """
    kinds = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")
    return {
        kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)
    }


class own_cached_casts:
    """Context manager: weights that autocast casts outside are not read inside, nor vice versa.

    Autocast caches casts of parameters until its outermost context ends: a graph that reads such a
    cast would read freed memory at its replays, and code after a capture would read a cast that the
    graph has not computed yet. The cache is one for all threads, so it is off inside too.

    Args:
        compiled: leave it on, since Dynamo's guards compare it: code would compile again inside.
    """

    __slots__ = ("_compiled", "_was_on")

    def __init__(self, compiled: bool) -> None:
        self._compiled = compiled

    def __enter__(self) -> None:
        self._was_on = torch.is_autocast_cache_enabled()
        torch.clear_autocast_cache()
        if not self._compiled:
            torch.set_autocast_cache_enabled(False)

    def __exit__(self, *error: object) -> None:
        torch.set_autocast_cache_enabled(self._was_on)
        torch.clear_autocast_cache()


def autocast_off() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", enabled=False)
