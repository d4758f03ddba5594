"""Contents of padding rows, which never reach a result."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from lib.encoders import (
    H,
    Rows,
    check,
    close,
    config,
    images,
    manager,
    patches,
    rows,
)

from cgcompile.encoder import (
    EncoderBuffer,
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphReplayBuffers,
    GraphKey,
    PatchOffsets,
)
from cgcompile.encoder.errors import EncoderError
from cgcompile.encoder.graphs import GraphInputs
from cgcompile.encoder.patches import frame_offsets

NAN = float("nan")


def staged(buffers: dict[str, torch.Tensor], **rules: Any) -> GraphInputs:
    config = EncoderCudaGraphConfig(["image"], list(buffers), 4, rules)
    return GraphInputs(config, EncoderCudaGraphCaptureInputs(buffers))


def write(inputs: GraphInputs, **values: Any) -> list[str]:
    return inputs.write(EncoderCudaGraphReplayBuffers(values))


# ------------------------------------------------------------------ buffers


@pytest.mark.parametrize("real", [0, 1, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_default_padding_is_zeros(real: int, dtype: torch.dtype) -> None:
    inputs = staged({"x": torch.ones(5, 2, dtype=dtype)})
    value = torch.ones(real, 2).to(dtype)
    expected = torch.zeros(5, 2, dtype=dtype)
    expected[:real] = value
    for _ in range(2):
        assert write(inputs, x=value) == []
        assert torch.equal(inputs.values["x"], expected)


def test_a_scalar_buffer_is_copied() -> None:
    inputs = staged({"x": torch.tensor(3)})
    write(inputs, x=torch.tensor(7))
    assert inputs.values["x"].item() == 7


def test_none_leaves_a_buffer_and_may_zero_it() -> None:
    buffers = {key: torch.ones(3) for key in ("a", "b")}
    inputs = staged(buffers, b=EncoderBuffer(on_none="zero"))
    assert write(inputs, a=None, b=None) == ["a"]
    assert (inputs.values["a"].tolist(), inputs.values["b"].tolist()) == ([1, 1, 1], [0, 0, 0])
    assert write(inputs, a=torch.full((2,), 5.0), b=None) == []
    assert write(inputs, a=None, b=torch.ones(1)) == ["a"]
    assert inputs.values["a"].tolist() == [5, 5, 0]  # as the last replay left it


def test_offsets_go_on_to_the_end() -> None:
    capture = torch.tensor([0, 4, 8, 12, 16, 16], dtype=torch.int32)
    inputs = staged({"x": capture}, x=EncoderBuffer(tail="offsets", on_none="zero"))
    for real, expected in (
        ([0, 3, 9], [0, 3, 9, 16, 16, 16]),
        ([0, 16], [0, 16, 16, 16, 16, 16]),
        ([], [0, 16, 16, 16, 16, 16]),
        (None, [0, 16, 16, 16, 16, 16]),
        ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 16]),
    ):
        value = None if real is None else torch.tensor(real, dtype=torch.int32)
        assert write(inputs, x=value) == []
        assert inputs.values["x"].tolist() == expected
    with pytest.raises(EncoderError, match="6 offsets fill it"):
        write(inputs, x=torch.arange(6, dtype=torch.int32))


def test_padding_may_be_several_sequences() -> None:
    capture = torch.tensor([0, 5, 10, 15, 20, 20, 20, 20], dtype=torch.int32)
    inputs = staged({"x": capture}, x=EncoderBuffer(tail="offsets", longest_padding=4))
    for real, expected in (
        ([0, 7], [0, 7, 11, 15, 19, 20, 20, 20]),
        ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 9, 20]),  # no room: to the end
        ([0, 20], [0] + [20] * 7),
    ):
        write(inputs, x=torch.tensor(real, dtype=torch.int32))
        assert inputs.values["x"].tolist() == expected


@pytest.mark.parametrize(
    ("logic", "words"),
    [
        (lambda dst, src: dst.copy_(src), r"'x' \[4\] of float32: its padding logic failed.*\[3\]"),
        (lambda dst, src: dst.resize_(3), r"left \[3\] of float32"),
        (lambda dst, src: dst.set_(torch.zeros(4)), r"left \[4\] of float32"),
    ],
)
def test_a_padding_logic(logic: Any, words: str) -> None:
    def fill(dst: torch.Tensor, src: torch.Tensor) -> None:
        if broken:
            logic(dst, src)
        else:
            dst[: len(src)] = src
            dst[len(src) :] = 2

    broken, inputs = False, staged({"x": torch.zeros(4)}, x=fill)
    model = Rows(padding_logics={"x": fill})
    encoder = manager(model)
    broken = True
    with pytest.raises(EncoderError, match=words):
        write(inputs, x=torch.ones(3))
    with pytest.raises(EncoderError, match="padding logic"):
        encoder.execute(rows(3))
    broken = False  # the next good call works
    write(inputs, x=torch.ones(3))
    assert inputs.values["x"].tolist() == [1, 1, 1, 2]
    check(encoder, model, rows(3))
    assert encoder.statistics.hits == 1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"x": torch.ones(2, 2)}, "no value for buffer 'y'; there are x"),
        ({"x": torch.ones(2, 2), "y": None, "z": None}, "'z' is not among buffer_keys"),
        ({"x": torch.ones(5, 2), "y": None}, r"\[5, 2\] of float32.*at most the rows of \[4, 2\]"),
        (
            {"x": torch.ones(2, 1), "y": None},
            r"\[2, 1\](.|\n)*Sizes behind the first",
        ),  # or broadcast
        ({"x": torch.ones(2), "y": None}, r"\[2\]"),
        ({"x": 3, "y": None}, "int; expected a tensor, or None"),
        ({"x": torch.ones(2, 2), "y": torch.ones(2)}, r"float32.*int64(.|\n)*dtype must cast"),
    ],
)
def test_values_that_do_not_fit_change_nothing(values: Any, words: str) -> None:
    inputs = staged({"x": torch.zeros(4, 2), "y": torch.zeros(3, dtype=torch.int64)})
    with pytest.raises(EncoderError, match=words):
        write(inputs, **values)
    assert not any(each.any() for each in inputs.values.values())


def test_eager_values_have_exactly_the_keys() -> None:
    class Mine(Rows):
        def prepare_encoder_cudagraph_replay_buffers(self, *args: Any) -> Any:
            return EncoderCudaGraphReplayBuffers({})

    with pytest.raises(EncoderError, match="no value for buffer 'x'"):
        manager(Mine(), captured=False).execute(rows(3))


def test_values_are_converted_to_the_dtype_of_the_buffer(device: str) -> None:
    model = Rows()
    encoder = manager(model, device)
    call = rows(3)  # on the host, and of another dtype
    results = encoder.execute({**call, "x": call["x"].double()})
    close(results[0], model.linear(call["x"].to(device)).tanh())


# ------------------------------------------------------------------ NaN


def poison(encoder: Any) -> None:
    """Fill all buffers and the memory of the pool with NaN."""
    for key in encoder.budget_graphs:
        for buffer in encoder.graph_inputs(key).values():
            buffer.fill_(NAN if buffer.is_floating_point() else 0x7F)
    encoder.pool.poison()


@pytest.mark.parametrize("setting", [False, True])
def test_no_nan_reaches_a_result(setting: bool, device: str) -> None:
    """Budgets share a pool; between replays all that is stale is NaN, in buffers and in memory."""
    model = patches(device)
    encoder = manager(model, device, config=config(device, debug="poison" if setting else False))
    for sizes in (((16, 16),), ((2, 2),), ((4, 6), (3, 3)), ((8, 8), (2, 2)), ((5, 2),)):
        if not setting:
            poison(encoder)
        check(encoder, model, images(*sizes, device=device))
    assert encoder.statistics.misses == 0


def test_the_poison_setting_shows_rows_that_a_logic_leaves_out() -> None:
    model = Mixes(padding_logics={"x": lambda dst, src: dst[: len(src)].copy_(src)})
    encoder = manager(model, config=config(debug="poison"))
    assert encoder.execute(rows(3))[0].isnan().all()
    right = Mixes()
    check(manager(right, config=config(debug="poison")), right, rows(3))


class Mixes(Rows):
    """Each row takes a sum over all rows with weights that are zero: NaN anywhere is everywhere."""

    def encoder_cudagraph_forward(self, inputs: dict[str, torch.Tensor]) -> Any:
        x = self.linear(inputs["x"])
        return x + (x * 0).sum(0)


def test_zeroed_offsets_let_nan_through_and_declared_ones_do_not(device: str) -> None:
    """The reason for declared offsets: the source's default rule, on the same tower and memory."""
    declared, zeroed = patches(device), patches(device)
    settings = replace(declared.get_encoder_cudagraph_config(), padding_logics={})
    zeroed.get_encoder_cudagraph_config = lambda: settings  # type: ignore[method-assign]
    call = images((4, 4), device=device)
    for model, finite in ((declared, True), (zeroed, False)):
        encoder = manager(model, device)
        poison(encoder)
        assert bool(encoder.execute(call)[0].isfinite().all()) is finite


@pytest.mark.parametrize("offsets", [[0, 0, 0], [0, 4, 2], []])
def test_offsets_that_do_not_end_at_the_rows_are_refused(offsets: list[int]) -> None:
    """Else they would fall back at every replay, silently."""

    class Mine(Rows):
        def prepare_encoder_cudagraph_capture_inputs(self, *args: Any) -> Any:
            results = super().prepare_encoder_cudagraph_capture_inputs(*args)
            results.values["starts"] = torch.tensor(offsets, dtype=torch.int32)
            return results

    rules = {"starts": EncoderBuffer(tail="offsets")}
    encoder = manager(Mine(buffer_keys=["x", "starts"], padding_logics=rules), captured=False)
    last = offsets[-1] if offsets else None
    with pytest.raises(EncoderError, match=rf"'starts'.*its last entry is {last}"):
        encoder.capture()


def test_kept_keys_are_counted() -> None:
    class Keeps(Rows):
        def prepare_encoder_cudagraph_capture_inputs(self, *args: Any) -> Any:
            results = super().prepare_encoder_cudagraph_capture_inputs(*args)
            results.values["bias"] = torch.full((H,), 2.0)
            return results

        def prepare_encoder_cudagraph_replay_buffers(self, *args: Any) -> Any:
            values = {"x": args[0]["x"], "bias": args[0].get("bias")}
            return EncoderCudaGraphReplayBuffers(values)

        def encoder_cudagraph_forward(self, inputs: dict[str, torch.Tensor]) -> Any:
            return self.linear(inputs["x"]) + inputs["bias"]

        def select_encoder_cudagraph_items(self, mm_kwargs: Any, indices: list[int]) -> Any:
            results = super().select_encoder_cudagraph_items(mm_kwargs, indices)
            return {**results, **({"bias": mm_kwargs["bias"]} if "bias" in mm_kwargs else {})}

    model = Keeps(buffer_keys=["x", "bias"])
    encoder = manager(model)
    for bias, expected in ((None, 2.0), (torch.full((H,), 5.0), 5.0), (None, 5.0)):
        call = rows(8)
        results = encoder.execute(call if bias is None else {**call, "bias": bias})
        close(results[0], model.linear(call["x"]) + expected)
    assert encoder.kept_keys == {"bias": 2}
    assert encoder.coverage().endswith("kept bias: 2 times")


def test_a_full_graph_of_frames_has_a_sequence_of_padding(device: str) -> None:
    """As many frames as there may be, none of which reaches the end."""
    for longest, padding in ((None, [64]), (16, [48, 64, 64])):
        offsets = {"cu_seqlens": PatchOffsets(frame_offsets, longest_padding=longest)}
        model = patches(device, offsets=offsets)
        encoder = manager(model, device, token_budgets=[16, 64], max_batch_size=8)
        check(encoder, model, images(*[(2, 2)] * 8, device=device))
        results = encoder.graph_inputs(GraphKey("default", 16))["cu_seqlens"].tolist()
        assert results[: 9 + len(padding)] == [*range(0, 33, 4), *padding]
