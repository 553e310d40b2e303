"""The response format, the registry of tasks, and Sokoban: rules, solver, levels, texts."""

import os
import random
import re
from ast import literal_eval
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest

import envs
from envs import Observation, make, parse_think_action
from envs.sokoban import MOVES, SPLITS, Sokoban, distances, generate, inside, move, room_key, split_of, state_key
from tiny import tiny_tokenizer

DEFAULT = Sokoban().level
DATA = Path(os.environ.get("SAMPO_DATA", Path(__file__).parents[1] / "../shared/data"))
LEVELS = DATA / "boxoban/unfiltered_valid_000.txt"
NEXT_TO_TARGET = "# # # # # #\n# _ _ _ _ #\n# P X O _ #\n# _ _ _ _ #\n# _ _ _ _ #\n# # # # # #"
INVALID = """<think>a</think><think>b</think><action>c</action> | <think>a</think><action>b</action></action>
<think>a</think><action>b</action><action>c</action> | <think>a</think></think><action>b</action>
<think>a<think>b</think></think><action>c</action> | <think><think>a</think><action>b</action>
<think>a <action>up</action></think><action>b</action> | <think>a</think><action><action>b</action>
x<think>a</think><action>b</action> | <think>a</think> so <action>b</action>
<think>a</think><action>b</action> done | <think>a</think><action>look</action>.
<action>b</action><think>a</think> | <think>a<action>b</think></action>
<THINK>a</THINK><ACTION>b</ACTION> | < think >a</think><action>x</action>
<think>a</think><action> </action> | <think>a</think><action></action>
<think>a</think><action>b | a</think><action>b</action> | <action>up</action> | up"""


def drawn(grid):
    """The room and state of a picture in the symbols of the grid observation."""
    cells = {(r, c): symbol for r, line in enumerate(grid.split("\n")) for c, symbol in enumerate(line.split())}
    size = max(cells)[0] + 1

    def where(symbols):
        return frozenset(cell for cell in cells if cells[cell] in symbols)

    walls = frozenset((r, c) for r, c in where("#") if 0 < r < size - 1 and 0 < c < size - 1)
    return (size, walls, where("O√S")), (next(iter(where("PS"))), where("X√"))


def playing(grid, **options):
    """An environment in the middle of a picture, its observation the grid unless told otherwise."""
    env = Sokoban(**{"observation": "grid", **options})
    env.reset("train/0")
    env.room, env.state = drawn(grid)
    env.floor = frozenset(inside(env.room))
    return env


def levels(split, count):
    return [generate(task_id, *DEFAULT) for task_id in Sokoban().tasks(split)[:count]]


@pytest.mark.parametrize(
    "inner, action",
    [
        ("a</think><action>b", "b"),
        ("a\nb</think>\n<action>1\n2", "1\n2"),
        ("</think> \t<action> up ", "up"),
        ("i < j > k, </b></think><action>b", "b"),
        ("a</think><action> Go To Desk 1 ", "Go To Desk 1"),
        ("a</think><action>what's the weather", "what's the weather"),
        ("a</think><action>search[Men's shoes]", "search[Men's shoes]"),
    ],
)
def test_a_response_in_the_format_gives_its_action(inner, action):
    """Cases B38 and B55: quotes, case, white space, several lines."""
    for response in (f"<think>{inner}</action>", f"\n <think>{inner}</action>\n"):
        assert parse_think_action(response) == (action, True)
        assert Sokoban().parse(response) == (action.lower(), True)


@pytest.mark.parametrize("response", ["", *INVALID.replace("\n", " | ").split(" | ")])
def test_any_other_response_is_invalid_without_an_action(response):
    """Case B38: a tag twice, nested, crossing, in capitals, or text around them."""
    assert parse_think_action(response) == Sokoban().parse(response) == (None, False)


def test_odd_characters_and_long_texts_are_parsed_like_others():
    odd = "√ \x00 \ud800 \u2028 <|end|>" * 10_000
    assert Sokoban().parse(f"<think>{odd}</think><action>\u3000ÜP İ\u3000</action>") == ("üp i\u0307", True)
    for response in (odd, " " * 100_000, "<think>" * 10_000, f"<think>{odd}</think> {odd} <action>up</action>"):
        assert Sokoban().parse(response) == (None, False)


def test_the_parser_has_no_memory_and_the_package_no_debugger():
    """Case B82."""
    env, good = playing(NEXT_TO_TARGET), "<think>a</think><action>UP</action>"
    before = dict(vars(env))
    assert [env.parse(r) for r in (good, "x", good)] == [("up", True), (None, False), ("up", True)]
    assert vars(env) == before
    for path in Path(envs.__file__).parent.glob("*.py"):
        assert not any(word in path.read_text(encoding="utf-8") for word in ("breakpoint(", "pdb", "set_trace"))


@pytest.mark.parametrize(
    "before, action, after, reward",
    [
        ("_ _ _ _/_ P _ _/X _ _ _/O _ _ _", "up", "_ P _ _/_ _ _ _/X _ _ _/O _ _ _", -0.1),
        ("_ _ _ _/_ P _ _/X _ _ _/O _ _ _", "down", "_ _ _ _/_ _ _ _/X P _ _/O _ _ _", -0.1),
        ("_ _ _ _/_ P _ _/X _ _ _/O _ _ _", "left", "_ _ _ _/P _ _ _/X _ _ _/O _ _ _", -0.1),
        ("_ _ _ _/_ P _ _/X _ _ _/O _ _ _", "right", "_ _ _ _/_ _ P _/X _ _ _/O _ _ _", -0.1),
        ("P # _ _/_ X _ _/_ _ _ _/O _ _ _", "right", "P # _ _/_ X _ _/_ _ _ _/O _ _ _", -0.1),  # wall
        ("P X _ O/_ _ _ _/_ _ _ _/_ _ _ _", "right", "_ P X O/_ _ _ _/_ _ _ _/_ _ _ _", -0.1),
        ("_ P X O/_ _ _ _/_ _ _ _/_ _ _ _", "right", "_ _ P √/_ _ _ _/_ _ _ _/_ _ _ _", 10.9),
        ("P √ _ X/_ _ _ O/_ _ _ _/_ _ _ _", "right", "_ S X X/_ _ _ O/_ _ _ _/_ _ _ _", -1.1),
        ("P X O X/_ _ _ O/_ _ _ _/_ _ _ _", "right", "_ P √ X/_ _ _ O/_ _ _ _/_ _ _ _", 0.9),
        ("√ _ _ _/_ P X O/_ _ _ _/_ _ _ _", "right", "√ _ _ _/_ _ P √/_ _ _ _/_ _ _ _", 10.9),
        ("P √ O X/_ _ _ _/_ _ _ _/_ _ _ _", "right", "_ S √ X/_ _ _ _/_ _ _ _/_ _ _ _", -0.1),  # off one, onto one
        ("P X X O/_ _ _ O/_ _ _ _/_ _ _ _", "right", "P X X O/_ _ _ O/_ _ _ _/_ _ _ _", -0.1),  # two in a row
        ("P X # _/_ _ _ O/_ _ _ _/_ _ _ _", "right", "P X # _/_ _ _ O/_ _ _ _/_ _ _ _", -0.1),  # against a wall
        ("P X O _/_ _ _ _/_ _ _ _/_ _ _ _", None, "P X O _/_ _ _ _/_ _ _ _/_ _ _ _", -0.1),
        ("P X O _/_ _ _ _/_ _ _ _/_ _ _ _", "jump", "P X O _/_ _ _ _/_ _ _ _/_ _ _ _", -0.1),
    ],
)
def test_a_turn_moves_and_pays_as_in_gym_sokoban(before, action, after, reward):
    border = "# # # # # #"
    grids = ["\n".join([border, *(f"# {row} #" for row in rows.split("/")), border]) for rows in (before, after)]
    env = playing(grids[0])
    step = env.step(action)
    assert step.observation.text == grids[1] and step.observation.actions == ("up", "down", "left", "right")
    assert step.reward == step.score == pytest.approx(reward)
    assert step.done == step.success == (reward > 10)


def test_an_episode_ends_at_success_alone_and_its_score_is_the_sum_of_rewards():
    env = playing(NEXT_TO_TARGET, max_turns=8)  # the limit of turns is the rollout's to enforce
    steps = [env.step(action) for action in (None, "jump", "up", "down", "up", "down", None, None, None, "right")]
    assert [step.done for step in steps] == [step.success for step in steps] == [False] * 9 + [True]
    assert steps[-1].score == pytest.approx(10.0) == pytest.approx(sum(step.reward for step in steps))
    env.reset("train/0")
    assert env.step(None).score == pytest.approx(-0.1)


def test_state_key_tells_player_and_boxes_apart_and_nothing_else():
    cells = [(1, 2), (2, 2), (3, 4), (4, 1)]
    states = [(cell, frozenset(boxes)) for cell in cells for boxes in combinations(cells, 2) if cell not in boxes]
    assert len({state_key(state) for state in states}) == len(states)
    env = playing(NEXT_TO_TARGET)
    there, back, again = (env.step(action).observation.state_key for action in ("up", "down", None))
    assert there != back == again == state_key(((2, 1), frozenset([(2, 2)])))


@pytest.mark.parametrize(
    "room",
    [
        (6, frozenset(), frozenset([(2, 2)])),
        (6, frozenset([(2, 3)]), frozenset([(1, 1)])),
        (6, frozenset([(1, 2), (2, 2), (3, 3)]), frozenset([(4, 2)])),
        (6, frozenset([(2, 1), (2, 2), (2, 3), (2, 4)]), frozenset([(4, 2)])),  # two halves
        (5, frozenset(), frozenset([(1, 2), (3, 3)])),
        (6, frozenset([(1, 1), (2, 3), (4, 4), (4, 1)]), frozenset([(2, 2), (3, 3)])),
    ],
)
def test_the_solver_agrees_with_a_forward_search_from_every_state(room):
    size, walls, targets = room
    free = {(r, c) for r in range(1, size - 1) for c in range(1, size - 1)} - walls

    def after(player, boxes, dr, dc):
        to, over = ((player[0] + dr * k, player[1] + dc * k) for k in (1, 2))
        if to in boxes:
            return (to, boxes - {to} | {over}) if over in free and over not in boxes else (player, boxes)
        return (to, boxes) if to in free else (player, boxes)

    states = [(p, frozenset(b)) for b in combinations(sorted(free), len(targets)) for p in free - set(b)]
    edges = {state: [after(*state, *d) for d in ((0, 1), (1, 0), (0, -1), (-1, 0))] for state in states}
    shortest = {}
    for start in states:
        seen, frontier, depth = {start}, [start], 0
        while frontier and not any(boxes == targets for _, boxes in frontier):
            frontier = list({state for source in frontier for state in edges[source]} - seen)
            seen.update(frontier)
            depth += 1
        if frontier:
            shortest[start] = depth
    assert 0 < len(shortest) < len(states)  # some states are dead ends
    assert distances(room) == shortest


@pytest.mark.parametrize("split", SPLITS)
def test_the_expert_without_noise_solves_in_exactly_the_shortest_number_of_moves(split):
    env, rng = Sokoban(), random.Random(0)
    for task_id in env.tasks(split)[:100]:
        env.reset(task_id)
        steps = []
        while len(steps) < env.max_turns and not (steps and steps[-1].done):
            steps.append(env.step(env.parse(env.expert(rng))[0]))
        assert steps[-1].success and env.task_type(task_id) == f"{len(steps)} moves"


def test_the_expert_names_the_next_push_and_answers_in_format_whatever_the_noise():
    env, rng, seen = playing(NEXT_TO_TARGET, max_turns=2000), random.Random(0), Counter()
    assert env.expert(rng) == "<think> push right </think> <action> right </action>"
    for _ in range(2000):  # into dead ends and beyond the end of the episode
        action, valid = env.parse(env.expert(rng, noise=1.0))
        assert valid
        seen[action] += 1
        env.step(action)
    assert set(seen) == set(MOVES) and min(seen.values()) > 400


def test_levels_have_the_promised_lengths_in_equal_shares_and_at_most_one_wall():
    for split, count in (("train", 3000), ("valid_seen", 512), ("valid_unseen", 512)):
        lengths = Counter()
        for room, (player, boxes) in levels(split, count):
            size, walls, targets = room
            lengths[distances(room)[player, boxes]] += 1
            assert size == 6 and len(walls) <= 1 and len(targets) == len(boxes) == 1
            assert {player} | boxes | targets <= set(inside(room)) and player not in boxes and boxes != targets
        assert sorted(lengths) == [3, 4, 5, 6, 7, 8] and max(lengths.values()) - min(lengths.values()) <= 1


def test_splits_share_no_start_state_and_unseen_rooms_never_occur_in_training():
    found = {split: levels(split, 3000) for split in SPLITS}
    for split, some in found.items():
        assert all(split_of(room, state) == split for room, state in some)
    panels = found["valid_seen"], found["valid_unseen"]
    assert [len(set(panel)) for panel in panels] == [512, 512]
    assert not set(panels[0]) & set(panels[1]) and not set(found["train"]) & {*panels[0], *panels[1]}
    unseen = {room_key(room) for room, _ in panels[1]}
    assert not unseen & {room_key(room) for room, _ in found["train"] + panels[0]}
    assert {room_key(room) for room, _ in panels[0]} & {room_key(room) for room, _ in found["train"]}


def test_ids_are_the_same_levels_everywhere():
    for split in SPLITS:
        ids = Sokoban().tasks(split)
        assert ids == Sokoban().tasks(split) and len(set(ids)) == len(ids) == SPLITS[split]
        for task_id in ids[:50]:
            assert generate.__wrapped__(task_id, *DEFAULT) == generate(task_id, *DEFAULT)  # without the cache
    room, state = generate("train/0", *DEFAULT)
    assert room == (6, frozenset({(4, 4)}), frozenset({(1, 3)})) and state == ((4, 2), frozenset({(3, 3)}))
    assert Sokoban().tasks("valid_unseen")[6:8] == ["valid_unseen/6", "valid_unseen/3079"]
    with pytest.raises(ValueError, match="'test'.*valid_seen"):
        Sokoban().tasks("test")


def test_the_grid_shows_every_symbol_and_coords_the_same_objects():
    grid = "# # # # # #\n# _ √ _ _ #\n# # S X _ #\n# _ _ _ O #\n# _ X _ _ #\n# # # # # #"
    assert playing(grid).step(None).observation.text == grid
    text = playing(grid, observation="coords").step(None).observation.text
    assert text == "player 2 2 box 1 2 box 2 3 box 4 2 target 1 2 target 2 2 target 3 4 wall 2 1"
    text = playing(NEXT_TO_TARGET, observation="coords").step(None).observation.text
    assert text == "player 2 1 box 2 2 target 2 3 wall 0 0"


def test_the_prompt_of_coordinates_is_always_twelve_words():
    env, rng = Sokoban(), random.Random(0)
    for task_id in [f"{split}/{number}" for split in SPLITS for number in range(100)]:
        observations = [env.reset(task_id), *(env.step(rng.choice(list(MOVES))).observation for _ in range(10))]
        assert {len(env.prompt([(o, None)])[0]["content"].split()) for o in observations} == {12}


@pytest.mark.parametrize("style", ["compact", "words"])
@pytest.mark.parametrize("observation", ["grid", "coords"])
def test_words_hold_every_word_of_prompts_and_expert_responses(observation, style):
    env, rng = Sokoban(observation=observation, prompt_style=style, history=2), random.Random(0)
    tokenizer = tiny_tokenizer(env.words())
    for number in range(12):
        history = [(env.reset(f"train/{number}"), None)]
        for _ in range(env.max_turns):
            response = env.expert(rng, noise=0.5)
            tokenizer([env.prompt(history)[0]["content"], response])  # raises where a word is missing
            action = env.parse(response)[0] if rng.random() < 0.8 else None
            step = env.step(action)
            history = [*history[:-1], (history[-1][0], action), (step.observation, None)]


@pytest.mark.parametrize("style", ["compact", "words"])
def test_words_hold_every_prompt_after_an_action_spelled_with_any_word(style):
    env = Sokoban(prompt_style=style, history=2)
    start, tokenizer = env.reset("train/0"), tiny_tokenizer(env.words())
    for word in env.words():
        action, _ = env.parse(f"<think> </think> <action> {word} </action>")
        tokenizer(env.prompt([(start, action), (start, None)])[0]["content"])
    with pytest.raises(Exception, match="UNK"):
        tokenizer("crate")


def test_the_history_shows_the_last_pairs_with_their_absolute_numbers():
    turns = [(Observation(f"seen{i}", ""), action) for i, action in enumerate(["up", "left", None, "down", None], 1)]
    env = Sokoban(prompt_style="words", history=2)
    [message] = env.prompt(turns)
    plain = " ".join(re.findall(r"\w+", message["content"]))
    assert message["role"] == "user" and "already taken 4 step" in plain
    window = "Observation 3 seen3 Action 3 None Observation 4 seen4 Action 4 down Your current observation is seen5"
    assert window.lower() in plain.lower() and "seen2" not in plain and plain.count("Observation ") == 2
    first = env.prompt([(turns[0][0], None)])[0]["content"]
    assert "seen1" in first and "already taken" not in first and "[Observation" not in first
    env = Sokoban(prompt_style="compact", history=2)
    assert env.prompt(turns)[0]["content"] == "seen3 none\nseen4 down\nseen5"
    assert Sokoban(history=0).prompt(turns)[0]["content"] == "seen5"


@pytest.mark.parametrize(
    "option",
    "observation 'x', prompt_style 'x', min_solution 9, min_solution 0, max_solution 7, max_solution 13, "
    "size 3, boxes 0, boxes 14, max_walls -1".split(", "),
)
def test_an_option_that_cannot_be_is_named_with_its_value(option):
    name, value = option.split()
    with pytest.raises(ValueError, match=f"{option}.*allowed"):
        make("sokoban", **{"min_solution": 8, name: literal_eval(value)})


def test_make_finds_the_built_in_task_and_refuses_unknown_names_and_options():
    assert type(make("sokoban", size=7)) is Sokoban
    with pytest.raises(ValueError, match="'chess'.*sokoban"):
        make("chess")
    with pytest.raises(TypeError, match="colour"):
        make("sokoban", colour="red")


def test_make_loads_a_class_from_a_file_of_the_user_with_its_options(tmp_path):
    path = tmp_path / "corridor.py"
    path.write_text("class Corridor:\n    def __init__(self, *, length=3):\n        self.length = length\n")
    assert make(f"{path}:Corridor", length=7).length == 7
    with pytest.raises(ValueError, match="corridor.py has no class 'Tunnel'"):
        make(f"{path}:Tunnel")
    with pytest.raises(ValueError, match="no file .*absent.py"):
        make(f"{tmp_path}/absent.py:Corridor")


def test_an_action_is_a_move_or_another_word_or_invalid():
    assert [Sokoban().action_type(action) for action in ("up", "jump", None)] == ["up", "other", "invalid"]


@pytest.mark.skipif(not LEVELS.is_file(), reason=f"there is no {LEVELS}; SAMPO_DATA names the folder of data")
def test_random_moves_in_published_levels_keep_the_physics():
    rng = random.Random(0)
    for text in LEVELS.read_text().strip().split("\n\n")[:20]:
        cells = {(r, c): symbol for r, line in enumerate(text.split("\n")[1:]) for c, symbol in enumerate(line)}
        floor = frozenset(cell for cell in cells if cells[cell] != "#")
        [player], boxes = [c for c in cells if cells[c] == "@"], frozenset(c for c in cells if cells[c] == "$")
        assert len(cells) == 100 and len(boxes) == 4
        for _ in range(200):
            action = rng.choice(list(MOVES))
            then, after = move(floor, (player, boxes), action)
            left, entered = boxes - after, after - boxes
            assert then in floor - after and after <= floor and len(after) == 4
            assert then in (player, (player[0] + MOVES[action][0], player[1] + MOVES[action][1]))
            if left or entered:  # one box by one cell, the player in its place
                [(r, c)], [(dr, dc)] = entered, [MOVES[action]]
                assert left == {(r - dr, c - dc)} == {then} and then != player
            player, boxes = then, after
