"""A decoder that is never traced: CUDA graphs from plain Python, with eager attention between them.

    python examples/breakable.py

The model picks its layers by name at run time, which would break a trace into pieces. Attention
reads how long each sequence is from the forward context, so it must run at every step; it is
decorated, everything else is captured. The same tokens come out with graphs and without.

Without a GPU the host recorder takes the place of CUDA graphs: same rules, no speed.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

import cgcompile
from cgcompile import BatchDescriptor, CUDAGraphMode, get_forward_context, set_forward_context


@dataclass(frozen=True)
class Metadata:
    """Of one step: how many tokens of each sequence are in the cache already."""

    length: int


@cgcompile.eager_break_during_capture
def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Write one token to the cache and look at all of it; [B, H] each, caches [B, S, H]."""
    length = get_forward_context().attn_metadata.length  # of the present step
    keys[:, length], values[:, length] = k, v
    seen = slice(0, length + 1)
    scores = torch.einsum("bh,bsh->bs", q, keys[:, seen]) * q.shape[-1] ** -0.5
    return torch.einsum("bs,bsh->bh", scores.softmax(-1), values[:, seen])


class Layer(nn.Module):
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, hidden: int, batch: int, longest: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)
        self.register_buffer("keys", torch.zeros(batch, longest, hidden))
        self.register_buffer("values", torch.zeros(batch, longest, hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(attend(q, k, v, self.keys, self.values))
        h: torch.Tensor = x + self.down(nn.functional.silu(self.up(self.norm2(x))))
        return h


class Decoder(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.embed = nn.Embedding(args.vocabulary, args.hidden)
        for index in range(args.layers):
            setattr(self, f"layer_{index}", Layer(args.hidden, args.batch, args.tokens))
        self.head = nn.Linear(args.hidden, args.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for name in sorted(vars(self)["_modules"]):
            if name.startswith("layer"):
                x = getattr(self, name)(x)
        logits: torch.Tensor = self.head(x)
        return logits

    def reset(self) -> None:
        for buffer in self.buffers():
            buffer.zero_()


def decode(
    model: Decoder, step: Callable[[torch.Tensor], torch.Tensor], args: argparse.Namespace
) -> torch.Tensor:
    """Greedy decoding; all tokens [B, S] int64."""
    model.reset()
    tokens = torch.arange(args.batch, device=args.device)  # the same buffer at every step
    generated = [tokens.clone()]
    batch = BatchDescriptor(args.batch, num_reqs=args.batch, uniform=True)
    for length in range(args.tokens):
        with set_forward_context(
            Metadata(length),
            cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE,
            batch_descriptor=batch,
        ):
            tokens.copy_(step(tokens).argmax(-1))
        generated.append(tokens.clone())
    return torch.stack(generated, 1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Breakable capture of a decoder.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    model = Decoder(args).to(args.device).eval()
    config = cgcompile.CompilationConfig(
        capture_device="host" if args.device == "cpu" else "auto", on_fallback="raise"
    )
    wrapper = cgcompile.BreakableCUDAGraphWrapper(model, config)
    with torch.inference_mode():
        expected = decode(model, model, args)
        actual = decode(model, wrapper, args)
        (entry,) = wrapper.concrete_cudagraph_entries.values()
    print(entry.sequence.text())
    print(wrapper.counters)
    same = torch.equal(actual, expected)
    print(f"tokens: {actual.numel()}, {len(actual.unique())} different ones")
    print(f"tokens identical: {'yes' if same else 'no'}")
    kept = (
        same
        and wrapper.counters.captures == 1
        and wrapper.counters.replays == args.tokens - 1
        and entry.sequence.num_eager_breaks == args.layers
    )
    print(f"promises kept: {'yes' if kept else 'no'}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
