"""One GPU, ten minutes, no download: does training run at the size of a real model, how fast, in how much memory?

    bash benchmarks/gpu_smoke.sh           # Qwen3-1.7B's shape with random weights; report and logs in ./gpu_smoke
    bash benchmarks/gpu_smoke.sh --tiny    # the same stages, small, on a CPU in two minutes: the logic alone

The weights are random, so nothing is learned and no success rate means anything: times and bytes are what it is for.
Random weights never keep the response format. So the task (`Walk`) is Sokoban that makes a move out of a hash of
whatever was said: a random walk, which solves some of its easy levels, so that groups are mixed and updates happen.
And one token in a hundred ends a response, as the one end of a real tokenizer would hardly ever be drawn.

Stages, each a process under a time limit that appends what it finds to OUT/results.jsonl and writes OUT/report.md:

    make FOLDER             the model, from its configuration, and a word-level tokenizer, in Hugging Face layout
    update FOLDER           grpo.update_policy on rows of 1,000 + 100 tokens on average, by size of micro-batch
    train FOLDER -- FLAGS   train.py with these flags, in this process. Its checkpoints, which for 1.7 B parameters
                            are 21 GB each, are not written; everything else is.

MFU is the share of the GPU's dense bfloat16 peak that goes into 6 * (body * tokens read + head * tokens sampled) in
an update and 2 * in each of the forward passes before it; body are the parameters without the embedding, head is the
embedding, which is tied. Padding and attention scores are not counted, nor is what is computed twice.
"""

import argparse
import json
import os
import sys
import time
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from pathlib import Path
from statistics import median

import numpy as np
import torch
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))

import train  # noqa: E402
from config import numbers_of, resolve  # noqa: E402
from envs.sokoban import MOVES, Sokoban  # noqa: E402
from grpo import add_old_logprobs, policy_loss, update_policy  # noqa: E402
from losses import SURROGATES  # noqa: E402
from policy import Row, load_policy, make_packs  # noqa: E402
from ranks import launched, make_accelerator, place  # noqa: E402
from tiny import tiny_tokenizer  # noqa: E402

PEAK = {"H200": 989e12, "H100 80GB": 989e12, "A100": 312e12}  # dense bfloat16 flops a second, by a part of the name
QWEN3_1_7B = dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16)
QWEN3_1_7B |= dict(num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=40960)
SMALL = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
SMALL |= dict(num_key_value_heads=2, head_dim=32, vocab_size=1024, max_position_embeddings=4096)
STOP_EVERY = 100  # of the ids, one ends a response
WORK = {"weighing": 2, "update": 3}  # in forward passes: the policy's and the reference's; forward and backward
SECONDS = ("rollout", "weighing", "update", "sync")  # of a step, as far as training goes


class Walk(Sokoban):
    """Sokoban that plays a hash of the response, one in eight of which counts as malformed."""

    def parse(self, response: str) -> tuple[str | None, bool]:
        """A move, and True; or None and False."""
        byte = blake2b(response.encode(), digest_size=1).digest()[0]
        return (None, False) if byte < 32 else (list(MOVES)[byte % 4], True)


def make(folder: str, tiny: bool) -> dict:
    """Write a randomly initialised model, whose every id has a word, and say how large it is."""
    shape = SMALL if tiny else QWEN3_1_7B
    words = [*Sokoban(prompt_style="words", max_turns=15).words(), *(f"<{i}>" for i in range(shape["vocab_size"]))]
    surplus = len(tiny_tokenizer(words)) - shape["vocab_size"]
    tokenizer = tiny_tokenizer(words[:-surplus])
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    rope = {"rope_type": "default", "rope_theta": 1e6}
    config = Qwen3Config(**shape, **ends, rope_parameters=rope, tie_word_embeddings=True)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = list(range(tokenizer.eos_token_id, shape["vocab_size"], STOP_EVERY))
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"parameters": model.num_parameters(), "words": len(tokenizer)}


def where() -> dict:
    """Device and versions."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"device": name, "torch": torch.__version__}


def settle() -> None:
    """Wait for the GPU, so that a clock read next tells the truth."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_gib(reset: bool = False) -> float | None:
    """The most memory that tensors took since the last reset, GiB; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    gib = torch.cuda.max_memory_allocated() / 2**30
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return round(gib, 2)


def flops(folder: str, read: int, sampled: int) -> float:
    """Of a forward pass of the model over `read` tokens that scores `sampled` of them."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        parameters = Qwen3ForCausalLM(config).num_parameters()
    head = config.vocab_size * config.hidden_size
    return 2.0 * ((parameters - head) * read + head * sampled)


def mfu(work: float, seconds: float) -> float | None:
    """The share of the device's peak; None for a device without an entry in PEAK."""
    peak = next((peak for part, peak in PEAK.items() if part in where()["device"]), None)
    return round(work / seconds / peak, 4) if peak and seconds else None


def synthetic_rows(count: int, prompt: int, response: int, vocabulary: int) -> list[Row]:
    """Rows of random ids; lengths are uniform between half and one and a half of the means."""
    rng, rows = np.random.default_rng(0), []
    for i in range(count):
        before, sampled = (int(rng.integers(mean // 2, mean + mean // 2 + 1)) for mean in (prompt, response))
        ids = rng.integers(1, vocabulary, before + sampled).tolist()
        rows.append(Row(ids, list(range(before, before + sampled)), [i] * sampled))
    return rows


def update(folder: str, tiny: bool, note) -> None:
    """Time the forward passes and the update of one mini-batch, by size of micro-batch, until the memory is full."""
    accelerator = make_accelerator(folder, "", None, int(os.environ.get("WORLD_SIZE", 1)))
    c, _ = resolve({"method": "sampo", "model": folder, "recipe": "tiny", "learning_rate": 1e-6})
    model, tokenizer = load_policy(folder, [], 0, 0, "float32")
    dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
    reference = load_policy(folder, [], 0, 0, "float32")[0].to(accelerator.device, dtype).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=c.learning_rate, weight_decay=c.weight_decay)
    vocabulary = model.config.vocab_size
    model, optimizer = accelerator.prepare(model, optimizer)
    count, prompt, response, sizes, repeats = (64, 1000, 100, (4096, 16384, 32768), 3)
    if tiny:
        count, prompt, response, sizes, repeats = (8, 100, 10, (256, 1024), 2)
    rows = synthetic_rows(count, prompt, response, vocabulary)
    read, sampled = sum(len(row.ids) for row in rows), sum(len(row.sampled) for row in rows)
    work = flops(folder, read, sampled)
    surrogate = partial(SURROGATES[c.surrogate], **numbers_of(SURROGATES[c.surrogate], c))
    loss = partial(policy_loss, surrogate, **numbers_of(policy_loss, c))
    for size in sizes:
        found = {"micro_batch": size, "rows": count, "read": read, "sampled": sampled, "how": launched(accelerator)}
        try:
            packs = make_packs(rows, size, tokenizer.pad_token_id, accelerator.device)
            weighing, updating, norms = [], [], []
            for repeat in range(repeats + 1):  # the first one warms up
                peak_gib(reset=True)
                began = time.perf_counter()
                add_old_logprobs(model, reference, packs, c.temperature, len(rows))
                settle()
                weighed = time.perf_counter()
                for pack in packs:
                    pack.advantages = torch.where(pack.sequence % 2 == 0, 1.0, -1.0)
                settings = numbers_of(update_policy, c) | {"backward": accelerator.backward}
                metrics = update_policy(model, optimizer, [packs], loss, **settings)
                settle()
                if metrics["updates"] != 1:
                    raise RuntimeError(f"no update, {metrics['skipped_updates']} skipped")
                if repeat:
                    weighing.append(weighed - began)
                    updating.append(time.perf_counter() - weighed)
                    norms.append(metrics["grad_norm"])
            found |= {"weighing": median(weighing), "update": median(updating), "update_range": sorted(updating)}
            found |= {"packs": len(packs), "grad_norm": norms, "peak_gib": peak_gib()}
            found |= {"rate": read / found["update"]}
            found |= {f"mfu_{part}": mfu(times * work, found[part]) for part, times in WORK.items()}
        except torch.OutOfMemoryError as error:
            note(found | {"error": str(error).splitlines()[0]})
            break
        note(found)


def watch(peaks: dict, lengths: list):
    """Make train.py note the peak memory of each timed part, and the tokens it reads and has sampled, by step."""
    timed, cut = train.timed, train.make_mini_batches

    @contextmanager
    def watched(seconds: dict[str, float], part: str):
        settle()
        peak_gib(reset=True)
        with timed(seconds, part):
            yield
            settle()
        peaks[part] = max(peaks.get(part) or 0.0, peak_gib() or 0.0)

    def counted(rows: list[Row], *args):
        lengths.append((sum(len(row.ids) for row in rows), sum(len(row.sampled) for row in rows)))
        return cut(rows, *args)

    train.timed, train.make_mini_batches = watched, counted
    train.checkpoint.save = lambda *args: None


def run_training(folder: str, flags: list[str], note) -> None:
    """train.py with the flags; notes each step of its metrics.jsonl, memory and MFU. RuntimeError without updates."""
    peaks, lengths, steps = {}, [], []
    watch(peaks, lengths)
    config, began = train.parse(["--model", folder, *flags]), time.perf_counter()
    try:
        train.main(["--model", folder, *flags])
    finally:  # what was done before a failure counts too
        if (path := config.folder / "metrics.jsonl").exists():
            steps = [json.loads(line) for line in path.read_text().splitlines()][1:]
        for step, (read, sampled) in zip(steps, lengths, strict=False):
            work, seconds = flops(folder, read, sampled), {part: step[f"seconds/{part}"] for part in SECONDS}
            found = {"step": step["step"], "engine": config.engine, "read": read, "seconds": seconds}
            found |= {name: step[name] for name in ("updates", "tokens", "sampled_tokens", "groups_kept", "gap/mean")}
            found |= {name: step[name] for name in ("response_length", "grad_norm", "rate/rollout", "kl_ref")}
            found |= {f"mfu_{part}": mfu(times * work, seconds[part]) for part, times in WORK.items()}
            note(found)
        note({"engine": config.engine, "peak_gib": peaks, "whole": time.perf_counter() - began})
    if not any(step["updates"] for step in steps):
        raise RuntimeError("no step had an update")


def table(rows: list[dict], columns: dict) -> list[str]:
    """A markdown table; columns is {heading: value of a row}."""

    def cell(value) -> str:
        return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)

    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(cell(value(row)) for value in columns.values()) + " |" for row in rows]


def report(path: Path) -> str:
    """Everything in results.jsonl as markdown."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [f"{', '.join(f'{k} {v}' for k, v in item.items())}" for item in found if item["stage"] == "make"]
    updates = [item for item in found if item["stage"] == "update" and "update" in item]
    columns = {"run as": lambda r: r["how"], "micro-batch, tokens": lambda r: r["micro_batch"]}
    columns |= {f"{part}, s": lambda r, part=part: r[part] for part in WORK}
    columns |= {"tokens/s of the update": lambda r: round(r["rate"]), "MFU weighing": lambda r: r["mfu_weighing"]}
    columns |= {"MFU update": lambda r: r["mfu_update"], "peak, GiB": lambda r: r["peak_gib"]}
    lines += ["", "## Update of one mini-batch", "", *table(updates, columns)]
    steps = [item for item in found if item["stage"] == "train" and "step" in item]
    columns = {"engine": lambda r: r["engine"], "step": lambda r: r["step"], "updates": lambda r: r["updates"]}
    columns |= {"tokens read": lambda r: r["read"], "sampled": lambda r: r["sampled_tokens"]}
    columns |= {f"{part}, s": lambda r, part=part: r["seconds"][part] for part in SECONDS}
    columns |= {"sampled tokens/s": lambda r: round(r["rate/rollout"]), "MFU weighing": lambda r: r["mfu_weighing"]}
    columns |= {"MFU update": lambda r: r["mfu_update"], "gap": lambda r: r["gap/mean"]}
    lines += ["", "## Steps of train.py", "", *table(steps, columns)]
    for item in (item for item in found if item["stage"] == "train" and "whole" in item):
        peaks = ", ".join(f"{part} {gib:.3g}" for part, gib in item["peak_gib"].items() if gib)
        lines += ["", f"{item['engine']}: {item['whole']:.0f} s in all; peak by part, GiB: {peaks or 'not measured'}"]
    lines += ["", *(f"stopped: {item}" for item in found if "error" in item)]
    return "\n".join(lines)


def main() -> None:
    """One stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("make", "update", "train"))
    parser.add_argument("folder", help="of the model")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--tiny", action="store_true", help="a small shape")
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, flags = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]

    def note(found: dict) -> None:
        line = json.dumps({"stage": args.stage} | found | where())
        print(line, flush=True)
        if place()[0] == 0:
            with open(args.out / "results.jsonl", "a") as file:
                file.write(line + "\n")
            (args.out / "report.md").write_text(report(args.out / "results.jsonl") + "\n")

    if args.stage == "make":
        note(make(args.folder, args.tiny))
    elif args.stage == "update":
        update(args.folder, args.tiny, note)
    else:
        run_training(args.folder, flags, note)


if __name__ == "__main__":
    main()
