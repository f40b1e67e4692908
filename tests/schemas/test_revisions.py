"""The tables of revisions end where the recorded fields do."""

from collections.abc import Mapping
from typing import get_args

import pytest
from pydantic import BaseModel

from rollstream.schemas import revisions
from rollstream.schemas.events import GroupStarted
from rollstream.schemas.settings import JobSettings, PlanSettings

TABLES = [
    (JobSettings, revisions.JOB_REVISIONS, revisions.NEWEST_REVISION),
    (PlanSettings, revisions.PLAN_REVISIONS, revisions.NEWEST_PLAN_REVISION),
    (GroupStarted, revisions.GROUP_REVISIONS, revisions.NEWEST_GROUP_REVISION),
]


@pytest.mark.parametrize(("recorded", "table", "newest"), TABLES)
def test_a_table_has_every_revision_up_to_the_newest(
    recorded: type[BaseModel], table: Mapping[int, str], newest: int
) -> None:
    """Else add the sentence, the value of the Literal, or the number that new ones record."""
    assert [1, *table] == list(get_args(recorded.model_fields["revision"].annotation)) == [*range(1, newest + 1)]
