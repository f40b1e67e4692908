"""Preference pairs to padded tensors: every answer once a micro-batch, however many pairs it stands in."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollstream.learner import collate
from rollstream.learner.collate import MicroBatch, Row
from rollstream.learner.pairs import Pair, TokenIds

Answer = tuple[TokenIds, TokenIds]
"""Prompt and completion."""


@dataclass(frozen=True, slots=True)
class PairMicroBatch:
    """Pairs of one forward."""

    rows: MicroBatch
    lengths_B: tuple[int, ...]
    """Completion tokens of each row."""
    chosen_K: tuple[int, ...]
    """Row of each pair's chosen answer."""
    rejected_K: tuple[int, ...]
    num_tokens: int
    """Unpadded, prompts included."""


def micro_batches(pairs: Sequence[Pair], max_tokens: int) -> list[PairMicroBatch]:
    """Pairs from long to short, those of one prompt together, as many as `max_tokens` hold (at least one).

    Padded tokens are counted, over the different answers.
    """
    batches: list[PairMicroBatch] = []
    waiting: list[Pair] = []
    answers: set[Answer] = set()
    longest = 0
    for pair in sorted(pairs, key=_by_length):
        both = {(pair.prompt_ids, pair.chosen_ids), (pair.prompt_ids, pair.rejected_ids)}
        length = max(longest, *(_num_tokens(answer) for answer in both))
        if waiting and len(answers | both) * length > max_tokens:
            batches.append(_pad(waiting))
            waiting, answers = [], set()
            length = max(_num_tokens(answer) for answer in both)
        waiting.append(pair)
        answers |= both
        longest = length
    return [*batches, _pad(waiting)] if waiting else batches


def _by_length(pair: Pair) -> tuple[int, TokenIds, int]:
    return -len(pair.prompt_ids), pair.prompt_ids, -max(len(pair.chosen_ids), len(pair.rejected_ids))


def _num_tokens(answer: Answer) -> int:
    return (len(answer[0]) + len(answer[1])) // np.dtype(np.int32).itemsize


def _pad(pairs: Sequence[Pair]) -> PairMicroBatch:
    places: dict[Answer, int] = {}
    chosen_K = tuple(places.setdefault((pair.prompt_ids, pair.chosen_ids), len(places)) for pair in pairs)
    rejected_K = tuple(places.setdefault((pair.prompt_ids, pair.rejected_ids), len(places)) for pair in pairs)
    rows = [_row(answer) for answer in places]
    return PairMicroBatch(
        rows=collate.pad(rows),
        lengths_B=tuple(row.num_completion_tokens for row in rows),
        chosen_K=chosen_K,
        rejected_K=rejected_K,
        num_tokens=sum(len(row.token_ids) for row in rows),
    )


def _row(answer: Answer) -> Row:
    prompt_ids, completion_ids = (np.frombuffer(part, np.int32) for part in answer)
    token_ids = np.concatenate((prompt_ids, completion_ids))
    mask = np.arange(len(token_ids)) >= len(prompt_ids)
    return Row(token_ids, mask, np.zeros(len(token_ids), np.float32), 0.0)
