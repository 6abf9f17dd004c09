"""Who may call what, how much of it, and which trajectories are a caller's.

May use rpc and the rooms below it. Begin with `gate`, which every call passes.
"""
