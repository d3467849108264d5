"""A real store on this machine: a master and nodes, as processes of their own."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from kvtide.snapshot import Snapshot
from kvtide.tide import Tide

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent
os.environ["MC_LOG_LEVEL"] = "ERROR"  # before Mooncake is imported
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
NODE_BYTES = 64_000_000


def raise_loopback() -> None:
    """A new network namespace has a loopback device that is down."""
    try:
        socket.create_connection(("127.0.0.1", 1), 1).close()
    except ConnectionRefusedError:
        return
    except OSError:
        with socket.socket() as any_socket:
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Cluster:
    """A master that notices within seconds that a node has died, and nodes of 64 MiB each."""

    def __init__(self, folder: Path, node_count: int = 2) -> None:
        self.folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        self.metrics_port = free_port()
        self.node_ports = [free_port() for _ in range(node_count)]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.start_master()
        for number in range(node_count):
            self.start_node(number)
        self.wait_for_nodes(node_count)

    def wait_for_nodes(self, count: int) -> None:
        """Waits until the store has exactly so many nodes."""
        wanted = f"master_total_capacity_bytes {count * NODE_BYTES}\n"
        for _ in range(1500):
            with suppress(OSError):
                if wanted in self._metrics():
                    return
            time.sleep(0.02)
        raise TimeoutError(f"the store hasn't got {count} nodes: see {self.folder}")

    def object_count(self) -> int:
        """How many objects the store has."""
        (found,) = re.findall(r"^master_key_count (\d+)$", self._metrics(), re.MULTILINE)
        return int(found)

    def _metrics(self) -> str:
        with urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics") as answer:
            return str(answer.read().decode())

    def start_master(self) -> None:
        """Starts the master, the first time or again, and waits until it listens."""
        host, port = self.address.split(":")
        self._start(
            "master", "mooncake_master", f"--rpc_address={host}", f"--rpc_port={port}",
            f"--metrics_host={host}", f"--metrics_port={self.metrics_port}",
            "--client_ttl=2", "--default_kv_lease_ttl=1000",
        )  # fmt: skip
        for _ in range(500):
            try:
                socket.create_connection((host, int(port))).close()
                return
            except ConnectionRefusedError:
                time.sleep(0.02)
        raise TimeoutError((self.folder / "master.log").read_text())

    def start_node(self, number: int) -> None:
        """Starts a node, the first time or again. It joins the store a moment later."""
        self._start(
            f"node{number}", "mooncake_client", "--host=127.0.0.1",
            f"--port={self.node_ports[number]}", "--metadata_server=P2PHANDSHAKE",
            f"--master_server_address={self.address}", f"--global_segment_size={NODE_BYTES}",
        )  # fmt: skip

    def kill(self, name: str) -> None:
        """Ends a process by SIGKILL: `master`, `node0`, `node1`."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def stop(self, name: str) -> None:
        """Stops a process, which then neither answers nor closes its connections."""
        self.processes[name].send_signal(signal.SIGSTOP)

    def go_on(self, name: str) -> None:
        """Undoes `stop`."""
        self.processes[name].send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Ends all processes."""
        for name in tuple(self.processes):
            self.kill(name)

    def _start(self, name: str, *command: Any) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [BIN / command[0], *command[1:]], stdout=log, stderr=log
            )


def environment() -> dict[str, str]:
    """The environment of processes that use kvtide, Mooncake and its commands."""
    return os.environ | {"PYTHONPATH": str(ROOT / "src"), "PATH": f"{BIN}:{os.environ['PATH']}"}


def fill(tide: Tide, value: int) -> None:
    """Sets all bytes of a pool."""
    for buffer in tide.pool.buffers:
        buffer.fill_(value)


def is_filled(snapshot: Snapshot, value: int) -> bool:
    """Whether all bytes of a snapshot are `value`."""
    return all(not bytes(chunk).strip(bytes([value])) for chunk in snapshot.chunks)
