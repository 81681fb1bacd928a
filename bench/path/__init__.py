"""What a long prompt costs on its way, step by step and hop by hop; see docs/benchmarks.md."""
