"""Fixtures of all tests: a fresh Dynamo for each, and the skip of GPU tests where there is none."""

import gc
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

# On 2.11 it reads every op that the dispatcher knows, and fails after tests whose ops are gone.
import torch._inductor.decomposition

# pytest 9.2 and later give their handlers to every logger that does not propagate. torch takes any
# handler of this one for the wish to trace: each graph, guard and fake tensor would be written down
# as JSON, which costs a sixth of the time of tests that compile.
logging.getLogger("torch.__trace").propagate = True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_cuda = torch.cuda.is_available()
    beside_others = os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") != "1"
    for item in items:
        if "gpu" not in item.keywords:
            continue
        if not on_cuda:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif "alone" in item.keywords and beside_others:
            item.add_marker(pytest.mark.skip(reason="measures the whole device: run it with -n0"))


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Models here are small: more threads only wait for each other, and for other workers."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True, scope="session")
def nothing_kept() -> Iterator[None]:
    """Nothing is written into the user's home, and no test finds what another one compiled."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("CGCOMPILE_")]:
            patch.delenv(name)  # settings of the machine must not change what is tested
        patch.setenv("CGCOMPILE_CACHE_DIR", "off")
        yield


@pytest.fixture(scope="module")
def earlier_is_frozen() -> Iterator[None]:
    """Collections skip what other files have left in torch's caches.

    For files in which each of many captures collects garbage; not where whole batches of captures
    do, which look at what is frozen.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where the tensors of a test are: those of ``cpu`` are recorded by the host recorder."""
    return request.param


@pytest.fixture
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Sets what the operator of ``entry_support.Hooked`` does."""
    from entry_support import Hook

    def put(function: Any) -> None:
        monkeypatch.setattr(Hook, "function", staticmethod(function))

    return put
