"""The router: accepts turns, runs their two legs, relays the answer.

It keeps no state of its own, so any number of replicas and processes may run.
Where to read first: `turn.py` is the pipeline of one turn, `app.py` the wiring.
"""
