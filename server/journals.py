"""Opens the configured journal: in memory, in a folder, or in a stream of NATS JetStream."""

from __future__ import annotations

from penstock.common.distribution import pip_install
from penstock.server.config.journal import JournalSection
from penstock.server.journal.disk.journal import LogJournal
from penstock.server.journal.memory import MemoryJournal
from penstock.server.journal.protocol import Journal, JournalUnreadable


async def open_journal(section: JournalSection) -> Journal:
    """Raises JournalInUse and JournalUnreadable."""
    if section.durability == "none":
        return MemoryJournal()
    if section.url is not None:
        try:
            # nats-py is an optional dependency, in the extra `jetstream`.
            from penstock.server.journal.jetstream.journal import JetStreamJournal
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != "nats":
                raise
            raise JournalUnreadable(
                f"journal.url needs nats-py: {pip_install('jetstream')}"
            ) from error
        journal = JetStreamJournal(section)
        await journal.open()
        return journal
    assert section.folder is not None, "durability needs a place"
    try:
        return LogJournal(
            section.folder,
            durability=section.durability,
            max_bytes=section.max_bytes,
            segment_bytes=section.segment_bytes,
            refers_from=section.refers_from_bytes,
        )
    except OSError as error:
        raise JournalUnreadable(
            f"the journal {section.folder} cannot be opened: {error}"
        ) from error
