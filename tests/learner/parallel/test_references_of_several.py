"""Losses that compare with the policy's own earlier weights, trained by two real processes and by one."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.learner.parallel.process_ranks import END, joined
from rollstream.learner.service import follow
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.schemas.algorithms import DpoSettings, GrpoSettings, KtoSettings, MixSettings, OpsdSettings
from rollstream.schemas.events import (
    JobFailed,
    JobSucceeded,
    LearnerClaimed,
    ReferenceScored,
    StepTrained,
    WeightsPublished,
)
from rollstream.schemas.kafka import KafkaSettings
from rollstream.schemas.permissions import Permissions
from rollstream.schemas.settings import LoraSettings, ModelSettings, OptimizerSettings
from tests.learner.conftest import Lab, PairLab
from tests.learner.parallel.launched_rig import launched, slowly, wait_until
from tests.rigs.services.process_group import together

pytestmark = pytest.mark.slow
VERSIONS = 6
KL = GrpoSettings(kl_coefficient=0.2, mini_batches=2, max_tokens_per_micro_batch=48)
OWN: dict[str, dict[str, Any]] = {
    "kl": {"algorithm": KL},
    "kl-of-revision-5": {"algorithm": KL, "revision": 5},
    "dpo": {"algorithm": DpoSettings(), "kind": "dpo"},
    "kto": {"algorithm": KtoSettings()},
    "mix": {"algorithm": MixSettings(ref_kl=0.1)},
    "opsd": {"algorithm": OpsdSettings(context="It is {answer}.")},
}
CASES = [(name, lora) for name in OWN for lora in (False, True)] + [("kl-in-bfloat16", False)]


def of_job(model: Path, name: str, *, lora: bool) -> dict[str, Any]:
    held = "bfloat16" if name == "kl-in-bfloat16" else "auto"
    adapter = LoraSettings(rank=4, target_modules=("q_proj", "v_proj", "down_proj")) if lora else None
    settings = ModelSettings(path=str(model), device="cpu", lora=adapter, reference_dtype=held)
    given = {"num_versions": VERSIONS, "model": settings, "optimizer": OptimizerSettings(learning_rate=1e-3)}
    return {**given, **OWN[name.removesuffix("-in-bfloat16")]}


async def trained(folder: Path, model: Path, name: str, *, lora: bool, **options: Any) -> None:
    """One job; its last weights and its recorded scores are left in the folder."""
    lab = PairLab(folder, model) if name == "dpo" else Lab(folder, model)
    if name == "opsd":
        await lab.begin({"answer": "42"})
    job = await lab.submit(**of_job(model, name, lora=lora))
    if isinstance(lab, PairLab):
        await lab.plan_pairs(job, VERSIONS)
    else:
        await lab.plan(job, VERSIONS)
    ends = lab.has(JobSucceeded), lab.has(JobFailed)

    async def over() -> bool:
        return await ends[0]() or await ends[1]()

    await lab.work(slowly(over), lab.worker(**options))
    assert not await lab.events("jobs", JobFailed)
    published = (await lab.events("weights", WeightsPublished))[-1]
    assert published.version == VERSIONS
    (folder / "last.safetensors").write_bytes(lab.artifacts.read(published.artifact))
    scored = [(one.trajectory_id, one.part) for one in await lab.events("weights", ReferenceScored)]
    assert len(set(scored)) == len(scored)
    hashes = [one.weights_sha256 for one in await lab.events("weights", StepTrained)]
    (folder / "hashes.json").write_text(json.dumps(hashes))
    (folder / "scored.txt").write_text("\n".join(map(str, sorted(scored))))


def model_of(root: Path, name: str, plain: Path) -> Path:
    """One with a tokenizer where there is text to encode."""
    return root / "with-tokenizer" if name == "opsd" else plain


def folder_of(root: Path, name: str, *, lora: bool) -> Path:
    return root / f"{name}-{'lora' if lora else 'full'}"


def several(root: Path, model: Path) -> None:
    """One of the processes."""
    with joined() as ranks:
        if ranks.index:
            follow(ranks, threads=1, permitted=lambda _: Permissions.of([f"model:{root}", f"model:{model}"], {}))
            return
        for name, lora in CASES:
            chosen = model_of(root, name, model)
            asyncio.run(trained(folder_of(root, name, lora=lora), chosen, name, lora=lora, ranks=ranks))
        ranks.send(END)


@pytest.fixture(scope="module")
def root(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of two processes."""
    found = tmp_path_factory.mktemp("references")
    make_tiny_model(found / "with-tokenizer", seed=0, hidden_size=16, intermediate_size=32)
    together(2, several, found, tiny_model)
    return found


@pytest.mark.parametrize(("name", "lora"), CASES, ids=str)
def test_two_processes_train_what_one_trains(
    root: Path, tmp_path: Path, tiny_model: Path, name: str, lora: bool
) -> None:
    asyncio.run(trained(tmp_path, model_of(root, name, tiny_model), name, lora=lora))
    both = folder_of(root, name, lora=lora)
    alone, found = (safetensors.torch.load_file(one / "last.safetensors") for one in (tmp_path, both))
    assert alone.keys() == found.keys()
    furthest = max(float((alone[name] - found[name]).abs().max()) for name in alone)
    assert furthest < (1e-5 if name != "kl-in-bfloat16" else 1e-3)
    assert (both / "scored.txt").read_text() == (tmp_path / "scored.txt").read_text()


@pytest.mark.kafka
@pytest.mark.parametrize("hit", [1, 3])
def test_a_process_that_is_killed_while_all_score_changes_no_weights(
    lab: Any, own_topics: KafkaSettings, tmp_path: Path, root: Path, hit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process that computes its part for the `hit`-th time ends before it gives it to the other."""
    undisturbed = json.loads((root / "kl-full" / "hashes.json").read_text())
    monkeypatch.setenv("ROLLSTREAM_FAILPOINT", f"learner/within-scores-of-group:{hit}")
    monkeypatch.setenv("ROLLSTREAM_FAILPOINT_ONCE", str(tmp_path))

    async def scenario() -> tuple[list[str], int]:
        async with KafkaLog(own_topics, client_id="lab") as log:
            await log.ensure_topics(num_partitions=6)
            lab.log = log
            job = await lab.submit(**of_job(lab.model, "kl", lora=False))
            with launched(lab, own_topics, tmp_path) as torchrun:
                await lab.plan(job, VERSIONS)
                steps = await wait_until(lab, torchrun, VERSIONS)
            terms = [one.term for one in await lab.events("weights", LearnerClaimed)]
            return [one.weights_sha256 for one in steps], len(terms)

    hashes, terms = asyncio.run(scenario())
    assert terms == 2, (tmp_path / "learner.log").read_text()
    assert hashes == undisturbed
