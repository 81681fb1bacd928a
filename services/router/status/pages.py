"""The status page over HTTP: its files for everyone, what it shows for callers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from importlib import resources

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from kvloop.errors import KvloopError
from services.router.gateway import http
from services.router.gateway.errors import error_body
from services.router.identity import Caller
from services.router.status.feed import StatusFeed

_FILES = {
    "": ("index.html", "text/html; charset=utf-8"),
    "app.js": ("app.js", "text/javascript; charset=utf-8"),
    "charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "style.css": ("style.css", "text/css; charset=utf-8"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
}
_HEADERS = {
    # Nothing comes from elsewhere, nothing is framed, nothing is guessed.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class StatusPages:
    """Serves the page and its feed.

    The files hold no data, so they are open. The feed is the caller's tenant's,
    and needs the credential that the API needs.

    Args:
        caller: who an Authorization header speaks for; raises UnauthenticatedError.
        feed: what the page shows.
        max_viewers: open feeds at most; each costs a call to kvmeta now and then.
    """

    def __init__(
        self, caller: Callable[[str | None], Caller], feed: StatusFeed, *, max_viewers: int
    ) -> None:
        self._caller = caller
        self._feed = feed
        self._max_viewers = max_viewers
        self._viewers = 0
        folder = resources.files("services.router.status") / "static"
        self._files = {
            path: ((folder / name).read_bytes(), media_type)
            for path, (name, media_type) in _FILES.items()
        }

    def routes(self) -> list[Route]:
        """Where the page lies."""
        return [
            Route("/ui", _to_folder, methods=["GET"]),
            Route("/ui/events", self._events, methods=["GET"]),
            Route("/ui/{path}", self._file, methods=["GET"]),
            Route("/ui/", self._file, methods=["GET"]),
        ]

    async def _file(self, request: Request) -> Response:
        found = self._files.get(request.path_params.get("path", ""))
        if found is None:
            return Response(error_body(404, "Not Found"), 404, media_type=http.JSON)
        content, media_type = found
        return Response(content, headers=_HEADERS, media_type=media_type)

    async def _events(self, request: Request) -> Response:
        try:
            caller = self._caller(request.headers.get("authorization"))
        except KvloopError as error:
            return http.error_response(error)
        if self._viewers >= self._max_viewers:
            body = error_body(503, "as many status pages are open as this router serves")
            return Response(body, 503, {"retry-after": "10"}, media_type=http.JSON)
        return StreamingResponse(
            self._watched(caller.tenant),
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
            media_type="text/event-stream",
        )

    async def _watched(self, tenant: str) -> AsyncIterator[bytes]:
        self._viewers += 1
        try:
            async with aclosing(self._feed.events(tenant)) as events:  # type: ignore[type-var]
                async for event in events:
                    yield event
        finally:
            self._viewers -= 1


async def _to_folder(request: Request) -> Response:
    return RedirectResponse("/ui/", 307)
