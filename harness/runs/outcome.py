"""End of a run: its final model, its last event, and its summary."""

import asyncio
import functools
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.attempts import Cause
from rollstream.eventlog.blocking_calls import NeededSpace, retrying
from rollstream.eventlog.log import EventLog
from rollstream.harness.runs.earlier_output import list_groups, take_output_dir
from rollstream.harness.runs.follower import records_of, versions_of
from rollstream.harness.runs.plan import RunPlan
from rollstream.harness.runs.progress import (
    NOTHING_PUBLISHED,
    JobProgress,
    Progress,
    Published,
    by_group,
    rewards_of,
)
from rollstream.learner.untrained import NOTHING_TRAINED, read_untrained
from rollstream.processors.curate import gate
from rollstream.schemas import ids
from rollstream.schemas.config import RunConfig
from rollstream.schemas.errors import ArtifactError, RollstreamError, StoreUnavailableError
from rollstream.schemas.events import EpochSealed, GroupClosed, RunEnded, VersionJudged, WeightsPublished
from rollstream.schemas.settings import OTHERS, JobSpec
from rollstream.schemas.variables import MAX_JOB_ERROR, expand, one_line, recordable

CATCH_UP_TIMEOUT_S = 60.0
MAX_REPEATED = 100
"""Characters of a reason that the end of a run repeats though a service's error has shown it."""
RETRY_S = 0.2
SHARE_SHOWN = 10
"""Rewards are compared between the first and the last tenth of the last job's epochs."""
NOT_ITS_OWN = frozenset({Cause.PRODUCER_LOST, Cause.CANCELLED})
"""Causes of a failed rollout for which neither the environment nor the configuration is to blame."""
MAX_FAILURE = 160
"""Characters of the most frequent failure of a rollout in the summary."""
FAILED = """
SELECT count(*), count(*) FILTER (is_failed), mode(concat_ws(': ', cause, nullif(message, ''))) FILTER (is_failed)
FROM (
    SELECT cause, message, state = 'failed' AND cause NOT IN ('{}') AS is_failed FROM rollouts WHERE run_id = '{}'
    QUALIFY row_number() OVER (PARTITION BY group_id, member ORDER BY attempt DESC) = 1
)
"""
NO_REASON = "no reason was recorded; the logs of the services may have it"

logger = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """The outcome of a run."""

    run_id: str
    status: Literal["completed", "failed", "stopped", "abandoned"]
    version: int
    message: str = ""
    output_dir: Path | None = None
    """Folder of the final model; None if there is none."""
    num_epochs: int = 0
    """Sealed epochs, apart from the empty one that ends a run early."""
    first_reward: float | None = None
    last_reward: float | None = None
    seconds: float = 0.0
    restarts: int = 0
    logged: tuple[str, ...] = ()
    """Errors of services that the terminal shows already, as `service: message`."""
    rewards: str = ""
    """Mean rewards at the beginning and at the end, of each model group."""
    remarks: tuple[str, ...] = ()
    """Number of failed rollouts, and weights that no reward had; from the metrics."""

    @property
    def exit_code(self) -> int:
        """0 for a run that was completed or stopped by its user."""
        return 0 if self.status in ("completed", "stopped") else 1

    def as_json(self) -> dict[str, Any]:
        """Values for `--result_json_path`."""
        found = {name: value for name, value in self._asdict().items() if name not in ("logged", "rewards", "remarks")}
        return {**found, "output_dir": None if self.output_dir is None else str(self.output_dir)}

    def summary(self) -> str:
        """A summary of a few lines. The message of an end that is not a failure comes last."""
        version = f" at version {self.version}" if self.version >= 0 else ""
        lines = [f"run {self.run_id} {self.status}{version} after {self.seconds:.0f} s"]
        if self.message and self.exit_code:
            lines[0] += f": {self._unlogged()}"
        lines += filter(None, [self.rewards])
        if self.output_dir is not None:
            lines.append(f"model in {self.output_dir}")
        lines += self.remarks
        if self.restarts:
            lines.append(f"services restarted {self.restarts} time{'s' if self.restarts != 1 else ''}")
        if self.message and not self.exit_code:
            lines.append(self.message)
        return "\n".join(lines)

    def _unlogged(self) -> str:
        """The message, which refers to a long reason that the terminal shows already."""
        for line in self.logged:
            service, _, text = line.partition(": ")
            reason = text.partition(": ")[2]
            if len(reason) > MAX_REPEATED and reason in self.message:
                return self.message.replace(reason, f"see the error of {service} above")
        return self.message


async def end(
    log: EventLog,
    artifacts: ArtifactStore,
    progress: Progress,
    run: RunPlan,
    config: RunConfig,
    *,
    logged: str = "",
) -> Outcome:
    """Export the newest or last good version of a run that did not fail, then write RunEnded if nobody has. Idempotent.

    A base model that nothing was trained of is exported only if the configuration asks for it. `logged`: what others
    logged meanwhile, which may say why nothing was trained. A full disk is waited for: the run stays open until its
    model is whole.
    """
    state, message, time_ms = await _state(log, progress, run, logged)
    exported: Path | None = None
    if state in ("completed", "stopped") and progress.weights is not None:
        exported, replaced = await _exported(log, artifacts, progress, run, config)
        if exported is None:
            message = message or NOTHING_TRAINED
        new = [one for one in replaced if recordable(one, MAX_JOB_ERROR) not in message]  # one that ended had some
        message = "; ".join(filter(None, [message, *new]))
    if progress.ended is None:
        cause = "completed" if state == "completed" else "failed"
        text = recordable(message, MAX_JOB_ERROR)
        await log.send(RunEnded(run_id=progress.run_id, time_ms=time_ms, cause=cause, message=text))
    num_epochs, means = _num_epochs(progress.job(run.jobs[-1].job_id).sealed), _means(progress, run)
    first, last, _ = next(iter(means.values()), (None, None, 0))
    outcome = Outcome(progress.run_id, state, progress.version, message, exported, num_epochs, first, last)
    return outcome._replace(rewards=_rewards(means, num_epochs))


def is_trained(progress: Progress) -> bool:
    """Whether the run has made a version beyond its initial one."""
    return any(_is_trained(one) for one in progress.published.values())


def _is_trained(published: Published) -> bool:
    first, newest = published
    return first is not None and newest is not None and newest.version > first.version


async def _exported(
    log: EventLog, artifacts: ArtifactStore, progress: Progress, run: RunPlan, config: RunConfig
) -> tuple[Path | None, list[str]]:
    """Save the newest version of every trained model group, or the last good one if the newest fails the evaluation
    gate; where there are several, each in a folder of its name.

    Returns None if none of them has a version of its own, and messages about versions that are not the newest and about
    files of another run that were moved away.
    """
    specs = {spec.model_group: spec for spec in run.jobs if not spec.is_frozen}
    output_dir = config.finetuning.output_dir
    exported: Path | None = None
    replaced: list[str] = []
    for model_group, spec in specs.items():
        published = progress.published.get(model_group, NOTHING_PUBLISHED)
        weights = published.newest
        if weights is None or not (_is_trained(published) or config.adapter.export_untrained):
            continue
        good = await good_version(log, artifacts, progress, run, spec, weights)
        if good is not None:
            replaced.append(
                f"version {weights.version} of {model_group} failed its last validation, so version {good.version} is "
                "saved"
            )
            weights = good
        folder = output_dir / ids.name_of(model_group) if len(specs) > 1 else output_dir
        names = [ids.name_of(name) for name in specs] if len(specs) > 1 else []
        local = _with_local_model(weights, spec.job.model.path)
        if exported is None and (earlier := take_output_dir(config, progress.run_id, is_new=False)) is not None:
            replaced.append(f"files of another run, which came to {output_dir} meanwhile, were moved to {earlier}")
        space = NeededSpace(output_dir, weights.artifact.size_bytes)
        doing = functools.partial(_export, artifacts, local, folder, names)
        await retrying(doing, "save the final model", space=space)
        exported = output_dir.absolute()
    return exported, replaced


async def good_version(
    log: EventLog, artifacts: ArtifactStore, progress: Progress, run: RunPlan, spec: JobSpec, newest: WeightsPublished
) -> WeightsPublished | None:
    """The last good version of a model group whose newest one failed the validation after the last epoch.

    None if it did not fail, was not validated, or the last good version is gone.
    """
    started, planner = progress.job(spec.job_id).started, progress.job(run.jobs[-1].job_id)
    if started is None or started.plan.gate is None or planner.sealed is None or not planner.sealed.is_last:
        return None
    run_id, judged, closed = progress.run_id, None, list[GroupClosed]()
    async for received in records_of(log, "batches", run_id, run_id):
        if isinstance(received.event, VersionJudged) and received.event.job_id == spec.job_id:
            judged = received.event
    async for received in records_of(log, "groups", run_id, run_id, ()):
        event = received.event
        if isinstance(event, GroupClosed) and event.purpose == "validation" and event.epoch > planner.sealed.epoch:
            closed.append(event)
    version = gate.final_version(started, closed, newest.version, judged)
    if version == newest.version:
        return None
    group, _ = await versions_of(log, spec.model_group, version)
    good = group.published.get(version)
    if good is None or not _is_there(artifacts, good):
        logger.warning(
            "version %s of %s, the last good one, was removed, so the newest is saved; raise keep_last to keep more",
            version,
            spec.model_group,
        )
        return None
    return good


def _is_there(artifacts: ArtifactStore, weights: WeightsPublished) -> bool:
    try:
        artifacts.fetch(weights.artifact)
    except StoreUnavailableError:
        raise
    except ArtifactError:
        return False
    return True


def reason_of(ended: RunEnded) -> str:
    """The message of the run's end; where a failure was recorded without a reason, that it has none."""
    return ended.message or ("" if ended.cause in ("completed", "stopped") else NO_REASON)


def reason_of_job(spec: JobSpec, job: JobProgress, jobs: Sequence[JobSpec]) -> str:
    """The reason why a job ended that did not succeed; with its model group if the run has several."""
    group = f" (model group {ids.name_of(spec.model_group)})" if len({one.model_group for one in jobs}) > 1 else ""
    return f"job {spec.job_id}{group} {job.outcome}: {job.error or NO_REASON}"


async def let_metrics_catch_up(workspace: Path) -> bool:
    """Wait until the projector has everything that is in the log now; a failure is only logged, and False returned.

    A projector that is just being started again is waited for, and the file left to it.
    """
    from rollstream.metrics.sql.client import is_caught_up

    try:
        async with asyncio.timeout(CATCH_UP_TIMEOUT_S):
            while not await asyncio.to_thread(is_caught_up, workspace):
                await asyncio.sleep(RETRY_S)
    except (RollstreamError, TimeoutError) as error:
        reason = str(error) or f"no answer within {CATCH_UP_TIMEOUT_S:g} s"
        logger.warning("the metrics of workspace %s have not caught up: %s; see its logs", workspace, reason)
        return False
    return True


def behind_of(workspace: Path, run_id: str, config: RunConfig) -> tuple[str, ...]:
    """The trackers that lack a part of a run whose end an earlier process wrote, with the command that sends it."""
    from rollstream.metrics.trackers.service import has_whole_run

    return tuple(
        f"tracker {settings.kind} may not have all of the run: `rollstream track {run_id} --to {settings.kind}`, with "
        f"its other keys as -o, sends the rest"
        for settings in config.trainer.trackers
        if not has_whole_run(settings, workspace, run_id)
    )


async def remarks_of(workspace: Path, run_id: str, config: RunConfig) -> tuple[str, ...]:
    """The number of failed rollouts and their most frequent cause, if any failed, and names of `reward_weights` that no
    recorded reward has; from the metrics.

    Rollouts that a producer lost or the run cancelled do not count. A failed query is only logged.
    """
    from rollstream.metrics.sql.client import query

    failed = FAILED.format("', '".join(sorted(NOT_ITS_OWN)), run_id)
    rewards = f"SELECT DISTINCT name FROM rewards WHERE run_id = '{run_id}'"
    try:
        num_rollouts, num_failed, cause = (await asyncio.to_thread(query, workspace, failed, fresh=False)).rows[0]
        names = {name for (name,) in (await asyncio.to_thread(query, workspace, rewards, fresh=False)).rows}
    except RollstreamError as error:
        logger.info("the metrics of run_id=%s are not summarized: %s", run_id, error)
        return ()
    found: list[str] = []
    if num_failed:
        found.append(f"{num_failed} of {num_rollouts} rollouts failed, most often by {one_line(cause, MAX_FAILURE)}")
    if names and (unused := sorted(config.builder.reward_weights.keys() - {OTHERS, *names})):
        known = one_line(", ".join(sorted(names)))
        found.append(f"reward_weights: no rollout has a reward {', '.join(unused)}; recorded were {known}")
    return tuple(found)


async def _state(
    log: EventLog, progress: Progress, run: RunPlan, logged: str
) -> tuple[Literal["completed", "failed", "stopped", "abandoned"], str, int]:
    """State, message and time of a run's end: completed if all of its jobs have succeeded.

    In earlier releases a job that trained nothing succeeded, too, whatever the cause.
    """
    if progress.ended is not None:
        return progress.ended.cause, reason_of(progress.ended), progress.ended.time_ms
    state = ""
    for spec in run.jobs:
        job = progress.job(spec.job_id)
        is_trained = spec.is_frozen or job.num_planned or job.num_trained_groups
        meanwhile = f"; logged meanwhile: {logged}" if logged and not is_trained else ""
        if job.outcome != "succeeded":
            return "failed", reason_of_job(spec, job, run.jobs) + meanwhile, job.ended_at_ms
        if is_trained:
            continue
        found = await read_untrained(log, spec.job_id)
        state = f"job {spec.job_id}: {found.reason}{meanwhile}"
        if not found.is_curriculum_alone:
            return "failed", state, job.ended_at_ms
    return "completed", state, progress.job(run.jobs[-1].job_id).ended_at_ms


def _with_local_model(weights: WeightsPublished, own: str) -> WeightsPublished:
    """Weights of the user's own base model, whatever a record says. `own`: its path in the file, as written."""
    base_model = str(expand(own, os.environ))
    lora = None if weights.lora is None else {**weights.lora, "base_model_name_or_path": base_model}
    return weights.model_copy(update={"base_model": base_model, "lora": lora})


def _export(artifacts: ArtifactStore, weights: WeightsPublished, output_dir: Path, groups: list[str]) -> None:
    """`groups`: all names of folders such as this one, if there are several."""
    from rollstream.learner.model.export import export_model

    if groups:
        list_groups(output_dir.parent, groups)
    export_model(weights, artifacts.fetch(weights.artifact), output_dir)


def _num_epochs(sealed: EpochSealed | None) -> int:
    if sealed is None:
        return 0
    is_empty_end = sealed.is_last and not sealed.num_groups
    return sealed.epoch + (0 if is_empty_end else 1)


def _means(progress: Progress, run: RunPlan) -> dict[str, tuple[float, float, int]]:
    """Mean reward at the beginning and at the end of the last job and those beside it, and the number of epochs that
    each is of, by model group.
    """
    found: dict[str, tuple[float, float, int]] = {}
    for group, rewards in rewards_of(progress, run.jobs[-1].job_id).items():
        count = max(1, len(rewards) // SHARE_SHOWN)
        found[group] = sum(rewards[:count]) / count, sum(rewards[-count:]) / count, count
    return found


def _rewards(means: Mapping[str, tuple[float, float, int]], num_epochs: int) -> str:
    if not means:
        return ""
    shown = by_group({group: f"{first:.3f} -> {last:.3f}" for group, (first, last, _) in means.items()})
    count = max(count for _, _, count in means.values())
    which = f"first and last {count}" if count > 1 else "first and last"
    return f"reward {shown} (mean of the {which} of {num_epochs} epoch{'s' if num_epochs != 1 else ''})"
