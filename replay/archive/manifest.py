"""The manifest of an exported run: what each of its files must hash to. Knows no Parquet and no topic's content.

It is written in one canonical form that holds its own hash, so that a changed byte shows in it like in any other file.
"""

from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from rollstream.eventlog.codec import canonical_digest
from rollstream.eventlog.files import sha256_of, write_whole
from rollstream.schemas.base import added
from rollstream.schemas.errors import LogError, first_invalid

MANIFEST = "manifest.json"
FORMAT_VERSION = 1


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Covered(_Value):
    """Offsets of one partition that were looked through, the second one excluded.

    Every record of the run in between is in the export; of `steps` every record of all runs, of `trajectories` those
    of other runs that the run's manifests name.
    """

    begin: int = Field(ge=0)
    end: int = Field(ge=0)


def _below(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name or not path.parts:
        raise ValueError("must be the relative path of a file below the folder")
    return name


FileBelow = Annotated[str, AfterValidator(_below)]
"""Path of a file, relative to the export's folder and inside it."""


class TopicFile(_Value):
    """The Parquet file of one topic."""

    file: FileBelow
    sha256: str
    num_records: int = Field(ge=0)
    content_bytes: int = Field(ge=0)
    """Size of keys and values, uncompressed."""
    partitions: tuple[Covered, ...]


class ArtifactFile(_Value):
    """A copy of an artifact, and the name that the run's events have for it."""

    uri: str
    sha256: str
    size_bytes: int = Field(ge=0)
    what: str
    file: FileBelow | None
    """Path below the folder; none if the artifact was gone already."""
    missing: str = added("")
    """Reason why there is no file, if the log has one: who collected the artifact, and when."""


class ExportManifest(_Value):
    """All that an export says of itself."""

    format: Literal["rollstream-export"] = "rollstream-export"
    format_version: Literal[1] = FORMAT_VERSION
    run_id: str
    cluster_id: str
    exported_at: str
    library_versions: dict[str, str]
    """Versions of the run's libraries, from its RunStarted."""
    exported_with: dict[str, str]
    topics: dict[str, TopicFile]
    artifacts: tuple[ArtifactFile, ...]
    num_left_out: int = Field(ge=0)
    """Records of the log, beside ticks, that belong to other runs and are not in the export."""
    is_partial: bool = added(False)
    """Whether it was made by `--partial`: records of the run may have been gone already."""


def write_manifest(folder: Path, manifest: ExportManifest) -> None:
    """Write the manifest with its own hash."""
    content = manifest.model_dump(mode="json")
    data = _canonical({**content, "sha256": canonical_digest(content)})
    write_whole(folder / MANIFEST, data, is_private=False)


def read_manifest(folder: Path) -> ExportManifest:
    """The manifest of an export. Raises LogError if it is missing, changed, or of a format that is not known here."""
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LogError(
            f"{folder} is not an export of a run: {path} cannot be read ({error.strerror}); give a "
            "folder that `rollstream export` wrote"
        ) from error
    try:
        content = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise _changed(path) from error
    if not isinstance(content, dict) or _canonical(content) != data:
        raise _changed(path)
    sha256 = content.pop("sha256", None)
    if sha256 != canonical_digest(content):
        raise _changed(path)
    if content.get("format_version") != FORMAT_VERSION:
        found = content.get("format_version")
        raise LogError(
            f"export {folder} has format {found}, but this rollstream reads format {FORMAT_VERSION}; update rollstream"
        )
    try:
        return ExportManifest.model_validate(content)
    except ValidationError as error:
        raise LogError(
            f"{path} is not the manifest of an export: {first_invalid(error)}; export the run again"
        ) from error


def check_files(folder: Path, manifest: ExportManifest) -> None:
    """Raises LogError that names the first file that is missing, changed or not a regular file."""
    wanted = [(topic.file, topic.sha256) for topic in manifest.topics.values()]
    wanted += [(artifact.file, artifact.sha256) for artifact in manifest.artifacts if artifact.file is not None]
    for name, sha256 in wanted:
        if (folder / name).exists() and not (folder / name).is_file():
            raise LogError(f"{folder / name} is not a regular file: restore it from a copy, or export again")
        if hash_file(folder / name) != sha256:
            raise _changed(folder / name)


def hash_file(path: Path) -> str:
    """sha256 (hex) of a file of an export. Raises LogError if it cannot be read."""
    try:
        return sha256_of(path)
    except OSError as error:
        raise LogError(
            f"file {path} of an export cannot be read ({error.strerror}): restore it from a copy, or export again"
        ) from error


def _canonical(content: dict[str, Any]) -> bytes:
    return orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS) + b"\n"


def _changed(path: Path) -> LogError:
    return LogError(f"file {path} was changed since it was exported: restore it from a copy, or export again")
