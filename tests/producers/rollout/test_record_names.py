"""Names in a task are data: code, variables and URLs that the producers' settings do not allow are refused unused."""

import asyncio
import contextlib
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog.log import partition_of
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.harness.services import serving
from rollstream.producers import service
from rollstream.producers.attempt import refusal
from rollstream.producers.engines.base import Capabilities
from rollstream.producers.engines.scripted import ScriptedEngine
from rollstream.schemas.errors import ConfigError, ModelError, NotAllowedError
from rollstream.schemas.events import GroupStarted, RolloutEnded, RolloutFailed
from rollstream.schemas.kafka import KafkaSettings
from rollstream.schemas.permissions import NOTHING, Permissions, named_by
from rollstream.schemas.services import ProducerSettings
from rollstream.schemas.settings import RolloutSettings
from tests.producers import worker_rig as r
from tests.producers.rollout.names_rig import publish, settings_of

SECRET = "hunter2-b7e1"
JUDGE: dict[str, Any] = {
    "_type": "llm_judge",
    "base_url": "http://judge.example/v1",
    "model": "m",
    "prompt": "{response}",
}
MODULE = """
import pathlib

pathlib.Path(__file__).with_suffix(".imported").touch()


async def agent(session, greeting="hello"):
    await session.reward(1.0)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that leaves a file when it is imported; its name."""
    name = f"agents_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("STOLEN_SECRET", SECRET)
    yield name
    sys.modules.pop(name, None)


async def served(
    log: Any, settings: ProducerSettings, task: Any, partition: int = 0, engine: ScriptedEngine | None = None
) -> list[Any]:
    """Events of a task's group, played by the real producers service."""
    working = asyncio.create_task(service.run(settings, log, engine or ScriptedEngine()))
    try:
        await log.send(task)

        async def settled() -> list[Any] | None:
            found = await r.steps(log, partition=partition)
            mine = [event for event in found if getattr(event, "group_id", None) == task.group_id]
            is_over = any(isinstance(event, RolloutEnded) or getattr(event, "is_final", False) for event in mine)
            return mine if is_over else None

        async with asyncio.timeout(30):
            while (found := await settled()) is None:
                await asyncio.wait({working}, timeout=0.02)
                assert not working.done(), working.exception()
        return found
    finally:
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working


def attack(command: str = "", **changes: Any) -> Any:
    settings = {"environment": "python:os.system", "environment_config": {"command": command}, "agents": {}} | changes
    return r.task(run_id=f"run-{uuid.uuid4().hex[:6]}", **settings)


def assert_refused(events: list[Any], *words: str) -> RolloutFailed:
    """One group, opened once, of one attempt that failed for good and says why."""
    group = r.only(events, GroupStarted)
    failed = r.only(events, RolloutFailed)
    assert (group.size, failed.cause, failed.is_final) == (1, "not_allowed", True)
    for word in (*words, "--allow", "ROLLSTREAM_ALLOW"):
        assert word in failed.message
    assert "\n" not in failed.message
    assert SECRET not in "".join(event.model_dump_json() for event in events)
    return failed


def test_a_task_that_names_a_function_of_python_runs_nothing_and_fails_with_the_remedy(module: str, tmp_path: Path):
    stolen = tmp_path / "stolen"
    task = attack(f"echo ${{STOLEN_SECRET}} > {stolen}")
    events = asyncio.run(served(MemoryLog(num_partitions=1), settings_of(tmp_path), task))
    assert_refused(events, "settings.environment", "python:os.system")
    assert not stolen.exists()


@pytest.mark.kafka
def test_the_same_attack_by_a_record_of_the_embedded_broker(module: str, tmp_path: Path, kafka: KafkaSettings):
    stolen = tmp_path / "stolen"
    task = attack(f"echo ${{STOLEN_SECRET}} > {stolen}")

    kafka = kafka.model_copy(update={"topic_prefix": f"names-{module}.", "group_prefix": f"names-{module}"})

    async def main() -> list[Any]:
        from rollstream.eventlog.kafka.log import KafkaLog

        log = KafkaLog(kafka, client_id="test-record-names")
        try:
            await log.start()
            await log.ensure_topics(num_partitions=6)
            settings = settings_of(tmp_path, kafka=kafka)
            return await served(log, settings, task, partition_of(task.key, 6))
        finally:
            await log.close()

    assert_refused(asyncio.run(main()), "settings.environment", "python:os.system")
    assert not stolen.exists()


REFUSED = {
    "a reward function": ({"rewards": ("python:os.system",)}, "settings.rewards", "python:os.system"),
    "an evaluator's function": (
        {"rewards": ("e",), "evaluators": {"e": {"_type": "python", "function": "os.system"}}},
        "eval.evaluators.e.function",
        "python:os.system",
    ),
    "a variable": ({"environment_config": {"high": "${STOLEN_SECRET}"}}, "environment_config", "${STOLEN_SECRET}"),
    "a variable with a default": (
        {"environment_config": {"high": "${STOLEN_SECRET:-9}"}},
        "environment_config",
        "${STOLEN_SECRET}",
    ),
    "a judge's key": (
        {"rewards": ("e",), "evaluators": {"e": JUDGE | {"api_key": "${STOLEN_SECRET}"}}},
        "eval.evaluators.e",
        "${STOLEN_SECRET}",
    ),
    "a judge's URL": ({"rewards": ("e",), "evaluators": {"e": JUDGE}}, "eval.evaluators.e.base_url", "judge.example"),
    "a schema's file": (
        {"rewards": ("e",), "evaluators": {"e": {"_type": "json_schema", "file": "/etc/passwd"}}},
        "eval.evaluators.e.file",
        "/etc/passwd",
    ),
    "a remote workflow": (
        {"environment": "remote_workflow", "environment_config": {"endpoint": "http://169.254.169.254/latest"}},
        "environment_config.endpoint",
        "169.254.169.254",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_every_other_name_of_a_task_is_refused_too(what: str, module: str, tmp_path: Path):
    changes, location, name = REFUSED[what]
    task = attack(**({"environment": "guess_number", "environment_config": {}} | changes))
    assert_refused(asyncio.run(served(MemoryLog(num_partitions=1), settings_of(tmp_path), task)), location, name)


def test_a_refused_task_waits_for_no_weights(tmp_path: Path):
    task = attack(agents={"agent": "nobody/policy"})
    assert_refused(asyncio.run(served(MemoryLog(num_partitions=1), settings_of(tmp_path), task)), "python:os.system")


def test_a_refused_module_is_not_imported_and_an_allowed_one_plays(module: str, tmp_path: Path):
    imported = tmp_path / f"{module}.imported"
    task = attack(environment=f"python:{module}.agent", environment_config={})
    assert_refused(asyncio.run(served(MemoryLog(num_partitions=1), settings_of(tmp_path), task)), module)
    assert not imported.exists()
    allowed = settings_of(tmp_path, f"python:{module}.agent")
    events = asyncio.run(served(MemoryLog(num_partitions=1), allowed, task))
    assert imported.exists()
    assert any(isinstance(event, RolloutEnded) for event in events)


def test_an_allowed_name_is_held_to_be_an_environment_before_it_is_called(tmp_path: Path):
    stolen = tmp_path / "stolen"
    task = attack(f"touch {stolen}", max_attempts=1)
    events = asyncio.run(served(MemoryLog(num_partitions=1), settings_of(tmp_path, "python:os.system"), task))
    failed = [event.message for event in events if isinstance(event, RolloutFailed)]
    assert all("neither an Environment class nor an async function" in message for message in failed)
    assert not stolen.exists()


@pytest.mark.parametrize(
    ("allowed", "asked", "is_allowed"),
    [
        ("http://judge:8000/v1", "http://judge:8000/v1", True),
        ("http://judge:8000/v1", "http://judge:8000/v1/deep", True),
        ("http://judge/v1", "http://JUDGE:80/v1", True),
        ("http://judge:8000", "http://judge:8000/any/thing", True),
        ("http://judge:8000/v1", "http://judge:8000/v10", False),
        ("http://judge:8000/v1", "http://judge:8000/v1/../admin", False),
        ("http://judge:8000/v1", "http://judge:8000/v1/%2e%2e/admin", False),
        ("http://judge:8000/v1", "http://judge:9000/v1", False),
        ("http://judge:8000/v1", "https://judge:8000/v1", False),
        ("http://judge:8000/v1", "http://judge:8000@evil.example/v1", False),
        ("http://judge:8000/v1", "http://user@judge:8000/v1", False),
        ("http://judge:8000/v1", "http://judge:8000\\@evil.example/v1", False),
        ("http://judge", "http://judge.evil.example", False),
        ("${JUDGE_URL}", "http://judge:8000/v1", True),
        ("http://${HOST}:8000", "http://judge:8000/v1", True),
    ],
)
def test_a_url_is_allowed_with_what_lies_below_it(allowed: str, asked: str, is_allowed: bool):
    env = {"JUDGE_URL": "http://judge:8000/v1", "HOST": "judge"}
    settings = RolloutSettings(environment="remote_workflow", environment_config={"endpoint": asked})
    refused = refusal(settings, Permissions.of([allowed], env))
    assert (refused is None) == is_allowed, refused


@pytest.mark.parametrize(
    ("allowed", "asked", "is_allowed"),
    [
        ("model:/models/tiny", "/models/tiny", True),
        ("model:/models", "/models/tiny", True),
        ("model:/models/", "/models/deep/tiny", True),
        ("model:/", "/models/tiny", True),
        ("model:Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", True),
        ("model:Qwen", "Qwen/Qwen3-0.6B", True),
        ("model:${MODELS}/tiny", "/models/tiny", True),
        ("model:/models", "/models2/tiny", False),
        ("model:/models", "/models/../etc", False),
        ("model:/models/tiny", "/models", False),
        ("model:Qwen/Qwen3", "Qwen/Qwen3-0.6B", False),
        ("model:/", "Qwen/Qwen3-0.6B", False),
        ("file:/models/tiny", "/models/tiny", False),
        ("model:/models", "${MODELS}/tiny", False),
    ],
)
def test_a_model_is_allowed_with_what_lies_below_it(allowed: str, asked: str, is_allowed: bool):
    permissions = Permissions.of([allowed], {"MODELS": "/models"})
    if is_allowed:
        assert permissions.model_path(asked, "model.path") == asked
        return
    with pytest.raises(NotAllowedError, match=r"model\.path: .* is not allowed .*--allow NAME"):
        permissions.model_path(asked, "model.path")


def test_a_model_below_the_home_folder_is_allowed_as_written_and_loaded_from_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/user")
    permissions = Permissions.of(["model:~/models"], {})
    assert permissions.model_path("~/models/tiny", "model.path") == "/home/user/models/tiny"
    for asked in ("~/other", "~/models/../other", "/home/user/models/tiny"):
        with pytest.raises(NotAllowedError):
            permissions.model_path(asked, "model.path")


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("model:/m 'command:python a.py'", ("model:/m", "command:python a.py")),
        ("model:/m,\"command:sh -c 'echo 1, 2'\"\n", ("model:/m", "command:sh -c 'echo 1, 2'")),
        ("${JUDGE_KEY}, http://judge:8000/v1#part", ("${JUDGE_KEY}", "http://judge:8000/v1#part")),
        ("", ()),
    ],
)
def test_quotes_hold_an_entry_of_the_variable_together(text: str, entries: tuple[str, ...]):
    given = {"bootstrap_servers": "memory", "engine": {"kind": "scripted"}}
    assert serving.settings_of("producers", None, given, {"ROLLSTREAM_ALLOW": text}).allow == entries


def test_a_quote_without_its_end_is_named():
    message = (
        r"serve producers: allow: .*a quote or backslash in \".*\" has no end; quote whole entries of ROLLSTREAM_ALLOW"
    )
    env = {"ROLLSTREAM_ALLOW": "model:/m 'command:python a.py", "ROLLSTREAM_BOOTSTRAP_SERVERS": "memory"}
    with pytest.raises(ConfigError, match=message):
        serving.settings_of("producers", None, {}, env)


def test_a_model_without_a_path_cannot_be_allowed():
    with pytest.raises(ConfigError, match=r"cannot be allowed; give .*model:PATH"):
        Permissions.of(["model:"], {})


class LoadingEngine(ScriptedEngine):
    """Says that it loads base models."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(loads_models=True)


def test_a_task_whose_weights_are_of_a_model_that_is_not_allowed_is_refused(tmp_path: Path):
    async def scenario(*allow: str) -> list[Any]:
        log = MemoryLog(num_partitions=1)
        await publish(log, tmp_path, "/home/other/model")
        settings = settings_of(tmp_path, *allow)
        task = attack(environment="guess_number", environment_config={}, agents={"agent": "run-1/policy"})
        return await served(log, settings, task, engine=LoadingEngine())

    assert_refused(asyncio.run(scenario("model:/models")), "base model", "model:/home/other/model")
    events = asyncio.run(scenario("model:/home/other/model"))
    assert not any(getattr(event, "cause", None) == "not_allowed" for event in events)


class RefusingEngine(LoadingEngine):
    """Cannot load any weights."""

    async def load(self, published: Any, path: Path) -> None:
        raise ModelError("weights do not fit")


def test_a_task_whose_weights_the_engine_cannot_load_fails_with_the_reason(tmp_path: Path):
    async def scenario() -> list[Any]:
        log = MemoryLog(num_partitions=1)
        await publish(log, tmp_path, "/models/tiny")
        settings = settings_of(tmp_path, "model:/models")
        task = attack(environment="guess_number", environment_config={}, agents={"agent": "run-1/policy"})
        return await served(log, settings, task, engine=RefusingEngine())

    failed = r.only(asyncio.run(scenario()), RolloutFailed)
    assert (failed.cause, failed.message, failed.is_final) == ("engine_error", "weights do not fit", True)


def test_names_of_trusted_settings_are_those_that_their_producers_allow():
    evaluators: dict[str, dict[str, Any]] = {
        "p": {"_type": "python", "function": "mine.score"},
        "q": {"_type": "python", "function": "python:mine.other"},
        "j": JUDGE | {"base_url": "http://${HOST}/v1", "api_key": "${KEY}"},
        "s": {"_type": "json_schema", "file": "schema.json"},
    }
    settings = RolloutSettings(
        environment="python:mine.agent",
        environment_config={"endpoint": "http://tools:1/x", "deep": [{"token": "${TOKEN}"}]},
        rewards=("python:mine.reward", "p", "j", "s"),
        evaluators=evaluators,
    )
    named = named_by(settings)
    assert named == (
        "file:schema.json",
        "http://${HOST}/v1",
        "http://tools:1/x",
        "place:environment_config(python%3Amine%2Eagent).deep.0.token=${TOKEN}",
        "place:evaluators(j:llm_judge).api_key=${KEY}",
        "place:evaluators(j:llm_judge).base_url=http://${HOST}/v1",
        "python:mine.agent",
        "python:mine.other",
        "python:mine.reward",
        "python:mine.score",
    )
    env = {"HOST": "judge", "KEY": "k", "TOKEN": "t"}
    assert refusal(settings, Permissions.of(named, env)) is None
    assert refusal(settings, NOTHING) is not None


def test_a_message_shows_no_value_of_an_allowed_variable_and_cannot_be_used_to_guess_others(tmp_path: Path):
    permissions = Permissions.of(["${KEY}"], {"KEY": SECRET, "OTHER": "guess"})
    assert permissions.conceal(f"sent {SECRET}, guess") == "sent ${KEY}, guess"
    long = RolloutSettings(environment="python:" + "x" * 9999 + "\x1b[2J.y")
    message = refusal(long, permissions)
    assert message is not None
    assert len(message) < 500
    assert message.isprintable()
