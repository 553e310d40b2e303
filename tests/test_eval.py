"""Evaluation: pass@k, intervals over tasks, the two scores, loops, types of task, players, and the command line."""

import gzip
import json
import math
import os
import random
import shutil
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

import eval as evaluation
import train
from config import Config, resolve
from engines import TransformersEngine
from envs.sokoban import MOVES, Sokoban
from eval import (
    break_down,
    closing_table,
    counts_by_task,
    evaluate,
    evaluate_players,
    evaluate_scripted,
    oscillation,
    pagination,
    panel,
    pass_at_k,
    play,
    repeated,
    success_over_tasks,
    summarise,
    wilson_interval,
)
from policy import load_policy
from records import read_records
from rollout import Trajectory, Turn
from sft import play_scripted

Z = 1.959964


def turn(state=0, action="up", valid=True):
    return Turn([1], [2], [0.0], "", state, action, valid, True, 0.0)


def trajectory(turns, success=False, score=0.0, valid=True, error="", task="t"):
    return Trajectory(task, [turn(valid=valid)] * turns, success=success, score=score, error=error)


def sampled(task, n, c, crashed=0):
    """n episodes of a task that ended, c of them with success, and some that crashed."""
    ended = [trajectory(1, success=i < c, task=task) for i in range(n)]
    return ended + [trajectory(1, success=True, error="crash", task=task)] * crashed


# pass@k


def test_b22_pass_at_k_by_hand():
    assert pass_at_k(5, 2, 1) == 2 / 5
    assert pass_at_k(5, 2, 2) == pytest.approx(1 - 3 / 10)  # C(3, 2) / C(5, 2); 1 - (1 - 2/5)^2 would be .64
    assert pass_at_k(5, 2, 4) == 1  # three failures cannot fill a draw of four
    assert pass_at_k(10, 3, 5) == pytest.approx(1 - 21 / 252)  # C(7, 5) / C(10, 5)
    # no success among 100 of 200: each of 7 successes falls, one after the other, into the half that was not drawn
    assert pass_at_k(200, 7, 100) == pytest.approx(1 - math.prod((100 - i) / (200 - i) for i in range(7)), abs=1e-12)
    assert pass_at_k(200, 7, 100) == pytest.approx(0.99299112, abs=5e-9)
    assert pass_at_k(1000, 1, 10) == pytest.approx(10 / 1000)  # the one success is among the ten
    assert pass_at_k(10_000, 1, 5000) == 0.5  # C(10000, 5000) has 3009 digits


def test_pass_at_k_is_the_share_of_draws_that_hold_a_success():
    for n, c in ((6, 0), (6, 2), (5, 5)):
        for k in range(1, n + 1):
            draws = list(combinations([i < c for i in range(n)], k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 0, 5), (4, 4, 5), (4, 2, 0), (4, 2, -1), (4, 5, 1), (4, -1, 1)])
def test_b22_fewer_samples_than_k_are_never_a_pass(n, c, k):
    with pytest.raises(ValueError, match=f"n {n}, c {c}, k {k}: allowed is"):
        pass_at_k(n, c, k)


def test_b22_pass_at_k_is_a_mean_over_tasks_not_of_pooled_counts():
    counts = {"a": (4, 4), "b": (4, 0), "c": (4, 1)}
    row = success_over_tasks(counts, k=2)
    assert row["success"] == pytest.approx((1 + 0 + 0.5) / 3)  # 1 - C(3, 2)/C(4, 2) = .5; pooled 1 - 21/66 = .68
    assert row["tasks"] == 3


# intervals


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


def interval(counts, k=1):
    row = success_over_tasks(counts, k)
    return row["success_low"], row["success_high"]


def test_one_sample_a_task_has_wilsons_interval():
    counts = {f"task {i}": (1, int(i < 8)) for i in range(10)}
    assert success_over_tasks(counts)["success"] == 0.8
    assert interval(counts) == wilson_interval(8, 10)


def test_several_samples_a_task_have_an_interval_over_tasks():
    counts = {"a": (2, 1), "b": (4, 3), "c": (4, 2), "d": (2, 1)}
    # shares .5 .75 .5 .5: mean .5625 (pooled 7/12 = .583); squares 3 * .0625^2 + .1875^2 = .046875, /3, root: sd .125;
    # half 1.96 * .125 / sqrt(4) = .1225
    assert success_over_tasks(counts)["success"] == 0.5625
    assert interval(counts) == pytest.approx((0.5625 - Z * 0.0625, 0.5625 + Z * 0.0625))


def test_repeating_what_a_task_gave_adds_no_certainty():
    counts = {f"task {i}": (4, 4 * (i < 8)) for i in range(10)}
    # 8 shares of 1 and 2 of 0: sd sqrt((8 * .04 + 2 * .64) / 9) = .42164, half 1.96 * .42164 / sqrt(10) = .26133
    assert interval(counts) == pytest.approx((0.8 - 0.26133, 1.0), abs=1e-5)  # .8 + .26 is clipped
    assert interval({task: (n, n - c) for task, (n, c) in counts.items()}) == pytest.approx((0.0, 0.46133), abs=1e-5)
    independent = wilson_interval(32, 40)
    assert independent[0] > interval(counts)[0] + 0.1


def test_the_interval_of_pass_at_k_is_over_tasks_too():
    # pass@2: 1, .5, .5: mean 2/3; squares (1/9 + 1/36 + 1/36) / 2 = 1/12; half 1.96 * sqrt(1/12) / sqrt(3) = 1.96 / 6
    low, high = interval({"a": (4, 3), "b": (4, 1), "c": (4, 1)}, k=2)
    assert (low, high) == (pytest.approx(2 / 3 - Z / 6), pytest.approx(2 / 3 + Z / 6))


def test_one_task_or_equal_tasks_are_not_taken_for_certainty():
    assert interval({"a": (8, 6)}) == wilson_interval(0.75, 1)
    low, high = interval({"a": (8, 6)})
    assert low < 0.25 and high == pytest.approx((0.75 + Z**2 / 2 + Z * math.sqrt(0.1875 + Z**2 / 4)) / (1 + Z**2))
    # five tasks solved by all samples say no more than five trials: low n / (n + z^2) = 5 / 8.8415
    assert interval({f"{i}": (4, 4) for i in range(5)}) == (pytest.approx(5 / 8.8415, abs=1e-4), 1.0)


# what is reported of trajectories


def test_score_is_reported_by_trajectory_and_by_turn():
    # scores 10 and 0 over 2 and 6 turns: mean 5; turn-weighted (2 * 10 + 6 * 0) / 8 = 2.5
    result = summarise([trajectory(2, success=True, score=10.0), trajectory(6, valid=False)], 0.0)
    assert (result["success"], result["score"], result["score_turn_weighted"], result["turns"]) == (0.5, 5, 2.5, 4)
    assert result["format_valid"] == 2 / 8


def test_success_of_several_samples_counts_every_task_once():
    # shares 1 of 1 and 1 of 3: mean 2/3, though 2 of 4 episodes succeed
    result = summarise(sampled("a", 1, 1) + sampled("b", 3, 1), 0.0)
    assert result["success"] == pytest.approx(2 / 3)
    assert (result["tasks"], result["levels"]) == (2, 4)


def test_failed_episodes_are_excluded_and_counted():
    result = summarise([trajectory(1, success=True), trajectory(1, error="crash")], max_failures=0.5)
    assert (result["success"], result["levels"], result["failed"]) == (1.0, 1, 1)
    for episodes, limit in (
        ([trajectory(1), trajectory(1, error="crash")], 0.4),
        ([trajectory(1, error="crash")], 1.0),
    ):
        with pytest.raises(RuntimeError, match=f"episodes failed, max_failures {limit}; first: crash"):
            summarise(episodes, limit)


def test_a_task_that_lost_samples_is_left_out_of_a_larger_k_and_one_that_lost_all_of_everything():
    episodes = sampled("a", 4, 2) + sampled("b", 2, 0, crashed=2) + sampled("c", 0, 0, crashed=4)
    assert counts_by_task(episodes) == {"a": (4, 2), "b": (2, 0)}
    result = summarise(episodes, 0.6) | break_down(episodes, None, [1, 2, 3])
    assert (result["tasks"], result["failed_tasks"], result["levels"], result["failed"]) == (2, 1, 6, 6)
    assert result["success"] == (0.5 + 0) / 2
    rows = result["pass_at_k"]
    assert (rows["1"]["success"], rows["1"]["tasks"]) == (result["success"], 2)
    assert (rows["2"]["success"], rows["2"]["tasks"]) == (pytest.approx((5 / 6 + 0) / 2), 2)  # 1 - C(2, 2) / C(4, 2)
    assert (rows["3"]["success"], rows["3"]["tasks"]) == (1.0, 1)
    none = success_over_tasks(counts_by_task(episodes), k=5)
    assert none == {"tasks": 0, "success": None, "success_low": None, "success_high": None}


def test_every_type_of_task_has_a_row():
    env = Sokoban(max_walls=2, min_solution=9, max_solution=11)
    tasks = panel(env, "valid_seen", 7)  # 9, 10, 11, 9, 10, 11, 9 moves
    solve, wait = (lambda env, _: env.expert(random)), (lambda env, _: "<think> </think> <action> wait </action>")
    players = (solve, solve, solve, wait, wait, solve, wait)
    played = [play_scripted(env, task, player)[1] for task, player in zip(tasks, players, strict=True)]
    rows = break_down(played, env, [1])["task_types"]
    assert list(rows) == ["9 moves", "10 moves", "11 moves"]
    assert [(row["tasks"], row["success"]) for row in rows.values()] == [(3, 1 / 3), (2, 0.5), (2, 1.0)]
    low, high = wilson_interval(1, 2)
    assert rows["10 moves"] == {"tasks": 2, "success": 0.5, "success_low": low, "success_high": high}
    assert break_down(played, object(), [1])["task_types"] == {}


# loops


def test_a_turn_repeats_the_one_before_if_state_and_action_are_the_same():
    turns = [turn(7, "up"), turn(7, "up"), turn(7, "down"), turn(7, None), turn(7, None), turn(8, None), turn(7, "up")]
    # of seven: the second (up in 7 again) and the fifth (broken in 7 again)
    assert repeated(turns) == 2 / 7
    assert repeated([]) == repeated([turn()]) == 0


def test_a_turn_oscillates_if_it_is_back_where_the_one_before_last_was():
    turns = [turn(state) for state in (1, 2, 1, 2, 2, 2, 3, 2, 4)]
    # back: the third (1 2 1), the fourth (2 1 2), the eighth (2 3 2); standing still (2 2 2) is no way back
    assert oscillation(turns) == 3 / 9
    assert oscillation([turn(1), turn(2)]) == oscillation([]) == 0


class Pages:
    """The part of a task that loops read: its action types."""

    def action_type(self, action):
        return "invalid" if action is None else action.partition("[")[0]


def test_pages_are_turned_in_runs_of_three_or_more():
    assert pagination(["search", "next", "next", "next", "click", "next", "next"]) == 3 / 7
    assert pagination(["next", "next", "invalid", "next", "next"]) == 0  # a broken response ends a run
    assert pagination(["next"] * 4 + ["invalid"] + ["next"] * 3) == 7 / 8
    assert pagination([]) == pagination([None] * 3) == 0


def pages(*actions):
    return [turn(i, action, action is not None) for i, action in enumerate(actions)]


def test_loops_are_shares_of_all_turns():
    n = "next[>]"
    episodes = [Trajectory("a", pages(n, n, n, n)), Trajectory("b", [turn(1), turn(1)]), trajectory(0, error="crash")]
    result = summarise(episodes, 0.5, Pages())
    # four of six turns turn pages; of the other two the second repeats the first
    assert result["loops/pagination"] == pytest.approx(4 / 6)
    assert result["loops/repeated"] == pytest.approx(1 / 6)
    assert result["loops/oscillation"] == 0
    plain = [Trajectory("a", pages("next", "next", "next"))]
    assert summarise(plain, 0.0, Pages())["loops/pagination"] == 1
    assert summarise(plain, 0.0)["loops/pagination"] == 0  # a task without action types


def test_walking_to_and_fro_in_sokoban_is_an_oscillation():
    env = Sokoban()
    env.reset("train/3")
    (r, c), boxes = env.state
    back = {"up": "down", "down": "up", "left": "right", "right": "left"}
    free = next(a for a, (dr, dc) in MOVES.items() if (r + dr, c + dc) in env.floor - boxes)
    moves = iter([free, back[free]] * 6)
    played = play_scripted(env, "train/3", lambda env, _: f"<think> </think> <action> {next(moves)} </action>")[1]
    # two states in turn: every turn from the third on, 10 of 12
    assert oscillation(played.turns) == 10 / 12 and repeated(played.turns) == 0


# players and samples


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


class Spy:
    """An engine that passes on what it is asked, and keeps the seeds."""

    def __init__(self, engine):
        self.engine, self.seeds = engine, []

    def generate(self, prompts, seeds, sampling):
        self.seeds += seeds
        return self.engine.generate(prompts, seeds, sampling)


def said(trajectories):
    return [[turn.response_ids for turn in trajectory.turns] for trajectory in trajectories]


def test_a_sample_depends_on_its_task_and_number_alone():
    config = resolve({"max_response_tokens": 6, "max_turns": 8, "seed": 3})[0]
    envs = [Sokoban(max_turns=8) for _ in range(4)]
    model, tokenizer = load_policy("", envs[0].words(), 32, 1, "float32")
    engine = Spy(TransformersEngine(model, tokenizer))
    tasks = panel(envs[0], "valid_seen", 5)
    three = said(play(engine, tokenizer, envs, tasks, config, samples=3))
    assert len(set(engine.seeds)) == len(engine.seeds) == sum(map(len, three))
    assert len({str(sample) for sample in three}) == 15
    for samples, chosen in ((1, tasks), (2, tasks[::-2])):
        others = said(play(engine, tokenizer, envs, chosen, config, samples))
        assert others == [three[3 * tasks.index(task) + i] for task in chosen for i in range(samples)]
    played = play(engine, tokenizer, envs, tasks, config)
    assert evaluate(engine, tokenizer, envs, tasks, config) == summarise(played, 0.0, envs[0])


# the command line

LEVELS = "--min_solution 1 --max_solution 4 --max_walls 2"
RUN = f"--method grpo --steps 2 --save_every 1 --groups_per_step 2 --group_size 4 --eval_levels 12 --name one {LEVELS}"
CLONING = "--sft_steps 60 --sft_batch 32 --sft_episodes 150 --sft_learning_rate 0.01"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The results and the folder of a short run with a checkpoint a step and a model that changes every step."""
    output = tmp_path_factory.mktemp("runs")
    return train.main([*RUN.split(), *CLONING.split(), "--output", str(output)]), output / "one"


def sampled_ids(path):
    return [[turn["response_ids"] for turn in record["turns"]] for record in read_records(path)]


def test_the_report_is_printed_returned_and_what_the_run_said(finished, capsys):
    results, folder = finished
    report = evaluation.main(["--run", str(folder), "--split", "valid_unseen"])
    assert json.loads(capsys.readouterr().out) == report
    assert results["after RL"]["valid_unseen"].items() <= report.items()
    assert (report["run"], report["split"], report["checkpoint"]) == (str(folder), "valid_unseen", None)


def test_samples_are_reported_by_task_and_recorded(finished, tmp_path, capsys):
    _, folder = finished
    path = tmp_path / "played.jsonl.gz"
    line = f"--run {folder} --samples 3 --pass_k 1,3 --eval_levels 7 --records {path}"
    report = evaluation.main(line.split())
    capsys.readouterr()
    records = list(read_records(path))
    assert [(r["group"], r["member"]) for r in records] == [(g, m) for g in range(7) for m in range(3)]
    assert {(r["step"], r["trained"]) for r in records} == {(0, False)}
    wins = [sum(r["success"] for r in records[i : i + 3]) for i in range(0, 21, 3)]
    assert (report["tasks"], report["levels"], report["samples"]) == (7, 21, 3)
    assert report["success"] == pytest.approx(sum(wins) / 21) == report["pass_at_k"]["1"]["success"]
    assert report["pass_at_k"]["3"]["success"] == pytest.approx(sum(c > 0 for c in wins) / 7)
    assert sum(row["tasks"] for row in report["task_types"].values()) == 7
    assert {r["task_type"] for r in records} == set(report["task_types"])
    assert report["score"] == pytest.approx(np.mean([r["score"] for r in records]), rel=1e-5)


def test_markdown_is_a_table(finished, capsys):
    _, folder = finished
    line = f"--run {folder} --samples 2 --pass_k 2 --format markdown --eval_levels 6"
    report = evaluation.main(line.split())
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["| sokoban, valid_seen | tasks | success | 95 % interval |", "|---|---|---|---|"]
    rate, low, high = (f"{report[f'success{end}']:.3f}" for end in ("", "_low", "_high"))
    assert lines[2] == f"| avg@2 | 6 | {rate} | [{low}, {high}] |"
    assert [row.split(" | ")[0] for row in lines[3:8]] == ["| pass@2", *(f"| {n} moves" for n in range(1, 5))]
    assert lines[8] == "" and "seed 0" in lines[9] and "loops/repeated" in lines[11]


def test_a_rate_of_no_task_is_a_dash_in_markdown():
    episodes = sampled("a", 1, 1, crashed=1) + sampled("b", 1, 0, crashed=1)
    report = {"task": "x", "split": "y", "samples": 2, "model": "m", "seed": 0}
    report |= {"eval_temperature": 1.0, "eval_top_p": 1.0, "eval_top_k": 0}
    report |= summarise(episodes, 0.5) | break_down(episodes, None, [2])
    table = evaluation.markdown(report)
    assert "| pass@2 | 0 | - | [-, -] |" in table and "left out: 2 episodes, 0 tasks" in table
    json.dumps(report, allow_nan=False)


def test_a_checkpoint_plays_with_its_own_weights(finished, tmp_path, capsys):
    _, folder = finished
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-1", "step-2"]
    played = {}
    for name, flags in (("last", []), ("1", ["--checkpoint", "1"]), ("2", ["--checkpoint", "2"])):
        report = evaluation.main(["--run", str(folder), *flags, "--records", str(tmp_path / name)])
        played[name] = sampled_ids(tmp_path / name)
    assert played["2"] == played["last"] != played["1"]
    assert (
        report["model"] == str(folder / "checkpoints" / "step-2" / "model.safetensors") and report["checkpoint"] == 2
    )


def test_a_checkpoint_that_is_missing_or_not_complete_is_refused(finished, tmp_path, capsys):
    folder = tmp_path / "copy"
    shutil.copytree(finished[1], folder)
    (folder / "checkpoints" / "step-2" / "complete").unlink()
    shutil.copytree(folder / "checkpoints" / "step-1", folder / "checkpoints" / "step-3.partial")
    for step in ("2", "3", "40"):
        assert refused(f"--run {folder} --checkpoint {step}", capsys) == f"--checkpoint {step}: allowed are 1"
    for name, flags in (("model", ""), ("reference", "--checkpoint 1")):
        shutil.rmtree(folder / name)
        assert f"{folder / name} is not there" in refused(f"--run {folder} {flags}", capsys)


def refused(line, capsys):
    """The one line that a wrong invocation ends with."""
    with pytest.raises(SystemExit) as stop:
        evaluation.main(line.split())
    assert stop.value.code == 2
    (message,) = capsys.readouterr().err.splitlines()
    return message.partition(": ")[2]


@pytest.mark.parametrize("line", ["--checkpoint 3 --model m", "--show 2", "--html page.html", "--at_step 1"])
def test_what_belongs_to_a_run_is_refused_without_one(line, capsys):
    flag, value = line.split()[:2]
    assert refused(line, capsys) == f"{flag} {value}: allowed with --run"


def test_something_to_evaluate_has_to_be_named(tmp_path, capsys):
    assert "--run ''" in refused("", capsys) and "--model" in refused("--samples 2", capsys)
    (tmp_path / "config.json").write_text(json.dumps({"hidden": 64, "n_head": 12}))
    assert "allowed is a run folder" in refused(f"--run {tmp_path}", capsys)
    assert str(tmp_path / "no_such_model") in refused(f"--model {tmp_path}/no_such_model", capsys)


def test_a_model_that_cannot_read_the_prompts_or_be_read_is_refused_before_it_plays(finished, tmp_path, capsys):
    _, folder = finished
    assert "cannot be played with this model" in refused(f"--run {folder} --prompt_style words", capsys)
    assert "--max_prompt_tokens 3: allowed is" in refused(f"--run {folder} --max_prompt_tokens 3", capsys)
    shutil.copytree(folder / "model", tmp_path / "cut")
    os.truncate(tmp_path / "cut" / "model.safetensors", 100)
    message = refused(f"--model {tmp_path}/cut --recipe tiny", capsys)
    assert "cannot be read" in message and str(tmp_path / "cut") in message


def test_any_model_plays_with_the_settings_of_a_recipe(finished, tmp_path, capsys):
    _, folder = finished
    flags = f"--recipe tiny --eval_levels 12 --groups_per_step 2 --group_size 4 --split valid_unseen {LEVELS}"
    tiny = evaluation.main(["--model", str(folder / "model"), *flags.split()])
    assert finished[0]["after RL"]["valid_unseen"].items() <= tiny.items()
    # the paper's, on an untrained model that knows the words of the paper's prompt: 15 turns, nothing well formed
    words = Sokoban(prompt_style="words", observation="grid", max_turns=15, history=2).words()
    model, tokenizer = load_policy("", words, 16, 1, "float32")
    model.save_pretrained(tmp_path / "untrained")
    tokenizer.save_pretrained(tmp_path / "untrained")
    line = f"--model {tmp_path}/untrained --task sokoban --eval_levels 3 --max_response_tokens 3"
    paper = evaluation.main(line.split())
    assert (paper["eval_temperature"], paper["eval_top_p"], paper["eval_top_k"]) == (0.7, 0.95, 20)
    assert (paper["turns"], paper["success"], paper["levels"], paper["run"]) == (15, 0, 3, None)


def test_what_a_run_recorded_is_shown_and_written_as_a_page(finished, tmp_path, capsys):
    _, folder = finished
    records = list(read_records(folder / "rollouts.jsonl.gz"))
    assert {record["step"] for record in records} == {1, 2}
    evaluation.main(["--run", str(folder), "--show", "2"])
    first = capsys.readouterr().out
    assert first.count("step 1, group") == 2 and "step 2" not in first
    evaluation.main(["--run", str(folder), "--show", "100", "--at_step", "2"])
    second = capsys.readouterr().out
    assert second.count("step 2, group") == sum(r["step"] == 2 for r in records) > 0 and "step 1," not in second
    page = tmp_path / "page.html"
    evaluation.main(["--run", str(folder), "--html", str(page), "--at_step", "2"])
    evaluation.main(["--run", str(folder), "--html"])
    assert capsys.readouterr().out.split() == [str(page), str(folder / "rollouts.html")]
    assert 0 < page.stat().st_size < (folder / "rollouts.html").stat().st_size
    said = refused(f"--run {folder} --show 1 --at_step 9", capsys)
    assert said.startswith("--at_step 9: allowed are the steps in ") and said.endswith("[1, 2]")
    (tmp_path / "rollouts.jsonl.gz").write_bytes(gzip.compress(b""))
    assert "none so far" in refused(f"--run {tmp_path} --html", capsys)


def test_flags_of_eval_are_no_settings():
    parser, typed = evaluation.read_flags("--run r --pass-k 1,2 --at-step 3 --html --seed 4".split())
    assert typed == {"run": "r", "pass_k": "1,2", "at_step": 3, "html": "", "seed": 4}
    own = {action.dest for action in parser._actions} - {"help"} - set(Config.__dataclass_fields__)
    assert own == set("run checkpoint split samples pass_k format records show html at_step".split())
