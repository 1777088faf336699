"""A script with work for its exit: a thread, an atexit function, and an object that aborts a finalized interpreter."""

import atexit
import os
import sys
import threading
import time
from pathlib import Path

file = Path(globals().get("PATH") or sys.argv[1])


class Aborting:
    def __del__(self) -> None:
        os.abort()


def write() -> None:
    time.sleep(0.1)  # the main thread is at its end
    file.write_text("thread")


sys.modules["left"] = Aborting()  # type: ignore[assignment]
atexit.register(lambda: file.write_text(file.read_text() + ", then atexit"))
threading.Thread(target=write).start()
