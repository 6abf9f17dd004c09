"""`penstock journal` lists and exports exactly what was answered, and changes nothing."""

from __future__ import annotations

import asyncio
import fcntl
import json
import math
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
from click.testing import CliRunner, Result

from penstock.cli.__main__ import main
from penstock.server.journal.disk.files import Reading, find_files, read_records
from penstock.server.journal.disk.reading import find_writer, open_stored
from penstock.server.journal.disk.segment import (
    FIRST_HEADER,
    FIRST_MAGIC,
    HEADER,
    NOWHERE,
    Place,
    SegmentCorrupt,
    SegmentWriter,
)
from penstock.server.journal.records import tasks_known
from penstock.wire.frames import FRAME, MARK, frame_length
from penstock.wire.messages import JournalRecord
from tests.server.groups.test_recovery import killed, lease, on_disk, submit, work
from tests.support.harness import (
    CompleteTrajectoryRequest,
    Exchange,
    Harness,
    Turn,
    hello,
    sampling,
    serve,
)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, ("journal", *map(str, arguments)))


def listed(folder: Path) -> dict[str, Any]:
    shown = invoke("list", folder, "--json")
    assert shown.exit_code == 0, shown.output
    return json.loads(shown.output)


def verified(folder: Path) -> tuple[int, dict[str, Any]]:
    shown = invoke("verify", folder, "--json")
    return shown.exit_code, json.loads(shown.output)


def exported(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    out = folder.parent / f"out-{len(list(folder.parent.iterdir()))}.jsonl"
    shown = invoke("export", folder, out, *arguments)
    assert shown.exit_code == 0, shown.output
    return [json.loads(line) for line in out.read_text().splitlines()]


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.iterdir()}


def running_segment(folder: Path) -> Path:
    return max(folder.glob("*.log"))


OUTCOME: dict[str, Any] = {
    "reward": 0.625,
    "metrics": {"format": 1.0, "length": -2.5},
    "turn_rewards": [0.125, 0.5],
}


async def two_turns(harness: Harness, given: Any) -> list[Turn]:
    """Run two turns with an observation in between, and report an outcome with every field set."""
    first = await harness.generate(given.trajectory_id, sampling_params=sampling(8))
    second = await harness.resume(given.trajectory_id, text="no")
    request = CompleteTrajectoryRequest(trajectory_id=given.trajectory_id)
    request.outcome.reward = OUTCOME["reward"]
    request.outcome.metrics.update(OUTCOME["metrics"])
    request.outcome.turn_rewards.extend(OUTCOME["turn_rewards"])
    request.outcome.metadata.update({"why": ["é", 1, None, {"deep": True}], "pi": 3.25})
    request.outcome.metadata["odd"] = math.inf
    await harness.wire.CompleteTrajectory(request)
    return [first, second]


async def fill(harness: Harness) -> Exchange:
    """Create four tasks: one waits, one is in progress, one is finished,
    and one was used by step 3."""
    await submit(harness, "used", "finished", "begun", "waits", data_source="sums")
    call, leases = await lease(harness, 5)
    # Otherwise the stream would lease more attempts as these finish.
    call.cancel()
    for given in leases[:2]:
        await work(harness, given, 1.0)
    exchange = await hello(harness.wire)
    exchange.send(demand={"group_count": 1})
    delivery = await exchange.receive("delivery")
    exchange.send(receipt={"delivery_ids": [delivery.delivery_id], "step": 3})
    await two_turns(harness, leases[2])
    await harness.generate(leases[3].trajectory_id, sampling_params=sampling(8))
    await harness.fail(leases[3].trajectory_id)
    await harness.generate(leases[4].trajectory_id, sampling_params=sampling(8))
    await exchange_settled(harness)
    return exchange


async def exchange_settled(harness: Harness) -> None:
    """Wait until the receipt is in the journal."""
    async with asyncio.timeout(20):
        while not any(group.step for group in harness.serving.buffer.groups):
            await asyncio.sleep(0.01)
    await harness.serving.journal.append(())


@pytest.fixture
async def filled(tmp_path: Path) -> Path:
    """The journal folder of a killed server."""
    async with on_disk(tmp_path / "a", "leases.max_attempts=1") as harness:
        await fill(harness)
        return killed(tmp_path / "a") / "journal"


async def test_it_lists_what_a_server_would_start_from(filled: Path) -> None:
    before = contents(filled)
    found = listed(filled)
    assert (found["writer"], found["starts"], found["run_id"]) == (None, 1, "run")
    assert [task["task_id"] for task in found["tasks_waiting"]] == ["waits"]
    (group,) = found["groups_under_way"]
    assert (group["task_id"], group["group_size"], group["purpose"]) == ("begun", 2, "train")
    assert [attempt["leased"] for attempt in group["attempts"]].count(True) >= 1
    (opened,) = found["open_trajectories"]
    assert (opened["turn_count"], opened["token_count"]) == (1, 11)
    assert opened["group_id"] == group["group_id"]
    finished = {line["task_id"]: line for line in found["finished_groups"]}
    assert set(finished) == {"used", "finished"}
    assert (finished["used"]["state"], finished["used"]["step"]) == ("used", 3)
    assert (finished["finished"]["state"], finished["finished"]["step"]) == ("waiting", None)
    assert finished["used"]["token_count"] == 2 * 11
    assert finished["used"]["newest_weight_version"] == 0
    assert contents(filled) == before


async def test_it_lists_in_lines_for_a_pipe_and_in_tables_for_a_terminal(filled: Path) -> None:
    lines = invoke("list", filled).output.splitlines()
    assert "1 tasks waiting" in lines and "2 finished groups" in lines
    assert any(line.startswith("waiting waits purpose=train attempts=2") for line in lines)
    assert any(line.startswith("finished ") and "state=used step=3" in line for line in lines)
    parent, child = pty.openpty()
    command = (sys.executable, "-m", "penstock.cli", "journal", "list", str(filled))
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "160"}
    process = await asyncio.create_subprocess_exec(*command, stdout=child, env=environment)
    os.close(child)
    assert await process.wait() == 0
    shown = os.read(parent, 1 << 20).decode()
    os.close(parent)
    assert "2 finished groups" in shown and "━" in shown


async def test_the_exported_values_are_what_was_completed(tmp_path: Path) -> None:
    async with on_disk(tmp_path / "a") as harness:
        await submit(harness, "x", data_source="sums")
        _, leases = await lease(harness, 2)
        first, second = await two_turns(harness, leases[0])
        await work(harness, leases[1], 0.5)
        folder = killed(tmp_path / "a") / "journal"
    rows = exported(folder)
    assert [row["sample_index"] for row in rows] == [0, 1]
    row = rows[0]
    context = len(row["token_ids"]) - 3 - len(first.tokens) - len(second.tokens)
    observed = [None] * context
    assert row["token_ids"][3:11] == first.tokens
    assert row["token_ids"][-len(second.tokens) :] == second.tokens
    assert row["logprobs"] == [None] * 3 + first.logprobs + observed + second.logprobs
    expected = [False] * 3 + [True] * 8 + [False] * context + [True] * len(second.tokens)
    assert row["loss_mask"] == expected
    assert row["weight_versions"] == [0 if mask else None for mask in expected]
    assert row["turn_indices"] == [0] * 11 + [1] * (len(expected) - 11)
    assert row["reward"] == OUTCOME["reward"] and row["failure_reason"] is None
    assert row["metrics"] == OUTCOME["metrics"] and row["turn_rewards"] == [0.125, 0.5]
    assert row["metadata"] == {
        "odd": None,
        "pi": 3.25,
        "why": ["é", 1, None, {"deep": True}],
    }
    assert (row["task_id"], row["data_source"], row["data_index"]) == ("x", "sums", 0)
    assert (row["turn_count"], row["finish_reason"]) == (2, "length")
    assert (row["purpose"], row["state"], row["step"]) == ("train", "waiting", None)
    assert_parquet_equals(folder, rows)


def assert_parquet_equals(folder: Path, rows: list[dict[str, Any]]) -> None:
    out = folder.parent / "out.parquet"
    shown = invoke("export", folder, out)
    assert shown.exit_code == 0, shown.output
    table = parquet.read_table(out)
    assert table.column_names == list(rows[0])
    for found, row in zip(table.to_pylist(), rows, strict=True):
        found["metrics"] = dict(found["metrics"])
        for name in ("metadata", "task_metadata"):
            found[name] = json.loads(found[name])
        assert found == row
    assert str(table.schema.field("logprobs").type) == "list<element: float>"


async def test_a_state_is_chosen(filled: Path) -> None:
    assert {row["task_id"] for row in exported(filled)} == {"used", "finished"}
    assert {row["task_id"] for row in exported(filled, "--state", "used")} == {"used"}
    waiting = exported(filled, "--state", "waiting")
    assert {row["task_id"] for row in waiting} == {"finished"}
    failed = waiting[1]
    assert (failed["reward"], failed["failure_reason"]) == (None, "BROKEN")
    assert len(failed["token_ids"]) == 11
    assert exported(filled, "--state", "used")[0]["step"] == 3


async def test_it_reads_what_a_server_is_writing(tmp_path: Path) -> None:
    async with on_disk(tmp_path / "a", "leases.max_attempts=1") as harness:
        await fill(harness)
        folder = tmp_path / "a" / "journal"
        status, report = await asyncio.to_thread(verified, folder)
        assert (status, report["whole"], report["writer"]) == (0, True, os.getpid())
        assert listed(folder)["writer"] == os.getpid()
        assert "is writing to" in invoke("verify", folder).output.splitlines()[0]
        assert "is writing to" in invoke("list", folder).output.splitlines()[0]
        # The command does not take the lock either, so a restart of the server is not affected.
        assert len(exported(folder)) == 4
    assert listed(folder)["writer"] is None


async def test_a_journal_that_is_compacted_meanwhile_is_read_as_it_was_at_some_moment(
    tmp_path: Path,
) -> None:
    async with serve(
        tmp_path,
        f"journal.folder={tmp_path / 'journal'}",
        "journal.segment_bytes=1048576",
        "journal.max_bytes=16777216",
    ) as harness:
        done = asyncio.Event()

        async def write() -> None:
            journal: Any = harness.serving.journal
            while journal.compactions < 3:
                await journal.append([tasks_known(["x" * 200_000])])
            done.set()

        writing = asyncio.create_task(write())
        readings = 0
        while not done.is_set():
            status, report = await asyncio.to_thread(verified, tmp_path / "journal")
            assert (status, report["whole"]) == (0, True), report
            readings += 1
        await writing
        assert readings


def test_a_stream_is_not_read() -> None:
    shown = invoke("list", "nats://127.0.0.1:4222")
    assert shown.exit_code == 2
    assert (
        "a journal in a NATS stream" in shown.stderr
        and "docs/operations/many-hubs.md" in shown.stderr
    )


def test_an_empty_folder_is_no_journal(tmp_path: Path) -> None:
    for arguments in (("list", tmp_path), ("verify", tmp_path), ("export", tmp_path, "/x.jsonl")):
        shown = invoke(*arguments)
        assert shown.exit_code == 2
        assert shown.stderr == (
            f"penstock journal: {tmp_path} is not a journal: it holds neither LOCK nor segments\n"
        )
    assert list(tmp_path.iterdir()) == []


def test_a_journal_into_which_nothing_was_written_is_empty(tmp_path: Path) -> None:
    (tmp_path / "LOCK").touch()
    assert listed(tmp_path)["finished_groups"] == []
    assert verified(tmp_path)[0] == 0
    out = tmp_path.with_name("nothing.jsonl")
    assert invoke("export", tmp_path, out).exit_code == 0
    assert out.read_text() == ""
    out = out.with_suffix(".parquet")
    assert invoke("export", tmp_path, out).exit_code == 0
    assert parquet.read_table(out).num_rows == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("list", "nowhere"), "Directory 'nowhere' does not exist"),
        (("verify", "file"), "Directory 'file' is a file"),
        (("export", "journal", "out.csv"), "OUT must end in .jsonl or .parquet, got 'out.csv'"),
        (("export", "journal", "journal/out.jsonl"), "is inside the journal's folder"),
        (("export", "journal", "file.jsonl"), "file.jsonl already exists"),
        (("export", "journal", "out.jsonl", "--state", "gone"), "'gone' is not one of"),
        (("export", "journal", "no/out.jsonl"), "no/out.jsonl: No such file or directory"),
        (("export", "journal", "no/out.parquet"), "no/out.parquet: "),
        (("list", "strange"), "strange holds files that no journal writes"),
    ],
)
def test_a_wrong_argument_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("file", "file.jsonl", "journal/LOCK", "strange/notes.log"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    shown = invoke(*arguments)
    assert shown.exit_code == 2
    assert message in shown.output
    assert (tmp_path / "file.jsonl").read_bytes() == b""
    assert [path.name for path in (tmp_path / "journal").iterdir()] == ["LOCK"]


def test_without_pyarrow_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    journal = tmp_path / "journal"
    journal.mkdir()
    (journal / "LOCK").touch()
    shown = invoke("export", journal, tmp_path / "out.parquet")
    assert shown.exit_code == 2
    assert "pyarrow is not installed; install the extra server" in shown.output
    assert invoke("export", journal, tmp_path / "out.jsonl").exit_code == 0


async def test_a_corrupt_record_is_named_and_nothing_is_exported(filled: Path) -> None:
    path = running_segment(filled)
    content = bytearray(path.read_bytes())
    content[HEADER.size + 20] ^= 1
    path.write_bytes(content)
    status, report = verified(filled)
    assert (status, report["whole"]) == (1, False)
    (segment,) = report["segments"]
    assert segment["corrupt"]["offset"] == HEADER.size
    assert "checksum" in segment["corrupt"]["problem"]
    assert invoke("verify", filled).output.splitlines()[-1] == "corrupt"
    for arguments in (("list", filled), ("export", filled, filled.parent / "out.jsonl")):
        shown = invoke(*arguments)
        assert shown.exit_code == 1
        assert f"corrupt: {path.name} at {HEADER.size}: its checksum" in shown.stderr
    assert not list(filled.parent.glob("*out*"))


async def test_a_torn_end_is_counted_and_is_not_corrupt(filled: Path) -> None:
    before = listed(filled)
    path = running_segment(filled)
    with open_stored(filled) as journal:
        for segment in journal.segments:
            list(segment.frames())
        end = journal.segments[-1].end
    with path.open("r+b") as file:
        file.seek(end)
        file.write(FRAME.pack(MARK, 4711, end, 1) + b"half of a record")
    status, report = verified(filled)
    assert (status, report["whole"]) == (0, True)
    assert report["segments"][-1]["torn_bytes"] == FRAME.size + 16
    assert "are torn" in invoke("verify", filled).output
    assert {**listed(filled), "torn_bytes": 0} == before


def test_each_segment_reports_its_own_first_corrupt_place(tmp_path: Path) -> None:
    (tmp_path / "LOCK").touch()
    before = NOWHERE
    for number in (1, 2, 3):
        records = [tasks_known([f"{number}-{i}"]) for i in range(4)]
        before = Place(number, write(tmp_path, number, records, before).end)
    for number in (1, 2):
        path = tmp_path / f"{number:010d}.log"
        content = bytearray(path.read_bytes())
        place = HEADER.size + number * frame_of(f"{number}-0") + 30
        content[place] ^= 1
        path.write_bytes(content)
    status, report = verified(tmp_path)
    assert status == 1
    first, second, third = report["segments"]
    assert first["corrupt"]["offset"] == HEADER.size + frame_of("1-0")
    assert second["corrupt"]["offset"] == HEADER.size + 2 * frame_of("2-0")
    assert (third["corrupt"], third["records"]) == (None, {"tasks_known": 4})


ORDERS: tuple[tuple[tuple[str, ...], list[str]], ...] = (
    (("1.log", "2.log", "3.log"), []),
    (("1.log", "3.log", "4.log"), []),
    (("4.snapshot", "5.log", "6.log"), []),
    (("2.log",), ["0000000002.log"]),
    (("1.log", "4.log"), ["0000000004.log"]),
    (("4.snapshot", "6.log"), ["0000000006.log"]),
)


@pytest.mark.parametrize(("files", "missing"), [*ORDERS, (("4.snapshot",), [])])
def test_a_copy_of_an_earlier_version_that_lacks_a_file_is_not_whole(
    tmp_path: Path, files: tuple[str, ...], missing: list[str]
) -> None:
    """Earlier versions recorded only file numbers, not which files precede each file."""
    (tmp_path / "LOCK").touch()
    for name in files:
        number, _, kind = name.partition(".")
        written = write(tmp_path, int(number), [tasks_known(["x"])])
        content = written.path.read_bytes()
        begin = FIRST_HEADER.pack(FIRST_MAGIC, int(number))
        written.path.write_bytes(begin + content[HEADER.size :])
        written.path.rename(written.path.with_suffix(f".{kind}"))
    check_missing(tmp_path, [f"the file before {name} is missing" for name in missing])
    if not missing:
        with open_stored(tmp_path) as journal:
            assert len(list(journal.records())) == len(files)


def check_missing(folder: Path, missing: list[str]) -> None:
    """Check that `verify` reports the missing files and that a server refuses to start."""
    status, report = verified(folder)
    assert (status, report["missing"]) == (1 if missing else 0, missing)
    assert invoke("verify", folder).output.splitlines()[-1] == ("corrupt" if missing else "whole")
    if missing:
        with pytest.raises(SegmentCorrupt, match="is missing"):
            list(read_records(find_files(folder), Reading()))


@pytest.mark.parametrize(
    ("files", "missing"), [*ORDERS[2:], (("4.snapshot",), ["0000000004.snapshot"])]
)
def test_a_copy_that_lacks_a_file_is_not_whole(
    tmp_path: Path, files: tuple[str, ...], missing: list[str]
) -> None:
    (tmp_path / "LOCK").touch()
    places = {0: NOWHERE}
    for number in range(1, 4):
        end = write(tmp_path, number, [tasks_known(["x"])], places[number - 1]).end
        places[number] = Place(number, end)
    write(tmp_path, 4, [tasks_known(["x"])], places[3]).write_closing()
    (tmp_path / "0000000004.log").rename(tmp_path / "0000000004.snapshot")
    end = write(tmp_path, 5, [tasks_known(["x"])], places[3]).end
    write(tmp_path, 6, [tasks_known(["x"])], Place(5, end))
    kept = {f"{int(n):010d}.{kind}" for n, kind in (name.split(".") for name in files)}
    if kept == {"0000000001.log", "0000000004.log"}:
        write(tmp_path, 4, [tasks_known(["x"])], places[3])
    for path in tmp_path.glob("0*"):
        if path.name not in kept:
            path.unlink()
    where = "after" if files == ("4.snapshot",) else "before"
    check_missing(tmp_path, [f"the file {where} {name} is missing" for name in missing])


def write(folder: Path, number: int, records: list[Any], before: Place = NOWHERE) -> SegmentWriter:
    writer = SegmentWriter(folder / "spare", 64 * 1024)
    writer.begin(folder / f"{number:010d}.log", number, before)
    for record in records:
        writer.write([(record.SerializeToString(),)])
        writer.sync()
    return writer


def frame_of(name: str) -> int:
    return frame_length(tasks_known([name]).ByteSize())


def test_a_record_of_a_later_version_is_named(tmp_path: Path) -> None:
    (tmp_path / "LOCK").touch()
    write(tmp_path, 1, [JournalRecord()])
    status, report = verified(tmp_path)
    assert status == 1
    assert "of a kind that this server does not know" in report["segments"][0]["corrupt"]["problem"]
    shown = invoke("list", tmp_path)
    assert shown.exit_code == 2 and "does not know" in shown.stderr


def test_a_frame_that_is_written_while_it_is_read_is_not_corrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader first sees half of the second record, then a third record that
    marks the second as durable."""
    (tmp_path / "LOCK").touch()
    write(tmp_path, 1, [tasks_known([name]) for name in ("first", "second", "third", "fourth")])
    second_end = HEADER.size + frame_of("first") + frame_of("second")
    reads = 0
    real = os.pread

    def pread(descriptor: int, length: int, offset: int) -> bytes:
        nonlocal reads
        data = real(descriptor, length, offset)
        last = second_end - offset
        if last >= frame_of("second") and len(data) >= last:
            reads += 1
            if reads <= 2:
                return data[: last - 12] + bytes(12) + data[last:]
        return data

    monkeypatch.setattr(os, "pread", pread)
    status, report = verified(tmp_path)
    assert (status, report["segments"][0]["records"]) == (0, {"tasks_known": 4})
    assert reads > 2


@pytest.mark.parametrize("seed", range(20))
def test_a_cut_anywhere_is_judged_as_a_server_judges_it(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    writer = write(
        tmp_path, 1, [tasks_known(["x" * int(random.integers(1, 90))]) for _ in range(5)]
    )
    path = writer.path
    whole = bytearray(path.read_bytes())
    place = int(random.integers(HEADER.size, writer.end))
    if seed % 2:
        whole[place:] = bytes(len(whole) - place)
    else:
        whole[place] ^= 1 << int(random.integers(8))
    path.write_bytes(whole)

    def outcome(read: Callable[[], tuple[int, int, int]]) -> object:
        try:
            return read()
        except Exception as error:
            return str(error)

    def by_server() -> tuple[int, int, int]:
        reading = Reading()
        records = list(read_records(find_files(tmp_path), reading))
        return len(records), reading.bytes_by_segment[1], reading.torn_bytes

    def by_command() -> tuple[int, int, int]:
        with open_stored(tmp_path) as journal:
            (segment,) = journal.segments
            records = [segment.record(frame) for frame in segment.frames()]
            return len(records), segment.end, segment.torn_bytes

    assert outcome(by_command) == outcome(by_server)


def test_the_holder_of_a_lock_is_seen_without_trying_it(tmp_path: Path) -> None:
    lock = tmp_path / "LOCK"
    assert find_writer(lock) is None
    with lock.open("a") as file:
        assert find_writer(lock) is None
        fcntl.flock(file, fcntl.LOCK_EX)
        assert find_writer(lock) == os.getpid()
    assert find_writer(lock) is None


@pytest.mark.parametrize("command", ["list", "verify", "export"])
def test_neither_help_nor_the_command_loads_what_is_heavy(tmp_path: Path, command: str) -> None:
    (tmp_path / "LOCK").touch()
    out = ("out.jsonl",) if command == "export" else ()
    shown = subprocess.run(
        [
            *(sys.executable, "-X", "importtime", "-m", "penstock.cli"),
            *("journal", command, str(tmp_path), *(str(tmp_path.with_name(o)) for o in out)),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {line.rpartition("|")[2].strip() for line in shown.stderr.splitlines() if "|" in line}
    assert "penstock.server.journal.tools.contents" in loaded
    assert not [name for name in loaded if name.startswith(("torch", "vllm", "transformers"))]
