"""A run learns from a teacher whose folder is then removed: it is verified, trained again and asked what-ifs."""

import dataclasses
import json
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rollstream.learner.tiny_model import make_tiny_model
from tests.rigs.services.vllm_server import VllmServer

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(400)]
HASHES = "SELECT weights_sha256 FROM training_steps WHERE run_id = '{}' ORDER BY version"


def test_a_run_with_a_teacher_is_replayed_without_it(project: Any) -> None:
    teacher = make_tiny_model(project.folder / "teacher", seed=9, hidden_size=32)
    configuration = project.configuration(num_epochs=2)
    learner = configuration["trainer_adapters"]["learner"]
    learner["algorithm"] = {"name": "opd", "teacher": str(teacher)}
    command = ("finetune", "--config_file", str(project.write(configuration)), "--run_id", "taught")
    done = project.run(*command)
    assert done.returncode == 0, done.stdout + done.stderr + project.logs()
    shutil.rmtree(teacher)
    replayed = project.run("replay", "taught", "--verify", "--train")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "32 scores" in replayed.stdout, replayed.stdout
    recorded = hashes(project, "taught")
    assert len(set(recorded)) == 2
    assert hashes(project, what_if(project, {})) == recorded
    slower = what_if(project, {"trainer_adapters": {"learner": {"optimizer": {"learning_rate": 1e-4}}}})
    assert not set(hashes(project, slower)) & set(recorded)
    again = project.run("replay", slower, "--verify", "--train")
    assert again.returncode == 0, again.stdout + again.stderr
    assert_an_export_is_enough(project, recorded)


def assert_an_export_is_enough(project: Any, recorded: list[str]) -> None:
    """An export is enough to train again, and for a what-if in a workspace that knows nothing of the run."""
    exported = project.run("export", "taught", "--output", "kept", "--weights")
    assert exported.returncode == 0, exported.stderr
    kept = str(project.folder / "kept")
    replayed = project.run("replay", "taught", "--verify", "--train", "--export", kept)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    other = dataclasses.replace(project, folder=project.folder / "other")
    other.folder.mkdir()
    assert hashes(other, what_if(other, {}, "--export", kept)) == recorded


def what_if(project: Any, changes: dict[str, Any], *options: str) -> str:
    """The run that comes of it."""
    file = project.write(changes, "what_if.yaml")
    done = project.run("replay", "taught", "--what-if", str(file), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"\S+-what-if-\S+?(?=[\s:,])", done.stdout + " ")[0]


def hashes(project: Any, run_id: str) -> list[str]:
    """Hashes of a run's versions."""
    asked = project.run("sql", HASHES.format(run_id), "--format", "json")
    assert asked.returncode == 0, asked.stderr
    return [row["weights_sha256"] for row in json.loads(asked.stdout)]


def test_a_run_distils_itself_with_a_context_from_its_examples(project: Any) -> None:
    configuration = project.configuration(num_epochs=1)
    configuration["trainer_adapters"]["learner"]["algorithm"] = {"name": "opsd", "context": "It is {a} {op} {b}."}
    configuration["workflow"] = "arithmetic"
    assert_a_context_that_names_no_input_is_refused(project, configuration)
    command = ("finetune", "--config_file", str(project.write(configuration)), "--run_id", "itself")
    done = project.run(*command)
    assert done.returncode == 0, done.stdout + done.stderr + project.logs()
    replayed = project.run("replay", "itself", "--verify", "--train")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "16 scores" in replayed.stdout, replayed.stdout


def assert_a_context_that_names_no_input_is_refused(project: Any, configuration: dict[str, Any]) -> None:
    """Before anything starts, and with the keys that there are."""
    learner = {**configuration["trainer_adapters"]["learner"], "algorithm": {"name": "opsd", "context": "{answer}"}}
    mistaken = {**configuration, "trainer_adapters": {"learner": learner}}
    refused = project.run("finetune", "--config_file", str(project.write(mistaken)))
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1), refused.stderr
    assert "trainer_adapters.learner.algorithm.context: example " in refused.stderr
    assert "has no key 'answer'; its keys are: a, b, op" in refused.stderr


def test_a_teacher_of_another_vocabulary_is_named_before_anything_starts(project: Any) -> None:
    teacher = make_tiny_model(project.folder / "teacher", seed=9, hidden_size=32)
    path = teacher / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"7"', '"\N{ROMAN NUMERAL SEVEN}"'), encoding="utf-8")
    configuration = project.configuration(num_epochs=1)
    configuration["trainer_adapters"]["learner"]["algorithm"] = {"name": "opd", "teacher": str(teacher)}
    refused = project.run("finetune", "--config_file", str(project.write(configuration)))
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1, refused.stderr
    assert "trainer_adapters.learner.algorithm.teacher: " in refused.stderr
    assert "has another vocabulary than model" in refused.stderr
    assert "give a teacher of the same model family" in refused.stderr


class ChatOnly(BaseHTTPRequestHandler):
    """A server that lists its model and answers in text, and scores no prompts."""

    root = ""

    def do_GET(self) -> None:
        self.answer({"data": [{"id": "wise", "root": self.root}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({"choices": [{"text": "yes", "logprobs": None}]})

    def answer(self, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def test_a_teachers_server_that_scores_no_prompts_is_named_before_anything_starts(project: Any) -> None:
    teacher = make_tiny_model(project.folder / "teacher", seed=9, hidden_size=32)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Named", (ChatOnly,), {"root": str(teacher)}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    configuration = project.configuration(num_epochs=1)
    algorithm = {"name": "opd", "teacher": str(teacher), "teacher_url": url}
    configuration["trainer_adapters"]["learner"]["algorithm"] = algorithm
    try:
        refused = project.run("finetune", "--config_file", str(project.write(configuration)))
    finally:
        server.shutdown()
        server.server_close()
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1), refused.stderr
    wanted = f"trainer_adapters.learner.algorithm.teacher_url: teacher {url} gave no log-probabilities of the prompt"
    assert wanted in refused.stderr
    assert "set algorithm.teacher_url to a vLLM server" in refused.stderr


@pytest.mark.vllm
def test_a_run_learns_from_a_teacher_on_a_vllm_server_and_is_replayed_without_it(
    project: Any, vllm_server: VllmServer
) -> None:
    vllm_server.restore()
    configuration = project.configuration(num_epochs=2)
    algorithm = {"name": "opd", "teacher": str(vllm_server.base), "teacher_url": vllm_server.url}
    configuration["trainer_adapters"]["learner"]["algorithm"] = algorithm
    done = project.run("finetune", "--config_file", str(project.write(configuration)), "--run_id", "taught")
    assert done.returncode == 0, done.stdout + done.stderr + project.logs()
    replayed = project.run("replay", "taught", "--verify", "--train")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "32 scores" in replayed.stdout, replayed.stdout
    assert len(set(hashes(project, "taught"))) == 2
