"""Compare this project with other attention kernels on thirteen batches: times, ratios and shares of the floor.

Every contender is checked against the oracle. All are timed in turns on the same tensors, in CUDA graphs with cold L2.
Results in FILE are not measured again, so the same command continues a run that was stopped or lacked a peer.
"""

from __future__ import annotations

import argparse
import gc
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import record
from peerbench import registry
from peerbench.contender import Loaded, Peer, Places
from peerbench.ours import Candidate, Configs, compile_ahead
from peerbench.plot import plot
from peerbench.race import DeviceLostError, Race
from peerbench.rates import rates_of
from peerbench.results import OURS, Cell, Results
from peerbench.table import show
from peerbench.workloads import Workload, workloads

from attention_tuner.kernel_templates.batch import minimum_traffic
from attention_tuner.kernel_templates.gpu import INTERPRETER, Gpu
from attention_tuner.kernel_templates.task import Task
from attention_tuner.tuner.measure.bench import Workbench
from attention_tuner.tuner.measure.rates import Rates, floor_ms

PAGES = (16, 128)
SAMPLES = 7


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, metavar="FILE", help="the JSON to write or to continue")
    made.add_argument("--from", dest="source", type=Path, metavar="FILE", help="only show the results in FILE")
    made.add_argument("--plot", type=Path, metavar="PNG", help="draw the results as well (needs matplotlib)")
    made.add_argument("--pages", type=int, nargs="+", default=PAGES, metavar="SIZE")
    made.add_argument("--batches", nargs="+", metavar="NAME", help="only these of the thirteen")
    made.add_argument("--db", nargs="+", default=[], metavar="DB", help="tuner databases; left out, the default one")
    made.add_argument("--configs", type=Path, nargs="+", default=[], metavar="JSON", help="exported configs as well")
    made.add_argument("--only", nargs="+", metavar="PEER", help=f"of {', '.join(peer.name for peer in registry.PEERS)}")
    made.add_argument("--skip", nargs="+", default=[], metavar="PEER", help="not these peers")
    made.add_argument("--vllm", type=Path, metavar="DIR", help="an unpacked vLLM wheel: the folder that holds vllm/")
    made.add_argument("--samples", type=int, default=SAMPLES, help="of each contender (%(default)s)")
    made.add_argument("--rates", type=float, nargs=2, metavar=("TB/s", "TFLOP/s"), help="of the floor; else measured")
    made.add_argument("--seconds", type=float, help="begin no further batch after this time")
    made.add_argument("--again", action="store_true", help="measure again, discarding FILE")
    made.add_argument("--interpreter", action="store_true", help="small batches, in Triton's interpreter")
    options = made.parse_args(arguments)
    if (options.out is None) == (options.source is None):
        made.error("give either --out or --from")
    return options


def wanted_peers(options: argparse.Namespace) -> list[Peer]:
    """The peers that take part; ends the script for an unknown name."""
    known = {peer.name: peer for peer in registry.PEERS}
    for name in (*(options.only or ()), *options.skip):
        if name not in known:
            sys.exit(f"there is no peer {name!r}; expected one of {', '.join(known)}")
    return [peer for name, peer in known.items() if name in (options.only or known) and name not in options.skip]


def wanted_workloads(options: argparse.Namespace) -> list[Workload]:
    """The workloads to measure; ends the script for an unknown name."""
    known = {workload.name: workload for workload in workloads(options.interpreter)}
    for name in options.batches or ():
        if name not in known:
            sys.exit(f"there is no batch {name!r}; expected one of {', '.join(known)}")
    return [workload for name, workload in known.items() if name in (options.batches or known)]


def new_cell(workload: Workload, page_size: int, rates: Rates) -> Cell:
    """The cell of a workload and page size, with no entries."""
    read_bytes, flops = minimum_traffic(workload.spec, workload.batch)
    return Cell(workload.name, workload.kind, page_size, workload.spec.key(), str(workload.batch),
                floor_ms(workload.spec, workload.batch, rates), read_bytes, flops)  # fmt: skip


def measure(race: Race, cell: Cell, task: Task, candidates: Sequence[Candidate], loaded: Mapping[str, Loaded],
            results: Results) -> None:  # fmt: skip
    """Race this project's candidates and the loaded peers on `task`; `cell` gets the entries even on an error."""
    try:
        for candidate in candidates:
            results.at(cell, f"{OURS}{candidate.variant.template}")
            race.enter_ours(candidate)
        race.zero_unused()
        for name, peer in loaded.items():
            results.at(cell, name)
            race.enter(name, lambda peer=peer: peer.make(task))
        results.at(cell, "")
        race.time(results.document["runs"][-1]["samples"])
    finally:
        results.at(cell, "")
        cell.add(entry for entry in race.entries.values() if entry.samples_ms or entry.state != "timed")


def run(options: argparse.Namespace) -> Results:
    """Measure the wanted cells that are not in the file yet."""
    gpu = INTERPRETER if options.interpreter else record.required_gpu(False)
    peers, todo = wanted_peers(options), wanted_workloads(options)
    configs = Configs(options.db, options.configs)
    if options.again:
        options.out.unlink(missing_ok=True)
    results = Results(options.out)
    results.begin({**record.record(), "configs": configs.id, "samples": options.samples})
    left_out = [peer for peer in registry.PEERS if peer not in peers]
    found = registry.load(peers, Places(options.vllm)) | {peer.name: "left out of this run" for peer in left_out}
    loaded = {name: each for name, each in found.items() if isinstance(each, Loaded)}
    for peer in (*peers, *left_out):
        facts, known = facts_of(peer, found[peer.name]), results.document["peers"].get(peer.name)
        # Keep the facts of a peer that is missing now but was measured before.
        if not known or facts["missing"] is None or known["missing"] is not None:
            results.document["peers"][peer.name] = facts
    rates, origin = rates_of(gpu, options.rates)
    results.document["rates"] = {"read_tb_per_s": rates.read_tb_per_s, "matmul_tflops": rates.matmul_tflops,
                                 "origin": origin}  # fmt: skip
    work = [(results.cell(new_cell(workload, page_size, rates)), Task(workload.spec, workload.batch, page_size))
            for workload in todo for page_size in options.pages]  # fmt: skip
    work = [(cell, task) for cell, task in work if cell.missing([*loaded, OURS])]
    candidates = {task: configs.candidates(task, gpu) for _, task in work}
    start = time.monotonic()
    if not gpu.is_interpreter:
        compile_ahead(candidates, gpu)
        print(f"compiled ahead in {time.monotonic() - start:.1f} s", file=sys.stderr)
    for cell, task in work:
        began = time.monotonic()
        if options.seconds and began - start > options.seconds:
            print(f"stopped after {options.seconds:g} s; run the same command to continue", file=sys.stderr)
            break
        # If this process dies, a second file names the running contender.
        results.write()
        try:
            race = Race(Workbench(task, gpu), results.run)
            names = cell.missing(loaded)
            measure(race, cell, task, candidates[task], {name: loaded[name] for name in names}, results)
        finally:
            race = None
            results.write()
        print(f"{cell.workload} page {cell.page_size}: {time.monotonic() - began:.1f} s", file=sys.stderr)
        free(gpu)
    results.write()
    return results


def facts_of(peer: Peer, found: Loaded | str) -> dict[str, Any]:
    """The entry of a peer in the file."""
    is_there = isinstance(found, Loaded)
    return {"given": peer.given, "version": found.version if is_there else None, "missing": None if is_there else found}


def free(gpu: Gpu) -> None:
    """Free the memory of a workload before the next one."""
    gc.collect()
    if not gpu.is_interpreter:
        import torch

        torch.cuda.empty_cache()


def stop(signum: int, frame: FrameType | None) -> NoReturn:
    """Exit as after an error, so that no contender is recorded as failed."""
    sys.exit(128 + signum)


def main(options: argparse.Namespace) -> None:
    """Measure or read results, print the tables and draw the plot."""
    signal.signal(signal.SIGTERM, stop)
    lost = ""
    try:
        results = Results(options.source) if options.source else run(options)
    except DeviceLostError as error:
        # Results so far are written. The next process continues without the contender at fault.
        lost, results = str(error), Results(options.out)
    show(results)
    if options.plot:
        try:
            plot(results, options.plot)
        except ImportError as error:
            print(f"no plot: {error}; `--from` and `--plot` draw it elsewhere", file=sys.stderr)
    if lost:
        sys.exit(f"{lost}; run the same command to continue without it")


if __name__ == "__main__":
    main(parse())
