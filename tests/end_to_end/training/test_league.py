"""A league trains with past and scripted opponents; killed in between, it ends with the same matches and ratings."""

from typing import Any

import pytest

from tests.end_to_end.killing import kill_at

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(900)]

RUN_ID = "league-made-again"
EPOCHS = 7


def game(project: Any) -> dict[str, Any]:
    """Tic-tac-toe against itself, after a short warm start; the run is a function of this, its id and its seed."""
    configuration = project.configuration(
        num_epochs=EPOCHS,
        session_timeout_s=6,
        engine={"threads": 1, "deterministic": True},
        agents=["X", "O"],
        sampling={"max_new_tokens": 2},
        league={"pool": 3, "every": 2, "latest_ratio": 0.25, "scripted": ["perfect"], "max_loaded": 1},
    )
    configuration["trainer_adapters"]["learner"] |= {
        "warm_start": {"num_epochs": 3, "tasks_per_epoch": 4, "optimizer": {"learning_rate": "5e-3"}},
        "keep_last": 2,
        "keep_every": 1000,
    }
    return configuration | {"workflow": "tic_tac_toe_self_play"}


def results_of(project: Any) -> dict[str, list[dict[str, Any]]]:
    queries = {
        "versions": "SELECT version, weights_sha256 FROM weight_versions ORDER BY version",
        "ratings": "SELECT player, rating, num_matches FROM league_ratings",
        "payoffs": "SELECT * FROM payoff_matrix",
        "seats": "SELECT * FROM seat_results",
        "matches": "SELECT * EXCLUDE (closed_at) FROM matches ORDER BY ALL",
    }
    return {name: project.rows(query) for name, query in queries.items()}


def test_a_league_that_is_killed_has_the_ratings_of_one_that_is_not(two_projects: Any) -> None:
    calm, killed = two_projects
    config = calm.write(game(calm))
    done = calm.run("finetune", "--config_file", str(config), "--run_id", RUN_ID)
    assert done.returncode == 0, done.stdout + done.stderr + calm.logs()
    command = killed.start("finetune", "--config_file", str(killed.write(game(killed))), "--run_id", RUN_ID)
    try:
        for count, name in ((4, "producers-1"), (6, "learner-1")):
            kill_at(killed, command, count, name)
        assert command.wait(240) == 0, killed.output() + killed.logs()
    finally:
        command.kill()
        command.wait()
    expected = results_of(calm)
    assert results_of(killed) == expected
    played = {row["opponent"] for row in expected["payoffs"]}
    assert "scripted:perfect" in played
    assert len([player for player in played if "@" in player]) > EPOCHS, "newest and past versions"
    assert_replayed(killed)
    assert_matches_are_played_again(killed, expected["matches"])


def assert_replayed(project: Any) -> None:
    replayed = project.run("replay", RUN_ID, "--verify", "--train")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


def assert_matches_are_played_again(project: Any, matches: list[dict[str, Any]]) -> None:
    """Matches are repeated with the players that played, token by token; with others, twice the same; not with a
    version that is gone.
    """
    newest = max(row["epoch"] for row in matches)
    again = project.run("match", RUN_ID, "--task", f"{newest}/1", "--member", "2")
    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines()[-1].startswith("equal: "), again.stdout
    versions = project.rows("SELECT version, is_collected FROM weight_versions ORDER BY version")
    kept = [row["version"] for row in versions if not row["is_collected"]]
    gone = [row["version"] for row in versions if row["is_collected"]]
    assert gone, "the pool bounds what is kept"
    asked = ("match", RUN_ID, "--task", "0/0", "--versions", f"X={kept[-1]},O={kept[1]}")
    once, twice = project.run(*asked), project.run(*asked)
    assert once.returncode == 0, once.stderr
    assert once.stdout == twice.stdout
    assert f"  X: {RUN_ID}/policy@{kept[-1]}" in once.stdout
    removed = project.run("match", RUN_ID, "--task", "0/0", "--versions", f"X={gone[0]}")
    assert removed.returncode == 1
    assert f"policy@{gone[0]}: its weights are gone: collected by learner-1 at" in removed.stderr
