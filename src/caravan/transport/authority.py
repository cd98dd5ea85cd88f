"""A small private CA: the certificates of the machines that belong together.

Called by `caravan tls` alone: it needs `cryptography`, and nothing else does. Keys are EC P-256.
Files are written whole or not at all, and none is ever overwritten.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from caravan.errors import CaravanError, UsageError

CA_DAYS = 3650
DAYS = 730
# A machine whose clock is a little late takes a new certificate all the same.
_EARLIER = datetime.timedelta(hours=1)
_CA, _CA_KEY = "ca.pem", "ca-key.pem"

_WORKER = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
# a head's is no worker's: whoever gets hold of it cannot pass for one
_HEAD = (ExtendedKeyUsageOID.CLIENT_AUTH,)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A pair of certificate and key that is to be made.

    Attributes:
        name: of the machine; the files are `NAME.pem` and `NAME-key.pem`.
        hosts: host names and addresses by which it is reached.
        head: it is for a head alone, not for a worker.
    """

    name: str
    hosts: tuple[str, ...] = ()
    head: bool = False


def usual() -> list[Wanted]:
    """What is made where no machine is named: one for all workers, and one for heads."""
    hosts = dict.fromkeys((socket.gethostname(), "localhost", "127.0.0.1", "::1"))
    return [Wanted("worker", tuple(filter(None, hosts))), Wanted("head", head=True)]


def init(directory: Path, wanted: Sequence[Wanted], days: int = DAYS) -> list[Path]:
    """Make a CA and the pairs that are wanted; the files, CA first.

    Raises UsageError when one of them is there already, or a name can be none.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Caravan private CA")])
    ca = _ca(name, key)
    with _writing(directory) as files:
        files.add(_CA, _pem(ca))
        files.add(_CA_KEY, _key_pem(key), secret=True)
        for one in wanted:
            _add_pair(files, one, ca, key, days)
        return files.write()


def add(directory: Path, wanted: Sequence[Wanted], days: int = DAYS) -> list[Path]:
    """Make further pairs of the CA in the directory; the files.

    Raises UsageError when there is no CA, one of the files is there already, or a name can be none.
    """
    ca, key = _load(directory)
    with _writing(directory) as files:
        for one in wanted:
            _add_pair(files, one, ca, key, days)
        return files.write()


def _load(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    if not (directory / _CA).exists():
        raise UsageError(f"there is no CA in {directory}: `caravan tls init` makes one")
    try:
        ca = x509.load_pem_x509_certificate((directory / _CA).read_bytes())
        key = load_pem_private_key((directory / _CA_KEY).read_bytes(), None)
    except OSError as exc:
        raise CaravanError(f"{exc.filename}: {exc.strerror}") from exc
    except (ValueError, TypeError) as exc:
        raise CaravanError(f"{directory / _CA} or {_CA_KEY} beside it is damaged") from exc
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != ca.public_key():
        raise CaravanError(f"{directory / _CA_KEY} is not the key of {_CA}")
    return ca, key


def _ca(name: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    public = key.public_key()
    builder = (
        _builder(name, name, public, CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )
    return builder.sign(key, hashes.SHA256())


def _add_pair(
    files: _Files,
    wanted: Wanted,
    ca: x509.Certificate,
    ca_key: ec.EllipticCurvePrivateKey,
    days: int,
) -> None:
    stem = _stem(wanted.name)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, wanted.name[:64])])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = (
        _builder(name, ca.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(_HEAD if wanted.head else _WORKER), critical=False)
        .add_extension(own, critical=False)
        .add_extension(issuer, critical=False)
    )
    if wanted.hosts:
        names = x509.SubjectAlternativeName([_host(host) for host in wanted.hosts])
        builder = builder.add_extension(names, critical=False)
    files.add(f"{stem}.pem", _pem(builder.sign(ca_key, hashes.SHA256())))
    files.add(f"{stem}-key.pem", _key_pem(key), secret=True)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text.partition("%")[0]))
    except ValueError:
        pass
    try:
        return x509.DNSName(text.encode("idna").decode())
    except (ValueError, UnicodeError) as exc:
        raise UsageError(f"{text!r} is no host name") from exc


def _stem(name: str) -> str:
    """The name of a pair's files: an address of IPv6 has colons, which not every system takes."""
    stem = name.replace(":", "_").replace("%", "_")
    if not stem or stem.startswith((".", "-")) or not stem.isprintable() or set(stem) & set("/\\ "):
        raise UsageError(f"{name!r} can be no name of a machine")
    return stem


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


class _Files:
    """New files of one directory, written together."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._wanted: dict[str, tuple[bytes, bool]] = {}

    def add(self, name: str, data: bytes, *, secret: bool = False) -> None:
        """Raises UsageError when it is there, or was added, already."""
        if name in self._wanted:
            raise UsageError(f"two machines would have the file {name}")
        if os.path.lexists(self._directory / name):
            raise UsageError(f"{self._directory / name} is there already, and is not overwritten")
        self._wanted[name] = (data, secret)

    def write(self) -> list[Path]:
        """Raises OSError; what was written by then is removed."""
        with ExitStack() as undo:
            for name, (data, secret) in self._wanted.items():
                path = self._directory / name
                mode = 0o600 if secret else 0o644
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
                undo.callback(_remove, path)
                with open(fd, "wb") as file:
                    file.write(data)
            undo.pop_all()
        return [self._directory / name for name in self._wanted]


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


@contextlib.contextmanager
def _writing(directory: Path) -> Iterator[_Files]:
    """Make the directory, and say in one line what goes wrong with it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        yield _Files(directory)
    except FileExistsError as exc:
        raise UsageError(f"{exc.filename} is there already, and is not overwritten") from exc
    except OSError as exc:
        raise CaravanError(f"{exc.filename or directory}: {exc.strerror or exc}") from exc
