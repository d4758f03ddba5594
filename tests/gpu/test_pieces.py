"""What Inductor makes of a piece on CUDA: which kernels, in which order, and when they are tuned."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cgcompile

pytestmark = pytest.mark.gpu


def kernels_of(call, *inputs: torch.Tensor) -> list[str]:
    """Return the names of the kernels of a call, in the order in which they ran."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        call(*inputs)
        torch.cuda.synchronize()
    events = [event for event in seen.events() if event.device_type.name == "CUDA"]
    return [event.name for event in sorted(events, key=lambda event: event.time_range.start)]


class EightBits(nn.Module):
    """Three layers of one input, with weights of 8 bits that are large when converted."""

    def __init__(self) -> None:
        super().__init__()
        for number, size in enumerate((1024, 2048, 512)):
            weight = torch.randint(-9, 9, (size, 2048), dtype=torch.int8)
            self.register_buffer(f"weight{number}", weight)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        weights = (self.weight0, self.weight1, self.weight2)
        return [F.linear(x, weight.to(x.dtype) * 0.25) for weight in weights]


def test_each_converted_weight_is_read_by_the_next_kernel() -> None:
    """Combined kernels would convert all weights first."""
    torch.manual_seed(0)
    model = EightBits().cuda()
    backend = cgcompile.Backend(cudagraph_mode="NONE")
    call = torch.compile(model, backend=backend, dynamic=False)
    x = torch.randn(8, 2048, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        for _ in range(3):
            for result, expected in zip(call(x), model(x), strict=True):
                torch.testing.assert_close(result, expected, rtol=2e-2, atol=2)
        names = kernels_of(call, x)
    converted = ["triton" in name for name in names]
    assert sum(converted) == 3
    assert not any(one and other for one, other in itertools.pairwise(converted))


def test_a_layer_behind_attention_over_one_query_is_one_product() -> None:
    torch.manual_seed(0)
    weight = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, weight.t().expand(len(x), 256, 256)) + 1

    backend = cgcompile.Backend()
    call = torch.compile(function, backend=backend, dynamic=True)
    with torch.inference_mode():
        for size in (8, 5, 8, 5, 8):
            rows = torch.randn(size, 4, 64, device="cuda", dtype=torch.bfloat16)
            x = rows.as_strided((size, 1, 256), (256, 64, 1))
            result = call(x, weight)
            assert result.shape == (size, 1, 256)
            torch.testing.assert_close(result, function(x, weight), rtol=2e-2, atol=0.3)
    assert backend.counters.replays > 0


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_kernels_are_tuned_by_the_call_before_the_capture(mode) -> None:
    """Large ones have several configurations, which are compared when they first run."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.sin(x) * 2 + y, x.t() + y.t().contiguous(), torch.softmax(x * y, -1)

    backend = cgcompile.Backend(cudagraph_mode=mode)
    call = torch.compile(function, backend=backend, dynamic=False)
    with torch.inference_mode():
        for _ in range(4):
            x, y = (torch.randn(1024, 2048, device="cuda") for _ in range(2))
            for result, expected in zip(call(x, y), function(x, y), strict=True):
                torch.testing.assert_close(result, expected)
    assert (backend.counters.captures, backend.counters.replays) == (1, 2)


class Standardised(nn.Conv2d):
    """A convolution that assigns the data of its weight in each step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, dims = self.weight, (1, 2, 3)
        deviation = weight.std(dims, keepdim=True) + 1e-5
        self.weight.data = (weight - weight.mean(dims, keepdim=True)) / deviation
        return super().forward(x)


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    layers = Standardised(3, 8, 3, padding=1), nn.ReLU(), Standardised(8, 8, 3, padding=1)
    return nn.Sequential(*layers).cuda().eval().requires_grad_(False)


def steps_until_an_error(backend: object, memory_format: torch.memory_format) -> str:
    """Compare steps with eager; return the name of the class of the first error, or ``right``."""
    torch._dynamo.reset()
    model, eager = convolutions(), convolutions()
    step = torch.compile(model, backend=backend)
    # TF32, the default of cuDNN, would differ by more than a wrong layout might.
    exact = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
    with torch.inference_mode(), exact:
        for _ in range(5):
            x = torch.randn(2, 3, 16, 16, device="cuda").to(memory_format=memory_format)
            expected = eager(x)
            try:
                result = step(x)
            except Exception as error:
                return type(error).__name__
            torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2)
            weights = zip(model.parameters(), eager.parameters(), strict=True)
            for one, other in weights:
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    return "right"


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_convolutions_that_assign_their_weight_are_right_or_fail_as_in_torch(
    memory_format: torch.memory_format,
) -> None:
    """Inductor may prefer another layout of the new weight than the one that it has traced."""
    ours = steps_until_an_error(cgcompile.Backend(), memory_format)
    assert ours in ("right", steps_until_an_error("inductor", memory_format))
