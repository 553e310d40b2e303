"""The policy: a causal language model, and the log-probabilities it gives to the tokens that were sampled from it.

A row is what the model reads at once; its `sampled` positions hold the tokens of the policy, every other one is
context. Rows are packed into a rectangle by right padding. The logit at position p - 1 scores the token at p: this
alignment is made once, in `pack`, and everything after it is flat [M].
"""

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from ranks import balance, place
from tiny import tiny_model, tiny_tokenizer

LOGIT_BYTES = 2**27  # of logits at a time, float32
PADDING = 0.1  # of a micro-batch, at most


def load_policy(model: str, words: list[str], hidden: int, layers: int, dtype: str):
    """(model, tokenizer): the built-in tiny policy where `model` is empty, else a folder or hub name, or OSError."""
    if not model:
        tokenizer = tiny_tokenizer(words)
        return tiny_model(len(tokenizer), hidden, layers, tokenizer.eos_token_id, tokenizer.pad_token_id), tokenizer
    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.chat_template is None:
        raise OSError(f"the tokenizer of {model} has no chat template")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    try:
        return AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)), tokenizer
    except SafetensorError as error:
        raise OSError(f"the weights of {model} cannot be read: {error}") from error


@dataclass
class Row:
    """What the model reads at once, and which of its tokens the policy sampled in which sequence."""

    ids: list[int]
    sampled: list[int]  # positions in ids, ascending, never 0
    sequence: list[int]  # sequence (turn) of each sampled position
    rollout_logprobs: list[float] = field(default_factory=list)  # of each sampled position; empty where none sampled


@dataclass
class Pack:
    """A micro-batch: rows padded on the right, and everything that belongs to their M sampled tokens, flat."""

    input_ids: Tensor  # [B, L]
    attention_mask: Tensor  # [B, L], 1 on tokens
    columns: Tensor  # [C], positions whose logits are needed by some row
    row: Tensor  # [M], row of each sampled token
    column: Tensor  # [M], where in `columns` the logit stands that scores it
    tokens: Tensor  # [M], the sampled ids
    sequence: Tensor  # [M]
    advantages: Tensor = field(default=None)  # [M]
    rollout_logprobs: Tensor = field(default=None)  # [M]
    old_logprobs: Tensor = field(default=None)  # [M]
    ref_logprobs: Tensor = field(default=None)  # [M]
    entropy: Tensor = field(default=None)  # [M], of the old policy


def pack(rows: list[Row], pad: int, device="cpu") -> Pack:
    """Rows -> Pack. The token at position p is scored by the logit at p - 1; ValueError where p is 0."""
    length = max(len(row.ids) for row in rows)
    ids = np.full((len(rows), length), pad)
    mask = np.zeros((len(rows), length), np.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)], mask[i, : len(row.ids)] = row.ids, 1
    index = np.repeat(np.arange(len(rows)), [len(row.sampled) for row in rows])  # [M]
    position = np.concatenate([row.sampled for row in rows]).astype(np.int64)  # [M]
    if (position < 1).any():
        raise ValueError("sampled position 0: allowed is 1 and up, behind a token that predicts it")
    sequence = np.concatenate([row.sequence for row in rows]).astype(np.int64)  # [M]
    columns, column = np.unique(position - 1, return_inverse=True)
    arrays = (ids, mask, columns, index, column, ids[index, position], sequence)
    packed = Pack(*(torch.as_tensor(array, device=device) for array in arrays))
    if all(len(row.rollout_logprobs) == len(row.sampled) for row in rows):
        rollout_logprobs = np.concatenate([row.rollout_logprobs for row in rows]).astype(np.float32)  # [M]
        packed.rollout_logprobs = torch.as_tensor(rollout_logprobs, device=device)
    return packed


def micro_batches(rows: list[Row], tokens_per_micro_batch: int) -> list[list[Row]]:
    """Rows of like length together: at most `tokens_per_micro_batch`, and PADDING of it padding; or a single row."""
    batches, batch, own = [], [], 0  # tokens of the batch without padding
    for row in sorted(rows, key=lambda row: len(row.ids)):
        own, full = own + len(row.ids), (len(batch) + 1) * len(row.ids)
        if not batch or full > tokens_per_micro_batch or own < (1 - PADDING) * full:
            batch, own = [], len(row.ids)
            batches.append(batch)
        batch.append(row)
    return batches


def make_packs(rows: list[Row], tokens_per_micro_batch: int, pad: int, device="cpu") -> list[Pack]:
    """This rank's micro-batches of the rows, which are balanced over the ranks by their tokens.

    Every rank takes as many steps, or sharded parameters would wait for each other: a rank that has fewer fills up
    with rows without a sampled token, whose loss is 0.
    """
    if not rows:
        return []
    shares = [[rows[i] for i in share] for share in balance([len(row.ids) for row in rows])]
    batches = [micro_batches(share, tokens_per_micro_batch) for share in shares]
    mine, steps, idle = batches[place()[0]], max(map(len, batches)), Row(rows[0].ids[:2], [], [])
    return [pack(batch, pad, device) for batch in mine + [[idle]] * (steps - len(mine))]


class _ChunkedScores(torch.autograd.Function):
    """`token_scores`, some rows of logits at a time; backward makes them again, so that none outlives its chunk."""

    @staticmethod
    def forward(ctx, hidden, weight, tokens, temperature, with_entropy, chunk):
        """logprobs = logits[token] - logsumexp(logits);    entropy = -sum(p * log p)."""
        logprobs, entropy, log_sums = [], [], []
        for part, token in zip(hidden.split(chunk), tokens.split(chunk), strict=True):
            logits = F.linear(part, weight).float().div_(temperature)  # [chunk, V]
            log_sum = logits.logsumexp(-1)
            logprobs.append(logits.gather(1, token[:, None])[:, 0] - log_sum)
            log_sums.append(log_sum)
            if with_entropy:
                every = logits.sub_(log_sum[:, None])
                entropy.append(-(every.exp().mul_(every)).sum(-1))
        logprobs, log_sums = torch.cat(logprobs), torch.cat(log_sums)  # [M]
        entropy = torch.cat(entropy) if with_entropy else torch.zeros_like(logprobs)
        ctx.save_for_backward(hidden, weight, tokens, log_sums, entropy)
        ctx.numbers = temperature, with_entropy, chunk
        return logprobs, entropy

    @staticmethod
    def backward(ctx, to_logprobs, to_entropy):
        """d logprobs = (1[token] - p) d logits;   d entropy = -p * (log p + entropy) d logits;   / temperature."""
        hidden, weight, tokens, log_sums, entropy = ctx.saved_tensors
        temperature, with_entropy, chunk = ctx.numbers
        to_hidden, to_weight = torch.empty_like(hidden), torch.zeros_like(weight).float()
        for start in range(0, len(tokens), chunk):
            at = slice(start, start + chunk)
            every = F.linear(hidden[at], weight).float().div_(temperature).sub_(log_sums[at, None])  # log p
            if with_entropy:
                p = every.exp()
                logits = every.add_(entropy[at, None]).mul_(p).mul_(-to_entropy[at, None])
                logits.sub_(p.mul_(to_logprobs[at, None]))
            else:
                logits = every.exp_().mul_(-to_logprobs[at, None])
            logits.scatter_add_(1, tokens[at, None], to_logprobs[at, None]).div_(temperature)  # their gradient
            logits = logits.to(weight.dtype)
            to_hidden[at] = logits @ weight
            to_weight += logits.T @ hidden[at]
        return to_hidden, to_weight.to(weight.dtype), None, None, None, None


def token_scores(
    hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probability [M] of each token, and entropy [M] if asked, from hidden states [M, H] and the head [V, H].

        every = log_softmax(hidden @ weight.T / temperature);    logprobs = every[tokens]
        entropy = -sum(exp(every) * every)

    In float32, LOGIT_BYTES of logits at a time: the memory does not grow with M.
    """
    if torch.is_autocast_enabled(hidden.device.type):  # it does not reach the backward of chunks
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    chunk = max(1, LOGIT_BYTES // (4 * len(weight)))
    if len(tokens) > chunk:
        logprobs, entropy = _ChunkedScores.apply(hidden, weight, tokens, temperature, with_entropy, chunk)
        return logprobs, entropy if with_entropy else None
    every = torch.log_softmax(F.linear(hidden, weight).float() / temperature, dim=-1)  # [M, V]
    logprobs = -F.nll_loss(every, tokens, reduction="none")  # every[tokens]
    return logprobs, -(every.exp() * every).sum(-1) if with_entropy else None


@torch.no_grad()
def check_head(model) -> None:
    """ValueError where logits are more than hidden states times a matrix: a bias, a cap, a scale (Gemma 2, Cohere)."""
    batch = pack([Row([0, 1, 2], [1, 2], [0, 0])], 0, model.device)
    every = torch.log_softmax(model(input_ids=batch.input_ids, use_cache=False).logits[0, :2].float(), -1)
    apart = (sampled_logprobs(model, batch, 1.0)[0] - every.gather(1, batch.tokens[:, None])[:, 0]).abs().max()
    if not apart < 0.05:
        raise ValueError(
            f"{type(model).__name__}: its head is more than a matrix; allowed are models without its bias or cap"
        )


def sampled_logprobs(
    model, batch: Pack, temperature: float, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probability [M] of each sampled token and, if asked, the entropy [M] of its distribution, in nats.

    The model's own forward runs, as its wrappers rely on it, with a head that scores the sampled tokens and keeps no
    logits of others.
    """
    head, scores = getattr(model, "module", model).get_output_embeddings(), []

    def score(hidden: Tensor) -> Tensor:  # [B, C, H]
        picked = hidden[batch.row, batch.column]  # [M, H]
        scores.extend(token_scores(picked, head.weight, batch.tokens, temperature, with_entropy))
        return scores[0]

    head.forward = score
    try:
        model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            logits_to_keep=batch.columns,
            use_cache=False,
        )
    finally:
        del head.forward
    return scores[0], scores[1]
