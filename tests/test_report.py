"""The report: intervals, differences, collapse and verdicts by hand; tables and pictures from summaries alone."""

import json
import math
import re
from pathlib import Path

import pytest
from matplotlib.image import imread

import plots
import report
from lab import HARD, STUDIES, run_name
from report import (
    cell,
    collapse_step,
    differences,
    differences_at_equal_episodes,
    filter_gain,
    is_stable,
    judge_collapse,
    judge_interval,
    looks_of,
    mean_interval,
    short_names,
    success_after,
    write,
)

ROOT = Path(report.__file__).parent


def summary(end, train=(0.5,) * 10, episodes=100, evaluated=None, format_valid=0.9):
    """A run of ten steps that ends at the held-out success `end`; evaluated at steps 0, 5 and 10."""
    steps = range(1, len(train) + 1)
    panel = {"success": end, "score_turn_weighted": 10 * end, "format_valid": format_valid}
    curves = {
        "train/success": dict(zip(steps, train, strict=True)),
        "episodes": dict.fromkeys(steps, episodes),
        "format_valid": dict.fromkeys(steps, format_valid),
        "eval/success": evaluated or {0: 0.25, 5: 0.5, 10: end},
    }
    return {"results": {"after RL": {"valid_seen": panel, "valid_unseen": panel}}, "curves": curves}


def by_seed(*ends, **more):
    return {seed: summary(end, **more) for seed, end in enumerate(ends)}


FALLS = (0.4, 0.5, 0.6, 0.4, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1)


def test_an_interval_is_student_s_over_seeds():
    # values 1, 2, 6: mean 3, variance (4 + 1 + 9) / 2 = 7, half = 4.303 sqrt(7 / 3)
    mean, half = mean_interval([1.0, 2.0, 6.0])
    assert mean == 3 and half == pytest.approx(4.303 * math.sqrt(7 / 3))
    # 0 and 1: sd sqrt(1/2), half = 12.706 sqrt(1/4)
    assert mean_interval([0.0, 1.0]) == (0.5, pytest.approx(6.353))
    assert mean_interval([0.5]) == (0.5, math.inf)
    # twelve seeds: t of ten, 2.262; six 0 and six 1: variance 12 / 4 / 11 = 3 / 11
    assert mean_interval([0.0, 1.0] * 6)[1] == pytest.approx(2.262 * math.sqrt(3 / 11 / 12))
    assert cell([0.0, 1.0]) == "0.500 [-5.853, 6.853]" and cell([0.25]) == "0.250" and cell([]) == ""


def test_differences_are_taken_seed_by_seed():
    a, b = by_seed(0.75, 0.5, 1.0), {2: summary(0.5), 0: summary(0.25), 7: summary(0.0)}
    assert differences(a, b) == [0.5, 0.5]  # seeds 0 and 2
    assert differences(a, b, lambda run: run["results"]["after RL"]["valid_seen"]["success"] ** 2) == [0.5, 0.75]


def test_success_is_linear_between_evaluations_in_episodes():
    run = summary(0.75)  # 0.25 at 0 episodes, 0.5 at 500, 0.75 at 1000
    assert [success_after(run, n) for n in (0, 250, 500, 900, 1000, 5000)] == [0.25, 0.375, 0.5, 0.7, 0.75, 0.75]
    run["curves"]["episodes"] |= {1: 300}  # 0.5 at 700 then
    assert success_after(run, 350) == pytest.approx(0.375)


def test_at_equal_episodes_the_run_that_played_more_is_read_earlier():
    filtered, plain = by_seed(1.0, episodes=200), by_seed(0.75, episodes=100)
    # 1000 episodes are step 5 of the filtered run, 0.5 there
    assert differences_at_equal_episodes(filtered, plain) == [0.5 - 0.75]
    assert differences_at_equal_episodes(plain, filtered) == [0.75 - 0.5]
    assert differences(filtered, plain) == [0.25]


def test_a_collapse_is_a_fall_below_half_the_best_mean_of_three_steps():
    # means of three: .5 .5 .4 .233 (steps 4 to 6) < .25
    assert collapse_step(summary(0.1, train=FALLS)) == 6
    assert collapse_step(summary(0.1, train=(0.4, 0.5, 0.6, 0.4, 0.2, 0.2, 0.35))) is None  # .267 is not below .25
    assert collapse_step(summary(0.1, train=(0.0,) * 10)) is None  # it had nothing to lose
    assert collapse_step(summary(0.1, train=(0.1, 0.9, 0.2, 0.9, 0.1, 0.9, 0.3))) is None  # odd steps say nothing
    assert collapse_step(summary(0.1, train=(0.4, 0.4))) is None


def test_stable_looks_at_the_variance_of_the_last_fifth():
    # two of ten steps; .3 and .52: variance .11^2 = .0121; .3 and .48: .09^2 = .0081
    assert not is_stable(summary(0.1, train=(0.5,) * 8 + (0.3, 0.52)))
    assert is_stable(summary(0.1, train=(0.0, 1.0) * 4 + (0.3, 0.48)))


def test_verdicts_on_intervals_and_on_collapse():
    assert judge_interval([0.1, 0.2, 0.15]) == "reproduced"
    assert judge_interval([-0.1, -0.2, -0.15]) == "not reproduced"
    assert judge_interval([0.5, -0.2]) == judge_interval([0.5]) == judge_interval([]) == "undecided at this size"
    falls, stays = by_seed(0.1, 0.1, train=FALLS), by_seed(0.5, 0.5)
    assert judge_collapse([falls], [stays, stays]) == "reproduced"
    assert judge_collapse([stays], [stays]) == judge_collapse([falls], [falls]) == "not reproduced"
    assert judge_collapse([falls], [stays, falls]) == judge_collapse([falls, stays], [stays]) == "in part"


def test_the_filter_is_judged_by_what_it_adds_to_gigpo_less_what_it_adds_to_grpo():
    runs = by_seed(0.75, 0.5), by_seed(0.5, 0.5, 0.1), by_seed(0.5, 0.25), by_seed(0.625, 0.25)
    values, parts = filter_gain(*runs, "success")
    assert values == [0.25 + 0.125, 0.0] and parts.startswith("GiGPO 0.125 [") and "GRPO -0.062 [" in parts
    assert filter_gain(*runs, "format_valid")[0] == [0.0, 0.0]
    assert filter_gain(*runs[:3], {5: summary(0.5)}, "success") is None


def test_names_leave_out_what_all_share():
    names, shared = short_names(["--method a --x 1 --y 2", "--method b --x 1 --y 2 --y 3", "--method a --x 1 --z 4"])
    assert list(names.values()) == ["a --y 2", "b --y 3", "a --z 4"] and shared == "--x 1"
    assert short_names(["--method a --x 1"]) == ({"--method a --x 1": "a --x 1"}, "")


def test_variants_of_one_method_are_told_apart_and_always_look_the_same():
    looks = [looks_of([f"--method grpo --k {i}" for i in range(n)]) for n in (4, 6)]
    assert len(set(looks[1].values())) == 6 and list(looks[1].values())[:4] == list(looks[0].values())
    solid = [look for look in plots.STYLES.values() if look[1] == "-"]
    assert list(looks[1].values()) == list(dict.fromkeys(solid))[:6]
    assert looks_of(["--method sapo", "--method grpo"])["--method grpo"] == plots.STYLES["grpo"]


def save(folder, variant, runs):
    for seed, run in runs.items():
        path = folder / f"{run_name(variant)}-seed{seed}.json"
        path.write_text(json.dumps({"flags": variant, "seed": seed, "seconds": {"rollout": 1800.0}} | run))


def test_a_report_has_tables_verdicts_pictures_and_failures(tmp_path):
    tiny, hard = STUDIES["tiny"], HARD["tiny"]
    for method, ends in (("grpo", (0.5, 0.25)), ("gigpo", (0.75, 0.5)), ("sampo", (0.75, 0.25))):
        save(tmp_path, f"--method {method}", by_seed(*ends, episodes=200 if method == "sampo" else 100))
    for method in ("grpo", "gspo", "sampo", "sapo", "sapo_sm", "cispo", "cispo_sm"):
        falls = method in ("sapo", "cispo", "cispo_sm")
        save(tmp_path, f"--method {method}{hard}", by_seed(0.5, 0.25, train=FALLS if falls else (0.5,) * 10))
    (tmp_path / "gspo-seed0.json").write_text(json.dumps({"flags": "--method gspo", "seed": 0, "failed": "no room"}))
    (tmp_path / "of_yesterday-seed0.json").write_text(json.dumps({"flags": "--method x", "seed": 0}))
    text = write(tmp_path, tiny, hard).read_text()
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    verdicts = {row[1]: row[2:] for row in rows}
    assert verdicts["SAPO's clip collapses, a clip of sequences does not"] == [
        "reproduced",
        "collapsed: sapo 2 of 2; gspo 0 of 2, sampo 0 of 2",
    ]
    assert verdicts["the sequence mask keeps SAPO from it"][0] == "reproduced"
    assert verdicts["the sequence mask keeps CISPO from it"][0] == "not reproduced"
    # gigpo less grpo is .25 for both seeds; sampo's .25, 0 at equal steps, 0, .25 at equal episodes (.5 at step 5)
    assert verdicts["GiGPO's advantage improves on GRPO's"][0] == "reproduced"
    assert verdicts["SAMPO improves on GRPO, at equal steps"][0] == "undecided at this size"
    sweep = {row[0]: row for row in rows if len(row) == 11 and not row[1].startswith("seeds")}
    assert sweep["`gigpo`"][1:] == [
        *("0, 1", "0.625 [-0.963, 2.213]", "0.625 [-0.963, 2.213]", "6.25", "0.900", "0 of 2", "2 of 2", "`grpo`"),
        *("0.250 [0.250, 0.250]", "0.250 [0.250, 0.250]"),
    ]
    assert verdicts["SAMPO improves on GRPO, at equal episodes"][0] == "undecided at this size"
    assert "6 runs, 3.0 hours of one process." in text and "14 runs, 7.0 hours of one process." in text
    assert "## sweep" in text and "## collapse" in text and "## filter" not in text and "## stabilise" not in text
    assert "Failed: `--method gspo`, seed 0: no room" in text
    assert f"Flags of all: `{hard.strip()}`." in text
    names = {f"{study}{end}.png" for study in ("sweep", "collapse") for end in ("", "-curves")}
    assert {path.name for path in tmp_path.glob("*.png")} == names
    for name in names:
        assert f"]({name})" in text and imread(tmp_path / name)[..., :3].std() > 0.05  # a blank one has 0


def test_a_variant_with_a_seed_less_is_drawn_with_the_seeds_that_all_have(tmp_path):
    save(tmp_path, "--method grpo", by_seed(0.5, 0.25, 0.5))
    save(tmp_path, "--method gspo", by_seed(0.5))
    assert "| `gspo` | 0 | 0.500 | 0.500 |" in write(tmp_path, STUDIES["tiny"], "").read_text()


def test_what_is_committed_is_what_the_summaries_give_and_results_md_quotes_it(tmp_path):
    said, lines = (ROOT / "RESULTS.md").read_text(), set()
    for label in re.findall(r"\]\(results/([^/]+)/report\.md\)", said):
        committed, again = ROOT / "results" / label, tmp_path / label
        again.mkdir()
        for path in committed.glob("*.json"):
            (again / path.name).write_bytes(path.read_bytes())
        text = write(again, STUDIES["tiny"], HARD["tiny"]).read_text()
        assert text == (committed / "report.md").read_text()
        assert {path.name for path in again.glob("*.png")} == {path.name for path in committed.glob("*.png")}
        lines |= set(text.splitlines())
    assert not [line for line in said.splitlines() if line.startswith("|") and line not in lines]
    assert all((ROOT / picture).exists() for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", said))


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no summary of a finished run"):
        write(tmp_path, STUDIES["tiny"], "")
