"""The method as a point in four dimensions (the paper's Table 1), and the policy update that all methods share.

`python grpo.py` prints the table. A method says which loss aggregation, which clipping of the importance ratio
(with or without the sequence mask), whether groups are filtered, and which advantage; the numbers are in
recipes.py.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from diagnostics import token_sums, update_metrics
from losses import aggregate, kl_penalty, rollout_weights, sequence_mask
from policy import Pack, Row, make_packs, sampled_logprobs
from ranks import add_up, place


@dataclass(frozen=True)
class Method:
    aggregation: str = "token-mean"
    surrogate: str = "ppo_clip"
    seq_mask: bool = False
    dynamic_sampling: bool = False
    advantage: str = "grpo"


METHODS = {
    "grpo": Method(),
    "grpo_st": Method(aggregation="seq-mean-token-mean"),
    "grpo_sm": Method(seq_mask=True),
    "sapo": Method(surrogate="sapo"),
    "sapo_sm": Method(surrogate="sapo", seq_mask=True),
    "cispo": Method(surrogate="cispo"),
    "cispo_sm": Method(surrogate="cispo", seq_mask=True),
    "gspo": Method(surrogate="gspo"),
    "gigpo": Method(advantage="gigpo"),
    "empg": Method(advantage="empg"),
    "dapo": Method(dynamic_sampling=True),
    "dapo_gigpo": Method(dynamic_sampling=True, advantage="gigpo"),
    "sampo": Method(surrogate="gspo", dynamic_sampling=True, advantage="gigpo"),
    "sampo_released": Method("seq-mean-token-mean", surrogate="gspo", dynamic_sampling=True, advantage="gigpo"),
}


def make_mini_batches(
    rows: list[Row], mini_batch: int, tokens_per_micro_batch: int, pad: int, rng: np.random.Generator, device="cpu"
) -> list[list[Pack]]:
    """Shuffled rows in max(1, round(rows / mini_batch)) parts of like size, each packed into micro-batches once."""
    order = rng.permutation(len(rows))
    parts = np.array_split(order, max(1, round(len(rows) / mini_batch)))
    return [make_packs([rows[i] for i in part], tokens_per_micro_batch, pad, device) for part in parts]


@torch.no_grad()
def add_old_logprobs(model, reference, packs: list[Pack], temperature: float, num_turns: int) -> np.ndarray:
    """Store old_logprobs, ref_logprobs and entropy [M] in each pack; returns the mean entropy of each turn [N].

    The packs are those of the update, so that the same kernels see the same shapes and the first ratio is 1. A turn
    that is in none of them has the entropy NaN.
    """
    total, count = torch.zeros(num_turns, dtype=torch.float64), torch.zeros(num_turns, dtype=torch.float64)
    for pack in packs:
        pack.old_logprobs, pack.entropy = sampled_logprobs(model, pack, temperature, with_entropy=True)
        pack.ref_logprobs, _ = sampled_logprobs(reference, pack, temperature)
        total.index_add_(0, pack.sequence.cpu(), pack.entropy.double().cpu())
        count.index_add_(0, pack.sequence.cpu(), torch.ones(len(pack.entropy), dtype=torch.float64))
    return (add_up(total) / add_up(count)).numpy()


def add_advantages(packs: list[Pack], advantages: np.ndarray, sequence: np.ndarray | None = None) -> None:
    """Give every sampled token the advantage of its turn, advantages [N]; then it is of sequence[turn], if given [N].

    So one ratio may span all turns of a trajectory, while each turn keeps its own advantage.
    """
    for pack in packs:
        turn, device = pack.sequence.cpu().numpy(), pack.sequence.device  # [M]
        pack.advantages = torch.as_tensor(advantages[turn], dtype=torch.float32, device=device)
        if sequence is not None:
            pack.sequence = torch.as_tensor(sequence[turn], device=device)


def policy_loss(
    surrogate,
    logprobs: Tensor,
    entropy: Tensor | None,
    pack: Pack,
    num_tokens: int,
    num_sequences: int,
    *,
    aggregation: str,
    max_response_tokens: int,
    seq_mask: bool,
    delta: float,
    kl_coef: float,
    kl_estimator: str,
    entropy_coef: float,
    entropy_threshold: float,
    rollout_is_cap: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of a micro-batch of an optimizer batch of num_tokens and num_sequences; sums over its tokens for the log.

        loss = reduce(keep * weights * surrogate) + kl_coef * reduce(kl) - entropy_coef * reduce(entropy)

    reduce is `aggregate`, surrogate(logprobs, old_logprobs, advantages, sequence) -> losses [M], stats. keep is 1
    without seq_mask, weights are 1 without rollout_is_cap; the KL and entropy terms know neither. logprobs [M],
    entropy [M].
    """
    sizes = {"num_tokens": num_tokens, "num_sequences": num_sequences, "max_length": max_response_tokens}
    reduce = partial(aggregate, sequence=pack.sequence, mode=aggregation, **sizes)
    batch = (logprobs, pack.old_logprobs, pack.advantages, pack.sequence)
    losses, stats = surrogate(*batch)
    if rollout_is_cap:
        losses = losses * rollout_weights(pack.old_logprobs, pack.rollout_logprobs, rollout_is_cap)
    keep = sequence_mask(*batch, delta=delta) if seq_mask else torch.ones_like(pack.sequence, dtype=torch.bool)
    loss = reduce(torch.where(keep, losses, 0.0))
    loss = loss + kl_coef * reduce(kl_penalty(logprobs, pack.ref_logprobs, kl_estimator))
    if entropy_coef:
        loss = loss - entropy_coef * reduce(entropy)
    return loss, token_sums(logprobs, pack, stats, keep, entropy_threshold)


def update_policy(
    model,
    optimizer,
    mini_batches: list[list[Pack]],
    loss,
    *,
    temperature: float,
    epochs: int,
    grad_clip: float,
    entropy_coef: float,
    backward=torch.Tensor.backward,
) -> dict[str, float]:
    """One rollout's updates: an optimizer step for each mini-batch in each epoch. Returns means for the log.

    loss(logprobs, entropy, pack, num_tokens, num_sequences) -> scalar, sums is `policy_loss` with its numbers.
    Gradients add up over the micro-batches of a mini-batch and are clipped once. A step with a non-finite gradient is
    skipped and counted.
    """
    losses, norms, sums, tokens, skipped = [], [], [], [], 0
    for packs in mini_batches * epochs:
        sizes = [(len(pack.tokens), len(pack.sequence.unique())) for pack in packs]
        num_tokens, num_sequences = add_up(torch.tensor(sizes, device=packs[0].tokens.device).sum(0)).tolist()
        batch_sums = {}
        for pack in packs:
            alone = pack is not packs[-1]  # DDP adds gradients up over ranks behind the last one, once
            with model.no_sync() if alone and hasattr(model, "no_sync") else nullcontext():
                logprobs, entropy = sampled_logprobs(model, pack, temperature, bool(entropy_coef))
                value, micro = loss(logprobs, entropy, pack, num_tokens, num_sequences)
                backward(value * place()[1])  # undoes the mean over ranks
            micro["loss"] = value.detach().double()
            batch_sums = {name: batch_sums.get(name, 0.0) + term for name, term in micro.items()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if math.isfinite(norm):
            optimizer.step()
            norms.append(norm)
            sums.append({name: add_up(term) for name, term in batch_sums.items()})
            losses.append(float(sums[-1].pop("loss")))
            tokens.append(num_tokens)
        else:
            skipped += 1
        optimizer.zero_grad(set_to_none=True)
    means = {"loss": np.mean(losses or [np.nan]).item(), "grad_norm": np.mean(norms or [np.nan]).item()}
    seen = update_metrics(sums, tokens) if sums else {}
    return seen | means | {"updates": len(losses), "skipped_updates": skipped}


def print_table() -> None:
    """Table 1: every method with its place in each dimension."""
    names = [field.name for field in fields(Method)]
    rows = [["method", *names]] + [[name, *(str(getattr(m, f)) for f in names)] for name, m in METHODS.items()]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    print_table()
