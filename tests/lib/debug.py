"""Models, marked lines and single messages, for the tests of ``cgcompile.debug``."""

import inspect
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import cgcompile
from cgcompile import BatchDescriptor, CUDAGraphMode, set_forward_context
from cgcompile.debug import Diagnosis, Difference, Finding

D = 16
CALLS: list[str] = []


class Block(nn.Module):
    def __init__(self, width: int = D) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v))


class Decoder(nn.Module):
    def __init__(self, layers: int = 2, width: int = D) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Reads(nn.Module):
    """The host reads a number of the data, which Dynamo keeps in the graph only if asked."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x, lengths):
        y = self.linear(x)
        return y * 2, lengths.max().item()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x):
        y = self.linear(x)
        if y.sum() > 0:
            y = y + 1
        return y


class Raises(nn.Module):
    def forward(self, x):
        CALLS.append("ran")
        raise ValueError("not today")


def meta(make: Any) -> nn.Module:
    with torch.device("meta"):
        return make()


def inputs(rows: int = 4, device: str = "cpu", width: int = D) -> torch.Tensor:
    return torch.randn(rows, 3, width, device=device)


def shown(text: str) -> str:
    """Without line numbers."""
    return re.sub(r"\.py:\d+ in", ".py:N in", text)


def names_of(data: Any, indent: str = "") -> str:
    """The schema of plain data: a line for each name, with what it holds; of lists the first."""
    rows = []
    for name, each in data.items():
        inner, many = (each[0], " list") if isinstance(each, list) and each else (each, "")
        kind = "" if isinstance(inner, dict) else f" {type(inner).__name__}"
        rows.append(f"{indent}{name}:{many}{kind}")
        if isinstance(inner, dict):
            rows.append(names_of(inner, indent + "  "))
    return "\n".join(rows)


def marked_line(code: Any, marker: str) -> int:
    """The number of the one line of a class or function that ends in ``# <marker>``."""
    lines, first = inspect.getsourcelines(code)
    found = [first + i for i, text in enumerate(lines) if text.rstrip().endswith(f"# <{marker}>")]
    assert len(found) == 1, f"{marker}: {len(found)} lines"
    return found[0]


def examine(model: Any, *args: Any, **more: Any) -> cgcompile.debug.Diagnosis:
    with torch.inference_mode():
        return cgcompile.debug.doctor(model, *args, **more)


def found(diagnosis: cgcompile.debug.Diagnosis, kind: str, code: Any, marker: str) -> Finding:
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


ROWS = 6
FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE


def at(code: Any, marker: str) -> str:
    """``test_faults.py:41 in``, of the marked line of a class or function."""
    file = inspect.getsourcefile(code)
    assert file is not None
    return f"{Path(file).name}:{marked_line(code, marker)} in "


def step(mode: CUDAGraphMode = FULL, metadata: Any = None) -> AbstractContextManager[Any]:
    return set_forward_context(
        metadata, cudagraph_runtime_mode=mode, batch_descriptor=BatchDescriptor(ROWS)
    )


def only(verified: Any) -> Difference:
    """The one difference, of something that was replayed."""
    assert (verified.ok, verified.replays >= 1) == (False, True), verified
    (difference,) = verified.differences
    return difference


def only_finding(error: BaseException) -> Finding:
    """What an error says."""
    (finding,) = Diagnosis.of_error(error).findings
    return finding
