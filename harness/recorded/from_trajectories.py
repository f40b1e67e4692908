"""Converts trajectories of NAT's or users' own builders to recorded rollouts. Pure.

Each assistant message with log-probabilities is one call; messages of other roles are prompt only. Also converts
preference pairs to NAT's trajectories and finds the exact tokens that one refers to.
"""

import hashlib
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

import orjson
from pydantic import JsonValue, ValidationError

from rollstream.eventlog import codec
from rollstream.harness.recorded.pairs import CandidatePair, ScoredCandidate
from rollstream.producers.rollout.recorded_call import NO_LOGPROBS
from rollstream.producers.traces.framework_logprobs import Logprobs, read_logprobs
from rollstream.producers.traces.spans import SCORE, json_value
from rollstream.schemas.errors import describe, first_invalid
from rollstream.schemas.events.recorded import (
    RecordedChat,
    RecordedReward,
    RecordedRollout,
    RecordedStep,
    RecordedTokens,
)
from rollstream.schemas.finetuning import DPOItem, EpisodeItem, EpisodeItemRole, OpenAIMessage, Trajectory
from rollstream.schemas.settings import OTHERS

REWARD = "reward"
STEP_REWARD = "shaped_reward"
REWARDS = "rewards"
"""Key of the metadata of our builder's trajectories: their recorded rewards by name, not weighted."""
CONTENT_SHA256 = "content_sha256"
"""Key of an assistant message's metadata: of the text that its tokens say."""
ROUNDING = 1e-12
"""Share of a reward that only the order of its sum can explain."""
_OWN_NAMES = (REWARD, STEP_REWARD, SCORE)
_CHAT_ROLES = {
    EpisodeItemRole.ENVIRONMENT: "user",
    EpisodeItemRole.OTHER: "user",
}
"""Roles that no chat template knows, and the roles as which the model reads them."""


def rollout_of(
    trajectory: Trajectory,
    *,
    demands_logprobs: bool = True,
    agent: str = "",
    weights: Mapping[str, float] | None = None,
) -> RecordedRollout:
    """A trajectory as a rollout: its calls, its shaped rewards by call, and the rest of its reward at the end, by name
    as far as it was recorded so.

    `agent`: the one whose trajectory it is, in a run of several. `weights`: of the run's rewards; the rollout is for a
    task with `weights_of` them.

    An assistant message with exact ids (`read_logprobs`) keeps them unless its text was changed since; any other is
    text to re-tokenize or reject. One with neither ids nor log-probabilities is not trained on, as in NAT, unless
    `demands_logprobs` is off (for SFT and DPO). A trajectory without an assistant message, with a preference pair, with
    a reward that is not a finite number, without one shaped reward a message, or with a value that cannot be recorded
    becomes a rollout with an `error`.
    """
    source_id = json_value(_source_id(trajectory))
    try:
        found = _rollout(trajectory, source_id, demands_logprobs=demands_logprobs, agent=agent, weights=weights or {})
        orjson.dumps(found.model_dump())  # a name may be a text that no record can hold
    except (TypeError, ValueError, OverflowError) as error:
        reason = first_invalid(error) if isinstance(error, ValidationError) else describe(error)
        return RecordedRollout(source_id=source_id, error=json_value(f"cannot be recorded: {reason}"))
    return found


def _rollout(
    trajectory: Trajectory, source_id: str, *, demands_logprobs: bool, agent: str, weights: Mapping[str, float]
) -> RecordedRollout:
    items = trajectory.episode
    if any(isinstance(item, DPOItem) for item in items):
        return RecordedRollout(source_id=source_id, error="is a preference pair: see rollouts_of_pair")
    if not math.isfinite(trajectory.reward):
        return RecordedRollout(
            source_id=source_id, error=f"its reward is {trajectory.reward}; expected a finite number"
        )
    steps = _steps(cast("Sequence[EpisodeItem]", items), agent, demands_logprobs=demands_logprobs)
    if not steps:
        return RecordedRollout(source_id=source_id, error="has no assistant message")
    values = trajectory.shaped_rewards or []
    if values and len(values) != len(steps):
        error = f"has {len(values)} shaped_rewards for {len(steps)} assistant messages"
        return RecordedRollout(source_id=source_id, error=error)
    if not all(map(math.isfinite, values)):
        error = f"its shaped_rewards are {values}; expected finite numbers"
        return RecordedRollout(source_id=source_id, error=error)
    shaped = [RecordedReward(value=value, name=STEP_REWARD, step=step) for step, value in enumerate(values)]
    rewards = (*_final(trajectory, shaped, weights), *shaped)
    own = rewards if not agent else [reward.model_copy(update={"agent": agent}) for reward in rewards]
    return RecordedRollout(source_id=source_id, steps=tuple(steps), rewards=tuple(own))


def weights_of(weights: Mapping[str, float]) -> dict[str, float]:
    """Reward weights of a task with rollouts from here: the run's, and 1 for the rewards that only they have."""
    return {**weights, **dict.fromkeys(_OWN_NAMES, 1.0)} if weights else {}


def rollouts_of_pair(
    item: DPOItem,
    *,
    score_diff: float = 1.0,
    tokens: tuple[RecordedTokens | None, RecordedTokens | None] = (None, None),
) -> tuple[RecordedRollout, RecordedRollout]:
    """A preference pair as the two members of a group: the chosen one scores `score_diff`, the rejected one 0.

    `tokens`: exact tokens of the chosen and the rejected answer, if known.
    """
    messages = _messages(item)
    return (
        _pair_member(messages, item.chosen_response, score_diff, tokens[0]),
        _pair_member(messages, item.rejected_response, 0.0, tokens[1]),
    )


def rollouts_of_items(trajectory: Trajectory) -> tuple[tuple[RecordedRollout, RecordedRollout], ...]:
    """All pairs of a trajectory of DPOItems, each as a group, with the tokens that it refers to."""
    diff = score_diff_of(trajectory)
    return tuple(
        rollouts_of_pair(
            item,
            score_diff=diff,
            tokens=(tokens_of(trajectory, item, CHOSEN), tokens_of(trajectory, item, REJECTED)),
        )
        for item in trajectory.episode
        if isinstance(item, DPOItem)
    )


def _steps(items: Sequence[EpisodeItem], agent: str, *, demands_logprobs: bool) -> list[RecordedStep]:
    steps: list[RecordedStep] = []
    messages: list[dict[str, JsonValue]] = []
    for item in items:
        message = _message(item)
        if item.role == EpisodeItemRole.ASSISTANT:
            step = _step(tuple(messages), message, item, demands_logprobs=demands_logprobs)
            steps.append(step.model_copy(update={"agent": agent}))
        messages.append(message)
    return steps


def _step(
    messages: tuple[dict[str, JsonValue], ...],
    answer: dict[str, JsonValue],
    item: EpisodeItem,
    *,
    demands_logprobs: bool,
) -> RecordedStep:
    found = Logprobs() if _is_changed(item) else read_logprobs(item.logprobs)
    tokens = found.tokens()
    is_known = found.values is not None or tokens is not None
    return RecordedStep(
        name=json_value(_text(_of(item.metadata, "model_name"))),
        data={"input": list(messages), "output": answer["content"]},
        tokens=tokens,
        chat=RecordedChat(messages=messages, answer=answer, logprobs=found.values),
        untrained=None if is_known or not demands_logprobs else NO_LOGPROBS,
    )


def text_sha256(text: str) -> str:
    """sha256 (hex) of a message's text."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _is_changed(item: EpisodeItem) -> bool:
    """Whether a message's text differs from the text of its tokens."""
    known = _of(item.metadata, CONTENT_SHA256)
    return known is not None and known != text_sha256(item.content)


def _pair_member(
    messages: tuple[dict[str, JsonValue], ...], response: str, score: float, tokens: RecordedTokens | None
) -> RecordedRollout:
    answer: dict[str, JsonValue] = {"role": "assistant", "content": json_value(response)}
    step = RecordedStep(
        data={"input": list(messages), "output": answer["content"]},
        tokens=tokens,
        chat=RecordedChat(messages=messages, answer=answer),
    )
    compared = RecordedReward(value=score, name=SCORE, step=0, is_score=True)
    return RecordedRollout(steps=(step,), rewards=(RecordedReward(value=score, name=SCORE), compared))


def _messages(item: DPOItem) -> tuple[dict[str, JsonValue], ...]:
    if isinstance(item.prompt, str):
        return ({"role": "user", "content": json_value(item.prompt)},)
    return tuple(json_value({"role": message.role, "content": message.content}) for message in item.prompt)


def _message(item: EpisodeItem) -> dict[str, JsonValue]:
    role = _CHAT_ROLES.get(item.role, item.role.value)
    message: dict[str, JsonValue] = {"role": role, "content": json_value(item.content)}
    for key in ("tool_calls", "tool_call_id", "name", "reasoning_content"):
        value = _of(item.metadata, key)
        if value is not None:
            message[key] = json_value(value)
    return message


def _final(
    trajectory: Trajectory, shaped: Sequence[RecordedReward], weights: Mapping[str, float]
) -> list[RecordedReward]:
    """The rewards of the whole rollout; with those of its steps, their weighted sum is the trajectory's reward."""
    found: dict[str, float] = {}
    counted = [reward.value for reward in shaped]
    for name, value in _recorded_rewards(trajectory).items():
        weighted = weights.get(name, weights.get(OTHERS, 1.0)) * value
        counted.append(weighted)
        found[name] = weighted if name in _OWN_NAMES else value
    rest = trajectory.reward - math.fsum(counted)
    if not found or abs(rest) > ROUNDING * max(1.0, abs(trajectory.reward)):
        found[REWARD] = found.get(REWARD, 0.0) + rest
    return [RecordedReward(value=value, name=name) for name, value in found.items()]


def _recorded_rewards(trajectory: Trajectory) -> dict[str, float]:
    """The rewards that one of our builder's trajectories was recorded with; none for any other."""
    if _of(trajectory.metadata, "trajectory_id") is None:
        return {}
    found = _of(trajectory.metadata, REWARDS)
    return dict(found) if isinstance(found, Mapping) else {}


def _source_id(trajectory: Trajectory) -> str:
    found = _of(trajectory.metadata, "id")
    generation = _of(trajectory.metadata, "generation")
    parts = [str(part) for part in (found, generation) if part is not None]
    return "/".join(parts)


def _of(metadata: dict[str, Any] | None, key: str) -> Any:
    return (metadata or {}).get(key)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


REFERENCES = "references"
CHOSEN, REJECTED = "chosen", "rejected"


def trajectory_of(pair: CandidatePair, *, reward_from_score_diff: bool, metadata: Mapping[str, Any]) -> Trajectory:
    """A pair as a trajectory of one DPOItem; `metadata`: further identifying keys (run_id, epoch, ...)."""
    chosen, rejected = pair.chosen, pair.rejected
    item = DPOItem(prompt=_prompt(chosen), chosen_response=chosen.response, rejected_response=rejected.response)
    return Trajectory(
        episode=[item],
        reward=pair.score_diff if reward_from_score_diff else chosen.score,
        metadata={
            **metadata,
            "dpo_type": "preference_pair",
            "id": chosen.example_id,
            "example_id": chosen.example_id,
            "turn_id": chosen.turn_id,
            "turn_index": chosen.turn_index,
            "score_diff": pair.score_diff,
            "chosen_score": chosen.score,
            "rejected_score": rejected.score,
            "chosen_index": chosen.index,
            "rejected_index": rejected.index,
            REFERENCES: {
                CHOSEN: {**chosen.reference, "content_sha256": _content_sha256(item, chosen.response)},
                REJECTED: {**rejected.reference, "content_sha256": _content_sha256(item, rejected.response)},
            },
        },
    )


def score_diff_of(trajectory: Trajectory) -> float:
    """The score difference of a trajectory's pairs: from its metadata, else its reward, else 1."""
    written = (trajectory.metadata or {}).get("score_diff")
    known = (value for value in (written, trajectory.reward) if isinstance(value, int | float))
    return next((float(value) for value in known if 0 < value <= sys.float_info.max), 1.0)


def tokens_of(trajectory: Trajectory, item: DPOItem, side: str) -> RecordedTokens | None:
    """Exact tokens of the `chosen` or `rejected` answer, if they are referred to and its content is unchanged."""
    reference: Mapping[str, Any] = ((trajectory.metadata or {}).get(REFERENCES) or {}).get(side) or {}
    response = item.chosen_response if side == CHOSEN else item.rejected_response
    if not reference or reference.get("content_sha256") != _content_sha256(item, response):
        return None
    return read_logprobs(reference.get("tokens")).tokens()


def _prompt(candidate: ScoredCandidate) -> list[OpenAIMessage] | str:
    if isinstance(candidate.prompt, str):
        return candidate.prompt
    return [OpenAIMessage(role=role, content=text) for role, text in candidate.prompt]


def _content_sha256(item: DPOItem, response: str) -> str:
    return codec.canonical_digest([item.model_dump(mode="json")["prompt"], response])
