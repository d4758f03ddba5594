"""One architecture in one way of compiling: right or wrong, and how much of it is replayed.

Each call gets new random inputs and is compared with the eager model, and so are the inputs after
it and the result of the call before. It is an error of the zoo if results hardly move from call to
call: what is stale would not be seen. In 16 bits results differ from eager's by rounding, so the
RMS error against float64 is compared with eager's own as well.
"""

import copy
import dataclasses
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

import cgcompile
from cgcompile.errors import CaptureError
from cgcompile.reasons import Reason
from model_zoo.compare import Mismatch, compare, moved, square_error
from model_zoo.entries import Entry, NotThere
from model_zoo.ways import Call, Step, decode_steps, forward_steps, through_torch, traced_once

WAYS = ("compile", "traced", "decode")


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        device: ``cpu`` records on the host.
        compiler: of the pieces.
        sizes: batch sizes; each once in a round, in random order.
        rounds: how many.
        warm: of these, rounds before calls are counted: Dynamo makes up to three graphs for sizes
            that vary, and each size runs plain once and is captured once in its graph.
        tolerance: largest difference from eager, over the largest absolute value of the result.
        seed: of weights, inputs and order.
        dtype: of weights and inputs. If it is not float32, results are compared with those of the
            same weights in float64, too.
        wider: factor of the sizes of models that can be made wider, so that kernels take them.
        limit: largest RMS error against float64, over eager's.
    """

    device: str = "cpu"
    compiler: str = "eager"
    sizes: tuple[int, ...] = (1, 2, 3, 5, 8)
    rounds: int = 6
    warm: int = 4
    tolerance: float = 2e-3
    seed: int = 0
    dtype: str = "float32"
    wider: int = 1
    limit: float = 1.05

    def backend(self, **settings: Any) -> cgcompile.Backend:
        """A backend of these settings, with nothing kept on disk."""
        if self.device == "cpu":
            settings["capture_device"] = "host"
        if settings.get("mode") != "NONE":  # there are pieces to compile
            settings |= {"compiler": self.compiler, "cache_dir": "off"}
        return cgcompile.Backend(**settings)


@dataclass
class Row:
    """What became of one architecture in one way.

    Attributes:
        name: of the architecture.
        way: ``compile``: ``torch.compile``; ``traced``: ``cgcompile.compile`` without guards;
            ``decode``: steps with a static cache through ``torch.compile``.
        outcome: ``right``: all calls agree with eager, and some were replayed; ``wrong``;
            ``refused``: all agree, none was replayed, or cgcompile raised, or the model did in a
            capture alone, and a plain call after it agrees; ``error``: anything else raised;
            ``time-out``; ``crash``; ``not there``: the library that is installed lacks it.
        detail: why it is not right, or why not all was replayed.
        replayed: share of the calls after the warm rounds in which all graphs were replayed that
            have something to capture (all but those counted as ``no_kernel``).
        calls: after the warm rounds.
        graphs: that Dynamo made.
        breaks: of Dynamo's graphs.
        captures: of batches.
        reasons: why graphs did not replay after the warm rounds, with how often.
        difference: the largest, as the tolerance is given.
        error: RMS error against float64 over all calls, over eager's; 0 if it was not measured.
        eager_error: eager's, over the RMS of the results.
        moves: how much results differ between calls, at least, likewise.
        seconds: all of it.
        splitting: ``fx``, or what it fell back to.
    """

    name: str
    way: str
    outcome: str = "right"
    detail: str = ""
    replayed: float = 0.0
    calls: int = 0
    graphs: int = 0
    breaks: int = 0
    captures: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    difference: float = 0.0
    error: float = 0.0
    eager_error: float = 0.0
    moves: float = float("inf")
    seconds: float = 0.0
    splitting: str = "fx"

    def to_json(self) -> dict[str, Any]:
        """All of it, numbers rounded; 0 where no result could move."""
        fields = dataclasses.asdict(self)
        fields["moves"] = 0.0 if self.moves == float("inf") else self.moves
        for name in ("difference", "error", "eager_error", "moves", "seconds", "replayed"):
            fields[name] = float(f"{fields[name]:.3g}")
        return fields


Compile = Callable[[torch.nn.Module, Entry, cgcompile.Backend], Call]


def measure(entry: Entry, way: str, settings: Settings, compiled: Compile = through_torch) -> Row:
    """Make an architecture, call it in one way, and compare.

    Args:
        entry: the architecture.
        way: one of :data:`WAYS`.
        settings: how.
        compiled: compiles it where the way is ``compile`` or ``decode``.

    Returns:
        Its row; nothing is raised but what ends a process.
    """
    torch._dynamo.reset()
    begun, row = time.perf_counter(), Row(entry.name, way)
    try:
        with torch.inference_mode():
            _measure(drawn(entry, settings), entry, row, settings, compiled)
    except Mismatch as error:
        row.outcome, row.detail = "wrong", str(error)
    except NotThere as error:
        row.outcome, row.detail = "not there", str(error)
    except Exception as error:
        row.outcome, row.detail = "refused" if is_refusal(error) else "error", named(error)
    row.seconds = time.perf_counter() - begun
    return row


def drawn(entry: Entry, settings: Settings) -> torch.nn.Module:
    """The model on its device, with weights under which results depend on inputs."""
    torch.manual_seed(settings.seed)
    model = entry.make(settings.wider) if settings.wider > 1 and entry.widens else entry.make()
    norms = [each for each in model.modules() if isinstance(each, _BatchNorm)]
    for name, weight in model.named_parameters():
        if not weight.is_floating_point() or name.endswith("A_log"):
            continue
        if weight.ndim < 2:
            weight.add_(torch.randn_like(weight), alpha=0.1)
        else:
            weight.normal_().mul_(weight[0].numel() ** -0.5)
    if norms:  # with the statistics of a batch, or the signal would fade from layer to layer
        for norm in norms:
            norm.momentum = 1.0
        model.train()(**entry.inputs(8), **entry.settings)
    return entry.finish(model.eval().to(settings.device, getattr(torch, settings.dtype)))


def in_float64(model: torch.nn.Module) -> torch.nn.Module:
    """A copy with the same weights in float64."""
    exact = copy.deepcopy(model).double()
    config: Any = getattr(exact, "config", None)
    if getattr(config, "_experts_implementation", None) is not None:
        experts: Any = exact
        experts.set_experts_implementation("eager")  # grouped products take no float64
    return exact


def _measure(
    model: torch.nn.Module, entry: Entry, row: Row, settings: Settings, compiled: Compile
) -> None:
    settings = dataclasses.replace(settings, tolerance=max(settings.tolerance, entry.tolerance))
    if row.way == "traced":
        _traced(model, entry, row, settings)
    else:
        backend = settings.backend()
        steps = decode_steps if row.way == "decode" else forward_steps
        exact = None if settings.dtype == "float32" else in_float64(model)
        call = compiled(model, entry, backend)
        _run(row, settings, backend, steps(model, entry, call, settings, exact))
    if row.outcome == "right" and row.error > settings.limit:
        row.outcome, row.detail = "wrong", f"its RMS error is {row.error:.3f} times eager's"
    if row.outcome == "right" and row.moves < 5 * settings.tolerance:
        row.outcome, row.detail = "error", f"results move by {row.moves:.1g} only"


def _traced(model: torch.nn.Module, entry: Entry, row: Row, settings: Settings) -> None:
    """Traced once; where that is refused, without a trace."""
    refusals = []
    for splitting in ("fx", "breakable", "full"):
        row.splitting = splitting
        backend, call, plain = traced_once(model, entry, settings, splitting)
        try:
            _run(row, settings, backend, forward_steps(model, entry, call, settings))
        except Exception as error:
            if not is_refusal(error):
                raise
            refusals.append(f"{splitting}: {named(error)}")
            if splitting != "fx":
                _still_right(model, entry, plain, settings)
            continue
        row.detail = "; ".join([*refusals, row.detail]).removesuffix("; ")
        return
    row.outcome, row.detail = "refused", "; ".join(refusals)


def _still_right(model: torch.nn.Module, entry: Entry, plain: Call, settings: Settings) -> None:
    """What a refused capture must leave behind: a model that can be called."""
    for step in forward_steps(model, entry, plain, dataclasses.replace(settings, rounds=1)):
        expected = step.eager()
        try:
            actual = step.compiled()
        except Exception as error:
            raise RuntimeError(f"a plain call after a refusal raised {named(error)}") from error
        compare(expected, actual, settings.tolerance, f"a plain call after a refusal, {step}")


def _run(row: Row, settings: Settings, backend: cgcompile.Backend, steps: Iterable[Step]) -> None:
    torch._dynamo.utils.counters.clear()
    row.replayed, row.moves, row.calls = 0.0, float("inf"), 0
    reasons: Counter[str] = Counter()
    last: dict[Any, Any] = {}
    calls, errors = 0, [0.0, 0.0]  # squares of ours and of eager's
    replays, before, earlier = 0, backend.counters, ((), ())
    for step in steps:
        expected = step.eager()
        if step.inputs and not last and moved(expected, step.eager()):
            raise ValueError("eager gives another result for the same inputs")
        actual = step.compiled()
        row.difference = max(row.difference, compare(expected, actual, settings.tolerance, step))
        if step.exact is not None:
            exact, calls = step.exact(), calls + 1
            errors[0] += square_error(actual, exact)
            errors[1] += square_error(expected, exact)
        if step.inputs:
            inputs, same = step.inputs
            compare(inputs, same, 0.0, f"inputs of {step}")
        if row.splitting == "fx":  # else results are views that the next call overwrites
            compare(earlier[1], earlier[0], 0.0, f"the result of the call before {step}")
            earlier = actual, pytree.tree_map_only(torch.Tensor, torch.clone, actual)
        if step.key in last:
            row.moves = min(row.moves, moved(last[step.key], expected))
        last[step.key] = expected
        now = backend.counters
        if step.counts:
            row.calls += 1
            plain = now.plain - before.plain
            reasons += Counter({reason.value: number for reason, number in plain.items()})
            reasons["captured"] += now.captures - before.captures
            missed = now.captures > before.captures or plain.keys() - {Reason.NO_KERNEL}
            replays += now.replays > before.replays and not missed
        before = now
    row.replayed = replays / max(row.calls, 1)
    row.error = (errors[0] / errors[1]) ** 0.5 if errors[1] else 0.0
    row.eager_error = (errors[1] / max(calls, 1)) ** 0.5
    row.reasons = dict(+reasons)
    row.captures, row.graphs = before.captures, len(backend.graphs)
    row.breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    details = {reason.value: detail for reason, detail in before.details.items()}
    whys = [f"{reason}: {details[reason]}" for reason in row.reasons if reason in details]
    if not before.calls:
        whys = ["no graph was called"]
    row.detail = "; ".join(whys)
    row.outcome = "right" if replays else "refused"


def cause(error: BaseException) -> BaseException:
    """What a backend raised, where Dynamo wraps it."""
    return getattr(error, "inner_exception", None) or error


def is_refusal(error: BaseException) -> bool:
    """Whether cgcompile raised, or the model did while it was captured."""
    return isinstance(cause(error), cgcompile.CGCompileError) or _in_capture(error)


def named(error: BaseException) -> str:
    """The kind of an error and the first line of its message; of a capture: op and line first."""
    root = cause(error)
    lines = [line for line in str(root).splitlines() if line.strip()]
    kind, text = type(root).__name__, lines[0].strip() if lines else ""
    where = ""
    if isinstance(root, CaptureError) or _in_capture(error):
        (finding,) = cgcompile.debug.Diagnosis.of_error(root).findings
        places = [finding.op] if finding.op not in ("-", "") else []
        places += [finding.source.where] if finding.source is not None else []
        where = f"{' at '.join(places)}: " if places else ""
        text = text.removeprefix(f"{finding.op}: ")
    return f"{where}{kind}: {text}"[:300]


def _in_capture(error: BaseException) -> bool:
    """Whether torch, and no slip in Python, raised below a capture, which changes no error."""
    if not isinstance(error, RuntimeError):
        return False
    capturing = cgcompile.BreakableCUDAGraphWrapper.record.__code__
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code is capturing for frame, _ in frames)
