"""Run a function with and without the eliminating passes, compare, and say what went."""

from collections.abc import Callable
from typing import Any

import torch

import cgcompile
from cgcompile.passes import OPTIONAL
from lib.cases import library

SPLITTING = ("cgtest::scale_", "cgtest::attend")


def aliases(inputs: Any, results: Any) -> list[tuple[bool, bool]]:
    """Of each two tensors given or returned: whether they share memory, whether they are one."""
    tensors = [t for t in (*inputs, *results) if isinstance(t, torch.Tensor)]
    pairs = [(a, b) for i, a in enumerate(tensors) for b in tensors[:i]]
    return [(a.untyped_storage()._cdata == b.untyped_storage()._cdata, a is b) for a, b in pairs]


def run(
    function: Callable[..., Any], inputs: tuple[torch.Tensor, ...], **settings: Any
) -> tuple[tuple[Any, ...], tuple[torch.Tensor, ...], cgcompile.Backend | None]:
    """(results, inputs afterwards, backend); eager without settings."""
    library()
    arguments = tuple(each.clone() for each in inputs)
    backend = None
    if settings:
        torch._dynamo.reset()
        splitting = settings.pop("splitting_ops", SPLITTING)
        backend = cgcompile.Backend(splitting_ops=splitting, **settings)
        function = torch.compile(function, backend=backend, dynamic=True, fullgraph=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        results = function(*arguments)
    return results if isinstance(results, tuple) else (results,), arguments, backend


def removed(
    function: Callable[..., Any], *inputs: torch.Tensor, compiler: str = "eager", **settings: Any
) -> dict[str, dict[str, int]]:
    """What each eliminating pass took away; results and aliases are those of eager, bit by bit."""
    expected, inputs_after, _ = run(function, inputs)
    for disabled in ((), OPTIONAL):
        settings |= {"compiler": compiler, "passes": [f"-{name}" for name in disabled]}
        results, inputs_written, backend = run(function, inputs, **settings)
        torch.testing.assert_close(results, expected, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(inputs_written, inputs_after, rtol=0, atol=0, equal_nan=True)
        if compiler == "eager":
            assert aliases(inputs_written, results) == aliases(inputs_after, expected)
        assert backend is not None
        (graph,) = backend.graphs
        records = {r.name: dict(r.difference) for r in graph.split.passes if r.name in OPTIONAL}
        assert list(records) == [name for name in OPTIONAL if name not in disabled]
        if not disabled:
            kept = records
    return kept
