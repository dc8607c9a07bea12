"""A bare grpc.aio server: the messages of the gateway and nothing behind them. Prints its address.

What a gateway of Python can reach at most. A request's max_tokens messages are built and sent one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "libs"), str(ROOT)]

import grpc.aio  # noqa: E402

from kvmesh.proto.v1 import inference_pb2 as pb  # noqa: E402


async def generate(request: pb.GenerateRequest, context: Any) -> None:
    accepted = pb.Accepted(request_id="x" * 40, model=request.model, revision="r", seed=1, prompt_tokens=16)
    await context.write(pb.GenerateResponse(event=pb.GenerateEvent(accepted=accepted)))
    for number in range(request.sampling.max_tokens):
        delta = pb.Delta(choice=0, text=" word", token_ids=[number])
        await context.write(pb.GenerateResponse(event=pb.GenerateEvent(delta=delta)))
    finished = pb.Finished(usage=pb.Usage(prompt_tokens=16, completion_tokens=request.sampling.max_tokens))
    await context.write(pb.GenerateResponse(event=pb.GenerateEvent(finished=finished)))


async def main() -> None:
    server = grpc.aio.server()
    handler = grpc.unary_stream_rpc_method_handler(
        generate,
        request_deserializer=pb.GenerateRequest.FromString,
        response_serializer=pb.GenerateResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("kvmesh.v1.Inference", {"Generate": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.install()
    asyncio.run(main())
