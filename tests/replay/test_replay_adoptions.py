"""docs/replay.md holds of rollbacks, of the evaluation gate and of what a task of several model groups waits for."""

import asyncio
import logging
from typing import Any

import orjson
import pytest

from rollstream.learner.tiny_model import make_tiny_model
from rollstream.schemas.events import KINDS
from tests.rigs.runs.adopting_run import GatedRun, RolledBackRun
from tests.rigs.runs.replay_changes import Change, changes, finders, is_found, other
from tests.rigs.runs.replay_rig import named, trained, verified

KINDS_TRIED = {"RollbackRequested", "VersionJudged"}


def recorded(kind: type[Any], folder: Any) -> Any:
    make_tiny_model(folder / "model", seed=0)
    return asyncio.run(kind(folder, folder / "model").record())


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return recorded(RolledBackRun, tmp_path_factory.mktemp("rolled-back"))


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return recorded(GatedRun, tmp_path_factory.mktemp("gated"))


def found_by(run: Any, change: Change) -> str:
    """The beginning of a row of the page."""
    by_verify = is_found(verified, run, change)
    by_train = is_found(named, run, change) or is_found(trained, run, change)
    return ", ".join(name for name, is_so in (("verify", by_verify), ("train", by_train)) if is_so) or "nothing"


def test_every_row_is_true_of_rollbacks_and_judgements(
    rolled_back: Any, gated: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    found: dict[tuple[str, str], str] = {}
    for run in (rolled_back, gated):
        assert verified(run).verdict == trained(run).verdict == "equal"
        for decodes in (True, False):
            for change in changes(run, decodes=decodes):
                if change.kind in KINDS_TRIED and (change.kind, change.field) not in found:
                    found[change.kind, change.field] = found_by(run, change)
    rows = {row: finder for row, finder in finders().items() if row[0] in KINDS_TRIED}
    assert found == rows


@pytest.mark.parametrize("kind", ["BatchPlanned", "StepTrained", "WeightsPublished"])
def test_the_version_that_a_rollback_adopts_is_found(rolled_back: Any, kind: str) -> None:
    """The test covers a record that adopts, and one that does not."""
    records = [
        Change(kind, "adopts", where, number, orjson.dumps({**body, "adopts": other(body.get("adopts", 0))}))
        for where, kept in rolled_back.log._store._partitions.items()
        for number, body in enumerate(orjson.loads(record.value) for record in kept.records)
        if KINDS[body["kind"]].__name__ == kind
    ]
    adopting = next(one for one in records if orjson.loads(one.value)["adopts"] > 1)
    for one in (records[1], adopting):
        assert found_by(rolled_back, one).startswith(finders()[kind, "adopts"])


@pytest.mark.parametrize("kind", ["BatchPlanned", "StepTrained"])
def test_the_number_of_rollbacks_before_a_manifest_is_found(rolled_back: Any, kind: str) -> None:
    where, number, body = next(
        (where, number, body)
        for where, kept in rolled_back.log._store._partitions.items()
        for number, body in enumerate(orjson.loads(record.value) for record in kept.records)
        if KINDS[body["kind"]].__name__ == kind and body.get("num_adopted")
    )
    change = Change(kind, "num_adopted", where, number, orjson.dumps({**body, "num_adopted": 7}))
    assert found_by(rolled_back, change).startswith(finders()[kind, "num_adopted"])
