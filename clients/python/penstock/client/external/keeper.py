"""The process between a worker and one external process. It ends the whole process tree, even if
the worker dies.

It runs as a script in an isolated interpreter, so it imports only the standard library:

    python -I -S keeper.py JSON

JSON is an `Order`. The command inherits the keeper's environment. Descriptor `control` is one end
of a socket pair (SOCK_SEQPACKET); the worker holds the other. Each packet is a JSON object:

    command -> worker   {"listening": N}, with N listening sockets in its ancillary data: the process
                        runs in its sandbox and is about to execute the command
    keeper  -> worker   {"status": S} or {"signal": S}, "seconds" and "peak_bytes": the command and
                        all its descendants have ended
    worker  -> keeper   no packets; the end of the stream asks the keeper to end the tree

**The tree.** The keeper is the subreaper of all its descendants. A process whose parent has exited becomes
the keeper's child, even if it called setsid. So the tree has ended exactly when `waitpid` finds no child.
The command itself is bound to the keeper by PR_SET_PDEATHSIG, and a sandbox by its --die-with-parent.

**If the worker is killed**, its end of the stream closes. The keeper then ends the tree and removes
the folder and the cgroup, as the worker would have done.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
# Exit status by which shells report that a command could not be run.
CANNOT_RUN = 127
# Soft limit of open files that most programs expect.
OPEN_FILES = 1024
# Interval between scans of a tree that is still ending, for example in a system call. No event
# announces the end, because the processes may not be the keeper's children yet.
LOOK_SECONDS = 0.01

TYPE_CHECKING = False
if TYPE_CHECKING:
    # The script must not import this: a keeper starts for every attempt.
    from typing import TypedDict

    class Order(TypedDict):
        """What the keeper does, as its JSON argument."""

        control: int
        """Descriptor of the keeper's end of the socket pair."""
        command: str
        """Command line for the shell."""
        folder: str
        """Working directory of the command."""
        sandbox: list[str]
        """Command prefix that enters the sandbox; empty for none."""
        listen: list[int]
        """Ports to listen at in the sandbox. The worker serves them."""
        cgroups: list[str]
        """Folders of the cgroups that the command joins."""
        data_bytes: int
        """RLIMIT_DATA of each process in bytes; 0 for no limit."""
        remove: str
        """Folder to remove if the worker is gone; empty for none."""
        root: str
        """Parent of that folder, to remove once it is empty. Empty if it existed before the worker."""


libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def keep(order: Order) -> None:
    """Starts the command and waits until it ends or the worker asks for its end. Then ends its tree."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    control = socket.socket(fileno=order["control"])
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, noticed)
    # The worker handles these signals.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    begun = time.monotonic()
    child = start(order)
    let_go_of_output()
    status = wait(child, control, woken)
    seconds = time.monotonic() - begun
    found = end_tree(order["cgroups"])
    status = found.get(child, status) if status is None else status
    # Peak resident memory of the largest process in the tree.
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    report = {"seconds": seconds, "peak_bytes": peak}
    if status is not None:
        code = os.waitstatus_to_exitcode(status)
        report |= {"status": code} if code >= 0 else {"signal": -code}
    try:
        control.send(json.dumps(report).encode())
    except OSError:
        clear_up(order)


def noticed(number: int, frame: object) -> None:
    """With a handler installed, the kernel wakes `wait` through the wakeup descriptor."""


def start(order: Order) -> int:
    """Forks the command. Returns its process id."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(CANNOT_RUN)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        for folder in order["cgroups"]:
            (Path(folder) / "cgroup.procs").write_text(str(os.getpid()))
        os.set_inheritable(order["control"], True)
        launched = [sys.executable, "-I", "-S", __file__, "launch", json.dumps(order)]
        command = [*order["sandbox"], *launched]
        os.chdir(order["folder"])
        os.execv(command[0], command)
    except BaseException as error:
        text = f"penstock: the process could not be started: {error}\n"
        with suppress(OSError):
            os.write(2, text.encode(errors="replace"))
    os._exit(CANNOT_RUN)


def launch(order: Order) -> None:
    """Runs inside the sandbox, if any: opens the listening sockets, then executes the command."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    listening: list[socket.socket] = []
    for port in order["listen"]:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
        listening.append(listener)
    control = socket.socket(fileno=order["control"])
    control.set_inheritable(False)
    message = json.dumps({"listening": len(listening)}).encode()
    socket.send_fds(control, [message], [listener.fileno() for listener in listening])
    for listener in listening:
        listener.close()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The worker raised its own limit, which some programs cannot handle.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(OPEN_FILES, most), most))
    if order["data_bytes"]:
        limit = order["data_bytes"]
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execv("/bin/sh", ["/bin/sh", "-c", order["command"]])


def let_go_of_output() -> None:
    """Closes the output, so that it ends when the command and its children close it."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)


def wait(child: int, control: socket.socket, woken: int) -> int | None:
    """Reaps until the command has ended. Returns None if the worker asks for its end."""
    poll = select.poll()
    poll.register(control, select.POLLIN | select.POLLHUP)
    poll.register(woken, select.POLLIN)
    while True:
        ended = reap()
        if child in ended:
            return ended[child]
        ready = {descriptor for descriptor, _ in poll.poll()}
        if woken in ready:
            with suppress(BlockingIOError):
                os.read(woken, 4096)
        if control.fileno() in ready:
            return None


def reap() -> dict[int, int]:
    """Reaps the children that have ended. Returns their wait statuses."""
    ended: dict[int, int] = {}
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = status
    return ended


def end_tree(cgroups: list[str]) -> dict[int, int]:
    """Kills every descendant until none is left. Returns their wait statuses."""
    ended: dict[int, int] = {}
    while True:
        pids = descendants() | members(cgroups)
        # All stop first: otherwise a shell whose child is killed before it takes its next step.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        ended |= reap()
        try:
            # Checks whether any child is left, without reaping it.
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            if not members(cgroups):
                return ended
        time.sleep(LOOK_SECONDS)


def descendants() -> set[int]:
    """Returns all processes below this one, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError):
                # The format is "PID (NAME) STATE PARENT ...". NAME can contain anything.
                after = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                children.setdefault(int(after[1]), []).append(int(entry.name))
    found: set[int] = set()
    waiting = [os.getpid()]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            found.add(child)
            waiting.append(child)
    return found


def members(cgroups: list[str]) -> set[int]:
    """Returns the processes in the cgroups, including any that escaped the tree."""
    found: set[int] = set()
    for folder in cgroups:
        with suppress(OSError):
            found |= {int(pid) for pid in (Path(folder) / "cgroup.procs").read_text().split()}
    return found


def clear_up(order: Order) -> None:
    """Cleans up for a worker that is gone."""
    if order["remove"]:
        shutil.rmtree(order["remove"], ignore_errors=True)
    if order["root"]:
        with suppress(OSError):
            Path(order["root"]).rmdir()
    for folder in order["cgroups"]:
        with suppress(OSError):
            Path(folder).rmdir()


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        launch(json.loads(sys.argv[2]))
    else:
        keep(json.loads(sys.argv[1]))
