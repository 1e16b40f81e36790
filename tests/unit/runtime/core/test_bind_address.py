"""With an address of its own, each pod of one machine listens on the same ports."""

from __future__ import annotations

import json
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from spottrain.contract import BIND_ADDRESS, Env, bind_address
from spottrain.core.progress import ProgressBoard, serve
from spottrain.core.run_config import RunConfig
from spottrain.distributed.control_channel import connect
from spottrain.distributed.world import World
from spottrain.errors import ConfigurationError
from spottrain.lifecycle.topology import LOOPBACK, Gang, meet, reserve_port
from torch._C._distributed_c10d import HashStore

from tests.support.ports import free_port
from tests.support.sentences import Told

PODS = ("127.64.0.1", "127.64.0.2")
SECONDS = 20.0


def env_of(address: str, **more: str) -> dict[str, str]:
    return {BIND_ADDRESS: address, Env.JOB_UID: "uid", Env.ATTEMPT: "1"} | more


def test_without_the_variable_the_default_holds() -> None:
    assert bind_address({}) == bind_address({BIND_ADDRESS: ""}) == ""
    assert bind_address(env_of("fd00::7")) == "fd00::7"


@pytest.mark.parametrize("text", ["localhost", "10.0.0.256", "10.0.0.5:9477", "0.0.0.0", "::"])
def test_what_is_not_one_address_is_a_sentence(text: str, told: Told) -> None:
    for read in (lambda env: RunConfig.from_env(env, script="x.py"), lambda env: gang_of(env)):
        with pytest.raises(ConfigurationError) as refused:
            read(env_of(text))
        told(refused)


def gang_of(env: dict[str, str]) -> Gang:
    return Gang.from_env(env, "2", lambda: 1)


def test_two_pods_serve_progress_on_the_same_port() -> None:
    port = 0
    for attempt, address in enumerate(PODS, 1):
        board = ProgressBoard()
        board.update(attempt=attempt)
        port = serve(board, port, host=RunConfig.from_env(env_of(address), script="x.py").bind_address) or 0
    for attempt, address in enumerate(PODS, 1):
        with urllib.request.urlopen(f"http://{address}:{port}/progress", timeout=SECONDS) as reply:
            assert json.load(reply)["attempt"] == attempt


def test_an_address_of_another_machine_is_said_and_the_training_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert serve(ProgressBoard(), 0, host="192.0.2.1") is None
    assert f"{BIND_ADDRESS}=192.0.2.1" in capsys.readouterr().out


def test_the_ranks_of_one_pod_meet_at_its_address() -> None:
    gang = gang_of(env_of(PODS[0]))
    with reserve_port(gang.bind) as reserved:
        assert reserved.getsockname()[0] == PODS[0]
    assert gang.env_of(0, 1)["MASTER_ADDR"] == PODS[0]
    assert gang_of(env_of("")).env_of(0, 1)["MASTER_ADDR"] == LOOPBACK


def test_two_gangs_meet_on_the_same_port_of_different_addresses() -> None:
    port, stop = free_port(), threading.Event()

    def come(first: str, index: int) -> bool:
        own = first if index == 0 else "127.64.1.1"
        place = {Env.WORKERS: "2", Env.WORKER_INDEX: str(index), Env.RENDEZVOUS: f"{first}:{port}"}
        env = env_of(own, **place)
        return meet(Gang.from_env(env, "1", lambda: 1), env, stop.is_set)

    with ThreadPoolExecutor(4) as pool:
        pods = [pool.submit(come, first, index) for first in PODS for index in (0, 1)]
        try:
            assert all(pod.result(timeout=SECONDS) for pod in pods)
        finally:
            stop.set()


def test_a_first_pod_that_cannot_listen_is_a_sentence(told: Told) -> None:
    gang = Gang(workers=2, host="192.0.2.1", port=29500, bind="192.0.2.1")
    told(lambda: meet(gang, env_of(gang.bind), lambda: True))


def test_the_control_channel_is_at_the_address_of_rank_0() -> None:
    store = HashStore()

    def join(rank: int) -> tuple[str, int]:
        world = World(rank=rank, size=2, local_rank=rank, local_size=2)
        control = connect(world, host="nowhere.invalid", bind=PODS[rank], store=store, timeout=SECONDS)
        peer = next(iter(control._links.values())).socket
        address = (peer.getsockname() if rank == 0 else peer.getpeername())[0]
        control.close(timeout=SECONDS)
        return address, rank

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(join, (0, 1))) == [(PODS[0], 0), (PODS[0], 1)]
