"""The policy: a causal language model, and the log-probabilities it gives to the tokens that were sampled from it.

A row is what the model reads at once; its `sampled` positions hold the tokens of the policy, every other one is
context. Rows are packed into a rectangle by right padding. The logit at position p - 1 scores the token at p: this
alignment is made once, in `pack`, and everything after it is flat [M].
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tiny import tiny_model, tiny_tokenizer


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
    if all(row.rollout_logprobs for row in rows):
        rollout_logprobs = np.concatenate([row.rollout_logprobs for row in rows]).astype(np.float32)  # [M]
        packed.rollout_logprobs = torch.as_tensor(rollout_logprobs, device=device)
    return packed


def make_packs(rows: list[Row], tokens_per_micro_batch: int, pad: int, device="cpu") -> list[Pack]:
    """Micro-batches of rows of like length, at most `tokens_per_micro_batch` with padding or a single row."""
    packs, batch = [], []
    for row in sorted(rows, key=lambda row: len(row.ids)):
        if batch and (len(batch) + 1) * len(row.ids) > tokens_per_micro_batch:
            packs.append(pack(batch, pad, device))
            batch = []
        batch.append(row)
    return [*packs, pack(batch, pad, device)] if batch else packs


def sampled_logprobs(
    model, batch: Pack, temperature: float, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probability [M] of each sampled token and, if asked, the entropy [M] of its distribution, in nats.

    logprobs = log_softmax(logits / temperature)[tokens];    entropy = -sum(p * log p) of the same distribution
    """
    logits = model(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, logits_to_keep=batch.columns, use_cache=False
    ).logits  # [B, C, V]
    every = torch.log_softmax(logits[batch.row, batch.column].float() / temperature, dim=-1)  # [M, V]
    logprobs = every.gather(1, batch.tokens[:, None])[:, 0]
    return logprobs, -(every.exp() * every).sum(-1) if with_entropy else None
