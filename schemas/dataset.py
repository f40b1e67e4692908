"""The section of a file that says where a run's examples are, in NAT's shape."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from rollstream.schemas.settings import Settings


class DatasetStructure(Settings):
    """Which columns hold what; the standard names are added to an example's inputs."""

    disable: bool = False
    """The whole row, as JSON, is the question."""
    question_key: str = "question"
    answer_key: str = "answer"
    generated_answer_key: str = "generated_answer"
    trajectory_key: str = "intermediate_steps"
    expected_trajectory_key: str = "expected_intermediate_steps"


class FilterEntry(Settings):
    """Patterns (`*`, `?`, `[seq]`) or values by column."""

    field: dict[str, list[str | int | float]] = Field(default_factory=dict)


class DatasetFilter(Settings):
    """Which rows are kept: those that fit the allowlist and do not fit the denylist."""

    allowlist: FilterEntry | None = None
    denylist: FilterEntry | None = None


class DatasetSection(Settings):
    """A file of examples: JSON lines, one JSON list of objects, CSV with a header, or Parquet."""

    type: Literal["json", "jsonl", "csv", "parquet"] = Field(default="jsonl", alias="_type")
    file_path: Path
    id_key: str = "id"
    structure: DatasetStructure = Field(default_factory=DatasetStructure)
    filter: DatasetFilter | None = None

    @model_validator(mode="before")
    @classmethod
    def _lies_here(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        found: dict[str, Any] = values  # pyright: ignore[reportUnknownVariableType]
        kind = found.get("_type")
        if kind in ("xls", "custom"):
            raise ValueError(f"_type {kind!r} is not read here; save the examples as jsonl, json, csv or parquet")
        for key in ("s3", "remote_file_path"):
            if found.get(key):
                raise ValueError(f"{key} is not fetched here; download the file and give its file_path")
        return {key: value for key, value in found.items() if key not in ("s3", "remote_file_path")}
