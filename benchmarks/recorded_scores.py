"""Rows with log-probabilities under a reference or a teacher, as the learner records them before a step."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from rollstream.learner.algorithms.base import Row
from rollstream.learner.model.collate import tree_micro_batches
from rollstream.learner.model.micro_batch import TrainRow
from rollstream.learner.model.policy import Reference
from rollstream.learner.scoring.models import TeacherModel


def scored(rows: Sequence[Row], role: str, scorer: Reference | TeacherModel, max_tokens: int) -> list[Row]:
    """The rows with the scores of `role`, `reference` or `teacher`; `max_tokens`: of a forward."""
    found: dict[int, Tensor] = {}
    units = [(index,) for index in range(len(rows))]
    for batch in tree_micro_batches([TrainRow(row, row.mask) for row in rows], units, max_tokens):
        logprobs_N = scorer.logprobs(batch, temperature=1.0)
        found |= zip(batch.rows, logprobs_N.split(batch.lengths), strict=True)
    made: list[Row] = []
    for index, row in enumerate(rows):
        scores_T = np.zeros(len(row.token_ids), np.float32)
        scores_T[row.mask] = found[index].numpy()
        made.append(replace(row, scores={**row.scores, role: scores_T}))
    return made
