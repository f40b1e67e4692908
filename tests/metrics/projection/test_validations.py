"""The view `validations`, and the versions that it and the view `groups` say that rollouts were sampled with."""

from pathlib import Path

from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.events import GroupClosed
from rollstream.schemas.events.training import MemberRef
from tests.metrics.conftest import answers

RUN = "run-1"


def member(group_id: str, number: int, reward: float, version: int) -> MemberRef:
    """A trajectory; with version 0 one without a sampled token."""
    rollout = ids.rollout_id(group_id, number, 0)
    return MemberRef(
        trajectory_id=ids.trajectory_id(rollout, "agent"),
        rollout_id=rollout,
        agent="agent",
        member=number,
        digest="0" * 64,
        reward=reward,
        num_tokens=5,
        num_completion_tokens=2 if version else 0,
        min_version=version,
        max_version=version,
    )


def closed(
    group_id: str, epoch: int, index: int, *, reward: float = 0.0, versions: tuple[int, ...] = (7, 8)
) -> GroupClosed:
    return GroupClosed(
        run_id=RUN,
        time_ms=1,
        group_id=group_id,
        example_id=f"x{index}",
        job_id=f"{RUN}/rl",
        epoch=epoch,
        index=index,
        purpose="validation" if ids.is_validation(group_id) else "train",
        reason="complete",
        is_viable=True,
        size=2,
        members=tuple(member(group_id, number, reward, version) for number, version in enumerate(versions)),
    )


def validated(epoch: int, asked: str, reward: float, num: int, versions: tuple[int, ...] = (7, 8)) -> list[Event]:
    names = [ids.validation_group_id(RUN, "rl", epoch, asked, index) for index in range(num)]
    return [closed(name, epoch, index, reward=reward, versions=versions) for index, name in enumerate(names)]


def test_the_versions_of_a_group_and_of_a_validation_are_those_of_sampled_tokens(tmp_path: Path) -> None:
    groups = [ids.group_id(RUN, "rl", 0, index) for index in range(2)]
    made = [
        closed(groups[0], 0, 0, versions=(0, 7, 8)),
        closed(groups[1], 0, 1, versions=(0, 0)),
        *validated(0, "aaaaaaaa", 0.5, 1, (0, 8)),
        *validated(1, "aaaaaaaa", 0.5, 1, (0, 0)),
    ]
    versions, validations = answers(
        tmp_path,
        made,
        "SELECT min_version, max_version, num_members FROM groups WHERE purpose = 'train' ORDER BY group_id",
        "SELECT epoch, version, num_trajectories FROM validations ORDER BY epoch",
    )
    assert versions == [(7, 8, 3), (None, None, 2)]
    assert validations == [(0, 8, 2), (1, None, 2)]


def test_of_two_validations_of_an_epoch_the_newest_counts(tmp_path: Path) -> None:
    """They ask different examples if the configuration changed before the run was resumed."""
    made = [
        *validated(1, "bbbbbbbb", 0.0, 3),
        *validated(0, "aaaaaaaa", 0.25, 2),
        *validated(1, "aaaaaaaa", 1.0, 2),
        closed(ids.group_id(RUN, "rl", 1, 0), 1, 0),
    ]
    (found,) = answers(
        tmp_path, made, "SELECT epoch, groups, num_trajectories, avg_reward, reward_std FROM validations ORDER BY epoch"
    )
    assert found == [(0, 2, 4, 0.25, 0.0), (1, 2, 4, 1.0, 0.0)]
