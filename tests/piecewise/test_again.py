"""The shortest way through a compiled step: what it asks each time, and how many calls it takes."""

import contextvars
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from entry_support import D, Hook, Hooked, assert_same, operators
from torch import nn

import cgcompile
from cgcompile import AttentionCGSupport, BatchDescriptor, CUDAGraphMode, SplittingOp
from cgcompile.errors import AddressChangedError, CaptureError, HostValueChangedError
from cgcompile.graphs.ranges import observing

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
ROWS = 300  # Python does not keep numbers of this size: equal ones are other objects


class Deep(nn.Module):
    """Layers, hooked or not, and buffers that no piece but an eager one reads."""

    def __init__(self, layers: int, hooked: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Hooked() if hooked else nn.Linear(D, D) for _ in range(layers))
        for place in range(layers):
            self.register_buffer(f"cache_{place}", torch.randn(ROWS, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, layer in enumerate(self.layers):
            out = torch.empty_like(x)
            cache = getattr(self, f"cache_{place}")
            torch.ops.cgentry.attend(x, cache, cache, out)
            x = layer(x) + out
        return x


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(torch.softmax(q @ k.transpose(-1, -2), -1) @ v)


class Engine:
    """A compiled model, its input, and the context of its steps; warmed, captured and replayed."""

    def __init__(
        self, layers: int = 1, mode: CUDAGraphMode = FULL, hooked: bool = True, **settings: Any
    ) -> None:
        operators()
        torch.manual_seed(0)
        self.model = Deep(layers, hooked).eval().requires_grad_(False)
        ops = [
            SplittingOp("cgentry::hooked", support=AttentionCGSupport.ALWAYS),
            SplittingOp("cgentry::attend", support=AttentionCGSupport.ALWAYS, impl=attend),
        ]
        self.backend = cgcompile.Backend(
            compiler="eager", capture_device="host", splitting_ops=ops, **settings
        )
        self.compiled = cgcompile.compile(
            self.model, self.backend, dynamic_dims={"x": 0}, guards="none"
        )
        self.x, self.mode = torch.randn(ROWS, D), mode
        self.context = self.context_of(mode)
        with torch.no_grad():
            for _ in range(4):
                self.step()
        self.graph = self.backend.graphs[-1]
        assert self.graph._turn.replays >= 1

    def context_of(self, mode: CUDAGraphMode, rows: int = ROWS) -> Any:
        descriptor = BatchDescriptor(rows)
        return cgcompile.set_forward_context(
            cudagraph_runtime_mode=mode, batch_descriptor=descriptor
        )

    def step(self, x: torch.Tensor | None = None, context: Any = None) -> torch.Tensor:
        with context or self.context:
            return self.compiled(self.x if x is None else x)

    def short(self, run: Callable[[], torch.Tensor]) -> bool:
        """Whether a step went the shortest way; what it returns is what eager returns."""
        self.x.copy_(torch.randn_like(self.x))
        before = self.graph._turn.replays
        assert_same([run()], [self.model(self.x)])
        return self.graph._turn.replays > before


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


# ---------------------------------------------------------------- how many calls


def calls_of(run: Callable[[], Any]) -> tuple[Counter[str], Counter[str]]:
    """How often each function of Python, and of C, was called; none of the recorder's own."""
    python: Counter[str] = Counter()
    native: Counter[str] = Counter()
    depth = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal depth
        inside = depth > 0
        if event == "call" and (inside or frame.f_code.co_name in ("replay_steps", "attend")):
            depth += 1
        elif event == "return" and inside:
            depth -= 1
        if inside or depth > 1:
            return
        if event == "call":
            python[frame.f_code.co_name] += 1
        elif event == "c_call":
            native[argument.__name__] += 1

    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(None)
    del native["setprofile"]
    return python, native


def without_graphs(engine: Engine) -> None:
    """Let the graphs be functions of C that do nothing: what is left is our own."""
    (recording,) = engine.graph.recordings
    sequence, nothing = recording.sequence, {}.clear
    kinds = [type(each).__name__ for each in sequence.segments]
    sequence.steps = sequence._padded_steps = tuple(
        nothing if kind == "GraphSegment" else step
        for kind, step in zip(kinds, sequence.steps, strict=True)
    )


@pytest.mark.parametrize("layers", [1, 6])
def test_a_full_step_takes_as_many_calls_as_there_are_questions(layers: int) -> None:
    engine = Engine(layers)
    without_graphs(engine)
    python, native = calls_of(engine.step)
    assert engine.graph._turn.replays >= 2
    assert python.total() <= 17, python  # of them three of this test, two of the host device
    assert native.total() <= 24, native
    assert python["is_profiling"] == python["entered"] == native["is_grad_enabled"] == 1


def test_a_break_takes_the_calls_of_its_op() -> None:
    found = []
    for layers in (1, 6):
        engine = Engine(layers, PIECEWISE, hooked=False)
        without_graphs(engine)
        found.append(calls_of(engine.step))
    (few, few_native), (many, many_native) = found
    assert many - few == {"attend": 5}, "no function of ours for any of them"
    assert many_native - few_native == {"clear": 5}, "nothing but the graphs"


# ---------------------------------------------------------------- what is asked


def test_the_same_step_again() -> None:
    engine = Engine()
    assert engine.short(engine.step)
    assert engine.short(lambda: engine.step(context=engine.context_of(FULL)))  # an equal descriptor
    assert engine.short(lambda: engine.step(engine.x[:]))  # another object at the same place
    (recording,) = engine.graph.recordings
    replays = recording.replays
    assert engine.short(engine.step)
    assert recording.replays == replays + 1
    assert engine.backend.counters.calls == engine.backend.counters.replays + 2  # warming, capture


def test_another_mode_or_batch() -> None:
    engine = Engine()
    assert not engine.short(lambda: engine.step(context=engine.context_of(NONE)))
    assert engine.short(engine.step)
    assert not engine.short(lambda: engine.step(context=engine.context_of(PIECEWISE)))
    other = engine.context_of(FULL, ROWS - 1)
    assert not engine.short(lambda: engine.step(context=other))


def test_gradients_and_autocast() -> None:
    engine = Engine()
    with torch.enable_grad():
        assert not engine.short(engine.step)
        engine.x.requires_grad_()
        result = engine.step()
        assert result.requires_grad
        engine.x.requires_grad_(False)
    assert engine.short(engine.step)
    with torch.autocast("cpu", torch.bfloat16):
        before = engine.graph._turn.replays
        engine.compiled(engine.x)
        assert engine.graph._turn.replays == before


def test_inside_of_a_capture() -> None:
    engine = Engine()
    device = engine.graph.pool.device
    outer = device.new_graph()
    results: list[torch.Tensor] = []
    pool = device.new_pool(None)
    outer.begin(pool)
    try:
        before = engine.graph._turn.replays
        results.append(engine.step())
        assert engine.graph._turn.replays == before
    finally:
        outer.end()


def test_an_input_elsewhere_or_of_another_size() -> None:
    engine = Engine()
    with pytest.raises(AddressChangedError, match="'x'"):
        engine.step(engine.x.clone())
    with pytest.raises(HostValueChangedError):
        engine.step(engine.x[: ROWS - 1])
    assert engine.short(engine.step)


def test_released_graphs() -> None:
    engine = Engine()
    engine.backend.release()
    assert not engine.short(engine.step)


def test_graphs_that_somebody_else_dropped() -> None:
    engine = Engine()
    engine.graph.pool.release()
    assert not engine.short(engine.step)


def test_weights_that_died() -> None:
    engine = Engine()
    (binding,) = engine.graph.bindings
    binding.let_go()
    again = engine.graph._turn.again
    assert again is not None
    assert again.gone
    assert not engine.short(engine.step)


def test_somebody_who_observes() -> None:
    engine = Engine()
    seen: list[Any] = []

    def observer(program: Any, recording: Any, inputs: tuple[Any, ...], real: Any) -> Any:
        seen.append(len(inputs))
        return recording.replay(inputs, real)

    engine.graph.observe(observer)
    assert not engine.short(engine.step)
    assert seen == [len(engine.graph.split.inputs)]  # the frozen ones are among them


def test_ranges_are_seen() -> None:
    engine, seen = Engine(), []

    class Ranges:
        def around(self, sequence: Any, place: int | None) -> Any:
            seen.append(place)
            return torch.no_grad()

    with observing(Ranges()):
        assert engine.short(engine.step)
    assert seen == [None, 0]


def test_stale_memory_shows() -> None:
    engine = Engine(poison=True)
    result = engine.step()
    without_graphs(engine)
    assert not engine.step().isfinite().any()
    assert result.data_ptr() == engine.step().data_ptr()


def test_a_step_within_a_step() -> None:
    engine = Engine(mode=PIECEWISE)
    plain = Hook.function
    try:
        Hook.function = lambda x: engine.step()
        with pytest.raises(CaptureError, match="inside"):
            engine.step()
    finally:
        Hook.function = plain
    assert engine.graph._turn.owner == 0
    assert engine.short(engine.step)


def test_one_step_at_a_time() -> None:
    engine = Engine()
    done: list[torch.Tensor] = []

    def other() -> None:
        with torch.no_grad():
            done.append(engine.step())

    thread = threading.Thread(target=other)
    with engine.graph._turn.lock:
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        assert not done
    thread.join(10)
    assert len(done) == 1


def test_a_context_that_another_thread_copied() -> None:
    engine = Engine()
    before = engine.graph._turn.replays

    def other() -> None:
        with torch.no_grad():
            engine.compiled(engine.x)

    with engine.context:
        thread = threading.Thread(target=contextvars.copy_context().run, args=(other,))
        thread.start()
        thread.join(10)
        assert engine.graph._turn.replays == before
        engine.compiled(engine.x)
    assert engine.graph._turn.replays == before + 1


def test_rows_that_are_padding() -> None:
    engine = Engine()
    real = cgcompile.set_forward_context(
        cudagraph_runtime_mode=FULL,
        batch_descriptor=BatchDescriptor(ROWS),
        num_unpadded_tokens=ROWS - 5,
    )
    assert engine.short(lambda: engine.step(context=real))
    (recording,) = engine.graph.recordings
    assert recording.padding == 5


def test_weights_changed_in_place() -> None:
    engine = Engine(2, PIECEWISE)
    assert engine.short(engine.step)
    engine.model.cache_0.mul_(2)
    engine.model.layers[1].after.weight.mul_(2)
    assert engine.short(engine.step)
    with torch.enable_grad():  # the parameters themselves, and the same numbers
        assert not engine.short(engine.step)
