"""The lab: what a study runs, from one cloned policy a seed; what is finished, failed or killed; bad flags."""

import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import lab
from config import Parser, resolve
from grpo import METHODS
from lab import STUDIES, main, read_seeds, run_name

ROOT = Path(lab.__file__).parent
# In train.py's place: notes its flags, writes what a run leaves, and fails where a file `fail-<name>` says so.
STAND_IN = """
import json, pathlib, sys
flags = dict(zip(sys.argv[2::2], sys.argv[3::2]))
flags.pop("--resume", None)
folder = pathlib.Path(flags["--output"], flags["--name"])
with open(folder.parent / "calls.jsonl", "a") as calls:
    calls.write(json.dumps(sys.argv[2:]) + "\\n")
if (folder.parent / f"fail-{folder.name}").exists():
    sys.exit("no room")
folder.mkdir()
(folder / "checkpoints").mkdir()
panel = dict.fromkeys("success success_low success_high score score_turn_weighted format_valid".split(), 0.53125)
results = {"after RL": {"valid_seen": panel, "valid_unseen": panel}}
(folder / "results.json").write_text(json.dumps({"results": results, "seconds": {"rollout": 1.5}}))
lines = [{"step": 0, "eval/success": 0.25}, {"step": 1, "train/success": 0.5, "episodes": 8, "grad_norm": None}]
(folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Calls the lab in a folder of its own, with the stand-in; run.calls() are the flags of every run so far."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stand_in.py").write_text(STAND_IN)

    def call(*argv):
        return main([*argv, "--launcher", f"{sys.executable} stand_in.py"])

    def calls(label="sokoban"):
        lines = (tmp_path / "runs" / "lab" / label / "calls.jsonl").read_text().splitlines()
        return [" ".join(json.loads(line)) for line in lines]

    call.calls = calls
    return call


def test_a_run_is_named_by_its_flags():
    assert run_name("--method sapo") == "sapo"
    assert run_name("--method sapo --kl_coef 0.05 --steps 40") == "sapo,kl_coef=0.05,steps=40"
    assert (
        run_name("--method sapo --steps 40 --kl_coef 0 --steps 9") == "sapo,steps=9,kl_coef=0"
    )  # the last one counts


def test_seeds_are_a_range_or_a_list():
    assert read_seeds("0-2") == [0, 1, 2] and read_seeds("3") == [3] and read_seeds("4,0") == [4, 0]
    for text in ("", "a", "2-0", "1,", "-1", "0-x"):
        with pytest.raises(ValueError, match="--seeds"):
            read_seeds(text)


@pytest.mark.parametrize("recipe", STUDIES)
@pytest.mark.parametrize("study", STUDIES["tiny"])
def test_every_variant_can_be_run_and_is_compared_with_one_of_its_study(study, recipe):
    variants = STUDIES[recipe][study]
    names = [run_name(variant) for variant in variants]
    assert len(set(names)) == len(names)
    settings = []
    for variant, base in variants.items():
        config, _ = resolve(Parser().read(["--recipe", recipe, *shlex.split(variant)]))
        assert base is None or base in variants and base != variant
        settings.append(config)
    assert len(set(settings)) == len(settings)  # no two are the same run under two names


def test_the_sweep_is_table_3_and_more():
    assert list(STUDIES["tiny"]["sweep"]) == [f"--method {m}" for m in METHODS if m != "sampo_released"]
    assert len(STUDIES["tiny"]["sweep"]) == 13


def test_studies_share_runs():
    tiny = STUDIES["tiny"]
    assert len(tiny["collapse"].keys() & tiny["stabilise"].keys()) == 4  # sapo, cispo, with the mask and without
    assert {"--method grpo"} == tiny["sweep"].keys() & tiny["staleness"].keys() & tiny["testbed"].keys()
    assert len(tiny["sweep"].keys() & tiny["filter"].keys()) == 4
    assert tiny["sweep"].keys() & tiny["grid"].keys() == {
        f"--method {m}" for m in "grpo sapo cispo gspo gigpo empg dapo".split()
    }


def test_the_testbed_adds_up():
    settings = [resolve(Parser().read(shlex.split(v)))[0] for v in STUDIES["tiny"]["testbed"]]
    parts = [(c.sft_steps > 0, c.penalty > 0, c.kl_coef > 0) for c in settings]
    assert parts == [(False, False, False), (True, False, False), (True, True, False), (True, True, True)]
    assert list(STUDIES["tiny"]["testbed"].values()) == [None, *list(STUDIES["tiny"]["testbed"])[:-1]]


def test_staleness_differs_in_updates_a_rollout_at_equal_episodes():
    settings = [resolve(Parser().read(shlex.split(v)))[0] for v in STUDIES["tiny"]["staleness"]]
    assert [c.groups_per_step for c in settings] == [8, 16, 32]
    assert {c.groups_per_step * c.steps for c in settings} == {1600}
    assert {c.groups_per_step * c.eval_every for c in settings} == {160}  # as many evaluations, too
    assert len({c.mini_batch for c in settings}) == 1


def test_a_study_clones_once_a_seed_starts_all_from_it_and_skips_what_is_finished(run, capsys):
    assert run("sweep", "--seeds", "0,2", "--methods", "grpo,gspo") == 0
    calls = run.calls()
    assert len(calls) == 6
    clones = [call for call in calls if "--name clone-" in call]
    assert len(clones) == 2 and all("--steps 0" in call and "--model" not in call for call in clones)
    for seed in (0, 2):
        own = [call for call in calls if call.endswith(f"-seed{seed} --resume") and "--name clone-" not in call]
        assert len(own) == 2
        for call in own:
            assert f"--model runs/lab/sokoban/clone-seed{seed}/reference --sft_steps 0 --method g" in call
            assert f"--seed {seed} " in call and "--recipe tiny" in call and "--max_minutes 0" in call
    assert not list(Path("runs").rglob("checkpoints"))
    assert "gspo, seed 2: " in capsys.readouterr().out
    assert run("sweep", "--seeds", "0-2", "--methods", "grpo,gspo") == 0
    assert len(run.calls()) == 9  # those of seed 1 alone
    summary = json.loads(Path("results/sokoban/gspo-seed2.json").read_text())
    assert (summary["flags"], summary["seed"], summary["seconds"]) == ("--method gspo", 2, {"rollout": 1.5})
    assert summary["results"]["after RL"]["valid_unseen"]["success"] == 0.5312  # to four digits
    assert summary["curves"]["eval/success"] == {"0": 0.25} and summary["curves"]["episodes"] == {"1": 8}
    assert summary["curves"]["grad_norm"] == {}


def test_a_failed_run_is_noted_the_rest_goes_on_and_it_is_tried_again(run):
    for folder in ("runs/lab/sokoban", "results"):
        Path(folder).mkdir(parents=True)
    fail = Path("runs/lab/sokoban/fail-sapo-seed0")
    fail.touch()
    assert run("sweep", "--seeds", "0", "--methods", "sapo,gspo,cispo", "--jobs", "1") == 1
    note = json.loads(Path("results/sokoban/sapo-seed0.json").read_text())
    assert note == {"flags": "--method sapo", "seed": 0, "failed": "exit code 1: no room"}
    assert len(list(Path("results/sokoban").glob("*.json"))) == 3
    fail.unlink()
    assert run("sweep", "--seeds", "0", "--methods", "sapo,gspo,cispo") == 0
    assert len(run.calls()) == 5 and "failed" not in Path("results/sokoban/sapo-seed0.json").read_text()


def test_without_a_cloned_policy_all_runs_of_that_seed_fail_and_other_seeds_go_on(run):
    Path("runs/lab/sokoban").mkdir(parents=True)
    Path("runs/lab/sokoban/fail-clone-seed0").touch()
    assert run("sweep", "--seeds", "0-1", "--methods", "sapo,gspo") == 1
    failed = {p.name: "failed" in json.loads(p.read_text()) for p in Path("results/sokoban").glob("*.json")}
    assert failed == {
        "sapo-seed0.json": True,
        "gspo-seed0.json": True,
        "sapo-seed1.json": False,
        "gspo-seed1.json": False,
    }


def test_a_variant_that_does_not_clone_starts_from_the_model_itself(run):
    assert run("testbed", "--seeds", "0") == 0
    uncloned = [call for call in run.calls() if "--sft_steps 0 --penalty 0" in call]
    assert len(uncloned) == 1 and "--model" not in uncloned[0]
    assert sum("--model runs/lab/sokoban/clone-seed0/reference" in call for call in run.calls()) == 3


def test_flags_of_the_user_go_to_every_run_and_belong_to_the_label(run, capsys):
    more = ("--task", "webshop", "--model", "some/model", "--groups_per_step", "8")
    assert run("collapse", "--seeds", "0", "--methods", "gspo,sapo", *more) == 0
    calls = run.calls("webshop")
    assert len(calls) == 3 and all(
        "--task webshop --model some/model --groups_per_step 8 --recipe paper" in call for call in calls
    )
    for call in calls[1:]:  # the later --model, that of the cloned policy, counts; what is hard is Table 6 as it is
        assert "--model runs/lab/webshop/clone-seed0/reference --sft_steps 0" in call.partition("some/model")[2]
        assert "--learning_rate" not in call
    assert run("stabilise", "--seeds", "0", *more, "--recipe", "tiny", "--label", "small") == 0
    assert all("--recipe tiny" in call for call in run.calls("small")) and "--learning_rate" in run.calls("small")[-1]
    with pytest.raises(SystemExit) as stopped:
        run("collapse", "--task", "webshop", "--model", "another/model")
    assert stopped.value.code == 2 and "some/model" in capsys.readouterr().err


def test_runs_of_an_earlier_call_that_still_go_are_waited_for(run, capsys):
    Path("runs/lab/sokoban").mkdir(parents=True)
    with open("runs/lab/sokoban/lock", "w") as lock, ThreadPoolExecutor() as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        later = pool.submit(run, "sweep", "--seeds", "0", "--methods", "grpo")
        time.sleep(1)
        assert not later.done() and not Path("runs/lab/sokoban/calls.jsonl").exists()
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert later.result(60) == 0 and len(run.calls()) == 2
    assert "waiting for them" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, said",
    [
        (["dance"], "invalid choice"),
        (["sweep", "--methods", "grpo,xpo"], "--methods xpo: allowed in sweep are grpo, "),
        (["sweep", "--method", "grpo"], "--method grpo: not allowed"),
        (["sweep", "--seed", "3"], "--seed 3: not allowed"),
        (["sweep", "--seeds", "x"], "--seeds x: allowed is"),
        (["sweep", "--jobs", "0"], "--jobs 0: allowed is"),
        (["sweep", "--omegga", "2"], "--omegga 2: no such flag; the nearest is --omega"),
        (["sweep", "--group_size", "1"], "--group_size 1: allowed is at least 2 with dynamic sampling"),
        (["report", "--omega", "2"], "--omega: allowed with a study"),
        (["report"], "results/sokoban is no folder of results"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_written(argv, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and said in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def start(folder, *argv):
    small = "--groups_per_step 2 --group_size 3 --sft_episodes 60 --sft_steps 15 --eval_levels 6 --steps 8"
    more = ["--save_every", "2", "--eval_every", "4", "--output", str(folder / "runs"), "--results", str(folder)]
    command = [sys.executable, "lab.py", "sweep", "--seeds", "0", "--methods", "gigpo,sampo", *small.split(), *more]
    with open(folder / "said", "a") as said:
        return subprocess.Popen([*command, *argv], cwd=ROOT, stdout=said, stderr=said, start_new_session=True)


@pytest.mark.slow
def test_a_lab_that_was_killed_goes_on_and_comes_to_the_same(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    assert start(whole).wait(300) == 0
    first = start(killed)
    metrics = killed / "runs/lab/sokoban/gigpo-seed0/metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") > 4):  # past the checkpoint of step 2
        assert first.poll() is None
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)  # the lab and its runs
    assert first.wait() and not (killed / "sokoban" / "gigpo-seed0.json").exists()
    second = start(killed)
    log = killed / "runs/lab/sokoban/gigpo-seed0.log"
    while "going on from" not in log.read_text():
        assert second.poll() is None
        time.sleep(0.05)
    second.kill()  # the lab alone: its runs go on
    second.wait()
    assert start(killed).wait(300) == 0, (killed / "said").read_text()
    for name in ("gigpo-seed0.json", "sampo-seed0.json"):
        one, other = (json.loads((folder / "sokoban" / name).read_text()) for folder in (whole, killed))
        assert one["curves"] == other["curves"] and one["results"] == other["results"]
    assert len(one["curves"]["train/success"]) == 8 and set(one["curves"]["eval/success"]) == {"0", "4", "8"}
