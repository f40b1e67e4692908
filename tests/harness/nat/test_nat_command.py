"""NAT's own command in this process, with our trainer: where it searches for modules, and no secret in what it says."""

import asyncio
import io
import logging
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from nat.cli.commands.finetune import finetune_command
from nat.cli.register_workflow import register_trainer_adapter, register_trajectory_builder
from nat.cli.type_registry import GlobalTypeRegistry
from nat.data_models import finetuning as nats
from nat.finetuning.interfaces.trainer_adapter import TrainerAdapter
from nat.finetuning.interfaces.trajectory_builder import TrajectoryBuilder

SECRET = "s3cr3t-of-the-judge"
CONTROLS = "\x1b]0;title\x07\x9b2J\u202e"
ESCAPED = r"\x1b]0;title\x07\x9b2J\u202e"
GROUP = [nats.Trajectory(episode=[], reward=reward, metadata={"id": "x"}) for reward in (0.0, 1.0)]

logger = logging.getLogger("other.package")


class BuilderConfig(nats.TrajectoryBuilderConfig, name="command_test_builder"):
    key: str
    starts: bool = True


class AdapterConfig(nats.TrainerAdapterConfig, name="command_test_adapter"):
    key: str
    end: str = "failed"


class Builder(TrajectoryBuilder):
    """Says what it was given, as others' code does."""

    def _key(self) -> str:
        return self.trajectory_builder_config.key  # pyright: ignore[reportAttributeAccessIssue]

    async def initialize(self, run_config: nats.FinetuneConfig) -> None:
        await super().initialize(run_config)
        logger.info("the judge is asked with %s%s", self._key(), CONTROLS)
        config = self.trajectory_builder_config
        assert isinstance(config, BuilderConfig)
        if not config.starts:
            raise ConnectionError(f"{self._key()} is refused{CONTROLS}")

    async def run_eval(self) -> Any:
        raise ValueError(f"{self._key()} cannot validate")

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        try:
            raise ValueError(f"{self._key()} has no quota{CONTROLS}")
        except ValueError:
            logger.warning("asked once more", exc_info=True)

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> nats.TrajectoryCollection:
        return nats.TrajectoryCollection(trajectories=[GROUP], run_id=run_id)

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        pass


class Adapter(TrainerAdapter):
    """Its jobs end as told, with a word that holds its key."""

    async def is_healthy(self) -> bool:
        return True

    async def submit(self, trajectories: nats.TrajectoryCollection) -> nats.TrainingJobRef:
        return nats.TrainingJobRef(run_id=trajectories.run_id, backend="other")

    async def status(self, ref: nats.TrainingJobRef) -> nats.TrainingJobStatus:
        config = self.adapter_config
        assert isinstance(config, AdapterConfig)
        kind = nats.TrainingStatusEnum(config.end)
        return nats.TrainingJobStatus(
            run_id=ref.run_id, backend="other", status=kind, message=f"{config.key} refused{CONTROLS}"
        )

    async def wait_until_complete(
        self, ref: nats.TrainingJobRef, poll_interval: float = 10.0
    ) -> nats.TrainingJobStatus:
        return await self.status(ref)

    def log_progress(self, ref: nats.TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        pass


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    known = GlobalTypeRegistry.get().get_registered_trainer_adapters()
    if any(info.config_type is AdapterConfig for info in known):
        return

    @register_trajectory_builder(config_type=BuilderConfig)
    async def build_builder(config: BuilderConfig, builder: Any) -> AsyncIterator[Any]:
        yield Builder(config)

    @register_trainer_adapter(config_type=AdapterConfig)
    async def build_adapter(config: AdapterConfig, builder: Any) -> AsyncIterator[Any]:
        yield Adapter(config)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Restore the process's state that the command changes."""
    path, factory, hook = list(sys.path), logging.getLogRecordFactory(), sys.excepthook
    yield
    sys.path[:] = path
    logging.setLogRecordFactory(factory)
    sys.excepthook = hook
    asyncio.set_event_loop(None)


def nat_finetune(folder: Path, *, starts: bool = True, **adapter: Any) -> Result:
    written = {
        "general": {"telemetry": {"logging": {"shown": {"_type": "console", "level": "INFO"}}}},
        "trajectory_builders": {
            "b": {"_type": "command_test_builder", "key": "${COMMAND_TEST_ACCESS}", "starts": starts}
        },
        "trainer_adapters": {"a": {"_type": "command_test_adapter", "key": "${COMMAND_TEST_ACCESS}", **adapter}},
        "trainers": {"t": {"_type": "rollstream"}},
        "workflow": {"_type": "rollstream", "environment": "guess_number"},
        "finetuning": {
            "enabled": True,
            "trainer": "t",
            "trajectory_builder": "b",
            "trainer_adapter": "a",
            "num_epochs": 1,
            "output_dir": str(folder / "output"),
        },
    }
    (folder / "run.yml").write_text(yaml.safe_dump(written))
    (folder / "valid.json").write_text("[]")
    options = ("--config_file", str(folder / "run.yml"), "--validation_dataset", str(folder / "valid.json"))
    return CliRunner().invoke(finetune_command, options)


def test_the_folder_of_the_command_is_searched_for_modules_once_a_run_of_ours_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMAND_TEST_ACCESS", SECRET)
    sys.path[:] = [path for path in sys.path if path]
    assert nat_finetune(tmp_path, end="completed").exit_code == 0
    assert sys.path.count("") == 1
    assert sys.path[-1] == ""
    assert nat_finetune(tmp_path, end="completed").exit_code == 0
    assert sys.path.count("") == 1


def test_neither_nats_logs_nor_its_last_line_hold_a_secret_or_what_steers_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMMAND_TEST_ACCESS", SECRET)
    shown = io.StringIO()
    handler = logging.StreamHandler(shown)
    logging.getLogger().addHandler(handler)
    level = logging.getLogger().level
    logging.getLogger().setLevel(logging.INFO)
    try:
        result = nat_finetune(tmp_path)
    finally:
        logging.getLogger().removeHandler(handler)
        logging.getLogger().setLevel(level)
    assert result.exit_code == 1
    assert "failed: ${COMMAND_TEST_ACCESS} refused" in result.output
    assert "the judge is asked with ${COMMAND_TEST_ACCESS}" in result.output, "by the handler of the file's telemetry"
    assert "Traceback" in shown.getvalue()
    assert f"has no quota{ESCAPED}\n" in shown.getvalue()
    assert result.output.splitlines()[-1].endswith(f"refused{ESCAPED}")
    sys.excepthook(ValueError, ValueError(f"{SECRET}{CONTROLS}"), None)
    uncaught = capsys.readouterr().err
    assert uncaught == f"ValueError: ${{COMMAND_TEST_ACCESS}}{ESCAPED}\n"
    assert not set(CONTROLS) - set("]0;title2J") & set(result.output + shown.getvalue() + uncaught)
    assert SECRET not in result.output + shown.getvalue()
    validations = (tmp_path / "output" / "validation_history.json").read_text()
    assert "${COMMAND_TEST_ACCESS} cannot validate" in validations
    for path in (tmp_path / "output").rglob("*"):
        assert SECRET.encode() not in path.read_bytes()


def test_an_exception_of_another_packages_initialize_is_printed_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMAND_TEST_ACCESS", SECRET)
    for _ in range(2):
        result = nat_finetune(tmp_path, starts=False)
        assert result.exit_code == 1
        assert result.output.splitlines()[-1] == f"Error: ${{COMMAND_TEST_ACCESS}} is refused{ESCAPED}"
        assert SECRET not in result.output
