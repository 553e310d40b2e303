"""The policy: a causal language model, and the log-probabilities it gives to the tokens that were sampled from it.

A row is what the model reads at once; its `sampled` positions hold the tokens of the policy, every other one is
context. Rows are packed into a rectangle by right padding. The logit at position p - 1 scores the token at p: this
alignment is made once, in `pack`, and everything after it is flat [M].
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, END = "<|pad|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer with one token a word, split at white space and punctuation; a word outside `words` is an error."""
    marks = pre_tokenizers.Split(Regex(r"""[\[\](){}.,:;!?'"]"""), "isolated")
    split = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), marks])
    pieces = [piece for piece, _ in split.pre_tokenize_str(" ".join(words))]
    vocabulary = dict.fromkeys([PAD, END, "<|system|>", "<|user|>", "<|assistant|>", *pieces])
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}))
    tokenizer.pre_tokenizer = split
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_model(vocabulary: int, hidden: int, layers: int, eos: int, pad: int) -> Qwen3ForCausalLM:
    """A randomly initialised Qwen3 with `hidden` channels, heads of 16 and tied embeddings."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 16,
        num_key_value_heads=hidden // 16,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=eos,
        pad_token_id=pad,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


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
    return AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)), tokenizer


@dataclass
class Row:
    """What the model reads at once, and which of its tokens the policy sampled in which sequence."""

    ids: list[int]
    sampled: list[int]  # positions in ids, ascending, never 0
    sequence: list[int]  # sequence (turn) of each sampled position


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
    old_logprobs: Tensor = field(default=None)  # [M]
    ref_logprobs: Tensor = field(default=None)  # [M]


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
    return Pack(*(torch.as_tensor(array, device=device) for array in arrays))


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
