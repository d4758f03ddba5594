"""The walk over nested values, against torch's own."""

from collections import OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import pytest
import torch
from torch.utils import _pytree

from cgcompile.torch_compat import torch_ops

Pair = namedtuple("Pair", "first second")
x = torch.zeros(2)


class Own(torch.Tensor):
    pass


TREES = {
    "tensor": x,
    "none": None,
    "parameter": torch.nn.Parameter(x),
    "subclass": x.as_subclass(Own),
    "empty": ((), [], {}),
    "nested": [x, (1, {"k": x, "j": [None]})],
    "order of a dict": {"b": 1, "a": x},
    "named tuple": {"a": Pair(x, (x, Pair(1, 2)))},
    "other containers": [OrderedDict(b=x, a=(1,)), deque([1, x]), defaultdict(list, {"a": [1]})],
    "sizes": (torch.Size([1, 2]), slice(1, 2)),
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_same_as_torchs(tree: Any) -> None:
    """Leaves, their order, their paths and what is built around them."""
    leaves = _pytree.tree_leaves(tree)
    assert list(map(id, torch_ops.tree_leaves(tree))) == list(map(id, leaves))
    seen: list[Any] = []
    mapped = torch_ops.tree_map(lambda leaf: (seen.append(leaf), id(leaf))[1], tree)
    assert list(map(id, seen)) == list(map(id, leaves))
    theirs = _pytree.tree_map(id, tree)
    assert mapped == theirs
    assert torch_ops.tree_spec(mapped) == torch_ops.tree_spec(theirs)
    paths = _pytree.tree_flatten_with_path(tree)[0]
    assert [path for path, _ in torch_ops.tree_paths(tree)] == [_pytree.keystr(p) for p, _ in paths]
    assert torch_ops.is_container(tree) is not _pytree.tree_is_leaf(tree)
