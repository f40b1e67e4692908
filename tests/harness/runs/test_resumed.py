"""A resumed run: what of its own settings may differ from those that it was started with."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.harness.config import file as config_file
from rollstream.harness.config.jobs import jobs_of
from rollstream.harness.runs.driver import lacking, located
from rollstream.harness.runs.plan import RunPlan, new_run, open_run
from rollstream.harness.runs.progress import Progress
from rollstream.schemas.errors import ArtifactError, ConfigError, TopicError

ROWS = '{"id": "a", "secret": 5}\n{"id": "b", "secret": 7}\n'


class Recorded:
    """A run with two examples that has just begun, and its configuration."""

    def __init__(self, folder: Path, written: dict[str, Any], write: Callable[[dict[str, Any]], Path]) -> None:
        self.folder, self.written, self.write = folder, written, write
        self.data = folder / "data.jsonl"
        self.data.write_text(ROWS)
        written["eval"] = {"general": {"dataset": {"_type": "jsonl", "file_path": str(self.data)}}}
        self.log, self.artifacts = MemoryLog(num_partitions=2), ArtifactStore(str(folder / "artifacts"))
        asyncio.run(self._begin())

    async def _begin(self) -> None:
        run = await new_run(self.log, self.artifacts, self.load(), "run", run_id="run-1")
        await self.log.send_all(await located(self.log, Progress("run-1"), lacking(Progress("run-1"), *run[:2])))

    def load(self, *overrides: tuple[str, str]) -> config_file.Loaded:
        return config_file.load(self.write(self.written), overrides)

    def resume(self, *overrides: tuple[str, str], artifacts: ArtifactStore | None = None) -> RunPlan:
        """The run, resumed with changes."""
        return asyncio.run(open_run(self.log, artifacts or self.artifacts, self.load(*overrides), "run-1"))


@pytest.fixture
def recorded(tmp_path: Path, written: dict[str, Any], write: Callable[[dict[str, Any]], Path]) -> Recorded:
    return Recorded(tmp_path, written, write)


def test_a_run_is_not_resumed_on_topics_with_more_partitions(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def altered(_: str) -> int:
        return 4

    monkeypatch.setattr(recorded.log, "num_partitions", altered)
    with pytest.raises(
        TopicError, match=r"began with 2 partitions, and topic tasks has 4; it cannot be continued: beg"
    ):
        recorded.resume()


def test_a_run_is_not_resumed_with_another_dataset(recorded: Recorded) -> None:
    other = recorded.folder / "other.jsonl"
    given = ("eval.general.dataset.file_path", str(other))
    other.write_text('{"id": "z", "secret": 5}\n')
    with pytest.raises(ConfigError, match="run run-1 was started with another dataset: give it the same"):
        recorded.resume(given)
    with pytest.raises(ConfigError, match="was started with another dataset"):
        recorded.resume(("eval.general.dataset.filter", "{allowlist: {field: {id: [a]}}}"))
    other.write_text(ROWS)
    assert recorded.resume(given).started.num_examples == 2
    other.unlink()
    with pytest.raises(ConfigError, match=r"other\.jsonl: cannot be read"):
        recorded.resume(given)


def test_a_run_whose_dataset_was_changed_or_is_gone_goes_on_with_its_own_copy(
    recorded: Recorded, caplog: pytest.LogCaptureFixture
) -> None:
    recorded.data.write_text('{"id": "z", "secret": 5}\n')
    assert recorded.resume().started.num_examples == 2
    assert f"dataset {recorded.data} has changed since run run-1 began" in caplog.text
    recorded.data.unlink()
    assert recorded.resume().started.num_examples == 2
    del recorded.written["eval"]
    assert recorded.resume().started.num_examples == 2


def test_a_run_is_not_resumed_with_another_idle_timeout(recorded: Recorded) -> None:
    with pytest.raises(ConfigError, match=r"another trainers\.t\.run_idle_timeout_s \(recorded: not set, given: 5\): "):
        recorded.resume(("trainers.t.run_idle_timeout_s", "5"))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (
            [("trainer_adapters.a.optimizer.learning_rate", "0.002")],
            "optimizer.learning_rate (recorded: not set, given: 0.002)",
        ),
        ([("finetuning.num_epochs", "7"), ("finetuning.output_dir", "elsewhere")], "finetuning.num_epochs (recorded: "),
        ([("trajectory_builders.b.num_generations", "6")], "trajectory_builders.b.num_generations (recorded: "),
        ([("trajectory_builders.b.max_turns", "3")], "trajectory_builders.b.max_turns (recorded: not set, given: 3)"),
    ],
)
def test_the_keys_that_make_it_another_run_are_named_with_both_values(
    recorded: Recorded, overrides: list[tuple[str, str]], named: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        recorded.resume(*overrides)
    assert named in str(refused.value)
    assert "elsewhere" not in str(refused.value)
    assert "job." not in str(refused.value)


def test_a_store_may_be_moved_but_must_have_the_dataset_of_a_resumed_run(recorded: Recorded) -> None:
    moved = recorded.folder / "moved"
    with pytest.raises(ArtifactError, match=r"of store .*moved cannot be read: .*, or correct artifact_uri"):
        recorded.resume(artifacts=ArtifactStore(str(moved)))
    (recorded.folder / "artifacts").rename(moved)
    assert not recorded.resume(artifacts=ArtifactStore(str(moved))).is_new


@pytest.fixture
def with_variables(
    tmp_path: Path, written: dict[str, Any], write: Callable[[dict[str, Any]], Path], monkeypatch: pytest.MonkeyPatch
) -> Recorded:
    """A run with a warm start whose settings come from variables."""
    given = {
        "EPOCHS": "40",
        "RATE": "0.01",
        "REWARD": "first",
        "MODEL": "model",
        "DEVICE": "cpu",
        "IDLE": "90",
        "SEED": "1",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    written["finetuning"]["num_epochs"] = "${EPOCHS}"
    written["finetuning"]["output_dir"] = "${MODEL}-out"
    written["trainers"]["t"]["run_idle_timeout_s"] = "${IDLE}"
    adapter, builder = written["trainer_adapters"]["a"], written["trajectory_builders"]["b"]
    adapter |= {"seed": "${SEED}", "optimizer": {"learning_rate": "${RATE}"}, "warm_start": {"num_epochs": 40}}
    adapter["model"]["path"] = f"{tmp_path}/${{MODEL}}"
    builder |= {"rewards": ["${REWARD}"], "engine": {"kind": "transformers", "device": "${DEVICE}"}}
    return Recorded(tmp_path, written, write)


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("EPOCHS", "5", "finetuning.num_epochs (recorded: 40, given: 5)"),
        ("RATE", "0.02", "trainer_adapters.a.optimizer.learning_rate (recorded: 0.01, given: ${RATE})"),
        ("REWARD", "second", 'trajectory_builders.b.rewards.0 (recorded: "first", given: "${REWARD}")'),
        ("IDLE", "60", "trainers.t.run_idle_timeout_s (recorded: 90.0, given: 60.0)"),
    ],
)
def test_a_variable_that_gives_another_value_than_was_recorded_is_refused(
    with_variables: Recorded, monkeypatch: pytest.MonkeyPatch, name: str, value: str, named: str
) -> None:
    assert with_variables.resume().jobs[-1].plan.num_epochs == 40
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as refused:
        with_variables.resume()
    assert f"gave run run-1 other values when it began: {named}; set them as they were" in str(refused.value)


def test_a_variable_in_a_list_is_named_by_its_own_index(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FIRST", "0.9")
    monkeypatch.setenv("SECOND", "0.95")
    recorded.written["trainer_adapters"]["a"]["optimizer"] = {"betas": ["${FIRST}", "${SECOND}"]}
    run = Recorded(tmp_path, recorded.written, recorded.write)
    monkeypatch.setenv("SECOND", "0.9")
    with pytest.raises(
        ConfigError, match=r": trainer_adapters\.a\.optimizer\.betas\.1 \(recorded: 0\.95, given: 0\.9\);"
    ):
        run.resume()


def test_a_text_that_was_recorded_as_the_variable_of_another_key_is_the_same(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = recorded.written["trainer_adapters"]["a"]["model"]["path"]
    monkeypatch.setenv("OUTPUT", path)
    recorded.written["finetuning"]["output_dir"] = "${OUTPUT}"
    run = Recorded(tmp_path, recorded.written, recorded.write)
    (spec,) = jobs_of(run.load().config, "run-2")
    assert spec.job.model.path == path
    earlier = spec.job.model.model_copy(update={"path": "${OUTPUT}"})
    jobs = [spec._replace(job=spec.job.model_copy(update={"model": earlier}))]
    started = run.resume().started.model_copy(update={"run_id": "run-2"})
    asyncio.run(run.log.send_all(lacking(Progress("run-2"), started, jobs)))
    assert not asyncio.run(open_run(run.log, run.artifacts, run.load(), "run-2")).is_new


def test_a_recorded_run_may_have_true_for_a_number(
    recorded: Recorded, tmp_path: Path, written: dict[str, Any], write: Callable[[dict[str, Any]], Path]
) -> None:
    written["finetuning"]["num_epochs"] = 1
    run = Recorded(tmp_path, written, write)
    begun = run.resume().started
    written["finetuning"]["num_epochs"] = True
    config = {**begun.config, "finetuning": written["finetuning"]}
    started = begun.model_copy(update={"run_id": "run-2", "config": config})
    jobs = jobs_of(config_file.resolve(config, is_new=False).config, "run-2")
    asyncio.run(run.log.send_all(lacking(Progress("run-2"), started, jobs)))
    given = config_file.load(write(written), is_new=False)
    assert not asyncio.run(open_run(run.log, run.artifacts, given, "run-2")).is_new
    changed = config_file.load(write(written), [("finetuning.num_epochs", "2")])
    with pytest.raises(ConfigError, match=r"finetuning\.num_epochs \(recorded: true, given: 2\)"):
        asyncio.run(open_run(run.log, run.artifacts, changed, "run-2"))


def test_variables_of_paths_and_engines_may_have_other_values(
    with_variables: Recorded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "model").rename(tmp_path / "moved")
    monkeypatch.setenv("MODEL", "moved")
    monkeypatch.setenv("DEVICE", "cuda")
    assert with_variables.resume().jobs[0].job.model.path == f"{tmp_path}/${{MODEL}}"


def test_a_job_that_has_begun_is_compared_with_what_it_recorded_itself(
    with_variables: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = with_variables.resume()
    older = run.started.model_copy(update={"run_id": "run-2", "from_variables": {}})
    jobs = jobs_of(with_variables.load().config, "run-2")
    asyncio.run(with_variables.log.send_all(lacking(Progress("run-2"), older, jobs)))
    monkeypatch.setenv("EPOCHS", "5")  # of the job that has not begun
    assert asyncio.run(open_run(with_variables.log, with_variables.artifacts, with_variables.load(), "run-2"))
    monkeypatch.setenv("SEED", "2")
    with pytest.raises(ConfigError, match=r"trainer_adapters\.a\.seed \(recorded: 1, given: 2\)"):
        asyncio.run(open_run(with_variables.log, with_variables.artifacts, with_variables.load(), "run-2"))
