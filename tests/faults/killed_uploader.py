"""An uploader for tests that kill it: `killed_uploader.py HOST:PORT FILE COUNT`.

Sends the first COUNT of the messages pickled in FILE, prints that it has, and then neither ends nor
continues.
"""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc


def main() -> None:
    address, path, count = sys.argv[1:]
    messages: list[bytes] = pickle.loads(Path(path).read_bytes())

    def some() -> Iterator[bytes]:
        yield from messages[: int(count)]
        say("sent")
        threading.Event().wait()

    call = grpc.insecure_channel(address).stream_stream(
        "/penstock.v1.RolloutService/UpdateWeights",
        request_serializer=None,
        response_deserializer=None,
    )
    for _ in call(some()):
        say("answer")


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
