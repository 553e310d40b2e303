"""TransformersEngine against a full forward pass, Transformers' own generate, and its promises on seeds and stops."""

from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import engines
from engines import Prompt, Sampling, TransformersEngine, check_gap, choose, make_engine

LENGTHS = (3, 9, 5, 1, 7, 4, 9, 2)


@pytest.fixture
def prompts():
    rng = np.random.default_rng(0)
    return [Prompt(rng.integers(2, 17, length).tolist()) for length in LENGTHS]


@pytest.fixture
def engine(model, tokenizer):
    return TransformersEngine(model, tokenizer)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_logprobs_equal_a_full_forward_with_ragged_prompts_and_early_stops(engine, prompts, temperature):
    generations = engine.generate(prompts, list(range(8)), Sampling(temperature, 25))
    assert len({len(g.ids) for g in generations}) > 2  # some stop early, at different lengths
    for prompt, generation in zip(prompts, generations, strict=True):
        with torch.no_grad():
            logits = engine.model(torch.tensor([prompt.ids + generation.ids])).logits[0]
        every = torch.log_softmax(logits / temperature, -1)
        n = len(prompt.ids)
        expected = [every[n - 1 + i, token].item() for i, token in enumerate(generation.ids)]
        assert generation.logprobs == pytest.approx(expected, abs=1e-5)


def test_greedy_tokens_equal_generate(engine, prompts, tokenizer):
    generations = engine.generate(prompts, [0] * 8, Sampling(0, 20))
    for prompt, generation in zip(prompts, generations, strict=True):
        ids = torch.tensor([prompt.ids])
        out = engine.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=20,
            eos_token_id=tokenizer.eos_token_id,
        )
        assert generation.ids == out[0, len(prompt.ids) :].tolist()


def test_a_seed_draws_the_same_in_another_batch(engine, prompts):
    seeds = [11, 22, 33, 44, 55, 66, 77, 88]
    together = engine.generate(prompts, seeds, Sampling(1.0, 12))
    backwards = engine.generate(prompts[::-1], seeds[::-1], Sampling(1.0, 12))[::-1]
    alone = engine.generate(prompts[2:3], seeds[2:3], Sampling(1.0, 12))
    assert [g.ids for g in together] == [g.ids for g in backwards]
    assert alone[0].ids == together[2].ids


def test_different_seeds_draw_differently(engine, prompts):
    # case B51: members of a group share the prompt, not the seed
    generations = engine.generate([prompts[0]] * 8, list(range(8)), Sampling(1.5, 12))
    assert len({tuple(g.ids) for g in generations}) > 4
    same = engine.generate([prompts[0]] * 3, [5, 5, 5], Sampling(1.5, 12))
    assert len({tuple(g.ids) for g in same}) == 1


def test_sampling_follows_the_distribution():
    # a grid of 1000 uniform numbers hits each token as often as its probability says, to one
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    uniform = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    tokens = choose(probs.log().expand(1000, 4), uniform)
    assert torch.bincount(tokens).tolist() == pytest.approx([500, 300, 150, 50], abs=1)


def test_top_k_and_top_p_keep_the_most_likely_tokens():
    # in order: .15, .5, .05, .3; top_p .75 needs .5 and .3, renormalised to 5/8 and 3/8
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log().expand(800, 4)
    uniform = (torch.arange(800, dtype=torch.float64) + 0.5) / 800
    for kept in (choose(logits, uniform, top_p=0.75), choose(logits, uniform, top_k=2)):
        assert torch.bincount(kept, minlength=4).tolist() == pytest.approx([0, 500, 0, 300], abs=1)
    assert choose(logits, uniform, top_p=1e-6).unique().tolist() == [1]
    # top_k 3 leaves .95; of that .84 is less than .5 + .3, which is .842: two tokens; a share of .85 takes the third
    assert choose(logits, uniform, top_p=0.84, top_k=3).unique().tolist() == [1, 3]
    assert choose(logits, uniform, top_p=0.85, top_k=3).unique().tolist() == [0, 1, 3]


def test_the_largest_draw_still_gives_a_token():
    tokens = choose(torch.zeros(2, 7), torch.tensor([0.0, 1 - 1e-16], dtype=torch.float64))
    assert tokens.tolist() == [0, 6]


def test_responses_end_behind_the_first_stop_token(engine):
    # case B26; stop tokens 1 and 7: one early, one at the limit (not truncated), none (truncated), one at once
    engine.stop = torch.tensor([1, 7])
    tokens = torch.tensor([[5, 7, 1, 0], [5, 6, 8, 1], [5, 6, 8, 9], [1, 1, 1, 1]])
    cut = engine._cut(tokens, torch.zeros(4, 4), torch.isin(tokens, engine.stop))
    assert [g.ids for g in cut] == [[5, 7], [5, 6, 8, 1], [5, 6, 8, 9], [1]]
    assert [g.truncated for g in cut] == [False, False, True, False]
    assert [len(g.logprobs) for g in cut] == [2, 4, 4, 1]


def test_responses_end_behind_the_token_that_completes_a_stop_text(engine, prompts, tokenizer):
    """Words come back with blanks between them. The text spans two tokens and half of a third one's neighbours."""
    free = engine.generate(prompts, list(range(8)), Sampling(1.0, 25))
    stop = tokenizer.decode(free[1].ids[3:5])
    held = engine.generate(prompts, list(range(8)), Sampling(1.0, 25, stop=(stop, "nowhere")))
    assert held[1].by_text and not held[1].truncated and len(held[1].ids) <= 5
    for whole, part in zip(free, held, strict=True):
        ends = [n for n in range(1, len(whole.ids) + 1) if stop in tokenizer.decode(whole.ids[:n])]
        length = ends[0] if ends else len(whole.ids)
        assert part.ids == whole.ids[:length] and part.logprobs == pytest.approx(whole.logprobs[:length], abs=1e-5)
        assert part.by_text == bool(ends) and part.truncated == (whole.truncated and not ends)
    assert {part.by_text for part in held} == {True, False}


def test_auto_is_vllm_on_a_gpu_that_has_it(model, tokenizer, monkeypatch):
    settings = dict(max_prompt_tokens=10, max_response_tokens=5, kv_cache_gib=0.5, sleep_level=0)
    monkeypatch.setattr(engines, "VLLMEngine", lambda *arguments: arguments)
    monkeypatch.setattr(engines, "find_spec", lambda name: "found")
    assert isinstance(make_engine(model, tokenizer, model.dtype, engine="auto", **settings), TransformersEngine)
    assert make_engine(model, tokenizer, model.dtype, engine="vllm", **settings) == (
        model,
        tokenizer,
        model.dtype,
        15,
        0.5,
        0,
    )
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    assert make_engine(model, tokenizer, model.dtype, engine="auto", **settings) == (
        model,
        tokenizer,
        model.dtype,
        15,
        0.5,
        0,
    )
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    monkeypatch.setattr(engines, "TransformersEngine", lambda *arguments: "transformers")
    assert make_engine(model, tokenizer, model.dtype, engine="auto", **settings) == "transformers"


def test_an_engine_for_a_longer_context_than_the_models_is_refused(model, tokenizer):
    settings = dict(engine="auto", max_response_tokens=97, kv_cache_gib=0.5, sleep_level=0)
    make_engine(model, tokenizer, model.dtype, max_prompt_tokens=3999, **settings)
    with pytest.raises(ValueError, match="4097 in all, allowed is up to 4096"):
        make_engine(model, tokenizer, model.dtype, max_prompt_tokens=4000, **settings)


def test_the_gap_is_limited_by_dtype():
    check_gap(0.01, torch.float32)
    check_gap(0.19, torch.bfloat16)
    for mean, dtype in ((0.011, torch.float32), (0.21, torch.bfloat16), (float("nan"), torch.bfloat16)):
        with pytest.raises(RuntimeError, match="nats a token"):
            check_gap(mean, dtype)


def test_a_tokenizer_without_an_end_leaves_it_to_the_model():
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[7, 5]))
    assert engines.stop_ids(model, SimpleNamespace(eos_token_id=None)) == [5, 7]
    assert engines.stop_ids(model, SimpleNamespace(eos_token_id=9)) == [5, 7, 9]
    model.generation_config.eos_token_id = None
    assert engines.stop_ids(model, SimpleNamespace(eos_token_id=9)) == [9]


def test_a_copy_samples_from_the_weights_it_was_given_and_says_so(engine, model, prompts):
    engine.check(model, 3)  # its own: always fresh
    trained = deepcopy(model)
    with torch.no_grad():
        trained.model.norm.weight.mul_(2)
    with pytest.raises(RuntimeError, match="the engine has the weights of update None"):
        engine.check(trained, 1)
    engine.load_weights(trained, 1)
    engine.check(trained, 1)
    assert torch.equal(engine.model.model.norm.weight, trained.model.norm.weight)
    with torch.no_grad():
        trained.model.norm.weight.mul_(2)
    with pytest.raises(RuntimeError, match="1 of 25 weights are not the engine's, model.norm.weight"):
        engine.check(trained, 1)


def test_images_are_refused(engine):
    with pytest.raises(ValueError, match="images"):
        engine.generate([Prompt([1], images=("picture",))], [0], Sampling(1.0, 1))
