"""Put ``cgcompile::small_linear`` in place of linear layers that get few rows.

For at most :data:`cgcompile.kernels.ROWS` rows it fuses::

    rms_norm -> linear                      also several linear layers of one input (q, k and v)
    linear, linear -> act(gate) * up        also of one weight whose halves are gate and up
    linear -> + residual

as torch (``F.rms_norm``) and ``transformers`` write them; a weight may be quantized
(:mod:`cgcompile.passes.linears`). The rule: a layer is fused only
if the nodes that the op replaces have no other users, and no node writes to its tensors or to those
in between.
"""

import operator
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import fx

from cgcompile.kernels import ROWS, why_unsupported
from cgcompile.kernels.small_linear import DTYPES, op
from cgcompile.passes.base import Fusions
from cgcompile.passes.linears import CASTS, Linear, linear_of, only_user
from cgcompile.passes.nodes import (
    COMPUTING,
    calls,
    erase_unused,
    keep_meta,
    layout_of,
    nodes_in_regions,
    storages,
    value,
    written_storages,
)
from cgcompile.torch_compat import expressions, torch_ops

_ACTIVATIONS = {"silu": "silu", "gelu": "gelu_tanh"}
_WIDEST = 16384  # rows of a weight; above, cuBLAS is as fast
_AT_ONCE = 3  # weights of one kernel


class _Norm(NamedTuple):
    source: fx.Node
    weight: fx.Node
    eps: float
    offset: float


def fuse_small_linears(
    gm: fx.GraphModule,
    unsupported: Callable[[torch.device], str | None] = why_unsupported,
    constants: Collection[int] = (),
) -> Fusions:
    """Fuse the linear layers of a graph in place.

    Args:
        gm: a piece, with fake values.
        unsupported: returns why kernels do not run on a device, or None.
        constants: positions of the inputs that no node of any piece writes.

    Returns:
        What was fused, and why the other linear layers were not.
    """
    fusions = Fusions()
    groups: dict[tuple[fx.Node, torch.dtype], list[Linear]] = {}
    _read_results_of_sums(gm)
    placeholders = gm.graph.find_nodes(op="placeholder")
    fuser = _Fuser(gm, unsupported, fusions, {placeholders[position] for position in constants})
    for node in gm.graph.nodes:
        linear = linear_of(node)
        if linear is None:
            continue
        why = fuser.why_not(linear)
        if why is None:
            groups.setdefault((linear.x, value(linear.weight).dtype), []).append(linear)
        else:
            fusions.unfused.append(f"{node.name}: {why}")
    for group in groups.values():
        fuser.fuse(group)
    if fusions.fused:
        gm.graph.lint()
        gm.recompile()
    return fusions


class _Fuser:
    """Fuses groups of linear layers of one graph; which nodes are written is read once, before."""

    def __init__(
        self,
        gm: fx.GraphModule,
        unsupported: Callable[[torch.device], str | None],
        fusions: Fusions,
        constants: set[fx.Node],
    ) -> None:
        self._gm, self._unsupported, self._fusions = gm, unsupported, fusions
        self._constants = constants
        self._written = written_storages(gm)
        self._order = {node: position for position, node in enumerate(gm.graph.nodes)}
        autocast = bool(gm.graph.find_nodes(op="call_function", target=torch_ops.ENTER_AUTOCAST))
        self._regions = set(self._order) if autocast else nodes_in_regions(gm)

    def why_not(self, linear: Linear) -> str | None:
        """Return why a linear layer is not fused, or None."""
        x, weight = value(linear.x), value(linear.weight)
        why = self._unsupported(x.device)
        if why is not None:
            return why
        if linear.bias is not None and value(linear.bias).shape != value(linear.weight).shape[:1]:
            return "its bias is broadcast"
        if not self._regions.isdisjoint(linear.inner):
            return "it is in a region of autocast, grad mode or a transform"
        read = (x, value(linear.node), *((weight,) if linear.scale is None else ()))
        dtypes = {tensor.dtype for tensor in read}
        if len(dtypes) > 1 or not dtypes <= set(DTYPES):
            return f"its dtypes are {', '.join(sorted(map(str, dtypes)))}"
        rows = _most_rows(x)
        if rows is None or rows > ROWS:
            return f"it may get more than {ROWS} rows"
        if not all(type(size) is int for size in weight.shape):
            return "its weight has a dynamic size"
        if weight.shape[0] > _WIDEST and linear.scale is None:
            return f"its weight has more than {_WIDEST} rows"
        if not weight.is_contiguous():
            return "its weight is not contiguous"
        return None

    def fuse(self, group: list[Linear]) -> None:
        """Fuse linear layers of one input."""
        # What was fused before may have replaced the input.
        group = [linear for each in group if (linear := linear_of(each.product)) is not None]
        candidate = None if value(group[0].x).dtype is torch.float16 else norm_of(group[0].x)
        norm = candidate
        if candidate is not None:
            own = {node for linear in group for node in linear.sources | linear.inner}
            inner = between(group[0].x, {candidate.source, candidate.weight})
            alone = own >= set(group[0].x.users)
            norm = (
                candidate
                if alone and self._unwritten(*inner, candidate.source, candidate.weight)
                else None
            )
        rest = list(group)
        for gate in group:
            match = self._gated(gate, rest)
            if match is not None:
                layers, activation, end = match
                rest = [linear for linear in rest if linear not in layers]
                self._replace(end, layers, norm, None, activation)
        if len(rest) == 1:
            end, residual = self._residual(rest[0])
            self._replace(end, rest, norm, residual, "")
        else:
            for start in range(0, len(rest), _AT_ONCE):
                some = rest[start : start + _AT_ONCE]
                self._replace(some[0].node, some, norm, None, "")

    def _unwritten(self, *nodes: fx.Node) -> bool:
        return all(self._written.isdisjoint(storages(value(node))) for node in nodes)

    def _gated(self, gate: Linear, group: list[Linear]) -> tuple[list[Linear], str, fx.Node] | None:
        """Return (layers, activation, product) if a layer is the gate of a product."""
        if gate not in group:
            return None
        halves = _halves(gate.node)
        source = gate.node if halves is None else halves[0]
        acted = only_user(source)
        activation = None if acted is None else _activation_of(acted)
        product = None if acted is None or activation is None else only_user(acted)
        if acted is None or activation is None or product is None:
            return None
        if not calls(product, "mul") or product.kwargs:
            return None
        (up,) = [arg for arg in product.args if arg is not acted] or [None]
        if halves is not None:
            return ([gate], activation, product) if _alone(halves[1], up, product) else None
        for other in group:
            alike = value(other.weight).shape == value(gate.weight).shape
            if other is not gate and alike and _alone(other.node, up, product):
                return [gate, other], activation, product
        return None

    def _residual(self, linear: Linear) -> tuple[fx.Node, fx.Node | None]:
        """Return (sum, residual) if a layer is a summand of one; else (layer, None)."""
        end = only_user(linear.node)
        if end is None or not calls(end, "add") or end.kwargs or len(end.args) != 2:
            return linear.node, None
        others = [arg for arg in end.args if arg is not linear.node]
        if len(others) != 1 or not isinstance(others[0], fx.Node):
            return linear.node, None
        known, own = value(others[0]), value(linear.node)
        same = isinstance(known, torch.Tensor) and (known.shape, known.dtype, known.device) == (
            own.shape,
            own.dtype,
            own.device,
        )
        # The sum has the layout of its first summand where that is dense; the fused op has its own.
        same = same and layout_of(value(end)) == layout_of(own)
        return (end, others[0]) if same else (linear.node, None)

    def _replace(
        self,
        end: fx.Node,
        layers: list[Linear],
        norm: _Norm | None,
        residual: fx.Node | None,
        activation: str,
    ) -> None:
        """Put one op in place of layers; ``end`` is the last of the nodes that it replaces."""
        parameters = [layer.weight for layer in layers]
        parameters += [layer.bias for layer in layers if layer.bias is not None]
        scales = [layer.scale for layer in layers if layer.scale is not None]
        parameters += scales + ([] if norm is None else [norm.weight])
        late = any(self._order[node] >= self._order[end] for node in parameters)
        x = layers[0].x if norm is None else norm.source
        names = " + ".join(layer.product.name for layer in layers)
        sources = {node for layer in layers for node in layer.sources}
        if late or not self._unwritten(x, *parameters, *sources):
            why = "a weight is computed after it" if late else "its input or weight is written"
            self._fusions.unfused.append(f"{names}: {why}")
            return
        graph = self._gm.graph
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        with graph.inserting_before(end):
            arguments = (
                x, weights, biases, None if norm is None else norm.weight,
                0.0 if norm is None else norm.eps, 0.0 if norm is None else norm.offset,
                residual, activation, *([scales] if scales else []),
            )  # fmt: skip
            constant = self._constants.issuperset(parameters)
            named: dict[str, Any] = {"constant": True} if constant else {}
            call = graph.call_function(op(), arguments, named)
            call.meta["stack_trace"] = layers[0].node.meta.get("stack_trace")
            replaced = [end] if activation or residual is not None else [a.node for a in layers]
            call.meta["example_value"] = [value(node) for node in replaced]
            for position, node in enumerate(replaced):
                item = graph.call_function(operator.getitem, (call, position))
                node.replace_all_uses_with(item)
                self._order[item] = self._order[end]
                keep_meta(item, node)
        own = sources.union(*(layer.inner for layer in layers))
        for node in replaced:
            erase_unused(self._gm, node, _ERASABLE, own)
        parts = ["" if norm is None else "norm, ", names]
        parts += [f", {_named(value(weights[0]).dtype)}"] if scales else []
        parts += [f", {activation} * up" if activation else "", ", residual" if residual else ""]
        self._fusions.fused.append("".join(parts))


# What a match consists of.
_ERASABLE = {"linear", "mul", "add", "silu", "gelu", "chunk", "getitem", "rms_norm", *CASTS}
_ERASABLE |= {"rsqrt", "mean", "pow"}


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _read_results_of_sums(gm: fx.GraphModule) -> None:
    """Let what reads a tensor after a sum in place read the result of the sum: the same tensor."""
    order = {node: position for position, node in enumerate(gm.graph.nodes)}
    for node in order:
        target = node.args[0] if calls(node, "add_", "iadd") else None
        if isinstance(target, fx.Node) and target.op in COMPUTING:
            later = {user for user in target.users if order[user] > order[node]}
            target.replace_all_uses_with(node, delete_user_cb=later.__contains__)


# ---------------------------------------------------------------- patterns


def between(node: fx.Node, ends: set[fx.Node]) -> set[fx.Node]:
    """Return a node and what it is computed from, up to ``ends``, which are left out."""
    nodes: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current not in ends and current not in nodes:
            nodes.add(current)
            waiting += current.all_input_nodes
    return nodes


def _alone(node: fx.Node, argument: Any, user: fx.Node) -> bool:
    return node is argument and only_user(node) is user


def _most_rows(x: torch.Tensor) -> int | None:
    """Return the largest number of rows [..., K] that ``x`` can have, or None."""
    rows = 1
    for size in x.shape[:-1]:
        most = expressions.largest_size(size)
        if most is None:
            return None
        rows *= most
    return rows


def _halves(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return both halves of the last dimension, where that is the only use of a node."""
    parts = only_user(node)
    if parts is None or parts.args[:1] != (node,) or not calls(parts, "chunk"):
        return None
    size = value(node).shape[-1]
    if type(size) is not int or size % 2:
        return None
    numbers = [*parts.args[1:], *parts.kwargs.values()]
    last = value(node).dim() - 1
    if numbers not in ([2, -1], [2, last]) or set(parts.kwargs) - {"chunks", "dim"}:
        return None
    items = {user.args[1]: user for user in parts.users if calls(user, "getitem")}
    if len(items) != 2 or len(parts.users) != 2:
        return None
    return items[0], items[1]


def _activation_of(node: fx.Node) -> str | None:
    name = next((known for known in _ACTIVATIONS if calls(node, known)), None)
    if name is None:
        return None
    inplace = node.kwargs.get("inplace", False) or len(node.args) > 1
    tanh = node.kwargs.get("approximate", "none") == "tanh"
    return None if inplace or tanh != (name == "gelu") else _ACTIVATIONS[name]


def _uncast(node: Any, dtype: torch.dtype) -> Any:
    """Return what a node casts to a dtype; the node itself if it is no cast."""
    if isinstance(node, fx.Node) and calls(node, *CASTS):
        source = node.args[0]
        new, old = value(node), value(source) if isinstance(source, fx.Node) else None
        if isinstance(old, torch.Tensor) and new.dtype is dtype:
            layout = old.shape, old.device, old.stride()
            return source if (new.shape, new.device, new.stride()) == layout else node
    return node


def norm_of(node: fx.Node) -> _Norm | None:
    """Return the RMS norm that a node computes, or None."""
    dtype = value(node).dtype
    if calls(node, "rms_norm"):
        names = ("input", "normalized_shape", "weight", "eps")
        named = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        eps = named.get("eps")
        eps = torch.finfo(torch.float32).eps if eps is None else eps
        return _checked(node, named["input"], named.get("weight"), eps, 0.0, named)
    inner = _uncast(node, dtype)
    for product in dict.fromkeys((inner, node)):
        if not calls(product, "mul") or len(product.args) != 2 or product.kwargs:
            continue
        for scaled, weight in (product.args, product.args[::-1]):
            root = _rooted(_uncast(scaled, dtype))
            if root is None:
                continue
            weight, offset = _offset_of(weight)
            return _checked(node, root[0], _uncast(weight, torch.float32), root[1], offset, {})
    return None


def _offset_of(weight: Any) -> tuple[Any, float]:
    """Return (weight, 1.0) of ``1 + weight``; else (weight, 0.0)."""
    if calls(weight, "add") and not weight.kwargs and len(weight.args) == 2:
        for number, other in (weight.args, weight.args[::-1]):
            if isinstance(number, (int, float)):
                return other, float(number)
    return weight, 0.0


def _rooted(node: Any) -> tuple[Any, float] | None:
    """Return (x, eps) of ``x * rsqrt(mean(x ** 2) + eps)`` in float32, x before its cast."""
    if not calls(node, "mul") or len(node.args) != 2 or value(node).dtype is not torch.float32:
        return None
    for x, root in (node.args, node.args[::-1]):
        mean, eps = _mean_of(root)
        if not calls(mean, "mean"):
            continue
        squares = mean.args[0]
        power = calls(squares, "pow") and squares.args == (x, 2)
        squared = power or (calls(squares, "mul") and squares.args == (x, x))
        if squared and _over_last(mean):
            return _uncast(x, torch.float32), eps
    return None


def _mean_of(root: Any) -> tuple[Any, float]:
    """Return (mean, eps) of ``rsqrt(mean + eps)``."""
    total: Any = root.args[0] if calls(root, "rsqrt") else None
    plain = calls(total, "add") and len(total.args) == 2 and not total.kwargs
    if plain and isinstance(total.args[1], float):
        return total.args[0], total.args[1]
    return None, 0.0


def _over_last(mean: fx.Node) -> bool:
    named = {**dict(zip(("input", "dim", "keepdim"), mean.args, strict=False)), **mean.kwargs}
    dims = named.get("dim")
    dims = list(dims) if isinstance(dims, (list, tuple)) else [dims]
    return dims in ([-1], [value(mean).dim() - 1]) and named.get("keepdim") is True


def _checked(
    node: fx.Node, x: Any, weight: Any, eps: Any, offset: float, named: dict[str, Any]
) -> _Norm | None:
    """Return a norm if its tensors are plain and of the dtype of its result."""
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node) or type(eps) is not float:
        return None
    result, source, scale = value(node), value(x), value(weight)
    if not isinstance(source, torch.Tensor) or not isinstance(scale, torch.Tensor):
        return None
    shape = named.get("normalized_shape", scale.shape)
    fits = scale.dim() == 1 and len(shape) == 1 and scale.shape == source.shape[-1:]
    same = (source.shape, source.dtype) == (result.shape, result.dtype)
    return _Norm(x, weight, eps, offset) if fits and same and scale.dtype is source.dtype else None
