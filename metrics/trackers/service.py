"""The tracker process: follows runs in the metrics and sends their points to a tracker. It never stops a run."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

from rollstream.metrics.sql.client import NotServedError, query
from rollstream.metrics.trackers.follow import TrackedRun, unfinished_runs
from rollstream.metrics.trackers.points import Ask
from rollstream.metrics.trackers.table import opener
from rollstream.schemas.errors import RollstreamError, TrackerError, describe
from rollstream.schemas.services import TrackerServiceSettings
from rollstream.schemas.trackers import TrackerSettings

MAX_BACKOFF_S = 300.0
END_TIMEOUT_S = 15.0
"""Maximum seconds for what is left when the service is asked to end."""
QUERY_TIMEOUT_S = 60.0
MAX_ROWS = 100_000
logger = logging.getLogger(__name__)


async def serve(settings: TrackerServiceSettings) -> None:
    """Run until cancelled, then send what is left. Raises ConfigError for a tracker that cannot be imported.

    What the tracker or the metrics raise is logged, and tried again after a while.
    """
    tracking = Tracking(settings.tracker, settings.workspace, settings.runs, is_served=True)
    logger.info("ready (%s)", settings.tracker.kind)
    sending: asyncio.Future[None] | None = None
    backoff_s = 0.0
    try:
        while True:
            sending = asyncio.ensure_future(asyncio.to_thread(tracking.catch_up))
            try:
                await asyncio.shield(sending)
                backoff_s = 0.0
            except NotServedError:  # it starts, or is being restarted
                backoff_s = 0.0
            except Exception as error:  # noqa: BLE001 -- logged: a tracker that fails must not end the service
                backoff_s = min(MAX_BACKOFF_S, max(settings.tracker.poll_interval_s, 2 * backoff_s))
                _log(error)
            await asyncio.sleep(max(backoff_s, settings.tracker.poll_interval_s))
    finally:
        await _end(tracking, sending)


async def _end(tracking: "Tracking", sending: "asyncio.Future[None] | None") -> None:
    """Send what the log has, as far as there is time, and close the trackers."""
    ending = asyncio.ensure_future(_send_rest(tracking, sending))
    done, _ = await asyncio.wait({ending}, timeout=END_TIMEOUT_S)
    if not done:
        logger.warning("not all was sent within %.0f s; `rollstream track` sends the rest", END_TIMEOUT_S)
    elif error := ending.exception():
        _log(error)
        logger.warning("not all was sent; `rollstream track` sends the rest")


async def _send_rest(tracking: "Tracking", sending: "asyncio.Future[None] | None") -> None:
    if sending is not None:
        await asyncio.wait({sending})
    try:
        await asyncio.to_thread(tracking.catch_up, fresh=True)
    finally:
        await asyncio.to_thread(tracking.close)


def _log(error: BaseException) -> None:
    for one in error.exceptions if isinstance(error, ExceptionGroup) else (error,):
        logger.error("%s", one if isinstance(one, RollstreamError) else describe(one))


class Tracking:
    """The runs that a tracker gets: those that are named, else each that has not ended.

    One thread at a time uses it.
    """

    def __init__(
        self, settings: TrackerSettings, workspace: Path, runs: tuple[str, ...] = (), *, is_served: bool = False
    ) -> None:
        """`is_served`: only the metrics service is asked, and nothing is sent while it is not up."""
        self._is_served = is_served
        self._settings, self._workspace, self._named = settings, workspace, runs
        self._open = opener(settings, workspace)
        self._runs: dict[str, TrackedRun] = {}
        self.num_points = 0
        """Points that were sent."""

    def send_new(self, *, fresh: bool = False) -> bool:
        """Send new points of every run; return whether there were none. `fresh`: first wait for all that is in the log.

        An error of one run does not keep others from being sent. Raises QueryError if the metrics cannot be asked,
        TrackerError for what the tracker raises, and an ExceptionGroup for several errors.
        """
        ask = asking(self._workspace, fresh=fresh, is_served=self._is_served)
        errors: list[RollstreamError] = []
        is_quiet = True
        for run_id in list(self._followed(ask)):
            run = self._runs.setdefault(run_id, self._tracked(run_id))
            before = run.num_points
            try:
                run.send_new(ask)
            except NotServedError:
                raise
            except RollstreamError as error:
                errors.append(error)
            except Exception as error:
                logger.info("tracker %s failed", self._settings.kind, exc_info=error)
                text = f"tracker {self._settings.kind}: run {run_id}: {describe(error)}"
                errors.append(TrackerError(f"{text}; correct this, and everything that is missing will be sent"))
            self.num_points += run.num_points - before
            is_quiet &= run.num_points == before
        if errors:
            raise errors[0] if len(errors) == 1 else ExceptionGroup("trackers", errors)
        return is_quiet

    def catch_up(self, *, fresh: bool = False) -> None:
        """Send everything that the metrics have, or with `fresh` the log. Raises as `send_new` does."""
        while not self.send_new(fresh=fresh):
            pass

    def close(self) -> None:
        """Close all trackers."""
        for run in self._runs.values():
            run.close()

    def _followed(self, ask: Ask) -> Iterator[str]:
        if self._named:
            yield from self._named
            return
        running = {run_id for (run_id,) in ask("SELECT run_id FROM runs WHERE state = 'running'")}
        begun = set(unfinished_runs(self._workspace, self._settings))
        for run_id in self._runs.keys() - running - begun:
            self._runs.pop(run_id).close()
        yield from sorted(running | begun)

    def _tracked(self, run_id: str) -> TrackedRun:
        return TrackedRun(run_id, self._settings, self._open, self._workspace)


def asking(workspace: Path, *, fresh: bool, is_served: bool) -> Ask:
    """Queries of a workspace's metrics. `fresh`: the first one waits for all that is in the log. `is_served`: as in
    `query`.
    """
    waits = iter((fresh,))

    def ask(sql: str) -> "list[tuple[object, ...]]":
        is_first = next(waits, False)
        found = query(workspace, sql, fresh=is_first, limit=MAX_ROWS, timeout_s=QUERY_TIMEOUT_S, is_served=is_served)
        return list(found.rows)

    return ask
