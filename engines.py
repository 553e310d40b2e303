"""Engines sample: prompts of token ids in, sampled ids and their log-probabilities out.

    generate(prompts, seeds, sampling) -> list[Generation]
    load_weights(model, version)    from now on sample from these weights
    check(model, version)           RuntimeError unless it does
    sleep()                         leave the GPU's memory to the trainer until the next load_weights
    close()                         the end

Every prompt has a seed of its own, and its draws depend on nothing else in the batch. The log-probabilities are
those of log_softmax(logits / temperature); training samples from all tokens. top_p and top_k serve evaluation alone,
where vLLM reports them renormalised over the tokens kept, and Transformers does not.
"""

import os
import warnings
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from importlib.util import find_spec
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import DynamicCache

from policy import Row, pack, sampled_logprobs
from ranks import place

warnings.filterwarnings("ignore", message="`past_key_values` is deprecated", category=FutureWarning)

GAP_LIMITS = {torch.float32: 0.01, torch.bfloat16: 0.2}  # of mean |rollout_logprobs - old_logprobs|, nats a token
BLOCK = 32  # tokens of a block of vLLM's cache, the unit of what prompts share
PROBED = 8  # tokens sampled after the probe's prompt
PLACE = 0x9E3779B97F4A7C1  # any large odd number


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
    stop: tuple[str, ...] = ()  # texts that end a response, with the token that completes one


@dataclass(frozen=True)
class Generation:
    ids: list[int]  # sampled tokens, a stop token included
    logprobs: list[float]  # at sampling, one per id
    truncated: bool  # the limit was reached without a stop token or text
    by_text: bool = False  # ended by a stop text: the last token is part of what is said


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


def make_engine(
    model,
    tokenizer,
    dtype: torch.dtype,
    *,
    engine: str,
    max_prompt_tokens: int,
    max_response_tokens: int,
    kv_cache_gib: float,
    sleep_level: int,
):
    """The engine of that name; auto is vLLM on a GPU that has it installed. dtype is what the trainer computes in.

    ValueError where vLLM is not installed, or has no memory, or prompt and response exceed the model's context.
    """
    tokens, context = max_prompt_tokens + max_response_tokens, model.config.get_text_config().max_position_embeddings
    if tokens > context:
        raise ValueError(f"--max_prompt_tokens and --max_response_tokens: {tokens} in all, allowed is up to {context}")
    installed = find_spec("vllm") is not None
    if engine == "vllm" and not installed:
        raise ValueError("--engine vllm: it is not installed; allowed is transformers, or see requirements-vllm.txt")
    if engine == "vllm" or engine == "auto" and model.device.type == "cuda" and installed:
        return VLLMEngine(model, tokenizer, dtype, tokens, kv_cache_gib, sleep_level)
    return TransformersEngine(model, tokenizer)


def stop_ids(model, tokenizer) -> list[int]:
    """Tokens that end a response: the tokenizer's end of sequence and those of the model's generation config."""
    stop = model.generation_config.eos_token_id
    return sorted({tokenizer.eos_token_id, *(stop if isinstance(stop, list) else [stop])} - {None})


class TransformersEngine:
    """Batched decoding with a KV cache by a Transformers model: the trainer's own, or a copy where that is sharded."""

    def __init__(self, model, tokenizer):
        self.model, self.tokenizer, self.pad = model, tokenizer, tokenizer.pad_token_id
        self.stop = torch.tensor(stop_ids(model, tokenizer), device=model.device)
        self.version, self.received = None, {}

    @torch.no_grad()
    def load_weights(self, model, version: int) -> None:
        """Copy the weights of a sharded model; of another one there are none to load, as they are its own."""
        self.version, self.received, own = version, {}, self.model.state_dict()
        if model is not self.model:
            for name, tensor in weight_stream(model, self.received):
                own[name].copy_(tensor)

    def check(self, model, version: int) -> None:
        """RuntimeError unless it samples from the weights of `model`, those of update `version`."""
        if model is not self.model:
            check_received(model, version, self)

    def sleep(self) -> None:
        """Nothing to free: the weights are the trainer's, and the cache of a batch is gone with it."""

    def close(self) -> None:
        """Nothing to end."""

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
        cached = {"past_key_values": DynamicCache(config=self.model.config), "use_cache": True, "logits_to_keep": 1}
        tokens, logprobs, ends = [], [], []
        stopped = torch.zeros(count, dtype=torch.bool, device=device)
        for t in range(sampling.max_tokens):
            seen = mask if padded else None
            out = self.model(input_ids=ids, attention_mask=seen, position_ids=positions, **cached)
            logits = out.logits[:, -1].float()  # [B, V]
            if sampling.temperature:
                logits = logits / sampling.temperature
                token = choose(logits, uniform[:, t], sampling.top_p, sampling.top_k)
            else:
                token = logits.argmax(-1)
            tokens.append(token)
            logprobs.append(torch.log_softmax(logits, -1).gather(1, token[:, None])[:, 0])
            ends.append(torch.isin(token, self.stop) | self._completes(tokens, sampling.stop))
            stopped |= ends[-1]
            if stopped.all():
                break
            ids, positions = token[:, None], positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(count, 1)], 1)
        return self._cut(torch.stack(tokens, 1), torch.stack(logprobs, 1), torch.stack(ends, 1))

    def _cut(self, tokens: Tensor, logprobs: Tensor, ends: Tensor) -> list[Generation]:
        """Tokens, logprobs and which tokens end a response, [B, T] -> generations, each cut behind its first end."""
        first, ended = torch.where(ends.any(1), ends.int().argmax(1) + 1, ends.shape[1]), ends.any(1)
        by_text = ended & ~torch.isin(tokens.gather(1, first[:, None] - 1)[:, 0], self.stop)
        rows = zip(*(part.tolist() for part in (tokens, logprobs, first, ended, by_text)), strict=True)
        return [Generation(ids[:n], lps[:n], not end, text) for ids, lps, n, end, text in rows]

    def _completes(self, tokens: list[Tensor], stop: tuple[str, ...]) -> Tensor:
        """Whether the tokens [B] so far end in one that completes a stop text; a token is a character at least."""
        said = [""] * len(tokens[0])
        if stop:
            said = self.tokenizer.batch_decode(torch.stack(tokens[-max(map(len, stop)) :], 1))
        return torch.tensor([any(text in tail for text in stop) for tail in said], device=tokens[0].device)


def checksum(tensor: Tensor) -> int:
    """Of the bits of a tensor, by place: the sum of (bits[i] + PLACE * i)^2, modulo 2^64, a part at a time."""
    integer, total = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()], 0
    for part in tensor.flatten().view(integer).split(2**22):
        places = PLACE * torch.arange(len(part), device=part.device)
        total = 31 * total + (part + places).square().sum().item()
    return total % 2**64


def whole(tensor: Tensor) -> Tensor:
    """A tensor that is sharded over ranks, put together on each of them."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def weight_stream(model, checksums: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of every weight, a tied head too, one at a time; its checksum is noted once it is taken."""
    for name, tensor in model.state_dict().items():
        tensor = whole(tensor)
        yield name, tensor
        checksums[name] = checksum(tensor)


def check_received(model, version: int, engine) -> None:
    """RuntimeError unless the engine has received every weight of `model`, by its checksum, for update `version`."""
    if engine.version != version:
        raise RuntimeError(f"the engine has the weights of update {engine.version}, the trainer those of {version}")
    own, received = {name: checksum(whole(tensor)) for name, tensor in model.state_dict().items()}, engine.received
    if stale := sorted(own.keys() ^ received.keys() | {n for n in own if received.get(n) != own[n]}):
        raise RuntimeError(f"{len(stale)} of {len(own)} weights are not the engine's, {stale[0]} the first")


def check_gap(mean: float, dtype: torch.dtype) -> None:
    """RuntimeError where a mean |gap| between engine and trainer, in nats a token, is more than rounding."""
    if not mean <= GAP_LIMITS[dtype]:
        raise RuntimeError(
            f"engine and trainer differ by {mean:.2g} nats a token, allowed is {GAP_LIMITS[dtype]} in {dtype}: "
            "the engine does not sample from the trainer's policy"
        )


class VLLMEngine:
    """vLLM in this process, with weights of its own: `load_weights` replaces them, `check` proves that they are fresh.

    The prompts of earlier turns are read from its prefix cache. The constructor takes configuration and device of
    `model` alone: its weights come with the first load_weights, and are random before.
    """

    def __init__(self, model, tokenizer, dtype, max_tokens: int, kv_cache_gib: float, sleep_level: int = 0):
        """max_tokens are a prompt's and its response's. ValueError where the memory is not there, or not enough."""
        on_cpu = model.device.type == "cpu"
        if sleep_level and on_cpu:
            raise ValueError(f"--sleep_level {sleep_level}: allowed is 0 without a GPU")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # tensors go from model to model
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        if on_cpu:
            torch._dynamo.config.disable = True  # else the first log-probabilities wait half a minute for a compiler
        from vllm import LLM, SamplingParams

        self.params, self.stop, self.dtype = SamplingParams, stop_ids(model, tokenizer), dtype
        self.sleep_level, self.version, self.received, self.asleep, self.probed = sleep_level, None, {}, False, False
        words = [i for i in range(min(len(tokenizer), 1000)) if i != tokenizer.pad_token_id]
        self.probe = [words[7 * i % len(words)] for i in range(2 * BLOCK + 1)]
        config = deepcopy(model.config)
        config.architectures = [type(model).__name__]
        with TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            try:
                self.llm = LLM(
                    folder,
                    load_format="dummy",
                    dtype=str(dtype).removeprefix("torch."),
                    max_model_len=max(max_tokens, len(self.probe) + PROBED),
                    kv_cache_memory_bytes=int(kv_cache_gib * 2**30),
                    gpu_memory_utilization=0.05,  # a start-up check alone, as the cache has its size
                    block_size=BLOCK,
                    enable_prefix_caching=True,
                    logprobs_mode="processed_logprobs",
                    enforce_eager=on_cpu,
                    enable_chunked_prefill=not on_cpu,  # there a prompt read in parts fails on its seed
                    enable_sleep_mode=sleep_level > 0,
                    distributed_executor_backend="external_launcher" if place()[1] > 1 else None,
                )
            except (ValueError, RuntimeError) as error:
                raise ValueError(f"--engine vllm with --kv_cache_gib {kv_cache_gib}: {error}") from error

    def generate(self, prompts: list[Prompt], seeds: list[int], sampling: Sampling) -> list[Generation]:
        """Sample a response to every prompt, seeds[i] for prompts[i], in vLLM's own batches."""
        if any(prompt.images for prompt in prompts):
            raise ValueError("images: VLLMEngine reads text alone")
        return self._sample([prompt.ids for prompt in prompts], seeds, sampling, self.stop)[0]

    def _sample(self, prompts: list[list[int]], seeds: list[int], sampling: Sampling, stop: list[int]):
        """(generations, prompt tokens read from the prefix cache)."""
        params = [
            self.params(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_tokens,
                seed=seed,
                stop_token_ids=stop,
                ignore_eos=True,  # what ends a response is `stop` alone
                logprobs=0,  # of the sampled token
                stop=list(sampling.stop),
                detokenize=bool(sampling.stop),
                skip_special_tokens=False,
                skip_clone=True,  # each is made for one request
            )
            for seed in seeds
        ]
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        generations = []
        for output in (output.outputs[0] for output in outputs):
            ids = list(output.token_ids)
            logprobs = [at[token].logprob for token, at in zip(ids, output.logprobs, strict=True)]
            cut = output.finish_reason == "length"
            generations.append(Generation(ids, logprobs, cut, not cut and ids[-1] not in stop))
        return generations, sum(output.num_cached_tokens for output in outputs)

    def load_weights(self, model, version: int) -> None:
        """Replace every weight in place and drop what the old ones left in the prefix cache."""
        if self.asleep:
            self.llm.wake_up(tags=["weights"])
        self.received = {}
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weight_stream(model, self.received)})
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
        self.llm.reset_prefix_cache()
        self.version, self.asleep, self.probed = version, False, False

    @torch.no_grad()
    def check(self, model, version: int) -> None:
        """RuntimeError unless it samples from the weights of `model`, those of update `version`.

        Exact, whatever the size of the update: the version; a checksum of every weight that was received against the
        model's now; and that a fixed prompt of two cache blocks finds no block the first time. Within rounding: the
        log-probabilities of tokens sampled after it. That vLLM takes over what it receives is seen by these at the
        first push, which replaces random weights.
        """
        check_received(model, version, self)
        (sampled,), cached = self._sample([self.probe], [version], Sampling(1.0, PROBED), [])
        if cached and not self.probed:
            raise RuntimeError(f"the prefix cache was not dropped: {cached} tokens of the weights before")
        ids = self.probe + sampled.ids
        row = Row(ids, list(range(len(self.probe), len(ids))), [0] * PROBED, sampled.logprobs)
        batch = pack([row], 0, model.device)
        logprobs, _ = sampled_logprobs(model, batch, 1.0)
        check_gap(float((batch.rollout_logprobs - logprobs).abs().mean()), self.dtype)
        self.probed = True

    def sleep(self) -> None:
        """Free the GPU's memory: level 1 keeps the weights in the CPU's, level 2 does not. The cache is lost."""
        if self.sleep_level:
            self.llm.sleep(self.sleep_level)
            self.asleep = True

    def close(self) -> None:
        """End vLLM, before Accelerate ends the process group that both use."""
        self.llm.llm_engine.engine_core.shutdown()
