r"""TIR Math: a mathematical problem, Python as a tool, and one context that only grows (SimpleTIR, arXiv 2509.02479).

    python -m envs.tir_math [--problems official] [--problem <id>] [--expert]     play in the terminal

A response's first ```python block is run, and `Code execution result: ...` is appended to the context as tokens of its
own. \boxed{..} in front of it, or final_answer() in it, answers and ends the episode: reward and score are 1 if
math-verify finds the answer right, else 0. A response with neither code nor answer is void: it ends the episode, and
`mask_invalid` leaves the trajectory out of the loss. What code prints earns nothing but through final_answer. Where
this departs from the released code: \boxed{..} in a printout is no answer, and a warning hides no result.
"""

import argparse
import random
import re
import sys
from functools import cache

from envs import Observation, Step
from envs.sandbox import Result, Sandbox
from envs.tir_problems import LARGEST, Problem, own, read_problems

PROMPT = r"""Solve the following problem step by step. You now have the ability to selectively write executable \
Python code to enhance your reasoning process. The Python code will be executed by an external sandbox, and the \
output (after "Code execution result: ") is returned to aid your reasoning and help you arrive at the final answer. \
The Python code should be complete scripts, including necessary imports.
Code Format:
Each code snippet is wrapped between triple backticks. You need to use print() to output intermediate results.
Answer Format:
You can use the final_answer() function in the code to return your final answer. For example, to answer the User \
Question: What is the result of the 5 + 3 + 1294.678?, you can write:
```python
answer = 5 + 3 + 1294.678
final_answer(answer)
```
You can also use \boxed to return your answer. The last part of your response should be:
\boxed{'The final answer goes here.'}
User Question:
""".replace("\\\n", "")
RESULT = "\nCode execution result: {}\n"
BLOCK = re.compile(r"```python\s(.*?)```", re.DOTALL)
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
SECONDS, GRADING, SHOWN = 10.0, 5.0, 512  # limits of a call and of the grader; characters of a result that are shown
MARK = "\x00final_answer\x00"
PRELUDE = f"""def final_answer(answer):
    import sys
    sympy = sys.modules.get("sympy")
    print({MARK!r} + (sympy.latex(answer) if sympy and isinstance(answer, sympy.Basic) else str(answer)) + {MARK!r})
"""
GRADER = r"""from math_verify import parse, verify

def equal(gold, answer, strict=True):
    settings = {"parsing_timeout": None, "raise_on_error": strict}  # the sandbox's limit is the only one
    try:
        gold_and_answer = (parse("\\boxed{" + text + "}", **settings) for text in (gold, answer))
        return verify(*gold_and_answer, timeout_seconds=None, raise_on_error=strict)
    except Exception:  # of one way to compare; another one may do
        if strict and equal(gold, answer, strict=False):
            return True
        raise
"""
EXAMPLES = ("1/2", "0.5"), (r"\frac{\sqrt{2}}{2}", "x^2 - 1"), ("(1, 2)", r"\{1, 2\}")  # what they load is loaded
PREPARE = f"""import logging, numpy, sympy
{GRADER}
logging.getLogger("math_verify").setLevel("ERROR")  # it warns that it sets no limit itself
for pair in {EXAMPLES}:
    equal(*pair)
"""
TOKENS = r"What is ? ( ) + - * print final_answer ```python ``` \boxed { } Code execution result : other =".split()


@cache
def shared_sandbox(isolation: str) -> Sandbox:
    """The sandbox of this process, for all its environments. ValueError where the machine has no isolation."""
    try:
        return Sandbox(isolation, seconds=SECONDS, prepare=PREPARE)
    except RuntimeError as error:
        raise ValueError(f"--sandbox {isolation}: {error}") from error


def last_boxed(text: str) -> str | None:
    r"""What the last closed \boxed{..} or \fbox{..} of a text holds; None where there is none, or a blank one."""
    found = None
    for box in BOX.finditer(text):
        depth = 1
        for mark in re.finditer(r"\\.|[{}]", text[box.end() :], re.DOTALL):
            depth += {"{": 1, "}": -1}.get(mark[0], 0)
            if not depth:
                found = text[box.end() : box.end() + mark.start()].strip()
                break
    return found or None


def read_printout(result: Result) -> tuple[str, str | None]:
    """What a call shows, its last line on stderr where it failed, cut in the middle; and the last final_answer."""
    printed, *marked = result.stdout.split(MARK)
    text, answer = "".join([printed, *(part.lstrip("\n") for part in marked[1::2])]), (marked[0::2] or [None])[-1]
    if result.status != "ok":
        text = (result.stderr.strip().splitlines() or [f"interpreter {result.status}"])[-1]
    text = text.strip("\n")
    if len(text) > SHOWN:
        text = f"{text[: SHOWN // 2]} ... {len(text) - SHOWN} characters left out ... {text[-SHOWN // 2 :]}"
    return text, answer


def grade(sandbox: Sandbox, answer: str, gold: str) -> tuple[bool, str]:
    """Whether an answer is right, by math-verify in the sandbox; and why it could not be said, which is not right."""
    if answer.strip() == gold.strip():
        return True, ""
    if all(re.fullmatch("[0-9]{1,30}", text.strip()) for text in (answer, gold)):
        return int(answer) == int(gold), ""
    result = sandbox.run(f"{GRADER}\nprint(equal({gold!r}, {answer!r}))", GRADING)
    return result.stdout.strip() == "True", "" if result.status == "ok" else f"grader {result.status}"


@cache
def vocabulary(problems: str) -> tuple[str, ...]:
    """Every word of prompts and of results that are shown, in a fixed order."""
    known = own() if problems == "own" else read_problems(problems)
    texts = [*TOKENS, *map(str, range(LARGEST + 1)), PROMPT, *(f"{p.question} {p.answer}" for p in known.values())]
    return tuple(dict.fromkeys(" ".join(texts).split()))


class TIRMath:
    """The task; its options are the keyword arguments, their meaning is in config.py. ValueError if one is bad."""

    append_only, blocking, stop = True, True, ("```\n",)

    def __init__(
        self,
        *,
        problems: str = "own",
        prompt_style: str = "compact",
        sandbox: str = "auto",
        max_turns: int = 5,
    ):
        self.problems = own() if problems == "own" else read_problems(problems)
        self.source, self.prompt_style, self.max_turns = problems, prompt_style, max_turns
        self.sandbox = shared_sandbox(sandbox)
        self.known = frozenset(vocabulary(problems)) if problems == "own" or prompt_style == "compact" else None
        if problems == "own":  # there is no expert for others
            self.expert = self._expert

    def tasks(self, split: str) -> list[str]:
        """Ids `split/number` in a fixed order. ValueError on an unknown split."""
        splits = dict.fromkeys(task_id.partition("/")[0] for task_id in self.problems)
        if split not in splits:
            raise ValueError(f"split {split!r}: allowed are {', '.join(splits)}")
        return [task_id for task_id in self.problems if task_id.startswith(f"{split}/")]

    def reset(self, task_id: str) -> Observation:
        """Start with the question of an id."""
        self.problem, self.past = self._problem(task_id), [task_id]
        return Observation(self.problem.question, task_id)

    def _problem(self, task_id: str) -> Problem:
        if task_id not in self.problems:
            raise ValueError(f"task {task_id!r}: allowed are the ids of tasks(split)")
        return self.problems[task_id]

    def step(self, action: str | None) -> Step:
        """Run code, or take an answer; None, a void response, ends the episode. The state is all that was done."""
        (kind, _, rest), shown, note, won = (action or "").partition(" "), "", "", False
        answer = rest if kind == "answer" else None
        if kind == "code":
            result = self.sandbox.run(PRELUDE + rest)
            shown, answer = read_printout(result)
            note = "" if result.status in ("ok", "error") else f"code {result.status}"
        if answer is not None:
            won, reason = grade(self.sandbox, answer, self.problem.answer)
            note = reason or note
        self.past += [action, shown]
        done = answer is not None or action is None
        return Step(Observation(shown, repr(self.past)), float(won), done, won, float(won), note)

    def prompt(self, history: list[tuple[Observation, str | None]]) -> list[dict[str, str]]:
        """Appendix H.1.1, or the bare question (compact); what comes later is appended by `render`."""
        question = history[0][0].text
        return [{"role": "user", "content": question if self.prompt_style == "compact" else PROMPT + question}]

    def render(self, observation: Observation) -> str:
        """The text to append, what the code printed; for the built-in model eight words, unknown ones as `other`."""
        text = observation.text
        if self.known:
            text = " ".join(word if word in self.known else "other" for word in text.split()[:8])
        return RESULT.format(text)

    def parse(self, response: str) -> tuple[str | None, bool]:
        """`answer ..` for one in front of the first code, else `code ..`; (None, False) without either."""
        block = BLOCK.search(response)
        answer = last_boxed(response[: block.start()] if block else response)
        if answer is not None:
            return f"answer {answer}", True
        return (f"code {block[1]}", True) if block and block[1].strip() else (None, False)

    def _expert(self, rng: random.Random, noise: float = 0.0) -> str:
        """Code for the expression of the question, then its result as the answer; sometimes code for another one."""
        expression = self.problem.question.removeprefix("What is ").removesuffix(" ?")
        wrong = rng.random() < noise
        if self.past[-1] == self.problem.answer and not wrong:
            return rf"\boxed {{ {self.problem.answer} }}"
        if wrong:
            words = expression.split()
            numbers = [i for i, word in enumerate(words) if word.isdecimal()]
            words[rng.choice(numbers)] = str(rng.randint(2, 99))
            expression = " ".join(words)
        return f"```python print ( {expression} ) ```"

    def words(self) -> list[str]:
        """Every word of prompts and results, in a fixed order."""
        return list(vocabulary(self.source))

    def action_type(self, action: str | None) -> str:
        """code, answer, or invalid for a void response."""
        return "invalid" if action is None else action.partition(" ")[0]

    def task_type(self, task_id: str) -> str:
        """Subject or source of the problem."""
        return self._problem(task_id).kind


def main() -> None:
    """Solve a problem in the terminal, a response a line (\\n for a line break), or watch the expert do it."""
    parser = argparse.ArgumentParser(prog="python -m envs.tir_math", description=main.__doc__)
    parser.add_argument("--problems", default="own")
    parser.add_argument("--problem", help="an id; the first of valid_seen by default")
    parser.add_argument("--sandbox", choices=("auto", "unsafe"), default="auto")
    parser.add_argument("--expert", action="store_true")
    args = parser.parse_args()
    try:
        env = TIRMath(problems=args.problems, prompt_style="words", sandbox=args.sandbox)
        if args.expert and not hasattr(env, "expert"):
            raise ValueError("--expert: there is one for --problems own alone")
        seen = env.reset(args.problem or env.tasks("valid_seen")[0])
    except ValueError as error:
        parser.error(str(error))
    print(env.prompt([(seen, None)])[0]["content"])
    for turn in range(1, env.max_turns + 1):
        response = env.expert(random.Random()) if args.expert else sys.stdin.readline().replace("\\n", "\n")
        if not response:
            break
        print(f"\n{turn}> {response.strip()}")
        step = env.step(env.parse(response)[0])
        if step.done:
            print(f"score {step.score:.0f} {step.note}")
            return
        print(env.render(step.observation).strip())
    print("\nno answer")


if __name__ == "__main__":
    main()
