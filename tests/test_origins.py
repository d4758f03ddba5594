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
    monkeypatch.setenv("CGCOMPILE_STRICT", "1")


def test_the_first_that_speaks_is_named() -> None:
    assert chosen(CompilationConfig()) == {"strict": "environment"}
    start = CompilationConfig(compiler="aot", poison=False)  # a default, said aloud
    assert chosen(start) == {
        "compiler": "argument",
        "poison": "argument",
        "strict": "environment",
    }
    config = CompilationConfig.resolve(
        start, options={"poison": "1", "num_warmups": 2}, arguments={"strict": False}
    )
    assert chosen(config) == {
        "compiler": "argument",
        "poison": "options",
        "num_warmups": "options",
        "strict": "argument",
    }
    assert (config.poison, config.strict, config.num_warmups) == (True, False, 2)
    mode = CompilationConfig.resolve(torch_mode="max-autotune-no-cudagraphs")
    assert mode.cudagraph_mode is CUDAGraphMode.NONE
    assert mode.origins["cudagraph_mode"] == "mode"


def test_origins_do_not_tell_settings_apart() -> None:
    said, unsaid = CompilationConfig(strict=True), CompilationConfig()
    assert said.origins != unsaid.origins
    assert said == unsaid
    assert "origins" not in repr(said)
    assert sorted(said.origins) == sorted(CompilationConfig.names())
    said.origins.clear()
    assert said.origins["strict"] == "argument"
    for other in (copy.copy(said), copy.deepcopy(said), pickle.loads(pickle.dumps(said))):
        assert (other, other.origins) == (said, said.origins)
    assert chosen(cgcompile.Backend(said, poison=True).config) == {
        "strict": "argument",
        "poison": "argument",
    }


def test_what_is_not_replaced_keeps_its_origin() -> None:
    start = CompilationConfig.resolve(options={"num_warmups": 2}, arguments={"poison": True})
    replaced = dataclasses.replace(start, compiler="aot", poison=False, cudagraph_mode="PIECEWISE")
    assert chosen(start) == {
        "num_warmups": "options",
        "poison": "argument",
        "strict": "environment",
    }
    assert chosen(replaced) == {
        **chosen(start),
        "compiler": "argument",
        "cudagraph_mode": "argument",
    }
    again = dataclasses.replace(replaced, num_warmups=3)
    assert chosen(again) == {**chosen(replaced), "num_warmups": "argument"}
    assert (replaced.compiler, again.compiler, again.num_warmups) == ("aot", "aot", 3)
    assert chosen(dataclasses.replace(CompilationConfig())) == {"strict": "environment"}
    assert dataclasses.replace(start) == start
    with pytest.raises(ConfigError, match="_origins"):
        CompilationConfig(_origins=None)
