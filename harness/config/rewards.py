"""The rewards that a run is trained on, named by `finetuning.reward_function` and the builder's `rewards`.

A name is an evaluator of the file (`eval.evaluators.NAME`), else a registered reward function. Evaluators of other
packages' types are allowed in the file, but cannot be used as rewards here.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from pydantic import JsonValue, ValidationError

from rollstream.harness.config.checks import warn
from rollstream.harness.config.dataset import MAX_SHOWN, Example
from rollstream.producers.rollout.reply import MAX_TURNS
from rollstream.schemas.algorithm_settings import CONTEXT_KEY, AlgorithmSettings, Teacher, teacher_of
from rollstream.schemas.config import RunConfig
from rollstream.schemas.errors import ConfigError, nearest
from rollstream.schemas.evaluators import SECTION, Evaluator, LlmJudge, answer_key, kind_of
from rollstream.schemas.events.recorded import INPUT, MADE_ELSEWHERE, RECORDED, RecordedMember, RecordedRollout
from rollstream.schemas.finetuning import builder_path
from rollstream.schemas.permissions import (
    COMMAND,
    GATEWAY,
    Permissions,
    named_by,
    named_by_algorithm,
    named_by_model,
    named_by_teacher,
)
from rollstream.schemas.settings import OTHERS, RolloutSettings

ENVIRONMENT = "environment"
"""Value of `finetuning.reward_function.name` for the environment's own rewards."""
_WITHIN_KEY = re.compile(r"(\w+)(?:\.\w+|\[[^\]]*\])*(?:![ars])?(?::[^\s:]+)?")
"""A key of the inputs with a part of its value, or a format of it, as Python's `str.format` writes them."""


def evaluators_of(config: RunConfig) -> dict[str, dict[str, JsonValue]]:
    """Configurations of the evaluators that the run's rewards name, as written."""
    return {name: config.evaluators[name] for name in config.reward_functions if _is_ours(config.evaluators.get(name))}


def weights_of(config: RunConfig) -> dict[str, float]:
    """Weight by reward name.

    `finetuning.reward_function` names the reward: others count only if they have a weight. Rollouts recorded with
    rewards keep all of them.
    """
    chosen, builder = config.finetuning.reward_function, config.builder
    if chosen is None or not (chosen.name == ENVIRONMENT or chosen.name in config.reward_functions):
        return dict(builder.reward_weights)
    if chosen.name == ENVIRONMENT:
        return {**dict.fromkeys(builder.rewards, 0.0), **builder.reward_weights}
    return {OTHERS: 0.0, chosen.name: 1.0, **builder.reward_weights}


def warn_weights(config: RunConfig) -> None:
    """Warn of a weight whose name is like that of a reward of the run: the reward then counts with another weight.

    Other names may be those of the environment's own rewards, which only its code has.
    """
    weights = config.builder.reward_weights
    known = {*config.reward_functions, *config.evaluators}
    for name in weights.keys() - {OTHERS, *known}:
        near = nearest(name, known - weights.keys())
        if near is not None:
            warn(
                f"{builder_path(config.finetuning, 'reward_weights')}: {name}: no reward of the "
                f"file has this name, and {near} has no weight of its own; did you mean {near}?"
            )


def algorithm_of(config: RunConfig) -> AlgorithmSettings:
    """The run's algorithm with what the builder decides: the sampling, and the weights of rewards that the algorithm
    adds up by itself, unless it sets them.
    """
    builder = config.builder
    found = config.adapter.algorithm.for_run(
        num_generations=builder.num_generations, temperature=builder.sampling.temperature
    )
    if not found.needs.named_rewards or not (weights := weights_of(config)):
        return found
    own: Any = found
    return found.model_copy(update={"reward_weights": {**weights, **own.reward_weights}})


def algorithm_weights_of(config: RunConfig) -> tuple[dict[str, float], ...]:
    """Reward weights of the trained algorithms that differ from the builder's."""
    found = [algorithm_of(one) for one in config.trained().values()]
    weights = [dict[str, float](one.reward_weights) for one in cast(Any, found) if one.needs.named_rewards]
    return tuple(one for one in weights if one != weights_of(config))


def missing_score_of(config: RunConfig) -> Any:
    """Treatment of a rollout without a score: the builder's choice, if an algorithm of the run needs scores."""
    needs = [one.adapter.algorithm.needs for one in config.trained().values()]
    return config.builder.missing_score if any(one.rewards for one in needs) else "unneeded"


def check_rewarded(config: RunConfig, rollouts: Iterable[RecordedRollout], location: str) -> None:
    """Raises ConfigError if no recorded rollout has a reward, and the configuration runs none but needs one."""
    if _needs_rewards(config) and not any(_is_rewarded(one) for one in rollouts):
        raise _unrewarded(config, location)


def _needs_rewards(config: RunConfig) -> bool:
    """Whether recorded rollouts must bring their rewards."""
    return not config.reward_functions and missing_score_of(config) != "unneeded" and bool(config.trained())


def _is_rewarded(rollout: RecordedRollout) -> bool:
    """Whether a recorded rollout has a reward, or needs none."""
    return bool(rollout.rewards) or rollout.error is not None or rollout.stop_reason == MAX_TURNS


def _unrewarded(config: RunConfig, location: str) -> ConfigError:
    key = builder_path(config.finetuning, "rewards")
    chosen = config.finetuning.reward_function
    name = None if chosen is None or chosen.name == ENVIRONMENT else chosen.name
    why = f"{key} is empty" if name is None else f"finetuning.reward_function does not run {name} for recorded rollouts"
    return ConfigError(f"{location}: no rollout has a reward, and {why}; write `{key}: [{name or 'NAME'}]`")


def _check_recorded(config: RunConfig, examples: Iterable[Example], location: str) -> None:
    """As `check_rewarded`, for the rollouts in a dataset's examples: of those in the store nothing is known here."""
    if not _needs_rewards(config):
        return
    groups = [example.inputs.get(INPUT) for example in examples]
    found = [member for group in groups if isinstance(group, list) for member in group]
    try:
        for member in map(RecordedMember.model_validate, found):  # which takes long: up to the first one with a reward
            if member.rollout is None or _is_rewarded(member.rollout):
                return
    except ValidationError:
        return  # the rollout fails with what is wrong
    if found:
        raise _unrewarded(config, location)


def frozen_agents_of(config: RunConfig) -> tuple[str, ...]:
    """Agents of model groups that are not trained: they need no reward."""
    trained = config.trained()
    return tuple(agent for agent, group in config.agents.items() if group not in trained)


def drops_dead_branches(config: RunConfig) -> bool:
    """Whether discarded answers are left out: as the builder says, else where an agent outside may discard some."""
    asked = config.builder.drop_dead_branches
    return asked if asked is not None else config.environment == GATEWAY or config.environment.startswith(COMMAND)


def permissions_of(config: RunConfig, env: Mapping[str, str] = os.environ) -> Permissions:
    """Names that a trusted configuration permits to producers and the learner."""
    named = RolloutSettings(
        environment=config.environment,
        environment_config=config.builder.environment_config,
        rewards=config.reward_functions,
        evaluators=config.evaluators,
    )
    others: set[str] = set()
    for adapter in (one.adapter for one in config.by_group().values()):
        others |= named_by_model(adapter.model.path) | named_by_algorithm(adapter.algorithm.name)
        others |= named_by_teacher(adapter.algorithm)
    return Permissions.of([*named_by(named), *sorted(others)], env)


def check_reward_names(config: RunConfig) -> None:
    """Raises ConfigError for an evaluator or reward function whose name has another meaning where rewards are named."""
    reserved = {ENVIRONMENT: "the environment's own rewards", OTHERS: "all rewards that reward_weights does not name"}
    for name in (*config.evaluators, *config.reward_functions):
        if name in reserved:
            raise ConfigError(f"{path_of(config, name)}: {name!r} stands for {reserved[name]}; give it another name")


def check_evaluators(config: RunConfig, env: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError naming the path of an error in our evaluators' blocks, or of another package's evaluator used
    as a reward."""
    from rollstream.producers.evaluators.table import read

    for name, block in config.evaluators.items():
        if _is_ours(block) or name in config.reward_functions:
            read(name, block, permissions_of(config, env), compiles_patterns=True)


def check_new_evaluators(config: RunConfig) -> None:
    """Raises ConfigError for a new run with an evaluator that has true or false in place of a number, or a JSON schema
    that refers to what it does not contain.

    External services read the file of a schema themselves.
    """
    from rollstream.producers.evaluators import table

    for name, block in config.evaluators.items():
        if _is_ours(block):
            table.check_numbers(name, block, permissions_of(config))
    for name, block in evaluators_of(config).items() if config.builder.services == "managed" else ():
        table.check_references(name, block, permissions_of(config))


def check_agents(config: RunConfig) -> None:
    """Raises ConfigError for a new run with an evaluator of an agent that it does not have.

    Where rollouts are played outside, their agents are known only if the configuration names them.
    """
    from rollstream.producers.evaluators.table import read

    is_outside = config.environment in (*MADE_ELSEWHERE, GATEWAY) or config.environment.startswith(COMMAND)
    if is_outside and "agents" not in config.builder.model_fields_set:
        return
    for name, block in evaluators_of(config).items():
        agent = getattr(read(name, block, permissions_of(config)), "agent", None)
        if agent is not None and agent not in config.agents:
            raise ConfigError(
                f"{SECTION}.{name}.agent: {agent!r} is not an agent of the run, so no answer would be scored; name one "
                f"of: {', '.join(config.agents)}"
            )


def check_reward(config: RunConfig, name: str) -> None:
    """Look a reward up, or build the evaluator, as producers will. Raises ConfigError naming the path."""
    from rollstream.producers.evaluators.table import check
    from rollstream.producers.rollout.registry import reward

    if name in config.evaluators:
        check(name, config.evaluators[name], permissions_of(config))
        return
    try:
        reward(name, permissions_of(config))
    except ConfigError as error:
        named = ", ".join(sorted(config.evaluators)) or "none"
        raise ConfigError(f"{path_of(config, name)}: {error}; {SECTION} has: {named}") from error


def check_examples(config: RunConfig, examples: Sequence[Example], location: str, *, is_new: bool = True) -> None:
    """Raises ConfigError naming the first example whose inputs lack what an evaluator or a teacher of the run needs.

    In a new run, also one whose answer an evaluator cannot score, and recorded rollouts that nothing scores.

    `location`: the source of the examples, for the message. Recorded rollouts may bring the evaluator's reward.
    """
    from rollstream.producers.evaluators.table import check_answer, read

    if is_new and config.environment == RECORDED:
        _check_recorded(config, examples, location)
    evaluators = {name: read(name, block, permissions_of(config)) for name, block in evaluators_of(config).items()}
    needed = [(f"{SECTION}.{name}.{field}", key) for name, one in evaluators.items() for field, key in _keys(one)]
    for path, teacher in _contexts(config).items():
        needed += [(path, key) for key in teacher.keys]
        if is_new:
            _check_unfilled(path, teacher, examples)
    for example in examples if needed else ():
        for path, key in needed:
            if key not in example.inputs:
                shown = ", ".join(list(example.inputs)[:MAX_SHOWN]) or "none"
                raise ConfigError(
                    f"{path}: example {example.example_id!r} of {location} has no key {key!r}; its keys are: {shown}"
                )
        for name, one in evaluators.items() if is_new and config.environment != RECORDED else ():
            where = f"{SECTION}.{name}.answer_key: example {example.example_id!r} of {location}"
            check_answer(where, one, example.inputs)


def _contexts(config: RunConfig) -> dict[str, Teacher]:
    """Teachers of the trained model groups, by the path of their context."""
    teachers = {name: teacher_of(one.adapter.algorithm) for name, one in config.trained().items()}
    return {
        config.group_path(name, "algorithm.context"): teacher
        for name, teacher in teachers.items()
        if teacher is not None
    }


def _check_unfilled(path: str, teacher: Teacher, examples: Sequence[Example]) -> None:
    """Raises ConfigError for a key in braces that is not filled in, because it is not a word.

    Other texts in braces are left alone: they may be JSON or LaTeX. Warns of a context that refers to no key where one
    is expected: beside such a text, or of a teacher that differs from the policy by the context alone.
    """
    keys = {key for example in examples for key in example.inputs if key.strip()} if teacher.unfilled else set[str]()
    for text in teacher.unfilled:
        near = text.strip()
        within = _WITHIN_KEY.fullmatch(near)
        if near in keys and CONTEXT_KEY.fullmatch(f"{{{near}}}"):
            remedy = f"write {{{near}}}"
        elif near in keys:
            remedy = f"rename the key {near!r} of the examples to a word, such as " + re.sub(r"\W+", "_", near)
        elif within is not None and within[1] in keys:
            remedy = f"give what it stands for a key of its own in the examples, or write {{{within[1]}}}"
        else:
            continue
        raise ConfigError(
            f"{path}: {{{text}}} would not be filled in: a key in braces is one word of letters, digits and _; {remedy}"
        )
    if teacher.context and not teacher.keys and (teacher.unfilled or not teacher.path):
        warn(
            f"{path}: refers to no key of the examples, so it is the same for all of them; a key is written as {{KEY}}"
        )


def _keys(config: Evaluator) -> list[tuple[str, str]]:
    """Pairs of configuration field and required key of the inputs."""
    answer = answer_key(config)
    keys = [("answer_key", answer)] if answer is not None else []
    if isinstance(config, LlmJudge) and "{question}" in config.prompt:
        keys.append(("question_key", config.question_key))
    return keys


def _is_ours(block: Mapping[str, JsonValue] | None) -> bool:
    return block is not None and kind_of(block.get("_type")) is not None


def path_of(config: RunConfig, name: str) -> str:
    """Path in the file that a reward's name refers to."""
    chosen = config.finetuning.reward_function
    if name in config.evaluators:
        return f"{SECTION}.{name}"
    if chosen is not None and chosen.name == name:
        return "finetuning.reward_function.name"
    return builder_path(config.finetuning, "rewards")
