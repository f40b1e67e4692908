"""Jobs that cannot be done, are not wanted any more, or follow each other; other ways to hold and to train a model."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.dead_letters import origin
from rollstream.eventlog.log import TopicPartition
from rollstream.learner.inbox import Inbox
from rollstream.learner.model.export import export_model
from rollstream.learner.trainer import JobTrainer
from rollstream.schemas import tokens
from rollstream.schemas.algorithms import GrpoSettings, SftSettings
from rollstream.schemas.events import (
    JobCancelled,
    JobFailed,
    JobProgressed,
    JobSubmitted,
    JobSucceeded,
    LearnerClaimed,
    RunEnded,
    StepTrained,
    WeightsPublished,
)
from rollstream.schemas.events.weights import FineTune
from rollstream.schemas.settings import LoraSettings, ModelSettings, OptimizerSettings
from tests.rigs.runs.retrained import assert_retrained, steps_of


async def failure(lab: Any) -> str:
    await lab.work(lab.has(JobFailed))
    (failed,) = await lab.events("jobs", JobFailed)
    assert "\n" not in failed.error
    return failed.error


@pytest.mark.parametrize(("revision", "rates"), [(15, [3, 2, 1]), (14, [5, 10 / 3, 5 / 3])])
def test_a_retried_fine_tuning_job_goes_on_with_its_schedule(lab: Any, revision: int, rates: list[float]) -> None:
    """Two of its five batches were trained by the attempt before."""

    async def scenario() -> None:
        data = {"data": lab.artifacts.put_bytes(b"", ".jsonl"), "data_sha256": "", "num_examples": 5, "agents": ("a",)}
        of_batches = {"config_sha256": "", "parent_version": 0, "num_batches": 5, "batch_size": 1, "first_batch": 2}
        linear = OptimizerSettings(learning_rate=5.0, schedule="linear")
        how = {"fine_tune": FineTune(**data, **of_batches), "optimizer": linear, "revision": revision}
        job = await lab.submit(num_versions=3, **how)
        await lab.plan(job, 3)
        await lab.work(lab.has(JobSucceeded))
        steps = await steps_of(lab)
        assert [step.metrics["optimizer/learning_rate"] for step in steps.values()] == pytest.approx(rates)
        assert (await lab.events("jobs", JobProgressed))[-1].percent == 100
        await assert_retrained(lab, job, steps)

    asyncio.run(scenario())


def test_a_missing_model_folder_fails_the_job_and_the_next_one_is_served(lab: Any) -> None:
    async def scenario() -> None:
        missing = str(lab.folder / "no-model")
        await lab.submit("bad", model=ModelSettings(path=missing))
        good = await lab.submit("good")
        await lab.plan(good, 1)
        await lab.work(lab.has(JobSucceeded))
        (failed,) = await lab.events("jobs", JobFailed)
        assert failed.error == f"model folder {missing} does not exist; give a transformers folder or a hub name"

    asyncio.run(scenario())


def test_a_job_of_a_model_that_the_learner_does_not_allow_fails_and_nothing_is_loaded(lab: Any) -> None:
    async def scenario() -> None:
        await lab.submit(model=ModelSettings(path="/home/other/model"))
        assert await failure(lab) == (
            'job run-1/rl: model.path: "model:/home/other/model" is not allowed by this process\'s settings; if you '
            "trust it, start the service with --allow NAME (or ROLLSTREAM_ALLOW), spelt as here; services that "
            "finetune starts itself allow what the run's own file names"
        )

    asyncio.run(scenario())


def test_a_job_from_a_version_that_another_job_has_trained_on_is_refused_by_name(lab: Any) -> None:
    async def scenario() -> None:
        first = await lab.submit("first", num_versions=2)
        await lab.plan(first, 2)
        await lab.work(lab.has(JobSucceeded))
        late = await lab.submit("late", base_version=1)
        await lab.plan(late, 1)
        assert await failure(lab) == (
            "job run-1/late begins at version 1 of run-1/main, but job run-1/first has already published version 2; "
            "submit the job from the newest version, or begin a new run with --fork run-1@1"
        )

    asyncio.run(scenario())


@pytest.mark.parametrize(("kind", "revision", "is_dropped"), [("rl", 2, False), ("rl", 1, True), ("sft", 2, True)])
def test_dropout_is_off_where_ratios_are_computed(lab: Any, kind: Any, revision: Any, is_dropped: bool) -> None:
    def weights(planned: list[Any], trajectories: dict[str, Any], dropout: float) -> bytes:
        model = ModelSettings(path=str(lab.model), device="cpu", lora=LoraSettings(rank=2, dropout=dropout))
        algorithm = SftSettings() if kind == "sft" else GrpoSettings()
        settings = lab.settings(kind=kind, model=model, algorithm=algorithm, revision=revision)
        job = JobSubmitted(
            run_id="run-1", time_ms=1, job_id="run-1/rl", model_group="run-1/main", base_version=0, settings=settings
        )
        trainer = JobTrainer(job, threads=1, permissions=lab.permissions)
        for batch in planned:  # the adapters begin at zero: only a second step sees what was dropped
            trainer.train(batch, [trajectories[member.trajectory_id] for member in batch.members])
        return trainer.model.weights_bytes()

    async def scenario() -> None:
        planned = await lab.plan(await lab.submit(), 2)
        found = {event.trajectory_id: event for event in await lab.events("trajectories")}
        assert (weights(planned, found, 0.0) != weights(planned, found, 0.5)) == is_dropped

    asyncio.run(scenario())


def test_tokens_per_second_count_all_phases_but_wait_and_what_follows_on_sending_in_the_next_step(lab: Any) -> None:
    async def scenario() -> None:
        job = await lab.submit(num_versions=2)
        (planned,) = await lab.plan(job, 1, seal=False)
        working = asyncio.create_task(lab.work(lab.has(JobSucceeded)))
        while not await lab.has(JobProgressed)():
            await asyncio.sleep(0.01)
        await lab.plan(job, 1, first=1, previous=codec.content_digest(planned))
        await working
        first, second = await lab.events("weights", StepTrained)
        assert {"fetch", "forward_backward", "hash", "checkpoint", "publish"} < first.seconds.keys()
        assert second.seconds.keys() - first.seconds.keys() == {"finish"}
        assert second.seconds["finish"] > 0
        for step in (first, second):
            busy_s = sum(value for name, value in step.seconds.items() if name != "wait")
            assert step.tokens_per_s == pytest.approx(step.metrics["tokens/total"] / busy_s)
        (ended,) = await lab.events("jobs", JobSucceeded)
        assert ended.finish_s > 0

    asyncio.run(scenario())


def test_a_learner_that_only_ends_a_job_reports_no_finish_time(lab: Any) -> None:
    """The learner that published the version was stopped before the epoch was sealed."""

    async def scenario() -> None:
        job = await lab.submit(num_versions=1)
        await lab.plan(job, 1, seal=False)
        await lab.work(lab.has(JobProgressed))
        await lab.seal(job, 1)
        await lab.work(lab.has(JobSucceeded))
        (ended,) = await lab.events("jobs", JobSucceeded)
        assert (ended.final_version, ended.finish_s) == (1, 0)

    asyncio.run(scenario())


def test_a_folder_without_a_model_is_named_in_the_error(lab: Any) -> None:
    async def scenario() -> None:
        await lab.submit(model=ModelSettings(path=str(lab.folder)))
        assert f"model {lab.folder} cannot be loaded" in await failure(lab)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: {"previous_sha256": "1" * 64}, "the chain of manifests is broken"),
        (lambda b: {"trains_at_version": 7}, "at version 7, not run-1/main at 0"),
        (lambda b: {"locators": ()}, "has 0 locators for 8 members"),
        (lambda b: {"locators": (b.locators[1], *b.locators[1:])}, "the record there is trajectory_assembled:"),
        (
            lambda b: {"members": (b.members[0].model_copy(update={"digest": "2" * 64}), *b.members[1:])},
            f"not {'2' * 64}; it was changed",
        ),
        (
            lambda b: {"locators": (b.locators[0].model_copy(update={"offset": 999}), *b.locators[1:])},
            "offset 999 of topic trajectories",
        ),
    ],
    ids=["chain", "version", "no locators", "wrong locator", "wrong digest", "gone"],
)
def test_a_manifest_that_does_not_hold_fails_its_job(lab: Any, change: Any, message: str) -> None:
    async def scenario() -> None:
        job = await lab.submit()
        other = type(lab)(lab.folder, lab.model)
        (planned,) = await other.plan(job, 1, seal=False)
        lab.log = type(lab.log)(num_partitions=2)
        await lab.log.send(job)
        for record in await other.received("trajectories"):
            await lab.log.send(record.event, partition=record.position.partition)
        await lab.log.send(planned.model_copy(update=change(planned)))
        assert message in await failure(lab)
        assert [p.version for p in await lab.events("weights", WeightsPublished)] == [0]

    asyncio.run(scenario())


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.parametrize(
    "lora",
    [None, LoraSettings(rank=2), LoraSettings(rank=2, target_modules=("embed_tokens",))],
    ids=["full", "lora", "lora of the embedding"],
)
def test_a_token_id_beyond_the_model_fails_its_job_and_not_the_learner(lab: Any, lora: LoraSettings | None) -> None:
    class OddLab(type(lab)):
        def trajectory(self, job: Any, index: int, member: int, **options: Any) -> Any:
            made = super().trajectory(job, index, member, **options)
            if job.job_id != "run-1/bad" or member != 5:
                return made
            odd = made.sequences[0].model_copy(update={"token_ids": tokens.encode_ids([32] * 20)})
            return made.model_copy(update={"sequences": (odd,)})

    async def scenario() -> None:
        odd = OddLab(lab.folder, lab.model)
        model = ModelSettings(path=str(lab.model), device="cpu", lora=lora)
        await odd.plan(await odd.submit("bad", model=model), 1)
        await odd.plan(await odd.submit("good", model=model), 1)
        await odd.work(odd.has(JobSucceeded))
        (failed,) = await odd.events("jobs", JobFailed)
        assert failed.job_id == "run-1/bad"
        assert "/agent, sequence 0: token id 32 is outside the model's vocabulary of 32" in failed.error

    asyncio.run(scenario())


def test_a_gap_in_the_manifests_fails_the_job(lab: Any) -> None:
    async def scenario() -> None:
        job = await lab.submit()
        await lab.plan(job, 1, first=1, seal=False)
        assert "manifest 0 of job run-1/rl is missing" in await failure(lab)

    asyncio.run(scenario())


def test_the_end_of_a_run_cancels_its_open_jobs(lab: Any) -> None:
    async def scenario() -> None:
        job = await lab.submit()
        await lab.plan(job, 1, seal=False)
        await lab.log.send(RunEnded(run_id=job.run_id, time_ms=9, cause="stopped"))
        await lab.work(lab.has(JobCancelled))
        assert (await lab.events("jobs", JobCancelled))[0].job_id == job.job_id

    asyncio.run(scenario())


def test_a_learner_that_serves_every_job_leaves_a_what_ifs_to_its_own(lab: Any) -> None:
    async def scenario() -> None:
        submitted = await lab.submit("sft", base_version=0)
        theirs = {"run_id": "what", "job_id": "what/rl", "model_group": "what/policy", "is_what_if": True}
        await lab.log.send(submitted.model_copy(update=theirs))
        await lab.plan(submitted, 1)
        await lab.work(lab.has(JobSucceeded))
        await lab.work(lab.has(JobSucceeded))  # a whole start more
        assert {claimed.model_group for claimed in await lab.events("weights", LearnerClaimed)} == {
            submitted.model_group
        }
        assert [job.job_id for job in await lab.events("jobs", JobSucceeded)] == [submitted.job_id]

    asyncio.run(scenario())


def test_a_cancelled_job_is_let_go_and_the_next_one_served(lab: Any) -> None:
    async def scenario() -> None:
        job = await lab.submit("first")
        names = {"job_id": job.job_id, "model_group": job.model_group}
        await lab.log.send(JobCancelled(run_id=job.run_id, time_ms=2, **names))
        await lab.plan(await lab.submit("second"), 1)
        await lab.work(lab.has(JobSucceeded))
        assert (await lab.events("jobs", JobSucceeded))[0].job_id == "run-1/second"

    asyncio.run(scenario())


def test_sft_then_rl_carry_weights_and_versions_on(lab: Any) -> None:
    async def scenario() -> None:
        sft = await lab.submit("sft", kind="sft", algorithm=SftSettings())
        await lab.plan(sft, 2, with_logprobs=False)
        worker = asyncio.create_task(lab.worker().run())
        while not await lab.has(JobSucceeded)():
            await asyncio.sleep(0.01)
        rl = await lab.submit("rl", base_version=2)
        await lab.plan(rl, 1)
        while not await lab.has(JobSucceeded, count=2)():
            await asyncio.sleep(0.01)
        worker.cancel()
        steps = await lab.events("weights", StepTrained)
        assert [(s.job_id, s.version) for s in steps] == [("run-1/sft", 1), ("run-1/sft", 2), ("run-1/rl", 3)]
        assert steps[1].metrics["loss/total"] < steps[0].metrics["loss/total"] + 0.5
        assert "policy/kl" not in steps[0].metrics
        assert [p.parent for p in await lab.events("weights", WeightsPublished)] == [None, 0, 1, 2]

    asyncio.run(scenario())


def test_rl_on_demonstrations_is_refused_by_name(lab: Any) -> None:
    async def scenario() -> None:
        await lab.plan(await lab.submit(), 1, with_logprobs=False)
        assert "it has no log-probabilities of the behaviour policy" in await failure(lab)

    asyncio.run(scenario())


LORA = LoraSettings(rank=2, alpha=4, target_modules=("q_proj", "v_proj"))


def test_lora_publishes_adapters_alone_and_a_restart_goes_on(lab: Any) -> None:
    async def scenario() -> None:
        job = await lab.submit(model=ModelSettings(path=str(lab.model), lora=LORA, device="cpu"))
        first = await lab.plan(job, 2, seal=False)
        await lab.work(lab.has(WeightsPublished, "weights", 3))
        await lab.plan(job, 1, first=2, previous=codec.content_digest(first[-1]))
        await lab.work(lab.has(JobSucceeded))
        published = await lab.events("weights", WeightsPublished)
        assert [p.version for p in published] == [0, 1, 2, 3]
        assert {p.weights_format for p in published} == {"lora"}
        assert published[0].lora["r"] == 2
        assert published[0].lora["target_modules"] == ["q_proj", "v_proj"]
        assert published[0].base_model == str(lab.model)
        import safetensors.torch

        tensors = safetensors.torch.load(lab.artifacts.read(published[-1].artifact))
        assert len(tensors) == 8
        assert all("lora_" in name for name in tensors)

    asyncio.run(scenario())


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_an_exported_version_is_loaded_by_transformers_and_peft(lab: Any, lora: LoraSettings | None) -> None:
    async def scenario() -> None:
        job = await lab.submit(model=ModelSettings(path=str(lab.model), lora=lora, device="cpu"))
        await lab.plan(job, 1)
        await lab.work(lab.has(JobSucceeded))
        published = (await lab.events("weights", WeightsPublished))[-1]
        folder = export_model(published, lab.artifacts.fetch(published.artifact), lab.folder / "out")
        import safetensors.torch
        from peft import AutoPeftModelForCausalLM, get_peft_model_state_dict
        from transformers import AutoModelForCausalLM

        wanted = safetensors.torch.load(lab.artifacts.read(published.artifact))
        if lora:
            found = get_peft_model_state_dict(AutoPeftModelForCausalLM.from_pretrained(folder))
        else:
            found = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert all(found[name].equal(value) for name, value in wanted.items())

    asyncio.run(scenario())


def test_an_undecodable_record_is_dead_lettered_and_training_goes_on(lab: Any) -> None:
    async def scenario() -> None:
        job = await lab.submit()
        worker = asyncio.create_task(lab.worker().run())
        while not await lab.has(WeightsPublished, "weights")():
            await asyncio.sleep(0.01)
        await lab.log.send_raw("batches", key=b"x", value=b"\xff{")
        await lab.plan(job, 1)
        while not await lab.has(JobSucceeded)():
            await asyncio.sleep(0.01)
        worker.cancel()
        reader = await lab.log.reader({TopicPartition("dlq", 0): -1})
        assert [record.value for record in await reader.poll(timeout_s=0)] == [b"\xff{"]

    asyncio.run(scenario())


def test_an_undecodable_record_is_one_dead_letter_however_often_the_learner_starts(lab: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        for topic in ("jobs", "batches", "weights", "groups"):
            await lab.log.send_raw(topic, key=b"x", value=b"\xff{")
        for _ in range(2):
            await (await Inbox.open(lab.log, ArtifactStore(str(tmp_path)))).close()
        await lab.log.send_raw("jobs", key=b"x", value=None)
        await (await Inbox.open(lab.log)).close()
        reader = await lab.log.reader({TopicPartition("dlq", 0): -1})
        origins = [origin(record.headers) for record in await reader.poll(timeout_s=0)]
        assert sorted(origins) == [("batches", 0, 0), ("jobs", 0, 0), ("jobs", 0, 1), ("weights", 0, 0)]

    asyncio.run(scenario())
