"""Tasks: the words they share, their registry, and the response format of the text games.

A task is a class in a file of its own with this surface; one instance plays one episode at a time:

    tasks(split) -> list[str]           stable ids, the same on every machine; they decide all chance of an episode
    reset(task_id) -> Observation
    step(action) -> Step                action None is an invalid response: a turn passes, nothing is done
    prompt(history) -> messages         chat messages of a turn; history is [(Observation, action)], last action None
    render(observation) -> str          append_only tasks: the text to append after a response
    parse(response) -> (action, valid)  never raises; action is None where the format is broken
    append_only, max_turns, words()     words(): every word of prompts and responses, for the built-in tokenizer
    stop                                optional: texts that end a response, with the token that completes one
    blocking                            optional: whether steps wait for something; those of a turn then do so together
    action_type(action), task_type(id)  for diagrams and reports
    expert(rng, noise) -> response      where the task has a solver

Its constructor's keyword arguments are the task's options; they are settings of `config.py` by the same names.
"""

import importlib
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path

TASKS = {
    "alfworld": "envs.alfworld:ALFWorld",
    "sokoban": "envs.sokoban:Sokoban",
    "tir_math": "envs.tir_math:TIRMath",
    "webshop": "envs.webshop:WebShop",
}


@dataclass(frozen=True)
class Observation:
    text: str
    state_key: str  # what identifies the state, for anchor groups; not the prompt
    actions: tuple[str, ...] | None = None  # admissible actions, or None where they cannot be listed
    image: object = None


@dataclass(frozen=True)
class Step:
    observation: Observation
    reward: float  # without format penalty
    done: bool  # the task is over; max_turns is not its business
    success: bool
    score: float  # of the episode so far
    note: str = ""  # something that must not pass unseen, to be counted: a time limit, a grader that failed


def load(name: str) -> type:
    """The class of a task in TASKS, or of `path.py:Class`. Raises ValueError where there is none."""
    path, _, attribute = TASKS.get(name, name).partition(":")
    if name not in TASKS and not path.endswith(".py"):
        raise ValueError(f"task {name!r}: allowed are {', '.join(TASKS)} or path.py:Class")
    if name in TASKS:
        return getattr(importlib.import_module(path), attribute)
    if not Path(path).is_file():
        raise ValueError(f"task {name!r}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"task_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    if not hasattr(module, attribute):
        raise ValueError(f"task {name!r}: {path} has no class {attribute!r}")
    return getattr(module, attribute)


def make(name: str, **options):
    """A new environment of the task; unknown options raise TypeError."""
    return load(name)(**options)


TAGS = ("<think>", "</think>", "<action>", "</action>")
FORMAT = re.compile(r"\s*<think>(.*)</think>\s*<action>(.*)</action>\s*", re.DOTALL)


def parse_think_action(response: str) -> tuple[str | None, bool]:
    """The action of `<think>..</think><action>..</action>` and whether the format holds (paper Section 3.1, (2)).

    Each tag once, in order, lower case, nothing but white space outside, an action that is not blank. The action comes
    back stripped; where the format is broken it is None. Any text may stand inside the tags but the tags themselves.
    """
    match = FORMAT.fullmatch(response) if all(response.count(tag) == 1 for tag in TAGS) else None
    action = match[2].strip() if match else ""
    return (action, True) if action else (None, False)
