"""explain(): the split that compiling would make, without running, compiling or keeping it."""

import json
import re
import resource
from collections import Counter
from pathlib import Path
from typing import Any

import lib.cases
import lib.debug
import pytest
import torch
import torch.nn.functional as F
from lib.asserts import build, mark, split_texts
from lib.command_line import Page
from lib.debug import CALLS, Branches, D, Decoder, Raises, Reads, inputs, meta, names_of, shown
from lib.snapshots import assert_snapshot
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import cgcompile
from cgcompile import AttentionCGSupport, CompilationConfig, Reason, SplittingOp, explain
from cgcompile.debug.explain import Explanation
from cgcompile.errors import ConfigError, TraceError

DYNAMIC: dict[str, Any] = {"dynamic_dims": {"x": 0}}


def reasons(explanation: Explanation) -> list[Reason]:
    return [why.reason for piece in explanation.pieces for why in piece.why]


# ------------------------------------------------------------------ pieces


@pytest.mark.slow
def test_text() -> None:
    explanation = explain(meta(lambda: Decoder(4)), inputs(), **DYNAMIC, sizes=[8, 1])
    assert_snapshot("explain_text", shown(str(explanation)))
    assert max(map(len, str(explanation).splitlines())) <= 100


def test_a_piece_and_its_values() -> None:
    explanation = explain(Decoder(), inputs(), **DYNAMIC, sizes=[8])
    first, attention, *_ = explanation.pieces
    assert (first.captured, attention.captured) == (True, False)
    (why,) = attention.why
    assert why.reason is Reason.SPLITTING_OP
    assert "scaled_dot_product_attention" in why.detail
    assert attention.support == "ALWAYS"
    (line,) = attention.source
    assert re.fullmatch(r"debug\.py:\d+ in forward", line.where)
    assert "F.scaled_dot_product_attention(q, k, v)" in line.code
    q = next(value for value in attention.inputs if value.shape is not None)
    assert (q.shape, q.dtype, q.device, q.static) == (("s0", "3", "16"), "f32", "cpu", False)
    # q, k and v are views of one result: 4 bytes x 3 rows x 48 columns each.
    assert (q.bytes.expression, q.storage.expression) == ("192*s0", "576*s0")
    assert (first.bytes_out.traced, first.bytes_out.at) == (4 * 576, ((8, 8 * 576),))
    names = {value.source: value.static for value in first.inputs if value.source}
    assert (names["layers.0.qkv.weight"], names["x"]) == (True, False)
    assert [p.same_as for p in explanation.pieces] == [p.same_as for p in explanation.split.pieces]
    (size,) = explanation.symbols
    assert (size.name, size.source, size.traced) == ("s0", "x.size()[0]", 4)
    totals = explanation.totals
    assert (totals.pieces, totals.captured, totals.eager, totals.distinct) == (5, 3, 2, 4)
    weights = sum(p.numel() * 4 for p in Decoder().parameters())
    crossing = sum(piece.bytes_out.traced for piece in explanation.pieces)
    assert (totals.static.traced, totals.crossing.traced) == (weights, crossing)


@pytest.mark.slow
def test_bytes_are_those_of_real_tensors() -> None:
    sizes: list[int] = []

    def measured(gm, inputs):
        def run(*values):
            outputs = gm(*values)
            storages = [x.untyped_storage() for x in outputs if isinstance(x, torch.Tensor)]
            sizes.append(sum({x.data_ptr(): x.nbytes() for x in storages}.values()))
            return outputs

        return run

    model = cgcompile.compile(Decoder(), compiler=measured, **DYNAMIC, cache_dir="off")
    explanation = explain(model, inputs(), sizes=[6])
    with torch.no_grad():
        model(inputs(6))
    captured = [piece.bytes_out.at for piece in explanation.pieces if piece.captured]
    assert captured == [((6, size),) for size in sizes]


MODELS = {
    "one_row": (Decoder, lambda: (inputs(1),), {"x": 0}, "backed_size_oblivious"),
    "unbacked": (Decoder, lambda: (inputs(),), {"x": 0}, "unbacked"),
    "static": (Decoder, lambda: (inputs(),), {}, "backed"),
    "reads": (Reads, lambda: (inputs(), torch.ones(4)), {"x": 0}, "backed"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_split_that_compiling_makes(name: str) -> None:
    model_type, make, dims, shapes = MODELS[name]
    model, args = model_type(), make()
    how = {"dynamic_dims": dims, "dynamic_shapes": shapes}
    compiled = cgcompile.compile(model, compiler="eager", **how)
    explanation = explain(compiled, *args)
    assert compiled.traces == ()
    with torch.no_grad():
        compiled(*args)
    assert explanation.split.text() == compiled.backend.graphs[-1].split.text()
    assert explain(model, *args, config=compiled.backend, **how) == explanation


CASE_REASONS = {
    "op_packet": {Reason.SPLITTING_OP},
    "eager_region": {Reason.EAGER_REGION},
    "cond": {Reason.HOST_SYNC},
    "mask_assigns_values": {Reason.HOST_SYNC, Reason.UNBACKED_SIZE},
    "only_views": {Reason.NO_KERNEL},
    "view_mutated_in_another_piece": {Reason.SPLITTING_OP},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASE_REASONS)
def test_it_is_the_split_of_torch_compile(name: str) -> None:
    case = lib.cases.CASES[name]
    args = case.inputs(case.sizes[0])
    mark(case, args)
    explanation = explain(build(case), *args, config=case.settings)
    assert explanation.split.text(lines=False) == split_texts(case)
    assert {*reasons(explanation)} == CASE_REASONS[name]
    assert all(piece.source and piece.captured == (not piece.why) for piece in explanation.pieces)


REMARKS = {
    "layout_changed_in_place": (0, "left uncompiled: memory that it writes has another name"),
    "flex_attention": (1, "compiled on its own"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REMARKS)
def test_pieces_whose_compilation_is_unusual_are_remarked(name: str, tmp_path: Path) -> None:
    case, (index, remark) = lib.cases.CASES[name], REMARKS[name]
    args = case.inputs(case.sizes[0])
    mark(case, args)
    explanation = explain(build(case), *args, config=case.settings)
    rows = [row.split() for row in str(explanation).split("\nmode")[1].splitlines()]
    line = next(number for number, row in enumerate(rows) if row[0] == f"piece_{index}")
    assert remark.split() in rows[line + 1 : line + 3]
    piece = explanation.pieces[index]
    assert (piece.compiled, piece.captured) == ((False, True) if index == 0 else (True, False))
    if index == 0:
        assert remark == f"left uncompiled: {piece.uncompiled}"
        page = Page(explanation.to_html(tmp_path / "page.html").read_text(encoding="utf-8"))
        (row,) = [row for row in page.rows("distinct") if row["piece"][0] == "piece_0"]
        assert row["why, and where"][0].endswith(remark)


def test_sizes_that_compiling_would_refuse() -> None:
    class Halves(nn.Module):
        def forward(self, x):
            return x.view(2, -1).sin()

    sizes = {"cudagraph_capture_sizes": (4, 5)}
    explanation = explain(Halves(), torch.randn(4, 5), config=sizes, **DYNAMIC)
    (note,) = [note for note in explanation.notes if "SymbolError" in note]
    assert "5" in note
    assert explanation.totals.crossing.at == ((4, 80), (5, None))
    assert explanation.symbols[0].guards


# ------------------------------------------------------------------ without memory, without devices


@pytest.mark.slow
def test_a_model_that_fits_nowhere() -> None:
    model = meta(lambda: Decoder(8, 1 << 17))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert weights > 1 << 40  # a TiB
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    explanation = explain(model, inputs(device="meta", width=1 << 17), **DYNAMIC)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB
    assert explanation.totals.static.traced == weights
    assert (explanation.totals.captured, explanation.totals.eager, explanation.device) == (
        9,
        8,
        "meta",
    )


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["meta", "fake", "cpu"])
@pytest.mark.parametrize("argument", ["meta", "fake", "cpu"])
def test_weights_and_arguments_may_be_anywhere(weights: str, argument: str) -> None:
    mode = FakeTensorMode()
    x = inputs(device="meta" if argument == "meta" else "cpu")
    if weights == "fake":
        with mode:
            model = Decoder()
    else:
        model = meta(Decoder) if weights == "meta" else Decoder()
    explanation = explain(model, mode.from_tensor(x) if argument == "fake" else x, **DYNAMIC)
    assert {*reasons(explanation)} == {Reason.SPLITTING_OP}
    assert explanation.device == ("meta" if weights == "meta" else "cpu")
    same = explain(Decoder(), inputs(), **DYNAMIC)
    assert [(p.captured, p.num_ops, p.bytes_out) for p in explanation.pieces] == [
        (p.captured, p.num_ops, p.bytes_out) for p in same.pieces
    ]


class Lengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x, lengths):
        y = self.linear(x)
        return y + lengths.to(y.device)[:, None, None]


def test_on_meta_a_cpu_argument_is_one_if_others_are_not() -> None:
    model, lengths = meta(Lengths), torch.ones(4)
    moved = explain(model, inputs(), lengths)
    assert [piece.captured for piece in moved.pieces] == [True]
    kept = explain(model, inputs(device="meta"), lengths)
    assert reasons(kept) == [Reason.DEVICE_COPY]
    assert "meta tensors stand for" in "".join(kept.notes)


@pytest.mark.parametrize("first", ["cpu", "meta"])
def test_of_weights_on_meta_and_elsewhere_meta_is_the_target(first: str) -> None:
    """Copies to the device that captures are boundaries; where it would be the CPU they are not."""
    devices = [first, {"cpu": "meta", "meta": "cpu"}[first]]

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, device in zip("ab", devices, strict=True):
                self.register_buffer(name, torch.zeros(3, D, device=device))
            self.on_meta = "ab"[devices.index("meta")]

        def forward(self, x):
            return x + getattr(self, self.on_meta)

    explanation = explain(Two(), inputs())
    assert (explanation.device, [piece.captured for piece in explanation.pieces]) == (
        "meta",
        [True],
    )
    (x,) = [value for value in explanation.pieces[0].inputs if not value.static]
    assert x.device == "meta"


# ------------------------------------------------------------------ nothing is left


@pytest.mark.slow
def test_nothing_is_run_and_nothing_is_left() -> None:
    model, x = Decoder(), inputs()
    torch._dynamo.mark_dynamic(x, 1)
    tensors = [x, *model.parameters()]

    def state() -> Any:
        names = {name for name in vars(lib.debug) if name.startswith("__")}
        config = torch._dynamo.config.save_config_portable()
        modules = {name: dict(vars(module)) for name, module in model.named_modules()}
        attributes = [dict(tensor.__dict__) for tensor in tensors]
        return names, modules, attributes, config, torch.get_rng_state().sum()

    branches, other = Branches(), inputs()
    before = state()
    explain(model, x, **DYNAMIC)
    explain(branches, other)
    assert state() == before
    backend = cgcompile.Backend(compiler="eager", cache_dir="off")
    with torch.no_grad():
        compiled = torch.compile(model, backend=backend)
        torch.testing.assert_close(compiled(x), model(x))
    assert backend.num_compilations == 1


@pytest.mark.slow
@pytest.mark.parametrize("before", [{}, {"stats": {"unique_graphs": 7}}])
def test_counters_of_dynamo_are_left(before: dict[str, dict[str, int]]) -> None:
    counters = torch._dynamo.utils.counters
    counters.clear()
    counters.update({kind: Counter(counts) for kind, counts in before.items()})
    held = counters["stats"]
    for model in (Decoder(), Branches()):
        explain(model, inputs())
    assert {kind: dict(counts) for kind, counts in counters.items()} == {"stats": {}, **before}
    assert counters["stats"] is held
    torch.compile(torch.sin, backend="eager")(inputs())
    assert held["unique_graphs"] == before.get("stats", {}).get("unique_graphs", 0) + 1


# ------------------------------------------------------------------ graph breaks


def test_a_model_that_raises_is_not_called() -> None:
    CALLS.clear()
    (graph_break,) = explain(Raises(), inputs()).breaks
    assert CALLS == []
    assert "The model raises" in graph_break.fix


def test_a_graph_break() -> None:
    explanation = explain(Branches(), inputs())
    assert (explanation.traced, explanation.pieces, explanation.totals, explanation.split) == (
        False,
        (),
        None,
        None,
    )
    (graph_break,) = explanation.breaks
    assert graph_break.entry_point == "cgcompile.compile"
    assert graph_break.what == "Data-dependent branching"
    assert graph_break.source.code == "if y.sum() > 0:"
    assert "splitting='breakable'" in graph_break.fix
    assert "if y.sum() > 0:" in str(explanation)
    assert max(map(len, str(explanation).splitlines())) <= 100


def test_what_breaks_under_torch_compile_alone() -> None:
    explanation = explain(Reads(), inputs(), torch.ones(4))
    assert explanation.traced
    assert Reason.HOST_SYNC in reasons(explanation)
    (graph_break,) = explanation.breaks
    assert graph_break.entry_point == "torch.compile"
    assert graph_break.source.code == "return y * 2, lengths.max().item()"
    assert "capture_scalar_outputs" in graph_break.fix
    torch._dynamo.reset()
    backend = cgcompile.Backend(compiler="eager", cache_dir="off")
    with torch.no_grad():
        torch.compile(Reads(), backend=backend)(inputs(), torch.ones(4))
    assert backend.graphs[0].split.graph_break is not None


def test_breakable_says_what_it_cannot_tell() -> None:
    explanation = explain(Decoder(1), inputs(), config={"splitting": "breakable"})
    assert (explanation.traced, explanation.breaks) == (False, ())
    notes = " ".join(explanation.notes)
    assert "traces nothing" in notes
    assert "torch.nn.functional.scaled_dot_product_attention" in notes


# ------------------------------------------------------------------ modes


def with_support(support: AttentionCGSupport, **settings: Any) -> CompilationConfig:
    op = SplittingOp(F.scaled_dot_product_attention, support=support)
    return CompilationConfig(splitting_ops=(op,), **settings)


@pytest.mark.parametrize("support", AttentionCGSupport)
@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE", "PIECEWISE", "FULL_DECODE_ONLY"])
def test_the_mode_is_the_one_of_the_dispatcher(support: AttentionCGSupport, mode: str) -> None:
    modes = explain(Decoder(1), inputs(), config=with_support(support, cudagraph_mode=mode)).modes
    dispatcher = cgcompile.serving.CudagraphDispatcher(
        cgcompile.CUDAGraphMode[mode], [1, 2], max_num_reqs=2, support=support
    )
    assert (modes.asked, modes.result) == (mode, dispatcher.mode.name)
    assert [why.reason for why in modes.lost] == [why.reason for why in dispatcher.degraded]
    assert modes.support == support.name
    assert all("scaled_dot_product_attention" in why.detail for why in modes.lost[:1])


@pytest.mark.parametrize("support", [AttentionCGSupport.ALWAYS, AttentionCGSupport.NEVER])
def test_the_mode_without_a_context_is_the_one_of_the_entry(support: AttentionCGSupport) -> None:
    config = with_support(support, compiler="eager", capture_device="host", num_warmups=0)
    model = cgcompile.compile(Decoder(1), config)
    mode = explain(model, inputs()).modes.without_context
    with torch.inference_mode():
        model(inputs())
    (recording,) = model.backend.graphs[0].recordings
    assert mode == recording.batch.mode.name


def test_modes_without_pieces() -> None:
    stock = CompilationConfig(mode="STOCK_TORCH_COMPILE", cudagraph_mode="FULL")
    explanation = explain(Decoder(1), inputs(), config=stock)
    assert ([piece.captured for piece in explanation.pieces], explanation.modes.result) == (
        [True],
        "FULL",
    )
    none = explain(Decoder(1), inputs(), config={"cudagraph_mode": "NONE"})
    assert (none.modes.result, none.modes.lost) == ("NONE", ())


@torch.library.custom_op("explained::paged_attention", mutates_args=())
def paged_attention(x: torch.Tensor) -> torch.Tensor:
    return x * 2


paged_attention.register_fake(torch.empty_like)


def test_an_unregistered_op_of_attention_is_named() -> None:
    """It would be captured, with the metadata of its capture."""
    name = "explained::paged_attention"
    model = lambda x: torch.ops.explained.paged_attention(paged_attention(x) + 1)  # noqa: E731
    notes = [note for note in explain(model, inputs()).notes if name in note]
    assert len(notes) == 1
    assert f"piece_0 captures {name}: its name is that of attention" in notes[0]
    assert f"splitting_ops=({name!r},)" in notes[0]
    explanation = explain(model, inputs(), config={"splitting_ops": [name]})
    assert not [note for note in explanation.notes if name in note]


# ------------------------------------------------------------------ settings, data, errors


def settings_of(model: Any, **more: Any) -> dict[str, tuple[Any, str]]:
    return {name: rest for name, *rest in explain(model, inputs(), **more).settings}


@pytest.mark.slow
def test_where_settings_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGCOMPILE_NUM_WARMUPS", "3")
    settings = settings_of(Decoder(1))
    assert settings["num_warmups"] == [3, "environment"]
    assert settings["on_fallback"] == ["warn", "default"]
    settings = settings_of(Decoder(1), config={"on_fallback": "raise", "num_warmups": 2})
    assert settings["on_fallback"] == ["raise", "options"]
    assert settings["num_warmups"] == [2, "options"]
    config = CompilationConfig(on_fallback="raise", splitting_ops=(F.softmax,))
    settings = settings_of(Decoder(1), config=config)
    assert settings["on_fallback"] == ["raise", "argument"]
    assert settings["splitting_ops"] == [("softmax",), "argument"]
    assert settings["num_warmups"] == [3, "environment"]
    assert sorted(settings) == sorted(CompilationConfig.names())
    options = {"splitting_ops": "-builtin"}
    compiled = torch.compile(Decoder(), backend="cgcompile", options=options)
    explanation = explain(compiled, inputs())
    assert [piece.captured for piece in explanation.pieces] == [True]
    assert settings_of(compiled)["splitting_ops"] == [("-builtin",), "options"]


def test_schema() -> None:
    """A change of this snapshot raises VERSION in explain.py."""
    args = inputs(), torch.ones(4)
    explanation = explain(Reads(), *args, **DYNAMIC, sizes=[8])
    data = explanation.to_dict()
    assert json.loads(explanation.to_json()) == data
    data["pieces"].reverse()  # eager first: it has a reason
    assert data["version"] == 2
    assert_snapshot("explain_schema", names_of(data))
    assert explain(Reads(), *args, **DYNAMIC, sizes=[8]).to_json() == explanation.to_json()


@pytest.mark.parametrize(
    ("error", "text", "model", "args", "settings"),
    [
        (ConfigError, "dynamic_shapes", Decoder(), 1, {"dynamic_shapes": "some"}),
        (
            ConfigError,
            r"no parameter [^.]*\.\s+Parameters: (?!self)",
            Decoder(),
            1,
            {"dynamic_dims": {"y": 0}},
        ),
        (ConfigError, "class", Decoder, 1, {}),
        (TraceError, "7", Decoder(), 1, {"dynamic_dims": {"x": 7}}),
        (TypeError, "too many positional arguments", Decoder(), 2, {}),
    ],
)
def test_bad_calls(
    error: type[Exception], text: str, model: Any, args: int, settings: dict[str, Any]
) -> None:
    with pytest.raises(error, match=text):
        explain(model, *[inputs()] * args, **settings)
