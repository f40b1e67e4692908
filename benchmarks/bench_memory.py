"""Peak memory and CPU seconds of a training step with fewer tokens per micro-batch and with checkpointing, beside TRL.

    .venv-bench/bin/python -m benchmarks.bench_memory --sizes 20M --output benchmarks/results/bench_memory.json

The cases of `bench_trl.py`, each pass in a process of its own on one thread. A setting is the most tokens of a
micro-batch, or TRL's rows of one, and `+gc` for gradient checkpointing. Peaks are above what the process held before
its first step: gradients, optimizer state and activations count, weights and libraries do not.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from benchmarks import bench_trl
from rollstream.learner.model.policy import make_deterministic
from rollstream.learner.tiny_model import make_tiny_model

OURS = ("2048", "1024", "512", "256", "2048+gc", "1024+gc", "512+gc", "256+gc")
TRL = ("4", "16", "4+gc")
CHECKPOINTED = "+gc"


def one_pass(system: str, folder: str, size: str, kind: str, lengths: str, setting: str) -> bench_trl.Costs:
    """One setting of one system on one case, in this process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    texts = bench_trl.texts_of(bench_trl.GROUPS[size], lengths)
    number, checkpointed = int(setting.removesuffix(CHECKPOINTED)), setting.endswith(CHECKPOINTED)
    if system == "trl":
        return bench_trl.trl(folder, kind, texts, number, checkpointed=checkpointed)
    make_deterministic(1)
    return bench_trl.ours(folder, kind, texts, max_tokens=number, checkpointed=checkpointed)


def in_process(*case: str) -> bench_trl.Costs:
    """One pass in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bench_memory", "--steps", str(bench_trl.STEPS), "--one", *case]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return {name: round(value, 3) for name, value in json.loads(done.stdout.splitlines()[-1]).items()}


def main() -> None:
    """One pass of every setting, printed and kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=list(bench_trl.SIZES), choices=bench_trl.SIZES)
    parser.add_argument("--kinds", nargs="*", default=list(bench_trl.KINDS), choices=bench_trl.KINDS)
    parser.add_argument("--ours", nargs="*", default=list(OURS))
    parser.add_argument("--trl", nargs="*", default=list(TRL))
    parser.add_argument("--steps", type=int, default=bench_trl.STEPS, help="after the first one, which is not counted")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--one", nargs=6, metavar=("SYSTEM", "FOLDER", "SIZE", "KIND", "LENGTHS", "SETTING"))
    args = parser.parse_args()
    bench_trl.STEPS = args.steps
    if args.one:
        print(json.dumps(one_pass(*args.one)))
        return
    settings = [("rollstream", one) for one in args.ours] + [("trl", one) for one in args.trl]
    cases: dict[str, dict[str, bench_trl.Costs]] = {}
    report = {"cores": os.cpu_count(), "threads": 1, "versions": bench_trl.versions(), "cases": cases}
    with tempfile.TemporaryDirectory() as kept:
        for size in args.sizes:
            folder = str(make_tiny_model(Path(kept) / size, max_length=1024, **bench_trl.SIZES[size]))
            for kind, lengths in ((kind, lengths) for kind in args.kinds for lengths in bench_trl.LENGTHS):
                for system, setting in settings:
                    costs = in_process(system, folder, size, kind, lengths, setting)
                    cases.setdefault(f"{size} {kind} {lengths}", {})[f"{system} {setting}"] = costs
                    print(size, kind, lengths, system, setting, costs, file=sys.stderr, flush=True)
                if args.output:
                    args.output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
