"""A small decoder whose attention reads metadata, and an engine's part of a step."""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn

import cgcompile
from cgcompile import AttentionCGSupport, SplittingOp, get_forward_context, set_forward_context
from cgcompile.config import CUDAGraphMode
from cgcompile.debug.subject import original_of
from cgcompile.serving.batch import Batch, Metadata
from cgcompile.serving.buffers import InputBuffer
from cgcompile.serving.dispatcher import CudagraphDispatcher
from cgcompile.serving.manager import CudaGraphManager
from cgcompile.serving.ranks import Agreement

D, VOCABULARY, MAX_REQS = 8, 32, 8
SIZES = (1, 2, 4, 8, 16)
PIECEWISE, FULL, NONE = CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL, CUDAGraphMode.NONE


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    """Attention of each request to itself; where requests begin, the metadata says."""
    starts = get_forward_context().attn_metadata
    rows = torch.arange(q.shape[0], device=q.device, dtype=starts.dtype)
    owner = torch.searchsorted(starts[1:], rows, right=True)
    other = owner[:, None] != owner[None, :]
    scores = (q @ k.T).masked_fill(other, float("-inf"))
    padding = rows >= starts[-1]  # which a kernel of paged attention never reads
    out.copy_(scores.softmax(-1) @ v.masked_fill(padding[:, None], 0.0))


@cache
def library() -> torch.library.Library:
    fragment = torch.library.Library("cgserve", "FRAGMENT")
    fragment.define("attend(Tensor q, Tensor k, Tensor v, Tensor(a!) out) -> ()")
    for key in ("CPU", "CUDA"):
        fragment.impl("attend", attend, key)
    torch.library.register_fake("cgserve::attend", lambda q, k, v, out: None, lib=fragment)
    return fragment


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        library()  # the op
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        attended = torch.empty_like(q)
        torch.ops.cgserve.attend(q, k, v, attended)
        return x + self.out(attended)


class Decoder(nn.Module):
    """Returns hidden states [n, D]; with ``aux``, and a list of those after the first layer."""

    def __init__(self, aux: bool = False) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, D), nn.Embedding(64, D)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.aux = aux

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
    ) -> Any:
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        x = x + self.places(positions)
        first = self.layers[0](x)
        last = self.layers[1](first)
        return (last, [first]) if self.aux else last


class Picky(Decoder):
    """A batch of some sizes reads the device, so that it cannot be captured."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.sizes = sizes

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(input_ids, positions)
        if input_ids.shape[0] not in self.sizes:
            return hidden
        return hidden * float(hidden.mean() * 0 + 1)


INPUTS = (
    InputBuffer("input_ids", ("tokens",), torch.int64, 0),
    InputBuffer("positions", ("tokens",), torch.int64, 0),
    InputBuffer("query_start_loc", ("reqs+1",), torch.int32, None, argument=False),
)

EMBEDS = InputBuffer("inputs_embeds", ("tokens", D), torch.float32, float("nan"), optional=True)


def metadata(batch: Batch, descriptor: Any, buffers: dict[str, Any]) -> Metadata:
    return Metadata(buffers["query_start_loc"])


def requests(*lengths: int, device: str = "cpu", decode: bool = False, **more: Any) -> Batch:
    """A batch of requests with so many tokens each, of random content."""
    count = sum(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    inputs = {
        "input_ids": torch.randint(1, VOCABULARY, (count,), device=device),
        "positions": torch.randint(1, 64, (count,), device=device),
        "query_start_loc": starts.to(device),
    }
    return Batch(count, len(lengths), inputs, max(lengths), decode, **more)


def with_inputs(batch: Batch, **inputs: torch.Tensor | None) -> Batch:
    return replace(batch, inputs={**batch.inputs, **inputs})


def eager(model: Any, batch: Batch) -> Any:
    """The step without padding and without graphs."""
    arguments = {k: v for k, v in batch.inputs.items() if k != "query_start_loc"}
    starts = batch.inputs["query_start_loc"]
    with torch.inference_mode(), set_forward_context(starts):
        return model(**arguments)


def dispatcher(mode: str, **more: Any) -> CudagraphDispatcher:
    settings = {
        "max_num_reqs": MAX_REQS,
        "max_num_tokens": 64,
        "support": AttentionCGSupport.ALWAYS,
        **more,
    }
    return CudagraphDispatcher(CUDAGraphMode[mode], SIZES, **settings)


def manager(
    mode: str = "FULL_AND_PIECEWISE",
    kind: str = "plain",
    device: str = "cpu",
    *,
    model: nn.Module | None = None,
    dispatch: CudagraphDispatcher | Agreement | None = None,
    on_fallback: str = "warn",
    checks: Any = True,
    on_input_change: str = "raise",
    wrapped: Any = None,
    lazily: bool = False,
    inference_mode: bool = True,
    **more: Any,
) -> CudaGraphManager:
    """A manager of a model that is plain (not compiled) or compiled; ``wrapped`` makes a callable."""
    library()
    torch.manual_seed(1)
    module = (Decoder() if model is None else model).to(device).eval()
    op = SplittingOp("cgserve::attend", support=AttentionCGSupport.ALWAYS)
    config = cgcompile.CompilationConfig(
        splitting_ops=(op,),
        capture_device="host" if device == "cpu" else "auto",
        compiler="eager",
        on_fallback=on_fallback,
        checks=checks,
        on_input_change=on_input_change,
    )
    called: Any = module
    if kind == "compiled":
        called = torch.compile(module, backend=cgcompile.Backend(config), dynamic=True)
    if wrapped is not None:
        called = wrapped(called)
    settings = {"inputs": INPUTS, "metadata": metadata, **more}
    graph_manager = CudaGraphManager(
        called, dispatch or dispatcher(mode), device=device, config=config, **settings
    )
    if lazily:
        graph_manager.dispatcher.only_captured = False
    if not inference_mode:
        graph_manager.allow_gradients()
    return graph_manager


def inner(graph_manager: CudaGraphManager) -> Any:
    """The module of a manager, compiled or not."""
    return original_of(graph_manager.model)


def check(graph_manager: CudaGraphManager, batch: Batch, **restrictions: Any) -> Any:
    """Run one step, which must equal eager; attention sums over padded rows in another order."""
    result = graph_manager.run(batch, **restrictions)
    torch.testing.assert_close(result, eager(inner(graph_manager), batch), rtol=1e-5, atol=1e-5)
    return result
