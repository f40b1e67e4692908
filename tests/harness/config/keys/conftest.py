"""The configuration whose keys are changed one by one."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollstream.harness.runs import preflight
from rollstream.harness.services.workspace import Workspace
from tests.harness.config.keys.changed_keys import changed_by

ROWS = [{"id": f"x{number}", "question": f"{number}+1", "answer": "3", "other": f"a{number}"} for number in range(3)]


@pytest.fixture
def base(written: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A file in which all optional blocks are there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TEST_KAFKA_SECRET", "not-so-secret")
    monkeypatch.setenv("TEST_OTHER_SECRET", "another")
    monkeypatch.setattr(preflight, "check_hub", lambda path, location: None)  # models of these files are nowhere
    Workspace(Path(".rollstream")).create()
    for name in ("examples.jsonl", "other.jsonl"):
        rows = ROWS if name == "examples.jsonl" else ROWS[:2]
        Path(name).write_text("\n".join(json.dumps(row) for row in rows))
    written["eval"] = {"general": {"dataset": {"_type": "jsonl", "file_path": "examples.jsonl"}}}
    written["trainer_adapters"]["a"] |= {"warm_start": {}, "endpoint": {"port": 0}}
    written["trainer_adapters"]["a"]["model"]["lora"] = {}
    written["finetuning"]["curriculum_learning"] = {"enabled": True}
    Path("other.yaml").write_text(json.dumps(changed_by(workflow="arithmetic")(written)))
    return written
