"""What the chart's uninstall hook does to trainer pods."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from spottrain_operator import names
from spottrain_operator.cluster import Json
from spottrain_operator.errors import ApiError
from spottrain_operator.uninstall import uninstall

OURS = [names.OUTCOME_FINALIZER, "theirs/finalizer"]


def pod(name: str, finalizers: list[str] | None) -> Json:
    meta: Json = {"namespace": "ml", "name": name, "uid": f"uid-{name}"}
    return {"metadata": meta if finalizers is None else meta | {"finalizers": finalizers}}


@dataclass
class FakePods:
    items: list[Json] = field(default_factory=list)
    answers: dict[str, int] = field(default_factory=dict)
    """Status with which the release of a pod is refused."""
    list_error: int = 0
    asked: tuple[str, ...] | None = None
    released: set[str] = field(default_factory=set)

    async def every(self, kind: str, namespaces: tuple[str, ...]) -> AsyncIterator[Json]:
        assert kind == "pods"
        self.asked = namespaces
        if self.list_error:
            raise ApiError(self.list_error, "no")
        for item in self.items:
            yield item

    async def release_pod(self, namespace: str, name: str, *, uid: str) -> None:
        assert (namespace, uid) == ("ml", f"uid-{name}")
        if status := self.answers.get(name):
            raise ApiError(status, "the server's words")
        self.released.add(name)


async def test_only_pods_that_carry_our_finalizer_are_touched() -> None:
    pods = FakePods([pod("a", OURS), pod("b", ["theirs/finalizer"]), pod("c", None)])
    assert await uninstall(pods, ("ml",)) == 0
    assert (pods.asked, pods.released) == (("ml",), {"a"})


async def test_thousands_are_freed() -> None:
    pods = FakePods([pod(f"p{n}", OURS) for n in range(3000)])
    assert await uninstall(pods, ()) == 0
    assert len(pods.released) == 3000


async def test_a_pod_that_is_gone_meanwhile_is_no_error() -> None:
    pods = FakePods([pod("a", OURS), pod("b", OURS)], {"a": 404})
    assert await uninstall(pods, ()) == 0


async def test_a_pod_that_stays_held_is_named_and_does_not_stop_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pods = FakePods([pod("a", OURS), pod("b", OURS)], {"a": 403})
    assert await uninstall(pods, ()) == 1
    assert pods.released == {"b"}
    said = capsys.readouterr()
    assert said.out == ("2 trainer pods carry the finalizer spottrain.io/outcome\ntaken off 1 of them\n")
    assert said.err == "still held: ml/a: the server's words\n"


async def test_a_list_that_is_refused_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert await uninstall(FakePods(list_error=403), ()) == 1
    assert capsys.readouterr().err == "gave up, run it again: ApiError no\n"
