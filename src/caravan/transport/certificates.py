"""`Tls`: which certificates an end has and trusts, and the contexts that come of it.

TLS 1.3 only, no session tickets. Names are not checked: a private CA has signed for its own
machines and for nobody else.
"""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from caravan.errors import UsageError


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of PEM files; an empty one for none.

    Attributes:
        ca: the CA whose certificates are trusted, and no others. A worker with it asks every client
            for one; a head with it talks to no worker without.
        cert: the own certificate, if need be with the ones in between after it. A worker with it
            has everybody speak TLS; a head shows it to those that ask for one.
        key: the private key of `cert`, without a passphrase.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""

    def __post_init__(self) -> None:
        """Raises UsageError for one of `cert` and `key` without the other."""
        if bool(self.cert) != bool(self.key):
            has, lacks = ("cert", "key") if self.cert else ("key", "cert")
            raise UsageError(f"--tls-{has} without --tls-{lacks}")

    def __bool__(self) -> bool:
        return bool(self.ca or self.cert)


NO_TLS = Tls()


class TlsClient:
    """What an end has that connects; made once, for many connections. Raises UsageError for files
    that are not what they should be.

    Attributes:
        knows_ca: whether the other end is known by its certificate, so that nothing else need show
            whose it is; and then it must have one.
        context: for `secure`.
    """

    def __init__(self, tls: Tls | None = None) -> None:
        tls = NO_TLS if tls is None else tls
        self.knows_ca = bool(tls.ca)
        self.context = client_context(tls)


def client_context(tls: Tls) -> ssl.SSLContext:
    """For an end that connects. Without a CA it takes any certificate: then something else must
    show whose it is. Raises UsageError for files that are not what they should be."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return _filled(context, tls)


def server_context(tls: Tls) -> ssl.SSLContext:
    """For an end that accepts; it needs a certificate. Raises UsageError as above."""
    if not tls.cert:
        raise UsageError("--tls-cert is missing: a worker needs a certificate for TLS")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # nobody resumes: sessions last, and what was once checked would not be again
    context.num_tickets = 0
    return _filled(context, tls)


def fingerprint(path: str) -> bytes:
    """SHA-256 of the first certificate (DER) in a PEM file; raises UsageError."""
    text = _read(path, "--tls-cert")
    try:
        begin, end = text.index(ssl.PEM_HEADER), text.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(text[begin:end])).digest()
    except ValueError as exc:
        raise UsageError(f"--tls-cert {path}: no certificate in PEM form") from exc


def _filled(context: ssl.SSLContext, tls: Tls) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if tls.ca:
        _read(tls.ca, "--tls-ca")
        _load(lambda: context.load_verify_locations(tls.ca), f"--tls-ca {tls.ca}")
        context.verify_mode = ssl.CERT_REQUIRED
    if tls.cert:
        _read(tls.cert, "--tls-cert")
        _read(tls.key, "--tls-key")
        named = f"--tls-cert {tls.cert} and --tls-key {tls.key}"
        _load(lambda: context.load_cert_chain(tls.cert, tls.key, _no_passphrase), named)
    return context


def _read(path: str, option: str) -> str:
    """OpenSSL does not say which file it is that it cannot read."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(1 << 20)
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise UsageError(f"{option} {path}: {reason.lower()}") from exc


def _no_passphrase() -> str:
    """Else OpenSSL would ask for one on the terminal."""
    raise UsageError("the key has a passphrase, and must have none")


def _load(load: Callable[[], object], named: str) -> None:
    try:
        load()
    except UsageError as exc:
        raise UsageError(f"{named}: {exc}") from exc
    except ssl.SSLError as exc:
        reason = exc.reason or ""
        if "MISMATCH" in reason:
            text = "the key is not that of the certificate"
        elif "TOO_SMALL" in reason or "TOO_WEAK" in reason:
            text = "too weak for TLS 1.3"
        else:
            text = "not in PEM form, or damaged"
        raise UsageError(f"{named}: {text}") from exc
