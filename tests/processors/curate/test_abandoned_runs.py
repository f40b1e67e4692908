"""Abandoned runs: those without a sign of life, whatever the clocks of partitions and machines do."""

from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.schemas.events import EpochSealed, RunContinued, RunEnded
from rollstream.schemas.events.training import StepsRange

TIMEOUT_MS = 60_000
BEAT_MS = TIMEOUT_MS // 6
HOUR_MS = 3_600_000
NUM_PARTITIONS = 2


class World:
    """Real time, a clock for each owner of a steps partition, wall clocks that jump, and a busy run that tells time.

    Run `live` gives a sign of life every BEAT_MS, run `left` never does. An owner's clock begins at the newest event
    time of its partition; one that was replaced may write on.
    """

    def __init__(self, partition, make_closed):
        self.partition, self.make_closed = partition, make_closed
        self.real_ms, self.wall_ahead_ms, self.last_beat_ms = 10 * HOUR_MS, 0, 0
        self.newest_ms = [HOUR_MS * (number + 1) for number in range(NUM_PARTITIONS)]  # far behind the wall clock
        self.owners = [self.newest_ms[number] - self.real_ms for number in range(NUM_PARTITIONS)]
        self.zombies = []
        self.abandoned_at_ms = {}
        for run_id in ("live", "left", "busy"):
            self.stamp()
            partition.start_run(run_id, idle_timeout_s=TIMEOUT_MS / 1000)
        partition.start_job("busy", tasks_per_epoch=1, num_epochs=10**6, num_generations=1)
        (self.task,) = partition.start_epoch(0, "busy")
        self.num_closed = 0

    def stamp(self):
        self.partition.time_ms = self.real_ms + self.wall_ahead_ms

    def write(self, event):
        for output in self.partition.write(event):
            if isinstance(output, RunEnded):
                self.abandoned_at_ms[output.run_id] = self.real_ms

    def wait(self, ms):
        until = self.real_ms + ms
        while self.real_ms < until:
            self.real_ms = min(until, self.real_ms + BEAT_MS)
            self.stamp()
            self.write(RunContinued(run_id="live", time_ms=self.partition.time_ms))

    def jump(self, ms):
        """Somebody sets the wall clock, or a machine was suspended: no monotonic clock has seen it."""
        self.wall_ahead_ms = max(-self.real_ms, self.wall_ahead_ms + ms)

    def begin_job(self, name):
        """The harness of the busy run writes with its wall clock, or with a time copied from any partition."""
        self.stamp()
        if name % 2:
            self.partition.time_ms = self.newest_ms[name % NUM_PARTITIONS]
        for output in self.partition.start_job("busy", f"other-{name}"):
            assert not isinstance(output, RunEnded)

    def replace(self, number):
        self.zombies.append((number, self.owners[number]))
        self.owners[number] = self.newest_ms[number] - self.real_ms

    def close(self, number):
        self.close_at(number, self.owners[number])

    def close_by_zombie(self, which):
        if self.zombies:
            self.close_at(*self.zombies[which % len(self.zombies)])

    def close_at(self, number, clock):
        time_ms = self.real_ms + clock
        self.newest_ms[number] = max(self.newest_ms[number], time_ms)
        self.num_closed += 1
        where = StepsRange(partition=number, first_offset=0, last_offset=self.num_closed)
        group_id = f"busy/rl/e00000/t{self.num_closed:05d}"
        self.write(self.make_closed(self.task, (), group_id=group_id, time_ms=time_ms, steps_at=where))


NUMBER = st.integers(0, NUM_PARTITIONS - 1)
WAIT = st.tuples(st.just("wait"), st.integers(1, 2 * TIMEOUT_MS))
CLOSE = st.tuples(st.just("close"), NUMBER)
CALM = st.lists(
    st.one_of(
        WAIT,
        CLOSE,
        CLOSE,
        st.tuples(st.just("jump"), st.integers(-5 * HOUR_MS, 5 * HOUR_MS)),
        st.tuples(st.just("begin_job"), st.integers(0, 1000)),
        st.tuples(st.just("replace"), NUMBER),
    ),
    max_size=60,
)
ZOMBIE = st.tuples(st.just("close_by_zombie"), st.integers(0, 1))


def play(world, actions):
    for name, argument in actions:
        getattr(world, name)(argument)


@settings(max_examples=200)
@given(CALM)
def test_no_run_is_abandoned_before_its_time_out_has_really_passed(new_partition, make_closed, actions):
    world = World(new_partition(), make_closed)
    began_ms = world.real_ms
    play(world, actions)
    assert "live" not in world.abandoned_at_ms
    assert world.abandoned_at_ms.get("left", began_ms + TIMEOUT_MS) >= began_ms + TIMEOUT_MS


@settings(max_examples=200)
@given(CALM, st.lists(st.one_of(WAIT, CLOSE, ZOMBIE, ZOMBIE), max_size=40))
def test_a_run_with_signs_of_life_outlives_replaced_owners_that_write_on(new_partition, make_closed, calm, actions):
    world = World(new_partition(), make_closed)
    play(world, [action for action in calm if action[0] != "replace"])
    world.replace(0)  # the first one was hours ahead of its successor
    world.zombies[0] = (0, world.zombies[0][1] + 10 * HOUR_MS)
    play(world, actions)
    assert "live" not in world.abandoned_at_ms


@settings(max_examples=100)
@given(CALM)
def test_a_run_that_was_left_is_abandoned_once_others_have_gone_on_long_enough(new_partition, make_closed, actions):
    world = World(new_partition(), make_closed)
    play(world, actions)
    for _ in range(6):
        world.wait(TIMEOUT_MS // 2)
        world.close(0)
    assert set(world.abandoned_at_ms) == {"left"}


def test_a_learner_step_longer_than_the_time_out_abandons_no_run_that_is_conducted(partition, make_closed):
    world = World(partition, make_closed)
    for _ in range(50):
        world.wait(TIMEOUT_MS // 3)
        world.close(0)
    assert set(world.abandoned_at_ms) == {"left"}
    assert "live" in partition.state.runs


def test_signs_of_life_are_not_remembered_one_by_one(partition):
    partition.start_run("run-1")
    before = repr(partition.state)
    for number in range(100):
        partition.write(RunContinued(run_id="run-1", time_ms=2_000 + number))
    assert repr(partition.state) == before


def test_an_idle_timeout_beyond_all_times_stops_no_other_run(partition, make_closed):
    partition.start_run("endless", idle_timeout_s=1e306)
    tasks = partition.start(tasks_per_epoch=3, num_generations=2)
    sent = []
    for number, task in enumerate(tasks):
        steps_at = StepsRange(partition=0, first_offset=number, last_offset=number)
        sent += partition.write(make_closed(task, [0.0, 1.0], steps_at=steps_at, time_ms=number * 2**51))
    assert not [event for event in sent if isinstance(event, RunEnded)]
    assert [event for event in sent if isinstance(event, EpochSealed)]
