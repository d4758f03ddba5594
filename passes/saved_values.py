"""Arguments and fake values of a saved graph, as JSON.

What JSON has stands for itself (floats included: it keeps -0.0 and Python's reads nan and inf);
anything else is a list that begins with its kind. Tensors are rows of a table, and so are their
storages, so that values which share memory, or are one object, do so again.
"""

import enum
from typing import Any

import torch
from torch import fx

from cgcompile import compat
from cgcompile.passes.nodes import is_symbolic_number
from cgcompile.passes.saved_sizes import ExpressionWriter
from cgcompile.passes.saved_targets import loaded_class, saved_class

_PLAIN = (type(None), bool, int, float, str)
_NAMED = (torch.dtype, torch.layout, torch.memory_format)  # attributes of torch
_LISTS: dict[Any, str] = {
    tuple: "tuple",
    list: "list",
    torch.Size: "size",
    fx.immutable_collections.immutable_list: "list",
}
_DICTS = (dict, fx.immutable_collections.immutable_dict)
_MAKE: dict[str, Any] = {
    "tuple": tuple,
    "list": list,
    "size": torch.Size,
    "slice": lambda parts: slice(*parts),
    "range": lambda parts: range(*parts),
    "complex": lambda parts: complex(*parts),
    "device": lambda parts: torch.device(parts[0]),
}


class ValueWriter:
    """The tables of a graph that is being saved.

    Attributes:
        expressions: of sizes.
        tensors: a row for each fake tensor.
        storages: a row for each storage behind them.
        env: the size environment of all values; None if there are none yet.
    """

    def __init__(self) -> None:
        self.expressions = ExpressionWriter()
        self.tensors: list[Any] = []
        self.storages: list[Any] = []
        self.env: Any = None
        self._tensor_rows: dict[int, int] = {}
        self._storage_rows: dict[int, int] = {}
        self._kept: list[Any] = []  # ids mean something while the objects live

    def saved(self, found: Any, nodes: dict[fx.Node, int]) -> Any:
        """The saved form of an argument or a value.

        Args:
            found: what to save.
            nodes: the numbers of the nodes that it may refer to.

        Raises:
            ValueError: something in it cannot be saved; the text says what.
        """
        kind = type(found)
        if kind in _PLAIN:
            return found
        if kind is fx.Node:
            return ["node", nodes[found]]
        if kind in _LISTS:
            return [_LISTS[kind], *(self.saved(item, nodes) for item in found)]
        if kind in _DICTS:
            pairs = ([self.saved(k, nodes), self.saved(v, nodes)] for k, v in found.items())
            return ["dict", *pairs]
        if kind in (slice, range):
            parts = (found.start, found.stop, found.step)
            return [kind.__name__, *(self.saved(part, nodes) for part in parts)]
        if isinstance(found, torch.Tensor):
            return ["tensor", self._tensor(found)]
        return self._rarer(found, nodes)

    def _rarer(self, found: Any, nodes: dict[fx.Node, int]) -> Any:
        kind = type(found)
        if is_symbolic_number(found):
            name = kind.__name__.removeprefix("Sym").lower()
            return [name, self._expression(found)]
        if kind in _NAMED:
            return ["torch", str(found).removeprefix("torch.")]
        if kind is torch.device:
            return ["device", str(found)]
        if found is Ellipsis:
            return ["ellipsis"]
        if kind is complex:
            return ["complex", found.real, found.imag]
        if isinstance(found, enum.Enum):
            return ["enum", *saved_class(kind), found.name]
        if kind.__module__ == "torch.return_types":  # what topk and the like return
            return ["returned", kind.__name__, *(self.saved(item, nodes) for item in found)]
        raise ValueError(f"a value of type {kind.__module__}.{kind.__qualname__}")

    def _expression(self, number: Any) -> int:
        self._belongs(number)
        return self.expressions.add(compat.traced_expression(number))

    def _number(self, size: Any) -> Any:
        """A size of a tensor: the number, or the row of its expression in a list."""
        if isinstance(size, int):
            return size
        known = size.node.expr  # after what was found to be equal
        return int(known) if known.is_number else [self._expression(size)]

    def _belongs(self, found: Any) -> None:
        env = compat.trace_of(found)
        if self.env is None:
            self.env = env
        if env is not self.env or env is None:
            raise ValueError("a value of another trace than the first one's")

    def _tensor(self, tensor: torch.Tensor) -> int:
        if id(tensor) in self._tensor_rows:
            return self._tensor_rows[id(tensor)]
        why = compat.odd_fake(tensor)
        if why is not None:
            raise ValueError(f"a tensor that is {why}")
        self._belongs(tensor)
        self.tensors.append(
            [
                str(tensor.dtype).removeprefix("torch."),
                str(tensor.device),
                [self._number(size) for size in tensor.shape],
                [self._number(step) for step in tensor.stride()],
                self._number(tensor.storage_offset()),
                self._storage(tensor),
                tensor.requires_grad,
                compat.is_fake_parameter(tensor),
            ]
        )
        self._kept.append(tensor)
        self._tensor_rows[id(tensor)] = len(self.tensors) - 1
        return len(self.tensors) - 1

    def _storage(self, tensor: torch.Tensor) -> int:
        key = compat.storage_key(tensor)
        if key is None:
            raise ValueError("a tensor without a storage")
        if key not in self._storage_rows:
            nbytes = self._number(tensor.untyped_storage().nbytes())
            self.storages.append([nbytes, tensor.is_inference()])
            self._storage_rows[key] = len(self.storages) - 1
        return self._storage_rows[key]


class ValueReader:
    """The values of a saved graph, made when they are first asked for.

    Args:
        mode: the fake mode that they belong to.
        expressions: of sizes.
        tensors: the rows that :class:`ValueWriter` made.
        storages: the rows that it made.
    """

    def __init__(
        self, mode: Any, expressions: list[Any], tensors: list[Any], storages: list[Any]
    ) -> None:
        self._mode = mode
        self._expressions = expressions
        self._rows = tensors
        self._storage_rows = storages
        self._made: dict[int, torch.Tensor] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._roots: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._numbers: dict[tuple[str, int], Any] = {}
        self._devices: dict[str, torch.device] = {}

    def value(self, row: Any, nodes: list[Any]) -> Any:
        """The inverse of :meth:`ValueWriter.saved`; ``nodes`` stand for the numbers of nodes."""
        if type(row) is not list:
            return row
        kind = row[0]
        if kind == "node":
            return nodes[row[1]]
        if kind == "tensor":
            return self._tensor(row[1])
        if kind in _MAKE:
            return _MAKE[kind]([self.value(part, nodes) for part in row[1:]])
        if kind == "dict":
            return {self.value(k, nodes): self.value(v, nodes) for k, v in row[1:]}
        if kind in ("int", "float", "bool"):
            return self._symbolic(kind, row[1])
        return self._rarer(row, nodes)

    def _rarer(self, row: Any, nodes: list[Any]) -> Any:
        kind, *parts = row
        if kind == "torch":
            found = getattr(torch, parts[0])
            if isinstance(found, _NAMED):
                return found
        elif kind == "ellipsis":
            return Ellipsis
        elif kind == "enum":
            found = loaded_class(parts[0], parts[1])
            if issubclass(found, enum.Enum):
                return found[parts[2]]
        elif kind == "returned":
            found = getattr(torch.return_types, parts[0])
            return found([self.value(part, nodes) for part in parts[1:]])
        raise ValueError(f"a value of kind {kind}")

    def _symbolic(self, kind: str, row: int) -> Any:
        if (kind, row) not in self._numbers:
            made = compat.symbolic_number(self._mode, kind, self._expressions[row])
            self._numbers[kind, row] = made
        return self._numbers[kind, row]

    def _size(self, row: Any) -> Any:
        return row if isinstance(row, int) else self._symbolic("int", row[0])

    def _tensor(self, number: int) -> torch.Tensor:
        if number in self._made:
            return self._made[number]
        dtype_name, device, shape, stride, offset, storage, gradient, parameter = self._rows[number]
        dtype = getattr(torch, dtype_name)
        sizes, steps = [self._size(n) for n in shape], [self._size(n) for n in stride]
        memory = self._root(storage, dtype).as_strided(sizes, steps, self._size(offset))
        if device not in self._devices:
            self._devices[device] = torch.device(device)
        self._made[number] = compat.fake_over(
            self._mode, memory, self._devices[device], gradient=gradient, parameter=parameter
        )
        return self._made[number]

    def _root(self, storage: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor over a storage, without elements."""
        if (storage, dtype) in self._roots:
            return self._roots[storage, dtype]
        nbytes, inference = self._storage_rows[storage]
        with torch.inference_mode(inference):
            root = torch.empty(0, dtype=dtype, device="meta")
            if storage in self._storages:
                root.set_(self._storages[storage], 0, (0,), (1,))
            else:
                compat.resize_storage(root, self._size(nbytes))
                self._storages[storage] = root.untyped_storage()
        self._roots[storage, dtype] = root
        return root
