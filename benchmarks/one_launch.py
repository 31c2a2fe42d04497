"""Launch one variant on one batch twice, for a profiler to examine the second launch.

    ncu --clock-control none --section SpeedOfLight --section SourceCounters -k regex:attention -s 1 -c 1 \
        python benchmarks/one_launch.py prefill_8k VARIANT
"""

from __future__ import annotations

import argparse

import record
import torch
from peerbench.workloads import workloads

from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.kernel_templates.launch.device import present_gpu
from attention_tuner.kernel_templates.launch.launcher import make_launcher
from attention_tuner.kernel_templates.oracle.inputs import make_tensors
from attention_tuner.kernel_templates.variant import Variant


def main(arguments: argparse.Namespace) -> None:
    """Plan the batch and launch it twice."""
    gpu = INTERPRETER if arguments.interpreter else present_gpu()
    named = {load.name: load for load in workloads(arguments.interpreter)}
    if gpu is None or arguments.batch not in named:
        raise SystemExit("this needs an NVIDIA GPU, or --interpreter" if gpu is None else
                         f"unknown batch {arguments.batch!r}; known are {', '.join(named)}")  # fmt: skip
    load, variant = named[arguments.batch], Variant.parse(arguments.variant)
    device = "cpu" if gpu.is_interpreter else "cuda"
    launcher = make_launcher(variant, load.spec, gpu)
    launcher.plan(load.batch, device)
    tensors = make_tensors(load.spec, load.batch, variant.page_size, device, seed=0, needles=False)
    for _ in range(2):
        launcher.run(tensors)
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("batch", metavar="BATCH", help="of the thirteen of `peers.py`")
    parser.add_argument("variant", metavar="VARIANT", help="as `attention-tuner generate` prints it")
    record.add_interpreter(parser)
    main(parser.parse_args())
