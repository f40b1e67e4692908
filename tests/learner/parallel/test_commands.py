"""The commands of rank 0: each is about a job, and the others have trainers of those that rank 0 has."""

import asyncio
import gc
from pathlib import Path
from typing import Any

from rollstream.learner.model.policy import published_sha256
from rollstream.learner.model.ranks import Ranks
from rollstream.learner.parallel.process_ranks import DROP, END, LOAD, Command
from rollstream.learner.scoring.scored_batch import encoded
from rollstream.learner.scoring.scores import NONE
from rollstream.learner.service import follow
from rollstream.learner.trainer import JobTrainer
from rollstream.schemas.events import JobFailed, JobSubmitted, JobSucceeded, TrajectoryAssembled
from tests.learner.conftest import Lab


class RecordedRanks(Ranks):
    """Gives recorded commands, and looks at the models that this process has before each."""

    def __init__(self, commands: list[Command]) -> None:
        self._commands = commands
        self.seen: list[set[str]] = []

    def receive(self) -> Command:
        gc.collect()
        trainers = [one for one in gc.get_objects() if isinstance(one, JobTrainer)]
        self.seen.append({published_sha256(one.model) for one in trainers})
        return self._commands.pop(0)


async def submitted(lab: Lab, name: str, seed: int) -> JobSubmitted:
    """A job of a model group of its own."""
    return await lab.submit(name, model_group=f"run-1/{name}", seed=seed)


def test_a_manifest_is_trained_by_the_model_of_its_own_job(lab: Any) -> None:
    """Both jobs have been loaded, the other one last."""

    async def recorded() -> tuple[list[JobSubmitted], bytes, str]:
        jobs = [await submitted(lab, name, 0) for name in ("provers", "verifiers")]
        (planned,) = await lab.plan(jobs[0], 1)
        assembled = {one.trajectory_id: one for one in await lab.events("trajectories", TrajectoryAssembled)}
        trajectories = [assembled[member.trajectory_id] for member in planned.members]
        alone = JobTrainer(jobs[0], threads=1, permissions=lab.permissions)
        alone.train(planned, trajectories)
        data = encoded(planned, trajectories, NONE, {"tokens": 2048, "recorded": None, "restarts": True, "kept": None})
        return jobs, data, published_sha256(alone.model)

    (first, other), data, trained = asyncio.run(recorded())
    commands = [Command(LOAD, job.job_id, job.model_dump_json().encode()) for job in (first, other)]
    commands += [Command("train", first.job_id, data), Command(DROP, first.job_id, b""), Command(END, "", b"")]
    ranks: Any = RecordedRanks(commands)
    follow(ranks, threads=1, permitted=lambda _: lab.permissions)
    (base,) = ranks.seen[1]
    assert ranks.seen == [set(), {base}, {base}, {base, trained}, {base}]


class ListedRanks(Ranks):
    """Lists the jobs that others are to let go of."""

    def __init__(self, found: list[str], job_id: str = "") -> None:
        self._found = found
        self._job_id = job_id

    def of_job(self, job_id: str) -> "ListedRanks":
        return ListedRanks(self._found, job_id)

    def together(self, command: str, data: bytes = b"") -> Any:
        if command == DROP:
            self._found.append(self._job_id)
        return super().together(command, data)


def test_every_job_that_ends_is_let_go_of_once_by_all_processes(lab: Any, tmp_path: Path) -> None:
    async def scenario() -> list[str]:
        dropped: list[str] = []
        good = await submitted(lab, "good", 0)
        await lab.plan(good, 3)
        missing = lab.settings(model=lab.settings().model.model_copy(update={"path": str(tmp_path / "none")}))
        bad = good.model_copy(update={"job_id": "run-1/bad", "model_group": "run-1/bad", "settings": missing})
        await lab.log.send(bad)
        worker = lab.worker(ranks=ListedRanks(dropped))

        async def over() -> bool:
            return await lab.has(JobSucceeded)() and await lab.has(JobFailed)() and len(dropped) > 1

        await lab.work(over, worker)
        return dropped

    assert sorted(asyncio.run(scenario())) == ["run-1/bad", "run-1/good"]
