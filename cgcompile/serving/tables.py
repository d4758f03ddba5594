"""The tables of the dispatcher: for each variant and kind of batch, the graph of every size.

Plain Python. A look-up is two list indices. The tables of sizes are built once, and shared by all
variants, so that many of those cost little memory; which graph serves a size is worked out anew
when one is captured or refused, so that a step never searches.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cgcompile.descriptors import BatchDescriptor
from cgcompile.modes import CUDAGraphMode
from cgcompile.reasons import Reason, Why
from cgcompile.serving.planning import FULL, PIECEWISE, Shapes
from cgcompile.serving.variants import Variant


class Dispatched(NamedTuple):
    """What a step runs as.

    Attributes:
        mode: NONE, PIECEWISE or FULL.
        descriptor: the key of the graph, padded; for NONE ``BatchDescriptor(num_tokens)``,
            unpadded.
        why: why the step has a lesser mode than the one asked for; None if it has that one.
    """

    mode: CUDAGraphMode
    descriptor: BatchDescriptor
    why: Why | None = None


class Slot:
    """One planned graph: the answer that names it, and what is known of its capture."""

    __slots__ = ("captured", "num_tokens", "ready", "refused", "result", "rows")

    def __init__(self, result: Dispatched) -> None:
        self.result = result
        self.num_tokens = result.descriptor.num_tokens
        self.ready = True  # may be dispatched; the one field that dispatch() reads
        self.captured = False
        self.refused = ""
        self.rows: list[Row] = []  # that it is in

    def settle(self, only_captured: bool) -> None:
        """After a change: whether it may be dispatched, and what serves its sizes if not."""
        ready = self.captured or not (only_captured or self.refused)
        if ready is not self.ready:
            self.ready = ready
            for row in self.rows:
                row.settle()

    def why_not(self) -> Why:
        """Why it is not dispatched, if it is not ready."""
        mode, descriptor, _ = self.result
        what = f"{mode.name} {descriptor}"
        detail = f"was refused: {self.refused}" if self.refused else "is planned and not captured"
        return Why(Reason.NOT_CAPTURED, f"{what} {detail}")


class _Ladder:
    """For every number from 0 to the largest size, the position of the first size not below it.

    ``oversize`` is made once: its text must not differ at each step, and costs time.
    """

    __slots__ = ("oversize", "shapes", "steps")

    def __init__(self, shapes: Sequence[BatchDescriptor], sizes: Sequence[int], what: str) -> None:
        self.shapes = shapes
        self.steps = [bisect_left(sizes, number) for number in range(sizes[-1] + 1)]
        self.oversize = Why(Reason.OVERSIZE, f"more than {sizes[-1]} {what}: no graph is as large")


class Row:
    """The graphs of one ladder in one variant; ``oversize`` says why it serves no larger batch."""

    __slots__ = ("_serving", "_slots", "_steps", "oversize")

    def __init__(self, ladder: _Ladder, slots: list[Slot]) -> None:
        self._steps = ladder.steps
        self._slots = slots
        self._serving = slots
        self.oversize = ladder.oversize
        for slot in slots:
            slot.rows.append(self)

    def find(self, number: int) -> Slot | None:
        """The smallest ready graph for at least ``number`` of what the ladder counts.

        If none of them is ready, the smallest, which can say why.
        """
        return self._serving[self._steps[number]] if number < len(self._steps) else None

    def settle(self) -> None:
        """For each size the first ready graph upward; look-ups see it as before, or after."""
        serving = list(self._slots)
        above: Slot | None = None
        for place in reversed(range(len(serving))):
            if serving[place].ready:
                above = serving[place]
            elif above is not None:
                serving[place] = above
        self._serving = serving


class Tables(NamedTuple):
    """The graphs of one variant, by kind of batch.

    Attributes:
        piecewise: by tokens; None without PIECEWISE graphs.
        mixed: FULL graphs for any batch, by tokens; None without.
        decode: FULL graphs for uniform decode: per query length, by requests.
        bounded: FULL graphs for other decode: per longest query of the batch, by tokens.
    """

    piecewise: Row | None
    mixed: Row | None
    decode: dict[int, Row]
    bounded: dict[int, Row]


Slots = dict[tuple[CUDAGraphMode, BatchDescriptor], Slot]


def build_tables(
    shapes: Shapes, variants: Mapping[Variant, Variant]
) -> tuple[dict[Variant, Tables], Slots]:
    """The tables of each variant, and every graph in them, in the order of capture.

    Args:
        shapes: of all variants.
        variants: each one, and what its PIECEWISE graphs have of it. Of the latter there is a table
            too, without FULL graphs if it is no variant itself.
    """
    slots = {
        (mode, descriptor): Slot(Dispatched(mode, descriptor))
        for mode, descriptor in _in_order_of_capture(shapes, variants)
    }
    piecewise = _by_tokens(shapes.piecewise) if shapes.piecewise else None
    mixed = _by_tokens(shapes.mixed) if shapes.mixed else None
    bounded = {longest: _by_tokens(each, _SHORT) for longest, each in shapes.bounded.items()}
    decode = {
        query_len: _by_requests(each, f"requests of length {query_len}")
        for query_len, each in shapes.decode.items()
    }

    def row(mode: CUDAGraphMode, variant: Variant, ladder: _Ladder) -> Row:
        return Row(ladder, [slots[mode, variant.of(shape)] for shape in ladder.shapes])

    pieces = {
        variant: row(PIECEWISE, variant, piecewise) if piecewise else None
        for variant in dict.fromkeys(variants.values())
    }
    tables = {variant: Tables(found, None, {}, {}) for variant, found in pieces.items()}
    for variant, in_pieces in variants.items():
        tables[variant] = Tables(
            pieces[in_pieces],
            row(FULL, variant, mixed) if mixed else None,
            {key: row(FULL, variant, ladder) for key, ladder in decode.items()},
            {key: row(FULL, variant, ladder) for key, ladder in bounded.items()},
        )
    return tables, slots


_SHORT = "tokens in such short queries"


def _by_tokens(shapes: Sequence[BatchDescriptor], what: str = "tokens") -> _Ladder:
    return _Ladder(shapes, [shape.num_tokens for shape in shapes], what)


def _by_requests(shapes: Sequence[BatchDescriptor], what: str) -> _Ladder:
    return _Ladder(shapes, [shape.num_reqs or 0 for shape in shapes], what)


def _in_order_of_capture(
    shapes: Shapes, variants: Mapping[Variant, Variant]
) -> list[tuple[CUDAGraphMode, BatchDescriptor]]:
    """PIECEWISE, then FULL; each largest first, and of one size the most demanding first."""
    full = [*shapes.mixed, *(shape for each in shapes.decode.values() for shape in each)]
    full += dict.fromkeys(shape for each in shapes.bounded.values() for shape in each)
    found = []
    in_pieces = list(dict.fromkeys(variants.values()))
    for mode, kinds, each in (
        (PIECEWISE, shapes.piecewise, in_pieces),
        (FULL, full, list(variants)),
    ):
        for shape in sorted(kinds, key=_demand, reverse=True):
            found += [(mode, variant.of(shape)) for variant in each]
    return found


def _demand(shape: BatchDescriptor) -> tuple[int, int, int]:
    return shape.num_tokens, shape.num_reqs or 0, shape.max_query_len or 0
