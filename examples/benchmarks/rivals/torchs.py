"""torch's own ways to run a step, a graph by hand, and Meta's ``piecewise-cuda-graphs``."""

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import torch

from rivals.decoder import SWITCH, attend
from rivals.timing import Call, bare_loop, public_replay
from rivals.variant import Captured, LeftOut, Setup, Variant

META = "piecewise_cuda_graphs"


class Plain(Variant):
    """Without graphs of its own: the model as it is, or compiled by torch.

    Args:
        setup: of the process.
        name: in tables.
        settings: of ``torch.compile``; None: not compiled.
        only: the one batch it runs.
    """

    def __init__(
        self,
        setup: Setup,
        name: str,
        settings: dict[str, Any] | None = None,
        only: int | None = None,
    ) -> None:
        super().__init__(setup, name)
        self.attention_calls = setup.dims.layers
        self.is_eager = settings is None
        self.batches = None if only is None else (only,)
        self._settings = settings
        self.model: Callable[..., torch.Tensor] = setup.model

    def prepare(self) -> None:
        if self._settings is None:
            return
        backend = {"backend": "eager"} if self.setup.compiler == "eager" else {}
        own = self.setup.copy_of_model(self.name)
        self.model = torch.compile(own, **backend, **self._settings)  # type: ignore[call-overload]
        self.plain_passes(lambda size: self.step(size)(), self.batches or self.setup.sizes)

    def step(self, batch: int) -> Call:
        model, (tokens, positions) = self.model, self.setup.steps.views(batch)
        return lambda: model(tokens, positions)


class ReduceOverhead(Plain):
    """``torch.compile(mode="reduce-overhead")``: torch's CUDA graph trees."""

    floor_name = "replay of the graph by hand"
    can_wait = True  # it takes as long as all of cgcompile's together, and no goal needs it

    def __init__(self, setup: Setup, name: str, hand: "HandGraph") -> None:
        super().__init__(setup, name, {"mode": "reduce-overhead", "dynamic": True})
        self.attention_calls = 0
        self._hand = hand

    def prepare(self) -> None:
        self.setup.need_cuda("reduce-overhead")
        super().prepare()

    def capture(self, limit: float) -> Captured:
        """Each size twice: the first call of two has warmed up, the second records."""
        start = time.perf_counter()
        for size in reversed(self.setup.sizes):
            for _ in range(2):
                self.step(size)()
        torch.cuda.synchronize()
        return Captured(len(self.setup.sizes), time.perf_counter() - start, 1)

    def step(self, batch: int) -> Call:
        model, (tokens, positions) = self.model, self.setup.steps.views(batch)
        begin = torch.compiler.cudagraph_mark_step_begin

        def run() -> torch.Tensor:
            begin()
            return model(tokens, positions)

        return run

    def floor(self, batch: int) -> Call | None:
        return self._hand.floor(batch)

    def why_not_replayed(self) -> str | None:
        skips = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
        return f"{skips} graphs were skipped" if skips else None


class HandGraph(Variant):
    """One ``torch.cuda.CUDAGraph`` for each batch around a compiled model, in one pool."""

    floor_name = "its own replay"

    def __init__(self, setup: Setup, name: str, over: Plain) -> None:
        super().__init__(setup, name)
        self._over = over
        self.batches = over.batches
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def prepare(self) -> None:
        self.setup.need_cuda("a graph by hand")

    def capture(self, limit: float) -> Captured:
        sizes = tuple(self.batches or self.setup.sizes)
        pool = torch.cuda.graph_pool_handle()
        start = time.perf_counter()
        for size in reversed(sizes):
            graph, call = torch.cuda.CUDAGraph(), self._over.step(size)
            with torch.cuda.graph(graph, pool=pool):
                out = call()
            self._graphs[size] = (graph, out)
        return Captured(len(sizes), time.perf_counter() - start, 1)

    def step(self, batch: int) -> Call:
        graph, out = self._graphs[batch]

        def run() -> torch.Tensor:
            graph.replay()
            return out

        return run

    def floor(self, batch: int) -> Call | None:
        entry = self._graphs.get(batch)
        return None if entry is None else public_replay(entry[0])


class GraphedCallables(Variant):
    """``torch.cuda.make_graphed_callables`` over a compiled model."""

    floor_name = "replay of the graph by hand"

    def __init__(self, setup: Setup, name: str, over: Plain, hand: HandGraph) -> None:
        super().__init__(setup, name)
        self._over, self._hand = over, hand
        self._graphed: dict[int, Callable[..., torch.Tensor]] = {}

    def prepare(self) -> None:
        self.setup.need_cuda("make_graphed_callables")

    def capture(self, limit: float) -> Captured:
        """All in one call, so that they share a pool; its warm-up is part of the time."""
        sizes = tuple(reversed(self.setup.sizes))
        model = self._over.model
        calls = tuple((lambda tokens, at: model(tokens, at)) for _ in sizes)
        inputs = tuple(self.setup.steps.views(size) for size in sizes)
        start = time.perf_counter()
        graphed = torch.cuda.make_graphed_callables(calls, inputs)
        self._graphed = dict(zip(sizes, graphed, strict=True))  # type: ignore[arg-type]
        return Captured(len(sizes), time.perf_counter() - start, 1)

    def step(self, batch: int) -> Call:
        call, (tokens, positions) = self._graphed[batch], self.setup.steps.views(batch)
        return lambda: call(tokens, positions)

    def floor(self, batch: int) -> Call | None:
        return self._hand.floor(batch)


class MetaPieces(Variant):
    """``piecewise_cuda_graphs``: one sequence for each batch, attention decorated ``no_graph``."""

    floor_name = "bare loop, op's function"

    def __init__(self, setup: Setup, name: str, over: Plain) -> None:
        super().__init__(setup, name)
        self._over = over
        self._recorded: dict[int, tuple[Any, torch.Tensor]] = {}

    def prepare(self) -> None:
        if importlib.util.find_spec(META) is None:
            raise LeftOut("not installed: pip install piecewise-cuda-graphs")
        self.setup.need_cuda("piecewise-cuda-graphs")

    def capture(self, limit: float) -> Captured:
        from piecewise_cuda_graphs import CUDAGraphSequence, no_graph, piecewise_graph

        order = sorted(self.setup.sizes, key=lambda size: (size in self.setup.batches, size))
        pool = torch.cuda.graph_pool_handle()
        start = time.perf_counter()
        SWITCH.through = no_graph(attend)
        try:
            for size in reversed(order):
                if size not in self.setup.batches and time.perf_counter() - start > limit:
                    break
                sequence, call = CUDAGraphSequence(pool=pool), self._over.step(size)
                with piecewise_graph(sequence):
                    out = call()
                self._recorded[size] = (sequence, out)
        finally:
            SWITCH.through = attend
        seconds = time.perf_counter() - start
        missing = tuple(f"{size}: no time left" for size in order if size not in self._recorded)
        graphs = self.setup.dims.layers + 1
        return Captured(len(self._recorded), seconds, graphs, missing)

    def step(self, batch: int) -> Call:
        sequence, out = self._recorded[batch]

        def run() -> torch.Tensor:
            sequence.replay()
            return out

        return run

    def floor(self, batch: int) -> Call | None:
        if batch not in self._recorded:
            return None
        segments = self._recorded[batch][0]._segments
        return bare_loop(
            [
                (segment.replay, ())
                if isinstance(segment, torch.cuda.CUDAGraph)
                else (segment.fn, segment.args)
                for segment in segments
            ]
        )

    def why_not_replayed(self) -> str | None:
        counts = {
            sum(isinstance(each, torch.cuda.CUDAGraph) for each in sequence._segments)
            for sequence, _ in self._recorded.values()
        }
        expected = {self.setup.dims.layers + 1}
        return None if counts == expected else f"{counts} graphs a step, not {expected}"
