"""What retained KV costs and brings: a fixed TTL against leases, in virtual time."""
