"""The only place that asks which torch this is, and the only one that touches private torch names.

Each wrapper says on which versions it was tried: 2.11, 2.13 and 2.15 unless it says otherwise. The
rule: no other part of cgcompile imports a name of torch that starts with an underscore, or a module
that torch does not document. Callers write ``compat.name``, whatever file here has it.
"""

from cgcompile.compat.artifacts import (
    SizeGuards,
    compile_saveable,
    compiler_settings,
    inductor_files_in,
    is_disk_error,
    load_artifact,
    machine,
    processor,
    qualified_name,
    traced_through,
    versions,
    why_not_saved,
)
from cgcompile.compat.capture import (
    Addresses,
    OnStream,
    SameObjects,
    StorageLife,
    alias,
    can_expire_storages,
    cuda_is_capturing,
    cuda_stream_is_capturing,
    drop_blas_workspaces,
    expire_storage,
    free_blocks,
    identities,
    is_plain_tensor,
    laid_over,
    memory_at,
    outside_inference_mode,
    physical,
    pool_bytes,
    pool_segments,
    raw_stream_of,
    replay_of,
    stop_allocating_to,
    storage_identity,
    weak_storage,
    weak_tensor,
    with_bits,
)
from cgcompile.compat.compilers import (
    compile_aten,
    compile_standalone,
    compile_whole,
    inductor_mode_options,
    inductor_option_names,
    start_compile_workers,
)
from cgcompile.compat.dynamo import (
    ENTER_AUTOCAST,
    ENTER_INFERENCE_MODE,
    LEAVES,
    SET_GRAD_ENABLED,
    Shapes,
    annotate,
    backend_of,
    copied,
    expression_nodes,
    fake_context,
    graph_break,
    is_static_input,
    is_unbacked,
    make_floats_constant,
    original_of,
    present_size,
    restarts,
    source_name,
    storage_key,
    watch_recompile_limit,
)
from cgcompile.compat.foreign import listen_to_no_graph
from cgcompile.compat.marks import (
    marked,
    size_oblivious,
    without_memory,
    without_traces_left,
)
from cgcompile.compat.modes import (
    FORWARD_GRADIENTS,
    DispatchMode,
    any_autocast,
    autocast_off,
    autocast_state,
    below_autograd,
    code_of_compiled_functions,
    compiled_from,
    compiled_region,
    draws_random,
    functionalized_op,
    functorch_transform,
    has_tangent,
    holds_compiled_code,
    inside_backward,
    is_wrapped,
    own_cached_casts,
    python_kernel,
    reads_on_host,
    top_mode,
    uncompiled,
    without_modes,
)
from cgcompile.compat.operators import (
    add_note,
    all_op_names,
    aten_name,
    custom_op_overload,
    higher_order_ops,
    is_arithmetic,
    is_higher_order_op,
    is_op,
    is_python_operator,
    op_names,
    op_overloads,
    parameter_names,
    process_group_backend,
    process_group_store,
    returns_nothing,
    waited_collective,
    written_arguments,
    written_tensors,
)
from cgcompile.compat.presence import private_names
from cgcompile.compat.shapes import OwnShapes, Span, python_predicate, why_not_copied
from cgcompile.compat.sources import drop_sources_with, new_sources
from cgcompile.compat.traced import alike
from cgcompile.compat.traces import (
    PROFILING,
    current_compile_id,
    is_profiling,
    is_tracing,
    reserved_bytes,
    trace_artifact,
)
from cgcompile.compat.tracing import (
    CannotTrace,
    Guards,
    Trace,
    current_shape_env,
    drop_fakes,
    drop_size_caches,
    hooks_of,
    size_caches_dropped,
    spoken_function,
    trace_call,
    traced_function,
)
from cgcompile.compat.trees import (
    is_container,
    tree_leaves,
    tree_map,
    tree_paths,
    tree_spec,
    tree_tensors,
    tree_unflatten,
)
