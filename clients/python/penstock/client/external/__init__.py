"""External processes as agents: `penstock rollout --command "..."`, one process per attempt.

    leased ──► folder made ──► keeper started ──► process runs ──► tree ended ──► turns ended ──► scored
                                                       │
                 time limit, memory limit, lease lost, worker stopped or killed: the tree is ended first

- `settings`: the settings from the command line.
- `agent`: an attempt from its lease to its reward. The worker calls it as `generate` and `reward`.
- `running`: one process as the worker sees it: its start, its output, its end.
- `keeper`: the process between the worker and the command. It ends the process tree if either dies.
- `sandbox`, `cgroups`: isolation that the machine offers, detected at startup.
- `relay`: the endpoints of one attempt. The process reaches them with a key made for the attempt.
- `result`: converts exit status and result file to a reward or a failure.

docs/external.md lists the effect of each failure.
"""
