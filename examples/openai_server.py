"""Serve OpenAI's API from a pool of inference engines: completions, chat, streams.

    python examples/openai_server.py --port 8000
    curl http://127.0.0.1:8000/v1/completions -d '{"model": "tiny", "prompt": "hello", "stream": true}'

Each replica is an engine of asyncio: it batches sequences continuously, caches the state of the last prompt of a
session (`prompt_cache_key`), sleeps, and takes new weights between two steps. The model is tiny and random: its text is
noise, but everything around it is as for a large one. A client that hangs up ends its generation in the engine.

Needs torch, starlette and uvicorn.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import attrs
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import trimesh
from trimesh import MeshError, Overloaded, Restart, endpoint
from trimesh.rdma import Published
from trimesh.service import Affinity, Health, Pool, open_pool

MODEL = "tiny"
LETTERS = [chr(code) for code in range(32, 127)]
END = len(LETTERS)  # the token that ends a text
BATCH, AHEAD, CACHED = 32, 16, 256  # sequences of a step; tokens before their reader; prompts in the cache


class TinyModel(torch.nn.Module):
    """A recurrent language model of printable characters."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.width = width
        self.embed = torch.nn.Embedding(END + 1, width)
        self.cell = torch.nn.GRUCell(width, width)
        self.head = torch.nn.Linear(width, END + 1)
        self.double()  # so that the text does not depend on what else is in the batch

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Read one token of each sequence; return logits [n, letters] and states [n, width]."""
        states = self.cell(self.embed(tokens), states)
        return self.head(states), states


def tokens_of(text: str) -> list[int]:
    return [min(max(ord(letter) - 32, 0), END - 1) for letter in text]


# ---- the engine ------------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Sequence:
    """A text that is being generated."""

    most: int
    temperature: float
    stop: list[str]
    dice: torch.Generator
    state: torch.Tensor
    token: int
    text: str = ""
    letters: asyncio.Queue[str | None] = attrs.field(factory=asyncio.Queue)
    reason: str | None = None

    def add(self, logits: torch.Tensor) -> None:
        """Choose the next token."""
        if self.temperature > 0:
            chances = torch.softmax(logits / self.temperature, dim=-1)
            self.token = int(torch.multinomial(chances, 1, generator=self.dice))
        else:
            self.token = int(logits.argmax())
        if self.token == END:
            self.reason = "stop"
            return
        self.text += LETTERS[self.token]
        self.letters.put_nowait(LETTERS[self.token])
        if any(self.text.endswith(stop) for stop in self.stop):
            self.reason = "stop"
        elif len(self.text) >= self.most:
            self.reason = "length"


class Engine(trimesh.aio.Actor):
    """Generates many texts at once."""

    def __init__(self, weights: Published, step_seconds: float = 0.0) -> None:
        self.weights, self.step_seconds = weights, step_seconds
        self.version = 0
        self.model = TinyModel()
        self.running: dict[Sequence, None] = {}
        self.work, self.awake = asyncio.Event(), asyncio.Event()
        self.cache: OrderedDict[str, tuple[str, torch.Tensor]] = OrderedDict()

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        """Step sequences for as long as the actor lives."""
        await self.load()  # the newest weights, after a restart, too
        self.awake.set()
        async with asyncio.TaskGroup() as group:
            loop = group.create_task(self._loop())
            yield
            loop.cancel()

    async def _loop(self) -> None:
        """Step all sequences that have room for a token together; sequences join and leave between two steps."""
        while True:
            await self.awake.wait()
            batch = [one for one in self.running if one.letters.qsize() < AHEAD][:BATCH]
            if not batch:
                self.work.clear()
                await self.work.wait()
                continue
            tokens, states = torch.tensor([one.token for one in batch]), torch.stack([one.state for one in batch])
            logits, states = self.model(tokens, states)
            for one, row, state in zip(batch, logits, states, strict=True):
                one.state = state
                one.add(row)
                if one.reason is not None:
                    del self.running[one]
                    one.letters.put_nowait(None)
                else:  # those that have had a step go behind the others
                    del self.running[one]
                    self.running[one] = None
            await asyncio.sleep(self.step_seconds)

    @endpoint(concurrency=64, group="generate", idempotent=True)
    async def generate(
        self, prompt: str, most: int, temperature: float, stop: list[str], seed: int, key: str | None
    ) -> AsyncGenerator[tuple[str, Any], None]:
        """Yield ("prompt", (tokens, of them cached)), then ("text", letter) many times, then ("end", reason)."""
        state, cached = self._read(prompt, key)
        last = tokens_of(prompt[-1:] or " ")[0]
        one = Sequence(most, temperature, stop, torch.Generator().manual_seed(seed), state, last)
        yield "prompt", (len(prompt), cached)
        self.running[one] = None
        self.work.set()
        try:
            while (letter := await one.letters.get()) is not None:
                self.work.set()  # there is room for one more
                yield "text", letter
        finally:
            self.running.pop(one, None)  # the reader has left: the next step does without it
        yield "end", one.reason

    def _read(self, prompt: str, key: str | None) -> tuple[torch.Tensor, int]:
        """Return the state behind all but the last token of a prompt, and how many tokens were cached."""
        known, state = "", torch.zeros(self.model.width, dtype=torch.float64)
        if key is not None and key in self.cache and prompt[:-1].startswith(self.cache[key][0]):
            known, state = self.cache[key]
        for token in tokens_of(prompt[len(known) : -1]):
            state = self.model(torch.tensor([token]), state[None])[1][0]
        if key is not None:
            self.cache[key] = prompt[:-1], state
            self.cache.move_to_end(key)
            if len(self.cache) > CACHED:
                self.cache.popitem(last=False)
        return state, len(known)

    @endpoint(group="control")
    async def load(self) -> int:
        """Take the newest weights, between two steps: texts in progress go on with them."""
        async with self.weights.pin() as snapshot:
            await snapshot.read_into(self.model.state_dict())
            self.version = snapshot.version
        self.cache.clear()  # made by the weights of before
        return self.version

    @endpoint(group="control")
    async def sleep(self) -> None:
        """Stop stepping, and drop the cache; texts in progress wait."""
        self.awake.clear()
        self.cache.clear()

    @endpoint(group="control")
    async def wake(self) -> None:
        """Step again."""
        self.awake.set()

    @endpoint(group="health")
    def ping(self) -> int:
        """Return how many texts are in progress."""
        return len(self.running)


# ---- the service -----------------------------------------------------------------------------------------------------


@attrs.define
class Service:
    """Engines behind a pool, and the weights that they follow."""

    procs: Any
    engines: Any
    pool: Pool[Engine]
    weights: Published

    async def update(self, model: TinyModel) -> None:
        """Load new weights into all engines; requests wait, running ones go on."""
        await self.weights.publish(model.state_dict())
        async with self.pool.paused("keep"):
            await self.engines.load.call()

    @asynccontextmanager
    async def asleep(self) -> AsyncIterator[None]:
        """Let the engines sleep, for example while a trainer uses their GPUs."""
        async with self.pool.paused("wait"):
            await self.engines.sleep.call()
            try:
                yield
            finally:
                await self.engines.wake.call()


@asynccontextmanager
async def open_service(
    replicas: int = 2, step_seconds: float = 0.0, concurrency: int = 64, queue: int = 256
) -> AsyncIterator[Service]:
    async with AsyncExitStack() as stack:
        spawning = trimesh.aio.spawn_procs({"replica": replicas}, preload=("torch",), supervision=Restart())
        procs = await stack.enter_async_context(spawning)
        weights = await stack.enter_async_context(Published())
        torch.manual_seed(0)
        await weights.publish(TinyModel().state_dict())
        engines = await procs.spawn("engines", Engine, weights, step_seconds)
        route = Affinity(lambda prompt, *_: prompt[:32])  # equal beginnings go to one replica
        health = Health(Engine.ping, then="replace")
        opening = open_pool(engines, along="replica", route=route, concurrency=concurrency, queue=queue, health=health)
        yield Service(procs, engines, await stack.enter_async_context(opening), weights)


# ---- OpenAI's API ----------------------------------------------------------------------------------------------------


class APIError(Exception):
    """An error in OpenAI's form."""

    def __init__(self, status: int, text: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(text)
        kinds = {429: "rate_limit_error", 503: "server_error"}
        kind = kinds.get(status, "invalid_request_error")
        self.status = status
        self.body = {"error": {"message": text, "type": kind, "param": param, "code": code}}

    @classmethod
    def of(cls, error: MeshError) -> APIError:
        """Return the error for a request that the pool did not serve."""
        if isinstance(error, Overloaded):
            return cls(429, "the server is overloaded: try again later", code="rate_limit_exceeded")
        return cls(503, f"the request has failed, try again: {error}", code="engine_error")


@attrs.frozen
class Wanted:
    """A request of a client."""

    prompt: str
    most: int
    temperature: float
    stop: list[str]
    seed: int
    key: str | None
    is_stream: bool
    wants_usage: bool

    @classmethod
    def parse(cls, body: Any, *, is_chat: bool) -> Wanted:
        """Return the request in a body; raise `APIError` for a bad one."""
        if not isinstance(body, dict):
            raise APIError(400, "the body must be a JSON object")
        if body.get("model") != MODEL:
            text = f"there is no model {body.get('model')!r}, only {MODEL!r}"
            raise APIError(404, text, param="model", code="model_not_found")
        if body.get("n", 1) not in (1, None):
            raise APIError(400, f"n must be 1, got {body['n']!r}", param="n")
        prompt = _prompt_of(body.get("messages")) if is_chat else body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            [prompt] = prompt
        if not isinstance(prompt, str):
            raise APIError(400, f"prompt must be one text, got {prompt!r}", param="prompt")
        stop = body.get("stop") or []
        stop = [stop] if isinstance(stop, str) else stop
        most = body.get("max_completion_tokens") or body.get("max_tokens") or 64
        if not isinstance(most, int) or not 1 <= most <= 100_000:
            raise APIError(400, f"max_tokens must be 1 to 100000, got {most!r}", param="max_tokens")
        temperature = body.get("temperature")
        temperature = 1.0 if temperature is None else temperature
        if not isinstance(temperature, int | float) or not 0 <= temperature <= 2:
            raise APIError(400, f"temperature must be 0 to 2, got {temperature!r}", param="temperature")
        if not isinstance(stop, list) or not all(isinstance(one, str) and one for one in stop):
            raise APIError(400, f"stop must be one text or several, got {stop!r}", param="stop")
        key, seed = body.get("prompt_cache_key"), body.get("seed") or 0
        if not isinstance(key, str | None) or not isinstance(seed, int):
            raise APIError(400, "prompt_cache_key must be a text and seed a whole number")
        wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        return cls(prompt, most, float(temperature), stop, seed, key, bool(body.get("stream")), wants_usage)


def _prompt_of(messages: Any) -> str:
    if not isinstance(messages, list) or not messages:
        raise APIError(400, "messages must be a list of at least one message", param="messages")
    lines: list[str] = []
    for message in messages:
        if not isinstance(message, dict):
            raise APIError(400, f"a message must be an object, got {message!r}", param="messages")
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(str(part["text"]) for part in content if isinstance(part, dict) and "text" in part)
        lines.append(f"{message.get('role', 'user')}: {content}\n")
    return "".join(lines) + "assistant: "


@attrs.define
class Answer:
    """The text of one request, and its forms in OpenAI's API."""

    name: str
    is_chat: bool
    made: int = attrs.field(factory=lambda: int(time.time()))
    text: list[str] = attrs.field(factory=list)
    reason: str | None = None
    usage: dict[str, Any] = attrs.field(factory=dict)

    def take(self, kind: str, value: Any) -> None:
        """Add one item of the stream."""
        if kind == "prompt":
            tokens, cached = value
            self.usage = {"prompt_tokens": tokens, "prompt_tokens_details": {"cached_tokens": cached}}
        elif kind == "text":
            self.text.append(value)
        else:
            self.reason = value
            total = self.usage["prompt_tokens"] + len(self.text)
            self.usage |= {"completion_tokens": len(self.text), "total_tokens": total}

    def body(self, kind: str, choices: list[Any], **more: Any) -> dict[str, Any]:
        """Return the fields that all forms have."""
        return {"id": self.name, "object": kind, "created": self.made, "model": MODEL, "choices": choices, **more}

    def chunk(self, kind: str, value: Any) -> dict[str, Any]:
        """Return one event of a stream."""
        text = value if kind == "text" else ""
        choice: dict[str, Any] = {"index": 0, "finish_reason": self.reason, "logprobs": None}
        if not self.is_chat:
            return self.body("text_completion", [{**choice, "text": text}])
        delta = {"prompt": {"role": "assistant", "content": ""}, "text": {"content": text}}.get(kind, {})
        return self.body("chat.completion.chunk", [{**choice, "delta": delta}])

    def whole(self) -> dict[str, Any]:
        """Return the answer to a request without a stream."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": self.reason, "logprobs": None}
        text = "".join(self.text)
        if not self.is_chat:
            return self.body("text_completion", [{**choice, "text": text}], usage=self.usage)
        message = {"role": "assistant", "content": text, "refusal": None}
        return self.body("chat.completion", [{**choice, "message": message}], usage=self.usage)


class Completions:
    """An endpoint of the API, as an ASGI application: it has to see when its client hangs up."""

    _names = itertools.count()

    def __init__(self, *, is_chat: bool) -> None:
        self.is_chat = is_chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        try:
            try:
                body = await Request(scope, receive).json()
            except ValueError:
                raise APIError(400, "the body must be JSON") from None
            wanted = Wanted.parse(body, is_chat=self.is_chat)
            await while_connected(receive, self.answer(scope["app"].state.service.pool, wanted, send))
        except APIError as error:
            await JSONResponse(error.body, error.status)(scope, receive, send)

    async def answer(self, pool: Pool[Engine], wanted: Wanted, send: Send) -> None:
        """Answer by one stream of the pool."""
        answer = Answer(f"{'chatcmpl' if self.is_chat else 'cmpl'}-{next(self._names)}", self.is_chat)
        arguments = wanted.prompt, wanted.most, wanted.temperature, wanted.stop, wanted.seed, wanted.key
        chosen = pool.options(when_full="refuse", cost=float(wanted.most))
        has_begun = False
        try:
            async with AsyncExitStack() as stack:
                if wanted.key is not None:  # the replica that has the prefix
                    chosen = await stack.enter_async_context(chosen.session(wanted.key))
                items = await stack.enter_async_context(chosen.stream[Engine.generate](*arguments))
                async for kind, value in items:
                    answer.take(kind, value)
                    if wanted.is_stream:
                        if not has_begun:
                            await begin_events(send)
                            has_begun = True
                        await send_event(send, answer.chunk(kind, value))
        except MeshError as error:
            if not has_begun:
                raise APIError.of(error) from error
            await send_event(send, APIError.of(error).body)
            await send_event(send, None)
            return
        if not wanted.is_stream:
            await respond(send, answer.whole())
            return
        if wanted.wants_usage:
            await send_event(send, {**answer.chunk("usage", ""), "choices": [], "usage": answer.usage})
        await send_event(send, "[DONE]")
        await send_event(send, None)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run work for a client; cancel it when the client hangs up."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.create_task(work), asyncio.create_task(watch())
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        working.cancel()  # no effect if it is done
        await asyncio.wait([working])  # until the generation has ended
    with suppress(asyncio.CancelledError):
        await working


async def respond(send: Send, body: Any) -> None:
    raw = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": raw})


async def begin_events(send: Send) -> None:
    headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def send_event(send: Send, event: Any) -> None:
    """Send one server-sent event; None ends the response."""
    raw = b""
    if event is not None:
        raw = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
    await send({"type": "http.response.body", "body": raw, "more_body": event is not None})


async def models(_: Request) -> JSONResponse:
    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "trimesh"}
    return JSONResponse({"object": "list", "data": [model]})


def make_app(**options: Any) -> Starlette:
    """Return the application; its `state.service` has the engines while it runs."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with open_service(**options) as app.state.service:
            yield

    routes = [
        Route("/v1/models", models),
        Route("/v1/completions", Completions(is_chat=False), methods=["POST"]),
        Route("/v1/chat/completions", Completions(is_chat=True), methods=["POST"]),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


if __name__ == "__main__":
    import uvicorn

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--replicas", type=int, default=2)
    chosen = parser.parse_args()
    uvicorn.run(make_app(replicas=chosen.replicas), port=chosen.port, timeout_graceful_shutdown=5)
