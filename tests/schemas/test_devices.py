"""The device of an engine or learner: which one a setting means, and one clear error for one that is not there."""

import pytest
from pydantic import ValidationError

from rollstream.learner.model.policy import PolicyModel
from rollstream.learner.shared_model_group.parameters import SharedAgentParams
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.producers.engines.table import new_engine
from rollstream.schemas.devices import device_of
from rollstream.schemas.engine_settings import TransformersSettings
from rollstream.schemas.errors import ModelError
from rollstream.schemas.settings import ModelSettings


@pytest.mark.parametrize(
    ("device", "num_gpus", "expected"),
    [
        ("auto", 0, "cpu"),
        ("auto", 2, "cuda:0"),
        ("cpu", 2, "cpu"),
        ("cuda", 2, "cuda:0"),
        ("cuda:0", 1, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
    ],
)
def test_a_setting_means_one_device(device, num_gpus, expected):
    assert device_of(device, num_gpus, "x") == expected


@pytest.mark.parametrize(
    ("device", "num_gpus", "message"),
    [
        ("cuda", 0, "engine.device is cuda and there is no GPU; set auto or cpu"),
        ("cuda:1", 1, "engine.device is cuda:1 and the only GPU is cuda:0; set another, auto or cpu"),
        ("cuda:4", 4, "engine.device is cuda:4 and GPUs are cuda:0 to cuda:3; set another, auto or cpu"),
    ],
)
def test_a_gpu_that_is_not_there_is_named(device, num_gpus, message):
    with pytest.raises(ModelError) as raised:
        device_of(device, num_gpus, "engine.device")
    assert str(raised.value) == message


@pytest.mark.parametrize("device", ["cuda:", "cuda:x", "gpu", "cuda:1234", "CPU", ""])
@pytest.mark.parametrize("settings", [TransformersSettings, lambda **given: ModelSettings(path="m", **given)])
def test_an_invalid_device_is_refused(settings, device):
    with pytest.raises(ValidationError, match=r"is not a device; write auto, cpu, cuda or cuda:N"):
        settings(device=device)


def test_engine_and_learner_take_a_device_each_and_name_one_that_is_not_there(tmp_path):
    folder = str(make_tiny_model(tmp_path / "model", num_layers=1))
    assert PolicyModel(ModelSettings(path=folder, device="cpu"), seed=0).device.type == "cpu"
    with pytest.raises(ModelError, match=r"engine\.device is cuda:99 and"):
        new_engine(TransformersSettings(device="cuda:99"), {})
    with pytest.raises(ModelError, match=r"model: device is cuda:99 and"):
        PolicyModel(ModelSettings(path=folder, device="cuda:99"), seed=0)
    assert SharedAgentParams(model_name=folder, device="cuda:1").device == "cuda:1"
