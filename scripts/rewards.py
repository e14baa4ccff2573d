"""Learn from a reward that one can count, by Tinker's SDK over ``serve --train``.

``vowels``: answers that begin with a vowel. ``sums``: answers that are the sum of two digits. Each
step draws prompts, samples answers to each, and trains by ``importance_sampling`` on how much
better each answer is than the others to its prompt. A line a step: the mean reward, and how far the
log-probabilities of sampled tokens are from those that training computes.
"""

from __future__ import annotations

import _root

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tinker
from _serving import served
from tinker import types
from transformers import AutoTokenizer, PreTrainedTokenizerBase

NAME = "model"
THINGS = (
    *("animal", "city", "colour", "country", "fruit", "game", "job", "language"),
    *("name", "plant", "river", "sport", "tool", "tree", "vegetable", "word"),
)


@dataclass(frozen=True)
class Task:
    """Prompts, and the reward of the text of an answer to each; ``most_tokens`` of an answer."""

    prompts: Sequence[str]
    reward: Callable[[str, str], float]
    most_tokens: int


def begins_with_a_vowel(prompt: str, answer: str) -> float:
    """Return 1 for an answer whose first letter is a vowel."""
    return float(answer.strip().lower()[:1] in set("aeiou"))


def is_the_sum(prompt: str, answer: str) -> float:
    """Return 1 for an answer whose first word is the sum of the prompt's two numbers."""
    left, _, right = prompt.removeprefix("Sum of ").removesuffix(" =").partition(" + ")
    return float(answer.split()[:1] == [str(int(left) + int(right))])


TASKS = {
    "vowels": Task([f"An {thing}:" for thing in THINGS], begins_with_a_vowel, 2),
    "sums": Task([f"Sum of {a} + {b} =" for a in range(10) for b in range(10)], is_the_sum, 4),
}


def rows_of(
    prompt: Sequence[int], answers: Sequence[types.SampledSequence], rewards: Sequence[float]
) -> list[types.Datum]:
    """Return the answers to a prompt as rows; none if all have the same reward."""
    spread = float(np.std(rewards))
    if not spread:
        return []
    before = [0.0] * (len(prompt) - 1)
    rows = []
    for answer, reward in zip(answers, rewards, strict=True):
        tokens = [*prompt, *answer.tokens]
        advantage = (reward - float(np.mean(rewards))) / spread
        inputs = {
            "target_tokens": np.array(tokens[1:]),
            "logprobs": np.array([*before, *(answer.logprobs or ())], np.float32),
            "advantages": np.array([*before, *[advantage] * len(answer.tokens)], np.float32),
        }
        rows.append(types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs))
    return rows


def scaled(rows: Sequence[types.Datum], answers: int) -> Sequence[types.Datum]:
    """Divide the advantages of rows by the number of all answers of a step."""
    for row in rows:
        values = row.loss_fn_inputs["advantages"].to_numpy() / answers
        row.loss_fn_inputs["advantages"] = types.TensorData.from_numpy(values)
    return rows


def learn(
    client: tinker.ServiceClient, tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace
) -> list[float]:
    """Make steps; return the mean reward of each."""
    task = TASKS[args.task]
    draw = random.Random(args.seed)
    model = client.create_lora_training_client(NAME, rank=8, seed=args.seed).result()
    rewards = []
    for step in range(args.steps):
        prompts = draw.sample(task.prompts, args.prompts)
        sampler = model.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=task.most_tokens, seed=step)
        tokens = [tokenizer.encode(prompt) for prompt in prompts]
        pending = [
            sampler.sample(types.ModelInput.from_ints(each), args.answers, params)
            for each in tokens
        ]
        rows: list[types.Datum] = []
        won: list[float] = []
        for prompt, ids, call in zip(prompts, tokens, pending, strict=True):
            answers = call.result().sequences
            own = [task.reward(prompt, tokenizer.decode(each.tokens)) for each in answers]
            won += own
            rows += rows_of(ids, answers, own)
        rewards.append(sum(won) / len(won))
        told = ""
        if rows:
            loss = model.forward_backward(scaled(rows, len(won)), "importance_sampling")
            update = model.optim_step(types.AdamParams(learning_rate=args.learning_rate))
            told = f"  {loss.result().metrics['logprob_difference:mean']:.1e}"
            update.result()
        print(f"{step:4}  {rewards[-1]:.2f}{told}", flush=True)
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--model", type=Path, default=Path(".cache/smollm2-135m-instruct"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=16, help="of a step")
    parser.add_argument("--answers", type=int, default=8, help="to each prompt")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    command = [
        sys.executable,
        "-m",
        "shardmlx",
        "launch",
        "-n",
        str(args.ranks),
        "serve",
        "--train",
    ]
    named = ["--model", str(args.model.resolve()), "--served-model-name", NAME, "--port", "0"]
    with tempfile.TemporaryDirectory() as states:
        room = ["--max-train-length", "64", "--state-dir", states, "--batch-size", "32"]
        with served([*command, *named, *room]) as address:
            print("step  reward  logprob_difference:mean")
            client = tinker.ServiceClient(base_url=address, api_key="tml-local")
            rewards = learn(client, AutoTokenizer.from_pretrained(args.model), args)
            client.close("success").result()
    print(f"first {rewards[0]:.2f}, last three {np.mean(rewards[-3:]):.2f}")


if __name__ == "__main__":
    main()
