"""The conversation ledger and the worker registry.

An RPC passes through three layers, each with one job:

    ledger_service, registry_service   convert, check bounds, convert back
    ledger, registry                   what an outcome means: errors, wake-ups
    store                              one atomic change per call (port)
      memory_store | sql               rules.py decides, in both

`app.build` wires them, `__main__` runs them.
"""
