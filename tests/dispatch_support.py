"""A dispatcher by brute force: every planned graph is asked whether it serves the batch."""

from dataclasses import dataclass
from typing import Any

from cgcompile import AttentionCGSupport, BatchDescriptor, CUDAGraphMode
from cgcompile.serving.dispatcher import CudagraphDispatcher, Dispatched
from cgcompile.serving.plan import LoraCases

Mode = CUDAGraphMode
ALWAYS = AttentionCGSupport.ALWAYS
SIZES = (1, 2, 4, 8, 16)

EVERY_MODE = tuple(Mode)


@dataclass(frozen=True)
class Batch:
    """What a caller says of a batch, as ``dispatch`` takes it."""

    num_tokens: int
    num_reqs: int | None = None
    max_query_len: int | None = None
    uniform_decode: bool = False
    has_lora: bool = False
    num_active_loras: int = 0

    def through(self, dispatcher: CudagraphDispatcher, **more: Any) -> Dispatched:
        return dispatcher.dispatch(**vars(self), **more)


def decode(num_reqs: int, query_len: int = 1, **more: Any) -> Batch:
    return Batch(num_reqs * query_len, num_reqs, query_len, True, **more)


def dispatcher(mode: Mode = Mode.FULL_AND_PIECEWISE, sizes=SIZES, **more: Any):
    settings = {"max_num_reqs": 8, "support": ALWAYS, **more}
    return CudagraphDispatcher(mode, sizes, **settings)


def short(found: Dispatched) -> str:
    """``FULL(8t,8r,u1)``: 8 tokens, 8 requests, uniform of length 1."""
    key = found.descriptor
    words = [f"{key.num_tokens}t"]
    words += [f"{key.num_reqs}r"] if key.num_reqs is not None else []
    words += [f"u{key.query_len}"] if key.uniform else []
    words += [f"<={key.max_query_len}"] if key.max_query_len is not None else []
    words += [f"L{key.num_active_loras}"] if key.has_lora else []
    words += [str(key.extra)] if key.extra else []
    name = "PW" if found.mode is Mode.PIECEWISE else found.mode.name
    return f"{name}({','.join(words)})" + (f" {found.why.reason.value}" if found.why else "")


def lora_count(lora: LoraCases, batch: Batch) -> int | None:
    """The smallest captured number of adapters that is enough; 0 is 'without LoRA'."""
    if not batch.has_lora:
        return 0 if lora.without else min(lora.counts)
    wanted = batch.num_active_loras or max(lora.counts, default=0)
    return min((count for count in lora.counts if count >= wanted), default=None)


def serves(mode: Mode, key: BatchDescriptor, batch: Batch, count: int | None) -> bool:
    if (key.num_active_loras, key.has_lora) != (count, bool(count)):
        return False
    if key.num_tokens < batch.num_tokens:
        return False
    if mode is Mode.PIECEWISE:
        return True
    reqs, longest = batch.num_reqs, batch.max_query_len
    if batch.uniform_decode and longest is None:
        longest = batch.num_tokens // reqs
    if key.uniform:
        return batch.uniform_decode and key.query_len == longest and key.num_reqs >= reqs
    if reqs is not None and key.num_reqs < reqs:
        return False
    return key.max_query_len is None or (longest is not None and longest <= key.max_query_len)


def reference(dispatcher: CudagraphDispatcher, lora: LoraCases, batch: Batch, ready, allowed):
    """Mode and descriptor by search: the smallest ready one that serves, FULL before PIECEWISE."""
    count = lora_count(lora, batch)
    for mode in (Mode.FULL, Mode.PIECEWISE):
        found = [
            key
            for planned, key in dispatcher.plan()
            if planned is mode and batch.num_tokens and serves(mode, key, batch, count)
        ]
        found.sort(key=lambda key: (key.num_tokens, not key.uniform, key.max_query_len or 0))
        usable = [key for key in found if ready(mode, key)]
        if usable and mode in allowed:
            return mode, usable[0]
    return Mode.NONE, BatchDescriptor(batch.num_tokens)
