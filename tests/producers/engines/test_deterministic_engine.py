"""With `deterministic: true` the engine answers as recorded before batches became continuous.

Log-probabilities may differ in their last digits on another processor (by 2e-6 on one); ids may not.
"""

import json
from pathlib import Path

import pytest

from rollstream.producers.engines.base import GenerationRequest
from rollstream.schemas.settings import Sampling
from tests.producers.engines.engine_rig import GROUP, published, requests, run, together

RECORDED = Path(__file__).with_name("deterministic_answers.json")


def asked():
    """Short and long answers, limited ones, greedy ones, and talks whose prompts continue each other."""
    long = [GenerationRequest(GROUP, range(9, 9 + n), Sampling(max_new_tokens=90), n) for n in (1, 5, 40)]
    nested = [GenerationRequest(GROUP, range(10, 10 + n), Sampling(max_new_tokens=6), 7) for n in (20, 20, 45, 70)]
    limited = requests(6, seed=1, temperature=0.7, top_k=20, top_p=0.9)
    return [*long, *nested, *limited, *requests(4, seed=2, temperature=0.0), *requests(6, seed=3)]


def test_deterministic_answers_are_those_that_were_recorded(folder, versions):
    answers = run(together(asked()), (published(folder), versions(0)), deterministic=True)
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert [list(one.token_ids) for one in answers] == [one["token_ids"] for one in recorded]
    for one, kept in zip(answers, recorded, strict=True):
        assert one.logprobs == pytest.approx(kept["logprobs"], abs=1e-5)
