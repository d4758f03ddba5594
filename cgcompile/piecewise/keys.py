"""What a compiled piece depends on, as named facts in plain text: :func:`facts_of_piece`.

Equal facts mean that one may be used in place of the other, in this process and in any other one:
nothing here holds an address, a hash seed or a path, and symbols are named in the order in which
the piece shows them. The rule: what cannot be told in such a way makes a piece :class:`Unnameable`,
with the reason. It is compiled all the same, and not kept.
"""

import enum
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from cgcompile import compat
from cgcompile.passes.nodes import attribute, is_symbolic_number, value
from cgcompile.passes.symbols import dtype_text
from cgcompile.version import __version__


class Unnameable(Exception):
    """Why a piece has no key; not an error, and never seen by a caller of cgcompile."""


def facts_of_process(compiler: str, patches: Mapping[str, Any], passes: Iterable[Any]) -> Any:
    """The facts that all pieces of one backend call share.

    Args:
        compiler: the name of one of our own compilers.
        patches: the user's Inductor settings.
        passes: the user's passes over pieces.

    Raises:
        Unnameable: a setting or pass has no text that would tell it from another one.
    """
    try:
        settings = compat.compiler_settings(patches)
        uuids = "\n".join(str(each.uuid()) for each in passes)
    except ValueError as error:
        raise Unnameable(str(error)) from None
    return {
        "cgcompile": __version__,
        "compiler": compiler,
        "passes": uuids,
        **compat.versions(),
        **settings,
    }


def facts_of_piece(module: fx.GraphModule, fake_inputs: Sequence[Any]) -> dict[str, str]:
    """The facts of one piece.

    Raises:
        Unnameable: something in it cannot be told to another process; says what.
    """
    writer = _Writer()
    graph = "\n".join(writer.graph(module))
    guards = compat.SizeGuards(fake_inputs).known()
    return {
        "graph": graph,
        "sizes": "\n".join(writer.sizes(fake_inputs, guards)),
        "machine": compat.machine(writer.devices),
    }


# Tensors that a graph holds are told by their bytes, up to this size.
_LARGEST_CONSTANT = 1 << 16


class _Writer:
    """Writes one graph and the bodies in it; all of them share the names of symbols."""

    def __init__(self) -> None:
        self.devices: list[torch.device] = []
        self._symbols: dict[sympy.Symbol, sympy.Symbol] = {}
        self._storages: dict[int, int] = {}  # the first input that lies there

    def graph(self, module: fx.GraphModule, indent: str = "") -> list[str]:
        rows: list[str] = []
        number: dict[fx.Node, str] = {}
        for node in module.graph.nodes:
            number[node] = f"%{len(number)}"
            head = f"{indent}{number[node]} = "
            if node.op == "placeholder":
                rows.append(f"{head}input {self._input(value(node), len(number))}")
            elif node.op == "get_attr":
                rows += self._attribute(attribute(module, node), head, indent)
            elif node.op == "output":
                rows.append(f"{indent}return {self._argument(node.args[0], number)}")
            else:
                rows.append(head + self._call(node, number))
        return rows

    # -------------------------------------------------------------- nodes

    def _call(self, node: fx.Node, number: dict[fx.Node, str]) -> str:
        arguments = [self._argument(each, number) for each in node.args]
        named = sorted(node.kwargs.items())
        arguments += [f"{name}={self._argument(each, number)}" for name, each in named]
        found = compat.tree_leaves(value(node))
        made = ", ".join(self._value(each) for each in found)
        return f"{self._target(node)}({', '.join(arguments)}) -> {made}"

    def _target(self, node: fx.Node) -> str:
        if node.op == "call_method":
            return f"method {node.target}"
        if node.op == "call_module":
            raise Unnameable(f"it calls the module {node.target}, whose code may change")
        name = compat.qualified_name(node.target)
        if name is None:
            text = getattr(node.target, "__qualname__", None) or type(node.target).__name__
            raise Unnameable(f"it calls {text}, whose code is not torch's and may change")
        if "triton_kernel" in name:
            raise Unnameable("it holds a Triton kernel of the user's, whose code may change")
        inside = compat.traced_through(node.target)
        if inside is not None:
            raise Unnameable(f"{inside}, by code that may change")
        return name

    def _attribute(self, held: Any, head: str, indent: str) -> list[str]:
        if isinstance(held, fx.GraphModule):
            return [f"{head}graph", *self.graph(held, indent + "  ")]
        if type(held) not in (torch.Tensor, torch.nn.Parameter):
            raise Unnameable(f"it holds a {type(held).__name__}")
        plain = held.layout is torch.strided and compat.is_plain_tensor(held)
        if not plain or held.is_meta or held.nbytes > _LARGEST_CONSTANT:
            raise Unnameable(f"it holds a tensor of {held.nbytes} bytes")
        data = held.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest = hashlib.sha256(bytes(data.tolist())).hexdigest()
        return [f"{head}constant {self._value(held)} {digest}"]

    # -------------------------------------------------------------- values

    def _input(self, found: Any, position: int) -> str:
        if not isinstance(found, torch.Tensor):
            return self._value(found)
        key = compat.storage_key(found)
        first = position if key is None else self._storages.setdefault(key, position)
        shared = f" in the memory of input {first}" if first != position else ""
        kind = " parameter" if isinstance(found, torch.nn.Parameter) else ""
        grad = " requires grad" if found.requires_grad else ""
        inference = " inference" if found.is_inference() else ""
        return self._value(found) + kind + grad + inference + shared

    def _value(self, found: Any) -> str:
        if isinstance(found, torch.Tensor):
            return self._tensor(found)
        if is_symbolic_number(found):
            if not isinstance(found, torch.SymInt):
                raise Unnameable(f"a {type(found).__name__} is among its values")
            return f"size {self._expression(found.node.expr)}"
        if found is None or isinstance(found, (bool, int, float, str, torch.dtype, torch.device)):
            return repr(found)
        raise Unnameable(f"a {type(found).__name__} is among its values")

    def _tensor(self, found: torch.Tensor) -> str:
        if hasattr(found, "__tensor_flatten__"):
            raise Unnameable(f"a {type(found).__name__} is among its values")
        self.devices.append(found.device)
        text = f"{dtype_text(found.dtype)}[{self._numbers(found.shape)}] {found.device}"
        if found.layout is not torch.strided:
            raise Unnameable(f"a {found.layout} tensor is among its values")
        text += f" strides ({self._numbers(found.stride())})"
        if self._number(found.storage_offset()) != "0":
            text += f" offset {self._number(found.storage_offset())}"
        return text + (" conj" if found.is_conj() else "") + (" neg" if found.is_neg() else "")

    def _argument(self, found: Any, number: dict[fx.Node, str]) -> str:
        if isinstance(found, fx.Node):
            return number[found]
        if isinstance(found, (tuple, list)):
            inside = ", ".join(self._argument(each, number) for each in found)
            return f"({inside})" if isinstance(found, tuple) else f"[{inside}]"
        if isinstance(found, dict):
            rows = [f"{key!r}: {self._argument(each, number)}" for key, each in found.items()]
            return "{" + ", ".join(sorted(rows)) + "}"
        if isinstance(found, slice):
            parts = (found.start, found.stop, found.step)
            return "slice(" + ", ".join(self._argument(each, number) for each in parts) + ")"
        if isinstance(found, (enum.Enum, torch.layout, torch.memory_format, type(...))):
            return str(found)
        name = compat.qualified_name(found) if callable(found) else None
        return name or self._value(found)

    # -------------------------------------------------------------- sizes

    def sizes(self, fake_inputs: Sequence[Any], guards: Iterable[Any]) -> list[str]:
        """The ranges of all symbols, and what is already known of them."""
        sizes = [each for each in fake_inputs if isinstance(each, torch.SymInt)]
        shapes = compat.Shapes.of(sizes)
        if self._symbols and shapes is None:
            raise Unnameable("a size of its tensors is not among its inputs")
        own = list(self._symbols)
        texts = [self._expression(each) for each in sorted(guards, key=str)]
        rows = []
        for symbol, name in self._symbols.items():
            assert shapes is not None
            least, most = shapes.bounds(symbol)
            rows.append(f"{least} <= {name} <= {most}" + ("" if symbol in own else " elsewhere"))
        return rows + sorted(texts)

    def _numbers(self, found: Iterable[Any]) -> str:
        return ", ".join(self._number(each) for each in found)

    def _number(self, found: Any) -> str:
        return self._expression(found.node.expr) if is_symbolic_number(found) else str(found)

    def _expression(self, found: Any) -> str:
        expression = sympy.sympify(found)
        for symbol in sorted(expression.free_symbols, key=str):
            if symbol not in self._symbols:
                if compat.is_unbacked(symbol):
                    raise Unnameable("it has a size that only the data tells")
                name = f"s{len(self._symbols)}"
                self._symbols[symbol] = sympy.Symbol(name, **symbol.assumptions0)
        return str(expression.xreplace(self._symbols))
