"""The page of a run in a real browser: its numbers are those of the metrics file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from shardmlx.common.http_listener import bind
from shardmlx.main import main
from shardmlx.runreport.live import LivePage
from shardmlx.runreport.metrics_file import current
from tests.helpers.stories import preferences, story, write_metrics

EVIL = "<img src=x onerror=\"document.title = 'attacked'\"><script>alert(1)</script>"

RUN = current(story())
TRAIN = [event for event in RUN if event["event"] == "train"]
VAL = [event for event in RUN if event["event"] == "val"]


def show(chrome: webdriver.Chrome, directory: Path, *lines: dict[str, Any] | str) -> None:
    metrics = write_metrics(directory / "metrics.jsonl", *lines)
    assert main(["report", str(metrics)]) == 0
    chrome.get(metrics.with_suffix(".html").as_uri())


def faults(chrome: webdriver.Chrome) -> list[str]:
    """Return what the browser has complained of since the last call."""
    log: Any = chrome.get_log("browser")
    return [line["message"] for line in log]


@pytest.fixture(scope="module")
def page(
    chrome: webdriver.Chrome, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[webdriver.Chrome]:
    faults(chrome)
    show(chrome, tmp_path_factory.mktemp("page"), *story(), '{"event": "trai')
    chrome.execute_script("byId('numbers').open = true; numberTable();")
    yield chrome
    assert faults(chrome) == []


def text(page: webdriver.Chrome, selector: str) -> str:
    script = "return document.querySelector(arguments[0]).textContent"
    return str(page.execute_script(script, selector))


def rows(page: webdriver.Chrome, selector: str) -> list[list[str]]:
    script = (
        "return [...document.querySelectorAll(`${arguments[0]} tbody tr`)]"
        ".map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    found: list[list[str]] = page.execute_script(script, selector)
    return found


def drawn_on(page: webdriver.Chrome, chart: str) -> dict[str, list[list[float]]]:
    script = (
        "const found = charts.find((each) => each.spec.id === arguments[0]);"
        "const [xs, ...ys] = found.plot.data;"
        "return Object.fromEntries(ys.map((y, i) => [found.lines[i].label,"
        "  xs.map((x, j) => [x, y[j]]).filter(([, value]) => value !== null)]))"
    )
    found: dict[str, list[list[float]]] = page.execute_script(script, chart)
    return found


def test_the_curves_are_the_values_of_the_file(page: webdriver.Chrome) -> None:
    def drawn(chart: str) -> dict[str, list[list[float]]]:
        return drawn_on(page, chart)

    def told(field: str) -> list[list[float]]:
        return [[event["step"], event[field]] for event in TRAIN]

    validation = [[event["step"], event["loss"]] for event in VAL]
    assert drawn("curve-loss") == {"training": told("loss"), "validation": validation}
    assert drawn("curve-rate") == {"tokens/s": told("tokens_per_second")}
    assert drawn("curve-learning-rate") == {"learning rate": told("learning_rate")}
    assert drawn("curve-norm")["norm"] == told("grad_norm")
    assert drawn("curve-norm")["clipped to"] == [[event["step"], 1.0] for event in TRAIN]
    assert drawn("curve-step")["measured"] == told("step_seconds")
    for rank in (0, 1):
        parts = drawn(f"rank-{rank}")
        for i, event in enumerate(TRAIN):
            part = event["ranks"][rank]
            sums = [part["compute_seconds"]]
            sums.append(sums[0] + part["exposed_comm_seconds"])
            sums.append(sums[1] + part["idle_seconds"])
            names = ("compute", "exposed communication", "bubble")
            assert [parts[name][i][1] for name in names] == pytest.approx(sums)


def test_the_table_of_numbers_is_the_file(page: webdriver.Chrome) -> None:
    found = {row[0]: row for row in rows(page, "#numbers table:first-child")}
    for event in TRAIN:
        row = found[str(event["step"])]
        assert row[2] == f"{event['loss']:.4f}"
        assert row[4] == f"{event['grad_norm']:.4f}"
        assert row[5:7] == [f"{event['tokens']}", f"{event['tokens_per_second']:.1f}"]
    assert {step: row[1] for step, row in found.items() if row[1]} == {
        str(event["step"]): f"{event['loss']:.4f}" for event in VAL
    }
    assert len(rows(page, "#numbers table:last-child")) == 2 * len(TRAIN)


def test_each_rank_has_its_time_and_its_memory(page: webdriver.Chrome) -> None:
    limits = [event for event in RUN if event["event"] == "start"][-1]["memory_limits"]
    for rank, row in enumerate(rows(page, "#ranks")):
        seconds = sum(2 * event["ranks"][rank]["compute_seconds"] for event in TRAIN) / 60
        peak = TRAIN[-1]["ranks"][rank]["peak_memory_bytes"]
        assert row[:2] == [str(rank), "vm"]
        assert row[3] == f"{seconds:.4f} s"
        assert row[7] == f"{peak / 2**20:.1f} MiB"
        assert row[8] == f"{limits[rank]['planned_peak_bytes'] / 2**20:.1f} MiB"
        assert row[9] == f"{limits[rank]['memory_limit_bytes'] / 2**30:.2f} GiB"


def test_restart_straggler_and_checkpoints_are_marked(page: webdriver.Chrome) -> None:
    marks = page.execute_script("return marks().map(({ kind, x }) => [kind, x])")
    assert marks == [
        *(["checkpoint", step] for step in range(10, 61, 10)),
        ["restart", 20],
        ["straggler", 36],
    ]
    log = [" ".join(row) for row in rows(page, "#log")]
    assert [line for line in log if "4 steps made again" in line]
    assert [line for line in log if "rank 1 on vm computes" in line]


def test_layout_schedule_and_options_are_there(page: webdriver.Chrome) -> None:
    assert text(page, ".strip li:last-child").startswith("stage 1 layers 3–4 + lm_head")
    start = [event for event in RUN if event["event"] == "start"][-1]
    timed = [span for spans in start["schedule"]["spans"] for span in spans if span[2] > span[1]]
    assert page.execute_script("return document.querySelectorAll('.action').length") == len(timed)
    assert "0F0 0F1" in text(page, ".actions")
    assert "2 ranks: 1 data parallel × 2 pipeline parallel" in text(page, "#summary")
    assert page.execute_script("return performance.getEntriesByType('resource').length") == 0
    said = dict(
        page.execute_script(
            "return [...document.querySelectorAll('.options div')]"
            ".map((each) => [...each.children].map((part) => part.textContent))"
        )
    )
    assert said.keys() == start["options"].keys()
    assert said["learning_rate"] == "0.01"
    assert json.loads(said["lr_schedule"]) == start["options"]["lr_schedule"]


def test_a_picture_has_its_words(page: webdriver.Chrome) -> None:
    script = "return [...document.querySelectorAll('[role=img]')].map((e) => e.ariaLabel)"
    labels = page.execute_script(script)
    assert labels[0].startswith(
        f"Loss. training: {TRAIN[0]['loss']:.4f} at step 2, {TRAIN[-1]['loss']:.4f} at step 60; "
    )
    assert None not in labels
    tables = (
        "return [...document.querySelectorAll('main table:not(.u-legend)')].every((e) => e.caption)"
    )
    assert page.execute_script(tables)


def test_a_drag_looks_closer_at_all_curves_and_a_double_click_back(page: webdriver.Chrome) -> None:
    def ranges() -> list[list[float]]:
        script = "return charts.map(({ plot }) => [plot.scales.x.min, plot.scales.x.max])"
        found: list[list[float]] = page.execute_script(script)
        return found

    over = page.find_element(By.CSS_SELECTOR, "#curve-loss .u-over")
    page.execute_script("arguments[0].scrollIntoView()", over)
    quarter = over.size["width"] // 4
    mouse = ActionChains(page, duration=50)
    mouse.move_to_element_with_offset(over, -quarter, 0).click_and_hold()
    mouse.move_by_offset(quarter, 0).release().perform()
    page.execute_script(
        "document.querySelector('#curve-norm .u-over')"
        ".dispatchEvent(new MouseEvent('dblclick', { bubbles: true }))"
    )
    assert ranges() == [[1, 60]] * len(ranges())


def test_markup_and_nonsense_in_a_file_stay_text(chrome: webdriver.Chrome, tmp_path: Path) -> None:
    faults(chrome)
    ranks = [{"rank": 0, "host": EVIL, "pipeline_rank": 0}]
    stages = [{"stage": EVIL, "pipeline_rank": 0, "num_layers": "many"}, None, 7]
    show(
        chrome,
        tmp_path,
        {
            "event": "start",
            "options": {"model": EVIL, EVIL: EVIL},
            "changed": [EVIL],
            "layout": {"ranks": ranks, "stages": stages},
            "schedule": {"name": EVIL, "spans": [[[EVIL, 0, 1], ["0F0", "x", None]], 3]},
            "predicted": EVIL,
            "memory_limits": {"0": EVIL},
        },
        {"event": "train", "step": EVIL, "loss": EVIL, "ranks": EVIL},
        {"event": "train", "step": 1, "loss": 2.5, "ranks": [None, {"rank": EVIL}, {"rank": 0}]},
        {"event": "straggler", "step": 1, "rank": EVIL, "host": EVIL},
        {"event": "resume", "step": None, "checkpoint": EVIL},
        {"event": "summary", "predicted": []},
    )
    assert text(chrome, "#model") == EVIL
    assert "2.5000" in text(chrome, "#tiles")
    assert chrome.execute_script("return document.querySelectorAll('img, body script').length") == 2
    assert chrome.title != "attacked"
    assert faults(chrome) == []


def test_a_live_page_follows_the_run(chrome: webdriver.Chrome) -> None:
    faults(chrome)
    page = LivePage(bind("127.0.0.1", 0))
    waiting = WebDriverWait(chrome, 20.0, poll_frequency=0.02)

    def tell(*events: dict[str, Any]) -> None:
        for each in events:
            page.take(each["event"], {key: each[key] for key in each if key != "event"})

    def shown(words: str, selector: str) -> None:
        waiting.until(lambda _: words in text(chrome, selector), words)

    chrome.get(page.address)
    shown("loading", "#status")
    at = RUN.index(TRAIN[4])
    tell(*RUN[: at + 1])
    shown(f"{TRAIN[4]['loss']:.4f}", "#tiles")
    assert text(chrome, "#status") == "running"
    # A look closer stays while more comes.
    chrome.execute_script("zoomTo([2, 6])")
    tell(*RUN[at + 1 : -1])
    shown("60 / 60", "#tiles")
    points = "return charts.find((each) => each.spec.id === 'curve-norm').plot.data[0].length"
    assert chrome.execute_script(points) == len(TRAIN)
    assert chrome.execute_script("return document.querySelectorAll('figure').length") == 7
    scale = "return [charts[0].plot.scales.x.min, charts[0].plot.scales.x.max]"
    assert chrome.execute_script(scale) == [2, 6]
    assert len(rows(chrome, "#log")) == 10
    page.close()
    shown("ended at step 60", "#status")
    # The run is started again, as after a failure, and the open page goes on with it.
    port = int(page.address.rpartition(":")[2])
    page = LivePage(bind("127.0.0.1", port))
    tell(*RUN[: at + 1])
    shown("10 / 60", "#tiles")
    tell(*RUN[at + 1 :])
    page.close()
    shown("finished in", "#status")
    # What is left is that nobody answered in between.
    assert all("ERR_CONNECTION_REFUSED" in fault for fault in faults(chrome))


def test_what_preferences_say_has_curves_and_columns(
    chrome: webdriver.Chrome, tmp_path: Path
) -> None:
    faults(chrome)
    show(chrome, tmp_path, *preferences())
    chrome.execute_script("byId('numbers').open = true; numberTable();")
    run = current(preferences())

    def told(kind: str, field: str) -> list[list[float]]:
        return [[event["step"], event[field]] for event in run if event["event"] == kind]

    for what in ("reward", "logp"):
        assert drawn_on(chrome, f"curve-chosen-{what}") == {
            f"{side}, {name}": told(kind, f"{side}_{what}")
            for side in ("chosen", "rejected")
            for kind, name in (("train", "training"), ("val", "validation"))
        }
    for field in ("margin", "accuracy"):
        training, validation = told("train", field), told("val", field)
        expected = {"training": training, "validation": validation}
        assert drawn_on(chrome, f"curve-{field}") == expected
    script = "return [...document.querySelectorAll('#numbers table:first-child th')]"
    heads = chrome.execute_script(f"{script}.map((each) => each.textContent)")
    (row,) = (row for row in rows(chrome, "#numbers table:first-child") if row[0] == "60")
    found = dict(zip(heads, row, strict=True))
    for kind, name in (("train", "margin"), ("val", "validation margin")):
        assert found[name] == f"{told(kind, 'margin')[-1][1]:.4f}"
    assert faults(chrome) == []


def test_a_file_of_an_older_shardmlx_has_its_curves(
    chrome: webdriver.Chrome, tmp_path: Path
) -> None:
    faults(chrome)
    old = [event for event in story() if event["event"] != "start"]
    show(chrome, tmp_path, *({k: v for k, v in e.items() if k != "time"} for e in old))
    assert "it was written by an older shardmlx" in text(chrome, "#summary")
    assert "finished" in text(chrome, "#status")
    assert rows(chrome, "#ranks")[1][1] == "–"
    assert faults(chrome) == []


@pytest.mark.parametrize(
    ("signal", "status"),
    [("SIGTERM", "stopped by SIGTERM at step 40"), (None, "failed at step 40")],
)
def test_a_stop_is_told_with_its_reason(
    chrome: webdriver.Chrome, tmp_path: Path, signal: str | None, status: str
) -> None:
    before = [event for event in RUN if event["event"] in ("start", "train", "val")]
    stop = {"event": "stop", "step": 40, "signal": signal, "reason": f"why {EVIL}"}
    show(chrome, tmp_path, *(each for each in before if each["step"] <= 40), stop)
    assert text(chrome, "#status") == status
    assert rows(chrome, "#log")[-1][2:] == ["stop", f"why {EVIL}"]
    assert faults(chrome) == []


def test_the_page_of_a_long_run_says_what_it_shows(
    chrome: webdriver.Chrome, tmp_path: Path
) -> None:
    """Its means are of all reports: those that are not shown are slower."""
    (start,) = [event for event in RUN if event["event"] == "start"][:1]
    ranks = [{"rank": 0, "compute_seconds": 0.0, "exposed_comm_seconds": 0, "idle_seconds": 0}]
    many = [
        {
            "event": "train",
            "step": step,
            "loss": float(step % 7),
            "step_seconds": 1.0,
            "ranks": [{**each, "compute_seconds": float(step > 4500)} for each in ranks],
        }
        for step in range(1, 9001)
    ]
    show(chrome, tmp_path, start, *many)
    assert "of 9,000 reports are shown" in text(chrome, "#left-out")
    assert len(drawn_on(chrome, "curve-loss")["training"]) <= 2000
    chrome.execute_script("byId('numbers').open = true; numberTable();")
    assert "of 9,000 reports as a table" in text(chrome, "#numbers summary")
    assert rows(chrome, "#ranks")[0][3] == "0.5000 s"
    assert text(chrome, "#status").startswith("no summary: still running")
    assert faults(chrome) == []
