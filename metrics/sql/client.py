"""Asks a workspace's metrics by SQL: through the service if it is up, else from the file itself."""

import http.client
import json
import time
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

from rollstream.metrics.projection.columns import quoted
from rollstream.metrics.projection.connection import (
    OPEN_CONFIG,
    FileInUseError,
    MetricsFileError,
    connect,
    metrics_file,
)
from rollstream.metrics.projection.tables import are_of_another_version
from rollstream.metrics.sql.query import Limits, start
from rollstream.metrics.sql.result import Result, result_of
from rollstream.schemas.errors import QueryError

HOST = "127.0.0.1"
"""Address of a workspace's metrics service."""
WAIT_MARGIN_S = 10.0
"""Seconds granted to the service beyond the time to catch up and the query itself."""
PATIENCE_S = 5.0
"""Maximum seconds for which a service that starts or ends holds the file without answering."""
POLL_S = 0.1
MAX_SQL_BYTES = 1024 * 1024
NAMED_RUNS = 10
"""Runs that an error names."""
MAX_QUOTED = 200
"""Characters of an answer that an error quotes."""


def token_file(workspace: Path) -> Path:
    """The file that holds the token."""
    return workspace / "sql.token"


def port_file(workspace: Path) -> Path:
    """The file that holds the port while the service runs."""
    return workspace / "metrics.json"


def folder_id(workspace: Path) -> str:
    """Identity of a workspace's folder, which a copy of it does not have: device and inode."""
    found = workspace.stat()
    return f"{found.st_dev}:{found.st_ino}"


class NotServedError(QueryError):
    """The metrics service is not up."""


def query(
    workspace: Path,
    sql: str,
    *,
    fresh: bool = True,
    limit: int = 10_000,
    timeout_s: float = 30.0,
    is_served: bool = False,
) -> Result:
    """Rows of one SELECT, at most `limit`. `fresh`: first wait for all that is in the log now.

    `is_served`: ask the service alone, and never open the file, which would keep a service that starts from it. Raises
    QueryError, in one line, for a query that is refused, wrong or too slow, and for a file that is absent or in use;
    NotServedError if only the service was to be asked, and is not up.
    """
    size_bytes = len(sql.encode(errors="replace"))
    if size_bytes > MAX_SQL_BYTES:
        raise QueryError(f"SQL: the query has {size_bytes:,} bytes, at most {MAX_SQL_BYTES:,} are allowed; shorten it")
    asked = {"sql": sql, "fresh": fresh, "limit": limit, "timeout_s": timeout_s}
    num_found_in_use = 0
    while (answered := _ask_service(workspace, asked)).answer is None:
        if is_served:
            raise NotServedError(f"the metrics service of {workspace} is not up{answered.other}; start it")
        try:
            return _ask_file(workspace, sql, limit=limit, timeout_s=timeout_s)
        except MetricsFileError as error:
            num_found_in_use += 1
            if not isinstance(error, FileInUseError) or num_found_in_use * POLL_S > PATIENCE_S:
                raise QueryError(f"{error}{answered.other or _elsewhere(workspace, error)}") from error
            time.sleep(POLL_S)
    if "error" in answered.answer:
        raise QueryError(answered.answer["error"])
    return result_of(answered.answer)


def check_run(workspace: Path, run_id: str, *, fresh: bool = True) -> None:
    """Raises QueryError for a run that the metrics do not have; see `query` for `fresh`."""
    if query(workspace, f"SELECT 1 FROM runs WHERE run_id = {quoted(run_id)}", fresh=fresh).rows:
        return
    newest = f"SELECT run_id FROM runs ORDER BY started_at DESC, run_id LIMIT {NAMED_RUNS}"
    known = ", ".join(row[0] for row in query(workspace, newest, fresh=False).rows) or "none yet"
    raise QueryError(f"run {run_id} does not exist; known runs, the newest first: {known}")


class _Answered(NamedTuple):
    """The answer of a workspace's service; without one, what to add to an error if another program has its port."""

    answer: dict[str, Any] | None = None
    other: str = ""


def _elsewhere(workspace: Path, error: MetricsFileError) -> str:
    """A place to ask at if the file is in use and the service that has written its port does not answer here, or ""."""
    path = port_file(workspace)
    if not isinstance(error, FileInUseError) or not path.exists():
        return ""
    return (
        f", which is on the port in {path} and does not answer here; if it runs in another container, run the command "
        "in that one: `docker compose exec metrics rollstream sql QUERY`"
    )


def is_caught_up(workspace: Path) -> bool:
    """Wait until the service has all that is in the log now; False if it is not up. Never opens the file.

    Raises QueryError if it is up and cannot do it.
    """
    answer = _ask_service(workspace, {"sql": "SELECT 1", "fresh": True, "limit": 1, "timeout_s": 30.0}).answer
    if answer is not None and "error" in answer:
        raise QueryError(answer["error"])
    return answer is not None


def _ask_service(workspace: Path, asked: dict[str, Any]) -> _Answered:
    """Ask the service; it is not up, or ends, where there is no answer.

    A port file that a killed service left may name a port that another program has since: its answers are not used. In
    a copied workspace, a port file names the port of the original's service, which is not asked.
    """
    try:
        served = json.loads(port_file(workspace).read_text())
        port, own = int(served["port"]), folder_id(workspace)
        if served.get("folder", own) != own:
            return _Answered()
        token = token_file(workspace).read_text().strip()
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return _Answered()
    except OSError as error:
        raise QueryError(f"{error.filename} cannot be read ({error.strerror}); run the query as its owner") from error
    connection = http.client.HTTPConnection(HOST, port, timeout=2 * asked["timeout_s"] + WAIT_MARGIN_S)
    try:
        connection.request("POST", "/query", json.dumps(asked), {"Authorization": f"Bearer {token}"})
        response = connection.getresponse()
        text = response.read()
        if response.status == HTTPStatus.SERVICE_UNAVAILABLE:
            return _Answered()
        answer = json.loads(text)
    except (ConnectionRefusedError, ConnectionResetError, http.client.RemoteDisconnected):
        return _Answered()
    except TimeoutError as error:
        raise QueryError(f"the metrics service on port {port} does not answer; restart it") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        return _Answered(other=_of_another(workspace, port, f"invalid response: {error}"))
    finally:
        connection.close()
    if _is_of_service(response.status, answer):
        return _Answered(answer)
    return _Answered(other=_of_another(workspace, port, str(answer)[:MAX_QUOTED]))


def _is_of_service(status: int, answer: Any) -> bool:
    key = {200: "rows", 400: "error"}.get(status)
    return key is not None and isinstance(answer, dict) and key in answer


def _of_another(workspace: Path, port: int, answer: str) -> str:
    return (
        f"; port {port}, which {port_file(workspace)} names, answers like another program ({answer}): restart the "
        f"metrics service"
    )


def _ask_file(workspace: Path, sql: str, *, limit: int, timeout_s: float) -> Result:
    path = metrics_file(workspace)
    if not path.exists():
        raise QueryError(
            f"workspace {workspace} has no metrics; give the --workspace of `rollstream serve metrics`, which has "
            "those of runs with external services, or run `rollstream finetune`"
        )
    connection = connect(path, read_only=True, config=OPEN_CONFIG)
    try:
        is_old = are_of_another_version(connection)
        asked = start(connection, path, sql, Limits(limit, timeout_s))
        try:
            if not asked.wait(timeout_s):
                raise asked.took_too_long()
            return result_of(json.loads(asked.answer()))
        except QueryError as error:
            if not is_old:
                raise
            raise QueryError(
                f"{error}; the metrics file {path} was made by another version of rollstream, whose tables may differ: "
                f"`rollstream rebuild` makes it again from the log or an export"
            ) from error
        finally:
            asked.close()
    finally:
        connection.close()
