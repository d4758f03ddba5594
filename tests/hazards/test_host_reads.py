"""Graphs are split at ops whose CUDA kernels read values on the host; the rest is replayed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lib.front_ends import COMPILED, ROWS, WIDTH, check, compiled, settings

from cgcompile.reasons import Reason

linalg = torch.linalg


def matrix(x: torch.Tensor) -> torch.Tensor:
    """Make a positive definite matrix from x."""
    return x.mT @ x * 0.1 + torch.eye(x.shape[1], device=x.device)


READS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "inv": linalg.inv,
    "inverse": torch.Tensor.inverse,
    "solve": lambda a: linalg.solve(a, a + 1),
    "cholesky": linalg.cholesky,
    "cholesky_inverse": torch.cholesky_inverse,
    "eigh": lambda a: linalg.eigh(a)[0].diag(),
    "svd": lambda a: torch.svd(a)[1].diag(),
    "pinv": linalg.pinv,
    "matrix_exp": torch.matrix_exp,
    "matrix_power": lambda a: linalg.matrix_power(a, -2),
    "norm": lambda a: a / linalg.norm(a, 2),
    "norm, nuclear": lambda a: a / torch.norm(a, "nuc"),
    "cond": lambda a: a / linalg.cond(a),
    "histc": lambda a: torch.histc(a, WIDTH) + a,
}
READS_NOT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "inv_ex": lambda a: linalg.inv_ex(a)[0],
    "det": lambda a: a * linalg.det(a),
    "matrix_power": lambda a: linalg.matrix_power(a, 2),
    "norm": lambda a: a / linalg.norm(a),
    "norm, of rows": lambda a: a / linalg.norm(a, 2, dim=1, keepdim=True),
    "cond": lambda a: a / linalg.cond(a, 1),
    "histc": lambda a: torch.histc(a, WIDTH, 0, 1) + a,
}


def around(middle: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() @ middle(matrix(x.cos()))).tanh() + x

    return step


@pytest.mark.parametrize("front_end", COMPILED)
@pytest.mark.parametrize("name", READS)
def test_a_graph_is_split_at_a_kernel_that_reads(name: str, front_end: str, device: str) -> None:
    step = around(READS[name])
    served = compiled(front_end, step, settings(device))
    check(served.step, step, device, steps=5)
    (graph,) = served.target.graphs
    assert [piece.capture for piece in graph.split.pieces] == [True, False, True]
    (why,) = graph.split.pieces[1].why
    assert why.reason is Reason.HOST_SYNC
    assert name.partition(",")[0] in why.detail
    counters = served.counters()
    assert counters.replays >= 3
    assert not counters.plain[Reason.CAPTURE_FAILED]


@pytest.mark.parametrize("lowrank", [torch.svd_lowrank, torch.pca_lowrank])
def test_a_graph_is_split_at_python_that_calls_such_a_kernel(lowrank: Any, device: str) -> None:
    """Their results are random."""
    step = around(lambda a: lowrank(a, q=2)[1].sum() + a)
    served = compiled("torch.compile", step, settings(device))
    with torch.inference_mode():
        for _ in range(3):
            assert served.step(torch.randn(ROWS, WIDTH, device=device)).isfinite().all()
    (graph,) = served.target.graphs
    assert [piece.capture for piece in graph.split.pieces] == [True, False, True]
    assert served.counters().replays >= 1


@pytest.mark.parametrize("name", READS_NOT)
def test_a_graph_is_not_split_at_a_kernel_that_does_not(name: str, device: str) -> None:
    step = around(READS_NOT[name])
    served = compiled("torch.compile", step, settings(device))
    check(served.step, step, device, steps=5)
    (graph,) = served.target.graphs
    assert [piece.capture for piece in graph.split.pieces] == [True]
    assert served.counters().replays >= 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inv", "matrix_exp", "eigh"])
def test_inductor_calls_the_same_kernels(name: str, device: str) -> None:
    step = around(READS[name])
    served = compiled("torch.compile", step, settings(device, compiler="inductor"))
    check(served.step, step, device, steps=4)
    (graph,) = served.target.graphs
    assert [piece.capture for piece in graph.split.pieces] == [True, False, True]
    assert served.counters().replays >= 2


def writes_elements(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    y[0, 1] = 2.0
    y[1, -1] = 3
    row = y[2]
    row[0] = -0.5
    return y.tanh() + x


@pytest.mark.parametrize("compiler", ["eager", "aot"])
@pytest.mark.parametrize("front_end", COMPILED)
def test_a_number_is_written_into_one_element(front_end: str, compiler: str, device: str) -> None:
    """Python copies it from the CPU, which no capture can hold."""
    served = compiled(
        front_end, writes_elements, settings(device, compiler=compiler, on_fallback="raise")
    )
    check(served.step, writes_elements, device, steps=5)
    (graph,) = served.target.graphs
    assert [piece.capture for piece in graph.split.pieces] == [True]
    assert served.counters().replays >= 3
