"""HTTP endpoints compatible with other services' SDKs.

May use security, rpc, rollouts and the rooms below them. Begin with `app`, then `turns`. `chat`,
`responses` and `messages` import vllm.
"""
