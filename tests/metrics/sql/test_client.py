"""The way to a workspace's service: a port that another program has since, and queries that are too long."""

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from rollstream.metrics.projection.database import Database
from rollstream.metrics.sql.client import MAX_SQL_BYTES, folder_id, is_caught_up, query
from rollstream.schemas.errors import QueryError
from tests.metrics.conftest import empty_file

ANSWERS = [
    (401, b'{"error":"the token is missing or wrong"}'),  # another workspace's service
    (404, b"Not Found"),
    (200, b"<html></html>"),
    (404, b'{"error":"no such page"}'),
    (200, b"[1]"),
    (299, b"{}"),
]


@contextmanager
def another_program(workspace: Path, status: int, body: bytes) -> Iterator[int]:
    """A port that a killed service of the workspace had, and that answers so now."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        (workspace / "metrics.json").write_text(json.dumps({"port": server.server_port, "pid": 1}))
        (workspace / "sql.token").write_text("t" * 64)
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def test_the_service_of_the_original_is_not_asked_for_a_copy_of_its_workspace(tmp_path: Path) -> None:
    original, copy = tmp_path / "original", tmp_path / "copy"
    original.mkdir()
    empty_file(original)
    with another_program(original, 200, b'{"columns":["n"],"types":["INTEGER"],"rows":[[7]],"is_cut":false}'):
        port = {"port": json.loads((original / "metrics.json").read_text())["port"], "folder": folder_id(original)}
        (original / "metrics.json").write_text(json.dumps(port))
        shutil.copytree(original, copy)
        assert query(original, "SELECT 1").rows == ((7,),)
        assert query(copy, "SELECT 1").rows == ((1,),)


@pytest.mark.parametrize(("status", "body"), ANSWERS)
def test_the_file_answers_where_another_program_has_the_services_port(tmp_path: Path, status: int, body: bytes) -> None:
    empty_file(tmp_path)
    with another_program(tmp_path, status, body):
        assert query(tmp_path, "SELECT 1").rows == ((1,),)
        assert not is_caught_up(tmp_path)


@pytest.mark.slow
def test_a_file_in_use_is_named_together_with_the_port_that_another_program_has(tmp_path: Path) -> None:
    Database(tmp_path / "metrics.duckdb").close()
    code = "import duckdb, sys; held = duckdb.connect(sys.argv[1]); print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(tmp_path / "metrics.duckdb")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        with another_program(tmp_path, 404, b"Not Found") as port, pytest.raises(QueryError) as refused:
            query(tmp_path, "SELECT 1")
        child.communicate()
    assert f"is in use by another process (PID {child.pid})" in str(refused.value)
    assert f"port {port}, which {tmp_path / 'metrics.json'} names, answers like another program" in str(refused.value)


def test_a_query_that_is_too_long_is_refused_with_its_size(tmp_path: Path) -> None:
    empty_file(tmp_path)
    long = f"SELECT '{'x' * MAX_SQL_BYTES}'"
    with pytest.raises(QueryError, match=r"SQL: the query has 1,048,585 bytes, at most 1,048,576 are allowed; shorten"):
        query(tmp_path, long)
    longest = f"SELECT length('{'x' * (MAX_SQL_BYTES - 17)}')"
    assert query(tmp_path, longest).rows == ((MAX_SQL_BYTES - 17,),)
