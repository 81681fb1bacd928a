"""The status page of the router."""
