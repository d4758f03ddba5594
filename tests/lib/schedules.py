"""What the schedule fuzz runs: a small decoder, three ways to drive it, and what each step must do.

An :class:`Engine` is what a serving engine is to the library: it keeps buffers, makes fresh
attention metadata for every step, and calls the model. It knows the contract as well:
:meth:`Engine.step` says beforehand whether a step is a replay, a capture, a plain run (and why) or
an error (and which), runs it, and compares with the counters and with eager.
"""

import gc
import weakref
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

import cgcompile
from cgcompile import (
    AttentionCGSupport,
    BatchDescriptor,
    CompilationConfig,
    CUDAGraphMode,
    SplittingOp,
    set_forward_context,
)
from cgcompile.context import current_forward_context
from cgcompile.descriptor import allows_full
from cgcompile.errors import AddressChangedError, CaptureError, DispatchError, HostValueChangedError
from cgcompile.graphs import allow_capture
from cgcompile.graphs.breakable import BreakableCUDAGraphWrapper
from cgcompile.reasons import EXPECTED, Counters, Reason
from lib.breakable import churn, in_thread
from lib.entry import assert_same

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
D, LAYERS = 16, 2
SIZES, MOST = (8, 4, 12, 1), 14  # of batches, and the rows of a buffer
# Other than any size, or Dynamo would trace a first step in which two happen to be equal apart.
NUMBERS = (3, 5, 7)  # a graph that holds the number holds the first


class Asked(Exception):
    """What an attention op raises where the schedule says so."""


# ------------------------------------------------------------------ the decoder


class Metadata:
    """What the attention ops of one step read; never of two.

    Attributes:
        scale: a tensor: one that the engine keeps and refills where a FULL graph reads it, else a
            fresh one.
        live: a number of the host, another one at each step; 1.0 where a FULL graph would keep it.
        real: how many rows are not padding.
        tally: counts the calls, on the device, inside of graphs too.
        fails_at: the first call that raises; so do all that follow.
    """

    def __init__(
        self, scale: torch.Tensor, live: float, real: int, tally: torch.Tensor, fails_at: int = -1
    ) -> None:
        self.scale, self.live, self.real = scale, live, real
        self.tally, self.fails_at = tally, fails_at
        self.calls = 0
        self.over = False

    def enter(self) -> None:
        assert not self.over, "metadata of a step that has ended"
        self.calls += 1
        if 0 <= self.fails_at < self.calls:
            raise Asked(f"attention {self.fails_at}")


class Ambient:
    """What an op of a program without forward contexts reads."""

    metadata: Metadata | None = None
    held: ClassVar[deque[torch.Tensor]] = deque(maxlen=3)  # so that results lie elsewhere each time


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[int, torch.Tensor]:
    """(real rows, their attention): within each request of a uniform batch, else among all rows."""
    context = current_forward_context()
    metadata = (context and context.attn_metadata) or Ambient.metadata
    assert metadata is not None
    metadata.enter()
    metadata.tally.add_(1)
    descriptor = None if context is None else context.batch_descriptor
    requests, heat = 1, 1.0
    if descriptor is not None:
        requests = descriptor.num_reqs if descriptor.uniform else 1
        heat = descriptor.extra[1] if descriptor.extra[:1] == ("heat",) else 1.0
    real = metadata.real
    q, k, v = (each[:real].reshape(requests, -1, D) for each in (q, k, v))
    weights = torch.softmax(q @ k.mT * (metadata.scale * (metadata.live * heat)), -1)
    return real, (weights @ v).reshape(real, D)


@cache
def operators() -> torch.library.Library:
    """Attention that writes where it is told, and attention with a fresh result and a number."""
    lib = torch.library.Library("cgsched", "FRAGMENT")
    lib.define("attend(Tensor q, Tensor k, Tensor v, Tensor(a!) out) -> ()")
    lib.define("fresh(Tensor q, Tensor k, Tensor v, SymInt n) -> Tensor")

    def attend(q, k, v, out):
        real, result = _attention(q, k, v)
        out[:real].copy_(result)

    def fresh(q, k, v, n):
        real, result = _attention(q, k, v)
        padded = torch.zeros(q.shape, device=q.device)
        padded[:real] = result / n
        context = current_forward_context()
        if context is None or context.cudagraph_runtime_mode is not FULL:
            Ambient.held.append(padded)
        return padded

    for key in ("CPU", "CUDA"):
        lib.impl("attend", attend, key)
        lib.impl("fresh", fresh, key)
    torch.library.register_fake("cgsched::attend", lambda q, k, v, out: None, lib=lib)
    torch.library.register_fake("cgsched::fresh", lambda q, k, v, n: torch.empty_like(q), lib=lib)
    return lib


class Layer(nn.Module):
    """Projections around an attention, and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x, *n):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        if n:
            attended = torch.ops.cgsched.fresh(q, k, v, *n)
        else:
            attended = torch.empty(q.shape, device=q.device)
            torch.ops.cgsched.attend(q, k, v, attended)
        return x + self.out(attended).sigmoid() * x


class Decoder(nn.Module):
    """Rows are tokens. With a number, attention returns fresh tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x, *n):
        for layer in self.layers:
            x = layer(x, *n)
        return x


# ------------------------------------------------------------------ what is drawn


class Batch(NamedTuple):
    """What a step asks for."""

    mode: CUDAGraphMode
    size: int
    num_reqs: int | None = None  # of a uniform batch
    extra: tuple[Any, ...] = ()

    @property
    def descriptor(self) -> BatchDescriptor:
        return BatchDescriptor(
            self.size, self.num_reqs, self.num_reqs is not None, extra=self.extra
        )

    def __str__(self) -> str:
        uniform = f" of {self.num_reqs} requests" if self.num_reqs else ""
        return f"{self.mode.name} {self.size}{uniform} {self.extra or ''}".rstrip()


def batches(modes: tuple[CUDAGraphMode, ...]) -> list[Batch]:
    """All that a schedule may ask for in these modes."""
    menu = []
    for mode in modes:
        for size in SIZES:
            for num_reqs in dict.fromkeys((None, size, (size + 1) // 2)):
                for extra in ((), ("heat", 0.5)):
                    menu.append(Batch(mode, size, num_reqs, extra))
    return menu


class Do(NamedTuple):
    """One thing that a schedule does: a step of a batch of its menu, or something between steps."""

    what: str
    slot: int = 0

    def __repr__(self) -> str:
        return f"Do({self.what!r}, {self.slot})"


# How often, in about 400 draws. What costs graphs, or runs plain, is rare: so it is in a server.
STEPS = {"step": 230, "thread": 10, "padded": 30, "closed": 5, "moved": 10, "raises": 10}
STEPS |= {"no_descriptor": 5, "other_size": 5, "number": 5}
PLAIN = {"none": 2, "grad": 1, "inference": 1}
BETWEEN = {
    "churn": 20,
    "collect": 2,
    "weights": 15,
    "release": 2,
    "new_weights": 2,
    "moved_weights": 2,
}


def things_to_do(slots: int, more: dict[str, int]) -> list[Do]:
    """Everything that a schedule may draw, each as often as it is to come."""
    things = []
    for what, times in {**STEPS, **more}.items():
        things += [Do(what, position % slots) for position in range(times)]
    for what, times in {**PLAIN, **BETWEEN}.items():
        things += [Do(what)] * times
    return things


# ------------------------------------------------------------------ what must happen


class Outcome(NamedTuple):
    """What a step does: ``replay``, ``capture``, ``plain`` for a reason, or ``raise`` a class."""

    kind: str
    why: Any = None

    def __str__(self) -> str:
        return f"{self.kind} {getattr(self.why, '__name__', self.why) or ''}".rstrip()


REPLAY, CAPTURE = Outcome("replay"), Outcome("capture")


@dataclass(frozen=True)
class Scenario:
    """How a decoder is driven.

    Attributes:
        driver: ``compiled`` (under forward contexts), ``breakable`` or ``auto`` (without contexts).
        op: which attention: ``attend`` or ``fresh``.
        support: how far it may go into FULL graphs.
        settings: more settings.
        modes: what batches ask for.
        runtime_mode: of a breakable wrapper.
        more: other frequencies of what is drawn.
    """

    driver: str
    op: str
    support: AttentionCGSupport
    settings: dict[str, Any] = field(default_factory=dict)
    modes: tuple[CUDAGraphMode, ...] = (PIECEWISE, FULL)
    runtime_mode: CUDAGraphMode | None = None
    more: dict[str, int] = field(default_factory=dict)

    def serves(self, batch: Batch) -> bool:
        """Whether a batch gets the graphs that it asks for."""
        return batch.mode is not FULL or allows_full(self.support, batch.descriptor)

    @property
    def is_auto_full(self) -> bool:
        """Whether steps without a context begin as FULL graphs."""
        full = self.support is AttentionCGSupport.ALWAYS and self.op == "attend"
        return self.driver == "auto" and full

    @property
    def on_change(self) -> str:
        return self.settings.get("on_input_change", "raise")


class Engine:
    """A decoder that is driven as a scenario says, next to eager.

    Args:
        scenario: how.
        device: where.
        menu: the batches that steps ask for.
        inference: whether steps run in inference mode; under ``no_grad`` if not.
        settings: ``on_fallback`` and ``debug``.
    """

    def __init__(
        self,
        scenario: Scenario,
        device: str,
        menu: list[Batch],
        inference: bool,
        **settings: Any,
    ) -> None:
        operators()
        torch._dynamo.reset()
        torch.manual_seed(0)
        Ambient.held.clear()
        self.scenario, self.device, self.menu, self.inference = scenario, device, menu, inference
        self.strict = settings["on_fallback"] == "raise"
        self.model = Decoder().eval().to(device)
        op = SplittingOp(f"cgsched::{scenario.op}", support=scenario.support)
        defaults = {"capture_device": "host", "compiler": "eager", "splitting_ops": (op,)}
        # Ambient.held changes in steps without a FULL graph, by the code that such a graph captures.
        defaults["checks"] = "-state" if scenario.op == "fresh" else True
        config = CompilationConfig(**defaults, **scenario.settings, **settings)
        self.warmups = config.num_warmups if scenario.driver != "breakable" else 0
        if scenario.driver == "breakable":
            self.call: Any = BreakableCUDAGraphWrapper(self.model, config, scenario.runtime_mode)
        else:
            self.backend = cgcompile.Backend(config)
            self.call = torch.compile(self.model, backend=self.backend, dynamic=True)
        (self.call if scenario.driver == "breakable" else self.backend).allow_threads()
        self.graphs: list[Any] = []
        self.buffers = [torch.zeros(MOST, D, device=device) for _ in range(2)]
        self.scale, self.tally, self.other_tally = torch.zeros(3, device=device).unbind()
        self.inputs: deque[torch.Tensor] = deque(maxlen=3)
        self.metadata: list[weakref.ref[Metadata]] = []
        self.warmed: Counter[Any] = Counter()
        self.captured: dict[Any, CUDAGraphMode] = {}
        self.auto_mode: dict[Any, CUDAGraphMode] = {}
        self.previous: torch.Tensor | None = None
        self.kept: tuple[torch.Tensor, torch.Tensor] | None = None
        self.outcomes: Counter[str] = Counter()
        self.resets = 0

    # -------------------------------------------------------------- between steps

    def between(self, what: str) -> None:
        """Do something that is no step."""
        getattr(self, f"_{what}")()

    def _churn(self) -> None:
        churn(self.device)

    def _collect(self) -> None:
        gc.collect()
        alive = [each for each in self.metadata if each() is not None]
        assert not alive, f"{len(alive)} metadata objects of steps that have ended are held"
        self.metadata.clear()

    def _weights(self) -> None:
        """Write weights in place, as a loader does: graphs read them where they are."""
        with torch.no_grad():
            for layer in self.model.layers:
                layer.qkv.weight.copy_(torch.randn_like(layer.qkv.weight) * 0.3)

    def _may_reset(self) -> bool:
        self.resets += 1
        return self.resets == 1

    def _release(self) -> None:
        if not self._may_reset():
            return
        if self.scenario.driver != "breakable":
            self.backend.release()
        elif len(self.menu) % 2:
            self.call.clear_all_graphs()
        else:
            self.call.clear_graphs()
        self.captured.clear()
        self.warmed.clear()
        self.auto_mode.clear()

    def _new_weights(self) -> None:
        """Other parameter objects: graphs of the old ones serve no more."""
        if self.scenario.driver == "breakable" or not self._may_reset():
            return
        layer = self.model.layers[0]
        layer.qkv.weight = nn.Parameter(torch.randn_like(layer.qkv.weight) * 0.3)
        self.captured.clear()
        self.warmed.clear()

    def _moved_weights(self) -> None:
        """The same parameter objects in other memory."""
        if self.scenario.driver == "breakable" or not self._may_reset():
            return
        weight = self.model.layers[-1].out.weight
        weight.data = weight.data.clone()
        for variant in {variant for variant, *_ in self.captured}:
            for known in [key for key in self.warmed if key[0] == variant]:
                del self.warmed[known]
        self.captured.clear()

    # -------------------------------------------------------------- what must happen

    def _variant(self, batch: Batch, inference: bool) -> Any:
        """Which compiled graph serves a batch: Dynamo traces inference mode, and one row, apart."""
        return (inference, batch.size == 1) if self.scenario.driver != "breakable" else None

    def _effective(self, batch: Batch, inference: bool) -> CUDAGraphMode:
        """The mode of the graphs that would serve a batch."""
        scenario = self.scenario
        if scenario.driver == "auto":
            usual = FULL if scenario.is_auto_full else PIECEWISE
            return self.auto_mode.get(self._variant(batch, inference), usual)
        if batch.mode is not FULL or scenario.driver == "breakable":
            return batch.mode
        return FULL if scenario.serves(batch) else PIECEWISE

    def _key(self, do: Do, batch: Batch, inference: bool, mode: CUDAGraphMode) -> Any:
        variant = self._variant(batch, inference)
        if self.scenario.driver == "auto":
            return (variant, batch.size)
        moved = do.what == "moved" and self.scenario.on_change == "recapture"
        return (variant, mode, batch.descriptor, moved)

    def _settled(self, do: Do, batch: Batch) -> Do:
        """The step as it is done: a fault where nothing would notice it is none."""
        scenario = self.scenario
        usual, auto = Do("step", do.slot), scenario.driver == "auto"
        if do.what in ("step", "thread", "closed", "none", "grad", "inference"):
            return do
        mode = self._effective(batch, self.inference)
        known = self.captured.get(self._key(usual, batch, self.inference, mode))
        breakable = scenario.driver == "breakable"
        if breakable and scenario.runtime_mode not in (None, batch.mode):
            return usual
        if do.what == "padded":
            return do if mode is not FULL and batch.num_reqs is None else usual
        if do.what == "raises":
            return usual if known is FULL else do
        if auto:
            return usual
        if do.what == "no_descriptor":
            return do
        if do.what == "moved":
            late = scenario.on_change == "copy" or (
                scenario.on_change == "recapture" and not do.slot
            )
            return do if (known and scenario.on_change != "recapture") or late else usual
        if not known or scenario.on_change not in ("raise", "copy"):
            return usual
        if do.what == "number":
            held = breakable or known is FULL
            return do if held and scenario.op == "fresh" else usual
        return do if batch.size > 1 else usual

    def expected(self, do: Do, batch: Batch) -> Outcome:
        """What a settled step must do; the state follows."""
        inference = self.inference is not (do.what == "inference")
        raises = do.what == "raises"
        outcome = self._expected(do, batch, inference)
        if outcome.kind == "plain":
            if self.strict and outcome.why not in EXPECTED:
                return Outcome("raise", DispatchError)
            return Outcome("raise", Asked) if raises else outcome
        return outcome

    def _without_graphs(self, do: Do, batch: Batch, mode: CUDAGraphMode) -> Outcome | None:
        """What happens where no graph is looked for."""
        scenario = self.scenario
        if do.what == "none":
            return Outcome("plain", Reason.MODE_NONE)
        breakable = scenario.driver == "breakable"
        if breakable and scenario.runtime_mode not in (None, batch.mode):
            return Outcome("plain", Reason.OTHER_MODE)
        if do.what == "no_descriptor":
            return Outcome("raise", DispatchError)
        if do.what == "grad":
            return Outcome("plain", Reason.GRADIENTS)
        degraded = scenario.driver == "compiled" and mode is not batch.mode
        return Outcome("plain", Reason.ATTENTION_SUPPORT) if degraded and self.strict else None

    def _expected(self, do: Do, batch: Batch, inference: bool) -> Outcome:
        scenario = self.scenario
        breakable = scenario.driver == "breakable"
        mode = self._effective(batch, inference)
        without = self._without_graphs(do, batch, mode)
        if without is not None:
            return without
        key = self._key(do, batch, inference, mode)
        known = self.captured.get(key)
        if known is not None:
            return self._of_known(do, known)
        if do.what == "closed":
            return Outcome("plain", Reason.CAPTURE_FORBIDDEN)
        self.warmed[key] += 1
        if self.warmed[key] <= self.warmups:
            return Outcome("plain", Reason.WARMING)
        if breakable and not scenario.serves(batch):
            return Outcome("raise", CaptureError)
        if do.what == "raises":
            if breakable or mode is PIECEWISE:
                return Outcome("raise", Asked)
            if scenario.driver == "auto" and not self.strict:
                self.auto_mode[self._variant(batch, inference)] = (
                    PIECEWISE  # the FULL capture was refused
                )
            return Outcome("raise", DispatchError if self.strict else Asked)
        self.captured[key] = mode
        return CAPTURE

    def _of_known(self, do: Do, known: CUDAGraphMode) -> Outcome:
        """What happens where graphs exist."""
        change = self.scenario.on_change
        if do.what == "moved" and change == "raise":
            return Outcome("raise", AddressChangedError)
        if do.what == "moved" and change == "eager":
            return Outcome("plain", Reason.INPUT_CHANGED)
        if do.what in ("other_size", "number"):
            return Outcome("raise", HostValueChangedError)
        return Outcome("raise", Asked) if do.what == "raises" else REPLAY

    # -------------------------------------------------------------- a step

    def step(self, do: Do) -> tuple[Do, Outcome]:
        """Run one step and hold it against the contract; returns how it was settled and what was
        expected."""
        batch = self.menu[do.slot % len(self.menu)]
        do = self._settled(do, batch)
        inference = self.inference is not (do.what == "inference")
        graph = self.scenario.is_auto_full or self._effective(batch, inference) is FULL
        expected = self.expected(do, batch)
        before = self._counters()
        perform = Performance(self, do, batch, inference, graph)
        result, error = in_thread(perform.run) if do.what == "thread" else perform.run_here()
        done = self._counters()
        perform.end()
        if expected.kind == "raise":
            assert type(error) is expected.why, f"{expected} expected, not {error!r}"
        elif error is not None:
            raise AssertionError(f"{expected} expected, not {error!r}") from error
        self._check_counters(expected, before, done)
        self.outcomes["steps"] += 1
        self.outcomes[expected.kind] += 1
        if error is None:
            self._check_result(perform, result)
        del error
        return do, expected

    def _counters(self) -> Counters:
        if self.scenario.driver == "breakable":
            return self.call.counters
        for graph in self.backend.graphs:
            if all(graph is not each for each in self.graphs):
                self.graphs.append(graph)
        return sum((graph.counters for graph in self.graphs), Counters())

    def _check_counters(self, expected: Outcome, before: Counters, after: Counters) -> None:
        names = ("captures", "replays", "failures")
        counted = {name: getattr(after, name) - getattr(before, name) for name in names}
        plain = dict(after.plain - before.plain)
        singular = {"capture": "captures", "replay": "replays", "raise": "failures"}
        wanted = {name: int(name == singular.get(expected.kind)) for name in names}
        reasons = {expected.why: 1} if expected.kind == "plain" else {}
        assert (counted, plain) == (wanted, reasons), (
            f"{expected} expected, counted {counted}, {plain}"
        )
        assert after.calls == before.calls + 1

    def _check_result(self, perform: "Performance", result: torch.Tensor) -> None:
        real, wanted = perform.real, perform.wanted
        assert result.shape == wanted.shape
        assert_same(result[:real].detach(), wanted[:real].detach())
        assert bool(result[:real].any())
        last = self.previous
        assert (
            last is None
            or last.shape != result[:real].shape
            or not torch.equal(last, result[:real])
        )
        assert torch.equal(perform.x, perform.given), "the step has written its input"
        assert float(self.tally) == LAYERS, f"{float(self.tally)} attentions ran"
        if self.kept is not None:  # a caller without a context owns what it was given
            torch.testing.assert_close(*self.kept, rtol=0, atol=0, equal_nan=True)
        self.previous = result[:real].detach().clone()
        if self.scenario.driver == "auto":
            self.kept = result, result.clone()


class Performance:
    """One step: its input, its metadata and the context it runs in."""

    def __init__(self, engine: Engine, do: Do, batch: Batch, inference: bool, graph: bool) -> None:
        self.engine, self.do, self.batch, self.inference = engine, do, batch, inference
        self.size = batch.size - 1 if do.what == "other_size" else batch.size
        self.real = max(self.size - 1, 1) if do.what == "padded" else self.size
        self.graph = graph
        self.x = self._input()
        self.given = self.x.clone()
        self.live = 1.0 if graph else 0.5 + float(torch.rand(()))
        if graph:
            self.scale = engine.scale.fill_(0.5 + float(torch.rand(())))
        else:
            self.scale = torch.rand((), device=engine.device) + 0.5
        self.n = self._numbers()
        self.wanted = torch.empty(0)
        self.metadata: Metadata | None = None

    def _input(self) -> torch.Tensor:
        engine, what = self.engine, self.do.what
        fresh = engine.scenario.driver == "auto"
        fresh |= what == "moved" and engine.scenario.on_change == "copy"
        if fresh:  # views, as those of buffers are: Dynamo tells views from others
            x = torch.randn(MOST, D, device=engine.device)[: self.size]
            engine.inputs.append(x)
            return x
        x = engine.buffers[what == "moved"][: self.size]
        return x.copy_(torch.randn_like(x))

    def _numbers(self) -> tuple[int, ...]:
        if self.engine.scenario.op == "attend":
            return ()
        if self.do.what == "number":
            return NUMBERS[1:2]
        held = self.graph or self.engine.scenario.driver == "breakable"
        return (NUMBERS[0 if held else int(torch.randint(len(NUMBERS), ()))],)

    def _metadata(self, tally: torch.Tensor, fails_at: int = -1) -> Metadata:
        return Metadata(self.scale, self.live, self.real, tally.zero_(), fails_at)

    def _context(self, metadata: Metadata) -> set_forward_context | None:
        what, batch = self.do.what, self.batch
        if what == "none":
            return set_forward_context(metadata)
        if self.engine.scenario.driver == "auto":
            return None
        descriptor = None if what == "no_descriptor" else batch.descriptor
        real = self.real if what == "padded" else None
        return set_forward_context(
            metadata,
            cudagraph_runtime_mode=batch.mode,
            batch_descriptor=descriptor,
            num_tokens=batch.size,
            num_unpadded_tokens=real,
        )

    def _under(self, metadata: Metadata, call: Callable[..., Any]) -> Any:
        with ExitStack() as stack:
            if self.do.what == "grad":
                stack.enter_context(torch.enable_grad())
            elif self.inference:
                stack.enter_context(torch.inference_mode())
            else:
                stack.enter_context(torch.no_grad())
            if self.do.what == "closed":
                stack.enter_context(allow_capture(False))
            context = self._context(metadata)
            if context is not None:
                stack.enter_context(context)
            Ambient.metadata = metadata if context is None else None
            try:
                return call(self.x, *self.n)
            finally:
                Ambient.metadata = None

    def run(self) -> torch.Tensor:
        engine = self.engine
        if self.size == self.batch.size:
            self.wanted = self._under(self._metadata(engine.other_tally), engine.model)
        fails_at = int(torch.randint(LAYERS, ())) if self.do.what == "raises" else -1
        self.metadata = self._metadata(engine.tally, fails_at)
        engine.metadata.append(weakref.ref(self.metadata))
        return self._under(self.metadata, engine.call)

    def run_here(self) -> tuple[torch.Tensor | None, BaseException | None]:
        try:
            return self.run(), None
        except Exception as error:
            return None, error.with_traceback(None)

    def end(self) -> None:
        """Whoever reads this step's metadata later reads nonsense."""
        metadata, self.metadata = self.metadata, None
        if metadata is None:
            return
        metadata.over, metadata.live, metadata.real = True, float("nan"), 0
        self.scale.fill_(float("nan"))
