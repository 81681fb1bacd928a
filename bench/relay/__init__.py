"""What a router and its sidecars cost: time to the first token, and CPU per token."""
