"""Episodes in lock step, groups, dynamic sampling, rows: with an environment and an engine of a few lines."""

from dataclasses import replace
from threading import Barrier

import numpy as np
import pytest

from diagnostics import sampling_metrics
from engines import Generation, Sampling
from envs import Observation, Step, parse_think_action
from rollout import (
    TaskStream,
    Trajectory,
    Turn,
    collect_groups,
    digest,
    generator,
    is_informative,
    make_rows,
    run_episodes,
    turn_table,
)

SAMPLING = Sampling(temperature=1.0, max_tokens=8)
UP = "<think> a </think> <action> up </action>"


class Count:
    """A task `n` is won by n times `up`; every turn costs 0.5. `crash` fails at reset, `crash2` in its second turn."""

    append_only, max_turns = False, 6

    def reset(self, task):
        if task == "crash":
            raise OSError("no such level")
        self.task, self.goal, self.ups, self.turns = task, 2 if task == "crash2" else int(task), 0, 0
        return self.observe()

    def observe(self):
        return Observation(" ".join("abcdefg"[: self.turns + 1]), f"{self.ups}", ("up",))

    def step(self, action):
        self.turns += 1
        if self.task == "crash2" and self.turns == 2:
            raise OSError("lost")
        self.ups += action == "up"
        won = self.ups >= self.goal
        return Step(self.observe(), 1.0 * won - 0.5, won, won, float(self.ups))

    def prompt(self, history):
        return [{"role": "user", "content": history[-1][0].text}]

    def render(self, observation):
        return f"<|user|> {observation.text} <|assistant|>"

    def parse(self, response):
        return parse_think_action(response)


class Growing(Count):
    append_only = True


class Script:
    """An engine that says `texts` in turn, whatever it reads; None is a response that was cut. It keeps its calls."""

    def __init__(self, tokenizer, *texts):
        self.tokenizer, self.texts, self.calls = tokenizer, texts, []

    def generate(self, prompts, seeds, sampling):
        self.calls.append((prompts, seeds))
        text = self.texts[(len(self.calls) - 1) % len(self.texts)]
        ids = self.tokenizer(text or UP)["input_ids"] + [self.tokenizer.eos_token_id]
        ids = ids[:-1] if text is None else ids
        return [Generation(list(ids), [-0.5] * len(ids), text is None) for _ in prompts]


def play(tokenizer, tasks, *texts, env=Count, envs=None, engine=None, max_prompt_tokens=50):
    engine = engine or Script(tokenizer, *texts)
    keys = [("key", i) for i in range(len(tasks))]
    places = [env() for _ in range(envs or len(tasks))]
    return run_episodes(engine, tokenizer, places, tasks, keys, SAMPLING, max_prompt_tokens), engine


def test_finished_episodes_leave_the_batch(tokenizer):
    trajectories, engine = play(tokenizer, ["1", "3", "2"], UP)
    assert [len(t.turns) for t in trajectories] == [1, 3, 2]
    assert [len(prompts) for prompts, _ in engine.calls] == [3, 2, 1]
    assert all(t.success and not t.truncated for t in trajectories)
    assert trajectories[1].reward == pytest.approx(-0.5 - 0.5 + 0.5)
    assert trajectories[1].score == 3


def test_few_environments_play_many_tasks(tokenizer):
    trajectories, engine = play(tokenizer, ["1", "3", "2", "1", "1"], UP, envs=2)
    assert [len(t.turns) for t in trajectories] == [1, 3, 2, 1, 1]
    assert max(len(prompts) for prompts, _ in engine.calls) == 2


def test_a_turn_keeps_what_was_read_and_sampled(tokenizer):
    (trajectory,), engine = play(tokenizer, ["2"], UP)
    first, second = trajectory.turns
    assert tokenizer.decode(first.prompt_ids) == "<|user|> a <|assistant|>"
    assert tokenizer.decode(second.prompt_ids) == "<|user|> a b <|assistant|>"
    assert first.response_ids[-1] == tokenizer.eos_token_id
    assert first.text == UP
    assert len(first.rollout_logprobs) == len(first.response_ids) == 7
    assert (first.action, first.valid, first.admissible, first.reward) == ("up", True, True, -0.5)
    assert first.state == digest("0") != second.state == digest("1")


def test_an_invalid_response_costs_a_turn_and_does_nothing(tokenizer):
    (trajectory,), _ = play(tokenizer, ["1"], "<think> a </think> up", UP)
    assert [turn.valid for turn in trajectory.turns] == [False, True]
    assert [turn.action for turn in trajectory.turns] == [None, "up"]
    assert trajectory.turns[0].state == trajectory.turns[1].state
    assert trajectory.turns[0].reward == -0.5


def test_a_response_cut_at_its_limit_is_invalid_even_if_it_parses(tokenizer):
    (trajectory,), _ = play(tokenizer, ["1"], None, UP)
    assert [turn.valid for turn in trajectory.turns] == [False, True]
    assert trajectory.turns[0].text == UP


def test_a_well_formed_action_that_is_not_listed_is_valid_and_counted_apart(tokenizer):
    (trajectory,), _ = play(tokenizer, ["1"], "<think> </think> <action> g </action>", UP)
    assert [(turn.valid, turn.admissible) for turn in trajectory.turns] == [(True, False), (True, True)]
    table = turn_table([[trajectory]], entropy=np.zeros(2))
    assert table.valid.tolist() == [True, True]
    assert turn_table([[trajectory]], np.zeros(2), inadmissible_is_invalid=True).valid.tolist() == [False, True]


def test_the_limit_of_turns_truncates(tokenizer):
    (trajectory,), _ = play(tokenizer, ["9"], UP)
    assert len(trajectory.turns) == Count.max_turns
    assert trajectory.truncated and not trajectory.success and not trajectory.error


def test_a_prompt_that_outgrows_its_limit_truncates_and_a_first_one_fails(tokenizer):
    (trajectory,), _ = play(tokenizer, ["5"], UP, max_prompt_tokens=4)  # a prompt has turn + 3 tokens
    assert len(trajectory.turns) == 2 and trajectory.truncated and not trajectory.error
    (trajectory,), _ = play(tokenizer, ["5"], UP, max_prompt_tokens=2)
    assert "max_prompt_tokens 2" in trajectory.error


def test_a_crash_costs_its_own_episode_alone(tokenizer):
    # case B61
    trajectories, _ = play(tokenizer, ["1", "crash", "crash2", "2"], UP, envs=2)
    assert [bool(t.error) for t in trajectories] == [False, True, True, False]
    assert "no such level" in trajectories[1].error and "lost" in trajectories[2].error
    assert trajectories[0].success and trajectories[3].success


def test_one_broken_environment_costs_its_turns_and_not_every_task(tokenizer):
    class Sick(Count):
        def reset(self, task):
            raise OSError("sick")

    places = [Count(), Sick(), Count(), Count()]
    keys = [("key", i) for i in range(20)]
    trajectories = run_episodes(Script(tokenizer, UP), tokenizer, places, ["1"] * 20, keys, SAMPLING, 50)
    assert 1 <= sum(bool(t.error) for t in trajectories) <= 8  # a free environment waits its turn
    trajectories, _ = play(tokenizer, ["crash"] * 3, UP, envs=2)
    assert all(t.error and not t.turns for t in trajectories)


def test_an_interrupt_and_an_engine_failure_propagate(tokenizer):
    class Stop(Script):
        def generate(self, prompts, seeds, sampling):
            raise self.texts[0]

    for error in (KeyboardInterrupt, RuntimeError):
        with pytest.raises(error):
            play(tokenizer, ["1"], engine=Stop(tokenizer, error()))


def test_sampling_seeds_differ_by_member_and_turn_and_not_by_company(tokenizer):
    _, engine = play(tokenizer, ["3"] * 4, UP)
    seeds = [seed for _, seeds in engine.calls for seed in seeds]
    assert len(set(seeds)) == 12
    _, alone = play(tokenizer, ["3"], UP)
    assert [seeds[0] for _, seeds in engine.calls] == [seeds[0] for _, seeds in alone.calls]


def test_sampled_ids_are_never_encoded_again(tokenizer):
    # case B14: this engine's ids decode to text that encodes to one id more
    class Odd(Script):
        def generate(self, prompts, seeds, sampling):
            ids = [tokenizer.pad_token_id, *tokenizer(UP)["input_ids"], tokenizer.eos_token_id]
            return [Generation(ids, [0.0] * 8, False) for _ in prompts]

    (trajectory,), _ = play(tokenizer, ["2"], env=Growing, engine=Odd(tokenizer))
    first, second = trajectory.turns[:2]
    assert first.response_ids[0] == tokenizer.pad_token_id
    assert second.prompt_ids[: len(first.prompt_ids) + 8] == first.prompt_ids + first.response_ids


def test_rows_of_turns_train_on_sampled_tokens_alone(tokenizer):
    trajectories, _ = play(tokenizer, ["1", "2"], UP)
    rows = make_rows([trajectories])
    assert [row.sampled for row in rows] == [list(range(3, 10)), list(range(3, 10)), list(range(4, 11))]
    assert [set(row.sequence) for row in rows] == [{0}, {1}, {2}]


def test_an_appending_trajectory_is_one_row_without_its_observations(tokenizer):
    # case B49: prompt 3, response 7, observation 4 (two words and two marks), response 7
    (trajectory,), _ = play(tokenizer, ["2"], UP, env=Growing)
    (row,) = make_rows([[trajectory]], append_only=True)
    assert len(row.ids) == 3 + 7 + 4 + 7
    assert row.sampled == [*range(3, 10), *range(14, 21)]
    assert row.sequence == [0] * 7 + [1] * 7
    assert tokenizer.decode(row.ids[10:14]) == "<|user|> a b <|assistant|>"


def test_a_rewritten_context_is_refused(tokenizer):
    (trajectory,), _ = play(tokenizer, ["2"], UP, env=Growing)
    trajectory.turns[1].prompt_ids[0] += 1
    with pytest.raises(ValueError, match="must start with the ids before"):
        make_rows([[trajectory]], append_only=True)


def test_a_turn_without_a_token_is_refused(tokenizer):
    (trajectory,), _ = play(tokenizer, ["1"], UP)
    trajectory.turns[0].response_ids = []
    with pytest.raises(ValueError, match="without a sampled token"):
        make_rows([[trajectory]])


def test_the_table_numbers_groups_trajectories_and_turns(tokenizer):
    trajectories, _ = play(tokenizer, ["2", "1", "2", "1"], UP)
    table = turn_table([trajectories[:2], trajectories[2:]], entropy=np.zeros(6))
    assert table.group.tolist() == [0, 0, 0, 1, 1, 1]
    assert table.trajectory.tolist() == [0, 0, 1, 2, 2, 3]
    assert table.turn.tolist() == [0, 1, 0, 0, 1, 0]
    assert table.reward.tolist() == [-0.5, 0.5, 0.5] * 2
    assert table.state.tolist() == [digest("0"), digest("1"), digest("0")] * 2


def test_a_trajectory_with_an_invalid_turn_can_be_left_out_and_the_others_keep_their_numbers(tokenizer):
    (void,), _ = play(tokenizer, ["1"], "<think> a </think> up", UP)
    (good,), _ = play(tokenizer, ["2"], UP)
    for append_only, sequences in ((False, [[2], [3]]), (True, [[2, 3]])):
        trajectory = good if not append_only else play(tokenizer, ["2"], UP, env=Growing)[0][0]
        rows = make_rows([[void, trajectory]], append_only, mask_invalid=True)
        assert [sorted({*row.sequence}) for row in rows] == sequences
    assert len(make_rows([[void, good]])) == 4


def test_steps_that_wait_do_so_side_by_side(tokenizer):
    class Waiting(Count):
        blocking, together = True, Barrier(3)

        def step(self, action):
            self.together.wait(timeout=20)  # until three are here; else each fails
            if self.task == "2":
                raise OSError("lost")
            return super().step(action)

    trajectories, _ = play(tokenizer, ["1", "2", "1"], UP, env=Waiting)
    assert [t.success for t in trajectories] == [True, False, True]
    assert [t.error for t in trajectories] == ["", "turn 0: OSError('lost')", ""]


def test_a_task_says_what_ends_a_response_and_its_last_token_is_said(tokenizer):
    class Fenced(Count):
        stop = ("up </action>",)

    class ByText(Script):
        def generate(self, prompts, seeds, sampling):
            assert sampling == Sampling(1.0, 8, stop=("up </action>",))
            ids = tokenizer(UP)["input_ids"]
            return [Generation(ids, [0.0] * len(ids), False, by_text=True) for _ in prompts]

    (trajectory,), _ = play(tokenizer, ["1"], env=Fenced, engine=ByText(tokenizer))
    assert trajectory.turns[0].text == UP and trajectory.success


def test_what_an_environment_notes_is_kept(tokenizer):
    class Noting(Count):
        def step(self, action):
            return replace(super().step(action), note=f"turn {self.turns}")

    (trajectory,), _ = play(tokenizer, ["2"], UP, env=Noting)
    assert [turn.note for turn in trajectory.turns] == ["turn 1", "turn 2"]
    assert sampling_metrics([[trajectory]])["notes"] == 2


def group(*successes, error=()):
    """A group of one-turn trajectories; 1 succeeds, 0 fails; members in `error` crashed."""
    turn = Turn([1], [2, 3], [0.0, 0.0], "", 0, "up", True, True, -0.5)
    return [
        Trajectory("t", [turn], success=bool(s), error="crash" if i in error else "") for i, s in enumerate(successes)
    ]


def sampler(*tries):
    """sample(attempt) that gives out `tries` in order, the last one again and again, and counts its calls."""
    calls = []

    def sample(attempt):
        calls.append(attempt)
        return tries[min(attempt, len(tries) - 1)]

    return sample, calls


def test_a_group_informs_iff_some_not_all_survivors_succeed():
    assert is_informative(group(1, 0, 0))
    assert not is_informative(group(1, 1)) and not is_informative(group(0, 0))
    assert not is_informative(group(1, 0, error=(1,)))  # one survivor
    assert not is_informative(group(1, 1, 0, error=(2,)))
    assert is_informative(group(1, 0, 0, error=(2,)))


def test_filter_looks_at_success_not_at_rewards():
    mixed_rewards = group(0, 0)
    mixed_rewards[0].turns = [Turn([1], [2], [0.0], "", 0, None, False, False, -9.0)]
    assert not is_informative(mixed_rewards)


def test_attempts_go_on_until_the_step_is_full_and_surplus_is_dropped():
    # case B30: attempts bring 2, 3 and 4 informative groups; needed are 4: two attempts, the fifth group is dropped
    good, bad = [group(1, 0) for _ in range(9)], group(0, 0)
    sample, calls = sampler([good[0], bad, good[1], bad], [bad, *good[2:5]], good[5:9])
    kept, stats = collect_groups(sample, 4, dynamic_sampling=True, max_tries=3)
    assert calls == [0, 1]
    assert [g[0] is good[i][0] for i, g in enumerate(kept)] == [True] * 4
    assert stats == {"tries": 2, "groups_kept": 4, "failed": 0}


def test_at_the_cap_what_was_kept_is_trained_on_be_it_nothing():
    sample, calls = sampler([group(1, 0), group(0, 0)], [group(1, 1), group(0, 0)])
    kept, stats = collect_groups(sample, 2, dynamic_sampling=True, max_tries=3)
    assert calls == [0, 1, 2] and len(kept) == 1
    sample, calls = sampler([group(0, 0), group(1, 1)])
    kept, stats = collect_groups(sample, 2, dynamic_sampling=True, max_tries=3)
    assert calls == [0, 1, 2] and kept == [] and stats == {"tries": 3, "groups_kept": 0, "failed": 0}


def test_fill_uniform_fills_the_gap_in_order():
    first, fill = group(1, 0), [group(1, 1), group(0, 0)]
    sample, _ = sampler([fill[0], first], [fill[1], group(0, 0)])
    kept, stats = collect_groups(sample, 3, dynamic_sampling=True, max_tries=2, fill_uniform=True)
    assert stats["groups_kept"] == 3
    assert [g[0] for g in kept] == [first[0], fill[0][0], fill[1][0]]


def test_without_dynamic_sampling_one_attempt_keeps_every_group():
    sample, calls = sampler([group(1, 1), group(0, 0), group(1, 0)])
    kept, _ = collect_groups(sample, 3, dynamic_sampling=False, max_tries=3)
    assert calls == [0] and len(kept) == 3


def test_failed_episodes_are_left_out_and_too_many_stop_the_run():
    sample, _ = sampler([group(1, 0, 0, 0, error=(0,)), group(1, 0, 0, 0)])
    kept, stats = collect_groups(sample, 2, dynamic_sampling=False)
    assert [len(g) for g in kept] == [3, 4]
    assert stats == {"tries": 1, "groups_kept": 2, "failed": 1}
    sample, _ = sampler([group(1, 0, 0, error=(0,))])
    with pytest.raises(RuntimeError, match="1 of 3 episodes failed, max_failures 0.2; first: crash"):
        collect_groups(sample, 1, dynamic_sampling=False)
    sample, _ = sampler([group(1, 0, error=(0, 1))])
    with pytest.raises(RuntimeError, match="2 of 2 episodes failed"):
        collect_groups(sample, 1, dynamic_sampling=False, max_failures=1.0)


def test_every_use_has_draws_of_its_own():
    uses = [("tasks", 0), ("tasks", 1), ("cloning batches",), ("mini-batches", 1), ("mini-batches", 2), ()]
    draws = {generator(seed, *use).integers(2**62) for use in uses for seed in (0, 1)}
    assert len(draws) == 12
    assert generator(0, "tasks", 0).integers(2**62) == generator(0, "tasks", 0).integers(2**62)


def test_tasks_come_in_a_seeded_order_once_an_epoch_from_any_position():
    tasks = [str(i) for i in range(7)]
    stream = TaskStream(tasks, seed=3)
    taken = stream.take(5) + stream.take(9)
    assert sorted(taken[:7]) == sorted(taken[7:]) == tasks and taken[:7] != taken[7:]
    assert TaskStream(tasks, seed=3, position=5).take(9) == taken[5:]
    assert TaskStream(tasks, seed=4).take(7) != taken[:7]
