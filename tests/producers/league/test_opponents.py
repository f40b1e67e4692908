"""Opponents on a log in memory: whose weights an engine holds, what is recorded, and who is drawn after a kill."""

import asyncio

import pytest

from rollstream.eventlog import codec
from rollstream.producers.league.draw import opponents_of
from rollstream.schemas import ids
from rollstream.schemas.errors import ModelError, StoreUnavailableError
from rollstream.schemas.events import (
    GroupStarted,
    LearnerClaimed,
    RolloutEnded,
    RolloutFailed,
    RunEnded,
    RunStarted,
    StepRecorded,
)
from rollstream.schemas.settings import ArtifactRef
from tests.producers import worker_rig as r
from tests.producers.conftest import output_of
from tests.rigs.runs.league_rig import GROUP, RUN, SEATS, League, play, task


def test_an_opponents_steps_are_recorded_at_its_version_and_its_seat_is_not_trained(tmp_path):
    async def main():
        league = League(tmp_path)
        await league.publish(*range(6))
        await play(league, *(task(index, 5) for index in range(4)))
        groups = {event.group_id: event for event in await r.steps(league.log, GroupStarted)}
        for one in (task(index, 5) for index in range(4)):
            assert groups[one.group_id].opponents == opponents_of(one)
            assert groups[one.group_id].outcome == "outcome"
            assert groups[one.group_id].agents.keys() == SEATS.keys() - opponents_of(one).keys()
        for step in await r.steps(league.log, StepRecorded):
            opponent = groups[step.group_id].opponents.get(step.agent)
            assert step.llm is not None
            (span,) = step.llm.spans
            assert ids.player(span.model_group, span.version) == (opponent or f"{GROUP}@5")
            assert step.metadata == ({"rollstream": {"untrained": "opponent"}} if opponent else None)
        assert len(await r.steps(league.log, RolloutEnded)) == 8

    asyncio.run(main())


def test_a_scripted_opponent_plays_without_tokens_and_wins_where_it_can(tmp_path):
    async def main():
        league = League(tmp_path)
        await league.publish(0)
        await play(league, *(task(index, 0, pool=0, scripted=("perfect",)) for index in range(3)))
        steps = await r.steps(league.log, StepRecorded)
        scripted = [step for step in steps if step.name == "scripted:perfect"]
        assert scripted
        assert all(step.llm is None for step in scripted)
        assert all(step.llm is not None for step in steps if step.name == GROUP)

    asyncio.run(main())


def test_no_more_opponents_are_in_memory_than_allowed(tmp_path):
    async def main():
        league = League(tmp_path)
        await league.publish(*range(9))
        most = []
        load = league.engine.load

        async def watched(published, path):
            await load(published, path)
            most.append(len([one for one in range(9) if league.engine.version(ids.player(GROUP, one)) >= 0]))

        league.engine.load = watched
        await play(league, *(task(index, 8, max_loaded=2) for index in range(12)))
        assert max(most) == 2
        assert len(set(most)) == 2
        assert len(await r.steps(league.log, RolloutEnded)) == 24

    asyncio.run(main())


def test_two_opponents_needed_at_once_are_both_loaded_beyond_a_bound_of_one(tmp_path):
    async def main():
        league = League(tmp_path)
        await league.publish(*range(3))
        await league.opponents.hold([f"{GROUP}@0", f"{GROUP}@1", "scripted:random"], 1, RUN)
        assert league.opponents.loaded == (f"{GROUP}@0", f"{GROUP}@1")
        waiting = asyncio.create_task(league.opponents.hold([f"{GROUP}@2"], 1, RUN))
        await asyncio.sleep(0)
        assert not waiting.done()
        league.opponents.release([f"{GROUP}@0", f"{GROUP}@1"])
        await waiting
        assert league.opponents.loaded == (f"{GROUP}@2",)

    asyncio.run(main())


def test_one_opponent_that_the_store_does_not_give_keeps_no_task_from_those_that_are_loaded(tmp_path):
    async def main():
        league = League(tmp_path)
        await league.publish(0, 1, 2)
        loaded, absent, fetch = f"{GROUP}@0", f"{GROUP}@1", league.artifacts.fetch
        await league.opponents.hold([loaded], 3, RUN)
        asked = asyncio.Event()

        def fetch_nothing(ref):
            loop.call_soon_threadsafe(asked.set)
            raise StoreUnavailableError("it does not answer")

        loop, league.artifacts.fetch = asyncio.get_running_loop(), fetch_nothing
        waiting = asyncio.create_task(league.opponents.hold([absent], 3, RUN))
        async with asyncio.timeout(5):
            await asked.wait()
            await league.opponents.hold([loaded], 3, RUN)
            assert not waiting.done()
            league.artifacts.fetch = fetch
            await waiting
        assert sorted(league.opponents.loaded) == [loaded, absent]

    asyncio.run(main())


@pytest.mark.parametrize("message", ["Stale file handle (os error 116)", "no such tensor"])
def test_an_opponent_whose_disk_fails_is_loaded_again_and_another_error_is_raised(tmp_path, message):
    async def main():
        league = League(tmp_path)
        await league.publish(0, 1)
        player, load, failures = f"{GROUP}@0", league.engine.load, [OSError(message)]

        async def failing(published, path):
            if failures:
                raise failures.pop()
            await load(published, path)

        league.engine.load = failing
        if "os error" in message:
            await league.opponents.hold([player], 1, RUN)
            assert league.opponents.loaded == (player,)
        else:
            with pytest.raises(OSError, match=message):
                await league.opponents.hold([player], 1, RUN)

    asyncio.run(main())


@pytest.mark.parametrize("ends", ["cancelled", "failed"])
def test_an_opponent_whose_load_does_not_end_well_leaves_the_engine(tmp_path, ends):
    async def main():
        league = League(tmp_path)
        await league.publish(0, 1)
        player, load, is_in = f"{GROUP}@0", league.engine.load, asyncio.Event()

        async def half(published, path):
            await load(published, path)
            is_in.set()
            if ends == "failed":
                raise ModelError("it did not answer")
            await asyncio.Event().wait()

        league.engine.load = half
        hold = asyncio.create_task(league.opponents.hold([player], 1, RUN))
        await is_in.wait()
        if ends == "cancelled":
            assert league.engine.version(player) == 0
            hold.cancel()
        (outcome,) = await asyncio.gather(hold, return_exceptions=True)
        assert isinstance(outcome, ModelError if ends == "failed" else asyncio.CancelledError)
        assert (league.engine.version(player), league.opponents.loaded) == (-1, ())
        league.engine.load = load
        await league.opponents.hold([player], 1, RUN)
        assert league.opponents.loaded == (player,)

    asyncio.run(main())


def test_an_unload_that_is_cancelled_ends_all_the_same(tmp_path):
    async def main():
        league = League(tmp_path)
        await league.publish(0, 1)
        first, second = f"{GROUP}@0", f"{GROUP}@1"
        await league.opponents.hold([first], 1, RUN)
        league.opponents.release([first])
        unload, begun, may_end = league.engine.unload, asyncio.Event(), asyncio.Event()

        async def slow(model_group):
            begun.set()
            await may_end.wait()
            await unload(model_group)

        league.engine.unload = slow
        hold = asyncio.create_task(league.opponents.hold([second], 1, RUN))
        await begun.wait()
        hold.cancel()
        await asyncio.sleep(0)
        may_end.set()
        await asyncio.wait({hold})
        assert hold.cancelled()
        assert (league.engine.version(first), league.opponents.loaded) == (-1, ())

    asyncio.run(main())


def test_opponents_leave_the_engine_when_the_run_that_they_were_loaded_for_ends(tmp_path):
    async def main():
        league = League(tmp_path)
        await league.publish(*range(4))
        working = asyncio.create_task(league.worker().run())
        for index in range(6):
            await league.log.send(task(index, 3, max_loaded=2))
        await r.wait_until(lambda: r.all_settled(league.log, 6))
        players = league.opponents.loaded
        assert len(players) == 2
        await league.log.send(RunEnded(run_id=RUN, time_ms=500, cause="completed"))
        await r.wait_until(lambda: all(league.engine.version(player) < 0 for player in players))
        assert league.opponents.loaded == ()
        assert league.engine.version(GROUP) == 3
        working.cancel()
        await asyncio.wait({working})

    asyncio.run(main())


def test_an_opponent_stays_as_long_as_a_task_or_another_run_needs_it(tmp_path):
    async def main():
        league = League(tmp_path)
        await league.publish(*range(3))
        shared, held, free = (f"{GROUP}@{version}" for version in range(3))
        opponents = league.opponents
        unloading = asyncio.create_task(opponents.unload_ended())
        await opponents.hold([shared, held, free], 3, "run-2")
        await opponents.hold([shared], 3, "run-3")
        opponents.release([shared, shared, free])
        opponents.end_run("run-2")
        await r.wait_until(lambda: free not in opponents.loaded)
        assert opponents.loaded == (held, shared)
        opponents.release([held])
        await r.wait_until(lambda: held not in opponents.loaded)
        assert opponents.loaded == (shared,)
        await opponents.hold([free], 3, "run-2")  # by a task that is stopped a moment later
        opponents.release([free])
        await r.wait_until(lambda: free not in opponents.loaded)
        opponents.end_run("run-3")
        await r.wait_until(lambda: league.engine.version(shared) < 0)
        assert opponents.loaded == ()
        unloading.cancel()
        await asyncio.wait({unloading})

    asyncio.run(main())


def test_a_version_that_is_unknown_or_gone_is_an_error_that_names_it(tmp_path):
    async def main():
        league = League(tmp_path)
        await league.log.send(LearnerClaimed(run_id=RUN, time_ms=1, model_group=GROUP, term=1, learner="one"))
        first = await league.publish(0)
        await league.publish(1)
        await league.collect(first)
        for player, why in (
            (f"{GROUP}@7", r"player run-1/policy@7: this version is unknown; of model group run-1/policy the newest"),
            (
                f"{RUN}/verifier@0",
                r"run run-1 has no model group verifier; it has policy; name one as run-1/GROUP@0",
            ),
            (f"{GROUP}@0", r"run-1/policy@0: its weights are gone: collected by gc at .*; choose a version that is"),
        ):
            with pytest.raises(ModelError, match=why):
                await league.opponents.hold([player], 2, RUN)
        assert league.opponents.loaded == ()
        await league.opponents.hold([f"{GROUP}@1"], 1, RUN)

    asyncio.run(main())


def test_an_opponent_of_a_run_without_versions_is_waited_for_only_while_it_may_publish_one(tmp_path):
    async def main():
        league = League(tmp_path)
        dataset = ArtifactRef(uri="memory://d", sha256="0" * 64, size_bytes=0)
        for run_id in ("open", "over"):
            await league.log.send(
                RunStarted(
                    run_id=run_id,
                    time_ms=1,
                    name="run",
                    config={},
                    seed=7,
                    dataset=dataset,
                    num_examples=1,
                    num_partitions=1,
                )
            )
        await league.log.send(RunEnded(run_id="over", time_ms=2, cause="failed"))
        for run_id, why in (
            ("open", "of model group open/policy no version is published; wait for one"),
            ("over", "run over ended before it published a version of over/policy; name a version of another run"),
            ("other", "run other is not in this log or export; name a version of a run that is: open, over"),
        ):
            with pytest.raises(ModelError, match=f"player {run_id}/policy@0: this version is unknown; {why}$"):
                await league.opponents.hold([f"{run_id}/policy@0"], 2, RUN)

    asyncio.run(main())


def test_a_task_whose_opponent_was_collected_fails_with_the_reason(tmp_path):
    async def main():
        league = League(tmp_path)
        first = await league.publish(0)
        await league.publish(1)
        await league.collect(first)
        await play(league, task(0, 1))
        (failed,) = await r.steps(league.log, RolloutFailed)
        assert (failed.cause, failed.is_final) == ("engine_error", True)
        assert "player run-1/policy@0: its weights are gone: collected by gc at" in failed.message

    asyncio.run(main())


def test_versions_of_a_replaced_learner_are_refused_as_opponents(tmp_path):
    async def main():
        league = League(tmp_path)
        for term in (1, 2):
            await league.log.send(LearnerClaimed(run_id=RUN, time_ms=1, model_group=GROUP, term=term, learner="one"))
        await league.publish(0, term=1)
        with pytest.raises(ModelError, match="this version is unknown"):
            await league.opponents.hold([f"{GROUP}@0"], 1, RUN)

    asyncio.run(main())


def test_after_a_kill_the_new_owner_draws_the_same_opponents_and_plays_the_same_games(tmp_path):
    tasks = [task(index, 5, scripted=("random",)) for index in range(6)]

    async def games(folder, cut_after):
        league = League(folder)
        await league.publish(*range(6))
        if cut_after is not None:
            wire = r.Wire(league.log, cut_after=cut_after)
            first = asyncio.create_task(league.worker(log=wire).run())
            for one in tasks:
                await league.log.send(one)
            await r.wait_until(lambda: wire.is_cut)
            first.cancel()
            await asyncio.wait({first})
            league.opponents = league.new_opponents()
            working = asyncio.create_task(league.worker("producer-2").run())
            await r.wait_until(lambda: r.all_settled(league.log, len(tasks)))
            working.cancel()
            await asyncio.wait({working})
        else:
            await play(league, *tasks)
        return await contents(league.log)

    async def contents(log):
        """Messages of each member's complete attempt with their agents, by member."""
        ended = {event.rollout_id for event in await r.steps(log, RolloutEnded)}
        steps = {}
        for step in await r.steps(log, StepRecorded):
            if step.rollout_id in ended:
                member = step.rollout_id.rpartition("/")[0]
                steps.setdefault(member, []).append((step.step_index, step.agent, step.name, output_of(step)))
        started = [(event.group_id, event.opponents, event.agents) for event in await r.steps(log, GroupStarted)]
        return sorted(started), {member: sorted(found) for member, found in steps.items()}

    async def main():
        calm = await games(tmp_path / "calm", None)
        for cut_after in (1, 9, 25):
            assert await games(tmp_path / f"cut-{cut_after}", cut_after) == calm

    asyncio.run(main())


def test_a_record_of_a_task_with_a_league_is_a_task() -> None:
    one = task(0, 5, frozen=(0,))
    encoded = codec.encode(one)
    assert codec.parse(encoded.topic, encoded.value)[0] == one
