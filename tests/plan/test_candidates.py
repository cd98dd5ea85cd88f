"""Sets of devices and orders that are worth a look."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from caravan.plan.candidates import orders
from caravan.plan.profile import LinkProfile
from planned import setting

FAR = LinkProfile(0.03, 1e6)


def found(where, room=None):
    rooms = room or [1] * len(where.times)
    return list(orders(where, rooms))


@pytest.mark.parametrize(("n", "all_orders"), [(1, 1), (2, 4), (3, 15), (4, 64)])
def test_all_orders_of_all_subsets_of_a_few_devices(n, all_orders):
    some = found(setting([1.0, 2.0, 3.0, 4.0][:n]))
    assert len(some) == len(set(some)) == all_orders


def test_equal_devices_are_not_told_apart():
    assert found(setting([1.0] * 3)) == [(0,), (0, 1), (0, 1, 2)]
    assert len(found(setting([1.0, 1.0, 2.0]))) == 2 + 3 + 3


def test_equal_devices_with_unequal_links_are():
    links = {(0, 1): FAR, (1, 0): FAR}
    assert len(found(setting([1.0] * 3, links=links))) > 3


def test_equal_devices_with_unequal_rooms_are():
    assert len(found(setting([1.0, 1.0]), [1, 2])) == 4


def test_a_device_without_room_is_not_used():
    assert set(itertools.chain(*found(setting([1.0] * 3), [1, 0, -3]))) == {0}
    assert found(setting([1.0]), [0]) == []


@pytest.mark.parametrize("n", [5, 8, 16, 64])
def test_many_devices_have_some_dozens_of_orders(n):
    speeds = [1.0 + i % 7 / 4 for i in range(n)]
    some = found(setting(speeds, 4))
    assert len(some) == len(set(some)) <= 60
    assert all(len(set(devices)) == len(devices) for devices in some)
    assert any(len(devices) == n for devices in some)
    fastest = max(speeds)
    assert (speeds.index(fastest),) in some
    assert any(speeds[devices[-1]] == fastest for devices in some if len(devices) == n)


def test_sixteen_equal_devices_have_one_order_for_each_number():
    some = found(setting([1.0] * 16, 4))
    assert sorted(some) == [tuple(range(count)) for count in range(1, 17)]


def test_a_slow_link_is_crossed_once():
    near = {0, 2, 4, 6}
    links = {
        (a, b): FAR for a, b in itertools.permutations(range(8), 2) if (a in near) != (b in near)
    }
    some = found(setting([1.0, 2.0, 1.5, 3.0, 1.0, 2.5, 1.2, 1.0], 4, links=links))
    for devices in some:
        sides = [device in near for device in devices]
        assert sum(a != b for a, b in itertools.pairwise(sides)) <= 1
    assert any(set(devices) == near for devices in some)


def test_hosts_stay_together_at_each_site():
    """Four hosts with two devices each, two hosts at each of two sites."""
    within, lan = LinkProfile(1e-6, 1e10, "within"), LinkProfile(1e-3, 1e8)
    links = {
        (a, b): within if a // 2 == b // 2 else lan if a // 4 == b // 4 else FAR
        for a, b in itertools.permutations(range(8), 2)
    }
    speeds = [1.0, 4.0, 2.0, 3.0, 1.5, 5.0, 2.5, 3.5]
    some = [d for d in found(setting(speeds, 4, links=links)) if len(d) == 8]
    for devices in some:
        hosts = [device // 2 for device in devices]
        assert len([*itertools.groupby(hosts)]) == 4
        assert len([*itertools.groupby(host // 2 for host in hosts)]) == 2


def test_devices_on_one_host_are_not_those_on_two():
    where = setting([1.0] * 3)
    first, second, third = where.cluster.devices
    devices = (replace(first, host="a"), replace(second, host="a"), replace(third, host="b"))
    where = replace(where, cluster=replace(where.cluster, devices=devices))
    some = found(where)
    assert (0, 1) in some and (0, 2) in some and (1, 2) not in some
