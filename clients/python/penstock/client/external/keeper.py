"""The process between a worker and one external process: it ends the whole tree, whoever dies first.

Run as a script by an isolated interpreter, so it imports the standard library alone:

    python -I -S keeper.py JSON

JSON is an `Order`; the environment is the keeper's own. Descriptor `control` is one end of a pair of packet
sockets, the other is the worker's. What goes over it, in order, a JSON object a packet:

    command -> worker   {"listening": N}, with N listening sockets in its ancillary data: the process is
                        there, in its sandbox, and about to run the command
    keeper  -> worker   {"status": S} or {"signal": S}, "seconds" and "peak_bytes": the command has
                        ended, and so has every process that came of it
    worker  -> keeper   nothing; the end of the stream asks the keeper to end it all

**The tree.** The keeper is the subreaper of everything below it: a process whose parent is gone, also one
that called setsid, becomes its child. So the tree is at its end exactly when `waitpid` knows no child. The
command itself is bound to the keeper by PR_SET_PDEATHSIG, and a sandbox by its --die-with-parent.

**A worker that was killed** leaves the stream at its end: the keeper ends the tree, then removes the
folder and the cgroup, as the worker would have done.
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
# Of the shell: what could not be run.
CANNOT_RUN = 127
# Soft limit of open files, as programs are used to.
OPEN_FILES = 1024
# Between two looks at a tree whose members do not end at once, as they do not in the middle of a
# system call. There is no event to wait for: they may be nobody's children yet.
LOOK_SECONDS = 0.01

TYPE_CHECKING = False
if TYPE_CHECKING:
    # Not imported by the script itself: a keeper is started for every attempt.
    from typing import TypedDict

    class Order(TypedDict):
        """What a keeper is told."""

        control: int
        """Descriptor of its end of the socket pair."""
        command: str
        """For the shell."""
        folder: str
        """Where the command begins."""
        sandbox: list[str]
        """What goes before the command; empty for none."""
        listen: list[int]
        """Ports to listen at within the sandbox, for the worker to serve."""
        cgroups: list[str]
        """Folders of cgroups that the command is put into."""
        data_bytes: int
        """RLIMIT_DATA of each process; 0 for none."""
        remove: str
        """Folder that is removed where the worker cannot any more; empty for none."""
        root: str
        """What it is in, removed too once it is empty; empty for what was there before."""


libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    """Raises OSError."""
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def keep(order: Order) -> None:
    """Starts the command, waits for its end or the worker's word, and ends what came of it."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    control = socket.socket(fileno=order["control"])
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, noticed)
    # They are the worker's to act on.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    begun = time.monotonic()
    child = start(order)
    let_go_of_output()
    status = wait(child, control, woken)
    seconds = time.monotonic() - begun
    found = end_tree(order["cgroups"])
    status = found.get(child, status) if status is None else status
    report = {"seconds": seconds, "peak_bytes": peak_bytes()}
    if status is not None:
        code = os.waitstatus_to_exitcode(status)
        report |= {"status": code} if code >= 0 else {"signal": -code}
    try:
        control.send(json.dumps(report).encode())
    except OSError:
        clear_up(order)


def noticed(number: int, frame: object) -> None:
    """A handler, so that the kernel wakes `wait` by the descriptor."""


def start(order: Order) -> int:
    """Forks the command; returns its process id."""
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
        say(f"penstock: the process could not be started: {error}\n")
    os._exit(CANNOT_RUN)


def launch(order: Order) -> None:
    """In the sandbox, where there is one: opens what the worker serves, and becomes the command."""
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
    # The worker has raised its own; not every program bears that.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(OPEN_FILES, most), most))
    if order["data_bytes"]:
        limit = order["data_bytes"]
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execv("/bin/sh", ["/bin/sh", "-c", order["command"]])


def let_go_of_output() -> None:
    """Lets go of the output, so that it ends with the command and its children."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)


def wait(child: int, control: socket.socket, woken: int) -> int | None:
    """Reaps until the command has ended, and returns its wait status; None on the worker's word."""
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
    """Wait statuses of the children that have ended."""
    ended: dict[int, int] = {}
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = status
    return ended


def end_tree(cgroups: list[str]) -> dict[int, int]:
    """Kills every descendant until there is none; returns wait statuses."""
    ended: dict[int, int] = {}
    while True:
        kill_all(descendants() | members(cgroups))
        ended |= reap()
        try:
            # Without reaping: is there a child at all?
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            if not members(cgroups):
                return ended
        time.sleep(LOOK_SECONDS)


def kill_all(pids: set[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def descendants() -> set[int]:
    """Processes below this one, by /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError):
                # "PID (NAME) STATE PARENT ...": a name may hold anything.
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
    """Processes in the cgroups, also those that found a way out of the tree."""
    found: set[int] = set()
    for folder in cgroups:
        with suppress(OSError):
            found |= {int(pid) for pid in (Path(folder) / "cgroup.procs").read_text().split()}
    return found


def peak_bytes() -> int:
    """Resident memory of the largest process of the tree, at its largest."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def clear_up(order: Order) -> None:
    """In the place of a worker that is gone."""
    if order["remove"]:
        shutil.rmtree(order["remove"], ignore_errors=True)
    if order["root"]:
        with suppress(OSError):
            Path(order["root"]).rmdir()
    for folder in order["cgroups"]:
        with suppress(OSError):
            Path(folder).rmdir()


def say(text: str) -> None:
    with suppress(OSError):
        os.write(2, text.encode(errors="replace"))


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        launch(json.loads(sys.argv[2]))
    else:
        keep(json.loads(sys.argv[1]))
