"""What was compared, as values: :class:`Check`, :class:`Verification`."""

from dataclasses import dataclass
from typing import Any, ClassVar

from cgcompile.observe.comparing import Difference, plain
from cgcompile.observe.page import Shown


@dataclass(frozen=True)
class Check:
    """One comparison, on several sets of inputs.

    Attributes:
        name: what was compared with what.
        compared: on how many sets of inputs.
        replays: how many replays took part.
        tolerance: how close numbers have to be, in words.
        findings: what differs, at most one for each set.
        missing: why fewer replays took part than were asked for, or why nothing was compared; empty
            if nothing is missing.
        uncompared: what of the results was not compared: objects without fields and without an
            ``==`` of their own, such as functions.
    """

    name: str
    compared: int
    replays: int
    tolerance: str
    findings: tuple[Difference, ...] = ()
    missing: str = ""
    uncompared: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether something was replayed, all of it, and nothing differs."""
        return bool(self.replays) and not self.missing and not self.findings


@dataclass(frozen=True)
class Verification(Shown):
    """What :func:`cgcompile.verify` found; ``print`` it.

    Attributes:
        subject: what was looked at.
        checks: each comparison.
    """

    template: ClassVar[str] = "verification"

    subject: str
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether each check replayed something and found nothing."""
        return bool(self.checks) and all(check.ok for check in self.checks)

    @property
    def differences(self) -> tuple[Difference, ...]:
        """All that differs, in the order of the checks."""
        return tuple(found for check in self.checks for found in check.findings)

    @property
    def replays(self) -> int:
        """How many replays took part."""
        return sum(check.replays for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"ok": self.ok, **plain(self)}

    def __str__(self) -> str:
        cells = [("check", "inputs", "replays", "tolerance", "result")]
        for check in self.checks:
            counts = str(check.compared), str(check.replays)
            cells.append((check.name, *counts, check.tolerance, _result(check)))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        rows = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in cells]
        verdict = "ok" if self.ok else "not ok"
        found = [str(each) for each in self.differences]
        unsaid = dict.fromkeys(name for check in self.checks for name in check.uncompared)
        rows += [f"not compared: {', '.join(unsaid)}"] if unsaid else []
        return "\n".join([f"{self.subject}: {verdict}", *map(str.rstrip, rows), *found])


def _result(check: Check) -> str:
    if check.findings:
        return f"{len(check.findings)} differ"
    if not check.replays:
        return f"nothing was replayed: {check.missing}"
    return check.missing or "equal"
