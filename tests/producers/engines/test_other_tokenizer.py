"""A version that was trained with another tokenizer or base model than an engine's folder has is not loaded. One whose
folder cannot be read for a while is."""

import asyncio
import errno
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors import SafetensorError
from safetensors.torch import save_file

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.disk_space import is_outage
from rollstream.eventlog.files import base_sha256, tokenizer_sha256
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.producers.engines import model_cache, weight_follower
from rollstream.producers.engines.base import check_base_model
from rollstream.producers.engines.scripted import ScriptedEngine
from rollstream.producers.engines.weight_follower import WeightFollower
from rollstream.producers.league.opponents import OpponentWeights
from rollstream.schemas.errors import ModelError
from rollstream.schemas.events import WeightsPublished
from rollstream.schemas.permissions import NOTHING
from tests.producers.engines import engine_rig
from tests.rigs.follower_rig import Rig, play
from tests.rigs.services.hub_cache import move_to_cache

GROUP = "run-1/policy"


def published(artifacts: ArtifactStore, folder: Path, version: int, recorded: str, **changes: Any) -> WeightsPublished:
    artifact = artifacts.put_bytes(f"{version}".encode())
    return WeightsPublished(
        run_id="run-1",
        time_ms=version,
        model_group=GROUP,
        job_id="run-1/rl",
        batch_id=None,
        version=version,
        parent=None,
        term=1,
        weights_sha256=artifact.sha256,
        weights_format="full",
        base_model=str(folder),
        artifact=artifact,
        tokenizer_sha256=recorded,
    ).model_copy(update=changes)


def test_only_files_that_make_token_ids_count(tmp_path: Path) -> None:
    log, artifacts = MemoryLog(num_partitions=1), ArtifactStore(str(tmp_path / "artifacts"))
    follower = WeightFollower(log, artifacts, ScriptedEngine(), engine_id="engine-0", permissions=NOTHING, retry_s=0.02)
    (tmp_path / "tokenizer.json").write_text("as it was")
    recorded = tokenizer_sha256(str(tmp_path))

    async def scenario() -> None:
        running = asyncio.create_task(follower.run())
        await log.send(published(artifacts, tmp_path, 0, recorded))
        await follower.wait_for(GROUP, 0)
        (tmp_path / "chat_template.jinja").write_text("new")
        await log.send(published(artifacts, tmp_path, 1, recorded))
        await follower.wait_for(GROUP, 1)
        (tmp_path / "tokenizer.json").write_text("another")
        await log.send(published(artifacts, tmp_path, 2, recorded))
        with pytest.raises(ModelError, match="version 2 of run-1/policy was trained with another tokenizer"):
            await follower.wait_for(GROUP, 2)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running

    asyncio.run(scenario())
    assert tokenizer_sha256("org/model") == ""


def test_an_adapter_of_replaced_weights_is_not_loaded(tmp_path: Path) -> None:
    artifacts, weights = ArtifactStore(str(tmp_path / "artifacts")), tmp_path / "model.safetensors"
    weights.write_bytes(b"as it was")
    adapter = {"weights_format": "lora", "base_sha256": base_sha256(str(tmp_path))}
    check_base_model(published(artifacts, tmp_path, 0, "", **adapter), str(tmp_path))
    weights.write_bytes(b"another")
    with pytest.raises(ModelError, match="version 1 of run-1/policy is an adapter of other weights than"):
        check_base_model(published(artifacts, tmp_path, 1, "", **adapter), str(tmp_path))
    for old in ({"weights_format": "lora"}, {"weights_format": "full"}):
        check_base_model(published(artifacts, tmp_path, 2, "", **old), str(tmp_path))


def test_shards_of_a_base_model_count_and_other_files_do_not(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"old")
    found = [base_sha256(str(tmp_path))]
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        (tmp_path / name).write_bytes(b"shard")
        found.append(base_sha256(str(tmp_path)))
    assert len(set(found)) == 3
    for name in ("pytorch_model.bin", "config.json", "consolidated.safetensors"):
        (tmp_path / name).write_bytes(b"new")
    assert base_sha256(str(tmp_path)) == found[-1]
    assert base_sha256("org/model") == ""


def test_an_adapter_is_of_the_weights_in_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    model = tmp_path / "downloaded"
    model.mkdir()
    (model / "config.json").write_text("{}")
    save_file({"a": torch.ones(3)}, model / "model.safetensors")
    recorded = base_sha256(str(model))
    snapshot = move_to_cache(model, "org/model", tmp_path / "hub")
    assert base_sha256("org/model") == base_sha256(str(snapshot)) == recorded
    assert [base_sha256(name) for name in ("org/other", "no/hub/name", str(tmp_path / "gone"))] == ["", "", ""]
    artifacts = ArtifactStore(str(tmp_path / "artifacts"))
    of_weights = published(artifacts, tmp_path, 1, "", weights_format="lora", base_sha256=recorded)
    check_base_model(of_weights, "org/model")
    index = snapshot / "model.safetensors.index.json"
    for written in ('{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}', "[]", "{broken"):
        index.write_text(written)  # a download that was interrupted, or a broken one
        assert base_sha256("org/model") == ""
    index.write_text('{"weight_map": {"a": "model.safetensors"}}')
    assert base_sha256("org/model") == recorded
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "huggingface_hub", None)
        assert base_sha256("org/model") == ""
    (snapshot / "model.safetensors").unlink()
    save_file({"a": torch.zeros(3)}, snapshot / "model.safetensors")
    with pytest.raises(ModelError, match="version 1 of run-1/policy is an adapter of other weights than"):
        check_base_model(of_weights, "org/model")


def test_the_same_tensors_in_other_files_are_the_same_base_model(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(3), "a": torch.arange(6).reshape(2, 3), "model.embed.weight": torch.rand(4, 2)}
    tied = {**tensors, "lm_head.weight": tensors["model.embed.weight"].clone()}
    for name, parts in {
        "one": [tensors],
        "shards": [{"a": tensors["a"]}, {name: value for name, value in tensors.items() if name != "a"}],
        "with-tied-head": [tied],
        "other-values": [{**tensors, "b": torch.zeros(3)}],
        "other-shape": [{**tensors, "a": tensors["a"].reshape(3, 2)}],
        "other-type": [{**tensors, "b": torch.ones(3, dtype=torch.float16)}],
        "other-name": [{("c" if name == "b" else name): value for name, value in tensors.items()}],
        "other-head": [{**tied, "lm_head.weight": torch.zeros(4, 2)}],
    }.items():
        (tmp_path / name).mkdir()
        for number, part in enumerate(parts):
            save_file(part, tmp_path / name / f"model-{number}.safetensors", {"saved": name})
    found = {folder.name: base_sha256(str(folder)) for folder in tmp_path.iterdir()}
    assert found["one"] == found["shards"] == found["with-tied-head"]
    assert len(set(found.values())) == len(found) - 2
    by_files = {base_sha256(str(folder), "0" * 64) for folder in tmp_path.iterdir()}
    assert len(by_files) == len(found)


@pytest.mark.parametrize("data", [b"", b"short", bytes(8) + b"{}", (1 << 60).to_bytes(8, "little") + b"{}", bytes(9)])
def test_a_file_that_is_not_of_safetensors_is_hashed_whole(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    assert base_sha256(str(tmp_path)) == base_sha256(str(tmp_path), "0" * 64) != ""


def test_nor_is_an_opponents(tmp_path: Path) -> None:
    log, artifacts = MemoryLog(num_partitions=1), ArtifactStore(str(tmp_path / "artifacts"))
    opponents = OpponentWeights(log, artifacts, ScriptedEngine(), permissions=NOTHING)
    (tmp_path / "tokenizer.json").write_text("as it was")
    recorded = tokenizer_sha256(str(tmp_path))

    async def scenario() -> None:
        for version in (0, 1):
            await log.send(published(artifacts, tmp_path, version, recorded))
        await opponents.hold([f"{GROUP}@0"], 2, "run-1")
        (tmp_path / "tokenizer.json").write_text("another")
        with pytest.raises(ModelError, match="version 1 of run-1/policy was trained with another tokenizer"):
            await opponents.hold([f"{GROUP}@1"], 2, "run-1")
        assert opponents.loaded == (f"{GROUP}@0",)

    asyncio.run(scenario())


def test_a_tokenizers_file_that_changes_is_read_again(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    first = tokenizer_sha256(str(tmp_path))
    assert tokenizer_sha256(str(tmp_path)) == first
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    assert tokenizer_sha256(str(tmp_path)) != first


@pytest.mark.parametrize("must_load", [False, True])
def test_a_base_model_whose_disk_fails_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, must_load: bool
) -> None:
    tries = [OSError(errno.EIO, "Input/output error"), OSError(errno.ESTALE, "Stale file handle")]

    def failing(published: WeightsPublished, permissions: object) -> str:
        if tries:
            raise tries.pop(0)
        return published.base_model

    async def story(rig: Any, start: Any) -> None:
        monkeypatch.setattr(rig.follower, "_must_load", must_load)
        await rig.publish(0)
        await start()
        await rig.follower.wait_for(GROUP, 0)
        assert rig.versions() == [(GROUP, 0)]

    monkeypatch.setattr(weight_follower, "base_model_of", failing)
    play(tmp_path, story)
    (error,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert error.endswith("version=0: [Errno 5] Input/output error; it is read again every 0.02 s"), error


def test_a_base_model_that_cannot_be_read_for_another_reason_ends_the_follower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(published: WeightsPublished, permissions: object) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    async def scenario() -> None:
        r = Rig(tmp_path)
        waiting = asyncio.create_task(r.follower.wait_for(GROUP, 0))
        await r.publish(0)
        async with asyncio.timeout(120):
            with pytest.raises(OSError, match="Too many open files"):
                await r.follower.run()
        waiting.cancel()

    monkeypatch.setattr(weight_follower, "base_model_of", failing)
    asyncio.run(scenario())


@pytest.mark.parametrize(
    "failure",
    [
        OSError(errno.ESTALE, os.strerror(errno.ESTALE)),
        OSError("Input/output error (os error 5)"),
        SafetensorError("Error while deserializing: I/O error: Input/output error (os error 5)"),
    ],
    ids=["python", "of safetensors", "within safetensors"],
)
def test_a_disk_that_fails_while_a_version_is_read_may_be_back(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    """safetensors reports the error's number in its message only."""
    _, path, lora = engine_rig.adapter(folder, tmp_path, 1)
    version = engine_rig.published(folder, weights_format="lora", lora=lora)

    def failing(*arguments: object, **named: object) -> None:
        raise failure

    async def work(engine: Any) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(model_cache, "load_file", failing)
            with pytest.raises(OSError, match="cannot be read for now") as raised:
                await engine.load(version, path)
        assert is_outage(raised.value)
        await engine.load(version, path)

    engine_rig.run(work)


def test_a_disk_that_fails_while_a_base_model_is_loaded_may_be_back(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path, lora = engine_rig.adapter(folder, tmp_path, 1)
    version = engine_rig.published(folder, weights_format="lora", lora=lora)

    def failing(*arguments: object, **named: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def work(engine: Any) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(model_cache.AutoModelForCausalLM, "from_pretrained", failing)
            with pytest.raises(OSError, match="cannot be read for now") as raised:
                await engine.load(version, path)
        assert is_outage(raised.value)
        await engine.load(version, path)

    engine_rig.run(work)
