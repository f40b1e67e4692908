"""Batches and models that do not fit a job: each is named in an event, and the learner goes on."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPTJConfig,
    LlamaConfig,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
)

from rollstream.eventlog import files
from rollstream.eventlog.files import base_sha256
from rollstream.learner.model.export import export_merged
from rollstream.learner.model.loading import num_positions
from rollstream.learner.trainer import JobTrainer
from rollstream.schemas import tokens
from rollstream.schemas.algorithms import GrpoSettings, GspoSettings, MixSettings, SftSettings
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import (
    JobFailed,
    JobSubmitted,
    JobSucceeded,
    StepTrained,
    TrajectoryAssembled,
    WeightsPublished,
)
from rollstream.schemas.events.rollouts import Completion, TokenSequence
from rollstream.schemas.policy_gradient import OffPolicySettings
from rollstream.schemas.settings import LoraSettings, ModelSettings
from tests.learner.conftest import Lab


class ChangedLab(Lab):
    """A lab whose trajectories of job `bad` have other sequences."""

    def changed(self, sequence: TokenSequence) -> TokenSequence:
        raise NotImplementedError

    def trajectory(
        self, job: JobSubmitted, index: int, position: int, *, with_logprobs: bool = True
    ) -> TrajectoryAssembled:
        made = super().trajectory(job, index, position, with_logprobs=with_logprobs)
        if job.job_id != "run-1/bad":
            return made
        return made.model_copy(update={"sequences": tuple(map(self.changed, made.sequences))})


class KeptLab(ChangedLab):
    """The second token of each completion was sampled from a set that does not hold it."""

    def changed(self, sequence: TokenSequence) -> TokenSequence:
        token_ids = tokens.decode_ids(sequence.token_ids)
        completions = []
        for part in sequence.completions:
            sampled = token_ids[part.start : part.start + part.length]
            sets = [{token} if at != 1 else {(token + 1) % 32} for at, token in enumerate(sampled)]
            kept = tokens.KeptIds([len(one) for one in sets], [token for one in sets for token in one])
            completions.append(part.model_copy(update={"kept_ids": tokens.encode_kept(kept)}))
        return sequence.model_copy(update={"completions": tuple(completions)})


class PromptLab(ChangedLab):
    """The trajectories hold prompts alone."""

    def changed(self, sequence: TokenSequence) -> TokenSequence:
        without = None if sequence.logprobs is None else tokens.encode_floats([])
        return sequence.model_copy(update={"completions": (), "logprobs": without})


class TruncatedLab(ChangedLab):
    """Every completion ended at the token limit."""

    def changed(self, sequence: TokenSequence) -> TokenSequence:
        cut = tuple(part.model_copy(update={"finish_reason": "length"}) for part in sequence.completions)
        return sequence.model_copy(update={"completions": cut})


class LongLab(ChangedLab):
    """The trajectories have 30 tokens, more than a model of 16 positions can compute."""

    def changed(self, sequence: TokenSequence) -> TokenSequence:
        part = Completion(start=10, length=20, step_index=0)
        return TokenSequence(
            token_ids=tokens.encode_ids([number % 32 for number in range(30)]),
            logprobs=tokens.encode_floats([-3.0] * 20),
            completions=(part,),
        )


def test_a_row_longer_than_the_models_table_of_positions_fails_its_job_and_names_the_trajectory(tmp_path: Path) -> None:
    """The model's dropout pads the rows of SFT, those of RL are a tree: its last token is not computed."""
    config = GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")

    async def scenario() -> None:
        lab = LongLab(tmp_path, tmp_path / "model")
        for kind, algorithm, num_tokens in (("sft", SftSettings(), 30), ("rl", GrpoSettings(), 29)):
            await lab.plan(await lab.submit("bad", kind=kind, algorithm=algorithm), 1)
            await lab.work(lab.has(JobFailed))
            (failed,) = await lab.events("jobs", JobFailed)
            assert failed.error.startswith("trajectory run-1/bad/e00000/t00000/m0")
            assert failed.error.endswith(
                f"/agent, sequence 0 is computed from {num_tokens} tokens, more than the 16 positions of the model; "
                "give a model with more positions, or shorter rollouts"
            )
            lab = LongLab(tmp_path / "rl", tmp_path / "model")
        good = Lab(tmp_path / "good", tmp_path / "model")
        await good.plan(await good.submit("good"), 1)
        await good.work(good.has(JobSucceeded))

    asyncio.run(scenario())


class LongTruncatedLab(LongLab):
    """The same, ended at the token limit."""

    def changed(self, sequence: TokenSequence) -> TokenSequence:
        made = super().changed(sequence)
        cut = [part.model_copy(update={"finish_reason": "length"}) for part in made.completions]
        return made.model_copy(update={"completions": tuple(cut)})


def test_a_row_that_is_left_out_may_be_longer_than_the_models_table_of_positions(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")

    async def scenario() -> None:
        lab = LongTruncatedLab(tmp_path, tmp_path / "model")
        await lab.plan(await lab.submit("bad", algorithm=GrpoSettings(mask_truncated=True)), 1)
        await lab.work(lab.has(JobSucceeded))

    asyncio.run(scenario())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_head_in_float32_has_a_warning_where_the_model_caps_its_logits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: str
) -> None:
    config = Gemma2Config(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    folder = tmp_path / "model"
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    settings = ModelSettings.model_validate({"path": str(folder), "device": "cpu", "dtype": dtype, "fp32_head": True})

    async def scenario() -> None:
        lab = Lab(tmp_path, folder)
        await lab.plan(await lab.submit("one", model=settings), 1)
        await lab.work(lab.has(JobSucceeded))

    asyncio.run(scenario())
    assert (f"model={folder} caps, scales or adapts its logits" in caplog.text) == (dtype == "bfloat16")


def test_a_row_longer_than_the_table_of_positions_of_a_scorer_fails_its_job(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")

    async def scenario() -> None:
        lab = LongLab(tmp_path, tmp_path / "model")
        await lab.plan(await lab.submit("bad", algorithm=GrpoSettings(kl_coefficient=0.1)), 1)
        await lab.work(lab.has(JobFailed))
        (failed,) = await lab.events("jobs", JobFailed)
        assert "/agent, sequence 0 is computed from 29 tokens, more than the 16 positions of the model" in failed.error

    asyncio.run(scenario())


SMALL: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
SMALL |= {"max_position_embeddings": 64, "num_hidden_layers": 1, "intermediate_size": 32}
FACTORS: dict[str, Any] = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LONG: dict[str, Any] = {"rope_type": "longrope", **FACTORS, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GPT2Config(n_positions=16), 16),
        (OPTConfig(max_position_embeddings=16), 16),
        (GPTJConfig(n_positions=16), 16),
        (Qwen2Config(), None),
        (LlamaConfig(**SMALL, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), 64),
        (LlamaConfig(**SMALL, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}), None),
        (Phi3Config(**SMALL, pad_token_id=0, rope_parameters=LONG, original_max_position_embeddings=16), 16),
    ],
)
def test_the_positions_of_a_model_are_counted_where_they_are_a_table(config: Any, expected: int | None) -> None:
    with torch.device("meta"):
        assert num_positions(AutoModelForCausalLM.from_config(config)) == expected


async def failure_beside_a_good_job(lab: Lab) -> JobFailed:
    """The only failure once the next job has succeeded."""
    await lab.plan(await lab.submit("bad"), 1)
    await lab.plan(await lab.submit("good"), 1)
    await lab.work(lab.has(JobSucceeded))
    (failed,) = await lab.events("jobs", JobFailed)
    assert failed.job_id == "run-1/bad"
    return failed


def test_a_kept_set_without_the_sampled_token_fails_its_job_and_names_the_trajectory(
    tmp_path: Path, tiny_model: Path
) -> None:
    async def scenario() -> None:
        lab = KeptLab(tmp_path, tiny_model)
        failed = await failure_beside_a_good_job(lab)
        assert "trajectory run-1/bad/e00000/t00000/m0" in failed.error
        assert "/agent, sequence 0: its token 1 (" in failed.error
        assert failed.error.endswith("that it was sampled from; correct the engine that recorded it")
        assert {step.job_id for step in await lab.events("weights", StepTrained)} == {"run-1/good"}

    asyncio.run(scenario())


class LargeRewardLab(Lab):
    """A rollout of job `bad` has a reward that assembly would refuse."""

    def trajectory(self, job: JobSubmitted, index: int, position: int, **how: Any) -> TrajectoryAssembled:
        made = super().trajectory(job, index, position, **how)
        is_large = job.job_id == "run-1/bad" and position == 1
        return made.model_copy(update={"reward": 1e160}) if is_large else made


def test_a_reward_whose_square_would_overflow_fails_its_job_and_names_the_rollout(
    tmp_path: Path, tiny_model: Path
) -> None:
    async def scenario() -> None:
        failed = await failure_beside_a_good_job(LargeRewardLab(tmp_path, tiny_model))
        assert "rollout run-1/bad/e00000/t00000/m1" in failed.error
        assert failed.error.endswith(": reward 1e+160 is beyond 1e+150; scale the rewards down")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("lab_class", "kind", "algorithm"),
    [
        (PromptLab, "rl", GrpoSettings()),
        (PromptLab, "sft", SftSettings()),
        (TruncatedLab, "rl", GrpoSettings(mask_truncated=True, mini_batches=2, off_policy=OffPolicySettings())),
        (TruncatedLab, "rl", GspoSettings(mask_truncated=True)),
        (TruncatedLab, "rl", MixSettings(mask_truncated=True, ce=1.0)),
        (TruncatedLab, "sft", SftSettings(mask_truncated=True)),
    ],
)
def test_a_batch_without_a_token_to_train_yields_equal_weights_and_a_warning(
    tmp_path: Path,
    tiny_model: Path,
    lab_class: type[ChangedLab],
    kind: str,
    algorithm: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        lab = lab_class(tmp_path, tiny_model)
        job = await lab.submit("bad", kind=kind, algorithm=algorithm)
        await lab.plan(job, 2)
        with caplog.at_level("WARNING", "rollstream.learner"):
            await lab.work(lab.has(JobSucceeded))
        steps = await lab.events("weights", StepTrained)
        assert [(step.num_optimizer_steps, step.metrics["tokens/completion"]) for step in steps] == [(0, 0.0)] * 2
        assert len({one.weights_sha256 for one in await lab.events("weights", WeightsPublished)}) == 1
        assert f"batch={steps[0].batch_id} has no completion to train on: version=1 changes nothing" in caplog.text

    asyncio.run(scenario())


async def goes_on_with(lab: Lab, model: Path, change: Any, lora: LoraSettings | None = None) -> str:
    """The error of a job whose model's folder was changed between its first and its second version."""
    settings = ModelSettings(path=str(model), device="cpu", lora=lora)
    job = await lab.submit(model=settings)
    planned = await lab.plan(job, 1, seal=False)
    await lab.work(lab.has(WeightsPublished, "weights", 2))
    change()
    previous = next(one.digest for one in await lab.received("batches") if one.event == planned[0])
    await lab.plan(job, 1, first=1, previous=previous)
    await lab.work(lab.has(JobFailed))
    (failed,) = await lab.events("jobs", JobFailed)
    assert len(await lab.events("weights", StepTrained)) == 1
    return failed.error


def test_a_restart_with_another_tokenizer_fails_the_job(lab: Any) -> None:
    folder = lab.folder / "model"
    shutil.copytree(lab.model, folder)
    (folder / "tokenizer.json").write_text("as it was")

    def change() -> None:
        (folder / "tokenizer.json").write_text("another")

    assert asyncio.run(goes_on_with(lab, folder, change)) == (
        f"version 0 of run-1/main was trained with another tokenizer than that of model {folder}; restore the "
        "tokenizer's files, or give the model.path that it was trained with"
    )


def test_a_restart_with_another_vocabulary_fails_the_job(lab: Any) -> None:
    folder = lab.folder / "model"
    shutil.copytree(lab.model, folder)

    def change() -> None:
        module = AutoModelForCausalLM.from_pretrained(folder)
        torch.manual_seed(0)
        module.resize_token_embeddings(40, mean_resizing=False)
        module.save_pretrained(folder)

    error = asyncio.run(goes_on_with(lab, folder, change))
    assert error.startswith("weights do not fit")
    assert error.endswith(
        "is (32, 16), the model's (40, 16): a vocabulary of 32 tokens, and one of 40; give the model.path that they "
        "were trained with"
    )


def test_a_base_model_that_cannot_be_read_fails_its_job_and_the_learner_goes_on(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        folder = lab.folder / "model"
        shutil.copytree(lab.model, folder)
        read = files._tensors_of

        def broken(path: Path, *of_file: int) -> Any:
            if path.parent == folder:
                raise PermissionError(13, "Permission denied", str(path))
            return read(path, *of_file)

        monkeypatch.setattr(files, "_tensors_of", broken)
        await lab.submit("bad", model=ModelSettings(path=str(folder), device="cpu", lora=LoraSettings(rank=2)))
        await lab.work(lab.has(JobFailed))
        await lab.plan(await lab.submit("good"), 1)
        await lab.work(lab.has(JobSucceeded))
        (failed,) = await lab.events("jobs", JobFailed)
        assert failed.job_id == "run-1/bad"
        assert f"the files of model {folder} cannot be read" in failed.error
        assert failed.error.endswith("; restore them")

    asyncio.run(scenario())


def test_a_base_model_that_was_recorded_by_its_files_is_known_by_them(lab: Any) -> None:
    async def scenario() -> None:
        model = lab.folder / "model"
        shutil.copytree(lab.model, model)
        by_files = base_sha256(str(model), "0" * 64)
        assert by_files != base_sha256(str(model))
        job = await lab.submit(model=ModelSettings(path=str(model), device="cpu", lora=LoraSettings(rank=2)))
        await lab.work(lab.has(WeightsPublished, "weights"))
        (base,) = await lab.events("weights", WeightsPublished)
        older = base.model_copy(update={"base_sha256": by_files})
        trainer = JobTrainer(job, threads=1, permissions=lab.permissions)
        trainer.check_fits(base)
        trainer.check_fits(older)
        export_merged(older, lab.artifacts.fetch(older.artifact), lab.folder / "merged")
        file, new = model / "model.safetensors", model / "new"
        save_file({name: value * 2 for name, value in load_file(file).items()}, new, {"format": "pt"})
        new.replace(file)
        for published in (base, older):
            with pytest.raises(ConfigError, match="with other weights; restore its weight files"):
                trainer.check_fits(published)

    asyncio.run(scenario())
