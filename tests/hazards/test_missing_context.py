"""An op that reads the forward context where none is set raises as in the plain model."""

import pytest
import torch
from lib.front_ends import COMPILED, ROWS, WIDTH, compiled, settings

import cgcompile
from cgcompile.errors import ForwardContextError


@pytest.mark.parametrize("name", COMPILED)
def test_no_context(name: str, device: str) -> None:
    available = []

    @torch.library.custom_op(f"cghazard::slots_{COMPILED.index(name)}", mutates_args=())
    def attend(x: torch.Tensor) -> torch.Tensor:
        available.append(cgcompile.context.is_forward_context_available())
        return x * cgcompile.get_forward_context().attn_metadata["factor"]

    attend.register_fake(torch.empty_like)

    def step(x: torch.Tensor) -> torch.Tensor:
        return attend(x + 1) + 1

    op = cgcompile.SplittingOp(f"cghazard::slots_{COMPILED.index(name)}")
    served = compiled(name, step, settings(device, splitting_ops=(op,)))
    x = torch.randn(ROWS, WIDTH, device=device)
    with torch.inference_mode():
        for function in (step, served.step, served.step):
            with pytest.raises(ForwardContextError, match="no forward context is set"):
                function(x)
        with cgcompile.set_forward_context({"factor": 3.0}):
            torch.testing.assert_close(served.step(x), (x + 1) * 3 + 1)
    assert available == [False, False, False, True]
