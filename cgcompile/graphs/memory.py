"""What graphs take of the memory of their device: :class:`GraphMemory`.

Memory of torch's allocator is read from it. The driver's own memory for graphs is not reported by
any function of CUDA: it is what the device loses during captures beside torch's allocator, see
:func:`cgcompile.graphs.capture.measured`.

Graphs share memory, so the bytes of a set are not the sum of its graphs', and are not estimated:
:func:`measure_captures` captures the set, the largest first, measures it, and drops it.
:func:`most_that_fit` finds the largest set within a budget.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from cgcompile.graphs.arena import MIB
from cgcompile.settings import require_fields

T_ = TypeVar("T_")

_ROWS = {
    "pools": "torch's allocator for graphs: results, intermediates, workspaces",
    "staging": "copies of inputs, and of results of eager pieces that graphs read",
    "outputs": "buffers of what FULL graphs of a manager return",
    "executables": "what the driver allocates for the graphs themselves",
}


@dataclass(frozen=True, repr=False)
class GraphMemory:
    """Memory of the device that graphs take, in bytes; ``print`` it.

    Attributes:
        pools: what torch's allocator holds for graphs, in use or not.
        staging: buffers of inputs and of bridges.
        outputs: buffers of what FULL graphs of a manager return.
        executables: what the driver allocates for the graphs themselves: what the device lost
            during captures beside torch's allocator. Code that allocates meanwhile, of other
            processes too, is in it. The driver may keep some of it when graphs are dropped.
        workspaces: the part of ``pools`` that captures used as workspaces of cuBLAS; 0 where they
            used none, and from torch 2.15 on, which allocates one for each call.
        measured: how ``executables`` was measured, in words.
        captures: (batch, bytes) of the graphs that exist, in the order of capture: by how much
            ``pools`` and ``staging`` grew. Smaller sizes mostly add nothing.

    Example:
        >>> memory = cgcompile.serving.GraphMemory(pools=1024, outputs=256)
        >>> memory.total
        1280
    """

    pools: int = 0
    staging: int = 0
    outputs: int = 0
    executables: int = 0
    workspaces: int = 0
    measured: str = ""
    captures: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        require_fields(self)

    @property
    def parts(self) -> dict[str, int]:
        """The parts of the total by name."""
        return {name: getattr(self, name) for name in _ROWS}

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(self.parts.values())

    def line(self) -> str:
        """Return the total and the parts that are not 0 in one line."""
        parts = [f"{name} {value / MIB:.2f}" for name, value in self.parts.items() if value]
        return f"{self.total / MIB:.2f} MiB" + (f" ({', '.join(parts)})" if parts else "")

    def __repr__(self) -> str:
        return f"<GraphMemory: {self.line()}>"

    def __str__(self) -> str:
        rows = [("", self.parts[name], name, text) for name, text in _ROWS.items()]
        if self.workspaces:
            text = "of these, workspaces of cuBLAS; one for all graphs of a pool"
            rows.insert(1, ("  ", self.workspaces, "workspaces", text))
        lines = [f"{'':13} {'MiB':>9}"]
        lines += [f"{i}{name:{13 - len(i)}} {n / MIB:9.2f}  {text}" for i, n, name, text in rows]
        if self.measured:
            lines.append(f"{'':25}{self.measured}")
        lines.append(f"{'total':13} {self.total / MIB:9.2f}")
        grown = [(batch, nbytes) for batch, nbytes in self.captures if nbytes]
        if self.captures:
            lines.append(f"{len(self.captures)} captures; pools and staging grew by")
            lines += [f"{'':13} {nbytes / MIB:9.2f}  {batch}" for batch, nbytes in grown]
            rest = len(self.captures) - len(grown)
            lines += [f"{'':13} {0:9.2f}  the other {rest}"] if rest else []
        return "\n".join(lines)


def measure_captures(
    captures: Iterable[Callable[[], Any]],
    taken: Callable[[], int],
    exceeds: Callable[[int], bool],
    drop: Callable[[], Any],
) -> int:
    """Capture for trial, up to the first capture that exceeds a budget; return the bytes taken."""
    try:
        for capture in captures:
            capture()
            if exceeds(taken()):
                break
        return taken()
    finally:
        drop()


def most_that_fit(
    order: Sequence[T_], least: int, fits: Callable[[Sequence[T_]], bool]
) -> Sequence[T_]:
    """Return the longest beginning of ``order`` that fits, by bisection."""
    low, high = least, len(order)
    while low < high:
        middle = (low + high + 1) // 2
        if fits(order[:middle]):
            low = middle
        else:
            high = middle - 1
    return order[:low]
