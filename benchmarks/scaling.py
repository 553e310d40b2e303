"""How the update scales: padding, tokens, and ranks; needs two free cores.

    python benchmarks/scaling.py

Rows of 100 + 40 tokens on average, whose lengths vary by about half of their mean, and the update of grpo.py on a
model of 1.8 M parameters in float32, one thread a process, old log-probabilities included.
Ranks: one process and two under DDP take turns, each in a launch of its own on the same rows.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from accelerate import Accelerator

sys.path.insert(0, str(Path(__file__).parent.parent))

from diagnostics import padding  # noqa: E402
from grpo import add_old_logprobs, make_mini_batches, policy_loss, update_policy  # noqa: E402
from losses import gspo  # noqa: E402
from policy import Row, make_packs  # noqa: E402
from tiny import tiny_model  # noqa: E402

BUDGET = 4096  # tokens of a micro-batch
MINI_BATCH = 256  # rows of an optimizer step


def ragged_rows(count: int, prompt: int = 100, response: int = 40, variation: float = 0.72) -> list[Row]:
    """Rows whose prompts and responses have lengths of a log-normal law: variation is deviation / mean of either."""
    rng, spread, rows = np.random.default_rng(0), np.sqrt(np.log1p(variation**2)), []
    for i in range(count):
        noise = np.exp(spread * rng.standard_normal(2) - spread**2 / 2)
        before, sampled = (
            max(1, round(mean * factor)) for mean, factor in zip((prompt, response), noise, strict=True)
        )
        ids = rng.integers(2, 100, before + sampled).tolist()
        rows.append(Row(ids, list(range(before, before + sampled)), [i] * sampled, [-1.0] * sampled))
    return rows


def step(model, reference, optimizer, backward, rows: list[Row]) -> None:
    """What train.py does with the rows of a step."""
    batches = make_mini_batches(rows, MINI_BATCH, BUDGET, 0, np.random.default_rng(0))
    packs = sum(batches, [])
    add_old_logprobs(model, reference, packs, 1.0, len(rows))
    for pack in packs:
        pack.advantages = torch.cos(pack.sequence.float())
    numbers = {"max_response_tokens": 512, "seq_mask": False, "delta": 0.1, "kl_coef": 0.01, "kl_estimator": "k3"}
    numbers |= {"entropy_coef": 0.0, "entropy_threshold": 0.5, "rollout_is_cap": 0.0, "aggregation": "token-mean"}
    loss = partial(policy_loss, partial(gspo, clip_low=0.2, clip_high=0.2), **numbers)
    settings = {"temperature": 1.0, "epochs": 1, "grad_clip": 1.0, "entropy_coef": 0.0, "backward": backward}
    update_policy(model, optimizer, batches, loss, **settings)


def time_steps(sizes: list[int], repeats: int) -> None:
    """Print seconds of a step by number of rows, as one rank of however many were launched; the first one warms up."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model, reference = tiny_model(100, 256, 2, 1, 0), tiny_model(100, 256, 2, 1, 0).requires_grad_(False)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-5))
    seconds = {size: [] for size in sizes}
    for repeat in range(repeats + 1):
        for size, taken in seconds.items():
            rows = ragged_rows(size)
            accelerator.wait_for_everyone()
            began = time.perf_counter()
            step(model, reference, optimizer, accelerator.backward, rows)
            accelerator.wait_for_everyone()
            if repeat:
                taken.append(time.perf_counter() - began)
    accelerator.print(json.dumps({size: median(taken) for size, taken in seconds.items()}))
    accelerator.end_training()


def launch(processes: int, sizes: list[int], repeats: int) -> dict[int, float]:
    """`time_steps` in that many processes; seconds by number of rows."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command += [__file__, "--repeats", str(repeats), "--sizes", *map(str, sizes)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return {int(size): taken for size, taken in json.loads(said).items()}


def main() -> None:
    """Three tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.sizes:
        time_steps(args.sizes, args.repeats)
        return
    print("| rows | tokens of a micro-batch | length variation | padding, rows in order of length | in any order |")
    print("|---|---|---|---|---|")
    for count, budget in ((256, 4096), (256, 16384), (1024, 16384)):
        rows = ragged_rows(count)
        lengths = np.array([len(row.ids) for row in rows])
        blind = [max(part) * len(part) for part in np.array_split(lengths, round(lengths.sum() / budget) or 1)]
        share = padding(make_packs(rows, budget, 0))
        variation = lengths.std() / lengths.mean()
        print(f"| {count} | {budget} | {variation:.2f} | {share:.3f} | {1 - lengths.sum() / sum(blind):.3f} |")
    sizes = [128, 256, 512]
    tokens = [sum(len(row.ids) for row in ragged_rows(size)) for size in sizes]
    taken = list(launch(1, sizes, args.repeats).values())
    slope, start = np.polyfit(tokens, taken, 1)
    print("\n| rows | tokens | step, s | straight line through all three, s |\n|---|---|---|---|")
    for size, count, seconds in zip(sizes, tokens, taken, strict=True):
        print(f"| {size} | {count} | {seconds:.2f} | {start + slope * count:.2f} |")
    print(f"\n{1e6 * slope:.1f} s a million tokens, {start:.2f} s whatever their number")
    ratios = []
    for _ in range(args.repeats):
        alone, both = (launch(processes, [256], 2)[256] for processes in (1, 2))
        ratios.append(alone / both)
    listed = ", ".join(f"{ratio:.2f}" for ratio in sorted(ratios))
    print(f"\nTwo ranks / one, tokens/s: {median(ratios):.2f} ({listed})")


if __name__ == "__main__":
    main()
