"""Additions to a matrix product, as Inductor must not fuse them: two passes over ATen graphs.

See ``cgcompile/compat/__init__.py``.

Note [Scaled additions]
Inductor's pattern for ``mm(a, b) + x`` matches ``torch.add(mm(a, b), x, alpha=2)`` as well and
forgets the 2 (2.11 and 2.13, with ``torch.compile`` too; 2.15 is right). So before its patterns the
factor becomes a product of its own (:func:`scaled_apart`), everywhere.

Note [Residual additions]
Inductor turns ``mm(a, b) + x`` into ``addmm(x, a, b)``, unless all uses of the sum are pointwise;
to be a result is none such, and the residual stream of a model is a result of nearly every piece.
cuBLAS adds in place, so ``addmm`` first copies ``x`` into its result: one kernel more, that reads
and writes all of it. As an addition of its own it melts into the kernels that read the sum, as it
does where a model is compiled whole; and it rounds where eager rounds. A bias, of one dimension,
stays: that one is added by the product's own kernel. So does what the user wrote as ``addmm``.
torch 2.15 asks itself what is added; there the pass finds nothing.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

Pass = Callable[[fx.Graph], None]


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
        # A value of its own: Inductor tells by their memory which values are views of others.
        product.meta["val"] = torch.empty_like(node.meta["val"])
        node.replace_all_uses_with(total)
        graph.erase_node(node)


def _from_the_trace(node: fx.Node) -> bool:
    """Whether the user wrote it: what a pattern of Inductor's made has no number."""
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


@cache
def _pass_type() -> type:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Own(CustomGraphPass):
        """A pass of ours, and the user's pass after it."""

        def __init__(self, run: Pass, then: Any) -> None:
            self._run, self.then = run, then

        def __call__(self, graph: fx.Graph) -> None:
            self._run(graph)
            if self.then is not None:
                self.then(graph)

        def uuid(self) -> Any:
            # None says: keep nothing. Of a mere function nobody can tell whether it is the same.
            tell = getattr(self.then, "uuid", lambda: None)
            inner = "" if self.then is None else tell()
            return None if inner is None else f"cgcompile {self._run.__name__} 1, {inner!r}"

    return Own


def unfused_residuals(then: Pass | None) -> Any:
    """A pass for Inductor's ``post_grad_custom_post_pass``. See Note [Residual additions].

    Args:
        then: the user's own pass, to be run after it.

    Returns:
        The pass; the user's own if that is a mere function, of which nobody can tell whether it is
        still the same.
    """
    if then is not None and not hasattr(then, "uuid"):
        return then
    return _pass_type()(take_apart, then)


def scaled_apart(then: Pass | None) -> Any:
    """A pass for Inductor's ``post_grad_custom_pre_pass``. See Note [Scaled additions].

    Args:
        then: the user's own pass, to be run after it.

    Returns:
        The pass. Results depend on it, so it runs before a mere function too.
    """
    return _pass_type()(spell_out, then)
