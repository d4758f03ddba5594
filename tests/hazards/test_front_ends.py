"""Every front end captures and replays the plain step that the tables of hazards start from."""

import pytest
import torch
from lib.front_ends import FRONT_ENDS, ROWS, WIDTH, front_end
from torch import nn


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_a_plain_step_is_captured_and_replayed_on_every_front_end(name: str, device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(device).requires_grad_(False)
    served = front_end(name, model, device)
    with torch.inference_mode():
        for _ in range(5):
            x = torch.randn(ROWS, WIDTH, device=device)
            torch.testing.assert_close(served.step(x), model(x))
    counters = served.counters()
    assert counters.captures >= 1
    assert counters.replays >= 3
