"""The command line as a user meets it: as a process of its own."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest

from rollstream.harness.config import file as config_file
from rollstream.harness.config.file import read_yaml
from rollstream.harness.runs import preflight
from rollstream.harness.services.workspace import Workspace
from rollstream.metrics.projection.database import Database

pytestmark = pytest.mark.slow
CLI = [sys.executable, "-m", "rollstream.harness.cli.main"]
COMMANDS = ["finetune", "serve", "health", "stop", "status", "runs", "jobs", "sql", "plot", "dlq", "gc"]


def rollstream(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("ROLLSTREAM_")}
    return subprocess.run([*CLI, *arguments], capture_output=True, text=True, timeout=60, env={**env, **environment})


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.count("error: ") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    for word in words:
        assert word in done.stderr


def test_help_names_every_command() -> None:
    done = rollstream("--help")
    for command in COMMANDS:
        assert command in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    done = rollstream(command, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Usage:")


def test_gc_waits_for_what_holds_the_workspace(tmp_path: Path) -> None:
    layout = Workspace(tmp_path / "w")
    layout.create()
    with layout.in_use("finetune mine"):
        assert_refused(rollstream("gc", "-w", str(layout.folder)), str(layout.folder), "in use by finetune mine")


@pytest.mark.parametrize("command", [["jobs"], ["jobs", "run-1"], ["gc"], ["gc", "--dry-run"]])
def test_a_workspace_without_runs_has_neither_jobs_nor_unneeded_files(command: list[str], tmp_path: Path) -> None:
    assert_refused(rollstream(*command, "-w", str(tmp_path / "w")), "has no runs yet")
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize("text", ["", "[]", "null", "{}"])
def test_a_damaged_note_of_the_broker_leaves_the_workspaces_own(text: str, tmp_path: Path) -> None:
    (tmp_path / "workspace.json").write_text(text)
    assert Workspace(tmp_path).remembered_broker() == "embedded"


def test_an_unknown_command_is_refused() -> None:
    done = rollstream("finetun")
    assert done.returncode == 2
    assert "finetun" in done.stderr


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    done = rollstream("finetune", "--config_file", str(tmp_path / "none.yaml"), "-w", str(tmp_path / "w"))
    assert_refused(done, "none.yaml")


@pytest.mark.parametrize("command", [["sql", "SELECT 1", "--output"], ["tiny-model"]])
def test_a_place_that_cannot_be_written_is_named_with_the_remedy(command: list[str], tmp_path: Path) -> None:
    Database(tmp_path / "metrics.duckdb").close()
    (tmp_path / "file").write_text("")
    done = rollstream(*command, str(tmp_path / "file" / "made"), ROLLSTREAM_WORKSPACE=str(tmp_path))
    assert_refused(done, f"{tmp_path}/file", "correct the path or its permissions")
    assert "Errno" not in done.stderr


def test_a_log_level_that_there_is_not_is_named() -> None:
    assert_refused(rollstream("serve", "metrics", ROLLSTREAM_LOG_LEVEL="loud"), "ROLLSTREAM_LOG_LEVEL=LOUD", "DEBUG")


def test_a_traceback_is_shown_only_when_it_is_asked_for(tmp_path: Path) -> None:
    done = rollstream("--debug", "finetune", "--config_file", str(tmp_path / "none.yaml"), "-w", str(tmp_path / "w"))
    assert done.returncode != 0
    assert "Traceback" in done.stderr


Write = Callable[[dict[str, Any]], Path]


def finetune(tmp_path: Path, config: Path, *more: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return rollstream("finetune", "--config_file", str(config), "-w", str(tmp_path / "w"), *more, **environment)


def test_an_unknown_key_is_named_with_the_nearest_known(tmp_path: Path, written: dict[str, Any], write: Write) -> None:
    written["trainer_adapters"]["a"]["max_stalenes"] = 1
    assert_refused(finetune(tmp_path, write(written)), "trainer_adapters.a.max_stalenes", "did you mean max_staleness?")


def test_a_mistyped_override_is_named(tmp_path: Path, written: dict[str, Any], write: Write) -> None:
    done = finetune(tmp_path, write(written), "-o", "finetuning.num_epochs", "many")
    assert_refused(done, "finetuning.num_epochs", "many")


def test_a_missing_model_folder_is_named(tmp_path: Path, written: dict[str, Any], write: Write) -> None:
    written["trainer_adapters"]["a"]["model"]["path"] = str(tmp_path / "nowhere")
    assert_refused(finetune(tmp_path, write(written)), "nowhere", "model.path")


def test_a_folder_without_a_model_is_named(tmp_path: Path, written: dict[str, Any], write: Write) -> None:
    (tmp_path / "empty").mkdir()
    written["trainer_adapters"]["a"]["model"]["path"] = str(tmp_path / "empty")
    assert_refused(finetune(tmp_path, write(written)), "empty", "config.json")


def test_an_unreachable_broker_is_named(tmp_path: Path, written: dict[str, Any], write: Write) -> None:
    written["trajectory_builders"]["b"]["bootstrap_servers"] = "127.0.0.1:9"
    done = finetune(tmp_path, write(written))
    assert_refused(done, "127.0.0.1:9")


def test_a_workspace_that_cannot_be_made_is_named(tmp_path: Path, written: dict[str, Any], write: Write) -> None:
    (tmp_path / "w").write_text("a file")
    assert_refused(finetune(tmp_path, write(written)), str(tmp_path / "w"))


def test_an_output_folder_that_cannot_be_made_is_named(tmp_path: Path, written: dict[str, Any], write: Write) -> None:
    (tmp_path / "file").write_text("")
    written["finetuning"]["output_dir"] = str(tmp_path / "file" / "output")
    assert_refused(finetune(tmp_path, write(written)), "finetuning.output_dir")


def test_an_unknown_environment_is_named(tmp_path: Path, written: dict[str, Any], write: Write) -> None:
    written["workflow"] = "guess_nummer"
    assert_refused(finetune(tmp_path, write(written)), "guess_nummer", "did you mean guess_number?")


def test_an_environment_that_refuses_its_configuration_is_named(
    tmp_path: Path, written: dict[str, Any], write: Write
) -> None:
    written["trajectory_builders"]["b"]["environment_config"] = {"low": 5, "high": 4}
    assert_refused(finetune(tmp_path, write(written)), "environment_config", "low (5)")


def test_an_unknown_reward_is_named(tmp_path: Path, written: dict[str, Any], write: Write) -> None:
    written["finetuning"]["reward_function"] = {"name": "judge"}
    assert_refused(finetune(tmp_path, write(written)), "judge")


def test_a_module_that_cannot_be_imported_is_named(tmp_path: Path, written: dict[str, Any], write: Write) -> None:
    written["trajectory_builders"]["b"]["modules"] = ["no_such_module"]
    assert_refused(finetune(tmp_path, write(written)), "no_such_module")


@pytest.mark.parametrize(
    "code", ["def x(:", "raise RuntimeError('boom')", "raise KeyError('boom')", "raise SystemExit('boom')"]
)
@pytest.mark.parametrize("location", ["modules", "workflow", "reward"])
def test_a_module_that_raises_when_it_is_imported_is_named(
    tmp_path: Path, written: dict[str, Any], write: Write, code: str, location: str
) -> None:
    (tmp_path / "broken.py").write_text(code)
    if location == "modules":
        written["trajectory_builders"]["b"]["modules"] = ["broken"]
    elif location == "workflow":
        written["workflow"] = "python:broken.x"
    else:
        written["finetuning"]["reward_function"] = {"name": "python:broken.x"}
    done = finetune(tmp_path, write(written), PYTHONPATH=str(tmp_path))
    assert_refused(done, "broken", "SyntaxError" if code.startswith("def") else "boom")


OWN_ENVIRONMENT = """
from rollstream.producers.rollout.environment import Environment


class Own(Environment):
    def __init__(self, fails: str, key: str = "") -> None:
        self.fails, self.key = fails, key
        if fails == "init":
            raise KeyError(f"no such key: {key}")

    def examples(self, num, seed):
        raise LookupError(f"no examples for {self.key}")

    async def run(self, session):
        pass
"""


def test_an_environment_that_raises_before_the_run_is_named_without_its_secrets(
    tmp_path: Path, written: dict[str, Any], write: Write
) -> None:
    (tmp_path / "own.py").write_text(OWN_ENVIRONMENT)
    written["workflow"] = "python:own.Own"
    written["trajectory_builders"]["b"]["environment_config"] = {"fails": "init", "key": "${SECRET}"}
    done = finetune(tmp_path, write(written), PYTHONPATH=str(tmp_path), SECRET="s3cr3t")
    assert_refused(done, "python:own.Own", "KeyError (own.py line 9, in __init__)", "${SECRET}")
    (log,) = tmp_path.rglob("finetune.log")
    logged = log.read_text()
    assert "Traceback" in logged
    assert "in __init__\n    raise KeyError" in logged
    assert "s3cr3t" not in done.stdout + done.stderr + logged


def test_modules_of_the_folder_that_a_command_is_started_in_are_found(
    tmp_path: Path, written: dict[str, Any], write: Write
) -> None:
    (tmp_path / "own.py").write_text(OWN_ENVIRONMENT)
    written["workflow"] = "python:own.Own"
    written["trajectory_builders"]["b"]["environment_config"] = {"fails": "init"}
    script = Path(sys.executable).with_name("rollstream")
    command = [script, "finetune", "--config_file", str(write(written)), "-w", str(tmp_path / "w")]
    assert_refused(subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path), "no such key")


@pytest.mark.kafka
def test_an_environment_that_cannot_make_examples_is_named(
    tmp_path: Path, written: dict[str, Any], write: Write
) -> None:
    (tmp_path / "own.py").write_text(OWN_ENVIRONMENT)
    written["workflow"] = "python:own.Own"
    written["trajectory_builders"]["b"]["environment_config"] = {"fails": "examples"}
    assert_refused(finetune(tmp_path, write(written), PYTHONPATH=str(tmp_path)), "python:own.Own", "LookupError")


@pytest.mark.parametrize("text", ["{{model}}: x", "? [a]\n: 1", "a: &a [*a]", "1: x", "a: !!binary aGk="])
def test_yaml_that_is_not_a_plain_mapping_is_refused_by_its_file_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    assert_refused(finetune(tmp_path, tmp_path / "run.yaml"), "run.yaml")


def test_output_of_libraries_is_only_in_the_log_file_and_escaped(
    tmp_path: Path, written: dict[str, Any], write: Write
) -> None:
    code = (
        "import logging, warnings\nwarnings.warn('old')\n"
        "logging.getLogger('l').error('odd %s', '\\x1b]0;title\\x07', exc_info=ValueError('\\x1b[2J'))"
    )
    (tmp_path / "noisy.py").write_text(code)
    written["trajectory_builders"]["b"]["modules"] = ["noisy"]
    written["finetuning"]["reward_function"] = {"name": "judge"}
    assert_refused(finetune(tmp_path, write(written), PYTHONPATH=str(tmp_path)), "judge")
    log = (tmp_path / "w" / "logs" / "finetune.log").read_text()
    assert "old" in log
    assert "odd \\x1b]0;title\\x07\nValueError: \\x1b[2J\n" in log
    assert "\x1b" not in log
    assert "\x07" not in log


def test_a_date_is_text(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("version: 2024-02-01")
    assert read_yaml(tmp_path / "run.yaml") == {"version": "2024-02-01"}


def test_a_result_file_that_cannot_be_written_is_named_before_the_run(
    tmp_path: Path, written: dict[str, Any], write: Write
) -> None:
    done = finetune(tmp_path, write(written), "--result_json_path", str(tmp_path / "none" / "result.json"))
    assert_refused(done, "--result_json_path", str(tmp_path / "none" / "result.json"))
    assert done.stdout == ""


@pytest.mark.parametrize("key", ["api_key", "password", "AUTH_TOKEN", "client_secret"])
def test_a_secret_written_into_the_file_is_refused(
    tmp_path: Path, written: dict[str, Any], write: Write, key: str
) -> None:
    written["llms"] = {"judge": {"_type": "openai", key: "s3cr3t"}}
    done = finetune(tmp_path, write(written))
    assert_refused(done, f"llms.judge.{key}", "${")
    assert "s3cr3t" not in done.stdout + done.stderr


def test_metrics_in_use_by_another_process_are_named_before_the_run(
    tmp_path: Path, written: dict[str, Any], write: Write
) -> None:
    (tmp_path / "w").mkdir()
    with duckdb.connect(str(tmp_path / "w" / "metrics.duckdb")):
        done = finetune(tmp_path, write(written))
    assert_refused(done, "metrics.duckdb", "in use by another process")
    assert done.stdout == ""


def test_a_query_that_is_soon_done_keeps_no_run_from_its_metrics(written: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "metrics.duckdb"
    duckdb.connect(str(path)).close()
    query = [sys.executable, "-c", f"import duckdb; c = duckdb.connect({str(path)!r}); print(flush=True); input()"]
    with subprocess.Popen(
        query, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        child.stdout.readline()
        threading.Timer(0.3, child.stdin.close).start()
        preflight.check_metrics(config_file.resolve(written).config, tmp_path)
        assert child.wait() != 0


def test_an_unset_variable_is_named(tmp_path: Path, written: dict[str, Any], write: Write) -> None:
    written["trainer_adapters"]["a"]["artifact_uri"] = "${NOWHERE}/artifacts"
    assert_refused(finetune(tmp_path, write(written)), "trainer_adapters.a.artifact_uri", "NOWHERE")


def test_a_secret_is_not_shown_in_an_error(tmp_path: Path, written: dict[str, Any], write: Write) -> None:
    written["trainer_adapters"]["a"]["tasks_per_epoch"] = "${SECRET}"
    done = finetune(tmp_path, write(written), SECRET="s3cr3t")
    assert_refused(done, "${SECRET}")
    assert "s3cr3t" not in done.stderr + done.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--endpoint", "localhost"), ("finetuning.run_configuration.endpoint", "is not a URL")),
        (("--dataset", "none.json"), ("dataset none.json", "cannot be read", "--dataset")),
        (("--validation_dataset", "none.csv", "--validation_interval", "2"), ("dataset none.csv", "cannot be read")),
        (("--validation_config_file", "none.yaml"), ("validation_config_file", "none.yaml", "cannot be read")),
        (("-o", "trainers.tt.planning", "stream"), ("--override trainers.tt.planning", "trainers.tt is not defined")),
        (("-o", "trainers.t._type", "my_trainer"), ("trainers.t._type", "'my_trainer' is not known", "known types")),
    ],
)
def test_an_option_that_does_not_fit_is_named_before_the_run(
    tmp_path: Path, written: dict[str, Any], write: Write, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    done = finetune(tmp_path, write(written), *options)
    assert_refused(done, *words)
    assert done.stdout == ""


@pytest.mark.parametrize("option", ["--validation_interval", "--endpoint_timeout"])
def test_an_option_out_of_its_range_is_named(
    tmp_path: Path, written: dict[str, Any], write: Write, option: str
) -> None:
    done = finetune(tmp_path, write(written), option, "0")
    assert done.returncode == 2
    assert option in done.stderr


@pytest.mark.parametrize("command", [["runs"], ["status"], ["stop", "run-1"]])
def test_a_workspace_without_runs_is_named_in_the_error(tmp_path: Path, command: list[str]) -> None:
    assert_refused(rollstream(*command, "-w", str(tmp_path / "w")), str(tmp_path / "w"))


def test_a_hidden_size_that_no_tiny_model_can_have_is_refused(tmp_path: Path) -> None:
    assert_refused(rollstream("tiny-model", str(tmp_path / "tiny"), "--hidden-size", "12"), "12 is not a multiple of 8")


@pytest.mark.parametrize("command", ["finetune", "serve", "tiny-model"])
def test_a_missing_extra_is_named_with_the_remedy(
    tmp_path: Path, written: dict[str, Any], write: Write, command: str
) -> None:
    without = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; "
    run = "from rollstream.harness.cli.main import main; main()"
    arguments = {
        "finetune": ["--config_file", str(write(written)), "-w", str(tmp_path / "w")],
        "serve": ["learner"],
        "tiny-model": [str(tmp_path / "tiny")],
    }[command]
    env = {**os.environ, "ROLLSTREAM_BOOTSTRAP_SERVERS": "127.0.0.1:1"}
    done = subprocess.run(
        [sys.executable, "-c", without + run, command, *arguments], capture_output=True, text=True, env=env
    )
    assert_refused(done, "is not installed", "pip install '.[learner]'")


def test_parquet_needs_a_file(tmp_path: Path) -> None:
    assert_refused(rollstream("sql", "SELECT 1", "--format", "parquet", "-w", str(tmp_path)), "--output")


def test_a_service_without_an_address_names_the_variable(tmp_path: Path) -> None:
    done = rollstream("serve", "processors", ROLLSTREAM_WORKSPACE=str(tmp_path))
    assert_refused(done, "ROLLSTREAM_BOOTSTRAP_SERVERS")


def test_settings_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    assert_refused(rollstream("serve", "metrics", "--settings", str(tmp_path / "none.json")), "none.json")


def test_a_service_that_gave_no_sign_is_not_healthy(tmp_path: Path) -> None:
    done = rollstream("health", "producers-1", "-w", str(tmp_path))
    assert done.returncode == 1
    assert "producers-1" in done.stderr
