"""Several processes that train one model: what each plays and updates on, and what all of them have to agree on.

Every rank holds every trajectory of a step, so that filter, baselines, advantages and cuts into mini-batches are
computed alike everywhere; model and environments alone are shared out. With one process nothing here does anything.
"""

import os
from dataclasses import replace
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from torch import Tensor


def place() -> tuple[int, int]:
    """(rank, number of ranks) of this process."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


@cache
def _everyone():
    """All ranks, over gloo: what they agree on are numbers and objects, on the CPU even where the model is not."""
    return dist.new_group(backend="gloo", timeout=timedelta(hours=6))  # ranks wait for the longest rollout


def share(items: list) -> list:
    """This rank's part of a list: the parts are of like size, follow each other, and `gather` puts them together."""
    rank, ranks = place()
    return items[rank * len(items) // ranks : (rank + 1) * len(items) // ranks]


def gather(items: list) -> list:
    """The items of all ranks, in the order of the ranks."""
    rank, ranks = place()
    if ranks == 1:
        return items
    parts = [None] * ranks
    dist.all_gather_object(parts, items, _everyone())
    return [item for part in parts for item in part]


def add_up(tensor: Tensor) -> Tensor:
    """The sum of a tensor over all ranks, on the CPU of each."""
    total = tensor.detach().cpu().clone()
    if place()[1] > 1:
        dist.all_reduce(total, group=_everyone())
    return total


def balance(lengths: list[int]) -> list[list[int]]:
    """Indices of rows for each rank: the longest first, each to the rank with the fewest tokens so far."""
    shares, loads = [[] for _ in range(place()[1])], [0] * place()[1]
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        least = loads.index(min(loads))
        shares[least].append(i)
        loads[least] += lengths[i]
    return shares


def make_accelerator(model: str, log_with: str, folder, groups_per_step: int) -> Accelerator:
    """On the CPU for the built-in model. ValueError on what launcher or tracker would change in silence, or drop.

    Mixed precision, bf16 or none, is the launcher's setting; the built-in model takes none.
    """
    trackers = [str(tracker) for tracker in get_available_trackers()]
    if log_with and log_with not in trackers:
        raise ValueError(
            f"--log_with {log_with}: allowed are installed trackers, here {', '.join(trackers) or 'none'}"
        )
    accelerator = Accelerator(
        cpu=not model or not torch.cuda.is_available(),
        mixed_precision=None if model else "no",
        log_with=log_with or None,
        project_dir=folder,
    )
    accumulation, kind = accelerator.gradient_accumulation_steps, accelerator.distributed_type.value
    if accumulation > 1:
        raise ValueError(f"gradient_accumulation_steps {accumulation} of accelerate: allowed is 1; see --mini_batch")
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ValueError(f"mixed_precision {accelerator.mixed_precision} of accelerate: allowed are no and bf16")
    plugin = accelerator.state.fsdp_plugin if kind == "FSDP" else None
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP") or plugin and plugin.fsdp_version != 2:
        raise ValueError(f"{kind} of accelerate: allowed are DDP and FSDP of version 2, see fsdp.yaml")
    if plugin and accelerator.mixed_precision == "bf16":
        plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, reduce_dtype=torch.float32)
    asked = int(os.environ.get("WORLD_SIZE", 1)), os.environ.get("ACCELERATE_USE_FSDP") == "true"
    if asked != (accelerator.num_processes, kind == "FSDP"):
        raise ValueError(
            f"asked for are {asked[0]} processes{' with FSDP' * asked[1]}, in force are {accelerator.num_processes} "
            f"of kind {kind}: accelerate drops FSDP without a GPU"
        )
    if kind == "FSDP" and os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING") == "true":
        raise ValueError("fsdp_cpu_ram_efficient_loading true: allowed is false, as all ranks but one load zeros then")
    if groups_per_step % accelerator.num_processes:
        raise ValueError(f"--groups_per_step {groups_per_step}: allowed are multiples of {asked[0]}, the processes")
    return accelerator


def launched(accelerator: Accelerator) -> str:
    """How many processes there are, whether they share the parameters out, and the precision, in words."""
    count, sharded = accelerator.num_processes, accelerator.distributed_type.value == "FSDP"
    precision = {"no": "", "bf16": " in bf16"}[accelerator.mixed_precision]
    return f"{count} process{'es' * (count > 1)}{' with FSDP' * sharded}{precision}"
