"""Rollouts in nip's array form: a nested mapping of arrays with a common leading shape, to recorded rollouts. Pure.

Arrays are nested lists, or whatever has `tolist` (numpy, NestedArrayDict's leaves). R rollouts, T timesteps, M rounds,
A agents of the protocol; the last axis of a value by agent is indexed by the agent's id. Examples for DPO have the
leading shape (N,) in place of (R, T).

| key | shape | |
| --- | --- | --- |
| `("next", "raw_message_history")` | (R, T, M, A) | text by round and agent, None where an agent was silent; the last
  timestep, which holds the whole history, is used |
| `"question"` | (R, T) or (R,) | optional: first message of a prompt that is built from the history |
| `("agents", "prompt")` | (R, T, A) | optional: chat messages that the agent was given, in place of built prompts |
| `"padding"` | (R, T) | optional: timesteps after the end |
| `("next", "agents", "reward")` | (R, T, A) | RL: rewards, summed over the timesteps |
| `("agents", "prompt_ids")`, `("agents", "completion_ids")`, `("agents", "logprobs")` | (R, T, A) | RL: tokens of the
  timestep, None where the agent did not act |
| `"y"` | (R, T) or (R,) | replaced guesses: label 0 or 1 |
| `"datapoint_id"` | (R, T) or (R,) | RL: rollouts of one datapoint are a group |
| `"round"` | (N,) | DPO: the round whose message is compared |

A built prompt is the agent's system prompt, the question, then of every earlier round its own message (assistant) and
those of the others (user, with `name`).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from rollstream.learner.shared_model_group.parameters import GroupAgent
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events.recorded import (
    RecordedChat,
    RecordedReward,
    RecordedRollout,
    RecordedStep,
    RecordedTokens,
)

Arrays = Mapping[str, Any]
_MISSING: Any = object()


def rollouts_of(arrays: Arrays, agent: GroupAgent) -> list[RecordedRollout]:
    """One rollout of the agent for each of the R. Raises ConfigError for missing keys and wrong shapes."""
    histories = _leading(arrays, ("next", "raw_message_history"))
    return [_rollout(arrays, agent, number, history) for number, history in enumerate(histories)]


def labelled_of(arrays: Arrays, agent: GroupAgent) -> list[tuple[RecordedRollout, int]]:
    """Rollouts as from `rollouts_of`, each with its label."""
    labels = _leading(arrays, ("y",))
    found = rollouts_of(arrays, agent)
    _check_length(len(labels), len(found), "y")
    return [(rollout, _first(label)) for rollout, label in zip(found, labels, strict=True)]


def groups_of(arrays: Arrays, agent: GroupAgent) -> list[Sequence[RecordedRollout]]:
    """Rollouts with exact tokens and rewards, grouped by `datapoint_id` in the order of their first rollouts."""
    datapoints = [_first(one) for one in _leading(arrays, ("datapoint_id",))]
    prompts, completions, logprobs = (
        _leading(arrays, ("agents", key)) for key in ("prompt_ids", "completion_ids", "logprobs")
    )
    rewards = _leading(arrays, ("next", "agents", "reward"))
    for name, values in (("completion_ids", completions), ("logprobs", logprobs), ("reward", rewards)):
        _check_length(len(values), len(datapoints), name)
    groups: dict[Any, list[RecordedRollout]] = {}
    for number, datapoint in enumerate(datapoints):
        groups.setdefault(datapoint, []).append(
            _sampled(agent, prompts[number], completions[number], logprobs[number], rewards[number])
        )
    return list(groups.values())


def examples_of(arrays: Arrays, agent: GroupAgent) -> list[tuple[int, RecordedRollout]]:
    """Round and message of the N examples of one side of DPO.

    Raises ConfigError for a message that is None.
    """
    rounds = _leading(arrays, ("round",))
    histories = _leading(arrays, ("next", "raw_message_history"))
    _check_length(len(histories), len(rounds), "raw_message_history")
    found: list[tuple[int, RecordedRollout]] = []
    for number, (at, history) in enumerate(zip(rounds, histories, strict=True)):
        index = int(at)
        if not 0 <= index < len(history):
            raise ConfigError(f"agent {agent.name}, example {number}: round {index} is not one of {len(history)}")
        text = _text(history[index][_id(agent)])
        if text is None:
            raise ConfigError(f"agent {agent.name}, example {number}: its message of round {index} is None")
        messages = _given_prompt(arrays, agent, number) or _built(arrays, agent, number, history, index)
        found.append((index, RecordedRollout(steps=(_step(agent, messages, text),))))
    return found


def _rollout(arrays: Arrays, agent: GroupAgent, number: int, timesteps: Any) -> RecordedRollout:
    history = timesteps[-1]
    padding = _leading(arrays, ("padding",), default=None)
    steps: list[RecordedStep] = []
    for index, messages_A in enumerate(history):
        text = _text(messages_A[_id(agent)])
        is_padding = padding is not None and index < len(padding[number]) and bool(padding[number][index])
        if text is None or is_padding:
            continue
        messages = _given_prompt(arrays, agent, number, index) or _built(arrays, agent, number, history, index)
        steps.append(_step(agent, messages, text))
    rewards = _leading(arrays, ("next", "agents", "reward"), default=None)
    total = () if rewards is None else (_total(agent, rewards[number]),)
    return RecordedRollout(steps=tuple(steps), rewards=total)


def _sampled(agent: GroupAgent, prompts: Any, completions: Any, logprobs: Any, rewards: Any) -> RecordedRollout:
    found = _id(agent)
    steps = [
        RecordedStep(agent=agent.name, tokens=RecordedTokens.of(prompt[found], completion[found], logprob[found]))
        for prompt, completion, logprob in zip(prompts, completions, logprobs, strict=True)
        if completion[found] is not None
    ]
    return RecordedRollout(steps=tuple(steps), rewards=(_total(agent, rewards),))


def _total(agent: GroupAgent, rewards_T_A: Any) -> RecordedReward:
    return RecordedReward(value=float(sum(step[_id(agent)] for step in rewards_T_A)), agent=agent.name)


def _step(agent: GroupAgent, messages: Sequence[dict[str, Any]], text: str) -> RecordedStep:
    answer: dict[str, Any] = {"role": "assistant", "content": text}
    return RecordedStep(
        agent=agent.name,
        data={"input": list(messages), "output": text},
        chat=RecordedChat(messages=tuple(messages), answer=answer),
    )


def _built(arrays: Arrays, agent: GroupAgent, number: int, history: Any, until: int) -> list[dict[str, Any]]:
    """The prompt of round `until`, from the messages before it."""
    found: list[dict[str, Any]] = []
    if agent.system_prompt:
        found.append({"role": "system", "content": agent.system_prompt})
    questions = _leading(arrays, ("question",), default=None)
    question = None if questions is None else _text(_first(questions[number]))
    if question is not None:
        found.append({"role": "user", "content": question})
    for messages_A in history[:until]:
        for index, message in enumerate(messages_A):
            text = _text(message)
            if text is not None and index == _id(agent):
                found.append({"role": "assistant", "content": text})
            elif text is not None:
                found.append({"role": "user", "content": text, "name": f"agent_{index}"})
    if not found:
        raise ConfigError(
            f"agent {agent.name}, rollout {number}: round {until} has an empty prompt; give question, a system_prompt "
            f"or agents/prompt"
        )
    return found


def _given_prompt(arrays: Arrays, agent: GroupAgent, *at: int) -> list[dict[str, Any]] | None:
    prompts = _leading(arrays, ("agents", "prompt"), default=None)
    if prompts is None:
        return None
    for index in at:
        if index >= len(prompts):
            return None
        prompts = prompts[index]
    given = prompts[_id(agent)]
    messages = json.loads(given) if isinstance(given, str) else given
    if messages is None:
        return None
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in cast("list[Any]", messages)):
        raise ConfigError(f"agent {agent.name}: agents/prompt at {at} is not a list of chat messages")
    return cast("list[dict[str, Any]]", messages)


def _leading(arrays: Arrays, path: tuple[str, ...], default: Any = _MISSING) -> Any:
    """The values of a nested key as lists."""
    found: Any = arrays.get(path, arrays)  # type: ignore[call-overload]
    if found is arrays:
        for key in path:
            if not isinstance(found, Mapping) or key not in found:
                if default is _MISSING:
                    raise ConfigError(f"rollouts in array form have no key {'/'.join(path)}; see the documented shapes")
                return default
            found = cast("Mapping[str, Any]", found)[key]
    return found.tolist() if hasattr(found, "tolist") else found


def _check_length(found: int, wanted: int, name: str) -> None:
    if found != wanted:
        raise ConfigError(
            f"rollouts in array form: {name} has {found} rows, others {wanted}; leading shapes must agree"
        )


def _first(value: Any) -> Any:
    """A value of a rollout, which some arrays repeat for every timestep."""
    return value[0] if isinstance(value, list) else value


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _id(agent: GroupAgent) -> int:
    return 0 if agent.group is None else agent.group.agent_id(agent.name)
