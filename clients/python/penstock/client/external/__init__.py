"""External processes as agents: `penstock rollout --command "..."`, one process per attempt.

    leased ──► folder made ──► keeper started ──► process runs ──► tree ended ──► turns ended ──► scored
                                                       │
                 time limit, memory limit, lease lost, worker stopped or killed: the tree is ended first

| module | holds |
|---|---|
| `settings` | what the command line says |
| `agent` | an attempt from its lease to its reward: what the worker calls as `generate` and `reward` |
| `running` | one process, as the worker sees it: started, its output, its end |
| `keeper` | the process between the worker and the command; ends the tree whoever dies first |
| `sandbox`, `cgroups` | what the machine offers, found out at the start |
| `relay` | the endpoints of one attempt, which the process reaches under a key of its own |
| `result` | exit status and result file, read as a reward or a failure |

What each failure does is in docs/external.md.
"""
