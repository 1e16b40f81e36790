"""Messages between ranks over real connections, all in one process: nothing is lost, no wait is for ever."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from spottrain.distributed.channel import join
from spottrain.distributed.control_channel import ADDRESS_KEY, ControlChannel, connect
from spottrain.distributed.world import World
from spottrain.errors import PeerLost
from torch._C._distributed_c10d import HashStore

from tests.support.sentences import Told

SECONDS = 20.0
"""For what must come at once, on a busy machine."""


def world(rank: int, size: int) -> World:
    return World(rank=rank, size=size, local_rank=rank, local_size=size)


def connected(
    size: int, store: HashStore, on_lost: Callable[[PeerLost], None] = lambda lost: None
) -> list[ControlChannel]:
    def join(rank: int) -> ControlChannel:
        return connect(world(rank, size), host="127.0.0.1", store=store, timeout=SECONDS, on_lost=on_lost)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(join, range(size)))


@contextlib.contextmanager
def gang(
    size: int, on_lost: Callable[[PeerLost], None] = lambda lost: None
) -> Iterator[list[ControlChannel]]:
    controls = connected(size, HashStore(), on_lost)
    yield controls
    for control in reversed(controls):  # rank 0 leaves last
        control.close(timeout=SECONDS)


def vanish(control: ControlChannel) -> None:
    """What the others see of a rank that was killed."""
    for link in control._links.values():
        link.shut()


def wait_for(what: Callable[[], object]) -> None:
    until = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < until
        time.sleep(0.01)


# --- messages -------------------------------------------------------------------------------------------
def test_what_rank_0_says_every_rank_hears_in_the_order_of_saying() -> None:
    with gang(3) as controls:
        for number in range(50):
            controls[0].broadcast("order", number)
            controls[0].broadcast("key", f"k{number}")
        for control in controls[1:]:
            assert [control.receive("key", SECONDS) for _ in range(50)] == [f"k{n}" for n in range(50)]
            assert [control.receive("order", SECONDS) for _ in range(50)] == [*range(50)]


def test_who_waits_hears_what_is_said_later() -> None:
    with gang(2) as controls, ThreadPoolExecutor(1) as pool:
        heard = pool.submit(controls[1].receive, "key", SECONDS)
        controls[0].broadcast("key", "later")
        assert heard.result(SECONDS) == "later"
        assert controls[1].receive("key", 0.05) is None, "and no longer than it may"


def test_rank_0_collects_every_ranks_part_by_rank() -> None:
    with gang(3) as controls:
        for control in controls:
            control.send_to_leader("save-7", f"of {control.world.rank}")
        assert controls[0].collect("save-7", SECONDS) == ["of 0", "of 1", "of 2"]
        assert controls[0].collect("save-7", 0.01) == [None] * 3


def test_of_a_rank_that_is_late_rank_0_has_none() -> None:
    with gang(3) as controls:
        controls[0].send_to_leader("save", "")
        controls[2].send_to_leader("save", "of 2")
        assert controls[0].collect("save", 0.2) == ["", None, "of 2"]


def test_a_large_message_arrives_whole() -> None:
    report = [os.urandom(1_500).hex() for _ in range(1000)]
    with gang(2) as controls:
        controls[1].send_to_leader("save", report)
        controls[0].send_to_leader("save", "")
        assert controls[0].collect("save", SECONDS)[1] == report


def test_one_thread_waits_while_another_speaks() -> None:
    with gang(2) as controls, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(controls[1].receive, "order", SECONDS)
        controls[1].send_to_leader("stop", "now")
        controls[0].send_to_leader("stop", "")
        assert controls[0].collect("stop", SECONDS) == ["", "now"]
        assert not waiting.done()
        controls[0].broadcast("order", "on")
        assert waiting.result(SECONDS) == "on"


def test_what_has_arrived_is_taken_once_in_the_order_of_sending_without_a_wait() -> None:
    with gang(3) as controls:
        assert controls[0].take("stop") == []
        controls[2].send_to_leader("stop", "early")
        controls[2].send_to_leader("stop", "late")
        controls[1].send_to_leader("other", "")
        wait_for(lambda: len(controls[0]._inbox.get(("stop", 2), ())) == 2)
        assert controls[0].take("stop") == [(2, "early"), (2, "late")]
        assert controls[0].take("stop") == []


def test_all_ranks_get_the_parts_of_all() -> None:
    with gang(3) as controls, ThreadPoolExecutor(3) as pool:
        parts = pool.map(lambda it: it.all_gather("restored", f"of {it.world.rank}"), controls)
        assert list(parts) == [["of 0", "of 1", "of 2"]] * 3
    assert ControlChannel(world(0, 1)).all_gather("restored", "alone") == ["alone"]


# --- loss -----------------------------------------------------------------------------------------------
def test_when_rank_0_is_gone_the_others_waits_end_in_a_sentence(told: Told) -> None:
    with gang(3) as controls, ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(control.receive, "order") for control in controls[1:]]
        vanish(controls[0])
        for wait in waits:
            with pytest.raises(PeerLost) as refused:
                wait.result(SECONDS)
            told(refused)


def test_of_a_rank_that_has_ended_no_part_is_waited_for(told: Told) -> None:
    with gang(2) as controls:
        controls[1].close(timeout=SECONDS)
        told(lambda: controls[0].all_gather("restored", ""))


def test_what_rank_0_said_before_it_went_is_heard() -> None:
    with gang(2) as controls:
        controls[0].broadcast("order", "last words")
        vanish(controls[0])
        wait_for(lambda: controls[1].lost)
        assert controls[1].receive("order") == "last words"
        with pytest.raises(PeerLost):
            controls[1].receive("order")


def test_rank_0_does_not_wait_for_the_part_of_a_rank_that_is_gone(told: Told) -> None:
    with gang(3) as controls, ThreadPoolExecutor(1) as pool:
        controls[0].send_to_leader("save", "of 0")
        controls[1].send_to_leader("save", "of 1")
        collected = pool.submit(controls[0].collect, "save", 1e9)
        vanish(controls[2])
        assert collected.result(SECONDS) == ["of 0", "of 1", None]
        assert controls[0].gone == [2]
        told(lambda: controls[0].broadcast("order", ""))


def test_who_hands_over_a_part_learns_that_rank_0_is_gone(told: Told) -> None:
    with gang(2) as controls:
        vanish(controls[0])
        with pytest.raises(PeerLost) as refused:
            for _ in range(1000):
                controls[1].send_to_leader("save", "x" * 10_000)
        told(refused)


def test_a_loss_is_told_once_to_whoever_wants_to_know() -> None:
    told: list[str] = []
    with gang(3, on_lost=lambda lost: told.append(str(lost))) as controls:
        vanish(controls[0])
        wait_for(lambda: len(told) >= 3)  # rank 0's own ends are cut too, and it says so once
    assert len(told) == 3


def test_noise_ends_the_connection_and_not_the_process() -> None:
    with gang(2) as controls:
        controls[0].send_to_leader("save", "")
        controls[1]._links[0].socket.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        wait_for(lambda: controls[0].lost)
        assert controls[0].collect("save", SECONDS) == ["", None]


# --- leaving --------------------------------------------------------------------------------------------
def test_who_leaves_with_a_word_is_not_lost() -> None:
    with gang(3) as controls:
        controls[2].send_to_leader("save", "of 2")
        controls[2].close()
        controls[2].close()
        controls[0].send_to_leader("save", "")
        controls[1].send_to_leader("save", "")
        assert controls[0].collect("save", SECONDS) == ["", "", "of 2"]
        wait_for(lambda: controls[0].gone == [2])
        controls[0].broadcast("order", "on")
        assert controls[1].receive("order", SECONDS) == "on"
        assert controls[0].lost is None


def test_rank_0_leaves_last() -> None:
    with gang(2) as controls, ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(controls[0].close, SECONDS)
        with pytest.raises(TimeoutError):
            leaving.result(0.2)
        controls[1].close()
        leaving.result(SECONDS)


def test_rank_0_does_not_wait_for_ever_to_leave(told: Told) -> None:
    with gang(2) as controls:
        controls[0].close(timeout=0.1)
        told(lambda: controls[1].receive("order", SECONDS))
        assert controls[1].lost is None


# --- meeting --------------------------------------------------------------------------------------------
def test_the_same_ranks_can_meet_again() -> None:
    store = HashStore()
    for _ in range(2):
        controls = connected(2, store)
        controls[0].broadcast("key", "v")
        assert controls[1].receive("key", SECONDS) == "v"
        for control in reversed(controls):
            control.close()
    assert not store.check([ADDRESS_KEY])


def test_ranks_that_do_not_come_are_named(told: Told) -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        leader = pool.submit(connect, world(0, 4), host="127.0.0.1", store=store, timeout=1.0)
        follower = pool.submit(connect, world(2, 4), host="127.0.0.1", store=store, timeout=SECONDS)
        told(lambda: leader.result(SECONDS))
        told(lambda: follower.result(SECONDS))


def test_a_rank_that_goes_before_all_are_there_ends_the_wait_at_once() -> None:
    store, failed = HashStore(), []

    def lead() -> None:
        try:
            connect(world(0, 3), host="127.0.0.1", store=store, timeout=10 * SECONDS)
        except PeerLost as error:
            failed.append(str(error))

    leader = threading.Thread(target=lead, daemon=True)
    leader.start()
    address = json.loads(store.get(ADDRESS_KEY))
    with socket.create_connection(("127.0.0.1", address["port"]), timeout=SECONDS) as connection:
        # It goes after its hello, before the leader's welcome.
        join(connection, address["token"].encode(), 1, lambda: False)
    leader.join(SECONDS)
    assert failed == ["rank 1 had connected to rank 0 and is gone; its own log says why"]


def test_a_host_that_is_not_rank_0s_is_named(told: Told) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store = HashStore()
    store.set(ADDRESS_KEY, json.dumps({"port": port, "token": ""}))
    told(lambda: connect(world(1, 2), host="127.0.0.1", store=store, timeout=0.3))
