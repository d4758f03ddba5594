"""Inductor: compile a graph or a piece, call it, keep it as bytes, and correct what it does.

Note [Calls without wrappers]
The wrappers of AOTAutograd around Inductor's function cost as much host time as a small kernel, for
each piece of a step without a graph. What they do with arguments and results (drop duplicates,
unwrap subclasses, regenerate aliases) is fixed at compile time, so one call shows whether they do
anything: Inductor's function gets the very objects that the artifact got, in order, and the
artifact returns the very objects that the function returned. Pieces that write an input, or whose
results share memory with one, keep their wrappers.

The wrappers also switch grad mode and autocast off, and name the call for profilers: they run while
any of these is on. They report hidden aliases of custom ops at the first call, which goes through
them. They mark the dynamic dimensions of results for what Dynamo compiles later: as after a replay,
that is lost, and may cost one more compilation of a function that takes such a result.

Note [Passes inside of Inductor]
They see ATen graphs and kernels. The notes below are of one pass each.

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

Note [Repeated weights]
``aten::matmul`` of ``x`` [B, 1, K] and a weight [K, N] is an ``mm`` only if ``x`` has the strides
of a contiguous tensor, in the dimension of size 1 as well. Attention over one query returns
(K, D, 1), and the layer behind it becomes a ``bmm`` by the weight expanded to [B, K, N], which
takes twice the time (B = 8, K = N = 2048, H200). On CUDA :func:`fold_batches` replaces it.

Note [Combined kernels]
Combining independent pointwise kernels saves launches. But kernels that convert 8-bit weights
depend on no other kernel, so that all of a piece would be combined into one that runs first, and
each product would read its weight from memory in place of the L2 cache (products of a Llama with
float8 weights: 301 us in place of 219, H200). So each of them gets a dependency on the product
before its own (:func:`spread_weights`). Products that are Triton templates are left out.
"""

import enum
import errno
import functools
import hashlib
import importlib.util
import inspect
import logging
import operator
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import get_ident
from types import ModuleType
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from cgcompile.locks import new_lock
from cgcompile.torch_compat.dynamo import restarts
from cgcompile.torch_compat.expressions import guards_hold, require_guards
from cgcompile.torch_compat.torch_ops import (
    OpOverload,
    OpOverloadPacket,
    any_autocast,
    autocast_state,
    is_higher_order_op,
    op_overloads,
    top_mode,
)
from cgcompile.torch_compat.torch_settings import is_profiling

log = logging.getLogger(__name__)

# ---------------------------------------------------------------- settings and whole graphs


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


# ---------------------------------------------------------------- calls without wrappers


class InductorCall:
    """Call an artifact of ``standalone_compile``, or Inductor's function where that is the same.

    Attributes:
        artifact: the same, with all wrappers.
        function: Inductor's function, which takes a list and clears it; None while this is unknown,
            and where the wrappers are needed.
    """

    def __init__(self, artifact: Callable[..., Any]) -> None:
        self.artifact = artifact
        self.function: Callable[[list[Any]], Sequence[Any]] | None = None
        self._known = False
        self._lock = new_lock(watch=False)

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        if torch.is_grad_enabled() or any_autocast() or is_profiling():
            return self.artifact(*inputs)
        if self.function is not None:
            return self.function(list(inputs))
        if not self._known and top_mode() is None and self._lock.acquire(blocking=False):
            try:
                if not self._known:
                    return self._compare(inputs)
            finally:
                self._lock.release()
        return self.artifact(*inputs)

    def _compare(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Call the artifact, and note whether its wrappers change anything."""
        graph = compiled_graph(self.artifact)
        if graph is None or _writes_inputs(graph):
            self._known = True
            return self.artifact(*inputs)
        function, thread, calls = graph.current_callable, get_ident(), []

        def noted(args: list[Any]) -> Sequence[Any]:
            if get_ident() != thread:
                return function(args)
            taken, before = list(args), _modes()
            returned: Sequence[Any] = function(args)
            calls.append((taken, list(returned), before, _modes()))
            return returned

        graph.current_callable = noted
        before = _modes()
        try:
            results: Sequence[Any] = self.artifact(*inputs)
        finally:
            graph.current_callable = function
        if len(calls) == 1 and isinstance(results, (list, tuple)):
            taken, outputs, *states = calls[0]
            same = _same(taken, inputs) and _same(outputs, results)
            same = same and states == [before, _modes()]
            if same and not _memory(taken) & _memory(outputs):
                self.function = function
        self._known = True
        return results


def _same(values: Sequence[Any], others: Sequence[Any]) -> bool:
    pairs = zip(values, others, strict=False)
    return len(values) == len(others) and all(
        one is other or (type(one) is int and type(other) is int and one == other)
        for one, other in pairs
    )


def _modes() -> tuple[bool, bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), any_autocast()


def _memory(values: Sequence[Any]) -> set[int]:
    """Return where the memory of tensors begins; of a tensor without a storage, its id."""
    starts = set()
    for value in values:
        if isinstance(value, torch.Tensor):
            try:
                starts.add(value.untyped_storage().data_ptr())
            except (NotImplementedError, RuntimeError):
                starts.add(id(value))
    return starts - {0}


def _writes_inputs(graph: Any) -> bool:
    """Return whether a function writes inputs; True if this torch has no record of it."""
    lists = [getattr(graph, name, None) for name in ("mutated_inputs", "mutated_input_idxs")]
    return any(written is None or len(written) > 0 for written in lists)


# ---------------------------------------------------------------- where an artifact keeps it


def compiled_graph(artifact: Any) -> Any:
    """Return the ``CompiledFxGraph`` that an artifact calls; None unless there is exactly one."""
    reached: dict[int, Any] = {}  # objects that a call may run, about twenty
    waiting = [artifact]
    while waiting and len(reached) < _MOST:
        value = waiting.pop()
        is_end = isinstance(value, (type, torch.nn.Module, torch.Tensor))
        if callable(value) and not is_end and id(value) not in reached:
            reached[id(value)] = value
            waiting.extend(_held(value))
    graphs = [value for value in reached.values() if type(value).__name__ == "CompiledFxGraph"]
    return graphs[0] if len(graphs) == 1 and graphs[0].current_callable is not None else None


_MOST = 1000


def _held(function: Any) -> Iterator[Any]:
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # an empty cell
            yield cell.cell_contents
    yield from (getattr(function, name, None) for name in ("__self__", "__func__"))
    if isinstance(function, functools.partial):
        yield from (function.func, *function.args)
    yield from getattr(function, "__dict__", {}).values()


# ---------------------------------------------------------------- compile, save and load


def compile_inductor(
    gm: fx.GraphModule, fake_inputs: Sequence[Any], patches: Mapping[str, Any]
) -> InductorCall:
    """Compile one piece with Inductor."""
    return InductorCall(compile_standalone(gm, fake_inputs, patches))


# Keyed by the graph before decompositions (functorch), or before lowerings (Inductor). What is
# compiled from generated code, such as C++ libraries, is keyed by that code, and stays on.
_INDUCTOR_CACHES = ("fx_graph_cache", "fx_graph_remote_cache")
_FUNCTORCH_CACHES = ("enable_autograd_cache", "enable_remote_autograd_cache")


def compile_uncached(
    gm: fx.GraphModule, fake_inputs: Sequence[Any], patches: Mapping[str, Any]
) -> InductorCall:
    """Compile one piece with Inductor without torch's caches, whose keys lack its code."""
    from torch._functorch import config

    known = dict.fromkeys((name for name in _FUNCTORCH_CACHES if hasattr(config, name)), False)
    with config.patch(known), _unsaved_is_no_warning():
        return compile_inductor(
            gm, fake_inputs, {**patches, **dict.fromkeys(_INDUCTOR_CACHES, False)}
        )


@contextmanager
def _unsaved_is_no_warning() -> Iterator[None]:
    """Suppress the warning of torch's caches, which are off, that there is nothing to save."""

    def keep(record: logging.LogRecord) -> bool:
        return "artifact generation failed" not in str(record.msg)

    logger = logging.getLogger("torch._inductor.standalone_compile")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def compile_saveable(
    gm: fx.GraphModule, fake_inputs: Sequence[Any], patches: Mapping[str, Any]
) -> tuple[Callable[..., Any], bytes | None, str]:
    """Compile one piece with Inductor; return it, its bytes or None, and why there are no bytes."""
    try:
        artifact = compile_standalone(gm, fake_inputs, patches, aot=True)
    except RuntimeError as error:
        # torch cannot save it, but has compiled it: its caches shorten the second compilation.
        if "serialize" not in str(error):
            raise
        return compile_inductor(gm, fake_inputs, patches), None, str(error)
    run = InductorCall(artifact)
    try:
        return run, artifact.serialize(), ""
    except Exception as error:  # any error of pickle
        return run, None, f"torch cannot save it ({type(error).__name__}: {error})"


def load_artifact(data: bytes, patches: Mapping[str, Any]) -> Callable[..., Any]:
    """Load the bytes of :func:`compile_saveable`; raises what torch raises."""
    import torch._inductor.config as config
    from torch._functorch import config as functorch_config
    from torch._inductor.standalone_compile import AOTCompiledArtifact
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # A separate context: the graph that Dynamo is compiling must not be changed or read.
    context = torch._guards.TracingContext(FakeTensorMode(shape_env=ShapeEnv()))
    with (
        torch._guards.tracing(context),
        config.patch(known_patches(patches)),
        functorch_config.patch("bundled_autograd_cache", True),
    ):
        return InductorCall(AOTCompiledArtifact.deserialize(data))


# What ``aot_compile`` of torch sets while a backend compiles: how torch keeps its own results, and
# how it lowers backward graphs, which pieces do not have. Its loader sets one of Inductor.
_OF_AOT_COMPILE = (
    "strict_autograd_cache",
    "bypass_autograd_cache_key",
    "bundled_autograd_cache",
    "force_non_lazy_backward_lowering",
    "force_autograd_cache",
)


@contextmanager
def as_without_aot_compile() -> Iterator[None]:
    """Compile pieces as outside of ``aot_compile``: with the same settings, and cache keys."""
    import torch._functorch.config as functorch_config
    import torch._inductor.config as config

    known = [name for name in _OF_AOT_COMPILE if hasattr(functorch_config, name)]
    with (
        functorch_config.patch(dict.fromkeys(known, False)),
        config.patch(enable_autograd_for_aot=False),
    ):
        yield


_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def is_disk_error(error: BaseException) -> bool:
    """Return whether an error of a compiler, or of its process, is about a full or broken disk."""
    texts = [os.strerror(number) for number in _DISK_ERRORS]
    cause: BaseException | None = error
    while cause is not None:
        if any(text in str(cause) for text in texts):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


_FILES_LOCK = new_lock(watch=False)
_FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@contextmanager
def inductor_files_in(folder: Path) -> Iterator[None]:
    """Within it, Inductor writes its files (C++ libraries above all) to a folder."""
    # torch reads the folder from the environment of the process: files that another thread compiles
    # meanwhile are written there too, which is harmless. Tables in memory that hold paths are
    # cleared at both ends. A folder that cannot be created is not used; its parents are not
    # created.
    from torch._inductor.utils import clear_caches

    try:
        folder.mkdir(exist_ok=True, mode=0o700)
        usable = os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        usable = False
    if not usable:
        yield
        return
    with _FILES_LOCK:
        before = {name: os.environ.get(name) for name in _FOLDERS}
        os.environ[_FOLDERS[0]] = str(folder)
        # Inductor sets it at its first kernel; other threads may compile kernels before.
        os.environ.setdefault(_FOLDERS[1], str(folder / "triton"))
        clear_caches()
        try:
            yield
        finally:
            clear_caches()
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


# ---------------------------------------------------------------- guards on sizes


class SizeGuards:
    """The guards on the sizes of one piece, as text that another process can evaluate."""

    def __init__(self, fake_inputs: Sequence[Any]) -> None:
        sizes = [value for value in fake_inputs if isinstance(value, torch.SymInt)]
        self._sizes = [size for size in sizes if size.node.expr.is_Symbol]
        self._env = self._sizes[0].node.shape_env if self._sizes else None
        self._symbols = {size.node.expr for size in self._sizes}
        self._before = 0 if self._env is None else len(self._env.guards)

    def known(self) -> list[Any]:
        """Return the guards that mention these sizes, as expressions."""
        guards = () if self._env is None else self._env.guards
        return [guard.expr for guard in guards if guard.expr.free_symbols & self._symbols]

    def added(self) -> str | None:
        """Return the guards since this object was created; None if another process lacks a size."""
        if self._env is None:
            return ""
        new = self._env.guards[self._before :]
        fixed = not all(size.node.expr in self._symbols for size in self._sizes)
        if fixed or any(not guard.expr.free_symbols <= self._symbols for guard in new):
            return None
        if not new:
            return ""
        text: str = self._env.produce_guards_expression(self._sizes, guards=new) or ""
        if text:
            require_guards(text)
        return text

    def hold(self, text: str) -> bool:
        """Return whether guards hold for the present sizes; if so, they are added to the graph."""
        if not text or self._env is None:
            return not text
        hints = [size.node.hint for size in self._sizes]
        if None in hints or not guards_hold(text, hints):
            return False
        # With symbols, the evaluation adds them to the graph that Dynamo is compiling.
        return guards_hold(text, self._sizes)


# ---------------------------------------------------------------- what a result depends on


def versions() -> dict[str, str]:
    """Return the versions of the programs that compile."""
    triton = "none"
    if importlib.util.find_spec("triton") is not None:
        triton = str(getattr(importlib.import_module("triton"), "__version__", "unknown"))
    cuda = f"cuda {torch.version.cuda}" if torch.version.cuda else "no cuda"
    return {
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "triton": triton,
        "runtime": f"hip {torch.version.hip}" if torch.version.hip else cuda,
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def machine(devices: Sequence[torch.device]) -> str:
    """Return the hardware that code for these devices depends on: processors only where used."""
    rows = []
    for device in sorted(set(devices), key=str):
        if device.type == "cuda":
            gpu = torch.cuda.get_device_properties(device)
            rows.append(
                f"{device}: {gpu.name}, {gpu.major}.{gpu.minor}, "
                f"{gpu.multi_processor_count} processors"
            )
        elif device.type != "cpu":
            rows.append(str(device))
    if rows and all(device.type != "cpu" for device in devices):
        return "\n".join([*rows, f"cpu: {platform.machine()}"])
    capability = torch.backends.cpu.get_cpu_capability()
    rows.append(f"cpu: {capability}, {_cpu()}, {torch.get_num_threads()} threads")
    return "\n".join(rows)


@functools.cache
def _cpu() -> str:
    """Return a hash of the processor's instruction set, for which C++ is compiled."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        text = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        text = platform.processor()
    return f"{platform.machine()} {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def processor() -> str:
    """Return the processor that C++ is compiled for."""
    return f"{torch.backends.cpu.get_cpu_capability()} {_cpu()}"


def why_not_saved(patches: Mapping[str, Any]) -> str | None:
    """Return which of torch's settings forbids caches; None if all allow them."""
    import torch._functorch.config as functorch_config
    import torch._inductor.config as config

    with config.patch(known_patches(patches)):
        if getattr(config, "force_disable_caches", False):
            return "force_disable_caches is on"
        if not config.fx_graph_cache:
            return "fx_graph_cache is off"
    return None if functorch_config.enable_autograd_cache else "enable_autograd_cache is off"


def compiler_settings(patches: Mapping[str, Any]) -> dict[str, str]:
    """Return all settings of torch that may change what is compiled."""
    # Raises ValueError for a setting whose text does not identify its value.
    import torch._functorch.config as functorch_config
    import torch._inductor.config as config
    import torch.fx.experimental._config as shape_config

    settings: dict[str, str] = {}
    with config.patch(known_patches(patches)):
        if getattr(config, "freezing", False):
            raise ValueError("the Inductor setting freezing bakes weights in")
        modules = {"inductor": config, "functorch": functorch_config, "shapes": shape_config}
        for name, module in modules.items():
            values = module.save_config_portable(ignore_private_configs=False)
            values |= {key: getattr(module, key) for key in _passes_among(module)}
            rows = (f"{key} = {_setting_text(key, values[key])}" for key in sorted(values))
            settings[name] = "\n".join(rows)
    settings["state"] = "\n".join(f"{key} = {value}" for key, value in _state().items())
    return settings


def _passes_among(module: Any) -> list[str]:
    """Return the settings that hold functions: torch leaves them out of its portable form."""
    # Their declarations have types. A copy of all settings would copy the functions as well.
    ends = ("custom_pass", "custom_pre_pass", "custom_post_pass", "_fuse_ddp_communication_passes")
    return [name for name in inspect.get_annotations(module) if name.endswith(ends)]


def has_users_passes(options: Mapping[str, Any]) -> bool:
    """Return whether settings of Inductor, or ``options`` in place of them, name a pass."""
    from torch._inductor import config

    names = [name for name in _passes_among(config) if name.endswith("_pass")]
    return any(options.get(name, getattr(config, name)) is not None for name in names)


def _setting_text(name: str, value: Any) -> str:
    if isinstance(value, (str, int, float, bool, type(None), torch.dtype, torch.device)):
        return repr(value)
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_setting_text(name, item) for item in value) + "]"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(_setting_text(name, item) for item in value)) + "}"
    if isinstance(value, Mapping):
        rows = (f"{key!r}: {_setting_text(name, item)}" for key, item in value.items())
        return "{" + ", ".join(sorted(rows)) + "}"
    if callable(getattr(value, "uuid", None)):
        uuid = value.uuid()
        text = None if uuid is None else f"{type(value).__name__} {uuid!r}"
        value = getattr(value, "then", value)  # unwrap the user's pass
    else:
        text = qualified_name(value)
    if text is None:
        raise ValueError(f"the setting {name} holds a {type(value).__name__} without uuid()")
    return text


def _state() -> dict[str, Any]:
    cuda = torch.backends.cuda
    matmul = torch.backends.cuda.matmul
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "inference mode": torch.is_inference_mode_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "float32 precision": _float32_precision(),
        "fp16 reduction": matmul.allow_fp16_reduced_precision_reduction,
        "bf16 reduction": matmul.allow_bf16_reduced_precision_reduction,
        "attention": [  # settings that choose the attention kernel
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
            *torch._C._get_sdp_priority_order(),
        ],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "cudnn": torch.backends.cudnn.enabled,
        "mkldnn": torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled,
        "autocast": autocast_state(),
    }


def _float32_precision() -> str:
    """Return the precisions by their names since torch 2.9: reading the older ones may raise."""
    backends = torch.backends
    owners = (backends, backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul)
    return " ".join(str(getattr(owner, "fp32_precision", None)) for owner in owners)


# ---------------------------------------------------------------- names that last


def qualified_name(target: Any) -> str | None:
    """Return a name that is valid in other processes; None for functions that are not torch's."""
    if is_higher_order_op(target):
        is_torchs = type(target).__module__.partition(".")[0] == "torch"
        return f"higher_order.{target.name()}" if is_torchs else None
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        own = [op for op in op_overloads(target) if op.namespace not in _TORCHS_OPS]
        # A user may give the same name to another op.
        schemas = [f"{op._schema} {sorted(map(str, op.tags))}" for op in own]
        return " ".join([f"op {target}", *schemas])
    owner = getattr(target, "__objclass__", target)  # of a method of a type in C
    module, name = getattr(owner, "__module__", None), getattr(target, "__qualname__", None)
    if not module or not name or "<" in name:  # "<": a local function, or a lambda
        return None
    bound = getattr(target, "__self__", None)  # of a function in C its module, or its type
    if type(bound).__module__ == "pybind11_builtins":  # a record that names no module
        name = target.__name__
        if getattr(sys.modules.get(module), name, None) is not target:
            return None
    elif bound is not None and not isinstance(bound, (type, ModuleType)):
        return None  # a method of another object has the same name
    if name.rpartition(".")[2] != target.__name__:  # torch._refs.abs_ has the path of abs
        return None
    return f"{module}.{name}" if module.partition(".")[0] in _LASTING else None


_LASTING = ("torch", "math", "operator", "_operator", "builtins")
_TORCHS_OPS = {"aten", "prims", "prim", "quantized", "mkldnn", "_c10d_functional", "inductor"}
_TORCHS_OPS |= {"c10d", "c10d_functional", "rngprims", "higher_order", "_quantized"}


def traced_through(op: Any) -> str | None:
    """Return why a compiler traces through an op of a user; None where it calls the op."""
    from torch._library.triton import get_triton_kernels_for_op

    # A user who registered something with Inductor has imported it.
    inductor = "torch._inductor"
    decompositions = getattr(sys.modules.get(f"{inductor}.decomposition"), "decompositions", {})
    lowerings = getattr(sys.modules.get(f"{inductor}.lowering"), "lowerings", {})
    for overload in op_overloads(op):
        name = overload.name()
        if overload.namespace in _TORCHS_OPS:
            continue
        composite = torch._C.DispatchKey.CompositeImplicitAutograd
        if overload.has_kernel_for_dispatch_key(composite):
            return f"{name} is decomposed into other ops"
        registered = [lowerings.get(key) for key in (overload, overload.overloadpacket)]
        # Inductor registers one that calls the op, the first time that it compiles the op.
        lowered = any(
            lowering is not None and not getattr(lowering, "_is_fallback_handler", False)
            for lowering in registered
        )
        if lowered or overload in decompositions:
            return f"{name} has a lowering of its own"
        if get_triton_kernels_for_op(name.removesuffix(".default")):
            return f"{name} is traced through"
    return None


# ---------------------------------------------------------------- passes inside of Inductor


Pass = Callable[[Any], Any]
_OPEN_END = 2**63 - 1  # end index of ``x[1:]``
_LARGE_WEIGHT = 2**20  # bytes


def take_apart(graph: fx.Graph) -> None:
    """Replace each ``addmm`` of a whole tensor on CUDA that Inductor made by ``mm`` and ``add``."""
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.addmm.default):
        users = "seq_nr" in node.meta  # nodes of Inductor's patterns have no number
        if users or not _adds_whole_tensor(node):
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


def fold_batches(graph: fx.Graph) -> None:
    """Replace each ``bmm`` of one row per batch by a repeated matrix, on CUDA, by ``mm``."""
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.bmm.default):
        rows, repeated = node.args
        if repeated.target is not aten.expand.default or repeated.kwargs:
            continue
        matrix, x = repeated.args[0], rows.meta["val"]
        if x.device.type != "cuda" or not statically_known_true(x.shape[1] == 1):
            continue
        shapes = matrix.meta["val"].shape, repeated.meta["val"].shape[1:]
        if len(shapes[0]) != 2 or not all(map(statically_known_true, map(operator.eq, *shapes))):
            continue  # rows or columns of the matrix are expanded as well
        with graph.inserting_before(node):
            flat = _insert_call(graph, node, aten.squeeze.dim, rows, 1)
            product = _insert_call(graph, node, aten.mm.default, flat, matrix)
            result = _insert_call(graph, node, aten.unsqueeze.default, product, 1)
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def _insert_call(graph: fx.Graph, like: fx.Node, target: Any, *args: Any) -> fx.Node:
    """Insert a call with its fake value; the rest of its metadata is that of ``like``."""
    node = graph.call_function(target, args)
    node.meta.update(like.meta)
    node.meta["val"] = target(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in args))
    return node


def spread_weights(nodes: list[Any]) -> list[Any]:
    """Let each kernel that converts a large weight depend on the product before its own.

    Args:
        nodes: of Inductor's scheduler, after its fusions, sorted topologically.

    Returns:
        The nodes, sorted topologically with the new dependencies.
    """
    readers: dict[str, list[Any]] = {}
    for node in nodes:
        for dependency in node.unmet_dependencies:
            readers.setdefault(dependency.name, []).append(node)
    weights: dict[Any, list[Any]] = {}  # product -> weights that it reads
    for node in filter(_converts_weight, nodes):
        (name,) = node.get_buffer_names()
        users = readers.get(name, [])
        if len(users) == 1 and users[0].is_extern():
            weights.setdefault(users[0], []).append(node)
    moved = {weight for group in weights.values() for weight in group}
    ordered, last = [], ""
    for node in nodes:
        for weight in weights.get(node, ()):
            if last:
                (name,) = weight.get_buffer_names()
                known = next(each for each in node.unmet_dependencies if each.name == name)
                weight.add_fake_dep(replace(known, name=last))
            ordered.append(weight)
        if node not in moved:
            ordered.append(node)
        if node in weights:
            last = next(iter(node.get_buffer_names()), last)
    return ordered


def _converts_weight(node: Any) -> bool:
    """Return whether a kernel depends on no other and writes one large buffer."""
    buffer = getattr(node, "node", None)  # None: several, fused
    if buffer is None or node.unmet_dependencies or len(node.get_buffer_names()) != 1:
        return False
    if node.is_extern() or node.is_template() or node.is_reduction():
        return False
    numel = buffer.get_numel()
    if not getattr(numel, "is_number", True):  # dynamic
        return False
    return int(numel) * int(buffer.get_dtype().itemsize) >= _LARGE_WEIGHT


def first_pass(graph: fx.Graph) -> None:
    """Run the passes over the ATen graph that come before Inductor's."""
    spell_out(graph)
    end_slices(graph)
    fold_batches(graph)


_VERSION = 2  # version of all passes, part of Inductor's cache keys


@cache
def _pass_type(over_kernels: bool) -> type:
    import torch._inductor.custom_graph_pass

    base: Any = torch._inductor.custom_graph_pass.CustomGraphPass
    if over_kernels:  # since 2.13
        base = getattr(torch._inductor.custom_graph_pass, "CustomSchedulerPass", base)

    class ChainedPass(base):  # type: ignore[misc]
        """A pass of this file, and the user's pass ``then`` after it, if there is one."""

        def __init__(self, run: Pass, then: Any) -> None:
            self._run, self.then = run, then

        def __call__(self, subject: Any) -> Any:
            result = self._run(subject)  # of a graph: None, it is changed in place
            if self.then is None:
                return result
            return self.then(subject if result is None else result)

        def __reduce__(self) -> Any:  # Inductor pickles settings into the keys of its caches
            return _pass, (self._run, self.then, over_kernels)

        def uuid(self) -> Any:
            # None disables caches: a plain function has no identity that lasts.
            inner = "" if self.then is None else getattr(self.then, "uuid", lambda: None)()
            if inner is None:
                return None
            return f"cgcompile {self._run.__name__} {_VERSION}, {inner!r}"

    return ChainedPass


def _pass(run: Pass, then: Any, over_kernels: bool = False) -> Any:
    return _pass_type(over_kernels)(run, then)


def _before(then: Any, run: Pass, over_kernels: bool = False) -> Any:
    """Return a pass, followed by the user's; only the user's if that has no identity."""
    uuid = getattr(then, "uuid", None)
    if then is not None and (uuid is None or (over_kernels and uuid() is None)):
        return then  # Inductor caches what ran CustomSchedulerPass, whatever its uuid is
    return _pass(run, then, over_kernels)


def unfused_residuals(then: Pass | None) -> Any:
    """Return Inductor's ``post_grad_custom_post_pass``, see Note [Residual additions]."""
    return _before(then, take_apart)


def with_passes(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return Inductor's settings for a piece, with the passes of this file in them."""
    import torch._inductor.config as config

    def current(name: str) -> Any:
        return wanted.get(name, getattr(config, name, None))

    passes: dict[str, Any] = {_FIRST: _pass(first_pass, current(_FIRST))}  # results depend on it
    if torch.cuda.is_available():
        passes[_LAST] = unfused_residuals(current(_LAST))
        if wanted.get("combo_kernels"):
            passes[_KERNELS] = _before(current(_KERNELS), spread_weights, over_kernels=True)
    return {**wanted, **passes}


_FIRST, _LAST = "post_grad_custom_pre_pass", "post_grad_custom_post_pass"
_KERNELS = "_post_fusion_custom_pass"
