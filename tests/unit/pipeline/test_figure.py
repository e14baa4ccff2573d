"""Pictures of schedules: what is on them, read back from the SVG."""

import struct
from collections.abc import Sequence
from pathlib import Path
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


def drawn(
    simulation: Simulation,
    directory: Path,
    *,
    title: str = "a title",
    unit: str = "s",
    names: Sequence[str] | None = None,
) -> ElementTree.Element:
    path = directory / "schedule.svg"
    draw_schedule(simulation, path, title=title, unit=unit, names=names)
    return ElementTree.parse(path).getroot()


def boxes(svg: ElementTree.Element) -> dict[str, int]:
    """Boxes of each kind and stage of a rank."""
    groups = {group.get("id", ""): group for group in svg.iter(f"{SVG}g")}
    return {
        name: len(group.findall(f"{SVG}path"))
        for name, group in groups.items()
        if name.partition("-")[0] in {"F", "B", "I", "W"}
    }


def texts(svg: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()) for text in svg.iter(f"{SVG}text")]


def test_each_action_has_a_box_in_the_group_of_its_kind(tmp_path: Path) -> None:
    assert boxes(drawn(simulated("1f1b", 4, 8), tmp_path)) == {
        "F-1-of-1": 4 * 8,
        "I-1-of-1": 3 * 8,  # the first stage needs none
        "W-1-of-1": 4 * 8,
    }


def test_the_stages_of_a_rank_are_told_apart(tmp_path: Path) -> None:
    svg = drawn(simulated("zb-v", 2, 4), tmp_path)
    assert boxes(svg) == {
        "F-1-of-2": 8,
        "I-1-of-2": 4,
        "W-1-of-2": 8,
        "F-2-of-2": 8,
        "I-2-of-2": 8,
        "W-2-of-2": 8,
    }
    fills = {
        group.get("id"): path.get("style", "").split(";")[0]
        for group in svg.iter(f"{SVG}g")
        for path in group.findall(f"{SVG}path")
        if group.get("id", "").endswith("-of-2")
    }
    assert len(set(fills.values())) == 6
    assert {"stage 1 of a rank", "stage 2 of a rank"} <= set(texts(svg))


def test_what_takes_no_time_has_no_box(tmp_path: Path) -> None:
    grid = compute_actions("1f1b", 1, 3)
    simulation = simulate(lower(grid, (0,)), (0,), Costs(1, 0, 0))
    assert boxes(drawn(simulation, tmp_path)) == {"F-1-of-1": 3}


def test_rows_are_named_boxes_numbered_and_bubbles_given(tmp_path: Path) -> None:
    simulation = simulated("1f1b", 2, 3)
    shown = texts(drawn(simulation, tmp_path, title="Two Macs", names=["mini.local", "studio"]))
    assert {"Two Macs", "mini.local  0", "studio  1", "time (s)", "bubble"} <= set(shown)
    assert {"F forward", "I input gradient", "W weight gradient", "idle"} <= set(shown)
    assert [f"{part:.1%}" for part in simulation.bubbles] == [x for x in shown if "%" in x]
    assert shown.count("2") >= 2 + 1 + 2  # F, I and W of micro-batch 2
    assert "links" not in shown
    assert not any("stage" in text for text in shown)


def test_without_names_rows_are_ranks_and_without_unit_time_has_none(tmp_path: Path) -> None:
    shown = texts(drawn(simulated("gpipe", 2, 2), tmp_path, unit=""))
    assert {"rank 0", "rank 1", "time"} <= set(shown)


def test_waiting_for_links_has_a_column_of_its_own(tmp_path: Path) -> None:
    simulation = simulated("1f1b", 2, 3, link=0.5)
    shown = texts(drawn(simulation, tmp_path))
    assert "links" in shown
    exposed = [f"{time / simulation.makespan:.1%}" for time in simulation.exposed]
    bubbles = [f"{part:.1%}" for part in simulation.bubbles]
    assert [x for x in shown if "%" in x] == bubbles + exposed


def test_boxes_too_narrow_for_a_number_have_none(tmp_path: Path) -> None:
    svg = drawn(simulated("gpipe", 4, 200), tmp_path)
    assert boxes(svg)["F-1-of-1"] == 4 * 200
    assert "199" not in texts(svg)


def test_names_are_no_formulas_and_no_markup(tmp_path: Path) -> None:
    names = ["$x_1$ & <b>", "back\\slash$"]
    shown = texts(drawn(simulated("1f1b", 2, 2), tmp_path, title="$100 & <i>", names=names))
    assert {"$100 & <i>", "$x_1$ & <b>  0", "back\\slash$  1"} <= set(shown)


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_the_same_schedule_gives_the_same_bytes(suffix: str, tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}{suffix}" for name in ("first", "second")]
    for path in paths:
        draw_schedule(simulated("zb-v", 2, 4), path, title="same")
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    assert b"matplotlib.org" not in first  # its version would change the bytes


def test_png_grows_with_the_ranks(tmp_path: Path) -> None:
    sizes = []
    for pp in (2, 64):
        path = tmp_path / f"{pp}.PNG"
        draw_schedule(simulated("1f1b", pp, 8), path, title="ranks")
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        sizes.append(struct.unpack(">II", content[16:24]))
    (width, height), (wide, high) = sizes
    assert 1500 < width < wide < 4000
    assert 300 < height < 600 < high < 2500


def test_a_schedule_without_time_is_drawn_empty(tmp_path: Path) -> None:
    simulation = simulate(((), ()), (), Costs(1, 1, 1))
    assert boxes(drawn(simulation, tmp_path)) == {}


def test_settings_of_matplotlib_stay_as_they_are(tmp_path: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    draw_schedule(simulated("1f1b", 2, 2), tmp_path / "schedule.png", title="polite")
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("name", ["schedule.pdf", "schedule", "svg"])
def test_another_suffix_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with pytest.raises(UserError) as error:
        draw_schedule(simulated("1f1b", 2, 2), path, title="none")
    assert str(error.value) == f"picture {path}: the suffix is none of .svg, .png: use one"


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "schedule.svg"
    with pytest.raises(UserError) as error:
        draw_schedule(simulated("1f1b", 2, 2), path, title="none")
    assert str(error.value) == f"cannot write {path}: No such file or directory"


def test_without_matplotlib_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "schedule.svg"
    monkeypatch.setattr("shardmlx.pipeline.figure.find_spec", lambda name: None)
    with pytest.raises(UserError) as error:
        draw_schedule(simulated("1f1b", 2, 2), path, title="none")
    assert str(error.value) == f"picture {path} needs matplotlib: pip install matplotlib"


def test_names_are_of_all_ranks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1 names for 2 ranks"):
        drawn(simulated("1f1b", 2, 2), tmp_path, names=["alone"])
