"""Checkpoints: all that a run needs to go on exactly, written under a temporary name and marked complete last.

    <run>/checkpoints/step-20/    model, optimizer and random states (Accelerate), progress.json, complete

The two newest are kept. `complete` lists the other files with their sizes, so that a folder that was cut, or copied
by half, is told from a good one.
"""

import json
import os
import shutil
import signal
import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from safetensors import SafetensorError

KEEP = 2


@dataclass
class Progress:
    """Where a run stands, beside its parameters, optimizer and random states."""

    step: int = -1  # the last one done; 0 is cloning
    position: int = 0  # of the stream of training tasks
    metrics_size: int = 0  # bytes of metrics.jsonl
    rollouts_size: int = 0  # bytes of rollouts.jsonl.gz
    cloning_loss: float | None = None  # of the last cloning step
    seconds: dict[str, float] = field(default_factory=dict)  # by what they went into
    results: dict[str, dict] = field(default_factory=dict)  # by policy and panel


def write_json(path: Path, content: dict) -> None:
    """Write a file as a whole or not at all: a process that is killed, or a full disk, leaves the one before."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(content, indent=1))
    os.replace(partial, path)


def save(accelerator, run_folder: Path, progress: Progress) -> Path:
    """Write a checkpoint, then remove all but the newest KEEP. OSError if it cannot be written; others stay intact."""
    final = run_folder / "checkpoints" / f"step-{progress.step}"
    partial = final.with_suffix(".partial")
    try:
        if accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(partial))
        accelerator.wait_for_everyone()
        if not accelerator.is_main_process:
            return final
        (partial / "progress.json").write_text(json.dumps(asdict(progress), indent=1))
        files = [path for path in sorted(partial.rglob("*")) if path.is_file()]
        sizes = {str(path.relative_to(partial)): path.stat().st_size for path in files}
        (partial / "complete").write_text(json.dumps(sizes, indent=1))
        for path in [*files, partial / "complete"]:
            with open(path, "rb") as written:
                os.fsync(written.fileno())
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have errors of their own
        shutil.rmtree(partial, ignore_errors=True)
        kept = newest(run_folder)
        raise OSError(
            f"checkpoint {final} could not be written: {error}; {kept or 'no earlier one'} is intact"
        ) from error
    kept = [path for path in _by_step(run_folder) if is_complete(path)][-KEEP:]
    for path in _by_step(run_folder):
        if path not in kept:
            shutil.rmtree(path)
    return final


def _by_step(run_folder: Path) -> list[Path]:
    """Checkpoint folders by step, complete or not; temporary ones, and those of other names, are left alone."""
    folders = (run_folder / "checkpoints").glob("step-*")
    return sorted((p for p in folders if p.name[5:].isdecimal()), key=lambda path: int(path.name[5:]))


def is_complete(path: Path) -> bool:
    """Whether a checkpoint has its mark, and every file that the mark names at the size it names."""
    try:
        sizes = json.loads((path / "complete").read_text())
    except (OSError, ValueError):
        return False
    return all((path / name).is_file() and (path / name).stat().st_size == size for name, size in sizes.items())


def newest(run_folder: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None; says on stderr what it skips."""
    for path in sorted((run_folder / "checkpoints").glob("step-*.partial")):
        print(f"{path}: left by a save that was interrupted; skipped", file=sys.stderr)
    for path in reversed(_by_step(run_folder)):
        if is_complete(path):
            return path
        print(f"{path}: not complete; skipped", file=sys.stderr)
    return None


def read_progress(path: Path) -> Progress:
    """The progress that a checkpoint holds."""
    return Progress(**json.loads((path / "progress.json").read_text()))


@contextmanager
def noted_signals():
    """SIGTERM and a first Ctrl-C, unless ignored, are noted in the list that is yielded; a second one acts as ever."""
    noted, before = [], {}

    def note(number, frame):
        noted.append(number)
        signal.signal(number, before[number])

    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, note)
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
