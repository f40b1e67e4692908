"""Learner tokens per second and peak memory of a step, with logits of all tokens and of a chunk at a time, interleaved.

    python benchmarks/bench_learner.py --repeats 3 --output benchmarks/results/bench_learner.json

One GRPO step (forward, loss, backward, optimizer) on groups of 8 over one prompt, each pass in a process of
its own. `head` is the head alone, on hidden states made in place: its peak is in units of tokens x vocabulary x 4
bytes, above what the process held before. Memory is the process's resident peak.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollstream.learner.algorithms.base import BatchView, Member, Row
from rollstream.learner.algorithms.builtin.grpo import Grpo
from rollstream.learner.model.logprobs import Head, selected_logprobs
from rollstream.learner.model.optimizer import make_optimizer
from rollstream.learner.model.policy import PolicyModel, make_deterministic
from rollstream.learner.model.step import train_batch
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.schemas.settings import JobSettings, ModelSettings

SIZES = {"0.1M": {}, "13M": {"hidden_size": 384, "num_layers": 6, "intermediate_size": 1536}}
MODES = ("logits", "selected")
HEAD = {"tokens": 2048, "vocabulary": 32000, "width": 256}


def batch_of(groups: int, prompt: int, answer: int) -> BatchView:
    """Groups of 8 with a common prompt; answers of up to `answer` tokens."""
    rng = random.Random(1)
    rows, members = [], []
    for group in range(groups):
        shared = [rng.randrange(6, 90) for _ in range(prompt)]
        for _ in range(8):
            ids = shared + [rng.randrange(6, 90) for _ in range(rng.randint(answer // 2, answer))]
            mask = np.arange(len(ids)) >= prompt
            rows.append(Row(np.asarray(ids, np.int32), mask, np.where(mask, -4.5, 0).astype(np.float32), len(members)))
            members.append(Member(f"g{group}", "agent", reward=rng.random()))
    return BatchView(rows, members)


def step_pass(folder: str, mode: str) -> dict[str, float]:
    """Three steps on one batch, the first one not counted."""
    job = JobSettings(kind="rl", model=ModelSettings(path=folder, device="cpu"), revision=3)
    model = PolicyModel(job.model, seed=0)
    model.use_dropout(False)
    model.selects_logprobs &= mode == "selected"
    optimizer = make_optimizer(model.trainable(), job.optimizer)
    batch, spent, num_tokens = batch_of(8, 64, 64), [], 0
    for index in range(3):
        begun = time.process_time()
        num_tokens = train_batch(model, optimizer, batch, Grpo(), job, index=index, seed=index).num_tokens
        spent.append(time.process_time() - begun)
    return {"tokens_per_cpu_s": num_tokens / statistics.mean(spent[1:]), "peak_mib": peak_bytes() / 2**20}


def head_pass(mode: str) -> dict[str, float]:
    """Forward and backward of the head alone."""
    torch.manual_seed(0)
    hidden = torch.randn(HEAD["tokens"], HEAD["width"], requires_grad=True)
    weight = torch.randn(HEAD["vocabulary"], HEAD["width"], requires_grad=True)
    targets = torch.randint(HEAD["vocabulary"], (HEAD["tokens"],))
    selected_logprobs(hidden[:2], Head(weight), targets[:2], 1.0)[0].sum().backward()  # libraries are loaded
    before, begun = peak_bytes(), time.process_time()
    if mode == "selected":
        one, _ = selected_logprobs(hidden, Head(weight), targets, 1.0)
    else:
        table = torch.log_softmax((hidden @ weight.T).float() / 1.0, dim=-1)
        one = -torch.nn.functional.nll_loss(table, targets, reduction="none")
        with torch.no_grad():
            _ = -(table.exp() * table).sum(dim=-1)
    one.sum().backward()
    unit = HEAD["tokens"] * HEAD["vocabulary"] * 4
    return {"peak_units": (peak_bytes() - before) / unit, "cpu_s": time.process_time() - begun}


def peak_bytes() -> int:
    """Most that this process has been resident with."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Interleave the modes, print and keep the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--one", nargs=2, metavar=("FOLDER", "MODE"), help="one pass, as JSON; FOLDER `head`: the head")
    args = parser.parse_args()
    if args.one:
        make_deterministic(1)
        folder, mode = args.one
        print(json.dumps(head_pass(mode) if folder == "head" else step_pass(folder, mode)))
        return
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as kept:
        folders = {name: str(make_tiny_model(Path(kept) / name, **shape)) for name, shape in SIZES.items()}
        for _ in range(args.repeats):
            for name, folder in {**folders, "head": "head"}.items():
                for mode in MODES:
                    command = [sys.executable, __file__, "--one", folder, mode]
                    done = subprocess.run(command, check=True, capture_output=True, text=True)
                    found.setdefault(f"{name}, {mode}", []).append(json.loads(done.stdout))
    report: dict[str, Any] = {"cores": os.cpu_count(), "threads": 1, "repeats": args.repeats, "head": HEAD}
    for name, passes in found.items():
        report[name] = {key: round(statistics.median(one[key] for one in passes), 3) for key in passes[0]}
    text = json.dumps(report, indent=2)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
