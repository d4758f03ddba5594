"""Run an encoder on graphs of fixed budgets: :class:`EncoderCudaGraphManager`.

Images and videos have many sizes, and a graph has one. So items are packed into groups, each of
which fits a budget of output tokens, and padded up to it; what no graph holds, or what is cheaper
without one, runs eager. The manager never begins a capture itself: a wrapper of ``graphs`` does.
The rule, for models: a graph reads its own buffers alone, and :mod:`~cgcompile.encoder.protocol`
says what goes into them. Callers have none: results are theirs, and any thread may call.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from cgcompile.config import CompilationConfig
from cgcompile.encoder.budgets import checked_number
from cgcompile.encoder.calibration import Calibration
from cgcompile.encoder.calls import EncoderCalls
from cgcompile.encoder.captured import EncoderGraphs
from cgcompile.encoder.defs import DEFAULT, EncoderCudaGraphConfig
from cgcompile.encoder.keys import GraphKey
from cgcompile.encoder.limits import Budgeted, resolved_limits
from cgcompile.encoder.packing import Costs
from cgcompile.encoder.protocol import CheckedModel
from cgcompile.encoder.sharding import Sharder
from cgcompile.encoder.statistics import EncoderStatistics
from cgcompile.errors import EncoderError
from cgcompile.graphs.bulk import BulkCapture
from cgcompile.graphs.device import device_named
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.locks import new_lock
from cgcompile.reasons import Counters
from cgcompile.settings import checked_but, require

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
        shares = all(hasattr(sharder, each) for each in ("rank", "assign", "agree", "gather"))
        expected = "a Sharder, what has its methods, or None"
        require(sharder is None or shares, "sharder", where, sharder, expected)
        device = device_named(device, where)
        self._model = CheckedModel(model)
        self.config = _copied(self._model.get_encoder_cudagraph_config())
        self.statistics = EncoderStatistics()
        self._model.check_paths(self.config)
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
            self.config,
            self._limits,
            self._device,
            dtype,
            self._settings,
            pool,
            check_weights,
        )
        self._calls = EncoderCalls(
            self._model, self.config, self._limits, self._graphs, self.statistics, costs or Costs()
        )
        self._calibrate = calibrate
        self._sharder = sharder
        self._graph_capture = graph_capture
        self._inference_mode = inference_mode
        self._logged = 0
        made = self._graphs.pool
        self._lock = new_lock() if made is None else made.lock
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
        found: tuple[int, int] = self._model.get_encoder_cudagraph_budget_range(settings)
        return found

    # -------------------------------------------------------------- what a user may ask

    @property
    def token_budgets(self) -> list[int] | dict[str, list[int]]:
        """The budgets, ascending; of several paths, by path."""
        found = {path: list(budgets) for path, budgets in self._limits.budgets.items()}
        return found[DEFAULT] if list(found) == [DEFAULT] else found

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
            found = self._graphs.capture(self._graph_capture, timed, max_graph_bytes)
            if self._calibrate and calibration.replays:
                self._calls.costs = calibration.costs(list(self.config.graph_sets))
                self.statistics.measured(calibration.replays)
            self._calls.make_tables()
        return found

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
                found = self._sharded(self._sharder, mm_kwargs)
            else:
                specs = self._calls.specs(mm_kwargs)
                if self._settings.strict:
                    self._calls.check(specs)
                found = self._calls.encoded(mm_kwargs, specs)
            self._log_statistics()
        return found

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
                self._calls.check([specs[place] for place in share])
            mine = shares[sharder.rank]
            selected = self._calls.selected(mm_kwargs, list(mine), len(specs))
            own = self._calls.encoded(selected, [specs[place] for place in mine])
            sharder.check(own)
        except BaseException as failed:
            sharder.agree(failed)  # the others wait for what will not come
            raise
        sharder.agree(None)
        if not specs:
            return []
        rows, paths = None, list(self.config.graph_sets)
        if not self._model.has_own("postprocess_encoder_output"):
            rows = [sum(map(spec.tokens, paths)) for spec in specs]
        return sharder.gather(own, shares, self._graphs.empty(paths[0]), rows)

    def _mode(self) -> AbstractContextManager[Any]:
        return torch.inference_mode() if self._inference_mode else nullcontext()


def _copied(config: object) -> EncoderCudaGraphConfig:
    if not isinstance(config, EncoderCudaGraphConfig):
        method, found = "get_encoder_cudagraph_config", type(config).__name__
        raise EncoderError.returned(
            method=method, found=found, expected="an EncoderCudaGraphConfig"
        )
    return replace(config)
