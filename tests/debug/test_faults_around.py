"""A fault in what surrounds a model (weights, streams, ranks, caches, modes), as in ``test_faults``."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lib.cases import D
from lib.debug import FULL, examine, found, marked_line, only_finding, step, worse_than_notes
from lib.faulty_models import config, rows
from lib.manager import dispatcher
from lib.ranks import run_ranks
from torch import nn

import cgcompile
from cgcompile import Backend, BatchDescriptor, CUDAGraphWrapper
from cgcompile.debug import Diagnosis, bisect
from cgcompile.errors import AddressChangedError, AgreementError, CaptureError, DispatchError
from cgcompile.reasons import Reason
from cgcompile.serving.ranks import Agreement

# ---------------------------------------------------------------- 9: weights that move


class Moves(nn.Module):
    def __init__(self, moves: bool) -> None:
        super().__init__()
        self.up, self.moves = nn.Linear(D, D), moves

    def forward(self, x):
        x = x @ self.up.weight
        if self.moves:
            self.up.weight.data = self.up.weight.data.clone()  # <moves>
        return self.up(x)


def test_weights_that_move() -> None:
    x, model = rows("cpu"), Moves(False)
    seen = found(examine(Moves(True), x), "replaced_attribute", Moves.forward, "moves")
    assert (seen.severity, seen.op) == ("break", "self.up.weight")
    assert examine(model, x).findings == ()

    wrapper = CUDAGraphWrapper(model, config())
    with torch.inference_mode(), step():
        wrapper(x)
        cgcompile.update_weights(model, {"up.bias": torch.ones(D)})
        assert torch.equal(wrapper(x), model(x))
        model.up.weight.data = torch.ones(D, D)
        with pytest.raises(
            AddressChangedError, match=r"weight 'up\.weight' was replaced"
        ) as caught:
            wrapper(x)  # <call>
    assert only_finding(caught.value).kind == "replaced_attribute"
    assert only_finding(caught.value).source.line == marked_line(test_weights_that_move, "call")

    compiled = cgcompile.compile(model, config(), guards="none")  # its docs name this exception
    assert bisect(compiled, x).ok
    model.up.weight.data = torch.zeros(D, D)
    assert bisect(compiled, x).stage == "tracing"
    compiled.invalidate("weights moved")
    assert bisect(compiled, x).ok


# ---------------------------------------------------------------- 10: a stream that is not joined


class Forks(nn.Module):
    def __init__(self, joins: bool) -> None:
        super().__init__()
        self.side = torch.cuda.Stream() if torch.cuda.is_available() else None
        self.joins = joins

    def forward(self, x):
        if x.is_cuda:
            self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):  # <stream>
            y = x + 1  # <side>
        if x.is_cuda and self.joins:
            torch.cuda.current_stream().wait_stream(self.side)
        return y * 2


def test_a_side_stream() -> None:
    seen = found(examine(Forks(True), rows("cpu")), "side_stream", Forks.forward, "stream")
    assert (seen.severity, seen.op) == ("note", "torch.cuda.stream")
    assert examine(Moves(False), rows("cpu")).findings == ()


@pytest.mark.gpu
def test_a_side_stream_that_is_not_joined() -> None:
    x = rows("cuda")
    found(examine(Forks(True), x), "side_stream", Forks.forward, "side")
    with torch.inference_mode(), step():
        with pytest.raises(CaptureError, match="unjoined work") as caught:
            CUDAGraphWrapper(Forks(False), config())(x)
        joined = CUDAGraphWrapper(Forks(True), config())
        for _ in range(2):
            assert torch.equal(joined(x), (x + 1) * 2)
    assert only_finding(caught.value).kind == "side_stream"
    assert joined.counters.replays == 1


# ---------------------------------------------------------------- 11: ranks that part


def work(rank: int, ranks: int) -> list[str]:
    agreement = Agreement(dispatcher("FULL_DECODE_ONLY"), check=True)
    agreed = agreement.dispatch(1 + 2 * rank, 1 + 2 * rank, 1, True).dispatched
    told = [f"{agreed.mode.name} {agreed.descriptor.num_tokens}"]
    if rank == 1:  # refuses alone what both would take
        agreement.dispatcher.refused(FULL, BatchDescriptor(2, 2, True), "by this rank alone")
    try:
        agreement.dispatch(2 - rank, 2 - rank, 1, True)
    except AgreementError as error:
        told.append(str(error).splitlines()[0])
    return told


def test_ranks_that_part(tmp_path: Path) -> None:
    text = "rank 1 is about to run FULL, 4 tokens, uniform; rank 0 FULL, 2 tokens, uniform."
    assert run_ranks(work, 2, tmp_path) == [["FULL 4", text]] * 2


# ---------------------------------------------------------------- 12: a generator of one's own


class Draws(nn.Module):
    def __init__(self, generator: torch.Generator | None) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x):
        return x + torch.rand(x.shape, generator=self.generator, device=x.device)  # <draw>


def test_a_generator_that_is_not_registered() -> None:
    x, model = rows("cpu"), Draws(torch.Generator())
    assert found(examine(model, x), "generator", Draws.forward, "draw").severity == "break"
    assert not worse_than_notes(examine(Draws(None), x))
    with torch.inference_mode(), step():
        with pytest.raises(CaptureError, match="not registered") as caught:
            CUDAGraphWrapper(model, config())(x)
        default = CUDAGraphWrapper(Draws(None), config())
        assert not torch.equal(default(x).clone(), default(x))
    assert default.counters.replays == 1
    seen = found(Diagnosis.of_error(caught.value), "generator", Draws.forward, "draw")
    assert seen.op.startswith("aten.rand.generator")


# ---------------------------------------------------------------- 13: a cache that grows


class Decodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)

    def forward(self, x, cache):
        q, k, v = (each.view(1, 1, -1, D) for each in self.qkv(x).chunk(3, -1))
        k, v = cache.update(k, v, 0)
        return F.scaled_dot_product_attention(q, k, v)


def test_a_dynamic_cache() -> None:
    from transformers import DynamicCache, LlamaConfig, StaticCache

    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1}
    static = StaticCache(LlamaConfig(hidden_size=D, **heads), max_cache_len=16)
    model, x = Decodes(), torch.randn(1, D)
    grows = examine(model, x, DynamicCache()).of_kind("growing_state")
    assert {each.severity for each in grows} == {"break"}
    for each, name in zip(grows, ("keys", "values"), strict=True):
        assert each.op == f"input 1.layers[0].{name}"
        assert Path(each.source.file).name == "cache_utils.py"
        assert each.source.code.startswith(f"self.{name} = torch.cat(")
    assert examine(model, x, static).findings == ()

    def served(cache: Any) -> Backend:
        backend = Backend(config())
        compiled = torch.compile(model, backend=backend)
        with torch.inference_mode():
            for _ in range(8):
                compiled(x, cache)
        return backend

    (seen,) = cgcompile.debug.doctor(served(DynamicCache())).findings
    assert (seen.kind, "StaticCache" in seen.message) == (Reason.GROWING_STATE.value, True)
    backend = served(static)
    assert cgcompile.debug.doctor(backend).findings == ()
    assert backend.counters.replays >= 4


# ---------------------------------------------------------------- 14: another mode than before


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(1))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):  # <forward>
        self.steps.add_(1)  # <write>
        return x * self.scale + self.steps


def test_a_buffer_that_was_made_in_inference_mode() -> None:
    x = rows("cpu")
    with torch.inference_mode():
        model = Steps()
    with torch.no_grad():
        diagnosis = cgcompile.debug.doctor(model, x)
        assert cgcompile.debug.doctor(Steps(), x).findings == ()
        with pytest.raises(RuntimeError, match="outside InferenceMode") as caught:
            model(x)
    assert found(diagnosis, "inference_tensor", Steps.forward, "write").severity == "error"
    assert len(diagnosis.findings) == 1
    assert only_finding(caught.value).kind == "inference_tensor"
    assert examine(model, x).findings == ()


def test_grad_mode_after_a_capture_in_inference_mode() -> None:
    x, model = rows("cpu"), Steps()
    wrapper = CUDAGraphWrapper(model, config())
    strict = CUDAGraphWrapper(model, config(strict=True))
    with torch.inference_mode(), step():
        wrapper(x), strict(x)
    with step():
        wrapper(x)
        with pytest.raises(DispatchError, match=Reason.GRADIENTS.value):
            strict(x)
        with torch.no_grad():
            wrapper(x)
    assert (wrapper.counters.plain, wrapper.counters.replays) == ({Reason.GRADIENTS: 1}, 1)
    (seen,) = cgcompile.debug.doctor(wrapper).findings
    assert (seen.kind, "inference_mode()" in seen.fix) == ("gradients", True)
    assert (
        found(cgcompile.debug.doctor(model, x), "gradients", Steps.forward, "forward").fix
        == seen.fix
    )
