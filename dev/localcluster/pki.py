"""Keys, certificates and kubeconfigs of one cluster. Used by the supervisors and by apiserver.py."""

from __future__ import annotations

import base64
import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

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

from localcluster import layout
from localcluster.shell import write_json

_DAYS: Final = datetime.timedelta(days=3650)
_ABOUT_NOW: Final = datetime.timedelta(minutes=5)


@dataclass(frozen=True, kw_only=True, slots=True)
class Authority:
    """A certificate authority that lives as long as one cluster."""

    folder: Path

    @property
    def certificate(self) -> Path:
        return self.folder / "ca.crt"

    def cert(self, name: str) -> Path:
        return self.folder / f"{name}.crt"

    def key(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def issue(self, name: str, *, user: str, group: str = "", addresses: Sequence[str] = ()) -> None:
        """One certificate that serves as client and, with `addresses` (IP:..., DNS:...), as server."""
        issuer = x509.load_pem_x509_certificate(self.certificate.read_bytes())
        signer = load_pem_private_key(self.key("ca").read_bytes(), password=None)
        assert isinstance(signer, ec.EllipticCurvePrivateKey)
        key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH])
        builder = (
            _builder(_name(user, group), issuer.subject, key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(usage, critical=False)
        )
        if addresses:
            names = x509.SubjectAlternativeName([_alternative(address) for address in addresses])
            builder = builder.add_extension(names, critical=False)
        self.cert(name).write_bytes(builder.sign(signer, hashes.SHA256()).public_bytes(Encoding.PEM))
        _write_key(self.key(name), key)

    def kubeconfig(self, path: Path, *, server: str, name: str) -> None:
        """A kubeconfig that needs no other file. JSON is YAML, so every client reads it."""
        write_json(path, self._config(server, name), mode=0o600)

    def _config(self, server: str, name: str) -> dict[str, Any]:
        user = {
            "client-certificate-data": _encoded(self.cert(name)),
            "client-key-data": _encoded(self.key(name)),
        }
        cluster = {"server": server, "certificate-authority-data": _encoded(self.certificate)}
        context = {"cluster": layout.CONTEXT, "user": name, "namespace": "default"}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": layout.CONTEXT, "cluster": cluster}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": layout.CONTEXT, "context": context}],
            "current-context": layout.CONTEXT,
        }


def new_authority(folder: Path) -> Authority:
    """Makes the authority and the key that signs service account tokens."""
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    made = Authority(folder=folder)
    key, name = ec.generate_private_key(ec.SECP256R1()), _name(layout.CONTEXT)
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = (
        _builder(name, name, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(own, critical=False)
    )
    made.certificate.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    _write_key(made.key("ca"), key)
    _write_key(made.key("service-account"), ec.generate_private_key(ec.SECP256R1()))
    return made


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _ABOUT_NOW)
        .not_valid_after(now + _DAYS)
    )


def _name(user: str, group: str = "") -> x509.Name:
    organization = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group)] if group else []
    return x509.Name([*organization, x509.NameAttribute(NameOID.COMMON_NAME, user)])


def _alternative(address: str) -> x509.GeneralName:
    kind, _, text = address.partition(":")
    return x509.IPAddress(ipaddress.ip_address(text)) if kind == "IP" else x509.DNSName(text)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    """In the older of the two formats: from that one the API server takes the public half, too."""
    text = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    path.touch(mode=0o600)
    path.write_bytes(text)


def _encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
