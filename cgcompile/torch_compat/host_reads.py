"""Ops whose CUDA kernels read values on the host, or copy them through pageable memory.

A capture on CUDA refuses them. Torch tags few of them. Most rows were tried in captures on an H200
with torch 2.11; the others call an op that was, or follow from the sources of ATen (``isin``,
``cholesky_inverse``). Composite ops have rows too: in inference mode a dispatch mode
gets one call of the whole op.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from cgcompile.torch_compat.torch_ops import (
    aten_overloads,
    op_overloads,
    reads_on_host,
    tree_map,
    tree_tensors,
)

Arguments = Mapping[str, Any]


class _Row(NamedTuple):
    reads: Callable[[Arguments], bool]  # decides by the arguments of a call, whatever its tags
    in_inductor: bool = False  # whether code of Inductor calls the same kernel


def _always(arguments: Arguments) -> bool:
    return True


def _has_tensor(*names: str) -> Callable[[Arguments], bool]:
    return lambda arguments: any(isinstance(arguments.get(n), torch.Tensor) for n in names)


def _of_singular_values(order: Any) -> bool:
    return order == "nuc" or (isinstance(order, (int, float)) and abs(order) == 2)


def _norm_of_singular_values(arguments: Arguments) -> bool:
    """Return whether ``linalg.norm`` reads; the norm of a vector does not."""
    dims = arguments["dim"]
    if dims is None:
        dims = next((tensor.shape for tensor in tree_tensors(list(arguments.values()))), ())
    return not isinstance(dims, int) and len(dims) == 2 and _of_singular_values(arguments["ord"])


def _finds_range(arguments: Arguments) -> bool:
    """Return whether ``histc`` computes the range of its bins from data."""
    ends = arguments["min"], arguments["max"]
    return all(isinstance(end, (int, float)) for end in ends) and ends[0] == ends[1]


def _sorts(arguments: Arguments) -> bool:
    """Return whether ``isin`` finds the unique elements first: of many, see ATen's ``isin``."""
    elements, others = arguments.get("elements"), arguments.get("test_elements")
    if not (isinstance(elements, torch.Tensor) and isinstance(others, torch.Tensor)):
        return False
    few = others.numel() < 10 * elements.numel() ** 0.145
    return not few and not arguments["assume_unique"]


_LINALG = (
    "_linalg_check_errors _linalg_eigh _linalg_eigvals _linalg_svd cholesky inverse linalg_cholesky"
    " linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_inv linalg_ldl_factor"
    " linalg_ldl_factor_ex linalg_lu_factor linalg_matrix_exp linalg_matrix_rank linalg_pinv"
    " linalg_solve linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve matrix_exp"
    " cholesky_inverse nuclear_norm pinverse svd"
)
_WITH_CHECKS = (
    "_linalg_solve_ex linalg_cholesky_ex linalg_inv_ex linalg_lu_factor_ex linalg_solve_ex"
)
_ROWS: Mapping[str, _Row] = {  # by names in ``torch.ops.aten``
    _LINALG: _Row(_always, in_inductor=True),
    _WITH_CHECKS: _Row(lambda a: a["check_errors"] is True, in_inductor=True),
    "matrix_power linalg_matrix_power": _Row(
        lambda a: isinstance(a["n"], int) and a["n"] < 0, in_inductor=True
    ),
    "linalg_cond": _Row(lambda a: a["p"] is None or _of_singular_values(a["p"]), in_inductor=True),
    "linalg_matrix_norm": _Row(lambda a: _of_singular_values(a["ord"]), in_inductor=True),
    "linalg_norm": _Row(_norm_of_singular_values, in_inductor=True),
    "norm": _Row(lambda a: a["p"] == "nuc", in_inductor=True),
    "histc": _Row(_finds_range, in_inductor=True),
    # Inductor computes what follows in another way, or Dynamo breaks its graph there.
    "masked_fill masked_fill_ index_fill index_fill_": _Row(_has_tensor("value")),
    "linspace logspace": _Row(_has_tensor("start", "end")),
    "narrow": _Row(_has_tensor("start")),
    "normal": _Row(_has_tensor("std")),
    "combinations": _Row(lambda a: torch.__version__ < "2.14"),  # since then of nonzero_static
    "corrcoef cov ctc_loss is_nonzero istft": _Row(_always),
    "isin": _Row(_sorts),
    "one_hot": _Row(lambda a: a["num_classes"] == -1),
}
_BY_NAME = {name: row for names, row in _ROWS.items() for name in names.split()}


def call_reads(
    op: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    is_number: Callable[[torch.Tensor], bool] | None = None,
) -> bool:
    """Return whether a capture on CUDA refuses a call of an op, as it reads values on the host.

    ``is_number`` returns whether a tensor is a 0-dim tensor on the CPU, which may be read.
    """
    row = _row(op)
    if row is None and not reads_on_host(op):
        return False
    if is_number is not None:
        tensors = tree_tensors((args, dict(kwargs)))
        numbers = {id(tensor) for tensor in tensors if is_number(tensor)}
        if numbers and numbers == set(map(id, tensors)):
            return False
        args, kwargs = tree_map(lambda x: 0.0 if id(x) in numbers else x, (args, dict(kwargs)))
    return row is None or row.reads(_by_name(op, args, kwargs))


def kernel_reads(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return the same for a call in an FX graph, of kernels that Inductor's code calls as well."""
    if target in (torch.svd_lowrank, torch.pca_lowrank):  # Python, which calls ``linalg.svd``
        return True
    overloads = op_overloads(target) or aten_overloads(target)
    row = _row(overloads[0]) if overloads else None
    return row is not None and row.in_inductor and row.reads(_by_name(overloads[0], args, kwargs))


def _row(op: Any) -> _Row | None:
    namespace, _, name = str(getattr(op, "overloadpacket", op)).partition(".")
    return _BY_NAME.get(name) if namespace == "aten" else None


def _by_name(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
    arguments = {a.name: a.default_value for a in op._schema.arguments}
    return {**arguments, **dict(zip(arguments, args, strict=False)), **kwargs}
