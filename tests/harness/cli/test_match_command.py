"""The exit status of `rollstream match`."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rollstream.harness.cli.match import match
from rollstream.harness.replays import rematch
from rollstream.harness.replays.rematch import Rematch
from rollstream.harness.services import workspace
from rollstream.schemas.kafka import KafkaSettings


@pytest.mark.parametrize(("first_difference", "status"), [(None, 0), (2, 1)])
def test_a_match_that_differs_from_the_recorded_one_is_printed_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_difference: int | None, status: int
) -> None:
    async def play_recorded(*_: Any, **_options: Any) -> Rematch:
        return Rematch("run-1/rl/e00000/t0", 0, {"X": "run-1/policy@1"}, [], {}, "run-1/rl/m0", first_difference, {})

    monkeypatch.setattr(workspace, "broker_of", lambda *_: nullcontext(KafkaSettings(bootstrap_servers="127.0.0.1:1")))
    monkeypatch.setattr(rematch, "play_recorded", play_recorded)
    done = CliRunner().invoke(match, ["run-1", "--task", "0/0", "--workspace", str(tmp_path)])
    assert done.exit_code == status
    assert done.stdout.splitlines()[-1].startswith("equal: " if status == 0 else "different: move 3 is not that of")
