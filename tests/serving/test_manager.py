"""The manager: every mode on a compiled and on a plain model, captures, look-ups, hooks, weights."""

import gc
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from lib.manager import (
    EMBEDS,
    FULL,
    INPUTS,
    MAX_REQS,
    NONE,
    PIECEWISE,
    SIZES,
    D,
    Decoder,
    Picky,
    check,
    dispatcher,
    eager,
    inner,
    manager,
    metadata,
    requests,
)
from torch import nn

import cgcompile
from cgcompile import BatchDescriptor, CUDAGraphMode
from cgcompile.errors import (
    AddressChangedError,
    BatchError,
    ConfigError,
    DispatchError,
    ManagerError,
)
from cgcompile.graphs.capture import inside_capture
from cgcompile.reasons import Reason
from cgcompile.serving import Axis, Batch, CudaGraphManager, GraphHooks, LoraCases, Metadata
from cgcompile.serving.errors import InputBufferError

MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
kinds = pytest.mark.parametrize("kind", ["plain", "compiled"])

# (lengths, decode, the mode it runs in by the mode of the manager)
BATCHES = (
    ((1,), True, "NPFFF"),
    ((1,), False, "NPFNP"),
    ((1, 1, 1), True, "NPFFF"),
    ((1,) * 8, True, "NPFFF"),
    ((1,) * 8, False, "NPFNP"),  # prompts of one token each are no decode
    ((3, 2, 1), False, "NPFNP"),
    ((7,), False, "NPFNP"),
    ((16,), False, "NPFNP"),
    ((17,), False, "NNNNN"),
    ((64,), False, "NNNNN"),
)
BY_LETTER = {"N": NONE, "P": PIECEWISE, "F": FULL}


@pytest.mark.slow
@kinds
@pytest.mark.parametrize("mode", MODES)
def test_every_batch_equals_eager_in_its_mode(mode: str, kind: str, device: str) -> None:
    graph_manager = manager(mode, kind, device)
    assert graph_manager.needs_capture() is (mode != "NONE")
    for bulk in graph_manager.capture().values():
        assert bulk.missing == ()
    modes: Counter[Any] = Counter()
    before = graph_manager.counters.replays
    for _ in range(2):
        for lengths, decode, expected in BATCHES:
            first, second = (requests(*lengths, device=device, decode=decode) for _ in range(2))
            assert not torch.equal(
                check(graph_manager, first).clone(), check(graph_manager, second)
            )
            modes[BY_LETTER[expected[MODES.index(mode)]]] += 2
    assert graph_manager.counters.replays - before == modes[PIECEWISE] + modes[FULL]
    counted: Counter[Any] = Counter()
    for cell in graph_manager.statistics.cells():
        counted[CUDAGraphMode[cell.mode]] += cell.hits
    assert counted == +modes


def test_batches_without_rows_and_with_too_many() -> None:
    graph_manager = manager()
    graph_manager.capture()
    batch = requests(3)
    empty = {name: value[:0] for name, value in batch.inputs.items()}
    nothing = Batch(0, 0, {**empty, "query_start_loc": batch.inputs["query_start_loc"][:1]})
    assert graph_manager.run(nothing).shape == (0, D)
    assert graph_manager.run(Batch(0, 0, {})) is None  # no work, and not counted
    assert graph_manager.run(None) is None
    assert graph_manager.statistics.reasons() == {Reason.EMPTY_BATCH: 1}
    with pytest.raises(BatchError, match="num_reqs = 0"):
        graph_manager.run(Batch(3, 0, batch.inputs))
    with pytest.raises(InputBufferError, match="room for 64"):
        graph_manager.run(requests(65))


def test_excluded_modes() -> None:
    graph_manager = manager()
    graph_manager.capture()
    batch = requests(1, 1, 1, decode=True)
    check(graph_manager, batch, invalid_modes={FULL})
    check(graph_manager, batch, valid_modes=[NONE])
    counted = {cell.mode: cell.hits for cell in graph_manager.statistics.cells() if cell.hits}
    assert counted == {"PIECEWISE": 1, "NONE": 1}


def test_each_reason_of_a_lesser_mode_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    graph_manager = manager("FULL")
    graph_manager.capture()
    with caplog.at_level(logging.INFO, logger="cgcompile.serving"):
        for count in (20, 3, 21, 24):
            graph_manager.run(requests(count))
    lines = [line for line in caplog.messages if line.startswith("a step")]
    why = "oversize: more than 16 tokens: no graph is as large"
    assert [line.partition(". Remedy")[0] for line in lines] == [
        f"a step of 20 tokens runs without a CUDA graph: {why}"
    ]


# ---------------------------------------------------------------- captures


def test_each_phase_gets_fresh_inputs() -> None:
    seen: list[tuple[str, int, Any]] = []

    def prepare(descriptor: BatchDescriptor, phase: str) -> Batch:
        batch = requests(descriptor.num_tokens)
        seen.append((phase, descriptor.num_tokens, batch))
        return batch

    manager("PIECEWISE", prepare=prepare).capture()
    sizes = sorted(SIZES, reverse=True)
    phases = ("warmup", "capture")
    assert [entry[:2] for entry in seen] == [(phase, size) for phase in phases for size in sizes]
    assert len({id(batch) for _, _, batch in seen}) == 10


@pytest.mark.slow
def test_a_graph_for_mixed_batches_is_captured_with_a_long_query() -> None:
    seen: dict[BatchDescriptor, Any] = {}

    def noted(batch: Batch, descriptor: BatchDescriptor, buffers: Any) -> Metadata:
        starts = buffers["query_start_loc"].tolist()
        seen[descriptor] = (batch.num_reqs, batch.max_query_len, starts)
        return metadata(batch, descriptor, buffers)

    manager("FULL", metadata=noted).capture()
    assert seen[BatchDescriptor(4, 4)] == (4, 4, [0, 1, 2, 3, 4])
    assert seen[BatchDescriptor(16, 8)] == (8, 16, [0, 2, 4, 6, 8, 10, 12, 14, 16])
    seen.clear()
    dispatch = dispatcher("FULL_DECODE_ONLY", query_lens={3: [12, 24]})
    manager(dispatch=dispatch, metadata=noted).capture()
    assert seen[BatchDescriptor(12, 4, True)] == (4, 3, [0, 3, 6, 9, 12])


@pytest.mark.slow
def test_garbage_is_collected_once_for_all_sets() -> None:
    graph_manager = manager("FULL_AND_PIECEWISE", "compiled")
    collections: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collections.append(info["generation"])

    gc.disable()
    gc.callbacks.append(note)
    try:
        sets = graph_manager.capture()
    finally:
        gc.callbacks.remove(note)
        gc.enable()
    assert len(sets) == 2
    assert all(bulk.captured and not bulk.missing for bulk in sets.values())
    assert collections[:1] == [1]
    assert 2 not in collections  # it takes longer than the captures


def test_garbage_of_warm_ups_is_collected() -> None:
    """Tensors in cycles of objects would add up over all sizes of all sets."""
    enabled: dict[str, list[bool]] = {"warmup": [], "capture": []}
    graph_manager = manager("FULL_AND_PIECEWISE", prepare=lambda key, phase: noted(key, phase))

    def noted(key: BatchDescriptor, phase: str) -> Batch:
        enabled[phase].append(gc.isenabled())
        return graph_manager.dummy_batch(key, phase)

    graph_manager.capture()
    assert set(enabled["warmup"]) == {True}
    assert set(enabled["capture"]) == {False}


def test_captures_that_are_refused() -> None:
    graph_manager = manager("FULL", metadata=lambda batch, descriptor, buffers: Metadata())
    with pytest.raises(ManagerError, match="no attention metadata"):
        graph_manager.capture()
    graph_manager = manager("FULL")
    for mode in (NONE, "FULL"):
        with pytest.raises(ManagerError, match="expected PIECEWISE or FULL"):
            graph_manager.capture_graph(mode, BatchDescriptor(4, 4))
    with pytest.raises(BatchError):
        graph_manager.capture_graph(FULL, BatchDescriptor(5, 5))
    assert graph_manager.counters.calls == 0
    graph_manager.capture_graph(FULL, BatchDescriptor(4, 4))
    for call in (
        lambda: graph_manager.capture_graph(FULL, BatchDescriptor(4, 4)),
        lambda: graph_manager.capture(max_graph_bytes=1 << 30),
        graph_manager.plan,
    ):
        with pytest.raises(ManagerError, match="captured already"):
            call()
    check(graph_manager, requests(1, 2))
    check(graph_manager, requests(7))
    assert graph_manager.statistics.reasons() == {Reason.NOT_CAPTURED: 1}
    graph_manager.release()
    graph_manager.capture()
    check(graph_manager, requests(7))


def test_a_second_capture_captures_what_is_missing(device: str) -> None:
    model = Picky(4)
    graph_manager = manager("FULL", device=device, model=model, checks="-state")
    (bulk,) = graph_manager.capture().values()
    assert [key.num_tokens for key, _ in bulk.missing] == [4]
    check(graph_manager, requests(3, device=device))  # on the next larger one
    captures = graph_manager.counters.captures
    model.sizes = ()
    (bulk,) = graph_manager.capture().values()
    assert ([key.num_tokens for key in bulk.captured], bulk.missing) == ([4], ())
    assert graph_manager.counters.captures == captures + 1
    assert graph_manager.get_cudagraph_size(3) == 4
    replays = graph_manager.counters.replays
    for lengths in ((3,), (2,), (7,), (4,)):
        check(graph_manager, requests(*lengths, device=device))
    assert graph_manager.counters.replays == replays + 4
    assert not graph_manager.statistics.reasons()
    graph_manager.capture()  # nothing is missing
    assert graph_manager.counters.captures == captures + 1
    with torch.no_grad():
        model.embed.weight = torch.nn.Parameter(model.embed.weight * 2)
    with pytest.raises(AddressChangedError):  # the weights of the graphs that exist are guarded
        graph_manager.run(requests(3, device=device))


def test_one_size_that_fails(device: str) -> None:
    graph_manager = manager("FULL", device=device, model=Picky(4))
    (bulk,) = graph_manager.capture().values()
    assert [key.num_tokens for key in bulk.captured] == [16, 8, 2, 1]
    assert [key.num_tokens for key, _ in bulk.missing] == [4]
    for lengths in ((3,), (2,), (7,)):
        check(graph_manager, requests(*lengths, device=device))
    assert not graph_manager.statistics.reasons()
    assert graph_manager.get_cudagraph_size(3) == 8  # the next larger one


@kinds
def test_lazily(kind: str, device: str) -> None:
    announced: list[int] = []

    class Noting(GraphHooks):
        def before_full_capture(self) -> None:
            announced.append(graph_manager.counters.captures)

    graph_manager = manager("FULL_AND_PIECEWISE", kind, device, lazily=True, hooks=[Noting()])
    counted = []
    for step in range(5):
        for wrapper in graph_manager.wrappers:
            wrapper.closed = step == 1  # a capture that does not begin is not announced
        check(graph_manager, requests(1, 1, 1, device=device, decode=True))
        counted.append(
            (graph_manager.counters.captures, graph_manager.counters.replays, len(announced))
        )
    warm, closed, *others = counted
    assert warm == (0, 0, 0)
    assert closed[1:] == (0, 0)
    assert [(replays, calls) for _, replays, calls in others] == [(0, 1), (1, 1), (2, 1)]
    captures, replays = graph_manager.counters.captures, graph_manager.counters.replays
    for _ in range(3):
        check(graph_manager, requests(5, device=device))
    assert (graph_manager.counters.captures, graph_manager.counters.replays) == (
        captures + 1,
        replays + 1,
    )
    assert len(announced) == 1  # by piece: not announced


def test_lazily_what_cannot_be_captured_runs_plain() -> None:
    graph_manager = manager("FULL", model=Picky(*SIZES), lazily=True)
    for _ in range(4):
        check(graph_manager, requests(16))
    chosen = graph_manager.dispatched(requests(16))
    assert chosen.mode is NONE
    assert "not permitted when stream is capturing" in chosen.why.detail


def test_hooks_and_contexts() -> None:
    calls: list[str] = []

    class Noting(GraphHooks):
        def before_capture(self, pool: Any) -> None:
            assert pool is graph_manager.pool
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

        def around_captures(self) -> Any:
            return Around()

    class Around:
        def __enter__(self) -> None:
            calls.append("enter")

        def __exit__(self, *_: Any) -> None:
            calls.append("exit")

    graph_manager = manager("FULL", hooks=[Noting()])
    graph_manager.capture_graph(FULL, BatchDescriptor(4, 4))
    capture = ["before_full_capture", "end_of_capture"]
    assert calls == ["before_capture", "enter", "end_of_capture", *capture, "exit"]
    del calls[:]
    check(graph_manager, requests(3))
    check(graph_manager, requests(20))
    assert calls == ["before_replay", "after_replay"]
    graph_manager.release()
    del calls[:]
    assert sum(len(bulk.captured) for bulk in graph_manager.capture().values()) == len(SIZES)
    assert calls.count("before_full_capture") == len(SIZES)


def test_earlier_arguments() -> None:
    calls: list[str] = []

    @contextmanager
    def around() -> Iterator[None]:
        calls.append("enter")
        yield
        calls.append("exit")

    handle = cgcompile.Backend(compiler="eager", capture_device="host")
    told = "(graph_capture|backend|lazily|inference_mode|check_weights) is deprecated: "
    with pytest.warns(FutureWarning, match=told) as warned:
        graph_manager = CudaGraphManager(
            Decoder().eval(),
            dispatcher("FULL"),
            INPUTS,
            device="cpu",
            metadata=metadata,
            backend=handle,
            graph_capture=around,
            lazily=True,
            inference_mode=False,
        )
    assert len(warned) == 4
    assert graph_manager.backend is handle
    assert not graph_manager.dispatcher.only_captured
    with torch.no_grad():
        for _ in range(3):
            result = graph_manager.run(requests(4))
        graph_manager.capture()
    assert calls == ["enter", "exit"]
    assert not result.is_inference()
    assert graph_manager.counters.replays >= 1


def test_an_earlier_argument_keeps_the_settings_beside_it() -> None:
    handle = cgcompile.Backend(compiler="eager", capture_device="host")
    model = cgcompile.compile(Decoder().eval(), handle, guards="none")
    config = cgcompile.CompilationConfig(capture_device="host", on_fallback="raise")
    arguments: dict[str, Any] = {"device": "cpu", "metadata": metadata, "backend": handle}
    for settings in ({"config": config}, {"check_weights": False, "config": config}):
        with pytest.warns(FutureWarning, match="(backend|check_weights) is deprecated"):
            graph_manager = CudaGraphManager(
                model, dispatcher("FULL"), INPUTS, **arguments, **settings
            )
        assert graph_manager.backend is handle
        with pytest.raises(DispatchError):  # as the settings choose
            graph_manager.run(requests(4))
    for settings in ({"config": config}, {"check_metadata": False}):
        with (
            pytest.warns(FutureWarning, match="backend is deprecated"),
            pytest.raises(ConfigError, match="the handle is not found on the model"),
        ):
            CudaGraphManager(Decoder().eval(), dispatcher("FULL"), INPUTS, **arguments, **settings)
    arguments = {"device": "cpu", "config": handle, "check_weights": False}
    with (
        pytest.warns(FutureWarning, match="check_weights is deprecated"),
        pytest.raises(ConfigError, match="the handle is not found on the model"),
    ):
        CudaGraphManager(Decoder().eval(), dispatcher("FULL"), INPUTS, **arguments)
    told = "lazily is deprecated: leave it out, as that is the default"
    with pytest.warns(FutureWarning, match=told):
        graph_manager = CudaGraphManager(
            model, dispatcher("FULL"), INPUTS, device="cpu", lazily=False, config=handle
        )
    assert graph_manager.dispatcher.only_captured
    with (
        pytest.warns(FutureWarning, match="agreement is deprecated"),
        pytest.raises(TypeError, match="dispatcher"),
    ):
        CudaGraphManager(model, inputs=INPUTS, device="cpu", agreement=None)  # type: ignore[call-arg]


@pytest.mark.slow
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

    batch, wrong = requests(3), requests(3)
    wrong.inputs["positions"] = torch.zeros(3)
    for fails, step, error, expected in (
        (False, wrong, InputBufferError, ["before a", "before b", "after a", "after b"]),
        (True, batch, ValueError, ["before a", "after a"]),
    ):
        graph_manager = manager("FULL", hooks=[Noting("a"), Noting("b", fails)])
        graph_manager.capture()
        del calls[:]
        with pytest.raises(error):
            graph_manager.run(step)
        assert calls == expected


# ---------------------------------------------------------------- look-ups


@pytest.mark.parametrize("lazily", [False, True])
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL", "FULL_AND_PIECEWISE", "NONE"])
def test_sizes_before_and_after_capture(mode: str, lazily: bool) -> None:
    graph_manager = manager(mode, lazily=lazily)
    sizes = {n: min(size for size in SIZES if size >= n) for n in range(1, SIZES[-1] + 1)}
    decode = {n: size for n, size in sizes.items() if n <= MAX_REQS}
    assert graph_manager.cudagraph_sizes == ({} if mode == "NONE" else sizes)
    own = mode == "FULL_AND_PIECEWISE"
    assert graph_manager.uniform_decode_cudagraph_sizes == (decode if own else {})
    for captured in (False, True):
        if captured:
            graph_manager.capture()
        for n in (0, 1, 3, 9, 16, 17):
            assert graph_manager.get_cudagraph_size(n) == graph_manager.cudagraph_sizes.get(n)
        for n in (1, 5, 8):
            expected = graph_manager.uniform_decode_cudagraph_sizes.get(
                n, graph_manager.cudagraph_sizes.get(n)
            )
            assert graph_manager.get_cudagraph_size(n, True) == expected
    assert (graph_manager.pool is None) is (mode == "NONE")


def test_sizes_of_decode_with_drafts() -> None:
    dispatch = dispatcher("FULL_DECODE_ONLY", query_lens={1: [2, 8], 3: [6, 24]})
    graph_manager = manager(dispatch=dispatch)
    assert graph_manager.cudagraph_sizes == {}
    expected = {n: 6 if n <= 6 else 24 for n in range(3, 25)}
    assert graph_manager.uniform_decode_cudagraph_sizes == expected


@pytest.mark.slow
def test_which_graph_serves() -> None:
    graph_manager = manager("FULL_DECODE_ONLY")
    assert graph_manager.get_cudagraph_runtime_mode(3, 3, 1) == (NONE, None)
    graph_manager.capture()
    assert graph_manager.get_cudagraph_runtime_mode(3, 3, 1) == (FULL, 4)
    assert graph_manager.get_cudagraph_runtime_mode(1, 3, 3) == (NONE, None)
    assert graph_manager.get_cudagraph_runtime_mode(9, 9, 1) == (NONE, None)
    assert (graph_manager.get_cudagraph_size(3, True), graph_manager.get_cudagraph_size(3)) == (
        4,
        None,
    )
    graph_manager = manager(dispatch=dispatcher("FULL", axes=(Axis("a", (1,)), LoraCases((2,)))))
    graph_manager.capture()
    for extra, size in (((1,), 4), ((7,), None)):
        more = {"has_lora": True, "num_active_loras": 1, "extra": extra}
        assert graph_manager.get_cudagraph_size(3, **more) == size
        mode = FULL if size else NONE
        assert graph_manager.get_cudagraph_runtime_mode(1, 3, 3, **more) == (mode, size)


def test_a_refused_size_is_skipped() -> None:
    graph_manager = manager("FULL")
    graph_manager.dispatcher.refused(FULL, BatchDescriptor(16, 8), "an op reads the host")
    graph_manager.dispatcher.refused(FULL, BatchDescriptor(2, 2), "an op reads the host")
    assert (graph_manager.get_cudagraph_size(9), graph_manager.get_cudagraph_size(8)) == (None, 8)
    graph_manager.dispatcher.captured(FULL, BatchDescriptor(4, 4))
    assert graph_manager.get_cudagraph_size(2) == 4


@pytest.mark.slow
@pytest.mark.parametrize("aux", [False, True])
def test_run_fullgraph(aux: bool, device: str) -> None:
    graph_manager = manager("FULL_AND_PIECEWISE", device=device, model=Decoder(aux))
    with pytest.raises(ManagerError, match="No cudagraph for 4 tokens; captured FULL: none"):
        graph_manager.run_fullgraph(4)
    assert graph_manager.output_buffers is None
    graph_manager.capture()
    for size in (4, 8, 4):
        batch = requests(*[1] * size, device=device, decode=True)
        graph_manager.inputs.stage(batch.inputs, (size, size), (size, size))
        result, expected = graph_manager.run_fullgraph(size), eager(inner(graph_manager), batch)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
        hidden = result[0] if aux else result
        assert hidden.shape == (size, D)
        start = hidden.data_ptr()
    second, whole = graph_manager.run_fullgraph(4), graph_manager.output_buffers
    assert (second[0] if aux else second).data_ptr() == start
    assert (whole[0] if aux else whole).data_ptr() == start
    assert (whole[0] if aux else whole).shape == (MAX_REQS, D)
    with pytest.raises(ManagerError, match="No cudagraph for 5 tokens; captured FULL: 1, 2, 4, 8"):
        graph_manager.run_fullgraph(5)
    graph_manager.release()
    assert graph_manager.output_buffers is None


@pytest.mark.slow
def test_the_full_graph_of_a_variant() -> None:
    axes = [Axis("inputs_embeds", (False, True))]
    graph_manager = manager(dispatch=dispatcher("FULL", axes=axes), inputs=(*INPUTS, EMBEDS))
    graph_manager.capture()
    batch = requests(*[1] * 8, extra=(False,))
    graph_manager.inputs.stage(batch.inputs, (8, 8), (8, 8))
    result, expected = (
        graph_manager.run_fullgraph(8, extra=(False,)),
        eager(graph_manager.model, batch),
    )
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ManagerError, match="No cudagraph for 8 tokens"):
        graph_manager.run_fullgraph(8)


@pytest.mark.parametrize("policy", ["raise", "eager", "recapture"])
def test_moved_metadata_of_a_full_step_follows_on_input_change(policy: str, device: str) -> None:
    moves = False

    def starts(batch: Batch, descriptor: BatchDescriptor, buffers: dict[str, Any]) -> Metadata:
        chosen = buffers["query_start_loc"]
        return Metadata(other.copy_(chosen) if moves else chosen)

    other = torch.zeros(5, dtype=torch.int32, device=device)
    graph_manager = manager("FULL", "plain", device, on_input_change=policy, metadata=starts)
    graph_manager.capture_graph(FULL, BatchDescriptor(4, 4))
    check(graph_manager, requests(2, 1, device=device))
    before, moves = graph_manager.counters, True
    if policy == "raise":
        with pytest.raises(AddressChangedError, match="metadata attn_metadata is at"):
            graph_manager.run(requests(2, 1, device=device))
        assert graph_manager.counters.failures == before.failures + 1
        assert graph_manager.counters.calls == before.calls + 1
    for _ in range(0 if policy == "raise" else 2):
        check(graph_manager, requests(1, 2, device=device))
    moves = False
    check(graph_manager, requests(3, 1, device=device))
    after = graph_manager.counters
    captures, replays = after.captures - before.captures, after.replays - before.replays
    expected = {"raise": (0, 1, 0), "eager": (0, 1, 2), "recapture": (1, 2, 0)}
    plain = after.plain[Reason.INPUT_CHANGED]
    assert (captures, replays, plain) == expected[policy]
    assert graph_manager.statistics.reasons().get(Reason.INPUT_CHANGED, 0) == plain


def test_a_full_graph_is_refused_with_the_reason(device: str) -> None:
    graph_manager = manager("FULL", "plain", device, on_input_change="eager")
    graph_manager.capture_graph(FULL, BatchDescriptor(4, 4))
    batch = requests(1, 1, 1, 1, device=device)
    graph_manager.inputs.stage(batch.inputs, (4, 4), (4, 4))
    result, expected = graph_manager.run_fullgraph(4), eager(inner(graph_manager), batch)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    before = graph_manager.counters
    with cgcompile.eager_region(), pytest.raises(ManagerError, match="eager_region: called inside"):
        graph_manager.run_fullgraph(4)
    inner(graph_manager).aux = True  # which the captured code read
    with pytest.raises(ManagerError, match=r"input_changed: .*aux"):
        graph_manager.run_fullgraph(4)
    assert graph_manager.counters.replays == before.replays
    assert graph_manager.counters.failures == before.failures + 2


# ---------------------------------------------------------------- weights and modes of autograd


class Called:
    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, **arguments: Any) -> Any:
        return self._model(**arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "kind", "wrapped"),
    [
        ("FULL_DECODE_ONLY", "plain", None),
        ("FULL_DECODE_ONLY", "compiled", None),
        *(
            (mode, "plain", wrapped)
            for mode in ("FULL", "PIECEWISE")
            for wrapped in (partial, Called, lambda model: lambda **given: model(**given))
        ),
    ],
)
def test_weights(mode: str, kind: str, wrapped: Any, device: str) -> None:
    """Written in place: read by the graphs; replaced: an error. Also where no module is given."""
    model = Decoder().to(device).eval()
    graph_manager = manager(mode, kind, device, model=model, wrapped=wrapped)
    graph_manager.capture()
    batch = requests(1, 1, 1, device=device, decode=True)
    first = graph_manager.run(batch).clone()
    with torch.no_grad():
        model.places.weight.mul_(2)
    result = graph_manager.run(batch)
    assert not torch.equal(result, first)
    torch.testing.assert_close(result, eager(model, batch), rtol=1e-5, atol=1e-5)
    model.places.weight = nn.Parameter(torch.randn_like(model.places.weight))
    with pytest.raises(AddressChangedError, match=r"places\.weight"):
        graph_manager.run(batch)
    graph_manager.release()
    graph_manager.capture()
    torch.testing.assert_close(graph_manager.run(batch), eager(model, batch), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_step_on_other_weights_is_no_hit() -> None:
    graph_manager = manager("PIECEWISE", "compiled")
    graph_manager.capture()
    model = inner(graph_manager)
    graph_manager.run(requests(3, 2))
    model.layers[0].qkv.weight = nn.Parameter(torch.randn_like(model.layers[0].qkv.weight))
    check(graph_manager, requests(4, 2))
    assert graph_manager.statistics.reasons() == {Reason.WARMING: 1}


@pytest.mark.slow
@kinds
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_where_gradients_are_due_a_step_runs_plain(mode: str, kind: str, device: str) -> None:
    graph_manager = manager(mode, kind, device, inference_mode=False)
    with torch.no_grad():
        graph_manager.capture()
        check(graph_manager, requests(3, 2, device=device))
    assert graph_manager.counters.replays == 1
    result = graph_manager.run(requests(3, 2, device=device))
    result.sum().backward()
    assert inner(graph_manager).layers[0].out.weight.grad.abs().sum() > 0
    assert graph_manager.counters.replays == 1
    hits = {(row.mode, row.reason, row.ran) for row in graph_manager.statistics.rows() if row.hits}
    assert hits == {(mode, None, 8), ("NONE", Reason.GRADIENTS, 5)}
    if mode == "FULL":
        with pytest.raises(
            ManagerError, match="gradients: an input, a weight or a result requires"
        ):
            graph_manager.run_fullgraph(8)
    with torch.no_grad():
        check(graph_manager, requests(3, 2, device=device))
    assert "2 of 3 steps on graphs" in str(cgcompile.coverage(graph_manager))
