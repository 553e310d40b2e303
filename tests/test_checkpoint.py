"""Checkpoints: kill -9 at any moment and go on to the same bits; what is half-written is never read."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

import checkpoint
import train
from checkpoint import Progress, newest, read_progress, save
from config import parse
from diagnostics import COLLAPSE_SIGNS
from plots import read_metrics
from records import read_records

ROOT = Path(train.__file__).parent
SMALL = "--steps 6 --eval_every 3 --eval_levels 6 --groups_per_step 2 --group_size 3 --sft_episodes 60 --sft_steps 15"
SMALL += " --max_minutes 0 --method gigpo"


def repeatable(folder):
    """Every line of a run's metrics without wall times and rates."""
    return [
        {name: value for name, value in metrics.items() if not name.startswith(("seconds/", "rate/"))}
        for metrics in read_metrics(folder / "metrics.jsonl")
    ]


def weights(folder):
    return (folder / "model" / "model.safetensors").read_bytes()


def start(output, *flags):
    """train.py in a process of its own, what it says in output/said."""
    command = [sys.executable, "train.py", *SMALL.split(), "--output", str(output), *flags]
    with open(output / "said", "w") as said:
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=said)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of six steps that nothing interrupted, with a checkpoint at every step."""
    output = tmp_path_factory.mktemp("whole")
    train.main([*SMALL.split(), "--output", str(output), "--save_every", "1"])
    folder = output / "sokoban-gigpo-seed0"
    assert sum(m["updates"] for m in read_metrics(folder / "metrics.jsonl")[1:]) >= 5  # moments to bring back
    return folder


def copy(whole, tmp_path):
    """A copy of the run, unfinished, that a test may spoil."""
    folder = tmp_path / whole.name
    shutil.copytree(whole, folder)
    (folder / "results.json").unlink()
    return folder


def test_a_resumed_run_ends_like_one_that_was_not_interrupted(whole, tmp_path):
    folder = copy(whole, tmp_path)
    shutil.rmtree(folder / "checkpoints" / "step-6")
    shutil.rmtree(folder / "model")
    train.main([*SMALL.split(), "--output", str(tmp_path), "--save_every", "1", "--resume"])
    assert repeatable(folder) == repeatable(whole) and weights(folder) == weights(whole)
    assert list(read_records(folder / "rollouts.jsonl.gz")) == list(read_records(whole / "rollouts.jsonl.gz"))
    first, second = (json.loads((path / "results.json").read_text())["results"] for path in (folder, whole))
    assert first == second


@pytest.mark.slow
def test_a_resumed_run_knows_the_steps_before_it(whole, tmp_path, monkeypatch):
    """The collapse monitor looks back; here it counts what it sees."""
    folder = copy(whole, tmp_path)
    shutil.rmtree(folder / "checkpoints" / "step-6")
    signs = dict.fromkeys((f"collapse/{sign}" for sign in COLLAPSE_SIGNS), 0)
    monkeypatch.setattr(train, "collapse_signs", lambda history: signs | {"collapse/format": len(history)})
    train.main([*SMALL.split(), "--output", str(tmp_path), "--save_every", "1", "--resume"])
    assert [m["collapse/format"] for m in read_metrics(folder / "metrics.jsonl")] == [0] * 6 + [7]


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_starts_anew_and_says_so(whole, tmp_path, capsys):
    folder = copy(whole, tmp_path)
    shutil.rmtree(folder / "checkpoints")
    flags = [*SMALL.split(), "--output", str(tmp_path), "--resume"]
    with pytest.raises(SystemExit):  # a run of six steps is not thrown away
        train.main(flags)
    assert "has steps but no complete checkpoint; allowed is --overwrite" in capsys.readouterr().err
    (folder / "metrics.jsonl").write_text("")
    (folder / "notes").write_text("of the run that was killed")
    train.main([*flags, "--steps", "0"])
    assert f"no complete checkpoint in {folder}: starting anew" in capsys.readouterr().err
    assert [m["step"] for m in read_metrics(folder / "metrics.jsonl")] == [0] and not (folder / "notes").exists()


def test_more_steps_go_on_from_where_a_finished_run_ended(whole, tmp_path, capsys):
    folder = tmp_path / whole.name
    shutil.copytree(whole, folder)
    flags = [*SMALL.split(), "--output", str(tmp_path), "--resume"]
    with pytest.raises(SystemExit) as stop:
        train.main(flags)
    assert stop.value.code == 2 and "is finished up to step 6; allowed is more" in capsys.readouterr().err
    train.main([*flags, "--steps", "7"])
    assert [m["step"] for m in read_metrics(folder / "metrics.jsonl")] == list(range(8))
    assert repeatable(folder)[:7] == repeatable(whole)
    steps = {record["step"] for record in read_records(folder / "rollouts.jsonl.gz")}
    assert steps == set(range(1, 8))


@pytest.mark.slow
def test_kill_9_at_five_moments_and_resume_gives_the_same_run(whole, tmp_path):
    """Case B44. One run killed while it clones, in a save, behind a save, in a step, and at a random time."""
    folder = tmp_path / whole.name
    checkpoints = folder / "checkpoints"

    def kill(process):
        process.kill()
        assert process.wait() == -signal.SIGKILL

    def partial():
        return any((checkpoints / f"step-{step}.partial").exists() for step in range(7))

    def wait_for(found, process):
        while not found():
            assert process.poll() is None, (tmp_path / "said").read_text()

    process = start(tmp_path, "--save_every", "1")
    wait_for((folder / "config.json").exists, process)
    kill(process)
    assert not checkpoints.exists()

    for _ in range(5):  # a save takes some hundredths of a second: another try where the kill came too late
        process = start(tmp_path, "--save_every", "1", "--resume")
        wait_for(partial, process)
        kill(process)
        if partial():
            break
    assert partial()

    def complete():
        return {f"step-{step}" for step in range(7) if (checkpoints / f"step-{step}" / "complete").exists()}

    process, before = start(tmp_path, "--save_every", "1", "--resume"), complete()
    wait_for(lambda: complete() - before, process)
    kill(process)

    def recorded():
        path = folder / "rollouts.jsonl.gz"
        return path.stat().st_size if path.exists() else 0

    process, before = start(tmp_path, "--save_every", "1", "--resume"), recorded()
    wait_for(lambda: recorded() > before, process)  # a step is done, and its line perhaps not yet written
    kill(process)

    process = start(tmp_path, "--save_every", "1", "--resume")
    time.sleep(6 + int.from_bytes(os.urandom(1)) / 128)
    process.kill()
    process.wait()

    process = start(tmp_path, "--save_every", "1", "--resume")
    if process.wait():  # the fifth kill may have come behind the end
        assert "is finished" in (tmp_path / "said").read_text()
    assert repeatable(folder) == repeatable(whole) and weights(folder) == weights(whole)
    assert list(read_records(folder / "rollouts.jsonl.gz")) == list(read_records(whole / "rollouts.jsonl.gz"))


@pytest.mark.slow
def test_sigterm_saves_and_exits_and_the_run_can_go_on(whole, tmp_path):
    folder = tmp_path / whole.name
    process = start(tmp_path, "--save_every", "100")
    while not (folder / "rollouts.jsonl.gz").exists():  # behind the first step
        assert process.poll() is None, (tmp_path / "said").read_text()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM and "signal 15" in (tmp_path / "said").read_text()
    assert read_progress(newest(folder)).step == len(read_metrics(folder / "metrics.jsonl")) - 1 < 6
    train.main([*SMALL.split(), "--output", str(tmp_path), "--save_every", "100", "--resume"])
    assert repeatable(folder) == repeatable(whole) and weights(folder) == weights(whole)


@pytest.mark.slow
def test_an_overwriting_run_can_be_resumed_and_so_can_a_copy_where_it_lies(whole, tmp_path):
    folder = copy(whole, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"overwrite": True}))
    shutil.rmtree(folder / "checkpoints" / "step-6")
    before = (whole / "metrics.jsonl").read_bytes()
    train.main([*SMALL.split(), "--output", str(tmp_path), "--save_every", "1", "--resume"])
    assert repeatable(folder) == repeatable(whole) and (whole / "metrics.jsonl").read_bytes() == before
    assert json.loads((folder / "config.json").read_text())["output"] == str(tmp_path)


def test_what_may_change_on_resume_changes_and_nothing_else(whole, tmp_path, capsys):
    copy(whole, tmp_path)
    flags = ["--output", str(tmp_path), "--method", "gigpo", "--resume"]
    free = {"steps": 9, "max_minutes": 3.0, "save_every": 7, "stop_on_collapse": True}
    config = parse([*flags, *(part for name, value in free.items() for part in (f"--{name}", str(value)))])
    assert {name: getattr(config, name) for name in free} == free
    for flag in ("--seed 1 --name sokoban-gigpo-seed0", "--eval_every 4", "--record_groups 5", "--group_size 4"):
        with pytest.raises(SystemExit):
            parse([*flags, *flag.split()])
        assert f"{flag.split()[0]} {flag.split()[1]}: the run has" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 3])  # an evaluation is due at step 3
def test_a_signal_in_any_step_ends_it_saves_and_changes_nothing_later(whole, tmp_path, monkeypatch, step):
    sample = train.sample_step

    def interrupted(run, at):
        if at == step:
            signal.raise_signal(signal.SIGTERM)
        return sample(run, at)

    monkeypatch.setattr(train, "sample_step", interrupted)
    flags = [*SMALL.split(), "--output", str(tmp_path), "--save_every", "4"]
    with pytest.raises(SystemExit) as stop:
        train.main(flags)
    folder = tmp_path / whole.name
    assert stop.value.code == 128 + signal.SIGTERM and read_progress(newest(folder)).step == step
    assert (folder / "curves.png").exists() and not (folder / "results.json").exists()
    monkeypatch.setattr(train, "sample_step", sample)
    train.main([*flags, "--resume"])
    assert repeatable(folder) == repeatable(whole) and weights(folder) == weights(whole)


@pytest.mark.slow
def test_a_signal_in_the_last_step_does_not_leave_an_old_result(whole, tmp_path, monkeypatch):
    sample = train.sample_step

    def interrupted(run, at):
        if at == 7:
            signal.raise_signal(signal.SIGTERM)
        return sample(run, at)

    folder = tmp_path / whole.name
    shutil.copytree(whole, folder)
    flags = [*SMALL.split(), "--output", str(tmp_path), "--resume", "--steps", "7"]  # evaluations every 3 steps
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(train, "sample_step", interrupted)
        train.main(flags)
    assert stop.value.code == 128 + signal.SIGTERM and "eval/success" in read_metrics(folder / "metrics.jsonl")[7]
    train.main(flags)  # nothing is left but the last evaluation
    results = json.loads((folder / "results.json").read_text())["results"]
    assert results["after RL"]["valid_seen"]["turns"] == read_metrics(folder / "metrics.jsonl")[7]["eval/turns"]


@pytest.mark.slow
def test_a_run_with_more_steps_that_is_killed_at_its_end_is_not_taken_for_finished(whole, tmp_path, monkeypatch):
    folder = tmp_path / whole.name
    shutil.copytree(whole, folder)
    flags = [*SMALL.split(), "--output", str(tmp_path), "--resume", "--steps", "7"]

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train, "plot_curves", interrupt)  # behind the last checkpoint
        train.main(flags)
    assert read_progress(newest(folder)).step == 7
    train.main(flags)
    assert "after RL" in json.loads((folder / "results.json").read_text())["results"]


@pytest.fixture
def saved(tmp_path):
    """An accelerator with a model and an optimizer that has moments, and checkpoints of steps 1 and 2 on disk."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(40, 50))
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.1))
    for step in (1, 2):
        model(torch.ones(3, 40)).sum().backward()
        optimizer.step()
        save(accelerator, tmp_path, Progress(step=step, position=10 * step))
    return accelerator, model, optimizer


def test_a_checkpoint_brings_back_parameters_moments_and_draws(saved, tmp_path):
    accelerator, model, optimizer = saved
    drawn, weight = torch.rand(3), model.weight.detach().clone()
    model(torch.ones(3, 40)).sum().backward()
    optimizer.step()
    accelerator.load_state(str(newest(tmp_path)))
    assert torch.equal(torch.rand(3), drawn) and torch.equal(model.weight, weight)
    state = optimizer.state[model.weight]
    assert state["step"] == 2 and state["exp_avg"].abs().sum() > 0
    assert read_progress(newest(tmp_path)) == Progress(step=2, position=20)


def test_the_two_newest_checkpoints_are_kept(saved, tmp_path):
    accelerator, *_ = saved
    for step in (9, 10):
        save(accelerator, tmp_path, Progress(step=step))
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-9", "step-10"}
    assert newest(tmp_path).name == "step-10"  # by number, not by letter


def test_a_copy_of_a_checkpoint_is_left_alone_and_a_spoilt_one_takes_no_place(saved, tmp_path):
    accelerator, *_ = saved
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(checkpoints / "step-2", checkpoints / "step-2-good")
    for step in (20, 30):  # of a run that went on from step 2: these two were cut
        shutil.copytree(checkpoints / "step-2", checkpoints / f"step-{step}")
        (checkpoints / f"step-{step}" / "complete").unlink()
    assert save(accelerator, tmp_path, Progress(step=15)).exists()
    assert {path.name for path in checkpoints.iterdir()} == {"step-2", "step-15", "step-2-good"}


@pytest.mark.parametrize("spoil", ["no mark", "empty mark", "cut file", "missing file", "temporary"])
def test_a_half_written_newest_checkpoint_is_skipped_with_a_message(saved, tmp_path, capsys, spoil):
    latest = tmp_path / "checkpoints" / "step-2"
    if spoil == "no mark":
        (latest / "complete").unlink()
    elif spoil == "empty mark":
        (latest / "complete").write_text("")
    elif spoil == "cut file":
        os.truncate(latest / "model.safetensors", 100)
    elif spoil == "missing file":
        (latest / "optimizer.bin").unlink()
    else:
        latest = latest.rename(latest.with_suffix(".partial"))
    assert newest(tmp_path).name == "step-1"
    said = capsys.readouterr().err
    assert str(latest) in said and "skipped" in said


def test_a_run_without_a_checkpoint_has_nothing_to_go_on_from(tmp_path):
    assert newest(tmp_path) is None


def test_a_disk_that_is_full_is_one_clear_error_and_the_checkpoints_before_stay(saved, tmp_path):
    """A limit on the size of a file stands for a full disk: the write itself fails, in the middle."""
    accelerator, *_ = saved
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for limit in (0, 500, 9_000):  # the first file, the model, the optimizer
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(OSError, match=r"step-3 could not be written: .*step-2 is intact"):
                save(accelerator, tmp_path, Progress(step=3))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert newest(tmp_path).name == "step-2"
        assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-1", "step-2"}
    signal.signal(signal.SIGXFSZ, before)
    accelerator.load_state(str(newest(tmp_path)))
    assert load_file(newest(tmp_path) / "model.safetensors").keys() == {"weight", "bias"}


def test_a_folder_that_cannot_be_written_is_one_line_without_traceback(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stop:
        train.main([*SMALL.split(), "--output", str(tmp_path / "file")])
    assert stop.value.code == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert str(tmp_path / "file") in said[-1] and not any("Traceback" in line for line in said)


def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_one_line(whole, tmp_path, capsys):
    folder = copy(whole, tmp_path)
    shutil.rmtree(folder / "checkpoints" / "step-6")
    (folder / "checkpoints" / "step-6.partial").write_text("in the way")  # neither folder nor removable by rmtree
    with pytest.raises(SystemExit) as stop:
        train.main([*SMALL.split(), "--output", str(tmp_path), "--save_every", "1", "--resume"])
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert stop.value.code == 1 and "step-6 could not be written" in last and "step-5 is intact" in last


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("--resume --overwrite", ["--resume --overwrite", "one of them"]),
        ("--resume --learning_rate 0.5", ["--learning_rate 0.5", "0.0003", "steps"]),
        ("--resume --method grpo --name sokoban-gigpo-seed0", ["--method grpo", "has gigpo"]),
        ("", ["exists", "--resume", "--overwrite"]),
        ("--save_every 0", ["--save_every 0", "1..1e6"]),
    ],
)
def test_wrong_invocations_on_a_folder_that_exists(whole, line, parts, capsys):
    before = (whole / "metrics.jsonl").read_bytes()
    with pytest.raises(SystemExit) as stop:
        train.main(["--output", str(whole.parent), "--method", "gigpo", *line.split()])
    assert stop.value.code == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said and all(part in said for part in parts), said
    assert (whole / "metrics.jsonl").read_bytes() == before


def test_without_flags_a_resumed_run_keeps_the_settings_it_was_started_with(whole, tmp_path, capsys):
    copy(whole, tmp_path)
    config = parse(["--output", str(tmp_path), "--name", whole.name, "--resume", "--steps", "9"])
    assert (config.method, config.group_size, config.eval_levels, config.steps) == ("gigpo", 3, 6, 9)
    with pytest.raises(SystemExit):
        parse(["--output", str(tmp_path), "--name", whole.name, "--resume", "--steps", "9", "--dry_run"])
    lines = {line.split()[0]: line.split(maxsplit=2)[1:] for line in capsys.readouterr().out.splitlines()}
    assert lines["group_size"] == ["3", "the run"] and lines["steps"] == ["9", "command line"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_acts_as_ever(number):
    before = signal.signal(number, signal.default_int_handler)  # a job in the background may start with it ignored
    try:
        with checkpoint.noted_signals() as noted:
            signal.raise_signal(number)
            assert noted == [number]
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
        assert signal.getsignal(number) == signal.default_int_handler
    finally:
        signal.signal(number, before)


def test_a_signal_that_was_ignored_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with checkpoint.noted_signals() as noted:
            signal.raise_signal(signal.SIGINT)
        assert noted == []
    finally:
        signal.signal(signal.SIGINT, before)
