"""Settings: one flat dataclass, one flag a field. Default < method < recipe < command line."""

import difflib
import inspect
import json
from argparse import SUPPRESS
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Literal, get_args

from transformers import HfArgumentParser

import envs
from advantages import ADVANTAGES
from grpo import METHODS, Method, print_table
from losses import AGGREGATIONS, SURROGATES
from recipes import RECIPES, print_recipes, recipe


def knob(default, text: str, limits: str | None = None, aliases=()):
    """A field with its help text; a number has limits, `low..high`, which --help shows; aliases are further flags."""
    metadata = {"help": text, "aliases": list(aliases)} | ({"metavar": limits} if limits else {})
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Config:
    # the run
    method: Literal[tuple(METHODS)] = knob("sampo", "point in the four dimensions; python grpo.py prints the table")
    task: str = knob("sokoban", "a task of envs/, or a class of your own, path.py:Class", aliases=["--env"])
    model: str = knob("", "folder or hub name of a causal language model; empty is the built-in tiny one")
    recipe: Literal["auto", "tiny", "paper"] = knob(
        "auto", "numbers to start from; auto is paper with --model, else tiny"
    )
    seed: int = knob(0, "of everything random", "0..4294967295")
    output: str = knob("runs", "folder of run folders")
    name: str = knob("", "run folder in output; empty is <task>-<method>-seed<seed>")
    overwrite: bool = knob(False, "replace a run folder that exists")
    resume: bool = knob(False, "go on from the run folder's newest complete checkpoint, if it has one")
    save_every: int = knob(10, "steps between checkpoints", "1..1e6")
    max_minutes: float = knob(0.0, "stop after this time without cloning, evaluate, save; 0 is no limit", "0..1e6")
    log_with: str = knob("", "also send metrics to this tracker of accelerate: tensorboard, wandb, trackio, ...")
    record_groups: int = knob(4, "groups of a step, drawn from all it sampled, kept in rollouts.jsonl.gz", "0..1e6")
    entropy_threshold: float = knob(
        0.45, "between sequences called sure and unsure in share/ and kl_share/, nats", "0..1e3"
    )
    stop_on_collapse: bool = knob(False, "end training once the collapse monitor warns")
    # the method's dimensions; a flag here changes the method
    aggregation: Literal[AGGREGATIONS] = knob("token-mean", "loss aggregation")
    surrogate: Literal[tuple(SURROGATES)] = knob("ppo_clip", "clipping of the importance ratio")
    seq_mask: bool = knob(False, "mask negative-advantage sequences that drifted by more than delta")
    dynamic_sampling: bool = knob(False, "train on groups with some, not all, successes; sample more to fill the step")
    advantage: Literal[tuple(ADVANTAGES)] = knob("grpo", "advantage design")
    # numbers of the surrogates
    clip_low: float = knob(0.2, "ratio is clipped below 1 - clip_low", "0..1e6")
    clip_high: float = knob(0.2, "ratio is clipped above 1 + clip_high", "0..1e6")
    dual_clip: float = knob(0.0, "ppo_clip: bound on the loss at negative advantages, above 1; 0 is off", "0..1e6")
    tau_pos: float = knob(1.0, "sapo: temperature of the gate at positive advantages", "1e-3..1e3")
    tau_neg: float = knob(1.05, "sapo: temperature of the gate at other advantages", "1e-3..1e3")
    delta: float = knob(3e-3, "seq_mask: tolerated mean of old_logprobs - logprobs, nats a token", "-1e3..1e3")
    sequence: Literal["turn", "trajectory"] = knob("turn", "unit of a ratio; trajectory where contexts only grow")
    # numbers of the advantages
    std: bool = knob(True, "divide by the standard deviation of the group")
    baseline: Literal["trajectory", "turn"] = knob("trajectory", "what counts once in a group's mean and deviation")
    penalty: float = knob(0.1, "format penalty of an invalid response", "0..1e3")
    penalty_scope: Literal["turn_sum", "episode", "turn_local"] = knob("turn_sum", "where the format penalty lands")
    inadmissible_is_invalid: bool = knob(False, "penalise well-formed actions that are not listed (released code)")
    gamma: float = knob(0.95, "gigpo: discount of step returns, by turn", "0..1")
    omega: float = knob(1.0, "gigpo: weight of the step advantage", "0..1e3")
    k: float = knob(1.0, "empg: sensitivity to the turn's entropy", "0..1e3")
    k_next: float = knob(1.0, "empg: sensitivity to the next turn's entropy", "0..1e3")
    zeta: float = knob(0.05, "empg: weight of the next turn's bonus", "0..1e3")
    # the rest of the objective
    kl_coef: float = knob(0.01, "weight of the KL to the reference, the policy after cloning", "0..1e3")
    kl_estimator: Literal["k1", "k2", "k3"] = knob("k3", "estimator of that KL")
    entropy_coef: float = knob(0.0, "weight of an entropy bonus", "0..1e3")
    mask_invalid: bool = knob(False, "leave trajectories with an invalid turn out of the loss (SimpleTIR)")
    # optimisation
    steps: int = knob(100, "rollouts to train on", "0..1e6")
    epochs: int = knob(1, "passes over a rollout", "1..1e6")
    mini_batch: int = knob(256, "rows (turns) of an optimizer step", "1..1e6")
    tokens_per_micro_batch: int = knob(16384, "tokens of a forward pass, padding included", "1..1e7")
    learning_rate: float = knob(1e-6, "AdamW, constant", "0..1")
    weight_decay: float = knob(0.01, "AdamW", "0..1e3")
    grad_clip: float = knob(1.0, "largest norm of a gradient", "1e-6..1e6")
    # rollout
    groups_per_step: int = knob(16, "task instances of a step", "1..1e6")
    group_size: int = knob(8, "trajectories of a task instance", "1..1e6")
    temperature: float = knob(1.0, "of sampling and of every training log-probability", "1e-2..1e3")
    engine: Literal["auto", "transformers", "vllm"] = knob("auto", "what samples; auto is vllm on a GPU that has it")
    kv_cache_gib: float = knob(0.25, "vllm: memory of its cache, GiB", "1e-3..1e4")
    sleep_level: int = knob(
        0, "vllm on a GPU: free its memory during updates; 1 moves weights to the CPU, 2 drops them", "0..2"
    )
    rollout_is_cap: float = knob(0.0, "largest weight of a token between engine and trainer, TIS; 0 is off", "0..1e6")
    max_prompt_tokens: int = knob(2048, "a longer prompt ends the episode as truncated", "1..1e7")
    max_response_tokens: int = knob(512, "a response cut here is invalid", "1..1e7")
    max_tries: int = knob(3, "dynamic sampling: rollouts of a step at most", "1..1e6")
    filter_cold_start: int = knob(0, "dynamic sampling: steps before it starts (released code)", "0..1e6")
    fill_uniform: bool = knob(False, "dynamic sampling: fill the last gap with uninformative groups (released code)")
    max_failures: float = knob(0.2, "share of crashed episodes above which the run stops", "0..1")
    # cloning
    sft_data: Literal["expert", "rollouts"] = knob("expert", "clone a noisy expert, or own solved rollouts")
    sft_episodes: int = knob(2000, "solved episodes to clone (expert), or episodes to sample (rollouts)", "1..1e6")
    sft_steps: int = knob(500, "optimizer steps; 0 is no cloning", "0..1e6")
    sft_batch: int = knob(128, "rows (turns) of a cloning step", "1..1e6")
    sft_learning_rate: float = knob(1e-3, "AdamW, warm-up over a tenth, then linearly to 0", "0..1")
    expert_noise: float = knob(0.4, "probability that the expert plays a random move", "0..1")
    malformed: float = knob(0.1, "probability that the expert breaks the response format", "0..1")
    # evaluation
    eval_every: int = knob(10, "steps between evaluations", "1..1e6")
    eval_levels: int = knob(480, "held-out task instances, one episode each", "1..1e6")
    eval_temperature: float = knob(1.0, "of sampling in evaluation; 0 is greedy", "0..1e3")
    eval_top_p: float = knob(1.0, "of sampling in evaluation", "1e-6..1")
    eval_top_k: int = knob(0, "of sampling in evaluation; 0 is off", "0..1e6")
    # the model
    hidden: int = knob(64, "channels of the built-in model, a multiple of 16", "16..16384")
    layers: int = knob(2, "layers of the built-in model", "1..1e6")
    dtype: Literal["float32", "bfloat16"] = knob("float32", "of the parameters of --model")
    # options of the task; each task takes those its constructor names
    size: int = knob(6, "sokoban: rows and columns of a room, border included", "4..100")
    boxes: int = knob(1, "sokoban: boxes", "1..1e6")
    max_walls: int = knob(1, "sokoban: inner walls at most", "0..1e6")
    min_solution: int = knob(3, "sokoban: moves of the shortest solution, at least", "1..1e3")
    max_solution: int = knob(8, "sokoban: moves of the shortest solution, at most", "1..1e3")
    max_turns: int = knob(12, "turns of an episode", "1..1e6")
    observation: Literal["coords", "grid"] = knob("coords", "sokoban: coordinates, or a raster of symbols")
    games: Literal["own", "official"] = knob("own", "alfworld: games of our own, or those of $ALFWORLD_DATA")
    catalogue: Literal["own", "official"] = knob("own", "webshop: a shop of our own, or the one of $WEBSHOP_DATA")
    problems: str = knob("own", "tir_math: own, official (of $TIR_MATH_DATA), a folder, or a data set of the hub")
    sandbox: Literal["auto", "unsafe"] = knob(
        "auto", "tir_math: isolation of the model's code; unsafe is next to none"
    )
    anchor: Literal["state", "observation"] = knob("state", "alfworld, webshop: what tells states apart, for gigpo")
    prompt_style: Literal["compact", "words"] = knob("compact", "bare observation, or the paper's prompt around it")
    history: int = knob(0, "turns before the current one that a prompt shows", "0..1e6")

    def __post_init__(self):
        check(self)

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.output) / (self.name or f"{self.task.rpartition(':')[2]}-{self.method}-seed{self.seed}")


def check(config: Config) -> None:
    """Raise ValueError naming the field, its value and what is allowed, for the first value that cannot be."""
    for item in fields(config):
        value, choices = getattr(config, item.name), get_args(item.type)
        if choices and value not in choices:
            raise ValueError(f"--{item.name} {value!r}: allowed are {', '.join(choices)}")
        limits = item.metadata.get("metavar")
        if limits and not float(limits.partition("..")[0]) <= value <= float(limits.partition("..")[2]):
            raise ValueError(f"--{item.name} {value}: allowed is {limits}")
    if config.hidden % 16:
        raise ValueError(f"--hidden {config.hidden}: allowed are multiples of 16")
    if 0 < config.eval_temperature < 0.01:
        raise ValueError(f"--eval_temperature {config.eval_temperature}: allowed is 0 (greedy) or 0.01 and up")
    if 0 < config.dual_clip <= 1:
        raise ValueError(f"--dual_clip {config.dual_clip}: allowed is 0 (off) or a number above 1")
    if config.dynamic_sampling and config.group_size < 2:
        raise ValueError(f"--group_size {config.group_size}: allowed is at least 2 with dynamic sampling")
    if config.penalty_scope == "turn_local" and config.baseline != "turn":
        raise ValueError(f"--penalty_scope turn_local: allowed with --baseline turn, not {config.baseline}")
    if config.mask_invalid and config.advantage == "empg":
        raise ValueError("--mask_invalid True: allowed with other advantages than empg, which looks at every turn")
    if config.resume and config.overwrite:
        raise ValueError("--resume --overwrite: allowed is one of them")
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
    layers = [(f"method {get['method']}", method)]
    layers += recipe(get["task"], which, get["method"], get["surrogate"], get["advantage"])
    values, source = {}, {item.name: "default" for item in fields(Config)}
    for where, layer in [*layers, ("command line", typed)]:
        values |= layer
        source |= dict.fromkeys(layer, where)
    return Config(**values), source


def check_folder(config: Config) -> Path:
    """The folder of a run. ValueError if it exists, unless it is an earlier run's, to be overwritten or resumed."""
    folder, path = config.folder, config.folder / "config.json"
    is_run = path.is_file() and '"method"' in path.read_text()
    if folder.exists() and not (is_run and (config.overwrite or config.resume)):
        raise ValueError(
            f"--name {folder.name}: {folder} exists; allowed is a new name, or --resume or --overwrite of a run"
        )
    return folder


FREE_ON_RESUME = "output name resume overwrite steps max_minutes save_every log_with stop_on_collapse".split()
FREE_ON_RESUME += "engine kv_cache_gib sleep_level".split()


def read_settings(folder: Path) -> dict:
    """The settings of a run folder. ValueError where it is none, or one of a later version."""
    path = folder / "config.json"
    try:
        saved = json.loads(path.read_text())
    except (OSError, ValueError):
        saved = None
    if not isinstance(saved, dict) or saved.keys() - Config.__dataclass_fields__.keys():
        raise ValueError(f"{folder}: allowed is a run folder of train.py, with its config.json")
    return asdict(Config(**saved))


def continued(config: Config, typed: dict) -> Config:
    """The settings that a run folder was started with, and of what was typed those that may change on --resume."""
    if not config.folder.exists():
        return config
    saved = read_settings(config.folder) | {"overwrite": False, "output": config.output, "name": config.folder.name}
    for name in typed.keys() - set(FREE_ON_RESUME):
        if typed[name] != saved[name]:
            free = ", ".join(FREE_ON_RESUME)
            raise ValueError(
                f"--{name} {typed[name]}: the run has {saved[name]}; with --resume only {free} may change"
            )
    return Config(**saved | {name: typed[name] for name in FREE_ON_RESUME if name in typed})


def parse(argv: list[str] | None = None) -> Config:
    """Settings from the command line; a bad one ends the program with one line and exit code 2.

    --dry_run and --list print what they are asked for and end it with code 0.
    """
    parser = Parser()
    parser.add_argument("--dry_run", action="store_true", help="print the settings, where each came from, and end")
    parser.add_argument("--list", choices=("methods", "tasks"), help="print them and end")
    typed = parser.read(argv)
    show, dry_run = typed.pop("list", None), typed.pop("dry_run", False)
    if show:
        print_table() if show == "methods" else print_recipes(envs.TASKS)
        parser.exit()
    try:
        config, source = resolve(typed)
        if config.resume:
            config = continued(config, typed)
        if dry_run:
            if f"{config.task} paper" not in RECIPES:
                envs.load(config.task)
            for name, value in asdict(config).items():
                print(f"{name:24} {value!s:20} {'the run' if config.resume and name not in typed else source[name]}")
            parser.exit()
        return config
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
    made = [task(**numbers_of(task, config)) for _ in range(count)]
    if config.sequence == "trajectory" and not made[0].append_only:
        raise ValueError(
            f"--sequence trajectory: allowed where contexts only grow; task {config.task} makes them anew"
        )
    return made
