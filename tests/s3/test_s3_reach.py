"""How the S3 store gets to its server: TLS with a private CA, web identity, a node whose clock is wrong."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from spottrain.errors import ConfigurationError, StoreDenied, StoreUnavailable
from spottrain.storage.base import AlreadyExists, PreconditionFailed
from spottrain.storage.open import open_store
from spottrain.storage.s3 import S3Store

from tests.support import s3server
from tests.support.s3server import S3Server

BODY = bytes(range(256)) * 50_000


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that is its own CA, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "spottrain-test")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = folder / "ca.pem", folder / "key.pem"
    files[0].write_bytes(made.public_bytes(Encoding.PEM))
    files[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return files


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return certificate(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory: pytest.TempPathFactory, authority: tuple[Path, Path]) -> Iterator[S3Server]:
    with s3server.running(tmp_path_factory.mktemp("tls"), authority) as it:
        yield it


def test_a_private_ca_is_trusted_by_its_bundle(
    tls_server: S3Server, bucket: str, authority: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority[0]))
    tls_server.make_bucket(bucket)
    it = S3Store(bucket, "p", endpoint=tls_server.endpoint, chunk_bytes=5 * 2**20)
    it.probe()
    it.put("view", memoryview(BODY))
    assert len(it.upload("k", memoryview(BODY))) == 3
    into = bytearray(len(BODY))
    it.read_into("k", 0, memoryview(into))
    found = it.get("view")
    assert into == BODY and found is not None and found.body == BODY
    etag = it.put_if_absent("small", b"1")
    with pytest.raises(AlreadyExists):
        it.put_if_absent("small", b"2")
    with pytest.raises(PreconditionFailed):
        it.put_if_match("small", b"3", f"{etag}no")
    with pytest.raises(AlreadyExists):
        it.upload("k", memoryview(BODY))


def test_an_unknown_ca_is_a_bad_configuration_that_names_the_variable(
    tls_server: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, _ = certificate(tmp_path)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(other))
    with pytest.raises(ConfigurationError, match="AWS_CA_BUNDLE") as untrusted:
        S3Store(bucket, endpoint=tls_server.endpoint).probe()
    assert tls_server.endpoint in str(untrusted.value)


@pytest.mark.parametrize("variable", ["AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"])
@pytest.mark.parametrize("made", [None, "no certificate"])
def test_a_ca_bundle_that_cannot_be_used_is_told_at_the_start(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, made: str | None
) -> None:
    path = tmp_path / "ca.pem"
    if made:
        path.write_text(made)
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    monkeypatch.setenv(variable, str(path))
    with pytest.raises(ConfigurationError, match=f"the CA bundle {path}"):
        open_store(f"s3://{bucket}/p", "https://127.0.0.1:9")
    open_store(f"s3://{bucket}/p", "http://127.0.0.1:9")  # no TLS, no bundle


def test_a_clock_that_is_wrong_has_its_sentence(
    server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real server judges the date; it is the SDK's clock that is moved."""
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=2)
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda remove_tzinfo=True: later)
    with pytest.raises(StoreDenied, match="the clocks of this node and the store differ too much"):
        S3Store(bucket, "p", endpoint=server.endpoint, tries=1).get("HEAD")


GRANTED = f"""<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>{s3server.ACCESS_KEY}</AccessKeyId>
<SecretAccessKey>{s3server.SECRET_KEY}</SecretAccessKey><SessionToken></SessionToken>
<Expiration>2100-01-01T00:00:00Z</Expiration></Credentials>
<AssumedRoleUser><Arn>arn:aws:sts::1:assumed-role/r/s</Arn><AssumedRoleId>i</AssumedRoleId></AssumedRoleUser>
</AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"""


class Sts:
    """What AWS STS answers to AssumeRoleWithWebIdentity; no STS server can be had here."""

    def __init__(self) -> None:
        self.answer = (200, GRANTED)
        self.asked: list[str] = []
        sts = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                sts.asked.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
                status, body = sts.answer
                self.send_response(status)
                self.send_header("Content-Type", "text/xml")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def refuses(self, status: int, code: str) -> None:
        self.answer = (
            status,
            "<ErrorResponse><Error><Type>Sender</Type>"
            f"<Code>{code}</Code><Message>by the stub</Message></Error></ErrorResponse>",
        )


@pytest.fixture
def sts(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sts]:
    """A pod with a web identity and no keys, and its STS."""
    it = Sts()
    thread = threading.Thread(target=it.http.serve_forever, name="sts", daemon=True)
    thread.start()
    (tmp_path / "token").write_text("a-jwt")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/r")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://127.0.0.1:{it.http.server_address[1]}")
    yield it
    it.http.shutdown()
    it.http.server_close()
    thread.join(timeout=10)


def test_a_web_identity_gets_its_keys_from_sts(sts: Sts, server: S3Server, bucket: str) -> None:
    """STS is a stub on loopback that answers as AWS documents it, but for an empty session token: the S3
    server is real, and versitygw refuses each request that carries one."""
    it = S3Store(bucket, "p", endpoint=server.endpoint)
    it.put("k", b"1")
    assert it.stat("k") is not None
    (asked,) = sts.asked
    assert "Action=AssumeRoleWithWebIdentity" in asked and "WebIdentityToken=a-jwt" in asked


@pytest.mark.parametrize(
    ("status", "code"),
    [(403, "AccessDenied"), (400, "InvalidIdentityToken")],
)
def test_a_role_that_sts_refuses_has_its_sentence(
    sts: Sts, server: S3Server, bucket: str, status: int, code: str
) -> None:
    """STS is a stub on loopback; the codes are those of the AWS documentation."""
    sts.refuses(status, code)
    it = S3Store(bucket, "p", endpoint=server.endpoint)
    for call in (lambda: it.get("HEAD"), lambda: it.stat("k"), lambda: it.upload("k", memoryview(b"1"))):
        with pytest.raises(StoreDenied, match="STS refused the role") as denied:
            call()
        assert code in str(denied.value) and "AWS_ROLE_ARN" in str(denied.value)


def test_an_sts_that_fails_is_unavailable(sts: Sts, server: S3Server, bucket: str) -> None:
    """STS is a stub on loopback."""
    sts.refuses(503, "ServiceUnavailable")
    with pytest.raises(StoreUnavailable, match="STS failed"):
        S3Store(bucket, "p", endpoint=server.endpoint, tries=1).get("HEAD")


def test_a_token_that_is_being_replaced_is_waited_for(
    sts: Sts, server: S3Server, bucket: str, tmp_path: Path
) -> None:
    """The store looks for its credentials again at each request."""
    it = S3Store(bucket, "p", endpoint=server.endpoint, tries=1)
    (tmp_path / "token").unlink()
    with pytest.raises(StoreUnavailable, match=r"no credentials for .* yet"):
        it.get("HEAD")
    (tmp_path / "token").write_text("an-old-one")
    sts.refuses(400, "ExpiredTokenException")
    with pytest.raises(StoreUnavailable, match="STS failed"):
        it.get("HEAD")
    sts.answer = (200, GRANTED)
    assert it.get("HEAD") is None


def test_a_token_file_in_a_folder_that_is_missing_has_its_sentence(
    sts: Sts, server: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").unlink()
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "typo" / "token"))
    it = S3Store(bucket, "p", endpoint=server.endpoint)
    for call in (lambda: it.get("HEAD"), lambda: it.stat("k"), lambda: it.upload("k", memoryview(b"1"))):
        with pytest.raises(StoreDenied, match="AWS_WEB_IDENTITY_TOKEN_FILE") as denied:
            call()
        assert str(tmp_path / "typo" / "token") in str(denied.value)
