"""The table of hazards, with the model in the epilogue of a manager."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hazards.table import TABLE, library
from lib import front_ends
from lib.front_ends import ROWS, WIDTH, FrontEnd, Named, capture_first
from lib.hazards import ABSENT, DOCUMENTED, STALE, Row, observe
from torch import nn

from cgcompile import AttentionCGSupport, CUDAGraphMode
from cgcompile.serving import Batch, CudagraphDispatcher, CudaGraphManager, InputBuffer, Metadata

NAME = "CudaGraphManager"


class Epilogue(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, result: torch.Tensor, buffers: dict[str, torch.Tensor]) -> Any:
        return self.model(result)


def managed(
    model: Any,
    device: str,
    config: Any,
    metadata: Callable[..., Metadata] = lambda *_: Metadata({}),
) -> FrontEnd:
    """A manager whose own model does nothing."""
    support = AttentionCGSupport.ALWAYS
    manager = CudaGraphManager(
        Named(nn.Identity()),
        CudagraphDispatcher(CUDAGraphMode.FULL, [ROWS], max_num_reqs=ROWS, support=support),
        [InputBuffer("x", ("tokens", WIDTH), torch.float32)],
        device=device,
        config=config,
        metadata=metadata,
        epilogue=Epilogue(model),
    )
    step = capture_first(manager, lambda x: manager.run(Batch(len(x), len(x), {"x": x})))
    return FrontEnd(NAME, step, manager)


def cells() -> Iterator[object]:
    for device in ("cpu", "cuda"):
        for row in TABLE:
            if row.outcome(NAME, device) is ABSENT or device not in row.devices:
                continue
            marks = [pytest.mark.gpu] if device == "cuda" else []
            yield pytest.param(row, device, id=f"{row.name}-{device}", marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize(("row", "device"), list(cells()))
def test_hazard_in_an_epilogue(row: Row, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library()
    monkeypatch.setattr(front_ends, "managed", managed)
    expected = row.outcome(NAME, device)
    assert observe(row, NAME, device) == (STALE if expected is DOCUMENTED else expected)
