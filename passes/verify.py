"""What must be true of the form of a graph before and after every pass.

:func:`problem_in` checks: the graph is well formed (FX's own lint), the inputs are the ones that
Dynamo will pass, and the number of outputs is unchanged. Every computing node has a fake value
then, which ``fakes.py`` sees to, and each output is what it was, which ``outputs.py`` checks.
"""

from torch import fx

from cgcompile import compat


def signature(gm: fx.GraphModule) -> tuple[tuple[str, ...], int]:
    """What a pass must keep: the names of the inputs in order, and the number of outputs."""
    inputs = tuple(str(node.target) for node in gm.graph.find_nodes(op="placeholder"))
    return inputs, len(compat.tree_leaves(gm.graph.output_node().args[0]))


def problem_in(gm: fx.GraphModule, expected: tuple[tuple[str, ...], int]) -> str | None:
    """The first thing wrong with the graph, in words; None if it is valid."""
    try:
        gm.graph.lint()
        found = signature(gm)
    except Exception as error:  # lint raises RuntimeError, KeyError, AttributeError, ...
        return f"{type(error).__name__}: {error}"
    if found[0] != expected[0]:
        return f"its inputs are {list(found[0])}, expected {list(expected[0])}"
    if found[1] != expected[1]:
        return f"it has {found[1]} outputs, expected {expected[1]}"
    return None
