"""What happens to the items of one call: :class:`EncoderCalls`.

Specs, packing, one run per group and path, and the results back in the order of the items. What has
no graph runs eager, under a reason.
"""

from collections.abc import Iterator
from typing import Any

import torch

from cgcompile import compat
from cgcompile.encoder.captured import EncoderGraphs
from cgcompile.encoder.defs import (
    DEFAULT,
    GLOBAL,
    EncoderCudaGraphConfig,
    EncoderItemSpec,
)
from cgcompile.encoder.keys import GraphKey
from cgcompile.encoder.limits import Limits
from cgcompile.encoder.packing import Capacity, Costs, Group, Need, pack
from cgcompile.encoder.protocol import CheckedModel
from cgcompile.encoder.results import check_columns
from cgcompile.encoder.statistics import EncoderStatistics, Ran
from cgcompile.errors import ConfigError, DispatchError, EncoderError
from cgcompile.reasons import EXPECTED, Reason


class EncoderCalls:
    """Not for several threads at a time.

    Args:
        model: what speaks the protocol.
        config: of the encoder.
        limits: of each replay.
        graphs: what is captured.
        statistics: counts what runs.
        costs: what packing estimates with.

    Attributes:
        costs: as given; may be replaced.
    """

    def __init__(
        self,
        model: CheckedModel,
        config: EncoderCudaGraphConfig,
        limits: Limits,
        graphs: EncoderGraphs,
        statistics: EncoderStatistics,
        costs: Costs,
    ) -> None:
        self._model, self._config, self._limits = model, config, limits
        self._graphs, self._statistics = graphs, statistics
        self._paths = list(config.graph_sets)
        self._splits = model.has_own("postprocess_encoder_output")
        self._version: tuple[int, int] | None = None
        self._known = Capacity(((),) * len(self._paths), *limits[1:])
        self.costs = costs

    def _room(self, path: str, spec: EncoderItemSpec) -> int:
        """Output tokens whose room an item takes: as its result has, or as its input needs."""
        rows = self._config.input_rows_per_token
        return max(spec.tokens(path), -(-spec.input_size // rows) if rows else 0)

    def _need(self, spec: EncoderItemSpec) -> Need:
        return Need(tuple([self._room(path, spec) for path in self._paths]), spec.frames)

    def make_tables(self) -> None:
        """What packing looks up, made now rather than at the first call."""
        pack((), self._capacity(), self.costs)

    def specs(self, mm_kwargs: dict[str, Any]) -> list[EncoderItemSpec]:
        """The items of a call, checked."""
        specs = list(self._model.get_encoder_cudagraph_item_specs(mm_kwargs))
        for item, spec in enumerate(specs):
            if not isinstance(spec, EncoderItemSpec):
                method, found = "get_encoder_cudagraph_item_specs", type(spec).__name__
                raise EncoderError.returned(
                    method=method, found=found, expected="a list of EncoderItemSpec"
                )
            spec.__post_init__()  # its fields may have been set since
            self._check_paths(item, spec)
            for axis in self._config.capture_axes:
                if axis.name not in spec.axes:
                    raise EncoderError.no_axis(item=item, axis=axis.name, known=sorted(spec.axes))
        return specs

    def _check_paths(self, item: int, spec: EncoderItemSpec) -> None:
        for path in spec.path_output_tokens:
            if path not in self._paths:
                raise EncoderError.unknown_path(item=item, path=path, known=self._paths)
        if spec.output_tokens and not any(map(spec.tokens, self._paths)):
            raise EncoderError.no_path(item=item, tokens=spec.output_tokens, known=self._paths)
        if self._config.enable_dual_path_graph or GLOBAL in self._paths:
            return
        if spec.global_output_tokens or spec.local_output_tokens:
            what = f"item {item}: global_output_tokens or local_output_tokens"
            because = "the configuration has no dual path"
            raise ConfigError.impossible(
                what=what, because=because, instead="Set enable_dual_path_graph=True."
            )

    def selected(self, mm_kwargs: dict[str, Any], items: list[int], count: int) -> dict[str, Any]:
        """A call of some of the items."""
        if items == list(range(count)):
            return mm_kwargs
        found: dict[str, Any] = self._model.select_encoder_cudagraph_items(mm_kwargs, items)
        return found

    def _capacity(self) -> Capacity:
        if self._graphs.blocked():
            return Capacity(((),) * len(self._paths), *self._limits[1:])
        if self._version != self._graphs.version:
            captured = {(key.path, key.budget) for key in self._graphs.captured()}
            budgets = tuple(
                tuple(budget for budget in budgets if (path, budget) in captured)
                for path, budgets in self._limits.budgets.items()
            )
            self._known = Capacity(budgets, *self._limits[1:])
            self._version = self._graphs.version
        return self._known

    def encoded(self, mm_kwargs: dict[str, Any], specs: list[EncoderItemSpec]) -> list[Any]:
        """All items of a call, in groups."""
        dest: dict[int, Any] = {}
        if any(self._capacity().budgets):
            self._graphs.check_weights()
        for items, group in self._groups(specs):
            self._run_group(items, group, mm_kwargs, specs, dest)
        idle = [n for n, spec in enumerate(specs) if not any(map(spec.tokens, self._paths))]
        if idle:  # last, as others tell what a result looks like
            self._without_tokens(idle, mm_kwargs, len(specs), dest)
        missing = [place for place in range(len(specs)) if place not in dest]
        if missing:
            found = f"no result for item {missing[0]}"
            raise EncoderError.returned(
                method="postprocess_encoder_output", found=found, expected="one for each"
            )
        return [dest[place] for place in range(len(specs))]

    def check(self, specs: list[EncoderItemSpec]) -> None:
        """Refuse items that would run eager, but where that is the cheaper way; for ``strict``.

        Raises:
            DispatchError: names the first of them, and why.
        """
        for items, group in self._groups(specs):
            mine = [specs[item] for item in items]
            for path, budget in zip(self._paths, group.budgets, strict=True):
                tokens = sum(spec.tokens(path) for spec in mine)
                reason = self._graph_for(path, budget, mine)[1] if tokens else None
                if reason is not None and reason not in EXPECTED:
                    more = f" and {len(items) - 1} more" if items[1:] else ""
                    what = f"item {items[0]}{more} of an encoder"
                    detail = f"{tokens} output tokens on path {path!r}"
                    raise DispatchError.strict(what=what, reason=reason.value, detail=detail)

    def _groups(self, specs: list[EncoderItemSpec]) -> Iterator[tuple[list[int], Group]]:
        """(items, group) of all that have tokens, as they will run."""
        full = [n for n, spec in enumerate(specs) if any(map(spec.tokens, self._paths))]
        listed, unlisted = self._by_axes(full, specs)
        for item in unlisted:  # alone, so that no other item goes without a graph for it
            yield [item], Group((item,), (None,) * len(self._paths))
        needs = [self._need(specs[item]) for item in listed]
        for group in pack(needs, self._capacity(), self.costs):
            yield [listed[place] for place in group.items], group

    def _without_tokens(
        self, items: list[int], mm_kwargs: dict[str, Any], count: int, dest: dict[int, Any]
    ) -> None:
        """Items that need not run: results without rows, as the model itself puts them together."""
        self._statistics.record((), len(items))
        if self._model.has_own("postprocess_encoder_output"):
            outputs = {path: self._graphs.empty(path) for path in self._paths}
            counts = {path: [0] * len(items) for path in self._paths}
            self._split(outputs, items, counts, dest, self.selected(mm_kwargs, items, count))
        for item in items:
            if item not in dest:
                dest[item] = self._graphs.empty(self._paths[0])

    def _split(
        self,
        outputs: dict[str, Any],
        items: list[int],
        counts: dict[str, list[int]],
        dest: dict[int, Any],
        mm_kwargs: dict[str, Any],
    ) -> None:
        single = self._paths == [DEFAULT]
        self._model.postprocess_encoder_output(
            outputs[DEFAULT] if single else outputs,
            items,
            counts[DEFAULT] if single else counts,
            dest,
            clone=False,
            batch_mm_kwargs=mm_kwargs,
        )
        if self._splits and items and items[0] in dest:
            leaves = [each for each in compat.tree_leaves(dest[items[0]]) if _has_columns(each)]
            if leaves:
                check_columns(leaves, self._config.out_hidden_size, "postprocess_encoder_output")

    def _run_group(
        self,
        items: list[int],
        group: Group,
        mm_kwargs: dict[str, Any],
        all_specs: list[EncoderItemSpec],
        dest: dict[int, Any],
    ) -> None:
        """One group on all paths, and its parts to the items."""
        mm_kwargs = self.selected(mm_kwargs, items, len(all_specs))
        specs = [all_specs[item] for item in items]
        ran: list[Ran] = []
        outputs: dict[str, Any] = {}
        counts = {path: [spec.tokens(path) for spec in specs] for path in self._paths}
        for path, budget in zip(self._paths, group.budgets, strict=True):
            tokens = sum(counts[path])
            if not tokens:
                continue
            key, reason = self._graph_for(path, budget, specs)
            if key is not None:
                outputs[path] = self._graphs.replay(key, mm_kwargs, tokens)
            else:
                outputs[path] = self._graphs.eager(path, mm_kwargs, specs)
            ran.append(Ran(path, key.budget if key else None, counts[path], reason))
        self._statistics.record(ran, len(specs))
        self._split(outputs, items, counts, dest, mm_kwargs)

    def _graph_for(
        self, path: str, budget: int | None, specs: list[EncoderItemSpec]
    ) -> tuple[GraphKey | None, Reason | None]:
        """The graph that serves a group on one path; or why none does."""
        if not budget:
            return None, self._why_eager(path, specs)
        key = GraphKey(path, budget, self._axes(specs) or ())
        return (key, None) if self._graphs.has(key) else (None, Reason.NOT_CAPTURED)

    def _why_eager(self, path: str, specs: list[EncoderItemSpec]) -> Reason:
        blocked = self._graphs.blocked()
        if blocked is not None:
            return blocked
        budgets = self._capacity().budgets[self._paths.index(path)]
        if not budgets:
            return Reason.NO_DEVICE if self._graphs.pool is None else Reason.NOT_CAPTURED
        if self._axes(specs) is None:
            return Reason.UNLISTED_VARIANT
        room = sum(self._room(path, spec) for spec in specs)
        if room > self._limits.budgets[path][-1]:
            return Reason.OVERSIZE
        if sum(spec.frames for spec in specs) > (self._limits.max_frames or self._limits.max_items):
            return Reason.TOO_MANY_FRAMES
        return Reason.NOT_CAPTURED if room > budgets[-1] else Reason.CHEAPER_EAGER

    def _by_axes(
        self, items: list[int], specs: list[EncoderItemSpec]
    ) -> tuple[list[int], list[int]]:
        """The items for which each capture axis has a value that is enough, and the others."""
        if not self._config.capture_axes:
            return items, []
        listed = [item for item in items if self._axes([specs[item]]) is not None]
        return listed, [item for item in items if item not in listed]

    def _axes(self, specs: list[EncoderItemSpec]) -> tuple[int, ...] | None:
        """For each capture axis the least value that is enough for all items; None if none is."""
        found = []
        for axis in self._config.capture_axes:
            needed = max(spec.axes[axis.name] for spec in specs)
            enough = [value for value in axis.values if value >= needed]
            if not enough:
                return None
            found.append(enough[0])
        return tuple(found)


def _has_columns(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 1
