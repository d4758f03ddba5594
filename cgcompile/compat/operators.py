"""Operators: their names, overloads and schemas. See ``cgcompile/compat/__init__.py``."""

import inspect
import operator
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from cgcompile.compat.trees import tree_map, tree_tensors


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
    """The backend of a process group given by object or registered name; None if unknown.

    Args:
        group: the group.
        device_type: for tensors of this device; left out: of the group as a whole.
    """
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
