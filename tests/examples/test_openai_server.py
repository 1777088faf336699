"""examples/openai_server.py with OpenAI's own client, with clients that hang up, under updates and kills."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.patience import HANG_SECONDS

torch = pytest.importorskip("torch")
openai = pytest.importorskip("openai")
uvicorn = pytest.importorskip("uvicorn")

pytestmark = [pytest.mark.real, pytest.mark.torch, pytest.mark.slow]

ENDLESS = 100_000
"""Tokens that no test waits for."""


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    folder = str(Path(__file__).parents[2] / "examples")
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module("openai_server")
    finally:
        sys.path.remove(folder)
        sys.modules.pop("openai_server", None)


@asynccontextmanager
async def served(example: ModuleType, **options: Any) -> AsyncIterator[tuple[Any, Any]]:
    """Run the server in this loop; yield its service and a client."""
    app = example.make_app(**options)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="on"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
        if serving.done():
            await serving
    port = server.servers[0].sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}/v1"
    try:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=HANG_SECONDS) as client:
            yield app.state.service, client
    finally:
        server.should_exit = True
        await serving


async def until(condition: Callable[[], Any]) -> None:
    """Wait for what no event tells."""
    async with asyncio.timeout(HANG_SECONDS):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def in_progress(service: Any) -> int:
    """Return how many texts the engines generate."""
    return sum((await service.engines.ping.call()).values())


def is_balanced(found: Any) -> bool:
    over = found.succeeded + found.failed + found.cancelled + found.refused
    return found.made == over and not (found.running or found.reading or found.queued or found.arriving)


def test_forms_of_the_api(example: ModuleType) -> None:
    """Y14, K04: whole and streamed answers of both endpoints, usage, stops, errors in OpenAI's form."""

    async def main() -> None:
        async with served(example) as (service, client):
            assert [model.id async for model in client.models.list()] == ["tiny"]
            asked: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 20, "temperature": 0}
            whole = await client.completions.create(**asked)
            assert (len(whole.choices[0].text), whole.choices[0].finish_reason) == (20, "length")
            assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (5, 20, 25)
            events = await client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
            *chunks, last = [event async for event in events]
            assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
            assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "length"]
            assert (last.choices, last.usage.completion_tokens) == ([], 20)
            stop = whole.choices[0].text[4:7]
            stopped = await client.completions.create(**asked, stop=stop)
            assert stopped.choices[0].finish_reason == "stop"
            assert stopped.choices[0].text == whole.choices[0].text[: whole.choices[0].text.index(stop) + 3]

            said: dict[str, Any] = {
                "model": "tiny",
                "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
                "max_completion_tokens": 9,
                "seed": 3,
            }
            chat = await client.chat.completions.create(**said)
            deltas = [
                event.choices[0].delta async for event in await client.chat.completions.create(**said, stream=True)
            ]
            assert deltas[0].role == "assistant"
            assert "".join(delta.content or "" for delta in deltas) == chat.choices[0].message.content

            for error, bad in (
                (openai.NotFoundError, {"model": "huge"}),
                (openai.BadRequestError, {"prompt": ["a", "b"]}),
                (openai.BadRequestError, {"max_tokens": -1}),
                (openai.BadRequestError, {"n": 2}),
                (openai.BadRequestError, {"stop": [1]}),
                (openai.BadRequestError, {"temperature": 9}),
                (openai.BadRequestError, {"seed": "x"}),
            ):
                with pytest.raises(error) as caught:
                    await client.completions.create(**asked | bad)
                assert caught.value.body["type"] == "invalid_request_error"
            with pytest.raises(openai.BadRequestError, match="a message must be an object"):
                await client.chat.completions.create(**said | {"messages": ["hi"]})
            found = service.pool.statistics()
            assert (found.made, found.succeeded) == (5, 5)

    asyncio.run(main())


def test_batches_sessions_weights_and_sleep(example: ModuleType) -> None:
    """Y4, Y5, Y14: many texts at once are those of one at a time; weights change below a text in progress."""

    async def main() -> None:
        async with served(example, step_seconds=0.001) as (service, client):

            async def text(prompt: str, **extra: Any) -> Any:
                return await client.completions.create(
                    model="tiny", prompt=prompt, max_tokens=30, temperature=0, extra_body=extra
                )

            prompts = [f"prompt {number}" for number in range(12)]
            together = await asyncio.gather(*[text(prompt) for prompt in prompts])
            alone = [await text(prompt) for prompt in prompts[:3]]
            assert [one.choices[0].text for one in alone] == [one.choices[0].text for one in together[:3]]

            first = await text("a long beginning", prompt_cache_key="chat-1")
            turn = f"a long beginning{first.choices[0].text}, and on"
            second = await text(turn, prompt_cache_key="chat-1")
            assert first.usage.prompt_tokens_details.cached_tokens == 0
            assert second.usage.prompt_tokens_details.cached_tokens == len("a long beginning") - 1
            assert second.choices[0].text == (await text(turn)).choices[0].text

            model = example.TinyModel()
            torch.nn.init.zeros_(model.head.weight)
            torch.nn.init.zeros_(model.head.bias)
            events = await client.completions.create(
                model="tiny", prompt="x", max_tokens=ENDLESS, temperature=0, stream=True
            )
            letters: list[str] = []
            async for event in events:
                letters.append(event.choices[0].text)
                if len(letters) == 5:
                    await service.update(model)
                if letters[-20:] == [" "] * 20:  # that of the first token
                    break
            await events.close()
            assert any(letter.strip() for letter in letters[:6])
            third = await text(turn, prompt_cache_key="chat-1")
            assert (third.choices[0].text, third.usage.prompt_tokens_details.cached_tokens) == (" " * 30, 0)

            async with service.asleep():
                asleep = asyncio.create_task(text("while they sleep"))
                await until(lambda: _is_queued(service))
            assert (await asleep).choices[0].text == " " * 30

    asyncio.run(main())


async def _is_queued(service: Any) -> bool:
    return bool(service.pool.statistics().queued)


def test_client_that_hangs_up_ends_its_generation(example: ModuleType) -> None:
    """Y16: one that streams, one that waits, and one whose socket is reset."""
    asked: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": ENDLESS, "temperature": 0}
    asked["stop"] = ["no letter is this"]

    async def main() -> None:
        async with served(example, step_seconds=0.001) as (service, client):

            async def is_running() -> bool:
                return await in_progress(service) == 1

            async def is_idle() -> bool:
                return await in_progress(service) == 0 and is_balanced(service.pool.statistics())

            events = await client.completions.create(**asked, stream=True)
            await anext(events)
            await until(is_running)
            await events.close()
            await until(is_idle)
            assert service.pool.statistics().cancelled == 1

            waiting = asyncio.create_task(client.completions.create(**asked))
            await until(is_running)
            waiting.cancel()
            await until(is_idle)
            assert service.pool.statistics().cancelled == 2

            reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
            body = json.dumps({**asked, "stream": True}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            await until(is_running)
            writer.transport.abort()
            await until(is_idle)
            assert service.pool.statistics().cancelled == 3

    asyncio.run(main())


def test_each_of_many_clients_has_one_outcome(example: ModuleType) -> None:
    """Y14, Y15, Y16: 64 stream while weights change, some hang up, and a replica is killed."""

    async def main() -> None:
        async with served(example, step_seconds=0.002, concurrency=32) as (service, client):
            outcomes: Counter[str] = Counter()

            async def read(number: int) -> None:
                try:
                    events = await client.completions.create(
                        model="tiny", prompt=f"{number} asks", max_tokens=60, temperature=0, stream=True
                    )
                    reasons = []
                    async for event in events:
                        reasons.append(event.choices[0].finish_reason)
                        if number % 8 == 0 and len(reasons) == 10:
                            await events.close()
                            outcomes["left"] += 1
                            return
                    outcomes["whole" if reasons[-1] in ("length", "stop") else "cut"] += 1
                except openai.APIError as error:
                    outcomes["error" if "engine_error" in str(error.body) else "other"] += 1

            async def is_busy() -> bool:
                return await in_progress(service) >= 40

            async def is_over() -> bool:
                return is_balanced(service.pool.statistics())

            async with asyncio.TaskGroup() as group:
                await service.engines.sleep.call()  # no text ends before many have begun
                for number in range(64):
                    group.create_task(read(number))
                await until(is_busy)
                await service.engines.wake.call()
                await service.update(example.TinyModel())
                await service.procs.kill([{"replica": 0}])
            assert outcomes.total() == 64
            assert outcomes["cut"] == outcomes["other"] == 0
            assert outcomes["left"] <= 8
            await until(is_over)
            found = service.pool.statistics()
            assert found.made == 64
            assert found.succeeded >= outcomes["whole"]
            assert found.failed == outcomes["error"]
            after = await client.completions.create(model="tiny", prompt="after", max_tokens=3, temperature=0)
            assert after.choices[0].finish_reason in ("length", "stop")

    asyncio.run(main())


def test_full_server_refuses_in_the_form_of_openai(example: ModuleType) -> None:
    """Y3."""

    async def main() -> None:
        async with served(example, replicas=1, step_seconds=0.001, concurrency=1, queue=1) as (service, client):

            async def ask() -> Any:
                return await client.completions.create(
                    model="tiny", prompt="x", max_tokens=ENDLESS, temperature=0, stream=True
                )

            first = await ask()
            second = asyncio.create_task(ask())
            await until(lambda: _is_queued(service))
            with pytest.raises(openai.RateLimitError, match="overloaded"):
                await ask()
            await first.close()
            await (await second).close()

    asyncio.run(main())
