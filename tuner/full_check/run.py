"""The run of one case of the full check: its inputs, its launches and the judgement; and of compute-sanitizer."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import asdict

import torch

from ...kernel_templates.batch import Batch
from ...kernel_templates.errors import BatchError
from ...kernel_templates.gpu import INTERPRETER, Gpu
from ...kernel_templates.launch.device import present_gpu
from ...kernel_templates.launch.launcher import Launcher, Settings, Tensors, make_launcher
from ...kernel_templates.oracle.inputs import make_tensors
from ...kernel_templates.outcome import CaseResult, Check
from ...kernel_templates.spec import AttentionSpec
from ...kernel_templates.variant import Variant
from ..measure.check import Checker
from ..processes.child import REASON_LENGTH
from .cases import FIXED_SPLIT, OFFSETS, Case, sanitizer_case

# The standard deviation of random scores; those of needles are 18 times as large. Tanh by two exponentials overflows
# there, and float16's 65,504 is far away.
LOGIT_FACTOR = 512.0
# The largest query: float16's end, less the factor that products are scaled by.
MAX_QUERY = 2.0**14
SANITIZER = "compute-sanitizer"
SANITIZER_LIMIT_S = 240.0
# The exit status of compute-sanitizer when it found something.
FOUND = 9
# Lines of the watched process on stderr: before it launches, and before the result in JSON.
LAUNCHES, RESULT = "attention-tuner launches", "attention-tuner result "

# Bytes for each element of q and the output: inputs in the making, output, two references and their differences.
_QUERY_BYTES = 40
_PARTIAL_BYTES = 5 * OFFSETS
_RESERVED = 2


def make_checker(spec: AttentionSpec, page_size: int, case: Case, device: str) -> Checker | None:
    """The inputs of `case` and their right outputs; None for a large case that the GPU's memory does not hold."""
    try:
        if device == "cuda":
            torch.cuda.empty_cache()
            if case.needs_gpu and case_bytes(spec, case) > torch.cuda.mem_get_info()[0]:
                return None
        tensors = make_tensors(spec, case.batch, page_size, device, case.seed, case.packed, guard=case.guard,
                               shared_prefix=case.shared_prefix, lse=case.lse)
        if case.large_logits:
            # Queries in 8 bits cannot hold numbers as large, so their scale grows.
            factor = tensors.q if tensors.q_scale is None else tensors.q_scale
            largest = float(tensors.q.float().abs().max()) * (1.0 if tensors.q_scale is None else float(factor.max()))
            factor.mul_(2.0 ** math.floor(math.log2(min(LOGIT_FACTOR, MAX_QUERY / largest))))
        return Checker(spec, case.batch, page_size, device, case.seed, tensors)
    except torch.OutOfMemoryError:
        if not case.needs_gpu:
            raise
        return None


def run_case(variant: Variant, case: Case, gpu: Gpu, checker: Checker | None) -> CaseResult:
    """The result of `case` for `variant`. Raises what goes wrong.

    A large case is not run if the GPU's memory does not hold it; its checker may be None. A case about offsets past
    2^31 is not run if the variant's partial results do not reach them, or if the variant refuses its batch.
    """
    try:
        if checker is None:
            raise torch.OutOfMemoryError
        settings = Settings(padded=case.way == "padded", fixed_split=FIXED_SPLIT if case.way == "fixed" else None)
        check, reason = _launched(make_launcher(variant, checker.spec, gpu, settings), checker, case)
    except torch.OutOfMemoryError:
        if not case.needs_gpu:
            raise
        return CaseResult(case.name, "not run", reason="the GPU's memory does not hold it")
    except BatchError as error:
        if not case.past:
            raise
        return CaseResult(case.name, "not run", reason=str(error))
    if check is None:
        return CaseResult(case.name, "not run", reason=reason)
    ratio = check.worst_ratio if math.isfinite(check.worst_ratio) else None
    if check.passed and not reason:
        return CaseResult(case.name, "passed", ratio)
    return CaseResult(case.name, "failed", ratio, reason or check.detail)


def case_bytes(spec: AttentionSpec, case: Case) -> int:
    """Estimated bytes of GPU memory that `case` takes."""
    dims = spec.head_dim + spec.value_dim
    queries = case.batch.num_tokens * spec.num_q_heads * dims // 2
    cache = sum(case.batch.kv_lens) * spec.num_kv_heads * dims * spec.kv_element_bytes
    return queries * _QUERY_BYTES + cache * 3 // 2 + (_PARTIAL_BYTES if case.past == "partials" else 0)


def _launched(launcher: Launcher, checker: Checker, case: Case) -> tuple[Check | None, str]:
    """The check of `case`, None if it does not apply, and a reason why not or why it failed nevertheless."""
    device = checker.device
    if case.past == "partials":
        launcher.plan(case.batch, device)
        if max((space.numel() for space in launcher.workspaces()), default=0) <= OFFSETS:
            return None, "its partial results have no element past 2^31"
    if case.way == "reserved":
        launcher.reserve(_RESERVED * case.batch.num_seqs, _RESERVED * case.batch.num_tokens, device)
    if case.way == "after another":
        other = Batch(case.batch.sequences[::-1] + case.batch.sequences[:1])
        launcher.plan(other, device)
        launcher.run(make_tensors(checker.spec, other, launcher.variant.page_size, device, case.seed, needles=False))
    check = checker.check(launcher)
    if case.way == "twice" and check.passed:
        first = _outputs(checker.tensors)
        for output in _outputs(checker.tensors, copied=False):
            output.fill_(torch.nan)
        launcher.run(checker.tensors)
        again = _outputs(checker.tensors)
        if not all(map(torch.equal, first, again)):
            return check, "the same call gave another output or log-sum-exp the second time"
    return check, ""


def _outputs(tensors: Tensors, copied: bool = True) -> list[torch.Tensor]:
    """The tensors that a launch writes, or copies of them."""
    written = [tensors.out, *([] if tensors.lse is None else [tensors.lse])]
    return [tensor.clone() for tensor in written] if copied else written


def sanitize(spec: AttentionSpec, variant: Variant, gpu: Gpu) -> CaseResult:
    """The result of compute-sanitizer for a launch of `variant`, in a process of its own."""
    case = sanitizer_case()
    tool = shutil.which(SANITIZER)
    if tool is None or gpu.is_interpreter:
        return CaseResult(case.name, "not run", reason=f"there is no {SANITIZER} here" if tool is None else "no GPU")
    call = f"from {__name__} import run_sanitized; run_sanitized({spec.key()!r}, {variant.key()!r})"
    command = [tool, "--tool", "memcheck", "--error-exitcode", str(FOUND), sys.executable, "-P", "-c", call]
    # Memory that torch caches would hide accesses beside a tensor.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False,
                              timeout=SANITIZER_LIMIT_S)
    except subprocess.TimeoutExpired:
        return CaseResult(case.name, "not run", reason=f"it took more than {SANITIZER_LIMIT_S:.0f} s")
    return _sanitized(done.returncode, [*done.stdout.splitlines(), *done.stderr.splitlines()])


def _sanitized(status: int, said: list[str]) -> CaseResult:
    """The result of a watched process with this exit status and these lines.

    The process writes its own result, so its status shows only the tool's findings. A process that ends before it
    launches says nothing about the variant: the tool may not be allowed to attach, or have no memory. A later
    end, by an exception too, counts as a failure of the variant.
    """
    name = sanitizer_case().name
    # The tool's own lines begin with "==".
    of_tool = [line.strip("= ") for line in said if line.startswith("==") and "SUMMARY" not in line]
    error = next((line for line in of_tool if "error" in line.lower() or "invalid" in line.lower()), "")
    if status == FOUND:
        return CaseResult(name, "failed", reason=(error or f"status {status}")[:REASON_LENGTH])
    results = [CaseResult(**json.loads(line.removeprefix(RESULT))) for line in said if line.startswith(RESULT)]
    if results and not (results[0].state == "passed" and status):
        return results[0]
    others = [line for line in said if line.strip() and not line.startswith((LAUNCHES, RESULT))]
    last = error or (others[-1] if others else "")
    state, what = ("failed", "crashed") if LAUNCHES in said else ("not run", "ended")
    return CaseResult(name, state, reason=f"it {what} with status {status}{last and ': '}{last}"[:REASON_LENGTH])


def run_sanitized(spec: str, variant: str) -> None:
    """Launch once, in the process that compute-sanitizer watches, and write the result on stderr."""
    gpu = present_gpu() or INTERPRETER
    named, case = Variant.parse(variant), sanitizer_case()
    checker = make_checker(AttentionSpec.parse(spec), named.page_size, case, "cpu" if gpu.is_interpreter else "cuda")
    sys.stderr.write(f"{LAUNCHES}\n")
    result = run_case(named, case, gpu, checker)
    sys.stderr.write(f"{RESULT}{json.dumps(asdict(result))}\n")
