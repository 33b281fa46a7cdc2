"""A program in the place of an agent: it speaks first, then answers a request a line until EOF."""

import json
import os
import sys
from dataclasses import asdict

from shoal.launch.hosts.addresses import listeners, try_reach
from shoal.launch.hosts.agent_session import PROTOCOL
from shoal.launch.hosts.host_facts import FactsRequest, collect_facts


def main() -> None:
    print(f"\nSHOAL-AGENT {PROTOCOL} 00c0ffee", flush=True)
    sockets = {}
    for line in sys.stdin:
        request = json.loads(line)
        match request.pop("do"):
            case "facts":
                answer = asdict(collect_facts(FactsRequest(**request)))
            case "listen":
                sockets = listeners(request["addresses"])
                answer = {address: one.getsockname()[1] for address, one in sockets.items()}
            case "reach":
                answer = try_reach(request["ports"])
            case "environment":
                answer = {**dict(os.environ), "cwd": os.getcwd(), "text": "ü"}
        print(json.dumps(answer, ensure_ascii=False), flush=True)
    for one in sockets.values():
        one.close()


main()
