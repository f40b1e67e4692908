"""SIGKILLs a real learner in the middle of SFT, DPO and RL jobs of a shared model group, on a real broker.

    python -m tests.chaos.kill_jobs [--kills 20] [--seed 0] [--kinds sft dpo rl]

Half of the kills are at a failpoint of the learner, half come from outside after a drawn number of its records. Every
job must end once, with the weights of the same jobs on a log in memory that nothing disturbed. Exits 1 otherwise.
Learners are forked from a process that has imported their libraries, so that a start costs no import.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from rollstream.eventlog import failpoints
from rollstream.eventlog.broker.broker import EmbeddedBroker
from rollstream.eventlog.broker.credentials import environment
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.harness.cli.main import main as command_line
from rollstream.learner.shared_model_group import SharedModelGroup
from rollstream.schemas.events import JobCancelled, JobFailed, JobSucceeded, StepTrained, WeightsPublished
from tests.rigs.runs.group_rig import GroupRig, chat_rollout, make_scripted_model, sampled

KINDS = ("sft", "dpo", "rl")
POINTS = (
    "learner/after-train-before-checkpoint",
    "learner/between-checkpoint-and-publish",
    "learner/between-step-and-weights",
)
NUM_VERSIONS = 24
"""Number of versions of each job: one a pass over its examples."""
MAX_RECORDS = 6
"""Maximum records of the learner before a kill from outside."""
PARTITIONS = 2
TIMEOUT_S = 120.0
CONTEXT = multiprocessing.get_context("forkserver")


def serve(env: dict[str, str], settings: Path, output: Path) -> None:
    """`rollstream serve learner` in a forked process."""
    os.environ |= env
    failpoints._armed = failpoints.from_environment(env)  # the module was imported before the fork
    number = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(number, 1)
    os.dup2(number, 2)
    sys.argv = ["rollstream", "serve", "learner", "--name", "learner-1", "--settings", str(settings)]
    command_line()


@dataclass
class Learner:
    """The learner's process: started, killed, started again."""

    folder: Path
    env: dict[str, str]
    settings: Path
    process: ForkServerProcess | None = None

    @property
    def output(self) -> Path:
        return self.folder / "learner.log"

    def start(self, failpoint: str = "") -> None:
        """Start it, armed with a failpoint."""
        env = self.env | ({failpoints.VARIABLE: f"{failpoint}:1"} if failpoint else {})
        self.process = CONTEXT.Process(target=serve, args=(env, self.settings, self.output), daemon=True)
        self.process.start()

    def kill(self) -> None:
        """SIGKILL, if it runs."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None

    def check(self) -> None:
        """Raises RuntimeError if it ended otherwise than by SIGKILL."""
        if self.process is not None and self.process.exitcode not in (None, -signal.SIGKILL):
            raise RuntimeError(f"the learner ended with {self.process.exitcode}:\n{self.output.read_text()[-2000:]}")


@dataclass
class Outcome:
    """Result of the kills of one kind of job."""

    kind: str
    kills: Counter[str] = field(default_factory=Counter[str])
    num_jobs: int = 0
    num_versions: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


async def create(group: SharedModelGroup, kind: str, number: int) -> str:
    """Job `number` of a kind; its examples depend on both alone."""
    first, second = str(number % 10), str((number + 5) % 10)
    if kind == "sft":
        return await group.create_supervised_fine_tune_job(
            {
                "prover": [chat_rollout(first, "2"), chat_rollout("3")],
                "verifier": [chat_rollout("4"), chat_rollout(second)],
            }
        )
    if kind == "dpo":
        chosen, rejected = [chat_rollout(first), chat_rollout("2")], [chat_rollout(second), chat_rollout("4")]
        return await group.create_dpo_fine_tune_job({"prover": chosen}, {"prover": rejected})
    groups = [[sampled(8, 9 + number % 5, reward=1.0), sampled(10, 11, reward=0.0)] for _ in range(2)]
    return await group.create_rl_fine_tune_job({"verifier": groups})


async def opened(rig: GroupRig, kind: str) -> SharedModelGroup:
    """The model group of a kind of job, in a run of its own."""
    return await rig.open(run_id=f"run-{kind}", num_epochs=NUM_VERSIONS, max_staleness=NUM_VERSIONS)


async def num_records(rig: GroupRig) -> int:
    """Number of records that the learner has written so far, by the logs' ends."""
    ends = [await rig.log.end_offsets(topic) for topic in ("jobs", "weights")]
    return sum(sum(one.values()) for one in ends)


async def strike(rig: GroupRig, group: SharedModelGroup, learner: Learner, rng: random.Random) -> str:
    """Kill a fresh learner in the middle of the newest job; how, or nothing if the job was over before."""
    learner.kill()
    point = rng.choice(POINTS) if rng.random() < 0.5 else ""
    wanted = await num_records(rig) + rng.randint(1, MAX_RECORDS)
    learner.start(point)
    assert learner.process is not None
    async with asyncio.timeout(TIMEOUT_S):
        while point or await num_records(rig) < wanted:
            if learner.process.exitcode is not None:
                learner.check()
                break
            if await group.get_fine_tune_job_status() not in ("pending", "running"):
                return ""
            await asyncio.sleep(0.002)
    learner.kill()
    return point or "from outside"


async def disturbed(rig: GroupRig, learner: Learner, kind: str, kills: int, rng: random.Random) -> Outcome:
    """Jobs of a kind, one after the other, until so many kills were done; the last one runs to its end."""
    outcome = Outcome(kind)
    began = time.monotonic()
    async with await opened(rig, kind) as group:
        while outcome.kills.total() < kills:
            job_id = await create(group, kind, outcome.num_jobs)
            outcome.num_jobs += 1
            while outcome.kills.total() < kills:
                how = await strike(rig, group, learner, rng)
                if not how:
                    break
                outcome.kills[how] += 1
                print(f"{kind}: kill {outcome.kills.total()} {how}, {time.monotonic() - began:.0f} s", flush=True)
            learner.kill()
            learner.start()
            status = await group.wait_for_fine_tune_job(timeout=TIMEOUT_S)
            if status != "succeeded":
                outcome.problems.append(f"{job_id} {status}: {await group.get_fine_tune_job_error_repr()}")
            await group.switch_to_next_model()
    learner.kill()
    outcome.seconds = time.monotonic() - began
    return outcome


async def undisturbed(rig: GroupRig, kind: str, num_jobs: int) -> None:
    """The same jobs on a log in memory, with every service in this process."""
    async with rig.services(), await opened(rig, kind) as group:
        for number in range(num_jobs):
            await create(group, kind, number)
            assert await group.wait_for_fine_tune_job(timeout=TIMEOUT_S) == "succeeded", group.jobs
            await group.switch_to_next_model()


async def judge(outcome: Outcome, killed: GroupRig, calm: GroupRig) -> None:
    """Add to the outcome's problems: jobs that did not end once, versions that differ."""
    run_id = f"run-{outcome.kind}"
    ends = [one for one in await killed.events("jobs", JobSucceeded, JobFailed, JobCancelled) if one.run_id == run_id]
    times = Counter(one.job_id for one in ends if isinstance(one, JobSucceeded))
    if len(ends) != outcome.num_jobs or set(times.values()) != {1}:
        outcome.problems.append(f"{outcome.num_jobs} jobs have {len(ends)} ends: {dict(times)}")
    expected, found = await versions(calm, run_id), await versions(killed, run_id)
    outcome.num_versions = len(expected)
    if set(map(len, found.values())) != {1}:
        outcome.problems.append("a version was published with different weights")
    if found != expected:
        outcome.problems.append(f"{len(found)} versions, undisturbed {len(expected)}; their weights differ")
    steps = [one.version for one in await killed.events("weights", StepTrained) if one.run_id == run_id]
    if set(steps) != set(expected) - {0}:
        outcome.problems.append(f"steps of {len(set(steps))} versions, undisturbed of {len(expected) - 1}")


async def versions(rig: GroupRig, run_id: str) -> dict[int, set[str]]:
    """Hashes that each version of a run was published with."""
    found: dict[int, set[str]] = {}
    for event in await rig.events("weights", WeightsPublished):
        if event.run_id == run_id:
            found.setdefault(event.version, set()).add(event.weights_sha256)
    return found


async def run(folder: Path, kinds: Sequence[str], *, kills: int, seed: int) -> list[Outcome]:
    """Do so many kills for each kind of job, and judge what is left."""
    model = make_scripted_model(folder / "model")
    workspace = folder / "workspace"
    workspace.mkdir(mode=0o700)
    broker = EmbeddedBroker(workspace)
    await asyncio.to_thread(broker.start)
    outcomes: list[Outcome] = []
    log = KafkaLog(broker.kafka, client_id="kill-jobs")
    killed = GroupRig(workspace, model, log)
    env = {
        **os.environ,
        **environment(broker.kafka),
        "ROLLSTREAM_ARTIFACT_URI": killed.artifact_uri,
        "ROLLSTREAM_WORKSPACE": str(workspace),
        "ROLLSTREAM_NUM_PARTITIONS": str(PARTITIONS),
    }
    settings = folder / "learner.json"
    settings.write_text(json.dumps({"allow": list(killed.allow), "threads": 1}))
    CONTEXT.set_forkserver_preload(["rollstream.learner.service", "rollstream.harness.services.serving", __name__])
    learner = Learner(folder, env, settings)
    try:
        await log.start()
        await log.ensure_topics(num_partitions=PARTITIONS)
        async with killed.services(learner=False):
            for kind in kinds:
                outcome = await disturbed(killed, learner, kind, kills, random.Random(f"{seed} {kind}"))
                calm = GroupRig(folder / "undisturbed" / kind, model)
                await undisturbed(calm, kind, outcome.num_jobs)
                await judge(outcome, killed, calm)
                outcomes.append(outcome)
    finally:
        learner.kill()
        await log.close()
        await asyncio.to_thread(broker.stop)
    return outcomes


def report(outcomes: Sequence[Outcome]) -> None:
    """Print what came of it."""
    for one in outcomes:
        print(
            f"{one.kind}: {one.kills.total()} kills in {one.seconds:.0f} s, {one.num_jobs} jobs, "
            f"{one.num_versions} versions, {len(one.problems)} problems"
        )
        print("".join(f"  {count:3} {how}\n" for how, count in sorted(one.kills.items())), end="")
        print("".join(f"  PROBLEM {problem}\n" for problem in one.problems), end="")


def main() -> None:
    """Run, report; exits 1 if a job did not end once or its weights differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="for each kind of job")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = asyncio.run(run(Path(folder), arguments.kinds, kills=arguments.kills, seed=arguments.seed))
    report(outcomes)
    sys.exit(any(one.problems for one in outcomes))


if __name__ == "__main__":
    main()
