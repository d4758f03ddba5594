"""The cases on a CUDA device, with every compiler of pieces, and what only a GPU shows."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from lib.asserts import backend_for, build, check_against_eager, mark, split_texts
from lib.cases import CASES, D
from torch import nn

import cgcompile
from cgcompile.pieces.stitch import Step
from cgcompile.reasons import Reason

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("compiler", ["eager", "aot", "inductor"])
def test_equals_eager(name: str, compiler: str) -> None:
    assert check_against_eager(CASES[name], compiler, "cuda").graphs


@pytest.mark.parametrize("name", CASES)
def test_split_is_the_one_of_the_cpu(name: str) -> None:
    assert split_texts(CASES[name], "cuda") == split_texts(CASES[name], "cpu")


class Experts(nn.Module):
    """Mixture-of-experts routing that sends offsets from pageable memory to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, 4)
        self.experts = nn.Parameter(torch.randn(4, D, D))
        self.bias = torch.randn(4)  # a plain CPU tensor: not moved by .to()

    def forward(self, x):
        choice = self.gate(x).argmax(-1)
        scale = torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)
        bias = self.bias.to(x.device)
        mixed = torch.einsum("btd,btde->bte", x, self.experts[choice])
        return F.relu(mixed * scale[choice][..., None] + bias[choice][..., None])


class CpuPart(nn.Module):
    """Part of the model computes on the CPU."""

    def forward(self, x, lengths):
        longest = (lengths * 2).to(x.device)
        return x.sin() * longest[:, None, None]


def _run(model: nn.Module, make: Callable[[int], tuple[torch.Tensor, ...]]) -> list[Reason]:
    """Compare with eager at three sizes; return the reasons of the pieces of the first graph."""
    backend = cgcompile.Backend(compiler="inductor")
    with torch.no_grad():
        compiled = torch.compile(model, backend=backend)
        for size in (6, 3, 1):
            inputs = make(size)
            if size == 6:
                for tensor in inputs:
                    torch._dynamo.mark_dynamic(tensor, 0)
            torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=1e-4, atol=1e-4)
    pieces = backend.graphs[0].split.pieces
    assert any(piece.capture for piece in pieces)
    return [why.reason for piece in pieces for why in piece.why]


def test_pageable_copy_is_a_boundary() -> None:
    reasons = _run(Experts().eval().cuda(), lambda n: (torch.randn(n, 4, D, device="cuda"),))
    assert Reason.DEVICE_COPY in reasons


def test_cpu_tensor_is_a_boundary() -> None:
    def make(n: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(n, 4, D, device="cuda"), torch.rand(n)

    reasons = _run(CpuPart(), make)
    assert reasons.count(Reason.CPU_TENSOR) == 1
    assert reasons.count(Reason.DEVICE_COPY) == 1


class Recording:
    """Compiles with a backend, then runs the first step piece by piece inside CUDA graphs."""

    def __init__(self, backend: cgcompile.Backend) -> None:
        self.backend = backend
        self.captured = 0
        self.refused: list[tuple[str, str]] = []

    def __call__(self, gm, example_inputs):
        split = self.backend(gm, example_inputs).split

        def recorded(piece):
            def run(*inputs):
                if piece.capture:
                    copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
                    torch.cuda.synchronize()
                    try:
                        with torch.cuda.graph(torch.cuda.CUDAGraph()):
                            piece.module.forward(*copies)
                        self.captured += 1
                    except RuntimeError as error:
                        self.refused.append((piece.name, str(error).splitlines()[0]))
                return piece.module.forward(*inputs)

            return run

        return Step(split).bind([recorded(piece) for piece in split.pieces])


def test_captured_pieces_can_be_captured() -> None:
    """Each piece of every case that the predicate captures can be recorded as a CUDA graph."""
    refused, captured = [], 0
    torch.cuda.current_blas_handle()  # cannot be created inside of a capture
    for name, case in CASES.items():
        torch._dynamo.reset()
        model, recording = build(case, "cuda"), Recording(backend_for(case, "eager"))
        with torch.device("cuda"):
            inputs = case.inputs(case.sizes[0])
        mark(case, inputs)
        with torch.no_grad(), torch._dynamo.config.patch(**case.dynamo):
            torch.compile(model, backend=recording)(*inputs)
        captured += recording.captured
        refused += [f"{name}/{piece}: {error}" for piece, error in recording.refused]
    assert not refused, "\n".join(refused)
    assert captured > 60
