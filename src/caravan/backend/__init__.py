"""The ggml plug-in: remote devices as devices of the unmodified engine.

The only place with C callbacks.
"""

from caravan.backend.cluster import Cluster, connect, open_routes, routes_between
from caravan.backend.device import RemoteDevice
from caravan.backend.plugin import publish, release
from caravan.backend.timeline import Timeline
from caravan.stream.receiver import DEFAULT_POLL

__all__ = [
    "DEFAULT_POLL",
    "Cluster",
    "RemoteDevice",
    "Timeline",
    "connect",
    "open_routes",
    "publish",
    "release",
    "routes_between",
]
