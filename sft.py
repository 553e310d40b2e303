"""Behaviour cloning, the first step of the paper's recipe (Section 3.1, (1)): of an expert, or of own solved rollouts.

The policy after cloning is where RL starts and what its KL refers to. Prompts are those of RL, turn by turn.
"""

import random
from collections.abc import Callable
from itertools import cycle

import numpy as np
import torch
from tqdm import tqdm

from config import numbers_of
from engines import Generation
from envs import TAGS
from policy import Row, make_packs, sampled_logprobs
from ranks import add_up, place
from rollout import (
    Episode,
    TaskStream,
    Trajectory,
    check_failures,
    digest,
    encode_prompts,
    generator,
    make_rows,
)


def play_scripted(env, task: str, respond: Callable, tokenizer=None) -> tuple[list[tuple], Trajectory]:
    """An episode without a model: respond(env, observation) -> text. Returns [(prompt, text)] and the trajectory.

    With a tokenizer its turns have the ids that a policy would read and say.
    """
    episode = Episode(env, task, (), Trajectory(task))
    said, goes_on = [], True
    while goes_on:
        text, prompt_ids, ids = respond(env, episode.observation), [], []
        if tokenizer:
            [prompt_ids] = encode_prompts(tokenizer, [episode])
            ids = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        said.append((episode.prompt, text))
        goes_on = episode.advance(prompt_ids, Generation(ids, [], False), text)
    return said, episode.trajectory


def malform(response: str, rng: random.Random) -> str:
    """The response without one of its tags."""
    return response.replace(rng.choice(TAGS), "", 1)


def expert_rows(env, tasks, tokenizer, count: int, noise: float, malformed: float, rng: random.Random) -> list[Row]:
    """Turns of `count` solved episodes of a noisy expert that sometimes breaks the format; unsolved ones are dropped.

    Raises RuntimeError once fewer than one episode in a hundred is solved.
    """

    def respond(env, observation) -> str:
        response = env.expert(rng, noise)
        return malform(response, rng) if rng.random() < malformed else response

    solved = []
    for played, task in enumerate(cycle(tasks), start=1):
        trajectory = play_scripted(env, task, respond, tokenizer)[1]
        if trajectory.success:
            solved.append(trajectory)
        if len(solved) == count:
            break
        if played >= 200 and len(solved) < played / 100:
            raise RuntimeError(
                f"the expert solved {len(solved)} of {played} episodes; sft_episodes {count} cannot be had"
            )
    return make_rows([solved], env.append_only)


def solved_rows(trajectories: list[Trajectory], append_only: bool) -> list[Row]:
    """Rows of the trajectories that succeeded, token by token as they were sampled. RuntimeError if none did."""
    solved = [trajectory for trajectory in trajectories if trajectory.success and not trajectory.error]
    if not solved:
        raise RuntimeError(
            f"none of {len(trajectories)} own rollouts succeeded: there is nothing to clone; see --sft_data"
        )
    return make_rows([solved], append_only)


def clone(
    model,
    accelerator,
    rows: list[Row],
    *,
    sft_steps: int,
    sft_batch: int,
    sft_learning_rate: float,
    weight_decay: float,
    grad_clip: float,
    tokens_per_micro_batch: int,
    pad: int,
    rng: np.random.Generator,
) -> list[float]:
    """Maximise the log-probability of the rows' sampled tokens; returns the loss of each step, nats a token.

    loss = -sum(logprobs) / num_tokens;   AdamW, warm-up over a tenth of the steps, then linearly to 0
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=sft_learning_rate, weight_decay=weight_decay)
    warm_up = max(1, sft_steps // 10)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, (sft_steps - step) / max(1, sft_steps - warm_up))
    )
    history = []
    for _ in tqdm(range(sft_steps), desc="cloning", leave=False, disable=place()[0] > 0):
        chosen = [rows[i] for i in rng.integers(len(rows), size=sft_batch)]
        packs = make_packs(chosen, tokens_per_micro_batch, pad, accelerator.device)
        tokens = sum(len(row.sampled) for row in chosen)
        total = torch.zeros((), device=accelerator.device)
        for pack in packs:
            logprobs, _ = sampled_logprobs(model, pack, 1.0)
            loss = -logprobs.sum() / tokens
            accelerator.backward(loss * accelerator.num_processes)  # undoes the mean over ranks
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        history.append(add_up(total).item())
    return history


def clone_policy(run) -> list[float]:
    """Clone the task's expert or the run's own solved rollouts into its policy, by the settings sft_*; the losses."""
    c, tasks = run.config, run.env.tasks("train")
    stream = TaskStream(tasks, digest(c.seed, "cloning"))
    if c.sft_data == "expert":
        rng, shown = random.Random(digest(c.seed, "expert")), stream.take(len(tasks))
        rows = expert_rows(run.env, shown, run.tokenizer, c.sft_episodes, c.expert_noise, c.malformed, rng)
    else:
        run.sync(0)
        trajectories = run.play(stream.take(c.sft_episodes), ("cloning",))
        check_failures(trajectories, c.max_failures)
        rows = solved_rows(trajectories, run.env.append_only)
    run.engine.sleep()
    pad, rng = run.tokenizer.pad_token_id, generator(c.seed, "cloning batches")
    return clone(run.model, run.accelerator, rows, pad=pad, rng=rng, **numbers_of(clone, c))
