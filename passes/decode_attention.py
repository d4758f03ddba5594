"""Put ``cgcompile::decode_attention`` in place of attention of few query rows.

It replaces, in Dynamo's graph before it is cut::

    scaled_dot_product_attention              with what repeats the heads of its K and V
    softmax(soft cap of (q @ k.T * scale) + mask, perhaps with sinks) @ v

as ``transformers`` writes them. The op reads heads that share K and V once, where they lie in the
cache, and is no boundary. The number of query rows is static in these graphs, so long queries keep
what they have. If it replaced some, the lengths of the layers of a static cache are counted at the
end of the graph, by one op.

The rule: attention is replaced only if nothing writes to what the op reads, or to what it replaces,
between the first replaced node and the op. Sizes that must be equal may be different symbols: the
op compares them when it runs. Softmax without a soft cap and sinks stays, since attention is
written out that way where the user chose it.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx

from cgcompile.boundaries import Boundaries, in_eager_region
from cgcompile.kernels.decode_attention import SIZE, TOKENS, op, why_unsupported
from cgcompile.kernels.small_linear import DTYPES
from cgcompile.passes.base import Fusions
from cgcompile.passes.counters import advance, increments
from cgcompile.passes.linears import CASTS
from cgcompile.passes.nodes import (
    calls,
    keep_meta,
    launches_kernel,
    nodes_in_regions,
    short_name,
    storages,
    symbols_of,
    value,
    written,
)
from cgcompile.torch_compat import expressions, raw_memory, torch_ops, torch_settings

_SDPA = "scaled_dot_product_attention"
_REPEATS = ("reshape", "view", "flatten", "contiguous", "repeat_interleave")


class _Attention(NamedTuple):
    """Attention that the op can compute; ``end`` has its result."""

    q: fx.Node
    k: fx.Node
    v: fx.Node
    mask: fx.Node | None
    sinks: fx.Node | None
    scale: float
    soft_cap: float
    end: fx.Node
    between: frozenset[fx.Node]  # inputs and end; those with other users stay

    @property
    def replaced(self) -> frozenset[fx.Node]:
        return self.between | {self.end}


class _Refused(Exception):
    """The reason why attention is not replaced; the pass catches it."""


def _require(holds: bool, why: str) -> None:
    if not holds:
        raise _Refused(why)


def replace_attention(
    gm: fx.GraphModule,
    boundaries: Boundaries,
    on_device: Callable[[fx.Node], bool],
    insists: bool,
) -> Fusions:
    """Replace attention of few query rows in place; return what was replaced, and what was not.

    Args:
        gm: the graph.
        boundaries: the registry of splitting ops; what the user named there stays.
        on_device: returns whether attention is replaced where a node computes.
        insists: also where the kernel is not faster.
    """
    replacer = _Replacer(gm, boundaries, insists)
    fused: dict[str, list[str]] = {}
    unfused: dict[str, list[str]] = {}
    for node in list(gm.graph.nodes):
        if calls(node, _SDPA, "matmul") and on_device(node):
            try:
                attention = _attention_of(node)
                if attention is not None:
                    fused.setdefault(replacer.replace(attention), []).append(node.name)
            except _Refused as why:
                unfused.setdefault(str(why), []).append(node.name)
    if fused:
        replacer.advance_counters()
    fusions = Fusions()
    fusions.fused += [f"{_listed(names)}, {what}" for what, names in fused.items()]
    fusions.unfused += [f"{_listed(names)}: {why}" for why, names in unfused.items()]
    return fusions


def _listed(names: list[str]) -> str:
    """Return text such as ``attn_output and 15 more``."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


class _Replacer:
    """Replaces attention of one graph in place; what its nodes do is read once."""

    def __init__(self, gm: fx.GraphModule, boundaries: Boundaries, insists: bool) -> None:
        self._gm, self._boundaries, self._insists = gm, boundaries, insists
        self._users = boundaries.without_builtin()
        self._order = {node: position for position, node in enumerate(gm.graph.nodes)}

    # Both are read before the first node is replaced, and not for long queries.
    @functools.cached_property
    def _regions(self) -> set[fx.Node]:
        graph = self._gm.graph
        autocast = bool(graph.find_nodes(op="call_function", target=torch_ops.ENTER_AUTOCAST))
        return set(self._order) if autocast else nodes_in_regions(self._gm)

    @functools.cached_property
    def _writes(self) -> list[tuple[int, set[int]]]:
        """The positions of nodes that write, with the storages."""
        return [
            (position, storages([value(target) for target in targets]))
            for node, position in self._order.items()
            if (targets := written(self._gm, node))
        ]

    def replace(self, attention: _Attention) -> str:
        """Put the op in place of attention; return what it computes, as text."""
        _check_values(attention)
        self._check_surroundings(attention)
        if not self._insists:
            _check_gain(attention)
        self._check_writes(attention)
        self._check_length(attention)
        graph, end = self._gm.graph, attention.end
        with graph.inserting_before(end):
            result = call = graph.call_function(op(), tuple(attention[:7]))
            if not _is_dense(value(end), heads_first=False):
                result = graph.call_method("contiguous", (call,))
        for node in {call, result}:
            keep_meta(node, end)  # the manager of passes runs new nodes
            self._order[node] = self._order[end]
        end.replace_all_uses_with(result)
        for node in sorted(attention.replaced, key=self._order.__getitem__, reverse=True):
            if not node.users:
                graph.erase_node(node)
        return _text_of(attention)

    def advance_counters(self) -> None:
        """Advance the lengths of all layers by one op, which would be one in each piece."""
        movable = increments(self._gm).items()
        chosen = {node for _, node in movable if in_eager_region(node) or self._users.match(node)}
        advance(self._gm, {counter: node for counter, node in movable if node not in chosen})

    def _check_surroundings(self, attention: _Attention) -> None:
        """Refuse attention for which the user, or a state of the process, chose how it runs."""
        nodes = attention.replaced
        _require(not any(map(in_eager_region, nodes)), "it is in cgcompile.eager_region()")
        named = next((entry for entry in map(self._users.match, nodes) if entry is not None), None)
        _require(named is None, f"splitting_ops has {named.name if named else ''}")
        outside = self._regions.isdisjoint(nodes) and not torch_ops.any_autocast()
        _require(outside, "it is in a region of autocast, grad mode or a transform")
        _require(
            torch_settings.allows_all_attention(), "torch.nn.attention.sdpa_kernel restricts it"
        )

    def _check_writes(self, attention: _Attention) -> None:
        """Refuse attention if a value in it may differ where the op reads it."""
        last = self._order[attention.end]
        for node in attention.replaced:
            memory = storages([value(member) for member in (node, *node.all_input_nodes)])
            writes = (keys for at, keys in self._writes if self._order[node] < at < last)
            unwritten = all(map(memory.isdisjoint, writes))
            _require(unwritten, "what it reads is written before it ends")

    def _check_length(self, attention: _Attention) -> None:
        """Refuse attention over keys whose number varies, if piecewise graphs serve all numbers."""
        numbers = [symbols_of(size) for size in _numbers_of_keys(attention)]  # all are equal
        if all(numbers) and self._boundaries.match(attention.end) is not None:
            why = "the number of its keys varies, and nothing else depends on it"
            _require(any(map(self._captured_symbols.intersection, numbers)), why)

    @functools.cached_property
    def _captured_symbols(self) -> set[sympy.Symbol]:
        """The symbols of what is captured even if attention is not."""
        nodes = [node for node in self._order if launches_kernel(self._gm, node)]
        captured = [node for node in nodes if not calls(node, _SDPA, *_REPEATS)]
        values = [value(member) for node in captured for member in (node, *node.all_input_nodes)]
        return symbols_of(values)


def _inputs(attention: _Attention) -> list[fx.Node]:
    return [node for node in attention[:5] if node is not None]


# ---------------------------------------------------------------- values


def _same(some: Iterable[Any], others: Iterable[Any]) -> bool:
    """Return whether sizes are equal for all values of their symbols; adds no guard."""
    one, other = tuple(some), tuple(others)
    return len(one) == len(other) and all(map(expressions.statically_equal, one, other))


def _shape(node: fx.Node) -> tuple[Any, ...]:
    """Return the sizes of a value; what was a symbol, and is fixed by now, is a number."""
    return tuple(map(expressions.fixed_size, value(node).shape))


def _fit(some: Iterable[Any], others: Iterable[Any]) -> bool:
    """Return whether sizes are equal wherever attention of them is defined; adds no guard."""
    return all(itertools.starmap(expressions.equal_if_defined, zip(some, others, strict=True)))


def _numbers_of_keys(attention: _Attention) -> list[Any]:
    """Return the number of keys as K, V and the mask have it."""
    of_mask = () if attention.mask is None else _shape(attention.mask)[-1:]
    whole = [size for size in of_mask if not _same([size], [1])]
    return [_shape(attention.k)[2], _shape(attention.v)[2], *whole]


def _is_dense(result: torch.Tensor, *, heads_first: bool) -> bool:
    """Return whether [B, H, T, Dv] is contiguous; if not ``heads_first``, as [B, T, H, Dv]."""
    _, heads, rows, size = result.shape
    inner = (rows * size, size) if heads_first else (size, heads * size)
    strides = zip(result.stride(), (heads * rows * size, *inner, 1), strict=True)
    pairs = zip(result.shape, strides, strict=True)
    return all(_same([number], [1]) or _same([one], [other]) for number, (one, other) in pairs)


def _is_plain(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and raw_memory.is_plain_tensor(tensor)


def _check_values(attention: _Attention) -> None:
    """Refuse tensors that the op, or its kernel where the device has it, does not take."""
    nodes = (*attention[:3], attention.end)
    q, k, v, result = map(value, nodes)
    inputs = [*map(value, _inputs(attention)), result]
    _require(all(map(_is_plain, inputs)), "a tensor of it is no plain tensor")
    _require(all(t.dim() == 4 for t in (q, k, v, result)), "its tensors have not 4 dimensions")
    (batch, heads, rows, size), keys, values, of_result = map(_shape, nodes)
    few = type(rows) is int and 0 < rows <= TOKENS
    _require(few, f"it has {rows if type(rows) is int else 'a dynamic number of'} query rows")
    _require(len({tensor.device for tensor in inputs}) == 1, "its tensors are on several devices")
    dtypes = {tensor.dtype for tensor in (q, k, v, result)}
    taken = DTYPES if why_unsupported(q.device) is None else (*DTYPES, torch.float32)
    one_known = len(dtypes) == 1 and dtypes <= set(taken)
    _require(one_known, f"its dtypes are {', '.join(sorted(map(str, dtypes)))}")
    shared = keys[1]
    grouped = type(heads) is type(shared) is int and shared > 0 and heads % shared == 0
    fits = _same([keys[3], values[1]], [size, shared]) and _fit(keys[:1], [batch])
    fits &= _fit([values[0], values[2]], [keys[0], keys[2]])
    fits &= _same(of_result, (batch, heads, rows, values[3]))
    _require(grouped and fits, "its sizes are not known to fit")
    sizes = size, values[3]
    small = all(type(own) is int and own <= SIZE for own in sizes)
    _require(small, f"its heads have {' and '.join(map(str, dict.fromkeys(sizes)))} values")
    known = _is_dense(result, heads_first=True) or _is_dense(result, heads_first=False)
    _require(known, "its result has an unusual layout")
    dense = _same([k.stride(3), v.stride(3)], [1, 1])
    _require(dense, "the values of a position are not beside each other")
    if attention.mask is not None:
        _check_mask(value(attention.mask), q.dtype, (batch, heads, rows, keys[2]))
    if attention.sinks is not None:
        _require(_same(value(attention.sinks).shape, [heads]), "its sinks are not one of each head")


def _check_gain(attention: _Attention) -> None:
    """Refuse attention without keys to skip or share: a gain over torch's kernels is not known."""
    (_, heads, rows, _), shared = _shape(attention.q), _shape(attention.k)[1]
    skips = attention.mask is not None and rows == 1
    _require(skips or heads > shared, "no heads share K and V, and no mask is for one row")


def _check_mask(mask: torch.Tensor, dtype: torch.dtype, shape: tuple[Any, ...]) -> None:
    _require(mask.dtype in (torch.bool, torch.float32, dtype), f"its mask is {mask.dtype}")
    whole = shape[4 - mask.dim() :] if mask.dim() <= 4 else ()
    fits = len(whole) == mask.dim() and all(
        _same([size], [1]) or _fit([size], [full])
        for size, full in zip(mask.shape, whole, strict=True)
    )
    _require(fits, "its mask has another shape than its scores")


def _text_of(attention: _Attention) -> str:
    """Return text such as ``K and V of 4 heads each, bool mask``."""
    group = _shape(attention.q)[1] // _shape(attention.k)[1]
    parts = [f"K and V of {group} heads each"] if group > 1 else []
    if attention.mask is not None:
        parts.append(f"{value(attention.mask).dtype} mask".removeprefix("torch."))
    parts += ["soft cap"] if attention.soft_cap else []
    parts += ["sinks"] if attention.sinks is not None else []
    return ", ".join(parts) or "no mask"


# ---------------------------------------------------------------- patterns


def _named(node: Any, names: str) -> dict[str, Any]:
    """Return the arguments of a call by name; ``names`` lists its parameters in order."""
    return {**dict(zip(names.split(), node.args, strict=False)), **node.kwargs}


def _source(node: Any, *names: str) -> Any:
    """Return the first argument of a call of one of these functions, else None."""
    return node.args[0] if calls(node, *names) else None


def _attention_of(node: fx.Node) -> _Attention | None:
    """Return the attention that ends in a node, or None; raises where it cannot be the op's."""
    attention = _fused(node) if calls(node, _SDPA) else _written_out(node)
    if attention is None:
        return None
    # The op broadcasts. Inductor would compute an expanded mask anew for each layer.
    mask: Any = attention.mask
    expanded: set[fx.Node] = set()
    while calls(mask, "expand", "expand_as", "broadcast_to"):
        expanded.add(mask)
        mask = mask.args[0]
    return attention._replace(mask=mask, between=attention.between | expanded)


def _fused(node: fx.Node) -> _Attention:
    """Return ``scaled_dot_product_attention``, and what repeats the heads of its K and V."""
    named = _named(node, "query key value attn_mask dropout_p is_causal scale enable_gqa")
    q, k, v, mask = named["query"], named["key"], named["value"], named.get("attn_mask")
    known = all(isinstance(n, fx.Node) and _is_plain(value(n)) for n in (q, k, v))
    _require(known and isinstance(mask, fx.Node | None), "a tensor of it is no plain tensor")
    _require(named.get("dropout_p", 0.0) == 0, "it has dropout")
    # With one query row it would read only the first key.
    _require(named.get("is_causal", False) is False, "it is causal without a mask")
    size = _shape(q)[-1]
    scale: Any = named.get("scale")
    scale = size**-0.5 if scale is None and type(size) is int and size else scale
    _require(type(scale) in (int, float), "its scale is dynamic")
    k, v, between = _unrepeated(k, v)
    return _Attention(q, k, v, mask, None, float(scale), 0.0, node, frozenset(between))


def _unrepeated(k: fx.Node, v: fx.Node) -> tuple[fx.Node, fx.Node, set[fx.Node]]:
    """Return K and V before their heads were repeated, and the nodes between."""
    one, other = _repeated(k), _repeated(v)
    if one is None or other is None:
        return k, v, set()
    return one[0], other[0], one[1] | other[1]


def _repeated(node: Any) -> tuple[fx.Node, set[fx.Node]] | None:
    """Return (source, nodes) of ``[B, Hkv, L, D]`` whose heads are each repeated, or None."""
    between = set()
    if calls(node, "contiguous"):
        between.add(node)
        node = node.args[0]
    if calls(node, "repeat_interleave"):
        named = _named(node, "input repeats dim")
        plain = type(named.get("repeats")) is int and named.get("dim") in (1, -3)
        four = plain and value(node).dim() == 4
        return (node.args[0], {*between, node}) if four else None
    joined, expanded = node, _source(node, "reshape", "view", "flatten")
    split = _source(expanded, "expand", "broadcast_to")
    if not _adds_a_group(split):
        return None
    source = split.args[0]
    batch, shared, group, length, size = value(expanded).shape
    fits = _same(value(source).shape, (batch, shared, length, size))
    fits = fits and _same(value(joined).shape, (batch, shared * group, length, size))
    return (source, {*between, joined, expanded, split}) if fits else None


def _adds_a_group(node: Any) -> bool:
    """Return whether a node is ``x[:, :, None]`` of 4 dimensions."""
    if calls(node, "unsqueeze"):
        added = _named(node, "input dim").get("dim") in (2, -3)
    elif calls(node, "getitem"):
        index = [*node.args[1]] if isinstance(node.args[1], (tuple, list)) else [node.args[1]]
        while index and index[-1] in (slice(None), Ellipsis):
            index.pop()
        added = index == [slice(None), slice(None), None]
    else:
        return False
    return added and value(node).dim() == 5


class _Chain:
    """Goes from the weights of attention back to its scores, and notes the nodes it passes."""

    def __init__(self, node: Any, dtype: torch.dtype) -> None:
        self.node, self.passed = node, set[fx.Node]()
        self._dtypes = (dtype, torch.float32)
        self._skip()

    def to(self, source: Any, *passed: fx.Node) -> None:
        """Go from the node, over ``passed``, to a source; casts and dropout of 0 are skipped."""
        self.passed |= {self.node, *passed}
        self.node = source
        self._skip()

    def _skip(self) -> None:
        while (calls(self.node, *CASTS) and value(self.node).dtype in self._dtypes) or (
            calls(self.node, "dropout") and _has_no_dropout(self.node)
        ):
            self.passed.add(self.node)
            self.node = self.node.args[0]

    def factor(self) -> float:
        """Pass a product or quotient with a number, and return that as a factor; 1.0 of others."""
        if not calls(self.node, "mul", "truediv", "div"):
            return 1.0
        arguments, divides = self.node.args, not calls(self.node, "mul")
        numbers = [n for n in arguments if type(n) in (int, float)]
        if len(arguments) != 2 or len(numbers) != 1 or self.node.kwargs:
            return 1.0
        if divides and (numbers[0] is arguments[0] or numbers[0] == 0):
            return 1.0
        self.to(next(n for n in arguments if isinstance(n, fx.Node)))
        return 1 / numbers[0] if divides else float(numbers[0])

    def soft_cap(self) -> float:
        """Pass ``cap * tanh(scores / cap)`` and return the cap; 0.0 of others."""
        capped, passed = self.node, set(self.passed)
        cap = self.factor()
        if calls(self.node, "tanh"):
            self.to(self.node.args[0])
            if cap > 0 and math.isclose(cap * self.factor(), 1.0, rel_tol=1e-6):
                return cap
        self.node, self.passed = capped, passed
        return 0.0

    def mask(self) -> fx.Node | None:
        """Pass ``scores + mask``, and return the mask."""
        if not calls(self.node, "add") or self.node.kwargs or len(self.node.args) != 2:
            return None
        scores, mask = self.node.args
        if not isinstance(scores, fx.Node) or not isinstance(mask, fx.Node):
            return None
        if not _is_plain(value(mask)) or not value(mask).is_floating_point():
            return None  # a sum counts True as 1
        self.to(scores)
        return mask

    def sinks(self) -> fx.Node | None:
        """Pass ``cat((scores, sinks), -1)``, perhaps less its maximum, and return the sinks [H]."""
        most = _subtracted_maximum(self.node)
        if most is not None:
            self.to(self.node.args[0], *most)
        joined: Any = self.node
        named = _named(joined, "tensors dim") if calls(joined, "cat") else {}
        parts = named.get("tensors")
        pair = isinstance(parts, (tuple, list)) and len(parts) == 2
        if not pair or not _is_last(named.get("dim", 0), joined):
            return None
        scores, expanded = parts  # type: ignore[misc]
        # The expansion for one request changes nothing, and is eliminated.
        column = _source(expanded, "expand") or expanded
        sinks = _source(column, "reshape", "view")
        if not isinstance(sinks, fx.Node) or value(sinks).dim() != 1:
            return None
        # The elements of a vector stay in order, so its shape shows where they are.
        shape = (1, value(sinks).shape[0], 1, 1)
        if not _same(value(column).shape, shape) or not _same(value(expanded).shape[3:], [1]):
            return None
        self.to(scores, expanded, column)
        return sinks


def _has_no_dropout(node: fx.Node) -> bool:
    named = _named(node, "input p training")
    return named.get("training", True) is False or named.get("p", 0.5) == 0


def _is_last(dim: Any, node: fx.Node) -> bool:
    return dim in (-1, value(node).dim() - 1)


def _subtracted_maximum(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """Return (max, its values) of ``x - x.max(-1, keepdim=True).values``, or None."""
    if not calls(node, "sub") or node.kwargs or len(node.args) != 2:
        return None
    x, values = node.args
    if not calls(values, "getitem") or values.args[1] != 0:
        return None
    maximum = values.args[0]
    if short_name(maximum.target) != "max" or maximum.args[0] is not x:
        return None
    named = _named(maximum, "input dim keepdim")
    over_last = _is_last(named.get("dim"), x) and named.get("keepdim") is True
    return (maximum, values) if over_last else None


def _written_out(node: Any) -> _Attention | None:
    """Return attention by products and softmax, with a soft cap or sinks."""
    if node.kwargs or len(node.args) != 2:
        return None
    dtype = value(node).dtype
    weights, v = node.args
    chain = _Chain(weights, dtype)
    with_sinks = calls(chain.node, "getitem") and chain.node.args[1] == _ALL_BUT_THE_LAST
    if with_sinks:
        chain.to(chain.node.args[0])
    if not calls(chain.node, "softmax") or not _is_last(_softmax_dim(chain.node), chain.node):
        return None
    chain.to(chain.node.args[0])
    sinks = chain.sinks() if with_sinks else None
    mask, soft_cap = chain.mask(), chain.soft_cap()
    scale, product = chain.factor(), chain.node
    known = sinks is not None if with_sinks else soft_cap != 0
    if not known or not calls(product, "matmul") or product.kwargs or len(product.args) != 2:
        return None
    q, transposed = product.args
    if not _swaps_the_last_two(transposed):
        return None
    chain.to(transposed)
    chain.to(transposed.args[0])
    own = {*chain.passed, node}
    _require(all(own.issuperset(n.users) for n in chain.passed), "its weights have other users")
    condition = None if sinks is None else _condition_of(mask)
    if condition is not None:
        chain.passed.add(mask)  # type: ignore[arg-type]
        mask = condition
    k, v, repeats = _unrepeated(chain.node, v)
    between = frozenset(chain.passed | repeats)
    return _Attention(q, k, v, mask, sinks, scale, soft_cap, node, between)


_ALL_BUT_THE_LAST = (Ellipsis, slice(None, -1, None))


def _softmax_dim(node: fx.Node) -> Any:
    return _named(node, "input dim").get("dim")


def _swaps_the_last_two(node: Any) -> bool:
    if not calls(node, "transpose", "swapaxes", "swapdims") or node.kwargs:
        return False
    dims = node.args[1:]
    return value(node).dim() == 4 and {dim % 4 for dim in dims if type(dim) is int} == {2, 3}


def _condition_of(mask: Any) -> fx.Node | None:
    """Return the condition of ``where(condition, 0, the least number)``, or None."""
    # Only with sinks: without, a row of least numbers weighs all keys alike, one of False is 0.
    if not calls(mask, "where") or not value(mask).is_floating_point():
        return None
    named = _named(mask, "condition input other")
    condition, zero = named.get("condition"), named.get("input")
    least = named.get("other") in (torch.finfo(value(mask).dtype).min, -math.inf)
    is_bool = isinstance(condition, fx.Node) and value(condition).dtype is torch.bool
    return condition if least and is_bool and _is_zero(zero) else None


def _is_zero(node: Any) -> bool:
    """Return whether an argument is 0, or a tensor of zeros that only ``where`` reads."""
    if not isinstance(node, fx.Node):
        return type(node) in (int, float) and node == 0
    return short_name(node.target) == "zeros" and all(calls(user, "where") for user in node.users)
