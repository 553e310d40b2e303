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
    check_failures,
    collect_groups,
    digest,
    encode_prompts,
    generator,
    make_rows,
    run_episodes,
    turn_table,
)
from sft import clone, expert_rows, solved_rows

SPLITS = ("valid_seen", "valid_unseen")
UPDATE_METRICS = ("loss", "grad_norm", "kl_ref", "kl_old", "clip_frac", "entropy")  # null at a step without an update


def run_folder(config: Config) -> Path:
    """The folder of a run. ValueError if it exists, unless it is an earlier run's and is to be overwritten."""
    name = config.name or f"{config.task.rpartition(':')[2]}-{config.method}-seed{config.seed}"
    folder = Path(config.output) / name
    is_run = (folder / "config.json").is_file() and (folder / "metrics.jsonl").is_file()
    if folder.exists() and not (config.overwrite and is_run):
        raise ValueError(f"--name {name}: {folder} exists; allowed is a new name, or --overwrite of an earlier run")
    return folder


class Run:
    """What a run holds together: settings, model, engine, environments, and its folder."""

    def __init__(self, config: Config):
        """Build and check everything that can fail before any work starts. ValueError or OSError say what is wrong."""
        self.config, tiny = config, not config.model
        self.folder = run_folder(config)
        if tiny:
            torch.set_num_threads(1)  # a second thread slows a model this small down, by far on a busy machine
        set_seed(config.seed)
        self.accelerator = Accelerator(cpu=tiny or not torch.cuda.is_available(), mixed_precision="no")
        processes, accumulation = self.accelerator.num_processes, self.accelerator.gradient_accumulation_steps
        if processes > 1:
            raise ValueError(f"num_processes {processes}: allowed is 1 so far; accelerate launch --num_processes 1")
        if accumulation > 1:
            raise ValueError(
                f"gradient_accumulation_steps {accumulation} of accelerate: allowed is 1; see --mini_batch"
            )
        self.envs = make_envs(config, config.groups_per_step * config.group_size)
        self.env = self.envs[0]
        can_show = hasattr(self.env, "expert") and not self.env.append_only
        if config.sft_steps and config.sft_data == "expert" and not can_show:
            raise ValueError(f"--sft_data expert: task {config.task} has none; allowed is rollouts, or --sft_steps 0")
        self.panels = {split: panel(self.env, split, config.eval_levels) for split in SPLITS}
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
        (self.folder / "metrics.jsonl").touch()

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


def clone_policy(run: Run) -> list[float]:
    """Behaviour cloning by the settings sft_*, of the task's expert or of own solved rollouts; the loss by step."""
    c = run.config
    tasks = run.env.tasks("train")
    stream = TaskStream(tasks, digest(c.seed, "cloning"))
    if c.sft_data == "expert":
        rng = random.Random(digest(c.seed, "expert"))
        shown = stream.take(len(tasks))
        rows = expert_rows(run.env, shown, run.tokenizer, c.sft_episodes, c.expert_noise, c.malformed, rng)
    else:
        trajectories = run.play(stream.take(c.sft_episodes), ("cloning",))
        check_failures(trajectories, c.max_failures)
        rows = solved_rows(trajectories, run.env.append_only)
    return clone(
        run.model,
        run.accelerator,
        rows,
        steps=c.sft_steps,
        batch=c.sft_batch,
        learning_rate=c.sft_learning_rate,
        weight_decay=c.weight_decay,
        grad_clip=c.grad_clip,
        tokens_per_micro_batch=c.tokens_per_micro_batch,
        pad=run.tokenizer.pad_token_id,
        rng=generator(c.seed, "cloning batches"),
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
    """One rollout and its updates, none where no advantage differs from 0; returns the metrics of the step."""
    c = run.config
    start = time.perf_counter()
    groups, metrics = sample_step(run, step)
    metrics["seconds/rollout"] = time.perf_counter() - start
    start = time.perf_counter()
    rows = make_rows(groups, run.env.append_only)
    metrics |= dict.fromkeys(UPDATE_METRICS) | {"tokens": 0, "updates": 0, "skipped_updates": 0, "seconds/update": 0.0}
    if not rows:
        return metrics
    pad, device = run.tokenizer.pad_token_id, run.accelerator.device
    rng = generator(c.seed, "mini-batches", step)
    batches = make_mini_batches(rows, c.mini_batch, c.tokens_per_micro_batch, pad, rng, device)
    packs = [pack for batch in batches for pack in batch]
    num_turns = sum(len(trajectory.turns) for group in groups for trajectory in group)
    entropy = add_old_logprobs(run.model, reference, packs, c.temperature, num_turns)
    metrics["entropy"] = float(entropy.mean())
    advantage, surrogate = ADVANTAGES[c.advantage], SURROGATES[c.surrogate]
    advantages = advantage(turn_table(groups, entropy, c.inadmissible_is_invalid), **numbers_of(advantage, c))
    if advantages.any():
        for pack in packs:
            pack.advantages = torch.as_tensor(advantages, dtype=torch.float32, device=device)[pack.sequence]
        loss = partial(policy_loss, partial(surrogate, **numbers_of(surrogate, c)), **numbers_of(policy_loss, c))
        settings = numbers_of(update_policy, c) | {"backward": run.accelerator.backward}
        metrics |= update_policy(run.model, optimizer, batches, loss, **settings)
        metrics["tokens"] = sum(len(row.sampled) for row in rows)
    return metrics | {"seconds/update": time.perf_counter() - start}


def train(run: Run, cloned: dict[str, float], seconds: dict[str, float]) -> dict[str, float]:
    """The loop: a step, its log line, an evaluation now and then. `cloned` is that of step 0; returns the last.

    Adds to `seconds` where the time went. RuntimeError after three steps in a row of non-finite gradients alone.
    """
    c = run.config
    reference = deepcopy(run.model).requires_grad_(False)
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=c.learning_rate, weight_decay=c.weight_decay)
    optimizer = run.accelerator.prepare(optimizer)
    start, broken, late, result = time.perf_counter(), 0, False, cloned
    with open(run.folder / "metrics.jsonl", "w", buffering=1) as log, tqdm(range(c.steps + 1), desc=c.method) as bar:
        for step in bar:
            metrics = {"step": step}
            if step:
                metrics |= train_step(run, reference, optimizer, step)
                seconds["rollout"] += metrics["seconds/rollout"]
                seconds["update"] += metrics["seconds/update"]
                broken = broken + 1 if metrics["skipped_updates"] > metrics["updates"] == 0 else 0
                late = 0 < 60 * c.max_minutes < time.perf_counter() - start
            due = step % c.eval_every == 0 or step == c.steps or late
            if due and step:
                begin = time.perf_counter()
                result = run.evaluate("valid_seen")
                seconds["evaluation"] += time.perf_counter() - begin
            if due:
                metrics |= {f"eval/{name}": value for name, value in result.items()}
            print(json.dumps({k: None if v != v else v for k, v in metrics.items()}), file=log)
            bar.set_postfix(train=f"{metrics.get('train/success', 0):.2f}", held_out=f"{result['success']:.2f}")
            if broken == 3:
                raise RuntimeError(f"step {step}: every gradient of the last 3 steps was non-finite; see {run.folder}")
            if late:
                tqdm.write(f"stopped at step {step} of {c.steps}: max_minutes {c.max_minutes} reached")
                break
    return result


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
    start = time.perf_counter()
    seconds = dict.fromkeys(("cloning", "rollout", "update", "evaluation"), 0.0)
    results = evaluate_players(run.env, run.panels, config.seed)
    begin = time.perf_counter()
    cloning_loss = clone_policy(run) if config.sft_steps else []
    seconds["cloning"] = time.perf_counter() - begin
    results["after cloning"] = {split: run.evaluate(split) for split in SPLITS}
    try:
        last = train(run, results["after cloning"]["valid_seen"], seconds)
    finally:  # an interrupted run keeps its model and its curves
        run.save()
    results["after RL"] = {"valid_seen": last, "valid_unseen": run.evaluate("valid_unseen")}
    total = time.perf_counter() - start
    report = {"results": results, "seconds": seconds | {"total": total}, "cloning_loss": cloning_loss[-1:]}
    (run.folder / "results.json").write_text(json.dumps(report, indent=1))
    print(closing_table(results, seconds, total))
    print(f"\n{run.folder}: config.json, metrics.jsonl, curves.png, results.json, model/")
    return results


if __name__ == "__main__":
    main()
