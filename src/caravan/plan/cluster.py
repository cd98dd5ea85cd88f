"""Clusters from files: what `caravan devices --json` has printed, or a description by hand.

A description may be of devices that nobody here has. Knows JSON and profiles; asks no worker.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from caravan.errors import UsageError
from caravan.plan.profile import ClusterProfile, DeviceProfile, LinkProfile

_HEAD = "head"
_MANY = 256
_GIB = 1 << 30
# of any unit: what is beyond leads to numbers that are none
_LEAST, _MOST = 1e-9, 1e18
# One way, and bytes a second as they arrive, headers taken off; of the far site, as they often are.
PRESETS: Mapping[str, LinkProfile] = {
    "1GbE": LinkProfile(100e-6, 0.117e9),
    "2.5GbE": LinkProfile(100e-6, 0.293e9),
    "10GbE": LinkProfile(50e-6, 1.17e9),
    "25GbE": LinkProfile(30e-6, 2.93e9),
    "wifi": LinkProfile(2e-3, 0.0375e9),
    "far": LinkProfile(10e-3, 0.0125e9),
}
# between devices of one host, behind one worker
_WITHIN = LinkProfile(50e-6, 5e9, "within")
# what a worker takes for each graph, and for a step that it waits for
_GRAPH, _TURN = 30e-6, 100e-6
_CHECK, _CHECK_NODE = 1.3e-3, 1.2e-6


def read_cluster(path: Path) -> ClusterProfile:
    """The devices and links of a file.

    Raises UsageError: it cannot be read, or is not what it should be; the text says where.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise UsageError(f"cluster {path}: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:
        raise UsageError(f"cluster {path} is not JSON: {exc}") from exc
    return parse_cluster(data, f"cluster {path}")


def parse_cluster(data: Any, where: str = "cluster") -> ClusterProfile:
    """As `read_cluster`, of what was read already; `where` begins the text of errors."""
    top = _Object(data, where)
    if "copies" in top.data:
        return _measured(top)
    return _described(top)


@dataclass(frozen=True, slots=True)
class _Object:
    """A JSON object, and where it stands; all methods raise UsageError."""

    data: Any
    where: str

    def __post_init__(self) -> None:
        if not isinstance(self.data, dict):
            raise UsageError(f"{self.where}: expected an object, with names in braces")

    def known(self, *names: str) -> None:
        """That there are no others."""
        for name in self.data:
            if name not in names:
                there_are = ", ".join(names)
                raise UsageError(f"{self.where} has no {name!r}; it may have: {there_are}")

    def objects(self, name: str, needed: bool = False) -> list[_Object]:
        value = self.data.get(name)
        if value is None and not needed:
            return []
        if not isinstance(value, list):
            raise UsageError(f"{self.where}: {name!r} is not a list")
        return [_Object(one, f"{self.where}, {name}[{i}]") for i, one in enumerate(value)]

    def text(self, name: str, default: str = "") -> str:
        value = self.data.get(name)
        if value is None:
            return default
        if not isinstance(value, str) or not value or not value.isprintable():
            raise UsageError(f"{self.where}: {name!r} is not a name")
        return value

    def number(self, name: str, default: float | None = None, least: float = 0.0) -> float:
        """Not below `least`, and above 0 where there is no default; and such as there may be."""
        value = self.data.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            raise UsageError(f"{self.where}: {name!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not _finite(value):
            raise UsageError(f"{self.where}: {name!r} is not a number")
        if not least <= value <= _MOST or (default is None and value < _LEAST):
            raise UsageError(f"{self.where}: {name!r} cannot be {value:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.data.get(name, default)
        if not isinstance(value, bool):
            raise UsageError(f"{self.where}: {name!r} is neither true nor false")
        return value


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


# what `caravan devices --json` prints


def _measured(top: _Object) -> ClusterProfile:
    """Devices of workers that were measured; those of the head's own engine are none of a split
    that anybody can predict."""
    devices, to_head = [], []
    for entry in top.objects("devices", needed=True):
        if entry.data.get("gflops") is None or entry.data.get("gbps") is None:
            continue
        name = entry.text("name")
        devices.append(
            DeviceProfile(
                name,
                entry.number("gflops"),
                entry.number("gbps"),
                entry.number("graph_ns", 0.0) / 1e9,
                entry.number("turn_ns", 0.0) / 1e9,
                int(entry.number("memory_free", 0.0)),
                int(entry.number("memory_total", 0.0)),
                entry.text("host"),
                check=entry.number("check_node_ns", 0.0) / 1e9,
                check_graph=entry.number("check_ns", 0.0) / 1e9,
            )
        )
        seconds = entry.number("round_trip_ns", 0.0) / 2e9
        to_head.append(LinkProfile(seconds, _rate(entry)))
    if not devices:
        raise UsageError(f"{top.where} has no device that was measured (see devices --measure)")
    numbers = _numbered(devices, top.where)
    between = {}
    for entry in top.objects("copies", needed=True):
        ends = entry.text("source"), entry.text("target")
        way = entry.text("way")
        if way == "relay" or not all(end in numbers for end in ends):
            continue
        link = LinkProfile(entry.number("latency_ns", 0.0) / 1e9, _rate(entry), way)
        between[numbers[ends[0]], numbers[ends[1]]] = link
    return ClusterProfile(tuple(devices), tuple(to_head), between)


def _rate(entry: _Object) -> float:
    return entry.number("bytes_per_second", math.inf, 1.0)


# what somebody has written


def _described(top: _Object) -> ClusterProfile:
    top.known("devices", "link", "links", "head", "direct")
    profiles: list[DeviceProfile] = []
    sites: list[str] = []
    for entry in top.objects("devices", needed=True):
        some, site = _devices(entry)
        profiles += some
        sites += [site] * len(some)
        if len(profiles) > _MANY:
            raise UsageError(f"{top.where} has more than {_MANY} devices")
    if not profiles:
        raise UsageError(f"{top.where} has no devices")
    numbers = _numbered(profiles, top.where)
    default = _link(top, PRESETS["1GbE"])
    places = _Places(numbers, sites, top.text("head"), default)
    for entry in top.objects("links"):
        places.add(entry)
    everyone = range(len(profiles))
    to_head = tuple(places.to_head(number) for number in everyone)
    between = {}
    direct = top.flag("direct", True)
    for one in everyone:
        for other in everyone:
            host = profiles[one].host
            if one != other and host and host == profiles[other].host:
                between[one, other] = _WITHIN
            elif one != other and direct:
                between[one, other] = places.between(one, other)
    return ClusterProfile(tuple(profiles), to_head, between)


def _devices(entry: _Object) -> tuple[list[DeviceProfile], str]:
    """So many as `count` says, and where they are."""
    entry.known(
        "name", "gflops", "gbps", "memory_gib", "count", "site", "endpoint", "host", "graph_us",
        "turn_us", "check_us", "check_node_us",
    )  # fmt: skip
    name = entry.text("name", "device")
    count = entry.number("count", 1.0, 1.0)
    if count != int(count) or count > _MANY:
        raise UsageError(f"{entry.where}: 'count' is not a number of devices up to {_MANY}")
    size = int(entry.number("memory_gib") * _GIB)
    profile = DeviceProfile(
        name,
        entry.number("gflops"),
        entry.number("gbps"),
        entry.number("graph_us", _GRAPH * 1e6) / 1e6,
        entry.number("turn_us", _TURN * 1e6) / 1e6,
        size,
        size,
        entry.text("host"),
        check=entry.number("check_node_us", _CHECK_NODE * 1e6) / 1e6,
        check_graph=entry.number("check_us", _CHECK * 1e6) / 1e6,
    )
    site = entry.text("site", entry.text("endpoint"))
    if "count" not in entry.data:
        return [profile], site
    return [replace(profile, name=f"{name}{i}") for i in range(int(count))], site


def _numbered(devices: Sequence[DeviceProfile], where: str) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for number, device in enumerate(devices):
        if not device.name or device.name == _HEAD or device.name in numbers:
            why = "is named twice" if device.name in numbers else "is no name for a device"
            raise UsageError(f"{where}: {device.name!r} {why}")
        numbers[device.name] = number
    return numbers


class _Places:
    """Where devices and the head are, and how one gets from place to place.

    A link between two devices counts more than one between sites, and that more than the default.
    """

    def __init__(
        self, numbers: Mapping[str, int], sites: Sequence[str], head: str, default: LinkProfile
    ) -> None:
        self._names = {number: name for name, number in numbers.items()}
        self._sites = sites
        self._head = head
        self._default = default
        self._known = {*numbers, *filter(None, sites), _HEAD, *filter(None, (head,))}
        self._links: dict[frozenset[str], LinkProfile] = {}

    def add(self, entry: _Object) -> None:
        """A link that somebody names; raises UsageError."""
        entry.known("between", "link")
        ends = entry.data.get("between")
        texts = isinstance(ends, list) and all(isinstance(end, str) for end in ends)
        if not isinstance(ends, list) or not texts or len(ends) != 2:
            raise UsageError(f"{entry.where}: 'between' is not a list of two names")
        for end in ends:
            if end not in self._known:
                there_are = ", ".join(sorted(self._known))
                raise UsageError(f"{entry.where}: there is no {end!r}; there are: {there_are}")
        if "link" not in entry.data:
            raise UsageError(f"{entry.where}: 'link' is missing")
        self._links[frozenset(ends)] = _link(entry, self._default)

    def to_head(self, number: int) -> LinkProfile:
        return self._find(self._of(number), [_HEAD, self._head])

    def between(self, one: int, other: int) -> LinkProfile:
        return self._find(self._of(one), self._of(other))

    def _of(self, number: int) -> list[str]:
        return [self._names[number], self._sites[number]]

    def _find(self, one: Sequence[str], other: Sequence[str]) -> LinkProfile:
        for a, b in ((0, 0), (0, 1), (1, 0), (1, 1)):
            found = self._links.get(frozenset((one[a], other[b])))
            if one[a] and other[b] and found is not None:
                return found
        return self._default


def _link(entry: _Object, default: LinkProfile) -> LinkProfile:
    """The one under `link`: a preset's name, or milliseconds one way and Gbit/s."""
    value = entry.data.get("link")
    if value is None:
        return default
    if isinstance(value, str):
        if value not in PRESETS:
            there_are = ", ".join(PRESETS)
            raise UsageError(f"{entry.where}: no link {value!r}; there are: {there_are}")
        return PRESETS[value]
    link = _Object(value, f"{entry.where}, link")
    link.known("ms", "gbit")
    return LinkProfile(link.number("ms", 0.0) / 1e3, link.number("gbit") * 1e9 / 8)
