"""envs/alfworld.py against TextWorld, on the official games: the same commands, text by text, and the time of both.

    pip install alfworld==0.4.2 textworld==1.7.0 numpy      # an environment of its own; cmake and a C++ compiler
    ALFWORLD_DATA=<folder> python benchmarks/alfworld_peer.py compare --games 210 --output tests/alfworld.jsonl
    ALFWORLD_DATA=<folder> python benchmarks/alfworld_peer.py speed
    ALFWORLD_DATA=<folder> python benchmarks/alfworld_peer.py memory

compare: 30 commands a game, drawn from a generator seeded by its id: the walkthrough, admissible ones, the rare ones
where they can be had, and malformed ones. Both have to say the same, list the same admissible commands, and agree on
whether the goal holds; a line of the output is a game with a digest of all that, as the texts are not ours. Games
that the output has already are left out, so that it can be stopped and started again.

The peer is given alfworld's own domain and grammar with two changes that make them those of the official games: a sink
cleans too, and the text of `help` begins without an empty line.
"""

import argparse
import json
import os
import random
import sys
import time
from hashlib import blake2b
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))

from envs.alfworld import ALFWorld, read_game  # noqa: E402

STEPS = 30
ODD = (
    "",
    "  ",
    "LOOK",
    "look now",
    "frobnicate",
    "go to nowhere 1",
    "take apple 9 from fridge 1",
    "examine",
    " look ",
)
RARE = ("slice", "close", "open", "use", "examine", "heat", "clean", "cool", "take", "move")


def draw(rng: random.Random, admissible: tuple[str, ...], walkthrough: list[str]) -> str:
    """The next command; one of the walkthrough is taken from its front."""
    kind = rng.random()
    if kind < 0.4 and walkthrough:
        return walkthrough.pop(0)
    if kind < 0.5:
        return rng.choice(ODD)
    if kind < 0.6:
        return rng.choice(("help", "look", "inventory"))
    rare = [command for command in admissible if command.startswith(RARE)]
    return rng.choice(rare if rare and kind < 0.85 else admissible)


def play(env: ALFWorld, task_id: str, steps: int = STEPS):
    """Yields (command, observation, admissible commands, whether the goal holds), the beginning first."""
    rng, walkthrough = random.Random(f"compare {task_id}"), list(read_game(task_id)[2])
    seen = env.reset(task_id)
    yield "", seen.text, seen.actions, False
    for _ in range(steps):
        command = draw(rng, seen.actions, walkthrough)
        step = env.step(command)
        seen = step.observation
        yield command, seen.text, seen.actions, step.success


def digest(states: list[tuple]) -> str:
    """Of all that was said and listed in a game."""
    return blake2b(json.dumps(states).encode(), digest_size=12).hexdigest()


class Peer:
    """TextWorld on one game at a time, with alfworld's names."""

    def __init__(self):
        import textworld
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
        from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH
        from textworld.envs.pddl import PddlEnv

        infos = textworld.EnvInfos(won=True, admissible_commands=True)
        self.env = AlfredDemangler(PddlEnv(infos))
        sink = "(receptacleType ?r SinkType)"
        self.domain = Path(ALFRED_PDDL_PATH).read_text().replace(f";{sink}", sink)
        self.grammar = Path(ALFRED_TWL2_PATH).read_text().replace("\\nAvailable commands", "Available commands")

    def state(self, state) -> tuple[str, tuple[str, ...], bool]:
        """Observation, admissible commands, whether the goal holds."""
        return state.feedback, tuple(sorted(state.admissible_commands)), bool(state.won)

    def reset(self, task_id: str):
        """The beginning of a game."""
        task, problem, walkthrough = read_game(task_id)
        grammar = self.grammar.replace("Your task is to: UNKNOWN GOAL.", task)
        game = {"pddl_domain": self.domain, "grammar": grammar, "pddl_problem": problem, "walkthrough": walkthrough}
        self.env.load(game)
        return self.state(self.env.reset())

    def step(self, command: str):
        """What it says to a command."""
        return self.state(self.env.step(command)[0])


def chosen(env: ALFWorld, count: int) -> list[str]:
    """Games of every split and type in turn, drawn by a fixed seed."""
    rng, by_kind = random.Random(0), {}
    for split in ("train", "valid_seen", "valid_unseen"):
        for task_id in env.tasks(split):
            by_kind.setdefault((split, env.task_type(task_id)), []).append(task_id)
    lists = [rng.sample(ids, len(ids)) for ids in by_kind.values()]
    return [ids[i] for i in range(max(map(len, lists))) for ids in lists if i < len(ids)][:count]


def compare(env: ALFWorld, count: int, output: Path) -> None:
    """Play the chosen games on both sides; ends with an error at the first difference."""
    peer = Peer()
    done = {json.loads(line)["game"] for line in output.read_text().splitlines()} if output.exists() else set()
    for task_id in (task_id for task_id in chosen(env, count) if task_id not in done):
        ours = list(play(env, task_id))
        for number, (command, *expected) in enumerate(ours):
            theirs = peer.step(command) if number else peer.reset(task_id)
            if tuple(expected) != theirs:
                sys.exit(f"{task_id}: {command!r}\nours   {expected}\ntheirs {theirs}")
        with output.open("a") as file:
            file.write(json.dumps({"game": task_id, "digest": digest(ours)}) + "\n")
    print(f"{len(output.read_text().splitlines())} games of {STEPS} commands are equal")


def speed(env: ALFWorld, count: int) -> None:
    """CPU time of a reset and of a step with its admissible commands and goal, game by game, and their ratios."""
    peer, times = Peer(), []
    for task_id in chosen(env, count):
        rows = []
        for side in (env, peer):
            read_game(task_id)  # the index is read once, and is not a reset
            start = time.process_time()
            side.reset(task_id)
            middle = time.process_time()
            for command in read_game(task_id)[2]:
                side.step(command)
            rows += [middle - start, (time.process_time() - middle) / len(read_game(task_id)[2])]
        times.append(rows)
    print("| | TextWorld, ms | ours, ms | TextWorld / ours |\n|---|---|---|---|")
    for name, ours, theirs in (("reset", 0, 2), ("step", 1, 3)):
        ratios = sorted(row[theirs] / row[ours] for row in times)
        shown = " | ".join(f"{1000 * median(row[column] for row in times):.2f}" for column in (theirs, ours))
        print(f"| {name} | {shown} | {median(ratios):,.0f} [{ratios[0]:,.0f}, {ratios[-1]:,.0f}] |")


def resident() -> float:
    """Memory of this process, MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def memory(env: ALFWorld) -> None:
    """What 128 live games of ours and 16 of TextWorld's take, a game each."""
    print("| | before, MB | games | with them, MB | a game, MB |\n|---|---|---|---|---|")
    for name, make, count in (("ours", lambda: ALFWorld(games="official"), 128), ("TextWorld", Peer, 16)):
        before, live = resident(), []
        for task_id in chosen(env, count):
            live.append(make())
            live[-1].reset(task_id)
        now = resident()
        print(f"| {name} | {before:.0f} | {count} | {now:.0f} | {(now - before) / count:.2f} |")


def main() -> None:
    """Compare, time or weigh."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=("compare", "speed", "memory"))
    parser.add_argument("--games", type=int, default=210)
    parser.add_argument("--output", type=Path, default=Path("alfworld.jsonl"))
    args = parser.parse_args()
    env = ALFWorld(games="official")
    if args.job == "speed":
        speed(env, args.games)
        return
    if args.job == "memory":
        memory(env)
        return
    compare(env, args.games, args.output)


if __name__ == "__main__":
    main()
