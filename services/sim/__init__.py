"""A simulated vLLM server: the same HTTP surface, KV cache and transfers, no model.

`python -m services.sim` starts one or many. docs/sim-engine.md says what is
simulated and what is not.
"""
