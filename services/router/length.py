"""Refuses prompts that cannot fit the model's context, before prefill.

The engine checks too, so this only moves the refusal forward, to where nothing
has been spent yet. It refuses what every engine version refuses: a prompt that
leaves no room for one token, and more answer tokens than the whole context.
Prompt plus answer above the context is left alone, because current engines
shorten the answer instead.
"""

from __future__ import annotations

import structlog

from kvloop.common.v1 import common_pb2
from kvloop.errors import InvalidFieldError, KvloopError
from kvloop.worker.v1 import worker_pb2
from services.router.deadline import Deadline
from services.router.failures import is_rejection
from services.router.metrics import Fallback, RouterMetrics
from services.router.request import TurnRequest
from services.router.routing import Routes
from services.router.worker_client import connect_in_time
from services.router.workers import WorkerPool

_log = structlog.get_logger(__name__)


def refuse_if_too_long(request: TurnRequest, prompt_tokens: int | None, limit: int) -> None:
    """Refuse what no worker can hold.

    Args:
        request: the turn.
        prompt_tokens: exact length of the prompt, or None if it is not known.
        limit: tokens that prompt and answer may have together.

    Raises:
        InvalidFieldError: the prompt, or the answer asked for, is too long.
    """
    wanted = request.options.max_new_tokens
    if wanted is not None and wanted > limit:
        path = request.max_new_tokens_path
        raise InvalidFieldError(
            f"{path} is {wanted}, above the model's context of {limit} tokens", field=path
        )
    truncated = request.options.truncate_prompt_tokens is not None
    if prompt_tokens is not None and prompt_tokens >= limit and not truncated:
        raise InvalidFieldError(
            f"the prompt has {prompt_tokens} tokens; the model's context of {limit} "
            "must also hold at least one token of the answer",
            field=request.prompt_path,
        )


class LengthCheck:
    """Counts the tokens of long prompts on a decode worker.

    Counting costs one tokenization more, so it is done only where it can pay: a
    body of fewer bytes than the context has tokens cannot be too long. Where
    bytes_per_token is set above 1, a prompt may slip through; the prefill engine
    refuses it then, and the conversation's handle stays unused.
    """

    def __init__(
        self,
        workers: WorkerPool,
        routes: Routes,
        metrics: RouterMetrics,
        *,
        bytes_per_token: float,
        timeout_seconds: float,
    ) -> None:
        self._workers = workers
        self._routes = routes
        self._metrics = metrics
        self._bytes_per_token = bytes_per_token
        self._timeout_seconds = timeout_seconds

    async def check(self, request: TurnRequest, limit: int, deadline: Deadline) -> None:
        """Refuse a turn that is too long for the model.

        Raises:
            InvalidFieldError: it is, or the engine refuses the request as such.
        """
        if limit == 0:
            return
        tokens = request.prompt_tokens
        is_long = len(request.body_json) > self._bytes_per_token * limit
        # Several prompts have no length that could be compared, and engines count
        # no bodies of responses.
        countable = request.options.prompts == 1 and request.api != common_pb2.API_RESPONSES
        if tokens is None and is_long and countable:
            tokens = await self._count(request, deadline)
        refuse_if_too_long(request, tokens, limit)

    async def _count(self, request: TurnRequest, deadline: Deadline) -> int | None:
        """The prompt's tokens, or None if the worker could not say."""
        decode_worker_id = self._routes.decode(request.model).worker_id
        asked = worker_pb2.CountTokensRequest(api=request.api, body_json=request.body_json)
        try:
            with self._workers.use(decode_worker_id, is_leg=False) as client:
                await connect_in_time(client, deadline, self._timeout_seconds)
                timeout = deadline.hop_timeout(self._timeout_seconds)
                counted = await client.count_tokens(asked, timeout_seconds=timeout)
        except KvloopError as error:
            if is_rejection(error):
                raise
            deadline.check()
            self._metrics.fell_back(Fallback.LENGTH_CHECK_SKIPPED)
            _log.warning("length_check_skipped", worker_id=decode_worker_id, reason=error.reason)
            return None
        return counted.num_tokens
