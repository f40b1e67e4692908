"""Replay finds records that are gone, by what names them, and fields that no digest of their own covers."""

import asyncio
import shutil
from dataclasses import replace

import orjson
import pytest

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.harness.services.workspace import Workspace
from rollstream.learner.retrain import Retraining
from rollstream.replay.archive.export import export_run
from rollstream.replay.completeness import MAX_MISSING
from rollstream.replay.source import read_run
from rollstream.replay.training import recorded_jobs
from rollstream.schemas import ids
from rollstream.schemas.errors import DecodeError, TopicError, TruncatedError
from rollstream.schemas.events import JobCancelled, LearnerClaimed, WeightsCollected, WeightsLoaded, WeightsPublished
from rollstream.schemas.permissions import Permissions
from tests.rigs.runs import replay_rig
from tests.rigs.runs.recorded_run import EPOCHS, JOB
from tests.rigs.runs.replay_rig import named, trained, verified


@pytest.mark.parametrize(
    ("topic", "kind", "nth", "found"),
    [
        ("jobs", "job_submitted", 0, f"job_submitted:{JOB} in topic jobs partition 0 (it holds offsets 0 to 4)"),
        ("jobs", "job_progressed", 1, f"job_progressed:{JOB}/v2 in topic jobs"),
        ("jobs", "job_succeeded", 0, f"job_succeeded:{JOB} in topic jobs"),
        ("weights", "weights_published", 0, "weights_published:replayed/policy/v0 in topic weights"),
        ("weights", "weights_published", 2, "weights_published:replayed/policy/v2 in topic weights"),
        ("weights", "weights_published", -1, f"weights_published:replayed/policy/v{EPOCHS} in topic weights"),
        ("weights", "step_trained", 0, "step_trained:replayed/policy/v1 in topic weights"),
        ("weights", "step_trained", -1, f"step_trained:replayed/policy/v{EPOCHS} in topic weights"),
        ("weights", "learner_claimed", 0, "learner_claimed:replayed/policy/1 in topic weights"),
        ("tasks", "task_requested", 1, "task_requested:replayed/rl/e0000"),
        ("batches", "batch_planned", -1, f"batch_planned:{JOB}/b00000{EPOCHS - 1} in topic batches"),
    ],
)
def test_a_record_that_is_gone_is_found_by_what_names_it(run, topic, kind, nth, found):
    run.remove(topic, kind, nth)
    differences = list(map(str, named(run).differences))
    assert any(found in difference for difference in differences), differences
    assert all("named by" in difference for difference in differences if "final_version" not in difference)


def cut_off(run, cause, newest):
    """Remove the records that name versions above `newest` from a run that ended by `cause`; its rollouts stay."""
    run.change("groups", "run_ended", b'"completed"', f'"{cause}"'.encode())
    run.remove("jobs", "job_succeeded")
    for topic, kind in (("weights", "step_trained"), ("weights", "weights_published"), ("jobs", "job_progressed")):
        for nth in reversed(range(EPOCHS + (kind == "weights_published"))):
            records, index = run.find(topic, kind, nth)
            if orjson.loads(records[index].value)["version"] > newest:
                run.remove(topic, kind, nth)


@pytest.mark.parametrize(("cause", "newest"), [("stopped", 1), ("abandoned", 1), ("failed", 0), ("failed", -1)])
def test_versions_that_tokens_were_sampled_with_are_found_in_a_run_that_no_job_completed(run, cause, newest):
    cut_off(run, cause, newest)
    gone = [f"weights_published:replayed/policy/v{version} " for version in range(newest + 1, EPOCHS)]
    differences = list(map(str, named(run).differences))
    for name in gone:
        assert any(name in one and "named by group_closed:" in one for one in differences) or "v0" in name, differences
        assert any(name in one for one in differences)
    assert any("named by step_recorded:" in str(one) for one in verified(run).differences)


def test_a_version_that_an_engine_has_loaded_is_found(run):
    cut_off(run, "stopped", EPOCHS - 1)
    assert named(run).differences == []
    loaded = WeightsLoaded(run_id="replayed", time_ms=1, model_group="replayed/policy", version=EPOCHS, engine="e")
    asyncio.run(run.log.send(loaded))
    assert f"weights_published:replayed/policy/v{EPOCHS} " in "".join(str(one) for one in named(run).differences)


def test_a_claim_that_is_gone_is_found_beside_that_of_another_model_group(run):
    run.remove("weights", "learner_claimed")
    other = LearnerClaimed(run_id="replayed", time_ms=1, model_group="replayed/other", term=1, learner="l")
    asyncio.run(run.log.send(other))
    assert "learner_claimed:replayed/policy/1 " in "".join(str(one) for one in named(run).differences)


def test_checkpoints_whose_versions_are_gone_are_found(run):
    cut_off(run, "stopped", 1)
    found = [str(one) for one in verified(run).differences if one.stage == "checkpoints"]
    assert len(found) == 1
    assert f"step_trained:replayed/policy/v{EPOCHS}, named by" in found[0]


def test_a_checkpoint_that_was_never_published_is_counted_and_no_difference(run):
    cut_off(run, "stopped", EPOCHS - 1)
    report = verified(run)
    assert report.differences == []
    assert report.counts["checkpoints that the log does not have yet"] == 1


def test_a_changed_number_names_no_end_of_missing_records(run):
    run.change("jobs", "job_succeeded", b'"final_version":3', b'"final_version":3000000000000')
    assert len(named(run).differences) <= 2 * MAX_MISSING


@pytest.mark.parametrize(("topic", "kind"), [("steps", "rollout_started"), ("groups", "run_ended")])
def test_a_start_and_an_end_that_are_gone_are_found(run, topic, kind):
    if kind == "run_ended":
        asyncio.run(run.log.send(JobCancelled(run_id="replayed", time_ms=1, job_id=JOB, model_group="replayed/policy")))
    run.remove(topic, kind)
    assert f"{kind}:replayed" in replay_rig.only_difference(verified(run))


@pytest.mark.parametrize("kind", ["step_trained", "weights_published"])
def test_all_of_a_kind_that_are_gone_are_found(run, kind):
    for _ in range(EPOCHS):
        run.remove("weights", kind, -1)
    assert sum(f"{kind}:" in str(one) for one in named(run).differences) >= EPOCHS


@pytest.mark.parametrize(
    ("topic", "kind", "old", "new", "found"),
    [
        ("groups", "run_started", b'"output_dir"', b'"output_dis"', "run_started:replayed, named by job_submitted:"),
        ("jobs", "job_submitted", b'"keep_last":8', b'"keep_last":9', "job_submitted:replayed/rl, named by job_start"),
        ("jobs", "job_succeeded", b'"final_version":3', b'"final_version":2', "final_version: recorded 2, replayed 3"),
        ("steps", "rollout_ended", b'"stop_reason":"done"', b'"stop_reason":"gone"', "attempts.0.stop_reason"),
        ("steps", "group_started", b'"timeout_ms":', b'"timeout_ms":1', ": timeout_ms: recorded 1"),
    ],
)
def test_a_changed_field_that_no_digest_of_its_own_covers_is_found(run, topic, kind, old, new, found):
    run.change(topic, kind, old, new)
    differences = list(map(str, verified(run).differences))
    assert any(found in difference for difference in differences), differences


def test_a_changed_seed_of_an_attempt_is_found(run):
    seed = ids.member_seed(ids.derive_seed(5, ids.group_id("replayed", "rl", 0, 0)), 0)
    position = run.change("steps", "rollout_started", f'"seed":{seed}'.encode(), b'"seed":77')
    assert f"/m0/a0 at {position}: seed: recorded 77, replayed {seed}" in replay_rig.only_difference(verified(run))


@pytest.mark.parametrize(("topic", "kind"), [("groups", "group_closed"), ("batches", "batch_planned")])
def test_a_locator_that_is_gone_is_found(run, topic, kind):
    records, index = run.find(topic, kind)
    event = orjson.loads(records[index].value)
    event["locators"] = event["locators"][:-1]
    records[index] = replace(records[index], value=orjson.dumps(event))
    assert any(
        str(one).endswith("locators: recorded 3, replayed 4 members") or "locators: recorded 7" in str(one)
        for one in named(run).differences
    )


def test_steps_that_end_before_what_a_group_names_are_a_cut_topic(run):
    (partition, kept) = next(
        (where.partition, kept)
        for where, kept in run.log._store._partitions.items()
        if where.topic == "steps" and len(kept.records) > 5
    )
    del kept.records[-5:]
    with pytest.raises(TruncatedError, match=rf"topic steps partition {partition} is not kept.*truncated at its end"):
        verified(run)


def swap_members(run, nth=0):
    records, index = run.find("batches", "batch_planned", nth)
    event = orjson.loads(records[index].value)
    for name in ("members", "locators"):
        event[name][0], event[name][1] = event[name][1], event[name][0]
    records[index] = replace(records[index], value=orjson.dumps(event))


@pytest.mark.parametrize("kind", ["group_closed", "batch_planned"])
def test_a_locator_in_a_partition_that_does_not_exist_is_a_missing_trajectory(run, tmp_path, kind):
    change_first(run, kind, lambda event: event["locators"][0].update(partition=7))
    found = [str(one) for one in verified(run).differences]
    assert any("at trajectories/7@" in one and one.endswith("replayed nothing") for one in found), found
    if kind == "group_closed":
        with pytest.raises(TopicError, match=r"partition trajectories/7 does not exist: topic trajectories has 2"):
            asyncio.run(export_run(run.log, "replayed", tmp_path / "export", artifacts=run.artifacts))


def test_steps_in_a_partition_that_does_not_exist_are_an_error_that_names_it(run):
    change_first(run, "group_closed", lambda event: event["steps_at"].update(partition=7))
    with pytest.raises(TopicError, match=r"partition steps/7 does not exist"):
        verified(run)


def change_first(run, kind, change):
    records, index = run.find("groups" if kind == "group_closed" else "batches", kind)
    event = orjson.loads(records[index].value)
    change(event)
    records[index] = replace(records[index], value=orjson.dumps(event))


def test_members_and_locators_that_were_swapped_together_are_found(run):
    swap_members(run)
    assert any("batch_planned:" in str(one) and "named by step_trained" in str(one) for one in trained(run).differences)


def test_swapped_members_break_the_chain_of_a_run_whose_steps_name_no_manifest(run):
    swap_members(run)
    for nth in range(EPOCHS):
        records, index = run.find("weights", "step_trained", nth)
        event = orjson.loads(records[index].value)
        event["manifest_sha256"] = ""
        event["metrics"] = {}
        records[index] = replace(records[index], value=orjson.dumps(event))
    with pytest.raises(DecodeError, match="the chain of manifests is broken"):
        asyncio.run(all_steps(run))


async def all_steps(run):
    (job,) = recorded_jobs(await read_run(run.log, "replayed"))
    retraining = Retraining(job, threads=1, permissions=Permissions.of([f"model:{run.model}"], {}))
    retraining.begin(run.artifacts, None, version=0)
    return [both async for both in retraining.steps(run.log, until=EPOCHS)]


def test_a_swap_in_the_last_manifest_is_found_by_its_step(run):
    swap_members(run, -1)
    assert any("batch_planned:" in str(one) and "named by step_trained" in str(one) for one in named(run).differences)


def test_artifacts_that_were_removed_by_hand_are_found(run, tmp_path):
    run.artifacts = ArtifactStore(str(shutil.copytree(run.artifacts.uri, tmp_path / "store")))
    for path in (tmp_path / "store").rglob("*.safetensors"):
        path.unlink()
    differences = [str(one) for one in verified(run).differences]
    assert len(differences) == EPOCHS + 1
    assert all("the file is gone, and no collection removes it" in one for one in differences)


def test_an_artifact_that_is_collected_while_a_replay_verifies_is_not_missed(run, tmp_path):
    run.artifacts = ArtifactStore(str(shutil.copytree(run.artifacts.uri, tmp_path / "store")))

    def collect(stage):
        """Collect a version when the log was read, as a learner that goes on does."""
        if stage != "weights and checkpoints":
            return
        records, index = run.find("weights", "weights_published", -1)
        published = WeightsPublished.model_validate_json(records[index].value)
        one = {"versions": (EPOCHS,), "weights_sha256": (published.weights_sha256,), "artifacts": (published.artifact,)}
        collected = WeightsCollected(run_id="replayed", time_ms=1, model_group="replayed/policy", by="l", **one)
        encoded = codec.encode(collected)
        run.log._append(encoded.topic, encoded.key, encoded.value, encoded.headers, None)
        (tmp_path / "store" / published.artifact.uri).unlink()

    report = verified(run, on_progress=collect)
    assert report.differences == []
    assert report.counts["artifacts collected"] == 1


def test_checkpoints_that_were_removed_by_hand_are_found_where_the_run_was_trained(run, tmp_path):
    run.checkpoints = tmp_path
    assert verified(run).differences == []
    (found,) = verified(run, has_checkpoints=True).differences
    run.change("groups", "run_ended", b'"completed"', b'"stopped"')
    run.remove("jobs", "job_succeeded")
    assert verified(run, has_checkpoints=True).differences == [found]
    assert str(found).endswith(f"recorded checkpoints up to v{EPOCHS}, replayed nothing")


@pytest.mark.parametrize("version", range(1, EPOCHS + 1))
def test_a_single_checkpoint_that_was_removed_by_hand_is_found(run, tmp_path, version):
    shutil.copytree(run.checkpoints, tmp_path / "kept")
    run.checkpoints = tmp_path / "kept"
    assert verified(run, has_checkpoints=True).differences == []
    (path,) = run.checkpoints.glob(f"*/v{version:08d}.*.safetensors")
    path.unlink()
    (found,) = verified(run, has_checkpoints=True).differences
    assert f"recorded the checkpoint of v{version}, replayed nothing" in str(found)


def test_a_checkpoints_weights_that_were_removed_by_hand_are_found(run, tmp_path):
    shutil.copytree(run.checkpoints, tmp_path / "kept")
    run.checkpoints = tmp_path / "kept"
    (path,) = run.checkpoints.glob("*/v00000001.*.weights")
    path.unlink()
    assert [one.stage for one in verified(run, has_checkpoints=True).differences] == ["checkpoints"]


def test_checkpoints_that_pruning_removes_are_not_missed(run, tmp_path):
    shutil.copytree(run.checkpoints, tmp_path / "kept")
    run.checkpoints = tmp_path / "kept"
    digest = run.change("jobs", "job_submitted", b'"keep_last":8', b'"keep_last":1')
    assert digest
    (path,) = run.checkpoints.glob("*/v00000001.*.safetensors")
    path.unlink()
    assert not [one for one in verified(run, has_checkpoints=True).differences if one.stage == "checkpoints"]


def test_a_workspace_remembers_the_runs_that_were_trained_in_it(tmp_path):
    layout = Workspace(tmp_path)
    assert not layout.has_trained("a")
    layout.remember_broker("kafka:9092")
    layout.remember_trained("a")
    layout.remember_trained("a")
    assert (layout.has_trained("a"), layout.has_trained("b")) == (True, False)
    layout.remember_broker("embedded")
    assert layout.has_trained("b")
