"""What the router and the shard both need; imports neither of them."""

__version__ = "0.1.0"
