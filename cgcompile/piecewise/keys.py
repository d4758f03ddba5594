"""What a compiled piece depends on, as named facts in plain text: :func:`facts_of_piece`.

Equal facts mean that one may be used in place of the other, in this process and in any other one;
see Note [Text of a graph]. A piece that is :class:`Unnameable` is compiled all the same, and not
kept.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from cgcompile import compat
from cgcompile.passes.printer import GraphText, Unnameable
from cgcompile.version import __version__

_FORMAT = 2  # of the text of a graph


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
        "cgcompile": f"{__version__}, format {_FORMAT}",
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
    text = GraphText(lasting=True)
    graph = text.of(module, module.graph)
    return {
        "graph": graph,
        "sizes": "\n".join(_sizes(text, fake_inputs)),
        "machine": compat.machine(list(text.devices)),
    }


def _sizes(text: GraphText, fake_inputs: Sequence[Any]) -> list[str]:
    """The ranges of all symbols, and what is already known of them."""
    shapes = compat.Shapes.of(each for each in fake_inputs if isinstance(each, torch.SymInt))
    if text.symbols and shapes is None:
        raise Unnameable("a size of its tensors is not among its inputs")
    own = list(text.symbols)
    guards = sorted(compat.SizeGuards(fake_inputs).known(), key=str)
    texts = sorted(text.expression(guard) for guard in guards)
    rows = []
    for symbol, name in text.symbols.items():
        assert shapes is not None
        least, most = shapes.bounds(symbol)
        rows.append(f"{least} <= {name} <= {most}" + ("" if symbol in own else " elsewhere"))
    return rows + texts
