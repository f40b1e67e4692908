"""Rules about names: one home for a rule, one name for a class, no replaced word, no protocol without callers. No rule
has its home in a command.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from tests.rigs.sources.one_home import in_sql
from tests.rigs.sources.source_tree import (
    ALLOWED,
    BY_A_TABLE,
    GIVEN_BY,
    ONE_HOME,
    REPEATED_NAMES,
    ROOT,
    Plant,
    arrows,
    away_from_home,
    classes_in,
    empty_homes,
    imports_of,
    repeated_classes,
    repeated_files,
    small_with_one_importer,
    sources,
    uncalled_methods,
    unpublished_imports,
    without_contract,
)
from tests.rigs.sources.words import banned_words, texts

MAY_STAY_SMALL = {
    "harness/services/committed_offsets.py": "owns the format of a file in the workspace",
    "learner/reading/letters.py": "a bounded cache of `dlq` with a lifetime of its own",
    "learner/reading/position.py": "owns the format of a file beside the checkpoints",
    "metrics/sql/landlock.py": "system calls by ctypes",
    "metrics/sql/select_only.py": "parses users' SQL, tested without the query process",
    "processors/curate/refold.py": "only reads: the shell alone changes state",
    "processors/host/client.py": "corrects aiokafka's client by its private parts; consumer knows Faust",
}
"""Files under 60 lines with one importer, and why they are not folded into it."""
SUITES = [*(ROOT / "tests" / "contracts").glob("*.py"), ROOT / "tests/producers/protocols/test_protocols.py"]
WITHOUT_SUITE = {
    "Routes": "two servers with shared code; what differs is tested in tests/producers/gateway and openai",
    "TrajectoryBuilder": "each has another source of rollouts: tests/harness/components and tests/harness/nat",
    "TrainerAdapter": "NAT's process and other backends: tests/end_to_end/nat, and external/test_other_backend.py",
}
"""Interfaces whose implementations no suite compares, and why."""
CALLED_BY_OTHERS = {"TrajectoryBuilder.compute_reward"}
"""Methods of NAT's interfaces that NAT and users' components call (docs/extending.md)."""
REPEATED = {
    "access": "eventlog/kafka: to the broker; producers/openai: to the endpoint",
    "attempts": "eventlog: their rules; metrics: their rows",
    "builtin": "what is built in of its folder's kind: components, evaluators, protocols",
    "client": "of Kafka, of Faust's consumer, of the SQL service",
    "components": "harness/config: their settings; harness/nat: their wrappers for NAT",
    "curriculum": "processors/curate: the rule; harness/components: its use by an epochwise trainer",
    "dead_letters": "eventlog: the records; harness/upkeep: the commands for them",
    "environment": "producers: the old path of producers/rollout, for one release",
    "errors": "schemas: the tree; harness/config: the wording of those of a file",
    "evaluators": "schemas: their settings; harness/nat: their wrappers for NAT",
    "export": "of a model, of a run, and the command; the folder says which",
    "finetune": "harness/cli: the command; harness: what it calls",
    "ingest": "harness/cli: the command; harness/recorded: what it calls",
    "pairs": "learner/algorithms: of trajectories; harness/recorded: of recorded candidates",
    "plan": "harness/runs: of a run; replay/what_if: of a what-if",
    "progress": "harness/runs: of a run; learner: of its jobs",
    "reader": "eventlog/kafka: of Kafka; replay/archive: of an export",
    "recorded": "schemas/events: recorded rollouts; producers/environments: the environment that plays them",
    "registry": "harness/config: of components; producers/rollout: of environments and rewards",
    "rewards": "of a file, of protocols, of rollouts, of a what-if; producers: the old path, for one release",
    "session": "producers: the old path of producers/rollout, for one release",
    "tasks": "processors/curate: requested of an epoch; harness/recorded: of recorded rollouts",
    "tokens": "schemas: as text in events; learner/algorithms: of a micro-batch, public for users' algorithms",
    "topics": "schemas: the table; eventlog/kafka: those of a broker",
    "trainer": "learner: trains a job; harness/components: NAT's interface Trainer",
    "training": "schemas/events: its events; replay, replay/what_if: training again, training a what-if",
    "trajectories": "processors/assemble: made of steps; harness/components: handed to components",
    "weights": "schemas/events: their events; replay: their verification",
    "worker": "learner, producers: the worker of that service",
}
"""Names of files that several folders have, and how the folders say the difference. None is added."""


def test_a_small_file_with_one_importer_is_part_of_it() -> None:
    assert small_with_one_importer(arrows(sources())) == set(MAY_STAY_SMALL), "an exception that is not needed goes"


def test_a_public_class_has_a_name_of_its_own() -> None:
    assert repeated_classes(sources()) == {}


def test_no_further_file_name_is_repeated() -> None:
    assert repeated_files(sources()) == set(REPEATED), "a name that is repeated no longer goes"
    counts = Counter(path.stem for path in sources())
    assert [name for name in sorted(REPEATED_NAMES) if counts[name] < 2] == [], "a name that is not repeated goes"


def by_file(check: Callable[[Path], list[str]]) -> dict[str, list[str]]:
    return {str(path.relative_to(ROOT)): found for path in sources() if (found := check(path))}


def test_a_rule_has_one_home() -> None:
    assert by_file(away_from_home) == {}
    assert empty_homes() == [], "a home that does not have the rule goes"


COMMAND_MODULE = re.compile(r"rollstream\.harness\.cli\.(?!main\b|shared_options\b|terminal\b)\w+")
"""A module of commands; the others are the command line itself and what its commands share."""


def command_imports(path: Path, root: Path = ROOT) -> list[str]:
    """Imports of a module of commands: a rule that others need has its home below, and `rollstream` runs commands."""
    return [f"{path.relative_to(root)}:{line}" for line, name in imports_of(path) if COMMAND_MODULE.match(name)]


def test_only_the_tests_of_commands_import_one() -> None:
    folders = (ROOT / name for name in ("tests", "benchmarks", "docs", "examples"))
    paths = [*sources(), *(path for folder in folders for path in sorted(folder.rglob("*.py")))]
    others = [path for path in paths if path.parent != ROOT / "tests" / "harness" / "cli"]
    assert [line for path in others for line in command_imports(path)] == []


def test_an_import_of_a_command_is_found(tmp_path: Path, plant: Plant) -> None:
    text = (
        "from rollstream.harness.cli import main, replay\nfrom rollstream.harness.cli.main import rollstream\n\n\n"
        "def late():\n    from rollstream.harness.cli.gc import gc\n    import rollstream.harness.cli.terminal\n"
    )
    found = command_imports(plant("harness/planted.py", text), tmp_path)
    assert found == ["harness/planted.py:1", "harness/planted.py:6"]


def test_producers_leave_the_threads_of_asyncio_to_users_code() -> None:
    shared = re.compile(r"asyncio\.to_thread|run_in_executor\(None")
    assert [path for path in (ROOT / "producers").rglob("*.py") if shared.search(path.read_text("utf-8"))] == []


def test_sql_takes_no_id_apart_by_a_pattern_of_its_own() -> None:
    paths = [path for package in ALLOWED for path in sorted((ROOT / package).rglob("*.sql"))]
    assert paths
    assert {str(path): found for path in paths if (found := in_sql(path.read_text(encoding="utf-8")))} == {}
    planted = ["regexp_extract(player, '^(.*)@', 1),", "split_part(group_id, '/', 1)"]
    ours = [f"regexp_extract(name, '^{pattern}$', 1)" for pattern in ("{PLAYER}", "{INDEXED}")]
    assert in_sql("\n".join([*planted, *ours])) == planted


def test_a_home_without_its_rule_is_found(tmp_path: Path, plant: Plant) -> None:
    plant("eventlog/codec.py", 'kind = headers["ce_type"]\n')
    found = {name.partition(": ")[0] for name in empty_homes(tmp_path)}
    assert "eventlog/codec.py" not in found
    assert {"schemas/ids.py", "schemas", "learner/algorithms"} <= found


def test_harness_and_replay_import_what_a_package_publishes() -> None:
    """Else name the module in the `__all__` of its package's `__init__`, or do without it."""
    found = by_file(unpublished_imports)
    assert {name: lines for name, lines in found.items() if name.startswith(("harness/", "replay/"))} == {}


def test_no_word_is_banned() -> None:
    """The guard covers names, messages, documents and comments of all that people read, tests included."""
    found = {str(path.relative_to(ROOT)): words for path in texts() if (words := banned_words(path))}
    assert found == {}


def test_planted_files_and_classes_are_found(tmp_path: Path, plant: Plant) -> None:
    user = plant(
        "learner/user.py", "from rollstream.learner.small import x\nfrom rollstream.learner.algorithms.a import y\n"
    )
    small = plant("learner/small.py", "class Planted: ...\n")
    other = plant("metrics/small.py", "class Planted: ...\nclass _Private: ...\n")
    algorithm = plant("learner/algorithms/a.py", "class _Private: ...\n")
    paths = [user, small, other, algorithm]
    assert small_with_one_importer(arrows(paths, tmp_path), tmp_path) == {"learner/small.py"}
    assert repeated_classes(paths, tmp_path) == {"Planted": ["learner/small.py", "metrics/small.py"]}
    assert repeated_files(paths) == {"small"}


@pytest.mark.parametrize(
    "line",
    PLANTED := [
        'kind = headers["ce_type"]',
        "ident = headers['ce_id']",
        "is_void = event.term < owner.term",
        "is_void = (event.term, event.offset) < (owner.term, owner.offset)",
        "owner = max(claims, key=lambda c: c.term)",
        "claims.sort(key=attrgetter('term'))",
        "highest = max(claim.term for claim in claims)",
        "num_newer = event.term - owner.term",
        'is_own = rollout_id.startswith(f"{run_id}/")',
        'run = rollout_id[: rollout_id.index("/")]',
        'run = owner.split("/")[0]',
        'epoch, slash, index = asked.partition("/")',
        'run, _, version = player.partition("@")',
        'found = re.match(r"(.*)/m([0-9]+)", rollout_id)',
        'reason = " ".join(str(error).split())[:300]',
        "is_void = limit > owner.term",
        "is_newer = highest_term > claimed_term",
        "is_newer = term_of(owner) < limit",
        'run, name = spec.job_id.split("/", 1)',
        'name = group.rpartition("/")[2]',
        'run, name = job.split("/")',
        'run = trajectory.partition("/")[0]',
        'name = f"{job_id}/e{epoch:05d}/t{index}"',
        'name = f"{rollout}/s{index}"',
        'where = f"{target.model_group}@{target.version}"',
        'where = f"{record.topic}/{record.partition}@{record.offset}"',
        'name = f"epoch_sealed:{job_id}/e{epoch}"',
        'is_sealed = name.startswith("epoch_sealed:")',
        'kind, _, subject = event_id_of(record).partition(":")',
        'is_own = record.key.split(b"/", 1)[0] == run',
        "found.is_spliced = True",
        "is_late = has_open_attempts and is_final",
        "is_old = job.settings.revision < 2",
        "is_new = revision >= 3",
        "started = GroupStarted(revision=3)",
        "SCORES_SINCE = 6",
        'terms = connection.execute("SELECT max(term) FROM log.learner_claimed")',
        "os.rename(temporary, path)",
        "os.fsync(descriptor)",
        "os.replace(temporary, path)",
        "shutil.move(temporary, path)",
        "temporary.rename(path)",
        "temporary.replace(path)",
        'is_ratio = settings.algorithm.name == "grpo"',
        "is_free = algorithm in REWARD_FREE",
        'is_soft = settings.name == "sapo"',
        'is_ratio = settings.algorithm.name.startswith("g")',
        "needs = NEEDS[settings.algorithm.name]",
        'TEACHERS = {"opd": 1}',
        "is_malt = isinstance(settings, MaltSettings)",
        "is_one = isinstance(settings, (KtoSettings, list))",
        "losses_N = losses_N - settings.entropy_coefficient * tokens.entropies_N",
        'module = name.removeprefix(CODE).rpartition(".")[0]',
        'is_code = name.startswith("python:")',
        "now_ms = time.time_ns() // 1_000_000",
        'location = f"trainer_adapters.{config.finetuning.trainer_adapter}.model"',
        'raise ConfigError(f"{name} cannot be imported: {error}") from error',
        'KINDS = {"dpo": "dpo"}',
        'is_preference = job.kind == "dpo"',
        "is_vllm = isinstance(engine, VllmSettings)",
        "is_of_pairs = isinstance(settings, PairSettings)",
        "is_weighted = isinstance(job.algorithm, PolicyGradientSettings)",
        "is_clipped = issubclass(kind, (ClippedSettings, list))",
        'is_pairs = type(settings).__name__ == "DpoSettings"',
        'is_pairs = "Dpo" in type(job.settings.algorithm).__name__',
        'is_pairs = settings.name.lower() == "dpo"',
        'is_taught = hasattr(settings, "teacher")',
        'weight = getattr(self._settings.algorithm, "kl_coefficient", 0.0)',
        'is_vllm = engine.settings.kind == "vllm"',
        'is_ours = engine.kind in ("transformers", "scripted")',
        'is_vllm = type(engine).__name__ == "VllmEngine"',
        'is_vllm = engine.kind != "vllm"',
    ],
)
def test_a_planted_rule_is_found(line: str, tmp_path: Path, plant: Plant) -> None:
    fine = "name.split('.')\nterm = event.term\nname.replace('a', 'b')\npath.split('/')\n"
    path = plant("learner/planted.py", f"{line}\n{fine}")
    assert away_from_home(path, tmp_path) == [line]


def test_planted_imports_past_what_is_published_are_found(tmp_path: Path, plant: Plant) -> None:
    plant("learner/__init__.py", '__all__ = ["progress"]\n')
    plant("learner/progress.py", "")
    plant("learner/inner.py", "")
    path = plant(
        "harness/a.py",
        "def f():\n    from rollstream.learner import inner, progress\n    import rollstream.learner.inner\n",
    )
    assert unpublished_imports(path, tmp_path) == [
        "harness/a.py:2 imports rollstream.learner.inner",
        "harness/a.py:3 imports rollstream.learner.inner",
    ]


def test_an_interface_has_callers_and_where_it_is_written_twice_a_contract() -> None:
    assert set(uncalled_methods(sources())) == CALLED_BY_OTHERS
    assert set(without_contract(sources(), SUITES)) == set(WITHOUT_SUITE), "an exception that is not needed goes"
    names = {name for name, _ in classes_in(sources())}
    assert {*BY_A_TABLE, *GIVEN_BY} <= names, "a class that is gone goes"


ASKED = "    def ask(self): ...\n    def tell(self): ...\n"
DERIVED = "class Base:\n    def ask(self): self.ask()\nclass Two(Base):\n    def tell(self): ...\n"


def test_a_planted_interface_without_callers_or_contract_is_found(plant: Plant) -> None:
    protocol = plant("learner/a.py", f"class Asked(Protocol):\n{ASKED}class One:\n{ASKED}")
    other = plant("learner/b.py", DERIVED)
    assert uncalled_methods([protocol, other]) == ["Asked.tell"]
    assert without_contract([protocol, other], [other]) == {"Asked": ["One", "Two"]}
    suite = plant("tests/contracts/test_a.py", "from rollstream.learner.a import Asked, One, Two\nOne().ask(Two)\n")
    assert without_contract([protocol, other], [suite]) == {}


def test_a_suite_that_imports_an_implementation_without_using_it_is_found(plant: Plant) -> None:
    protocol = plant("learner/a.py", f"class Asked(Protocol):\n{ASKED}class One:\n{ASKED}")
    other = plant("learner/b.py", DERIVED)
    suite = plant("tests/contracts/test_a.py", "from rollstream.learner.a import Asked, One, Two\nOne().ask(Asked)\n")
    assert without_contract([protocol, other], [suite]) == {"Asked": ["Two"]}


def test_a_planted_abstract_class_without_callers_or_contract_is_found(plant: Plant) -> None:
    base = "class Asked(ABC):\n    @abstractmethod\n    def ask(self): ...\n"
    path = plant("learner/a.py", f"{base}class One(Asked): ...\nclass _Middle(Asked): ...\nclass Two(_Middle): ...\n")
    assert uncalled_methods([path]) == ["Asked.ask"]
    assert without_contract([path], []) == {"Asked": ["One", "Two"]}
    suite = plant("tests/contracts/test_a.py", "check(One, Two)\n")
    assert without_contract([path], [suite]) == {}


MATCHES = [
    ("match settings.name:", 'case "grpo":', 'case "grpo":'),
    ("match settings.name:", "case 'sapo' | 'gspo':", "case 'sapo' | 'gspo':"),
    ("match settings.algorithm.name:", "case found:", "match settings.algorithm.name:"),
    ("match algorithm.name:", "case found:", "match algorithm.name:"),
    ("match engine.kind:", 'case "vllm":', "match engine.kind:"),
    ("match self._engine.kind:", 'case "scripted":', "match self._engine.kind:"),
    ("match run.engine.settings.kind:", 'case "vllm":', "match run.engine.settings.kind:"),
]
"""Statements about an algorithm's name or an engine's kind, one of their cases, and which of both lines is found."""


@pytest.mark.parametrize(("statement", "case", "found"), MATCHES)
def test_a_planted_match_is_found(statement: str, case: str, found: str, tmp_path: Path, plant: Plant) -> None:
    path = plant("harness/planted.py", f"{statement}\n    {case}\n        pass\n    case _:\n        pass\n")
    assert away_from_home(path, tmp_path) == [found]


def alternatives(pattern: str) -> list[str]:
    """The alternatives of a regular expression that are in no group."""
    found, depth = [""], 0
    for token in re.findall(r"\\.|\[(?:\\.|[^\]\\])*\]|.", pattern, re.DOTALL):
        depth += {"(": 1, ")": -1}.get(token, 0)
        if token == "|" and depth == 0:
            found.append("")
        else:
            found[-1] += token
    return found


def unplanted(rules: Iterable[str], plants: Sequence[str]) -> list[str]:
    """Alternatives of the rules that none of the plants has, so that nothing shows that they find anything."""
    every = [one for rule in rules for one in alternatives(rule)]
    return [one for one in every if not any(re.search(one, plant) for plant in plants)]


def test_every_alternative_of_a_rule_has_a_plant() -> None:
    plants = [*PLANTED, *(found for _, _, found in MATCHES)]
    assert unplanted([rule.pattern for rule in ONE_HOME], plants) == []


def test_an_alternative_without_a_plant_is_found() -> None:
    rule = r"""f["'][|]|(a|b)\|c|\bd(e|f)|g"""
    assert alternatives(rule) == [r"""f["'][|]""", r"(a|b)\|c", r"\bd(e|f)", "g"]
    assert unplanted([rule], ["f'|", "x b|c", "h"]) == [r"\bd(e|f)", "g"]


GRAB_BAGS = {"common", "helper", "helpers", "manager", "managers", "misc", "miscellaneous", "tools", "util", "utils"}
"""Names that say nothing of what a file or folder holds."""


def grab_bags(paths: Iterable[Path], root: Path = ROOT) -> list[str]:
    """Files with a name of GRAB_BAGS, or in a folder that has one."""
    named = (path.relative_to(root) for path in paths)
    return [str(path) for path in named if GRAB_BAGS & {path.stem, *path.parent.parts}]


def test_no_grab_bag_modules() -> None:
    assert grab_bags(sources()) == []


def test_a_planted_grab_bag_is_found(tmp_path: Path) -> None:
    planted = ["learner/utils.py", "learner/helpers/batch.py", "learner/utility.py"]
    assert grab_bags([tmp_path / name for name in planted], tmp_path) == planted[:2]
