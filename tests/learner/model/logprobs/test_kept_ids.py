"""Truncated sampling, from the engine to the learner: over the recorded ids, ratios at equal weights are 1."""

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rollstream.learner.model import collate
from rollstream.learner.model.policy import PolicyModel
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.processors.assemble.sequences import join_calls
from rollstream.producers.engines.base import Generation, GenerationRequest
from rollstream.producers.rollout.conversation import Prompt, recorded_call
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events import StepRecorded, TrajectoryAssembled
from rollstream.schemas.events.rollouts import VersionSpan
from rollstream.schemas.settings import ModelSettings, Sampling
from rollstream.schemas.tokens import KeptIds, encode_kept
from tests.producers.engines.engine_rig import GROUP, noised, published, run, together

TEMPERATURE = 0.8
LIMITS = {"top_p": 0.7, "top_k": 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", seed=0, num_layers=2)


def asked(**sampling: Any) -> list[GenerationRequest]:
    prompts = [list(range(5, 6 + seed % 9)) for seed in range(64)]
    how = Sampling(temperature=TEMPERATURE, max_new_tokens=24, **sampling)
    return [GenerationRequest(GROUP, prompt, how, seed) for seed, prompt in enumerate(prompts)]


def sampled(folder: Path, batching: str, requests: list[GenerationRequest]) -> list[Generation]:
    weights = folder.parent / "3.safetensors"
    save_file(noised(folder, 3), weights)
    return run(together(requests), (published(folder, 3), weights), batching=batching)


def trajectory(number: int, request: GenerationRequest, generation: Generation, **changes: Any) -> TrajectoryAssembled:
    """A trajectory as assembly makes it from a step of one call."""
    llm = recorded_call(Prompt("", array("i", request.prompt_ids), None), generation)
    base = {"run_id": "run", "time_ms": 0, "group_id": "g", "rollout_id": f"g/m{number}/a0"}
    llm = llm.model_copy(update=changes)
    step = StepRecorded(**base, step_index=0, agent="agent", event_type="LLM_END", uuid="u", llm=llm)
    return TrajectoryAssembled(
        **base,
        trajectory_id=f"g/m{number}/a0/agent",
        agent="agent",
        model_group=GROUP,
        member=number,
        attempt=0,
        example_id="e",
        job_id="run/rl",
        epoch=0,
        reward=0.0,
        sequences=join_calls([step]),
        num_steps=1,
        steps_digest="0" * 64,
    )


def ratios(folder: Path, trajectories: list[TrajectoryAssembled], *, by_logits: bool = False) -> torch.Tensor:
    """The learner's probability of each token over the recorded one, at the weights that sampled it."""
    policy = PolicyModel(ModelSettings(path=str(folder), device="cpu"), seed=0)
    policy.load_weights({name: value for name, value in noised(folder, 3).items() if name in policy.weights()})
    policy.selects_logprobs = policy.selects_logprobs and not by_logits
    policy.use_dropout(False)
    rows = [row for one in trajectories for row in collate.rows_of(one, needs_logprobs=True)]
    prepared = [collate.TrainRow(row, row.mask) for row in rows]
    found: list[torch.Tensor] = []
    for batch in collate.micro_batches(prepared, [(index,) for index in range(len(rows))], 400):
        with torch.no_grad():
            logprobs, _ = policy.completion_terms(batch, temperature=TEMPERATURE, entropy_needs_grad=False)
        found.append((logprobs - batch.logprobs[batch.mask]).exp())
    return torch.cat(found)


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_ratios_at_equal_weights_are_one_over_the_recorded_ids_and_below_one_without(
    folder: Path, batching: str
) -> None:
    requests = asked(**LIMITS, record_kept_ids=True)
    answers = sampled(folder, batching, requests)
    trajectories = [trajectory(*one) for one in zip(range(64), requests, answers, strict=True)]
    found = ratios(folder, trajectories)
    assert len(found) > 500
    assert torch.allclose(found, torch.ones_like(found), atol=1e-3)
    assert torch.allclose(ratios(folder, trajectories, by_logits=True), found, atol=1e-5)
    without = [trajectory(*one, kept_ids=None) for one in zip(range(64), requests, answers, strict=True)]
    assert ratios(folder, without).mean() < 0.9
    assert sampled(folder, batching, asked(**LIMITS))[0].kept is None, "nobody asked"


def test_an_id_that_the_model_does_not_know_is_refused_with_its_trajectory(folder: Path) -> None:
    request = asked()[0]
    answer = Generation((5,), (-1.0,), (), "stop")
    kept = encode_kept(KeptIds([2], [5, 10**6]))
    odd = trajectory(0, request, answer, kept_ids=kept)
    with pytest.raises(DecodeError, match=r"trajectory g/m0/a0/agent, sequence 0: token id 1000000 is outside the"):
        collate.check_token_ids(odd, 100)


def test_rows_with_and_without_kept_ids_share_a_batch() -> None:
    request = asked()[0]
    plain = trajectory(0, request, Generation((5, 6), (-1.0, -1.0), spans(2), "stop"))
    limited = trajectory(1, request, Generation((7, 8), (-1.0, -1.0), spans(2), "stop", KeptIds([2, 0], [3, 7])))
    rows = [
        collate.TrainRow(row, row.mask) for one in (plain, limited) for row in collate.rows_of(one, needs_logprobs=True)
    ]
    kept = collate.pad(rows, [(0,), (1,)]).kept
    assert kept is not None
    assert kept.lengths_N.tolist() == [0, 0, 2, 0]
    assert kept.token_ids_M.tolist() == [3, 7]
    masked = collate.TrainRow(rows[1].row, rows[1].mask & [False, False, True])
    kept = collate.pad([masked], [(0,)]).kept
    assert kept is not None
    assert (kept.lengths_N.tolist(), kept.token_ids_M.tolist()) == ([0], [])
    (imitated,) = collate.rows_of(limited, needs_logprobs=False)
    assert imitated.kept is None


def spans(length: int) -> tuple[VersionSpan, ...]:
    return (VersionSpan(model_group=GROUP, version=3, length=length),)
