"""The formulas against those of others: log-probabilities of sampled tokens, surrogates, advantages; one thread, CPU.

    pip install -r benchmarks/requirements-formulas.txt && pip install --no-deps verl==0.9.1
    python benchmarks/formulas.py                       # all three tables
    python benchmarks/formulas.py logprobs              # against a full log_softmax; 15 GiB free; memory: Linux
    python benchmarks/formulas.py surrogates            # against verl and TRL
    python benchmarks/formulas.py advantages --verl_agent core_gigpo.py     # against verl and verl-agent

verl asks for an older transformers, hence --no-deps. core_gigpo.py is gigpo/core_gigpo.py of the GitHub repository
langfengQ/verl-agent, as in its fork zhengxuyu/verl-agent at commit 3d91c9b. A table without its peer is skipped.

Both sides do equal work, which is asserted, and take turns in one process; a ratio is the median [lowest, highest]
over repeats. Surrogates start from the layout of their side, with log-probabilities that want a gradient: here flat
sampled tokens [M] and the index of their sequence, there padded [B, T] with a mask. All report what was clipped: here
a mask of tokens, there means. Advantages: ours includes building and checking the TurnTable, the peers work on
responses of one token (theirs are [N, T], ours [N]) and are given their rewards by token.
"""

import argparse
import importlib.util
import io
import multiprocessing
import sys
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

import policy  # noqa: E402
from advantages import TurnTable, empg, gigpo, grpo, step_returns  # noqa: E402
from losses import SURROGATES, aggregate  # noqa: E402

HIDDEN, TEMPERATURE = 64, 0.7


def take_turns(sides: dict, repeats: int, calls: int = 1) -> dict[str, list[float]]:
    """Seconds of a call of each side in each repeat, after one that warms up."""
    seconds = defaultdict(list)
    for repeat in range(repeats + 1):
        for name, call in sides.items():
            start = time.perf_counter()
            for _ in range(calls):
                call()
            if repeat:
                seconds[name].append((time.perf_counter() - start) / calls)
    return seconds


def ratio(above: list[float], below: list[float]) -> str:
    """Median [lowest, highest] of above / below, repeat by repeat."""
    values = [a / b for a, b in zip(above, below, strict=True)]
    return f"{median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def missing(*packages: str) -> bool:
    """Whether a peer is not installed; says how to get it."""
    try:
        print("Peers: " + ", ".join(f"{package} {version(package)}" for package in packages))
        return False
    except PackageNotFoundError as error:
        print(f"Skipped, {error.name} is not installed: the first line of --help installs the peers")
        return True


def naive_scores(hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float, with_entropy: bool):
    """Log-probability and entropy [M] by the textbook: all logits [M, V] at once, autograd's own backward."""
    every = torch.log_softmax(F.linear(hidden, weight) / temperature, dim=-1)
    return every.gather(1, tokens[:, None])[:, 0], -(every.exp() * every).sum(-1) if with_entropy else None


def head_batch(tokens: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [M, H] and a head [V, H] that want gradients, and tokens [M]."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN).requires_grad_()
    weight = (0.2 * torch.randn(vocabulary, HIDDEN)).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, (tokens,))


def scored(form: str, batch: tuple, with_entropy: bool) -> list[Tensor]:
    """Forward and backward: log-probabilities, gradients of the hidden states and of the head, entropy if asked."""
    hidden, weight, tokens = batch
    scores = {"ours": policy.token_scores, "naive": naive_scores}[form]
    logprobs, entropy = scores(hidden, weight, tokens, TEMPERATURE, with_entropy)
    loss = (logprobs * torch.cos(tokens.float())).sum()  # any weights, of both signs
    if with_entropy:
        loss = loss + 0.1 * entropy.sum()
    gradients = torch.autograd.grad(loss, (hidden, weight))
    return [logprobs.detach(), *gradients, *([entropy.detach()] if with_entropy else [])]


def status(name: str) -> float:
    """A line of this process's status, in MiB."""
    return int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0]) / 1024


def extra_memory(form: str, tokens: int, vocabulary: int, with_entropy: bool) -> float:
    """MiB by which forward and backward raise the resident memory at its peak, over their inputs; once a process."""
    torch.set_num_threads(1)
    batch = head_batch(tokens, vocabulary)
    scored(form, head_batch(64, 1000), with_entropy)  # loads what the first call loads
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = status("VmRSS")
    scored(form, batch, with_entropy)
    return status("VmHWM") - before


def logprobs_table(args) -> None:
    """token_scores against the naive form: memory, each measurement in a process of its own, and time."""
    vocabulary, few, many, timed = args.vocabulary, args.tokens // 8, args.tokens, args.tokens // 4
    print(f"\n## Log-probabilities: {vocabulary:,} words, {HIDDEN} hidden, float32, forward and backward\n")
    print("| extra peak memory, MiB | tokens | without entropy | with entropy |\n|---|---|---|---|")
    peaks = {}
    for form, tokens in (("ours", many), ("naive", few)):
        for entropy in (False, True):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                peaks[form, tokens, entropy] = pool.submit(extra_memory, form, tokens, vocabulary, entropy).result()
        print(f"| {form} | {tokens:,} |", *(f" {peaks[form, tokens, e]:,.0f} |" for e in (False, True)))
    print(f"| naive, by proportion | {many:,} |", *(f" {8 * peaks['naive', few, e]:,.0f} |" for e in (False, True)))
    policy.LOGIT_BYTES = min(policy.LOGIT_BYTES, 4 * vocabulary * timed // 8)
    print(f"\n{timed:,} tokens, ours in {-(-timed // (policy.LOGIT_BYTES // (4 * vocabulary)))} chunks\n")
    print("| time | naive, s | ours, s | ours / naive |\n|---|---|---|---|")
    batch = head_batch(timed, vocabulary)
    for with_entropy in (False, True):
        results = zip(*(scored(form, batch, with_entropy) for form in ("naive", "ours")), strict=True)
        for (theirs, mine), tolerance in zip(results, (1e-5, 1e-4, 1e-4, 1e-5), strict=False):
            torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)
        seconds = take_turns({f: partial(scored, f, batch, with_entropy) for f in ("naive", "ours")}, args.repeats)
        times = " | ".join(f"{median(seconds[form]):.2f}" for form in ("naive", "ours"))
        print(f"| {'with' if with_entropy else 'no'} entropy | {times} | {ratio(seconds['ours'], seconds['naive'])} |")


def padded_batch(ragged: bool, sequences: int, limit: int) -> SimpleNamespace:
    """Sequences of a policy a little off the old one, padded [B, T] and flat [M]."""
    rng = np.random.default_rng(0)
    lengths = rng.gamma(4, limit / 10, sequences).round().clip(1, limit) if ragged else np.full(sequences, limit)
    mask = torch.as_tensor(np.arange(lengths.max()) < lengths[:, None])  # [B, T]
    old = torch.as_tensor(-rng.exponential(1, mask.shape), dtype=torch.float32)
    logprobs = old + torch.as_tensor(rng.normal(0, 0.3, mask.shape), dtype=torch.float32)
    advantages = torch.as_tensor(rng.normal(size=sequences), dtype=torch.float32)  # [B]
    sequence = torch.arange(sequences)[:, None].expand(mask.shape)[mask]
    flat = {"logprobs": logprobs[mask].requires_grad_(), "old": old[mask], "advantages": advantages[sequence]}
    padded = {"logprobs": (logprobs * mask).requires_grad_(), "old": old * mask, "advantages": advantages}
    sizes = {"mask": mask, "lengths": lengths, "tokens": len(sequence), "sequences": sequences}
    return SimpleNamespace(flat=SimpleNamespace(**flat, sequence=sequence), padded=SimpleNamespace(**padded), **sizes)


def our_loss(batch, name: str, aggregation: str, numbers: dict) -> Tensor:
    """Surrogate and aggregate on flat tokens."""
    flat = batch.flat
    losses, _ = SURROGATES[name](flat.logprobs, flat.old, flat.advantages, flat.sequence, **numbers)
    return aggregate(losses, flat.sequence, aggregation, num_tokens=batch.tokens, num_sequences=batch.sequences)


def verl_side(batch, name: str, aggregation: str, numbers: dict):
    """verl's policy loss with its metrics; its advantages are [B, T]."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig

    own = {"clip_low": "clip_ratio_low", "clip_high": "clip_ratio_high", "dual_clip": "clip_ratio_c"}
    settings = {"clip_ratio_c": 1e9} | {own.get(key, key): value for key, value in numbers.items()}
    config = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **settings)
    function = get_policy_loss_fn("vanilla" if name == "ppo_clip" else name)
    mask = batch.mask.long()
    advantages = batch.padded.advantages[:, None] * mask
    return lambda: function(batch.padded.old, batch.padded.logprobs, advantages, mask, aggregation, config)[0]


def trl_side(batch, name: str, aggregation: str, numbers: dict):
    """TRL's GRPOTrainer._compute_loss with its metrics, on a stand-in whose model gives the log-probabilities away."""
    from accelerate import Accelerator
    from trl.trainer.grpo_trainer import GRPOTrainer

    entropies, empty = torch.zeros_like(batch.padded.old), torch.zeros(batch.sequences, 0, dtype=torch.int64)
    settings = {"delta": numbers.get("dual_clip"), "steps_per_generation": 1}
    settings |= {"sapo_temperature_pos": numbers.get("tau_pos"), "sapo_temperature_neg": numbers.get("tau_neg")}
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (batch.padded.logprobs, entropies, None),
        args=SimpleNamespace(**settings),
        loss_type={"cispo": "cispo", "sapo": "sapo"}.get(name, "dapo"),
        importance_sampling_level="sequence" if name == "gspo" else "token",
        epsilon_low=numbers.get("clip_low"),
        epsilon_high=numbers.get("clip_high", 0.0) + (name == "cispo"),  # there it bounds the ratio itself
        accelerator=Accelerator(cpu=True),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        _metrics={"train": defaultdict(list)},
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        **dict.fromkeys(("beta", "aux_loss_enabled", "use_vllm", "_entropy_bonus_enabled"), 0),
    )
    inputs = {"prompt_ids": empty, "prompt_mask": empty, "completion_ids": empty}  # nobody reads tokens here
    inputs |= {"completion_mask": batch.mask.long(), "advantages": batch.padded.advantages}
    inputs |= {"old_per_token_logps": batch.padded.old, "num_items_in_batch": torch.tensor(batch.tokens)}
    return lambda: GRPOTrainer._compute_loss(trainer, None, inputs)


def step(leaf: Tensor, loss) -> float:
    """Forward, backward to the leaf; the loss."""
    leaf.grad = None
    value = loss()
    value.backward()
    return float(value.detach())


def surrogates_table(args) -> None:
    """Each surrogate with its aggregation, forward and backward, against verl and TRL, ragged and full."""
    if missing("verl", "trl"):
        return
    clip, mean = {"clip_low": 0.2, "clip_high": 0.28}, "token-mean"
    cases = [("ppo_clip", mean, clip), ("ppo_clip", mean, clip | {"dual_clip": 3.0})]
    cases += [("cispo", mean, {"clip_low": 1.0, "clip_high": 0.2})]
    cases += [("sapo", "seq-mean-token-mean", {"tau_pos": 1.0, "tau_neg": 1.05})]  # both peers' only aggregation
    cases += [("gspo", mean, {"clip_low": 0.01, "clip_high": 0.01})]
    for ragged in (True, False):
        batch = padded_batch(ragged, args.sequences, 512)
        spread, padding = np.std(batch.lengths) / np.mean(batch.lengths), 1 - batch.tokens / batch.mask.numel()
        print(f"\n## Surrogates: {batch.sequences} sequences, {batch.tokens:,} tokens, forward and backward\n")
        print(f"Lengths vary by {spread:.2f} of their mean; peers: {tuple(batch.mask.shape)}, {padding:.0%} padding\n")
        print("| surrogate, aggregation | verl, ms | TRL, ms | ours, ms | ours / verl | ours / TRL | ours / faster |")
        print("|---|---|---|---|---|---|---|")
        for name, aggregation, numbers in cases:
            case, leaf = (batch, name, aggregation, numbers), batch.padded.logprobs
            sides = {"verl": partial(step, leaf, verl_side(*case)), "TRL": partial(step, leaf, trl_side(*case))}
            sides |= {"ours": partial(step, batch.flat.logprobs, partial(our_loss, *case))}
            for peer in ("verl", "TRL"):
                assert abs(sides[peer]() - sides["ours"]()) < 1e-5, (name, peer)
                theirs = leaf.grad[batch.mask] * batch.tokens  # of a size around 1
                torch.testing.assert_close(batch.flat.logprobs.grad * batch.tokens, theirs, atol=1e-5, rtol=1e-5)
            seconds = take_turns(sides, args.repeats, calls=10)
            faster = [min(pair) for pair in zip(seconds["verl"], seconds["TRL"], strict=True)]
            label = f"{name}{', dual clip' if 'dual_clip' in numbers else ''}, {aggregation}"
            times = " | ".join(f"{1000 * median(seconds[side]):.2f}" for side in ("verl", "TRL", "ours"))
            ratios = " | ".join(ratio(seconds["ours"], below) for below in (seconds["verl"], seconds["TRL"], faster))
            print(f"| {label} | {times} | {ratios} |")


def turn_columns(groups: int, size: int) -> dict[str, np.ndarray]:
    """Columns of a TurnTable as a household task gives them: 5 to 25 turns, few states a group, reward at the end."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 26, groups * size)
    trajectory = np.repeat(np.arange(len(lengths)), lengths)
    turn = np.arange(len(trajectory)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    success, last = np.repeat(rng.random(len(lengths)) < 0.4, lengths), turn == np.repeat(lengths, lengths) - 1
    seen = np.where(turn == 0, 0, rng.geometric(0.06, len(turn)))  # all begin alike, common places repeat
    columns = {"group": trajectory // size, "trajectory": trajectory, "turn": turn, "state": seen}
    columns |= {"reward": 10.0 * (success & last), "valid": rng.random(len(turn)) > 0.1, "success": success}
    return columns | {"entropy": rng.gamma(2, 0.2, len(turn))}


def agree(ours: np.ndarray, theirs: Tensor, what: str) -> float:
    """Assert equality where ours is not exactly 0, and return the largest value of theirs where it is."""
    theirs, spread = theirs[:, 0].double().numpy(), ours != 0
    np.testing.assert_allclose(ours[spread], theirs[spread], rtol=1e-3, atol=1e-4, err_msg=what)
    return np.abs(theirs[~spread]).max(initial=0)


def peer_inputs(turns: TurnTable, penalty: np.ndarray) -> SimpleNamespace:
    """What the peers take: strings for ids and states, rewards by row [N, 1], returns of turns, penalties inside."""
    episode = np.bincount(turns.trajectory, turns.reward)[turns.trajectory]
    returned = step_returns(turns.reward, turns.trajectory, turns.turn, 0.95)
    group, trajectory = (np.array([f"{x:036d}" for x in ids], object) for ids in (turns.group, turns.trajectory))
    anchor = [f"You arrive at place {state}. On it, you see " + "a plate, " * 20 for state in turns.state]
    row, mask = partial(torch.as_tensor, dtype=torch.float32), torch.ones(len(episode), 1)
    played = {"rewards": turns.reward, "traj_uid": trajectory, "active_masks": np.ones(len(trajectory))}
    played = SimpleNamespace(non_tensor_batch=played, batch={"input_ids": mask})
    rewards = {"scores": row(episode - penalty)[:, None], "steps": row(returned - penalty), "penalty": row(penalty)}
    return SimpleNamespace(**rewards, ids=(np.array(anchor, object), group, trajectory), mask=mask, played=played)


def advantages_table(args) -> None:
    """GRPO and GiGPO by the released code's conventions against verl and verl-agent; EMPG alone."""
    if missing("verl"):
        return
    if not args.verl_agent:
        print("Skipped: --verl_agent is the path of gigpo/core_gigpo.py, from https://github.com/langfengQ/verl-agent")
        return
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    spec = importlib.util.spec_from_file_location("core_gigpo", args.verl_agent)
    core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core)
    columns = turn_columns(args.groups, 8)
    turns = TurnTable(**columns)
    given = peer_inputs(turns, 0.1 * ~turns.valid)

    def verl_agent(returns: bool, mode: str = "mean_std_norm"):
        with redirect_stdout(io.StringIO()):
            steps = (
                core.compute_step_discounted_returns(given.played, 0.95) - given.penalty if returns else given.steps
            )
            return core.compute_gigpo_outcome_advantage(given.scores, steps, given.mask, *given.ids, mode=mode)[0]

    released = {"baseline": "turn", "penalty": 0.1, "penalty_scope": "turn_local"}
    centred = gigpo(turns, std=False, **released)
    np.testing.assert_allclose(centred, verl_agent(True, "mean_norm")[:, 0].numpy(), rtol=1e-4, atol=1e-4)
    verl = partial(compute_grpo_outcome_advantage, given.scores, given.mask, given.ids[1])
    noise = agree(grpo(turns, **released), verl()[0], "grpo")
    with redirect_stdout(io.StringIO()):
        states = core.build_step_group(*given.ids[:2])
    step_part = gigpo(turns, **released) - grpo(turns, **released)
    step_part[np.abs(step_part) < 1e-9] = 0  # what the subtraction leaves
    noise_step = agree(step_part, core.step_norm_reward(given.steps, given.mask, states, remove_std=False), "gigpo")
    print(f"\n## Advantages: {len(turns.turn):,} turns, {8 * args.groups:,} trajectories, {args.groups} groups\n")
    print("Equal, with the baseline over turns and the penalty on its own turn alone. Where a group is constant, ours")
    print(f"is 0, and float32 leaves the peers up to {noise:.1g} (GRPO), {noise_step:.1g} (states of GiGPO).\n")
    print("| advantage | peer | peer, ms | ours, ms | peer / ours |\n|---|---|---|---|---|")
    ours = {"grpo": lambda: grpo(TurnTable(**columns), **released)}
    ours |= {"gigpo": lambda: gigpo(TurnTable(**columns), **released), "empg": lambda: empg(TurnTable(**columns))}
    cases = [("grpo", "verl", verl), ("gigpo", "verl-agent", partial(verl_agent, True))]
    cases += [("gigpo", "verl-agent, given its returns", partial(verl_agent, False))]
    for name, label, peer in cases:
        seconds = take_turns({"peer": peer, "ours": ours[name]}, args.repeats)
        times = " | ".join(f"{1000 * median(seconds[side]):,.1f}" for side in ("peer", "ours"))
        print(f"| {name} | {label} | {times} | {ratio(seconds['peer'], seconds['ours'])} |")
    print(f"| empg | none | | {1000 * median(take_turns({'': ours['empg']}, args.repeats)['']):,.1f} | |")


def main() -> None:
    """Print the tables asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = {"logprobs": logprobs_table, "surrogates": surrogates_table, "advantages": advantages_table}
    parser.add_argument("tables", nargs="*", help=f"{', '.join(tables)}; all where none is named")
    parser.add_argument("--verl_agent", help="path of verl-agent's core_gigpo.py")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--tokens", type=int, default=16_384, help="memory; a quarter of them for time")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--groups", type=int, default=160)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if set(args.tables) - set(tables):
        parser.error(f"tables {args.tables}: allowed are {', '.join(tables)}")
    for name in args.tables or tables:
        tables[name](args)


if __name__ == "__main__":
    main()
