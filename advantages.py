"""Advantages of turns: numpy arrays of length N, one entry per turn, in any order. Critic-free, relative to a group.

    ADVANTAGES[name](turns, *, numbers) -> advantages [N], float64

A group is all trajectories of one task instance. A constant group gets exactly 0, and so does a group of one: never
NaN, never the raw reward. Paper: arXiv 2602.21534, Appendix A.3.
"""

from dataclasses import dataclass, fields

import numpy as np
from numpy import ndarray

EPS = 1e-6  # added to the standard deviation; also the relative spread below which a group counts as constant


@dataclass(frozen=True)
class TurnTable:
    """What an advantage may know of a batch: one entry per turn, every field [N]. Raises ValueError on bad input."""

    group: ndarray  # int64, task instance, global over ranks
    trajectory: ndarray  # int64, global over ranks and groups
    turn: ndarray  # int64, position in its trajectory, 0..K-1
    state: ndarray  # int64, digest of the state the turn acted in
    reward: ndarray  # float64, from the environment, without penalty
    valid: ndarray  # bool, whether the response had the required format
    success: ndarray  # bool, whether the turn's trajectory succeeded
    entropy: ndarray  # float64, nats, old policy, mean over the turn's tokens

    def __post_init__(self):
        dtypes = {"reward": np.float64, "entropy": np.float64, "valid": bool, "success": bool}
        for name in (field.name for field in fields(self)):
            dtype, column = dtypes.get(name, np.int64), np.asarray(getattr(self, name))
            if not np.array_equal(column.astype(dtype), column, equal_nan=dtype is np.float64):
                raise ValueError(f"{name} of {column.dtype}: allowed are values of {dtype.__name__}")
            object.__setattr__(self, name, column.astype(dtype))
        shapes = {field.name: getattr(self, field.name).shape for field in fields(self)}
        if self.group.ndim != 1 or len(set(shapes.values())) != 1:
            raise ValueError(f"shapes {shapes}: allowed is one shape [N] for all")
        for name in ("reward", "entropy"):
            if not np.isfinite(getattr(self, name)).all():
                raise ValueError(f"{name} has a non-finite entry: allowed are finite numbers")
        if (self.turn < 0).any():
            raise ValueError(f"turn {self.turn.min()}: allowed is 0 and up")
        if len(np.unique(pair_ids(self.trajectory, self.turn))) != len(self.turn):
            raise ValueError("(trajectory, turn) occurs twice: allowed is one entry per turn")
        if len(np.unique(pair_ids(self.trajectory, self.group))) != len(np.unique(self.trajectory)):
            raise ValueError("a trajectory stands in two groups: allowed is one")


def pair_ids(first: ndarray, second: ndarray) -> ndarray:
    """An int64 id [N] for each distinct pair of ids, first [N] and second [N]."""
    _, i = np.unique(first, return_inverse=True)
    values, j = np.unique(second, return_inverse=True)
    return i * max(1, len(values)) + j


def group_advantages(values: ndarray, groups: ndarray, *, std: bool = True) -> ndarray:
    """Values relative to their group (paper Eq. 23, 26); values [N], groups [N] of ids -> [N], float64.

        (values - mean(group)) / (std(group) + 1e-6)     std with ddof 1; without std the difference alone

    Exactly 0 where max - min of the group is within 1e-6 * max(1, |max|), hence also for a group of one.
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or values.shape != np.shape(groups):
        raise ValueError(f"shapes {values.shape}, {np.shape(groups)}: allowed is one shape [N] for both")
    if not np.isfinite(values).all():
        raise ValueError("values have a non-finite entry: allowed are finite numbers")
    if not len(values):
        return values
    _, index, counts = np.unique(groups, return_inverse=True, return_counts=True)  # index [N], counts [G]
    mean = np.bincount(index, values) / counts
    centred = values - mean[index]
    starts = np.cumsum(counts) - counts
    by_group = values[np.argsort(index, kind="stable")]
    high, low = np.maximum.reduceat(by_group, starts), np.minimum.reduceat(by_group, starts)
    constant = high - low <= EPS * np.maximum(1, np.abs(high))
    scale = np.sqrt(np.bincount(index, centred**2) / np.maximum(counts - 1, 1)) + EPS if std else np.ones(len(counts))
    return np.where(constant[index], 0.0, centred / scale[index])


def step_returns(rewards: ndarray, trajectories: ndarray, turns: ndarray, gamma: float) -> ndarray:
    """Discounted return from each turn on: sum over m >= turn of gamma^(m - turn) * rewards of m (paper Eq. 25).

    rewards, trajectories, turns [N], rows in any order -> [N], float64. The loop runs over turns, not over rows.
    """
    if not np.shape(rewards) == np.shape(trajectories) == np.shape(turns):
        raise ValueError(f"shapes {[np.shape(x) for x in (rewards, trajectories, turns)]}: allowed is one shape [N]")
    if not len(rewards):
        return np.zeros(0)
    _, index = np.unique(trajectories, return_inverse=True)
    table = np.zeros((index.max() + 1, np.max(turns) + 1))  # [trajectories, turns]
    table[index, turns] = rewards
    for turn in range(table.shape[1] - 2, -1, -1):
        table[:, turn] += gamma * table[:, turn + 1]
    return table[index, turns]


def _penalised(turns: TurnTable, penalty: float, penalty_scope: str) -> tuple[ndarray, ndarray]:
    """Rewards [N] with the format penalty inside, and the part [N] that stays with its own turn, by penalty_scope.

    turn_sum: part of that turn's reward, hence of returns. episode: once, on the last turn, if any turn is invalid
    (the paper's words). turn_local: only on that turn's own values, after discounting (the released code).
    """
    invalid, none = ~turns.valid, np.zeros(len(turns.turn))
    if penalty_scope == "turn_sum":
        return turns.reward - penalty * invalid, none
    if penalty_scope == "turn_local":
        return turns.reward, penalty * invalid
    if penalty_scope != "episode":
        raise ValueError(f"penalty_scope {penalty_scope!r}: allowed are turn_sum, episode, turn_local")
    _, index = np.unique(turns.trajectory, return_inverse=True)
    any_invalid = np.bincount(index, invalid) > 0
    order = np.lexsort((turns.turn, index))
    last = np.zeros(len(turns.turn), bool)
    last[order] = np.diff(index[order], append=-1) != 0
    return turns.reward - penalty * (last & any_invalid[index]), none


def grpo(
    turns: TurnTable,
    *,
    std: bool = True,
    baseline: str = "trajectory",
    penalty: float = 0.1,
    penalty_scope: str = "turn_sum",
) -> ndarray:
    """GRPO: a trajectory's return relative to its group, the same for all of its turns (paper Eq. 22, 23) -> [N].

        R = sum of a trajectory's rewards;    advantages = (R - mean(group)) / (std(group) + 1e-6)

    baseline="trajectory" counts every trajectory once, whatever its length; "turn" counts it once per turn, as the
    released code does, which weighs long trajectories more.
    """
    rewards, local = _penalised(turns, penalty, penalty_scope)
    _, first, index = np.unique(turns.trajectory, return_index=True, return_inverse=True)
    returns = np.bincount(index, rewards)  # [trajectories]
    if baseline == "turn":
        return group_advantages(returns[index] - local, turns.group, std=std)
    if baseline != "trajectory" or penalty_scope == "turn_local":
        raise ValueError(
            f"baseline {baseline!r} with penalty_scope {penalty_scope!r}: allowed are trajectory, turn; "
            "turn_local goes with turn alone"
        )
    return group_advantages(returns, turns.group[first], std=std)[index]


def gigpo(
    turns: TurnTable,
    *,
    gamma: float = 0.95,
    omega: float = 1.0,
    std: bool = True,
    baseline: str = "trajectory",
    penalty: float = 0.1,
    penalty_scope: str = "turn_sum",
) -> ndarray:
    """GiGPO: GRPO plus a comparison of all turns of the group that acted in the same state (paper Eq. 24-27) -> [N].

        step       = group_advantages(step_returns(gamma), (group, state))
        advantages = grpo + omega * step

    A state that was visited once gets step 0. Two visits by one trajectory are two members.
    """
    rewards, local = _penalised(turns, penalty, penalty_scope)
    values = step_returns(rewards, turns.trajectory, turns.turn, gamma) - local
    step = group_advantages(values, pair_ids(turns.group, turns.state), std=std)
    episode = grpo(turns, std=std, baseline=baseline, penalty=penalty, penalty_scope=penalty_scope)
    return episode + omega * step


def empg(
    turns: TurnTable,
    *,
    k: float = 1.0,
    k_next: float = 1.0,
    zeta: float = 0.05,
    std: bool = True,
    baseline: str = "trajectory",
    penalty: float = 0.1,
    penalty_scope: str = "turn_sum",
) -> ndarray:
    """EMPG: sure turns weigh more, and steps towards sure turns earn a bonus (paper Eq. 28-31) -> [N].

        h          = (entropy - min) / (max - min)    over the batch, 0 where all are equal; the paper leaves it open
        advantages = exp(-k * h) / mean(exp(-k * h)) * grpo + zeta * exp(-k_next * h of the next turn)

    No bonus on a last turn; the mean over the batch is subtracted at the end. The next turn is found by
    (trajectory, turn).
    """
    advantages = grpo(turns, std=std, baseline=baseline, penalty=penalty, penalty_scope=penalty_scope)
    if not len(advantages):
        return advantages
    spread = np.ptp(turns.entropy)
    h = (turns.entropy - turns.entropy.min()) / spread if spread > EPS else np.zeros(len(advantages))
    weight = np.exp(-k * h)
    order = np.lexsort((turns.turn, turns.trajectory))
    has_next = np.diff(turns.trajectory[order]) == 0
    bonus = np.zeros(len(h))
    bonus[order[:-1][has_next]] = np.exp(-k_next * h[order[1:][has_next]])
    modulated = weight / weight.mean() * advantages + zeta * bonus
    return modulated - modulated.mean()


ADVANTAGES = {"grpo": grpo, "gigpo": gigpo, "empg": empg}
