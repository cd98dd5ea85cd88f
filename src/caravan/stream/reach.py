"""`Reach`: how the other workers find a session of one worker."""

from __future__ import annotations

from dataclasses import dataclass

from caravan.errors import UsageError
from caravan.transport.endpoint import TLS, Endpoint
from caravan.wire.extension import MAX_ADDRESSES


@dataclass(frozen=True, slots=True)
class Reach:
    """One session's; links of the same session share the object.

    Attributes:
        endpoint: where the head has reached the worker.
        key: the secret that opens a way into the session.
        addresses: where the worker says that it can be reached.
        direct: whether ways between it and other workers may be opened at all.
    """

    endpoint: Endpoint
    key: str
    addresses: tuple[str, ...]
    direct: bool = True

    def seen_from(self, other: Reach) -> list[str]:
        """Endpoints that the worker of `other` should try, the best first.

        What only means something on one machine is left out where the two are not both known to be
        on the head's: there it would name something else. So is a place that is named with TLS,
        too.
        """
        together = self.endpoint.is_here and other.endpoint.is_here
        named = dict.fromkeys([*self.addresses, str(self.endpoint)])
        texts = [text for text in named if f"{TLS}{text}" not in named]
        return [text for text in texts if _leads_there(text, together)][:MAX_ADDRESSES]


def _leads_there(text: str, together: bool) -> bool:
    try:
        here = Endpoint.parse(text).is_here
    except UsageError:
        return False
    return together or not here
