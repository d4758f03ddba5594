"""What multiplies graphs beside the size of a batch: LoRA cases, and axes of the user's own.

Plain Python. A *variant* is one combination; every capture size is captured once per variant. The
rule: the variant that serves a batch asks for at least what the batch has, and what is exact is
equal. A batch for which no variant stands runs without graphs, with a reason.
"""

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from cgcompile.descriptors import BatchDescriptor
from cgcompile.errors import BatchError, ConfigError
from cgcompile.reasons import Reason, Why
from cgcompile.settings import (
    LARGEST_TABLE,
    checked,
    is_flag,
    is_whole,
    require_items,
    require_kind,
    whole,
)


@dataclass(frozen=True)
class LoraCases:
    """For which numbers of active LoRA adapters there are graphs. As it is: for none at all.

    Attributes:
        counts: numbers of active adapters that have graphs; a batch takes the next one that is not
            smaller. A batch that does not count its adapters (0 with ``has_lora``) takes the
            largest.
        without: batches without LoRA have graphs of their own. If not, they take the graphs of the
            smallest count, whose kernels must then cope with no adapter at all.

    Raises:
        ConfigError: a count below 1; or no count, and no graphs without LoRA either.
    """

    counts: tuple[int, ...] = ()
    without: bool = True

    def __post_init__(self) -> None:
        counts = whole_numbers("lora.counts", self.counts)
        require_kind("lora.without", "LoraCases", self.without, bool)
        object.__setattr__(self, "counts", counts)
        if not counts and not self.without:
            raise ConfigError.impossible(
                what="LoraCases without counts and without=False",
                because="it leaves no batch that has a graph",
                instead="List counts, or take LoraCases().",
            )

    @classmethod
    @checked
    def specialised(cls, max_loras: int) -> "LoraCases":
        """Graphs without LoRA, and for 1, 2, 4, ... up to ``max_loras``, and one more.

        The one more is for kernels that count the tokens without an adapter as a further one.
        """
        most = _max_loras(max_loras)
        powers = [1 << power for power in range(most.bit_length()) if 1 << power < most]
        return cls((*powers, most, most + 1))

    @classmethod
    @checked
    def shared(cls, max_loras: int, *, without: bool = False) -> "LoraCases":
        """One set of graphs for any number of adapters, and for none unless ``without``."""
        return cls((_max_loras(max_loras) + 1,), without)

    def listed(self) -> tuple[int, ...]:
        """The numbers to capture, 0 for "without LoRA"."""
        return (0, *self.counts) if self.without else self.counts

    def count_for(self, has_lora: bool, active: int) -> int | None:
        """The captured number that serves a batch, 0 for "without LoRA"; None if none does.

        Raises:
            BatchError: active adapters without LoRA, or fewer than 0.
        """
        if not is_flag(has_lora):
            raise BatchError.field(name="has_lora", value=has_lora, expected="bool")
        if not is_whole(active):
            raise BatchError.field(name="num_active_loras", value=active, expected="a whole number")
        if active < 0 or (active and not has_lora):
            raise BatchError.field(
                name="num_active_loras",
                value=active,
                expected="at least 0, and 0 where has_lora is False",
            )
        if not has_lora and self.without:
            return 0
        if has_lora and not active:
            return self.counts[-1] if self.counts else None
        place = bisect_left(self.counts, active)
        return self.counts[place] if place < len(self.counts) else None


def _max_loras(value: int) -> int:
    number = whole(value)
    if number is None or number < 1:
        raise ConfigError.bad_value(
            name="max_loras", where="LoraCases", value=value, expected="a whole number from 1"
        )
    return number


def whole_numbers(name: str, values: Iterable[int]) -> tuple[int, ...]:
    """``values`` sorted, each once; a ConfigError unless all are whole numbers from 1."""
    require_items(name, "CudagraphDispatcher", values)
    given = tuple(values)
    numbers = [whole(value) for value in given]
    if not all(number is not None and 1 <= number <= LARGEST_TABLE for number in numbers):
        expected = "whole numbers from 1 to 2**20"
        raise ConfigError.bad_value(
            name=name, where="CudagraphDispatcher", value=given, expected=expected
        )
    return tuple(sorted({number for number in numbers if number is not None}))


@dataclass(frozen=True)
class Axis:
    """A further axis of the graphs' key: one value of ``extra``, at the place of this axis.

    Attributes:
        name: what messages call it.
        values: what graphs are captured for; hashable. For ``"pad_up"`` they have an order.
        rule: ``"exact"``: a batch takes graphs of its own value alone. ``"pad_up"``: of the next
            listed value that is not smaller (a bound: the graph copes with less). ``"ignored"``: of
            any; the descriptor holds None at this place, and ``values`` stays empty.
        full_only: it speaks of what is outside of pieces, such as a kernel of attention: PIECEWISE
            graphs serve every value, listed or not, and hold None at this place.

    Raises:
        ConfigError: values that do not go with the rule.
    """

    name: str
    values: Sequence[Any] = ()
    rule: Literal["exact", "pad_up", "ignored"] = "exact"
    full_only: bool = False
    _known: dict[Any, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        where = f"Axis {self.name!r}"
        require_kind("name", where, self.name, str)
        require_kind("full_only", where, self.full_only, bool)
        if self.rule not in ("exact", "pad_up", "ignored"):
            expected = "'exact', 'pad_up' or 'ignored'"
            raise ConfigError.bad_value(
                name="rule", where=where, value=self.rule, expected=expected
            )
        require_items("values", where, self.values)
        object.__setattr__(self, "values", tuple(self.values))
        if bool(self.values) is (self.rule == "ignored"):
            expected = "none for 'ignored', else at least one"
            raise ConfigError.bad_value(
                name="values", where=where, value=self.values, expected=expected
            )
        try:
            known = {value: value for value in self.values}
            ordered = sorted(known) if self.rule == "pad_up" else list(known)
        except TypeError:
            expected = "hashable values, which have an order if padded up"
            raise ConfigError.bad_value(
                name="values", where=where, value=self.values, expected=expected
            ) from None
        object.__setattr__(self, "values", tuple(ordered))
        object.__setattr__(self, "_known", known)

    def listed(self) -> tuple[Any, ...]:
        """The values to capture."""
        return (None,) if self.rule == "ignored" else tuple(self.values)

    def value_for(self, value: Any) -> Any:
        """The captured value that serves ``value``.

        Raises:
            LookupError: none does; a value without hash or order serves nothing either.
        """
        if self.rule == "ignored":
            return None
        if self.rule == "exact":
            return self._known[value]
        return self.values[bisect_left(self.values, value)]


class Variant(NamedTuple):
    """One combination: a number of adapters (0 for "without LoRA") and a value per axis."""

    loras: int
    extra: tuple[Any, ...]

    def of(self, shape: BatchDescriptor) -> BatchDescriptor:
        """The descriptor of a shape in this variant."""
        return shape._replace(
            has_lora=self.loras > 0, num_active_loras=self.loras, extra=self.extra
        )


class PiecesOnly(NamedTuple):
    """No FULL graph serves a batch, and PIECEWISE graphs of a combination do."""

    variant: Variant
    why: Why


class Variants:
    """All combinations of LoRA cases and axes, and which one serves a batch."""

    def __init__(self, lora: LoraCases, axes: Iterable[Axis]) -> None:
        self._lora = lora
        self.axes = tuple(axes)
        require_items("axes", "CudagraphDispatcher", self.axes, Axis)

    def all(self) -> tuple[Variant, ...]:
        """Every combination, the most demanding first."""
        values = (reversed(axis.listed()) for axis in self.axes)
        extras = list(itertools.product(*values))
        return tuple(Variant(n, extra) for n in reversed(self._lora.listed()) for extra in extras)

    def in_pieces(self, variant: Variant) -> Variant:
        """The combination that PIECEWISE graphs of another one have."""
        pairs = zip(self.axes, variant.extra, strict=True)
        return variant._replace(extra=tuple(None if a.full_only else v for a, v in pairs))

    def serving(
        self, has_lora: bool, active: int, extra: tuple[Any, ...]
    ) -> Variant | PiecesOnly | Why:
        """The combination that serves a batch, or why there is none.

        Raises:
            BatchError: the numbers contradict each other, or ``extra`` does not fit the axes.
        """
        loras = self._lora.count_for(has_lora, active)
        if loras is None:
            most = max(self._lora.counts, default=0)
            detail = f"{active or 'some'} active LoRA adapters; graphs have at most {most}"
            return Why(Reason.UNLISTED_VARIANT, detail)
        if type(extra) is not tuple or len(extra) != len(self.axes):
            raise BatchError.axes(extra=extra, names=[axis.name for axis in self.axes])
        if not self.axes:
            return Variant(loras, ())
        found, why = [], None
        for axis, value in zip(self.axes, extra, strict=True):
            try:
                found.append(axis.value_for(value))
            except LookupError:
                why = _unlisted(axis, value)
                if not axis.full_only:
                    return why
                found.append(None)
            except TypeError:
                raise BatchError.axes(
                    extra=extra, names=[axis.name for axis in self.axes]
                ) from None
        variant = Variant(loras, tuple(found))
        return variant if why is None else PiecesOnly(self.in_pieces(variant), why)


def _unlisted(axis: Axis, value: Any) -> Why:
    graphs = ", ".join(map(repr, axis.values))
    return Why(Reason.UNLISTED_VARIANT, f"axis {axis.name!r} is {value!r}; graphs have {graphs}")
