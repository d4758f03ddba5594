"""The canonical text of a graph, for programs to compare: :class:`GraphText`.

Note [Text of a graph]. Equal texts mean: same ops in the same order on the same arguments, inputs
of equal dtype, device, size, stride and offset, and the same inputs sharing memory. Names of nodes
are left out. Parameters are inputs of a piece, so all middle layers of a decoder have one text, and
are compiled once. There are two kinds:

* of one process: symbols keep their names, and an object without a lasting name stands for itself
  by its address, so texts are compared while their graphs live. Any graph has such a text.
* lasting: the same in every process, for cache keys. It holds no address, hash seed or path,
  symbols are numbered in the order in which they show, constants are told by their bytes, and the
  results of calls are included, because another process may have another fake of a custom op. What
  has no such text raises :class:`Unnameable`.
"""

import enum
import hashlib
from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch import fx

from cgcompile import torch_compat as compat
from cgcompile.passes.nodes import attribute, is_symbolic_number, value
from cgcompile.passes.symbols import dtype_text

_LARGEST_CONSTANT = 1 << 16  # bytes of a tensor that a lasting text tells by its content
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_CONTAINERS = ("tuple", "list", "immutable_list", "dict", "immutable_dict")


class Unnameable(Exception):
    """Why a graph has no lasting text; not an error, and never seen by a caller of cgcompile."""


class GraphText:
    """Writes one graph and the bodies in it; see Note [Text of a graph].

    Args:
        lasting: whether the text must mean the same in every process.

    Attributes:
        devices: of all tensors so far.
        symbols: the names that symbols have got, of a lasting text.
    """

    def __init__(self, *, lasting: bool) -> None:
        self.devices: set[torch.device] = set()
        self.symbols: dict[sympy.Symbol, sympy.Symbol] = {}
        self._lasting = lasting
        self._inputs = 0
        self._storages: dict[int, int] = {}  # the first input in that memory

    def of(self, owner: torch.nn.Module, graph: fx.Graph, indent: str = "") -> str:
        """Return the text of a graph.

        Args:
            owner: the module that holds what ``get_attr`` nodes of the graph read.
            graph: the graph.
            indent: before each row.

        Raises:
            Unnameable: something in it has no lasting text; says what.
        """
        rows: list[str] = []
        number: dict[fx.Node, str] = {}
        for node in graph.nodes:
            number[node] = f"%{len(number)}"
            head = f"{indent}{number[node]} = "
            if node.op == "placeholder":
                rows.append(f"{head}input {self._input(value(node))}")
            elif node.op == "get_attr":
                rows.append(head + self._attribute(attribute(owner, node), indent))
            elif node.op == "output":
                rows.append(f"{indent}return {self._argument(node.args[0], number)}")
            else:
                rows.append(head + self._call(node, number))
        return "\n".join(rows)

    def _only_here(self, why: str) -> None:
        """Refuse what a text of this process alone can hold."""
        if self._lasting:
            raise Unnameable(why)

    # -------------------------------------------------------------- nodes

    def _call(self, node: fx.Node, number: dict[fx.Node, str]) -> str:
        arguments = [self._argument(argument, number) for argument in node.args]
        named = sorted(node.kwargs.items())
        arguments += [f"{name}={self._argument(argument, number)}" for name, argument in named]
        text = f"{self._target(node)}({', '.join(arguments)})"
        if self._lasting:
            text += " -> " + ", ".join(map(self._value, compat.tree_leaves(value(node))))
        return text

    def _target(self, node: fx.Node) -> str:
        target: Any = node.target
        if node.op == "call_method":
            return f"method {target}"
        if node.op == "call_module":
            self._only_here(f"it calls the module {target}, whose code may change")
            return f"module {target}"
        name = compat.qualified_name(target)
        if name is None:
            text = getattr(target, "__qualname__", None) or type(target).__name__
            self._only_here(f"it calls {text}, whose code is not torch's and may change")
            return _address(target)
        if "triton_kernel" in name:
            self._only_here("it holds a Triton kernel of the user's, whose code may change")
        inside = compat.traced_through(target) if self._lasting else None
        if inside is not None:
            self._only_here(f"{inside}, by code that may change")
        return name

    def _attribute(self, held: Any, indent: str) -> str:
        if isinstance(held, fx.GraphModule):
            return f"graph\n{self.of(held, held.graph, indent + '  ')}"
        if not self._lasting:
            return f"constant {_address(held)}"
        if type(held) not in (torch.Tensor, torch.nn.Parameter):
            raise Unnameable(f"it holds a {type(held).__name__}")
        if not compat.is_plain_tensor(held) or held.is_meta or held.nbytes > _LARGEST_CONSTANT:
            raise Unnameable(f"it holds a tensor of {held.nbytes} bytes")
        data = held.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest = hashlib.sha256(bytes(data.tolist())).hexdigest()
        return f"constant {self._value(held)} {digest}"

    # -------------------------------------------------------------- values

    def _input(self, found: Any) -> str:
        position, self._inputs = self._inputs, self._inputs + 1
        if not isinstance(found, torch.Tensor):
            return self._value(found)
        text = self._value(found) + self._memory(found, position)
        text += " parameter" if isinstance(found, torch.nn.Parameter) else ""
        text += " requires grad" if found.requires_grad else ""
        return text + (" inference" if found.is_inference() else "")

    def _memory(self, found: Any, position: int) -> str:
        """Which earlier input has the memory of this one; of a subclass, for each inner tensor."""
        if hasattr(found, "__tensor_flatten__"):
            names, _ = found.__tensor_flatten__()
            return "".join(self._memory(getattr(found, name), position) for name in names)
        storage = compat.storage_key(found)
        first = position if storage is None else self._storages.setdefault(storage, position)
        return f" in the memory of input {first}" if first != position else ""

    def _value(self, found: Any) -> str:
        if isinstance(found, torch.Tensor):
            return self._tensor(found)
        if isinstance(found, torch.SymInt):
            return f"size {self._number(found)}"
        if type(found) in _PLAIN:
            return repr(found)
        self._only_here(f"a {type(found).__name__} is among its values")
        text = self._number(found) if is_symbolic_number(found) else repr(found)
        return f"{type(found).__name__} {text}"

    def _tensor(self, found: Any) -> str:
        kind = type(found).__name__
        if hasattr(found, "__tensor_flatten__"):
            self._only_here(f"a {kind} is among its values")
            names, context = found.__tensor_flatten__()
            inner = ", ".join(self._value(getattr(found, name)) for name in names)
            return f"{type(found)} {context!r} of ({inner})"
        self.devices.add(found.device)
        text = f"{dtype_text(found.dtype)}[{self._numbers(found.shape)}] {found.device}"
        if found.layout is torch.strided:
            text += f" strides ({self._numbers(found.stride())})"
            if self._number(found.storage_offset()) != "0":
                text += f" offset {self._number(found.storage_offset())}"
        else:
            self._only_here(f"a {found.layout} tensor is among its values")
            text += f" {found.layout}"
        text += "" if kind in ("FakeTensor", "Tensor", "Parameter") else f" {type(found)}"
        return text + (" conj" if found.is_conj() else "") + (" neg" if found.is_neg() else "")

    def _argument(self, found: Any, number: dict[fx.Node, str]) -> str:
        if isinstance(found, fx.Node):
            return number[found]
        kind = type(found).__name__
        if isinstance(found, (tuple, list)):
            inside = ", ".join(self._argument(item, number) for item in found)
            text = f"({inside})" if isinstance(found, tuple) else f"[{inside}]"
            return text if kind in _CONTAINERS else kind + text
        if isinstance(found, dict):
            rows = [f"{key!r}: {self._argument(item, number)}" for key, item in found.items()]
            text = "{" + ", ".join(sorted(rows)) + "}"
            return text if kind in _CONTAINERS else kind + text
        if isinstance(found, slice):
            parts = (found.start, found.stop, found.step)
            return "slice(" + ", ".join(self._argument(part, number) for part in parts) + ")"
        if isinstance(found, enum.Enum):
            return f"{type(found).__module__}.{type(found).__qualname__}.{found.name}"
        if isinstance(found, (torch.layout, torch.memory_format, type(...))):
            return str(found)
        if type(found) in _PLAIN or isinstance(found, torch.SymInt):
            return self._value(found)
        name = compat.qualified_name(found) if callable(found) else None
        if name is None:
            self._only_here(f"a {kind} is among its arguments")
        return name or _address(found)

    # -------------------------------------------------------------- sizes

    def _numbers(self, found: Iterable[Any]) -> str:
        return ", ".join(self._number(number) for number in found)

    def _number(self, found: Any) -> str:
        return self.expression(found.node.expr) if is_symbolic_number(found) else str(found)

    def expression(self, found: Any) -> str:
        """Return an expression of sizes, in the names of this text."""
        if not self._lasting:
            return str(found)
        expression = sympy.sympify(found)
        for symbol in sorted(expression.free_symbols, key=str):
            if symbol not in self.symbols:
                if compat.is_unbacked(symbol):
                    raise Unnameable("it has a size that only the data tells")
                name = f"s{len(self.symbols)}"
                self.symbols[symbol] = sympy.Symbol(name, **symbol.assumptions0)
        return str(expression.xreplace(self.symbols))


def _address(found: Any) -> str:
    return f"{type(found).__name__} at {id(found):#x}"


def count(number: int, noun: str) -> str:
    """``1 piece``, ``2 pieces``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
