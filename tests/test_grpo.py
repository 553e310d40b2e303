"""The update: Table 1, mini-batches, global denominators, first ratio 1, clipping, skipped steps, the loss."""

from copy import deepcopy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import policy
from config import Config
from diagnostics import PARTS
from engines import Prompt, Sampling, TransformersEngine
from grpo import (
    METHODS,
    Method,
    add_advantages,
    add_old_logprobs,
    make_mini_batches,
    policy_loss,
    print_table,
    update_policy,
)
from losses import AGGREGATIONS, SURROGATES, aggregate
from policy import Pack, Row, sampled_logprobs

OPEN = {  # numbers with which nothing is clipped
    "ppo_clip": {"clip_low": 1e6, "clip_high": 1e6},
    "cispo": {"clip_low": 1.0, "clip_high": 1e6},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
    "gspo": {"clip_low": 1e6, "clip_high": 1e6},
}
PLAIN = {"max_response_tokens": 9, "seq_mask": False, "delta": 0.1, "kl_coef": 0.0, "kl_estimator": "k3"}
PLAIN |= {"entropy_threshold": 0.5, "rollout_is_cap": 0.0}


@pytest.fixture(autouse=True)
def cut_by_the_budget_alone(monkeypatch):
    monkeypatch.setattr(policy, "PADDING", 1.0)


class Recorder:
    """An optimizer that keeps the gradients of each step and changes nothing."""

    def __init__(self, model):
        self.model, self.gradients = model, []

    def step(self):
        self.gradients.append(torch.cat([p.grad.flatten().clone() for p in self.model.parameters()]))

    def zero_grad(self, set_to_none=True):
        self.model.zero_grad(set_to_none=True)


def make_rows(count=11):
    """Rows of 1 to 6 sampled tokens behind prompts of 2 to 5; row i is sequence i."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(count):
        prompt, response = 2 + i % 4, 1 + i % 6
        ids = rng.integers(2, 17, prompt + response).tolist()
        rows.append(Row(ids, list(range(prompt, prompt + response)), [i] * response))
    return rows


def fill(mini_batches):
    """Old and reference log-probabilities and advantages that depend on turn and position alone, not on the split."""
    for pack in (pack for packs in mini_batches for pack in packs):
        turn, position = pack.sequence, pack.columns[pack.column]
        pack.advantages = torch.cos(turn.float())
        pack.old_logprobs = -1.5 + 0.3 * torch.sin(turn + 2.0 * position)
        pack.ref_logprobs = -1.8 + 0.2 * torch.cos(3 * turn + 1.0 * position)
        pack.entropy = 0.5 + 0.2 * torch.sin(5 * turn + 1.0 * position)


def gradient(model, rows, surrogate, aggregation, tokens_per_micro_batch, order_seed=0):
    rng = np.random.default_rng(order_seed)
    batches = make_mini_batches(rows, len(rows), tokens_per_micro_batch, 0, rng)
    fill(batches)
    recorder = Recorder(model)
    ratio = partial(SURROGATES[surrogate], **OPEN[surrogate])
    terms = PLAIN | {"kl_coef": 0.3, "entropy_coef": 0.1, "aggregation": aggregation}
    loss = partial(policy_loss, ratio, **terms)
    update_policy(model, recorder, batches, loss, temperature=1.0, epochs=1, grad_clip=1e9, entropy_coef=0.1)
    (found,) = recorder.gradients
    return found, len(batches[0])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_gradient_is_the_same_in_every_split_and_order(model, surrogate, aggregation):
    whole, packs = gradient(model, make_rows(), surrogate, aggregation, 10**6)
    assert packs == 1
    for tokens, splits in ((50, 2), (20, 5), (1, 11)):
        split, packs = gradient(model, make_rows(), surrogate, aggregation, tokens)
        assert packs == splits
        assert torch.linalg.norm(split - whole) <= 1e-5 * torch.linalg.norm(whole)
    shuffled, _ = gradient(model, make_rows()[::-1], surrogate, aggregation, 22, order_seed=7)
    assert torch.linalg.norm(shuffled - whole) <= 1e-5 * torch.linalg.norm(whole)


def test_denominators_of_a_micro_batch_would_show(model):
    """The sum of per-micro-batch means is not the mean of the whole: the test above can fail."""
    rows = make_rows()
    batches = make_mini_batches(rows, len(rows), 22, 0, np.random.default_rng(0))
    values = [torch.cos(pack.sequence.float()) for pack in batches[0]]
    local = sum(
        aggregate(v, p.sequence, "token-mean", num_tokens=len(v), num_sequences=1)
        for v, p in zip(values, batches[0], strict=True)
    ) / len(values)
    assert abs(local - torch.cat(values).mean()) > 1e-2


def sampled_batches(model, tokenizer, temperature, mini_batch=3, tokens=30):
    engine = TransformersEngine(model, tokenizer)
    prompts = [Prompt([2 + i, 3, 5 + i][: 1 + i % 3]) for i in range(8)]
    generations = engine.generate(prompts, list(range(8)), Sampling(temperature, 7))
    rows = []
    for i, (prompt, g) in enumerate(zip(prompts, generations, strict=True)):
        n = len(prompt.ids)
        rows.append(Row(prompt.ids + g.ids, list(range(n, n + len(g.ids))), [i] * len(g.ids)))
    return make_mini_batches(rows, mini_batch, tokens, 0, np.random.default_rng(0)), generations


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_first_ratio_is_one_and_the_engine_agrees(model, tokenizer, temperature):
    batches, generations = sampled_batches(model, tokenizer, temperature)
    packs = [pack for batch in batches for pack in batch]
    entropy = add_old_logprobs(model, model, packs, temperature, 8)
    assert entropy.shape == (8,) and np.isfinite(entropy).all()
    for pack in packs:
        logprobs, _ = sampled_logprobs(model, pack, temperature)
        assert (torch.exp(logprobs - pack.old_logprobs) - 1).abs().max() <= 1e-6
        assert not pack.old_logprobs.requires_grad
        for turn in pack.sequence.unique().tolist():
            mine = pack.old_logprobs[pack.sequence == turn].tolist()
            assert mine == pytest.approx(generations[turn].logprobs, abs=1e-5)


def test_the_reference_is_asked_for_its_own_logprobs_at_the_same_temperature(model, tokenizer):
    batches, _ = sampled_batches(model, tokenizer, 1.5)
    packs = [pack for batch in batches for pack in batch]
    reference = deepcopy(model)
    with torch.no_grad():
        reference.lm_head.weight.mul_(0.5)
    add_old_logprobs(model, reference, packs, 1.5, 8)
    for pack in packs:
        expected, _ = sampled_logprobs(reference, pack, 1.5)
        assert torch.equal(pack.ref_logprobs, expected)
        assert (pack.ref_logprobs - pack.old_logprobs).abs().max() > 0.01


def test_entropy_of_a_turn_is_the_mean_over_its_tokens(model, tokenizer):
    batches, _ = sampled_batches(model, tokenizer, 1.0, tokens=10**6, mini_batch=8)
    (pack,) = batches[0]
    entropy = add_old_logprobs(model, model, [pack], 1.0, 8)
    with torch.no_grad():
        _, tokens = sampled_logprobs(model, pack, 1.0, with_entropy=True)
    for turn in range(8):
        assert entropy[turn] == pytest.approx(tokens[pack.sequence == turn].mean().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("rows", "mini_batch", "sizes"),
    [
        (11, 4, [4, 4, 3]),
        (10, 4, [5, 5]),
        (9, 256, [9]),
        (130, 64, [65, 65]),
        (161, 64, [54, 54, 53]),
    ],
)
def test_mini_batches_are_of_like_size(rows, mini_batch, sizes):
    batches = make_mini_batches(make_rows(rows), mini_batch, 10**6, 0, np.random.default_rng(0))
    assert [len(packs[0].input_ids) for packs in batches] == sizes
    assert sorted(s for packs in batches for s in packs[0].sequence.unique().tolist()) == list(range(rows))


def ready(model, tokenizer, advantages, **sizes):
    """Packs of a rollout with old log-probabilities and an advantage for each turn."""
    batches, _ = sampled_batches(model, tokenizer, 1.0, **sizes)
    packs = [pack for batch in batches for pack in batch]
    add_old_logprobs(model, model, packs, 1.0, 8)
    for pack in packs:
        pack.advantages = torch.tensor(advantages)[pack.sequence]
    return batches


def update(model, optimizer, batches, grad_clip=1e9, epochs=1, temperature=1.0):
    surrogate = partial(SURROGATES["ppo_clip"], clip_low=0.2, clip_high=0.3)
    loss = partial(policy_loss, surrogate, aggregation="token-mean", entropy_coef=0.0, **PLAIN)
    settings = {"temperature": temperature, "epochs": epochs, "grad_clip": grad_clip, "entropy_coef": 0.0}
    return update_policy(model, optimizer, batches, loss, **settings)


SIGNS = [1.0, -1.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0]


def test_an_update_raises_good_turns_and_lowers_bad_ones(model, tokenizer):
    batches = ready(model, tokenizer, SIGNS, mini_batch=8)
    metrics = update(model, torch.optim.SGD(model.parameters(), lr=1e-3), batches)
    assert metrics["updates"] == 1
    moved = 0.0
    for pack in batches[0]:
        logprobs, _ = sampled_logprobs(model, pack, 1.0)
        moved += (pack.advantages * (logprobs - pack.old_logprobs)).sum().item()
    assert moved > 0


def test_later_mini_batches_are_measured_against_the_first_policy(model, tokenizer):
    # case B69: the log-probabilities of before the first update stay; the second mini-batch's ratio is not 1
    batches = ready(model, tokenizer, SIGNS, mini_batch=4)
    before = [pack.old_logprobs.clone() for batch in batches for pack in batch]
    metrics = update(model, torch.optim.SGD(model.parameters(), lr=1e-2), batches)
    assert metrics["updates"] == 2 and metrics["kl_old"] != 0
    after = [pack.old_logprobs for batch in batches for pack in batch]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_every_epoch_takes_every_mini_batch(model, tokenizer):
    recorder = Recorder(model)
    metrics = update(model, recorder, ready(model, tokenizer, SIGNS, mini_batch=4), epochs=3)
    assert metrics["updates"] == len(recorder.gradients) == 3 * 2
    assert all(torch.equal(recorder.gradients[i], recorder.gradients[i + 2]) for i in range(4))  # nothing moved


def test_one_update_on_policy_reports_no_drift(model, tokenizer):
    metrics = update(model, torch.optim.SGD(model.parameters(), lr=1e-2), ready(model, tokenizer, SIGNS, mini_batch=8))
    assert metrics["kl_old"] == pytest.approx(0, abs=1e-6) and metrics["kl_ref"] == pytest.approx(0, abs=1e-6)
    assert metrics["clip_frac"] == 0


def test_the_gradient_is_clipped_once_after_all_micro_batches(model, tokenizer):
    # case B72: the clipped gradient is the whole one scaled to norm 0.01, in one micro-batch or in eight
    found = []
    for tokens in (10**6, 1):
        recorder = Recorder(model)
        metrics = update(model, recorder, ready(model, tokenizer, SIGNS, mini_batch=8, tokens=tokens), grad_clip=0.01)
        assert metrics["grad_norm"] > 0.01
        assert torch.linalg.norm(recorder.gradients[0]).item() == pytest.approx(0.01, rel=1e-3)
        found.append(recorder.gradients[0])
    assert torch.allclose(*found, atol=1e-7)


def test_a_non_finite_gradient_is_skipped_and_counted(model, tokenizer):
    batches = ready(model, tokenizer, SIGNS, mini_batch=4)
    batches[0][0].advantages[0] = float("nan")
    recorder = Recorder(model)
    metrics = update(model, recorder, batches)
    assert (metrics["updates"], metrics["skipped_updates"], len(recorder.gradients)) == (1, 1, 1)
    assert torch.isfinite(recorder.gradients[0]).all()


def test_the_numbers_of_a_step_are_those_of_the_updates_it_took(model, tokenizer):
    """An update that is skipped for its gradient leaves none of its own behind."""
    batches = ready(model, tokenizer, SIGNS, mini_batch=4)
    whole = update(model, Recorder(model), batches)
    batches[1][0].advantages += float("nan")
    metrics = update(model, Recorder(model), batches)
    assert (whole["updates"], whole["staleness"]) == (2, 1)
    assert (metrics["updates"], metrics["skipped_updates"], metrics["staleness"]) == (1, 1, 0)
    assert sum(metrics[f"share/{part}"] for part in PARTS) == pytest.approx(1)
    assert metrics == update(model, Recorder(model), batches[:1]) | {"skipped_updates": 1}
    batches[0][0].advantages += float("nan")
    assert set(update(model, Recorder(model), batches)) == {"loss", "grad_norm", "updates", "skipped_updates"}


@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_the_update_divides_by_the_temperature_of_the_old_logprobs(model, tokenizer, temperature):
    batches, _ = sampled_batches(model, tokenizer, temperature, mini_batch=8)
    packs = [pack for batch in batches for pack in batch]
    add_old_logprobs(model, model, packs, temperature, 8)
    for pack in packs:
        pack.advantages = torch.tensor(SIGNS)[pack.sequence]
    metrics = update(model, Recorder(model), batches, temperature=temperature)
    assert abs(metrics["kl_old"]) < 1e-6 and metrics["clip_frac"] == 0


def hand_made():
    """Two turns of 2 and 1 tokens; the first drifted down by .2 a token with a negative advantage."""
    pack = Pack(*[torch.zeros(1)] * 6, torch.tensor([0, 0, 1]))
    pack.old_logprobs = torch.tensor([-1.0, -1.0, -2.0])
    pack.ref_logprobs = torch.tensor([-0.7, -0.7, -1.0])
    pack.rollout_logprobs = torch.tensor([-1.2, -0.9, -4.0])
    pack.advantages, pack.entropy = torch.tensor([-1.0, -1.0, 2.0]), torch.tensor([0.3, 0.6, 0.9])
    logprobs = torch.tensor([-1.2, -1.2, -2.0], requires_grad=True)
    return logprobs, torch.tensor([0.3, 0.6, 0.9], requires_grad=True), pack


def loss_of(**terms):
    logprobs, entropy, pack = hand_made()
    surrogate = partial(SURROGATES["ppo_clip"], clip_low=0.5, clip_high=0.5)
    numbers = PLAIN | {"aggregation": "token-mean", "entropy_coef": 0.0} | terms
    loss, sums = policy_loss(surrogate, logprobs, entropy, pack, 3, 2, **numbers)
    loss.backward()
    return loss.item(), sums, logprobs.grad


def test_the_mask_drops_the_surrogate_of_a_drifted_turn_and_keeps_its_kl():
    # ratios e^-.2 twice and 1: losses .81873 twice and -2; mean over three tokens -.12085
    loss, sums, gradient = loss_of()
    assert loss == pytest.approx((2 * 0.8187308 - 2) / 3, rel=1e-5)
    # the first turn is dropped: -2 / 3, its tokens without gradient, the denominator still 3
    loss, sums, gradient = loss_of(seq_mask=True)
    assert loss == pytest.approx(-2 / 3, rel=1e-5)
    assert gradient.tolist() == pytest.approx([0, 0, -2 / 3])
    assert sums["masked_frac"] == 2
    # k3 with d = .5, .5, 1: e^.5 - 1.5 = .1487213 twice, e - 2 = .7182818, sum 1.0157244; the mask does not touch it
    loss, sums, gradient = loss_of(seq_mask=True, kl_coef=0.5)
    assert loss == pytest.approx(-2 / 3 + 0.5 * 1.0157244 / 3, rel=1e-5)
    assert sums["kl_ref"].item() == pytest.approx(1.0157244, rel=1e-5)


def test_rollout_weights_scale_the_surrogate_and_not_the_kl():
    # old - rollout .2, -.1, 2: weights 1.2214028, .9048374 and the cap 1.5; ratios as above, advantages -1, -1, 2
    loss, _, gradient = loss_of(rollout_is_cap=1.5)
    weighted = [0.8187308 * 1.2214028, 0.8187308 * 0.9048374, -2 * 1.5]
    assert loss == pytest.approx(sum(weighted) / 3, rel=1e-5)
    assert gradient.tolist() == pytest.approx([term / 3 for term in weighted], rel=1e-5)  # d ratio = ratio d logprobs
    kl, _, _ = loss_of(rollout_is_cap=1.5, kl_coef=0.5)
    assert kl - loss == pytest.approx(0.5 * 1.0157244 / 3, rel=1e-5)


def test_a_ratio_can_span_a_trajectory_whose_turns_keep_their_advantages():
    """Turns 0, 1 (2 and 1 tokens) are trajectory 0, turn 2 is trajectory 1. Log-ratios -.2, -.2, .4 | .1: the GSPO
    ratio of trajectory 0 is exp(0) = 1, by turn it would be e^-.2 and e^.4; of trajectory 1 e^.1, cut at 1.05."""
    pack = Pack(*[torch.zeros(1)] * 6, torch.tensor([0, 0, 1, 2]))
    pack.old_logprobs = torch.tensor([-1.0, -1.0, -2.0, -1.0])
    logprobs = torch.tensor([-1.2, -1.2, -1.6, -0.9], requires_grad=True)
    by_turn = replace(pack)
    add_advantages([by_turn], np.array([-1.0, 2.0, 3.0]))
    add_advantages([pack], np.array([-1.0, 2.0, 3.0]), np.array([0, 0, 1]))
    assert pack.advantages.tolist() == by_turn.advantages.tolist() == [-1, -1, 2, 3]
    assert by_turn.sequence.tolist() == [0, 0, 1, 2] and pack.sequence.tolist() == [0, 0, 0, 1]
    gspo = partial(SURROGATES["gspo"], clip_low=0.3, clip_high=0.05)
    losses, _ = gspo(logprobs, pack.old_logprobs, pack.advantages, pack.sequence)
    assert losses.tolist() == pytest.approx([1.0, 1.0, -2.0, -3 * 1.05])
    # d ratio / d logprob = ratio / 3 tokens; for each token of it
    losses[2].backward(retain_graph=True)
    assert logprobs.grad.tolist() == pytest.approx([-2 / 3] * 3 + [0])
    losses, _ = gspo(logprobs, pack.old_logprobs, by_turn.advantages, by_turn.sequence)
    assert losses.tolist() == pytest.approx([0.8187308, 0.8187308, -2 * 1.05, -3 * 1.05])


def test_a_turn_that_is_in_no_pack_has_no_entropy(model, tokenizer):
    batches, _ = sampled_batches(model, tokenizer, 1.0)
    entropy = add_old_logprobs(model, model, [pack for batch in batches for pack in batch], 1.0, 9)
    assert np.isfinite(entropy[:8]).all() and np.isnan(entropy[8])


def test_sum_norm_divides_by_the_response_limit():
    # (.81873 + .81873 - 2) / (2 sequences * limit 9)
    loss, _, _ = loss_of(aggregation="seq-mean-token-sum-norm")
    assert loss == pytest.approx((2 * 0.8187308 - 2) / 18, rel=1e-5)


def test_an_entropy_bonus_lowers_the_loss():
    loss, _, _ = loss_of(entropy_coef=0.1)
    assert loss == pytest.approx((2 * 0.8187308 - 2) / 3 - 0.1 * (0.3 + 0.6 + 0.9) / 3, rel=1e-5)


def test_drift_is_summed_over_all_tokens_masked_or_not():
    for mask in (False, True):
        assert loss_of(seq_mask=mask)[1]["kl_old"].item() == pytest.approx(0.2 + 0.2 + 0.0, rel=1e-5)


def test_methods_are_table_1():
    clip, plain = ("ppo_clip", False), "token-mean"
    expected = {
        "grpo": (plain, *clip, False, "grpo"),
        "grpo_st": ("seq-mean-token-mean", *clip, False, "grpo"),
        "grpo_sm": (plain, "ppo_clip", True, False, "grpo"),
        "sapo": (plain, "sapo", False, False, "grpo"),
        "sapo_sm": (plain, "sapo", True, False, "grpo"),
        "cispo": (plain, "cispo", False, False, "grpo"),
        "cispo_sm": (plain, "cispo", True, False, "grpo"),
        "gspo": (plain, "gspo", False, False, "grpo"),
        "gigpo": (plain, *clip, False, "gigpo"),
        "empg": (plain, *clip, False, "empg"),
        "dapo": (plain, *clip, True, "grpo"),
        "dapo_gigpo": (plain, *clip, True, "gigpo"),
        "sampo": (plain, "gspo", False, True, "gigpo"),
        "sampo_released": ("seq-mean-token-mean", "gspo", False, True, "gigpo"),
    }
    assert METHODS == {name: Method(*values) for name, values in expected.items()}
    assert set(Method.__dataclass_fields__) <= set(Config.__dataclass_fields__)


def test_the_table_prints_every_method(capsys):
    print_table()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["method", *METHODS]
    assert lines[13].split() == ["sampo", "token-mean", "gspo", "False", "True", "gigpo"]
