"""ALFWorld against TextWorld's own words, on the real games where they are at hand, and the games of our own."""

import json
import lzma
import os
import random
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest

import eval as evaluation
import train
from envs import Observation, alfworld, alfworld_rooms
from envs.alfworld import ALFWorld, read_game
from envs.alfworld_game import holds
from sft import play_scripted
from tiny import tiny_tokenizer

ROOT = Path(__file__).parent.parent
DATA = Path(os.environ.get("SAMPO_DATA", ROOT / "../shared/data")) / "alfworld"
sys.path.insert(0, str(ROOT / "benchmarks"))
from alfworld_peer import digest, play  # noqa: E402


@pytest.fixture
def official(monkeypatch):
    if not (DATA / "games.jsonl.xz").exists():
        pytest.skip(f"{DATA} has no games.jsonl.xz: see SAMPO_DATA")
    monkeypatch.setenv("ALFWORLD_DATA", str(DATA))
    return ALFWorld(games="official")


def test_games_say_and_list_what_textworld_does(official):
    """Digests of 30 commands a game, written by benchmarks/alfworld_peer.py where both sides were equal."""
    lines = [json.loads(line) for line in (ROOT / "tests/alfworld.jsonl").read_text().splitlines()]
    kinds = {(line["game"].split("/")[0], official.task_type(line["game"])) for line in lines}
    assert len(lines) >= 200 and len(kinds) == 18  # six types in three splits
    for line in lines:
        assert digest(list(play(official, line["game"]))) == line["digest"], line["game"]


def test_states_of_recorded_games(official):
    states = 0
    for line in (DATA / "golden_transcripts.jsonl").read_text().splitlines():
        recorded = json.loads(line)
        for command, text, actions, won in recorded["steps"]:
            if command:
                step = official.step(command)
                assert (step.observation.text, list(step.observation.actions), step.success) == (text, actions, won)
            else:
                seen = official.reset(recorded["game"].removesuffix("/game.tw-pddl"))
                assert (seen.text, list(seen.actions)) == (text, actions)
            states += 1
    assert states == 840


@pytest.mark.slow
def test_every_walkthrough_wins(official):
    games = [
        game for split in ("train", "valid_seen", "valid_unseen", "valid_train") for game in official.tasks(split)
    ]
    assert len(games) == 4027
    for game in games:
        official.reset(game)
        steps = [official.step(command) for command in read_game(game)[2]]
        assert [step.success for step in steps] == [False] * (len(steps) - 1) + [True], game
        assert steps[-1].reward == 10 and steps[-1].done


KITCHEN = """(define (problem kitchen) (:objects agent1 - agent) (:init (atLocation agent1 loc0)
(receptacleType Cabinet_bar_1 CabinetType) (receptacleAtLocation Cabinet_bar_1 loc1) (openable Cabinet_bar_1)
(receptacleType Cabinet_bar_2 CabinetType) (receptacleAtLocation Cabinet_bar_2 loc2)
(receptacleType CounterTop_bar_1 CounterTopType) (receptacleAtLocation CounterTop_bar_1 loc3)
(receptacleType CounterTop_bar_2 CounterTopType) (receptacleAtLocation CounterTop_bar_2 loc4)
(receptacleType Sink_bar_1_bar_SinkBasin SinkBasinType) (receptacleAtLocation Sink_bar_1_bar_SinkBasin loc4)
(receptacleType Microwave_bar_1 MicrowaveType) (receptacleAtLocation Microwave_bar_1 loc5) (openable Microwave_bar_1)
(receptacleType Fridge_bar_1 FridgeType) (receptacleAtLocation Fridge_bar_1 loc6) (openable Fridge_bar_1)
(objectType Knife_bar_1 KnifeType) (pickupable Knife_bar_1)
(inReceptacle Knife_bar_1 CounterTop_bar_1) (objectAtLocation Knife_bar_1 loc3)
(objectType Apple_bar_1 AppleType) (inReceptacle Apple_bar_1 CounterTop_bar_1) (objectAtLocation Apple_bar_1 loc3)
(objectType Apple_bar_2 AppleType) (inReceptacle Apple_bar_2 CounterTop_bar_1) (objectAtLocation Apple_bar_2 loc3)
(pickupable Apple_bar_2) (sliceable Apple_bar_2) (cleanable Apple_bar_2) (heatable Apple_bar_2) (coolable Apple_bar_2)
(objectType DeskLamp_bar_1 DeskLampType) (toggleable DeskLamp_bar_1)
(inReceptacle DeskLamp_bar_1 CounterTop_bar_2) (objectAtLocation DeskLamp_bar_1 loc4)
(canContain CabinetType AppleType) (canContain CounterTopType KnifeType) (canContain CounterTopType AppleType)
) (:goal (exists (?r - receptacle ?o - object)
(and (coolable ?o) (isCool ?o) (objectType ?o AppleType) (receptacleType ?r CabinetType) (inReceptacle ?o ?r)))))"""
SCRIPT = """look | You are in the middle of a room. Looking quickly around you, you see nothing.
inventory | You are not carrying anything.
go to countertop 2 | You arrive at countertop 2. On the countertop 2, you see a apple 2, a apple 1, and a knife 1.
take apple 2 from countertop 2 | Nothing happens.
slice apple 1 with knife 1 | Nothing happens.
take knife 1 from countertop 2 | You pick up the knife 1 from the countertop 2.
take apple 1 from countertop 2 | Nothing happens.
slice apple 1 with knife 1 | You sliced the apple 1 with the knife 1.
examine knife 1 | There's nothing special about knife 1.
look | You are facing the countertop 2. Next to it, you see nothing.
move knife 1 to countertop 2 | You move the knife 1 to the countertop 2.
take apple 1 from countertop 2 | You pick up the apple 1 from the countertop 2.
examine countertop 2 | On the countertop 2, you see a apple 2, and a knife 1.
examine apple 1 | This is a sliced apple 1.
go to sinkbasin 1 | You arrive at sinkbasin 1. On the sinkbasin 1, you see nothing.
look | You are facing the countertop 1, and sinkbasin 1. Next to it, you see nothing.
go to countertop 1 | Nothing happens.
examine countertop 1 | On the countertop 1, you see a desklamp 1.
use desklamp 1 | You turn on the desklamp 1.
use desklamp 1 | You turn on the desklamp 1.
clean apple 1 with sinkbasin 1 | You clean the apple 1 using the sinkbasin 1.
examine apple 1 | This is a clean sliced apple 1.
cool apple 1 with fridge 1 | Nothing happens.
go to microwave 1 | You arrive at microwave 1. The microwave 1 is closed.
heat apple 1 with microwave 1 | You heat the apple 1 using the microwave 1.
examine apple 1 | This is a hot and clean sliced apple 1.
go to fridge 1 | You arrive at fridge 1. The fridge 1 is closed.
cool apple 1 with fridge 1 | You cool the apple 1 using the fridge 1.
examine apple 1 | This is a cool and clean sliced apple 1.
LOOK | Nothing happens.
look now | Nothing happens.
 inventory  | You are carrying: a apple 1.
 | Nothing happens.
go to cabinet 2 | You arrive at cabinet 2. The cabinet 2 is closed.
move apple 1 to cabinet 2 | Nothing happens.
open cabinet 2 | You open the cabinet 2. The cabinet 2 is open. In it, you see nothing.
close cabinet 2 | You close the cabinet 2.
open cabinet 2 | You open the cabinet 2. The cabinet 2 is open. In it, you see nothing."""
SEEN = """-= Welcome to TextWorld, ALFRED! =-

You are in the middle of a room. Looking quickly around you, you see a cabinet 2, a cabinet 1, a countertop 2, \
a countertop 1, a fridge 1, a microwave 1, and a sinkbasin 1.

Your task is to: cool some apple and put it in cabinet."""


@pytest.fixture
def kitchen(monkeypatch):
    """One game, written by hand; ids count up where names count down."""
    kind, task = "pick_cool_then_place_in_recep", "Your task is to: cool some apple and put it in cabinet."
    monkeypatch.setattr(alfworld_rooms, "problem", lambda task_id: (kind, task, KITCHEN))


def test_a_game_by_hand(kitchen):
    env = ALFWorld()
    assert env.reset("train/0").text == SEEN
    for line in SCRIPT.split("\n"):
        command, _, text = line.partition(" | ")
        step = env.step(command)
        assert (step.observation.text, step.reward, step.done, step.success, step.score) == (text, 0, 0, 0, 0), line
    won = env.step("move apple 1 to cabinet 2")
    assert won.observation.text == "You move the apple 1 to the cabinet 2."
    assert (won.reward, won.done, won.success, won.score) == (10, True, True, 1)
    assert env.step("help").observation.text.startswith("Available commands:\n  look:   ")
    known = "close cabinet 2,examine cabinet 2,go to cabinet 1,go to countertop 1,go to countertop 2,go to fridge 1"
    known += ",go to microwave 1,go to sinkbasin 1,help,inventory,look,take apple 1 from cabinet 2"
    assert env.observation.actions == tuple(known.split(","))


def after(env, *commands):
    """The history of an episode: (observation, action), the last action None."""
    history = [(env.reset("train/0"), None)]
    for command in commands:
        history[-1] = (history[-1][0], command)
        history.append((env.step(command).observation, None))
    return history


def test_prompts_are_those_of_appendix_h(kitchen):
    env = ALFWorld(prompt_style="words", history=2)
    history = after(env, "go to cabinet 2", "open cabinet 2", "close cabinet 2")
    [first], [last] = env.prompt([(history[0][0], None)]), env.prompt(history)
    places = ("cabinet 1", "cabinet 2", "countertop 1", "countertop 2", "fridge 1", "microwave 1", "sinkbasin 1")
    go = "\n ".join(f"'go to {place}'" for place in places)
    opening = "You are an expert agent operating in the ALFRED Embodied Environment."
    closing = (
        "Now it's your turn to take an action.\nYou should first reason step-by-step about the current situation. "
        "This reasoning process MUST be enclosed within <think> </think> tags.\nOnce you've finished your reasoning, "
        "you should choose an admissible action for the current step and present it within <action> </action> tags."
    )
    assert first == {
        "role": "user",
        "content": f"{opening}\nYour current observation is: {SEEN}\nYour admissible actions of the current situation "
        f"are: [{go}\n 'inventory'\n 'look'].\n{closing}",
    }
    go = go.replace("'go to cabinet 2'\n ", "")
    assert last["content"] == (
        f"{opening} Your task is to: cool some apple and put it in cabinet.\nPrior to this step, you have already "
        "taken 3 step(s). Below are the most recent 2 observations and the corresponding actions you took:\n"
        "[Observation 2: 'You arrive at cabinet 2. The cabinet 2 is closed.', Action 2: 'open cabinet 2']\n"
        "[Observation 3: 'You open the cabinet 2. The cabinet 2 is open. In it, you see nothing.', "
        "Action 3: 'close cabinet 2']\n"
        "You are now at step 4 and your current observation is: You close the cabinet 2.\nYour admissible actions "
        f"of the current situation are: ['examine cabinet 2'\n {go}\n 'inventory'\n 'look'\n "
        f"'open cabinet 2'].\n{closing}"
    )


def test_the_compact_prompt_says_what_was_seen(kitchen):
    env = ALFWorld()
    lines = ("go to countertop 2", "take apple 1 from countertop 2", "go to fridge 1", "cool apple 1 with fridge 1")
    history = after(env, *lines, "go to cabinet 1", "move apple 1 to cabinet 1")
    said = [env.prompt([*history[:i], (history[i][0], None)])[0]["content"] for i in range(len(history))]
    start, rest = "cool some apple and put it in cabinet. hold", "microwave 1 ? ; sinkbasin 1 ?"
    cabinets, fridge = "cabinet 2 ? ; cabinet 1 ?", f"fridge 1 ? ; {rest}"
    assert said[0] == f"{start} nothing ; at nowhere seen ; {cabinets} ; countertop 2 ? ; countertop 1 ? ; {fridge}"
    new = f"{cabinets} ; countertop 1 ? ; {fridge}"
    assert said[1] == f"{start} nothing ; at countertop 2 seen ; apple 2 here ; apple 1 here ; {new}"  # no knife
    assert said[2] == f"{start} apple 1 ; at countertop 2 seen ; apple 2 here ; {new}"
    new = f"apple 2 at countertop 2 ; {cabinets} ; countertop 1 ? ; {rest}"
    assert said[3] == f"{start} apple 1 ; at fridge 1 closed ; {new}"
    assert said[4] == f"{start} apple 1 iscool ; at fridge 1 closed ; {new}"
    new = f"apple 2 at countertop 2 ; apple 1 here ; cabinet 2 ? ; countertop 1 ? ; fridge 1 closed ; {rest}"
    assert said[6] == f"{start} nothing ; at cabinet 1 seen ; {new}"


def test_states_are_told_apart_by_what_can_change_or_as_the_released_code_does(kitchen):
    ours, theirs = ALFWorld(), ALFWorld(anchor="observation")
    lines = ("frobnicate", "go to cabinet 2", "frobnicate", "go to cabinet 1", "go to cabinet 2", "open cabinet 2")
    keys = [seen.state_key for seen, _ in after(ours, *lines)]
    assert keys[0] == keys[1] and keys[2] == keys[3] == keys[5] and len({keys[0], keys[2], keys[4], keys[6]}) == 4
    texts = [seen.state_key for seen, _ in after(theirs, *lines)]
    assert texts[1] == texts[3] == "Nothing happens."  # of two states


PLAY = """import random
from envs.alfworld import ALFWorld

env, rng = ALFWorld(), random.Random(0)
for number in range(60):
    env.reset(f"train/{number}")
    for _ in range(30):
        env.step(env.parse(env.expert(rng, 0.5))[0])
    print(env.observation)
"""


def test_a_game_its_keys_and_its_expert_are_the_same_in_every_process():
    texts = set()
    for seed in "012":  # of Python's hashes, which order its sets
        command, env = [sys.executable, "-c", PLAY], {**os.environ, "PYTHONHASHSEED": seed}
        texts.add(subprocess.check_output(command, env=env, cwd=ROOT))
    assert len(texts) == 1 and len(texts.pop().splitlines()) == 60


def test_a_snapshot_goes_on_where_it_was_taken(kitchen):
    env, other = ALFWorld(), ALFWorld()
    history = after(env, "go to countertop 2", "take apple 1 from countertop 2")
    snapshot = env.snapshot()
    rest = ("go to fridge 1", "cool apple 1 with fridge 1", "go to cabinet 1", "move apple 1 to cabinet 1")
    first = [env.step(command) for command in rest]
    assert first[-1].success
    for player in (env, other, env):
        assert player.restore(snapshot) == history[-1][0]
        assert [player.step(command) for command in rest] == first


def test_a_response_is_read_in_lower_case_and_lost_where_it_is_not_admissible(kitchen):
    env = ALFWorld()
    assert env.parse("<think>a</think><action> Go To Cabinet 2 </action>") == ("go to cabinet 2", True)
    assert env.parse("go to cabinet 2") == (None, False)
    start = env.reset("train/0")
    for action in (None, "open cabinet 2"):
        step = env.step(action)
        assert step.observation == Observation("Nothing happens.", start.state_key, start.actions) and not step.reward
    verbs = [env.action_type(a) for a in (None, "go to x", "jump", *"open close take move heat use".split())]
    assert verbs == "invalid go other open close take move heat use".split()


def test_the_expert_wins_games_of_our_own_in_spite_of_noise():
    env, rng = ALFWorld(), random.Random(0)
    for split in alfworld_rooms.SPLITS:
        for game in env.tasks(split)[:60]:
            env.reset(game)
            assert any(env.step(env.parse(env.expert(rng, 0.2))[0]).done for _ in range(60)), game


@pytest.mark.slow
def test_the_expert_finds_what_it_was_not_told(official):
    """It looks into every receptacle until it has seen the object; a walkthrough goes there at once."""
    env, won, turns = official, 0, []
    for game in env.tasks("valid_seen"):
        env.reset(game)
        said = [env.parse(env.expert(random.Random(0)))[0]]
        while not env.step(said[-1]).done and len(said) < 50:
            said.append(env.parse(env.expert(random.Random(0)))[0])
            assert said[-1] in env.admissible
        turns.append(len(said) - len(read_game(game)[2]))
        won += len(said) < 50
    assert won > 0.85 * len(turns) and sum(turns) > 5 * len(turns)


def test_games_of_our_own_have_six_types_and_apart_splits():
    env, goals, problems = ALFWorld(), {}, {}
    for split in alfworld_rooms.SPLITS:
        ids = env.tasks(split)
        assert ids == env.tasks(split) and len(ids) == len({*ids}) == alfworld_rooms.SPLITS[split]
        drawn = [alfworld_rooms.problem(i) for i in ids[:1200]]
        problems[split] = {text for *_, text in drawn}
        goals[split] = {(kind, task) for kind, task, _ in drawn}
        assert {kind for kind, *_ in drawn} == {*alfworld_rooms.TYPES} and env.task_type(ids[0]) == drawn[0][0]
        for i in ids[:60]:
            env.reset(i)
            assert not holds(env.game, env.state, env.game.goal, {})
    assert not goals["valid_unseen"] & (goals["train"] | goals["valid_seen"])
    assert not problems["valid_seen"] & problems["train"]


@pytest.mark.parametrize(("games", "style", "limit"), [("own", "compact", 64), ("own", "words", 512)])
def test_the_tokenizer_knows_every_word_and_prompts_fit(games, style, limit):
    env, rng = ALFWorld(games=games, prompt_style=style), random.Random(0)
    tokenizer, longest = tiny_tokenizer(env.words()), 0
    tokenizer(" ".join(env.words()).lower())  # an action of a policy that says anything, in the next prompt
    splits = ("train", "valid_seen", "valid_unseen")
    for game in [i for split in splits for i in random.Random(0).sample(env.tasks(split), 30)]:
        for messages, text in play_scripted(env, game, lambda env, seen: env.expert(rng, 0.5))[0]:
            said = tokenizer.apply_chat_template(messages, tokenize=False)
            longest = max(longest, len(tokenizer(said)["input_ids"]))
            assert len(tokenizer(text)["input_ids"]) < 20
    assert limit / 2 < longest <= limit


@pytest.mark.slow
@pytest.mark.parametrize(("style", "limit"), [("compact", 256), ("words", 1024)])
def test_the_same_of_the_official_games(official, style, limit):
    test_the_tokenizer_knows_every_word_and_prompts_fit("official", style, limit)


def to_tree(folder, games):
    """The games in the layout of alfworld-download, and folders that its loader leaves out."""
    for game in games:
        grammar = 'grammar :: """ { "intro": [ { "rhs": "Your task is to: @." } ] } """'
        official = {
            "grammar": grammar.replace("Your task is to: @.", game["task"]),
            "pddl_domain": "",
            "solvable": True,
        }
        official |= {"pddl_problem": game["problem"], "walkthrough": game["walkthrough"]}
        lost = game["id"].replace("-None-", "-None-Sliced")
        moved = game["id"].replace("/", "/pick_and_place_with_movable_recep-", 1)
        odd = ((lost, official), (moved, official), (f"{game['id']}2", official | {"solvable": False}))
        for name, content in ((game["id"], official), *odd):
            (folder / "json_2.1.1" / name).mkdir(parents=True)
            (folder / "json_2.1.1" / name / "game.tw-pddl").write_text(json.dumps(content))


GAME = {"id": "train/pick_and_place_simple-Mug-None-Desk-1/trial_1", "task": "Your task is to: put some mug on desk."}
GAME |= {"walkthrough": ["go to desk 1"], "problem": KITCHEN}


def compressed(folder, *lines):
    with lzma.open(folder / "games.jsonl.xz", "wt") as file:
        file.write("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))


def test_games_are_the_same_in_either_layout_and_any_order(official, tmp_path, monkeypatch):
    ids = [official.tasks(split)[i] for split in ("train", "valid_seen", "valid_unseen") for i in (0, 50, 100)]
    chosen = {i: dict(zip(("task", "problem", "walkthrough"), read_game(i), strict=True), id=i) for i in ids}
    to_tree(tmp_path / "tree", chosen.values())
    (tmp_path / "lines").mkdir()
    compressed(tmp_path / "lines", *reversed(chosen.values()))
    for name in ("tree", "lines"):
        monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / name))
        env = ALFWorld(games="official")
        assert [i for split in ("train", "valid_seen", "valid_unseen") for i in env.tasks(split)] == sorted(ids)
        for i in ids:
            assert read_game(i) == tuple(chosen[i][part] for part in ("task", "problem", "walkthrough"))
            env.reset(i)
            assert [env.step(command).success for command in chosen[i]["walkthrough"]][-1]


def old(game):
    return game | {"walkthrough": ["go to desk 1", "put mug 1 in/on desk 1"]}


BROKEN = {
    "nothing there": (lambda folder: None, "json_2.1.*/ or games.jsonl.xz"),
    "no games": (lambda folder: (folder / "json_2.1.1/train").mkdir(parents=True), "json_2.1.*/ or games.jsonl.xz"),
    "corrupt line": (lambda folder: compressed(folder, GAME, '{"id": "train/', "\n"), "games.jsonl.xz, game 2"),
    "a part is missing": (lambda folder: compressed(folder, {"id": "train/x"}), "games.jsonl.xz, game 1"),
    "cut file": (lambda folder: (folder / "games.jsonl.xz").write_bytes(b"\xfd7zXZ\x00"), "games.jsonl.xz, game 1"),
    "old version": (lambda folder: compressed(folder, GAME, old(GAME)), "'put mug 1 in/on desk 1'"),
    "old version in a tree": (lambda folder: to_tree(folder, [old(GAME)]), "game.tw-pddl, game 1"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_bad_data_is_one_line_before_a_model_loads(broken, tmp_path, monkeypatch, capsys):
    make, part = BROKEN[broken]
    make(tmp_path)
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    for module, flags in ((train, ["--output", str(tmp_path / "runs")]), (evaluation, ["--model", "none"])):
        monkeypatch.setattr(module, "load_policy", None)  # so that a call of it is a TypeError
        with pytest.raises(SystemExit) as stop:
            module.main(["--task", "alfworld", "--games", "official", *flags])
        said = capsys.readouterr().err.strip()
        assert stop.value.code == 2 and "\n" not in said and not (tmp_path / "runs").exists()
        assert str(tmp_path) in said and part in said and "alfworld-download" in said


def test_unknown_splits_and_games_are_named(official):
    for env, known in ((ALFWorld(), "train, valid_seen, valid_unseen"), (official, "train, valid_seen, valid_unseen")):
        with pytest.raises(ValueError, match=f"split 'test': allowed are {known}"):
            env.tasks("test")
        with pytest.raises(ValueError, match="task 'test/1': allowed"):
            env.reset("test/1")
    with pytest.raises(ValueError, match="history -1"):
        ALFWorld(history=-1)


def test_games_are_played_in_the_terminal(official, monkeypatch, capsys):
    for flags in (["--expert"], ["--games", "official", "--expert"]):
        monkeypatch.setattr(sys, "argv", ["alfworld", *flags])
        alfworld.main()
        assert "won in" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["alfworld"])
    monkeypatch.setattr(sys, "stdin", StringIO("look\n"))
    alfworld.main()
    said = capsys.readouterr().out
    assert "1> You are in the middle of a room." in said and said.endswith("not won\n")
    monkeypatch.setattr(sys, "argv", ["alfworld", "--game", "x"])
    with pytest.raises(SystemExit) as stop:
        alfworld.main()
    assert stop.value.code == 2 and "task 'x'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_on_games_of_our_own(tmp_path):
    small = (
        "--steps 1 --sft_steps 5 --sft_episodes 20 --sft_batch 16 --eval_levels 12 --groups_per_step 2 --group_size 2"
    )
    small += " --method grpo --max_turns 12 --expert_noise 0 --output"
    train.main(["--task", "alfworld", *small.split(), str(tmp_path), "--name", "a"])
    results = json.loads((tmp_path / "a/results.json").read_text())["results"]
    assert results["expert"]["valid_seen"]["success"] > 0.2 > results["after RL"]["valid_seen"]["success"]
