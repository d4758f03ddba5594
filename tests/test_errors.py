"""Every message, as a user sees it. To accept a change: ``EXPECTTEST_ACCEPT=1``."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
from expecttest import TestCase

from cgcompile import errors
from cgcompile.encoder.packing import Capacity
from cgcompile.errors import (
    AddressChangedError,
    AgreementError,
    ArgumentsError,
    BatchError,
    BoundaryError,
    CaptureBusyError,
    CaptureError,
    CGCompileError,
    CommandError,
    ConfigError,
    DispatchError,
    EncoderError,
    EncoderShardError,
    ForwardContextError,
    GradientError,
    HostValueChangedError,
    InputBufferError,
    ManagerError,
    PassError,
    PieceCompileError,
    RecompileError,
    SizesError,
    SymbolError,
    Template,
    TraceError,
    WeightsError,
)

ROOT = Path(__file__).resolve().parents[1]
KNOWN = ("compiler", "splitting_ops")

EXAMPLES: dict[str, CGCompileError] = {
    "ConfigError.unknown_setting": ConfigError.unknown_setting(
        name="compilr", where="options", known=KNOWN
    ),
    "ConfigError.bad_value": ConfigError.bad_value(
        name="compiler", where="options", value="gcc", expected="a compiler"
    ),
    "ConfigError.backend_class": ConfigError.backend_class(),
    "ConfigError.no_mapping": ConfigError.no_mapping(name="options", value=3, is_config=True),
    "ConfigError.impossible": ConfigError.impossible(what="X", because="of Y", instead="Use Z."),
    "ConfigError.unknown_torch_mode": ConfigError.unknown_torch_mode(
        mode="reduce", known=("default",)
    ),
    "ConfigError.settings_are_fixed": ConfigError.settings_are_fixed(),
    "ConfigError.not_compiled_here": ConfigError.not_compiled_here(
        found="Linear", knows_handle=False
    ),
    "ConfigError.captures_nothing": ConfigError.captures_nothing(
        function="coverage", found="Attention"
    ),
    "ConfigError.unknown_inductor_option": ConfigError.unknown_inductor_option(
        name="max_autotun", known=("max_autotune",)
    ),
    "ConfigError.trace_once_needs_guards_dropped": ConfigError.trace_once_needs_guards_dropped(),
    "ConfigError.padded_away": ConfigError.padded_away(size=6, padded=8),
    "ConfigError.unknown_pass": ConfigError.unknown_pass(
        name="eliminate_noop", known=("eliminate_noops",)
    ),
    "ConfigError.needed_pass": ConfigError.needed_pass(
        name="bind_symbols", known=("eliminate_noops",)
    ),
    "ConfigError.which_dimension": ConfigError.which_dimension(dims=["x.size()[0]", "y.size()[0]"]),
    "ConfigError.sizes_of_which": ConfigError.sizes_of_which(dims=["x.size()[0]", "y.size()[0]"]),
    "BatchError.descriptor_field": BatchError.descriptor_field(
        name="num_reqs", value=0, expected="a whole number"
    ),
    "BatchError.descriptor_not_uniform": BatchError.descriptor_not_uniform(
        num_tokens=7, num_reqs=2
    ),
    "ForwardContextError.missing": ForwardContextError.missing(),
    "ForwardContextError.traced": ForwardContextError.traced(what="get_forward_context()"),
    "ForwardContextError.runtime_mode": ForwardContextError.runtime_mode(found="FULL_DECODE_ONLY"),
    "ForwardContextError.near_miss": ForwardContextError.near_miss(
        name="cudagraph_mode", meant="cudagraph_runtime_mode"
    ),
    "ForwardContextError.batch_descriptor": ForwardContextError.batch_descriptor(found=8),
    "ForwardContextError.no_context": ForwardContextError.no_context(found=3),
    "ForwardContextError.unpadded": ForwardContextError.unpadded(found=-1, most=8),
    "ForwardContextError.not_entered": ForwardContextError.not_entered(),
    "BoundaryError.unknown": BoundaryError.unknown(name="ns::atend", known=["ns::attend"]),
    "BoundaryError.not_an_op": BoundaryError.not_an_op(found=3),
    "BoundaryError.target_or_predicate": BoundaryError.target_or_predicate(),
    "BoundaryError.bad_support": BoundaryError.bad_support(name="ns::attend", found="ALWAYS"),
    "BoundaryError.bad_impl": BoundaryError.bad_impl(name="ns::attend", found=3),
    "BoundaryError.predicate_raised": BoundaryError.predicate_raised(
        name="mine", node="add", error=KeyError("x")
    ),
    "BoundaryError.declared_twice": BoundaryError.declared_twice(name="ns::attend"),
    "BatchError.field": BatchError.field(name="num_tokens", value=-1, expected="at least 0"),
    "BatchError.not_uniform": BatchError.not_uniform(num_tokens=7, num_reqs=3, max_query_len=None),
    "BatchError.which_query_len": BatchError.which_query_len(num_tokens=12, known=(1, 3)),
    "BatchError.axes": BatchError.axes(extra=(3,), names=["max_seqlen", "kernel"]),
    "BatchError.not_planned": BatchError.not_planned(mode="FULL", descriptor="num_tokens=7"),
    "BatchError.lengths_differ": BatchError.lengths_differ(lengths=3, flags=2),
    "CommandError.target_form": CommandError.target_form(target="model.py"),
    "CommandError.no_module": CommandError.no_module(name="mine", why="No module named 'mine'"),
    "CommandError.no_function": CommandError.no_function(
        module="model.py", name="mak", known=("make", "run")
    ),
    "CommandError.takes_arguments": CommandError.takes_arguments(
        target="model.py:run", signature="(x, *, scale)"
    ),
    "CommandError.bad_result": CommandError.bad_result(
        target="model.py:make", found="a tuple of 4"
    ),
    "CommandError.no_inputs": CommandError.no_inputs(target="model.py:make", command="verify"),
    "CommandError.bad_setting": CommandError.bad_setting(given="compiler"),
    "CommandError.bad_splitting_ops": CommandError.bad_splitting_ops(
        why="splitting op 'x': unknown."
    ),
    "CommandError.no_page": CommandError.no_page(path="/page.html", why="Permission denied"),
    "CommandError.settings_are_fixed": CommandError.settings_are_fixed(target="model.py:make"),
    "CommandError.unknown_entry": CommandError.unknown_entry(
        prefix="77", folder="/home/me/.cache/cgcompile"
    ),
    "CommandError.ambiguous_entry": CommandError.ambiguous_entry(prefix="7", keys=["7a00", "7b00"]),
    "CommandError.caching_is_off": CommandError.caching_is_off(),
    "EncoderError.budget_number": EncoderError.budget_number(name="max_items", found=0, least=1),
    "EncoderError.not_a_budget": EncoderError.not_a_budget(found=True),
    "EncoderError.no_budgets": EncoderError.no_budgets(),
    "EncoderError.budget_range": EncoderError.budget_range(found=(0, 64)),
    "EncoderError.range_order": EncoderError.range_order(least=200, most=100),
    "EncoderError.path_above_range": EncoderError.path_above_range(
        path="global", least=272, most=256
    ),
    "EncoderError.items_above_range": EncoderError.items_above_range(max_items=256, most=128),
    "EncoderError.items_above_budget": EncoderError.items_above_budget(max_items=256, budget=64),
    "EncoderError.ratio": EncoderError.ratio(found=1),
    "EncoderError.nothing_observed": EncoderError.nothing_observed(),
    "EncoderError.no_method": EncoderError.no_method(
        model="Tower", method="get_encoder_cudagraph_config"
    ),
    "EncoderError.older_protocol": EncoderError.older_protocol(
        model="Tower", found=["get_encoder_cudagraph_num_items"]
    ),
    "EncoderError.no_range": EncoderError.no_range(model="Tower"),
    "EncoderError.returned": EncoderError.returned(
        method="encoder_cudagraph_forward",
        found="[60, 8]",
        expected="tensors of at least 64 rows each",
    ),
    "EncoderError.modality": EncoderError.modality(
        keys=["ids"], found=[], known=["image", "video"]
    ),
    "EncoderError.nothing_to_run_on": EncoderError.nothing_to_run_on(key="max_seqlen"),
    "EncoderError.columns": EncoderError.columns(
        method="encoder_cudagraph_forward", found=[8, 16], expected=999
    ),
    "EncoderError.no_keyword": EncoderError.no_keyword(
        method="Tower.encoder_cudagraph_forward", keyword="path", why="paths global, local"
    ),
    "EncoderError.no_buffer": EncoderError.no_buffer(key="positon", known=["x", "position"]),
    "EncoderError.item_number": EncoderError.item_number(name="output_tokens", found=-1),
    "EncoderError.unknown_path": EncoderError.unknown_path(
        item=2, path="lokal", known=["global", "local"]
    ),
    "EncoderError.no_path": EncoderError.no_path(item=2, tokens=7, known=["global", "local"]),
    "EncoderError.no_axis": EncoderError.no_axis(item=2, axis="tier", known=[]),
    "EncoderError.not_a_call": EncoderError.not_a_call(found="list"),
    "EncoderError.no_input": EncoderError.no_input(
        name="image_grid_thw", known=["pixel_values", "image_grid"]
    ),
    "EncoderError.rows": EncoderError.rows(name="pixel_values", found=[1.0]),
    "EncoderError.grid": EncoderError.grid(name="image_grid_thw", item=1, found=(1, 3, 3), merge=2),
    "EncoderError.patches": EncoderError.patches(
        name="pixel_values", found=9, grid="image_grid_thw", expected=16
    ),
    "EncoderError.no_value": EncoderError.no_value(where="replay", key="cu_seqlens", known=["x"]),
    "EncoderError.unknown_buffer": EncoderError.unknown_buffer(
        where="replay", key="cu_seqlen", known=["cu_seqlens"]
    ),
    "EncoderError.buffer_value": EncoderError.buffer_value(
        key="x", found="[9, 3]", expected="at most the rows of [8, 3]"
    ),
    "EncoderError.buffer_layout": EncoderError.buffer_layout(
        key="x", found="[9, 2] of float32", expected="at most the rows of [16, 3] of float32"
    ),
    "EncoderError.no_offset_room": EncoderError.no_offset_room(key="cu_seqlens", entries=9),
    "EncoderError.no_offset_end": EncoderError.no_offset_end(key="cu_seqlens", last=0),
    "EncoderError.padding_failed": EncoderError.padding_failed(
        key="x", found="[3]", room="[4]", error="RuntimeError: no"
    ),
    "EncoderError.buffer_moved": EncoderError.buffer_moved(key="x", found="[3]", room="[4]"),
    "EncoderShardError.no_group": EncoderShardError.no_group(),
    "EncoderShardError.structure": EncoderShardError.structure(rank=1),
    "EncoderShardError.failed": EncoderShardError.failed(rank=0, shares="rank 1: ValueError: no"),
    "EncoderError.item_need": EncoderError.item_need(item=3, tokens=(-1,), frames=1),
    "EncoderError.item_paths": EncoderError.item_paths(item=3, found=1, paths=2),
    "EncoderError.capacity": EncoderError.capacity(capacity=Capacity(((128, 64),), 8, None)),
    "EncoderError.cost": EncoderError.cost(name="fixed", found=-1),
    "PassError.changed_output": PassError.changed_output(
        name="half",
        graph="piece_0",
        place=0,
        found="f64[s0, 16] on cpu",
        expected="f32[s0, 16] on cpu",
    ),
    "PassError.invalid": PassError.invalid(name="mine", problem="it has 2 outputs, expected 1"),
    "PassError.raised": PassError.raised(name="mine", error=KeyError("x")),
    "PassError.not_a_pass": PassError.not_a_pass(found=3),
    "SymbolError.free": SymbolError.free(value="rows", symbols=["u0"], where="piece_2"),
    "SymbolError.specialised": SymbolError.specialised(
        dim="x.size()[0]", size="8", where="piece_0 (m.py:4)"
    ),
    "SymbolError.size_refused": SymbolError.size_refused(
        setting="cudagraph_capture_sizes",
        size=6,
        dim="s0 = x.size()[0]",
        guard="Eq(Mod(s0, 4), 0)",
        where=" (m.py:4)",
    ),
    "PieceCompileError.raised": PieceCompileError.raised(
        piece="piece_0", compiler="inductor", where="m.py:4 in forward", error=ValueError("no")
    ),
    "PieceCompileError.not_traced": PieceCompileError.not_traced(
        piece="piece_0, size 8", where="m.py:4 in forward", error=ValueError("no")
    ),
    "PieceCompileError.bad_outputs": PieceCompileError.bad_outputs(
        piece="piece_0", compiler="mine", expected=2, found="no list"
    ),
    "GradientError.of_a_capture": GradientError.of_a_capture(what="Decoder"),
    "GradientError.recomputes": GradientError.recomputes(),
    "CaptureError.refused": CaptureError.refused(op="aten._local_scalar_dense.default"),
    "CaptureError.nested": CaptureError.nested(what="capture of piece_0"),
    "CaptureError.no_segment": CaptureError.no_segment(what="add_eager()"),
    "CaptureError.no_device": CaptureError.no_device(found="cuda"),
    "CaptureError.no_ranges": CaptureError.no_ranges(found="NVTX functions not installed."),
    "CaptureError.twice": CaptureError.twice(what="CudaGraph", advice="Call reset() first."),
    "CaptureError.rebinds": CaptureError.rebinds(
        what="step", field="self.buf", before="a tensor (2,)", after="None"
    ),
    "CaptureError.empty": CaptureError.empty(),
    "CaptureError.freed_input": CaptureError.freed_input(
        what="aten.mm.default", shape="(2, 3) torch.float32"
    ),
    "CaptureError.pageable": CaptureError.pageable(
        op="aten.lift_fresh.default", shape="(2,) torch.int64"
    ),
    "CaptureError.replaces_memory": CaptureError.replaces_memory(
        what="step", name="'weight' (and 1 more)"
    ),
    "CaptureError.replaces_argument": CaptureError.replaces_argument(
        op="aten.set_.source_Tensor", shape="(2,) torch.float32"
    ),
    "CaptureError.seeded": CaptureError.seeded(op="torch.manual_seed", before=1, after=2),
    "CaptureError.ended_recording": CaptureError.ended_recording(op="aten.mul.Tensor"),
    "CaptureError.break_in_backward": CaptureError.break_in_backward(name="attend"),
    "CaptureError.opaque_result": CaptureError.opaque_result(name="attend", found="a Cache object"),
    "CaptureError.under_transform": CaptureError.under_transform(name="attend", transform="Vmap"),
    "CaptureError.math_attention": CaptureError.math_attention(),
    "CaptureError.no_breaks": CaptureError.no_breaks(what="Decoder", names="ns::attend"),
    "CaptureError.inside_full": CaptureError.inside_full(
        op="ns::attend", support="NEVER", batch="num_tokens=8"
    ),
    "CaptureError.unjoined_stream": CaptureError.unjoined_stream(),
    "CaptureError.swallowed": CaptureError.swallowed(
        what="Decoder", name="attend", error=KeyError("x")
    ),
    "CaptureError.open_break": CaptureError.open_break(what="step"),
    "CaptureError.other_thread": CaptureError.other_thread(name="attend", what="Decoder"),
    "CaptureError.escaped": CaptureError.escaped(op="aten.mm.default", name="attend"),
    "CaptureError.writes_a_copy": CaptureError.writes_a_copy(
        op="aten.add_.Tensor", name="get_cache"
    ),
    "CaptureError.mode_in_between": CaptureError.mode_in_between(found="FlopCounterMode"),
    "CaptureError.release_inside": CaptureError.release_inside(),
    "CaptureError.mutates_arguments": CaptureError.mutates_arguments(name="attend"),
    "CaptureError.stale_copy": CaptureError.stale_copy(name="get_cache"),
    "CaptureError.reentered": CaptureError.reentered(),
    "CaptureError.region_inside": CaptureError.region_inside(),
    "CaptureBusyError.busy": CaptureBusyError.busy(
        what="piece_1", running="piece_0", same_thread=True
    ),
    "DispatchError.no_descriptor": DispatchError.no_descriptor(what="Linear", mode="FULL"),
    "DispatchError.bad_mode": DispatchError.bad_mode(where="CUDAGraphWrapper", mode="NONE"),
    "DispatchError.cannot_copy": DispatchError.cannot_copy(what="Decoder"),
    "DispatchError.other_breaks": DispatchError.other_breaks(
        what="Decoder", now=["attend"], before=[]
    ),
    "DispatchError.nothing_verified": DispatchError.nothing_verified(why="warming: call 1 of 1"),
    "DispatchError.no_such_rows": DispatchError.no_such_rows(
        batch="num_tokens=16", rows=16, shapes=["[8, 4]", "[8]"]
    ),
    "DispatchError.strict": DispatchError.strict(
        what="the step", reason="host_sync", detail="item() reads a tensor"
    ),
    "WeightsError.unknown": WeightsError.unknown(name="up.wieght", known=("up.weight",)),
    "WeightsError.shape": WeightsError.shape(name="up.weight", found="(4, 2)", expected="(2, 4)"),
    "AddressChangedError.moved": AddressChangedError.moved(
        what="piece_2", batch="num_tokens=64", path="input 0 'out_1'", now=0x7F3A80, before=0x7F3A00
    ),
    "AddressChangedError.moved_in_wrapper": AddressChangedError.moved_in_wrapper(
        what="step", batch="num_tokens=64", path="input 0", now=0x7F3A80, before=0x7F3A00
    ),
    "AddressChangedError.grown": AddressChangedError.grown(now=0x7F3A80, before=0x7F3A00),
    "AddressChangedError.metadata": AddressChangedError.metadata(
        batch="num_tokens=8, num_reqs=8",
        path="attn_metadata.seq_lens",
        now=0x7F3A80,
        before=0x7F3A00,
    ),
    "AddressChangedError.weight": AddressChangedError.weight(
        what="step", batch="num_tokens=64", path="up.weight"
    ),
    "HostValueChangedError.other_arguments": HostValueChangedError.other_arguments(
        what="step",
        batch="num_tokens=64",
        now="0 arguments by position",
        before="1 arguments by position",
    ),
    "HostValueChangedError.changed": HostValueChangedError.changed(
        what="piece_2", batch="num_tokens=64", path="input 1", now=3, before=2
    ),
    "HostValueChangedError.cpu_scalar": HostValueChangedError.cpu_scalar(
        what="step", batch="num_tokens=64", path="model.scale", now=4.0, before=1.5
    ),
    "ConfigError.unknown_parameter": ConfigError.unknown_parameter(name="y", known=["self", "x"]),
    "ConfigError.not_compilable": ConfigError.not_compilable(
        found="the class Decoder", function="compile"
    ),
    "ConfigError.breakable_needs_no_trace": ConfigError.breakable_needs_no_trace(),
    "TraceError.refused": TraceError.refused(
        name="Decoder.forward", why="Unsupported: graph break\n  m.py:4 in forward"
    ),
    "TraceError.sizes_differ": TraceError.sizes_differ(
        name="tokens", one="x.shape[0] is 4", other="y.shape[0] is 5"
    ),
    "TraceError.no_such_dimension": TraceError.no_such_dimension(path="x", dim=2, shape="[4, 8]"),
    "TraceError.fixed": TraceError.fixed(name="Decoder.forward", dim="x.shape[0] is 8"),
    "TraceError.writes_globals": TraceError.writes_globals(name="step", names="count"),
    "ArgumentsError.refused": ArgumentsError.refused(
        name="Decoder.forward", signature="(x, scale=1.0)", why="missing a required argument: 'x'"
    ),
    "RecompileError.closed": RecompileError.closed(
        name="Decoder.forward", why="L['x'].size()[0] == 8"
    ),
    "RecompileError.dropped_guard": RecompileError.dropped_guard(
        name="Decoder.forward", guard="L['self'].scale == 2.0"
    ),
    "SizesError.number": SizesError.number(name="max_num_reqs", found=0, least=1),
    "SizesError.not_a_size": SizesError.not_a_size(found=True),
    "SizesError.empty": SizesError.empty(),
    "SizesError.above": SizesError.above(sizes=range(16, 176, 16), maximum=8),
    "SizesError.no_multiple": SizesError.no_multiple(multiple=6, maximum=4),
    "SizesError.bad_entry": SizesError.bad_entry(batch=0, steps=12),
    "SizesError.no_steps": SizesError.no_steps(),
    "SizesError.no_budget": SizesError.no_budget(),
    "SizesError.bytes_unknown": SizesError.bytes_unknown(nbytes=4096),
    "SizesError.bad_measure": SizesError.bad_measure(
        name="cost_of", size=8, found=None, expected="a finite number"
    ),
    "SizesError.too_few_bytes": SizesError.too_few_bytes(nbytes=4096, size=512, needed=8192),
    "SizesError.not_covered": SizesError.not_covered(batch=500, largest=496),
    "PieceCompileError.unlike_traced": PieceCompileError.unlike_traced(
        piece="piece_1",
        where="model.py:12 in forward",
        op="mylib::twice",
        found="f32[4, 8]",
        traced="f32[4, 16]",
    ),
    "PieceCompileError.not_callable": PieceCompileError.not_callable(
        piece="piece_0", compiler="mine", found=None
    ),
    "InputBufferError.shape": InputBufferError.shape(name="slots", shape=(3, 4)),
    "InputBufferError.tail": InputBufferError.tail(name="slots", tail=0.5, dtype="torch.int64"),
    "InputBufferError.dummy_value": InputBufferError.dummy_value(
        name="lens", found="tokens", dtype="torch.int32"
    ),
    "InputBufferError.twice": InputBufferError.twice(name="slots"),
    "InputBufferError.unknown": InputBufferError.unknown(name="slot", known=["positions", "slots"]),
    "InputBufferError.missing": InputBufferError.missing(name="positions"),
    "InputBufferError.value": InputBufferError.value(
        name="slots", expected="torch.int64 [3]", found="torch.int64 [4]", counts="tokens"
    ),
    "InputBufferError.too_large": InputBufferError.too_large(real=(9, 1), most=(8, 4)),
    "InputBufferError.gradients": InputBufferError.gradients(name="inputs_embeds"),
    "InputBufferError.not_padded": InputBufferError.not_padded(real=(4, 6), padded=(4, 4)),
    "AgreementError.tables": AgreementError.tables(ranks=[1, 3]),
    "AgreementError.differs": AgreementError.differs(
        rank=1, found="NONE, 0 tokens", first="FULL, 8 tokens"
    ),
    "AgreementError.no_group": AgreementError.no_group(),
    "AgreementError.backend": AgreementError.backend(found="nccl"),
    "AgreementError.missing": AgreementError.missing(
        rank=0,
        does="asks for the graph of a step",
        missing=[1, 3],
        said="Connection closed by peer",
    ),
    "AgreementError.gave_up": AgreementError.gave_up(rank=1),
    "AgreementError.out_of_step": AgreementError.out_of_step(
        rank=1, found="has captured a set of graphs", first="asks for the graph of a step"
    ),
    "AgreementError.other_dispatcher": AgreementError.other_dispatcher(),
    "ManagerError.no_graph": ManagerError.no_graph(num_tokens=5, captured=[1, 2, 4, 8]),
    "ManagerError.capture_mode": ManagerError.capture_mode(mode="NONE"),
    "ManagerError.other_thread": ManagerError.other_thread(method="run"),
    "ManagerError.twice": ManagerError.twice(mode="FULL", batch="num_tokens=4, num_reqs=4"),
    "ManagerError.no_metadata": ManagerError.no_metadata(batch="num_tokens=4, num_reqs=4"),
    "ManagerError.too_few_bytes": ManagerError.too_few_bytes(budget=2**20, needed=3 * 2**20),
    "ManagerError.no_replay": ManagerError.no_replay(batch="num_tokens=4, num_reqs=4"),
    "ManagerError.no_axis": ManagerError.no_axis(name="inputs_embeds"),
    "ManagerError.presence": ManagerError.presence(name="inputs_embeds", said=True),
    "ManagerError.rows": ManagerError.rows(found="rows"),
    "ManagerError.count": ManagerError.count(declared=1, found=2),
    "ManagerError.output": ManagerError.output(found="[8, 16]", rows="tokens", size=16),
    "ManagerError.other_outputs": ManagerError.other_outputs(),
}


def _classes() -> dict[str, type[CGCompileError]]:
    found = inspect.getmembers(errors, inspect.isclass)
    return {name: kind for name, kind in found if issubclass(kind, CGCompileError)}


def _constructors() -> dict[str, frozenset[str]]:
    """The fields of every template and every other constructor, by its full name."""
    found = {}
    for name, kind in _classes().items():
        for method, value in vars(kind).items():
            if isinstance(value, Template):
                found[f"{name}.{method}"] = value.fields
            elif isinstance(value, classmethod):
                parameters = inspect.signature(getattr(kind, method)).parameters
                found[f"{name}.{method}"] = frozenset(parameters)
    return found


def test_every_message_has_an_example() -> None:
    assert set(_constructors()) == set(EXAMPLES)


def _uses(tree: ast.Module) -> Iterator[tuple[str, ast.Call | None]]:
    """Each constructor that code names, and the call of it, if it is called right there."""
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in _classes():
            yield ast.unparse(node), calls.get(id(node))


def test_every_call_in_the_library_gives_the_fields_of_its_message() -> None:
    constructors, used = _constructors(), set()
    for path in (*ROOT.glob("cgcompile/**/*.py"), *ROOT.glob("passes/*.py")):
        for name, call in _uses(ast.parse(path.read_text())):
            assert name in constructors, f"{path}: {name}"
            assert call is not None, f"{path}: {name} must be called where it is named"
            where = f"{path}:{call.lineno} {name}"
            assert not call.args, f"{where}: give the fields by name"
            assert {keyword.arg for keyword in call.keywords} == constructors[name], where
            used.add(name)
    assert used == set(constructors), "a message that nothing raises"


class ExampleError(CGCompileError):
    op = ""
    one = Template("{op!r} took {size:#x}{known:close {op}}", "{names:list nothing}", sets=("op",))
    none = Template("plain {{}}")


def test_a_template_formats_and_sets() -> None:
    error = ExampleError.one(op="mul", size=16, known=("mull", "add"), names=())
    assert type(error) is ExampleError
    assert error.op == "mul"
    assert str(error) == "'mul' took 0x10 Did you mean 'mull'?\n  nothing"
    assert str(ExampleError.none()) == "plain {}"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"op": "mul", "size": 16, "known": ()},
        {"op": "mul", "size": 16, "known": (), "names": (), "other": 1},
    ],
)
def test_a_template_refuses_other_fields(fields: dict[str, object]) -> None:
    with pytest.raises(TypeError, match=r"ExampleError\.one\(\) takes known, names, op, size; it"):
        ExampleError.one(**fields)
    with pytest.raises(TypeError, match=r"takes no fields; it was given size"):
        ExampleError.none(size=1)
    with pytest.raises(TypeError, match="positional"):
        ExampleError.none("mul")


@pytest.mark.parametrize(
    ("text", "value", "expected"),
    [
        ("{x:shown}", "a" * 500, "'" + "a" * 399 + "..."),
        ("{x:type}", 3, "int"),
        ("{x:kind}", 3, "an int"),
        ("{x:a}", "Attention", "an Attention"),
        ("{x:a}", "NoneType", "None"),
        ("{x:error}", KeyError("k"), "KeyError: 'k'"),
        ("{x:address}", 255, "at 0xff"),
        ("{x:address}", None, "missing"),
        ("{x:count}", (1, 2), "2"),
        ("{x:list}", (1, 2), "1, 2"),
        ("{x:list}", (), "(none)"),
        ("{x:first 2}", (1, 2, 3), "1, 2 and 1 more"),
        ("{x:first 3}", (1, 2, 3), "1, 2, 3"),
        ("{x:plural rank}", (1,), "rank 1"),
        ("{x:plural rank}", (1, 2), "ranks 1, 2"),
        ("{x:if up to {x}|any}", 0, "up to 0"),
        ("{x:if up to {x}|any}", "a|b", "up to a|b"),
        ("{x:if up to {x}|any}", None, "any"),
        ("{x:if yes|no}", True, "yes"),
        ("{x:if yes|no}", False, "no"),
        ("{x:if yes|no}", (), "no"),
        ("{x[1]}", (1, 2), "2"),
    ],
)
def test_the_specs_of_templates(text: str, value: object, expected: str) -> None:
    error = Template(text).__get__(None, CGCompileError)(x=value)
    assert str(error) == expected


@pytest.mark.parametrize("name", EXAMPLES)
def test_errors_are_of_the_tree_and_ascii(name: str) -> None:
    error = EXAMPLES[name]
    assert isinstance(error, CGCompileError)
    assert isinstance(error, (ValueError, RuntimeError, TypeError))
    assert str(error).isascii()
    assert max(map(len, str(error).splitlines())) < 250


class Messages(TestCase):
    def check(self, kind: str, expected: str) -> None:
        texts = [f"{n}: {e}" for n, e in EXAMPLES.items() if n.startswith(kind + ".")]
        self.assertExpectedInline("\n".join(texts), expected, skip=1)

    def test_arguments(self) -> None:
        self.check(
            "ArgumentsError",
            """\
ArgumentsError.refused: Decoder.forward takes (x, scale=1.0), and cannot be called with these inputs: missing a required argument: 'x'.
  Give the inputs of one call of the model, as it takes them.""",
        )

    def test_trace(self) -> None:
        self.check(
            "TraceError",
            """\
TraceError.refused: Decoder.forward does not become one graph: Unsupported: graph break
  m.py:4 in forward
  Change that line, put it into an op of your own, or take torch.compile(model, backend='cgcompile'), which makes several graphs of it, or splitting='breakable', which needs no trace.
TraceError.sizes_differ: dynamic_dims: both are called 'tokens', but x.shape[0] is 4 and y.shape[0] is 5.
  Dimensions of one name have one size; give them two names, or none.
TraceError.no_such_dimension: dynamic_dims: x has no dimension 2; its shape is [4, 8].
  Name a dimension that it has in every call.
TraceError.fixed: Decoder.forward: x.shape[0] is 8, and the model fixes it to that, though it was to vary (dynamic_dims).
  Look for a comparison with a constant, or int() of the size; or leave the dimension out.
TraceError.writes_globals: step assigns to global names: count; a compiled call would not.
  Keep that state in an object, or take torch.compile(model, backend='cgcompile').""",
        )

    def test_recompile(self) -> None:
        self.check(
            "RecompileError",
            """\
RecompileError.closed: Decoder.forward is frozen, and this call would be traced again: L['x'].size()[0] == 8.
  Make such a call before freeze(), or mark what varies with dynamic_dims.
RecompileError.dropped_guard: Decoder.forward: a guard that was dropped does not hold, so the result would be wrong: L['self'].scale == 2.0
  Keep guards (guards='keep'), or do not change this between calls.""",
        )

    def test_config(self) -> None:
        self.check(
            "ConfigError",
            """\
ConfigError.unknown_setting: options: there is no setting 'compilr'. Did you mean 'compiler'?
  Settings: compiler, splitting_ops.
ConfigError.bad_value: options: compiler = 'gcc'; expected a compiler.
ConfigError.backend_class: backend=cgcompile.Backend is a class; expected one of its objects.
  Use backend=cgcompile.Backend() or backend='cgcompile'.
ConfigError.no_mapping: options is an int; expected a mapping.
  For a CompilationConfig: backend=cgcompile.Backend(config).
ConfigError.impossible: X is impossible: of Y.
  Use Z.
ConfigError.unknown_torch_mode: torch.compile(mode='reduce'): this mode is not known.
  Modes: default. cgcompile's own settings go into options={...}.
ConfigError.settings_are_fixed: settings beside a cgcompile.Backend object: the settings of the object are fixed.
  Give them to cgcompile.Backend(...), or use backend='cgcompile' with options.
ConfigError.not_compiled_here: cgcompile.runtime(): found a Linear; expected a module that torch.compile returned for this backend.
  For a function, keep the object of backend=cgcompile.Backend(...).
ConfigError.captures_nothing: cgcompile.coverage(): found an Attention, which captures nothing; expected a compiled model, its handle (a Backend), a wrapper or a manager.
  Compile the model first: cgcompile.compile(model), or torch.compile(model, backend='cgcompile'); of a function that torch.compile returned give the Backend object.
ConfigError.unknown_inductor_option: inductor_options: this torch has no Inductor setting 'max_autotun'. Did you mean 'max_autotune'?
  The names are those of torch._inductor.config.
ConfigError.trace_once_needs_guards_dropped: mode DYNAMO_TRACE_ONCE traces once and drops Dynamo's guards, but torch.compile gives a backend no say over guards.
  Use cgcompile.compile(model, mode='DYNAMO_TRACE_ONCE'), or drop them where torch.compile takes them: options={'mode': 'STOCK_TORCH_COMPILE', 'guard_filter_fn': torch.compiler.skip_all_guards_unsafe}.
ConfigError.padded_away: compile_sizes: no step ever has size 6: it is padded to 8, the next of cudagraph_capture_sizes.
  List 8 instead, or add 6 to cudagraph_capture_sizes.
ConfigError.unknown_pass: disabled_passes: no pass 'eliminate_noop' runs here. Did you mean 'eliminate_noops'?
  What can be disabled: eliminate_noops.
ConfigError.needed_pass: disabled_passes: pass 'bind_symbols' cannot be disabled: without it a graph cannot be split.
  What can be disabled: eliminate_noops.
ConfigError.which_dimension: cudagraph_capture_sizes, compile_sizes and compile_ranges_endpoints must speak of one dynamic dimension of the inputs, but the graph has 2 of them.
  Set capture_dim to one of: x.size()[0], y.size()[0].
ConfigError.sizes_of_which: sizes: they are sizes of one dynamic dimension of the inputs, and the graph has 2 of them.
  Say which, beside sizes: capture_dim='x.size()[0]'. There are: x.size()[0], y.size()[0].
ConfigError.unknown_parameter: dynamic_dims: the function has no parameter 'y'.
  Parameters: self, x.
ConfigError.not_compilable: cgcompile.compile(): found the class Decoder; expected a module, a bound method of one, or a function.
  Of a class, compile its instances, or decorate its forward.
ConfigError.breakable_needs_no_trace: splitting='breakable' in torch.compile(): it traces nothing, and torch.compile has traced.
  Use cgcompile.compile(model, splitting='breakable').""",
        )

    def test_descriptor(self) -> None:
        self.check(
            "BatchError",
            """\
BatchError.descriptor_field: BatchDescriptor: num_reqs = 0; expected a whole number.
BatchError.descriptor_not_uniform: BatchDescriptor(num_tokens=7, num_reqs=2, uniform=True): a uniform batch needs num_reqs, and num_tokens must be a multiple of it.
  The query length of each request is num_tokens // num_reqs, exactly.
BatchError.field: dispatch: num_tokens = -1; expected at least 0.
BatchError.not_uniform: dispatch(num_tokens=7, num_reqs=3, max_query_len=None, uniform_decode=True): requests of one length need num_tokens == num_reqs * max_query_len.
  Give the numbers before padding, or uniform_decode=False.
BatchError.which_query_len: dispatch(num_tokens=12, uniform_decode=True): there are graphs for several query lengths (1, 3), and nothing says which one this is.
  Give num_reqs or max_query_len.
BatchError.axes: dispatch: extra = (3,); expected a tuple with one hashable value per axis, each comparable with the listed ones: max_seqlen, kernel.
BatchError.not_planned: no graph is planned for mode FULL and num_tokens=7.
  Take modes and descriptors from plan().
BatchError.lengths_differ: is_uniform_decode: 3 query lengths and 2 flags of prefill; expected one of each per request.""",
        )

    def test_forward_context(self) -> None:
        self.check(
            "ForwardContextError",
            """\
ForwardContextError.missing: get_forward_context(): no forward context is set in this thread or task.
  Wrap the call of the model: with cgcompile.set_forward_context(...): model(...). A new thread or asyncio task starts with none.
ForwardContextError.traced: get_forward_context() was called in code that torch.compile traces: its value would be frozen into the graph or recompile it.
  Read the context inside an opaque custom op (torch.library), and set it around the call of the compiled model.
ForwardContextError.runtime_mode: set_forward_context(cudagraph_runtime_mode='FULL_DECODE_ONLY'): a step runs in one mode; expected CUDAGraphMode.NONE, PIECEWISE or FULL.
  Of a combined mode take decode_mode() or mixed_mode().
ForwardContextError.near_miss: set_forward_context(cudagraph_mode=...): there is no such parameter, and it would be kept as data of your own.
  Use cudagraph_runtime_mode. Give data of your own a name that is not near to a parameter's.
ForwardContextError.batch_descriptor: set_forward_context(batch_descriptor=8): expected a cgcompile.BatchDescriptor, or None.
  For a batch of n tokens: batch_descriptor=cgcompile.BatchDescriptor(n).
ForwardContextError.no_context: override_forward_context(3): expected a cgcompile.ForwardContext, or None.
  set_forward_context(...) makes one from its arguments.
ForwardContextError.unpadded: set_forward_context(num_unpadded_tokens=-1): expected a whole number from 0 to 8, the tokens of the batch descriptor.
  It says how many rows of the batch are real; the rest is padding.
ForwardContextError.not_entered: set_forward_context: the context is left more often than it was entered.
  Use it in a with statement; a context belongs to one thread or task at a time.""",
        )

    def test_boundary(self) -> None:
        self.check(
            "BoundaryError",
            """\
BoundaryError.unknown: splitting op 'ns::atend': no operator, higher-order op or function has this name. Did you mean 'ns::attend'?
  Import the library that defines it first. Forms: 'ns::op', 'ns.op', 'ns::op.overload', 'ns::*', 'package.module.function'.
BoundaryError.not_an_op: splitting op: found 3; expected a name, an op of torch.ops, a function, or a cgcompile.SplittingOp (with predicate=... for a test on fx.Node).
BoundaryError.target_or_predicate: SplittingOp: give either target= or predicate=, not both and not none.
BoundaryError.bad_support: splitting op 'ns::attend': support = 'ALWAYS'; expected a member of cgcompile.AttentionCGSupport.
BoundaryError.bad_impl: splitting op 'ns::attend': impl = 3; expected a function that takes the op's arguments, or a mapping from device types ('cuda') to such functions.
BoundaryError.predicate_raised: splitting op 'mine': its predicate raised KeyError: 'x'
  It was asked about node 'add'; it must answer True or False for every node.
BoundaryError.declared_twice: splitting op 'ns::attend' is declared twice with different settings. Declare it once.""",
        )

    def test_cache(self) -> None:
        self.check(
            "CommandError",
            """\
CommandError.target_form: 'model.py' is no target; expected module:function or path/to/file.py:function.
  The function takes nothing and returns a model and its inputs: (model, args).
CommandError.no_module: cannot import 'mine': No module named 'mine'.
  Give a module that Python finds from here, or the path of a file: path/to/file.py:function.
CommandError.no_function: model.py has no function 'mak'. Did you mean 'make'?
  Functions: make, run.
CommandError.takes_arguments: model.py:run takes arguments, (x, *, scale); expected a function that takes nothing.
  Give one that makes the model and its inputs: def make(): return Model(), (torch.randn(8, 16),)
CommandError.bad_result: model.py:make returned a tuple of 4; expected a model and its inputs.
  Return (model, args), (model, args, kwargs) or a dict with 'model', 'args' and 'kwargs'; args is a tuple, or one tensor.
CommandError.no_inputs: model.py:make returned a model without inputs, and verify calls it.
  Return (model, args) or (model, args, kwargs).
CommandError.bad_setting: --set compiler: expected key=value, such as --set compiler=eager.
CommandError.bad_splitting_ops: splitting_ops: splitting op 'x': unknown.
CommandError.no_page: --html /page.html: no page can be written there: Permission denied.
  Give the path of a file, such as page.html.
CommandError.settings_are_fixed: --set for a model that model.py:make has compiled already: its settings are fixed.
  Give them where it is compiled, or return the model before that.
CommandError.unknown_entry: no entry of /home/me/.cache/cgcompile has a key that starts with '77'.
  'cgcompile cache list' shows what is there; --dir names another folder.
CommandError.ambiguous_entry: 2 entries have a key that starts with '7': 7a00, 7b00.
  Give more of the key.
CommandError.caching_is_off: cache_dir is 'off': there is no cache folder to look at.
  Name one with --dir, or unset CGCOMPILE_CACHE_DIR.""",
        )

    def test_pass(self) -> None:
        self.check(
            "PassError",
            """\
PassError.changed_output: pass 'half' changed output 0 of piece_0: it is f64[s0, 16] on cpu; expected f32[s0, 16] on cpu.
  What takes the output was traced with what it was. Convert it back in the pass, or change the model.
PassError.invalid: pass 'mine' left an invalid graph: it has 2 outputs, expected 1.
  A pass may assume a valid graph and must leave one; see cgcompile.passes.base.
PassError.raised: pass 'mine' raised KeyError: 'x'
  Mend the pass, or leave it out; dump_passes writes the graph that it was given.
PassError.not_a_pass: a pass must have a name, uuid() and __call__(gm) -> gm; found 3.
  Wrap a plain function: cgcompile.passes.FunctionPass(name, function).""",
        )

    def test_symbol(self) -> None:
        self.check(
            "SymbolError",
            """\
SymbolError.free: piece_2: the size of 'rows' depends on u0, which no input of the graph gives.
  Such a value cannot cross into a captured piece; please report this graph.
SymbolError.specialised: piece_0 (m.py:4): your compiler fixed the dynamic dimension x.size()[0] to 8, so that what it made serves this size alone.
  Look for a comparison of a size with a constant, or for int() of a size, or compile this model without dynamic sizes (dynamic=False).
SymbolError.size_refused: cudagraph_capture_sizes: size 6 of s0 = x.size()[0] is refused by the model's own guard Eq(Mod(s0, 4), 0) (m.py:4).
  Leave it out, or round it to a size that the guard allows.""",
        )

    def test_gradient(self) -> None:
        self.check(
            "GradientError",
            """\
GradientError.of_a_capture: Decoder: a result of the captured step requires grad, and graphs have no gradients. The step has run; nothing is kept.
  Call it under torch.no_grad() or torch.inference_mode().
GradientError.recomputes: this step needs gradients (grad mode is on and an input requires it), and the model uses torch.utils.checkpoint: outside of its own compiler, torch would recompute with other random numbers.
  Call the model under torch.no_grad() or torch.inference_mode(), or train it with another backend.""",
        )

    def test_piece_compile(self) -> None:
        self.check(
            "PieceCompileError",
            """\
PieceCompileError.raised: piece_0: compiler 'inductor' raised ValueError: no
  The piece is from m.py:4 in forward. options={'compiler': 'eager'} runs it uncompiled; a splitting op or cgcompile.eager_region() takes the op out of the piece.
PieceCompileError.not_traced: piece_0, size 8: running it on fake values of this size raised ValueError: no
  The piece is from m.py:4 in forward. Leave the size out of compile_sizes, or compile_ranges_endpoints out, or take the op out of the piece with a splitting op.
PieceCompileError.bad_outputs: piece_0: what compiler 'mine' made must return a tuple or list of 2 outputs; found no list.
  Return all outputs of the graph, in order.
PieceCompileError.unlike_traced: piece_1 (model.py:12 in forward): mylib::twice returned f32[4, 8]; traced was f32[4, 16].
  The function that was registered with register_fake must return the shapes and dtypes that the op returns: correct it.
PieceCompileError.not_callable: piece_0: compiler 'mine' returned None; expected a callable that takes the inputs of the piece and returns the list of its outputs.""",
        )

    def test_encoder_model(self) -> None:
        self.check(
            "EncoderError",
            """\
EncoderError.budget_number: max_items = 0; expected a whole number of at least 1.
EncoderError.not_a_budget: encoder budgets: True is none; expected whole numbers of at least 1.
  A budget is the number of output tokens of one graph.
EncoderError.no_budgets: encoder budgets: the list is empty; expected at least one.
  Give budgets=None to have them generated from budget_range.
EncoderError.budget_range: budget_range = (0, 64); expected the least and the most output tokens of a graph.
  Both must be positive whole numbers.
EncoderError.range_order: budget_range = (200, 100): the least, 200, is above the most, 100.
  Swap them, or raise the most: it is the largest budget that is captured.
EncoderError.path_above_range: path 'global': its budgets begin at 272 (min_token_budget), which is above 256, the largest budget of budget_range.
  Raise the most of get_encoder_cudagraph_budget_range(), lower min_token_budget (with enable_dual_path_graph: global_token_per_image or local_token_per_patch), or give token_budgets=.
EncoderError.items_above_range: max_items = 256 is above 128, the largest budget of budget_range.
  Each item needs at least one token of every budget. Lower max_items, or raise the most of budget_range.
EncoderError.items_above_budget: max_items = 256; it must be <= the smallest token budget, 64.
  Each item needs at least one token of every budget: a graph whose share per item is empty cannot be captured. Lower max_items, or leave the small budgets out.
EncoderError.ratio: ratio = 1; expected a finite number above 1.
  It is how much larger each budget is than the one before.
EncoderError.nothing_observed: fitted_budgets(): nothing was observed, so there is nothing to fit.
  Count the output tokens of real groups of items, or take generated_budgets().
EncoderError.no_method: Tower has no method get_encoder_cudagraph_config(), which encoder graphs need.
  SupportsEncoderCudaGraph tells what it takes and returns; PatchEncoder has all of them for flattened patches with a grid.
EncoderError.older_protocol: Tower has get_encoder_cudagraph_num_items, of an older protocol.
  One method replaces the three: get_encoder_cudagraph_item_specs(mm_kwargs) returns [EncoderItemSpec(input_size=..., output_tokens=...), ...], one for each item.
EncoderError.no_range: Tower has no get_encoder_cudagraph_budget_range(), and no token budgets are given.
  Give token_budgets=, or let the method return (least, most) output tokens of a call.
EncoderError.returned: encoder_cudagraph_forward() returned [60, 8]; expected tensors of at least 64 rows each.
EncoderError.modality: an input of no known modality: keys ids; expected those of one of image, video.
  Give each modality in a call of its own, or override get_input_modality().
EncoderError.nothing_to_run_on: encoder_eager_forward(): the replay buffers have None for 'max_seqlen', so the forward that graphs record cannot run on them as they are.
  Override encoder_eager_forward(), or always give this buffer a value.
EncoderError.columns: encoder_cudagraph_forward() returned tensors of 8, 16 columns; out_hidden_size of EncoderCudaGraphConfig is 999.
  Set out_hidden_size to the columns of the result; of several tensors, to those of one of them.
EncoderError.no_keyword: Tower.encoder_cudagraph_forward() takes no path=, and the configuration has paths global, local.
  Add the keyword argument path to the method: the manager gives it by name, so that the method can tell the graphs apart.
EncoderError.no_buffer: the forward of an encoder raised KeyError: 'positon'; its buffers are x, position. Did you mean 'position'?
  If it is a buffer, add it to buffer_keys and to what both prepare methods return (tables= or offsets= of PatchEncoder).
EncoderError.item_number: EncoderItemSpec: output_tokens = -1; expected a whole number of at least 0.
  Read grids from the host once per call: grid_thw.tolist().
EncoderError.unknown_path: item 2: output tokens on path 'lokal', which the configuration does not have; paths: global, local. Did you mean 'local' or 'global'?
EncoderError.no_path: item 2: 7 output tokens, and none of them on a path; paths: global, local.
  Say how many each path makes: global_output_tokens and local_output_tokens, or path_output_tokens={...}.
EncoderError.no_axis: item 2: nothing is said for capture axis 'tier'; it says (none).
  Give EncoderItemSpec(axes={...}) the value that the item needs at least.
EncoderError.not_a_call: a call of an encoder is a list; expected a mapping from names to inputs.
  For images: {"pixel_values": [rows, C], "image_grid_thw": [items, 3]}.
EncoderError.no_input: a call of an encoder has no 'image_grid_thw'; it has pixel_values, image_grid. Rename 'image_grid' to 'image_grid_thw'?
  Patches of all items and the grid of each go together. inputs= of PatchEncoder says what they are called.
EncoderError.rows: 'pixel_values' is a list; expected a tensor [rows, C].
  Give all patches of all items, one after the other, in the order of the grids.
EncoderError.grid: 'image_grid_thw': item 1 is (1, 3, 3); expected (t, h, w), whole numbers of at least 0, h and w divisible by merge_size = 2.
  A token is made of merge_size * merge_size patches: resize the image, or pad its patches.
EncoderError.patches: 'pixel_values' has 9 rows; the grids of 'image_grid_thw' have 16 patches.
  Give all patches of all items, one after the other, in the order of the grids.
EncoderError.no_value: replay: no value for buffer 'cu_seqlens'; there are x.
  Each of buffer_keys is written before a replay. None leaves a buffer as it is.
EncoderError.unknown_buffer: replay: 'cu_seqlen' is not among buffer_keys (cu_seqlens). Did you mean 'cu_seqlens'?
  Add it to buffer_keys, or leave it out: it would never be refreshed.
EncoderError.buffer_value: buffer 'x': the value is [9, 3]; expected at most the rows of [8, 3].
  Give real rows alone; the rows behind them are the manager's.
EncoderError.buffer_layout: buffer 'x': the value is [9, 2] of float32; expected at most the rows of [16, 3] of float32.
  Sizes behind the first must be those of the buffer, and the dtype must cast to its: give such a value, or another buffer in prepare_encoder_cudagraph_capture_inputs() (in_features=, PatchTable).
EncoderError.no_offset_room: buffer 'cu_seqlens': 9 offsets fill it, so that none is left for the padding.
  Capture offset buffers with max_frames_per_batch + 2 entries: padded rows are one sequence at the end.
EncoderError.no_offset_end: prepare_encoder_cudagraph_capture_inputs(): buffer 'cu_seqlens' is among offset_keys, and its last entry is 0; expected the number of rows, no entry above it.
  Padding goes on to what the last entry is at capture. Rows behind it would be written by no kernel.
EncoderError.padding_failed: buffer 'x' [4]: its padding logic failed on a value [3]: RuntimeError: no
  It is called as logic(dst, src), and writes all of dst in place.
EncoderError.buffer_moved: buffer 'x' [4]: its padding logic left [3] in its place.
  A graph reads the shape and address that it recorded: write dst in place.
EncoderError.item_need: item 3: tokens=(-1,), frames=1; expected whole numbers of at least 0.
  An item without part in a path has 0 tokens there.
EncoderError.item_paths: item 3: 1 numbers of tokens; the capacity has 2 paths.
  Give one number per path, in the order of the paths.
EncoderError.capacity: Capacity(budgets=((128, 64),), max_items=8, max_frames=None); expected the budgets of one path or more, each ascending from at least 1, at least one item, and frames of at least 0 or None.
EncoderError.cost: Costs: fixed = -1; expected a finite number of at least 0, in tokens.
  Divide measured times by the time of one token more in a graph.""",
        )

    def test_encoder_shard(self) -> None:
        self.check(
            "EncoderShardError",
            """\
EncoderShardError.no_group: Sharder: torch.distributed has no process group, so there are no ranks.
  Call torch.distributed.init_process_group() first, or leave the sharder out.
EncoderShardError.structure: rank 1: results have another structure than those of the first call.
  Ranks without items must know what the others send: return the same kind of result for each item, or override Sharder.gather().
EncoderShardError.failed: rank 0: the share of another rank failed.
  rank 1: ValueError: no
  Its own error says more. No rank has results of this call; the next one is not affected.""",
        )

    def test_sizes(self) -> None:
        self.check(
            "SizesError",
            """\
SizesError.number: max_num_reqs = 0; expected a whole number of at least 1.
SizesError.not_a_size: capture sizes: True is none; expected whole numbers of at least 1.
  A step without rows needs no graph.
SizesError.empty: no capture sizes were given; expected at least one.
  For steps without graphs take CUDAGraphMode.NONE.
SizesError.above: capture sizes 16, 32, 48, 64, 80, 96, 112, 128 and 2 more: above the maximum of 8, so that no batch needs them and no buffer holds them.
  Leave them out, or raise the maximum.
SizesError.no_multiple: no capture size is possible: the maximum is 4, and sizes must be multiples of 6.
  Raise the maximum, or take a smaller query length or parallel size.
SizesError.bad_entry: histogram: {0: 12}; expected batch size: number of steps, whole numbers of at least 1 and 0.
  Leave idle steps out: they run nothing.
SizesError.no_steps: fit_sizes(): the histogram holds no steps, so there is nothing to fit.
  Count the batch sizes of real steps, or take capture_sizes().
SizesError.no_budget: fit_sizes(): no budget was given; without one every observed batch size would get a graph.
  Give count=, or nbytes= and bytes_of=, or all three.
SizesError.bytes_unknown: fit_sizes(nbytes=4096): nothing says what a graph takes.
  Give bytes_of=, a function from a size to the bytes of its graph.
SizesError.bad_measure: fit_sizes(): cost_of(8) returned None; expected a finite number.
SizesError.too_few_bytes: fit_sizes(nbytes=4096): the graph of size 512, which alone would cover all batches, takes 8192 bytes.
  Raise nbytes, lower maximum, or give cost_without_graph=, so that large batches may run without a graph.
SizesError.not_covered: fit_sizes(): the largest candidate is 496, and batches of 500 were observed.
  Add a candidate, or give maximum=496: larger batches then run without a graph.""",
        )
