"""Rollouts on disk and on screen: rollouts.jsonl.gz holds one gzip member a step, one JSON object a trajectory.

A member is written whole and synced, and its end is the offset a checkpoint keeps. A process that is killed leaves at
most one cut member behind: readers leave it out, and `cut` drops it when the run is resumed.
"""

import gzip
import html
import json
import math
import os
import re
import textwrap
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np

from rollout import Trajectory, Turn

HEADER = b"\x1f\x8b\x08" + bytes(5)  # of our members: gzip, deflate, no flags, no time
CHUNK = 1 << 20
IDS = ("prompt_ids", "response_ids", "state")  # left out of the page
MARKS = re.compile(r"<\|[^|]*\|>|<(?:start|end)_of_turn>|\[/?INST\]")  # of the usual chat templates
ROLE = re.compile(r"^\s*(?:system|user|assistant|model|tool)(?:\n|\s*$)")
SHOWN = 12  # lines of a prompt in the terminal


def short(number: float | None) -> float | None:
    """A number to 6 significant digits; None for None and for what JSON has no number for (NaN, infinities)."""
    return float(f"{number:.6g}") if number is not None and math.isfinite(number) else None


def turn_record(turn: Turn, env, tokenizer) -> dict:
    """A turn as JSON: what was read and said, as text and ids, what was done, and how it was weighed."""
    logprobs = turn.rollout_logprobs
    return {
        "prompt": tokenizer.decode(turn.prompt_ids),
        "prompt_ids": turn.prompt_ids,
        "response": turn.text,
        "response_ids": turn.response_ids,
        "action": turn.action,
        "action_type": env.action_type(turn.action) if hasattr(env, "action_type") else None,
        "valid": bool(turn.valid),
        "admissible": bool(turn.admissible),
        "reward": short(turn.reward),
        "note": turn.note,
        "state": turn.state,
        "logprob_mean": short(sum(logprobs) / len(logprobs)) if logprobs else None,
        "logprob_min": short(min(logprobs)) if logprobs else None,
        "entropy": short(turn.entropy),
        "advantage": short(turn.advantage),
    }


def trajectory_record(
    trajectory: Trajectory, env, tokenizer, *, step: int, group: int, member: int, trained: bool
) -> dict:
    """A trajectory as strict JSON, with where it was sampled and whether its group was trained on."""
    typed = hasattr(env, "task_type") and trajectory.turns  # without a turn, the task may be what the env crashed on
    return {
        "step": step,
        "group": group,
        "member": member,
        "task": trajectory.task,
        "task_type": env.task_type(trajectory.task) if typed else None,
        "success": trajectory.success,
        "score": short(trajectory.score),
        "reward": short(trajectory.reward),
        "truncated": trajectory.truncated,
        "error": trajectory.error,
        "trained": trained,
        "turns": [turn_record(turn, env, tokenizer) for turn in trajectory.turns],
    }


def choose_groups(num_groups: int, count: int, rng: np.random.Generator) -> list[int]:
    """Sorted indices of `count` of num_groups groups, drawn without replacement; all of them where count is larger."""
    if count >= num_groups:
        return list(range(num_groups))
    return sorted(rng.choice(num_groups, size=count, replace=False).tolist())


def record_groups(groups: list[list[Trajectory]], count: int, rng, env, tokenizer, step: int) -> list[dict]:
    """Records of `count` whole groups, drawn from all that a step sampled; `trained` is whether it was weighed."""
    return [
        trajectory_record(
            trajectory,
            env,
            tokenizer,
            step=step,
            group=g,
            member=member,
            trained=any(turn.advantage is not None for turn in trajectory.turns),
        )
        for g in choose_groups(len(groups), count, rng)
        for member, trajectory in enumerate(groups[g])
    ]


def append_step(path: Path, records: list[dict]) -> int:
    """Append one gzip member, a line a record, and sync it; returns the file's size. No records, nothing written."""
    if not records:
        return os.path.getsize(path) if os.path.exists(path) else 0
    lines = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
    with open(path, "ab") as file:
        file.write(gzip.compress(lines.encode(), compresslevel=6, mtime=0))
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def members(path: Path) -> Iterator[bytes]:
    """Contents of the complete gzip members of a file; a cut or garbled one is left out, or ValueError if not last."""
    with open(path, "rb") as file:
        size, rest = os.fstat(file.fileno()).st_size, file.read(CHUNK)  # a run may be writing on meanwhile
        while rest:
            start, inflater, parts = file.tell() - len(rest), zlib.decompressobj(wbits=31), []
            with suppress(zlib.error):
                while rest and not inflater.eof:
                    parts.append(inflater.decompress(rest))
                    rest = inflater.unused_data or file.read(CHUNK)
            if not inflater.eof:
                file.seek(start + 1)
                if HEADER in file.read(max(0, size - start - 1)):
                    raise ValueError(f"{path}: damaged at byte {start}, with further steps behind it")
                return
            yield b"".join(parts)


def read_records(path: Path) -> Iterator[dict]:
    """Stream the records of all complete members. ValueError if there is no such file, or it is damaged inside."""
    if not Path(path).is_file():
        raise ValueError(f"{path}: there is no such file of rollouts")
    with open(path, "rb") as file:
        start = file.read(2)
    if start != HEADER[: len(start)]:
        raise ValueError(f"{path}: not a file of rollouts, which train.py and eval.py --records write")
    return (json.loads(line) for member in members(path) for line in member.splitlines())


def cut(path: Path, offset: int) -> None:
    """Drop everything behind `offset`, where a checkpoint was made. ValueError if the file is shorter than that."""
    size = os.path.getsize(path) if os.path.exists(path) else 0
    if not 0 <= offset <= size:
        raise ValueError(f"{path}: cut at byte {offset}, allowed is 0 to {size}, its size: a part was lost")
    if os.path.exists(path):
        os.truncate(path, offset)


def last_message(prompt: str) -> str:
    """The text of the last message of a prompt, without the marks of the chat template around it."""
    messages = [ROLE.sub("", piece) for piece in MARKS.split(prompt)]
    spoken = [text.strip() for text in messages if re.sub(r"</?think>", "", text).strip()]
    return spoken[-1] if spoken else prompt.strip()


def wrapped(text: str) -> list[str]:
    """Lines of at most 100 characters; control characters, which a terminal would obey, are spelt out."""
    lines = text.expandtabs(4).split("\n")
    lines = ["".join(c if c.isprintable() else repr(c)[1:-1] for c in line) for line in lines]
    return [part for line in lines for part in textwrap.wrap(line, 100, drop_whitespace=False) or [""]]


def excerpt(lines: list[str], head: int, tail: int) -> list[str]:
    """About SHOWN lines, of and around those between the `head` first and `tail` last, which no turn changes."""
    start, stop = head, len(lines) - tail
    if start >= stop or len(lines) <= SHOWN:
        start, stop = 0, len(lines)
    spare = max(0, SHOWN - (stop - start)) // 2
    start, stop = max(0, start - spare), min(len(lines), stop + spare)
    part = lines[start:stop]
    if len(part) > SHOWN:
        part = [*part[: SHOWN // 2], "...", *part[1 - SHOWN // 2 :]]
    return ["..."] * (start > 0) + part + ["..."] * (stop < len(lines))


def show_turns(turns: list[dict]) -> Iterator[str]:
    """Lines of every turn: of the prompt's last message, the response behind >, and behind = what became of it."""
    prompts = [wrapped(last_message(turn["prompt"])) for turn in turns]
    head, tail = len(os.path.commonprefix(prompts)), len(os.path.commonprefix([prompt[::-1] for prompt in prompts]))
    for number, (turn, prompt) in enumerate(zip(turns, prompts, strict=True), start=1):
        facts = [f"action {wrapped(turn['action'] or 'none')[0]}"]
        if not turn["valid"]:
            facts.append("INVALID FORMAT")
        elif not turn["admissible"]:
            facts.append("INADMISSIBLE")
        for name, style in (("reward", ".4g"), ("entropy", ".3g"), ("advantage", "+.3g")):
            if turn[name] is not None:
                facts.append(f"{name} {turn[name]:{style}}")
        said = [f"> {line}" for line in wrapped(turn["response"])]
        for i, line in enumerate([*excerpt(prompt, head, tail), *said, f"= {', '.join(facts)}"]):
            yield f"{'' if i else number:>4}  {line}".rstrip()


def show(records: Iterable[dict], count: int) -> str:
    """The first `count` trajectories for a terminal without colours."""
    lines = []
    for record in islice(records, count):
        kind = f" ({record['task_type']})" if record["task_type"] else ""
        outcome = "CRASHED" if record["error"] else "success" if record["success"] else "failure"
        facts = [f"{record['task']}{kind}", outcome, f"score {record['score']}", f"{len(record['turns'])} turns"]
        facts += ["truncated"] * record["truncated"] + ["trained" if record["trained"] else "not trained"]
        lines.append(f"step {record['step']}, group {record['group']}, member {record['member']}: {', '.join(facts)}")
        lines += wrapped(record["error"]) if record["error"] else []
        lines += [*show_turns(record["turns"]), ""]
    return "\n".join(lines)


def write_page(records: Iterable[dict], path: Path, title: str) -> None:
    """One HTML file to browse trajectories with, complete in itself; token ids are left out to keep it small."""
    slim = [
        record | {"turns": [{k: v for k, v in turn.items() if k not in IDS} for turn in record["turns"]]}
        for record in records
    ]
    data = json.dumps(slim, allow_nan=False).replace("<", "\\u003c")  # no text can end the script that holds it
    head, _, tail = Path(__file__).with_name("viewer.html").read_text(encoding="utf-8").partition("@DATA@")
    Path(path).write_text(head.replace("@TITLE@", html.escape(title)) + data + tail, encoding="utf-8")
