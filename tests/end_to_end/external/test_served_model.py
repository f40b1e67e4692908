"""A run whose judge is a model that others serve: it is recorded and not trained, and its key is stored nowhere."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.rigs.services.judge_server import JudgeServer

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]
GAME = '''
from zlib import crc32

from rollstream.producers.rollout.session import Session


async def judged(session: Session) -> None:
    """The judge sees the answer; its word and the answer's own words are the reward."""
    said = (await session.chat([{"role": "user", "content": "?"}], agent="player")).text
    verdict = (await session.chat([{"role": "user", "content": f"<{said}>"}], agent="judge")).text
    await session.reward(float(verdict == "good") + crc32(said.encode()) / 2**40, agent="player")
    await session.reward(0.0, agent="judge")
'''
RUN, EPOCHS, KEY = "served-1", 3, "sk-of-the-judge-0123456789"


@contextmanager
def judge() -> Iterator[JudgeServer]:
    """A server in a thread of its own: even lengths are good."""
    server = JudgeServer(lambda body: "good" if len(body["messages"][-1]["content"]) % 2 else "bad")
    ready, loop = threading.Event(), asyncio.new_event_loop()

    async def serve() -> None:
        async with server:
            ready.set()
            await asyncio.Event().wait()

    task = loop.create_task(serve())
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait({task})))
    thread.start()
    assert ready.wait(30)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(30)
        loop.close()


def test_a_judge_that_others_serve_is_asked_and_recorded_and_the_player_alone_is_trained(project: Any) -> None:
    (project.folder / "judged.py").write_text(GAME)
    agents = {"player": "players", "judge": "judges"}
    written = project.configuration(num_epochs=EPOCHS, agents=agents, engine={"threads": 1, "deterministic": True})
    with judge() as server:
        endpoint = {"base_url": server.base_url, "model": "wise", "api_key_variable": "JUDGE_KEY"}
        written["trainer_adapters"]["learner"]["model_groups"] = {"judges": {"endpoint": endpoint}}
        config = str(project.write(written | {"workflow": "python:judged.judged"}))
        refused = project.run("finetune", "--config_file", config, "--run_id", RUN)
        assert refused.returncode != 0
        assert "judges.endpoint: the variable JUDGE_KEY is not set; export it" in refused.stderr
        done = project.run("finetune", "--config_file", config, "--run_id", RUN, JUDGE_KEY=KEY)
        assert done.returncode == 0, done.stdout + done.stderr + project.logs()
    assert {headers["Authorization"] for headers, _ in server.requests} == {f"Bearer {KEY}"}
    assert {body["model"] for _, body in server.requests} == {"wise"}
    versions = project.rows("SELECT model_group, max(version) AS v FROM weight_versions GROUP BY 1")
    assert [(row["model_group"], row["v"]) for row in versions] == [(f"{RUN}/players", EPOCHS)]
    causes = project.rows("SELECT agent, cause FROM rejections JOIN trajectories USING (trajectory_id) GROUP BY ALL")
    assert [(row["agent"], row["cause"]) for row in causes if row["agent"] == "judge"] == [("judge", "frozen")]
    outputs = project.rows("SELECT DISTINCT CAST(output AS VARCHAR) AS said FROM steps WHERE agent = 'judge'")
    assert {row["said"].strip('"') for row in outputs} <= {"good", "bad"}
    replayed = project.run("replay", RUN, "--verify")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    exported = project.run("export", RUN)
    assert exported.returncode == 0, exported.stderr
    for file in project.folder.rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes(), file
