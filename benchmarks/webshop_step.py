"""CPU time of a step of envs/webshop.py on the official products, in purchases of the expert: pages, texts, rewards.

    WEBSHOP_DATA=<folder> python benchmarks/webshop_step.py        # with requirements-webshop.txt

The official environment takes about 36 ms a step, nearly all of it for building and parsing HTML; that was measured on
another day, since it needs Java, three environments and stubs: the ratio is to that number, not to a run beside this.
"""

import sys
import time
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).parent.parent))

from envs.webshop import WebShop  # noqa: E402

OFFICIAL = 0.036


def main() -> None:
    """Time every step of the 500 goals of evaluation."""
    env, times, scores = WebShop(catalogue="official", prompt_style="words"), {}, []
    for task in env.tasks("valid_seen"):
        env.reset(task)
        done = False
        while not done:
            command = env.advise()
            start = time.process_time()
            step = env.step(command)
            times.setdefault(env.action_type(command), []).append(time.process_time() - start)
            done = step.done
        scores.append(step.score)
    times["all"] = [seconds for some in times.values() for seconds in some]
    print("| steps | number | mean, ms | median, ms | 36 ms / mean |\n|---|---|---|---|---|")
    for name, some in times.items():
        ms = f"{1000 * mean(some):.3f} | {1000 * median(some):.3f}"
        print(f"| {name} | {len(some)} | {ms} | {OFFICIAL / mean(some):.0f} |")
    print(f"\nThe expert's {len(scores)} purchases: {scores.count(1.0)} of score 1, {mean(scores):.3f} on average.")


if __name__ == "__main__":
    main()
