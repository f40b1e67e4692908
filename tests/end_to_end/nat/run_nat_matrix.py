"""The outcomes that docs/migrating-from-nat.md sums up: `nat finetune` with every mix of components and every fault.

    python -m tests.end_to_end.nat.run_nat_matrix [--art FOLDER] [--mix M] [--fault F]

`--art`: an unpacked wheel of nvidia-nat-openpipe-art, whose trainer and builder are run too. A run takes a minute;
exits 1 if exit status, last line, log and model of one do not say the same.
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path

from tests.end_to_end.conftest import project_in
from tests.end_to_end.nat.nat_cells import FAULTS, MIXES, run_cell

SHOWN = 160
LOGGED = re.compile(r"^[-\d]+ [:\d]+ - \w+ +- [\w.]+:\d+ - ")
"""Prefix of a line in NAT's log."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--art", type=Path)
    parser.add_argument("--mix", action="append", choices=list(MIXES))
    parser.add_argument("--fault", action="append", choices=list(FAULTS))
    chosen = parser.parse_args()
    num_odd = 0
    print("| components | what goes wrong | exit status | last line | run on the log | model |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for mix in chosen.mix or MIXES:
        for fault in chosen.fault or FAULTS:
            with tempfile.TemporaryDirectory() as folder:
                cell = run_cell(project_in(Path(folder)), mix, fault, chosen.art)
            if cell is None:
                continue
            model = f"of version {cell.versions}" if cell.has_model else "none"
            line = LOGGED.sub("", cell.last_line).replace("|", "\\|")
            shown = line if len(line) <= SHOWN else f"{line[:SHOWN]} ..."
            print(f"| {mix} | {fault} | {cell.status} | {shown} | {cell.state} | {model} |", flush=True)
            for odd in cell.disagreements:
                print(f"{mix}, {fault}: {odd}\n{cell.output[-3000:]}", file=sys.stderr)
            num_odd += bool(cell.disagreements)
    return 1 if num_odd else 0


if __name__ == "__main__":
    sys.exit(main())
