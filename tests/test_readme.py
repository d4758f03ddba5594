"""What the README says is so: its tables name what exists, its Python runs."""

import importlib.util
import json
import re
from operator import attrgetter
from pathlib import Path

import piecewise_cuda_graphs as rival
import pytest
import torch

import cgcompile
from cgcompile import errors
from cgcompile.debug.doctor import KINDS
from cgcompile.debug.locate import STAGES

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def section(title: str) -> str:
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_column(table: str) -> list[str]:
    rows = [row for row in table.splitlines() if row.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


ROOMS = ("boundaries", "context", "debug", "encoder", "graphs", "serving")


def test_departures_name_what_can_be_imported() -> None:
    departures = first_column(section("Departures from the systems it learned from"))
    coming = first_column(section("Coming from vLLM, SGLang or Meta's package"))
    assert len(departures) >= 20
    assert len(coming) >= 18
    for name in departures + coming:
        top, _, member = name.partition(".")
        assert top in cgcompile.__all__ or top in ROOMS
        assert not member or attrgetter(member)(getattr(cgcompile, top))


def test_names_of_metas_package_are_its_own() -> None:
    table = section("Coming from vLLM, SGLang or Meta's package").split("|---|---|---|---|\n")[1]
    columns = [row.split("|")[4] for row in table.splitlines() if row.startswith("|")]
    names = {name for each in columns for name in re.findall(r"`([^`]+)`", each)}
    assert names >= set(rival.__all__)
    for name in names:
        top, _, member = name.partition(".")
        assert hasattr(getattr(rival, top), member) if member else hasattr(rival, top)


@pytest.mark.parametrize(
    ("marker", "words"),
    [("quickstart", "python examples/quickstart.py"), ("test", "python -m pytest")],
)
def test_the_commands_stand_where_ci_finds_them(marker: str, words: str) -> None:
    (block,) = re.findall(rf"<!-- {marker} command -->\n```bash\n(.*?)\n```\n", README, re.DOTALL)
    assert re.fullmatch(rf"pip install -e '\.\[\w+\]' && {words}", block)
    assert f"$(command_of {marker})" in (ROOT / ".ci" / "run").read_text()


def test_every_setting_is_in_the_table() -> None:
    assert sorted(first_column(section("Settings"))) == sorted(cgcompile.CompilationConfig.names())


def test_the_pass_of_the_readme_works(capsys) -> None:
    code, look = re.findall(r"```python\n(.*?)```", section("Writing a pass"), re.DOTALL)
    namespace: dict = {"cgcompile": cgcompile, "torch": torch}
    exec(code, namespace)

    def noisy(x):
        return torch.nn.functional.dropout(x, 0.9).sin()

    x = torch.randn(64)
    backend = namespace["backend"]
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(noisy, backend=backend)(x), x.sin())
    exec(look, namespace)
    assert "graph  drop_dropout" in capsys.readouterr().out
    assert namespace["gone"]["drop_dropout"] == {"torch.nn.functional.dropout": -1}
    assert "drop_dropout" in {record.name for record in backend.graphs[-1].split.passes}
    without = cgcompile.Backend(backend.config, disabled_passes="drop_dropout")
    assert without.config.disabled_passes == ("drop_dropout",)


def test_what_the_readme_looks_at_can_be_seen(capsys) -> None:
    (code,) = re.findall(r"```python\n(found = .*?)```", section("Seeing"), re.DOTALL)
    module = torch.nn.Linear(8, 8)
    model = cgcompile.compile(module, compiler="eager", capture_device="host")
    namespace: dict = {"cgcompile": cgcompile, "model": model, "x": torch.randn(4, 8)}
    exec(code, namespace)
    assert namespace["found"].ok
    assert namespace["found"].replays == 6
    assert "Linear: nothing differs" in capsys.readouterr().out


def test_the_engine_step_of_the_readme_works() -> None:
    (code,) = re.findall(r"```python\n(batch = .*?)```", section("Graphs"), re.DOTALL)
    module = torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.Linear(8, 8))
    backend = cgcompile.Backend(compiler="eager", capture_device="host")
    tokens = torch.zeros(16, dtype=torch.long)
    model = torch.compile(module, backend=backend)
    with torch.inference_mode():
        for _ in range(4):
            tokens.random_(9)
            namespace: dict = {"cgcompile": cgcompile, "metadata": None}
            exec(code, {"model": model, "tokens": tokens, **namespace}, namespace)
            assert torch.equal(namespace["logits"], module(tokens[:8]))
    counters = backend.counters
    assert (counters.captures, counters.replays) == (1, 2)


def test_the_traced_model_of_the_readme_works(capsys) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", section("Traced once"), re.DOTALL)

    class Model(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).relu()

    module = Model(4, 4)
    names = {"cgcompile": cgcompile, "torch": torch, "model": module, "x": torch.randn(3, 4)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CGCOMPILE_COMPILER", "eager")
        exec(code, names)
    torch.testing.assert_close(names["y"], module(names["x"]))
    assert re.match(r"traced in [\d.]+ s, compiled in [\d.]+ s", capsys.readouterr().out)
    with torch.inference_mode():
        names["model"](torch.randn(7, 4))  # another size of the same trace
        with pytest.raises(cgcompile.CGCompileError, match="is frozen"):
            names["model"](torch.randn(3, 1, 4))


def test_the_bulk_capture_of_the_readme_works(capsys) -> None:
    (code,) = re.findall(r"```python\n(def step\(num_tokens.*?)```", section("Graphs"), re.DOTALL)
    module = torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.Linear(8, 8))
    handle = cgcompile.Backend(compiler="eager", capture_device="host")
    model = torch.compile(module, backend=handle, dynamic=True)
    tokens = torch.zeros(16, dtype=torch.long)
    names = {"cgcompile": cgcompile, "metadata": None, "handle": handle}
    names |= {"model": model, "tokens": tokens}
    with torch.inference_mode():
        exec(code, names)
        assert "4 batches captured" in capsys.readouterr().out
        replays = handle.counters.replays
        for size in (2, 8, 1, 4):
            tokens.random_(9)
            assert torch.equal(names["step"](size), module(tokens[:size]))
    assert handle.counters.replays == replays + 4


def test_the_breakable_model_of_the_readme_works() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", section("Without tracing"), re.DOTALL)
    config = cgcompile.CompilationConfig(capture_device="host")
    names = {"cgcompile": cgcompile, "torch": torch, "config": config}
    exec(code, names)
    model, x = names["model"], names["x"]
    assert (model.counters.captures, model.counters.replays) == (1, 2)
    with torch.inference_mode(), cgcompile.set_forward_context(0.3):
        assert torch.equal(names["y"], model.unwrap()(x))
    (entry,) = model.concrete_cudagraph_entries.values()
    assert (entry.sequence.num_graphs, entry.sequence.num_eager_breaks) == (2, 1)


def test_the_encoder_of_the_readme_works(capsys) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", section("Encoders"), re.DOTALL)
    config = cgcompile.CompilationConfig(capture_device="host")
    names = {"cgcompile": cgcompile, "torch": torch, "config": config, "device": "cpu"}
    exec(code, names)
    assert [list(each.shape) for each in names["features"]] == [[4, 32], [16, 32]]
    assert names["manager"].statistics.hits == 2
    assert "default  64" in capsys.readouterr().out
    encoder, images = names["encoder"], names["images"]
    for item, mine in enumerate(names["features"]):
        alone = encoder.select_encoder_cudagraph_items(images, [item])
        with torch.inference_mode():
            torch.testing.assert_close(mine, encoder.encoder_eager_forward(alone))


def test_the_printed_split_has_the_form_of_today() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            return x + self.out(y)

    x = torch.randn(6, 4, 16)
    torch._dynamo.mark_dynamic(x, 0)
    backend = cgcompile.Backend(compiler="eager")
    with torch.no_grad():
        torch.compile(Model(), backend=backend)(x)
    shown = re.findall(r"```\n(3 pieces.*?)```", README, re.DOTALL)[0].splitlines()
    real = backend.graphs[0].split.text().splitlines()
    for line in shown:
        start = re.sub(r"model\.py:\d+", "", line).split("...")[0].rstrip(" ,").split("F.scaled")[0]
        assert any(re.sub(r"test_readme\.py:\d+", "", row).startswith(start) for row in real), (
            f"the README shows {line!r}"
        )


def test_seeing_of_the_readme_works(tmp_path, monkeypatch, capsys) -> None:
    code, *_ = re.findall(r"```python\n(.*?)```", section("Seeing"), re.DOTALL)
    monkeypatch.chdir(tmp_path)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(16, 16)

        def forward(self, x):
            return torch.nn.functional.scaled_dot_product_attention(x, x, self.linear(x))

    namespace: dict = {"cgcompile": cgcompile, "torch": torch, "Model": Model}
    exec(code, namespace)
    assert "2 pieces: 1 captured, 1 eager" in capsys.readouterr().out
    assert [line.where.split(":")[0] for line in namespace["eager"]] == ["test_readme.py"]
    assert json.loads((tmp_path / "split.json").read_text())["totals"]["eager"] == 1


def rows_of_faults() -> list[list[str]]:
    table = section("Seeing").split("| fault | who tells | what it says |\n|---|---|---|\n")[1]
    return [row.split("|")[1:4] for row in table.split("\n\n")[0].splitlines()]


def test_each_fault_is_in_the_table() -> None:
    assert len(rows_of_faults()) == 14


@pytest.mark.parametrize("row", rows_of_faults(), ids=lambda row: row[0].strip())
def test_the_table_of_faults_names_what_exists(row: list[str]) -> None:
    tools, said = (re.findall(r"`([^`]+)`", column) for column in row[1:])
    for name in tools:
        room, _, function = name.rpartition(".")
        assert (
            name in cgcompile.__all__
            or function in getattr(getattr(cgcompile, room, None), "__all__", ())
            or importlib.util.find_spec(f"cgcompile.{name}")
        )
    stages = {"padding", "tracing", *STAGES.values()}
    known = {*KINDS, *stages, *(reason.value for reason in cgcompile.Reason)}
    assert tools
    assert said
    for name in said:
        assert name in known or issubclass(getattr(errors, name), cgcompile.CGCompileError)


def test_the_report_of_the_readme_works(tmp_path, monkeypatch) -> None:
    (code,) = re.findall(r"```python\n(page = .*?)```", section("Seeing"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(4, 4)
    manager = cgcompile.compile(model, compiler="eager", capture_device="host")
    with torch.inference_mode():
        for _ in range(3):
            manager(torch.ones(2, 4))
    names = {"cgcompile": cgcompile, "manager": manager}
    exec(code, names)
    assert names["page"].counters.replays == 1
    assert "</html>" in (tmp_path / "report.html").read_text()


def test_the_commands_of_the_readme_exist() -> None:
    from cgcompile.cli import command_line

    lines = re.findall(r"^cgcompile ([a-z][^#\n]*)", section("Seeing"), re.MULTILINE)
    assert len(lines) >= 5
    for line in lines:
        given = command_line().parse_args(line.split())
        assert callable(given.run)
