"""A producers process that is killed with SIGKILL while agents outside play: no call is lost, none is doubled."""

import asyncio
import os

import pytest

from tests.rigs.services.gateway_load import CALLS_A_KILL, GROUPS, MEMBERS, killed_under_load

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]

KILLS = int(os.environ.get("GATEWAY_KILLS", "2"))


def test_a_kill_loses_no_call_and_doubles_none(tmp_path, own_broker):
    found = asyncio.run(killed_under_load(own_broker, tmp_path, KILLS))
    assert found.failed == []
    assert (found.lost, found.doubled) == (0, 0)
    assert found.answered == found.recorded == found.named == GROUPS * MEMBERS * CALLS_A_KILL * (KILLS + 1)
