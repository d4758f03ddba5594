"""Errors of encoder graphs: items, models, buffers, ranks. See ``cgcompile/errors/__init__.py``."""

import difflib
from collections.abc import Mapping, Sequence

from cgcompile.errors.root import CGCompileError, close, listed

_OLDER = (
    "get_encoder_cudagraph_num_items",
    "get_encoder_cudagraph_per_item_output_tokens",
    "get_encoder_cudagraph_per_item_input_sizes",
)


_CAPTURE = "prepare_encoder_cudagraph_capture_inputs()"


class EncoderModelError(CGCompileError, ValueError):
    """A model that does not speak the protocol of encoder graphs, or says what cannot be."""

    @classmethod
    def missing(cls, model: str, method: str) -> "EncoderModelError":
        return cls(
            f"{model} has no method {method}(), which encoder graphs need.\n"
            "  SupportsEncoderCudaGraph tells what it takes and returns; PatchEncoder has all of "
            "them for flattened patches with a grid."
        )

    @classmethod
    def older(cls, model: str, found: Sequence[str]) -> "EncoderModelError":
        return cls(
            f"{model} has {listed(found)}, of an older protocol.\n"
            "  One method replaces the three: get_encoder_cudagraph_item_specs(mm_kwargs) returns "
            "[EncoderItemSpec(input_size=..., output_tokens=...), ...], one for each item."
        )

    @classmethod
    def no_range(cls, model: str) -> "EncoderModelError":
        return cls(
            f"{model} has no get_encoder_cudagraph_budget_range(), and no token budgets are "
            "given.\n  Give token_budgets=, or let the method return (least, most) output tokens "
            "of a call."
        )

    @classmethod
    def returned(cls, method: str, found: str, expected: str) -> "EncoderModelError":
        return cls(f"{method}() returned {found}; expected {expected}.")

    @classmethod
    def columns(cls, method: str, found: Sequence[int], expected: int) -> "EncoderModelError":
        columns = listed(map(str, dict.fromkeys(found)))
        return cls(
            f"{method}() returned tensors of {columns} columns; out_hidden_size of "
            f"EncoderCudaGraphConfig is {expected}.\n"
            "  Set out_hidden_size to the columns of the result; of several tensors, to those of "
            "one of them."
        )

    @classmethod
    def no_keyword(cls, method: str, keyword: str, why: str) -> "EncoderModelError":
        return cls(
            f"{method}() takes no {keyword}=, and the configuration has {why}.\n"
            f"  Add the keyword argument {keyword} to the method: the manager gives it by name, so "
            "that the method can tell the graphs apart."
        )

    @classmethod
    def no_buffer(cls, key: str, known: Sequence[str]) -> "EncoderModelError":
        return cls(
            f"the forward of an encoder raised KeyError: {key!r}; its buffers are {listed(known)}."
            f"{close(key, known)}\n"
            "  If it is a buffer, add it to buffer_keys and to what both prepare methods return "
            "(tables= or offsets= of PatchEncoder)."
        )

    @classmethod
    def modality(
        cls, keys: Sequence[str], found: Sequence[str], known: Sequence[str]
    ) -> "EncoderModelError":
        what = f"of several modalities ({listed(found)})" if found else "of no known modality"
        return cls(
            f"an input {what}: keys {listed(keys)}; expected those of one of {listed(known)}.\n"
            "  Give each modality in a call of its own, or override get_input_modality()."
        )

    @classmethod
    def nothing_to_run_on(cls, key: str) -> "EncoderModelError":
        return cls(
            f"encoder_eager_forward(): the replay buffers have None for {key!r}, so the forward "
            "that graphs record cannot run on them as they are.\n"
            "  Override encoder_eager_forward(), or always give this buffer a value."
        )


def older_methods() -> tuple[str, ...]:
    """The methods that one call for item specs replaced."""
    return _OLDER


class EncoderItemError(CGCompileError, ValueError):
    """The description of an item that cannot be."""

    @classmethod
    def number(cls, name: str, found: object) -> "EncoderItemError":
        return cls(
            f"EncoderItemSpec: {name} = {found!r}; expected a whole number of at least 0.\n"
            "  Read grids from the host once per call: grid_thw.tolist()."
        )

    @classmethod
    def unknown_path(cls, item: int, path: str, known: Sequence[str]) -> "EncoderItemError":
        return cls(
            f"item {item}: output tokens on path {path!r}, which the configuration does not have; "
            f"paths: {listed(known)}.{close(path, known)}"
        )

    @classmethod
    def no_path(cls, item: int, tokens: int, known: Sequence[str]) -> "EncoderItemError":
        return cls(
            f"item {item}: {tokens} output tokens, and none of them on a path; paths: "
            f"{listed(known)}.\n  Say how many each path makes: global_output_tokens and "
            "local_output_tokens, or path_output_tokens={...}."
        )

    @classmethod
    def no_axis(cls, item: int, axis: str, known: Sequence[str]) -> "EncoderItemError":
        return cls(
            f"item {item}: nothing is said for capture axis {axis!r}; it says {listed(known)}.\n"
            "  Give EncoderItemSpec(axes={...}) the value that the item needs at least."
        )

    @classmethod
    def not_a_call(cls, found: str) -> "EncoderItemError":
        return cls(
            f"a call of an encoder is a {found}; expected a mapping from names to inputs.\n"
            '  For images: {"pixel_values": [rows, C], "image_grid_thw": [items, 3]}.'
        )

    @classmethod
    def no_input(cls, name: str, known: Sequence[str]) -> "EncoderItemError":
        near = difflib.get_close_matches(name, list(map(str, known)), n=1)
        rename = f" Rename {near[0]!r} to {name!r}?" if near else ""
        return cls(
            f"a call of an encoder has no {name!r}; it has {listed(known)}.{rename}\n"
            "  Patches of all items and the grid of each go together. inputs= of PatchEncoder says "
            "what they are called."
        )

    @classmethod
    def rows(cls, name: str, found: object) -> "EncoderItemError":
        return cls(
            f"{name!r} is a {type(found).__name__}; expected a tensor [rows, C].\n"
            "  Give all patches of all items, one after the other, in the order of the grids."
        )

    @classmethod
    def grid(cls, name: str, item: int, found: object, merge: int) -> "EncoderItemError":
        return cls(
            f"{name!r}: item {item} is {found!r}; expected (t, h, w), whole numbers of at least 0, "
            f"h and w divisible by merge_size = {merge}.\n"
            "  A token is made of merge_size * merge_size patches: resize the image, or pad its "
            "patches."
        )

    @classmethod
    def patches(cls, name: str, found: int, grid: str, expected: int) -> "EncoderItemError":
        return cls(
            f"{name!r} has {found} rows; the grids of {grid!r} have {expected} patches.\n"
            "  Give all patches of all items, one after the other, in the order of the grids."
        )


class EncoderBufferError(CGCompileError, ValueError):
    """What a model gives for the buffers of a graph does not fit them."""

    @classmethod
    def missing(cls, where: str, key: str, known: Sequence[str]) -> "EncoderBufferError":
        return cls(
            f"{where}: no value for buffer {key!r}; there are {listed(known)}.\n"
            "  Each of buffer_keys is written before a replay. None leaves a buffer as it is."
        )

    @classmethod
    def unknown(cls, where: str, key: str, known: Sequence[str]) -> "EncoderBufferError":
        return cls(
            f"{where}: {key!r} is not among buffer_keys ({listed(known)}).{close(key, known)}\n"
            "  Add it to buffer_keys, or leave it out: it would never be refreshed."
        )

    @classmethod
    def value(cls, key: str, found: str, expected: str) -> "EncoderBufferError":
        return cls(
            f"buffer {key!r}: the value is {found}; expected {expected}.\n"
            "  Give real rows alone; the rows behind them are the manager's."
        )

    @classmethod
    def layout(cls, key: str, found: str, expected: str) -> "EncoderBufferError":
        return cls(
            f"buffer {key!r}: the value is {found}; expected {expected}.\n"
            "  Sizes behind the first must be those of the buffer, and the dtype must cast to its: "
            f"give such a value, or another buffer in {_CAPTURE} (in_features=, PatchTable)."
        )

    @classmethod
    def no_room(cls, key: str, entries: int) -> "EncoderBufferError":
        return cls(
            f"buffer {key!r}: {entries} offsets fill it, so that none is left for the padding.\n"
            "  Capture offset buffers with max_frames_per_batch + 2 entries: padded rows are one "
            "sequence at the end."
        )

    @classmethod
    def no_end(cls, key: str, last: int | None) -> "EncoderBufferError":
        return cls(
            f"{_CAPTURE}: buffer {key!r} is among offset_keys, and its last entry is {last}; "
            "expected the number of rows, no entry above it.\n"
            "  Padding goes on to what the last entry is at capture. Rows behind it would be "
            "written by no kernel."
        )

    @classmethod
    def padding(cls, key: str, found: str, room: str, error: str) -> "EncoderBufferError":
        return cls(
            f"buffer {key!r} {room}: its padding logic failed on a value {found}: {error}\n"
            "  It is called as logic(dst, src), and writes all of dst in place."
        )

    @classmethod
    def moved(cls, key: str, found: str, room: str) -> "EncoderBufferError":
        return cls(
            f"buffer {key!r} {room}: its padding logic left {found} in its place.\n"
            "  A graph reads the shape and address that it recorded: write dst in place."
        )


class EncoderShardError(CGCompileError, RuntimeError):
    """Ranks that encode together do not fit each other."""

    @classmethod
    def no_group(cls) -> "EncoderShardError":
        return cls(
            "Sharder: torch.distributed has no process group, so there are no ranks.\n"
            "  Call torch.distributed.init_process_group() first, or leave the sharder out."
        )

    @classmethod
    def structure(cls, rank: int) -> "EncoderShardError":
        return cls(
            f"rank {rank}: results have another structure than those of the first call.\n"
            "  Ranks without items must know what the others send: return the same kind of result "
            "for each item, or override Sharder.gather()."
        )

    @classmethod
    def failed(cls, rank: int, told: Mapping[int, str | None]) -> "EncoderShardError":
        """Args: ``told``: what each rank's share raised, as text."""
        whose = [f"  rank {other}: {text}" for other, text in told.items() if text is not None]
        return cls(
            "\n".join([f"rank {rank}: the share of another rank failed.", *whose])
            + "\n  Its own error says more. No rank has results of this call; the next one is not "
            "affected."
        )


class EncoderBudgetError(CGCompileError, ValueError):
    """Token budgets, or numbers of items or frames, that cannot be."""

    @classmethod
    def number(cls, name: str, found: object, least: int) -> "EncoderBudgetError":
        return cls(f"{name} = {found!r}; expected a whole number of at least {least}.")

    @classmethod
    def not_a_budget(cls, found: object) -> "EncoderBudgetError":
        return cls(
            f"encoder budgets: {found!r} is none; expected whole numbers of at least 1.\n"
            "  A budget is the number of output tokens of one graph."
        )

    @classmethod
    def empty(cls) -> "EncoderBudgetError":
        return cls(
            "encoder budgets: the list is empty; expected at least one.\n"
            "  Give budgets=None to have them generated from budget_range."
        )

    @classmethod
    def range(cls, found: object) -> "EncoderBudgetError":
        return cls(
            f"budget_range = {found!r}; expected the least and the most output tokens of a graph.\n"
            "  Both must be positive whole numbers."
        )

    @classmethod
    def range_order(cls, least: int, most: int) -> "EncoderBudgetError":
        return cls(
            f"budget_range = ({least}, {most}): the least, {least}, is above the most, {most}.\n"
            "  Swap them, or raise the most: it is the largest budget that is captured."
        )

    @classmethod
    def path_above_range(cls, path: str, least: int, most: int) -> "EncoderBudgetError":
        return cls(
            f"path {path!r}: its budgets begin at {least} (min_token_budget), which is above "
            f"{most}, the largest budget of budget_range.\n"
            "  Raise the most of get_encoder_cudagraph_budget_range(), lower min_token_budget "
            "(with enable_dual_path_graph: global_token_per_image or local_token_per_patch), or "
            "give token_budgets=."
        )

    @classmethod
    def items_above_range(cls, max_items: int, most: int) -> "EncoderBudgetError":
        return cls(
            f"max_items = {max_items} is above {most}, the largest budget of budget_range.\n"
            "  Each item needs at least one token of every budget. Lower max_items, or raise the "
            "most of budget_range."
        )

    @classmethod
    def items_above_budget(cls, max_items: int, budget: int) -> "EncoderBudgetError":
        return cls(
            f"max_items = {max_items}; it must be <= the smallest token budget, {budget}.\n"
            "  Each item needs at least one token of every budget: a graph whose share per item is "
            "empty cannot be captured. Lower max_items, or leave the small budgets out."
        )

    @classmethod
    def ratio(cls, found: object) -> "EncoderBudgetError":
        return cls(
            f"ratio = {found!r}; expected a finite number above 1.\n"
            "  It is how much larger each budget is than the one before."
        )

    @classmethod
    def no_sizes(cls) -> "EncoderBudgetError":
        return cls(
            "fitted_budgets(): nothing was observed, so there is nothing to fit.\n"
            "  Count the output tokens of real groups of items, or take generated_budgets()."
        )


class EncoderPackError(CGCompileError, ValueError):
    """Items that cannot be packed, or limits and costs that cannot be."""

    @classmethod
    def need(cls, item: int, tokens: object, frames: object) -> "EncoderPackError":
        return cls(
            f"item {item}: tokens={tokens!r}, frames={frames!r}; expected whole numbers of at "
            "least 0.\n  An item without part in a path has 0 tokens there."
        )

    @classmethod
    def paths(cls, item: int, found: int, paths: int) -> "EncoderPackError":
        return cls(
            f"item {item}: {found} numbers of tokens; the capacity has {paths} paths.\n"
            "  Give one number per path, in the order of the paths."
        )

    @classmethod
    def capacity(
        cls, budgets: Sequence[Sequence[int]], max_items: int, max_frames: int | None
    ) -> "EncoderPackError":
        return cls(
            f"Capacity(budgets={budgets!r}, max_items={max_items!r}, max_frames={max_frames!r}); "
            "expected the budgets of one path or more, each ascending from at least 1, at least "
            "one item, and frames of at least 0 or None."
        )

    @classmethod
    def cost(cls, name: str, found: object) -> "EncoderPackError":
        return cls(
            f"Costs: {name} = {found!r}; expected a finite number of at least 0, in tokens.\n"
            "  Divide measured times by the time of one token more in a graph."
        )
