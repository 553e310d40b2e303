"""Stable agentic RL, end to end: clone; then sample groups of multi-turn episodes, weigh their turns, update.

    accelerate launch train.py --method sampo                     # laptop CPU: a tiny agent learns Sokoban in minutes
    accelerate launch train.py --method sampo --model <folder or hub name>

Where this departs from the paper's released code, or decides what the paper leaves open:
1. Denominators are those of the whole optimizer batch, not of a micro-batch.
2. A group's baseline counts every trajectory once, not once a turn.
3. SAMPO averages over tokens (Eq. 8), has no sequence mask, no entropy bonus and no dual clip.
4. The format penalty is part of its turn's reward; dynamic sampling looks at success, never at rewards.
5. A reached `max_tries` trains on what was kept; nothing kept skips the update.
"""

import json
import random
import shutil
import sys
import time
import warnings
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from tqdm import tqdm
from transformers.utils import logging

from advantages import ADVANTAGES
from config import Config, make_envs, numbers_of, parse
from engines import Sampling, TransformersEngine
from eval import closing_table, evaluate, evaluate_players, panel
from grpo import add_old_logprobs, make_mini_batches, policy_loss, update_policy
from losses import SURROGATES
from plots import plot_curves
from policy import load_policy
from rollout import (
    Episode,
    TaskStream,
    Trajectory,
    collect_groups,
    encode_prompts,
    make_rows,
    run_episodes,
    turn_table,
)
from sft import clone, expert_rows, solved_rows

PANELS = ("valid_seen", "valid_unseen")
UPDATE_METRICS = ("loss", "grad_norm", "kl_ref", "kl_old", "clip_frac", "entropy")  # null at a step without an update


class Run:
    """What a run holds together: settings, model, engine, environments, and its folder."""

    def __init__(self, config: Config):
        """Build and check everything that can fail before any work starts. ValueError or OSError say what is wrong."""
        self.config, tiny = config, not config.model
        name = config.name or f"{config.task.rpartition(':')[2]}-{config.method}-seed{config.seed}"
        self.folder = Path(config.output) / name
        if self.folder.exists() and not (config.overwrite and (self.folder / "config.json").exists()):
            raise ValueError(
                f"--name {name}: {self.folder} exists; allowed is a new name, or --overwrite of an earlier run"
            )
        if tiny:
            torch.set_num_threads(1)  # a second thread slows a model this small down, by far on a busy machine
        set_seed(config.seed)
        self.accelerator = Accelerator(cpu=tiny or not torch.cuda.is_available())
        processes = self.accelerator.num_processes
        if processes > 1:
            raise ValueError(f"num_processes {processes}: allowed is 1 so far; accelerate launch --num_processes 1")
        self.envs = make_envs(config, config.groups_per_step * config.group_size)
        self.env = self.envs[0]
        if config.sft_steps and config.sft_data == "expert" and not hasattr(self.env, "expert"):
            raise ValueError(f"--sft_data expert: task {config.task} has none; allowed is rollouts, or --sft_steps 0")
        self.panels = {split: panel(self.env, split, config.eval_levels) for split in PANELS}
        self.stream = TaskStream(self.env.tasks("train"), config.seed)
        model, self.tokenizer = load_policy(config.model, self.env.words(), config.hidden, config.layers, config.dtype)
        task = self.env.tasks("train")[0]
        length = len(encode_prompts(self.tokenizer, [Episode(self.env, task, (), Trajectory(task))])[0])
        if length > config.max_prompt_tokens:
            raise ValueError(
                f"--max_prompt_tokens {config.max_prompt_tokens}: allowed is {length} and up, a first prompt"
            )
        self.model = self.accelerator.prepare(model)
        self.engine = TransformersEngine(self.model, self.tokenizer)
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True)
        (self.folder / "config.json").write_text(json.dumps(asdict(config), indent=1))

    def play(self, tasks: list[str], key: tuple) -> list:
        """Episodes of the policy on tasks, as in training; task i samples with the seeds of (seed, *key, i)."""
        c = self.config
        sampling = Sampling(c.temperature, c.max_response_tokens)
        keys = [(c.seed, *key, i) for i in range(len(tasks))]
        return run_episodes(self.engine, self.tokenizer, self.envs, tasks, keys, sampling, c.max_prompt_tokens)

    def evaluate(self, split: str) -> dict[str, float]:
        """One episode on each task of a held-out panel."""
        return evaluate(self.engine, self.tokenizer, self.envs, self.panels[split], self.config)

    def save(self) -> None:
        """The model in Hugging Face layout, and curves.png."""
        self.accelerator.unwrap_model(self.model).save_pretrained(self.folder / "model")
        self.tokenizer.save_pretrained(self.folder / "model")
        plot_curves(self.folder, f"{self.config.task} · {self.config.method} · seed {self.config.seed}")


def clone_policy(run: Run) -> None:
    """Behaviour cloning by the settings sft_*, from the task's expert or from the model's own solved rollouts."""
    c = run.config
    tasks = TaskStream(run.env.tasks("train"), c.seed + 1).take(c.sft_episodes if c.sft_data == "rollouts" else 65536)
    if c.sft_data == "expert":
        rng = random.Random(c.seed)
        rows = expert_rows(run.env, tasks, run.tokenizer, c.sft_episodes, c.expert_noise, c.malformed, rng)
    else:
        rows = solved_rows(run.play(tasks, ("cloning",)), run.env.append_only)
    clone(
        run.model,
        run.accelerator,
        rows,
        steps=c.sft_steps,
        batch=c.sft_batch,
        learning_rate=c.sft_learning_rate,
        weight_decay=c.weight_decay,
        tokens_per_micro_batch=c.tokens_per_micro_batch,
        pad=run.tokenizer.pad_token_id,
        rng=np.random.default_rng([c.seed, 2]),
    )


def sample_step(run: Run, step: int) -> tuple[list, dict[str, float]]:
    """Groups of one step, by dynamic sampling where the method has it, and what was seen before the filter."""
    c = run.config

    def sample(attempt: int) -> list[list]:
        tasks = run.stream.take(c.groups_per_step)
        each = [task for task in tasks for _ in range(c.group_size)]
        played = run.play(each, (step, attempt))
        return [played[i : i + c.group_size] for i in range(0, len(played), c.group_size)]

    settings = numbers_of(collect_groups, c) | {"dynamic_sampling": c.dynamic_sampling and step > c.filter_cold_start}
    return collect_groups(sample, c.groups_per_step, **settings)


def train_step(run: Run, reference, optimizer, step: int) -> dict[str, float]:
    """One rollout and its updates; returns the metrics of the step."""
    c = run.config
    start = time.perf_counter()
    groups, metrics = sample_step(run, step)
    metrics["seconds/rollout"] = time.perf_counter() - start
    start = time.perf_counter()
    rows = make_rows(groups, run.env.append_only)
    metrics["tokens"] = sum(len(row.sampled) for row in rows)
    if not rows:
        return metrics | dict.fromkeys(UPDATE_METRICS) | {"updates": 0, "seconds/update": 0.0}
    rng, pad, device = np.random.default_rng([c.seed, 3, step]), run.tokenizer.pad_token_id, run.accelerator.device
    batches = make_mini_batches(rows, c.mini_batch, c.tokens_per_micro_batch, pad, rng, device)
    packs = [pack for batch in batches for pack in batch]
    num_turns = sum(len(trajectory.turns) for group in groups for trajectory in group)
    entropy = add_old_logprobs(run.model, reference, packs, c.temperature, num_turns)
    table = turn_table(groups, entropy, c.inadmissible_is_invalid)
    advantage = ADVANTAGES[c.advantage]
    advantages = torch.as_tensor(advantage(table, **numbers_of(advantage, c)), dtype=torch.float32)
    for pack in packs:
        pack.advantages = advantages.to(device)[pack.sequence]
    surrogate = SURROGATES[c.surrogate]
    surrogate = partial(surrogate, **numbers_of(surrogate, c))
    loss = partial(policy_loss, surrogate, **numbers_of(policy_loss, c))
    settings = numbers_of(update_policy, c) | {"backward": run.accelerator.backward}
    metrics |= update_policy(run.model, optimizer, batches, loss, **settings)
    return metrics | {"entropy": float(entropy.mean()), "seconds/update": time.perf_counter() - start}


def train(run: Run) -> dict[str, float]:
    """The loop: a step, its log line, an evaluation now and then. Returns the seconds that went where."""
    c = run.config
    reference = deepcopy(run.model).requires_grad_(False)
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=c.learning_rate, weight_decay=c.weight_decay)
    optimizer = run.accelerator.prepare(optimizer)
    seconds = dict.fromkeys(("rollout", "update", "evaluation"), 0.0)
    start, idle = time.perf_counter(), 0
    held_out = float("nan")
    with open(run.folder / "metrics.jsonl", "w", buffering=1) as log, tqdm(range(c.steps + 1), desc=c.method) as bar:
        for step in bar:
            late = bool(c.max_minutes) and time.perf_counter() - start > 60 * c.max_minutes
            metrics = {"step": step}
            if step:
                metrics |= train_step(run, reference, optimizer, step)
                seconds["rollout"] += metrics["seconds/rollout"]
                seconds["update"] += metrics["seconds/update"]
                idle = idle + 1 if metrics.get("skipped_updates") and not metrics["updates"] else 0
            if step % c.eval_every == 0 or step == c.steps or late:
                begin = time.perf_counter()
                result = run.evaluate("valid_seen")
                seconds["evaluation"] += time.perf_counter() - begin
                metrics |= {f"eval/{name}": value for name, value in result.items()}
                held_out = result["success"]
            print(json.dumps({k: None if v != v else v for k, v in metrics.items()}), file=log)
            bar.set_postfix(train=f"{metrics.get('train/success', float('nan')):.2f}", held_out=f"{held_out:.2f}")
            if idle == 3:
                raise RuntimeError(
                    f"step {step}: every gradient of the last 3 steps was non-finite; {run.folder} holds the log"
                )
            if late:
                tqdm.write(f"stopped at step {step} of {c.steps}: max_minutes {c.max_minutes} reached")
                break
    return seconds


def main(argv: list[str] | None = None) -> dict[str, dict]:
    """Run everything; returns the results by policy and panel."""
    warnings.filterwarnings("ignore", message="`past_key_values` is deprecated", category=FutureWarning)
    logging.disable_progress_bar()
    config = parse(argv)
    try:
        run = Run(config)
    except (ValueError, OSError) as error:
        print(f"train.py: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    seconds = {}
    start = time.perf_counter()
    results = evaluate_players(run.env, run.panels, config.seed)
    seconds["baselines"] = time.perf_counter() - start
    start = time.perf_counter()
    if config.sft_steps:
        clone_policy(run)
    seconds["cloning"] = time.perf_counter() - start
    results["after cloning"] = {split: run.evaluate(split) for split in PANELS}
    try:
        seconds |= train(run)
    finally:  # an interrupted run keeps its model and its curves
        run.save()
    results["after RL"] = {split: run.evaluate(split) for split in PANELS}
    (run.folder / "results.json").write_text(json.dumps({"results": results, "seconds": seconds}, indent=1))
    print(closing_table(results, seconds))
    print(f"\n{run.folder}: config.json, metrics.jsonl, curves.png, results.json, model/")
    return results


if __name__ == "__main__":
    main()
