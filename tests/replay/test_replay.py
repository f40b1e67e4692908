"""Replay comes out equal for what was recorded, and names what was changed."""

import asyncio
import hashlib
import shutil
from typing import Any

import pytest

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.eventlog.reading import unknown_run
from rollstream.learner.progress import Manifest
from rollstream.learner.retrain import RecordedJob
from rollstream.replay import assembly
from rollstream.replay.report import first_field
from rollstream.replay.source import read_run
from rollstream.replay.training import check_libraries, versions_asked
from rollstream.schemas.errors import ArtifactError, ConfigError, DecodeError, ModelError, TruncatedError
from rollstream.schemas.events import BatchPlanned, GroupClosed, RunEnded, WeightsPublished
from tests.rigs.runs.recorded_run import EPOCHS, JOB
from tests.rigs.runs.replay_rig import only_difference, trained, verified
from tests.rigs.steps_rig import RUN as STEPS_RUN
from tests.rigs.steps_rig import attempt, started, tick

# ---- equal ----


def test_every_stage_of_an_untouched_run_is_equal(run):
    report = verified(run)
    assert report.differences == []
    assert report.counts["groups"] == 2 * EPOCHS
    assert report.counts["trajectories"] == 2 * EPOCHS * 4
    assert report.counts["versions"] == report.counts["artifacts"] == EPOCHS + 1
    assert report.counts["checkpoints"] == EPOCHS


def test_one_epoch_is_verified_alone(run):
    report = verified(run, epoch=1)
    assert report.differences == []
    assert report.counts["groups"] == 2


def test_training_again_gives_equal_steps(run):
    report = trained(run)
    assert report.differences == []
    assert report.counts == {"training steps": EPOCHS}


def test_versions_are_trained_again_from_the_checkpoint_below_them(run):
    assert trained(run, first=3, last=3, checkpoints=run.checkpoints).counts == {"training steps": 1}
    assert trained(run, first=2, checkpoints=run.checkpoints).counts == {"training steps": 2}
    assert trained(run, first=2, last=2).counts == {"training steps": 2}, "without checkpoints from the base on"


def test_versions_that_one_process_trained_after_several_need_a_checkpoint_between(run):
    run.change("weights", "step_trained", b'"threads":1', b'"threads":1,"ranks":2')
    assert trained(run, first=2, checkpoints=run.checkpoints).counts == {"training steps": 2}
    with pytest.raises(ConfigError, match=r"version 1 of job .* by 2 processes together.*no checkpoint of version 1"):
        trained(run, first=3)
    with pytest.raises(ConfigError, match=r"version 1 of job .* by 2 processes together.*give --steps A:B from 2 on"):
        trained(run, checkpoints=run.checkpoints)


def test_repeated_records_make_no_difference(run):
    for topic, kind in (("groups", "group_closed"), ("steps", "step_recorded"), ("batches", "batch_planned")):
        records, index = run.find(topic, kind)
        asyncio.run(
            run.log.send_raw(
                topic, key=records[index].key, value=records[index].value, partition=records[index].partition
            )
        )
    assert verified(run).differences == []


def test_an_open_run_is_verified_as_far_as_it_has_come(run):
    run.remove("groups", "run_ended")
    run.remove("batches", "epoch_sealed", -1)
    run.remove("jobs", "job_succeeded")
    assert verified(run).differences == []


# ---- changed ----


def test_a_changed_step_is_found_and_its_attempt_named(run):
    run.change("steps", "step_recorded", b'"uuid":"u2"', b'"uuid":"u3"')
    reported = only_difference(verified(run))
    assert reported.startswith("assembly: group_closed:")
    assert "/m2/a0, whose steps or rewards were changed" in reported


def test_a_changed_reward_is_found_and_its_attempt_named(run):
    run.change("steps", "reward_recorded", b'"value":1.0', b'"value":9.0')
    assert "/m1/a0, whose steps or rewards were changed" in only_difference(verified(run))


def test_a_changed_trajectory_is_found_by_both_replays(run):
    where = run.change("trajectories", "trajectory_assembled", b'"reward":3.0', b'"reward":4.0')
    reported = only_difference(verified(run))
    assert reported.startswith("trajectories: ")
    assert where in reported
    with pytest.raises(DecodeError, match="was changed"):
        trained(run)


def test_a_changed_manifest_is_found_with_both_sides(run):
    run.change("batches", "batch_planned", b'"reward":3.0', b'"reward":2.5')
    reported = only_difference(verified(run))
    assert reported.startswith(f"curate: batch_planned:{JOB}")
    assert "recorded 2.5, replayed 3.0" in reported


def test_a_changed_manifest_gives_other_weights(run):
    run.change("batches", "batch_planned", b'"reward":3.0', b'"reward":2.5')
    reported = only_difference(trained(run))
    assert reported.startswith("training: version 1 (")


def test_a_difference_of_training_without_determinism_has_a_hint_that_bits_may_differ(run):
    run.change("jobs", "job_submitted", b'"device":"cpu"', b'"device":"cpu","deterministic":false')
    assert str(trained(run).differences[0]).startswith("log: job_submitted:"), "the training itself is equal"
    run.change("batches", "batch_planned", b'"reward":3.0', b'"reward":2.5')
    reported = only_difference(trained(run))
    assert reported.startswith("training: version 1 (")
    assert "(trained with model.deterministic: false, so bits may differ)" in reported


def test_a_difference_on_another_device_names_both(run):
    run.change("weights", "step_trained", b'"device":"cpu"', b'"device":"NVIDIA H100"')
    assert trained(run).verdict == "equal"
    run.change("batches", "batch_planned", b'"reward":3.0', b'"reward":2.5')
    reported = only_difference(trained(run))
    assert "(trained on NVIDIA H100, replayed on cpu, so bits may differ)" in reported


def test_a_base_version_that_was_collected_is_named(run, tmp_path):
    """A fork begins with an artifact, not with the model's folder."""
    run.change("jobs", "job_submitted", b'"fork":null', b'"fork":{"run_id":"old","version":1}')
    assert trained(run).counts == {"training steps": EPOCHS}
    run.artifacts = ArtifactStore(str(shutil.copytree(run.artifacts.uri, tmp_path / "store")))
    records, index = run.find("weights", "weights_published")
    base = codec.decode(records[index]).event
    assert isinstance(base, WeightsPublished)
    run.artifacts.remove(base.artifact)
    with pytest.raises(ArtifactError, match=f"artifact {base.artifact.uri}"):
        trained(run)


def test_a_changed_digest_of_a_version_is_found(run):
    records, index = run.find("weights", "step_trained", 1)
    sha256 = records[index].value.split(b'"weights_sha256":"')[1][:64]
    run.change("weights", "step_trained", sha256, hashlib.sha256(b"other").hexdigest().encode())
    assert only_difference(verified(run)).startswith("weights: replayed/policy v2, StepTrained")


def test_an_undecodable_record_without_a_dead_letter_is_found(run):
    where = run.change("steps", "step_recorded", b'"kind"', b'"kin')
    report = verified(run)
    assert any(where in str(one) for one in report.differences)


def test_a_repeated_id_with_other_content_is_ignored_and_counted(run):
    records, index = run.find("groups", "group_closed")
    other = records[index].value.replace(b'"size":4', b'"size":5')
    asyncio.run(run.log.send_raw("groups", key=records[index].key, value=other))
    report = verified(run)
    assert report.differences == []
    assert report.counts["ignored records that repeat an id with other content"] == 1


def test_a_missing_manifest_and_one_that_nothing_asks_for_are_found(run):
    records, index = run.find("batches", "batch_planned", 1)
    name = orjson_id(records[index].value)
    run.change("batches", "batch_planned", name, name[:-1] + b"9")
    reported = "\n".join(map(str, verified(run).differences))
    assert (
        f"batch_planned:{name.decode()} in topic batches partition 0 (it holds offsets 0 to 5): recorded noth"
        in reported
    )
    assert "replayed nothing" in reported


def orjson_id(value):
    return value.split(b'"batch_id":"')[1].split(b'"')[0]


def test_a_flipped_bit_of_a_checkpoint_or_an_artifact_is_found_and_the_file_named(run):
    checkpoint = sorted(run.checkpoints.rglob("*.safetensors"))[0]
    artifact = max((run.folder / "artifacts").rglob("*.safetensors"), key=lambda path: path.stat().st_mtime)
    for path, stage in ((checkpoint, "checkpoints"), (artifact, "weights")):
        kept = path.read_bytes()
        try:
            path.unlink()  # a checkpoint may be the same file under another name
            path.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
            reported = only_difference(verified(run))
            assert reported.startswith(f"{stage}: ")
            assert path.name in reported
        finally:
            path.write_bytes(kept)


def test_weights_are_not_read_into_memory_as_a_whole(run):
    class Streamed(ArtifactStore):
        def read(self, ref, *, max_bytes=None):
            assert not ref.uri.endswith(".safetensors")
            return super().read(ref, max_bytes=max_bytes)

    run.artifacts = Streamed(run.artifacts.uri)
    assert verified(run).counts["artifacts"] == EPOCHS + 1


def test_another_model_than_the_recorded_one_is_refused(run):
    weights = run.model / "model.safetensors"
    kept = weights.read_bytes()
    try:
        weights.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
        with pytest.raises(ModelError, match="is not what job replayed/rl began with"):
            trained(run)
    finally:
        weights.write_bytes(kept)


# ---- refused ----


def test_a_replay_names_offsets_removed_by_retention(run):
    for where, kept in run.log._store._partitions.items():
        if where.topic == "steps" and kept.records:
            del kept.records[:3]
            kept.begin = 3
    with pytest.raises(TruncatedError, match="offset 0 of topic steps partition"):
        verified(run)


def test_other_library_versions_are_refused_and_both_sides_named(run):
    run.change("groups", "run_started", b'"torch":"', b'"torch":"0.')
    events = asyncio.run(read_run(run.log, "replayed"))
    with pytest.raises(ConfigError, match=r"torch 0\..* \(here "):
        check_libraries(events.started)


def test_a_step_or_manifest_missing_in_the_middle_is_a_difference(run):
    for topic, kind in (("weights", "step_trained"), ("batches", "batch_planned")):
        records, index = run.find(topic, kind, 1)
        kept = records[index]
        run.remove(topic, kind, 1)
        assert only_difference(trained(run)).startswith("training: version 2")
        records[index] = kept


def test_answers_to_a_stop_that_are_not_sent_yet_make_no_difference(run):
    run.change("groups", "run_ended", b'"completed"', b'"stopped"')
    for topic, kind in (
        ("groups", "group_closed"),
        ("batches", "batch_planned"),
        ("batches", "epoch_sealed"),
        ("jobs", "job_succeeded"),
        ("jobs", "job_progressed"),
        ("weights", "weights_published"),
        ("weights", "step_trained"),
    ):
        run.remove(topic, kind, -1)
    report = verified(run)
    assert report.differences == []
    assert report.counts["answers to the run's end that are not sent yet"] > 0


def test_an_epoch_is_trained_again_from_the_checkpoint_below_it(run):
    lines = []
    report = trained(run, epoch=1, checkpoints=run.checkpoints, on_progress=lines.append)
    assert (report.verdict, report.counts) == ("equal", {"training steps": 1})
    assert lines[0] == f"job {JOB}: from version 1, to 2"


def of_job(name, first_index_of_epoch):
    """A job that trained a batch in each of those epochs."""
    job_id, group = f"several/{name}", f"several/{name}-group"
    batches = [
        BatchPlanned(
            run_id="several",
            time_ms=1,
            batch_id=f"{job_id}/b{index}",
            job_id=job_id,
            model_group=group,
            epoch=epoch,
            index=index,
            trains_at_version=index,
            yields_version=index + 1,
            members=(),
            seed=1,
            curriculum_sha256="0" * 64,
            previous_sha256="0" * 64,
        )
        for epoch, index in first_index_of_epoch.items()
    ]
    manifests = {batch.index: Manifest(batch, "", 0) for batch in batches}
    steps: Any = {batch.yields_version: None for batch in batches}
    unread: Any = None
    return RecordedJob(unread, unread, manifests, steps)


def test_an_epoch_has_versions_of_its_own_in_each_job():
    provers, verifiers = of_job("provers", {0: 0, 1: 1, 2: 2}), of_job("verifiers", {1: 0, 2: 1})
    found = [versions_asked("several", [provers, verifiers], None, None, epoch) for epoch in range(3)]
    assert found == [[(provers, [1])], [(provers, [2]), (verifiers, [1])], [(provers, [3]), (verifiers, [2])]]
    with pytest.raises(ConfigError, match="trained nothing in epoch 3; give another --epoch"):
        versions_asked("several", [provers, verifiers], None, None, 3)


def test_unknown_runs_and_ranges_are_refused(run):
    with pytest.raises(ConfigError, match="run other does not exist"):
        asyncio.run(read_run(run.log, "other"))
    for bounds in ({"first": 9}, {"last": 4}, {"first": 0}):
        with pytest.raises(ConfigError, match="give 1 to 3"):
            trained(run, **bounds)
    with pytest.raises(ConfigError, match="no group of epoch 9"):
        verified(run, epoch=9)


@pytest.mark.parametrize("unreadable", ["", "groups/0@8 (unknown kind 'x')"])
def test_an_unknown_or_unreadable_run_names_the_removed_records(unreadable):
    assert "no longer has records before offset 7" in str(unknown_run("run-1", 7, unreadable=unreadable))


def test_a_dataset_that_is_gone_is_named(run, tmp_path):
    run.artifacts = ArtifactStore(str(tmp_path))
    with pytest.raises(ArtifactError, match=rf"\.jsonl of store {tmp_path} cannot be read"):
        verified(run)


# ---- parts ----


def test_ranges_cover_the_groups_of_each_partition_and_know_their_dead_letters(run):
    async def go():
        events = await read_run(run.log, "replayed")
        closed = [one.event for one in events.by_topic["groups"] if isinstance(one.event, GroupClosed)]
        return assembly.ranges("replayed", closed, {("steps", 1, 4), ("groups", 0, 1)})

    first, second = asyncio.run(go())
    assert (first.partition, second.partition) == (0, 1)
    assert first.first == second.first == 0
    assert (first.dead, second.dead) == (frozenset(), frozenset({4}))


@pytest.mark.parametrize(("dead", "is_found"), [((), True), ((0,), True), ((4,), False), ((6,), True)])
def test_only_a_dead_letter_within_a_group_excuses_an_attempt_without_a_start(dead, is_found):
    _, *others = attempt()
    log = MemoryLog(num_partitions=1)

    async def go():
        for event in [tick(0), started(size=1), *others, tick(1), tick(2)]:
            await log.send(event, partition=0)
        return await assembly.fold(log, assembly.Range(STEPS_RUN, 0, 0, 8, frozenset(dead)))

    folded = asyncio.run(go())
    missing = [what for what, *_ in folded.differences]
    assert missing == ([f"rollout_started:{others[0].rollout_id}"] if is_found else [])


def test_the_first_field_that_differs_is_named_and_times_are_none():
    one = RunEnded(run_id="r", time_ms=1, cause="completed")
    assert first_field(one, one.model_copy(update={"time_ms": 2})) == ("", "", "")
    assert first_field(one, one.model_copy(update={"cause": "failed"})) == ("cause", "'completed'", "'failed'")
