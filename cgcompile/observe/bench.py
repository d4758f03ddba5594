"""How fast a call is eager, compiled by torch alone, and here: :func:`bench`.

Times are ratios against eager within one run: rounds of all ways take turns, so that whatever
slows the machine down slows all of them.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from cgcompile import compat
from cgcompile.config import CompilationConfig
from cgcompile.observe.comparing import Tolerance, without_gradients
from cgcompile.observe.inputs import Call
from cgcompile.observe.subject import Subject, tolerance_of
from cgcompile.observe.text import table
from cgcompile.settings import parse_count, parsed


@dataclass(frozen=True)
class Way:
    """One way to run a call.

    Attributes:
        name: ``eager``, ``torch.compile`` or ``cgcompile``.
        seconds: of a call, the median of the rounds; the device has finished.
        ratio: eager's time divided by this one; above 1 is faster than eager.
        difference: how its result differs from eager's, in words; None if it is close enough.
        replays: of graphs, in the measured calls; None of ways that have none.
        uncompared: what of its result nobody can compare; see ``Check.uncompared``.
    """

    name: str
    seconds: float
    ratio: float
    difference: str | None
    replays: int | None
    uncompared: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bench:
    """What :func:`bench` measured; ``print`` it.

    Attributes:
        model: its name.
        device: where its tensors are.
        rounds: how often each way took its turn.
        calls: in each round.
        ways: eager first.
        without: why the model here did not replay; empty if it did.
    """

    model: str
    device: str
    rounds: int
    calls: int
    ways: tuple[Way, ...]
    without: str

    @property
    def ok(self) -> bool:
        """Whether all results are those of eager, and graphs were replayed."""
        return not self.without and all(way.difference is None for way in self.ways)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "ways": [asdict(way) for way in self.ways], "ok": self.ok}

    def __str__(self) -> str:
        rows = [("way", "time", "of eager's speed", "replays", "result")]
        for way in self.ways:
            replays = "-" if way.replays is None else str(way.replays)
            result = "as eager" if way.difference is None else way.difference
            if way.uncompared:
                result += f"; not compared: {', '.join(way.uncompared)}"
            rows.append(
                (way.name, f"{way.seconds * 1e3:.3f} ms", f"{way.ratio:.2f} x", replays, result)
            )
        head = f"{self.model} on {self.device}: {self.rounds} rounds of {self.calls} calls"
        found = [head, *table(rows)]
        return "\n".join(
            [*found, f"no graph was replayed: {self.without}"] if self.without else found
        )


def bench(
    model: Any,
    call: Call,
    *,
    config: CompilationConfig | None = None,
    torch_compile: bool = False,
    rounds: int = 10,
    calls: int = 10,
) -> Bench:
    """Measure a call in each way, and compare the results with eager's.

    Runs without gradients; what the model writes into its arguments is put back where results are
    compared, and not where time is taken. Synchronises.

    Args:
        model: a module or function, or a compiled one.
        call: its arguments.
        config: with which a plain one is compiled; left out: the defaults, and tensors on the CPU
            are recorded by the host recorder, which is slow.
        torch_compile: measure ``torch.compile`` with its own backend as well.
        rounds: how often each way takes its turn.
        calls: in each round.

    Raises:
        ConfigError: settings for a compiled model, or that cannot be.
        BaseException: what the model raised.
    """
    rounds = parsed("rounds", "bench", rounds, parse_count(1))
    calls = parsed("calls", "bench", calls, parse_count(1))
    subject = Subject(model, config, "bench")
    try:
        tolerance = tolerance_of(subject, call, None, None)
        ways: dict[str, Callable[..., Any]] = {"eager": subject.original}
        if torch_compile:
            ways["torch.compile"] = torch.compile(subject.original)
        ways["cgcompile"] = subject.call
        without = subject.until_replayed(call)
        expected = subject.outcome(subject.original, call)
        verdicts = {
            name: _verdict(subject, run, call, expected, tolerance) for name, run in ways.items()
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        before = subject.counters.replays
        with without_gradients():
            for _ in range(rounds):
                for name, run in ways.items():
                    times[name].append(_time(run, call, calls))
        replays = subject.counters.replays - before
        medians = {name: statistics.median(found) for name, found in times.items()}
        return Bench(
            subject.name,
            _device(subject, call),
            rounds,
            calls,
            tuple(
                Way(
                    name,
                    medians[name],
                    medians["eager"] / medians[name],
                    verdicts[name][0],
                    replays if name == "cgcompile" else None,
                    verdicts[name][1],
                )
                for name in ways
            ),
            without,
        )
    finally:
        subject.release()


def _verdict(
    subject: Subject, run: Any, call: Call, expected: dict[str, Any], tolerance: Tolerance
) -> tuple[str | None, tuple[str, ...]]:
    """(how a result differs from eager's, what of it nobody can compare)."""
    if run is subject.original:
        return None, ()
    looser = tolerance if run is subject.call else Tolerance()
    found = subject.outcome(run, call)
    difference = looser.first("the result", expected, found)
    unsaid, blind = subject.uncompared(call, expected, found)
    return blind or None if difference is None else str(difference), unsaid


def _time(run: Callable[..., Any], call: Call, calls: int) -> float:
    """Seconds of a call."""
    args, kwargs = call
    _finish()
    start = time.perf_counter()
    for _ in range(calls):
        run(*args, **kwargs)
    _finish()
    return (time.perf_counter() - start) / calls


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _device(subject: Subject, call: Call) -> str:
    module = getattr(subject.original, "__self__", subject.original)
    weights = list(module.parameters()) if isinstance(module, torch.nn.Module) else []
    found = {str(each.device) for each in [*compat.tree_tensors(call), *weights]}
    return ", ".join(sorted(found)) or "cpu"
