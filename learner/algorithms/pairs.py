"""Preference pairs of trajectories: answers to the same prompt, and which of two has the higher score. Pure."""

import hashlib
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rollstream.learner.algorithms.base import Row
from rollstream.schemas import tokens
from rollstream.schemas.algorithm_settings import PairSettings, pairs_by_score
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events import TrajectoryAssembled
from rollstream.schemas.events.rollouts import Completion

TokenIds = bytes
"""Token ids as this machine's int32, so that long prompts are compared and hashed at once."""


class Item(NamedTuple):
    """One completion."""

    owner: tuple[str, str]
    """Group and agent: only their own answers are compared."""
    sequence: TokenIds
    """The sequence that it is in: one object for all of its completions, whose prompts would add up to its square."""
    start: int
    """Its first byte in `sequence`, as `end` is the one after its last: everything before is its prompt."""
    end: int
    prompt_sha256: bytes
    scores: tuple[float | None, float | None, float]
    """Its step's score among answers to the same prompt, its step's reward, its trajectory's reward."""
    member: int = 0
    """Index of its trajectory in the batch."""

    @property
    def prompt_ids(self) -> TokenIds:
        """Everything before the completion."""
        return self.sequence[: self.start]

    @property
    def completion_ids(self) -> TokenIds:
        """The sampled tokens."""
        return self.sequence[self.start : self.end]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt; none of the three is empty."""

    prompt_ids: TokenIds
    chosen_ids: TokenIds
    rejected_ids: TokenIds
    score_diff: float
    """Above 0."""
    members: tuple[int, int] = field(default=(0, 0), compare=False)
    """First members of the batch that gave the better and the worse answer."""


class _Answer(NamedTuple):
    completion_ids: TokenIds
    score: float
    member: int
    """First member of the batch that gave it."""


def items_of(trajectory: TrajectoryAssembled, reward: float, member: int = 0) -> list[Item]:
    """Every completion that has tokens and a prompt. `reward`: what the manifest says of the trajectory; `member`: its
    index there.

    Raises DecodeError naming the trajectory if a completion is outside its sequence.
    """
    items: list[Item] = []
    owner = trajectory.group_id, trajectory.agent
    for sequence in trajectory.sequences:
        token_ids = tokens.decode_ids(sequence.token_ids)
        whole, hashed, prompt = token_ids.tobytes(), 0, hashlib.sha256()
        for part in sorted(sequence.completions, key=lambda part: part.start):
            if part.start + part.length > len(token_ids):
                raise DecodeError(
                    f"trajectory {trajectory.trajectory_id}: a completion ends at token {part.start + part.length} of "
                    f"{len(token_ids)}; correct the program that recorded it"
                )
            if part.length and part.start:
                start, end = (at * token_ids.itemsize for at in (part.start, part.start + part.length))
                prompt.update(whole[hashed:start])
                hashed = start
                scores = (*_of_step(trajectory, part), reward)
                items.append(Item(owner, whole, start, end, prompt.digest(), scores, member))
    return items


def pairs_of(items: Iterable[Item], settings: PairSettings) -> list[Pair]:
    """The pairs of all turns, in an order that does not depend on that of the items.

    A turn is all answers of a group's agent to one prompt. They are compared by the finest score that every one of
    them has, or by the rewards of their rollouts if the settings say so. Equal answers are one, with the mean of their
    scores: where rollouts share their beginnings, that is the expected reward of going on from the answer. Two make a
    pair if their scores differ, by `min_score_diff` at least, and the settings do not refuse it. The largest
    differences come first, and only `max_pairs_per_turn` of a turn are kept.
    """
    turns = _turns(items, compares_rollouts=settings.compares_rollouts)
    return [pair for prompt_ids, answers in turns for pair in _pairs_of_turn(prompt_ids, answers, settings)]


def rows_of_pairs(pairs: Iterable[Pair]) -> tuple[list[Row], list[tuple[int, int]]]:
    """Every different answer as one row, and of each pair the rows of the better and the worse one.

    A row is of the first member that gave its answer in one of the pairs.
    """
    index_of: dict[tuple[TokenIds, TokenIds], int] = {}
    member_of: dict[int, int] = {}
    found: list[tuple[int, int]] = []
    for pair in pairs:
        chosen = index_of.setdefault((pair.prompt_ids, pair.chosen_ids), len(index_of))
        rejected = index_of.setdefault((pair.prompt_ids, pair.rejected_ids), len(index_of))
        found.append((chosen, rejected))
        for index, member in zip((chosen, rejected), pair.members, strict=True):
            member_of[index] = min(member, member_of.get(index, member))
    return [_row(*answer, member_of[index]) for answer, index in index_of.items()], found


def _row(prompt_ids: TokenIds, answer_ids: TokenIds, member: int) -> Row:
    token_ids = np.frombuffer(prompt_ids + answer_ids, np.int32)
    mask = np.arange(len(token_ids)) >= len(prompt_ids) // token_ids.itemsize
    return Row(token_ids, mask, np.zeros(len(token_ids), np.float32), member)


def _pairs_of_turn(prompt_ids: TokenIds, answers: Sequence[_Answer], settings: PairSettings) -> list[Pair]:
    pairs, _ = pairs_by_score(
        answers,
        settings,
        score=lambda answer: answer.score,
        tie_break=lambda answer: answer.completion_ids,
        refusal=lambda chosen, rejected: settings.refusal(chosen.score, rejected.score),
    )
    return [
        Pair(
            prompt_ids,
            better.completion_ids,
            worse.completion_ids,
            better.score - worse.score,
            (better.member, worse.member),
        )
        for better, worse in pairs
    ]


def _turns(items: Iterable[Item], *, compares_rollouts: bool) -> Iterator[tuple[TokenIds, list[_Answer]]]:
    """Prompt and answers of every turn that has several different ones, by group, agent and prompt."""
    turns: dict[tuple[tuple[str, str], bytes], list[Item]] = {}
    for item in items:
        turns.setdefault((item.owner, item.prompt_sha256), []).append(item)
    compared = [found for found in turns.values() if len({item.completion_ids for item in found}) > 1]
    for found in sorted(compared, key=lambda found: (found[0].owner, found[0].prompt_ids)):
        means = _mean_scores(found, _finest(found) if not compares_rollouts else -1)
        first: dict[TokenIds, int] = {}
        for item in found:
            first[item.completion_ids] = min(item.member, first.get(item.completion_ids, item.member))
        yield found[0].prompt_ids, [_Answer(ids, score, first[ids]) for ids, score in means.items()]


def _finest(items: Sequence[Item]) -> int:
    """Place of the finest score that all answers have."""
    return next(index for index in range(3) if all(item.scores[index] is not None for item in items))


def _mean_scores(items: Sequence[Item], index: int) -> Mapping[TokenIds, float]:
    """Mean score by answer, exactly rounded: equal scores stay equal however often they come."""
    scores: dict[TokenIds, list[float]] = {}
    for item in items:
        scores.setdefault(item.completion_ids, []).append(item.scores[index] or 0.0)
    return {answer: statistics.mean(found) for answer, found in scores.items()}


def _of_step(trajectory: TrajectoryAssembled, part: Completion) -> tuple[float | None, float | None]:
    step = str(part.step_index)
    return trajectory.step_scores.get(step), trajectory.step_rewards.get(step)
