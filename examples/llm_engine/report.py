"""What a run did, in print, and which promises it broke."""

from collections.abc import Sequence
from dataclasses import dataclass

from llm_engine.engine import Drafted
from llm_engine.judge import Parting
from llm_engine.runner import Runner, Tally
from llm_engine.scheduler import Pressure, Request

UNIFORM_FULL = 0.95  # of uniform decode steps, in the modes that have FULL graphs for them
FULL_MODES = ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "breakable")
LEAST_DECODE_SIZES = 3


@dataclass
class Model:
    """What one of the models did in a run: the target or the draft."""

    title: str
    tally: Tally
    replays: int
    start_seconds: float
    graph_bytes: int
    coverage: str

    @classmethod
    def of(cls, title: str, runner: Runner) -> "Model":
        """Of a runner that has served; before it is stopped."""
        coverage = runner.manager.statistics.coverage()
        return cls(
            title, runner.tally, runner.replays, runner.start_seconds, runner.graph_bytes, coverage
        )

    def text(self) -> str:
        """One line."""
        tally, steps = self.tally, max(self.tally.steps, 1)
        modes = [f"{n} {tally.modes[n] / steps:.0%}" for n in ("FULL", "PIECEWISE", "NONE")]
        shares = f"{', '.join(modes)}, {self.replays} replays"
        uniform = f"{tally.uniform} in {len(tally.decode_sizes)} sizes"
        return (
            f"{self.title}: {tally.steps} steps, {shares}; uniform decode {uniform}, "
            f"{tally.uniform_full} of them FULL"
        )


@dataclass
class Run:
    """One workload, served in one mode with one kind of draft.

    Attributes:
        mode: its name.
        draft: its name, ``"none"`` if there was none.
        requests: all, done or not.
        models: the target first, then the draft if it is a model.
        pressure: of the cache.
        drafted: what became of drafts.
        mixed_steps: with chunks of prompts beside decoding.
        seconds: of serving, after all was compiled and captured.
        leaked_blocks: that were not freed.
        partings: where its tokens are not those of the first run.
    """

    mode: str
    draft: str
    requests: Sequence[Request]
    models: Sequence[Model]
    pressure: Pressure
    drafted: Drafted
    mixed_steps: int
    seconds: float
    leaked_blocks: int = 0
    partings: tuple[Parting, ...] = ()

    @property
    def name(self) -> str:
        return self.mode if self.draft == "none" else f"{self.mode} + {self.draft} draft"

    @property
    def tokens(self) -> int:
        return sum(len(each.output) for each in self.requests)

    @property
    def tokens_a_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def accepted_a_round(self) -> float:
        """Drafts that a verification of one request accepts."""
        return self.drafted.accepted / max(self.drafted.rounds, 1)

    @property
    def target(self) -> Tally:
        return self.models[0].tally

    @property
    def seconds_per_token(self) -> float:
        """Mean over requests of the time between one token and the next."""
        spans = [
            (request.times[-1] - request.times[0]) / (len(request.output) - 1)
            for request in self.requests
            if len(request.times) > 1
        ]
        return sum(spans) / len(spans) if spans else 0.0

    def text(self) -> str:
        """A few lines."""
        step = self.seconds / max(self.target.steps, 1)
        start = sum(each.start_seconds for each in self.models)
        megabytes = sum(each.graph_bytes for each in self.models) / 2**20
        lines = [
            f"{self.name}: {len(self.requests)} requests, {self.tokens} tokens in "
            f"{self.seconds:.2f} s: {self.tokens_a_second:.1f} tokens/s, "
            f"{self.seconds_per_token * 1e3:.2f} ms per output token, {step * 1e3:.2f} ms per step",
            f"  start {start:.2f} s, graphs {megabytes:.0f} MiB",
            *(f"  {each.text()}" for each in self.models),
            f"  mixed steps {self.mixed_steps}, preemptions {self.pressure.preemptions}, "
            f"steps with a full cache {self.pressure.full_steps}",
        ]
        if self.drafted.proposed:
            share = self.drafted.accepted / self.drafted.proposed
            counts = f"{self.drafted.accepted} of {self.drafted.proposed}"
            a_round = self.accepted_a_round
            lines.append(f"  drafts: {counts} accepted ({share:.1%}), {a_round:.2f} a round")
        if self.partings:
            gap = max(part.gap for part in self.partings)
            spacing = max(part.spacing for part in self.partings)
            lines.append(
                f"  {len(self.partings)} requests get other tokens, at gaps up to {gap:.2g}; "
                f"neighbouring numbers of the dtype are up to {spacing:.2g} apart there"
            )
        return "\n".join(lines)


def broken_promises(run: Run, reference: str, *, scarce: bool, close: float) -> list[str]:
    """What went wrong in a run, a sentence each; empty if all is well.

    Args:
        run: to be judged.
        reference: the name of the run whose tokens it must have.
        scarce: the cache was made too small, so that its pressure is part of what is shown.
        close: tokens may differ where their logits are at most so close.
    """
    broken = [f"{run.name}: {each}" for each in _unfinished(run)]
    for part in run.partings:
        if not part.gap <= close:
            broken.append(
                f"{run.name}: tokens differ from those of {reference}: request {part.number} from "
                f"output token {part.position} on, "
                f"by {part.gap:.2g} standard deviations of the logits"
            )
    for model in run.models:
        broken += [f"{run.name}, {model.title}: {text}" for text in _missed_graphs(model, run.mode)]
    if run.draft == "ngram" and not run.drafted.accepted:
        broken.append(f"{run.name}: no n-gram was accepted, although prompts repeat themselves")
    return broken + [f"{run.name}: {each}" for each in (_not_shown(run) if scarce else [])]


def _missed_graphs(model: Model, mode: str) -> list[str]:
    broken = []
    tally = model.tally
    if mode in FULL_MODES and tally.uniform_full < UNIFORM_FULL * tally.uniform:
        broken.append(
            f"only {tally.uniform_full} of {tally.uniform} uniform decode steps were FULL, "
            f"less than {UNIFORM_FULL:.0%}"
        )
    with_graph = tally.modes["FULL"] + tally.modes["PIECEWISE"]
    if model.replays != with_graph:
        broken.append(f"{with_graph} steps with graphs made {model.replays} replays")
    return broken


def _unfinished(run: Run) -> list[str]:
    broken = []
    short = [each.number for each in run.requests if not each.done]
    if short:
        broken.append(f"requests that are not done: {short}")
    if run.leaked_blocks:
        broken.append(f"{run.leaked_blocks} blocks were not given back")
    return broken


def _not_shown(run: Run) -> list[str]:
    """What a workload must lead to in order to show anything."""
    checks = {
        "no step mixed chunks of prompts and decoding": run.mixed_steps,
        "no request was preempted": run.pressure.preemptions,
        "the cache was never full": run.pressure.full_steps,
    }
    broken = [text for text, count in checks.items() if not count]
    if run.draft == "none" and len(run.target.decode_sizes) < LEAST_DECODE_SIZES:
        broken.append(f"decoding had fewer than {LEAST_DECODE_SIZES} batch sizes")
    return broken
