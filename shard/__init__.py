"""The shard: a deterministic state machine over a store, and the process around it."""
