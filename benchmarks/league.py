"""Tic-tac-toe self-play with a league: Elo over versions, and results by seat against the perfect player.

    python benchmarks/league.py --versions 200 --seed 0 --output league.json

Trains examples/tic_tac_toe_league.yaml in a fresh workspace for so many versions. Validations in between play `--games`
games of the newest version against the perfect player, in a seat that is drawn for each game; they are not trained on.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
CLI = [sys.executable, "-m", "rollstream.harness.cli.main"]
EXAMPLE = "examples/tic_tac_toe_league.yaml"
RATINGS = """
SELECT player, version, rating, num_matches FROM league_ratings ORDER BY version NULLS FIRST, player
"""
SEATS = """
SELECT epoch, seat, count(*) AS games, avg((result = 1)::INT) AS wins, avg((result = 0.5)::INT) AS draws,
    avg((result = 0)::INT) AS losses
FROM matches WHERE purpose = 'validation' AND opponent = 'scripted:perfect' AND player <> opponent
GROUP BY epoch, seat ORDER BY epoch, seat
"""


def rows(workspace: Path, sql: str) -> list[dict[str, Any]]:
    """Answer of a query."""
    command = [*CLI, "sql", sql, "--workspace", str(workspace), "--format", "json"]
    return json.loads(subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout)


def validation(folder: Path, games: int) -> tuple[Path, Path]:
    """Examples and configuration of the validation: every game against the perfect player, from the empty board."""
    written = yaml.safe_load((ROOT / EXAMPLE).read_text())
    league = {"pool": 0, "latest_ratio": 0.0, "scripted": ["perfect"]}
    written["trajectory_builders"]["rollouts"] |= {"league": league, "environment_config": {}}
    examples, file = folder / "games.jsonl", folder / "validation.yaml"
    examples.write_text("".join(json.dumps({"id": f"game-{number:03d}"}) + "\n" for number in range(games)))
    file.write_text(yaml.safe_dump(written))
    return examples, file


def train(workspace: Path, arguments: argparse.Namespace) -> float:
    """Seconds of a run of so many versions after the warm start."""
    model = workspace / "models" / "tiny"
    subprocess.run([*CLI, "tiny-model", str(model), "--seed", str(arguments.seed)], check=True, cwd=ROOT)
    examples, file = validation(workspace, arguments.games)
    options = {
        "trainer_adapters.learner.model.path": str(model),
        "trainer_adapters.learner.seed": str(arguments.seed),
        "finetuning.num_epochs": str(arguments.versions),
        "finetuning.output_dir": str(workspace / "output"),
    }
    command = [*CLI, "finetune", "--config_file", EXAMPLE, "--workspace", str(workspace), "--run_id", "league"]
    command += ["--validation_dataset", str(examples), "--validation_config_file", str(file)]
    command += ["--validation_interval", str(max(1, arguments.versions // arguments.validations))]
    for key, value in options.items():
        command += ["-o", key, value]
    began = time.monotonic()
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def show(found: dict[str, Any]) -> None:
    """Print both tables."""
    print(f"{found['seconds']:.0f} s\n\nElo over versions (all matches; 1200 to begin with)")
    for row in found["ratings"]:
        print(f"  {row['player']:28} {row['rating']:7.1f}  {row['num_matches']:6} matches")
    print("\nagainst the perfect player, by seat (validations)\n  epoch seat games   win  draw  loss")
    for row in found["seats"]:
        shares = " ".join(f"{row[name]:5.2f}" for name in ("wins", "draws", "losses"))
        print(f"  {row['epoch']:5} {row['seat']:>4} {row['games']:5} {shares}")


def main() -> None:
    """Train, ask, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=200)
    parser.add_argument("--validations", type=int, default=8, help="how often the newest version is tried")
    parser.add_argument("--games", type=int, default=64, help="of each validation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder) / "workspace"
        workspace.mkdir(mode=0o700)
        seconds = train(workspace, arguments)
        found = {"seconds": seconds, "ratings": rows(workspace, RATINGS), "seats": rows(workspace, SEATS)}
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(found, indent=2) + "\n")
    show(found)


if __name__ == "__main__":
    main()
