"""A trace that another process left: it serves where nothing that it looked at has changed."""

import enum
import json
import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import cgcompile
from cgcompile.piecewise.store import Store
from cgcompile.tracing.facts import described, file_hash, files_of, first_difference, text_of
from cgcompile.tracing.saved import KIND, CannotUse, loaded

ROOT = Path(__file__).resolve().parents[2]

# ---------------------------------------------------------------- facts


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


def helper() -> None: ...


def other_helper() -> None: ...


DIFFERENT = [
    0,
    0.0,
    -0.0,
    False,
    None,
    "0",
    b"0",
    (),
    [],
    {},
    (0,),
    (1,),
    ((1,),),
    {"a": 0},
    {"b": 0},
    OrderedDict(),
    Colour.RED,
    Colour.BLUE,
    torch.float32,
    torch.int64,
    torch.device("cpu"),
    helper,
    other_helper,
    int,
    bool,
    json,
    os,
    torch.zeros(2),
    torch.zeros(2, dtype=torch.int64),
    torch.zeros(3),
    torch.zeros(2, 2),
    torch.zeros(2, 2).t().contiguous().t(),
    torch.zeros(2, requires_grad=True),
    nn.Parameter(torch.zeros(2)),
    nn.ReLU(),
    nn.ReLU().eval(),
    nn.Linear(2, 2),
    len,
]


def test_different_things_are_described_differently() -> None:
    texts = [described(["L['x']"], {"L": {"x": each}})["L['x']"] for each in DIFFERENT]
    assert len(set(texts)) == len(texts)


@given(st.recursive(st.integers() | st.text() | st.floats(), lambda s: st.lists(s) | st.tuples(s)))
def test_equal_things_are_described_alike(value: Any) -> None:
    import copy

    one, two = ({"L": {"x": each}} for each in (value, copy.deepcopy(value)))
    assert described(["L['x']"], one) == described(["L['x']"], two)


def test_an_operator_is_what_it_is_called() -> None:
    """It remembers overloads as they are looked up; that is no difference."""
    scope = {"op": torch.ops.aten.erfinv, "other": torch.ops.aten.sin}
    before = described(["op", "other"], scope)
    assert torch.ops.aten.erfinv.default is not None
    assert described(["op", "other"], scope) == before
    assert before["op"] != before["other"]


def test_what_is_absent_and_what_is_the_same_object() -> None:
    weight = torch.zeros(2)
    sources = ["L['a']", "L['b']", "L['c']", "L['a'].missing"]
    tied = described(sources, {"L": {"a": weight, "b": weight, "c": torch.zeros(2)}})
    untied = described(sources, {"L": {"a": weight, "b": torch.zeros(2), "c": weight}})
    assert tied["L['a']"] == untied["L['a']"]
    assert "L['b']" in (first_difference(tied, untied) or "")
    assert first_difference(tied, dict(tied)) is None
    assert tied["L['a'].missing"] == "absent: AttributeError"


def test_sizes_that_vary_are_no_difference() -> None:
    x, y = torch.zeros(3, 4), torch.zeros(5, 4)
    one, two = (described(["L['x']"], {"L": {"x": each}}, {(id(each), 0): "*"}) for each in (x, y))
    assert one == two != described(["L['x']"], {"L": {"x": x}})


def test_arguments_with_sizes_that_vary() -> None:
    x, y = torch.zeros(3, 4), torch.zeros(5, 4)
    assert text_of((x, 1), {(id(x), 0): "*"}) == text_of((y, 1), {(id(y), 0): "*"})
    assert text_of((x, 1), {}) != text_of((y, 1), {})
    assert text_of({"k": x}, {(id(x), 0): "n"}) != text_of({"k": x}, {(id(x), 0): "*"})


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text("def f(): return 1\n")
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    found = files_of([names["f"].__code__, nn.Linear.forward.__code__])
    assert found == {str(path): file_hash(str(path))}
    path.write_text("def f(): return 2\n")
    assert found[str(path)] != file_hash(str(path))
    exec(compile("def g(): return 1", "<typed in>", "exec"), names)
    assert files_of([names["g"].__code__]) == "g is from <typed in>, which is no file"


# ---------------------------------------------------------------- processes

PROGRAM = """
import json, sys
import torch
from torch import nn
import cgcompile

SCALE = {scale}
LIBRARY = torch.library.Library("cgsaved", "FRAGMENT")
LIBRARY.define("scale_(Tensor(a!) x) -> ()")
LIBRARY.impl("scale_", lambda x: (x.mul_(0.5), None)[1], "CPU")
torch.library.register_fake("cgsaved::scale_", lambda x: None, lib=LIBRARY)

class Layer(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size
        self.up, self.down = nn.Linear(8, size), nn.Linear(size, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return x + self.down(torch.relu(self.up(x))) * SCALE

class Model(nn.Module):  # of __main__
    def __init__(self, depth, size):
        super().__init__()
        self.layers = nn.ModuleList(Layer(size) for _ in range(depth))
        self.tied = self.layers[0].up.weight

    def forward(self, x, *, shift=0.5, parts=None):
        for layer in self.layers:
            q = layer(x)
            torch.ops.cgsaved.scale_(q)
            x = nn.functional.scaled_dot_product_attention(q[None], x[None], x[None])[0]
        found = dict(x=x + shift, n=x.shape[0], weight=self.tied)
        return found if parts is None else [found["x"] * each for each in parts]

def run(folder, depth=2, size=16, first=3):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(depth, size).eval()
    settings = dict(compiler="eager", capture_device="host", cache_dir=folder, keep_traces=True)
    one = cgcompile.compile(model, dynamic_dims={{"x": 0}}, guards="none", **settings)
    with torch.inference_mode():
        for n in (first, 5, 2, 1, 33, 5, 5):
            x = torch.randn(n, 8)
            before = [layer.calls.item() for layer in model.layers]
            found = one(x, shift=0.25)
            assert [layer.calls.item() for layer in model.layers] == [n + 1 for n in before]
            expected = model(x, shift=0.25)
            assert torch.equal(found["x"], expected["x"]) and found["n"] == n
            assert found["weight"] is model.tied
            three = one(x, parts=(1.0, 2.0))
            assert all(map(torch.equal, three, model(x, parts=(1.0, 2.0))))
        model.layers[0].up.weight.data.mul_(2)  # in place: seen
        assert torch.equal(one(x)["x"], model(x)["x"])
    starts = [each.start.from_disk for each in one.traces]
    return dict(read=sum(starts), traced=len(starts) - sum(starts),
                replays=one.backend.counters.replays)

print(json.dumps([run(sys.argv[1], **each) for each in json.loads(sys.argv[2])]))
"""


class Program:
    """The script in a folder, and the cache beside it."""

    def __init__(self, folder: Path) -> None:
        self.script, self.cache = folder / "script.py", folder / "cache"
        self.write(2.0)

    def write(self, scale: float) -> None:
        self.script.write_text(PROGRAM.format(scale=scale))

    def run(self, *models: dict[str, int]) -> list[dict[str, int]]:
        """What each of some models does, one after the other, in one fresh process."""
        given = [str(self.script), str(self.cache), json.dumps(models)]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path}
        environment.pop("CGCOMPILE_CACHE_DIR", None)
        done = subprocess.run(
            [sys.executable, *given], capture_output=True, text=True, check=False, env=environment
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found: list[dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
        return found


def test_another_process_reads_what_was_traced_and_only_that(tmp_path: Path) -> None:
    program = Program(tmp_path)
    (cold,) = program.run({})
    assert cold["read"] == 0
    assert cold["traced"] >= 2
    assert cold["replays"] >= 2
    # the model is of __main__, and the first call has another size
    warm, wider, shorter = program.run({"first": 7}, {"size": 24}, {"depth": 1})
    assert warm == {**cold, "read": cold["traced"], "traced": 0}
    # what the trace has looked at: a number of a module, the depth, a global, the code
    assert wider["read"] == 0
    assert shorter["read"] == 0
    program.write(3.0)
    changed, again = program.run({}, {})
    assert changed["read"] == 0
    assert again["traced"] == 0


# ---------------------------------------------------------------- in one process


class Small(nn.Module):
    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.scale, self.linear = scale, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sin() * self.scale


def compiled(model: nn.Module, folder: Path, **given: Any) -> Any:
    given = {"guards": "none", "dynamic_dims": {"x": 0}, **given}
    return cgcompile.compile(
        model, compiler="eager", cache_dir=str(folder), keep_traces=True, **given
    )


def start(model: nn.Module, folder: Path, **given: Any) -> Any:
    one, x = compiled(model, folder, **given), torch.randn(3, 4)
    with torch.no_grad():
        assert torch.equal(one(x), model(x))
        assert torch.equal(one(x[:2]), model(x[:2]))
    assert len(one.traces) == 1
    return one.traces[0].start


def kept(folder: Path) -> list[Any]:
    return [each for each in Store(folder).entries() if each.kind == KIND]


def test_what_is_read_and_what_is_traced_again(tmp_path: Path) -> None:
    assert not start(Small(), tmp_path).from_disk
    assert start(Small(), tmp_path).from_disk  # other weights, of the same shape
    assert not start(Small(3.0), tmp_path).from_disk
    assert start(Small(3.0), tmp_path).from_disk
    assert start(Small(), tmp_path).from_disk  # still: both are kept
    assert not start(Small().eval(), tmp_path).from_disk
    assert not start(Small().double().float(), tmp_path, dynamic_dims={"x": {0: "n"}}).from_disk
    assert not start(Small(3.0), tmp_path, dynamic_shapes="unbacked").from_disk


@pytest.mark.parametrize("guards", ["keep", "shape"])
def test_a_trace_with_guards_is_not_kept(tmp_path: Path, guards: str) -> None:
    start(Small(), tmp_path, guards=guards)
    start(Small(), tmp_path, check_guards=True)
    assert kept(tmp_path) == []


def test_damage_is_a_trace_again(tmp_path: Path) -> None:
    start(Small(), tmp_path)
    (entry,) = kept(tmp_path)
    for payload in (b"", b"x" * 40, entry.payload[:-3], entry.payload[: len(entry.payload) // 2]):
        for each in kept(tmp_path):
            Store(tmp_path).put(KIND, each.key, payload, each.facts)
        assert not start(Small(), tmp_path).from_disk
        assert start(Small(), tmp_path).from_disk  # kept again, beside the damaged one


def test_what_cannot_be_kept_says_why(tmp_path: Path) -> None:
    names = {"nn": nn, "Small": Small, "__name__": "typed_in"}
    exec(compile("class Typed(Small):\n def forward(self, x): return x + 1", "<in>", "exec"), names)
    one, x = compiled(names["Typed"](), tmp_path), torch.randn(3, 4)
    with torch.no_grad():
        assert torch.equal(one(x), x + 1)
    assert one.traces[0].start.why == "forward is from <in>, which is no file"
    assert "not kept: forward is from <in>" in str(one.traces[0].start)
    assert kept(tmp_path) == []


def test_a_model_that_replaces_its_tensors_is_not_kept(tmp_path: Path) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = torch.zeros(())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count = self.count + 1
            return x * self.count

    one, plain = compiled(Counting(), tmp_path), Counting()
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(3, 4)
            assert torch.equal(one(x), plain(x))
    assert kept(tmp_path) == []


def test_what_a_trace_misses_is_named() -> None:
    with pytest.raises(CannotUse):
        loaded(b"", Small.forward, {}, [])  # type: ignore[arg-type]
