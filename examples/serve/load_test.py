"""A load test: starts the server on this machine, sends requests of random lengths at once, and checks every answer.

    pip install starlette uvicorn httpx
    python examples/serve/load_test.py --requests 2000 --clients 16

Every answer is compared with the model run alone in eager PyTorch, and the server must not have compiled anything after its
warm-up. Prints requests per second and the 50th and 99th percentile of the latency.
"""

import argparse
import asyncio
import random
import socket
import statistics
import threading
import time

import httpx
import torch
import uvicorn
from server import LONGEST, VOCABULARY, Encoder, application

Answer = tuple[list[int], list[float], float]  # tokens, embedding, latency in seconds


def started(server: uvicorn.Server, sock: socket.socket) -> threading.Thread:
    """The thread that the server runs in, once it has warmed up and takes requests."""
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise SystemExit("the server did not start")
        time.sleep(0.05)
    return thread


async def client(http: httpx.AsyncClient, work: list[list[int]], answers: list[Answer]) -> None:
    while work:
        tokens = work.pop()
        begin = time.perf_counter()
        reply = await http.post("/embed", json={"tokens": tokens})
        reply.raise_for_status()
        answers.append((tokens, reply.json()["embedding"], time.perf_counter() - begin))


async def load(address: str, requests: list[list[int]], clients: int) -> list[Answer]:
    answers: list[Answer] = []
    async with httpx.AsyncClient(base_url=address, timeout=60, trust_env=False) as http:
        before = (await http.get("/stats")).json()["graphs"]
        bad = await http.post("/embed", json={"tokens": [VOCABULARY]})
        assert bad.status_code == 400 and "whole numbers" in bad.json()["error"], bad.text
        await asyncio.gather(*(client(http, requests, answers) for _ in range(clients)))
        after = (await http.get("/stats")).json()
    assert after["graphs"] == before, f"{after['graphs'] - before} graphs were compiled while serving"
    print(f"{len(answers)} requests in {after['batches']} batches, nothing compiled after the warm-up")
    return answers


def main(count: int, clients: int) -> None:
    torch.manual_seed(0)
    model = Encoder().eval()
    sock = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(application(model), log_level="warning"))
    thread = started(server, sock)
    requests = [[random.randrange(VOCABULARY) for _ in range(random.randint(1, LONGEST))] for _ in range(count)]
    begin = time.perf_counter()
    try:
        answers = asyncio.run(load(f"http://127.0.0.1:{sock.getsockname()[1]}", requests, clients))
    finally:
        seconds = time.perf_counter() - begin
        server.should_exit = True
        thread.join()
    with torch.inference_mode():
        for tokens, embedding, _ in answers:
            alone = model(torch.tensor([tokens]), torch.ones(1, len(tokens), dtype=torch.bool))[0]
            torch.testing.assert_close(torch.tensor(embedding), alone, atol=1e-5, rtol=1e-4)
    percentiles = statistics.quantiles([latency for *_, latency in answers], n=100)
    latency = f"p50 {percentiles[49] * 1e3:.1f} ms, p99 {percentiles[98] * 1e3:.1f} ms"
    print(f"{count / seconds:.0f} requests/s, {latency}; every answer as eager's")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=16, help="requests in flight at a time")
    arguments = parser.parse_args()
    main(arguments.requests, arguments.clients)
