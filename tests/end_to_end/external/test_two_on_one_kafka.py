"""Two managed runs at the same time on one Kafka: each is served and trained by its own services alone."""

from typing import Any

import pytest

from rollstream.eventlog.broker.broker import EmbeddedBroker
from rollstream.eventlog.broker.credentials import environment

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]

VERSIONS = "SELECT run_id, version, weights_sha256 FROM weight_versions ORDER BY version"
EPOCHS = 2


def game(project: Any, bootstrap_servers: str) -> str:
    """A run that is a function of its configuration, its id and its seed."""
    engine = {"threads": 1, "deterministic": True}
    made = project.configuration(num_epochs=EPOCHS, engine=engine, bootstrap_servers=bootstrap_servers)
    return str(project.write(made | {"workflow": "python:game.digits"}))


def test_two_managed_runs_on_one_kafka_end_as_each_does_alone(two_projects: Any, tmp_path: Any) -> None:
    one, two = two_projects
    with EmbeddedBroker(tmp_path / "kafka") as running:
        login = environment(running.kafka)
        address = running.kafka.bootstrap_servers
        commands = [
            (project, project.start("finetune", "--config_file", game(project, address), "--run_id", name, **login))
            for project, name in ((one, "run-one"), (two, "run-two"))
        ]
        try:
            codes = [command.wait(400) for _, command in commands]
            assert codes == [0, 0], one.output() + two.output() + one.logs() + two.logs()
            found = {project: project.rows(VERSIONS) for project in (one, two)}
            for project, name in ((one, "run-one"), (two, "run-two")):
                assert [row["version"] for row in found[project]] == list(range(EPOCHS + 1))
                assert {row["run_id"] for row in found[project]} == {name}
                assert project.rows("SELECT DISTINCT run_id FROM rollouts") == [{"run_id": name}]
        finally:
            for _, command in commands:
                command.kill()
                command.wait()
    (two.workspace / "metrics.duckdb").rename(two.folder / "before.duckdb")
    alone = two.run("finetune", "--config_file", game(two, "embedded"), "--run_id", "run-one")
    assert alone.returncode == 0, alone.stdout + alone.stderr
    assert two.rows(VERSIONS) == found[one]
