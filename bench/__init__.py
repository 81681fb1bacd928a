"""Benchmarks: of the ledger (bench.ledger) and of the whole on a GPU (bench.gpu)."""
