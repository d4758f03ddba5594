"""The fast path of a call of a compiled model: it repeats the last replay of a step.

A call compares its arguments, runs the Python that Dynamo left around the graph, and runs the
compiled graph. Where that Python only reads sizes, arguments of the same layouts at the same
addresses pass the same inputs to the graph. So :class:`CallFastPath` generates one function for all
three, for each recorded step::

    def step(args, kwargs):
        ...                                             # which context, which step
        if hooks_0 or hooks_1:
            return another
        if len(args) != 2 or kwargs:
            return another
        (v2, v3,) = args
        ...                                             # what else ``fits`` checks
        (out_0,) = lent.tensors
        if not alike(v2, v3, out_0) or v2.data_ptr() != at_1 or ...:
            ...
        with lock:
            ...
            replay()
            ...
            return out_0

The rule: where a check fails, the function returns ``another`` and the full path decides.
"""

import logging
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, NamedTuple

import torch

from cgcompile import torch_compat as compat
from cgcompile.context import callers_context
from cgcompile.errors import GuardError
from cgcompile.runtime.compiled_graph import CompiledGraph
from cgcompile.runtime.fast_path import Again, made_step, step_source
from cgcompile.tracing.argument_guards import FitsText

log = logging.getLogger(__name__)

_ATTEMPTS = 16  # at one step, of calls that differ in more than addresses and sizes
_CONTAINERS = (tuple, list, dict, slice)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class CallFastPath:
    """Generate fast paths for the calls of one trace; ``turn``, of its graph, keeps them."""

    def __init__(
        self,
        graph: CompiledGraph,
        text: FitsText,
        python: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        self.turn = graph.turn
        self._text, self._python = text, python
        self._attempts: dict[Any, int] = {}
        self._epoch = self.turn.epoch  # of these attempts

    def learn(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], bound: Any, hooks: Sequence[Any]
    ) -> None:
        """Generate the fast path of a call that just ran, if it replayed a recorded step.

        ``bound`` is the first of ``args`` where no caller passes it. ``hooks`` must stay empty.
        """
        again, context = self.turn.again, callers_context()
        if again is None or context is None or any(hooks):
            return
        if self.turn.owner == get_ident():
            return  # a call inside of a step ran plain; the step holds the lock
        if self._epoch is not self.turn.epoch:
            self._attempts.clear()
            self._epoch = self.turn.epoch
        key = again.recording.batch.mode, again.recording.batch.descriptor
        if key != (context.cudagraph_runtime_mode, context.batch_descriptor):
            return
        attempts = self._attempts.get(key, 0)
        if attempts == _ATTEMPTS:
            return
        self._attempts[key] = attempts + 1
        try:
            source, names = self._text_of(again, args, kwargs, bound, hooks)
        except (_NoFastPath, GuardError):
            return
        except Exception as error:  # the full path serves all calls
            log.warning("no fast path: %s: %s", type(error).__name__, error)
            return
        step = made_step(source, names)
        with self.turn.lock:
            if self.turn.again is again:
                self.turn.short = self.turn.shorts[key] = step

    def _text_of(
        self,
        again: Again,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        bound: Any,
        hooks: Sequence[Any],
    ) -> tuple[str, dict[str, Any]]:
        """Return the source of the function, and the names that it refers to."""
        values = (*args, *(kwargs[name] for name in self._text.keywords))
        if any(isinstance(value, _CONTAINERS) for value in values):
            raise _NoFastPath  # the next call may pass it with other items
        if again.watches_weights:
            raise _NoFastPath  # the full path finds the graphs of other weights
        inputs, result = self._around(again, args, kwargs)
        lines = _Lines(again, self._text, values)
        lines.hooks(hooks)
        lines.arguments(len(args), list(kwargs), 0 if bound is None else 1, inputs)
        lines.layouts(inputs)
        if again.alone is not None:
            lines.names |= again.alone
        source = step_source(
            "args, kwargs",
            "\n".join(lines.lines) + "\n",
            "",
            lines.inputs(inputs) if again.alone is None else None,
            lines.result(result),
            "turn.switched(context, args, kwargs)",
        )
        return source, lines.names

    def _around(
        self, again: Again, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], Any]:
        """Return the inputs of the graph in a call, and the result with marks for its outputs."""
        calls: list[tuple[Any, ...]] = []
        marks = tuple([_Mark(item) for item in range(again.recording.returned.count)])

        def graph(*inputs: Any) -> tuple[_Mark, ...]:
            calls.append(inputs)
            return marks

        result = self._python(graph)(*args, **kwargs)
        again.recording.check((*calls[0], *again.frozen))
        return calls[0], result


class _NoFastPath(Exception):
    """A call has an argument that a fast path cannot compare, or a result it cannot return."""


class _Mark(NamedTuple):
    """The place of an output of the graph in the result of a call."""

    item: int


class _Lines:
    """The generated lines about the arguments and the result of a call, and their names."""

    def __init__(self, again: Again, text: FitsText, values: Sequence[Any]) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {**text.names, **again.names, "frozen": again.frozen}
        self._again, self._recording, self._text = again, again.recording, text
        self._pairs = list(zip(text.variables, values, strict=True))
        self._variables = {id(value): variable for variable, value in self._pairs}
        self._containers: set[int] = set()  # of the result

    def _unless(self, condition: str) -> None:
        self.lines += [f"if {condition}:", "    return another"]

    def _bound(self, name: str, value: Any) -> str:
        self.names[name] = value
        return name

    def hooks(self, hooks: Sequence[Any]) -> None:
        if hooks:
            names = [self._bound(f"hooks_{index}", hook) for index, hook in enumerate(hooks)]
            self._unless(" or ".join(names))

    def _have_own_addresses(self, inputs: Sequence[Any]) -> bool:
        """Return whether :meth:`layouts` checks the address of each tensor, and all differ.

        Then no two arguments are one tensor, and no argument is a tensor that the trace reads from
        elsewhere. A tensor that moved since is a replaced one.
        """
        addresses = self._recording.addresses
        starts = {id(inputs[index]): start for index, start in addresses if index < len(inputs)}
        tensors = [value for _, value in self._pairs if isinstance(value, torch.Tensor)]
        begins = [starts.get(id(tensor)) for tensor in tensors]
        if None in begins or len(set(begins)) < len(begins):
            return False
        elsewhere = self._text.elsewhere
        return all(compat.is_plain_tensor(x) and x.data_ptr() not in begins for x in elsewhere)

    def arguments(
        self, count: int, keywords: Sequence[str], bound: int, inputs: Sequence[Any]
    ) -> None:
        """Add the checks of ``fits``, without the ``bound`` first arguments.

        They omit sizes, which :meth:`layouts` compares.
        """
        many = "kwargs" if not keywords else f"len(kwargs) != {len(keywords)}"
        self._unless(f"len(args) != {count - bound} or {many}")
        if count > bound:
            self.lines.append(f"({', '.join(self._text.variables[bound:count])},) = args")
        text = self._text
        checks = [line for leaf in text.leaves[bound:] for line in leaf] + text.others
        checks += [] if self._have_own_addresses(inputs) else text.objects
        checks += text.autocast
        self.lines += [line[4:].replace("return False", "return another") for line in checks]

    def layouts(self, inputs: Sequence[Any]) -> None:
        """Check that tensors have the same sizes, strides and addresses as at the replay."""
        tensors = [pair for pair in self._pairs if isinstance(pair[1], torch.Tensor)]
        if not all(type(value) in _PLAIN and compat.is_plain_tensor(value) for _, value in tensors):
            raise _NoFastPath
        moved = self._moved(inputs)
        lent = self._recording.returned.lent if self._again.alone is not None else None
        taken = ""
        if lent is not None and lent.tensors:
            self.names["lent"] = lent
            outs = [f"out_{index}" for index in range(len(lent.tensors))]
            taken = f"({', '.join(outs)},) = lent."
            self.lines.append(taken + "tensors")
            for out, tensor, start in zip(outs, lent.tensors, lent.starts, strict=True):
                tensors.append((out, tensor))
                moved.append(f"{out}.data_ptr() != {self._bound(f'at_{out}', start)}")
        if tensors:
            values = [value for _, value in tensors]
            layouts = [(list(tensor.shape), list(tensor.stride())) for tensor in values]
            self.names["alike"] = compat.alike(values, layouts)
            moved.insert(0, f"not alike({', '.join(variable for variable, _ in tensors)})")
        if moved:
            self._unless(" or ".join(moved))
        if taken:  # a caller may have changed the layout of a result: take new ones then
            check = self.lines.pop(-2)
            retry = [f"    {taken}get()", f"    {check}", "        return another"]
            self.lines[-1:] = [check, *retry]

    def _moved(self, inputs: Sequence[Any]) -> list[str]:
        for index, _ in self._recording.numbers:
            if index >= len(inputs) or isinstance(inputs[index], torch.Tensor):
                raise _NoFastPath  # a number in memory
        conditions = []
        for index, address in self._recording.addresses:
            frozen = index - len(inputs)
            tensor = self._named(inputs[index]) if frozen < 0 else f"frozen[{frozen}]"
            conditions.append(f"{tensor}.data_ptr() != {self._bound(f'at_{index}', address)}")
        return conditions

    def _named(self, value: Any) -> str:
        """Return the variable of an argument."""
        if id(value) not in self._variables:
            raise _NoFastPath
        return self._variables[id(value)]

    def inputs(self, inputs: Sequence[Any]) -> str:
        """Return the inputs of the graph: arguments, and numbers that depend on their layouts."""
        items = [
            self._named(value) if isinstance(value, torch.Tensor) else self._bound(f"n_{i}", value)
            for i, value in enumerate(inputs)
        ]
        return _tuple(items) + (" + frozen" if self._again.frozen else "")

    def result(self, value: Any) -> str:
        """Return the result of a call as an expression over the outputs of the graph."""
        kind = type(value)
        if kind is _Mark:
            return self._item(value.item)
        if kind is list or kind is dict:
            if id(value) in self._containers:
                raise _NoFastPath  # one object at two places of the result
            self._containers.add(id(value))
        if kind is tuple or kind is list:
            items = [self.result(each) for each in value]
            return _tuple(items) if kind is tuple else f"[{', '.join(items)}]"
        if kind is dict and all(type(key) is str for key in value):
            items = [f"{key!r}: {self.result(each)}" for key, each in value.items()]
            return f"{{{', '.join(items)}}}"
        if value is None or kind in (bool, int, str):
            return repr(value)
        return self._named(value)

    def _item(self, item: int) -> str:
        returned = self._recording.returned
        if self._again.alone is None:
            if not returned.is_flat:
                raise _NoFastPath
            return f"made[{item}]"
        if item in returned.lent_items:
            return f"out_{returned.lent_items.index(item)}"
        return self._bound(f"constant_{item}", returned.constants[item])


def _tuple(items: Sequence[str]) -> str:
    """Return a tuple as text."""
    return f"({', '.join(items)},)" if items else "()"
