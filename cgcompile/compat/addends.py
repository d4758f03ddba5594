"""Additions that Inductor takes into a matrix product. See ``cgcompile/compat/__init__.py``.

Inductor makes one ``addmm`` of a product and an addition. On a GPU that op copies an addend as
large as the product to where the product will be, which is a kernel more; so Inductor leaves the
addition to the kernels around it where all readers of the sum are pointwise. What a graph returns
counts as no such reader. A residual stream that leaves each piece would therefore be copied twice a
layer, which it is not in the whole graph. :class:`AddendsApart` takes these additions out again,
whoever reads the sum: a copy less where a kernel around can add, and as many kernels where none
can. The result is rounded as eager mode rounds it, after the product and after the sum.
"""

from functools import cache
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.experimental.symbolic_shapes import statically_known_true

ADDMM = torch.ops.aten.addmm.default


class AddendsApart(CustomGraphPass):
    """A pass of Inductor's over an ATen graph: ``addmm`` of a large addend becomes ``mm``, ``add``.

    It leaves alone what the user wrote as ``addmm``.
    """

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=ADDMM):
            if _was_fused(node) and _copies_its_addend(node):
                _take_apart(graph, node)

    def uuid(self) -> str:
        return "cgcompile addends apart 1"


@cache
def addends_apart() -> AddendsApart | None:
    """The pass, for a torch that needs it: later ones ask themselves what the addend is."""
    from torch._inductor.fx_passes import post_grad

    return None if hasattr(post_grad, "_is_bias_like_addmm_input") else AddendsApart()


def _was_fused(node: fx.Node) -> bool:
    """Whether a pattern of Inductor's made a node: what was traced has a place in the trace."""
    return "seq_nr" not in node.meta


def _copies_its_addend(node: fx.Node) -> bool:
    addend, made = (_value(each) for each in (node.args[0], node))
    if addend is None or made is None or node.kwargs or made.device.type != "cuda":
        return False
    if addend.dim() != 2 or addend.dtype != made.dtype or addend.device != made.device:
        return False
    pairs = zip(addend.shape, made.shape, strict=True)
    return all(statically_known_true(one == other) for one, other in pairs)


def _value(argument: Any) -> torch.Tensor | None:
    found = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    return found if isinstance(found, torch.Tensor) else None


def _take_apart(graph: fx.Graph, node: fx.Node) -> None:
    aten = torch.ops.aten
    addend, left, right = node.args
    with graph.inserting_before(node):
        product = graph.call_function(aten.mm.default, (left, right))
        total = graph.call_function(aten.add.Tensor, (addend, product))
    for made in (product, total):
        made.meta.update(node.meta)
    # One of its own: Inductor tells by the memory of these values which of them are views.
    product.meta["val"] = aten.mm.default(_value(left), _value(right))
    node.replace_all_uses_with(total)
    graph.erase_node(node)
