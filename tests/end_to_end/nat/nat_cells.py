"""Real runs of `nat finetune`: mixes of components, what goes wrong with each, and what each run comes to."""

import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = Path(__file__).with_name("nat_example.py")
NAT = str(Path(sys.executable).with_name("nat"))
ENVIRONMENT = {
    **os.environ,
    "NAT_TELEMETRY_ENABLED": "false",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
DATASET = [{"id": f"x{number}", "question": sign, "answer": "1"} for number, sign in enumerate("?!")]
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def configuration_of(project: Any) -> dict[str, Any]:
    configuration = project.configuration(num_epochs=2)
    del configuration["workflow"]
    configuration["finetuning"]["enabled"] = True
    configuration["trajectory_builders"]["rollouts"]["workspace"] = str(project.workspace)
    configuration["trainer_adapters"]["learner"] |= {"workspace": str(project.workspace), "tasks_per_epoch": 2}
    return configuration


def with_nats_builder(project: Any) -> dict[str, Any]:
    configuration = configuration_of(project)
    port = free_port()
    configuration["trajectory_builders"] = {"rollouts": {"_type": "nat_example_builder", "num_generations": 3}}
    configuration["trainer_adapters"]["learner"]["endpoint"] = {"port": port, "engine": {"threads": 1}}
    configuration["llms"] = {
        "policy": {
            "_type": "openai",
            "base_url": f"http://127.0.0.1:{port}/v1",
            "api_key": "none",
            "model_name": "policy",
            "max_tokens": 4,
            "logprobs": True,
        }
    }
    configuration["workflow"] = {"_type": "nat_example_digits", "llm_name": "policy"}
    configuration["eval"] = {
        "general": {"output_dir": str(project.folder / "eval"), "dataset": {"_type": "json", "file_path": "none"}},
        "evaluators": {"share": {"_type": "nat_example_share"}},
    }
    configuration["finetuning"]["reward_function"] = {"name": "share"}
    return configuration


def nat_finetune(
    project: Any, configuration: dict[str, Any], *options: str, art: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    packages = project.folder / "packages"
    metadata = packages / "nat_example-1.0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    shutil.copy(PACKAGE, packages)
    path = [str(packages)]
    entry_points = ["nat_example = nat_example"]
    if art is not None:
        shutil.copy(PACKAGE.with_name("nat_art.py"), packages)
        path.append(str(art))
        entry_points.append("nat_art = nat_art")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: nat-example\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("\n".join(["[nat.components]", *entry_points, ""]))
    return subprocess.run(
        [NAT, "finetune", "--config_file", str(project.write(configuration)), *options],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=project.folder,
        env={**ENVIRONMENT, "PYTHONPATH": ":".join(path)},
    )


def dataset_of(project: Any) -> str:
    return write_json(project, "dataset.json", DATASET)


def write_json(project: Any, name: str, value: Any) -> str:
    path = project.folder / name
    path.write_text(json.dumps(value))
    return str(path)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ---- mixes: a configuration for a project ----


def all_ours(project: Any) -> dict[str, Any]:
    configuration = configuration_of(project)
    configuration["workflow"] = {"_type": "rollstream", "environment": "python:game.digits"}
    configuration["trainers"]["trainer"]["planning"] = "submitted"
    return configuration


def another_trainer(project: Any) -> dict[str, Any]:
    configuration = all_ours(project)
    configuration["trainers"]["trainer"] = {"_type": "nat_example_trainer"}
    return configuration


def another_trainer_and_builder(project: Any) -> dict[str, Any]:
    configuration = with_nats_builder(project)
    configuration["trainers"]["trainer"] = {"_type": "nat_example_trainer"}
    return configuration


def arts_trainer_and_builder(project: Any) -> dict[str, Any]:
    configuration = with_nats_builder(project)
    configuration["trainers"]["trainer"] = {"_type": "openpipe_art_trainer"}
    configuration["trajectory_builders"]["rollouts"]["_type"] = "openpipe_art_traj_builder"
    return configuration


MIXES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "all three ours": all_ours,
    "another's trainer": another_trainer,
    "another's builder": with_nats_builder,
    "another's trainer and builder": another_trainer_and_builder,
    "ART's trainer and builder": arts_trainer_and_builder,
}
"""The adapter is ours in all of them."""


# ---- faults: what is changed in a configuration; None: the mix does not have it ----

Faulty = dict[str, Any] | None


def failing_evaluator(configuration: dict[str, Any], project: Any) -> Faulty:
    """Let the evaluator of every rollout fail."""
    if "llms" in configuration:
        configuration["eval"]["evaluators"]["share"]["fails"] = True
        return configuration
    with (project.folder / "game.py").open("a") as file:
        file.write('\n\ndef broken(rollout):\n    raise RuntimeError("the evaluator fails")\n')
    configuration["eval"] = {"evaluators": {"broken": {"_type": "python", "function": "game.broken"}}}
    configuration["finetuning"]["reward_function"] = {"name": "broken"}
    return configuration


def dead_llm(configuration: dict[str, Any], project: Any) -> Faulty:
    """Point the LLM at an address at which nothing listens."""
    return at_address(configuration, f"http://127.0.0.1:{free_port()}/v1")


def at_address(configuration: dict[str, Any], url: str) -> Faulty:
    if "llms" not in configuration:
        return None
    configuration["llms"]["policy"] |= {"base_url": url, "max_retries": 0}
    return configuration


def failing_job(configuration: dict[str, Any], project: Any) -> Faulty:
    """Its first step has a loss that is not a number."""
    learner = configuration["trainer_adapters"]["learner"]
    learner["algorithm"] = {"name": "grpo", "kl_coefficient": 1e39}
    learner["optimizer"] = {"max_skipped_steps": 0}
    return configuration


def empty_last_epoch(configuration: dict[str, Any], project: Any) -> Faulty:
    """Nothing is submitted for it."""
    trainer = configuration["trainers"]["trainer"]
    if trainer["_type"] != "nat_example_trainer":
        return None
    trainer["empty_from"] = 1
    return configuration


def misspelt(*path: str) -> Callable[[dict[str, Any], Any], Faulty]:
    """A key that nobody knows, at a place of the file."""

    def change(configuration: dict[str, Any], project: Any) -> Faulty:
        block = configuration
        for key in path:
            block = block.setdefault(key, {})
        block["lerning_rate"] = 1
        return configuration

    return change


FAULTS: dict[str, Callable[[dict[str, Any], Any], Faulty]] = {
    "nothing": lambda configuration, project: configuration,
    "a failing evaluator": failing_evaluator,
    "a dead LLM": dead_llm,
    "an LLM elsewhere": dead_llm,  # replaced by `run_cell`, which has a server for it
    "a failing job": failing_job,
    "an empty last epoch": empty_last_epoch,
    "a misspelt key of the file": misspelt(),
    "... of the trainer": misspelt("trainers", "trainer"),
    "... of the builder": misspelt("trajectory_builders", "rollouts"),
    "... of the adapter": misspelt("trainer_adapters", "learner"),
    "... of finetuning": misspelt("finetuning"),
    "... of curriculum_learning": misspelt("finetuning", "curriculum_learning"),
}


class Cell(NamedTuple):
    """Result of one run."""

    status: int
    last_line: str
    state: str
    """State of the run on the log; `not begun` if it has none."""
    versions: int
    """Those that were trained."""
    has_model: bool
    output: str

    @property
    def disagreements(self) -> list[str]:
        """Differences between exit status, last line, log and folder."""
        found: list[str] = []
        is_well = self.state in ("completed", "stopped")
        if (self.status == 0) != is_well:
            found.append(f"status {self.status}, but the run is {self.state}")
        if self.has_model != (is_well and self.versions > 0):
            found.append(f"{'a' if self.has_model else 'no'} model, after {self.versions} versions and {self.state}")
        if self.status != 0 and not self.last_line.startswith("Error: "):
            found.append("the last line is not an error")
        return found


def run_cell(project: Any, mix: str, fault: str, art: Path | None = None) -> Cell | None:
    """One run; None if the mix does not have what goes wrong, or ART's package is not given."""
    is_art = mix.startswith("ART")
    if is_art and art is None:
        return None
    with other_llm() as url:
        configuration: Faulty = MIXES[mix](project)
        elsewhere = fault == "an LLM elsewhere"
        configuration = at_address(configuration, url) if elsewhere else FAULTS[fault](configuration, project)
        if configuration is None:
            return None
        options = ("--dataset", dataset_of(project)) if "llms" in configuration else ()
        done = nat_finetune(project, configuration, *options, art=art if is_art else None)
    output = ANSI.sub("", done.stdout + done.stderr)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    is_begun = (project.workspace / "broker").exists()
    runs = project.rows("SELECT state FROM runs") if is_begun else []
    versions = project.rows("SELECT count(*) AS n FROM weight_versions WHERE version > 0") if is_begun else [{"n": 0}]
    return Cell(
        done.returncode,
        lines[-1] if lines else "",
        runs[0]["state"] if runs else "not begun",
        versions[0]["n"],
        (project.folder / "output" / "model.safetensors").exists(),
        output,
    )


class _OtherModel(BaseHTTPRequestHandler):
    """A chat completion as other servers give them: with log-probabilities, and without token ids."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        text = random.choice("0123456789abc")
        token = {"token": text, "logprob": -0.5, "bytes": list(text.encode()), "top_logprobs": []}
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop",
            "logprobs": {"content": [token], "refusal": None},
        }
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        head = {"id": "x", "object": "chat.completion", "created": 0, "model": "other"}
        body = json.dumps({**head, "choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on the terminal."""


@contextmanager
def other_llm() -> Iterator[str]:
    """The address of a model that is not the run's."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _OtherModel)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
