"""Saved models: round trips, what is refused, and what a load compares."""

import importlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lib.programs import run_code
from lib.snapshots import assert_snapshot
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.testing._internal.two_tensor import TwoTensor

import cgcompile
from cgcompile import saved
from cgcompile.cli import main
from cgcompile.errors import SavedModelError

MODEL = """
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attend

SCALE = 2.0


def scaled(x, more=1.0):
    return x * SCALE * more


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        heads = self.qkv(x).view(1, -1, 2, 4).transpose(1, 2)
        return x + scaled(self.out(attend(heads, heads, heads).transpose(1, 2).flatten(2)[0]))


class Model(nn.Module):
    def __init__(self, layers=2, width=8):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        for layer in self.layers:
            x = layer(x)
        return x
"""
GUARDS = pytest.mark.skipif(
    torch.__version__ < "2.14", reason="torch cannot save or load the guards of a vmap"
)
DEFAULTS = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch cannot load its guards on defaults of functions"
)
EAGER = {"capture_device": "host", "compiler": "eager", "cache_dir": "off"}


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    with torch._dynamo.config.patch(enable_aot_compile=True):  # off by default in 2.11
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "own"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    name = "module_of_a_saved_model"
    (tmp_path / f"{name}.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module(name)
    del sys.modules[name]


def save(called: Any, path: Path, *args: Any, dynamic: bool | None = None, **options: Any) -> Any:
    """Compile ahead of time and save, without gradients."""
    options = {**EAGER, **options}
    compiled = torch.compile(
        called, fullgraph=True, dynamic=dynamic, backend="cgcompile", options=options
    )
    ahead = compiled.forward if isinstance(called, nn.Module) else compiled
    with torch.no_grad():
        function = ahead.aot_compile((args, {}))
    function.save_compiled_function(str(path))
    return function


def replays(loaded: Any, model: Any, *shapes: tuple[int, ...], more: tuple[Any, ...] = ()) -> int:
    """Compare calls on random inputs with the model; return the number of replays."""
    previous = None
    for shape in shapes:
        x = torch.randn(shape)
        with torch.no_grad():
            expected, result = model(x.clone(), *more), loaded(x.clone(), *more)
        torch.testing.assert_close(result, expected)
        assert previous is None or not previous.equal(result)
        previous = result
    return int(loaded.backend.counters.replays)


# ---------------------------------------------------------------- round trips

SAVE = """
import sys
import torch
import cgcompile
from model import Model
from torch._dynamo import config, mark_dynamic

config.enable_aot_compile = True
model, x = Model().eval(), torch.randn(6, 8)
mark_dynamic(x, 0)
options = {"capture_device": "host", "compiler": sys.argv[1], "cache_dir": sys.argv[2]}
with torch.no_grad():
    if sys.argv[1] == "inductor":  # fills the folder outside of aot_compile
        torch.compile(model, fullgraph=True, backend="cgcompile", options=options)(x)
        torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="cgcompile", options=options)
    function = compiled.forward.aot_compile(((x,), {}))
backend = function._artifacts.compiled_fn.backend
print(backend.graphs[-1].compilation.compiled, backend.graphs[-1].compilation.loaded)
function.save_compiled_function("own/model.pt")
torch.save(model.state_dict(), "own/weights.pt")
"""
LOAD = """
import sys
import torch
import cgcompile
from model import Model

def no_trace(*_):
    raise AssertionError("Dynamo traces")

torch._dynamo.convert_frame.fullgraph_capture = no_trace
model, eager = Model().eval(), Model().eval()
for each in (model, eager):
    each.load_state_dict(torch.load("own/weights.pt"))
loaded = cgcompile.load("own/model.pt", model)
with torch.no_grad():
    for rows in (6, 6, 6, 6, 9, 9, 9):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(loaded(x), eager(x))
assert loaded.calls == model.calls == eager.calls
compilation = loaded.backend.graphs[0].compilation
print(loaded.backend.counters.replays, compilation.compiled, compilation.loaded)
"""


def run_here(code: str, folder: Path, *arguments: str) -> list[int]:
    code = f"import os, sys\nos.chdir({str(folder)!r})\nsys.path.insert(0, '.')\n{code}"
    return [*map(int, run_code(code, *arguments).split())]


@pytest.mark.slow
def test_a_saved_model_replays_in_another_process(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    run_here(SAVE, tmp_path, "eager", "off")
    assert run_here(LOAD, tmp_path) == [3, 3, 0]


@pytest.mark.slow
def test_a_saved_model_has_the_artifacts_of_its_pieces(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    cache = tmp_path / "cache"
    # The keys of pieces are those outside of aot_compile.
    assert run_here(SAVE, tmp_path, "inductor", str(cache)) == [0, 3]
    for entry in cache.glob("*.cgc"):
        entry.unlink()  # what remains are C++ libraries
    assert run_here(LOAD, tmp_path) == [3, 0, 3]


def numbers(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x * scale


def sizes(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return x.reshape(x.shape[0] // 2, 2, -1) + 1, x.shape[0] * 3


def views(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1)[4:].view(2, -1) + 1


def flex(x: torch.Tensor) -> torch.Tensor:
    heads = (x * 2).view(1, 2, -1, 16)
    return flex_attention(heads, heads, heads, score_mod=lambda s, b, h, i, j: s + i - j)


def in_vmap(x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: row.sin() * 2)(x) + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("called", "more", "dynamic"),
    [
        (numbers, (0.5,), True),
        (sizes, (), True),
        (views, (), None),
        pytest.param(flex, (), None, marks=GUARDS),
        pytest.param(in_vmap, (), None, marks=GUARDS),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
def test_what_a_graph_needs_around_it_is_saved(
    folder: Path, called: Callable[..., Any], more: tuple[Any, ...], dynamic: bool | None
) -> None:
    save(called, folder / "model", torch.randn(6, 16), *more, dynamic=dynamic)
    loaded = cgcompile.load(folder / "model", called)
    more = tuple(number + 1 for number in more)
    if called is sizes:
        for rows in (6, 6, 6, 8):
            x = torch.randn(rows, 16)
            with torch.no_grad():
                (result, number), (expected, as_eager) = loaded(x), called(x)
            assert result.equal(expected)
            assert number == as_eager
        assert loaded.backend.counters.replays == 1
    else:
        assert replays(loaded, called, *[(6, 16)] * 4, more=more) >= 2


class Subclassed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = TwoTensor(torch.randn(8, 8), torch.randn(8, 8))
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x.t() + (self.weight * 2).sum()


def test_subclasses_are_saved(folder: Path) -> None:
    model = Subclassed()
    save(model, folder / "model", torch.randn(6, 8))
    loaded = cgcompile.load(folder / "model", model)
    assert isinstance(loaded.weight, TwoTensor)
    xs = [torch.randn(6, 8) for _ in range(4)]
    with torch.no_grad():
        for x in xs:
            result, expected = loaded(x), model(x)
            assert result.a.equal(expected.a)
            assert result.b.equal(expected.b)
    assert loaded.backend.counters.replays == 2


@dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor


def makes_a_pair(x: torch.Tensor) -> torch.Tensor:
    pair = Pair(x * 2, x + 1)
    return pair.first @ pair.second.t()


def test_generated_methods_are_compared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(makes_a_pair, folder / "model", torch.randn(6, 8))
    loaded = cgcompile.load(folder / "model", makes_a_pair)
    assert replays(loaded, makes_a_pair, *[(6, 8)] * 3) == 1

    def swapped(self: Pair, first: torch.Tensor, second: torch.Tensor) -> None:
        self.first, self.second = second, first

    monkeypatch.setattr(Pair, "__init__", swapped)
    with pytest.raises(SavedModelError, match=r"Pair\.__init__ has changed"):
        cgcompile.load(folder / "model", makes_a_pair)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * attention_mask.unsqueeze(-1)


def test_padded_lengths_are_saved(folder: Path) -> None:
    model = Masked()
    x, mask = torch.randn(2, 6, 8), torch.ones(2, 6)
    for tensor in (x, mask):
        torch._dynamo.mark_dynamic(tensor, 1)
    options = {**EAGER, "pad_lengths": "8"}
    compiled = torch.compile(model.forward, fullgraph=True, backend="cgcompile", options=options)
    with torch.no_grad():
        compiled.aot_compile(((x, mask), {})).save_compiled_function(str(folder / "model"))
        loaded = cgcompile.load(folder / "model", model.forward)
        for length in (5, 6, 7, 8, 5):
            x, mask = torch.randn(2, length, 8), (torch.rand(2, length) > 0.5).float()
            torch.testing.assert_close(loaded(x, mask), model(x, mask))
    assert loaded.backend.counters.captures == 1  # for 8, which the others were padded to
    assert loaded.backend.counters.replays == 3


def test_torch_loads_it_too(folder: Path, module: ModuleType) -> None:
    model = module.Model().eval()
    save(model, folder / "model", torch.randn(6, 8))
    with open(folder / "model", "rb") as file:
        function = torch.compiler.load_compiled_function(file)
    x = torch.randn(6, 8)
    with torch.no_grad():
        torch.testing.assert_close(function(model, x), model(x))
    module.SCALE = 3.0
    with (
        open(folder / "model", "rb") as file,
        pytest.raises(SavedModelError, match=r"SCALE is 3\.0"),
    ):
        torch.compiler.load_compiled_function(file)


# ---------------------------------------------------------------- refusals


def shown(error: BaseException, *paths: Path) -> str:
    text = str(error).replace("module_of_a_saved_model", "model")
    for path in paths:
        text = text.replace(str(path), "...")
    text = re.sub(r"0x[0-9a-f]+", "0x...", re.sub(r"\b[0-9a-f]{16}\b", "<digest>", text))
    text = re.sub(r"cpu: .*?threads", "<cpu>", text)
    return "\n".join(line for line in text.splitlines() if not line.startswith("See docs"))


def edited(module: ModuleType, old: str, new: str) -> None:
    assert old in MODEL
    Path(str(module.__file__)).write_text(MODEL.replace(old, new))


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(b"cgcompile cache") + 2000] ^= 1
    path.write_bytes(data)


def cases(module: ModuleType, path: Path, monkeypatch: Any) -> dict[str, Callable[[], Any]]:
    """What is changed before a load, by name."""
    x_of = module.Layer.forward
    return {
        "an edited function": lambda: edited(module, "x + scaled", "x - scaled"),
        "an edited default": lambda: edited(module, "more=1.0", "more=3.0"),
        "a removed function": lambda: edited(module, "def scaled", "def other"),
        "a replaced method": lambda: monkeypatch.setattr(
            module.Layer, "forward", lambda self, x: x_of(self, x) + 1
        ),
        "another global": lambda: monkeypatch.setattr(module, "SCALE", 3.0),
        "no global": lambda: monkeypatch.delattr(module, "SCALE"),
        "another version": lambda: monkeypatch.setattr(saved, "__version__", "99"),
        "another processor": lambda: monkeypatch.setattr(
            saved.inductor, "machine", lambda devices: "cpu: another threads"
        ),
        "a cut file": lambda: path.write_bytes(path.read_bytes()[:5000]),
        "a damaged file": lambda: flipped(path),
        "a file that others may write": lambda: path.chmod(0o666),
        "a folder that others may write": lambda: path.parent.chmod(0o777),
        "a link": lambda: path.rename(path.with_name("x")) and path.symlink_to("x"),
    }


@pytest.mark.slow
def test_what_a_load_refuses(
    tmp_path: Path, folder: Path, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = module.Model().eval(), folder / "model"
    save(model, path, torch.randn(6, 8))
    original = path.read_bytes()
    rows = []
    for name in cases(module, path, monkeypatch):
        with monkeypatch.context() as patch:
            cases(module, path, patch)[name]()
            with pytest.raises(SavedModelError) as caught:
                cgcompile.load(path, model)
        rows.append(f"{name}: {shown(caught.value, tmp_path)}")
        Path(str(module.__file__)).write_text(MODEL)
        path.unlink()
        path.write_bytes(original)
        path.chmod(0o600)
        folder.chmod(0o700)
        cgcompile.load(path, model)
    for name, other in {
        "other dtypes": module.Model().half(),
        "fewer layers": module.Model(layers=1),
        "another width": module.Model(width=16),
    }.items():
        with pytest.raises(SavedModelError) as caught:
            cgcompile.load(path, other)
        rows.append(f"{name}: {shown(caught.value)}")
    assert_snapshot("saved_models", "\n".join(rows))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_a_file_of_another_user_is_not_read(folder: Path, module: ModuleType) -> None:
    model, path = module.Model().eval(), folder / "model"
    save(model, path, torch.randn(6, 8))
    os.chown(path, 65534, -1)
    with pytest.raises(SavedModelError, match="owned by user 65534"):
        cgcompile.load(path, model)


def test_calls_that_no_trace_serves_are_refused(folder: Path, module: ModuleType) -> None:
    model, path = module.Model().eval(), folder / "model"
    save(model, path, torch.randn(6, 8))
    loaded = cgcompile.load(path, model)
    with pytest.raises(SavedModelError, match="grad_mode"):
        loaded(torch.randn(6, 8))
    with torch.no_grad(), pytest.raises(SavedModelError, match="expected 6, actual 7"):
        loaded(torch.randn(7, 8))
    with pytest.raises(SavedModelError, match=r"self\.layers\._modules.* is list\('0', '1', '2'\)"):
        cgcompile.load(path, module.Model(layers=3))
    assert replays(loaded, model, *[(6, 8)] * 3) == 1
    assert model.calls == 6


def outer(scale: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * scale


def test_a_closure_is_compared(folder: Path) -> None:
    save(outer(2.0), folder / "model", torch.randn(6, 8))
    assert replays(cgcompile.load(folder / "model", outer(2.0)), outer(2.0), *[(6, 8)] * 3) == 1
    with pytest.raises(SavedModelError, match=r"its closure scale is 3\.0; it was 2\.0"):
        cgcompile.load(folder / "model", outer(3.0))


def test_edits_elsewhere_are_no_change(folder: Path, module: ModuleType) -> None:
    model, path = module.Model().eval(), folder / "model"
    save(model, path, torch.randn(6, 8))
    edited(module, "class Layer", "def unrelated():\n    return 1\n\n\nclass Layer")
    shutil.copy(path, folder / "copy")
    assert replays(cgcompile.load(folder / "copy", model), model, *[(6, 8)] * 3) == 1


def test_what_cannot_be_saved(folder: Path, module: ModuleType) -> None:
    model = module.Model().eval()
    options: dict[str, dict[str, Any]] = {
        "a lambda": {"splitting_ops": [lambda node: False]},
        "a local compiler": {"compiler": lambda gm, inputs: gm.forward},
        "no graphs": {"mode": "NONE", "cudagraph_mode": "NONE"}
        | dict.fromkeys(("compiler", "capture_device", "cache_dir")),
    }
    rows = []
    for name, own in options.items():
        left = {key: value for key, value in {**EAGER, **own}.items() if value is not None}
        compiled = torch.compile(model, fullgraph=True, backend="cgcompile", options=left)
        with torch.no_grad(), pytest.raises(SavedModelError) as caught:
            compiled.forward.aot_compile(((torch.randn(6, 8),), {}))
        rows.append(f"{name}: {shown(caught.value)}")
    compiled = torch.compile(lambda x: x + torch.zeros(8), fullgraph=True, backend="cgcompile")
    with torch.device("cpu"), torch.no_grad(), pytest.raises(SavedModelError) as caught:
        compiled.aot_compile(((torch.randn(6, 8),), {}))
    rows.append(f"a function mode: {shown(caught.value)}")
    assert_snapshot("unsaved_models", "\n".join(rows))
    assert not [*folder.iterdir()]


# ---------------------------------------------------------------- traces of cgcompile.compile

LOAD_TRACE = """
import sys
import torch
import cgcompile
from cgcompile.torch_compat import dynamo
from model import Model

def no_trace(*_, **__):
    raise AssertionError("Dynamo traces")

dynamo.trace_call = no_trace
model, eager = Model().eval(), Model().eval()
for each in (model, eager):
    each.load_state_dict(torch.load("own/weights.pt"))
loaded = cgcompile.load("own/model", model)
with torch.inference_mode():
    for rows in (6, 6, 6, 6, 9, 9, 9):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(loaded(x), eager(x))
assert model.calls == eager.calls == 7
print(loaded.backend.counters.replays, loaded.backend.graphs[0].compilation.loaded)
"""
SAVE_TRACE = """
import sys
import torch
import cgcompile
from model import Model

model = Model().eval()
settings = {"capture_device": "host", "compiler": sys.argv[1], "cache_dir": "cache"}
compiled = cgcompile.compile(model, dynamic_dims={"x": 0}, guards="none", **settings)
with torch.inference_mode():
    compiled.save("own/model", torch.randn(6, 8))
torch.save(model.state_dict(), "own/weights.pt")
"""


@pytest.mark.slow
def test_a_saved_trace_replays_in_another_process(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    run_here(SAVE_TRACE, tmp_path, "inductor")
    for entry in (tmp_path / "cache").glob("*.cgc"):
        entry.unlink()
    assert run_here(LOAD_TRACE, tmp_path) == [3, 3]


def compiled_of(called: Any, guards: str = "none", **settings: Any) -> Any:
    dims = {"x": 0}
    return cgcompile.compile(called, dynamic_dims=dims, guards=guards, **{**EAGER, **settings})


@pytest.mark.slow
def test_a_saved_trace_serves_other_weights_and_sizes(folder: Path, module: ModuleType) -> None:
    compiled_of(module.Model().eval()).save(folder / "model", torch.randn(6, 8))
    model, eager = module.Model().eval(), module.Model().eval()
    eager.load_state_dict(model.state_dict())
    loaded = cgcompile.load(folder / "model", model)
    loaded.freeze()
    assert replays(loaded, eager, (6, 8), (6, 8), (6, 8), (9, 8), (9, 8), (9, 8)) == 2
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)
        eager.load_state_dict(model.state_dict())
    assert replays(loaded, eager, (6, 8), (9, 8)) == 4
    with pytest.raises(cgcompile.CGCompileError, match="no trace is for arguments like"):
        loaded(torch.randn(6, 8, dtype=torch.float64))


@pytest.mark.slow
def test_a_model_that_is_saved_keeps_its_traces(folder: Path, module: ModuleType) -> None:
    model, eager = module.Model().eval(), module.Model().eval()
    eager.load_state_dict(model.state_dict())
    compiled = compiled_of(model)
    assert replays(compiled, eager, *[(6, 8)] * 3) == 1
    traces = compiled.traces
    compiled.save(folder / "model", torch.randn(4, 8))
    assert compiled.traces == traces
    assert replays(compiled, eager, *[(6, 8)] * 2) == 3


def test_numbers_and_keywords_of_a_call_are_saved(folder: Path) -> None:
    def scaled(x: torch.Tensor, *, pair: Any, scale: float = 1.0) -> torch.Tensor:
        return (x * scale + pair[0]["a"]) * pair[1]

    a = torch.randn(8)
    compiled_of(scaled).save(folder / "model", torch.randn(6, 8), pair=({"a": a}, 2), scale=0.5)
    loaded = cgcompile.load(folder / "model", scaled)
    loaded.freeze()
    for _ in range(3):
        x, a = torch.randn(7, 8), torch.randn(8)
        with torch.no_grad():
            result = loaded(x, pair=({"a": a}, 2), scale=0.5)
        torch.testing.assert_close(result, (x * 0.5 + a) * 2)
    assert loaded.backend.counters.replays == 1
    with pytest.raises(cgcompile.CGCompileError, match="frozen"):
        loaded(x, pair=({"a": a}, 3), scale=0.5)


class Attributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale, self.table, self.options = 2.0, {"a": 1}, [1, 2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        more = self.table.get("b", 0) + len(self.options)
        return self.linear(x) * self.scale + more + os.environ.get("OF_A_TEST", "").count("x")


@pytest.mark.slow
def test_what_a_trace_read_of_its_model_is_compared(folder: Path) -> None:
    compiled_of(Attributes().eval()).save(folder / "model", torch.randn(6, 8))
    rows = []

    def hooked(model: Attributes) -> None:
        model.linear.register_forward_hook(lambda *_: None)

    changes: dict[str, Callable[[Attributes], Any]] = {
        "an attribute": lambda model: setattr(model, "scale", 3.0),
        "an item": lambda model: model.table.update(b=2),
        "a length": lambda model: model.options.append(3),
        "a hook": hooked,
        "a layer": lambda model: setattr(model, "linear", nn.Identity()),
        "a width": lambda model: setattr(model, "linear", nn.Linear(8, 8, bias=False)),
        "a layout": lambda model: setattr(model.linear.weight, "data", torch.randn(8, 8).t()),
        "a method": lambda model: setattr(model, "forward", lambda x: x),
    }
    for name, change in changes.items():
        model = Attributes().eval()
        assert cgcompile.load(folder / "model", model).traces, name
        change(model)
        with pytest.raises(SavedModelError) as caught:
            cgcompile.load(folder / "model", model)
        rows.append(f"{name}: {shown(caught.value)}")
    with torch.autocast("cpu"), pytest.raises(SavedModelError) as caught:
        cgcompile.load(folder / "model", Attributes().eval())
    rows.append(f"a setting: {shown(caught.value)}")
    assert_snapshot("saved_traces", "\n".join(rows))
    assert b"PATH" not in (folder / "model").read_bytes()  # variables that nothing read


class Inherited(nn.Module):
    factor = 2.0

    def shifted(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @property
    def more(self) -> float:
        return 1.0


class Inherits(Inherited):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.called = nn.Linear(8, 8), doubled

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        x = self.called(self.shifted(self.linear(x)) * self.factor + self.more) * scale
        return x + len(os.environ.get("OF_A_TEST", ""))


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def with_code(code: str) -> Any:
    """Return ``doubled`` with other code."""
    scope: dict[str, Any] = {"__name__": __name__}
    exec(f"def doubled(x): return {code}", scope)
    return scope["doubled"]


@pytest.mark.parametrize(
    "of_torch", [pytest.param(True, marks=DEFAULTS), False], ids=["aot_compile", "compile"]
)
def test_classes_and_functions_are_compared(
    of_torch: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, x = folder / "model", torch.randn(6, 8)
    if of_torch:
        save(Inherits().eval(), path, x)
    else:
        compiled_of(Inherits().eval()).save(path, x)
    changes: dict[str, Callable[[Any], Any]] = {
        "type(self).factor is 3.0": lambda p: p.setattr(Inherited, "factor", 3.0),
        "type(self).factor is 4.0": lambda p: p.setattr(Inherits, "factor", 4.0, raising=False),
        "Inherited.shifted": lambda p: p.setattr(Inherited, "shifted", lambda self, x: x),
        "Inherited.more": lambda p: p.setattr(Inherited, "more", property(lambda self: 3.0)),
        "Inherits.forward": lambda p: p.setattr(Inherits.forward, "__kwdefaults__", {"scale": 3.0}),
        "doubled": lambda p: p.setattr(doubled, "__code__", with_code("x * 3").__code__),
        "OF_A_TEST": lambda p: p.setenv("OF_A_TEST", "x"),
    }
    for text, change in changes.items():
        model = Inherits().eval()
        assert replays(cgcompile.load(path, model), model, *[(6, 8)] * 3) == 1
        with monkeypatch.context() as patch:
            change(patch)
            with pytest.raises(SavedModelError, match=re.escape(text)):
                cgcompile.load(path, model)
    for name, value in {"self.called": with_code("x * 3"), "_forward_hooks": None}.items():
        model = Inherits().eval()
        if value is None:
            model.linear.register_forward_hook(lambda *_: None)
        else:
            model.called = value
        with pytest.raises(SavedModelError, match=re.escape(name)):
            cgcompile.load(path, model)


def test_which_traces_cannot_be_saved(folder: Path, module: ModuleType) -> None:
    model, x, rows = module.Model().eval(), torch.randn(6, 8), []

    def with_object(x: torch.Tensor, options: Any) -> torch.Tensor:
        return x * options.factor

    class Options:
        factor = 2.0

    attempts: dict[str, Callable[[], Any]] = {
        "guards": lambda: compiled_of(model, "keep").save(folder / "model", x),
        "a subclass": lambda: compiled_of(numbers).save(
            folder / "model", TwoTensor(x, x.clone()), 2.0
        ),
        "an object": lambda: compiled_of(with_object).save(folder / "model", x, Options()),
        "no ops": lambda: compiled_of(lambda x: 1).save(folder / "model", x),
    }
    for name, attempt in attempts.items():
        with pytest.raises(SavedModelError) as caught:
            attempt()
        rows.append(f"{name}: {shown(caught.value)}")
    assert not [*folder.iterdir()]
    folder.chmod(0o777)
    with pytest.raises(SavedModelError, match="its folder"):
        compiled_of(model).save(folder / "model", x)
    assert not [*folder.iterdir()]
    assert_snapshot("unsaved_traces", "\n".join(rows))


def test_tensors_of_other_modules_are_bound(
    folder: Path, module: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "module_around_a_saved_model.py"
    path.write_text(
        "import module_of_a_saved_model as inner\n\n\ndef outer(x):\n    return inner.weighted(x) + 1\n"
    )
    Path(str(module.__file__)).write_text(
        MODEL + "\n\nweight = torch.randn(8)\n\n\ndef weighted(x):\n    return x * weight\n"
    )
    importlib.reload(module)
    around = importlib.import_module(path.stem)
    try:
        compiled_of(around.outer).save(folder / "model", torch.randn(6, 8))
        for name in [name for name in vars(around) if name.startswith("__import_")]:
            delattr(around, name)  # as in another process
        loaded = cgcompile.load(folder / "model", around.outer)
        loaded.freeze()
        assert replays(loaded, around.outer, *[(6, 8)] * 4) == 2
        module.weight = torch.randn(9)
        with pytest.raises(SavedModelError, match=r"weight is Tensor torch.float32 \[9\]"):
            cgcompile.load(folder / "model", around.outer)
    finally:
        del sys.modules[path.stem]


def test_the_contents_of_a_saved_model_are_listed(
    folder: Path, module: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    compiled_of(module.Model().eval()).save(folder / "model", torch.randn(6, 8))
    monkeypatch.setattr(saved.pickle, "loads", None)  # no code of the file runs
    assert main(["cache", "list", str(folder / "model")]) == 0
    text = capsys.readouterr().out
    assert "  the value module_of_a_saved_model.SCALE: 2.0\n" in text
    assert "  the value self.layers.0.qkv.weight: Parameter torch.float32 [8, 8] on cpu\n" in text
    save(module.Model().eval(), folder / "ahead", torch.randn(6, 8))
    assert main(["cache", "list", str(folder / "ahead")]) == 1
    assert "of a file of aot_compile nothing can be listed" in capsys.readouterr().err


def test_another_rank_is_refused(
    folder: Path, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = module.Model().eval()
    compiled_of(model).save(folder / "model", torch.randn(6, 8))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(SavedModelError, match="the rank is 1 of 2; it was that of a single"):
        cgcompile.load(folder / "model", model)


TRANSFORMERS = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import cgcompile

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
config = LlamaConfig(vocab_size=64, num_attention_heads=4, num_key_value_heads=2, **sizes)
model = LlamaForCausalLM(config).eval()
settings = {"capture_device": "host", "compiler": "eager", "cache_dir": "off"}
with torch.inference_mode():
    if sys.argv[1] == "save":
        dims = {"input_ids": (0, 1)}
        compiled = cgcompile.compile(model, dynamic_dims=dims, guards="none", **settings)
        compiled.save("own/model", input_ids=torch.randint(0, 64, (2, 6)), use_cache=False)
    else:
        loaded = cgcompile.load("own/model", model)
        loaded.freeze()
        for shape in ((2, 6), (2, 6), (2, 6), (3, 5)):
            ids = torch.randint(0, 64, shape)
            result, expected = (run(input_ids=ids, use_cache=False) for run in (loaded, model))
            torch.testing.assert_close(result.logits, expected.logits)
            assert type(result) is type(expected)
        print(loaded.backend.counters.replays)
"""


@pytest.mark.slow
def test_a_model_of_transformers_replays_in_another_process(tmp_path: Path, folder: Path) -> None:
    pytest.importorskip("transformers")
    run_here(TRANSFORMERS, tmp_path, "save")
    assert run_here(TRANSFORMERS, tmp_path, "load") == [1]


def test_a_damaged_trace_is_refused(folder: Path, module: ModuleType) -> None:
    path, model = folder / "model", module.Model().eval()
    compiled_of(model).save(path, torch.randn(6, 8))
    assert path.stat().st_mode & 0o777 == 0o600
    data = path.read_bytes()
    for damaged in (data[:-1], data[:3000] + b"!" + data[3001:]):
        path.write_bytes(damaged)
        with pytest.raises(SavedModelError, match="its checksum is wrong"):
            cgcompile.load(path, model)
