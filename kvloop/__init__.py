"""kvloop: KV reuse across turns on prefill/decode-disaggregated vLLM.

`Client` and `AsyncClient` talk to a router. What they raise is in
`kvloop.errors`; the command line is in `kvloop.cli`; `kvloop.stack` runs a whole
stack on this machine.
"""

from kvloop.aio import AsyncAnswer, AsyncClient
from kvloop.chunks import Chunk
from kvloop.client import Answer, Client
from kvloop.completions import Choice, Completion
from kvloop.errors import KvloopError
from kvloop.messages import Message, ToolCall
from kvloop.receipts import Receipt, Usage
from kvloop.requests import Sampling
from kvloop.routes import Candidate, EndedConversation, ModelInfo, Route
from kvloop.tls import ClientTls, ClientTlsFiles

__all__ = [
    "Answer",
    "AsyncAnswer",
    "AsyncClient",
    "Candidate",
    "Choice",
    "Chunk",
    "Client",
    "ClientTls",
    "ClientTlsFiles",
    "Completion",
    "EndedConversation",
    "KvloopError",
    "Message",
    "ModelInfo",
    "Receipt",
    "Route",
    "Sampling",
    "ToolCall",
    "Usage",
]
