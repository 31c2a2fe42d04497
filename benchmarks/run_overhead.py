"""Measure the host time of `plan` and `run` of an attention, one row per batch.

- plan: HybridAttention.plan with the lookup; lengths differ in each call.
- run: one layer's call. "in Triton" is the part in Triton's launches, "beyond" the rest.
- launch: the launcher's call with ready tensors.
- operator: the call as torch.compile makes it.
- drop-in: unified_attention of a layer after the first one of a step.
- graph plan, replay: a captured step, for decode batches on a GPU.

Calls do not wait for the GPU. In the interpreter a launch is the whole computation, so only "beyond" is measured, on
small batches; the computations leave the host's caches cold.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

if not torch.cuda.is_available():
    # Triton reads this when it is first imported.
    os.environ["TRITON_INTERPRET"] = "1"

import record

from attention_tuner import AttentionSpec, Batch, HybridAttention, Tensors, unified_attention
from attention_tuner.kernel_templates.oracle.inputs import make_tensors
from attention_tuner.runtime.custom_op import hybrid_attention_op

SPEC = AttentionSpec(32, 8, 128)
BATCHES = ("1x1@2000", "32x1@2000", "256x1@1000", "1x512@4000,31x1@2000")
INTERPRETED = ("1x1@40", "1x12@40,3x1@40")
COLUMNS = ("plan", "run", "in Triton", "beyond", "launch", "operator", "drop-in", "graph plan", "replay")
# Calls between two synchronizations, few enough that the GPU's queue never fills.
BURST = 50


def microseconds(call: Callable[[int], object], repeats: int) -> float:
    """The median time of `call` on the host, over bursts of calls that each begin on an idle GPU."""
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
    """The microseconds of each `call` inside Triton's launches and outside them."""
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


def drop_in(t: Tensors, batch: Batch) -> Callable[[int], object]:
    """A call of `unified_attention` with lengths that are read once, as for later layers of a step."""
    # Cloned outside inference mode, so that PyTorch counts changes.
    lengths = t.query_start_loc.clone(), max(query_len for query_len, _ in batch.sequences), t.kv_lens.clone()

    def call(_: int) -> None:
        starts, longest, kv_lens = lengths
        unified_attention(
            t.q, t.k_cache, t.v_cache, t.out, starts, longest, kv_lens, max(batch.kv_lens), SPEC.softmax_scale, True,
            (-1, -1), t.block_table, 0.0, None, None, None,
        )  # fmt: skip

    return call


def graph_times(attention: HybridAttention, t: Tensors, batch: Batch, repeats: int) -> dict[str, float]:
    """The microseconds of planning a captured step, and of replaying it."""
    query_lens, context_lens = columns(batch)
    planned = attention.plan_graph(query_lens, context_lens)
    attention.run(t.q, t.k_cache, t.v_cache, t.block_table, t.out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.run(t.q, t.k_cache, t.v_cache, t.block_table, t.out)
    return {"graph plan": microseconds(lambda number: planned.plan(query_lens, context_lens - number % 7), repeats),
            "replay": microseconds(lambda _: graph.replay(), repeats)}  # fmt: skip


def columns(batch: Batch) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The query lengths and context lengths of `batch`."""
    query_lens, context_lens = np.array(batch.sequences, np.int32).T.copy()
    return query_lens, context_lens


def plan_times(text: str, repeats: int) -> dict[str, Any]:
    """The microseconds of a plan of a batch."""
    batch = Batch.parse(text)
    query_lens, context_lens = columns(batch)
    attention = HybridAttention(SPEC, 16, batch.num_tokens, batch.num_seqs)
    attention.plan(query_lens, context_lens)
    us = microseconds(lambda number: attention.plan(query_lens, context_lens - number % 7), repeats)
    return {"batch": text, "plan": us, "variant": attention.variant.key()}


def run_times(text: str, repeats: int, device: str) -> dict[str, Any]:
    """The microseconds of each way to run a batch."""
    batch = Batch.parse(text)
    t = make_tensors(SPEC, batch, 16, device, 0, needles=False)
    attention = HybridAttention(SPEC, 16, batch.num_tokens, batch.num_seqs)
    attention.plan(*columns(batch))
    launcher = attention._step.launcher(return_lse=False)  # pyright: ignore

    def run(_: int) -> None:
        attention.run(t.q, t.k_cache, t.v_cache, t.block_table, t.out)

    def operator(_: int) -> None:
        hybrid_attention_op(t.q, t.k_cache, t.v_cache, t.block_table, t.out, *[None] * 7, attention.handle)

    calls: dict[str, Callable[[int], object]] = {
        "run": run, "launch": lambda _: launcher.run(t), "operator": operator, "drop-in": drop_in(t, batch),
    }  # fmt: skip
    found: dict[str, Any] = {"batch": text, "variant": launcher.variant.key()}
    with torch.inference_mode():
        run(0)
        found["in Triton"], found["beyond"] = in_triton(attention, run, repeats)
        if device == "cpu":
            # Here a launch is the whole computation.
            return {name: value for name, value in found.items() if name != "in Triton"}
        for name, call in calls.items():
            call(0)
            found[name] = microseconds(call, repeats)
        if not batch.has_part("long"):
            found |= graph_times(attention, t, batch, repeats)
    return found


def main() -> None:
    """Measure all batches, write the JSON and print the table."""
    parser = record.parser(__doc__)
    parser.add_argument("--interpreter", action="store_true", help="without a GPU: what a host alone can show")
    parser.add_argument("--repeats", type=int, default=1000, help="calls of each kind; of 20 through the interpreter")
    options: argparse.Namespace = parser.parse_args()
    gpu = record.required_gpu(options.interpreter)
    rows = {text: plan_times(text, options.repeats) for text in BATCHES}
    device, runs, repeats = ("cpu", INTERPRETED, 20) if gpu.is_interpreter else ("cuda", BATCHES, options.repeats)
    for text in runs:
        rows[text] = rows.get(text, {}) | run_times(text, repeats, device)
    record.write(options.out, {"gpu": gpu.name, "spec": SPEC.key(), "repeats": options.repeats,
                               "unit": "microseconds", "rows": list(rows.values())})  # fmt: skip
    print("microseconds of the host for a call, median")
    record.print_table(["batch", *COLUMNS], [
        [row["batch"], *(f"{row[name]:.1f}" if name in row else "-" for name in COLUMNS)] for row in rows.values()
    ])  # fmt: skip


if __name__ == "__main__":
    main()
