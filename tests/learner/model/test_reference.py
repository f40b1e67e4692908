"""The reference's own type: half the memory of a copy in float32, log-probabilities that differ by its rounding."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from rollstream.learner.algorithms.builtin.grpo import Grpo
from rollstream.learner.model import collate
from rollstream.learner.model.loading import hold_parameters_in
from rollstream.learner.model.policy import PolicyModel, Reference
from rollstream.learner.scoring.index import scorers_of
from rollstream.learner.scoring.models import TeacherModel
from rollstream.schemas.algorithms import GrpoSettings
from rollstream.schemas.events import JobSucceeded, ReferenceScored, StepTrained
from rollstream.schemas.settings import LoraSettings, ModelSettings
from tests.rigs.runs.retrained import assert_retrained, steps_of
from tests.rigs.runs.step_rows import rows


def test_a_reference_in_bfloat16_takes_half_and_the_policy_stays_as_it_is(tiny_model: Path) -> None:
    batch = collate.pad(*collate.prepared_rows(rows(), Grpo().prepare(rows(), GrpoSettings())))
    found: dict[str, torch.Tensor] = {}
    sizes: dict[str, int] = {}
    for name in ("auto", "bfloat16"):
        settings = ModelSettings.model_validate({"path": str(tiny_model), "device": "cpu", "reference_dtype": name})
        policy = PolicyModel(settings, seed=0)
        before = policy.weights_bytes()
        reference = Reference(policy, before, "base")
        found[name] = reference.logprobs(batch, temperature=1.0)
        sizes[name] = sum(value.nbytes for value in reference._policy.module.state_dict().values())
        assert policy.weights_bytes() == before
        assert policy.compute_dtype == torch.float32
    assert 2 * sizes["bfloat16"] == sizes["auto"]
    assert 0 < (found["bfloat16"] - found["auto"]).abs().max() < 0.03


@pytest.mark.parametrize("whose", ["reference", "teacher"])
def test_a_model_in_bfloat16_is_never_held_in_float32_and_turns_by_exact_angles(
    tiny_model: Path, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"path": str(tiny_model), "device": "cpu", "reference_dtype": "bfloat16"}
    policy = PolicyModel(ModelSettings.model_validate(given), seed=0)
    monkeypatch.setattr(torch.nn.Module, "to", lambda own, *_: own)  # which casts buffers, too
    if whose == "reference":
        module = Reference(policy, policy.weights_bytes(), "base")._policy.module
    else:
        module = TeacherModel(policy.settings.model_copy(update={"dtype": "bfloat16"}), str(tiny_model)).model.module
    assert {one.dtype for one in module.parameters()} == {torch.bfloat16}
    own, its = dict(policy.module.named_buffers()), dict(module.named_buffers())
    assert own.keys() == its.keys()
    assert all(torch.equal(value, its[name]) and value.dtype == its[name].dtype for name, value in own.items())


def test_parameters_change_their_type_and_buffers_do_not(tiny_model: Path) -> None:
    module = PolicyModel(ModelSettings(path=str(tiny_model), device="cpu"), seed=0).module
    before = {name: value.clone() for name, value in module.named_buffers()}
    hold_parameters_in(module, torch.bfloat16)
    assert {one.dtype for one in module.parameters()} == {torch.bfloat16}
    assert before
    assert all(torch.equal(value, before[name]) for name, value in module.named_buffers())


def test_the_type_is_a_part_of_the_scorer_and_training_again_gives_equal_bits(lab: Any) -> None:
    async def scenario() -> None:
        model = ModelSettings(path=str(lab.model), device="cpu", reference_dtype="bfloat16")
        algorithm = GrpoSettings(kl_coefficient=0.1)
        job = await lab.submit(num_versions=2, model=model, algorithm=algorithm)
        await lab.plan(job, 2)
        await lab.work(lab.has(JobSucceeded))
        assert {event.scorer.dtype for event in await lab.events("weights", ReferenceScored)} == {"bfloat16"}
        (scorer,) = scorers_of(job.settings, "0" * 64)
        (plain,) = scorers_of(lab.settings(algorithm=algorithm), "0" * 64)
        assert plain.dtype == ""
        assert "dtype" not in plain.model_dump_json(), "so that it has the name that it had before"
        assert scorer.sha256 != plain.sha256
        assert len(await lab.events("weights", StepTrained)) == 2
        await assert_retrained(lab, job, await steps_of(lab))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": LoraSettings(), "reference_dtype": "bfloat16"}, "reference_dtype has no effect below adapters"),
        ({"quantization": "nf4"}, "quantization nf4 is for a base model below adapters; add lora"),
    ],
)
def test_settings_that_have_no_effect_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ModelSettings(path="m", **changes)
