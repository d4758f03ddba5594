"""What the tests of the doctor share: find a marked line, and examine a model in inference mode."""

import inspect
from typing import Any

import torch

import cgcompile


def marked_line(code: Any, marker: str) -> int:
    """The number of the one line of a class or function that ends in ``# <marker>``."""
    lines, first = inspect.getsourcelines(code)
    found = [first + i for i, text in enumerate(lines) if text.rstrip().endswith(f"# <{marker}>")]
    assert len(found) == 1, f"{marker}: {len(found)} lines"
    return found[0]


def examine(model: Any, *args: Any, **more: Any) -> cgcompile.debug.Diagnosis:
    with torch.inference_mode():
        return cgcompile.debug.doctor(model, *args, **more)


def found(
    diagnosis: cgcompile.debug.Diagnosis, kind: str, code: Any, marker: str
) -> cgcompile.debug.findings.Finding:
    """The one finding of a kind on the marked line."""
    line = marked_line(code, marker)
    alike = [e for e in diagnosis.of_kind(kind) if e.source is not None and e.source.line == line]
    assert len(alike) == 1, f"{kind} in line {line}:\n{diagnosis}"
    assert alike[0].source.file == inspect.getsourcefile(inspect.unwrap(code))
    assert alike[0].source.code.endswith(f"# <{marker}>")
    assert alike[0].fix
    return alike[0]


def worse_than_notes(diagnosis: cgcompile.debug.Diagnosis) -> list[str]:
    return [str(each) for each in diagnosis.findings if each.severity != "note"]
