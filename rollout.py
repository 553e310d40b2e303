"""Rollouts: multi-turn episodes in lock step, groups of them, dynamic sampling, and the rows and table made from them.

Ids, log-probabilities, reward, state and validity of a turn travel in one record. Sampled ids are never decoded and
encoded again: text is read from them, ids are not made from it. An episode whose environment fails is excluded and
counted, never scored 0.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import chain

import numpy as np

from advantages import TurnTable
from engines import Generation, Prompt, Sampling
from policy import Row
from ranks import gather, share


@dataclass
class Turn:
    prompt_ids: list[int]  # what the engine read
    response_ids: list[int]  # what the policy sampled, the stop token included; never empty
    rollout_logprobs: list[float]  # reported by the engine, one per response id
    text: str  # the response without its stop token
    state: int  # int64 digest of the state the turn acted in
    action: str | None  # None where the format is broken
    valid: bool  # whether the format holds
    admissible: bool  # whether the action is one of those the observation lists
    reward: float  # from the environment, without penalty
    note: str = ""  # of the environment, to be counted
    entropy: float | None = None  # of the old policy, mean over the response; None until it is trained on
    advantage: float | None = None


@dataclass
class Trajectory:
    task: str
    turns: list[Turn] = field(default_factory=list)
    success: bool = False
    score: float = 0.0
    truncated: bool = False  # ended by a limit on turns or context
    error: str = ""  # why the episode is excluded

    @property
    def reward(self) -> float:
        """Sum of the turns' rewards, without penalty."""
        return sum(turn.reward for turn in self.turns)


def digest(*parts) -> int:
    """A non-negative int64 that depends on the parts alone: sampling seeds, state keys."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


def generator(*parts) -> np.random.Generator:
    """A generator of its own for every use: parts are the run's seed, what it is for, and where in the run."""
    return np.random.default_rng(digest(*parts))


class Episode:
    """One environment at play, the prompt of its coming turn, and the trajectory it writes."""

    def __init__(self, env, task: str, key: tuple, trajectory: Trajectory):
        self.env, self.key, self.trajectory = env, key, trajectory
        self.observation = env.reset(task)
        self.history = []  # (observation, action) of the turns before
        self.prompt = env.prompt([(self.observation, None)])

    def advance(self, prompt_ids: list[int], generation: Generation, text: str) -> bool:
        """Act on a response, record the turn, say whether to go on. A cut or malformed response acts as None."""
        action, valid = self.env.parse(text)
        if generation.truncated:
            action, valid = None, False
        before = self.observation
        step = self.env.step(action)
        self.trajectory.turns.append(
            Turn(
                prompt_ids=prompt_ids,
                response_ids=generation.ids,
                rollout_logprobs=generation.logprobs,
                text=text,
                state=digest(before.state_key),
                action=action,
                valid=valid,
                admissible=before.actions is None or action in before.actions,
                reward=float(step.reward),
                note=step.note,
            )
        )
        self.trajectory.success, self.trajectory.score = bool(step.success), float(step.score)
        self.history.append((before, action))
        self.observation = step.observation
        self.trajectory.truncated = not step.done and len(self.history) >= self.env.max_turns
        if step.done or self.trajectory.truncated:
            return False
        if self.env.append_only:
            self.prompt = self.env.render(self.observation)
        else:
            self.prompt = self.env.prompt([*self.history, (self.observation, None)])
        return True


def encode_prompts(tokenizer, episodes: list[Episode]) -> list[list[int]]:
    """Prompt ids of the coming turns: a fresh chat, or, where a task appends, the ids before and the new text's."""

    def text(prompt) -> str:
        if isinstance(prompt, str):
            return prompt
        return tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)

    if not episodes:
        return []
    ids = tokenizer([text(episode.prompt) for episode in episodes], add_special_tokens=False)["input_ids"]
    for i, episode in enumerate(episodes):
        if episode.env.append_only and episode.trajectory.turns:
            last = episode.trajectory.turns[-1]
            ids[i] = last.prompt_ids + last.response_ids + ids[i]
    return ids


def check_first_prompt(tokenizer, env, task: str, max_prompt_tokens: int) -> None:
    """ValueError where the first prompt of a task is too long, or holds what the tokenizer has no token for."""
    try:
        length = len(encode_prompts(tokenizer, [Episode(env, task, (), Trajectory(task))])[0])
    except Exception as error:  # tokenizers raises no other type
        raise ValueError(f"the first prompt of {task} cannot be played with this model: {error}") from error
    if length > max_prompt_tokens:
        raise ValueError(f"--max_prompt_tokens {max_prompt_tokens}: allowed is {length} and up, a first prompt")


def act(episode: Episode, prompt_ids: list[int], generation: Generation, text: str) -> bool:
    """Advance an episode; an exception of its environment ends it, and is its `error`."""
    try:
        return episode.advance(prompt_ids, generation, text)
    except Exception as error:
        episode.trajectory.error = f"turn {len(episode.history)}: {error!r}"
        return False


def run_episodes(
    engine, tokenizer, envs: list, tasks: list[str], keys: list[tuple], sampling: Sampling, max_prompt_tokens: int
) -> list[Trajectory]:
    """Play every task once, this rank its share, and return the trajectories of all ranks in the order of tasks.

    All environments play one turn at a time; a free one takes the next task. keys[i] with the turn number seeds the
    sampling of task i, so that what it draws does not depend on the others. Where an environment's steps wait for
    something (`blocking`), those of a turn do so side by side. An exception of an environment ends its episode with
    `error` set; one of the engine, and an interrupt, propagate.
    """
    sampling = replace(sampling, stop=tuple(getattr(envs[0], "stop", ())))
    tasks, keys = share(tasks), share(keys)
    trajectories = [Trajectory(task) for task in tasks]
    waiting, free, playing = deque(range(len(tasks))), list(envs), []
    while waiting or playing:
        idle, free = free, []  # an environment that fails now gets its next task a turn later, not all of them at once
        while waiting and idle:
            i, env = waiting.popleft(), idle.pop()
            try:
                playing.append(Episode(env, tasks[i], keys[i], trajectories[i]))
            except Exception as error:
                trajectories[i].error = f"reset: {error!r}"
                free.append(env)
        free += idle
        ready, prompts = [], []
        for episode, ids in zip(playing, encode_prompts(tokenizer, playing), strict=True):
            if len(ids) <= max_prompt_tokens:
                ready.append(episode)
                prompts.append(ids)
                continue
            free.append(episode.env)
            episode.trajectory.truncated = True
            if not episode.trajectory.turns:
                episode.trajectory.error = f"first prompt: {len(ids)} tokens, max_prompt_tokens {max_prompt_tokens}"
        playing = []
        if not ready:
            continue
        seeds = [digest(*episode.key, len(episode.history)) for episode in ready]
        generations = engine.generate([Prompt(ids) for ids in prompts], seeds, sampling)
        texts = tokenizer.batch_decode([g.ids if g.truncated or g.by_text else g.ids[:-1] for g in generations])
        with ThreadPoolExecutor() as pool:
            each = pool.map if getattr(envs[0], "blocking", False) else map
            for episode, goes_on in zip(ready, each(act, ready, prompts, generations, texts), strict=True):
                if goes_on:
                    playing.append(episode)
                else:
                    free.append(episode.env)
    return gather(trajectories)


class TaskStream:
    """Training tasks in an order that depends on the seed alone, a new one each epoch; `position` is all its state."""

    def __init__(self, tasks: list[str], seed: int, position: int = 0):
        self.tasks, self.seed, self.position = tasks, seed, position

    def take(self, count: int) -> list[str]:
        """The next `count` tasks."""
        size, positions = len(self.tasks), range(self.position, self.position + count)
        epochs = {position // size for position in positions}
        orders = {epoch: generator(self.seed, "tasks", epoch).permutation(size) for epoch in epochs}
        self.position += count
        return [self.tasks[orders[position // size][position % size]] for position in positions]


def is_informative(group: list[Trajectory]) -> bool:
    """The paper's constraint on a group (Eq. 7, 8): some, not all, of its surviving trajectories succeed."""
    survivors = [trajectory for trajectory in group if not trajectory.error]
    return 0 < sum(trajectory.success for trajectory in survivors) < len(survivors)


def check_failures(trajectories: list[Trajectory], max_failures: float) -> int:
    """How many episodes failed. RuntimeError if their share exceeds max_failures, or if all did."""
    failed = [trajectory for trajectory in trajectories if trajectory.error]
    count, total = len(failed), len(trajectories)
    if failed and (count > max_failures * total or count == total):
        raise RuntimeError(
            f"{count} of {total} episodes failed, max_failures {max_failures}; first: {failed[0].error}"
        )
    return count


def collect_groups(
    sample: Callable[[int], list[list[Trajectory]]],
    num_groups: int,
    *,
    dynamic_sampling: bool,
    max_tries: int = 1,
    fill_uniform: bool = False,
    max_failures: float = 0.2,
) -> tuple[list[list[Trajectory]], dict[str, int]]:
    """Groups to train on, and the counts failed, tries, groups_kept; sample(attempt) plays `num_groups` new groups.

    With dynamic sampling only informative groups are kept, in order of (attempt, prompt); attempts go on until
    `num_groups` are kept or `max_tries` were made, and what was kept is trained on, be it nothing. Surplus groups
    are dropped. fill_uniform fills the gap with the rest (the released code). RuntimeError as in `check_failures`.
    """
    kept, rest, everything = [], [], []
    attempt = 0
    while attempt < (max_tries if dynamic_sampling else 1) and len(kept) < num_groups:
        groups = sample(attempt)
        everything += groups
        for group in groups:
            survivors = [trajectory for trajectory in group if not trajectory.error]
            keep = is_informative(survivors) if dynamic_sampling else bool(survivors)
            (kept if keep else rest).append(survivors)
        attempt += 1
    failed = check_failures(list(chain.from_iterable(everything)), max_failures)
    if fill_uniform:
        kept += [group for group in rest if group]
    kept = kept[:num_groups]
    return kept, {"failed": failed, "tries": attempt, "groups_kept": len(kept)}


def make_rows(groups: list[list[Trajectory]], append_only: bool = False, mask_invalid: bool = False) -> list[Row]:
    """One row a turn, or, where the context only grows, one a trajectory. Sequences are the rows of `turn_table`.

    mask_invalid leaves out a trajectory with a turn whose format does not hold (SimpleTIR's void turns); it still
    counts in the baseline of its group.
    """
    rows, sequence = [], 0
    for trajectory in chain.from_iterable(groups):
        merged = None
        if mask_invalid and not all(turn.valid for turn in trajectory.turns):
            sequence += len(trajectory.turns)
            continue
        for turn in trajectory.turns:
            ids, start = turn.prompt_ids + turn.response_ids, len(turn.prompt_ids)
            sampled = list(range(start, len(ids)))
            if not sampled:
                raise ValueError(f"turn without a sampled token in {trajectory.task}")
            if merged is None:
                merged = Row(ids, sampled, [sequence] * len(sampled), list(turn.rollout_logprobs))
                rows.append(merged)
            elif turn.prompt_ids[: len(merged.ids)] != merged.ids:
                raise ValueError(
                    f"the context of {trajectory.task} was rewritten: a prompt must start with the ids before it"
                )
            else:
                merged.ids = ids
                merged.sampled += sampled
                merged.sequence += [sequence] * len(sampled)
                merged.rollout_logprobs += turn.rollout_logprobs
            if not append_only:
                merged = None
            sequence += 1
    return rows


def turn_table(
    groups: list[list[Trajectory]], entropy: np.ndarray, inadmissible_is_invalid: bool = False
) -> TurnTable:
    """The turns of all groups in order of (group, trajectory, turn), with the old policy's entropy [N] of each.

    inadmissible_is_invalid penalises a well-formed action that the observation does not list as well (the released
    code).
    """
    records = [
        (
            g,
            t,
            k,
            turn.state,
            turn.reward,
            turn.valid and (turn.admissible or not inadmissible_is_invalid),
            trajectory.success,
        )
        for t, (g, trajectory) in enumerate((g, trajectory) for g, group in enumerate(groups) for trajectory in group)
        for k, turn in enumerate(trajectory.turns)
    ]
    columns = zip(*records, strict=True)
    dtypes = (np.int64, np.int64, np.int64, np.int64, np.float64, bool, bool)
    return TurnTable(*(np.array(column, dtype) for column, dtype in zip(columns, dtypes, strict=True)), entropy)
