"""`Tls`, and files that are not what they should be: one line each, which names option and file."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from caravan.errors import UsageError
from caravan.transport.certificates import Tls, client_context, fingerprint, server_context
from tls_ends import certificates


def test_half_a_pair():
    with pytest.raises(UsageError, match="--tls-cert without --tls-key"):
        Tls(cert="a")
    with pytest.raises(UsageError, match="--tls-key without --tls-cert"):
        Tls(key="a")
    with pytest.raises(UsageError, match="a worker needs a certificate"):
        server_context(Tls(ca=certificates().path("ca")))


def test_whether_there_is_anything():
    assert not Tls()
    assert Tls(ca="x")
    assert Tls(cert="x", key="y")


@pytest.mark.parametrize("option", ["ca", "cert", "key"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file"),
        (b"", "not in PEM form, or damaged"),
        (b"\xff\0junk", "not in PEM form, or damaged"),
        ("directory", "is a directory"),
        ("cut", "not in PEM form, or damaged"),
    ],
)
def test_a_file_that_is_none(tmp_path, option, content, words):
    own = certificates()
    files = {"ca": own.path("ca"), "cert": own.path("worker"), "key": own.path("worker-key")}
    path = tmp_path / "file.pem"
    if content == "directory":
        path.mkdir()
    elif content == "cut":
        path.write_bytes(Path(files[option]).read_bytes()[:-60])
    elif content is not None:
        path.write_bytes(content)
    tls = Tls(**{**files, option: str(path)})
    for context in (client_context, server_context):
        with pytest.raises(UsageError, match=words) as caught:
            context(tls)
        assert f"--tls-{option} {path}" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_key_that_is_another_ones():
    own = certificates()
    with pytest.raises(UsageError, match="the key is not that of the certificate"):
        server_context(Tls(cert=own.path("worker"), key=own.path("head-key")))


def test_a_key_with_a_passphrase(tmp_path):
    """Nobody is asked for one."""
    own = certificates()
    key = load_pem_private_key(Path(own.path("worker-key")).read_bytes(), None)
    path = tmp_path / "key.pem"
    path.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    )
    with pytest.raises(UsageError, match="has a passphrase, and must have none"):
        server_context(Tls(cert=own.path("worker"), key=str(path)))


def test_the_fingerprint_is_of_the_first_certificate(tmp_path):
    own = certificates()
    chain = tmp_path / "chain.pem"
    chain.write_text(
        f"some words\n{Path(own.path('worker')).read_text()}{Path(own.path('ca')).read_text()}"
    )
    assert fingerprint(str(chain)) == fingerprint(own.path("worker"))
    assert len(fingerprint(str(chain))) == 32
    chain.write_text("nothing")
    with pytest.raises(UsageError, match="no certificate in PEM form"):
        fingerprint(str(chain))


def test_cryptography_is_for_making_certificates_alone():
    code = (
        "import sys, caravan.transport.tls, caravan.transport.certificates, caravan.cli.tls;"
        "sys.exit('cryptography' in sys.modules)"
    )
    import sys

    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
