"""The sandbox against a cold subprocess, `python -I`, alone and inside bubblewrap where that is installed.

    python benchmarks/sandbox.py                               # needs numpy and sympy

Every repeat runs the same program on all sides in turn, in one process; ratios are medians over the repeats. Then
64 calls at once, which the cores share, and 1,000 calls with what they leave behind.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))

from envs.sandbox import Sandbox  # noqa: E402

PROGRAMS = {  # and how many calls of a side follow each other, as they do in a rollout
    "trivial": ("print(1)", 10),
    "numpy and sympy": (
        "import numpy, sympy; print(numpy.arange(9).sum(), sympy.factor(sympy.Symbol('x') ** 2 - 1))",
        1,
    ),
}
BWRAP = "bwrap --unshare-all --die-with-parent --ro-bind / / --dev /dev --proc /proc --clearenv".split()


def timed(function, *args) -> tuple[float, object]:
    """(seconds, result) of a call."""
    start = time.perf_counter()
    result = function(*args)
    return time.perf_counter() - start, result


def cold(prefix: list[str], program: str) -> str:
    """What a program prints in a new interpreter."""
    argv = [*prefix, sys.executable, "-I", "-c", program]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout


def compare(sides: dict, repeats: int) -> None:
    """A row a program and side: median, 95th percentile and fastest call, and the ratio of medians of a repeat."""
    print("| program | | median, ms | p95, ms | fastest, ms | times the sandbox's |\n|---|---|---|---|---|---|")
    for name, (program, calls) in PROGRAMS.items():
        blocks, printed = {side: [] for side in sides}, set()
        for repeat in range(repeats + 1):
            for side, run in sides.items():
                seen = [timed(run, program) for _ in range(calls)]
                printed |= {text for _, text in seen}
                if repeat:  # the first one reads files
                    blocks[side].append([seconds for seconds, _ in seen])
        assert len(printed) == 1, f"the sides print different things: {printed}"
        medians = {side: [median(block) for block in blocks[side]] for side in sides}
        for side in sides:
            ratio = median(b / a for a, b in zip(medians["sandbox"], medians[side], strict=True))
            every = sorted(sum(blocks[side], []))
            numbers = " | ".join(f"{1000 * x:.1f}" for x in (median(every), every[len(every) * 95 // 100], every[0]))
            print(f"| {name} | {side} | {numbers} | {ratio:.1f} |")


def resident(pid: int | str) -> float:
    """MiB of a process that are in memory."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def main() -> None:
    """All tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--calls", type=int, default=1000)
    args = parser.parse_args()
    seconds, sandbox = timed(Sandbox)
    with sandbox, Sandbox("unsafe") as unsafe:
        sides = {"sandbox": lambda program: sandbox.run(program).stdout}
        sides["sandbox, unsafe"] = lambda program: unsafe.run(program).stdout
        sides["python -I"] = lambda program: cold([], program)
        if shutil.which("bwrap"):
            sides["python -I in bwrap"] = lambda program: cold(BWRAP, program)
        print(f"{len(os.sched_getaffinity(0))} cores; the sandbox starts in {seconds:.2f} s\n")
        compare(sides, args.repeats)

        work = "sum(i * i for i in range(10**6)); print(1)"
        one = median(timed(sandbox.run, work)[0] for _ in range(5))
        limit = 5 * one
        with ThreadPoolExecutor(64) as pool:
            total, results = timed(lambda: [*pool.map(lambda _: sandbox.run(work, limit), range(64))])
        late = sum(result.status != "ok" for result in results)
        print(f"\n64 calls of {1000 * one:.0f} ms at once: {total:.2f} s, {64 * one / total:.2f} times as fast as one")
        print(f"after the other; {late} ran out of their {1000 * limit:.0f} ms\n")

        print(f"| {args.calls:,} calls of 8 threads | before | after |\n|---|---|---|")
        pids = ["self", sandbox._worker.pid]
        with ThreadPoolExecutor(8) as pool:
            [*pool.map(sandbox.run, ["print(1)"] * 100)]
            before = [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids] + [resident(pid) for pid in pids]
            seconds, _ = timed(lambda: [*pool.map(sandbox.run, ["print(1)"] * args.calls)])
            after = [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids] + [resident(pid) for pid in pids]
        names = ("open files of the owner", "of the worker", "MiB of the owner", "of the worker")
        for name, one, two in zip(names, before, after, strict=True):
            print(f"| {name} | {one:.4g} | {two:.4g} |")
        print(f"\n{args.calls / seconds:.0f} calls/s")


if __name__ == "__main__":
    main()
