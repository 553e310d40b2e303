"""Losses against hand-derived values, finite differences, REINFORCE and any split of the batch. CPU, seconds.

Numbers in the tests are derived beside them. Ids such as B36 name faults that other projects shipped.
"""

import ast
import inspect
import math
from functools import partial

import pytest
import torch

import losses
from losses import (
    AGGREGATIONS,
    SURROGATES,
    aggregate,
    cispo,
    gspo,
    kl_penalty,
    ppo_clip,
    rollout_weights,
    sapo,
    sequence_mask,
)

CLIP = dict(clip_low=0.2, clip_high=0.3)  # limits .8 and 1.3
NUMBERS = {"ppo_clip": CLIP, "cispo": CLIP, "gspo": CLIP, "sapo": dict(tau_pos=1.0, tau_neg=1.05)}
VARIANTS = {name: partial(surrogate, **NUMBERS[name]) for name, surrogate in SURROGATES.items()}
VARIANTS["dual_clip"] = partial(ppo_clip, **CLIP, dual_clip=1.5)
LENGTHS = [1, 4, 2, 3, 1, 5]  # six sequences, 16 tokens
each_variant = pytest.mark.parametrize("name", VARIANTS)
each_mode = pytest.mark.parametrize("mode", AGGREGATIONS)
each_estimator = pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])


def close(actual, expected, tolerance=1e-8):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=tolerance, atol=tolerance)


def tokens(ratios, advantages, sequence=None):
    """Tokens of log-probability -2 with the given ratios; one token a sequence unless `sequence` is given."""
    old = -2 - torch.tensor(ratios, dtype=torch.float64).log()
    sequence = torch.tensor(range(len(ratios)) if sequence is None else sequence)
    return torch.full_like(old, -2).requires_grad_(), old, torch.tensor(advantages, dtype=torch.float64), sequence


def batch(dtype=torch.float64):
    """Either sign of A with ratios (also of turns) below, inside and above the limits, none within .02 of a kink."""
    sequence = torch.arange(6).repeat_interleave(torch.tensor(LENGTHS))
    drift = torch.tensor([0.5, -0.5, 0.1, -0.1, 0.6, -0.4], dtype=dtype)[sequence]
    advantages = torch.tensor([1, -1, 2, -0.5, -1.5, 0.5], dtype=dtype)[sequence]
    wave = torch.sin(1.7 * torch.arange(16, dtype=dtype))
    return (-2 + drift + wave).requires_grad_(), -2 + 0.85 * wave, advantages, sequence


def run(surrogate, data, **numbers):
    """Losses, the gradient of their sum, and the places of the tokens clipped from below and from above."""
    values, stats = surrogate(*data, **numbers)
    low, high = (stats[side].nonzero().flatten().tolist() for side in ("clipped_low", "clipped_high"))
    return values, torch.autograd.grad(values.sum(), data[0])[0], low, high


def matches(result, values, gradient, low, high):
    close(result[0], values)
    close(result[1], gradient)
    assert result[2:] == (low, high)


def test_ppo_clip_by_hand_on_both_sides_of_each_limit():
    # loss -min(rA, clip(r) A); gradient -rA where the first term is the smaller, else 0
    #  r    A                                  r    A
    # 1.5   2  min( 3,  2.6) cut above        .5   2  min( 1,  1.6)
    # 1.5  -2  min(-3, -2.6)                  .5  -2  min(-1, -1.6) cut below
    # 1.25  2  2.5, inside as 1.25 < 1.3      .75 -2  min(-1.5, -1.6) cut below as .75 < .8
    result = run(ppo_clip, tokens([1.5, 1.5, 0.5, 0.5, 1.25, 0.75, 7], [2, -2, 2, -2, 2, -2, 0]), **CLIP)
    matches(result, [-2.6, 3, -1, 1.6, -2.5, 1.6, 0], [0, 3, -1, 0, -2.5, 0, 0], low=[3, 5], high=[0])


def test_dual_clip_bounds_the_loss_of_a_negative_advantage_only():
    # B64: A = -1: min(4, 3), 1.5, .9; A = 1: -min(1.3, 1.28), -1.25
    data = tokens([4, 1.5, 0.9, 1.3, 1.25], [-1, -1, -1, 1, 1])
    result = run(ppo_clip, data, clip_low=0.2, clip_high=0.28, dual_clip=3)
    matches(result, [3, 1.5, 0.9, -1.28, -1.25], [0, 1.5, 0.9, 0, -1.25], low=[], high=[3])


def test_cispo_keeps_the_gradient_of_every_token():
    # weights w = clip([1.5, .5, 1.25, .75]) = [1.3, .8, 1.25, .8] for either sign; gradient -wA, loss -wA * -2
    result = run(cispo, tokens([1.5, 0.5, 1.25, 0.75] * 2, [1] * 4 + [-1] * 4), **CLIP)
    gradient = [-1.3, -0.8, -1.25, -0.8, 1.3, 0.8, 1.25, 0.8]
    matches(result, [-2 * g for g in gradient], gradient, low=[1, 3, 5, 7], high=[0, 4])
    # clip_low = 1 has no floor: limits 0 and 1.3, weights [1.3, .5, .01]
    result = run(cispo, tokens([1.5, 0.5, 0.01], [1, -1, 1]), clip_low=1, clip_high=0.3)
    matches(result, [2.6, -1, 0.02], [-1.3, 0.5, -0.01], low=[], high=[0])


def test_sapo_by_hand():
    # B36: loss -4/tau s A with s = sigmoid(tau (r - 1)), gradient -4 s (1 - s) r A; tau is 1 for A > 0, else 1.05
    # r = 1: s = .5: 4 s = 2, 2 / 1.05 = 1.9047619    r = 2, tau 1: s = .73105858: 2.92423431, 8 s (1 - s) = 1.57289547
    # r = 2, tau 1.05: s = .74077490: 4 s / 1.05 = 2.82199962, 8 s (1 - s) = 1.53621958
    # r = .5, tau 1: s = .37754067: 1.51016268, 2 s (1 - s) = .47000742
    values = [-2, 1.90476190, -2.92423431, 2.82199962, -1.51016268, 0]
    gradient = [-1, 1, -1.57289547, 1.53621958, -0.47000742, 0]
    result = run(sapo, tokens([1, 1, 2, 2, 0.5, 2], [1, -1, 1, -1, 1, 0]), tau_pos=1, tau_neg=1.05)
    matches(result, values, gradient, low=[], high=[])


def test_gspo_averages_the_log_ratios_of_a_turn():
    # B08: means (.2 - .1 + .5) / 3 = .2 and .3; losses -min(exp .2, 1.2) = -1.2 and exp .3 = 1.34985881
    data = tokens([math.exp(x) for x in (0.2, -0.1, 0.5, 0.3)], [1, 1, 1, -1], [0, 0, 0, 1])
    result = run(gspo, data, clip_low=0.2, clip_high=0.2)
    matches(result, [-1.2, -1.2, -1.2, 1.34985881], [0, 0, 0, 1.34985881], low=[], high=[0, 1, 2])
    close(aggregate(result[0], data[3], "seq-mean-token-mean", num_tokens=4, num_sequences=2), 0.14985881 / 2)


def test_gspo_shares_one_ratio_per_turn():
    # ratios of the turns: (5/2 5/8)^(1/2) = 1.25; (1/2 1/2 27/16)^(1/3) = .75; 1.5; (1 9/4)^(1/2) = 1.5; .5
    # A = 1, -1, 1, -1, 1: -1.25 inside, .8 cut below, -1.3 cut above, 1.5, -.5; n losses, each with 1/n of the slope
    ratios = [5 / 2, 5 / 8, 1 / 2, 1 / 2, 27 / 16, 3 / 2, 1, 9 / 4, 1 / 2]
    result = run(gspo, tokens(ratios, [1, 1, -1, -1, -1, 1, -1, -1, 1], [0, 0, 1, 1, 1, 2, 3, 3, 4]), **CLIP)
    values, gradient = [-1.25, -1.25, 0.8, 0.8, 0.8, -1.3, 1.5, 1.5, -0.5], [-1.25, -1.25, 0, 0, 0, 0, 1.5, 1.5, -0.5]
    matches(result, values, gradient, low=[2, 3, 4], high=[5])


def test_gspo_clamps_the_mean_never_its_tokens():
    # mean (30 - 29.8) / 2 = .1; tokens clamped at +-20 would give 0
    close(run(gspo, tokens([math.exp(30), math.exp(-29.8)], [1, 1], [0, 0]), **CLIP)[0], [-math.exp(0.1)] * 2)


def test_sequence_mask_drops_whole_sequences_with_a_negative_advantage_and_a_policy_that_moved_down():
    # B34: mean A (-.5 + .25 - .25) / 3 < 0 and old - new = 1 > .1: drop; A = .5: keep; -.45 + .5 = .05 < .1: keep
    logprobs = torch.tensor([0, 0, 0, 0, 0, 0, -0.5, -0.5])
    old = torch.tensor([1, 1, 1, 1, 1, 1, -0.45, -0.45])
    advantages = torch.tensor([-0.5, 0.25, -0.25, 0.5, 0.5, 0.5, -1, -1])
    keep = sequence_mask(logprobs, old, advantages, torch.tensor([0, 0, 0, 1, 1, 1, 2, 2]), delta=0.1)
    assert keep.tolist() == [False] * 3 + [True] * 5
    # means of old - new: (1 + 0) / 2 above delta, (.5 + 0) / 2 at delta, -1 moved up, 7 with A = 0
    logprobs, advantages = torch.tensor([-3, -2, -2.5, -2, -1, -9]), torch.tensor([-1.0, -1, -1, -1, -1, 0])
    keep = sequence_mask(logprobs, torch.full((6,), -2.0), advantages, torch.tensor([0, 0, 1, 1, 2, 3]), delta=0.25)
    assert keep.tolist() == [False] * 2 + [True] * 4


def test_rollout_weights_are_cut_from_above_alone():
    # old - rollout: .5, -.5, 3 cut to the cap, 0, and -49 clamped to -20
    old, rollout = torch.tensor([-1, -1, -2, -3, -50.0]), torch.tensor([-1.5, -0.5, -5, -3, -1])
    expected = [1.64872127, 0.60653066, 2, 1, math.exp(-20)]
    close(rollout_weights(old.double(), rollout.double(), 2.0), expected)
    close(rollout_weights(old.double(), rollout.double(), 0.5), [0.5, 0.5, 0.5, 0.5, math.exp(-20)])
    with pytest.raises(ValueError, match="rollout_is_cap -1"):
        rollout_weights(old, rollout, -1)


@pytest.mark.parametrize(
    "estimator, values, gradient",
    [
        ("k1", [0, 1, -1, -0.69314718, -100, 1000], [1] * 6),  # -d, and d falls as logprobs rise
        ("k2", [0, 0.5, 0.5, 0.24022651, 5e3, 5e5], [0, 1, -1, -0.69314718, -100, 1000]),  # d^2 / 2, gradient -d
        # exp(d) - 1 - d: 1/e, e - 2, 1 - ln 2, with d cut to 20 in both terms exp(20) - 21, 999
        # gradient 1 - exp(d): 1 - 1/e, 1 - e, 1 - 2, none where d is cut, 1
        (
            "k3",
            [0, 0.36787944, 0.71828183, 0.30685282, math.exp(20) - 21, 999],
            [0, 0.63212056, -1.71828183, -1, 0, 1],
        ),
    ],
)
def test_kl_by_hand(estimator, values, gradient):
    d = torch.tensor([0, -1, 1, math.log(2), 100, -1000], dtype=torch.float64)  # B10
    logprobs = (-3 - d).requires_grad_()
    kl = kl_penalty(logprobs, torch.full_like(d, -3), estimator)
    close(kl, values)
    close(torch.autograd.grad(kl.sum(), logprobs)[0], gradient)


@each_estimator
def test_kl_is_finite_far_away_and_shows_nan(estimator):
    logprobs = torch.tensor([-101, -1001, -1.0], requires_grad=True)  # B10 in float32: d = 100, 1000, -1000
    kl = kl_penalty(logprobs, torch.tensor([-1, -1, -1001.0]), estimator)
    assert kl.isfinite().all() and torch.autograd.grad(kl.sum(), logprobs)[0].isfinite().all()
    pair = torch.tensor([math.nan, -1]), torch.tensor([-1.0, -1])
    assert kl_penalty(*pair, estimator).isnan().tolist() == [True, False]
    assert kl_penalty(*pair[::-1], estimator).isnan().tolist() == [True, False]


@pytest.mark.parametrize(
    "mode, value, weights",
    [
        ("token-mean", 14 / 8, [1 / 8] * 8),
        ("seq-mean-token-mean", (1 + 1 + 1 + 4 + 4) / 5, [1 / 5, *[1 / 10] * 2, *[1 / 15] * 3, 1 / 5, 1 / 5]),
        ("seq-mean-token-sum", 14 / 5, [1 / 5] * 8),
        ("seq-mean-token-sum-norm", 14 / 5 / 10, [1 / 50] * 8),  # B03: the limit 10, not the longest sequence
    ],
)
@pytest.mark.parametrize("cuts", [[0, 8], [0, 6, 8], [0, 1, 3, 6, 7, 8]])
def test_aggregate_by_hand_in_any_split(mode, value, weights, cuts):
    values = torch.tensor([1, 1, 1, 1, 1, 1, 4, 4], dtype=torch.float64, requires_grad=True)  # B01
    sequence, counts = torch.tensor([0, 1, 1, 2, 2, 2, 3, 4]), dict(num_tokens=8, num_sequences=5, max_length=10)
    parts = [slice(*cut) for cut in zip(cuts, cuts[1:], strict=False)]
    total = sum(aggregate(values[part], sequence[part], mode, **counts) for part in parts)
    close(total, value)
    close(torch.autograd.grad(total, values)[0], weights)


@each_mode
@each_variant
def test_an_empty_micro_batch_gives_zero_with_a_graph(name, mode):
    weight, none = torch.ones((), requires_grad=True), torch.zeros(0)  # B04: such a rank still runs backward
    values, _ = VARIANTS[name](weight * none, none, none, none.long())
    loss = aggregate(values, none.long(), mode, num_tokens=5, num_sequences=2, max_length=10)
    loss.backward()
    assert loss.item() == 0 and weight.grad.item() == 0


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "cispo"])
def test_gradient_of_a_surrogate_matches_finite_differences(name):
    logprobs, *rest = batch()
    assert torch.autograd.gradcheck(lambda x: VARIANTS[name](x, *rest)[0], logprobs)


def test_gradient_of_cispo_matches_finite_differences_with_its_weight_held():
    logprobs, old, advantages, _ = data = batch()
    held = -(logprobs.detach() - old).exp().clamp(0.8, 1.3) * advantages
    differences = (held * (logprobs + 1e-3) - held * (logprobs - 1e-3)) / 2e-3
    close(run(cispo, data, **CLIP)[1], differences.detach())


@each_estimator
@each_mode
def test_gradient_of_aggregated_kl_matches_finite_differences(estimator, mode):
    logprobs, reference, _, sequence = batch()
    counts = dict(num_tokens=20, num_sequences=7, max_length=5)
    assert torch.autograd.gradcheck(
        lambda x: aggregate(kl_penalty(x, reference, estimator), sequence, mode, **counts), logprobs
    )


@each_variant
def test_on_policy_gradient_is_reinforce(name):
    logprobs, _, advantages, sequence = batch()
    close(run(VARIANTS[name], (logprobs, logprobs.detach(), advantages, sequence))[1], -advantages)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo"])
def test_zero_loss_with_a_gradient_is_right(name):
    """B78: on policy the loss is the mean of -A, 0 in a centred group; what trains is the gradient, -A / n.

    A logged loss of 0 is no fault and must not be "repaired".
    """
    data = tokens([1, 1], [1, -1])
    loss = aggregate(VARIANTS[name](*data)[0], data[3], "token-mean", num_tokens=2, num_sequences=2)
    assert loss.item() == 0
    close(torch.autograd.grad(loss, data[0])[0], [-0.5, 0.5])


@pytest.mark.parametrize("tau", [0.1, 1.0, 1.05, 30.0])
def test_sapo_has_slope_one_at_ratio_one(tau):
    close(run(sapo, tokens([1, 1], [3, -3]), tau_pos=tau, tau_neg=tau)[1], [-3, 3])


def test_gspo_of_one_token_turns_is_ppo_clip():
    data = (*batch()[:3], torch.arange(16))
    matches(run(gspo, data, **CLIP), *run(ppo_clip, data, **CLIP))


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "cispo"])
def test_an_infinite_clip_leaves_the_plain_ratio(name):
    logprobs, old, advantages, _ = data = batch()
    log_ratio = logprobs - old
    if name == "gspo":
        log_ratio = torch.cat([turn.mean().expand(len(turn)) for turn in log_ratio.split(LENGTHS)])
    plain = -log_ratio.exp() * advantages
    gradient = torch.autograd.grad(plain.sum(), logprobs)[0]
    values = plain * logprobs if name == "cispo" else plain  # CISPO shares the gradient only
    matches(run(SURROGATES[name], data, clip_low=math.inf, clip_high=math.inf), values, gradient, low=[], high=[])


def test_aggregations_that_coincide():
    values, counts = torch.arange(6.0), dict(num_tokens=6, num_sequences=3, max_length=1)
    mean = {mode: aggregate(values, torch.tensor([0, 0, 1, 1, 2, 2]), mode, **counts) for mode in AGGREGATIONS}
    close(mean["seq-mean-token-mean"], mean["token-mean"])
    close(mean["seq-mean-token-sum-norm"], mean["seq-mean-token-sum"])


def split_gradient(name, mode, pieces, *, shuffled=False, local=False):
    """Gradient added up over micro-batches cut between sequences; local: averaged, each with its own denominators."""
    logprobs, old, advantages, sequence = batch(torch.float32)
    order = torch.arange(16) * 7 % 16 if shuffled else torch.arange(16)
    for ids in torch.arange(6).tensor_split(pieces):
        part = order[torch.isin(sequence[order], ids)]
        own = sequence[part] - ids[0]
        num_tokens, num_sequences = (len(part) * pieces, len(ids) * pieces) if local else (16, 6)
        values, _ = VARIANTS[name](logprobs[part], old[part], advantages[part], own)
        aggregate(values, own, mode, num_tokens=num_tokens, num_sequences=num_sequences, max_length=5).backward()
    return logprobs.grad


@each_mode
@each_variant
def test_gradient_depends_on_neither_split_nor_order(name, mode):
    whole = split_gradient(name, mode, 1)
    for pieces in (1, 2, 5, 6):
        for shuffled in (False, True):
            difference = split_gradient(name, mode, pieces, shuffled=shuffled) - whole
            assert difference.norm() <= 1e-5 * whole.norm()
    assert (split_gradient(name, mode, 5, local=True) - whole).norm() > 0.1 * whole.norm()  # so this test can fail


@each_variant
def test_extreme_log_ratios_stay_finite(name):
    logprobs = torch.tensor([-1, -1001, -1, -1001.0], requires_grad=True)  # log-ratios +-1000 for either sign of A
    data = logprobs, torch.tensor([-1001, -1, -1001, -1.0]), torch.tensor([1, 1, -1, -1.0]), torch.arange(4)
    no_clip = {number: math.inf for number in CLIP if number in VARIANTS[name].keywords}
    for numbers in ({}, no_clip):
        assert all(tensor.isfinite().all() for tensor in run(VARIANTS[name], data, **numbers)[:2])
    assert sequence_mask(*data, delta=0.1).tolist() == [True, True, True, False]


@each_variant
@pytest.mark.parametrize("place", range(3))
def test_nan_stays_visible(name, place):
    data = [-torch.ones(3), -torch.ones(3), torch.tensor([1.0, -1, 0]), torch.arange(3)]
    data[place] = torch.full((3,), math.nan)
    assert VARIANTS[name](*data)[0].isnan().all()
    assert sequence_mask(*data, delta=0.1).all()  # nothing dropped, so the mask hides nothing


@pytest.mark.parametrize("call", [*VARIANTS.values(), partial(sequence_mask, delta=0.1)])
def test_a_wrong_shape_dtype_or_keyword_raises(call):
    right = [torch.ones(3), torch.ones(3), torch.ones(3), torch.arange(3)]
    for place, tensor in enumerate(right):
        for wrong in (tensor[:1], tensor[:, None], tensor[0]):
            with pytest.raises(ValueError, match="shapes"):
                call(*right[:place], wrong, *right[place + 1 :])
    for dtype in (torch.int32, torch.float32):
        with pytest.raises(ValueError, match=str(dtype)):
            call(*right[:3], right[3].to(dtype))
    with pytest.raises(TypeError, match="clip_hihg"):
        call(*right, clip_hihg=0.3)


@pytest.mark.parametrize(
    "call, number, wrong",
    [
        *[(VARIANTS[name], number, (-0.1, math.nan)) for name in ("ppo_clip", "cispo", "gspo") for number in CLIP],
        *[(VARIANTS["sapo"], number, (0, -1, math.nan)) for number in NUMBERS["sapo"]],
        (VARIANTS["ppo_clip"], "dual_clip", (0.5, 1, -3, math.nan)),
        (sequence_mask, "delta", (math.nan,)),
    ],
)
def test_a_number_outside_its_range_raises(call, number, wrong):
    for value in wrong:
        with pytest.raises(ValueError, match=f"{number} {value}"):
            call(torch.ones(3), torch.ones(3), torch.ones(3), torch.arange(3), **{number: value})


def test_wrong_calls_of_kl_and_aggregate_raise():
    values, sequence = torch.ones(3), torch.arange(3)
    for wrong, message in [
        (dict(losses=values[:2]), "shapes"),
        (dict(sequence=sequence.int()), "int32"),
        (dict(mode="token-meen"), "token-meen"),
        (dict(num_tokens=2), "num_tokens 2"),
        (dict(num_sequences=0), "num_sequences 0"),
        (dict(mode="seq-mean-token-sum-norm"), "max_length None"),
        (dict(mode="seq-mean-token-sum-norm", max_length=0), "max_length 0"),
    ]:
        right = dict(losses=values, sequence=sequence, mode="token-mean", num_tokens=3, num_sequences=3)
        with pytest.raises(ValueError, match=message):
            aggregate(**{**right, **wrong})
    with pytest.raises(ValueError, match="k4"):
        kl_penalty(values, values, "k4")
    with pytest.raises(ValueError, match="shapes"):
        kl_penalty(values, values[:, None], "k3")


def test_losses_imports_torch_only():
    nodes = ast.walk(ast.parse(inspect.getsource(losses)))
    imports = [ast.unparse(node).split()[1] for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    assert {name.split(".")[0] for name in imports} == {"torch"}


def test_every_public_function_documents_its_shapes():
    functions = [f for f in vars(losses).values() if inspect.isfunction(f) and not f.__name__.startswith("_")]
    assert set(SURROGATES.values()) < set(functions)
    assert [f.__name__ for f in functions if "[M]" not in (f.__doc__ or "")] == []
