"""A teacher's log-probabilities: a model that is only asked, text that only it sees, and what becomes of a bad one."""

import asyncio
import json
import re
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.learner.scoring import contexts
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.schemas import ids
from rollstream.schemas.algorithms import OpdSettings, OpsdSettings
from rollstream.schemas.events import (
    JobFailed,
    JobSubmitted,
    JobSucceeded,
    ReferenceScored,
    RunStarted,
    StepTrained,
    WeightsPublished,
)
from rollstream.schemas.settings import ArtifactRef
from tests.learner.scoring.teacher_rig import assert_scores_are_those_of
from tests.rigs.runs.retrained import assert_retrained, steps_of


@pytest.fixture
def folders(lab: Any) -> tuple[Path, Path]:
    """A policy and a teacher with the same tokenizer; the lab trains the policy."""
    lab.model = make_tiny_model(lab.folder / "policy", seed=0, hidden_size=16, intermediate_size=32)
    teacher = make_tiny_model(lab.folder / "teacher", seed=1, hidden_size=32, intermediate_size=32)
    return lab.model, teacher


async def trained(lab: Any, algorithm: Any) -> JobSubmitted:
    job = await lab.submit(num_versions=2, algorithm=algorithm)
    await lab.plan(job, 2)
    await lab.work(lab.has(JobSucceeded))
    return job


def test_a_teacher_is_asked_once_and_needed_by_no_replay(lab: Any, folders: tuple[Path, Path]) -> None:
    async def scenario() -> None:
        job = await trained(lab, OpdSettings(teacher=str(folders[1])))
        await assert_scores_are_those_of(lab, folders[1], [])
        steps = await steps_of(lab)
        assert all(step.metrics["teacher/reverse_kl"] and step.scores_sha256 for step in steps.values())
        shutil.rmtree(folders[1])
        await assert_retrained(lab, job, steps)

    asyncio.run(scenario())


def test_distillation_brings_the_policy_to_its_teacher(lab: Any, folders: tuple[Path, Path]) -> None:
    """The tokens are the same, which the teacher considers more or less likely."""

    async def scenario() -> list[float]:
        job = await lab.submit(num_versions=4, algorithm=OpdSettings(teacher=str(folders[1])))
        first = await lab.plan(job, 1, seal=False)
        again = first[0]
        for index in range(1, 4):
            changes = {"index": index, "trains_at_version": index, "yields_version": index + 1, "epoch": index}
            changes |= {"previous_sha256": codec.content_digest(again), "batch_id": ids.batch_id(job.job_id, index)}
            again = again.model_copy(update=changes)
            await lab.log.send(again)
        await lab.seal(job, 4)
        await lab.work(lab.has(JobSucceeded))
        assert len(await lab.events("weights", ReferenceScored)) == 8, "each trajectory was scored once for all steps"
        return [step.metrics["advantage/abs"] for step in (await steps_of(lab)).values()]

    distances = asyncio.run(scenario())
    assert distances[-1] < 0.9 * distances[0]


def test_a_policy_learns_from_itself_with_text_that_only_the_teacher_sees(lab: Any, folders: tuple[Path, Path]) -> None:
    async def scenario() -> None:
        await lab.begin({"answer": "42", "n": [1]})
        job = await trained(lab, OpsdSettings(context="It is {answer}, of {n}."))
        prefix = AutoTokenizer.from_pretrained(folders[0]).encode("It is 42, of [1].", add_special_tokens=False)
        await assert_scores_are_those_of(lab, folders[0], prefix)
        base = next(one for one in await lab.events("weights", WeightsPublished) if one.version == 0)
        (scorer,) = {event.scorer for event in await lab.events("weights", ReferenceScored)}
        assert (scorer.model, scorer.weights_sha256) == ("", base.weights_sha256)
        await assert_retrained(lab, job, await steps_of(lab))

    asyncio.run(scenario())


def failure(lab: Any, algorithm: Any, inputs: dict[str, Any] | None = None) -> str:
    """The error of a job that fails."""

    async def scenario() -> str:
        await lab.begin(inputs or {})
        job = await lab.submit(num_versions=1, algorithm=algorithm)
        await lab.plan(job, 1)
        await lab.work(lab.has(JobFailed))
        assert not await lab.events("weights", StepTrained)
        return (await lab.events("jobs", JobFailed))[0].error

    return asyncio.run(scenario())


def test_a_teacher_of_another_vocabulary_is_named_with_a_remedy(lab: Any, folders: tuple[Path, Path]) -> None:
    path = folders[1] / "tokenizer.json"
    written = json.loads(path.read_text())
    vocabulary = written["model"]["vocab"]
    one, other = sorted(vocabulary, key=vocabulary.__getitem__)[8:10]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    path.write_text(json.dumps(written))
    reported = failure(lab, OpdSettings(teacher=str(folders[1])))
    assert "algorithm.teacher: teacher" in reported
    assert "has another vocabulary than model" in reported
    sizes = f"and it has {len(vocabulary)} tokens, the model {len(vocabulary)}"
    assert f"token 8 ({one!r}) is 9 there, {sizes}; give a teacher of the same model family" in reported


def test_a_teacher_without_a_tokenizer_must_know_as_many_ids(lab: Any, tiny_model: Path, tmp_path: Path) -> None:
    lab.model = make_tiny_model(lab.folder / "policy", seed=0, hidden_size=16, intermediate_size=32)
    shutil.copytree(tiny_model, lab.folder / "small")
    reported = failure(lab, OpdSettings(teacher=str(lab.folder / "small")))
    assert re.search(r"it has 32 token ids, the model \d+; give a teacher of the same model family$", reported)


def resize(model: Path, num_rows: int) -> None:
    """Give a model so many more rows of embeddings, with the tokenizer that it has."""
    module = AutoModelForCausalLM.from_pretrained(model)
    module.resize_token_embeddings(module.config.vocab_size + num_rows)
    module.save_pretrained(model)


def test_a_teacher_of_the_same_tokenizer_may_be_padded_to_fewer_rows(lab: Any, folders: tuple[Path, Path]) -> None:
    resize(folders[0], 8)

    async def scenario() -> None:
        await lab.begin({})
        await trained(lab, OpdSettings(teacher=str(folders[1])))
        await assert_scores_are_those_of(lab, folders[1], [])

    asyncio.run(scenario())


def test_a_sampled_id_that_the_teacher_has_no_row_for_is_named(lab: Any, folders: tuple[Path, Path]) -> None:
    resize(folders[1], -90)
    reported = failure(lab, OpdSettings(teacher=str(folders[1])))
    assert re.search(
        r"algorithm.teacher: trajectory \S+ has token id \d+, and \S+ has \d+ ids; give a teacher", reported
    )


def test_a_teacher_that_is_not_there_or_not_allowed_is_named(lab: Any, folders: tuple[Path, Path]) -> None:
    assert "is not allowed" in failure(lab, OpdSettings(teacher="/somewhere/else"))


@pytest.mark.parametrize(
    ("inputs", "reported"),
    [({"answers": 1}, "have no 'answer'; did you mean answers?"), ({}, "have no 'answer'; it has none")],
)
def test_a_context_without_its_inputs_names_example_and_key(
    lab: Any, folders: tuple[Path, Path], inputs: dict[str, Any], reported: str
) -> None:
    found = failure(lab, OpsdSettings(context="It is {answer}."), inputs)
    assert f"algorithm.context: the inputs of example 'x' {reported}" in found


def test_the_dataset_of_a_context_is_read_once_a_job_and_parsed_beside_the_event_loop(
    lab: Any, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two manifests have two groups each, which are scored one after the other."""
    num_read, threads = Counter[str](), set[int]()
    read, needed = ArtifactStore.read, contexts._needed

    def counted(store: ArtifactStore, artifact: ArtifactRef) -> bytes:
        num_read[artifact.uri] += 1
        return read(store, artifact)

    def watched(template: str, dataset: bytes) -> Any:
        threads.add(threading.get_ident())
        return needed(template, dataset)

    monkeypatch.setattr(ArtifactStore, "read", counted)
    monkeypatch.setattr(contexts, "_needed", watched)

    async def scenario() -> None:
        await lab.begin({"answer": "42"})
        await trained(lab, OpsdSettings(context="It is {answer}."))
        (started,) = await lab.events("groups", RunStarted)
        scored = await lab.events("weights", ReferenceScored)
        assert len({one.trajectory_id.rpartition("/m")[0] for one in scored}) == 4
        assert num_read[started.dataset.uri] == 1
        assert threading.get_ident() not in threads

    asyncio.run(scenario())
