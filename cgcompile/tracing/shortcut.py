"""A whole call of a compiled model that replays the step it replayed before: :class:`Shortcut`.

A call passes through the comparison of its arguments, the Python that Dynamo left around the graph,
and the compiled graph. Where that Python does nothing but read sizes, a call whose arguments are
laid out as those of an earlier one, at the same addresses, passes the same inputs to the graph. So
all three become one generated function for each recorded step, which looks like this::

    def step(args, kwargs):
        ...                                             # which context, which step
        if hooks_0 or hooks_1:
            return another
        if len(args) != 2 or kwargs:
            return another
        (v2, v3,) = args
        ...                                             # what else ``fits`` asks
        (out_0,) = lent.tensors
        if not alike(v2, v3, out_0) or v2.data_ptr() != at_1 or ...:
            ...
        with lock:
            ...
            replay()
            ...
            return out_0

Whatever is not as it was, is for the longer way to judge.
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

_ATTEMPTS = 16  # at one step, of calls that differ in what no address and size tells
_CONTAINERS = (tuple, list, dict, slice)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Shortcut:
    """Makes such functions for the calls of one trace.

    Args:
        graph: what was compiled.
        text: what is asked of arguments.
        python: the Python around the graph, which must be plain, around something else.

    Attributes:
        turn: of the compiled graph; it keeps the functions, as long as they are worth something.
    """

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
        """A call has been run the longer way: remember the step, if it was a recorded one.

        Args:
            args: of the call.
            kwargs: of the call.
            bound: the first of ``args``, where no caller passes it; else None.
            hooks: dictionaries that are empty as long as the way is right.
        """
        again, context = self.turn.again, callers_context()
        if again is None or context is None or any(hooks):
            return
        if self.turn.owner == get_ident():
            return  # a call inside of a step, which ran plain; the step holds the lock
        if self._epoch is not self.turn.epoch:
            self._attempts.clear()
            self._epoch = self.turn.epoch
        key = again.recording.batch.mode, again.recording.batch.descriptor
        if key != (context.cudagraph_runtime_mode, context.batch_descriptor):
            return
        tried = self._attempts.get(key, 0)
        if tried == _ATTEMPTS:
            return
        self._attempts[key] = tried + 1
        try:
            found = self._text_of(again, args, kwargs, bound, hooks)
        except (_NoWay, GuardError):
            return
        except Exception as error:  # the call has been served, and so is the next one
            log.warning("no shortest way: %s: %s", type(error).__name__, error)
            return
        step = made_step(*found)
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
        """The function of a step as text, and what it refers to."""
        values = (*args, *(kwargs[name] for name in self._text.keywords))
        if any(isinstance(each, _CONTAINERS) for each in values):
            raise _NoWay  # an item of it may be another one in the next call
        if again.watches_weights:
            raise _NoWay  # the longer way finds the graphs of those that come
        inputs, made = self._around(again, args, kwargs)
        lines = _Way(again, self._text, values)
        lines.hooks(hooks)
        lines.arguments(len(args), list(kwargs), 0 if bound is None else 1, inputs)
        lines.layouts(inputs)
        alone = again.alone
        if alone is not None:
            lines.names |= alone
        source = step_source(
            "args, kwargs",
            "\n".join(lines.lines) + "\n",
            "",
            lines.inputs(inputs) if alone is None else None,
            lines.result(made),
            "turn.switched(context, args, kwargs)",
        )
        return source, lines.names

    def _around(
        self, again: Again, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], Any]:
        """(what the graph is given by a call, what the call returns, with marks for tensors)."""
        given: list[tuple[Any, ...]] = []
        marks = tuple([_Mark(item) for item in range(again.recording.returned.count)])

        def graph(*inputs: Any) -> tuple[_Mark, ...]:
            given.append(inputs)
            return marks

        made = self._python(graph)(*args, **kwargs)
        again.recording.check((*given[0], *again.frozen))
        return given[0], made


class _NoWay(Exception):
    """A call has something that such a function cannot compare, or not return."""


class _Mark(NamedTuple):
    """Stands for a result of the graph."""

    item: int


class _Way:
    """The lines about the arguments and the result of a call, and what they refer to.

    Args:
        again: the step.
        text: what is asked of arguments.
        values: the arguments, positional ones first.
    """

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
            names = [self._bound(f"hooks_{place}", each) for place, each in enumerate(hooks)]
            self._unless(" or ".join(names))

    def _lie_apart(self, inputs: Sequence[Any]) -> bool:
        """Whether :meth:`layouts` asks of each tensor to begin where nothing else does.

        Then no argument is another one, nor a tensor that the trace found elsewhere. One that has
        been given other memory since is replaced, as if it were another object.
        """
        addresses = self._recording.addresses
        places = {id(inputs[place]): at for place, at in addresses if place < len(inputs)}
        tensors = [value for _, value in self._pairs if isinstance(value, torch.Tensor)]
        begins = [places.get(id(each)) for each in tensors]
        if None in begins or len(set(begins)) < len(begins):
            return False
        found = self._text.found
        return all(compat.is_plain_tensor(x) and x.data_ptr() not in begins for x in found)

    def arguments(
        self, count: int, keywords: Sequence[str], bound: int, inputs: Sequence[Any]
    ) -> None:
        """What ``fits`` asks, but for the first argument, if no caller passes it.

        Nothing of sizes: they are as they were, see :meth:`layouts`.

        Args:
            count: of positional arguments, that one included.
            keywords: the others.
            bound: how many no caller passes.
            inputs: of the graph.
        """
        many = "kwargs" if not keywords else f"len(kwargs) != {len(keywords)}"
        self._unless(f"len(args) != {count - bound} or {many}")
        if count > bound:
            self.lines.append(f"({', '.join(self._text.variables[bound:count])},) = args")
        text = self._text
        asked = [line for leaf in text.leaves[bound:] for line in leaf] + text.others
        asked += text.autocast if self._lie_apart(inputs) else text.objects + text.autocast
        self.lines += [line[4:].replace("return False", "return another") for line in asked]

    def layouts(self, inputs: Sequence[Any]) -> None:
        """Tensors have the sizes and strides that they had, and lie where graphs read them."""
        tensors = [pair for pair in self._pairs if isinstance(pair[1], torch.Tensor)]
        if not all(type(value) in _PLAIN and compat.is_plain_tensor(value) for _, value in tensors):
            raise _NoWay
        moved = self._moved(inputs)
        lent = self._recording.returned.lent if self._again.alone is not None else None
        taken = ""
        if lent is not None and lent.tensors:
            self.names["lent"] = lent
            outs = [f"out_{place}" for place in range(len(lent.tensors))]
            taken = f"({', '.join(outs)},) = lent."
            self.lines.append(taken + "tensors")
            for out, tensor, start in zip(outs, lent.tensors, lent.starts, strict=True):
                tensors.append((out, tensor))
                moved.append(f"{out}.data_ptr() != {self._bound(f'at_{out}', start)}")
        if tensors:
            values = [value for _, value in tensors]
            layouts = [(list(each.shape), list(each.stride())) for each in values]
            self.names["alike"] = compat.alike(values, layouts)
            moved.insert(0, f"not alike({', '.join(variable for variable, _ in tensors)})")
        if moved:
            self._unless(" or ".join(moved))
        if taken:  # it may be a result that a caller has changed
            asked = self.lines.pop(-2)
            self.lines[-1:] = [asked, f"    {taken}get()", f"    {asked}", "        return another"]

    def _moved(self, inputs: Sequence[Any]) -> list[str]:
        for place, _ in self._recording.numbers:
            if place >= len(inputs) or isinstance(inputs[place], torch.Tensor):
                raise _NoWay  # a number in memory
        found = []
        for place, address in self._recording.addresses:
            frozen = place - len(inputs)
            where = self._named(inputs[place]) if frozen < 0 else f"frozen[{frozen}]"
            found.append(f"{where}.data_ptr() != {self._bound(f'at_{place}', address)}")
        return found

    def _named(self, value: Any) -> str:
        """The variable of an argument."""
        if id(value) not in self._variables:
            raise _NoWay
        return self._variables[id(value)]

    def inputs(self, inputs: Sequence[Any]) -> str:
        """What the graph is given: arguments, and numbers that follow from their layouts."""
        items = [
            self._named(each) if isinstance(each, torch.Tensor) else self._bound(f"n_{place}", each)
            for place, each in enumerate(inputs)
        ]
        return _tuple(items) + (" + frozen" if self._again.frozen else "")

    def result(self, made: Any) -> str:
        """What the call returns, of what the graph has made."""
        kind = type(made)
        if kind is _Mark:
            return self._item(made.item)
        if kind is list or kind is dict:
            if id(made) in self._containers:
                raise _NoWay  # one object in two places
            self._containers.add(id(made))
        if kind is tuple or kind is list:
            items = [self.result(each) for each in made]
            return _tuple(items) if kind is tuple else f"[{', '.join(items)}]"
        if kind is dict and all(type(key) is str for key in made):
            items = [f"{key!r}: {self.result(each)}" for key, each in made.items()]
            return f"{{{', '.join(items)}}}"
        if made is None or kind in (bool, int, str):
            return repr(made)
        return self._named(made)

    def _item(self, item: int) -> str:
        returned = self._recording.returned
        if self._again.alone is None:
            if not returned.is_flat:
                raise _NoWay
            return f"made[{item}]"
        if item in returned.lent_items:
            return f"out_{returned.lent_items.index(item)}"
        return self._bound(f"constant_{item}", returned.constants[item])


def _tuple(items: Sequence[str]) -> str:
    """A tuple as text; the empty one has no comma."""
    return f"({', '.join(items)},)" if items else "()"
