"""A teacher on a server: the log-probabilities of its model are recorded, and what a bad server does is named."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from transformers import AutoTokenizer

from rollstream.harness.config.checks import check_teacher
from rollstream.learner.scoring import served_teacher
from rollstream.learner.scoring.prompt_logprobs import ECHO
from rollstream.learner.scoring.served_teacher import KEY_VARIABLE, ServedTeacher
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.schemas.algorithms import MixSettings, OpdSettings
from rollstream.schemas.errors import ConfigError, ModelError
from rollstream.schemas.events import JobFailed, JobSucceeded, ReferenceScored, StepTrained
from rollstream.schemas.permissions import Permissions
from rollstream.schemas.settings import Sampling
from tests.learner.scoring.teacher_rig import assert_scores_are_those_of, logprobs_by_transformers
from tests.rigs.runs.retrained import assert_retrained, steps_of
from tests.rigs.services.vllm_server import VllmServer


@dataclass
class TeacherServer:
    """vLLM's paths over a model of transformers."""

    model: Path
    root: str = ""
    """Root of the model that it lists, if it is another one."""
    shift: int = 0
    """Added to the ids of every text."""
    answer: Any = None
    """Answer in place of the usual one to a prompt."""
    failing: int = 0
    """So many requests fail first."""
    key: str = ""
    """Key that requests must carry."""
    way: str = "prompt_logprobs"
    """Its way to give log-probabilities of prompts: by `echo` of the texts, of token `ids`, or "" not at all."""
    wrong: int | None = None
    """Index of a prompt's token of which it says that it is another one."""
    asked: list[str] = field(default_factory=list[str])
    url: str = ""

    async def answered(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        body: dict[str, Any] = await request.json() if request.can_read_body else {}
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if self.failing:
            self.failing -= 1
            return web.Response(status=503)
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "wise", "root": self.root or str(self.model)}]})
        assert body["model"] == "wise"
        if request.path == "/tokenize":
            assert self.way == "prompt_logprobs", "others have no such path"
            ids = AutoTokenizer.from_pretrained(self.model).encode(body["prompt"], add_special_tokens=False)
            return web.json_response({"tokens": [one + self.shift for one in ids]})
        assert request.path == "/v1/completions"
        return web.json_response(self.answer or {"choices": [{"text": "?", **self.scored(body)}]})

    def scored(self, body: Any) -> dict[str, Any]:
        ids = body["prompt"]
        values = logprobs_by_transformers(self.model, ids)
        named = [one + (index == self.wrong) for index, one in enumerate(ids)]
        if self.way == "prompt_logprobs" and "prompt_logprobs" in body:
            scored = zip(named[1:], values, strict=True)
            return {"prompt_logprobs": [None, *({str(one): {"logprob": value}} for one, value in scored)]}
        if self.way in ("echo", "ids") and body.get("echo") and body["logprobs"]:
            words = AutoTokenizer.from_pretrained(self.model)
            tokens = [f"token_id:{one}" if self.way == "ids" else words.decode([one]) for one in [*named, 7]]
            return {"logprobs": {"tokens": tokens, "token_logprobs": [None, *values, -0.5]}}
        return {"logprobs": None}


@asynccontextmanager
async def serving(server: TeacherServer) -> AsyncIterator[TeacherServer]:
    """It listens until the block ends."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answered)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield server
    finally:
        await runner.cleanup()


@pytest.fixture
def teacher(lab: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Beside the lab's policy, with its tokenizer; the lab's learner may ask every server of this machine."""
    monkeypatch.setattr(served_teacher, "RETRY_WAIT_S", 0.01)
    lab.model = make_tiny_model(lab.folder / "policy", seed=0, hidden_size=16, intermediate_size=32)
    return make_tiny_model(lab.folder / "teacher", seed=1, hidden_size=32, intermediate_size=32)


def allow(lab: Any, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    permissions = Permissions.of([*lab.permissions.allow, url], {})
    monkeypatch.setattr(type(lab), "permissions", property(lambda _: permissions))


def test_a_servers_scores_are_recorded_and_a_replay_does_not_ask_it(
    lab: Any, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with serving(TeacherServer(teacher, failing=2)) as server:
            allow(lab, monkeypatch, server.url)
            algorithm = OpdSettings(teacher=str(teacher), teacher_url=server.url)
            job = await lab.submit(num_versions=2, algorithm=algorithm)
            await lab.plan(job, 2)
            await lab.work(lab.has(JobSucceeded))
            await assert_scores_are_those_of(lab, teacher, [])
            trained = await lab.events("weights", ReferenceScored)
            assert {event.scorer.model for event in trained} == {str(teacher)}
            assert server.asked.count("/tokenize") == 1
            num_asked = len(server.asked)
        await assert_retrained(lab, job, await steps_of(lab))
        assert len(server.asked) == num_asked

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"root": "another/model"}, "serves another/model; algorithm.teacher is .*: start the server with that"),
        ({"shift": 1}, "reads text as other token ids than the policy: .*; give a teacher of the same model family"),
        ({"answer": {"choices": [{"text": "?"}]}}, "gave no log-probabilities of the prompt.*: .*; set algorithm.tea"),
        ({"answer": {"choices": [{"prompt_logprobs": [None]}]}}, "gave no log-probabilities of the prompt"),
        (
            {"way": ""},
            "gave no log-probabilities of the prompt, by prompt_logprobs or by echo with logprobs: .*; set algo",
        ),
        (
            {"wrong": 1},
            "scored another token than asked at index 1 of a prompt: '9' for 8; look at the teacher's tokenizer",
        ),
        ({"wrong": 1, "way": "ids"}, "scored another token than asked at index 1 of a prompt: 'token_id:9' for 8"),
        ({"wrong": 1, "way": "echo"}, "scored another token than asked at index 1 of a prompt: "),
        ({"failing": 99}, r"answered 503 .*\(7 tries\)"),
    ],
)
def test_a_server_that_cannot_teach_is_named_with_a_remedy(teacher: Path, changes: Any, reported: str) -> None:
    async def scenario() -> None:
        async with serving(TeacherServer(teacher, **changes)) as server:
            asked = ServedTeacher(server.url, str(teacher), AutoTokenizer.from_pretrained(teacher))
            rows = [np.asarray([7, 8, 9], np.int32)] * 3
            with pytest.raises(ModelError, match=rf"teacher {server.url} {reported}"):
                await asyncio.to_thread(asked.logprobs, rows)

    asyncio.run(scenario())


@pytest.mark.parametrize("way", ["echo", "ids"])
def test_the_older_completions_api_teaches_by_the_echo_of_the_prompt(teacher: Path, way: str) -> None:
    async def scenario() -> None:
        async with serving(TeacherServer(teacher, way=way)) as server:
            asked = ServedTeacher(server.url, str(teacher), AutoTokenizer.from_pretrained(teacher))
            rows = [np.arange(2, 2 + size, dtype=np.int32) for size in (1, 2, 90)]
            for row, found in zip(rows, await asyncio.to_thread(asked.logprobs, rows), strict=True):
                assert found.tolist() == pytest.approx(
                    [0.0, *logprobs_by_transformers(teacher, row.tolist())], abs=1e-6
                )
            assert "/tokenize" not in server.asked

    asyncio.run(scenario())


def test_tokens_that_are_named_by_text_alone_need_a_tokenizer_to_be_compared_with(teacher: Path) -> None:
    async def scenario() -> None:
        async with serving(TeacherServer(teacher, way="echo")) as server:
            asked = ServedTeacher(server.url, str(teacher), None)
            with pytest.raises(ModelError, match="the model has no tokenizer to compare it with; add its tokenizer"):
                await asyncio.to_thread(asked.logprobs, [np.asarray([7, 8], np.int32)])

    asyncio.run(scenario())


def test_a_server_that_wants_a_key_is_asked_with_that_of_the_environment(teacher: Path) -> None:
    async def scenario() -> None:
        async with serving(TeacherServer(teacher, key="sk-wise-1")) as server:
            rows = [np.asarray([7, 8, 9], np.int32)]
            asked = ServedTeacher(server.url, str(teacher), None, {KEY_VARIABLE: "sk-wise-1\n"})
            assert len((await asyncio.to_thread(asked.logprobs, rows))[0]) == 3
            for env in ({}, {KEY_VARIABLE: "sk-other"}):
                asked = ServedTeacher(server.url, str(teacher), None, env)
                with pytest.raises(ModelError, match=f"401.*set the variable {KEY_VARIABLE} to a valid key") as error:
                    await asyncio.to_thread(asked.logprobs, rows)
                assert "sk-other" not in str(error.value)

    asyncio.run(scenario())


def test_a_key_that_no_header_can_hold_is_refused_without_telling_it(teacher: Path) -> None:
    with pytest.raises(ModelError, match=f"the variable {KEY_VARIABLE} holds no key") as error:
        ServedTeacher("http://teacher:8000", str(teacher), None, {KEY_VARIABLE: "sk\nother"})
    assert "other" not in str(error.value)


@pytest.mark.parametrize("value", [float("nan"), -9999.0, 0.5, "high"])
def test_an_invalid_log_probability_is_refused(teacher: Path, value: Any) -> None:
    async def scenario() -> None:
        answer = {"choices": [{"prompt_logprobs": [None, {"8": {"logprob": value}}]}]}
        async with serving(TeacherServer(teacher, answer=answer)) as server:
            asked = ServedTeacher(server.url, str(teacher), None)
            with pytest.raises(ModelError, match="log-probabilit"):
                await asyncio.to_thread(asked.logprobs, [np.asarray([7, 8], np.int32)])

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({}, "is not allowed by this process's settings"),
        ({"temperature": 0.5}, "sample with temperature 1 and without"),
    ],
)
def test_a_job_that_cannot_be_taught_by_a_server_fails_before_it_is_asked(
    lab: Any, teacher: Path, changes: Any, reported: str
) -> None:
    async def scenario() -> str:
        async with serving(TeacherServer(teacher)) as server:
            algorithm = OpdSettings(teacher=str(teacher), teacher_url=server.url, **changes)
            job = await lab.submit(num_versions=1, algorithm=algorithm)
            await lab.plan(job, 1)
            await lab.work(lab.has(JobFailed))
            assert not await lab.events("weights", StepTrained)
            assert not server.asked
        return (await lab.events("jobs", JobFailed))[0].error

    found = asyncio.run(scenario())
    assert "algorithm.teacher_url: " in found
    assert reported in found


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({}, ""),
        ({"way": "echo"}, ""),
        ({"way": ""}, "by prompt_logprobs or by echo with logprobs: .*; set algorithm.teacher_url to a vLLM server"),
        ({"way": "echo", "wrong": 1}, "scored another token than asked at index 1 of a prompt"),
        ({"root": "another/model"}, "serves another/model; algorithm.teacher is .*: start the server with that"),
    ],
)
def test_a_server_that_cannot_teach_is_refused_before_the_run(teacher: Path, changes: Any, reported: str) -> None:
    async def scenario() -> None:
        async with serving(TeacherServer(teacher, **changes)) as server:
            algorithm = OpdSettings(teacher=str(teacher), teacher_url=server.url)
            expected = pytest.raises(ConfigError, match=f"^a.algorithm.teacher_url: teacher http.*{reported}")
            with expected if reported else nullcontext():
                await asyncio.to_thread(check_teacher, algorithm, Sampling(), str(teacher), "a.algorithm.teacher")

    asyncio.run(scenario())


def test_a_server_that_hangs_is_asked_once_and_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_teacher, "TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:  # the system accepts connections; nobody answers
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ModelError) as raised:
            ServedTeacher(url, "wise", None).logprobs([np.asarray([0, 1, 2], np.int32)])
    assert str(raised.value) == (
        f"teacher {url} gave no answer within 0.3 s (1 tries); check that it serves, or set algorithm.teacher_url to a "
        "server that does"
    )


@pytest.mark.parametrize("url", ["", "http://127.0.0.1:9"])
def test_a_server_that_does_not_answer_yet_is_only_a_warning(
    teacher: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = OpdSettings(teacher=str(teacher), teacher_url=url)
    check_teacher(algorithm, Sampling(), str(teacher), "a.algorithm.teacher")
    assert ("the learner will ask it again" in caplog.text) == bool(url)


def test_a_teacher_is_checked_where_components_open_a_run_in_an_event_loop(
    teacher: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def opens() -> None:
        algorithm = OpdSettings(teacher=str(teacher), teacher_url="http://127.0.0.1:10")
        check_teacher(algorithm, Sampling(), str(teacher), "a.algorithm.teacher")

    asyncio.run(opens())
    assert "the learner will ask it again" in caplog.text


def test_a_url_without_a_teacher_is_refused() -> None:
    with pytest.raises(ValueError, match="teacher_url needs teacher"):
        MixSettings(ref_kl=0.5, context="{a}", teacher_url="http://x")


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_a_vllm_server_teaches_with_its_models_log_probabilities(vllm_server: VllmServer) -> None:
    vllm_server.restore()
    rng = np.random.default_rng(0)
    rows = [rng.integers(2, 100, size).astype(np.int32) for size in (2, 17, 200, 500)]
    asked = ServedTeacher(vllm_server.url, str(vllm_server.base), AutoTokenizer.from_pretrained(vllm_server.base))
    for row, found in zip(rows, asked.logprobs(rows), strict=True):
        wanted = [0.0, *logprobs_by_transformers(vllm_server.base, row.tolist())]
        assert found.tolist() == pytest.approx(wanted, abs=1e-4)
    echoing = ServedTeacher(vllm_server.url, str(vllm_server.base), AutoTokenizer.from_pretrained(vllm_server.base))
    echoing.ways = (ECHO,)
    assert (asked.check(60), echoing.check(60)) == ("", "")
    for found, wanted in zip(echoing.logprobs(rows), asked.logprobs(rows), strict=True):
        assert found.tolist() == pytest.approx(wanted.tolist(), abs=1e-5)
    with pytest.raises(ModelError, match="another/model: start the server with that"):
        ServedTeacher(vllm_server.url, "another/model", None).logprobs(rows)
