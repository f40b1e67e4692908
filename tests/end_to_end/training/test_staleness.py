"""Rollouts run ahead of a slow learner as far as the bound allows, and what comes later still is rejected."""

import time
from typing import Any

import psutil
import pytest

from tests.end_to_end.killing import child, wait_versions

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

MAX_STALENESS = 2
GAME = '''
import asyncio

from rollstream.producers.rollout.session import Session


async def digits(session: Session) -> None:
    """The reward is the share of digits in what was said; now and then one takes long."""
    if session.rng.random() < 0.1:
        await asyncio.sleep(1.5)
    reply = await session.chat([{"role": "user", "content": "?"}])
    await session.reward(sum(character.isdigit() for character in reply.text) / max(1, len(reply.text)))
'''


def test_a_slow_learner_lets_staleness_reach_its_bound_and_never_pass_it(project: Any) -> None:
    (project.folder / "game.py").write_text(GAME)
    configuration = project.configuration(num_epochs=6) | {"workflow": "python:game.digits"}
    learner = configuration["trainer_adapters"]["learner"]
    learner |= {"max_staleness": MAX_STALENESS, "tasks_per_epoch": 12, "batches_per_epoch": 3}
    config = project.write(configuration)
    command = project.start("finetune", "--config_file", str(config))
    try:
        wait_versions(project, command, 2)
        slow = child(command, ("learner-1",))
        assert slow is not None
        while command.poll() is None:
            _hold(slow, 0.6)
            time.sleep(0.2)
        assert command.wait(60) == 0, project.output() + project.logs()
    finally:
        command.kill()
        command.wait()
    found = project.rows("SELECT max(staleness) AS most FROM batch_members")
    assert found[0]["most"] == MAX_STALENESS
    rejected = project.rows("SELECT count(*) AS n FROM rejections WHERE cause = 'stale'")
    assert rejected[0]["n"] > 0
    outcomes = project.rows("SELECT count(*) AS n FROM outcomes WHERE cause = 'stale'")
    assert outcomes[0]["n"] == rejected[0]["n"]


def _hold(process: psutil.Process, seconds: float) -> None:
    """Keep a process from running for a while."""
    try:
        process.suspend()
        time.sleep(seconds)
        process.resume()
    except psutil.NoSuchProcess:
        time.sleep(seconds)
