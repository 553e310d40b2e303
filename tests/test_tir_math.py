r"""TIR Math: what a response means, what a tool's printout earns, grading, problems, tokens of growing contexts."""

import json
import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch

import eval as evaluation
import train
from config import parse
from engines import Generation, Sampling
from envs import tir_math
from envs.sandbox import Result
from envs.tir_math import GRADER, MARK, PRELUDE, PROMPT, TIRMath, grade, last_boxed, read_printout, shared_sandbox
from envs.tir_problems import own, read_problems
from policy import pack, sampled_logprobs
from rollout import make_rows, run_episodes
from sft import expert_rows, play_scripted
from tiny import tiny_model, tiny_tokenizer

DATA = Path(os.environ.get("SAMPO_DATA", Path(__file__).parent.parent / "../shared/data")) / "math"


@pytest.fixture(scope="module")
def sandbox():
    try:
        return shared_sandbox("auto")
    except ValueError as error:
        pytest.skip(f"no isolation on this machine: {error}")


@pytest.fixture
def env(sandbox):
    """Own problems, with what tools print as it is."""
    made = TIRMath()
    made.known = None
    made.reset("train/0")
    return made


def test_the_last_closed_box_is_the_answer():
    # case B40
    assert last_boxed(r"\boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{1} wait \boxed{2}") == "2"
    assert last_boxed(r"\boxed{\{1,2\}}") == r"\{1,2\}"
    assert last_boxed(r"\fbox{42}") == "42" and last_boxed(r"\boxed { 444 }") == "444"
    assert last_boxed(r"\boxed{3") is last_boxed("no box") is last_boxed(r"\boxed{} \boxed{ }") is None
    assert last_boxed(r"\boxed{1} then \boxed{3") == "1" and last_boxed(r"\boxed{\boxed{2}}") == "2"
    assert last_boxed(r"\boxed{\text{a \} b}}") == r"\text{a \} b}"


CODE = "```python\nprint(1)\n```"
SAID = {  # what a model said: the action, None for a void turn
    f"Let me compute.\n{CODE}": "code print(1)\n",
    f"{CODE}\n": "code print(1)\n",
    f"{CODE}\nCode execution result: 2\nso \\boxed{{2}}": "code print(1)\n",  # what follows code was not seen by it
    f"So \\boxed{{7}}.\n{CODE}": "answer 7",
    f"{CODE}\n```python\nprint(2)\n```": "code print(1)\n",
    "```python print ( 3 + 4 ) ```": "code print ( 3 + 4 ) ",
    "```python\nprint('\\boxed{5}')\n```": "code print('\\boxed{5}')\n",  # a box in code answers nothing
    r"The answer is \boxed{\frac{1}{2}}.": r"answer \frac{1}{2}",
    r"I will put it into \boxed{}.": None,
    "The answer is 5.": None,
    "```\nprint(1)\n```": None,
    "```python\nprint(1)": None,  # cut
    "```python\n\n```": None,
    "": None,
}


@pytest.mark.parametrize("said", SAID)
def test_a_response_is_code_or_an_answer_or_void(env, said):
    action = SAID[said]
    assert env.parse(said) == (action, action is not None)
    assert env.action_type(action) == ("invalid" if action is None else action.split()[0])


def test_code_goes_on_an_answer_ends_and_a_void_turn_ends_without_reward(env):
    start = env.reset("train/0")
    step = env.step("code x = 5 + 3\nprint(x + 1294.678)")
    assert (step.observation.text, step.reward, step.done, step.note) == ("1302.678", 0, False, "")
    assert env.render(step.observation) == "\nCode execution result: 1302.678\n"
    assert step.observation.state_key != start.state_key
    step = env.step(f"answer {env.problem.answer}")
    assert (step.reward, step.done, step.success, step.score) == (1, True, True, 1)
    env.reset("train/0")
    assert env.step("code print(1302.678)").observation.state_key != step.observation.state_key
    step = env.step("answer 0.5")
    assert (step.reward, step.done, step.success, step.score) == (0, True, False, 0)
    env.reset("train/0")
    step = env.step(None)
    assert (step.reward, step.done, step.success) == (0, True, False)


def test_the_same_code_leads_to_the_same_state(env):
    keys = []
    for code in ("print(2)", "print(2)", "print(1 + 1)"):
        env.reset("train/0")
        keys.append(env.step(f"code {code}").observation.state_key)
    assert keys[0] == keys[1] != keys[2]


PRINTED = {  # code: what is shown, and the answer
    r"print('\\boxed{5}')": (r"\boxed{5}", None),  # a printout earns nothing
    "print('a'); final_answer(5); print('b')": ("a\nb", "5"),
    "final_answer(1)\nfinal_answer(2)": ("", "2"),
    "from fractions import Fraction\nfinal_answer(Fraction(3, 4))": ("", "3/4"),
    "import sympy\nfinal_answer(sympy.sqrt(2) / 2)": ("", r"\frac{\sqrt{2}}{2}"),
    "import warnings\nwarnings.warn('old')\nprint(7)": ("7", None),
    "print(7)\n1 / 0": ("ZeroDivisionError: division by zero", None),
    "print(": ("SyntaxError: '(' was never closed", None),
    "final_answer(3)\n1 / 0": ("ZeroDivisionError: division by zero", "3"),
    "import sys\nsys.exit(3)": ("interpreter error", None),
    "input()": ("EOFError: EOF when reading a line", None),
    "x = 1": ("", None),
}


@pytest.mark.parametrize("code", PRINTED)
def test_what_code_prints_is_shown_and_only_final_answer_answers(env, code):
    assert read_printout(env.sandbox.run(PRELUDE + code)) == PRINTED[code]
    step = env.step(f"code {code}")
    assert step.done == (PRINTED[code][1] is not None)


def test_a_long_printout_is_cut_in_the_middle():
    assert read_printout(Result("x" * 512 + "\n", "", "ok")) == ("x" * 512, None)
    text, answer = read_printout(Result("a" * 300 + "b" * 300 + f"{MARK}1{MARK}\n", "", "ok"))
    assert text == "a" * 256 + " ... 88 characters left out ... " + "b" * 256 and answer == "1"


def test_code_beyond_its_limit_is_counted_and_the_next_one_runs(env, monkeypatch):
    run = env.sandbox.run
    monkeypatch.setattr(env.sandbox, "run", lambda code, seconds=None: run(code, 1))
    step = env.step("code while True: pass")
    assert (step.observation.text, step.note, step.done) == ("interpreter timeout", "code timeout", False)
    assert env.step("code print(3)").observation.text == "3"


RIGHT = [  # gold, answer
    ("1/2", "0.5"),
    (r"\frac{1}{2}", "1/2"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    ("42", "42.0"),
    ("42", "042"),
    ("42", " 42 "),
    ("(1,2)", "(1, 2)"),
    (r"\{1,2\}", r"\{2,1\}"),
    (r"10\%", "0.1"),
    (r"90^\circ", "90"),
    (r"\text{A}", "A"),
    ("1000", "1,000"),
    ("10^{10}", "10000000000"),
]
WRONG = [
    ("1/2", "0.51"),
    ("42", "43"),
    ("42", "4" * 9999),
    ("42", "-42"),
    ("(1,2)", "(2,1)"),
    (r"\frac{\sqrt{2}}{2}", r"\sqrt{2}"),
    ("12", r"\frac{"),
    ("449", ""),
    (r"\text{A}", "B"),
    (r"\pi", "3.14159"),
    ("x^2+1", "x^2-1"),
    ("5", "the answer is unknown"),
]


def test_answers_are_graded_by_what_they_mean(sandbox):
    # case B59: in threads as in the main one
    pairs = [(pair, True) for pair in RIGHT] + [(pair, False) for pair in WRONG]
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda pair: grade(sandbox, pair[0][1], pair[0][0]), pairs))
    assert [right for right, _ in found] == [right for _, right in pairs]
    assert not any(note for _, note in found)
    assert [grade(sandbox, answer, gold)[0] for gold, answer in RIGHT[:3] + WRONG[:2]] == [True] * 3 + [False] * 2


def test_an_answer_that_one_comparison_chokes_on_is_graded_by_another_one_and_else_counted(sandbox):
    """math-verify meets a division by zero in 5 : 00, and finds the two equal by another way; 5 : 01 is not."""
    assert grade(sandbox, r"05\!:\! 00", r"05\!:\!00") == (True, "")
    assert grade(sandbox, r"05\!:\!01", r"05\!:\!00") == (False, "grader error")


def test_an_answer_that_hangs_the_grader_is_wrong_and_counted(sandbox, monkeypatch):
    monkeypatch.setattr(tir_math, "GRADING", 2.0)
    answers = ("9^{9^{9^9}}", "5.0", "9**9**9**9", "5.1")
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda answer: grade(sandbox, answer, "5"), answers))
    assert found[0] == (False, "grader timeout") and found[1:] == [(True, ""), (False, ""), (False, "")]


@pytest.fixture
def official(monkeypatch):
    """The problems of the released code's files and MATH500."""
    if not (DATA / "train.parquet").exists():
        pytest.skip(f"{DATA} has no train.parquet: see SAMPO_DATA")
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: requirements-tir-math.txt")
    monkeypatch.setenv("TIR_MATH_DATA", str(DATA))
    read_problems.cache_clear()
    return read_problems("official")


@pytest.mark.slow
def test_every_answer_of_the_training_data_verifies_against_itself(official, sandbox):
    answers = [problem.answer for name, problem in official.items() if name.startswith("train/")]
    assert len(answers) == 8521  # of 8,523, two have none
    parts = [answers[i : i + 300] for i in range(0, len(answers), 300)]
    with ThreadPoolExecutor() as pool:
        programs = [f"{GRADER}\nfor text in {part!r}:\n    print(equal(text, text))" for part in parts]
        results = list(pool.map(lambda program: sandbox.run(program, 120), programs))
    assert all(result.status == "ok" for result in results)
    assert sum(result.stdout.count("True") for result in results) == 8521


def test_official_files_are_read_as_they_are(official, sandbox):
    env = TIRMath(problems="official", prompt_style="words")
    sizes = {"train": 8521, "math500": 500, "valid_seen": 500, "aime24": 30, "aime25": 30, "valid_unseen": 60}
    assert {split: len(env.tasks(split)) for split in sizes} == sizes
    assert env.task_type("math500/0") == "Precalculus" and env.task_type("aime24/0") == "aime24"
    assert not hasattr(env, "expert") and env.known is None
    questions = {official[task].question for split in ("train", "math500", "aime24") for task in env.tasks(split)}
    assert all(len(question) > 10 for question in questions)
    seen = env.reset("aime25/0")
    [message] = env.prompt([(seen, None)])
    assert message["content"] == PROMPT + official["aime25/0"].question
    assert message["content"].startswith("Solve the following problem step by step. You now have the ability to selec")
    assert "\\\n" not in PROMPT and PROMPT.count("\n") == 12
    assert env.step(f"answer {official['aime25/0'].answer}").success


def write(folder, **files):
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_other_folders_and_data_sets_of_the_hub_are_read_too(tmp_path, monkeypatch):
    prompt = [{"role": "user", "content": "one?"}]
    released = {"prompt": prompt, "reward_model": {"ground_truth": 1}}
    write(
        tmp_path,
        **{
            "train-00000-of-00002": [released],
            "train-00001-of-00002": [{"question": "?", "answer": " "}, {"question": "2?", "answer": "2"}],
        },
    )
    write(tmp_path, test=[{"problem": "3?", "answer": "3", "subject": "Algebra"}])
    found = read_problems(str(tmp_path))
    assert {name: (p.question, p.answer, p.kind) for name, p in found.items()} == {
        "train/0": ("one?", "1", "train"),
        "train/1": ("2?", "2", "train"),
        "test/0": ("3?", "3", "Algebra"),
        "valid_seen/0": ("3?", "3", "Algebra"),
        "valid_unseen/0": ("3?", "3", "Algebra"),
    }
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: asked.append((a, k)) or str(tmp_path))
    assert read_problems("some/data.set") == found
    assert asked == [(("some/data.set",), {"repo_type": "dataset", "allow_patterns": ["*.parquet", "*.jsonl"]})]


BAD = {
    "nothing there": ({}, "no file"),
    "no held-out problems": ({"train": [{"question": "a", "answer": "1"}]}, "there is train"),
    "no training problems": ({"test": [{"question": "a", "answer": "1"}]}, "there is test"),
    "a column is missing": ({"train": [{"question": "a"}]}, "reward_model"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_data_is_one_line_before_a_model_loads(bad, tmp_path, monkeypatch, capsys):
    files, part = BAD[bad]
    write(tmp_path, **files)
    for module, flags in ((train, ["--output", str(tmp_path / "runs")]), (evaluation, ["--model", "none"])):
        monkeypatch.setattr(module, "load_policy", None)  # so that a call of it is a TypeError
        with pytest.raises(SystemExit) as stop:
            module.main(["--task", "tir_math", "--problems", str(tmp_path), *flags])
        said = capsys.readouterr().err.strip()
        assert stop.value.code == 2 and "\n" not in said and not (tmp_path / "runs").exists()
        assert str(tmp_path) in said and part in said and "or own" in said


def test_a_machine_without_isolation_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    def refuse(*arguments, **limits):
        raise ValueError("no isolation here; --sandbox unsafe")

    monkeypatch.setattr(tir_math, "Sandbox", refuse)
    shared_sandbox.cache_clear()
    with pytest.raises(SystemExit) as stop:
        train.main(["--task", "tir_math", "--output", str(tmp_path / "runs")])
    said = capsys.readouterr().err.strip()
    assert stop.value.code == 2 and "\n" not in said and "--sandbox unsafe" in said
    shared_sandbox.cache_clear()


def test_unknown_splits_and_problems_are_named(env):
    with pytest.raises(ValueError, match="split 'test': allowed are train, valid_unseen, valid_seen"):
        env.tasks("test")
    for call in (env.reset, env.task_type):
        with pytest.raises(ValueError, match="task 'train/x': allowed"):
            call("train/x")


def test_problems_of_our_own_are_right_and_splits_apart(env):
    splits = {split: [own()[task] for task in env.tasks(split)] for split in ("train", "valid_seen", "valid_unseen")}
    assert len(splits["valid_seen"]) == 480 and len(splits["train"]) > 8000
    pairs = {}
    for split, problems in splits.items():
        for problem in problems:
            words = problem.question.removeprefix("What is ").removesuffix(" ?").split()
            numbers = [int(word) for word in words if word.isdecimal()]
            a, b = numbers[:2]
            value = {"sum": a + b, "difference": a - b, "product": a * b, "both": (a + b) * numbers[-1]}[problem.kind]
            assert problem.answer == str(value) and 0 <= value < 200
            pairs.setdefault(split, set()).add((a, b))
    assert not pairs["valid_unseen"] & (pairs["train"] | pairs["valid_seen"])
    assert not {p.question for p in splits["train"]} & {p.question for p in splits["valid_seen"]}
    assert {problem.kind for problem in splits["valid_unseen"]} == {"sum", "difference", "product", "both"}


class Script:
    """An engine that says the scripted texts of a turn, for every prompt; None is a response that was cut."""

    def __init__(self, tokenizer, *texts):
        self.tokenizer, self.texts, self.prompts = tokenizer, texts, []

    def generate(self, prompts, seeds, sampling):
        text = self.texts[len(self.prompts)]
        self.prompts.append([prompt.ids for prompt in prompts])
        ids = self.tokenizer(text.removeprefix("CUT "))["input_ids"]
        ids += [self.tokenizer.eos_token_id] * (not text.startswith("CUT "))
        return [Generation(list(ids), [-0.5] * len(ids), text.startswith("CUT ")) for _ in prompts]


def play(sandbox, *texts, task="train/0"):
    env = TIRMath()
    tokenizer = tiny_tokenizer(env.words())
    engine = Script(tokenizer, *texts)
    [trajectory] = run_episodes(engine, tokenizer, [env], [task], [("key",)], Sampling(1.0, 30), 500)
    return trajectory, engine, tokenizer


def test_trained_tokens_are_the_sampled_ones_and_each_prompt_starts_with_the_ids_before(sandbox):
    # cases B14, B26, B49: what tools print, and the chat's marks, are read and never trained on
    first, second = "```python print ( 3 + 4 ) ```", r"\boxed { 7 }"
    trajectory, engine, tokenizer = play(sandbox, first, "```python print ( 11 - 4 ) ```", second)
    ids = [tokenizer(text)["input_ids"] for text in (first, "```python print ( 11 - 4 ) ```", second)]
    end, shown = tokenizer.eos_token_id, tokenizer("Code execution result: 7")["input_ids"]
    start = engine.prompts[0][0]
    assert tokenizer.decode(start) == f"<|user|> {own()['train/0'].question} <|assistant|>"
    assert engine.prompts[1][0] == start + ids[0] + [end] + shown
    assert engine.prompts[2][0] == start + ids[0] + [end] + shown + ids[1] + [end] + shown
    [row] = make_rows([[trajectory]], append_only=True)
    assert row.ids == engine.prompts[2][0] + ids[2] + [end]
    assert [row.ids[i] for i in row.sampled] == [*ids[0], end, *ids[1], end, *ids[2], end]
    assert row.sequence == [0] * (len(ids[0]) + 1) + [1] * (len(ids[1]) + 1) + [2] * (len(ids[2]) + 1)
    assert trajectory.turns[2].action == "answer 7" and [turn.valid for turn in trajectory.turns] == [True] * 3


def test_another_observation_changes_what_is_read_and_nothing_of_the_loss(sandbox):
    """The same responses after another printout: the batch differs in the context alone, and under a policy that does
    not look at it (all logits 0) the log-probabilities are equal too."""
    said, packs = ("```python print ( {} ) ```", r"\boxed { 7 }"), []
    trajectory, _, tokenizer = play(sandbox, said[0].format("3 + 4"), said[1])
    [row] = make_rows([[trajectory]], append_only=True)
    [shown] = [i for i in range(len(row.ids)) if i not in row.sampled and row.ids[i] == tokenizer("7")["input_ids"][0]]
    model = tiny_model(len(tokenizer), 32, 1, tokenizer.eos_token_id, tokenizer.pad_token_id)
    blind = tiny_model(len(tokenizer), 32, 1, tokenizer.eos_token_id, tokenizer.pad_token_id)
    torch.nn.init.zeros_(blind.lm_head.weight)
    for text in ("7", "8"):
        row.ids[shown] = tokenizer(text)["input_ids"][0]
        packs.append(pack([row], tokenizer.pad_token_id))
    for name in ("tokens", "sequence", "row", "column", "rollout_logprobs"):
        assert torch.equal(getattr(packs[0], name), getattr(packs[1], name))
    found = [[sampled_logprobs(policy, p, 1.0)[0] for p in packs] for policy in (blind, model)]
    assert torch.equal(*found[0]) and not torch.equal(*found[1])
    before = len(trajectory.turns[0].response_ids)
    assert torch.equal(found[1][0][:before], found[1][1][:before])  # the first turn was sampled before


def test_a_void_or_cut_turn_ends_the_episode_and_masks_the_trajectory(sandbox):
    for text in ("print ( 3 + 4 )", r"CUT \boxed { 7 }", "CUT ```python print ( 3 + 4 ) ```"):
        trajectory, _, _ = play(sandbox, "```python print ( 3 + 4 ) ```", text)
        assert [turn.valid for turn in trajectory.turns] == [True, False]
        assert not trajectory.success and not trajectory.truncated and trajectory.reward == 0
        assert make_rows([[trajectory]], append_only=True, mask_invalid=True) == []


def test_words_that_the_built_in_model_does_not_know_are_other(sandbox):
    env = TIRMath()
    env.reset("train/0")
    shown = [env.render(env.step(f"code print({code})").observation) for code in ("199", "200", "3.5", "'a b 12'")]
    assert [text.removeprefix("\nCode execution result: ").strip() for text in shown] == [
        "199",
        "other",
        "other",
        "other other 12",
    ]
    tokenizer = tiny_tokenizer(env.words())
    for text in shown:
        tokenizer(text)


def test_the_expert_is_cloned_turn_by_turn_in_one_context(sandbox):
    env, rng = TIRMath(), random.Random(0)
    tokenizer = tiny_tokenizer(env.words())
    played = [play_scripted(env, task, lambda env, seen: env.expert(rng))[1] for task in env.tasks("train")[:40]]
    assert all(trajectory.success and len(trajectory.turns) == 2 for trajectory in played)
    noisy = [play_scripted(env, task, lambda env, seen: env.expert(rng, 0.5))[1] for task in env.tasks("train")[:40]]
    assert 5 < sum(trajectory.success for trajectory in noisy) and max(len(t.turns) for t in noisy) == 5
    rows = expert_rows(env, env.tasks("train"), tokenizer, 5, 0.0, 0.0, rng)
    assert len(rows) == 5 and all({*row.sequence} == {2 * i, 2 * i + 1} for i, row in enumerate(rows))
    said = tokenizer.decode(rows[0].ids)
    problem = own()["train/0"]
    expression = problem.question.removeprefix("What is ").removesuffix(" ?")
    assert said == (
        f"<|user|> {problem.question} <|assistant|> ```python print ( {expression} ) ``` <|end|> "
        f"Code execution result : {problem.answer} \\boxed {{ {problem.answer} }} <|end|>"
    )


def test_a_step_trains_trajectories_without_void_turns_each_as_one_sequence(sandbox, tmp_path, monkeypatch):
    """Two groups of four: members 0 and 1 run code and answer, 0 rightly; 2 answers wrongly at once; 3 is void."""
    flags = "--task tir_math --method grpo --sft_steps 0 --eval_levels 6 --groups_per_step 2 --group_size 4 --name a"
    run = train.Run(parse([*flags.split(), "--output", str(tmp_path)]))
    tasks, kept, calls = ["train/0", "train/1"], {}, []

    def generate(prompts, seeds, sampling):
        calls.append(len(prompts))
        first = ["```python print ( 1 ) ```"] * 2 + [r"\boxed { 199 }", "print"]
        texts = first * 2
        if len(calls) == 2:
            texts = [rf"\boxed {{ {answer} }}" for task in tasks for answer in (own()[task].answer, 0)]
        ids = [run.tokenizer(text)["input_ids"] + [run.tokenizer.eos_token_id] for text in texts]
        return [Generation(i, [-0.5] * len(i), False) for i in ids]

    def update(model, optimizer, mini_batches, loss, **settings):
        kept["packs"] = sum(mini_batches, [])
        return {}

    monkeypatch.setattr(run.engine, "generate", generate)
    monkeypatch.setattr(run.stream, "take", lambda count: tasks)
    monkeypatch.setattr(train, "update_policy", update)
    monkeypatch.setattr(train, "check_gap", lambda mean, dtype: None)
    metrics = train.train_step(run, run.model, 1)
    assert calls == [8, 4] and metrics["train/success"] == 0.25 and metrics["format_valid"] == 10 / 12
    # rewards 1, 0, 0, 0: mean 1/4, deviation sqrt((9/16 + 3/16) / 3) = 1/2; the void one counts, and has no row
    advantages = {}
    for batch in kept["packs"]:
        for sequence, advantage in zip(batch.sequence.tolist(), batch.advantages.tolist(), strict=True):
            advantages.setdefault(sequence, set()).add(round(advantage, 4))
    assert advantages == {0: {1.5}, 1: {-0.5}, 2: {-0.5}, 4: {1.5}, 5: {-0.5}, 6: {-0.5}}
    assert np.isfinite(metrics["entropy"])


def test_problems_are_solved_in_the_terminal(sandbox, monkeypatch, capsys):
    for lines, part in (("", "no answer"), ("```python\\nprint(2)\\n```\nno\n", "result: 2\n\n2> no\nscore 0")):
        monkeypatch.setattr(sys, "argv", ["tir_math"])
        monkeypatch.setattr(sys, "stdin", StringIO(lines))
        tir_math.main()
        assert part in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["tir_math", "--expert"])
    tir_math.main()
    assert "score 1" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["tir_math", "--problem", "x"])
    with pytest.raises(SystemExit) as stop:
        tir_math.main()
    assert stop.value.code == 2 and "task 'x'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_on_problems_of_our_own(sandbox, tmp_path):
    small = "--steps 2 --sft_steps 5 --sft_episodes 20 --sft_batch 16 --eval_levels 12 --groups_per_step 2"
    small += " --group_size 2 --method grpo --mini_batch 2 --output"
    train.main(["--task", "tir_math", *small.split(), str(tmp_path), "--name", "a"])
    results = json.loads((tmp_path / "a/results.json").read_text())["results"]
    assert results["expert"]["valid_seen"]["success"] == 1 > results["after RL"]["valid_seen"]["success"]
