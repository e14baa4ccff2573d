"""``mpirun -n N python -m shardmlx.generate`` says what mlx_lm.generate says."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from testbed.jobs import AFTER_A_KILL, Job
from testbed.small_models import SMALL_VOCABULARY
from tests.helpers.draft_heads import head_config, save_with_head
from tests.helpers.mpirun import mlx_lm, mpirun
from tests.helpers.programs import PROGRAMS
from tests.helpers.rank_pool import run_in_pool
from tests.helpers.shown import lacking, shown

PROMPT = "What is the colour of the sea, and who sails on it?"


def generate(n: int, *args: str | Path) -> Job:
    return run_in_pool(n, "-m", "shardmlx.generate", *args)


def generate_well(n: int, *args: str | Path) -> str:
    return generate(n, *args, "--no-verbose").well().stdout


def refused(*args: str | Path) -> str:
    """Return the one line with which a job of two ranks must end."""
    return generate(2, *args).failure(2)


def test_the_text_of_mlx_lm_for_a_prompt_that_is_piped_through_launch(small: Path) -> None:
    """The line of mpirun is printed, and there may be more ranks than cores. The pipe pauses."""
    how = ("--model", str(small), "--max-tokens", "30")
    words = [sys.executable, "-m", "shardmlx", "launch", "-n", "3", "generate", *how]
    command = shlex.join([*words, "--no-verbose", "--prompt", "-"])
    parts = [f"printf %s {shlex.quote(part)}" for part in (PROMPT[:20], PROMPT[20:])]
    piped = f"{{ {parts[0]}; sleep 1.5; {parts[1]}; }} | {command}"
    printed, _, answer = mpirun(3, command=["sh", "-c", piped]).well().stdout.partition("\n")
    assert printed.startswith("$ ")
    assert "-m shardmlx.generate --model" in printed
    assert answer == mlx_lm(*how, "--prompt", PROMPT)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_an_answer_that_a_full_disk_does_not_take_is_a_failure(small: Path) -> None:
    """Python holds it in a buffer until the end, where a fault would be a traceback."""
    how = ["--model", str(small), "--max-tokens", "3", "--no-verbose", "--prompt", "Aye"]
    command = shlex.join([sys.executable, "-m", "shardmlx", "generate", *how])
    job = mpirun(1, command=["env", "PYTHONUNBUFFERED=", "sh", "-c", f"{command} > /dev/full"])
    assert "No space left on device" in job.failure(1)


def test_quantised_and_sampled_with_a_seed(small_quantised: Path) -> None:
    how: Sequence[str | Path] = (
        *("--model", small_quantised, "--prompt", PROMPT, "--max-tokens", "20"),
        *("--temp", "0.9", "--top-p", "0.95", "--seed", "3"),
        *("--system-prompt", "Be brief.", "--prefill-response", "Aye"),
        *("--kv-bits", "4", "--kv-group-size", "32", "--quantized-kv-start", "9"),
    )
    alone = mlx_lm(*how, "--prefill-step-size", "1")
    assert generate_well(2, *how, "--draft", "lookup") == alone


def test_adapters_that_train_has_made(small: Path, adapters: Path) -> None:
    how: Sequence[str | Path] = ("--model", small, "--prompt", PROMPT, "--max-tokens", "20")
    plain = generate_well(2, *how)
    tuned = generate_well(2, *how, "--adapter-path", adapters)
    assert tuned == mlx_lm(*how, "--adapter-path", adapters)
    assert tuned != plain


def test_prompts_from_a_file(small: Path, tmp_path: Path) -> None:
    questions = ["Who are you?", PROMPT, "Why?", "Tell me of the moon, the stars and the tide."]
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    rows: list[dict[str, object]] = [{"prompt": question} for question in questions]
    rows[2] = {"messages": [{"role": "user", "content": questions[2]}], "max_tokens": 5}
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    how: Sequence[str | Path] = ("--model", small, "--max-tokens", "16")
    job = generate(2, *how, "--prompts", prompts, "--output", output, "--batch-size", "3").well()
    assert re.search(r"^4 answers in .* s: \d+ prompt tokens, \d+ generated, ", job.stdout, re.M)
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    alone = [
        mlx_lm(*how[:2], "--prompt", question, "--max-tokens", "5" if i == 2 else "16")
        for i, question in enumerate(questions)
    ]
    assert [answer["text"] + "\n" for answer in answers] == alone
    assert all(
        set(answer) == {"text", "prompt_tokens", "generation_tokens", "finish_reason"}
        for answer in answers
    )
    assert answers[2]["finish_reason"] in ("length", "stop")
    on_the_page = [*map(json.loads, re.findall("^{.*}$", shown("generate.md", "prompts"), re.M))]
    assert [[*row] for row in on_the_page[2:]] == [[*answers[0]]] * 2
    # To stdout, and nothing else.
    lines = generate_well(1, *how, "--prompts", prompts).splitlines()
    assert [json.loads(line) for line in lines] == answers


def test_what_it_says(small: Path) -> None:
    how = ("--model", small, "--prompt", PROMPT, "--max-tokens", "8", "--draft", small)
    job = generate(2, *how).well()
    assert lacking("generate.md", "answer", job.stdout) == set()
    assert re.search(r"^Drafts: \d+ tokens in \d+ rounds, \d+ accepted$", job.stdout, re.M)
    assert [line.split()[0] for line in job.stdout.splitlines()[-3:]] == ["rank", "0", "1"]


def test_the_models_own_head_drafts_where_its_weights_are_sent(
    small_tokenizer: Path, tmp_path: Path
) -> None:
    config = head_config("glm4_moe", vocab_size=SMALL_VOCABULARY, eos_token_id=1)
    model = save_with_head(tmp_path / "model", config, noise=0.0)
    shutil.copytree(small_tokenizer, model, dirs_exist_ok=True)
    how: Sequence[str | Path] = ("--model", model, "--prompt", PROMPT, "--max-tokens", "20")
    drafts = ("--draft", "mtp", "--num-draft-tokens", "3")
    job = generate(2, *how, *drafts, "--weights", "rank0").well()
    assert mlx_lm(*how).strip() in job.stdout
    assert re.search(r"^--draft mtp: .* MiB on rank 1$", job.stdout, re.M)
    counts = re.search(r"^Drafts: (\d+) tokens in \d+ rounds, (\d+) accepted", job.stdout, re.M)
    assert counts is not None
    assert counts[1] == counts[2] != "0"


def test_bad_input(small: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n{"promt": "hello"}\n')
    assert f"{prompts}:2" in refused("--model", small, "--prompts", prompts)
    assert "none" in refused("--model", small, "--adapter-path", tmp_path / "none")
    assert "--temp" in mpirun(2, "-m", "shardmlx.generate", "--temp", "-1").failure(2)


def test_a_rank_that_is_killed(small: Path) -> None:
    """One that fails names its stage and its item: ``tests/unit/inference/test_pipeline.py``."""
    job = mpirun(
        2,
        *(PROGRAMS / "dying_rank.py", "kill", "generate", "--model", small, "--prompt", PROMPT),
        *("--max-tokens", "50", "--timeout", "60"),
    )
    assert "Traceback" not in job.output
    line = replace(job, stdout="").failure(1, *AFTER_A_KILL)  # it may follow unfinished text
    assert "rank 1 on" in line
