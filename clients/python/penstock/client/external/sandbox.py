"""What a process is locked into: bubblewrap, where it runs.

Within it the process is in namespaces of its own. It sees, under the paths of outside:

| what | how |
|---|---|
| /usr /bin /sbin /lib* /opt /etc, the interpreter's folders | read only |
| the folder the worker was started in, if no home or /tmp is in it, and what `--read` names | read only |
| its own folder | writable; its HOME |
| /tmp, /dev/shm | empty, its own; gone at the end |
| /proc | its own processes |
| the worker's own token and key | there, and not to be read |
| everything else, such as home folders and other attempts | not there, wherever attempts are |

Its network is a loopback of its own, at which the worker serves what the attempt may reach; with
`--network host` it is the host's. It has no capabilities and gains none. When its keeper ends, all of it
does.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

PROBE_SECONDS = 20.0
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/etc")


class SandboxMissing(Exception):
    """There is no sandbox here; the message says why."""


@dataclass(frozen=True)
class Sandbox:
    """How bubblewrap is called."""

    program: str
    share_network: bool = False
    read: Sequence[Path] = ()
    """Folders and files that are visible beside the system's."""
    hidden: Sequence[Path] = field(default_factory=tuple[Path, ...])
    """Files that cannot be read within it, though the folder they are in is visible."""
    root: Path | None = None
    """The folder of all attempts, which is empty within it."""

    def command(self, folder: Path, places: Sequence[Path]) -> list[str]:
        """What goes before a command that works in `folder` and may write to all of `places`."""
        arguments = [self.program, "--unshare-all", "--die-with-parent", "--new-session"]
        arguments += ["--share-net"] if self.share_network else []
        arguments += ["--cap-drop", "ALL", "--proc", "/proc", "--dev", "/dev"]
        # First, so that what is shown below them stays to be seen.
        arguments += ["--tmpfs", "/tmp", "--tmpfs", "/dev/shm"]
        for path in _visible(self.read):
            arguments += [*_shown(path), *self._emptied(path)]
        if self.share_network:
            # Where /etc/resolv.conf leads to on many machines.
            arguments += ["--ro-bind-try", "/run/systemd/resolve", "/run/systemd/resolve"]
        for place in places:
            arguments += ["--bind", str(place), str(place)]
        for path in self.hidden:
            if path.exists():
                arguments += ["--ro-bind", "/dev/null", str(path.resolve())]
        return [*arguments, "--chdir", str(folder), "--"]

    def _emptied(self, path: Path) -> list[str]:
        """Hides the attempts below a path that is shown. What is shown below them is mounted later."""
        if self.root is None or not self.root.resolve().is_relative_to(path.resolve()):
            return []
        return ["--tmpfs", str(path / self.root.resolve().relative_to(path.resolve()))]

    def check(self, folder: Path) -> None:
        """Runs something in it. Raises SandboxMissing."""
        probe = [*self.command(folder, [folder]), sys.executable, "-I", "-S", "-c", "pass"]
        try:
            done = subprocess.run(
                probe, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SandboxMissing(f"{self.program} does not run here: {error}") from error
        if done.returncode != 0:
            said = done.stderr.strip() or f"exit status {done.returncode}"
            raise SandboxMissing(f"{self.program} does not run here: {said}")


def find_sandbox(
    root: Path, *, share_network: bool, read: Sequence[Path], hidden: Sequence[Path]
) -> Sandbox:
    """The machine's sandbox for attempts in `root`, tried out there. Raises SandboxMissing."""
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxMissing("bwrap is not installed (Debian: bubblewrap)")
    sandbox = Sandbox(program, share_network, read, hidden, root)
    sandbox.check(root)
    return sandbox


def _visible(read: Sequence[Path]) -> list[Path]:
    own = Path(__file__).resolve().parent
    prefixes = [sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(sys.executable).parent)]
    paths = [*(Path(path) for path in (*_SYSTEM, *prefixes)), own, *read]
    # Outer folders first: a mount hides what was mounted below it.
    return sorted({path.absolute() for path in paths}, key=lambda path: (len(path.parts), path))


def _shown(path: Path) -> list[str]:
    """A path as it is outside: a link stays one where its target is among the system's folders."""
    if path.is_symlink() and str(path) in _SYSTEM:
        return ["--symlink", str(path.readlink()), str(path)]
    return ["--ro-bind-try", str(path), str(path)]
