"""The OpenAI-compatible HTTP surface of the router."""
