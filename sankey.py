"""Sankey diagrams of action types by turn, from the recorded rollouts of a run (the paper's Appendix F).

    python sankey.py runs/sokoban-sampo-seed0 --steps 80-100

writes sankey.html (interactive, complete in itself) and sankey.png. A column is a turn, the height of a node is how
often that type of action was taken in that turn, a link is a transition to the next turn; an episode's end is a node
of the turn after its last. Above: all trajectories, links by outcome. Below: failures alone, links by action type.
"""

import argparse
import re
from collections import Counter
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from plots import LOOK, Parser, plt
from records import read_records

OUTCOMES = {"success": "#009E73", "failure": "#D55E00"}  # blue-green and orange: apart for the colour-blind too
# From top to bottom: proper action types by name, in colours of Paul Tol, then what is none, then the ends.
PALETTE = ["#332288", "#88CCEE", "#DDCC77", "#CC6677", "#117733", "#AA4499", "#999933", "#882255", "#44AA99"]
LATE = {"other": "#AAAAAA", "invalid": "#444444"} | {f"end: {name}": color for name, color in OUTCOMES.items()}
GAP = 0.04  # between the nodes of a column, as a share of all trajectories
HEIGHT = 480  # of a diagram on the page, in pixels


def flows(records: list[dict], max_turns: int) -> tuple[Counter, Counter]:
    """Counts of nodes[turn, type] and of links[turn, type, type of the next turn, outcome], turns from 1.

    A trajectory of n turns ends in node (n + 1, "end: success") or (n + 1, "end: failure"); of one of more than
    max_turns turns the first max_turns count, without an end.
    """
    nodes, links = Counter(), Counter()
    for record in records:
        outcome = "success" if record["success"] else "failure"
        path = [turn["action_type"] for turn in record["turns"]]
        path = path[:max_turns] if len(path) > max_turns else [*path, f"end: {outcome}"]
        nodes.update(enumerate(path, start=1))
        links.update((turn, *pair, outcome) for turn, pair in enumerate(zip(path, path[1:], strict=False), start=1))
    return nodes, links


def read_steps(path: Path, first: int, last: float) -> list[dict]:
    """Step, success, action types of what was played in steps first to last, or a ValueError; crashes are left out."""
    records, seen = [], set()
    for record in read_records(path):
        seen.add(record["step"])
        if first <= record["step"] <= last and record["turns"] and not record["error"]:
            turns = [{"action_type": turn["action_type"]} for turn in record["turns"]]
            records.append({"step": record["step"], "success": record["success"], "turns": turns})
    if not records:
        held = f"{min(seen)} to {max(seen)}" if seen else "none yet"
        raise ValueError(f"--steps {first}-{last}: no trajectory; the steps of {path} are {held}")
    if any(turn["action_type"] is None for record in records for turn in record["turns"]):
        raise ValueError(f"{path}: its task has no action types")
    return records


def colors_of(nodes: Counter) -> dict[str, str]:
    """The names of the nodes, in their order from top to bottom, with their colours."""
    names = {name for _, name in nodes}
    colors = {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(sorted(names - LATE.keys()))}
    return colors | {name: color for name, color in LATE.items() if name in names}


def place(nodes: Counter, names: list[str]) -> dict[tuple[int, str], float]:
    """Top of each node, downwards from 0: the nodes of a turn one below the other."""
    gap = GAP * sum(count for (turn, _), count in nodes.items() if turn == 1)
    tops = {}
    for turn in sorted({turn for turn, _ in nodes}):
        y = 0.0
        for name in names:
            if (turn, name) in nodes:
                tops[turn, name] = y
                y += nodes[turn, name] + gap
    return tops


def draw_bars(axis, nodes: Counter, links: Counter, colors: dict[str, str], by_outcome: bool) -> None:
    """One diagram of the picture: bars, and ribbons between them in the order of `colors` at both ends."""
    names, tops, t = list(colors), place(nodes, list(colors)), np.linspace(0, 1, 30)
    leaving, arriving = dict(tops), dict(tops)
    for link in sorted(links, key=lambda link: (link[0], names.index(link[1]), names.index(link[2]), link[3])):
        turn, source, target, outcome = link
        start, end = leaving[turn, source], arriving[turn + 1, target]
        upper = start + (end - start) * (3 * t**2 - 2 * t**3)  # a Bezier curve that starts and ends level
        color = OUTCOMES[outcome] if by_outcome else colors[source]
        axis.fill_between(turn + 0.08 + 0.84 * t, upper, upper + links[link], color=color, alpha=0.45, lw=0)
        leaving[turn, source] += links[link]
        arriving[turn + 1, target] += links[link]
    for (turn, name), top in tops.items():
        count = nodes[turn, name]
        axis.bar(turn, count, width=0.16, bottom=top, color=colors[name])
        if count > 0.02 * max(nodes.values()):
            axis.text(turn + 0.1, top + count / 2, f"{name} {count}", fontsize=12, va="center")
    axis.invert_yaxis()


def see_through(color: str, opacity: float) -> str:
    """A colour #rrggbb with an opacity, as every version of Plotly reads it."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, {opacity})"


def trace_of(nodes: Counter, links: Counter, colors: dict[str, str], by_outcome: bool, turns: int) -> go.Sankey:
    """One diagram of the page; its nodes stay where `place` puts them, in columns of a width of 1 / (turns + 1)."""
    last, name = max(nodes)  # Plotly writes the last column's labels on its links, so the last is one that nobody sees
    nodes, links = nodes + Counter({(last + 1, ""): 1e-6}), links + Counter({(last, name, "", "failure"): 1e-6})
    tops = place(nodes, [*colors, ""])
    number, depth = {node: i for i, node in enumerate(tops)}, max(tops[node] + nodes[node] for node in tops)
    node = {
        "label": [name for _, name in tops],
        "color": [colors.get(name, "#FFFFFF") for _, name in tops],
        "x": [max((turn - 1) / (turns + 1), 1e-3) for turn, _ in tops],  # a coordinate of 0 would be ignored
        "y": [(top + nodes[node] / 2) / depth for node, top in tops.items()],
        "align": "left",  # an early end is no node of the last column
        "pad": HEIGHT * GAP * sum(nodes[1, name] for name in colors) / depth,
        "line": {"width": 0},
        "customdata": [f"turn {turn}, {name}: {nodes[turn, name]}" if name else "" for turn, name in tops],
        "hovertemplate": "%{customdata}<extra></extra>",
    }
    link = {
        "source": [number[turn, source] for turn, source, _, _ in links],
        "target": [number[turn + 1, target] for turn, _, target, _ in links],
        "value": list(links.values()),
        "color": [see_through(OUTCOMES[end] if by_outcome else colors[a], 0.45 if b else 0) for _, a, b, end in links],
        "customdata": [f"turn {turn}, {a} to {b}, {end}: {n}" for (turn, a, b, end), n in links.items()],
        "hovertemplate": "%{customdata}<extra></extra>",
    }
    return go.Sankey(arrangement="fixed", node=node, link=link)


def draw_png(diagrams: list[tuple], colors: dict[str, str], turns: int, title: str, titles: list[str], path: Path):
    """The diagrams one above the other, and what the colours mean."""
    with plt.rc_context(LOOK | {"text.parse_math": False, "xtick.major.size": 0}):
        figure, axes = plt.subplots(2, 1, figsize=(4.5 + 1.5 * turns, 13))
        for axis, (nodes, links, by_outcome), text in zip(axes, diagrams, titles, strict=True):
            if nodes:
                draw_bars(axis, nodes, links, colors, by_outcome)
            axis.set(title=text, xlabel="turn", xticks=range(1, turns + 1), yticks=[], xlim=(0.8, turns + 1.8))
            axis.spines[:].set_visible(False)
        looks = OUTCOMES | {name: color for name, color in colors.items() if not name.startswith("end: ")}
        handles = [plt.Rectangle((0, 0), 1, 1, color=color, label=label) for label, color in looks.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=8)
        figure.suptitle(title)
        figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_page(diagrams: list[tuple], colors: dict[str, str], turns: int, title: str, titles: list[str], path: Path):
    """The same as a page that needs nothing else."""
    page = make_subplots(2, 1, specs=[[{"type": "sankey"}]] * 2, subplot_titles=titles, vertical_spacing=0.08)
    for row, (nodes, links, by_outcome) in enumerate(diagrams, start=1):
        if nodes:
            page.add_trace(trace_of(nodes, links, colors, by_outcome, turns), row=row, col=1)
    for i in range(turns):
        page.add_annotation(text=f"turn {i + 1}", x=i / (turns + 1), y=-0.03, xanchor="center", showarrow=False)
    page.update_layout(title=title, height=2 * HEIGHT / 0.92 + 200, margin={"t": 120, "b": 80})
    page.write_html(path, include_plotlyjs=True)


def span(text: str) -> tuple[int, int]:
    """The steps of FIRST-LAST, or of one step."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if not match or int(match[1]) > int(match[2] or match[1]):
        raise argparse.ArgumentTypeError(f"{text!r}: allowed is FIRST-LAST, such as 80-100, or one step")
    return int(match[1]), int(match[2] or match[1])


def main(argv: list[str] | None = None) -> list[Path]:
    """Draw the diagrams of a run; bad input ends the program with one line and exit code 2."""
    parser = Parser(allow_abbrev=False, description="Sankey diagrams of action types by turn.")
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder, or its rollouts.jsonl.gz")
    parser.add_argument("--steps", type=span, default=(0, float("inf")), help="FIRST-LAST, inclusive; default all")
    parser.add_argument("--output", type=Path, help="folder of the pictures; default that of the rollouts")
    parser.add_argument("--max_turns", type=int, default=12, help="turns to draw")
    args = parser.parse_args(argv)
    path = args.run / "rollouts.jsonl.gz" if args.run.is_dir() else args.run
    paths = [(args.output or path.parent) / name for name in ("sankey.png", "sankey.html")]
    if args.max_turns < 2:
        parser.error(f"--max_turns {args.max_turns}: allowed is at least 2")
    try:
        records = read_steps(path, *args.steps)
        paths[0].parent.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    failures = [record for record in records if not record["success"]]
    steps, lengths = [record["step"] for record in records], [len(record["turns"]) for record in records]
    turns, longer = min(max(lengths), args.max_turns), sum(length > args.max_turns for length in lengths)
    title = f"{path.parent.resolve().name}, steps {min(steps)} to {max(steps)}, turns 1 to {turns}"
    title += f"; {longer} of {len(lengths)} trajectories go on after turn {turns}, not shown" if longer else ""
    titles = [f"all {len(records)} trajectories; links: success blue-green, failure orange"]
    titles += [f"{len(failures)} failures; links: action type"]
    diagrams = [(*flows(records, args.max_turns), True), (*flows(failures, args.max_turns), False)]
    content = (diagrams, colors_of(diagrams[0][0]), turns, title, titles)
    draw_png(*content, paths[0])
    draw_page(*content, paths[1])
    print(*paths, sep="\n")
    return paths


if __name__ == "__main__":
    main()
