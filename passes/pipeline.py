"""The pipeline of a split: passes over the whole graph, the cut, and passes over pieces.

:data:`PIPELINE` lists ours in order; the user's own run before them (over the whole graph) and
after the cut (over each distinct captured piece).
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx

from cgcompile.boundaries import Boundaries
from cgcompile.errors import ConfigError
from cgcompile.kernels import why_unsupported
from cgcompile.passes.assign import assign_pieces, resolve_aliases
from cgcompile.passes.base import FunctionPass, Fusions, PassManager
from cgcompile.passes.nodes import calls, value
from cgcompile.passes.normalize import EliminateClones, EliminateNoOps, bind_symbols, pull_items
from cgcompile.passes.split import SplitGraph, cut
from cgcompile.settings import AUTO, checked, parse_passes, parse_switch, parsed
from cgcompile.torch_compat import dynamo


class ReplaceAttention:
    """The pass that puts ``cgcompile::decode_attention`` in place of attention of few query rows.

    Args:
        boundaries: the registry of splitting ops; what the user named there stays.
        where: ``"auto"``: on devices that run the kernel, where that is faster. True: on all.
            False: on none.

    Attributes:
        fusions: what it replaced in the last graph, and why other attention stayed.
    """

    name = "decode_attention"

    def __init__(self, boundaries: Boundaries, where: bool | str = AUTO) -> None:
        self._boundaries, self._where = boundaries, where
        self.fusions = Fusions()

    def uuid(self) -> str:
        return f"{self.name}/2/{self._where}/{self._boundaries.uuid()}"

    def concerns(self, gm: fx.GraphModule) -> bool:
        """Return whether a graph may have attention that the pass replaces."""
        names = ("scaled_dot_product_attention", "softmax")
        return any(calls(node, *names) and self._on_device(node) for node in gm.graph.nodes)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        self.fusions = Fusions()
        if self.concerns(gm):
            # Imported only where a device runs the kernel.
            from cgcompile.passes.decode_attention import replace_attention

            insists = self._where is True
            self.fusions = replace_attention(gm, self._boundaries, self._on_device, insists)
        return gm

    def _on_device(self, node: fx.Node) -> bool:
        return self._where is True or (
            self._where == AUTO and why_unsupported(value(node).device) is None
        )


PIPELINE: Mapping[str, Callable[[Boundaries], Any]] = {
    "bind_symbols": lambda _: FunctionPass("bind_symbols", bind_symbols, "3"),
    "pull_items": lambda _: FunctionPass("pull_items", pull_items, "2"),
    EliminateNoOps.name: EliminateNoOps,
    EliminateClones.name: EliminateClones,
    ReplaceAttention.name: ReplaceAttention,
    "assign_pieces": lambda boundaries: FunctionPass(
        "assign_pieces", partial(assign_pieces, boundaries=boundaries), f"2/{boundaries.uuid()}"
    ),
    "resolve_aliases": lambda _: FunctionPass("resolve_aliases", resolve_aliases, "4"),
}
"""The passes of a split in order, by name: functions from the splitting ops to a pass."""

OPTIONAL = (EliminateNoOps.name, EliminateClones.name, ReplaceAttention.name)
"""The names of the passes without which a split is right too: ``disabled_passes`` takes them."""


@checked
def split_graph(
    gm: fx.GraphModule,
    boundaries: Boundaries,
    *,
    graph_passes: Iterable[Any] = (),
    piece_passes: Iterable[Any] = (),
    disabled_passes: Collection[str] = (),
    decode_attention: bool | str = False,
    dump_dir: str | None = None,
) -> SplitGraph:
    """Split Dynamo's pre-grad graph at its boundaries.

    Args:
        gm: the graph; it is changed (sizes are bound to inputs) but computes what it did.
        boundaries: the registry of splitting ops.
        graph_passes: passes over the whole graph, before ours.
        piece_passes: passes over each distinct captured piece, after the cut.
        disabled_passes: names of passes to leave out, theirs or :data:`OPTIONAL` ones of ours.
        decode_attention: where attention of few query rows becomes the op of cgcompile: ``"auto"``
            on devices with its kernel, True everywhere, False nowhere.
        dump_dir: a folder for the graph before and after every pass.

    Returns:
        The split, with a record of what each pass did.

    Raises:
        PassError: a pass raised, left an invalid graph, or changed what an output is.
        SymbolError: a size that no input gives would cross into a captured piece.
        ConfigError: a disabled pass does not exist, or is needed.

    Example:
        >>> from cgcompile.boundaries import Boundaries
        >>> def backend(gm, inputs):
        ...     print(len(cgcompile.passes.split_graph(gm, Boundaries()).pieces), "piece")
        ...     return gm
        >>> y = torch.compile(torch.sin, backend=backend)(torch.randn(4))
        1 piece
    """
    graph_passes, piece_passes = tuple(graph_passes), tuple(piece_passes)
    check_disabled(disabled_passes, (*graph_passes, *piece_passes))
    where = parsed("decode_attention", "split_graph", decode_attention, parse_switch)
    attention = ReplaceAttention(boundaries, where)
    if graph_passes or attention.concerns(gm):
        gm = dynamo.copied(gm)  # Dynamo still owns its graph, and must not find it broken
    ours = {name: make(boundaries) for name, make in PIPELINE.items()}
    ours[attention.name] = attention
    on_graph = PassManager([*graph_passes, *ours.values()], dump_dir, disabled_passes)
    split = cut(on_graph(gm))
    for piece in split.pieces:
        for name in (*piece.inputs, *piece.outputs) if piece.capture else ():
            split.symbols.check_bound(split.values[name].meta, name, piece.name)
    on_pieces = PassManager(piece_passes, dump_dir, disabled_passes)
    if on_pieces.passes:
        split = _run_on_pieces(split, on_pieces)
    records = (*on_graph.records, *on_pieces.records)
    return replace(split, passes=records, fusions=attention.fusions)


@checked
def check_disabled(disabled: Collection[str], theirs: Iterable[Any]) -> None:
    """Refuse to leave out a pass that does not run anyway, or that a split needs.

    Args:
        disabled: names of passes.
        theirs: the passes of the user.

    Raises:
        ConfigError: names the pass, with close matches.

    Example:
        >>> cgcompile.passes.check_disabled(["eliminate_clones"], [])  # optional: no error
        >>> try:
        ...     cgcompile.passes.check_disabled(["bind_symbols"], [])
        ... except cgcompile.CGCompileError as error:
        ...     print(type(error).__name__)
        ConfigError
    """
    theirs = parsed("theirs", "passes", tuple(theirs), parse_passes)
    choices = [*(str(graph_pass.name) for graph_pass in theirs), *OPTIONAL]
    for name in disabled:
        if name in PIPELINE and name not in OPTIONAL:
            raise ConfigError.needed_pass(name=name, known=choices)
        if name not in choices:
            raise ConfigError.unknown_pass(name=name, known=choices)


def _run_on_pieces(split: SplitGraph, manager: PassManager) -> SplitGraph:
    """Run the user's passes over each distinct captured piece."""
    changed: dict[int, fx.GraphModule] = {}
    taken = {name for piece in split.pieces for name in piece.inputs}
    for first in split.distinct:
        if first.capture:
            equal = [piece for piece in split.pieces if piece.same_as == first.index]
            outputs = [(n, name) for piece in equal for n, name in enumerate(piece.outputs)]
            strided = {n for n, name in outputs if name in taken}
            changed[first.index] = manager(first.module, first.name, strided=strided)
            changed[first.index].recompile()  # a pass edits the graph, not the code made from it
    pieces = tuple(replace(p, module=changed.get(p.same_as, p.module)) for p in split.pieces)
    return replace(split, pieces=pieces)
