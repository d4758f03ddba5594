"""With ``debug="stale"`` a result that a later step has overwritten raises where it is touched."""

from typing import Any

import pytest
import torch
from lib.breakable import FULL, step
from lib.front_ends import (
    COMPILED,
    FRONT_ENDS,
    ROWS,
    WIDTH,
    WRAPPERS,
    FrontEnd,
    compiled,
    front_end,
    settings,
)
from torch import nn

from cgcompile import CompilationConfig, CUDAGraphMode, CUDAGraphOptions, CUDAGraphWrapper
from cgcompile.errors import ConfigError
from cgcompile.graphs.device import capture_device
from cgcompile.graphs.pool import GraphPool
from cgcompile.reasons import Reason
from cgcompile.torch_compat import raw_memory

pytestmark = pytest.mark.skipif(
    not raw_memory.can_expire_storages(), reason="this build of torch cannot make a storage raise"
)
OWNING = ("EncoderCudaGraphManager",)  # results are the caller's


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        return y.relu() + 1


class Attending(Model):
    """Returns what a boundary made, and a view behind it of what a graph made."""

    def forward(self, x: torch.Tensor) -> Any:
        k = self.linear(x)
        y = nn.functional.scaled_dot_product_attention(k[None], k[None], k[None])
        return y[0], k[-1], k + 1


def in_context(name: str, model: nn.Module, device: str, mode: str, **more: Any) -> FrontEnd:
    """A compiled model under a forward context, which hands out views of graph memory."""
    served = compiled(name, model, settings(device, cudagraph_mode=mode, debug="stale", **more))
    inputs: dict[int, torch.Tensor] = {}
    plain = served.step

    def run(x: torch.Tensor) -> Any:
        static = inputs.setdefault(len(x), torch.empty_like(x)).copy_(x)
        with step(len(x), CUDAGraphMode[mode]):
            return plain(static)

    served.step = run
    return served


def new(device: str, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH, device=device)


def check_all_steps(served: FrontEnd, model: nn.Module, device: str, owning: bool) -> None:
    """Each result is right until the next step, and raises after it where it is a view."""
    raised, before = 0, None
    wanted: list[torch.Tensor] = []
    with torch.inference_mode():
        for number in range(6):
            replays = served.counters().replays
            x = new(device)
            result = served.step(x)
            torch.testing.assert_close(result, model(x))
            tensors = [result] if isinstance(result, torch.Tensor) else [*result]
            views = [each[..., :1] for each in tensors]
            if before is not None and served.counters().replays > replays and not owning:
                for stale in before:
                    with pytest.raises(RuntimeError, match="is stale: a later step"):
                        stale + 1
                    raised += 1
            elif before is not None and owning:
                for kept, want in zip(before, wanted, strict=True):
                    torch.testing.assert_close(kept, want)
            captured = number >= 2 or served.counters().captures > 0
            before = [*tensors, *views] if captured else None
            wanted = [each.clone() for each in [*tensors, *views]]
    assert served.counters().captures == 1
    assert served.counters().replays >= 3
    assert raised >= 6 or owning


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_a_stale_result_raises_on_every_front_end(name: str, device: str) -> None:
    torch.manual_seed(0)
    model = Model().to(device).requires_grad_(False)
    served = front_end(name, model, device, debug="stale")
    check_all_steps(served, model, device, owning=name in OWNING + COMPILED)


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
@pytest.mark.parametrize("build", [Model, Attending])
@pytest.mark.parametrize("name", COMPILED)
def test_a_stale_result_raises_under_a_context(
    name: str, build: type[nn.Module], mode: str, device: str
) -> None:
    torch.manual_seed(0)
    model = build().to(device).requires_grad_(False)
    check_all_steps(in_context(name, model, device, mode), model, device, owning=False)


def test_the_text_names_step_and_result_and_what_to_do(device: str) -> None:
    model = Attending().to(device).requires_grad_(False)
    served = in_context("torch.compile", model, device, "PIECEWISE")
    with torch.inference_mode():
        results = [served.step(new(device)) for _ in range(4)]
        with pytest.raises(RuntimeError) as caught:
            results[2][1].sum().item()
    assert str(caught.value).startswith(
        "result 1 of the compiled step, num_tokens=4 (step 2 with graphs) is stale: a later step "
        "has overwritten its memory.\n  Under a forward context results are views of graph memory, "
        "valid until the next step or the release of the graphs. Clone what must live longer: "
        "result.clone()."
    )


RELEASES: list[tuple[str, Any]] = [
    *[(name, "release") for name in (*COMPILED, "CudaGraphManager")],
    *[(name, "clear_all_graphs") for name in WRAPPERS],
    *[(name, "clear_graphs") for name in WRAPPERS],
]


@pytest.mark.parametrize(("name", "release"), RELEASES)
def test_a_result_that_is_read_after_the_release_of_its_graphs(
    name: str, release: str, device: str
) -> None:
    model = Model().to(device).requires_grad_(False)
    if name in COMPILED:
        served = in_context(name, model, device, "FULL")
    else:
        served = front_end(name, model, device, debug="stale")
    with torch.inference_mode():
        for _ in range(4):
            x = new(device)
            result = served.step(x)
            torch.testing.assert_close(result, model(x))
        assert served.counters().replays >= 2
        getattr(served.target, release)()
        with pytest.raises(RuntimeError, match=r"is stale: the graphs .* were released") as caught:
            result.clone()
        assert "a later step" not in str(caught.value)


def test_results_of_one_memory_share_it_and_expire_together(device: str) -> None:
    class Twice(Model):
        def forward(self, x: torch.Tensor) -> Any:
            y = self.linear(x)
            return y, y[1:]

    model = Twice().to(device).requires_grad_(False)
    served = in_context("torch.compile", model, device, "FULL")
    with torch.inference_mode():
        for _ in range(3):
            y, view = served.step(new(device))
        view.fill_(3.0)
        assert bool((y[1:] == 3.0).all())
        served.step(new(device))
        for stale in (y, view):
            with pytest.raises(RuntimeError, match="is stale"):
                stale.clone()


def test_the_result_of_another_size_expires_too(device: str) -> None:
    model = Model().to(device).requires_grad_(False)
    served = front_end("CUDAGraphWrapper", model, device, debug="stale")
    with torch.inference_mode():
        for rows in (8, 4, 8):
            result = served.step(new(device, rows))
        served.step(new(device, 4))
        with pytest.raises(RuntimeError, match="result 0 of Model, num_tokens=8"):
            result.clone()


@pytest.mark.parametrize("held", [True, False])
def test_a_result_that_another_graph_of_the_pool_reads(device: str, held: bool) -> None:
    """Results of a capturing call may be captured; memory of those of a replay is not held."""
    torch.manual_seed(0)
    first, second = (Model().to(device).requires_grad_(False) for _ in range(2))
    config = settings(device, debug="stale")
    pool = GraphPool(capture_device(torch.device(device), config.capture_device))
    one, two = (CUDAGraphWrapper(each, config, pool=pool) for each in (first, second))
    static = torch.zeros(ROWS, WIDTH, device=device)
    with torch.inference_mode(), step(ROWS, FULL):
        if not held:
            one(static)
        for _ in range(5):
            hidden = one(static.normal_())
            result = two(hidden)
            torch.testing.assert_close(hidden, first(static))
            torch.testing.assert_close(result, second(first(static)))
    assert (two.counters.captures, two.counters.replays) == ((1, 4) if held else (0, 0))
    assert two.counters.plain[Reason.UNSUPPORTED_INPUT] == (0 if held else 5)


def test_a_result_that_outlives_other_sizes_expires_with_its_own(device: str) -> None:
    model = Model().to(device).requires_grad_(False)
    options = CUDAGraphOptions(weak_ref_output=False)
    wrapper = CUDAGraphWrapper(model, settings(device, debug="stale"), cudagraph_options=options)
    inputs = {rows: new(device, rows) for rows in (4, 8)}

    def run(rows: int) -> torch.Tensor:
        with step(rows, FULL):
            return wrapper(inputs[rows].normal_())

    with torch.inference_mode():
        for rows in (8, 4, 8):
            result = run(rows)
        run(4)
        torch.testing.assert_close(result, model(inputs[8]))
        run(8)
        with pytest.raises(RuntimeError, match=r"num_tokens=8 .* is stale"):
            result.clone()


def test_a_build_of_torch_that_cannot_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_memory, "can_expire_storages", lambda: False)
    monkeypatch.delenv("CGCOMPILE_DEBUG")
    CUDAGraphWrapper(Model(), CompilationConfig())  # debug is off by default
    with pytest.raises(ConfigError, match="built without the function that makes a result raise"):
        CUDAGraphWrapper(Model(), CompilationConfig(debug="stale"))
