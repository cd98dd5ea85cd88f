"""The proof that an end knows the token: what AUTH and PROVE carry, as values.

Challenge and response: both ends draw a nonce, then each shows a MAC over both of them; the token
is on no wire. The client proves first, so that a stranger gets nothing to try tokens on. Knows
neither sockets nor where tokens come from. HMAC-SHA256 as in RFC 2104.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from caravan.wire.commands import MAC, NONCE

# What stands for the certificate's fingerprint as long as there is no TLS.
NO_CERTIFICATE = bytes(32)
# The same, where TLS is next: who takes the worker's word for it out of HELLO is found out.
TLS_FOLLOWS = b"tls".ljust(32, b"\0")
_CLIENT = b"caravan head"
_WORKER = b"caravan worker"


def fingerprint(certificate: bytes) -> bytes:
    """The SHA-256 of a worker's TLS certificate in DER form, to which a proof within TLS is bound:
    who sits in the middle has another certificate."""
    return hashlib.sha256(certificate).digest()


class Claim:
    """The client's side, a head's or a worker's that connects to another one; for one exchange.

    Args:
        token: the shared secret.
        certificate: `fingerprint` of the worker's, within TLS.

    Attributes:
        nonce: 32 bytes, for AUTH.
    """

    def __init__(self, token: bytes, certificate: bytes = NO_CERTIFICATE) -> None:
        self._token = token
        self._certificate = certificate
        self.nonce = secrets.token_bytes(NONCE.size)
        self._theirs: bytes | None = None

    def prove(self, worker_nonce: bytes) -> bytes:
        """The MAC for PROVE, once the worker's nonce is here."""
        self._theirs = worker_nonce
        return _mac(self._token, _CLIENT, self.nonce, worker_nonce, self._certificate)

    def believes(self, mac: bytes) -> bool:
        """Whether the worker's answer to PROVE shows that it knows the token, too."""
        if self._theirs is None:
            return False
        expected = _mac(self._token, _WORKER, self.nonce, self._theirs, self._certificate)
        return hmac.compare_digest(expected, mac)


class Challenge:
    """The worker's side, for one exchange; arguments as in `Claim`.

    Attributes:
        nonce: 32 bytes, the reply to AUTH.
    """

    def __init__(
        self, token: bytes, client_nonce: bytes, certificate: bytes = NO_CERTIFICATE
    ) -> None:
        self._token = token
        self._certificate = certificate
        self._theirs = client_nonce
        self.nonce = secrets.token_bytes(NONCE.size)

    def answer(self, mac: bytes) -> bytes | None:
        """The worker's MAC, the reply to PROVE; None if the client does not know the token."""
        expected = _mac(self._token, _CLIENT, self._theirs, self.nonce, self._certificate)
        if not hmac.compare_digest(expected, mac):
            return None
        return _mac(self._token, _WORKER, self._theirs, self.nonce, self._certificate)


def _mac(token: bytes, label: bytes, client: bytes, worker: bytes, certificate: bytes) -> bytes:
    """Every part but the label has one length, so no two proofs are made of the same bytes."""
    text = b"".join((label, b"\0", client, worker, certificate))
    mac = hmac.digest(token, text, "sha256")
    assert len(mac) == MAC.size
    return mac
