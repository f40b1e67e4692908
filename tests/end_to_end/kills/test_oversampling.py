"""Producers are killed with SIGKILL in a run with oversampling: every group has the rollouts that ended first."""

import itertools
import json
import re
import time
from operator import itemgetter
from typing import Any

import pytest

from tests.end_to_end.killing import child
from tests.rigs.services.forked_commands import Command

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

EPOCHS, TASKS, ENOUGH, MORE = 12, 4, 4, 2
GAME = """
import asyncio

import game


async def slow_digits(session):
    await game.digits(session)
    await asyncio.sleep(session.rng.random())
"""
ENDED = """
SELECT f.group_id, f.rollout_id, s.member, f.log_offset FROM log.rollout_finished f
JOIN log.rollout_started s USING (rollout_id) JOIN outcomes o USING (rollout_id)
WHERE f.state = 'ended' AND o.outcome <> 'rejected' ORDER BY f.group_id, f.log_offset
"""


def first_enough(project: Any) -> dict[str, tuple[list[str], int]]:
    """The rollouts of the members that ended first, and the offset of the record that closes their group, by group."""
    found: dict[str, tuple[list[str], int]] = {}
    for group_id, ended in itertools.groupby(project.rows(ENDED), key=itemgetter("group_id")):
        first: dict[int, dict[str, Any]] = {}
        for row in ended:
            first.setdefault(row["member"], row)
        kept = list(first.values())[:ENOUGH]
        found[group_id] = sorted(row["rollout_id"] for row in kept), kept[-1]["log_offset"]
    return found


def test_producers_that_are_killed_lose_and_double_nothing_of_oversampled_groups(project: Any) -> None:
    (project.folder / "slow_game.py").write_text(GAME)
    builder = {"num_generations": ENOUGH, "oversampling": MORE, "num_producers": 2, "session_timeout_s": 6}
    written = project.configuration(num_epochs=EPOCHS, **builder) | {"workflow": "python:slow_game.slow_digits"}
    config = project.write(written)
    options = ("--config_file", str(config), "--run_id", "more", "--result_json_path", str(project.result))
    command = project.start("finetune", *options)
    try:
        for version in (1, 3, 5):
            kill_a_producer(project, command, version)
        assert command.wait(240) == 0, project.output() + project.logs()
    finally:
        command.kill()
        command.wait()
    assert json.loads(project.result.read_text())["status"] == "completed"
    assert_whole(project)
    replayed = project.run("replay", "more", "--verify", "--train")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


def kill_a_producer(project: Any, command: Command, version: int) -> None:
    """Once any has loaded the version or a later one."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert command.poll() is None, project.output() + project.logs()
        logs = "".join(one.read_text() for one in (project.workspace / "logs").glob("producers-*.log"))
        loaded = [int(found) for found in re.findall(r" loaded model_group=more/policy version=(\d+)\n", logs)]
        alive = [one for name in ("producers-1", "producers-2") if (one := child(command, (name,))) is not None]
        if max(loaded, default=0) >= version and alive:
            time.sleep(0.6)  # its rollouts of that version are in progress: they sleep for up to a second
            return alive[0].kill()
        time.sleep(0.05)
    raise AssertionError(f"no version {version}\n{project.output()}\n{project.logs()}")


def assert_whole(project: Any) -> None:
    """Every group closed once, at its fourth end, with the four that ended first; each attempt counts once."""
    groups = project.rows("SELECT group_id, reason, size, last_step_offset FROM log.group_closed ORDER BY group_id")
    assert len(groups) == EPOCHS * TASKS
    assert {(row["reason"], row["size"]) for row in groups} == {("complete", ENOUGH + MORE)}
    expected = first_enough(project)
    assert {row["group_id"]: row["last_step_offset"] for row in groups} == {
        key: at for key, (_, at) in expected.items()
    }
    members = project.rows("SELECT group_id, rollout_id FROM batch_members ORDER BY group_id, rollout_id")
    trained = itertools.groupby(members, key=itemgetter("group_id"))
    assert {key: [row["rollout_id"] for row in rows] for key, rows in trained} == {
        key: rollouts for key, (rollouts, _) in expected.items()
    }
    outcomes = project.rows("SELECT outcome, cause, count(*) AS n FROM outcomes GROUP BY ALL")
    counts = {(row["outcome"], row["cause"]): row["n"] for row in outcomes}
    assert sum(counts.values()) == project.rows("SELECT count(*) AS n FROM rollouts")[0]["n"]
    assert counts.pop(("trained", None)) == EPOCHS * TASKS * ENOUGH
    assert counts.pop(("superseded", "oversampled")) > 0
    assert counts.keys() <= {("failed", "producer_lost"), ("rejected", "digest"), ("rejected", "incomplete")}, counts
