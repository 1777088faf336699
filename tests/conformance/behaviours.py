"""The promises that tests cite by id, one line each: what a docstring such as `C03, E01` speaks of.

`tests/test_conformance_ids.py` checks that every one of them is cited by a test, in simulation and over real processes
unless it says otherwise here, and that no test cites anything else.
"""

from __future__ import annotations

BEHAVIOURS: dict[str, str] = {
    # ---- cancellation
    "C01": "a cancelled call has cancelled every endpoint; the caller leaves after the acknowledgements, or the bound",
    "C02": "a cancel that overtakes its call, or meets its start, is not lost",
    "C03": "the cancel of a call leaves the actor and other calls alone",
    "C04": "the reason and the source of `Cancelled` travel",
    "C05": "cancelled by somebody else is `RemoteCancelled`; my own cancel is absorbed",
    "C06": "an actor that cancels itself fails its callers",
    "C07": "a cancel during spawn reaps what is half born",
    "C08": "a cancel during the set-up of `lifespan` unwinds what was reached of it",
    "C09": "a second cancel changes nothing",
    "C10": "a cancel at depth d takes d round trips, never a timeout a level",
    "C11": "a queued message that is cancelled never runs",
    "C12": "late replies are dropped and counted",
    "C13": "C code that hears no cancel: the bound, `Unresponsive`, the policy",
    "C14": "`from_thread.check_cancelled` works in threaded endpoints",
    # ---- errors
    "E01": "one rank raises: a group of one with its coordinates, the others cancelled",
    "E02": "all ranks that had started and failed are leaves",
    "E03": "groups are strict; `call_one` and `choose` raise bare",
    "E04": "`except*` by the original type; origin, notes, traceback survive",
    "E05": "strange exceptions arrive as something raised",
    "E06": "remote exits never become local ones",
    "E07": "an error of clean-up joins the first one",
    "E08": "an error while cancelling is not masked",
    "E09": "the body and an actor fail at once: both in the group",
    "E10": "a failed broadcast surfaces at the block",
    "E11": "a spawn that fails names the rank and reaps the rest",
    "E12": "foreign bytes reach nobody",
    "E13": "a reply to a vanished caller is no error",
    "E14": "the root cause is first",
    # ---- lifetime
    "Z01": "nothing of a block is left after it",
    "Z02": "nor after SIGINT, once and twice",
    "Z03": "nor after SIGTERM of the controller",
    "Z04": "nor a second after SIGKILL of the controller",
    "Z05": "nor after SIGKILL of a spawner",
    "Z06": "nor with a stopped child",
    "Z07": "nor with a child that holds the GIL in C",
    "Z08": "a child in state D is given up",
    "Z09": "a terminal's Ctrl-C reaches the controller alone",
    "Z10": "an exit is diagnosed",
    "Z11": "a clean exit prints nothing",
    "Z12": "atexit functions run on graceful paths",
    "Z13": "grace, SIGTERM, SIGKILL; who was killed for want of grace is in the group",
    "Z14": "shielded clean-up gets its grace and no more",
    "Z15": "reverse order of spawn, ranks side by side",
    # ---- deadlines
    "D01": "a deadline ends the call over there although the cancel is lost",
    "D02": "budgets are relative; clock jumps change nothing",
    "D03": "nested calls take the least of the budgets",
    "D04": "an expired call never starts",
    "D05": "shielded clean-up may outlive the budget, not the grace",
    "D06": "`fail_after` is `TooSlowError` here",
    # ---- streams and mailboxes
    "S01": "first in, first out, per sender and actor",
    "S02": "at most once",
    "S03": "a slow consumer stops a fast producer",
    "S04": "leaving a stream early cancels and joins the producers",
    "S05": "a producer's error comes after its items",
    "S06": "fan-in ends when all end; `merge=`",
    "S07": "control passes a full mailbox",
    "S08": "slots and groups bound what runs at once",
    "S09": "a slow reader of events gets one `Lagged`",
    "S10": "half-close: the sender is done, the receiver drains",
    # ---- supervision
    "R01": "one_for_one restarts the right members",
    "R02": "one_for_all does",
    "R03": "rest_for_one does",
    "R04": "more than `intensity` in `period` is `RestartLimit` with every cause",
    "R05": "a failure during a restart counts",
    "R06": "a cancel or deadline during backoff is heard at once",
    "R07": "bystanders go on",
    "R08": "frames of an old incarnation are fenced",
    "R09": "calls in flight to the dead raise `ProcDied`, unless retried",
    "R10": "permanent, transient, temporary by normal, cancelled, failed ends",
    "R11": "a normal end is no failure",
    # ---- checkpoints
    "K01": "every public async function is a checkpoint",
    "K02": "sync functions never block",
    "K03": "nobody swallows `Cancelled`",
    "K04": "C, E, D and Z hold with Trio as a guest and from asyncio",
    # ---- rules: meshes and blocks
    "M1": "nothing starts before `await` or `async with`; used once; a cancel while entering leaves nothing",
    "M2": "who adopts what",
    "M3": "how a block is left",
    "M4": "a block that does not end says what it waits for; `dump`",
    "M5": "whose coordinates",
    "M6": "empty extents and views",
    "M7": "`this_proc`, and `this_host` in a worker",
    # ---- rules: calls
    "C1": "the first failure cancels the other ranks",
    "C2": "the bound of acknowledgements, and what comes after it",
    "C3": "budgets, skew, extended deadlines",
    "C4": "slots and groups",
    "C5": "what a handle and a live actor refuse",
    "C6": "options of a call; retries",
    "C7": "`map`",
    "C8": "deadlocks: exactly one call of the cycle fails",
    # ---- rules: streams, channels, events
    "T1": "a generator endpoint: slot, window, errors",
    "T2": "ports, holders, the end of a channel",
    "T3": "`events()`",
    # ---- rules: errors
    "X1": "where groups are raised, and of which class",
    "X2": "how an exception is rebuilt",
    "X3": "who is told of a death",
    "X4": "ranks in a collective are silent: exclude the others, or make all anew",
    # ---- rules: supervision
    "P1": "whose policy decides",
    "P2": "what a policy may name",
    "P3": "failed broadcasts, units taken down on purpose",
    "P4": "the order of `RestartLimit.causes`",
    # ---- rules: processes
    "O1": "whose a spawner is",
    "O2": "what a forked process is like",
    "O3": "how a worker ends",
    "O4": "lifelines",
    "O5": "leases on one host",
    "O6": "Ctrl-C and SIGTERM",
    "O7": "output of workers",
    # ---- rules: values, simulation
    "V1": "arrays and tensors arrive writable and private",
    "V2": "what goes by value",
    "S1": "what is different in simulation",
    # ---- rules: buffers
    "N4": "a revoked buffer, or one of a process that has ended, gives no bytes; nobody waits for ever",
    # ---- figures of the studies that tests speak of
    "R6": "a stalled loop is told with its stack and is no death",
}  # fmt: skip

SIM, REAL = "sim", "real"

ELSEWHERE: dict[str, tuple[frozenset[str], str]] = {
    "C13": (frozenset({REAL}), "no simulated process has C code"),
    "C14": (frozenset({REAL}), "in simulation a threaded endpoint runs inline"),
    "D02": (frozenset({REAL}), "clocks of processes; simulated ones have theirs besides"),
    "E12": (frozenset({REAL}), "bytes of a link"),
    "K04": (frozenset({REAL}), "asyncio has no virtual clock"),
    "S1": (frozenset({SIM}), "it is about simulation"),
    **{f"Z{number:02}": (frozenset({REAL}), "about the operating system") for number in range(1, 16)},
    **{f"O{number}": (frozenset({REAL}), "about the operating system") for number in range(1, 8)},
}
"""Where an id must be cited if not on both back ends, and why."""
