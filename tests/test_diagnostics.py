"""Diagnostics: every number of a hand-made batch by hand, sums over any split, and the collapse monitor."""

import math
from types import SimpleNamespace

import pytest
import torch

from diagnostics import (
    COLLAPSE_SIGNS,
    PARTS,
    collapse_signs,
    collapse_warning,
    engine_gap,
    outside,
    partition,
    sampling_metrics,
    token_sums,
    update_metrics,
)
from rollout import Trajectory, Turn

THRESHOLD = 0.4

# Four sequences of 1, 2, 3 and 2 tokens: advantage, entropy of each token, log-ratio of each token, KL distance d.
ADVANTAGES = [-1.0, 2.0, -0.5, 0.0]
LENGTHS = [1, 2, 3, 2]
LOG_RATIOS = [math.log(0.7), math.log(1.3), 0.0, math.log(0.5), math.log(1.5), math.log(1.4), 0.0, 0.0]
ENTROPY = [0.1, 0.3, 0.6, 0.9, 0.1, 0.1, 0.5, 0.5]
D = [1.0, -1.0, 0.0, 1.0, 0.0, 2.0, 0.0, 0.0]  # ref_logprobs - logprobs


def k3(d):
    return math.exp(d) - 1 - d


def make_pack(select=range(4), old=-1.0):
    """The sequences in `select` as (logprobs, pack)."""
    starts = [sum(LENGTHS[:i]) for i in range(4)]
    at = [starts[i] + j for i in select for j in range(LENGTHS[i])]
    old_logprobs = torch.full((len(at),), old)
    logprobs = old_logprobs + torch.tensor([LOG_RATIOS[t] for t in at])
    pack = SimpleNamespace(
        old_logprobs=old_logprobs,
        ref_logprobs=logprobs + torch.tensor([D[t] for t in at]),
        entropy=torch.tensor([ENTROPY[t] for t in at]),
        advantages=torch.tensor([ADVANTAGES[i] for i in select for _ in range(LENGTHS[i])]),
        sequence=torch.tensor([i for i in select for _ in range(LENGTHS[i])]),
    )
    return logprobs, pack


def sums_of(select=range(4), clipped=None):
    logprobs, pack = make_pack(select)
    nothing = torch.zeros(len(logprobs), dtype=torch.bool)
    return token_sums(
        logprobs, pack, clipped or {"clipped_low": nothing, "clipped_high": nothing}, ~nothing, THRESHOLD
    )


def test_tokens_outside_the_band_are_split_by_the_sign_of_the_advantage():
    # .7 < .8 with A < 0: low. 1.3 > 1.2 with A > 0: high. .5 with A < 0: low. 1.5 and 1.4 with A < 0: neither side,
    # PPO would not stop them. 1 with A = 0: neither.
    logprobs, pack = make_pack()
    low, high = outside(logprobs, pack.old_logprobs, pack.advantages)
    assert low.tolist() == [True, False, False, True, False, False, False, False]
    assert high.tolist() == [False, True, False, False, False, False, False, False]


@pytest.mark.parametrize(("ratio", "low"), [(0.79, True), (0.81, False)])
def test_the_band_ends_at_four_fifths(ratio, low):
    found, _ = outside(torch.tensor([math.log(ratio)]), torch.zeros(1), torch.tensor([-1.0]))
    assert found.item() == low


@pytest.mark.parametrize(("ratio", "high"), [(1.19, False), (1.21, True)])
def test_the_band_ends_at_six_fifths(ratio, high):
    _, found = outside(torch.tensor([math.log(ratio)]), torch.zeros(1), torch.tensor([1.0]))
    assert found.item() == high


def test_an_enormous_ratio_is_outside_and_finite():
    low, high = outside(torch.tensor([-1000.0, 1000.0]), torch.zeros(2), torch.tensor([-1.0, 1.0]))
    assert low.tolist() == [True, False] and high.tolist() == [False, True]


def test_a_sequence_has_one_part_by_advantage_ratio_and_entropy():
    # 0: A < 0, ratio .7, entropy .1                                              -> neg down sure      0
    # 1: A > 0, mean log-ratio (ln 1.3 + 0) / 2 > 0, entropy (.3 + .6) / 2 = .45  -> pos up unsure      7
    # 2: A < 0, (ln .5 + ln 1.5 + ln 1.4) / 3 = ln 1.05 / 3 > 0, entropy 1.1 / 3  -> neg up sure        2
    # 3: A = 0 counts as neg, ratio 1 as down, entropy .5                         -> neg down unsure    1
    logprobs, pack = make_pack()
    part = partition(logprobs, pack.old_logprobs, pack.advantages, pack.sequence, pack.entropy, THRESHOLD)
    assert part.tolist() == [0, 7, 7, 2, 2, 2, 1, 1]
    assert [PARTS[i] for i in (0, 7, 2, 1)] == ["neg_down_sure", "pos_up_unsure", "neg_up_sure", "neg_down_unsure"]
    assert len(set(PARTS)) == 8


def test_metrics_of_an_update_by_hand():
    found = update_metrics([sums_of()], [8])
    # k3 by token: k3(1), k3(-1), 0, k3(1), 0, k3(2), 0, 0
    total = 2 * k3(1) + k3(-1) + k3(2)
    assert found["kl_ref"] == pytest.approx(total / 8)
    # mean of old - new = -mean log-ratio = -(ln .7 + ln 1.3 + ln .5 + ln 1.5 + ln 1.4) / 8 = -ln(.95550) / 8
    assert found["kl_old"] == pytest.approx(-math.log(0.7 * 1.3 * 0.5 * 1.5 * 1.4) / 8, abs=1e-7)
    assert (found["outside_low"], found["outside_high"]) == (2 / 8, 1 / 8)
    shares = {part: found[f"share/{part}"] for part in PARTS if found[f"share/{part}"]}
    assert shares == {"neg_down_sure": 1 / 8, "pos_up_unsure": 2 / 8, "neg_up_sure": 3 / 8, "neg_down_unsure": 2 / 8}
    assert found["kl_share/neg_down_sure"] == pytest.approx(k3(1) / total)
    assert found["kl_share/pos_up_unsure"] == pytest.approx(k3(-1) / total)
    assert found["kl_share/neg_up_sure"] == pytest.approx((k3(1) + k3(2)) / total)
    assert found["kl_share/neg_down_unsure"] == 0  # it has tokens, and none of the KL
    assert all(found[f"kl_share/{part}"] == 0 for part in PARTS if part not in shares)  # empty parts
    assert sum(found[f"kl_share/{part}"] for part in PARTS) == pytest.approx(1)


def test_shares_are_0_while_the_policy_is_the_reference():
    logprobs, pack = make_pack()
    pack.ref_logprobs = logprobs
    nothing = torch.zeros(8, dtype=torch.bool)
    sums = token_sums(logprobs, pack, {"clipped_low": nothing, "clipped_high": nothing}, ~nothing, THRESHOLD)
    found = update_metrics([sums], [8])
    assert all(found[f"kl_share/{part}"] == 0 for part in PARTS) and found["kl_ref"] == 0
    assert sum(found[f"share/{part}"] for part in PARTS) == 1


def test_sums_of_micro_batches_add_up_to_those_of_the_batch():
    whole, parts = sums_of(), [sums_of([2]), sums_of([0, 3]), sums_of([1])]
    for name, value in whole.items():
        assert torch.allclose(sum(part[name] for part in parts), value), name


def test_an_update_weighs_by_its_tokens_and_the_last_one_is_told_apart():
    # updates of 3 and 5 tokens: (sums of both) / 8; the last one alone is sequences 2 and 3, five tokens
    found = update_metrics([sums_of([0, 1]), sums_of([2, 3])], [3, 5])
    assert found["kl_ref"] == pytest.approx(update_metrics([sums_of()], [8])["kl_ref"])
    assert found["kl_old_last"] == pytest.approx(-math.log(0.5 * 1.5 * 1.4) / 5, abs=1e-7)
    assert found["staleness"] == 1
    assert update_metrics([sums_of()], [8])["staleness"] == 0


def test_clipped_and_masked_tokens_are_counted():
    logprobs, pack = make_pack()
    low = torch.tensor([1, 0, 0, 1, 0, 0, 0, 0], dtype=torch.bool)
    high = torch.tensor([0, 1, 0, 0, 0, 0, 0, 0], dtype=torch.bool)
    keep = torch.tensor([0, 1, 1, 0, 0, 0, 1, 1], dtype=torch.bool)  # sequences 0 and 2 are masked: four tokens
    sums = token_sums(logprobs, pack, {"clipped_low": low, "clipped_high": high}, keep, THRESHOLD)
    found = update_metrics([sums], [8])
    assert (found["clip_frac_low"], found["clip_frac_high"], found["clip_frac"]) == (2 / 8, 1 / 8, 3 / 8)
    assert found["masked_frac"] == 4 / 8
    # the released code leaves masked tokens out of its KL; here they stay, and they are the ones that drifted
    assert found["kl_ref"] == pytest.approx(update_metrics([sums_of()], [8])["kl_ref"])


def test_no_gradient_is_kept():
    logprobs, pack = make_pack()
    nothing = torch.zeros(8, dtype=torch.bool)
    clipped = {"clipped_low": nothing, "clipped_high": nothing}
    sums = token_sums(logprobs.requires_grad_(), pack, clipped, ~nothing, THRESHOLD)
    assert not any(value.requires_grad for value in sums.values())


def test_the_gap_between_engine_and_trainer():
    # gaps .25, -.5 in one pack and 0 in another: mean of |gap| .75 / 3, largest .5, k1 -.25 / 3
    # weights exp(-gap) .78, 1.65, 1: of these one is above 1.5, two are above .9
    packs = [
        SimpleNamespace(rollout_logprobs=torch.tensor([-1.5, -2.0]), old_logprobs=torch.tensor([-1.75, -1.5])),
        SimpleNamespace(rollout_logprobs=torch.tensor([-3.0]), old_logprobs=torch.tensor([-3.0])),
    ]
    gaps = {"gap/mean": 0.25, "gap/max": 0.5, "gap/k1": -0.25 / 3}
    for cap, capped in ((0.0, 0), (1.5, 1 / 3), (0.9, 2 / 3)):
        assert engine_gap(packs, cap) == pytest.approx(gaps | {"gap/capped": capped})


def turn(length=2, valid=True, admissible=True, text="a"):
    return Turn([1], [2] * length, [0.0] * length, text, 0, "up", valid, admissible, -0.1)


def test_rates_over_all_sampled_groups_by_hand():
    # group 0: a win of 1 turn, a loss of 3 turns (its second response is invalid, its third inadmissible), a crash.
    # group 1: two losses of 1 turn that say the same, one cut by the limit of turns.
    groups = [
        [
            Trajectory("t", [turn(4, text="x")], success=True, score=3.0),
            Trajectory("t", [turn(), turn(valid=False), turn(admissible=False)], score=1.0),
            Trajectory("t", [turn()] * 5, error="crash"),
        ],
        [Trajectory("u", [turn(6)], truncated=True), Trajectory("u", [turn(6)])],
    ]
    found = sampling_metrics(groups)
    assert (found["train/success"], found["train/score"], found["episodes"]) == (1 / 4, (3 + 1) / 4, 4)
    assert found["train/reward"] == pytest.approx(-0.1 * (1 + 3 + 1 + 1) / 4)
    assert (found["train/turns"], found["train/all_pass"], found["train/all_fail"]) == (6 / 4, 0, 1 / 2)
    assert (found["format_valid"], found["admissible"]) == (5 / 6, 4 / 5)  # of the 5 valid turns 4 are admissible
    assert (found["response_length"], found["response_length_max"]) == ((4 + 3 * 2 + 2 * 6) / 6, 6)
    assert found["sampled_tokens"] == 4 + 3 * 2 + 2 * 6
    assert (found["truncated"], found["duplicates"]) == (1 / 4, (0 + 1 / 2) / 2)


def history(**columns):
    """Metrics of steps 0.. from columns of equal length."""
    quiet = {"outside_low": 0.004, "outside_high": 0.002, "format_valid": 0.9, "grad_norm": 0.5}
    length = len(next(iter(columns.values())))
    return [{"step": 0}] + [
        {"step": i + 1} | quiet | {name: values[i] for name, values in columns.items()} for i in range(length)
    ]


def signs(**columns):
    found = collapse_signs(history(**columns))
    assert set(found) == {f"collapse/{sign}" for sign in COLLAPSE_SIGNS}
    return [sign for sign in COLLAPSE_SIGNS if found[f"collapse/{sign}"]]


def test_a_quiet_run_has_no_sign_of_collapse_and_neither_has_its_start():
    assert signs(outside_low=[0.004] * 12) == []
    assert collapse_signs([{"step": 0}]) == dict.fromkeys((f"collapse/{sign}" for sign in COLLAPSE_SIGNS), 0)


def test_negative_tokens_of_low_ratio_are_named():
    assert signs(outside_low=[0.041]) == ["low_side"]  # from the first step on
    assert signs(outside_low=[0.039]) == []
    assert signs(outside_low=[0.004, 0.004, 0.06]) == []  # one odd step: the median of the last three is .004
    assert signs(outside_low=[0.004, 0.004, 0.06, 0.05]) == ["low_side"]  # .05
    assert signs(outside_low=[0.05], outside_high=[0.026]) == []  # nearly as many on the other side: no imbalance
    assert signs(outside_low=[0.05], outside_high=[0.024]) == ["low_side"]


def test_a_falling_format_is_named():
    # best median of three: .95; the last three's is .84, a fall of .11; with .86 instead .09
    good = [0.9, 0.95, 0.95, 0.95, 0.95, 0.95]
    assert signs(format_valid=[*good, 0.84, 0.78]) == ["format"]
    assert signs(format_valid=[*good, 0.86, 0.78]) == []
    assert signs(format_valid=[*good, 0.5]) == []  # one odd step


def test_a_growing_gradient_is_named():
    # median of the steps before: .5; median of the last three 2.6 > 2.5, and 2.4 < 2.5
    calm = [0.4, 0.5, 0.5, 0.6]
    assert signs(grad_norm=[*calm, 2.7, 1.0, 2.6]) == ["grad_norm"]
    assert signs(grad_norm=[*calm, 2.7, 1.0, 2.4]) == []
    assert signs(grad_norm=[*calm, 0.5, 0.5, 30.0]) == []
    # an outlier before does not hide it: the median of .4, 9, .5 is .5, their mean 3.3
    assert signs(grad_norm=[0.4, 9.0, 0.5, 2.7, 2.7, 2.7]) == ["grad_norm"]
    assert signs(grad_norm=[0.5, 0.5, 2.7, 2.7, 2.7]) == []  # step 5


def test_steps_without_an_update_are_left_out():
    columns = {"grad_norm": [0.5, None, 0.5, 0.5, float("nan"), 3.0, 3.0, 3.0], "outside_low": [None] * 8}
    assert signs(**columns) == ["grad_norm"]


def test_a_sign_is_named_once_with_its_numbers():
    steps = history(outside_low=[0.004, 0.101, 0.052], outside_high=[0.002, 0.013, 0.012])
    said = []
    for i in range(1, 5):
        steps[i - 1] |= collapse_signs(steps[:i])
        said.append(collapse_warning(steps[:i]))
    # medians: .004; (.004 + .101) / 2 = .0525 against .0075; .052 against .012, and no news
    assert said == ["", "", "step 2: signs of collapse: low_side (outside_low 0.101, outside_high 0.013)", ""]
