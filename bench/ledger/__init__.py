"""How fast the ledger is, through gRPC, on each of its stores.

python -m bench.ledger pairs --rows 1000 --rows 1000000
python -m bench.ledger sweep
"""

from services.common import grpc_core  # noqa: F401, as in the services' own processes
