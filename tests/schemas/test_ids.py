"""Ids: derived, so that a retry repeats them, and apart where the facts are."""

from hypothesis import given
from hypothesis import strategies as st

from rollstream.eventlog.log import partition_of
from rollstream.schemas import ids


def test_ids_name_what_they_stand_for() -> None:
    group = ids.group_id("run-1", "rl", 2, 7)
    assert group == "run-1/rl/e00002/t00007"
    assert ids.rollout_id(group, 3, 1) == "run-1/rl/e00002/t00007/m3/a1"
    assert ids.trajectory_id(ids.rollout_id(group, 3, 1), "player") == "run-1/rl/e00002/t00007/m3/a1/player"
    assert ids.batch_id(ids.job_id("run-1", "rl"), 12) == "run-1/rl/b000012"
    assert ids.run_of(group) == "run-1"


def test_a_versions_name_is_read_as_it_is_written() -> None:
    assert ids.version_name("run-1", 12) == "run-1@12"
    group = ids.model_group("run-1", "critic")
    assert ids.version_name(group, 12) == ids.version_name("run-1", 12, "critic") == ids.player(group, 12)
    for name, parts in (("run-1@12", ("run-1", "", 12)), ("run-1/critic@12", ("run-1", "critic", 12))):
        assert ids.parsed_version(name) == parts
        run_id, model_group, version = parts
        assert ids.version_name(run_id, version, model_group) == name
    assert ids.parsed_version("run-1/critic/x@12") is None


def test_fresh_runs_differ() -> None:
    assert len({ids.new_run_id("demo") for _ in range(100)}) == 100


def test_a_fresh_runs_id_can_be_an_id_whatever_the_name_is() -> None:
    for name, begin in (("demo", "demo"), ("a/b c.v2", "a-b-c.v2"), ("../x", "x"), ("ä", "run"), ("", "run")):
        made = ids.new_run_id(name)
        assert made[:-7] == begin
        assert ids.run_of(f"{made}/rl") == made
    assert len(ids.new_run_id("n" * 200)) == ids.MAX_NAME + 7


def test_groups_sort_in_order_of_epoch_and_index() -> None:
    made = [ids.group_id("r", "rl", epoch, index) for epoch in (0, 1, 10) for index in (0, 2, 10, 999)]
    assert made == sorted(made)


def test_seeds_are_the_same_on_every_machine() -> None:
    assert ids.derive_seed(0, "run/rl/e00000/t00000") == 3235646087366692459


@given(st.lists(st.text() | st.integers(), min_size=1), st.lists(st.text() | st.integers(), min_size=1))
def test_seeds_are_non_negative_and_fit_in_63_bits(one: list[str | int], other: list[str | int]) -> None:
    assert 0 <= ids.derive_seed(*one) < 2**63
    if "\x1f".join(map(str, one)) != "\x1f".join(map(str, other)):
        assert ids.derive_seed(*one) != ids.derive_seed(*other)


def test_the_partition_of_a_key_never_changes() -> None:
    assert [partition_of(key, 6) for key in ("run/rl/e00000/t00000", b"run/rl/e00000/t00001", "")] == [4, 0, 0]


def test_a_group_is_named_by_epoch_and_index_or_by_its_id() -> None:
    assert ids.named_group("run-1", "rl", "3/12") == ids.group_id("run-1", "rl", 3, 12)
    assert ids.named_group("run-1", "rl", "run-1/rl/e00003/t00012") == "run-1/rl/e00003/t00012"
