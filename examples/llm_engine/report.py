"""What a run did, in print, and which promises it broke."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from llm_engine.engine import Tally
from llm_engine.scheduler import Pressure, Request

UNIFORM_FULL = 0.95  # of uniform decode steps, in the modes that have FULL graphs for them
FULL_MODES = ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "breakable")
LEAST_DECODE_SIZES = 3


@dataclass
class Run:
    """One workload, served in one mode with one kind of draft.

    Attributes:
        mode: its name.
        draft: its name, ``"none"`` if there was none.
        requests: all, done or not.
        tally: of the target's steps.
        pressure: of the cache.
        seconds: of serving, after all was compiled and captured.
        start_seconds: of compiling what was not compiled yet, and capturing.
        graph_bytes: device memory that capturing took; 0 on the CPU.
        replays: that the target's graphs counted while serving.
        leaked_blocks: that nobody gave back.
        coverage: the tables of all managers, by title.
    """

    mode: str
    draft: str
    requests: Sequence[Request]
    tally: Tally
    pressure: Pressure
    seconds: float = 0.0
    start_seconds: float = 0.0
    graph_bytes: int = 0
    replays: int = 0
    leaked_blocks: int = 0
    coverage: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.mode if self.draft == "none" else f"{self.mode} + {self.draft} draft"

    @property
    def tokens(self) -> int:
        return sum(len(each.output) for each in self.requests)

    @property
    def acceptance(self) -> float:
        return self.tally.accepted / self.tally.proposed if self.tally.proposed else 0.0

    @property
    def seconds_per_token(self) -> float:
        """Mean over requests of the time between one token and the next."""
        spans = [
            (each.times[-1] - each.times[0]) / (len(each.output) - 1)
            for each in self.requests
            if len(each.output) > 1
        ]
        return sum(spans) / len(spans) if spans else 0.0

    def text(self) -> str:
        """A few lines."""
        tally, steps = self.tally, max(self.tally.steps, 1)
        shares = ", ".join(
            f"{mode} {tally.modes[mode] / steps:.0%}" for mode in ("FULL", "PIECEWISE", "NONE")
        )
        rate = self.tokens / self.seconds if self.seconds else 0.0
        lines = [
            f"{self.name}: {len(self.requests)} requests, {tally.steps} steps, {self.tokens} tokens",
            f"  {rate:.1f} tokens/s, {self.seconds_per_token * 1e3:.2f} ms per output token, "
            f"{self.seconds / steps * 1e3:.2f} ms per step; start {self.start_seconds:.1f} s"
            + (f", graphs {self.graph_bytes / 2**20:.0f} MiB" if self.graph_bytes else ""),
            f"  steps: {shares}; uniform decode {tally.uniform}, of which FULL "
            f"{tally.uniform_full}, in {len(tally.decode_sizes)} sizes",
            f"  mixed steps {tally.mixed}, preemptions {self.pressure.preemptions}, "
            f"steps with a full cache {self.pressure.full_steps}",
        ]
        if tally.proposed:
            lines.append(
                f"  drafts: {tally.accepted} of {tally.proposed} accepted ({self.acceptance:.1%})"
            )
        return "\n".join(lines)


def first_difference(expected: Sequence[Request], found: Sequence[Request]) -> str | None:
    """Where the output of two runs differs first; None if it is the same."""
    for one, other in zip(expected, found, strict=True):
        if one.output != other.output:
            pairs = list(zip(one.output, other.output, strict=False))
            place = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
            return f"request {one.number} from output token {place} on"
    return None


def broken_promises(run: Run, reference: Run, *, scarce: bool, exact: bool) -> list[str]:
    """What went wrong in a run, a sentence each; empty if all is well.

    Args:
        run: to be judged.
        reference: whose tokens it must have.
        scarce: the cache was made too small, so that its pressure is part of what is shown.
        exact: tokens must be the same; rounding in bfloat16 depends on the padding.
    """
    broken = [f"{run.name}: {each}" for each in _unfinished(run)]
    difference = first_difference(reference.requests, run.requests) if exact else None
    if difference is not None:
        broken.append(f"{run.name}: tokens differ from those of {reference.name}: {difference}")
    tally = run.tally
    if run.mode in FULL_MODES and tally.uniform_full < UNIFORM_FULL * max(tally.uniform, 1):
        broken.append(
            f"{run.name}: only {tally.uniform_full} of {tally.uniform} uniform decode steps "
            f"were FULL, less than {UNIFORM_FULL:.0%}"
        )
    with_graph = tally.modes["FULL"] + tally.modes["PIECEWISE"]
    if run.replays != with_graph:
        broken.append(f"{run.name}: {with_graph} steps with graphs made {run.replays} replays")
    if run.draft == "ngram" and not tally.accepted:
        broken.append(f"{run.name}: no n-gram was accepted, although prompts repeat themselves")
    return broken + [f"{run.name}: {each}" for each in (_not_shown(run) if scarce else [])]


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
        "no step mixed chunks of prompts and decoding": run.tally.mixed,
        "no request was preempted": run.pressure.preemptions,
        "the cache was never full": run.pressure.full_steps,
    }
    broken = [text for text, count in checks.items() if not count]
    if run.draft == "none" and len(run.tally.decode_sizes) < LEAST_DECODE_SIZES:
        broken.append(f"decoding had fewer than {LEAST_DECODE_SIZES} batch sizes")
    return broken
