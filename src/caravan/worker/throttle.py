"""`Throttle`: how long the answer to a wrong token takes, by where it came from.

Each failure of an address doubles the delay, up to a bound, so that nobody tries many tokens; who
knows the token is never delayed. Used by the greeting threads. Also what counts as one address.
"""

from __future__ import annotations

import ipaddress
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

FIRST_DELAY = 0.2
LONGEST_DELAY = 5.0
# So long after its last failure an address is as good as a new one.
FORGIVEN_SECONDS = 300.0
MAX_ADDRESSES = 1024
# Whoever has an IPv6 address at all has so many bits of his own to choose another one from.
_V6_NETWORK = 64


def group(address: str) -> str:
    """What one client may have in several shapes, as one text: an IPv4 address, or the network of
    an IPv6 one; empty for a Unix socket."""
    try:
        number = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(number, ipaddress.IPv6Address):
        if number.ipv4_mapped is not None:
            return str(number.ipv4_mapped)
        return str(ipaddress.ip_network((number, _V6_NETWORK), strict=False))
    return str(number)


class Throttle:
    """See the module."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # group: number of failures, time of the last; the one that failed last is last
        self._failures: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Throttle of {len(self._failures)} addresses>"

    def failed(self, source: str) -> float:
        """Note a failure of this group, and give the seconds that it has to wait for its answer."""
        now = self._clock()
        with self._lock:
            count, last = self._failures.pop(source, (0, now))
            if now - last > FORGIVEN_SECONDS:
                count = 0
            self._failures[source] = (count + 1, now)
            if len(self._failures) > MAX_ADDRESSES:
                self._failures.popitem(last=False)
        # a bound on the exponent, too: floats end somewhere
        return min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** min(count, 16))

    def succeeded(self, source: str) -> None:
        """It knows the token after all."""
        with self._lock:
            self._failures.pop(source, None)
