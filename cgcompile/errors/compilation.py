"""Errors of settings, boundaries, splitting and compiling. See ``cgcompile/errors/__init__.py``."""

from collections.abc import Iterable, Sequence

from cgcompile.errors.root import CGCompileError, close, listed, shown, with_article


class ConfigError(CGCompileError, ValueError):
    """A setting that does not exist, has a bad value, or contradicts another one."""

    @classmethod
    def unknown_setting(cls, name: str, where: str, known: Sequence[str]) -> "ConfigError":
        hint = close(name, known)
        if name == "level":  # vLLM's name of old
            hint = " vLLM's level is 'mode' here: level=3 is mode='PIECEWISE'."
        return cls(f"{where}: there is no setting {name!r}.{hint}\n  Settings: {listed(known)}.")

    @classmethod
    def bad_value(cls, name: str, where: str, value: object, expected: str) -> "ConfigError":
        return cls(f"{where}: {name} = {shown(value)}; expected {expected}.")

    @classmethod
    def backend_class(cls) -> "ConfigError":
        return cls(
            "backend=cgcompile.Backend is a class; expected one of its objects.\n"
            "  Use backend=cgcompile.Backend() or backend='cgcompile'."
        )

    @classmethod
    def no_mapping(cls, name: str, value: object, is_config: bool) -> "ConfigError":
        advice = "Give settings by name: options={'strict': True}."
        if is_config:
            advice = "For a CompilationConfig: backend=cgcompile.Backend(config)."
        return cls(
            f"{name} is {with_article(type(value).__name__)}; expected a mapping.\n  {advice}"
        )

    @classmethod
    def impossible(cls, what: str, because: str, instead: str) -> "ConfigError":
        return cls(f"{what} is impossible: {because}.\n  {instead}")

    @classmethod
    def unknown_torch_mode(cls, mode: str, known: Sequence[str]) -> "ConfigError":
        return cls(
            f"torch.compile(mode={mode!r}): this mode is not known.{close(mode, known)}\n"
            f"  Modes: {listed(known)}. cgcompile's own settings go into options={{...}}."
        )

    @classmethod
    def settings_are_fixed(cls) -> "ConfigError":
        return cls(
            "settings beside a cgcompile.Backend object: the settings of the object are fixed.\n"
            "  Give them to cgcompile.Backend(...), or use backend='cgcompile' with options."
        )

    @classmethod
    def not_compiled_here(cls, found: str, knows_handle: bool) -> "ConfigError":
        advice = "For a function, keep the object of backend=cgcompile.Backend(...)."
        if knows_handle:
            advice = "This one knows its handle by itself: model.backend."
        return cls(
            f"cgcompile.runtime(): found {with_article(found)}; expected a module that "
            f"torch.compile returned for this backend.\n  {advice}"
        )

    @classmethod
    def captures_nothing(cls, function: str, found: str) -> "ConfigError":
        what = "None" if found == "NoneType" else with_article(found)
        return cls(
            f"cgcompile.{function}(): found {what}, which captures nothing; expected a compiled "
            "model, its handle (a Backend), a wrapper or a manager.\n  Compile the model first: "
            "cgcompile.compile(model), or torch.compile(model, backend='cgcompile'); of a function "
            "that torch.compile returned give the Backend object."
        )

    @classmethod
    def unknown_inductor_option(cls, name: str, known: Iterable[str]) -> "ConfigError":
        return cls(
            f"inductor_options: this torch has no Inductor setting {name!r}.{close(name, known)}\n"
            "  The names are those of torch._inductor.config."
        )

    @classmethod
    def trace_once_needs_guards_dropped(cls) -> "ConfigError":
        return cls(
            "mode DYNAMO_TRACE_ONCE traces once and drops Dynamo's guards, but torch.compile gives "
            "a backend no say over guards.\n"
            "  Use cgcompile.compile(model, mode='DYNAMO_TRACE_ONCE'), or drop them where "
            "torch.compile takes them: options={'mode': 'STOCK_TORCH_COMPILE', 'guard_filter_fn': "
            "torch.compiler.skip_all_guards_unsafe}."
        )

    @classmethod
    def breakable_needs_no_trace(cls) -> "ConfigError":
        return cls(
            "splitting='breakable' in torch.compile(): it traces nothing, and torch.compile has "
            "traced.\n  Use cgcompile.compile(model, splitting='breakable')."
        )

    @classmethod
    def unknown_parameter(cls, name: str, known: Sequence[str]) -> "ConfigError":
        return cls(
            f"dynamic_dims: the function has no parameter {name!r}.{close(name, known)}\n"
            f"  Parameters: {listed(known)}."
        )

    @classmethod
    def not_compilable(cls, found: str, function: str = "compile") -> "ConfigError":
        return cls(
            f"cgcompile.{function}(): found {found}; expected a module, a bound method of one, or "
            "a function.\n  Of a class, compile its instances, or decorate its forward."
        )

    @classmethod
    def padded_away(cls, size: int, padded: int) -> "ConfigError":
        return cls(
            f"compile_sizes: no step ever has size {size}: it is padded to {padded}, the next of "
            f"cudagraph_capture_sizes.\n  List {padded} instead, or add {size} to "
            "cudagraph_capture_sizes."
        )

    @classmethod
    def unknown_pass(cls, name: str, known: Sequence[str]) -> "ConfigError":
        return cls(
            f"disabled_passes: no pass {name!r} runs here.{close(name, known)}\n"
            f"  What can be disabled: {listed(known)}."
        )

    @classmethod
    def needed_pass(cls, name: str, known: Sequence[str]) -> "ConfigError":
        return cls(
            f"disabled_passes: pass {name!r} cannot be disabled: without it a graph cannot be "
            f"split.\n  What can be disabled: {listed(known)}."
        )

    @classmethod
    def which_dimension(cls, dims: Sequence[str]) -> "ConfigError":
        return cls(
            "cudagraph_capture_sizes, compile_sizes and compile_ranges_endpoints must speak of one "
            f"dynamic dimension of the inputs, but the graph has {len(dims)} of them.\n"
            f"  Set capture_dim to one of: {listed(dims)}."
        )

    @classmethod
    def sizes_of_which(cls, dims: Sequence[str]) -> "ConfigError":
        return cls(
            "sizes: they are sizes of one dynamic dimension of the inputs, and the graph has "
            f"{len(dims)} of them.\n"
            f"  Say which, beside sizes: capture_dim={dims[0]!r}. There are: {listed(dims)}."
        )


class DescriptorError(CGCompileError, ValueError):
    """A :class:`~cgcompile.BatchDescriptor` that contradicts itself."""

    @classmethod
    def field(cls, name: str, value: object, expected: str) -> "DescriptorError":
        return cls(f"BatchDescriptor: {name} = {shown(value)}; expected {expected}.")

    @classmethod
    def not_uniform(cls, num_tokens: int, num_reqs: int | None) -> "DescriptorError":
        return cls(
            f"BatchDescriptor(num_tokens={num_tokens}, num_reqs={num_reqs}, uniform=True): a "
            "uniform batch needs num_reqs, and num_tokens must be a multiple of it.\n"
            "  The query length of each request is num_tokens // num_reqs, exactly."
        )


class ForwardContextError(CGCompileError, RuntimeError):
    """The forward context is missing, or was used where it cannot work."""

    @classmethod
    def missing(cls) -> "ForwardContextError":
        return cls(
            "get_forward_context(): no forward context is set in this thread or task.\n"
            "  Wrap the call of the model: with cgcompile.set_forward_context(...): model(...). A "
            "new thread or asyncio task starts with none."
        )

    @classmethod
    def traced(cls, what: str) -> "ForwardContextError":
        return cls(
            f"{what} was called in code that torch.compile traces: its value would be frozen into "
            "the graph or recompile it.\n"
            "  Read the context inside an opaque custom op (torch.library), and set it around the "
            "call of the compiled model."
        )

    @classmethod
    def runtime_mode(cls, found: object) -> "ForwardContextError":
        return cls(
            f"set_forward_context(cudagraph_runtime_mode={shown(found)}): a step runs in one mode; "
            "expected CUDAGraphMode.NONE, PIECEWISE or FULL.\n"
            "  Of a combined mode take decode_mode() or mixed_mode()."
        )

    @classmethod
    def near_miss(cls, name: str, meant: str) -> "ForwardContextError":
        if meant == "batch_descriptor":
            advice = "Use batch_descriptor=cgcompile.BatchDescriptor(num_tokens)"
        else:
            advice = f"Use {meant}" if meant else "Leave it out: there is no such object here"
        return cls(
            f"set_forward_context({name}=...): there is no such parameter, and it would be kept as "
            f"data of your own.\n"
            f"  {advice}. Give data of your own a name that is not near to a parameter's."
        )

    @classmethod
    def batch_descriptor(cls, found: object) -> "ForwardContextError":
        return cls(
            f"set_forward_context(batch_descriptor={shown(found)}): expected a "
            "cgcompile.BatchDescriptor, or None.\n"
            "  For a batch of n tokens: batch_descriptor=cgcompile.BatchDescriptor(n)."
        )

    @classmethod
    def no_context(cls, found: object) -> "ForwardContextError":
        return cls(
            f"override_forward_context({shown(found)}): expected a "
            "cgcompile.ForwardContext, or None.\n"
            "  set_forward_context(...) makes one from its arguments."
        )

    @classmethod
    def unpadded(cls, found: object, most: int | None) -> "ForwardContextError":
        limit = "or more" if most is None else f"to {most}, the tokens of the batch descriptor"
        return cls(
            f"set_forward_context(num_unpadded_tokens={shown(found)}): expected a whole "
            "number from 0 "
            f"{limit}.\n"
            "  It says how many rows of the batch are real; the rest is padding."
        )

    @classmethod
    def not_entered(cls) -> "ForwardContextError":
        return cls(
            "set_forward_context: the context is left more often than it was entered.\n"
            "  Use it in a with statement; a context belongs to one thread or task at a time."
        )


class BoundaryError(CGCompileError, ValueError):
    """A splitting op that does not exist, or is declared twice with different meanings."""

    @classmethod
    def unknown(cls, name: str, known: Iterable[str]) -> "BoundaryError":
        return cls(
            f"splitting op {name!r}: no operator, higher-order op or function has this name."
            f"{close(name, known)}\n"
            "  Import the library that defines it first. Forms: 'ns::op', 'ns.op', "
            "'ns::op.overload', 'ns::*', 'package.module.function'."
        )

    @classmethod
    def not_an_op(cls, found: object) -> "BoundaryError":
        return cls(
            f"splitting op: found {shown(found)}; expected a name, an op of torch.ops, a "
            "function, or "
            "a cgcompile.SplittingOp (with predicate=... for a test on fx.Node)."
        )

    @classmethod
    def target_or_predicate(cls) -> "BoundaryError":
        return cls("SplittingOp: give either target= or predicate=, not both and not none.")

    @classmethod
    def bad_support(cls, name: str, found: object) -> "BoundaryError":
        return cls(
            f"splitting op {name!r}: support = {shown(found)}; expected a member of "
            "cgcompile.AttentionCGSupport."
        )

    @classmethod
    def bad_impl(cls, name: str, found: object) -> "BoundaryError":
        return cls(
            f"splitting op {name!r}: impl = {shown(found)}; expected a function that takes "
            "the op's "
            "arguments, or a mapping from device types ('cuda') to such functions."
        )

    @classmethod
    def predicate_raised(cls, name: str, node: str, error: BaseException) -> "BoundaryError":
        return cls(
            f"splitting op {name!r}: its predicate raised {type(error).__name__}: {error}\n"
            f"  It was asked about node {node!r}; it must answer True or False for every node."
        )

    @classmethod
    def declared_twice(cls, name: str) -> "BoundaryError":
        return cls(
            f"splitting op {name!r} is declared twice with different settings. Declare it once."
        )


class PassError(CGCompileError, RuntimeError):
    """A pass failed, or left a graph that is not valid."""

    @classmethod
    def invalid(cls, name: str, problem: str) -> "PassError":
        return cls(
            f"pass {name!r} left an invalid graph: {problem}.\n"
            "  A pass may assume a valid graph and must leave one; see cgcompile.passes.verify."
        )

    @classmethod
    def changed_output(
        cls, name: str, graph: str, place: int, found: str, expected: str
    ) -> "PassError":
        return cls(
            f"pass {name!r} changed output {place} of {graph}: it is {found}; expected "
            f"{expected}.\n"
            "  What takes the output was traced with what it was. Convert it back in the pass, or "
            "change the model."
        )

    @classmethod
    def raised(cls, name: str, error: BaseException) -> "PassError":
        return cls(
            f"pass {name!r} raised {type(error).__name__}: {error}\n"
            "  Mend the pass, or leave it out; dump_passes writes the graph that it was given."
        )

    @classmethod
    def not_a_pass(cls, found: object) -> "PassError":
        return cls(
            f"a pass must have a name, uuid() and __call__(gm) -> gm; found {shown(found)}.\n"
            "  Wrap a plain function: cgcompile.passes.FunctionPass(name, function)."
        )


class SymbolError(CGCompileError, RuntimeError):
    """A size that is not what the compiled graph allows."""

    @classmethod
    def free(cls, value: str, symbols: Sequence[str], where: str) -> "SymbolError":
        return cls(
            f"{where}: the size of {value!r} depends on {listed(symbols)}, which no input of the "
            "graph gives.\n  Such a value cannot cross into a captured piece; please report this "
            "graph."
        )

    @classmethod
    def specialised(cls, dim: str, size: str, where: str) -> "SymbolError":
        return cls(
            f"{where}: your compiler fixed the dynamic dimension {dim} to {size}, so that what it "
            "made serves this size alone.\n"
            "  Look for a comparison of a size with a constant, or for int() of a size, or compile "
            "this model without dynamic sizes (dynamic=False)."
        )

    @classmethod
    def size_refused(
        cls, setting: str, size: int, dim: str, guard: str, where: str
    ) -> "SymbolError":
        return cls(
            f"{setting}: size {size} of {dim} is refused by the model's own guard "
            f"{guard}{where}.\n  Leave it out, or round it to a size that the guard allows."
        )


class PieceCompileError(CGCompileError, RuntimeError):
    """A piece cannot be compiled, or does not return what its trace has."""

    @classmethod
    def raised(
        cls, piece: str, compiler: str, where: str, error: BaseException
    ) -> "PieceCompileError":
        return cls(
            f"{piece}: compiler {compiler!r} raised {type(error).__name__}: {error}\n"
            f"  The piece is from {where}. options={{'compiler': 'eager'}} runs it uncompiled; "
            "a splitting op or cgcompile.eager_region() takes the op out of the piece."
        )

    @classmethod
    def not_traced(cls, piece: str, where: str, error: BaseException) -> "PieceCompileError":
        return cls(
            f"{piece}: running it on fake values of this size raised {type(error).__name__}: "
            f"{error}\n  The piece is from {where}. Leave the size out of compile_sizes, or "
            "compile_ranges_endpoints out, or take the op out of the piece with a splitting op."
        )

    @classmethod
    def bad_outputs(
        cls, piece: str, compiler: str, expected: int, found: str
    ) -> "PieceCompileError":
        return cls(
            f"{piece}: what compiler {compiler!r} made must return a tuple or list of {expected} "
            f"outputs; found {found}.\n  Return all outputs of the graph, in order."
        )

    @classmethod
    def unlike_traced(
        cls, piece: str, where: str, op: str, found: str, traced: str
    ) -> "PieceCompileError":
        return cls(
            f"{piece} ({where}): {op} returned {found}; traced was {traced}.\n"
            "  The function that was registered with register_fake must return the shapes and "
            "dtypes that the op returns: correct it."
        )

    @classmethod
    def not_callable(cls, piece: str, compiler: str, found: object) -> "PieceCompileError":
        return cls(
            f"{piece}: compiler {compiler!r} returned {shown(found)}; expected a callable "
            "that takes "
            "the inputs of the piece and returns the list of its outputs."
        )


class CacheError(CGCompileError, ValueError):
    """A question about the cache on disk that it cannot answer."""

    @classmethod
    def unknown_entry(cls, prefix: str, folder: str) -> "CacheError":
        return cls(
            f"no entry of {folder} has a key that starts with {prefix!r}.\n"
            "  'cgcompile cache list' shows what is there; --dir names another folder."
        )

    @classmethod
    def ambiguous_entry(cls, prefix: str, keys: Sequence[str]) -> "CacheError":
        return cls(
            f"{len(keys)} entries have a key that starts with {prefix!r}: {listed(keys)}.\n"
            "  Give more of the key."
        )

    @classmethod
    def caching_is_off(cls) -> "CacheError":
        return cls(
            "cache_dir is 'off': there is no cache folder to look at.\n"
            "  Name one with --dir, or unset CGCOMPILE_CACHE_DIR."
        )
