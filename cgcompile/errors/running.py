"""Errors of capture, dispatch and replay. See ``cgcompile/errors/__init__.py``."""

from collections.abc import Sequence

from cgcompile.errors.root import CGCompileError, close


class GradientError(CGCompileError, RuntimeError):
    """Gradients were asked for where they would be wrong."""

    @classmethod
    def of_a_capture(cls, what: str) -> "GradientError":
        return cls(
            f"{what}: a result of the captured step requires grad, and graphs have no gradients. "
            "The step has run; nothing is kept.\n"
            "  Call it under torch.no_grad() or torch.inference_mode()."
        )

    @classmethod
    def recomputes(cls) -> "GradientError":
        return cls(
            "this step needs gradients (grad mode is on and an input requires it), and the model "
            "uses torch.utils.checkpoint: outside of its own compiler, torch would recompute with "
            "other random numbers.\n"
            "  Call the model under torch.no_grad() or torch.inference_mode(), or train it with "
            "another backend."
        )


class CaptureError(CGCompileError, RuntimeError):
    """A capture that cannot begin, cannot go on, or could not end.

    Attributes:
        op: the op that a capture cannot hold; empty where it is not about one.
        field: the field that captured code rebinds, such as ``self.buf``; empty likewise.
    """

    op: str = ""
    field: str = ""

    @classmethod
    def refused(cls, op: str) -> "CaptureError":
        return _about(
            op,
            f"{op}: operation not permitted when stream is capturing. The host would read what the "
            "device computes, but nothing is computed while a graph is recorded.\n"
            "  Keep the value on the device, or run the op outside of the graph: a splitting op or "
            "cgcompile.eager_region().",
        )

    @classmethod
    def pageable(cls, op: str, shape: str) -> "CaptureError":
        return _about(
            op,
            f"{op} copies a tensor {shape} of Python data from pageable host memory: operation not "
            "permitted when stream is capturing.\n"
            "  Create it once, outside of the step (register_buffer), or on the device "
            "(torch.full, torch.arange); or run the op outside of the graph: a splitting op or "
            "cgcompile.eager_region().",
        )

    @classmethod
    def replaces_memory(cls, what: str, name: str, count: int) -> "CaptureError":
        more = f" (and {count - 1} more)" if count > 1 else ""
        return cls(
            f"capture of {what}: the step replaces the memory or layout of {name}{more}, which "
            "exists before the step, as .data = or set_() do. Replays would not: they read the "
            "memory of the first step again.\n"
            "  Write in place (copy_, mul_). The tensor has the memory that it had before the "
            "capture."
        )

    @classmethod
    def replaces_argument(cls, op: str, shape: str) -> "CaptureError":
        return _about(
            op,
            f"{op} replaces the memory of its argument {shape}: operation not permitted when "
            "stream is capturing. Replays would not: they read the memory of the first step.\n"
            "  Write in place (copy_, mul_), or run the op outside of the graph: a splitting op or "
            "cgcompile.eager_region().",
        )

    @classmethod
    def seeded(cls, before: int, after: int) -> "CaptureError":
        return _about(
            "torch.manual_seed",
            f"torch.manual_seed({after}): operation not permitted when stream is capturing; the "
            f"seed was {before}. A replay does not set the seed.\n"
            "  Seed before the step.",
        )

    @classmethod
    def ended_recording(cls, op: str) -> "CaptureError":
        return _about(
            op,
            f"{op} ran in a segment that has ended: autograd's backward pass restored the state "
            "of before an eager break.\n"
            "  Move the break out of the backward pass.",
        )

    @classmethod
    def break_in_backward(cls, name: str) -> "CaptureError":
        return cls(
            f"eager break {name!r} ran inside of autograd's backward pass, which runs in threads "
            "of its own, where no segment can end.\n"
            "  Call the break before or after backward(), or capture inference alone."
        )

    @classmethod
    def nested(cls, what: str) -> "CaptureError":
        return cls(
            f"{what}: a capture runs in this thread already, and captures do not nest.\n"
            "  Inside a capture call the plain function: its work becomes part of that graph."
        )

    @classmethod
    def region_inside(cls) -> "CaptureError":
        return cls(
            "cgcompile.eager_region() inside of a capture: what runs in it would become part of "
            "the graph. It takes code out of graphs where a model is traced.\n"
            "  Put the code into a function with @cgcompile.eager_break_during_capture and capture "
            "with a breakable wrapper, or compile the model."
        )

    @classmethod
    def no_segment(cls, what: str) -> "CaptureError":
        return cls(
            f"{what}: no graph segment is being captured here.\n"
            "  Call it inside of the with block of the capture, and not inside of a break."
        )

    @classmethod
    def no_device(cls, found: str) -> "CaptureError":
        return cls(
            f"capture: device {found!r} has no graphs here.\n"
            "  Expected a CUDA device, or 'cpu' for the host recorder."
        )

    @classmethod
    def no_ranges(cls, found: str) -> "CaptureError":
        return cls(
            f"tracing_ranges(): this torch has no NVTX ({found.strip().splitlines()[0]}).\n"
            "  Expected a build with CUDA. torch.profiler shows the ranges without this context; "
            "for another profiler give its own push= and pop=."
        )

    @classmethod
    def twice(cls, what: str, advice: str = "Call reset() first.") -> "CaptureError":
        return cls(f"{what}: this graph holds a recording already.\n  {advice}")

    @classmethod
    def empty(cls) -> "CaptureError":
        return cls("replay() of a graph that holds no recording.\n  Capture first.")

    @classmethod
    def freed_input(cls, what: str, shape: str) -> "CaptureError":
        return cls(
            f"replay: {what} reads an input {shape} that was freed after the capture.\n"
            "  A graph reads the memory it saw: keep the captured buffers alive, and write new "
            "data into them."
        )

    @classmethod
    def opaque_result(cls, name: str, found: str) -> "CaptureError":
        return cls(
            f"eager break {name!r} returned {found}: no graph could read it at the next replay.\n"
            "  Return dense tensors and plain values, in lists, tuples, dicts or dataclasses, or "
            "write into a tensor that was passed in."
        )

    @classmethod
    def under_transform(cls, name: str, transform: str) -> "CaptureError":
        return cls(
            f"eager break {name!r} ran inside of torch.func ({transform}), whose tensors exist "
            "only there: no replay could give it any, or take any from it.\n"
            "  Put the transform into the break, or write the batch dimension out."
        )

    @classmethod
    def rebinds(cls, what: str, field: str, before: str, after: str) -> "CaptureError":
        error = cls(
            f"capture of {what}: the step rebinds {field} (before: {before}; after: {after}); a "
            "replay runs no Python and would not.\n"
            "  Write tensors in place (copy_, mul_, ...), count in a tensor, or rebind the field "
            "outside of the step or in a function under eager_break_during_capture.\n"
            "  A number that no step reads may be kept in an object that is no module."
        )
        error.field = field
        return error

    @classmethod
    def math_attention(cls) -> "CaptureError":
        return cls(
            "scaled_dot_product_attention takes its math kernel here, and under no_grad arrives as "
            "many small ops, so that it cannot be a break.\n"
            "  Call the model under torch.inference_mode(), where it arrives as one op; or put its "
            "caller under cgcompile.eager_break_during_capture."
        )

    @classmethod
    def no_breaks(cls, what: str, names: str) -> "CaptureError":
        return cls(
            f"capture of {what}: splitting ops were declared ({names}), and none of them ran. "
            "Attention that the graph holds would repeat this step's metadata for ever.\n"
            "  Check the names against the ops that really run, or declare none."
        )

    @classmethod
    def inside_full(cls, op: str, support: str, batch: str) -> "CaptureError":
        return _about(
            op,
            f"splitting op {op!r} (support {support}) ran inside of a FULL graph for {batch}.\n"
            "  Capture this batch in mode PIECEWISE, or declare how far the op can go: "
            "SplittingOp(..., support=AttentionCGSupport....).",
        )

    @classmethod
    def unjoined_stream(cls) -> "CaptureError":
        return cls(
            "the capture ended with unjoined work: a stream that forked from the capturing one is "
            "not joined, so nothing says when a replay may go on.\n"
            "  Join it within forward, and before each break: "
            "torch.cuda.current_stream().wait_stream(side). cgcompile.doctor names the line."
        )

    @classmethod
    def swallowed(cls, what: str, name: str, error: BaseException) -> "CaptureError":
        return cls(
            f"capture of {what}: {name} raised {type(error).__name__}, and the program went on: "
            "what came after it was not recorded.\n"
            "  Let the exception pass through the capture, or handle it inside of the break."
        )

    @classmethod
    def open_break(cls, what: str) -> "CaptureError":
        return cls(
            f"capture of {what}: a function under no_graph raised, and the program went on: what "
            "came after it was not recorded.\n"
            "  Let the exception pass through the capture, or handle it inside of the function."
        )

    @classmethod
    def other_thread(cls, name: str, what: str) -> "CaptureError":
        return cls(
            f"{name}: called with memory of the capture of {what}, from another thread than the "
            "one that captures. Nothing would record it.\n"
            "  Call it in the thread that captures."
        )

    @classmethod
    def escaped(cls, op: str, name: str) -> "CaptureError":
        return cls(
            f"{op} is captured and reads a tensor that the eager break {name!r} made and did not "
            "return: the next replay makes it anew, somewhere else.\n"
            "  Return the tensor from the break, or write into one that was passed in."
        )

    @classmethod
    def writes_a_copy(cls, op: str, name: str) -> "CaptureError":
        return cls(
            f"{op} is captured and writes a tensor that the eager break {name!r} returned and that "
            "the program keeps: the graph would write a copy of it.\n"
            "  Pass the tensor in from outside of the break, or write it inside of the break."
        )

    @classmethod
    def mode_in_between(cls, found: str) -> "CaptureError":
        return cls(
            f"eager break: {found}, a dispatch mode of the program, was entered inside of the "
            "capture, and a break cannot step out of it.\n"
            "  Enter it around the whole capture, or leave it before the break."
        )

    @classmethod
    def release_inside(cls) -> "CaptureError":
        return cls(
            "graphs were to be released inside of a capture, which uses their memory.\n"
            "  Release them after the capture."
        )

    @classmethod
    def mutates_arguments(cls, name: str) -> "CaptureError":
        return cls(
            f"eager break {name!r} changed a list or dict that it was given, but it gets the same "
            "one at every replay.\n"
            "  Return what it makes, or keep state in an object of its own."
        )

    @classmethod
    def stale_copy(cls, name: str) -> "CaptureError":
        return cls(
            f"eager break {name!r} returned a tensor that the program keeps, and it, or the copy "
            "of it that graphs read, was written later in the step: one of the two is stale.\n"
            "  Pass the tensor in from outside of the break, or write it before it is returned."
        )

    @classmethod
    def reentered(cls) -> "CaptureError":
        return cls(
            "a compiled graph was called from inside one of its own steps: its buffers hold that "
            "step.\n  Call another compiled model there, or the plain one."
        )


def _about(op: str, text: str) -> CaptureError:
    error = CaptureError(text)
    error.op = op
    return error


class CaptureBusyError(CaptureError):
    """A second capture, while one runs in this process.

    Attributes:
        same_thread: whether the capture that runs is one of this thread.
    """

    same_thread = False

    @classmethod
    def busy(cls, what: str, running: str, same_thread: bool) -> "CaptureBusyError":
        where = "in this thread" if same_thread else "in another thread"
        error = cls(
            f"capture of {what}: the capture of {running} runs {where}, and a process can run one "
            "at a time.\n  Capture one after the other; inside a capture call the plain function."
        )
        error.same_thread = same_thread
        return error


class DispatchError(CGCompileError, RuntimeError):
    """A step could not run as the forward context or ``strict`` demands."""

    @classmethod
    def no_descriptor(cls, what: str, mode: str) -> "DispatchError":
        return cls(
            f"{what}: the forward context asks for mode {mode} and has no batch descriptor, so "
            "nothing says which graph to replay.\n"
            "  set_forward_context(..., batch_descriptor=BatchDescriptor(num_tokens=...))."
        )

    @classmethod
    def bad_mode(cls, where: str, mode: str) -> "DispatchError":
        return cls(
            f"{where}(runtime_mode={mode}): a wrapper serves a runtime mode that has "
            "graphs.\n  Take CUDAGraphMode.PIECEWISE or CUDAGraphMode.FULL."
        )

    @classmethod
    def no_such_rows(
        cls, batch: str, rows: int, shapes: Sequence[tuple[int, ...]]
    ) -> "DispatchError":
        given = ", ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        return cls(
            f"the compiled step, {batch}: no input has {rows} rows; shapes of the inputs: "
            f"{given}.\n"
            "  num_tokens is the rows of the batch as it is given to the model, padding included. "
            "Coverage and padding are counted in it."
        )

    @classmethod
    def cannot_copy(cls, what: str) -> "DispatchError":
        return cls(
            f"{what}: on_input_change='copy', but a wrapper does not know which inputs its "
            "runnable writes.\n  Write into the same buffers, take 'raise', 'recapture' or "
            "'eager', or compile the model: its entry knows."
        )

    @classmethod
    def other_breaks(cls, what: str, now: Sequence[str], before: Sequence[str]) -> "DispatchError":
        return cls(
            f"{what}: the plain step breaks at {', '.join(now) or 'nothing'}; recorded were "
            f"{', '.join(before) or 'none'}.\n"
            "  Its Python takes another way than at capture: put what it depends on into the "
            "batch descriptor (extra=...)."
        )

    @classmethod
    def nothing_verified(cls, why: str) -> "DispatchError":
        return cls(
            f"verify: this call replays no graph, so there is nothing to compare: {why}.\n"
            "  Call the model until its step is captured, and verify then."
        )

    @classmethod
    def strict(cls, what: str, reason: str, detail: str) -> "DispatchError":
        return cls(
            f"{what} would run without a graph: {reason}: {detail}.\n"
            "  strict=True forbids that. Remove the cause, or set strict=False to count it."
        )


class WeightsError(CGCompileError, ValueError):
    """New weights that do not fit the module."""

    @classmethod
    def unknown(cls, name: str, known: Sequence[str]) -> "WeightsError":
        return cls(
            f"update_weights(): the module has no parameter or buffer {name!r}."
            f"{close(name, known)}\n  Nothing was written."
        )

    @classmethod
    def shape(cls, name: str, found: str, expected: str) -> "WeightsError":
        return cls(
            f"update_weights(): {name!r} is {found}; expected a tensor {expected}.\n"
            "  Nothing was written. A graph keeps the shapes of its weights: another shape needs "
            "another model."
        )


class GuardError(CGCompileError, RuntimeError):
    """Something that a graph has recorded is not what this call gives."""


class AddressChangedError(GuardError):
    """A tensor that a graph reads or writes lies elsewhere now."""

    @classmethod
    def moved(
        cls, what: str, batch: str, path: str, now: int, before: int
    ) -> "AddressChangedError":
        return cls(
            f"{what}, {batch}: {path} is at {now:#x}, was at {before:#x} when captured.\n"
            "  A CUDA graph reads the address it saw at capture. Write into the same buffer each "
            "step, or call without a forward context, where inputs are copied."
        )

    @classmethod
    def moved_in_wrapper(
        cls, what: str, batch: str, path: str, now: int, before: int
    ) -> "AddressChangedError":
        return cls(
            f"{what}, {batch}: {path} is at {now:#x}, was at {before:#x} when captured.\n"
            "  A CUDA graph reads the address it saw at capture, and a wrapper copies no inputs. "
            "Write into the same buffer each step, or set on_input_change to 'recapture' or "
            "'eager'."
        )

    @classmethod
    def grown(cls, now: int, before: int) -> "AddressChangedError":
        return cls(
            f"a result lies at {now:#x} now, was at {before:#x} when captured.\n"
            "  A CUDA graph writes its results where it did at capture, and resize_() has moved "
            "that memory. Clone a result before you let it grow; drop the graphs (clear_graphs()) "
            "and capture again."
        )

    @classmethod
    def metadata(cls, batch: str, path: str, now: int | None, before: int) -> "AddressChangedError":
        found = "missing" if now is None else f"at {now:#x}"
        return cls(
            f"FULL, {batch}: metadata {path} is {found}, was at {before:#x} when captured.\n"
            "  A FULL graph reads metadata where it was at capture: let metadata() return views of "
            "the buffers that it is given, or of others that stay. What no graph reads may be left "
            "out, or the check with check_metadata=False."
        )

    @classmethod
    def weight(cls, what: str, batch: str, path: str) -> "AddressChangedError":
        return cls(
            f"{what}, {batch}: weight {path!r} was replaced or moved after it was captured.\n"
            "  A CUDA graph reads the weights where they were. Write new values in place "
            "(cgcompile.update_weights), or drop the graphs (clear_graphs()) and capture again."
        )


class HostValueChangedError(GuardError):
    """A number, flag, layout or structure that a graph has recorded is another one now."""

    @classmethod
    def changed(
        cls, what: str, batch: str, path: str, now: object, before: object
    ) -> "HostValueChangedError":
        return cls(
            f"{what}, {batch}: {path} is {now}, was {before} when captured.\n"
            "  A CUDA graph repeats the host values it saw at capture. Put what varies into the "
            "batch descriptor (extra=...), into a tensor, or into the forward context."
        )

    @classmethod
    def cpu_scalar(
        cls, what: str, batch: str, path: str, now: object, before: object
    ) -> "HostValueChangedError":
        return cls(
            f"{what}, {batch}: the 0-dim CPU tensor {path!r} is {now}, was {before} when "
            "captured.\n"
            "  A CUDA graph repeats the value that its kernels were launched with. Move the tensor "
            "to the device of the model; a graph reads it there at each replay."
        )

    @classmethod
    def other_arguments(
        cls, what: str, batch: str, now: str, before: str
    ) -> "HostValueChangedError":
        return cls(
            f"{what}, {batch}: called with {now}; it was {before} when captured.\n"
            "  Pass each argument the way it was passed at capture, by position or by name, in "
            "containers of the same structure."
        )


def stale_result(item: int, what: str, step: int) -> str:
    """The text of a ``RuntimeError`` of torch, where a result is touched that is overwritten."""
    return (
        f"result {item} of {what} (step {step} with graphs) is stale: a later step has overwritten "
        "its memory.\n  Under a forward context results are views of graph memory, valid until the "
        "next step. Clone what must live longer: result.clone()."
    )


def missing_attribute(wrapper: str, wrapped: str, name: str) -> str:
    """The text of an ``AttributeError``, which is Python's own and no error of this tree."""
    return f"neither {wrapper} nor the {wrapped} that it wraps has an attribute {name!r}"
