"""Run by `helm test` in the gateway's image: asks the mesh a question, without its cache, and prints the answer."""

import os
import ssl
import sys
from pathlib import Path

from kvmesh.client import SyncClient
from kvmesh.config import TlsSettings
from kvmesh.errors import KvmeshError


def main() -> int:
    given = os.environ
    authorities = given.get("ASK_CA", "")
    if authorities and not Path(authorities).is_file():
        authorities = ssl.get_default_verify_paths().cafile or authorities
    timeout_s = float(given["ASK_TIMEOUT_S"])
    try:
        with SyncClient(
            given["ASK_ADDRESS"],
            tls=TlsSettings(ca=Path(authorities)) if authorities else None,
            server_name=given.get("ASK_SERVER_NAME") or None,
        ) as client:
            stream = client.chat(
                [{"role": "user", "content": given["ASK_QUESTION"]}],
                cache="off",
                temperature=0.0,
                max_tokens=64,
                timeout_s=timeout_s,
            )
            answer = stream.result()
            usage = stream.usage
    except KvmeshError as error:
        print(f"no answer: {error.reason}: {error.message}", file=sys.stderr)
        return 1
    if not answer or usage is None:
        print("the answer is empty", file=sys.stderr)
        return 1
    print(f"{answer}\n{usage.prompt_tokens} tokens asked, {usage.completion_tokens} answered")
    return 0


if __name__ == "__main__":
    sys.exit(main())
