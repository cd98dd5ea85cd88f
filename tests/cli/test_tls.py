"""`caravan tls`: the files that it writes, and that it never writes over any."""

from __future__ import annotations

import os
import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from caravan.cli.main import main
from caravan.transport import authority
from caravan.transport.certificates import Tls, client_context, server_context


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def names(path: Path) -> set[str]:
    found = certificate(path).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return {str(name.value) for name in found.value}


def written(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


USUAL = ["ca-key.pem", "ca.pem", "head-key.pem", "head.pem", "worker-key.pem", "worker.pem"]


def test_init_writes_a_ca_and_two_pairs(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["tls", "init"]) == 0
    directory = tmp_path / "caravan-tls"
    assert written(directory) == USUAL
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == [f"caravan-tls/{name}" for name in USUAL]
    assert "caravan worker --tls-cert worker.pem" in err
    assert "heads: --tls-ca ca.pem --tls-cert head.pem --tls-key head-key.pem" in err
    assert {"localhost", "127.0.0.1", "::1"} <= names(directory / "worker.pem")
    key = certificate(directory / "worker.pem").public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert key.curve.name == "secp256r1"


def test_only_the_owner_reads_keys(tmp_path):
    old = os.umask(0)
    try:
        assert main(["tls", "init", str(tmp_path)]) == 0
    finally:
        os.umask(old)
    for path in tmp_path.iterdir():
        secret = path.name.endswith("-key.pem")
        assert stat.S_IMODE(path.stat().st_mode) == (0o600 if secret else 0o644), path


def test_hosts_get_pairs_of_their_own(tmp_path, capsys):
    hosts = ["lab1", "10.0.0.7", "fe80::1", "*.lab.example"]
    args = [word for host in hosts[:3] for word in ("--host", host)]
    assert main(["tls", "init", str(tmp_path), *args, "--days", "30"]) == 0
    assert written(tmp_path) == sorted(
        ["ca.pem", "ca-key.pem"]
        + [
            f"{stem}{end}"
            for stem in ("lab1", "10.0.0.7", "fe80__1")
            for end in (".pem", "-key.pem")
        ]
    )
    for host, stem in zip(hosts[:3], ("lab1", "10.0.0.7", "fe80__1"), strict=True):
        assert names(tmp_path / f"{stem}.pem") == {host}
    found = certificate(tmp_path / "lab1.pem")
    assert (found.not_valid_after_utc - found.not_valid_before_utc).days == 30
    assert "lab1-key.pem" in capsys.readouterr().err


def test_what_is_there_is_never_written_over(tmp_path, capsys):
    assert main(["tls", "init", str(tmp_path)]) == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    capsys.readouterr()
    assert main(["tls", "init", str(tmp_path), "--host", "lab1"]) == 2
    assert "ca.pem is there already, and is not overwritten" in capsys.readouterr().err
    assert main(["tls", "add", "worker", "--directory", str(tmp_path)]) == 2
    assert "worker.pem is there already" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_nothing_is_left_of_what_could_not_be_written_whole(tmp_path, monkeypatch, capsys):
    (tmp_path / "head-key.pem").symlink_to("nowhere")
    assert main(["tls", "init", str(tmp_path)]) == 2
    assert "head-key.pem is there already" in capsys.readouterr().err
    assert written(tmp_path) == ["head-key.pem"]
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    opened = os.open

    def failing(path, flags, mode=0o777):
        # the file is there, and takes nothing
        fd = opened(path, flags, mode)
        if Path(path).name != "worker.pem":
            return fd
        os.close(fd)
        return opened(full, os.O_WRONLY)

    monkeypatch.setattr(authority.os, "open", failing)
    assert main(["tls", "init", str(tmp_path / "new")]) == 1
    assert "no space left" in capsys.readouterr().err.lower()
    assert written(tmp_path / "new") == []


def test_add_makes_further_pairs_of_the_same_ca(tmp_path, capsys):
    assert main(["tls", "init", str(tmp_path)]) == 0
    capsys.readouterr()
    assert main(["tls", "add", "lab2", "lab3", "--directory", str(tmp_path)]) == 0
    added = ["lab2.pem", "lab2-key.pem", "lab3.pem", "lab3-key.pem"]
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / name) for name in added]
    for stem in ("lab2", "lab3", "head", "worker"):
        certificate(tmp_path / f"{stem}.pem").verify_directly_issued_by(
            certificate(tmp_path / "ca.pem")
        )


@pytest.mark.parametrize("command", ["init", "add"])
@pytest.mark.parametrize("name", ["../x", "", ".", "a/b", "a b", "-x", "a\nb", "x" * 70 + "..y"])
def test_a_name_that_can_be_none(tmp_path, command, name, capsys):
    directory = tmp_path / "tls"
    if command == "init":
        words = [str(directory), "--host", name]
    else:
        assert main(["tls", "init", str(directory)]) == 0
        words = ["--directory", str(directory), "--", name]
    assert main(["tls", command, *words]) == 2
    assert len(capsys.readouterr().err.splitlines()) == (1 if command == "init" else 4)
    assert written(directory) == (USUAL if command == "add" else [])


def test_one_name_twice(tmp_path, capsys):
    assert main(["tls", "init", str(tmp_path), "--host", "a", "--host", "a"]) == 2
    assert "two machines would have the file a.pem" in capsys.readouterr().err


def test_add_needs_a_ca(tmp_path, capsys):
    assert main(["tls", "add", "lab1", "--directory", str(tmp_path)]) == 2
    assert "`caravan tls init` makes one" in capsys.readouterr().err


@pytest.mark.parametrize("harm", ["no key", "another key", "no PEM"])
def test_a_ca_that_is_damaged(tmp_path, harm, capsys):
    assert main(["tls", "init", str(tmp_path)]) == 0
    key = tmp_path / "ca-key.pem"
    if harm == "no key":
        key.unlink()
    elif harm == "another key":
        key.write_bytes((tmp_path / "head-key.pem").read_bytes())
    else:
        key.write_text("nothing")
    capsys.readouterr()
    assert main(["tls", "add", "lab1", "--directory", str(tmp_path)]) == 1
    assert "ca-key.pem" in capsys.readouterr().err
    assert not (tmp_path / "lab1.pem").exists()


def test_a_directory_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["tls", "init", str(tmp_path / "file" / "x")]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_certificates_satisfy_a_strict_reader(tmp_path):
    """As Python's own defaults have been since 3.13."""
    authority.init(tmp_path, authority.usual())
    paths = [str(tmp_path / f"{stem}.pem") for stem in ("ca", "worker", "worker-key")]
    server = server_context(Tls(*paths))
    client = client_context(Tls(paths[0]))
    for context in (server, client):
        context.verify_flags |= ssl.VERIFY_X509_STRICT
    from tls_ends import shake, sockets

    for end in shake(sockets(), client_context(Tls(*paths)), server):
        end.close()
    server.verify_mode = ssl.CERT_NONE
    for end in shake(sockets(), client, server):
        end.close()
