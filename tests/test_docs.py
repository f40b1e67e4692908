"""The documents: links lead somewhere, code runs, configurations can be read, tables name what is there."""

import ast
import asyncio
import copy
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollstream.harness.config.file import resolve
from rollstream.harness.config.resolve import block_of
from rollstream.harness.config.rewards import check_evaluators
from rollstream.schemas.algorithms import GrpoSettings
from rollstream.schemas.finetuning import TrajectoryCollection

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
GUIDE, MIGRATING = ROOT / "docs" / "extending.md", ROOT / "docs" / "migrating-from-nat.md"
MAX_PROSE = 128
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, language: str) -> list[str]:
    return [code for kind, code in _BLOCK.findall(path.read_text(encoding="utf-8")) if kind == language]


def prose(path: Path) -> str:
    return _BLOCK.sub("", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """Anchors of headings in a link, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_every_link_leads_to_a_file_and_a_heading(path: Path) -> None:
    for link in _LINK.findall(prose(path)):
        if link.startswith(("https://", "http://")):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("path", [GUIDE, MIGRATING], ids=name_of)
def test_prose_fits_on_a_screen(path: Path) -> None:
    lines = [line for line in prose(path).splitlines() if not line.startswith("|")]
    assert [line for line in lines if len(line) > MAX_PROSE] == []


@pytest.fixture(scope="module")
def guide() -> dict[str, Any]:
    """The names that the Python blocks of the guide leave behind, run in order."""
    module = type(sys)("guide")
    sys.modules["guide"] = module
    for number, code in enumerate(blocks(GUIDE, "python")):
        exec(compile(code, f"{name_of(GUIDE)}, Python block {number}", "exec"), vars(module))
    return vars(module)


@pytest.fixture
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])


def test_the_tests_of_the_guide_pass(guide: dict[str, Any]) -> None:
    tests = [value for name, value in guide.items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()


def test_the_guides_environment_gives_a_second_chance(guide: dict[str, Any]) -> None:
    events = guide["play"]("second_chance", {"question": "1+3=", "answer": 4}, "5", max_turns=2)
    assert [event.kind for event in events].count("step_recorded") == 4
    assert [event.value for event in events if event.kind == "reward_recorded"] == [0.0]


def test_the_guides_builder_from_scratch_reads_conversations(guide: dict[str, Any], tmp_path: Path) -> None:
    row = {"id": "x", "question": "1+3=", "answer": "4", "reward": 1.0}
    row |= {"prompt_token_ids": [1, 2], "token_ids": [3], "logprobs": [-0.5]}
    file = tmp_path / "conversations.jsonl"
    file.write_text("\n".join([json.dumps(row), json.dumps(row | {"reward": 0.0})]))
    config = guide["ConversationsConfig"](file=file)

    async def build() -> TrajectoryCollection:
        async for builder in guide["build_conversations"](config, None):
            await builder.start_run("run-1")
            return await builder.finalize("run-1")
        raise AssertionError("nothing was yielded")

    collection = asyncio.run(build())
    assert [[one.reward for one in group] for group in collection.trajectories] == [[1.0, 0.0]]


@pytest.mark.usefixtures("guide", "_at_the_root")
def test_every_configuration_of_the_guide_can_be_read() -> None:
    found = [yaml.safe_load(text) for text in blocks(GUIDE, "yaml")]
    [complete] = [content for content in found if "trainers" in content]
    loaded = [resolve(merged(complete, content), {}) for content in found]
    for one in loaded:
        check_evaluators(one.config, {})
    assert block_of(loaded[-1].finetune, "trajectory_builder").num_best == 2
    assert loaded[-1].config.trainer.planning == "submitted"


def test_every_configuration_for_who_migrates_can_be_read() -> None:
    loaded = [resolve(yaml.safe_load(text), {}) for text in blocks(MIGRATING, "yaml")]
    environments = [(one.config.environment, one.config.trainer.planning) for one in loaded]
    assert environments == [("tic_tac_toe", "submitted"), ("my_agent", "stream"), ("guess_number", "submitted")]
    adapter = loaded[0].config.adapter
    assert isinstance(adapter.algorithm, GrpoSettings)
    assert (adapter.optimizer.learning_rate, adapter.algorithm.kl_coefficient) == (1e-5, 0.1)
    assert loaded[1].config.served is not None


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """A copy of `base` in which `more` stands too: a part of a file is read within a whole one."""
    result = copy.deepcopy(base)
    for key, value in more.items():
        inner = result.get(key)
        result[key] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return result


# ---- the table of members ----


def rows_of_members() -> list[list[str]]:
    """Cells of the table whose columns are member, where it is, test."""
    lines = MIGRATING.read_text(encoding="utf-8").splitlines()
    first = lines.index("| member | where it is | test |") + 2
    rows: list[list[str]] = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


def names_in(path: Path) -> set[str]:
    """Functions, classes, methods and attributes that a file defines, methods and attributes as `Class.name` too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = {one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
            targets = [
                one.target if isinstance(one, ast.AnnAssign) else one.targets[0]
                for one in ast.walk(node)
                if isinstance(one, ast.AnnAssign | ast.Assign)
            ]
            inner |= {one.attr for one in targets if isinstance(one, ast.Attribute)}
            inner |= {one.id for one in targets if isinstance(one, ast.Name)}
            found |= {f"{node.name}.{name}" for name in inner}
    return found


def test_every_file_and_name_of_the_table_of_members_is_there() -> None:
    rows = rows_of_members()
    members = {cells[0].strip("`") for cells in rows}
    assert {name.split(".")[0] for name in members} == {"Trainer", "TrajectoryBuilder", "TrainerAdapter", "ARTTrainer"}
    for cells in rows:
        assert len(cells) == 3, cells
        for text, separator in ((cells[1], ": "), (cells[2], "::")):
            named = re.findall(rf"`([\w/]+\.py){separator}([\w.]+)`", text)
            assert named, cells
            for file, name in named:
                assert (ROOT / file).is_file(), file
                assert name in names_in(ROOT / file), f"{file}: {name}"


def test_the_table_of_members_has_every_member_of_our_interfaces() -> None:
    from rollstream.harness.components import interfaces

    listed = {cells[0].strip("`") for cells in rows_of_members()}
    for interface in (interfaces.Trainer, interfaces.TrajectoryBuilder, interfaces.TrainerAdapter):
        own = {name for name, value in vars(interface).items() if callable(value) and not name.startswith("__")}
        assert {f"{interface.__name__}.{name}" for name in own} <= listed
