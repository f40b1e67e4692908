"""The weight follower: newest versions of wanted model groups, verified; void terms, wrong hashes, ended runs."""

import asyncio
import logging
from unittest import mock

import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import TopicPartition
from rollstream.producers.engines.weight_follower import WeightFollower
from rollstream.producers.openai import service as endpoint_service
from rollstream.schemas.errors import ModelError
from rollstream.schemas.events import RunEnded
from rollstream.schemas.permissions import NOTHING
from rollstream.schemas.services import EndpointSettings
from tests.rigs.follower_rig import GROUP, OTHER, THIRD, Rig, SlowStore, play


def test_a_start_loads_only_the_newest_version_of_the_group_that_is_waited_for(tmp_path):
    async def story(rig, start):
        for version in range(4):
            await rig.publish(version)
        await rig.publish(0, group=OTHER)
        await start()
        assert rig.versions() == []
        await rig.follower.wait_for(GROUP, 2)
        await rig.finish_pending()
        assert rig.versions() == [(GROUP, 3)]
        (loaded,) = await rig.loaded()
        assert (loaded.version, loaded.num_skipped, loaded.time_ms, loaded.engine) == (3, 0, 103, "engine-0")
        assert loaded.run_id == "run-1"
        assert loaded.seconds > 0

    play(tmp_path, story)


def test_waiting_before_the_follower_runs_or_the_version_exists_is_the_same(tmp_path):
    async def story(rig, start):
        waits = [asyncio.create_task(rig.follower.wait_for(GROUP, version)) for version in (0, 1, 1)]
        await start()
        await rig.publish(0)
        await waits[0]
        assert [wait.done() for wait in waits] == [True, False, False]
        await rig.publish(1)
        await asyncio.gather(*waits)
        await rig.follower.wait_for(GROUP, 0)
        assert rig.versions() == [(GROUP, 0), (GROUP, 1)]

    play(tmp_path, story)


def test_versions_that_come_while_one_is_loaded_are_skipped_and_counted(tmp_path):
    async def story(rig, start):
        await rig.publish(0)
        await start()
        await rig.follower.wait_for(GROUP, 0)
        rig.engine.may_load.clear()
        for version in (1, 2, 3, 4):
            await rig.publish(version)
            await rig.finish_pending()
        rig.engine.may_load.set()
        await rig.follower.wait_for(GROUP, 4)
        await rig.finish_pending()
        assert rig.versions() == [(GROUP, 0), (GROUP, 1), (GROUP, 4)]
        assert [event.num_skipped for event in await rig.loaded()] == [0, 0, 2]

    play(tmp_path, story)


def test_a_wait_that_is_given_up_leaves_nothing_behind(tmp_path):
    async def story(rig, start):
        await start()
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await rig.follower.wait_for(GROUP, 0)
        group = rig.follower._groups[GROUP]
        assert group.waiting == {}
        kept, other = (asyncio.create_task(rig.follower.wait_for(GROUP, 0)) for _ in range(2))
        await rig.finish_pending()
        group.waiting = mock.MagicMock(wraps=group.waiting)
        other.cancel()
        await asyncio.wait([other])
        assert [name for name, *_ in group.waiting.mock_calls] == ["pop"], "goes through no other waits"
        group.waiting = group.waiting._mock_wraps
        await rig.publish(0)
        await kept
        assert rig.follower._groups[GROUP].waiting == {}

    play(tmp_path, story)


def test_a_group_whose_load_hangs_delays_no_other_groups_versions(tmp_path):
    async def story(rig, start):
        await start()
        for group in (GROUP, OTHER):
            await rig.publish(0, group=group)
            await rig.follower.wait_for(group, 0)
        rig.engine.hanging = {GROUP}
        for version in (1, 2):
            await rig.publish(version)
            await rig.finish_pending()
        rig.engine.refused = {3}
        for version in (1, 2, 3):
            await rig.publish(version, group=OTHER)
            if version < 3:
                await rig.follower.wait_for(OTHER, version)
        with pytest.raises(ModelError, match="version 3 does not fit"):
            await rig.follower.wait_for(OTHER, 3)
        await rig.publish(0, group=THIRD)
        await rig.follower.wait_for(THIRD, 0)
        assert rig.engine.version(GROUP) == 0
        rig.engine.hanging.clear()
        await rig.follower.wait_for(GROUP, 2)
        assert rig.versions()[2:] == [(OTHER, 1), (OTHER, 2), (THIRD, 0), (GROUP, 1), (GROUP, 2)]
        rig.engine.hanging = {OTHER}
        await rig.publish(4, group=OTHER)
        await rig.finish_pending()  # a follower that is stopped does not wait for it

    play(tmp_path, story)


def test_a_version_that_the_engine_refuses_ends_a_follower_whose_other_groups_load_hangs(tmp_path):
    async def scenario():
        r = Rig(tmp_path)
        r.engine.refused, r.engine.hanging = {1}, {OTHER}
        follower = WeightFollower(
            r.log, r.artifacts, r.engine, engine_id="endpoint-1", permissions=NOTHING, must_load=True
        )
        waiting = [asyncio.create_task(follower.wait_for(*one)) for one in ((GROUP, 1), (OTHER, 0))]
        await r.publish(0, group=OTHER)
        await r.publish(1)
        async with asyncio.timeout(120):
            with pytest.raises(ModelError, match="version 1 does not fit"):
                await follower.run()
        for one in waiting:
            one.cancel()

    asyncio.run(scenario())


def test_a_group_is_neither_unloaded_while_it_loads_nor_loaded_while_it_is_unloaded(tmp_path):
    async def story(rig, start):
        await rig.publish(0)
        await start()
        await rig.follower.wait_for(GROUP, 0)
        rig.engine.hanging = {GROUP}
        await rig.publish(1)
        await rig.finish_pending()
        await rig.log.send(RunEnded(run_id="run-1", time_ms=1, cause="stopped"))
        await rig.publish(0, group=OTHER)
        await rig.follower.wait_for(OTHER, 0)
        assert rig.engine.unloaded == []
        rig.engine.hanging.clear()
        await rig.finish_pending()
        rig.engine.may_unload.clear()
        await rig.publish(0, group=THIRD)
        coming = asyncio.create_task(rig.follower.wait_for(THIRD, 0))
        await rig.finish_pending()
        await rig.publish(2)
        again = asyncio.create_task(rig.follower.wait_for(GROUP, 2))
        await rig.finish_pending()
        assert (rig.engine.unloaded, coming.done(), again.done()) == ([GROUP], False, False)
        rig.engine.may_unload.set()
        await asyncio.gather(coming, again)
        assert sorted(rig.versions()[:3]) == [(GROUP, 0), (GROUP, 1), (OTHER, 0)]
        assert sorted(rig.versions()[3:]) == [(GROUP, 2), (THIRD, 0)]

    play(tmp_path, story)


def test_a_lower_term_after_a_higher_claim_is_void(tmp_path, caplog):
    async def story(rig, start):
        await rig.claim(1)
        await rig.publish(0, term=1)
        await rig.claim(2)
        await rig.publish(1, term=1)
        await start()
        await rig.follower.wait_for(GROUP, 0)
        await rig.publish(2, term=1)
        await rig.finish_pending()
        assert rig.versions() == [(GROUP, 0)]
        await rig.publish(1, term=2)
        await rig.follower.wait_for(GROUP, 1)
        assert rig.engine.loaded[-1].term == 2

    with caplog.at_level(logging.WARNING):
        play(tmp_path, story)
    assert "published under term 1, and term 2 has taken over" in caplog.text


def test_a_wrong_hash_is_not_loaded_and_is_named_once(tmp_path, caplog):
    async def story(rig, start):
        await rig.publish(0)
        await start()
        await rig.follower.wait_for(GROUP, 0)
        await rig.publish(1, is_broken=True)
        await rig.finish_pending()
        assert rig.versions() == [(GROUP, 0)]
        assert rig.engine.version(GROUP) == 0
        await rig.publish(2)
        await rig.follower.wait_for(GROUP, 2)
        await rig.finish_pending()
        assert [(event.version, event.num_skipped) for event in await rig.loaded()] == [(0, 0), (2, 1)]

    play(tmp_path, story)
    (error,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert "model_group=run-1/policy version=1" in error
    assert "wrong hash" in error
    assert "version 0 stays" in error
    assert "\n" not in error


def test_an_artifact_that_comes_back_is_loaded_without_a_new_version(tmp_path):
    async def story(rig, start):
        await rig.publish(0, is_broken=True)
        await start()
        wait = asyncio.create_task(rig.follower.wait_for(GROUP, 0))
        await rig.finish_pending()
        assert not wait.done()
        (torn,) = (tmp_path / "artifacts").glob("*/*")
        torn.write_bytes(f"{GROUP} 0 1".encode())
        await wait
        assert rig.versions() == [(GROUP, 0)]

    play(tmp_path, story)


def test_weights_that_the_engine_refuses_leave_the_version_before(tmp_path, caplog):
    async def story(rig, start):
        rig.engine.refused = {1}
        await rig.publish(0)
        await start()
        await rig.follower.wait_for(GROUP, 0)
        waiting = asyncio.create_task(rig.follower.wait_for(GROUP, 1))
        later = asyncio.create_task(rig.follower.wait_for(GROUP, 2))
        await asyncio.sleep(0)
        await rig.publish(1)
        for refused in (waiting, rig.follower.wait_for(GROUP, 1)):
            with pytest.raises(ModelError, match="version 1 does not fit"):
                await refused
        await rig.follower.wait_for(GROUP, 0)
        await rig.publish(2)
        await later
        await rig.follower.wait_for(GROUP, 1)

    play(tmp_path, story)
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [
        "not loaded: model_group=run-1/policy version=1: version 1 does not fit; version 0 stays until the next is"
        " published"
    ]


def test_a_version_that_the_engine_refuses_ends_a_follower_that_must_load_it(tmp_path):
    async def scenario():
        r = Rig(tmp_path)
        r.engine.refused.add(0)
        follower = WeightFollower(
            r.log, r.artifacts, r.engine, engine_id="endpoint-1", permissions=NOTHING, must_load=True
        )
        waiting = asyncio.create_task(follower.wait_for(GROUP, 0))
        await r.publish(0)
        async with asyncio.timeout(120):
            with pytest.raises(ModelError, match="version 0 does not fit"):
                await follower.run()
        waiting.cancel()

    asyncio.run(scenario())


def test_an_endpoint_whose_engine_refuses_a_version_ends_with_the_reason(tmp_path):
    async def scenario():
        r = Rig(tmp_path)
        settings = EndpointSettings(
            bootstrap_servers="none",
            artifact_uri=r.artifacts.uri,
            workspace=tmp_path / "w",
            name="endpoint-1",
            model_group=GROUP,
            requires_token=False,
            allow=("model:none",),
        )
        r.engine.refused.add(1)
        await r.publish(0)
        serving = asyncio.create_task(endpoint_service.run(settings, r.log, r.engine))
        async with asyncio.timeout(120):
            while r.engine.version(GROUP) < 0:
                await asyncio.sleep(0.01)
            await r.publish(1)
            with pytest.raises(ModelError, match="version 1 does not fit"):
                await serving

    asyncio.run(scenario())


def test_a_version_collected_while_it_was_loaded_is_skipped_for_the_newest(tmp_path, caplog):
    async def story(rig, start):
        store = SlowStore(rig.artifacts.uri)
        rig.follower = WeightFollower(rig.log, store, rig.engine, engine_id="engine-0", permissions=NOTHING)
        await rig.publish(0)
        await start()
        await rig.follower.wait_for(GROUP, 0)
        store.may_fetch.clear()
        await rig.publish(1)
        await asyncio.to_thread(store.is_asked.wait, 10)
        await rig.publish(2)
        await rig.finish_pending()
        (first,) = [path for path in rig.files() if path.read_bytes() == f"{GROUP} 1 1".encode()]
        first.unlink()
        store.may_fetch.set()
        await rig.follower.wait_for(GROUP, 1)
        await rig.finish_pending()
        assert rig.versions() == [(GROUP, 0), (GROUP, 2)]

    with caplog.at_level(logging.INFO):
        play(tmp_path, story)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert "passing over model_group=run-1/policy version=1: artifact" in caplog.text


def test_an_engine_keeps_the_local_copy_of_the_remote_version_that_it_serves_only(tmp_path):
    def copies():
        return [path.read_bytes().decode() for path in (tmp_path / "cache").rglob("*") if path.is_file()]

    async def story(rig, start):
        rig.artifacts = ArtifactStore(f"memory://{tmp_path}/artifacts", cache=tmp_path / "cache")
        rig.follower = WeightFollower(rig.log, rig.artifacts, rig.engine, engine_id="engine-0", permissions=NOTHING)
        await start()
        rig.engine.refused.add(1)
        for version in (0, 2):
            await rig.publish(version)
            await rig.follower.wait_for(GROUP, version)
            await rig.finish_pending()
            assert copies() == [f"{GROUP} {version} 1"]
            if version == 0:
                await rig.publish(1)
                with pytest.raises(ModelError, match="version 1 does not fit"):
                    await rig.follower.wait_for(GROUP, 1)
        await rig.log.send(RunEnded(run_id="run-1", time_ms=1, cause="stopped"))
        await rig.publish(0, group=THIRD)
        await rig.follower.wait_for(THIRD, 0)
        assert copies() == [f"{THIRD} 0 1"]

    play(tmp_path, story)


def test_an_ended_run_is_unloaded_for_the_next_one(tmp_path):
    async def story(rig, start):
        await rig.publish(0)
        await start()
        await rig.follower.wait_for(GROUP, 0)
        await rig.log.send(RunEnded(run_id="run-1", time_ms=1, cause="stopped"))
        await rig.finish_pending()
        await rig.publish(1)
        await rig.finish_pending()
        assert rig.versions() == [(GROUP, 0)]
        rig.engine.refused.add(GROUP)
        for group in (THIRD, OTHER):
            assert rig.engine.unloaded == []
            await rig.publish(0, group=group)
            await rig.follower.wait_for(group, 0)
            rig.engine.refused.clear()
        assert rig.engine.unloaded == [GROUP]
        await rig.follower.wait_for(GROUP, 1)
        assert rig.versions() == [(GROUP, 0), (THIRD, 0), (OTHER, 0), (GROUP, 1)]

    play(tmp_path, story)


def test_an_undecodable_record_is_skipped(tmp_path, caplog):
    async def story(rig, start):
        await rig.log.send_raw("weights", key=b"run-1/policy", value=b"{")
        await rig.publish(0)
        await start()
        await rig.follower.wait_for(GROUP, 0)

    play(tmp_path, story)
    assert "passing over weights offset 0" in caplog.text


def test_older_versions_removed_by_retention_are_not_needed(tmp_path):
    async def main():
        rig = Rig(tmp_path)
        await rig.publish(0)
        await rig.publish(1)
        rig.log.truncate(TopicPartition("weights", 0), 2)
        running = asyncio.create_task(rig.follower.run())
        await rig.finish_pending()
        await rig.publish(2)
        await rig.follower.wait_for(GROUP, 2)
        running.cancel()
        await asyncio.wait({running})
        assert running.cancelled()

    asyncio.run(main())
