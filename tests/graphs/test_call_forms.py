"""Arguments by position at the capture and by name at the replay: bound by the signature."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lib.front_ends import ROWS, WIDTH, WRAPPERS, context, settings
from torch import nn

import cgcompile
from cgcompile.errors import GuardError, HostValueChangedError


def affine(x: torch.Tensor, y: torch.Tensor, *, scale: float = 2.0, more: Any = None) -> Any:
    return x * scale + y, x


class Affine(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor, scale: float = 2.0, more: Any = None):
        return affine(x, y, scale=scale, more=more)


FORMS: dict[str, Callable[..., Any]] = {
    "position": lambda step, x, y: step(x, y),
    "name": lambda step, x, y: step(y=y, x=x),
    "both": lambda step, x, y: step(x, y=y),
    "default": lambda step, x, y: step(x, y, scale=2.0, more=None),
}


@pytest.mark.parametrize("model", [affine, Affine()], ids=["function", "module"])
@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_replay_in_another_form(name: str, first: str, model: Any, device: str) -> None:
    """A returned argument is that of the call, too."""
    wrapper = getattr(cgcompile, name)(model, settings(device))
    x, y = (torch.empty(ROWS, WIDTH, device=device) for _ in range(2))
    with torch.inference_mode(), context():
        for form in (first, *FORMS):
            x.normal_()
            result, same = FORMS[form](wrapper, x, y.normal_())
            torch.testing.assert_close(result, affine(x, y)[0])
            assert same is x
        assert (wrapper.counters.captures, wrapper.counters.replays) == (1, len(FORMS))
        for wrong in (
            lambda: wrapper(x=y, y=x),
            lambda: wrapper(y=y, x=x, scale=3.0),
            lambda: wrapper(x=x),
            lambda: wrapper(x=x, y=y, z=y),
        ):
            with pytest.raises(GuardError):
                wrong()


@pytest.mark.parametrize("name", WRAPPERS)
def test_each_entry_has_its_form(name: str, device: str) -> None:
    """With ``recapture`` the entries of a batch may be captured in different forms."""
    wrapper = getattr(cgcompile, name)(affine, settings(device, on_input_change="recapture"))
    pairs = [torch.empty(2, ROWS, WIDTH, device=device) for _ in range(2)]
    calls = [("position", pairs[0]), ("name", pairs[1]), ("name", pairs[0]), ("both", pairs[1])]
    with torch.inference_mode(), context():
        for form, pair in [*calls, *calls]:
            x, y = pair.normal_()
            result, _ = FORMS[form](wrapper, x, y)
            torch.testing.assert_close(result, affine(x, y)[0])
    assert (wrapper.counters.captures, wrapper.counters.replays) == (2, 6)


def test_hooks_see_how_arguments_are_passed(device: str) -> None:
    """So a call in another form is refused."""
    model = Affine()
    model.register_forward_pre_hook(lambda module, args: tuple(2 * arg for arg in args))
    wrapper = cgcompile.CUDAGraphWrapper(model, settings(device))
    x, y = (torch.randn(ROWS, WIDTH, device=device) for _ in range(2))
    with torch.inference_mode(), context():
        for _ in range(2):
            torch.testing.assert_close(wrapper(x, y)[0], 4 * x + 2 * y)
        with pytest.raises(HostValueChangedError, match="0 arguments by position and 'x', 'y'"):
            wrapper(x=x, y=y)
    assert wrapper.counters.replays == 1
