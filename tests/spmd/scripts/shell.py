"""A script without torch for `trimesh spmd`; its first argument names what it does."""

import json
import os
import signal
import sys
import time

rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]


def end(*_: object) -> None:
    print("saving", rank)
    sys.exit(0)


what, *rest = sys.argv[1:]
if what == "fail":
    print("begins", rank, flush=True)
    if rank == "1":
        try:
            raise LookupError("cause")
        except LookupError as error:
            raise ValueError("rank one") from error
    time.sleep(600)
elif what == "wait":
    signal.signal(signal.SIGTERM, end)
    print("ready", rank, os.getpid(), flush=True)
    time.sleep(600)
elif what == "refuse":
    signal.signal(signal.SIGTERM, lambda *_: print("refused", flush=True))
    print("ready", rank, os.getpid(), flush=True)
    while True:
        time.sleep(600)
elif what == "again":
    said = json.dumps([rank, attempt, os.environ["MASTER_PORT"], os.environ["TORCHELASTIC_RUN_ID"]])
    print(f"attempt {said}\n", end="", flush=True)  # in one write: a signal may end it at any moment
    if attempt != rest[0]:
        if rest[1:] == ["wait"]:
            time.sleep(600)
        raise ValueError("again")
elif what == "tell":
    print(json.dumps([rank, os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"], os.environ.get("TOLD"), rest]))
elif what == "many":
    for number in range(int(rest[0])):
        print(number)
