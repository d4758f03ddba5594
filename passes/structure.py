"""When are two pieces the same computation? :func:`structural_key`.

Equal keys mean: same ops in the same order on the same arguments, inputs of equal dtype, device,
size, stride and offset (sizes as expressions of the same symbols), and the same inputs sharing
memory. Parameters are inputs of a piece, so all middle layers of a decoder have one key, and are
compiled once.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from cgcompile import compat
from cgcompile.passes.nodes import attribute, is_symbolic_number, value


def structural_key(owner: fx.GraphModule, graph: fx.Graph) -> Hashable:
    """A hashable description of a graph that leaves out the names of its nodes.

    Args:
        owner: the module that holds what ``get_attr`` nodes of the graph read.
        graph: the graph of a piece.
    """
    number: dict[fx.Node, int] = {}
    first_with_storage: dict[int, int] = {}
    rows: list[Hashable] = []
    for position, node in enumerate(graph.nodes):
        number[node] = position
        if node.op == "placeholder":
            rows.append(_input_key(value(node), position, first_with_storage))
        elif node.op == "get_attr":
            held = attribute(owner, node)
            is_body = isinstance(held, fx.GraphModule)
            key = structural_key(held, held.graph) if is_body else id(held)
            rows.append(("get_attr", key))
        else:
            target = node.target if node.op != "output" else None
            args = _argument_key((node.args, dict(node.kwargs)), number)
            rows.append((node.op, target, args))
    return tuple(rows)


def _input_key(found: Any, position: int, first_with_storage: dict[int, int]) -> Hashable:
    if hasattr(found, "__tensor_flatten__"):
        names, context = found.__tensor_flatten__()
        inner = (_input_key(getattr(found, n), position, first_with_storage) for n in names)
        return (str(type(found)), repr(context), *inner)
    if isinstance(found, torch.Tensor):
        storage = compat.storage_key(found)
        shares = position if storage is None else first_with_storage.setdefault(storage, position)
        strided = found.layout is torch.strided
        layout = (found.stride(), found.storage_offset()) if strided else found.layout
        return (
            str(type(found)),
            found.dtype,
            found.device,
            found.is_conj(),
            found.is_neg(),
            str(tuple(found.shape)),
            str(layout),
            shares,
        )
    if is_symbolic_number(found):
        return ("size", str(found.node.expr))
    return (str(type(found)), repr(found))


def _argument_key(argument: Any, number: dict[fx.Node, int]) -> Hashable:
    if isinstance(argument, fx.Node):
        return ("node", number[argument])
    if isinstance(argument, (tuple, list)):
        return (type(argument).__name__, *(_argument_key(a, number) for a in argument))
    if isinstance(argument, dict):
        return ("dict", *((k, _argument_key(v, number)) for k, v in sorted(argument.items())))
    if isinstance(argument, slice):
        parts = (argument.start, argument.stop, argument.step)
        return ("slice", *(_argument_key(part, number) for part in parts))
    if isinstance(argument, float):
        return ("float", repr(argument))  # tells 0.0 from -0.0, and nan equals nan
    if isinstance(argument, (bool, int, str, type(None), torch.dtype, torch.device)):
        return (type(argument), argument)
    return ("object", id(argument))
