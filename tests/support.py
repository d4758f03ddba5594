"""What several test files share: run a case against eager, look at what was really compiled."""

from typing import Any

import torch
from cases import CASES, Case, library
from torch import nn

import cgcompile


def build(case: Case, device: str = "cpu") -> nn.Module:
    library()
    torch.manual_seed(0)
    return case.build().eval().to(device)


def clone(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(each.clone() for each in inputs)


def mark(case: Case, inputs: tuple[torch.Tensor, ...]) -> None:
    """Make the batch dimension dynamic, or whatever the case wants instead."""
    if case.prepare is not None:
        case.prepare(inputs)
    if case.prepare is not None or case.dynamic is not None:
        return
    for each in inputs:
        torch._dynamo.mark_dynamic(each, 0)


def backend_for(case: Case, compiler: Any, **more: Any) -> cgcompile.Backend:
    settings = {**case.settings, **more}
    if compiler == "inductor":
        settings["inductor_options"] = case.inductor
    return cgcompile.Backend(compiler=compiler, **settings)


def split_texts(case: Case, device: str = "cpu", **settings: Any) -> str:
    """The printed splits of the graphs that the first batch makes, without line numbers."""
    torch._dynamo.reset()
    model, backend = build(case, device), backend_for(case, "eager", **settings)
    inputs = tuple(each.to(device) if each.dim() else each for each in case.inputs(case.sizes[0]))
    mark(case, inputs)
    with torch.no_grad(), torch._dynamo.config.patch(**case.dynamo):
        torch.compile(model, backend=backend, dynamic=case.dynamic)(*inputs)
    return "\n\n".join(graph.split.text(lines=False) for graph in backend.graphs)


def compiled_graph(name: str, **settings: Any) -> cgcompile.entry.CompiledGraph:
    """The first graph of a case, compiled with uncompiled pieces; it keeps its model alive."""
    case = CASES[name]
    backend = backend_for(case, "eager", **settings)
    inputs = case.inputs(case.sizes[0])
    mark(case, inputs)
    with torch.no_grad(), torch._dynamo.config.patch(**case.dynamo):
        model = torch.compile(build(case), backend=backend, dynamic=case.dynamic)
        model(*inputs)
    graph = backend.graphs[0]
    graph.keep_alive = model  # Dynamo's cache goes with the model
    return graph


def check_against_eager(case: Case, compiler: Any, device: str = "cpu") -> cgcompile.Backend:
    """Compare every batch size with eager: results, and inputs that the model writes.

    Inputs are random at every call. Random models draw the same numbers on both sides.
    """
    model, backend = build(case, device), backend_for(case, compiler)
    with torch.no_grad(), torch._dynamo.config.patch(**case.dynamo):
        compiled = torch.compile(model, backend=backend, dynamic=case.dynamic)
        previous = None
        for position, size in enumerate(case.sizes):
            with torch.device(device):
                inputs = case.inputs(size)
            given = clone(inputs)
            if position == 0:
                mark(case, given)
            expected = _seeded(model, inputs)
            found = _seeded(compiled, given)
            tolerance = _tolerance(case, compiler, device)
            torch.testing.assert_close(found, expected, **tolerance)
            torch.testing.assert_close(given, inputs, **tolerance)
            first = _first_tensor(found)
            assert first.abs().sum() > 0
            assert previous is None or first.shape != previous.shape or (first != previous).any()
            previous = first
    assert len(backend.graphs) >= case.graphs
    assert sum(graph.counters.calls for graph in backend.graphs) >= len(case.sizes) * case.graphs
    assert not any(graph.counters.plain for graph in backend.graphs)
    return backend


def _seeded(function: Any, inputs: tuple[torch.Tensor, ...]) -> Any:
    torch.manual_seed(1)
    return function(*inputs)


def _first_tensor(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


def _tolerance(case: Case, compiler: Any, device: str) -> dict[str, float]:
    if compiler == "eager" and device == "cpu" and case.same_kernels:
        return {"rtol": 0.0, "atol": 0.0}  # bitwise
    return dict(zip(("rtol", "atol"), case.tolerance, strict=True))
