"""The gRPC services: each rpc's handler, and what every rpc passes on its way (`boundary`).

May use rollouts, pool, weights and the rooms below them. Begin with `boundary`, then `rollout_servicer`.
"""
