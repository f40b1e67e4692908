"""Event files that TensorBoard reads."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from rollstream.metrics.trackers.points import Point, TrackedJob, file_name
from rollstream.schemas.trackers import TensorBoardSettings

FILE = "events.out.tfevents.0000000000.rollstream"
VERSION = "brain.Event:2"
"""Of the file format; the first event has it."""


class EventFile:
    """The event file of a job. What a killed process wrote without recording it is cut off, and written again."""

    def __init__(self, settings: TensorBoardSettings, job: TrackedJob, kept: Mapping[str, Any]) -> None:
        folder = settings.log_dir.joinpath(*map(file_name, job.job_id.split("/")))
        folder.mkdir(parents=True, exist_ok=True)
        self._file = _opened(folder / FILE, int(kept.get("size_bytes", 0)))

    def log(self, points: Sequence[Point], first: int) -> Mapping[str, Any]:
        """Append one event a point; the size of the file afterwards tells the next process where its part begins."""
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.record_writer import RecordWriter

        records = RecordWriter(self._file)
        if self._file.tell() == 0:
            start_s = points[0].time_ms / 1000 if points else 0.0
            records.write(Event(wall_time=start_s, file_version=VERSION).SerializeToString())
        for point in points:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in sorted(point.values.items())]
            event = Event(wall_time=point.time_ms / 1000, step=point.step, summary=Summary(value=values))
            records.write(event.SerializeToString())
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"size_bytes": self._file.tell()}

    def close(self, state: str | None) -> None:
        """Close the file."""
        self._file.close()


def _opened(path: Path, size_bytes: int) -> BinaryIO:
    """The file, open for appending after its first `size_bytes`; a file that is shorter was replaced, and is kept."""
    file = path.open("ab")
    if file.tell() > size_bytes:
        file.truncate(size_bytes)
        file.seek(size_bytes)
    return file
