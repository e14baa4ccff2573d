"""Cores and caches of Macs as hwloc reads them of a file, so that Open MPI takes this machine for
one: neither it nor a Mac can bind a process to a core then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from shardmlx.common.units import GIB, MIB


class Cluster(NamedTuple):
    """Cores that share an L2 cache."""

    kind: str
    cores: int
    mebibytes: int


CHIPS: Mapping[str, Sequence[Cluster]] = {
    "M1": (Cluster("E", 4, 4), Cluster("P", 4, 12)),
    "M1 Pro": (Cluster("E", 2, 4), Cluster("P", 4, 12), Cluster("P", 4, 12)),
    "M4": (Cluster("E", 6, 4), Cluster("P", 4, 16)),
    "M4 Pro": (Cluster("E", 4, 4), Cluster("P", 5, 16), Cluster("P", 5, 16)),
    "M5 Pro, of three kinds": (Cluster("E", 4, 4), Cluster("M", 5, 8), Cluster("P", 6, 16)),
}
"""Clusters of chips, as github.com/open-mpi/hwloc/issues/454 and openpmix/prrte/issues/2515 show
them; those of the last are a guess."""


def cores_of(chip: str) -> int:
    return sum(cluster.cores for cluster in CHIPS[chip])


def write_topology(path: Path, chip: str) -> Path:
    """Write hwloc's description of a chip, for ``HWLOC_XMLFILE``; return the path."""
    numbers, cores = count(1), cores_of(chip)

    def add(
        parent: ElementTree.Element, kind: str, first: int, size: int = 1, **more: object
    ) -> ElementTree.Element:
        sets = {"cpuset": _mask(first, size), "nodeset": _mask(0, 1)}
        sets |= {f"complete_{name}": mask for name, mask in sets.items()}
        known = {"type": kind, "gp_index": next(numbers), **sets, **more}
        given = {name: str(value) for name, value in known.items()}
        return ElementTree.SubElement(parent, "object", given)

    def add_cache(
        parent: ElementTree.Element, kind: str, first: int, size: int, **more: object
    ) -> ElementTree.Element:
        line = {"cache_linesize": 128, "cache_associativity": 0}
        return add(parent, kind, first, size, **line, **more)

    top = ElementTree.Element("topology", version="2.0")
    allowed = {"allowed_cpuset": _mask(0, cores), "allowed_nodeset": _mask(0, 1)}
    machine = add(top, "Machine", 0, cores, os_index=0, **allowed)
    package = add(machine, "Package", 0, cores, os_index=0)
    add(package, "NUMANode", 0, cores, os_index=0, local_memory=16 * GIB)
    first = 0
    masks: dict[str, int] = {}
    for kind, size, mebibytes in CHIPS[chip]:
        l2 = {"cache_size": mebibytes * MIB, "depth": 2, "cache_type": 0}
        shared = add_cache(package, "L2Cache", first, size, **l2)
        for number in range(first, first + size):
            own = {"cache_size": MIB // 8, "depth": 1}
            data = add_cache(shared, "L1Cache", number, 1, **own, cache_type=1)
            code = add_cache(data, "L1iCache", number, 1, **own, cache_type=2)
            core = add(code, "Core", number, os_index=number)
            add(core, "PU", number, os_index=number)
        masks[kind] = masks.get(kind, 0) | int(_mask(first, size), 16)
        first += size
    for kind, mask in masks.items():
        of_kind = ElementTree.SubElement(top, "cpukind", cpuset=f"{mask:#010x}")
        ElementTree.SubElement(of_kind, "info", name="DarwinCompatible", value=kind)
    path.write_text(
        '<?xml version="1.0" encoding="UTF-8"?>\n<!DOCTYPE topology SYSTEM "hwloc2.dtd">\n'
        + ElementTree.tostring(top, encoding="unicode")
    )
    return path


def _mask(first: int, size: int) -> str:
    return f"{((1 << size) - 1) << first:#010x}"
