"""Settings: one flat dataclass, one flag a field. Default < method < recipe < command line."""

import difflib
import inspect
from argparse import SUPPRESS
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, get_args

from transformers import HfArgumentParser

import envs
from advantages import ADVANTAGES
from grpo import METHODS, Method
from losses import AGGREGATIONS, SURROGATES
from recipes import SAMPO_RELEASED, recipe


def knob(default, text: str):
    """A field with its help text."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Config:
    # the run
    method: Literal[tuple(METHODS)] = knob("sampo", "point in the four dimensions; python grpo.py prints the table")
    task: str = knob("sokoban", "a task of envs/, or path.py:Class")
    model: str = knob("", "folder or hub name of a causal language model; empty is the built-in tiny one")
    recipe: Literal["auto", "tiny", "paper"] = knob(
        "auto", "numbers to start from; auto is paper with --model, else tiny"
    )
    seed: int = knob(0, "of everything random")
    output: str = knob("runs", "folder of run folders")
    name: str = knob("", "run folder in output; empty is <task>-<method>-seed<seed>")
    overwrite: bool = knob(False, "replace a run folder that exists")
    max_minutes: float = knob(0.0, "stop training after this time, evaluate and save; 0 is no limit")
    # the method's dimensions; a flag here changes the method
    aggregation: Literal[AGGREGATIONS] = knob("token-mean", "loss aggregation")
    surrogate: Literal[tuple(SURROGATES)] = knob("ppo_clip", "clipping of the importance ratio")
    seq_mask: bool = knob(False, "mask negative-advantage sequences that drifted by more than delta")
    dynamic_sampling: bool = knob(False, "train on groups with some, not all, successes; sample more to fill the step")
    advantage: Literal[tuple(ADVANTAGES)] = knob("grpo", "advantage design")
    # numbers of the surrogates
    clip_low: float = knob(0.2, "ratio is clipped below 1 - clip_low")
    clip_high: float = knob(0.2, "ratio is clipped above 1 + clip_high")
    dual_clip: float = knob(0.0, "ppo_clip: bound on the loss at negative advantages, above 1; 0 is off")
    tau_pos: float = knob(1.0, "sapo: temperature of the gate at positive advantages")
    tau_neg: float = knob(1.05, "sapo: temperature of the gate at other advantages")
    delta: float = knob(3e-3, "seq_mask: tolerated mean of old_logprobs - logprobs, nats a token")
    # numbers of the advantages
    std: bool = knob(True, "divide by the standard deviation of the group")
    baseline: Literal["trajectory", "turn"] = knob("trajectory", "what counts once in a group's mean and deviation")
    penalty: float = knob(0.1, "format penalty of an invalid response")
    penalty_scope: Literal["turn_sum", "episode", "turn_local"] = knob("turn_sum", "where the format penalty lands")
    inadmissible_is_invalid: bool = knob(False, "penalise well-formed actions that are not listed (released code)")
    gamma: float = knob(0.95, "gigpo: discount of step returns, by turn")
    omega: float = knob(1.0, "gigpo: weight of the step advantage")
    k: float = knob(1.0, "empg: sensitivity to the turn's entropy")
    k_next: float = knob(1.0, "empg: sensitivity to the next turn's entropy")
    zeta: float = knob(0.05, "empg: weight of the next turn's bonus")
    # the rest of the objective
    kl_coef: float = knob(0.01, "weight of the KL to the reference, the policy after cloning")
    kl_estimator: Literal["k1", "k2", "k3"] = knob("k3", "estimator of that KL")
    entropy_coef: float = knob(0.0, "weight of an entropy bonus")
    # optimisation
    steps: int = knob(100, "rollouts to train on")
    epochs: int = knob(1, "passes over a rollout")
    mini_batch: int = knob(256, "rows (turns) of an optimizer step")
    tokens_per_micro_batch: int = knob(16384, "tokens of a forward pass, padding included")
    learning_rate: float = knob(1e-6, "AdamW, constant")
    weight_decay: float = knob(0.01, "AdamW")
    grad_clip: float = knob(1.0, "largest norm of a gradient")
    # rollout
    groups_per_step: int = knob(16, "task instances of a step")
    group_size: int = knob(8, "trajectories of a task instance")
    temperature: float = knob(1.0, "of sampling and of every training log-probability")
    max_prompt_tokens: int = knob(2048, "a longer prompt ends the episode as truncated")
    max_response_tokens: int = knob(512, "a response cut here is invalid")
    max_tries: int = knob(3, "dynamic sampling: rollouts of a step at most")
    filter_cold_start: int = knob(0, "dynamic sampling: steps before it starts (released code)")
    fill_uniform: bool = knob(False, "dynamic sampling: fill the last gap with uninformative groups (released code)")
    max_failures: float = knob(0.2, "share of crashed episodes above which the run stops")
    # cloning
    sft_data: Literal["expert", "rollouts"] = knob(
        "expert", "clone a noisy expert, or the model's own solved rollouts"
    )
    sft_episodes: int = knob(2000, "solved episodes to clone (expert), or episodes to sample (rollouts)")
    sft_steps: int = knob(500, "optimizer steps; 0 is no cloning")
    sft_batch: int = knob(128, "rows (turns) of a cloning step")
    sft_learning_rate: float = knob(1e-3, "AdamW, warm-up over a tenth, then linearly to 0")
    expert_noise: float = knob(0.4, "probability that the expert plays a random move")
    malformed: float = knob(0.1, "probability that the expert breaks the response format")
    # evaluation
    eval_every: int = knob(10, "steps between evaluations")
    eval_levels: int = knob(480, "held-out task instances, one episode each")
    eval_temperature: float = knob(1.0, "of sampling in evaluation; 0 is greedy")
    eval_top_p: float = knob(1.0, "of sampling in evaluation")
    eval_top_k: int = knob(0, "of sampling in evaluation; 0 is off")
    # the model
    hidden: int = knob(64, "channels of the built-in model, a multiple of 16")
    layers: int = knob(2, "layers of the built-in model")
    dtype: Literal["float32", "bfloat16"] = knob("float32", "of the parameters of --model")
    # options of the task; each task takes those its constructor names
    size: int = knob(6, "sokoban: rows and columns of a room, border included")
    boxes: int = knob(1, "sokoban: boxes")
    max_walls: int = knob(1, "sokoban: inner walls at most")
    min_solution: int = knob(3, "sokoban: moves of the shortest solution, at least")
    max_solution: int = knob(8, "sokoban: moves of the shortest solution, at most")
    max_turns: int = knob(12, "turns of an episode")
    observation: Literal["coords", "grid"] = knob(
        "coords", "sokoban: coordinates of the objects, or a raster of symbols"
    )
    prompt_style: Literal["compact", "words"] = knob(
        "compact", "the bare observation, or the paper's prompt around it"
    )
    history: int = knob(0, "turns before the current one that a prompt shows")

    def __post_init__(self):
        check(self)


# name: (smallest, largest) value
LIMITS = {
    "seed": (0, 2**32 - 1),
    **dict.fromkeys(("steps", "sft_steps", "filter_cold_start", "eval_top_k", "history", "max_walls"), (0, 10**6)),
    **dict.fromkeys(("epochs", "mini_batch", "groups_per_step", "group_size", "max_tries", "max_turns"), (1, 10**6)),
    **dict.fromkeys(("sft_episodes", "sft_batch", "eval_every", "eval_levels", "layers", "boxes"), (1, 10**6)),
    **dict.fromkeys(("min_solution", "max_solution"), (1, 1000)),
    **dict.fromkeys(("max_prompt_tokens", "max_response_tokens", "tokens_per_micro_batch"), (1, 10**7)),
    **dict.fromkeys(("gamma", "max_failures", "expert_noise", "malformed"), (0.0, 1.0)),
    **dict.fromkeys(
        ("penalty", "omega", "k", "k_next", "zeta", "kl_coef", "entropy_coef", "weight_decay"), (0.0, 1e3)
    ),
    **dict.fromkeys(("clip_low", "clip_high", "dual_clip", "max_minutes"), (0.0, 1e6)),
    **dict.fromkeys(("tau_pos", "tau_neg", "temperature"), (1e-3, 1e3)),
    **dict.fromkeys(("learning_rate", "sft_learning_rate"), (0.0, 1.0)),
    "delta": (-1e3, 1e3),
    "grad_clip": (1e-6, 1e6),
    "eval_temperature": (0.0, 1e3),
    "eval_top_p": (1e-6, 1.0),
    "hidden": (16, 16384),
    "size": (4, 100),
}


def check(config: Config) -> None:
    """Raise ValueError naming the field, its value and what is allowed, for the first value that cannot be."""
    for item in fields(config):
        value, choices = getattr(config, item.name), get_args(item.type)
        if choices and value not in choices:
            raise ValueError(f"--{item.name} {value!r}: allowed are {', '.join(choices)}")
        if item.name in LIMITS and not LIMITS[item.name][0] <= value <= LIMITS[item.name][1]:
            raise ValueError(f"--{item.name} {value}: allowed is {LIMITS[item.name][0]} to {LIMITS[item.name][1]}")
    if config.hidden % 16:
        raise ValueError(f"--hidden {config.hidden}: allowed are multiples of 16")
    if 0 < config.dual_clip <= 1:
        raise ValueError(f"--dual_clip {config.dual_clip}: allowed is 0 (off) or a number above 1")
    if config.dynamic_sampling and config.group_size < 2:
        raise ValueError(f"--group_size {config.group_size}: allowed is at least 2 with dynamic sampling")
    if config.penalty_scope == "turn_local" and config.baseline != "turn":
        raise ValueError(f"--penalty_scope turn_local: allowed with --baseline turn, not {config.baseline}")
    if config.name and Path(config.name).name != config.name or config.name == "..":
        raise ValueError(f"--name {config.name!r}: allowed is the name of a folder in --output")


class Parser(HfArgumentParser):
    """HfArgumentParser without abbreviations, whose errors are one line and exit code 2."""

    def __init__(self):
        super().__init__(
            Config, allow_abbrev=False, description="Stable agentic RL; a flag left out takes the recipe's value."
        )
        for action in self._actions:
            action.default = SUPPRESS  # so that the namespace holds what was typed, and nothing else

    def error(self, message: str):
        """Print the message and leave with code 2."""
        self.exit(2, f"{self.prog}: {message}\n")

    def read(self, argv: list[str] | None) -> dict:
        """The typed values by field; argv None is the command line."""
        typed, unknown = self.parse_known_args(argv)
        if unknown:
            flags = [option for action in self._actions for option in action.option_strings]
            close = difflib.get_close_matches(unknown[0].split("=")[0], flags, n=1)
            self.error(
                f"{' '.join(unknown)}: no such flag; " + (f"the nearest is {close[0]}" if close else "see --help")
            )
        return vars(typed)


def resolve(typed: dict) -> tuple[Config, dict[str, str]]:
    """The settings and where each came from: default, method, recipe, or `typed`, which wins. ValueError if bad."""
    get = {item.name: item.default for item in fields(Config)} | typed
    method = {item.name: getattr(METHODS[get["method"]], item.name) for item in fields(Method)}
    get |= method | typed
    which = get["recipe"] if get["recipe"] != "auto" else "paper" if get["model"] else "tiny"
    layers = [(f"method {get['method']}", method), *recipe(get["task"], which, get["surrogate"], get["advantage"])]
    layers += [("sampo_released", SAMPO_RELEASED)] if get["method"] == "sampo_released" else []
    values, source = {}, {item.name: "default" for item in fields(Config)}
    for where, layer in [*layers, ("command line", typed)]:
        values |= layer
        source |= dict.fromkeys(layer, where)
    return Config(**values), source


def parse(argv: list[str] | None = None) -> Config:
    """Settings from the command line; a bad one ends the program with one line and exit code 2."""
    parser = Parser()
    try:
        return resolve(parser.read(argv))[0]
    except ValueError as error:
        parser.error(str(error))


def numbers_of(function, config: Config) -> dict:
    """The settings that a function (or class) names among its keyword-only arguments."""
    names = {item.name for item in fields(config)}
    parameters = inspect.signature(function).parameters.values()
    return {p.name: getattr(config, p.name) for p in parameters if p.kind is p.KEYWORD_ONLY and p.name in names}


def make_envs(config: Config, count: int) -> list:
    """`count` environments of the task, with the settings that its constructor names as options. ValueError if bad."""
    task = envs.load(config.task)
    return [task(**numbers_of(task, config)) for _ in range(count)]
