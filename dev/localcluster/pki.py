"""Keys, certificates and kubeconfigs, made with openssl(1). Called by the supervisor and by apiserver.py."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localcluster import layout
from localcluster.shell import run, write_json

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


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
        """One certificate that serves as client and, with `addresses`, as server."""
        subject = f"/O={group}/CN={user}" if group else f"/CN={user}"
        names = ["-addext", "subjectAltName=" + ",".join(addresses)] if addresses else []
        words: list[str | Path] = ["openssl", "req", "-x509", *_KEY, "-days", "3650", "-subj", subject]
        words += ["-CA", self.certificate, "-CAkey", self.key("ca")]
        words += ["-out", self.cert(name), "-keyout", self.key(name)]
        words += ["-addext", "basicConstraints=critical,CA:FALSE"]
        words += ["-addext", "extendedKeyUsage=clientAuth,serverAuth", *names]
        run(words)

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
    subject = ("-subj", f"/CN={layout.CONTEXT}")
    own = ("-out", made.certificate, "-keyout", made.key("ca"))
    run(["openssl", "req", "-x509", *_KEY, "-days", "3650", *subject, *own])
    # Not genpkey: the API server takes the public half from this file, and only in this older format.
    signer = ("-noout", "-out", made.key("service-account"))
    run(["openssl", "ecparam", "-name", "prime256v1", "-genkey", *signer])
    return made


def _encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
