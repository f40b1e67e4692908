"""Plain tables for the terminal. Formatting only."""

from collections.abc import Sequence

from rollstream.harness.progress import JobProgress, Progress
from rollstream.harness.runs import state_of

JOBS_COLUMNS = (
    *("run", "job", "kind", "state", "model_group", "algorithm"),
    *("trained", "planned", "at_most", "base", "fork_of"),
)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest cell; numbers to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]
    lines = ["  ".join(name.ljust(width) for name, width in zip(header, widths, strict=True))]
    for row, told in zip(rows, cells, strict=True):
        aligned = [
            text.rjust(width) if isinstance(value, int | float) else text.ljust(width)
            for value, text, width in zip(row, told, widths, strict=True)
        ]
        lines.append("  ".join(aligned))
    return "\n".join(line.rstrip() for line in lines)


def runs_table(runs: Sequence[Progress]) -> str:
    """One line a run."""
    if not runs:
        return "no runs yet"
    rows = [
        (
            progress.run_id,
            state_of(progress),
            progress.run.started_at if progress.run else "",
            ", ".join(_job(job_id, job) for job_id, job in progress.jobs.items()),
            max(0, progress.version + 1),
            _reward(progress),
            _parent(progress),
        )
        for progress in runs
    ]
    return table(("run", "state", "started_at", "jobs", "versions", "reward", "parent"), rows)


def jobs_table(runs: Sequence[Progress]) -> str:
    """One line a job: how many versions it trained of those that are planned, and of those that it yields at most."""
    rows = [
        _job_row(progress, job_id, job) for progress in runs for job_id, job in progress.jobs.items() if job.submitted
    ]
    return table(JOBS_COLUMNS, rows) if rows else "no jobs yet"


def job_state(progress: Progress, job: JobProgress) -> str:
    """queued, running, succeeded, failed or cancelled; the end of a run cancels what is left of its jobs."""
    if job.outcome is not None:
        return job.outcome
    if progress.ended is not None:
        return "cancelled"
    return "running" if job.started or job.trained else "queued"


def _job_row(progress: Progress, job_id: str, job: JobProgress) -> tuple[object, ...]:
    submitted = job.submitted
    assert submitted is not None
    return (
        progress.run_id,
        job_id.split("/", 1)[-1],
        submitted.settings.kind,
        job_state(progress, job),
        submitted.model_group,
        submitted.settings.algorithm.name,
        job.trained.version - submitted.base_version if job.trained else 0,
        job.num_planned,
        submitted.settings.num_versions,
        submitted.base_version,
        f"{submitted.fork.run_id}@{submitted.fork.version}" if submitted.fork else "",
    )


def _job(job_id: str, job: JobProgress) -> str:
    return f"{job_id.split('/', 1)[-1]} {job.outcome or ('running' if job.started else 'waiting')}"


def _parent(progress: Progress) -> str:
    parent = progress.run.parent if progress.run else None
    return f"{parent.run_id}@{parent.version}" if parent else ""


def _reward(progress: Progress) -> str:
    rewards = [reward for job in progress.jobs.values() for _, reward in job.rewards[-1:]]
    return f"{rewards[-1]:.3f}" if rewards else ""
