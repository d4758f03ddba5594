"""Find linear layers of a graph, and what of it each of them is: :func:`linear_of`.

A layer is ``linear`` of plain tensors, or a product with a weight of int8 or float8 that has a
scale for each row. Models and torchao write the second in two ways::

    linear(x, (data.to(dtype) * scale).to(dtype), bias)
    linear(x, data.to(dtype)) * scale + bias

where ``linear`` may be ``mm``, ``addmm`` or ``matmul`` of the transposed weight, between views
of rows ``[..., K]`` as ``[M, K]``.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from cgcompile.kernels.small_linear import QUANTIZED, SCALES
from cgcompile.passes.nodes import calls, value

CASTS = ("to", "type", "type_as", "float", "bfloat16", "half", "_to_copy")
_SAME = ("contiguous", "clone", "detach", "alias")
_TRANSPOSES = ("t", "transpose", "swapaxes", "swapdims", "permute", "numpy_T")
_VIEWS = ("view", "reshape", "flatten", "unflatten", "_unsafe_view", "unsqueeze", "squeeze")


class Linear(NamedTuple):
    """A linear layer; its weight is [N, K]."""

    product: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    node: fx.Node  # the result: the product, or the sum or activation after it
    scale: fx.Node | None = None  # N numbers, of a quantized weight
    sources: frozenset[fx.Node] = frozenset()  # nodes that compute the arguments
    inner: frozenset[fx.Node] = frozenset()  # nodes from the product to the result


def linear_of(node: fx.Node) -> Linear | None:
    """Return the layer whose product a node is, or None."""
    factors = _factors(node)
    if factors is None:
        return None
    quantized = _quantized(node, *factors)
    if quantized is not None or not calls(node, "linear"):
        return quantized
    x, weight, bias, _ = factors
    return Linear(node, x, weight, bias, node, inner=frozenset({node}))


def only_user(node: fx.Node) -> fx.Node | None:
    """Return the only user of a node; None if it has several or none."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def _factors(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None, bool] | None:
    """Return (rows, weight, bias, whether the weight is transposed) of a product."""
    if not calls(node, "linear", "mm", "matmul", "addmm"):
        return None
    is_linear = calls(node, "linear")
    names = ("input", "weight", "bias")
    named: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    x, weight, bias = (named.get(name) for name in names)
    if calls(node, "addmm"):
        x, weight, bias = (*node.args, None, None)[1:3] + node.args[:1]
    elif not is_linear:
        x, weight = (*node.args, None)[:2]
    arguments = [x, weight, *([] if bias is None else [bias])]
    if not all(map(_is_tensor, [node, *arguments])) or (node.kwargs and not is_linear):
        return None
    assert isinstance(x, fx.Node)
    assert isinstance(weight, fx.Node)
    return (x, weight, bias, not is_linear) if value(weight).dim() == 2 else None


def _source(node: fx.Node) -> fx.Node | None:
    """Return the tensor of which a node is a view, cast or copy."""
    source = node.args[0] if node.args else None
    return source if isinstance(source, fx.Node) and _is_tensor(source) else None


def _is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(value(node), torch.Tensor)


def _sizes(shape: Sequence[Any]) -> list[Any]:
    return [n.node.expr if isinstance(n, torch.SymInt) else n for n in shape]


# ---------------------------------------------------------------- quantized weights


def _quantized(
    product: fx.Node, rows: fx.Node, weight: fx.Node, bias: fx.Node | None, transposed: bool
) -> Linear | None:
    stored = _stored(weight, transposed)
    if stored is None:
        return None
    data, scale, sources = stored
    if scale is None and bias is not None:
        return None  # a factor that follows would scale the bias
    count, depth = value(data).shape
    x = rows
    source = _source(rows) if calls(rows, *_VIEWS) else None
    if source is not None and value(source).dim() > 1 and value(rows).dim() == 2:
        alike = value(source).dtype is value(rows).dtype
        if alike and _sizes(value(source).shape[-1:]) == [depth]:
            x, sources = source, sources | {rows}
    return _followed(Linear(product, x, data, bias, product, scale, sources), rows, count)


def _stored(
    node: fx.Node, transposed: bool
) -> tuple[fx.Node, fx.Node | None, frozenset[fx.Node]] | None:
    """Return (data [N, K], scale, nodes in between) of a weight made from quantized data."""
    scale: fx.Node | None = None
    between: set[fx.Node] = set()
    while True:
        swaps = _swaps(node)
        if not swaps and value(node).dtype in QUANTIZED:
            break
        between.add(node)
        source = _source(node)
        if source is not None and (swaps or _converts(node)):
            transposed ^= swaps
            node = source
            continue
        factors = _factors_of(node) if scale is None else None
        if factors is None or value(node).dim() != 2:
            return None
        count = value(node).shape[1 if transposed else 0]
        shapes = ([1, count], [count]) if transposed else ([count, 1],)
        pairs = (factors, factors[::-1])
        pair = next((p for p in pairs if _sizes(value(p[1]).shape) in shapes), None)
        if pair is None or _sizes(value(pair[0]).shape) != _sizes(value(node).shape):
            return None
        node, (scale, nodes) = pair[0], _scale_of(pair[1])
        if scale is None:
            return None
        between |= nodes
    return None if transposed else (node, scale, frozenset(between))


def _swaps(node: fx.Node) -> bool:
    """Return whether a node is the transposed of a matrix."""
    source = _source(node)
    if source is None or not calls(node, *_TRANSPOSES):
        return False
    new, old = value(node), value(source)
    swapped = (old.shape[::-1], old.stride()[::-1])
    return bool(old.dim() == 2 and (new.shape, new.stride()) == swapped and old.shape != (1, 1))


def _converts(node: fx.Node) -> bool:
    """Return whether a node has the numbers of its argument, in a dtype that holds a scale."""
    source = _source(node)
    if source is None or not calls(node, *CASTS, *_SAME):
        return False
    new, old = value(node), value(source)
    same = _sizes(new.shape) == _sizes(old.shape) and new.device == old.device
    kept = new.dtype is old.dtype and calls(node, *_SAME)
    return same and (kept or (new.dtype in SCALES and old.dtype in (*SCALES, *QUANTIZED)))


def _factors_of(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return both tensors of a product of tensors of one device."""
    if not calls(node, "mul") or node.kwargs or len(node.args) != 2:
        return None
    one, other = node.args
    if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
        return None
    alike = _is_tensor(one) and _is_tensor(other) and value(one).device == value(other).device
    return (one, other) if alike and value(node).dtype in SCALES else None


def _scale_of(node: fx.Node) -> tuple[fx.Node | None, frozenset[fx.Node]]:
    """Return (scale, views and casts of it), the scale None if it is no plain vector."""
    between: set[fx.Node] = set()
    while (source := _source(node)) is not None and (_converts(node) or _reshapes_vector(node)):
        between.add(node)
        node = source
    plain = value(node).dtype in SCALES and value(node).is_contiguous()
    return node if plain else None, frozenset(between)


def _reshapes_vector(node: fx.Node) -> bool:
    source = _source(node)
    if source is None or not calls(node, *_VIEWS, *_TRANSPOSES):
        return False
    new, old = value(node), value(source)
    long = [[size for size in _sizes(t.shape) if size != 1] for t in (new, old)]
    return new.dtype is old.dtype and long[0] == long[1] and len(long[0]) == 1


def _followed(start: Linear, rows: fx.Node, count: int) -> Linear | None:
    """Return a layer with the scale, bias, casts and views that follow its product, or None."""
    longest, layer = None, start
    while True:
        layer = layer._replace(inner=layer.inner | {layer.node})
        x = next((x for x in (start.x, rows) if _has_rows_of(layer.node, x, count)), None)
        if layer.scale is not None and x is not None:
            longest = layer._replace(x=x)
        user = only_user(layer.node)
        if user is None or user.args[:1] == () or not _is_tensor(user):
            return longest
        further = _converted(layer, user) or _scaled(layer, user, count)
        further = further or _biased(layer, user, count)
        if further is None:
            return longest
        layer = further


def _has_rows_of(node: fx.Node, x: fx.Node, count: int) -> bool:
    new, old = value(node), value(x)
    return new.dtype is old.dtype and _sizes(new.shape) == [*_sizes(old.shape[:-1]), count]


def _converted(layer: Linear, user: fx.Node) -> Linear | None:
    """Return a layer with a cast or view of its result."""
    new, old = value(user), value(layer.node)
    views = calls(user, *_VIEWS) and new.dtype is old.dtype and new.dim() > 0
    if user.args[0] is not layer.node or not (views or _converts(user)):
        return None
    same = _sizes(new.shape[-1:]) == _sizes(old.shape[-1:])
    return layer._replace(node=user) if same else None


def _other(user: fx.Node, node: fx.Node) -> fx.Node | None:
    """Return the other argument of a sum or product of two tensors."""
    others = [argument for argument in user.args if argument is not node]
    if len(user.args) != 2 or len(others) != 1 or user.kwargs or not _is_tensor(others[0]):
        return None
    return others[0]  # type: ignore[return-value]


def _scaled(layer: Linear, user: fx.Node, count: int) -> Linear | None:
    """Return a layer with a factor for each column of its result."""
    other = _other(user, layer.node) if calls(user, "mul") else None
    if other is None or layer.scale is not None or layer.bias is not None:
        return None
    sizes = _sizes(value(other).shape)
    if sizes[-1:] != [count] or set(sizes[:-1]) - {1}:
        return None
    if _sizes(value(user).shape) != _sizes(value(layer.node).shape):
        return None
    scale, nodes = _scale_of(other)
    if scale is None or value(scale).device != value(user).device:
        return None
    return layer._replace(node=user, scale=scale, sources=layer.sources | nodes)


def _biased(layer: Linear, user: fx.Node, count: int) -> Linear | None:
    """Return a layer with a bias, that is added in place or not."""
    other = _other(user, layer.node) if calls(user, "add", "add_", "iadd") else None
    if other is None or layer.bias is not None or layer.scale is None:
        return None
    in_place = not calls(user, "add")
    if in_place and user.args[0] is not layer.node:
        return None
    new, bias = value(user), value(other)
    same = (new.dtype, new.device) == (bias.dtype, bias.device) and _sizes(bias.shape) == [count]
    same = same and _sizes(new.shape) == _sizes(value(layer.node).shape)
    return layer._replace(node=user, bias=other) if same else None
