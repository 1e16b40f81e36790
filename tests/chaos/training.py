"""What both training scripts of the scenes share: model, data, and how they report to the player.

`script.py` trains by `Trainer`, `own_loop.py` by a custom loop. Both are random wherever a resume could go
wrong. They record the digests of the whole state after each step, and each write of HEAD, beside the store.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from spottrain.checkpoint.tree import Flattened

from tests.chaos import digests
from tests.chaos.order import Order, Teller, step_of

ORDER = Order.from_env(os.environ)
TELLER = Teller(ORDER, int(os.environ.get("RANK", "0")))
if TELLER.awaits("upload"):
    root = Path(__file__).parents[2]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), str(root)])
TELLER.reached("import")


class Augmented(torch.utils.data.Dataset[Any]):
    """The last batch of an epoch is a smaller one."""

    def __len__(self) -> int:
        return 56

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        TELLER.fetched()
        x = torch.randn(4, generator=torch.Generator().manual_seed(i))
        return x + 0.01 * torch.randn(4), x.sum()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.drop = torch.nn.Dropout(0.1)
        self.last = torch.nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.drop(self.norm(self.first(x)).relu())).squeeze(-1)


def leaf_of(tree: Flattened) -> digests.Leaf:
    def leaf(number: int) -> str:
        tensor = tree.leaves[number].tensor
        body = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return digests.tensor_digest(str(tensor.dtype).removeprefix("torch."), tensor.shape, body)

    return leaf


# --- the store, as far as it is asked by this process -------------------------------------------------
def watch_store(store: Any, step: Callable[[], int]) -> None:
    """Writes down each write of HEAD, and tells of the points between the parts of a commit."""
    put_if_absent, put_if_match, delete = store.put_if_absent, store.put_if_match, store.delete

    def absent(key: str, body: bytes) -> Any:
        if key == "HEAD":
            return _head(key, "", body, lambda: put_if_absent(key, body), step)
        if not key.endswith("manifest.json"):
            return put_if_absent(key, body)
        TELLER.reached("before manifest", step_of(key))
        answer = put_if_absent(key, body)
        TELLER.reached("before HEAD", step_of(key))
        return answer

    def match(key: str, body: bytes, etag: str) -> Any:
        if key == "HEAD":
            return _head(key, etag, body, lambda: put_if_match(key, body, etag), step)
        return put_if_match(key, body, etag)

    def removed(keys: Any) -> None:
        if any(key.endswith("manifest.json") for key in keys):
            TELLER.reached("pruning", step())
        delete(keys)

    store.put_if_absent, store.put_if_match, store.delete = absent, match, removed


def _head(key: str, etag: str, body: bytes, put: Callable[[], Any], step: Callable[[], int]) -> Any:
    text = bytes(body).decode()
    state = json.loads(text)["state"]
    TELLER.write("heads", {"at": time.monotonic(), "match": etag, "body": text})
    if state != "active":
        TELLER.reached("release", step())
    try:
        answer = put()
    except Exception as error:
        TELLER.write("heads", {"at": time.monotonic(), "match": etag, "error": type(error).__name__})
        raise
    TELLER.write("heads", {"at": time.monotonic(), "match": etag, "etag": answer})
    TELLER.reached("after release" if state != "active" else "after HEAD", step())
    return answer
