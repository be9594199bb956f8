"""The edge gateway: collects its cell's updates, merges them and passes versions down."""
