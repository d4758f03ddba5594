"""Passes inside of Inductor, over ATen graphs and kernels, that correct what it does to a piece.

Note [Scaled additions]
Inductor's pattern for ``mm(a, b) + x`` matches ``torch.add(mm(a, b), x, alpha=2)`` as well and
drops the 2 (2.11 and 2.13, with ``torch.compile`` too; 2.15 is right). So before its patterns run,
the factor becomes a product of its own (:func:`spell_out`), on all devices.

Note [Residual additions]
Inductor turns ``mm(a, b) + x`` into ``addmm(x, a, b)``, unless all uses of the sum are pointwise.
A result of a piece is not a pointwise use, and the residual stream is a result of nearly every
piece. cuBLAS adds in place, so ``addmm`` first copies ``x`` into its result: one more kernel that
reads and writes all of it. A separate addition (:func:`take_apart`) is fused into the kernels that
read the sum, as in a model that is compiled whole, and rounds as eager does. A bias, of one
dimension, stays: the product's own kernel adds it; so does an ``addmm`` of the user. torch 2.15
checks what is added; there the pass changes nothing.

Note [Ends of slices]
With ``backed_size_oblivious``, Inductor of torch 2.11 cannot compare the end of ``x[1:]``, the
largest integer, with a dynamic size, and fails (with ``torch.compile`` too; 2.13 is right). So the
first pass replaces such an end by the size itself (:func:`end_slices`).

Note [Repeated weights]
``aten::matmul`` of ``x`` [B, 1, K] and a weight [K, N] is an ``mm`` only if ``x`` has the strides
of a contiguous tensor, in the dimension of size 1 as well. Attention over one query returns
(K, D, 1), and the layer behind it becomes a ``bmm`` by the weight expanded to [B, K, N], which
takes twice the time (B = 8, K = N = 2048, H200). On CUDA :func:`fold_batches` replaces it.

Note [Combined kernels]
Combining independent pointwise kernels saves launches. But kernels that convert 8-bit weights
depend on no other kernel, so that all of a piece would be combined into one that runs first, and
each product would read its weight from memory in place of the L2 cache (products of a Llama with
float8 weights: 301 us in place of 219, H200). So each of them gets a dependency on the product
before its own (:func:`spread_weights`). Products that are Triton templates are left out.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

Pass = Callable[[Any], Any]
_OPEN_END = 2**63 - 1  # end index of ``x[1:]``
_LARGE_WEIGHT = 2**20  # bytes


def take_apart(graph: fx.Graph) -> None:
    """Replace each ``addmm`` of a whole tensor on CUDA that Inductor made by ``mm`` and ``add``."""
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.addmm.default):
        if _from_the_trace(node) or not _adds_whole_tensor(node):
            continue
        added, one, other = node.args
        with graph.inserting_before(node):
            product = graph.call_function(aten.mm.default, (one, other))
            total = graph.call_function(aten.add.Tensor, (product, added))
        product.meta.update(node.meta)
        total.meta.update(node.meta)
        # A new value: Inductor recognises views by shared memory.
        product.meta["val"] = torch.empty_like(node.meta["val"])
        node.replace_all_uses_with(total)
        graph.erase_node(node)


def _from_the_trace(node: fx.Node) -> bool:
    """Return whether the user wrote a node: those of Inductor's patterns have no number."""
    return "seq_nr" in node.meta


def _adds_whole_tensor(node: fx.Node) -> bool:
    if node.kwargs or len(node.args) != 3:
        return False
    value, result = node.args[0].meta.get("val"), node.meta.get("val")  # type: ignore[union-attr]
    if not (isinstance(value, torch.Tensor) and isinstance(result, torch.Tensor)):
        return False
    if result.device.type != "cuda" or value.ndim != 2:
        return False
    sizes = zip(value.shape, result.shape, strict=True)
    return all(statically_known_true(size == other) for size, other in sizes)


def spell_out(graph: fx.Graph) -> None:
    """Replace each addition of a scaled tensor by a product and an addition."""
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        alpha = node.kwargs.get("alpha", 1)
        if alpha == 1 or not isinstance(node.args[1], fx.Node):
            continue
        one, other = node.args
        with graph.inserting_before(node):
            product = graph.call_function(aten.mul.Tensor, (other, alpha))
            total = graph.call_function(aten.add.Tensor, (one, product))
        product.meta.update(other.meta)
        total.meta.update(node.meta)
        product.meta["val"] = torch.empty_like(other.meta["val"])
        node.replace_all_uses_with(total)
        graph.erase_node(node)


def end_slices(graph: fx.Graph) -> None:
    """Replace the open end of each slice of a dynamic dimension by its size."""
    aten = torch.ops.aten
    for target, tensors in ((aten.slice.Tensor, 1), (aten.slice_scatter.default, 2)):
        for node in graph.find_nodes(op="call_function", target=target):
            source, rest = node.args[0], node.args[tensors:]
            if node.kwargs or len(rest) < 3 or rest[2] != _OPEN_END:
                continue
            dim, start, _, *step = rest
            size = source.meta["val"].shape[dim]
            if isinstance(size, int):
                continue
            with graph.inserting_before(node):
                end = graph.call_function(aten.sym_size.int, (source, dim))
            end.meta["val"] = size
            node.args = (*node.args[:tensors], dim, start, end, *step)


def fold_batches(graph: fx.Graph) -> None:
    """Replace each ``bmm`` of one row per batch by a repeated matrix, on CUDA, by ``mm``."""
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.bmm.default):
        rows, repeated = node.args
        if repeated.target is not aten.expand.default or repeated.kwargs:
            continue
        matrix, x = repeated.args[0], rows.meta["val"]
        if x.device.type != "cuda" or not statically_known_true(x.shape[1] == 1):
            continue
        shapes = matrix.meta["val"].shape, repeated.meta["val"].shape[1:]
        if len(shapes[0]) != 2 or not all(map(statically_known_true, map(operator.eq, *shapes))):
            continue  # rows or columns of the matrix are expanded as well
        with graph.inserting_before(node):
            flat = _insert_call(graph, node, aten.squeeze.dim, rows, 1)
            product = _insert_call(graph, node, aten.mm.default, flat, matrix)
            result = _insert_call(graph, node, aten.unsqueeze.default, product, 1)
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def _insert_call(graph: fx.Graph, like: fx.Node, target: Any, *args: Any) -> fx.Node:
    """Insert a call with its fake value; the rest of its metadata is that of ``like``."""
    node = graph.call_function(target, args)
    node.meta.update(like.meta)
    node.meta["val"] = target(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in args))
    return node


def spread_weights(nodes: list[Any]) -> list[Any]:
    """Let each kernel that converts a large weight depend on the product before its own.

    Args:
        nodes: of Inductor's scheduler, after its fusions, sorted topologically.

    Returns:
        The nodes, sorted topologically with the new dependencies.
    """
    readers: dict[str, list[Any]] = {}
    for node in nodes:
        for dependency in node.unmet_dependencies:
            readers.setdefault(dependency.name, []).append(node)
    weights: dict[Any, list[Any]] = {}  # product -> weights that it reads
    for node in filter(_converts_weight, nodes):
        (name,) = node.get_buffer_names()
        users = readers.get(name, [])
        if len(users) == 1 and users[0].is_extern():
            weights.setdefault(users[0], []).append(node)
    moved = {weight for group in weights.values() for weight in group}
    ordered, last = [], ""
    for node in nodes:
        for weight in weights.get(node, ()):
            if last:
                (name,) = weight.get_buffer_names()
                known = next(each for each in node.unmet_dependencies if each.name == name)
                weight.add_fake_dep(replace(known, name=last))
            ordered.append(weight)
        if node not in moved:
            ordered.append(node)
        if node in weights:
            last = next(iter(node.get_buffer_names()), last)
    return ordered


def _converts_weight(node: Any) -> bool:
    """Return whether a kernel depends on no other and writes one large buffer."""
    buffer = getattr(node, "node", None)  # None: several, fused
    if buffer is None or node.unmet_dependencies or len(node.get_buffer_names()) != 1:
        return False
    if node.is_extern() or node.is_template() or node.is_reduction():
        return False
    numel = buffer.get_numel()
    if not getattr(numel, "is_number", True):  # dynamic
        return False
    return int(numel) * int(buffer.get_dtype().itemsize) >= _LARGE_WEIGHT


def first_pass(graph: fx.Graph) -> None:
    """Run the passes over the ATen graph that come before Inductor's."""
    spell_out(graph)
    end_slices(graph)
    fold_batches(graph)


_VERSION = 2  # version of all passes, part of Inductor's cache keys


@cache
def _pass_type(over_kernels: bool) -> type:
    import torch._inductor.custom_graph_pass

    base: Any = torch._inductor.custom_graph_pass.CustomGraphPass
    if over_kernels:  # since 2.13
        base = getattr(torch._inductor.custom_graph_pass, "CustomSchedulerPass", base)

    class ChainedPass(base):  # type: ignore[misc]
        """A pass of this file, and the user's pass ``then`` after it, if there is one."""

        def __init__(self, run: Pass, then: Any) -> None:
            self._run, self.then = run, then

        def __call__(self, subject: Any) -> Any:
            result = self._run(subject)  # of a graph: None, it is changed in place
            if self.then is None:
                return result
            return self.then(subject if result is None else result)

        def __reduce__(self) -> Any:  # Inductor pickles settings into the keys of its caches
            return _pass, (self._run, self.then, over_kernels)

        def uuid(self) -> Any:
            # None disables caches: a plain function has no identity that lasts.
            inner = "" if self.then is None else getattr(self.then, "uuid", lambda: None)()
            if inner is None:
                return None
            return f"cgcompile {self._run.__name__} {_VERSION}, {inner!r}"

    return ChainedPass


def _pass(run: Pass, then: Any, over_kernels: bool = False) -> Any:
    return _pass_type(over_kernels)(run, then)


def _before(then: Any, run: Pass, over_kernels: bool = False) -> Any:
    """Return a pass and the user's after it, or the user's alone if it has no identity."""
    uuid = getattr(then, "uuid", None)
    if then is not None and (uuid is None or (over_kernels and uuid() is None)):
        return then  # Inductor caches what ran CustomSchedulerPass, whatever its uuid is
    return _pass(run, then, over_kernels)


def unfused_residuals(then: Pass | None) -> Any:
    """Return Inductor's ``post_grad_custom_post_pass``, see Note [Residual additions]."""
    return _before(then, take_apart)


def with_passes(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return Inductor's settings for a piece, with the passes of this file in them."""
    import torch._inductor.config as config

    def current(name: str) -> Any:
        return wanted.get(name, getattr(config, name, None))

    passes: dict[str, Any] = {_FIRST: _pass(first_pass, current(_FIRST))}  # results depend on it
    if torch.cuda.is_available():
        passes[_LAST] = unfused_residuals(current(_LAST))
        if wanted.get("combo_kernels"):
            passes[_KERNELS] = _before(current(_KERNELS), spread_weights, over_kernels=True)
    return {**wanted, **passes}


_FIRST, _LAST = "post_grad_custom_pre_pass", "post_grad_custom_post_pass"
_KERNELS = "_post_fusion_custom_pass"
