"""The method as a point in four dimensions (the paper's Table 1), and the policy update that all methods share.

`python grpo.py` prints the table. A method says which loss aggregation, which clipping of the importance ratio
(with or without the sequence mask), whether groups are filtered, and which advantage; the numbers are in
recipes.py.
"""

import math
from dataclasses import dataclass, fields
from functools import partial

import numpy as np
import torch

from losses import aggregate, kl_penalty, sequence_mask
from policy import Pack, Row, make_packs, sampled_logprobs


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
    """Store old_logprobs and ref_logprobs [M] in each pack; returns the old policy's mean entropy of each turn [N].

    The packs are those of the update, so that the same kernels see the same shapes and the first ratio is 1.
    """
    total, count = torch.zeros(num_turns, dtype=torch.float64), torch.zeros(num_turns, dtype=torch.float64)
    for pack in packs:
        pack.old_logprobs, entropy = sampled_logprobs(model, pack, temperature, with_entropy=True)
        pack.ref_logprobs, _ = sampled_logprobs(reference, pack, temperature)
        total.index_add_(0, pack.sequence.cpu(), entropy.double().cpu())
        count.index_add_(0, pack.sequence.cpu(), torch.ones(len(entropy), dtype=torch.float64))
    return (total / count).numpy()


def policy_loss(
    logprobs,
    entropy,
    pack: Pack,
    surrogate,
    reduce,
    *,
    delta: float | None,
    kl_coef: float,
    kl_estimator: str,
    entropy_coef: float,
):
    """Loss of one micro-batch and its sums for the log.

        loss = reduce(keep * surrogate) + kl_coef * reduce(kl) - entropy_coef * reduce(entropy)

    surrogate(logprobs, old_logprobs, advantages, sequence) -> losses [M], stats. reduce(losses, sequence) ->
    scalar, with the denominators of the optimizer batch. delta None is no sequence mask; the KL and entropy terms
    know no mask.
    """
    batch = (logprobs, pack.old_logprobs, pack.advantages, pack.sequence)
    losses, stats = surrogate(*batch)
    masked = torch.zeros((), dtype=torch.int64)
    if delta is not None:
        keep = sequence_mask(*batch, delta=delta)
        losses, masked = torch.where(keep, losses, 0.0), (~keep).sum()
    kl = kl_penalty(logprobs, pack.ref_logprobs, kl_estimator)
    loss = reduce(losses, pack.sequence) + kl_coef * reduce(kl, pack.sequence)
    if entropy_coef:
        loss = loss - entropy_coef * reduce(entropy, pack.sequence)
    drift = (pack.old_logprobs - logprobs).detach()
    sums = {
        "kl_ref": kl_penalty(logprobs, pack.ref_logprobs, "k3").detach().sum(),
        "kl_old": drift.sum(),
        "clip_frac_low": stats["clipped_low"].sum(),
        "clip_frac_high": stats["clipped_high"].sum(),
        "masked_frac": masked,
    }
    return loss, sums


def update_policy(
    model,
    optimizer,
    mini_batches: list[list[Pack]],
    surrogate,
    *,
    aggregation: str,
    max_response_tokens: int,
    temperature: float,
    epochs: int,
    grad_clip: float,
    backward=torch.Tensor.backward,
    **terms,
) -> dict[str, float]:
    """One rollout's updates: an optimizer step for each mini-batch in each epoch. Returns means over them for the log.

    Gradients add up over the micro-batches of a mini-batch with its global denominators, and are clipped once. A
    step with a non-finite gradient is skipped and counted. `terms` are the numbers of `policy_loss`.
    """
    log = {"loss": [], "grad_norm": [], "skipped_updates": 0}
    sums, tokens = {}, 0
    for _ in range(epochs):
        for packs in mini_batches:
            num_tokens = sum(len(pack.tokens) for pack in packs)
            num_sequences = sum(len(pack.sequence.unique()) for pack in packs)
            reduce = partial(
                aggregate,
                mode=aggregation,
                num_tokens=num_tokens,
                num_sequences=num_sequences,
                max_length=max_response_tokens,
            )
            loss_value = 0.0
            for pack in packs:
                logprobs, entropy = sampled_logprobs(model, pack, temperature, bool(terms["entropy_coef"]))
                loss, micro = policy_loss(logprobs, entropy, pack, surrogate, reduce, **terms)
                backward(loss)
                loss_value += loss.item()
                for name, value in micro.items():
                    sums[name] = sums.get(name, 0.0) + value.item()
            grad_norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip))
            if math.isfinite(grad_norm):
                optimizer.step()
                log["grad_norm"].append(grad_norm)
                log["loss"].append(loss_value)
            else:
                log["skipped_updates"] += 1
            optimizer.zero_grad(set_to_none=True)
            tokens += num_tokens
    metrics = {name: total / tokens for name, total in sums.items()}
    metrics["clip_frac"] = metrics["clip_frac_low"] + metrics["clip_frac_high"]
    for name in ("loss", "grad_norm"):
        metrics[name] = float(np.mean(log[name])) if log[name] else float("nan")
    return metrics | {"updates": len(log["loss"]), "skipped_updates": log["skipped_updates"]}


def print_table() -> None:
    """Table 1: every method with its place in each dimension."""
    names = [field.name for field in fields(Method)]
    rows = [["method", *names]] + [[name, *(str(getattr(m, f)) for f in names)] for name, m in METHODS.items()]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    print_table()
