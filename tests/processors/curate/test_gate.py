"""The evaluation gate in curation: which version a validation judges, and what replaces one that fails."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rollstream.eventlog import codec
from rollstream.processors.curate import fold as curate
from rollstream.schemas import ids
from rollstream.schemas.events import BatchPlanned, TaskRequested, TrajectoryRejected, VersionJudged
from rollstream.schemas.settings import GateSettings
from tests.processors.conftest import task_of

PLAN = {"tasks_per_epoch": 1, "num_generations": 2, "num_epochs": 9, "drop_zero_variance": False}


class Gated:
    """A run of one batch an epoch whose job has a gate."""

    def __init__(self, partition, pick, make_closed, make_member, revision=2, **gate):
        self.partition, self.pick = partition, pick
        self.make_closed, self.make_member = make_closed, make_member
        partition.start_run()
        partition.start_job(gate=gate or None, **PLAN | {"revision": revision})
        self.task = None

    def groups(self, epoch, rewards, *, version, asked="abcd1234"):
        """Closed groups of the validation before an epoch; a reward of None: no rollout is complete."""
        found = []
        for index, reward in enumerate(rewards):
            name = ids.validation_group_id("run-1", "rl", epoch, asked, index)
            members = () if reward is None else (self.make_member(name, 0, reward, version=version),)
            task = task_of("run-1", epoch, index, num_rollouts=1).model_copy(update={"group_id": name})
            found.append(self.make_closed(task, (), members=members, purpose="validation"))
        return found

    def validate(self, epoch, rewards, *, version):
        """The events sent when the epoch begins after its validation."""
        for event in self.groups(epoch, rewards, version=version):
            assert all(isinstance(sent, TrajectoryRejected) for sent in self.partition.write(event))
        sent = self.partition.start_epoch(epoch)
        (self.task,) = self.pick(TaskRequested, sent)
        return sent

    def train(self):
        """The manifest of the epoch."""
        (batch,) = self.pick(BatchPlanned, self.partition.close(self.task, [0.0, 1.0]))
        return batch


@pytest.fixture
def gated(partition, pick, make_closed, make_member):
    return lambda **gate: Gated(partition, pick, make_closed, make_member, **gate)


def test_a_version_that_fails_is_replaced_before_a_task_waits_for_it(gated, pick):
    run = gated(min_reward=0.5)
    (judged,) = pick(VersionJudged, run.validate(0, [0.5, 1.0], version=0))
    assert (judged.version, judged.reward, judged.is_good, judged.good_version) == (0, 0.75, True, 0)
    assert run.train().yields_version == 1
    judged, batch, task = run.validate(1, [0.25, 0.5], version=1)
    assert (judged.epoch, judged.version, judged.reward, judged.num_groups) == (1, 1, 0.375, 2)
    assert (judged.is_good, judged.good_version, judged.best_reward) == (False, 0, 0.75)
    assert (batch.trains_at_version, batch.yields_version, batch.adopts) == (1, 2, 0)
    assert task.min_version == 2
    assert run.train().yields_version == 3
    judged, batch, task = run.validate(2, [0.0, 0.0], version=3)
    assert (batch.adopts, batch.yields_version, task.min_version) == (2, 4, 4)  # version 2 has version 0's weights


def test_nothing_is_adopted_before_a_version_has_passed(gated, pick):
    run = gated(min_reward=0.5)
    judged, task = run.validate(0, [0.0], version=0)
    assert (judged.is_good, judged.good_version, judged.best_reward, task.min_version) == (False, None, None, 0)
    run.train()
    judged, task = run.validate(1, [0.4], version=1)
    assert (judged.is_good, task.min_version) == (False, 1)
    run.train()
    judged, task = run.validate(2, [0.6], version=2)
    assert (judged.is_good, judged.good_version) == (True, 2)


def test_a_drop_counts_from_the_best_validation(gated, pick):
    run = gated(max_drop=0.25)
    verdicts = []
    for epoch, reward in enumerate([0.5, 0.75, 0.5, 0.625, 0.375]):
        version = run.partition.state.runs["run-1"].jobs["run-1/rl"].next_version
        (judged,) = pick(VersionJudged, run.validate(epoch, [reward], version=version))
        verdicts.append((judged.is_good, judged.best_reward))
        run.train()
    assert verdicts == [(True, 0.5), (True, 0.75), (True, 0.75), (True, 0.75), (False, 0.75)]


def test_a_validation_without_a_scored_rollout_judges_nothing(gated, pick):
    run = gated(min_reward=0.5)
    assert pick(VersionJudged, run.validate(0, [None, None], version=0)) == []
    run.train()
    (judged,) = pick(VersionJudged, run.validate(1, [None, 1.0], version=1))
    assert (judged.reward, judged.num_groups) == (1.0, 1)


def test_a_validation_that_a_rollback_overtook_judges_nothing(gated, pick):
    run = gated(min_reward=0.5)
    run.validate(0, [1.0], version=0)
    run.train()
    for event in run.groups(1, [0.0, 0.0], version=1):
        run.partition.write(event)
    run.partition.roll_back(0)
    (task,) = run.partition.start_epoch(1)
    assert task.min_version == 2


def test_a_job_without_a_gate_judges_nothing_and_remembers_nothing(gated, pick):
    run = gated()
    assert pick(VersionJudged, run.validate(0, [0.0], version=0)) == []
    assert run.partition.state.runs["run-1"].jobs["run-1/rl"].validations == {}


def test_a_repeated_closing_of_an_earlier_validation_changes_nothing(gated, pick):
    run = gated(min_reward=0.5)
    run.validate(0, [1.0], version=0)
    run.train()
    current, earlier = run.groups(1, [0.0, 1.0], version=1), run.groups(0, [1.0], version=0)
    for event in (current[0], earlier[0], current[0], current[1]):
        run.partition.write(event)
    judged = run.partition.start_epoch(1)[0]
    assert (judged.reward, judged.num_groups) == (0.5, 2)


def test_a_validation_that_is_asked_for_again_with_other_examples_is_judged_by_these(gated):
    run = gated(min_reward=0.5)
    for event in (*run.groups(0, [0.0], version=0), *run.groups(0, [1.0, 1.0], version=0, asked="00000000")):
        run.partition.write(event)
    judged = run.partition.start_epoch(0)[0]
    assert (judged.reward, judged.num_groups) == (1.0, 2)


@pytest.mark.parametrize(("revision", "judged"), [(2, (0.25, 4)), (1, (1.0, 1))])
def test_groups_of_a_validation_that_was_given_up_are_not_counted_and_reset_nothing(gated, revision, judged):
    run = gated(min_reward=0.5, revision=revision)
    given_up = run.groups(0, [1.0, 1.0, 1.0], version=0, asked="00000000")
    current = run.groups(0, [0.0, 0.0, 0.0, 1.0], version=0)
    for event in (given_up[0], *current[:3], given_up[1], current[3]):
        run.partition.write(event)
    found = run.partition.start_epoch(0)[0]
    assert (found.reward, found.num_groups) == judged


def test_a_validation_that_was_given_up_before_any_group_closed_is_not_judged(gated):
    run = gated(min_reward=0.5)
    given_up = run.groups(0, [1.0], version=0, asked="00000000")
    current = run.groups(0, [0.0, 0.0, 0.0, 1.0], version=0)
    for event in (current[0], *given_up, *current[1:], *given_up):
        run.partition.write(event)
    found = run.partition.start_epoch(0)[0]
    assert (found.reward, found.num_groups) == (0.25, 4)


@pytest.mark.parametrize(("revision", "judged"), [(3, (0.25, True, 2)), (2, (0.0, False, 1))])
def test_a_rollout_without_a_sampled_token_counts_by_its_reward_but_has_no_version(gated, pick, revision, judged):
    run = gated(min_reward=0.25, revision=revision)
    run.validate(0, [None], version=0)
    run.train()
    played, silent = run.groups(1, [0.0, 0.5], version=1)
    won = silent.members[0].model_copy(update={"num_completion_tokens": 0, "min_version": 0, "max_version": 0})
    for event in (played, silent.model_copy(update={"members": (won,)})):
        run.partition.write(event)
    (found,) = pick(VersionJudged, run.partition.start_epoch(1))
    assert (found.reward, found.is_good, found.num_groups) == judged


@pytest.mark.parametrize("revision", [2, 3])
def test_a_validation_in_which_no_token_was_sampled_judges_nothing(gated, pick, revision):
    run = gated(min_reward=0.5, revision=revision)
    (silent,) = run.groups(0, [1.0], version=0)
    member = silent.members[0].model_copy(update={"num_completion_tokens": 0})
    run.partition.write(silent.model_copy(update={"members": (member,)}))
    assert pick(VersionJudged, run.partition.start_epoch(0)) == []


@pytest.mark.parametrize("values", [{}, {"max_drop": -1.0}, {"min_reward": float("nan")}, {"threshold": 1.0}])
def test_a_gate_needs_a_limit(values):
    with pytest.raises(ValidationError):
        GateSettings(**values)


@settings(max_examples=60)
@given(
    rewards=st.lists(st.sampled_from([None, 0.0, 0.1, 0.5, 1.0]), min_size=1, max_size=5),
    order=st.randoms(use_true_random=False),
    split=st.integers(0, 30),
)
def test_any_order_repeats_and_a_refold_give_the_same_judgement(
    rewards, order, split, new_partition, pick, make_closed, make_member
):
    digests = set()
    for is_disturbed in (False, True):
        run = Gated(new_partition(), pick, make_closed, make_member, min_reward=0.4, max_drop=0.3)
        run.validate(0, [1.0], version=0)
        run.train()
        events = run.groups(1, rewards, version=1)
        if is_disturbed:
            events += [*events[:2], *run.groups(0, [0.0], version=0)]
            order.shuffle(events)
        for event in events:
            run.partition.write(event)
        sent = run.partition.start_epoch(1)
        digests.add(tuple(codec.content_digest(event) for event in sent))
        again, last = curate.initial(), []
        for number, received in enumerate(run.partition.records):
            if number == split:  # a new owner folds the partition again from its low-water mark
                again = curate.initial()
                for before in run.partition.records[:number]:
                    curate.evolve(again, before, run.partition.datasets)
            last = curate.evolve(again, received, run.partition.datasets)
        assert [codec.content_digest(event) for event in last] == [codec.content_digest(event) for event in sent]
    assert len(digests) == 1
