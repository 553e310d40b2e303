"""Pictures of a run from its metrics.jsonl."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

PANELS = {
    "success": ("train/success", "eval/success"),
    "format_valid": ("format_valid",),
    "kl_ref": ("kl_ref",),
    "grad_norm": ("grad_norm",),
    "entropy": ("entropy",),
    "clip_frac": ("clip_frac",),
}
TRAINING, HELD_OUT = "#0072B2", "#D55E00"


def read_metrics(path: Path) -> list[dict]:
    """The objects of a metrics.jsonl; a last line that was cut is left out."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def plot_curves(folder: Path, title: str) -> Path:
    """Draw the PANELS of a run over its steps to folder/curves.png."""
    metrics = read_metrics(folder / "metrics.jsonl")
    figure, axes = plt.subplots(2, 3, figsize=(12, 6), layout="constrained")
    for axis, (name, keys) in zip(axes.flat, PANELS.items(), strict=True):
        for key in keys:
            known = [m for m in metrics if m.get(key) is not None]
            steps, values = [m["step"] for m in known], [m[key] for m in known]
            if key == "eval/success":
                low, high = ([m[f"{key}_{end}"] for m in known] for end in ("low", "high"))
                axis.fill_between(steps, low, high, color=HELD_OUT, alpha=0.2, lw=0)
                axis.plot(
                    steps, values, color=HELD_OUT, marker="o", ms=4, lw=1.6, label="held out, with 95 % interval"
                )
            else:
                axis.plot(steps, values, color=TRAINING, lw=1.6, label="training")
        axis.set_title(name)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylim(0, 1)
    axes[0, 0].legend(loc="lower right")
    figure.suptitle(title)
    figure.savefig(folder / "curves.png", dpi=110)
    plt.close(figure)
    return folder / "curves.png"
