"""What went wrong in TLS, in words for people; OpenSSL's own say little to them.

Its reasons are the names of constants, and alerts have had several prefixes over its versions, so
they are looked for within the name.
"""

from __future__ import annotations

import ssl

DAMAGED = "the link damaged what it carried, or somebody changed it"

# In the handshake, of the other end; the first that fits.
_REASONS: tuple[tuple[str, str], ...] = (
    ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "it has shown no certificate, and one is required"),
    (
        "ALERT_CERTIFICATE_REQUIRED",
        "it wants to see a certificate of its CA (--tls-cert, --tls-key)",
    ),
    ("UNSUPPORTED_PROTOCOL", "it does not speak TLS 1.3"),
    ("ALERT_PROTOCOL_VERSION", "it does not speak TLS 1.3"),
    ("ALERT_UNKNOWN_CA", "it does not know the CA of the certificate it was shown"),
    ("ALERT_CERTIFICATE_EXPIRED", "it says that the certificate it was shown has expired"),
    ("ALERT_BAD_CERTIFICATE", "it does not accept the certificate it was shown"),
    ("ALERT_UNSUPPORTED_CERTIFICATE", "it does not accept the certificate it was shown"),
    ("ALERT_CERTIFICATE", "it does not accept the certificate it was shown"),
    ("ALERT_DECRYPT_ERROR", DAMAGED),
    ("ALERT_BAD_RECORD_MAC", DAMAGED),
    ("BAD_RECORD_MAC", DAMAGED),
    ("BAD_SIGNATURE", DAMAGED),
    ("DIGEST_CHECK_FAILED", DAMAGED),
    ("WRONG_VERSION_NUMBER", "what it sends is not TLS"),
    ("HTTP_REQUEST", "what it sends is not TLS"),
    ("PACKET_LENGTH_TOO_LONG", "what it sends is not TLS"),
    ("RECORD_LAYER_FAILURE", "what it sends is not TLS"),
)

# OpenSSL's numbers of what is wrong with a certificate (X509_V_ERR_...).
_NOT_YET, _EXPIRED = 9, 10
_NO_ISSUER = (2, 18, 19, 20, 21)
_PURPOSE = 26


def refused(exc: ssl.SSLError) -> str:
    """Why a handshake failed, of the other end, as a sentence."""
    if isinstance(exc, ssl.SSLCertVerificationError):
        return _certificate(exc.verify_code, exc.verify_message)
    return f"no TLS: {_reason(exc) or f'the handshake failed ({_plain(exc)})'}"


def broken(exc: ssl.SSLError) -> str:
    """Why a connection ended on which keys had been agreed on."""
    reason = exc.reason or ""
    if isinstance(exc, ssl.SSLCertVerificationError):
        return refused(exc)
    if "ALERT" in reason:
        # a server tells only now that it does not want this client
        return _reason(exc) or f"the other end has broken off: {_plain(exc)}"
    return f"{DAMAGED} ({_plain(exc)})"


def _certificate(code: int, text: str) -> str:
    if code == _EXPIRED:
        return "its certificate has expired"
    if code == _NOT_YET:
        return "its certificate is not valid yet: are the clocks right?"
    if code in _NO_ISSUER:
        return "its certificate is not of the CA that is trusted here (--tls-ca)"
    if code == _PURPOSE:
        return "its certificate is not for this use: a head's, say, is none for a worker"
    return f"its certificate is refused: {text}"


def _reason(exc: ssl.SSLError) -> str:
    reason = exc.reason or ""
    return next((text for name, text in _REASONS if name in reason), "")


def _plain(exc: ssl.SSLError) -> str:
    if exc.reason:
        return exc.reason.replace("_", " ").lower()
    return str(exc.args[-1]) if exc.args else type(exc).__name__
