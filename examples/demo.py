"""The command behind `make demo`: a tiny model made in place, warm-started, trained by the whole pipeline; then its
rewards.

python examples/demo.py --workspace .rollstream --seed 0
"""

import argparse
import json
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROLLSTREAM = [sys.executable, "-m", "rollstream.harness.cli.main"]
CURVE = """
SELECT epoch // 20 * 20 AS from_epoch, round(avg(avg_reward), 3) AS avg_reward,
       sum(trained_groups)::INTEGER AS trained_groups
FROM epoch_summary WHERE run_id = '{run_id}' GROUP BY 1 ORDER BY 1
"""
NEXT = """
What to try next (`. .venv/bin/activate` first):
  rollstream sql "SELECT epoch, avg_reward, trained_groups FROM epoch_summary"
  rollstream sql "SELECT * FROM wasted_tokens"
  rollstream plot {run_id}
  rollstream runs
  rollstream finetune --config_file examples/arithmetic.yaml
  rollstream finetune --config_file examples/tic_tac_toe.yaml
"""


def rollstream(*arguments: str) -> None:
    """Run one command; its failure is ours. Ctrl-C reaches it too, SIGTERM is passed on; it is left to end in order."""
    with subprocess.Popen([*ROLLSTREAM, *arguments], cwd=ROOT) as command:
        signal.signal(signal.SIGTERM, lambda *_: command.terminate())
        while command.returncode is None:
            with suppress(KeyboardInterrupt):
                command.wait()
    if command.returncode:
        sys.exit(command.returncode)


def main() -> None:
    """Model, run, reward by epoch, picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workspace", type=Path, default=Path(".rollstream"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    workspace = arguments.workspace.absolute()
    model = workspace / "models" / ("tiny" if arguments.seed == 0 else f"tiny-{arguments.seed}")
    result = workspace / "demo.json"
    rollstream("tiny-model", str(model), "--seed", str(arguments.seed))
    rollstream(
        *("finetune", "--config_file", "examples/guess_number.yaml", "--workspace", str(workspace)),
        *("--result_json_path", str(result), "--name", "demo"),
        *("-o", "trainer_adapters.learner.model.path", str(model)),
        *("-o", "trainer_adapters.learner.seed", str(arguments.seed)),
        *("-o", "finetuning.output_dir", str(workspace / "output" / "demo")),
    )
    run_id = json.loads(result.read_text())["run_id"]
    picture = workspace / "demo.png"
    rollstream("sql", CURVE.format(run_id=run_id), "--workspace", str(workspace))
    rollstream("plot", run_id, "--workspace", str(workspace), "-o", str(picture))
    print(NEXT.format(run_id=run_id))


if __name__ == "__main__":
    main()
