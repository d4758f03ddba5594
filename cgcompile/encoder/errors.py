"""Errors of encoder graphs, with their messages. See ``cgcompile.errors``."""

import difflib
from collections.abc import Sequence

from cgcompile.errors import CGCompileError, Template, listed


class EncoderError(CGCompileError, ValueError):
    """A model, item, buffer, budget or capacity that encoder graphs cannot use."""

    no_method = Template("""
        {model} has no method {method}(), which encoder graphs need.
        SupportsEncoderCudaGraph documents its arguments and result; PatchEncoder has all methods \
        for flattened patches with a grid.""")
    older_protocol = Template("""
        {model} has {found:list}, of an older protocol.
        One method replaces the three: get_encoder_cudagraph_item_specs(mm_kwargs) returns \
        [EncoderItemSpec(input_size=..., output_tokens=...), ...], one for each item.""")
    no_range = Template("""
        {model} has no get_encoder_cudagraph_budget_range(), and no token budgets are given.
        Give token_budgets=, or let the method return (least, most) output tokens of a call.""")
    row_ratio = Template("""
        {method}() returned {found}; expected {expected}.
        There are {ratio} rows: check merge_size= of PatchEncoder, which merges \
        merge_size * merge_size patches, or the output tokens of the item specs.""")
    not_buffers = Template("""
        PatchEncoder calls forward(buffers) with one dictionary, which {forward}{signature} does \
        not take.
        Take from it what the tower needs: PatchEncoder(lambda buffers: tower(**buffers), \
        tower=tower, ...).""")
    permutation = Template("""
        table {key!r} is a permutation of its rows, {values:first 8} of two small images, and its \
        padding rows are zeros: inverted, such as by argsort, they would move real rows.
        Give PatchTable(tail="positions"): it continues the permutation, and is right for an index \
        to gather from as well. A function as tail= sets any other.""")
    columns = Template("""
        {method}() returned tensors of {found:list} columns; out_hidden_size of \
        EncoderCudaGraphConfig is {expected}.
        Set out_hidden_size to the columns of the result; of several tensors, to those of one of \
        them.""")
    no_keyword = Template("""
        {method}() takes no {keyword}=, and the configuration has {why}.
        Add the keyword argument {keyword} to the method, by which it can tell the graphs apart.""")
    no_buffer = Template("""
        the forward of an encoder raised KeyError: {key!r}; its buffers are \
        {known:list}.{known:close {key}}
        PatchEncoder has pixel_values and the names in tables= and offsets=; any offsets= replaces \
        the default, cu_seqlens. Other encoders name it in buffer_keys and both prepare methods.""")
    modality = Template("""
        an input {found:if of several modalities ({found:list})|of no known modality}: keys \
        {keys:list}; expected those of one of {known:list}.
        Give each modality in a call of its own, or override get_input_modality().""")
    nothing_to_run_on = Template("""
        encoder_eager_forward(): the replay buffers have None for {key!r}, so the forward that \
        graphs record cannot run on them as they are.
        Override encoder_eager_forward(), or always give this buffer a value.""")
    item_number = Template("""
        EncoderItemSpec: {name} = {found!r}; expected a whole number of at least 0.
        Read grids from the host once per call: grid_thw.tolist().""")
    unknown_path = Template("""
        item {item}: output tokens on path {path!r}, which the configuration does not have; paths: \
        {known:list}.{known:close {path}}""")
    no_path = Template("""
        item {item}: {tokens} output tokens, but 0 on each path; paths: {known:list}.
        Give global_output_tokens and local_output_tokens, or path_output_tokens={{...}}.""")
    no_axis = Template("""
        item {item}: no value for capture axis {axis!r}; it has {known:list}.
        Give EncoderItemSpec(axes={{...}}) the value that the item needs at least.""")
    not_a_call = Template("""
        a call of an encoder is a {found}; expected a mapping from names to inputs.
        For images: {{"pixel_values": [rows, C], "image_grid_thw": [items, 3]}}.""")

    @classmethod
    def no_input(cls, *, name: str, known: Sequence[str]) -> "EncoderError":
        near = difflib.get_close_matches(name, list(map(str, known)), n=1)
        rename = f" Rename {near[0]!r} to {name!r}?" if near else ""
        return cls(
            f"a call of an encoder has no {name!r}; it has {listed(known)}.{rename}\n"
            "  Patches of all items and the grid of each go together. inputs= of PatchEncoder "
            "sets their names."
        )

    rows = Template("""
        {name!r} is {found:kind}; expected a tensor [rows, C].
        Give all patches of all items, one after the other, in the order of the grids.""")
    grid = Template("""
        {name!r}: item {item} is {found!r}; expected (t, h, w), whole numbers of at least 0, \
        h and w multiples of merge_size = {merge}.
        A token is merge_size * merge_size patches: resize the image, or pad its patches.""")
    patches = Template("""
        {name!r} has {found} rows; the grids of {grid!r} have {expected} patches.
        Give all patches of all items, one after the other, in the order of the grids.""")
    no_value = Template("""
        {where}: no value for buffer {key!r}; there are {known:list}.
        Each of buffer_keys is written before a replay. None leaves a buffer as it is.""")
    unknown_buffer = Template("""
        {where}: {key!r} is not among buffer_keys ({known:list}).{known:close {key}}
        Add it to buffer_keys, or leave it out: it would never be refreshed.""")
    buffer_value = Template("""
        buffer {key!r}: the value is {found}; expected {expected}.
        Give real rows alone; the rows behind them are the manager's.""")
    buffer_list = Template("""
        buffer {key!r}: the value is {found}; expected a tensor.
        Join the parts of the items: torch.cat(parts); of numbers: torch.tensor(numbers).""")
    buffer_layout = Template("""
        buffer {key!r}: the value is {found}; expected {expected}.
        Sizes behind the first must be the buffer's, and the dtype must cast to its. Give such a \
        value, or another buffer in prepare_encoder_cudagraph_capture_inputs() (in_features=, \
        PatchTable).""")
    buffer_cast = Template("""
        buffer {key!r}: the value is {found}, and the buffer is of {dtype}.
        Integers are not cast to floating point, which rounds large ones. Indices: an integer \
        buffer, PatchTable(dtype=torch.long). Numbers to compute with: \
        PatchTable(dtype=torch.float32), or cast the value before the call.""")
    buffer_bytes = Template("""
        buffer {key!r}: the value is {found}, and the buffer is of {dtype}.
        Scale pixels of uint8 first, as the model was trained: pixels.float() / 255, or its own \
        normalisation. A table: PatchTable(dtype=torch.long) of indices, torch.float32 of \
        numbers.""")
    buffer_rows = Template("""
        buffer {key!r}: the value is {found}; expected {expected} rows, the \
        {unit} of {items} items.
        Padding would hide rows that are missing. Return one for each of the {unit}, or set what \
        the rows count (rows= of PatchTable or EncoderBuffer).""")
    offsets = Template("""
        buffer {key!r}: offsets are {found}; expected {expected}.
        Offsets are the ends of all sequences behind a leading 0, not lengths: take \
        [0, *lengths] and cumsum(0).""")
    offset_count = Template("""
        buffer {key!r}: {found} offsets; expected {expected}.
        Offsets are the ends of all sequences behind a leading 0, not lengths. \
        PatchOffsets(most=...) declares other sequences than one for each frame.""")
    no_offset_room = Template("""
        buffer {key!r}{budget}: {entries} offsets fill it, so that none is left for the padding; \
        real sequences that it holds: {room}.
        most= of PatchOffsets returned too few for this budget. Without PatchEncoder, capture \
        offset buffers with max_frames_per_batch + 2 entries: the last one is padding.""")
    no_offset_end = Template("""
        prepare_encoder_cudagraph_capture_inputs(): buffer {key!r} has offsets, and its \
        last entry is {last}; expected the number of rows, no entry above it.
        Padding extends to the last entry of the capture; no kernel writes rows behind it.""")
    padding_failed = Template("""
        buffer {key!r} {room}: its padding logic failed on a value {found}: {error}
        It is called as logic(dst, src), and writes all of dst in place.""")
    buffer_moved = Template("""
        buffer {key!r} {room}: its padding logic left {found} in its place.
        A graph reads the shape and address that it recorded: write dst in place.""")
    derive_input = Template("""
        example_items: {name} is {found}; expected {expected}.
        An example has the keyword arguments of the tower for one item: rows [n, ...], further \
        tensors by row, inputs with one entry, constants. Compute others in the tower.""")
    derive_shapes = Template("""
        example_items: a row of {name!r} is {one} in one item and {other} in another; a graph has \
        one shape.
        Use a manager for each shape, or a tower of flattened patches [rows, C].""")
    derive_call = Template("""
        a call of a derived encoder: {name} {found}; expected {expected}.
        Give the inputs of all items, one after the other, as in the examples; other sizes or \
        constants need examples of their own, or another manager.""")
    derive_rows = Template("""
        example_items: items have {rows} rows, which follow from no input by item.
        Give the tower, first of all, an input by item whose product is the number of rows, such \
        as a grid.""")
    derive_output = Template("""
        the tower returned {found}; expected one tensor of rows, those of several items one after \
        the other.
        Choose the result: output=lambda found: found.pooler_output, or a tuple of several.""")
    derive_ratio = Template("""
        examples of {rows} rows have results of {tokens} rows; expected a fixed ratio.
        Add or leave out rows after the graph, combine=; or use a manager for each size.""")
    derive_value = Template("""
        cannot derive {name!r}, which the tower computes from the sizes of items: shapes {found} \
        for items of {rows} rows and {tokens} tokens, and the value of several items is not joined \
        from theirs.
        Values by row, token or item and offsets are derived. Write this one by hand: a \
        PatchTable or PatchOffsets of PatchEncoder.""")
    derive_size = Template("""
        cannot derive {name!r} of shape {found}: it depends on the number of rows of a tensor on \
        the device, not on inputs by item alone.
        Compute it inside of a module, from the shape of its input, or write it by hand: a \
        PatchTable of PatchEncoder.""")
    derive_new = Template("""
        item {key!r}: {name!r} has shape {found}; it is no longer the {what} that follows from the \
        examples.
        Derive another manager, with this item among the examples.""")
    derive_number = Template("""
        item {key!r}: {where} gets {found!r}; {expected!r} for the smallest example.
        Numbers that depend on sizes are baked in; the longest sequence of offsets alone is \
        derived. Pass others as tensors, or give PatchEncoder a forward with the largest number.""")
    derive_calls = Template("""
        item {key!r}: the tower calls {found} where it calls {expected} for the smallest example.
        A graph has the same calls for all sizes: give examples of one size, or write the forward \
        of PatchEncoder without such a branch or loop.""")
    derive_run = Template("""
        the tower fails on the rows of the smallest example with the host values of {found}: {error}
        Its device code reads numbers that depend on sizes: pass them as tensors, made by \
        torch.as_tensor where they are numpy's (torch.from_numpy is not seen), or give examples of \
        one size.""")
    derive_read = Template("""
        {where}() reads a tensor {found} on the host, which a graph cannot do.
        If that is attention which splits sequences by length: choose an implementation that takes \
        offsets (cu_seqlens) on the device, such as "flash_attention_2" or a registered one. Or \
        give examples of one size.""")
    derive_order = Template("""
        the tower ran {found} on the host; before, it ran {expected} there.
        Host values must be computed alike in each run; write them by hand: PatchEncoder.""")
    derive_budget = Template("""
        a budget of {budget} tokens is below the smallest example, of {tokens}, so that its graph \
        cannot be compared with an eager run.
        Add a smaller item to the examples, or leave this budget out: token_budgets=.""")
    derive_result = Template("""
        items {items} of the examples (all but the first with varied numbers) on a budget of \
        {budget} tokens, {tail} of them padding: results differ from eager by {found:.1e} of the \
        largest number; allowed: {most:.0e}.
        Padding or other items reach the rows of an item, calls depend on the number of rows, or \
        values are baked in. Attention over all rows needs offsets or a mask. Rounding alone: \
        tolerance=.""")
    not_a_budget = Template("""
        encoder budgets: {found!r} is none; expected whole numbers of at least 1.
        A budget is the number of output tokens of one graph.""")
    no_budgets = Template("""
        encoder budgets: the list is empty; expected at least one.
        Give budgets=None to have them generated from budget_range.""")
    budget_range = Template("""
        budget_range = {found!r}; expected the least and the most output tokens of a graph.
        Both must be positive whole numbers.""")
    range_order = Template("""
        budget_range = ({least}, {most}): the least, {least}, is above the most, {most}.
        Swap them, or raise the most: it is the largest budget that is captured.""")
    path_above_range = Template("""
        path {path!r}: its budgets begin at {least} (min_token_budget), above the most, {most}.
        Raise the most of get_encoder_cudagraph_budget_range(), lower min_token_budget (with \
        enable_dual_path_graph: global_token_per_image or local_token_per_patch), or give \
        token_budgets=.""")
    items_above_range = Template("""
        {name} = {max_items} is above {most}, the largest budget of budget_range.
        Items need a token of every budget. Lower {name}, or raise the most of budget_range.""")
    items_above_budget = Template("""
        {name} = {max_items}; it must be <= the smallest token budget, {budget}.
        Items need a token of every budget. Lower {name}, or leave the small budgets out.""")
    ratio = Template("""
        ratio = {found!r}; expected a finite number above 1.
        It is how much larger each budget is than the one before.""")
    nothing_observed = Template("""
        fitted_budgets(): nothing was observed, so there is nothing to fit.
        Count the output tokens of real groups of items, or take generated_budgets().""")
    item_need = Template("""
        item {item}: tokens={tokens!r}, frames={frames!r}; expected whole numbers of at least 0.
        An item without part in a path has 0 tokens there.""")
    item_paths = Template("""
        item {item}: {found} numbers of tokens; the capacity has {paths} paths.
        Give one number per path, in the order of the paths.""")
    capacity = Template("""
        {capacity!r}; expected the budgets of one path or more, each ascending from at least 1, at \
        least one item, and frames of at least 0 or None.""")


class EncoderShardError(CGCompileError, RuntimeError):
    """Ranks that encode together do not fit each other."""

    structure = Template("""
        rank {rank}: results have another structure than those of the first call.
        Return the same kind of result for each item, or override Sharder.gather().""")
    failed = Template("""
        rank {rank}: the share of another rank failed.
        {shares}
        Its own error has the cause. No rank has results of this call; the next one is not \
        affected.""")
