"""The private names of torch that cgcompile reads, and the versions of torch it was tried on.

A new version of torch may move or rename each of them without notice. The rule: a name or attribute
that is read in this package is in the table here; ``tests/test_private_names.py`` compares the two.
"""

import importlib
import logging
from functools import cache

import torch

log = logging.getLogger(__name__)

TESTED = ("2.11", "2.13", "2.15")
_ALL = " ".join(TESTED)

# (module, names in it, versions that they were tried on). What begins with "_cuda" or "_CUDA" is in
# builds with CUDA alone, and three others of ``torch._C`` are missing in some builds without it.
PRIVATE_NAMES: tuple[tuple[str, str, str], ...] = (
    ("functorch.compile", "aot_module_simplified make_boxed_func", _ALL),
    ("torch", "_neg_view", _ALL),
    ("torch._C", "DispatchKey _AutoDispatchBelowAutograd _InferenceMode", _ALL),
    ("torch._C", "_construct_storage_from_data_pointer _cuda_clearCublasWorkspaces", _ALL),
    ("torch._C", "_cuda_getCurrentRawStream _cuda_getCurrentStream _cuda_getDevice", _ALL),
    ("torch._C", "_cuda_isCurrentStreamCapturing _cuda_memorySnapshot _cuda_setStream", _ALL),
    ("torch._C", "_cuda_endAllocateToPool _cuda_releasePool", "2.11"),
    ("torch._C", "_host_emptyCache", _ALL),
    ("torch._C", "_current_graph_task_id _dispatch_get_all_op_names", _ALL),
    ("torch._C", "_get_sdp_priority_order _is_any_autocast_enabled _set_grad_enabled", _ALL),
    ("torch._C", "_set_storage_data_ptr_access_error_msg", _ALL),
    ("torch._C", "_tensors_data_ptrs_at_indices_equal", _ALL),
    ("torch._C._CUDAGraph", "replay", _ALL),
    ("torch._C._dynamo.guards", "TensorGuards", _ALL),
    ("torch._C._functorch", "is_functorch_wrapped_tensor peek_interpreter_stack", _ALL),
    ("torch._dispatch.python", "enable_python_dispatcher", _ALL),
    ("torch._dynamo", "config lookup_backend", _ALL),
    ("torch._dynamo.cache_size", "exceeds_recompile_limit", _ALL),
    ("torch._dynamo.convert_frame", "get_traced_fn", _ALL),
    ("torch._dynamo.decorators", "mark_dynamic mark_unbacked", _ALL),
    ("torch._dynamo.eval_frame", "innermost_backend", _ALL),
    ("torch._dynamo.exc", "RestartAnalysis SkipFrame TensorifyScalarRestartAnalysis", _ALL),
    ("torch._dynamo.exc", "TorchDynamoException", _ALL),
    ("torch._dynamo.guards", "CheckFunctionManager GuardManagerWrapper", _ALL),
    ("torch._dynamo.source", "ConstantSource", _ALL),
    ("torch._dynamo.symbolic_convert", "TensorifyState", _ALL),
    ("torch._dynamo.utils", "CleanupHook counters dynamo_timed get_metrics_context", _ALL),
    ("torch._functorch", "config", _ALL),
    ("torch._guards", "CompileContext TracingContext tracing", _ALL),
    ("torch._inductor", "config list_mode_options list_options standalone_compile", _ALL),
    ("torch._inductor.async_compile", "maybe_warm_pool", _ALL),
    ("torch._inductor.custom_graph_pass", "CustomGraphPass", _ALL),
    ("torch._inductor.standalone_compile", "AOTCompiledArtifact", _ALL),
    ("torch._inductor.utils", "clear_caches", _ALL),
    ("torch._library.triton", "get_triton_kernels_for_op", _ALL),
    ("torch._logging", "_internal", _ALL),
    ("torch._ops", "HigherOrderOperator _higher_order_ops", _ALL),
    ("torch._subclasses.fake_tensor", "FakeTensorMode", _ALL),
    ("torch.amp", "_enter_autocast _exit_autocast", _ALL),
    ("torch.autograd.forward_ad", "_current_level", _ALL),
    ("torch.autograd.grad_mode", "_enter_inference_mode _exit_inference_mode", _ALL),
    ("torch.autograd.profiler", "_is_profiler_enabled", _ALL),
    ("torch.distributed.distributed_c10d", "_resolve_process_group", _ALL),
    ("torch.fx.experimental", "_config", _ALL),
    ("torch.fx.experimental.symbolic_shapes", "ConstraintViolationError DimDynamic", _ALL),
    ("torch.fx.experimental.symbolic_shapes", "GuardOnDataDependentSymNode ShapeEnv", _ALL),
    ("torch.fx.experimental.symbolic_shapes", "constrain_range statically_known_true free_unbacked_symbols", _ALL),
    ("torch.fx.graph_module", "_loader", _ALL),
    ("torch.fx.node", "_get_qualified_name", _ALL),
    ("torch.library", "_impls", _ALL),
    ("torch.ops._c10d_functional.wait_tensor", "default", _ALL),
    ("torch.utils", "_pytree", _ALL),
    ("torch.utils._python_dispatch", "TorchDispatchMode is_traceable_wrapper_subclass", _ALL),
    ("torch.utils._python_dispatch", "_disable_current_modes _get_current_dispatch_mode", _ALL),
    ("torch.utils._sympy.printers", "PythonPrinter", _ALL),
)
# Attributes of objects: (whose, names, versions). Whether they exist shows with an object alone.
PRIVATE_ATTRIBUTES: tuple[tuple[str, str, str], ...] = (
    ("a storage", "_cdata", _ALL),
    ("a symbolic number", "_expr", _ALL),
    ("an op", "_schema _op_dk", _ALL),
    ("an op of torch.library.custom_op", "_opoverload", _ALL),
    ("a placeholder of Dynamo", "_dynamo_source", _ALL),
    ("a graph module of Dynamo", "_param_name_to_source", _ALL),
    ("a module", "_forward_hooks _forward_pre_hooks _compiled_call_impl", _ALL),
    ("a module of torch.compile", "_orig_mod", _ALL),
    ("a function of torch.compile", "_torchdynamo_orig_callable", _ALL),
    ("CheckFunctionManager", "_weakrefs", _ALL),
    ("the metrics context of Dynamo", "_metrics", _ALL),
    ("inspect, of Python", "_shadowed_dict_from_mro_tuple", _ALL),
)


def private_names() -> dict[str, bool]:
    """Return each private name of torch that this package reads, and whether it exists; imports it.

    Names of CUDA builds do not exist in others.
    """
    names = [f"{module}.{name}" for module, row, _ in PRIVATE_NAMES for name in row.split()]
    return {name: _exists(name) for name in sorted(names)}


def _exists(name: str) -> bool:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


@cache
def warn_of_untested_torch(version: str = torch.__version__) -> None:
    """Warn, once per process, if cgcompile was not tested with this minor version of torch."""
    minor = ".".join(version.split(".")[:2])
    if minor not in TESTED:
        log.warning(
            "cgcompile was not tested with torch %s, but with %s. `python -m cgcompile env` lists "
            "the private names of torch that are missing",
            version,
            ", ".join(TESTED),
        )
