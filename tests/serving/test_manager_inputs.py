"""What models take and return beside tokens: optional inputs, a cache with slots, three positions a
token, several results; and what metadata may hold."""

import gc
import weakref
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
from lib.manager import (
    EMBEDS,
    FULL,
    INPUTS,
    NONE,
    PIECEWISE,
    SIZES,
    D,
    Decoder,
    check,
    dispatcher,
    eager,
    inner,
    manager,
    metadata,
    requests,
    with_inputs,
)

from cgcompile import BatchDescriptor, get_forward_context, set_forward_context
from cgcompile.errors import AddressChangedError, HostValueChangedError, ManagerError
from cgcompile.serving import Axis, Batch, InputBuffer, Metadata
from cgcompile.serving.errors import InputBufferError

SLOTS = 40
MROPE = InputBuffer("positions", (3, "tokens"), torch.int64, 0)

kinds = pytest.mark.parametrize("kind", ["plain", "compiled"])


def with_embeds(values: tuple[bool, ...], mode: str = "FULL_AND_PIECEWISE", **more: Any) -> Any:
    """A manager with an optional input, which graphs have or lack."""
    dispatch = dispatcher(mode, axes=[Axis("inputs_embeds", values)])
    return manager(dispatch=dispatch, inputs=(*INPUTS, EMBEDS), **more)


# ---------------------------------------------------------------- inputs


def test_inputs_that_do_not_fit() -> None:
    graph_manager = manager()
    graph_manager.capture()
    batch = requests(1, 1, 1, decode=True)
    for name, value in (
        ("input_ids", torch.zeros(4, dtype=torch.int64)),
        ("input_ids", torch.zeros(3, dtype=torch.int32)),
        ("positions", None),
        ("other", torch.zeros(3)),
    ):
        with pytest.raises(InputBufferError, match=name):
            graph_manager.run(with_inputs(batch, **{name: value}))
        check(graph_manager, batch)
    del batch.inputs["positions"]
    with pytest.raises(InputBufferError, match="'positions'"):
        graph_manager.run(batch)


@pytest.mark.slow
@kinds
def test_what_tails_hold_never_reaches_real_rows(kind: str, device: str) -> None:
    """A large batch, then a small one in the same buffers; and NaN in the padding rows."""
    graph_manager = with_embeds((True,), kind=kind, device=device)
    graph_manager.capture()
    for lengths, decode in (((16,), False), ((3, 2), False), ((1,) * 8, True), ((1,) * 5, True)):
        batch = requests(*lengths, device=device, decode=decode, extra=(True,))
        rows = torch.randn(batch.num_tokens, D, device=device)
        assert check(graph_manager, with_inputs(batch, inputs_embeds=rows)).isfinite().all()
    assert graph_manager.statistics.reasons() == {}


@pytest.mark.slow
def test_optional_inputs_are_part_of_the_key() -> None:
    graph_manager = with_embeds((False, True))
    graph_manager.capture()
    rows = torch.randn(3, D)
    present = with_inputs(requests(1, 1, 1, decode=True, extra=(True,)), inputs_embeds=rows)
    check(graph_manager, present)
    check(graph_manager, requests(1, 1, 1, decode=True, extra=(False,)))
    with pytest.raises(ManagerError, match="expected whether the input is given"):
        graph_manager.run(Batch(3, 3, present.inputs, 1, True, extra=(False,)))
    check(graph_manager, present)
    assert graph_manager.run(Batch(0, 0, {})) is None  # whatever its axes
    empty = {name: value[:0] for name, value in present.inputs.items()}
    empty["query_start_loc"] = present.inputs["query_start_loc"][:1]
    assert graph_manager.run(Batch(0, 0, empty)).shape == (0, D)


@pytest.mark.parametrize(
    "axes",
    [(), [Axis("inputs_embeds", (True,), "pad_up")], [Axis("inputs_embeds", (), "ignored")]],
    ids=["none", "pad_up", "ignored"],
)
def test_axes_that_cannot_tell_an_optional_input(axes: Any) -> None:
    with pytest.raises(ManagerError, match="no axis of that name"):
        manager(dispatch=dispatcher("FULL", axes=axes), inputs=(*INPUTS, EMBEDS))


def test_inputs_that_require_grad() -> None:
    graph_manager = with_embeds((True,), "FULL", inference_mode=False)
    rows = torch.randn(3, D, requires_grad=True)
    batch = with_inputs(requests(3, extra=(True,)), inputs_embeds=rows)
    with pytest.raises(InputBufferError, match="'inputs_embeds' requires grad"):
        graph_manager.run(batch)
    with torch.no_grad():
        graph_manager.run(batch)
    assert not graph_manager.inputs.buffers["inputs_embeds"].requires_grad


class Caching(Decoder):
    """Writes the hidden state of each token to its slot; slot 0 is for padding."""

    def __init__(self, shifts: bool = False) -> None:
        super().__init__()
        self.shifts = shifts  # slots count from 1, by a write into the input buffer
        self.register_buffer("cache", torch.zeros(SLOTS, D))

    def forward(self, input_ids, positions, slot_mapping):
        hidden = super().forward(input_ids, positions)
        self.cache.index_copy_(0, slot_mapping.add_(1) if self.shifts else slot_mapping, hidden)
        return hidden


@pytest.mark.slow
@kinds
def test_padding_never_reaches_the_cache(kind: str, device: str) -> None:
    """The slots of a large batch are behind the real rows of a small one in the same buffer."""
    slot_mapping = InputBuffer("slot_mapping", ("tokens",), torch.int64, 0)
    graph_manager = manager(
        kind=kind, device=device, model=Caching(), inputs=(*INPUTS, slot_mapping)
    )
    graph_manager.capture()
    cache = inner(graph_manager).cache
    before = graph_manager.counters.replays
    for lengths, decode in (((16,), False), ((3, 2), False), ((1,) * 8, True), ((1,) * 5, True)):
        batch = requests(*lengths, device=device, decode=decode)
        slots = 1 + torch.randperm(SLOTS - 1, device=device)[: batch.num_tokens]
        batch = with_inputs(batch, slot_mapping=slots)
        cache.normal_()
        expected = cache.clone()
        result = graph_manager.run(batch)
        expected[slots] = result
        assert torch.equal(cache[1:], expected[1:])
        torch.testing.assert_close(result, eager(inner(graph_manager), batch), rtol=1e-5, atol=1e-5)
    assert graph_manager.counters.replays == before + 4


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["model", "metadata"])
@kinds
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_tails_where_a_step_writes_into_its_inputs(
    mode: str, kind: str, writer: str, device: str
) -> None:
    """A tail that drifts from -1 would reach slots of other requests."""

    def shifting(batch: Batch, descriptor: Any, buffers: dict[str, Any]) -> Metadata:
        if writer == "metadata":
            buffers["slot_mapping"].add_(1)
        return Metadata(buffers["query_start_loc"])

    slots = InputBuffer("slot_mapping", ("tokens",), torch.int64, -1)
    model = Caching(shifts=writer == "model")
    inputs = (*INPUTS, slots)
    graph_manager = manager(mode, kind, device, inputs=inputs, model=model, metadata=shifting)
    graph_manager.capture()
    model.cache.zero_()
    for _ in range(3):  # in the largest size, of which each step leaves the whole tail clean
        batch = requests(SIZES[-1] - 7, device=device)
        graph_manager.run(with_inputs(batch, slot_mapping=torch.arange(20, 29, device=device)))
        assert model.cache[21:30].any(1).all()
        assert not model.cache[1:21].any()
    assert graph_manager.counters.replays >= 3


def test_tails_where_the_engine_writes_itself(device: str) -> None:
    graph_manager = manager("FULL", device=device)
    graph_manager.capture()
    buffers = graph_manager.inputs.buffers

    def written(count: int) -> Batch:
        batch = requests(count, device=device)
        for name in ("input_ids", "positions"):
            buffers[name].fill_(9)  # all of it
            buffers[name][:count].copy_(batch.inputs[name])
        fronts = {name: buffers[name][:count] for name in ("input_ids", "positions")}
        return with_inputs(batch, **fronts)

    def tail(count: int) -> list[int]:
        return graph_manager.inputs.views(16, 8)["positions"][count:].tolist()

    graph_manager.run(requests(9, device=device))
    with pytest.raises(InputBufferError):
        graph_manager.run(with_inputs(written(16), input_ids=torch.zeros(3)))
    graph_manager.run(requests(10, device=device))
    assert tail(10) == [0] * 6
    graph_manager.run(written(11))
    assert tail(11) == [0] * 5
    written(16)
    graph_manager.run_fullgraph(16)
    graph_manager.run(requests(12, device=device))
    assert tail(12) == [0] * 4


def test_dummies_have_sequences_that_are_not_empty() -> None:
    lengths: dict[Any, list[int]] = {}

    def noted(batch: Batch, descriptor: BatchDescriptor, buffers: Any) -> Metadata:
        lengths[descriptor] = buffers["seq_lens"].tolist()
        return metadata(batch, descriptor, buffers)

    spec = InputBuffer("seq_lens", ("reqs",), torch.int32, argument=False, dummy_value="num_tokens")
    graph_manager = manager("FULL", inputs=(*INPUTS, spec), metadata=noted)
    graph_manager.capture()
    assert lengths[BatchDescriptor(4, 4)] == [4] * 4
    assert lengths[BatchDescriptor(16, 8)] == [16] * 8
    graph_manager.run(with_inputs(requests(3), seq_lens=torch.tensor([3], dtype=torch.int32)))
    assert lengths[BatchDescriptor(4, 4)] == [3, 0, 0, 0]
    assert InputBuffer("s", ("reqs",), torch.int32, 1, dummy_value=7).dummy(4, 2).tolist() == [7, 7]
    for bad in ("tokens", 0.5, 2**40):
        with pytest.raises(InputBufferError, match=f"dummy_value={bad!r}"):
            InputBuffer("s", ("reqs",), torch.int32, dummy_value=bad)


# ---------------------------------------------------------------- results


class Mrope(Decoder):
    """Three positions a token; returns the last hidden state and the list of the others."""

    def __init__(self) -> None:
        super().__init__(aux=True)

    def forward(self, input_ids, positions):
        return super().forward(input_ids, positions[0] + positions[1] * positions[2] % 3)


@pytest.mark.slow
@kinds
def test_three_positions_a_token_and_several_hidden_states(kind: str, device: str) -> None:
    graph_manager = manager(
        kind=kind, device=device, model=Mrope(), inputs=(INPUTS[0], MROPE, INPUTS[2])
    )
    graph_manager.capture()
    modes = []
    for lengths, decode in (((5, 2), False), ((1,) * 6, True), ((16,), False), ((1,) * 3, True)):
        batch = requests(*lengths, device=device, decode=decode)
        positions = torch.randint(1, 6, (3, batch.num_tokens), device=device)
        batch = with_inputs(batch, positions=positions)
        modes.append(graph_manager.dispatched(batch).mode)
        check(graph_manager, batch)
    assert modes == [PIECEWISE, FULL, PIECEWISE, FULL]
    views = graph_manager.inputs.views(4, 4)["positions"]
    assert views.shape == (3, 4)
    assert views.data_ptr() == graph_manager.inputs.buffers["positions"].data_ptr()


def test_results_belong_to_the_caller(device: str) -> None:
    class Named(Decoder):
        def forward(self, input_ids, positions, inputs_embeds=None):
            return {"hidden": super().forward(input_ids, positions)}

    graph_manager = manager("FULL", device=device, model=Named())
    graph_manager.capture()
    for lengths in ((3, 1), (3, 1), (8,), (3, 1)):  # padded, padded, exact
        result = check(graph_manager, requests(*lengths, device=device))
        result["hidden"].unsqueeze_(0)
        result["hidden"] = None
        result["more"] = 1


def test_outputs_by_request(device: str) -> None:
    class Last(Decoder):
        """Hidden states [n, D], and one row for each request."""

        def forward(self, input_ids, positions, inputs_embeds=None, query_start_loc=None):
            hidden = super().forward(input_ids, positions)
            return hidden, hidden[(query_start_loc[1:] - 1).clamp(min=0)]

    starts = InputBuffer("query_start_loc", ("reqs+1",), torch.int32, None)
    settings = {"device": device, "model": Last(), "inputs": (*INPUTS[:2], starts)}
    graph_manager = manager("FULL", outputs=("tokens", "reqs"), **settings)
    graph_manager.capture()
    for lengths in ((3, 2, 1), (4, 4), (1,) * 8):
        batch = requests(*lengths, device=device)
        results = graph_manager.run(batch)
        assert [result.shape[0] for result in results] == [batch.num_tokens, batch.num_reqs]
        hidden = eager(Decoder.forward.__get__(inner(graph_manager)), batch)
        ends = (batch.inputs["query_start_loc"][1:] - 1).long()
        torch.testing.assert_close(results, (hidden, hidden[ends]), rtol=1e-5, atol=1e-5)
    for outputs, message in (
        ("rows", "expected 'tokens'"),
        (("tokens",), "names 1"),
        ("tokens", "expected a tensor with 16 rows"),
    ):
        with pytest.raises(ManagerError, match=message):
            manager("FULL", outputs=outputs, **settings).capture()


def test_results_with_gradients_are_not_kept() -> None:
    graph_manager = manager("FULL", inference_mode=False)
    with torch.no_grad():
        graph_manager.capture()
    results = [graph_manager.run(requests(3)) for _ in range(2)]
    assert all(result.requires_grad for result in results)
    died = weakref.ref(results[0])
    del results
    gc.collect()
    assert died() is None


# ---------------------------------------------------------------- metadata


class Slotted:
    __slots__ = ("starts",)

    def __init__(self, starts: torch.Tensor) -> None:
        self.starts = starts


@dataclass
class Fields:
    kind: str = "decode"


class Added(Fields):
    """What a subclass of a dataclass adds is no field of it."""

    def __init__(self, starts: torch.Tensor) -> None:
        super().__init__()
        self.starts = starts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "held", "path"),
    [
        ("attn_metadata", lambda starts: starts, ""),
        ("slot_mapping", lambda starts: [1, starts], r"\[1\]"),
        ("slot_mapping", lambda starts: MappingProxyType({"at": starts}), r"\['at'\]"),
        ("slot_mapping", Slotted, r"\.starts"),
        ("slot_mapping", Added, r"\.starts"),
    ],
    ids=["tensor", "list", "mapping", "slots", "dataclass"],
)
def test_metadata_of_another_step_is_never_read(
    field: str, held: Any, path: str, device: str
) -> None:
    """New tensors at each step, where a graph reads those of its capture."""
    kept: list[Any] = []

    def fresh(batch: Batch, descriptor: Any, buffers: Any) -> Metadata:
        kept.append(buffers["query_start_loc"].clone())
        return replace(Metadata(buffers["query_start_loc"]), **{field: held(kept[-1])})

    graph_manager = manager("FULL", device=device, metadata=fresh)
    graph_manager.capture()
    message = f"(?s){field}{path} is at .*checks='-metadata'"
    with pytest.raises(AddressChangedError, match=message):
        graph_manager.run(requests(3, device=device))
    graph_manager = manager("FULL", device=device, metadata=fresh, checks="-metadata")
    graph_manager.capture()
    graph_manager.run(requests(3, device=device))


class ReadsMore(Decoder):
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        scale = get_forward_context().additional["scale"]
        return super().forward(input_ids, positions) * scale


@pytest.mark.slow
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("kind", [dict, MappingProxyType])
def test_a_stream_to_wait_for_is_not_compared(kind: Any, waits: bool, device: str) -> None:
    stream = torch.cuda.Stream() if device == "cuda" else object()

    def extended(batch: Batch, descriptor: Any, buffers: Any) -> Metadata:
        additional = {"scale": scale, "inputs_ready": stream if waits else None}
        return Metadata(buffers["query_start_loc"], additional=kind(additional))

    model, scale = ReadsMore(), 2.0
    graph_manager = manager("FULL", "plain", device, model=model, metadata=extended)
    graph_manager.capture()
    for step in range(1, 4):
        batch = requests(step, device=device)
        arguments = {name: batch.inputs[name] for name in ("input_ids", "positions")}
        starts = batch.inputs["query_start_loc"]
        with torch.inference_mode(), set_forward_context(starts, scale=scale):
            expected = model(**arguments)
        torch.testing.assert_close(graph_manager.run(batch), expected, rtol=1e-5, atol=1e-5)
        assert graph_manager.counters.replays == step
    scale = 3.0
    with pytest.raises(HostValueChangedError, match=r"additional\['scale'\] is 3\.0"):
        graph_manager.run(requests(3, device=device))


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "mode"), [(3, FULL), (20, NONE)])
def test_a_step_that_nothing_else_delays_waits(
    tokens: int, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(
        "cgcompile.serving.manager.wait_for_inputs", lambda ready, device: waited.append(ready)
    )

    def extended(batch: Batch, descriptor: Any, buffers: Any) -> Metadata:
        return Metadata(buffers["query_start_loc"], additional={"inputs_ready": batch})

    graph_manager = manager("FULL", metadata=extended)
    graph_manager.capture()
    waited.clear()
    batch = requests(tokens)
    assert graph_manager.dispatched(batch).mode is mode
    check(graph_manager, batch)
    assert waited == [batch]
