"""cgcompile's ways to run a step."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import cgcompile
from cgcompile import AttentionCGSupport, BatchDescriptor, CUDAGraphMode, SplittingOp
from cgcompile.graphs.sequence import GraphSequence
from cgcompile.runtime.recording import Recording
from rivals.decoder import OP, arguments_of, attend, make_decoder
from rivals.timing import Call, floor_of
from rivals.variant import Captured, LeftOut, Setup, Variant

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
DIMS = {"tokens": {0: "tokens"}, "positions": {0: "tokens"}}


class Ours(Variant):
    """A compiled model.

    Args:
        setup: of the process.
        name: in tables.
        mode: of the forward context; None: there is none, and inputs are copied.
        direct: a replay calls the op's function, past the dispatcher.
        named: ``torch.compile(backend=...)``, guards and all; else without guards.
    """

    def __init__(
        self,
        setup: Setup,
        name: str,
        mode: CUDAGraphMode | None,
        *,
        direct: bool = False,
        named: bool = False,
    ) -> None:
        super().__init__(setup, name)
        self.mode, self.direct, self._named = mode, direct, named
        self.attention_calls = setup.dims.layers if mode is PIECEWISE and not direct else 0
        self.floor_name = "replay of its graph"
        if mode is PIECEWISE:
            self.floor_name = "bare loop, op's function" if direct else "bare loop, dispatcher"
        self.model: Callable[..., torch.Tensor]
        self.backend: cgcompile.Backend

    def splitting_op(self) -> SplittingOp:
        impl = attend if self.direct else None
        return SplittingOp(OP, support=AttentionCGSupport.ALWAYS, impl=impl)

    def config(self) -> cgcompile.CompilationConfig:
        return cgcompile.CompilationConfig(
            splitting_ops=(self.splitting_op(),),
            compiler=self.setup.compiler,
            capture_device="host" if self.setup.device == "cpu" else "auto",
        )

    def prepare(self) -> None:
        self.backend = cgcompile.Backend(self.config())
        own = self.setup.copy_of_model(self.name)
        if self._named:
            self.model = torch.compile(own, backend=self.backend, dynamic=True)
        else:
            self.model = cgcompile.compile(own, self.backend, dynamic_dims=DIMS, guards="none")
        self.plain_passes(lambda size: self._call(size, NONE)(), self.setup.sizes)

    def _call(self, size: int, mode: CUDAGraphMode | None, metadata: Any = None) -> Call:
        model, (tokens, positions) = self.model, self.setup.steps.views(size)
        if mode is None:
            return lambda: model(tokens, positions)
        descriptor = None if mode is NONE else BatchDescriptor(size)
        context = cgcompile.set_forward_context(
            metadata, cudagraph_runtime_mode=mode, batch_descriptor=descriptor
        )

        def run() -> torch.Tensor:
            with context:
                return model(tokens, positions)

        return run

    def step(self, batch: int) -> Call:
        return self._call(batch, self.mode)

    def capture(self, limit: float) -> Captured:
        capture = self.backend.capture(lambda size: self.step(size)(), self.setup.sizes)
        missing = tuple(f"{size}: {why}" for size, why in capture.missing)
        (first, *_) = self.recordings(self.setup.batches[0])
        graphs = first.sequence.num_graphs
        return Captured(len(capture.captured), capture.capture_seconds, graphs, missing)

    def recordings(self, batch: int) -> list[Recording]:
        return [
            recording
            for graph in self.backend.graphs
            for recording in graph.recordings
            if recording.batch.descriptor.num_tokens == batch
            and (self.mode is None or recording.batch.mode is self.mode)
        ]

    def floor(self, batch: int) -> Call | None:
        op = attend if self.direct else torch.ops.cgrival.attend.default
        for recording in self.recordings(batch):
            return floor_of(recording.sequence, op, arguments_of(self.step(batch)))
        return None

    def replays(self) -> int | None:
        return self.backend.counters.replays

    def why_not_replayed(self) -> str | None:
        plain = {reason.value for reason in self.backend.counters.plain} - {"warming", "mode_none"}
        return f"plain steps: {', '.join(sorted(plain))}" if plain else None


class WithoutGraphs(Variant):
    """The compiled pieces of another variant, stitched and not captured."""

    def __init__(self, setup: Setup, name: str, over: Ours) -> None:
        super().__init__(setup, name)
        self._over = over
        self.attention_calls = setup.dims.layers

    def step(self, batch: int) -> Call:
        return self._over._call(batch, NONE)


class Breakable(Variant):
    """The model as it is, or compiled by torch, in the breakable wrapper."""

    def __init__(self, setup: Setup, name: str, over: Variant) -> None:
        super().__init__(setup, name)
        self.attention_calls = setup.dims.layers
        self.floor_name = "bare loop, dispatcher"
        self._over: Any = over

    def prepare(self) -> None:
        setup = self.setup
        config = cgcompile.CompilationConfig(
            splitting_ops=(SplittingOp(OP, support=AttentionCGSupport.ALWAYS),),
            capture_device="host" if setup.device == "cpu" else "auto",
        )
        self.wrapper: Any = cgcompile.BreakableCUDAGraphWrapper(self._over.model, config)

    def step(self, batch: int) -> Call:
        wrapper, (tokens, positions) = self.wrapper, self.setup.steps.views(batch)
        context = cgcompile.set_forward_context(
            cudagraph_runtime_mode=PIECEWISE, batch_descriptor=BatchDescriptor(batch)
        )

        def run() -> torch.Tensor:
            with context:
                logits: torch.Tensor = wrapper(tokens, positions)
                return logits

        return run

    def capture(self, limit: float) -> Captured:
        sizes = self.setup.sizes
        capture = cgcompile.capture_all(lambda size: self.step(size)(), sizes, self.wrapper)
        missing = tuple(f"{size}: {why}" for size, why in capture.missing)
        graphs = self._sequence(self.setup.batches[0]).num_graphs
        return Captured(len(capture.captured), capture.capture_seconds, graphs, missing)

    def _sequence(self, batch: int) -> GraphSequence:
        sequence: GraphSequence = self.wrapper.concrete_cudagraph_entries[
            BatchDescriptor(batch)
        ].sequence
        return sequence

    def floor(self, batch: int) -> Call | None:
        op = torch.ops.cgrival.attend.default
        return floor_of(self._sequence(batch), op, arguments_of(self.step(batch)))

    def replays(self) -> int | None:
        replays: int = self.wrapper.counters.replays
        return replays


class Lean(Ours):
    """One kernel at each boundary: the cache is written in the pieces. CUDA with Triton only."""

    takes_no_op = False

    def __init__(
        self, setup: Setup, name: str, mode: CUDAGraphMode, small_batch: bool = False
    ) -> None:
        super().__init__(setup, name, mode, direct=True)
        self.small_batch = small_batch
        self.attention_calls = 0
        self.batches = setup.batches[:1]
        self._metadata: dict[int, Any] = {}  # FULL graphs hold its addresses

    def splitting_op(self) -> SplittingOp:
        from llm_engine.attention import splitting_op

        return splitting_op()

    def config(self) -> cgcompile.CompilationConfig:
        kernels = "auto,small_batch" if self.small_batch else "-small_batch"
        return replace(super().config(), kernels=kernels)

    def prepare(self) -> None:
        from llm_engine.attention import HAS_TRITON, library

        self.setup.need_cuda("the kernel of the lean decoder")
        if not HAS_TRITON:
            raise LeftOut("the kernel of the lean decoder needs triton")
        library()
        setup = self.setup
        rows = max(setup.sizes)
        lean = make_decoder(setup.dims, rows, setup.device, setup.dtype, lean=True)
        lean.load_state_dict(setup.model.state_dict())
        for own, other in zip(lean.layers, setup.model.layers, strict=True):
            own.k_cache, own.v_cache = other.k_cache, other.v_cache
        self.backend = cgcompile.Backend(self.config())
        self.model = cgcompile.compile(lean, self.backend, dynamic_dims=DIMS, guards="none")
        self.plain_passes(lambda size: self._call(size, NONE)(), setup.batches[:1])

    def _call(self, size: int, mode: CUDAGraphMode | None, metadata: Any = None) -> Call:
        from llm_engine.attention import PagedMetadata

        if size not in self._metadata:
            rows = torch.arange(size, dtype=torch.int32, device=self.setup.device)
            _, positions = self.setup.steps.views(size)
            # A row of the cache is one block.
            self._metadata[size] = PagedMetadata(rows[:, None].contiguous(), rows, positions)
        return super()._call(size, mode, self._metadata[size])

    def capture(self, limit: float) -> Captured:
        capture = self.backend.capture(lambda size: self.step(size)(), self.setup.batches[:1])
        graphs = 1 if self.mode is FULL else self.setup.dims.layers + 1
        missing = tuple(f"{size}: {why}" for size, why in capture.missing)
        return Captured(len(capture.captured), capture.capture_seconds, graphs, missing)

    def floor(self, batch: int) -> Call | None:
        if self.mode is not FULL:
            return None  # its op reads the forward context of a step
        (recording,) = self.recordings(batch)
        return floor_of(recording.sequence, attend)


def all_ours(setup: Setup, plain: Variant, compiled: Variant, few: bool) -> list[Variant]:
    """cgcompile's variants; ``few`` leaves out those of the entry points."""
    make = partial(Ours, setup)
    pieces = make("cgcompile piecewise", PIECEWISE)
    direct = make("cgcompile piecewise, op's function", PIECEWISE, direct=True)
    full = make("cgcompile FULL", FULL)
    variants: list[Variant] = [pieces, direct, full, Breakable(setup, "cgcompile breakable", plain)]
    if few:
        return variants
    return [
        *variants,
        Breakable(setup, "cgcompile breakable over torch.compile", compiled),
        make("cgcompile auto, guarded", None, named=True),
        make("cgcompile auto, guards none", None),
        WithoutGraphs(setup, "cgcompile without graphs", pieces),
        Lean(setup, "cgcompile lean piecewise", PIECEWISE),
        Lean(setup, "cgcompile lean FULL", FULL),
        Lean(setup, "cgcompile lean FULL, small batches", FULL, small_batch=True),
    ]
