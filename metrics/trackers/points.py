"""Points of a run's jobs for a tracker, read from the metrics by SQL."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

from pydantic import BaseModel, Field

from rollstream.metrics.projection.columns import quoted
from rollstream.schemas import ids
from rollstream.schemas.errors import RollstreamError

Series = Literal["training", "epoch", "validation"]
Ask = Callable[[str], Sequence[Sequence[Any]]]
"""Runs a query and returns its rows."""

MAX_POINTS = 1000
"""Maximum points of one series that are sent at a time."""
MAX_JOBS = 200
"""Maximum jobs of a query: its size grows with them."""
NOT_BEGUN = -1
"""Below every version and epoch."""
WINDOW: Mapping[Series, int] = {"training": 0, "epoch": 64, "validation": 64}
"""Steps by which a point may come after a higher one of its series: validations may overlap. Versions are in order."""
SETTLED_MS = 10_000
"""Milliseconds after which a validation of which no task is open has no further ones: they are requested together."""


class TrackerError(RollstreamError):
    """A tracker did not take what it was given."""


class TrackerDownError(TrackerError):
    """A tracker that only another process can open again."""


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
    """`submitted`, `running`, or one of ENDED_STATES."""
    is_over: bool
    """Whether its run has ended, so that no further point comes."""
    algorithm: str
    model: str
    settings: Mapping[str, Any]
    """The job's settings as recorded."""


ENDED_STATES = frozenset({"succeeded", "failed", "cancelled", "skipped"})


class Key(NamedTuple):
    """A point that the metrics have."""

    job_id: str
    series: Series
    step: int


class Sent(BaseModel):
    """Points of a series that a tracker has."""

    last: int = NOT_BEGUN
    """The highest step."""
    recent: list[int] = Field(default_factory=list)
    """Steps within the series' window, the highest included."""

    def plus(self, series: Series, steps: Iterable[int]) -> "Sent":
        """With further steps."""
        steps = list(steps)
        last = max([self.last, *steps])
        return Sent(last=last, recent=sorted(step for step in {*self.recent, *steps} if step > last - WINDOW[series]))


SentBySeries = Mapping[Series, Sent]


def file_name(text: str) -> str:
    """A run's or a job's id as the name of one file: ids come from records, which may hold any text."""
    return quote(text, safe="") if text.strip(".") else text.replace(".", "%2E")


def jobs_of(ask: Ask, run_id: str) -> list[TrackedJob]:
    """The jobs of a run, in the order of their start. One that was cut short because its run failed has failed."""
    rows = ask(
        "SELECT j.job_id, j.kind, if(j.state = 'cancelled' AND r.state IN ('failed', 'abandoned'), 'failed', j.state), "
        "r.state <> 'running', coalesce(j.algorithm, ''), coalesce(j.model, ''), "
        f"j.settings FROM jobs j JOIN runs r USING (run_id) WHERE run_id = {quoted(run_id)} AND j.kind <> 'frozen' "
        "ORDER BY j.started_at, j.job_id"
    )
    return [
        TrackedJob(run_id, job_id, kind, state, is_over, algorithm, model, _object(settings))
        for job_id, kind, state, is_over, algorithm, model, settings in rows
    ]


def new_keys(ask: Ask, run_id: str, sent: Mapping[str, SentBySeries]) -> list[Key]:
    """Points that the trackers of some jobs of a run do not have, at most 2 * MAX_POINTS of a series.

    `sent`: the points that each of the jobs has.
    """
    found, jobs = list[Key](), list(sent.items())
    while jobs and len(found) < MAX_POINTS:
        some, jobs = dict(jobs[:MAX_JOBS]), jobs[MAX_JOBS:]
        parts = [
            f"SELECT * FROM (SELECT job_id, '{series}' AS series, step FROM ({query}) WHERE {_is_new(series, some)} "
            f"ORDER BY step, job_id LIMIT {MAX_POINTS})"
            for series, query in _queries(run_id).items()
        ]
        rows = ask(f"SELECT * FROM ({' UNION ALL '.join(parts)}) ORDER BY series, step, job_id")
        found += [Key(*row) for row in rows]
    return found


def points_of(ask: Ask, run_id: str, keys: Sequence[Key]) -> dict[str, list[Point]]:
    """The points of these keys, by job.

    If `ask` waits for the whole log, which `new_keys` need not have done, the points are complete: what their values
    are made of was in the log before their keys were.
    """
    found: dict[str, list[Point]] = {}
    for series, query in _queries(run_id).items():
        asked = [(key.job_id, key.step) for key in keys if key.series == series]
        if not asked:
            continue
        steps = ", ".join(f"({quoted(job_id)}, {step})" for job_id, step in asked)
        rows = ask(
            f"SELECT job_id, step, time_ms, vals FROM ({query}) WHERE (job_id, step) IN ({steps}) ORDER BY step, job_id"
        )
        for job_id, step, time_ms, values in rows:
            found.setdefault(job_id, []).append(Point(series, step, time_ms, dict(_numbers(series, values))))
    return found


def _is_new(series: Series, sent: Mapping[str, SentBySeries]) -> str:
    """SQL for a job_id and step of a series that are not sent."""
    old: list[str] = []
    for job_id, by_series in sent.items():
        if found := by_series.get(series):
            steps = ", ".join(map(str, found.recent or [found.last]))
            begun = found.last - WINDOW[series]
            old.append(f"(job_id = {quoted(job_id)} AND (step <= {begun} OR step IN ({steps})))")
    new = f"NOT ({' OR '.join(old)})" if old else "true"
    return f"job_id IN ({', '.join(map(quoted, sent))}) AND {new}"


def _queries(run_id: str) -> dict[Series, str]:
    """For each series a query for job_id, step, time_ms and vals, an object of numbers."""
    run, groups = quoted(run_id), ids.model_group(run_id, "")
    beyond = groups[:-1] + chr(ord(groups[-1]) + 1)
    is_over = f"EXISTS (SELECT 1 FROM runs r WHERE r.run_id = {run} AND r.state <> 'running')"
    return {
        # by a range of model groups, which the view's window functions let through
        "training": "SELECT s.job_id, s.version AS step, epoch_ms(coalesce(w.published_at, s.trained_at)) AS time_ms, "
        "map_concat(s.metrics, map_from_entries([(('seconds/' || e.key), e.value) FOR e IN map_entries(s.seconds)]), "
        "MAP {'tokens_per_s': s.tokens_per_s, 'epoch': s.epoch, 'num_optimizer_steps': s.num_optimizer_steps}) AS vals "
        "FROM training_steps s LEFT JOIN weight_versions w ON w.model_group = s.model_group AND w.version = s.version "
        f"AND w.job_id = s.job_id WHERE s.model_group >= {quoted(groups)} "
        f"AND s.model_group < {quoted(beyond)} AND (w.version IS NOT NULL OR {is_over})",
        "epoch": "SELECT job_id, epoch AS step, epoch_ms(sealed_at) AS time_ms, {avg_reward: avg_reward, "
        "reward_std: reward_std, min_reward: min_reward, max_reward: max_reward, "
        "filtered_avg_reward: filtered_avg_reward, groups: groups, trained_groups: trained_groups, "
        "zero_variance_groups: zero_variance_groups, curriculum_percentile: curriculum_percentile, "
        "num_trajectories: num_trajectories, num_tokens: num_tokens, num_batches: num_batches, seconds: seconds} "
        f"AS vals FROM epoch_summary WHERE run_id = {run} AND state = 'sealed' "
        f"AND (started_at IS NOT NULL OR {is_over})",
        "validation": "SELECT v.job_id, v.epoch AS step, epoch_ms(v.ended_at) AS time_ms, {avg_reward: v.avg_reward, "
        "reward_std: v.reward_std, groups: v.groups, num_trajectories: v.num_trajectories, version: v.version} AS vals "
        f"FROM validations v WHERE v.run_id = {run} AND (epoch_ms(v.ended_at) <= epoch_ms(now()) - {SETTLED_MS} OR "
        f"{is_over}) AND NOT EXISTS (SELECT 1 FROM tasks t LEFT JOIN "
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
