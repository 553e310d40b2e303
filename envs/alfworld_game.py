"""The rules and texts of ALFWorld's games: a PDDL problem read, played and judged, without TextWorld or a planner.

A problem says where objects lie, what they can become, and a goal formula. Rules and texts are those of alfworld 0.4
("move X to Y"): case counts, and a command that is not admissible changes nothing. `commands` is the one source of
what can be done; `act` does it.
"""

import re
from dataclasses import dataclass, field

CLEAN, HEAT, COOL = "clean", "heat", "cool"
APPLIANCES = {CLEAN: ("sinktype", "sinkbasintype"), HEAT: ("microwavetype",), COOL: ("fridgetype",)}
ABLE = {CLEAN: "cleanable", HEAT: "heatable", COOL: "coolable"}
MADE = {CLEAN: "isclean", HEAT: "ishot", COOL: "iscool"}
KNIVES = ("knifetype", "butterknifetype")
CHANGING = ("isclean", "ishot", "iscool", "issliced", "istoggled", "opened")  # predicates of one argument
MEANS = {  # what `help` says of a command
    "look": "look around your current location",
    "inventory": "check your current inventory",
    "go to (receptacle)": "move to a receptacle",
    "open (receptacle)": "open a receptacle",
    "close (receptacle)": "close a receptacle",
    "take (object) from (receptacle)": "take an object from a receptacle",
    "move (object) to (receptacle)": "place an object in or on a receptacle",
    "examine (something)": "examine a receptacle or an object",
    "use (object)": "use an object",
    "heat (object) with (receptacle)": "heat an object using a receptacle",
    "clean (object) with (receptacle)": "clean an object using a receptacle",
    "cool (object) with (receptacle)": "cool an object using a receptacle",
    "slice (object) with (object)": "slice an object using a sharp object",
}
HELP = "Available commands:\n" + "".join(
    f"  {command}:".ljust(0 if command.startswith("move") else 36) + ("  " * command.startswith("move")) + f"{means}\n"
    for command, means in MEANS.items()
)
NOTHING = "Nothing happens."


@dataclass(frozen=True)
class Game:
    """What never changes while a problem is played."""

    name: dict[str, str]  # id -> name with its number
    kind: dict[str, str]  # id -> PDDL type, of receptacles and objects
    place: dict[str, str]  # receptacle -> location
    contains: frozenset[tuple[str, str]]  # receptacle type, object type
    facts: dict[str, frozenset[tuple[str, ...]]]  # all others, by predicate
    goal: list  # a formula
    agent: str


@dataclass
class State:
    """What a step changes; `copy` is a snapshot."""

    at: str  # location of the agent
    held: str = ""
    inside: set[tuple[str, str]] = field(default_factory=set)  # object, receptacle; some lie in two
    lies: set[tuple[str, str]] = field(default_factory=set)  # object, location
    gone: set[tuple[str, str]] = field(default_factory=set)  # object, receptacle it was taken from
    seen: set[str] = field(default_factory=set)  # receptacles whose objects were shown
    made: dict[str, set[str]] = field(default_factory=dict)  # predicate of CHANGING -> objects or receptacles

    def copy(self) -> "State":
        """The same, apart."""
        made = {name: {*which} for name, which in self.made.items()}
        return State(self.at, self.held, {*self.inside}, {*self.lies}, {*self.gone}, {*self.seen}, made)


def read_formula(text: str) -> list:
    """The first formula of a text as nested lists. ValueError where a bracket is missing."""
    stack = [[]]
    for token in re.findall(r"[()]|[^\s()]+", text):
        if token == "(":
            stack.append([])
        elif token == ")":
            inner = stack.pop()
            stack[-1].append(inner)
            if len(stack) == 1:
                return inner
        else:
            stack[-1].append(token)
    raise ValueError("a bracket of the goal is not closed")


def number_names(ids: list[str]) -> dict[str, str]:
    """The part before `_bar_`, "basin" behind it where the id has one, and numbers that fall in the order of ids."""
    bases = {i: i.partition("_bar_")[0] + "basin" * ("basin" in i) for i in sorted(ids)}
    left = {base: list(bases.values()).count(base) for base in set(bases.values())}
    names = {}
    for i, base in bases.items():
        names[i] = f"{base} {left[base]}"
        left[base] -= 1
    return names


def read_problem(problem: str) -> tuple[Game, State]:
    """The game of a PDDL problem and how it begins. ValueError where a part is missing."""
    problem = problem.lower()
    objects, found, rest = problem.partition("(:init")
    init, found_goal, goal = rest.partition("(:goal")
    if not (found and found_goal):
        raise ValueError("no (:init or no (:goal in the problem")
    facts: dict[str, set] = {}
    for predicate, *arguments in (fact.split() for fact in re.findall(r"\(([^()]+)\)", init)):
        facts.setdefault(predicate, set()).add(tuple(arguments))
    kind = dict(facts.get("objecttype", ())) | dict(facts.get("receptacletype", ()))
    place = dict(facts.pop("receptacleatlocation"))
    (agent, at), *_ = facts.pop("atlocation")
    state = State(at, inside=facts.pop("inreceptacle", set()), lies=facts.pop("objectatlocation", set()))
    state.made = {name: {fact[0] for fact in facts.pop(name, ())} for name in CHANGING}
    contains = frozenset(facts.pop("cancontain", ()))
    place = {receptacle: place[receptacle] for receptacle in sorted(place)}
    static = {predicate: frozenset(rows) for predicate, rows in facts.items()}
    return Game(number_names([*kind]), kind, place, contains, static, read_formula(f"({goal}")[0], agent), state


def rows(game: Game, state: State, predicate: str):
    """The facts of a predicate now: tuples of its arguments."""
    if predicate in state.made:
        return [(i,) for i in state.made[predicate]]
    now = {
        "holds": [(game.agent, state.held)] if state.held else [],
        "atlocation": [(game.agent, state.at)],
        "inreceptacle": state.inside,
        "receptacleatlocation": game.place.items(),
    }
    return now.get(predicate) or game.facts.get(predicate, ())


def matches(game: Game, state: State, atoms: list, bound: dict[str, str]):
    """Every way to give the variables of atoms values, beyond those in `bound`, that makes each of them a fact."""
    if not atoms:
        yield bound
        return
    (predicate, *arguments), *others = atoms
    for row in rows(game, state, predicate):
        more = dict(bound)
        if all((more.setdefault(a, v) if a[0] == "?" else a) == v for a, v in zip(arguments, row, strict=True)):
            yield from matches(game, state, others, more)


def holds(game: Game, state: State, formula: list, bound: dict[str, str]) -> bool:
    """Whether a formula of and, exists, not, = and facts is true; variables get their values from facts."""
    head, *parts = formula
    if head == "exists":
        inner = {name: value for name, value in bound.items() if name not in parts[0]}
        return holds(game, state, parts[1], inner)
    if head == "not":
        return not holds(game, state, parts[0], bound)
    if head == "=":
        return len({bound.get(part, part) for part in parts}) == 1
    parts = parts if head == "and" else [formula]
    atoms = [part for part in parts if part[0] not in ("and", "exists", "not", "=")]
    atoms.sort(key=lambda atom: len(rows(game, state, atom[0])))
    others = [part for part in parts if part not in atoms]
    return any(all(holds(game, state, part, b) for part in others) for b in matches(game, state, atoms, bound))


def listed(names: list[str]) -> str:
    """`a x`, `a x, and a y`, `a x, a y, and a z`, or `nothing`."""
    names = [f"a {name}" for name in names]
    return ", ".join(names[:-1] + [f"and {names[-1]}"]) if len(names) > 1 else "".join(names) or "nothing"


def closed(game: Game, state: State, receptacle: str) -> bool:
    """Whether one has to open it first."""
    return (receptacle,) in game.facts.get("openable", ()) and receptacle not in state.made["opened"]


def content(game: Game, state: State, receptacle: str) -> str:
    """What is seen of a receptacle."""
    name = game.name[receptacle]
    if closed(game, state, receptacle):
        return f"The {name} is closed."
    state.seen.add(receptacle)
    seen = listed([game.name[o] for o, r in sorted(state.inside) if r == receptacle])
    if (receptacle,) in game.facts.get("openable", ()):
        return f"The {name} is open. In it, you see {seen}."
    return f"On the {name}, you see {seen}."


def commands(game: Game, state: State) -> dict[str, tuple[str, ...]]:
    """Every admissible command with its verb and the ids it is about."""
    name, held, facts = game.name, state.held, game.facts
    found = {verb: (verb,) for verb in ("help", "inventory", "look")}
    found |= {f"go to {name[r]}": ("go", r) for r, at in game.place.items() if at != state.at}
    for r in (r for r, at in game.place.items() if at == state.at):
        found[f"examine {name[r]}"] = ("examine", r)
        shut, objects = closed(game, state, r), [o for o, where in state.inside if where == r]
        if (r,) in facts.get("openable", ()):
            verb = "open" if shut else "close"
            found[f"{verb} {name[r]}"] = (verb, r)
        if not held and not shut:
            pickupable = facts.get("pickupable", ())
            found |= {f"take {name[o]} from {name[r]}": ("take", o, r) for o in objects if (o,) in pickupable}
        if held and not shut and (game.kind[r], game.kind[held]) in game.contains:
            found[f"move {name[held]} to {name[r]}"] = ("move", held, r)
        for verb, kinds in APPLIANCES.items():
            if game.kind[r] in kinds and (held,) in facts.get(ABLE[verb], ()):
                found[f"{verb} {name[held]} with {name[r]}"] = (verb, held, r)
        found |= {f"use {name[o]}": ("use", o) for o in objects if (o,) in facts.get("toggleable", ())}
    if held:
        found[f"examine {name[held]}"] = ("examine", held)
    if held and game.kind[held] in KNIVES:
        near = [o for o, at in state.lies if at == state.at and (o,) in facts.get("sliceable", ())]
        found |= {f"slice {name[o]} with {name[held]}": ("slice", o, held) for o in near}
    return found


def look(game: Game, state: State) -> str:
    """What `look` says: beside it lies what was taken from a receptacle here and is at this location again."""
    here = [r for r, at in game.place.items() if at == state.at]
    if not here:
        return "You are in the middle of a room. Looking quickly around you, you see nothing."
    facing = [game.name[r] for r in here]
    facing = ", ".join(facing[:-1] + [f"and {facing[-1]}"]) if len(facing) > 1 else facing[0]
    beside = [game.name[o] for o, r in sorted(state.gone) if r in here and (o, state.at) in state.lies]
    return f"You are facing the {facing}. Next to it, you see {listed(beside)}."


def describe(game: Game, state: State, o: str) -> str:
    """What `examine` says of an object in hand."""
    name, made = game.name[o], state.made
    clean, hot, cool, sliced = (o in made[p] for p in ("isclean", "ishot", "iscool", "issliced"))
    if (o,) in game.facts.get("isreceptacleobject", ()):
        within = [game.name[i] for i, box in sorted(game.facts.get("inreceptacleobject", ())) if box == o]
        return f"This is a normal {name}. In it, you see {listed(within)}."
    warm = "hot" if hot else "cool" if cool else ""
    words = " ".join([" and ".join(filter(None, [warm, "clean" * clean])), "sliced" * sliced]).split()
    if words == ["cool"]:
        words = ["cold"]
    if words == ["sliced"] or not words:
        if (o,) in game.facts.get("toggleable", ()):
            return f"This {name} is {'on' if o in made['istoggled'] else 'off'}."
        if not words:
            return f"There's nothing special about {name}."
    return f"This is a {' '.join(words)} {name}."


def act(game: Game, state: State, verb: str, *ids: str) -> str:
    """Do an admissible command to the state; returns what is said of it."""
    first, second = ([game.name[i] for i in ids] + ["", ""])[:2]
    if verb == "help":
        return HELP
    if verb == "look":
        return look(game, state)
    if verb == "inventory":
        return f"You are carrying: a {game.name[state.held]}." if state.held else "You are not carrying anything."
    if verb == "examine":
        return content(game, state, ids[0]) if ids[0] in game.place else describe(game, state, ids[0])
    if verb == "go":
        state.at = game.place[ids[0]]
        return f"You arrive at {first}. {content(game, state, ids[0])}"
    if verb == "open":
        state.made["opened"].add(ids[0])
        return f"You open the {first}. {content(game, state, ids[0])}"
    if verb == "close":
        state.made["opened"].discard(ids[0])
        return f"You close the {first}."
    if verb == "take":
        state.held = ids[0]
        state.inside.remove(ids)
        state.gone.add(ids)
        state.lies.discard((ids[0], state.at))
        return f"You pick up the {first} from the {second}."
    if verb == "move":
        state.inside.add(ids)
        state.gone.discard(ids)
        state.lies.add((ids[0], state.at))
        state.held = ""
        return f"You move the {first} to the {second}."
    if verb == "use":
        state.made["istoggled"].add(ids[0])
        return f"You turn on the {first}."
    if verb == "slice":
        state.made["issliced"].add(ids[0])
        return f"You sliced the {first} with the {second}."
    state.made[MADE[verb]].add(ids[0])
    if verb != CLEAN:
        state.made[MADE[COOL if verb == HEAT else HEAT]].discard(ids[0])
    return f"You {verb} the {first} using the {second}."


def intro(game: Game, task: str) -> str:
    """What a game says at its beginning."""
    seen = listed([game.name[receptacle] for receptacle in game.place])
    room = f"You are in the middle of a room. Looking quickly around you, you see {seen}."
    return f"-= Welcome to TextWorld, ALFRED! =-\n\n{room}\n\n{task}"


def atoms_of(formula: list) -> list[list[str]]:
    """All facts of a formula, whatever joins them."""
    if formula[0] in ("and", "not"):
        return [atom for part in formula[1:] for atom in atoms_of(part)]
    return atoms_of(formula[2]) if formula[0] == "exists" else [formula]


def advise(game: Game, state: State) -> tuple[str, str]:
    """(the next command, the one it leads to) for who knows of objects only what was seen."""
    atoms = atoms_of(game.goal)
    lamp_kinds = {a[2] for a in atoms if a[0] == "objecttype" and ["toggleable", a[1]] in atoms}
    thing = next(a[2] for a in atoms if a[0] == "objecttype" and a[2] not in lamp_kinds)
    target = next((a[2] for a in atoms if a[0] == "receptacletype"), None)
    verb = next((verb for verb, made in MADE.items() if any(a[0] == made for a in atoms)), None)
    held, kind, name = state.held, game.kind, game.name
    made = state.made[MADE[verb]] if verb else set()
    done = [o for o in kind if kind[o] == thing and (not verb or o in made)]
    placed = [(o, r) for o, r in sorted(state.inside) if o in done and kind[r] == target and r in state.seen]
    placed = [pair for pair in placed if pair[1] == placed[0][1]]  # two of them have to lie in the same

    def at(receptacle: str, command: str, shut: bool = False) -> tuple[str, str]:
        if game.place[receptacle] != state.at:
            return f"go to {name[receptacle]}", command
        return f"open {name[receptacle]}" if not shut and closed(game, state, receptacle) else command, command

    if held and kind[held] != thing:
        fits = [r for r in game.place if (kind[r], kind[held]) in game.contains]
        r = min(fits, key=lambda r: game.place[r] != state.at, default=None)
        return at(r, f"move {name[held]} to {name[r]}") if r else ("look", "look")
    if held and verb and held not in made:
        r = next(r for r in game.place if kind[r] in APPLIANCES[verb])
        return at(r, f"{verb} {name[held]} with {name[r]}", shut=True)
    if held and target:
        r = placed[0][1] if placed else next(r for r in game.place if kind[r] == target)
        return at(r, f"move {name[held]} to {name[r]}")
    wanted = lamp_kinds if held else {thing}
    known = [(o, r) for o, r in sorted(state.inside - {*placed}) if kind[o] in wanted and r in state.seen]
    if known and held:
        return at(known[0][1], f"use {name[known[0][0]]}", shut=True)
    if known:
        o, r = known[0]
        return at(r, f"take {name[o]} from {name[r]}")
    unseen = sorted((r for r in game.place if r not in state.seen), key=lambda r: game.place[r] != state.at)
    return at(unseen[0], f"examine {name[unseen[0]]}") if unseen else ("look", "look")
