"""Policy-gradient losses on flat sampled tokens: importance-sampling clipping and loss aggregation of ARLArena.

The batch is flat. `logprobs [M]`, `old_logprobs [M]` and `advantages [M]` hold one entry per sampled token,
`sequence [M]` (int64, 0..N-1) the sequence (turn) it belongs to. There is no prompt, no padding and no mask, so
nothing can leak in.

    surrogate(logprobs, old_logprobs, advantages, sequence, *, numbers) -> losses [M], stats
    aggregate(losses, sequence, mode, *, num_tokens, num_sequences, max_length) -> scalar

Losses are minimised; gradients flow through logprobs alone, all else is constant. Logarithms are natural. A
sequence never spans two calls; a batch may be cut anywhere between sequences, since the denominators of `aggregate`
are those of the whole optimizer batch. Paper: arXiv 2602.21534.
"""

import torch
from torch import Tensor

Stats = dict[str, Tensor]

# A larger log-ratio says nothing more, and its exp would overflow. The clamp comes before exp, so that the gradient
# stays finite too; beyond it the gradient is 0.
MAX_LOG_RATIO = 20.0


def _check(sequence: Tensor, *tokens: Tensor) -> None:
    """Raise ValueError unless `sequence` and every tensor of `tokens` have one shape [M] and `sequence` is int64."""
    shapes = [tuple(t.shape) for t in (*tokens, sequence)]
    if len(shapes[0]) != 1 or len(set(shapes)) != 1:
        raise ValueError(f"shapes {shapes}: allowed is one shape [M], sampled tokens only, for all")
    if sequence.dtype != torch.int64:
        raise ValueError(f"sequence has dtype {sequence.dtype}: allowed is torch.int64")


def _check_numbers(**limits: tuple[float, float, float]) -> None:
    """Raise ValueError unless low <= value <= high for every name=(value, low, high); NaN is refused."""
    for name, (value, low, high) in limits.items():
        if not low <= value <= high:
            raise ValueError(f"{name} {value}: allowed is {low} to {high}")


def segment_mean(values: Tensor, sequence: Tensor) -> Tensor:
    """Mean over the tokens of each sequence, given back to every token: values [M], sequence [M] -> [M]."""
    counts = torch.bincount(sequence)  # [N]
    sums = values.new_zeros(len(counts)).index_add(0, sequence, values)  # [N]
    return (sums / counts.clamp(min=1)).index_select(0, sequence)


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> tuple[Tensor, Stats]:
    """Token-level clipping of PPO and GRPO (paper Eq. 6, 15).

        ratio  = exp(logprobs - old_logprobs)
        losses = -min(ratio * advantages, clip(ratio, 1 - clip_low, 1 + clip_high) * advantages)

    dual_clip > 1 bounds the loss of a negative advantage by dual_clip * |advantages| (arXiv 1912.09729; not in the
    paper, on in its code); 0 is off. All tensors [M]; returns losses [M] and the tokens clipped from below and from
    above [M].
    """
    _check(sequence, logprobs, old_logprobs, advantages)
    _check_numbers(clip_low=(clip_low, 0, float("inf")), clip_high=(clip_high, 0, float("inf")))
    if dual_clip and not dual_clip > 1:
        raise ValueError(f"dual_clip {dual_clip}: allowed is 0 (off) or a number above 1")
    ratio = torch.exp((logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    losses = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip:
        losses = torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)
    clipped_low = (advantages < 0) & (ratio < 1 - clip_low)
    clipped_high = (advantages > 0) & (ratio > 1 + clip_high)
    return losses, {"clipped_low": clipped_low, "clipped_high": clipped_high}


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Stats]:
    """CISPO: the clipped ratio is a constant weight, so that no token loses its gradient (paper Eq. 16, 17).

        ratio  = exp(logprobs - old_logprobs)
        losses = -stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) * advantages * logprobs

    clip_low = 1 (Table 6) clips from above only. No minimum, no condition on the sign of the advantage. All tensors
    [M].
    """
    _check(sequence, logprobs, old_logprobs, advantages)
    _check_numbers(clip_low=(clip_low, 0, float("inf")), clip_high=(clip_high, 0, float("inf")))
    ratio = torch.exp((logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).detach()
    losses = -ratio.clamp(max(1 - clip_low, 0.0), 1 + clip_high) * advantages * logprobs
    return losses, {"clipped_low": ratio < 1 - clip_low, "clipped_high": ratio > 1 + clip_high}


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence: Tensor,
    *,
    tau_pos: float,
    tau_neg: float,
) -> tuple[Tensor, Stats]:
    """SAPO: a sigmoid gate in the place of the clip, with a temperature for each sign (paper Eq. 18, 19).

        tau    = tau_pos where advantages > 0, else tau_neg
        losses = -4 / tau * sigmoid(tau * (ratio - 1)) * advantages

    The slope at ratio 1 is 1 for every tau. Nothing is clipped. All tensors [M].
    """
    _check(sequence, logprobs, old_logprobs, advantages)
    _check_numbers(tau_pos=(tau_pos, 1e-6, 1e6), tau_neg=(tau_neg, 1e-6, 1e6))
    ratio = torch.exp((logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    tau = torch.full_like(advantages, tau_neg).masked_fill(advantages > 0, tau_pos)
    losses = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages
    nothing = torch.zeros_like(advantages, dtype=torch.bool)
    return losses, {"clipped_low": nothing, "clipped_high": nothing}


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Stats]:
    """Sequence-level clipping of GSPO and SAMPO: all tokens of a turn share one ratio (paper Eq. 8, 20, 21).

        ratio  = exp(mean over the sequence of (logprobs - old_logprobs))
        losses = -min(ratio * advantages, clip(ratio, 1 - clip_low, 1 + clip_high) * advantages)

    The mean is clamped, never its tokens. All tensors [M]; losses and stats repeat the sequence's value at its tokens.
    """
    _check(sequence, logprobs, old_logprobs, advantages)
    _check_numbers(clip_low=(clip_low, 0, float("inf")), clip_high=(clip_high, 0, float("inf")))
    ratio = torch.exp(segment_mean(logprobs - old_logprobs, sequence).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    losses = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    clipped_low = (advantages < 0) & (ratio < 1 - clip_low)
    clipped_high = (advantages > 0) & (ratio > 1 + clip_high)
    return losses, {"clipped_low": clipped_low, "clipped_high": clipped_high}


SURROGATES = {"ppo_clip": ppo_clip, "cispo": cispo, "sapo": sapo, "gspo": gspo}


def sequence_mask(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequence: Tensor, *, delta: float
) -> Tensor:
    """Sequence mask M_i (paper Table 1, GRPO_SM): which tokens keep their loss, decided once for a sequence.

        drop = mean(advantages) < 0 and mean(old_logprobs - logprobs) > delta    (means over the sequence)

    Dropped tokens stay in the denominator of `aggregate`, as in the paper. All tensors [M]; returns keep [M], bool.
    """
    _check(sequence, logprobs, old_logprobs, advantages)
    _check_numbers(delta=(delta, float("-inf"), float("inf")))
    drift = segment_mean((old_logprobs - logprobs).detach(), sequence)
    return ~((segment_mean(advantages, sequence) < 0) & (drift > delta))


def rollout_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, rollout_is_cap: float) -> Tensor:
    """Truncated importance weights of tokens that an engine sampled a little off the trainer's policy (TIS).

        weights = min(exp(old_logprobs - rollout_logprobs), rollout_is_cap)

    They multiply the losses of a surrogate; not in the paper (https://fengyao.notion.site/off-policy-rl). All [M].
    """
    _check_numbers(rollout_is_cap=(rollout_is_cap, 0, float("inf")))
    log_weights = (old_logprobs - rollout_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.exp(log_weights).clamp(max=rollout_is_cap)


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(policy || reference) at each sampled token (Schulman, http://joschu.net/blog/kl-approx.html).

        d = ref_logprobs - logprobs;    k1 = -d,    k2 = d^2 / 2,    k3 = exp(d) - 1 - d    (paper Section 3.1, (3))

    k3 takes min(d, 20) in both of its terms: finite, never negative, no lower clamp. As a loss, k1 has no gradient in
    expectation on the policy's own samples. Tensors [M]; returns [M].
    """
    if logprobs.shape != ref_logprobs.shape:
        raise ValueError(f"shapes {tuple(logprobs.shape)}, {tuple(ref_logprobs.shape)}: allowed is one shape [M]")
    d = ref_logprobs - logprobs
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        d = d.clamp(max=MAX_LOG_RATIO)
        return torch.expm1(d) - d
    raise ValueError(f"estimator {estimator!r}: allowed are k1, k2, k3")


AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def aggregate(
    losses: Tensor,
    sequence: Tensor,
    mode: str,
    *,
    num_tokens: int,
    num_sequences: int,
    max_length: int | None = None,
) -> Tensor:
    """Reduce losses [M] to a scalar with the denominators of the whole optimizer batch (paper Eq. 4, 5, 10-13).

        token-mean               sum(losses) / num_tokens
        seq-mean-token-mean      sum(losses / length of the token's sequence) / num_sequences
        seq-mean-token-sum       sum(losses) / num_sequences
        seq-mean-token-sum-norm  sum(losses) / (num_sequences * max_length)

    The sum over micro-batches (and ranks) is the value of the whole batch, whatever the split. An empty micro-batch
    gives 0 with a graph. max_length is the configured response limit, in tokens.
    """
    _check(sequence, losses)
    if mode not in AGGREGATIONS:
        raise ValueError(f"aggregation {mode!r}: allowed are {', '.join(AGGREGATIONS)}")
    if not (num_tokens >= max(1, losses.numel()) and num_sequences >= 1):
        raise ValueError(
            f"num_tokens {num_tokens}, num_sequences {num_sequences}: allowed are the counts of the whole optimizer "
            f"batch, at least the {losses.numel()} tokens given and 1"
        )
    if mode == "token-mean":
        return losses.sum() / num_tokens
    if mode == "seq-mean-token-mean":
        return (losses / torch.bincount(sequence)[sequence]).sum() / num_sequences
    if mode == "seq-mean-token-sum":
        return losses.sum() / num_sequences
    if max_length is None or not max_length >= 1:
        raise ValueError(f"max_length {max_length}: allowed is the response limit in tokens, at least 1")
    return losses.sum() / (num_sequences * max_length)
