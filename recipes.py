"""Numbers of a run by task: `paper` (Table 6, taken with --model) and `tiny` (ours, for the built-in model).

A recipe is the task's common numbers, then those of the chosen surrogate, then those of the chosen advantage. What
Table 6 leaves open is marked "ours". Keys are fields of config.Config.
"""

# Table 6's PO-specific rows, alike for all tasks but for what EXCEPTIONS says. SAMPO has no row; it takes GSPO's.
NUMBERS = {
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.2},
    "cispo": {"clip_low": 1.0, "clip_high": 0.2},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
    "gspo": {"clip_low": 3e-3, "clip_high": 4e-3},
    "grpo": {},
    "gigpo": {"gamma": 0.95, "omega": 1.0},
    "empg": {"k": 1.0, "k_next": 1.0, "zeta": 0.05, "mask_invalid": False},  # it looks at every turn
}
EXCEPTIONS = {
    "webshop paper": {"gspo": {"clip_low": 3e-2, "clip_high": 4e-2}},
    "tir_math paper": {  # for a ratio per trajectory
        "ppo_clip": {"clip_low": 0.2, "clip_high": 0.28},
        "cispo": {"clip_low": 1.0, "clip_high": 0.28},
        "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    },
    # Ours: responses are eight tokens long, so the clip widths of whole turns, and delta, are ten times Table 6's.
    "tiny": {"gspo": {"clip_low": 0.03, "clip_high": 0.04}},
}

PAPER = {  # cloning (RFT) of the model comes first, so that it is the paper's Qwen3-4B-RFT that RL starts from
    "model": "Qwen/Qwen3-4B",
    "group_size": 8,
    "groups_per_step": 16,
    "penalty": 0.1,
    "std": True,
    "learning_rate": 1e-6,
    "kl_coef": 0.01,
    "temperature": 1.0,
    "eval_temperature": 0.6,
    "eval_top_p": 0.95,
    "eval_top_k": 20,
    "eval_levels": 128,
    "max_tries": 3,
    "kv_cache_gib": 32.0,  # ours
    "history": 2,
    "prompt_style": "words",
    "catalogue": "official",
    "steps": 200,
    "delta": 3e-3,  # the released scripts; not in the paper
    "entropy_threshold": 0.45,  # the released notebook behind Figure 3
    # Ours from here: cloning follows the released SFT script in batch and learning rate.
    "sft_data": "rollouts",
    "sft_episodes": 512,
    "sft_steps": 100,
    "sft_batch": 16,
    "sft_learning_rate": 1e-5,
}

# Ours.
TINY = {
    "group_size": 8,
    "groups_per_step": 16,
    "mini_batch": 256,
    "penalty": 0.1,
    "kl_coef": 0.01,
    "learning_rate": 3e-4,
    "temperature": 1.0,
    "eval_temperature": 1.0,
    "eval_top_p": 1.0,
    "eval_top_k": 0,
    "eval_levels": 480,
    "max_tries": 3,
    "steps": 100,
    "delta": 0.03,
    "entropy_threshold": 0.15,
    "sft_data": "expert",
    "sft_episodes": 2000,
    "sft_steps": 500,
    "sft_batch": 128,
    "sft_learning_rate": 3e-3,
    "max_prompt_tokens": 128,
    "max_response_tokens": 12,
    "max_minutes": 10.0,
    "prompt_style": "compact",
}

RECIPES = {
    "alfworld paper": PAPER
    | {"mini_batch": 256, "max_turns": 50, "max_prompt_tokens": 2048, "max_response_tokens": 512, "games": "official"},
    "webshop paper": PAPER
    | {"mini_batch": 128, "max_turns": 15, "max_prompt_tokens": 4096, "max_response_tokens": 512},
    "sokoban paper": PAPER  # its model is ours: the paper's Qwen3-VL-4B-Instruct reads images
    | {
        "groups_per_step": 32,
        "mini_batch": 64,
        "max_turns": 15,
        "max_prompt_tokens": 1024,
        "max_response_tokens": 512,
        "eval_temperature": 0.7,
        "observation": "grid",
        "max_walls": 6,  # ours, like the shortest and longest solution: rooms are not gym-sokoban's
        "min_solution": 1,
        "max_solution": 12,
    },
    "tir_math paper": PAPER
    | {
        "model": "Qwen/Qwen3-4B-Base",
        "group_size": 5,
        "groups_per_step": 512,
        "mini_batch": 640,  # 128 prompts of 5 trajectories, a row each
        "penalty": 0.0,  # Table 6 lists .1; a turn without code or answer masks its trajectory instead
        "kl_coef": 0.0,
        "max_turns": 5,
        "max_prompt_tokens": 8196,
        "max_response_tokens": 4096,
        "history": 0,  # the context grows; its limit is max_prompt_tokens
        "sequence": "trajectory",
        "mask_invalid": True,
        "problems": "official",
        "eval_levels": 60,  # ours: as many as AIME24 and AIME25 have
        "steps": 17,
        "sft_steps": 0,  # the paper starts from Base
    },
    "alfworld tiny": TINY | {"max_turns": 30, "max_prompt_tokens": 256, "max_response_tokens": 20, "games": "own"},
    "sokoban tiny": TINY
    | {"max_turns": 12, "observation": "coords", "max_walls": 1, "min_solution": 3, "max_solution": 8},
    "tir_math tiny": TINY
    | {
        "mini_batch": 32,  # trajectories
        "penalty": 0.0,
        "max_turns": 5,
        "max_response_tokens": 20,
        "sequence": "trajectory",
        "mask_invalid": True,
    },
    "webshop tiny": TINY | {"max_turns": 15, "max_response_tokens": 20},
}

# What the authors' released code amounts to, beyond its place in METHODS. On WebShop its filter never starts, and the
# parser does not look whether an action is admissible. For TIR Math it has no SAMPO.
SAMPO_RELEASED = {
    "baseline": "turn",
    "penalty_scope": "turn_local",
    "inadmissible_is_invalid": True,
    "entropy_coef": 0.001,
    "filter_cold_start": 15,
    "fill_uniform": True,
}
SAMPO_RELEASED_WEBSHOP = {
    "clip_low": 3e-3,
    "clip_high": 4e-3,
    "std": False,
    "dynamic_sampling": False,
    "inadmissible_is_invalid": False,
    "steps": 250,
}


def recipe(task: str, which: str, method: str, surrogate: str, advantage: str) -> list[tuple[str, dict]]:
    """Layers [(where from, numbers)] of a task's recipe, later ones win; a user's own task takes PAPER or TINY.

    Raises ValueError for what the released code does not have.
    """
    if method == "sampo_released" and task == "tir_math":
        raise ValueError("--method sampo_released: the released code has it for other tasks than tir_math")
    name = f"{task} {which}"
    common = RECIPES.get(name, PAPER if which == "paper" else TINY)
    layers = [(name, common)]
    for part in (surrogate, advantage):
        layers.append(
            (f"{name} {part}", NUMBERS[part] | EXCEPTIONS.get(name, EXCEPTIONS.get(which, {})).get(part, {}))
        )
    if method == "sampo_released":
        layers.append((method, SAMPO_RELEASED | (SAMPO_RELEASED_WEBSHOP if task == "webshop" else {})))
    return layers


def print_recipes(tasks) -> None:
    """Every task with its recipes; one that is not among `tasks` cannot be played yet."""
    for task in dict.fromkeys([*tasks, *(name.split()[0] for name in RECIPES)]):
        sets = ", ".join(name.split()[1] for name in RECIPES if name.split()[0] == task)
        print(f"{task:12} {sets}" + ("" if task in tasks else "   (numbers alone: there is no task of that name yet)"))
