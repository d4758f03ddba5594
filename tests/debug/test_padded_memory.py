"""verify ignores memory that padding rows write, and finds faults in all other memory."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from lib.front_ends import WIDTH
from torch import Tensor, nn

import cgcompile

ROWS, REAL, SCRATCH = 4, 3, 8  # rows of the batch; those that are real; the slot of the others


@torch.library.custom_op("padded::attend", mutates_args={"cache", "log", "out"})
def attend(q: Tensor, k: Tensor, note: Tensor, cache: Tensor, log: Tensor, out: Tensor) -> None:
    slots = cgcompile.get_forward_context().attn_metadata
    cache[slots], log[slots] = k, note
    out.copy_(q * cache[slots] + slots[:, None])


attend.register_fake(lambda q, k, note, cache, log, out: None)


class Layer(nn.Module):
    """Writes two caches: one that it reads, and one that no result depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.after = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("cache", torch.zeros(SCRATCH + 1, WIDTH))
        self.register_buffer("log", torch.zeros(SCRATCH + 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, note = self.q(x), torch.sin(x)
        out = torch.empty_like(q)
        torch.ops.padded.attend(q, self.k(x), note, self.cache, self.log, out)
        return x + self.after(out)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(3))).eval().requires_grad_(False)


def context(slots: tuple[int, ...] = (5, 0, 2, SCRATCH), real: int = REAL) -> Any:
    return cgcompile.set_forward_context(
        torch.tensor(slots),
        cudagraph_runtime_mode="PIECEWISE",
        batch_descriptor=cgcompile.BatchDescriptor(ROWS),
        num_unpadded_tokens=real,
    )


def built(compiler: Any, module: nn.Module | None = None) -> Any:
    ops = ("padded::attend", "padded::scaled")
    config = cgcompile.CompilationConfig(
        capture_device="host", compiler=compiler, splitting_ops=ops
    )
    return cgcompile.compile(module or model(), config, dynamic_dims={"input": 0})


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_scratch_slot_is_no_difference(compiler: str) -> None:
    compiled, x = built(compiler), torch.randn(ROWS, WIDTH)
    with torch.inference_mode(), context():
        verdict = cgcompile.verify(compiled, x)
        assert verdict.ok, str(verdict)
        ignored = f"{WIDTH} of {(SCRATCH + 1) * WIDTH} numbers of buffer 3 (padding)"
        assert ignored in str(verdict).partition("not compared: ")[2]
        assert cgcompile.verify(compiled, x, bisect=True).ok


def plus_one(x: Tensor, row: int) -> Tensor:
    one = torch.zeros_like(x)
    one[row] = 1
    return x + one


def with_fault(gm: Any, fake_inputs: Any, row: int) -> Any:
    """Compile a piece so that a row of what is logged is wrong."""
    gm = copy.deepcopy(gm)  # the uncompiled piece stays right
    for node in gm.graph.find_nodes(op="call_function", target=torch.sin):
        with gm.graph.inserting_after(node):
            wrong = gm.graph.call_function(plus_one, (node, row))
        node.replace_all_uses_with(wrong, delete_user_cb=lambda user, wrong=wrong: user != wrong)
    gm.recompile()
    return gm.forward


@pytest.mark.slow
@pytest.mark.parametrize("row", range(ROWS))
def test_a_fault_in_a_cache_is_found_in_real_rows_alone(row: int) -> None:
    compiled, x = built(partial(with_fault, row=row)), torch.randn(ROWS, WIDTH)
    with torch.inference_mode(), context():
        verdict = cgcompile.verify(compiled, x)
    assert verdict.ok is (row >= REAL), str(verdict)


@torch.library.custom_op("padded::scaled", mutates_args={"log"})
def scaled(note: Tensor, scale: Tensor, log: Tensor, mixed: bool) -> None:
    scale = scale.to(note.dtype)
    log[cgcompile.get_forward_context().attn_metadata] = note * (scale.sum(0) if mixed else scale)


scaled.register_fake(lambda note, scale, log, mixed: None)

SCALES = {
    "expanded rows": lambda layer, x: layer.q.bias.cos().expand(len(x), WIDTH),
    "expanded columns": lambda layer, x: x.cos()[:, :1].expand(len(x), WIDTH),
    "eight bits": lambda layer, x: x.to(torch.float8_e4m3fn),
    "no rows of the batch": lambda layer, x: layer.q.weight[:ROWS].cos(),
    "a weight": lambda layer, x: layer.q.weight[:ROWS],
}
WITHOUT_ROWS = ("no rows of the batch", "a weight")


class Scaled(Layer):
    """Logs with a scale that comes out of a captured piece."""

    def __init__(self, kind: str, size: int) -> None:
        super().__init__()
        self.kind = kind
        self.log = torch.zeros(size, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, note, scale = self.q(x), torch.sin(x), SCALES[self.kind](self, x)
        out = torch.empty_like(q)
        torch.ops.padded.scaled(note, scale, self.log, self.kind in WITHOUT_ROWS)
        torch.ops.padded.attend(q, self.k(x), q, self.cache, torch.zeros_like(self.cache), out)
        return x + self.after(out)


SLOTS = {
    "one padding row": ((5, 0, 2, SCRATCH), 3, SCRATCH + 1),
    "two padding rows": ((5, 0, SCRATCH, SCRATCH), 2, SCRATCH + 1),
    "as many slots as rows": ((3, 0, 1, 2), 3, ROWS),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", [None, 0])
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("kind", SCALES)
def test_random_padding_reaches_no_real_row(kind: str, slots: str, fault: int | None) -> None:
    """What is ignored depends on padding rows: no weights, and nothing that rows share."""
    where, real, size = SLOTS[slots]
    torch.manual_seed(0)
    module = nn.Sequential(*(Scaled(kind, size) for _ in range(2))).eval().requires_grad_(False)
    weights = copy.deepcopy(module.state_dict())
    compiler = "eager" if fault is None else partial(with_fault, row=fault)
    compiled, x = built(compiler, module), torch.randn(ROWS, WIDTH)
    with torch.inference_mode(), context(where, real):
        verdict = cgcompile.verify(compiled, x)
    assert verdict.ok is (fault is None), str(verdict)
    torch.testing.assert_close(module.state_dict(), weights, rtol=0, atol=0)


class Mixes(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + x.mean(0)


@pytest.mark.slow
def test_padding_that_reaches_real_rows_is_no_change_of_the_trace() -> None:
    torch.manual_seed(0)
    mixes = nn.Sequential(Mixes(), Mixes()).eval().requires_grad_(False)
    config = cgcompile.CompilationConfig(
        capture_device="host", compiler="eager", splitting_ops=("padded::attend",)
    )
    compiled = cgcompile.compile(mixes, config, dynamic_dims={"input": 0})
    x = torch.randn(ROWS, WIDTH)
    with torch.inference_mode(), context():
        assert not cgcompile.verify(compiled, x).ok
        verdict = cgcompile.verify(compiled, x, bisect=True)
    assert [fault.stage for fault in verdict.differences] == ["padding"]
    assert "changed since" not in str(verdict)
