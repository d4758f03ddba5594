"""torch's own compilers. See ``cgcompile/compat/__init__.py``."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from cgcompile.compat.residuals import scaled_apart, unfused_residuals

log = logging.getLogger(__name__)


@cache
def inductor_option_names() -> frozenset[str]:
    import torch._inductor.config as config

    return frozenset(config._config)


def inductor_mode_options(torch_mode: str) -> dict[str, Any]:
    """Inductor's settings for a ``torch.compile`` mode, without its own CUDA graphs."""
    from torch._inductor import list_mode_options

    options = dict(list_mode_options(torch_mode))
    options.pop("triton.cudagraphs", None)
    return options


def compile_whole(
    gm: fx.GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compile an unsplit graph as ``torch.compile(backend="inductor")`` would."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, list(inputs), config_patches=dict(patches))


def compile_standalone(
    gm: fx.GraphModule, fake_inputs: Sequence[Any], patches: Mapping[str, Any], aot: bool = False
) -> Any:
    """Compile one piece with Inductor, for all sizes of the symbols in ``fake_inputs``.

    ``gm`` is not changed. Outputs of the result are a list. With ``aot`` it can be saved.
    """
    if any(isinstance(each, torch.Tensor) and each.device.type == "cuda" for each in fake_inputs):
        start_compile_workers()  # before the imports of the next line, which take seconds
    from torch._inductor import standalone_compile
    from torch._inductor.exc import InductorError

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
    except InductorError as error:
        if "combo_kernels" in patches or not settings.get("combo_kernels"):
            raise
        log.info("without combined kernels, because of %s", str(error).splitlines()[0])
    return compiled({**settings, "combo_kernels": False})


def start_compile_workers() -> None:
    """Start the processes in which Inductor compiles Triton kernels; does not wait for them.

    They import torch for seconds. Until they answer, Inductor compiles one kernel after the other
    in this process, so the sooner the better. Where they run already, where there is no Triton, or
    where torch's ``TORCH_WARM_POOL`` says so, nothing is started.
    """
    from torch._inductor.async_compile import maybe_warm_pool

    maybe_warm_pool()


def known_patches(patches: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's settings for a piece; the user's were checked, ours may be unknown to a torch."""
    import torch._inductor.config as config

    wanted = {**_PIECE_PATCHES, **patches}
    wanted[_FIRST_PASS] = scaled_apart(wanted.get(_FIRST_PASS, getattr(config, _FIRST_PASS)))
    if torch.cuda.is_available():
        own = wanted.get(_LAST_PASS, getattr(config, _LAST_PASS))
        wanted[_LAST_PASS] = unfused_residuals(own)
        if "combo_kernels" not in patches:
            wanted = {**_COMBINED_KERNELS, **wanted}
    return {name: value for name, value in wanted.items() if name in inductor_option_names()}


def _with_a_tensor_output(gm: fx.GraphModule) -> fx.GraphModule:
    """``gm``, or a copy of one without outputs that returns an input: callers drop it.

    ``standalone_compile`` looks for the fake mode, and with it the sizes, in the outputs.
    """
    tensor_input = next(
        (
            node
            for node in gm.graph.find_nodes(op="placeholder")
            if isinstance(node.meta.get("example_value"), torch.Tensor)
        ),
        None,
    )
    if gm.graph.output_node().args[0] or tensor_input is None:
        return gm
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(gm.graph, copies)
    graph.output((copies[tensor_input],))
    return fx.GraphModule(gm, graph)


# No CUDA graphs and no partition of Inductor's own inside a piece; the wrapped region makes a
# compiled piece one call for a dispatch mode, which the host recorder needs.
_PIECE_PATCHES: Mapping[str, Any] = {
    "triton.cudagraphs": False,
    "graph_partition": False,
    "wrap_inductor_compiled_regions": True,
}

# Kernels that do not depend on each other become one, as the rotations of queries and of keys.
# Only pointwise ones: of reductions, those over a dynamic dimension do not compile (2.11, 2.13).
_COMBINED_KERNELS: Mapping[str, Any] = {"combo_kernels": True, "combo_kernels_pointwise_only": True}
_FIRST_PASS, _LAST_PASS = "post_grad_custom_pre_pass", "post_grad_custom_post_pass"


def compile_aten(
    gm: fx.GraphModule,
    fake_inputs: Sequence[Any],
    compiler: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """Lower a piece to its functional ATen graph and give that to ``compiler`` (functorch)."""
    from functorch.compile import aot_module_simplified, make_boxed_func

    def boxed(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return make_boxed_func(compiler(graph, inputs))

    return aot_module_simplified(
        gm, list(fake_inputs), fw_compiler=boxed, keep_inference_input_mutations=True
    )
