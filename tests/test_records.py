"""Rollouts on disk and on screen: records, members, killed writers, the terminal and the page."""

import gzip
import json
import random
from copy import deepcopy
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

import records
from engines import Sampling, TransformersEngine
from envs.sokoban import Sokoban
from records import (
    append_step,
    choose_groups,
    cut,
    excerpt,
    last_message,
    read_records,
    show,
    trajectory_record,
    write_page,
)
from rollout import Trajectory, run_episodes
from sft import play_scripted
from tiny import tiny_model, tiny_tokenizer

WHERE = {"step": 3, "group": 0, "member": 1, "trained": True}


@pytest.fixture(scope="module")
def words():
    return tiny_tokenizer(Sokoban().words())


@pytest.fixture(scope="module")
def sampled(words):
    """Episodes of a random policy, at most three turns each, and one whose task does not exist."""
    torch.manual_seed(0)
    model = tiny_model(len(words), 32, 2, words.eos_token_id, words.pad_token_id)
    envs = [Sokoban(max_solution=3, max_turns=3) for _ in range(2)]
    tasks = ["train/0", "nowhere/0", "train/1"]
    keys = [("test", i) for i in range(len(tasks))]
    return run_episodes(TransformersEngine(model, words), words, envs, tasks, keys, Sampling(1.0, 8), 99)


def scripted(task, seed=0, env=None):
    """An episode of an expert that plays half its moves at random, and tries to break out of a page before them."""
    rng = random.Random(seed)
    said = []

    def respond(env, observation):
        said.append(env.expert(rng, 0.5) if said else "</script><script>alert('√')</script>")
        return said[-1]

    return play_scripted(env or Sokoban(), task, respond)[1]


def steps(words):
    """Records of three steps, with trajectories of unequal lengths."""
    played = [[scripted(f"train/{3 * step + i}", seed=step) for i in range(1 + step % 2)] for step in range(3)]
    assert len({len(t.turns) for group in played for t in group}) > 1
    return [
        [trajectory_record(t, Sokoban(), words, step=s, group=0, member=m, trained=False) for m, t in enumerate(group)]
        for s, group in enumerate(played)
    ]


def written(folder, words):
    """A file of three steps, the records of each, and the file's size after each."""
    path, groups = folder / "rollouts.jsonl.gz", steps(words)
    return path, groups, [append_step(path, group) for group in groups]


def test_a_record_holds_what_was_read_sampled_and_done(sampled, words):
    env, trajectory = Sokoban(), deepcopy(sampled[0])
    trajectory.turns[0].entropy, trajectory.turns[0].advantage = np.float32(0.25), -1.23456789
    record = trajectory_record(trajectory, env, words, **WHERE)
    assert {k: record[k] for k in WHERE} == WHERE
    assert (record["task"], record["task_type"]) == ("train/0", "3 moves")  # train/0 has the shortest solution, 3
    assert (record["success"], record["truncated"], record["error"]) == (False, True, "")
    assert record["score"] == record["reward"] == -0.3  # three turns of -0.1
    assert len(record["turns"]) == len(trajectory.turns) == 3
    for turn, said in zip(trajectory.turns, record["turns"], strict=True):
        assert said["prompt"] == words.decode(turn.prompt_ids) and said["prompt"].startswith("<|user|> player ")
        assert (said["prompt_ids"], said["response_ids"]) == (turn.prompt_ids, turn.response_ids)
        assert said["response"] == turn.text and said["state"] == turn.state
        assert (said["action"], said["action_type"], said["valid"]) == (None, "invalid", False)
        assert said["logprob_mean"] == pytest.approx(np.mean(turn.rollout_logprobs), rel=1e-5)
        assert said["logprob_min"] == pytest.approx(np.min(turn.rollout_logprobs), rel=1e-5)
    assert [turn["entropy"] for turn in record["turns"]] == [0.25, None, None]
    assert [turn["advantage"] for turn in record["turns"]] == [-1.23457, None, None]


def test_an_episode_that_crashed_at_its_start_is_recorded_without_turns_or_type(sampled, words):
    record = trajectory_record(sampled[1], Sokoban(), words, **WHERE)
    assert record["error"].startswith("reset: ValueError") and record["turns"] == []
    assert (record["task_type"], record["success"], record["score"], record["reward"]) == (None, False, 0, 0)


def test_a_scripted_turn_has_no_logprobs_and_a_task_without_types_has_none(words):
    class Plain(Sokoban):
        task_type = action_type = property()  # an attribute that raises AttributeError: hasattr is False

    trajectory = scripted("train/0")
    turn = trajectory_record(trajectory, Plain(), words, **WHERE)["turns"][-1]
    assert (turn["prompt"], turn["prompt_ids"], turn["logprob_mean"], turn["logprob_min"]) == ("", [], None, None)
    assert turn["action_type"] is None and turn["action"] in ("up", "down", "left", "right")
    assert trajectory_record(trajectory, Plain(), words, **WHERE)["task_type"] is None
    assert trajectory_record(trajectory, Sokoban(), words, **WHERE)["turns"][-1]["action_type"] == turn["action"]


def test_what_json_has_no_number_for_is_null(tmp_path, words):
    trajectory = scripted("train/0")
    trajectory.score = float("nan")
    trajectory.turns[0].rollout_logprobs = [-1.0, float("-inf")]
    trajectory.turns[0].entropy, trajectory.turns[0].advantage = float("inf"), float("nan")
    append_step(tmp_path / "r.gz", [trajectory_record(trajectory, Sokoban(), words, **WHERE)])
    (record,) = read_records(tmp_path / "r.gz")
    assert record["score"] is None
    names = ("logprob_mean", "logprob_min", "entropy", "advantage")
    assert [record["turns"][0][name] for name in names] == [None] * 4
    with pytest.raises(ValueError, match="not JSON compliant"):
        append_step(tmp_path / "r.gz", [{"score": float("nan")}])
    assert len(list(read_records(tmp_path / "r.gz"))) == 1


def test_groups_are_drawn_whole_without_replacement():
    for seed in range(20):
        chosen = choose_groups(7, 3, np.random.default_rng(seed))
        assert len(set(chosen)) == 3 and chosen == sorted(chosen) and set(chosen) <= set(range(7))
        assert chosen == choose_groups(7, 3, np.random.default_rng(seed))
    drawn = [i for seed in range(50) for i in choose_groups(7, 3, np.random.default_rng(seed))]
    assert set(drawn) == set(range(7))
    assert choose_groups(2, 3, np.random.default_rng(0)) == choose_groups(2, 2, np.random.default_rng(0)) == [0, 1]
    assert choose_groups(5, 0, np.random.default_rng(0)) == []


def test_what_was_appended_is_read_back_step_after_step(tmp_path, words, monkeypatch):
    path, groups, sizes = written(tmp_path, words)
    assert sizes == sorted(set(sizes)) and sizes[-1] == path.stat().st_size
    flat = [record for group in groups for record in group]
    assert list(read_records(path)) == flat
    assert [json.loads(line) for line in gzip.open(path)] == flat  # and by what reads any gzip file
    monkeypatch.setattr(records, "CHUNK", 7)  # members that begin and end inside of what is read at once
    assert list(read_records(path)) == flat


def test_equal_records_are_equal_bytes(tmp_path, words):
    (first, _, _), second = written(tmp_path, words), tmp_path / "again.gz"
    for group in steps(words):
        append_step(second, group)
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes()[: len(records.HEADER)] == records.HEADER  # bytes 4 to 7 are the time: none


def test_no_records_write_nothing(tmp_path, words):
    assert append_step(tmp_path / "none.gz", []) == 0 and not (tmp_path / "none.gz").exists()
    path, _, sizes = written(tmp_path, words)
    assert append_step(path, []) == sizes[-1] == path.stat().st_size


def test_a_writer_killed_at_any_byte_loses_its_last_step_alone(tmp_path, words):
    path, groups, sizes = written(tmp_path, words)
    whole, kept = path.read_bytes(), [record for group in groups[:2] for record in group]
    for size in range(sizes[1], sizes[2]):
        path.write_bytes(whole[:size])
        assert list(read_records(path)) == kept
        path.write_bytes(whole[:size] + bytes(sizes[2] - size))  # the file had grown, its data had not arrived
        assert list(read_records(path)) in (kept, kept + groups[2])  # the last byte may be a 0 itself
    path.write_bytes(whole[: sizes[0] - 1])
    assert list(read_records(path)) == []


def test_a_garbled_last_step_is_left_out_and_never_read_wrong(tmp_path, words):
    path, groups, sizes = written(tmp_path, words)
    whole, kept = path.read_bytes(), [record for group in groups[:2] for record in group]
    lost = 0
    for place in range(sizes[1], sizes[2]):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        read = list(read_records(path))
        assert read in (kept, kept + groups[2])  # time (4 bytes), level, system, "is a text" are not checked
        lost += read == kept
    assert sizes[2] - sizes[1] - lost in (7, 8)  # the last byte of the data may have a bit to spare


def test_damage_before_the_last_step_is_an_error_not_a_shorter_file(tmp_path, words):
    path, groups, sizes = written(tmp_path, words)
    whole = path.read_bytes()
    # killed while the second step was written, the third appended without a cut; and a block that was overwritten
    broken = [whole[:size] + whole[sizes[1] :] for size in range(sizes[0] + 1, sizes[1])]
    for damaged in (*broken, whole[: sizes[0] + 40] + b"\x00\xff" * 9 + whole[sizes[0] + 58 :]):
        path.write_bytes(damaged)
        stream = read_records(path)
        assert next(stream) == groups[0][0]
        with pytest.raises(ValueError, match=f"rollouts.jsonl.gz: damaged at byte {sizes[0]}, with further steps"):
            list(stream)


def test_a_resumed_run_writes_the_file_of_one_that_was_not_killed(tmp_path, words):
    path, groups, sizes = written(tmp_path, words)
    whole = path.read_bytes()
    path.write_bytes(whole[: sizes[2] - 5])  # killed while it wrote step 2; the checkpoint is that of step 0
    cut(path, sizes[0])
    assert list(read_records(path)) == groups[0]
    assert [append_step(path, group) for group in groups[1:]] == sizes[1:]
    assert path.read_bytes() == whole


def test_a_file_shorter_than_its_checkpoint_is_an_error(tmp_path, words):
    path, _, sizes = written(tmp_path, words)
    cut(path, sizes[2])
    assert path.stat().st_size == sizes[2]
    for offset in (sizes[2] + 1, -1):
        with pytest.raises(ValueError, match=f"cut at byte {offset}, allowed is 0 to {sizes[2]}"):
            cut(path, offset)
    cut(tmp_path / "none.gz", 0)
    assert not (tmp_path / "none.gz").exists()
    with pytest.raises(ValueError, match="none.gz: cut at byte 1, allowed is 0 to 0"):
        cut(tmp_path / "none.gz", 1)


def test_a_missing_file_is_named_at_once(tmp_path):
    for missing in (tmp_path / "none.gz", tmp_path):
        with pytest.raises(ValueError, match=f"{missing}: there is no such file"):
            read_records(missing)


def turn(prompt="", response="b", action="up", valid=True, admissible=True, entropy=0.5, advantage=0.0):
    numbers = {"reward": -0.1, "logprob_mean": -0.5, "logprob_min": -2.0, "entropy": entropy, "advantage": advantage}
    ids = {"prompt_ids": [7777], "response_ids": [8888], "state": 2**60 + 1}
    flags = {"action": action, "action_type": action, "valid": valid, "admissible": admissible}
    return {"prompt": prompt, "response": response, **ids, **flags, **numbers}


def record(*turns, **changes):
    where = {"step": 2, "group": 1, "member": 0, "trained": True, "task": "train/5", "task_type": "5 moves"}
    ends = {"success": True, "score": 9.8, "reward": 9.8, "truncated": False, "error": ""}
    return {**where, **ends, "turns": list(turns)} | changes


def test_the_terminal_shows_every_turn_and_what_became_of_it():
    won = record(
        turn("<|user|> player 1 <|assistant|>", "<think> x", None, False, False, 0.123456, -0.75),
        turn("<|user|> player 2 <|assistant|>", "two\nlines", "jump", True, False, 2.0, 1.25),
        turn("<|user|> player 3 <|assistant|>", "\x1b[31m√", "up", entropy=None, advantage=None),
    )
    crashed = record(success=False, error="reset: OSError('gone')", trained=False, task_type=None, truncated=True)
    assert show(iter([won, crashed, won]), 2).splitlines() == [
        "step 2, group 1, member 0: train/5 (5 moves), success, score 9.8, 3 turns, trained",
        "   1  player 1",
        "      > <think> x",
        "      = action none, INVALID FORMAT, reward -0.1, entropy 0.123, advantage -0.75",
        "   2  player 2",
        "      > two",
        "      > lines",
        "      = action jump, INADMISSIBLE, reward -0.1, entropy 2, advantage +1.25",
        "   3  player 3",
        r"      > \x1b[31m√",
        "      = action up, reward -0.1",
        "",
        "step 2, group 1, member 0: train/5, CRASHED, score 9.8, 0 turns, truncated, not trained",
        "reset: OSError('gone')",
    ]
    assert show([], 3) == show([won], 0) == ""


def test_the_terminal_shows_of_a_long_prompt_what_changes():
    prompt = [f"rule {i}" for i in range(20)]
    texts = ["\n".join([*prompt, f"at {i}", *prompt]) for i in range(2)]
    lines = show([record(*map(turn, texts))], 1).splitlines()
    # 12 lines less the one that changes leave 11, so 5 before it and 5 behind it
    shown = ["...", *prompt[-5:], "at 1", *prompt[:5], "..."]
    assert [line[6:] for line in lines[16:29]] == shown


def test_an_excerpt_is_cut_in_the_middle_where_all_of_it_changes():
    lines = list("abcdefghijklmnop")  # 16
    assert excerpt(lines, 0, 0) == [*"abcdef", "...", *"lmnop"]
    assert excerpt(lines, 16, 16) == excerpt(lines, 0, 0)  # nothing changes from turn to turn
    assert excerpt(lines, 3, 0) == ["...", *"defghi", "...", *"lmnop"]  # 13 lines change
    assert excerpt(lines, 0, 12) == [*"abcdefgh", "..."]  # 4 lines change: 4 more on either side
    assert excerpt(lines[:12], 1, 0) == lines[:12]


@pytest.mark.parametrize(
    "prompt",
    [
        "<|system|> be good <|user|> go on <|assistant|>",
        "<|im_start|>system\nhi<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n<think>\n",
        "<|start_header_id|>user<|end_header_id|>\n\ngo on<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<start_of_turn>user\ngo on<end_of_turn>\n<start_of_turn>model\n",
        "[INST] hi [/INST] yes [INST] go on [/INST]",
        " go on ",
    ],
)
def test_the_last_message_is_found_in_the_usual_chat_templates(prompt):
    assert last_message(prompt) == "go on"


def test_a_prompt_without_a_message_is_shown_as_it_is():
    assert last_message("") == "" and last_message("<|assistant|> ") == "<|assistant|>"
    assert last_message("<|user|> user 1 asks the user\nor system <|assistant|>") == "user 1 asks the user\nor system"


class Page(HTMLParser):
    """The tags of a page, and the text inside each script, heading and title."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts = ["page"], {}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        assert not {"src", "href", "onclick", "onerror"} & dict(attributes).keys()

    def handle_data(self, data):
        self.texts.setdefault(self.tags[-1], []).append(data)


def test_the_page_holds_the_records_without_ids_and_no_text_breaks_out(tmp_path, words):
    path, groups, _ = written(tmp_path, words)
    flat = [record for group in groups for record in group]
    write_page(read_records(path), tmp_path / "page.html", "<i>run</i> & @DATA@ @TITLE@")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.tags.count("script") == 2 and "i" not in page.tags
    assert page.texts["h1"][0] == page.texts["title"][0] == "<i>run</i> & @DATA@ @TITLE@"
    shown = json.loads(page.texts["script"][0])
    assert [t["turns"][0]["response"] for t in shown] == ["</script><script>alert('√')</script>"] * len(flat)
    ids = ("prompt_ids", "response_ids", "state")
    for t in flat:
        t["turns"] = [{k: v for k, v in turn.items() if k not in ids} for turn in t["turns"]]
    assert shown == flat


def test_the_page_is_complete_in_itself_and_makes_no_markup_of_text(tmp_path):
    write_page([record(turn(), turn(advantage=None)), record(error="x")], tmp_path / "page.html", "t")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    for word in ("http:", "https:", "url(", "@import", "innerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert word not in text, word
    assert "7777" not in text and "8888" not in text and str(2**60) not in text
    write_page([], tmp_path / "empty.html", "t")
    assert ">[]</script>" in (tmp_path / "empty.html").read_text(encoding="utf-8")


def test_a_trajectory_that_ended_before_its_first_turn_can_be_shown(words):
    record = trajectory_record(Trajectory("train/1", error="first prompt: 9 tokens"), Sokoban(), words, **WHERE)
    assert show([record], 1).splitlines()[1:] == ["first prompt: 9 tokens"]
