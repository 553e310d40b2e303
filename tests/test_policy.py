"""Log-probabilities of sampled tokens: alignment, temperature, padding, packing."""

import math
from types import SimpleNamespace

import pytest
import torch

import policy
from diagnostics import padding
from policy import Row, check_head, make_packs, pack, sampled_logprobs, token_scores


class StandIn(torch.nn.Module):
    """A model whose logits are a function of its input: they are its hidden states, behind a head of ones."""

    def __init__(self, logits, vocabulary):
        super().__init__()
        self.logits, self.head = logits, torch.nn.Linear(vocabulary, vocabulary, bias=False)
        self.head.weight.data = torch.eye(vocabulary)

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, attention_mask, logits_to_keep, use_cache):
        return SimpleNamespace(logits=self.head(self.logits(input_ids)[:, logits_to_keep]))


def successor_model(vocabulary=30, p=0.9):
    """P(next = current + 1) = p, the rest uniform: any shift of the alignment gives another value."""

    def logits(input_ids):
        probs = torch.full((*input_ids.shape, vocabulary), (1 - p) / (vocabulary - 1))
        return probs.scatter(2, ((input_ids + 1) % vocabulary)[..., None], p).log()

    return StandIn(logits, vocabulary)


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

    model = StandIn(lambda input_ids: torch.tensor([2.0, 1.0, 0.0]).expand(*input_ids.shape, 3), 3)
    logprobs, entropy = sampled_logprobs(model, pack([Row([1, 0], [1], [0])], pad=0), temperature, with_entropy=True)
    assert logprobs.item() == pytest.approx(math.log(probs[0]), rel=1e-6)
    assert entropy.item() == pytest.approx(-sum(p * math.log(p) for p in probs), rel=1e-6)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_scores_in_chunks_are_those_of_one_piece_with_their_gradients(monkeypatch, with_entropy):
    # 50 tokens in chunks of 7, the last one of 1; each output weighed by random numbers of either sign
    rng = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(50, 16, generator=rng), torch.randn(37, 16, generator=rng)
    tokens, weights = torch.randint(37, (50,), generator=rng), torch.randn(2, 50, generator=rng)

    def scores(limit):
        monkeypatch.setattr(policy, "LOGIT_BYTES", limit)
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logprobs, entropy = token_scores(*leaves, tokens, 1.3, with_entropy)
        loss = (weights[0] * logprobs).sum() + ((weights[1] * entropy).sum() if with_entropy else 0)
        return logprobs, *([entropy] if with_entropy else []), *torch.autograd.grad(loss, leaves)

    for whole, chunked in zip(scores(2**20), scores(7 * 37 * 4), strict=True):
        assert torch.allclose(whole, chunked, atol=1e-5)


def test_gradients_of_chunked_scores_match_finite_differences(monkeypatch):
    monkeypatch.setattr(policy, "LOGIT_BYTES", 3 * 5 * 4)
    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: tensor)  # stay in float64
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(8, 4, generator=rng, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 4, generator=rng, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(5, (8,), generator=rng)
    assert torch.autograd.gradcheck(lambda h, w: token_scores(h, w, tokens, 0.7, True), (hidden, weight))


def test_a_model_is_left_as_it_was(model):
    head = model.get_output_embeddings()
    sampled_logprobs(model, pack([Row([5, 6, 7], [2], [0])], pad=0), 1.0)
    assert "forward" not in vars(head)
    assert model(torch.tensor([[5, 6, 7]])).logits.shape[-1] == len(head.weight)


def test_a_head_that_is_more_than_a_matrix_is_refused(model):
    check_head(model)
    head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size)
    torch.nn.init.normal_(head.bias)
    model.set_output_embeddings(head)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM: its head is more than a matrix; allowed are"):
        check_head(model)


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
    rows = [Row([1] * n, [n - 1], [i]) for i, n in enumerate((10, 8, 9, 9, 10, 8))]
    packs = make_packs(rows, tokens_per_micro_batch=30, pad=0)
    assert sorted(s for p in packs for s in p.sequence.tolist()) == [0, 1, 2, 3, 4, 5]
    assert [p.input_ids.shape for p in packs] == [(3, 9), (3, 10)]  # 4 * 9 = 36 > 30


def test_at_most_a_tenth_of_a_micro_batch_is_padding():
    # 20 + 20 + 22 of 66 positions are tokens, 24 more are 86 of 96 < 90 %; 24 + 25 of 50, and 40 would be 89 of 120
    rows = [Row([1] * n, [n - 1], [0]) for n in (40, 20, 24, 22, 25, 20)]
    packs = make_packs(rows, tokens_per_micro_batch=10**6, pad=0)
    assert [p.input_ids.shape for p in packs] == [(3, 22), (2, 25), (1, 40)]
    rng = torch.Generator().manual_seed(0)
    lengths = (100 * (1 + 0.5 * torch.randn(300, generator=rng))).clamp(min=2).int().tolist()  # variation 0.5
    packs = make_packs([Row([1] * n, [n - 1], [0]) for n in lengths], 16384, pad=0)
    assert padding(packs) == pytest.approx(1 - sum(lengths) / sum(p.input_ids.numel() for p in packs))
    assert padding(packs) < 0.1 and len(packs) < 20


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
