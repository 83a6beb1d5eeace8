"""TLS certificates for localhost, made by openssl when a test wants one."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

from infervisor.supervisor.http_api.server.server import tls_context


def make_certificate(folder: Path, name: str = "localhost", *options: str) -> tuple[Path, Path]:
    """Write a certificate and its key; return both. The key is not encrypted unless `options` say so."""
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-days",
        "2",
    ]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command += ["-out", str(cert), "-keyout", str(key), *(options or ("-nodes",))]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def both_contexts(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the contexts of a server and of a client that trusts it."""
    cert, key = make_certificate(folder)
    return tls_context(cert, key), ssl.create_default_context(cafile=cert)
