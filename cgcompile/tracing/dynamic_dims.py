"""Which dimensions of the arguments vary from call to call: :class:`DynamicDims`.

They are given by the name of the parameter, or with the annotation of the parameter::

    def forward(self, x: Annotated[torch.Tensor, DynamicDim(0, "tokens")]): ...

The rule: a dimension that is not named here is the same in all calls that one trace serves.
"""

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from cgcompile import torch_compat as compat
from cgcompile.errors import ArgumentsError, ConfigError, TraceError
from cgcompile.settings import require_fields
from cgcompile.tracing.argument_guards import Shapes


@dataclass(frozen=True)
class DynamicDim:
    """A dimension that varies, for ``typing.Annotated``.

    Args:
        dim: which one; negative from the end.
        name: dimensions of equal name have equal sizes in each call.
    """

    dim: int
    name: str | None = None

    def __post_init__(self) -> None:
        require_fields(self)


Dims = dict[str, tuple[DynamicDim, ...]]  # by parameter


class DynamicDims:
    """The dynamic dimensions of one function.

    Args:
        given: by name of the parameter: a dimension, several of them, or their names by dimension.
            If the parameter is a tuple, list or dict, they are those of each tensor in it.
        signature: of the function.
        function: the function, for its annotations.

    Raises:
        ConfigError: a parameter that does not exist, or something that is no dimension.
    """

    def __init__(
        self,
        given: Mapping[str, Any] | None,
        signature: inspect.Signature,
        function: Callable[..., Any],
    ) -> None:
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError.bad_value(
                name="dynamic_dims",
                where="compile",
                value=given,
                expected="dimensions by parameter, such as {'x': 0}",
            )
        self.by_name: Dims = _annotated(function)
        known = list(signature.parameters)
        takes_any = any(
            each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values()
        )
        for name, value in (given or {}).items():
            if name not in known and not takes_any:
                raise ConfigError.unknown_parameter(name=name, known=known)
            self.by_name[name] = _parsed(name, value)

    def knows(self, name: str) -> bool:
        """Whether something was said of a parameter."""
        return name in self.by_name

    def found(self, arguments: Iterable[tuple[str, str, Any]]) -> list["Found"]:
        """The dynamic dimensions of the tensors of a call.

        Args:
            arguments: (name of the parameter, where Dynamo finds it, what it is).

        Raises:
            TraceError: a tensor without such a dimension; equal names, but sizes that differ.
        """
        found = [
            _found(each, leaf, f"{name}{path}", f"{source}{path}")
            for name, source, value in arguments
            for path, leaf in compat.tree_paths(value)
            if isinstance(leaf, torch.Tensor)
            for each in self.by_name.get(name, ())
        ]
        first: dict[str, Found] = {}
        for each in found:
            if each.name is not None:
                other = first.setdefault(each.name, each)
                if each.size != other.size:
                    raise TraceError.sizes_differ(name=each.name, one=other.text, other=each.text)
        return found


@dataclass(frozen=True, eq=False)
class Found:
    """A dynamic dimension of one call.

    Attributes:
        tensor: what has it.
        dim: which one, from the front.
        name: dimensions of equal name have equal sizes.
        path: the argument, for people.
        source: the argument, for Dynamo.
    """

    tensor: torch.Tensor
    dim: int
    name: str | None
    path: str
    source: str

    @property
    def size(self) -> int:
        return self.tensor.shape[self.dim]

    @property
    def text(self) -> str:
        return f"{self.path}.shape[{self.dim}] is {self.size}"


def _found(each: DynamicDim, tensor: torch.Tensor, path: str, source: str) -> Found:
    dim = each.dim + tensor.dim() if each.dim < 0 else each.dim
    if not 0 <= dim < tensor.dim():
        raise TraceError.no_such_dimension(path=path, dim=each.dim, shape=str(list(tensor.shape)))
    return Found(tensor, dim, each.name, path, source)


def _annotated(function: Callable[..., Any]) -> Dims:
    found: Dims = {}
    hints: dict[str, Any] = {}
    for name, hint in getattr(function, "__annotations__", {}).items():
        one = types.SimpleNamespace(__annotations__={name: hint})
        scope = getattr(inspect.unwrap(function), "__globals__", {})
        try:
            hints |= typing.get_type_hints(one, globalns=scope, include_extras=True)
        except Exception:  # annotations may name what only type checkers import
            hints[name] = hint
    for name, hint in hints.items():
        dims = tuple(each for each in _metadata(hint) if isinstance(each, DynamicDim))
        if dims:
            found[name] = dims
    return found


def _metadata(hint: Any) -> list[Any]:
    """What ``Annotated`` says, also inside of ``Optional``."""
    found = list(getattr(hint, "__metadata__", ()))
    for part in typing.get_args(hint):
        if not isinstance(part, DynamicDim):
            found += _metadata(part)
    return found


def _parsed(name: str, value: Any) -> tuple[DynamicDim, ...]:
    if isinstance(value, DynamicDim):
        return (value,)
    try:
        if isinstance(value, Mapping):
            items = [DynamicDim(dim, label) for dim, label in value.items()]
        elif isinstance(value, Sequence) and not isinstance(value, str):
            items = [each if isinstance(each, DynamicDim) else DynamicDim(each) for each in value]
        else:
            items = [DynamicDim(value)]
    except ConfigError:
        expected = "a dimension, several of them, or names by dimension such as {0: 'tokens'}"
        raise ConfigError.bad_value(
            name=f"dynamic_dims[{name!r}]", where="compile", value=value, expected=expected
        ) from None
    return tuple(items)


def enlarged(tensor: torch.Tensor, sizes: Mapping[int, int]) -> torch.Tensor:
    """A tensor like this one, with other sizes and memory of its own; nothing is copied.

    Dimensions lie in memory in the same order.
    """
    shape = [sizes.get(dim, size) for dim, size in enumerate(tensor.shape)]
    order = sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), -dim))
    strides, step = [0] * tensor.dim(), 1
    for dim in order:
        strides[dim] = step
        step *= max(1, shape[dim])
    made = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.requires_grad_(tensor.requires_grad)


def with_two_rows(
    args: tuple[Any, ...], kwargs: dict[str, Any], dims: list[Found]
) -> tuple[tuple[Any, ...], dict[str, Any], list[Found]]:
    """A call with dynamic sizes of 0 and 1 made 2; what cannot be replaced is not dynamic."""
    made: dict[int, torch.Tensor] = {}
    for each in dims:
        sizes = {other.dim: 2 for other in dims if other.tensor is each.tensor and other.size < 2}
        if sizes and id(each.tensor) not in made:
            made[id(each.tensor)] = enlarged(each.tensor, sizes)
    reached: set[int] = set()

    def replaced(value: Any) -> Any:
        if id(value) in made:
            reached.add(id(value))
            return made[id(value)]
        if type(value) in (tuple, list):
            return type(value)(map(replaced, value))
        if type(value) is dict:
            return {key: replaced(item) for key, item in value.items()}
        return value

    larger = replaced(args), replaced(kwargs)
    kept = [each for each in dims if each.size > 1 or id(each.tensor) in reached]
    return *larger, [replace(each, tensor=replaced(each.tensor)) for each in kept]


def free_sizes(dims: list[Found]) -> dict[str, tuple[int | str, ...]]:
    """The sizes of tensors with dynamic dimensions, for those that a trace did not look at."""
    found: dict[str, list[int | str]] = {}
    for number, each in enumerate(dims):
        sizes = found.setdefault(each.source, list(each.tensor.shape))
        sizes[each.dim] = f"free_{each.name or number}"
    return {source: tuple(sizes) for source, sizes in found.items()}


def check_dims(name: str, dims: list[Found], shapes: Shapes) -> None:
    """A dimension that was to vary and was taken for a constant would be wrong silently."""
    for each in dims:
        sizes = shapes.get(each.source)
        if sizes is not None and isinstance(sizes[each.dim], int):
            raise TraceError.fixed(name=name, dim=each.text)


def parameter_kinds(signature: inspect.Signature) -> tuple[list[str], str, str]:
    """The names of parameters by position, of ``*args`` and of ``**kwargs``."""
    parameters = signature.parameters.values()
    positional = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "")
    anything = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), "")
    return positional, rest, anything


def bind_arguments(
    name: str,
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    bound: Any = None,
) -> inspect.BoundArguments:
    """The arguments of a call by the names of the parameters.

    Args:
        name: of what is called, for the message.
        signature: what it takes.
        args: of the call.
        kwargs: of the call.
        bound: what the first parameter is bound to; None: the call gives it.

    Raises:
        ArgumentsError: it does not take these.
    """
    if bound is not None:
        own = list(signature.parameters.values())
        takes_all = own[0].kind is inspect.Parameter.VAR_POSITIONAL
        signature = signature.replace(parameters=own if takes_all else own[1:])
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentsError.refused(name=name, signature=str(signature), why=str(error)) from None


def argument_paths(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[Any, str]:
    """How Dynamo calls each argument of a call, by its position or keyword."""
    positional, rest, anything = parameter_kinds(signature)
    paths: dict[Any, str] = {}
    for position in range(len(args)):
        beyond = position - len(positional)
        paths[position] = f"L[{positional[position]!r}]" if beyond < 0 else f"L[{rest!r}][{beyond}]"
    for name in kwargs:
        known = name in signature.parameters
        paths[name] = f"L[{name!r}]" if known else f"L[{anything!r}][{name!r}]"
    return paths
