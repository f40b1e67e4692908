"""Exceptions that ended a learner's process while it worked on a job, in files beside the job's checkpoints.

One that a restart would meet again fails the job, instead of ending each process that is started in its place.
"""

import logging
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from rollstream.eventlog.files import sync_folder, write_whole
from rollstream.learner.checkpoints.checkpoint import CheckpointFolder
from rollstream.learner.model.memory import HALVED, MemoryHeldError
from rollstream.schemas.errors import (
    RollstreamError,
    RunFailedError,
    describe,
    is_of_device,
    is_out_of_memory,
    is_passing,
)
from rollstream.schemas.events import JobSubmitted
from rollstream.schemas.variables import MAX_JOB_ERROR, recordable, traceback_of

logger = logging.getLogger(__name__)

MAX_TIMES = 2
"""Ends of the process at one manifest, by exceptions of one type, after which the job fails."""


class Fault(BaseModel):
    """An exception that ended a process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job_id: str
    index: int | None
    """Manifest that was in work; None: the job was being started."""
    kind: str
    """Name of the exception's type."""
    error: str
    """Its message, with type and place unless it is one of rollstream's; without secrets."""
    times: int = 1
    """Number of processes that it ended; MAX_TIMES at once if it comes from the computation itself."""


class Faults:
    """The files of a job's processes: each writes its own, and the first one reads all."""

    def __init__(self, checkpoints: Path, job: JobSubmitted, rank: int = 0) -> None:
        """`checkpoints`: the folder of those of all model groups. `rank`: of this process."""
        self._folder = CheckpointFolder(checkpoints, job.model_group).path
        self._job_id = job.job_id
        self._own = self._folder / f"fault.{rank}.json"

    def keep(self, error: BaseException, index: int | None, *, is_certain: bool) -> None:
        """Keep an exception that ends this process, unless it passes, or a restart has smaller micro-batches after it.

        `is_certain`: it comes from the computation itself, so that a restart raises it too.
        """
        if is_passing(error) or HALVED in getattr(error, "__notes__", ()):
            return
        kind, before = type(error).__name__, _read(self._own)
        times = 1
        has_no_memory = is_out_of_memory(error) and not isinstance(error, RollstreamError)
        if is_certain and not is_of_device(error) and not has_no_memory:
            times = MAX_TIMES
        elif before is not None and (before.job_id, before.index, before.kind) == (self._job_id, index, kind):
            times = before.times + 1
        described = str(error) if isinstance(error, (RollstreamError, MemoryHeldError)) else describe(error)
        text = recordable(described, MAX_JOB_ERROR) or kind
        fault = Fault(job_id=self._job_id, index=index, kind=kind, error=text, times=times)
        logger.error("job=%s %s failed%s", self._job_id, _location(index), traceback_of(error))
        try:
            write_whole(self._own, fault.model_dump_json(), is_private=False)
            sync_folder(self._folder)
        except OSError as failure:
            logger.error("%s cannot be written, so a restart tries the same again: %s", self._own, failure)

    def check(self, index: int | None) -> None:
        """Raises RunFailedError if work on this manifest (None: the start of the job) ended processes before."""
        for path in sorted(self._folder.glob("fault.*.json")):
            found = _read(path)
            if found is None or (found.job_id, found.index) != (self._job_id, index) or found.times < MAX_TIMES:
                continue
            rank = path.name.split(".")[1]
            raise RunFailedError(
                f"{_location(index)} ended process {rank} of the learner: {found.error}; the learner's log has the "
                "traceback"
            )

    def forget_start(self) -> None:
        """Remove what came while the job was started, which has succeeded now."""
        self.forget(-1)

    def forget(self, index: int) -> None:
        """Remove what came up to a manifest, whose version is written now."""
        for path in self._folder.glob("fault.*.json"):
            found = _read(path)
            if found is None or found.index is None or found.index <= index:
                path.unlink(missing_ok=True)


def _read(path: Path) -> Fault | None:
    """The fault in a file; None if there is none that can be read."""
    try:
        return Fault.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def _location(index: int | None) -> str:
    return "the job's start" if index is None else f"manifest {index}"
