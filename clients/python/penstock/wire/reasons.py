"""Machine-readable error reasons of `penstock.v1`.

proto/README.md has the format of an error. docs/reference/errors.md is generated from the docstrings here.
"""

from __future__ import annotations

from enum import StrEnum

DOMAIN = "penstock.v1"


class Reason(StrEnum):
    """Values of `reason` in ErrorInfo and Rejection.

    The first sentence below each is its meaning; the rest is what the caller can do.
    """

    FIELD_INVALID = "FIELD_INVALID"
    """A field of the request has a value that is not allowed. Correct the field, which the message
    and BadRequest name."""
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    """The prompt and one more token do not fit into the model's context. Shorten the prompt."""
    TOKEN_OUT_OF_RANGE = "TOKEN_OUT_OF_RANGE"
    """A token id is negative or beyond the model's vocabulary. Encode with the tokenizer of the
    served model."""
    MALFORMED_MESSAGE = "MALFORMED_MESSAGE"
    """The message cannot be decoded, or did not arrive in full. Send a complete message of the
    rpc's request type."""
    HELLO_EXPECTED = "HELLO_EXPECTED"
    """The first message of `Exchange` is not a `Hello`. Open the stream again and begin with a
    `Hello`."""
    SHAPE_MISMATCH = "SHAPE_MISMATCH"
    """A tensor of the upload has another shape than the model's. Upload a checkpoint of the served
    model."""
    DTYPE_MISMATCH = "DTYPE_MISMATCH"
    """A tensor of the upload has another dtype than the server's. Convert it to
    `GetServerInfoResponse.weight_dtype`."""
    TENSOR_MISSING = "TENSOR_MISSING"
    """The upload lacks a tensor of the model. Upload every tensor; only a tied `lm_head.weight` may
    be left out."""
    TENSOR_UNKNOWN = "TENSOR_UNKNOWN"
    """The model, or the version to fetch, has no tensor of that name. Use the names of the served
    model's checkpoint."""
    NOT_FINITE = "NOT_FINITE"
    """A tensor of the upload contains NaN or infinity. Find out why the trainer's weights diverged;
    the version in use is unchanged."""
    TRAJECTORY_UNKNOWN = "TRAJECTORY_UNKNOWN"
    """The server holds no trajectory of that id. Check the id; after a restart without a journal,
    begin again with `Generate`."""
    TASK_UNKNOWN = "TASK_UNKNOWN"
    """Reserved for a task that the server does not know. No call returns it in this version."""
    TRAJECTORY_EXISTS = "TRAJECTORY_EXISTS"
    """The id of the new trajectory is taken. Extend that trajectory with `Continue`, or choose
    another id."""
    TURN_IN_FLIGHT = "TURN_IN_FLIGHT"
    """A turn of the trajectory is still running. Wait until it ends, or stop it with `Abort`."""
    TRAJECTORY_CLOSED = "TRAJECTORY_CLOSED"
    """The trajectory was completed, so it takes no more turns. Begin a new one."""
    NOTHING_TO_RESUME = "NOTHING_TO_RESUME"
    """`Continue` came without an observation, but the last turn was not aborted. Send an
    observation."""
    OUTCOME_DIFFERS = "OUTCOME_DIFFERS"
    """The trajectory was already completed with another outcome. Keep the first outcome; it is
    durable."""
    WEIGHT_VERSION_STALE = "WEIGHT_VERSION_STALE"
    """The version is not greater than every version the server has, or other weights have its
    number. Upload the weights under a greater number."""
    WEIGHT_VERSION_NOT_STAGED = "WEIGHT_VERSION_NOT_STAGED"
    """The server does not hold the version that is to become active or to be fetched. Upload it
    first."""
    WEIGHT_VERSION_NOT_ACTIVE = "WEIGHT_VERSION_NOT_ACTIVE"
    """The call requires a weight version, and another one is active. Require the version that the
    message names as active, or none."""
    BASE_VERSION_MISMATCH = "BASE_VERSION_MISMATCH"
    """The delta's base is not the active version, or the server has no longer its bytes. Upload the
    version in full."""
    STALE_EPOCH = "STALE_EPOCH"
    """A trainer that was started later has taken over the run. Stop; only a process whose very
    first `Hello` is refused may send the epoch `current + 1`, once."""
    TRAINER_CONNECTED = "TRAINER_CONNECTED"
    """A trainer is connected, and the upload is of another process, started later. Only the connected
    trainer uploads. Stop it first, or upload to another server."""
    ADAPTER_ACTIVE = "ADAPTER_ACTIVE"
    """The upload is of full weights, but an adapter that was trained on the present ones is active.
    Upload adapters only, or restart the server."""
    LEASE_EXPIRED = "LEASE_EXPIRED"
    """The lease of the attempt has expired. Give the attempt up and lease another; `retried` in the
    metadata tells whether it is retried."""
    UPLOAD_IN_PROGRESS = "UPLOAD_IN_PROGRESS"
    """The server is still receiving or verifying another upload. Upload again after a second."""
    SESSION_REPLACED = "SESSION_REPLACED"
    """Another process of the run has sent a `Hello` with a greater epoch. Stop; the newer trainer
    continues the run."""
    WEIGHT_LOAD_FAILED = "WEIGHT_LOAD_FAILED"
    """The engine could not load the version, and the previous version is active again. Upload the
    version once more."""
    QUEUE_FULL = "QUEUE_FULL"
    """The server has as many calls, tasks, groups or trajectories open as it may. Wait and try
    again."""
    SLOW_READER = "SLOW_READER"
    """The caller read nothing from its stream for `limits.stalled_seconds`. Read faster, and resume
    the turn with `Continue`."""
    MEMORY_BUDGET = "MEMORY_BUDGET"
    """The trajectories, groups and tasks of the server fill `limits.memory_bytes`. Wait until
    groups are trained, and try again."""
    MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE"
    """The message, its metadata or an outcome has more bytes than allowed. Send less; the same
    message is never accepted."""
    DISK_FULL = "DISK_FULL"
    """The journal, or the folder that weights are staged in, has no room. Try again after a delay,
    or make room on the server's disk."""
    CALLER_LIMIT = "CALLER_LIMIT"
    """This caller has reached one of its limits in `[limits.caller]`, which the message names. End
    some calls or turns, and try again."""
    ENGINE_LOST = "ENGINE_LOST"
    """The inference engine has died, and the server stops. Wait until the server is back, and
    connect again."""
    WEIGHTS_INCONSISTENT = "WEIGHTS_INCONSISTENT"
    """The engine could load neither the new version nor the previous one, so nothing is sampled.
    Upload a full version."""
    DRAINING = "DRAINING"
    """The server is shutting down. Wait until it is back, and connect again."""
    CREDENTIAL_ENDED = "CREDENTIAL_ENDED"
    """The caller's token or certificate became invalid while the stream was open. Open the stream
    again with the current one."""
    CHECKSUM_MISMATCH = "CHECKSUM_MISMATCH"
    """Bytes of the upload are not those that its header announced. Upload again; the version in use
    is unchanged."""
    PROBE_MISMATCH = "PROBE_MISMATCH"
    """The engine computes other log-probabilities than the trainer, so the previous version is
    active again. Upload once more; if it repeats, compare the precision of both, or raise
    `weights.probe.tolerance`."""
    JOURNAL_FAILED = "JOURNAL_FAILED"
    """The journal can no longer be written, and the server stops. Wait until the server is back,
    and connect again."""
    JOURNAL_CORRUPT = "JOURNAL_CORRUPT"
    """A record of the journal cannot be read again. Check the journal with `penstock journal
    verify`."""
    SOURCE_UNAVAILABLE = "SOURCE_UNAVAILABLE"
    """The server cannot read the bytes of the upload where its header says they are. Upload through
    the stream instead."""
    TOKEN_MISSING = "TOKEN_MISSING"
    """The call has no token. Send one as metadata `authorization: Bearer TOKEN`."""
    TOKEN_INVALID = "TOKEN_INVALID"
    """The token is unknown, malformed or expired. Get a new one from `penstock token create`."""
    ROLE_NOT_ALLOWED = "ROLE_NOT_ALLOWED"
    """The caller's role does not allow this call, or the trajectory is another agent's. Use a token
    of a role that does."""
    INTERNAL_ERROR = "INTERNAL_ERROR"
    """A defect of the server, whose details are only in its log. Report it with the traceback from
    there."""
