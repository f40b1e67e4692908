"""A producers process that is killed with SIGKILL while agents outside play: no call is lost, none is doubled, also of
those that stream and those for several answers.
"""

import asyncio
import os

import pytest

from rollstream.eventlog.broker.broker import EmbeddedBroker
from tests.rigs.services.gateway_load import (
    ANSWERS_A_KILL,
    CALLS_A_KILL,
    GROUPS,
    KILLED,
    MEMBERS,
    CountedCalls,
    ProducersProcess,
    killed_under_load,
)

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]

KILLS = int(os.environ.get("GATEWAY_KILLS", "2"))


def check(found: CountedCalls, kills: int) -> None:
    assert found.failed == []
    assert (found.lost, found.doubled, found.changed) == (0, 0, [])
    assert found.answered == found.recorded == GROUPS * MEMBERS * ANSWERS_A_KILL * (kills + 1)
    assert found.named == GROUPS * MEMBERS * CALLS_A_KILL * (kills + 1)
    assert found.repeated == GROUPS * MEMBERS * (kills + 1)
    assert found.hit.keys() >= {*KILLED[:kills]}
    assert found.broken > 0, "no stream was cut off by a kill"


def test_a_kill_loses_no_call_and_doubles_none(tmp_path, own_topics):
    check(asyncio.run(killed_under_load(ProducersProcess(tmp_path, own_topics), KILLS)), KILLS)


@pytest.mark.vllm
def test_a_kill_loses_no_call_that_real_vllm_answers_and_doubles_none(tmp_path):
    from tests.rigs.services.vllm_server import WHOLE_PROMPTS, serving

    with (
        serving(tmp_path, is_lora=False, arguments=WHOLE_PROMPTS) as server,
        EmbeddedBroker(tmp_path / "broker") as broker,
    ):
        producers = ProducersProcess.on_vllm(tmp_path, broker.kafka, server.url, server.base)
        check(asyncio.run(killed_under_load(producers, 3)), 3)
