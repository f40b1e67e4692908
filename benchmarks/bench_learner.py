"""Learner tokens per second and peak memory of a step, with logits of all tokens and of a chunk at a time, interleaved.

    python benchmarks/bench_learner.py --repeats 3 --output benchmarks/results/bench_learner.json

One GRPO step (forward, loss, backward, optimizer) on groups of 8 over one prompt, each pass in a process of
its own. `head` is the head alone, on hidden states made in place: its peak is in units of tokens x vocabulary x 4
bytes, above what the process held before. Memory is the process's resident peak. `--head` measures the head alone:

    python benchmarks/bench_learner.py --head --output benchmarks/results/bench_head.json

    python benchmarks/bench_learner.py --phases 20M --output benchmarks/results/bench_phases.json

Instead, seconds of each phase of a version, as StepTrained has them: a job of a learner's worker on a log in memory,
its checkpoints and artifacts in a folder.
"""

import argparse
import asyncio
import contextlib
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
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.utils import logging as transformers_logging

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.eventlog.reading import read_to_end
from rollstream.learner.algorithms.base import BatchView, Member, Row
from rollstream.learner.algorithms.builtin.grpo import Grpo
from rollstream.learner.model.logprobs import Head, selected_logprobs
from rollstream.learner.model.optimizer import make_optimizer
from rollstream.learner.model.policy import PolicyModel, make_deterministic
from rollstream.learner.model.step import train_batch
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.learner.worker import Worker
from rollstream.schemas import tokens
from rollstream.schemas.base import Locator
from rollstream.schemas.events import BatchPlanned, JobSubmitted, StepTrained, TrajectoryAssembled
from rollstream.schemas.events.rollouts import Completion, TokenSequence
from rollstream.schemas.events.training import BatchMember
from rollstream.schemas.permissions import Permissions
from rollstream.schemas.revisions import NEWEST_REVISION
from rollstream.schemas.settings import JobSettings, ModelSettings

SIZES = {"0.1M": {}, "13M": {"hidden_size": 384, "num_layers": 6, "intermediate_size": 1536}}
PHASES = {
    "20M": {"hidden_size": 384, "num_layers": 10, "intermediate_size": 1408},
    "0.5B": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": True,
    },
}
"""Shapes of tiny models; 0.5B: the configuration of Qwen2.5-0.5B, with random weights and without a tokenizer."""
VERSIONS = 5
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
    job = JobSettings(kind="rl", model=ModelSettings(path=folder, device="cpu"), revision=NEWEST_REVISION)
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


def model_of(size: str, folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> str:
    """A folder with a model of this size, whose weights are drawn on a device: on a GPU it takes seconds."""
    shape = PHASES[size]
    if "vocab_size" not in shape:
        return str(make_tiny_model(folder, **shape))
    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**shape), dtype=dtype)
    model.save_pretrained(folder)
    return str(folder)


def model_with_tokenizer(size: str, folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Path:
    """A folder with a model of this size and the tiny model's tokenizer."""
    model_of(size, folder, dtype, device)
    with tempfile.TemporaryDirectory() as made:
        tiny = make_tiny_model(Path(made) / "tiny", max_length=32768)
        for file in (*tiny.glob("*token*"), *tiny.glob("*.jinja")):
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


async def phases_of(
    folder: str, size: str, checkpoint_every: int, versions: int, *, device: str = "cpu", is_ahead: bool = False
) -> dict[str, float]:
    """Medians over a job's versions without the first of several: 2 groups of 8, prompts and answers of 64 tokens.

    `is_ahead`: all manifests are planned at the beginning, so each version but the last, which then does not count, is
    written while the next batch is trained. Otherwise each is planned when the version before it is published. `busy`:
    sum of all phases but `wait`.
    """
    path = model_of(size, Path(folder) / "model", device=device)
    log = MemoryLog(num_partitions=1)
    run: dict[str, Any] = {"run_id": "bench", "time_ms": 1}
    job: dict[str, Any] = {"job_id": "bench/rl", "model_group": "bench/policy"}
    model = ModelSettings(path=path, device=device)
    how: dict[str, Any] = {"checkpoint_every": checkpoint_every, "revision": NEWEST_REVISION}
    settings = JobSettings(kind="rl", model=model, num_versions=versions, **how)
    await log.send(JobSubmitted(**run, **job, base_version=0, settings=settings))
    previous, num_planned = codec.EMPTY_SHA256, 0
    permissions = Permissions.of([f"model:{path}"], {})
    artifacts, kept = ArtifactStore(f"{folder}/artifacts"), Path(folder) / "checkpoints"
    worker = Worker(log, artifacts, name="bench", checkpoints=kept, threads=1, permissions=permissions)
    running, found = asyncio.create_task(worker.run()), list[StepTrained]()
    while len(found) < versions and not running.done():
        while num_planned < (versions if is_ahead else len(found) + 1):
            planned = await manifest(log, {**run, **job}, num_planned, previous)
            previous, num_planned = codec.content_digest(planned), num_planned + 1
            await log.send(planned)
        await asyncio.sleep(0.1)
        records = [codec.decode(one).event async for one in read_to_end(log, "weights", {0: 0})]
        found = [event for event in records if isinstance(event, StepTrained)]
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    names, counted = sorted({name for step in found for name in step.seconds}), found[1 : -1 if is_ahead else None]
    counted = counted or found
    medians = {name: statistics.median(one.seconds.get(name, 0.0) for one in counted) for name in names}
    busy_s = statistics.median(sum(one.seconds.values()) - one.seconds["wait"] for one in counted)
    return {name: round(value, 3) for name, value in {**medians, "busy": busy_s}.items()}


async def manifest(log: MemoryLog, common: dict[str, Any], index: int, previous: str) -> BatchPlanned:
    """A manifest of trajectories that are sent first."""
    batch = batch_of(2, 64, 64)
    members, locators = list[BatchMember](), list[Locator]()
    for number, (row, member) in enumerate(zip(batch.rows, batch.members, strict=True)):
        start = int(row.mask.argmax())
        completion = Completion(start=start, length=len(row.token_ids) - start, step_index=0)
        sequence = TokenSequence(
            token_ids=tokens.encode_ids(row.token_ids.tolist()),
            logprobs=tokens.encode_floats(row.logprobs[start:].tolist()),
            completions=(completion,),
        )
        group = f"bench/rl/e{index:05d}/t{number // 8:05d}"
        identity: dict[str, Any] = {"group_id": group, "rollout_id": f"{group}/m{number % 8}/a0"}
        identity["trajectory_id"] = f"{identity['rollout_id']}/agent"
        trajectory = TrajectoryAssembled(
            **common, **identity, agent="agent", member=number % 8, attempt=0, example_id="x", epoch=index,
            reward=member.reward, sequences=(sequence,), num_steps=1, steps_digest="0" * 64,
        )  # fmt: skip
        position = await log.send(trajectory)
        locators.append(Locator(partition=position.partition, offset=position.offset))
        digest = codec.content_digest(trajectory)
        members.append(BatchMember(**identity, digest=digest, reward=member.reward, staleness=0))
    return BatchPlanned(
        **common, batch_id=f"bench/rl/b{index:05d}", epoch=index, index=index, trains_at_version=index,
        yields_version=index + 1, members=tuple(members), seed=index, curriculum_sha256="0" * 64,
        previous_sha256=previous, locators=tuple(locators),
    )  # fmt: skip


def measure_phases(size: str, versions: int, output: Path | None) -> None:
    """Print and keep the phases with a checkpoint for each version, beside training or not, and for the last alone."""
    report: dict[str, Any] = {"cores": os.cpu_count(), "threads": 1, "size": size, "versions": versions}
    for every, is_ahead in dict.fromkeys([(1, False), (1, True), (versions, False)]):
        name = f"checkpoint_every {every}" + (", planned ahead" if is_ahead else "")
        with tempfile.TemporaryDirectory() as folder:
            report[name] = asyncio.run(phases_of(folder, size, every, versions, is_ahead=is_ahead))
    report["peak_gib"] = round(peak_bytes() / 2**30, 1)
    text = json.dumps(report, indent=2)
    print(text)
    if output:
        output.write_text(text + "\n")


def peak_bytes() -> int:
    """Most that this process has been resident with."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Interleave the modes, print and keep the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--head", action="store_true", help="measure the head alone")
    parser.add_argument("--phases", choices=PHASES, help="measure the phases of a version of this size")
    parser.add_argument("--versions", type=int, default=VERSIONS, help="of a job with --phases")
    parser.add_argument("--one", nargs=2, metavar=("FOLDER", "MODE"), help="one pass, as JSON; FOLDER `head`: the head")
    args = parser.parse_args()
    if args.one:
        make_deterministic(1)
        folder, mode = args.one
        print(json.dumps(head_pass(mode) if folder == "head" else step_pass(folder, mode)))
        return
    if args.phases:
        measure_phases(args.phases, args.versions, args.output)
        return
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as kept:
        sizes = {} if args.head else SIZES
        folders = {name: str(make_tiny_model(Path(kept) / name, **shape)) for name, shape in sizes.items()}
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
