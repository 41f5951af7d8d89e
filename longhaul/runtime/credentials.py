"""Credentials of the inference server: a token and TLS, both required beyond loopback."""

from __future__ import annotations

import ipaddress
import os
import ssl
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple


class Credentials(NamedTuple):
    """Credentials of one side. Server: `certificate` and its `key`. Actor: `authority`, which verifies the server."""

    token: str | None = None
    certificate: bytes | None = None  # PEM, as the others
    key: bytes | None = None
    authority: bytes | None = None


TOKEN_VARIABLE = "LONGHAUL_TOKEN"
"""Environment variable with a token, where no file is named."""

NOBODY = Credentials()
"""No credentials, enough on loopback."""


def load(
    token_file: str | None = None,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    tls_ca: str | None = None,
    *,
    environment: bool = False,
) -> Credentials:
    """Credentials from files; with `environment` the token may be in `TOKEN_VARIABLE`. ValueError, one line, if one
    cannot be used."""
    token, source = None, f"--token-file {token_file}"
    if token_file is not None:
        token = _read("--token-file", token_file).decode(errors="replace").strip()
    elif environment and TOKEN_VARIABLE in os.environ:
        token, source = os.environ[TOKEN_VARIABLE].strip(), TOKEN_VARIABLE
    if token is not None and (len(token) < 16 or not token.isascii() or not token.isprintable()):
        raise ValueError(f"{source} has {len(token)} characters; a token is one line of 16 or more ASCII ones")
    if (tls_cert is None) != (tls_key is None):
        raise ValueError("--tls-cert and --tls-key belong together; give both, or none")
    parts = (("--tls-cert", tls_cert), ("--tls-key", tls_key), ("--tls-ca", tls_ca))
    credentials = Credentials(token, *(None if path is None else _read(flag, path) for flag, path in parts))
    for (flag, path), held in zip(parts, credentials[1:], strict=True):
        if held is not None:
            _check_form(flag, path, held)
    if tls_cert is not None and tls_key is not None:
        _check_pair(tls_cert, tls_key)
    return credentials


def _check_form(flag: str, path: str | None, held: bytes) -> None:
    kind, label = ("key", "PRIVATE KEY-----") if flag == "--tls-key" else ("certificate", "-----BEGIN CERTIFICATE-----")
    if label.encode() not in held:
        raise ValueError(f"{flag} {path} is no {kind} in PEM (it has no line with {label}); give a file that is")


def _check_pair(certificate: str, key: str) -> None:
    """Raise ValueError if the key does not fit the certificate; gRPC would not give the reason."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")  # their strength is the owner's choice
    try:
        context.load_cert_chain(certificate, key, password="")  # without it OpenSSL prompts for one
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(f"--tls-key {key} is not the key of --tls-cert {certificate}; give its own") from error
        raise ValueError(
            f"--tls-cert {certificate} with --tls-key {key} can't be read as PEM ({error.reason or error}); "
            "give a certificate and its key, not encrypted"
        ) from error


def _read(flag: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{flag} {path}: {error.strerror}") from error


def split(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT. ValueError if malformed."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"{address!r} is no address; write HOST:PORT, such as 127.0.0.1:7777")
    host = host.strip("[]")
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError as error:
            raise ValueError(f"{address!r} is no address: {host!r} is no host; write HOST:PORT") from error
    return host, int(port)


def is_loopback(host: str) -> bool:
    """True if only this machine can reach it. Of names only localhost counts: others may change."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def self_signed(host: str) -> Credentials:
    """New key and certificate for a server at an address or name, valid for a year.

    ValueError if OpenSSL's program is missing.
    """
    try:
        ipaddress.ip_address(host)
        kind = "IP"
    except ValueError:
        kind = "DNS"
    with tempfile.TemporaryDirectory() as folder:  # only we can read it
        key, certificate = Path(folder, "key.pem"), Path(folder, "certificate.pem")
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command += ["-days", "365", "-subj", "/CN=longhaul", "-addext", f"subjectAltName={kind}:{host}"]
        try:
            subprocess.run(
                [*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True, timeout=60.0
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            raise ValueError(
                f"no certificate for {host} can be made ({error}); give --tls-cert and --tls-key"
            ) from error
        return Credentials(certificate=certificate.read_bytes(), key=key.read_bytes())


def check_bind(address: str, credentials: Credentials) -> None:
    """Check of an address: ValueError if a server may not listen there."""
    try:
        host, _ = split(address)
    except ValueError as error:
        raise ValueError(f"--bind {error}") from error
    lacking = [
        *(["--token-file"] if credentials.token is None else []),
        *(["--tls-cert and --tls-key"] if credentials.certificate is None else []),
    ]
    if lacking and not is_loopback(host):
        raise ValueError(
            f"--bind is {address}, which other machines can reach: give {' and '.join(lacking)}, or bind to 127.0.0.1"
        )


def server_credentials(credentials: Credentials) -> Any:
    """gRPC's credentials; None without TLS."""
    import grpc

    if credentials.certificate is None:
        return None
    return grpc.ssl_server_credentials([(credentials.key, credentials.certificate)])


def channel(address: str, credentials: Credentials, options: list[tuple[str, int]]) -> Any:
    """Channel of grpc.aio to a server; with TLS if an authority is given, or if it is not on this machine."""
    import grpc

    host, _ = split(address)
    if credentials.authority is None and is_loopback(host):
        return grpc.aio.insecure_channel(address, options=options)
    secure = grpc.ssl_channel_credentials(credentials.authority)
    return grpc.aio.secure_channel(address, secure, options=options)
