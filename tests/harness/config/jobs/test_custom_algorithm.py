"""An algorithm of one's own: from a configuration file to trained weights, and what is refused on the way."""

import asyncio
import re
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog import codec
from rollstream.harness.config import file as config_file
from rollstream.harness.config.jobs import allowed_by, jobs_of
from rollstream.harness.config.rewards import permissions_of
from rollstream.harness.replays.run import _permissions
from rollstream.harness.runs.stored_config import check_stored
from rollstream.learner.algorithms import table
from rollstream.learner.progress import Manifest
from rollstream.learner.retrain import RecordedJob, Retraining
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.learner.worker import Worker
from rollstream.replay.source import RunEvents
from rollstream.schemas.algorithms import CustomSettings, GrpoSettings, SftSettings
from rollstream.schemas.errors import ConfigError, NotAllowedError
from rollstream.schemas.events import BatchPlanned, JobFailed, JobSubmitted, JobSucceeded, StepTrained, WeightsPublished
from rollstream.schemas.permissions import NOTHING, Permissions
from tests.learner.conftest import Lab

pytestmark = pytest.mark.usefixtures("registered_alone")
CISPO = "python:tests.rigs.toy_cispo.Cispo"
GSPO = "python:tests.rigs.toy_gspo.Gspo"
HEAD = """
from rollstream.learner.algorithms.advantages import PolicyGradient
from rollstream.learner.algorithms.base import Normaliser, Prepared
from rollstream.learner.algorithms.tokens import Losses
from rollstream.schemas.policy_gradient import PolicyGradientSettings

class Mine(PolicyGradient):
    Settings = PolicyGradientSettings
    def metrics(self, sums, counts):
        return {"loss/total": sums["loss"] / counts.tokens}
"""

LOSS = "def loss(self, t, s): return Losses(-t.logprobs_N, {'loss': t.logprobs_N.detach().sum()})"

PREPARED = f"{LOSS}\n    def prepare(self, batch, s): return Prepared("

PARTS = """def prepare(self, batch, s): return Prepared(components={'rl': [1.0 for _ in batch.rows]})
    def loss(self, t, s): return Losses(-t.logprobs_N, {'loss': t.logprobs_N.detach().sum()}, parts="""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "tiny", hidden_size=16, num_layers=1, intermediate_size=32)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a module of a user's; gives its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str) -> str:
        name = f"mine_{uuid.uuid4().hex[:8]}"
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


def configured(written: dict[str, Any], model: Path, **algorithm: Any) -> Any:
    written["workflow"] = {"environment": "guess_number"}
    written["trainer_adapters"]["a"] |= {
        "model": {"path": str(model), "device": "cpu"}, "algorithm": algorithm, "optimizer": {"learning_rate": 1e-2},
        "threads": 1,
    }  # fmt: skip
    return config_file.resolve(written).config


async def submit(lab: Lab, config: Any, num_batches: int = 2) -> JobSubmitted:
    """The job of a configuration, on the log with its manifests."""
    (spec,) = jobs_of(config, "run-1")
    changed = spec.job.model_copy(update={"num_versions": num_batches})
    job = await lab.submit("rl", **{name: getattr(changed, name) for name in type(changed).model_fields})
    await lab.plan(job, num_batches)
    return job


def worker(lab: Lab, allow: tuple[str, ...]) -> Worker:
    return lab.worker(permissions=Permissions.of(allow, {}))


@pytest.mark.parametrize(
    ("name", "options", "metric"),
    [(CISPO, {"clip_high": 3}, "cispo/ratio"), (GSPO, {"clip": 0.3, "advantage": "group_mean"}, "loss/total")],
)
def test_an_algorithm_of_one_file_trains_the_run_whose_configuration_names_it(
    written: dict[str, Any], model: Path, tmp_path: Path, name: str, options: dict[str, Any], metric: str
) -> None:
    config = configured(written, model, name=name, mini_batches=2, num_iterations=2, **options)
    lab = Lab(tmp_path, model)

    async def scenario() -> None:
        job = await submit(lab, config)
        (recorded,) = await lab.events("jobs", JobSubmitted)
        assert recorded == job
        assert (recorded.settings.kind, recorded.settings.algorithm.name) == ("rl", name)
        assert recorded.settings.algorithm.options.items() >= options.items()
        await lab.work(lab.has(JobSucceeded), worker(lab, allowed_by(config)))
        steps = await lab.events("weights", StepTrained)
        assert [step.num_optimizer_steps for step in steps] == [4, 4]
        assert all(metric in step.metrics for step in steps)
        published = await lab.events("weights", WeightsPublished)
        assert len({one.weights_sha256 for one in published}) == 3
        batches = await lab.events("batches", BatchPlanned)
        planned = {b.index: Manifest(b, codec.content_digest(b), offset) for offset, b in enumerate(batches)}
        recorded_job = RecordedJob(recorded, published[0], planned, {step.version: step for step in steps})
        again = Retraining(recorded_job, threads=1, permissions=permissions_of(config))
        again.begin(lab.artifacts, None, version=0)
        replayed = [(one.weights_sha256, other.weights_sha256) async for one, other in again.steps(lab.log, until=9)]
        assert [one == other for one, other in replayed] == [True, True]

    asyncio.run(scenario())


async def failure(lab: Lab, config: Any, allow: tuple[str, ...] | None = None) -> str:
    await submit(lab, config, 1)
    await lab.work(lab.has(JobFailed), worker(lab, allowed_by(config) if allow is None else allow))
    (failed,) = await lab.events("jobs", JobFailed)
    return failed.error


def test_a_learner_imports_no_algorithm_that_only_a_record_names(
    written: dict[str, Any], model: Path, tmp_path: Path, module: Callable[[str], str]
) -> None:
    name = module(HEAD + "    def loss(self, tokens, settings): pass\n")
    config = configured(written, model, name=f"python:{name}.Mine")
    del sys.modules[name]
    reported = asyncio.run(failure(Lab(tmp_path, model), config, (f"model:{model}",)))
    assert reported.startswith(f'job run-1/rl: algorithm.name: "python:{name}.Mine" is not allowed by this process')
    assert name not in sys.modules


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("def loss(self, t, s): return dict()['no such key']", r"loss raised KeyError \({}.py line 11, in loss\): "),
        ("def loss(self, t, s): raise SystemExit(3)", r"loss raised SystemExit \({}.py line 11, in loss\): 3$"),
        ("def loss(self, t, s): raise ValueError('x' * 2_000_000)", r"loss raised ValueError \(.*: x{3000,}\.\.\.$"),
        ("def loss(self, t, s): raise ValueError('a \\ud800')", r"loss raised ValueError \({}.*: a \\ud800$"),
        ("def loss(self, t, s): return 3", "loss returned a int; expected Losses"),
        ("def loss(self, t, s): return Losses(t.logprobs_N.sum()[None], {})", r"values of shape \(1,\), with a grad"),
        ("def loss(self, t, s): return Losses(t.logprobs_N.detach(), {})", "without a gradient; expected"),
        ("def loss(self, t, s): return Losses(-t.logprobs_N, {})", r"metrics raised KeyError \({}.py line 10, in metr"),
        ("def loss(self, t, s): return Losses(3.0, {})", "loss returned values as a float; expected a tensor$"),
        (
            "def loss(self, t, s): return Losses(-t.logprobs_N, {'loss': 1.0})",
            "loss returned loss as a float; expected",
        ),
        (
            "def loss(self, t, s): return Losses(-t.logprobs_N, {'loss': t.logprobs_N.detach()})",
            r"loss returned loss as a Tensor of shape \(\d+,\); expected a tensor without dimensions",
        ),
        (
            f"{LOSS}\n    def metrics(self, sums, counts): return {{'loss/total': 'low'}}",
            "metrics returned loss/total as a str; expected a number",
        ),
        (
            f"{LOSS}\n    def prepare(self, batch, s): return Prepared(normaliser=Normaliser('constant', 0.0))",
            "prepare returned Normaliser.*value a number above 0",
        ),
        (
            f"{LOSS}\n    def prepare(self, batch, s): return Prepared(keep=[row.logprobs for row in batch.rows])",
            "prepare returned keep that is not bool",
        ),
        (
            f"{LOSS}\n    def prepare(self, batch, s): return Prepared(statistics={{'mean': '0.5'}})",
            "prepare returned mean as a str; expected a number$",
        ),
        (
            f"{LOSS}\n    def prepare(self, batch, s): return Prepared(statistics=0.5)",
            "prepare returned statistics as a float; expected a dict$",
        ),
        (f"{PREPARED}normaliser='sequences')", "prepare returned a str as normaliser; expected a Normaliser: by must"),
        (f"{PREPARED}normaliser=('tokens', 1.0))", "prepare returned a tuple as normaliser; expected a Normaliser"),
        (f"{PREPARED}advantages=None)", "prepare returned advantages as a NoneType; expected a list or an array with"),
        (f"{PREPARED}keep=None)", "prepare returned keep as a NoneType; expected a list or an array with one value a"),
        (
            f"{PREPARED}weights='heavy')",
            "prepare returned weights as a str; expected a list or an array with one value",
        ),
        (f"{PREPARED}advantages=['x'] * len(batch.rows))", "prepare returned advantages that is not a number; return"),
        (f"{PREPARED}advantages=[[1, [2]]] * len(batch.rows))", "prepare returned advantages that is not a number"),
        (f"{PREPARED}components={{'rl': None}})", "prepare returned components of rl as a NoneType; expected a list"),
        (f"{PREPARED}components={{1: []}})", "prepare returned components with the name of type int; expected a text"),
        (
            f"{PARTS}{{'rl': -t.logprobs_N}})".replace("[1.0 for _ in batch.rows]", "[]"),
            r"loss returned part 'rl', but prepare has no such component \(it has none\)",
        ),
        (f"{PREPARED}components=[])", "prepare returned components as a list; expected a dict$"),
        (
            f"{LOSS}\n    def metrics(self, sums, counts): return {{1: 0.5}}",
            "returned metrics with the name of type int",
        ),
        (
            f"{LOSS}\n    def metrics(self, sums, counts): return {{'a\\ud800': 0.5}}",
            r"metrics returned metrics with the name 'a\\ud800'; expected a text of at most 200 characters that can be",
        ),
        (
            "def loss(self, t, s): p = t.logprobs_N.exp(); v = p * p; p.add_(1); return Losses(v, {})",
            "the loss has no gradient: RuntimeError.* modified by an inplace operation.*; change no tensor in place",
        ),
        (
            f"{PARTS}{{'r1': -t.logprobs_N}})",
            r"loss returned part 'r1', but prepare has no such component \(it has rl\); give each part the name of a ",
        ),
        (
            f"{PARTS}{{'rl': -t.logprobs_N.sum()}})",
            r"part 'rl' of shape \(\), with a gradient; expected \(\d+,\) with one",
        ),
        (f"{PARTS}{{'rl': -t.logprobs_N.detach()}})", r"part 'rl' of shape \(\d+,\), without a gradient; expected"),
        (f"{PARTS}{{'rl': 3.0}})", "loss returned part 'rl' as a float; expected a tensor$"),
        (
            f"{LOSS}\n    def __init__(self): {{}}['no such key']",
            r"cannot be used: KeyError \({}.py line 12, in __init__\)",
        ),
    ],
)
def test_an_exception_in_an_algorithm_fails_its_job_with_file_and_line(
    written: dict[str, Any], model: Path, tmp_path: Path, module: Callable[[str], str],
    caplog: pytest.LogCaptureFixture, method: str, message: str,
) -> None:  # fmt: skip
    name = module(f"{HEAD}    {method}\n")
    config = configured(written, model, name=f"python:{name}.Mine")
    reported = asyncio.run(failure(Lab(tmp_path, model), config))
    assert re.match(rf"(job run-1/rl: )?algorithm(\.name:)? python:{name}\.Mine:? ", reported), reported
    assert re.search(message.replace("{}", name), reported), reported
    if "raised" in message:
        assert "Traceback (most recent call last)" in caplog.text
        assert f"{name}.py" in caplog.text


def test_an_algorithm_may_prepare_a_batch_by_arrays(
    written: dict[str, Any], model: Path, tmp_path: Path, module: Callable[[str], str]
) -> None:
    """As by lists: the same weights."""
    found: set[str] = set()
    for number, made in enumerate(("np.ones(len(batch.rows))", "[1.0] * len(batch.rows)")):
        text = f"{PREPARED}advantages={made}, weights={made}, components={{'rl': {made}}}, keep="
        text += "np.ones((len(batch.rows), 1), bool)[:, 0])" if number == 0 else "[True] * len(batch.rows))"
        name = module(
            f"import numpy as np\n{HEAD}    {text.replace('-t.logprobs_N,', '-t.logprobs_N * t.weights_N,')}\n"
        )
        lab = Lab(tmp_path / str(number), model)

        async def trained(lab: Lab = lab, name: str = name) -> str:
            config = configured(written, model, name=f"python:{name}.Mine")
            await submit(lab, config, 1)
            await lab.work(lab.has(JobSucceeded), worker(lab, allowed_by(config)))
            return (await lab.events("weights", WeightsPublished))[-1].weights_sha256

        found.add(asyncio.run(trained()))
    assert len(found) == 1


def test_keys_and_names_of_an_algorithm_are_checked_when_the_file_is_read(
    written: dict[str, Any], model: Path, module: Callable[[str], str]
) -> None:
    at = "trainer_adapters.a.algorithm"
    broken = module("1 / 0\n")
    for algorithm, message in (
        ({"name": CISPO, "clip_hihg": 3}, f"{at}.clip_hihg: unknown key; did you mean clip_high?"),
        ({"name": CISPO, "clip_high": 0}, f"{at}.clip_high: Input should be greater than 0"),
        ({"name": CISPO, "mini_batches": 0}, f"{at}.mini_batches: is 0; input should be greater than or equal to 1"),
        ({"name": CISPO, "declared": {"pairs": True}}, f"{at}.declared: unknown key; known keys: advantage, "),
        ({"name": "gspo", "ratio_max": 2}, f"{at}.ratio_max: unknown key; only dppo, "),
        ({"name": "dr_grpo"}, f"{at}.name: 'dr_grpo' is unknown; did you mean grpo with advantage: group_mean and agg"),
        ({"name": "grpoo"}, f"{at}.name: 'grpoo' is unknown; did you mean grpo?"),
        ({"name": "qqq"}, f"{at}.name: 'qqq' is unknown; known algorithms: cispo, dpo, dppo, expert_iteration, "),
        ({"clip_hihg": 3}, f"{at}.clip_hihg: unknown key; did you mean clip_high?"),
        ({"name": f"{CISPO}s"}, f"{at}.name: {CISPO}s: module tests.rigs.toy_cispo has no 'Cispos'"),
        ({"name": f"{CISPO}Settings"}, f"{at}.name: {CISPO}Settings must be a subclass of "),
        ({"name": f"python:{broken}.Mine"}, f"{at}.name: python:{broken}.Mine: module {broken} cannot be imp"),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as refused:
            configured(written, model, **algorithm)
        assert str(refused.value).startswith(message), str(refused.value)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("method", "location"),
    [
        ("@field_validator('clip')\n    @classmethod\n    def _low(cls, clip): return {}['no such key']", "_low"),
        ("@property\n    def needs(self): return {}['no such key']", "needs"),
    ],
)
def test_an_exception_in_the_settings_of_an_algorithm_is_a_configuration_error_with_file_and_line(
    written: dict[str, Any], model: Path, module: Callable[[str], str], method: str, location: str
) -> None:
    text = f"{HEAD}    {LOSS}\nfrom pydantic import field_validator\n"
    text += "class Own(PolicyGradientSettings):\n    clip: float = 1.0\n"
    name = module(f"{text}    {method}\nMine.Settings = Own\n")
    with pytest.raises(ConfigError) as refused:
        configured(written, model, name=f"python:{name}.Mine", clip=2.0)
    expected = (
        rf"cannot be used: KeyError \({name}\.py line \d+, in {location}\): 'no such key'; correct the algorithm$"
    )
    assert re.search(expected, str(refused.value)), refused.value


def test_a_text_of_the_settings_reaches_a_job_as_it_is_written(
    written: dict[str, Any], model: Path, module: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = HEAD + "    def loss(self, tokens, settings): pass\nclass Texts(PolicyGradientSettings):\n    url: str\n"
    monkeypatch.setenv("JUDGE", "secret-text")
    monkeypatch.setenv("ESTIMATOR", "batch_std")
    name = module(text + "Mine.Settings = Texts\n")
    config = configured(written, model, name=f"python:{name}.Mine", url="${JUDGE}", advantage="${ESTIMATOR}")
    (spec,) = jobs_of(config, "run-1")
    assert isinstance(spec.job.algorithm, CustomSettings)
    assert spec.job.algorithm.options["url"] == "${JUDGE}"
    assert spec.job.algorithm.options["advantage"] == "batch_std"
    assert not spec.plan.drop_zero_variance, "groups of equal rewards count with an estimator over the batch"


def test_replay_trains_by_an_algorithm_of_a_record_only_if_it_is_allowed(
    written: dict[str, Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROLLSTREAM_ALLOW", raising=False)
    config = configured(written, model, name=CISPO)
    lab = Lab(tmp_path, model)

    async def recorded() -> RunEvents:
        await submit(lab, config, 1)
        return RunEvents("run-1", {"jobs": await lab.received("jobs")})

    events = asyncio.run(recorded())
    with pytest.raises(NotAllowedError, match=r'recorded algorithm of run run-1 names "python:tests.*Cispo".*--trust'):
        _permissions(events, trust=False)
    _permissions(events, trust=True).check_code(CISPO, "x")
    monkeypatch.setenv("ROLLSTREAM_ALLOW", CISPO)
    _permissions(events, trust=False).check_code(CISPO, "x")
    with pytest.raises(NotAllowedError, match=r"python:tests\.rigs\.toy_cispo\.Cispo"):
        check_stored(written, {}, run_id="run-1", trust=False)


def installed(folder: Path, name: str, entry_points: str) -> None:
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[rollstream.algorithms]\n{entry_points}\n")


def test_an_installed_package_brings_an_algorithm_by_an_entry_point(
    written: dict[str, Any], model: Path, tmp_path: Path, module: Callable[[str], str]
) -> None:
    name = module(HEAD + "    def loss(self, tokens, settings): return Losses(-tokens.logprobs_N, {})\n")
    installed(tmp_path, name, f"mine = {name}:Mine")
    assert "mine" in table.names()
    (spec,) = jobs_of(configured(written, model, name="mine"), "run-1")
    assert isinstance(spec.job.algorithm, CustomSettings)
    settings: Any = table.settings_of(spec.job.algorithm, NOTHING)
    assert settings.advantage == "group_std"
    assert allowed_by(configured(written, model, name="mine")) == (f"model:{model}",)


def test_an_algorithm_that_two_packages_bring_or_that_is_built_in_is_refused(
    written: dict[str, Any], model: Path, tmp_path: Path, module: Callable[[str], str]
) -> None:
    name = module(HEAD + "    def loss(self, tokens, settings): return Losses(-tokens.logprobs_N, {})\n")
    for package in ("first", "second"):
        installed(tmp_path, package, f"mine = {package}:Mine\ngrpo = {name}:Mine")
    with pytest.raises(ConfigError, match=r"'mine' is brought by .*:Mine of .* and by .*; uninstall all but one"):
        configured(written, model, name="mine")
    with pytest.raises(ConfigError, match=r"'grpo' is brought by rollstream and by "):
        configured(written, model, name="grpo")
    assert table.settings_of(GrpoSettings(), NOTHING) == GrpoSettings(), "of a record, which names the built-in one"


def test_a_file_with_the_keys_of_another_algorithm_is_read_with_a_warning(
    written: dict[str, Any], model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"):
        config = configured(written, model, name="sft", clip_low=0.3, beta=0.1)  # the second is its default in dpo
    assert config.adapter.algorithm == SftSettings()
    assert "trainer_adapters.a.algorithm: clip_low, beta: accepted, but " in caplog.text
