"""Built-in trackers: event files of TensorBoard and runs of Weights & Biases."""

import hashlib
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from rollstream.eventlog.files import read_json, sync_file, update_json
from rollstream.metrics.trackers.points import Point, TrackedJob, TrackerDownError, TrackerError, file_name
from rollstream.schemas import ids
from rollstream.schemas.errors import describe
from rollstream.schemas.trackers import TensorBoardSettings, WandbSettings

EVENT_FILE = "events.out.tfevents.0000000000.rollstream"
FORMAT = "brain.Event:2"
"""Version of the file format; the first event has it."""

logger = logging.getLogger(__name__)


class EventFile:
    """The event file of a job. What a killed process wrote without recording it is cut off, and written again."""

    def __init__(
        self, settings: TensorBoardSettings, job: TrackedJob, kept: Mapping[str, Any], workspace: Path
    ) -> None:
        """Raises TrackerError if the file has become shorter than it was."""
        folder = settings.folder / file_name(job.run_id) / file_name(ids.name_of(job.job_id))
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / (str(kept.get("file", "")) or _name_in(folder, workspace))
        if not kept and (others := sorted(path.name for path in folder.glob(f"{EVENT_FILE}.*") if path != self._path)):
            logger.warning(
                "%s has points of job %s already, in %s: TensorBoard shows them too; remove those of this workspace, "
                "which it sends once more",
                folder,
                job.job_id,
                ", ".join(others),
            )
        self._file = _opened(self._path, int(kept.get("size_bytes", 0)))

    def log(self, points: Sequence[Point], first: int) -> Mapping[str, Any]:
        """Append one event a point; name and size of the file tell the next process where its part begins."""
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.record_writer import RecordWriter

        records = RecordWriter(self._file)
        if self._file.tell() == 0:
            start_s = points[0].time_ms / 1000 if points else 0.0
            records.write(Event(wall_time=start_s, file_version=FORMAT).SerializeToString())
        for point in points:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in sorted(point.values.items())]
            event = Event(wall_time=point.time_ms / 1000, step=point.step, summary=Summary(value=values))
            records.write(event.SerializeToString())
        self._file.flush()
        sync_file(self._path)
        return {"size_bytes": self._file.tell(), "file": self._path.name}

    def close(self, state: str | None) -> None:
        """Close the file."""
        self._file.close()


def _name_in(folder: Path, workspace: Path) -> str:
    """Name of a workspace's event files, which stays the same if the workspace is moved; in a folder of an earlier
    release, the name that had the workspace's path in it.
    """
    earlier = f"{EVENT_FILE}.{hashlib.sha256(str(workspace.absolute()).encode()).hexdigest()[:8]}"
    if (folder / earlier).exists():
        return earlier
    path = workspace / "trackers" / "workspace.json"
    update_json(path, lambda known: known or {"id": secrets.token_hex(4)})
    return f"{EVENT_FILE}.{read_json(path)['id']}"


def _opened(path: Path, size_bytes: int) -> BinaryIO:
    """The file, open for appending after its first `size_bytes`."""
    file = path.open("ab")
    if file.tell() < size_bytes:
        file.close()
        raise TrackerError(
            f"{path} was removed or cut off; stop this tracker, and send all points of the run once more: "
            f"`rollstream track RUN --to tensorboard -o log_dir {path.parent.parent.parent} --again`"
        )
    file.truncate(size_bytes)
    file.seek(size_bytes)
    return file


AXES = {"training": "version", "epoch": "epoch", "validation": "epoch"}
"""The x-axis of each series."""


class WandbRun:
    """A job's run. A point's number is its step there, so that points that are logged again are ignored."""

    def __init__(self, settings: WandbSettings, job: TrackedJob, folder: Path) -> None:
        """Raises TrackerDownError if another process is needed, and wandb's errors."""
        import wandb

        folder /= str(time.time_ns())  # wandb would write over a folder that it made in the same second
        folder.mkdir(parents=True)
        try:
            self._run = wandb.init(
                project=settings.project,
                entity=settings.entity,
                id=hashlib.sha256(job.job_id.encode()).hexdigest()[:16],
                name=job.job_id,
                group=job.run_id,
                job_type=job.kind,
                tags=settings.tags,
                config={"algorithm": job.algorithm, "model": job.model, **job.settings},
                mode=settings.mode,
                dir=str(folder),
                resume="allow",
                reinit="create_new",
                settings=wandb.Settings(
                    console="off",
                    silent=True,
                    x_disable_stats=True,
                    x_disable_meta=True,
                    x_disable_machine_info=True,
                    disable_git=True,
                ),
            )
        except Exception as error:
            if isinstance(error, (wandb.Error, OSError, ValueError, TypeError)):
                raise
            # its own process is gone, and `wandb` starts no other one
            raise TrackerDownError(f"wandb cannot be used in this process any more: {describe(error)}") from error
        for series, axis in AXES.items():
            self._run.define_metric(axis)
            self._run.define_metric(f"{series}/*", step_metric=axis)

    def log(self, points: Sequence[Point], first: int) -> Mapping[str, Any]:
        """Log one step a point. wandb keeps it in a file until its server has it."""
        for number, point in enumerate(points, first):
            values = {AXES[point.series]: point.step, **point.values, "_timestamp": point.time_ms / 1000}
            self._run.log(values, step=number, commit=True)
        return {}

    def close(self, state: str | None) -> None:
        """Finish the run; it goes on if it is opened again."""
        self._run.finish(exit_code=1 if state == "failed" else 0)
