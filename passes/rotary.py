"""Put ``cgcompile::rotate_and_cache`` between the projections and attention of a decode step.

For at most :data:`cgcompile.kernels.ROWS` tokens it fuses what ``transformers`` writes
as ``q * cos + rotate_half(q) * sin``, for q and k, with an RMS norm of each head before it, and the
two ``index_copy_`` that write k and v to a static cache. The rule: nodes are fused only if those
in between have no other users, and if no other node writes to the tensors that the op reads, or
uses the cache between both writes.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import fx

from cgcompile.kernels import ROWS, why_unsupported
from cgcompile.kernels.rotate_and_cache import HEADS, empty, op
from cgcompile.kernels.small_linear import DTYPES
from cgcompile.passes.base import Fusions
from cgcompile.passes.counters import advance, increments
from cgcompile.passes.nodes import (
    calls,
    erase_unused,
    is_torchs,
    keep_meta,
    layout_of,
    nodes_in_regions,
    short_name,
    storages,
    value,
    written,
)
from cgcompile.passes.small_batch import between, norm_of, only_user
from cgcompile.torch_compat import expressions, torch_ops


class _Rotated(NamedTuple):
    """``x * cos + rotate_half(x) * sin`` and the nodes of it."""

    node: fx.Node
    x: fx.Node
    cos: fx.Node
    sin: fx.Node
    inner: set[fx.Node]  # neither ``node`` nor ``x``


class _Head(NamedTuple):
    """What a norm of each head is computed from; without one, ``x`` itself."""

    source: fx.Node
    transposed: bool = False  # whether the source is [B, T, H, D]
    weight: fx.Node | None = None
    eps: float = 0.0
    offset: float = 0.0


class _Write(NamedTuple):
    node: fx.Node
    cache: fx.Node
    positions: fx.Node
    source: fx.Node


def fuse_rotary(
    gm: fx.GraphModule,
    unsupported: Callable[[torch.device], str | None] = why_unsupported,
) -> Fusions:
    """Fuse rotary embeddings and writes to a static cache of a graph in place.

    Args:
        gm: a piece, with fake values.
        unsupported: returns why kernels do not run on a device, or None.

    Returns:
        What was fused, and why other embeddings that are written to a cache were not.
    """
    fusions = Fusions()
    writes = [node for node in gm.graph.nodes if _write_of(node) is not None]
    if not writes:
        return fusions
    graph = _Graph(gm)
    for nodes in itertools.pairwise(writes):
        # Read here: what was fused before may have replaced an input, or one of the writes.
        keys, values = [None if node in graph.erased else _write_of(node) for node in nodes]
        if keys is None or values is None or (rotated := _rotated_of(keys.source)) is None:
            continue
        fuser = _Fuser(graph, rotated, keys, values)
        why = unsupported(value(nodes[0]).device) or fuser.why_not()
        if why is None:
            fusions.fused.append(fuser.fuse())
            graph.erased.update(nodes)
        else:
            fusions.unfused.append(f"{nodes[0].name}: {why}")
    if fusions.fused:
        advance(gm, graph.moved)
        gm.graph.lint()
        gm.recompile()
    return fusions


class _Graph:
    """What is read of a graph once, before its first fusion: all nodes, for each of many layers."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.nodes = list(gm.graph.nodes)
        self.order = {node: position for position, node in enumerate(self.nodes)}
        keys = {node: storages(value(node)) for node in self.nodes}
        self.touched = {
            node: keys[node].union(*(keys[source] for source in node.all_input_nodes))
            for node in self.nodes
        }
        writes = {node: written(gm, node) for node in self.nodes}
        self.writes = {node: storages(list(map(value, writes[node]))) for node in self.nodes}
        self.written = set().union(*self.writes.values())
        autocast = bool(gm.graph.find_nodes(op="call_function", target=torch_ops.ENTER_AUTOCAST))
        self.in_regions = set(self.nodes) if autocast else nodes_in_regions(gm)
        self.increments = increments(gm)
        self.moved: dict[fx.Node, fx.Node] = {}  # those that move to the end of the graph
        self.erased: set[fx.Node] = set()  # writes that were fused


class _Fuser:
    """Fuses one embedding of q and k with the writes of k and v."""

    def __init__(self, graph: _Graph, k: _Rotated, keys: _Write, values: _Write) -> None:
        self._graph, self._k, self._keys, self._values = graph, k, keys, values

    def why_not(self) -> str | None:
        """Return why the nodes stay as they are, or None."""
        if self._values.positions is not self._keys.positions:
            return "keys and values have other positions"
        users = [only_user(user) for user in self._k.cos.users if calls(user, "mul")]
        others = [q for user in users if (q := _rotated_of(user)) is not None]
        others = [q for q in others if (q.cos, q.sin) == (self._k.cos, self._k.sin)]
        # Layers may share their tables: of what is not written to a cache, the last one is theirs.
        others = [q for q in others if not any(map(_write_of, q.node.users))]
        order, last = self._graph.order, self._graph.order[self._values.node]
        others = [q for q in others if order[q.node] < last]
        if not others:
            return "no other tensor is rotated like it before it is written"
        self._q = max(others, key=lambda q: order[q.node])
        if not self._graph.in_regions.isdisjoint({self._q.node, self._k.node, self._values.node}):
            return "it is in a region of autocast, grad mode or a transform"
        rotated = (self._q, self._k)
        self._heads = _heads_of(*rotated)
        if not all(part.inner | {part.node} >= _users(part.inner) for part in rotated):
            return "a part of the embedding has another user"
        if only_user(self._k.node) is not self._keys.node:
            return "the embedded keys have another user"
        return self._why_not_values() or self._why_not_order()

    def _why_not_values(self) -> str | None:
        """Return why shapes, dtypes and layouts do not fit, or None."""
        q, k, v = value(self._q.x), value(self._k.x), value(self._values.source)
        cos, sin = value(self._k.cos), value(self._k.sin)
        keys, values, positions = (
            value(node) for node in (self._keys.cache, self._values.cache, self._keys.positions)
        )
        plain = (q, k, v, cos, sin, keys, values)
        if len({(t.dtype, t.device) for t in plain}) > 1 or q.dtype not in DTYPES:
            return f"its dtypes are {', '.join(sorted({str(t.dtype) for t in plain}))}"
        (rows, _, tokens, size), (_, pairs, length, _) = _sizes(q), _sizes(keys)
        most = [expressions.largest_size(q.shape[dim]) for dim in (0, 2)]
        if most[0] is None or most[1] is None or most[0] * most[1] > ROWS:
            return f"it may get more than {ROWS} tokens"
        if type(tokens) is not int:
            return "its number of tokens is dynamic"
        if size not in HEADS:
            return f"a head has {size} elements"
        tables = ((1, 1, tokens, size), (rows, 1, tokens, size))
        same = _sizes(k) == _sizes(v) == (rows, pairs, tokens, size)
        same = same and _sizes(keys) == _sizes(values) == (rows, pairs, length, size)
        same = same and _sizes(cos) in tables and _sizes(sin) in tables
        same = same and positions.dtype is torch.int64 and _sizes(positions) == (tokens,)
        if not same or layout_of(value(self._q.node)) != layout_of(empty(q)):
            return "its shapes or strides are not those of heads"
        return None

    def _why_not_order(self) -> str | None:
        """Return why the op may not stand in the place of the second write, or None."""
        graph = self._graph
        first, last = graph.order[self._keys.node], graph.order[self._values.node]
        if any(graph.order[node] > last for node in self._inputs()):
            return "an input is computed after it"
        if any(graph.order[user] < last for user in self._q.node.users):
            return "the embedded queries are used before the cache is written"
        keys, values = (storages(value(write.cache)) for write in (self._keys, self._values))
        if not keys.isdisjoint(values):
            return "keys and values are in one storage"
        if any(not keys.isdisjoint(graph.touched[node]) for node in graph.nodes[first + 1 : last]):
            return "the cache is used between both writes"
        read = [*self._inputs()[:-2], *self._q.inner, *self._k.inner]
        if any(not graph.written.isdisjoint(storages(value(node))) for node in read):
            return "one of its inputs is written"
        return None

    def _inputs(self) -> list[fx.Node]:
        weights = [head.weight for head in self._heads if head.weight is not None]
        sources = [*(head.source for head in self._heads), self._values.source, *weights]
        caches = [self._keys.cache, self._values.cache]
        return [*sources, self._k.cos, self._k.sin, self._keys.positions, *caches]

    def fuse(self) -> str:
        """Put the op in place; return what it replaced."""
        gm, (q, k) = self._graph.gm, self._heads
        graph = gm.graph
        normed = k if q.weight is None else q
        positions = self._counted()
        with graph.inserting_before(self._values.node):
            sources = [_transposed(graph, head) for head in (q, k)]
            tables = [_table(graph, table) for table in (self._k.cos, self._k.sin)]
            call = graph.call_function(op(), (
                *sources, self._values.source, *tables, q.weight, k.weight,
                normed.eps, normed.offset, positions, self._keys.cache, self._values.cache,
            ))  # fmt: skip
        for node in (call, *call.all_input_nodes):
            self._graph.order.setdefault(node, self._graph.order[self._values.node])
        keep_meta(call, self._q.node)
        self._q.node.replace_all_uses_with(call)
        for write in (self._keys, self._values):
            write.node.replace_all_uses_with(write.cache)
            graph.erase_node(write.node)
        for unused in (self._q.node, self._k.node, self._keys.positions):
            erase_unused(gm, unused, _ERASABLE)
        norm = "" if q.weight is None and k.weight is None else "norm, "
        names = f"{self._q.node.name} + {self._k.node.name}"
        return f"{norm}{names}, {self._keys.node.name} + {self._values.node.name}"

    def _counted(self) -> Any:
        """Return what the op reads positions from: a counter, if it still has its value."""
        positions = self._keys.positions
        counter = _counter_of(positions, value(self._q.x).shape[2])
        graph = self._graph
        if counter is None or counter in graph.moved:
            return positions if counter is None else counter
        if counter in graph.increments:
            graph.moved[counter] = graph.increments[counter]
            return counter
        key = storages(value(counter))
        first, last = graph.order[positions], graph.order[self._values.node]
        stays = all(key.isdisjoint(graph.writes[node]) for node in graph.nodes[first:last])
        return counter if stays else positions


_ERASABLE = {"add", "mul", "cat", "neg", "getitem", "transpose", "rms_norm", "rsqrt", "mean", "pow"}
_ERASABLE |= {"arange", "to", "type", "type_as", "float", "bfloat16", "half"}


# ---------------------------------------------------------------- patterns


def _write_of(node: fx.Node) -> _Write | None:
    """Return the parts of ``cache.index_copy_(2, positions, source)`` of 4-dim tensors."""
    if node.op != "call_method" or node.target != "index_copy_" or not is_torchs(node):
        return None
    names = ("self", "dim", "index", "source")
    named = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    nodes: list[Any] = [named["self"], named["index"], named["source"]]
    if not all(isinstance(n, fx.Node) and isinstance(value(n), torch.Tensor) for n in nodes):
        return None
    shaped = value(nodes[0]).dim() == value(nodes[2]).dim() == 4 and value(nodes[1]).dim() == 1
    return _Write(node, *nodes) if shaped and named["dim"] in (2, -2) else None


def _rotated_of(node: Any) -> _Rotated | None:
    """Return the parts of ``x * cos + cat((-x[..., D / 2 :], x[..., : D / 2]), -1) * sin``."""
    if not _is_binary("add", node):
        return None
    for plain, turned in (node.args, node.args[::-1]):
        if not _is_binary("mul", plain) or not _is_binary("mul", turned):
            continue
        for half, sin in (turned.args, turned.args[::-1]):
            match = _half_of(half)
            if match is None or match[0] not in plain.args:
                continue
            x, inner = match
            (cos,) = [arg for arg in plain.args if arg is not x] or [None]
            if _has_four_dims(node, x, cos, sin):
                return _Rotated(node, x, cos, sin, {plain, turned, *inner})
    return None


def _half_of(node: Any) -> tuple[fx.Node, set[fx.Node]] | None:
    """Return (x, nodes) of ``cat((-x[..., D / 2 :], x[..., : D / 2]), -1)``."""
    if not calls(node, "cat") or [*node.args[1:], *node.kwargs.values()] not in ([-1], [3]):
        return None
    parts = node.args[0]
    if not isinstance(parts, (tuple, list)) or len(parts) != 2 or not calls(parts[0], "neg"):
        return None
    (negated, first), (second,) = parts, parts[0].args
    if not calls(first, "getitem") or not calls(second, "getitem"):
        return None
    x = first.args[0]
    size = value(x).shape[-1] if _has_four_dims(x) and second.args[0] is x else None
    if type(size) is not int or size % 2:
        return None
    halves = slice(None, size // 2, None), slice(size // 2, None, None)
    if (first.args[1], second.args[1]) != tuple((Ellipsis, half) for half in halves):
        return None
    return x, {node, negated, first, second}


def _counter_of(positions: Any, tokens: int) -> Any:
    """Return the counter [] of ``arange(tokens) + counter``."""
    if not _is_binary("add", positions):
        return None
    numbers: Any
    counter: Any
    for numbers, counter in (positions.args, positions.args[::-1]):
        plain = isinstance(numbers, fx.Node) and short_name(numbers.target) == "arange"
        if plain and numbers.args == (tokens,) and numbers.kwargs.keys() <= {"device", "dtype"}:
            start = value(counter) if isinstance(counter, fx.Node) else None
            if isinstance(start, torch.Tensor) and (start.dtype, start.dim()) == (torch.int64, 0):
                return counter
    return None


def _heads_of(q: _Rotated, k: _Rotated) -> list[_Head]:
    """Return what q and k are computed from, with norms where one kernel can compute them."""
    heads = [_head_of(rotated) for rotated in (q, k)]
    norms = {(head.eps, head.offset) for head in heads if head.weight is not None}
    return heads if len(norms) < 2 else [_Head(rotated.x) for rotated in (q, k)]


def _head_of(rotated: _Rotated) -> _Head:
    x: Any = rotated.x
    transposed = calls(x, "transpose") and x.args[1:] in ((1, 2), (2, 1))
    norm = norm_of(x.args[0] if transposed else x)
    if norm is None:
        return _Head(x)
    inner = between(x, {norm.source, norm.weight})
    alone = inner | rotated.inner >= _users(inner)
    return _Head(norm.source, transposed, *norm[1:]) if alone else _Head(x)


def _transposed(graph: fx.Graph, head: _Head) -> fx.Node:
    """Return a node of the heads [B, H, T, D]."""
    if not head.transposed:
        return head.source
    node = graph.call_method("transpose", (head.source, 1, 2))
    node.meta["example_value"] = value(head.source).transpose(1, 2)
    return node


def _has_four_dims(*nodes: Any) -> bool:
    values = [value(node) if isinstance(node, fx.Node) else None for node in nodes]
    return all(isinstance(tensor, torch.Tensor) and tensor.dim() == 4 for tensor in values)


def _table(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Return a node of a table [1 or B, T, D]: the one that all layers share, if there is one."""
    # Inductor computes a view of what it has not computed yet once for each op that reads the view.
    source = node.args[0] if node.args else None
    if calls(node, "unsqueeze") and node.args[1:] == (1,) and isinstance(source, fx.Node):
        return source
    table = graph.call_method("squeeze", (node, 1))
    table.meta["example_value"] = value(node).squeeze(1)
    return table


def _is_binary(name: str, node: Any) -> bool:
    return calls(node, name) and len(node.args) == 2 and not node.kwargs


def _users(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    return {user for node in nodes for user in node.users}


def _sizes(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the sizes of a tensor as expressions: comparing them adds no guards."""
    return layout_of(tensor)[4 : 4 + tensor.dim()]
