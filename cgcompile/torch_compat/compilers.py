"""torch's own compilers, and three passes over ATen graphs that correct what Inductor fuses.

Note [Scaled additions]
Inductor's pattern for ``mm(a, b) + x`` matches ``torch.add(mm(a, b), x, alpha=2)`` as well and
drops the 2 (2.11 and 2.13, with ``torch.compile`` too; 2.15 is right). So before its patterns run,
the factor becomes a product of its own (:func:`spell_out`), on all devices.

Note [Residual additions]
Inductor turns ``mm(a, b) + x`` into ``addmm(x, a, b)``, unless all uses of the sum are pointwise.
A result of a piece is not a pointwise use, and the residual stream is a result of nearly every
piece. cuBLAS adds in place, so ``addmm`` first copies ``x`` into its result: one more kernel that
reads and writes all of it. A separate addition (:func:`take_apart`) is fused into the kernels that
read the sum, as in a model that is compiled whole, and rounds as eager does. A bias, of one
dimension, stays: the product's own kernel adds it; so does an ``addmm`` of the user. torch 2.15
checks what is added; there the pass changes nothing.

Note [Ends of slices]
With ``backed_size_oblivious``, Inductor of torch 2.11 cannot compare the end of ``x[1:]``, the
largest integer, with a dynamic size, and fails (with ``torch.compile`` too; 2.13 is right). So the
first pass replaces such an end by the size itself (:func:`end_slices`).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

log = logging.getLogger(__name__)

Pass = Callable[[fx.Graph], None]
_OPEN_END = 2**63 - 1  # of x[1:]


def take_apart(graph: fx.Graph) -> None:
    """Replace each ``addmm`` of a whole tensor on CUDA that Inductor made by ``mm`` and ``add``."""
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.addmm.default):
        if _from_the_trace(node) or not _adds_whole_tensor(node):
            continue
        added, one, other = node.args
        with graph.inserting_before(node):
            product = graph.call_function(aten.mm.default, (one, other))
            total = graph.call_function(aten.add.Tensor, (product, added))
        product.meta.update(node.meta)
        total.meta.update(node.meta)
        # A new value: Inductor recognises views by shared memory.
        product.meta["val"] = torch.empty_like(node.meta["val"])
        node.replace_all_uses_with(total)
        graph.erase_node(node)


def _from_the_trace(node: fx.Node) -> bool:
    """Return whether the user wrote a node: those of Inductor's patterns have no number."""
    return "seq_nr" in node.meta


def _adds_whole_tensor(node: fx.Node) -> bool:
    if node.kwargs or len(node.args) != 3:
        return False
    value, result = node.args[0].meta.get("val"), node.meta.get("val")  # type: ignore[union-attr]
    if not (isinstance(value, torch.Tensor) and isinstance(result, torch.Tensor)):
        return False
    if result.device.type != "cuda" or value.ndim != 2:
        return False
    sizes = zip(value.shape, result.shape, strict=True)
    return all(statically_known_true(size == other) for size, other in sizes)


def spell_out(graph: fx.Graph) -> None:
    """Replace each addition of a scaled tensor by a product and an addition."""
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        alpha = node.kwargs.get("alpha", 1)
        if alpha == 1 or not isinstance(node.args[1], fx.Node):
            continue
        one, other = node.args
        with graph.inserting_before(node):
            product = graph.call_function(aten.mul.Tensor, (other, alpha))
            total = graph.call_function(aten.add.Tensor, (one, product))
        product.meta.update(other.meta)
        total.meta.update(node.meta)
        product.meta["val"] = torch.empty_like(other.meta["val"])
        node.replace_all_uses_with(total)
        graph.erase_node(node)


def end_slices(graph: fx.Graph) -> None:
    """Replace the open end of each slice of a dynamic dimension by its size."""
    aten = torch.ops.aten
    for target, tensors in ((aten.slice.Tensor, 1), (aten.slice_scatter.default, 2)):
        for node in graph.find_nodes(op="call_function", target=target):
            source, rest = node.args[0], node.args[tensors:]
            if node.kwargs or len(rest) < 3 or rest[2] != _OPEN_END:
                continue
            dim, start, _, *step = rest
            size = source.meta["val"].shape[dim]
            if isinstance(size, int):
                continue
            with graph.inserting_before(node):
                end = graph.call_function(aten.sym_size.int, (source, dim))
            end.meta["val"] = size
            node.args = (*node.args[:tensors], dim, start, end, *step)


def first_pass(graph: fx.Graph) -> None:
    """Run the passes that correct what Inductor does to a piece."""
    spell_out(graph)
    end_slices(graph)


@cache
def _pass_type() -> type:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Own(CustomGraphPass):
        """A pass of ours, and the user's pass after it."""

        def __init__(self, run: Pass, then: Any) -> None:
            self._run, self.then = run, then

        def __call__(self, graph: fx.Graph) -> None:
            self._run(graph)
            if self.then is not None:
                self.then(graph)

        def uuid(self) -> Any:
            # None disables caches: a plain function has no identity that lasts.
            inner = "" if self.then is None else getattr(self.then, "uuid", lambda: None)()
            return None if inner is None else f"cgcompile {self._run.__name__} 1, {inner!r}"

    return Own


def unfused_residuals(then: Pass | None) -> Any:
    """Return Inductor's ``post_grad_custom_post_pass``, see Note [Residual additions]."""
    # That is the user's own pass alone if it has no ``uuid``, so that caches stay on.
    if then is not None and not hasattr(then, "uuid"):
        return then
    return _pass_type()(take_apart, then)


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
    except InductorError as error:  # no other: restarts of a trace are errors as well
        if "combo_kernels" in patches or not settings.get("combo_kernels"):
            raise
        log.info("without combined kernels, because of %s", str(error).splitlines()[0])
    return compiled({**settings, "combo_kernels": False})


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
    own = wanted.get(_FIRST_PASS, getattr(config, _FIRST_PASS))
    wanted[_FIRST_PASS] = _pass_type()(first_pass, own)  # results depend on it
    if torch.cuda.is_available():
        own = wanted.get(_LAST_PASS, getattr(config, _LAST_PASS))
        wanted[_LAST_PASS] = unfused_residuals(own)
        if "combo_kernels" not in patches:
            wanted = {**_COMBINED_KERNELS, **wanted}
    return {name: value for name, value in wanted.items() if is_inductor_option(name)}


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


# No CUDA graphs and no partition of Inductor's own inside a piece; the wrapped region makes a
# compiled piece one call for a dispatch mode, which the host recorder needs.
_PIECE_PATCHES: Mapping[str, Any] = {
    "triton.cudagraphs": False,
    "graph_partition": False,
    "wrap_inductor_compiled_regions": True,
}

# Combine independent kernels, such as the rotations of queries and keys. Only pointwise ones:
# reductions over a dynamic dimension do not compile (2.11, 2.13).
_COMBINED_KERNELS: Mapping[str, Any] = {"combo_kernels": True, "combo_kernels_pointwise_only": True}
_FIRST_PASS, _LAST_PASS = "post_grad_custom_pre_pass", "post_grad_custom_post_pass"


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
