"""Errors of the engine's side of graphs, with their messages. See ``cgcompile.errors``."""

from cgcompile.errors import CGCompileError, Template


class InputBufferError(CGCompileError, ValueError):
    """A declared input buffer, or data for one, that cannot be."""

    shape = Template("""
        InputBuffer {name!r}: shape={shape!r}; expected sizes of which exactly one is 'tokens', \
        'reqs' or 'reqs+1'.
        Name the dimension that grows with the batch.""")
    tail = Template("""
        InputBuffer {name!r}: tail={tail!r}; expected a number that {dtype} has, or None.
        It is what padded rows hold: token 0, slot -1, sequence length 0.""")
    dummy_value = Template("""
        InputBuffer {name!r}: dummy_value={found!r}; expected a number that {dtype} has, \
        'num_tokens', or None.
        It is what rows hold in warm-ups and captures: 'num_tokens' for sequence lengths.""")
    twice = Template("""
        two input buffers are called {name!r}.
        Give each a name of its own.""")
    no_parameter = Template("""
        InputBuffer {name!r}: {model} has no parameter of that name.{known:close {name}}
        Parameters: {known:list none}. Rename the buffer, or declare argument=False: metadata() \
        gets it then, and not the model.""")
    unknown = Template("""
        no input buffer is called {name!r}; there are {known:list none}.
        Declare it with an InputBuffer, so that it has an address of its own.""")
    missing = Template("""
        input {name!r} is None, or left out.
        Give its rows, or declare the buffer with optional=True: the model gets None then.""")
    value = Template("""
        input {name!r} is {found}; expected {expected}.
        Give the real rows ({counts} of the batch), unpadded, in the declared dtype.""")
    gradients = Template("""
        input {name!r} requires grad, which a copy to a buffer that stays cannot give it.
        Give it detached, or call the model itself to train.""")
    not_padded = Template("""
        a batch of {real[0]} tokens and {real[1]} requests does not fit into {padded[0]} and \
        {padded[1]}, padded.
        Tell the dispatcher num_reqs as it is.""")
    too_large = Template("""
        a batch of {real[0]} tokens and {real[1]} requests; the buffers have room for {most[0]} \
        and {most[1]}.
        Split the batch, or make the manager with a larger max_num_tokens or max_num_reqs.""")


class AgreementError(CGCompileError, RuntimeError):
    """Ranks that must run the same graph would not."""

    tables = Template("""
        the dispatchers of ranks {ranks:list} plan other graphs than that of rank 0.
        Make them with equal arguments: mode, sizes, limits, query lengths, LoRA and axes.""")
    differs = Template("""
        rank {rank} is about to run {found}; rank 0 {first}.
        Let every rank call Agreement.dispatch() at each step, and run what it returns.""")
    backend = Template("""
        the process group has backend {found:shown}, which takes no tensors of the CPU.
        Give Agreement a group of its own: torch.distributed.new_group(backend='gloo').""")
    missing = Template("""
        rank {rank} {does} (step {step}), and waited for all ranks in vain; {missing:if not there: \
        {missing:plural rank}|no rank can be named}.
        Every rank must take part in each step: one without work calls run(None). Look for what \
        ended or holds up the other; the group has to be made anew.
        torch.distributed raised: {error}""")
    gave_up = Template("""
        rank {rank} raised an exception in plan() or in a capture.
        Its own message has the cause; no rank has the graphs of that call.""")
    out_of_step = Template("""
        rank {rank} {found}; rank 0 {first}.
        Let all ranks make the same calls: capture(), then run() at each step, with a batch or \
        None.""")
    other_dispatcher = Template("""
        the agreement has another dispatcher than the manager.
        Pass the agreement alone: CudaGraphManager(model, Agreement(dispatcher), ...).""")
