"""How fast the ledger is, through gRPC, on each of its stores.

python -m bench.ledger pairs --rows 1000 --rows 1000000
python -m bench.ledger sweep
"""
