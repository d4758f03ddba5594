"""The only place that asks which torch this is, and the only one that touches private torch names.

Each wrapper says on which versions it was tried: 2.11, 2.13 and 2.15 unless it says otherwise. The
rule: no other part of cgcompile imports a name of torch that starts with an underscore, or a module
that torch does not document. Callers write ``compat.name``, whatever file here has it.
"""

from cgcompile.compat.capture import (
    Addresses,
    DispatchMode,
    SameObjects,
    StorageLife,
    alias,
    autocast_off,
    below_autograd,
    compiled_region,
    cuda_is_capturing,
    cuda_stream_is_capturing,
    functionalized_op,
    holds_compiled_code,
    identities,
    is_plain_tensor,
    memory_at,
    physical,
    pool_segments,
    python_kernel,
    raw_stream_of,
    reads_on_host,
    replay_of,
    stop_allocating_to,
    storage_identity,
    top_mode,
    uncompiled,
    weak_tensor,
    with_bits,
    without_modes,
)
from cgcompile.compat.compilers import (
    compile_aten,
    compile_standalone,
    compile_whole,
    inductor_mode_options,
    inductor_option_names,
    uncapturable_op,
)
from cgcompile.compat.dynamo import (
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
    is_container,
    is_static_input,
    is_unbacked,
    make_floats_constant,
    restarts,
    source_name,
    storage_key,
    tree_leaves,
    tree_map,
    tree_paths,
    tree_spec,
    tree_tensors,
    tree_unflatten,
)
from cgcompile.compat.operators import (
    add_note,
    all_op_names,
    custom_op_overload,
    higher_order_ops,
    is_higher_order_op,
    is_op,
    op_names,
    op_overloads,
    process_group_backend,
    written_arguments,
    written_tensors,
)
from cgcompile.compat.shapes import OwnShapes, Span, python_predicate, why_not_copied
