"""A dataset section of another harness: only what its file says is demanded of the rows."""

from pathlib import Path
from types import SimpleNamespace

from pydantic import BaseModel, ConfigDict, Field

from rollstream.harness.config.resolve import dataset_of
from rollstream.schemas.evaluators import DatasetSection


class TheirStructure(BaseModel):
    question_key: str = "question"
    answer_key: str = "answer"


class TheirDataset(BaseModel):
    """A dataset like NAT's: a structure by default."""

    model_config = ConfigDict(populate_by_name=True)

    type: str = Field(alias="_type", default="jsonl")
    file_path: Path
    id_key: str = "id"
    structure: TheirStructure = Field(default_factory=TheirStructure)


def section_of(**values: object) -> DatasetSection:
    theirs = TheirDataset.model_validate({"_type": "jsonl", "file_path": "rows.jsonl", **values})
    found = dataset_of(SimpleNamespace(general=SimpleNamespace(dataset=theirs)))
    assert found is not None
    return found


def test_defaults_of_another_harness_demand_no_columns() -> None:
    assert section_of().structure.model_fields_set == set()


def test_columns_that_the_file_names_are_kept() -> None:
    assert section_of(structure={"question_key": "ask"}).structure.question_key == "ask"
