"""Immutable artifacts by sha256 under one fsspec URI: weights, datasets, raw bytes of dead letters.

An artifact's file is named by its hash, written aside and moved into place, and verified before it is used.
A folder needs no copy; anything else is fetched once into a local cache.
"""

import hashlib
import io
import os
import re
import secrets
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

import fsspec

from rollstream.schemas.errors import ArtifactError
from rollstream.schemas.settings import ArtifactRef

CHUNK_BYTES = 1 << 20
SHA256 = re.compile(r"[0-9a-f]{64}")


class ArtifactStore:
    """Artifacts under `uri`: a folder, `file://...`, or any URI that fsspec knows."""

    def __init__(self, uri: str, *, cache: Path | None = None) -> None:
        """`cache`: where remote artifacts are kept locally; default: a folder of the user's temporary files."""
        self.uri = uri.rstrip("/")
        self._filesystem: Any
        try:
            self._filesystem, self._root = fsspec.core.url_to_fs(self.uri)
        except (ValueError, ImportError) as error:
            raise ArtifactError(f"artifact store {uri}: {error}; use a folder or an installed fsspec URI") from error
        self._is_local = "file" in _protocols(self._filesystem)
        self._cache = cache or Path(tempfile.gettempdir()) / f"rollstream-artifacts-{os.getuid()}"

    def put_file(self, path: Path) -> ArtifactRef:
        """Store a file's bytes. Raises ArtifactError if it cannot be read or the store cannot be written."""
        try:
            with path.open("rb") as source:
                sha256 = hashlib.file_digest(source, "sha256").hexdigest()
                size_bytes = source.seek(0, os.SEEK_END)
                source.seek(0)
                return self._put(source, sha256, size_bytes, path.suffix)
        except OSError as error:
            raise ArtifactError(f"file {path} cannot be stored as an artifact: {error}") from error

    def put_bytes(self, data: bytes, suffix: str = "") -> ArtifactRef:
        """Store bytes; bytes that are there already are not written again. Raises ArtifactError."""
        return self._put(io.BytesIO(data), hashlib.sha256(data).hexdigest(), len(data), suffix)

    def fetch(self, ref: ArtifactRef) -> Path:
        """A local file with the artifact's verified bytes. Raises ArtifactError if it is missing or differs."""
        filesystem, name = self._locate(ref)
        if "file" in _protocols(filesystem):
            _verify(ref, _hash_file(ref, Path(name)))
            return Path(name)
        local = self._cache / ref.sha256[:2] / (ref.sha256 + Path(name).suffix)
        if not local.exists() or _hash_file(ref, local) != ref.sha256:
            try:
                with filesystem.open(name, "rb") as source:
                    found = _write_aside(local, source, ref.sha256)
            except OSError as error:
                raise _missing(ref, error) from error
            _verify(ref, found)
        return local

    def read(self, ref: ArtifactRef) -> bytes:
        """The artifact's verified bytes. Raises ArtifactError if it is missing or differs."""
        filesystem, name = self._locate(ref)
        try:
            data: bytes = filesystem.cat_file(name)
        except OSError as error:
            raise _missing(ref, error) from error
        _verify(ref, hashlib.sha256(data).hexdigest())
        return data

    @property
    def folder(self) -> Path | None:
        """Where the files lie, if that is a folder."""
        return Path(self._root) if self._is_local else None

    def listing(self) -> dict[str, int]:
        """Size in bytes of every file by its name; empty if there is none yet. Raises ArtifactError."""
        try:
            found: dict[str, dict[str, Any]] = self._filesystem.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ArtifactError(f"artifact store {self.uri} cannot be listed: {error}") from error
        return {name: int(info.get("size") or 0) for name, info in found.items()}

    def name_of(self, ref: ArtifactRef) -> str | None:
        """Name of an artifact's file, if it lies where this store puts it; None if it lies anywhere else."""
        try:
            filesystem, name = self._locate(ref)
        except ArtifactError:
            return None
        file = name.rsplit("/", 1)[-1]
        is_ours = _protocols(filesystem) == _protocols(self._filesystem)
        is_named_by_hash = SHA256.fullmatch(ref.sha256) is not None and file.split(".", 1)[0] == ref.sha256
        is_in_place = name == f"{self._root}/{ref.sha256[:2]}/{file}"
        return name if is_ours and is_named_by_hash and is_in_place else None

    def remove(self, ref: ArtifactRef) -> None:
        """Remove an artifact's file, which may be gone already.

        Raises ArtifactError if it lies outside of this store or cannot be removed.
        """
        name = self.name_of(ref)
        if name is None:
            raise ArtifactError(f"artifact {ref.uri} does not lie in {self.uri}; nothing outside of it is removed")
        try:
            self._filesystem.rm_file(name)
        except FileNotFoundError:
            return
        except OSError as error:
            raise ArtifactError(f"artifact {ref.uri} cannot be removed: {error}; make the store writable") from error

    def _locate(self, ref: ArtifactRef) -> tuple[Any, str]:
        try:
            filesystem, name = fsspec.core.url_to_fs(ref.uri)
        except (ValueError, ImportError) as error:
            raise ArtifactError(f"artifact {ref.uri}: {error}") from error
        return filesystem, name

    def _put(self, source: BinaryIO, sha256: str, size_bytes: int, suffix: str) -> ArtifactRef:
        name = f"{self._root}/{sha256[:2]}/{sha256}{suffix}"
        ref = ArtifactRef(uri=self._uri_of(name), sha256=sha256, size_bytes=size_bytes)
        try:
            if not self._has(ref, name):
                _verify(ref, self._write(name, source, sha256))
        except OSError as error:
            raise ArtifactError(
                f"artifact store {self.uri} cannot be written: {error}; make it writable or set another artifact_uri"
            ) from error
        return ref

    def _uri_of(self, name: str) -> str:
        return name if self._is_local else str(self._filesystem.unstrip_protocol(name))

    def _has(self, ref: ArtifactRef, name: str) -> bool:
        if not self._filesystem.exists(name) or self._filesystem.size(name) != ref.size_bytes:
            return False
        return not self._is_local or _hash_file(ref, Path(name)) == ref.sha256

    def _write(self, name: str, source: BinaryIO, sha256: str) -> str:
        if self._is_local:
            return _write_aside(Path(name), source, sha256)
        self._filesystem.makedirs(name.rsplit("/", 1)[0], exist_ok=True)
        with self._filesystem.open(name, "wb") as target:
            return _copy(source, target)


def _copy(source: BinaryIO, target: BinaryIO) -> str:
    """Copy all bytes and return their sha256."""
    digest = hashlib.sha256()
    while chunk := source.read(CHUNK_BYTES):
        digest.update(chunk)
        target.write(chunk)
    return digest.hexdigest()


def _write_aside(path: Path, source: BinaryIO, sha256: str) -> str:
    """Move the bytes into place only if they are the right ones; return their sha256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.aside")
    try:
        with aside.open("wb") as target:
            found = _copy(source, target)
            target.flush()
            os.fsync(target.fileno())
        if found == sha256:
            aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    return found


def _protocols(filesystem: Any) -> tuple[str, ...]:
    protocol = filesystem.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def _hash_file(ref: ArtifactRef, path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _missing(ref, error) from error


def _verify(ref: ArtifactRef, found: str) -> None:
    if found != ref.sha256:
        raise ArtifactError(
            f"artifact {ref.uri} has the wrong hash: {found}, not {ref.sha256}; it was changed, restore it from a copy"
        )


def _missing(ref: ArtifactRef, error: OSError) -> ArtifactError:
    return ArtifactError(f"artifact {ref.uri} cannot be read: {error}; is artifact_uri the one it was written with?")
