"""A model with its manager, and how the work of a step becomes a batch.

Usable without the scheduler: :func:`decode_batch` makes a decode step of any size at any context
length, for measurements.
"""

import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import cgcompile
from cgcompile import AttentionCGSupport, BatchDescriptor, CUDAGraphMode, CUDAGraphWrapper
from cgcompile.reasons import Reason
from cgcompile.serving import (
    Agreement,
    Batch,
    CudagraphDispatcher,
    CudaGraphManager,
    Dispatched,
    InputBuffer,
    Metadata,
    capture_sizes,
    decode_sizes,
    is_uniform_decode,
)
from llm_engine.attention import PagedMetadata, splitting_op
from llm_engine.epilogues import Choices, DraftLoop
from llm_engine.model import Llama
from llm_engine.scheduler import NULL_BLOCK, Work

FINE_SIZES = 256
SUPPORT = AttentionCGSupport.ALWAYS  # of the attention op: any batch may be one FULL graph
MODES = ("NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "FULL", "breakable")


@dataclass(frozen=True)
class Limits:
    """Of a step.

    Attributes:
        num_reqs: the most requests.
        num_tokens: the most tokens.
        blocks_per_req: the width of block tables.
        sizes: capture sizes in tokens; empty: see :func:`ladder`.
    """

    num_reqs: int
    num_tokens: int
    blocks_per_req: int
    sizes: tuple[int, ...] = ()


def input_buffers(limits: Limits) -> tuple[InputBuffer, ...]:
    """What a step reads. Padded tokens write to the null block, and see nothing."""
    return (
        InputBuffer("input_ids", ("tokens",), torch.int64, 0, host_slots=2),
        InputBuffer("positions", ("tokens",), torch.int64, 0, host_slots=2),
        InputBuffer("slot_mapping", ("tokens",), torch.int64, 0, host_slots=2),
        InputBuffer("token_to_req", ("tokens",), torch.int32, -1, argument=False, host_slots=2),
        InputBuffer(
            "block_tables",
            ("reqs", limits.blocks_per_req),
            torch.int32,
            NULL_BLOCK,
            argument=False,
            host_slots=2,
        ),
    )


def sampled_rows(query_len: int) -> InputBuffer:
    """Which rows of a step are sampled: so many of each request."""
    shape = ("reqs", query_len)
    return InputBuffer("sampled", shape, torch.int64, 0, argument=False, host_slots=2)


def paged_metadata(batch: Batch, descriptor: BatchDescriptor, buffers: dict[str, Any]) -> Metadata:
    """Views of buffers that stay: a FULL graph goes on reading those of its capture."""
    names = ("block_tables", "token_to_req", "positions")
    return Metadata(PagedMetadata(*(buffers[name] for name in names)))


def ladder(most: int) -> tuple[int, ...]:
    """Capture sizes: the usual ones, then coarse: chunks of prompts fill the budget or are few."""
    coarse = range(2 * FINE_SIZES, most, FINE_SIZES)
    return (*capture_sizes(min(most, FINE_SIZES)), *coarse, *([most] if most > FINE_SIZES else []))


def graph_mode(mode: str) -> CUDAGraphMode:
    return CUDAGraphMode["FULL_AND_PIECEWISE" if mode == "breakable" else mode]


def configuration(device: str, compiler: str) -> cgcompile.CompilationConfig:
    """Of the compiled model as of the managers."""
    return cgcompile.CompilationConfig(
        splitting_ops=(splitting_op(),),
        capture_device="host" if torch.device(device).type == "cpu" else "auto",
        compiler=compiler,
    )


@dataclass
class Tally:
    """What the steps of one model were.

    Attributes:
        modes: steps by runtime mode.
        uniform: steps of uniform decode, but for those in which another rank took a lesser mode.
        uniform_full: those of them that ran as one FULL graph.
        decode_sizes: steps of uniform decode by number of requests.
    """

    modes: Counter[str] = field(default_factory=Counter)
    uniform: int = 0
    uniform_full: int = 0
    decode_sizes: Counter[int] = field(default_factory=Counter)

    @property
    def steps(self) -> int:
        return sum(self.modes.values())

    def add(self, batch: Batch | None, chosen: Dispatched) -> None:
        self.modes[chosen.mode.name] += 1
        limited = chosen.why is not None and chosen.why.reason is Reason.OTHER_RANK
        if batch is not None and batch.uniform_decode and not limited:
            self.uniform += 1
            self.uniform_full += chosen.mode is CUDAGraphMode.FULL
            self.decode_sizes[batch.num_reqs] += 1


class Runner:
    """A model, its compiled form and, one after the other, the managers of several modes.

    Args:
        model: on its device, with its caches.
        config: of the compiled model and of the managers.
        limits: of a step.
        agree: makes the agreement of ranks about the graphs of a dispatcher; None without ranks.
        compiled: ``model``, compiled for another runner.

    Attributes:
        manager: of the present mode; see :meth:`start`.
        sampled: how many rows of each request a step samples.
        tally: of the steps since then.
        start_seconds: that compiling and capturing took.
        graph_bytes: device memory that capturing took; 0 on the CPU.
    """

    manager: CudaGraphManager
    _counted: CudaGraphManager | CUDAGraphWrapper

    def __init__(
        self,
        model: Llama,
        config: cgcompile.CompilationConfig,
        limits: Limits,
        agree: Callable[[CudagraphDispatcher], Agreement] | None = None,
        compiled: Any = None,
    ) -> None:
        self.model = model
        self.agree = agree
        self.config = config
        self.limits = limits
        self.tally = Tally()
        self.start_seconds = 0.0
        self._replays = 0
        self.graph_bytes = 0
        self.device = model.embed.weight.device
        if compiled is None:
            compiled = torch.compile(model, backend=cgcompile.Backend(config), dynamic=True)
        self.compiled = compiled
        self.sampled = 0

    def start(
        self, mode: str, query_lens: Sequence[int], *, sampled: int = 0, drafts: int = 0
    ) -> None:
        """Make the manager of a mode, compile whatever is not yet compiled, and capture.

        Args:
            mode: one of ``MODES``.
            query_lens: tokens of each request in uniform decode.
            sampled: how many rows of each request a step samples, and verifies as drafts.
            drafts: how many tokens a step of decode drafts, in one FULL graph in all modes with
                graphs.
        """
        begin = time.perf_counter()
        limits, counts = self.limits, capture_sizes(self.limits.num_reqs)
        step = self.model if mode == "breakable" else self.compiled
        wanted = graph_mode(mode)
        if drafts and wanted is not CUDAGraphMode.NONE:
            wanted = CUDAGraphMode.FULL_DECODE_ONLY
        self.sampled = sampled
        epilogue = DraftLoop(self.model, step, drafts) if drafts else None
        dispatcher = CudagraphDispatcher(
            wanted,
            limits.sizes or ladder(limits.num_tokens),
            max_num_reqs=limits.num_reqs,
            max_num_tokens=limits.num_tokens,
            query_lens={
                length: decode_sizes(counts, length, limits.num_reqs, limits.num_tokens)
                for length in query_lens
            },
            support=SUPPORT,
        )
        self.manager = CudaGraphManager(
            step,
            dispatcher if self.agree is None else self.agree(dispatcher),
            (*input_buffers(limits), *([sampled_rows(sampled)] if sampled else [])),
            device=self.device,
            metadata=paged_metadata,
            epilogue=Choices(self.model) if sampled else epilogue,
            outputs="reqs" if sampled or drafts else "tokens",
            config=self.config,
        )
        # One token has a compiled graph of its own.
        for size in (limits.num_tokens, min(2, limits.num_tokens), 1):
            padded = BatchDescriptor(size, size, True) if drafts else BatchDescriptor(size)
            dummy = self.manager.dummy_batch(padded, "warmup")
            self.manager.run(dummy, valid_modes=())
        before = self._free_bytes()
        self.manager.capture()
        self.graph_bytes = before - self._free_bytes()
        # A round is one graph; the handle counts the steps of prompts, too.
        self._counted = self.manager.wrappers[0] if drafts else self.manager
        self.reset()
        self.start_seconds = time.perf_counter() - begin

    def reset(self) -> None:
        """Forget the steps so far, and what is in the caches."""
        self.manager.statistics.clear()
        self.tally, self._replays = Tally(), self._counted.counters.replays
        self.model.forget()

    def _free_bytes(self) -> int:
        if self.device.type != "cuda":
            return 0
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    def stop(self) -> None:
        """Give the memory of the graphs back."""
        self.manager.release()

    def run(self, batch: Batch) -> Any:
        """What the epilogue returns, or hidden states [T, hidden]; valid until the next step."""
        result = self.manager.run(batch)
        agreement = self.manager.agreement
        if agreement is None or agreement.agreed is None:
            self.tally.add(batch, self.manager.dispatched(batch))
        else:
            self.tally.add(batch, agreement.agreed.dispatched)
        return result

    def run_idle(self) -> bool:
        """Run padding while other ranks have requests; False if all are done."""
        agreement = self.manager.agreement
        if agreement is None:
            return False
        self.manager.run(None)
        if agreement.agreed is None or not agreement.agreed.has_work:
            return False
        self.tally.add(None, agreement.agreed.dispatched)
        return True

    @property
    def replays(self) -> int:
        """Of graphs, since :meth:`start`."""
        return self._counted.counters.replays - self._replays

    def batch(self, work: Sequence[Work], drafts: torch.Tensor | None = None) -> Batch:
        """The batch of a step's work, on the host but for ``drafts``.

        Args:
            work: decoding first.
            drafts: [R, 1 + k] int64: the newest token of each request that decodes, and its drafts;
                None: all tokens of the work are known.
        """
        known = [item for item in work if item.prefill or drafts is None]
        ids = [item.request.tokens[item.start : item.start + item.count] for item in known]
        tokens = torch.tensor([token for part in ids for token in part], dtype=torch.int64)
        if drafts is not None:
            tokens = torch.cat((drafts.flatten(), tokens.to(drafts.device, non_blocking=True)))
        starts, counts = [item.start for item in work], [item.count for item in work]
        rows = [item.request.table.row for item in work]
        prefill = [item.prefill for item in work]
        batch = paged_batch(tokens, starts, counts, rows, prefill, self.model.block_size)
        if not self.sampled:
            return batch
        return replace(batch, inputs={**batch.inputs, "sampled": self._sampled(work)})

    def _sampled(self, work: Sequence[Work]) -> torch.Tensor:
        """The rows of each request's newest token and of its drafts; of a prompt the last row."""
        counts = torch.tensor([item.count for item in work])
        decoding = torch.tensor([not item.prefill for item in work])
        ends = counts.cumsum(0)
        first = torch.where(decoding, ends - counts, ends - 1)
        return first[:, None] + torch.arange(self.sampled) * decoding[:, None]


def paged_batch(
    ids: torch.Tensor,
    starts: Sequence[int],
    counts: Sequence[int],
    rows: "Sequence[array[int]]",
    prefill: Sequence[bool],
    block_size: int,
) -> Batch:
    """A batch from numbers.

    Args:
        ids: int64 of all tokens, request after request; on the host or on the device.
        starts: each request's first position in this step.
        counts: its tokens in this step.
        rows: its row of the block table.
        prefill: whether it works on its prompt.
        block_size: tokens in a block.
    """
    # Tensors, not loops: at some hundred requests the host would be slower than the device.
    count = torch.tensor(counts)
    owner = torch.repeat_interleave(count)
    shift = torch.tensor(starts) - (count.cumsum(0) - count)
    positions = torch.arange(len(owner)) + shift[owner]
    tables = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.int32).view(len(rows), -1)
    slots = tables[owner, positions // block_size].long() * block_size + positions % block_size
    return Batch(
        len(owner),
        len(counts),
        {
            "input_ids": ids,
            "positions": positions,
            "slot_mapping": slots,
            "token_to_req": owner.int(),
            "block_tables": tables,
        },
        max_query_len=max(counts),
        uniform_decode=is_uniform_decode(counts, prefill),
    )


def round_batch(begin: torch.Tensor, rows: "Sequence[array[int]]") -> Batch:
    """The batch of a round of drafts.

    Args:
        begin: [R, 3] int64 on the device: the newest token of each request, its position and slot.
        rows: the row of each request in the block table.
    """
    count = len(rows)
    tables = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.int32).view(count, -1)
    tokens, positions, slots = begin.unbind(1)
    inputs = {"input_ids": tokens, "positions": positions, "slot_mapping": slots}
    inputs |= {"token_to_req": torch.arange(count, dtype=torch.int32), "block_tables": tables}
    return Batch(count, count, inputs, max_query_len=1, uniform_decode=True)


def decode_batch(
    num_reqs: int, length: int, block_size: int, width: int, *, query_len: int = 1
) -> Batch:
    """A decode step of requests that have ``length`` tokens each, those of the step included.

    Each has blocks of its own, from 1 on, as scattered as in a used cache; the cache needs ``1 +
    num_reqs * ceil(length / block_size)`` of them.

    Args:
        num_reqs: requests.
        length: tokens of each.
        block_size: tokens in a block.
        width: of block tables.
        query_len: tokens of each in this step.
    """
    num_blocks = -(-length // block_size)
    order = torch.randperm(num_reqs * num_blocks, generator=torch.Generator().manual_seed(0)) + 1
    rest = [NULL_BLOCK] * (width - num_blocks)
    rows = [array("i", [*blocks, *rest]) for blocks in order.view(num_reqs, num_blocks).tolist()]
    ids = torch.arange(num_reqs * query_len) % 7 + 1
    starts, counts = [length - query_len] * num_reqs, [query_len] * num_reqs
    return paged_batch(ids, starts, counts, rows, [False] * num_reqs, block_size)
