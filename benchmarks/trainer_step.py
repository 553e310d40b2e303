"""The updates of a rollout, against TRL's GRPOTrainer; needs requirements-trl.txt in an environment of its own.

    python benchmarks/trainer_step.py                          # the built-in model, 0.1 M parameters
    python benchmarks/trainer_step.py --hidden 256             # 1.8 M
    python benchmarks/trainer_step.py --spread 0 --kl_coef 0   # rows of one length; no reference

Both sides get the same rows (prompt and response of random tokens, lengths from a gamma distribution), the same
advantages, model, AdamW, clipping and mini-batches, and a loss with the same denominators: PPO's clip, token-mean.
TRL plays its own `train`, to which ready responses are handed as a rollout. Two times are taken of either side: the
updates alone, from old (and reference) log-probabilities on, and these with the forward passes that compute them.
Sampling, padding, rewards and logging of TRL are not in either; our packing is in the second. Each side first picks
the fastest of several micro-batches. Then the two take turns, rollout by rollout, each from the same weights and
moments; loss and gradient norm of every update are compared, and the way that the parameters have gone.
"""

import argparse
import os
import sys
import tempfile
import time
from copy import deepcopy
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median

import numpy as np
import torch

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # of rollout_func
sys.path.insert(0, str(Path(__file__).parent.parent))

from datasets import Dataset  # noqa: E402
from transformers import PrinterCallback, TrainerCallback, logging  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from grpo import add_old_logprobs, policy_loss, update_policy  # noqa: E402
from losses import ppo_clip  # noqa: E402
from policy import Row, make_packs  # noqa: E402
from tiny import tiny_model, tiny_tokenizer  # noqa: E402

GROUP, CLIP, LEARNING_RATE = 8, 0.2, 1e-4
WORDS = [f"word{i}" for i in range(59)]  # with the five special tokens a vocabulary of 64


def lengths(mean: float, spread: float, count: int, rng) -> np.ndarray:
    """Whole numbers of this mean and coefficient of variation, 2 at least."""
    drawn = rng.gamma(spread**-2, mean * spread**2, count) if spread else np.full(count, mean)
    return np.maximum(2, np.rint(drawn)).astype(int)


def make_rollout(args, vocabulary: int, rng) -> tuple[list, list, list]:
    """(prompts, responses, rewards) of args.rows rows, members of a group next to each other with one prompt."""
    prompts = [
        rng.integers(5, vocabulary, n).tolist() for n in lengths(args.prompt, args.spread, args.rows // GROUP, rng)
    ]
    responses = [rng.integers(5, vocabulary, n).tolist() for n in lengths(args.response, args.spread, args.rows, rng)]
    return [prompt for prompt in prompts for _ in range(GROUP)], responses, rng.integers(0, 2, args.rows).tolist()


class Ours:
    """A policy with its optimizer and reference, trained by this project."""

    def __init__(self, model, reference, args, tokens_per_micro_batch: int, pad: int):
        self.model, self.reference, self.args, self.pad = model, reference, args, pad
        self.budget = tokens_per_micro_batch
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)

    def loss(self, denominator: float, logprobs, entropy, pack, num_tokens: int, num_sequences: int):
        """The token-mean, over TRL's denominator: the tokens of the mean mini-batch in place of those of its own."""
        numbers = {"aggregation": "token-mean", "kl_coef": self.args.kl_coef, "kl_estimator": "k3", "delta": 0.0}
        numbers |= {"entropy_coef": 0.0, "entropy_threshold": 1.0, "rollout_is_cap": 0.0, "seq_mask": False}
        surrogate = partial(ppo_clip, clip_low=CLIP, clip_high=CLIP)
        batch = (logprobs, entropy, pack, num_tokens, num_sequences)
        loss, sums = policy_loss(surrogate, *batch, max_response_tokens=1, **numbers)
        return loss * num_tokens / denominator, sums

    def turn(self, rollout, parts: list[list[int]], advantages: torch.Tensor) -> dict:
        """All updates of a rollout whose mini-batches are `parts`, indices of rows."""
        prompts, responses, _ = rollout
        start = time.perf_counter()
        rows = [
            Row(p + r, list(range(len(p), len(p) + len(r))), [i] * len(r))
            for i, (p, r) in enumerate(zip(prompts, responses, strict=True))
        ]
        batches = [make_packs([rows[i] for i in part], self.budget, self.pad) for part in parts]
        packs = sum(batches, [])
        add_old_logprobs(self.model, self.reference, packs, 1.0, len(rows))
        for pack in packs:
            pack.advantages = advantages[pack.sequence]
        middle = time.perf_counter()
        loss = partial(self.loss, sum(map(len, responses)) / len(parts))
        settings = {"temperature": 1.0, "epochs": 1, "grad_clip": 1.0, "entropy_coef": 0.0}
        seen = [update_policy(self.model, self.optimizer, [packs], loss, **settings) for packs in batches]
        updates, passes = time.perf_counter() - middle, middle - start
        padded = sum(pack.input_ids.numel() for pack in packs)
        return {"update": updates, "whole": updates + passes, "padded": padded, "seen": seen}


class Turns(TrainerCallback):
    """Times TRL's updates, and calls `after` behind those of each rollout."""

    def __init__(self, updates: int, after):
        self.updates, self.after, self.clock = updates, after, {"update": 0.0, "passes": 0.0}

    def on_step_begin(self, args, state, control, **kwargs):
        """An update begins; the first one of a rollout prepares it."""
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        """An update ends; its loss and norm are logged behind this, without a clock."""
        self.clock["update"] += time.perf_counter() - self.start

    def on_log(self, args, state, control, logs=None, **kwargs):
        """After the last update of a rollout: the other side's turn."""
        if "grad_norm" in logs and state.global_step % self.updates == 0:
            seen = [line for line in state.log_history if "grad_norm" in line][-self.updates :]
            self.after(self.clock | {"whole": self.clock["update"] + self.clock["passes"], "seen": seen})
            self.clock.update(update=0.0, passes=0.0)


def trl_config(args, rollouts: int, rows_per_micro_batch: int, folder: str) -> GRPOConfig:
    """The settings of TRL that make its work ours, and nothing that costs time beside it."""
    accumulate, updates = args.mini_batch // rows_per_micro_batch, args.rows // args.mini_batch
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=rows_per_micro_batch,
        gradient_accumulation_steps=accumulate,
        steps_per_generation=accumulate * updates,
        num_generations=GROUP,
        max_completion_length=4096,
        shuffle_dataset=False,
        max_steps=updates * rollouts,
        max_grad_norm=1.0,
        beta=args.kl_coef,
        use_bias_correction_kl=False,  # else its KL has another gradient, that of KL times ratio
        epsilon=CLIP,
        loss_type="dapo",
        disable_dropout=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def trl_trainer(model, tokenizer, args, rollouts: list, rows_per_micro_batch: int, folder: str, after) -> GRPOTrainer:
    """GRPOTrainer on ready rollouts, which calls after(trainer, what it saw) behind each."""
    updates = args.rows // args.mini_batch
    names = [f"word{i}" for i in range(len(rollouts) * args.rows // GROUP)]

    def replay(prompts, trainer) -> dict:
        """The rollout that these prompts stand for."""
        ids, responses, rewards = rollouts[int(prompts[0].removeprefix("word")) * GROUP // args.rows]
        logprobs = [[0.0] * len(response) for response in responses]
        return {"prompt_ids": ids, "completion_ids": responses, "logprobs": logprobs, "rewards": rewards}

    def reward(prompts, completions, rewards, **kwargs) -> list[float]:
        """The rewards of the rollout."""
        return [float(value) for value in rewards]

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    turns = Turns(updates, lambda seen: after(trainer, seen))
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=trl_config(args, len(rollouts), rows_per_micro_batch, folder),
        train_dataset=Dataset.from_dict({"prompt": names}),
        processing_class=tokenizer,
        callbacks=[turns],
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
        rollout_func=replay,
    )
    trainer.remove_callback(PrinterCallback)
    score, passes = trainer._generate_and_score_completions, trainer._get_per_token_logps_and_entropies

    def scored(inputs):
        """Its preparation of a rollout, taken off the clock of the updates; rows get their index."""
        start = time.perf_counter()
        output = score(inputs) | {"row": torch.arange(args.rows)}
        turns.clock["update"] -= time.perf_counter() - start
        turns.clock["padded"] = args.rows * (output["prompt_ids"].shape[1] + output["completion_ids"].shape[1])
        return output

    def forward(*inputs, **kwargs):
        """Its forward pass, on the clock of passes where it is one without a gradient."""
        start = time.perf_counter()
        output = passes(*inputs, **kwargs)
        if not torch.is_grad_enabled():
            turns.clock["passes"] += time.perf_counter() - start
        return output

    trainer._generate_and_score_completions, trainer._get_per_token_logps_and_entropies = scored, forward
    return trainer


def fastest(candidates: list[int], seconds) -> int:
    """The candidate of the fewest seconds, all of which are shown."""
    taken = {candidate: seconds(candidate) for candidate in candidates}
    print(", ".join(f"{candidate}: {value:.2f} s" for candidate, value in taken.items()))
    return min(taken, key=taken.get)


def compare(seen: list, other: list, model, peer, start: list[torch.Tensor]) -> dict[str, float]:
    """Largest relative difference of loss and norm of the updates of a rollout; that of the way gone from `start`."""
    updates = list(zip(seen, other, strict=True))
    apart = {name: max(abs(one[name] / two[name] - 1) for one, two in updates) for name in ("loss", "grad_norm")}
    pairs = list(zip(model.parameters(), peer.parameters(), start, strict=True))
    between = sum(float((one - two).detach().square().sum()) for one, two, _ in pairs)
    gone = sum(float((two - before).detach().square().sum()) for _, two, before in pairs)
    return apart | {"way": (between / gone) ** 0.5}


def print_table(rollouts: list, pairs: list[tuple[dict, dict]]) -> None:
    """Tokens a second of either side and their ratio, medians over the repeats; and how full their rectangles are."""
    sampled = np.array([sum(map(len, responses)) for _, responses, _ in rollouts])
    read = sampled + np.array([sum(map(len, prompts)) for prompts, _, _ in rollouts])
    print("| | TRL | ours | ours / TRL |\n|---|---|---|---|")
    for name, tokens, part in (
        ("updates, sampled tokens/s", sampled, "update"),
        ("updates, all tokens/s", read, "update"),
        ("passes and updates, sampled tokens/s", sampled, "whole"),
        ("passes and updates, all tokens/s", read, "whole"),
        ("tokens of 100 positions", 100 * read, "padded"),
    ):
        theirs, seen = (tokens / np.array([pair[side][part] for pair in pairs]) for side in (0, 1))
        ratio = seen / theirs
        shown = f"{median(ratio):.2f} [{min(ratio):.2f}, {max(ratio):.2f}]"
        print(f"| {name} | {median(theirs):,.0f} | {median(seen):,.0f} | {shown} |")


def parse() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--mini_batch", type=int, default=128)
    parser.add_argument("--prompt", type=float, default=80, help="mean tokens")
    parser.add_argument("--response", type=float, default=45, help="mean tokens")
    parser.add_argument("--spread", type=float, default=0.5, help="coefficient of variation of both")
    parser.add_argument("--kl_coef", type=float, default=0.01, help="0: TRL has no reference then")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--trl_rows", default="4,8,16,32,64,128", help="rows of its micro-batch to choose from")
    parser.add_argument("--our_tokens", default="1024,2048,4096,8192,16384", help="tokens of our micro-batch")
    return parser.parse_args()


def main() -> None:
    """Pick micro-batches, take turns, print the table."""
    args = parse()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.disable_progress_bar()
    tokenizer, rng = tiny_tokenizer(WORDS), np.random.default_rng(0)
    pad, folder = tokenizer.pad_token_id, tempfile.TemporaryDirectory()
    first = tiny_model(len(tokenizer), args.hidden, args.layers, tokenizer.eos_token_id, pad)
    first.save_pretrained(folder.name)
    fresh = partial(type(first).from_pretrained, folder.name)
    rollouts = [make_rollout(args, len(tokenizer), rng) for _ in range(args.repeats + 1)]
    parts = np.array_split(rng.permutation(args.rows), args.rows // args.mini_batch)

    def ours(budget: int) -> Ours:
        """A side of ours with this micro-batch."""
        return Ours(fresh(), fresh().requires_grad_(False), args, budget, pad)

    def our_seconds(budget: int) -> float:
        """Of the updates of a rollout, behind one to warm up."""
        side, advantages = ours(budget), torch.randn(args.rows)
        return [side.turn(rollouts[0], parts, advantages)["update"] for _ in range(2)][-1]

    def trl_seconds(rows: int) -> float:
        """The same of TRL's."""
        seen = []
        model = fresh()
        trl_trainer(model, tokenizer, args, rollouts[:2], rows, folder.name, lambda _, one: seen.append(one)).train()
        return seen[-1]["update"]

    print("updates of a rollout by tokens of our micro-batch: ", end="")
    side = ours(fastest([int(value) for value in args.our_tokens.split(",")], our_seconds))
    print("by rows of TRL's: ", end="")
    rows = fastest([int(value) for value in args.trl_rows.split(",")], trl_seconds)
    peer, pairs, apart = fresh(), [], []

    def take_turn(trainer, theirs: dict) -> None:
        """Ours, on the rollout and in the mini-batches that TRL has just trained on."""
        start = [parameter.detach().clone() for parameter in side.model.parameters()]
        each, count = trainer._buffered_inputs, args.rows // args.mini_batch
        order, advantages = torch.cat([one["row"] for one in each]), torch.empty(args.rows)
        advantages[order] = torch.cat([one["advantages"] for one in each])
        seen = side.turn(rollouts[len(pairs)], order.view(count, -1).tolist(), advantages)
        pairs.append((theirs, seen))
        apart.append(compare(seen["seen"], theirs["seen"], side.model, peer, start))
        side.model.load_state_dict(peer.state_dict())
        side.optimizer.load_state_dict(deepcopy(trainer.optimizer.state_dict()))

    trl_trainer(peer, tokenizer, args, rollouts, rows, folder.name, take_turn).train()
    size = sum(parameter.numel() for parameter in peer.parameters())
    print(f"{size / 1e6:.2f} M parameters, float32, one thread; TRL {version('trl')}, {args.repeats} repeats\n")
    print_table(rollouts[1:], pairs[1:])
    worst = {name: max(one[name] for one in apart) for name in apart[0]}
    print("\nLargest relative difference:", ", ".join(f"{name} {value:.1e}" for name, value in worst.items()))
    assert max(worst["loss"], worst["grad_norm"]) < 1e-4 and worst["way"] < 1e-3, "the work is not equal"


if __name__ == "__main__":
    main()
