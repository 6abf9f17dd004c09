"""A research agent that trains: corpus, retrieval, agent, reward."""
