"""Numbers of a run by task: `paper` (Table 6, taken with --model) and `tiny` (ours, for the built-in model).

A recipe is the task's common numbers, then those of the chosen surrogate, then those of the chosen advantage. What
Table 6 leaves open is marked "ours". Keys are fields of config.Config.
"""

# Table 6's PO-specific rows, alike for ALFWorld, WebShop and Sokoban but for GSPO's clip on WebShop. SAMPO: GSPO's.
NUMBERS = {
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.2},
    "cispo": {"clip_low": 1.0, "clip_high": 0.2},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
    "gspo": {"clip_low": 3e-3, "clip_high": 4e-3},
    "grpo": {},
    "gigpo": {"gamma": 0.95, "omega": 1.0},
    "empg": {"k": 1.0, "k_next": 1.0, "zeta": 0.05},
}

PAPER = {
    "group_size": 8,
    "groups_per_step": 16,
    "penalty": 0.1,
    "kl_coef": 0.01,
    "learning_rate": 1e-6,
    "temperature": 1.0,
    "eval_temperature": 0.6,
    "eval_top_p": 0.95,
    "eval_top_k": 20,
    "eval_levels": 128,
    "max_tries": 3,
    "steps": 200,
    "delta": 3e-3,  # the released scripts; not in the paper
    # Ours from here: cloning follows the released SFT script in batch and learning rate.
    "sft_data": "rollouts",
    "sft_episodes": 512,
    "sft_steps": 100,
    "sft_batch": 16,
    "sft_learning_rate": 1e-5,
    "tokens_per_micro_batch": 16384,
    "dtype": "float32",  # an update of 1e-6 is lost in bfloat16 parameters
    "max_minutes": 0.0,
}

# Ours. Responses are eight tokens long, so the clip widths of whole turns and delta are ten times Table 6's.
TINY_NUMBERS = {"gspo": {"clip_low": 0.03, "clip_high": 0.04}}
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
    "sft_data": "expert",
    "sft_episodes": 2000,
    "sft_steps": 500,
    "sft_batch": 128,
    "sft_learning_rate": 3e-3,
    "max_prompt_tokens": 128,
    "max_response_tokens": 12,
    "tokens_per_micro_batch": 16384,
    "dtype": "float32",
    "max_minutes": 10.0,
}

# What the authors' released code amounts to, beyond its place in METHODS.
SAMPO_RELEASED = {
    "baseline": "turn",
    "penalty_scope": "turn_local",
    "inadmissible_is_invalid": True,
    "entropy_coef": 0.001,
    "filter_cold_start": 15,
    "fill_uniform": True,
}

# task -> set -> (common numbers, exceptions to NUMBERS)
RECIPES = {
    "sokoban": {
        "paper": (
            PAPER
            | {
                "groups_per_step": 32,
                "mini_batch": 64,
                "max_prompt_tokens": 1024,
                "max_response_tokens": 512,
                "eval_temperature": 0.7,
                "max_turns": 15,
                "history": 2,
                "prompt_style": "words",
                "observation": "grid",
                "max_walls": 6,  # ours, like the shortest and longest solution: rooms are not gym-sokoban's
                "min_solution": 1,
                "max_solution": 12,
            },
            {},
        ),
        "tiny": (
            TINY
            | {
                "max_turns": 12,
                "history": 0,
                "prompt_style": "compact",
                "observation": "coords",
                "max_walls": 1,
                "min_solution": 3,
                "max_solution": 8,
            },
            TINY_NUMBERS,
        ),
    },
}


def recipe(task: str, which: str, surrogate: str, advantage: str) -> list[tuple[str, dict]]:
    """Layers [(where from, numbers)] of a task's recipe, later ones win; a user's own task takes TINY or PAPER."""
    bare = (PAPER, {}) if which == "paper" else (TINY, TINY_NUMBERS)
    common, exceptions = RECIPES.get(task, {}).get(which, bare)
    layers = [(f"{task} {which}", common)]
    for part in (surrogate, advantage):
        layers.append((f"{task} {which} {part}", NUMBERS[part] | exceptions.get(part, {})))
    return layers
