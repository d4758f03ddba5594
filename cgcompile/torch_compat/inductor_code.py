"""Compiled pieces as bytes, and what they depend on: guards, versions, settings, hardware."""

import enum
import errno
import functools
import hashlib
import importlib.util
import inspect
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import fx

from cgcompile.locks import new_lock
from cgcompile.torch_compat.guard_text import guards_hold, require_guards
from cgcompile.torch_compat.inductor_call import InductorCall
from cgcompile.torch_compat.torch_compilers import compile_standalone, known_patches
from cgcompile.torch_compat.torch_ops import (
    OpOverload,
    OpOverloadPacket,
    autocast_state,
    is_higher_order_op,
    op_overloads,
)

log = logging.getLogger(__name__)

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
    """Compile one piece with Inductor, whose code no key of torch's caches has."""
    from torch._functorch import config

    known = dict.fromkeys((name for name in _FUNCTORCH_CACHES if hasattr(config, name)), False)
    with config.patch(known), _unsaved_is_no_warning():
        return compile_inductor(
            gm, fake_inputs, {**patches, **dict.fromkeys(_INDUCTOR_CACHES, False)}
        )


@contextmanager
def _unsaved_is_no_warning() -> Iterator[None]:
    """Drop the warning that torch's caches, which are off, have nothing to save."""

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

    # A context of its own: the graph that Dynamo is compiling must not be changed or read.
    context = torch._guards.TracingContext(FakeTensorMode(shape_env=ShapeEnv()))
    with (
        torch._guards.tracing(context),
        config.patch(known_patches(patches)),
        functorch_config.patch("bundled_autograd_cache", True),
    ):
        return InductorCall(AOTCompiledArtifact.deserialize(data))


_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def is_disk_error(error: BaseException) -> bool:
    """Return whether an error of a compiler (or its process) is that of a full or broken disk."""
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
