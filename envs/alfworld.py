"""ALFWorld: household tasks in text, on the official games or on rooms of our own; nothing to install.

Option `games`: `own` are those of alfworld_rooms.py; `official` are what `alfworld-download` leaves, or one file
games.jsonl.xz (a game a line: id, task, walkthrough, problem), in the folder that the environment variable
ALFWORLD_DATA names, ~/.cache/alfworld by default. Ids are split/type-object-.../trial, panels go by them.

    python -m envs.alfworld [--games official] [--game <id>] [--expert]        play in the terminal

Reward is 10 where the goal holds, which ends the game. The state key is all that can change (`anchor state`); the
released code takes the text of the observation (`anchor observation`), so that every "Nothing happens." is one state.
"""

import argparse
import json
import lzma
import os
import random
import re
import sys
import zlib
from functools import lru_cache
from pathlib import Path

from envs import TAGS, Observation, Step, alfworld_rooms, parse_think_action
from envs.alfworld_game import CHANGING, HELP, MADE, NOTHING, State, act, advise, commands, holds, intro, read_problem

OFFICIAL = ("train", "valid_seen", "valid_unseen", "valid_train")
FIRST = """You are an expert agent operating in the ALFRED Embodied Environment.
Your current observation is: {observation}
Your admissible actions of the current situation are: [{actions}].
{closing}"""
LATER = """You are an expert agent operating in the ALFRED Embodied Environment. Your task is to: {task}
Prior to this step, you have already taken {count} step(s). Below are the most recent {shown} observations and the \
corresponding actions you took:
{pairs}
You are now at step {number} and your current observation is: {observation}
Your admissible actions of the current situation are: [{actions}].
{closing}"""
CLOSING = """Now it's your turn to take an action.
You should first reason step-by-step about the current situation. This reasoning process MUST be enclosed within \
<think> </think> tags.
Once you've finished your reasoning, you should choose an admissible action for the current step and present it \
within <action> </action> tags."""
PAIR = "[Observation {number}: '{observation}', Action {number}: '{action}']"
TASK = "Your task is to: "
GET = "`pip install alfworld==0.4.2 && alfworld-download` brings them to ~/.cache/alfworld; or --games own"
SAID = """-= Welcome to TextWorld , ALFRED ! =- You are in the middle of a room . Looking quickly around you , you \
see a Nothing happens . arrive at The is closed . In it On the and facing Next to carrying not anything pick up from \
move turn sliced using There's There ' s nothing special about This normal off clean"""
VERBS = "go open close take move clean heat cool use slice examine look inventory help".split()
WORDS = f"{' '.join(VERBS)} put hold at here seen ; ? , nothing nowhere closed to from with on hot cold none"


def data_folder() -> Path:
    """Where the official games are."""
    return Path(os.environ.get("ALFWORLD_DATA", "~/.cache/alfworld")).expanduser()


def parts_of(game: dict) -> tuple[str, str, list[str]]:
    """(task in words, PDDL problem, walkthrough) of a game in either layout. ValueError for one of alfworld 0.3."""
    walkthrough, said = game["walkthrough"], game["task"] if "task" in game else game["grammar"]
    if old := next((command for command in walkthrough if command.startswith("put ")), None):
        raise ValueError(f"{old!r} is of alfworld 0.3")
    task = said[said.index(TASK) :].partition('"')[0]
    return task, game["problem"] if "problem" in game else game["pddl_problem"], walkthrough


@lru_cache
def index(folder: Path) -> dict[str, tuple[str, bytes | Path]]:
    """(task in words, its line, compressed, or the path of its file) of official games by id. ValueError if bad."""
    path, found = folder / "games.jsonl.xz", {}
    try:
        if path.exists():
            for line in lzma.open(path):
                game = json.loads(line)
                found[game["id"]] = parts_of(game)[0], zlib.compress(line, 1)
        for path in (path for split in OFFICIAL for path in folder.glob(f"json_2.1.*/{split}/*/*/game.tw-pddl")):
            task_id, game = "/".join(path.parts[-4:-1]), json.loads(path.read_text())
            task = parts_of(game)[0]
            if game["solvable"] and "movable" not in task_id and "Sliced" not in task_id:  # as alfworld's loader
                found[task_id] = task, path
    except (OSError, ValueError, KeyError, TypeError, EOFError, lzma.LZMAError) as error:
        raise ValueError(
            f"{path}, game {len(found) + 1}: {error!r}; allowed are those of alfworld 0.4 (move X to Y); {GET}"
        ) from error
    if not found:
        raise ValueError(f"ALFWORLD_DATA {folder}: allowed is a folder with json_2.1.*/ or games.jsonl.xz; {GET}")
    return dict(sorted(found.items()))


def read_game(task_id: str) -> tuple[str, str, list[str]]:
    """(task in words, PDDL problem, walkthrough) of an official game. ValueError where there is none of that id."""
    games = index(data_folder())
    if task_id not in games:
        raise ValueError(f"task {task_id!r}: allowed are the {len(games)} games of {data_folder()}")
    _, source = games[task_id]
    return parts_of(json.loads(zlib.decompress(source) if isinstance(source, bytes) else source.read_text()))


def state_key(state: State) -> str:
    """All that can change but `gone`, which only `look` shows, and what was seen; independent of set order."""
    made = [sorted(state.made[name]) for name in CHANGING]
    return f"{state.at} {state.held} {sorted(state.inside)} {sorted(state.lies)} {made}"


def compact(history: list[tuple[Observation, str | None]]) -> str:
    """The task, what is held, where one is, where things that the task names were seen, what was not looked into.

    put some mug in desk. hold nothing ; at bed 1 seen ; mug 2 at drawer 1 ; sidetable 1 ? ; drawer 2 closed
    """
    start = history[0][0].text
    places, lies = dict.fromkeys(re.findall(r"a (\w+ \d+)", start.partition(TASK)[0]), "?"), {}
    held, here, lit = "nothing", "nowhere", ""
    for text in (observation.text for observation, _ in history[1:]):
        if found := re.match(r"You arrive at (.+?)\.", text):
            here = found[1]
        if found := re.search(r"(?:On the (.+?)|The (.+?) is open\. In it), you see (.+)\.$", text):
            place, objects = found[1] or found[2], re.findall(r"a (\w+ \d+)", found[3])
            places[place] = "seen"
            lies = {name: where for name, where in lies.items() if where != place} | dict.fromkeys(objects, place)
        if found := re.search(r"The (.+?) is closed\.$", text):
            places[found[1]] = "closed"
        if found := re.match(r"You pick up the (.+?) from", text):
            held = found[1]
            lies.pop(held, None)
        if found := re.match(r"You move the (.+?) to the (.+?)\.", text):
            held, lies[found[1]] = "nothing", found[2]
        if found := re.match(r"You (clean|heat|cool) the (.+?) using", text):
            held = f"{found[2]} {MADE[found[1]]}"
        if found := re.match(r"You turn on the (.+?)\.", text):
            lit = f" ; {found[1]} on"
    task = start.partition(TASK)[2]
    parts = [f"{task} hold {held}{lit}", f"at {here} {places.pop(here, 'seen')}"]
    named = {name: place for name, place in lies.items() if name.partition(" ")[0] in re.findall(r"\w+", task)}
    parts += [f"{name} {'here' if place == here else f'at {place}'}" for name, place in named.items()]
    return " ; ".join(parts + [f"{place} {known}" for place, known in places.items() if known != "seen"])


class ALFWorld:
    """The task; its options are the keyword arguments, their meaning is in config.py. ValueError if one is bad."""

    append_only = False

    def __init__(
        self,
        *,
        games: str = "own",
        prompt_style: str = "compact",
        history: int = 2,
        anchor: str = "state",
        max_turns: int = 50,
    ):
        if history < 0:
            raise ValueError(f"history {history}: allowed is 0 and up")
        self.games, self.prompt_style, self.history = games, prompt_style, history
        self.anchor, self.max_turns = anchor, max_turns
        if games == "official":
            self.tasks("train")  # says before anything else what is wrong with the data

    def tasks(self, split: str) -> list[str]:
        """Ids in a fixed order. ValueError on an unknown split, or data that cannot be read."""
        if self.games == "official" and split not in OFFICIAL:
            raise ValueError(f"split {split!r}: allowed are {', '.join(OFFICIAL)}")
        if self.games == "official":
            return [task_id for task_id in index(data_folder()) if task_id.startswith(f"{split}/")]
        if split not in alfworld_rooms.SPLITS:
            raise ValueError(f"split {split!r}: allowed are {', '.join(alfworld_rooms.SPLITS)}")
        return [f"{split}/{number}" for number in range(alfworld_rooms.SPLITS[split])]

    def reset(self, task_id: str) -> Observation:
        """Start the game of an id."""
        own = self.games == "own"
        task, problem = alfworld_rooms.problem(task_id)[1:] if own else read_game(task_id)[:2]
        self.game, self.state = read_problem(problem)
        return self._observe(intro(self.game, task))

    def step(self, action: str | None) -> Step:
        """One turn; a command that is not admissible, or None, passes it. Done when the goal holds; reward 10 then."""
        done = self.admissible.get((action or "").strip())
        text = act(self.game, self.state, *done) if done else NOTHING
        won = holds(self.game, self.state, self.game.goal, {})
        return Step(self._observe(text), 10.0 * won, won, won, float(won))

    def _observe(self, text: str) -> Observation:
        self.admissible = commands(self.game, self.state)
        key = text if self.anchor == "observation" else state_key(self.state)
        self.observation = Observation(text, key, tuple(sorted(self.admissible)))
        return self.observation

    def task_type(self, task_id: str) -> str:
        """One of the six types."""
        own = self.games == "own"
        return alfworld_rooms.problem(task_id)[0] if own else task_id.split("/")[1].partition("-")[0]

    def prompt(self, history: list[tuple[Observation, str | None]]) -> list[dict[str, str]]:
        """Appendix H.1.3: the last `history` turns and all admissible actions but help; or what `compact` makes."""
        last, count = history[-1][0], len(history) - 1
        if self.prompt_style == "compact":
            return [{"role": "user", "content": compact(history)}]
        past = list(enumerate(history[:-1], 1))[-self.history :] if self.history else []
        pairs = "\n".join(PAIR.format(number=i, observation=o.text, action=a or "none") for i, (o, a) in past)
        actions = "\n ".join(f"'{action}'" for action in last.actions if action != "help")
        template = LATER if count else FIRST
        content = template.format(
            task=history[0][0].text.partition(TASK)[2],
            count=count,
            shown=len(past),
            pairs=pairs,
            number=count + 1,
            observation=last.text,
            actions=actions,
            closing=CLOSING,
        )
        return [{"role": "user", "content": content}]

    def parse(self, response: str) -> tuple[str | None, bool]:
        """The command in lower case and whether the format holds; one that is not admissible is valid, and lost."""
        action, valid = parse_think_action(response)
        return action.lower() if valid else None, valid

    def expert(self, rng: random.Random, noise: float = 0.0) -> str:
        """What one would do who searches, behind what it leads to; with probability `noise` any admissible command.

        Walkthroughs know where everything lies. A policy, which does not, can imitate a search.
        """
        command, thought = advise(self.game, self.state)
        if rng.random() < noise:
            command = rng.choice([c for c in sorted(self.admissible) if c not in ("help", "look", "inventory")])
        return f"<think> {thought} </think> <action> {command} </action>"

    def snapshot(self):
        """Where the game stands, for restore."""
        return self.game, self.state.copy(), self.observation

    def restore(self, snapshot) -> Observation:
        """Go on from a snapshot, of this instance or of another one."""
        self.game, state, self.observation = snapshot
        self.state, self.admissible = state.copy(), commands(self.game, state)
        return self.observation

    def words(self) -> list[str]:
        """Every word of the task, in a fixed order, read from its games; an action may come back in lower case."""
        if self.games == "own":
            games = [alfworld_rooms.problem(f"train/{i}")[1:] for i in range(600)]
        else:  # each of them names all types of things
            known = index(data_folder())
            games = [(task, "") for task, _ in known.values()] + [read_game(next(iter(known)))[:2]]
        kinds = {word.lower() for _, problem in games for word in re.findall(r"(\w+)Type\b", problem)}
        texts = f"{' '.join(sorted(kinds))} sinkbasin bathtubbasin {' '.join(MADE.values())} {WORDS} {' '.join(TAGS)}"
        texts += " " + " ".join(str(i) for i in range(60)) + " " + " ".join(sorted({task for task, _ in games}))
        if self.prompt_style == "words":
            texts += f" {FIRST} {LATER} {CLOSING} {PAIR} {HELP} {SAID}"
        return list(dict.fromkeys(f"{texts} {texts.lower()}".split()))

    def action_type(self, action: str | None) -> str:
        """The verb, `other` for what is no command, `invalid` for a broken response."""
        verb = (action or "").partition(" ")[0]
        return "invalid" if action is None else verb if verb in VERBS else "other"


def main() -> None:
    """Play a game in the terminal, or watch the expert play it."""
    parser = argparse.ArgumentParser(prog="python -m envs.alfworld", description=main.__doc__)
    parser.add_argument("--games", choices=("own", "official"), default="own")
    parser.add_argument("--game", help="an id; the first of valid_seen by default")
    parser.add_argument(
        "--expert", action="store_true", help="follow the walkthrough; in games of our own, the expert"
    )
    args = parser.parse_args()
    try:
        env = ALFWorld(games=args.games)
        game = args.game or env.tasks("valid_seen")[0]
        seen = env.reset(game)
        plan = read_game(game)[2] if args.games == "official" else []
    except ValueError as error:
        parser.error(str(error))
    print(seen.text)
    for turn in range(1, env.max_turns + 1):
        told = (plan.pop(0) if plan else env.parse(env.expert(random.Random(0)))[0]) if args.expert else ""
        print(f"\n{turn}> {told}", end="\n" if told else "", flush=True)
        command = told or sys.stdin.readline()
        if not command:
            break
        step = env.step(command)
        print(step.observation.text)
        if step.done:
            print(f"\nwon in {turn} turns")
            return
    print("\nnot won")


if __name__ == "__main__":
    main()
