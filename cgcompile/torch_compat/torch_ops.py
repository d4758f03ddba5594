"""Nested values, operators (names, overloads, schemas, kernels), dispatch modes and autocast.

The structure of nested values is that of torch's ``_pytree``. Plain containers of tensors and
numbers, which most steps pass, are walked here, at a tenth of the cost.

Note [Reads on the host]
CUDA kernels of some ops read values on the host, or copy them through pageable memory. A capture on
CUDA refuses them, and torch tags few of them. Most rows of ``_ROWS`` were tried in captures
on an H200 with torch 2.11; the others call an op that was, or follow from the sources of ATen
(``isin``, ``cholesky_inverse``). Composite ops have rows too: in inference mode a dispatch mode
gets one call of the whole op.
"""

import inspect
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.hooks import RemovableHandle

from cgcompile.errors import ArgumentsError
from cgcompile.locks import new_lock

# They are types of public objects; torch has no public name for them.
OpOverload: Any = type(torch.ops.aten.add.Tensor)
OpOverloadPacket: Any = type(torch.ops.aten.add)
HigherOrderOperator: Any = type(torch.ops.higher_order.cond).__base__

# Exact types that are leaves; torch decides for all others.
_LEAVES = frozenset((torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None)))


# State that a graph switches with nodes of its own: what enters a context, and what leaves it.
FOREACH_ADD_: Any = torch._foreach_add_
ENTER_AUTOCAST: Any = torch.amp._enter_autocast
LEAVES: Mapping[Any, Any] = {
    ENTER_AUTOCAST: torch.amp._exit_autocast,
    torch.autograd.grad_mode._enter_inference_mode: torch.autograd.grad_mode._exit_inference_mode,
}
ENTER_INFERENCE_MODE = torch.autograd.grad_mode._enter_inference_mode
SET_GRAD_ENABLED = torch._C._set_grad_enabled


def tree_leaves(value: Any) -> list[Any]:
    """Return the leaves of a tree, in order."""
    leaves: list[Any] = []
    try:
        _gather(value, leaves)
    except RecursionError:
        raise ArgumentsError.no_end() from None
    return leaves


def _gather(value: Any, leaves: list[Any]) -> None:
    kind = type(value)
    if kind in _LEAVES:
        leaves.append(value)
    elif kind is tuple or kind is list or kind is dict:
        for item in value.values() if kind is dict else value:
            if type(item) in _LEAVES:
                leaves.append(item)
            else:
                _gather(item, leaves)
    else:
        leaves += _pytree.tree_leaves(value)


def tree_tensors(value: Any) -> list[Any]:
    """Return the tensors among the leaves of a tree."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def tree_paths(tree: Any) -> list[tuple[str, Any]]:
    """Return (path such as ``[0]['k']``, leaf) of each leaf, in the order of ``tree_leaves``."""
    if type(tree) in _LEAVES:
        return [("", tree)]
    try:
        rows, _ = _pytree.tree_flatten_with_path(tree)
    except RecursionError:
        raise ArgumentsError.no_end() from None
    return [(_pytree.keystr(path), leaf) for path, leaf in rows]


def tree_spec(tree: Any) -> Any:
    """Return the structure of a tree; equal for trees of equal structure."""
    return _pytree.tree_structure(tree)


def tree_unflatten(leaves: list[Any], spec: Any) -> Any:
    return _pytree.tree_unflatten(leaves, spec)


def is_container(value: Any) -> bool:
    """Return whether a value is a list, tuple, dict or another container known to torch."""
    return type(value) not in _LEAVES and not _pytree.tree_is_leaf(value)


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return ``tree`` with ``function`` applied to each leaf, in the order of ``tree_leaves``."""
    kind = type(tree)
    if kind in _LEAVES:
        return function(tree)
    if kind is tuple or kind is list:
        items = [function(x) if type(x) in _LEAVES else tree_map(function, x) for x in tree]
        return tuple(items) if kind is tuple else items
    if kind is dict:
        return {key: tree_map(function, item) for key, item in tree.items()}
    return _pytree.tree_map(function, tree)


def all_op_names() -> list[str]:
    """Return all operators, as ``ns::op``, ``ns::op.overload`` or ``higher_order::op``."""
    higher_order = (f"higher_order::{name}" for name in torch._ops._higher_order_ops)
    return [*torch._C._dispatch_get_all_op_names(), *higher_order]


def custom_op_overload(obj: Any) -> Any:
    """Return the operator of a function of ``torch.library.custom_op``, else None."""
    return obj._opoverload if isinstance(obj, torch.library.CustomOpDef) else None


def is_op(obj: Any) -> bool:
    """Return whether ``obj`` is an op of ``torch.ops``: overload, packet or higher-order op."""
    return isinstance(obj, (OpOverload, OpOverloadPacket, HigherOrderOperator))


def is_higher_order_op(obj: Any) -> bool:
    """Return whether ``obj`` is an op of ``torch.ops.higher_order``."""
    return isinstance(obj, HigherOrderOperator)


def op_names(op: Any) -> tuple[str, ...]:
    """Return the registry names of ``op``, the most specific first."""
    if isinstance(op, (OpOverload, OpOverloadPacket)):
        namespace, name, *overload = str(op).split(".")
        packet = f"{namespace}::{name}"
        if overload:
            return (f"{packet}.{overload[0]}", packet)
        return (packet, *(f"{packet}.{overload}" for overload in op.overloads()))
    if is_higher_order_op(op):
        return (f"higher_order::{op.name()}",)
    return ()


_PYTHON_OPERATORS: Mapping[Any, str] = {
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
    """Return the ``aten::op`` that a function or method of torch calls, else None."""
    # ``torch.sigmoid``, ``torch.Tensor.sigmoid``, ``torch.nn.functional.sigmoid``, the name of the
    # method and the op have one name; ``sigmoid_`` has another.
    if isinstance(target, str):
        name = target
    elif is_op(target):
        packet = op_names(target)[-1 if isinstance(target, OpOverload) else 0]
        return packet if packet.startswith("aten::") else None
    elif isinstance(target, BuiltinFunctionType) and target in _PYTHON_OPERATORS:
        name = _PYTHON_OPERATORS[target]
    elif not _module(target).startswith("torch"):
        return None
    else:
        name = getattr(target, "__name__", "")
    return f"aten::{name}" if _is_aten(name) else None


@cache
def _is_aten(name: str) -> bool:
    return not name.startswith("__") and hasattr(torch.ops.aten, name)


def _module(function: Any) -> str:
    """Return the module of a function, or of the type of a method."""
    return str(getattr(getattr(function, "__objclass__", None) or function, "__module__", None))


# Modules whose functions do what the ops of their names do; ``torch.nn.init.normal`` does not.
_BINDINGS = {
    "_operator",
    "torch",
    "torch.functional",
    "torch.nn.functional",
    "torch._tensor",
    "torch._C",
    *(f"torch._C._{name}" for name in ("fft", "linalg", "nested", "nn", "sparse", "special")),
}


def aten_overloads(target: Any) -> tuple[Any, ...]:
    """Return the overloads of the op of which a function or method of torch is the binding."""
    name = aten_name(target) if isinstance(target, str) or _module(target) in _BINDINGS else None
    return () if name is None else _overloads(name)


@cache
def _overloads(name: str) -> tuple[Any, ...]:
    return op_overloads(getattr(torch.ops.aten, name[len("aten::") :]))


@cache
def _defaults(function: Any) -> Mapping[str, Any]:
    """Return the defaults of positional parameters of a torch function; a builtin has its op's."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        arguments = [op._schema.arguments for op in aten_overloads(function)[:1]]
        return {a.name: a.default_value for row in arguments for a in row if not a.kwarg_only}
    positional = [p for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]
    return {p.name: None if p.default is p.empty else p.default for p in positional}


def given_argument(node: fx.Node, name: str) -> Any:
    """Return an argument of a call by its name, or its default; None without one."""
    # No parameters of the user's functions, which the cache would keep alive.
    defaults = _defaults(node.target) if _module(node.target).partition(".")[0] == "torch" else {}
    arguments = {**dict(zip(defaults, node.args, strict=False)), **node.kwargs}
    return arguments.get(name, defaults.get(name))


def is_arithmetic(target: Any) -> bool:
    """Return whether a function of a graph only computes a number from numbers."""
    name = getattr(target, "__name__", "")
    return is_python_operator(target) or (name.startswith("sym_") and hasattr(torch, name))


def is_python_operator(target: Any) -> bool:
    """Return whether a function is one such as ``operator.add``."""
    return getattr(target, "__module__", None) == "_operator"


def op_overloads(op: Any) -> tuple[Any, ...]:
    """Return the overloads that a call of ``op`` may reach."""
    if isinstance(op, OpOverload):
        return (op,)
    if isinstance(op, OpOverloadPacket):
        return tuple(getattr(op, name) for name in op.overloads())
    return ()


def returns_nothing(op: Any) -> bool:
    """Return whether the schema of ``op`` has no results."""
    return isinstance(op, OpOverload) and not op._schema.returns


def written_arguments(op: Any) -> Iterator[tuple[int, str]]:
    """Yield the position and name of each argument that ``op`` mutates by its schema."""
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield position, argument.name


def written_tensors(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a call mutates by the schema of ``op``."""
    tensors: list[torch.Tensor] = []
    for overload in op_overloads(op):
        if overload.namespace == "c10d":  # its schemas lack the mutations
            return tree_tensors((args, kwargs))
        for position, name in written_arguments(overload):
            tensors += tree_tensors(args[position] if position < len(args) else kwargs.get(name))
    return tensors


def add_note(error: BaseException, text: str) -> None:
    """Add a line below the traceback; Python 3.10 shows none."""
    if hasattr(error, "add_note"):
        error.add_note(text)


def process_group_backend(group: Any, device_type: str | None = None) -> str | None:
    """Return the backend of a process group (or name) for a type of device; None if unknown."""
    import torch.distributed as dist

    if not dist.is_available():
        return None
    try:
        if isinstance(group, torch.ScriptObject):  # the form in which ops of c10d take it
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
    """Return a function that calls an op of torch.distributed and waits for it; else None."""
    namespace = getattr(op, "namespace", None)
    if namespace == "c10d":
        return lambda *args, **kwargs: _done(op(*args, **kwargs))
    if namespace != "_c10d_functional":
        return None
    wait = getattr(torch.ops, namespace).wait_tensor.default
    if op is wait:
        return None

    def call(*args: Any, **kwargs: Any) -> Any:
        result = op(*args, **kwargs)
        return tree_map(lambda x: wait(x) if isinstance(x, torch.Tensor) else x, result)

    return call


def _done(result: Any) -> Any:
    """Wait for the work of a ``c10d`` op, and return its result."""
    from torch.distributed import Work

    for leaf in result if isinstance(result, tuple) else (result,):
        if isinstance(leaf, torch.ScriptObject):
            Work.unbox(leaf).wait()
    return result


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error is from a collective whose peer has ended or does not answer."""
    import torch.distributed as dist

    # Gloo raises RuntimeError, and its text starts with the source file of the transport. NCCL
    # raises the same class for wrong arguments.
    if isinstance(error, dist.DistNetworkError):
        return True
    texts = ("gloo/transport/", "ncclRemoteError", "Watchdog caught collective operation timeout")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def process_group_store(group: Any) -> Any:
    """Return the key-value store of the ranks of a group; None without one."""
    return group.get_group_store()


# Whether any thread is inside of ``torch.autograd.forward_ad.dual_level()``, for generated code:
# the expression, and the module that it names. Reading it costs 0.04 us.
FORWARD_GRADIENTS = ("forward_ad._current_level >= 0", forward_ad)


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a wrapper of functorch's ``vmap`` or ``grad``."""
    return torch.func.debug_unwrap(tensor, recurse=False) is not tensor


def has_tangent(values: Any) -> bool:
    """Return whether a tensor in nested values has a forward gradient."""
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tree_tensors(values))


class DispatchMode(TorchDispatchMode):
    """A dispatch mode for all calls below autograd in this thread, between two switches."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # False: Dynamo skips every compiled frame under this mode

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if types and any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a subclass such as DTensor calls ops on its plain tensors
        if any(type(mode) is FakeTensorMode for mode in _get_current_dispatch_mode_stack()):
            return func(*args, **(kwargs or {}))  # fakes that compute shapes, such as a DTensor's
        if is_named(func, "invoke_subgraph"):  # its kernel refuses to run under a mode
            body, _, *operands = args
            with self:
                return body(*operands)
        # Torch switches autocast off for a mode; a kernel that calls other ops would miss it.
        kinds = _kinds_of_autocast(func)
        state = _autocast_of_caller(kinds) if kinds else {}
        if not state:
            return self.on_call(func, args, kwargs or {})
        with autocast_on(state):
            return self.on_call(func, args, kwargs or {})

    def on_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call; the mode is off inside."""
        raise NotImplementedError

    def passes_over(self, inputs: Sequence[Any], boundaries: Any) -> bool:
        """Return whether it may be off in a compiled piece of torch's ops; note the inputs.

        ``boundaries`` are those where its graph was split.
        """
        return False

    def switch_on(self) -> None:
        self.__enter__()

    def switch_off(self) -> None:
        self.__exit__(None, None, None)


def top_mode() -> Any:
    """Return the innermost dispatch mode, or None."""
    modes = _get_current_dispatch_mode_stack()
    return modes[-1] if modes else None


def without_modes() -> AbstractContextManager[Any]:
    """Return a context without dispatch modes."""
    from torch.utils._python_dispatch import _disable_current_modes

    return nullcontext() if top_mode() is None else _disable_current_modes()


_COMPILED_REGION = "inductor_compiled_code"


def compiled_region(
    op: Any, args: tuple[Any, ...]
) -> tuple[Callable[[list[Any]], Any], Any] | None:
    """Return (callable, inputs) of a call of an Inductor-compiled region, else None."""
    # Pieces are compiled with ``wrap_inductor_compiled_regions``, so that a dispatch mode gets
    # their call as one higher-order op. The callable skips that op: a mode gets the ops inside.
    if not is_named(op, _COMPILED_REGION):
        return None
    kernel = op.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd]
    return (lambda inputs: kernel(args[0], inputs)), args[1]


def is_named(op: Any, name: str) -> bool:
    """Return whether ``op`` is the higher-order op of this name."""
    return is_higher_order_op(op) and op.name() == name


def python_kernel(op: Any, device_type: str = "cpu") -> Callable[..., Any] | None:
    """Return the Python kernel of an op on a device, which skips the dispatcher; else None."""
    if isinstance(op, OpOverload):
        return _library_kernel(op, device_type.upper())
    if not is_higher_order_op(op):
        return None
    if is_named(op, _COMPILED_REGION):  # its body launches kernels that no mode sees
        return None
    key = torch._C.DispatchKey
    own = getattr(key, device_type.upper())
    kernels: Mapping[Any, Callable[..., Any]] = op.py_kernels
    return kernels.get(key.CompositeExplicitAutograd) or kernels.get(own)


def _library_kernel(op: Any, own: str) -> Callable[..., Any] | None:
    """Return the kernel that ``torch.library`` registered; called at each op, so reads no keys."""
    start = f"{op.namespace}/{op.name().rpartition('::')[2]}/"
    for backend in (own, _EXPLICIT):
        if start + backend in torch.library._impls:
            key = getattr(torch._C.DispatchKey, backend)
            return lambda *args, **kwargs: op._op_dk(key, *args, **kwargs)
    return None


_EXPLICIT = "CompositeExplicitAutograd"


def functionalized_op(op: Any, args: tuple[Any, ...]) -> Any:
    """Return the op inside of a call of ``auto_functionalized``; None for any other call."""
    if isinstance(op, OpOverload):
        return None
    if is_named(op, "auto_functionalized") or is_named(op, "auto_functionalized_v2"):
        return args[0]
    return None


def below_autograd() -> AbstractContextManager[Any]:
    """Return a context in which ops skip autograd: a dispatch mode gets composite ops whole."""
    # Code that Dynamo compiled outside of it is compiled a second time inside.
    return torch._C._AutoDispatchBelowAutograd()


def uncompiled() -> AbstractContextManager[Any]:
    """Return a context in which ``torch.compile`` has no effect; no context in compiled code."""
    return _UNCOMPILED


class _Uncompiled:
    """Share torch's process-wide stance: the first thread sets it, the last restores it."""

    # Without a count, two overlapping threads would leave the process uncompiled.

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
    """Return the function that ``torch.compile`` wrapped; None for modules and all else."""
    # Decorators around it (``functools.wraps``) are passed through.
    seen: list[Any] = []
    while isinstance(function, FunctionType) and hasattr(function, "__wrapped__"):
        if function.__code__ is code_of_compiled_functions():
            return function.__wrapped__
        if function in seen:
            return None  # the function wraps itself
        seen.append(function)
        function = function.__wrapped__
    return None


def original_of(compiled: Any) -> Any:
    """Return the module that ``torch.compile`` wrapped; None for anything else."""
    if not isinstance(compiled, torch.nn.Module):
        return None
    # Not by getattr: a module composes an error for each name that it lacks.
    return dict(compiled.named_children()).get("_orig_mod")


@cache
def code_of_compiled_functions() -> CodeType:
    """Return the code object that all functions of ``torch.compile`` share."""
    function: Any = torch.compile(operator.neg, backend="eager")
    code: CodeType = function.__code__
    return code


def holds_compiled_code(function: Any) -> bool:
    """Return whether a function, a module or one of its submodules is or has compiled code."""
    owner = getattr(function, "__self__", function)
    if compiled_from(function) is not None:
        return True
    if not isinstance(owner, torch.nn.Module):
        return False
    for module in owner.modules():
        if original_of(module) is not None:
            return True
        functions = [value for value in vars(module).values() if type(value) is FunctionType]
        if any(compiled_from(function) is not None for function in functions):
            return True
    return False


def functorch_transform() -> str | None:
    """Return the innermost running transform of ``torch.func``, such as ``Vmap``, or None."""
    transform = torch._C._functorch.peek_interpreter_stack()
    return None if transform is None else str(transform.key()).rpartition(".")[2]


def draws_random(op: Any) -> bool:
    """Return whether an op has the tag of ops that draw random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


def reads_on_host(op: Any) -> bool:
    """Return whether an op has a tag of ops whose result, or its size, depends on data."""
    tags = getattr(op, "tags", ())
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


def inside_backward() -> bool:
    """Return whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


def any_autocast() -> bool:
    """Return whether autocast is on for a type of device that graphs are captured on."""
    return torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")


def autocast_state() -> dict[str, torch.dtype]:
    """Return the dtype of autocast, by the type of each device where it is on."""
    on = (kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))
    return {kind: torch.get_autocast_dtype(kind) for kind in on}


@contextmanager
def own_cached_casts(compiled: bool) -> Iterator[None]:
    """Separate autocast's cache of casts between inside and outside of the context."""
    # Autocast caches casts of parameters until its outermost context ends: a graph that reads such
    # a cast would read freed memory at its replays, and code after a capture would read a cast that
    # the graph has not computed yet. The cache is shared by all threads, so it is off inside,
    # unless code inside is ``compiled``: Dynamo's guards compare the setting, and would compile it
    # again.

    was_on = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    if not compiled:
        torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_on)
        torch.clear_autocast_cache()


# The part of ``scaled_dot_product_attention`` whose kernel calls an op that autocast casts.
_UNDER_AN_AUTOCAST_KERNEL = frozenset({"aten::_safe_softmax"})


@cache
def _kinds_of_autocast(op: Any) -> tuple[str, ...]:
    """Return the types of devices where the kernel of an op sees the autocast of its caller."""
    # Not below an autocast kernel: it casts, and calls the op again with autocast off. An op that
    # has one may also come from a composite op that has one (``bmm`` of attention), where its
    # inputs must stay as they are. Torch leaves autocast on around higher-order ops.
    if is_higher_order_op(op) or op.name() in _UNDER_AN_AUTOCAST_KERNEL:
        return ()
    keys = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}
    return tuple(kind for kind, key in keys.items() if not op.has_kernel_for_dispatch_key(key))


def _autocast_of_caller(kinds: tuple[str, ...]) -> dict[str, torch.dtype]:
    """Return :func:`autocast_state` of the code whose op a dispatch mode gets, for some devices."""
    with torch._C._RestorePythonTLSSnapshot():
        state = autocast_state() if any_autocast() else {}
    return {kind: dtype for kind, dtype in state.items() if kind in kinds}


@contextmanager
def autocast_on(state: dict[str, torch.dtype]) -> Iterator[None]:
    """Switch autocast on as in a result of :func:`autocast_state`."""
    cached = torch.is_autocast_cache_enabled()
    with ExitStack() as stack:
        for kind, dtype in state.items():
            stack.enter_context(torch.autocast(kind, dtype, cache_enabled=cached))
        yield


# Returns a number that rises whenever a hook is registered anywhere; in C.
hooks_registered: Callable[[], int] = partial(operator.attrgetter("next_id"), RemovableHandle)


def has_global_hooks() -> bool:
    """Return whether there are hooks of all modules."""
    return bool(torch.nn.modules.module._has_any_global_hook())


def hooks_of(called: Any) -> tuple[Any, ...]:
    """Return the live dictionaries of the hooks of a module; empty for other callables."""
    if not isinstance(called, torch.nn.Module):
        return ()
    return (called._forward_pre_hooks, called._forward_hooks)


def annotate(mark: dict[str, Any]) -> AbstractContextManager[Any]:
    """Return a context that updates ``node.meta["custom"]`` of each traced node with ``mark``."""
    import torch.fx.traceback

    return torch.fx.traceback.annotate(mark)


def raised_while_tracing(error_of: Callable[..., Exception]) -> Callable[..., Any]:
    """Return a function that raises ``error_of(...)`` to the caller of the traced function."""
    # Dynamo traces neither it nor what it calls, and passes on errors of ``ShortenTraceback``. An
    # error that traced code raises makes Dynamo run the function without any graph instead.

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        from torch import _dynamo
        from torch._dynamo.exc import ShortenTraceback

        error = error_of(*args, **kwargs)
        kind: Any = type(error)
        kind = type(kind.__name__, (kind, ShortenTraceback), {"__module__": kind.__module__})
        passed_on = kind(str(error), first_useful_frame=sys._getframe())
        others = error_of.__code__.co_filename, os.path.dirname(_dynamo.__file__)
        stack = torch._guards.TracingContext.extract_stack()
        users = [frame for frame in stack if not frame.filename.startswith(others)]
        vars(passed_on).update(vars(error), explanation=str(error), real_stack=users)
        raise passed_on

    refuse._dynamo_marked_constant = True
    return refuse


# ---------------------------------------------------------------- ops that read on the host


Arguments = Mapping[str, Any]


class _Row(NamedTuple):
    reads: Callable[[Arguments], bool]  # decides by the arguments of a call, for ops with any tags
    in_inductor: bool = False  # whether code of Inductor calls the same kernel


def _always(arguments: Arguments) -> bool:
    return True


def _has_tensor(*names: str) -> Callable[[Arguments], bool]:
    return lambda arguments: any(isinstance(arguments.get(n), torch.Tensor) for n in names)


def _of_singular_values(order: Any) -> bool:
    return order == "nuc" or (isinstance(order, (int, float)) and abs(order) == 2)


def _norm_of_singular_values(arguments: Arguments) -> bool:
    """Return whether ``linalg.norm`` reads; the norm of a vector does not."""
    dims = arguments["dim"]
    if dims is None:
        dims = next((tensor.shape for tensor in tree_tensors(list(arguments.values()))), ())
    return not isinstance(dims, int) and len(dims) == 2 and _of_singular_values(arguments["ord"])


def _finds_range(arguments: Arguments) -> bool:
    """Return whether ``histc`` computes the range of its bins from data."""
    ends = arguments["min"], arguments["max"]
    return all(isinstance(end, (int, float)) for end in ends) and ends[0] == ends[1]


def _sorts(arguments: Arguments) -> bool:
    """Return whether ``isin`` finds the unique elements first: of many, see ATen's ``isin``."""
    elements, others = arguments.get("elements"), arguments.get("test_elements")
    if not (isinstance(elements, torch.Tensor) and isinstance(others, torch.Tensor)):
        return False
    few = others.numel() < 10 * elements.numel() ** 0.145
    return not few and not arguments["assume_unique"]


_LINALG = (
    "_linalg_check_errors _linalg_eigh _linalg_eigvals _linalg_svd cholesky inverse linalg_cholesky"
    " linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_inv linalg_ldl_factor"
    " linalg_ldl_factor_ex linalg_lu_factor linalg_matrix_exp linalg_matrix_rank linalg_pinv"
    " linalg_solve linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve matrix_exp"
    " cholesky_inverse nuclear_norm pinverse svd"
)
_WITH_CHECKS = (
    "_linalg_solve_ex linalg_cholesky_ex linalg_inv_ex linalg_lu_factor_ex linalg_solve_ex"
)
_ROWS: Mapping[str, _Row] = {  # by names in ``torch.ops.aten``
    _LINALG: _Row(_always, in_inductor=True),
    _WITH_CHECKS: _Row(lambda a: a["check_errors"] is True, in_inductor=True),
    "matrix_power linalg_matrix_power": _Row(
        lambda a: isinstance(a["n"], int) and a["n"] < 0, in_inductor=True
    ),
    "linalg_cond": _Row(lambda a: a["p"] is None or _of_singular_values(a["p"]), in_inductor=True),
    "linalg_matrix_norm": _Row(lambda a: _of_singular_values(a["ord"]), in_inductor=True),
    "linalg_norm": _Row(_norm_of_singular_values, in_inductor=True),
    "norm": _Row(lambda a: a["p"] == "nuc", in_inductor=True),
    "histc": _Row(_finds_range, in_inductor=True),
    # Inductor computes what follows in another way, or Dynamo breaks its graph there.
    "masked_fill masked_fill_ index_fill index_fill_": _Row(_has_tensor("value")),
    "linspace logspace": _Row(_has_tensor("start", "end")),
    "narrow": _Row(_has_tensor("start")),
    "normal": _Row(_has_tensor("std")),
    "combinations": _Row(lambda a: torch.__version__ < "2.14"),  # since then of nonzero_static
    "corrcoef cov ctc_loss is_nonzero istft": _Row(_always),
    "isin": _Row(_sorts),
    "one_hot": _Row(lambda a: a["num_classes"] == -1),
}
_BY_NAME = {name: row for names, row in _ROWS.items() for name in names.split()}


def call_reads(
    op: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    is_number: Callable[[torch.Tensor], bool] | None = None,
) -> bool:
    """Return whether a capture on CUDA refuses a call of an op, as it reads values on the host.

    ``is_number`` returns whether a tensor is a 0-dim tensor on the CPU, which may be read.
    """
    row = _row(op)
    if row is None and not reads_on_host(op):
        return False
    if is_number is not None:
        tensors = tree_tensors((args, dict(kwargs)))
        numbers = {id(tensor) for tensor in tensors if is_number(tensor)}
        if numbers and numbers == set(map(id, tensors)):
            return False
        args, kwargs = tree_map(lambda x: 0.0 if id(x) in numbers else x, (args, dict(kwargs)))
    return row is None or row.reads(_by_name(op, args, kwargs))


def kernel_reads(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return the same for a call in an FX graph, for kernels that Inductor's code calls, too."""
    if target in (torch.svd_lowrank, torch.pca_lowrank):  # Python, which calls ``linalg.svd``
        return True
    overloads = op_overloads(target) or aten_overloads(target)
    row = _row(overloads[0]) if overloads else None
    return row is not None and row.in_inductor and row.reads(_by_name(overloads[0], args, kwargs))


def _row(op: Any) -> _Row | None:
    namespace, _, name = str(getattr(op, "overloadpacket", op)).partition(".")
    return _BY_NAME.get(name) if namespace == "aten" else None


def _by_name(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
    arguments = {a.name: a.default_value for a in op._schema.arguments}
    return {**arguments, **dict(zip(arguments, args, strict=False)), **kwargs}
