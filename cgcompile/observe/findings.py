"""One thing that :func:`cgcompile.doctor` found, as a value: :class:`Finding`."""

from dataclasses import dataclass
from typing import Any

from cgcompile.passes.lines import Line

SEVERITIES = ("error", "break", "note")


@dataclass(frozen=True)
class Finding:
    """One thing that graphs cannot hold, or hold only at a cost.

    Attributes:
        kind: a stable name, such as ``host_sync``; a :class:`~cgcompile.Reason` has the same one.
        severity: ``error``: it will raise, or give wrong results. ``break``: that part, or the
            step, runs without a graph, or is captured again and again. ``note``: worth to know.
        message: what was found.
        fix: what to do.
        op: the op, function, argument or attribute that it is about.
        source: the user's line; None where no code of the user's is concerned.
        count: how often one call of the model does it.
    """

    kind: str
    severity: str
    message: str
    fix: str
    op: str
    source: Line | None = None
    count: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "kind": self.kind,
            "severity": self.severity,
            "message": self.message,
            "fix": self.fix,
            "op": self.op,
            "source": None if self.source is None else self.source._asdict(),
            "count": self.count,
        }

    def __str__(self) -> str:
        times = f", {self.count} times" if self.count > 1 else ""
        rows = [f"{self.severity:6} {self.kind}: {self.op}{times}"]
        rows += [f"  at   {self.source}"] if self.source is not None else []
        return "\n".join([*rows, f"  why  {self.message}", f"  fix  {self.fix}"])
