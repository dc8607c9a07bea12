"""What the peers' programs share: they run under another Python, which has numpy and the peer, and nothing of ours.

The benchmark starts `PROGRAM --page-bytes N --pages N --transport NAME`. That is the writer; it starts itself once more
as the target. Both speak lines of JSON over pipes, each behind a mark, since the libraries print what they like.
"""

import argparse
import json
import subprocess
import sys
import zlib

import numpy as np

MARK = "@json "


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--page-bytes", type=int, required=True)
    parser.add_argument("--pages", type=int, required=True)
    parser.add_argument("--transport", default="tcp")
    parser.add_argument("--target", action="store_true")
    return parser.parse_args()


def memory(args):
    """A pool of its own, every page touched; the writer's has bytes that tell pages apart."""
    seed = 2 if args.target else 1
    pool = np.random.default_rng(seed).integers(0, 256, args.page_bytes, dtype=np.uint8)
    whole = np.tile(pool, args.pages).reshape(args.pages, args.page_bytes)
    whole[:, :8] = np.arange(args.pages, dtype="<u8").view(np.uint8).reshape(args.pages, 8)
    return whole


def checksum(pool, pages):
    value = 0
    for page in pages:
        value = zlib.crc32(pool[page], value)
    return value


def say(**message):
    print(MARK + json.dumps(message), flush=True)


def told(stream):
    """The next message, None at the end."""
    for line in stream:
        if line.startswith(MARK):
            return json.loads(line[len(MARK) :])
    return None


class Target:
    """The other process, from the writer's side."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, *sys.argv, "--target"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, **message):
        self.process.stdin.write(MARK + json.dumps(message) + "\n")
        self.process.stdin.flush()

    def ask(self, **message):
        self.tell(**message)
        return self.hear()

    def hear(self):
        answer = told(self.process.stdout)
        if answer is None:
            raise SystemExit("the target is gone")
        return answer

    def close(self):
        self.process.stdin.close()
        self.process.wait(20)


def serve_writer(pool, target, move, name):
    """Serve the benchmark: {"src", "dst", "check"} → {"seconds"}. move(src, dst) → seconds."""
    say(ready=name)
    while (order := told(sys.stdin)) is not None:
        seconds = move(order["src"], order["dst"])
        if order.get("check") and target.ask(check=order["dst"])["crc"] != checksum(pool, order["src"]):
            raise SystemExit("bytes differ")
        say(seconds=seconds)
    target.close()
