"""The curate fold: task requests, steering, first occurrences, ends of runs and abandoned ones."""

import pytest

from rollstream.eventlog import codec
from rollstream.eventlog.log import Position, Received
from rollstream.processors.curate import fold as curate
from rollstream.schemas import ids
from rollstream.schemas.errors import ArtifactError
from rollstream.schemas.events import EpochSealed, RunEnded, TaskCancelled, TaskRequested, TrajectoryRejected
from rollstream.schemas.events.training import StepsRange


def test_an_epoch_asks_for_its_tasks(partition):
    tasks = partition.start(tasks_per_epoch=4, num_generations=8, min_generations=3, base_version=2)
    assert [task.group_id for task in tasks] == [f"run-1/rl/e00000/t0000{index}" for index in range(4)]
    assert [task.index for task in tasks] == [0, 1, 2, 3]
    assert len({task.example_id for task in tasks}) == 4
    for task in tasks:
        assert task.inputs == partition.dataset[task.example_id]
        assert task.seed == ids.derive_seed(7, task.group_id)
        assert (task.num_rollouts, task.minimum, task.min_version) == (8, 3, 2)
        assert (task.time_ms, task.purpose, task.settings.environment) == (1_000, "train", "guess_number")


def test_epochs_walk_on_through_the_dataset_and_wrap_around(new_partition):
    partition = new_partition(num_examples=3)
    tasks = partition.start(tasks_per_epoch=5, num_generations=2, num_epochs=2)
    for task in tasks:
        partition.close(task, [0.0, 1.0])
    tasks += partition.start_epoch(1)
    names = [task.example_id for task in tasks]
    assert len(names) == 10
    for start in (0, 3, 6):
        assert sorted(names[start : start + 3]) == sorted(partition.dataset)


def test_an_empty_dataset_seals_empty_epochs(new_partition):
    partition = new_partition(num_examples=0)
    partition.start_run()
    partition.start_job()
    (sealed,) = partition.start_epoch()
    assert (sealed.num_groups, sealed.is_last) == (0, True)


def test_a_missing_dataset_is_an_error_that_names_run_and_artifact(partition):
    partition.start_run()
    partition.start_job()
    partition.datasets.clear()
    with pytest.raises(ArtifactError, match=r"run-1.*memory:dataset"):
        partition.start_epoch()


def test_the_curriculum_requests_the_easiest_and_the_unknown_examples(new_partition):
    partition = new_partition(num_examples=10)
    curriculum = {"enabled": True, "explore_share": 0.0}
    tasks = partition.start(tasks_per_epoch=10, num_generations=2, num_epochs=3, curriculum=curriculum)
    mean = {task.example_id: index / 10 for index, task in enumerate(tasks)}
    for task in tasks[:-1]:
        partition.close(task, [mean[task.example_id] - 0.2, mean[task.example_id] + 0.2])
    partition.close(tasks[9], ())
    easiest = {task.example_id for task in tasks[6:9]}
    unknown = {tasks[9].example_id}
    assert {task.example_id for task in partition.start_epoch(1)} == easiest | unknown


def test_the_percentile_grows_at_the_epochs_that_nat_was_seen_to(new_partition, pick):
    partition = new_partition(num_examples=2)
    partition.start_run()
    partition.start_job(tasks_per_epoch=2, num_generations=2, num_epochs=20, curriculum={"enabled": True})
    for epoch in range(20):
        for task in pick(TaskRequested, partition.start_epoch(epoch)):
            partition.close(task, [0.0, 1.0])
    percentiles = [round(sealed.curriculum_percentile, 9) for sealed in pick(EpochSealed, partition.sent)]
    assert percentiles == [0.3] * 4 + [0.5] * 5 + [0.7] * 5 + [0.9] * 5 + [1.0]


def test_rewards_leave_the_window_with_their_version(new_partition):
    partition = new_partition(num_examples=2)
    curriculum = {"enabled": True, "explore_share": 0.0, "window_versions": 2, "initial_percentile": 0.5}
    tasks = partition.start(tasks_per_epoch=2, num_generations=2, num_epochs=9, curriculum=curriculum)
    high, low = tasks[0].example_id, tasks[1].example_id
    partition.close(tasks[0], [0.6, 1.0])
    partition.close(tasks[1], [0.0, 0.4])
    asked = []
    for epoch in range(1, 4):
        tasks = partition.start_epoch(epoch)
        asked.append({task.example_id for task in tasks})
        for task in tasks:
            partition.close(task, [0.6, 1.0])
    assert asked == [{high}, {high, low}, {min(high, low)}]


def test_the_first_occurrence_of_a_record_counts(partition):
    tasks = partition.start(tasks_per_epoch=2, num_generations=2)
    assert partition.start_epoch() == []
    assert partition.start_run() == []
    assert partition.start_job(tasks_per_epoch=7) == []
    partition.close(tasks[0], [0.0, 1.0])
    assert partition.close(tasks[0], [1.0, 1.0]) == []
    batch, _ = partition.close(tasks[1], [0.0, 1.0])
    assert [member.reward for member in batch.members] == [0.0, 1.0, 0.0, 1.0]
    assert partition.close(tasks[1], [0.0, 1.0]) == []


def test_validation_is_rejected_as_such_and_never_trained(partition):
    (task,) = partition.start(tasks_per_epoch=1, num_generations=2)
    held_out = task.model_copy(update={"group_id": "run-1/rl-validation/e00000/t00000", "purpose": "validation"})
    outputs = partition.close(held_out, [0.0, 1.0])
    assert [event.cause for event in outputs] == ["validation"] * 2
    assert partition.close(held_out, [0.0, 1.0]) == outputs, "the same ids: readers drop them"


def test_a_group_that_nobody_asked_for_is_late(partition):
    (task,) = partition.start(tasks_per_epoch=1, num_generations=2)
    stray = task.model_copy(update={"group_id": "run-1/rl/e00000/t00099"})
    assert [event.cause for event in partition.close(stray, [0.0, 1.0])] == ["late"] * 2


def test_the_end_of_a_run_rejects_what_waits_and_cancels_open_tasks(partition, pick):
    tasks = partition.start(tasks_per_epoch=3, num_generations=2)
    partition.close(tasks[0], [0.0, 1.0])
    outputs = partition.end_run(cause="stopped")
    assert [event.cause for event in pick(TrajectoryRejected, outputs)] == ["run_ended"] * 2
    cancelled = pick(TaskCancelled, outputs)
    assert [(event.group_id, event.cause) for event in cancelled] == [(t.group_id, "run stopped") for t in tasks[1:]]
    assert partition.state.runs == {}
    assert partition.state.low_water == 0
    assert [event.cause for event in partition.close(tasks[1], [0.0, 1.0])] == ["run_ended"] * 2
    assert partition.close(tasks[1], [0.0, 1.0]) == []
    assert partition.close(tasks[0], [0.0, 1.0]) == []
    partition.close(tasks[2], ())
    assert partition.state.low_water is None
    assert partition.start_run() + partition.end_run() == []
    assert partition.state.runs == {}


def test_a_run_without_a_sign_of_life_is_ended_by_the_time_of_anothers_groups(partition, pick):
    tasks = partition.start(tasks_per_epoch=6, num_generations=2)
    partition.start_run("run-2", idle_timeout_s=8.0)
    partition.start_run("run-3", idle_timeout_s=1e9)
    steps = StepsRange(partition=0, first_offset=0, last_offset=0)
    for number, task in enumerate(tasks[:5]):
        outputs = partition.close(task, [0.0, 1.0], time_ms=1_000 + 2_000 * number, steps_at=steps)
        assert pick(RunEnded, outputs) == []
    (ended,) = pick(RunEnded, partition.close(tasks[5], [0.0, 1.0], time_ms=9_001, steps_at=steps))
    assert (ended.run_id, ended.cause, ended.time_ms) == ("run-2", "abandoned", 9_001)
    assert set(partition.state.runs) == {"run-1", "run-3"}


def test_a_what_if_whose_process_was_killed_is_abandoned_like_any_run(partition, pick):
    partition.start_run("busy")
    partition.start_job("busy", tasks_per_epoch=6, num_generations=2)
    tasks = pick(TaskRequested, partition.start_epoch(0, "busy"))
    started = partition.records[0].event
    update = {"run_id": "left", "idle_timeout_s": 8.0, "is_what_if": True}
    partition.write(started.model_copy(update=update))
    steps = StepsRange(partition=0, first_offset=0, last_offset=0)
    ends = [
        pick(RunEnded, partition.close(task, [0.0, 1.0], time_ms=1_000 + 2_000 * number, steps_at=steps))
        for number, task in enumerate(tasks)
    ]
    assert [(end.run_id, end.cause) for found in ends for end in found] == [("left", "abandoned")]
    assert set(partition.state.runs) == {"busy"}


def test_event_times_without_a_steps_partition_abandon_no_run(partition, pick):
    (task,) = partition.start(tasks_per_epoch=1, num_generations=2)
    partition.start_run("run-2", idle_timeout_s=10.0)
    assert pick(RunEnded, partition.close(task, [0.0, 1.0], time_ms=10**9)) == []
    for number in range(10):
        partition.time_ms += 10**9
        assert partition.start_job("run-1", f"other-{number}") == []


def test_two_jobs_of_a_run_go_on_from_one_version_to_the_next(partition):
    partition.start_run()
    plan = {"tasks_per_epoch": 1, "num_generations": 1, "min_generations": 1}
    partition.start_job(name="sft", policy="demonstration", **plan)
    (task,) = partition.start_epoch(name="sft")
    partition.close(task, [1.0])
    partition.start_job(name="rl", base_version=1, tasks_per_epoch=1, num_generations=2)
    (task,) = partition.start_epoch(name="rl")
    assert (task.group_id, task.min_version) == ("run-1/rl/e00000/t00000", 1)
    batch, _ = partition.close(task, [0.0, 1.0])
    assert (batch.index, batch.trains_at_version, batch.previous_sha256) == (0, 1, codec.EMPTY_SHA256)


def test_the_fold_may_begin_at_the_low_water_mark(partition):
    (task,) = partition.start(tasks_per_epoch=1, num_generations=2)
    partition.close(task, [0.0, 1.0])
    partition.start_run("run-2")
    partition.end_run("run-1")
    low_water = partition.state.low_water
    assert low_water == 4
    state = curate.initial()
    for received in partition.records[low_water:]:
        assert curate.evolve(state, received, partition.datasets) == []
    assert state.runs == partition.state.runs


def test_records_of_unknown_runs_answer_nothing(partition):
    event = RunEnded(run_id="gone", time_ms=5, cause="completed")
    received = Received(event, codec.content_digest(event), Position("groups", 0, 0), 0)
    assert curate.evolve(curate.initial(), received, {}) == []
