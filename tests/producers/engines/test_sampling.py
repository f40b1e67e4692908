"""Sampling: noise by (seed, token index) alone, and log-probabilities of the distribution that was drawn from."""

import math

import pytest
import torch

from rollstream.producers.engines.base import Generation, check_generation
from rollstream.producers.engines.sampling import SamplingBatch, distribution, integer_sums, sample, uniforms
from rollstream.schemas.errors import ModelError
from rollstream.schemas.events.rollouts import VersionSpan
from rollstream.schemas.settings import Sampling
from rollstream.schemas.tokens import MAX_KEPT, KeptIds

CPU = torch.device("cpu")


def batch(*settings, vocabulary=4):
    return SamplingBatch.of([Sampling(**one) for one in settings], vocabulary, CPU)


def test_noise_depends_on_seed_and_token_index_only():
    whole = uniforms([7, 8, 2**62 + 5], 0, 10)
    assert whole.shape == (3, 10)
    assert torch.equal(uniforms([8], 4, 2), whole[1:2, 4:6])
    assert torch.equal(uniforms([2**62 + 5, 7], 0, 10), whole[[2, 0]])
    assert len(set(whole.flatten().tolist())) == 30


def test_noise_is_uniform_and_neighbouring_seeds_are_independent():
    noise = uniforms(range(2000), 0, 50)
    assert noise.min() >= 0
    assert noise.max() < 1
    assert abs(noise.mean().item() - 0.5) < 0.005
    assert abs(noise.var().item() - 1 / 12) < 0.002
    next_seed = torch.corrcoef(torch.stack([noise[:-1].flatten(), noise[1:].flatten()]))[0, 1]
    next_token = torch.corrcoef(torch.stack([noise[:, :-1].flatten(), noise[:, 1:].flatten()]))[0, 1]
    assert abs(next_seed) < 0.015
    assert abs(next_token) < 0.015


def test_noise_stays_what_it_was():
    """Recorded runs repeat only while these numbers hold."""
    assert uniforms([0, 1], 0, 2).tolist() == [
        [0.6524484863739417, 0.7012121095212933],
        [0.3681895156514656, 0.9435642308644674],
    ]


def test_tokens_are_drawn_with_their_probabilities():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.2, 0.05]])).expand(20_000, 4)
    tokens, logprobs, _ = sample(logits, uniforms(range(20_000), 0, 1)[:, 0], batch(*[{}] * 20_000))
    shares = torch.bincount(tokens, minlength=4) / 20_000
    assert torch.allclose(shares, torch.tensor([0.5, 0.25, 0.2, 0.05]), atol=0.01)
    assert torch.allclose(logprobs.exp(), torch.tensor([0.5, 0.25, 0.2, 0.05])[tokens])


def test_limits_above_the_vocabulary_and_the_lowest_temperatures_spoil_no_row_of_the_batch():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.2, 0.05]])).expand(3, 4)
    how = batch({"top_k": 2**63}, {"top_k": 1}, {"temperature": 1e-40})
    tokens, logprobs, _ = sample(logits, torch.tensor([0.99, 0.99, 0.99], dtype=torch.float64), how)
    assert tokens.tolist() == [3, 0, 0]
    assert logprobs.isfinite().all()


def test_each_row_has_its_own_settings():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.2, 0.05]])).expand(5, 4)
    how = batch({}, {"temperature": 0.5}, {"top_k": 2}, {"top_p": 0.7}, {"top_k": 3, "top_p": 0.1})
    probabilities = distribution(logits, how).exp()
    expected = [
        [0.5, 0.25, 0.2, 0.05],
        [0.25 / 0.355, 0.0625 / 0.355, 0.04 / 0.355, 0.0025 / 0.355],
        [2 / 3, 1 / 3, 0, 0],
        [2 / 3, 1 / 3, 0, 0],
        [1, 0, 0, 0],
    ]
    assert torch.allclose(probabilities, torch.tensor(expected), atol=1e-6)
    kept = how.select(torch.tensor([2, 4]))
    assert torch.equal(distribution(logits[:2], kept).exp(), probabilities[[2, 4]])


def test_an_excluded_token_is_never_drawn_not_even_at_the_ends():
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]).expand(3, 4)
    ends = torch.tensor([0.0, 0.5, 1 - 2.0**-40], dtype=torch.float64)
    tokens, logprobs, _ = sample(logits, ends, batch({}, {}, {}))
    assert tokens.tolist() == [1, 2, 2]
    assert logprobs.tolist() == [pytest.approx(math.log(0.5))] * 3


def test_sums_of_integers_are_those_of_floats_and_do_not_grow_at_what_cannot_be_drawn():
    probs = torch.softmax(torch.randn(4, 5000, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), dim=-1)
    probs[0, 7] = probs[1, -1] = 0.0
    probs[2] = torch.nan
    probs[3, 0] = 2.0**-41
    sums = integer_sums(probs)
    assert sums.dtype == torch.float64
    assert (sums - probs.cumsum(dim=-1))[[0, 1, 3]].abs().max() < 5000 * 2.0**-40
    assert sums[0, 7] == sums[0, 6]
    assert sums[1, -1] == sums[1, -2]
    assert sums[3, 0] == 0.0
    assert not sums[2].any()


def test_temperature_zero_takes_the_likeliest_with_certainty():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.9], [0.0, 3.0, 1.0, 2.9]])
    how = batch({"temperature": 0.0}, {"temperature": 1.0})
    tokens, logprobs, _ = sample(logits, torch.tensor([0.999, 0.999], dtype=torch.float64), how)
    assert tokens.tolist() == [1, 3]
    assert logprobs[0] == 0
    assert logprobs[1] < 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("how", [{}, {"top_k": 2}, {"top_p": 0.5}, {"temperature": 0.0}])
def test_a_row_of_invalid_logits_has_a_nan_logprob_and_affects_no_other(how, bad):
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.9], [0.0, bad, 1.0, 2.9]])
    noise = torch.tensor([0.5, 0.5], dtype=torch.float64)
    tokens, logprobs, _ = sample(logits, noise, batch(how, how))
    alone, alone_logprobs, _ = sample(logits[:1], noise[:1], batch(how))
    assert 0 <= tokens[1] < 4
    assert logprobs[1].isnan()
    assert (tokens[0], logprobs[0]) == (alone[0], alone_logprobs[0])


def test_the_ids_that_limits_leave_are_kept_and_hold_all_of_the_probability():
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(4))
    how = batch({"top_k": 4, "record_kept_ids": True}, {"top_p": 0.5}, {}, vocabulary=9)
    drawn = sample(logits, uniforms([1, 2, 3], 0, 1)[:, 0], how)
    assert len(drawn.kept[0]) == 4
    assert len(drawn.kept[2]) == 0, "the whole vocabulary"
    for row, ids in enumerate(drawn.kept[:2]):
        assert sorted(ids.tolist()) == ids.tolist()
        assert drawn.tokens[row] in ids
        kept = torch.log_softmax(logits[row, torch.from_numpy(ids).long()], dim=-1)
        assert torch.allclose(kept[ids.tolist().index(int(drawn.tokens[row]))], drawn.logprobs[row])


def test_more_kept_ids_than_a_record_holds_are_an_error_of_the_call():
    def answer(num_kept):
        span = VersionSpan(model_group="g", version=0, length=1)
        return Generation((1,), (0.0,), (span,), "length", KeptIds([num_kept], range(num_kept)))

    check_generation(answer(MAX_KEPT - 2))
    with pytest.raises(ModelError, match=rf"sampled from {MAX_KEPT - 1} ids in all, .*lower top_p, set top_k, or"):
        check_generation(answer(MAX_KEPT - 1))


def test_nothing_is_kept_where_nobody_asked_or_the_likeliest_token_is_taken():
    logits, noise = torch.randn(2, 9), torch.tensor([0.3, 0.6], dtype=torch.float64)
    assert sample(logits, noise, batch({"top_k": 4}, {}, vocabulary=9)).kept == ()
    greedy = {"temperature": 0, "top_k": 4, "record_kept_ids": True}
    assert sample(logits, noise, batch(greedy, {}, vocabulary=9)).kept == ()
