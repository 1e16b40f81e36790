"""Clouds' price services as a real HTTP server on loopback: EC2, AWS's price list, Azure's retail prices.

The shapes are those of the services' documentation; no reply was recorded from a cloud.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit
from xml.sax.saxutils import escape

Json = dict[str, Any]


@dataclass
class PriceStub:
    """What the services answer next, and what they were asked."""

    spot: list[tuple[str, str, str, str]] = field(default_factory=list)
    """Rows of EC2's history: instance type, zone, price, timestamp."""
    zones: dict[str, str] = field(default_factory=dict)
    """Zone types by zone."""
    products: dict[str, list[Json]] = field(default_factory=dict)
    """Products of AWS's price list by instance type."""
    azure: list[Json] = field(default_factory=list)
    """Items of Azure's retail prices."""
    page: int = 1000
    """How many rows a page has."""
    refuse: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Status and error code by AWS call."""
    azure_reply: tuple[int, bytes] | None = None
    """Sent to whoever asks Azure, in place of prices."""
    next_server: str = ""
    """Where Azure's next page is said to be, if not here."""
    asked: list[Json] = field(default_factory=list)
    """Parameters of each request, with its `Action`."""
    url: str = ""

    def calls(self) -> set[str]:
        return {request["Action"] for request in self.asked}


def product(
    usd: str, *, effective: str = "2026-11-01T00:00:00Z", unit: str = "Hrs", currency: str = "USD"
) -> Json:
    """A product of AWS's price list with one on-demand term."""
    rate = {"unit": unit, "beginRange": "0", "endRange": "Inf", "pricePerUnit": {currency: usd}}
    term = {"effectiveDate": effective, "priceDimensions": {"S.T.R": rate}}
    return {
        "product": {"productFamily": "Compute Instance", "attributes": {}},
        "terms": {"OnDemand": {"S.T": term}},
    }


def meter(name: str, price: float, **changes: Any) -> Json:
    """An item of Azure's retail prices: Linux, on-demand."""
    words = name.removeprefix("Standard_").replace("_", " ")
    return {
        "currencyCode": "USD",
        "tierMinimumUnits": 0.0,
        "retailPrice": price,
        "unitPrice": price,
        "armRegionName": "eastus",
        "effectiveStartDate": "2026-11-01T00:00:00Z",
        "meterName": words,
        "productName": "Virtual Machines NCads A100 v4 Series",
        "skuName": words,
        "serviceName": "Virtual Machines",
        "unitOfMeasure": "1 Hour",
        "type": "Consumption",
        "isPrimaryMeterRegion": True,
        "armSkuName": name,
    } | changes


@contextmanager
def price_stub() -> Iterator[PriceStub]:
    """The stub, served for the length of the block."""
    stub = PriceStub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            target = self.headers.get("X-Amz-Target", "")
            status, kind, reply = _price_list(stub, body) if target else _ec2(stub, body)
            self._reply(status, kind, reply)

        def do_GET(self) -> None:
            status, content = _azure(stub, self.path)
            self._reply(status, "application/json", content)

        def _reply(self, status: int, kind: str, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _page(rows: list[Any], token: str, size: int) -> tuple[list[Any], str]:
    first = int(token or 0)
    return rows[first : first + size], str(first + size) if first + size < len(rows) else ""


# --- AWS ------------------------------------------------------------------------------------------------
def _ec2(stub: PriceStub, body: str) -> tuple[int, str, bytes]:
    asked = {name: values[0] for name, values in parse_qs(body).items()}
    stub.asked.append(asked)
    action = asked["Action"]
    if action in stub.refuse:
        status, code = stub.refuse[action]
        error = f"<Error><Code>{code}</Code><Message>as the test wants it</Message></Error>"
        return status, "text/xml", f"<Response><Errors>{error}</Errors></Response>".encode()
    content = _spot(stub, asked) if action == "DescribeSpotPriceHistory" else _zones(stub, asked)
    return 200, "text/xml", f"<{action}Response>{content}</{action}Response>".encode()


def _spot(stub: PriceStub, asked: Json) -> str:
    rows = [row for row in stub.spot if row[0] == asked["InstanceType.1"]]
    some, token = _page(rows, asked.get("NextToken", ""), stub.page)
    items = "".join(
        f"<item><instanceType>{escape(name)}</instanceType><availabilityZone>{zone}</availabilityZone>"
        f"<spotPrice>{price}</spotPrice><timestamp>{time}</timestamp>"
        "<productDescription>Linux/UNIX</productDescription></item>"
        for name, zone, price, time in some
    )
    return f"<spotPriceHistorySet>{items}</spotPriceHistorySet><nextToken>{token}</nextToken>"


def _zones(stub: PriceStub, asked: Json) -> str:
    wanted = asked["Filter.1.Value.1"]
    items = "".join(
        f"<item><zoneName>{zone}</zoneName><zoneType>{kind}</zoneType></item>"
        for zone, kind in stub.zones.items()
        if kind == wanted
    )
    return f"<availabilityZoneInfo>{items}</availabilityZoneInfo>"


def _price_list(stub: PriceStub, body: str) -> tuple[int, str, bytes]:
    asked = json.loads(body)
    stub.asked.append(asked | {"Action": "GetProducts"})
    kind = "application/x-amz-json-1.1"
    if "GetProducts" in stub.refuse:
        status, code = stub.refuse["GetProducts"]
        return status, kind, json.dumps({"__type": code, "Message": "as the test wants it"}).encode()
    fields = {entry["Field"]: entry["Value"] for entry in asked["Filters"]}
    products = [json.dumps(each) for each in stub.products.get(fields["instanceType"], [])]
    some, token = _page(products, asked.get("NextToken", ""), stub.page)
    reply = {"FormatVersion": "aws_v1", "PriceList": some} | ({"NextToken": token} if token else {})
    return 200, kind, json.dumps(reply).encode()


# --- Azure ----------------------------------------------------------------------------------------------
def _azure(stub: PriceStub, path: str) -> tuple[int, bytes]:
    parts = urlsplit(path)
    asked = {name: values[0] for name, values in parse_qs(parts.query).items()}
    stub.asked.append(asked | {"Action": parts.path})
    if stub.azure_reply is not None:
        return stub.azure_reply
    condition = asked["$filter"]
    rows = [
        item
        for item in stub.azure
        if f"armSkuName eq '{item['armSkuName']}'" in condition
        and f"armRegionName eq '{item['armRegionName']}'" in condition
    ]
    some, token = _page(rows, asked.get("$skip", ""), stub.page)
    server = stub.next_server or stub.url
    link = f"{server}{parts.path}?{parts.query.partition('&$skip')[0]}&$skip={token}" if token else None
    return 200, json.dumps({"Items": some, "NextPageLink": link, "Count": len(some)}).encode()
