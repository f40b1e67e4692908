"""A whole run whose services kill themselves once at every failpoint: it comes to its end, nothing lost or doubled."""

import json
from typing import Any

import pytest

from rollstream.eventlog.failpoints import FAILPOINTS, ONCE, VARIABLE

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(600)]

EPOCHS = 24
HITS = {"producer/during-hand-over": 1}
"""Hit at which a process is killed, by failpoint; 3 for all others: soon enough after each of its starts."""
NOT_REACHED = {
    "gateway/after-reward-before-answer": "tests/producers/gateway/test_gateway_repeats.py",
    "gateway/after-end-before-answer": "tests/producers/gateway/test_gateway_repeats.py",
    "learner/within-scores-of-group": "tests/learner/parallel/test_references_of_several.py",
    "learner/between-scores-of-groups": "tests/learner/scoring/test_scores.py",
}
"""Failpoints that a run without a gateway and a reference does not come to, and the test that kills there."""


def test_a_run_that_is_killed_once_at_every_failpoint_comes_to_its_end(project: Any) -> None:
    once = project.folder / "failpoints"
    once.mkdir()
    armed = {name: HITS.get(name, 3) for name in FAILPOINTS if name not in NOT_REACHED}
    config = project.write(
        project.configuration(num_epochs=EPOCHS, session_timeout_s=6) | {"workflow": "python:game.digits"}
    )
    environment = {VARIABLE: ",".join(f"{name}:{hit}" for name, hit in armed.items()), ONCE: str(once)}
    done = project.run(
        *("finetune", "--config_file", str(config), "--result_json_path", str(project.result)),
        timeout=500,
        **environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr + project.logs()
    assert {path.name.replace(".", "/") for path in once.iterdir()} == set(armed)
    assert json.loads(project.result.read_text())["status"] == "completed"
    epochs = project.rows("SELECT epoch FROM epoch_summary ORDER BY epoch")
    assert [row["epoch"] for row in epochs] == list(range(EPOCHS))
    for table, key, count in (("groups", "group_id", EPOCHS * 4), ("batch_members", "trajectory_id", None)):
        (found,) = project.rows(f"SELECT count(*) AS n, count(DISTINCT {key}) AS d FROM {table}")
        assert found["n"] == found["d"] == (count or found["n"])
    (ledger,) = project.rows("SELECT count(*) AS n, count(DISTINCT rollout_id) AS d FROM outcomes")
    (started,) = project.rows("SELECT count(*) AS n FROM rollouts")
    assert ledger["n"] == ledger["d"] == started["n"] >= EPOCHS * 4 * 4
    versions = project.rows("SELECT version FROM weight_versions ORDER BY version")
    assert [row["version"] for row in versions] == list(range(len(versions)))
