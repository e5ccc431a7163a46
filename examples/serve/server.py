"""An HTTP server that batches requests of different lengths and pads them to few sizes, so that nothing is recompiled.

    pip install starlette uvicorn
    python examples/serve/server.py --port 8000
    curl -X POST localhost:8000/embed -d '{"tokens": [5, 17, 3]}'

Requests that arrive within two milliseconds of each other run as one batch. The batch and the longest request in it are
padded to the next bucket. A mask hides the padding, and airgraph pads only where it can show that results stay equal.
"""

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator

import torch
import torch.nn.functional as F
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from torch import nn

import airgraph
from airgraph.journal import TOTALS

VOCABULARY, WIDTH, HEADS, LONGEST, LARGEST_BATCH = 1000, 64, 4, 128, 8
BUCKETS = {"batch": [2, 4, LARGEST_BATCH], "seq": [16, 32, 64, LONGEST]}
WAIT = 0.002  # seconds that a request waits for others to join its batch


class Encoder(nn.Module):
    """A sentence encoder: one attention layer, one MLP, and the mean over the tokens that are not padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        weights = mask.unsqueeze(-1).to(x.dtype)
        return (x * weights).sum(1) / weights.sum(1)


class Batcher:
    """Collects waiting requests into batches and runs each batch in a worker thread."""

    def __init__(self, model: nn.Module) -> None:
        self.model = torch.compile(model, backend="airgraph", dynamic=True, options={"buckets": BUCKETS})
        self.waiting: asyncio.Queue[tuple[list[int], asyncio.Future[list[float]]]] = asyncio.Queue()
        self.batches = 0

    def run(self, requests: list[list[int]]) -> list[list[float]]:
        # PyTorch compiles a size of 1 apart from all others, so a single request runs twice rather than recompile.
        rows = max(2, len(requests))
        length = max(2, max(map(len, requests)))
        tokens, mask = torch.zeros(rows, length, dtype=torch.long), torch.zeros(rows, length, dtype=torch.bool)
        for row in range(rows):
            request = requests[min(row, len(requests) - 1)]
            tokens[row, : len(request)] = torch.tensor(request)
            mask[row, : len(request)] = True
        for tensor in (tokens, mask):
            airgraph.mark_bucket(tensor, 0, "batch")
            airgraph.mark_bucket(tensor, 1, "seq")
        with torch.inference_mode():
            return self.model(tokens, mask)[: len(requests)].tolist()

    def warm_up(self) -> None:
        """Run every pair of buckets once, before the first request."""
        for rows in BUCKETS["batch"]:
            for length in BUCKETS["seq"]:
                self.run([[1] * length] * rows)

    async def submit(self, tokens: list[int]) -> list[float]:
        answer: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        await self.waiting.put((tokens, answer))
        return await answer

    async def serve(self) -> None:
        while True:
            batch = [await self.waiting.get()]
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                while len(batch) < LARGEST_BATCH:
                    batch.append(await asyncio.wait_for(self.waiting.get(), WAIT))
            try:
                results = await asyncio.to_thread(self.run, [tokens for tokens, _ in batch])
            except Exception as error:  # every request of the batch gets the error; the server goes on
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            self.batches += 1
            for (_, answer), result in zip(batch, results):
                if not answer.done():  # the client may have hung up
                    answer.set_result(result)


def problem(body: object) -> str | None:
    """What is wrong with a request, or None."""
    tokens = body.get("tokens") if isinstance(body, dict) else None
    if not isinstance(tokens, list) or not tokens:
        return 'send {"tokens": [...]} with at least one token'
    if len(tokens) > LONGEST:
        return f"{len(tokens)} tokens; at most {LONGEST} are taken"
    if not all(isinstance(token, int) and 0 <= token < VOCABULARY for token in tokens):
        return f"tokens are whole numbers from 0 to {VOCABULARY - 1}"
    return None


def application(model: nn.Module) -> Starlette:
    batcher = Batcher(model)

    async def embed(request: Request) -> JSONResponse:
        try:
            body = await request.json()
        except ValueError:
            return JSONResponse({"error": "the body is not JSON"}, 400)
        if (wrong := problem(body)) is not None:
            return JSONResponse({"error": wrong}, 400)
        return JSONResponse({"embedding": await batcher.submit(body["tokens"])})

    async def stats(request: Request) -> JSONResponse:
        return JSONResponse({"graphs": TOTALS["graphs"], "batches": batcher.batches})

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await asyncio.to_thread(batcher.warm_up)
        worker = asyncio.create_task(batcher.serve())
        yield
        worker.cancel()

    routes = [Route("/embed", embed, methods=["POST"]), Route("/stats", stats)]
    return Starlette(routes=routes, lifespan=lifespan)


if __name__ == "__main__":
    import uvicorn

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, default=8000)
    torch.manual_seed(0)
    uvicorn.run(application(Encoder().eval()), host="127.0.0.1", port=parser.parse_args().port)
