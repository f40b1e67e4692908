"""The tiny model: small, equal for equal seeds, quiet, and short in its turns."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollstream.learner.tiny_model import make_tiny_model
from rollstream.schemas.errors import ModelError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", seed=3)


def contents(folder: Path):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_it_has_about_84_thousand_parameters_and_loads_without_a_warning(folder, caplog, capfd):
    with caplog.at_level(logging.WARNING):
        model = AutoModelForCausalLM.from_pretrained(folder)
        AutoTokenizer.from_pretrained(folder)
    assert 80_000 < sum(parameter.numel() for parameter in model.parameters()) < 88_000
    assert caplog.records == []
    captured = capfd.readouterr()
    assert "arn" not in captured.out + captured.err.replace("Loading weights", "")


def test_equal_seeds_give_equal_bytes_and_a_made_folder_is_kept(folder, tmp_path):
    again = make_tiny_model(tmp_path / "again", seed=3)
    assert contents(again) == contents(folder)
    times = {path.name: path.stat().st_mtime_ns for path in again.iterdir()}
    make_tiny_model(again, seed=3)
    assert {path.name: path.stat().st_mtime_ns for path in again.iterdir()} == times
    other = make_tiny_model(tmp_path / "other", seed=4)
    assert contents(other)["model.safetensors"] != contents(folder)["model.safetensors"]


def test_a_folder_with_another_model_is_refused(folder):
    with pytest.raises(ModelError, match="another seed"):
        make_tiny_model(folder, seed=5)


def test_a_folder_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ModelError, match="something else"):
        make_tiny_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_path_of_a_file_is_refused(tmp_path):
    (tmp_path / "model").write_text("x")
    with pytest.raises(ModelError, match="is not a folder"):
        make_tiny_model(tmp_path / "model")


def test_text_survives_the_tokenizer_character_by_character(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "Guess: 7, H!  a\nb ~`\\ 'n't ."
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert min(ids) > 5


def test_a_turn_costs_few_tokens_and_a_chat_grows_at_its_end(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "?"}]
    first = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    messages += [{"role": "assistant", "content": "5"}, {"role": "tool", "content": "H"}]
    second = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert second.startswith(first + "5" + tokenizer.eos_token)
    assert len(tokenizer.encode(first)) == 3
    assert len(tokenizer.encode(second)) == 8
    assert tokenizer.eos_token_id == 1
    assert tokenizer.pad_token_id == 0


def test_an_untied_head_begins_as_the_embeddings_and_is_saved(folder, tmp_path):
    untied = make_tiny_model(tmp_path / "untied", seed=3, is_tied=False)
    model: Any = AutoModelForCausalLM.from_pretrained(untied)
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert embeddings.data_ptr() != head.data_ptr()
    assert torch.equal(embeddings, head)
    tied: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(tied.get_input_embeddings().weight, embeddings)
    with pytest.raises(ModelError, match="another seed or shape"):
        make_tiny_model(folder, seed=3, is_tied=False)
