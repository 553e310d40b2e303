"""Problems of TIR Math: arithmetic of our own, files of the released code's, a data set of the Hugging Face hub."""

import json
import os
import random
import re
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

SEED = 233
KINDS = {"sum": "{a} + {b}", "difference": "{a} - {b}", "product": "{a} * {b}", "both": "( {a} + {b} ) * {c}"}
LARGEST = 199  # result of a problem of our own; the smallest is 0
HELD_OUT = {"valid_seen": ("math500", "test"), "valid_unseen": ("aime24", "aime25")}  # files of these names


@dataclass(frozen=True)
class Problem:
    question: str
    answer: str
    kind: str  # its subject, or the file it is from


@cache
def own() -> dict[str, Problem]:
    """Arithmetic, by task id. One pair of operands in six is in valid_unseen alone; 480 of the rest are valid_seen."""
    rng, pairs, splits = random.Random(SEED), list(product(range(2, 100), repeat=2)), {"train": [], "valid_unseen": []}
    for i, (a, b) in enumerate(rng.sample(pairs, len(pairs))):
        for kind, form in KINDS.items():
            expression = form.format(a=a, b=b, c=rng.randint(2, 9))
            value = eval(expression)  # of our own digits and operators
            if 0 <= value <= LARGEST:
                problem = Problem(f"What is {expression} ?", str(value), kind)
                splits["train" if i % 6 else "valid_unseen"].append(problem)
    train = rng.sample(splits["train"], len(splits["train"]))
    return by_id(splits | {"train": train[480:], "valid_seen": train[:480]})


def by_id(splits: dict[str, list[Problem]]) -> dict[str, Problem]:
    """Problems by task id `split/number`."""
    return {f"{split}/{i}": problem for split, problems in splits.items() for i, problem in enumerate(problems)}


def read_problem(row: dict, source: str) -> Problem:
    """A row in the official columns: question, problem or prompt; answer or reward_model. KeyError without them."""
    question = row.get("question") or row.get("problem") or row["prompt"][-1]["content"]
    answer = row["answer"] if row.get("answer") is not None else row["reward_model"]["ground_truth"]
    return Problem(question, str(answer), str(row.get("subject") or source))


def read_rows(path: Path) -> list[dict]:
    """The rows of a .jsonl or .parquet file."""
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    from pyarrow import parquet

    return parquet.read_table(path).to_pylist()


@cache
def read_problems(where: str) -> dict[str, Problem]:
    """The problems of a folder (`official`: of $TIR_MATH_DATA), or of a data set of the hub, by task id.

    A split is what files of its name hold, but for problems without an answer; valid_seen is math500 or test,
    valid_unseen is aime24 and aime25, and each is the other where there is but one of them. ValueError where a file,
    a column or a package is missing.
    """
    name = os.environ.get("TIR_MATH_DATA", "~/.cache/tir_math") if where == "official" else where
    folder, splits = Path(name).expanduser(), {}
    try:
        if not folder.is_dir() and re.fullmatch(r"[\w.-]+/[\w.-]+", name):
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(name, repo_type="dataset", allow_patterns=["*.parquet", "*.jsonl"]))
        for path in sorted([*folder.rglob("*.parquet"), *folder.rglob("*.jsonl")]):
            split = re.sub(r"-\d+-of-\d+$", "", path.stem)
            problems = (read_problem(row, split) for row in read_rows(path))
            splits.setdefault(split, []).extend(problem for problem in problems if problem.answer.strip())
        held_out = {split: sum((splits.get(file, []) for file in files), []) for split, files in HELD_OUT.items()}
        if not splits.get("train") or not any(held_out.values()):
            raise ValueError(f"there is {', '.join(splits) or 'no file'}")
    except Exception as error:  # of files, pyarrow, the hub
        need = "a folder or a data set of the hub, with train and math500, test, aime24 or aime25, .parquet or .jsonl"
        raise ValueError(f"--problems {where}: {folder}: {error!r}; allowed is {need}; or own") from error
    seen, unseen = held_out.values()
    return by_id(splits | {"valid_seen": seen or unseen, "valid_unseen": unseen or seen})
