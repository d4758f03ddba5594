"""One deliberate fault for each kind of finding that an op or a call makes, on its exact line."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lib.capture_rules import RULES
from lib.debug import by_line, examine, kinds, only_finding, step
from torch import nn

import cgcompile
from cgcompile import CompilationConfig
from cgcompile.debug.findings import KINDS, SEVERITIES, Way, finding
from cgcompile.debug.op_observer import Notes, PythonCalls
from cgcompile.errors import CaptureError


def reads(x):
    a = x.sum().item()  # <item>
    b = x.tolist()  # <tolist>
    c = float(x[0, 0])  # <float>
    d = range(x.argmax().long())  # <index>
    if x.sum() > 0:  # <if>
        a = a + 1
    e = torch.allclose(x, x)  # <allclose>
    f"{x[0, 0]:.1f}"  # <format>
    return x * a, b, c, d, e


def prints(x):
    print(x)  # noqa: T201  # <print>
    return x.relu()


def counts(x):
    a = x[x > 0]  # <mask>
    b = x.nonzero()  # <nonzero>
    c = torch.where(x > 0)  # <where>
    d = x.unique()  # <unique>
    e = x.repeat_interleave((x[:, 0] > 0).long(), dim=0)  # <repeat>
    x = x.clone()
    x[x > 0] = torch.zeros_like(x[0, :1]).expand(a.numel())  # <assign>
    x[x > 0] = 1.0  # fills one number: no size depends on it
    return b, c, d, e


def waits(x):
    try:
        torch.cuda.synchronize()  # <wait>
    except Exception:  # built without CUDA
        return x + 1
    return x + 1


def maps(x):
    def double(row):
        return row * 2  # <vmap>

    return torch.vmap(double)(x)


def raises(x):
    y = x.relu()
    raise ValueError("no\nmore")  # <raise>
    return y


def pads(x, longest=2, flag=True):  # <pads>
    return x[:longest]


def dense(x):  # <dense>
    x = x.mul_(2.0)
    return x.to_dense() + 1


def fetches(x):
    return x.cpu()  # <cpu>


def squares(rows: int = 2, **more: Any) -> torch.Tensor:
    return torch.tensor([[1.0, -2.0], [3.0, 4.0]]).repeat(rows // 2, 1).to(**more)


SYNC, SHAPE = "host_sync break", "data_dependent_shape break"
READS = ["item", "tolist", "float", "index", "if", "allclose", "format"]


@pytest.mark.parametrize(
    ("model", "inputs", "expected"),
    [
        (reads, (squares(),), dict.fromkeys(READS, SYNC)),
        (prints, (squares(),), {"print": SYNC}),
        (
            counts,
            (squares(),),
            dict.fromkeys(["mask", "nonzero", "where", "unique", "repeat", "assign"], SHAPE),
        ),
        (waits, (squares(),), {"wait": "synchronize break"}),
        (maps, (squares(),), {"vmap": "functorch note"}),
        (raises, (squares(),), {"raise": "forward_raised error"}),
        (pads, (squares(), 2), {"pads": "host_argument note"}),
        (pads, (squares(),), {}),
        (dense, (torch.eye(2).to_sparse(),), {"dense": "unsupported_input break"}),
        (fetches, (squares(),), {"cpu": "device_copy note"}),
        (fetches, (squares(device="meta"),), {"cpu": "device_copy break"}),
    ],
)
def test_findings_of_ops_and_calls(device: str, model: Any, inputs: Any, expected: Any) -> None:
    if model in (reads, counts, maps):
        inputs = [x.to(device) for x in inputs]
    assert kinds(examine(model, *inputs)) == expected


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_the_doctor_finds_what_the_recorder_refuses(name: str, inference: bool) -> None:
    """And gives it the kind that the error of the capture has."""
    torch.manual_seed(0)
    rule, x = RULES[name], torch.rand(8)
    config = CompilationConfig(capture_device="host", splitting="breakable")
    wrapper = cgcompile.CUDAGraphWrapper(rule.step, config)
    with torch.inference_mode(inference), torch.no_grad(), step():
        diagnosis = cgcompile.debug.doctor(rule.step, x, config=config)
        worse = [found.kind for found in diagnosis.findings if found.severity != "note"]
        if rule.refused:
            with pytest.raises(CaptureError) as caught:
                wrapper(x)
            assert only_finding(caught.value).kind == worse[0]
        else:
            wrapper(x)
            assert (worse, wrapper.counters.captures) == ([], 1)


def test_a_number_that_takes_a_value_of_the_model_is_read() -> None:
    def adds(x):
        number = torch.tensor(2.0)
        number += x.sum()
        return x * number.item()  # <read>

    assert kinds(examine(adds, squares()))["read"] == "host_sync break"


def test_what_a_finding_names(capsys: pytest.CaptureFixture) -> None:
    ops = {
        "print": (prints, "print() or repr()"),
        "wait": (waits, "torch.cuda.synchronize"),
        "vmap": (maps, "torch.func Vmap"),
        "raise": (raises, "ValueError"),
    }
    for mark, (model, op) in ops.items():
        reported = by_line(examine(model, squares()))[mark]
        assert (reported.op, reported.count) == (op, 1)
        assert reported.source.file == __file__
    assert "tensor(" in capsys.readouterr().out
    assert only_finding(examine(raises, squares())).message == "ValueError: no"


def test_calls_that_reach_no_op_are_left_to_another_profiler() -> None:
    seen = []
    sys.setprofile(lambda *event: seen.append(event))
    try:
        diagnosis = examine(nn.Linear(2, 2), torch.ones(2))
        assert sys.getprofile() is not None
    finally:
        sys.setprofile(None)
    assert diagnosis.ok
    assert seen


class OnMeta(nn.Module):
    """A model on a device that is not the CPU, with tensors on the CPU."""

    def __init__(self):
        super().__init__()
        self.table = torch.arange(6)
        self.scale = nn.Parameter(torch.ones(4, device="meta"))

    def forward(self, x, lengths):
        longest = lengths.item()  # <stale>
        rows = x[torch.arange(3)]  # <arange>
        index = torch.tensor([0, 1], device=x.device)  # <python>
        moved = self.table.to(x.device)  # <copy>
        return rows * self.scale, x[index], moved, longest


def test_tensors_on_the_cpu() -> None:
    diagnosis = examine(OnMeta(), torch.ones(6, 4, device="meta"), torch.tensor([3]))
    assert kinds(diagnosis) == {
        "input 1": "cpu_tensor break",
        "stale": "stale_scalar break",
        "arange": "cpu_tensor break",
        "python": "device_copy break",
        "copy": "device_copy break",
    }
    assert by_line(diagnosis)["input 1"].source.code == "def forward(self, x, lengths):"
    model = nn.Linear(4, 4, device="meta")
    model.register_buffer("scale", torch.tensor(2.0))
    diagnosis = examine(model, torch.ones(2, 4, device="meta"))
    assert kinds(diagnosis) == {"self.scale": "cpu_tensor break"}


def test_random_numbers(device: str) -> None:
    generator = torch.Generator(device)

    def draws(x):
        x = x + torch.rand(x.shape, generator=generator, device=x.device)  # <generator>
        return F.dropout(F.dropout(x, 0.5), 0.5, training=False)  # <dropout>

    before = generator.get_state()
    diagnosis = examine(draws, torch.ones(4, device=device))
    assert kinds(diagnosis) == {"generator": "generator break", "dropout": "random note"}
    assert by_line(diagnosis)["dropout"].count == 1
    assert torch.equal(generator.get_state(), before)


def test_a_function_of_an_extension_that_resembles_attention() -> None:
    frame = sys._getframe()
    notes = Notes(Way.UNTRACED, frame.f_code)
    calls = PythonCalls(notes)
    for name, module in (("attn_fwd", "ext"), ("attn_fwd", "torch._C"), ("layer_norm", "ext")):
        calls.see(frame, "c_call", SimpleNamespace(__name__=name, __module__=module))
    assert [(note.kind, note.op) for note in notes] == [("opaque_call", "ext.attn_fwd")]


def test_the_second_call_is_examined_too() -> None:
    class Once(nn.Module):
        ran = False

        def forward(self, x):
            if self.ran:
                raise RuntimeError("once")  # <again>
            self.ran = True
            return x + 1

    model = Once()
    reported = by_line(examine(model, torch.ones(2)))["again"]
    assert (reported.kind, "in the second of two calls" in reported.message) == (
        "forward_raised",
        True,
    )
    assert model.ran is False


def test_lines_of_the_caller_are_not_the_models() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    reported = only_finding(examine(model.train(), torch.ones(1, 2)))
    assert (reported.kind, reported.source) == ("random", None)


def test_each_kind_has_a_fix_for_each_way() -> None:
    for kind in KINDS:
        for way in Way:
            of_kind = finding(way, kind, "ns::op", "why", None)
            assert of_kind.severity in SEVERITIES
            assert of_kind.fix.endswith(".")
            assert "{op}" not in of_kind.fix


# ---------------------------------------------------------------- the mode, and what was compiled


def branches(x):
    if x.sum() > 0:  # <branch>
        return x + 1
    return x


@pytest.mark.parametrize(
    ("settings", "severity"), [({}, "break"), ({"splitting": "breakable"}, "error")]
)
def test_the_severity_depends_on_the_way(settings: dict, severity: str) -> None:
    config = CompilationConfig(**settings)
    assert kinds(examine(branches, torch.ones(2), config=config)) == {
        "branch": f"host_sync {severity}"
    }
    whole = cgcompile.compile(branches, CompilationConfig(**settings, compiler="eager"))
    assert kinds(examine(whole, torch.ones(2))) == {"branch": "host_sync error"}
    if not settings:
        with pytest.raises(cgcompile.CGCompileError), torch.inference_mode():
            whole(torch.ones(2))


class Scales(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x):  # <forward>
        return x * self.scale


def test_grad_mode() -> None:
    doctor, x = cgcompile.debug.doctor, torch.ones(2)
    due = by_line(doctor(Scales(), x))["forward"]
    assert (due.kind, due.severity, due.op) == ("gradients", "break", "self.scale")
    frozen = Scales().requires_grad_(False)
    assert doctor(frozen, x).findings == ()
    assert only_finding(doctor(frozen, torch.ones(2, requires_grad=True))).op == "input 0"
    with torch.no_grad():
        assert doctor(Scales(), x).findings == ()


def test_weights_of_inference_mode() -> None:
    """They may be read in any mode, as graphs do; they cannot be kept for gradients."""
    with torch.inference_mode():
        model, frozen = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
    x = torch.ones(1, 2)
    assert examine(model, x).findings == ()
    assert cgcompile.debug.doctor(frozen, x).findings == ()
    with torch.no_grad():
        assert cgcompile.debug.doctor(model, x).findings == ()
    findings = cgcompile.debug.doctor(frozen, x.requires_grad_()).findings
    assert [finding.kind for finding in findings] == ["inference_tensor", "gradients"]
    assert "cannot be saved for backward" in findings[0].message


@pytest.mark.gpu
def test_copies_from_pinned_memory_can_be_captured() -> None:
    def uploads(x, rows):
        return x + rows.to(x.device, non_blocking=True)  # <upload>

    x, config = torch.ones(2, device="cuda"), CompilationConfig(splitting="breakable")
    for rows, severity in ((torch.ones(2), "error"), (torch.ones(2).pin_memory(), "note")):
        reported = by_line(examine(uploads, x, rows, config=config))["upload"]
        assert (reported.kind, reported.severity) == ("device_copy", severity)
