"""A run that takes every text that may be a secret from a variable; then all that it left is searched."""

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import duckdb
import psutil
import pytest
from aiohttp import web

from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.eventlog.log import TopicPartition
from rollstream.schemas.topics import TOPICS
from tests.end_to_end.conftest import ENVIRONMENT
from tests.producers.environments.workflow_rig import lines_of, serving, streaming
from tests.rigs import nat_samples
from tests.rigs.services.secured_broker import SecuredBroker, secured_broker

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

NAMES = {"topic_prefix": "rollstream.secrets.", "group_prefix": "rollstream-secrets"}
RIGHTS = """
kafka-acls --add --allow-principal User:operator --operation All --topic rollstream. --resource-pattern-type prefixed
kafka-acls --add --allow-principal User:operator --operation All --group rollstream- --resource-pattern-type prefixed
"""
PLAYED = itertools.count()
"""Rollouts that the workflow was asked for."""


class Judge(BaseHTTPRequestHandler):
    """Scores two of three answers; the third is an error that shows all that it was sent."""

    asked: ClassVar[list[tuple[str, str | None, str]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.asked.append((self.path, self.headers["Authorization"], body))
        number = len(self.asked)
        answer = json.dumps({"choices": [{"message": {"content": f"0.{number % 10} {self.headers['Authorization']}"}}]})
        failed = f"refused: {self.path} {self.headers['Authorization']} {body}"
        self.send_response(400 if number % 3 == 0 else 200)
        self.end_headers()
        self.wfile.write((failed if number % 3 == 0 else answer).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def judging() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


async def playing(request: web.Request) -> web.StreamResponse:
    """A workflow: one call of a model, of another answer each time; every fifth is an error that shows the request."""
    number = next(PLAYED)
    if number % 5 == 4:
        return web.Response(status=500, text=f"refused: {request.headers['Authorization']} {request.url}")
    question = (await request.json())["input_message"]
    answer = str(number % 10)
    call = nat_samples.langchain("a", nat_samples.messages(question), answer, ids=False)
    steps = nat_samples.workflow(call, question=question, answer=answer)
    return await streaming(lines_of(steps, answer))(request)


class Secrets:
    """Values that only the environment has, and the run that is given them."""

    def __init__(self, project: Any, judge: int, values: dict[str, str], workflow: str, broker: SecuredBroker) -> None:
        self.project = project
        self.broker = broker
        self.values = values
        folder = project.folder
        shutil.copytree(project.model, folder / self.values["MODEL"])
        (folder / self.values["DATA"]).mkdir()
        rows = [{"id": str(n), "question": f"{n}+1", "answer": str(n + 1)} for n in range(1, 5)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / self.values["DATA"] / "examples.jsonl").write_text(lines)
        self.env = {f"TEST_{name}": value for name, value in self.values.items()} | {
            "TEST_MODEL": str(folder / self.values["MODEL"]),
            "TEST_STORE": str(folder / self.values["STORE"]),
            "TEST_DATA": str(folder / self.values["DATA"]),
            "TEST_JUDGE_URL": f"http://127.0.0.1:{judge}/{self.values['JUDGE_PATH']}",
            "TEST_WORKFLOW_URL": workflow.replace("//", f"//bot:{self.values['WORKFLOW_PASSWORD']}@"),
            "ROLLSTREAM_ENDPOINT_TOKEN": self.values["ENDPOINT_TOKEN"],
        }

    def configuration(self) -> dict[str, Any]:
        written = self.project.configuration(num_epochs=2, missing_score="reject", max_attempts=1)
        builder = written["trajectory_builders"]["rollouts"]
        builder |= {
            "bootstrap_servers": f"127.0.0.1:{self.broker.ports['SASL_PLAINTEXT']}",
            "kafka": {
                "security_protocol": "SASL_PLAINTEXT",
                "username": "operator",
                "password": "${TEST_KAFKA_PASSWORD}",
                **NAMES,
            },
            "environment_config": {"retokenise": True},
            "min_generations": 2,
        }
        learner = written["trainer_adapters"]["learner"]
        learner |= {"model": {"path": "${TEST_MODEL}"}, "artifact_uri": "${TEST_STORE}/artifacts"}
        judge = {
            "_type": "llm_judge",
            "base_url": "${TEST_JUDGE_URL}/v1",
            "api_key": "${TEST_JUDGE_KEY}",
            "model": "${TEST_JUDGE_MODEL}",
            "prompt": "${TEST_JUDGE_PROMPT}: {response}",
            "pattern": r"^(\d\.\d)",
            "retries": 0,
        }
        dataset = {"_type": "jsonl", "file_path": "${TEST_DATA}/examples.jsonl"}
        written["finetuning"]["reward_function"] = {"name": "judged"}
        written["finetuning"]["run_configuration"] = {"endpoint": "${TEST_WORKFLOW_URL}"}
        written.pop("workflow")
        return written | {
            "llms": {"m": {"_type": "openai", "api_key": "${TEST_LLM_KEY}"}},
            "eval": {"general": {"dataset": dataset}, "evaluators": {"judged": judge}},
        }

    def assert_not_in(self, content: str | bytes, where: str) -> None:
        data = content if isinstance(content, bytes) else content.encode(errors="surrogateescape")
        for name, value in self.values.items():
            index = data.find(value.encode())
            assert index < 0, f"{name} is in {where}: {data[max(0, index - 200) : index + 100]!r}"


@pytest.fixture
def secrets(project: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secrets]:
    values = {name: f"s3cr3t-{name.lower()}-{uuid.uuid4().hex[:12]}" for name in
              ("KEY", "JUDGE_PATH", "JUDGE_KEY", "JUDGE_MODEL", "JUDGE_PROMPT", "LLM_KEY", "MODEL", "STORE", "DATA",
               "ENDPOINT_TOKEN", "WORKFLOW_PATH", "WORKFLOW_PASSWORD")}  # fmt: skip
    values["KAFKA_PASSWORD"] = "operator-secret"
    values["WORKFLOW_AUTHORIZATION"] = base64.b64encode(f"bot:{values['WORKFLOW_PASSWORD']}".encode()).decode()
    path = f"/{values['WORKFLOW_PATH']}"
    with (
        judging() as judge,
        serving(playing, f"{path}/v1/workflow/full") as (workflow, _),
        secured_broker(tmp_path_factory.mktemp("broker")) as broker,
    ):
        asyncio.run(broker.allow(RIGHTS))
        yield Secrets(project, judge, values, workflow + path, broker)


def watched(secrets: Secrets, *arguments: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """A command to its end, and the command lines of all processes that it started."""
    project, seen = secrets.project, set[str]()
    env = {**ENVIRONMENT, "PYTHONPATH": str(project.folder), **secrets.env}
    process = subprocess.Popen(
        project.command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=project.folder,
        env=env,
    )
    while True:
        with suppress(psutil.Error):
            for one in psutil.Process(process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    seen.add(" ".join(one.cmdline()))
        try:
            out, err = process.communicate(timeout=0.2)
        except subprocess.TimeoutExpired:
            continue
        return subprocess.CompletedProcess(arguments, process.returncode, out, err), "\n".join(seen)


def contents_of(cell: Any) -> bytes:
    return cell if isinstance(cell, bytes) else str(cell).encode(errors="surrogateescape")


def assert_topics_hold_none(secrets: Secrets) -> None:
    async def main() -> int:
        log, num = KafkaLog(secrets.broker.settings("SASL_PLAINTEXT", **NAMES), client_id="test-secrets"), 0
        try:
            await log.start()
            for topic in TOPICS:
                ends = await log.end_offsets(topic)
                reader = await log.reader({TopicPartition(topic, partition): 0 for partition in ends})
                while any(reader.position(TopicPartition(topic, partition)) < end for partition, end in ends.items()):
                    for record in await reader.poll():
                        num += 1
                        whole = b"\n".join([record.key or b"", record.value or b"", repr(record.headers).encode()])
                        secrets.assert_not_in(whole, f"{topic} offset {record.offset}")
                await reader.close()
            return num
        finally:
            await log.close()

    assert asyncio.run(main()) > 50


def assert_tables_hold_none(secrets: Secrets, path: Path) -> None:
    with duckdb.connect(str(path), read_only=True) as connection:
        query = "SELECT table_schema, table_name FROM information_schema.tables"  # and views
        names = [f'"{schema}"."{name}"' for schema, name in connection.execute(query).fetchall()]
        assert any('"rollouts"' in name for name in names)
        for name in names:
            for row in connection.execute(f"SELECT * FROM {name}").fetchall():
                for cell in row:
                    secrets.assert_not_in(contents_of(cell), f"table {name}")


def assert_export_holds_none(secrets: Secrets, folder: Path) -> None:
    tables = sorted(folder.rglob("*.parquet"))
    assert tables
    for path in tables:
        with duckdb.connect() as connection:
            for row in connection.execute("SELECT * FROM read_parquet(?)", [str(path)]).fetchall():
                for cell in row:
                    secrets.assert_not_in(contents_of(cell), path.name)


def assert_files_hold_none(secrets: Secrets, folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        secrets.assert_not_in(path.name, f"the name of {path}")
        if path.is_file():
            secrets.assert_not_in(path.read_bytes(), str(path))


def test_no_file_or_output_of_a_run_contains_a_secret(secrets: Secrets) -> None:
    project = secrets.project
    config = project.write(secrets.configuration())
    secrets.assert_not_in(config.read_text(), "the file itself")
    done, commands = watched(secrets, "finetune", "--config_file", str(config), "--name", "mine")
    assert done.returncode == 0, done.stdout + done.stderr + project.logs()
    assert "serve producers" in commands
    assert {path for path, _, _ in Judge.asked} == {f"/{secrets.values['JUDGE_PATH']}/v1/chat/completions"}
    assert secrets.values["JUDGE_KEY"] in str(Judge.asked[0])
    assert next(PLAYED) > 4, "the workflow has refused a rollout"
    secrets.assert_not_in(commands, "a command line")
    secrets.assert_not_in(done.stdout + done.stderr, "the terminal")
    [run_id] = [word for word in done.stdout.split() if word.startswith("mine-")][:1]
    exported = project.run("export", run_id, "--weights", "-o", str(project.folder / "exported"), **secrets.env)
    assert exported.returncode == 0, exported.stderr
    secrets.assert_not_in(exported.stdout + exported.stderr, "the terminal")
    assert_topics_hold_none(secrets)
    assert_tables_hold_none(secrets, next(project.workspace.rglob("*.duckdb")))
    assert_export_holds_none(secrets, project.folder / "exported")
    assert_files_hold_none(secrets, project.folder / "exported")
    assert_files_hold_none(secrets, project.workspace)
    verified = project.run("replay", run_id, "--verify", "--train", "--trust", **secrets.env)
    assert verified.returncode == 0, verified.stderr
    secrets.assert_not_in(verified.stdout + verified.stderr, "what replay prints")
    assert (project.folder / "output").is_dir()
    assert_files_hold_none(secrets, project.folder / "output")
    assert_errors_hold_none(secrets)


def assert_errors_hold_none(secrets: Secrets) -> None:
    """Errors name variables, not their values."""
    project = secrets.project
    for change, reported in (
        (("trainer_adapters.learner.model.path", "${TEST_MODEL}/nowhere"), "model.path"),
        (("trainer_adapters.learner.artifact_uri", "nothing-${TEST_KEY}://x"), "${TEST_KEY}"),
        (("eval.evaluators.judged.base_url", "${TEST_KEY}"), "base_url"),
        (("finetuning.run_configuration.endpoint", "${TEST_KEY}"), "endpoint"),
        (("trajectory_builders.rollouts.kafka.password", "${TEST_KEY}"), "wrong username or password"),
        (("eval.general.dataset.file_path", "${TEST_DATA}/nowhere.jsonl"), "nowhere.jsonl"),
        (("trainers.trainer._type", "${TEST_KEY}"), "trainers.trainer._type"),
        (("trajectory_builders.rollouts.num_generations", "${TEST_KEY}"), "num_generations"),
    ):
        refused = project.run(
            "finetune", "--config_file", str(project.folder / "run.yaml"), "-o", *change, **secrets.env
        )
        assert refused.returncode == 1, (change, refused.stderr)
        assert reported in refused.stderr, refused.stderr
        secrets.assert_not_in(refused.stdout + refused.stderr, f"the error of {change}")
