"""A worker that misbehaves on request; speaks compare.base.worker_protocol."""

import json
import os
import signal
import sys
import time

print(json.dumps({"result": os.getpid()}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    match request["method"]:
        case "echo":
            print(json.dumps({"result": request["params"]}), flush=True)
        case "process":
            print(json.dumps({"result": os.getpid()}), flush=True)
        case "variable":
            print(json.dumps({"result": os.environ.get(request["params"]["name"])}), flush=True)
        case "large":
            print(json.dumps({"result": "x" * (8 << 20)}), flush=True)
        case "refuse":
            print(json.dumps({"error": {"kind": "skipped", "message": "no GPU here"}}), flush=True)
        case "lose":
            error = {"kind": "lost", "message": "an illegal memory access was encountered"}
            print(json.dumps({"error": error}), flush=True)
        case "exit":
            os._exit(7)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(600)
