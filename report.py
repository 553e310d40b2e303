"""What came out of the lab: tables, verdicts on the paper's findings, and figures, from results/<label>/*.json alone.

    python lab.py report            # writes results/<label>/report.md and its pictures

Intervals are Student's, 95 %, over seeds. A difference is taken seed by seed, since runs of a seed share the cloned
policy: at equal steps between the ends of both runs; at equal episodes where the run that played more had played as
many as the other, held-out success being linear between evaluations.
"""

import json
import math
import shlex
from pathlib import Path

import numpy as np

import plots

STABLE = 0.01  # ours: largest variance of success over the last fifth of the steps (Section 3.1, (4), leaves it open)
COLLAPSED = 0.5  # ours: success, a mean of three steps, below this share of its best before
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # Student's t by degrees of freedom, 1 to 9
SCOPES = {  # of the format penalty, as flags of train.py
    "turn_sum": "",
    "episode": " --penalty_scope episode",
    "turn_local": " --penalty_scope turn_local --baseline turn",
}
CURVES = ("train/success", "eval/success", "format_valid", "kl_ref", "grad_norm")
Runs = dict[int, dict]  # summaries of a variant by seed


def mean_interval(values: list[float]) -> tuple[float, float]:
    """Mean and half width of its 95 % interval over seeds; infinite for one seed.

    half = t * sd / sqrt(n),  sd with ddof 1;   beyond ten seeds t is that of ten, a little wide
    """
    if len(values) < 2:
        return float(values[0]), math.inf
    t = T_975[min(len(values) - 1, len(T_975)) - 1]
    return float(np.mean(values)), float(t * np.std(values, ddof=1) / math.sqrt(len(values)))


def cell(values: list[float]) -> str:
    """A mean with its interval as a cell of a table; without it for one seed."""
    if not values:
        return ""
    mean, half = mean_interval(values)
    return f"{mean:.3f}" + (f" [{mean - half:.3f}, {mean + half:.3f}]" if math.isfinite(half) else "")


def final(run: dict, panel: str = "valid_seen", key: str = "success") -> float:
    """A held-out result at the end of a run."""
    return run["results"]["after RL"][panel][key]


def success_after(run: dict, episodes: float) -> float:
    """Held-out success once a run had sampled that many training episodes, linear between evaluations."""
    played = np.cumsum([0, *run["curves"]["episodes"].values()])
    evaluated = run["curves"]["eval/success"]
    return float(np.interp(episodes, played[list(evaluated)], list(evaluated.values())))


def differences(a: Runs, b: Runs, value=final) -> list[float]:
    """value(a) - value(b) of every seed that both have: at equal steps."""
    return [value(a[seed]) - value(b[seed]) for seed in sorted(a.keys() & b.keys())]


def differences_at_equal_episodes(a: Runs, b: Runs) -> list[float]:
    """The same for held-out success, after as many episodes as the run of fewer episodes sampled."""
    result = []
    for seed in sorted(a.keys() & b.keys()):
        budget = min(sum(run[seed]["curves"]["episodes"].values()) for run in (a, b))
        result.append(success_after(a[seed], budget) - success_after(b[seed], budget))
    return result


def collapse_step(run: dict) -> int | None:
    """The step at which success in training, a mean of three steps, is below half its best so far; None if never."""
    steps, success = zip(*run["curves"]["train/success"].items(), strict=True)
    smooth = [np.mean(success[i : i + 3]) for i in range(len(success) - 2)]
    for i, value in enumerate(smooth):
        if value < COLLAPSED * max(smooth[: i + 1]):
            return steps[i + 2]
    return None


def is_stable(run: dict) -> bool:
    """Whether the variance of success in training over the last fifth of the steps is below STABLE."""
    success = list(run["curves"]["train/success"].values())
    return bool(success) and float(np.var(success[-max(2, len(success) // 5) :])) < STABLE


def count(runs: Runs, test) -> str:
    """How many runs pass a test, such as `2 of 3`."""
    return f"{sum(bool(test(run)) for run in runs.values())} of {len(runs)}"


def judge_interval(values: list[float]) -> str:
    """The verdict on a claim that a difference is positive."""
    mean, half = mean_interval(values) if values else (0.0, math.inf)
    return "reproduced" if mean - half > 0 else "not reproduced" if mean + half < 0 else "undecided at this size"


def judge_collapse(collapse: list[Runs], stay: list[Runs]) -> str:
    """The verdict on a claim that all runs of some variants collapse, and none of others does."""
    fell = [collapse_step(run) is not None for runs in collapse for run in runs.values()]
    stayed = [collapse_step(run) is None for runs in stay for run in runs.values()]
    if all(fell) and all(stayed):
        return "reproduced"
    return "not reproduced" if not any(fell) or not any(stayed) else "in part"


def read(folder: Path, studies: dict) -> tuple[dict[str, Runs], list[dict]]:
    """Summaries by flags of the variant and seed, and those of failed runs. ValueError where there is none."""
    known = {variant for study in studies.values() for variant in study}
    found, failed = {}, []
    for path in sorted(folder.glob("*-seed*.json")):
        run = json.loads(path.read_text())
        if "failed" in run:
            failed.append(run)
        elif run["flags"] in known:
            by_step = {key: {int(step): v for step, v in curve.items()} for key, curve in run["curves"].items()}
            found.setdefault(run["flags"], {})[run["seed"]] = run | {"curves": by_step}
    if not found:
        raise ValueError(f"--results: no summary of a finished run in {folder}; run a study first")
    return {flags: dict(sorted(runs.items())) for flags, runs in found.items()}, failed


def short_names(variants: list[str]) -> tuple[dict[str, str], str]:
    """Variants without --method and without the flags that all of them share, and those flags."""
    flags = {v: dict(zip(*[iter(shlex.split(v))] * 2, strict=True)) for v in variants}  # the last of a flag counts
    shared = dict(set.intersection(*(set(own.items()) for own in flags.values()))) if len(variants) > 1 else {}
    names = {v: " ".join(f"{k} {x}" for k, x in own.items() if k not in shared) for v, own in flags.items()}
    named = {v: name.replace("--method ", "") or "as it is" for v, name in names.items()}
    return named, " ".join(f"{k} {x}" for k, x in flags[variants[0]].items() if k in shared)


def table(study: dict, found: dict[str, Runs]) -> list[str]:
    """A study as a table in Markdown, a line a variant that has a run."""
    shown = [variant for variant in study if variant in found]
    names, shared = short_names(shown)
    head = "variant | seeds | success, valid_seen | valid_unseen | score | format | collapsed | stable"
    head += " | less | at equal steps | at equal episodes"
    took = [sum(run["seconds"].values()) / 3600 for variant in shown for run in found[variant].values()]
    lines = [f"Flags of all: `{shared}`.\n"] if shared else []
    lines.append(f"{len(took)} runs, {sum(took):.1f} hours of one process.\n")
    lines += [f"| {head} |", "|---" * (head.count("|") + 1) + "|"]
    for variant in shown:
        runs, base = found[variant], found.get(study[variant], {})
        row = [f"`{names[variant]}`", ", ".join(map(str, runs))]
        row += [cell([final(run, panel) for run in runs.values()]) for panel in ("valid_seen", "valid_unseen")]
        for key, digits in (("score_turn_weighted", 2), ("format_valid", 3)):
            row.append(f"{np.mean([final(run, key=key) for run in runs.values()]):.{digits}f}")
        row += [count(runs, collapse_step), count(runs, is_stable), f"`{names[study[variant]]}`" if base else ""]
        row += [cell(differences(runs, base)), cell(differences_at_equal_episodes(runs, base))]
        lines.append(f"| {' | '.join(row)} |")
    return lines


def verdicts(found: dict[str, Runs], hard: str) -> list[str]:
    """Findings 1 to 4 and SAMPO over GRPO as a table in Markdown. `hard`: flags of the study collapse."""

    def of(method: str, more: str = "") -> Runs:
        return found.get(f"--method {method}{more}", {})

    rows = []
    hard_runs = {m: of(m, hard) for m in ("sapo", "cispo", "gspo", "sampo", "sapo_sm", "cispo_sm")}
    if all(hard_runs.values()):
        said = {m: f"{m} {count(runs, collapse_step)}" for m, runs in hard_runs.items()}
        sequence = [hard_runs["gspo"], hard_runs["sampo"]]
        for m in ("sapo", "cispo"):
            evidence = f"collapsed: {said[m]}; {said['gspo']}, {said['sampo']}"
            verdict = judge_collapse([hard_runs[m]], sequence)
            rows.append(("1", f"{m.upper()}'s clip collapses, a clip of sequences does not", verdict, evidence))
        for m in ("sapo", "cispo"):
            evidence = f"collapsed: {said[m]}; {said[m + '_sm']}"
            verdict = judge_collapse([hard_runs[m]], [hard_runs[f"{m}_sm"]])
            rows.append(("2", f"the sequence mask keeps {m.upper()} from it", verdict, evidence))
    claims = [("3", "GiGPO's advantage improves on GRPO's", "gigpo", differences)]
    claims.append(("", "SAMPO improves on GRPO, at equal steps", "sampo", differences))
    claims.append(("", "SAMPO improves on GRPO, at equal episodes", "sampo", differences_at_equal_episodes))
    for finding, claim, method, difference in claims:
        if values := difference(of(method), of("grpo")):
            evidence = f"{cell(values)}, n = {len(values)}"
            rows.append((finding, claim, judge_interval(values), evidence))
    for scope, more in SCOPES.items():
        for key, claim in (("success", "helps GiGPO more than GRPO"), ("format_valid", "costs GRPO more format")):
            gain = filter_gain(*(of(m, more) for m in ("dapo_gigpo", "gigpo", "dapo", "grpo")), key)
            if gain:
                values, parts = gain
                evidence = f"{cell(values)}, n = {len(values)}; {parts}"
                rows.append(("4", f"the filter {claim} (penalty: {scope})", judge_interval(values), evidence))
    lines = ["| finding | claim | verdict | evidence |", "|---|---|---|---|"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def filter_gain(dapo_gigpo: Runs, gigpo: Runs, dapo: Runs, grpo: Runs, key: str) -> tuple[list[float], str] | None:
    """(dapo_gigpo - gigpo) - (dapo - grpo) of every seed that all have, and both parts in words; None without one."""
    seeds = sorted(dapo_gigpo.keys() & gigpo.keys() & dapo.keys() & grpo.keys())
    if not seeds:
        return None

    def added(a: Runs, b: Runs) -> list[float]:
        return [final(a[seed], key=key) - final(b[seed], key=key) for seed in seeds]

    to_gigpo, to_grpo = added(dapo_gigpo, gigpo), added(dapo, grpo)
    parts = f"GiGPO {cell(to_gigpo)}, GRPO {cell(to_grpo)}"
    return [a - b for a, b in zip(to_gigpo, to_grpo, strict=True)], parts


def looks_of(variants: list[str]) -> dict[str, tuple[str, str]]:
    """Colour and dash: a method's own where no method comes twice, else one after the other."""
    methods = [shlex.split(variant)[1] for variant in variants]
    if len(set(methods)) == len(methods):
        return {v: plots.STYLES.get(m, plots.OTHER) for v, m in zip(variants, methods, strict=True)}
    looks = sorted(dict.fromkeys(plots.STYLES.values()), key=lambda look: look[1] != "-")
    return {variant: looks[i % len(looks)] for i, variant in enumerate(variants)}


def draw_curves(study: dict, found: dict[str, Runs], path: Path) -> None:
    """CURVES over steps: mean and range over the seeds that all variants have."""
    shown = [variant for variant in study if variant in found]
    seeds, looks, (names, _) = set.intersection(*(set(found[v]) for v in shown)), looks_of(shown), short_names(shown)
    groups = []
    for variant in shown:
        curves = [found[variant][seed]["curves"] for seed in sorted(seeds or found[variant])]
        steps = [sorted({step for curve in run.values() for step in curve}) for run in curves]
        runs = [
            [{"step": step} | {key: curve.get(step) for key, curve in run.items()} for step in known]
            for run, known in zip(curves, steps, strict=True)
        ]
        groups.append(plots.Group(names[variant], *looks[variant], runs))
    with plots.plt.rc_context(plots.LOOK):
        figure = plots.draw_figure(groups, CURVES)
        figure.savefig(path, dpi=80)
    plots.plt.close(figure)


def draw_ends(study: dict, found: dict[str, Runs], path: Path) -> None:
    """Held-out success and format at the end, a dot a seed; differences with intervals at equal steps and episodes."""
    shown = [variant for variant in study if variant in found]
    names, looks = short_names(shown)[0], looks_of(shown)
    with plots.plt.rc_context(plots.LOOK | {"font.size": 12, "axes.titlesize": 12}):
        size = {"figsize": (15, 1.6 + 0.42 * len(shown)), "sharey": True, "width_ratios": (3, 2, 3)}
        figure, (left, middle, right) = plots.plt.subplots(1, 3, **size)
        for row, variant in enumerate(shown):
            runs, base, color = found[variant], found.get(study[variant], {}), looks[variant][0]
            for axis, key in ((left, "success"), (middle, "format_valid")):
                values = [final(run, key=key) for run in runs.values()]
                axis.plot(values, [row] * len(values), "o", color=color, ms=6, alpha=0.6)
                axis.plot([np.mean(values)] * 2, [row - 0.3, row + 0.3], color=color, lw=2.4)
            both = (differences(runs, base), differences_at_equal_episodes(runs, base))
            for values, marker, shift in zip(both, "os", (-0.14, 0.14), strict=True):
                if len(values) > 1:
                    mean, half = mean_interval(values)
                    right.errorbar(mean, row + shift, xerr=half, color=color, marker=marker, ms=6, lw=1.8, capsize=3)
        left.set(title="held-out success, a dot a seed", yticks=range(len(shown)), yticklabels=list(names.values()))
        left.invert_yaxis()
        middle.set(title="turns in the format")
        right.axvline(0, color="black", lw=1)
        right.set(title="difference at equal ● steps, ■ episodes")
        for axis in (left, middle, right):
            axis.grid(alpha=0.3)
        figure.savefig(path, dpi=80)
    plots.plt.close(figure)


def write(folder: Path, studies: dict, hard: str) -> Path:
    """Write report.md and the pictures of every study that has a run of its own; the path of the former."""
    found, failed = read(folder, studies)
    lines = [f"# The study on {folder.name}", "", *verdicts(found, hard), ""]
    for name, study in studies.items():
        elsewhere = {variant for other, variants in studies.items() if other != name for variant in variants}
        if name != "sweep" and not found.keys() & (study.keys() - elsewhere):
            continue
        draw_ends(study, found, folder / f"{name}.png")
        draw_curves(study, found, folder / f"{name}-curves.png")
        lines += [f"## {name}", "", *table(study, found), "", f"![{name}]({name}.png)"]
        lines += [f"![{name}, over steps]({name}-curves.png)", ""]
    lines += [f"Failed: `{run['flags']}`, seed {run['seed']}: {run['failed']}" for run in failed]
    (folder / "report.md").write_text("\n".join(lines).rstrip() + "\n")
    return folder / "report.md"
