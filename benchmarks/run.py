"""What `make bench` runs: every benchmark in turn, never two at once; JSON is kept in benchmarks/results."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
BENCHMARKS = ("bench_assembly", "bench_pipeline", "bench_run")


def main() -> None:
    """Run all, or those named on the command line."""
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    for name in sys.argv[1:] or BENCHMARKS:
        print(f"== {name}", flush=True)
        command = [sys.executable, str(HERE / f"{name}.py"), "--output", str(results / f"{name}.json")]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
