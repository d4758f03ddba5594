"""One deliberate fault for each kind of finding that an op or a call makes, on its exact line."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from lib.debug import examine, found
from torch import nn

import cgcompile
from cgcompile.debug.doctor import KINDS, finding
from cgcompile.debug.op_observer import Note, Notes, PythonCalls, Way


class Reads(nn.Module):
    """Everything that makes the host wait, one a line."""

    def forward(self, x):
        a = x.sum().item()  # <item>
        b = x.tolist()  # <tolist>
        c = float(x[0, 0])  # <float>
        d = range(x.argmax())  # <index>
        if x.sum() > 0:  # <if>
            a = a + 1
        e = torch.allclose(x, x)  # <allclose>
        f"{x[0, 0]:.1f}"  # <format>
        return x * a, b, c, d, e


HOST_READS = ["item", "tolist", "float", "index", "if", "allclose", "format"]


@pytest.mark.parametrize("marker", HOST_READS)
def test_host_reads(device: str, marker: str) -> None:
    diagnosis = examine(Reads(), torch.randn(3, 4, device=device))
    seen = found(diagnosis, "host_sync", Reads.forward, marker)
    assert (seen.severity, seen.count) == ("break", 1)
    assert len(diagnosis.of_kind("host_sync")) == len(HOST_READS), str(diagnosis)


def test_print(capsys) -> None:
    class Prints(nn.Module):
        def forward(self, x):
            print(x)  # noqa: T201  # <print>
            return x.relu()

    diagnosis = examine(Prints(), torch.randn(3))
    assert found(diagnosis, "host_sync", Prints.forward, "print").op == "print() or repr()"
    assert len(diagnosis.findings) == 1, str(diagnosis)
    assert "tensor(" in capsys.readouterr().out


class Counts(nn.Module):
    """Shapes that only the data tells."""

    def forward(self, x):
        a = x[x > 0]  # <mask>
        b = x.nonzero()  # <nonzero>
        c = torch.where(x > 0)  # <where>
        d = x.unique()  # <unique>
        e = x.repeat_interleave((x[:, 0] > 0).long(), dim=0)  # <repeat>
        x = x.clone()
        x[x > 0] = torch.zeros_like(x[0, :1]).expand(a.numel())  # <assign>
        x[x > 0] = 1.0  # fills one number: no size depends on it
        return b, c, d, e


COUNTS = ["mask", "nonzero", "where", "unique", "repeat", "assign"]


@pytest.mark.parametrize("marker", COUNTS)
def test_sizes_that_depend_on_data(device: str, marker: str) -> None:
    x = torch.tensor([[1.0, -2.0], [3.0, 4.0]], device=device)
    diagnosis = examine(Counts(), x)
    assert found(diagnosis, "data_dependent_shape", Counts.forward, marker).severity == "break"
    assert len(diagnosis.of_kind("data_dependent_shape")) == len(COUNTS), str(diagnosis)


def test_synchronisation_of_the_device() -> None:
    class Waits(nn.Module):
        def forward(self, x):
            try:
                torch.cuda.synchronize()  # <wait>
            except Exception:  # built without CUDA
                return x + 1
            return x + 1

    seen = found(examine(Waits(), torch.ones(2)), "synchronize", Waits.forward, "wait")
    assert seen.op == "torch.cuda.synchronize"


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
    """A model on a device that is not the CPU, and what of it is there all the same."""

    def __init__(self):
        super().__init__()
        self.table = torch.arange(6)  # stays on the CPU
        self.scale = nn.Parameter(torch.ones(4, device="meta"))

    def forward(self, x, lengths):
        longest = lengths.max().item()  # <stale>
        rows = x[torch.arange(3)]  # <arange>
        place = torch.tensor([0, 1], device=x.device)  # <python>
        moved = self.table.to(x.device)  # <copy>
        return rows * self.scale, x[place], moved, longest


def on_meta() -> cgcompile.debug.Diagnosis:
    return examine(OnMeta(), torch.ones(6, 4, device="meta"), torch.tensor([2, 3]))


@pytest.mark.parametrize(
    ("kind", "marker", "severity"),
    [
        ("stale_scalar", "stale", "break"),
        ("cpu_tensor", "arange", "break"),
        ("device_copy", "python", "break"),
        ("device_copy", "copy", "break"),
    ],
)
def test_what_is_on_the_cpu(kind: str, marker: str, severity: str) -> None:
    assert found(on_meta(), kind, OnMeta.forward, marker).severity == severity


def test_an_input_on_the_cpu() -> None:
    (finding,) = [e for e in on_meta().of_kind("cpu_tensor") if e.op == "input 1"]
    assert finding.source.code == "def forward(self, x, lengths):"


def test_copies_to_the_cpu() -> None:
    class Fetches(nn.Module):
        def forward(self, x):
            return x.cpu()  # <cpu>

    diagnosis = examine(Fetches(), torch.ones(2, device="meta"))
    assert found(diagnosis, "device_copy", Fetches.forward, "cpu").severity == "break"
    assert len(diagnosis.findings) == 1, "that a meta tensor cannot be copied is no other one"
    diagnosis = examine(Fetches(), torch.ones(2))
    assert found(diagnosis, "device_copy", Fetches.forward, "cpu").severity == "note"


def test_a_weight_on_the_cpu() -> None:
    class Forgot(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(4, 4, device="meta")
            self.register_buffer("scale", torch.tensor(2.0))

        def forward(self, x):  # <forward>
            return self.up(x) * self.scale

    diagnosis = examine(Forgot(), torch.ones(2, 4, device="meta"))
    seen = found(diagnosis, "cpu_tensor", Forgot.forward, "forward")
    assert seen.op == "self.scale"


def test_random_numbers(device: str) -> None:
    generator = torch.Generator(device)

    class Draws(nn.Module):
        def forward(self, x):
            x = x + torch.rand(x.shape, generator=generator, device=x.device)  # <generator>
            return F.dropout(F.dropout(x, 0.5), 0.5, training=False)  # <dropout>

    before = generator.get_state()
    diagnosis = examine(Draws(), torch.ones(4, device=device))
    assert found(diagnosis, "generator", Draws.forward, "generator").severity == "break"
    seen = found(diagnosis, "random", Draws.forward, "dropout")
    assert (seen.severity, seen.count) == ("note", 1)
    assert torch.equal(generator.get_state(), before)


def test_functorch(device: str) -> None:
    class Maps(nn.Module):
        def forward(self, x):
            def double(row):
                return row * 2  # <vmap>

            return torch.vmap(double)(x)

    seen = found(examine(Maps(), torch.ones(3, 2, device=device)), "functorch", Maps, "vmap")
    assert seen.op == "torch.func Vmap"


def test_a_function_of_an_extension_that_looks_like_attention() -> None:
    notes = Notes(Way.UNTRACED, sys._getframe().f_code)
    calls = PythonCalls(notes)
    frame = sys._getframe()
    calls.see(frame, "c_call", SimpleNamespace(__name__="varlen_attn_fwd", __module__="ext_2"))
    calls.see(frame, "c_call", SimpleNamespace(__name__="varlen_attn_fwd", __module__="torch._C"))
    calls.see(frame, "c_call", SimpleNamespace(__name__="layer_norm", __module__="ext_2"))
    assert [(note.kind, note.op) for note in notes] == [("opaque_call", "ext_2.varlen_attn_fwd")]


def test_an_error_of_the_model() -> None:
    class Raises(nn.Module):
        def forward(self, x):
            y = x.relu()
            raise ValueError("no\nmore")  # <raise>
            return y

    seen = found(examine(Raises(), torch.ones(2)), "forward_raised", Raises.forward, "raise")
    assert (seen.op, seen.message) == ("ValueError", "ValueError: no")


def test_the_second_call_is_looked_at_too() -> None:
    class Once(nn.Module):
        ran = False

        def forward(self, x):
            if self.ran:
                raise RuntimeError("once")  # <again>
            self.ran = True
            return x + 1

    model = Once()
    seen = found(examine(model, torch.ones(2)), "forward_raised", Once.forward, "again")
    assert "in the second of two calls" in seen.message
    assert model.ran is False


def test_lines_of_the_caller_are_not_the_models() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    (finding,) = examine(model.train(), torch.ones(1, 2)).findings
    assert (finding.kind, finding.source) == ("random", None)


def test_each_kind_has_a_fix_for_each_way() -> None:
    for kind in KINDS:
        for way in Way:
            made = finding(Note(kind, "ns::op", "why"), way)
            assert made.severity in ("error", "break", "note")
            assert made.fix.endswith(".")
            assert "{op}" not in made.fix
