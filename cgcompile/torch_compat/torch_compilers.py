"""torch's own compilers, for a whole graph and for one piece of it."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from cgcompile.torch_compat.dynamo import restarts
from cgcompile.torch_compat.inductor_passes import with_passes

log = logging.getLogger(__name__)


@cache
def inductor_option_names() -> frozenset[str]:
    """Return the names of Inductor's settings, without older names of the same settings."""
    import torch._inductor.config as config

    return frozenset(config.get_config_copy())


def is_inductor_option(name: str) -> bool:
    """Return whether Inductor has a setting of this name, new or old."""
    import torch._inductor.config as config

    try:
        config.get_type(name)
    except KeyError:
        return False
    return True


def inductor_mode_options(torch_mode: str) -> dict[str, Any]:
    """Return Inductor's settings for a ``torch.compile`` mode, without its own CUDA graphs."""
    from torch._inductor import list_mode_options

    options = dict(list_mode_options(torch_mode))
    options.pop("triton.cudagraphs", None)
    return options


def compile_whole(
    gm: fx.GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compile an unsplit graph as ``torch.compile(backend="inductor")`` would."""
    from torch._dynamo import lookup_backend

    inductor: Any = lookup_backend("inductor")
    compiled: Callable[..., Any] = inductor(gm, list(inputs), config_patches=dict(patches))
    return compiled


def compile_standalone(
    gm: fx.GraphModule, fake_inputs: Sequence[Any], patches: Mapping[str, Any], aot: bool = False
) -> Any:
    """Compile one piece with Inductor, for all sizes of the symbols in ``fake_inputs``."""
    # ``gm`` is not changed. Outputs of the result are a list. With ``aot`` it can be saved.
    tensors = (value for value in fake_inputs if isinstance(value, torch.Tensor))
    if any(tensor.device.type == "cuda" for tensor in tensors):
        start_compile_workers()  # before the imports of the next line, which take seconds
    from torch._inductor import standalone_compile

    def compiled(settings: dict[str, Any]) -> Any:
        return standalone_compile(
            _with_a_tensor_output(gm),
            list(fake_inputs),
            dynamic_shapes="from_graph",
            options={"config_patches": settings},
            aot=aot,
        )

    settings = known_patches(patches)
    try:
        return compiled(settings)
    except restarts():
        raise
    except RuntimeError as error:  # combined kernels are a likely cause: torch has them off
        if "combo_kernels" in patches or not settings.get("combo_kernels"):
            raise
        log.info("compiled again without combined kernels, because of %s", error)
        return compiled(known_patches({**patches, "combo_kernels": False}))


def start_compile_workers() -> None:
    """Start the processes in which Inductor compiles Triton kernels; does not wait for them."""
    # They import torch for seconds; until then Inductor compiles kernel by kernel in this process.
    # No effect if they run, without Triton, or if ``TORCH_WARM_POOL`` disables them.
    from torch._inductor.async_compile import maybe_warm_pool

    maybe_warm_pool()


def known_patches(patches: Mapping[str, Any]) -> dict[str, Any]:
    """Return Inductor's settings for a piece, without those that this version of torch lacks."""
    import torch._inductor.config as config

    wanted = {**_PIECE_PATCHES, **patches}
    if wanted.get("cpp_wrapper", config.cpp_wrapper):
        # Otherwise torch 2.11 runs the whole piece while it compiles it.
        wanted |= {_TUNING: True, **patches}
    if torch.cuda.is_available() and "combo_kernels" not in patches:
        wanted = {**_COMBINED_KERNELS, **wanted}
    return {name: value for name, value in with_passes(wanted).items() if is_inductor_option(name)}


def _with_a_tensor_output(gm: fx.GraphModule) -> fx.GraphModule:
    """Return ``gm``; where it has no outputs, a copy that returns an input, to be dropped."""
    # ``standalone_compile`` reads the fake mode, and with it the sizes, from the outputs.
    inputs = gm.graph.find_nodes(op="placeholder")
    inputs = [n for n in inputs if isinstance(n.meta.get("example_value"), torch.Tensor)]
    if gm.graph.output_node().args[0] or not inputs:
        return gm
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(gm.graph, copies)
    graph.output((copies[inputs[0]],))
    return fx.GraphModule(gm, graph)


_TUNING = "triton.autotune_at_compile_time"

# No CUDA graphs and no partition of Inductor's own inside a piece; the wrapped region makes a
# compiled piece one call for a dispatch mode, which the host recorder needs. Kernels are tuned by
# the first call, on its inputs: ``standalone_compile`` would run them on made-up ones, of sizes
# that the model may not have. A cache of 8 rows indexed with 17 ends the CUDA context.
_PIECE_PATCHES: Mapping[str, Any] = {
    "triton.cudagraphs": False,
    "graph_partition": False,
    "wrap_inductor_compiled_regions": True,
    _TUNING: False,
}

# Combine independent kernels, such as the rotations of queries and keys. Only pointwise ones:
# reductions over a dynamic dimension do not compile (2.11, 2.13).
_COMBINED_KERNELS: Mapping[str, Any] = {"combo_kernels": True, "combo_kernels_pointwise_only": True}


def compile_aten(
    gm: fx.GraphModule,
    fake_inputs: Sequence[Any],
    compiler: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """Lower a piece to its functional ATen graph (functorch) and compile that with ``compiler``."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def boxed(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return make_boxed_func(compiler(graph, inputs))

    lower = aot_autograd(fw_compiler=boxed, keep_inference_input_mutations=True)
    compiled: Callable[..., Any] = lower(gm, list(fake_inputs))
    # Without the wrapper that disables Dynamo at each call: no caller of a piece is traced.
    return getattr(compiled, "__wrapped__", compiled)
