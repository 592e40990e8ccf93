"""A stand-in for ncu, and for a worker that it watches, on a machine without a GPU.

`fake_ncu.py ncu --log-file LISTING ... PYTHON -m MODULE ROLE` runs the command and then lists what its calls would have
moved. `fake_ncu.py -m compare.workers.main ROLE` is that worker. FAKE_NCU is a folder: `calls` has a line a profiled
call, `fault` the implementation at which the worker dies, `trouble` what ncu complains of instead of listing anything,
`interrupt` is IMPLEMENTATION PROCESS TIMES BUSY: there that process gets a SIGINT, or two, and the worker is busy for
so many seconds.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(os.environ["FAKE_NCU"])
HEADER = ["ID", "Kernel Name", "dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_bytes.sum"]
READ, WRITTEN, L2 = 1000, 500, 1600  # bytes of every kernel, twice as many where caches are emptied before each


def ncu(arguments: list[str]) -> None:
    listing = Path(arguments[arguments.index("--log-file") + 1])
    cold = 2 if arguments[arguments.index("--cache-control") + 1] == "all" else 1
    (FOLDER / "calls").write_text("")
    done = subprocess.run(arguments[arguments.index("-m") - 1 :])
    trouble = FOLDER / "trouble"
    if trouble.exists():
        listing.write_text(f"==ERROR== {trouble.read_text()}\n")
        sys.exit(1)
    rows = [HEADER, ["", "", "byte", "byte", "byte"]]
    for name in (FOLDER / "calls").read_text().split():
        rows.append([str(len(rows)), name, f"{READ * cold:,}", str(WRITTEN * cold), str(L2 * cold)])
    rows = ["==PROF== Connected to process 1", *(",".join(f'"{cell}"' for cell in row) for row in rows)]
    listing.write_text("\n".join(rows) + "\n")
    sys.exit(done.returncode)


def launched(*names: str) -> None:
    with (FOLDER / "calls").open("a") as file:
        file.writelines(f"{name}\n" for name in names)


def interrupted(implementation: str) -> bool:
    interrupt = FOLDER / "interrupt"
    where, whom, times, busy = interrupt.read_text().split() if interrupt.exists() else ("", "0", "0", "0")
    if where != implementation:
        return False
    os.kill(int(whom), signal.SIGINT)
    if times == "2":
        time.sleep(1)
        os.kill(int(whom), signal.SIGINT)
    time.sleep(int(busy))
    return True


def worker() -> None:
    print(json.dumps({"result": os.getpid()}), flush=True)
    parts: dict[str, list[str]] = {}
    for line in sys.stdin:
        request = json.loads(line)
        method, params = request["method"], request["params"]
        result = None
        if method == "environment":
            result = {"timer": None, "device": "GPU"}
        elif method == "draw":
            Path(params["folder"]).mkdir(parents=True)
        elif method == "prepare":
            parts[params["id"]] = {"fwd": ["forward"], "train": ["forward", "backward"]}[params["case"]["direction"]]
            fault = FOLDER / "fault"
            if fault.exists() and fault.read_text() == params["implementation"]:
                os.abort()
            graph = FOLDER / f"{params['implementation']}.json"
            result = {"compile_s": 0.1, "graph": json.loads(graph.read_text()) if graph.exists() else None}
            if interrupted(params["implementation"]):
                result["graph"] = "x" * (1 << 20)  # more than a pipe holds
        elif method == "profile":
            for part in parts[params["id"]]:
                launched(f"xlafuse_begin_{params['mark']}_{part}", "k", "xlafuse_end")
        print(json.dumps({"result": result}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "ncu":
        ncu(sys.argv[2:])
    elif sys.argv[2] == "xlafuse.compare.measure.profiler_marks":
        launched("xlafuse_begin_probe", "xlafuse_end")
    else:
        worker()
