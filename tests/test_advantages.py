"""Advantages against values derived by hand (B-numbers name the fault that a case guards against), and invariances."""

import ast
import dataclasses
import sys
from math import sqrt

import numpy as np
import pytest

import advantages
from advantages import ADVANTAGES, TurnTable, empg, gigpo, group_advantages, grpo, step_returns

HUGE = 2**62  # HUGE and HUGE + 1 are equal as float64
TURN_LOCAL = {"baseline": "turn", "penalty_scope": "turn_local"}
SCOPES = [{"penalty_scope": "turn_sum"}, {"penalty_scope": "episode"}, TURN_LOCAL]
OPTIONS = [{}, {"std": False}, {"baseline": "turn"}, {"penalty": 0.5}, {"penalty_scope": "episode"}, TURN_LOCAL]
every_advantage = pytest.mark.parametrize("name", ADVANTAGES)
with_options = pytest.mark.parametrize("options", OPTIONS, ids=str)


def table(trajectory, **columns):
    """One entry per trajectory id: turns counted in order of appearance, one group, all states different, all valid."""
    n, zeros = len(trajectory), np.zeros(len(trajectory))
    turn = np.array([trajectory[:i].count(trajectory[i]) for i in range(n)], np.int64)
    success, ids = zeros > 0, zeros.astype(np.int64)
    filled = {"group": ids, "trajectory": ids + trajectory, "turn": turn, "state": np.arange(n), "reward": zeros}
    filled |= {"valid": ~success, "success": success, "entropy": zeros}
    return TurnTable(**filled | {name: np.array(column) for name, column in columns.items()})


def reordered(turns, order):
    return TurnTable(**{name: column[order] for name, column in vars(turns).items()})


def mixed():
    """Three groups, the last of one turn; unequal lengths, shared states, invalid turns."""
    return table(
        [0, 0, 0, 1, 2, 2, 3, 3, 4, 5],
        group=[1, 1, 1, 1, 1, 1, 2, 2, 2, 3],
        state=[7, 8, 7, 7, 8, 7, 7, 8, 7, 7],
        reward=[0, 0.5, 1, 0, 0.25, 0, 1, 0, 0, 2],
        valid=[True, False, True, True, False, False, True, True, False, True],
        entropy=[0.1, 0.7, 0.3, 0.9, 0.2, 0.5, 1.3, 0.4, 0.8, 0.6],
    )


def near(values, tolerance=1e-7):
    return pytest.approx(np.array(values), rel=tolerance, abs=tolerance)


def test_std_has_ddof_1_and_eps_outside():
    # B06. Mean .5, squares 4 * .25 = 1: std sqrt(1/3) = .5773503, .5 / .5773513 = .8660239
    assert group_advantages([1, 0, 0, 1], [0] * 4) == near([0.8660239, -0.8660239, -0.8660239, 0.8660239])
    # squares 2 * .25 = .5: std .70710678, .5 / .70710778 = .70710578
    assert group_advantages([1, 0], [0, 0]) == near([0.70710578, -0.70710578], 1e-8)
    # mean 1e-6, std sqrt(2) * 1e-6: 1 / (sqrt(2) + 1)
    assert group_advantages([0, 2e-6], [0, 0]) == near([1 - sqrt(2), sqrt(2) - 1])
    assert group_advantages([1, 0, 5], [0, 0, 0], std=False) == near([-1, -2, 3])


def test_group_of_one_gets_zero_and_never_its_raw_value():
    # B18: one uid per rollout leaves nothing to compare with
    assert group_advantages([1, 0, 1, 0], [0, 1, 2, 3]).tolist() == [0, 0, 0, 0]
    assert group_advantages([3, 1, 0], [5, 6, 6]) == near([0, 0.70710578, -0.70710578])


@pytest.mark.parametrize("std", [True, False])
@pytest.mark.parametrize(
    "values",
    [
        [0.1 + 0.2 + 0.3, 0.6, 0.6, 0.6],  # B28 a: two distinct floats
        np.full(7, 0.7, np.float32),  # b: float32 sums make a std of 6.4e-8
        [0.7, 0.7 + 6e-8, 0.7 - 6e-8],
        [0.5, 0.5, 0.5, 0.5],  # c: mean inside (0, 1)
        [0, 9e-7],
        [1000, 1000.0009],
        [-1000, -1000.0009],
    ],
)
def test_constant_group_gets_exactly_zero(values, std):
    assert not group_advantages(values, [3] * len(values), std=std).any()


@pytest.mark.parametrize("values", [[0, 1.1e-6], [0.5, 0.5000011], [1000, 1000.0011], [-1000, -1000.0011]])
def test_group_just_above_the_tolerance_is_not_constant(values):
    assert group_advantages(values, [3, 3]).all()


def test_step_return_sums_discounted_rewards_from_its_turn_on():
    # B15: 1, 0 + .9 * 1, 0 + .9 * .9; and 1, -.1 + .9 * 1 = .8, .5 + .9 * .8 = 1.22
    assert step_returns([0, 0, 1], [4, 4, 4], [0, 1, 2], 0.9) == near([0.81, 0.9, 1])
    assert step_returns([0.5, -0.1, 1], [4, 4, 4], [0, 1, 2], 0.9) == near([1.22, 0.8, 1])


def test_step_return_with_gamma_0_is_the_reward_and_with_gamma_1_the_sum():
    rewards, trajectories, turns = np.array([1.0, 2, 4, 8]), [0, 0, 0, 1], [0, 1, 2, 0]
    assert step_returns(rewards, trajectories, turns, 0).tolist() == [1, 2, 4, 8]
    assert step_returns(rewards, trajectories, turns, 1).tolist() == [7, 6, 4, 8]


def test_step_return_follows_trajectory_and_turn_and_not_the_order_of_rows():
    # trajectory 9: rewards 1, 2, 4 -> 1 + .5 * 4 = 3, 2 + .5 * 4 = 4, 4; trajectory -3: 8, 16 -> 16, 16
    rewards, trajectories, turns = [4, 16, 1, 8, 2], [9, -3, 9, -3, 9], [2, 1, 0, 0, 1]
    assert step_returns(rewards, trajectories, turns, 0.5).tolist() == [4, 16, 3, 16, 4]
    # turn 1 is missing: two steps of .5 lie between
    assert step_returns([4, 1], [9, 9], [2, 0], 0.5).tolist() == [4, 2]


def test_long_trajectories_count_once_in_the_baseline():
    turns = table([0, 0, 0, 1], reward=[0, 0, 1, 0])  # B42: R = 1 in three turns, R = 0 in one
    assert grpo(turns, std=False) == near([0.5, 0.5, 0.5, -0.5])
    assert grpo(turns) == near([0.70710578] * 3 + [-0.70710578])
    # per row: mean .75
    assert grpo(turns, std=False, baseline="turn") == near([0.25, 0.25, 0.25, -0.75])


def test_turn_baseline_weighs_long_trajectories_more():
    lengths = [10] * 4 + [50] * 4
    trajectory = np.repeat(np.arange(8), lengths).tolist()
    turns = table(trajectory, reward=np.concatenate([[0.0] * (n - 1) + [10.0 * (n == 10)] for n in lengths]))
    # rows: p = 40/240 are 10. Mean 10/6, std 10 * sqrt(5/36 * 240/239) = 3.7346: 8.3333 / 3.7346, -1.6667 / 3.7346
    assert grpo(turns, baseline="turn") == near([2.2314] * 40 + [-0.4463] * 200, 1e-4)
    # trajectories: mean 5, std sqrt(8 * 25 / 7) = 5.3452
    assert grpo(turns) == near([0.93541] * 40 + [-0.93541] * 200, 1e-5)


@pytest.mark.parametrize("baseline", ["trajectory", "turn"])
def test_groups_are_found_by_id_and_not_by_position(baseline):
    tiled = table([0, 1, 2, 3], group=[5, 6, 5, 6], reward=[1, 1, 0, 1])  # B74: A = 1, 0; B = 1, 1
    assert grpo(tiled, baseline=baseline) == near([0.70710578, 0, -0.70710578, 0])
    assert grpo(reordered(tiled, [0, 2, 1, 3]), baseline=baseline) == near([0.70710578, -0.70710578, 0, 0])


def test_anchor_is_the_state_within_its_group():
    turns = table([0, 1, 2, 3], group=[1, 1, 2, 2], state=[9] * 4, reward=[1, 0, 0, 0])  # B16
    # grpo and step agree, as every trajectory has one turn
    assert gigpo(turns, std=False) == near([1, -1, 0, 0])
    assert gigpo(turns) == near([1.41421156, -1.41421156, 0, 0])


def test_two_visits_by_one_trajectory_are_two_members_and_a_single_visit_gets_zero():
    turns = table([0, 0, 1, 1], state=[9, 9, 9, 4], reward=[0.2, 1.8, -1, 1])
    # returns 2, 1.8, 0 in state 9: mean 3.8 / 3 = 1.266667. Both trajectories: R = 2, 0, mean 1
    assert gigpo(turns, gamma=1, std=False) == near([1.733333, 1.533333, -2.266667, -1], 1e-6)


def test_gamma_discounts_and_omega_scales_the_step_term():
    turns = table([0, 0, 1], state=[9, 4, 9], reward=[0, 1, 0])
    # state 9: gamma and 0, hence +-gamma / 2; state 4 once; grpo +-.5; defaults .95 and 1
    assert gigpo(turns, std=False) == near([0.975, 0.5, -0.975])
    assert gigpo(turns, std=False, gamma=0.5, omega=2) == near([1, 0.5, -1])


@pytest.mark.parametrize(
    ("options", "episode", "both"),
    [
        # R = .8, 0: +-.4. Returns 0 + .5 * .3, -.2 + .5 * 1, 1: means .225 and .5
        ({"penalty_scope": "turn_sum"}, [0.4, 0.4, 0.4, -0.4], [0.325, 0.475, 0.9, -0.9]),
        # rows .8, .8, .8, 0: mean .6
        ({"penalty_scope": "turn_sum", "baseline": "turn"}, [0.2, 0.2, 0.2, -0.6], [0.125, 0.275, 0.7, -1.1]),
        # R = .8, 0. The last reward is .8: returns .2, .4, .8, means .3 and .4
        ({"penalty_scope": "episode"}, [0.4, 0.4, 0.4, -0.4], [0.3, 0.5, 0.8, -0.8]),
        # rows 1, .8, 1, 0: mean .7. Returns .25, .5 - .2, 1: means .275 and .5
        (TURN_LOCAL, [0.3, 0.1, 0.3, -0.7], [0.275, 0.125, 0.8, -1.2]),
    ],
)
def test_penalty_of_one_invalid_turn(options, episode, both):
    turns = table([0, 0, 0, 1], state=[5, 5, 6, 6], reward=[0, 0, 1, 0], valid=[True, False, True, True])
    assert grpo(turns, std=False, penalty=0.2, **options) == near(episode)
    assert gigpo(turns, std=False, penalty=0.2, gamma=0.5, **options) == near(both)


def test_episode_penalty_is_once_and_turn_sum_once_per_invalid_turn():
    turns = table([0, 0, 0, 1], state=[5, 5, 6, 6], reward=[0, 0, 1, 0], valid=[False, False, True, True])
    numbers = {"std": False, "penalty": 0.2}
    assert grpo(turns, **numbers, penalty_scope="episode") == near([0.4, 0.4, 0.4, -0.4])
    assert gigpo(turns, **numbers, gamma=0.5, penalty_scope="episode") == near([0.3, 0.5, 0.8, -0.8])
    # R = .6, 0. Returns -.2 + .5 * .3 = -.05, .3, 1: means .125 and .5
    assert grpo(turns, **numbers) == near([0.3, 0.3, 0.3, -0.3])
    assert gigpo(turns, **numbers, gamma=0.5) == near([0.125, 0.475, 0.8, -0.8])
    # defaults: turn_sum of .1, R = .8, 0
    assert grpo(turns, std=False) == near([0.4, 0.4, 0.4, -0.4])


@every_advantage
@pytest.mark.parametrize("options", SCOPES, ids=str)
def test_failed_group_with_one_invalid_response_moves_against_the_offender(name, options):
    numbers = options | {"omega": 0} if name == "gigpo" else options | {"zeta": 0} if name == "empg" else options
    turns = table([0, 0, 1, 1, 2, 2], valid=[True, True, False, True, True, True])
    result = ADVANTAGES[name](turns, **numbers)
    # one of n values is -.1: distance .1 (n - 1) / n, std .1 / sqrt(n); n = 3 trajectories or 6 rows
    n = 6 if options is TURN_LOCAL else 3
    offender, others = -(n - 1) / sqrt(n), 1 / sqrt(n)
    teammate = others if options is TURN_LOCAL else offender
    assert result == near([others, others, offender, teammate, others, others], 1e-4)
    assert not ADVANTAGES[name](turns, penalty=0, **numbers).any()


def test_one_invalid_turn_among_400_gets_minus_20():
    turns = table([0] * 100 + [1] * 300, valid=np.arange(400) != 150)
    # -(n - 1) / sqrt(n) = -19.95 as above; the std is .1 / 20 = .005, so that eps takes another 2e-4 of it
    result = grpo(turns, **TURN_LOCAL)
    assert result[150] == pytest.approx(-19.95 / 1.0002, rel=1e-7)
    assert np.delete(result, 150) == near([0.05 / 1.0002] * 399)


def test_sure_turns_weigh_more():
    # B32: weights 1, .60653066, .36787944 with mean .65813670. A = 1, 0, -1: 1.51944117, 0, -.55897117, mean .32015667
    turns = table([0, 1, 2], reward=[1, 0, -1], entropy=[0, 0.5, 1])
    assert empg(turns, std=False) == near([1.19928450, -0.32015667, -0.87912784])
    assert empg(reordered(turns, [2, 0, 1]), std=False) == near([-0.87912784, 1.19928450, -0.32015667])


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 2, 0, 3], [0, 2, 3, 1]], ids=str)
def test_bonus_follows_the_next_turn_and_not_the_next_row(order):
    def result(entropy, **numbers):
        turns = reordered(table([0, 0, 1, 1], reward=[0, 1, 0, -1], entropy=entropy), order)  # B76: A = 1, 1, -1, -1
        return empg(turns, std=False, **numbers)[np.argsort(order)]

    # weights 1, bonus .05 on both first turns, mean .025
    assert result([0.7] * 4) == near([1.025, 0.975, -0.975, -1.025])
    # weights 1, .36787944, .60653066 twice, mean .64523521: 1.54982247, .57014705, -.94001554 twice; bonus .05 * .36787944
    # and .05 * .60653066: 1.56821644, .57014705, -.90968901, -.94001554, mean .07216474
    assert result([0, 1, 0.5, 0.5]) == near([1.49605170, 0.49798231, -0.98185375, -1.01218028], 2e-6)
    # weights 1, bonus exp(-2) = .13533528 and exp(-1) = .36787944, mean .12580368
    expected = [1.00953160, 0.87419632, -0.75792424, -1.12580368]
    assert result([0, 1, 0.5, 0.5], k=0, zeta=1, k_next=2) == near(expected)


def test_entropies_equal_up_to_noise_are_equal():
    turns = table([0, 0, 1, 1], reward=[0, 1, 0, -1])
    noisy = dataclasses.replace(turns, entropy=np.array([0, 1e-17, 1e-17, 0]))
    assert empg(noisy, std=False) == near([1.025, 0.975, -0.975, -1.025])


@with_options
def test_gigpo_and_empg_without_their_terms_are_grpo(options):
    expected = grpo(mixed(), **options)
    assert gigpo(mixed(), omega=0, **options) == near(expected, 1e-12)
    assert empg(mixed(), k=0, zeta=0, **options) == near(expected - expected.mean(), 1e-12)


def test_same_bonus_at_the_end_of_every_trajectory_changes_nothing():
    turns, last = mixed(), np.array([0, 0, 1, 1, 0, 1, 0, 1, 1, 1])
    shifted = dataclasses.replace(turns, reward=turns.reward + 3 * last)
    assert grpo(shifted) == near(grpo(turns), 1e-9)


@pytest.mark.parametrize("name", ["grpo", "gigpo"])
def test_scale_of_rewards_matters_without_std_only(name):
    turns, advantage = mixed(), ADVANTAGES[name]
    scaled = dataclasses.replace(turns, reward=8 * turns.reward)
    assert advantage(scaled, penalty=0.8) == near(advantage(turns, penalty=0.1), 1e-4)
    assert advantage(scaled, penalty=0.8, std=False) == near(8 * advantage(turns, penalty=0.1, std=False), 1e-9)


@every_advantage
@with_options
def test_order_of_rows_and_names_of_ids_do_not_matter(name, options):
    turns, order = mixed(), np.random.default_rng(0).permutation(10)
    expected = ADVANTAGES[name](turns, **options)
    assert len(np.unique(expected.round(6))) > 5
    assert ADVANTAGES[name](reordered(turns, order), **options) == near(expected[order], 1e-9)
    renamed = dataclasses.replace(
        turns,
        group=np.array([0, HUGE + 1, HUGE, -5])[turns.group],
        trajectory=np.array([HUGE, -7, HUGE + 1, -HUGE - 1, 0, -HUGE])[turns.trajectory],
        state=np.array([HUGE + 1, HUGE])[turns.state - 7],
    )
    assert ADVANTAGES[name](renamed, **options) == near(expected, 1e-9)


@pytest.mark.parametrize("name", ["grpo", "gigpo"])
def test_groups_are_independent(name):
    turns, second = mixed(), mixed().group == 2
    before = ADVANTAGES[name](turns)
    after = ADVANTAGES[name](dataclasses.replace(turns, reward=turns.reward * np.where(second, -9, 1)))
    assert after[~second] == near(before[~second], 1e-12)
    assert np.abs(after - before)[second].min() > 0.1


@every_advantage
@with_options
def test_nothing_to_compare_gives_finite_zeros(name, options):
    numbers = options | {"zeta": 0} if name == "empg" else options
    single, constant = table([4], reward=[3.0]), table([0, 1, 2], reward=[3.0] * 3, state=[7] * 3)
    assert ADVANTAGES[name](table([]), **options).shape == (0,)
    assert ADVANTAGES[name](single, **options).tolist() == [0]
    assert ADVANTAGES[name](constant, **numbers).tolist() == [0, 0, 0]
    assert np.isfinite(ADVANTAGES[name](mixed(), **options)).all()


@pytest.mark.parametrize(
    "columns",
    [
        {"reward": [0.0, 1]},
        {"turn": [0, 0, 0]},
        {"reward": [0, np.nan, 0]},
        {"entropy": [0, np.inf, 0]},
        dict.fromkeys(["group", "trajectory", "turn", "state", "reward", "valid", "success", "entropy"], [[0], [1], [2]]),
    ],
    ids=["shape", "duplicate", "nan", "inf", "two axes"],
)
def test_bad_columns_raise(columns):
    with pytest.raises(ValueError, match="allowed"):
        table([0, 0, 1], **columns)


@every_advantage
def test_bad_choices_raise(name):
    for options in ({"baseline": "step"}, {"penalty_scope": "local"}, {"penalty_scope": "turn_local"}):
        with pytest.raises(ValueError, match="allowed"):
            ADVANTAGES[name](mixed(), **options)
    with pytest.raises(TypeError, match="gama"):
        ADVANTAGES[name](mixed(), gama=0.9)
    with pytest.raises(ValueError, match="allowed"):
        group_advantages([1.0, 2], [0])


def test_advantages_imports_numpy_only():
    with open(advantages.__file__) as source:
        nodes = list(ast.walk(ast.parse(source.read())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert names | {node.module for node in nodes if isinstance(node, ast.ImportFrom)} == {"dataclasses", "numpy"}


@every_advantage
def test_python_steps_do_not_grow_with_the_number_of_rows(name):
    def steps(trajectories):
        turns = table(np.repeat(np.arange(trajectories), 3).tolist(), reward=np.arange(3.0 * trajectories))
        count, before = 0, sys.gettrace()

        def trace(frame, event, arg):
            nonlocal count
            count += frame.f_code.co_filename == advantages.__file__
            return trace

        sys.settrace(trace)
        try:
            ADVANTAGES[name](dataclasses.replace(turns), penalty_scope="episode")
        finally:
            sys.settrace(before)
        return count

    assert 10 < steps(2) == steps(200)
