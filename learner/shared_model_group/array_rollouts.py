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
import math
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
_Columns = Mapping[str, list[Any]]
"""Rows by the last part of their key, checked once: of the documented shape, as lists."""
_KEYS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "raw_message_history": (("next", "raw_message_history"), "TMA"),
    "question": (("question",), ""),
    "prompt": (("agents", "prompt"), "TA"),
    "padding": (("padding",), "T"),
    "reward": (("next", "agents", "reward"), "TA"),
    "prompt_ids": (("agents", "prompt_ids"), "TA"),
    "completion_ids": (("agents", "completion_ids"), "TA"),
    "logprobs": (("agents", "logprobs"), "TA"),
    "y": (("y",), ""),
    "datapoint_id": (("datapoint_id",), ""),
    "round": (("round",), ""),
}
"""Key, and axes of a row; a row without any is one value, which some arrays repeat for every timestep."""
_AXES = {"R": "rollouts", "T": "timesteps", "M": "rounds", "A": "agents"}


def rollouts_of(arrays: Arrays, agent: GroupAgent) -> list[RecordedRollout]:
    """One rollout of the agent for each of the R. Raises ConfigError for missing keys and wrong shapes."""
    columns = _columns(arrays, agent, ("raw_message_history",), ("question", "prompt", "padding", "reward"))
    return [_rollout(columns, agent, number) for number in range(len(columns["raw_message_history"]))]


def labelled_of(arrays: Arrays, agent: GroupAgent) -> list[tuple[RecordedRollout, int]]:
    """Rollouts as from `rollouts_of`, each with its label."""
    labels = _columns(arrays, agent, ("raw_message_history", "y"))["y"]
    return list(zip(rollouts_of(arrays, agent), labels, strict=True))


def groups_of(arrays: Arrays, agent: GroupAgent) -> list[Sequence[RecordedRollout]]:
    """Rollouts with exact tokens and rewards, grouped by `datapoint_id` in the order of their first rollouts.

    Raises ConfigError as `rollouts_of`.
    """
    columns = _columns(arrays, agent, ("datapoint_id", "prompt_ids", "completion_ids", "logprobs", "reward"))
    groups: dict[Any, list[RecordedRollout]] = {}
    for number, datapoint in enumerate(columns["datapoint_id"]):
        groups.setdefault(datapoint, []).append(_sampled(columns, agent, number))
    return list(groups.values())


def examples_of(arrays: Arrays, agent: GroupAgent) -> list[tuple[int, RecordedRollout]]:
    """Round and message of the N examples of one side of DPO.

    Raises ConfigError as `rollouts_of`, and for a message that is None.
    """
    columns = _columns(arrays, agent, ("round", "raw_message_history"), ("question", "prompt"), is_timed=False)
    found: list[tuple[int, RecordedRollout]] = []
    for number, (at, history) in enumerate(zip(columns["round"], columns["raw_message_history"], strict=True)):
        if at not in range(len(history)):
            known = f"give one from 0 to {len(history) - 1}"
            raise ConfigError(f"agent {agent.name}, example {number}: round {at} is not one of {len(history)}; {known}")
        index = int(at)
        text = _text(history[index][_id(agent)])
        if text is None:
            raise ConfigError(
                f"agent {agent.name}, example {number}: its message of round {index} is None; give a round in which "
                f"the agent speaks"
            )
        messages = _given_prompt(columns, agent, number) or _built(columns, agent, number, history, index)
        found.append((index, RecordedRollout(steps=(_step(agent, messages, text),))))
    return found


def _rollout(columns: _Columns, agent: GroupAgent, number: int) -> RecordedRollout:
    history = columns["raw_message_history"][number][-1]
    padding = columns["padding"][number] if "padding" in columns else []
    steps: list[RecordedStep] = []
    for index, messages_A in enumerate(history):
        text = _text(messages_A[_id(agent)])
        is_padding = index < len(padding) and bool(padding[index])
        if text is None or is_padding:
            continue
        messages = _given_prompt(columns, agent, number, index) or _built(columns, agent, number, history, index)
        steps.append(_step(agent, messages, text))
    return RecordedRollout(steps=tuple(steps), rewards=(_total(columns, agent, number),) if "reward" in columns else ())


def _sampled(columns: _Columns, agent: GroupAgent, number: int) -> RecordedRollout:
    rows = (columns[name][number] for name in ("prompt_ids", "completion_ids", "logprobs"))
    steps = [
        RecordedStep(agent=agent.name, tokens=_tokens(f"agent {agent.name}, rollout {number}, timestep {at}", *found))
        for at, timestep in enumerate(zip(*rows, strict=True))
        if (found := [values_A[_id(agent)] for values_A in timestep])[1] is not None
    ]
    return RecordedRollout(steps=tuple(steps), rewards=(_total(columns, agent, number),))


def _tokens(where: str, prompt: Any, completion: Any, logprobs: Any) -> RecordedTokens:
    """Tokens of a timestep in which the agent acted."""
    for name, values in (("prompt_ids", prompt), ("completion_ids", completion), ("logprobs", logprobs)):
        if not isinstance(values, list | tuple) or not values:
            raise ConfigError(f"{where}: {name} is not a list of numbers; give the tokens of every completion")
    if len(logprobs) != len(completion):
        raise ConfigError(
            f"{where}: {len(completion)} completion_ids and {len(logprobs)} logprobs; give as many of each"
        )
    try:
        return RecordedTokens.of(prompt, completion, logprobs)
    except (TypeError, OverflowError) as error:
        raise ConfigError(f"{where}: {error}; give token ids as whole numbers and logprobs as numbers") from error


def _total(columns: _Columns, agent: GroupAgent, number: int) -> RecordedReward:
    rewards_T = [step[_id(agent)] for step in columns["reward"][number]]
    for at, reward in enumerate(rewards_T):
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise ConfigError(
                f"agent {agent.name}, rollout {number}, timestep {at}: reward {reward!r} is not a number; give 0 where "
                f"there is none"
            )
    return RecordedReward(value=float(sum(rewards_T)), agent=agent.name)


def _step(agent: GroupAgent, messages: Sequence[dict[str, Any]], text: str) -> RecordedStep:
    answer: dict[str, Any] = {"role": "assistant", "content": text}
    return RecordedStep(
        agent=agent.name,
        data={"input": list(messages), "output": text},
        chat=RecordedChat(messages=tuple(messages), answer=answer),
    )


def _built(columns: _Columns, agent: GroupAgent, number: int, history: Any, until: int) -> list[dict[str, Any]]:
    """The prompt of round `until`, from the messages before it."""
    found: list[dict[str, Any]] = []
    if agent.system_prompt:
        found.append({"role": "system", "content": agent.system_prompt})
    question = _text(columns["question"][number]) if "question" in columns else None
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


def _given_prompt(columns: _Columns, agent: GroupAgent, *at: int) -> list[dict[str, Any]] | None:
    prompts: Any = columns.get("prompt")
    if prompts is None:
        return None
    for index in at:
        if index >= len(prompts):
            return None
        prompts = prompts[index]
    given = prompts[_id(agent)]
    try:
        messages = json.loads(given) if isinstance(given, str) else given
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"agent {agent.name}: agents/prompt at {at} is not JSON: {error}; give a list of messages"
        ) from error
    if messages is None:
        return None
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in cast("list[Any]", messages)):
        raise ConfigError(f"agent {agent.name}: agents/prompt at {at} is not a list of chat messages; give one")
    return cast("list[dict[str, Any]]", messages)


# ---- shapes ----


def _columns(
    arrays: Arrays, agent: GroupAgent, needed: Sequence[str], optional: Sequence[str] = (), *, is_timed: bool = True
) -> _Columns:
    """The rows of these keys, as many of each as of the first. Raises ConfigError for any other shape.

    `is_timed`: their leading shape is (R, T), not (N,).
    """
    found: dict[str, list[Any]] = {}
    for name in (*needed, *optional):
        path, axes = _KEYS[name]
        axes = axes if is_timed else axes.removeprefix("T")
        values = _plain(_value(arrays, path), 1 + max(len(axes), 1))
        if values is None and name in optional:
            continue
        if values is None:
            raise ConfigError(f"rollouts in array form have no key {'/'.join(path)}; see the documented shapes")
        rows = _axis(values, "R", name)
        num_rows = len(next(iter(found.values()), rows))
        if len(rows) != num_rows:
            raise ConfigError(
                f"rollouts in array form: {name} has {len(rows)} rows, others {num_rows}; leading shapes must agree"
            )
        found[name] = [_row(row, axes, _id(agent) + 1, f"{name} of row {number}") for number, row in enumerate(rows)]
    _check_timesteps({name: rows for name, rows in found.items() if is_timed and _KEYS[name][1].startswith("T")})
    return found


def _value(arrays: Arrays, path: tuple[str, ...]) -> Any:
    """The values of a nested key; None if there are none."""
    found: Any = arrays.get(path, arrays)  # type: ignore[call-overload]
    if found is not arrays:
        return found
    for key in path:
        found = cast("Mapping[str, Any]", found).get(key) if isinstance(found, Mapping) else None
    return found


def _plain(values: Any, num_axes: int) -> Any:
    """Values with their first axes as lists."""
    plain = values.tolist() if hasattr(values, "tolist") else values
    if not num_axes or not isinstance(plain, list | tuple):
        return plain
    return [_plain(one, num_axes - 1) for one in cast("Sequence[Any]", plain)]


def _row(row: Any, axes: str, num_agents: int, where: str) -> Any:
    """A row of these axes, with at least `num_agents` values by agent; the value itself if there are no axes."""
    if not axes:
        value = _axis(row, "T", where, 1)[0] if isinstance(row, list) else row
        if isinstance(value, list | dict):
            raise ConfigError(f"rollouts in array form: {where} is not one value; see the documented shapes")
        return value
    values = _axis(row, axes[0], where, {"T": 1, "A": num_agents}.get(axes[0], 0))
    for value in values[-1:] if axes == "TMA" else values:  # the last timestep holds the whole history
        if axes[1:]:
            _row(value, axes[1:], num_agents, where)
    return values


def _axis(values: Any, axis: str, where: str, least: int = 0) -> list[Any]:
    if not isinstance(values, list):
        raise ConfigError(f"rollouts in array form: {where} has no axis of {_AXES[axis]}; see the documented shapes")
    found = cast("list[Any]", values)
    if len(found) < least:
        raise ConfigError(
            f"rollouts in array form: {where} has {len(found)} {_AXES[axis]}, fewer than {least}; see the documented "
            f"shapes"
        )
    return found


def _check_timesteps(columns: _Columns) -> None:
    for number, rows in enumerate(zip(*columns.values(), strict=True)):
        counts = {name: len(row) for name, row in zip(columns, rows, strict=True)}
        if len(set(counts.values())) > 1:
            found = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise ConfigError(f"rollouts in array form: timesteps of row {number}: {found}; leading shapes must agree")


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _id(agent: GroupAgent) -> int:
    return 0 if agent.group is None else agent.group.agent_id(agent.name)
