"""Nested values: lists, tuples, dicts and what programs registered. See ``compat/__init__.py``.

The structure is what torch's ``_pytree`` takes it for. What most steps pass, plain containers of
tensors and numbers, is walked here: it costs a tenth.

Operators: their names, overloads and schemas. See ``cgcompile/compat/__init__.py``.

Dispatch modes, and what they ask of the ops they see. See ``cgcompile/compat/__init__.py``.
"""

import inspect
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from cgcompile.locks import new_lock

# Types, exactly, that nobody opens; anything else is for torch to say.
_LEAVES = frozenset((torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None)))


def tree_leaves(value: Any) -> list[Any]:
    found: list[Any] = []
    _gather(value, found)
    return found


def _gather(value: Any, found: list[Any]) -> None:
    kind = type(value)
    if kind in _LEAVES:
        found.append(value)
    elif kind is tuple or kind is list or kind is dict:
        for each in value.values() if kind is dict else value:
            if type(each) in _LEAVES:
                found.append(each)
            else:
                _gather(each, found)
    else:
        found += _pytree.tree_leaves(value)


def tree_tensors(value: Any) -> list[Any]:
    """The tensors among the leaves of a tree."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def tree_paths(tree: Any) -> list[tuple[str, Any]]:
    """(path such as ``[0]['k']``, leaf) of each leaf, in the order of ``tree_leaves``."""
    if type(tree) in _LEAVES:
        return [("", tree)]
    found, _ = _pytree.tree_flatten_with_path(tree)
    return [(_pytree.keystr(path), leaf) for path, leaf in found]


def tree_spec(tree: Any) -> Any:
    """The structure of a tree; equal for trees of equal structure."""
    return _pytree.tree_structure(tree)


def tree_unflatten(leaves: list[Any], spec: Any) -> Any:
    return _pytree.tree_unflatten(leaves, spec)


def is_container(value: Any) -> bool:
    """Whether the leaves of a value are inside of it: list, tuple, dict or a registered type."""
    return type(value) not in _LEAVES and not _pytree.tree_is_leaf(value)


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """``tree`` with ``function`` applied to each leaf, in the order of ``tree_leaves``."""
    kind = type(tree)
    if kind in _LEAVES:
        return function(tree)
    if kind is tuple or kind is list:
        made = [function(x) if type(x) in _LEAVES else tree_map(function, x) for x in tree]
        return tuple(made) if kind is tuple else made
    if kind is dict:
        return {key: tree_map(function, each) for key, each in tree.items()}
    return _pytree.tree_map(function, tree)


def all_op_names() -> list[str]:
    """Every registered operator, as ``ns::op`` or ``ns::op.overload``."""
    return list(torch._C._dispatch_get_all_op_names())


def custom_op_overload(obj: Any) -> torch._ops.OpOverload | None:
    """The operator behind a function that ``torch.library.custom_op`` decorated, else None."""
    from torch._library.custom_ops import CustomOpDef

    return obj._opoverload if isinstance(obj, CustomOpDef) else None


def is_op(obj: Any) -> bool:
    """Whether ``obj`` is an op of ``torch.ops``: overload, packet or higher-order op."""
    kinds = (
        torch._ops.OpOverload,
        torch._ops.OpOverloadPacket,
        torch._ops.HigherOrderOperator,
    )
    return isinstance(obj, kinds)


def is_higher_order_op(obj: Any) -> bool:
    return isinstance(obj, torch._ops.HigherOrderOperator)


def higher_order_ops() -> list[str]:
    """The names of the higher-order ops that exist, without the namespace."""
    return sorted(torch._ops._higher_order_ops)


def op_names(op: Any) -> tuple[str, ...]:
    """The registry names under which ``op`` is known, the most specific first."""
    if isinstance(op, torch._ops.OpOverload):
        packet = op.overloadpacket._qualified_op_name
        return (f"{packet}.{op._overloadname}", packet)
    if isinstance(op, torch._ops.OpOverloadPacket):
        packet = op._qualified_op_name
        return (packet, *(f"{packet}.{overload}" for overload in op.overloads()))
    if isinstance(op, torch._ops.HigherOrderOperator):
        return (f"higher_order::{op.name()}",)
    return ()


_PYTHON_OPERATORS = {
    operator.matmul: "matmul",
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.truediv: "div",
    operator.floordiv: "floor_divide",
    operator.mod: "remainder",
    operator.pow: "pow",
    operator.neg: "neg",
    operator.iadd: "add_",
    operator.isub: "sub_",
    operator.imul: "mul_",
    operator.itruediv: "div_",
}


def aten_name(target: Any) -> str | None:
    """Return the ``aten::op`` that a function or method of torch calls; None of any other.

    ``torch.sigmoid``, ``torch.Tensor.sigmoid``, ``torch.nn.functional.sigmoid``, the name of the
    method and the op are one; ``sigmoid_`` is another.
    """
    if isinstance(target, str):
        name = target
    elif is_op(target):
        packet = op_names(target)[-1 if isinstance(target, torch._ops.OpOverload) else 0]
        return packet if packet.startswith("aten::") else None
    elif target in _PYTHON_OPERATORS:
        name = _PYTHON_OPERATORS[target]
    else:
        owner = getattr(target, "__objclass__", None) or target
        if not str(getattr(owner, "__module__", None)).startswith("torch"):
            return None
        name = getattr(target, "__name__", "")
    return f"aten::{name}" if _is_aten(name) else None


@cache
def _is_aten(name: str) -> bool:
    return not name.startswith("__") and hasattr(torch.ops.aten, name)


@cache
def parameter_names(function: Any) -> tuple[str, ...] | None:
    """Return the names of the parameters of a function; None of a builtin."""
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None


def is_arithmetic(target: Any) -> bool:
    """Whether a function of a graph computes a number from numbers and does nothing else."""
    name = getattr(target, "__name__", "")
    return is_python_operator(target) or (name.startswith("sym_") and hasattr(torch, name))


def is_python_operator(target: Any) -> bool:
    """Whether a function is one such as ``operator.add``, which also works on plain numbers."""
    return getattr(target, "__module__", None) == "_operator"


def op_overloads(op: Any) -> tuple[torch._ops.OpOverload, ...]:
    """The overloads that a call of ``op`` may reach."""
    if isinstance(op, torch._ops.OpOverload):
        return (op,)
    if isinstance(op, torch._ops.OpOverloadPacket):
        return tuple(getattr(op, name) for name in op.overloads())
    return ()


def returns_nothing(op: Any) -> bool:
    """Whether the schema of ``op`` says so."""
    return isinstance(op, torch._ops.OpOverload) and not op._schema.returns


def written_arguments(op: torch._ops.OpOverload) -> Iterator[tuple[int, str]]:
    """Position and name of each argument that the schema of ``op`` says it writes."""
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield position, argument.name


def written_tensors(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call writes, as far as the schema of ``op`` says."""
    found: list[torch.Tensor] = []
    for overload in op_overloads(op):
        if overload.namespace == "c10d":  # whose schemas do not say
            return tree_tensors((args, kwargs))
        for position, name in written_arguments(overload):
            given = args[position] if position < len(args) else kwargs.get(name)
            several = given if isinstance(given, (list, tuple)) else [given]
            found += [each for each in several if isinstance(each, torch.Tensor)]
    return found


def add_note(error: BaseException, text: str) -> None:
    """A line below the traceback; Python 3.10 has no notes and shows nothing."""
    if hasattr(error, "add_note"):
        error.add_note(text)


def process_group_backend(group: Any, device_type: str | None = None) -> str | None:
    """The backend of a process group given by object or registered name; None if unknown."""
    import torch.distributed as dist

    if not dist.is_available():
        return None
    try:
        if isinstance(group, torch.ScriptObject):  # as an op of c10d has it
            group = dist.ProcessGroup.unbox(group)
        if isinstance(group, str):
            group = dist.distributed_c10d._resolve_process_group(group)
        if device_type is None:
            return dist.get_backend(group)
        for pair in dist.get_backend_config(group).split(","):
            device, _, backend = pair.partition(":")
            if device == device_type:
                return backend or device
        return None
    except (RuntimeError, ValueError, KeyError, TypeError, AssertionError):
        return None


def waited_collective(op: Any) -> Callable[..., Any] | None:
    """For an op of torch.distributed, what calls it and waits until it is done; else None."""
    namespace = getattr(op, "namespace", None)
    if namespace == "c10d":
        return lambda *args, **kwargs: _done(op(*args, **kwargs))
    if namespace != "_c10d_functional":
        return None
    wait = torch.ops._c10d_functional.wait_tensor.default
    if op is wait:
        return None

    def call(*args: Any, **kwargs: Any) -> Any:
        made = op(*args, **kwargs)
        return tree_map(lambda leaf: wait(leaf) if isinstance(leaf, torch.Tensor) else leaf, made)

    return call


def _done(made: Any) -> Any:
    """What a ``c10d`` op returned, once its work is done."""
    from torch.distributed import Work

    for leaf in made if isinstance(made, tuple) else (made,):
        if isinstance(leaf, torch.ScriptObject):
            Work.unbox(leaf).wait()
    return made


def process_group_store(group: Any) -> Any:
    """The key-value store that the ranks of a group share; None if it has none."""
    import torch.distributed as dist

    known = dist.distributed_c10d._world.pg_map.get(group)
    return None if known is None else known[1]


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
