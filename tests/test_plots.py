"""Pictures of runs: averages and stacks by hand, what belongs to one line, unfinished and empty runs, colours."""

import json
from itertools import combinations

import numpy as np
import pytest
from matplotlib.image import imread

from grpo import METHODS
from plots import (
    OTHER,
    OUTSIDE,
    PARTS,
    STYLES,
    Group,
    choose_scale,
    draw_figure,
    draw_shares,
    group_runs,
    main,
    mean_over_runs,
    plot_curves,
    plt,
    read_metrics,
    values_of,
)

UPDATED = ("kl_old", "kl_ref", "grad_norm", "entropy", "clip_frac", *OUTSIDE, *(f"kl_share/{part}" for part in PARTS))


def step(number, success=0.5, update=0.125):
    """Metrics of a step; every eighth of the KL belongs to another part."""
    return {"step": number, "train/success": success, "format_valid": 0.9} | dict.fromkeys(UPDATED, update)


def evaluated(number, success):
    return {"step": number, "eval/success": success, "eval/success_low": success - 0.1, "eval/success_high": 1.0}


def write_run(folder, metrics, cut="", **config):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"method": "sampo", "task": "sokoban", "seed": 0} | config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics) + cut)
    return folder


FINISHED = [evaluated(0, 0.4), *(step(i, success=i / 10) for i in range(1, 8)), step(8) | evaluated(8, 0.9)]
RUNS = {
    "finished": (FINISHED, ""),
    "live, its last line cut": (FINISHED[:4], '{"step": 4, "train/succ'),
    "live, before the first update": ([evaluated(0, 0.4)], ""),
    "one step": ([step(1)], ""),
    "never updated": ([step(i, update=None) for i in range(1, 5)], ""),
    "all null": ([dict.fromkeys(step(1)) | {"step": i} for i in range(3)], ""),
    "zeros": ([step(i, success=0.0, update=0.0) for i in range(1, 5)], ""),
    "of an older version": ([{"step": i, "train/success": 0.5, "kl_ref": 0.1} for i in range(3)], ""),
}


def check_picture(path):
    picture = imread(path)[..., :3]
    assert 400 < picture.shape[0] < 1200 and 900 < picture.shape[1] < 2500
    assert picture.std() > 0.05  # a blank one has 0


@pytest.mark.parametrize("name", ["finished", "live, its last line cut", "all null"])
def test_a_finished_a_live_and_an_empty_run_give_pictures(name, tmp_path):
    run = write_run(tmp_path / "run", *RUNS[name])
    paths = main([str(run), "--output", str(tmp_path / "figures")])
    assert sorted(path.name for path in paths) == ["figure1.png", "figure10.png", "figure2.png", "figure3.png"]
    for path in [*paths, plot_curves(run, name)]:
        check_picture(path)
    assert not plt.get_fignums()


def test_runs_in_every_state_share_a_picture(tmp_path):
    runs = [write_run(tmp_path / m, *RUNS[state], method=m) for m, state in zip(METHODS, RUNS, strict=False)]
    for path in main([*map(str, runs), "--output", str(tmp_path / "figures")]):
        check_picture(path)


def test_the_mean_ends_with_the_shortest_run_and_skips_missing_values():
    # step 1: .2, .4 -> .3; step 2: only the second run has a value; step 3: .8, .2 -> .5; step 4: the second ended
    runs = [{1: 0.2, 3: 0.8, 4: 0.9}, {1: 0.4, 2: 0.6, 3: 0.2}, {}]
    steps, mean, low, high = mean_over_runs(runs)
    assert (steps, low, high) == ([1, 2, 3], [0.2, 0.6, 0.2], [0.4, 0.6, 0.8])
    assert mean == pytest.approx([0.3, 0.6, 0.5])
    assert mean_over_runs([{}, {}]) == ([], [], [], [])


def test_values_leave_out_nulls_and_what_is_not_finite():
    metrics = [{"step": 0}, {"step": 1, "loss": None}, {"step": 2, "loss": 0.0}, {"step": 3, "loss": float("inf")}]
    assert values_of([*metrics, {"step": 4, "loss": float("nan")}], "loss") == {2: 0.0}


def test_a_cut_last_line_is_left_out(tmp_path):
    run = write_run(tmp_path / "run", [{"step": 0}, {"step": 1}], cut='{"step": 2}')
    assert read_metrics(run / "metrics.jsonl") == [{"step": 0}, {"step": 1}]


def test_lines_show_the_mean_the_range_and_how_a_longer_run_goes_on():
    short, long = [step(i, success=0.2) for i in (1, 2)], [step(i, success=i / 10) for i in (1, 2, 3, 4)]
    figure = draw_figure([Group("sampo (2 runs)", "#0072B2", "-", [short, long])], ("train/success",))
    panel, legend = figure.axes
    mean, rest = panel.lines
    assert mean.get_xdata().tolist() == [1, 2] and mean.get_ydata().tolist() == pytest.approx([0.15, 0.2])
    assert rest.get_xdata().tolist() == [2, 3, 4] and rest.get_ydata().tolist() == [0.2, 0.3, 0.4]
    band = panel.collections[0].get_paths()[0].vertices  # step 1: from .1 (long) to .2 (short)
    assert (band[band[:, 0] == 1, 1].min(), band[band[:, 0] == 1, 1].max()) == (0.1, 0.2)
    assert [text.get_text() for text in legend.get_legend().texts] == ["sampo (2 runs)"]
    assert "band: min to max" in legend.get_legend().get_title().get_text()
    plt.close(figure)


def test_a_panel_stays_empty_where_no_run_has_the_metric():
    figure = draw_figure([Group("sampo", "#0072B2", "-", [[evaluated(0, 0.5)]])], ("train/success", "eval/success"))
    assert [axis.has_data() for axis in figure.axes[:2]] == [False, True]  # main writes "no data" into the first
    assert figure.axes[1].lines[0].get_marker() == "o"
    plt.close(figure)


def test_seeds_are_averaged_and_other_differences_are_told_apart_by_folder(tmp_path):
    def run(name, **config):
        return write_run(tmp_path / name, [step(1)], name=name, **config)

    seeds = [run("a", seed=0), run("b", seed=1), run("c", method="grpo")]
    assert [(g.label, len(g.runs)) for g in group_runs([*seeds, seeds[0]])] == [("sampo (2 runs)", 2), ("grpo", 1)]
    groups = group_runs([*seeds, run("d", seed=0, clip_low=0.1), run("e", seed=1, clip_low=0.1)])
    parent = tmp_path.name
    assert [g.label for g in groups] == [f"{parent}/a (2 runs)", "grpo", f"{parent}/d (2 runs)"]
    assert len({(g.color, g.dash) for g in groups}) == 3 and groups[0].color == STYLES["sampo"][0]
    other_task = group_runs([seeds[0], run("f", task="webshop")])
    assert [g.label for g in other_task] == ["sampo, sokoban", "sampo, webshop"]
    assert other_task[0].color != other_task[1].color


@pytest.mark.parametrize(
    "values, linear", [([1.0, 2, 20], None), ([1.0, 2, 3, 4, 500], 1.0), ([0.0] * 9 + [-0.02, 0.03, 0.04, -9], 0.01)]
)
def test_the_scale_is_logarithmic_beyond_thirty_times_the_median(values, linear):
    # medians of sizes above 0: 2, 20 / 2 < 30; 3, 500 / 3 > 30; .035, 9 / .035 > 30; linear up to a power of ten below
    figure, axis = plt.subplots()
    axis.plot(range(len(values)), values)
    choose_scale(axis)
    assert axis.get_yscale() == ("symlog" if linear else "linear")
    assert getattr(axis.yaxis.get_transform(), "linthresh", None) == linear
    plt.close(figure)


def test_shares_are_stacked_and_a_step_without_update_is_empty():
    # outside_low .1, nothing, .3; outside_high .2, nothing, .1: tops .1 / 0 / .3 and .3 / 0 / .4
    metrics = [
        step(3) | {"outside_low": 0.1, "outside_high": 0.2},
        step(4, update=None),
        step(5) | {"outside_low": 0.3, "outside_high": 0.1},
    ]
    figure = draw_shares([Group("sapo", "#E69F00", "-", [metrics])])
    (low, high), parts = figure.axes[0].patches, figure.axes[1].patches
    assert low.get_data().edges.tolist() == [2.5, 3.5, 4.5, 5.5]
    assert low.get_data().values.tolist() == [0.1, 0, 0.3]
    assert high.get_data().values.tolist() == pytest.approx([0.3, 0, 0.4])
    assert high.get_data().baseline.tolist() == low.get_data().values.tolist()
    assert len(parts) == 8 and parts[-1].get_data().values.tolist() == [1, 0, 1]
    plt.close(figure)


def test_figure_3_has_room_for_four_and_says_what_it_leaves_out(capsys):
    figure = draw_shares(
        [Group(name, *STYLES[name], [[step(1)]]) for name in ("grpo", "sapo", "cispo", "gspo", "dapo")]
    )
    assert [axis.get_title() for axis in figure.axes[:4]] == ["grpo", "sapo", "cispo", "gspo"]
    assert capsys.readouterr().err == "figure3.png has room for four: without dapo\n"
    plt.close(figure)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda folder: None, "allowed is a run folder of train.py, with its config.json"),
        (lambda folder: (write_run(folder, []) / "metrics.jsonl").unlink(), "with its metrics.jsonl"),
        (lambda folder: write_run(folder, [], cut="no JSON\n"), "is not JSON"),
    ],
)
def test_a_folder_that_is_no_run_is_named_in_one_line(make, message, tmp_path, capsys):
    make(tmp_path / "bad")
    good = write_run(tmp_path / "good", [step(1)])
    with pytest.raises(SystemExit) as stop:
        main([str(good), str(tmp_path / "bad"), "--output", str(tmp_path / "figures")])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1
    assert f"{tmp_path / 'bad'}: " in error and message in error
    assert not (tmp_path / "figures").exists()


def test_flags_are_not_abbreviated(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["run", "--out", "figures"])
    assert stop.value.code == 2 and "unrecognized arguments: --out" in capsys.readouterr().err


# Machado et al. (2009), severity 1, on linear RGB
VISION = {
    "normal": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protan": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deutan": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
}


def lab(color, vision):
    """CIELAB of a colour as seen with a kind of vision."""
    rgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    rgb = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    rgb = np.clip(VISION[vision] @ rgb, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x, y, z = (np.cbrt(v) if v > 0.008856 else 7.787 * v + 16 / 116 for v in to_xyz @ rgb / [0.9505, 1, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISION)
def test_colours_differ_for_the_colour_blind_too(vision):
    # 2.3 is a difference that is just noticed; the 15 asked for here is plain in a thin line
    for colors in (
        {color for color, _ in STYLES.values()},
        {c for c, _ in PARTS.values()},
        {c for c, _ in OUTSIDE.values()},
    ):
        for one, other in combinations(sorted(colors), 2):
            assert np.linalg.norm(lab(one, vision) - lab(other, vision)) > 15, (one, other)


def test_a_run_without_a_step_is_left_out_with_a_word_and_alone_refused(tmp_path, capsys):
    begun, going = write_run(tmp_path / "begun", []), write_run(tmp_path / "going", [step(1)])
    assert [g.label for g in group_runs([begun, going])] == ["sampo"]
    assert f"{begun}: no step yet; left out" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no step yet in any of them"):
        group_runs([begun])


def test_a_new_method_is_drawn_in_grey_until_it_has_a_look(tmp_path):
    write_run(tmp_path / "new", [step(1)], method="magic")
    (group,) = group_runs([tmp_path / "new"])
    assert (group.label, group.color, group.dash) == ("magic", *OTHER)


def test_every_method_has_a_look_of_its_own_and_masks_keep_their_parents_colour():
    assert STYLES.keys() <= METHODS.keys()
    assert len({*STYLES.values(), OTHER}) == len(STYLES) + 1
    for name in STYLES:
        if name.endswith("_sm"):
            assert STYLES[name][0] == STYLES[name.removesuffix("_sm")][0]
