"""A stored configuration is data: what it names is imported and expanded only if the user names or trusts it."""

import asyncio
import copy
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.harness.config import file as config_file
from rollstream.harness.replays.what_if import what_if
from rollstream.harness.runs.plan import open_run
from rollstream.harness.runs.stored_config import check_stored
from rollstream.replay.source import read_run
from rollstream.schemas.errors import ConfigError, NotAllowedError

MODULE = "import pathlib\n\npathlib.Path(__file__).with_suffix('.imported').touch()\n"


class Stored:
    """A log with a run whose stored configuration names a module that leaves a file when it is imported."""

    def __init__(self, folder: Path, written: dict[str, Any], script: SimpleNamespace) -> None:
        self.folder, self.written = folder, written
        self.module = f"stored_{uuid.uuid4().hex}"
        (folder / f"{self.module}.py").write_text(MODULE)
        self.log = MemoryLog(num_partitions=2)
        config = copy.deepcopy(written)
        config["trajectory_builders"]["b"]["modules"] = [self.module]
        config["trainers"]["t"]["_type"] = f"python:{self.module}.Config"
        config["trajectory_builders"]["b"]["sampling"] = {"temperature": "${STOLEN:-1}"}
        self.config = config
        asyncio.run(self.log.send(script.run_started().model_copy(update={"config": config})))

    @property
    def is_imported(self) -> bool:
        return (self.folder / f"{self.module}.imported").exists()


@pytest.fixture
def stored(tmp_path: Path, written: dict[str, Any], script: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Stored:
    monkeypatch.syspath_prepend(tmp_path)
    return Stored(tmp_path, written, script)


def ask_what_if(stored: Stored, **options: Any) -> None:
    file = stored.folder / "what_if.yaml"
    file.write_text("{}")

    async def go() -> None:
        events = await read_run(stored.log, "run-1")
        artifacts = ArtifactStore(str(stored.folder / "artifacts"))
        await what_if(
            stored.log, events, artifacts, file, checkpoints=stored.folder, on_progress=lambda _: None, **options
        )

    asyncio.run(go())


def assert_reported(stored: Stored, message: str) -> None:
    for word in (
        f"python:{stored.module}.Config",
        "trainers.t._type",
        f"module {stored.module}",
        "${STOLEN}",
        "--trust",
    ):
        assert word in message
    assert "run-1" in message
    assert "\n" not in message
    assert not stored.is_imported


def test_a_what_if_of_a_run_that_names_code_is_refused_and_names_it(stored: Stored) -> None:
    with pytest.raises(NotAllowedError) as refused:
        ask_what_if(stored)
    assert_reported(stored, str(refused.value))


def test_a_run_that_names_code_which_the_users_file_does_not_is_not_resumed(stored: Stored, tmp_path: Path) -> None:
    loaded = config_file.resolve(stored.written)
    with pytest.raises(NotAllowedError) as refused:
        asyncio.run(open_run(stored.log, ArtifactStore(str(tmp_path)), loaded, "run-1"))
    assert_reported(stored, str(refused.value))


def test_code_of_a_trusted_configuration_is_imported(stored: Stored) -> None:
    with pytest.raises(ConfigError, match="has no 'Config'; define it there"):
        ask_what_if(stored, trust=True)
    assert stored.is_imported


def test_code_that_the_users_own_file_names_needs_no_flag(stored: Stored) -> None:
    check_stored(stored.config, stored.config, run_id="run-1", trust=False)
    check_stored(stored.written, {}, run_id="run-1", trust=False)


def test_functions_and_files_of_evaluators_are_named_too() -> None:
    evaluators = {"p": {"_type": "python", "function": "os.system"}, "s": {"_type": "json_schema", "file": "/etc/x"}}
    with pytest.raises(NotAllowedError) as refused:
        check_stored({"eval": {"evaluators": evaluators}}, {}, run_id="r", trust=False)
    assert '"python:os.system" at "eval.evaluators.p.function"' in str(refused.value)
    assert '"file:/etc/x" at "eval.evaluators.s.file"' in str(refused.value)
