"""Where each setting comes from: kept beside the settings, no part of what makes two equal."""

import copy
import dataclasses
import pickle

import pytest

import cgcompile
from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.errors import ConfigError


def chosen(config: CompilationConfig) -> dict[str, str]:
    return {name: origin for name, origin in config.origins.items() if origin != "default"}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CGCOMPILE_CACHE_DIR")
    monkeypatch.setenv("CGCOMPILE_ON_FALLBACK", "raise")


def test_the_first_that_speaks_is_named() -> None:
    assert chosen(CompilationConfig()) == {"on_fallback": "environment"}
    start = CompilationConfig(compiler="aot", debug=False)  # a default, said aloud
    assert chosen(start) == {
        "compiler": "argument",
        "debug": "argument",
        "on_fallback": "environment",
    }
    config = CompilationConfig.resolve(
        start, options={"debug": "poison", "num_warmups": 2}, arguments={"on_fallback": "warn"}
    )
    assert chosen(config) == {
        "compiler": "argument",
        "debug": "options",
        "num_warmups": "options",
        "on_fallback": "argument",
    }
    assert (config.debug, config.on_fallback, config.num_warmups) == (("poison",), "warn", 2)
    mode = CompilationConfig.resolve(torch_mode="max-autotune-no-cudagraphs")
    assert mode.cudagraph_mode is CUDAGraphMode.NONE
    assert mode.origins["cudagraph_mode"] == "mode"


def test_origins_do_not_tell_settings_apart() -> None:
    said, unsaid = CompilationConfig(on_fallback="raise"), CompilationConfig()
    assert said.origins != unsaid.origins
    assert said == unsaid
    assert "origins" not in repr(said)
    assert sorted(said.origins) == sorted(CompilationConfig.names())
    said.origins.clear()
    assert said.origins["on_fallback"] == "argument"
    for other in (copy.copy(said), copy.deepcopy(said), pickle.loads(pickle.dumps(said))):
        assert (other, other.origins) == (said, said.origins)
    assert chosen(cgcompile.Backend(said, debug="poison").config) == {
        "on_fallback": "argument",
        "debug": "argument",
    }


def test_what_is_not_replaced_keeps_its_origin() -> None:
    start = CompilationConfig.resolve(options={"num_warmups": 2}, arguments={"debug": "poison"})
    replaced = dataclasses.replace(start, compiler="aot", debug=False, cudagraph_mode="PIECEWISE")
    assert chosen(start) == {
        "num_warmups": "options",
        "debug": "argument",
        "on_fallback": "environment",
    }
    assert chosen(replaced) == {
        **chosen(start),
        "compiler": "argument",
        "cudagraph_mode": "argument",
    }
    again = dataclasses.replace(replaced, num_warmups=3)
    assert chosen(again) == {**chosen(replaced), "num_warmups": "argument"}
    assert (replaced.compiler, again.compiler, again.num_warmups) == ("aot", "aot", 3)
    assert chosen(dataclasses.replace(CompilationConfig())) == {"on_fallback": "environment"}
    assert dataclasses.replace(start) == start
    with pytest.raises(ConfigError, match="_origins"):
        CompilationConfig(_origins=None)
