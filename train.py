"""Stable agentic RL, end to end: clone; then sample groups of multi-turn episodes, weigh their turns, update.

    accelerate launch train.py --method sampo                     # laptop CPU: a tiny agent learns Sokoban in minutes
    accelerate launch train.py --method sampo --model <folder or hub name>
    accelerate launch train.py --method sampo --resume            # go on where it was killed, to the last bit on CPU

Where this departs from the paper's released code, or decides what the paper leaves open:
1. Denominators are those of the whole optimizer batch, not of a micro-batch.
2. A group's baseline counts every trajectory once, not once a turn.
3. SAMPO averages over tokens (Eq. 8), has no sequence mask, no entropy bonus and no dual clip.
4. The format penalty is part of its turn's reward; dynamic sampling looks at success, never at rewards.
5. A reached `max_tries` trains on what was kept; nothing kept skips the update.
"""

import json
import math
import os
import sys
import time
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from logging import getLogger

import numpy as np
import torch
from accelerate.utils import set_seed
from safetensors import SafetensorError
from tqdm import tqdm
from transformers.utils import logging

import checkpoint
from advantages import ADVANTAGES
from config import Config, check_folder, make_envs, numbers_of, parse
from diagnostics import (
    COLLAPSE_SIGNS,
    UPDATE_METRICS,
    collapse_signs,
    collapse_warning,
    engine_gap,
    padding,
    sampling_metrics,
)
from engines import Sampling, check_gap, make_engine
from eval import closing_table, evaluate, evaluate_players, panel
from grpo import add_advantages, add_old_logprobs, make_mini_batches, policy_loss, update_policy
from losses import SURROGATES
from plots import plot_curves, read_metrics
from policy import check_head, load_policy
from ranks import gather, launched, make_accelerator
from records import append_step, record_groups
from rollout import (
    TaskStream,
    Trajectory,
    check_first_prompt,
    collect_groups,
    generator,
    make_rows,
    run_episodes,
    turn_table,
)
from sft import clone_policy

SPLITS = ("valid_seen", "valid_unseen")


@contextmanager
def timed(seconds: dict[str, float], part: str):
    """Add the wall time of a block to seconds[part]."""
    start = time.perf_counter()
    yield
    seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - start


class Run:
    """What a run holds together: settings, progress, model, engine, environments, and its folder."""

    def __init__(self, config: Config):
        """Build and check everything that can fail before any work starts. ValueError or OSError say what is wrong."""
        self.config, self.folder, self.seconds = config, check_folder(config), {}  # seconds since the last log line
        set_seed(config.seed)
        self.accelerator = make_accelerator(config.model, config.log_with, self.folder, config.groups_per_step)
        self.main, how = self.accelerator.is_main_process, launched(self.accelerator)
        self.checkpoint, self.progress = checkpoint.where_to_go_on(self.folder, config.resume, config.steps, how)
        self.envs = make_envs(config, config.groups_per_step * config.group_size // self.accelerator.num_processes)
        self.env = self.envs[0]
        if config.sft_steps and config.sft_data == "expert" and not hasattr(self.env, "expert"):
            raise ValueError(f"--sft_data expert: task {config.task} has none; allowed is rollouts, or --sft_steps 0")
        self.panels = {split: panel(self.env, split, config.eval_levels) for split in SPLITS}
        self.stream = TaskStream(self.env.tasks("train"), config.seed, self.progress.position)
        name = str(self.folder / "reference") if self.checkpoint else config.model
        model, self.tokenizer = load_policy(name, self.env.words(), config.hidden, config.layers, config.dtype)
        if model.num_parameters() < 10**6:
            torch.set_num_threads(1)  # a second thread slows a model this small down, by far on a busy machine
        check_head(model)
        check_first_prompt(self.tokenizer, self.env, self.stream.tasks[0], config.max_prompt_tokens)
        self.dtype = torch.bfloat16 if self.accelerator.mixed_precision == "bf16" else model.dtype  # it computes in
        whole = model
        if self.accelerator.distributed_type.value == "FSDP":  # the policy will be in shards, the engine is not
            whole = deepcopy(model)
            for parameter in whole.parameters():  # .to(dtype) would round buffers, RoPE's among them
                parameter.data = parameter.data.to(self.dtype)
            whole.to(self.accelerator.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.engine = make_engine(whole, self.tokenizer, self.dtype, **numbers_of(make_engine, config))
        self.accelerator.wait_for_everyone()
        if self.main:
            checkpoint.open_folder(self.folder, asdict(config), self.checkpoint, self.progress)
        self.accelerator.print(f"{self.progress.launched}, {self.accelerator.device.type}", file=sys.stderr)
        self.accelerator.wait_for_everyone()
        self.accelerator.init_trackers("sampo", asdict(config))

    def play(self, tasks: list[str], key: tuple) -> list[Trajectory]:
        """Episodes of the policy on tasks, as in training; task i samples with the seeds of (seed, *key, i)."""
        c = self.config
        sampling = Sampling(c.temperature, c.max_response_tokens)
        keys = [(c.seed, *key, i) for i in range(len(tasks))]
        return run_episodes(self.engine, self.tokenizer, self.envs, tasks, keys, sampling, c.max_prompt_tokens)

    @property
    def policy(self):
        """The model without the wrapper of its ranks."""
        return self.accelerator.unwrap_model(self.model)

    def sync(self, version: int) -> None:
        """Give the engine the weights of the policy after update `version`, and see that it has them."""
        with timed(self.seconds, "sync"):
            self.engine.load_weights(self.policy, version)
            self.engine.check(self.policy, version)

    def evaluate(self, split: str) -> dict[str, float]:
        """One episode on each task of a held-out panel."""
        return evaluate(self.engine, self.tokenizer, self.envs, self.panels[split], self.config)

    def evaluate_step(self, metrics: dict) -> None:
        """Add the results on the held-out panel valid_seen to the metrics of a step; those of step 0 are at hand."""
        after = self.progress.results["after RL"]
        if metrics["step"]:
            with timed(self.seconds, "evaluation"):
                after["valid_seen"] = self.evaluate("valid_seen")
        metrics |= {f"eval/{name}": value for name, value in after["valid_seen"].items()}

    def forget_empty_moments(self) -> None:
        """Before the first update: to save or load an optimizer in shards, torch lets it take a step of gradient 0."""
        if not self.progress.updates:
            self.optimizer.state.clear()

    def save_model(self, name: str) -> None:
        """The model and its tokenizer in Hugging Face layout."""
        weights = self.accelerator.get_state_dict(self.model)  # whole, on the first rank
        if self.main:
            self.policy.save_pretrained(self.folder / name, state_dict=weights)
            self.tokenizer.save_pretrained(self.folder / name)
        self.accelerator.wait_for_everyone()

    def log(self, file, metrics: dict) -> None:
        """Write the line of a step, with where its seconds went, and note how far the run is."""
        progress = self.progress
        for part, value in self.seconds.items():
            metrics[f"seconds/{part}"] = value
            progress.seconds[part] = progress.seconds.get(part, 0.0) + value
        self.seconds.clear()
        finite = {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}
        if self.main:
            file.write(json.dumps(dict.fromkeys(metrics) | finite) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.accelerator.log(finite, metrics["step"])
        progress.step, progress.position, progress.metrics_size = metrics["step"], self.stream.position, file.tell()
        progress.updates += metrics.get("updates", 0)


def sample_step(run: Run, step: int) -> tuple[list, list, dict[str, float]]:
    """Groups to train on, by dynamic sampling where the method has it; all groups that were sampled; their metrics."""
    c, everything = run.config, []

    def sample(attempt: int) -> list[list[Trajectory]]:
        tasks = run.stream.take(c.groups_per_step)
        each = [task for task in tasks for _ in range(c.group_size)]
        played = run.play(each, (step, attempt))
        groups = [played[i : i + c.group_size] for i in range(0, len(played), c.group_size)]
        everything.extend(groups)
        return groups

    settings = numbers_of(collect_groups, c) | {"dynamic_sampling": c.dynamic_sampling and step > c.filter_cold_start}
    groups, counts = collect_groups(sample, c.groups_per_step, **settings)
    return groups, everything, sampling_metrics(everything) | counts


def weigh(run: Run, groups: list, reference, packs: list) -> tuple[bool, dict[str, float]]:
    """Give every turn and every sampled token its entropy and its advantage; whether any advantage differs from 0."""
    c, turns = run.config, [turn for group in groups for trajectory in group for turn in trajectory.turns]
    entropy = add_old_logprobs(run.model, reference, packs, c.temperature, len(turns))  # [N]
    table = turn_table(groups, np.nan_to_num(entropy), c.inadmissible_is_invalid)
    advantage = ADVANTAGES[c.advantage]
    advantages = advantage(table, **numbers_of(advantage, c))  # [N]
    for i, turn in enumerate(turns):
        turn.entropy, turn.advantage = float(entropy[i]), float(advantages[i])
    add_advantages(packs, advantages, table.trajectory if c.sequence == "trajectory" else None)
    gap = engine_gap(packs, c.rollout_is_cap)
    check_gap(gap["gap/mean"], run.dtype)
    return bool(advantages.any()), {"entropy": float(np.nanmean(entropy)), "padding": padding(packs)} | gap


def train_step(run: Run, reference, step: int) -> dict[str, float]:
    """One rollout and its updates, none where no advantage differs from 0; returns the metrics of the step."""
    c, pad, device = run.config, run.tokenizer.pad_token_id, run.accelerator.device
    with timed(run.seconds, "rollout"):
        run.engine.check(run.policy, step - 1)
        groups, everything, metrics = sample_step(run, step)
    run.engine.sleep()
    metrics["rate/rollout"] = metrics["sampled_tokens"] / run.seconds["rollout"]
    metrics |= dict.fromkeys(UPDATE_METRICS) | {"tokens": 0, "updates": 0, "skipped_updates": 0}
    rows = make_rows(groups, run.env.append_only, c.mask_invalid)
    rng = generator(c.seed, "mini-batches", step)
    batches = make_mini_batches(rows, c.mini_batch, c.tokens_per_micro_batch, pad, rng, device)
    with timed(run.seconds, "weighing"):
        differ, seen = weigh(run, groups, reference, sum(batches, [])) if rows else (False, {})
    metrics |= seen
    with timed(run.seconds, "update"):
        if differ:
            surrogate = partial(SURROGATES[c.surrogate], **numbers_of(SURROGATES[c.surrogate], c))
            loss = partial(policy_loss, surrogate, **numbers_of(policy_loss, c))
            settings = numbers_of(update_policy, c) | {"backward": run.accelerator.backward}
            metrics |= update_policy(run.model, run.optimizer, batches, loss, **settings)
            metrics["tokens"] = sum(len(row.sampled) for row in rows)
    run.sync(step)
    metrics["rate/update"] = c.epochs * metrics["tokens"] / run.seconds["update"]
    with timed(run.seconds, "recording"):
        rng = generator(c.seed, "records", step)
        lines = record_groups(everything, c.record_groups, rng, run.env, run.tokenizer, step)
        if run.main:
            run.progress.rollouts_size = append_step(run.folder / "rollouts.jsonl.gz", lines)
    return metrics


def reason_to_stop(run: Run, history: list[dict], signals: list[int]) -> str:
    """Why training ends behind the last step of history before its time; empty if it does not."""
    c, spent = run.config, run.progress.seconds
    if signals:
        return f"signal {signals[0]}"
    used = sum(value for seconds in (run.seconds, spent) for part, value in seconds.items() if part != "cloning")
    if 0 < 60 * c.max_minutes < used:
        return f"max_minutes {c.max_minutes} reached"
    if c.stop_on_collapse and any(history[-1][f"collapse/{sign}"] for sign in COLLAPSE_SIGNS):
        return "collapse"
    return ""


def train(run: Run) -> int:
    """The loop from where the run stands: a step, its line, an evaluation and a checkpoint now and then.

    Returns 0, or the signal that asked it to stop. RuntimeError after three steps in a row of non-finite gradients
    alone; OSError where a file cannot be written.
    """
    c, progress, path = run.config, run.progress, run.folder / "metrics.jsonl"
    dtype = str(run.dtype).removeprefix("torch.")  # on loading: .to(dtype) would round buffers, RoPE's among them
    reference, _ = load_policy(str(run.folder / "reference"), [], c.hidden, c.layers, dtype)
    reference = reference.to(run.accelerator.device).requires_grad_(False)  # whole on every rank
    if run.checkpoint:
        run.accelerator.load_state(str(run.checkpoint))
        run.forget_empty_moments()
        run.sync(progress.step)
    history, todo, signals = read_metrics(path), range(progress.step + 1, c.steps + 1), []
    bar = tqdm(todo, c.method, initial=todo.start, total=todo.stop, disable=not run.main)
    with open(path if run.main else os.devnull, "a") as log, bar, checkpoint.noted_signals() as noted:
        for step in bar:
            metrics = {"step": step} | (train_step(run, reference, step) if step else {})
            history.append(metrics)
            metrics |= collapse_signs(history)
            if run.main and (warning := collapse_warning(history)):
                tqdm.write(warning, file=sys.stderr)
            evaluated = step % c.eval_every == 0 or step == c.steps
            if evaluated:
                run.evaluate_step(metrics)
            signals = gather(list(noted))
            stop = next(filter(None, gather([reason_to_stop(run, history, signals)])), "")
            if stop and not evaluated and not signals:
                run.evaluate_step(metrics)
            run.log(log, metrics)
            held_out = progress.results["after RL"]["valid_seen"]["success"]
            bar.set_postfix(train=f"{metrics.get('train/success', 0):.2f}", held_out=f"{held_out:.2f}")
            if stop or step == c.steps or step % c.save_every == 0:
                with timed(run.seconds, "saving"):
                    checkpoint.save(run.accelerator, run.folder, progress)
                    run.forget_empty_moments()
            if len(history) > 3 and all(m["skipped_updates"] > m["updates"] == 0 for m in history[-3:]):
                raise RuntimeError(f"step {step}: every gradient of the last 3 steps was non-finite; see {run.folder}")
            if stop:
                tqdm.write(f"stopped at step {step} of {c.steps}: {stop}", file=sys.stderr)
                break
    return signals[0] if signals else 0


def start(run: Run) -> None:
    """What comes before the first step: the players to compare with, cloning, and the reference of the KL."""
    c, results = run.config, run.progress.results
    results |= evaluate_players(run.env, run.panels, c.seed)
    if c.sft_steps:
        with timed(run.seconds, "cloning"):
            run.progress.cloning_loss = clone_policy(run)[-1]
    run.sync(0)
    results["after cloning"] = {split: run.evaluate(split) for split in SPLITS}
    results["after RL"] = {"valid_seen": results["after cloning"]["valid_seen"]}
    run.save_model("reference")


def main(argv: list[str] | None = None) -> dict[str, dict]:
    """Run everything; returns the results by policy and panel."""
    logging.disable_progress_bar()
    getLogger("accelerate").setLevel("ERROR")  # it warns of a tied head at every checkpoint, and loads it well
    config = parse(argv)
    try:
        run = Run(config)
    except (ValueError, OSError) as error:
        print(f"train.py: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    progress, results = run.progress, run.progress.results
    began = time.perf_counter() - sum(progress.seconds.values())
    try:
        if not run.checkpoint:
            start(run)
        stopped = train(run)
        run.save_model("model")
        if run.main:
            plot_curves(run.folder, f"{config.task} · {config.method} · seed {config.seed}")
        run.accelerator.wait_for_everyone()  # a rank that exits ends the others
        if stopped:
            sys.exit(128 + stopped)
        results["after RL"]["valid_unseen"] = run.evaluate("valid_unseen")
        if not run.main:
            return results
        report = {"results": results, "seconds": progress.seconds, "cloning_loss": progress.cloning_loss}
        report["engine"] = type(run.engine).__name__
        checkpoint.write_json(run.folder / "results.json", report)
    except (OSError, SafetensorError) as error:
        print(f"train.py: {run.folder}: {error}", file=sys.stderr)  # at once: the other ranks may still wait
        sys.exit(1)
    finally:
        run.engine.close()
        run.accelerator.end_training()
    print(closing_table(results, progress.seconds, time.perf_counter() - began))
    print(f"\n{run.folder}: {', '.join(sorted(path.name for path in run.folder.iterdir()))}")
    return results


if __name__ == "__main__":
    main()
