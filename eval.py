"""Evaluation on held-out tasks: success, pass@k, scores and loops of a policy, a random player and the expert.

    python eval.py --run runs/sokoban-sampo-seed0 --split valid_unseen            # the saved model of a run
    python eval.py --run runs/sokoban-sampo-seed0 --checkpoint 50 --samples 8 --pass_k 1,2,4,8
    python eval.py --model <folder or hub name> --task sokoban --format markdown  # any model, the paper's settings
    python eval.py --run runs/sokoban-sampo-seed0 --show 3 --at_step 40           # what it played in training

An evaluation takes the settings of the run, or, with --model, those of the recipe; a further flag wins over both.
"""

import json
import math
import random
from collections import Counter
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_model
from transformers.utils import logging

from checkpoint import is_complete
from config import Config, Parser, make_envs, numbers_of, read_settings, resolve
from engines import Sampling, make_engine
from policy import load_policy
from records import append_step, read_records, show, trajectory_record, write_page
from rollout import Trajectory, Turn, check_failures, check_first_prompt, run_episodes
from sft import play_scripted

Z = 1.959964  # of a 95 % interval
SUCCESS = ("success", "success_low", "success_high")
TRAINING = "epochs mini_batch learning_rate method surrogate advantage steps resume overwrite output name".split()
LOOPS = ("loops/repeated", "loops/oscillation", "loops/pagination")
SETTINGS = ("task", "seed", "eval_temperature", "eval_top_p", "eval_top_k")  # that a report repeats


def wilson_interval(successes: float, count: int, z: float = Z) -> tuple[float, float]:
    """95 % interval of a rate from `successes` of `count` trials (Wilson 1927): inside [0, 1], sound at 0 and 1.

        centre = (p + z^2 / 2n) / (1 + z^2 / n);   half = z / (1 + z^2 / n) * sqrt(p (1 - p) / n + z^2 / 4n^2)

    Raises ValueError on impossible counts.
    """
    if not 0 <= successes <= count or count < 1:
        raise ValueError(f"successes {successes}, count {count}: allowed is 0 <= successes <= count, count at least 1")
    rate, scale = successes / count, 1 + z * z / count
    centre = (rate + z * z / (2 * count)) / scale
    half = z / scale * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k of a task's n samples, drawn without replacement, hold one of its c successes.

        1 - C(n - c, k) / C(n, k)      (Chen et al. 2021, arXiv 2107.03374, Eq. 1), in whole numbers up to the division

    Raises ValueError where there are fewer than k samples, also at c = 0, or on impossible counts.
    """
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"n {n}, c {c}, k {k}: allowed is 1 <= k <= n samples and 0 <= c <= n successes")
    draws = math.comb(n, k)
    return (draws - math.comb(n - c, k)) / draws


def counts_by_task(trajectories: list[Trajectory]) -> dict[str, tuple[int, int]]:
    """(n, c) by task: its surviving samples and its successes. A task without a survivor is not there."""
    n = Counter(trajectory.task for trajectory in trajectories if not trajectory.error)
    c = Counter(trajectory.task for trajectory in trajectories if not trajectory.error and trajectory.success)
    return {task: (n[task], c[task]) for task in n}


def success_over_tasks(counts: dict[str, tuple[int, int]], k: int = 1) -> dict[str, float | None]:
    """The mean over tasks of pass_at_k (k 1 is avg@n, the mean of c / n) with its 95 % interval over tasks.

        low, high = mean -+ 1.96 * sd / sqrt(tasks),  clipped to [0, 1];   sd of the tasks' values, ddof 1

    Samples of a task are not independent, so tasks are counted, not samples. Wilson's interval, with tasks as trials,
    where every task has one sample, and where sd says nothing: one task, or equal values. A task with fewer than k
    surviving samples is left out: `tasks` counts the others. None where none is left.
    """
    kept = [(n, c) for n, c in counts.values() if n >= k]
    if not kept:
        return {"tasks": 0, **dict.fromkeys(SUCCESS)}
    values, count = [pass_at_k(n, c, k) for n, c in kept], len(kept)
    mean = sum(values) / count
    if all(n == 1 for n, _ in kept) or min(values) == max(values):
        low, high = wilson_interval(sum(values), count)
    else:
        half = Z * float(np.std(values, ddof=1)) / math.sqrt(count)
        low, high = max(0.0, mean - half), min(1.0, mean + half)
    return {"tasks": count, "success": mean, "success_low": low, "success_high": high}


def repeated(turns: list[Turn]) -> float:
    """Share of turns with state[k] == state[k - 1] and action[k] == action[k - 1]; two broken responses are equal."""
    pairs = zip(turns, turns[1:], strict=False)
    return sum((a.state, a.action) == (b.state, b.action) for a, b in pairs) / max(len(turns), 1)


def oscillation(turns: list[Turn]) -> float:
    """Share of turns with state[k] == state[k - 2] != state[k - 1]: back where the agent just came from."""
    triples = zip(turns, turns[1:], turns[2:], strict=False)
    return sum(a.state == c.state != b.state for a, b, c in triples) / max(len(turns), 1)


def pagination(types: list[str | None]) -> float:
    """Share of turns inside a run of three or more with types[k] == "next", WebShop's turning of a page."""
    runs = [len(list(run)) for kind, run in groupby(types) if kind == "next"]
    return sum(length for length in runs if length >= 3) / max(len(types), 1)


def summarise(trajectories: list[Trajectory], max_failures: float, env=None) -> dict[str, float]:
    """Success with its interval, the score both ways (mean over trajectories; over turns as in Table 3), and loops.

    Crashed episodes are left out and counted (`check_failures`). Loops are shares of all turns; `env` types actions.
    """
    failed = check_failures(trajectories, max_failures)
    played = [trajectory for trajectory in trajectories if not trajectory.error]
    lengths = [len(trajectory.turns) for trajectory in played]
    scores = [trajectory.score for trajectory in played]
    action_type = getattr(env, "action_type", lambda action: None)
    types = [[action_type(turn.action) for turn in trajectory.turns] for trajectory in played]
    loops = [(repeated(t.turns), oscillation(t.turns), pagination(k)) for t, k in zip(played, types, strict=True)]
    return {
        **success_over_tasks(counts_by_task(played)),
        "score": float(np.mean(scores)),
        "score_turn_weighted": float(np.average(scores, weights=lengths)),
        "turns": float(np.mean(lengths)),
        "format_valid": float(np.mean([turn.valid for trajectory in played for turn in trajectory.turns])),
        "notes": sum(bool(turn.note) for trajectory in played for turn in trajectory.turns),
        **dict(zip(LOOPS, np.average(loops, axis=0, weights=lengths).tolist(), strict=True)),
        "levels": len(played),
        "failed": failed,
    }


def break_down(trajectories: list[Trajectory], env, ks: list[int]) -> dict[str, dict | int]:
    """What `summarise` leaves out: pass@k for every k of `ks`, and a row for every type of task.

    `failed_tasks` are those all of whose episodes crashed: they are in no rate.
    """
    counts, types = counts_by_task(trajectories), {}
    for task, count in counts.items():
        if hasattr(env, "task_type"):
            types.setdefault(env.task_type(task), {})[task] = count
    in_order = sorted(types, key=lambda name: (len(name), name))  # `3 moves` before `12 moves`
    return {
        "failed_tasks": len({trajectory.task for trajectory in trajectories}) - len(counts),
        "pass_at_k": {str(k): success_over_tasks(counts, k) for k in ks},
        "task_types": {name: success_over_tasks(types[name]) for name in in_order},
    }


def panel(env, split: str, count: int) -> list[str]:
    """The first `count` tasks of a split. ValueError where it has fewer."""
    tasks = env.tasks(split)
    if count > len(tasks):
        raise ValueError(f"--eval_levels {count}: allowed is 1 to {len(tasks)}, the tasks of {split}")
    return tasks[:count]


def play(engine, tokenizer, envs: list, tasks: list[str], config: Config, samples: int = 1) -> list[Trajectory]:
    """`samples` episodes of the policy on each task, task by task, sampled by the settings eval_*.

    What a sample draws depends on run seed, task and its number alone: not on the other tasks, not on `samples`.
    """
    sampling = Sampling(config.eval_temperature, config.max_response_tokens, config.eval_top_p, config.eval_top_k)
    each = [(task, i) for task in tasks for i in range(samples)]
    keys = [("evaluation", config.seed, task, i) if i else ("evaluation", config.seed, task) for task, i in each]
    return run_episodes(engine, tokenizer, envs, [task for task, _ in each], keys, sampling, config.max_prompt_tokens)


def evaluate(engine, tokenizer, envs: list, tasks: list[str], config: Config) -> dict[str, float]:
    """One episode of the policy on each task, sampled by the settings eval_*, seeded by run and task."""
    return summarise(play(engine, tokenizer, envs, tasks, config), config.max_failures, envs[0])


def evaluate_scripted(env, tasks: list[str], player: str, seed: int) -> dict[str, float]:
    """One episode of the `random` player (admissible actions, well formed) or of the `expert` on each task."""
    rng = random.Random(f"{player} {seed}")

    def respond(env, observation) -> str:
        if player == "expert":
            return env.expert(rng)
        return f"<think> </think> <action> {rng.choice(observation.actions)} </action>"

    return summarise([play_scripted(env, task, respond)[1] for task in tasks], max_failures=0.0, env=env)


def evaluate_players(env, panels: dict[str, list[str]], seed: int) -> dict[str, dict]:
    """What to compare a policy with, on every panel: random actions where they are listed, the expert where it is."""
    can_list = env.reset(next(iter(panels.values()))[0]).actions is not None
    players = [name for name, able in (("random", can_list), ("expert", hasattr(env, "expert"))) if able]
    return {p: {split: evaluate_scripted(env, tasks, p, seed) for split, tasks in panels.items()} for p in players}


def closing_table(results: dict[str, dict], seconds: dict[str, float], total: float) -> str:
    """Success with its 95 % interval by policy and panel, and where the total of seconds went, in Markdown."""
    panels = list(next(iter(results.values())))
    lines = [f"| policy | {' | '.join(panels)} |", f"|---|{'---|' * len(panels)}"]
    for name, by_panel in results.items():
        cells = [f"{r['success']:.3f} [{r['success_low']:.3f}, {r['success_high']:.3f}]" for r in by_panel.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    parts = seconds | {"the rest": total - sum(seconds.values())}
    split = ", ".join(f"{name} {value:.0f}" for name, value in parts.items())
    return "\n".join([*lines, f"\nSuccess with its 95 % interval. {total:.0f} s in all: {split}."])


def markdown(report: dict) -> str:
    """A report of `main` as a table: success, pass@k and the types of task with their intervals, the rest below."""
    r, rest = report, ("score", "score_turn_weighted", "turns", "format_valid", *LOOPS)
    rows = {f"avg@{r['samples']}": r} | {f"pass@{k}": row for k, row in r["pass_at_k"].items()} | r["task_types"]
    lines = [f"| {r['task']}, {r['split']} | tasks | success | 95 % interval |", "|---|---|---|---|"]
    for name, row in rows.items():
        success, low, high = ("-" if row[key] is None else f"{row[key]:.3f}" for key in SUCCESS)
        lines.append(f"| {name} | {row['tasks']} | {success} | [{low}, {high}] |")
    lines += ["", f"{r['model']}: {', '.join(f'{name} {r[name]}' for name in SETTINGS)}. Intervals are over tasks."]
    crashed = f"Crashed and left out: {r['failed']} episodes, {r['failed_tasks']} tasks as a whole."
    return "\n".join([*lines, "", f"{', '.join(f'{name} {r[name]:.3f}' for name in rest)}. {crashed}"])


def read_flags(argv: list[str] | None) -> tuple[Parser, dict]:
    """The parser, and what was typed: flags of eval beside the settings."""
    parser = Parser()
    add = parser.add_argument
    add("--run", help="run folder of train.py; its model and settings are taken")
    add("--checkpoint", type=int, help="with --run: the weights after this step, not the last ones")
    add("--split", help="tasks to play: valid_seen (default), valid_unseen or train")
    add("--samples", type=int, help="episodes of a task (default 1)")
    add("--pass_k", "--pass-k", help="k of pass@k, comma-separated, at most --samples (default 1)")
    add("--format", choices=("json", "markdown"), help="of the report (default json)")
    add("--records", help="new file for the trajectories, laid out as rollouts.jsonl.gz")
    add("--show", type=int, help="with --run: print this many of its training trajectories, and play nothing")
    add("--html", nargs="?", const="", help="with --run: write them as a page (default <run>/rollouts.html)")
    add("--at_step", "--at-step", type=int, help="with --show or --html: those of this step alone")
    return parser, {name: value for name, value in parser.read(argv).items() if value is not None}


def check_flags(typed: dict) -> list[int]:
    """The k of pass@k. ValueError on flags of eval that are out of range or contradict each other."""
    samples, ks, file = typed.get("samples", 1), typed.get("pass_k", "1"), Path(typed.get("records", "new"))
    for name in TRAINING:
        if name in typed:
            raise ValueError(f"--{name} {typed[name]}: a setting of training; evaluation does not read it")
    for name in ("checkpoint", "show", "html", "at_step", "model", "task", "recipe"):
        belongs = name not in ("model", "task", "recipe")
        if name in typed and belongs != ("run" in typed):
            raise ValueError(f"--{name} {typed[name]}: allowed {'with' if belongs else 'without'} --run")
    views, others = {"show", "html"} & typed.keys(), typed.keys() - {"run", "show", "html", "at_step"}
    if views and others:
        raise ValueError(f"--{min(others)} {typed[min(others)]}: allowed without --{min(views)}, which plays nothing")
    if "at_step" in typed and not views:
        raise ValueError(f"--at_step {typed['at_step']}: allowed with --show or --html")
    for name in ("samples", "show"):
        if not 1 <= typed.get(name, 1) <= 10_000:
            raise ValueError(f"--{name} {typed[name]}: allowed is 1 to 10000")
    if not all(k.isdecimal() and 1 <= int(k) <= samples for k in ks.split(",")):
        raise ValueError(f"--pass_k {ks}: allowed is 1 to {samples}, the --samples of a task; several with commas")
    if "records" in typed and (file.exists() or not file.parent.is_dir()):
        raise ValueError(f"--records {file}: allowed is a new file in a folder that exists")
    return sorted({int(k) for k in ks.split(",")})


def settings_of(typed: dict) -> tuple[Config, Path | None]:
    """Settings, `model` being what to load, and for a checkpoint the file of weights to put into it. Or ValueError."""
    settings = {name: value for name, value in typed.items() if name in Config.__dataclass_fields__}
    if "run" not in typed:
        return resolve(settings)[0], None
    folder, checkpoint = Path(typed["run"]), typed.get("checkpoint")
    saved = read_settings(folder)
    steps = sorted(int(path.name[5:]) for path in folder.glob("checkpoints/step-*[0-9]") if is_complete(path))
    if checkpoint is not None and checkpoint not in steps:
        raise ValueError(f"--checkpoint {checkpoint}: allowed are {', '.join(map(str, steps)) or 'none so far'}")
    config = Config(**saved | {"model": str(folder / ("model" if checkpoint is None else "reference"))} | settings)
    weights = folder / "checkpoints" / f"step-{checkpoint}" / "model.safetensors"
    if checkpoint is not None and not weights.exists():
        raise ValueError(f"--checkpoint {checkpoint}: it is in shards; merge them first, see docs/reproduce.md")
    return config, None if checkpoint is None else weights


def view(typed: dict) -> dict:
    """Print --show of a run's recorded trajectories, write all to the page --html; those of --at_step, if given."""
    path, step = Path(typed["run"], "rollouts.jsonl.gz"), typed.get("at_step", "any")

    def chosen():
        return (record for record in read_records(path) if step in ("any", record["step"]))

    if not any(chosen()):
        steps = sorted({record["step"] for record in read_records(path)})
        raise ValueError(f"--at_step {step}: allowed are the steps in {path}, {steps or 'none so far'}")
    if "show" in typed:
        print(show(chosen(), typed["show"]))
    if "html" in typed:
        page = typed["html"] or path.with_name("rollouts.html")
        write_page(chosen(), page, f"Rollouts of {typed['run']}")
        print(page)
    return typed


def main(argv: list[str] | None = None) -> dict:
    """Evaluate the model of a run or of --model, print the report and return it; or show what a run recorded."""
    logging.disable_progress_bar()
    parser, typed = read_flags(argv)
    samples, split = typed.get("samples", 1), typed.get("split", "valid_seen")
    try:
        ks = check_flags(typed)
        if "show" in typed or "html" in typed:
            return view(typed)
        config, weights = settings_of(typed)
        if not config.model:
            raise ValueError("--run '': allowed is a run folder of train.py, or --model with a folder or hub name")
        if ks[-1] > 1 and (config.eval_temperature == 0 or config.eval_top_k == 1):
            raise ValueError(f"--pass_k {ks[-1]}: allowed is 1 with greedy sampling, where all samples are equal")
        envs = make_envs(config, config.groups_per_step * config.group_size)
        env, tasks = envs[0], panel(envs[0], split, config.eval_levels)
        if "run" in typed and not Path(config.model).is_dir():
            raise ValueError(
                f"--run {typed['run']}: {config.model} is not there yet; --checkpoint N takes weights saved so far"
            )
        model, tokenizer = load_policy(config.model, [], config.hidden, config.layers, config.dtype)
        check_first_prompt(tokenizer, env, tasks[0], config.max_prompt_tokens)
        if model.num_parameters() < 10**6:
            torch.set_num_threads(1)  # as in training: a second thread slows a model this small down
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        engine = make_engine(model, tokenizer, model.dtype, **numbers_of(make_engine, config))
    except (ValueError, OSError) as error:
        parser.error(" ".join(str(error).split()))
    if weights:
        load_model(model, weights)
    engine.load_weights(model, 0)
    engine.check(model, 0)
    played = play(engine, tokenizer, envs, tasks, config, samples)
    if "records" in typed:
        where = [dict(step=0, group=i // samples, member=i % samples, trained=False) for i in range(len(played))]
        records = [trajectory_record(t, env, tokenizer, **at) for t, at in zip(played, where, strict=True)]
        append_step(typed["records"], records)
    report = {"run": typed.get("run"), "checkpoint": typed.get("checkpoint"), "split": split, "samples": samples}
    report |= {"model": str(weights or config.model), "engine": type(engine).__name__}
    report |= {name: getattr(config, name) for name in SETTINGS}
    report |= summarise(played, config.max_failures, env) | break_down(played, env, ks)
    print(markdown(report) if typed.get("format") == "markdown" else json.dumps(report, indent=1))
    return report


if __name__ == "__main__":
    main()
