"""The paper's Table 6 as code, entry by entry, and the released method against ours by hand."""

import math
from dataclasses import fields
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch

from advantages import ADVANTAGES
from config import Config, numbers_of, parse, resolve
from grpo import METHODS, policy_loss
from losses import SURROGATES
from policy import Pack
from recipes import EXCEPTIONS, NUMBERS, RECIPES, SAMPO_RELEASED, SAMPO_RELEASED_WEBSHOP
from rollout import Trajectory, Turn, make_rows, turn_table

TASKS = ("alfworld", "webshop", "sokoban", "tir_math")

TABLE_6 = {  # field: ALFWorld, WebShop, Sokoban, TIR Math
    "max_turns": (50, 15, 15, 5),
    "group_size": (8, 8, 8, 5),
    "max_prompt_tokens": (2048, 4096, 1024, 8196),
    "max_response_tokens": (512, 512, 512, 4096),
    "std": (True, True, True, True),
    "learning_rate": (1e-6, 1e-6, 1e-6, 1e-6),
    "kl_coef": (0.01, 0.01, 0.01, 0.0),
    "temperature": (1.0, 1.0, 1.0, 1.0),
    "eval_temperature": (0.6, 0.6, 0.7, 0.6),
    "eval_top_p": (0.95, 0.95, 0.95, 0.95),
    "eval_top_k": (20, 20, 20, 20),
    "groups_per_step": (16, 16, 32, 512),
    "eval_levels": (128, 128, 128, 60),  # there are no more problems of AIME24 and AIME25
    "steps": (200, 200, 200, 17),
    # the memory window of TIR Math is its context, 8196 tokens; its mini-batch is 128 prompts of 5 trajectories, and
    # its format penalty of .1 is not in the released code, which masks the trajectory of a void turn instead
    "history": (2, 2, 2, 0),
    "mini_batch": (256, 128, 64, 128 * 5),
    "penalty": (0.1, 0.1, 0.1, 0.0),
}
CLIPS = {  # method: (clip_low, clip_high) for the four tasks; Table 6 prints the upper one first
    "grpo": ((0.2, 0.2), (0.2, 0.2), (0.2, 0.2), (0.2, 0.28)),
    "gigpo": ((0.2, 0.2),) * 3,
    "empg": ((0.2, 0.2),) * 3,
    "gspo": ((3e-3, 4e-3), (3e-2, 4e-2), (3e-3, 4e-3), (3e-4, 4e-4)),
    "cispo": ((1.0, 0.2), (1.0, 0.2), (1.0, 0.2), (1.0, 0.28)),
    "dapo": ((0.2, 0.2), (0.2, 0.2), (0.2, 0.2), (0.2, 0.28)),
    "sampo": ((3e-3, 4e-3), (3e-2, 4e-2), (3e-3, 4e-3), (3e-4, 4e-4)),  # no row of its own: GSPO's
}


def settings(task, method="sampo", **typed):
    return resolve({"task": task, "method": method, "recipe": "paper", **typed})[0]


@pytest.mark.parametrize("i", range(4), ids=TASKS)
def test_common_numbers_are_those_of_table_6(i):
    config = settings(TASKS[i])
    found = {name: getattr(config, name) for name in TABLE_6}
    assert found == {name: values[i] for name, values in TABLE_6.items()}


@pytest.mark.parametrize("method", CLIPS)
def test_clips_are_those_of_table_6(method):
    for task, clips in zip(TASKS, CLIPS[method], strict=False):
        config = settings(task, method)
        assert (config.clip_low, config.clip_high) == clips, task


def test_the_other_numbers_of_the_methods_are_those_of_table_6():
    for task in TASKS:
        config = settings(task, "sapo")
        assert (config.tau_pos, config.tau_neg) == (1.0, 1.05)
        assert settings(task, "dapo").max_tries == settings(task, "sampo").max_tries == 3  # N_oversample
    for task in TASKS[:3]:
        config = settings(task, "gigpo")
        assert (config.gamma, config.omega) == (0.95, 1.0)
        config = settings(task, "empg")
        assert (config.k, config.k_next, config.zeta) == (1.0, 1.0, 0.05)


def test_the_papers_recipe_brings_its_model_unless_one_is_given():
    assert [settings(task).model for task in TASKS] == ["Qwen/Qwen3-4B"] * 3 + ["Qwen/Qwen3-4B-Base"]
    assert settings("alfworld", model="my/model").model == "my/model"
    assert resolve({"task": "sokoban"})[0].model == ""


def test_every_recipe_is_made_of_settings():
    names = {item.name for item in fields(Config)}
    layers = [*RECIPES.values(), *NUMBERS.values(), SAMPO_RELEASED, SAMPO_RELEASED_WEBSHOP]
    layers += [numbers for exceptions in EXCEPTIONS.values() for numbers in exceptions.values()]
    assert all(set(layer) <= names for layer in layers)


@pytest.mark.parametrize(
    ("task", "method"), [pair for pair in product(TASKS, METHODS) if pair != ("tir_math", "sampo_released")]
)
def test_every_method_has_a_recipe_for_every_task(task, method):
    assert settings(task, method).method == method


RELEASED = {  # of what the authors' code amounts to: the switch and its value
    "aggregation": "seq-mean-token-mean",
    "baseline": "turn",
    "penalty_scope": "turn_local",
    "inadmissible_is_invalid": True,
    "entropy_coef": 0.001,
    "filter_cold_start": 15,
    "fill_uniform": True,
}
ON_WEBSHOP = {"clip_low": 3e-3, "clip_high": 4e-3, "std": False, "dynamic_sampling": False, "steps": 250}


@pytest.mark.parametrize("task", TASKS[:3])
def test_the_released_method_differs_by_its_switches_and_on_webshop_by_its_own(task):
    ours, released = settings(task), settings(task, "sampo_released")
    changed = {
        item.name: getattr(released, item.name)
        for item in fields(Config)
        if getattr(ours, item.name) != getattr(released, item.name)
    }
    expected = {"method": "sampo_released"} | RELEASED
    if task == "webshop":  # whose parser does not look whether an action is admissible
        expected = {name: value for name, value in expected.items() if name != "inadmissible_is_invalid"} | ON_WEBSHOP
    assert changed == expected


def test_the_released_code_has_no_sampo_for_mathematics():
    with pytest.raises(ValueError, match="--method sampo_released: the released code has it for other tasks"):
        settings("tir_math", "sampo_released")


def hand_made():
    """A group of a win of one turn and a loss of two, the first inadmissible, the second malformed."""

    def turn(state, reward, length, valid=True, admissible=True):
        return Turn([5], [6] * length, [0.0] * length, "", state, "up", valid, admissible, reward)

    won = Trajectory("t", [turn(1, 10.0, 1)], success=True)
    lost = Trajectory("t", [turn(1, 0.0, 2, admissible=False), turn(2, 0.0, 3, valid=False)])
    return [[won, lost]]


def advantages_of(config):
    advantage = ADVANTAGES[config.advantage]
    table = turn_table(hand_made(), np.zeros(3), config.inadmissible_is_invalid)
    return advantage(table, **numbers_of(advantage, config))


def loss_of(config, advantages):
    """Turns of 1, 2 and 3 tokens at ratios 1, e^.02 and e^-.05; d of the KL .5, 0, 1; entropies .2, .4, .6."""
    lengths = torch.tensor([1, 2, 3])
    sequence = torch.arange(3).repeat_interleave(lengths)
    assert [row.sequence for row in make_rows(hand_made())] == [[0], [1, 1], [2, 2, 2]]
    pack = Pack(*[torch.zeros(1)] * 6, sequence)
    pack.old_logprobs = torch.full((6,), -1.0, dtype=torch.float64)
    logprobs = pack.old_logprobs + torch.tensor([0.0, 0.02, -0.05], dtype=torch.float64)[sequence]
    pack.ref_logprobs = logprobs + torch.tensor([0.5, 0.0, 1.0], dtype=torch.float64)[sequence]
    pack.entropy = torch.tensor([0.2, 0.4, 0.6], dtype=torch.float64)[sequence]
    pack.advantages = torch.as_tensor(advantages)[sequence]
    surrogate = SURROGATES[config.surrogate]
    terms = (partial(surrogate, **numbers_of(surrogate, config)), logprobs, pack.entropy, pack, 6, 3)
    return policy_loss(*terms, **numbers_of(policy_loss, config))[0].item()


K3 = (math.exp(0.5) - 1.5, 0.0, math.e - 2)  # of d = .5, 0, 1


def test_sampo_on_the_hand_made_group():
    # Returns with penalty .1 for the malformed turn: 10 and -.1; two trajectories: -+ 1/sqrt 2 of their spread.
    # Step returns at gamma .95 in state 1: 10 and 0 + .95 * -.1: again -+ 1/sqrt 2. State 2 is visited once: 0.
    config = resolve({"method": "sampo"})[0]
    root = 1 / math.sqrt(2)
    advantages = advantages_of(config)
    assert advantages == pytest.approx([2 * root, -2 * root, -root], abs=1e-6)
    # Clip .03/.04: e^.02 is inside, e^-.05 below .97, where A < 0 stops. Token-mean over 6 tokens.
    losses = (-2 * root, 2 * root * math.exp(0.02), 0.97 * root)
    expected = (1 * losses[0] + 2 * losses[1] + 3 * losses[2]) / 6
    expected += 0.01 * (1 * K3[0] + 2 * K3[1] + 3 * K3[2]) / 6
    assert loss_of(config, advantages) == pytest.approx(expected, rel=1e-6)


def test_sampo_released_on_the_hand_made_group():
    # Three turn rows: 10, 0 - .1 (inadmissible counts as invalid), 0 - .1. Mean 9.8 / 3; deviations 10.1 * (2/3, -1/3,
    # -1/3), variance 10.1^2 * (6/9) / 2, so the scaled values are (2, -1, -1) / sqrt 3.
    # Step returns are made without penalty and lose .1 on the turn itself: 10 and 0 - .1 in state 1; state 2 alone: 0.
    config = resolve({"method": "sampo_released"})[0]
    root, third = 1 / math.sqrt(2), 1 / math.sqrt(3)
    advantages = advantages_of(config)
    assert advantages == pytest.approx([2 * third + root, -third - root, -third], abs=1e-6)
    # Each turn counts once, in the loss, the KL and the entropy bonus of .001; same clip .03/.04.
    losses = (-(2 * third + root), (third + root) * math.exp(0.02), 0.97 * third)
    expected = (sum(losses) + 0.01 * sum(K3) - 0.001 * (0.2 + 0.4 + 0.6)) / 3
    assert loss_of(config, advantages) == pytest.approx(expected, rel=1e-6)


def test_sampo_released_on_webshop_divides_by_no_deviation_and_clips_tighter():
    # Inadmissible is no fault there: (10, 0, -.1) - 3.3, plus 5, -5 in state 1 (returns 10 and 0), 0 in state 2
    config = settings("webshop", "sampo_released")
    advantages = advantages_of(config)
    expected = [6.7 + 5, -3.3 - 5, -3.4]
    assert advantages == pytest.approx(expected)
    # clip .003/.004: with A < 0, e^.02 above is not stopped, e^-.05 below is, at .997
    losses = (-expected[0], -expected[1] * math.exp(0.02), -expected[2] * 0.997)
    value = (sum(losses) + 0.01 * sum(K3) - 0.001 * (0.2 + 0.4 + 0.6)) / 3
    assert loss_of(config, advantages) == pytest.approx(value, rel=1e-6)


def test_a_dry_run_prints_every_setting_with_where_it_came_from(capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        parse("--dry_run --task webshop --recipe paper --method sampo_released --kl_coef 0.5".split())
    assert stop.value.code == 0
    lines = {line.split()[0]: line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()}
    assert set(lines) == {item.name for item in fields(Config)}
    assert lines["kl_coef"][1:] == ["0.5", "command line"]
    assert lines["clip_low"][1:] == ["0.003", "sampo_released"]
    assert lines["aggregation"][1:] == ["seq-mean-token-mean", "method sampo_released"]
    assert lines["max_turns"][1:] == ["15", "webshop paper"]
    assert lines["gamma"][1:] == ["0.95", "webshop paper gigpo"]
    assert lines["dual_clip"][1:] == ["0.0", "default"]


def test_lists_name_every_method_and_every_task(capsys):
    for what, names in (("methods", METHODS), ("tasks", TASKS)):
        with pytest.raises(SystemExit) as stop:
            parse(["--list", what])
        out = capsys.readouterr().out
        assert stop.value.code == 0 and all(name in out for name in names)
