"""What a pass did, as plain values: :class:`PassRecord`, and a table of them."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from cgcompile.boundaries import target_name
from cgcompile.passes.nodes import COMPUTING


@dataclass(frozen=True)
class PassRecord:
    """One run of one pass.

    Attributes:
        name: of the pass.
        label: what it ran over: ``graph``, or the name of a piece.
        seconds: how long it took, without the checks and dumps around it.
        ops_before: nodes that compute, before.
        ops_after: nodes that compute, after.
        difference: how many more of each op there are after it: ``{"clone": -3}``. An op that was
            replaced by another of the same kind does not show.
    """

    name: str
    label: str
    seconds: float = field(compare=False)
    ops_before: int
    ops_after: int
    difference: Mapping[str, int] = field(hash=False)

    def text(self, *, seconds: bool = True) -> str:
        """One line; ``seconds=False`` leaves out the time, which no two runs share."""
        return table([self], seconds=seconds)

    def __str__(self) -> str:
        return self.text()


def op_counts(gm: fx.GraphModule) -> Counter[str]:
    """How many nodes of each op compute, by the names that dumps show."""
    targets = (node.target for node in gm.graph.nodes if node.op in COMPUTING)
    # Functions of torch that are written in C++ live in a class that nobody knows.
    return Counter(target_name(each).replace("_VariableFunctionsClass.", "") for each in targets)


def difference(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Op -> how many more there are, in the order of names; ops that stayed are left out."""
    names = sorted({*before, *after})
    changes = {name: after.get(name, 0) - before.get(name, 0) for name in names}
    return {name: change for name, change in changes.items() if change}


def table(records: Iterable[PassRecord], *, seconds: bool = True) -> str:
    """A line for each record: what ran over what, its time, the number of ops, the difference."""
    rows = []
    for each in records:
        changes = ", ".join(f"{name} {change:+}" for name, change in each.difference.items())
        time = [f"{each.seconds * 1e3:.2f} ms"] if seconds else []
        ops = f"{each.ops_before} -> {each.ops_after} ops"
        rows.append([each.label, each.name, *time, ops, changes or "-"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
