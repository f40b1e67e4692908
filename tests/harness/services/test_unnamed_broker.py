"""A workspace that names no broker: what commands advise where services live there, and where nothing does."""

import json
from pathlib import Path

import pytest

from rollstream.harness.services.workspace import Workspace, broker_of
from rollstream.schemas.errors import ConfigError

ADDRESS = "--bootstrap_servers or ROLLSTREAM_BOOTSTRAP_SERVERS"


@pytest.fixture(autouse=True)
def without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLSTREAM_BOOTSTRAP_SERVERS", raising=False)


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as refused, broker_of(Workspace(folder), None):
        pass
    return str(refused.value)


def test_an_empty_workspace_has_no_runs_unless_its_services_use_another_broker(tmp_path: Path) -> None:
    assert refusal(tmp_path) == (
        f"workspace {tmp_path} has no runs yet; run `rollstream finetune`, give another --workspace, or the address of "
        f"the broker that its services use as {ADDRESS}"
    )


def test_a_workspace_of_services_asks_for_the_broker_that_they_use(tmp_path: Path) -> None:
    Workspace(tmp_path).create()
    for name in ("metrics", "learner-1"):
        (Workspace(tmp_path).health / f"{name}.json").write_text(json.dumps({"service": name, "pid": 1}))
    assert refusal(tmp_path) == (
        f"workspace {tmp_path} has services (learner-1, metrics) and does not name the broker that they use; give its "
        f"address as {ADDRESS}"
    )
