"""Curation of any run: plans, random choices, and a simulation of all who take part."""

from hypothesis import strategies as st

from rollstream.schemas.events import (
    BatchPlanned,
    EpochSealed,
    RunEnded,
    TaskRequested,
)

CURRICULA = st.builds(
    lambda enabled, adaptive, subsample, ascending, window: {
        "enabled": enabled,
        "steer": adaptive,
        "random_subsample": subsample,
        "sort_ascending": ascending,
        "window_versions": window,
        "expansion_interval": 2,
        "explore_share": 0.3,
    },
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 0.5]),
    st.booleans(),
    st.integers(1, 4),
)
PLANS = st.fixed_dictionaries(
    {
        "planning": st.sampled_from(["stream", "stream", "stream", "submitted"]),
        "num_epochs": st.integers(1, 3),
        "tasks_per_epoch": st.integers(1, 7),
        "batches_per_epoch": st.integers(1, 3),
        "max_staleness": st.integers(0, 3),
        "num_generations": st.integers(1, 3),
        "min_generations": st.integers(1, 3),
        "drop_zero_variance": st.booleans(),
        "max_refills": st.integers(0, 2),
        "curriculum": CURRICULA,
        "policy": st.sampled_from(["model", "model", "demonstration"]),
    }
)
RANDOMS = st.randoms(use_true_random=False)


class Simulation:
    """Runs that close groups in any order, repeat records, submit, go on to the next epoch, or end at any time."""

    def __init__(self, partition, plans, random, make_closed, make_member):
        self.partition, self.random = partition, random
        self.make_closed, self.make_member = make_closed, make_member
        self.plans = {f"run-{number}": plan for number, plan in enumerate(plans)}
        self.open_tasks, self.to_start, self.to_submit, self.ended = [], [], {}, set()
        for run_id, plan in self.plans.items():
            partition.start_run(run_id, idle_timeout_s=random.choice([0.2, 3600.0]))
            self.check(partition.start_job(run_id, **plan))
            self.to_start.append((run_id, 0))

    def check(self, outputs):
        for event in outputs:
            if isinstance(event, TaskRequested):
                planned = self.num_batches(event.run_id)
                assert event.min_version <= planned, "a task waits for a version that nothing planned yields"
                self.open_tasks.append(event)
            elif isinstance(event, EpochSealed) and not event.is_last:
                self.to_start.append((event.run_id, event.epoch + 1))
            elif isinstance(event, RunEnded):
                self.ended.add(event.run_id)

    def num_batches(self, run_id):
        return sum(isinstance(event, BatchPlanned) and event.run_id == run_id for event in self.partition.sent)

    def run(self):
        for _ in range(200):
            self.partition.time_ms += self.random.randrange(100)
            actions = [self.close] * 4 * bool(self.open_tasks) + [self.start] * bool(self.to_start)
            actions += [self.submit] * bool(self.to_submit)
            if not actions:
                break
            self.random.choice([*actions * 4, self.repeat, self.end, self.roll_back])()
        for run_id in self.plans:
            self.check(self.partition.end_run(run_id))
        while self.open_tasks:
            self.close()

    def close(self):
        task = self.open_tasks.pop(self.random.randrange(len(self.open_tasks)))
        newest = max(self.num_batches(task.run_id), task.min_version)
        versions = [task.min_version, newest, max(0, task.min_version - 1)]
        members = tuple(
            self.make_member(
                task.group_id,
                number,
                self.random.choice([0.0, 0.05, 1.0]),
                version=self.random.choice(versions),
                has_logprobs=self.random.random() < 0.9,
            )
            for number in range(self.random.choice([0, task.num_rollouts, task.num_rollouts]))
        )
        event = self.make_closed(task, (), members=members, time_ms=self.partition.time_ms)
        self.check(self.partition.write(event))
        if (task.run_id, task.epoch) in self.to_submit:
            chosen = [member.trajectory_id for member in members if self.random.random() < 0.7]
            group = (task.group_id, dict.fromkeys(chosen, 0.5))
            self.to_submit[task.run_id, task.epoch].append(group)

    def start(self):
        run_id, epoch = self.to_start.pop()
        plan = self.plans[run_id]
        if plan["planning"] == "stream":
            self.check(self.partition.start_epoch(epoch, run_id))
            return
        size, at = plan["num_generations"], max(0, self.num_batches(run_id) - plan["max_staleness"])
        tasks = self.partition.start_submitted_epoch(epoch, run_id, plan["tasks_per_epoch"], size, at)
        self.check(tasks)
        self.to_submit[run_id, epoch] = []

    def submit(self):
        where = self.random.choice(sorted(self.to_submit))
        run_id, epoch = where
        self.check(self.partition.submit(self.to_submit.pop(where), epoch, run_id))

    def repeat(self):
        event = self.random.choice(self.partition.records).event
        if event.run_id in self.partition.state.runs:
            self.check(self.partition.write(event))

    def roll_back(self):
        run_id = self.random.choice(sorted(self.plans))
        if run_id in self.partition.state.runs:
            newest = self.num_batches(run_id)
            after = self.random.choice([newest, max(0, newest - 1)])
            self.check(self.partition.roll_back(self.random.randrange(newest + 2), after=after, run_id=run_id))

    def end(self):
        if self.random.random() < 0.2:
            self.check(self.partition.end_run(self.random.choice(sorted(self.plans))))


def simulate(new_partition, plans, random, make_closed, make_member):
    partition = new_partition(num_examples=5)
    Simulation(partition, plans, random, make_closed, make_member).run()
    return partition
