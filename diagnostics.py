"""Diagnostics of every step: what the paper explains collapse with (Section 4.1; Figures 2, 3 and 10).

Token sums are taken as the loss sees the tokens, at every update of a step, and `update_metrics` makes means of them.
The names are those of metrics.jsonl; README.md has a line on each.
"""

import numpy as np
import torch
from torch import Tensor

from losses import MAX_LOG_RATIO, kl_penalty, segment_mean
from ranks import add_up, gather

BAND = 0.2  # of Figure 3 (a, b): PPO's clip, whatever the clip of the method
PARTS = [f"{sign}_{side}_{mood}" for sign in ("neg", "pos") for side in ("down", "up") for mood in ("sure", "unsure")]


UPDATE_METRICS = (  # null at a step without an update
    *("loss", "grad_norm", "kl_ref", "kl_old", "kl_old_last", "clip_frac", "clip_frac_low", "clip_frac_high"),
    *("masked_frac", "outside_low", "outside_high", "staleness", "entropy", "padding"),
    *("gap/mean", "gap/max", "gap/k1", "gap/capped"),
    *(f"{name}/{part}" for name in ("share", "kl_share") for part in PARTS),
)
COLLAPSE_SIGNS = ("low_side", "format", "grad_norm")


def outside(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens beyond PPO's clip on the side where it would stop them, from below and from above (paper Fig. 3 a, b).

        low = advantages < 0 and ratio < 1 - BAND;    high = advantages > 0 and ratio > 1 + BAND

    ratio = exp(logprobs - old_logprobs) is the token's, also where the method's is the sequence's. All [M].
    """
    ratio = torch.exp((logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    return (advantages < 0) & (ratio < 1 - BAND), (advantages > 0) & (ratio > 1 + BAND)


def partition(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequence: Tensor, entropy: Tensor, threshold: float
) -> Tensor:
    """The part of each token's sequence, an index into PARTS (paper Fig. 3 c, d).

        part = 4 * (advantage > 0) + 2 * (ratio > 1) + (entropy > threshold)

    Advantage and entropy are means over the tokens of the sequence, its ratio is exp of the mean log-ratio. A ratio
    of exactly 1, as in the first update of a step, is `down`. All [M]; returns [M], int64.
    """
    positive = segment_mean(advantages, sequence) > 0
    up = segment_mean(logprobs - old_logprobs, sequence) > 0
    return 4 * positive + 2 * up + (segment_mean(entropy, sequence) > threshold)


@torch.no_grad()
def token_sums(
    logprobs: Tensor, pack, clipped: dict[str, Tensor], keep: Tensor, threshold: float
) -> dict[str, Tensor]:
    """Sums over the tokens of a micro-batch, to be added over those of a mini-batch: scalars, and [8] by part.

    `clipped` is what the surrogate reports, `keep` the sequence mask [M]. Masked tokens count as all others do.
    """
    kl = kl_penalty(logprobs, pack.ref_logprobs, "k3")
    low, high = outside(logprobs, pack.old_logprobs, pack.advantages)
    sequences = (logprobs, pack.old_logprobs, pack.advantages, pack.sequence)
    part = partition(*sequences, pack.entropy, threshold)
    empty = torch.zeros(len(PARTS), dtype=torch.float64, device=kl.device)
    return {
        "kl_ref": kl.sum(),
        "kl_old": (pack.old_logprobs - logprobs).sum(),
        "clip_frac_low": clipped["clipped_low"].sum(),
        "clip_frac_high": clipped["clipped_high"].sum(),
        "masked_frac": (~keep).sum(),
        "outside_low": low.sum(),
        "outside_high": high.sum(),
        "share": empty.index_add(0, part, torch.ones_like(kl, dtype=torch.float64)),
        "kl_share": empty.index_add(0, part, kl.double()),
    }


def update_metrics(sums: list[dict[str, Tensor]], tokens: list[int]) -> dict[str, float]:
    """Means over the tokens of a step's updates; sums[i] are the `token_sums` of update i over tokens[i] tokens.

        kl_share = KL to the reference in the part / KL to the reference;    all 0 while that KL is 0

    kl_old_last is kl_old at the last update alone, where the policy is `staleness` updates off the one that sampled.
    """
    total = {name: sum(update[name].double().cpu() for update in sums) for name in sums[0]}
    by_part = {"share": total.pop("share"), "kl_share": total.pop("kl_share")}
    metrics = {name: float(value) / sum(tokens) for name, value in total.items()}
    metrics["clip_frac"] = metrics["clip_frac_low"] + metrics["clip_frac_high"]
    metrics["kl_old_last"] = float(sums[-1]["kl_old"]) / tokens[-1]
    metrics["staleness"] = len(sums) - 1
    for name, values in by_part.items():
        shares = values / values.sum() if values.sum() > 0 else values
        metrics |= {f"{name}/{part}": float(share) for part, share in zip(PARTS, shares, strict=True)}
    return metrics


def engine_gap(packs: list, rollout_is_cap: float = 0.0) -> dict[str, float]:
    """How far the engine's log-probabilities are from the trainer's for the same tokens and the same weights.

    gap = rollout_logprobs - old_logprobs, nats a token;    mean of |gap|, max of |gap|, k1 = mean of gap

    capped is the share of tokens whose weight exp(-gap) is cut at rollout_is_cap, 0 where that is off.
    """
    gap = torch.cat([pack.rollout_logprobs - pack.old_logprobs for pack in packs]).double().tolist()
    gap = torch.tensor(gather(gap), dtype=torch.float64)  # [M], of all ranks
    capped = float((torch.exp(-gap) > rollout_is_cap).double().mean()) if rollout_is_cap else 0.0
    gaps = {"mean": gap.abs().mean(), "max": gap.abs().max(), "k1": gap.mean(), "capped": capped}
    return {f"gap/{name}": float(value) for name, value in gaps.items()}


def padding(packs: list) -> float:
    """Share of padding among the tokens that the model reads in these packs, over all ranks."""
    sizes = [(pack.attention_mask.numel(), int(pack.attention_mask.sum())) for pack in packs]
    read, own = add_up(torch.tensor(sizes).sum(0)).tolist()
    return 1 - own / read


def sampling_metrics(groups: list[list]) -> dict[str, float]:
    """Rates over all sampled groups of trajectories, before any filter, so that they are not biased by it."""
    groups = [[trajectory for trajectory in group if not trajectory.error] for group in groups]
    episodes = [trajectory for group in groups for trajectory in group]
    turns = [turn for trajectory in episodes for turn in trajectory.turns]
    wins = [np.mean([trajectory.success for trajectory in group]) for group in groups if group]
    said = [[tuple(turn.text for turn in trajectory.turns) for trajectory in group] for group in groups]
    return {
        "sampled_tokens": sum(len(turn.response_ids) for turn in turns),
        "train/success": float(np.mean([trajectory.success for trajectory in episodes])),
        "train/score": float(np.mean([trajectory.score for trajectory in episodes])),
        "train/reward": float(np.mean([trajectory.reward for trajectory in episodes])),
        "train/turns": float(np.mean([len(trajectory.turns) for trajectory in episodes])),
        "train/all_pass": float(np.mean([rate == 1 for rate in wins])),
        "train/all_fail": float(np.mean([rate == 0 for rate in wins])),
        "format_valid": float(np.mean([turn.valid for turn in turns])),
        "admissible": float(np.mean([turn.admissible for turn in turns if turn.valid] or [0.0])),
        "response_length": float(np.mean([len(turn.response_ids) for turn in turns])),
        "response_length_max": max(len(turn.response_ids) for turn in turns),
        "truncated": float(np.mean([trajectory.truncated for trajectory in episodes])),
        "notes": sum(bool(turn.note) for turn in turns),
        "duplicates": float(np.mean([1 - len(set(group)) / len(group) for group in said if group])),
        "episodes": len(episodes),
    }


def collapse_signs(history: list[dict]) -> dict[str, int]:
    """Which parts of the paper's signature of collapse (Section 4.1) the metrics of the steps so far end in: 1 or 0.

        low_side   outside_low > 0.04 and outside_low > 2 * outside_high
        format     format_valid < its best so far - 0.1
        grad_norm  grad_norm > 5 * its median over the steps before

    Each is the median of the last 3 steps that have it, fewer at the start, so that one odd step says nothing later
    on; format and grad_norm speak from step 6 on. The thresholds are ours: the paper shows curves.
    """

    def values(name: str) -> list[float]:
        return [step[name] for step in history if step.get(name) is not None and np.isfinite(step[name])]

    low, high = (np.median(values(name)[-3:] or [0.0]) for name in ("outside_low", "outside_high"))
    valid, norms = values("format_valid"), values("grad_norm")
    medians = [np.median(valid[i : i + 3]) for i in range(len(valid) - 2)]
    signs = {
        "low_side": low > 0.04 and low > 2 * high,
        "format": len(medians) > 3 and medians[-1] < max(medians[:-3]) - 0.1,
        "grad_norm": len(norms) > 5 and np.median(norms[-3:]) > 5 * np.median(norms[:-3]),
    }
    return {f"collapse/{sign}": int(signs[sign]) for sign in COLLAPSE_SIGNS}


def collapse_warning(history: list[dict]) -> str:
    """A line on the signs that the last step shows and the step before it did not, with their numbers; or nothing."""
    before, now = history[-2] if len(history) > 1 else {}, history[-1]
    new = [sign for sign in COLLAPSE_SIGNS if now[f"collapse/{sign}"] > before.get(f"collapse/{sign}", 0)]
    numbers = {
        "low_side": ("outside_low", "outside_high"),
        "format": ("format_valid",),
        "grad_norm": ("grad_norm",),
    }
    said = [f"{sign} ({', '.join(f'{name} {now[name]:.3g}' for name in numbers[sign])})" for sign in new]
    return f"step {now['step']}: signs of collapse: {', '.join(said)}" if said else ""
