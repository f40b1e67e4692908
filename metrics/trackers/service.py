"""The tracker process: follows runs in the metrics and sends their points to a tracker. It never stops a run."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from rollstream.metrics.sql.client import NotServedError, query
from rollstream.metrics.trackers.follow import ENDED, TrackedRun, folder_of, unfinished_runs
from rollstream.metrics.trackers.points import Ask, TrackerDownError, TrackerError, file_name
from rollstream.metrics.trackers.table import opener
from rollstream.schemas.errors import RollstreamError, describe
from rollstream.schemas.services import TrackerServiceSettings
from rollstream.schemas.trackers import TrackerSettings

MAX_BACKOFF_S = 300.0
BLOCKED_S = 300.0
"""Seconds after which a tracker that does not return is reported."""
UNSERVED_S = 30.0
"""Seconds after which a metrics service that is not up is reported."""
END_TIMEOUT_S = 15.0
"""Maximum seconds for what is left when the service is asked to end."""
QUERY_TIMEOUT_S = 60.0
MAX_ROWS = 100_000
logger = logging.getLogger(__name__)


async def serve(settings: TrackerServiceSettings) -> None:
    """Run until cancelled, then send what is left. Raises ConfigError for a tracker that cannot be imported.

    What the tracker or the metrics raise is logged, and tried again after a while; TrackerDownError ends the process.
    """
    tracking = Tracking(settings.tracker, settings.workspace, settings.runs, is_served=True)
    logger.info("ready (%s)", settings.tracker.kind)
    sending: asyncio.Future[None] | None = None
    interval_s = settings.tracker.poll_interval_s
    backoff_s = unserved_s = 0.0
    try:
        while True:
            sending = asyncio.ensure_future(asyncio.to_thread(tracking.catch_up))
            await _warn_if_blocked(sending, settings.tracker.kind)
            try:
                await asyncio.shield(sending)
                backoff_s = unserved_s = 0.0
            except NotServedError as error:  # it starts, or is being restarted
                if unserved_s <= UNSERVED_S < unserved_s + interval_s:
                    logger.error("%s; nothing is sent until then", error)
                unserved_s += interval_s
            except TrackerDownError:
                sending = None
                raise
            except Exception as error:  # noqa: BLE001 -- logged: a tracker that fails must not end the service
                backoff_s = min(MAX_BACKOFF_S, max(interval_s, 2 * backoff_s))
                _log(error)
            await asyncio.sleep(max(backoff_s, interval_s))
    finally:
        if sending is not None:
            await _end(tracking, sending)


async def _warn_if_blocked(sending: "asyncio.Future[None]", kind: str) -> None:
    done, _ = await asyncio.wait({sending}, timeout=BLOCKED_S)
    if not done:
        logger.error(
            "tracker %s has been sending for %.0f s and did not return; nothing else waits for it", kind, BLOCKED_S
        )
        await asyncio.wait({sending})


async def _end(tracking: "Tracking", sending: "asyncio.Future[None]") -> None:
    """Send what the log has, as far as there is time, and close the trackers."""
    ending = asyncio.ensure_future(_send_rest(tracking, sending))
    done, _ = await asyncio.wait({ending}, timeout=END_TIMEOUT_S)
    if not done:
        logger.error("not all was sent within %.0f s; `rollstream track` sends the rest", END_TIMEOUT_S)
    elif isinstance(error := ending.exception(), NotServedError):
        logger.error(
            "not all may have been sent, because the metrics service has ended; `rollstream track` sends the rest"
        )
    elif error is not None:
        _log(error)
        logger.error("not all was sent; `rollstream track` sends the rest")


async def _send_rest(tracking: "Tracking", sending: "asyncio.Future[None]") -> None:
    await asyncio.wait({sending})
    try:
        await asyncio.to_thread(tracking.catch_up, to_the_end=True)
    finally:
        await asyncio.to_thread(tracking.close)


def _log(error: BaseException) -> None:
    for one in error.exceptions if isinstance(error, ExceptionGroup) else (error,):
        logger.error("%s", one if isinstance(one, RollstreamError) else describe(one))


def has_whole_run(settings: TrackerSettings, workspace: Path, run_id: str) -> bool:
    """Whether a tracker got all of a run that has ended."""
    return (folder_of(workspace, settings) / ENDED / file_name(run_id)).exists()


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

    @property
    def num_points(self) -> int:
        """Points that were sent of the runs that are followed."""
        return sum(run.num_points for run in self._runs.values())

    def catch_up(self, *, to_the_end: bool = False) -> None:
        """Send the points that the metrics have, with `to_the_end` those that the log has.

        An error of one run does not keep others from being sent. Raises QueryError if the metrics cannot be asked,
        TrackerError for what the tracker raises, and an ExceptionGroup for several errors.
        """
        ask_fresh = self._asking(fresh=True)
        ask = ask_fresh if to_the_end else self._asking(fresh=False)
        errors: list[RollstreamError] = []
        for run_id in list(self._followed(ask)):
            run = self._runs.setdefault(run_id, self._tracked(run_id))
            try:
                while run.send_new(ask, ask_fresh):
                    pass
                if to_the_end:  # a run that has ended is finished by a turn without points
                    run.send_new(ask, ask_fresh)
            except (NotServedError, TrackerDownError):
                raise
            except RollstreamError as error:
                errors.append(error)
            except Exception as error:
                logger.info("tracker %s failed", self._settings.kind, exc_info=error)
                text = f"tracker {self._settings.kind}: run {run_id}: {describe(error)}"
                errors.append(TrackerError(f"{text}; correct this, and everything that is missing will be sent"))
        if errors:
            raise errors[0] if len(errors) == 1 else ExceptionGroup("trackers", errors)

    def forget(self) -> None:
        """Forget what the tracker has of the named runs, so that everything is sent again."""
        for run_id in self._named:
            self._runs.setdefault(run_id, self._tracked(run_id)).forget()

    def close(self) -> None:
        """Close all trackers. Raises whatever one raises."""
        with ExitStack() as closing:
            for run in self._runs.values():
                closing.callback(run.close)

    def _followed(self, ask: Ask) -> Iterator[str]:
        if self._named:
            yield from self._named
            return
        running = {run_id for (run_id,) in ask("SELECT run_id FROM runs WHERE state = 'running'")}
        begun = set(unfinished_runs(self._workspace, self._settings))
        for run_id in self._runs.keys() - running - begun:
            with suppress(Exception):  # what it was to get is recorded
                self._runs.pop(run_id).close()
        yield from sorted(running | begun)

    def _tracked(self, run_id: str) -> TrackedRun:
        return TrackedRun(run_id, self._settings, self._open, self._workspace)

    def _asking(self, *, fresh: bool) -> Ask:
        def ask(sql: str) -> "list[tuple[object, ...]]":
            found = query(
                self._workspace,
                sql,
                fresh=fresh,
                limit=MAX_ROWS,
                timeout_s=QUERY_TIMEOUT_S,
                is_served=self._is_served,
            )
            return list(found.rows)

        return ask
