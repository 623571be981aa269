"""Many nodes in one process, cheap but real to the head: SSH with keys, the first words, and the protocol of the agent.

python -m benchmarks.simulated --nodes 1000 --folder DIR    listens on 127.1.X.Y, writes ssh files and hosts into DIR

Each address is a node of its own. Its ranks do nothing but write lines and tell how far they are, as often as real ones
do: samples every two seconds, every ten once all are steady. What is asked on standard input, a word a line: `chat N`
(lines a second of all nodes together), `drop N` (so many nodes are cut off and cannot be reached), `back`.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import paramiko
from typing_extensions import override

from clusterctl.agent.protocol import command_messages, events, frames, run_files
from clusterctl.agent.protocol.command_messages import Command
from clusterctl.transport.ssh.underlying_stream import BufferedStream

LINE = b"step 1234567 loss 2.345678 lr 0.000123 tokens/s 123456 gpu 0 ok\n"
"""One line of output; where it stands in it follows from an offset, so that no node has to keep what it wrote."""
TICK = 0.1
BOOT = "boot-{}"


def address_of(number: int) -> str:
    """Return the address of a node."""
    return f"127.1.{number // 250}.{number % 250 + 1}"


@dataclass
class Followed:
    """What a controller follows of a node, over one connection."""

    send: Any
    run: str
    credit: int
    streams: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    seq: int = 0
    pace: float = 0.0
    due: float = 0.0


class Node:
    """One node: what it would keep on its disk, and what it answers."""

    def __init__(self, number: int) -> None:
        self.number, self.guard = number, threading.RLock()
        self.cut_off = False
        self.transport: paramiko.Transport | None = None
        self.name, self.epoch, self.ranks = "", 0, [0]
        self.journal: list[dict[str, Any]] = []
        self.samples = bytearray()
        self.written = dict.fromkeys(self.ranks, 0)
        self.running, self.began = False, time.monotonic()
        self.due = time.monotonic() + (number % 100) / 50
        self.followed: Followed | None = None

    # --- what is asked

    def take(self, frame: Any, send: Any) -> None:
        if isinstance(frame, frames.StreamData):
            return
        if "beat" in frame:
            boot = BOOT.format(self.number)
            send(
                frames.encode_message(
                    command_messages.make_heartbeat_answer(frame["beat"], time.time(), time.monotonic(), boot)
                )
            )
            return
        with self.guard:
            self.epoch = frame.get("epoch") or self.epoch
            result = getattr(self, f"_{frame['cmd']}", self._nothing)(frame["args"], send)
            if Command(frame["cmd"]) not in command_messages.COMMANDS_WITHOUT_ANSWER:
                send(frames.encode_message(command_messages.make_answer(frame["id"], result)))
            self.pump()

    def _nothing(self, _: dict[str, Any], __: Any) -> dict[str, Any]:
        return {}

    def _hello(self, _: dict[str, Any], __: Any) -> dict[str, Any]:
        address = {"interface": "eth0", "address": self._address(), "family": "inet", "up": True, "loopback": False}
        return {
            "protocol": command_messages.PROTOCOL_VERSION,
            "hostname": f"node-{self.number}",
            "boot_id": BOOT.format(self.number),
            "net_ns": f"net-{self.number}",
            "pid_ns": f"pid-{self.number}",
            "uid": 1000,
            "user": "bench",
            "home": "/home/bench",
            "state_root": "/home/bench/.local/state/clusterctl",
            "mono": time.monotonic(),
            "wall": time.time(),
            "cores": 8,
            "memory": 1 << 36,
            "gpus": {"count": 0, "indices": []},
            "addresses": [address],
            "rdma": False,
            "home_is_network": False,
        }

    def _address(self) -> str:
        return f"10.1.{self.number // 250}.{self.number % 250 + 1}"

    def _routes(self, asked: dict[str, Any], _: Any) -> dict[str, Any]:
        return {"routes": {a: {"source": self._address(), "interface": "eth0"} for a in asked["targets"]}}

    def _runs(self, _: dict[str, Any], __: Any) -> dict[str, Any]:
        return {"runs": []}

    def _prepare(self, asked: dict[str, Any], _: Any) -> dict[str, Any]:
        self.name, self.ranks = asked["node"], asked["ranks"]
        self.written = dict.fromkeys(self.ranks, 0)
        self._tell(events.Prepared(asked["attempt"], [29500] * len(asked["ports"])))
        return {"ports": [29500] * len(asked["ports"]), "run_dir": "/run", "python": "/usr/bin/python3"}

    def _start(self, asked: dict[str, Any], _: Any) -> dict[str, Any]:
        for worker in asked["workers"]:
            pid = 1000 + worker["local_rank"]
            self._tell(events.Started(asked["attempt"], worker["rank"], worker["local_rank"], pid, 100))
        self.running, self.began = True, time.monotonic()
        return {}

    def _stop(self, asked: dict[str, Any], _: Any) -> dict[str, Any]:
        if self.running:
            self.running = False
            self._tell(events.Stopping(0, asked["reason"], asked["grace"], []))
            now = time.monotonic()
            for rank in self.ranks:
                ended = events.Exited(0, rank, None, signal=15, stopped=True, earliest=now, latest=now)
                self._tell(ended)
            self._tell(events.Swept(0, 0, []))
        return {}

    def _finish(self, asked: dict[str, Any], _: Any) -> dict[str, Any]:
        if self.journal and self.journal[-1]["kind"] != "finished":
            self._tell(events.Finished(asked["state"], asked["exit_code"]))
        return {}

    def _status(self, _: dict[str, Any], __: Any) -> dict[str, Any]:
        workers = [{"rank": r, "pid": 1000, "start_time": 100, "alive": self.running} for r in self.ranks]
        state = "started" if self.running else "prepared"
        return {
            "supervisor": True,
            "epoch": self.epoch,
            "attempt": 0,
            "state": state,
            "seq": len(self.journal),
            "workers": workers,
            "remaining": [],
        }

    def _read(self, asked: dict[str, Any], _: Any) -> dict[str, Any]:
        data, size = self._content(asked["file"], asked["offset"], asked["length"])
        return {"offset": asked["offset"], "size": size, "first_valid": 0, "data": base64.b64encode(data).decode()}

    def _content(self, file: str, offset: int, length: int) -> tuple[bytes, int]:
        if file == run_files.SAMPLES_FILE:
            return bytes(self.samples[offset : offset + length]), len(self.samples)
        if file.endswith(".log"):
            size = self.written[int(file.rpartition("rank-")[2].removesuffix(".log"))]
            length = max(0, min(length, size - offset))
            start = offset % len(LINE)
            return (LINE * ((start + length) // len(LINE) + 1))[start : start + length], size
        if file == run_files.JOURNAL_FILE:
            data = b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in self.journal)
            return data[offset : offset + length], len(data)
        return b"", 0

    def _follow(self, asked: dict[str, Any], send: Any) -> dict[str, Any]:
        self.followed = Followed(
            send, asked["run"], asked["credit"], sent=dict(asked["cursors"]), seq=asked["seq"], pace=asked["pace"]
        )
        return {}

    def _credit(self, asked: dict[str, Any], _: Any) -> dict[str, Any]:
        if self.followed is not None:
            self.followed.credit += asked["bytes"]
        return {}

    # --- what is told

    def _tell(self, event: events.Event) -> None:
        stamp = events.Stamp(len(self.journal) + 1, time.time(), time.monotonic(), BOOT.format(self.number))
        self.journal.append(json.loads(events.encode_event(stamp, event)))

    def tick(self, now: float, lines: int) -> None:
        """Write what a rank and the sampler would have written since the last tick, and send it."""
        with self.guard:
            if not self.running:
                return
            for _ in range(lines):
                for rank in self.ranks:
                    self.written[rank] += len(LINE)
                self.pump()
            if now >= self.due:
                steady = now - self.began > 60.0
                self.due = now + (10.0 if steady else 2.0)
                self._sample(now, steady=steady)
                self.pump()

    def _sample(self, now: float, *, steady: bool) -> None:
        step = int(10 * (now - self.began))
        ages = {"age_s": 0.1, "progress_age_s": 0.1, "main_age_s": 0.1}
        inside = {"pid": 1000, "step": step, "source": "user", "beats": step, "phase": None, "frameworks": ["torch"]}
        inside |= {"seq": {"0": [step, step]}, "backend": "nccl", "timeout_s": 600.0, "facts": {}, "degraded": {}}
        rank = {"alive": True, "pid": 1000, "state": "S", "wchan": None, "procs": 2, "cpu_s": now, "read": 1}
        rank |= {"written": step, "output": 0, "inside": inside | ages}
        sample = {"t": time.time(), "m": now, "attempt": 0, "kind": "activity", "gpus": False, "steady": steady}
        sample["ranks"] = {str(number): rank for number in self.ranks}
        self.samples += json.dumps(sample, separators=(",", ":")).encode() + b"\n"

    def pump(self) -> None:
        """Send what a controller that follows has not had yet."""
        followed = self.followed
        if followed is None:
            return
        where = {"run": followed.run, "node": self.name}
        for record in self.journal[followed.seq :]:
            followed.send(frames.encode_message({"push": "event", **where, "event": record}))
        followed.seq = max(followed.seq, len(self.journal))
        if time.monotonic() < followed.due:
            # The next tick sends it, as an agent does once its pace allows.
            return
        for file in (run_files.SAMPLES_FILE, *(run_files.format_output_path(0, rank) for rank in self.ranks)):
            offset = followed.sent.get(file, 0)
            data, _ = self._content(file, offset, min(followed.credit, frames.CHUNK_BYTES))
            if not data:
                continue
            if file not in followed.streams:
                followed.streams[file] = command_messages.FIRST_AGENT_STREAM + len(followed.streams) + 1
                push = {"push": "stream", "stream": followed.streams[file], **where, "file": file}
                followed.send(frames.encode_message(push))
            followed.send(frames.encode_data(followed.streams[file], offset, data))
            followed.sent[file] = offset + len(data)
            followed.credit -= len(data)
            followed.due = time.monotonic() + followed.pace


class Server(paramiko.ServerInterface):
    """Lets everybody in who has a key, and gives a shell that is none."""

    def __init__(self, node: Node) -> None:
        self._node = node

    @override
    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    @override
    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return int(paramiko.common.AUTH_SUCCESSFUL)

    @override
    def check_channel_request(self, kind: str, chanid: int) -> int:
        return int(paramiko.common.OPEN_SUCCEEDED)

    @override
    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        threading.Thread(target=_shell, args=(self._node, channel), daemon=True).start()
        return True


def _shell(node: Node, channel: paramiko.Channel) -> None:
    script = b""
    while not script.endswith(b"; exit\n"):
        part = channel.recv(1 << 16)
        if not part:
            return
        script += part
    found = re.search(rb"nonce='(\w+)'", script)
    assert found is not None, "the script has a nonce"
    guard = threading.Lock()

    def send(frame: bytes) -> None:
        with guard:
            try:
                channel.sendall(frame)
            except (OSError, EOFError):
                channel.close()

    told = json.dumps({"python": "/usr/bin/python3", "version": "3.11.2"})
    send(f"\nclusterctl:{found[1].decode()}:have {told}\n".encode())
    decoder = frames.FrameDecoder()
    try:
        while data := channel.recv(1 << 16):
            for frame in decoder.feed(data):
                node.take(frame, send)
    finally:
        with node.guard:
            if node.followed is not None and node.followed.send is send:
                node.followed = None
        channel.get_transport().close()


class World:
    """All nodes, and what makes them tick."""

    def __init__(self, count: int, key: paramiko.PKey) -> None:
        self.nodes = [Node(number) for number in range(count)]
        self._key, self.rate = key, 0.0
        self._by_address = {address_of(node.number): node for node in self.nodes}

    def listen(self) -> int:
        """Accept connections from now on; return the port."""
        listener = socket.create_server(("0.0.0.0", 0), backlog=1024)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        threading.Thread(target=self._tick, daemon=True).start()
        return int(listener.getsockname()[1])

    def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            node = self._by_address.get(connection.getsockname()[0])
            if node is None or node.cut_off:
                connection.close()
                continue
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # The library would wake each connection ten times a second.
            node.transport = transport = paramiko.Transport(cast("str", BufferedStream(connection)))
            transport.banner_timeout = transport.handshake_timeout = transport.auth_timeout = 600
            transport.add_server_key(self._key)
            transport.start_server(threading.Event(), Server(node))

    def _tick(self) -> None:
        owed, last = 0.0, time.monotonic()
        while True:
            began = time.monotonic()
            # What a round takes longer than a tick is owed, too.
            owed, last = owed + self.rate * (began - last) / len(self.nodes), began
            lines, owed = int(owed), owed % 1
            for node in self.nodes:
                node.tick(began, lines)
            time.sleep(max(0.0, began + TICK - time.monotonic()))

    def obey(self, words: list[str]) -> None:
        """Do what is asked on standard input."""
        if words[0] == "chat":
            self.rate = float(words[1])
        elif words[0] == "drop":
            for node in self.nodes[-int(words[1]) :]:
                node.cut_off = True
                if node.transport is not None:
                    node.transport.close()
        elif words[0] == "back":
            for node in self.nodes:
                node.cut_off = False
        told = sum(sum(node.written.values()) for node in self.nodes) // len(LINE)
        print(json.dumps({"lines": told, "running": sum(node.running for node in self.nodes)}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    asked = parser.parse_args()
    threading.stack_size(256 << 10)
    sys.setswitchinterval(0.05)
    host_key, own_key = paramiko.ECDSAKey.generate(), paramiko.ECDSAKey.generate()
    own_key.write_private_key_file(str(asked.folder / "key"))
    world = World(asked.nodes, host_key)
    port = world.listen()
    lines = [f"[{address_of(n)}]:{port} {host_key.get_name()} {host_key.get_base64()}\n" for n in range(asked.nodes)]
    (asked.folder / "known_hosts").write_text("".join(lines))
    (asked.folder / "ssh_config").write_text(
        f"Host *\n  User bench\n  Port {port}\n  IdentityFile {asked.folder}/key\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {asked.folder}/known_hosts\n"
    )
    os.write(1, b"ready\n")
    for line in sys.stdin:
        world.obey(line.split())
    return 0


if __name__ == "__main__":
    sys.exit(main())
