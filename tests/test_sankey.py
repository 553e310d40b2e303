"""Sankey diagrams: counting by hand, what is read, the layout, both files."""

import json
import random
import re
from collections import Counter

import pytest
from matplotlib.image import imread

from envs.sokoban import Sokoban
from plots import plt
from records import append_step
from sankey import GAP, LATE, colors_of, draw_bars, flows, main, place, read_steps


def record(actions, success, step=1, error=""):
    """What the diagrams read of a trajectory: one letter an action type."""
    turns = [{"action_type": action} for action in actions]
    return {"step": step, "success": success, "error": error, "turns": turns}


RECORDS = [record("aab", True), record("ab", False), record("b", True), record("aabb", False)]


def played(step, count, rng):
    """Records of Sokoban episodes of a random player that breaks the format one time in ten."""
    env = Sokoban()
    for task in env.tasks("valid_seen")[:count]:
        env.reset(task)
        types, done = [], False
        while not done and len(types) < env.max_turns:
            action = None if rng.random() < 0.1 else rng.choice(["up", "down", "left", "right"])
            outcome = env.step(action)
            types.append(env.action_type(action))
            done = outcome.done
        yield record(types, outcome.success, step)


def test_nodes_and_links_are_counted_by_turn():
    nodes, links = flows(RECORDS, max_turns=4)
    by_turn = [{"a": 3, "b": 1}, {"a": 2, "b": 1, "end: success": 1}, {"b": 2, "end: failure": 1}]
    by_turn += [{"end: success": 1, "b": 1}, {"end: failure": 1}]
    assert nodes == {(turn, name): n for turn, row in enumerate(by_turn, start=1) for name, n in row.items()}
    assert links == {
        (1, "a", "a", "success"): 1,
        (1, "a", "a", "failure"): 1,
        (1, "a", "b", "failure"): 1,
        (1, "b", "end: success", "success"): 1,
        (2, "a", "b", "success"): 1,
        (2, "a", "b", "failure"): 1,
        (2, "b", "end: failure", "failure"): 1,
        (3, "b", "end: success", "success"): 1,
        (3, "b", "b", "failure"): 1,
        (4, "b", "end: failure", "failure"): 1,
    }


def test_longer_trajectories_are_cut_without_an_end():
    nodes, links = flows(RECORDS, max_turns=2)  # aab and aabb end after turn 2; ab ends in column 3, b in column 2
    assert nodes == {
        (1, "a"): 3,
        (1, "b"): 1,
        (2, "a"): 2,
        (2, "b"): 1,
        (2, "end: success"): 1,
        (3, "end: failure"): 1,
    }
    assert sum(links.values()) == 5  # four from turn 1, one from turn 2


def test_what_enters_and_leaves_a_node_is_what_it_counts():
    records = [r for step in (1, 2) for r in played(step, 40, random.Random(step))]
    nodes, links = flows(records, max_turns=12)
    entering, leaving = Counter(), Counter()
    for (turn, source, target, _), count in links.items():
        leaving[turn, source] += count
        entering[turn + 1, target] += count
    assert sum(count for (turn, _), count in nodes.items() if turn == 1) == len(records) == 80
    assert entering == Counter({node: count for node, count in nodes.items() if node[0] > 1})
    assert leaving == Counter({node: count for node, count in nodes.items() if not node[1].startswith("end: ")})
    assert {"up", "invalid", "end: failure"} <= {name for _, name in nodes}


def test_columns_are_stacked_in_the_order_of_the_names():
    # 4 trajectories, so the gap is 4 * GAP: in turn 2 a [0, 2], b [2 + gap, 3 + gap], end: success from 3 + 2 gap
    nodes, _ = flows(RECORDS, max_turns=4)
    names = list(colors_of(nodes))
    assert names == ["a", "b", "end: success", "end: failure"]
    tops, gap = place(nodes, names), 4 * GAP
    assert [tops[2, name] for name in names[:3]] == pytest.approx([0, 2 + gap, 3 + 2 * gap])
    assert (tops[3, "b"], tops[3, "end: failure"]) == pytest.approx((0, 2 + gap))


def test_what_is_no_proper_action_comes_last_and_colours_differ():
    types = ["search", "invalid", "back", "other", "buy", "click_product", "click_other", "next"]
    colors = colors_of(Counter({(1, name): 1 for name in [*types, *LATE]}))
    assert list(colors)[-4:] == ["other", "invalid", "end: success", "end: failure"]
    assert list(colors)[:3] == ["back", "buy", "click_other"]
    assert len(set(colors.values())) == len(colors) == 10


def test_bars_are_as_high_as_counts_and_ribbons_fill_them():
    nodes, links = flows(RECORDS, max_turns=4)
    figure, axis = plt.subplots()
    draw_bars(axis, nodes, links, colors_of(nodes), by_outcome=True)
    assert sorted(bar.get_height() for bar in axis.patches) == pytest.approx(sorted(nodes.values()))
    assert {text.get_text() for text in axis.texts} >= {"a 3", "b 2", "end: failure 1"}
    starts = [ribbon.get_paths()[0].vertices for ribbon in axis.collections]
    first = [(v[v[:, 0] == v[:, 0].min(), 1].min(), v[v[:, 0] == v[:, 0].min(), 1].max()) for v in starts]
    gap = 4 * GAP  # turn 1: a leaves [0, 3] to a (failure, success) and b, b leaves [3 + gap, 4 + gap]
    flat = [edge for pair in first[:4] for edge in pair]
    assert flat == pytest.approx([0, 1, 1, 2, 2, 3, 3 + gap, 4 + gap])
    plt.close(figure)


def test_steps_are_inclusive_and_crashes_are_left_out(tmp_path):
    path = tmp_path / "rollouts.jsonl.gz"
    for step in range(1, 6):
        append_step(path, [record("ab", True, step), record("a", False, step, error="crash"), record("", False, step)])
    records = read_steps(path, 2, 4)
    assert [r["step"] for r in records] == [2, 3, 4]
    assert [turn["action_type"] for turn in records[0]["turns"]] == ["a", "b"]
    with pytest.raises(ValueError, match=r"--steps 6-9: no trajectory; the steps of .* are 1 to 5"):
        read_steps(path, 6, 9)


def draw(folder, records, *flags):
    append_step(folder / "rollouts.jsonl.gz", records)
    picture, page = main([str(folder), *flags])
    return imread(picture)[..., :3], page.read_text()


def test_real_episodes_give_a_picture_and_a_page_that_needs_nothing_else(tmp_path):
    records = list(played(3, 60, random.Random(0)))
    picture, page = draw(
        tmp_path, records, "--output", str(tmp_path / "figures"), "--steps", "2-3", "--max_turns", "5"
    )
    assert 1000 < picture.shape[0] < 2000 and 1000 < picture.shape[1] < 2500 and picture.std() > 0.1
    longer = sum(len(r["turns"]) > 5 for r in records)
    failures = sum(not r["success"] for r in records)
    assert 0 < longer and 0 < failures < 60
    assert f"steps 3 to 3, turns 1 to 5; {longer} of 60 trajectories go on after turn 5, not shown" in page
    assert "all 60 trajectories" in page and f"{failures} failures" in page
    assert not re.search(r"<script[^>]*\ssrc=|<link[^>]*\shref=", page)


def test_the_page_labels_and_counts_the_nodes(tmp_path):
    _, page = draw(tmp_path, RECORDS)
    data = json.loads(re.search(r'Plotly\.newPlot\(\s*"[^"]*",\s*(\[.*?\]),\s*\{"template"', page, re.DOTALL)[1])
    labels = ["a", "b", "a", "b", "end: success", "b", "end: failure", "b", "end: success", "end: failure"]
    assert data[0]["node"]["label"] == [*labels, ""]  # the last is a node that cannot be seen
    assert data[0]["node"]["customdata"][:3] == ["turn 1, a: 3", "turn 1, b: 1", "turn 2, a: 2"]
    assert data[1]["node"]["label"] == ["a", "a", "b", "b", "end: failure", "b", "end: failure", ""]  # aabb and ab
    assert max(data[0]["node"]["x"]) <= 1 and 0 < min(data[0]["node"]["y"]) and max(data[0]["node"]["y"]) <= 1
    assert data[0]["link"]["color"][0] == "rgba(0, 158, 115, 0.45)"  # #009E73
    assert "rollouts" not in tmp_path.name and f"{tmp_path.name}, steps 1 to 1, turns 1 to 4" in page


def test_the_title_counts_those_that_go_on(tmp_path):
    _, page = draw(tmp_path, RECORDS, "--max_turns", "3")  # aab ends with turn 3, aabb does not
    assert "turns 1 to 3; 1 of 4 trajectories go on after turn 3, not shown" in page


@pytest.mark.parametrize("records", [[record("a", True)], [record("ab", True)] * 3, [record(["$x^$"], False)]])
def test_no_failures_one_trajectory_and_odd_names_are_drawn(records, tmp_path):
    picture, page = draw(tmp_path, records)
    assert picture.std() > 0.05 and f"all {len(records)} trajectories" in page


@pytest.mark.parametrize(
    "records, flags, message",
    [
        ([record([None], True)], (), "its task has no action types"),
        ([record("ab", True)], ("--steps", "80-100"), "--steps 80-100: no trajectory; the steps of"),
        ([record("ab", True)], ("--steps", "9-3"), "--steps: '9-3': allowed is FIRST-LAST"),
        ([record("ab", True)], ("--max_turns", "1"), "--max_turns 1: allowed is at least 2"),
        ([record("ab", True)], ("--max", "3"), "unrecognized arguments: --max 3"),
        ([], (), "rollouts.jsonl.gz: there is no such file"),
    ],
)
def test_bad_input_is_one_line(records, flags, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        draw(tmp_path, records, *flags)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and message in error
    assert not list(tmp_path.glob("sankey.*"))
