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

from records import cut

KEEP = 2


@dataclass
class Progress:
    """Where a run stands, beside its parameters, optimizer and random states."""

    step: int = -1  # the last one done; 0 is cloning
    position: int = 0  # of the stream of training tasks
    updates: int = 0  # optimizer steps so far
    launched: str = ""  # on how many processes, and how
    metrics_size: int = 0  # bytes of metrics.jsonl
    rollouts_size: int = 0  # bytes of rollouts.jsonl.gz
    cloning_loss: float | None = None  # of the last cloning step
    seconds: dict[str, float] = field(default_factory=dict)  # by what they went into
    results: dict[str, dict] = field(default_factory=dict)  # by policy and panel


def write_json(path: Path, content: dict, indent: int | None = 1) -> None:
    """Write a file as a whole or not at all: a process that is killed, or a full disk, leaves the one before."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(content, indent=indent) + "\n")
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


def where_to_go_on(run_folder: Path, resume: bool, steps: int, launched: str) -> tuple[Path | None, Progress]:
    """The newest checkpoint of a run that is resumed, or None, and the progress it holds. ValueError if it cannot."""
    path = newest(run_folder) if resume else None
    if not path:
        metrics = run_folder / "metrics.jsonl"
        if resume and metrics.exists() and metrics.read_text().count("\n") > 1:
            raise ValueError(f"--resume: {run_folder} has steps but no complete checkpoint; allowed is --overwrite")
        return None, Progress(launched=launched)
    progress = read_progress(path)
    if steps < progress.step or steps == progress.step and (run_folder / "results.json").exists():
        raise ValueError(f"--steps {steps}: {run_folder} is finished up to step {progress.step}; allowed is more")
    if progress.launched not in ("", launched):
        raise ValueError(
            f"--resume: {path} was saved by {progress.launched}, this is {launched}; allowed is the same, "
            "as every process has random states and shards of its own"
        )
    return path, progress


def open_folder(folder: Path, settings: dict, path: Path | None, progress: Progress) -> None:
    """A new run folder, or that of a run to go on with from the checkpoint `path`, its files cut to where that was."""
    if path:
        print(f"going on from {path}", file=sys.stderr)
        (folder / "results.json").unlink(missing_ok=True)
        cut(folder / "metrics.jsonl", progress.metrics_size)
        cut(folder / "rollouts.jsonl.gz", progress.rollouts_size)
    else:
        if settings["resume"]:
            print(f"no complete checkpoint in {folder}: starting anew", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    write_json(folder / "config.json", settings)
    (folder / "metrics.jsonl").touch()


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
