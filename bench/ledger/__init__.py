"""How fast the ledger is, through gRPC, on each of its stores.

    python -m bench.ledger --help
"""
