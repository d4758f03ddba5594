"""Models, marked lines and single messages, for the tests of ``cgcompile.debug``."""

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import cgcompile
from cgcompile import BatchDescriptor, CUDAGraphMode, set_forward_context
from cgcompile.debug import Diagnosis
from cgcompile.debug.compare import Difference
from cgcompile.debug.findings import Finding

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
    for name, value in data.items():
        inner, many = (value[0], " list") if isinstance(value, list) and value else (value, "")
        kind = "" if isinstance(inner, dict) else f" {type(inner).__name__}"
        rows.append(f"{indent}{name}:{many}{kind}")
        if isinstance(inner, dict):
            rows.append(names_of(inner, indent + "  "))
    return "\n".join(rows)


MARKER = re.compile(r"# (?:<|FAULT: )([\w ]+)>?$")


def marker(line: Any) -> str:
    """The ``mean`` of a line of code that ends in ``# <mean>`` or ``# FAULT: mean``; else empty."""
    match = MARKER.search(str(line))
    return match[1] if match else ""


def examine(model: Any, *args: Any, **more: Any) -> Diagnosis:
    with torch.inference_mode():
        return cgcompile.debug.doctor(model, *args, **more)


def by_line(diagnosis: Diagnosis) -> dict[str, Finding]:
    """The findings by the marker of their line; by their op where the line has none."""
    named: dict[str, Finding] = {}
    for finding in diagnosis.findings:
        assert finding.fix
        key = marker(finding.source) or finding.op
        assert key not in named, str(diagnosis)
        named[key] = finding
    return named


def kinds(diagnosis: Diagnosis) -> dict[str, str]:
    """``{"mean": "host_sync break"}``: kind and severity of all findings; see :func:`by_line`."""
    return {key: f"{each.kind} {each.severity}" for key, each in by_line(diagnosis).items()}


def only_finding(diagnosis: Diagnosis | BaseException) -> Finding:
    """The one finding of a diagnosis, or of that of an error."""
    if isinstance(diagnosis, BaseException):
        diagnosis = Diagnosis.of_error(diagnosis)
    (finding,) = diagnosis.findings
    return finding


def worse_than_notes(diagnosis: Diagnosis) -> list[str]:
    return [str(finding) for finding in diagnosis.findings if finding.severity != "note"]


ROWS = 6
FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE


def step(mode: CUDAGraphMode = FULL, metadata: Any = None, real: int | None = None) -> Any:
    return set_forward_context(
        metadata,
        cudagraph_runtime_mode=mode,
        batch_descriptor=BatchDescriptor(ROWS),
        num_unpadded_tokens=real,
    )


def only(verified: Any) -> Difference:
    """The one difference, of something that was replayed."""
    assert (verified.ok, verified.replays >= 1) == (False, True), verified
    (difference,) = verified.differences
    return difference
