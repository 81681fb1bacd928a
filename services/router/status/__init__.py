"""The status page: what this router sees, for people."""
