"""Hosts on one machine: Linux network namespaces that a bridge joins over links of a chosen rate."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from types import TracebackType

_TOOLS = ("unshare", "nsenter", "ip", "tc")
# first as an ordinary user may, then as root where user namespaces are switched off
_WAYS = (("--user", "--map-root-user"), ())


class RefusedError(Exception):
    """This machine makes no namespaces or no limited links; the message says which step failed and why."""


class Hosts:
    """``count`` hosts, each with a link of its own to one bridge; a context manager that leaves nothing behind.

    A namespace lives as long as a process is in it. The processes that hold ours read a pipe, so the kernel takes all
    of it away when this process ends, however it ends.

    Args:
        count: number of hosts, 1 to 250.

    Raises:
        RefusedError: a tool is missing, or the kernel refuses.

    Example:
        >>> with Hosts(2) as hosts:  # doctest: +SKIP
        ...     hosts.limit(100)
        ...     subprocess.run(hosts.inside(0, ["ping", "-c", "1", hosts.address(1)]))
    """

    interface = "eth0"
    is_loopback = False

    def __init__(self, count: int) -> None:
        if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
            raise RefusedError(f"not installed: {', '.join(missing)} (Debian: util-linux, iproute2)")
        self.count = count
        self._holders: list[subprocess.Popen[str]] = []
        self._enter: list[str] = []
        try:
            self._bridge = self._make_bridge()
            self._hosts = [self._make_host(host) for host in range(count)]
            # asked for once, so that a kernel without tbf is found out now
            self.limit(1000)
        except BaseException:
            self.close()
            raise

    def address(self, host: int) -> str:
        """IPv4 address of a host."""
        return f"10.77.0.{host + 1}"

    def inside(self, host: int, command: Sequence[str]) -> list[str]:
        """The command line that runs ``command`` on a host; the process it starts becomes the command."""
        return self._into(self._hosts[host], command)

    def limit(self, rate_mbit: float | None) -> None:
        """Limit every link in both directions to ``rate_mbit`` Mbit/s; None lifts the limit."""
        queue = ["noqueue"]
        if rate_mbit is not None:
            burst = str(burst_bytes(rate_mbit))
            queue = ["tbf", "rate", f"{round(rate_mbit * 1e6)}bit", "burst", burst, "latency", "100ms"]
        places = [(pid, self.interface) for pid in self._hosts]
        places += [(self._bridge, f"host{host}") for host in range(self.count)]
        for pid, device in places:
            self._run(pid, ["tc", "qdisc", "replace", "dev", device, "root", *queue])

    def close(self) -> None:
        """End the processes that hold the namespaces; the kernel removes those with all that is in them."""
        for holder in self._holders:
            holder.kill()
            holder.communicate()
        self._holders.clear()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _make_bridge(self) -> int:
        failures = []
        for way in _WAYS:
            try:
                bridge = self._hold(["unshare", *way, "--net"])
                self._enter = ["nsenter", *(("--user", "--preserve-credentials") if way else ()), "--net", "--target"]
                self._run(bridge, ["ip", "link", "add", "bridge", "type", "bridge"])
                self._run(bridge, ["ip", "link", "set", "bridge", "addrgenmode", "none", "up"])
                return bridge
            except RefusedError as refusal:
                failures.append(str(refusal))
        raise RefusedError("; ".join(dict.fromkeys(failures)))

    def _make_host(self, host: int) -> int:
        pid = self._hold(self._into(self._bridge, ["unshare", "--net"]))
        near, far = f"host{host}", ["peer", "name", self.interface, "netns", str(pid)]
        self._run(self._bridge, ["ip", "link", "add", near, "type", "veth", *far])
        # no IPv6 addresses: their announcements would be counted as ours
        self._run(self._bridge, ["ip", "link", "set", near, "addrgenmode", "none", "master", "bridge", "up"])
        self._run(pid, ["ip", "link", "set", "lo", "up"])
        self._run(pid, ["ip", "address", "add", f"{self.address(host)}/24", "dev", self.interface])
        self._run(pid, ["ip", "link", "set", self.interface, "addrgenmode", "none", "up"])
        return pid

    def _hold(self, command: list[str]) -> int:
        """Start a process in new namespaces; it stays until its input ends. Its id, once it is there."""
        holder = subprocess.Popen(
            [*command, "sh", "-c", "echo; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Ctrl-C at a terminal is for us alone
            start_new_session=True,
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        if not holder.stdout.readline():
            _, message = holder.communicate()
            raise RefusedError(f"{' '.join(command)}: {message.strip()}")
        return holder.pid

    def _into(self, pid: int, command: Sequence[str]) -> list[str]:
        return [*self._enter, str(pid), *command]

    def _run(self, pid: int, command: list[str]) -> None:
        done = subprocess.run(self._into(pid, command), capture_output=True, text=True, start_new_session=True)
        if done.returncode:
            raise RefusedError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


class Loopback:
    """The same face without namespaces: every host is this machine, and nothing is limited."""

    interface = "lo"
    is_loopback = True

    def __init__(self, count: int) -> None:
        self.count = count

    def address(self, host: int) -> str:
        return "127.0.0.1"

    def inside(self, host: int, command: Sequence[str]) -> list[str]:
        return list(command)

    def limit(self, rate_mbit: float | None) -> None:
        if rate_mbit is not None:
            raise ValueError(f"Loopback: cannot be limited, got {rate_mbit} Mbit/s")

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass


def burst_bytes(rate_mbit: float) -> int:
    """What a link lets through at once after a pause: one millisecond's worth, but no less than one large packet."""
    return max(1 << 16, round(rate_mbit * 1e6 / 8 / 1000))
