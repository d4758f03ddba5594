"""Processes of one group, and a decoder whose layers are split over ranks."""

import datetime
import faulthandler
import fcntl
import gc
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

import cgcompile
from cgcompile import AttentionCGSupport, SplittingOp, get_forward_context
from cgcompile.graphs.device import destroy_unused_graphs
from cgcompile.serving.batch import Batch
from cgcompile.serving.errors import AgreementError
from cgcompile.serving.manager import CudaGraphManager
from cgcompile.serving.ranks import Agreement
from lib.manager import INPUTS, VOCABULARY, dispatcher, eager, metadata, requests
from lib.patience import PATIENCE

Work = Callable[[int, int], Any]


def _run_rank(rank: int, work: Work, ranks: int, folder: str, seconds: float, nccl: bool) -> Any:
    """Run the work of one rank in its process group."""
    options: dict[str, Any] = {
        "backend": "nccl" if nccl else "gloo",
        "store": dist.FileStore(os.path.join(folder, "store"), ranks),
        "rank": rank,
        "world_size": ranks,
        "timeout": datetime.timedelta(seconds=seconds),
    }
    if nccl:
        torch.cuda.set_device(rank)
        options["device_id"] = torch.device("cuda", rank)
    dist.init_process_group(**options)
    if nccl:  # connections are made by the first collective, which must not be a captured one
        dist.all_reduce(torch.zeros(1, device="cuda"))
        torch.cuda.synchronize()
    result = work(rank, ranks)
    gc.collect()
    destroy_unused_graphs()
    return result


def _main(rank: int, *arguments: Any) -> None:
    _, ranks, folder, _, nccl = arguments
    # Collectives in a graph have no timeout: a hang ends here, with a traceback.
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    torch.set_num_threads(1)
    gc.freeze()
    at_work = [open(os.path.join(folder, f"at_work_{other}"), "w") for other in range(ranks)]  # noqa: SIM115
    fcntl.flock(at_work[rank], fcntl.LOCK_EX)  # until this rank is done or its process ends
    try:
        torch.save(_run_rank(rank, *arguments), os.path.join(folder, f"result.{rank}"))
        fcntl.flock(at_work[rank], fcntl.LOCK_UN)
        for file in at_work:  # what was sent must arrive before the connections end
            fcntl.flock(file, fcntl.LOCK_SH)
            fcntl.flock(file, fcntl.LOCK_UN)
        if nccl:  # graphs must not outlive the communicator
            torch.cuda.synchronize()
            dist.destroy_process_group()
    except BaseException:
        Path(folder, f"error.{rank}").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)  # torch would wait for the others, and the group may be broken


def run_ranks(
    work: Work,
    ranks: int,
    folder: Path,
    *,
    seconds: float = 2 * PATIENCE,
    nccl: bool = False,
) -> list[Any]:
    """Return what ``work(rank, ranks)`` returned in each process; None of one that ended before.

    Args:
        work: a function of a module, which the processes import.
        ranks: how many.
        folder: empty.
        seconds: the timeout of the group; as it is, a process that waits for it ends before.
        nccl: one CUDA device for each rank; else gloo.

    Raises:
        AssertionError: what a process raised.
    """
    method = "spawn"
    if not nccl:
        # A server that has imported torch, and nothing else, forks them: a second instead of ten.
        method = "forkserver"
        mp.get_context(method).set_forkserver_preload(["torch._dynamo", "lib.manager"])
    arguments = (work, ranks, str(folder), seconds, nccl)
    try:
        mp.start_processes(_main, arguments, nprocs=ranks, start_method=method)
    except mp.ProcessExitedException as error:
        texts = [f"{path.name}: {path.read_text()}" for path in sorted(folder.glob("error.*"))]
        raise AssertionError("\n".join(texts) or str(error)) from error
    paths = [folder / f"result.{rank}" for rank in range(ranks)]
    return [torch.load(path, weights_only=False) if path.exists() else None for path in paths]


def caught(call: Callable[[], Any], errors: Any = AgreementError) -> str:
    """Return the type and the first line of the error that a call raises; "" if it raises none."""
    try:
        call()
    except errors as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


HIDDEN, SIZE, INNER, LAYERS = 64, 16, 128, 2  # SIZE: of a head

# by the mode of the manager, the first letters of those that the batches run in
MODES = {
    "NONE": "NNNNN",
    "PIECEWISE": "PPPPP",
    "FULL": "FFFFF",
    "FULL_DECODE_ONLY": "FFFNN",
    "FULL_AND_PIECEWISE": "FFFPP",
}

# (lengths of the requests, uniform decode)
BATCHES = (((1,), True), ((1,) * 3, True), ((1,) * 8, True), ((5, 2, 1), False), ((16,), False))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    """Causal attention of each request to itself, [n, heads, size]; metadata has the starts."""
    starts = get_forward_context().attn_metadata
    rows = torch.arange(q.shape[0], device=q.device, dtype=starts.dtype)
    owner = torch.searchsorted(starts[1:], rows, right=True)
    hidden = (owner[:, None] != owner[None, :]) | (rows[None, :] > rows[:, None])
    scores = torch.einsum("ihd,jhd->hij", q, k) * SIZE**-0.5
    scores = scores.masked_fill(hidden, float("-inf"))
    padding = (rows >= starts[-1])[:, None, None]  # which may hold anything
    out.copy_(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v.masked_fill(padding, 0.0)))


def all_reduce(x: torch.Tensor) -> None:
    dist.all_reduce(x)


@cache
def library() -> torch.library.Library:
    fragment = torch.library.Library("cgparallel", "FRAGMENT")
    fragment.define("attend(Tensor q, Tensor k, Tensor v, Tensor(a!) out) -> ()")
    fragment.define("all_reduce(Tensor(a!) x) -> ()")
    for key in ("CPU", "CUDA"):
        fragment.impl("attend", attend, key)
        fragment.impl("all_reduce", all_reduce, key)
    torch.library.register_fake("cgparallel::attend", lambda q, k, v, out: None, lib=fragment)
    torch.library.register_fake("cgparallel::all_reduce", lambda x: None, lib=fragment)
    return fragment


@dataclass(frozen=True)
class Shard:
    """One part of each layer."""

    rank: int = 0
    ranks: int = 1
    own_op: bool = False  # all-reduce through an op of this file, not through `dist.all_reduce`

    def of(self, weight: torch.Tensor, dim: int) -> nn.Parameter:
        part = weight.chunk(self.ranks, dim)[self.rank]
        return nn.Parameter(part.clone(), requires_grad=False)

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        if self.ranks == 1:
            return x
        if self.own_op:
            torch.ops.cgparallel.all_reduce(x)
        else:
            dist.all_reduce(x)
        return x


class Layer(nn.Module):
    """Attention and a gated MLP: columns of the first matrices, rows of the second on each rank."""

    def __init__(self, shard: Shard) -> None:
        super().__init__()
        self.shard = shard
        self.norms = nn.ParameterList(torch.rand(HIDDEN) + 0.5 for _ in range(2))
        qkv, out = torch.randn(3, HIDDEN, HIDDEN) / 8, torch.randn(HIDDEN, HIDDEN) / 8
        gate_up, down = torch.randn(2, INNER, HIDDEN) / 8, torch.randn(HIDDEN, INNER) / 8
        self.qkv, self.out = shard.of(qkv, 1), shard.of(out, 1)
        self.gate_up, self.down = shard.of(gate_up, 1), shard.of(down, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(x, (HIDDEN,), self.norms[0])
        q, k, v = F.linear(normed, self.qkv.flatten(0, 1)).view(x.shape[0], 3, -1, SIZE).unbind(1)
        attended = torch.empty_like(q)
        torch.ops.cgparallel.attend(q, k, v, attended)
        x = x + self.shard.summed(F.linear(attended.flatten(1), self.out))
        normed = F.rms_norm(x, (HIDDEN,), self.norms[1])
        gate, up = F.linear(normed, self.gate_up.flatten(0, 1)).chunk(2, -1)
        return x + self.shard.summed(F.linear(F.silu(gate) * up, self.down))


class Decoder(nn.Module):
    """Logits [n, VOCABULARY], equal on all ranks but for rounding; of one seed, whatever shard."""

    def __init__(self, shard: Shard) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.places = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(64, HIDDEN)
        self.layers = nn.ModuleList(Layer(shard) for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) + self.places(positions)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def model_of(shard: Shard, device: str, compiler: str | None = None) -> tuple[Any, Any]:
    """(model, config) of one rank's shard; with ``compiler`` the model is compiled."""
    library()
    model: Any = Decoder(shard).to(device).eval()
    config = cgcompile.CompilationConfig(
        splitting_ops=(SplittingOp("cgparallel::attend", support=AttentionCGSupport.ALWAYS),),
        capture_device="host" if device == "cpu" else "auto",
        compiler=compiler or "eager",
    )
    if compiler:
        model = torch.compile(model, backend=cgcompile.Backend(config), dynamic=True)
    return model, config


def manager_of(
    mode: str, model: Any, config: Any, device: str, agreed: Agreement | None = None
) -> CudaGraphManager:
    """A manager of what :func:`model_of` made."""
    return CudaGraphManager(
        model,
        dispatcher(mode) if agreed is None else agreed,
        INPUTS,
        metadata=metadata,
        device=device,
        config=config,
    )


def batches(seed: int, device: str) -> list[Batch]:
    """The same on every rank."""
    torch.manual_seed(seed)
    return [requests(*lengths, device=device, decode=decode) for lengths, decode in BATCHES]


def unsharded(device: str) -> Callable[[Batch], torch.Tensor]:
    """A function that runs a batch on one rank alone, without padding and without graphs."""
    library()
    return partial(eager, Decoder(Shard()).to(device).eval())


def check_mode(manager: CudaGraphManager, alone: Any, device: str, rounds: int = 2) -> Any:
    """Run all batches and compare with the results of one rank.

    Returns:
        (captures, replays, modes of the batches, tokens of all batches).
    """
    for bulk in manager.capture().values():
        assert bulk.missing == (), bulk
    captures, before = manager.counters.captures, manager.counters.replays
    modes, tokens = "", []
    for seed in range(rounds):
        previous = None
        for batch in batches(seed, device):
            modes += manager.dispatched(batch).mode.name[0]
            logits = manager.run(batch)
            expected = alone(batch)
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
            assert torch.equal(logits.argmax(-1), expected.argmax(-1))
            assert previous is None or not torch.equal(previous, logits[0])
            previous = logits[0].clone()
            tokens += logits.argmax(-1).tolist()
    return captures, manager.counters.replays - before, modes, tokens


def every_mode(shard: Shard, compiler: str | None, device: str) -> dict[str, Any]:
    """What :func:`check_mode` found in each mode; one model for all."""
    results = {}
    alone = unsharded(device)
    model, config = model_of(shard, device, compiler)
    for mode in MODES:
        manager = manager_of(mode, model, config, device)
        results[mode] = check_mode(manager, alone, device)
        manager.release()
    return results


def check_every_mode(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Check what two ranks found: graphs ran where they should, with the tokens of one rank."""
    assert first == second
    *_, tokens = first["NONE"]
    assert len(set(tokens)) > 10
    for mode, (captures, replays, modes, same) in first.items():
        assert modes == MODES[mode] * 2
        assert (captures > 0) is (mode != "NONE")
        assert replays == len(modes) - modes.count("N")
        assert same == tokens


def other_inputs(
    manager: CudaGraphManager, rank: int, device: str
) -> tuple[int, list[torch.Tensor]]:
    """The number of graphs of a FULL step, and its results as only rank 1 changes its tokens."""
    manager.capture()
    entries = manager.wrappers[0].concrete_cudagraph_entries
    (entry,) = [entry for key, entry in entries.items() if key.num_tokens == 16]
    manager.run(batches(0, device)[-1])
    results = []
    for token in (3, 3, 4):
        if rank == 1:
            manager.inputs.buffers["input_ids"].fill_(token)
        results.append(manager.run_fullgraph(16).cpu().clone())
    return entry.sequence.num_graphs, results


def forced(shard: Shard, device: str, agreed: Agreement) -> str:
    """The error of a rank where one replays another size; the next steps are right."""
    manager = manager_of("FULL", *model_of(shard, device), device, agreed)
    manager.capture()
    error = caught(lambda: manager.run_fullgraph((8, 4)[shard.rank]))
    alone = unsharded(device)
    for batch in batches(0, device):
        torch.testing.assert_close(manager.run(batch), alone(batch), rtol=1e-4, atol=1e-4)
    before = manager.counters.replays
    result = manager.run(
        None if shard.rank else batches(0, device)[1]
    )  # its collectives find padding
    assert (result is None) is (shard.rank == 1)
    assert manager.counters.replays == before + 1
    manager.release()
    return error


FORCED = "AgreementError: rank 1 is about to run FULL, 4 tokens; rank 0 FULL, 8 tokens."
