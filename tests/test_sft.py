"""Cloning: demonstrations of an expert, own solved rollouts, and the fit to them."""

import random

import numpy as np
import pytest
from accelerate import Accelerator

from envs import parse_think_action
from envs.sokoban import Sokoban
from policy import Row
from rollout import Trajectory, Turn
from sft import clone, expert_rows, malform, solved_rows
from tiny import tiny_model, tiny_tokenizer

RIGHT = "<think> push left </think> <action> up </action>"


def demonstrations(noise, malformed, count=30):
    env = Sokoban()
    tokenizer = tiny_tokenizer(env.words())
    rows = expert_rows(env, env.tasks("train"), tokenizer, count, noise, malformed, random.Random(0))
    texts = [tokenizer.decode([row.ids[i] for i in row.sampled]) for row in rows]
    return rows, texts, tokenizer


def test_a_malformed_response_lacks_one_tag():
    said = {malform(RIGHT, random.Random(seed)) for seed in range(40)}
    assert len(said) == 4 and all(len(text.split()) == 6 for text in said)
    assert not any(parse_think_action(text)[1] for text in said)


def test_a_clean_expert_is_always_well_formed_and_each_row_ends_with_the_stop_token():
    rows, texts, tokenizer = demonstrations(0.0, 0.0)
    assert all(row.ids[row.sampled[-1]] == tokenizer.eos_token_id for row in rows)
    assert all(row.sampled == list(range(row.sampled[0], len(row.ids))) for row in rows)
    assert all(parse_think_action(text.removesuffix("<|end|>"))[1] for text in texts)
    assert all(tokenizer.decode(row.ids[: row.sampled[0]]).startswith("<|user|> player") for row in rows)
    assert 30 * 3 <= len(rows) <= 30 * 8  # solutions take 3 to 8 moves


def test_a_noisy_expert_wanders_and_breaks_the_format_as_often_as_asked():
    clean, _, _ = demonstrations(0.0, 0.0)
    rows, texts, _ = demonstrations(0.4, 0.1, count=200)
    broken = np.mean([not parse_think_action(text.removesuffix("<|end|>"))[1] for text in texts])
    assert 0.06 < broken < 0.14  # 0.1, three standard errors at about 1,500 turns
    assert len(rows) / 200 > len(clean) / 30  # detours


def test_an_expert_that_cannot_is_an_error():
    env = Sokoban(min_solution=8, max_solution=8, max_turns=8)
    with pytest.raises(RuntimeError, match="solved 0 of 200"):
        expert_rows(env, env.tasks("train"), tiny_tokenizer(env.words()), 1, 0.0, 1.0, random.Random(0))


def test_own_rollouts_are_cloned_token_by_token_if_they_succeeded():
    turn = Turn([5, 6], [7, 8, 1], [-1.0] * 3, "", 0, "up", True, True, 0.0)
    won, lost = Trajectory("a", [turn], success=True), Trajectory("b", [turn])
    crashed = Trajectory("c", [turn], success=True, error="crash")
    expected = Row([5, 6, 7, 8, 1], [2, 3, 4], [0, 0, 0], [-1.0, -1.0, -1.0])
    assert solved_rows([lost, won, crashed], append_only=False) == [expected]
    with pytest.raises(RuntimeError, match="none of 2 own rollouts succeeded"):
        solved_rows([lost, crashed], append_only=False)


def test_cloning_fits_the_demonstrations():
    rows, _, tokenizer = demonstrations(0.0, 0.0, count=8)
    model = tiny_model(len(tokenizer), 32, 1, tokenizer.eos_token_id, tokenizer.pad_token_id)
    losses = clone(
        model,
        Accelerator(cpu=True),
        rows,
        sft_steps=60,
        sft_batch=32,
        sft_learning_rate=1e-2,
        weight_decay=0.0,
        grad_clip=1.0,
        tokens_per_micro_batch=400,  # two micro-batches of 16 rows at most
        pad=tokenizer.pad_token_id,
        rng=np.random.default_rng(0),
    )
    assert losses[0] == pytest.approx(np.log(len(tokenizer)), rel=0.2)  # an untrained policy is near uniform
    assert losses[-1] < 0.1 * losses[0]
