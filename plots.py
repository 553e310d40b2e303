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


def read_metrics(path: Path) -> list[dict]:
    """The objects of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def plot_curves(folder: Path, title: str) -> Path:
    """Draw the PANELS of a run over its steps to folder/curves.png."""
    metrics = read_metrics(folder / "metrics.jsonl")
    figure, axes = plt.subplots(2, 3, figsize=(12, 6), layout="constrained")
    for axis, (name, keys) in zip(axes.flat, PANELS.items(), strict=True):
        for key in keys:
            points = [(m["step"], m[key]) for m in metrics if m.get(key) is not None]
            held_out = key.startswith("eval/")
            axis.plot(
                *zip(*points, strict=True) if points else ((), ()),
                marker="o" if held_out else None,
                ms=4,
                lw=1.6,
                color="#D55E00" if held_out else "#0072B2",
                label="held out" if held_out else "training",
            )
            if held_out:
                bounds = [(m["step"], m["eval/success_low"], m["eval/success_high"]) for m in metrics if key in m]
                axis.fill_between(*zip(*bounds, strict=True), color="#D55E00", alpha=0.2, lw=0)
        axis.set_title(name)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylim(0, 1)
    axes[0, 0].legend(loc="lower right")
    figure.suptitle(title)
    figure.savefig(folder / "curves.png", dpi=110)
    plt.close(figure)
    return folder / "curves.png"
