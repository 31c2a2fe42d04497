"""A small serving loop: continuous batching over a paged KV cache, with attention by HybridAttention.

Requests of different lengths arrive one by one. Each step computes one token of every decoding request and fills its
token budget with chunks of prompts, so most batches are hybrid. On a GPU, the model has four layers of Llama-3-8B with
random weights, and decode-only steps replay CUDA graphs. Without a GPU, the layers are small and run in Triton's
interpreter. At the end, every token is compared with eager attention over the whole sequence.

    python examples/decode_loop.py
"""

from __future__ import annotations

import argparse
import bisect
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

if not torch.cuda.is_available():
    # Triton reads this when it is first imported.
    os.environ["TRITON_INTERPRET"] = "1"

from attention_tuner import AttentionSpec, HybridAttention

PAGE_SIZE = 16
# attend(layer, q, k, v): attention of one layer; q, k and v are those of the step's tokens.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Shapes:
    """Sizes of the model."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    layers: int
    dtype: str


LLAMA_3_8B = Shapes(4096, 32, 8, 128, 14336, 128256, layers=4, dtype="bfloat16")
SMALL = Shapes(64, 4, 2, 32, 128, 256, layers=2, dtype="float32")


class Model:
    """Llama with random weights: attention and a gated MLP in each layer, rotary positions, RMS norms."""

    def __init__(self, shapes: Shapes, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def matrix(rows: int, columns: int) -> torch.Tensor:
            made = torch.empty(rows, columns, dtype=getattr(torch, shapes.dtype), device=device)
            return made.normal_(std=rows**-0.5, generator=generator)

        s, q_dim, kv_dim = shapes, shapes.heads * shapes.head_dim, shapes.kv_heads * shapes.head_dim
        self.shapes, self.device = shapes, device
        self.embedding, self.head = matrix(s.vocabulary, s.hidden), matrix(s.hidden, s.vocabulary)
        self.layers = [
            (matrix(s.hidden, q_dim + 2 * kv_dim), matrix(q_dim, s.hidden), matrix(s.hidden, 2 * s.intermediate),
             matrix(s.intermediate, s.hidden)) for _ in range(s.layers)
        ]  # fmt: skip
        self.frequencies = 500000.0 ** -(torch.arange(0, s.head_dim, 2, device=device) / s.head_dim)

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Compute the logits [num_tokens, vocabulary] of a packed batch of tokens."""
        s = self.shapes
        angle = positions[:, None, None] * self.frequencies
        x = self.embedding[tokens] * s.hidden**0.5
        for number, (to_qkv, to_out, to_gate_up, to_down) in enumerate(self.layers):
            heads = (_norm(x) @ to_qkv).view(len(x), -1, s.head_dim)
            q, k, v = heads.split((s.heads, s.kv_heads, s.kv_heads), dim=1)
            x = x + attend(number, _rotate(q, angle), _rotate(k, angle), v).flatten(1) @ to_out
            gate, up = (_norm(x) @ to_gate_up).chunk(2, dim=-1)
            x = x + (torch.nn.functional.silu(gate) * up) @ to_down
        return _norm(x) @ self.head


def _norm(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:])


def _rotate(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


@dataclass
class Request:
    """A prompt, and the state of its sequence."""

    prompt: list[int]
    # Step of the arrival.
    arrival: int
    # Generated tokens.
    tokens: list[int] = field(default_factory=list)
    # Tokens whose keys and values are in the cache.
    in_cache: int = 0
    # Pages of the cache with these keys and values.
    pages: list[int] = field(default_factory=list)


@dataclass
class Inputs:
    """Input tensors of a step; those of a captured graph keep their addresses."""

    tokens: torch.Tensor
    # Position of each token in its sequence.
    positions: torch.Tensor
    # Row of the cache for each token's key and value.
    slots: torch.Tensor
    block_table: torch.Tensor

    @classmethod
    def empty(cls, num_tokens: int, num_seqs: int, max_pages: int, device: str) -> Inputs:
        """Inputs of zeros. Unused rows read token 0 and write to page 0, which belongs to no request."""
        rows = (torch.zeros(num_tokens, dtype=torch.int64, device=device) for _ in range(3))
        return cls(*rows, torch.zeros(num_seqs, max_pages, dtype=torch.int32, device=device))


class Engine:
    """Runs up to `max_seqs` requests at once, with `budget` tokens per step and `max_len` tokens per sequence."""

    def __init__(self, model: Model, max_seqs: int, budget: int, max_len: int) -> None:
        s = model.shapes
        self.model, self.budget, self.max_seqs, self.max_len = model, budget, max_seqs, max_len
        spec = AttentionSpec(s.heads, s.kv_heads, s.head_dim, s.dtype)
        self.attention = HybridAttention(spec, PAGE_SIZE, budget, max_seqs)
        self.max_pages = -(-max_len // PAGE_SIZE)
        self.free = list(range(1, 1 + max_seqs * self.max_pages))
        shape = (1 + len(self.free), PAGE_SIZE, s.kv_heads, s.head_dim)
        self.caches = [
            tuple(torch.zeros(shape, dtype=getattr(torch, s.dtype), device=model.device) for _ in range(2))
            for _ in range(s.layers)
        ]
        self.graphs = self._captured() if model.device == "cuda" else {}
        self.steps = {"hybrid": 0, "decode": 0, "replayed": 0}

    def step(self, running: list[Request]) -> None:
        """Compute one token of each decoding request, and chunks of the other requests' prompts."""
        batch: list[tuple[Request, int]] = []
        left = self.budget
        for request in sorted(running, key=lambda request: len(request.tokens) == 0):
            length = min(len(request.prompt) + len(request.tokens) - request.in_cache, left)
            if length:
                batch.append((request, length))
                left -= length
        lens = [length for _, length in batch], [request.in_cache for request, _ in batch]
        is_decode = max(lens[0]) == 1
        size = bisect.bisect_left(sizes := sorted(self.graphs), len(batch))
        if is_decode and size < len(sizes):
            planned, graph, inputs, logits = self.graphs[sizes[size]]
            self._fill(inputs, batch)
            planned.plan(*lens)
            graph.replay()
            self.steps["replayed"] += 1
        else:
            inputs = Inputs.empty(sum(lens[0]), len(batch), self.max_pages, self.model.device)
            self._fill(inputs, batch)
            self.attention.plan(*lens)
            logits = self._forward(inputs)
        self.steps["decode" if is_decode else "hybrid"] += 1
        last = torch.tensor(lens[0]).cumsum(0) - 1
        chosen = logits[last.to(logits.device)].argmax(-1).tolist()
        for (request, length), token in zip(batch, chosen, strict=True):
            request.in_cache += length
            if request.in_cache == len(request.prompt) + len(request.tokens):
                request.tokens.append(token)

    def _fill(self, inputs: Inputs, batch: list[tuple[Request, int]]) -> None:
        """Write the step's tokens, their positions, their slots in the cache, and the block table."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        table: list[list[int]] = []
        for request, length in batch:
            span = range(request.in_cache, request.in_cache + length)
            while len(request.pages) * PAGE_SIZE < span.stop:
                request.pages.append(self.free.pop())
            known = request.prompt + request.tokens
            tokens += known[span.start : span.stop]
            positions += span
            slots += [request.pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in span]
            table.append(request.pages + [0] * (self.max_pages - len(request.pages)))
        for tensor, values in ((inputs.tokens, tokens), (inputs.positions, positions), (inputs.slots, slots)):
            tensor.zero_()[: len(values)] = torch.tensor(values)
        inputs.block_table[: len(table)] = torch.tensor(table, dtype=torch.int32)

    def _forward(self, inputs: Inputs) -> torch.Tensor:
        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k_cache, v_cache = self.caches[layer]
            k_cache.flatten(0, 1)[inputs.slots], v_cache.flatten(0, 1)[inputs.slots] = k, v
            return self.attention.run(q, k_cache, v_cache, inputs.block_table)

        return self.model.logits(inputs.tokens, inputs.positions, attend)

    def _captured(self) -> dict[int, tuple]:
        """Capture a graph of a decode step for each power of two of sequences: plan, graph, inputs and logits."""
        graphs: dict[int, tuple] = {}
        for size in (1 << n for n in reversed(range(self.max_seqs.bit_length()))):
            inputs = Inputs.empty(size, size, self.max_pages, self.model.device)
            planned = self.attention.plan_graph([1] * size, [self.max_len - 1] * size)
            self._forward(inputs)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                logits = self._forward(inputs)
            graphs[size] = planned, graph, inputs, logits
        return graphs


def serve(engine: Engine, requests: list[Request], num_new: int) -> None:
    """Run `requests`, each from its arrival on, until all have `num_new` tokens."""
    waiting, running, step = sorted(requests, key=lambda request: request.arrival), [], 0
    while waiting or running:
        while waiting and waiting[0].arrival <= step and len(running) < engine.max_seqs:
            running.append(waiting.pop(0))
        if running:
            engine.step(running)
        for request in [request for request in running if len(request.tokens) == num_new]:
            engine.free += request.pages
            running.remove(request)
        step += 1


def eager(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute causal attention of one whole sequence in float32."""
    group = q.shape[1] // k.shape[1]
    k, v = k.float().repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v).to(q.dtype)


def compare(model: Model, request: Request) -> tuple[int, int]:
    """Count the tokens equal to those of eager attention, and those as likely up to rounding."""
    known = torch.tensor(request.prompt + request.tokens, device=model.device)
    logits = model.logits(known[:-1], torch.arange(len(known) - 1, device=model.device), eager)
    logits = logits[len(request.prompt) - 1 :].float()
    chosen = logits.gather(1, known[len(request.prompt) :, None])[:, 0]
    best = logits.max(-1).values
    # Each layer adds rounding errors of the dtype, in proportion to the spread of the logits.
    tolerance = (8 * torch.finfo(getattr(torch, model.shapes.dtype)).eps) * logits.std(-1) * model.shapes.layers
    return int((chosen == best).sum()), int((chosen >= best - tolerance).sum())


def main() -> None:
    """Serve random prompts, and compare the tokens with eager attention."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64 if on_gpu else 4)
    parser.add_argument("--new-tokens", type=int, default=64 if on_gpu else 6)
    options = parser.parse_args()
    model = Model(LLAMA_3_8B if on_gpu else SMALL, "cuda" if on_gpu else "cpu")
    longest, max_seqs, budget = (2000, 32, 512) if on_gpu else (60, 4, 24)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(model.shapes.vocabulary, (int(length),), generator=generator).tolist()
               for length in torch.randint(longest // 4, longest, (options.requests,), generator=generator)]
    requests = [Request(prompt, arrival=2 * number) for number, prompt in enumerate(prompts)]
    with torch.inference_mode():
        engine = Engine(model, max_seqs, budget, longest + options.new_tokens)
        start = time.perf_counter()
        serve(engine, requests, options.new_tokens)
        seconds = time.perf_counter() - start
        counts = [compare(model, request) for request in requests]
    total = sum(len(request.tokens) for request in requests)
    same, close = (sum(column) for column in zip(*counts, strict=True))
    steps = ", ".join(f"{count} {kind}" for kind, count in engine.steps.items())
    print(f"{len(requests)} requests, {sum(map(len, prompts))} prompt tokens and {total} new ones in {seconds:.1f} s; "
          f"steps: {steps}")
    print(f"{same} of {total} tokens equal those of eager attention, {close} are as likely up to rounding")
    if close < total:
        raise SystemExit("some tokens differ from those of eager attention")


if __name__ == "__main__":
    main()
