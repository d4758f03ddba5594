"""Additions of a whole tensor to a matrix product, taken apart again: :func:`unfused_residuals`.

See ``cgcompile/compat/__init__.py``.

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
    value, result = node.args[0].meta.get("val"), node.meta.get("val")  # type: ignore[union-attr]
    if not (isinstance(value, torch.Tensor) and isinstance(result, torch.Tensor)):
        return False
    if node.kwargs or result.device.type != "cuda" or value.ndim != 2:
        return False
    sizes = zip(value.shape, result.shape, strict=True)
    return all(statically_known_true(size == other) for size, other in sizes)


@cache
def _pass_type() -> type:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class UnfusedResiduals(CustomGraphPass):
        """:func:`take_apart` after Inductor's own passes, and the user's pass after it."""

        def __init__(self, then: Any) -> None:
            self._then = then

        def __call__(self, graph: fx.Graph) -> None:
            take_apart(graph)
            if self._then is not None:
                self._then(graph)

        def uuid(self) -> Any:
            # Of the user's own pass, None says: keep nothing.
            inner = "" if self._then is None else self._then.uuid()
            return None if inner is None else f"unfused residuals 1, {inner!r}"

    return UnfusedResiduals


def unfused_residuals(then: Callable[[fx.Graph], None] | None) -> Any:
    """A pass for Inductor's ``post_grad_custom_post_pass``.

    Args:
        then: the user's own pass, to be run after it.

    Returns:
        The pass; the user's own if that is a mere function, of which nobody can tell whether it is
        still the same.
    """
    if then is not None and not hasattr(then, "uuid"):
        return then
    return _pass_type()(then)
