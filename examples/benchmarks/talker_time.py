"""Time of the codes of one audio frame: the inner loops of talkers, as one graph.

Run it on a machine with a CUDA device and ``transformers``::

    python examples/benchmarks/talker_time.py

A talker makes a frame of sound from 16 to 32 codes. The first is its own; a small model, the code
predictor of Qwen3-Omni or the depth decoder of CSM, makes the others one by one, in a nested
``generate``. Sizes are those of the checkpoints, weights are random. Milliseconds of one frame, the
host included, with what each way gives:

* ``generate``: the model's own; ``generate, static``: with a static cache, for which transformers
  compiles the model in mode ``reduce-overhead``;
* ``steps``: a Python loop over the model, and ``reduce-overhead``: with the layers compiled in that
  mode;
* ``loop``: ``cgcompile.loop`` over the same steps, one graph a frame, and ``loop, compiled``: with
  the layers compiled by the backend ``cgcompile``, with its kernels for few rows.

Exits with 1 if codes of ``steps`` or ``loop`` are not those of ``generate``, or a frame of ``loop``
was no replay. Layers that are compiled round otherwise: of their codes the share that is equal is
printed.
"""

import argparse
import copy
import inspect
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rivals.report import Table, text_table
from rivals.timing import wait
from transformers import (
    CsmDepthDecoderConfig,
    CsmDepthDecoderForCausalLM,
    DynamicCache,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerCodePredictorConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration,
)

import cgcompile

WAYS = ("generate", "generate, static", "steps", "reduce-overhead", "loop", "loop, compiled")
EXACT = ("steps", "loop")  # run the same kernels as ``generate``
TOP_K, TOP_P = 50, 0.8
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "vocab_size": 64,
}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
State = dict[str, Any]


class Talker:
    """The inner model of a talker, and its step.

    Attributes:
        name: of the talker.
        model: the inner model.
        codes: how many it makes for a frame.
    """

    name: str
    codes: int

    def __init__(self, model: Any, sample: bool) -> None:
        self.model, self._sample = model, sample
        self._warpers = [TopKLogitsWarper(TOP_K), TopPLogitsWarper(TOP_P)] if sample else []
        known = inspect.signature(type(model).forward).parameters
        self._cache = "cache" if "cache" in known else "past_key_values"  # of earlier versions
        self._always: State = {"use_cache": True}
        if "logits_to_keep" in known:
            self._always["logits_to_keep"] = 1

    def with_layers(self, compiled: Callable[[Any], Any]) -> "Talker":
        """The same with compiled layers; head and embeddings, which the number chooses, are not."""
        other = copy.copy(self)
        other.model = copy.copy(self.model)
        other.model._modules = dict(self.model._modules)
        other.model.model = compiled(self.model.model)
        return other

    def state(self, rows: int) -> State:
        """What a frame begins with, and what its steps share; see :meth:`fill`."""
        weight = next(self.model.parameters())
        codes = torch.zeros(rows, 1, dtype=torch.int64, device=weight.device)
        return {**self._inputs(rows, weight), "code": codes, "caches": []}

    def fill(self, state: State, seed: int) -> None:
        """Write the inputs of another frame."""
        generator = torch.Generator().manual_seed(seed)
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value.copy_(torch.randn(value.shape, generator=generator))
            elif isinstance(value, torch.Tensor):
                most = self.model.config.vocab_size
                value.copy_(torch.randint(0, most, value.shape, generator=generator))

    def step(self, state: State, number: int) -> torch.Tensor:
        """One code of each row: [R] int64. The first step makes the cache, the last drops it."""
        if number == 0:
            state["caches"].append(DynamicCache(config=self.model.config))
        inputs = self._first(state) if number == 0 else self._next(state["code"], number)
        inputs[self._cache] = state["caches"][0]
        logits = self.model(**inputs, **self._always).logits[:, -1].float()
        code = self._chosen(logits)
        state["code"].copy_(code[:, None])
        if number == self.codes - 1:
            state["caches"].pop()
        return code

    def _chosen(self, logits: torch.Tensor) -> torch.Tensor:
        if not self._sample:
            return logits.argmax(-1)
        for warper in self._warpers:
            logits = warper(None, logits)
        return torch.multinomial(logits.softmax(-1), 1).squeeze(1)

    def generate(self, state: State, **more: Any) -> torch.Tensor:
        """The codes of a frame by the model's own loop: [R, codes]."""
        if self._sample:
            more |= {"top_k": TOP_K, "top_p": TOP_P}
        codes: torch.Tensor = self.model.generate(
            **self._first(state), max_new_tokens=self.codes, do_sample=self._sample, **more
        )
        return codes[:, -self.codes :]

    def _inputs(self, rows: int, like: torch.Tensor) -> State:
        raise NotImplementedError

    def _first(self, state: State) -> State:
        """Arguments of the first call of the model."""
        raise NotImplementedError

    def _next(self, code: torch.Tensor, number: int) -> State:
        """Arguments of a later call."""
        raise NotImplementedError


class Qwen(Talker):
    """The code predictor of Qwen3-Omni: 15 codes, each with a head and an embedding of its own."""

    name = "Qwen3-Omni"

    def __init__(self, tiny: bool, sample: bool) -> None:
        sizes = {**TINY, "num_code_groups": 6} if tiny else {"num_code_groups": 16}
        config = Qwen3OmniMoeTalkerCodePredictorConfig(**sizes)
        kind: Any = Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration
        super().__init__(kind._from_config(config), sample)
        self.codes = config.num_code_groups - 1

    def _inputs(self, rows: int, like: torch.Tensor) -> State:
        return {"embeds": like.new_zeros(rows, 2, self.model.config.hidden_size)}

    def _first(self, state: State) -> State:
        return {"inputs_embeds": state["embeds"]}

    def _next(self, code: torch.Tensor, number: int) -> State:
        return {"input_ids": code, "generation_steps": number}


class Csm(Talker):
    """The depth decoder of CSM: 31 codes after the first."""

    name = "CSM"

    def __init__(self, tiny: bool, sample: bool) -> None:
        sizes = {**TINY, "backbone_hidden_size": 40, "num_codebooks": 8} if tiny else {}
        config = CsmDepthDecoderConfig(**sizes)
        kind: Any = CsmDepthDecoderForCausalLM
        super().__init__(kind._from_config(config), sample)
        self.codes = int(config.num_codebooks or 0) - 1

    def _inputs(self, rows: int, like: torch.Tensor) -> State:
        hidden = like.new_zeros(rows, self.model.config.backbone_hidden_size)
        first = torch.zeros(rows, dtype=torch.int64, device=like.device)
        return {"backbone": hidden, "first": first}

    def _first(self, state: State) -> State:
        # The place of the first id is that of the backbone's hidden state.
        ids = torch.nn.functional.pad(state["first"][:, None], (1, 0))
        return {"input_ids": ids, "backbone_last_hidden_state": state["backbone"]}

    def _next(self, code: torch.Tensor, number: int) -> State:
        # With ids the model reads a position on the host.
        offset = number * self.model.config.vocab_size
        layers = self.model.model
        embedding = getattr(layers, "_orig_mod", layers).embed_tokens
        return {"inputs_embeds": embedding(code + offset)}


TALKERS: dict[str, Callable[[bool, bool], Talker]] = {"qwen3-omni": Qwen, "csm": Csm}
Frame = Callable[[State], torch.Tensor]


def plain(talker: Talker) -> Frame:
    def frame(state: State) -> torch.Tensor:
        return torch.stack([talker.step(state, number) for number in range(talker.codes)], 1)

    return frame


def reduce_overhead(talker: Talker) -> Frame:
    def compiled(layers: Any) -> Any:
        return torch.compile(layers, mode="reduce-overhead", dynamic=True)

    steps = plain(talker.with_layers(compiled))

    def frame(state: State) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return steps(state)

    return frame


def looped(talker: Talker, args: argparse.Namespace) -> tuple[Frame, Any]:
    device = "host" if args.device == "cpu" else "auto"
    config = cgcompile.CompilationConfig(capture_device=device)
    loop = cgcompile.loop(talker.step, steps=talker.codes, config=config)
    return lambda state: loop(state).T, loop


def frame_of(args: argparse.Namespace, talker: Talker, way: str) -> tuple[Frame, Any]:
    """How a way makes the codes of a frame, and its loop."""
    if way == "generate":
        return talker.generate, None
    if way == "generate, static":
        return lambda state: talker.generate(state, cache_implementation="static"), None
    if way == "steps":
        return plain(talker), None
    if way == "reduce-overhead":
        return reduce_overhead(talker), None
    if way == "loop":
        return looped(talker, args)
    device = "host" if args.device == "cpu" else "auto"
    # Outside of the loop its graphs would not fit: the cache grows.
    settings = {"compiler": args.compiler, "on_fallback": "count"}
    backend = cgcompile.Backend(capture_device=device, **settings)
    return looped(
        talker.with_layers(lambda layers: torch.compile(layers, backend=backend, dynamic=True)),
        args,
    )


def codes_of(frame: Frame, talker: Talker, state: State, seed: int) -> torch.Tensor:
    talker.fill(state, seed)
    torch.manual_seed(seed)
    return frame(state).clone()


def measure(args: argparse.Namespace, talker: Talker, way: str, rows: int) -> dict[str, Any]:
    """Milliseconds of a frame, and the share of codes that are those of ``generate``."""
    state = talker.state(rows)
    frame, loop = frame_of(args, talker, way)
    begin = time.perf_counter()
    for seed in range(3):  # compiles and captures
        codes_of(frame, talker, state, seed)
    wait(args.device)
    start = time.perf_counter() - begin
    replays = 0 if loop is None else loop.counters.replays
    equal = []
    for seed in range(10, 10 + args.frames):
        codes = codes_of(frame, talker, state, seed)
        expected = codes_of(talker.generate, talker, state, seed)
        equal.append((codes == expected).float().mean().item())
    spans = []
    for seed in range(args.timed):
        talker.fill(state, seed)
        wait(args.device)
        begin = time.perf_counter()
        frame(state)
        wait(args.device)
        spans.append((time.perf_counter() - begin) * 1e3)
    row = {"talker": talker.name, "rows": rows, "way": way, "ms": statistics.median(spans)}
    row |= {"start_s": start, "equal": sum(equal) / len(equal), "least": min(equal)}
    if loop is not None:
        row["replays"] = (loop.counters.replays - replays) / (args.frames + args.timed)
    return row


def problems(row: dict[str, Any]) -> list[str]:
    """What is wrong with a row, a sentence each."""
    name = f"{row['talker']}, {row['rows']} rows, {row['way']}"
    broken = []
    if row["way"] in EXACT and row["least"] < 1:
        broken.append(f"{name}: codes differ from those of generate")
    if row.get("replays", 1) != 1:
        broken.append(f"{name}: {row['replays']:.2f} replays a frame")
    return broken


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time of the codes of one audio frame.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--talkers", nargs="+", default=[*TALKERS], choices=[*TALKERS])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS, metavar="WAY")
    parser.add_argument("--compiler", default="inductor", help="of the layers of 'loop, compiled'")
    parser.add_argument("--sample", action="store_true", help="top-k and top-p, in place of greedy")
    parser.add_argument("--tiny", action="store_true", help="small layers, few codes")
    parser.add_argument("--frames", type=int, default=5, help="that are compared")
    parser.add_argument("--timed", type=int, default=20, help="frames that are timed")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parsed(argv)
    broken: list[str] = []
    table: Table = [["talker", "codes", "rows", "way", "ms a frame", "first s", "equal codes"]]
    for name in args.talkers:
        torch.manual_seed(0)
        talker = TALKERS[name](args.tiny, args.sample)
        talker.model.to(args.device, getattr(torch, args.dtype)).eval()
        for rows in args.rows:
            for way in args.ways:
                torch._dynamo.reset()
                with torch.inference_mode(way not in ("generate", "generate, static")):
                    row = measure(args, talker, way, rows)
                shown = f"{row['ms']:.2f}", f"{row['start_s']:.1f}", f"{row['equal']:.1%}"
                table.append([talker.name, str(talker.codes), str(rows), way, *shown])
                print(f"{talker.name}, {rows} rows, {way}: {shown[0]} ms", flush=True)
                broken += problems(row)
    print(text_table(table))
    for problem in broken:
        print(f"BROKEN: {problem}")
    print(f"all right: {'no' if broken else 'yes'}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
