"""Errors of sizes, dispatch, buffers, managers and ranks. See ``cgcompile/errors/__init__.py``."""

from collections.abc import Sequence

from cgcompile.errors.root import CGCompileError, listed, shown

_SHOWN = 8  # a list of sizes may be long


def _some(sizes: Sequence[int]) -> str:
    rest = len(sizes) - _SHOWN
    return ", ".join(map(str, sizes[:_SHOWN])) + (f" and {rest} more" if rest > 0 else "")


class SizesError(CGCompileError, ValueError):
    """Batch sizes to capture that cannot be, or that nothing says how to choose."""

    @classmethod
    def number(cls, name: str, found: object, least: int) -> "SizesError":
        return cls(f"{name} = {shown(found)}; expected a whole number of at least {least}.")

    @classmethod
    def not_a_size(cls, found: object) -> "SizesError":
        return cls(
            f"capture sizes: {shown(found)} is none; expected whole numbers of at least 1.\n"
            "  A step without rows needs no graph."
        )

    @classmethod
    def empty(cls) -> "SizesError":
        return cls(
            "no capture sizes were given; expected at least one.\n"
            "  For steps without graphs take CUDAGraphMode.NONE."
        )

    @classmethod
    def above(cls, sizes: Sequence[int], maximum: int) -> "SizesError":
        return cls(
            f"capture sizes {_some(sizes)}: above the maximum of {maximum}, so that no batch needs "
            "them and no buffer holds them.\n  Leave them out, or raise the maximum."
        )

    @classmethod
    def no_multiple(cls, multiple: int, maximum: int) -> "SizesError":
        return cls(
            f"no capture size is possible: the maximum is {maximum}, and sizes must be multiples "
            f"of {multiple}.\n"
            "  Raise the maximum, or take a smaller query length or parallel size."
        )

    @classmethod
    def bad_entry(cls, batch: object, steps: object) -> "SizesError":
        return cls(
            f"histogram: {{{batch!r}: {steps!r}}}; expected batch size: number of steps, whole "
            "numbers of at least 1 and 0.\n  Leave idle steps out: they run nothing."
        )

    @classmethod
    def no_steps(cls) -> "SizesError":
        return cls(
            "fit_sizes(): the histogram holds no steps, so there is nothing to fit.\n"
            "  Count the batch sizes of real steps, or take capture_sizes()."
        )

    @classmethod
    def no_budget(cls) -> "SizesError":
        return cls(
            "fit_sizes(): no budget was given; without one every observed batch size would get a "
            "graph.\n  Give count=, or nbytes= and bytes_of=, or all three."
        )

    @classmethod
    def bytes_unknown(cls, nbytes: int) -> "SizesError":
        return cls(
            f"fit_sizes(nbytes={nbytes}): nothing says what a graph takes.\n"
            "  Give bytes_of=, a function from a size to the bytes of its graph."
        )

    @classmethod
    def bad_measure(cls, name: str, size: int, found: object, expected: str) -> "SizesError":
        return cls(f"fit_sizes(): {name}({size}) returned {shown(found)}; expected {expected}.")

    @classmethod
    def too_few_bytes(cls, nbytes: int, size: int, needed: int) -> "SizesError":
        return cls(
            f"fit_sizes(nbytes={nbytes}): the graph of size {size}, which alone would cover all "
            f"batches, takes {needed} bytes.\n"
            "  Raise nbytes, lower maximum, or give cost_without_graph=, so that large batches may "
            "run without a graph."
        )

    @classmethod
    def not_covered(cls, batch: int, largest: int) -> "SizesError":
        return cls(
            f"fit_sizes(): the largest candidate is {largest}, and batches of {batch} were "
            f"observed.\n  Add a candidate, or give maximum={largest}: larger batches then run "
            "without a graph."
        )


class BatchError(CGCompileError, ValueError):
    """A batch that contradicts itself, or a graph that a dispatcher did not plan."""

    @classmethod
    def field(cls, name: str, value: object, expected: str) -> "BatchError":
        return cls(f"dispatch: {name} = {shown(value)}; expected {expected}.")

    @classmethod
    def not_uniform(
        cls, num_tokens: int, num_reqs: int | None, max_query_len: int | None
    ) -> "BatchError":
        return cls(
            f"dispatch(num_tokens={num_tokens}, num_reqs={num_reqs}, "
            f"max_query_len={max_query_len}, uniform_decode=True): requests of one length need "
            "num_tokens == num_reqs * max_query_len.\n"
            "  Give the numbers before padding, or uniform_decode=False."
        )

    @classmethod
    def which_query_len(cls, num_tokens: int, known: Sequence[int]) -> "BatchError":
        return cls(
            f"dispatch(num_tokens={num_tokens}, uniform_decode=True): there are graphs for several "
            f"query lengths ({listed(map(str, known))}), and nothing says which one this is.\n"
            "  Give num_reqs or max_query_len."
        )

    @classmethod
    def axes(cls, extra: object, names: Sequence[str]) -> "BatchError":
        return cls(
            f"dispatch: extra = {extra!r}; expected a tuple with one hashable value per axis, each "
            f"comparable with the listed ones: {listed(names)}."
        )

    @classmethod
    def not_planned(cls, mode: str, descriptor: str) -> "BatchError":
        return cls(
            f"no graph is planned for mode {mode} and {descriptor}.\n"
            "  Take modes and descriptors from plan()."
        )

    @classmethod
    def lengths_differ(cls, lengths: int, flags: int) -> "BatchError":
        return cls(
            f"is_uniform_decode: {lengths} query lengths and {flags} flags of prefill; expected "
            "one of each per request."
        )


class InputBufferError(CGCompileError, ValueError):
    """A declared input buffer, or data for one, that cannot be."""

    @classmethod
    def shape(cls, name: str, shape: object) -> "InputBufferError":
        return cls(
            f"InputBuffer {name!r}: shape={shape!r}; expected sizes of which exactly one is "
            "'tokens', 'reqs' or 'reqs+1'.\n  Name the dimension that grows with the batch."
        )

    @classmethod
    def tail(cls, name: str, tail: object, dtype: str) -> "InputBufferError":
        return cls(
            f"InputBuffer {name!r}: tail={tail!r}; expected a number that {dtype} has, or None."
            "\n  It is what padded rows hold: token 0, slot -1, sequence length 0."
        )

    @classmethod
    def dummy_value(cls, name: str, found: object, dtype: str) -> "InputBufferError":
        return cls(
            f"InputBuffer {name!r}: dummy_value={found!r}; expected a number that {dtype} has, "
            "'num_tokens', or None.\n  It is what rows hold in warm-ups and captures: "
            "'num_tokens' for sequence lengths."
        )

    @classmethod
    def twice(cls, name: str) -> "InputBufferError":
        return cls(f"two input buffers are called {name!r}.\n  Give each a name of its own.")

    @classmethod
    def unknown(cls, name: str, known: Sequence[str]) -> "InputBufferError":
        return cls(
            f"no input buffer is called {name!r}; there are {', '.join(known) or 'none'}.\n"
            "  Declare it with an InputBuffer, so that it has an address of its own."
        )

    @classmethod
    def missing(cls, name: str) -> "InputBufferError":
        return cls(
            f"input {name!r} is None, or left out.\n"
            "  Give its rows, or declare the buffer with optional=True: the model gets None then."
        )

    @classmethod
    def value(cls, name: str, expected: str, found: str, counts: str) -> "InputBufferError":
        return cls(
            f"input {name!r} is {found}; expected {expected}.\n"
            f"  Give the real rows ({counts} of the batch), unpadded, in the declared dtype."
        )

    @classmethod
    def gradients(cls, name: str) -> "InputBufferError":
        return cls(
            f"input {name!r} requires grad, which a copy to a buffer that stays cannot give it.\n"
            "  Give it detached, or call the model itself to train."
        )

    @classmethod
    def not_padded(
        cls, tokens: int, reqs: int, padded_tokens: int, padded_reqs: int
    ) -> "InputBufferError":
        return cls(
            f"a batch of {tokens} tokens and {reqs} requests does not fit into {padded_tokens} and "
            f"{padded_reqs}, padded.\n  Tell the dispatcher num_reqs as it is."
        )

    @classmethod
    def too_large(
        cls, tokens: int, reqs: int, most_tokens: int, most_reqs: int
    ) -> "InputBufferError":
        return cls(
            f"a batch of {tokens} tokens and {reqs} requests; the buffers have room for "
            f"{most_tokens} and {most_reqs}.\n  Split the batch, or make the manager with a larger "
            "max_num_tokens or max_num_reqs."
        )


class ManagerError(CGCompileError, RuntimeError):
    """The manager was asked for something that it has not, or given what it cannot serve."""

    @classmethod
    def no_graph(cls, num_tokens: int, captured: Sequence[int]) -> "ManagerError":
        sizes = ", ".join(map(str, captured)) or "none"
        return cls(
            f"No cudagraph for {num_tokens} tokens; captured FULL: {sizes}.\n"
            "  Ask get_cudagraph_size() for a size first, and capture() before."
        )

    @classmethod
    def no_replay(cls, batch: str) -> "ManagerError":
        return cls(
            f"run_fullgraph: FULL, {batch} cannot be replayed here: gradients are asked for, or a "
            "capture or an eager region is open.\n  Call it under torch.no_grad() or "
            "torch.inference_mode(), outside of captures and of cgcompile.eager_region()."
        )

    @classmethod
    def other_thread(cls, method: str) -> "ManagerError":
        return cls(
            f"{method}: another thread is inside of a call of this manager, whose buffers hold one "
            "step.\n"
            "  Call a manager from one thread at a time: take a lock of your own around the step "
            "and the reading of its results."
        )

    @classmethod
    def capture_mode(cls, mode: str) -> "ManagerError":
        return cls(
            f"cannot capture in mode {mode}; expected PIECEWISE or FULL.\n"
            "  NONE has no graphs; pairs such as FULL_AND_PIECEWISE are captured one by one."
        )

    @classmethod
    def twice(cls, mode: str, batch: str) -> "ManagerError":
        return cls(
            f"{mode}, {batch}: captured already.\n"
            "  release() drops all graphs, so that they can be captured again."
        )

    @classmethod
    def no_metadata(cls, batch: str) -> "ManagerError":
        return cls(
            f"FULL, {batch}: no attention metadata to capture with.\n"
            "  Attention is inside of a FULL graph, and what it reads is recorded: let metadata() "
            "return it for every FULL descriptor."
        )

    @classmethod
    def too_few_bytes(cls, budget: int, needed: int) -> "ManagerError":
        return cls(
            f"max_graph_bytes={budget}: the largest graph of each kind, without which batches "
            f"would run plain, may take {needed} bytes.\n"
            "  Give as much, or lower the largest sizes; print(manager.plan()) shows what takes it."
        )

    @classmethod
    def no_axis(cls, name: str) -> "ManagerError":
        return cls(
            f"input {name!r} is optional, and the dispatcher has no axis of that name, exact and "
            "of all graphs.\n"
            f"  Graphs with and without it differ: axes=[Axis({name!r}, (False, True))]."
        )

    @classmethod
    def presence(cls, name: str, said: object) -> "ManagerError":
        return cls(
            f"input {name!r}: the batch says {said!r} in extra; expected whether it is given.\n"
            "  Say True with a tensor, False with None."
        )

    @classmethod
    def rows(cls, found: object) -> "ManagerError":
        return cls(
            f"outputs={shown(found)}; expected 'tokens' or 'reqs', or one of them for each "
            "output.\n"
            "  Say what the first dimension of what the model returns counts."
        )

    @classmethod
    def count(cls, declared: int, found: int) -> "ManagerError":
        return cls(
            f"the model returned {found} tensors; outputs= names {declared}.\n"
            "  Name one for each tensor of the flattened result, or one for all."
        )

    @classmethod
    def output(cls, found: str, rows: str, size: int) -> "ManagerError":
        return cls(
            f"the model returned {found}; expected a tensor with {size} rows ({rows} of the padded "
            "batch).\n  Say with outputs= what the rows of results count: 'tokens' or 'reqs'."
        )

    @classmethod
    def other_outputs(cls) -> "ManagerError":
        return cls(
            "the model returned other outputs (number, nesting, dtype or trailing sizes) than for "
            "the first batch.\n  All sizes share one set of output buffers; return the same kinds "
            "of tensors from each step."
        )


class AgreementError(CGCompileError, RuntimeError):
    """Ranks that must run the same graph would not."""

    @classmethod
    def tables(cls, ranks: Sequence[int]) -> "AgreementError":
        named = ", ".join(map(str, ranks))
        return cls(
            f"the dispatchers of ranks {named} plan other graphs than that of rank 0.\n"
            "  Make them with equal arguments: mode, sizes, limits, query lengths, LoRA and axes."
        )

    @classmethod
    def differs(cls, rank: int, found: str, first: str) -> "AgreementError":
        return cls(
            f"rank {rank} is about to run {found}; rank 0 {first}.\n"
            "  Let every rank call Agreement.dispatch() at each step, and run what it returns."
        )

    @classmethod
    def no_group(cls) -> "AgreementError":
        return cls(
            "Agreement: torch.distributed has no process group, so there are no ranks to agree "
            "with.\n  Call torch.distributed.init_process_group() first, or leave the agreement "
            "out."
        )

    @classmethod
    def backend(cls, found: str) -> "AgreementError":
        return cls(
            f"the process group has backend {shown(found)}, which takes no tensors of the CPU.\n"
            "  Give Agreement a group of its own: torch.distributed.new_group(backend='gloo')."
        )

    @classmethod
    def missing(cls, rank: int, does: str, missing: Sequence[int], said: str) -> "AgreementError":
        who = "no rank can be named"
        if missing:
            who = f"not there: rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        return cls(
            f"rank {rank} {does}, and waited for all ranks in vain; {who}.\n"
            "  Every rank must take part in each step: one without work calls run(None). Look for "
            "what ended or holds up the other; the group has to be made anew.\n"
            f"  torch.distributed said: {said}"
        )

    @classmethod
    def gave_up(cls, rank: int) -> "AgreementError":
        return cls(
            f"rank {rank} raised an exception in plan() or in a capture.\n"
            "  Its own message says why; no rank has the graphs that it was at."
        )

    @classmethod
    def out_of_step(cls, rank: int, found: str, first: str) -> "AgreementError":
        return cls(
            f"rank {rank} {found}; rank 0 {first}.\n"
            "  Let every rank make the same calls in the same order: capture(), then run() at each "
            "step, with a batch or with None."
        )

    @classmethod
    def other_dispatcher(cls) -> "AgreementError":
        return cls(
            "the agreement asks another dispatcher than the manager's.\n"
            "  Give both the same object: Agreement(dispatcher), "
            "CudaGraphManager(model, dispatcher, agreement=...)."
        )
