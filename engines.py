"""Engines sample: prompts of token ids in, sampled ids and their log-probabilities out.

    generate(prompts, seeds, sampling) -> list[Generation]

Every prompt has a seed of its own, and its draws depend on nothing else in the batch. The log-probabilities are
those of log_softmax(logits / temperature), before top_p and top_k, which serve evaluation alone: training samples
from all tokens.
"""

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

warnings.filterwarnings("ignore", message="`past_key_values` is deprecated", category=FutureWarning)


@dataclass(frozen=True)
class Prompt:
    ids: list[int]
    images: tuple = ()


@dataclass(frozen=True)
class Sampling:
    temperature: float  # 0 is greedy
    max_tokens: int  # of a response
    top_p: float = 1.0  # 1 is off
    top_k: int = 0  # 0 is off


@dataclass(frozen=True)
class Generation:
    ids: list[int]  # sampled tokens, the stop token included
    logprobs: list[float]  # at sampling, one per id
    truncated: bool  # the limit was reached without a stop token


def choose(logits: Tensor, uniform: Tensor, top_p: float = 1.0, top_k: int = 0) -> Tensor:
    """Sample one token a row by inverting its cumulative distribution: logits [B, V], uniform [B] < 1 -> ids [B].

    top_k keeps the k most likely tokens (0: all); of these top_p keeps the fewest that hold a share p, at least one.
    """
    probs, ids = torch.softmax(logits.double(), -1), None
    if top_p < 1 or top_k:
        probs, ids = probs.sort(-1, descending=True)
        probs = probs[:, : top_k or None]
        total = probs.cumsum(-1)
        probs = probs * (total - probs < top_p * total[:, -1:])
    total = probs.cumsum(-1)
    pick = torch.searchsorted(total, uniform[:, None] * total[:, -1:], right=True).clamp(max=probs.shape[1] - 1)
    return (pick if ids is None else ids.gather(1, pick))[:, 0]


class TransformersEngine:
    """Batched decoding with a KV cache by a Transformers model; it shares the trainer's weights: none can be stale."""

    def __init__(self, model, tokenizer):
        self.model, self.pad = model, tokenizer.pad_token_id
        stop = model.generation_config.eos_token_id or []
        stop = {tokenizer.eos_token_id, *(stop if isinstance(stop, list) else [stop])}
        self.stop = torch.tensor(sorted(stop), device=model.device)

    @torch.no_grad()
    def generate(self, prompts: list[Prompt], seeds: list[int], sampling: Sampling) -> list[Generation]:
        """Sample a response to every prompt, seeds[i] for prompts[i]; they are padded on the left, in one batch."""
        if any(prompt.images for prompt in prompts):
            raise ValueError("images: TransformersEngine reads text alone")
        device, count = self.model.device, len(prompts)
        width = max(len(prompt.ids) for prompt in prompts)
        ids = torch.tensor([[self.pad] * (width - len(p.ids)) + p.ids for p in prompts], device=device)  # [B, L]
        mask = torch.tensor([[0] * (width - len(p.ids)) + [1] * len(p.ids) for p in prompts], device=device)
        uniform = np.stack([np.random.default_rng(seed).random(sampling.max_tokens) for seed in seeds])
        uniform = torch.as_tensor(uniform, device=device)  # [B, T]
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        padded = bool((mask == 0).any())
        cache = DynamicCache(config=self.model.config)
        tokens, logprobs = [], []
        stopped = torch.zeros(count, dtype=torch.bool, device=device)
        for t in range(sampling.max_tokens):
            out = self.model(
                input_ids=ids,
                attention_mask=mask if padded else None,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            logits = out.logits[:, -1].float()  # [B, V]
            if sampling.temperature:
                logits = logits / sampling.temperature
                token = choose(logits, uniform[:, t], sampling.top_p, sampling.top_k)
            else:
                token = logits.argmax(-1)
            tokens.append(token)
            logprobs.append(torch.log_softmax(logits, -1).gather(1, token[:, None])[:, 0])
            stopped |= torch.isin(token, self.stop)
            if stopped.all():
                break
            ids, positions = token[:, None], positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(count, 1)], 1)
        return self._cut(torch.stack(tokens, 1), torch.stack(logprobs, 1))

    def _cut(self, tokens: Tensor, logprobs: Tensor) -> list[Generation]:
        """Tokens and logprobs [B, T] -> generations, each cut behind its first stop token."""
        is_stop = torch.isin(tokens, self.stop)
        first = torch.where(is_stop.any(1), is_stop.int().argmax(1) + 1, tokens.shape[1]).tolist()
        rows = zip(tokens.tolist(), logprobs.tolist(), first, is_stop.any(1).tolist(), strict=True)
        return [Generation(ids[:n], lps[:n], not stop) for ids, lps, n, stop in rows]
