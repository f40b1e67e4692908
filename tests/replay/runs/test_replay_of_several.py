"""A run whose learner is two processes, with two rollbacks: as many processes train it again to the same bits."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rollstream.learner.parallel.process_ranks import END, joined
from rollstream.learner.retrain import take_part
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.schemas.errors import ConfigError
from tests.rigs.runs.adopting_run import RolledBackRun
from tests.rigs.runs.replay_rig import trained
from tests.rigs.services.process_group import together

pytestmark = pytest.mark.slow
RANGES: list[dict[str, Any]] = [{}, {"first": 4}, {"first": 5, "last": 6}]


def recorded_and_replayed(folder: Path, model: Path) -> None:
    """One of the processes."""
    with joined() as ranks:
        if ranks.index:
            take_part(ranks)
            return
        run = RolledBackRun(folder, model)
        run.ranks = ranks
        asyncio.run(run.record())
        reports = [trained(run, ranks=ranks, checkpoints=run.checkpoints, **one) for one in RANGES]
        ranks.send(END)
    errors: list[str] = []
    for one in RANGES:
        with pytest.raises(ConfigError) as found:
            trained(run, **one)
        errors.append(str(found.value))
    differences = [str(one) for report in reports for one in report.differences]
    steps = [report.counts["training steps"] for report in reports]
    (folder / "found.json").write_text(json.dumps({"differences": differences, "steps": steps, "errors": errors}))


def test_as_many_processes_train_it_again_to_the_same_bits(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", seed=0)
    together(2, recorded_and_replayed, tmp_path, tmp_path / "model")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["differences"] == []
    assert found["steps"][0] == 7
    for error in found["errors"]:
        assert "was trained by 2 processes together; this replay trains in one process" in error
        assert "; give --ranks 2, or leave --train out" in error
