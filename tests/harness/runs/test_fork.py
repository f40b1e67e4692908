"""Branching of a run at a version of another one: what is refused before it begins, and what its events say."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.files import tokenizer_sha256
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.harness.config import file as config_file
from rollstream.harness.config.jobs import jobs_of
from rollstream.harness.runs.driver import lacking
from rollstream.harness.runs.follower import read_runs
from rollstream.harness.runs.plan import look_up, new_run, open_run
from rollstream.harness.runs.progress import Progress, evolve
from rollstream.harness.upkeep.run_tables import runs_table
from rollstream.replay.fork import check_fork, check_versions, parse_fork
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import JobSubmitted, JobSucceeded, LearnerClaimed
from rollstream.schemas.events.training import ForkPoint

LORA = {"r": 16, "lora_alpha": 32.0, "target_modules": ["v_proj", "q_proj", "k_proj", "o_proj"]}


class Lab:
    """A log that holds a run with versions 0 to 2, and a configuration that fits it."""

    def __init__(self, folder: Path, written: dict[str, Any], write: Any, script: SimpleNamespace) -> None:
        self.folder, self.written, self.write, self.script = folder, written, write, script
        self.log = MemoryLog(num_partitions=2)
        self.artifacts = ArtifactStore(str(folder / "artifacts"))
        self.model = written["trainer_adapters"]["a"]["model"]

    async def record(self, **changes: Any) -> list[Any]:
        ref = self.artifacts.put_bytes(b"weights", ".safetensors")
        published = [
            self.script.published(version, "run-1/rl").model_copy(
                update={"base_model": self.model["path"], "artifact": ref, **changes}
            )
            for version in range(3)
        ]
        await self.log.send_all([self.script.run_started(), self.script.run_started("other"), *published])
        return published

    @property
    def loaded(self) -> Any:
        return config_file.load(self.write(self.written), ())

    async def check(self, text: str) -> None:
        await check_fork(self.log, self.artifacts, self.loaded.config, parse_fork(text))

    async def refusal(self, text: str) -> str:
        with pytest.raises(ConfigError) as refused:
            await self.check(text)
        assert str(refused.value).startswith(f"--fork {text}: ")
        assert "\n" not in str(refused.value)
        return str(refused.value).removeprefix(f"--fork {text}: ")


@pytest.fixture
def lab(tmp_path: Path, written: dict[str, Any], write: Any, script: SimpleNamespace) -> Lab:
    return Lab(tmp_path, written, write, script)


@pytest.mark.parametrize("text", ["run-1", "run-1@", "@3", "run-1@x", "run-1@-1", "run-1@1.5", "a b@1"])
def test_a_fork_point_that_is_not_a_run_and_version_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="RUN@VERSION"):
        parse_fork(text)


def test_a_run_and_version_are_read() -> None:
    assert parse_fork("run-1@12") == ForkPoint(run_id="run-1", version=12)
    assert parse_fork("run-1@v12") == ForkPoint(run_id="run-1", version=12)


def test_a_version_that_is_there_and_fits_is_taken(lab: Lab) -> None:
    async def scenario() -> None:
        await lab.record()
        for version in range(3):
            await lab.check(f"run-1@{version}")

    asyncio.run(scenario())


def test_a_check_leaves_no_copy_of_a_remote_stores_weights(lab: Lab) -> None:
    lab.artifacts = ArtifactStore(f"memory://{lab.folder.name}", cache=lab.folder / "cache")

    async def scenario() -> None:
        await lab.record()
        await lab.check("run-1@1")

    asyncio.run(scenario())
    assert not (lab.folder / "cache").exists()


def test_an_unknown_run_or_version_is_refused_with_what_there_is(lab: Lab) -> None:
    async def scenario() -> None:
        await lab.record()
        assert await lab.refusal("gone@0") == "run gone does not exist; known runs: run-1, other"
        assert await lab.refusal("run-1@3") == "run run-1 has no version 3; choose one of 0 to 2"
        assert await lab.refusal("other@0") == "run other has published no version yet; wait for its first one"

    asyncio.run(scenario())


def test_a_run_of_a_newer_version_is_not_called_unknown(lab: Lab) -> None:
    async def scenario() -> None:
        sent = codec.encode(lab.script.run_started("later"))
        newer = orjson.dumps({**orjson.loads(sent.value), "field_of_tomorrow": 1})
        await lab.log.send_raw("groups", key=b"later", value=newer, headers=sent.headers)
        refused = await lab.refusal("later@0")
        assert refused.startswith("run later has records that this version of rollstream cannot read, such as a newer")
        assert "the first is groups/0@0 (run_started: field_of_tomorrow: " in refused

    asyncio.run(scenario())


def test_weights_of_another_kind_or_model_are_refused(lab: Lab) -> None:
    async def scenario() -> None:
        await lab.record()
        lab.model["lora"] = {}
        reported = await lab.refusal("run-1@1")
        assert reported == "it has full weights, but the run trains lora weights; change model.lora"
        del lab.model["lora"]
        other = lab.folder / "other"
        other.mkdir()
        (other / "config.json").write_text("{}")
        was, lab.model["path"] = lab.model["path"], str(other)
        reported = await lab.refusal("run-1@1")
        assert (
            reported
            == f"it was trained from base model {was}, but the configuration has model.path {other}; give that one"
        )

    asyncio.run(scenario())


def test_another_adapter_is_refused(lab: Lab) -> None:
    async def scenario() -> None:
        await lab.record(weights_format="lora", lora=LORA)
        for same in ({}, {"target_modules": "all-linear"}):
            lab.model["lora"] = same
            await lab.check("run-1@1")
        for name, value, reported in (
            ("rank", 8, "16"),
            ("alpha", 8, "32.0"),
            ("target_modules", ["q_proj"], ""),
            ("use_rslora", True, "False"),
            ("use_dora", True, "False"),
        ):
            lab.model["lora"] = {name: value}
            assert (await lab.refusal("run-1@1")).startswith(f"its adapter has {name} {reported}")

    asyncio.run(scenario())


def test_a_version_of_another_tokenizer_is_refused(lab: Lab) -> None:
    async def scenario() -> None:
        tokenizer = Path(lab.model["path"]) / "tokenizer.json"
        tokenizer.write_text("as it was")
        await lab.record(tokenizer_sha256=tokenizer_sha256(lab.model["path"]))
        await lab.check("run-1@1")
        tokenizer.write_text("another")
        assert await lab.refusal("run-1@1") == (
            f"it was trained with another tokenizer than that of model {lab.model['path']}; restore the tokenizer's "
            "files, or give the model.path that it was trained with"
        )

    asyncio.run(scenario())


def test_weights_that_are_gone_or_void_are_refused(lab: Lab) -> None:
    async def scenario() -> None:
        published = await lab.record()
        await lab.log.send(
            LearnerClaimed(run_id="run-1", time_ms=1, model_group="run-1/policy", term=2, learner="newer")
        )
        await lab.log.send(published[2].model_copy(update={"version": 3}))
        assert await lab.refusal("run-1@3") == "run run-1 has no version 3; choose one of 0 to 2"
        lab.artifacts.fetch(published[1].artifact).unlink()
        assert (await lab.refusal("run-1@1")).startswith(
            f"its weights were removed: artifact {published[1].artifact.uri}"
        )

    asyncio.run(scenario())


def test_the_log_and_the_learner_know_a_forks_parent_also_after_a_resume(lab: Lab) -> None:
    async def scenario() -> None:
        await lab.record()
        point = parse_fork("run-1@1")
        run = await new_run(lab.log, lab.artifacts, lab.loaded, "child", parent=point)
        assert run.started.parent == point
        started, submitted = lacking(Progress(run.started.run_id), run.started, run.jobs)
        assert isinstance(submitted, JobSubmitted)
        assert (submitted.base_version, submitted.fork) == (0, point)
        await lab.log.send(started)  # and then it died
        resumed = await open_run(lab.log, lab.artifacts, lab.loaded, run.started.run_id)
        progress = await look_up(lab.log, run.started.run_id)
        (again,) = lacking(progress, resumed.started, resumed.jobs)
        assert again == submitted
        listed = runs_table(await read_runs(lab.log)).splitlines()
        assert listed[-1].startswith(run.started.run_id)
        assert listed[-1].endswith("  run-1@1")
        assert not any("@" in line for line in listed[:-1])

    asyncio.run(scenario())


def test_only_the_first_job_of_a_fork_begins_at_the_parents_version(lab: Lab) -> None:
    script = lab.script
    started = script.run_started().model_copy(update={"parent": ForkPoint(run_id="parent", version=4)})
    jobs = [script.job_spec("sft", num_epochs=1), script.job_spec("rl")]
    progress = evolve(Progress("run-1"), started)
    first = lacking(progress, started, jobs)[0]
    for event in (first, script.published(0, "run-1/sft"), script.published(1, "run-1/sft")):
        progress = evolve(progress, event)
    done = {"run_id": "run-1", "time_ms": 5, "job_id": "run-1/sft", "model_group": "run-1/policy"}
    progress = evolve(progress, JobSucceeded(**done, final_version=1))
    second = lacking(progress, started, jobs)[0]
    assert isinstance(first, JobSubmitted)
    assert isinstance(second, JobSubmitted)
    assert first.fork == started.parent
    assert (second.fork, second.base_version) == (None, 1)


def test_a_fork_has_no_warm_start_unless_the_configuration_asks_for_it(lab: Lab) -> None:
    adapter = lab.written["trainer_adapters"]["a"]
    adapter["warm_start"] = {}
    config = lab.loaded.config
    assert [job.job_id for job in jobs_of(config, "r")] == ["r/sft", "r/rl"]
    assert [job.job_id for job in jobs_of(config, "r", is_fork=True)] == ["r/rl"]
    adapter["warm_start"] = {"in_forks": True}
    assert [job.job_id for job in jobs_of(lab.loaded.config, "r", is_fork=True)] == ["r/sft", "r/rl"]


def test_another_model_group_on_the_runs_log_does_not_count_as_its_own_version(script: SimpleNamespace) -> None:
    own = script.published(1, "run-1/rl")
    other = script.published(7, "run-1/b").model_copy(update={"model_group": "run-1/policy-b"})
    progress = Progress("run-1")
    for event in (own, other):
        progress = evolve(progress, event)
    assert progress.weights == own


def test_a_version_of_one_of_several_model_groups_is_named_with_it(lab: Lab) -> None:
    async def scenario() -> None:
        published = await lab.record()
        other = [event.model_copy(update={"model_group": "other/provers"}) for event in published]
        await lab.log.send_all([event.model_copy(update={"run_id": "other"}) for event in other])
        await lab.check("run-1@1")
        await lab.check("other/provers@1")
        assert await lab.refusal("other@1") == (
            "run other has no model group policy; it has provers; name one as other/GROUP@1"
        )
        lab.written["trajectory_builders"]["b"]["agents"] = {"p": "provers", "v": "policy"}
        await lab.check("other/provers@1")
        assert (await lab.refusal("other@1")).startswith("run other has no model group policy")
        groups = {"policy": {"version": "run-1@2"}}
        lab.written["trainer_adapters"]["a"]["model_groups"] = groups
        await lab.check("other@1")
        await check_versions(lab.log, lab.artifacts, lab.loaded.config)
        groups["policy"]["version"] = "run-1@9"
        with pytest.raises(ConfigError, match=r"model_groups\.policy\.version: run-1@9: run run-1 has no version 9"):
            await check_versions(lab.log, lab.artifacts, lab.loaded.config)

    asyncio.run(scenario())
