"""What a diagnosis is as a value, as text and as JSON."""

import dataclasses
import json

import pytest
import torch
from expecttest import assert_expected_inline
from lib.debug import examine
from torch import nn

from cgcompile.debug import Diagnosis, Finding


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
    found = examine(Faulty(), torch.ones(2))
    findings = [
        dataclasses.replace(e, source=e.source._replace(file="/src/model.py", line=7))
        for e in found.findings
    ]
    return Diagnosis.of(found.model, found.device, findings)


def test_text() -> None:
    assert_expected_inline(
        str(diagnosis()),
        """\
Faulty on cpu: 1 error, 1 break, 1 note
error  changing_attribute: self.calls
  at   model.py:7 in forward: self.calls += 1
  why  it was 1 before a call and is 2 after it
  fix  Make it a tensor in a buffer and write it in place (self.step.add_(1)), or pass it as an argument.
break  host_sync: .item(), 2 times
  at   model.py:7 in forward: x = x * x.sum().item()
  why  .item() makes the host wait for a value of the device
  fix  Keep the value on the device (torch.where in place of a branch, masked_fill), compute it before the step, do not print; or run the part eager: cgcompile.eager_region() where the model is traced, cgcompile.eager_break_during_capture where it is not.
note   random: aten.rand_like.default
  at   model.py:7 in forward: x = x + torch.rand_like(x)
  why  it draws random numbers
  fix  Nothing: each replay draws anew from the default generator. For inference, model.eval() turns dropout off.""",
    )


def test_json() -> None:
    found = diagnosis()
    assert json.loads(found.to_json()) == found.to_dict()
    assert_expected_inline(
        found.to_json(),
        """\
{
  "version": 1,
  "ok": false,
  "model": "Faulty",
  "device": "cpu",
  "findings": [
    {
      "kind": "changing_attribute",
      "severity": "error",
      "message": "it was 1 before a call and is 2 after it",
      "fix": "Make it a tensor in a buffer and write it in place (self.step.add_(1)), or pass it as an argument.",
      "op": "self.calls",
      "source": {
        "file": "/src/model.py",
        "line": 7,
        "function": "forward",
        "code": "self.calls += 1"
      },
      "count": 1
    },
    {
      "kind": "host_sync",
      "severity": "break",
      "message": ".item() makes the host wait for a value of the device",
      "fix": "Keep the value on the device (torch.where in place of a branch, masked_fill), compute it before the step, do not print; or run the part eager: cgcompile.eager_region() where the model is traced, cgcompile.eager_break_during_capture where it is not.",
      "op": ".item()",
      "source": {
        "file": "/src/model.py",
        "line": 7,
        "function": "forward",
        "code": "x = x * x.sum().item()"
      },
      "count": 2
    },
    {
      "kind": "random",
      "severity": "note",
      "message": "it draws random numbers",
      "fix": "Nothing: each replay draws anew from the default generator. For inference, model.eval() turns dropout off.",
      "op": "aten.rand_like.default",
      "source": {
        "file": "/src/model.py",
        "line": 7,
        "function": "forward",
        "code": "x = x + torch.rand_like(x)"
      },
      "count": 1
    }
  ]
}""",
    )


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
    found = Diagnosis.of("m", "cpu", findings)
    assert [each.kind for each in found.findings] == ["2", "1", "3", "0", "4"]
    assert not found.ok
    assert Diagnosis.of("m", "cpu", findings[:1]).ok
    assert not Diagnosis.of("m", "cpu", findings[:2]).ok


def test_a_diagnosis_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        diagnosis().findings = ()  # type: ignore[misc]
