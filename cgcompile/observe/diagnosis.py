""":class:`Diagnosis`: what :func:`cgcompile.doctor` found, as a value that prints and is JSON."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from cgcompile.errors import ConfigError
from cgcompile.observe.failures import of_error
from cgcompile.observe.findings import SEVERITIES, Finding
from cgcompile.observe.page import Shown
from cgcompile.settings import checked

VERSION = 1  # of to_dict(); a key that goes or changes its meaning makes it another one


@dataclass(frozen=True)
class Diagnosis(Shown):
    """What was found, the worst first; ``print`` it.

    Attributes:
        model: the name of what was looked at.
        device: where a graph of it would be.
        findings: sorted by severity, then in the order in which a call meets them.
    """

    template: ClassVar[str] = "diagnosis"

    model: str
    device: str
    findings: tuple[Finding, ...] = ()

    @classmethod
    @checked
    def of(cls, model: str, device: str, findings: Iterable[Finding]) -> "Diagnosis":
        """Sorted."""
        ordered = sorted(findings, key=lambda each: SEVERITIES.index(each.severity))
        return cls(model, device, tuple(ordered))

    @classmethod
    def of_error(cls, error: BaseException) -> "Diagnosis":
        """Which op made a capture or a replay fail, at which line of the user's, and the fix.

        Args:
            error: what a model, a wrapper or a manager raised; its causes are followed. Of one that
                did not come by cgcompile only the line is told.

        Raises:
            ConfigError: it is no exception.
        """
        if not isinstance(error, BaseException):
            raise ConfigError.bad_value(
                name="error", where="Diagnosis.of_error", value=error, expected="an exception"
            )
        return cls.of(type(error).__name__, "-", [of_error(error)])

    @property
    def ok(self) -> bool:
        """Whether nothing worse than a note was found."""
        return all(each.severity == "note" for each in self.findings)

    def of_kind(self, kind: str) -> tuple[Finding, ...]:
        """The findings of one kind."""
        return tuple(each for each in self.findings if each.kind == kind)

    def to_dict(self) -> dict[str, Any]:
        """Plain values: ``version``, ``model``, ``device``, ``ok``, ``findings``."""
        return {
            "version": VERSION,
            "model": self.model,
            "device": self.device,
            "ok": self.ok,
            "findings": [each.to_dict() for each in self.findings],
        }

    def __str__(self) -> str:
        start = f"{self.model}:" if self.device == "-" else f"{self.model} on {self.device}:"
        if not self.findings:
            return f"{start} nothing found"
        found = [each.severity for each in self.findings]
        counts = [(name, found.count(name)) for name in SEVERITIES if name in found]
        words = ", ".join(f"{n} {name}{'s' if n > 1 else ''}" for name, n in counts)
        return "\n".join([f"{start} {words}", *map(str, self.findings)])
