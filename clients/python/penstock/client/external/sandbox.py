"""A sandbox for external processes: bubblewrap, if it runs on this machine.

The process runs in its own namespaces. It sees the following, under the same paths as outside:

| what | how |
|---|---|
| /usr /bin /sbin /lib* /opt /etc, the interpreter's folders | read only |
| the worker's start folder (if it holds no home or /tmp), paths from `--read` | read only |
| its own folder | writable; its HOME |
| /tmp, /dev/shm | private and empty; removed at the end |
| /proc | its own processes |
| the worker's own token and key | present, but unreadable |
| everything else, such as home folders and other attempts | hidden, wherever attempts are |

Its network is a private loopback interface, on which the worker serves what the attempt can reach.
With `--network host` it is the host's network. The process has no capabilities and can gain none.
The whole sandbox ends when its keeper ends.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PROBE_SECONDS = 20.0
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/etc")


class SandboxMissing(Exception):
    """No sandbox is available; the message explains why."""


@dataclass(frozen=True)
class Sandbox:
    program: str
    share_network: bool
    read: Sequence[Path]
    """Folders and files to show in addition to the system's."""
    hidden: Sequence[Path]
    """Files that are unreadable in the sandbox although their folder is visible."""
    root: Path
    """Folder of all attempts. It is empty inside the sandbox."""

    def command(self, folder: Path) -> list[str]:
        """Returns the prefix for a command that works in `folder` and can write there."""
        arguments = [self.program, "--unshare-all", "--die-with-parent", "--new-session"]
        arguments += ["--share-net"] if self.share_network else []
        arguments += ["--cap-drop", "ALL", "--proc", "/proc", "--dev", "/dev"]
        # These come first, so that later mounts below them stay visible.
        arguments += ["--tmpfs", "/tmp", "--tmpfs", "/dev/shm"]
        for path in _visible(self.read):
            arguments += [*_shown(path), *self._emptied(path)]
        if self.share_network:
            # /etc/resolv.conf is a link to this folder on many machines.
            arguments += ["--ro-bind-try", "/run/systemd/resolve", "/run/systemd/resolve"]
        arguments += ["--bind", str(folder), str(folder)]
        for path in self.hidden:
            if path.exists():
                arguments += ["--ro-bind", "/dev/null", str(path.resolve())]
        return [*arguments, "--chdir", str(folder), "--"]

    def _emptied(self, path: Path) -> list[str]:
        """Hides the attempts below a visible path. Paths below them that must be visible are
        mounted later."""
        if not self.root.resolve().is_relative_to(path.resolve()):
            return []
        return ["--tmpfs", str(path / self.root.resolve().relative_to(path.resolve()))]


def find_sandbox(
    root: Path, *, share_network: bool, read: Sequence[Path], hidden: Sequence[Path]
) -> Sandbox:
    """Returns a sandbox for attempts in `root`, after a probe there. Raises SandboxMissing."""
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxMissing("bwrap is not installed (Debian: bubblewrap)")
    sandbox = Sandbox(program, share_network, read, hidden, root)
    probe = [*sandbox.command(root), sys.executable, "-I", "-S", "-c", "pass"]
    try:
        done = subprocess.run(
            probe, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxMissing(f"{program} does not run here: {error}") from error
    if done.returncode != 0:
        said = done.stderr.strip() or f"exit status {done.returncode}"
        raise SandboxMissing(f"{program} does not run here: {said}")
    return sandbox


def _visible(read: Sequence[Path]) -> list[Path]:
    # The packages of penstock, which a checkout only links into the environment.
    own = Path(__file__).resolve().parents[2]
    prefixes = [sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(sys.executable).parent)]
    paths = [*(Path(path) for path in (*_SYSTEM, *prefixes)), own, *read]
    # Outer folders come first, because a mount hides earlier mounts below it.
    return sorted({path.absolute() for path in paths}, key=lambda path: (len(path.parts), path))


def _shown(path: Path) -> list[str]:
    """Shows a path as it is outside. A system folder that is a symbolic link stays one."""
    if path.is_symlink() and str(path) in _SYSTEM:
        return ["--symlink", str(path.readlink()), str(path)]
    return ["--ro-bind-try", str(path), str(path)]
