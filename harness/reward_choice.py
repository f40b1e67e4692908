"""Which rewards a run is trained on: what `finetuning.reward_function` and the builder's `rewards` name.

A name is an evaluator of the file (`eval.evaluators.NAME`), else a registered reward function. Evaluators of other
packages' types may stand in the file, but no reward can be had from them here.
"""

import os
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import JsonValue

from rollstream.harness.dataset import Example
from rollstream.schemas.config import RunConfig
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.evaluators import MODELS, PLACE, Evaluator, LlmJudge, answer_key

REWARD_FREE = frozenset({"sft"})
"""Algorithms that no reward counts for."""
MAX_SHOWN = 12
"""Keys of an example that an error lists."""


def evaluators_of(config: RunConfig) -> dict[str, dict[str, JsonValue]]:
    """Configurations of the evaluators that the run's rewards name, as written."""
    return {name: config.evaluators[name] for name in config.reward_functions if _is_ours(config.evaluators.get(name))}


def missing_score_of(config: RunConfig) -> Any:
    """What becomes of a rollout without a score: the builder's choice, where the algorithm needs one."""
    return "unneeded" if config.adapter.algorithm.name in REWARD_FREE else config.builder.missing_score


def check_evaluators(config: RunConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError naming the path of what is wrong in a block of ours, or of a foreign one that is to reward."""
    from rollstream.producers.evaluators import read

    for name, block in config.evaluators.items():
        if _is_ours(block) or name in config.reward_functions:
            read(name, block, environ)


def check_reward(config: RunConfig, name: str, environ: Mapping[str, str] = os.environ) -> None:
    """Look a reward up, or build the evaluator, as producers will. Raises ConfigError naming the path."""
    from rollstream.producers.evaluators import check
    from rollstream.producers.registry import reward

    if name in config.evaluators:
        check(name, config.evaluators[name], environ)
        return
    try:
        reward(name)
    except ConfigError as error:
        named = ", ".join(sorted(config.evaluators)) or "none"
        raise ConfigError(f"{place_of(config, name)}: {error}; {PLACE} has: {named}") from error


def check_examples(config: RunConfig, examples: Iterable[Example], place: str) -> None:
    """Raises ConfigError naming the first example whose inputs lack what an evaluator of the run needs.

    `place`: where the examples come from.
    """
    from rollstream.producers.evaluators import read

    needed = [
        (f"{PLACE}.{name}.{field}", key)
        for name, block in evaluators_of(config).items()
        for field, key in _keys(read(name, block, os.environ))
    ]
    for example in examples if needed else ():
        for path, key in needed:
            if key not in example.inputs:
                shown = ", ".join(list(example.inputs)[:MAX_SHOWN]) or "none"
                raise ConfigError(
                    f"{path}: example {example.example_id!r} of {place} has no {key!r}; its keys are: {shown}"
                )


def _keys(config: Evaluator) -> list[tuple[str, str]]:
    """(field of the configuration, key of the inputs) that it needs."""
    answer = answer_key(config)
    keys = [("answer_key", answer)] if answer is not None else []
    if isinstance(config, LlmJudge) and "{question}" in config.prompt:
        keys.append(("question_key", config.question_key))
    return keys


def _is_ours(block: Mapping[str, JsonValue] | None) -> bool:
    return block is not None and block.get("_type") in MODELS


def place_of(config: RunConfig, name: str) -> str:
    """Path in the file of what a reward's name means."""
    chosen = config.finetuning.reward_function
    if name in config.evaluators:
        return f"{PLACE}.{name}"
    if chosen is not None and chosen.name == name:
        return "finetuning.reward_function.name"
    return f"trajectory_builders.{config.finetuning.trajectory_builder}.rewards"
