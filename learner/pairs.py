"""Preference pairs of trajectories: answers to the same prompt, and which of two has the higher score. Pure."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from rollstream.schemas import tokens
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events import TrajectoryAssembled
from rollstream.schemas.events_rollouts import Completion
from rollstream.schemas.settings import AlgorithmSettings

TokenIds = bytes
"""Token ids as this machine's int32, so that long prompts are compared and hashed at once."""


class Item(NamedTuple):
    """One completion."""

    owner: tuple[str, str]
    """Group and agent: only their own answers are compared."""
    prompt_ids: TokenIds
    completion_ids: TokenIds
    scores: tuple[float | None, float | None, float]
    """Its step's score among answers to the same prompt, its step's reward, its trajectory's reward."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt; none of the three is empty."""

    prompt_ids: TokenIds
    chosen_ids: TokenIds
    rejected_ids: TokenIds
    score_diff: float
    """Above 0."""


class _Answer(NamedTuple):
    completion_ids: TokenIds
    score: float


def items_of(trajectory: TrajectoryAssembled, reward: float) -> list[Item]:
    """Every completion that has tokens and a prompt. `reward`: what the manifest says of the trajectory.

    Raises DecodeError naming the trajectory if a completion lies outside its sequence.
    """
    items: list[Item] = []
    owner = trajectory.group_id, trajectory.agent
    for sequence in trajectory.sequences:
        token_ids = tokens.decode_ids(sequence.token_ids)
        for part in sequence.completions:
            end = part.start + part.length
            if end > len(token_ids):
                raise DecodeError(
                    f"trajectory {trajectory.trajectory_id}: a completion ends at token {end} of {len(token_ids)}"
                )
            if part.length and part.start:
                prompt, completion = token_ids[: part.start], token_ids[part.start : end]
                scores = (*_of_step(trajectory, part), reward)
                items.append(Item(owner, prompt.tobytes(), completion.tobytes(), scores))
    return items


def pairs_of(items: Iterable[Item], settings: AlgorithmSettings) -> list[Pair]:
    """The pairs of all turns, in an order that does not depend on that of the items.

    A turn is all answers of a group's agent to one prompt. They are compared by the finest score that every one of
    them has. Equal answers are one, with the mean of their scores. Two make a pair if their scores differ, and by
    `min_score_diff` at least. The largest differences come first, and only `max_pairs_per_turn` of a turn are kept.
    """
    return [pair for prompt_ids, answers in _turns(items) for pair in _pairs_of_turn(prompt_ids, answers, settings)]


def _pairs_of_turn(prompt_ids: TokenIds, answers: Sequence[_Answer], settings: AlgorithmSettings) -> list[Pair]:
    ranked = sorted(answers, key=lambda answer: (-answer.score, answer.completion_ids))
    both = combinations(ranked, 2) if settings.exhaustive_pairs else iter([(ranked[0], ranked[-1])])
    pairs = [
        Pair(prompt_ids, better.completion_ids, worse.completion_ids, better.score - worse.score)
        for better, worse in both
        if better.score > worse.score and better.score - worse.score >= settings.min_score_diff
    ]
    pairs.sort(key=lambda pair: (-pair.score_diff, pair.chosen_ids, pair.rejected_ids))
    return pairs[: settings.max_pairs_per_turn]


def _turns(items: Iterable[Item]) -> Iterator[tuple[TokenIds, list[_Answer]]]:
    """Prompt and different answers of every turn, by group, agent and prompt."""
    turns: dict[tuple[tuple[str, str], TokenIds], list[Item]] = {}
    for item in items:
        turns.setdefault((item.owner, item.prompt_ids), []).append(item)
    for (_, prompt_ids), found in sorted(turns.items(), key=lambda turn: turn[0]):
        yield prompt_ids, [_Answer(ids, score) for ids, score in _mean_scores(found).items()]


def _mean_scores(items: Sequence[Item]) -> Mapping[TokenIds, float]:
    """Mean score by answer, exactly rounded: equal scores stay equal however often they come."""
    finest = next(place for place in range(3) if all(item.scores[place] is not None for item in items))
    scores: dict[TokenIds, list[float]] = {}
    for item in items:
        scores.setdefault(item.completion_ids, []).append(item.scores[finest] or 0.0)
    return {answer: statistics.mean(found) for answer, found in scores.items()}


def _of_step(trajectory: TrajectoryAssembled, part: Completion) -> tuple[float | None, float | None]:
    step = str(part.step_index)
    return trajectory.step_scores.get(step), trajectory.step_rewards.get(step)
