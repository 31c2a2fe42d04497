"""Contenders of a race (one kernel on one batch each), and the peers that provide them."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attention_tuner.kernel_templates.launch.launcher import Settings, Tensors, query_start_locs
from attention_tuner.kernel_templates.oracle.reference import gather
from attention_tuner.kernel_templates.task import Task


class MissingError(Exception):
    """A peer's library cannot be imported; the message gives the reason."""


class RefusedError(Exception):
    """A contender cannot run a batch; the message gives the reason."""


class Contender(abc.ABC):
    """One kernel on the batch of one task.

    `prepare` does an engine's work per step for one set of tensors; it is not timed. `run` is the work of one layer,
    and can be captured in a CUDA graph after a first run.
    """

    # Read by the stopwatch, as for a launcher.
    settings = Settings()

    def __init__(self, task: Task) -> None:
        self.task = task
        self.batch = task.batch
        self.spec = task.spec
        self.max_query = max(query_len for query_len, _ in task.batch.sequences)
        self.max_kv = max(task.batch.kv_lens)
        # Results of `prepare`, by identity of the tensors.
        self.made: dict[int, Any] = {}

    def prepare(self, tensors: Tensors) -> None:  # noqa: B027 - most need nothing
        """Get ready to run on `tensors`."""

    @abc.abstractmethod
    def run(self, tensors: Tensors) -> Any:
        """Launch on the current stream; write to `tensors.out` or return the output."""

    def output(self, tensors: Tensors, returned: Any) -> torch.Tensor:
        """The output [num_tokens, num_q_heads, head_dim] of a run that returned `returned` (not timed)."""
        return tensors.out

    def release(self, tensors: Tensors) -> None:
        """Drop the results of `prepare` for `tensors`, which are not run again."""
        self.made.pop(id(tensors), None)


@dataclass(frozen=True, slots=True)
class Places:
    """The folders of peers."""

    # An unpacked vLLM wheel: the folder that holds `vllm/`.
    vllm: Path | None = None


@dataclass(frozen=True, slots=True)
class Peer:
    """A kernel of another project."""

    name: str
    # The data that it reads, and the work that is not timed.
    given: str
    # Imports it; raises `MissingError`.
    load: Callable[[Places], Loaded]


@dataclass(frozen=True, slots=True)
class Loaded:
    """An imported peer."""

    make: Callable[[Task], Contender]
    # The version of its library.
    version: str


def gathered(cache: torch.Tensor, tensors: Tensors, task: Task) -> torch.Tensor:
    """Keys or values of all sequences, concatenated: [sum of kv_lens, num_kv_heads, head_dim]."""
    parts = (gather(cache, tensors.block_table[i], kv_len) for i, kv_len in enumerate(task.batch.kv_lens))
    return torch.cat(list(parts))


def starts_of(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The cumulative sums of `lengths` from 0: [len(lengths) + 1] int32."""
    return torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32, device=device)


def query_starts(task: Task) -> torch.Tensor:
    """`query_start_locs` as int32 on the host."""
    return torch.tensor(query_start_locs(task.batch), dtype=torch.int32)


def reason_of(error: BaseException) -> str:
    """The reason of an error, in one line."""
    from attention_tuner.tuner.processes.child import one_line

    return str(error) if isinstance(error, (MissingError, RefusedError)) else one_line(error)
