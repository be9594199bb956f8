"""The in-vehicle client: the agent that talks and the trainer that learns."""
