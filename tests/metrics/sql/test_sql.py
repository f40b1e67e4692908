"""SQL from outside: what is refused, the limits, the service, and the file read without a service."""

import asyncio
import http.client
import json
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pytest
from click.testing import CliRunner

from rollstream.eventlog.log import TopicPartition
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.harness.cli.main import rollstream
from rollstream.metrics import service
from rollstream.metrics.projection import projector
from rollstream.metrics.projection.database import Database
from rollstream.metrics.sql.client import query
from rollstream.metrics.sql.query import MEMORY_BYTES, Limits, start
from rollstream.metrics.sql.result import Result, result_of
from rollstream.schemas.base import Event
from rollstream.schemas.errors import LogError, QueryError, RollstreamError

REFUSED = [
    "INSERT INTO offsets VALUES ('a', 1, 1, now())",
    "WITH x AS (DELETE FROM offsets RETURNING 1) SELECT * FROM x",
    "UPDATE offsets SET next_offset = 0",
    "DROP TABLE offsets",
    "CREATE TABLE mine (i INTEGER)",
    "CREATE MACRO mine() AS 1",
    "COPY (SELECT 1) TO '{here}/out.csv'",
    "COPY offsets FROM '{here}/secret.csv'",
    "EXPORT DATABASE '{here}/out'",
    "ATTACH '{here}/other.duckdb'",
    "DETACH metrics",
    "INSTALL httpfs",
    "LOAD httpfs",
    "PRAGMA database_list",
    "CALL pragma_version()",
    "SET threads = 8",
    "RESET threads",
    "SET lock_configuration = false",
    "CHECKPOINT",
    "BEGIN",
    "EXPLAIN SELECT 1",
    "PREPARE mine AS SELECT 1",
    "SELECT 1; SELECT 2",
    "",
    "SELECT * FROM read_csv('{here}/secret.csv')",
    "SELECT * FROM '{here}/secret.csv'",
    "SELECT * FROM read_text('{here}/secret.csv')",
    "SELECT * FROM read_blob('{here}/secret.csv')",
    "SELECT * FROM read_json('{here}/secret.csv')",
    "SELECT * FROM read_parquet('https://example.com/a.parquet')",
    "SELECT * FROM sniff_csv('{here}/secret.csv')",
    "SELECT * FROM parquet_metadata('{here}/secret.csv')",
    "SELECT * FROM glob('{here}/*')",
    "SELECT * FROM query('DROP TABLE offsets')",
    "SELECT getenv('HOME')",
    "SELECT * FROM secret",
    "SELECT * FROM sqlite_scan('{here}/a.db', 'a')",
    "SELECT nonsense FROM nowhere",
    "SELEC 1",
]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """One for all of this module: nothing that is asked of it may change it."""
    found = Database(tmp_path_factory.mktemp("database") / "metrics.duckdb")
    yield found
    found.close()


ENDED = (503, b'{"error":"the metrics service has stopped; run the query again"}')


def post(workspace: Path, sql: str, answers: list[tuple[int, bytes]]) -> None:
    """Ask the service itself, with a long time limit."""
    port = json.loads((workspace / "metrics.json").read_text())["port"]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps({"sql": sql, "fresh": False, "timeout_s": 600})
    connection.request("POST", "/query", body, {"Authorization": f"Bearer {(workspace / 'sql.token').read_text()}"})
    response = connection.getresponse()
    answers.append((response.status, response.read()))
    connection.close()


def ask(
    database: Database, sql: str, *, limit: int = 10, timeout_s: float = 20, memory_bytes: int = MEMORY_BYTES
) -> Result:
    """Run a query like the service: in a process of its own, forked from the one that holds the file."""
    limits = Limits(limit, timeout_s, memory_bytes)
    query = database.fork(lambda connection: start(connection, database.path, sql, limits))
    try:
        if not query.wait(timeout_s):
            raise query.took_too_long()
        return result_of(json.loads(query.answer()))
    finally:
        query.close()
        database.fork_ended()


@pytest.fixture(autouse=True)
def _no_long_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that is asked to end finishes its poll of a quiet log first."""
    monkeypatch.setattr(projector, "POLL_S", 0.05)


@contextmanager
def running(workspace: Path, found: list[Event], log: MemoryLog | None = None) -> Iterator[Callable[[Event], None]]:
    """The service in a thread of its own, on a log in memory; gives what appends to that log."""
    log = log or MemoryLog(num_partitions=2)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(log.send_all(found))
    task = loop.create_task(service.run(log, workspace))

    def work() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(asyncio.wait({task}))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        while not (workspace / "metrics.json").exists():
            assert not task.done(), task.exception()
        yield lambda event: asyncio.run_coroutine_threadsafe(log.send(event), loop).result() and None
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(20)
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
    assert task.cancelled()


@pytest.mark.parametrize("sql", REFUSED)
def test_a_statement_other_than_a_plain_select_is_refused(sql: str, database: Database, tmp_path: Path) -> None:
    (tmp_path / "secret.csv").write_text("a\n1\n")
    secret = [1]  # noqa: F841  (a Python variable, which SQL must not see)
    with pytest.raises(QueryError) as error:
        ask(database, sql.replace("{here}", str(tmp_path)))
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir() if "metrics" not in path.name) == ["secret.csv"]


@pytest.mark.parametrize("sql", ["SELECT 1", "FROM offsets", "SHOW TABLES", "DESCRIBE runs", "VALUES (1)", "SELECT 1;"])
def test_reading_in_any_form_is_allowed(sql: str, database: Database) -> None:
    assert ask(database, sql).columns


def test_a_pivot_without_listed_values_is_refused_with_the_remedy(database: Database) -> None:
    pivot = "PIVOT (SELECT 1 AS a) ON a{} USING count(*)"
    assert ask(database, pivot.format(" IN (1, 2)")).columns == ("1", "2")
    with pytest.raises(QueryError, match=r"list them: PIVOT t ON column IN \(\.\.\.\)$"):
        ask(database, pivot.format(""))


def test_rows_beyond_the_limit_are_cut_and_flagged(database: Database) -> None:
    result = ask(database, "SELECT * FROM range(100)", limit=3)
    assert (result.rows, result.is_cut) == (((0,), (1,), (2,)), True)
    assert not ask(database, "SELECT * FROM range(3)", limit=3).is_cut


LONG_CALL = "SELECT levenshtein(repeat('ab', 200000), repeat('ba', 200000))"
"""One call of a function that takes minutes, in which DuckDB looks at no limit."""


def test_a_query_is_stopped_inside_one_function_call_and_the_next_one_runs(database: Database) -> None:
    with pytest.raises(QueryError, match=r"took longer than 0\.3 s and was stopped"):
        ask(database, LONG_CALL, timeout_s=0.3)
    assert ask(database, "SELECT 1").rows == ((1,),)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT repeat('x', 4000000000)",
        "SELECT length(repeat('x', 700000000) || repeat('y', 700000000))",
        "SELECT list(repeat('x', 1000000) || range) FROM range(3000)",
    ],
)
def test_a_query_gets_no_more_memory_than_its_limit_inside_one_call_either(sql: str, database: Database) -> None:
    with pytest.raises(QueryError, match=r"needed more than 0\.5 GB of memory and was stopped"):
        ask(database, sql, memory_bytes=500_000_000)
    assert ask(database, "SELECT 1").rows == ((1,),)


def test_a_query_that_sorts_more_than_its_memory_spills_and_leaves_nothing_behind(tmp_path: Path) -> None:
    database = Database(tmp_path / "metrics.duckdb")
    sql = "SELECT count(*) FROM (SELECT DISTINCT md5(range::VARCHAR) FROM range(3000000))"
    assert ask(database, sql, timeout_s=60, memory_bytes=300_000_000).rows == ((3_000_000,),)
    database.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.duckdb"]


def test_the_writer_goes_on_beside_a_query_which_sees_what_was_there_when_it_began(tmp_path: Path) -> None:
    database = Database(tmp_path / "metrics.duckdb")
    database.write({}, {TopicPartition("tasks", 0): 1})
    sql = "SELECT sum(next_offset)::BIGINT FROM offsets, range(60000000)"
    query = database.fork(lambda connection: start(connection, database.path, sql, Limits(1, 60)))
    for number in range(2, 40):
        database.write({}, {TopicPartition("tasks", 0): number})
    assert not query.wait(0)
    assert query.wait(60)
    assert result_of(json.loads(query.answer())).rows == ((60_000_000,),)
    query.close()
    database.fork_ended()
    assert ask(database, "SELECT next_offset FROM offsets").rows == ((39,),)
    database.close()


def test_long_queries_keep_neither_short_ones_nor_the_projector_waiting(tmp_path: Path, synthetic: Any) -> None:
    found = list(synthetic.all_events())
    answers: list[tuple[int, bytes]] = []
    asking = [threading.Thread(target=post, args=(tmp_path, LONG_CALL, answers)) for _ in range(4)]
    with running(tmp_path, found[:-1]) as send:
        for thread in asking:
            thread.start()
        assert query(tmp_path, "SELECT state FROM runs").rows == (("running",),)
        send(found[-1])
        assert query(tmp_path, "SELECT state FROM runs").rows == (("completed",),)
        assert all(thread.is_alive() for thread in asking)
    for thread in asking:
        thread.join()
    assert answers == [ENDED] * 4


def test_values_come_as_json(database: Database) -> None:
    sql = (
        "SELECT TIMESTAMP '2026-01-02 03:04:05', 1.5::DECIMAL(4, 2), MAP {'a': 1.0}, [1, NULL], 'nan'::DOUBLE, "
        "170141183460469231731687303715884105727, {'x': DATE '2026-01-02'}, '\\xAB'::BLOB, INTERVAL 1 DAY"
    )
    result = ask(database, sql, limit=1)
    json.dumps(result.rows, allow_nan=False)
    assert result.rows[0][:4] == ("2026-01-02 03:04:05", 1.5, {"a": 1.0}, [1, None])


def test_the_service_answers_with_all_that_is_in_the_log_now(tmp_path: Path, synthetic: Any) -> None:
    found = list(synthetic.all_events())
    with running(tmp_path, found[:-1]) as send:
        assert query(tmp_path, "SELECT state FROM runs").rows == (("running",),)
        for event in found[-1:]:
            send(event)
            assert query(tmp_path, "SELECT state FROM runs").rows == (("completed",),)
        with pytest.raises(QueryError, match="only SELECT is allowed, not DROP"):
            query(tmp_path, "DROP TABLE offsets")
        assert len(query(tmp_path, "SELECT * FROM outcomes", limit=5).rows) == 5
    assert not (tmp_path / "metrics.json").exists()
    result = query(tmp_path, "SELECT epoch, avg_reward, trained_groups FROM epoch_summary")
    assert (result.columns, len(result.rows)) == (("epoch", "avg_reward", "trained_groups"), 2)


def test_events_before_the_stop_are_still_projected(tmp_path: Path, synthetic: Any) -> None:
    with running(tmp_path, []) as send:
        for event in synthetic.all_events():
            send(event)
    assert query(tmp_path, "SELECT count(*) FROM outcomes").rows == ((39,),)


def test_only_the_owner_reads_the_token_and_nobody_asks_without_it(tmp_path: Path) -> None:
    with running(tmp_path, []):
        token = tmp_path / "sql.token"
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        token.write_text("x" * 64)
        with pytest.raises(QueryError, match=r"answers like another program .*token is missing or wrong.*"):
            query(tmp_path, "SELECT 1")


class LogWithOutages(MemoryLog):
    """A log whose broker may be away."""

    is_away = False

    async def end_offsets(self, topic: str) -> dict[int, int]:
        if self.is_away:
            raise LogError("no broker answers")
        return await super().end_offsets(topic)


def test_without_waiting_the_metrics_answer_though_the_broker_does_not(tmp_path: Path, synthetic: Any) -> None:
    log = LogWithOutages(num_partitions=2)
    with running(tmp_path, list(synthetic.all_events()), log):
        query(tmp_path, "SELECT 1")
        log.is_away = True
        with pytest.raises(QueryError, match="no broker answers; add --no-wait to query what the metrics have"):
            query(tmp_path, "SELECT 1")
        options = ["--no-wait", "--workspace", str(tmp_path)]
        answer = CliRunner().invoke(rollstream, ["sql", "SELECT run_id FROM runs", "--format", "csv", *options])
        assert answer.stdout.split() == ["run_id", synthetic.run_id]
        drawn = CliRunner().invoke(rollstream, ["plot", synthetic.run_id, "-o", str(tmp_path / "run.png"), *options])
        assert drawn.exception is None
        log.is_away = False


def test_a_port_file_that_a_killed_service_left_is_passed_over(tmp_path: Path) -> None:
    Database(tmp_path / "metrics.duckdb").close()
    (tmp_path / "metrics.json").write_text(json.dumps({"port": 9, "pid": 1}))
    (tmp_path / "sql.token").write_text("t" * 64)
    assert query(tmp_path, "SELECT 1").rows == ((1,),)


def test_a_query_of_a_workspace_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QueryError, match="has no metrics; give the --workspace of `rollstream serve metrics`"):
        query(tmp_path, "SELECT 1")


def test_the_file_itself_is_closed_to_the_outside_too(tmp_path: Path) -> None:
    Database(tmp_path / "metrics.duckdb").close()
    with pytest.raises(QueryError, match="disabled by configuration"):
        query(tmp_path, "SELECT * FROM read_text('/etc/hostname')")


@contextmanager
def held(workspace: Path, seconds: float) -> Iterator[int]:
    """Another process has the metrics file open for so long; its id."""
    path = workspace / "metrics.duckdb"
    Database(path).close()
    code = (
        f"import duckdb, time; held = duckdb.connect({str(path)!r}); print('held', flush=True); time.sleep({seconds})"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"held\n"
            yield child.pid
        finally:
            child.kill()


@pytest.mark.slow
def test_a_file_in_use_by_another_process_is_named(tmp_path: Path) -> None:
    with held(tmp_path, 60) as pid:
        with pytest.raises(QueryError, match=rf"metrics\.duckdb is in use by another process \(PID {pid}\)"):
            query(tmp_path, "SELECT 1")
        with pytest.raises(RollstreamError, match="is in use by another process"):
            asyncio.run(service.run(MemoryLog(), tmp_path))


@pytest.mark.slow
def test_a_service_that_answers_in_its_container_only_is_to_be_asked_there(tmp_path: Path) -> None:
    with held(tmp_path, 60):
        (tmp_path / "metrics.json").write_text(json.dumps({"port": 9, "pid": 1}))
        (tmp_path / "sql.token").write_text("t" * 64)
        with pytest.raises(QueryError, match=r"in use .* in another container, .*`docker compose exec metrics rollstr"):
            query(tmp_path, "SELECT 1")


@pytest.mark.slow
def test_a_file_that_is_let_go_of_in_a_moment_is_waited_for(tmp_path: Path) -> None:
    with held(tmp_path, 0.5):
        assert query(tmp_path, "SELECT 1").rows == ((1,),)


def test_a_service_that_is_asked_to_end_does_not_wait_for_a_long_query(tmp_path: Path) -> None:
    answers: list[tuple[int, bytes]] = []
    with running(tmp_path, []):
        slow = "SELECT count(*) FROM range(1000000) a, range(1000000) b WHERE a.range % 7 = b.range % 11"
        asking = threading.Thread(target=post, args=(tmp_path, slow, answers))
        asking.start()
        time.sleep(0.5)
        began = time.monotonic()
    asking.join()
    assert time.monotonic() - began < 10
    assert answers == [ENDED]
    assert query(tmp_path, "SELECT 1").rows == ((1,),)


def test_a_port_in_use_is_one_clear_line(tmp_path: Path) -> None:
    with running(tmp_path / "one", []):
        port = json.loads((tmp_path / "one" / "metrics.json").read_text())["port"]
        with pytest.raises(RollstreamError, match=rf"port {port} of 127\.0\.0\.1 cannot be used for SQL"):
            asyncio.run(service.run(MemoryLog(), tmp_path / "two", port=port))
    assert not (tmp_path / "two" / "metrics.json").exists()


def test_a_workspace_that_is_not_a_folder_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RollstreamError, match="is not writable"):
        asyncio.run(service.run(MemoryLog(), tmp_path / "file"))


def test_the_error_of_a_file_that_is_not_a_database_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "metrics.duckdb").write_bytes(b"no database at all" * 1000)
    with pytest.raises(QueryError, match=r"metrics\.duckdb cannot be (read|opened): .* remove it"):
        query(tmp_path, "SELECT 1")


def test_duckdb_is_the_version_that_these_refusals_were_tried_on() -> None:
    assert duckdb.__version__.startswith("2.")
