"""The twin of every message of `penstock.v1`, under the message's name; `codec` explains twins.

For type checkers a twin is its generated class.
"""

# ruff: noqa: F403
# pyright: reportWildcardImportFromLibrary=false

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.v1.conversation_pb2 import *
    from penstock.v1.journal_pb2 import *
    from penstock.v1.rejection_pb2 import *
    from penstock.v1.rollout_service_pb2 import *
    from penstock.v1.task_service_pb2 import *
    from penstock.v1.trainer_service_pb2 import *
    from penstock.v1.trajectory_pb2 import *
    from penstock.v1.weights_pb2 import *
else:
    from penstock.wire import codec

    for module in codec.MODULES:
        for name in module.DESCRIPTOR.message_types_by_name:
            globals()[name] = codec.twin(getattr(module, name))
