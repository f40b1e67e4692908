"""Artifacts: stored by hash, verified before use, and clear about what is wrong."""

import hashlib
import io
import os
import shutil
import tempfile
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest

from rollstream.eventlog.artifacts import CHUNK_BYTES, ArtifactStore
from rollstream.eventlog.files import write_hashed
from rollstream.schemas.errors import ArtifactError, StoreUnavailableError
from rollstream.schemas.settings import ArtifactRef
from tests.rigs.remote_outage import Buckets

DATA = b"weights" * 1000


@pytest.fixture(params=["folder", "file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ArtifactStore:
    folder = tmp_path / "artifacts"
    uri = {"folder": str(folder), "file": f"file://{folder}", "memory": f"memory://{tmp_path.name}"}[request.param]
    return ArtifactStore(uri, cache=tmp_path / "cache")


def test_bytes_come_back_by_reference(store: ArtifactStore) -> None:
    ref = store.put_bytes(DATA, ".bin")
    assert (ref.sha256, ref.size_bytes) == (hashlib.sha256(DATA).hexdigest(), len(DATA))
    assert store.read(ref) == DATA
    assert store.fetch(ref).read_bytes() == DATA
    assert store.fetch(ref).suffix == ".bin"


def test_a_file_is_stored_as_its_bytes_are(store: ArtifactStore, tmp_path: Path) -> None:
    source = tmp_path / "adapter.safetensors"
    source.write_bytes(DATA)
    assert store.put_file(source) == store.put_bytes(DATA, ".safetensors")


def test_a_hashed_file_gets_a_second_name_in_a_local_store_and_is_copied_to_any_other(
    store: ArtifactStore, tmp_path: Path
) -> None:
    written = write_hashed([DATA], tmp_path / "written", lambda sha256: sha256)
    ref = store.put_hashed(written, ".safetensors")
    assert ref == store.put_bytes(DATA, ".safetensors")
    assert store.read(ref) == DATA
    if store.folder is not None:
        assert store.fetch(ref).samefile(written.path)
    written.path.unlink()
    assert store.read(ref) == DATA
    with pytest.raises(ArtifactError, match="cannot be stored as an artifact"):
        store.put_hashed(written, ".safetensors")


def test_a_folders_artifact_is_used_where_it_lies(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path / "artifacts"))
    ref = store.put_bytes(DATA)
    assert store.fetch(ref) == tmp_path / "artifacts" / ref.uri
    assert [path for path in (tmp_path / "artifacts").rglob("*") if path.is_file()] == [
        tmp_path / "artifacts" / ref.uri
    ]


def test_the_same_bytes_are_not_written_again(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path))
    first = store.fetch(store.put_bytes(DATA)).stat()
    assert store.fetch(store.put_bytes(DATA)).stat().st_ino == first.st_ino


def test_many_writers_of_the_same_bytes_agree(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path))
    with ThreadPoolExecutor(8) as pool:
        refs = set(pool.map(lambda _: store.put_bytes(DATA).sha256, range(32)))
    assert len(refs) == 1
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


def test_a_changed_artifact_is_refused_with_both_hashes(store: ArtifactStore) -> None:
    ref = store.put_bytes(DATA)
    wrong = ref.model_copy(update={"sha256": "0" * 64})
    for use in (store.fetch, store.read):
        with pytest.raises(ArtifactError, match=rf"{ref.uri} is not named by its sha256 {'0' * 64}: it was changed"):
            use(wrong)


def test_a_damaged_file_is_stored_again(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path))
    ref = store.put_bytes(DATA)
    store.fetch(ref).write_bytes(b"?" * len(DATA))
    with pytest.raises(ArtifactError, match="wrong hash"):
        store.fetch(ref)
    assert store.read(store.put_bytes(DATA)) == DATA


def test_a_damaged_copy_in_the_cache_is_fetched_again(tmp_path: Path) -> None:
    store = ArtifactStore(f"memory://{tmp_path.name}", cache=tmp_path)
    ref = store.put_bytes(DATA)
    store.fetch(ref).write_bytes(b"damaged")
    assert store.fetch(ref).read_bytes() == DATA


def test_a_copy_goes_with_its_last_use(tmp_path: Path) -> None:
    store = ArtifactStore(f"memory://{tmp_path.name}", cache=tmp_path)
    ref = store.put_bytes(DATA)
    copy = store.fetch(ref)
    assert store.fetch(ref) == copy
    store.drop_copy(ref)
    assert copy.read_bytes() == DATA
    store.drop_copy(ref)
    assert not copy.exists()
    store._filesystem.pipe_file(store.name_of(ref), b"damaged")
    with pytest.raises(ArtifactError, match="wrong hash"):
        store.fetch(ref)
    store.put_bytes(DATA)
    assert store.fetch(ref).read_bytes() == DATA
    store.drop_copy(ref)
    assert not copy.exists(), "a failed fetch counts as a use"


def test_an_artifact_is_checked_in_chunks_and_not_copied(store: ArtifactStore, tmp_path: Path) -> None:
    ref = store.put_bytes(bytes(32 * CHUNK_BYTES), ".safetensors")
    tracemalloc.start()
    try:
        store.check(ref)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 8 * CHUNK_BYTES
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    store._filesystem.pipe_file(store._locate(ref), b"damaged")
    with pytest.raises(ArtifactError, match="wrong hash"):
        store.check(ref)
    store.remove(ref)
    with pytest.raises(ArtifactError, match="cannot be read") as gone:
        store.check(ref)
    assert isinstance(gone.value.__cause__, FileNotFoundError)


def test_processes_have_caches_of_their_own_and_remove_those_of_killed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    base = tmp_path / f"rollstream-artifacts-{os.getuid()}"
    store = ArtifactStore(f"memory://{tmp_path.name}")
    ref = store.put_bytes(DATA)
    copy = store.fetch(ref)
    assert copy.is_relative_to(base / "0")
    (base / "1" / "ab").mkdir(parents=True)  # of a process that was killed
    monkeypatch.setattr(os, "getpid", lambda: -1)
    other = ArtifactStore(store.uri).fetch(ref)
    assert other.is_relative_to(base / "1")
    assert not (base / "1" / "ab").exists()
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store.drop_copy(ref)
    assert not copy.exists()
    assert other.read_bytes() == DATA


@pytest.mark.parametrize("suffix", [".\0", "." + "x" * 300, ".a.b.c", ". ", ".bin\n"])
def test_a_name_that_no_store_gives_is_refused(store: ArtifactStore, suffix: str) -> None:
    odd = ArtifactRef(uri=f"aa/{'a' * 64}{suffix}", sha256="a" * 64, size_bytes=1)
    for use in (store.fetch, store.read, store.remove):
        with pytest.raises(ArtifactError):
            use(odd)
    assert store.read(store.put_bytes(DATA, suffix)) == DATA, "kept without the suffix"


def test_more_bytes_than_allowed_are_not_read(store: ArtifactStore) -> None:
    ref = store.put_bytes(DATA)
    assert store.read(ref, max_bytes=len(DATA)) == DATA
    with pytest.raises(ArtifactError, match=r"has 7,000 bytes, more than the limit of 6,999"):
        store.read(ref, max_bytes=len(DATA) - 1)


def test_a_partial_upload_is_not_in_a_remote_store(tmp_path: Path) -> None:
    class BrokenOff(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell():
                raise OSError("the connection broke off")
            return super().read(10)

    store = ArtifactStore(f"memory://{tmp_path.name}")
    sha256 = hashlib.sha256(DATA).hexdigest()
    with pytest.raises(ArtifactError, match="broke off"):
        store._put(BrokenOff(DATA), sha256, len(DATA), "")
    assert store.listing() == {}
    assert store.read(store.put_bytes(DATA)) == DATA


def test_a_bucket_that_does_not_exist_is_named_and_not_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUCKET", "my-typo")
    store = ArtifactStore("memory://${BUCKET}/artifacts")
    store._filesystem = Buckets()
    with pytest.raises(
        ArtifactError,
        match=r"bucket of artifact store memory://\$\{BUCKET\}/artifacts does not exist \(The .*; create it",
    ) as missing:
        store.put_bytes(DATA)
    assert not isinstance(missing.value, StoreUnavailableError), "it is not tried again"
    assert Buckets.names == set()
    monkeypatch.setattr(Buckets, "names", {"my-typo"})
    assert store.read(store.put_bytes(DATA)) == DATA


def test_a_cache_that_somebody_else_could_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store = ArtifactStore(f"memory://{tmp_path.name}")
    ref, cache = store.put_bytes(DATA), tmp_path / f"rollstream-artifacts-{os.getuid()}"
    (tmp_path / "planted").mkdir(mode=0o700)
    cache.symlink_to(tmp_path / "planted")
    with pytest.raises(ArtifactError, match="accessible to other users"):
        store.fetch(ref)
    cache.unlink()
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(ArtifactError, match="accessible to other users"):
        store.fetch(ref)
    cache.rmdir()
    assert store.fetch(ref).read_bytes() == DATA


def test_a_missing_artifact_is_named_with_the_remedy(store: ArtifactStore) -> None:
    gone = ArtifactRef(uri=f"aa/{'a' * 64}", sha256="a" * 64, size_bytes=1)
    for use in (store.fetch, store.read):
        with pytest.raises(ArtifactError, match=r"aa/a{64} of store .* cannot be read: .*artifact_uri"):
            use(gone)


def test_a_missing_source_file_is_named(store: ArtifactStore, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"absent\.bin"):
        store.put_file(tmp_path / "absent.bin")


def test_the_error_of_an_unwritable_store_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file where the folder should be")
    with pytest.raises(ArtifactError, match=r"taken cannot be written: .*artifact_uri"):
        ArtifactStore(str(tmp_path / "taken")).put_bytes(DATA)
    if os.geteuid() != 0:
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(ArtifactError, match="locked cannot be written"):
            ArtifactStore(str(tmp_path / "locked")).put_bytes(DATA)


def test_an_unknown_kind_of_store_is_refused() -> None:
    with pytest.raises(ArtifactError, match="nonsense://place"):
        ArtifactStore("nonsense://place")


def test_a_store_whose_package_is_missing_names_the_package() -> None:
    fsspec.register_implementation("planted", "planted_store.Planted", errtxt="planted:// has a package", clobber=True)
    with pytest.raises(ArtifactError, match=r"planted://x: .*; install planted_store where this process runs"):
        ArtifactStore("planted://x")


def test_a_variable_of_the_uri_stands_in_no_reference_and_is_expanded_by_who_reads(tmp_path: Path) -> None:
    env = {"STORE": str(tmp_path / "s3cr3t-1")}
    store = ArtifactStore("${STORE}/artifacts", env=env)
    ref = store.put_bytes(DATA, ".bin")
    assert ref.uri == f"{ref.sha256[:2]}/{ref.sha256}.bin"
    assert store.read(ref) == store.fetch(ref).read_bytes() == DATA
    assert store.name_of(ref) == str(tmp_path / "s3cr3t-1" / "artifacts" / ref.sha256[:2] / f"{ref.sha256}.bin")
    assert ArtifactStore(str(tmp_path / "s3cr3t-1" / "artifacts")).read(ref) == DATA, "named by its hash"
    recorded = ref.model_copy(update={"uri": f"${{STORE}}/artifacts/{ref.uri}"})
    assert store.read(recorded) == DATA
    missing = ref.model_copy(update={"uri": ref.uri.replace(ref.sha256, "0" * 64), "sha256": "0" * 64})
    with pytest.raises(ArtifactError, match=r"of store \$\{STORE\}/artifacts cannot be read") as refused:
        store.read(missing)
    assert "s3cr3t" not in str(refused.value)


@pytest.mark.parametrize(
    "uri",
    [
        "http://169.254.169.254/latest",
        "simplecache::http://h/x",
        "memory://other/x",
        "github://o:r@main/x",
        "${HOME}/.ssh/id",
        "https://evil.example/${STORE}",
        "/dev/zero",
    ],
)
def test_a_record_names_nothing_outside_of_the_store(uri: str, tmp_path: Path) -> None:
    ref = ArtifactRef(uri=uri, sha256="0" * 64, size_bytes=1)
    with pytest.raises(ArtifactError, match="is not named by its sha256"):
        ArtifactStore(str(tmp_path / "artifacts"), env={"STORE": "s3cr3t"}).fetch(ref)


def test_a_moved_store_is_read_where_it_is_and_a_copy_never_reads_the_original(tmp_path: Path) -> None:
    first = ArtifactStore(str(tmp_path / "first"))
    ref, other = first.put_bytes(DATA), first.put_bytes(b"other")
    (tmp_path / "first").rename(tmp_path / "moved")
    moved = ArtifactStore(str(tmp_path / "moved"))
    assert moved.read(ref) == DATA
    shutil.copytree(tmp_path / "moved", tmp_path / "copy")
    copy = ArtifactStore(str(tmp_path / "copy"))
    copy.remove(other)
    with pytest.raises(ArtifactError, match="cannot be read"):
        copy.read(other)
    assert moved.read(other) == b"other"


def test_an_absolute_uri_of_before_is_read_from_the_store_that_is_asked(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path / "artifacts"))
    ref = store.put_bytes(DATA, ".bin")
    recorded = ref.model_copy(update={"uri": f"/somewhere/else/{ref.uri}"})
    assert store.read(recorded) == DATA


def test_no_uri_names_a_file_that_is_not_called_by_its_hash(tmp_path: Path, store: ArtifactStore) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(DATA)
    ref = store.put_bytes(DATA)
    with pytest.raises(ArtifactError, match="is not named by its sha256"):
        store.read(ref.model_copy(update={"uri": str(secret)}))


@pytest.mark.parametrize(
    ("uri", "expected"), [("memory://a", True), ("dir::memory://a", True), ("memory:a", False), ("file:///a", False)]
)
def test_a_store_in_the_memory_of_its_process_is_known(uri: str, expected: bool) -> None:
    assert ArtifactStore(uri).is_of_process is expected
