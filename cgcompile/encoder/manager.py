"""Run an encoder on graphs of fixed budgets: :class:`EncoderCudaGraphManager`.

Images and videos have many sizes, and a graph has one. So items are packed into groups, each of
which fits a budget of output tokens, and padded up to it; what no graph holds, or what is cheaper
without one, runs eager with a reason (:class:`EncoderCalls`). Whether a graph pays depends on the
model and the device, so graphs can be timed once they are captured (:func:`calibrated`).

The rule for models: a graph reads its own buffers alone; :mod:`~cgcompile.encoder.protocol`
describes their contents.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch

from cgcompile.config import EARLIER, CompilationConfig, with_check
from cgcompile.counts import count
from cgcompile.encoder.budgets import TokenBudgets, checked_number, resolve_limits
from cgcompile.encoder.derived import derived_encoder
from cgcompile.encoder.errors import EncoderError
from cgcompile.encoder.graphs import Around, EncoderGraphs, EncoderSetup, GraphKey
from cgcompile.encoder.packing import Costs, Group, Need, pack
from cgcompile.encoder.protocol import (
    DEFAULT,
    GLOBAL,
    TOKENS,
    CheckedModel,
    EncoderItemSpec,
    check_columns,
)
from cgcompile.encoder.sharding import Sharder
from cgcompile.encoder.statistics import EncoderStatistics, Ran, on_path
from cgcompile.errors import ConfigError
from cgcompile.graphs.capture_all import BulkCapture
from cgcompile.graphs.device import device_named
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.steps import refuse_strict
from cgcompile.locks import new_lock
from cgcompile.reasons import Counters, Fallback, Reason
from cgcompile.settings import checked_but, is_flag, require, require_callable, takes_earlier
from cgcompile.torch_compat import torch_ops

log = logging.getLogger(__name__)

_LOGGED_EVERY = 100  # items between two lines of statistics
_CLOSE, _MOST_RUNS = 1.1, 10  # of a measurement

# ---------------------------------------------------------------- measured costs


def calibrated(graphs: EncoderGraphs, setup: EncoderSetup) -> tuple[Costs, dict[Any, float]]:
    """Time all graphs and what they record; return costs and the ms of each (path, budget)."""
    replays: dict[tuple[str, int], float] = {}
    plain: dict[str, list[tuple[int, float]]] = {}
    for key in graphs.captured():
        size = (key.path, key.budget)
        cost = _milliseconds(lambda key=key: graphs.run(key), setup.device)  # type: ignore[misc]
        replays[size] = max(cost, replays.get(size, 0.0))
        cost = _milliseconds(lambda key=key: graphs.plain(key), setup.device)  # type: ignore[misc]
        plain.setdefault(key.path, []).append((key.budget, cost))
    index = {path: number for number, path in enumerate(setup.paths)}
    # What was not measured is estimated from what was, so that all costs are milliseconds.
    fixed, per_token = _line([(budget, cost) for (_, budget), cost in replays.items()])
    eager_fixed, eager_per_token = _line([point for points in plain.values() for point in points])
    costs = Costs(
        fixed,
        eager_fixed,
        eager_per_token,
        replays={(index[path], budget): cost for (path, budget), cost in replays.items()},
        eagers={index[path]: _line(points) for path, points in plain.items()},
        per_token=per_token,
    )
    return costs, replays


def _milliseconds(run: Callable[[], Any], device: torch.device) -> float:
    """Return the shortest of a few runs, host time included. Synchronises."""
    run()
    times: list[float] = []
    # Two runs, or more until the two shortest are close: one interruption must not decide.
    while len(times) < 2 or (times[1] > _CLOSE * times[0] and len(times) < _MOST_RUNS):
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        times = sorted([*times, (time.perf_counter() - start) * 1e3])
    return times[0]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return (fixed, per token) of the straight line nearest to the points, neither below 0."""
    count = len(points)
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    slope = max(slope, 0.0)
    fixed = mean_y - slope * mean_x
    if fixed < 0:  # then through the origin
        return 0.0, sum(x * y for x, y in points) / sum(x * x for x, _ in points)
    return fixed, slope


# ---------------------------------------------------------------- one call


class PlannedRun(NamedTuple):
    """How items of a call run together on one path.

    Attributes:
        items: indices in the call.
        path: the set of graphs.
        budget: of the graph; None if the items run eager.
        tokens: their output tokens.
        reason: why there is no graph; None with one.

    Example:
        >>> run = cgcompile.encoder.PlannedRun((0, 2), "default", budget=64, tokens=48)
        >>> run.padding
        16
    """

    items: tuple[int, ...]
    path: str
    budget: int | None
    tokens: int
    reason: Reason | None = None

    @property
    def padding(self) -> int:
        """Output tokens of padding."""
        return 0 if self.budget is None else self.budget - self.tokens


class EncoderCalls:
    """Runs the items of one call, in groups. Not for several threads at a time."""

    def __init__(
        self,
        setup: EncoderSetup,
        graphs: EncoderGraphs,
        statistics: EncoderStatistics,
        costs: Costs,
        inferred_items: bool,
    ) -> None:
        self._model, self._config, self._limits = setup.model, setup.config, setup.limits
        self._paths = setup.paths
        axes = [name for path in setup.config.graph_sets.values() for name in path.axes]
        self._axis_names = tuple(dict.fromkeys(axes))
        rows = [
            rule.rows_per_token for rule in self._config.buffers.values() if rule.rows != TOKENS
        ]
        self._rows_per_token = min(filter(None, rows), default=0)  # each buffer must hold an item
        self._graphs = graphs
        self.statistics, self.costs = statistics, costs  # may be replaced
        self._warns = inferred_items and setup.settings.warn_fallbacks  # of few items, once

    def specs(self, mm_kwargs: dict[str, Any]) -> list[EncoderItemSpec]:
        """Return the checked items of a call."""
        specs = list(self._model.get_encoder_cudagraph_item_specs(mm_kwargs))
        for item, spec in enumerate(specs):
            if not isinstance(spec, EncoderItemSpec):
                raise EncoderError.returned(
                    call="get_encoder_cudagraph_item_specs()",
                    found=type(spec).__name__,
                    expected="a list of EncoderItemSpec",
                )
            spec.__post_init__()  # its fields may have been set since
            self._check_paths(item, spec)
            for name in self._axis_names:
                if name not in spec.axes:
                    raise EncoderError.no_axis(item=item, axis=name, known=sorted(spec.axes))
        return specs

    def _check_paths(self, item: int, spec: EncoderItemSpec) -> None:
        for path in spec.path_output_tokens:
            if path not in self._paths:
                raise EncoderError.unknown_path(item=item, path=path, known=self._paths)
        if spec.output_tokens and not self._has_tokens(spec):
            raise EncoderError.no_path(item=item, tokens=spec.output_tokens, known=self._paths)
        dual = self._config.enable_dual_path_graph or GLOBAL in self._paths
        if not dual and (spec.global_output_tokens or spec.local_output_tokens):
            raise ConfigError.impossible(
                what=f"item {item}: global_output_tokens or local_output_tokens",
                because="the configuration has no dual path",
                instead="Set enable_dual_path_graph=True.",
            )

    def _has_tokens(self, spec: EncoderItemSpec) -> bool:
        return any(map(spec.tokens, self._paths))

    def selected(self, mm_kwargs: dict[str, Any], items: list[int], count: int) -> dict[str, Any]:
        """Return a call of some of its ``count`` items."""
        if items == list(range(count)):
            return mm_kwargs
        selected: dict[str, Any] = self._model.select_encoder_cudagraph_items(mm_kwargs, items)
        return selected

    def check(self, specs: list[EncoderItemSpec]) -> None:
        """Refuse items that would run eager, unless that is the cheaper way; for ``strict``."""
        for run in self.plan(specs):
            if run.reason is not None:
                more = f" and {len(run.items) - 1} more" if run.items[1:] else ""
                why = Fallback(run.reason, f"{run.tokens} output tokens" + on_path(run.path))
                refuse_strict(True, f"item {run.items[0]}{more} of an encoder", why)

    def plan(self, specs: list[EncoderItemSpec]) -> list[PlannedRun]:
        """Return how the items of a call will run."""
        runs = []
        for items, group in self._groups(specs):
            mine = [specs[item] for item in items]
            for path, budget in zip(self._paths, group.budgets, strict=True):
                tokens = sum(spec.tokens(path) for spec in mine)
                if tokens:
                    key, reason = self._dispatch(path, budget, mine)
                    graph_budget = key.budget if key else None
                    runs.append(PlannedRun(tuple(items), path, graph_budget, tokens, reason))
        return runs

    def encoded(
        self, mm_kwargs: dict[str, Any], specs: list[EncoderItemSpec], eager: bool = False
    ) -> list[Any]:
        """Run all items of a call, in groups, or eager one by one; return results in order."""
        dest: dict[int, Any] = {}
        for items, group in self._alone(specs) if eager else self._groups(specs):
            self._run_group(items, group, mm_kwargs, specs, dest, eager)
        idle = [item for item, spec in enumerate(specs) if not self._has_tokens(spec)]
        if idle:  # last: results of others show the structure
            self._run_idle(idle, mm_kwargs, len(specs), dest)
        missing = [item for item in range(len(specs)) if item not in dest]
        if missing:
            raise EncoderError.returned(
                call="postprocess_encoder_output()",
                found=f"no result for item {missing[0]}",
                expected="one for each",
            )
        return [dest[item] for item in range(len(specs))]

    def _groups(self, specs: list[EncoderItemSpec]) -> Iterator[tuple[list[int], Group]]:
        """Yield (items, group) of all items with tokens, as they will run."""
        listed = []
        for item, spec in enumerate(specs):
            if not self._has_tokens(spec):
                continue
            if self._axis_names and self._exceeds_axes(spec):  # others keep their graph
                yield [item], Group((item,), (None,) * len(self._paths))
            else:
                listed.append(item)
        needs = [self._need(specs[item]) for item in listed]
        for group in pack(needs, self._graphs.capacity(), self.costs):
            yield [listed[index] for index in group.items], group

    def _alone(self, specs: list[EncoderItemSpec]) -> Iterator[tuple[list[int], Group]]:
        """Yield each item with tokens as a group that runs eager."""
        for item, spec in enumerate(specs):
            if self._has_tokens(spec):
                yield [item], Group((item,), (None,) * len(self._paths))

    def _need(self, spec: EncoderItemSpec) -> Need:
        return Need(tuple([self._room(path, spec) for path in self._paths]), spec.frames)

    def _room(self, path: str, spec: EncoderItemSpec) -> int:
        """Return the output tokens that an item occupies: its result's, or those of its input."""
        rows = self._rows_per_token
        return max(spec.tokens(path), -(-spec.input_size // rows) if rows else 0)

    def _exceeds_axes(self, spec: EncoderItemSpec) -> bool:
        """Return whether no graph of a path of an item is captured for its sizes."""
        return any(spec.tokens(path) and self._axes(path, [spec]) is None for path in self._paths)

    def _axes(self, path: str, specs: list[EncoderItemSpec]) -> tuple[int, ...] | None:
        """Return the least value of each axis of a path that suffices for all items, or None."""
        values = []
        for name, captured in self._config.graph_sets[path].axes.items():
            needed = max(spec.axes[name] for spec in specs)
            value = next((value for value in captured if value >= needed), None)
            if value is None:
                return None
            values.append(value)
        return tuple(values)

    def _run_group(
        self,
        items: list[int],
        group: Group,
        mm_kwargs: dict[str, Any],
        all_specs: list[EncoderItemSpec],
        dest: dict[int, Any],
        eager: bool,
    ) -> None:
        """Run one group on all paths, and give each item its part."""
        mm_kwargs = self.selected(mm_kwargs, items, len(all_specs))
        specs = [all_specs[item] for item in items]
        ran: list[Ran] = []
        outputs: dict[str, Any] = {}
        counts = {path: [spec.tokens(path) for spec in specs] for path in self._paths}
        for path, budget in zip(self._paths, group.budgets, strict=True):
            tokens = sum(counts[path])
            if not tokens:
                continue
            key, reason = self._dispatch(path, budget, specs)
            reason = Reason.MODE_EXCLUDED if eager else reason
            detail = self._detail(path, tokens) if reason is Reason.CAPTURE_FAILED else ""
            if key is not None:
                call = self._graphs.fill(key, mm_kwargs, specs)
                outputs[path] = self._graphs.wrapper.step_table.run(call)
                if call.ran_plain is not None:
                    key, (reason, detail) = None, call.ran_plain
            else:
                outputs[path] = self._graphs.eager(path, mm_kwargs, specs)
            needed = sum(self._room(path, spec) for spec in specs)
            graph_budget = key.budget if key else None
            ran.append(Ran(path, graph_budget, counts[path], reason, detail, needed))
            if self._warns and key is not None and len(all_specs) > len(items):
                self._warn_of_few_items(len(items), tokens, key.budget)
        self.statistics.record(ran, len(specs))
        self._split(outputs, items, counts, dest, mm_kwargs)

    def _warn_of_few_items(self, items: int, tokens: int, budget: int) -> None:
        """Log once that the limit of items, which the user did not give, causes padding."""
        if items == self._limits.max_items and 2 * tokens <= budget:
            self._warns = False
            text = (
                "a replay of encoder budget %d had %d output tokens: it takes at most %d items. "
                "Remedy: leave out small budgets, or give max_batch_size=, which is at most the "
                "least budget; fitted_budgets(max_items=...) fits no smaller ones. "
                "(Logged once; on_fallback='count' turns it off.)"
            )
            log.warning(text, budget, tokens, items)

    def _dispatch(
        self, path: str, budget: int | None, specs: list[EncoderItemSpec]
    ) -> tuple[GraphKey | None, Reason | None]:
        """Return the graph that serves a group on one path, or why none does; nothing runs."""
        axes = self._axes(path, specs)
        if budget and axes is not None:
            key = GraphKey(path, budget, axes)
            if self._graphs.has(key):
                return key, None
            failed = key in self._graphs.failed
            return None, Reason.CAPTURE_FAILED if failed else Reason.NOT_CAPTURED
        blocked = self._graphs.blocked()
        if blocked is not None:
            return None, blocked
        budgets = self._graphs.capacity().budgets[self._paths.index(path)]
        room, frames = sum(self._room(path, spec) for spec in specs), sum(s.frames for s in specs)
        if not budgets:
            reason = self._why_none(path, room)
        elif axes is None:
            reason = Reason.UNLISTED_VARIANT
        elif room > self._limits.budgets[path][-1]:
            reason = Reason.OVERSIZE
        elif frames > (self._limits.max_frames or self._limits.max_items):
            reason = Reason.TOO_MANY_FRAMES
        else:
            reason = Reason.CHEAPER_EAGER
            if room > budgets[-1]:
                reason = self._why_none(path, room)
        return None, reason

    def _why_none(self, path: str, room: int) -> Reason:
        """Return why no graph of a path holds ``room`` tokens, although a budget does."""
        if self._graphs.pool is None:
            return Reason.NO_DEVICE
        return Reason.CAPTURE_FAILED if self._detail(path, room) else Reason.NOT_CAPTURED

    def _detail(self, path: str, room: int) -> str:
        """Return the error of the smallest failed graph of a path with room for ``room`` tokens."""
        failed = [key for key in self._graphs.failed if key.path == path and key.budget >= room]
        return self._graphs.failed[min(failed)] if failed else ""

    def _run_idle(
        self, items: list[int], mm_kwargs: dict[str, Any], count: int, dest: dict[int, Any]
    ) -> None:
        """Give items without tokens results without rows, as the model itself joins them."""
        self.statistics.record((), len(items))
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
            leaves = torch_ops.tree_leaves(dest[items[0]])
            tables = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 1]
            if tables:
                check_columns(tables, self._config.out_hidden_size, "postprocess_encoder_output")


# ---------------------------------------------------------------- the manager

_WHERE = "EncoderCudaGraphManager"
_WITHOUT_EFFECT = "on_input_change", "max_captured_shapes", "max_weight_sets"


def _settings(config: CompilationConfig | Mapping[str, Any] | None) -> CompilationConfig:
    """Return the settings; refuse those of a mapping that encoder graphs do not read."""
    if not isinstance(config, Mapping):
        return CompilationConfig.resolve(config)
    settings = CompilationConfig.resolve(options=config)
    named = {EARLIER[name].setting if name in EARLIER else name for name in config}
    for spec in dataclasses.fields(settings):
        value, default = getattr(settings, spec.name), spec.metadata["default"]
        reads = spec.metadata["needs"] == "graphs" and spec.name not in _WITHOUT_EFFECT
        if spec.name in named and not reads and value != default:
            raise ConfigError.impossible(
                what=f"{spec.name} = {value!r} of an encoder manager",
                because="its graphs hold the whole forward, and do not read this setting",
                instead=f"Leave {spec.name} out.",
            )
    return settings


def _move_check_weights(arguments: dict[str, Any], on: bool) -> None:
    arguments["config"] = with_check("weights", _settings(arguments.get("config")), on)


def _move_calibrate(arguments: dict[str, Any], on: bool) -> None:
    require(is_flag(on), "calibrate", _WHERE, on, "bool")
    if on and arguments.get("costs") is not None:
        raise ConfigError.impossible(
            what="calibrate=True with costs=",
            because="measured costs replace the given ones",
            instead="Give one: costs= of an earlier manager need no measurement.",
        )
    if on:
        arguments["costs"] = "measured"


def _finish_inference_mode(
    _: dict[str, Any], inference_mode: bool
) -> Callable[["EncoderCudaGraphManager"], None] | None:
    require(is_flag(inference_mode), "inference_mode", _WHERE, inference_mode, "bool")
    return None if inference_mode else EncoderCudaGraphManager.allow_gradients


def _checked_context(around: Around) -> Around:
    """Return a function that raises unless ``around()`` returns a context manager."""
    where = "EncoderCudaGraphManager.capture"
    require_callable("around", where, around)

    def entered() -> AbstractContextManager[Any]:
        context = around()
        expected = "a function that returns a context manager"
        require(isinstance(context, AbstractContextManager), "around", where, around, expected)
        return context

    return entered


def _finish_graph_capture(
    _: dict[str, Any], context: Around
) -> Callable[["EncoderCudaGraphManager"], None]:
    require_callable("graph_capture", _WHERE, context)
    return lambda manager: setattr(manager, "_around", context)


class EncoderCudaGraphManager:
    """Run the items of an encoder on CUDA graphs of fixed budgets of output tokens.

    :meth:`capture` captures one graph for each budget of each path. Each :meth:`execute` then

    1. describes the items of the call, by the protocol of the model;
    2. packs them into groups, each within the limits of a graph, at the least estimated cost;
    3. for each group, writes its values into the buffers of the graph, with padding, and replays
       it; an item that no graph holds, or for which a graph costs more, runs eager, counted;
    4. splits the results, and returns one for each item, in order.

    Any thread may call. Calls of one manager, and of managers that share a pool, run one after the
    other, on the stream of the caller.

    Args:
        model: implements :class:`~cgcompile.encoder.SupportsEncoderCudaGraph`.
        device: where its buffers are.
        dtype: of floating point buffers.
        token_budgets: output tokens of the graphs, for all paths or by path; left out: doubled from
            the least to the most of ``get_encoder_cudagraph_budget_range(settings)``.
        max_batch_size: most items of a replay; at most the least budget, so that a model which
            shares a budget out among its items has a token for each. Left out: the most of the
            model's range divided by its least, at most the least budget. Without a method
            ``get_encoder_cudagraph_budget_range()``: the largest budget divided by the least.
        max_frames_per_batch: most frames (sequences of attention) of a replay; left out:
            ``max_batch_size * max_frames_per_video``. 0: graphs for images, with one frame for each
            item as of a model without videos; videos of more frames in all run eager.
        settings: passed to the model's ``get_encoder_cudagraph_budget_range``, which is called
            unless ``token_budgets`` and ``max_batch_size`` are both given.
        config: settings, or a mapping of them: ``capture_device``, ``num_warmups``, ``debug``;
            ``checks``, whose ``weights`` are those of the model, if it is a module, or of the
            modules that its attributes hold, closures, containers and globals that its functions
            name included; and ``on_fallback="raise"``: an item that no graph serves is an error,
            unless a graph would be slower for it.
        pool: memory of the graphs, shared with another manager; left out: a pool of its own. Do not
            give the decoder's.
        costs: estimated costs of a replay and an eager run; left out: an estimate in tokens.
            ``"measured"``: measure them after capture, in milliseconds, which takes a few replays
            of each graph, and synchronises.
        sharder: shares the items of each call out among ranks.

    Attributes:
        config: the model's description of its encoder, copied.
        statistics: hits, misses, padding, reasons.
        max_batch_size: most items of a replay.
        max_frames_per_batch: most frames of a replay; 0 if graphs are not for videos: one per item.
        pool: the memory of the graphs; None where nothing can be captured.
        wrapper: captures and replays the graphs.

    Raises:
        EncoderError: a method is missing, or no budgets are given and none can be inferred.
        EncoderError: budgets, items or frames are not valid.
        ConfigError: ``token_budgets`` for paths that the model does not have, a setting without
            effect, or an argument of another kind than above.

    Example:
        >>> from cgcompile.encoder import PatchEncoder
        >>> tower = nn.Linear(12, 32)
        >>> encoder = PatchEncoder(
        ...     lambda buffers: tower(buffers["pixel_values"]),
        ...     merge_size=1, in_features=12, out_hidden_size=32, offsets={}, tower=tower,
        ... )
        >>> manager = cgcompile.EncoderCudaGraphManager(
        ...     encoder, device="cpu", dtype=torch.float32, token_budgets=[16, 64]
        ... )
        >>> report = manager.capture()
        >>> grids = [(1, 2, 4), (1, 4, 4)]
        >>> images = {"pixel_values": torch.randn(24, 12), "image_grid_thw": grids}
        >>> [tuple(result.shape) for result in manager.execute(images)]
        [(8, 32), (16, 32)]
    """

    @takes_earlier(
        check_weights=("use config=, with checks='-weights'", True, _move_check_weights),
        calibrate=("use costs='measured'", False, _move_calibrate),
        inference_mode=("call allow_gradients() afterwards", True, _finish_inference_mode),
        graph_capture=("use capture(around=...)", nullcontext, _finish_graph_capture),
    )
    @checked_but("device", "sharder")
    def __init__(
        self,
        model: Any,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        token_budgets: TokenBudgets | None = None,
        max_batch_size: int | None = None,
        max_frames_per_batch: int | None = None,
        settings: Any = None,
        config: CompilationConfig | Mapping[str, Any] | None = None,
        pool: GraphPool | None = None,
        costs: Costs | Literal["measured"] | None = None,
        sharder: Sharder | None = None,
    ) -> None:
        shares = all(hasattr(sharder, name) for name in ("rank", "assign", "agree", "gather"))
        expected = "a Sharder, what has its methods, or None"
        require(sharder is None or shares, "sharder", _WHERE, sharder, expected)
        device = device_named(device, _WHERE)
        self._model = CheckedModel(model)
        self.config = self._model.config
        method, span = "get_encoder_cudagraph_budget_range", None
        if token_budgets is None or (max_batch_size is None and self._model.has_own(method)):
            span = self._model.get_encoder_cudagraph_budget_range(settings)
        limits = resolve_limits(
            {path: graphs.min_token_budget for path, graphs in self.config.graph_sets.items()},
            self.config.most_frames_of_an_item,
            token_budgets,
            max_batch_size,
            max_frames_per_batch,
            span,
        )
        self._setup = EncoderSetup(
            self._model,
            limits,
            torch.empty(0, device=device).device,  # with an index, alike in all threads
            dtype,
            _settings(config),
        )
        warns = self._setup.settings.warn_fallbacks
        self.statistics = EncoderStatistics(warn_fallbacks=warns)
        self.max_batch_size, self.max_frames_per_batch = limits.max_items, limits.max_frames
        self._graphs = EncoderGraphs(self._setup, pool)
        self.pool, self.wrapper = self._graphs.pool, self._graphs.wrapper
        inferred = max_batch_size is None
        estimate = costs if isinstance(costs, Costs) else Costs()
        self._calls = EncoderCalls(self._setup, self._graphs, self.statistics, estimate, inferred)
        self._calibrate, self._sharder, self._inference_mode = costs == "measured", sharder, True
        self._around: Around = nullcontext  # of all captures; an earlier argument
        self._logged, self._strict = 0, self._setup.settings.strict
        self._lock = new_lock() if self.pool is None else self.pool.lock
        text = "encoder graphs of %s: token budgets %s, at most %d items and %d frames a replay"
        largest = self.max_batch_size, self.max_frames_per_batch
        log.info(text, type(model).__name__, self.token_budgets, *largest)

    @classmethod
    def from_model(
        cls,
        tower: Callable[..., Any],
        example_items: Sequence[Mapping[str, Any]],
        *,
        output: Callable[[Any], Any] | None = None,
        combine: Callable[[Any, dict[str, Any]], Any] | None = None,
        modality: str = "image",
        tolerance: float | None = None,
        **options: Any,
    ) -> "EncoderCudaGraphManager":
        """Derive the protocol of a tower from example items, and return a manager of it.

        What the tower computes on the host from inputs by item, such as grids, becomes buffers:
        tables by row, token or item, and offsets. Buffers with and without padding are compared
        with eager runs of single items; before its capture each budget, with the smallest example.

        A new size runs the tower once on the smallest example, with forward hooks on its modules,
        which are removed afterwards; an error if the calls differ from those of the examples.

        Args:
            tower: a module, or a function that calls modules.
            example_items: the keyword arguments of the tower for one item each: tensors of floating
                point [rows, ...], further tensors by row, inputs with one entry (``[1, ...]``, or a
                list of one), and constants. Items of different sizes, a small and a large one
                among them; or of one size, then graphs are for that size alone.
            output: returns the result, a tensor or several, from what the tower returned; left out:
                the tower returns one tensor.
            combine: ``combine(rows, item)`` returns the result of an item from its rows of the
                graph and its call, such as tiles with separators; runs after the graph.
            modality: of the items.
            tolerance: the most that results may differ from eager, relative to the largest number;
                left out: 1e-3 for float32, 1e-2 for float16, 3e-2 for bfloat16.
            options: arguments of the manager; ``device`` and ``dtype`` are by default the tower's,
                budgets up to 16 times the largest example.

        Returns:
            A manager; its ``model`` prints what was derived. A call has the inputs of several
            items, one after the other; results are [tokens, columns], without a dimension of items.

        Raises:
            EncoderError: something could not be derived, or differs from eager; names it.
            ConfigError: there are no examples, or they are no mappings.

        Example:
            >>> class Tower(nn.Linear):
            ...     def forward(self, pixel_values, grid):
            ...         sizes = [1.0 / (h * w) for h, w in grid.tolist() for _ in range(h * w)]
            ...         return super().forward(pixel_values) * torch.tensor(sizes)[:, None]
            >>> def call(*grids):
            ...     rows = torch.randn(sum(h * w for h, w in grids), 12)
            ...     return {"pixel_values": rows, "grid": torch.tensor(grids)}
            >>> manager = cgcompile.EncoderCudaGraphManager.from_model(
            ...     Tower(12, 32), [call((2, 2)), call((4, 4))], token_budgets=[16, 64]
            ... )
            >>> report = manager.capture()
            >>> [tuple(result.shape) for result in manager.execute(call((2, 4), (4, 4)))]
            [(8, 32), (16, 32)]
        """
        encoder = derived_encoder(tower, example_items, output, combine, modality, tolerance)
        return cls(encoder, **{"device": encoder.device, "dtype": encoder.dtype, **options})

    def __repr__(self) -> str:
        model, captured = type(self._model.model).__name__, len(self.budget_graphs)
        graphs, items = count(captured, "graph"), count(self.max_batch_size, "item")
        return f"<EncoderCudaGraphManager of {model}: {graphs} captured, at most {items} a replay>"

    @property
    def token_budgets(self) -> list[int] | dict[str, list[int]]:
        """A copy of the budgets, ascending; by path if there are several."""
        ladders = {path: list(budgets) for path, budgets in self._setup.limits.budgets.items()}
        return ladders[DEFAULT] if list(ladders) == [DEFAULT] else ladders

    @property
    def counters(self) -> Counters:
        """Captures, replays and plain runs of ``wrapper`` so far; a copy."""
        return self.wrapper.counters

    @property
    def model(self) -> Any:
        """The model that was given."""
        return self._model.model

    @property
    def costs(self) -> Costs:
        """The costs that packing estimates with: as given, or as measured."""
        return self._calls.costs

    @property
    def kept_keys(self) -> dict[str, int]:
        """By key, how often a replay had None for a buffer and left it as it was."""
        return dict(self._graphs.kept_keys)

    @property
    def budget_graphs(self) -> list[GraphKey]:
        """The keys that have a graph now, the largest first."""
        return self._graphs.captured()

    def graph_inputs(self, key: GraphKey) -> dict[str, torch.Tensor]:
        """Return the buffers that a graph reads, which the model made for its capture."""
        return dict(self._graphs.inputs(key).values)

    def is_captured(self) -> bool:
        """Return whether there is any graph."""
        return bool(self._graphs.captured())

    def supports_modality(self, modality: str) -> bool:
        """Return whether the model takes a modality on graphs."""
        return modality in self.config.modalities

    def get_cumulative_stats(self) -> dict[str, Any]:
        """Return hits, misses, hit_rate, num_budgets (graphs) and token_budgets."""
        return {
            "hits": self.statistics.hits,
            "misses": self.statistics.misses,
            "hit_rate": self.statistics.hit_rate,
            "num_budgets": len(self._graphs.captured()),
            "token_budgets": self.token_budgets,
        }

    def coverage(self) -> str:
        """Return a table of budgets, their use and padding, and why items ran without a graph."""
        ladders = self._setup.limits.budgets.items()
        planned = [(path, budget) for path, budgets in ladders for budget in budgets]
        captured = {key[:2] for key in self._graphs.captured()}
        most = self.max_frames_per_batch
        frames = f", {count(most, 'frame')}" if most else ""
        limit = f"at most {count(self.max_batch_size, 'item')}{frames} a replay"
        lines = [self.statistics.coverage(planned, captured), limit]
        for key, why in self._graphs.without_room.items():
            lines.append(f"{key.path} {key.budget}: {why}")
        lines += [f"kept {key}: {count} times" for key, count in self.kept_keys.items()]
        return "\n".join(lines)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave the calls inside out of the statistics: they are no serving."""
        kept = self.statistics
        self.statistics = self._calls.statistics = EncoderStatistics()
        try:
            yield
        finally:
            self.statistics = self._calls.statistics = kept

    def allow_gradients(self) -> None:
        """Capture and run in the mode of the caller, and not in inference mode.

        Call it before :meth:`capture`. A call that needs gradients runs without graphs then.
        """
        self._inference_mode = False

    @checked_but("max_graph_bytes")
    def capture(
        self, max_graph_bytes: int | None = None, *, around: Around = nullcontext
    ) -> BulkCapture:
        """Warm up and capture all graphs that are missing, the largest first.

        What could not be captured runs eager; its reason is in the result.

        With a limit of bytes, graphs are first captured on memory that is dropped again, and
        measured there: up to one graph more than the limit is in use meanwhile, and captures take
        twice the time. Chosen are the largest graph of each path, or none where that has no room,
        and then the graphs that save the most padding, as long as their buffers and all that was
        measured down to the smallest of them stay within the limit. It is never exceeded to find
        out, because a pool gives no memory back for one graph.

        Args:
            max_graph_bytes: most bytes of ``pool.nbytes`` afterwards: memory of the graphs, of
                the arena, and the buffers of all managers that share the pool, so that the second
                one gets what the first has left. Not counted: what the driver keeps of each graph.
                Left out: no limit.
            around: returns a context around all captures, such as a communicator's. Buffers are
                made outside of it, in memory of the caller's stream.

        Returns:
            How it went. What has no room is among ``missing``; its items take the next larger
            budget that is captured, or run eager.

        Raises:
            EncoderError: ``max_graph_bytes`` is not a whole number of at least 0.
            EncoderError: what the model made or returned does not follow the protocol.
            EncoderError: buffers of other keys, or offsets that do not end at the last row.
            CaptureError: called inside of a capture.
            DispatchError: ``on_fallback="raise"``, and a graph could not be captured.
            BaseException: what the model raised in a warm-up.
        """
        if max_graph_bytes is not None:
            max_graph_bytes = checked_number("max_graph_bytes", max_graph_bytes, 0)
        around = _checked_context(self._around if around is nullcontext else around)
        with self._lock, self._mode():
            result = self._graphs.capture(max_graph_bytes, around)
            if self._calibrate and self._graphs.captured():
                self._calls.costs, measured = calibrated(self._graphs, self._setup)
                self.statistics.measured(measured)
        return result

    def clear(self) -> None:
        """Drop the graphs, their buffers and memory; calls run eager, :meth:`capture` works again.

        Others keep what they have in a shared pool.

        Raises:
            CaptureError: called inside of a capture; nothing is dropped then.
        """
        with self._lock:
            self._graphs.release()

    def execute(self, mm_kwargs: dict[str, Any], *, eager: bool = False) -> list[Any]:
        """Encode the items of one call.

        Args:
            mm_kwargs: a call of the model, of one modality, any number of items. With a sharder
                equal on all ranks, all of which call. Tensors in pinned memory are read when the
                stream reaches the copy: do not write to them before.
            eager: run each item alone and without a graph, to compare; counted as
                ``mode_excluded``, and no error with ``on_fallback="raise"``.

        Returns:
            The result of each item, in the order of the items: by default [its output tokens, ...],
            a tensor or what the model nests. Memory of the call; ready on the current stream.
            Nothing but the model synchronises.

        Raises:
            EncoderError: the model returned what the protocol does not allow.
            EncoderError: item specs that do not fit the configuration.
            EncoderError: replay buffers that do not fit those of a graph, or their items.
            AddressChangedError: a weight was replaced since the capture: clear() and capture().
            DispatchError: ``on_fallback="raise"``, and an item would run eager; nothing ran then,
                on any rank.
            EncoderShardError: with a sharder: the share of another rank failed.
            BaseException: what the model raised.
        """
        flag: Any = eager
        if type(flag) is not bool:
            require(is_flag(flag), "eager", "execute", flag, "True or False")
        with self._lock, self._mode():
            if self._sharder is not None:
                results = self._sharded(self._sharder, mm_kwargs, eager)
            else:
                specs = self._calls.specs(mm_kwargs)
                if self._strict and not eager:
                    self._calls.check(specs)
                results = self._calls.encoded(mm_kwargs, specs, eager)
            rounds = (self.statistics.hits + self.statistics.misses) // _LOGGED_EVERY
            if rounds > self._logged:
                log.debug("encoder graphs: %s", self.get_cumulative_stats())
            self._logged = rounds
        return results

    def plan(self, mm_kwargs: dict[str, Any]) -> list[PlannedRun]:
        """Return which items of a call run together, on which budget, or why without a graph.

        Nothing runs, and nothing is counted.

        Args:
            mm_kwargs: a call, as for :meth:`execute`. With a sharder: the share of this rank.

        Returns:
            One entry for each group of items and path; none for items without tokens.

        Raises:
            EncoderError: item specs that do not fit the configuration.
            BaseException: what the model raised.

        Example:
            >>> tower = nn.Linear(12, 32)
            >>> encoder = cgcompile.encoder.PatchEncoder(
            ...     lambda buffers: tower(buffers["pixel_values"]),
            ...     merge_size=1, in_features=12, out_hidden_size=32, offsets={}, tower=tower,
            ... )
            >>> manager = cgcompile.EncoderCudaGraphManager(
            ...     encoder, device="cpu", dtype=torch.float32, token_budgets=[16, 64]
            ... )
            >>> report = manager.capture()
            >>> grids = [(1, 2, 4), (1, 10, 10)]
            >>> images = {"pixel_values": torch.randn(108, 12), "image_grid_thw": grids}
            >>> [(run.items, run.budget, run.reason) for run in manager.plan(images)]
            [((1,), None, <Reason.OVERSIZE: 'oversize'>), ((0,), 16, None)]
        """
        with self._lock, self._mode():
            specs = self._calls.specs(mm_kwargs)
            if self._sharder is None:
                return self._calls.plan(specs)
            share = self._sharder.assign([spec.input_size for spec in specs])[self._sharder.rank]
            runs = self._calls.plan([specs[item] for item in share])
            return [run._replace(items=tuple(share[item] for item in run.items)) for run in runs]

    def _sharded(self, sharder: Sharder, mm_kwargs: dict[str, Any], eager: bool) -> list[Any]:
        """Encode this rank's share, and gather those of the others."""
        try:
            specs = self._calls.specs(mm_kwargs)
            shares = sharder.assign([spec.input_size for spec in specs])
            strict = self._strict and not eager
            for share in shares if strict else ():  # so that all ranks raise
                self._calls.check([specs[item] for item in share])
            mine = shares[sharder.rank]
            selected = self._calls.selected(mm_kwargs, list(mine), len(specs))
            own = self._calls.encoded(selected, [specs[item] for item in mine], eager)
            sharder.check(own)
        except BaseException as error:
            sharder.agree(error)  # else the others wait for results of this rank
            raise
        sharder.agree(None)
        if not specs:
            return []
        rows, paths = None, self._setup.paths
        if not self._model.splits_results:
            rows = [sum(map(spec.tokens, paths)) for spec in specs]
        return sharder.gather(own, shares, self._graphs.empty(paths[0]), rows)

    def _mode(self) -> AbstractContextManager[Any]:
        return torch.inference_mode() if self._inference_mode else nullcontext()
