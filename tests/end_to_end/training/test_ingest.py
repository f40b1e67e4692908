"""Recorded steps of a file, from the command line to trained weights: imitated, then reinforced."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.rigs import nat_samples as nat

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

NUM_EXAMPLES = 4


def steps_of(model: Path, uuid: str, question: str, answer: str, *, ids: bool) -> list[Any]:
    """A workflow run as NAT writes it, with the ids of the tiny model's tokens or as text alone."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompt = nat.messages(question)
    found: dict[str, Any] = {"content": []}
    if ids:
        rendered = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        completion = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        found["content"] = [{"token": f"token_id:{number}", "logprob": -2.0} for number in completion]
        found["prompt_token_ids"] = tokenizer.encode(rendered, add_special_tokens=False)
    call = nat.langchain(f"{uuid}-call", prompt, answer, reported=found, parent=f"{uuid}-f")
    return nat.workflow(call, question=question, answer=answer, uuid=uuid, run_id=uuid)


def write(path: Path, *rows: Any) -> Path:
    """JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def configuration(project: Any, algorithm: str, *, num_epochs: int, **builder: Any) -> str:
    """A configuration of recorded rollouts, as a file."""
    written = project.configuration(num_epochs=num_epochs, environment="recorded", **builder)
    del written["workflow"]
    for key in ("num_generations", "max_turns", "drop_zero_variance"):
        del written["trajectory_builders"]["rollouts"][key]
    written["trainer_adapters"]["learner"]["algorithm"] = {"name": algorithm}
    return str(project.write(written, f"{algorithm}.yaml"))


def test_bare_steps_without_ids_are_retokenised_and_imitated_and_bad_lines_are_dead_letters(project: Any) -> None:
    runs = [steps_of(project.model, f"w{n}", f"{n}+1=", str(n + 1), ids=False) for n in range(NUM_EXAMPLES)]
    file = write(project.folder / "bare.jsonl", *(step for steps in runs for step in steps), {"neither": 1}, ["nor"])
    config = configuration(project, "sft", num_epochs=4, environment_config={"retokenise": True})
    done = project.run("ingest", str(file), "--config_file", config, "--run_id", "imitated")
    assert done.returncode == 0, done.stdout + done.stderr + project.logs()
    assert f"{NUM_EXAMPLES} rollouts of {NUM_EXAMPLES} examples" in done.stdout
    assert "2 bad lines" in done.stdout
    losses = project.rows(
        "SELECT metrics['loss/total'] AS loss FROM training_steps WHERE run_id = 'imitated' ORDER BY version"
    )
    assert len(losses) == 4
    assert losses[-1]["loss"] < losses[0]["loss"]
    letters = project.run("dlq", "list").stdout
    assert letters.count("bare.jsonl line") == 2


def test_whole_rollouts_are_reinforced_and_a_broken_one_and_one_without_ids_have_their_outcome(project: Any) -> None:
    rows: list[Any] = []
    for n in range(NUM_EXAMPLES):
        for member, reward in enumerate((1.0, 0.0, 0.5)):
            uuid = f"r{n}-{member}"
            steps = steps_of(project.model, uuid, f"{n}+1=", str(n + 1 + member), ids=(n, member) != (1, 2))
            rows.append({"rollout_id": uuid, "example_id": f"x{n}", "steps": steps, "reward": reward})
    rows.pop()  # the last example has one rollout fewer
    rows[0] = {"rollout_id": "r0-0", "example_id": "x0", "error": "its agent raised KeyError"}
    config = configuration(project, "grpo", num_epochs=2)
    file = write(project.folder / "whole.jsonl", *rows)
    done = project.run("ingest", str(file), "--config_file", config, "--run_id", "reinforced")
    assert done.returncode == 0, done.stdout + done.stderr + project.logs()
    outcomes = project.rows(
        "SELECT outcome, cause, count(*) AS n FROM outcomes WHERE run_id = 'reinforced' GROUP BY ALL ORDER BY ALL"
    )
    counted = {(row["outcome"], row["cause"]): row["n"] for row in outcomes}
    assert counted == {
        ("trained", None): 2 * (3 * NUM_EXAMPLES - 3),
        ("rejected", "no_token_ids"): 2,
        ("failed", "environment_error"): 2,
    }
    by_partition = project.rows(
        "SELECT count(DISTINCT weights_sha256) AS n FROM weight_versions WHERE run_id = 'reinforced'"
    )
    assert by_partition[0]["n"] == 3
    replayed = project.run("replay", "reinforced", "--verify", "--train")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
