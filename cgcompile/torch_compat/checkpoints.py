"""Activation checkpointing in a graph of Dynamo, without a compiler."""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from cgcompile.torch_compat.dynamo import copied
from cgcompile.torch_compat.torch_ops import is_named

_OP = "tag_activation_checkpoint"
_CONTEXT = "_checkpoint_context_fn"  # of selective checkpointing, in the ``meta`` of a body


def with_checkpoints(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a graph with right gradients if run op by op: a copy, or itself if it is one."""
    # Run op by op, the op of Dynamo recomputes with other random numbers: it leaves that to
    # Inductor. :func:`torch.utils.checkpoint.checkpoint` restores their state.
    bodies = {
        node: body
        for node in gm.graph.find_nodes(op="get_attr")
        if isinstance(body := attrgetter(str(node.target))(gm), fx.GraphModule)
    }
    replaced = {node: with_checkpoints(body) for node, body in bodies.items()}
    calls = [node for node in bodies for node in node.users if is_named(node.target, _OP)]
    if not calls and replaced == bodies:
        return gm
    result = copied(gm)
    copies = dict(zip(gm.graph.nodes, result.graph.nodes, strict=True))
    for number, (node, body) in enumerate(replaced.items()):
        name = f"_checkpoint_body_{number}"
        result.add_module(name, body)
        copies[node].target = name
    for number, call in enumerate(calls):
        name, copy = f"_checkpoint_{number}", copies[call]
        body, context_fn = replaced[call.args[0]], bodies[call.args[0]].meta.get(_CONTEXT)
        result.add_module(name, _Checkpoint(body, call.kwargs, context_fn))
        copy.op, copy.target, copy.args, copy.kwargs = "call_module", name, copy.args[1:], {}
    result.recompile()
    return result


class _Checkpoint(nn.Module):
    def __init__(self, body: fx.GraphModule, options: Mapping[str, Any], context_fn: Any) -> None:
        super().__init__()
        self._body = body
        self._options = {**options, "use_reentrant": False}  # which gives gradients to every input
        if context_fn is not None:
            self._options["context_fn"] = context_fn

    def forward(self, *inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._body(*inputs)
        return checkpoint(self._body, *inputs, **self._options)
