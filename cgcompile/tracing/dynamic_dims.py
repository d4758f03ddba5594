"""Which dimensions of the arguments vary from call to call: :class:`DynamicDims`.

A user names them by parameter, or in the annotation of the parameter::

    def forward(self, x: Annotated[torch.Tensor, DynamicDim(0, "tokens")]): ...

The rule: a dimension that is not named here is the same in all calls that one trace serves.
"""

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from cgcompile.config import CompilationConfig
from cgcompile.errors import ArgumentsError, ConfigError, TraceError
from cgcompile.settings import require_fields
from cgcompile.torch_compat import torch_ops
from cgcompile.tracing.argument_guards import Shapes


@dataclass(frozen=True)
class DynamicDim:
    """A dimension that varies, for ``typing.Annotated``.

    Args:
        dim: which one; negative from the end.
        name: dimensions of equal name have equal sizes in each call.

    Example:
        >>> from typing import Annotated
        >>> def scale(x: Annotated[torch.Tensor, cgcompile.DynamicDim(0, "tokens")]):
        ...     return x * 2
        >>> model = cgcompile.compile(scale)
        >>> [len(model(torch.ones(rows, 2))) for rows in (4, 6)], len(model.traces)
        ([4, 6], 1)
    """

    dim: int
    name: str | None = None

    def __post_init__(self) -> None:
        require_fields(self)


Dims = dict[str, tuple[DynamicDim, ...]]  # parameter -> dimensions


class DynamicDims:
    """The dynamic dimensions of one function, from ``dynamic_dims`` and from annotations."""

    def __init__(
        self,
        dims: Mapping[str, Any] | None,
        signature: inspect.Signature,
        function: Callable[..., Any],
        is_bound: bool = False,  # a call does not pass the first parameter
    ) -> None:
        if dims is not None and not isinstance(dims, Mapping):
            raise ConfigError.bad_value(
                name="dynamic_dims",
                where="compile",
                value=dims,
                expected="dimensions by parameter, such as {'x': 0}",
            )
        self.by_name: Dims = _annotated(function)
        known = list(signature.parameters)
        takes_any = bool(parameter_kinds(signature)[2])
        for name, value in (dims or {}).items():
            if name not in known and not takes_any:
                listed = known[is_bound:]
                raise ConfigError.unknown_parameter(name=name, known=listed)
            self.by_name[name] = _parsed(name, value)

    def of_call(self, arguments: Iterable[tuple[str, str, Any]]) -> list["TensorDim"]:
        """Return the dynamic dimensions of a call, from (parameter, Dynamo's path, value)."""
        dims = [
            _tensor_dim(dim, leaf, f"{name}{path}", f"{source}{path}")
            for name, source, value in arguments
            for path, leaf in torch_ops.tree_paths(value)
            if isinstance(leaf, torch.Tensor)
            for dim in self.by_name.get(name, ())
        ]
        first: dict[str, TensorDim] = {}
        for dim in dims:
            if dim.name is not None:
                other = first.setdefault(dim.name, dim)
                if dim.size != other.size:
                    raise TraceError.sizes_differ(name=dim.name, one=other.text, other=dim.text)
        return dims


@dataclass(frozen=True, eq=False)
class TensorDim:
    """A dynamic dimension of one tensor of one call."""

    tensor: torch.Tensor
    dim: int  # index, counted from the front
    name: str | None  # dimensions of one name have one size
    path: str  # path of the tensor, for messages
    source: str  # the same as Dynamo's source

    @property
    def size(self) -> int:
        return self.tensor.shape[self.dim]

    @property
    def text(self) -> str:
        return f"{self.path}.shape[{self.dim}] is {self.size}"


def _tensor_dim(dynamic: DynamicDim, tensor: torch.Tensor, path: str, source: str) -> "TensorDim":
    dim = dynamic.dim + tensor.dim() if dynamic.dim < 0 else dynamic.dim
    if not 0 <= dim < tensor.dim():
        shape = str(list(tensor.shape))
        raise TraceError.no_such_dimension(path=path, dim=dynamic.dim, shape=shape)
    return TensorDim(tensor, dim, dynamic.name, path, source)


def _annotated(function: Callable[..., Any]) -> Dims:
    annotated: Dims = {}
    scope = getattr(inspect.unwrap(function), "__globals__", {})
    for name, hint in getattr(function, "__annotations__", {}).items():
        one = types.SimpleNamespace(__annotations__={name: hint})
        with suppress(Exception):  # annotations may name types that only type checkers import
            hint = typing.get_type_hints(one, globalns=scope, include_extras=True)[name]
        dims = tuple(each for each in _metadata(hint) if isinstance(each, DynamicDim))
        if dims:
            annotated[name] = dims
    return annotated


def _metadata(hint: Any) -> list[Any]:
    """Return the metadata of ``Annotated``, also inside of ``Optional``."""
    metadata = list(getattr(hint, "__metadata__", ()))
    for part in typing.get_args(hint):
        if not isinstance(part, DynamicDim):
            metadata += _metadata(part)
    return metadata


def _parsed(name: str, value: Any) -> tuple[DynamicDim, ...]:
    several = isinstance(value, (Mapping, Sequence)) and not isinstance(value, str)
    dims = value if several else [value]
    labels = value if isinstance(value, Mapping) else {}
    try:
        if labels:
            return tuple(DynamicDim(dim, label) for dim, label in labels.items())
        return tuple(dim if isinstance(dim, DynamicDim) else DynamicDim(dim) for dim in dims)
    except ConfigError:
        expected = "a dimension, several of them, or names by dimension such as {0: 'tokens'}"
        raise ConfigError.bad_value(
            name=f"dynamic_dims[{name!r}]", where="compile", value=value, expected=expected
        ) from None


def _enlarged(tensor: torch.Tensor, sizes: Mapping[int, int]) -> torch.Tensor:
    """Return an uninitialised tensor with other sizes and the same order of strides."""
    shape = [sizes.get(dim, size) for dim, size in enumerate(tensor.shape)]
    order = sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), -dim))
    strides, step = [0] * tensor.dim(), 1
    for dim in order:
        strides[dim] = step
        step *= max(1, shape[dim])
    larger = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
    return larger.requires_grad_(tensor.requires_grad)


def with_two_rows(
    args: tuple[Any, ...], kwargs: dict[str, Any], dims: list[TensorDim]
) -> tuple[tuple[Any, ...], dict[str, Any], list[TensorDim]]:
    """Replace dynamic sizes 0 and 1 of a call by 2; sizes that cannot be replaced stay static."""
    enlarged: dict[int, torch.Tensor] = {}
    for dim in dims:
        sizes = {other.dim: 2 for other in dims if other.tensor is dim.tensor and other.size < 2}
        if sizes and id(dim.tensor) not in enlarged:
            enlarged[id(dim.tensor)] = _enlarged(dim.tensor, sizes)
    reached: set[int] = set()

    def replaced(value: Any) -> Any:
        if id(value) in enlarged:
            reached.add(id(value))
            return enlarged[id(value)]
        if type(value) in (tuple, list):
            return type(value)(map(replaced, value))
        if type(value) is dict:
            return {key: replaced(item) for key, item in value.items()}
        return value

    larger = replaced(args), replaced(kwargs)
    kept = [each for each in dims if each.size > 1 or id(each.tensor) in reached]
    return *larger, [replace(each, tensor=replaced(each.tensor)) for each in kept]


def free_sizes(dims: list[TensorDim]) -> dict[str, tuple[int | str, ...]]:
    """Return the sizes, by path, of tensors with dynamic dimensions."""
    shapes: dict[str, list[int | str]] = {}
    for number, dim in enumerate(dims):
        sizes = shapes.setdefault(dim.source, list(dim.tensor.shape))
        sizes[dim.dim] = f"free_{dim.name or number}"
    return {source: tuple(sizes) for source, sizes in shapes.items()}


def check_dims(name: str, dims: list[TensorDim], shapes: Shapes) -> None:
    """Raise if a trace specialised a dynamic dimension: its results could be silently wrong."""
    for dim in dims:
        sizes = shapes.get(dim.source)
        if sizes is not None and isinstance(sizes[dim.dim], int):
            raise TraceError.fixed(name=name, dim=dim.text)


def parameter_kinds(signature: inspect.Signature) -> tuple[list[str], str, str]:
    """Return the names of positional parameters, of ``*args`` and of ``**kwargs``."""
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
    """Bind a call of ``name``; ``bound`` is what its first parameter is bound to, if not None."""
    if bound is not None:
        own = list(signature.parameters.values())
        takes_all = own[0].kind is inspect.Parameter.VAR_POSITIONAL
        signature = signature.replace(parameters=own if takes_all else own[1:])
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        known = {*CompilationConfig.names()} - {*signature.parameters}
        settings = ": ..., ".join(repr(each) for each in kwargs if each in known)
        raise ArgumentsError.refused(
            name=name, signature=str(signature), why=str(error), settings=settings
        ) from None


def argument_paths(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[Any, str]:
    """Return Dynamo's path of each argument of a call, by its position or keyword."""
    positional, rest, anything = parameter_kinds(signature)
    paths: dict[Any, str] = {}
    for position in range(len(args)):
        beyond = position - len(positional)
        paths[position] = f"L[{positional[position]!r}]" if beyond < 0 else f"L[{rest!r}][{beyond}]"
    for name in kwargs:
        known = name in signature.parameters
        paths[name] = f"L[{name!r}]" if known else f"L[{anything!r}][{name!r}]"
    return paths
