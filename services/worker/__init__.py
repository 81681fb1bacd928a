"""The sidecar beside one vLLM server, and the connector inside that server.

    service              the gRPC edge
    prefill, decode      one leg each, in terms of
      legs, handoff, chunks   what bodies and replies mean (pure)
      engine, http_engine     vLLM (port, and vLLM over HTTP)
      commits, ledger         where a finished turn's handle goes
    events, event_hub    what the connector reports, and who waits for it
    registration         the worker's lease in the registry
    launcher, guard      starts vLLM and sees to it that it ends
    connector            runs inside vLLM; see its docstring

`app.build` wires them, `__main__` runs them.
"""
