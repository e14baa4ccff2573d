"""Prints what services of ``--report-to`` kept in a directory: by service {name: {step: number}},
options, and the files beside them. Wandb and SwanLab keep LevelDB's log format:
https://github.com/google/leveldb/blob/main/doc/log_format.md."""

import json
import sqlite3
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER = 7
BLOCK = 32768
LAST = (1, 4)

Found = dict[str, Any]


def records(file: Path) -> Iterator[bytes]:
    """Yield the records of a file of LevelDB's format, after the 7 bytes that begin it."""
    data = file.read_bytes()
    at = HEADER
    record = b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + HEADER])
        record += data[at + HEADER : at + HEADER + size]
        at += HEADER + size
        if kind in LAST:
            yield record
            record = b""


def tensorboard(directory: Path) -> Found:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    kept = EventAccumulator(str(directory / "tensorboard"))
    kept.Reload()
    content = kept.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    started = HParamsPluginData.FromString(content).session_start_info
    return {
        "numbers": {
            name: {each.step: each.value for each in kept.Scalars(name)}
            for name in kept.Tags()["scalars"]
        },
        "iters": started.hparams["iters"].number_value,
    }


def mlflow(directory: Path) -> Found:
    (place,) = [file.parent for file in directory.glob("mlruns/*/*/meta.yaml")]
    numbers = {}
    for file in (place / "metrics").iterdir():
        lines = [line.split() for line in file.read_text().splitlines()]
        numbers[file.name] = {int(step): float(value) for _, value, step in lines}
    return {
        "numbers": numbers,
        "iters": float((place / "params/iters").read_text()),
        "name": (place / "tags/mlflow.runName").read_text(),
        "finished": "status: 3" in (place / "meta.yaml").read_text(),
        "page": (place / "artifacts/run.html").read_text().startswith("<!doctype html>"),
    }


def wandb(directory: Path) -> Found:
    from wandb.proto.wandb_internal_pb2 import Record

    numbers: dict[str, dict[int, float]] = defaultdict(dict)
    found: Found = {"numbers": numbers}
    (file,) = directory.glob("wandb/offline-run-*/run-*.wandb")
    for data in records(file):
        record = Record.FromString(data)
        if record.HasField("history"):
            step = record.history.step.num
            for item in record.history.item:
                name = item.key or ".".join(item.nested_key)
                if not name.startswith("_"):
                    numbers[name][step] = json.loads(item.value_json)
        if record.HasField("run"):
            options = {each.key: each.value_json for each in record.run.config.update}
            found["iters"] = json.loads(options["iters"])
            found["project"] = record.run.project
        if record.HasField("artifact"):
            found["page"] = [each.path for each in record.artifact.manifest.contents]
    return found


def swanlab(directory: Path) -> Found:
    import yaml
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    (file,) = directory.glob("swanlog/run-*/run-*.swanlab")
    numbers: dict[str, dict[int, float]] = defaultdict(dict)
    for data in records(file):
        record = Record.FromString(data)
        if record.HasField("scalar"):
            numbers[record.scalar.key][record.scalar.step] = record.scalar.value.number
    options = yaml.safe_load((file.parent / "files/config.yaml").read_text())
    return {"numbers": numbers, "iters": options["iters"]["value"]}


def trackio(directory: Path) -> Found:
    (file,) = directory.glob("trackio/*.db")
    numbers: dict[str, dict[int, float]] = defaultdict(dict)
    with sqlite3.connect(file) as database:
        for step, values in database.execute("select step, metrics from metrics"):
            for name, value in json.loads(values).items():
                numbers[name][step] = value
        ((options,),) = database.execute("select config from configs")
    return {"numbers": numbers, "iters": json.loads(options)["iters"], "project": file.stem}


if __name__ == "__main__":
    place = Path(sys.argv[1])
    print(
        json.dumps(
            {each.__name__: each(place) for each in (tensorboard, mlflow, wandb, swanlab, trackio)}
        )
    )
