"""Pictures from metrics.jsonl: the curves of one run, and the paper's figures from any set of runs, finished or not.

    python plots.py runs/* --output figures

writes figure1.png (success), figure2.png (stability), figure3.png (which tokens and sequences move the policy away)
and figure10.png (format). A line is a method: the mean over its runs up to the end of the shortest one, with a band
from their smallest to their largest value; a longer run goes on as a thin line. Runs of a method that differ in more
than the seed are not averaged: they are named by folder, and all but the first borrow looks of methods not drawn.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

PANELS = ("train/success", "format_valid", "kl_ref", "grad_norm", "entropy", "clip_frac")
TRAINING, HELD_OUT = "#0072B2", "#D55E00"

# Colour and dash of each method. The colours are those of Okabe and Ito (2008) but for yellow, which is wine here.
STYLES = {
    "grpo": ("#000000", "-"),
    "grpo_st": ("#000000", ":"),
    "grpo_sm": ("#000000", "--"),
    "sapo": ("#E69F00", "-"),
    "sapo_sm": ("#E69F00", "--"),
    "cispo": ("#D55E00", "-"),
    "cispo_sm": ("#D55E00", "--"),
    "gspo": ("#56B4E9", "-"),
    "gigpo": ("#009E73", "-"),
    "empg": ("#882255", "-"),
    "dapo": ("#CC79A7", "-"),
    "dapo_gigpo": ("#CC79A7", "-."),
    "sampo": ("#0072B2", "-"),
    "sampo_released": ("#0072B2", "-."),
}
OTHER = ("#7F7F7F", "-")  # a method of your own, until it has a line above
# Settings that change no curve's meaning.
BOOKKEEPING = set("seed name output overwrite resume steps max_minutes eval_every save_every record_groups".split())
BOOKKEEPING |= {"log_with", "stop_on_collapse"}
FIGURES = {
    1: ("train/success", "eval/success"),
    2: ("train/success", "kl_old", "kl_ref", "grad_norm", "format_valid"),
    10: ("format_valid",),
}
TITLES = {
    "train/success": "success in training, before the filter",
    "eval/success": "success on held-out tasks",
    "kl_old": "off-policy KL",
    "kl_ref": "KL to the reference",
    "grad_norm": "gradient norm",
    "format_valid": "share of turns in the required format",
}
OUTSIDE = {"outside_low": ("#D55E00", "A < 0, ratio < 0.8"), "outside_high": ("#0072B2", "A > 0, ratio > 1.2")}
PARTS = {
    "neg_down_sure": ("#A34700", "A ≤ 0, ratio ≤ 1, low entropy"),
    "neg_down_unsure": ("#EE9A63", "A ≤ 0, ratio ≤ 1, high entropy"),
    "neg_up_sure": ("#D9A400", "A ≤ 0, ratio > 1, low entropy"),
    "neg_up_unsure": ("#F6DC8C", "A ≤ 0, ratio > 1, high entropy"),
    "pos_down_sure": ("#0072B2", "A > 0, ratio ≤ 1, low entropy"),
    "pos_down_unsure": ("#8CC4E8", "A > 0, ratio ≤ 1, high entropy"),
    "pos_up_sure": ("#007A59", "A > 0, ratio > 1, low entropy"),
    "pos_up_unsure": ("#86D3BC", "A > 0, ratio > 1, high entropy"),
}
LOOK = {"font.size": 15, "axes.titlesize": 16, "legend.handlelength": 2.6, "figure.constrained_layout.use": True}


class Parser(argparse.ArgumentParser):
    """ArgumentParser whose errors are one line and exit code 2."""

    def error(self, message: str):
        """Print the message and leave with code 2."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")


class Group(NamedTuple):
    """Runs that differ by seed alone: one line in every picture."""

    label: str
    color: str
    dash: str
    runs: list[list[dict]]  # the metrics of each run


def read_metrics(path: Path) -> list[dict]:
    """The objects of a metrics.jsonl; a last line that was cut is left out."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def values_of(metrics: list[dict], key: str) -> dict[int, float]:
    """{step: value} where the metric has a finite value."""
    known = [(m["step"], m[key]) for m in metrics if m.get(key) is not None]
    return {step: value for step, value in known if math.isfinite(value)}


def plot_curves(folder: Path, title: str) -> Path:
    """Draw the PANELS of a run over its steps, and held-out success with its interval, to folder/curves.png."""
    metrics = read_metrics(folder / "metrics.jsonl")
    figure, axes = plt.subplots(2, 3, figsize=(12, 6), layout="constrained")
    for axis, key in zip(axes.flat, PANELS, strict=True):
        values = values_of(metrics, key)
        axis.plot(list(values), list(values.values()), color=TRAINING, lw=1.6, label="training")
        axis.set(title=key.removeprefix("train/"), xlabel="step")
        axis.grid(alpha=0.3)
    values, low, high = (values_of(metrics, f"eval/success{end}") for end in ("", "_low", "_high"))
    label, success = "held out, with 95 % interval", axes[0, 0]
    success.plot(list(values), list(values.values()), color=HELD_OUT, marker="o", ms=4, lw=1.6, label=label)
    success.fill_between(list(values), list(low.values()), list(high.values()), color=HELD_OUT, alpha=0.2, lw=0)
    success.set_ylim(0, 1)
    success.legend(loc="lower right")
    figure.suptitle(title)
    figure.savefig(folder / "curves.png", dpi=110)
    plt.close(figure)
    return folder / "curves.png"


def mean_over_runs(runs: list[dict[int, float]]) -> tuple[list[int], list[float], list[float], list[float]]:
    """Steps, mean, smallest and largest value of runs {step: value}, up to the last step of the shortest run.

    A run without any value does not count; one without a value at a step is left out of that step alone.
    """
    runs = [run for run in runs if run]
    end = min((max(run) for run in runs), default=-1)
    steps = sorted({step for run in runs for step in run if step <= end})
    values = [[run[step] for run in runs if step in run] for step in steps]
    return steps, [sum(v) / len(v) for v in values], [min(v) for v in values], [max(v) for v in values]


def read_run(folder: Path) -> tuple[dict, list[dict]]:
    """Settings and metrics of a run folder, perhaps without a step so far. ValueError that names it if it is none."""
    for name in ("config.json", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder}: allowed is a run folder of train.py, with its {name}")
    try:
        config, metrics = json.loads((folder / "config.json").read_text()), read_metrics(folder / "metrics.jsonl")
    except json.JSONDecodeError as error:
        raise ValueError(f"{folder}: config.json or metrics.jsonl is not JSON: {error}") from error
    if "method" not in config or not all(isinstance(line, dict) for line in metrics):
        raise ValueError(f"{folder}: its config.json is not that of a run of train.py")
    return config, metrics


def group_runs(folders: list[Path]) -> list[Group]:
    """The runs that belong to one line, in the order given; labels as the head of this file says."""
    members = {}
    for folder in dict.fromkeys(folders):
        config, metrics = read_run(folder)
        if not metrics:
            print(f"{folder}: no step yet; left out", file=sys.stderr)
            continue
        settings = json.dumps({name: config[name] for name in config.keys() - BOOKKEEPING}, sort_keys=True)
        members.setdefault((config["method"], config.get("task"), settings), []).append((folder, metrics))
    if not members:
        raise ValueError(f"{', '.join(map(str, folders))}: no step yet in any of them")
    methods, tasks = {method for method, _, _ in members}, {task for _, task, _ in members}
    spare = sorted((STYLES[method] for method in STYLES.keys() - methods), key=lambda look: (look[1] == "-", look))
    groups, drawn = [], set()
    for key, runs in members.items():
        method, task, _ = key
        alone = sum(other[:2] == key[:2] for other in members) == 1
        label = "/".join(runs[0][0].parts[-2:]) if not alone else method if len(tasks) == 1 else f"{method}, {task}"
        label += f" ({len(runs)} runs)" if len(runs) > 1 else ""
        look = spare.pop() if method in drawn and spare else STYLES.get(method, OTHER)
        drawn.add(method)
        groups.append(Group(label, *look, [metrics for _, metrics in runs]))
    return groups


def choose_scale(axis) -> None:
    """Logarithmic above the median size of the values where the largest is 30 times that; zeros and signs stay."""
    sizes = [abs(value) for line in axis.lines for value in line.get_ydata() if value]
    if sizes and max(sizes) > 30 * np.median(sizes):
        linear = 10.0 ** math.floor(math.log10(np.median(sizes)))
        axis.set_yscale("symlog", linthresh=linear)
        axis.set_ylabel(f"logarithmic above {linear:g}", fontsize=12)


def draw_lines(axis, groups: list[Group], key: str) -> None:
    """Mean and range of a metric over steps, a line a group."""
    axis.set(title=TITLES[key], xlabel="step")
    axis.grid(alpha=0.3)
    for group in groups:
        look = {"color": group.color, "ls": group.dash}
        runs = [run for metrics in group.runs if (run := values_of(metrics, key))]
        steps, mean, low, high = mean_over_runs(runs)
        if not steps:
            continue
        marker = "o" if key == "eval/success" or len(steps) == 1 else ""
        axis.plot(steps, mean, lw=2.4, marker=marker, ms=7, **look)
        if len(runs) > 1:
            axis.fill_between(steps, low, high, color=group.color, alpha=min(0.18, 0.8 / len(groups)), lw=0)
        for run in runs:
            rest = {step: value for step, value in run.items() if step >= steps[-1]}
            if len(rest) > 1:
                axis.plot(list(rest), list(rest.values()), lw=1, alpha=0.7, **look)
    if key.endswith("/success"):
        axis.set_ylim(-0.02, 1.02)
    elif key == "format_valid":
        axis.set_ylim(top=1.01)
    else:
        choose_scale(axis)


def draw_figure(groups: list[Group], keys: tuple[str, ...]):
    """A panel a metric over steps, and the legend where the next panel would be."""
    rows, columns = math.ceil((len(keys) + 1) / 3), min(len(keys) + 1, 3)
    widths = [5.6] * columns if rows > 1 else [5.6] * (columns - 1) + [3.4]  # a column of the legend alone is narrow
    shape = {"figsize": (sum(widths), 4.6 * rows), "width_ratios": widths}
    figure, axes = plt.subplots(rows, columns, squeeze=False, **shape)
    for axis, key in zip(axes.flat, keys, strict=False):
        draw_lines(axis, groups, key)
    handles = [plt.Line2D([], [], color=g.color, ls=g.dash, lw=2.4, label=g.label) for g in groups]
    note = "line: mean of the runs\nband: min to max" if any(len(group.runs) > 1 for group in groups) else None
    axes[-1, -1].axis("off")
    axes[-1, -1].legend(handles=handles, title=note, loc="center left", labelspacing=0.3)
    return figure


def draw_stack(axis, group: Group, prefix: str, looks: dict[str, tuple[str, str]]) -> None:
    """Shares on top of each other, mean over the runs, a step wide; a step without an update stays white."""
    shares = [mean_over_runs([values_of(run, prefix + name) for run in group.runs]) for name in looks]
    steps = sorted({step for known, *_ in shares for step in known})
    if not steps:
        return
    edges = np.arange(steps[0], steps[-1] + 2) - 0.5
    bottom = np.zeros(len(edges) - 1)
    for (color, _), (known, mean, *_) in zip(looks.values(), shares, strict=True):
        top = bottom.copy()
        top[np.array(known, int) - steps[0]] += mean
        axis.stairs(top, edges, baseline=bottom, fill=True, color=color, lw=0)
        bottom = top


def draw_shares(groups: list[Group]):
    """Figure 3: tokens outside the clipping range, and the KL to the reference by part, for up to four groups."""
    shown = groups[:4]
    if len(groups) > 4:
        print(f"figure3.png has room for four: without {', '.join(g.label for g in groups[4:])}", file=sys.stderr)
    size = (5 + 4.2 * len(shown), 8.6)
    figure, axes = plt.subplots(2, len(shown), figsize=size, squeeze=False, sharex=True, sharey="row")
    for (above, below), group in zip(axes.T, shown, strict=True):
        draw_stack(above, group, "", OUTSIDE)
        draw_stack(below, group, "kl_share/", PARTS)
        above.set_title(group.label)
        below.set_xlabel("step")
    axes[0, 0].set(ylabel="share of tokens outside", ylim=(0, None))
    axes[1, 0].set(ylabel="share of the KL to the reference", ylim=(0, 1))
    for axis, looks in ((axes[0, -1], OUTSIDE), (axes[1, -1], PARTS)):
        handles = [plt.Rectangle((0, 0), 1, 1, color=color, label=text) for color, text in reversed(looks.values())]
        axis.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.02, 1.0), handlelength=1.2)
    return figure


def main(argv: list[str] | None = None) -> list[Path]:
    """Draw the paper's figures from run folders; a bad one ends the program with one line and exit code 2."""
    parser = Parser(allow_abbrev=False, description="The paper's figures from run folders, finished or not.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder of train.py")
    parser.add_argument("--output", type=Path, default=Path("figures"), help="folder of the pictures")
    args = parser.parse_args(argv)
    try:
        groups = group_runs(args.runs)
        args.output.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    paths = []
    for number in (*FIGURES, 3):
        with plt.rc_context(LOOK):
            figure = draw_shares(groups) if number == 3 else draw_figure(groups, FIGURES[number])
            paths.append(args.output / f"figure{number}.png")
            for axis in figure.axes:
                axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
                if axis.axison and not axis.has_data():
                    axis.text(0.5, 0.5, "no data", transform=axis.transAxes, ha="center", va="center")
            figure.savefig(paths[-1], dpi=110)
        plt.close(figure)
        print(paths[-1])
    return paths


if __name__ == "__main__":
    main()
