"""Advantages against values derived by hand (B-numbers name the fault that a case guards against), and invariances."""

import ast
import sys
from dataclasses import replace
from math import sqrt

import numpy as np
import pytest

import advantages
from advantages import ADVANTAGES, TurnTable, empg, gigpo, group_advantages, grpo, step_returns


def table(trajectory, **columns):
    """One entry per trajectory id: turns counted in order of appearance, one group, different states, all valid."""
    zeros = np.zeros(len(trajectory))
    turn = np.array([trajectory[:i].count(trajectory[i]) for i in range(len(trajectory))], np.int64)
    filled = {"group": 0 * turn, "trajectory": 0 * turn + trajectory, "turn": turn, "state": np.arange(len(turn))}
    filled |= {"reward": zeros, "valid": zeros == 0, "success": zeros > 0, "entropy": zeros}
    return TurnTable(**filled | {name: np.array(column) for name, column in columns.items()})


def reordered(turns, order):
    return TurnTable(**{name: column[order] for name, column in vars(turns).items()})


def near(values, tolerance=1e-7):
    return pytest.approx(np.array(values), rel=tolerance, abs=tolerance)


MIXED = table(
    [0, 0, 0, 1, 2, 2, 3, 3, 4, 5],
    group=[1, 1, 1, 1, 1, 1, 2, 2, 2, 3],
    state=[7, 8, 7, 7, 8, 7, 7, 8, 7, 7],
    reward=[0, 0.5, 1, 0, 0.25, 0, 1, 0, 0, 2],
    valid=[True, False, True, True, False, False, True, True, False, True],
    entropy=[0.1, 0.7, 0.3, 0.9, 0.2, 0.5, 1.3, 0.4, 0.8, 0.6],
)
LOCAL = {"baseline": "turn", "penalty_scope": "turn_local"}
OPTIONS = [{}, {"std": False}, {"baseline": "turn"}, {"penalty": 0.5}, {"penalty_scope": "episode"}, LOCAL]
every_advantage = pytest.mark.parametrize("name", ADVANTAGES)
with_options = pytest.mark.parametrize("options", OPTIONS, ids=str)


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
def test_constant_group_gets_exactly_zero(std):
    # B28: two distinct floats; float32 sums with a std of 6.4e-8; float32 noise; a mean inside (0, 1)
    noise = [0.7, 0.7 + 6e-8, 0.7 - 6e-8]
    for values in ([0.1 + 0.2 + 0.3, 0.6, 0.6, 0.6], np.full(7, 0.7, np.float32), noise, [0.5] * 4):
        assert not group_advantages(values, [3] * len(values), std=std).any()
    for largest in (0, 0.5, -0.5, 1000, -1000):
        tolerance = 1e-6 * max(1, abs(largest))
        assert not group_advantages([largest, largest - 0.9 * tolerance], [3, 3], std=std).any()
        assert group_advantages([largest, largest - 1.1 * tolerance], [3, 3], std=std).all()


def test_step_return_sums_discounted_rewards_from_its_turn_on():
    # B15: 1, 0 + .9 * 1, 0 + .9 * .9; and 1, -.1 + .9 * 1 = .8, .5 + .9 * .8 = 1.22
    assert step_returns([0, 0, 1], [4, 4, 4], [0, 1, 2], 0.9) == near([0.81, 0.9, 1])
    assert step_returns([0.5, -0.1, 1], [4, 4, 4], [0, 1, 2], 0.9) == near([1.22, 0.8, 1])
    # gamma 0 is the reward, gamma 1 the sum
    assert step_returns([1, 2, 4, 8], [0, 0, 0, 1], [0, 1, 2, 0], 0).tolist() == [1, 2, 4, 8]
    assert step_returns([1, 2, 4, 8], [0, 0, 0, 1], [0, 1, 2, 0], 1).tolist() == [7, 6, 4, 8]
    # rows in any order. Trajectory 9: 1, 2, 4 give 1 + .5 * 4 = 3, 2 + .5 * 4 = 4, 4; trajectory -3: 8, 16 give 16, 16
    assert step_returns([4, 16, 1, 8, 2], [9, -3, 9, -3, 9], [2, 1, 0, 0, 1], 0.5).tolist() == [4, 16, 3, 16, 4]
    # turn 1 is missing: 1 + .5^2 * 4
    assert step_returns([4, 1], [9, 9], [2, 0], 0.5).tolist() == [4, 2]


def test_long_trajectories_count_once_in_the_baseline():
    turns = table([0, 0, 0, 1], reward=[0, 0, 1, 0])  # B42: R = 1 in three turns, R = 0 in one
    assert grpo(turns, std=False) == near([0.5, 0.5, 0.5, -0.5])
    assert grpo(turns) == near([0.70710578] * 3 + [-0.70710578])
    # by rows the mean is .75
    assert grpo(turns, std=False, baseline="turn") == near([0.25, 0.25, 0.25, -0.75])


def test_turn_baseline_weighs_long_trajectories_more():
    reward = np.zeros(240)
    reward[9:40:10] = 10  # the last turns of four wins of 10 turns; then four losses of 50
    turns = table(np.repeat(np.arange(8), [10] * 4 + [50] * 4).tolist(), reward=reward)
    # 40 of 240 rows: mean 10/6, std 10 * sqrt(5/36 * 240/239) = 3.7346; 8.3333 / 3.7346 and -1.6667 / 3.7346
    assert grpo(turns, baseline="turn") == near([2.2314] * 40 + [-0.4463] * 200, 1e-4)
    # 4 of 8 trajectories: mean 5, std sqrt(8 * 25 / 7) = 5.3452
    assert grpo(turns) == near([0.93541] * 40 + [-0.93541] * 200, 1e-5)


@pytest.mark.parametrize("baseline", ["trajectory", "turn"])
def test_groups_are_found_by_id_and_not_by_position(baseline):
    tiled = table([0, 1, 2, 3], group=[5, 6, 5, 6], reward=[1, 1, 0, 1])  # B74: one prompt has 1, 0, the other 1, 1
    assert grpo(tiled, baseline=baseline) == near([0.70710578, 0, -0.70710578, 0])
    assert grpo(reordered(tiled, [0, 2, 1, 3]), baseline=baseline) == near([0.70710578, -0.70710578, 0, 0])


def test_anchor_is_the_state_within_its_group_and_every_visit_counts():
    # B16. With one turn each, episode and step term are equal: twice +-.5, twice +-.70710578
    turns = table([0, 1, 2, 3], group=[1, 1, 2, 2], state=[9] * 4, reward=[1, 0, 0, 0])
    assert gigpo(turns, std=False) == near([1, -1, 0, 0])
    assert gigpo(turns) == near([1.41421156, -1.41421156, 0, 0])
    # state 9, twice in one trajectory: returns 2, 1.8, 0, mean 1.266667, step .733333, .533333, -1.266667;
    # state 4: one visit, step 0; R = 2, 0: +-1
    turns = table([0, 0, 1, 1], state=[9, 9, 9, 4], reward=[0.2, 1.8, -1, 1])
    assert gigpo(turns, gamma=1, std=False) == near([1.733333, 1.533333, -2.266667, -1], 1e-6)


def test_gamma_discounts_and_omega_scales_the_step_term():
    turns = table([0, 0, 1], state=[9, 4, 9], reward=[0, 1, 0])
    # state 9: returns gamma and 0, step +-gamma / 2; state 4: one visit; R = 1, 0: +-.5; the defaults are .95 and 1
    assert gigpo(turns, std=False) == near([0.975, 0.5, -0.975])
    assert gigpo(turns, std=False, gamma=0.5, omega=2) == near([1, 0.5, -1])


@pytest.mark.parametrize(
    ("invalid", "options", "episode", "both"),
    [
        # R = .8, 0: +-.4. Returns 0 + .5 * .3, -.2 + .5 * 1, 1, 0: means .225 and .5
        ([1], {}, [0.4, 0.4, 0.4, -0.4], [0.325, 0.475, 0.9, -0.9]),
        # rows .8, .8, .8, 0: mean .6
        ([1], {"baseline": "turn"}, [0.2, 0.2, 0.2, -0.6], [0.125, 0.275, 0.7, -1.1]),
        # the last reward is .8: R = .8, 0. Returns .2, .4, .8, 0: means .3 and .4
        ([1], {"penalty_scope": "episode"}, [0.4, 0.4, 0.4, -0.4], [0.3, 0.5, 0.8, -0.8]),
        # rows 1, .8, 1, 0: mean .7. Returns .25, .5 - .2, 1, 0: means .275 and .5
        ([1], LOCAL, [0.3, 0.1, 0.3, -0.7], [0.275, 0.125, 0.8, -1.2]),
        # two invalid turns. R = .6, 0. Returns -.2 + .5 * .3 = -.05, .3, 1, 0: means .125 and .5
        ([0, 1], {}, [0.3, 0.3, 0.3, -0.3], [0.125, 0.475, 0.8, -0.8]),
        # once, as with one
        ([0, 1], {"penalty_scope": "episode"}, [0.4, 0.4, 0.4, -0.4], [0.3, 0.5, 0.8, -0.8]),
    ],
)
def test_penalty_of_invalid_turns(invalid, options, episode, both):
    valid = ~np.isin(np.arange(4), invalid)
    turns = table([0, 0, 0, 1], state=[5, 5, 6, 6], reward=[0, 0, 1, 0], valid=valid)
    assert grpo(turns, std=False, penalty=0.2, **options) == near(episode)
    assert gigpo(turns, std=False, penalty=0.2, gamma=0.5, **options) == near(both)


@every_advantage
@pytest.mark.parametrize("options", [{"penalty_scope": "turn_sum"}, {"penalty_scope": "episode"}, LOCAL], ids=str)
def test_failed_group_with_one_invalid_response_moves_against_the_offender(name, options):
    numbers = options | ({"zeta": 0} if name == "empg" else {})
    turns = table([0, 0, 1, 1, 2, 2], valid=[True, True, False, True, True, True])
    # one of n values is -.1: distance .1 (n - 1) / n, std .1 / sqrt(n); n = 3 trajectories or 6 rows
    n = 6 if options is LOCAL else 3
    offender, others = -(n - 1) / sqrt(n), 1 / sqrt(n)
    same_trajectory = others if options is LOCAL else offender
    expected = [others, others, offender, same_trajectory, others, others]
    assert ADVANTAGES[name](turns, **numbers) == near(expected, 1e-4)
    assert not ADVANTAGES[name](turns, penalty=0, **numbers).any()


def test_one_invalid_turn_among_400_gets_minus_20():
    turns = table([0] * 100 + [1] * 300, valid=np.arange(400) != 150)
    # as above: -399 / 20 = -19.95 and 1 / 20; the std is .1 / 20 = .005, of which eps is another 2e-4
    expected = np.where(turns.valid, 0.05, -19.95) / 1.0002
    assert grpo(turns, **LOCAL) == near(expected)


def test_sure_turns_weigh_more():
    # B32: weights 1, .60653066, .36787944, mean .65813670. A = 1, 0, -1: 1.51944117, 0, -.55897117, mean .32015667
    turns = table([0, 1, 2], reward=[1, 0, -1], entropy=[0, 0.5, 1])
    assert empg(turns, std=False) == near([1.19928450, -0.32015667, -0.87912784])


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 2, 0, 3], [0, 2, 3, 1]], ids=str)
def test_bonus_follows_the_next_turn_and_not_the_next_row(order):
    def result(entropy, **numbers):
        turns = reordered(table([0, 0, 1, 1], reward=[0, 1, 0, -1], entropy=entropy), order)  # B76: A = 1, 1, -1, -1
        return empg(turns, std=False, **numbers)[np.argsort(order)]

    # weights 1, bonus .05 exp(0) on the two first turns, mean .025; noise is no difference (B32)
    assert result([0.7] * 4) == near([1.025, 0.975, -0.975, -1.025])
    assert result([0, 1e-17, 1e-17, 0]) == near([1.025, 0.975, -0.975, -1.025])
    # weights 1, .36787944, .60653066 twice, mean .64523519: 1.54982248, .57014783, -.94001485 twice; bonus
    # .05 * .36787944 and .05 * .60653066: 1.56821645, .57014783, -.90968832, -.94001485, mean .07216528
    assert result([0, 1, 0.5, 0.5]) == near([1.49605117, 0.49798255, -0.98185360, -1.01218013])
    # weights 1, bonus exp(-2) = .13533528 and exp(-1) = .36787944, mean .12580368
    expected = [1.00953160, 0.87419632, -0.75792424, -1.12580368]
    assert result([0, 1, 0.5, 0.5], k=0, zeta=1, k_next=2) == near(expected)


@with_options
def test_gigpo_and_empg_without_their_terms_are_grpo(options):
    expected = grpo(MIXED, **options)
    assert gigpo(MIXED, omega=0, **options) == near(expected, 1e-12)
    assert empg(MIXED, k=0, zeta=0, **options) == near(expected - expected.mean(), 1e-12)


def test_offset_of_rewards_does_not_matter_and_their_scale_only_without_std():
    last = np.array([0, 0, 1, 1, 0, 1, 0, 1, 1, 1])
    assert grpo(replace(MIXED, reward=MIXED.reward + 3 * last)) == near(grpo(MIXED), 1e-9)
    scaled = replace(MIXED, reward=8 * MIXED.reward)
    for advantage in (grpo, gigpo):
        assert advantage(scaled, penalty=0.8) == near(advantage(MIXED), 1e-4)
        assert advantage(scaled, penalty=0.8, std=False) == near(8 * advantage(MIXED, std=False), 1e-9)


@every_advantage
@with_options
def test_order_of_rows_and_names_of_ids_do_not_matter(name, options):
    order = np.array([5, 8, 2, 9, 0, 4, 7, 1, 6, 3])
    expected = ADVANTAGES[name](MIXED, **options)
    assert len(np.unique(expected.round(6))) > 5
    assert ADVANTAGES[name](reordered(MIXED, order), **options) == near(expected[order], 1e-9)
    huge = 2**62  # as float64 equal to huge + 1
    group = np.array([0, huge + 1, huge, -5])[MIXED.group]
    trajectory = np.array([huge, -7, huge + 1, -huge - 1, 0, -huge])[MIXED.trajectory]
    renamed = replace(MIXED, group=group, trajectory=trajectory, state=np.array([huge + 1, huge])[MIXED.state - 7])
    assert ADVANTAGES[name](renamed, **options) == near(expected, 1e-9)


@pytest.mark.parametrize("name", ["grpo", "gigpo"])
def test_groups_are_independent(name):
    second, before = MIXED.group == 2, ADVANTAGES[name](MIXED)
    after = ADVANTAGES[name](replace(MIXED, reward=MIXED.reward * np.where(second, -9, 1)))
    assert after[~second] == near(before[~second], 1e-12)
    assert np.abs(after - before)[second].min() > 0.1


@every_advantage
@with_options
def test_nothing_to_compare_gives_zeros_and_never_nan(name, options):
    numbers = options | ({"zeta": 0} if name == "empg" else {})
    constant = table([0, 1, 2], reward=[3.0] * 3, state=[7] * 3)
    assert ADVANTAGES[name](table([]), **options).shape == (0,)
    assert ADVANTAGES[name](table([4], reward=[3.0]), **options).tolist() == [0]
    assert ADVANTAGES[name](constant, **numbers).tolist() == [0, 0, 0]
    assert np.isfinite(ADVANTAGES[name](MIXED, **options)).all()


def test_bad_columns_raise():
    for columns, words in (
        ({"reward": [0, 1]}, "one shape"),
        ({"turn": [0, 0, 0]}, "occurs twice"),
        ({"turn": [0, -1, 0]}, "turn -1"),
        ({"turn": [0, 0.5, 0]}, "turn of float64: allowed are values of int64"),
        ({"valid": [0, 2, 1]}, "valid of int64: allowed are values of bool"),
        ({"group": [0, 1, 0]}, "stands in two groups"),
        ({"reward": [0, np.nan, 0]}, "reward has a non-finite"),
        ({"entropy": [0, np.inf, 0]}, "entropy has a non-finite"),
    ):
        with pytest.raises(ValueError, match=words):
            table([0, 0, 1], **columns)
    with pytest.raises(ValueError, match="one shape"):
        reordered(MIXED, np.s_[:, None])
    with pytest.raises(ValueError, match="one shape"):
        group_advantages([1.0, 2], [0])
    with pytest.raises(ValueError, match="non-finite"):
        group_advantages([1.0, np.nan], [0, 0])
    with pytest.raises(ValueError, match="one shape"):
        step_returns([1.0], [0, 0], [0, 1], 0.5)


def test_integers_and_lists_are_taken_as_numbers_and_flags():
    columns = {"reward": [0, 1, 3], "valid": [1, 0, 1], "success": [0, 0, 1], "state": np.array([5, 6, 7], np.uint64)}
    lists = table([0, 0, 1], **columns)
    assert (lists.valid.dtype, lists.reward.dtype, lists.state.dtype) == (bool, float, np.int64)
    # returns 1 - .1 and 3, mean 1.95, std 1.05 sqrt(2): +- .70710678
    assert grpo(lists).tolist() == pytest.approx([-0.70710678, -0.70710678, 0.70710678], abs=1e-6)


@every_advantage
def test_bad_choices_raise(name):
    for options in ({"baseline": "step"}, {"penalty_scope": "local"}, {"penalty_scope": "turn_local"}):
        with pytest.raises(ValueError, match="allowed"):
            ADVANTAGES[name](MIXED, **options)
    with pytest.raises(TypeError, match=rf"^{name}\(.*gama"):
        ADVANTAGES[name](MIXED, gama=0.9)


def test_advantages_imports_numpy_only():
    with open(advantages.__file__) as source:
        nodes = list(ast.walk(ast.parse(source.read())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert names | {node.module for node in nodes if isinstance(node, ast.ImportFrom)} == {"dataclasses", "numpy"}


@every_advantage
def test_python_steps_do_not_grow_with_the_number_of_rows(name):
    def steps(trajectories):
        turns = table(np.repeat(np.arange(trajectories), 3).tolist(), reward=np.arange(3.0 * trajectories))
        files, before = [], sys.gettrace()

        def trace(frame, *_):
            files.append(frame.f_code.co_filename)
            return trace

        sys.settrace(trace)
        try:
            ADVANTAGES[name](replace(turns), penalty_scope="episode")
        finally:
            sys.settrace(before)
        return files.count(advantages.__file__)

    assert 10 < steps(2) == steps(200)
