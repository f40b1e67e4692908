"""The tracker process: follows runs in the metrics and sends their points to a tracker. It never stops a run."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

from rollstream.metrics.sql.client import query
from rollstream.metrics.trackers.follow import Follower, unfinished_runs
from rollstream.metrics.trackers.points import Ask
from rollstream.metrics.trackers.table import opener
from rollstream.schemas.errors import describe
from rollstream.schemas.services import TrackerServiceSettings
from rollstream.schemas.trackers import TrackerSettings

MAX_BACKOFF_S = 300.0
END_TIMEOUT_S = 15.0
"""Maximum seconds for what is left when the service is asked to end."""
QUERY_TIMEOUT_S = 60.0
logger = logging.getLogger(__name__)


async def serve(settings: TrackerServiceSettings) -> None:
    """Run until cancelled, then send what is left. Raises ConfigError for a tracker that cannot be imported.

    What the tracker or the metrics raise is logged, and tried again after a while.
    """
    following = Following(settings.tracker, settings.workspace, settings.runs)
    logger.info("ready (%s)", settings.tracker.kind)
    looking: asyncio.Future[None] | None = None
    backoff_s = 0.0
    try:
        while True:
            looking = asyncio.ensure_future(asyncio.to_thread(following.catch_up))
            try:
                await asyncio.shield(looking)
                backoff_s = 0.0
            except Exception as error:  # noqa: BLE001 -- logged: a tracker that fails must not end the service
                backoff_s = min(MAX_BACKOFF_S, max(settings.tracker.poll_interval_s, 2 * backoff_s))
                _log(error, f"trying again in {backoff_s:.0f} s")
            await asyncio.sleep(max(backoff_s, settings.tracker.poll_interval_s))
    finally:
        await _end(following, looking)


async def _end(following: "Following", looking: "asyncio.Future[None] | None") -> None:
    """Send what the log has, as far as there is time, and close the trackers."""
    ending = asyncio.ensure_future(_last_look(following, looking))
    done, _ = await asyncio.wait({ending}, timeout=END_TIMEOUT_S)
    if not done:
        logger.warning("not all was sent within %.0f s; `rollstream track` sends the rest", END_TIMEOUT_S)
    elif error := ending.exception():
        _log(error, "`rollstream track` sends the rest")


async def _last_look(following: "Following", looking: "asyncio.Future[None] | None") -> None:
    if looking is not None:
        await asyncio.wait({looking})
    try:
        await asyncio.to_thread(following.catch_up, fresh=True)
    finally:
        await asyncio.to_thread(following.close)


def _log(error: BaseException, then: str) -> None:
    errors = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
    for one in errors:
        logger.error("%s; %s", describe(one), then)
        logger.debug("traceback", exc_info=one)


class Following:
    """The runs that a tracker gets: those that are named, else each that has not ended.

    One thread at a time uses it.
    """

    def __init__(self, settings: TrackerSettings, workspace: Path, runs: tuple[str, ...] = ()) -> None:
        self._settings, self._workspace, self._runs = settings, workspace, runs
        self._open = opener(settings, workspace)
        self._followers: dict[str, Follower] = {}
        self.num_points = 0
        """Points that were sent."""

    def look(self, *, fresh: bool = False) -> bool:
        """Send what is new of every run; whether there was nothing. `fresh`: first wait for all that is in the log.

        An error of one run does not keep others from being sent. Raises an ExceptionGroup with all.
        """
        ask = asking(self._workspace, fresh=fresh)
        errors: list[Exception] = []
        is_quiet = True
        for run_id in list(self._followed(ask)):
            follower = self._followers.setdefault(run_id, self._follower(run_id))
            before = follower.num_points
            try:
                follower.look(ask)
            except Exception as error:  # noqa: BLE001 -- whatever a tracker raises; all are raised together below
                errors.append(error)
            self.num_points += follower.num_points - before
            is_quiet &= follower.num_points == before
        if errors:
            raise ExceptionGroup("trackers", errors)
        return is_quiet

    def catch_up(self, *, fresh: bool = False) -> None:
        """Send everything that the metrics have, or with `fresh` the log. Raises as `look` does."""
        while not self.look(fresh=fresh):
            pass

    def close(self) -> None:
        """Close all trackers."""
        for follower in self._followers.values():
            follower.close()

    def _followed(self, ask: Ask) -> Iterator[str]:
        if self._runs:
            yield from self._runs
            return
        running = {run_id for (run_id,) in ask("SELECT run_id FROM runs WHERE state = 'running'")}
        begun = set(unfinished_runs(self._workspace, self._settings))
        for run_id in self._followers.keys() - running - begun:
            self._followers.pop(run_id).close()
        yield from sorted(running | begun)

    def _follower(self, run_id: str) -> Follower:
        return Follower(run_id, self._settings, self._open, self._workspace)


def asking(workspace: Path, *, fresh: bool) -> Ask:
    """Queries of a workspace's metrics. `fresh`: the first one waits for all that is in the log."""
    waits = iter((fresh,))

    def ask(sql: str) -> "list[tuple[object, ...]]":
        found = query(workspace, sql, fresh=next(waits, False), limit=100_000, timeout_s=QUERY_TIMEOUT_S)
        return list(found.rows)

    return ask
