"""Decode with a model of transformers in rounds of steps, and compare with plain steps.

The model has random weights. On a GPU the times of a token are printed: plain steps of the compiled
model, rounds of 1, 4 and 8 replays of one step, and rounds of 8 steps as one graph.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import cgcompile

State = dict[str, Any]
PROMPT, END, WORDS = 16, 2, 1000


class Decoder:
    """A compiled Llama, its step, and the state of it."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.device, self.rows, self.tokens = args.device, args.rows, args.tokens
        self.on_gpu = args.device.startswith("cuda")
        self.config = LlamaConfig(
            vocab_size=WORDS,
            hidden_size=args.hidden,
            intermediate_size=4 * args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=args.hidden // args.head,
            num_key_value_heads=args.hidden // args.head // 4,
        )
        dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.model = LlamaForCausalLM(self.config).to(args.device, dtype).eval()
        device = "auto" if self.on_gpu else "host"  # a recorder
        self.settings = cgcompile.CompilationConfig(compiler=args.compiler, capture_device=device)
        self.compiled = torch.compile(self.model, backend=cgcompile.Backend(self.settings))

    def step(self, state: State) -> torch.Tensor:
        """Decode one token of each row. Rows that are finished repeat the end."""
        outputs = self.compiled(
            input_ids=state["token"],
            position_ids=state["position"],
            attention_mask=state["mask"],  # of the whole cache, which counts its tokens itself
            past_key_values=state["cache"],
        )
        token = outputs.logits[:, -1].argmax(-1, keepdim=True)
        token = torch.where(state["done"], END, token)
        state["done"].logical_or_(token == END)
        state["token"].copy_(token)
        state["position"].add_(1)
        return token[:, 0]

    def new_state(self) -> State:
        """Make a state with room for the tokens and a round in vain."""
        length = PROMPT + self.tokens + 16
        ones: Any = {"device": self.device, "dtype": torch.long}
        return {
            "cache": StaticCache(config=self.config, max_cache_len=length),
            "mask": torch.ones(self.rows, length, **ones),
            "token": torch.ones(self.rows, 1, **ones),
            "position": torch.ones(self.rows, 1, **ones),
            "done": torch.zeros(self.rows, 1, device=self.device, dtype=torch.bool),
        }

    def start(self, prompt: torch.Tensor, state: State) -> None:
        """Run a prompt, and write what the first step reads: the state stays where it is."""
        state["cache"].reset()
        logits = self.model(prompt, past_key_values=state["cache"]).logits
        state["token"].copy_(logits[:, -1].argmax(-1, keepdim=True))
        state["position"].fill_(PROMPT)
        state["done"].zero_()

    def plainly(self, state: State) -> torch.Tensor:
        """Decode step by step, with a wait for the device at each: is every row finished?"""
        tokens: list[torch.Tensor] = []
        while len(tokens) < self.tokens and not state["done"].all():
            tokens.append(self.step(state).clone())
        return torch.stack(tokens)

    def decoded(
        self, prompts: Sequence[torch.Tensor], decode: Callable[[State], torch.Tensor]
    ) -> tuple[list[torch.Tensor], str]:
        """Return the tokens of each prompt, and the speed of the last one as text."""
        results, state = [], self.new_state()
        for prompt in prompts:
            self.start(prompt, state)
            if self.on_gpu:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
            results.append(decode(state))
        if not self.on_gpu:
            return results, ""
        end.record()
        end.synchronize()
        return results, f", {begin.elapsed_time(end) / len(results[-1]):.2f} ms a token"


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--head", type=int, default=64, help="size of a head")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--compiler", default="inductor", choices=["inductor", "eager"])
    args = parser.parse_args(arguments)
    decoder, shape = Decoder(args), (args.rows, PROMPT)
    prompts = [torch.randint(3, WORDS, shape, device=args.device) for _ in range(3)]
    expected, speed = decoder.decoded(prompts, decoder.plainly)
    print(f"plain steps: {sum(map(len, expected))} tokens{speed}")
    right = True
    for steps, unroll in ((1, False), (4, False), (8, False), (8, True)):
        loop = cgcompile.loop(
            decoder.step, steps, lambda state: state["done"], unroll, config=decoder.settings
        )

        def decode(state: State, loop: Any = loop) -> torch.Tensor:
            return torch.cat([*loop.rounds(state, args.tokens)])

        results, speed = decoder.decoded(prompts, decode)
        pairs = zip(results, expected, strict=True)
        equal = all(torch.equal(tokens[: len(plain)], plain) for tokens, plain in pairs)
        counts = f"{loop.counters.captures} captures, {loop.counters.replays} replays"
        name = f"{steps} steps, {'one graph' if unroll else 'replays of one'}"
        print(f"{name}: tokens {'equal' if equal else 'DIFFER'}, {counts}{speed}")
        right &= equal and loop.counters.replays > 0
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
