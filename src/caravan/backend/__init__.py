"""The ggml plug-in: remote devices as devices of the unmodified engine.

The only place with C callbacks.
"""

from caravan.backend.cluster import Cluster, connect
from caravan.backend.device import RemoteDevice

__all__ = ["Cluster", "RemoteDevice", "connect"]
