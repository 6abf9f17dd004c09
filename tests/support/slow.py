"""What `make test-fast` leaves out: tests that start processes, load a model, or wait for several seconds.

`make test` runs them all. Chosen by measured time: what remains takes about 80 seconds on two cores.
"""

from __future__ import annotations

from pathlib import PurePosixPath

FOLDERS = ("demo", "examples", "faults", "server/http", "server/vllm", "system", "up")
"""Folders of tests/ that are left out as a whole."""

FILES = """
    cli/test_answers.py cli/test_cli.py cli/test_completion.py cli/test_health.py cli/test_mistakes.py
    cli/test_weights.py common/test_allocator.py
    launch/test_command.py launch/test_init.py launch/test_one_command.py
    launch/test_notebook.py launch/test_python_runs.py
    machine/test_doctor.py machine/test_hub.py
    client/environments/test_games.py client/external/test_ends.py client/external/test_external.py
    client/external/test_http.py client/plugins/test_whole_rollouts.py client/test_client_restart.py
    client/plugins/test_plugins.py client/test_client_wire.py client/test_worker_load.py
    preflight/test_check.py recipes/test_recipes.py rewards/test_mathematics.py
    rewards/test_programs.py
    project/test_generated_code.py project/test_imports.py project/test_packages.py
    project/test_reference.py project/test_setup.py project/test_site.py
    server/core/test_overload.py server/groups/test_recovery.py server/groups/test_wire_leases.py
    server/journal/test_jetstream_connection.py server/journal/test_jetstream_journal.py
    server/journal/test_journal_room.py
    server/pool/test_adapters.py server/pool/test_hub_command.py server/pool/test_joining.py
    server/pool/test_pool.py
    server/pool/test_silence.py server/pool/test_switch.py
    server/rpc/test_serve_command.py server/rpc/test_wire_operations.py
    server/security/test_security.py server/security/test_unread_answers.py
    server/turns/test_token_exactness.py
    server/weights/test_astray_uploads.py server/weights/test_republish.py
    server/weights/test_weight_stage.py server/weights/test_wire_adapters.py
    server/weights/test_wire_rollback.py
    server/weights/test_wire_collective.py server/weights/test_wire_probe.py
    server/weights/test_wire_weights.py
    trainer/algorithms/test_step_parity.py
    trainer/data/test_reward_by_source.py trainer/evaluation/test_evaluate_command.py
    trainer/exchange/test_many_hubs.py trainer/metrics/test_mlflow.py trainer/metrics/test_wandb.py
    trainer/policy/test_lora.py trainer/policy/test_megatron_end_to_end.py
    trainer/policy/test_megatron_policy.py trainer/policy/test_ranks.py
    trainer/test_end_to_end.py trainer/test_resume.py trainer/test_session.py
    trainer/test_stopping.py
    trainer/weights/test_sparse_collective.py
""".split()  # noqa: SIM905 - one line per name would be longer than what it lists.
"""Files of tests/ that are left out as a whole."""


TESTS = """
    client/environments/test_episode.py::test_an_attempt_that_waits_for_the_policy_has_no_thread
    client/plugins/test_parts.py::test_what_a_function_wrote_into_metadata_is_told
    client/test_client.py::test_a_client_can_be_made_without_a_loop
    server/groups/test_staleness_gate.py::test_no_token_is_trained_too_old_and_nothing_deadlocks_over_100_seeds
    server/groups/test_wire_groups.py::test_the_largest_group_that_is_kept_can_be_delivered
    server/journal/test_journal_command.py::test_it_lists_in_lines_for_a_pipe_and_in_tables_for_a_terminal
    server/journal/test_journal_command.py::test_neither_help_nor_the_command_loads_what_is_heavy
    server/pool/test_branches.py::test_once_per_host_where_its_first_engine_fails
    server/pool/test_placing.py::test_siblings_stay_together_after_their_engine_has_gone
    server/rollouts/test_settling.py::test_what_was_found_in_the_journal_is_not_kept_beside_what_was_made_of_it
    server/rollouts/test_unleased.py::test_closed_ones_give_way_to_what_needs_the_journal
    trainer/data/test_feeder.py::test_a_server_that_gives_no_answer_is_asked_again
    trainer/data/test_feeder.py::test_a_server_that_stops_in_the_middle_of_an_answer_is_asked_again
    trainer/data/test_sources.py::test_problems_that_depend_on_the_seed_of_hashes_need_one
    trainer/exchange/test_stream.py::test_a_server_that_refuses_to_be_brought_up_to_date_is_left_alone_for_a_while
    trainer/test_algorithms.py::test_a_run_tells_the_figures_of_its_algorithm
    trainer/weights/test_transfer.py::test_an_answer_that_does_not_come_ends_at_the_deadline
""".split()  # noqa: SIM905
"""Single tests that are left out, of files that are not."""


VLLM = """
    faults/test_f10_weights.py server/http/test_vllm.py server/vllm/test_collective_vllm.py
    server/vllm/test_engine.py server/vllm/test_sampling.py server/vllm/test_wire_adapters_vllm.py
    server/vllm/test_wire_vllm.py
""".split()  # noqa: SIM905
"""Files whose engines are forked from a process that has vLLM loaded: one test process has them all."""


LONGEST = [
    *VLLM,
    *"""
    trainer/policy/test_ranks.py system/test_demo_end_to_end.py
    trainer/policy/test_megatron_policy.py launch/test_one_command.py
    trainer/exchange/test_many_hubs.py launch/test_notebook.py trainer/test_resume.py
    server/vllm/test_engine_process.py trainer/test_end_to_end.py
    """.split(),  # noqa: SIM905
]
"""Files that take 40 seconds or more: begun last, they would occupy one process while the others wait. The
order keeps those that load vLLM apart."""


def turn(path: PurePosixPath) -> int:
    """When a file's turn comes: units first, so that most mistakes show in a minute, then the longest."""
    if not is_slow_file(path):
        return 0
    return 1 + (LONGEST.index(str(path)) if str(path) in LONGEST else len(LONGEST))


def is_slow_file(path: PurePosixPath) -> bool:
    """Whether a file is left out as a whole. `path` is relative to tests/."""
    return str(path) in FILES or any(path.is_relative_to(folder) for folder in FOLDERS)


def is_slow(path: PurePosixPath, test: str) -> bool:
    """Whether a test function is left out. `path` is its file, relative to tests/."""
    return is_slow_file(path) or f"{path}::{test}" in TESTS
