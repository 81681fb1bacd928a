"""Looks at a running stack and says what is wrong with it and what to change.

`collect` gathers facts over gRPC; `examine` judges them, with pure functions;
`probe` measures a pull by running a short conversation.
"""
