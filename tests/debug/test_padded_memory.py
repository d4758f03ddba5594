"""verify and bisect ignore memory that padding rows write, and find faults in all other memory."""

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


def context() -> Any:
    return cgcompile.set_forward_context(
        torch.tensor([5, 0, 2, SCRATCH]),
        cudagraph_runtime_mode="PIECEWISE",
        batch_descriptor=cgcompile.BatchDescriptor(ROWS),
        num_unpadded_tokens=REAL,
    )


def built(compiler: Any) -> Any:
    config = cgcompile.CompilationConfig(
        capture_device="host", compiler=compiler, splitting_ops=("padded::attend",)
    )
    return cgcompile.compile(model(), config, dynamic_dims={"input": 0})


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_scratch_slot_is_no_difference(compiler: str) -> None:
    compiled, x = built(compiler), torch.randn(ROWS, WIDTH)
    with torch.inference_mode(), context():
        found = cgcompile.verify(compiled, x)
        assert found.ok, str(found)
        assert cgcompile.debug.bisect(compiled, x).ok


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


@pytest.mark.parametrize("row", range(ROWS))
def test_a_fault_in_a_cache_is_found_in_real_rows_alone(row: int) -> None:
    compiled, x = built(partial(with_fault, row=row)), torch.randn(ROWS, WIDTH)
    with torch.inference_mode(), context():
        found = cgcompile.verify(compiled, x)
    assert found.ok is (row >= REAL), str(found)


class Mixes(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + x.mean(0)


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
        found = cgcompile.debug.bisect(compiled, x)
    assert found.stage == "padding"
    assert "changed since" not in str(found)
