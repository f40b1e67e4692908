"""Converts closed groups to NAT's trajectories: messages with exact tokens, the reward and a reference to the log.

`read_groups` reads the log; the rest is pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollstream.eventlog import codec
from rollstream.eventlog.log import Position, ReadableLog
from rollstream.eventlog.reading import read_to_end
from rollstream.harness.recorded.from_trajectories import CONTENT_SHA256, REWARDS, text_sha256
from rollstream.schemas import tokens
from rollstream.schemas.base import Locator
from rollstream.schemas.errors import ArtifactError, DecodeError
from rollstream.schemas.events import GroupClosed, StepRecorded, TrajectoryAssembled
from rollstream.schemas.events.rollouts import Completion, TokenSequence
from rollstream.schemas.events.training import MemberRef
from rollstream.schemas.finetuning import EpisodeItem, EpisodeItemRole, Trajectory

Steps = Mapping[int, StepRecorded]
"""Steps of one rollout by index."""
_ROLES = {role.value: role for role in EpisodeItemRole}


async def read_groups(log: ReadableLog, groups: Sequence[GroupClosed]) -> list[list[Trajectory]]:
    """The trajectories of each group, by member; empty for a group without complete members.

    Raises ArtifactError if a trajectory is missing at its locator, TruncatedError if it is no longer retained.
    """
    assembled = await read_assembled(log, groups)
    steps = await read_steps(log, groups)
    found: list[list[Trajectory]] = []
    for group in groups:
        members = zip(group.members, group.locators, strict=True) if group.locators else ()
        found.append(
            [
                trajectory_of(group, member, locator, assembled[member.trajectory_id], steps.get(member.rollout_id, {}))
                for member, locator in members
            ]
        )
    return found


def trajectory_of(
    group: GroupClosed, member: MemberRef, locator: Locator, assembled: TrajectoryAssembled, steps: Steps
) -> Trajectory:
    """One trajectory. `shaped_rewards` has one reward per assistant message; None if no step has a reward."""
    completions = completions_of(assembled.sequences)
    calls = [steps[index] for index in sorted(completions) if index in steps]
    episode = _episode(calls, completions)
    shaped = _by_message(_shaped(assembled.step_rewards, [call.step_index for call in calls]), episode)
    trajectory = Trajectory(
        episode=episode,
        reward=member.reward,
        shaped_rewards=shaped,
        metadata={
            "id": group.example_id,
            "run_id": group.run_id,
            "job_id": group.job_id,
            "epoch": group.epoch,
            "group_id": group.group_id,
            "rollout_id": member.rollout_id,
            "trajectory_id": member.trajectory_id,
            "agent": member.agent,
            REWARDS: dict(assembled.rewards),
            "generation": member.member,
            "digest": member.digest,
            "locator": locator.model_dump(),
            "min_version": member.min_version,
            "max_version": member.max_version,
        },
    )
    assert trajectory.metadata is not None
    trajectory.metadata["content_sha256"] = content_sha256(trajectory)
    return trajectory


def content_sha256(trajectory: Trajectory) -> str:
    """Digest of the training content except the total reward: the episode and the rewards of its steps."""
    episode = [item.model_dump(mode="json") for item in trajectory.episode]
    return codec.canonical_digest([episode, trajectory.shaped_rewards])


def is_as_recorded(trajectory: Trajectory) -> bool:
    """Whether a trajectory refers to the log and equals its record."""
    metadata = trajectory.metadata or {}
    return "trajectory_id" in metadata and metadata.get("content_sha256") == content_sha256(trajectory)


def completions_of(sequences: Sequence[TokenSequence]) -> dict[int, dict[str, Any]]:
    """Token data of each LLM call, by step: ids of prompt and answer, log-probabilities and the kept ids that they are
    of, version spans, finish reason.
    """
    found: dict[int, dict[str, Any]] = {}
    for sequence in sequences:
        ids = list(tokens.decode_ids(sequence.token_ids))
        logprobs = None if sequence.logprobs is None else list(tokens.decode_floats(sequence.logprobs))
        index = 0
        for part in sequence.completions:
            found[part.step_index] = _tokens(part, ids, logprobs, index)
            index += part.length
    return found


def _tokens(part: Completion, ids: list[int], logprobs: list[float] | None, index: int) -> dict[str, Any]:
    end = part.start + part.length
    return {
        "prompt_token_ids": ids[: part.start],
        "token_ids": ids[part.start : end],
        "logprobs": None if logprobs is None else logprobs[index : index + part.length],
        "spans": [span.model_dump() for span in part.spans],
        "finish_reason": part.finish_reason,
    } | ({} if part.kept_ids is None else {"kept_ids": part.kept_ids})


def _episode(calls: Sequence[StepRecorded], completions: Mapping[int, dict[str, Any]]) -> list[EpisodeItem]:
    """Messages in order. Messages that a later call repeats from the conversation so far occur once."""
    items: list[EpisodeItem] = []
    earlier: list[tuple[str, str]] = []
    for call in calls:
        data = call.data or {}
        sent = [message for message in _list(data.get("input")) if isinstance(message, dict)]
        messages = [(str(message.get("role")), _text(message.get("content"))) for message in sent]
        if messages[: len(earlier)] != earlier:
            earlier = []
        items += [_item(message) for message in sent[len(earlier) :]]
        output = _text(data.get("output"))
        metadata = {"step_index": call.step_index, "model_name": call.name, CONTENT_SHA256: text_sha256(output)}
        items.append(
            EpisodeItem(
                role=EpisodeItemRole.ASSISTANT,
                content=output,
                logprobs=completions[call.step_index],
                metadata=metadata,
            )
        )
        earlier = [*messages, ("assistant", output)]
    return items


def _item(message: dict[str, Any]) -> EpisodeItem:
    role = _ROLES.get(str(message.get("role")), EpisodeItemRole.OTHER)
    extra = {key: value for key, value in message.items() if key not in ("role", "content")}
    logprobs = {} if role == EpisodeItemRole.ASSISTANT else None  # part of the initial prompt, not sampled by the model
    return EpisodeItem(role=role, content=_text(message.get("content")), logprobs=logprobs, metadata=extra or None)


def _shaped(step_rewards: Mapping[str, float], calls: Sequence[int]) -> list[float] | None:
    """Rewards by call: a step's reward is added to the last call at or before it, or else to the first."""
    if not step_rewards or not calls:
        return None
    shaped = [0.0] * len(calls)
    for step, value in step_rewards.items():
        index = max((n for n, call in enumerate(calls) if call <= int(step)), default=0)
        shaped[index] += value
    return shaped


def _by_message(by_call: Sequence[float] | None, episode: Sequence[EpisodeItem]) -> list[float] | None:
    """Rewards by assistant message: 0 for those of prompts, which no call sampled."""
    if by_call is None:
        return None
    rewards = iter(by_call)
    answers = [item for item in episode if item.role == EpisodeItemRole.ASSISTANT]
    return [next(rewards) if CONTENT_SHA256 in (item.metadata or {}) else 0.0 for item in answers]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    """Content as one text; the texts of a list of parts are joined."""
    if isinstance(value, list):
        return "".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in value)
    return "" if value is None else str(value)


async def read_assembled(log: ReadableLog, groups: Iterable[GroupClosed]) -> dict[str, TrajectoryAssembled]:
    """The members of groups by trajectory id. Raises ArtifactError, TruncatedError."""
    members = [(member, at) for group in groups for member, at in zip(group.members, group.locators, strict=False)]
    records = await log.fetch([Position("trajectories", at.partition, at.offset) for _, at in members])
    found: dict[str, TrajectoryAssembled] = {}
    for (member, _), record in zip(members, records, strict=True):
        received = codec.decode(record)
        if not isinstance(received.event, TrajectoryAssembled) or received.digest != member.digest:
            raise ArtifactError(
                f"trajectory {member.trajectory_id}: its record differs from its group's record; begin a new run"
            )
        found[member.trajectory_id] = received.event
    return found


async def read_steps(log: ReadableLog, groups: Iterable[GroupClosed]) -> dict[str, dict[int, StepRecorded]]:
    """Steps of the groups' members by rollout and index; the first record of a step counts."""
    rollouts = {member.rollout_id for group in groups for member in group.members}
    ranges = [group.steps_at for group in groups if group.steps_at is not None and group.members]
    offsets = [(at.partition, offset) for at in ranges for offset in (at.first_offset, at.last_offset)]
    found: dict[str, dict[int, StepRecorded]] = {}
    if not offsets:
        return found
    starts = {partition: min(at for of, at in offsets if of == partition) for partition, _ in offsets}
    ends = {partition: max(at for of, at in offsets if of == partition) + 1 for partition, _ in offsets}
    async for record in read_to_end(log, "steps", starts, ends):
        if codec.kind_of(record) != "step_recorded":
            continue
        try:
            event = codec.decode(record).event
        except DecodeError:
            continue
        if isinstance(event, StepRecorded) and event.rollout_id in rollouts:
            found.setdefault(event.rollout_id, {}).setdefault(event.step_index, event)
    return found
