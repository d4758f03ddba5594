"""What rows hold that are not real, and that none of it reaches a result."""

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
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphReplayBuffers,
    GraphKey,
    PatchOffsets,
)
from cgcompile.encoder.graphs import GraphInputs
from cgcompile.encoder.patches import frame_offsets
from cgcompile.errors import EncoderError

NAN = float("nan")


def staged(buffers: dict[str, torch.Tensor], **more: Any) -> GraphInputs:
    made = EncoderCudaGraphConfig(["image"], list(buffers), 4, **more)
    return GraphInputs(made, EncoderCudaGraphCaptureInputs(buffers))


def write(inputs: GraphInputs, **values: Any) -> list[str]:
    return inputs.write(EncoderCudaGraphReplayBuffers(values))


# ------------------------------------------------------------------ buffers


@pytest.mark.parametrize("real", [0, 1, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_the_default_is_zero_then_copy(real: int, dtype: torch.dtype) -> None:
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
    inputs = staged(buffers, on_none={"b": "zero"})
    assert write(inputs, a=None, b=None) == ["a"]
    assert (inputs.values["a"].tolist(), inputs.values["b"].tolist()) == ([1, 1, 1], [0, 0, 0])
    assert write(inputs, a=torch.full((2,), 5.0), b=None) == []
    assert write(inputs, a=None, b=torch.ones(1)) == ["a"]
    assert inputs.values["a"].tolist() == [5, 5, 0]  # as the last replay left it


def test_offsets_go_on_to_the_end() -> None:
    capture = torch.tensor([0, 4, 8, 12, 16, 16], dtype=torch.int32)
    inputs = staged({"x": capture.clone()}, offset_keys=["x"])
    write(inputs, x=torch.tensor([0, 3, 9], dtype=torch.int32))
    assert inputs.values["x"].tolist() == [0, 3, 9, 16, 16, 16]
    write(inputs, x=torch.tensor([0, 16], dtype=torch.int32))
    assert inputs.values["x"].tolist() == [0, 16, 16, 16, 16, 16]
    write(inputs, x=torch.tensor([], dtype=torch.int32))
    assert inputs.values["x"].tolist() == [0, 16, 16, 16, 16, 16]
    write(inputs, x=torch.tensor([0, 1, 2, 3, 4], dtype=torch.int32))
    assert inputs.values["x"].tolist() == [0, 1, 2, 3, 4, 16]
    with pytest.raises(EncoderError, match="6 offsets fill it"):
        write(inputs, x=torch.arange(6, dtype=torch.int32))


def test_padding_may_be_several_sequences() -> None:
    capture = torch.tensor([0, 5, 10, 15, 20, 20, 20, 20], dtype=torch.int32)
    inputs = staged({"x": capture.clone()}, offset_keys={"x": 4})
    write(inputs, x=torch.tensor([0, 7], dtype=torch.int32))
    assert inputs.values["x"].tolist() == [0, 7, 11, 15, 19, 20, 20, 20]
    write(inputs, x=torch.tensor([0, 1, 2, 3, 4, 5], dtype=torch.int32))
    assert inputs.values["x"].tolist() == [0, 1, 2, 3, 4, 5, 9, 20]  # no room: to the end
    write(inputs, x=torch.tensor([0, 20], dtype=torch.int32))
    assert inputs.values["x"].tolist() == [0] + [20] * 7


def test_offsets_that_are_none_may_be_zeroed() -> None:
    capture = torch.tensor([0, 4, 8])
    inputs = staged({"x": capture.clone()}, offset_keys=["x"], on_none={"x": "zero"})
    assert write(inputs, x=None) == []
    assert inputs.values["x"].tolist() == [0, 8, 8]


def test_a_padding_logic_replaces_the_rule() -> None:
    def repeat(dst: torch.Tensor, src: torch.Tensor) -> None:
        dst[: len(src)] = src
        dst[len(src) :] = src[-1]

    inputs = staged({"x": torch.zeros(4)}, padding_logics={"x": repeat})
    write(inputs, x=torch.tensor([1.0, 2.0]))
    assert inputs.values["x"].tolist() == [1, 2, 2, 2]


@pytest.mark.parametrize(
    ("logic", "words"),
    [
        (lambda dst, src: dst.copy_(src), r"'x' \[4\] of float32: its padding logic failed.*\[3\]"),
        (lambda dst, src: dst.resize_(3), r"left \[3\] of float32"),
        (lambda dst, src: dst.set_(torch.zeros(4)), r"left \[4\] of float32"),
    ],
)
def test_a_padding_logic_of_a_wrong_shape(logic: Any, words: str) -> None:
    model = Rows(padding_logics={"x": lambda dst, src: _right(dst, src)})
    made = manager(model)
    right = made.config.padding_logics["x"]
    made.config.padding_logics["x"] = logic  # type: ignore[index]
    inputs = staged({"x": torch.zeros(4)}, padding_logics={"x": logic})
    with pytest.raises(EncoderError, match=words):
        write(inputs, x=torch.ones(3))
    with pytest.raises(EncoderError, match="padding logic"):
        made.execute(rows(3))
    made.config.padding_logics["x"] = right  # type: ignore[index]
    check(made, model, rows(3))  # the next good call works
    assert made.statistics.hits == 1


def _right(dst: torch.Tensor, src: torch.Tensor) -> None:
    dst[: len(src)].copy_(src)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"x": torch.ones(2, 2)}, "no value for buffer 'y'; there are x"),
        ({"x": torch.ones(2, 2), "y": None, "z": None}, "'z' is not among buffer_keys"),
        ({"x": torch.ones(5, 2), "y": None}, r"\[5, 2\] of float32.*at most the rows of \[4, 2\]"),
        ({"x": torch.ones(2, 1), "y": None}, r"\[2, 1\]"),  # it would be broadcast
        ({"x": torch.ones(2), "y": None}, r"\[2\]"),
        ({"x": 3, "y": None}, "int; expected a tensor, or None"),
        ({"x": torch.ones(2, 2), "y": torch.ones(2)}, "float32.*int64"),
    ],
)
def test_values_that_do_not_fit_change_nothing(values: Any, words: str) -> None:
    inputs = staged({"x": torch.zeros(4, 2), "y": torch.zeros(3, dtype=torch.int64)})
    with pytest.raises(EncoderError, match=words):
        write(inputs, **values)
    assert not any(each.any() for each in inputs.values.values())


def test_capture_inputs_have_exactly_the_keys() -> None:
    with pytest.raises(EncoderError, match="no value for buffer 'y'"):
        manager(Rows(buffer_keys=["x", "y"]))
    with pytest.raises(EncoderError, match="'x' is not among buffer_keys"):
        manager(Rows(buffer_keys=["pixels"]))


def test_eager_values_have_exactly_the_keys() -> None:
    class Mine(Rows):
        def prepare_encoder_cudagraph_replay_buffers(self, *args: Any) -> Any:
            return EncoderCudaGraphReplayBuffers({})

    with pytest.raises(EncoderError, match="no value for buffer 'x'"):
        manager(Mine(), captured=False).execute(rows(3))


def test_values_are_converted_to_the_dtype_of_the_buffer(device: str) -> None:
    model = Rows()
    made = manager(model, device)
    call = rows(3, device="cpu")  # on the host, and of another dtype
    found = made.execute({**call, "x": call["x"].double()})
    expected = model.linear(call["x"].to(device)).tanh()
    close(found[0], expected)


# ------------------------------------------------------------------ NaN


def poisoned(made: Any) -> None:
    """NaN in all rows that are not written, and in the memory of the pool."""
    for key in made.budget_graphs:
        for each in made.graph_inputs(key).values():
            each.fill_(NAN if each.is_floating_point() else 0x7F)
    made.pool.poison()


def test_no_nan_reaches_a_result(device: str) -> None:
    """Budgets share a pool; between replays all that is stale is NaN, in buffers and in memory."""
    model = patches(device)
    made = manager(model, device)
    for sizes in (((16, 16),), ((2, 2),), ((4, 6), (3, 3)), ((8, 8), (2, 2)), ((5, 2),)):
        poisoned(made)
        check(made, model, images(*sizes, device=device))
    assert made.statistics.misses == 0


def test_the_poison_setting_does_it_at_each_replay(device: str) -> None:
    model = patches(device)
    made = manager(model, device, config=config(device, poison=True))
    for sizes in (((16, 16),), ((2, 2),), ((4, 6), (3, 3))):
        check(made, model, images(*sizes, device=device))


def test_the_poison_setting_shows_rows_that_a_logic_leaves_out() -> None:
    model = Mixes(padding_logics={"x": _right})
    made = manager(model, config=config(poison=True))
    assert made.execute(rows(3))[0].isnan().all()
    right = Mixes()
    check(manager(right, config=config(poison=True)), right, rows(3))


class Mixes(Rows):
    """Each row takes a sum over all rows with weights that are zero: NaN anywhere is everywhere."""

    def encoder_cudagraph_forward(self, inputs: dict[str, torch.Tensor]) -> Any:
        x = self.linear(inputs["x"])
        return x + (x * 0).sum(0)


def test_zeroed_offsets_let_nan_through_and_declared_ones_do_not(device: str) -> None:
    """The reason for offset_keys: the source's default rule, on the same tower and memory."""
    declared, zeroed = patches(device), patches(device)
    zeroed._config = EncoderCudaGraphConfig(
        modalities=["image"],
        buffer_keys=declared._config.buffer_keys,
        out_hidden_size=H,
        input_rows_per_token=4,
    )
    call = images((4, 4), device=device)
    for model, finite in ((declared, True), (zeroed, False)):
        made = manager(model, device)
        poisoned(made)
        assert bool(made.execute(call)[0].isfinite().all()) is finite


@pytest.mark.parametrize("offsets", [[0, 0, 0], [0, 4, 2], []])
def test_offsets_that_do_not_end_at_the_rows_are_refused(offsets: list[int]) -> None:
    """Else they would fall back at every replay, silently."""

    class Mine(Rows):
        def prepare_encoder_cudagraph_capture_inputs(self, *args: Any) -> Any:
            found = super().prepare_encoder_cudagraph_capture_inputs(*args)
            found.values["starts"] = torch.tensor(offsets, dtype=torch.int32)
            return found

    made = manager(Mine(buffer_keys=["x", "starts"], offset_keys=["starts"]), captured=False)
    last = offsets[-1] if offsets else None
    with pytest.raises(EncoderError, match=rf"'starts'.*its last entry is {last}"):
        made.capture()


def test_kept_keys_are_counted() -> None:
    class Keeps(Rows):
        def prepare_encoder_cudagraph_capture_inputs(self, *args: Any) -> Any:
            found = super().prepare_encoder_cudagraph_capture_inputs(*args)
            found.values["bias"] = torch.full((H,), 2.0)
            return found

        def prepare_encoder_cudagraph_replay_buffers(self, *args: Any) -> Any:
            values = {"x": args[0]["x"], "bias": args[0].get("bias")}
            return EncoderCudaGraphReplayBuffers(values)

        def encoder_cudagraph_forward(self, inputs: dict[str, torch.Tensor]) -> Any:
            return self.linear(inputs["x"]) + inputs["bias"]

        def select_encoder_cudagraph_items(self, mm_kwargs: Any, indices: list[int]) -> Any:
            found = super().select_encoder_cudagraph_items(mm_kwargs, indices)
            return {**found, **({"bias": mm_kwargs["bias"]} if "bias" in mm_kwargs else {})}

    model = Keeps(buffer_keys=["x", "bias"])
    made = manager(model)
    for bias, expected in ((None, 2.0), (torch.full((H,), 5.0), 5.0), (None, 5.0)):
        call = rows(8)
        found = made.execute(call if bias is None else {**call, "bias": bias})
        close(found[0], model.linear(call["x"]) + expected)
    assert made.kept_keys == {"bias": 2}
    assert made.coverage().endswith("kept bias: 2 times")


def test_a_full_graph_of_frames_has_a_sequence_of_padding(device: str) -> None:
    """As many frames as there may be, none of which reaches the end."""
    offsets = {"cu_seqlens": PatchOffsets(frame_offsets, longest_padding=None)}
    model = patches(device, offsets=offsets)
    made = manager(model, device, token_budgets=[16, 64], max_batch_size=8)
    check(made, model, images(*[(2, 2)] * 8, device=device))
    found = made.graph_inputs(GraphKey("default", 16))["cu_seqlens"].tolist()
    assert found == [0, 4, 8, 12, 16, 20, 24, 28, 32, 64]
    model = patches(device)
    made = manager(model, device, token_budgets=[16, 64], max_batch_size=8)
    check(made, model, images(*[(2, 2)] * 8, device=device))
    found = made.graph_inputs(GraphKey("default", 16))["cu_seqlens"].tolist()
    assert found[:12] == [0, 4, 8, 12, 16, 20, 24, 28, 32, 48, 64, 64]
