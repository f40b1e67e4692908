"""Artifacts: stored by hash, verified before use, and clear about what is wrong."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.schemas.errors import ArtifactError
from rollstream.schemas.settings import ArtifactRef

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


def test_a_folders_artifact_is_used_where_it_lies(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path / "artifacts"))
    ref = store.put_bytes(DATA)
    assert store.fetch(ref) == Path(ref.uri)
    assert [path for path in (tmp_path / "artifacts").rglob("*") if path.is_file()] == [Path(ref.uri)]


def test_the_same_bytes_are_not_written_again(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path))
    first = Path(store.put_bytes(DATA).uri).stat()
    assert Path(store.put_bytes(DATA).uri).stat().st_ino == first.st_ino


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
        with pytest.raises(ArtifactError, match=rf"wrong hash: {ref.sha256}, not {'0' * 64}; .*restore"):
            use(wrong)


def test_a_damaged_file_is_stored_anew(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path))
    ref = store.put_bytes(DATA)
    Path(ref.uri).write_bytes(b"?" * len(DATA))
    with pytest.raises(ArtifactError, match="wrong hash"):
        store.fetch(ref)
    assert store.read(store.put_bytes(DATA)) == DATA


def test_a_damaged_copy_in_the_cache_is_fetched_again(tmp_path: Path) -> None:
    store = ArtifactStore(f"memory://{tmp_path.name}", cache=tmp_path)
    ref = store.put_bytes(DATA)
    store.fetch(ref).write_bytes(b"damaged")
    assert store.fetch(ref).read_bytes() == DATA


def test_a_missing_artifact_is_named_with_the_remedy(store: ArtifactStore) -> None:
    gone = ArtifactRef(uri=f"{store.uri}/aa/gone", sha256="a" * 64, size_bytes=1)
    for use in (store.fetch, store.read):
        with pytest.raises(ArtifactError, match=r"aa/gone cannot be read: .*artifact_uri"):
            use(gone)


def test_a_missing_source_file_is_named(store: ArtifactStore, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"absent\.bin"):
        store.put_file(tmp_path / "absent.bin")


def test_a_store_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
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
