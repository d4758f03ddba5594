"""What models take and give beside tokens: a cache with slots, three positions a token, several
hidden states; and batches at the edges."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch
from lib.manager import (
    FULL,
    INPUTS,
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

import cgcompile
from cgcompile.config import CompilationConfig
from cgcompile.errors import AddressChangedError, BatchError, InputBufferError, ManagerError
from cgcompile.reasons import Reason
from cgcompile.serving.batch import Batch, GraphHooks, Metadata
from cgcompile.serving.buffers import InputBuffer
from cgcompile.serving.manager import CudaGraphManager
from cgcompile.serving.plan import Axis

KINDS = ("plain", "compiled")
SLOTS = 40
MROPE = InputBuffer("positions", (3, "tokens"), torch.int64, 0)
SLOT_MAPPING = InputBuffer("slot_mapping", ("tokens",), torch.int64, 0)


class Caching(Decoder):
    """Writes each token's hidden state to its slot; slot 0 is for padding."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(SLOTS, D))

    def forward(self, input_ids, positions, slot_mapping):
        hidden = super().forward(input_ids, positions)
        self.cache.index_copy_(0, slot_mapping, hidden)
        return hidden


class Mrope(Decoder):
    """Three positions a token; returns the last hidden state and the list of the others."""

    def __init__(self) -> None:
        super().__init__(aux=True)

    def forward(self, input_ids, positions):
        return super().forward(input_ids, positions[0] + positions[1] * positions[2] % 3)


def pairs(found: Any, expected: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield found[0], expected[0]
    yield from zip(found[1], expected[1], strict=True)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_never_reaches_the_cache(kind: str, device: str) -> None:
    """The slots of a large batch are behind the real rows of a small one in the same buffer."""
    made = manager(kind=kind, device=device, model=Caching(), inputs=(*INPUTS, SLOT_MAPPING))
    made.capture()
    model = getattr(made.model, "_orig_mod", made.model)
    cache = model.cache
    assert made.counters.captures > 0
    before = made.counters.replays
    for lengths, decode in (((16,), False), ((3, 2), False), ((1,) * 8, True), ((1,) * 5, True)):
        batch = requests(*lengths, device=device, decode=decode)
        slots = 1 + torch.randperm(SLOTS - 1, device=device)[: batch.num_tokens]
        batch = replace(batch, inputs={**batch.inputs, "slot_mapping": slots})
        cache.normal_()
        expected = cache.clone()
        found = made.run(batch)
        expected[slots] = found
        assert torch.equal(cache[1:], expected[1:])
        torch.testing.assert_close(found, eager(model, batch), rtol=1e-5, atol=1e-5)
    assert made.counters.replays == before + 4


class Shifting(Caching):
    """Counts slots from 1, in the very buffer; or its metadata does."""

    def forward(self, input_ids, positions, slot_mapping):
        return super().forward(input_ids, positions, slot_mapping.add_(1))


@pytest.mark.parametrize("writer", ["model", "metadata"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_tails_where_a_step_writes_into_its_inputs(
    mode: str, kind: str, writer: str, device: str
) -> None:
    """A tail that drifts from -1 would reach slots that are other requests'."""

    def shifting(batch: Batch, descriptor: Any, buffers: dict[str, Any]) -> Metadata:
        buffers["slot_mapping"].add_(1)
        return Metadata(buffers["query_start_loc"])

    slots = InputBuffer("slot_mapping", ("tokens",), torch.int64, -1)
    given = {"model": Shifting()} if writer == "model" else {"model": Caching()}
    if writer == "metadata":
        given["metadata"] = shifting
    made = manager(mode, kind, device, inputs=(*INPUTS, slots), **given)
    made.capture()
    cache = given["model"].cache
    cache.zero_()
    for _ in range(3):  # in the largest size, of which each step leaves the whole tail clean
        batch = requests(SIZES[-1] - 7, device=device)
        where = torch.arange(20, 29, device=device)
        made.run(replace(batch, inputs={**batch.inputs, "slot_mapping": where}))
        assert cache[21:30].any(1).all()
        assert not cache[1:21].any()
    assert made.counters.replays >= 3


@pytest.mark.parametrize("kind", KINDS)
def test_three_positions_a_token_and_several_hidden_states(kind: str, device: str) -> None:
    made = manager(kind=kind, device=device, model=Mrope(), inputs=(INPUTS[0], MROPE, INPUTS[2]))
    made.capture()
    modes = []
    for lengths, decode in (((5, 2), False), ((1,) * 6, True), ((16,), False), ((1,) * 3, True)):
        batch = requests(*lengths, device=device, decode=decode)
        positions = torch.randint(1, 6, (3, batch.num_tokens), device=device)
        batch = replace(batch, inputs={**batch.inputs, "positions": positions})
        modes.append(made.dispatched(batch).mode)
        expected = eager(getattr(made.model, "_orig_mod", made.model), batch)
        for found, wanted in pairs(made.run(batch), expected):
            assert found.shape == wanted.shape
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert modes == [PIECEWISE, FULL, PIECEWISE, FULL]
    views = made.inputs.views(4, 4)["positions"]
    assert views.shape == (3, 4)
    assert views.data_ptr() == made.inputs.buffers["positions"].data_ptr()
    del batch.inputs["positions"]
    with pytest.raises(InputBufferError, match="'positions'"):
        made.run(batch)


def test_the_hidden_states_of_a_size(device: str) -> None:
    made = manager(device=device, model=Mrope(), inputs=(INPUTS[0], MROPE, INPUTS[2]))
    made.capture()
    for size in (8, 2, 4):
        batch = requests(*[1] * size, device=device, decode=True)
        positions = torch.randint(1, 6, (3, size), device=device)
        batch = replace(batch, inputs={**batch.inputs, "positions": positions})
        made.inputs.stage(batch.inputs, (size, size), (size, size))
        for found, wanted in pairs(made.run_fullgraph(size), eager(made.model, batch)):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_at_the_edges(kind: str, device: str) -> None:
    made = manager(kind=kind, device=device)
    made.capture()
    for lengths, decode, mode in (
        ((1,), True, FULL),
        ((1,), False, PIECEWISE),
        ((SIZES[-1],), False, PIECEWISE),
        ((SIZES[-1] + 1,), False, NONE),
        ((64,), False, NONE),
    ):
        batch = requests(*lengths, device=device, decode=decode)
        assert made.dispatched(batch).mode is mode
        expected = eager(getattr(made.model, "_orig_mod", made.model), batch)
        torch.testing.assert_close(made.run(batch), expected, rtol=1e-5, atol=1e-5)
    empty = {name: value[:0] for name, value in batch.inputs.items()}
    nothing = Batch(0, 0, {**empty, "query_start_loc": batch.inputs["query_start_loc"][:1]})
    assert made.run(nothing).shape == (0, D)
    assert made.run(Batch(0, 0, {})) is None  # no work, and not counted
    assert made.statistics.reasons() == {Reason.OVERSIZE: 2, Reason.EMPTY_BATCH: 1}
    with pytest.raises(BatchError, match="num_reqs = 0"):
        made.run(replace(batch, num_reqs=0))
    with pytest.raises(InputBufferError, match="room for 64"):
        made.run(requests(65, device=device))


# ---------------------------------------------------------------- what an engine does beside


def test_what_is_returned_is_the_callers_own(device: str) -> None:
    class Named(Decoder):
        def forward(self, input_ids, positions, inputs_embeds=None):
            return {"hidden": super().forward(input_ids, positions)}

    made = manager("FULL", device=device, model=Named())
    made.capture()
    for lengths in ((3, 1), (3, 1), (8,), (3, 1)):  # padded, padded, exact
        batch = requests(*lengths, device=device)
        found = made.run(batch)
        expected = eager(made.model, batch)["hidden"]
        torch.testing.assert_close(found["hidden"], expected, rtol=1e-5, atol=1e-5)
        found["hidden"].unsqueeze_(0)
        found["hidden"] = None
        found["more"] = 1


@pytest.mark.parametrize("rule", ["pad_up", "ignored"])
def test_axes_that_cannot_tell_an_optional_input(rule: str) -> None:
    embeds = InputBuffer("inputs_embeds", ("tokens", D), torch.float32, 0.0, optional=True)
    axis = Axis("inputs_embeds", (True,) if rule == "pad_up" else (), rule)
    with pytest.raises(ManagerError, match="no axis of that name"):
        manager(dispatch=dispatcher("FULL", axes=[axis]), inputs=(*INPUTS, embeds))


def test_metadata_of_another_step_is_never_read(device: str) -> None:
    """It makes new tensors at each step, where a graph reads those of its capture."""
    kept: list[Any] = []

    def fresh(batch: Batch, descriptor: Any, buffers: Any) -> Metadata:
        kept.append(buffers["query_start_loc"].clone())
        return Metadata({"starts": kept[-1], "host": [1, "x"]})

    made = manager("FULL", device=device, metadata=starts_of(fresh))
    made.capture()
    with pytest.raises(
        AddressChangedError, match=r"(?s)attn_metadata is at .*check_metadata=False"
    ):
        made.run(requests(3, device=device))
    made = manager("FULL", device=device, metadata=starts_of(fresh), check_metadata=False)
    made.capture()
    made.run(requests(3, device=device))


class Slotted:
    __slots__ = ("starts",)

    def __init__(self, starts: torch.Tensor) -> None:
        self.starts = starts


@dataclass
class Fields:
    """What a subclass of a dataclass adds is no field of it."""

    kind: str = "decode"


class Added(Fields):
    def __init__(self, starts: torch.Tensor) -> None:
        super().__init__()
        self.starts = starts


@pytest.mark.parametrize(
    ("held", "path"),
    [
        (lambda starts: MappingProxyType({"starts": starts}), r"\['starts'\]"),
        (Slotted, r"\.starts"),
        (Added, r"\.starts"),
    ],
    ids=["mapping", "slots", "dataclass"],
)
def test_metadata_is_looked_into_whatever_holds_it(held: Any, path: str) -> None:
    kept: list[Any] = []

    def fresh(batch: Batch, descriptor: Any, buffers: Any) -> Metadata:
        starts = buffers["query_start_loc"].clone()
        kept.append(starts)
        return Metadata(buffers["query_start_loc"], held(starts))

    made = manager("FULL", metadata=fresh)
    made.capture()
    with pytest.raises(AddressChangedError, match=f"slot_mapping{path} is at "):
        made.run(requests(3))


def starts_of(build: Any) -> Any:
    def metadata(batch: Batch, descriptor: Any, buffers: Any) -> Metadata:
        return Metadata(build(batch, descriptor, buffers).attn_metadata["starts"])

    return metadata


def test_tails_where_the_engine_writes_itself(device: str) -> None:
    made = manager("FULL", device=device)
    made.capture()
    buffers = made.inputs.buffers

    def written(count: int) -> Batch:
        batch = requests(count, device=device)
        for name in ("input_ids", "positions"):
            buffers[name].fill_(9)  # all of it
            buffers[name][:count].copy_(batch.inputs[name])
        fronts = {name: buffers[name][:count] for name in ("input_ids", "positions")}
        return replace(batch, inputs={**batch.inputs, **fronts})

    def tail(count: int) -> list[int]:
        return made.inputs.views(16, 8)["positions"][count:].tolist()

    made.run(requests(9, device=device))
    refused = written(16)
    with pytest.raises(InputBufferError):
        made.run(replace(refused, inputs={**refused.inputs, "input_ids": torch.zeros(3)}))
    made.run(requests(10, device=device))
    assert tail(10) == [0] * 6
    made.run(written(11))
    assert tail(11) == [0] * 5
    written(16)
    made.run_fullgraph(16)
    made.run(requests(12, device=device))
    assert tail(12) == [0] * 4


def test_a_graph_of_a_size_and_variant() -> None:
    embeds = InputBuffer("inputs_embeds", ("tokens", D), torch.float32, 0.0, optional=True)
    axes = [Axis("inputs_embeds", (False, True))]
    made = manager(dispatch=dispatcher("FULL", axes=axes), inputs=(*INPUTS, embeds))
    made.capture()
    batch = requests(*[1] * 8, extra=(False,))
    made.inputs.stage(batch.inputs, (8, 8), (8, 8))
    found, expected = made.run_fullgraph(8, extra=(False,)), eager(made.model, batch)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ManagerError, match="No cudagraph for 8 tokens"):
        made.run_fullgraph(8)


def test_a_graph_is_not_replayed_where_gradients_are_due() -> None:
    made = manager("FULL", inference_mode=False)
    with torch.no_grad():
        made.capture()
        made.run_fullgraph(8)
    before = made.counters.replays
    with pytest.raises(ManagerError, match="gradients are asked for"):
        made.run_fullgraph(8)
    assert made.counters.replays == before
    results = [made.run(requests(3)) for _ in range(2)]
    assert all(each.requires_grad for each in results)
    died = weakref.ref(results[0])
    del results
    gc.collect()
    assert died() is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_step_that_its_graph_could_not_serve_is_no_hit(mode: str, kind: str) -> None:
    made = manager(mode, kind, inference_mode=False)
    with torch.no_grad():
        made.capture()
        made.run(requests(3, 2))
    assert made.run(requests(3, 2)).requires_grad
    hits = {(row.mode, row.reason, row.ran) for row in made.statistics.rows() if row.hits}
    assert hits == {(mode, None, 8), ("NONE", Reason.GRADIENTS, 5)}
    with torch.no_grad():
        made.run(requests(3, 2))
    assert "2 of 3 steps on graphs" in str(cgcompile.coverage(made))


def test_a_step_on_other_weights_is_no_hit() -> None:
    made = manager("PIECEWISE", "compiled")
    made.capture()
    model = made.model._orig_mod
    made.run(requests(3, 2))
    model.layers[0].qkv.weight = torch.nn.Parameter(torch.randn_like(model.layers[0].qkv.weight))
    batch = requests(4, 2)
    torch.testing.assert_close(made.run(batch), eager(model, batch), rtol=1e-5, atol=1e-5)
    assert made.statistics.reasons() == {Reason.WARMING: 1}


def test_inputs_that_want_gradients() -> None:
    embeds = InputBuffer("inputs_embeds", ("tokens", D), torch.float32, 0.0, optional=True)
    axes = [Axis("inputs_embeds", (True,))]
    made = manager(
        dispatch=dispatcher("FULL", axes=axes), inputs=(*INPUTS, embeds), inference_mode=False
    )
    batch = requests(3, extra=(True,))
    wanting = torch.randn(3, D, requires_grad=True)
    batch = replace(batch, inputs={**batch.inputs, "inputs_embeds": wanting})
    with pytest.raises(InputBufferError, match="'inputs_embeds' requires grad"):
        made.run(batch)
    with torch.no_grad():
        made.run(batch)
    assert not made.inputs.buffers["inputs_embeds"].requires_grad


def test_lazily_what_cannot_be_captured_runs_plain() -> None:
    class Picky(Decoder):
        def forward(self, input_ids, positions, inputs_embeds=None):
            made = super().forward(input_ids, positions)
            return made * float(made.mean() * 0 + 1)  # reads the device

    made = manager("FULL", model=Picky(), lazily=True)
    for _ in range(4):
        batch = requests(16)
        torch.testing.assert_close(made.run(batch), eager(made.model, batch), rtol=1e-5, atol=1e-5)
    chosen = made.dispatched(requests(16))
    assert chosen.mode is NONE
    assert "not permitted when stream is capturing" in chosen.why.detail


def test_hooks_end_where_a_step_raises() -> None:
    calls: list[str] = []

    class Noting(GraphHooks):
        def __init__(self, name: str, fails: bool = False) -> None:
            self.name, self.fails = name, fails

        def before_replay(self) -> None:
            if self.fails:
                raise ValueError(self.name)
            calls.append(f"before {self.name}")

        def after_replay(self) -> None:
            calls.append(f"after {self.name}")

    made = manager("FULL", hooks=[Noting("a"), Noting("b")])
    made.capture()
    batch = requests(3)
    with pytest.raises(InputBufferError):
        made.run(replace(batch, inputs={**batch.inputs, "positions": torch.zeros(3)}))
    assert calls == ["before a", "before b", "after a", "after b"]
    made = manager("FULL", hooks=[Noting("c"), Noting("d", fails=True)])
    made.capture()
    del calls[:]
    with pytest.raises(ValueError, match="d"):
        made.run(batch)
    assert calls == ["before c", "after c"]


class Called:
    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, **given: Any) -> Any:
        return self._model(**given)


@pytest.mark.parametrize(
    "wrapped",
    [partial, Called, lambda model: lambda **given: model(**given)],
    ids=["partial", "object", "closure"],
)
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_weights_of_a_model_that_is_no_module(mode: str, wrapped: Any) -> None:
    made = manager(mode, "plain")
    decoder = made.model
    op = cgcompile.SplittingOp("cgserve::attend", support=cgcompile.AttentionCGSupport.ALWAYS)
    config = CompilationConfig(splitting_ops=(op,), capture_device="host")
    again = CudaGraphManager(
        wrapped(decoder), dispatcher(mode), INPUTS, device="cpu", metadata=metadata, config=config
    )
    again.capture()
    before = again.run(requests(3)).clone()
    with torch.no_grad():
        decoder.places.weight.mul_(2)  # in place: seen
    assert not torch.equal(again.run(requests(3)), before)
    decoder.places.weight = torch.nn.Parameter(decoder.places.weight * 2)
    with pytest.raises(AddressChangedError, match=r"weight 'places\.weight'"):
        again.run(requests(3))
