"""What the nodes of a saved graph call, by names that another process finds.

A name is kept only if looking it up gives the same object, here and now.
"""

import importlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from cgcompile import compat
from cgcompile.errors import SavedGraphError

# Higher-order ops that are told all by their arguments. Others may refer to tables of this process,
# as Triton kernels do, or hold objects that no file can.
_HIGHER_ORDER = frozenset(
    {
        "associative_scan",
        "auto_functionalized",
        "auto_functionalized_v2",
        "autograd_function_apply",
        "checkpoint",
        "cond",
        "flex_attention",
        "flex_attention_backward",
        "hints_wrapper",
        "invoke_subgraph",
        "map_impl",
        "out_dtype",
        "scan",
        "strict_mode",
        "tag_activation_checkpoint",
        "while_loop",
        "wrap",
        "wrap_activation_checkpoint",
        "wrap_with_autocast",
        "wrap_with_set_grad_enabled",
    }
)
# Modules whose functions take a number that means an object of this process.
_OF_THIS_PROCESS = ("torch._dynamo.graph_bytecode_inputs", "__main__", "__mp_main__")
_OPS_OF_THIS_PROCESS = ("streams::",)


def saved_target(target: Any) -> tuple[str, ...]:
    """The saved form of what a ``call_function`` node calls.

    Raises:
        ValueError: nothing that another process could find; the text says why.
    """
    if compat.is_higher_order_op(target):
        name = compat.op_names(target)[0].partition("::")[2]
        if name not in _HIGHER_ORDER or compat.higher_order_op(name) is not target:
            raise ValueError(f"the higher-order op {name} may refer to objects of this process")
        return ("higher", name, type(target).__module__)
    if compat.is_op(target):
        name = compat.op_names(target)[0]
        if name.startswith(_OPS_OF_THIS_PROCESS) or compat.op_of_name(name) is not target:
            raise ValueError(f"the op {name} means nothing to another process")
        return ("op", name, compat.op_schema(target))
    return ("function", *_saved_function(target))


def _saved_function(target: Any) -> tuple[str, str]:
    module = getattr(target, "__module__", None)
    name = getattr(target, "__name__", None) or type(target).__name__
    qualified = getattr(target, "__qualname__", name)
    if module in _OF_THIS_PROCESS:
        raise ValueError(f"{qualified} is a function of {module}, which is another one elsewhere")
    for candidate in _candidates(module, name, qualified):
        if _found(*candidate) is target:
            return candidate
    raise ValueError(f"{qualified} of {module or 'no module'} cannot be imported by its name")


def _candidates(module: str | None, name: str, qualified: str) -> Iterator[tuple[str, str]]:
    if module:
        yield module, qualified
        yield module, name  # functions that pybind made have another qualified name
    for other in ("torch", "torch.nn.functional", "torch.Tensor"):  # builtins, method descriptors
        yield other, name


@cache
def _module(name: str) -> Any:
    if name == "torch.Tensor":
        return _found("torch", "Tensor")
    try:
        return importlib.import_module(name)
    except Exception:  # whatever a module raises that is imported
        return None


def _found(module: str, path: str) -> Any:
    found = _module(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def loaded_target(saved: tuple[str, ...], node: str) -> Callable[..., Any]:
    """What :func:`saved_target` saved.

    Raises:
        SavedGraphError: it does not exist here; ``node`` is for the message.
    """
    kind, name = saved[0], saved[1]
    if kind == "op":
        found = compat.op_of_name(name)
        if found is not None and compat.op_schema(found) != saved[2]:
            raise SavedGraphError.differs(
                node=node, expected=saved[2], found=compat.op_schema(found)
            )
    elif kind == "higher":
        found = compat.higher_order_op(name)
        if found is None and _module(saved[2]) is not None:
            found = compat.higher_order_op(name)
    else:
        found = _found(name, saved[2])
        name = f"{name}.{saved[2]}"
    if not callable(found):
        raise SavedGraphError.missing(node=node, name=name)
    made: Callable[..., Any] = found
    return made


def saved_class(kind: type) -> tuple[str, str]:
    """(module, qualified name) of an enum's class; raises ValueError like :func:`saved_target`."""
    return _saved_function(kind)


def loaded_class(module: str, name: str) -> Any:
    return _found(module, name)
