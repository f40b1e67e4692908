"""Points of a run's jobs for a tracker, read from the metrics by SQL."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

from rollstream.schemas import ids

Series = Literal["training", "epoch", "validation"]
Ask = Callable[[str], Sequence[Sequence[Any]]]
"""Runs a query and returns its rows."""

MAX_POINTS = 1000
"""Maximum points of one series that are read at a time."""
NOT_BEGUN = -1
"""Below every version and epoch."""
SETTLED_MS = 10_000
"""Milliseconds after which a validation of which no task is open has no further ones: they are requested together."""


class Point(NamedTuple):
    """Values of one version or epoch of a job."""

    series: Series
    step: int
    """The version that was trained; of the other series the epoch."""
    time_ms: int
    """Time of its event."""
    values: dict[str, float]
    """Names are like `training/loss/total` and `epoch/avg_reward`."""


class TrackedJob(NamedTuple):
    """A training job as a tracker shows it."""

    run_id: str
    job_id: str
    kind: str
    """`rl`, `sft`, `dpo` or `external`."""
    state: str
    is_over: bool
    """Whether its run has ended, so that no further point comes."""
    algorithm: str
    model: str
    settings: Mapping[str, Any]
    """The job's settings as recorded."""


Reach = Mapping[Series, int]
"""The last step of each series."""


def file_name(text: str) -> str:
    """A run's or a job's id as the name of one file: ids come from records, which may hold any text."""
    return quote(text, safe="") if text.strip(".") else text.replace(".", "%2E")


def quoted(text: str) -> str:
    """A text as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


def jobs_of(ask: Ask, run_id: str) -> list[TrackedJob]:
    """The jobs of a run, in the order of their start."""
    rows = ask(
        "SELECT j.job_id, j.kind, j.state, r.state <> 'running', coalesce(j.algorithm, ''), coalesce(j.model, ''), "
        f"j.settings FROM jobs j JOIN runs r USING (run_id) WHERE run_id = {quoted(run_id)} AND j.kind <> 'frozen' "
        "ORDER BY j.started_at, j.job_id"
    )
    return [
        TrackedJob(run_id, job_id, kind, state, is_over, algorithm, model, _object(settings))
        for job_id, kind, state, is_over, algorithm, model, settings in rows
    ]


def new_points(ask: Ask, run_id: str, after: Mapping[str, Reach], *, is_over: bool) -> dict[str, list[Point]]:
    """Points of a run's jobs beyond what the tracker of each has (`after`), at most MAX_POINTS of a series, by job.

    `is_over`: the run has ended, so that validations have no further task.
    """
    found: dict[str, list[Point]] = {}
    for series, query in _queries(run_id, is_over=is_over).items() if after else ():
        last = ", ".join(f"({quoted(job)}, {reach.get(series, NOT_BEGUN)})" for job, reach in after.items())
        rows = ask(
            f"SELECT job_id, step, time_ms, vals FROM ({query}) JOIN (VALUES {last}) AS sent (job_id, last) "
            f"USING (job_id) WHERE step > sent.last ORDER BY step, job_id LIMIT {MAX_POINTS}"
        )
        for job_id, step, time_ms, values in rows:
            found.setdefault(job_id, []).append(Point(series, step, time_ms, dict(_numbers(series, values))))
    return found


def points_between(ask: Ask, job: TrackedJob, after: Reach, upto: Reach) -> list[Point]:
    """The points beyond `after` that `new_points` gave for a job, if it gave none beyond `upto`."""
    found = new_points(ask, job.run_id, {job.job_id: after}, is_over=True).get(job.job_id, [])
    return [point for point in found if point.step <= upto.get(point.series, NOT_BEGUN)]


def reach_of(points: Sequence[Point], before: Reach) -> dict[Series, int]:
    """The last step of each series after these points."""
    reach = dict(before)
    for point in points:
        reach[point.series] = max(point.step, reach.get(point.series, NOT_BEGUN))
    return reach


def _queries(run_id: str, *, is_over: bool) -> dict[Series, str]:
    """For each series a query for job_id, step, time_ms and vals, an object of numbers."""
    run, groups = quoted(run_id), ids.model_group(run_id, "")
    beyond = groups[:-1] + chr(ord(groups[-1]) + 1)
    settled = "" if is_over else f"AND epoch_ms(v.ended_at) <= epoch_ms(now()) - {SETTLED_MS}"
    return {
        # by a range of model groups, which the view's window functions let through
        "training": "SELECT job_id, version AS step, epoch_ms(trained_at) AS time_ms, map_concat(metrics, "
        "map_from_entries([(('seconds/' || e.key), e.value) FOR e IN map_entries(seconds)]), "
        "MAP {'tokens_per_s': tokens_per_s, 'epoch': epoch, 'num_optimizer_steps': num_optimizer_steps}) AS vals "
        f"FROM training_steps WHERE model_group >= {quoted(groups)} AND model_group < {quoted(beyond)}",
        "epoch": "SELECT job_id, epoch AS step, epoch_ms(sealed_at) AS time_ms, {avg_reward: avg_reward, "
        "reward_std: reward_std, min_reward: min_reward, max_reward: max_reward, "
        "filtered_avg_reward: filtered_avg_reward, groups: groups, trained_groups: trained_groups, "
        "zero_variance_groups: zero_variance_groups, curriculum_percentile: curriculum_percentile, "
        "num_trajectories: num_trajectories, num_tokens: num_tokens, num_batches: num_batches, seconds: seconds} "
        f"AS vals FROM epoch_summary WHERE run_id = {run} AND state = 'sealed'",
        "validation": "SELECT v.job_id, v.epoch AS step, epoch_ms(v.ended_at) AS time_ms, {avg_reward: v.avg_reward, "
        "reward_std: v.reward_std, groups: v.groups, num_trajectories: v.num_trajectories, version: v.version} AS vals "
        f"FROM validations v WHERE v.run_id = {run} {settled} AND NOT EXISTS (SELECT 1 FROM tasks t LEFT JOIN "
        "(SELECT group_id FROM groups WHERE state = 'closed') c USING (group_id) WHERE t.run_id = v.run_id AND "
        "t.purpose = 'validation' AND t.epoch = v.epoch AND t.cancelled_at IS NULL AND c.group_id IS NULL)",
    }


def _numbers(series: Series, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Named values that are known. JSON has names for numbers that are not finite."""
    for name, value in values.items():
        if value is not None:
            yield f"{series}/{name}", float(value)


def _object(value: Any) -> Mapping[str, Any]:
    found = json.loads(value) if isinstance(value, str) else value
    return found if isinstance(found, Mapping) else {}
