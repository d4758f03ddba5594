"""Fixtures of all tests: a fresh Dynamo for each, and the skip of GPU tests where there is none."""

from collections.abc import Iterator

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of the machine must not change what is tested."""
    import os

    for name in list(os.environ):
        if name.startswith("CGCOMPILE_"):
            monkeypatch.delenv(name)
