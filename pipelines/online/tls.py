"""The certificate that Serve's proxy answers with, looked at before anything starts: the proxy itself would fail again
and again, and say so in its own log.

It knows files and the ssl module; who serves by them is `jobs/serve.py`.
"""

import functools
import ssl
import stat
from pathlib import Path
from typing import NoReturn

from peagle.errors import ConfigError

_MISMATCH = "KEY_VALUES_MISMATCH"


def require_certificate(certificate: Path, key: Path) -> None:
    """Refuse files by which nobody could be answered, or which somebody else could answer by.

    Raises:
        ConfigError: one cannot be read or is not what it should be, the key is not the certificate's, is encrypted, or
            is readable by everybody.
    """
    for name, path in (("tls_cert", certificate), ("tls_key", key)):
        _require_readable(name, path)
    mode = key.stat().st_mode
    if mode & stat.S_IRWXO:
        raise ConfigError(
            f"tls_key {key}: everybody on this machine may use it (mode {stat.S_IMODE(mode):04o})",
            hint=f"chmod 600 {key}",
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(certificate)
    except ssl.SSLError:
        raise ConfigError(
            f"tls_cert {certificate}: it holds no certificate",
            hint="it must hold the endpoint's certificate in PEM (-----BEGIN CERTIFICATE-----), those between after it",
        ) from None
    try:
        context.load_cert_chain(certificate, key, password=functools.partial(_refuse, key))
    except ssl.SSLError as error:
        if error.reason == _MISMATCH:
            raise ConfigError(f"tls_key {key}: it is not the key of the certificate in {certificate}") from None
        raise ConfigError(
            f"tls_key {key}: it holds no private key",
            hint="it must hold the certificate's key in PEM (-----BEGIN PRIVATE KEY-----)",
        ) from None


def _require_readable(name: str, path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} {path}: {error.strerror}") from error


def _refuse(key: Path) -> NoReturn:
    raise ConfigError(f"tls_key {key}: it is encrypted", hint=f"openssl pkey -in {key} -out plain.pem")
