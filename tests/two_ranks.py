"""What the tests run in two processes, as `launch` starts it: `two_ranks.py ddp|fsdp update|train ...`.

Accelerate drops FSDP where there is no GPU. Here, and here alone, FSDP2 is brought into force by hand on the CPU,
through accelerate's private state.
"""

import os
import subprocess
import sys
from copy import deepcopy
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import grpo  # noqa: E402
import ranks  # noqa: E402
from engines import whole  # noqa: E402
from losses import AGGREGATIONS, SURROGATES  # noqa: E402
from policy import Row, make_packs  # noqa: E402
from tiny import tiny_model  # noqa: E402


def launch(kind: str, *arguments, processes: int = 2, stderr=None) -> subprocess.Popen:
    """This file in two processes, each on one thread, under torch's launcher."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command += [str(Path(__file__)), kind, *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=stderr)


def sharded(**arguments) -> Accelerator:
    """An Accelerator with FSDP2 in force on the CPU."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
        activation_checkpointing=True,
    )
    accelerator = Accelerator(fsdp_plugin=plugin, **arguments)
    if accelerator.mixed_precision == "bf16":
        plugin.set_mixed_precision("bf16")
    for state in (PartialState, AcceleratorState):
        state._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    return accelerator


def batch_of(count: int) -> list[Row]:
    """Rows of 20 to 22 tokens, responses of 1 to 7 among them."""
    rng, rows = np.random.default_rng(count), []
    for i in range(count):
        response = 1 + 5 * i % 7
        prompt = 20 + i % 3 - response
        ids = rng.integers(2, 40, prompt + response).tolist()
        rows.append(Row(ids, list(range(prompt, prompt + response)), [i] * response, [-1.0] * response))
    return rows


class Recorder(torch.optim.SGD):
    """SGD that keeps the first gradient it takes."""

    def step(self):
        if not hasattr(self, "first"):
            self.first = [whole(p.grad).clone() for group in self.param_groups for p in group["params"]]
        super().step()


def update(model, rows: list[Row], splits: int, aggregation: str, backward) -> dict:
    """Three SGD steps on all rows in that many micro-batches: first gradient, norm and loss, parameters at the end."""
    budget = next(n for n in range(4, 10**4) if len(make_packs(rows, n, 0)) == splits)
    batches = grpo.make_mini_batches(rows, len(rows), budget, 0, np.random.default_rng(0))
    for pack in batches[0]:
        wave = pack.sequence.float()
        pack.advantages, pack.old_logprobs = torch.cos(wave), -1.5 + 0.3 * torch.sin(wave)
        pack.ref_logprobs, pack.entropy = pack.old_logprobs - 0.3, torch.ones_like(wave)
    numbers = {"max_response_tokens": 9, "seq_mask": False, "delta": 0.1, "kl_coef": 0.3, "kl_estimator": "k3"}
    numbers |= {"entropy_coef": 0.01, "entropy_threshold": 0.5, "rollout_is_cap": 0.0}
    surrogate = partial(SURROGATES["ppo_clip"], clip_low=1e6, clip_high=1e6)
    loss = partial(grpo.policy_loss, surrogate, aggregation=aggregation, **numbers)
    optimizer = Recorder(model.parameters(), lr=0.05)
    settings = {"temperature": 1.0, "epochs": 3, "grad_clip": 1e9, "entropy_coef": 0.01, "backward": backward}
    metrics = grpo.update_policy(model, optimizer, batches, loss, **settings)
    after = [whole(p).detach().clone() for p in model.parameters()]
    return {"gradient": optimizer.first, "after": after, "norm": metrics["grad_norm"], "loss": metrics["loss"]}


CASES = [(mode, 29, splits) for mode in AGGREGATIONS for splits in (1, 2, 7)]  # rows, and micro-batches of a rank
CASES += [("token-mean", 1, 1)]  # one rank has no row


def updates(cases=CASES, prepare=lambda *both: both, backward=torch.Tensor.backward) -> dict:
    """The results of `update` by case, each from the same parameters."""
    torch.manual_seed(0)
    model = tiny_model(40, 64, 2, 1, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    model, _ = prepare(model, torch.optim.SGD(model.parameters()))  # FSDP2 takes no model without an optimizer
    results = {}
    start = deepcopy([p.detach() for p in model.parameters()])
    for mode, rows, splits in cases:
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), start, strict=True):
                parameter.copy_(value)
        results[mode, rows, splits] = update(model, batch_of(rows), splits, mode, backward)
    return results


def main(kind: str, job: str, *arguments: str) -> None:
    """Compute `updates` into a file, with a local denominator if asked; or train.py with these flags."""
    if kind == "fsdp":
        os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    make = sharded if kind == "fsdp" else Accelerator
    if job == "train":
        import train

        ranks.Accelerator = make
        train.main(list(arguments))
        return
    torch.set_num_threads(1)
    accelerator = make(cpu=True)
    cases = CASES
    if arguments[1:] == ("local",):
        grpo.add_up, cases = lambda tensor: tensor, CASES[:-1]
    results = updates(cases, accelerator.prepare, accelerator.backward)
    if accelerator.is_main_process:
        torch.save(results, arguments[0])
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
