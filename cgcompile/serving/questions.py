"""What a user may ask a manager: :class:`Questions`, answered by the dispatcher and the meters."""

from typing import Any

from cgcompile.config import CompilationConfig
from cgcompile.descriptors import BatchDescriptor
from cgcompile.errors import DispatchError
from cgcompile.graphs.bulk import BulkCapture
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.modes import CUDAGraphMode
from cgcompile.reasons import EXPECTED, Counters
from cgcompile.serving.batches import check_numbers
from cgcompile.serving.captured import CapturedGraphs
from cgcompile.serving.dispatcher import CudagraphDispatcher
from cgcompile.serving.memory import GraphMemory, MemoryMeter
from cgcompile.serving.sizes import padding_table
from cgcompile.serving.stepping import StepRunner
from cgcompile.serving.steps import Batch
from cgcompile.serving.tables import Dispatched
from cgcompile.settings import require_kind, require_whole

NONE = CUDAGraphMode.NONE


def _is_decode(descriptor: BatchDescriptor) -> bool:
    return descriptor.uniform or descriptor.max_query_len is not None


class Questions:
    """The part of a manager that only looks things up; ranks have not agreed on it.

    Attributes:
        dispatcher: which graphs there are to be, and which of them serves a batch.
        meter: measures what graphs take.
    """

    dispatcher: CudagraphDispatcher
    meter: MemoryMeter
    _config: CompilationConfig
    _graphs: CapturedGraphs
    _steps: StepRunner

    @property
    def bulk(self) -> dict[str, BulkCapture]:
        """How each set of captures went, by its title."""
        return dict(self._graphs.bulk)

    @property
    def counters(self) -> Counters:
        """What steps with graphs did, FULL ones and others."""
        return self._steps.counters

    @property
    def wrappers(self) -> tuple[CUDAGraphWrapper, ...]:
        """Who records steps that the model's own handle does not."""
        return self._steps.wrappers

    @property
    def pool(self) -> GraphPool | None:
        """The memory of FULL graphs, and of pieces of a model that is not compiled.

        None where nothing can be captured: in mode NONE, and without a device that has graphs.
        """
        return self._steps.pool

    @property
    def cudagraph_sizes(self) -> dict[int, int]:
        """Number of tokens -> planned size of the graph for any batch; empty if only decode has."""
        plan = self.dispatcher.plan()
        mode = self.dispatcher.mode.mixed_mode()
        found = {each.num_tokens for m, each in plan if m is mode and not _is_decode(each)}
        return padding_table(sorted(found))

    @property
    def uniform_decode_cudagraph_sizes(self) -> dict[int, int]:
        """Number of tokens -> planned size of the graph for uniform decode; empty without any.

        Of several query lengths it is the map of the longest, which is ``1 + draft tokens``.
        """
        uniform = [each for _, each in self.dispatcher.plan() if each.uniform]
        longest = max((each.query_len or 0 for each in uniform), default=0)
        sizes = sorted({each.num_tokens for each in uniform if each.query_len == longest})
        return {n: size for n, size in padding_table(sizes).items() if n >= longest}

    @property
    def output_buffers(self) -> Any:
        """The whole buffers that FULL graphs write, structured as results; None before any."""
        return self._steps.outputs.whole

    def graph_memory(self) -> GraphMemory:
        """What the graphs take of the device now, in bytes, measured."""
        return self.meter.memory()

    def needs_capture(self) -> bool:
        """Whether any graph is planned."""
        return bool(self.dispatcher.plan())

    def get_cudagraph_size(
        self,
        num_tokens: int,
        uniform_decode: bool = False,
        *,
        has_lora: bool = False,
        num_active_loras: int = 0,
        extra: tuple[Any, ...] = (),
    ) -> int | None:
        """The padded size of the graph for so many tokens, captured or planned; None if none is.

        Adapters and axes are given as to the dispatcher.
        """
        return self.dispatcher.planned_size(
            num_tokens, uniform_decode, has_lora, num_active_loras, extra
        )

    def get_cudagraph_runtime_mode(
        self,
        num_reqs: int,
        num_tokens: int,
        max_query_len: int,
        *,
        has_lora: bool = False,
        num_active_loras: int = 0,
        extra: tuple[Any, ...] = (),
    ) -> tuple[CUDAGraphMode, int | None]:
        """(runtime mode, padded size) of a batch; (NONE, None) where no graph serves it.

        Uniform decode is what has ``max_query_len`` tokens a request, a length that the dispatcher
        has. Prompts of equal length look the same: who knows better asks :meth:`dispatched`.
        Adapters and axes are given as to the dispatcher.
        """
        if not (type(num_tokens) is type(num_reqs) is type(max_query_len) is int):
            for name, value in (("num_reqs", num_reqs), ("max_query_len", max_query_len)):
                require_whole(name, "get_cudagraph_runtime_mode", value, 0, 2**63 - 1)
            check_numbers(num_tokens, num_reqs, max_query_len)
        uniform = num_tokens == max_query_len * num_reqs
        uniform &= max_query_len in self.dispatcher.query_lens
        variant = has_lora, num_active_loras, extra
        found = self.dispatcher.dispatch(num_tokens, num_reqs, max_query_len, uniform, *variant)
        return (NONE, None) if found.mode is NONE else (found.mode, found.descriptor.num_tokens)

    def dispatched(self, batch: Batch, **restrictions: Any) -> Dispatched:
        """What a batch would run as; see :meth:`run`."""
        if type(batch) is not Batch:
            require_kind("batch", "dispatched", batch, Batch)
        return self.dispatcher.dispatch(**batch.numbers(), **restrictions)

    def _allowed(self, batch: Batch, restrictions: dict[str, Any]) -> Dispatched:
        """As :meth:`dispatched`; with ``strict`` an error where no graph serves the batch."""
        chosen = self.dispatched(batch, **restrictions)
        why = chosen.why
        if self._config.strict and chosen.mode is NONE and why and why.reason not in EXPECTED:
            what = f"a batch of {batch.num_tokens} tokens"
            raise DispatchError.strict(what=what, reason=why.reason.value, detail=why.detail)
        return chosen
