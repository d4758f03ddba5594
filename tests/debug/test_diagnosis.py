"""What a diagnosis is as a value, as text and as JSON."""

import dataclasses
import json

import pytest
import torch
from lib.debug import examine
from lib.snapshots import assert_snapshot
from torch import nn

from cgcompile.debug import Diagnosis
from cgcompile.debug.findings import Finding


class Faulty(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        x = x + torch.rand_like(x)
        for _ in range(2):
            x = x * x.sum().item()
        self.calls += 1
        return x


def diagnosis() -> Diagnosis:
    """With lines that do not move when this file is edited."""
    examined = examine(Faulty(), torch.ones(2))
    findings = [
        dataclasses.replace(finding, source=finding.source._replace(file="/src/model.py", line=7))
        for finding in examined.findings
    ]
    return Diagnosis.of(examined.model, examined.device, findings)


def test_text_and_json() -> None:
    report = diagnosis()
    assert json.loads(report.to_json()) == report.to_dict()
    assert_snapshot("diagnosis", f"{report}\n\n{report.to_json()}")


def test_empty() -> None:
    empty = Diagnosis.of("Model", "cuda:0", [])
    assert str(empty) == "Model on cuda:0: nothing found"
    assert empty.ok
    assert empty.to_dict() == {
        "version": 1,
        "model": "Model",
        "device": "cuda:0",
        "ok": True,
        "findings": [],
    }


def test_the_worst_comes_first() -> None:
    severities = ("note", "break", "error", "break", "note")
    findings = [Finding(str(i), each, "", "", "") for i, each in enumerate(severities)]
    report = Diagnosis.of("m", "cpu", findings)
    assert [each.kind for each in report.findings] == ["2", "1", "3", "0", "4"]
    assert not report.ok
    assert Diagnosis.of("m", "cpu", findings[:1]).ok
    assert not Diagnosis.of("m", "cpu", findings[:2]).ok


def test_a_diagnosis_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        diagnosis().findings = ()  # type: ignore[misc]
