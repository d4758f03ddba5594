"""Compiled once: within a backend, and, through the folder, in every later process."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.programs import COMPILERS, run_program
from torch import fx

import cgcompile
from cgcompile import CompilationConfig
from cgcompile.pieces.cache import Compilation, Compiling, PieceCache, PieceOrigin, Store
from cgcompile.torch_compat import inductor

ROOT = Path(__file__).resolve().parents[2]

# ---------------------------------------------------------------- fresh processes

PROGRAM = """
import hashlib, json, pathlib, sys
import torch
import torch.nn.functional as F
import cgcompile
from torch._dynamo.utils import counters

torch.set_num_threads(1)
folder = sys.argv[1]

def step(x):
    for _ in range(3):  # the pieces in the middle are equal
        x = F.scaled_dot_product_attention(x, x, x)
        x = x * 2 + 1
    return x.sin()

def run(first=6, **settings):
    torch._dynamo.reset()
    counters.clear()
    backend = cgcompile.Backend(**{"cache_dir": folder, "capture_device": "host", **settings})
    torch.manual_seed(0)
    x = torch.randn(first, 4, 8)
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        compiled = torch.compile(step, backend=backend)
        inputs = [x, torch.cat([x, x]), x, x]  # the third is captured, the fourth replayed
        results = [compiled(each) for each in inputs]
        for result, value in zip(results, inputs):
            torch.testing.assert_close(result, step(value))
    compilation = backend.graphs[-1].compilation
    libraries = {str(p): p.stat().st_mtime_ns for p in pathlib.Path(folder).rglob("*.so")}
    return {
        "how": [each.how for each in compilation.pieces],
        "uncached": compilation.uncached,
        "text": str(compilation),
        "seconds": compilation.seconds,
        "graphs": len(backend.graphs),
        "replays": backend.counters.replays,
        "results": [hashlib.sha256(each.numpy().tobytes()).hexdigest() for each in results],
        "torch": {k: v for n in ("inductor", "aot_autograd") for k, v in counters[n].items()},
        "libraries": libraries,
    }

print(json.dumps([run(**each) for each in json.loads(sys.argv[2])]))
"""


# Else Inductor compiles trials, of 6 s in all.
WITHOUT_TRIALS = f"import os; os.environ['TORCHINDUCTOR_VEC_ISA_OK'] = '1'; {COMPILERS}"


def processed(folder: Path, *runs: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """What runs say, and their log: all in one process whose Inductor and Triton caches are empty.

    Args:
        folder: the cache.
        *runs: of each, ``first``, the size of the first batch, and settings of its backend. The
            later ones have backends of their own, and the folder alone to take pieces from.
    """
    with tempfile.TemporaryDirectory() as empty:
        program = Path(empty) / "program.py"
        program.write_text(PROGRAM)
        done = run_program(
            program,
            str(folder),
            json.dumps(runs),
            imports=WITHOUT_TRIALS,
            TORCHINDUCTOR_CACHE_DIR=os.path.join(empty, "inductor"),
            TRITON_CACHE_DIR=os.path.join(empty, "triton"),
        )
    assert done.code == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder that one process has filled, and what that process said. Do not change it."""
    folder = tmp_path_factory.mktemp("cache") / "cgcompile"
    ((said,), _) = processed(folder, {})
    return folder, said


def copied(cold: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    shutil.copytree(cold[0], tmp_path / "cgcompile")  # with times: libraries are not made again
    return tmp_path / "cgcompile"


@pytest.mark.slow
def test_the_first_process_compiles(cold) -> None:
    folder, said = cold
    assert said["how"] == ["compiled", "compiled"]  # the pieces in the middle, the last one
    assert said["uncached"] == {}
    assert said["torch"]["autograd_cache_miss"] == 2
    entries = list(Store(folder).entries())
    assert [each.kind for each in entries] == ["piece", "piece"]
    assert all("input f32[s0, 4, 8]" in each.facts["graph"] for each in entries)
    assert said["libraries"]


@pytest.mark.slow
def test_a_warm_start_compiles_nothing(cold) -> None:
    folder, before = cold
    (said, other_size), _ = processed(folder, {}, {"first": 9})
    assert said["how"] == ["loaded", "loaded"]
    missed = [name for name in said["torch"] if "miss" in name or "bypass" in name]
    assert missed == []
    assert said["torch"].get("total", 0) == 0  # AOTAutograd was not asked at all
    assert said["libraries"] == before["libraries"]  # no C++ either
    assert said["results"] == before["results"]  # bitwise
    assert said["graphs"] == before["graphs"] == 1
    assert said["replays"] == before["replays"] == 1  # a loaded piece can be captured
    assert other_size["how"] == ["loaded", "loaded"]


@pytest.mark.slow
def test_damaged_foreign_and_other_entries_are_compiled(cold, tmp_path: Path) -> None:
    """One file is cut, the payload of the other is whole but not torch's; other settings are other
    keys. Where nothing can be written (a file stands where the folder should be) pieces run all the
    same.
    """
    folder = copied(cold, tmp_path)
    one, other = Store(folder).entries()
    path = folder / f"piece.{one.key}.cgc"
    path.write_bytes(path.read_bytes()[:1000])
    Store(folder).put("piece", other.key, b"not a pickle", other.facts, other.notes)
    settings = {"inductor_options": {"max_fusion_size": 7}}
    (tmp_path / "file").write_text("")
    nowhere = {"cache_dir": str(tmp_path / "file" / "cgcompile")}
    (said, again, changed, unkept), log = processed(folder, {}, {}, settings, nowhere)
    assert said["how"] == ["compiled", "compiled"]
    assert said["results"] == cold[1]["results"]
    assert "its checksum is wrong" in log
    assert "torch cannot load it" in log
    assert again["how"] == ["loaded", "loaded"]
    assert changed["how"] == ["compiled", "compiled"]
    assert len(list(Store(folder).entries())) == 4
    assert unkept["how"] == ["compiled", "compiled"]
    assert set(unkept["uncached"].values()) == {"the cache folder cannot be written"}
    assert log.count("cannot be written") == 1
    assert unkept["results"] == cold[1]["results"]


@pytest.mark.slow
def test_what_torch_cannot_save_runs_and_says_so() -> None:
    """The body of a higher-order op is one such thing, on some torch versions."""
    outcomes: list[tuple[bytes | None, str]] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        fakes = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
        runnable, data, why = inductor.compile_saveable(gm, fakes, {})
        outcomes.append((data, why))
        return runnable

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    with torch.no_grad():
        compiled = torch.compile(step, backend=backend)
        for x in (torch.ones(6), -torch.ones(6)):
            torch.testing.assert_close(compiled(x), step(x))
    ((data, why),) = outcomes
    assert (data is None) == why.startswith("torch cannot save it")


def test_what_cannot_be_saved_is_shared_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsaveable(gm: fx.GraphModule, fake_inputs: Any, patches: Any) -> Any:
        return (lambda *inputs: gm.forward(*inputs)), None, "torch cannot save it (...)"

    monkeypatch.setattr(inductor, "compile_saveable", unsaveable)
    config = CompilationConfig(cache_dir=str(tmp_path))
    cache, kept, origins = PieceCache(config), [], []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        fakes = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
        with Compiling(cache, lambda *_: None, config) as work:
            kept.append(work.make(gm, fakes, "piece_0", "here"))
        origins.extend(work.result().pieces)
        return gm.forward

    for _ in range(2):
        torch._dynamo.reset()
        torch.compile(lambda x: x * 2, backend=backend)(torch.ones(3))
    assert [each.how for each in origins] == ["compiled", "shared"]
    assert [each.uncached for each in origins] == ["torch cannot save it (...)", None]
    assert list(Store(tmp_path).entries()) == []


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"force_disable_caches": True}, "force_disable_caches is on"),
        ({"fx_graph_cache": False}, "fx_graph_cache is off"),
        ({}, None),
    ],
)
def test_switches_of_torch_count(options: dict[str, bool], why: str | None) -> None:
    assert inductor.why_not_saved(options) == why


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["on", "off"])
def test_the_code_of_an_edited_op_is_compiled(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torch keeps a graph with an op that is decomposed, under a key without the code of the op."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    folder = str(tmp_path / "own") if cache == "on" else "off"
    for factor in (2, 3):
        torch._dynamo.reset()
        with torch.library._scoped_library("cgc_edited", "DEF") as library:
            library.define("scaled(Tensor x) -> Tensor")
            library.impl("scaled", lambda x: x * factor, "CompositeImplicitAutograd")  # noqa: B023
            backend = cgcompile.Backend(cache_dir=folder, capture_device="host")
            step = torch.compile(lambda x: torch.ops.cgc_edited.scaled(x).tanh(), backend=backend)
            with torch.inference_mode():
                for _ in range(3):  # the second call is captured, the third replayed
                    x = torch.randn(3, 4)
                    torch.testing.assert_close(step(x), (x * factor).tanh())
        assert backend.counters.replays == 1
        (origin,) = backend.graphs[0].compilation.pieces
        assert origin.how == "compiled"
        assert "decomposed" in str(origin.uncached)
    import torch._functorch.config as functorch_config

    assert functorch_config.enable_autograd_cache  # for other pieces
    assert "cannot save" not in caplog.text


# ---------------------------------------------------------------- guards, in one process


class Asking:
    """Compiles nothing, and asks whether a size is below a limit, as Inductor does."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gm: fx.GraphModule, fake_inputs: list[Any]) -> Any:
        self.calls += 1
        size = next(each for each in fake_inputs if isinstance(each, torch.SymInt))
        bool(size < 100)
        return lambda *inputs: gm.forward(*inputs)


def made_for(size: int, cache: PieceCache, asking: Asking, kept: list[Any]) -> tuple[str, str, str]:
    """(how, key, guards of the graph afterwards) of one piece traced at a size."""
    origins: list[tuple[str, str, str]] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        fakes = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
        work = Compiling(cache, asking, CompilationConfig(compiler="aot"))
        kept.append(work.make(gm, fakes, "piece_0", "here"))
        (origin,) = work.result().pieces
        env = next(each for each in fakes if isinstance(each, torch.SymInt)).node.shape_env
        origins.append((origin.how, str(origin.key), str([each.expr for each in env.guards])))
        return gm.forward

    torch._dynamo.reset()
    x = torch.ones(size, 4)
    torch._dynamo.maybe_mark_dynamic(x, 0)
    torch.compile(lambda x: x * 2, backend=backend)(x)
    return origins[0]


def test_guards_go_with_what_was_compiled_under_them() -> None:
    cache, asking, kept = PieceCache(CompilationConfig()), Asking(), []
    first = made_for(6, cache, asking, kept)
    assert first[0] == "compiled"
    assert "< 100" in first[2]
    second = made_for(50, cache, asking, kept)
    assert second[:2] == ("shared", first[1])
    assert second[2] != "[]"  # the guard is one of this graph as well
    third = made_for(200, cache, asking, kept)
    assert third[0] == "compiled"
    assert third[1] != first[1]
    fourth = made_for(300, cache, asking, kept)
    assert fourth[:2] == ("shared", third[1])
    assert asking.calls == 2
    assert kept[0] is kept[1]


def test_an_artifact_without_users_is_freed() -> None:
    cache, asking, kept = PieceCache(CompilationConfig()), Asking(), []
    made_for(6, cache, asking, kept)
    kept.clear()
    assert made_for(6, cache, asking, kept)[0] == "compiled"


# ---------------------------------------------------------------- the record


def test_the_record_prints() -> None:
    record = Compilation(
        (
            PieceOrigin("piece_0", "compiled", 1.25, "ab", None),
            PieceOrigin("piece_2", "loaded", 0.01, "cd", None),
            PieceOrigin("piece_4", "compiled", 0.5, None, "it calls f"),
        ),
        1.76,
    )
    assert str(record) == (
        "2 compiled, 1 loaded, 0 shared, 1 not kept; 1.760 s\n"
        "piece_0  compiled  1.250 s\n"
        "piece_2  loaded    0.010 s\n"
        "piece_4  compiled  0.500 s  not kept: it calls f"
    )
    assert record.uncached == {"piece_4": "it calls f"}


def test_environment_is_put_back(tmp_path: Path) -> None:
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    before = {name: os.environ.get(name) for name in names}

    def fail_in(folder: Path) -> None:
        with inductor.inductor_files_in(folder):
            assert os.environ[names[0]] == str(folder)
            raise KeyError

    with pytest.raises(KeyError):
        fail_in(tmp_path / "inductor")
    assert {name: os.environ.get(name) for name in names} == before
    (tmp_path / "file").write_text("")
    with inductor.inductor_files_in(tmp_path / "file" / "inductor"):
        assert {name: os.environ.get(name) for name in names} == before


def test_graphs_say_where_their_pieces_came_from() -> None:
    backend = cgcompile.Backend(compiler="aot")
    with torch.no_grad():
        kept = torch.compile(lambda x: x * 2, backend=backend)
        kept(torch.ones(3))
    compilation = backend.graphs[0].compilation
    assert [each.how for each in compilation.pieces] == ["compiled"]
    assert compilation.uncached == {"piece_0": "caching is off"}
    assert compilation.seconds > 0
