"""The whole loop in process, on real episodes: files, metrics, repeatability, every method, learning."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

import eval as evaluation
import train
from checkpoint import Progress
from config import parse
from diagnostics import COLLAPSE_SIGNS, PARTS, UPDATE_METRICS, sampling_metrics
from engines import Sampling, TransformersEngine
from grpo import METHODS
from plots import read_metrics
from records import read_records

REQUIRED = {
    "train/success",
    "loss",
    "kl_ref",
    "kl_old",
    "grad_norm",
    "clip_frac",
    "format_valid",
    "entropy",
    "tokens",
    "seconds/rollout",
    "seconds/update",
}
SMALL = "--steps 3 --eval_every 2 --eval_levels 24 --groups_per_step 4 --group_size 4 --sft_episodes 150"


def run(output, *flags):
    results = train.main([*SMALL.split(), "--output", str(output), *flags])
    (folder,) = [path for path in output.iterdir() if path.is_dir()]
    return results, folder


def without_seconds(folder):
    return [
        {name: value for name, value in metrics.items() if not name.startswith(("seconds/", "rate/"))}
        for metrics in read_metrics(folder / "metrics.jsonl")
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A short run of the default method: cloned for 60 steps, three RL steps of two epochs."""
    cloning = "--sft_steps 60 --sft_batch 32 --sft_learning_rate 0.01".split()
    return run(tmp_path_factory.mktemp("runs"), *cloning, "--epochs", "2")


def test_a_run_leaves_its_files(finished):
    results, folder = finished
    assert folder.name == "sokoban-sampo-seed0"
    assert (folder / "curves.png").stat().st_size > 10_000
    assert json.loads((folder / "config.json").read_text())["method"] == "sampo"
    assert json.loads((folder / "results.json").read_text())["results"] == results
    assert list(results) == ["random", "expert", "after cloning", "after RL"]
    assert all(set(panels) == {"valid_seen", "valid_unseen"} for panels in results.values())
    AutoModelForCausalLM.from_pretrained(folder / "model")


def test_metrics_have_a_line_a_step_and_every_name_is_in_the_readme(finished):
    results, folder = finished
    metrics = read_metrics(folder / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [0, 1, 2, 3]
    assert [m["step"] for m in metrics if "eval/success" in m] == [0, 2, 3]
    assert metrics[0]["eval/success"] == results["after cloning"]["valid_seen"]["success"]
    assert metrics[3]["eval/success"] == results["after RL"]["valid_seen"]["success"]
    assert all(set(m) >= REQUIRED for m in metrics[1:])
    trained = [m for m in metrics[1:] if m["updates"]]
    assert trained and all(isinstance(m[name], float | int) for m in trained for name in UPDATE_METRICS)
    readme = (Path(train.__file__).parent / "README.md").read_text()
    glossary = readme.partition("## Metrics")[2].partition("\n## ")[0]
    names = {re.sub(r"^(share|kl_share|seconds)/.*", r"\1/*", name) for m in metrics for name in m}
    assert [name for name in sorted(names) if f"`{name}`" not in glossary] == []
    seconds = {name.removeprefix("seconds/") for m in metrics for name in m if name.startswith("seconds/")}
    assert all(f"`{part}`" in glossary for part in seconds)


def test_a_saved_run_evaluates_to_the_same_success(finished, capsys):
    results, folder = finished
    again = evaluation.main(["--run", str(folder), "--split", "valid_unseen"])
    assert results["after RL"]["valid_unseen"].items() <= again.items()
    assert json.loads(capsys.readouterr().out)["split"] == "valid_unseen"


class Spy:
    """An engine that passes on what it is asked, and keeps it."""

    def __init__(self, engine):
        self.engine, self.seeds, self.samplings = engine, [], []

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def generate(self, prompts, seeds, sampling):
        self.seeds += seeds
        self.samplings.append(sampling)
        return self.engine.generate(prompts, seeds, sampling)


@pytest.fixture
def small(tmp_path):
    """A run before its first step, with an untrained policy."""
    flags = "--sft_steps 0 --eval_levels 6 --groups_per_step 2 --group_size 3 --temperature 1.3 --eval_temperature 0.4"
    flags += (
        f" --eval_top_p 0.9 --eval_top_k 7 --max_response_tokens 5 --max_tries 2 --method sampo --output {tmp_path}"
    )
    made = train.Run(parse(flags.split()))
    made.engine = Spy(made.engine)
    return made


def test_no_two_draws_of_a_run_share_a_seed(small):
    for step in (1, 2):
        groups, everything, stats = train.sample_step(small, step)
        assert (stats["tries"], groups, len(everything)) == (2, [], 2 * 2)  # an untrained policy fails everywhere
    small.play(["train/0"] * 3, ("cloning",))
    small.evaluate("valid_seen")
    assert len(set(small.engine.seeds)) == len(small.engine.seeds) > 2 * 2 * 6 * 12


def test_training_and_evaluation_sample_by_their_own_settings(small):
    small.play(["train/0"], ())
    assert set(small.engine.samplings) == {Sampling(1.3, 5)}
    small.engine.samplings.clear()
    small.evaluate("valid_unseen")
    assert set(small.engine.samplings) == {Sampling(0.4, 5, top_p=0.9, top_k=7)}


def test_each_turn_trains_with_its_own_advantage(small, monkeypatch):
    """Row i of the turn table is sequence i of the rows: turn i is given advantage i + 1."""
    kept = {}

    def update(model, optimizer, mini_batches, loss, **settings):
        kept["packs"] = [pack for batch in mini_batches for pack in batch]
        return {}

    monkeypatch.setitem(train.ADVANTAGES, "gigpo", lambda turns: 1.0 + np.arange(len(turns.turn)))
    monkeypatch.setattr(train, "update_policy", update)
    groups = [small.play(["train/0"] * 3, ("a",)), small.play(["train/1"] * 3, ("b",))]
    monkeypatch.setattr(train, "sample_step", lambda run, step: (groups, groups, sampling_metrics(groups)))
    train.train_step(small, small.model, 1)
    turns = [turn for group in groups for trajectory in group for turn in trajectory.turns]
    seen = {}
    for pack in kept["packs"]:
        columns = (pack.sequence.tolist(), pack.advantages.tolist(), pack.tokens.tolist())
        for sequence, advantage, token in zip(*columns, strict=True):
            assert advantage == sequence + 1
            seen.setdefault(sequence, []).append(token)
    assert [seen[i] for i in range(len(turns))] == [turn.response_ids for turn in turns]


def test_the_filter_starts_behind_its_cold_start(small):
    small.config = replace(small.config, filter_cold_start=2, max_tries=3)
    tries = [train.sample_step(small, step)[2]["tries"] for step in (1, 2, 3)]
    assert tries == [1, 1, 3]  # an untrained policy fails everywhere: with the filter all tries are used up


def test_an_inadmissible_action_counts_as_invalid_where_the_switch_says_so(small, monkeypatch):
    tables = []
    monkeypatch.setitem(train.ADVANTAGES, "gigpo", lambda turns: tables.append(turns) or np.zeros(len(turns.turn)))
    groups = [small.play(["train/0"] * 3, ("a",))]
    turns = [turn for trajectory in groups[0] for turn in trajectory.turns]
    turns[1].valid, turns[1].admissible = True, False
    monkeypatch.setattr(train, "sample_step", lambda run, step: (groups, groups, sampling_metrics(groups)))
    for switch in (False, True):
        small.config = replace(small.config, inadmissible_is_invalid=switch)
        train.train_step(small, small.model, 1)
    assert [table.valid[1] for table in tables] == [True, False]


def test_time_is_limited_without_that_of_cloning():
    def reason(before, now):
        config = SimpleNamespace(max_minutes=1.0, stop_on_collapse=False)
        run = SimpleNamespace(config=config, progress=Progress(seconds=before), seconds=now)
        return train.reason_to_stop(run, [], [])

    assert reason({}, {"cloning": 500.0}) == reason({"cloning": 500.0, "rollout": 40.0}, {"update": 19.0}) == ""
    assert reason({"cloning": 0.0, "rollout": 40.0}, {"update": 21.0}) == "max_minutes 1.0 reached"


def test_rates_and_seconds_of_the_lines_are_those_of_the_step(finished):
    _, folder = finished
    metrics = read_metrics(folder / "metrics.jsonl")[1:]
    assert any(m["tokens"] for m in metrics)
    for m in metrics:
        assert m["rate/rollout"] == pytest.approx(m["sampled_tokens"] / m["seconds/rollout"])
        assert m["rate/update"] == pytest.approx(2 * m["tokens"] / m["seconds/update"])  # two epochs
    total = json.loads((folder / "results.json").read_text())["seconds"]
    assert total["rollout"] == pytest.approx(sum(m["seconds/rollout"] for m in metrics))


def test_a_step_whose_advantages_are_all_zero_changes_nothing(small, monkeypatch):
    """Without dynamic sampling uniform groups come this far; Adam would scale their rounding errors to full steps."""
    monkeypatch.setitem(train.ADVANTAGES, "gigpo", lambda turns: np.zeros(len(turns.turn)))
    groups = [small.play(["train/0"] * 3, ("a",))]
    monkeypatch.setattr(train, "sample_step", lambda run, step: (groups, groups, sampling_metrics(groups)))
    metrics = train.train_step(small, small.model, 1)  # an update would need the optimizer
    assert (metrics["updates"], metrics["loss"]) == (0, None) and metrics["entropy"] > 0


def test_an_engine_that_samples_from_another_policy_stops_the_run(small, monkeypatch):
    groups = [small.play(["train/0"] * 3, ("a",))]
    for turn in groups[0][0].turns:
        turn.rollout_logprobs = [logprob - 0.05 for logprob in turn.rollout_logprobs]
    monkeypatch.setattr(train, "sample_step", lambda run, step: (groups, groups, sampling_metrics(groups)))
    with pytest.raises(RuntimeError, match="nats a token, allowed is 0.01 in torch.float32"):
        train.train_step(small, small.model, 1)


def test_the_engine_gets_every_update_before_it_samples_again(tmp_path, monkeypatch):
    calls = []
    for name in ("load_weights", "check"):
        monkeypatch.setattr(TransformersEngine, name, lambda self, model, v, name=name: calls.append((name, v)))
    monkeypatch.setattr(TransformersEngine, "sleep", lambda self: calls.append(("sleep",)))
    small = "--group_size 2 --groups_per_step 1 --max_tries 1 --eval_levels 2 --sft_steps 1 --sft_episodes 9".split()
    train.main([*small, "--output", str(tmp_path), "--steps", "2"])
    first = [("sleep",), ("load_weights", 0), ("check", 0)]  # it sleeps while the expert is cloned
    step = [[("check", i - 1), ("sleep",), ("load_weights", i), ("check", i)] for i in (1, 2, 3)]
    assert calls == first + step[0] + step[1]
    calls.clear()
    train.main([*small, "--output", str(tmp_path), "--steps", "3", "--resume"])
    assert calls == [("load_weights", 2), ("check", 2), *step[2]]
    calls.clear()
    with pytest.raises(RuntimeError, match="own rollouts succeeded"):  # an untrained policy solves nothing
        train.main([*small, "--output", str(tmp_path), "--name", "own", "--steps", "0", "--sft_data", "rollouts"])
    assert calls == first[1:]  # but it played with its weights


def test_accelerate_settings_that_would_change_the_gradient_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(SystemExit) as stop:
        train.main(["--output", str(tmp_path)])
    assert stop.value.code == 2 and "gradient_accumulation_steps 4" in capsys.readouterr().err


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run_and_another_does_not(tmp_path):
    logs = []
    for name, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        _, folder = run(tmp_path / name, "--sft_steps", "40", "--seed", seed)
        logs.append(without_seconds(folder))
    assert logs[0] == logs[1] != logs[2]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_twenty_steps_with_finite_metrics(method, finished, tmp_path):
    _, cloned = finished
    flags = ["--model", str(cloned / "model"), *"--recipe tiny --sft_steps 0 --filter_cold_start 0 --steps 20".split()]
    _, folder = run(tmp_path, *flags, "--method", method, "--eval_every", "20")
    metrics = read_metrics(folder / "metrics.jsonl")[1:]
    trained = [m for m in metrics if m["updates"]]
    assert len(metrics) == 20 and len(trained) > 5
    assert all(math.isfinite(m[name]) for m in trained for name in UPDATE_METRICS)
    assert all(value is not None for m in metrics for name, value in m.items() if name not in UPDATE_METRICS)
    for m in trained:
        assert sum(m[f"share/{part}"] for part in PARTS) == pytest.approx(1)
        assert sum(m[f"kl_share/{part}"] for part in PARTS) == pytest.approx(1 if m["kl_ref"] else 0)


def test_a_step_without_an_informative_group_is_skipped(tmp_path):
    # an untrained policy never succeeds: every group fails, dynamic sampling keeps none
    _, folder = run(tmp_path, "--sft_steps", "0", "--max_tries", "2", "--steps", "1", "--eval_levels", "4")
    for m in read_metrics(folder / "metrics.jsonl")[1:]:
        assert (m["updates"], m["tries"], m["train/all_fail"], m["loss"], m["tokens"]) == (0, 2, 1.0, None, 0)
        assert all(m[name] is None for name in UPDATE_METRICS)


@pytest.mark.slow
def test_own_rollouts_can_be_cloned(finished, tmp_path):
    _, cloned = finished
    flags = "--recipe tiny --sft_data rollouts --sft_episodes 64 --sft_steps 5 --steps 0"
    results, _ = run(tmp_path, "--model", str(cloned / "model"), *flags.split())
    assert results["after cloning"]["valid_seen"]["levels"] == 24


@pytest.mark.slow
def test_the_time_limit_stops_saves_and_evaluates(tmp_path, capsys):
    results, folder = run(tmp_path, "--sft_steps", "0", "--max_minutes", "0.0001", "--steps", "50")
    metrics = read_metrics(folder / "metrics.jsonl")
    assert len(metrics) < 5 and "eval/success" in metrics[-1]
    assert (folder / "model").exists() and "after RL" in results


@pytest.mark.slow
def test_gradients_that_stay_non_finite_stop_the_run(finished, tmp_path, monkeypatch):
    _, cloned = finished
    monkeypatch.setitem(train.ADVANTAGES, "grpo", lambda turns, *, std=True: turns.reward * float("nan"))
    flags = ["--model", str(cloned / "model"), "--recipe", "tiny", "--sft_steps", "0", "--method", "grpo"]
    with pytest.raises(RuntimeError, match="step 3: every gradient of the last 3 steps was non-finite"):
        run(tmp_path, *flags)


@pytest.mark.slow
def test_the_task_of_the_readme_trains_and_its_expert_always_wins(tmp_path):
    readme = (Path(train.__file__).parent / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    assert code.count("\n") <= 45
    (tmp_path / "hot_cold.py").write_text(code)
    results, folder = run(tmp_path / "runs", "--env", f"{tmp_path}/hot_cold.py:HotCold", "--sft_steps", "30")
    assert folder.name == "HotCold-sampo-seed0"
    assert results["expert"]["valid_seen"]["success"] == 1  # five guesses halve sixteen numbers down to one
    record = next(iter(read_records(folder / "rollouts.jsonl.gz")))
    assert record["task_type"] is None and record["turns"][0]["action_type"] is None


@pytest.mark.slow
def test_metrics_reach_a_tracker(finished, tmp_path):
    pytest.importorskip("tensorboard", reason="requirements-trackers.txt is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, cloned = finished
    flags = ["--model", str(cloned / "model"), "--recipe", "tiny", "--sft_steps", "0", "--log_with", "tensorboard"]
    _, folder = run(tmp_path, *flags)
    events = EventAccumulator(str(folder / "sampo"))
    events.Reload()
    lines = {m["step"]: m for m in read_metrics(folder / "metrics.jsonl")}
    for name in ("train/success", "eval/success", "kl_share/pos_up_sure"):
        sent = {event.step: event.value for event in events.Scalars(name)}
        assert sent == pytest.approx({step: m[name] for step, m in lines.items() if m.get(name) is not None})


@pytest.mark.slow
def test_sampo_learns(tmp_path):
    """Twenty steps of the default, at its own size: held-out success rises by more than its interval."""
    flags = "--steps 20 --eval_every 20 --eval_levels 240 --groups_per_step 16 --group_size 8 --sft_episodes 2000"
    results = train.main([*flags.split(), "--output", str(tmp_path)])
    before, after = (results[name]["valid_seen"] for name in ("after cloning", "after RL"))
    assert before["success"] > 2 * results["random"]["valid_seen"]["success"]
    assert after["success_low"] > before["success_high"]


@pytest.mark.slow
def test_the_monitor_warns_before_success_has_halved_and_leaves_sampo_alone(tmp_path, capsys):
    """SAPO pushed to collapse by a high learning rate, small mini-batches and two epochs; SAMPO as it comes."""
    train.main(f"--steps 0 --eval_levels 24 --output {tmp_path}/cloned".split())
    flags = f"--model {tmp_path}/cloned/sokoban-sampo-seed0/model --recipe tiny --sft_steps 0 --eval_levels 24"
    hot = "--method sapo --learning_rate 5e-4 --mini_batch 128 --epochs 2 --steps 5 --stop_on_collapse false"
    capsys.readouterr()
    train.main(f"{flags} {hot} --output {tmp_path}/sapo".split())
    assert "signs of collapse: low_side (outside_low 0.0" in capsys.readouterr().err
    metrics = read_metrics(tmp_path / "sapo" / "sokoban-sapo-seed0" / "metrics.jsonl")[1:]
    warned = next(m["step"] for m in metrics if m["collapse/low_side"])
    halved = next(m["step"] for m in metrics if m["train/success"] < metrics[0]["train/success"] / 2)
    assert warned < halved
    train.main(f"{flags} {hot} --stop_on_collapse --output {tmp_path}/stopped".split())
    stopped = read_metrics(tmp_path / "stopped" / "sokoban-sapo-seed0" / "metrics.jsonl")
    assert stopped[-1]["step"] == warned and "eval/success" in stopped[-1]
    train.main(f"{flags} --method sampo --steps 8 --output {tmp_path}/sampo".split())
    metrics = read_metrics(tmp_path / "sampo" / "sokoban-sampo-seed0" / "metrics.jsonl")
    assert not any(m[f"collapse/{sign}"] for m in metrics for sign in COLLAPSE_SIGNS)
    assert metrics[-1]["train/success"] > metrics[1]["train/success"]
