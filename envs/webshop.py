"""WebShop: find a product, choose its options, buy it; in the official small shop, or a shop of our own, without Java.

    python -m envs.webshop [--catalogue official] [--goal <id>] [--expert]     play in the terminal

Option `catalogue`: `official` is what WebShop's set-up script leaves in the folder that the environment variable
WEBSHOP_DATA names, ~/.cache/webshop by default. A purchase ends the episode; the score is its raw reward, the reward
10 if that is 1. The state key is page, query, page number, product and chosen options, which no official text shows;
the released code takes the text (`anchor observation`).
"""

import argparse
import json
import os
import random
import re
import sys
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from envs import TAGS, Observation, Step, parse_think_action
from envs.webshop_catalogue import Goal, Product, official, own, reward

PROMPT = """You are an expert autonomous agent operating in the WebShop e-commerce environment.
Your task is to: {task}.
{past} current observation is: {observation}.
Your admissible actions of the current situation are: [
{actions}
].
Now it's your turn to take one action for the current step.
You should first reason step-by-step about the current situation, then think carefully which admissible action best \
advances the shopping goal. This reasoning process MUST be enclosed within <think> </think> tags.
Once you've finished your reasoning, you should choose an admissible action for the current step and present it \
within <action> </action> tags."""
PAST = """Prior to this step, you have already taken {count} step(s). Below are the most recent {shown} observations \
and the corresponding actions you took: {pairs}
You are now at step {number} and your"""
PAIR = "[Observation {number}: '{observation}', Action {number}: '{action}']"
LONGEST = 13_000  # characters of a prompt that shows the past
SPLITS = ("train", "valid_seen", "valid_unseen")
SEP, BACK, NEXT, PREV, BUY = " [SEP] ", "back to search", "next >", "< prev", "buy now"
SUB_PAGES = ("description", "features", "reviews")
TYPES = {BACK: "back", PREV: "back", NEXT: "next", BUY: "buy"}  # of clicks, for diagrams
DONE = """Thank you for shopping with us!|Your code:|None|(Paste it in your MTurk interface.)|Purchased|asin|{asin}|\
options|{options}|attrs|None|category|None|query|None|product category|None|Target|asin|options|attrs|price upper|\
instuction text|category|product category|query|Goal|None|Reward|Your score (min 0.0, max 1.0)|{score}|\
Reward Details|None""".replace("|", SEP)
SAID = """WebShop Instruction: Search Back to Search < Prev Next > Page (Total results: Price: Rating: N.A. \
Description Features Reviews Buy Now find below has lacks none ; item search[<your query>] click[ Your your"""


@dataclass(frozen=True)
class Visit:
    """Where a customer is."""

    page: str = "search"  # search, results, item, one of SUB_PAGES, done
    words: str = ""
    number: int = 1
    found: tuple[Product, ...] = ()
    product: Product | None = None
    options: dict[str, str] = field(default_factory=dict)  # chosen values by name

    @property
    def shown(self) -> tuple[Product, ...]:
        """The ten products of a page of results."""
        return self.found[10 * self.number - 10 : 10 * self.number] if self.page == "results" else ()


def clickables(visit: Visit) -> list[str]:
    """What can be clicked, in upstream's order."""
    if visit.page in ("search", "done"):
        return ["search"] * (visit.page == "search")
    if visit.page == "results":
        return [BACK, *[PREV] * (visit.number > 1), NEXT, *(product.asin.lower() for product in visit.shown)]
    more = [*SUB_PAGES, BUY, *chain(*visit.product.options.values())] if visit.page == "item" else []
    return list(dict.fromkeys([BACK, PREV, *more]))


def click(visit: Visit, what: str) -> Visit:
    """Where one of them leads. Chosen options are kept on the product's sub-pages, and lost with the product."""
    if what == BACK:
        return Visit()
    if visit.page == "results" and what in (NEXT, PREV):
        return replace(visit, number=visit.number + (1 if what == NEXT else -1))
    if visit.page == "results":
        return replace(visit, page="item", product=next(p for p in visit.found if p.asin.lower() == what))
    if visit.page == "item" and what == PREV:
        return replace(visit, page="results", product=None, options={})
    if what in (PREV, *SUB_PAGES, BUY):
        return replace(visit, page={PREV: "item", BUY: "done"}.get(what, what))
    name = [name for name, values in visit.product.options.items() if what in values][-1]
    return replace(visit, options=visit.options | {name: what})


def page_lines(visit: Visit) -> list[str]:
    """The visible strings of a page below its instruction, without white space at their ends and empty ones."""
    product, lines = visit.product, ["Search" if visit.page == "search" else "Back to Search"]
    lines += [f"Page {visit.number} (Total results: {len(visit.found)})"] * (visit.page == "results")
    lines += [label for label in ("< Prev", "Next >") if label.lower() in clickables(visit)]
    lines += chain(*((found.asin, found.title, found.shown_price) for found in visit.shown))
    if visit.page == "item":
        lines += chain(*((name, *values) for name, values in product.options.items()))
        lines += [product.title, f"Price: {product.shown_price}", "Rating: N.A."]
        lines += ["Description", "Features", "Reviews", "Buy Now"]
    if product:
        lines += {"description": [product.description], "features": product.bullets}.get(visit.page, [])
    return [line.strip() for line in lines if line.strip()]


def compact_text(visit: Visit, goal: Goal) -> str:
    """The goal, with what is not chosen yet, the page, and what was found; for the built-in model.

    find clay handmade mug below 20 lacks color red lacks size tiny ; results 1 ; clay handmade mug mug1 $14 ; ...
    find clay handmade mug below 20 has color red lacks size tiny ; item clay handmade mug
    """
    find = f"find {' '.join(goal.product.wanted)} {goal.product.query} below {goal.limit:.0f}"
    for name, value in goal.options.items():
        find += f" {'has' if visit.options.get(name) == value else 'lacks'} {name} {value}"
    place = f"{visit.page} {visit.product.title if visit.product else visit.number}"
    return " ; ".join([find, place, *(f"{p.title} {p.asin} {p.shown_price}" for p in visit.shown)]).lower()


def read_action(action: str | None) -> tuple[str, str]:
    """(search or click, of what) of an action `verb[what]`, else two empty strings; upstream ignores what follows."""
    match = re.match(r"(.+)\[(.+)\]", action or "")
    return (match[1], match[2].lower()) if match and match[1] in ("search", "click") else ("", "")


def shorten(text: str, task: str) -> str:
    """A page as prompts have it: what follows the instruction, in quotes; the whole text where there is none."""
    parts = text.split(SEP)
    return SEP.join(f"'{part}'" for part in parts[parts.index(task) + 1 :]) if task in parts else text


class WebShop:
    """The task; its options are the keyword arguments, their meaning is in config.py. ValueError if one is bad."""

    append_only = False

    def __init__(
        self,
        *,
        catalogue: str = "own",
        prompt_style: str = "compact",
        history: int = 2,
        anchor: str = "state",
        max_turns: int = 15,
    ):
        if history < 0:
            raise ValueError(f"history {history}: allowed is 0 and up")
        folder = Path(os.environ.get("WEBSHOP_DATA", "~/.cache/webshop")).expanduser()
        self.catalogue = official(folder) if catalogue == "official" else own()
        self.prompt_style, self.history, self.anchor, self.max_turns = prompt_style, history, anchor, max_turns

    def tasks(self, split: str) -> list[str]:
        """Ids `split/number` in a fixed order. ValueError on an unknown split."""
        if split not in SPLITS:
            raise ValueError(f"split {split!r}: allowed are {', '.join(SPLITS)}")
        return [task_id for task_id in self.catalogue.goals if task_id.startswith(f"{split}/")]

    def reset(self, task_id: str) -> Observation:
        """Start at the search page with the goal of an id."""
        self.goal, self.visit, self.score = self._goal(task_id), Visit(), 0.0
        return self._observe()

    def _goal(self, task_id: str) -> Goal:
        if task_id not in self.catalogue.goals:
            raise ValueError(f"task {task_id!r}: allowed are the ids of tasks(split)")
        return self.catalogue.goals[task_id]

    def step(self, action: str | None) -> Step:
        """One turn; what cannot be done, or None, passes it. A purchase ends the episode."""
        verb, what = read_action(action)
        if verb == "search" and self.visit.page != "done":
            self.visit = Visit("results", what, found=tuple(self.find(what)))
        elif verb == "click" and what in clickables(self.visit) and what != "search":
            self.visit = click(self.visit, what)
            if self.visit.page == "done":
                self.score = reward(self.goal, self.visit.product, self.visit.options, self.catalogue.nouns)
        done, won = self.visit.page == "done", self.score == 1
        return Step(self._observe(), 10.0 * won, done, won, self.score)

    def find(self, what: str) -> list[Product]:
        """What a search finds; after <a>, <c> or <q> all products of an attribute, a category, a query."""
        products, (mark, _, name) = self.catalogue.products.values(), what.partition(" ")
        if mark in ("<a>", "<c>", "<q>"):
            return [p for p in products if name in {"<a>": p.attributes, "<c>": [p.category], "<q>": [p.query]}[mark]]
        return self.catalogue.search(what)

    def _observe(self) -> Observation:
        visit, asin = self.visit, self.visit.product and self.visit.product.asin
        if visit.page == "done":
            text = DONE.format(asin=asin, options=json.dumps(visit.options, sort_keys=True), score=self.score)
        elif self.prompt_style == "compact":
            text = compact_text(visit, self.goal)
        else:
            name = ["WebShop"] * (visit.page == "search")
            text = SEP.join([*name, "Instruction:", self.goal.text, *page_lines(visit)])
        key = f"{visit.page} {visit.words!r} {visit.number} {asin} {sorted(visit.options.items())}"
        # searches cannot be listed
        actions = None if visit.page == "search" else tuple(f"click[{what}]" for what in clickables(visit))
        return Observation(text, text if self.anchor == "observation" else key, actions)

    def prompt(self, history: list[tuple[Observation, str | None]]) -> list[dict[str, str]]:
        """Appendix H.1.2: the last `history` turns, unless that is too long; or the bare observation (compact)."""
        last, count = history[-1][0], len(history) - 1
        if self.prompt_style == "compact":
            return [{"role": "user", "content": last.text}]
        task = history[0][0].text.split(SEP)[2]
        past = list(enumerate(history[:-1], 1))[-self.history :] if self.history else []
        pairs = [PAIR.format(number=i, observation=shorten(o.text, task), action=a or "none") for i, (o, a) in past]
        said = PAST.format(count=count, shown=len(past), pairs="\n".join(pairs), number=count + 1) if count else "Your"
        actions = "\n".join(f"'{action}'," for action in last.actions or ("search[<your query>]", "click[search]"))
        rest = {"task": task, "observation": shorten(last.text, task), "actions": actions}
        content = PROMPT.format(past=said, **rest)
        content = content if len(content) <= LONGEST else PROMPT.format(past="Your", **rest)
        return [{"role": "user", "content": content}]

    def parse(self, response: str) -> tuple[str | None, bool]:
        """The action in lower case, without blanks at its brackets, and whether the format holds."""
        action, valid = parse_think_action(response)
        return re.sub(r"\s*([][])\s*", r"\1", action.lower()) if valid else None, valid

    def expert(self, rng: random.Random, noise: float = 0.0) -> str:
        """The next step of a direct way, behind what it aims at; with probability `noise` anything but a purchase."""
        thought = command = self.advise()
        if rng.random() < noise:
            queries = sorted({product.query for product in self.catalogue.products.values()})
            clicks = [f"click[{what}]" for what in clickables(self.visit) if what != BUY]
            command = rng.choice([f"search[{query}]" for query in queries] if self.visit.page == "search" else clicks)
        return f"<think> {thought.replace('[', ' ').rstrip(']')} </think> <action> {command} </action>"

    def advise(self) -> str:
        """What leads to the goal: a search by its words, or the title if they fail; product, options, purchase."""
        visit, goal = self.visit, self.goal
        if visit.page == "search":
            words = f"{' '.join(goal.product.wanted)} {goal.product.query}"
            words = words if goal.product in self.find(words) else goal.product.title
            return f"search[{re.sub('[][]', ' ', words).lower()}]"
        if visit.page == "results":
            if goal.product not in visit.found:
                return f"click[{BACK}]"
            ahead = visit.found.index(goal.product) // 10 + 1 - visit.number
            return f"click[{(NEXT if ahead > 0 else PREV) if ahead else goal.product.asin.lower()}]"
        if visit.page != "item" or visit.product is not goal.product:
            return f"click[{PREV}]"
        missing = [value for name, value in goal.options.items() if visit.options.get(name) != value]
        return f"click[{missing[0] if missing else BUY}]"

    def snapshot(self):
        """Where the episode stands, for restore."""
        return self.goal, self.visit, self.score

    def restore(self, snapshot) -> Observation:
        """Go on from a snapshot, of this instance or of another one."""
        self.goal, self.visit, self.score = snapshot
        return self._observe()

    def words(self) -> list[str]:
        """Every word of the task, in a fixed order; an action may come back in lower case."""
        goals, numbers = self.catalogue.goals.values(), " ".join(str(i) for i in range(100))
        texts = [*TAGS, SAID, SEP, numbers, PROMPT, PAST, PAIR, *dict.fromkeys(goal.text for goal in goals)]
        for p in self.catalogue.products.values():
            texts += [p.asin, p.title, p.query, p.description, p.shown_price, *p.bullets, *p.attributes]
            texts += chain(*((name, *values) for name, values in p.options.items()))
        text = " ".join(texts)
        return list(dict.fromkeys(f"{text} {text.lower()}".split()))

    def action_type(self, action: str | None) -> str:
        """search, click product, click other, buy, back, next; other for no command, invalid for a broken response."""
        verb, what = read_action(action)
        clicked = TYPES.get(what, "click product" if what in self.catalogue.products else "click other")
        return "invalid" if action is None else clicked if verb == "click" else verb or "other"

    def task_type(self, task_id: str) -> str:
        """The category of the product."""
        return self._goal(task_id).product.category


def main() -> None:
    """Go shopping in the terminal, or watch the expert do it."""
    parser = argparse.ArgumentParser(prog="python -m envs.webshop", description=main.__doc__)
    parser.add_argument("--catalogue", choices=("own", "official"), default="own")
    parser.add_argument("--goal", help="an id; the first of valid_seen by default")
    parser.add_argument("--expert", action="store_true")
    args = parser.parse_args()
    try:
        env = WebShop(catalogue=args.catalogue, prompt_style="words")
        seen = env.reset(args.goal or env.tasks("valid_seen")[0])
    except ValueError as error:
        parser.error(str(error))
    for turn in range(1, env.max_turns + 1):
        print(seen.text.replace(SEP, " | "), *(seen.actions or ["search[<your query>]"]), sep="\n")
        command = env.advise() if args.expert else sys.stdin.readline()
        if not command:
            break
        print(f"\n{turn}> {command.strip()}")
        step = env.step(command.strip().lower())
        seen = step.observation
        if step.done:
            print(f"{seen.text.replace(SEP, ' | ')}\nbought, score {step.score:.3f}")
            return
    print("\nnothing bought")


if __name__ == "__main__":
    main()
