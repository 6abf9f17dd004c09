"""A research agent to train: corpus, retrieval, agent and reward."""
