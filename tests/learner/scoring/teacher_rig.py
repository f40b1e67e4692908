"""Scores of a teacher, computed by transformers alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollstream.learner.scoring.scores import by_sequence
from rollstream.schemas import tokens
from rollstream.schemas.events import (
    ReferenceScored,
    TrajectoryAssembled,
)


def logprobs_by_transformers(model: Path, token_ids: list[int]) -> list[float]:
    """Log-probability of each id but the first, given those before it."""
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    with torch.no_grad():
        found = torch.log_softmax(module(torch.tensor([token_ids])).logits[0, :-1], -1)
    return found[torch.arange(len(token_ids) - 1), token_ids[1:]].tolist()


async def assert_scores_are_those_of(lab: Any, model: Path, prefix: list[int]) -> None:
    """Every recorded score is what transformers computes in float64, `prefix` before the sequence."""
    recorded = await lab.events("weights", ReferenceScored)
    trajectories = {one.trajectory_id: one for one in await lab.events("trajectories", TrajectoryAssembled)}
    assert len(recorded) == len(trajectories) == 16
    for event in recorded[::5]:
        trajectory = trajectories[event.trajectory_id]
        scores = by_sequence(trajectory, np.frombuffer(tokens.decode_floats(event.logprobs), np.float32))
        for sequence, values in zip(trajectory.sequences, scores, strict=True):
            token_ids = [*prefix, *tokens.decode_ids(sequence.token_ids)]
            wanted = [0.0] * (1 - min(1, len(prefix))) + logprobs_by_transformers(model, token_ids)[
                max(0, len(prefix) - 1) :
            ]
            for part in sequence.completions:
                at = slice(part.start, part.start + part.length)
                assert values[at].tolist() == pytest.approx(wanted[at], rel=1e-5)
