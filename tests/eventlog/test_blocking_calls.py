"""A store that is away for a while is tried again; what is gone or changed is not."""

import asyncio
import errno
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.blocking_calls import NotNeededError, Retry, in_own_thread, own_threads_ended, retrying
from rollstream.schemas.errors import ArtifactError, StoreUnavailableError
from tests.rigs.remote_outage import RemoteFileSystem

SHORT = Retry(patience_s=0.2, first_wait_s=0.01, max_wait_s=0.02)


class Flaky:
    """A call that fails so many times before it answers."""

    def __init__(self, *errors):
        self.errors = list(errors)

    def __call__(self):
        if self.errors:
            raise self.errors.pop(0)
        return "here"


def test_an_outage_is_outlasted_and_each_try_is_logged(caplog):
    call = Flaky(StoreUnavailableError("away"), StoreUnavailableError("still away"))
    with caplog.at_level(logging.WARNING):
        assert asyncio.run(retrying(call, "load a dataset", Retry(60, 0.01, 0.02))) == "here"
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "load a dataset: away",
        "load a dataset: still away",
    ]


def test_a_missing_artifact_is_not_retried():
    call = Flaky(ArtifactError("gone"), ArtifactError("never raised"))
    with pytest.raises(ArtifactError, match="gone"):
        asyncio.run(retrying(call, "load a dataset", SHORT))
    assert len(call.errors) == 1


def test_a_call_has_a_thread_of_its_own_while_others_hold_all_of_asyncio():
    release = threading.Event()

    async def main():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        hanging = asyncio.create_task(asyncio.to_thread(release.wait))
        await asyncio.sleep(0)
        try:
            assert await in_own_thread("a{}".format, 1) == "a1"
            with pytest.raises(KeyError):
                await in_own_thread({}.__getitem__, "missing")
        finally:
            release.set()
            await hanging

    asyncio.run(asyncio.wait_for(main(), 10))


def test_a_process_waits_for_its_own_calls_before_it_ends():
    release, ended = threading.Event(), threading.Event()

    def call():
        assert not threading.current_thread().daemon
        release.wait(10)
        ended.set()

    async def main():
        calling = asyncio.create_task(in_own_thread(call))
        await asyncio.sleep(0)
        calling.cancel()
        waiting = asyncio.create_task(own_threads_ended())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        release.set()
        await waiting
        assert ended.is_set()

    asyncio.run(main())


def test_patience_ends():
    with pytest.raises(StoreUnavailableError):
        asyncio.run(retrying(Flaky(*[StoreUnavailableError("away")] * 1000), "load a dataset", SHORT))


def test_a_call_whose_result_is_not_needed_any_more_is_given_up():
    call, answers = Flaky(*[OSError(errno.ENOSPC, "full")] * 1000), [True, True, False]

    async def is_needed():
        return answers.pop(0)

    with pytest.raises(NotNeededError, match=r"store weights: given up after \d+ s, it is not needed any more"):
        asyncio.run(retrying(call, "store weights", Retry(60, 0.01, 0.02), is_needed=is_needed))
    assert len(call.errors) == 997


def test_a_folder_that_is_not_mounted_is_away_and_a_file_that_it_lacks_is_gone(tmp_path: Path):
    store = ArtifactStore(str(tmp_path / "artifacts"))
    ref = store.put_bytes(b"data")
    other = store.put_bytes(b"other")
    store.fetch(other).unlink()
    (tmp_path / "artifacts").rename(tmp_path / "elsewhere")
    for use in (store.fetch, store.read):
        with pytest.raises(StoreUnavailableError, match=r"cannot be read: .*artifact_uri"):
            use(ref)
    (tmp_path / "elsewhere").rename(tmp_path / "artifacts")
    assert store.read(ref) == b"data"
    with pytest.raises(ArtifactError) as error:
        store.read(other)
    assert not isinstance(error.value, StoreUnavailableError)


def test_a_changed_artifact_is_not_an_outage(tmp_path: Path):
    store = ArtifactStore(str(tmp_path))
    ref = store.put_bytes(b"data")
    store.fetch(ref).write_bytes(b"atad")
    with pytest.raises(ArtifactError, match="wrong hash") as error:
        store.read(ref)
    assert not isinstance(error.value, StoreUnavailableError)


def test_one_unreadable_artifact_is_not_an_outage_of_its_store(tmp_path):
    store = ArtifactStore(str(tmp_path / "store"))
    ref, other = store.put_bytes(b"one"), store.put_bytes(b"two")
    path = store.fetch(ref)
    path.unlink()
    path.mkdir()
    for call in (store.read, store.fetch):
        with pytest.raises(ArtifactError) as error:
            call(ref)
        assert not isinstance(error.value, StoreUnavailableError)
    assert store.read(other) == b"two"


def test_errors_of_a_remote_client_in_an_outage_are_retried(tmp_path):
    store = ArtifactStore(f"remote://{tmp_path.name}", cache=tmp_path / "cache")
    ref = store.put_bytes(b"data")

    def outlasted(call, num_failures=3):
        RemoteFileSystem.num_failures = num_failures
        found = asyncio.run(retrying(call, "use the store", Retry(60, 0.01, 0.02)))
        assert RemoteFileSystem.num_failures == 0
        return found

    (tmp_path / "file").write_bytes(b"of a file")
    other = outlasted(lambda: store.put_bytes(b"other"))
    of_file = outlasted(lambda: store.put_file(tmp_path / "file"))
    assert [outlasted(lambda ref=ref: store.read(ref)) for ref in (ref, other, of_file)] == [
        b"data",
        b"other",
        b"of a file",
    ]
    assert outlasted(lambda: store.fetch(ref)).read_bytes() == b"data"
    assert len(outlasted(store.listing)) == 3
    outlasted(lambda: store.remove(ref))
    with pytest.raises(ArtifactError, match="check that artifact_uri") as gone:
        store.read(ref)
    assert not isinstance(gone.value, StoreUnavailableError)
    RemoteFileSystem.num_failures = 1
    with pytest.raises(StoreUnavailableError, match="Could not connect") as away:
        store.read(other)
    assert isinstance(away.value.__cause__, RuntimeError)
    with pytest.raises(ArtifactError, match="5 bytes, more than the limit of 4") as large:
        store.read(other, max_bytes=4)
    assert not isinstance(large.value, StoreUnavailableError)
