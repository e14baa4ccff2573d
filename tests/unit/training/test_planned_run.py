"""What a run needs is checked before its weights are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmlx.config.specs import FineTune
from shardmlx.config.train import OutputOptions, TrainConfig
from shardmlx.errors import UserError
from shardmlx.training import planned_run


@pytest.mark.parametrize(
    ("services", "line"),
    [
        ("tensorboard", "--report-to tensorboard: tensorboardX is not installed: pip install"),
        ("SwanLab, tensorboard", "--report-to swanlab: swanlab is not installed: pip install swan"),
    ],
)
def test_a_service_without_its_package_says_what_to_install(
    services: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planned_run, "find_spec", lambda name: None)
    config = TrainConfig(report_to=services, adapter_path=str(tmp_path))
    outputs, tune = OutputOptions.of(config), FineTune.of(config)
    with pytest.raises(UserError) as refused:
        planned_run.check_output(outputs, tune, tmp_path / "model")
    assert str(refused.value).startswith(line)
