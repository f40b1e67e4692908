"""The engine without a model: deterministic, versioned, exact."""

import asyncio

import pytest

from rollstream.producers.engines.base import GenerationRequest
from rollstream.producers.engines.scripted import ScriptedEngine, ScriptedTokenizer
from rollstream.schemas.errors import ModelError
from rollstream.schemas.settings import Sampling
from tests.producers.conftest import GROUP, answers, published, scripted


def generate(tmp_path, *, prompt=(3, 6, 1, 4), seed=1, version=0, script=None, max_new_tokens=4):
    async def run():
        engine = await scripted(tmp_path, script, versions=(version,))
        return await engine.generate(GenerationRequest(GROUP, prompt, Sampling(max_new_tokens=max_new_tokens), seed))

    return asyncio.run(run())


def test_equal_prompt_seed_and_version_give_equal_answers(tmp_path):
    assert generate(tmp_path) == generate(tmp_path)
    by_seed = {generate(tmp_path, seed=seed).token_ids for seed in range(40)}
    by_version = {generate(tmp_path, version=version).token_ids for version in range(40)}
    by_prompt = {generate(tmp_path, prompt=(number,)).token_ids for number in range(40)}
    assert min(len(by_seed), len(by_version), len(by_prompt)) > 5


def test_an_answer_ends_with_the_end_token_or_is_cut(tmp_path):
    whole = generate(tmp_path, script=answers("12"))
    assert (whole.token_ids[-1], whole.finish_reason, sum(whole.logprobs)) == (1, "stop", -0.5)
    assert whole.spans[0].length == len(whole.token_ids) == len(whole.logprobs) == 3
    cut = generate(tmp_path, script=answers("12"), max_new_tokens=2)
    assert (len(cut.token_ids), cut.finish_reason) == (2, "length")


def test_versions_that_are_loaded_are_held_and_noted(tmp_path):
    engine = ScriptedEngine()
    assert engine.version(GROUP) == -1
    with pytest.raises(ModelError, match="no weights"):
        engine.tokenizer(GROUP)
    with pytest.raises(ModelError, match="no file"):
        asyncio.run(engine.load(published(0), tmp_path / "missing"))
    for version in (0, 2):
        asyncio.run(engine.load(published(version), tmp_path))
    assert engine.version(GROUP) == 2
    assert [event.version for event in engine.loaded] == [0, 2]


def test_the_tokenizer_is_lossless_for_text_that_it_knows_and_small_where_it_matters():
    tokenizer = ScriptedTokenizer()
    text = "<user>H7?\n<end><assistant>What, <b>?"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == "H7?\nWhat, <b>?"
    assert max(tokenizer.encode("<pad><end><system><user><assistant><tool>0123456789HLX?=")) <= 20
    assert len(tokenizer) < 128
    assert tokenizer.decode(tokenizer.encode("\u20ac")) == "\ufffd"
