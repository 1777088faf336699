"""A script without torch that does what its command line says."""

import os
import signal
import subprocess
import sys
import time

what, *rest = sys.argv[1:]
if what == "exit":
    if os.environ["RANK"] == rest[0]:
        print("the end of rank", rest[0], file=sys.stderr)
        sys.exit(int(rest[1]))
    time.sleep(600)
elif what == "signal":
    os.kill(os.getpid(), int(rest[0]))
elif what == "stay":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open(os.path.join(rest[0], os.environ["RANK"]), "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    time.sleep(600)
elif what == "recorded":
    import json

    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": {"message": "short", "extraInfo": {"py_callstack": "the recorded traceback"}}}, file)
    sys.exit(1)
