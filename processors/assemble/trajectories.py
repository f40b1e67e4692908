"""Builds the trajectories of a complete attempt: sequences, weighted rewards, and the references in GroupClosed."""

import math
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from operator import attrgetter
from typing import NamedTuple, cast

from rollstream.eventlog import codec
from rollstream.eventlog.log import Encoded
from rollstream.processors.assemble.bounds import check_trajectory
from rollstream.processors.assemble.sequences import dead_branches, join_calls
from rollstream.processors.assemble.state import Assembled, Attempt, Call
from rollstream.schemas import ids, tokens
from rollstream.schemas.base import validator_of
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events.rollouts import (
    GroupStarted,
    RewardRecorded,
    RolloutEnded,
    TrajectoryAssembled,
)
from rollstream.schemas.events.training import MemberRef
from rollstream.schemas.revisions import FINISH_REASONS_SINCE
from rollstream.schemas.settings import MAX_REWARD_SUM

_BY_REWARD = attrgetter("reward_index")
_member = validator_of(MemberRef)


class RewardSums(NamedTuple):
    """Rewards of one agent."""

    total: float
    """Weighted sum over all of them."""
    by_name: dict[str, float]
    """Unweighted sums."""
    by_step: dict[str, float]
    """Weighted sums of those recorded for a step, by step index as text."""
    scores: dict[str, float]
    """The same of what only compares a step with others, and is in none of the sums above."""


def assemble(started: GroupStarted, attempt: Attempt, ended: RolloutEnded) -> Assembled:
    """Trajectories of a complete attempt by agent name, one per agent.

    Raises DecodeError if its tokens are inconsistent. Agents without a model group are left out if the task assigns
    model groups. An attempt without any agent yields an empty trajectory for every agent of the task, so that the
    ledger records it.
    """
    rewards = sorted(attempt.scores, key=_BY_REWARD)
    trajectories: list[dict[str, object]] = []
    num_tokens = 0
    for agent in agents_of(started, attempt.calls):
        calls = sorted(attempt.calls[agent])
        sums = sum_rewards(rewards, agent, started.reward_weights)
        keep_finish_reasons = started.revision >= FINISH_REASONS_SINCE
        sequences = join_calls(calls, keep_finish_reasons=keep_finish_reasons)
        dead = dead_branches(calls, started.revision) if started.drop_dead_branches else None
        if dead:
            sequences = join_calls(calls, keep_finish_reasons=keep_finish_reasons, without=dead)
        num_tokens += sum([tokens.count(sequence.token_ids) for sequence in sequences])
        fields: dict[str, object] = {
            "run_id": started.run_id,
            "time_ms": ended.time_ms,
            "group_id": started.group_id,
            "rollout_id": attempt.rollout_id,
            "trajectory_id": ids.trajectory_id(attempt.rollout_id, agent),
            "agent": agent,
            "model_group": started.agents.get(agent) or _model_group_of(calls),
            "member": attempt.member,
            "attempt": attempt.number,
            "example_id": started.example_id,
            "job_id": started.job_id,
            "epoch": started.epoch,
            "purpose": started.purpose,
            "policy": started.policy,
            "reward": sums.total,
            "rewards": sums.by_name,
            "step_rewards": sums.by_step,
            "step_scores": sums.scores,
            "sequences": sequences,
            "num_steps": ended.num_steps,
            "steps_digest": ended.digest,
            "num_dead_tokens": _num_sampled(calls, dead) if dead else 0,
        }
        check_trajectory(fields)
        trajectories.append(fields)
    return Assembled(tuple(trajectories), num_tokens, match_of(started, attempt, rewards) if started.outcome else None)


def match_of(started: GroupStarted, attempt: Attempt, rewards: Iterable[RewardRecorded]) -> dict[str, object] | None:
    """Fields of MatchResult; None if a seat has no score, or its agent sampled nothing, so that nobody played it."""
    players = dict(started.opponents)
    for agent, group in started.agents.items():
        versions = [span.version for call in attempt.calls.get(agent, ()) for span in call.llm.spans if span.length]
        if not versions:
            return None
        players[agent] = ids.player(group, min(versions))
    scores: dict[str, float] = {}
    for reward in rewards:
        if reward.name == started.outcome and not reward.is_score:
            for agent in players if reward.agent is None else players.keys() & {reward.agent}:
                scores[agent] = scores.get(agent, 0.0) + reward.value
    if scores.keys() != players.keys() or not all(map(math.isfinite, scores.values())):
        return None
    return {"member": attempt.member, "players": dict(sorted(players.items())), "scores": dict(sorted(scores.items()))}


def agents_of(started: GroupStarted, acting: Iterable[str]) -> list[str]:
    """Sorted names of the agents that get a trajectory."""
    named = started.agents
    return sorted([agent for agent in acting if not named or agent in named]) or sorted(named)


def sum_rewards(rewards: Iterable[RewardRecorded], agent: str, weights: dict[str, float]) -> RewardSums:
    """Sums of the rewards recorded for `agent` or for all, in the given order.

    Raises DecodeError on overflow.
    """
    total = 0.0
    by_name: dict[str, float] = {}
    by_step: dict[str, float] = {}
    scores: dict[str, float] = {}
    for reward in rewards:
        if reward.agent is not None and reward.agent != agent:
            continue
        weighted = reward.weight_in(weights) * reward.value
        if not reward.is_score:
            total += weighted
            by_name[reward.name] = by_name.get(reward.name, 0.0) + reward.value
        if reward.step_index is not None:
            step, sums = str(reward.step_index), scores if reward.is_score else by_step
            sums[step] = sums.get(step, 0.0) + weighted
    found = total, *by_name.values(), *by_step.values(), *scores.values()
    if not all(map(math.isfinite, found)):
        raise DecodeError(f"the sum of the rewards of agent {agent} is not finite")
    if max(map(abs, found)) > MAX_REWARD_SUM:
        raise DecodeError(f"a sum of rewards of agent {agent} is beyond {MAX_REWARD_SUM:g}")
    return RewardSums(total, by_name, by_step, scores)


def reference(encoded: Encoded) -> MemberRef:
    """The entry in GroupClosed of a TrajectoryAssembled, given as its record."""
    trajectory = cast(TrajectoryAssembled, encoded.event)
    num_tokens = num_completion_tokens = num_without_logprobs = 0
    versions: list[int] = []
    has_logprobs = not trajectory.sequences
    for sequence in trajectory.sequences:
        num_tokens += tokens.count(sequence.token_ids)
        length = 0
        for part in sequence.completions:
            length += part.length
            for span in part.spans:
                if span.length:
                    versions.append(span.version)
        num_completion_tokens += length
        if sequence.logprobs is None:
            num_without_logprobs += length
        else:
            has_logprobs = True
    return _member(
        {
            "trajectory_id": trajectory.trajectory_id,
            "rollout_id": trajectory.rollout_id,
            "agent": trajectory.agent,
            "member": trajectory.member,
            "digest": codec.digest_of(encoded),
            "reward": trajectory.reward,
            "num_tokens": num_tokens,
            "num_completion_tokens": num_completion_tokens,
            "min_version": min(versions, default=0),
            "max_version": max(versions, default=0),
            "has_logprobs": has_logprobs,
            "num_without_logprobs": num_without_logprobs if has_logprobs else 0,
            "num_dead_tokens": trajectory.num_dead_tokens,
        }
    )


def num_tokens(attempt: Attempt) -> int:
    """Number of tokens of an attempt's calls, new prompt and completion, for the ledger of untrained attempts."""
    calls = [call.llm for calls in attempt.calls.values() for call in calls]
    return sum(tokens.count(call.prompt_ids) + tokens.count(call.completion_ids) for call in calls)


def _num_sampled(calls: Iterable[Call], steps: AbstractSet[int]) -> int:
    return sum([tokens.count(call.llm.completion_ids) for call in calls if call.step_index in steps])


def _model_group_of(calls: list[Call]) -> str:
    return next((span.model_group for call in calls for span in call.llm.spans), "")
