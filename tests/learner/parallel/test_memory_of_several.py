"""One of two real processes runs out of memory: all end, and those that are started next make smaller micro-batches."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rollstream.learner.model.policy import PolicyModel, published_sha256
from rollstream.learner.parallel.process_ranks import END, ProcessRanks, joined
from rollstream.learner.reading.members import check_members, fetch_records
from rollstream.learner.service import follow
from rollstream.learner.trainer import JobTrainer
from rollstream.schemas.algorithms import GrpoSettings
from rollstream.schemas.events import BatchPlanned, JobSubmitted, TrajectoryAssembled
from rollstream.schemas.permissions import Permissions
from rollstream.schemas.settings import ModelSettings
from tests.learner.conftest import Lab
from tests.rigs.services.process_group import together

pytestmark = pytest.mark.slow
GIVEN, LIMIT, VERSIONS = 256, 40, 2
Recorded = list[list[int] | None]
"""Tokens that each version was trained with before; None: it was not."""


def run_out_of_memory() -> None:
    """Run out of memory, in this process, with a micro-batch of several rows and more than LIMIT tokens."""
    plain = PolicyModel.completion_terms

    def completion_terms(self: PolicyModel, batch: Any, **options: Any) -> Any:
        if batch.num_computed > LIMIT and len(batch.lengths) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return plain(self, batch, **options)

    PolicyModel.completion_terms = completion_terms


async def recorded_batches(lab: Lab) -> tuple[JobSubmitted, list[tuple[BatchPlanned, list[TrajectoryAssembled]]]]:
    algorithm = GrpoSettings(max_tokens_per_micro_batch=GIVEN)
    model = ModelSettings(path=str(lab.model), device="cpu")
    job = await lab.submit(num_versions=VERSIONS, algorithm=algorithm, model=model)
    planned = await lab.plan(job, VERSIONS)
    return job, [(one, check_members(one, await fetch_records(lab.log, one))) for one in planned]


def train(folder: Path, model: Path, ranks: ProcessRanks, recorded: Recorded) -> None:
    lab = Lab(folder, model)
    job, batches = asyncio.run(recorded_batches(lab))
    budget = folder / "micro_batch_tokens.json"
    trainer = JobTrainer(job, threads=1, permissions=lab.permissions, ranks=ranks, budget=budget)
    found: list[dict[str, Any]] = []
    for (planned, trajectories), known in zip(batches, recorded, strict=True):
        result = trainer.train(planned, trajectories, micro_batch_tokens=known)
        found.append({"passes": result.micro_batch_tokens, "sha256": published_sha256(trainer.model)})
    (folder / "found.json").write_text(json.dumps(found))


def work(folder: Path, model: Path, recorded: Recorded, *lacking: int) -> None:
    """One of the processes; `lacking`: ranks without memory."""
    with joined() as ranks:
        if ranks.index in lacking:
            run_out_of_memory()
        if ranks.index:
            follow(ranks, threads=1, permitted=lambda _: Permissions.of([f"model:{model}"], {}))
            return
        train(folder, model, ranks, recorded)
        ranks.send(END)


def trained(folder: Path, model: Path, recorded: Recorded, *lacking: int) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    together(2, work, folder, model, recorded, *lacking)
    return json.loads((folder / "found.json").read_text())


def test_a_process_without_memory_halves_the_micro_batches_of_all_in_the_next_start(
    tmp_path: Path, tiny_model: Path
) -> None:
    folder = tmp_path / "job"
    new: Recorded = [None] * VERSIONS
    starts = 0
    while True:
        try:
            halved = trained(folder, tiny_model, new, 1)
            break
        except AssertionError:
            starts += 1
            assert starts < 4
    kept = json.loads((folder / "micro_batch_tokens.json").read_text())
    assert kept["tokens"] == GIVEN >> starts < GIVEN
    assert all(set(one["passes"]) == {kept["tokens"]} for one in halved)
    again = trained(tmp_path / "again", tiny_model, [one["passes"] for one in halved])
    assert again == halved
    undisturbed = trained(tmp_path / "undisturbed", tiny_model, new)
    assert all(one["passes"] == [] for one in undisturbed)
    assert undisturbed[0]["sha256"] != halved[0]["sha256"]
    assert trained(folder, tiny_model, [[], []]) == undisturbed
