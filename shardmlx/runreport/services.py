"""Log a run to the services of ``--report-to``, each by its own library. No MLX, no MPI.

All get the same names. They are those that mlx_lm gives wandb, as ``train_loss``, or else those of
the metrics file. Options of the run are parameters, and its page is an artifact where a service
keeps such.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Protocol

from shardmlx.common.reporter import Reporter
from shardmlx.errors import AgreedFailure, Stopped, UserError, one_line
from shardmlx.runreport.metrics_file import MetricsFile
from shardmlx.runreport.page import render_page
from shardmlx.runreport.thinning import thinned

Scalars = Mapping[str, float]

PROJECT = "shardmlx"
"""The project where a service needs one and none is named."""

_OTHER_NAMES = {"seconds": "time"}
"""mlx_lm's name of a number, after ``val_``."""

_NOT_LOGGED = frozenset({"step", "time", "shapes"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """A run as services show it: its ``name``, the ``project``, its ``options``, which are plain
    data, and the ``directory`` for what stays on this machine."""

    name: str
    project: str | None
    directory: Path
    options: Mapping[str, Any]


class RunLogger(Protocol):
    """The logger of a run to one service."""

    def log(self, values: Scalars, step: int) -> None:
        """Log numbers after so many steps."""

    def close(self, page: Path | None, *, failed: bool) -> None:
        """Send what is left, and the run's page, and say how the run ended."""


class _TensorBoard:
    """Writes event files, which ``tensorboard --logdir`` shows."""

    def __init__(self, run: LoggedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event = Event
        self._summary = Summary
        self._writer = EventFileWriter(str(run.directory / "tensorboard"))
        options = {name: _as_text(value) for name, value in run.options.items()}
        self._add(hparams_pb(options, trial_id=run.name), 0)

    def log(self, values: Scalars, step: int) -> None:
        pairs = (self._summary.Value(tag=name, simple_value=x) for name, x in values.items())
        self._add(self._summary(value=pairs), step)

    def _add(self, summary: Any, step: int) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self, page: Path | None, *, failed: bool) -> None:
        self._writer.close()


class _MLflow:
    """Logs to ``MLFLOW_TRACKING_URI``, or to MLflow's own default."""

    def __init__(self, run: LoggedRun) -> None:
        import mlflow

        self._mlflow = mlflow
        if run.project is not None:
            mlflow.set_experiment(run.project)
        mlflow.start_run(run_name=run.name)
        mlflow.log_params({name: _as_text(value) for name, value in run.options.items()})

    def log(self, values: Scalars, step: int) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self, page: Path | None, *, failed: bool) -> None:
        if page is not None:
            self._mlflow.log_artifact(str(page))
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


class _WandB:
    """Logs to Weights & Biases, or to ``wandb`` in the run's directory."""

    def __init__(self, run: LoggedRun) -> None:
        import wandb

        self._wandb = wandb
        directory = str(run.directory)
        options = dict(run.options)
        self._run = wandb.init(project=run.project, name=run.name, dir=directory, config=options)

    def log(self, values: Scalars, step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self, page: Path | None, *, failed: bool) -> None:
        if page is not None:
            artifact = self._wandb.Artifact(f"page-{self._run.id}", "report")
            artifact.add_file(str(page))
            self._run.log_artifact(artifact)
        self._run.finish(exit_code=int(failed))


class _SwanLab:
    """Logs to SwanLab, or to ``swanlog`` in the run's directory."""

    def __init__(self, run: LoggedRun) -> None:
        import swanlab

        self._swanlab = swanlab
        directory = str(run.directory / "swanlog")
        options = dict(run.options)
        swanlab.init(project=run.project, name=run.name, log_dir=directory, config=options)

    def log(self, values: Scalars, step: int) -> None:
        self._swanlab.log(dict(values), step=step)

    def close(self, page: Path | None, *, failed: bool) -> None:
        self._swanlab.finish("crashed" if failed else "success")


class _Trackio:
    """Logs to trackio's database on this machine, which ``trackio show`` shows, or to a Space."""

    def __init__(self, run: LoggedRun) -> None:
        import trackio

        self._trackio = trackio
        options = dict(run.options)
        trackio.init(project=run.project or PROJECT, name=run.name, config=options)

    def log(self, values: Scalars, step: int) -> None:
        self._trackio.log(dict(values), step=step)

    def close(self, page: Path | None, *, failed: bool) -> None:
        self._trackio.finish()


_SERVICES: Mapping[str, Callable[[LoggedRun], RunLogger]] = MappingProxyType(
    {
        "tensorboard": _TensorBoard,
        "mlflow": _MLflow,
        "wandb": _WandB,
        "swanlab": _SwanLab,
        "trackio": _Trackio,
    }
)
"""The loggers of ``--report-to``: each name is that of the package, too."""


def check_services(names: Sequence[str]) -> None:
    """Raise ``UserError`` for a service whose package is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise UserError(f"--report-to {name} is not installed", f"pip install {name}")


class RunServices:
    """Services that are told of a run: a listener of ``Reporter``.

    A service that fails is named, and gets no more of the run, which goes on.
    """

    def __init__(self, names: Sequence[str], run: LoggedRun, reporter: Reporter) -> None:
        """Raises ``UserError`` if a service cannot be begun."""
        self._reporter = reporter
        self._step = 0
        self.failed = False
        """True once the run has told that it came to no end."""
        self._open: dict[str, RunLogger] = {}
        for name in names:
            try:
                self._open[name] = _SERVICES[name](run)
            except Exception as error:  # each library has its own kinds
                problem = f"--report-to {name} cannot begin: {_why(error)}"
                raise UserError(problem, "give it what it needs, or leave it out") from error

    def take(self, event: str, values: Mapping[str, Any]) -> None:
        """Log an event of the run."""
        if event == "train":
            self._step = values["step"]
        self.failed |= event == "stop"
        step = values["step"] - 1 if event == "val" else self._step  # the count of mlx_lm
        found = scalars(event, values)
        for name, service in list(self._open.items()) if found else ():
            with self._dropped_if_it_fails(name):
                service.log(found, step)

    def close(self, metrics_file: str | None) -> None:
        """Send what is left to each service, with the page of the run, if its metrics have a
        file."""
        with TemporaryDirectory() as directory:
            page = None if metrics_file is None else self._page(metrics_file, Path(directory))
            for name, service in list(self._open.items()):
                with self._dropped_if_it_fails(name):
                    service.close(page, failed=self.failed)
        self._open.clear()

    def _page(self, metrics_file: str, directory: Path) -> Path | None:
        page = directory / "run.html"
        try:
            events = thinned(MetricsFile(metrics_file))
        except UserError as error:
            self._reporter.warn(f"services get no page of the run: {one_line(error)}")
            return None
        page.write_text(render_page(events, title=metrics_file), encoding="utf-8")
        return page

    @contextmanager
    def _dropped_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            del self._open[name]
            self._reporter.warn(f"--report-to {name} gets no more of this run: {_why(error)}")


def _why(error: Exception) -> str:
    return one_line(error) or type(error).__name__


def scalars(event: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an event by the names that services show; none of other events."""
    numbers = {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, (int, float)) and name not in _NOT_LOGGED
    }
    if event in ("val", "test"):
        return {f"{event}_{_OTHER_NAMES.get(name, name)}": value for name, value in numbers.items()}
    if event != "train":
        return {}
    found = {"train_loss": numbers.pop("loss"), **numbers}
    if seconds := values.get("step_seconds"):
        found["iterations_per_second"] = 1 / seconds
    if ranks := values.get("ranks"):
        found["peak_memory"] = max(each["peak_memory_bytes"] for each in ranks) / 1e9
    return found


def _as_text(value: Any) -> str | float | bool:
    """Return an option as a parameter of services that take no nested ones."""
    return value if isinstance(value, (str, int, float, bool)) else json.dumps(value)


def is_orderly(error: BaseException | None) -> bool:
    """Return whether a run that ends so leaves its services time: not if a rank is lost."""
    return error is None or isinstance(error, (UserError, AgreedFailure, Stopped))
