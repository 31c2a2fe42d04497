"""The thirteen workloads: batches of suite `hopper13`, some of them for one GPU of eight."""

from __future__ import annotations

from dataclasses import dataclass

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.search_spaces.suites import INTERPRETER_BATCHES, named_batches

LLAMA_3_8B = AttentionSpec(32, 8, 128)
LLAMA_3_70B_TP8 = AttentionSpec(8, 1, 128)
TP8 = "_tp8"
ORDER = (
    "hybrid_512@16k_63dec_tp8", "hybrid_512@16k_63dec", "hybrid_512@4k_31dec", "decode_64_mixed_tp8", "decode_64_mixed",
    "decode_4x64k_tp8", "decode_1x128k", "decode_256x1k", "verify_32x6@20k", "chunk_512@32k_tp8", "chunk_512@32k",
    "chunk_2048@32k", "prefill_8k",
)  # fmt: skip
# Small enough for the interpreter. Its bfloat16 is wrong in kernels without a workaround, hence float16.
SMALL = AttentionSpec(4, 2, 64, "float16")


@dataclass(frozen=True, slots=True)
class Workload:
    """A batch of a layer, by name."""

    name: str
    spec: AttentionSpec
    batch: Batch

    @property
    def kind(self) -> str:
        """"hybrid", "decode", "verify" or "prefill" (a chunk, or a whole prompt)."""
        if self.batch.has_part("long"):
            return "hybrid" if self.batch.has_part("short") else "prefill"
        return "decode" if all(query_len == 1 for query_len, _ in self.batch.sequences) else "verify"


def workloads(interpreter: bool = False) -> list[Workload]:
    """The thirteen workloads, or small ones for the interpreter (about a second each)."""
    if interpreter:
        return [Workload(text, SMALL, Batch.parse(text)) for text in INTERPRETER_BATCHES]
    batches = named_batches("hopper13")
    return [
        Workload(name, LLAMA_3_70B_TP8 if name.endswith(TP8) else LLAMA_3_8B, batches[name.removesuffix(TP8)])
        for name in ORDER
    ]
