"""Settings: every door, every precedence, and what is refused."""

import ast
import dataclasses
import inspect
import re
from typing import Any

import pytest
import torch
from lib.snapshots import assert_snapshot

import cgcompile
from cgcompile import CompilationConfig, CompilationMode, CUDAGraphMode
from cgcompile.config import EARLIER, kernel_switch
from cgcompile.errors import OF_COMPILE, ConfigError
from cgcompile.settings import KERNELS


def test_every_setting_is_documented() -> None:
    for name in CompilationConfig.names():
        assert f"        {name}: " in (CompilationConfig.__doc__ or "")


def test_settings_and_defaults_are_a_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CGCOMPILE_CACHE_DIR", raising=False)
    config = CompilationConfig()
    rows = [f"{name} = {getattr(config, name)!r}" for name in CompilationConfig.names()]
    assert_snapshot("settings", "\n".join(rows))


def test_frozen_and_hashable() -> None:
    config = CompilationConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.compiler = "eager"
    assert hash(config) == hash(CompilationConfig())
    assert config == CompilationConfig()


def test_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CompilationConfig.resolve().compiler == "inductor"
    monkeypatch.setenv("CGCOMPILE_COMPILER", "aot")
    assert CompilationConfig().compiler == "aot"
    options = {"compiler": "eager"}
    assert CompilationConfig.resolve(options=options).compiler == "eager"
    both = CompilationConfig.resolve(options=options, arguments={"compiler": "inductor"})
    assert both.compiler == "inductor"
    config = CompilationConfig(compiler="eager")
    assert CompilationConfig.resolve(config, arguments={"cudagraph_mode": "full"}) == (
        CompilationConfig(compiler="eager", cudagraph_mode=CUDAGraphMode.FULL)
    )


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("mode", "none", CompilationMode.NONE),
        ("cudagraph_mode", "Full_Decode_Only", CUDAGraphMode.FULL_DECODE_ONLY),
        ("compiler", "eager", "eager"),
        ("inductor_options", '{"max_autotune": true}', (("max_autotune", True),)),
        ("splitting_ops", "ns::op, other::op", ("ns::op", "other::op")),
        ("splitting_ops", "-builtin,ns::op", ("-builtin", "ns::op")),
        ("passes", "-eliminate_clones, -mine,-mine", ("-eliminate_clones", "-mine")),
        ("cudagraph_capture_sizes", "8, 1,2,8", (1, 2, 8)),
        ("compile_sizes", "8, 1,2,8", (1, 2, 8)),
        ("compile_sizes", "<=512, 9,<=32", (9, "<=32", "<=512")),
        ("compiler", "inductor, eager", ("inductor", "eager")),
        ("kernels", "off", False),
        ("kernels", "auto", "auto"),
        ("dump_passes", "/tmp/passes", "/tmp/passes"),
        ("cache_dir", "/tmp/pieces", "/tmp/pieces"),
        ("cache_dir", "off", "off"),
    ],
)
def test_every_setting_by_every_door(
    name: str, text: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert getattr(CompilationConfig(**{name: value}), name) == value
    assert getattr(CompilationConfig.resolve(options={name: text}), name) == value
    assert getattr(CompilationConfig.resolve(arguments={name: value}), name) == value
    monkeypatch.setenv(f"CGCOMPILE_{name.upper()}", text)
    assert getattr(CompilationConfig(), name) == value


@pytest.mark.parametrize(
    ("name", "text", "present"),
    [
        ("check_metadata", "0", {"checks": ("state", "weights")}),
        ("check_state", "off", {"checks": ("metadata", "weights")}),
        ("poison", "1", {"debug": ("poison",)}),
        ("builtin_splitting_ops", "0", {"splitting_ops": ("-builtin",)}),
        ("compile_ranges_endpoints", "32,512", {"compile_sizes": ("<=32", "<=512")}),
        ("on_compile_error", "eager", {"compiler": ("inductor", "eager")}),
        ("disabled_passes", "eliminate_clones,mine", {"passes": ("-eliminate_clones", "-mine")}),
        ("strict", "1", {"on_fallback": "raise"}),
        ("warn_fallbacks", "0", {"on_fallback": "count"}),
        ("small_batch_kernels", "0", {"kernels": ("auto", "-small_batch")}),
        ("decode_attention", "1", {"kernels": ("auto", "decode_attention")}),
    ],
)
def test_earlier_names_by_every_door(
    name: str, text: str, present: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (new,) = present
    told = re.escape(f"{name} is deprecated: use {new}={present[new]!r}")
    for make in (
        lambda: CompilationConfig(**{name: text}),
        lambda: CompilationConfig.resolve(options={name: text}),
        lambda: CompilationConfig.resolve(CompilationConfig(), arguments={name: text}),
        lambda: dataclasses.replace(CompilationConfig(), **{name: text}),
    ):
        with pytest.warns(FutureWarning, match=told):
            config = make()
        assert {key: getattr(config, key) for key in present} == present
        assert config.origins[new] != "default"
    monkeypatch.setenv(f"CGCOMPILE_{name.upper()}", text)
    told = rf"CGCOMPILE_{name.upper()} is deprecated: use (CGCOMPILE_{new.upper()})=(.*)$"
    with pytest.warns(FutureWarning, match=told) as warned:
        config = CompilationConfig()
    advice = re.search(told, str(warned[0].message))
    assert advice is not None
    monkeypatch.delenv(f"CGCOMPILE_{name.upper()}")
    monkeypatch.setenv(*advice.groups())
    assert CompilationConfig() == config
    assert {key: getattr(config, key) for key in present} == present
    assert config.origins[new] == "environment"


def test_the_advice_is_the_value_and_not_its_opposite() -> None:
    for name, value, advice in (
        ("strict", False, "on_fallback='warn'"),
        ("check_state", True, "checks=('metadata', 'state', 'weights')"),
        ("poison", False, "debug=()"),
        ("small_batch_kernels", True, "kernels=('auto', 'small_batch')"),
        ("compile_ranges_endpoints", None, "compile_sizes=None"),
    ):
        with pytest.warns(FutureWarning, match=re.escape(f"{name} is deprecated: use {advice}")):
            CompilationConfig(**{name: value})


def test_the_advice_for_the_environment_has_the_same_effect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CGCOMPILE_DEBUG", "poison")
    monkeypatch.setenv("CGCOMPILE_POISON", "0")
    with pytest.warns(FutureWarning, match="use CGCOMPILE_DEBUG=0$"):
        assert CompilationConfig().debug == ()


def test_earlier_names_can_be_read() -> None:
    plain = CompilationConfig()
    other = CompilationConfig(
        checks="-state,-metadata",
        debug="poison",
        kernels="auto,-small_batch",
        compiler="aot,eager",
        splitting_ops="-builtin",
    )
    values = {
        "check_state": (True, False),
        "check_metadata": (True, False),
        "poison": (False, True),
        "small_batch_kernels": ("auto", False),
        "decode_attention": ("auto", "auto"),
        "on_compile_error": ("raise", "eager"),
        "builtin_splitting_ops": (True, False),
    }
    for name, expected in values.items():
        told = f"config.{name} is deprecated: read config.{EARLIER[name].setting}"
        with pytest.warns(FutureWarning, match=told):
            assert (getattr(plain, name), getattr(other, name)) == expected
    for name in {*EARLIER} - {*values}:
        assert hasattr(plain, name)
    with pytest.raises(AttributeError, match="no attribute 'check_states'"):
        _ = plain.check_states  # type: ignore[attr-defined]


def test_close_matches_of_earlier_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, told in (
        ("strickt", "'on_fallback' (earlier 'strict')"),
        ("check_states", "'checks' (earlier 'check_state')"),
        ("poisson", "'debug' (earlier 'poison')"),
    ):
        match = re.escape(f"Did you mean {told}")
        with pytest.raises(ConfigError, match=match):
            CompilationConfig(**{name: True})
        with pytest.raises(ConfigError, match=match):
            CompilationConfig.resolve(options={name: True})
    monkeypatch.setenv("CGCOMPILE_STRICKT", "1")
    told = re.escape("'CGCOMPILE_ON_FALLBACK' (earlier 'CGCOMPILE_STRICT')")
    with pytest.raises(ConfigError, match=told):
        CompilationConfig()


def test_the_warning_is_at_the_line_of_the_user() -> None:
    for make in (
        lambda: dataclasses.replace(CompilationConfig(), strict=True),
        lambda: CompilationConfig(strict=True),
        lambda: cgcompile.Backend(strict=True),
        lambda: cgcompile.compile(torch.nn.Linear(2, 2), strict=True),
    ):
        with pytest.warns(FutureWarning) as warned:
            make()
        assert [warning.filename for warning in warned] == [__file__]


def test_every_earlier_name_has_a_present_one() -> None:
    names = CompilationConfig.names()
    assert not {*EARLIER} & {*names}
    for earlier in EARLIER.values():
        assert earlier.setting in names
        setting, _, value = earlier.advice.partition("=")
        assert setting == earlier.setting
        value = value.replace("of_the_graph, ", "").replace(", of_pieces", ",")
        CompilationConfig.resolve(options={setting: ast.literal_eval(value)})


def test_earlier_names_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGCOMPILE_DEBUG", "stale")
    with pytest.warns(FutureWarning):
        config = CompilationConfig(check_state=False, check_metadata=False, poison=True)
    assert (config.checks, config.debug) == (("weights",), ("stale", "poison"))
    with pytest.warns(FutureWarning):
        again = CompilationConfig.resolve(config, options={"check_state": "1", "poison": "0"})
    assert (again.checks, again.debug) == (("state", "weights"), ("stale",))
    with pytest.warns(FutureWarning):
        both = CompilationConfig(checks="-weights", check_metadata=False)
    assert both.checks == ("state",)
    with pytest.warns(FutureWarning):
        assert CompilationConfig(warn_fallbacks=False, strict=True).on_fallback == "raise"
    with pytest.warns(FutureWarning):
        config = CompilationConfig(on_fallback="raise", strict=False, warn_fallbacks=False)
    assert (config.on_fallback, config.strict, config.warn_fallbacks) == ("count", False, False)


def test_earlier_names_of_lists() -> None:
    one, two = (cgcompile.passes.FunctionPass(name, lambda gm: gm) for name in ("one", "two"))
    with pytest.warns(FutureWarning, match="piece_passes is deprecated: use passes, such as"):
        config = CompilationConfig(piece_passes=(two,), graph_passes=one, disabled_passes="one")
    assert config.passes == (one, "split", two, "-one")
    assert (config.graph_passes, config.piece_passes) == ((one,), (two,))
    assert config.disabled_passes == ("one",)
    with pytest.warns(FutureWarning):
        assert dataclasses.replace(config, piece_passes=()).passes == (one, "-one")
    with pytest.warns(FutureWarning):
        config = CompilationConfig(compile_sizes="4,<=9", compile_ranges_endpoints=8)
    assert (config.compile_sizes, config.compile_ranges_endpoints) == ((4, "<=8"), (8,))
    assert config.sizes_to_compile == (4,)
    with pytest.warns(FutureWarning):
        config = CompilationConfig(compiler="aot", on_compile_error="eager")
    assert (config.compiler, config.first_compiler) == (("aot", "eager"), "aot")
    with pytest.warns(FutureWarning):
        assert CompilationConfig(compiler="eager", on_compile_error="eager").compiler == "eager"
    with pytest.warns(FutureWarning):
        config = CompilationConfig(splitting_ops="a::b", builtin_splitting_ops=False)
    assert config.splitting_ops == ("-builtin", "a::b")
    with pytest.warns(FutureWarning):
        again = dataclasses.replace(config, builtin_splitting_ops=True)
    assert again.splitting_ops == ("a::b",)


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        (True, ("stale", "poison")),
        ("on", ("stale", "poison")),
        (False, ()),
        ((), ()),
        ("poison", ("poison",)),
        ("poison,stale", ("stale", "poison")),
        (["-poison"], ("stale",)),
        ("stale, poison, -stale", ("poison",)),
    ],
)
def test_a_setting_of_parts(value: Any, parts: tuple[str, ...]) -> None:
    assert CompilationConfig(debug=value).debug == parts
    assert CompilationConfig(debug=parts).debug == parts


@pytest.mark.parametrize("value", ["", "poisn", "-", "stale,-poisn", 3, None])
def test_a_setting_of_parts_names_them(value: Any) -> None:
    expected = "expected True, False, or names of stale, poison; '-stale' for all but that"
    with pytest.raises(ConfigError, match=expected):
        CompilationConfig(debug=value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mode", "piece_wise"),
        ("mode", 3),
        ("cudagraph_mode", "half"),
        ("compiler", "inductr"),
        ("inductor_options", "max_autotune=1"),
        ("inductor_options", 5),
        ("splitting_ops", "-bultin"),
        ("cudagraph_capture_sizes", "1,two"),
        ("cudagraph_capture_sizes", (1, 0)),
        ("cudagraph_capture_sizes", (-4,)),
        ("cudagraph_capture_sizes", (True, 2)),
        ("cudagraph_capture_sizes", (1.5,)),
        ("cudagraph_capture_sizes", ()),
        ("compile_sizes", "1,two"),
        ("compile_sizes", (0,)),
        ("compile_sizes", ()),
        ("compile_sizes", ("cudagraph_capture_sizes", True)),
        ("compile_sizes", "<=two"),
        ("compile_sizes", ("<=0",)),
        ("compile_sizes", "<="),
        ("compiler", "eager,inductor"),
        ("compiler", "inductor,aot"),
        ("compiler", ()),
        ("inductor_options", (5,)),
        ("passes", (3,)),
        ("passes", "eliminate_clones"),
        ("passes", ("",)),
        ("passes", ("-",)),
        ("passes", ("split", "split")),
        ("mode", None),
        ("capture_dim", 3),
    ],
)
def test_bad_values_name_setting_and_expectation(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{name} = .*expected"):
        CompilationConfig(**{name: value})


def test_capture_dim_needs_a_trace() -> None:
    """Without sizes it names the dimension of padding rows."""
    assert CompilationConfig(capture_dim="x.size()[0]").capture_dim == "x.size()[0]"
    with pytest.raises(ConfigError, match=r"capture_dim = .* breakable capture traces nothing"):
        CompilationConfig(capture_dim="x.size()[0]", splitting="breakable")


def test_compile_sizes_may_be_the_capture_sizes() -> None:
    sizes = {"cudagraph_capture_sizes": (1, 2, 8)}
    config = CompilationConfig(compile_sizes="cudagraph_capture_sizes", **sizes)
    assert config.compile_sizes == ("cudagraph_capture_sizes",)
    assert config.sizes_to_compile == (1, 2, 8)
    config = CompilationConfig(compile_sizes=(64, "cudagraph_capture_sizes", "9", 2), **sizes)
    assert config.sizes_to_compile == (1, 2, 8, 9, 64)
    other = CompilationConfig.resolve(config, arguments={"cudagraph_capture_sizes": (2, 9)})
    assert other.sizes_to_compile == (2, 9, 64)
    assert CompilationConfig().sizes_to_compile == ()
    with pytest.raises(ConfigError, match=r"compile_sizes = .* without cudagraph_capture_sizes"):
        CompilationConfig(compile_sizes="cudagraph_capture_sizes")


@pytest.mark.parametrize(("size", "padded"), [(3, 8), (7, 8)])
def test_a_compile_size_that_padding_would_change(size: int, padded: int) -> None:
    with pytest.raises(ConfigError, match=f"size {size}: it is padded to {padded}, the next"):
        CompilationConfig(compile_sizes=(2, size), cudagraph_capture_sizes=(1, 2, 8))


@pytest.mark.parametrize("more", [{"compiler": "aot"}, {"mode": "NONE"}])
def test_inductor_options_need_inductor(more: dict) -> None:
    with pytest.raises(ConfigError, match="nothing there is compiled by Inductor"):
        CompilationConfig(inductor_options={"max_autotune": True}, **more)


def test_unknown_arguments_and_wrong_objects() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'compiler'"):
        CompilationConfig(compilr="eager")
    with pytest.raises(ConfigError, match="there is no setting '3'"):
        CompilationConfig.resolve(options={3: 1})
    for wrong in ("eager", {"compiler": "eager"}):
        with pytest.raises(ConfigError, match="expected a CompilationConfig"):
            cgcompile.Backend(wrong)


@pytest.mark.slow
def test_options_that_cannot_be_hashed_work_through_the_name() -> None:
    options = {
        "inductor_options": {"cpp.max_horizontal_fusion_size": 4, "joint_custom_pre_pass": None}
    }
    model = Model().eval()
    compiled = torch.compile(model, backend="cgcompile", options=options)
    check(model, compiled)
    listed = CompilationConfig(inductor_options={"triton.x": [1, 2]})
    assert listed == CompilationConfig(inductor_options={"triton.x": [1, 2]})


def test_unknown_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGCOMPILE_COMPLIER", "eager")
    with pytest.raises(ConfigError, match="Did you mean 'CGCOMPILE_COMPILER'"):
        CompilationConfig()


@pytest.mark.parametrize("name", [*CompilationConfig.names(), *EARLIER])
def test_an_empty_variable_is_not_set(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(f"CGCOMPILE_{name.upper()}", raising=False)
    default = CompilationConfig()
    monkeypatch.setenv(f"CGCOMPILE_{name.upper()}", "")
    assert CompilationConfig() == default
    assert CompilationConfig().origins == default.origins


@pytest.mark.parametrize("mode", ["NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE"])
@pytest.mark.parametrize("cudagraph_mode", CUDAGraphMode)
def test_piecewise_graphs_need_a_split_graph(mode: str, cudagraph_mode: CUDAGraphMode) -> None:
    if cudagraph_mode.requires_piecewise_compilation():
        with pytest.raises(ConfigError, match="piecewise graphs need a split graph"):
            CompilationConfig(mode=mode, cudagraph_mode=cudagraph_mode)
    else:
        config = CompilationConfig(mode=mode, cudagraph_mode=cudagraph_mode)
        assert config.cudagraph_mode is cudagraph_mode


@pytest.mark.parametrize("mode", CompilationMode)
def test_default_cudagraph_mode(mode: CompilationMode) -> None:
    split = mode is CompilationMode.PIECEWISE
    expected = CUDAGraphMode.FULL_AND_PIECEWISE if split else CUDAGraphMode.NONE
    assert CompilationConfig(mode=mode).cudagraph_mode is expected


def test_settings_that_a_mode_would_ignore_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"splitting_ops = .* with mode NONE is impossible"):
        CompilationConfig(mode="NONE", splitting_ops="ns::op")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("passes", (cgcompile.passes.FunctionPass("mine", lambda gm: gm),)),
        ("passes", ("split", cgcompile.passes.FunctionPass("mine", lambda gm: gm))),
        ("passes", "-eliminate_noops"),
        ("dump_passes", "folder"),
        ("compile_sizes", "1,2"),
        ("compile_sizes", "<=8"),
    ],
)
def test_settings_of_a_trace_are_refused_without_one(name: str, value: Any) -> None:
    assert getattr(CompilationConfig(**{name: value}), name)
    with pytest.raises(ConfigError, match=f"{name} = (.|\n)*breakable capture traces nothing"):
        CompilationConfig(splitting="breakable", **{name: value})


@pytest.mark.parametrize("mode", ["NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE"])
def test_settings_of_capture_need_a_mode_with_graphs(mode: str) -> None:
    settings = {"capture_device": "host", "on_fallback": "raise", "num_warmups": 2}
    config = CompilationConfig(mode=mode, cudagraph_mode="FULL", **settings)
    assert {name: getattr(config, name) for name in settings} == settings
    for name, value in settings.items():
        with pytest.raises(ConfigError, match=rf"{name} = .*nothing is captured(.|\n)*FULL"):
            CompilationConfig(mode=mode, **{name: value})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("capture_device", "host"),
        ("on_fallback", "raise"),
        ("num_warmups", "3"),
        ("compiler", "eager"),
        ("splitting", "breakable"),
        ("cudagraph_capture_sizes", "1,2,4"),
        ("capture_dim", "x.size()[0]"),
        ("inductor_options", '{"max_autotune": true}'),
        ("cudagraph_mode", "PIECEWISE"),
    ],
)
def test_a_variable_that_a_mode_would_ignore_is_ignored(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = CompilationConfig(mode="NONE")
    monkeypatch.setenv(f"CGCOMPILE_{name.upper()}", text)
    config = CompilationConfig(mode="NONE")
    assert config == plain
    assert config.origins[name] == "default"
    assert cgcompile.compile(torch.nn.Linear(2, 2), mode="NONE")(torch.ones(1, 2)).shape == (1, 2)
    with pytest.raises(ConfigError, match=f"{name} .*is impossible"):
        CompilationConfig(mode="NONE", **{name: text})
    with pytest.raises(ConfigError, match=f"{name} .*is impossible"):
        CompilationConfig.resolve(options={"mode": "NONE", name: text})


def test_one_variable_switches_all_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {kernel_switch(CompilationConfig(), name) for name in KERNELS} == {"auto"}
    monkeypatch.setenv("CGCOMPILE_KERNELS", "0")
    config = CompilationConfig()
    assert {kernel_switch(config, name) for name in KERNELS} == {False}
    assert config.origins["kernels"] == "environment"
    assert (
        kernel_switch(CompilationConfig(kernels="auto"), "small_batch") == "auto"
    )  # an argument wins
    monkeypatch.setenv("CGCOMPILE_KERNELS", "1")  # for all models, so where the device can
    assert {kernel_switch(CompilationConfig(), name) for name in KERNELS} == {"auto"}
    monkeypatch.setenv("CGCOMPILE_KERNELS", "perhaps")
    with pytest.raises(
        ConfigError, match=r"CGCOMPILE_KERNELS: .* expected 'auto', True, False, or"
    ):
        CompilationConfig()


@pytest.mark.parametrize(
    ("value", "kept", "small_batch", "decode_attention"),
    [
        ("1", True, True, True),
        ("-small_batch", ("auto", "-small_batch"), False, "auto"),
        ("decode_attention", ("decode_attention",), False, True),
        ("auto,decode_attention", ("auto", "decode_attention"), "auto", True),
        (["small_batch", "decode_attention"], True, True, True),
        ("-small_batch,-decode_attention", False, False, False),
    ],
)
def test_kernels_by_name(value: Any, kept: Any, small_batch: Any, decode_attention: Any) -> None:
    config = CompilationConfig(kernels=value)
    assert config.kernels == kept
    assert kernel_switch(config, "small_batch") == small_batch
    assert kernel_switch(config, "decode_attention") == decode_attention
    assert CompilationConfig(kernels=kept) == config


def test_earlier_names_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(FutureWarning, match="small_batch_kernels is deprecated: use kernels"):
        assert CompilationConfig(small_batch_kernels=True).kernels == ("auto", "small_batch")
    with pytest.warns(FutureWarning):
        config = CompilationConfig(small_batch_kernels=False, decode_attention="1")
    assert config.kernels == ("decode_attention",)
    monkeypatch.setenv("CGCOMPILE_KERNELS", "0")
    monkeypatch.setenv("CGCOMPILE_DECODE_ATTENTION", "auto")  # what is about one kernel wins
    with pytest.warns(FutureWarning, match="CGCOMPILE_DECODE_ATTENTION is deprecated"):
        assert kernel_switch(CompilationConfig(), "decode_attention") == "auto"


def test_kernels_are_switched_off_where_nothing_uses_them() -> None:
    assert CompilationConfig(mode="NONE", kernels=False).kernels is False
    assert CompilationConfig(mode="NONE", kernels="-small_batch").kernels
    assert CompilationConfig(compiler="eager", kernels="auto").compiler == "eager"
    assert CompilationConfig(compiler="eager", kernels=True).kernels is True  # of attention
    with pytest.raises(ConfigError, match=r"kernels = \('small_batch',\) .*is impossible"):
        CompilationConfig(compiler="eager", kernels="small_batch")
    with pytest.raises(ConfigError, match=r"kernels = True with mode NONE is impossible"):
        CompilationConfig(mode="NONE", kernels=True)


def test_a_variable_that_a_mode_uses_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGCOMPILE_CAPTURE_DEVICE", "host")
    monkeypatch.setenv("CGCOMPILE_CAPTURE_DIM", "x.size()[0]")
    monkeypatch.setenv("CGCOMPILE_ON_FALLBACK", "warn")  # the default
    assert CompilationConfig(mode="NONE").origins["on_fallback"] == "default"
    config = CompilationConfig(mode="NONE", cudagraph_mode="FULL")
    assert config.origins["on_fallback"] == "environment"
    assert config.capture_device == "host"
    assert config.capture_dim is None
    assert CompilationConfig(compile_sizes=[2]).capture_dim == "x.size()[0]"


def test_no_size_is_padded_without_graphs() -> None:
    sizes = {"cudagraph_capture_sizes": [1, 2, 4, 8], "compile_sizes": [3]}
    with pytest.raises(ConfigError, match="no step ever has size 3"):
        CompilationConfig(**sizes)
    assert CompilationConfig(**sizes, cudagraph_mode="NONE").sizes_to_compile == (3,)
    alias = CompilationConfig(
        cudagraph_capture_sizes=[1, 4],
        compile_sizes=[3, "cudagraph_capture_sizes"],
        cudagraph_mode="NONE",
    )
    assert alias.sizes_to_compile == (1, 3, 4)


@pytest.mark.parametrize(
    ("mode", "decode", "mixed", "separate", "most", "piecewise"),
    [
        ("NONE", "NONE", "NONE", False, "NONE", False),
        ("PIECEWISE", "PIECEWISE", "PIECEWISE", False, "PIECEWISE", True),
        ("FULL", "FULL", "FULL", False, "FULL", False),
        ("FULL_DECODE_ONLY", "FULL", "NONE", True, "FULL", False),
        ("FULL_AND_PIECEWISE", "FULL", "PIECEWISE", True, "FULL", True),
    ],
)
def test_cudagraph_mode_methods(
    mode: str, decode: str, mixed: str, separate: bool, most: str, piecewise: bool
) -> None:
    graph_mode = CUDAGraphMode[mode]
    assert graph_mode.decode_mode().name == decode
    assert graph_mode.mixed_mode().name == mixed
    assert graph_mode.separate_routine() is separate
    assert graph_mode.max_cudagraph_mode().name == most
    assert graph_mode.requires_piecewise_compilation() is piecewise
    assert {m.name for m in CUDAGraphMode if graph_mode.has_mode(m)} == {decode, mixed}


def test_valid_runtime_modes() -> None:
    assert {mode.name for mode in CUDAGraphMode.valid_runtime_modes()} == {
        "NONE",
        "PIECEWISE",
        "FULL",
    }


# ---------------------------------------------------------------- one test per mode per door


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, self.linear(x)).sin()


DOORS = ("options", "environment", "typed")


def compile_through(
    door: str, monkeypatch: pytest.MonkeyPatch, **settings: str
) -> tuple[torch.nn.Module, torch.nn.Module]:
    model = Model().eval()
    if door == "options":
        return model, torch.compile(model, backend="cgcompile", options=settings)
    if door == "environment":
        for name, value in settings.items():
            monkeypatch.setenv(f"CGCOMPILE_{name.upper()}", value)
        return model, torch.compile(model, backend="cgcompile")
    config = CompilationConfig(**settings)
    return model, torch.compile(model, backend=cgcompile.Backend(config))


def check(model: torch.nn.Module, compiled: torch.nn.Module) -> None:
    x = torch.randn(2, 4, 8)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("door", DOORS)
def test_mode_none(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, compiled = compile_through(door, monkeypatch, mode="NONE")
    check(model, compiled)
    assert cgcompile.runtime(compiled).graphs == ()


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
def test_mode_stock_torch_compile(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    model, compiled = compile_through(door, monkeypatch, mode="STOCK_TORCH_COMPILE")
    counters.clear()
    check(model, compiled)
    assert sum(counters["aot_autograd"].values()) > 0  # Inductor had it, whole
    assert cgcompile.runtime(compiled).graphs == ()
    x = torch.randn(2, 4, 8)
    gradients = [
        torch.autograd.grad(m(x).sum(), list(model.parameters())) for m in (model, compiled)
    ]
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("door", DOORS)
def test_mode_piecewise(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"mode": "PIECEWISE", "compiler": "eager"}
    model, compiled = compile_through(door, monkeypatch, **settings)
    check(model, compiled)
    (graph,) = cgcompile.runtime(compiled).graphs
    assert [piece.capture for piece in graph.split.pieces] == [True, False, True]
    assert graph.counters.calls == 1


@pytest.mark.parametrize("door", DOORS)
def test_mode_dynamo_trace_once_says_what_it_needs(
    door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, compiled = compile_through(door, monkeypatch, mode="DYNAMO_TRACE_ONCE")
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught, torch.no_grad():
        compiled(torch.randn(2, 4, 8))
    assert isinstance(caught.value.inner_exception, ConfigError)
    assert "guard_filter_fn" in str(caught.value)


@pytest.mark.slow
def test_the_advice_for_trace_once_works() -> None:
    model = Model().eval()
    compiled = torch.compile(
        model,
        backend="cgcompile",
        options={
            "mode": "STOCK_TORCH_COMPILE",
            "guard_filter_fn": torch.compiler.skip_all_guards_unsafe,
        },
    )
    check(model, compiled)


# ---------------------------------------------------------------- the doors themselves


def test_name_is_listed() -> None:
    assert "cgcompile" in torch.compiler.list_backends()


@pytest.mark.slow
def test_name_without_settings_compiles_piecewise() -> None:
    model = Model().eval()
    compiled = torch.compile(model, backend="cgcompile")
    check(model, compiled)
    assert len(cgcompile.runtime(compiled).graphs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs", "default"])
def test_modes_of_torch_compile(mode: str) -> None:
    model = Model().eval()
    compiled = torch.compile(model, backend="cgcompile", mode=mode)
    config = cgcompile.runtime(compiled).config
    expected = {
        "max-autotune-no-cudagraphs": CUDAGraphMode.NONE,
    }.get(mode, CUDAGraphMode.FULL_AND_PIECEWISE)
    assert config.cudagraph_mode is expected
    assert dict(config.inductor_options).get("max_autotune", False) is mode.startswith("max")
    assert "triton.cudagraphs" not in dict(config.inductor_options)
    check(model, compiled)


def inner(compiled: torch.nn.Module) -> Exception:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught, torch.no_grad():
        compiled(torch.randn(2, 4, 8))
    return caught.value.inner_exception


def test_unknown_mode_of_torch_compile() -> None:
    error = inner(torch.compile(Model(), backend="cgcompile", mode="reduce-overheads"))
    assert isinstance(error, ConfigError)
    assert "Did you mean 'reduce-overhead'" in str(error)


def test_unknown_option() -> None:
    error = inner(torch.compile(Model(), backend="cgcompile", options={"splitting_op": "ns::op"}))
    assert isinstance(error, ConfigError)
    assert "options: there is no setting 'splitting_op'. Did you mean 'splitting_ops'" in str(error)


def test_unknown_argument_of_the_typed_door() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'compiler'"):
        cgcompile.Backend(compilr="eager")


def test_an_argument_of_compile_is_no_setting() -> None:
    parameters = inspect.signature(cgcompile.compile).parameters.values()
    names = {each.name for each in parameters if each.kind is not each.VAR_KEYWORD}
    assert {*OF_COMPILE} == names - {"model", "config"}
    for name in OF_COMPILE:
        with pytest.raises(ConfigError, match=rf"an argument: cgcompile.compile\(model, {name}="):
            cgcompile.Backend(**{name: True})


def test_typed_door_takes_no_options() -> None:
    error = inner(
        torch.compile(Model(), backend=cgcompile.Backend(), options={"compiler": "eager"})
    )
    assert isinstance(error, ConfigError)
    assert "settings of the object are fixed" in str(error)


def test_equal_settings_share_a_handle_and_others_do_not() -> None:
    first = torch.compile(Model(), backend="cgcompile", options={"compiler": "eager"})
    second = torch.compile(Model(), backend="cgcompile", options={"compiler": "eager"})
    third = torch.compile(Model(), backend="cgcompile", options={"compiler": "aot"})
    assert cgcompile.runtime(first) is cgcompile.runtime(second)
    assert cgcompile.runtime(first) is not cgcompile.runtime(third)


def test_runtime_of_something_else() -> None:
    with pytest.raises(ConfigError, match="found a Model"):
        cgcompile.runtime(Model())
    with pytest.raises(ConfigError, match="found an OptimizedModule"):
        cgcompile.runtime(torch.compile(Model(), backend="eager"))


def test_reset_forgets_and_the_next_call_works() -> None:
    model = Model().eval()
    compiled = torch.compile(model, backend="cgcompile", options={"compiler": "eager"})
    check(model, compiled)
    torch._dynamo.reset()
    assert cgcompile.runtime(compiled).graphs == ()
    check(model, compiled)
    assert len(cgcompile.runtime(compiled).graphs) == 1


def test_compiled_graphs_die_with_dynamos_cache() -> None:
    import gc

    backend = cgcompile.Backend(compiler="eager")
    model = Model().eval()
    compiled = torch.compile(model, backend=backend)
    check(model, compiled)
    (graph,) = backend.graphs
    del graph
    assert len(backend.graphs) == 1
    del compiled
    torch._dynamo.reset_code_caches()
    gc.collect()
    assert backend.graphs == ()


def test_a_failed_compilation_leaves_nothing_behind() -> None:
    def broken(gm, fake_inputs):
        raise RuntimeError("broken")

    model = Model().eval()
    backend = cgcompile.Backend(compiler=broken)
    inner(torch.compile(model, backend=backend))
    assert backend.graphs == ()
    good = torch.compile(model, backend=cgcompile.Backend(compiler="eager"))
    check(model, good)


def test_the_origins_of_settings_are_no_setting() -> None:
    with pytest.raises(ConfigError, match="there is no setting '_origins'"):
        CompilationConfig(_origins={"mode": ("argument", 1)})  # type: ignore[call-arg]
