"""The manager: every mode on a compiled and on a plain model, captures, hooks, refusals."""

import logging
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from lib.manager import (
    FULL,
    INPUTS,
    MAX_REQS,
    NONE,
    PIECEWISE,
    SIZES,
    D,
    Decoder,
    dispatcher,
    eager,
    manager,
    metadata,
    requests,
)
from torch import nn

from cgcompile import BatchDescriptor, CUDAGraphMode
from cgcompile.errors import (
    AddressChangedError,
    BatchError,
    HostValueChangedError,
    InputBufferError,
    ManagerError,
)
from cgcompile.graphs.capture import inside_capture
from cgcompile.reasons import Reason
from cgcompile.serving.batch import Batch, GraphHooks, Metadata
from cgcompile.serving.buffers import InputBuffer
from cgcompile.serving.plan import Axis, LoraCases

MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
KINDS = ("plain", "compiled")

# (lengths, decode, the mode it runs in by the mode of the manager)
BATCHES = (
    ((1,), True, "NPFFF"),
    ((1, 1, 1), True, "NPFFF"),
    ((1,) * 8, True, "NPFFF"),
    ((1,) * 8, False, "NPFNP"),  # prompts of one token each are no decode
    ((3, 2, 1), False, "NPFNP"),
    ((7,), False, "NPFNP"),
    ((16,), False, "NPFNP"),
    ((20,), False, "NNNNN"),
)
BY_LETTER = {"N": NONE, "P": PIECEWISE, "F": FULL}


def inner(made: Any) -> nn.Module:
    return getattr(made.model, "_orig_mod", made.model)


def check(made: Any, batch: Batch, **restrictions: Any) -> torch.Tensor:
    """One step, equal to eager; attention sums over padded rows in another order."""
    found = made.run(batch, **restrictions)
    torch.testing.assert_close(found, eager(inner(made), batch), rtol=1e-5, atol=1e-5)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_every_batch_equals_eager_in_its_mode(mode: str, kind: str, device: str) -> None:
    made = manager(mode, kind, device)
    assert made.needs_capture() is (mode != "NONE")
    for bulk in made.capture().values():
        assert bulk.missing == ()
    modes: Counter[Any] = Counter()
    before = made.counters.replays
    for _ in range(2):
        for lengths, decode, expected in BATCHES:
            previous = check(made, requests(*lengths, device=device, decode=decode)).clone()
            assert not torch.equal(
                previous, check(made, requests(*lengths, device=device, decode=decode))
            )
            modes[BY_LETTER[expected[MODES.index(mode)]]] += 2
    assert made.counters.replays - before == modes[PIECEWISE] + modes[FULL]
    counted: Counter[Any] = Counter()
    for cell in made.statistics.cells():
        counted[CUDAGraphMode[cell.mode]] += cell.hits
    assert counted == +modes


@pytest.mark.parametrize("kind", KINDS)
def test_what_tails_hold_never_reaches_real_rows(kind: str, device: str) -> None:
    """A large batch, then a small one in the same buffers; and NaN behind what is real."""
    embeds = InputBuffer("inputs_embeds", ("tokens", D), torch.float32, float("nan"), optional=True)
    axes = (Axis("inputs_embeds", (True,)),)
    made = manager(
        "FULL_AND_PIECEWISE",
        kind,
        device,
        dispatch=dispatcher("FULL_AND_PIECEWISE", axes=axes),
        inputs=(*INPUTS, embeds),
    )
    made.capture()
    for lengths, decode in (((16,), False), ((3, 2), False), ((1,) * 8, True), ((1,) * 5, True)):
        batch = requests(*lengths, device=device, decode=decode, extra=(True,))
        rows = torch.randn(batch.num_tokens, D, device=device)
        batch = replace(batch, inputs={**batch.inputs, "inputs_embeds": rows})
        assert check(made, batch).isfinite().all()
    assert made.statistics.reasons() == {}


def test_optional_inputs_are_part_of_the_key() -> None:
    embeds = InputBuffer("inputs_embeds", ("tokens", D), torch.float32, 0.0, optional=True)
    inputs = (*INPUTS, embeds)
    with pytest.raises(ManagerError, match="no axis of that name"):
        manager(inputs=inputs)
    axes = (Axis("inputs_embeds", (False, True)),)
    made = manager(dispatch=dispatcher("FULL_AND_PIECEWISE", axes=axes), inputs=inputs)
    made.capture()
    with_it = requests(1, 1, 1, decode=True, extra=(True,))
    rows = torch.randn(3, D)
    with_it = replace(with_it, inputs={**with_it.inputs, "inputs_embeds": rows})
    check(made, with_it)
    check(made, requests(1, 1, 1, decode=True, extra=(False,)))
    with pytest.raises(ManagerError, match="expected whether it is given"):
        made.run(replace(with_it, extra=(False,)))
    check(made, with_it)
    assert made.run(Batch(0, 0, {})) is None  # what it says of the axes does not matter
    empty = {name: value[:0] for name, value in with_it.inputs.items()}
    empty["query_start_loc"] = with_it.inputs["query_start_loc"][:1]
    assert made.run(Batch(0, 0, empty)).shape == (0, D)


def test_each_phase_gets_fresh_inputs() -> None:
    seen: list[tuple[str, BatchDescriptor, Any]] = []

    def prepare(descriptor: BatchDescriptor, phase: str) -> Batch:
        lengths = [1] * (descriptor.num_tokens - 1)
        batch = requests(*lengths, 1) if descriptor.num_reqs else requests(descriptor.num_tokens)
        seen.append((phase, descriptor, batch))
        return batch

    made = manager("PIECEWISE", prepare=prepare)
    made.capture()
    sizes = [16, 8, 4, 2, 1]
    assert [(phase, each.num_tokens) for phase, each, _ in seen] == [
        *(("warmup", size) for size in sizes),
        *(("capture", size) for size in sizes),
    ]
    assert len({id(batch) for _, _, batch in seen}) == 10


def test_a_graph_for_mixed_batches_is_captured_with_a_long_query() -> None:
    seen: dict[BatchDescriptor, Any] = {}

    def noted(batch: Batch, descriptor: BatchDescriptor, buffers: Any) -> Metadata:
        seen[descriptor] = (
            batch.num_reqs,
            batch.max_query_len,
            buffers["query_start_loc"].tolist(),
        )
        return metadata(batch, descriptor, buffers)

    manager("FULL", metadata=noted).capture()
    assert seen[BatchDescriptor(4, 4)] == (4, 4, [0, 1, 2, 3, 4])
    assert seen[BatchDescriptor(16, 8)] == (8, 16, [0, 2, 4, 6, 8, 10, 12, 14, 16])
    seen.clear()
    dispatch = dispatcher("FULL_DECODE_ONLY", query_lens=(3,), decode_num_reqs=[4])
    manager(dispatch=dispatch, metadata=noted).capture()
    assert seen[BatchDescriptor(12, 4, True)] == (4, 3, [0, 3, 6, 9, 12])


def test_what_cannot_be_captured_is_said() -> None:
    made = manager("FULL", metadata=lambda batch, descriptor, buffers: Metadata())
    with pytest.raises(ManagerError, match="no attention metadata"):
        made.capture()
    made = manager("FULL")
    for mode in (NONE, "FULL"):
        with pytest.raises(ManagerError, match="expected PIECEWISE or FULL"):
            made.capture_graph(mode, BatchDescriptor(4, 4))
    with pytest.raises(BatchError):
        made.capture_graph(FULL, BatchDescriptor(5, 5))
    assert made.counters.calls == 0
    made.capture_graph(FULL, BatchDescriptor(4, 4))
    for again in (lambda: made.capture_graph(FULL, BatchDescriptor(4, 4)), made.capture):
        with pytest.raises(ManagerError, match="captured already"):
            again()
    check(made, requests(1, 2))
    check(made, requests(7))
    assert made.statistics.reasons() == {Reason.NOT_CAPTURED: 1}
    made.release()
    made.capture()
    check(made, requests(7))


def test_one_size_that_fails(device: str) -> None:
    class Picky(Decoder):
        def forward(self, input_ids, positions, inputs_embeds=None):
            made = super().forward(input_ids, positions)
            if input_ids.shape[0] != 4:
                return made
            return made * float(made.mean() * 0 + 1)  # reads the device

    made = manager("FULL", device=device, model=Picky())
    (bulk,) = made.capture().values()
    assert [each.num_tokens for each in bulk.captured] == [16, 8, 2, 1]
    assert [each.num_tokens for each, _ in bulk.missing] == [4]
    for lengths in ((3,), (2,), (7,)):
        check(made, requests(*lengths, device=device))
    assert not made.statistics.reasons()
    assert made.get_cudagraph_size(3) == 8  # the next larger one


@pytest.mark.parametrize("kind", KINDS)
def test_lazily(kind: str, device: str) -> None:
    made = manager("FULL_AND_PIECEWISE", kind, device, lazily=True)
    captures = []
    for _ in range(4):
        check(made, requests(1, 1, 1, device=device, decode=True))
        captures.append((made.counters.captures, made.counters.replays))
    assert captures == [(0, 0), (1, 0), (1, 1), (1, 2)]
    for _ in range(3):
        check(made, requests(5, device=device))
    assert (made.counters.captures, made.counters.replays) == (2, 3)


@pytest.mark.parametrize("aux", [False, True])
def test_run_fullgraph(aux: bool, device: str) -> None:
    made = manager("FULL_AND_PIECEWISE", device=device, model=Decoder(aux))
    with pytest.raises(ManagerError, match="No cudagraph for 4 tokens; captured FULL: none"):
        made.run_fullgraph(4)
    made.capture()
    for size in (4, 8, 4):
        batch = requests(*[1] * size, device=device, decode=True)
        made.inputs.stage(batch.inputs, (size, size), (size, size))
        found, expected = made.run_fullgraph(size), eager(inner(made), batch)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        hidden = found[0] if aux else found
        assert hidden.shape == (size, D)
    again = made.run_fullgraph(4)
    assert (again[0] if aux else again).data_ptr() == hidden.data_ptr()
    with pytest.raises(ManagerError, match="No cudagraph for 5 tokens; captured FULL: 1, 2, 4, 8"):
        made.run_fullgraph(5)


def test_which_graph_serves() -> None:
    made = manager("FULL_DECODE_ONLY")
    assert made.get_cudagraph_runtime_mode(3, 3, 1) == (NONE, None)
    made.capture()
    assert made.get_cudagraph_runtime_mode(3, 3, 1) == (FULL, 4)
    assert made.get_cudagraph_runtime_mode(1, 3, 3) == (NONE, None)
    assert made.get_cudagraph_runtime_mode(9, 9, 1) == (NONE, None)
    assert (made.get_cudagraph_size(3, True), made.get_cudagraph_size(3)) == (4, None)
    made = manager(dispatch=dispatcher("FULL", axes=(Axis("a", (1,)),), lora=LoraCases((2,))))
    made.capture()
    for more, size in (({"extra": (1,)}, 4), ({"extra": (7,)}, None)):
        more = {"has_lora": True, "num_active_loras": 1, **more}
        assert made.get_cudagraph_size(3, **more) == size
        mode = FULL if size else NONE
        assert made.get_cudagraph_runtime_mode(1, 3, 3, **more) == (mode, size)


@pytest.mark.parametrize("kind", KINDS)
def test_weights(kind: str, device: str) -> None:
    made = manager("FULL_DECODE_ONLY", kind, device)
    made.capture()
    batch = requests(1, 1, 1, device=device, decode=True)
    first = check(made, batch).clone()
    with torch.no_grad():
        inner(made).layers[0].out.weight.mul_(2)
    assert not torch.equal(check(made, batch), first)
    old = inner(made).layers[0].out.weight
    inner(made).layers[0].out.weight = nn.Parameter(torch.randn_like(old))
    with pytest.raises(AddressChangedError, match=r"out\.weight"):
        made.run(batch)
    made.release()
    made.capture()
    check(made, batch)


def test_hooks_and_contexts() -> None:
    calls: list[str] = []

    class Noting(GraphHooks):
        def before_capture(self, pool: Any) -> None:
            assert pool is made.pool
            calls.append("before_capture")

        def before_full_capture(self) -> None:
            assert not inside_capture()
            calls.append("before_full_capture")

        def end_of_capture(self) -> None:
            calls.append("end_of_capture")

        def before_replay(self) -> None:
            calls.append("before_replay")

        def after_replay(self) -> None:
            calls.append("after_replay")

    class Around:
        def __enter__(self) -> None:
            calls.append("enter")

        def __exit__(self, *_: Any) -> None:
            calls.append("exit")

    made = manager("FULL", hooks=[Noting()], graph_capture=Around)
    made.capture_graph(FULL, BatchDescriptor(4, 4))
    # Two warm-ups would be as right: one plain pass, one capture, which is one execution.
    assert calls == [
        "before_capture",
        "enter",
        "end_of_capture",
        "before_full_capture",
        "end_of_capture",
        "exit",
    ]
    del calls[:]
    check(made, requests(3))
    assert calls == ["before_replay", "after_replay"]
    check(made, requests(20))
    assert len(calls) == 2
    made.release()
    del calls[:]
    assert sum(len(each.captured) for each in made.capture().values()) == len(SIZES)
    assert calls.count("before_full_capture") == len(SIZES)


@pytest.mark.parametrize("kind", KINDS)
def test_a_lazy_capture_of_a_whole_step_is_announced_too(kind: str, device: str) -> None:
    calls: list[int] = []

    class Noting(GraphHooks):
        def before_full_capture(self) -> None:
            calls.append(made.counters.captures)

    made = manager("FULL_AND_PIECEWISE", kind, device, hooks=[Noting()], lazily=True)
    for step in range(4):
        check(made, requests(1, 1, device=device, decode=True))
        assert calls == [0] * (step >= 1)  # the first step warms up, the second captures
    assert made.counters.replays == 2
    for _ in range(3):
        check(made, requests(3, device=device))  # by piece: not announced
    assert len(calls) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_capture_that_does_not_begin_is_not_announced(kind: str, device: str) -> None:
    calls: list[int] = []

    class Noting(GraphHooks):
        def before_full_capture(self) -> None:
            calls.append(made.counters.captures)

    made = manager("FULL_AND_PIECEWISE", kind, device, hooks=[Noting()], lazily=True)
    check(made, requests(1, 1, device=device, decode=True))  # warms up
    for closed in (True, False):
        for wrapper in made.wrappers:
            wrapper.closed = closed
        check(made, requests(1, 1, device=device, decode=True))
        assert len(calls) == (not closed)
    check(made, requests(1, 1, device=device, decode=True))
    assert made.counters.captures >= 1
    assert made.counters.replays >= 1
    assert len(calls) == 1


@pytest.mark.parametrize("lazily", [False, True])
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL", "FULL_AND_PIECEWISE", "NONE"])
def test_sizes_are_told_before_and_after_capture(mode: str, lazily: bool) -> None:
    made = manager(mode, lazily=lazily)
    sizes = {n: min(size for size in SIZES if size >= n) for n in range(1, SIZES[-1] + 1)}
    decode = {n: size for n, size in sizes.items() if n <= MAX_REQS}
    assert made.cudagraph_sizes == ({} if mode == "NONE" else sizes)
    own = mode == "FULL_AND_PIECEWISE"
    assert made.uniform_decode_cudagraph_sizes == (decode if own else {})
    for captured in (False, True):
        if captured:
            made.capture()
        for n in (0, 1, 3, 9, 16, 17):
            assert made.get_cudagraph_size(n) == made.cudagraph_sizes.get(n)
        for n in (1, 5, 8):
            expected = made.uniform_decode_cudagraph_sizes.get(n, made.cudagraph_sizes.get(n))
            assert made.get_cudagraph_size(n, True) == expected
    assert (made.pool is None) is (mode == "NONE")


def test_sizes_of_decode_with_drafts() -> None:
    dispatch = dispatcher("FULL_DECODE_ONLY", query_lens=(1, 3), decode_num_reqs=[2])
    made = manager(dispatch=dispatch)
    assert made.cudagraph_sizes == {}
    expected = {n: 6 if n <= 6 else 24 for n in range(3, 25)}
    assert made.uniform_decode_cudagraph_sizes == expected


def test_a_refused_size_is_not_told() -> None:
    made = manager("FULL")
    made.dispatcher.refused(FULL, BatchDescriptor(16, 8), "an op reads the host")
    made.dispatcher.refused(FULL, BatchDescriptor(2, 2), "an op reads the host")
    assert (made.get_cudagraph_size(9), made.get_cudagraph_size(8)) == (None, 8)
    made.dispatcher.captured(FULL, BatchDescriptor(4, 4))
    assert made.get_cudagraph_size(2) == 4


def test_what_full_graphs_write_can_be_looked_at(device: str) -> None:
    made = manager("FULL", device=device, model=Decoder(aux=True))
    assert made.output_buffers is None
    made.capture()
    hidden, [aux] = made.output_buffers
    assert hidden.shape == aux.shape == (SIZES[-1], D)
    last, [first] = made.run(requests(3, device=device))
    torch.testing.assert_close(hidden[:3], last)
    assert (last.data_ptr(), first.data_ptr()) == (hidden.data_ptr(), aux.data_ptr())
    made.release()
    assert made.output_buffers is None


def test_dummies_have_sequences_that_are_not_empty() -> None:
    lengths: dict[Any, list[int]] = {}

    def noted(batch: Batch, descriptor: BatchDescriptor, buffers: Any) -> Metadata:
        lengths[descriptor] = buffers["seq_lens"].tolist()
        return metadata(batch, descriptor, buffers)

    spec = InputBuffer("seq_lens", ("reqs",), torch.int32, argument=False, dummy_value="num_tokens")
    made = manager("FULL", inputs=(*INPUTS, spec), metadata=noted)
    made.capture()
    assert lengths[BatchDescriptor(4, 4)] == [4] * 4
    assert lengths[BatchDescriptor(16, 8)] == [16] * 8
    batch = requests(3)
    batch = replace(
        batch, inputs={**batch.inputs, "seq_lens": torch.tensor([3], dtype=torch.int32)}
    )
    made.run(batch)
    assert lengths[BatchDescriptor(4, 4)] == [3, 0, 0, 0]
    assert InputBuffer("s", ("reqs",), torch.int32, 1, dummy_value=7).dummy(4, 2).tolist() == [7, 7]
    for bad in ("tokens", 0.5, 2**40):
        with pytest.raises(InputBufferError, match=f"dummy_value={bad!r}"):
            InputBuffer("s", ("reqs",), torch.int32, dummy_value=bad)


def test_each_reason_of_a_lesser_mode_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    made = manager("FULL")
    made.capture()
    with caplog.at_level(logging.INFO, logger="cgcompile.serving"):
        for count in (20, 3, 21, 24):
            made.run(requests(count))
    lines = [each for each in caplog.messages if each.startswith("a step")]
    why = "oversize: more than 16 tokens: no graph is as large"
    assert lines == [f"a step of 20 tokens runs in mode NONE: {why}"]


def test_excluded_modes() -> None:
    made = manager("FULL_AND_PIECEWISE")
    made.capture()
    batch = requests(1, 1, 1, decode=True)
    check(made, batch, invalid_modes={FULL})
    check(made, batch, valid_modes=[NONE])
    counted = {cell.mode: cell.hits for cell in made.statistics.cells() if cell.hits}
    assert counted == {"PIECEWISE": 1, "NONE": 1}


def test_inputs_that_do_not_fit() -> None:
    made = manager("FULL_AND_PIECEWISE")
    made.capture()
    batch = requests(1, 1, 1, decode=True)
    for name, value in (
        ("input_ids", torch.zeros(4, dtype=torch.int64)),
        ("input_ids", torch.zeros(3, dtype=torch.int32)),
        ("positions", None),
        ("other", torch.zeros(3)),
    ):
        with pytest.raises(InputBufferError, match=name):
            made.run(replace(batch, inputs={**batch.inputs, name: value}))
        check(made, batch)


def test_outputs_by_request(device: str) -> None:
    class Last(Decoder):
        """Hidden states [n, D], and one row for each request."""

        def forward(self, input_ids, positions, inputs_embeds=None, query_start_loc=None):
            hidden = super().forward(input_ids, positions)
            return hidden, hidden[(query_start_loc[1:] - 1).clamp(min=0)]

    inputs = (*INPUTS[:2], replace(INPUTS[2], argument=True))
    made = manager("FULL", device=device, model=Last(), inputs=inputs, outputs=("tokens", "reqs"))
    made.capture()
    for lengths in ((3, 2, 1), (4, 4), (1,) * 8):
        batch = requests(*lengths, device=device)
        found = made.run(batch)
        assert [each.shape[0] for each in found] == [batch.num_tokens, batch.num_reqs]
        hidden = eager(Decoder.forward.__get__(inner(made)), batch)
        ends = (batch.inputs["query_start_loc"][1:] - 1).long()
        torch.testing.assert_close(found[0], hidden, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[1], hidden[ends], rtol=1e-5, atol=1e-5)
    for outputs, message in (("rows", "expected 'tokens'"), (("tokens",), "names 1")):
        with pytest.raises(ManagerError, match=message):
            manager("FULL", model=Last(), inputs=inputs, outputs=outputs).capture()
    with pytest.raises(ManagerError, match="expected a tensor with 16 rows"):
        manager("FULL", model=Last(), inputs=inputs).capture()


def test_another_autocast_mode_than_at_capture(device: str) -> None:
    made = manager("FULL", device=device)
    made.capture()
    batch = requests(2, 1, device=device)
    check(made, batch)
    before = made.counters.replays
    with (
        torch.autocast(device, torch.bfloat16),
        pytest.raises(HostValueChangedError, match="autocast"),
    ):
        made.run(batch)
    assert made.counters.replays == before
    check(made, batch)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_outside_of_inference_mode(kind: str, device: str) -> None:
    """Where gradients are asked for, the step runs plain; the weights of the model get them."""
    made = manager("FULL", kind, device, inference_mode=False)
    with torch.no_grad():
        made.capture()
        check(made, requests(3, device=device))
    assert made.counters.replays == 1
    made.run(requests(3, device=device)).sum().backward()
    assert inner(made).layers[0].out.weight.grad.abs().sum() > 0
    assert made.counters.replays == 1
