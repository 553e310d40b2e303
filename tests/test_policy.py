"""Log-probabilities of sampled tokens: alignment, temperature, padding, packing."""

import math
from types import SimpleNamespace

import pytest
import torch

from policy import Row, make_packs, pack, sampled_logprobs


def successor_model(vocabulary=30, p=0.9):
    """P(next = current + 1) = p, the rest uniform: any shift of the alignment gives another value."""

    def forward(input_ids, attention_mask, logits_to_keep, use_cache):
        probs = torch.full((*input_ids.shape, vocabulary), (1 - p) / (vocabulary - 1))
        probs.scatter_(2, ((input_ids + 1) % vocabulary)[..., None], p)
        return SimpleNamespace(logits=probs.log()[:, logits_to_keep])

    return forward


def test_logit_before_a_token_scores_it():
    # case B24: in 3 4 5 6 every sampled token follows its predecessor, in 10 12 none does
    rows = [Row([3, 4, 5, 6], [2, 3], [0, 0]), Row([10, 12], [1], [1])]
    logprobs, _ = sampled_logprobs(successor_model(), pack(rows, pad=0), temperature=1.0)
    assert logprobs.tolist() == pytest.approx([math.log(0.9), math.log(0.9), math.log(0.1 / 29)])


def test_a_token_without_one_before_it_is_refused():
    # position 0 has no logit; -1 would score it by the last one, without an error
    with pytest.raises(ValueError, match="sampled position 0"):
        pack([Row([3, 4], [0, 1], [0, 0])], pad=0)


def test_only_sampled_positions_enter():
    rows = [Row([1, 2, 7, 8, 3], [1, 4], [5, 6])]  # two runs of sampled tokens with an observation between
    batch = pack(rows, pad=0)
    assert batch.tokens.tolist() == [2, 3]
    assert batch.sequence.tolist() == [5, 6]
    logprobs, _ = sampled_logprobs(successor_model(), batch, temperature=1.0)
    assert logprobs.tolist() == pytest.approx([math.log(0.9), math.log(0.1 / 29)])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_temperature_divides_the_logits_of_logprobs_and_entropy(temperature):
    # case B12: logits 2, 1, 0; the sampled token is the first
    exps = [math.exp(x / temperature) for x in (2, 1, 0)]
    probs = [e / sum(exps) for e in exps]

    def model(input_ids, attention_mask, logits_to_keep, use_cache):
        return SimpleNamespace(logits=torch.tensor([2.0, 1.0, 0.0]).expand(1, len(logits_to_keep), 3))

    logprobs, entropy = sampled_logprobs(model, pack([Row([1, 0], [1], [0])], pad=0), temperature, with_entropy=True)
    assert logprobs.item() == pytest.approx(math.log(probs[0]), rel=1e-6)
    assert entropy.item() == pytest.approx(-sum(p * math.log(p) for p in probs), rel=1e-6)


def test_padding_changes_nothing(model):
    # case B46: a row alone and the same row beside a longer one
    short, long = Row([5, 6, 7, 8], [2, 3], [0, 0]), Row(list(range(1, 15)), [9, 10, 13], [1, 1, 1])
    alone, _ = sampled_logprobs(model, pack([short], pad=0), 1.0)
    together, _ = sampled_logprobs(model, pack([long, short], pad=0), 1.0)
    assert torch.allclose(alone, together[3:], atol=1e-5)


def test_pad_token_inside_a_response_is_a_token(model):
    # an id equal to pad is masked by position, never by value
    batch = pack([Row([5, 0, 0, 8], [1, 2, 3], [0, 0, 0]), Row([1] * 6, [5], [1])], pad=0)
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 0, 0], [1] * 6]
    assert batch.tokens.tolist() == [0, 0, 8, 1]


def test_packs_hold_every_row_once_within_the_budget():
    rows = [Row([1] * n, [n - 1], [n]) for n in (9, 2, 5, 3, 7, 4)]
    packs = make_packs(rows, tokens_per_micro_batch=12, pad=0)
    assert sorted(s for p in packs for s in p.sequence.tolist()) == [2, 3, 4, 5, 7, 9]
    assert [p.input_ids.shape for p in packs] == [(3, 4), (1, 5), (1, 7), (1, 9)]  # 4 * 5 = 20 > 12, 2 * 7, ...


def test_a_row_longer_than_the_budget_stands_alone():
    packs = make_packs([Row([1] * 50, [49], [0]), Row([1] * 3, [2], [1])], tokens_per_micro_batch=10, pad=0)
    assert [p.input_ids.shape for p in packs] == [(1, 3), (1, 50)]


def test_no_rows_make_no_packs():
    assert make_packs([], tokens_per_micro_batch=10, pad=0) == []


def test_tokenizer_has_one_token_a_word_and_refuses_others(tokenizer):
    ids = tokenizer("<think> a  b </think>")["input_ids"]
    assert len(ids) == 4
    assert tokenizer.decode(ids) == "<think> a b </think>"
    with pytest.raises(Exception, match="UNK"):
        tokenizer("a z")


def test_chat_template_marks_roles_and_asks_for_the_assistant(tokenizer):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a b"}], tokenize=False, add_generation_prompt=True
    )
    assert text.split() == ["<|user|>", "a", "b", "<|assistant|>"]
