"""The twins that Penstock's own code makes, by the names of their messages; `codec` explains twins.

A twin is declared as the generated class, but no annotation can name it: those use the generated one.
"""

from __future__ import annotations

from penstock.v1 import journal_pb2
from penstock.wire.codec import twin

GroupDropped = twin(journal_pb2.GroupDropped)
GroupsEnded = twin(journal_pb2.GroupsEnded)
GroupsReceipted = twin(journal_pb2.GroupsReceipted)
JournalRecord = twin(journal_pb2.JournalRecord)
LeasesExpired = twin(journal_pb2.LeasesExpired)
RunReplaced = twin(journal_pb2.RunReplaced)
ServerStarted = twin(journal_pb2.ServerStarted)
SessionBegan = twin(journal_pb2.SessionBegan)
StepFinal = twin(journal_pb2.StepFinal)
TaskAccepted = twin(journal_pb2.TaskAccepted)
TasksKnown = twin(journal_pb2.TasksKnown)
TrajectoriesForgotten = twin(journal_pb2.TrajectoriesForgotten)
TrajectoryClosed = twin(journal_pb2.TrajectoryClosed)
WeightsActivated = twin(journal_pb2.WeightsActivated)
