"""explain(): the split that compiling would make, told without running, compiling or keeping it."""

import re
import resource
from collections import Counter
from typing import Any

import lib.cases
import lib.debug
import pytest
import torch
from expecttest import assert_expected_inline
from lib.asserts import build, mark, split_texts
from lib.debug import CALLS, Branches, D, Decoder, Raises, Reads, inputs, meta, shown
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import cgcompile
from cgcompile import Reason, explain

# ------------------------------------------------------------------ what is told


def test_the_table() -> None:
    found = explain(meta(lambda: Decoder(4)), inputs(), dynamic_dims={"x": 0}, sizes=[8, 1])
    assert_expected_inline(
        shown(str(found)),
        """\
Decoder: 9 pieces: 5 captured, 4 eager; 4 distinct, 3 to compile; 32 ops
bytes 3840*s0 B (15.0 KiB as traced, 8: 30.0 KiB, 1: 3.8 KiB) cross
      17408 B (17.0 KiB) static
size  1 <= s0, s0 = x.size()[0], traced with 4
mode  FULL_AND_PIECEWISE; without a forward context FULL; boundaries allow FULL graphs: ALWAYS
piece    kind      ops  same as  bytes out  where, why
piece_0  captured  5    -        576*s0     debug.py:N in forward: q, k, v = self.qkv(x).chunk(3...
piece_1  eager     1    -        192*s0     debug.py:N in forward: return x + self.out(F.scaled_...
          splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
piece_2  captured  7    -        768*s0     debug.py:N in forward: return x + self.out(F.scaled_...
piece_3 .. piece_6  the same 2 pieces 2 times more
piece_7  eager     1    piece_1  192*s0     debug.py:N in forward: return x + self.out(F.scaled_...
piece_8  captured  2    -        192*s0     debug.py:N in forward: return x + self.out(F.scaled_...
set   cache_dir = 'off' (environment)
note  meta tensors stand for tensors of the device that captures""",
    )
    assert max(map(len, str(found).splitlines())) <= 100


def test_a_piece_and_its_values() -> None:
    found = explain(Decoder(), inputs(), dynamic_dims={"x": 0}, sizes=[8])
    first, attention, *_ = found.pieces
    assert (first.captured, attention.captured) == (True, False)
    (why,) = attention.why
    assert why.reason is Reason.SPLITTING_OP
    assert "scaled_dot_product_attention" in why.detail
    assert attention.support == "ALWAYS"
    (line,) = attention.source
    assert re.fullmatch(r"debug\.py:\d+ in forward", line.where)
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


def sum_of(found: cgcompile.debug.Explanation) -> int:
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
    "one_row": (Decoder, lambda: (inputs(1),), {"x": 0}, "backed_size_oblivious"),
    "unbacked": (Decoder, lambda: (inputs(),), {"x": 0}, "unbacked"),
    "static": (Decoder, lambda: (inputs(),), {}, "backed"),
    "reads": (Reads, lambda: (inputs(), torch.ones(4)), {"x": 0}, "backed"),
}


@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_split_that_compiling_makes(name: str) -> None:
    make, given, dims, shapes = MODELS[name]
    model, args = make(), given()
    how = {"dynamic_dims": dims, "dynamic_shapes": shapes}
    compiled = cgcompile.compile(model, compiler="eager", **how)
    found = explain(compiled, *args)
    assert compiled.traces == ()
    with torch.no_grad():
        compiled(*args)
    assert found.split.text() == compiled.backend.graphs[-1].split.text()
    assert explain(model, *args, config=compiled.backend, **how) == found


CASE_REASONS = {
    "op_packet": {"splitting_op"},
    "eager_region": {"eager_region"},
    "cond": {"host_sync"},
    "mask_assigns_values": {"host_sync", "unbacked_size"},
    "only_views": {"no_kernel"},
    "view_mutated_in_another_piece": {"splitting_op"},
}


@pytest.mark.parametrize("name", CASE_REASONS)
def test_it_is_the_split_of_torch_compile(name: str) -> None:
    case = lib.cases.CASES[name]
    given = case.inputs(case.sizes[0])
    mark(case, given)
    found = explain(build(case), *given, config=case.settings)
    assert found.split.text(lines=False) == split_texts(case)
    assert {why.reason.value for piece in found.pieces for why in piece.why} == CASE_REASONS[name]
    for piece in found.pieces:
        assert piece.captured == (not piece.why)
        assert piece.source


def test_settings_of_a_model_of_torch_compile() -> None:
    model = torch.compile(Decoder(), backend="cgcompile", options={"builtin_splitting_ops": False})
    found = explain(model, inputs())
    assert [piece.captured for piece in found.pieces] == [True]


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
    reasons = {why.reason.value for piece in found.pieces for why in piece.why}
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
    assert [why.reason.value for piece in kept.pieces for why in piece.why] == ["device_copy"]
    assert "meta tensors stand for" in "".join(kept.notes)


# ------------------------------------------------------------------ nothing is left


def test_nothing_is_run_and_nothing_is_left() -> None:
    model, x = Decoder(), inputs()
    torch._dynamo.mark_dynamic(x, 1)
    tensors = [x, *model.parameters()]

    def state() -> Any:
        names = {name for name in vars(lib.debug) if name.startswith("__")}
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


def test_a_model_that_raises_is_not_called() -> None:
    CALLS.clear()
    found = explain(Raises(), inputs())
    assert CALLS == []
    (broken,) = found.breaks
    assert "The model raises" in broken.fix
