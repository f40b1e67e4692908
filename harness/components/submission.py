"""Turns a collection of trajectories into a submission: references to recorded groups, and newly recorded rollouts.

A group is submitted by reference if all its trajectories match the records of one group on the log, and no group before
it in the collection refers to the same one. Any other group is first written to the log as a whole, so that its
trajectories are compared with each other there too.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_core import to_jsonable_python

from rollstream.eventlog import codec
from rollstream.harness.components import epochs
from rollstream.harness.components.trajectories import is_as_recorded
from rollstream.harness.config.jobs import check_group
from rollstream.harness.recorded.from_trajectories import rollout_of, rollouts_of_items, weights_of
from rollstream.harness.recorded.tasks import RECORDED, all_stored, played_by, tasks_of
from rollstream.harness.runs.run_handle import RunHandle
from rollstream.producers.rollout.rewards import RewardError, finite
from rollstream.producers.traces.spans import json_value
from rollstream.schemas import ids
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import GroupClosed
from rollstream.schemas.events.recorded import RecordedGroup
from rollstream.schemas.events.training import SubmittedGroup
from rollstream.schemas.finetuning import DPOItem, Trajectory, TrajectoryCollection
from rollstream.schemas.settings import EXTERNAL, MAX_REWARD_SUM, RolloutSettings

Group = Sequence[Trajectory]


def with_plain_rewards(collection: TrajectoryCollection) -> TrajectoryCollection:
    """The collection with rewards as Python's floats: components may assign numbers of numpy or torch.

    Raises ConfigError naming group and member for a value that is not a number.
    """
    groups = [
        [_plain(trajectory, f"of group {number}, member {member}") for member, trajectory in enumerate(group)]
        for number, group in enumerate(collection.trajectories)
    ]
    return TrajectoryCollection.model_construct(trajectories=groups, run_id=collection.run_id)


def prepared_groups(collection: TrajectoryCollection) -> tuple[TrajectoryCollection, list[Group]]:
    """The collection with plain rewards, and those of its groups that have trajectories.

    Raises ValueError if none has, ConfigError as `with_plain_rewards`.
    """
    collection = with_plain_rewards(collection)
    groups: list[Group] = [group for group in collection.trajectories if group]
    if not groups:
        raise ValueError(
            "no trajectories to submit: every group is empty; relax the curriculum or the dataset's filter"
        )
    return collection, groups


def _plain(trajectory: Trajectory, location: str) -> Trajectory:
    shaped: Any = trajectory.shaped_rewards
    try:
        reward = _float(location, trajectory.reward)
        if shaped is not None:
            shaped = [_float(f"shaped_rewards[{index}] {location}", value) for index, value in enumerate(shaped)]
    except RewardError as error:
        raise ConfigError(str(error)) from error
    except TypeError as error:
        raise ConfigError(f"shaped_rewards {location} is {shaped!r:.80}; expected a list of numbers") from error
    return trajectory.model_copy(update={"reward": reward, "shaped_rewards": shaped})


def _float(location: str, value: Any) -> float:
    return float(value) if isinstance(value, float) else finite(location, value)


def digest_of(collection: TrajectoryCollection) -> str:
    """Digest of a collection's content. Raises ConfigError naming group, member and key of a value that JSON lacks."""
    try:
        return codec.canonical_digest(collection.model_dump(mode="json"))
    except (TypeError, ValueError, RecursionError) as error:
        found = next(_unwritable(collection), f"a trajectory cannot be recorded: {error}")
        raise ConfigError(f"{found}; give text, numbers, true, false, null, and lists and dicts of these") from error


def _unwritable(collection: TrajectoryCollection) -> Iterator[str]:
    """Values that cannot be written as JSON, and why."""
    for number, group in enumerate(collection.trajectories):
        for member, trajectory in enumerate(group):
            values = {f"metadata[{key!r}]": {key: value} for key, value in (trajectory.metadata or {}).items()}
            for index, item in enumerate(trajectory.episode):
                values |= {f"episode[{index}].{name}": value for name, value in item}
            for key, value in values.items():
                try:
                    codec.canonical_digest(to_jsonable_python(value))
                except (TypeError, ValueError, RecursionError) as error:
                    yield f"group {number}, member {member}: {key} cannot be recorded: {error}"


def epoch_of(handle: RunHandle, groups: Sequence[Group]) -> int:
    """The epoch that was rolled out for these groups; for groups of other builders, the first epoch without a
    submission. Raises ConfigError for groups of several epochs.
    """
    run_id = handle.run.started.run_id
    named = {
        int((trajectory.metadata or {})["epoch"])
        for group in groups
        for trajectory in group
        if names_epoch(trajectory, run_id)
    }
    if len(named) > 1:
        raise ConfigError(
            f"trajectories of several epochs cannot be submitted together; submit each by itself: {sorted(named)}"
        )
    return named.pop() if named else max([epochs.next_epoch(handle) - 1, *handle.job.submitted]) + 1


def names_epoch(trajectory: Trajectory, run_id: str) -> bool:
    """Whether a trajectory's metadata has an epoch of this run; without the run's id, the key is its builder's own."""
    metadata = trajectory.metadata or {}
    return metadata.get("run_id") == run_id and "epoch" in metadata


async def submitted_groups(handle: RunHandle, epoch: int, groups: Sequence[Group]) -> list[SubmittedGroup]:
    """The submission of an unsealed epoch, in the order of the groups.

    Raises ConfigError for a reward that is not a number or too large and for a changed trajectory that names none of
    several agents, RunFailedError if the run is over.
    """
    references = _references(handle, groups)
    written = [group for group, reference in zip(groups, references, strict=True) if reference is None]
    again = iter(await _write(handle, epoch, written))
    submitted: list[SubmittedGroup] = []
    for reference in references:
        submitted += [reference] if reference is not None else next(again)
    return submitted


def num_members(group: Group) -> int:
    """Number of trajectories that a group adds to a manifest: a preference pair adds two."""
    pairs = [sum(isinstance(item, DPOItem) for item in trajectory.episode) for trajectory in group]
    return sum(2 * num or 1 for num in pairs)


def _references(handle: RunHandle, groups: Sequence[Group]) -> list[SubmittedGroup | None]:
    """Groups by reference: of those that refer to one recorded group, the first, because curation plans it once."""
    found: dict[str, SubmittedGroup] = {}
    references = [_reference(handle, group) for group in groups]
    return [one if one is not None and found.setdefault(one.group_id, one) is one else None for one in references]


def _reference(handle: RunHandle, group: Group) -> SubmittedGroup | None:
    """A group by reference; None if it must be written to the log first."""
    for trajectory in group:
        if not abs(trajectory.reward) <= MAX_REWARD_SUM:
            raise ConfigError(
                f"the reward of a trajectory is {trajectory.reward}; expected a number up to {MAX_REWARD_SUM:g}"
            )
    names = {(trajectory.metadata or {}).get("group_id") for trajectory in group}
    if len(names) != 1 or not all(map(is_as_recorded, group)):
        return None
    closed = handle.job.closed.get(str(names.pop()))
    ids = [str((trajectory.metadata or {})["trajectory_id"]) for trajectory in group]
    known = {member.trajectory_id for member in closed.members} if closed is not None else set[str]()
    if closed is None or not known.issuperset(ids) or len(set(ids)) < len(ids):
        return None
    rewards = tuple(trajectory.reward for trajectory in group)
    return SubmittedGroup(group_id=closed.group_id, trajectory_ids=tuple(ids), rewards=rewards)


async def _write(handle: RunHandle, epoch: int, groups: Sequence[Group]) -> list[list[SubmittedGroup]]:
    """Write groups as recorded rollouts, wait until they are closed, and return the submission of each.

    Ids derive from the content, so writing it again is idempotent.
    """
    recorded = [
        _recorded(group, f"g{number}", handle.spec.rollout, demands_logprobs=_demands_logprobs(handle))
        for number, group in enumerate(groups)
    ]
    every = [one for several in recorded for one in several]
    if not every:
        return []
    flat = await handle.during(all_stored(every, handle.artifacts))
    check_group(handle.spec, max(len(one.members) for one in flat), "(all of one group that is submitted)")
    await epochs.start(handle, epoch, 0)
    content = [group.model_dump(mode="json") for group in flat]
    tasks = tasks_of(
        flat,
        run_id=handle.run.started.run_id,
        job_id=handle.spec.job_id,
        epoch=epoch,
        settings=_as_they_come(handle.spec.rollout),
        name=f"{ids.name_of(handle.spec.job_id)}-{codec.canonical_digest(content)[:8]}",
        first_index=len(handle.examples),
        min_version=epochs.newest_planned(handle),
        seed=handle.run.started.seed,
        time_ms=epochs.time_ms(handle),
    )
    await handle.send([task for task in tasks if task.group_id not in handle.job.closed])
    wanted = [task.group_id for task in tasks]
    closed = await epochs.closed(handle, wanted)
    found = iter(closed)
    return [[_of_closed(next(found)) for _ in several] for several in recorded]


def _as_they_come(settings: RolloutSettings) -> RolloutSettings:
    """Settings of rollouts that come with rewards, each for its own agent: they are not scored again, and weighted as
    before.
    """
    played = settings if settings.environment == RECORDED else played_by(settings)
    weights = weights_of(settings.reward_weights)
    given = {"rewards": (), "evaluators": {}, "reward_weights": weights, "missing_score": "unneeded"}
    return played.model_copy(update=given)


def _demands_logprobs(handle: RunHandle) -> bool:
    """Whether the job's loss needs log-probabilities of the sampling policy."""
    return handle.spec.job.kind != EXTERNAL and handle.spec.plan.needs_logprobs


def _recorded(group: Group, name: str, settings: RolloutSettings, *, demands_logprobs: bool) -> list[RecordedGroup]:
    """One recorded group; for preference pairs, one per pair. Raises ConfigError, see `_agent_of`."""
    example_id = next((json_value(str(t.metadata["id"])) for t in group if t.metadata and "id" in t.metadata), name)
    pairs = [pair for trajectory in group if _is_preference(trajectory) for pair in rollouts_of_items(trajectory)]
    found = [RecordedGroup.of(example_id, pair) for pair in pairs]
    rollouts = [
        rollout_of(
            trajectory,
            demands_logprobs=demands_logprobs,
            agent=_agent_of(trajectory, tuple(settings.agents)),
            weights=settings.reward_weights,
        )
        for trajectory in group
        if not _is_preference(trajectory)
    ]
    return [*([RecordedGroup.of(example_id, rollouts)] if rollouts else []), *found]


def _agent_of(trajectory: Trajectory, agents: Sequence[str]) -> str:
    """The agent that a trajectory is compared and trained as; empty for the only one of a run.

    Raises ConfigError if it names none of several.
    """
    agent = (trajectory.metadata or {}).get("agent")
    if len(agents) > 1 and agent not in agents:
        raise ConfigError(
            f"a trajectory's metadata has the agent {agent!r}; the run has several ({', '.join(agents)}), so set "
            "metadata['agent'] to one of them"
        )
    return str(agent) if len(agents) > 1 else ""


def _is_preference(trajectory: Trajectory) -> bool:
    return any(isinstance(item, DPOItem) for item in trajectory.episode)


def _of_closed(group: GroupClosed) -> SubmittedGroup:
    return SubmittedGroup(
        group_id=group.group_id,
        trajectory_ids=tuple(member.trajectory_id for member in group.members),
        rewards=tuple(member.reward for member in group.members),
    )
