"""A model behind `transformers serve`, its tokens read as they come, under a deadline and through a bounded queue.

Prints how long after one piece of text the next one comes: the median, the tail, how many were late. --out writes that down.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from hypermlp import LanguageModel, ModelConfig
from hypermlp.bench.record import ResultsFile
from hypermlp.models.hf import export


def serve(folder: Path, port: int) -> subprocess.Popen[bytes]:
    program = Path(sys.executable).with_name("transformers")
    command = [str(program), "serve", "model", "--trust-remote-code", "--device", "cpu", "--port", str(port)]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    server = subprocess.Popen(command, cwd=folder, env=offline, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(600):
        if server.poll() is not None:
            break
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
            return server
        except OSError:
            time.sleep(0.5)
    server.kill()
    raise SystemExit("transformers serve did not start; pip install 'transformers[serving]'")


def pieces(port: int, tokens: int) -> Iterator[str]:
    """The answer's text as the server sends it."""
    question = {"model": "model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": tokens, "stream": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(question).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    if choice["delta"].get("content"):
                        yield choice["delta"]["content"]


def listen(port: int, tokens: int, waiting: int) -> tuple[list[float], int]:
    """When each piece was taken from the queue, and how many found it full and were dropped."""
    line: queue.Queue[str | None] = queue.Queue(waiting)
    dropped = 0

    def receive() -> None:
        nonlocal dropped
        for text in pieces(port, tokens):
            try:
                line.put_nowait(text)
            except queue.Full:
                dropped += 1
        line.put(None)

    reader = threading.Thread(target=receive, daemon=True)
    reader.start()
    taken = []
    while line.get() is not None:
        taken.append(time.perf_counter())
    reader.join()
    return taken, dropped


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--tokens", type=int, default=200, help="of each answer")
    options.add_argument("--answers", type=int, default=2)
    options.add_argument("--deadline", type=float, default=20.0, help="milliseconds from one piece to the next")
    options.add_argument("--waiting", type=int, default=8, help="pieces that may wait to be read")
    options.add_argument("--mixer", default="hyperglu")
    options.add_argument("--out", type=Path, help="a file for the figures")
    given = options.parse_args()

    config = ModelConfig(vocabulary=257, width=128, depth=4, length=256, mixer=given.mixer)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        export(LanguageModel(config), Path(folder) / "model", {"kind": "bytes"})
        server = serve(Path(folder), port)
        try:
            listen(port, 8, given.waiting)  # the first answer loads the model and compiles the kernel
            gaps, first, dropped = [], [], 0
            for _ in range(given.answers):
                begin = time.perf_counter()
                taken, lost = listen(port, given.tokens, given.waiting)
                if not taken:
                    raise SystemExit("the server sent no text")
                first.append(1e3 * (taken[0] - begin))
                gaps += [1e3 * (after - before) for before, after in pairwise(taken)]
                dropped += lost
        finally:
            server.terminate()
            server.wait(60)
    gaps.sort()
    found = {f"p{share:g}": gaps[min(len(gaps) - 1, int(len(gaps) * share / 100))] for share in (50, 99, 99.9)}
    found |= {"worst": gaps[-1], "first": max(first), "pieces": len(gaps), "dropped": dropped}
    found["late"] = sum(gap > given.deadline for gap in gaps)
    for name, value in found.items():
        print(f"{name:>8}  {value:,.2f} ms" if isinstance(value, float) else f"{name:>8}  {value:,}")
    if given.out:
        settings = {"tokens": given.tokens, "answers": given.answers, "deadline": given.deadline, "waiting": given.waiting}
        ResultsFile(given.out, "serve", settings).add({"mixer": given.mixer, **found})


if __name__ == "__main__":
    main()
