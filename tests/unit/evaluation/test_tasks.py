"""A local task of lm-evaluation-harness: the numbers of mlx_lm.evaluate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardmlx.common.environment import Blas
from shardmlx.config.inference import EvaluateConfig
from shardmlx.errors import UserError
from shardmlx.evaluation import command, tasks
from tests.helpers.local_transport import LocalNetwork, LocalTransport

TASK = """\
task: rivers_{kind}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
"""
CHOICE = """\
doc_to_target: answer
doc_to_choice: choices
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ROLLING = """\
doc_to_target: "{{question}} {{choices[answer]}}"
metric_list: [{metric: byte_perplexity}]
"""
ANSWER = """\
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["e"], max_gen_toks: 5, do_sample: false}
metric_list: [{metric: exact_match}]
"""
ROWS = [
    {"question": "The Thames flows through", "choices": [" Madrid", " London"], "answer": 1},
    {"question": "The opposite of hot is", "choices": [" warm", " cold"], "answer": 1},
    {"question": "Water is", "choices": [" wet", " made of stones"], "answer": 0},
]


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="which is not installed: pip install lm-eval"):
        tasks.check_tasks(EvaluateConfig.from_flat(model="model", tasks=["arc_easy"]))


@pytest.mark.filterwarnings("ignore")
def test_two_ranks_have_the_results_of_mlx_lm(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"):
        monkeypatch.setenv(name, "1")
    lm_eval = pytest.importorskip("lm_eval", reason="pip install lm-eval")
    from lm_eval.tasks import TaskManager
    from mlx_lm.evaluate import MLXLM

    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    data = tmp_path / "rivers.jsonl"
    data.write_text("\n".join(map(json.dumps, ROWS)))
    kinds = {"multiple_choice": CHOICE, "loglikelihood_rolling": ROLLING, "generate_until": ANSWER}
    for kind, rest in kinds.items():
        (tmp_path / f"{kind}.yaml").write_text(TASK.format(kind=kind, data=data) + rest)
    names = [f"rivers_{kind}" for kind in kinds]
    config = EvaluateConfig.from_flat(
        model=str(small),
        tasks=names,
        include_path=str(tmp_path),
        output=str(tmp_path / "results.json"),
    )

    def work(transport: LocalTransport) -> None:
        command.run(config, transport, Blas("none"))

    LocalNetwork(2, timeout=60).run(work)
    model = MLXLM(str(small))
    theirs: dict[str, dict[str, Any]] = lm_eval.simple_evaluate(
        model=model,
        tasks=names,
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        apply_chat_template=model.use_chat_template,
        log_samples=False,
    )["results"]
    ours = json.loads((tmp_path / "results.json").read_text())
    assert ours.keys() == theirs.keys()
    for task, values in theirs.items():
        for name, value in values.items():
            if isinstance(value, float):
                assert ours[task][name] == pytest.approx(value, rel=1e-4), (task, name)
