"""A what-if of an exported run, in a log that need not know the run; and the export of a what-if."""

import asyncio
import shutil
from types import SimpleNamespace

import pytest
import yaml

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import TopicPartition
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.harness.cli.main import rollstream
from rollstream.harness.replays.what_if import what_if
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.metrics.sql.result import Result
from rollstream.replay.archive.export import export_run
from rollstream.replay.archive.log import ExportLog, open_export, rebuild_exported
from rollstream.replay.archive.manifest import read_manifest, write_manifest
from rollstream.replay.report import Report, compare_log
from rollstream.replay.source import check_export, of_type, read_run
from rollstream.replay.training import train
from rollstream.replay.verify import verify
from rollstream.replay.what_if.imports import OpenedExport
from rollstream.schemas.errors import ArtifactError, ConfigError, LogError
from rollstream.schemas.events import RunStarted, WeightsPublished
from rollstream.schemas.events.training import ForkPoint
from tests.rigs.runs.recorded_run import EPOCHS, RecordedRun, batches_of, hashes_of

pytestmark = pytest.mark.slow

REWARD = """
def shortness(rollout):
    return -float(len(rollout.messages["agent"][-1]["content"]))
"""
MEMBERS = EPOCHS * 2 * 4


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run, and its export."""
    folder = tmp_path_factory.mktemp("recorded")
    make_tiny_model(folder / "model", seed=0)
    run = asyncio.run(RecordedRun(folder, folder / "model").record())
    export = folder / "export"
    asyncio.run(export_run(run.log, "replayed", export, artifacts=run.artifacts))
    return SimpleNamespace(
        folder=folder,
        model=run.model,
        log=run.log,
        artifacts=run.artifacts,
        checkpoints=run.checkpoints,
        export=export,
    )


@pytest.fixture
def elsewhere(tmp_path):
    """A log and a store that know nothing; another number of partitions."""
    return SimpleNamespace(
        folder=tmp_path,
        log=MemoryLog(num_partitions=3),
        artifacts=ArtifactStore(str(tmp_path / "store")),
        checkpoints=tmp_path / "checkpoints",
    )


def asked(lab, export, changes):
    """Events of the run that a what-if of an export left in a lab."""
    file = lab.folder / "what_if.yaml"
    file.write_text(yaml.safe_dump(changes))

    async def go():
        async with open_export(export) as (log, artifacts):
            events = await read_run(log, "replayed")
            outcome = await what_if(
                lab.log,
                events,
                lab.artifacts,
                file,
                checkpoints=lab.checkpoints,
                on_progress=lambda line: None,
                exported=OpenedExport(log, artifacts),
            )
        return await read_run(lab.log, outcome.run_id)

    return asyncio.run(go())


def num_trajectories(log):
    return sum(asyncio.run(log.end_offsets("trajectories")).values())


async def replayed(log, run_id, artifacts, checkpoints=None):
    """Verified and trained again."""
    events = await read_run(log, run_id)
    report = Report()
    compare_log(events, report)
    report.add(await verify(log, events, artifacts, checkpoints=checkpoints))
    report.add(await train(log, events, artifacts))
    return report


def assert_equal(report):
    assert report.differences == []
    assert report.counts["training steps"] == EPOCHS
    assert report.counts["trajectories"] == MEMBERS
    assert report.counts["artifacts"] == EPOCHS + 1


def test_a_log_that_does_not_know_the_run_has_all_that_its_what_if_needs(recorded, elsewhere, tmp_path):
    export = tmp_path / "export"
    shutil.copytree(recorded.export, export)
    events = asked(elsewhere, export, {})
    before = asyncio.run(read_run(recorded.log, "replayed"))
    assert hashes_of(events) == hashes_of(before)
    assert [batch.members for batch in batches_of(events)] == [batch.members for batch in batches_of(before)]
    assert [batch.locators for batch in batches_of(events)] != [batch.locators for batch in batches_of(before)]
    assert num_trajectories(elsewhere.log) == MEMBERS
    started = events.started
    assert (started.num_partitions, started.parent) == (3, ForkPoint(run_id="replayed", version=0))
    assert (tmp_path / "store" / started.dataset.uri).is_file()
    shutil.rmtree(export)
    assert_equal(asyncio.run(replayed(elsewhere.log, events.run_id, elsewhere.artifacts, elsewhere.checkpoints)))


def test_nothing_of_the_recorded_run_is_begun_where_it_is_not_known(recorded, elsewhere):
    events = asked(elsewhere, recorded.export, {})
    for topic in ("tasks", "steps"):
        assert not any(asyncio.run(elsewhere.log.end_offsets(topic)).values())
    started = [event for event, _ in of_type(events.by_id.values(), RunStarted)]
    published = [event for event, _ in of_type(events.by_id.values(), WeightsPublished)]
    assert [event.run_id for event in started] == [events.run_id]
    assert [event.version for event in published] == [0, 1, 2, 3]
    assert {event.model_group for event in published} == {f"{events.run_id}/policy"}
    with pytest.raises(ConfigError, match="run replayed does not exist"):
        asyncio.run(read_run(elsewhere.log, "replayed"))


def test_trajectories_are_taken_over_once(recorded, elsewhere):
    first = asked(elsewhere, recorded.export, {"finetuning": {"num_epochs": 2}})
    assert num_trajectories(elsewhere.log) == MEMBERS * 2 // EPOCHS
    second = asked(elsewhere, recorded.export, {})
    assert num_trajectories(elsewhere.log) == MEMBERS
    assert [batch.locators for batch in batches_of(second)][:2] == [batch.locators for batch in batches_of(first)]
    assert_equal(asyncio.run(replayed(elsewhere.log, second.run_id, elsewhere.artifacts)))


def test_trajectories_that_retention_removed_are_taken_over_again(recorded, elsewhere):
    asked(elsewhere, recorded.export, {})
    for partition, end in asyncio.run(elsewhere.log.end_offsets("trajectories")).items():
        elsewhere.log.truncate(TopicPartition("trajectories", partition), end - 1 if end else 0)
    events = asked(elsewhere, recorded.export, {})
    num_kept = sum(end > 0 for end in asyncio.run(elsewhere.log.end_offsets("trajectories")).values())
    assert num_trajectories(elsewhere.log) == 2 * MEMBERS - num_kept
    assert_equal(asyncio.run(replayed(elsewhere.log, events.run_id, elsewhere.artifacts)))


def test_a_log_that_has_the_run_is_given_nothing_twice(recorded):
    before = num_trajectories(recorded.log)
    events = asked(recorded, recorded.export, {})
    assert num_trajectories(recorded.log) == before
    known = asyncio.run(read_run(recorded.log, "replayed"))
    assert [batch.locators for batch in batches_of(events)] == [batch.locators for batch in batches_of(known)]


def test_rewards_are_computed_again_for_what_the_export_holds(recorded, elsewhere, monkeypatch):
    (elsewhere.folder / "exported_reward.py").write_text(REWARD)
    monkeypatch.syspath_prepend(elsewhere.folder)
    builder = {"rewards": ["python:exported_reward.shortness"], "reward_weights": {"task": 0.0}}
    events = asked(elsewhere, recorded.export, {"trajectory_builders": {"rollouts": builder}})
    assert [member.reward for member in batches_of(events)[0].members] == [0.0, -1.0, -2.0, -3.0] * 2


class WithAdapters(RecordedRun):
    """The same run with low-rank adapters."""

    def configuration(self):
        """The configuration as written."""
        written = super().configuration()
        written["trainer_adapters"]["learner"]["model"]["lora"] = {"rank": 2, "target_modules": ["q_proj"]}
        return written


def test_adapters_are_trained_above_the_recorded_base_model_only(elsewhere, tmp_path):
    make_tiny_model(tmp_path / "model", seed=0)
    run = asyncio.run(WithAdapters(tmp_path / "recorded", tmp_path / "model").record())
    asyncio.run(export_run(run.log, "replayed", tmp_path / "export", artifacts=run.artifacts))
    shutil.rmtree(tmp_path / "recorded" / "artifacts")
    events = asked(elsewhere, tmp_path / "export", {})
    assert hashes_of(events) == hashes_of(asyncio.run(read_run(run.log, "replayed")))
    assert_equal(asyncio.run(replayed(elsewhere.log, events.run_id, elsewhere.artifacts)))
    shutil.copytree(tmp_path / "model", tmp_path / "moved")
    changes = {"trainer_adapters": {"learner": {"model": {"path": str(tmp_path / "moved")}}}}
    moved = asked(elsewhere, tmp_path / "export", changes)
    assert hashes_of(moved) == hashes_of(events)
    make_tiny_model(tmp_path / "other", seed=1)
    shutil.copyfile(tmp_path / "other" / "model.safetensors", tmp_path / "moved" / "model.safetensors")
    with pytest.raises(ConfigError, match="does not fit: it was trained from base model"):
        asked(elsewhere, tmp_path / "export", changes)
    shutil.copyfile(tmp_path / "other" / "model.safetensors", tmp_path / "model" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"does not fit: it is an adapter of model .* with other weights"):
        asked(elsewhere, tmp_path / "export", {})


def test_the_model_folder_may_lie_elsewhere_where_the_weights_are_full(recorded, elsewhere):
    moved = elsewhere.folder / "moved"
    shutil.copytree(recorded.model, moved)
    events = asked(elsewhere, recorded.export, {"trainer_adapters": {"learner": {"model": {"path": str(moved)}}}})
    assert hashes_of(events) == hashes_of(asyncio.run(read_run(recorded.log, "replayed")))
    assert_equal(asyncio.run(replayed(elsewhere.log, events.run_id, elsewhere.artifacts)))
    with pytest.raises(
        ConfigError, match=r"trainer_adapters\.learner\.model\.path: folder /nowhere/model does not exist"
    ):
        asked(elsewhere, recorded.export, {"trainer_adapters": {"learner": {"model": {"path": "/nowhere/model"}}}})


def test_an_invalid_what_if_is_refused_before_anything_is_written(recorded, elsewhere):
    with pytest.raises(ConfigError, match="num_generations cannot change in a what-if"):
        asked(elsewhere, recorded.export, {"trajectory_builders": {"rollouts": {"num_generations": 8}}})
    with pytest.raises(ConfigError, match="export holds run replayed, not other"):
        check_export(recorded.export, "other")
    assert all(not any(ends.values()) for ends in asyncio.run(all_ends(elsewhere.log)))


async def all_ends(log):
    return [await log.end_offsets(topic) for topic in ("trajectories", "groups", "batches", "jobs", "weights")]


def test_invalid_options_are_refused_before_a_broker_is_started(recorded, elsewhere):
    file = elsewhere.folder / "what_if.yaml"
    file.write_text("{}")
    workspace = elsewhere.folder / "workspace"
    asked = ["--what-if", str(file), "--workspace", str(workspace)]
    kept = ["--export", str(recorded.export)]
    for arguments, reported in (
        (
            ["replayed", *asked, *kept, "--epoch", "1"],
            "replays a whole run, because every epoch continues from the weights",
        ),
        (["replayed", *asked, "--steps", "1:2"], "replays a whole run, because every epoch continues from the weights"),
        (["replayed", *asked, *kept, "--train"], "cannot be combined with --verify or --train"),
        (["other", *asked, *kept], "holds run replayed, not other"),
        (["other", "--verify", *kept], "holds run replayed, not other"),
    ):
        with pytest.raises(ConfigError, match=reported):
            rollstream.main(["replay", *arguments], standalone_mode=False)
    assert not workspace.exists()


def test_a_damaged_export_is_named(recorded, elsewhere, tmp_path):
    export = tmp_path / "damaged"
    shutil.copytree(recorded.export, export)
    file = export / "trajectories.parquet"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(LogError, match=r"trajectories\.parquet was changed since it was exported"):
        asked(elsewhere, export, {})


def test_weights_that_the_export_lacks_are_named(recorded, elsewhere, tmp_path):
    export = tmp_path / "without"
    shutil.copytree(recorded.export, export)
    manifest = read_manifest(export)
    kept = tuple(one.model_copy(update={"file": None}) if "v0" in one.what else one for one in manifest.artifacts)
    write_manifest(export, manifest.model_copy(update={"artifacts": kept}))
    (base,) = (one for one in manifest.artifacts if "v0" in one.what)
    assert base.file is not None
    (export / base.file).unlink()
    with pytest.raises(ArtifactError, match=f"{base.uri} .*cannot be read.*the export {export} does not hold it"):
        asked(elsewhere, export, {})
    assert num_trajectories(elsewhere.log) == 0


def test_versions_without_exported_weights_make_no_difference_without_their_store(recorded):
    store = recorded.folder / "artifacts"

    async def again():
        async with open_export(recorded.export) as (log, artifacts):
            return await replayed(log, "replayed", artifacts)

    store.rename(recorded.folder / "nowhere")
    try:
        report = asyncio.run(again())
    finally:
        (recorded.folder / "nowhere").rename(store)
    assert report.differences == []
    assert (report.counts["artifacts"], report.counts["artifacts gone"]) == (1, EPOCHS)


def test_a_what_if_is_exported_with_the_trajectories_that_it_was_trained_on(recorded, elsewhere, tmp_path):
    for name, lab in (("where the run is", recorded), ("elsewhere", elsewhere)):
        run_id = asked(lab, recorded.export, {}).run_id
        folder = tmp_path / name
        asyncio.run(export_run(lab.log, run_id, folder, artifacts=lab.artifacts, with_weights=True))

        async def again(folder=folder, run_id=run_id):
            async with open_export(folder) as (log, artifacts):
                return await replayed(log, run_id, artifacts)

        assert_equal(asyncio.run(again()))


def test_metrics_of_a_what_ifs_export_do_not_claim_the_parents_rows(recorded, elsewhere, tmp_path):
    run_id = asked(elsewhere, recorded.export, {}).run_id
    asyncio.run(export_run(elsewhere.log, run_id, tmp_path / "again", artifacts=elsewhere.artifacts))
    path = tmp_path / "metrics.duckdb"

    async def make():
        log = ExportLog(tmp_path / "again")
        await log.start()
        await rebuild_exported(log, path)
        await log.close()

    asyncio.run(make())
    assert rows(path, "SELECT run_id, count(*) FROM epoch_summary GROUP BY 1").rows == ((run_id, EPOCHS),)
    assert rows(path, "SELECT * FROM trajectories").rows == ()
    assert rows(path, "SELECT * FROM offsets").rows == ()


def rows(path, sql) -> Result:
    from rollstream.metrics.projection.connection import connect
    from rollstream.metrics.sql.select_only import run_select

    connection = connect(path, read_only=True)
    try:
        return run_select(connection, sql, limit=100)
    finally:
        connection.close()


def test_a_what_if_of_a_what_if_names_the_run_to_ask_for(recorded, elsewhere):
    events = asked(elsewhere, recorded.export, {})
    file = elsewhere.folder / "what_if.yaml"
    with pytest.raises(ConfigError, match="is a what-if and has no rollouts of its own; use run replayed"):
        asyncio.run(
            what_if(
                elsewhere.log,
                events,
                elsewhere.artifacts,
                file,
                checkpoints=elsewhere.checkpoints,
                on_progress=lambda line: None,
            )
        )
