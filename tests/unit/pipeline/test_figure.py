"""Pictures of schedules: what is on them, read back from the SVG."""

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from shardmlx.errors import UserError
from shardmlx.pipeline.figure import draw_schedule
from shardmlx.pipeline.lowering import lower
from shardmlx.pipeline.schedules import compute_actions, get_schedule
from shardmlx.pipeline.simulate import Costs, Simulation, simulate

pytest.importorskip("matplotlib")

SVG = "{http://www.w3.org/2000/svg}"


def simulated(name: str, pp: int, microbatches: int, link: float = 0.0) -> Simulation:
    schedule = get_schedule(name)
    placement = schedule.placement(pp, schedule.default_virtual)
    grid = lower(compute_actions(name, pp, microbatches), placement)
    return simulate(grid, placement, Costs(1, 1, 1), link)


def drawn(simulation: Simulation, directory: Path, **options: Any) -> ElementTree.Element:
    path = directory / "schedule.svg"
    draw_schedule(simulation, path, **{"title": "a title", **options})
    return ElementTree.parse(path).getroot()


def boxes(svg: ElementTree.Element) -> dict[str, int]:
    """Return the number of boxes of each kind and stage on all ranks."""
    found: dict[str, int] = {}
    for group in svg.iter(f"{SVG}g"):
        name = group.get("id", "")
        if name.partition("-")[0] in {"F", "B", "I", "W"}:
            found[name] = found.get(name, 0) + len(group.findall(f"{SVG}path"))
    return found


def texts(svg: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()) for text in svg.iter(f"{SVG}text")]


def test_each_action_has_a_box_in_the_colour_of_its_kind_and_stage(tmp_path: Path) -> None:
    svg = drawn(simulated("zb-v", 2, 4), tmp_path)
    of_stages = {f"{kind}-{stage}": 4 for stage in range(4) for kind in "FIW"}
    del of_stages["I-0"]  # the first stage needs none
    assert boxes(svg) == of_stages
    fills = {
        group.get("id"): path.get("style", "").split("; stroke")[0]
        for group in svg.iter(f"{SVG}g")
        for path in group.findall(f"{SVG}path")
        if group.get("id", "") in of_stages
    }
    assert len({fills[f"{kind}-{stage}"] for kind in "FIW" for stage in (1, 2)}) == 6


def test_rows_are_named_boxes_numbered_and_waits_given(tmp_path: Path) -> None:
    simulation = simulated("1f1b", 2, 3, link=0.5)
    names = ["$x_1$ & <b>", "back\\slash$"]
    shown = texts(drawn(simulation, tmp_path, title="$100 & <i>", names=names))
    assert {"$100 & <i>", "$x_1$ & <b>  0", "back\\slash$  1", "time (s)"} <= set(shown)
    assert {"F forward", "I input gradient", "W weight gradient", "idle"} <= set(shown)
    assert shown.count("2") >= 2 + 1 + 2  # F, I and W of micro-batch 2
    assert [text for text in shown if "%" in text] == [
        f"bubble {bubble:.1%}, links {exposed / simulation.makespan:.1%}"
        for bubble, exposed in zip(simulation.bubbles, simulation.exposed, strict=True)
    ]


def test_boxes_too_narrow_for_a_number_have_none(tmp_path: Path) -> None:
    svg = drawn(simulated("gpipe", 4, 200), tmp_path)
    assert boxes(svg)["F-0"] == 200
    assert "199" not in texts(svg)


def test_a_schedule_without_time_is_drawn_empty(tmp_path: Path) -> None:
    assert boxes(drawn(simulate(((), ()), (), Costs(1, 1, 1)), tmp_path)) == {}


@pytest.mark.parametrize("suffix", [".svg", ".PNG"])
def test_the_same_schedule_gives_the_same_bytes(suffix: str, tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}{suffix}" for name in ("first", "second")]
    for path in paths:
        draw_schedule(simulated("zb-v", 2, 4), path, title="same")
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    assert b"matplotlib.org" not in first  # its version would change the bytes


@pytest.mark.parametrize("name", ["schedule.pdf", "schedule", "nowhere/schedule.svg"])
def test_a_file_that_cannot_be_drawn_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        draw_schedule(simulated("1f1b", 2, 2), tmp_path / name, title="none")
    assert str(tmp_path / name) in error.value.problem


def test_without_matplotlib_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardmlx.pipeline.figure.find_spec", lambda name: None)
    with pytest.raises(UserError) as error:
        draw_schedule(simulated("1f1b", 2, 2), tmp_path / "schedule.svg", title="none")
    assert error.value.remedy == "pip install matplotlib"
