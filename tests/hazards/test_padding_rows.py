"""Padding rows behind an eager piece are zeroed at each replay; real rows that share memory are not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import cgcompile

ROWS, REAL, WIDTH = 6, 4, 8

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda q: q * 2,
    "expanded rows": lambda q: q[:1].clone().expand(q.shape[0], WIDTH),
    "expanded columns": lambda q: q[:, :1].clone().expand(q.shape[0], WIDTH),
    "unfolded": lambda q: q[0].repeat(q.shape[0])[: q.shape[0] + WIDTH - 1].unfold(0, WIDTH, 1),
    "transposed": lambda q: q.t().contiguous().t(),
}
SHARED = ("expanded rows", "unfolded")  # rows that share memory


@torch.library.custom_op("rows::laid_out", mutates_args=())
def laid_out(q: Tensor, kind: str) -> Tensor:
    return LAYOUTS[kind](q)


laid_out.register_fake(lambda q, kind: LAYOUTS[kind](q))


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mixed = torch.ops.rows.laid_out(self.first(x), self.kind)
        return self.second(mixed), mixed.abs()


@pytest.mark.parametrize("kind", LAYOUTS)
def test_real_rows_are_those_of_eager(kind: str, device: str) -> None:
    model = Model(kind).to(device).requires_grad_(False)
    config = cgcompile.CompilationConfig(
        capture_device="host" if device == "cpu" else "auto",
        compiler="eager",
        splitting_ops=("rows::laid_out",),
    )
    compiled = cgcompile.compile(model, config, dynamic_dims={"x": 0})
    x = torch.zeros(ROWS, WIDTH, device=device)
    padded = {"batch_descriptor": cgcompile.BatchDescriptor(ROWS), "num_unpadded_tokens": REAL}
    with torch.inference_mode():
        for _ in range(4):
            x.normal_()
            with cgcompile.set_forward_context(cudagraph_runtime_mode="PIECEWISE", **padded):
                found = compiled(x)
            for one, other in zip(found, model(x), strict=True):
                torch.testing.assert_close(one[:REAL], other[:REAL])
    assert (found[1][REAL:].count_nonzero() == 0).item() is (kind not in SHARED)
    assert compiled.backend.counters.replays == 2
