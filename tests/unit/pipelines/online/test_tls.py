import subprocess

import pytest

from peagle.errors import ConfigError
from pipelines.online.app import build
from pipelines.online.config import ServeConfig
from pipelines.online.tls import require_certificate

NEW_KEY = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two certificates with their keys."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("one", "two"):
        files = ("-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem")
        subprocess.run([*NEW_KEY, "-nodes", "-subj", "/CN=localhost", *files], check=True, capture_output=True)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def pair(tmp_path, made):
    """Write a certificate and a key, and require them."""

    def require(certificate=made["one.pem"], key=made["one.key"], mode=0o600):
        cert_path, key_path = tmp_path / "cert.pem", tmp_path / "key.pem"
        cert_path.write_bytes(certificate)
        key_path.write_bytes(key)
        key_path.chmod(mode)
        require_certificate(cert_path, key_path)

    return require


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o640])
def test_a_certificate_with_its_key_passes(pair, made, mode):
    pair(mode=mode)
    pair(certificate=made["one.pem"] + made["two.pem"])  # those of its issuers after it


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o606, 0o602, 0o777])
def test_a_key_that_everybody_may_use_is_refused(pair, mode):
    with pytest.raises(ConfigError, match=rf"tls_key .*key\.pem: everybody .* \(mode {mode:04o}\)"):
        pair(mode=mode)


def test_the_key_of_another_certificate_is_refused(pair, made):
    with pytest.raises(ConfigError, match=r"tls_key .*key\.pem: it is not the key of the certificate in .*cert\.pem"):
        pair(key=made["two.key"])


@pytest.mark.parametrize("data", [b"", b"no pem", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_a_file_that_holds_no_certificate_is_refused(pair, data):
    with pytest.raises(ConfigError, match=r"tls_cert .*cert\.pem: it holds no certificate"):
        pair(certificate=data)


@pytest.mark.parametrize("data", [b"", b"no pem"])
def test_a_file_that_holds_no_key_is_refused(pair, data):
    with pytest.raises(ConfigError, match=r"tls_key .*key\.pem: it holds no private key"):
        pair(key=data)


def test_the_two_the_wrong_way_round_are_refused(pair, made):
    with pytest.raises(ConfigError, match="it holds no certificate"):
        pair(certificate=made["one.key"], key=made["one.pem"])


def test_a_key_that_is_encrypted_is_refused_and_nobody_asked_for_its_word(pair, tmp_path):
    files = ("-keyout", tmp_path / "locked", "-out", tmp_path / "of-it", "-passout", "pass:word")
    subprocess.run([*NEW_KEY, "-subj", "/CN=localhost", *files], check=True, capture_output=True)
    with pytest.raises(ConfigError, match="it is encrypted"):
        pair(certificate=(tmp_path / "of-it").read_bytes(), key=(tmp_path / "locked").read_bytes())


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ConfigError, match=r"tls_cert .*: Is a directory"):
        require_certificate(tmp_path, tmp_path)


def test_where_serve_deploys_the_certificate_is_serves(tmp_path):
    with pytest.raises(ConfigError, match="tls_cert") as caught:
        build(ServeConfig(tls_cert=tmp_path / "c", tls_key=tmp_path / "k"))
    assert "ssl_certfile" in caught.value.hint


@pytest.mark.parametrize("files", [{}, {"tls_cert": "c", "tls_key": "k"}])
def test_the_address_says_which_way_clients_come(files):
    assert ServeConfig(**files).url == f"{'https' if files else 'http'}://127.0.0.1:8000/v1"
