"""Rollouts played with the scripted engine into a list, and the rule that makes an attempt complete."""

import asyncio
import itertools
import os

import pytest

from rollstream.eventlog import codec
from rollstream.producers.attempt import run_rollout
from rollstream.producers.engines.scripted import ScriptedEngine
from rollstream.schemas import ids
from rollstream.schemas.events import RewardRecorded, RolloutEnded, StepRecorded, TaskRequested, WeightsPublished
from rollstream.schemas.permissions import Permissions, named_by
from rollstream.schemas.settings import ArtifactRef, RolloutSettings

GROUP = "run-1/policy"


def task_of(environment="guess_number", *, inputs=None, seed=11, index=0, **settings):
    settings = {"agents": {"agent": GROUP}, "max_turns": 6} | settings
    return TaskRequested(
        run_id="run-1",
        time_ms=1,
        group_id=ids.group_id("run-1", "rl", 0, index),
        example_id="x0",
        job_id="run-1/rl",
        epoch=0,
        index=index,
        inputs=inputs or {},
        num_rollouts=4,
        minimum=2,
        seed=seed,
        min_version=0,
        settings=RolloutSettings(environment=environment, **settings),
    )


def published(version=0, model_group=GROUP):
    return WeightsPublished(
        run_id="run-1",
        time_ms=1,
        model_group=model_group,
        job_id="run-1/rl",
        batch_id=None,
        version=version,
        parent=None if version == 0 else version - 1,
        term=1,
        weights_sha256="0" * 64,
        weights_format="full",
        base_model="none",
        artifact=ArtifactRef(uri="memory:none", sha256="0" * 64, size_bytes=0),
    )


async def scripted(tmp_path, script=None, *, groups=(GROUP,), versions=(0,), **options):
    engine = ScriptedEngine(**({"script": script} if script else {}), **options)
    for group, version in itertools.product(groups, versions):
        await engine.load(published(version, group), tmp_path)
    return engine


def answers(*texts):
    """A script that gives these answers in turn, whatever is asked."""
    turns = itertools.cycle(texts)
    return lambda prompt, rng, version: (next(turns), -0.5)


def output_of(step):
    assert step.data is not None
    return step.data["output"]


class Played:
    """Events of one attempt."""

    def __init__(self, events):
        self.events = events
        self.steps = [event for event in events if isinstance(event, StepRecorded)]
        self.rewards = [event for event in events if isinstance(event, RewardRecorded)]
        self.last = events[-1]

    def texts(self):
        return [output_of(step) for step in self.steps if step.llm]

    def contents(self):
        """All but times."""
        return [(event.event_id, codec.content_digest(event)) for event in self.events]

    def assert_complete(self):
        ended = self.last
        assert isinstance(ended, RolloutEnded), ended
        steps = {step.step_index: codec.content_digest(step) for step in self.steps}
        rewards = {reward.reward_index: codec.content_digest(reward) for reward in self.rewards}
        assert sorted(steps) == list(range(ended.num_steps))
        assert sorted(rewards) == list(range(ended.num_rewards))
        in_order = [steps[index] for index in sorted(steps)] + [rewards[index] for index in sorted(rewards)]
        assert codec.chain(ended.rollout_id, in_order) == ended.digest


@pytest.fixture
def play(tmp_path):
    """Play one attempt: `play(task, script=..., member=0, attempt=0)`."""

    def start(task, script=None, *, member=0, attempt=0, engine=None, versions=(0,), artifacts=None):
        events = []

        async def emit(event):
            # What readers get is what was encoded, so play with that: later changes of a list must not matter.
            encoded = codec.encode(event)
            events.append(codec.parse(encoded.topic, encoded.value)[0])

        async def run():
            groups = tuple(task.settings.agents.values())
            used = engine or await scripted(tmp_path, script, groups=groups, versions=versions)
            counter = itertools.count(1000)
            await run_rollout(
                task,
                member=member,
                attempt=attempt,
                engine=used,
                emit=emit,
                clock=lambda: next(counter),
                permissions=Permissions.of(named_by(task.settings), os.environ),
                artifacts=artifacts,
            )

        asyncio.run(run())
        return Played(events)

    return start


# ---- the transformers engine; torch is imported only for tests that ask for it ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from rollstream.learner.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", seed=0, num_layers=2)


@pytest.fixture(scope="module")
def base(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture
def versions(folder, tmp_path):
    """`versions(n)`: file of version n; each is the base with other noise on it, all far from uniform."""
    from safetensors.torch import save_file

    from tests.producers.engines.engine_rig import noised

    def make(version):
        path = tmp_path / f"v{version}.safetensors"
        if not path.exists():
            save_file(noised(folder, version), path)
        return path

    return make
