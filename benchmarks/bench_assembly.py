"""The assembly fold alone, in steps a CPU second: over decoded events, and through the codec from record bytes.

python benchmarks/bench_assembly.py --groups 200 --repeats 5
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from workload import STEPS_PER_GROUP, group_events

from rollstream.eventlog import codec
from rollstream.eventlog.log import Received, Record
from rollstream.processors import assembly
from rollstream.processors.garbage import collect_seldom
from rollstream.schemas.topics import TOPICS

OPEN_GROUPS = 40


def records_of(num_groups: int) -> list[Record]:
    """Records of one partition in which up to 40 groups are open at a time, their members interleaved."""
    records: list[Record] = []
    for first in range(0, num_groups, OPEN_GROUPS):
        streams = [list(group_events("bench", index)) for index in range(first, min(num_groups, first + OPEN_GROUPS))]
        for events in zip(*streams, strict=True):
            for event in events:
                made = codec.encode(event)
                records.append(
                    Record(TOPICS["steps"].short, 0, len(records), made.key, made.value, made.headers, event.time_ms)
                )
    return records


def fold(received: list[Received]) -> int:
    """Groups closed by folding all of it."""
    state = assembly.initial()
    return sum(len(assembly.evolve(state, one)) for one in received)


def fold_records(records: list[Record]) -> int:
    """Groups closed by decoding and folding all of it."""
    state = assembly.initial()
    return sum(len(assembly.evolve(state, codec.decode(record))) for record in records)


def steps_per_s(run, given: list, num_groups: int) -> float:
    """Steps a CPU second of one pass."""
    begun = time.process_time()
    closed = run(given)
    assert closed == num_groups, f"{closed} of {num_groups} groups closed"
    return num_groups * STEPS_PER_GROUP / (time.process_time() - begun)


def main() -> None:
    """Interleave both, print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    records = records_of(args.groups)
    received = [codec.decode(record) for record in records]
    collect_seldom()  # as the service does; the workload is not the fold's heap
    pure, decoded = [], []
    for _ in range(args.repeats):
        pure.append(steps_per_s(fold, received, args.groups))
        decoded.append(steps_per_s(fold_records, records, args.groups))
    report = {
        "groups": args.groups,
        "events": len(records),
        "fold_steps_per_s": round(statistics.median(pure)),
        "fold_best_steps_per_s": round(max(pure)),
        "decode_and_fold_steps_per_s": round(statistics.median(decoded)),
        "decode_and_fold_best_steps_per_s": round(max(decoded)),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
