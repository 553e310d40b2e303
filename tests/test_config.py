"""Settings: precedence, and every wrong invocation ends in one line and exit code 2 before any work."""

import inspect
import json
from dataclasses import fields

import pytest

import engines
import eval as evaluation
import train
from advantages import ADVANTAGES, gigpo
from config import Config, numbers_of, parse, resolve
from envs.sokoban import Sokoban
from grpo import METHODS
from losses import SURROGATES, ppo_clip, sapo
from recipes import NUMBERS

SMALL = "--sft_steps 0 --steps 0 --eval_levels 4 --groups_per_step 1"

WRONG = {  # command line: what the one line must hold
    "--method sampoo": ["--method", "'sampoo'", "sampo", "grpo"],
    "--mehtod sampo": ["--mehtod", "--method"],
    "--meth sampo": ["--meth", "no such flag"],
    "--steps ten": ["--steps", "'ten'", "int"],
    "--steps -1": ["--steps -1", "0..1e6"],
    "--learning_rate nan": ["--learning_rate nan", "0..1"],
    "--learning_rate 2": ["--learning_rate 2.0", "0..1"],
    "--temperature 0": ["--temperature 0.0", "1e-2.."],
    "--eval_top_p 1.5": ["--eval_top_p 1.5", "..1"],
    "--aggregation mean": ["--aggregation", "'mean'", "token-mean"],
    "--group_size 1": ["--group_size 1", "at least 2", "dynamic sampling"],
    "--penalty_scope turn_local": ["--penalty_scope turn_local", "--baseline turn"],
    "--dual_clip 0.5": ["--dual_clip 0.5", "above 1"],
    "--dual_clip 1": ["--dual_clip 1.0", "above 1"],
    "--hidden 40": ["--hidden 40", "multiples of 16"],
    "--engine tgi": ["--engine", "'tgi'", "'vllm'"],
    "--kv_cache_gib 0": ["--kv_cache_gib 0.0", "1e-3..1e4"],
    "--sleep_level 3": ["--sleep_level 3", "0..2"],
    "--eval_temperature 0.001": ["--eval_temperature 0.001", "0 (greedy) or 0.01"],
    "--temperature 0.001": ["--temperature 0.001", "1e-2..1e3"],
    "--rollout_is_cap -1": ["--rollout_is_cap -1.0", "0..1e6"],
    "--max_response_tokens 4000": ["--max_prompt_tokens and --max_response_tokens: 4128 in all", "up to 4096"],
    "--std maybe": ["--std", "maybe", "true/false"],
    "--mini_batch 0": ["--mini_batch 0", "1.."],
    "--gamma 1.01": ["--gamma 1.01", "0..1"],
    "--task tetris": ["task 'tetris'", "sokoban", "path.py:Class"],
    "--task missing.py:Game": ["task 'missing.py:Game'", "no file missing.py"],
    "--eval_levels 5000": ["--eval_levels 5000", "1 to 512"],
    "--min_solution 9 --max_solution 8": ["min_solution 9", "max_solution 8", "max_turns"],
    "--max_solution 20": ["max_solution 20", "max_turns 12"],
    "--prompt_style words": ["--max_prompt_tokens 128", "and up"],
    "--size 3": ["--size 3", "4..100"],
    "--name a/b": ["--name 'a/b'", "name of a folder"],
    "--name ..": ["--name '..'", "name of a folder"],
    "--size 8 --boxes 2": ["size 8, boxes 2", "10,000 states"],
    "--model /no/such/model": ["/no/such/model"],
    "--log_with nothing": ["--log_with nothing", "installed trackers"],
    "--record_groups -1": ["--record_groups -1", "0..1e6"],
    "--sequence trajectory": ["--sequence trajectory", "contexts only grow", "sokoban"],
    "--method empg --mask_invalid": ["--mask_invalid True", "empg"],
    "--entropy_threshold -0.1": ["--entropy_threshold -0.1", "0..1e3"],
    "--dry_run --task tetris": ["task 'tetris'", "path.py:Class"],
    "--list everything": ["--list", "'everything'", "methods"],
    "--env mine.py:Game": ["task 'mine.py:Game'", "no file mine.py"],
    "--seed -3": ["--seed -3", "0.."],
    "extra": ["extra", "no such flag"],
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_invocation_is_one_line_and_exit_code_2(line, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        train.main([*SMALL.split(), "--output", str(tmp_path / "runs"), *line.split()])
    assert stop.value.code == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said and "Traceback" not in said
    assert all(part in said for part in WRONG[line]), said
    assert not (tmp_path / "runs").exists()


def test_vllm_is_asked_for_where_it_is_not_installed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stop:
        train.main(["--engine", "vllm", "--output", str(tmp_path / "runs")])
    said = capsys.readouterr().err.strip()
    assert stop.value.code == 2 and "\n" not in said and "--engine vllm" in said and "requirements-vllm.txt" in said


def test_a_folder_is_not_overwritten_unasked_and_never_if_it_is_no_run(tmp_path, capsys):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.txt").write_text("precious")
    (folder / "config.json").write_text("{}")  # as a model's folder has
    for flags in ([], ["--overwrite"]):
        with pytest.raises(SystemExit) as stop:
            train.main([*SMALL.split(), "--output", str(tmp_path), "--name", "mine", *flags])
        assert stop.value.code == 2 and "--overwrite" in capsys.readouterr().err
    assert (folder / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("--run nowhere", ["nowhere", "config.json"]),
        ("--run qwen", ["qwen", "allowed is a run folder"]),
        ("--run listed", ["listed", "allowed is a run folder"]),
        ("--split test", ["split 'test'", "valid_seen"]),
        ("--split nowhere", ["split 'nowhere'", "valid_unseen"]),
        ("--eval_levels 9999", ["--eval_levels 9999", "512"]),
        ("--eval_temperature -1", ["--eval_temperature -1.0", "0.."]),
        ("--verbose", ["--verbose", "no such flag"]),
        ("--steps 5", ["--steps 5", "a setting of training"]),
        ("--method grpo", ["--method grpo", "a setting of training"]),
        ("--task sokoban", ["--task sokoban", "without --run"]),
        ("--env sokoban", ["--task sokoban", "without --run"]),
        ("--model some/model", ["--model some/model", "without --run"]),
        ("--recipe paper", ["--recipe paper", "without --run"]),
        ("--checkpoint 7", ["--checkpoint 7", "none so far"]),
        ("--checkpoint last", ["--checkpoint", "'last'", "int"]),
        ("--samples 0", ["--samples 0", "1 to 10000"]),
        ("--samples 10001", ["--samples 10001", "1 to 10000"]),
        ("--samples two", ["--samples", "'two'", "int"]),
        ("--pass_k 3 --samples 2", ["--pass_k 3", "1 to 2", "--samples"]),
        ("--pass_k 1,2", ["--pass_k 1,2", "1 to 1", "--samples"]),
        ("--pass_k x", ["--pass_k x", "1 to 1"]),
        ("--pass_k 0", ["--pass_k 0", "1 to 1"]),
        ("--pass_k 1,", ["--pass_k 1,", "1 to 1"]),
        ("--pass_k 2 --samples 4 --eval_temperature 0", ["--pass_k 2", "greedy"]),
        ("--pass_k 1,4 --samples 4 --eval_top_k 1", ["--pass_k 4", "greedy"]),
        ("--format yaml", ["--format", "'yaml'", "markdown"]),
        ("--records config.json", ["--records config.json", "new file"]),
        ("--records no/such/folder", ["--records no/such/folder", "a folder that exists"]),
        ("--show 0", ["--show 0", "1 to 10000"]),
        ("--show 2", ["rollouts.jsonl.gz"]),
        ("--html", ["rollouts.jsonl.gz"]),
        ("--at_step 3", ["--at_step 3", "--show or --html"]),
        ("--show 2 --samples 4", ["--samples 4", "--show", "plays nothing"]),
        ("--html --checkpoint 4", ["--checkpoint 4", "--html", "plays nothing"]),
        ("--seed 1", ["--run", "model is not there yet"]),
    ],
)
def test_wrong_invocations_of_eval(line, parts, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({}))
    (tmp_path / "qwen").mkdir()
    (tmp_path / "qwen" / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    (tmp_path / "listed").mkdir()
    (tmp_path / "listed" / "config.json").write_text("[1, 2]")
    run = [] if "--run" in line else ["--run", str(tmp_path)]
    with pytest.raises(SystemExit) as stop:
        evaluation.main([*run, *line.split()])
    assert stop.value.code == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said and all(part in said for part in parts), said


def test_every_number_of_a_formula_is_a_setting_and_has_a_recipe():
    settings = {item.name for item in fields(Config)}
    for function in (*SURROGATES.values(), *ADVANTAGES.values(), Sokoban):
        parameters = inspect.signature(function).parameters.values()
        assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} <= settings, function.__name__
    assert set(NUMBERS) == {*SURROGATES, *ADVANTAGES}
    assert all(set(numbers) <= settings for numbers in NUMBERS.values())


def test_a_choice_is_checked_in_code_too():
    with pytest.raises(ValueError, match="--surrogate 'gpso': allowed are ppo_clip, cispo, sapo, gspo"):
        Config(surrogate="gpso")


def test_every_number_has_limits_and_its_default_keeps_them():
    for item in fields(Config):
        limits = item.metadata.get("metavar")
        assert (item.type in (int, float)) == bool(limits), item.name
        if limits:
            low, high = map(float, limits.split(".."))
            assert low <= item.default <= high, item.name


def test_the_command_line_wins_over_recipe_over_method_over_default():
    config, source = resolve({"method": "sampo", "kl_coef": 0.5})
    assert (config.surrogate, config.advantage, config.dynamic_sampling) == ("gspo", "gigpo", True)
    assert (config.clip_low, config.clip_high) == (0.03, 0.04)  # the tiny recipe's exception
    assert config.kl_coef == 0.5 and config.dual_clip == 0.0
    assert source["kl_coef"] == "command line" and source["clip_low"] == "sokoban tiny gspo"
    assert source["learning_rate"] == "sokoban tiny" and source["dual_clip"] == "default"
    assert source["surrogate"] == "method sampo"


def test_another_surrogate_brings_its_own_numbers():
    config, _ = resolve({"method": "sampo", "surrogate": "cispo"})
    assert (config.surrogate, config.clip_low, config.clip_high) == ("cispo", 1.0, 0.2)


def test_a_model_takes_the_papers_numbers():
    # Table 6, Sokoban; SAMPO takes GSPO's row
    config, _ = resolve({"method": "sampo", "model": "some/model"})
    assert (config.clip_low, config.clip_high, config.learning_rate) == (3e-3, 4e-3, 1e-6)
    assert (config.mini_batch, config.groups_per_step, config.group_size) == (64, 32, 8)
    assert (config.max_turns, config.history, config.kl_coef, config.penalty) == (15, 2, 0.01, 0.1)
    assert (config.max_prompt_tokens, config.max_response_tokens) == (1024, 512)
    assert (config.eval_temperature, config.eval_top_p, config.eval_top_k) == (0.7, 0.95, 20)
    assert resolve({"model": "some/model", "recipe": "tiny"})[0].learning_rate == 3e-4


def test_a_users_own_task_takes_the_bare_recipe():
    config, _ = resolve({"task": "mine.py:Game", "method": "sampo"})
    assert (config.clip_low, config.clip_high, config.delta, config.group_size) == (0.03, 0.04, 0.03, 8)
    config, _ = resolve({"task": "mine.py:Game", "method": "sampo", "model": "some/model"})
    assert (config.clip_low, config.clip_high, config.delta) == (3e-3, 4e-3, 3e-3)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_resolves(method):
    config, _ = resolve({"method": method})
    for name, value in vars(METHODS[method]).items():
        assert getattr(config, name) == value


def test_a_function_is_given_the_numbers_it_names():
    config, _ = resolve({"method": "grpo", "clip_low": 0.1, "clip_high": 0.3})
    assert numbers_of(ppo_clip, config) == {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 0.0}
    assert numbers_of(sapo, config) == {"tau_pos": 1.0, "tau_neg": 1.05}
    assert set(numbers_of(gigpo, config)) == {"gamma", "omega", "std", "baseline", "penalty", "penalty_scope"}


def test_flags_take_both_spellings_and_booleans_can_be_switched_off():
    config = parse("--clip-low 0.1 --no_std --dynamic_sampling false --seq_mask".split())
    assert (config.clip_low, config.std, config.dynamic_sampling, config.seq_mask) == (0.1, False, False, True)
