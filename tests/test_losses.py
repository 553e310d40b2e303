"""Losses against hand-derived values, finite differences, REINFORCE, and any split of the batch (CPU, seconds).

    python -m pytest -q tests/test_losses.py

Ids such as B36 name known faults of other projects, met here as test cases.
"""

import ast
import inspect
import math

import pytest
import torch

import losses
from losses import AGGREGATIONS, SURROGATES, aggregate, cispo, gspo, kl_penalty, ppo_clip, sapo, sequence_mask

NUMBERS = {
    "ppo_clip": dict(clip_low=0.2, clip_high=0.3),
    "cispo": dict(clip_low=0.2, clip_high=0.3),
    "sapo": dict(tau_pos=1.0, tau_neg=1.05),
    "gspo": dict(clip_low=0.2, clip_high=0.3),
}
LENGTHS = [1, 4, 2, 3, 1, 5]  # six sequences, 16 tokens
each_surrogate = pytest.mark.parametrize("name", SURROGATES)
each_mode = pytest.mark.parametrize("mode", AGGREGATIONS)


def close(actual, expected, tolerance=1e-7):
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def tokens(ratios, advantages, sequence=None, logprob=-2.0):
    """Tokens of probability exp(logprob) with the given ratios; one token a sequence unless `sequence` is given."""
    old = logprob - torch.tensor(ratios, dtype=torch.float64).log()
    sequence = torch.tensor(range(len(ratios)) if sequence is None else sequence)
    advantages = torch.tensor(advantages, dtype=torch.float64)
    return torch.full_like(old, logprob).requires_grad_(), old, advantages, sequence


def batch(dtype=torch.float64):
    """Unequal lengths, both signs of the advantage inside the clips and beyond either, at least .005 from each kink."""
    sequence = torch.repeat_interleave(torch.arange(6), torch.tensor(LENGTHS))
    drift = torch.tensor([0.5, -0.5, 0.1, -0.1, 0.4, -0.4], dtype=dtype)[sequence]
    wave = torch.sin(1.7 * torch.arange(16, dtype=dtype))
    advantages = torch.tensor([1, -1, 2, -0.5, -1.5, 0.5], dtype=dtype)[sequence]
    old = -2 + wave / 2
    return (old + drift + 0.15 * wave).requires_grad_(), old, advantages, sequence


def loss_and_gradient(name, data, **numbers):
    values, stats = SURROGATES[name](*data, **(numbers or NUMBERS[name]))
    return values, torch.autograd.grad(values.sum(), data[0])[0], stats


def flags(stats):
    return stats["clipped_low"].int().tolist(), stats["clipped_high"].int().tolist()


def test_ppo_clip_by_hand_on_both_sides_of_each_limit():
    # limits .8 and 1.3; loss -min(rA, clip(r)A), gradient -rA where the first term is the smaller, else 0
    #  r    A   min(rA, clip A)
    # 1.5   2   min( 3,  2.6) cut above      .5   2   min( 1,  1.6)
    # 1.5  -2   min(-3, -2.6)                .5  -2   min(-1, -1.6) cut below
    # 1.25  2   2.5, inside as 1.25 < 1.3    .75 -2   min(-1.5, -1.6) cut below as .75 < .8
    data = tokens([1.5, 1.5, 0.5, 0.5, 1.25, 0.75, 7.0], [2, -2, 2, -2, 2, -2, 0])
    values, gradient, stats = loss_and_gradient("ppo_clip", data)
    close(values, [-2.6, 3, -1, 1.6, -2.5, 1.6, 0])
    close(gradient, [0, 3, -1, 0, -2.5, 0, 0])
    assert flags(stats) == ([0, 0, 0, 1, 0, 1, 0], [1, 0, 0, 0, 0, 0, 0])


def test_dual_clip_bounds_only_the_loss_of_a_negative_advantage():
    # B64: A = -1: min(4, 3), 1.5, .9; A = 1: -min(1.3, 1.28), -1.25, untouched by the bound
    data = tokens([4, 1.5, 0.9, 1.3, 1.25], [-1, -1, -1, 1, 1])
    values, gradient, _ = loss_and_gradient("ppo_clip", data, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    close(values, [3, 1.5, 0.9, -1.28, -1.25])
    close(gradient, [0, 1.5, 0.9, 0, -1.25])


def test_cispo_keeps_the_gradient_of_every_token():
    # weights clip([1.5, .5, 1.25, .75], .8, 1.3) = [1.3, .8, 1.25, .8] for either sign; gradient -wA, loss -wA * -2
    data = tokens([1.5, 0.5, 1.25, 0.75] * 2, [1, 1, 1, 1, -1, -1, -1, -1])
    values, gradient, stats = loss_and_gradient("cispo", data)
    close(gradient, [-1.3, -0.8, -1.25, -0.8, 1.3, 0.8, 1.25, 0.8])
    close(values, [2.6, 1.6, 2.5, 1.6, -2.6, -1.6, -2.5, -1.6])
    assert flags(stats) == ([0, 1, 0, 1] * 2, [1, 0, 0, 0] * 2)


def test_cispo_has_no_floor_at_clip_low_one():
    # limits 0 and 1.3: weights [1.3, .5, .01]
    data = tokens([1.5, 0.5, 0.01], [1, -1, 1])
    _, gradient, stats = loss_and_gradient("cispo", data, clip_low=1.0, clip_high=0.3)
    close(gradient, [-1.3, 0.5, -0.01])
    assert flags(stats) == ([0, 0, 0], [1, 0, 0])


def test_sapo_by_hand():
    # B36: loss -4/tau s A with s = sigmoid(tau (r - 1)), gradient -4 s (1 - s) r A; tau 1 for A > 0, 1.05 for A < 0
    # r = 1: s = .5: 2 and 2 / 1.05;  r = 2, tau 1: s = .73105858, 4 s = 2.92423431, 8 s (1 - s) = 1.57289547
    # r = 2, tau 1.05: s = .74077490, 4 s / 1.05 = 2.82199962, 8 s (1 - s) = 1.53621958
    # r = .5, tau 1: s = .37754067, 4 s = 1.51016268, 2 s (1 - s) = .47000742
    data = tokens([1, 1, 2, 2, 0.5, 2], [1, -1, 1, -1, 1, 0])
    values, gradient, stats = loss_and_gradient("sapo", data)
    close(values, [-2, 1.90476190, -2.92423431, 2.82199962, -1.51016268, 0], 1e-8)
    close(gradient, [-1, 1, -1.57289547, 1.53621958, -0.47000742, 0], 1e-8)
    assert flags(stats) == ([0] * 6, [0] * 6)


def test_gspo_averages_the_log_ratios_of_a_turn():
    # B08: means (.2 - .1 + .5) / 3 = .2 and .3; -min(exp .2, 1.2) = -1.2 and exp .3 = 1.34985881; mean .07492940
    ratios = [math.exp(x) for x in (0.2, -0.1, 0.5, 0.3)]
    data = tokens(ratios, [1, 1, 1, -1], [0, 0, 0, 1])
    values, gradient, _ = loss_and_gradient("gspo", data, clip_low=0.2, clip_high=0.2)
    close(values, [-1.2, -1.2, -1.2, 1.34985881])
    close(gradient, [0, 0, 0, 1.34985881])
    close(aggregate(values, data[3], "seq-mean-token-mean", num_tokens=4, num_sequences=2), 0.0749294)


def test_gspo_shares_one_ratio_per_turn():
    # turn ratios: (5/2 * 5/8)^(1/2) = 1.25; (1/2 * 1/2 * 27/16)^(1/3) = .75; 1.5; (1 * 9/4)^(1/2) = 1.5; .5
    # A = 1, -1, 1, -1, 1, limits .8 and 1.3: -1.25 inside, .8 cut below, -1.3 cut above, 1.5, -.5
    ratios = [5 / 2, 5 / 8, 1 / 2, 1 / 2, 27 / 16, 3 / 2, 1, 9 / 4, 1 / 2]
    data = tokens(ratios, [1, 1, -1, -1, -1, 1, -1, -1, 1], [0, 0, 1, 1, 1, 2, 3, 3, 4])
    values, gradient, stats = loss_and_gradient("gspo", data)
    close(values, [-1.25, -1.25, 0.8, 0.8, 0.8, -1.3, 1.5, 1.5, -0.5])
    close(gradient, [-1.25, -1.25, 0, 0, 0, 0, 1.5, 1.5, -0.5])  # n losses, each with 1/n of the slope
    assert flags(stats) == ([0, 0, 1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1, 0, 0, 0])


def test_gspo_clamps_the_mean_never_its_tokens():
    # mean (30 - 29.8) / 2 = .1; tokens clamped at 20 would give 0
    old = torch.tensor([-31, -1.2], dtype=torch.float64)
    new = torch.tensor([-1, -31], dtype=torch.float64)
    values, _ = gspo(new, old, torch.ones(2), torch.tensor([0, 0]), **NUMBERS["gspo"])
    close(values, [-math.exp(0.1)] * 2)


def test_sequence_mask_is_one_decision_per_sequence():
    # B34: mean A = (-.5 + .25 - .25) / 3 < 0 and old - new = 1 > .1: drop; A > 0: keep; (.5 - .45) = .05 < .1: keep
    logprobs = torch.tensor([0, 0, 0, 0, 0, 0, -0.5, -0.5])
    old = torch.tensor([1, 1, 1, 1, 1, 1, -0.45, -0.45])
    advantages = torch.tensor([-0.5, 0.25, -0.25, 0.5, 0.5, 0.5, -1, -1])
    keep = sequence_mask(logprobs, old, advantages, torch.tensor([0, 0, 0, 1, 1, 1, 2, 2]), delta=0.1)
    assert keep.tolist() == [False] * 3 + [True] * 5


def test_sequence_mask_drops_where_the_policy_moved_down_by_more_than_delta():
    old, advantages, sequence = torch.full((4,), -2.0), torch.tensor([-1.0, -1, -1, 0]), torch.arange(4)
    logprobs = torch.tensor([-2.5, -2.25, -1.0, -9.0])  # old - new = .5, .25, -1, 7 (the last with A = 0)
    assert sequence_mask(logprobs, old, advantages, sequence, delta=0.25).tolist() == [False, True, True, True]


@pytest.mark.parametrize("estimator, values, gradient", [
    ("k1", [0, 1, -1, -0.69314718], [1, 1, 1, 1]),  # -d; d falls as logprobs rise
    ("k2", [0, 0.5, 0.5, 0.24022651], [0, 1, -1, -0.69314718]),  # d^2 / 2, gradient -d
    # exp(d) - 1 - d: 1/e - 1 + 1, e - 2, 2 - 1 - ln 2; gradient 1 - exp(d): 1 - 1/e, 1 - e, 1 - 2
    ("k3", [0, 0.36787944, 0.71828183, 0.30685282], [0, 0.63212056, -1.71828183, -1]),
])
def test_kl_by_hand(estimator, values, gradient):
    d = torch.tensor([0, -1, 1, math.log(2)], dtype=torch.float64)  # B10
    logprobs = (-3 - d).requires_grad_()
    kl = kl_penalty(logprobs, torch.full_like(d, -3), estimator)
    close(kl, values, 1e-8)
    close(torch.autograd.grad(kl.sum(), logprobs)[0], gradient, 1e-8)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_is_finite_far_away_and_shows_nan(estimator):
    logprobs = torch.tensor([-101, -1001, -1.0], requires_grad=True)  # B10: d = 100, 1000, -1000
    kl = kl_penalty(logprobs, torch.tensor([-1, -1, -1001.0]), estimator)
    assert kl.isfinite().all() and torch.autograd.grad(kl.sum(), logprobs)[0].isfinite().all()
    nan = torch.tensor([float("nan"), -1.0])
    assert kl_penalty(nan, torch.zeros(2), estimator).isnan().tolist() == [True, False]
    assert kl_penalty(torch.zeros(2), nan, estimator).isnan().tolist() == [True, False]


@pytest.mark.parametrize("mode, value, weights", [
    ("token-mean", 14 / 8, [1 / 8] * 8),
    ("seq-mean-token-mean", (1 + 1 + 1 + 4 + 4) / 5, [1 / 5, 1 / 10, 1 / 10, 1 / 15, 1 / 15, 1 / 15, 1 / 5, 1 / 5]),
    ("seq-mean-token-sum", 14 / 5, [1 / 5] * 8),
    ("seq-mean-token-sum-norm", 14 / (5 * 10), [1 / 50] * 8),
])
@pytest.mark.parametrize("cuts", [[0, 8], [0, 6, 8], [0, 1, 3, 6, 7, 8]])
def test_aggregate_by_hand_in_any_split(mode, value, weights, cuts):
    values = torch.tensor([1, 1, 1, 1, 1, 1, 4, 4.0], dtype=torch.float64, requires_grad=True)  # B01
    sequence = torch.tensor([0, 1, 1, 2, 2, 2, 3, 4])
    total = sum(
        aggregate(values[a:b], sequence[a:b], mode, num_tokens=8, num_sequences=5, max_length=10)
        for a, b in zip(cuts, cuts[1:], strict=False)
    )
    close(total, value)
    close(torch.autograd.grad(total, values)[0], weights)


def test_token_sum_norm_divides_by_the_configured_length():
    # B03: (1 + 1 + 2 * 4) / 2 sequences / 10
    values = torch.tensor([1, 1, 2, 2, 2, 2.0])
    counts = dict(num_tokens=6, num_sequences=2, max_length=10)
    close(aggregate(values, torch.tensor([0, 0, 1, 1, 1, 1]), "seq-mean-token-sum-norm", **counts), 0.5)


@each_mode
@each_surrogate
def test_an_empty_micro_batch_gives_zero_with_a_graph(name, mode):
    weight = torch.ones((), requires_grad=True)  # B04: a rank without tokens still runs backward
    none, sequence = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    values, _ = SURROGATES[name](weight * none, none, none, sequence, **NUMBERS[name])
    loss = aggregate(values, sequence, mode, num_tokens=5, num_sequences=2, max_length=10)
    loss.backward()
    assert loss.item() == 0 and weight.grad.item() == 0


@each_surrogate
def test_gradient_matches_finite_differences(name):
    logprobs, old, advantages, sequence = batch()
    if name == "cispo":  # its weight is a constant, so hold it still while the loss is differenced
        weight = (logprobs - old).exp().clamp(0.8, 1.3).detach()
        gradient = loss_and_gradient(name, batch())[1]
        close(gradient, ((logprobs + 1e-3) - (logprobs - 1e-3)).detach() / 2e-3 * -weight * advantages)
    else:
        assert torch.autograd.gradcheck(lambda x: SURROGATES[name](x, old, advantages, sequence, **NUMBERS[name])[0],
                                        logprobs)


def test_gradient_of_dual_clip_matches_finite_differences():
    logprobs, old, advantages, sequence = batch()
    numbers = dict(clip_low=0.2, clip_high=0.3, dual_clip=1.25)
    assert ppo_clip(logprobs, old, advantages, sequence, **numbers)[0][10].item() == 1.25 * 1.5  # the bound acts
    assert torch.autograd.gradcheck(lambda x: ppo_clip(x, old, advantages, sequence, **numbers)[0], logprobs)


@each_mode
def test_gradient_of_aggregate_matches_finite_differences(mode):
    values, _, _, sequence = batch()
    counts = dict(num_tokens=20, num_sequences=7, max_length=5)
    assert torch.autograd.gradcheck(lambda x: aggregate(x, sequence, mode, **counts), values)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradient_of_kl_matches_finite_differences(estimator):
    logprobs, reference, _, _ = batch()
    assert torch.autograd.gradcheck(lambda x: kl_penalty(x, reference, estimator), logprobs)


@each_surrogate
def test_on_policy_gradient_is_reinforce(name):
    logprobs, _, advantages, sequence = batch()
    _, gradient, _ = loss_and_gradient(name, (logprobs, logprobs.detach(), advantages, sequence))
    close(gradient, -advantages)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo"])
def test_zero_loss_with_a_gradient_is_right(name):
    """B78: on policy the loss is the mean of -A, 0 in a centred group. What trains is the gradient, -A / n.

    A logged loss of 0 is no fault and must not be "repaired".
    """
    data = tokens([1, 1], [1, -1])
    values, _ = SURROGATES[name](*data, **NUMBERS[name])
    loss = aggregate(values, data[3], "token-mean", num_tokens=2, num_sequences=2)
    assert loss.item() == 0
    close(torch.autograd.grad(loss, data[0])[0], [-0.5, 0.5])


@pytest.mark.parametrize("tau", [0.1, 1.0, 1.05, 30.0])
def test_sapo_has_slope_one_at_ratio_one(tau):
    close(loss_and_gradient("sapo", tokens([1, 1], [3, -3]), tau_pos=tau, tau_neg=tau)[1], [-3, 3])


def test_gspo_of_one_token_turns_is_ppo_clip():
    logprobs, old, advantages, _ = batch()
    data = (logprobs, old, advantages, torch.arange(16))
    for ours, theirs in zip(loss_and_gradient("gspo", data)[:2], loss_and_gradient("ppo_clip", data)[:2], strict=True):
        close(ours, theirs.detach(), 1e-12)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo"])
def test_an_infinite_clip_leaves_the_plain_ratio(name):
    logprobs, old, advantages, sequence = data = batch()
    values, gradient, stats = loss_and_gradient(name, data, clip_low=math.inf, clip_high=math.inf)
    log_ratio = logprobs - old
    if name == "gspo":
        log_ratio = torch.cat([part.mean().expand(len(part)) for part in log_ratio.split(LENGTHS)])
    plain = -log_ratio.exp() * advantages
    close(values, plain.detach())
    close(gradient, torch.autograd.grad(plain.sum(), logprobs)[0])
    assert flags(stats) == ([0] * 16, [0] * 16)


def test_cispo_below_its_clip_has_the_gradient_of_the_plain_ratio():
    logprobs, old, advantages, _ = data = batch()
    below = ~loss_and_gradient("cispo", data, clip_low=1.0, clip_high=0.3)[2]["clipped_high"]
    gradient = loss_and_gradient("cispo", data, clip_low=1.0, clip_high=0.3)[1]
    plain = torch.autograd.grad((-(logprobs - old).exp() * advantages).sum(), logprobs)[0]
    assert 0 < below.sum() < 16
    close(gradient[below], plain[below])


def test_aggregations_that_coincide():
    values, counts = torch.arange(6.0), dict(num_tokens=6, num_sequences=3, max_length=1)
    equal, unequal = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 1, 1, 1, 2, 2])
    by_mode = {mode: aggregate(values, equal, mode, **counts) for mode in AGGREGATIONS}
    close(by_mode["seq-mean-token-mean"], by_mode["token-mean"])
    close(by_mode["seq-mean-token-sum-norm"], by_mode["seq-mean-token-sum"])
    assert aggregate(values, unequal, "seq-mean-token-mean", **counts) != by_mode["token-mean"]


def split_gradient(name, mode, pieces, *, shuffled, local=False):
    """Gradient accumulated over micro-batches cut between sequences; local=True takes each one's own denominators."""
    logprobs, old, advantages, sequence = batch(torch.float32)
    order = torch.arange(16) * 7 % 16 if shuffled else torch.arange(16)
    for ids in torch.arange(6).tensor_split(pieces):
        part = order[torch.isin(sequence[order], ids)]
        mine = sequence[part] - ids[0]
        values, _ = SURROGATES[name](logprobs[part], old[part], advantages[part], mine, **NUMBERS[name])
        counts = (len(part) * pieces, len(ids) * pieces) if local else (16, 6)
        aggregate(values, mine, mode, num_tokens=counts[0], num_sequences=counts[1], max_length=5).backward()
    return logprobs.grad


@pytest.mark.parametrize("pieces", [1, 2, 5, 6])
@each_mode
@each_surrogate
def test_gradient_depends_on_neither_split_nor_order(name, mode, pieces):
    whole = split_gradient(name, mode, 1, shuffled=False)
    for shuffled in (False, True):
        difference = split_gradient(name, mode, pieces, shuffled=shuffled) - whole
        assert difference.norm() <= 1e-5 * whole.norm()


@each_mode
@each_surrogate
def test_denominators_of_the_micro_batch_would_depend_on_the_split(name, mode):
    whole = split_gradient(name, mode, 1, shuffled=False)
    assert (split_gradient(name, mode, 5, shuffled=False, local=True) - whole).norm() > 0.1 * whole.norm()


@pytest.mark.parametrize("more", [{}, {"dual_clip": 3.0}])
@each_surrogate
def test_extreme_log_ratios_stay_finite(name, more):
    if more and name != "ppo_clip":
        pytest.skip("dual_clip belongs to ppo_clip")
    logprobs = torch.tensor([-1, -1001, -1, -1001.0], requires_grad=True)  # log-ratios +-1000, either sign of A
    old, advantages = torch.tensor([-1001, -1, -1001, -1.0]), torch.tensor([1, 1, -1, -1.0])
    data = logprobs, old, advantages, torch.arange(4)
    values, gradient, _ = loss_and_gradient(name, data, **NUMBERS[name], **more)
    assert values.isfinite().all() and gradient.isfinite().all()
    assert sequence_mask(*data, delta=0.1).tolist() == [True, True, True, False]


@each_surrogate
def test_nan_stays_visible(name):
    sequence = torch.arange(3)
    for place in range(3):  # logprobs, old_logprobs, advantages
        data = [-torch.ones(3), -torch.ones(3), torch.tensor([1.0, -1, 0])]
        data[place] = torch.full((3,), math.nan)
        assert SURROGATES[name](*data, sequence, **NUMBERS[name])[0].isnan().all()
        assert sequence_mask(*data, sequence, delta=0.1).all()  # kept, so that the mask hides nothing


@pytest.mark.parametrize("call", [*SURROGATES.values(), sequence_mask])
@pytest.mark.parametrize("place", range(4))
def test_a_shape_or_dtype_that_differs_raises(call, place):
    numbers = NUMBERS.get(call.__name__, {"delta": 0.1})
    right = [torch.ones(3), torch.ones(3), torch.ones(3), torch.arange(3)]
    for shaped in (right[place][:1], right[place][:, None], right[place][0]):
        with pytest.raises(ValueError, match="shapes"):
            call(*right[:place], shaped, *right[place + 1:], **numbers)
    for dtype in (torch.int32, torch.float32):
        with pytest.raises(ValueError, match="dtype"):
            call(*right[:3], right[3].to(dtype), **numbers)
    with pytest.raises(TypeError):
        call(*right, **numbers, unknown=1.0)
    with pytest.raises(TypeError):
        call(*right)


@pytest.mark.parametrize("call, numbers", [
    *[(f, {"clip_low": bad, "clip_high": 0.3}) for f in (ppo_clip, cispo, gspo) for bad in (-0.1, math.nan)],
    *[(f, {"clip_low": 0.2, "clip_high": bad}) for f in (ppo_clip, cispo, gspo) for bad in (-0.1, math.nan)],
    *[(ppo_clip, {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": bad}) for bad in (0.5, 1.0, -3.0, math.nan)],
    *[(sapo, {"tau_pos": bad, "tau_neg": 1.0}) for bad in (0.0, -1.0, math.nan)],
    *[(sapo, {"tau_pos": 1.0, "tau_neg": bad}) for bad in (0.0, -1.0, math.nan)],
    (sequence_mask, {"delta": math.nan}),
])
def test_a_number_outside_its_range_raises(call, numbers):
    with pytest.raises(ValueError, match="allowed"):
        call(torch.ones(3), torch.ones(3), torch.ones(3), torch.arange(3), **numbers)


def test_wrong_calls_of_kl_and_aggregate_raise():
    values, sequence, counts = torch.ones(3), torch.arange(3), dict(num_tokens=3, num_sequences=3)
    for args, wrong, message in [
        ((values[:2], sequence, "token-mean"), {}, "shapes"),
        ((values, sequence.int(), "token-mean"), {}, "int32"),
        ((values, sequence, "token-meen"), {}, "token-meen"),
        ((values, sequence, "token-mean"), {"num_tokens": 2}, "num_tokens 2"),
        ((values, sequence, "token-mean"), {"num_sequences": 0}, "num_sequences 0"),
        ((values, sequence, "seq-mean-token-sum-norm"), {}, "max_length None"),
        ((values, sequence, "seq-mean-token-sum-norm"), {"max_length": 0}, "max_length 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            aggregate(*args, **{**counts, **wrong})
    with pytest.raises(ValueError, match="k4"):
        kl_penalty(values, values, "k4")
    with pytest.raises(ValueError, match="shapes"):
        kl_penalty(values, values[:, None], "k3")


def test_losses_imports_torch_only():
    nodes = list(ast.walk(ast.parse(inspect.getsource(losses))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    assert {name.split(".")[0] for name in names} == {"torch"}


def test_every_public_function_documents_its_shapes():
    functions = [f for f in vars(losses).values() if inspect.isfunction(f) and f.__module__ == "losses"]
    public = [f for f in functions if not f.__name__.startswith("_")]
    assert set(SURROGATES.values()) < set(public)
    assert [f.__name__ for f in public if "[M]" not in (f.__doc__ or "")] == []
