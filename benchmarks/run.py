"""The command behind `make bench`: runs every benchmark in turn, never two at once; JSON is kept in benchmarks/results.

    python benchmarks/run.py [--small] [NAME...]

`--small` checks in a few minutes that each of them runs through; its figures mean little and go to results/small.
`bit_proof`, `league`, `bench_staleness` and `bench_follow_lag` run only if they are named: they measure learning or the
effect of old rollouts instead of speed, and train for minutes to half an hour.
"""

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SMALL = {
    "bench_assembly": ["--groups", "40", "--repeats", "1"],
    "bench_engine": ["--groups", "4", "--repeats", "1"],
    "bench_pipeline": ["--groups", "40", "--repeats", "1"],
    "bench_restart": ["--rollouts", "5000", "--changes", "2"],
    "bench_run": ["--epochs", "6", "--repeats", "1"],
    "bench_step_cost": ["--groups", "20", "--repeats", "1"],
}
APART = {
    "bench_follow_lag": ["--epochs", "3", "--repeats", "1"],
    "bench_staleness": ["--steps", "3", "--seeds", "0", "--staleness", "0", "2"],
    "bit_proof": ["--epochs", "2", "--seeds", "0"],
    "league": ["--versions", "4", "--validations", "2", "--games", "4"],
}
"""Run only by name."""


def main() -> None:
    """Run all, or those named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = f"of {', '.join(SMALL)}, all of these without one; by name only: {', '.join(APART)}"
    parser.add_argument("names", nargs="*", metavar="NAME", help=known)
    parser.add_argument("--small", action="store_true", help="only see that each runs through")
    arguments = parser.parse_args()
    results = HERE / "results" / "small" if arguments.small else HERE / "results"
    results.mkdir(parents=True, exist_ok=True)
    for name in arguments.names or SMALL:
        print(f"== {name}", flush=True)
        command = [sys.executable, str(HERE / f"{name}.py"), "--output", str(results / f"{name}.json")]
        command += ["--plot", str(results / f"{name}.png")] if name == "bit_proof" else []
        subprocess.run(command + (SMALL | APART)[name] if arguments.small else command, check=True)


if __name__ == "__main__":
    main()
