"""The assembly fold alone, in steps a CPU second: over decoded events, and through the codec from record bytes.

python benchmarks/bench_assembly.py --groups 1000 --repeats 9
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

from workload import EVENTS_PER_GROUP, STEPS_PER_GROUP, group_events

from rollstream.eventlog import codec
from rollstream.eventlog.log import Record
from rollstream.processors.assemble import fold as assembly
from rollstream.processors.service import NEW_OBJECTS
from rollstream.schemas.devices import tune_gc
from rollstream.schemas.topics import TOPICS

OPEN_GROUPS = 40
DECODED_AT_ONCE = 32


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


def fold(records: list[Record]) -> float:
    """CPU seconds of folding all of it, decoded.

    Decoding takes turns with the fold, as in the service, which folds a record as soon as it has decoded it: some are
    decoded, then the time that their fold takes is counted.
    """
    state, closed, spent_s = assembly.initial(), 0, 0.0
    for first in range(0, len(records), DECODED_AT_ONCE):
        received = [codec.decode(record) for record in records[first : first + DECODED_AT_ONCE]]
        begun = time.process_time()
        for one in received:
            closed += len(assembly.evolve(state, one))
        spent_s += time.process_time() - begun
    return checked(spent_s, closed, records)


def decode_and_fold(records: list[Record]) -> float:
    """CPU seconds of decoding and folding all of it."""
    state = assembly.initial()
    begun = time.process_time()
    closed = sum(len(assembly.evolve(state, codec.decode(record))) for record in records)
    return checked(time.process_time() - begun, closed, records)


def checked(spent_s: float, closed: int, records: list[Record]) -> float:
    """The seconds, if every group was closed."""
    num_groups = len(records) // EVENTS_PER_GROUP
    assert closed == num_groups, f"{closed} of {num_groups} groups closed"
    return spent_s


def main() -> None:
    """Print medians of both, and by which Python."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    records = records_of(args.groups)
    tune_gc(NEW_OBJECTS)  # as the service does; the workload is not the fold's heap
    num_steps = args.groups * STEPS_PER_GROUP
    pure, whole = [], []
    for _ in range(args.repeats):
        pure.append(num_steps / fold(records))
        whole.append(num_steps / decode_and_fold(records))
    report = {
        "python": f"{platform.python_version()}, built by {platform.python_compiler()}",
        "groups": args.groups,
        "repeats": args.repeats,
        "events": len(records),
        "fold_steps_per_s": round(statistics.median(pure)),
        "fold_best_steps_per_s": round(max(pure)),
        "decode_and_fold_steps_per_s": round(statistics.median(whole)),
        "decode_and_fold_best_steps_per_s": round(max(whole)),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
