"""Evaluation: intervals, the two scores, scripted players, panels."""

from dataclasses import replace

import pytest

from envs.sokoban import Sokoban
from eval import closing_table, evaluate_players, evaluate_scripted, panel, summarise, wilson_interval
from rollout import Trajectory, Turn


def trajectory(turns, success=False, score=0.0, valid=True, error=""):
    turn = Turn([1], [2], [0.0], "", 0, "up", valid, True, 0.0)
    return Trajectory("t", [turn] * turns, success=success, score=score, error=error)


def test_interval_by_hand():
    # 8 of 10, z 1.96: scale 1 + 3.8416/10 = 1.38416; centre (.8 + .19208)/1.38416 = .71674;
    # half 1.96/1.38416 * sqrt(.16/10 + 3.8416/400) = 1.41602 * sqrt(.0256040) = .22658
    assert wilson_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=2e-4)


def test_interval_at_the_ends_stays_inside():
    # 0 of n: centre = half, so the low end is 0; high = z^2 / (n + z^2) = 3.8415 / 103.8415
    assert wilson_interval(0, 100) == pytest.approx((0.0, 0.03699), abs=1e-4)
    assert wilson_interval(100, 100) == pytest.approx((1 - 0.03699, 1.0), abs=1e-4)
    for bad in ((5, 4), (-1, 4), (0, 0)):
        with pytest.raises(ValueError, match="allowed is"):
            wilson_interval(*bad)


def test_score_is_reported_by_trajectory_and_by_turn():
    # scores 10 and 0 over 2 and 6 turns: mean 5; turn-weighted (2 * 10 + 6 * 0) / 8 = 2.5
    result = summarise([trajectory(2, success=True, score=10.0), trajectory(6, valid=False)], 0.0)
    assert (result["success"], result["score"], result["score_turn_weighted"], result["turns"]) == (0.5, 5, 2.5, 4)
    assert result["format_valid"] == 2 / 8


def test_failed_episodes_are_excluded_and_counted():
    result = summarise([trajectory(1, success=True), trajectory(1, error="crash")], max_failures=0.5)
    assert (result["success"], result["levels"], result["failed"]) == (1.0, 1, 1)
    for episodes, limit in (
        ([trajectory(1), trajectory(1, error="crash")], 0.4),
        ([trajectory(1, error="crash")], 1.0),
    ):
        with pytest.raises(RuntimeError, match=f"episodes failed, max_failures {limit}; first: crash"):
            summarise(episodes, limit)


def test_the_expert_solves_what_the_random_player_does_not():
    env = Sokoban()
    tasks = panel(env, "valid_seen", 60)
    assert evaluate_scripted(env, tasks, "expert", seed=0)["success"] == 1
    result = evaluate_scripted(env, tasks, "random", seed=0)
    assert result["success"] < 0.2 and result["format_valid"] == 1
    assert result == evaluate_scripted(env, tasks, "random", seed=0)


def test_a_panel_is_the_first_tasks_of_a_split():
    env = Sokoban()
    assert panel(env, "valid_unseen", 3) == env.tasks("valid_unseen")[:3]
    with pytest.raises(ValueError, match="--eval_levels 513: allowed is 1 to 512"):
        panel(env, "valid_unseen", 513)


def test_a_task_that_lists_no_actions_has_no_random_player():
    class Silent(Sokoban):
        def _observe(self):
            return replace(super()._observe(), actions=None)

    panels = {"valid_seen": ["valid_seen/0"]}
    assert list(evaluate_players(Silent(), panels, seed=0)) == ["expert"]
    assert list(evaluate_players(Sokoban(), panels, seed=0)) == ["random", "expert"]


def test_the_closing_table_accounts_for_all_of_the_time():
    row = {"success": 0.5, "success_low": 0.25, "success_high": 0.75}
    table = closing_table({"expert": {"valid_seen": row}}, {"rollout": 30.0, "update": 20.0}, total=60.0)
    assert "| expert | 0.500 [0.250, 0.750] |" in table
    assert "60 s in all: rollout 30, update 20, the rest 10." in table
