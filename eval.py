"""Evaluation on held-out tasks: success with a 95 % interval and scores, of a policy, a random player and the expert.

    python eval.py --run runs/sokoban-sampo-seed0 --split valid_unseen --eval_levels 480

evaluates the saved model of a run with that run's settings.
"""

import json
import math
import random
import warnings
from pathlib import Path

import numpy as np
import torch

from config import Config, Parser, make_envs
from engines import Sampling, TransformersEngine
from policy import load_policy
from rollout import Trajectory, check_failures, play_scripted, run_episodes


def wilson_interval(successes: int, count: int, z: float = 1.959964) -> tuple[float, float]:
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


def summarise(trajectories: list[Trajectory], max_failures: float) -> dict[str, float]:
    """Success with its interval, and the score both ways: mean over trajectories, and over turns as in Table 3."""
    failed = check_failures(trajectories, max_failures)
    played = [trajectory for trajectory in trajectories if not trajectory.error]
    wins = sum(trajectory.success for trajectory in played)
    turns = [turn for trajectory in played for turn in trajectory.turns]
    lengths = [len(trajectory.turns) for trajectory in played]
    scores = [trajectory.score for trajectory in played]
    low, high = wilson_interval(wins, len(played))
    return {
        "success": wins / len(played),
        "success_low": low,
        "success_high": high,
        "score": float(np.mean(scores)),
        "score_turn_weighted": float(np.average(scores, weights=lengths)),
        "turns": float(np.mean(lengths)),
        "format_valid": float(np.mean([turn.valid for turn in turns])),
        "levels": len(played),
        "failed": failed,
    }


def panel(env, split: str, count: int) -> list[str]:
    """The first `count` tasks of a split. ValueError where it has fewer."""
    tasks = env.tasks(split)
    if count > len(tasks):
        raise ValueError(f"--eval_levels {count}: allowed is 1 to {len(tasks)}, the tasks of {split}")
    return tasks[:count]


def evaluate(engine, tokenizer, envs: list, tasks: list[str], config: Config) -> dict[str, float]:
    """One episode of the policy on each task, sampled by the settings eval_*, seeded by run and task."""
    c = config
    sampling = Sampling(c.eval_temperature, c.max_response_tokens, c.eval_top_p, c.eval_top_k)
    keys = [("evaluation", c.seed, task) for task in tasks]
    played = run_episodes(engine, tokenizer, envs, tasks, keys, sampling, c.max_prompt_tokens)
    return summarise(played, c.max_failures)


def evaluate_scripted(env, tasks: list[str], player: str, seed: int) -> dict[str, float]:
    """One episode of the `random` player (admissible actions, well formed) or of the `expert` on each task."""
    rng = random.Random(f"{player} {seed}")

    def respond(env, observation) -> str:
        if player == "expert":
            return env.expert(rng)
        return f"<think> </think> <action> {rng.choice(observation.actions)} </action>"

    return summarise([play_scripted(env, task, respond)[1] for task in tasks], max_failures=0.0)


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


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Evaluate the model of a run folder with that run's settings; further flags override them. Prints JSON."""
    warnings.filterwarnings("ignore", message="`past_key_values` is deprecated", category=FutureWarning)
    parser = Parser()
    parser.add_argument("--run", help="run folder of train.py")
    parser.add_argument("--split", help="tasks to play: valid_seen (default), valid_unseen or train")
    typed = {name: value for name, value in parser.read(argv).items() if value is not None}
    folder, split = Path(typed.pop("run", "")), typed.pop("split", "valid_seen")
    if not (folder / "config.json").is_file():
        parser.error(f"--run {folder}: allowed is a run folder of train.py, with its config.json")
    try:
        saved = json.loads((folder / "config.json").read_text())
        if saved.keys() - Config.__dataclass_fields__.keys():
            raise ValueError(f"--run {folder}: its config.json is not that of a run of this version")
        config = Config(**saved | {"model": str(folder / "model")} | typed)
        envs = make_envs(config, config.groups_per_step * config.group_size)
        tasks = panel(envs[0], split, config.eval_levels)
        model, tokenizer = load_policy(config.model, [], config.hidden, config.layers, config.dtype)
    except (ValueError, OSError) as error:
        parser.error(" ".join(str(error).split()))
    if not saved["model"]:
        torch.set_num_threads(1)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    result = evaluate(TransformersEngine(model, tokenizer), tokenizer, envs, tasks, config)
    print(json.dumps({"run": str(folder), "split": split, **result}, indent=1))
    return result


if __name__ == "__main__":
    main()
