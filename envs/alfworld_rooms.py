"""Household games of our own, in the problem format of the official ones: a kitchen, a bedroom, or both as one flat.

`problem("train/17")` draws a game from its id: room, goal of one of the six types, and where the objects lie. Splits
cannot overlap: one goal in eight (type, object, receptacle), by digest, is in valid_unseen alone, and of the games
with other goals a digest of the whole problem sends one in eight to valid_seen.
"""

import random
from functools import lru_cache
from hashlib import blake2b

SPLITS = {"train": 8192, "valid_seen": 480, "valid_unseen": 480}
ROOMS = {
    "kitchen": ("Cabinet", "CounterTop", "Fridge", "Microwave", "SinkBasin"),
    "bedroom": ("Bed", "Desk", "Drawer", "Drawer", "SideTable"),
}
ROOMS["flat"] = ROOMS["kitchen"] + ROOMS["bedroom"]
OPENABLE = ("Cabinet", "Drawer", "Fridge", "Microwave")
FOOD, DISHES, THINGS = ("Apple", "Bread", "Tomato"), ("Cup", "Mug", "Plate"), ("Book", "CD", "KeyChain", "Pen")
OBJECTS = {"kitchen": FOOD + DISHES, "bedroom": THINGS, "flat": FOOD + DISHES + THINGS}
HOLDS = {name: FOOD + DISHES for name in ROOMS["kitchen"]} | {name: THINGS for name in ROOMS["bedroom"]}
HOLDS |= {name: FOOD + DISHES + THINGS for name in ("CounterTop", "Desk", "SideTable")}
HOLDS["Microwave"] = FOOD + ("Mug", "Cup")
ABLE = {"pickupable": FOOD + DISHES + THINGS, "cleanable": ("Apple", "Tomato") + DISHES, "sliceable": FOOD}
ABLE |= {"heatable": FOOD + ("Cup", "Mug", "Plate"), "coolable": FOOD + DISHES}
VERBS = {
    "pick_clean_then_place_in_recep": ("clean", "cleanable", "isClean"),
    "pick_heat_then_place_in_recep": ("heat", "heatable", "isHot"),
    "pick_cool_then_place_in_recep": ("cool", "coolable", "isCool"),
}
PLACE, LOOK, TWO = "pick_and_place_simple", "look_at_obj_in_light", "pick_two_obj_and_place"
TYPES = (PLACE, LOOK, *VERBS, TWO)
LAMP, LAMP_PLACES = "DeskLamp", ("Desk", "SideTable")


def digest(text: str) -> int:
    """A number from a text, the same on every machine."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


@lru_cache
def goals(kind: str, unseen: bool) -> list[tuple[str, str, str]]:
    """(room, object type, receptacle type or the lamp) of a type of task, of those held out or of the others."""
    rooms = {LOOK: ("bedroom", "flat"), PLACE: (*ROOMS,), TWO: (*ROOMS,)}.get(kind, ("kitchen", "flat"))
    every = []
    for room in rooms:
        for thing in (o for o in OBJECTS[room] if kind not in VERBS or o in ABLE[VERBS[kind][1]]):
            targets = [r for r in dict.fromkeys(ROOMS[room]) if thing in HOLDS[r] and r not in ("Microwave", "Fridge")]
            every += [(room, thing, target) for target in ([LAMP] if kind == LOOK else targets)]
    pairs = sorted({goal[1:] for goal in every}, key=lambda pair: digest(f"{kind} {pair}"))
    held_out = pairs[: -(-len(pairs) // 8)]
    return [goal for goal in every if (goal[1:] in held_out) == unseen]


def formula(kind: str, thing: str, target: str) -> tuple[str, str]:
    """(goal, the task in words)."""
    o, r = thing.lower(), target.lower()
    put = f"(objectType ?o {thing}Type) (receptacleType ?r {target}Type) (inReceptacle ?o ?r)"
    if kind == LOOK:
        lamp = "(objectType ?l DeskLampType) (toggleable ?l) (isToggled ?l) (receptacleAtLocation ?r ?p)"
        near = f"(exists (?l - object ?r - receptacle ?a - agent ?p - location) (and {lamp} (atLocation ?a ?p)"
        held = f"(exists (?o - object ?a - agent) (and (objectType ?o {thing}Type) (holds ?a ?o)))"
        return f"(and {near} (inReceptacle ?l ?r))) {held})", f"look at {o} under the desklamp"
    if kind == TWO:
        second = f"(exists (?p - object) (and (not (= ?o ?p)) {put.replace('?o', '?p')}))"
        return f"(exists (?r - receptacle) (exists (?o - object) (and {put} {second})))", f"put two {o} in {r}"
    if kind in VERBS:
        verb, able, made = VERBS[kind]
        task = f"{verb} some {o} and put it in {r}"
        return f"(exists (?r - receptacle ?o - object) (and ({able} ?o) ({made} ?o) {put}))", task
    return f"(exists (?r - receptacle ?o - object) (and {put}))", f"put some {o} in {r}"


def facts_of(rng: random.Random, room: str, kind: str, thing: str, target: str) -> tuple[list[str], list[str]]:
    """(ids with their types, facts) of a room in which the objects of the goal do not lie at its target."""
    names, facts, places = ROOMS[room], ["atLocation agent1 loc_bar_0"], []
    ids = ["agent1 - agent", "loc_bar_0 - location", f"{LAMP}Type - otype"]
    ids += [f"{o}Type - otype" for o in FOOD + DISHES + THINGS] + [f"{r}Type - rtype" for r in dict.fromkeys(names)]
    for number, name in enumerate(names):
        i = f"{name}_bar_{number:02d}" if name != "SinkBasin" else f"Sink_bar_{number:02d}_bar_SinkBasin"
        places.append((i, name, f"loc_bar_{number + 1}"))
        ids += [f"{i} - receptacle", f"loc_bar_{number + 1} - location"]
        facts += [f"receptacleType {i} {name}Type", f"receptacleAtLocation {i} loc_bar_{number + 1}"]
        facts += [f"openable {i}"] * (name in OPENABLE)
    for name in dict.fromkeys(names):
        facts += [f"canContain {name}Type {o}Type" for o in HOLDS[name]]
    wanted = [thing] * (2 if kind == TWO else 1)
    others = rng.sample([o for o in OBJECTS[room] if o != thing], 3)
    lamp = [LAMP] * (LAMP_PLACES[0] in names)
    for number, name in enumerate(wanted + others + lamp):
        fits = [p for p in places if name in HOLDS[p[1]] and not (name == thing and p[1] == target)]
        where, _, at = rng.choice([p for p in places if p[1] in LAMP_PLACES] if name == LAMP else fits)
        i = f"{name}_bar_{number:02d}"
        ids.append(f"{i} - object")
        facts += [f"objectType {i} {name}Type", f"inReceptacle {i} {where}", f"objectAtLocation {i} {at}"]
        facts += [f"{able} {i}" for able, names_of in ABLE.items() if name in names_of]
        facts += [f"toggleable {i}"] * (name == LAMP)
    return ids, facts


@lru_cache(maxsize=16384)
def problem(task_id: str) -> tuple[str, str, str]:
    """(type, task in words, PDDL problem) of an id `split/number`. ValueError where there is no such id."""
    split, _, number = task_id.partition("/")
    if split not in SPLITS or not number.isdecimal():
        raise ValueError(f"task {task_id!r}: allowed is split/number, split one of {', '.join(SPLITS)}")
    rng, kind = random.Random(f"alfworld {task_id}"), TYPES[int(number) % len(TYPES)]
    while True:
        room, thing, target = rng.choice(goals(kind, split == "valid_unseen"))
        ids, facts = facts_of(rng, room, kind, thing, target)
        goal, task = formula(kind, thing, target)
        body = "\n".join([*ids, ")", "(:init", *(f"({fact})" for fact in facts), ")", f"(:goal {goal})"])
        if split == "valid_unseen" or (split == "valid_seen") == (digest(body) % 8 == 0):
            return kind, f"Your task is to: {task}.", f"(define (problem own)\n(:domain alfred)\n(:objects\n{body})"
