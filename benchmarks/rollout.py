"""Rollouts on both engines, against vLLM alone on the same prompts; needs requirements-vllm.txt or -cpu.txt.

    python benchmarks/rollout.py                               # the built-in model, 0.1 M parameters
    python benchmarks/rollout.py --hidden 256                  # 1.8 M
    python benchmarks/rollout.py --prompt_style words          # the paper's prompt, ten times as long

A policy is cloned from the task's expert, so that its episodes are as long as in training. Then every repeat plays
the same tasks with the same seeds on either engine. Raw vLLM is given the prompts that its rollout read: in the same
calls, a turn each, and all in one. Ratios are medians over repeats that take turns in one process.
"""

import argparse
import random
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

import torch
from accelerate import Accelerator

sys.path.insert(0, str(Path(__file__).parent.parent))

from config import make_envs, numbers_of, resolve  # noqa: E402
from engines import Sampling, TransformersEngine, VLLMEngine  # noqa: E402
from policy import load_policy  # noqa: E402
from rollout import TaskStream, generator, run_episodes  # noqa: E402
from sft import clone, expert_rows  # noqa: E402


def timed(function, *args, **kwargs):
    """(seconds, result) of a call."""
    start = time.perf_counter()
    result = function(*args, **kwargs)
    return time.perf_counter() - start, result


class Stopwatch:
    """Stands before an object, and notes the seconds of each call of a method."""

    def __init__(self, inner, calls: list):
        self.inner, self.calls = inner, calls

    def __getattr__(self, name):
        member = getattr(self.inner, name)
        if not callable(member):
            return member

        def call(*args, **kwargs):
            seconds, result = timed(member, *args, **kwargs)
            self.calls.append(seconds)
            return result

        return call


def cloned_policy(config, env):
    """(model, tokenizer) after config.sft_steps steps of cloning."""
    model, tokenizer = load_policy(config.model, env.words(), config.hidden, config.layers, config.dtype)
    shown, rng = TaskStream(env.tasks("train"), 0).take(len(env.tasks("train"))), random.Random(0)
    rows = expert_rows(env, shown, tokenizer, 500, config.expert_noise, config.malformed, rng)
    settings = numbers_of(clone, config) | {"pad": tokenizer.pad_token_id, "rng": generator(0, "cloning")}
    clone(model, Accelerator(cpu=True), rows, **settings)
    return model, tokenizer


def rollout(engine, tokenizer, envs, config, tasks, repeat: int) -> dict:
    """Play the tasks once: seconds in all, in the engine and in the environments; turns and tokens."""
    in_engine, in_envs = [], []
    sampling = Sampling(config.temperature, config.max_response_tokens)
    watched = [Stopwatch(env, in_envs) for env in envs]
    keys = [(repeat, i) for i in range(len(tasks))]
    play = partial(run_episodes, Stopwatch(engine, in_engine), tokenizer, watched, tasks, keys, sampling)
    seconds, played = timed(play, config.max_prompt_tokens)
    turns = [turn for trajectory in played for turn in trajectory.turns]
    tokens = sum(len(turn.response_ids) for turn in turns)
    parts = {"seconds": seconds, "engine": sum(in_engine), "envs": sum(in_envs)}
    return parts | {"turns": len(turns), "tokens": tokens}


def main() -> None:
    """Clone, play, print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--episodes", type=int, default=128)
    parser.add_argument("--sft_steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompt_style", default="compact")
    args = parser.parse_args()
    episodes, repeats = args.__dict__.pop("episodes"), args.__dict__.pop("repeats")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config, _ = resolve(vars(args) | {"max_prompt_tokens": 1024, "kv_cache_gib": 1.0})
    envs = make_envs(config, episodes)
    model, tokenizer = cloned_policy(config, envs[0])
    ours = TransformersEngine(model, tokenizer)
    max_tokens = config.max_prompt_tokens + config.max_response_tokens
    vllm = VLLMEngine(model, tokenizer, model.dtype, max_tokens, config.kv_cache_gib)
    vllm.load_weights(model, 0)
    vllm.check(model, 0)
    calls, hits, raw = [], {}, vllm.llm.generate

    def recorded(prompts, params, **kwargs):
        outputs = raw(prompts, params, **kwargs)
        calls.append((prompts, params))
        for output in outputs:
            cached, read = hits.get(len(calls), (0, 0))
            hits[len(calls)] = (cached + output.num_cached_tokens, read + len(output.prompt_token_ids))
        return outputs

    def replay(batches):
        vllm.llm.reset_prefix_cache()
        return [raw(prompts, params, use_tqdm=False) for prompts, params in batches]

    stream, rows = TaskStream(envs[0].tasks("train"), 1), []
    for repeat in range(repeats + 1):  # the first one warms up
        tasks = stream.take(episodes)
        calls.clear()
        hits.clear()
        transformers = rollout(ours, tokenizer, envs, config, tasks, repeat)
        vllm.llm.reset_prefix_cache()
        vllm.llm.generate = recorded
        with_vllm = rollout(vllm, tokenizer, envs, config, tasks, repeat)
        vllm.llm.generate = raw
        turnwise, _ = timed(replay, calls)
        together = [sum((call[part] for call in calls), []) for part in (0, 1)]
        at_once, _ = timed(replay, [together])
        if repeat:
            rows.append((transformers, with_vllm, turnwise, at_once))

    def over_rows(value) -> float:
        return median(value(*row) for row in rows)

    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{size / 1e6:.2f} M parameters, {episodes} episodes, float32, one thread, {repeats} repeats\n")
    print("| engine | tokens/s | seconds | in the engine | in environments | turns | tokens |")
    print("|---|---|---|---|---|---|---|")
    for index, name in ((0, "transformers"), (1, "vllm")):
        one = {
            key: median(row[index][key] for row in rows) for key in ("seconds", "engine", "envs", "turns", "tokens")
        }
        rate = median(row[index]["tokens"] / row[index]["seconds"] for row in rows)
        print(
            f"| {name} | {rate:.0f} | {one['seconds']:.2f} | {one['engine']:.2f} | {one['envs']:.2f} "
            f"| {one['turns']:.0f} | {one['tokens']:.0f} |"
        )
    print("\n| ratio | median | lowest | highest |\n|---|---|---|---|")
    for name, ratio in {
        "rollout on vLLM / on Transformers, tokens/s": lambda t, v, *_: (
            v["tokens"] / v["seconds"] / (t["tokens"] / t["seconds"])
        ),
        "rollout on vLLM / raw vLLM, the same calls": lambda t, v, turnwise, _: turnwise / v["seconds"],
        "rollout on vLLM / raw vLLM, all prompts in one call": lambda t, v, _, at_once: at_once / v["seconds"],
    }.items():
        values = [ratio(*row) for row in rows]
        print(f"| {name} | {over_rows(ratio):.2f} | {min(values):.2f} | {max(values):.2f} |")
    shares = ", ".join(f"{cached / read:.2f}" for cached, read in hits.values())
    print(f"\nPrompt tokens read from vLLM's prefix cache, by turn (last repeat): {shares}")


if __name__ == "__main__":
    main()
