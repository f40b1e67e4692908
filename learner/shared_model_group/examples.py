"""Conversion of rollouts by agent to the examples of a job: groups of recorded rollouts, in order. Pure.

An example of SFT is a group of one rollout, one of DPO a pair whose first member is the better answer, one of RL a
group of rollouts that are compared with each other.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

from rollstream.learner.shared_model_group import array_rollouts
from rollstream.learner.shared_model_group.parameters import GroupAgent
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events.recorded import RecordedGroup, RecordedReward, RecordedRollout, RecordedStep

Rollouts = Sequence[RecordedRollout] | Mapping[str, Any]
"""Recorded rollouts, or arrays of shape (rollout, timestep) as `array_rollouts` documents."""
Labelled = Sequence[tuple[RecordedRollout, int]] | Mapping[str, Any]
"""Recorded rollouts with their labels (0 or 1), or arrays with the key `y`."""
Groups = Sequence[RecordedGroup | Sequence[RecordedRollout]] | Mapping[str, Any]
"""Groups of recorded rollouts, or arrays whose rollouts are grouped by `datapoint_id`."""
ByAgent = Mapping[str, Any]
SCORE = "score"
MAX_NAMED = 10
"""Examples that a message names."""
logger = logging.getLogger(__name__)


def sft_examples(
    agents: Mapping[str, GroupAgent],
    model_group: str,
    rollouts_per_agent: Mapping[str, Rollouts],
    guess_replaced: Mapping[str, Labelled],
) -> list[RecordedGroup]:
    """The examples of all agents, one after the other in the order of the group.

    Raises ConfigError for an unknown agent, a message that is None, tokens of another model group, and replaced
    guesses of an agent that is not a verifier.
    """
    _check_names(agents, rollouts_per_agent, guess_replaced)
    found: list[RecordedGroup] = []
    for name, agent in agents.items():
        given = list(_rollouts(agent, rollouts_per_agent.get(name, ())))
        labelled = enumerate(_labelled(agent, guess_replaced.get(name, ())))
        given += [_with_verdict(agent, number, *one) for number, one in labelled]
        rollouts = (_of_agent(rollout, agent, model_group, number) for number, rollout in enumerate(given))
        found += [
            RecordedGroup.of(f"{name}/{n}", [rollout]) for n, rollout in enumerate(rollouts) if rollout is not None
        ]
    return found


def dpo_examples(
    agents: Mapping[str, GroupAgent],
    model_group: str,
    positive: Mapping[str, Rollouts],
    negative: Mapping[str, Rollouts],
) -> list[RecordedGroup]:
    """The pairs of all agents: example n of `positive` is better than example n of `negative`.

    An example is a rollout whose last trained message is compared; arrays have shape (example,). Raises ConfigError as
    `sft_examples`, and where the two have different numbers, rounds or prompts, or all pairs equal answers; some pairs
    of equal answers, which would train nothing, are left out with a warning.
    """
    _check_names(agents, positive, negative)
    found: list[RecordedGroup] = []
    equal: list[str] = []
    for name, agent in agents.items():
        better, worse = (_answers(agent, model_group, side.get(name, ())) for side in (positive, negative))
        if len(better) != len(worse):
            raise ConfigError(
                f"agent {name}: {len(better)} positive and {len(worse)} negative examples; they are paired by index, "
                f"so give as many of each"
            )
        for number, (chosen, rejected) in enumerate(zip(better, worse, strict=True)):
            pair = _pair(f"{name}/{number}", chosen, rejected)
            if _answer(chosen[1]) == _answer(rejected[1]):
                equal.append(pair.example_id)
            else:
                found.append(pair)
    if equal:
        text = f"positive and negative are the same answer in {len(equal)} examples, which train nothing: "
        text += ", ".join(equal[:MAX_NAMED])
        if not found:
            raise ConfigError(f"{text}; give pairs of different answers")
        logger.warning("%s; they are left out", text)
    return found


def rl_examples(
    agents: Mapping[str, GroupAgent], model_group: str, groups_per_agent: Mapping[str, Groups]
) -> list[RecordedGroup]:
    """The groups of all agents.

    Raises ConfigError as `sft_examples`, and for steps without log-probabilities.
    """
    _check_names(agents, groups_per_agent)
    found: list[RecordedGroup] = []
    for name, agent in agents.items():
        for number, group in enumerate(_groups(agent, groups_per_agent.get(name, ()))):
            rollouts = [_of_agent(rollout, agent, model_group, n) for n, rollout in enumerate(group)]
            members = [rollout for rollout in rollouts if rollout is not None]
            for rollout in members:
                _check_logprobs(rollout, f"agent {name}, group {number}")
            if members:
                found.append(RecordedGroup.of(f"{name}/{number}", members))
    return found


def check_rewards(groups: Sequence[RecordedGroup]) -> None:
    """Raises ConfigError for a rollout of an RL job without a reward."""
    for group in groups:
        rollouts = (member.rollout for member in group.members if member.rollout is not None)
        if any(all(reward.is_score for reward in rollout.rewards) for rollout in rollouts):
            raise ConfigError(
                f"example {group.example_id}: a rollout has no reward of the agent, which RL compares; add one, or "
                f"leave it out"
            )


def needs_tokens(groups: Sequence[RecordedGroup]) -> bool:
    """Whether some messages are text only, so that their tokens must be made by the model's tokenizer."""
    rollouts = (member.rollout for group in groups for member in group.members if member.rollout is not None)
    return any(step.tokens is None for rollout in rollouts for step in rollout.steps)


def _check_names(agents: Mapping[str, GroupAgent], *given: ByAgent) -> None:
    for names in given:
        for name in names:
            if name not in agents:
                raise ConfigError(f"agent {name} is not in the model group; its agents are {', '.join(agents)}")


def _rollouts(agent: GroupAgent, given: Rollouts) -> Sequence[RecordedRollout]:
    return array_rollouts.rollouts_of(given, agent) if isinstance(given, Mapping) else given


def _labelled(agent: GroupAgent, given: Labelled) -> Sequence[tuple[RecordedRollout, int]]:
    if isinstance(given, Mapping):
        return array_rollouts.labelled_of(given, agent)
    return given


def _groups(agent: GroupAgent, given: Groups) -> list[Sequence[RecordedRollout]]:
    if isinstance(given, Mapping):
        return array_rollouts.groups_of(given, agent)
    return [_members(group) if isinstance(group, RecordedGroup) else group for group in given]


def _members(group: RecordedGroup) -> list[RecordedRollout]:
    found = [member.rollout for member in group.members]
    if None in found:
        raise ConfigError(f"example {group.example_id} refers to an artifact; give the recorded rollout itself")
    return cast("list[RecordedRollout]", found)


def _is_call(step: RecordedStep) -> bool:
    return step.chat is not None or step.tokens is not None


def _calls(rollout: RecordedRollout) -> list[RecordedStep]:
    return [step for step in rollout.steps if _is_call(step)]


def _of_agent(rollout: RecordedRollout, agent: GroupAgent, model_group: str, number: int) -> RecordedRollout | None:
    """The part of a rollout that an agent said; None if it has no message."""
    where = f"agent {agent.name}, rollout {number}"
    if rollout.error is not None:
        raise ConfigError(f"{where}: the recorded rollout is broken: {rollout.error}; leave it out")
    indices = [index for index, step in enumerate(rollout.steps) if step.agent in ("", agent.name)]
    steps = [rollout.steps[index].model_copy(update={"agent": agent.name}) for index in indices]
    with_answer = [step for step in steps if step.chat is not None or step.tokens is not None]
    for step in with_answer:
        _check_step(step, model_group, where)
    if not any(step.untrained is None for step in with_answer):
        return None
    rewards: list[RecordedReward] = []
    for reward in rollout.rewards:
        is_ours = reward.agent in (None, agent.name) and (reward.step is None or reward.step in indices)
        if is_ours:
            step = None if reward.step is None else indices.index(reward.step)
            rewards.append(reward.model_copy(update={"step": step, "agent": agent.name}))
    return rollout.model_copy(update={"steps": tuple(steps), "rewards": tuple(rewards)})


def _check_step(step: RecordedStep, model_group: str, where: str) -> None:
    if step.chat is not None and step.tokens is None:
        if step.chat.answer.get("content") is None and not step.chat.answer.get("tool_calls"):
            raise ConfigError(f"{where}: a message is None; leave out rounds in which the agent says nothing")
        if any(message.get("content") is None and not message.get("tool_calls") for message in step.chat.messages):
            raise ConfigError(f"{where}: a message of the prompt is None; leave it out")
    for span in () if step.tokens is None else step.tokens.spans:
        if span.model_group != model_group:
            raise ConfigError(
                f"{where}: its tokens were sampled by model group {span.model_group}, not by {model_group}; give its "
                f"messages as text to imitate another model"
            )


def _check_logprobs(rollout: RecordedRollout, where: str) -> None:
    for step in _calls(rollout):
        if step.untrained is None and (step.tokens is None or step.tokens.logprobs is None):
            raise ConfigError(
                f"{where}: a step has no tokens with log-probabilities; RL needs them, SFT and DPO train without"
            )


def _last_trained(calls: Mapping[int, RecordedStep]) -> int | None:
    """The key of the last of an agent's calls that is trained on."""
    return max((number for number, step in calls.items() if step.untrained is None), default=None)


def _with_verdict(agent: GroupAgent, number: int, rollout: RecordedRollout, label: int) -> RecordedRollout:
    """The rollout with the true label in place of the agent's last message that is trained on."""
    if not agent.is_verifier:
        raise ConfigError(f"agent {agent.name} is not a verifier; only a verifier's guesses can be replaced")
    if label not in (0, 1):
        raise ConfigError(f"agent {agent.name}: label {label!r} is not 0 or 1; give one of these")
    own = {n: step for n, step in enumerate(rollout.steps) if step.agent in ("", agent.name) and _is_call(step)}
    guess, steps = _last_trained(own), list(rollout.steps)
    if guess is None and own:
        return rollout  # nothing of it is trained
    if guess is None or (last := steps[guess]).chat is None:
        raise ConfigError(
            f"agent {agent.name}, rollout {number} with a replaced guess: its last trained message is not there as "
            "text; record its messages, or leave it out"
        )
    text = agent.verdict_texts[int(label)]
    answer: dict[str, Any] = {"role": "assistant", "content": text}
    chat = last.chat.model_copy(update={"answer": answer, "logprobs": None})
    data = {**(last.data or {}), "output": text}
    steps[guess] = last.model_copy(update={"chat": chat, "tokens": None, "data": data})
    return rollout.model_copy(update={"steps": tuple(steps)})


def _answers(agent: GroupAgent, model_group: str, given: Rollouts) -> list[tuple[int, RecordedStep]]:
    """Round and last trained message of every example."""
    found: list[tuple[int, RecordedStep]] = []
    if isinstance(given, Mapping):
        rounds = array_rollouts.examples_of(given, agent)
    else:
        rounds = [(-1, rollout) for rollout in given]
    for number, (round_number, rollout) in enumerate(rounds):
        of_agent = _of_agent(rollout, agent, model_group, number)
        if of_agent is None:
            raise ConfigError(
                f"agent {agent.name}, example {number}: it has no message of the agent to compare; leave it out"
            )
        calls = _calls(of_agent)
        last = _last_trained(dict(enumerate(calls)))
        assert last is not None
        found.append((last if round_number < 0 else round_number, calls[last]))
    return found


def _pair(example_id: str, chosen: tuple[int, RecordedStep], rejected: tuple[int, RecordedStep]) -> RecordedGroup:
    """A pair as two rollouts of one step, which scores 1 in the first and 0 in the second."""
    if chosen[0] != rejected[0]:
        raise ConfigError(
            f"example {example_id}: the positive is of round {chosen[0]}, the negative of round {rejected[0]}; a pair "
            f"answers one prompt, so give both of one round"
        )
    if _prompt(chosen[1]) != _prompt(rejected[1]):
        raise ConfigError(f"example {example_id}: positive and negative answer different prompts; pair equal prompts")
    return RecordedGroup.of(example_id, [_scored(chosen[1], 1.0), _scored(rejected[1], 0.0)])


def _prompt(step: RecordedStep) -> Any:
    if step.tokens is not None:
        return step.tokens.prompt_ids
    assert step.chat is not None
    return step.chat.messages


def _answer(step: RecordedStep) -> Any:
    if step.tokens is not None:
        return step.tokens.completion_ids
    assert step.chat is not None
    calls = step.chat.answer.get("tool_calls")
    return step.chat.answer | ({"tool_calls": [_without_id(call) for call in calls]} if isinstance(calls, list) else {})


def _without_id(call: Any) -> Any:
    """A tool call without its id, which differs for equal calls."""
    return {key: value for key, value in call.items() if key != "id"} if isinstance(call, dict) else call


def _scored(step: RecordedStep, score: float) -> RecordedRollout:
    compared = RecordedReward(value=score, name=SCORE, step=0, agent=step.agent, is_score=True)
    total = RecordedReward(value=score, name=SCORE, agent=step.agent)
    return RecordedRollout(steps=(step,), rewards=(total, compared))
