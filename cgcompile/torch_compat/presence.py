"""The private names of torch that cgcompile reads, and the versions of torch it was tested with.

A new version of torch may move or rename each of them without notice. The rule: a name or attribute
that is read in this package is in a table here; ``tests/test_private_names.py`` compares the two.
"""

import logging
import pkgutil
from collections.abc import Mapping
from functools import cache

import torch

log = logging.getLogger(__name__)

TESTED = ("2.11", "2.13", "2.14", "2.15")

# Documented by torch, in a module whose name is private or that torch calls experimental.
DOCUMENTED_NAMES: Mapping[str, str] = {
    "functorch.compile": "make_boxed_func",  # page "Custom Backends"
    "torch._dynamo": "config lookup_backend mark_dynamic",  # "Custom Backends", "Dynamic Shapes"
    "torch._dynamo.backends.common": "aot_autograd",  # "Custom Backends"
    # Page "Troubleshooting GuardOnDataDependentSymNode Errors"; that error is below.
    "torch._dynamo.decorators": "mark_unbacked",
    "torch._functorch": "config",  # page "torch.compiler.config"
    "torch._inductor": "config list_mode_options",  # docstring of torch.compile
    "torch._subclasses.fake_tensor": "FakeTensorMode",  # page "Fake tensor"
    # Page "torch.fx.experimental".
    "torch.fx.experimental.proxy_tensor": "make_fx",
    "torch.fx.experimental.symbolic_shapes": "DimDynamic GuardOnDataDependentSymNode ShapeEnv "
    "constrain_range free_unbacked_symbols statically_known_true",
    "torch.utils._python_dispatch": "TorchDispatchMode",  # page "Extending PyTorch"
}

# Names that begin with "_cuda" or "_CUDA" are only in builds with CUDA, two of them only in 2.11
# (``_cuda_endAllocateToPool``, ``_cuda_releasePool``); three others of ``torch._C`` are missing in
# some builds without CUDA.
PRIVATE_NAMES: Mapping[str, str] = {
    "torch": "_foreach_add_ _fused_sdp_choice _neg_view",
    "torch.UntypedStorage": "_new_with_weak_ptr",
    "torch._C": "_AutoDispatchBelowAutograd _construct_storage_from_data_pointer "
    "_cuda_clearCublasWorkspaces _cuda_endAllocateToPool _cuda_getCurrentRawStream "
    "_cuda_getCurrentStream _cuda_memorySnapshot _cuda_releasePool _cuda_setStream "
    "_current_graph_task_id _dispatch_get_all_op_names DispatchKey "
    "_get_cublas_allow_bf16_reduced_precision_reduction _get_cublas_allow_fp16_accumulation "
    "_get_cublas_allow_fp16_reduced_precision_reduction _get_cudnn_sdp_enabled "
    "_get_flash_sdp_enabled _get_fp32_precision_getter "
    "_get_function_stack_at _get_math_sdp_enabled _get_mem_efficient_sdp_enabled "
    "_get_sdp_priority_order _host_emptyCache _is_any_autocast_enabled "
    "_len_torch_dispatch_stack _len_torch_function_stack _RestorePythonTLSSnapshot "
    "_set_grad_enabled "
    "_set_storage_data_ptr_access_error_msg _storage_Use_Count "
    "_tensors_data_ptrs_at_indices_equal",
    "torch._C._dynamo.guards": "RootGuardManager TensorGuards dict_version",
    "torch._C._functorch": "is_functorch_wrapped_tensor peek_interpreter_stack",
    "torch._dispatch.python": "enable_python_dispatcher",
    "torch._dynamo": "callback_handler",
    "torch._dynamo.aot_compile": "AOTCompiledFunction aot_compile_fullgraph",
    "torch._dynamo.aot_compile_types": "SerializableCallable",
    "torch._dynamo.cache_size": "exceeds_recompile_limit",
    "torch._dynamo.convert_frame": "get_traced_fn",
    "torch._dynamo.eval_frame": "innermost_backend",
    "torch._dynamo.exc": "RestartAnalysis ShortenTraceback SkipFrame "
    "TensorifyScalarRestartAnalysis TorchDynamoException",
    "torch._dynamo.guards": "CheckFunctionManager GuardBuilder GuardManagerType "
    "GuardManagerWrapper",
    "torch._dynamo.pgo": "get_code_state",
    "torch._dynamo.source": "AttrSource CallFunctionNoArgsSource ConstantSource",
    "torch._dynamo.symbolic_convert": "TensorifyState tls",
    "torch._dynamo.variables.torch_function": "torch_function_mode_stack_state_mgr",
    "torch._dynamo.utils": "CleanupHook counters dynamo_timed get_compilation_metrics "
    "get_metrics_context",
    "torch._guards": "CompileContext TracingContext tracing",
    "torch._inductor": "standalone_compile",
    "torch._inductor.async_compile": "maybe_warm_pool",
    "torch._inductor.custom_graph_pass": "CustomGraphPass CustomSchedulerPass",
    "torch._inductor.standalone_compile": "AOTCompiledArtifact",
    "torch._inductor.utils": "clear_caches",
    "torch._library.triton": "get_triton_kernels_for_op",
    "torch._logging": "_internal",
    "torch._ops": "_higher_order_ops",
    "torch.amp": "_enter_autocast _exit_autocast",
    "torch.autograd.forward_ad": "_current_level",
    "torch.autograd.grad_mode": "_enter_inference_mode _exit_inference_mode",
    "torch.autograd.profiler": "_is_profiler_enabled",
    "torch.distributed.distributed_c10d": "_resolve_process_group",
    "torch.fx.experimental": "_config",
    "torch.fx.experimental.symbolic_shapes": "ConstraintViolationError",
    "torch.fx._graph_pickler": "GraphPickler",
    "torch.fx.graph_module": "_loader",
    "torch.library": "_impls",
    "torch.nn.modules.module": "_has_any_global_hook",
    "torch.utils": "_pytree",
    "torch.utils._device": "DeviceContext",
    "torch.utils._python_dispatch": "_disable_current_modes _get_current_dispatch_mode_stack",
    "torch.utils._sympy.interp": "sympy_interp",
}
# Attributes of objects, by their owner. Only an object shows whether they exist.
PRIVATE_ATTRIBUTES: Mapping[str, str] = {
    "a function of aot_compile": "_artifacts",
    "a storage": "_cdata",
    "a symbolic number": "_expr",
    "an op": "_schema _op_dk",
    "an op of torch.library.custom_op": "_opoverload",
    "a placeholder of Dynamo": "_dynamo_source",
    "a function that Dynamo calls": "_dynamo_marked_constant",
    "a graph module of Dynamo": "_param_name_to_source",
    "a module": "_forward_hooks _forward_pre_hooks",
    "a lowering of Inductor": "_is_fallback_handler",
    "the metrics context of Dynamo": "_metrics",
}

# Read by features that are off in older versions of torch.
SINCE: Mapping[str, str] = {
    "torch._inductor.custom_graph_pass.CustomSchedulerPass": "2.13",
}


def private_names() -> dict[str, bool]:
    """Import each private name of torch that this package reads; return whether it exists."""
    # Names of CUDA builds do not exist in others.
    rows = [*DOCUMENTED_NAMES.items(), *PRIVATE_NAMES.items()]
    names = [f"{module}.{name}" for module, row in rows for name in row.split()]
    return {
        name: _exists(name)
        for name in sorted(names)
        if name not in SINCE or torch.__version__ >= SINCE[name]
    }


def _exists(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


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
