"""The canonical text of a graph, for programs to compare: :class:`GraphText`.

Note [Text of a graph]. Equal texts mean: the same ops in the same order on the same arguments,
inputs of equal dtype, device, size, stride and offset, and the same inputs sharing memory. Names of
nodes are left out. Parameters are inputs of a piece, so all middle layers of a decoder have one
text, and are compiled once. There are two kinds:

* of one process: symbols keep their names, and an object without a lasting name is represented by
  its address, so texts are compared while their graphs live. Any graph has such a text.
* lasting: the same in every process, for cache keys. It has no address, hash seed or path, symbols
  are numbered in order of appearance, constants are hashed, and the results of calls are included,
  because another process may have another fake of a custom op. Where that is impossible,
  :class:`Unnameable` is raised.
"""

import enum
import hashlib
from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch import fx

from cgcompile.passes.nodes import (
    attribute,
    dtype_text,
    is_symbolic_number,
    symbols_of,
    tensors,
    value,
)
from cgcompile.torch_compat import expressions, inductor, raw_memory, torch_ops

_LARGEST_CONSTANT = 1 << 16  # bytes of a tensor that a lasting text hashes
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_CONTAINERS = ("tuple", "list", "immutable_list", "dict", "immutable_dict")


class Unnameable(Exception):
    """The reason why a graph has no lasting text; it never reaches a caller of cgcompile."""


class GraphText:
    """Write one graph and the bodies in it as text; see Note [Text of a graph]."""

    def __init__(self, *, lasting: bool) -> None:
        self.devices: set[torch.device] = set()  # devices of all tensors so far
        self.symbols: dict[sympy.Symbol, sympy.Symbol] = {}  # renamed, in a lasting text
        self._lasting = lasting
        self._inputs = 0
        self._storages: dict[int, int] = {}  # the first input in that memory

    def of(self, owner: torch.nn.Module, graph: fx.Graph, indent: str = "") -> str:
        """Return the text of a graph; ``owner`` has the attributes that its nodes read."""
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

    def _refuse_lasting(self, reason: str) -> None:
        """Refuse a value whose text is only valid in this process."""
        if self._lasting:
            raise Unnameable(reason)

    # -------------------------------------------------------------- nodes

    def _call(self, node: fx.Node, number: dict[fx.Node, str]) -> str:
        arguments = [self._argument(argument, number) for argument in node.args]
        named = sorted(node.kwargs.items())
        arguments += [f"{name}={self._argument(argument, number)}" for name, argument in named]
        text = f"{self._target(node)}({', '.join(arguments)})"
        if self._lasting:
            text += " -> " + ", ".join(map(self._value, torch_ops.tree_leaves(value(node))))
        return text

    def _target(self, node: fx.Node) -> str:
        target: Any = node.target
        if node.op == "call_method":
            return f"method {target}"
        if node.op == "call_module":
            self._refuse_lasting(f"it calls the module {target}, whose code may change")
            return f"module {target}"
        name = inductor.qualified_name(target)
        if name is None:
            text = getattr(target, "__qualname__", None) or type(target).__name__
            self._refuse_lasting(f"it calls {text}, whose code is not torch's and may change")
            return _address(target)
        if "triton_kernel" in name:
            self._refuse_lasting("it holds a Triton kernel of the user's, whose code may change")
        inside = inductor.traced_through(target) if self._lasting else None
        if inside is not None:
            self._refuse_lasting(f"{inside}, by code that may change")
        return name

    def _attribute(self, held: Any, indent: str) -> str:
        if isinstance(held, fx.GraphModule):
            return f"graph\n{self.of(held, held.graph, indent + '  ')}"
        if not self._lasting:
            return f"constant {_address(held)}"
        if type(held) not in (torch.Tensor, torch.nn.Parameter):
            raise Unnameable(f"it holds a {type(held).__name__}")
        if not raw_memory.is_plain_tensor(held) or held.is_meta or held.nbytes > _LARGEST_CONSTANT:
            raise Unnameable(f"it holds a tensor of {held.nbytes} bytes")
        data = held.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest = hashlib.sha256(bytes(data.tolist())).hexdigest()
        return f"constant {self._value(held)} {digest}"

    # -------------------------------------------------------------- values

    def _input(self, fake: Any) -> str:
        position, self._inputs = self._inputs, self._inputs + 1
        if not isinstance(fake, torch.Tensor):
            return self._value(fake)
        text = self._value(fake) + self._memory(fake, position)
        text += " parameter" if isinstance(fake, torch.nn.Parameter) else ""
        text += " requires grad" if fake.requires_grad else ""
        return text + (" inference" if fake.is_inference() else "")

    def _memory(self, tensor: Any, position: int) -> str:
        """Name the earlier input with the same memory; of a subclass, for each inner tensor."""
        if hasattr(tensor, "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            inner = [getattr(tensor, name) for name in names]
            return "".join(self._memory(each, position) for each in tensors(inner))
        storage = raw_memory.storage_key(tensor)
        first = position if storage is None else self._storages.setdefault(storage, position)
        return f" in the memory of input {first}" if first != position else ""

    def _value(self, fake: Any) -> str:
        if isinstance(fake, torch.Tensor):
            return self._tensor(fake)
        if isinstance(fake, torch.SymInt):
            return f"size {self._number(fake)}"
        if type(fake) in _PLAIN:
            return repr(fake)
        if not (is_symbolic_number(fake) and all(s.is_integer for s in symbols_of(fake))):
            self._refuse_lasting(f"a {type(fake).__name__} is among its values")
        text = self._number(fake) if is_symbolic_number(fake) else repr(fake)
        return f"{type(fake).__name__} {text}"

    def _tensor(self, tensor: Any) -> str:
        kind = type(tensor).__name__
        if hasattr(tensor, "__tensor_flatten__"):
            self._refuse_lasting(f"a {kind} is among its values")
            names, context = tensor.__tensor_flatten__()
            inner = ", ".join(self._value(getattr(tensor, name)) for name in names)
            return f"{type(tensor)} {context!r} of ({inner})"
        self.devices.add(tensor.device)
        text = f"{dtype_text(tensor.dtype)}[{self._numbers(tensor.shape)}] {tensor.device}"
        if tensor.layout is torch.strided:
            text += f" strides ({self._numbers(tensor.stride())})"
            if self._number(tensor.storage_offset()) != "0":
                text += f" offset {self._number(tensor.storage_offset())}"
        else:
            self._refuse_lasting(f"a {tensor.layout} tensor is among its values")
            text += f" {tensor.layout}"
        text += "" if kind in ("FakeTensor", "Tensor", "Parameter") else f" {type(tensor)}"
        return text + (" conj" if tensor.is_conj() else "") + (" neg" if tensor.is_neg() else "")

    def _argument(self, argument: Any, number: dict[fx.Node, str]) -> str:
        if isinstance(argument, fx.Node):
            return number[argument]
        kind = type(argument).__name__
        if isinstance(argument, (tuple, list)):
            inside = ", ".join(self._argument(item, number) for item in argument)
            text = f"({inside})" if isinstance(argument, tuple) else f"[{inside}]"
            return text if kind in _CONTAINERS else kind + text
        if isinstance(argument, dict):
            rows = [f"{key!r}: {self._argument(item, number)}" for key, item in argument.items()]
            text = "{" + ", ".join(sorted(rows)) + "}"
            return text if kind in _CONTAINERS else kind + text
        if isinstance(argument, slice):
            parts = (argument.start, argument.stop, argument.step)
            return "slice(" + ", ".join(self._argument(part, number) for part in parts) + ")"
        if isinstance(argument, enum.Enum):
            return f"{type(argument).__module__}.{type(argument).__qualname__}.{argument.name}"
        if isinstance(argument, (torch.layout, torch.memory_format, type(...))):
            return str(argument)
        if type(argument) in _PLAIN or isinstance(argument, torch.SymInt):
            return self._value(argument)
        name = inductor.qualified_name(argument) if callable(argument) else None
        if name is None:
            self._refuse_lasting(f"a {kind} is among its arguments")
        return name or _address(argument)

    # -------------------------------------------------------------- sizes

    def _numbers(self, numbers: Iterable[Any]) -> str:
        return ", ".join(map(self._number, numbers))

    def _number(self, number: Any) -> str:
        return self.expression(number.node.expr) if is_symbolic_number(number) else str(number)

    def expression(self, size: Any) -> str:
        """Return the text of an expression of sizes, in the symbols of this text."""
        if not self._lasting:
            return str(size)
        expression = sympy.sympify(size)
        for symbol in sorted(expression.free_symbols, key=str):
            if symbol not in self.symbols:
                if expressions.is_unbacked(symbol):
                    raise Unnameable("it has a size that depends on data")
                name = f"s{len(self.symbols)}"
                self.symbols[symbol] = sympy.Symbol(name, **symbol.assumptions0)
        expression = expression.xreplace(self.symbols)
        exact = expression.has(sympy.Float)  # ``str`` would round them
        return expressions.text_of(expression) if exact else str(expression)


def _address(thing: Any) -> str:
    return f"{type(thing).__name__} at {id(thing):#x}"
