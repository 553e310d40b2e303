"""Sokoban with the rules and rewards of gym-sokoban, rooms of our own making and a breadth-first solver.

Actions are up, down, left, right: a push where a box is in the way, otherwise a step; against a wall nothing moves.
Reward: -0.1 a turn, +1 for a box onto a target, -1 for a box off it, +10 for the last one (10.9 when one box is home).

A level is a room (size x size, a border of wall, up to `max_walls` inner walls, targets) with a start (player,
boxes) that takes `min_solution` to `max_solution` moves, every length equally often. Splits cannot overlap: a
digest of the room sends one room in eight to valid_unseen, with all its states; of the other rooms, a digest of the
level sends one in eight to valid_seen (a start never trained on, in a room that may be), the rest to train.
"""

import random
from functools import lru_cache
from hashlib import blake2b
from math import comb

from envs import TAGS, Observation, Step, parse_think_action

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
SPLITS = {"train": 65536, "valid_seen": 512, "valid_unseen": 512}
SYMBOLS = {
    "#": "wall",
    "_": "floor",
    "O": "target",
    "X": "box",
    "P": "player",
    "√": "box on target",
    "S": "player on target",
}

Cell = tuple[int, int]
Room = tuple[int, frozenset[Cell], frozenset[Cell]]  # size, inner walls, targets
State = tuple[Cell, frozenset[Cell]]  # player, boxes

RULES = """You are an expert agent operating in the Sokoban environment. Your goal is to push all the boxes onto \
the target spots. Once all boxes are on the targets, you win!
# Rules
You can only push boxes. You can't pull them, so plan ahead to avoid getting stuck.
You can't walk through or push boxes into walls.
To avoid traps, do not push boxes into corners or against walls where they can't be moved again."""
GRID_LEGEND = """# Symbols in the Grid
# is a wall, _ is floor, O is a target, X is a box, P is you, √ is a box on a target, S is you on a target."""
COORDS_LEGEND = """# Coordinates
Every object is given as a row (from the top, starting at 0) and a column (from the left, starting at 0)."""
TASK = """# Current Step
{history}Your current observation is:
{observation}
Your admissible actions are ["up", "down", "left", "right"].
Now it's your turn to make a move (choose ONE action only for the current step).
You should first reason step-by-step about the current situation - observe the positions of boxes and targets, plan a \
path to push a box toward a target, and avoid traps like corners or walls. This reasoning process MUST be enclosed \
within <think> </think> tags. Once you've finished your reasoning, you should choose an admissible action for the \
current step and present it within <action> </action> tags."""
PAIR = "[Observation {number}: '{observation}', Action {number}: '{action}']"
HISTORY = "You have already taken {count} step(s). The most recent observations and the actions you took:\n{pairs}\n"


def inside(room: Room) -> list[Cell]:
    """The cells of a room that are not wall."""
    size, walls, _ = room
    return [(r, c) for r in range(1, size - 1) for c in range(1, size - 1) if (r, c) not in walls]


def move(floor: frozenset[Cell], state: State, action: str) -> State:
    """The state after an action; the same one where a wall, or a box that cannot move, is in the way."""
    (r, c), boxes = state
    dr, dc = MOVES[action]
    ahead, beyond = (r + dr, c + dc), (r + 2 * dr, c + 2 * dc)
    if ahead not in floor:
        return state
    if ahead not in boxes:
        return ahead, boxes
    if beyond not in floor or beyond in boxes:
        return state
    return ahead, boxes - {ahead} | {beyond}


@lru_cache(maxsize=1024)
def distances(room: Room) -> dict[State, int]:
    """Fewest moves to a solution from every solvable state: breadth-first search from the solved ones, by pulling."""
    floor, targets = frozenset(inside(room)), room[2]
    frontier = [(player, targets) for player in sorted(floor - targets)]
    found = dict.fromkeys(frontier, 0)
    while frontier:
        reached = []
        for (r, c), boxes in frontier:
            for dr, dc in MOVES.values():
                before, ahead = (r - dr, c - dc), (r + dr, c + dc)
                if before not in floor or before in boxes:
                    continue
                sources = [(before, boxes)]  # the player walked here
                if ahead in boxes:
                    sources.append((before, boxes - {ahead} | {(r, c)}))  # or pushed a box from here
                for source in sources:
                    if source not in found:
                        found[source] = found[(r, c), boxes] + 1
                        reached.append(source)
        frontier = reached
    return found


@lru_cache(maxsize=1024)
def starts(room: Room) -> dict[int, list[State]]:
    """The solvable states of a room by their distance to a solution, in a fixed order."""
    by_distance: dict[int, list[State]] = {}
    for state, distance in distances(room).items():
        by_distance.setdefault(distance, []).append(state)
    return {distance: sorted(states, key=state_key) for distance, states in by_distance.items()}


def state_key(state: State) -> str:
    """Player and boxes in words, independent of set order."""
    return f"{state[0]} {sorted(state[1])}"


def room_key(room: Room) -> str:
    """Size, inner walls and targets in words, independent of set order."""
    return f"{room[0]} {sorted(room[1])} {sorted(room[2])}"


def split_of(room: Room, state: State) -> str:
    """Where a level belongs, by digest; see the head of the file."""

    def one_in_eight(text: str) -> bool:
        return blake2b(text.encode(), digest_size=8).digest()[0] % 8 == 0

    if one_in_eight(room_key(room)):
        return "valid_unseen"
    return "valid_seen" if one_in_eight(f"{room_key(room)} {state_key(state)}") else "train"


@lru_cache(maxsize=65536)
def generate(
    task_id: str, size: int, boxes: int, max_walls: int, min_solution: int, max_solution: int
) -> tuple[Room, State]:
    """The level of a task id `split/number`: the number fixes the solution length and seeds the draws."""
    split, _, number = task_id.partition("/")
    if split not in SPLITS or not number.isdecimal():
        raise ValueError(f"task {task_id!r}: allowed is split/number, split one of {', '.join(SPLITS)}")
    rng = random.Random(f"sokoban {task_id} {size} {boxes} {max_walls}")
    length = min_solution + int(number) % (max_solution - min_solution + 1)
    cells = inside((size, frozenset(), frozenset()))
    for _ in range(10_000):
        drawn = rng.sample(cells, boxes + rng.randint(0, max_walls))
        room = size, frozenset(drawn[boxes:]), frozenset(drawn[:boxes])
        candidates = [state for state in starts(room).get(length, ()) if split_of(room, state) == split]
        if candidates:
            return room, candidates[rng.randrange(len(candidates))]
    raise ValueError(
        f"max_solution {max_solution}: in {split} no {size}x{size} room with {boxes} boxes, at most {max_walls} walls "
        f"takes {length} moves"
    )


class Sokoban:
    """The task; its options are the keyword arguments, their meaning is in config.py. ValueError if one is bad."""

    append_only = False

    def __init__(
        self,
        *,
        size: int = 6,
        boxes: int = 1,
        max_walls: int = 1,
        min_solution: int = 3,
        max_solution: int = 8,
        max_turns: int = 12,
        observation: str = "coords",
        prompt_style: str = "compact",
        history: int = 0,
    ):
        if observation not in ("grid", "coords"):
            raise ValueError(f"observation {observation!r}: allowed are grid, coords")
        if prompt_style not in ("words", "compact"):
            raise ValueError(f"prompt_style {prompt_style!r}: allowed are words, compact")
        if not 1 <= min_solution <= max_solution <= max_turns:
            raise ValueError(
                f"min_solution {min_solution}, max_solution {max_solution}: allowed is "
                f"1 <= min_solution <= max_solution <= max_turns {max_turns}"
            )
        if history < 0:
            raise ValueError(f"history {history}: allowed is 0 and up")
        cells = (size - 2) ** 2
        if size < 4 or boxes < 1 or max_walls < 0 or boxes + max_walls >= cells - 1:
            raise ValueError(
                f"size {size}, boxes {boxes}, max_walls {max_walls}: allowed is a room with space to move"
            )
        if cells * comb(cells, boxes) > 10_000:
            raise ValueError(f"size {size}, boxes {boxes}: allowed are rooms of at most 10,000 states, for the solver")
        self.level = (size, boxes, max_walls, min_solution, max_solution)
        self.max_turns, self.history = max_turns, history
        self.observation, self.prompt_style = observation, prompt_style

    def tasks(self, split: str) -> list[str]:
        """Ids `split/number`; the levels of a validation panel are all different. ValueError on an unknown split."""
        if split not in SPLITS:
            raise ValueError(f"split {split!r}: allowed are {', '.join(SPLITS)}")
        if split == "train":
            return [f"train/{number}" for number in range(SPLITS[split])]
        return list(_panel(split, *self.level))

    def reset(self, task_id: str) -> Observation:
        """Start the level of a task id."""
        self.room, self.state = generate(task_id, *self.level)
        self.floor = frozenset(inside(self.room))
        self.score = 0.0
        return self._observe()

    def step(self, action: str | None) -> Step:
        """One turn; an action that is not a move passes it. Done when solved."""
        before = len(self.state[1] & self.room[2])
        if action in MOVES:
            self.state = move(self.floor, self.state, action)
        home, targets = len(self.state[1] & self.room[2]), len(self.room[2])
        success = home == targets
        reward = -0.1 + (home - before) + (10.0 if success else 0.0)
        self.score += reward
        return Step(self._observe(), reward, success, success, self.score)

    def prompt(self, history: list[tuple[Observation, str | None]]) -> list[dict[str, str]]:
        """Appendix H.1.4 in words, with a text observation for its image; or the bare observation (compact)."""
        text = history[-1][0].text
        past = history[:-1][-self.history :] if self.history else []
        pairs = [
            PAIR.format(number=number, observation=observation.text, action=action or "none")
            for number, (observation, action) in enumerate(past, start=len(history) - len(past))
        ]
        if self.prompt_style == "compact":
            lines = [f"{observation.text} {action or 'none'}" for observation, action in past]
            return [{"role": "user", "content": "\n".join([*lines, text])}]
        shown = HISTORY.format(count=len(history) - 1, pairs="\n".join(pairs)) if pairs else ""
        legend = GRID_LEGEND if self.observation == "grid" else COORDS_LEGEND
        content = f"{RULES}\n{legend}\n{TASK.format(history=shown, observation=text)}"
        return [{"role": "user", "content": content}]

    def parse(self, response: str) -> tuple[str | None, bool]:
        """The action in lower case and whether the format holds; any word is valid, only four do something."""
        action, valid = parse_think_action(response)
        return action.lower() if valid else None, valid

    def expert(self, rng: random.Random, noise: float = 0.0) -> str:
        """An optimal move behind the direction of the next push, or with probability `noise` any two directions."""
        moves = None if rng.random() < noise else self.optimal()
        action, push = moves or (rng.choice(list(MOVES)), rng.choice(list(MOVES)))
        return f"<think> push {push} </think> <action> {action} </action>"

    def optimal(self) -> tuple[str, str] | None:
        """The next move of a shortest solution and the direction of its next push; None where there is no solution."""
        table, state, moves = distances(self.room), self.state, []
        while table.get(state):
            closer = (a for a in MOVES if table.get(move(self.floor, state, a), table[state]) < table[state])
            moves.append(next(closer))
            after = move(self.floor, state, moves[-1])
            if after[1] != state[1]:
                return moves[0], moves[-1]
            state = after
        return None

    def words(self) -> list[str]:
        """Every word of the task, split at white space, in a fixed order; an action may come back in lower case."""
        words = f"{' '.join(TAGS)} {' '.join(MOVES)} push none player box target wall {' '.join(SYMBOLS)} "
        words += " ".join(str(i) for i in range(max(self.level[0], self.max_turns + 1)))
        if self.prompt_style == "words":
            words += f" {RULES} {GRID_LEGEND} {COORDS_LEGEND} {TASK} {HISTORY} {PAIR}"
        return list(dict.fromkeys(f"{words} {words.lower()}".split()))

    def action_type(self, action: str | None) -> str:
        """The move itself, `other` for a word that is no move, `invalid` for a broken response."""
        return "invalid" if action is None else action if action in MOVES else "other"

    def task_type(self, task_id: str) -> str:
        """The length of the shortest solution, as `n moves`."""
        room, state = generate(task_id, *self.level)
        return f"{distances(room)[state]} moves"

    def _observe(self) -> Observation:
        text = _grid(self.room, self.state) if self.observation == "grid" else _coords(self.room, self.state)
        return Observation(text, state_key(self.state), tuple(MOVES))


@lru_cache(maxsize=16)
def _panel(split: str, *level: int) -> list[str]:
    """Ids of a validation panel: number i, or the next i + a multiple of the stride whose level is new."""
    lengths = level[-1] - level[-2] + 1
    seen: dict[tuple, str] = {}
    for i in range(SPLITS[split]):
        numbers = range(i, i + 100 * lengths * SPLITS[split], lengths * SPLITS[split])
        new = ((generate(f"{split}/{n}", *level), f"{split}/{n}") for n in numbers)
        found = next(((start, task_id) for start, task_id in new if start not in seen), None)
        if found is None:
            raise ValueError(
                f"max_walls {level[2]}, max_solution {level[-1]}: {split} has too few levels, {len(seen)}"
            )
        seen[found[0]] = found[1]
    return list(seen.values())


def _grid(room: Room, state: State) -> str:
    """One line a row, one symbol a cell, as in the released code but with single blanks between."""
    size, walls, targets = room
    player, boxes = state
    open_cells = set(inside(room))

    def symbol(cell: Cell) -> str:
        if cell not in open_cells:
            return "#"
        if cell == player:
            return "S" if cell in targets else "P"
        if cell in boxes:
            return "√" if cell in targets else "X"
        return "O" if cell in targets else "_"

    return "\n".join(" ".join(symbol((r, c)) for c in range(size)) for r in range(size))


def _coords(room: Room, state: State) -> str:
    """Objects by row and column in a fixed order; a room without inner walls shows the corner 0 0 as its wall."""
    objects = [
        ("player", [state[0]]),
        ("box", sorted(state[1])),
        ("target", sorted(room[2])),
        ("wall", sorted(room[1]) or [(0, 0)]),
    ]
    return " ".join(f"{name} {r} {c}" for name, cells in objects for r, c in cells)
