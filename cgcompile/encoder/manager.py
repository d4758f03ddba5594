"""Run an encoder on graphs of fixed budgets: :class:`EncoderCudaGraphManager`.

Images and videos have many sizes, and a graph has one. So items are packed into groups, each of
which fits a budget of output tokens, and padded up to it; what no graph holds, or what is cheaper
without one, runs eager under a reason (:class:`EncoderCalls`). Whether a graph pays depends on the
model and the device, so graphs can be timed once they are captured (:class:`Calibration`).

The rule, for models: a graph reads its own buffers alone, and :mod:`~cgcompile.encoder.protocol`
says what goes into them. Callers have none: results are theirs, and any thread may call.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from cgcompile import torch_compat as compat
from cgcompile.config import CompilationConfig
from cgcompile.encoder.budgets import checked_number
from cgcompile.encoder.graphs import Budgeted, EncoderGraphs, GraphKey, Limits, resolved_limits
from cgcompile.encoder.packing import Capacity, Costs, Group, Need, pack
from cgcompile.encoder.protocol import (
    DEFAULT,
    GLOBAL,
    CheckedModel,
    EncoderItemSpec,
    check_columns,
)
from cgcompile.encoder.sharding import Sharder
from cgcompile.encoder.statistics import EncoderStatistics, Ran
from cgcompile.errors import ConfigError, DispatchError, EncoderError
from cgcompile.graphs.capture_all import BulkCapture
from cgcompile.graphs.device import device_named
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.locks import new_lock
from cgcompile.reasons import EXPECTED, Counters, Reason
from cgcompile.settings import checked_but, require

_RUNS = 2


class Calibration:
    """Times of graphs, in milliseconds."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.replays: dict[tuple[str, int], float] = {}
        self._plain: dict[str, list[tuple[int, float]]] = {}

    def measure(self, key: GraphKey, replay: Callable[[], Any], plain: Callable[[], Any]) -> None:
        """Time one graph, and what it recorded without a graph. Synchronises."""
        where = (key.path, key.budget)
        cost = self._time(replay)
        self.replays[where] = max(cost, self.replays.get(where, 0.0))
        self._plain.setdefault(key.path, []).append((key.budget, self._time(plain)))

    def costs(self, paths: Sequence[str]) -> Costs:
        """What packing estimates with."""
        measured = [(index, self._plain.get(path)) for index, path in enumerate(paths)]
        eagers = {index: _line(points) for index, points in measured if points}
        replays = {
            (paths.index(path), budget): cost for (path, budget), cost in self.replays.items()
        }
        return Costs(replays=replays, eagers=eagers)

    def _time(self, run: Callable[[], Any]) -> float:
        """Return the shortest of a few runs, in milliseconds."""
        run()
        return min(self._once(run) for _ in range(_RUNS))

    def _once(self, run: Callable[[], Any]) -> float:
        self._synchronize()
        start = time.perf_counter()  # of the host, whose part of an eager run counts too
        run()
        self._synchronize()
        return (time.perf_counter() - start) * 1e3

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(fixed, per token) of the straight line nearest to the points, neither below 0."""
    count = len(points)
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    slope = max(slope, 0.0)
    fixed = mean_y - slope * mean_x
    if fixed < 0:  # through the origin then
        return 0.0, sum(x * y for x, y in points) / sum(x * x for x, _ in points)
    return fixed, slope


class EncoderCalls:
    """Runs the items of one call, in groups. Not for several threads at a time."""

    def __init__(
        self,
        model: CheckedModel,
        limits: Limits,
        graphs: EncoderGraphs,
        statistics: EncoderStatistics,
        costs: Costs,
    ) -> None:
        self._model, self._config, self._limits = model, model.config, limits
        self._graphs, self._statistics = graphs, statistics
        self._paths = list(self._config.graph_sets)
        self._version: tuple[int, int] | None = None
        self._known = Capacity(((),) * len(self._paths), *limits[1:])
        self.costs = costs  # as given; may be replaced

    def _room(self, path: str, spec: EncoderItemSpec) -> int:
        """Output tokens whose room an item takes: as its result has, or as its input needs."""
        rows = self._config.input_rows_per_token
        return max(spec.tokens(path), -(-spec.input_size // rows) if rows else 0)

    def _need(self, spec: EncoderItemSpec) -> Need:
        return Need(tuple([self._room(path, spec) for path in self._paths]), spec.frames)

    def make_tables(self) -> None:
        """Build the tables of packing now rather than at the first call."""
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
        selected: dict[str, Any] = self._model.select_encoder_cudagraph_items(mm_kwargs, items)
        return selected

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
        missing = [item for item in range(len(specs)) if item not in dest]
        if missing:
            found = f"no result for item {missing[0]}"
            raise EncoderError.returned(
                method="postprocess_encoder_output", found=found, expected="one for each"
            )
        return [dest[item] for item in range(len(specs))]

    def check(self, specs: list[EncoderItemSpec]) -> None:
        """Refuse items that would run eager, but where that is the cheaper way; for ``strict``."""
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
            yield [listed[index] for index in group.items], group

    def _without_tokens(
        self, items: list[int], mm_kwargs: dict[str, Any], count: int, dest: dict[int, Any]
    ) -> None:
        """Items that need not run: results without rows, as the model itself puts them together."""
        self._statistics.record((), len(items))
        if self._model.splits_results:
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
        if self._model.splits_results and items and items[0] in dest:
            leaves = [leaf for leaf in compat.tree_leaves(dest[items[0]]) if _has_columns(leaf)]
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
        values = []
        for axis in self._config.capture_axes:
            needed = max(spec.axes[axis.name] for spec in specs)
            enough = [value for value in axis.values if value >= needed]
            if not enough:
                return None
            values.append(enough[0])
        return tuple(values)


def _has_columns(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 1


log = logging.getLogger(__name__)

_LOGGED_EVERY = 100  # items between two lines of statistics


class EncoderCudaGraphManager:
    """The graphs of one encoder, and the buffers that they read.

    Any thread may call; calls are served one after the other, on the stream of the caller, on which
    results are ready. Managers that are given one pool take turns as well.

    Args:
        model: what implements :class:`~cgcompile.encoder.SupportsEncoderCudaGraph`.
        device: where its buffers are.
        dtype: of floating point buffers.
        token_budgets: output tokens of the graphs, for all paths or by path; left out: doubled from
            the least to the most that ``get_encoder_cudagraph_budget_range(settings)`` says.
        max_batch_size: most items of a replay; at most the least budget, so that a model which
            shares a budget out among its items has a token for each. Left out: the most of the
            model's range divided by its least, at most the least budget. Without a method
            ``get_encoder_cudagraph_budget_range()``: the largest budget divided by the least.
        max_frames_per_batch: most frames (sequences of attention) of a replay; left out:
            ``max_batch_size * max_frames_per_video``. 0: graphs for images, with one frame for each
            item as of a model without videos; videos of more frames in all run eager.
        settings: what the model infers its range from, which is asked for unless ``token_budgets``
            and ``max_batch_size`` are both given.
        config: ``capture_device``, ``num_warmups``, ``poison``, and ``strict``: an item that no
            graph serves is an error, unless a graph would be the slower way for it.
        pool: memory of the graphs, shared with another manager; left out: a pool of its own. Do not
            give the decoder's.
        costs: what a replay and an eager run take; left out: an estimate in tokens.
        calibrate: measure them once captured; takes a few replays of each graph, and synchronises.
        sharder: share the items of each call out among ranks.
        graph_capture: a context around all captures, such as a communicator's.
        inference_mode: capture and run in inference mode; else in the caller's mode.
        check_weights: before replays compare the objects and addresses of all weights of the model,
            if it is a module, or of the modules that its attributes hold, closures and containers
            included.

    Attributes:
        config: what the model said of its encoder, copied.
        statistics: hits, misses, padding, reasons.

    Raises:
        EncoderError: a method is missing, or no budgets are given and none can be inferred.
        EncoderError: budgets, items or frames that cannot be.
        ConfigError: ``token_budgets`` for paths that the model has not, or an argument of another
            kind than above.
    """

    @checked_but("device", "sharder")
    def __init__(
        self,
        model: Any,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        token_budgets: Budgeted | None = None,
        max_batch_size: int | None = None,
        max_frames_per_batch: int | None = None,
        settings: Any = None,
        config: CompilationConfig | None = None,
        pool: GraphPool | None = None,
        costs: Costs | None = None,
        calibrate: bool = False,
        sharder: Sharder | None = None,
        graph_capture: Callable[[], AbstractContextManager[Any]] = nullcontext,
        inference_mode: bool = True,
        check_weights: bool = True,
    ) -> None:
        where = "EncoderCudaGraphManager"
        shares = all(hasattr(sharder, name) for name in ("rank", "assign", "agree", "gather"))
        expected = "a Sharder, what has its methods, or None"
        require(sharder is None or shares, "sharder", where, sharder, expected)
        device = device_named(device, where)
        self._model = CheckedModel(model)
        self.config = self._model.config
        self.statistics = EncoderStatistics()
        self._device = torch.empty(0, device=device).device  # with an index, alike in all threads
        self._limits = resolved_limits(
            self.config,
            token_budgets,
            max_batch_size,
            max_frames_per_batch,
            self._range(settings, token_budgets is None, max_batch_size is None),
        )
        self._settings = CompilationConfig.resolve(config)
        self._graphs = EncoderGraphs(
            self._model,
            self._limits,
            self._device,
            dtype,
            self._settings,
            pool,
            check_weights,
        )
        self._calls = EncoderCalls(
            self._model, self._limits, self._graphs, self.statistics, costs or Costs()
        )
        self._calibrate = calibrate
        self._sharder = sharder
        self._graph_capture = graph_capture
        self._inference_mode = inference_mode
        self._logged = 0
        self._lock = new_lock() if self.pool is None else self.pool.lock
        log.info(
            "encoder graphs of %s: token budgets %s, at most %d items and %d frames a replay",
            type(model).__name__,
            self.token_budgets,
            self.max_batch_size,
            self.max_frames_per_batch,
        )

    def _range(self, settings: Any, no_budgets: bool, no_items: bool) -> tuple[int, int] | None:
        """(least, most) output tokens by the model; None if nothing is inferred from them."""
        method = "get_encoder_cudagraph_budget_range"
        if not (no_budgets or (no_items and self._model.has_own(method))):
            return None
        span: tuple[int, int] = self._model.get_encoder_cudagraph_budget_range(settings)
        return span

    # -------------------------------------------------------------- what a user may ask

    @property
    def token_budgets(self) -> list[int] | dict[str, list[int]]:
        """The budgets, ascending; of several paths, by path."""
        by_path = {path: list(budgets) for path, budgets in self._limits.budgets.items()}
        return by_path[DEFAULT] if list(by_path) == [DEFAULT] else by_path

    @property
    def max_batch_size(self) -> int:
        """Most items of a replay."""
        return self._limits.max_items

    @property
    def max_frames_per_batch(self) -> int:
        """Most frames of a replay; 0, if graphs are not for videos: one for each item."""
        return self._limits.max_frames

    @property
    def pool(self) -> GraphPool | None:
        """The memory of the graphs; None where nothing can be captured."""
        return self._graphs.pool

    @property
    def wrapper(self) -> CUDAGraphWrapper:
        """What captures and replays its graphs."""
        return self._graphs.wrapper

    @property
    def counters(self) -> Counters:
        """What the graphs did."""
        return self._graphs.counters

    @property
    def costs(self) -> Costs:
        """What packing estimates with: as given, or as measured."""
        return self._calls.costs

    @property
    def kept_keys(self) -> dict[str, int]:
        """How often a replay found None for a buffer, and left it as it was; by key."""
        return dict(self._graphs.kept_keys)

    @property
    def budget_graphs(self) -> list[GraphKey]:
        """What has a graph now, the largest first."""
        return self._graphs.captured()

    def graph_inputs(self, key: GraphKey) -> dict[str, torch.Tensor]:
        """The buffers that a graph reads: the tensors that the model made for its capture."""
        return dict(self._graphs.inputs(key).values)

    def is_captured(self) -> bool:
        """Whether there is any graph."""
        return bool(self._graphs.captured())

    def supports_modality(self, modality: str) -> bool:
        """Whether the model takes it on graphs."""
        return modality in self.config.modalities

    def get_cumulative_stats(self) -> dict[str, Any]:
        """``hits``, ``misses``, ``hit_rate``, ``num_budgets`` (graphs) and ``token_budgets``."""
        return {
            "hits": self.statistics.hits,
            "misses": self.statistics.misses,
            "hit_rate": self.statistics.hit_rate,
            "num_budgets": len(self._graphs.captured()),
            "token_budgets": self.token_budgets,
        }

    def coverage(self) -> str:
        """A table of budgets and what they were worth, and why items ran without a graph."""
        planned = [(path, b) for path, budgets in self._limits.budgets.items() for b in budgets]
        captured = {(key.path, key.budget) for key in self._graphs.captured()}
        lines = [self.statistics.coverage(planned, captured)]
        for key, why in self._graphs.without_room.items():
            lines.append(f"{key.path} {key.budget}: {why}")
        lines += [f"kept {key}: {count} times" for key, count in self.kept_keys.items()]
        return "\n".join(lines)

    # -------------------------------------------------------------- capture

    @checked_but("max_graph_bytes")
    def capture(self, max_graph_bytes: int | None = None) -> BulkCapture:
        """Warm up and capture all graphs that are missing, the largest first.

        What could not be captured runs eager; its reason is in the result.

        With a budget of bytes, graphs are first captured on memory that is dropped again, and
        measured there: up to one graph more than the budget is in use meanwhile, and captures take
        twice the time. Chosen are the largest graph of each path, or none of a path for which that
        has no room, and then whichever saves the most padding, as long as their buffers and all
        that was measured down to the smallest of them stay within the budget. It is never
        exceeded to find out: a pool gives nothing back for one graph.

        Args:
            max_graph_bytes: most bytes of ``pool.nbytes`` afterwards: memory of the graphs, of
                the arena, and the buffers of all managers that share the pool. So the second one
                gets what the first has left; that some of its graphs may lie in memory of the
                first's is not counted on. Not counted: what the driver keeps of each graph. Left
                out: no limit.

        Returns:
            How it went. What has no room is among ``missing``; its items take the next larger
            budget that is captured, or run eager.

        Raises:
            EncoderError: ``max_graph_bytes`` is no whole number of at least 0.
            EncoderError: what the model made or returned is not of the protocol.
            EncoderError: buffers of other keys, or offsets that do not end at the last row.
            CaptureError: called inside of a capture.
            DispatchError: ``strict``, and a graph could not be captured.
            BaseException: what the model raised in a warm-up.
        """
        if max_graph_bytes is not None:
            max_graph_bytes = checked_number("max_graph_bytes", max_graph_bytes, 0)
        calibration = Calibration(self._device)

        def timed(key: GraphKey, run: Callable[[], Any]) -> None:
            if self._calibrate:
                calibration.measure(key, run, lambda: self._graphs.plain(key))

        with self._lock, self._mode():
            result = self._graphs.capture(self._graph_capture, timed, max_graph_bytes)
            if self._calibrate and calibration.replays:
                self._calls.costs = calibration.costs(list(self.config.graph_sets))
                self.statistics.measured(calibration.replays)
            self._calls.make_tables()
        return result

    def clear(self) -> None:
        """Drop the graphs, their buffers and memory; calls run eager, :meth:`capture` works again.

        A pool that was given keeps what others have in it.

        Raises:
            CaptureError: called inside of a capture; nothing is dropped then.
        """
        with self._lock:
            self._graphs.forget()

    # -------------------------------------------------------------- a call

    def execute(self, mm_kwargs: dict[str, Any]) -> list[Any]:
        """Encode the items of one call.

        Args:
            mm_kwargs: what the model takes, of one modality, any number of items. With a sharder
                equal on all ranks, all of which call. Tensors in pinned memory are read when the
                stream comes to it: do not write to them before.

        Returns:
            What each item gives, in the order of the items: by default [its output tokens, ...],
            a tensor or what the model nests. Memory of the call; ready on the current stream, and
            nothing synchronises but the model.

        Raises:
            EncoderError: the model returned what the protocol does not allow.
            EncoderError: item specs that do not fit the configuration.
            EncoderError: replay buffers that do not fit those of a graph.
            AddressChangedError: a weight was replaced since the capture: clear() and capture().
            DispatchError: ``strict``, and an item would run eager; nothing ran then, on any rank.
            EncoderShardError: with a sharder: the share of another rank failed.
            BaseException: what the model raised.
        """
        with self._lock, self._mode():
            if self._sharder is not None:
                results = self._sharded(self._sharder, mm_kwargs)
            else:
                specs = self._calls.specs(mm_kwargs)
                if self._settings.strict:
                    self._calls.check(specs)
                results = self._calls.encoded(mm_kwargs, specs)
            self._log_statistics()
        return results

    def _log_statistics(self) -> None:
        """Log what graphs were worth, once for so many items."""
        rounds = (self.statistics.hits + self.statistics.misses) // _LOGGED_EVERY
        if rounds > self._logged:
            log.debug("encoder graphs: %s", self.get_cumulative_stats())
        self._logged = rounds

    def _sharded(self, sharder: Sharder, mm_kwargs: dict[str, Any]) -> list[Any]:
        """This rank's share, and what the others made of theirs."""
        try:
            specs = self._calls.specs(mm_kwargs)
            shares = sharder.assign([spec.input_size for spec in specs])
            for share in shares if self._settings.strict else ():  # of all, so that all raise
                self._calls.check([specs[item] for item in share])
            mine = shares[sharder.rank]
            selected = self._calls.selected(mm_kwargs, list(mine), len(specs))
            own = self._calls.encoded(selected, [specs[item] for item in mine])
            sharder.check(own)
        except BaseException as failed:
            sharder.agree(failed)  # the others wait for what will not come
            raise
        sharder.agree(None)
        if not specs:
            return []
        rows, paths = None, list(self.config.graph_sets)
        if not self._model.splits_results:
            rows = [sum(map(spec.tokens, paths)) for spec in specs]
        return sharder.gather(own, shares, self._graphs.empty(paths[0]), rows)

    def _mode(self) -> AbstractContextManager[Any]:
        return torch.inference_mode() if self._inference_mode else nullcontext()
