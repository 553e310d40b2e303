"""The paper's study as one command: the same testbed under many methods, run by run, side by side, resumable.

    python lab.py sweep                        # Table 3: 13 methods x 3 seeds; two processes of one thread
    python lab.py collapse --seeds 0-4         # Figure 2, in a setting that is hard on a tolerant clip
    python lab.py report                       # tables, figures and verdicts, from results/ alone
    python lab.py sweep --task alfworld --model Qwen/Qwen3-4B --jobs 1 --launcher "accelerate launch ..."    # on GPUs

A run is named by its flags, so studies share runs. Whatever is not a flag of this file goes to every run. One cloned
policy a seed (`clone-seed0`) is where all methods start, unless a variant says --sft_steps 0 itself. A finished run is
skipped, a killed one goes on from its checkpoint, a failed one is noted and the rest goes on.

    runs/lab/<label>/<name>-seed<k>/       runs of train.py and their logs; checkpoints go once a run is finished
    results/<label>/<name>-seed<k>.json    what the report reads: curves and results, no weights
"""

import argparse
import fcntl
import json
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path

from tqdm import tqdm

import plots
import report
from checkpoint import write_json
from config import Parser, resolve
from grpo import METHODS

TABLE_3 = [method for method in METHODS if method != "sampo_released"]
FILTERED = {"grpo": "dapo", "gigpo": "dapo_gigpo"}


def from_start(*steps: str) -> dict[str, str | None]:
    """Variants that add up: each is compared with the one before."""
    return dict(zip(steps, (None, *steps), strict=False))


def studies(hard: str, large: int, steps: int, gspo: tuple[str, str]) -> dict[str, dict[str, str | None]]:
    """The variants of each study, as flags of train.py, and what each is compared with.

    hard: what makes a tolerant clip collapse; large: the mini-batch that is to help; steps: of the recipe; gspo: two
    other widths of its clip.
    """
    own_numbers = {  # one change at a time
        "grpo": ("--clip_low 0.1 --clip_high 0.1", "--clip_low 0.2 --clip_high 0.28"),
        "sapo": ("--tau_pos 2 --tau_neg 2.1", "--tau_pos 3 --tau_neg 3.15"),
        "cispo": ("--clip_high 0.1", "--clip_high 0.4"),
        "gspo": gspo,
        "gigpo": ("--omega 0.5", "--gamma 0.9"),
        "empg": ("--zeta 0", "--k 0.5 --k_next 0.5"),
        "dapo": ("--max_tries 2",),
    }
    return {
        "sweep": {f"--method {m}": None if m == "grpo" else "--method grpo" for m in TABLE_3},
        "collapse": {  # Figure 2
            f"--method {m}{hard}": None if m == "grpo" else f"--method grpo{hard}"
            for m in ("grpo", "gspo", "sampo", "sapo", "sapo_sm", "cispo", "cispo_sm")
        },
        "stabilise": {  # Table 4
            f"--method {m}{mask}{hard}{more}": f"--method {m}{hard}" if mask or more else None
            for m in ("cispo", "sapo")
            for mask, more in (("", ""), ("", " --kl_coef 0.05"), ("", f" --mini_batch {large}"), ("_sm", ""))
        },
        "staleness": {  # Table 5, at equal episodes
            f"--method grpo --groups_per_step 8 --steps {2 * steps} --eval_every 20": "--method grpo",
            "--method grpo": None,
            f"--method grpo --groups_per_step 32 --steps {steps // 2} --eval_every 5": "--method grpo",
        },
        "testbed": from_start(  # Table 2
            "--method grpo --sft_steps 0 --penalty 0 --kl_coef 0",
            "--method grpo --penalty 0 --kl_coef 0",
            "--method grpo --kl_coef 0",
            "--method grpo",
        ),
        "filter": {  # Finding 4
            f"--method {m}{scope}": None if m == without else f"--method {without}{scope}"
            for scope in report.SCOPES.values()
            for without, with_filter in FILTERED.items()
            for m in (without, with_filter)
        },
        "grid": {  # Section 3.1, (4)
            f"--method {m} {more}".strip(): f"--method {m}" if more else None
            for m, changes in own_numbers.items()
            for more in ("", *changes)
        },
    }


# Ours for the built-in model: four times its recipe's updates of a rollout, with larger steps. Table 6's setting is
# the one in which the paper saw a collapse.
HARD = {"tiny": " --learning_rate 5e-4 --mini_batch 128 --epochs 2 --steps 40", "paper": ""}
GSPO = {
    "tiny": ("--clip_low 0.003 --clip_high 0.004", "--clip_low 0.1 --clip_high 0.13"),
    "paper": ("--clip_low 0.0003 --clip_high 0.0004", "--clip_low 0.03 --clip_high 0.04"),
}
STUDIES = {
    "tiny": studies(HARD["tiny"], 512, 100, GSPO["tiny"]),
    "paper": studies(HARD["paper"], 1024, 200, GSPO["paper"]),
}


def run_name(flags: str) -> str:
    """The name of a variant: `--method sapo --kl_coef 0.05` is `sapo,kl_coef=0.05`."""
    words = shlex.split(flags)
    pairs = dict(zip(words[::2], words[1::2], strict=True))  # a flag given twice counts with its last value
    return ",".join([pairs.pop("--method"), *(f"{flag[2:]}={value}" for flag, value in pairs.items())])


def recipe_of(typed: dict) -> str:
    """The recipe that train.py takes by these settings."""
    which = typed.get("recipe", "auto")
    return which if which != "auto" else "paper" if "model" in typed else "tiny"


def read_seeds(text: str) -> list[int]:
    """`0-2` or `0,3,4` as a list. ValueError if it is neither."""
    first, dash, last = text.partition("-")
    try:
        seeds = list(range(int(first), int(last) + 1)) if dash else [int(seed) for seed in text.split(",")]
    except ValueError:
        seeds = []
    if not seeds or min(seeds) < 0:
        raise ValueError(f"--seeds {text}: allowed is a range such as 0-2 or a list such as 0,3,4")
    return seeds


def summary_of(folder: Path, flags: str, seed: int) -> dict:
    """What the report needs of a finished run: metrics by step, held-out results by step, panels at the end."""
    metrics, saved = plots.read_metrics(folder / "metrics.jsonl"), json.loads((folder / "results.json").read_text())
    keys = "train/success format_valid episodes updates staleness grad_norm kl_ref entropy outside_low outside_high"
    keys += " eval/success eval/success_low eval/success_high eval/format_valid eval/score_turn_weighted"
    curves = {key: plots.values_of(metrics, key) for key in keys.split()}
    curves = {key: {step: round(value, 4) for step, value in curve.items()} for key, curve in curves.items()}
    shown = ("success", "success_low", "success_high", "score", "score_turn_weighted", "format_valid")
    results = {
        policy: {panel: {key: round(result[key], 4) for key in shown} for panel, result in panels.items()}
        for policy, panels in saved["results"].items()
    }
    seconds = {part: round(value, 1) for part, value in saved["seconds"].items()}
    return {"flags": flags, "seed": seed, "results": results, "seconds": seconds, "curves": curves}


class Lab:
    """The folders of a label, and the commands of its runs."""

    def __init__(self, args: argparse.Namespace, flags: list[str]):
        """Check everything that can be before any run starts. ValueError says what is wrong."""
        typed = Parser().read(flags)
        for name in {"method", "seed", "output", "name", "resume", "overwrite"} & typed.keys():
            raise ValueError(f"--{name} {typed[name]}: not allowed, the lab gives it to every run")
        recipe = recipe_of(typed)  # said to every run, since --model is the cloned policy's folder later on
        all_variants = STUDIES[recipe][args.study]
        methods = list(dict.fromkeys(variant.split()[1] for variant in all_variants))
        if wrong := set(args.methods.split(",")) - {*methods, ""}:
            raise ValueError(f"--methods {min(wrong)}: allowed in {args.study} are {', '.join(methods)}")
        self.variants = [v for v in all_variants if not args.methods or v.split()[1] in args.methods.split(",")]
        for variant in self.variants:
            resolve(typed | Parser().read(shlex.split(variant)))
        self.label = args.label or typed.get("task", "sokoban").rpartition(":")[2]
        self.runs, self.results = args.output / "lab" / self.label, args.results / self.label
        self.launcher, self.flags = shlex.split(args.launcher) or [sys.executable], [*flags, "--recipe", recipe]
        for folder in (self.runs, self.results):
            folder.mkdir(parents=True, exist_ok=True)
        note, text = self.results / "flags.txt", shlex.join(flags) + "\n"
        if note.exists() and note.read_text() != text:
            raise ValueError(
                f"--label {self.label}: its runs have the flags {note.read_text()!r}; allowed is a new label"
            )
        note.write_text(text)

    def run(self, name: str, flags: list[str], seed: int) -> Path:
        """One run of train.py, unless it is finished; its folder. RuntimeError with its last words if it fails."""
        folder = self.runs / f"{name}-seed{seed}"
        if (folder / "results.json").exists():
            return folder
        place = ["--seed", str(seed), "--output", str(self.runs), "--name", folder.name, "--resume"]
        own = ["--max_minutes", "0", *self.flags, *flags, *place]
        command = [*self.launcher, str(Path(__file__).with_name("train.py")), *own]
        with open(f"{folder}.log", "a") as log:
            fds = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "pass_fds": [self.lock.fileno()]}
            code = subprocess.run(command, **fds).returncode
        if code or not (folder / "results.json").exists():
            said = Path(f"{folder}.log").read_text().splitlines() or [""]
            raise RuntimeError(f"exit code {code}: {said[-1][-300:]}")
        return folder

    def clone(self, seed: int) -> Path:
        """The policy that all methods of a seed start from, in Hugging Face layout."""
        folder = self.run("clone", ["--method", "grpo", "--steps", "0"], seed)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return folder / "reference"

    def summary(self, variant: str, seed: int) -> Path:
        """The file that the report reads of a run."""
        return self.results / f"{run_name(variant)}-seed{seed}.json"

    def play(self, variant: str, seed: int, cloned: Future | None) -> str:
        """Run a variant, write its summary or that it failed, and return what to say of it."""
        name, words, began = run_name(variant), shlex.split(variant), time.monotonic()
        try:
            start = ["--model", str(cloned.result()), "--sft_steps", "0"] if cloned else []
            folder = self.run(name, [*start, *words], seed)
            write_json(self.summary(variant, seed), summary_of(folder, variant, seed), indent=None)
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        except RuntimeError as error:
            write_json(self.summary(variant, seed), {"flags": variant, "seed": seed, "failed": str(error)})
            return f"{name}, seed {seed}: failed, {error}"
        return f"{name}, seed {seed}: {time.monotonic() - began:.0f} s"

    def missing(self, variant: str, seed: int) -> bool:
        """Whether a run has no summary so far, or failed."""
        path = self.summary(variant, seed)
        return not path.exists() or "failed" in json.loads(path.read_text())

    def study(self, seeds: list[int], jobs: int) -> int:
        """All runs of a study that are missing, `jobs` at a time; how many failed."""
        todo = [(variant, seed) for seed in seeds for variant in self.variants if self.missing(variant, seed)]
        from_clone = [(variant, seed) for variant, seed in todo if "--sft_steps" not in variant]
        pool = ThreadPoolExecutor(jobs)
        clones = {seed: pool.submit(self.clone, seed) for seed in dict.fromkeys(seed for _, seed in from_clone)}
        runs = [pool.submit(self.play, v, s, clones[s] if (v, s) in from_clone else None) for v, s in todo]
        try:
            for run in tqdm(as_completed(runs), "runs", len(runs)):
                tqdm.write(run.result())
        finally:
            pool.shutdown(cancel_futures=True)  # after Ctrl-C, which ends the runs that go, begin no more
        return sum(self.missing(variant, seed) for variant, seed in todo)


def read_arguments(argv: list[str] | None) -> tuple[argparse.Namespace, list[str], plots.Parser]:
    """Flags of this file, flags of every run, and the parser."""
    first, *examples = __doc__.split("\n\n")
    parser = plots.Parser(
        allow_abbrev=False, description=first, epilog=examples[0], formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("study", choices=(*STUDIES["tiny"], "report"), help="a study, or what came out of all of them")
    parser.add_argument("--seeds", default="0-2", help="such as 0-2 or 0,3,4 (default 0-2)")
    parser.add_argument("--methods", default="", help="such as grpo,sampo (default: all of the study)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default 2)")
    parser.add_argument("--launcher", default="", help='before train.py (default: this python), "accelerate launch"')
    parser.add_argument("--label", default="", help="folder of runs and results (default: the task)")
    parser.add_argument("--output", type=Path, default=Path("runs"), help="folder of lab/<label>/ (default runs)")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of <label>/ (default results)")
    return *parser.parse_known_args(argv), parser


def main(argv: list[str] | None = None) -> int:
    """Run a study or write the report; 0, or 1 if a run failed. A bad flag ends it with one line and exit code 2."""
    args, flags, parser = read_arguments(argv)
    try:
        if args.study == "report":
            if flags:
                raise ValueError(f"{flags[0]}: allowed with a study; the report reads {args.results}")
            folder = args.results / (args.label or "sokoban")
            if not (folder / "flags.txt").exists():
                raise ValueError(f"--label {args.label!r}: {folder} is no folder of results; run a study first")
            recipe = recipe_of(Parser().read(shlex.split((folder / "flags.txt").read_text())))
            print(report.write(folder, STUDIES[recipe], HARD[recipe]))
            return 0
        if not 1 <= args.jobs <= 64:
            raise ValueError(f"--jobs {args.jobs}: allowed is 1 to 64")
        seeds, lab = read_seeds(args.seeds), Lab(args, flags)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    with open(lab.runs / "lock", "w") as lab.lock:  # held by the runs as well: those of a killed lab end first
        try:
            fcntl.flock(lab.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{lab.runs}: an earlier call has runs that still go; waiting for them", file=sys.stderr)
            fcntl.flock(lab.lock, fcntl.LOCK_EX)
        failed = lab.study(seeds, args.jobs)
    print(f"{f'{failed} failed' if failed else 'all done'}; python lab.py report --label {lab.label}")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
