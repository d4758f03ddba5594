"""explain(): the split that compiling would make, told without running, compiling or keeping it."""

import re
import resource
from typing import Any

import cases
import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import cgcompile
from cgcompile import AttentionCGSupport, CompilationConfig, SplittingOp, explain
from cgcompile.errors import ConfigError, TraceError

D = 16
CALLS: list[str] = []


class Block(nn.Module):
    def __init__(self, width: int = D) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v))


class Decoder(nn.Module):
    def __init__(self, layers: int = 2, width: int = D) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Reads(nn.Module):
    """The host reads a number of the data, which Dynamo keeps in the graph only if asked."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x, lengths):
        y = self.linear(x)
        return y * 2, lengths.max().item()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x):
        y = self.linear(x)
        if y.sum() > 0:
            y = y + 1
        return y


class Raises(nn.Module):
    def forward(self, x):
        CALLS.append("ran")
        raise ValueError("not today")


def meta(make: Any) -> nn.Module:
    with torch.device("meta"):
        return make()


def inputs(rows: int = 4, device: str = "cpu", width: int = D) -> torch.Tensor:
    return torch.randn(rows, 3, width, device=device)


def shown(text: str) -> str:
    """Without line numbers."""
    return re.sub(r"\.py:\d+ in", ".py:N in", text)


# ------------------------------------------------------------------ what is told


def test_the_table() -> None:
    found = explain(meta(lambda: Decoder(4)), inputs(), dynamic_dims={"x": 0}, sizes=[8, 1])
    assert_expected_inline(
        shown(str(found)),
        """\
Decoder: 9 pieces: 5 captured, 4 eager; 4 distinct, 3 to compile; 32 ops
bytes 3840*s0 B (15.0 KiB as traced, 8: 30.0 KiB, 1: 3.8 KiB) cross
      17408 B (17.0 KiB) static
size  0 <= s0, s0 = x.size()[0], traced with 4
mode  FULL_AND_PIECEWISE; without a forward context FULL; boundaries allow FULL graphs: ALWAYS
piece    kind      ops  same as  bytes out  where, why
piece_0  captured  5    -        576*s0     test_explain.py:N in forward: q, k, v = self.qkv(x)....
piece_1  eager     1    -        192*s0     test_explain.py:N in forward: return x + self.out(F....
          splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
piece_2  captured  7    -        768*s0     test_explain.py:N in forward: return x + self.out(F....
piece_3 .. piece_6  the same 2 pieces 2 times more
piece_7  eager     1    piece_1  192*s0     test_explain.py:N in forward: return x + self.out(F....
piece_8  captured  2    -        192*s0     test_explain.py:N in forward: return x + self.out(F....
set   cache_dir = 'off' (environment)
note  meta tensors stand for tensors of the device that captures""",
    )
    assert max(map(len, str(found).splitlines())) <= 100


def test_a_piece_and_its_values() -> None:
    found = explain(Decoder(), inputs(), dynamic_dims={"x": 0}, sizes=[8])
    first, attention, *_ = found.pieces
    assert (first.captured, attention.captured) == (True, False)
    (why,) = attention.why
    assert why.reason == "splitting_op"
    assert "scaled_dot_product_attention" in why.detail
    assert attention.support == "ALWAYS"
    (line,) = attention.source
    assert re.fullmatch(r"test_explain\.py:\d+ in forward", line.where)
    assert "F.scaled_dot_product_attention(q, k, v)" in line.code
    q = next(each for each in attention.inputs if each.shape is not None)
    assert (q.shape, q.dtype, q.device, q.static) == (("s0", "3", "16"), "f32", "cpu", False)
    # q, k and v are views of one result: 4 bytes x 3 rows x 48 columns each.
    assert (q.bytes.expression, q.storage.expression) == ("192*s0", "576*s0")
    assert (first.bytes_out.traced, first.bytes_out.at) == (4 * 576, ((8, 8 * 576),))
    names = {value.source: value.static for value in first.inputs if value.source}
    assert names["layers.0.qkv.weight"] is True
    assert names["x"] is False
    assert [p.same_as for p in found.pieces] == [p.same_as for p in found.split.pieces]
    (size,) = found.symbols
    assert (size.name, size.source, size.traced) == ("s0", "x.size()[0]", 4)
    totals = found.totals
    assert (totals.pieces, totals.captured, totals.eager, totals.distinct) == (5, 3, 2, 4)
    weights = sum(p.numel() * 4 for p in Decoder().parameters())
    assert (totals.static.traced, totals.crossing.traced) == (weights, sum_of(found))


def sum_of(found: cgcompile.Explanation) -> int:
    return sum(piece.bytes_out.traced for piece in found.pieces)


def test_bytes_are_those_of_real_tensors() -> None:
    sizes: list[int] = []

    def watched(gm, given):
        def run(*values):
            made = gm(*values)
            tensors = [each for each in made if isinstance(each, torch.Tensor)]
            memory = {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors}
            sizes.append(sum(each.nbytes() for each in memory.values()))
            return made

        return run

    model = cgcompile.compile(Decoder(), compiler=watched, dynamic_dims={"x": 0}, cache_dir="off")
    found = explain(model, inputs(), sizes=[6])
    with torch.no_grad():
        model(inputs(6))
    captured = [piece.bytes_out.at for piece in found.pieces if piece.captured]
    assert captured == [((6, size),) for size in sizes]


MODELS = {
    "decoder": (Decoder, lambda: (inputs(),), {"x": 0}),
    "one_row": (Decoder, lambda: (inputs(1),), {"x": 0}),
    "static": (Decoder, lambda: (inputs(),), {}),
    "reads": (Reads, lambda: (inputs(), torch.ones(4)), {"x": 0}),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shapes", ["backed_size_oblivious", "unbacked"])
def test_it_is_the_split_that_compiling_makes(name: str, shapes: str) -> None:
    make, given, dims = MODELS[name]
    torch.manual_seed(0)
    model, args = make(), given()
    compiled = cgcompile.compile(
        model, compiler="eager", dynamic_dims=dims, dynamic_shapes=shapes, cache_dir="off"
    )
    found = explain(compiled, *args)
    assert compiled.traces == ()
    with torch.no_grad():
        compiled(*args)
    assert found.split.text() == compiled.backend.graphs[-1].split.text()
    again = explain(model, *args, config=compiled.backend, dynamic_dims=dims, dynamic_shapes=shapes)
    assert again == found


def test_settings_of_a_model_of_torch_compile() -> None:
    model = torch.compile(Decoder(), backend="cgcompile", options={"builtin_splitting_ops": False})
    found = explain(model, inputs())
    assert [piece.captured for piece in found.pieces] == [True]


def test_every_boundary_reason_has_a_name_and_a_line() -> None:
    cases.library()
    seen = set()
    for name in ("sdpa", "op_packet", "host_sync"):
        case = cases.CASES.get(name)
        if case is None:
            continue
        given = case.inputs(case.sizes[0])
        for piece in explain(case.build().eval(), *given, config=case.settings).pieces:
            seen.update(why.reason for why in piece.why)
            assert piece.captured == (not piece.why)
            assert piece.source
    assert {"splitting_op"} <= seen


# ------------------------------------------------------------------ without memory, without devices


def test_a_model_that_fits_nowhere() -> None:
    model = meta(lambda: Decoder(8, 1 << 17))
    weights = sum(each.nbytes for each in model.parameters())
    assert weights > 1 << 40  # a TiB
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = explain(model, inputs(device="meta", width=1 << 17), dynamic_dims={"x": 0})
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert found.totals.static.traced == weights
    assert (found.totals.captured, found.totals.eager) == (9, 8)
    assert grown < 200 * 1024  # KiB
    assert found.device == "meta"


@pytest.mark.parametrize("there", ["meta", "fake", "cpu"])
@pytest.mark.parametrize("given", ["meta", "fake", "cpu"])
def test_weights_and_arguments_may_be_anywhere(there: str, given: str) -> None:
    mode = FakeTensorMode()
    x = inputs(device="meta" if given == "meta" else "cpu")
    if there == "fake":
        with mode:
            model = Decoder()
    else:
        model = meta(Decoder) if there == "meta" else Decoder()
    if given == "fake":
        x = mode.from_tensor(x)
    found = explain(model, x, dynamic_dims={"x": 0})
    reasons = {why.reason for piece in found.pieces for why in piece.why}
    assert reasons == {"splitting_op"}
    assert found.device == ("meta" if there == "meta" else "cpu")
    same = explain(Decoder(), inputs(), dynamic_dims={"x": 0})
    assert [(p.captured, p.num_ops, p.bytes_out) for p in found.pieces] == [
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
    assert [why.reason for piece in kept.pieces for why in piece.why] == ["device_copy"]
    assert "meta tensors stand for" in "".join(kept.notes)


# ------------------------------------------------------------------ nothing is left


def test_nothing_is_run_and_nothing_is_left() -> None:
    model, x = Decoder(), inputs()
    torch._dynamo.mark_dynamic(x, 1)
    tensors = [x, *model.parameters()]

    def state() -> Any:
        names = {name for name in globals() if name.startswith("__")}
        config = torch._dynamo.config.save_config_portable()
        return names, [dict(each.__dict__) for each in tensors], config, torch.get_rng_state().sum()

    branches, other = Branches(), inputs()
    before, parts = state(), {name: dict(vars(each)) for name, each in model.named_modules()}
    explain(model, x, dynamic_dims={"x": 0})
    explain(branches, other)
    assert state() == before
    assert {name: dict(vars(each)) for name, each in model.named_modules()} == parts
    backend = cgcompile.Backend(compiler="eager", cache_dir="off")
    with torch.no_grad():
        compiled = torch.compile(model, backend=backend)
        torch.testing.assert_close(compiled(x), model(x))
    assert backend.num_compilations == 1


def test_a_model_that_raises_is_not_called() -> None:
    CALLS.clear()
    found = explain(Raises(), inputs())
    assert CALLS == []
    (broken,) = found.breaks
    assert "The model raises" in broken.fix


# ------------------------------------------------------------------ graph breaks


def test_a_graph_break_is_told_with_its_line_and_a_fix() -> None:
    found = explain(Branches(), inputs())
    assert not found.traced
    assert (found.pieces, found.totals, found.split) == ((), None, None)
    (broken,) = found.breaks
    assert (broken.door, broken.what) == ("cgcompile.compile", "Data-dependent branching")
    assert broken.source.code == "if y.sum() > 0:"
    assert "splitting='breakable'" in broken.fix
    text = str(found)
    assert "if y.sum() > 0:" in text
    assert max(map(len, text.splitlines())) <= 100


def test_what_breaks_under_torch_compile_alone() -> None:
    found = explain(Reads(), inputs(), torch.ones(4))
    assert found.traced
    assert "host_sync" in [why.reason for piece in found.pieces for why in piece.why]
    (broken,) = found.breaks
    assert broken.door == "torch.compile"
    assert broken.source.code == "return y * 2, lengths.max().item()"
    assert "capture_scalar_outputs" in broken.fix
    torch._dynamo.reset()
    backend = cgcompile.Backend(compiler="eager", cache_dir="off")
    with torch.no_grad():
        torch.compile(Reads(), backend=backend)(inputs(), torch.ones(4))
    assert backend.graphs[0].split.graph_break is not None


# ------------------------------------------------------------------ modes


def with_support(support: AttentionCGSupport, **more: Any) -> CompilationConfig:
    op = SplittingOp(F.scaled_dot_product_attention, support=support)
    return CompilationConfig(splitting_ops=(op,), **more)


@pytest.mark.parametrize("support", AttentionCGSupport)
@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE", "PIECEWISE", "FULL_DECODE_ONLY"])
def test_the_mode_is_the_one_of_the_dispatcher(support: AttentionCGSupport, mode: str) -> None:
    asked = cgcompile.CUDAGraphMode[mode]
    found = explain(Decoder(1), inputs(), config=with_support(support, cudagraph_mode=mode)).modes
    dispatcher = cgcompile.CudagraphDispatcher(asked, [1, 2], max_num_reqs=2, support=support)
    assert (found.asked, found.result) == (mode, dispatcher.mode.name)
    assert [why.reason for why in found.lost] == [w.reason.value for w in dispatcher.degraded]
    assert found.support == support.name
    if found.lost:
        assert "scaled_dot_product_attention" in found.lost[0].detail


def test_the_mode_without_a_context_is_the_one_of_the_entry() -> None:
    for support in (AttentionCGSupport.ALWAYS, AttentionCGSupport.NEVER):
        config = with_support(support, compiler="eager", capture_device="host", num_warmups=0)
        model = cgcompile.compile(Decoder(1), config)
        told = explain(model, inputs()).modes.without_context
        with torch.inference_mode():
            model(inputs())
        (recording,) = model.backend.graphs[0].recordings
        assert told == recording.batch.mode.name


def test_modes_without_pieces() -> None:
    stock = CompilationConfig(mode="STOCK_TORCH_COMPILE", cudagraph_mode="FULL")
    found = explain(Decoder(1), inputs(), config=stock)
    assert ([piece.captured for piece in found.pieces], found.modes.result) == ([True], "FULL")
    none = explain(Decoder(1), inputs(), config={"cudagraph_mode": "NONE"})
    assert (none.modes.result, none.modes.lost) == ("NONE", ())


# ------------------------------------------------------------------ settings


def test_where_settings_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGCOMPILE_NUM_WARMUPS", "3")
    by_name = {each.name: each for each in explain(Decoder(1), inputs()).settings}
    assert (by_name["num_warmups"].value, by_name["num_warmups"].origin) == (3, "environment")
    assert by_name["strict"].origin == "default"
    found = explain(Decoder(1), inputs(), config={"strict": "1", "num_warmups": 2})
    by_name = {each.name: each for each in found.settings}
    assert by_name["strict"][1:] == (True, "options")
    assert by_name["num_warmups"][1:] == (2, "options")
    given = CompilationConfig(strict=True, splitting_ops=(F.softmax,))
    by_name = {each.name: each for each in explain(Decoder(1), inputs(), config=given).settings}
    assert by_name["strict"][1:] == (True, "config")
    assert by_name["splitting_ops"][1:] == (("softmax",), "config")
    assert by_name["num_warmups"].origin == "environment"
    assert sorted(by_name) == sorted(CompilationConfig.names())


def test_sizes_that_compiling_would_refuse() -> None:
    class Halves(nn.Module):
        def forward(self, x):
            return x.view(2, -1).sin()

    sizes = {"cudagraph_capture_sizes": (4, 5)}
    found = explain(Halves(), torch.randn(4, 5), config=sizes, dynamic_dims={"x": 0})
    (note,) = [each for each in found.notes if "SymbolError" in each]
    assert "5" in note
    assert dict(found.totals.crossing.at)[4] == 80
    assert dict(found.totals.crossing.at)[5] is None
    assert found.symbols[0].guards


def test_breakable_says_what_it_cannot_tell() -> None:
    found = explain(Decoder(1), inputs(), config={"splitting": "breakable"})
    assert not found.traced
    assert found.breaks == ()
    notes = " ".join(found.notes)
    assert "traces nothing" in notes
    assert "torch.nn.functional.scaled_dot_product_attention" in notes


# ------------------------------------------------------------------ as data


def schema(value: Any) -> Any:
    """The shape of plain data: names and types."""
    if isinstance(value, dict):
        return {name: schema(each) for name, each in value.items()}
    if isinstance(value, list):
        return [schema(value[0])] if value else []
    return type(value).__name__


def lines_of(found: Any, indent: str = "") -> list[str]:
    rows = []
    for name, each in found.items():
        inner = each[0] if isinstance(each, list) and each else each
        rows.append(f"{indent}{name}: {inner if isinstance(inner, str) else type(each).__name__}")
        rows += lines_of(inner, indent + "  ") if isinstance(inner, dict) else []
    return rows


def test_bad_calls() -> None:
    with pytest.raises(ConfigError, match="dynamic_shapes"):
        explain(Decoder(), inputs(), dynamic_shapes="some")
    with pytest.raises(ConfigError, match="no parameter"):
        explain(Decoder(), inputs(), dynamic_dims={"y": 0})
    with pytest.raises(ConfigError):
        explain(Decoder, inputs())
    with pytest.raises(TraceError):
        explain(Decoder(), inputs(), dynamic_dims={"x": 7})
    with pytest.raises(TypeError):
        explain(Decoder(), inputs(), inputs())
