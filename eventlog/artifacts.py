"""Immutable artifacts by sha256 under one fsspec URI: weights, datasets, raw bytes of dead letters.

An artifact's file is named by its hash, written aside and moved into place, and verified before it is used.
A folder needs no copy; anything else is fetched once into a local cache.
"""

import hashlib
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any

import fsspec

from rollstream.schemas.errors import ArtifactError
from rollstream.schemas.settings import ArtifactRef

CHUNK_BYTES = 1 << 20


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
        """Store a file's bytes. Raises ArtifactError if the store cannot be written."""
        return self.put_bytes(path.read_bytes(), path.suffix)

    def put_bytes(self, data: bytes, suffix: str = "") -> ArtifactRef:
        """Store bytes; bytes that are there already are not written again. Raises ArtifactError."""
        sha256 = hashlib.sha256(data).hexdigest()
        name = f"{self._root}/{sha256[:2]}/{sha256}{suffix}"
        try:
            if not self._has(name, len(data)):
                self._write(name, data)
        except OSError as error:
            raise ArtifactError(
                f"artifact store {self.uri} cannot be written: {error}; make it writable or set another artifact_uri"
            ) from error
        uri = name if self._is_local else str(self._filesystem.unstrip_protocol(name))
        return ArtifactRef(uri=uri, sha256=sha256, size_bytes=len(data))

    def fetch(self, ref: ArtifactRef) -> Path:
        """A local file with the artifact's verified bytes. Raises ArtifactError if it is missing or differs."""
        filesystem, name = self._locate(ref)
        if "file" in _protocols(filesystem):
            _verify(ref, _hash_file(ref, Path(name)))
            return Path(name)
        local = self._cache / ref.sha256[:2] / (ref.sha256 + Path(name).suffix)
        if not local.exists() or _hash_file(ref, local) != ref.sha256:
            data = self.read(ref)
            local.parent.mkdir(parents=True, exist_ok=True)
            aside = local.with_name(f"{local.name}.{secrets.token_hex(4)}")
            aside.write_bytes(data)
            aside.replace(local)
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

    def _locate(self, ref: ArtifactRef) -> tuple[Any, str]:
        try:
            filesystem, name = fsspec.core.url_to_fs(ref.uri)
        except (ValueError, ImportError) as error:
            raise ArtifactError(f"artifact {ref.uri}: {error}") from error
        return filesystem, name

    def _has(self, name: str, size_bytes: int) -> bool:
        return bool(self._filesystem.exists(name)) and self._filesystem.size(name) == size_bytes

    def _write(self, name: str, data: bytes) -> None:
        self._filesystem.makedirs(name.rsplit("/", 1)[0], exist_ok=True)
        if not self._is_local:
            self._filesystem.pipe_file(name, data)
            return
        aside = Path(f"{name}.{secrets.token_hex(4)}.aside")
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(name)


def _protocols(filesystem: Any) -> tuple[str, ...]:
    protocol = filesystem.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def _hash_file(ref: ArtifactRef, path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise _missing(ref, error) from error
    return digest.hexdigest()


def _verify(ref: ArtifactRef, found: str) -> None:
    if found != ref.sha256:
        raise ArtifactError(
            f"artifact {ref.uri} has the wrong hash: {found}, not {ref.sha256}; it was changed, restore it from a copy"
        )


def _missing(ref: ArtifactRef, error: OSError) -> ArtifactError:
    return ArtifactError(f"artifact {ref.uri} cannot be read: {error}; is artifact_uri the one it was written with?")
