"""The store over SQLAlchemy Core: the same statements on SQLite and PostgreSQL.

store         the port: one transaction per call
conversations, releases, leases, sweeping
              what runs inside a transaction: plain functions of a Connection
tables        schema, and rows to values
transactions  port: run such a function atomically
sqlite        one writer thread with group commit, reader threads
postgres      a pool of asyncpg connections
marks         where the ledger's clock is kept
schema        migrations at start-up
"""
