"""What an attention costs the host: CPU time of each `plan` and of each `run`, beyond what the GPU does meanwhile.

Each row is a batch. "plan" is HybridAttention.plan of lengths that were not planned before; "run" one layer's call,
"in Triton" how much of it Triton's own launch takes ("beyond" is the rest); "launch" the launcher's call with tensors
already gathered; "operator" the call as torch.compile makes it; "drop-in" unified_attention with the lengths of the
layer before. On a GPU, also "graph plan" and "replay" of a captured decode step; the calls are made without waiting, so
that only the host's time counts. Through the interpreter a launch is the whole computation: only "plan" and "beyond"
say something about a host there.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

if not torch.cuda.is_available():
    # Triton reads this when it is first imported.
    os.environ["TRITON_INTERPRET"] = "1"

import record

from attention_tuner import AttentionSpec, Batch, HybridAttention, Tensors, unified_attention
from attention_tuner.kernel_templates.inputs import make_tensors
from attention_tuner.runtime.custom_op import hybrid_attention_op

BATCHES = ("1x1@2000", "32x1@2000", "256x1@1000", "1x512@4000,31x1@2000")
SMALL = ("1x1@40", "8x1@40", "256x1@8", "1x12@40,7x1@40")
COLUMNS = ("plan", "run", "in Triton", "beyond", "launch", "operator", "drop-in", "graph plan", "replay")
# Calls between two waits: fewer than a GPU's queue holds, so that none of them waits for room in it.
BURST = 50


def microseconds(call: Callable[[int], object], repeats: int) -> float:
    """The median time of `call` on the host, over bursts of calls, each after the device is idle."""
    times: list[float] = []
    for first in range(0, repeats, burst := min(BURST, repeats)):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        for number in range(first, first + burst):
            call(number)
        times.append((time.perf_counter() - start) / burst * 1e6)
    return statistics.median(times)


def in_triton(attention: HybridAttention, call: Callable[[int], object], repeats: int) -> tuple[float, float]:
    """Of each `call`: the microseconds inside Triton's launches, and those outside."""
    launcher = attention._step.launcher(return_lse=False)  # pyright: ignore
    start, inside = launcher.start, [0.0]

    def timed(*arguments: Any) -> None:
        begin = time.perf_counter()
        start(*arguments)
        inside[0] += time.perf_counter() - begin

    launcher.start = timed
    shares: list[tuple[float, float]] = []
    for first in range(0, repeats, burst := min(BURST, repeats)):
        inside[0] = 0.0
        whole = microseconds(lambda number, first=first: call(first + number), burst)
        shares.append((inside[0] / burst * 1e6, whole - inside[0] / burst * 1e6))
    del launcher.start
    return statistics.median(share[0] for share in shares), statistics.median(share[1] for share in shares)


def drop_in(t: Tensors, spec: AttentionSpec, batch: Batch) -> Callable[[int], object]:
    query_lens = [query_len for query_len, _ in batch.sequences]

    def call(_: int) -> None:
        unified_attention(
            t.q, t.k_cache, t.v_cache, t.out, t.query_start_loc, max(query_lens), t.kv_lens, max(batch.kv_lens),
            spec.softmax_scale, True, (-1, -1), t.block_table, 0.0, None, None, None,
        )  # fmt: skip

    return call


def graph_times(attention: HybridAttention, t: Tensors, batch: Batch, repeats: int) -> tuple[float, float]:
    """The microseconds of planning a captured step anew, and of replaying it."""
    query_lens, context_lens = zip(*batch.sequences, strict=True)
    planned = attention.plan_graph(query_lens, context_lens)
    attention.run(t.q, t.k_cache, t.v_cache, t.block_table, t.out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.run(t.q, t.k_cache, t.v_cache, t.block_table, t.out)
    fewer = [[length - number % 7 for length in context_lens] for number in range(7)]
    return (microseconds(lambda number: planned.plan(query_lens, fewer[number % 7]), repeats),
            microseconds(lambda _: graph.replay(), repeats))  # fmt: skip


def measure(spec: AttentionSpec, text: str, repeats: int, device: str) -> dict[str, Any]:
    batch = Batch.parse(text)
    t = make_tensors(spec, batch, 16, device, 0, needles=False)
    query_lens, context_lens = zip(*batch.sequences, strict=True)
    lengths = [[length - number % 7 for length in context_lens] for number in range(7)]
    attention = HybridAttention(spec, 16, batch.num_tokens, batch.num_seqs)

    def run(_: int) -> None:
        attention.run(t.q, t.k_cache, t.v_cache, t.block_table, t.out)

    def operator(_: int) -> None:
        hybrid_attention_op(t.q, t.k_cache, t.v_cache, t.block_table, t.out, *[None] * 6, attention.handle)

    found: dict[str, Any] = {"batch": text}
    found["plan"] = microseconds(lambda number: attention.plan(query_lens, lengths[number % 7]), repeats)
    attention.plan(query_lens, context_lens)
    step = attention._step  # pyright: ignore
    launcher = step.launcher(return_lse=False)
    found["variant"] = launcher.variant.key()
    calls = {"run": run, "launch": lambda _: launcher.run(t), "operator": operator, "drop-in": drop_in(t, spec, batch)}
    with torch.inference_mode():
        for name, call in calls.items():
            call(0)
            found[name] = microseconds(call, repeats)
        found["in Triton"], found["beyond"] = in_triton(attention, run, repeats)
        if device == "cuda" and max(query_lens) == 1:
            found["graph plan"], found["replay"] = graph_times(attention, t, batch, repeats)
    return found


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--interpreter", action="store_true", help="small batches through Triton's interpreter")
    parser.add_argument("--repeats", type=int, default=None, help="calls of each kind")
    options: argparse.Namespace = parser.parse_args()
    gpu = record.machine(options.interpreter)
    is_small = gpu.is_interpreter
    spec = AttentionSpec(4, 2, 64, "float16") if is_small else AttentionSpec(32, 8, 128)
    repeats = options.repeats or (5 if is_small else 1000)
    rows = [measure(spec, text, repeats, "cpu" if is_small else "cuda") for text in (SMALL if is_small else BATCHES)]
    record.write(options.out, {"gpu": gpu.name, "spec": spec.key(), "repeats": repeats, "unit": "microseconds",
                               "rows": rows})  # fmt: skip
    print("microseconds of the host for a call, median")
    record.print_table(["batch", *COLUMNS], [
        [row["batch"], *(f"{row[name]:.1f}" if name in row else "-" for name in COLUMNS)] for row in rows
    ])  # fmt: skip


if __name__ == "__main__":
    main()
