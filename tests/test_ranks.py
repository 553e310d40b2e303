"""Several processes: the update is that of one, a dead rank ends the run, and a resumed run is the run."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from accelerate.utils import DistributedType
from safetensors.torch import load_file

import eval as evaluation
import ranks
from checkpoint import Progress, where_to_go_on, write_json
from envs.sokoban import Sokoban
from losses import AGGREGATIONS
from plots import read_metrics
from tests.two_ranks import ROOT, launch, updates
from tiny import tiny_model, tiny_tokenizer

SMALL = "--method gigpo --steps 4 --eval_every 2 --eval_levels 6 --groups_per_step 2 --group_size 3 --max_minutes 0"
SMALL = [*SMALL.split(), *"--sft_episodes 60 --sft_steps 40 --tokens_per_micro_batch 256".split()]


def relative(values, expected) -> float:
    """Size of the difference of two lists of tensors, as a share of the second's."""
    difference = sum((a - b).square().sum() for a, b in zip(values, expected, strict=True))
    return float((difference / sum(b.square().sum() for b in expected)).sqrt())


def finish(process, seconds=600):
    assert process.wait(timeout=seconds) == 0


@pytest.fixture(scope="module")
def alone():
    return updates()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_update_of_two_ranks_is_that_of_one(kind, alone, tmp_path):
    """Every aggregation, 1, 2 and 7 micro-batches, unequal rows, a rank without a row; three steps of SGD."""
    finish(launch(kind, "update", tmp_path / "results"))
    results = torch.load(tmp_path / "results")
    assert results.keys() == alone.keys() and {mode for mode, *_ in results} == {*AGGREGATIONS}
    for case, expected in alone.items():
        assert relative(results[case]["gradient"], expected["gradient"]) < 1e-5, case
        assert relative(results[case]["after"], expected["after"]) < 1e-5, case
        assert results[case]["norm"] == pytest.approx(expected["norm"], rel=1e-5), case
        assert results[case]["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6), case
    for mode in AGGREGATIONS:  # one process cuts alike
        assert relative(alone[mode, 29, 7]["gradient"], alone[mode, 29, 1]["gradient"]) < 1e-5


@pytest.mark.slow
def test_a_denominator_of_one_rank_alone_is_noticed(alone, tmp_path):
    finish(launch("ddp", "update", tmp_path / "results", "local"))
    results = torch.load(tmp_path / "results")
    for case, result in results.items():
        assert relative(result["gradient"], alone[case]["gradient"]) > 0.1, case


def repeatable(folder) -> list[dict]:
    """Every line of a run's metrics without wall times and rates."""
    lines = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in line.items() if not k.startswith(("seconds/", "rate/"))} for line in lines]


def close(lines, expected, rel) -> None:
    """Assert that two runs have the same metrics."""
    assert len(lines) == len(expected)
    for line, other in zip(lines, expected, strict=True):
        assert line.keys() == other.keys()
        for name, value in other.items():
            assert line[name] == (pytest.approx(value, rel=rel, abs=rel) if value is not None else None), name


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def whole_run(request, tmp_path_factory):
    """(kind, folder) of a run of two ranks that nothing interrupted."""
    output = tmp_path_factory.mktemp(request.param)
    finish(launch(request.param, "train", *SMALL, "--output", output, "--name", "run"))
    return request.param, output / "run"


@pytest.mark.slow
def test_two_ranks_train_like_one(whole_run, tmp_path):
    """Until rounding makes a sampled token another one: two steps here, which take updates."""
    kind, folder = whole_run
    command = [sys.executable, "train.py", *SMALL, "--output", tmp_path, "--name", "run", "--steps", "2"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    lines, alone = repeatable(folder)[:3], repeatable(tmp_path / "run")
    assert sum(line["updates"] for line in alone[1:]) >= 2
    for line in lines + alone:
        line.pop("padding", None)  # the rows are cut in two; step 0 has none
    close(lines, alone, 2e-4)
    report = json.loads((folder / "results.json").read_text())["results"]
    expected = json.loads((tmp_path / "run" / "results.json").read_text())["results"]
    for policy in expected.keys() - {"after RL"}:
        assert report[policy] == expected[policy]
    assert {path.name for path in folder.iterdir()} == {path.name for path in (tmp_path / "run").iterdir()}


@pytest.mark.slow
def test_kill_9_of_one_rank_ends_the_run_and_of_all_loses_nothing(whole_run, tmp_path):
    kind, whole = whole_run
    flags = ["train", *SMALL, "--output", tmp_path, "--name", "run", "--save_every", "1"]
    checkpoints = tmp_path / "run" / "checkpoints"

    def ranks_once(step, *more):
        process = launch(kind, *flags, *more, stderr=subprocess.PIPE)
        while not (checkpoints / f"step-{step}" / "complete").exists():
            assert process.poll() is None
            time.sleep(0.05)
        return process, psutil.Process(process.pid).children()

    process, children = ranks_once(1)
    children[1].kill()
    began = time.time()
    assert process.wait(timeout=60) != 0
    assert not any(child.is_running() for child in children)
    print(f"{kind}: ended {time.time() - began:.1f} s after one rank was killed")
    process, children = ranks_once(3, "--resume")
    for each in (process, *children):
        each.kill()
    finish(launch(kind, *flags, "--resume"))
    close(repeatable(tmp_path / "run"), repeatable(whole), 1e-6)
    parameters, expected = (load_file(path / "model" / "model.safetensors") for path in (tmp_path / "run", whole))
    assert all(torch.allclose(parameters[name], expected[name], rtol=0, atol=1e-6) for name in expected)


@pytest.mark.slow
def test_sigterm_to_one_rank_stops_all_behind_the_step_and_saves(tmp_path):
    flags = ["train", *SMALL, "--steps", "50", "--output", tmp_path, "--name", "run", "--save_every", "50"]
    process = launch("ddp", *flags, stderr=subprocess.PIPE)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 2:
        assert process.poll() is None
        time.sleep(0.05)
    psutil.Process(process.pid).children()[1].send_signal(signal.SIGTERM)
    said = process.communicate(timeout=120)[1].decode()
    step = len(read_metrics(metrics)) - 1  # step 0 has a line too
    assert process.returncode != 0 and f"stopped at step {step} of 50: signal 15" in said
    assert 0 < step < 50 and (tmp_path / "run" / "checkpoints" / f"step-{step}" / "complete").exists()
    finish(launch("ddp", *flags, "--resume", "--steps", str(step + 1)))
    assert len(read_metrics(metrics)) == step + 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks_compute_in_bf16_and_keep_parameters_in_float32(kind, tmp_path, monkeypatch):
    """A model of a folder, as the built-in one takes no mixed precision; RoPE's buffers are not rounded."""
    folder, tokenizer = tmp_path / "model", tiny_tokenizer(Sokoban().words())
    tiny_model(len(tokenizer), 64, 2, tokenizer.eos_token_id, tokenizer.pad_token_id).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    flags = [*SMALL, "--model", folder, "--recipe", "tiny", "--output", tmp_path, "--name", "run"]
    process = launch(kind, "train", *flags, stderr=subprocess.PIPE)
    said = process.communicate(timeout=600)[1].decode()
    assert process.returncode == 0, said[-3000:]
    assert f"2 processes{' with FSDP' * (kind == 'fsdp')} in bf16, cpu" in said
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")[1:]
    assert len(lines) == 4 and any(line["updates"] for line in lines)
    assert all(0 < line["gap/mean"] < 0.1 for line in lines if line["gap/mean"] is not None)  # 0 would be float32
    weights = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert any((value != value.bfloat16()).any() for value in weights.values())  # not rounded on the way


def test_a_checkpoint_in_shards_is_not_evaluated_as_it_is(tmp_path, capsys):
    folder = tmp_path / "run"
    (folder / "checkpoints" / "step-3").mkdir(parents=True)
    write_json(folder / "config.json", {"method": "sampo"})
    write_json(folder / "checkpoints" / "step-3" / "complete", {})
    with pytest.raises(SystemExit) as stop:
        evaluation.main(["--run", str(folder), "--checkpoint", "3"])
    assert stop.value.code == 2 and "--checkpoint 3: it is in shards; merge them first" in capsys.readouterr().err


def test_a_checkpoint_of_another_launch_is_refused(tmp_path):
    folder = tmp_path / "checkpoints" / "step-3"
    folder.mkdir(parents=True)
    write_json(folder / "progress.json", {"step": 3, "launched": "2 processes with FSDP"})
    write_json(folder / "complete", {"progress.json": (folder / "progress.json").stat().st_size})
    assert where_to_go_on(tmp_path, True, 9, "2 processes with FSDP")[0] == folder
    with pytest.raises(ValueError, match="saved by 2 processes with FSDP, this is 1 process; allowed is the same"):
        where_to_go_on(tmp_path, True, 9, "1 process")
    assert where_to_go_on(tmp_path, False, 9, "1 process") == (None, Progress(launched="1 process"))


def test_fsdp_that_accelerate_drops_is_refused(tmp_path):
    command = [sys.executable, "train.py", "--output", tmp_path, "--steps", "0"]
    said = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"ACCELERATE_USE_FSDP": "true"}, capture_output=True, text=True
    )
    assert said.returncode == 2 and "asked for are 1 processes with FSDP, in force are 1 of kind NO" in said.stderr
    assert not (tmp_path / "sokoban-sampo-seed0").exists()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps 2 of accelerate: allowed is 1"),
        ({"mixed_precision": "fp16"}, "mixed_precision fp16 of accelerate: allowed are no and bf16"),
        ({"distributed_type": DistributedType.DEEPSPEED}, "DEEPSPEED of accelerate: allowed are DDP and FSDP"),
        ({"distributed_type": DistributedType.FSDP}, "FSDP of accelerate: allowed are DDP and FSDP of version 2"),
        ({"num_processes": 3}, "asked for are 1 processes, in force are 3 of kind NO"),
    ],
)
def test_what_a_launcher_may_not_set(monkeypatch, tmp_path, change, message):
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=1))
    alone = {"gradient_accumulation_steps": 1, "mixed_precision": "no", "num_processes": 1, "state": state}
    launcher = alone | {"distributed_type": DistributedType.NO} | change
    monkeypatch.setattr(ranks, "Accelerator", lambda **arguments: SimpleNamespace(**launcher))
    with pytest.raises(ValueError, match=message):
        ranks.make_accelerator("", "", tmp_path, 2)


def test_lists_are_shared_in_order_and_balanced_by_length(monkeypatch):
    parts = []
    for rank in range(3):
        monkeypatch.setattr(ranks, "place", lambda rank=rank: (rank, 3))
        parts.append(ranks.share(list(range(8))))
    assert sum(parts, []) == list(range(8)) and {len(part) for part in parts} == {2, 3}
    # longest first to the emptiest: 9 | 7 | 5 then 4 to the third (5), 3 to the second (7), 2 to the first of 9, 10, 9
    assert ranks.balance([2, 9, 5, 3, 7, 4]) == [[1, 0], [4, 3], [2, 5]]
