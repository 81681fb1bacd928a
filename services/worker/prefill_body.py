"""What prefill's engine is asked for, in two parts: all that is known of a body before
the ledger has been asked, and the transfer params. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from services.worker.engine import Api
from services.worker.legs import (
    KV_TRANSFER_PARAMS,
    TURN_ID,
    Prompt,
    parse_body,
    require_splittable,
    splice,
)
from services.worker.pull_plan import COSTS, Costs

HAND_TOKEN_IDS_OVER = "kvloop_hand_token_ids_over"
"""Member of kv_transfer_params on the prefill leg: true if decode wants token ids."""
DEADLINE_EXTENSION = "kvloop_deadline_extension"
"""Member of kv_transfer_params: seconds by which the deadline in them was moved."""

_PREFILL_DROPS = frozenset(
    {
        # would ask for other than one token
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "min_tokens",
        "n",
        "best_of",
        "use_beam_search",
        "length_penalty",
        # could end the token as "stop", for which some versions hand nothing over
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        # need a stream or a second token, or only swell a reply that nobody reads
        "stream_options",
        "logprobs",
        "top_logprobs",
        "logprob_token_ids",
        "prompt_logprobs",
        "echo",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "return_prompt_text",
        "include",
        "enable_response_messages",
        # a name for the request, over which a repeated leg would stumble
        "request_id",
    }
)

_ONE_TOKEN: dict[Api, dict[str, Any]] = {
    Api.CHAT_COMPLETIONS: {"max_tokens": 1},
    Api.COMPLETIONS: {"max_tokens": 1},
    # An engine that keeps answers would keep this one for ever.
    Api.RESPONSES: {"max_output_tokens": 1, "store": False},
}

_FIRST_PREFILL: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True)
class HandleTerms:
    """What goes with a handle: facts that came up after the engine wrote it."""

    extension_seconds: float = 0.0
    """By how much the decode engine's deadline was moved since."""
    costs: Costs | None = None
    """What pulling and recomputing take; None: all that is proven is pulled."""


def read_prefill_body(api: Api, body: bytes, prompt: Prompt | None = None) -> bytes:
    """Read a client's body, and ask for one token, in one piece.

    Members that shape the prompt (tools, response_format, template arguments,
    ...) stay: the legs must see the same prompt.

    Args:
        api: endpoint whose format the body has.
        body: of the client, a JSON object.
        prompt: the part of it that is known to be one value, and is not read.

    Returns:
        A JSON object, but for its closing brace.

    Raises:
        InvalidFieldError: as `parse_body`; or NOT_SPLITTABLE, names the member.
    """
    members = parse_body(body, prompt)
    require_splittable(api, members)
    kept = {name: value for name, value in members.items() if name not in _PREFILL_DROPS}
    asked = kept | _ONE_TOKEN[api] | {"stream": False, "ignore_eos": True}
    return msgspec.json.encode(asked)[:-1]


def rest_of_prefill_body(
    *,
    turn_id: str,
    handle: bytes,
    terms: HandleTerms | None = None,
    hand_token_ids_over: bool = False,
) -> bytes:
    """What follows on it: transfer params that have the prompt's KV handed over.

    Args:
        turn_id: id of the turn.
        handle: params that a decode engine left behind; empty for none.
        terms: what goes with the handle.
        hand_token_ids_over: have the prompt's token ids in the params for decode.

    Raises:
        InvalidFieldError: the handle is not a JSON object.
    """
    added: dict[str, Any] = {TURN_ID: turn_id}
    if hand_token_ids_over:
        added[HAND_TOKEN_IDS_OVER] = True
    if handle:
        params = splice(handle, added | _handle_params(terms or HandleTerms()))
    else:
        params = msgspec.json.encode(added | _FIRST_PREFILL)
    return b"," + msgspec.json.encode({KV_TRANSFER_PARAMS: msgspec.Raw(params)})[1:]


def _handle_params(terms: HandleTerms) -> dict[str, Any]:
    added: dict[str, Any] = {}
    if terms.extension_seconds > 0:
        added[DEADLINE_EXTENSION] = terms.extension_seconds
    if terms.costs is not None:
        added[COSTS] = terms.costs.to_params()
    return added
